"""EAGLE heads as drafts: what a head reads of the text comes with the target's features, what it drafts with its own outputs.

A head's law after drafted tokens therefore depends on where the round began. It never keeps what it read of a tree: accepted tokens
are read again with the target's features at the next round.
"""

from __future__ import annotations

import torch

from runtime.drafts.eagle_head import EagleHead
from runtime.models import CHUNK, CausalModel, view_of
from runtime.shortlists import Beam, Shortlists, States, Support


class Features:
    """The target's hidden states of the text so far, kept while a head drafts: [capacity, width], row p of token p."""

    def __init__(self, target: CausalModel) -> None:
        self.target = target
        self.rows = torch.zeros(0, 0, device=target.device, dtype=target.dtype)
        self.count = 0

    def begin(self, capacity: int, first: torch.Tensor) -> None:
        """Starts with the features of the first tokens, [n, width]."""
        if self.rows.shape[0] < capacity or self.rows.shape[1] != first.shape[1]:
            self.rows = first.new_zeros(capacity, first.shape[1])
        self.rows[: first.shape[0]] = first
        self.count = first.shape[0]

    def put(self, at: int, rows: torch.Tensor) -> None:
        """Features of tokens ``at ..``."""
        self.rows[at : at + rows.shape[0]] = rows
        self.count = at + rows.shape[0]

    def of(self, head: EagleHead, start: int, stop: int) -> torch.Tensor:
        """What ``head`` reads of tokens ``start .. stop - 1``: [stop - start, feature_size]."""
        return self.rows[start:stop, columns(self.target, head)]


def columns(target: CausalModel, head: EagleHead) -> torch.Tensor:
    """Where the head's taps stand among the target's, int64 [feature_size]."""
    width = target.hidden_size
    at = [target.taps.index(tap) * width for tap in head.taps]
    return torch.cat([torch.arange(a, a + width) for a in at]).to(target.device)


class HeadDraft:
    """A head over its slot cache, token p in slot p (slot 0 stays empty)."""

    def __init__(self, head: EagleHead, features: Features) -> None:
        self.head, self.features = head, features
        self.name = head.name
        self._read = 1
        self._states = States()

    def begin(self, prompt: list[int], capacity: int) -> None:
        """Reads the text but for its last token; the features of all of it but the last token must be there."""
        self.head.reserve(capacity)
        self._read = 1
        self._states.clear()
        self._catch_up(prompt, len(prompt) - 1)

    def _catch_up(self, text: list[int], stop: int) -> None:
        """Reads tokens up to ``stop`` (excluded), without logits."""
        while self._read < stop:
            end = min(stop, self._read + CHUNK)
            ids = torch.tensor(text[self._read : end], device=self.head.device)
            out = self.head.read(ids, self.features.of(self.head, self._read - 1, end - 1), self._read)
            self._read = end
            self._states.put(end - 1, out[-1:])

    def lag(self, text: list[int]) -> int:
        """Tokens of ``text`` not read yet."""
        return len(text) - self._read

    def rewind(self, length: int) -> None:
        """Forgets what was read beyond the first ``length`` tokens of the text."""
        self._read = max(1, min(self._read, length))
        self._states.forget_from(length)

    def reader(self, text: list[int], shortlists: Shortlists | None = None) -> HeadReader:
        """Passes over a tree that grows from the end of ``text``; with ``shortlists`` their logits are of shortlisted tokens alone."""
        if (
            shortlists is not None
            and shortlists.routed
            and self._read == len(text) - 1 > 1
            and self._states.at(len(text) - 2) is None
        ):
            self._read -= 1  # rounds without a router do not keep states: that token is read again
        return HeadReader(self, text, shortlists)

    def commit_tree(self, length_before: int, places: list[int], emitted: list[int]) -> int:
        """Nothing read for the tree is kept."""
        self._read = min(self._read, length_before)
        return 0


class CanonicalPasses:
    """A head's canonical passes after the first tokens of one text: functions of these and of what is drafted after them, alone. The pass
    of the target, the dearest part, is made once for all that follow the same tokens, as the near ties of one round do."""

    def __init__(self, target: CausalModel, head: EagleHead, text: list[int]) -> None:
        self.target, self.head, self.text = target, head, text
        self._read = 0
        self._features = torch.zeros(0)

    def output(self, length: int, path: list[int]) -> torch.Tensor:
        """The output [1, hidden_size] after ``length`` tokens (two or more) of the text and a drafted ``path``."""
        return self.head.canonical_output(self.text[:length], self._of(length), path)

    def law(self, length: int, path: list[int]) -> torch.Tensor:
        """Float32 logits [vocab] after the same."""
        return self.head.canonical(self.text[:length], self._of(length), path)

    def _of(self, length: int) -> torch.Tensor:
        if self._read != length:
            self._features = self.target.canonical_features(self.text[: length - 1], self.head.taps)
            self._read = length
        return self._features


class HeadReader:
    """A head's passes over one tree (:class:`runtime.tree_drafts.Reader`)."""

    def __init__(self, draft: HeadDraft, text: list[int], shortlists: Shortlists | None = None) -> None:
        self.draft, self.head, self.text = draft, draft.head, text
        self.device, self.length = draft.head.device, len(text)
        self.ids: torch.Tensor | None = None
        self._shortlists = shortlists
        self._beam = Beam()
        self._placed = 0
        self._mask: torch.Tensor | None = None
        self._hidden = torch.zeros(0)
        self._canonical = CanonicalPasses(draft.features.target, self.head, text)

    def root(self) -> torch.Tensor:
        draft, head = self.draft, self.head
        at = draft._read
        ids = torch.tensor(self.text[at:], device=self.device)
        rows, shortlists = draft.features.of(head, at - 1, self.length - 1), self._shortlists
        draft._read = self.length
        if shortlists is None:
            logits, out = head.chain(ids, rows, at, logits=1)
            self._hidden = out[-1:]
            return logits
        support = self._shortlisted_root(shortlists, ids, rows, at)
        self.ids = support.ids
        last = head.state(self._hidden)
        self._beam.begin(last)
        return shortlists.logits(last, support)

    def _shortlisted_root(self, shortlists: Shortlists, ids: torch.Tensor, rows: torch.Tensor, at: int) -> Support:
        """Reads ``ids`` at ``at ..`` with their features ``rows``; the first shortlist."""
        head, kept = self.head, self.draft._states

        def read() -> None:
            out = head.chain(ids, rows, at)[1]
            self._hidden = out[-1:]
            if shortlists.routed:
                kept.put(at, out)

        def before() -> torch.Tensor | None:
            state = kept.at(self.length - 2) if shortlists.routed else None
            return None if state is None else head.state(state)

        if len(ids) > 1:  # the token before the last is read in this very pass, which the router must wait for
            read()
            return shortlists.of(0, ids[-1:], before(), lambda _: self._previous([]))
        return shortlists.beside(read, 0, ids, before(), lambda _: self._previous([]))[1]

    def _previous(self, path: list[int]) -> torch.Tensor | None:
        """What the output matrix read before the last token of the text and a drafted ``path``, by a canonical pass, [1, hidden_size];
        None where the head read nothing before."""
        read, path = (self.length, path[:-1]) if path else (self.length - 1, path)
        return None if read < 2 else self.head.state(self._canonical.output(read, path))

    def level(
        self, tokens: torch.Tensor, parents: torch.Tensor | None, depth: int, exists: torch.Tensor | None = None
    ) -> torch.Tensor:
        n, first = tokens.shape[0], self.length + self._placed
        slots = torch.arange(first, first + n, device=self.device)
        view = min(self.head.cache.capacity, view_of(first + n))
        mask = torch.zeros(n, view, dtype=torch.bool, device=self.device)
        if parents is None or self._mask is None:
            mask[:, 1 : self.length] = True
            hidden = self._hidden.expand(n, -1)
        else:
            mask[:, : self._mask.shape[1]] = self._mask[parents]
            hidden = self._hidden[parents]
        mask[torch.arange(n, device=self.device), slots] = True
        self._mask = mask
        self._placed += n
        positions = torch.full((n,), self.length + depth - 1, dtype=torch.int64, device=self.device)
        shortlists = self._shortlists
        if shortlists is None:
            logits, self._hidden = self.head.scattered(tokens, hidden, positions, slots, mask)
            return logits

        def read() -> torch.Tensor:
            self._hidden = self.head.scattered_outputs(tokens, hidden, positions, slots, mask)
            return self.head.state(self._hidden)

        before = self._beam.add(tokens, parents)
        states, support = shortlists.beside(read, depth, tokens, before, lambda i: self._previous(self._beam.path(i)), exists)
        self._beam.read(states)
        self.ids = support.ids
        return shortlists.logits(states, support)

    def canonical(self, path: list[int]) -> torch.Tensor:
        logits = self._canonical.law(self.length, path)
        return logits if self.ids is None else logits.index_select(0, self.ids)

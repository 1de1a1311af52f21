"""EAGLE heads as drafts: what a head reads of the text comes with the target's features, what it
drafts with its own outputs.

A head's distribution after drafted tokens therefore depends on where the round began, and all it
drafts are trees, chains those of width 1. It never keeps what it read of a tree: accepted tokens
are read again with the target's features at the next round."""

from __future__ import annotations

import torch
from torch import Tensor

from spectune.runtime.drafts.eagle_head import EagleHead
from spectune.runtime.drafts.protocol import DraftContext, Drafted
from spectune.runtime.drafts.tree_reader import Places, TreeReader, propose_tree
from spectune.runtime.models import CHUNK, CausalModel
from spectune.runtime.shortlists import RecentStates, Shortlists
from spectune.runtime.trees.draft import GrownTree


class Features:
    """The target's hidden states of a text, while a head drafts: [capacity, width], row p of token
    p. ``count`` rows are there; none while no head drafts (``kept`` False)."""

    def __init__(self, target: CausalModel) -> None:
        self.target = target
        self.rows = torch.zeros(0, 0, device=target.device, dtype=target.dtype)
        self.count = 0
        self.kept = False

    def begin(self, capacity: int, read: int) -> None:
        """Starts with those of the ``read`` tokens that the target has just read."""
        target = self.target
        shape = capacity, len(target.taps) * target.hidden_size
        if self.rows.shape[0] < capacity or self.rows.shape[1] != shape[1]:
            self.rows = torch.zeros(shape, device=target.device, dtype=target.dtype)
        if read:
            self.rows[:read] = target.tapped
        self.count, self.kept = read, True

    def catch_up(self, text: list[int], capacity: int) -> None:
        """Where a head takes over in the middle of a text whose features were not kept, the target
        reads all but its last token again."""
        if len(text) > 1 and (not self.kept or self.count < len(text) - 1):
            self.target.read(torch.tensor(text[:-1], device=self.target.device), 0)
            self.begin(capacity, len(text) - 1)

    def put(self, at: int, path: list[int]) -> None:
        """Keeps those of tokens ``at ..`` from the target's last pass: of the root and the nodes
        ``path``."""
        if self.kept:
            rows = self.target.tapped[[0, *(node + 1 for node in path)]]
            self.rows[at : at + len(rows)] = rows
            self.count = at + len(rows)


def columns(target: CausalModel, head: EagleHead) -> Tensor:
    """Where the head's taps stand among the target's, int64 [feature_size]."""
    width = target.hidden_size
    at = [target.taps.index(tap) * width for tap in head.taps]
    return torch.cat([torch.arange(a, a + width) for a in at]).to(target.device)


class EagleDraft:
    """A head over its slot cache, token p in slot p (slot 0 stays empty)."""

    reads_features = True

    def __init__(self, head: EagleHead, features: Features) -> None:
        self.head, self.features, self.columns = head, features, columns(features.target, head)
        self._read = 1
        self._states = RecentStates()

    def begin(self, text: list[int], capacity: int) -> None:
        self.features.catch_up(text, capacity)
        self.head.reserve(capacity)
        self._read = 1
        self._states.clear()
        while self._read < len(text) - 1:
            end = min(len(text) - 1, self._read + CHUNK)
            ids = torch.tensor(text[self._read : end], device=self.head.device)
            features = self.features.rows[self._read - 1 : end - 1, self.columns]
            out = self.head.chain(ids, self._read, logits=0, hidden=features, replays=False)[1]
            self._read = end
            self._states.put(end - 1, out[-1:])

    def propose(self, text: list[int], depth: int, limit: int, context: DraftContext) -> Drafted:
        if len(text) < 2:  # there is nothing to read before the second token
            return Drafted(0, 0, len(text) - self._read, [], GrownTree())
        routed = context.shortlists is not None and context.shortlists.routed
        if routed and self._read == len(text) - 1 > 1 and self._states.get(len(text) - 2) is None:
            self._read -= 1  # rounds without a router do not keep states: that token is read again
        reader, lag = EagleReader(self, text, context.shortlists), len(text) - self._read
        return propose_tree(reader, depth, limit, lag, context)

    def commit(self, length: int, drafted: Drafted, path: list[int]) -> None:
        self._read = min(self._read, length)


class EagleReader(TreeReader):
    """A head's passes over one tree."""

    def __init__(self, draft: EagleDraft, text: list[int], shortlists: Shortlists | None) -> None:
        super().__init__(draft.head, text, shortlists)
        self.draft = draft

    def root(self) -> Tensor:
        draft, head, at = self.draft, self.draft.head, self.draft._read
        ids = torch.tensor(self.text[at:], device=self.device)
        features = draft.features.rows[at - 1 : self.length - 1, draft.columns]
        shortlists = self._shortlists
        draft._read = self.length
        if shortlists is None:
            logits, out = head.chain(ids, at, logits=1, hidden=features)
            self.hidden = out[-1:]
            return logits
        out = head.chain(ids, at, logits=0, hidden=features)[1]
        self.hidden, before = out[-1:], None
        if shortlists.routed:
            draft._states.put(at, out)
            before = draft._states.get(self.length - 2)
        previous = None if before is None else head.state(before)
        support = shortlists.select(0, ids[-1:], previous)
        return self._listed(head.state(self.hidden), support)

    def _read(
        self, tokens: Tensor, parents: Tensor | None, at: Places, logits: int | None
    ) -> tuple[Tensor, Tensor]:
        fed = self.hidden.expand(len(tokens), -1) if parents is None else self.hidden[parents]
        rows, self.hidden = self.draft.head.run(
            tokens, *at, logits=logits, hidden=fed, recurrent=True
        )
        return rows, self.hidden

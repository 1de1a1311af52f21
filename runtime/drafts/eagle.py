"""EAGLE heads as drafts: what a head reads of the text comes with the target's features, what it
drafts with its own outputs.

A head's distribution after drafted tokens therefore depends on where the round began, and all it
drafts are trees, chains those of width 1. It never keeps what it read of a tree: accepted tokens
are read again with the target's features at the next round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectune.runtime.cache import PassTokens
from spectune.runtime.drafts.eagle_head import EagleHead
from spectune.runtime.drafts.protocol import Drafted, DraftRequest
from spectune.runtime.drafts.tree_reader import TreeReader, propose_trees
from spectune.runtime.models import CHUNK, CausalModel
from spectune.runtime.shortlists import RecentStates
from spectune.runtime.trees.draft import GrownTree


class Features:
    """The target's hidden states of one text, of at most ``capacity`` tokens in the extent that
    begins at ``base``, while a head drafts: [capacity, width], row p of token p. ``count`` rows are
    there; none while no head drafts (``kept`` False)."""

    def __init__(self, target: CausalModel, base: int, capacity: int) -> None:
        self.target, self.base, self.capacity = target, base, capacity
        self.rows = torch.zeros(0, 0, device=target.device, dtype=target.dtype)
        self.count = 0
        self.kept = False

    def begin(self) -> None:
        """Keeps those of the text from its beginning on."""
        target = self.target
        shape = self.capacity, len(target.taps) * target.hidden_size
        self.rows = torch.zeros(shape, device=target.device, dtype=target.dtype)
        self.count, self.kept = 0, True

    def catch_up(self, text: list[int]) -> None:
        """Where a head takes over in the middle of a text whose features were not kept, the target
        reads all but its last token again."""
        if self.kept and self.count >= len(text) - 1:
            return
        self.begin()
        if len(text) > 1:
            ids = torch.tensor(text[:-1], device=self.target.device)
            self.target.read(ids, 0, base=self.base)
            self.put(0, self.target.tapped)

    def put(self, at: int, states: Tensor) -> None:
        """Keeps those of tokens ``at ..``, [n, width]."""
        if self.kept:
            self.count = at + len(states)
            self.rows[at : self.count] = states


def columns(target: CausalModel, head: EagleHead) -> Tensor:
    """Where the head's taps stand among the target's, int64 [feature_size]."""
    width = target.hidden_size
    at = [target.taps.index(tap) * width for tap in head.taps]
    return torch.cat([torch.arange(a, a + width) for a in at]).to(target.device)


@dataclass(eq=False)
class EagleReading:
    """What a head has read of one request: the tokens up to ``read``, in the extent that begins at
    ``base``, slot 0 of which stays empty."""

    base: int
    features: Features
    read: int = 1
    states: RecentStates = field(default_factory=RecentStates)


class EagleDraft:
    """A head over its slot cache, token p in slot p of its request's extent."""

    reads_features = True

    def __init__(self, head: EagleHead, target: CausalModel) -> None:
        self.head = head
        self.columns = None if head.taps == target.taps else columns(target, head)
        """Which of the features that are kept the head reads; None: all."""

    def begin(self, base: int, features: Features) -> EagleReading:
        return EagleReading(base, features)

    def catch_up(self, reading: EagleReading, text: list[int]) -> None:
        reading.features.catch_up(text)
        while reading.read < len(text) - 1:
            end = min(len(text) - 1, reading.read + CHUNK)
            ids = torch.tensor(text[reading.read : end], device=self.head.device)
            out = self.head.chain(
                ids,
                reading.read,
                logits=0,
                hidden=self.features(reading, end),
                base=reading.base,
                replays=False,
            )[1]
            reading.read = end
            reading.states.put(end - 1, out[-1:])

    def features(self, reading: EagleReading, end: int) -> Tensor:
        """The target's features that the head reads beside the tokens up to ``end``."""
        rows = reading.features.rows[reading.read - 1 : end - 1]
        return rows if self.columns is None else rows[:, self.columns]

    def propose(self, asked: Sequence[DraftRequest]) -> list[Drafted]:
        drafted = dict[int, Drafted]()
        groups = dict[int, list[int]]()
        for n, each in enumerate(asked):
            reading, length = each.reading, len(each.text)
            if length < 2:  # there is nothing to read before the second token
                drafted[n] = Drafted(0, 0, length - reading.read, [], GrownTree())
                continue
            shortlists = each.context.shortlists
            routed = shortlists is not None and shortlists.routed
            if routed and reading.read == length - 1 > 1 and reading.states.get(length - 2) is None:
                # Rounds without a router do not keep states: that token is read again.
                reading.read -= 1
            groups.setdefault(id(shortlists), []).append(n)
        for members in groups.values():
            made = propose_trees([EagleReader(self, asked[n]) for n in members])
            drafted |= dict(zip(members, made, strict=True))
        return [drafted[n] for n in range(len(asked))]

    def commit(self, reading: EagleReading, length: int, drafted: Drafted, path: list[int]) -> None:
        reading.read = min(reading.read, length)


class EagleReader(TreeReader):
    """A head's passes over one tree."""

    def __init__(self, draft: EagleDraft, asked: DraftRequest) -> None:
        super().__init__(draft.head, asked, asked.reading.base)
        self.draft, self.lag = draft, self.length - asked.reading.read

    def root(self) -> PassTokens:
        reading, at = self.asked.reading, self.asked.reading.read
        ids = self.model.ids(self.text[at:])
        fed = self.draft.features(reading, self.length)
        reading.read = self.length
        return self.draft.head.following(ids, at, base=self.base, hidden=fed)

    def fed(self, n: int, parents: Tensor | None) -> Tensor:
        return self.hidden.expand(n, -1) if parents is None else self.hidden[parents]

    def keep(self, states: Tensor, tokens: PassTokens, *, root: bool) -> None:
        self.hidden = states[-1:] if root else states
        if root and self.shortlists is not None and self.shortlists.routed:
            reading, head = self.asked.reading, self.draft.head
            reading.states.put(self.length - len(tokens.ids), states)
            before = reading.states.get(self.length - 2)
            self.last = None if before is None else head.state(before)

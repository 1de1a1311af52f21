"""Prompt lookup: a draft without a model that proposes what followed the same tokens earlier."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from spectune.runtime.drafts.protocol import Drafted, DraftRequest

if TYPE_CHECKING:
    from spectune.runtime.drafts.eagle import Features

LONGEST: Final = 3
"""Tokens of the longest n-gram that is looked up."""


class NgramIndex:
    """Where each n-gram of a growing token sequence was last continued.

    A proposal is a function of the sequence alone: the token after the most recent earlier
    occurrence of its longest suffix of up to :data:`LONGEST` tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: MutableMapping[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens; each becomes the continuation of the n-grams that end before it."""
        for token in tokens:
            for n in range(1, min(LONGEST, len(self.tokens)) + 1):
                self._next[tuple(self.tokens[-n:])] = token
            self.tokens.append(token)

    def propose(self) -> int | None:
        """The next token, or None when no suffix occurred before."""
        for n in range(min(LONGEST, len(self.tokens)), 0, -1):
            token = self._next.get(tuple(self.tokens[-n:]))
            if token is not None:
                return token
        return None

    def continuation(self, count: int) -> list[int]:
        """At most ``count`` proposals, each after those before it."""
        ahead = NgramIndex()
        tokens: list[int] = []
        ahead.tokens, ahead._next = self.tokens[-LONGEST:], ChainMap({}, self._next)
        while len(tokens) < count and (token := ahead.propose()) is not None:
            ahead.extend([token])
            tokens.append(token)
        return tokens


@dataclass(eq=False)
class NgramReading:
    """A request's index, and the tokens that count as read."""

    index: NgramIndex = field(default_factory=NgramIndex)
    read: int = 0


class NgramDraft:
    """Prompt lookup as draft. A proposal counts as certain: q = 1, entropy 0."""

    reads_features = False

    def begin(self, base: int, features: Features) -> NgramReading:
        return NgramReading()

    def catch_up(self, reading: NgramReading, text: list[int]) -> None:
        reading.index.extend(text[len(reading.index.tokens) :])
        reading.read = len(text) - 1

    def propose(self, asked: Sequence[DraftRequest]) -> list[Drafted]:
        proposals = []
        for each in asked:
            reading, text = each.reading, each.text
            reading.index.extend(text[len(reading.index.tokens) :])
            tokens = reading.index.continuation(each.depth)
            steps = min(each.depth, len(tokens) + 1)  # the last may have found nothing
            proposals.append(Drafted(len(tokens), steps, len(text) - reading.read, tokens))
        return proposals

    def commit(self, reading: NgramReading, length: int, drafted: Drafted, path: list[int]) -> None:
        # Reading costs nothing here; the lag is counted as for a model so that every draft's rounds
        # look alike.
        reading.read = length + min(len(path), drafted.steps - 1)

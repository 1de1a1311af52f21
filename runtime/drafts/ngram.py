"""Prompt lookup: a draft without a model that proposes what followed the same tokens earlier."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, MutableMapping
from typing import Final

from spectune.runtime.drafts.protocol import DraftContext, Drafted

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


class NgramDraft:
    """Prompt lookup as draft. A proposal counts as certain: q = 1, entropy 0."""

    reads_features = False

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._read = 0

    def begin(self, text: list[int], capacity: int) -> None:
        self._index = NgramIndex()
        self._index.extend(text)
        self._read = len(text) - 1

    def propose(self, text: list[int], depth: int, limit: int, context: DraftContext) -> Drafted:
        self._index.extend(text[len(self._index.tokens) :])
        tokens = self._index.continuation(depth)
        steps = min(depth, len(tokens) + 1)  # the last may have found nothing
        return Drafted(len(tokens), steps, len(text) - self._read, tokens)

    def commit(self, length: int, drafted: Drafted, path: list[int]) -> None:
        # Reading costs nothing here; the lag is counted as for a model so that every draft's rounds
        # look alike.
        self._read = length + min(len(path), drafted.steps - 1)

"""Prompt lookup: a draft without a model that proposes what followed the same tokens earlier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from spectune.runtime.drafts.protocol import DraftContext, Drafted

LONGEST: Final = 3
"""Tokens of the longest n-gram that is looked up."""


class NgramIndex:
    """Where each n-gram of a growing token sequence was last continued, with undo.

    A proposal is a function of the sequence alone: the token after the most recent earlier
    occurrence of its longest suffix of up to :data:`LONGEST` tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        self._undo: list[list[tuple[tuple[int, ...], int | None]]] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens; each becomes the continuation of the n-grams that end before it."""
        for token in tokens:
            changed: list[tuple[tuple[int, ...], int | None]] = []
            for n in range(1, min(LONGEST, len(self.tokens)) + 1):
                gram = tuple(self.tokens[-n:])
                changed.append((gram, self._next.get(gram)))
                self._next[gram] = token
            self._undo.append(changed)
            self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Forgets all but the first ``length`` tokens, restoring what they had replaced."""
        while len(self.tokens) > length:
            self.tokens.pop()
            for gram, before in self._undo.pop():
                if before is None:
                    del self._next[gram]
                else:
                    self._next[gram] = before

    def propose(self) -> int | None:
        """The next token, or None when no suffix occurred before."""
        for n in range(min(LONGEST, len(self.tokens)), 0, -1):
            token = self._next.get(tuple(self.tokens[-n:]))
            if token is not None:
                return token
        return None

    def continuation(self, count: int) -> list[int]:
        """At most ``count`` proposals, each after those before it."""
        length = len(self.tokens)
        while len(self.tokens) < length + count and (token := self.propose()) is not None:
            self.extend([token])
        found = self.tokens[length:]
        self.truncate(length)
        return found


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

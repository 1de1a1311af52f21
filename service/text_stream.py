"""Text from tokens as they come: whole characters, up to a stop string, and never what may yet be
the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spectune.runtime.loop import TokenLogprobs
from spectune.runtime.text_codec import PARTIAL, TextCodec


@dataclass(frozen=True)
class TokenText:
    """A token that a text has: its place in the text, its id, and how probable it was."""

    offset: int
    token: int
    logprobs: TokenLogprobs | None


@dataclass
class TextStream:
    """The text of tokens. ``sent``: the characters of it that were taken. ``is_stopped``: a stop
    string ended it. ``first``: the place of its first character, where it follows another."""

    codec: TextCodec
    stops: tuple[str, ...] = ()
    text: str = ""
    sent: int = 0
    is_stopped: bool = False
    first: int = 0
    _ids: list[int] = field(default_factory=list)
    _begin: int = 0
    """Where the tokens begin that are decoded again: the ones before the last that made text."""
    _read: int = 0
    _waiting: int = 0
    """Characters that are not whole yet."""
    _tokens: list[TokenText] = field(default_factory=list)

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None] = ()) -> None:
        """Adds tokens, which a stop string may end."""
        for n, token in enumerate(tokens):
            if self.is_stopped:
                return
            self._ids.append(token)
            new = self._new()
            # Of several tokens of one character each begins where that does.
            offset = len(self.text) + max(0, min(self._waiting, len(new) - 1))
            told = logprobs[n] if n < len(logprobs) else None
            self._tokens.append(TokenText(self.first + offset, token, told))
            self._waiting = len(new)
            if new and not new.endswith(PARTIAL):
                self._begin, self._read = self._read, len(self._ids)
                self._waiting = 0
                self._add(new)

    def end(self) -> None:
        """Adds what was no whole character."""
        if not self.is_stopped:
            self._add(self._new())
            self._read = len(self._ids)

    def take(self, *, is_ended: bool) -> tuple[str, list[TokenText]]:
        """The text that is certain and was not taken yet, and its tokens."""
        limit = len(self.text) if is_ended else len(self.text) - self._held()
        text, self.sent = self.text[self.sent : limit], limit
        is_whole = is_ended and not self.is_stopped
        taken = [t for t in self._tokens if t.offset < self.first + limit or is_whole]
        self._tokens = self._tokens[len(taken) :]
        return text, taken

    def _new(self) -> str:
        before = self.codec.text(self._ids[self._begin : self._read])
        return self.codec.text(self._ids[self._begin :])[len(before) :]

    def _add(self, new: str) -> None:
        longest = max(map(len, self.stops), default=0)
        begin = max(0, len(self.text) - longest)
        self.text += new
        places = [at for stop in self.stops if (at := self.text.find(stop, begin)) >= 0]
        if places:
            self.text, self.is_stopped = self.text[: min(places)], True

    def _held(self) -> int:
        """Characters at the end that are the beginning of a stop string."""
        sizes = (n for stop in self.stops for n in range(1, len(stop)))
        ends = (n for n in sizes if any(s[:n] == self.text[-n:] for s in self.stops))
        return 0 if self.is_stopped else max(ends, default=0)

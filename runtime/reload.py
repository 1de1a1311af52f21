"""Hot reload: a policy source that follows publications while a decoder runs.

A thread looks for the newest publication, prepares it aside and puts it in place with one
assignment; the loop sees it at the top of its next round. What cannot be prepared is refused with
its reason, whatever was raised, and the last good policy stays. Every outcome is acknowledged."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, Self, TypeVar

from spectune.runtime.policies.document import Policy
from spectune.traces.errors import SpectuneError
from spectune.traces.text import one_line


@dataclass(frozen=True)
class Published:
    """The newest publication as a runtime sees it: its version and either a policy or the reason
    there is none to be read."""

    version: int
    policy: Policy | None
    problem: str = ""


Status = Literal["applied", "refused"]
Acknowledge = Callable[[int, Status, str], None]
"""Called with (version, status, reason)."""
REASON_LIMIT = 400
"""Most characters of a reason."""


class Versioned(Protocol):
    """A policy made ready to run, of a publication."""

    @property
    def version(self) -> int: ...


P = TypeVar("P", bound=Versioned)

PATIENCE_S = 5.0
"""Seconds that leaving a watch waits for its thread."""


class WatchedSource(Generic[P]):
    """Follows publications. ``current()`` never blocks: it returns the last good policy.

    ``fetch`` returns the newest publication, or None while there is none; ``prepare`` makes a
    policy ready to run or raises, which refuses that version; ``acknowledge`` records what became
    of it. ``retry`` are the errors of a database that cannot be reached: whatever met one is tried
    again at the next poll. ``seen`` is the newest version that was applied or refused;
    ``last_error`` why it was refused, or what the last look failed with. Leaving waits at most
    ``patience_s`` seconds for the thread; ``unfinished`` says what it then left undone."""

    def __init__(
        self,
        initial: P,
        fetch: Callable[[], Published | None],
        prepare: Callable[[Policy, int], P],
        acknowledge: Acknowledge,
        *,
        interval_s: float = 1.0,
        patience_s: float = PATIENCE_S,
        retry: tuple[type[Exception], ...] = (),
    ) -> None:
        self._current, self.seen = initial, initial.version
        self._fetch, self._prepare, self._acknowledge = fetch, prepare, acknowledge
        self._interval_s, self.patience_s, self._retry = interval_s, patience_s, retry
        self.beside: Callable[[], None] | None = None
        """What else is looked at, after each look of the thread, in it."""
        self._outcomes: list[tuple[int, Status, str]] = []
        """Those that are not acknowledged yet, oldest first."""
        self._refusal = self.last_error = self.unfinished = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def current(self) -> P:
        return self._current

    def poll(self) -> bool:
        """Looks once; True if a new policy is in force. Raises what ``fetch`` or ``acknowledge``
        raises; what could not be acknowledged is at the next call, in order."""
        applied = False
        try:
            published = self._fetch()
            if published is not None and published.version != self.seen:
                applied = self._apply(published)
        finally:
            while self._outcomes:
                try:
                    self._acknowledge(*self._outcomes[0])
                except self._retry:
                    raise
                except Exception:
                    del self._outcomes[0]  # it would fail at every poll, before those behind it
                    raise
                del self._outcomes[0]
        self.last_error = self._refusal
        return applied

    def _apply(self, published: Published) -> bool:
        """Puts a publication in force, or refuses it: none may end the watch."""
        status: Status = "applied"
        refusal = ""
        try:
            if published.policy is None:
                raise SpectuneError(published.problem)
            with short_turns():
                prepared = self._prepare(published.policy, published.version)
            self._current = prepared
        except self._retry:
            raise
        except Exception as error:  # whatever the publication makes it raise
            status, refusal = "refused", reason_of(error)
        self.seen, self._refusal = published.version, refusal
        self._outcomes.append((published.version, status, refusal))
        return status == "applied"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, name="policy-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(self.patience_s)
        if self._thread.is_alive():
            lines = [f"version {v} ({s}) was not acknowledged" for v, s, _ in [*self._outcomes]]
            tried = f"looking for a publication took more than {self.patience_s:g} s"
            self.unfinished = "; ".join([f"{tried} and was given up", *lines])

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.poll()
                if self.beside is not None:
                    self.beside()
            except Exception as error:  # another look follows
                plain = isinstance(error, self._retry)
                self.last_error = one_line(str(error), REASON_LIMIT) if plain else reason_of(error)


@contextmanager
def short_turns() -> Iterator[None]:
    """Lets a decoding thread go on at once where another has the interpreter, which capturing
    passes keeps busy: of a round's many calls each could otherwise wait 5 ms for its turn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def reason_of(error: Exception) -> str:
    """Why something was refused: what an error says, with its type unless it is one of ours. One
    line (:func:`one_line`)."""
    message = str(error) if isinstance(error, SpectuneError) else f"{type(error).__name__}: {error}"
    return one_line(message.removesuffix(": "), REASON_LIMIT)

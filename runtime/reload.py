"""Hot reload: a policy source that follows publications while a decoder runs.

A thread looks for the newest publication, prepares it aside and puts it in place with one
assignment; the loop sees it at the top of its next round. What cannot be prepared is refused with
its reason, whatever was raised, and the last good policy stays. Every outcome is acknowledged.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
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
UNSAID_LIMIT = 64
"""Most acknowledgements kept for a database that does not take them; of more the newest."""


class Versioned(Protocol):
    """A policy made ready to run, of a publication."""

    @property
    def version(self) -> int: ...


P = TypeVar("P", bound=Versioned)


class WatchedSource(Generic[P]):
    """Follows publications. ``current()`` never blocks: it returns the last good policy.

    ``fetch`` returns the newest publication, or None while there is none; ``prepare`` makes a
    policy ready to run or raises, which refuses that version; ``acknowledge`` records what became
    of it. ``retry`` are the errors of a database that cannot be reached: whatever met one is tried
    again at the next poll, and the last good policy goes on. ``last_error`` is why the newest
    version was refused, or what the last look failed with. Leaving waits at most ``patience_s``
    seconds for the thread; ``left`` says what it then left undone.
    """

    patience_s = 5.0

    def __init__(
        self,
        initial: P,
        fetch: Callable[[], Published | None],
        prepare: Callable[[Policy, int], P],
        acknowledge: Acknowledge,
        *,
        interval_s: float = 1.0,
        retry: tuple[type[Exception], ...] = (),
    ) -> None:
        self._current = initial
        self._fetch, self._prepare, self._acknowledge = fetch, prepare, acknowledge
        self._interval_s, self._retry = interval_s, retry
        self.seen = initial.version
        self._refusal = ""
        self._unsaid: deque[tuple[int, Status, str]] = deque(maxlen=UNSAID_LIMIT)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.last_error = ""
        self.left = ""

    def current(self) -> P:
        return self._current

    def poll(self) -> bool:
        """Looks once; True if a new policy is in force. What could not be acknowledged before is,
        in order. Raises what ``fetch`` or ``acknowledge`` raises; either can be called again."""
        try:
            found = self._look()
        finally:
            self._say()
        self.last_error = self._refusal
        return found

    def _look(self) -> bool:
        published = self._fetch()
        if published is None or published.version == self.seen:
            return False
        try:
            if published.policy is None:
                raise SpectuneError(published.problem)
            ready = self._prepare(published.policy, published.version)
        except self._retry:
            raise
        # what was published decides what is raised here: no publication may end the watch
        except Exception as error:
            self._answer(published.version, "refused", reason_of(error))
            return False
        self._current = ready
        self._answer(published.version, "applied", "")
        return True

    def _answer(self, version: int, status: Status, reason: str) -> None:
        self.seen, self._refusal = version, reason
        self._unsaid.append((version, status, reason))

    def _say(self) -> None:
        while self._unsaid:
            try:
                self._acknowledge(*self._unsaid[0])
            except self._retry:
                raise
            except Exception:
                # It would fail again at every poll, before those that come after it.
                self._unsaid.popleft()
                raise
            self._unsaid.popleft()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, name="policy-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(self.patience_s)
        if self._thread.is_alive():
            took = f"looking for a publication took more than {self.patience_s:g} s"
            said = (f"version {v} ({s}) was not acknowledged" for v, s, _ in tuple(self._unsaid))
            self.left = "; ".join([f"{took} and was given up", *said])

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.poll()
            except self._retry as error:
                self.last_error = one_line(str(error), REASON_LIMIT)
            # A look that fails, for whatever reason, is followed by another.
            except Exception as error:
                self.last_error = reason_of(error)


def reason_of(error: Exception) -> str:
    """Why something was refused: what an error says, with its type unless it is one of ours. One
    line (:func:`one_line`)."""
    said = str(error) if isinstance(error, SpectuneError) else f"{type(error).__name__}: {error}"
    return one_line(said.removesuffix(": "), REASON_LIMIT)

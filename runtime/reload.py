"""Hot reload: a policy source that follows publications while a decoder runs.

A thread looks for the newest publication, prepares it aside and puts it in place with one assignment; the loop sees it at the top
of its next round. What cannot be prepared is refused with its reason, and the last good policy stays. Every outcome is acknowledged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.policies.document import Policy
from runtime.policies.prepared import PreparedPolicy
from traces.errors import SpectuneError


@dataclass(frozen=True)
class Published:
    """The newest publication as a runtime sees it: its version and either a policy or the reason there is none to be read."""

    version: int
    policy: Policy | None
    problem: str = ""


Acknowledge = Callable[[int, Literal["applied", "refused"], str], None]
"""Called with (version, status, reason)."""


class WatchedSource:
    """Follows publications. ``current()`` never blocks: it returns the last good policy.

    ``fetch`` returns the newest publication, or None while there is none; ``prepare`` makes a policy ready to run and raises a
    SpectuneError when this runtime cannot; ``acknowledge`` records what became of it. A database that cannot be reached is tried again
    at the next poll, an acknowledgement as well: the last good policy goes on.
    """

    def __init__(
        self,
        initial: PreparedPolicy,
        fetch: Callable[[], Published | None],
        prepare: Callable[[Policy, int], PreparedPolicy],
        acknowledge: Acknowledge,
        *,
        interval_s: float = 1.0,
        retry: tuple[type[Exception], ...] = (),
    ) -> None:
        self._current = initial
        self._fetch, self._prepare, self._acknowledge = fetch, prepare, acknowledge
        self._interval_s, self._retry = interval_s, retry
        self.seen = initial.version
        self._unsaid: tuple[int, Literal["applied", "refused"], str] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.last_error = ""

    def current(self) -> PreparedPolicy:
        return self._current

    def poll(self) -> bool:
        """Looks once; True if a new policy is in force. An acknowledgement that failed is made first."""
        self._say()
        published = self._fetch()
        if published is None or published.version == self.seen:
            return False
        try:
            if published.policy is None:
                raise SpectuneError(published.problem)
            ready = self._prepare(published.policy, published.version)
        except SpectuneError as error:
            self.last_error = str(error)
            self._settle(published.version, "refused", str(error))
            return False
        self._current, self.last_error = ready, ""
        self._settle(published.version, "applied", "")
        return True

    def _settle(self, version: int, status: Literal["applied", "refused"], reason: str) -> None:
        self.seen, self._unsaid = version, (version, status, reason)
        self._say()

    def _say(self) -> None:
        if self._unsaid is not None:
            self._acknowledge(*self._unsaid)
            self._unsaid = None

    def __enter__(self) -> WatchedSource:
        self._thread = threading.Thread(target=self._watch, name="policy-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.poll()
            except self._retry as error:
                self.last_error = str(error)

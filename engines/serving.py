"""An engine's side of the circle: finished requests go to the database, publications come from it.

The engine's own threads enqueue and read an attribute, nothing else. A thread of ours opens the
database, looks for publications and hands requests to their writers. While the database is away or
slow the last good policy stays; requests that no longer fit in a queue are dropped, counted and
said.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectune.db.database import open_database
from spectune.db.errors import DatabaseError, NotFoundError
from spectune.runtime.checkpoints import identity
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.reload import Published, Status, WatchedSource, reason_of
from spectune.traces.errors import PairError, PolicyError
from spectune.traces.schema import Sampling, Step, Verifier
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.publications import DEFAULT_DEPLOYMENT
from spectune.traces.store.traffic import CAPACITY, TrafficWriter, WriterStatus
from spectune.traces.tables import Trajectory

RECORDINGS_LIMIT = 16
"""Most recordings of one engine: one for each sampling that requests ask for."""
DISPATCH_S = 0.05
"""Seconds between two looks at the queue."""


def served_pair(target: str, loaded: str | None, otherwise: str) -> tuple[PairSpec, str]:
    """The pair of a server that serves ``target`` with the draft ``loaded``, and that draft's name
    in it, ``otherwise`` where no model was loaded: the pair of ``SPECTUNE_PAIR``, else one of these
    two. Raises PairError where it is of others."""
    named = os.environ.get("SPECTUNE_PAIR")
    if not named:
        drafts = {} if loaded is None else {Path(loaded).name: loaded}
        spec = PairSpec(name=Path(target).name, target=target, drafts=drafts)
    else:
        spec = read_pair(named)
        if identity(spec.target) != identity(target):
            raise PairError(
                f"SPECTUNE_PAIR={named}: its target is {spec.target}, but this server serves "
                f"{target}"
            )
    if loaded is None:
        return spec, otherwise
    served = identity(loaded)
    name = next((name for name, path in spec.drafts.items() if identity(path) == served), None)
    if name is None:
        raise PairError(
            f"SPECTUNE_PAIR={named}: none of its drafts is {loaded}, which this server loaded"
        )
    return spec, name


@dataclass(frozen=True)
class Place:
    """Where an engine stands: the database, the deployment that it follows, the kind of device, and
    the name that it acknowledges by. ``about`` goes to its recordings: ``engine`` and
    ``engine_version``, and what else tells them apart."""

    url: str
    device: str
    node: str
    about: Mapping[str, Any]
    max_len: int
    deployment: str = DEFAULT_DEPLOYMENT

    @classmethod
    def here(cls, device: str, about: Mapping[str, Any], max_len: int) -> Place:
        """That of an engine in this process, as the environment says."""
        engine, environment = str(about["engine"]), os.environ
        deployment = environment.get("SPECTUNE_DEPLOYMENT") or engine
        node = f"{engine}:{os.uname().nodename}:{os.getpid()}"
        return cls(environment["SPECTUNE_DB"], device, node, about, max_len, deployment)


@dataclass(frozen=True)
class Table:
    """``gammas[n]`` is the number of tokens drafted after a step of n requests; ``gammas[0]`` is
    never read. ``policy`` and ``version`` say whose it is: empty and 0 for the server's own."""

    gammas: tuple[int, ...]
    policy: str = ""
    version: int = 0


class Served:
    """Follows the publications for a pair and records what is served of it.

    ``pair`` names it and the draft that is loaded, and is called in the thread of ours, as it may
    have to read whole weights; what it raises is said, and nothing is recorded or followed then.
    ``initial`` is in force until a publication whose draft tokens by batch size ``gammas`` knows,
    asked with that draft's name; one that it raises for is refused with that reason. ``say`` gets a
    line whenever something changed.
    """

    def __init__(
        self,
        place: Place,
        pair: Callable[[], tuple[PairSpec, str]],
        initial: Table,
        gammas: Callable[[Policy, str], tuple[int, ...]],
        say: Callable[[str], None],
        *,
        interval_s: float = 1.0,
        capacity: int = CAPACITY,
    ) -> None:
        self.place = place
        self._pair, self._say, self._interval_s = pair, say, interval_s
        self._queue: queue.Queue[tuple[Trajectory, Sequence[Step]]] = queue.Queue(capacity)
        self._store: TraceStore | None = None
        self._pair_id = self._draft = ""
        self._writers: dict[tuple[Sampling, Verifier], TrafficWriter] = {}
        self._written = self._dropped = self._told = 0
        self._lost, self._trouble = "", dict[str, str]()
        self._stop = threading.Event()
        self._source = WatchedSource(
            initial,
            self._fetch,
            lambda policy, version: Table(gammas(policy, self._draft), policy.id, version),
            self._acknowledge,
            retry=(DatabaseError,),
        )
        self._thread = threading.Thread(target=self._run, name="spectune", daemon=True)
        self._thread.start()

    def current(self) -> Table:
        """What is in force. Never waits."""
        return self._source.current()

    def put(self, trajectory: Trajectory, steps: Sequence[Step]) -> None:
        """Hands over a finished request, whose rounds need no draft's name. Never waits: it is
        dropped and counted where the queue is full, or nothing is recorded."""
        try:
            if self._stop.is_set():
                raise queue.Full
            self._queue.put_nowait((trajectory, steps))
        except queue.Full:
            self._dropped, self._lost = self._dropped + 1, "they come faster than they are written"

    @property
    def status(self) -> WriterStatus:
        """Of all recordings together."""
        parts = [w.status for w in tuple(self._writers.values())]
        return WriterStatus(
            self._written + sum(p.written for p in parts),
            self._dropped + sum(p.dropped for p in parts),
            self._queue.qsize() + sum(p.pending for p in parts),
            next((p.error for p in reversed(parts) if p.error), None),
        )

    def close(self, timeout_s: float = 5.0) -> WriterStatus:
        """Writes what is pending, as far as the time allows, and ends the recordings."""
        self._stop.set()
        self._thread.join(timeout_s)
        deadline = time.monotonic() + timeout_s
        for writer in tuple(self._writers.values()):
            writer.close(max(0.0, deadline - time.monotonic()))
            with suppress(DatabaseError):
                if self._store is not None:
                    self._store.finish_recording(writer.recording)
        self._dropped += self._queue.qsize()
        if self._store is not None:
            self._store.database.close()
        return self.status

    def _run(self) -> None:
        try:
            self._spec, self._draft = self._pair()
            self._pair_id = self._spec.id
        except Exception as error:  # whatever a pair's files hold: the engine serves on
            self._stop.set()
            self._say(f"nothing is recorded or followed: {reason_of(error)}")
            return
        look = 0.0
        while not self._stop.is_set():
            if time.monotonic() >= look:
                self._guarded(self._look)
                self._tell_lost()
                look = time.monotonic() + self._interval_s
            self._guarded(self._dispatch)
            self._stop.wait(DISPATCH_S)
        if self._store is None:
            self._guarded(self._open)
        self._guarded(self._dispatch)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Does something with the database. What goes wrong is said once, and tried again at the
        next turn; that it goes again is said, too."""
        before = self._trouble.get(act.__name__, "")
        try:
            act()
        except Exception as error:  # whatever a database or a publication raises: it serves on
            trouble = str(error) if isinstance(error, DatabaseError) else reason_of(error)
            if trouble != before:
                self._say(f"{trouble}; serving goes on")
            self._trouble[act.__name__] = trouble
        else:
            self._trouble[act.__name__] = ""
            if before:
                self._say("the database answers again")

    def _tell_lost(self) -> None:
        """Says that requests are dropped, and why: the first, and whenever they have doubled."""
        status = self.status
        lost, why = status.dropped, status.error or self._lost
        if lost > 2 * self._told or (lost and not self._told):
            self._say(f"requests that are not recorded: {lost} ({why})")
            self._told = lost

    def _open(self) -> None:
        store, spec = TraceStore(open_database(self.place.url)), self._spec
        store.put_pair(self._pair_id, spec.name, spec.to_json())
        self._store = store
        self._say(
            f"pair {spec.name} ({self._pair_id}), deployment {self.place.deployment}, database "
            f"{store.database.name}"
        )

    def _look(self) -> None:
        if self._store is None:
            self._open()
        before = self._source.seen
        changed = self._source.poll()
        if self._source.seen != before:
            what = "in force" if changed else f"refused: {self._source.last_error}"
            self._say(f"publication {self._source.seen} is {what}")

    def _fetch(self) -> Published | None:
        assert self._store is not None
        where = self._pair_id, self.place.device, self.place.deployment
        if self._store.active_version(*where) == self._source.seen:
            return None
        found = self._store.active_publication(*where)
        if found is None:
            return None
        name = f"publication {found.version}"
        try:
            return Published(found.version, parse_policy(found.document, where=name))
        except PolicyError as error:
            return Published(found.version, None, str(error))

    def _acknowledge(self, version: int, status: Status, reason: str) -> None:
        assert self._store is not None
        with suppress(NotFoundError):  # a publication that is gone needs no answer
            self._store.acknowledge(version, self.place.node, status, reason)

    def _dispatch(self) -> None:
        while self._store is not None and not self._queue.empty():
            trajectory = self._queue.queue[0][0]
            writer = self._writer(self._store, trajectory)  # may fail: then it is still there
            steps = self._queue.get_nowait()[1]
            if writer is None:
                self._dropped += 1
                self._lost = f"they are sampled in more than {RECORDINGS_LIMIT} ways"
            else:
                named = [s._replace(draft=self._draft) if s.drafted else s for s in steps]
                writer.put(trajectory, named)

    def _writer(self, store: TraceStore, of: Trajectory) -> TrafficWriter | None:
        """The writer of requests sampled like this one; None where there are too many kinds."""
        key = of.sampling, of.verifier
        if key in self._writers and self._writers[key].gone:
            done = self._writers.pop(key).close(0)
            self._written += done.written
            self._dropped += done.dropped
        if key not in self._writers:
            if len(self._writers) >= RECORDINGS_LIMIT:
                return None
            most, about = self.place.max_len, self.place.about
            asked = Asked(self._pair_id, None, of.sampling, most, of.verifier, about, "serve")
            info = store.create_recording(asked)
            self._writers[key] = TrafficWriter(store, info.id)
            self._say(f"recording {info.id} (temperature {of.sampling.temperature:g})")
        return self._writers[key]

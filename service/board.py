"""What a database knows of a fleet, gathered every few seconds at most, however many ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import select

from spectune.db.database_errors import DatabaseError, UnavailableError
from spectune.optimizer.commands.policies import publication_rows
from spectune.optimizer.commands.schedules import schedule_rows
from spectune.optimizer.commands.status import deployments
from spectune.optimizer.drift.alarm_words import told
from spectune.optimizer.followed_servers import Servers
from spectune.optimizer.metrics import Sample, of_deployment, of_job, of_rollout, of_server
from spectune.optimizer.rollout.rollout_words import progress_of
from spectune.traces.store import TraceStore
from spectune.traces.store.query import TraceFilter, acceptance
from spectune.traces.store.tallies import Tallies, tallies
from spectune.traces.tables import HARM, FollowedServer

EVERY_S: Final = 5.0
"""Seconds between two looks at the database; after a long one ten times as long as that took."""
PING_S: Final = 1.0
WAIT_S: Final = 10.0
"""Seconds that somebody waits for another's look."""
WINDOW: Final = timedelta(minutes=15)
"""The traffic that figures are of."""
NEWEST: Final = 20
"""Publications, rollouts and alarms that are shown."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Figures:
    """What was known ``at`` a moment, JSON-ready rows: a row of ``deployments`` is as `status` has
    it, with ``acceptance_by_position`` and ``measured_over_predicted`` seconds of rounds; what was
    published, rolled out and alarming is the newest."""

    at: datetime
    deployments: Sequence[Row]
    servers: Sequence[Row]
    publications: Sequence[Row]
    rollouts: Sequence[Row]
    alarms: Sequence[Row]
    schedules: Sequence[Row]
    tallies: Tallies

    def samples(self) -> Iterator[Sample]:
        """It as metrics."""
        for row in self.deployments:
            yield from of_deployment(row)
        for row in self.rollouts:
            yield from of_rollout(row)
        for row in self.servers:
            yield from of_server(row, self.at)
        for row in self.schedules:
            yield from of_job(row)
        last = {row["deployment"]: row["at"] for row in reversed(self.alarms)}
        for deployment, at in last.items():
            seconds = datetime.fromisoformat(at).timestamp()
            yield Sample("spectune_alarm_timestamp_seconds", (deployment,), seconds)
        names = ("spectune_rollouts", "spectune_alarms", "spectune_job_attempts")
        for name, rows in zip(names, self.tallies, strict=True):
            yield from (Sample(name, tuple(labels), number) for *labels, number in rows)
        harmed = {deployment for deployment, verdict, _ in self.tallies.rollouts if verdict == HARM}
        for deployment in {row[0] for row in self.tallies.rollouts} - harmed:
            # Else the first one would be no increase.
            yield Sample("spectune_rollouts", (deployment, HARM), 0)


def gather(store: TraceStore) -> Figures:
    """Raises DatabaseError."""
    now = store.clock()
    rows = deployments(store, WINDOW)
    looked = {(w.deployment, w.pair_id, w.device): w for w in store.watched_deployments()}
    for row in rows:
        row |= {"acceptance_by_position": [], "measured_over_predicted": None}
        watched = looked.get((row["deployment"], row["pair_id"], row["device"]))
        if watched is not None and watched.version == row["version"]:
            row["measured_over_predicted"] = watched.figures.get("seconds")
        if row["served_since"]:
            since = max(now - WINDOW, datetime.fromisoformat(row["since"]))
            of = TraceFilter(pair=row["pair_id"], policy=row["policy"], since=since)
            found = acceptance(store, of, executed=True)
            row["acceptance_by_position"] = next((one["marginal"] for one in found), [])
    names = {pair.id: pair.name for pair in store.list_pairs()}
    newest = store.list_publications(limit=NEWEST)
    published, texts = publication_rows(store, newest, names)
    for row, text, publication in zip(published, texts, newest, strict=True):
        row |= {"told": text, "evidence": dict(publication.evidence)}
    servers = Servers.of(store)
    return Figures(
        now,
        rows,
        [_server(server) for server in servers.known()],
        published,
        [progress_of(rollout) for rollout in store.rollouts(limit=NEWEST)],
        [told(alarm) for alarm in store.alarms(newest=NEWEST)],
        schedule_rows(store.database),
        tallies(store),
    )


def _server(server: FollowedServer) -> dict[str, Any]:
    names = ("deployment", "node", "boot", "requests", "skipped", "dropped", "fault")
    moments = {name: getattr(server, name) for name in ("heard_at", "looked_at")}
    told = {name: moment and moment.isoformat() for name, moment in moments.items()}
    about = {name: getattr(server, name) for name in names}
    return {"server": server.place, **about, "model": server.engine.get("model"), **told}


class Board:
    """The newest figures, and whether the database answers. Threads may share it."""

    def __init__(self, store: TraceStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._looking, self._pinging = threading.Lock(), threading.Lock()
        self._figures: Figures | None = None
        self._failure: DatabaseError | None = None
        self._gathered_s = self._next_s = self._ping_s = -1e9
        self._is_up = False

    @property
    def name(self) -> str:
        """The database, without its password."""
        return self._store.database.name

    def figures(self) -> Figures:
        """Raises DatabaseError."""
        if not self._looking.acquire(timeout=WAIT_S):
            raise UnavailableError(f"{self.name} does not answer")
        try:
            if self._clock() >= self._next_s:
                self._gather()
        finally:
            self._looking.release()
        if self._failure is not None:
            raise self._failure
        assert self._figures is not None
        return self._figures

    def _gather(self) -> None:
        began = self._clock()
        try:
            self._figures, self._failure = gather(self._store), None
        except DatabaseError as error:
            self._failure = error
        self._gathered_s = self._clock()
        pause = PING_S if self._failure else max(EVERY_S, 10 * (self._gathered_s - began))
        self._next_s = self._gathered_s + pause

    def is_up(self) -> bool:
        """Whether the database answers."""
        if not self._pinging.acquire(timeout=WAIT_S):
            return False
        try:
            if self._clock() >= self._ping_s + PING_S:
                try:
                    with self._store.database.read() as session:
                        session.execute(select(1))
                    self._is_up = True
                except DatabaseError:
                    self._is_up = False
                self._ping_s = self._clock()
            return self._is_up
        finally:
            self._pinging.release()

    def samples(self) -> Iterator[Sample]:
        """Its figures as metrics, or that the database is away."""
        try:
            figures = self.figures()
        except DatabaseError:
            yield Sample("spectune_database_up", (), 0)
            return
        yield Sample("spectune_database_up", (), 1)
        yield Sample("spectune_figures_age_seconds", (), self._clock() - self._gathered_s)
        yield from figures.samples()

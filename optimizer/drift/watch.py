"""Looks at what deployments served since their policies came into force, and asks the simulator
what to do about what changed.

Any number of processes may look: each deployment is looked at by one at a time. What was read is
stored with the alarms that it gave, in one transaction: who starts, or takes over from one that
died, reads nothing twice and leaves nothing out.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby
from statistics import fmean, median
from typing import Any, Final

from sqlalchemy.orm import Session

from spectune.db.database_errors import DatabaseError
from spectune.engines.vllm.folder import LABEL_LIMIT
from spectune.optimizer.drift.alarm_words import in_words
from spectune.optimizer.drift.detect import (
    BLOCK,
    SLOT_S,
    Change,
    Detector,
    Watched,
    check_installed,
)
from spectune.optimizer.drift.seconds import engine_ratios, native_ratios
from spectune.optimizer.drift.what_if import LEAST, SINCE, Gain, what_if
from spectune.optimizer.inputs import published_policy
from spectune.optimizer.schedule.store import make_due_in, schedule_of
from spectune.traces.errors import SpectuneError
from spectune.traces.schema import devices_of
from spectune.traces.store import TraceStore
from spectune.traces.store.alarms import HELD_BACK, PENDING, WatchedRequest
from spectune.traces.tables import Alarm, Publication, Recording, WatchedDeployment
from spectune.traces.text import one_line

LOOK_S: Final = 600.0
LEASE_S: Final = 600.0
PAUSE: Final = timedelta(hours=6)
"""Between two tunings of a deployment that drift makes due."""
ENOUGH: Final = 128
"""Requests of the changed traffic that a tuning is made due on; after an hour as many as came."""
EARLIEST: Final = timedelta(hours=6)
"""How far back a look goes, the first of a publication and one after a long pause."""
SHOWN: Final = 5
NEWEST: Final = 200
"""Categories that figures tell of, and alarms of a deployment that are looked through."""

Tell = Callable[[str], None]
log = logging.getLogger("spectune.drift")


@dataclass
class Watch:
    """Watches all deployments of a store. ``tell`` is called with a line on each alarm, and again
    once it is known what came of it, for which the simulator is asked (``ask``). Raises ConfigError
    where river is not installed."""

    store: TraceStore
    tell: Tell = lambda line: None
    ask: Callable[..., Gain] = what_if
    lease_s: float = LEASE_S
    owner: str = field(
        default_factory=lambda: f"{socket.gethostname()}:{secrets.token_hex(4)}", init=False
    )

    def __post_init__(self) -> None:
        check_installed()

    def look(self) -> tuple[Alarm, ...]:
        """Reads what was stored since, and settles alarms; those that are new. Raises
        DatabaseError."""
        found = list[Alarm]()
        for publication in self.store.in_force():
            lease = self.store.begin_look(publication, self.owner, self.lease_s)
            if lease is None:
                continue
            try:
                found += self._look_at(lease, publication)
                self._settle(lease, publication)
            except DatabaseError:
                raise
            except Exception as error:  # the others are looked at
                is_plain = isinstance(error, SpectuneError)
                log.error("drift in %s: %s", publication.deployment, error, exc_info=not is_plain)
            finally:
                with suppress(DatabaseError):  # the lease runs out
                    self.store.end_look(lease)
        return tuple(found)

    def _look_at(self, lease: WatchedDeployment, p: Publication) -> list[Alarm]:
        """Stores what is seen; the new alarms."""
        store, now = self.store, self.store.clock()
        is_new = lease.version != p.version
        state = Detector() if is_new else Detector.from_json(lease.state)
        policy, since = published_policy(p), max(p.created_at, now - EARLIEST)
        names = {policy.id, *(candidate.id for candidate in policy.candidates)}
        requests, ratios = list[tuple[datetime, Watched]](), list[tuple[float, float]]()
        for info in recordings_of(store, p, since):
            place = {name: info.options.get(name) for name in ("dtype", "hardware")}
            profile = store.profile_of(p.pair_id, device=p.device, **place)
            for batch in store.requests_after(info.id, state.read.get(info.id, -1), since):
                state.read[info.id] = batch[-1].ordinal
                requests += [(r.ended_at, _watched(r, names)) for r in batch]
                ordered = sorted(batch, key=lambda r: r.ended_at)
                for slot, part in groupby(ordered, lambda r: r.ended_at.timestamp() // SLOT_S):
                    if info.engine != "native":
                        own = engine_ratios(info, [*part], state.costs)
                    else:
                        own = native_ratios([*part], policy, profile) if profile else []
                    ratios += [(slot * SLOT_S, ratio) for ratio in own]
        if not (requests or is_new):
            return []
        requests.sort(key=lambda one: one[0])
        watched = [one for _, one in requests]
        alarms = [
            _alarm(p, change, now, _began(change, requests, now))
            for change in state.add(watched, ratios)
        ]
        figures = {
            "requests": state.requests,
            "seconds": median(ratio for _, ratio in ratios) if ratios else None,
            "categories": dict(Counter(one.category for one in watched).most_common(SHOWN)),
        }
        if not store.store_look(lease, p.version, state.to_json(), figures, alarms):
            return []
        for alarm in alarms:
            self.tell(in_words(alarm))
        return alarms

    def _settle(self, lease: WatchedDeployment, p: Publication) -> None:
        """Asks the simulator once for all alarms that are pending, also of a process that died, or
        were held back as long as they have to be, when enough was served since the change."""
        store, database = self.store, self.store.database
        newest, place = store.alarms(p.deployment, NEWEST), (p.pair_id, p.device, p.version)
        is_paused = any(a.due_at and store.clock() - a.due_at < PAUSE for a in newest)
        waiting = {PENDING} if is_paused else {PENDING, HELD_BACK}
        here = [a for a in newest if (a.pair_id, a.device, a.version) == place]
        pending = [a for a in here if a.outcome in waiting]
        if not pending:
            return
        schedule, now = schedule_of(database, p.deployment), store.clock()
        since = max(alarm.since for alarm in pending)
        served = [*recordings_of(store, p, now - SINCE)]
        if now - since < SINCE and store.count_since([s.id for s in served], since) < ENOUGH:
            return
        info = max(served, key=lambda info: info.created_at, default=None)
        gain, why = self.ask(store, p, info, schedule.settings if schedule else {}, since)

        def settle(session: Session, due_at: datetime | None) -> tuple[str, str, str | None]:
            if gain is not None and gain < LEAST:
                return "nothing to gain", why, None
            if due_at is not None and store.clock() - due_at < PAUSE:
                return HELD_BACK, f"{why}; a tuning was due at {due_at:%Y-%m-%d %H:%M} UTC", None
            if schedule is None:
                return "no schedule", f"{why}; `schedule add` says how to tune", None
            if not make_due_in(database, session, schedule.name, since):
                return HELD_BACK, f"{why}; schedule {schedule.name} runs already", None
            return "tuning due", why, schedule.name

        for alarm in store.settle_alarms(lease, pending, gain, settle):
            self.tell(in_words(alarm))


def recordings_of(store: TraceStore, p: Publication, since: datetime) -> Iterator[Recording]:
    """The recordings of what a deployment served since a moment: of the servers that are followed
    for it, whatever pair they are of, else of the native decoder by the pair."""
    followed = store.followed_servers()
    there = (s for s in followed if s.deployment == p.deployment)
    here = [server for server in there if server.heard_at and server.heard_at >= since]
    own = {name for server in here for name in server.recordings.values()}
    pairs = {server.pair_id for server in here} or {p.pair_id}
    for pair_id in sorted(pairs):
        for info in store.list_recordings(pair_id, with_counts=False):
            is_served = info.id in own if here else info.engine == "native"
            is_over = info.finished_at is not None and info.finished_at < since
            if info.source == "serve" and is_served and not is_over:
                # What is published for all devices of a kind runs on each.
                yield from [info] if p.device in devices_of(info.device_name) else []


def _watched(request: WatchedRequest, policies: Collection[str]) -> Watched:
    """What its rounds under the policy in force accepted."""
    kept: dict[int, list[float]] = {}
    for s in request.steps:
        if s.drafted and s.policy in policies:
            kept.setdefault(s.drafted, []).append(s.accepted / s.drafted)
    category = one_line(request.category, LABEL_LIMIT)
    return Watched(category, {drafted: fmean(of) for drafted, of in kept.items()})


def _began(change: Change, requests: Sequence[tuple[datetime, Watched]], now: datetime) -> datetime:
    """Since when what is served is of the changed traffic, as far as the ``requests`` of a look
    go back; they are in the order in which they ended."""
    if change.what == "seconds":
        return now - timedelta(seconds=change.since * SLOT_S)
    moments, count = [at for at, _ in requests], change.since * BLOCK
    if change.what == "acceptance":
        of = [(at, one) for at, one in requests if change.category in (None, one.category)]
        moments, count = [at for at, one in of if change.drafted in one.kept], change.since
    return moments[-min(count, len(moments))] if moments else now


def _alarm(p: Publication, change: Change, at: datetime, since: datetime) -> Alarm:
    scale = change.drafted or 1
    evidence: dict[str, Any] = {"figures": [change.until, change.since]}
    if change.drafted:
        evidence["drafted"] = change.drafted
    about = p.deployment, p.pair_id, p.device, p.version, change.what, change.category
    return Alarm(*about, at, since, change.before * scale, change.after * scale, evidence)


def watch(store: TraceStore, stop: threading.Event, tell: Tell, every_s: float = LOOK_S) -> None:
    """Looks every so often until ``stop``. A database that goes away is waited for. Raises
    ConfigError where river is not installed."""
    watching = Watch(store, tell)
    while not stop.is_set():
        try:
            watching.look()
        except DatabaseError as error:
            log.warning("%s; looking again until it can be used", error)
        except Exception:  # without a watch nobody would be told of anything
            log.exception("drift cannot be looked for")
        stop.wait(every_s)

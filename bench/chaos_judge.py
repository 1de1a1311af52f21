"""What must hold after a chaos run, from what was committed, what the processes noted, and when the faults were.

Times are seconds since 1970 by one clock: those of rows are their transactions' commits, told by the server.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BOUND_S = 2.0
"""How long after its commit, or after the last fault's end, a publication may take to be in force everywhere."""
SHOWN = 40


@dataclass(frozen=True)
class Publication:
    """A row of ``publication``. ``is_good``: every watcher of the pair can run it."""

    version: int
    pair: str
    key: str | None
    actor: str
    committed: float
    attempt: int | None = None
    is_good: bool = True


@dataclass(frozen=True)
class Said:
    """A row of ``acknowledgement``."""

    version: int
    node: str
    status: str
    reason: str
    committed: float


@dataclass(frozen=True)
class Fault:
    """Something done to the run from ``begin`` to ``end``. ``keeps`` names the watchers that it may keep from following; None: all."""

    kind: str
    what: str
    begin: float
    end: float
    keeps: tuple[str, ...] | None = ()

    def disturbs(self, node: str) -> bool:
        return self.keeps is None or node in self.keeps


@dataclass(frozen=True)
class Watched:
    """A watcher: its pair, when it was ready, and (moment, version) whenever another policy came in force."""

    node: str
    pair: str
    ready: float
    in_force: Sequence[tuple[float, int]]


@dataclass(frozen=True)
class Job:
    """A row of ``schedule_job`` with its schedule's name; ``published`` is what its result says."""

    key: str
    schedule: str
    state: str
    published: int | None
    error: str | None


@dataclass
class History:
    """All that a run left behind.

    ``acknowledged``: (key, version) as clients were told; ``attempts``: (key, attempt, moment) as workers began them; ``slots``: by
    schedule that must miss none, its interval and the slots that fired; ``problems``: (kind, what) that was seen at once, as a process
    that is gone.
    """

    publications: Sequence[Publication] = ()
    said: Sequence[Said] = ()
    faults: Sequence[Fault] = ()
    watched: Sequence[Watched] = ()
    acknowledged: Sequence[tuple[str, int]] = ()
    attempts: Sequence[tuple[str, int, float]] = ()
    jobs: Sequence[Job] = ()
    slots: Mapping[str, tuple[int, Sequence[int]]] = field(default_factory=dict)
    problems: Sequence[tuple[str, str]] = ()
    until: float = 0.0


@dataclass
class Verdict:
    """``failures`` as (kind, what); ``latencies_s`` of good publications that no newer one overtook: from the commit, or from the last
    fault's end, to the policy in force; ``undisturbed_s`` are those without a fault. ``judged`` counts (publication, watcher)."""

    failures: list[tuple[str, str]] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    undisturbed_s: list[float] = field(default_factory=list)
    judged: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        return {
            "judged": dict(self.judged),
            "latency_s": _spread(self.latencies_s),
            "latency_undisturbed_s": _spread(self.undisturbed_s),
            "failures": dict(Counter(kind for kind, _ in self.failures)),
            "failures_listed": [f"{kind}: {what}" for kind, what in self.failures[:SHOWN]],
        }


def judge(history: History) -> Verdict:
    """Holds the run to its promises; see the module's functions, one a promise."""
    verdict = Verdict(list(history.problems))
    for watched in history.watched:
        _followed(history, watched, verdict)
    verdict.failures += _none_lost(history)
    verdict.failures += _none_doubled(history)
    verdict.failures += _fenced(history)
    verdict.failures += _jobs_done(history)
    verdict.failures += _slots_whole(history)
    return verdict


def due(since: float, faults: Iterable[Fault], bound_s: float = BOUND_S) -> tuple[float, float]:
    """By when what was committed at ``since`` must be in force, and since when that time is counted: from the commit, or from the end of
    the last fault that came in between."""
    counted = since
    for fault in sorted(faults, key=lambda f: f.begin):
        if fault.begin <= counted + bound_s and fault.end > counted:
            counted = fault.end
    return counted + bound_s, counted


def _followed(history: History, watched: Watched, verdict: Verdict) -> None:
    """Good publications are applied and acknowledged in time, bad ones refused with a reason, unless a newer one came before."""
    node = watched.node
    faults = [f for f in history.faults if f.disturbs(node)]
    own = sorted((p for p in history.publications if p.pair == watched.pair), key=lambda p: p.version)
    said: dict[int, list[Said]] = {}
    for one in history.said:
        if one.node == node:
            said.setdefault(one.version, []).append(one)
    came: dict[int, float] = {}
    for at, version in watched.in_force:
        came.setdefault(version, at)
    newer = float("inf")
    for publication in reversed(own):
        since = max(publication.committed, watched.ready)
        limit, counted = due(since, faults)
        was_seen = newer > limit and history.until > limit
        newer = min(newer, publication.committed)
        answers, at = said.get(publication.version, []), came.get(publication.version)
        statuses = {a.status for a in answers}
        wanted = "applied" if publication.is_good else "refused"
        name = f"{node}: publication {publication.version} ({publication.key or publication.actor})"
        if statuses - {wanted}:
            kind = "good refused" if publication.is_good else "bad applied"
            verdict.failures.append((kind, f"{name}: {answers[0].reason}"))
        if at is not None and not publication.is_good:
            verdict.failures.append(("bad in force", name))
        if not publication.is_good and answers and not all(a.reason.strip() for a in answers):
            verdict.failures.append(("refused without a reason", name))
        if at is not None and publication.is_good and not answers:
            verdict.failures.append(("in force, not acknowledged", name))
        if not was_seen:
            verdict.judged["superseded"] += 1
            continue
        verdict.judged["good" if publication.is_good else "bad"] += 1
        first = min((a.committed for a in answers), default=None)
        late = [t for t in ((at, first) if publication.is_good else (first,)) if t is None or t > limit]
        if late:
            how = "never" if late[0] is None else f"after {late[0] - counted:.2f} s"
            verdict.failures.append((f"{wanted} late", f"{name}: {how}"))
        if publication.is_good and at is not None:
            _, counted = due(since, [f for f in faults if f.begin < at])
            verdict.latencies_s.append(max(0.0, at - counted))
            if counted == since:
                verdict.undisturbed_s.append(verdict.latencies_s[-1])


def _none_lost(history: History) -> list[tuple[str, str]]:
    """What a client was told to be published is in the table, under its key."""
    rows = {p.version: p for p in history.publications}
    found = []
    for key, version in sorted(set(history.acknowledged)):
        row = rows.get(version)
        if row is None or row.key != key:
            found.append(("lost", f"publication {version} of {key}" + (f" is {row.key}'s" if row else "")))
    return found


def _none_doubled(history: History) -> list[tuple[str, str]]:
    """A key has one publication, and every answer under it names that one; what is good has a key."""
    found = []
    counted = Counter(p.key for p in history.publications if p.is_good)
    found += [("doubled", f"{key}: {n} publications") for key, n in counted.items() if n > 1]
    answers: dict[str, set[int]] = {}
    for key, version in history.acknowledged:
        answers.setdefault(key, set()).add(version)
    return found + [("doubled", f"{key} was answered {sorted(v)}") for key, v in answers.items() if len(v) > 1]


def _fenced(history: History) -> list[tuple[str, str]]:
    """No attempt publishes once another has begun."""
    begun = {(key, attempt): at for key, attempt, at in history.attempts}
    found = []
    for p in history.publications:
        later = [at for (key, attempt), at in begun.items() if key == p.key and p.attempt is not None and attempt > p.attempt]
        if later and p.committed > min(later):
            found.append(
                ("fence", f"{p.key}: attempt {p.attempt} published {p.committed - min(later):.2f} s after another began")
            )
    return found


def _jobs_done(history: History) -> list[tuple[str, str]]:
    """Every job is done, and what it says it has published is the publication of its key."""
    own = {p.key: p.version for p in history.publications}
    found = []
    for job in history.jobs:
        if job.state != "done":
            said = f": {job.error.splitlines()[0]}" if job.error else ""
            found.append((f"job {job.state}", f"{job.key}{said}"))
        elif job.published is not None and own.get(job.key) != job.published:
            found.append(("job", f"{job.key} says {job.published}, its key has {own.get(job.key)}"))
        if job.error and "Traceback" in job.error:
            found.append(("traceback", f"in the error of job {job.key}"))
    return found


def _slots_whole(history: History) -> list[tuple[str, str]]:
    """A schedule that coalesces nothing and has no grace has fired each slot once, from its first to its last."""
    found = []
    for name, (interval_s, slots) in history.slots.items():
        have = sorted(slots)
        if have != (list(range(have[0], have[-1] + 1, interval_s)) if have else [None]):
            found.append(("slots", f"{name}: {len(have)} fired, not each once from {have[:1]} to {have[-1:]}"))
    return found


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "median": round(statistics.median(ordered), 3),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3),
        "worst": round(ordered[-1], 3),
    }

"""What must hold after a chaos run, by what was committed and noted, and when faults were.

Times are seconds since 1970 by one clock; those of rows are their transactions' commits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

BOUND_S = 2.0
"""A publication is in force everywhere so long after its commit, or after the last fault's end."""
Delayed = tuple[str, ...] | None
"""Names of watchers that a fault may delay; None: all."""
Failure = tuple[str, str]
"""A kind of failure, and what failed."""


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
    """Done from ``begin`` to ``end``, it ``keeps`` watchers from following."""

    kind: str
    what: str
    begin: float
    end: float
    keeps: Delayed = ()


@dataclass(frozen=True)
class Watched:
    """A watcher: its pair, when it was ready, (moment, version) whenever a policy came in force."""

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

    ``acknowledged``: (key, version) as clients were told; ``attempts``: (key, attempt, moment) as
    workers began them; ``slots``: by schedule that must miss none, its interval and the slots that
    fired; ``problems``: what was seen at once, as a process that is gone.
    """

    publications: Sequence[Publication] = ()
    said: Sequence[Said] = ()
    faults: Sequence[Fault] = ()
    watched: Sequence[Watched] = ()
    acknowledged: Sequence[tuple[str, int]] = ()
    attempts: Sequence[tuple[str, int, float]] = ()
    jobs: Sequence[Job] = ()
    slots: Mapping[str, tuple[int, Sequence[int]]] = field(default_factory=dict)
    problems: Sequence[Failure] = ()
    until: float = 0.0


@dataclass
class Verdict:
    """``judged`` counts (publication, watcher). ``latencies_s``, of good publications that no newer
    one overtook: from the commit, or the last fault's end, to the policy in force."""

    failures: list[Failure]
    latencies_s: list[float] = field(default_factory=list)
    judged: Counter[str] = field(default_factory=Counter)


def judge(history: History) -> Verdict:
    """Holds the run to its promises: one function each."""
    verdict = Verdict(list(history.problems))
    for watched in history.watched:
        _followed(history, watched, verdict)
    for promise in (_none_lost, _none_doubled, _fenced, _jobs_done, _slots_whole):
        verdict.failures += promise(history)
    return verdict


def due(since: float, faults: Iterable[Fault]) -> tuple[float, float]:
    """By when what was committed at ``since`` must be in force, and since when that is counted."""
    counted = since
    for fault in sorted(faults, key=lambda f: f.begin):
        if fault.begin <= counted + BOUND_S and fault.end > counted:
            counted = fault.end
    return counted + BOUND_S, counted


def _followed(history: History, watched: Watched, verdict: Verdict) -> None:
    """Good publications are applied, bad ones refused, in time unless a newer one came before."""
    faults = [f for f in history.faults if f.keeps is None or watched.node in f.keeps]
    came = {version: at for at, version in reversed(watched.in_force)}
    newer = float("inf")
    own = (p for p in history.publications if p.pair == watched.pair)
    for publication in sorted(own, key=lambda p: -p.version):
        answers = [
            s for s in history.said if (s.node, s.version) == (watched.node, publication.version)
        ]
        at, is_good = came.get(publication.version), publication.is_good
        key = publication.key or publication.actor
        name = f"{watched.node}: publication {publication.version} ({key})"
        for kind in _answered(publication, answers, at):
            verdict.failures.append((kind, f"{name}: {[a.reason for a in answers]}"))
        since = max(publication.committed, watched.ready)
        limit, counted = due(since, faults)
        overtaken = newer <= limit or history.until <= limit
        newer = min(newer, publication.committed)
        if overtaken:
            verdict.judged["superseded"] += 1
            continue
        verdict.judged["good" if is_good else "bad"] += 1
        moments = [min((a.committed for a in answers), default=None), *([at] if is_good else [])]
        for late in [t for t in moments if t is None or t > limit][:1]:
            how = "never" if late is None else f"after {late - counted:.2f} s"
            kind = "applied late" if is_good else "refused late"
            verdict.failures.append((kind, f"{name}: {how}"))
        if is_good and at is not None:
            _, counted = due(since, [f for f in faults if f.begin < at])
            verdict.latencies_s.append(max(0.0, at - counted))


def _answered(publication: Publication, answers: Sequence[Said], at: float | None) -> Iterator[str]:
    """How a watcher's answers are wrong, whenever they came; ``at``: when it was in force."""
    statuses = {a.status for a in answers}
    if publication.is_good:
        if statuses - {"applied"}:
            yield "good refused"
        if at is not None and not answers:
            yield "in force, not acknowledged"
        return
    if statuses - {"refused"}:
        yield "bad applied"
    if at is not None:
        yield "bad in force"
    if not all(a.reason.strip() for a in answers):
        yield "refused without a reason"


def _none_lost(history: History) -> Iterator[Failure]:
    """What a client was told to be published is in the table, under its key."""
    rows = {p.version: p.key for p in history.publications}
    for key, version in sorted(set(history.acknowledged)):
        if rows.get(version) != key:
            yield "lost", f"publication {version} of {key} is {rows.get(version)}'s"


def _none_doubled(history: History) -> Iterator[Failure]:
    """A key has one publication, which every answer under it names; what is good has a key."""
    good = {(p.key or "no key", p.version) for p in history.publications if p.is_good}
    answers = {*history.acknowledged, *good}
    for key, count in Counter(key for key, _ in answers).items():
        if count > 1 or key == "no key":
            yield "doubled", f"{key}: {count} publications"


def _fenced(history: History) -> Iterator[Failure]:
    """No attempt publishes once another has begun."""
    for p in history.publications:
        for key, attempt, begun in history.attempts:
            if key == p.key and attempt > (p.attempt or attempt) and p.committed > begun:
                late = f"{p.committed - begun:.2f} s after attempt {attempt} began"
                yield "fence", f"{key}: attempt {p.attempt} published {late}"


def _jobs_done(history: History) -> Iterator[Failure]:
    """Every job is done, and what it says it has published is the publication of its key."""
    own = {p.key: p.version for p in history.publications}
    for job in history.jobs:
        if job.state != "done":
            yield f"job {job.state}", f"{job.key}: {(job.error or '').splitlines()[:1]}"
        elif job.published is not None and own.get(job.key) != job.published:
            yield "job", f"{job.key} says {job.published}, its key has {own.get(job.key)}"
        if "Traceback" in (job.error or ""):
            yield "traceback", f"in the error of job {job.key}"


def _slots_whole(history: History) -> Iterator[Failure]:
    """A schedule that coalesces nothing has fired each slot once, from its first to its last."""
    for name, (interval_s, slots) in history.slots.items():
        have = sorted(slots)
        if not have or have != list(range(have[0], have[-1] + 1, interval_s)):
            yield "slots", f"{name}: {len(have)} fired, not each once, {have[:1]} to {have[-1:]}"

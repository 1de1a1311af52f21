"""Questions about stored traces, which `spectune traces` prints (docs/traces.md).

An answer is rows, dictionaries by column, which pandas and Polars take as they are. All but rounds
is answered from plain columns (:mod:`traces.views`); no blob is unpacked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import zip_longest
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Double,
    FromClause,
    Select,
    cast,
    func,
    or_,
    select,
    tuple_,
)

from spectune.db import CorruptedChunkError
from spectune.traces.acceptance import FirstPosition, Survival
from spectune.traces.blobs import Damaged
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import (
    NO_TRAFFIC,
    Pair,
    Panorama,
    Recording,
    SampledRequest,
    StoredPolicy,
    Trajectory,
)
from spectune.traces.views import ACCEPTANCE, IN_FORCE, REQUESTS

Row = dict[str, Any]
GROUPS: Final = {
    "draft": "draft",
    "policy": "policy_id",
    "category": "category",
    "day": "day",
    "recording": "recording_id",
    "pair": "pair_id",
    "source": "source",
    "batch": "batch",
}
"""What answers are grouped by, and the column of each; ``batch``: the requests in a step, in the
mean of a request's, rounded. Panoramas are of no policy and of no batch."""
NAMED: Final = 20
"""Most names that are told where another is not stored."""
SUMS: Final = ("rounds", "drafted", "accepted", "emitted", "seconds", "prompts")
"""Columns of the rounds that a policy decoded a request by."""


@dataclass(frozen=True)
class TraceFilter:
    """Which requests are meant; every field narrows, absent ones do not.

    ``recordings``, ``pair`` and ``policy`` are ids or beginnings of one (a recording also
    ``latest``, a pair its name, a policy its label), ``request`` is a request's own. ``since``
    (inclusive) and ``until`` (exclusive) bound the moment at which a request was stored; a
    timedelta is so long ago. ``draft`` must have a panorama of the request; ``min_acceptance`` and
    ``max_acceptance`` (inclusive) bound its acceptance there, or without ``draft`` the mean of all
    drafts'. Where neither ``recordings`` nor ``source`` is given, the :data:`NO_TRAFFIC` is left
    out. The requests of a sample are rows of the recordings that they are stored in.
    """

    recordings: tuple[str, ...] = ()
    request: str | None = None
    pair: str | None = None
    categories: tuple[str, ...] = ()
    since: datetime | timedelta | None = None
    until: datetime | timedelta | None = None
    draft: str | None = None
    policy: str | None = None
    min_acceptance: float | None = None
    max_acceptance: float | None = None
    source: str | None = None


EVERYTHING: Final = TraceFilter()


def check_names(store: TraceStore, only: TraceFilter) -> None:
    """Raises TraceError for a filter's request, source, pair, category, draft or policy that is not
    stored, with names that are."""
    named: list[tuple[str, Any, Any]] = [
        ("request", only.request, Trajectory.request_id),
        ("source", only.source, Recording.source),
        ("pair", only.pair, Pair.name),
        *(("categories", (name,), Trajectory.category) for name in only.categories),
        ("draft", only.draft, Panorama.draft),
        ("policy", only.policy, StoredPolicy.label),
    ]
    for field, name, column in named:
        if name is None or requests(store, TraceFilter(**{field: name}), limit=1):
            continue
        with store.database.read() as session:
            names = select(column).distinct().order_by(column).limit(NAMED + 1)
            there = [*session.scalars(names)]
        what = f"category {name[0]!r}" if field == "categories" else f"{field} {name!r}"
        shown = ", ".join(there[:NAMED]) + ", ..." * (len(there) > NAMED)
        raise TraceError(f"{what} is not stored; there are: {shown or 'none'}")


def list_recordings(store: TraceStore, only: TraceFilter = EVERYTHING) -> tuple[Recording, ...]:
    """Recordings that hold or list a matching request (or, without conditions on requests, match
    themselves), newest first."""
    named = {store.resolve_recording(name) for name in only.recordings}
    pairs = {pair.id for pair in store.list_pairs() if pair.name == only.pair}
    found = [
        info
        for info in store.list_recordings()
        if (info.id in named or not named)
        and (info.pair_id.startswith(only.pair or "") or info.pair_id in pairs)
        and only.source in (None, info.source)
    ]
    if replace(only, recordings=(), pair=None, source=None) == EVERYTHING:
        return tuple(found)
    c, s = REQUESTS.c, SampledRequest
    conditions = conditions_of(store, REQUESTS, only)
    query = select(c.recording_id).where(*conditions).distinct()
    matching = select(c.recording_id, c.ordinal).where(*conditions)
    listing = select(s.sample_id).where(tuple_(s.recording_id, s.ordinal).in_(matching)).distinct()
    with store.database.read() as session:
        held = {*session.scalars(query), *session.scalars(listing)}
    return tuple(info for info in found if info.id in held)


def requests(
    store: TraceStore,
    only: TraceFilter = EVERYTHING,
    *,
    sort: str | None = None,
    limit: int | None = None,
) -> list[Row]:
    """A row per request and policy that decoded some of it, by recording and ordinal or by the
    column ``sort`` (``-`` before it: largest first), the first ``limit`` of them.

    ``rounds`` to ``acceptance`` are of the executed rounds, None where none were stored;
    ``draft_acceptance``: the mean chance that a proposal of ``only.draft`` is kept, over every
    position of the text, or the mean of all drafts'. Raises TraceError for an unknown column.
    """
    c = REQUESTS.c
    columns = [*c, (c.n_prompt + c.n_output).label("context")]
    columns.append(_draft_acceptance(REQUESTS, only).label("draft_acceptance"))
    order = [c.recording_id, c.ordinal, c.policy_id]
    if sort is not None:
        by = {column.name: column for column in columns}.get(sort.removeprefix("-"))
        if by is None:
            names = ", ".join(column.name for column in columns)
            raise TraceError(f"no column {sort!r} to sort by; there are: {names}")
        first = by.desc() if sort.startswith("-") else by.asc()
        order.insert(0, first.nulls_last())
    query = select(*columns).where(*conditions_of(store, REQUESTS, only)).order_by(*order)
    return list(_rows(store, query.limit(limit)))


def speed(
    store: TraceStore, only: TraceFilter = EVERYTHING, by: Sequence[str] = ("policy", "day")
) -> list[Row]:
    """Tokens/s and tau of the executed rounds, a row per group (:data:`GROUPS` but ``draft``), with
    ``mean_batch``, the mean number of requests in a step. Tokens/s are those served in the seconds
    of the steps, which requests that share a step share, so they grow with the load."""
    c = REQUESTS.c
    keys = [c[name] for name in _columns_of(by, REQUESTS)]
    label = [func.min(c.policy).label("policy")] if "policy" in by else []
    sums = [func.sum(c[name]).label(name) for name in SUMS]
    batch = cast(func.sum(c.batches), Double) / func.sum(c.rounds)
    counts = func.count().label("requests"), batch.label("mean_batch")
    query = (
        select(*keys, *label, *counts, *sums)
        .where(*conditions_of(store, REQUESTS, only), c.rounds > 0)
        .group_by(*keys)
        .order_by(*keys)
    )
    return [{**row, **rates(*(row[name] for name in SUMS))} for row in _rows(store, query)]


def acceptance(
    store: TraceStore,
    only: TraceFilter = EVERYTHING,
    by: Sequence[str] = (),
    *,
    executed: bool = False,
) -> list[Row]:
    """Acceptance by position, a row per group (:data:`GROUPS`) and draft: over every start of the
    panoramas. Or if ``executed`` a row per group and policy: over the rounds executed.

    ``marginal``: the share of starts whose proposals 0..j are all kept (of rounds: of those that
    drafted as far); ``conditional``: the share kept at j of those that kept all before;
    ``histogram``: starts by the length of what they kept. ``mean_accepted_length`` is 1 + the sum
    of the marginals of panoramas, tau of rounds.
    """
    of, view, read = (
        ("policy", REQUESTS, _executed) if executed else ("draft", ACCEPTANCE, _panoramas)
    )
    columns = _columns_of((of, *by), view)
    groups = defaultdict[tuple[str, ...], list[Row]](list)
    for row in read(store, only):
        groups[tuple(row[column] for column in columns)].append(row)
    with store.database.read() as session:
        labels = dict(session.execute(select(StoredPolicy.id, StoredPolicy.label)).all())
    rows = []
    for key, found in sorted(groups.items()):
        names = ("at_risk", "survived", "drafted")
        lists = (zip_longest(*(s[name] for s in found), fillvalue=0) for name in names)
        survival = Survival(sum(s["starts"] for s in found), *(tuple(map(sum, x)) for x in lists))
        group: Row = dict(zip(columns, key, strict=True))
        if executed:
            group["policy"] = labels.get(group["policy_id"])
        rows.append({**group, "requests": len(found), **survival.to_json()})
    return rows


def _panoramas(store: TraceStore, only: TraceFilter) -> Iterator[Row]:
    p = Panorama
    for row in _texts(store, only, p, p.draft, p.at_risk, p.survived):
        yield {**row, "starts": row["n_output"], "drafted": ()}


def _executed(store: TraceStore, only: TraceFilter) -> Iterator[Row]:
    chosen = _is_chosen(store, only)
    for row in _texts(store, only, Trajectory, Trajectory.by_policy):
        for policy, sums in row["by_policy"].items():
            if chosen(policy):
                starts, rounds = sums["rounds"] - sums["prompts"], sums["rounds"]
                batch = (2 * sums["batches"] + rounds) // (2 * rounds)  # as the view rounds
                of = {"policy_id": policy, "starts": starts, "batch": batch}
                yield {**row, **of, **sums["by_position"]}


def first_positions(store: TraceStore, recording: str) -> dict[str, FirstPosition]:
    """By draft, how often its first token is accepted, over every start of the panoramas of a
    recording."""
    return {
        row["draft"]: FirstPosition(row["marginal"][0], row["starts"])
        for row in acceptance(store, TraceFilter(recordings=(recording,)))
        if row["starts"]
    }


def rounds(store: TraceStore, only: TraceFilter = EVERYTHING) -> Iterator[Row]:
    """A row per executed round, in order: its request, its policy, what it drafted and kept, and
    its seconds; ``elapsed_s``: seconds of the request's rounds up to its end. Raises
    CorruptedChunkError where those of a request are damaged."""
    chosen = _is_chosen(store, only)
    for row in _texts(store, only, Trajectory, Trajectory.steps):
        steps, elapsed = row.pop("steps") or (), 0.0
        if isinstance(steps, Damaged):
            where = f"recording {row['recording_id']}, request {row['ordinal']}"
            raise CorruptedChunkError(f"{where}: its rounds cannot be used ({steps.problem})")
        for number, step in enumerate(steps):
            values = step._asdict()
            elapsed += step.round_s
            of = {"policy_id": values.pop("policy"), "round": number, "elapsed_s": elapsed}
            if chosen(step.policy):
                yield {**row, **of, **values}


def positions(store: TraceStore, only: TraceFilter = EVERYTHING) -> Iterator[Row]:
    """A row per request, draft and position of its proposals, as in the view ``acceptance``."""
    c = ACCEPTANCE.c
    query = select(ACCEPTANCE).where(*conditions_of(store, ACCEPTANCE, only))
    return _rows(store, query.order_by(c.recording_id, c.ordinal, c.draft, c.position))


def in_force(store: TraceStore, deployment: str | None = None) -> list[Row]:
    """A row per publication, newest first: which policy was in force ``since`` when and ``until``
    when (None: it is)."""
    query = select(IN_FORCE).order_by(IN_FORCE.c.version.desc())
    if deployment is not None:
        query = query.where(IN_FORCE.c.deployment == deployment)
    return list(_rows(store, query))


def rates(
    rounds: int, drafted: int, accepted: int, emitted: int, seconds: float, prompts: int
) -> Row:
    """What sums of executed rounds come to (:data:`SUMS`)."""
    return {
        "tokens_per_s": emitted / seconds if seconds else None,
        "tau": (emitted - prompts) / (rounds - prompts) if rounds > prompts else None,
        "acceptance": accepted / drafted if drafted else None,
    }


def _texts(store: TraceStore, only: TraceFilter, table: Any, *columns: Any) -> Iterator[Row]:
    """The plain columns of the matching requests, and these of a table beside, in order."""
    t, r = Trajectory, Recording
    own = (t.recording_id, t.ordinal, t.request_id, t.category, t.created_at, t.n_output)
    of = select(*own, r.pair_id, r.source).join(r, r.id == t.recording_id).subquery()
    same = (of.c.recording_id == table.recording_id) & (of.c.ordinal == table.ordinal)
    query = select(of, *columns).join(table, same).where(*conditions_of(store, of, only))
    query = query.order_by(of.c.recording_id, of.c.ordinal)
    if table is Panorama:
        query = query.order_by(Panorama.draft)
        if only.draft is not None:
            query = query.where(Panorama.draft == only.draft)
    for row in _rows(store, query):
        yield {**row, "day": row["created_at"].date().isoformat()}


def _rows(store: TraceStore, query: Select[Any]) -> Iterator[Row]:
    with store.database.read() as session:
        for row in session.execute(query.execution_options(yield_per=1000)).mappings():
            yield dict(row)


def _is_chosen(store: TraceStore, only: TraceFilter) -> Callable[[str], bool]:
    """Whether a policy, by its id, is the one that is asked for, or none is."""
    labelled = select(StoredPolicy.id).where(StoredPolicy.label == only.policy)
    with store.database.read() as session:
        ids = set(session.scalars(labelled))
    return lambda policy: policy.startswith(only.policy or "") or policy in ids


def _columns_of(by: Sequence[str], view: FromClause) -> list[str]:
    """The columns of groups. Raises TraceError for one that a view has not."""
    known = {name: column for name, column in GROUPS.items() if column in view.c}
    if unknown := [name for name in by if name not in known]:
        raise TraceError(f"no group {unknown[0]!r} here; there are: {', '.join(known)}")
    return [known[name] for name in by]


def conditions_of(
    store: TraceStore, view: FromClause, only: TraceFilter
) -> list[ColumnElement[bool]]:
    """What a filter asks of the rows of a view that has the columns of a request."""
    c, mean = view.c, _draft_acceptance(view, only)
    of_policy = _is_policy(only)
    decoded = select(REQUESTS.c.recording_id, REQUESTS.c.ordinal).where(of_policy)
    meanings: dict[str, Callable[[Any], ColumnElement[bool]]] = {
        "recordings": lambda names: _is_of(store, view, [*map(store.resolve_recording, names)]),
        "request": lambda name: c.request_id == name,
        "pair": lambda name: or_(
            c.pair_id.startswith(name, autoescape=True),
            c.pair_id.in_(select(Pair.id).where(Pair.name == name)),
        ),
        "categories": c.category.in_,
        "since": lambda moment: c.created_at >= _moment(store, moment),
        "until": lambda moment: c.created_at < _moment(store, moment),
        "draft": lambda name: c.draft == name if "draft" in c else mean.is_not(None),
        "policy": lambda _: (
            of_policy if view is REQUESTS else tuple_(c.recording_id, c.ordinal).in_(decoded)
        ),
        "min_acceptance": lambda share: mean >= share,
        "max_acceptance": lambda share: mean <= share,
        "source": lambda source: c.source == source,
    }
    given = [(means, getattr(only, name)) for name, means in meanings.items()]
    conditions = [
        means(value)
        for means, value in given
        if value is not None and (value or not isinstance(value, tuple))
    ]
    if not only.recordings and only.source is None:
        conditions.append(c.source.not_in(NO_TRAFFIC))
    return conditions


def _is_of(store: TraceStore, view: FromClause, recordings: list[str]) -> ColumnElement[bool]:
    """Whether a request is stored in one of these recordings, or is one that these list."""
    c, s = view.c, SampledRequest
    listed = select(s.recording_id, s.ordinal).where(s.sample_id.in_(recordings))
    with store.database.read() as session:
        is_sampled = session.execute(listed.limit(1)).first() is not None
    own = c.recording_id.in_(recordings)
    return or_(own, tuple_(c.recording_id, c.ordinal).in_(listed)) if is_sampled else own


def _moment(store: TraceStore, moment: datetime | timedelta) -> datetime:
    return store.clock() - moment if isinstance(moment, timedelta) else moment


def _is_policy(only: TraceFilter) -> ColumnElement[bool]:
    c, text = REQUESTS.c, only.policy or ""
    return or_(c.policy == text, c.policy_id.startswith(text, autoescape=True))


def _draft_acceptance(view: FromClause, only: TraceFilter) -> Any:
    """The mean acceptance of a request's panoramas, of one draft if it is named, as a column."""
    p = Panorama
    query = select(func.avg(p.acceptance)).where(
        p.recording_id == view.c.recording_id, p.ordinal == view.c.ordinal
    )
    if only.draft is not None:
        query = query.where(p.draft == only.draft)
    return query.correlate(view).scalar_subquery()

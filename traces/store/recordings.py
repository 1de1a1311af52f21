"""Recordings in the database: begun, appended to, resumed, read back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from operator import ge
from typing import Any, Literal, NamedTuple, cast

from sqlalchemy import Select, and_, func, select, tuple_, union_all, update
from sqlalchemy.orm import Session, undefer

from spectune.db import CorruptedChunkError, NotFoundError
from spectune.traces.acceptance import compact, keep_probability, step_survival, survival
from spectune.traces.blobs import Damaged
from spectune.traces.conversations import conversations
from spectune.traces.errors import TraceError
from spectune.traces.recording import (
    Asked,
    LoadedRecording,
    RecordedRequest,
    ServedRequest,
    Skipped,
)
from spectune.traces.schema import SHORTLIST_MARK, Extent, Step, Verifier
from spectune.traces.store.rows import Storage, insert, newest, require, resolve
from spectune.traces.tables import (
    NO_TRAFFIC,
    SAMPLE,
    Panorama,
    Recording,
    SampledRequest,
    StoredWorkload,
    Trajectory,
)

BATCH = 64
"""Requests read per query when iterating."""
CHECKED = 500
"""Requests of a sample that one query looks for."""
Appended = tuple[int, Trajectory, Sequence[Step]]
Place = tuple[str, int]
"""Where a request is stored: a recording, and the ordinal there."""
Deal = Callable[[Sequence[tuple[str, int, str | None]]], Sequence[str]]
"""Assigns requests to the parts of a tuning, by the category of each, the number of its
conversation and the part that it has already."""


class Traffic(NamedTuple):
    """What a recording holds of some traffic: how many requests, how many of them with a text, and
    when the last ended."""

    recording: Recording
    requests: int
    texts: int
    ended_at: datetime


class RequestKey(NamedTuple):
    """Where a request is stored, when it ended, and the part of a tuning that it was dealt to."""

    recording: str
    ordinal: int
    ended_at: datetime
    part: str | None


class Listed(NamedTuple):
    """A request of a sample (:class:`SampledRequest`)."""

    recording: str
    ordinal: int
    is_text: bool
    is_load: bool


class Recordings(Storage):
    """Recordings, their trajectories, panoramas and executed rounds.

    The requests of a sample are named by their numbers in it, wherever they are stored: whoever
    reads one, deals its requests or stores panoramas of them does that to the requests themselves.
    """

    def create_recording(self, asked: Asked) -> Recording:
        """Begins a recording in state ``recording``. The pair and the workload must be stored
        already (NotFoundError)."""
        columns = {**vars(asked), "options": dict(asked.options), "asked_sha256": digest_of(asked)}
        with self.database.write() as session:
            require(session, StoredWorkload, asked.workload_id)
            new = self._put_new(session, Recording, "rec", **columns, state="recording")
            return counted(session, [session.get_one(Recording, new)])[0]

    def create_sample(self, asked: Asked, requests: Sequence[Listed]) -> Recording:
        """Stores a sample, complete at once, in one transaction; requests that were removed
        meanwhile are left out."""
        t = Trajectory
        columns = {**vars(asked), "options": dict(asked.options), "asked_sha256": digest_of(asked)}
        columns |= {"state": "complete", "finished_at": self.clock()}
        with self.database.write() as session:
            new = self._put_new(session, Recording, "rec", **columns)
            for i in range(0, len(requests), CHECKED):
                part = requests[i : i + CHECKED]
                stored = select(t.recording_id, t.ordinal).where(_is_at([r[:2] for r in part]))
                held = {*session.execute(stored.with_for_update(key_share=True, read=True)).all()}
                session.add_all(
                    SampledRequest(new, number, *request)
                    for number, request in enumerate(part, i)
                    if request[:2] in held
                )
                session.flush()
            return counted(session, [session.get_one(Recording, new)])[0]

    def find_recording(
        self, asked: Asked, *, state: Literal["recording", "complete"]
    ) -> Recording | None:
        """The newest recording that was asked for exactly so and is in ``state``, or None.

        One in state ``recording`` is what a killed ``record`` resumes; a ``complete`` one is what
        ``tune`` need not record again.
        """
        query = newest(Recording, asked_sha256=digest_of(asked), state=state).limit(1)
        with self.database.read() as session:
            return next(iter(counted(session, session.scalars(query).all())), None)

    def list_recordings(
        self, pair_id: str | None = None, *, state: str | None = None, with_counts: bool = True
    ) -> tuple[Recording, ...]:
        """Recordings of a pair and state (each optional), newest first; without ``with_counts``
        what they hold is not counted."""
        query = newest(Recording, pair_id=pair_id, state=state)
        with self.database.read() as session:
            recordings = session.scalars(query).all()
            return counted(session, recordings) if with_counts else _uncounted(recordings)

    def traffic_since(self, pair_id: str, since: datetime) -> tuple[Traffic, ...]:
        """What the recordings of a pair hold of traffic that was stored at ``since`` or later, the
        latest first.

        It goes by the requests' moments and not the recording's: serving appends to one recording
        for days.
        """
        t, r = Trajectory, Recording
        texts = func.count().filter(t.tokens.is_not(None))
        sums = select(t.recording_id, func.count(), texts, func.max(t.created_at))
        sums = sums.join(r, r.id == t.recording_id).group_by(t.recording_id)
        sums = sums.where(r.pair_id == pair_id, r.source.not_in(NO_TRAFFIC), t.created_at >= since)
        with self.database.read() as session:
            rows = []
            for name, number, with_text, ended_at in session.execute(sums).all():
                (recording,) = _uncounted([session.get_one(Recording, name)])
                rows.append(Traffic(recording, number, with_text, ended_at))
        return tuple(sorted(rows, key=lambda row: row.ended_at, reverse=True))

    def request_keys(
        self,
        recordings: Collection[str],
        since: datetime,
        *,
        last: int | None = None,
        with_text: bool = True,
    ) -> Iterator[RequestKey]:
        """The requests of recordings that were stored at ``since`` or later and have a text, or
        all where that is not asked for, the latest first, the ``last`` of them; nothing else of
        them is read."""
        t = Trajectory
        query = select(t.recording_id, t.ordinal, t.created_at, t.part).limit(last)
        query = query.where(t.recording_id.in_(recordings), t.created_at >= since)
        if with_text:
            query = query.where(t.tokens.is_not(None))
        query = query.order_by(t.created_at.desc(), t.recording_id.desc(), t.ordinal.desc())
        with self.database.read() as session:
            for row in session.execute(query.execution_options(yield_per=1000)):
                yield RequestKey(*row)

    def served_requests(self, recordings: Collection[str]) -> list[ServedRequest]:
        """The requests of recordings of which rounds are stored, whether their text is or not, in
        the order in which they ended; of a sample those of its load. Damaged ones are left out."""
        t, s = Trajectory, SampledRequest
        own, listed = requests_of(recordings, t, t.n_prompt, t.steps, t.created_at)
        both = union_all(own.where(t.steps.is_not(None)), listed.where(s.is_load)).subquery()
        query = select(both).order_by(both.c.created_at, both.c.holder, both.c.number)
        with self.database.read() as session:
            rows = session.execute(query.execution_options(yield_per=1000))
            return [
                ServedRequest(name, number, n_prompt, steps)
                for name, number, n_prompt, steps, _ in rows
                if steps is not None and not isinstance(steps, Damaged)
            ]

    def resolve_recording(self, text: str) -> str:
        """The id meant by an id, an unambiguous beginning of one, or ``latest``. Raises
        NotFoundError."""
        with self.database.read() as session:
            return resolve(session, Recording, text)

    def get_recording(self, text: str) -> Recording:
        """The recording without its requests, by id, an unambiguous beginning of one, or
        ``latest``. Raises NotFoundError."""
        with self.database.read() as session:
            recording = session.get_one(Recording, resolve(session, Recording, text))
            return counted(session, [recording])[0]

    def finish_recording(self, recording: str) -> None:
        """Marks a recording ``complete``; doing it again changes nothing but the time."""
        with self.database.write() as session:
            row = _locked(session, recording)
            row.state, row.finished_at = "complete", self.clock()

    def append_trajectory(
        self, recording: str, ordinal: int, trajectory: Trajectory, steps: Sequence[Step] = ()
    ) -> bool:
        """Stores one decoded request in one transaction; when this returns it survives a kill.

        Returns False, changing nothing, when the same trajectory is there already, so that a
        resumed recording may append again. Raises :class:`TraceError` when another trajectory has
        that ordinal, and NotFoundError for an unknown recording.
        """
        return self.append_trajectories(recording, [(ordinal, trajectory, steps)]) == 1

    def append_trajectories(self, recording: str, items: Sequence[Appended]) -> int:
        """:meth:`append_trajectory` for several in one transaction; how many were new."""
        now = self.clock()
        rows = [request_row((recording, n), now, text, steps) for n, text, steps in items]
        with self.database.write() as session:
            _locked(session, recording)
            statement = insert(session, Trajectory.__table__).on_conflict_do_nothing()
            returned = statement.returning(Trajectory.__table__.c.ordinal)
            added = set(session.execute(returned, rows).scalars() if rows else ())
            seen = set(added)
            for ordinal, trajectory, _ in items:
                if ordinal in seen:  # again in one batch it is held against the first
                    seen.remove(ordinal)
                    continue
                stored = session.get_one(Trajectory, (recording, ordinal))
                if isinstance(stored.tokens, Damaged):
                    raise _damaged(recording, ordinal, "its token ids", stored.tokens)
                if stored != trajectory:
                    raise TraceError(
                        f"recording {recording} already holds another trajectory at {ordinal}: "
                        f"request {stored.request_id!r}, not {trajectory.request_id!r} as given"
                    )
        return len(added)

    def recorded_ordinals(self, recording: str, after: int = -1) -> frozenset[int]:
        """The ordinals above ``after`` that hold a trajectory."""
        t = Trajectory
        query = select(t.ordinal).where(t.recording_id == recording, t.ordinal > after)
        with self.database.read() as session:
            return frozenset(session.scalars(query))

    def text_places(self, recording: str) -> dict[int, Place]:
        """Where the requests that have a text are stored, damaged ones too, by ordinal, in
        order."""
        t = Trajectory
        with self.database.read() as session:
            rows = session.execute(_texts_of(recording, t.recording_id, t.ordinal))
            return {number: (name, ordinal) for _, number, name, ordinal in rows}

    def text_ordinals(self, recording: str) -> tuple[int, ...]:
        """The ordinals of the requests that have a text, damaged ones too, in order."""
        return tuple(self.text_places(recording))

    def request_parts(self, recording: str, deal: Deal) -> dict[int, str]:
        """The part of every request with a text by ordinal, in order; of damaged ones too. Those
        that have none yet are given the parts that ``deal`` returns for all, in one transaction.
        Takes the recording as :meth:`get_recording` does."""
        t = Trajectory
        name = self.resolve_recording(recording)
        with self.database.read() as session:
            stored = session.execute(_texts_of(name, t.part)).all()
        parts = {number: part for _, number, part in stored if part is not None}
        if len(parts) == len(stored):
            return parts
        columns = (t.category, t.part, t.request_id, t.tokens, t.recording_id, t.ordinal)
        with self.database.write() as session:
            _locked(session, name)
            rows = session.execute(_texts_of(name, *columns)).all()
            texts = [None if isinstance(row.tokens, Damaged) else row.tokens for row in rows]
            numbers = conversations([row.request_id for row in rows], texts).tolist()
            of = [(row.category, n, row.part) for row, n in zip(rows, numbers, strict=True)]
            parts = {row.number: part for row, part in zip(rows, deal(of), strict=True)}
            new = [
                {
                    "recording_id": row.recording_id,
                    "ordinal": row.ordinal,
                    "part": parts[row.number],
                }
                for row in rows
                if row.part is None
            ]
            if new:
                session.execute(update(t), new)
        return parts

    def put_panoramas(self, recording: str, items: Sequence[tuple[int, Panorama]]) -> int:
        """Stores what drafts would propose along trajectories, in one transaction, in place of what
        was stored of the same, unless another recorder stored that and more meanwhile; how many
        were stored. Raises :class:`TraceError` when one does not fit its trajectory. Those of a
        sample whose request was removed meanwhile are left out."""
        t, p, s, rows = Trajectory, Panorama, SampledRequest, []
        first, last = (of((n for n, _ in items), default=0) for of in (min, max))
        own, listed = requests_of([recording], t, t.n_output, t.verifier, t.recording_id, t.ordinal)
        of_text = union_all(
            own.where(t.ordinal.between(first, last)), listed.where(s.number.between(first, last))
        )
        with self.database.write() as session:
            is_sample = _locked(session, recording).source == SAMPLE
            texts = {n: text for _, n, *text in session.execute(of_text)}
            held = {
                (n, draft): extent
                for draft in {panorama.draft for _, panorama in items}
                for _, n, *extent in session.execute(_extents(recording, draft, first, last))
            }
            for ordinal, panorama in items:
                if _holds_more(held.get((ordinal, panorama.draft)), panorama):
                    continue
                if ordinal not in texts:
                    if is_sample:
                        continue
                    raise NotFoundError(f"recording {recording} has no trajectory {ordinal}")
                length, verifier, *place = texts[ordinal]
                if length != panorama.positions:
                    raise TraceError(
                        f"a panorama of {panorama.positions} positions does not fit trajectory "
                        f"{ordinal} of {recording}, which has {length} tokens"
                    )
                key = dict(zip(("recording_id", "ordinal"), place, strict=True))
                rows.append({**_summary(panorama, cast(Verifier, verifier)), **key})
            if rows:
                statement = insert(session, p.__table__)
                new = {name: statement.excluded[name] for name in rows[0]}
                keys = {"index_elements": [*p.__table__.primary_key]}
                session.execute(statement.on_conflict_do_update(**keys, set_=new), rows)
        return len(rows)

    def missing_panoramas(
        self, recording: str, draft: str, gamma_max: int, width: int = 1, depth: int = 1
    ) -> tuple[int, ...]:
        """Ordinals of texts without a panorama of this draft that holds at least as much, in
        order."""
        with self.database.read() as session:
            have = {
                ordinal
                for _, ordinal, *extent in session.execute(_extents(recording, draft))
                if all(map(ge, extent, (gamma_max, width, depth)))
            }
        return tuple(n for n in self.text_ordinals(recording) if n not in have)

    def load(
        self,
        text: str,
        drafts: Collection[str] | None = None,
        *,
        steps: bool = False,
        ordinals: Collection[int] | None = None,
        skip_corrupted: bool = False,
    ) -> LoadedRecording:
        """A recording in memory, named as :meth:`get_recording` takes it, of the requests that
        have a text.

        It has the panoramas of ``drafts`` (all by default) and, if ``steps``, the executed rounds;
        of ``ordinals`` alone where they are given. A damaged blob raises
        :class:`CorruptedChunkError` naming it; with ``skip_corrupted`` it is left out and listed in
        ``skipped``.
        """
        skipped: list[Skipped] | None = [] if skip_corrupted else None
        info = self.get_recording(text)
        requests = self.iterate(info.id, drafts, steps=steps, ordinals=ordinals, skipped=skipped)
        return LoadedRecording(info, tuple(requests), tuple(skipped or ()))

    def iterate(
        self,
        recording: str,
        drafts: Collection[str] | None = None,
        *,
        steps: bool = False,
        ordinals: Collection[int] | None = None,
        skipped: list[Skipped] | None = None,
    ) -> Iterator[RecordedRequest]:
        """The requests that have a text, in order, a batch in memory at a time. Damaged blobs
        raise, or go to ``skipped`` if it is given."""
        t, p = Trajectory, Panorama
        places = self.text_places(recording)
        chosen = [n for n in (places if ordinals is None else sorted(ordinals)) if n in places]
        texts, tries = select(t), select(p).order_by(p.draft)
        if steps:
            texts = texts.options(undefer(t.steps))
        if drafts is not None:
            tries = tries.where(p.draft.in_(drafts))

        def usable(value: Any, ordinal: int, what: str, draft: str | None = None) -> bool:
            if not isinstance(value, Damaged):
                return True
            if skipped is None:
                raise _damaged(recording, ordinal, what, value)
            skipped.append(Skipped(recording, ordinal, draft, value.problem))
            return False

        for i in range(0, len(chosen), BATCH):
            batch = chosen[i : i + BATCH]
            at = [places[n] for n in batch]
            panoramas: dict[Place, dict[str, Panorama]] = {}
            with self.database.read() as session:
                rows = session.scalars(texts.where(_is_at(at)))
                stored = {(row.recording_id, row.ordinal): row for row in rows}
                for row in session.scalars(tries.where(_is_at(at, p))):
                    panoramas.setdefault((row.recording_id, row.ordinal), {})[row.draft] = row
            for n, place in zip(batch, at, strict=True):
                text = stored.get(place)
                # It may have been removed since its place was read.
                if text is None or not usable(text.tokens, n, "its token ids"):
                    continue
                good = {
                    draft: panorama
                    for draft, panorama in panoramas.get(place, {}).items()
                    if usable(panorama.trie, n, f"panorama of draft {draft!r}", draft)
                }
                rounds = (text.steps if steps else None) or ()
                yield RecordedRequest(
                    n, text, good, rounds if usable(rounds, n, "its steps") else ()
                )


def counted(session: Session, recordings: Sequence[Recording]) -> tuple[Recording, ...]:
    """The recordings, with the counts of what they hold or list, in four queries at most."""
    t, p, s = Trajectory, Panorama, SampledRequest
    samples = [recording.id for recording in recordings if recording.source == SAMPLE]
    ids = [recording.id for recording in recordings]
    is_text, length = t.tokens.is_not(None), func.sum(t.n_output)
    count, texts = func.count(), func.count().filter(is_text)
    sums = select(t.recording_id, count, texts, length).group_by(t.recording_id)
    listed = select(s.sample_id, count, func.count().filter(is_text, s.is_text), length)
    listed = listed.join(t, _stored_as(t)).group_by(s.sample_id).where(s.sample_id.in_(samples))
    requests: dict[str, tuple[int, int, int]] = {}
    for query in (sums.where(t.recording_id.in_(ids)), *([listed] if samples else ())):
        for name, number, with_text, tokens in session.execute(query):
            requests[name] = number, with_text, int(tokens)
    extent = p.draft, count, func.min(p.gamma_max), func.min(p.width), func.min(p.depth)
    whole = ~p.draft.contains(SHORTLIST_MARK)
    by_draft = select(p.recording_id, *extent).group_by(p.recording_id, p.draft).order_by(p.draft)
    by_draft = by_draft.where(p.recording_id.in_(ids), whole)
    of_samples = select(s.sample_id, *extent).group_by(s.sample_id, p.draft).order_by(p.draft)
    of_samples = of_samples.join(p, _stored_as(p)).where(s.sample_id.in_(samples), s.is_text, whole)
    drafts: dict[str, dict[str, Extent]] = {}
    for by in (by_draft, *([of_samples] if samples else ())):
        for name, draft, *sizes in session.execute(by):
            drafts.setdefault(name, {})[draft] = Extent(*sizes)
    for recording in recordings:
        of = requests.get(recording.id, (0, 0, 0))
        recording.n_requests, recording.n_texts, recording.n_output_tokens = of
        recording.drafts = drafts.get(recording.id, {})
    return tuple(recordings)


def _uncounted(recordings: Sequence[Recording]) -> tuple[Recording, ...]:
    """The recordings, with counts of nothing."""
    for recording in recordings:
        recording.n_requests = recording.n_texts = recording.n_output_tokens = 0
        recording.drafts = {}
    return tuple(recordings)


def _damaged(recording: str, ordinal: int, what: str, of: Damaged) -> CorruptedChunkError:
    return CorruptedChunkError(
        f"recording {recording}, request {ordinal}: {what} cannot be used ({of.problem}); the "
        "others still can"
    )


def digest_of(asked: Asked) -> str:
    """SHA-256 of what a recording was asked for, hex."""
    return hashlib.sha256(json.dumps(asdict(asked), sort_keys=True).encode()).hexdigest()


def _locked(session: Session, recording: str) -> Recording:
    """The recording; other writers of it, of a sample also of the recordings whose requests it
    lists, and its removal, wait until the transaction ends. Raises NotFoundError."""
    row = session.get(Recording, recording, with_for_update={"key_share": True})
    if row is None:
        raise NotFoundError(
            f"there is no recording {recording!r}; `traces list` shows those there are"
        )
    if row.source == SAMPLE:
        of = select(SampledRequest.recording_id).where(SampledRequest.sample_id == recording)
        others = select(Recording.id).where(Recording.id.in_(of)).order_by(Recording.id)
        session.execute(others.with_for_update(key_share=True)).all()
    return row


def _holds_more(held: Sequence[Any] | None, p: Panorama) -> bool:
    """Whether a stored panorama of this gamma_max, width and depth is larger than another."""
    size = [p.gamma_max, p.width, p.depth]
    return held is not None and held != size and all(map(ge, held, size))


def requests_of(
    recordings: Collection[str], of: type[Trajectory | Panorama], *columns: Any
) -> tuple[Select[Any], Select[Any]]:
    """Selects columns of requests: of those stored in these recordings, and of those that these
    list as samples, each after the recording (``holder``) and the number there (``number``)."""
    s = SampledRequest
    own = select(of.recording_id.label("holder"), of.ordinal.label("number"), *columns)
    listed = select(s.sample_id.label("holder"), s.number.label("number"), *columns)
    return (
        own.where(of.recording_id.in_(recordings)),
        listed.join(of, _stored_as(of)).where(s.sample_id.in_(recordings)),
    )


def _stored_as(of: type[Trajectory | Panorama]) -> Any:
    """Joins what a sample lists with where it is stored."""
    s = SampledRequest
    return and_(of.recording_id == s.recording_id, of.ordinal == s.ordinal)


def _is_at(places: Sequence[Place], of: type[Trajectory | Panorama] = Trajectory) -> Any:
    """Whether a request is one of those that are stored at these places."""
    return tuple_(of.recording_id, of.ordinal).in_(places)


def _texts_of(recording: str, *columns: Any) -> Any:
    """Selects columns of the requests of a recording that have a text, in order, as
    :func:`requests_of` does."""
    t = Trajectory
    own, listed = requests_of([recording], t, *columns)
    is_text = t.tokens.is_not(None)
    listed = listed.where(SampledRequest.is_text, is_text)
    return union_all(own.where(is_text), listed).order_by("number")


def _extents(recording: str, draft: str, first: int = 0, last: int = 2**31 - 1) -> Any:
    """Selects what the panoramas of a draft hold, of the requests from the ``first`` to the
    ``last``: holder, number, gamma_max, width, depth."""
    p, s = Panorama, SampledRequest
    own, listed = requests_of([recording], p, p.gamma_max, p.width, p.depth)
    return union_all(
        own.where(p.draft == draft, p.ordinal.between(first, last)),
        listed.where(p.draft == draft, s.number.between(first, last)),
    )


_OF_REQUEST = ("request_id", "category", "tokens", "sampling", "max_new_tokens", "finish")


def request_row(
    place: Place, created_at: datetime, trajectory: Trajectory, steps: Sequence[Step]
) -> dict[str, Any]:
    """A decoded request's row, with its rounds and the sums of them. One without a text says how
    long its prompt and its output are."""
    t = trajectory
    lengths = t.n_prompt, t.n_output
    if t.tokens is not None:
        lengths = len(t.prompt_ids), len(t.output_ids)
    by_policy = {}
    for policy in sorted({s.policy for s in steps}):
        rounds = [s for s in steps if s.policy == policy]
        by_position = {
            k: compact(v) for k, v in asdict(step_survival(rounds)).items() if k != "starts"
        }
        by_policy[policy] = sums_of(rounds) | {"by_position": by_position}
    columns = ("rounds", "drafted", "accepted", "seconds")
    total = {name: value for name, value in sums_of(steps).items() if name in columns}
    recording, ordinal = place
    return {
        **{"recording_id": recording, "ordinal": ordinal, "created_at": created_at},
        **{name: getattr(t, name) for name in (*_OF_REQUEST, "verifier", "stop_strings")},
        **dict(zip(("n_prompt", "n_output"), lengths, strict=True)),
        **total,
        "by_policy": by_policy,
        "steps": tuple(steps) or None,
    }


def sums_of(steps: Sequence[Step]) -> dict[str, Any]:
    """What is summed of rounds. ``prompts``: those that read a prompt; ``batches``: the sum of
    their batch sizes; ``seconds``: :attr:`Step.own_s`."""
    # Plain numbers: SQLite's driver takes numpy's for bytes.
    sums = {
        of: int(sum(getattr(s, of) for s in steps)) for of in ("drafted", "accepted", "emitted")
    }
    return {
        "rounds": len(steps),
        **sums,
        "seconds": float(sum(s.own_s for s in steps)),
        "prompts": int(sum(s.reads_prompt for s in steps)),
        "batches": int(sum(s.batch for s in steps)),
    }


def _summary(panorama: Panorama, verifier: Verifier) -> dict[str, Any]:
    """A panorama's columns, with its summaries; ``verifier`` is its text's."""
    sums, n = survival(panorama, verifier), panorama.positions
    names = ("draft", "gamma_max", "width", "depth", "shared", "trie")
    return {
        **{name: getattr(panorama, name) for name in names},
        "n": n,
        "acceptance": float(keep_probability(panorama, verifier).mean()) if n else 0.0,
        "at_risk": compact(sums.at_risk),
        "survived": compact(sums.survived),
    }

"""Recordings in the database: begun, appended to, resumed, read back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from operator import ge
from typing import Any, Literal, NamedTuple, cast

from sqlalchemy import func, select, update
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
from spectune.traces.tables import NO_TRAFFIC, Panorama, Recording, StoredWorkload, Trajectory

BATCH = 64
"""Requests read per query when iterating."""
Appended = tuple[int, Trajectory, Sequence[Step]]
Deal = Callable[[Sequence[tuple[str, int, str | None]]], Sequence[str]]
"""Gives requests parts, by the category of each, the number of its conversation and the part that
it has already."""


class Traffic(NamedTuple):
    """What a recording holds of some traffic: how many requests, how many of them with a text, and
    when the last ended."""

    recording: Recording
    requests: int
    texts: int
    ended_at: datetime


class RequestKey(NamedTuple):
    """Where a request is stored, and when it ended."""

    recording: str
    ordinal: int
    ended_at: datetime


class Recordings(Storage):
    """Recordings, their trajectories, panoramas and executed rounds."""

    def create_recording(self, asked: Asked) -> Recording:
        """Begins a recording in state ``recording``. The pair and the workload must be stored
        already (NotFoundError)."""
        columns = {**vars(asked), "options": dict(asked.options), "asked_sha256": digest_of(asked)}
        with self.database.write() as session:
            require(session, StoredWorkload, asked.workload_id)
            new = self._put_new(session, Recording, "rec", **columns, state="recording")
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
        latest first; a copy of it that was gathered is no more traffic.

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
        query = select(t.recording_id, t.ordinal, t.created_at).limit(last)
        query = query.where(t.recording_id.in_(recordings), t.created_at >= since)
        if with_text:
            query = query.where(t.tokens.is_not(None))
        query = query.order_by(t.created_at.desc(), t.recording_id.desc(), t.ordinal.desc())
        with self.database.read() as session:
            for row in session.execute(query.execution_options(yield_per=1000)):
                yield RequestKey(*row)

    def served_requests(self, recordings: Collection[str]) -> list[ServedRequest]:
        """The requests of recordings of which rounds are stored, whether their text is or not, in
        the order in which they ended. Damaged ones are left out."""
        t = Trajectory
        query = select(t.recording_id, t.ordinal, t.n_prompt, t.steps)
        query = query.where(t.recording_id.in_(recordings), t.steps.is_not(None))
        query = query.order_by(t.created_at, t.recording_id, t.ordinal)
        with self.database.read() as session:
            rows = session.execute(query.execution_options(yield_per=1000))
            return [
                ServedRequest(name, ordinal, n_prompt, steps)
                for name, ordinal, n_prompt, steps in rows
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
        key = {"recording_id": recording, "created_at": self.clock()}
        rows = [{**trajectory_columns(t, steps), "ordinal": n, **key} for n, t, steps in items]
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

    def text_ordinals(self, recording: str) -> tuple[int, ...]:
        """The ordinals of the requests that have a text, damaged ones too, in order."""
        t = Trajectory
        query = select(t.ordinal).where(t.recording_id == recording, t.tokens.is_not(None))
        with self.database.read() as session:
            return tuple(session.scalars(query.order_by(t.ordinal)))

    def request_parts(self, recording: str, deal: Deal) -> dict[int, str]:
        """The part of every request with a text by ordinal, in order; of damaged ones too. Those
        that have none yet are given the parts that ``deal`` returns for all, in one transaction.
        Takes the recording as :meth:`get_recording` does."""
        t = Trajectory
        name = self.resolve_recording(recording)
        dealt = select(t.ordinal, t.part).order_by(t.ordinal)
        dealt = dealt.where(t.recording_id == name, t.tokens.is_not(None))
        with self.database.read() as session:
            stored = session.execute(dealt).all()
        parts = {ordinal: part for ordinal, part in stored if part is not None}
        if len(parts) == len(stored):
            return parts
        whole = dealt.with_only_columns(t.ordinal, t.category, t.part, t.request_id, t.tokens)
        with self.database.write() as session:
            _locked(session, name)
            rows = session.execute(whole).all()
            texts = [None if isinstance(row.tokens, Damaged) else row.tokens for row in rows]
            numbers = conversations([row.request_id for row in rows], texts).tolist()
            of = [(row.category, n, row.part) for row, n in zip(rows, numbers, strict=True)]
            parts = {row.ordinal: part for row, part in zip(rows, deal(of), strict=True)}
            new = [
                {"recording_id": name, "ordinal": row.ordinal, "part": parts[row.ordinal]}
                for row in rows
                if row.part is None
            ]
            if new:
                session.execute(update(t), new)
        return parts

    def put_panoramas(self, recording: str, items: Sequence[tuple[int, Panorama]]) -> int:
        """Stores what drafts would propose along trajectories, in one transaction, in place of what
        was stored of the same, unless another recorder stored that and more meanwhile; how many
        were stored. Raises :class:`TraceError` when one does not fit its trajectory."""
        t, p, rows = Trajectory, Panorama, []
        first, last = (of((n for n, _ in items), default=0) for of in (min, max))
        of_text = select(t.ordinal, t.n_output, t.verifier).where(t.recording_id == recording)
        with self.database.write() as session:
            _locked(session, recording)
            found = session.execute(of_text.where(t.ordinal.between(first, last)))
            texts = {n: text for n, *text in found}
            held = {
                (n, draft): extent
                for draft in {panorama.draft for _, panorama in items}
                for n, *extent in session.execute(
                    _extents(recording, draft).where(p.ordinal.between(first, last))
                )
            }
            for ordinal, panorama in items:
                if _holds_more(held.get((ordinal, panorama.draft)), panorama):
                    continue
                if ordinal not in texts:
                    raise NotFoundError(f"recording {recording} has no trajectory {ordinal}")
                length, verifier = texts[ordinal]
                if length != panorama.positions:
                    raise TraceError(
                        f"a panorama of {panorama.positions} positions does not fit trajectory "
                        f"{ordinal} of {recording}, which has {length} tokens"
                    )
                key = {"recording_id": recording, "ordinal": ordinal}
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
                for ordinal, *extent in session.execute(_extents(recording, draft))
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
        with_text: bool = True,
    ) -> Iterator[RecordedRequest]:
        """The requests that have a text, in order, a batch in memory at a time; without
        ``with_text`` all of those ``ordinals``. Damaged blobs raise, or go to ``skipped`` if it is
        given."""
        t, p = Trajectory, Panorama
        chosen = self.text_ordinals(recording) if ordinals is None else sorted(ordinals)
        texts = select(t).where(t.recording_id == recording).order_by(t.ordinal)
        if with_text:
            texts = texts.where(t.tokens.is_not(None))
        tries = select(p).where(p.recording_id == recording).order_by(p.draft)
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
            panoramas: dict[int, dict[str, Panorama]] = {}
            with self.database.read() as session:
                trajectories = session.scalars(texts.where(t.ordinal.in_(batch))).all()
                for row in session.scalars(tries.where(p.ordinal.in_(batch))):
                    panoramas.setdefault(row.ordinal, {})[row.draft] = row
            for text in trajectories:
                n = text.ordinal
                if not usable(text.tokens, n, "its token ids"):
                    continue
                good = {
                    draft: panorama
                    for draft, panorama in panoramas.get(n, {}).items()
                    if usable(panorama.trie, n, f"panorama of draft {draft!r}", draft)
                }
                rounds = (text.steps if steps else None) or ()
                yield RecordedRequest(
                    n, text, good, rounds if usable(rounds, n, "its steps") else ()
                )


def counted(session: Session, recordings: Sequence[Recording]) -> tuple[Recording, ...]:
    """The recordings, with the counts of what they hold, in two queries however many there are."""
    t, p, ids = Trajectory, Panorama, [recording.id for recording in recordings]
    texts = func.count().filter(t.tokens.is_not(None))
    sums = select(t.recording_id, func.count(), texts, func.sum(t.n_output))
    requests = {
        name: (count, with_text, int(tokens))
        for name, count, with_text, tokens in session.execute(
            sums.where(t.recording_id.in_(ids)).group_by(t.recording_id)
        )
    }
    least = (func.min(column) for column in (p.gamma_max, p.width, p.depth))
    extents = select(p.recording_id, p.draft, func.count(), *least).order_by(p.draft)
    extents = extents.where(~p.draft.contains(SHORTLIST_MARK))
    drafts: dict[str, dict[str, Extent]] = {}
    by_draft = extents.where(p.recording_id.in_(ids)).group_by(p.recording_id, p.draft)
    for name, draft, *extent in session.execute(by_draft):
        drafts.setdefault(name, {})[draft] = Extent(*extent)
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
    """The recording; other writers of it, and its removal, wait until the transaction ends. Raises
    NotFoundError."""
    row = session.get(Recording, recording, with_for_update={"key_share": True})
    if row is None:
        raise NotFoundError(
            f"there is no recording {recording!r}; `traces list` shows those there are"
        )
    return row


def _holds_more(held: Sequence[Any] | None, p: Panorama) -> bool:
    """Whether a stored panorama of this gamma_max, width and depth is larger than another."""
    size = [p.gamma_max, p.width, p.depth]
    return held is not None and held != size and all(map(ge, held, size))


def _extents(recording: str, draft: str) -> Any:
    """Selects what the panoramas of a draft hold: ordinal, gamma_max, width, depth."""
    p = Panorama
    columns = (p.ordinal, p.gamma_max, p.width, p.depth)
    return select(*columns).where(p.recording_id == recording, p.draft == draft)


_OF_REQUEST = ("request_id", "category", "tokens", "sampling", "max_new_tokens", "finish")


def trajectory_columns(trajectory: Trajectory, steps: Sequence[Step]) -> dict[str, Any]:
    """A decoded request's columns, with its rounds and the sums of them. One without a text says
    how long its prompt and its output are."""
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
    return {
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

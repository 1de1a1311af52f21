"""Recordings in the database: begun, appended to, resumed, read back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from operator import ge
from typing import Any, Literal, NamedTuple, TypeVar, cast

from sqlalchemy import select

from spectune.db import CorruptedChunkError, NotFoundError
from spectune.db.models import (
    PanoramaChunkRow,
    RecordingRow,
    StepChunkRow,
    TrajectoryRow,
    WorkloadRow,
)
from spectune.traces.errors import TraceError
from spectune.traces.packing import pack_panorama, unpack_panorama, unpack_steps
from spectune.traces.recording import (
    DESIGNED,
    Asked,
    RecordedRequest,
    Recording,
    RecordingInfo,
    Skipped,
)
from spectune.traces.schema import Panorama, Sampling, Step, Trajectory, Verifier
from spectune.traces.store.recording_rows import (
    infos,
    panorama_values,
    recording_row,
    spec_hash,
    step_values,
    trajectory_of,
    trajectory_values,
)
from spectune.traces.store.rows import (
    Storage,
    insert_all_absent,
    named_row,
    newest,
    require,
    resolve,
    unpacked,
)

BATCH = 64
"""Requests read per query when iterating."""
EXTENT = ("gamma_max", "width", "depth")
"""Columns of what a panorama holds, beside its covers."""
Appended = tuple[int, Trajectory, Sequence[Step]]
T = TypeVar("T")


class Rows(NamedTuple):
    """Rows of some requests: texts in order, panoramas by draft, executed rounds."""

    texts: list[TrajectoryRow]
    panoramas: list[PanoramaChunkRow]
    steps: list[StepChunkRow]


class Recorded(NamedTuple):
    """Where a request of some traffic is stored, and how it was decoded."""

    recording: str
    ordinal: int
    sampling: Sampling
    verifier: Verifier


class Recordings(Storage):
    """Recordings, their trajectories, panoramas and executed rounds."""

    def create_recording(self, asked: Asked) -> RecordingInfo:
        """Begins a recording in state ``recording``. The pair and the workload must be stored
        already (NotFoundError)."""
        columns = asdict(asked)
        how = {"state": "recording", "progress": {}, "spec_sha256": spec_hash(columns)}
        with self.database.write() as session:
            require(session, WorkloadRow, asked.workload_id)
            new = self._insert_new(session, RecordingRow, "rec", **columns, **how)
            return infos(session, [session.get_one(RecordingRow, new)])[0]

    def find_recording(
        self, asked: Asked, *, state: Literal["recording", "complete"]
    ) -> RecordingInfo | None:
        """The newest recording that was asked for exactly so and is in ``state``, or None.

        One in state ``recording`` is what a killed ``record`` resumes; a ``complete`` one is what
        ``tune`` need not record again.
        """
        found = newest(RecordingRow, spec_sha256=spec_hash(asdict(asked)), state=state).limit(1)
        with self.database.read() as session:
            return next(iter(infos(session, session.scalars(found).all())), None)

    def list_recordings(
        self, pair_id: str | None = None, *, state: str | None = None
    ) -> tuple[RecordingInfo, ...]:
        """Recordings of a pair and state (each optional), newest first; :mod:`traces.store.query`
        filters by more."""
        query = newest(RecordingRow, pair_id=pair_id, state=state)
        with self.database.read() as session:
            return tuple(infos(session, session.scalars(query).all()))

    def recorded_since(self, pair_id: str, since: datetime) -> tuple[Recorded, ...]:
        """Every request of a pair's traffic stored at ``since`` or later, oldest first; a copy of
        it that was gathered is no more traffic.

        It goes by the request's moment and not the recording's: serving appends to one recording
        for days.
        """
        t = TrajectoryRow
        query = (
            select(t.recording_id, t.ordinal, t.sampling, t.verifier)
            .join(RecordingRow, RecordingRow.id == t.recording_id)
            .where(
                RecordingRow.pair_id == pair_id, RecordingRow.source.not_in((DESIGNED, "gathered"))
            )
            .where(t.created_at >= since)
            .order_by(t.created_at, t.recording_id, t.ordinal)
        )
        with self.database.read() as session:
            return tuple(
                Recorded(recording, ordinal, Sampling(**sampling), cast(Verifier, verifier))
                for recording, ordinal, sampling, verifier in session.execute(query)
            )

    def resolve_recording(self, text: str) -> str:
        """The id meant by an id, an unambiguous beginning of one, or ``latest``. Raises
        NotFoundError."""
        with self.database.read() as session:
            return resolve(session, RecordingRow, text)

    def get_recording(self, text: str) -> RecordingInfo:
        """The recording without its chunks, by id, an unambiguous beginning of one, or ``latest``.
        Raises NotFoundError."""
        with self.database.read() as session:
            return infos(session, [named_row(session, RecordingRow, text)])[0]

    def finish_recording(self, recording: str) -> None:
        """Marks a recording ``complete``; doing it again changes nothing but the time."""
        with self.database.write() as session:
            row = recording_row(session, recording, writing=True)
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
        texts = [
            {
                **trajectory_values(trajectory, steps),
                "recording_id": recording,
                "ordinal": ordinal,
                "created_at": self.clock(),
            }
            for ordinal, trajectory, steps in items
        ]
        executed = [step_values(steps) if steps else None for _, _, steps in items]
        with self.database.write() as session:
            recording_row(session, recording, writing=True)
            added = insert_all_absent(session, TrajectoryRow, texts, "ordinal")
            new = set(added)
            for text, rounds in zip(texts, executed, strict=True):
                ordinal, name = text["ordinal"], text["request_id"]
                if ordinal not in new:
                    there = session.get_one(TrajectoryRow, (recording, ordinal))
                    if there.sha256 != text["sha256"] or there.request_id != name:
                        raise TraceError(
                            f"recording {recording} already holds another trajectory at {ordinal}: "
                            f"request {there.request_id!r}, not {name!r} as given"
                        )
                    continue
                new.remove(ordinal)  # the same ordinal again in one batch is held against the first
                if rounds is not None:
                    of = ("recording_id", "ordinal", "request_id", "category")
                    session.add(StepChunkRow(**{key: text[key] for key in of}, **rounds))
        return len(added)

    def recorded_ordinals(self, recording: str, after: int = -1) -> frozenset[int]:
        """The ordinals above ``after`` that hold a trajectory."""
        found = select(TrajectoryRow.ordinal).where(
            TrajectoryRow.recording_id == recording, TrajectoryRow.ordinal > after
        )
        with self.database.read() as session:
            return frozenset(session.scalars(found))

    def request_categories(self, recording: str) -> dict[int, str]:
        """The category of every request by ordinal, in order; of damaged ones too. Takes the
        recording as :meth:`get_recording` does."""
        t = TrajectoryRow
        with self.database.read() as session:
            name = resolve(session, RecordingRow, recording)
            of = select(t.ordinal, t.category).where(t.recording_id == name).order_by(t.ordinal)
            return {row.ordinal: row.category for row in session.execute(of)}

    def put_panoramas(self, recording: str, items: Sequence[tuple[int, Panorama]]) -> int:
        """Stores what drafts would propose along trajectories, in one transaction; how many were
        stored.

        Each takes the place of one that it holds all of; one that is longer (larger gamma_max),
        wider, deeper or covers other growths is kept instead (:meth:`most_held` says what to record
        so that it is not). Raises :class:`TraceError` when one does not fit its trajectory.
        """
        packed = [(ordinal, panorama, pack_panorama(panorama)) for ordinal, panorama in items]
        stored = 0
        with self.database.write() as session:
            recording_row(session, recording, writing=True)
            for ordinal, panorama, chunk in packed:
                text = session.get(TrajectoryRow, (recording, ordinal))
                if text is None:
                    raise NotFoundError(f"recording {recording} has no trajectory {ordinal}")
                if text.n_output != panorama.positions:
                    raise TraceError(
                        f"a panorama of {panorama.positions} positions does not fit trajectory "
                        f"{ordinal} of {recording}, which has {text.n_output} tokens"
                    )
                row = panorama_values(panorama, cast(Verifier, text.verifier))
                there = session.get(PanoramaChunkRow, (recording, ordinal, row["draft"]))
                if there is not None:
                    larger = any(getattr(there, name) > row[name] for name in EXTENT)
                    if larger or not set(there.covers) <= set(row["covers"]):
                        continue
                    session.delete(there)
                    session.flush()
                of = {"recording_id": recording, "ordinal": ordinal}
                session.add(PanoramaChunkRow(**of, **row, **vars(chunk)))
                stored += 1
        return stored

    def missing_panoramas(
        self,
        recording: str,
        draft: str,
        gamma_max: int,
        width: int = 1,
        depth: int = 1,
        covers: Collection[str] = (),
    ) -> tuple[int, ...]:
        """Ordinals whose trajectory has no panorama of this draft that holds at least as much, in
        order."""
        t, least = TrajectoryRow, (gamma_max, width, depth)
        with self.database.read() as session:
            recording_row(session, recording)
            every = set(session.scalars(select(t.ordinal).where(t.recording_id == recording)))
            have = {
                ordinal
                for ordinal, names, *held in session.execute(_held(recording, draft))
                if set(covers) <= set(names) and all(map(ge, held, least))
            }
        return tuple(sorted(every - have))

    def most_held(self, recording: str, draft: str) -> tuple[int, int, int, tuple[str, ...]]:
        """(gamma_max, width, depth, covers): the most that any stored panorama of this draft holds;
        (0, 0, 0, ()) where there is none."""
        with self.database.read() as session:
            recording_row(session, recording)
            rows = session.execute(_held(recording, draft)).all()
        if not rows:
            return 0, 0, 0, ()
        _, covers, gammas, widths, depths = zip(*rows, strict=True)
        names = tuple(sorted({name for of in covers for name in of}))
        return max(gammas), max(widths), max(depths), names

    def load(
        self,
        text: str,
        drafts: Collection[str] | None = None,
        *,
        steps: bool = False,
        ordinals: Collection[int] | None = None,
        skip_corrupted: bool = False,
    ) -> Recording:
        """A recording in memory, named as :meth:`get_recording` takes it.

        It has the panoramas of ``drafts`` (all by default) and, if ``steps``, the executed rounds;
        of ``ordinals`` alone where they are given. A damaged chunk raises
        :class:`CorruptedChunkError` naming it; with ``skip_corrupted`` it is left out and listed in
        ``skipped``.
        """
        skipped: list[Skipped] | None = [] if skip_corrupted else None
        info = self.get_recording(text)
        requests = self.iterate(info.id, drafts, steps=steps, ordinals=ordinals, skipped=skipped)
        return Recording(info, tuple(requests), tuple(skipped or ()))

    def iterate(
        self,
        recording: str,
        drafts: Collection[str] | None = None,
        *,
        steps: bool = False,
        ordinals: Collection[int] | None = None,
        skipped: list[Skipped] | None = None,
    ) -> Iterator[RecordedRequest]:
        """The requests in order, a batch in memory at a time. Damaged chunks raise, or go to
        ``skipped`` if it is given."""
        wanted = sorted(self.recorded_ordinals(recording) if ordinals is None else ordinals)
        for i in range(0, len(wanted), BATCH):
            rows = self.rows_of(recording, wanted[i : i + BATCH], drafts, steps=steps)
            yield from _requests(recording, rows, skipped)

    def rows_of(
        self,
        recording: str,
        ordinals: Sequence[int],
        drafts: Collection[str] | None = None,
        *,
        steps: bool = False,
    ) -> Rows:
        """What is stored of requests, for :meth:`iterate`; at one moment."""

        def of(row: Any) -> Any:
            return select(row).where(row.recording_id == recording, row.ordinal.in_(ordinals))

        p = PanoramaChunkRow
        chosen = of(p).order_by(p.draft)
        if drafts is not None:
            chosen = chosen.where(p.draft.in_(drafts))
        with self.database.read() as session:
            return Rows(
                list(session.scalars(of(TrajectoryRow).order_by(TrajectoryRow.ordinal))),
                list(session.scalars(chosen)),
                list(session.scalars(of(StepChunkRow))) if steps else [],
            )


def _held(recording: str, draft: str) -> Any:
    """Selects what the panoramas of a draft hold: ordinal, covers, and :data:`EXTENT`."""
    p = PanoramaChunkRow
    columns = (p.ordinal, p.covers, p.gamma_max, p.width, p.depth)
    return select(*columns).where(p.recording_id == recording, p.draft == draft)


def _requests(
    recording: str, rows: Rows, skipped: list[Skipped] | None
) -> Iterator[RecordedRequest]:
    """The values that rows hold; damaged chunks raise, or go to ``skipped``."""
    panoramas: dict[int, list[PanoramaChunkRow]] = {}
    for chunk in rows.panoramas:
        panoramas.setdefault(chunk.ordinal, []).append(chunk)
    executed = {row.ordinal: row for row in rows.steps}

    def usable(row: Any, unpack: Callable[[Any], T], what: str) -> T | None:
        try:
            return unpacked(row, unpack, f"recording {recording}, request {row.ordinal}: {what}")
        except CorruptedChunkError as error:
            if skipped is None:
                raise CorruptedChunkError(f"{error}; the others still can") from error.__cause__
            draft = getattr(row, "draft", None)
            skipped.append(Skipped(recording, row.ordinal, draft, str(error.__cause__)))
            return None

    for text in rows.texts:
        trajectory = usable(text, trajectory_of, "its token ids")
        if trajectory is None:
            continue
        held: dict[str, Panorama] = {}
        for chunk in panoramas.get(text.ordinal, ()):
            value = usable(chunk, unpack_panorama, f"panorama of draft {chunk.draft!r}")
            if value is not None:
                held[chunk.draft] = value
        rounds = executed.get(text.ordinal)
        steps = () if rounds is None else usable(rounds, unpack_steps, "its steps") or ()
        yield RecordedRequest(text.ordinal, trajectory, held, steps)

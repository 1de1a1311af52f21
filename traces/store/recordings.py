"""Recordings in the database: begun, appended to, resumed, read back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from spectune.db import NotFoundError
from spectune.db.models import (
    PairRow,
    PanoramaChunkRow,
    RecordingRow,
    StepChunkRow,
    TrajectoryRow,
    WorkloadRow,
)
from spectune.traces.codec import Chunk, CodecError
from spectune.traces.errors import TraceError
from spectune.traces.packing import (
    pack_chain,
    pack_steps,
    pack_tokens,
    pack_tree,
    unpack_chain,
    unpack_steps,
    unpack_tree,
)
from spectune.traces.recording import RecordedRequest, Recording, RecordingInfo, Skipped
from spectune.traces.schema import (
    ChainPanorama,
    Proposals,
    Sampling,
    Step,
    Trajectory,
    TreePanorama,
    Verifier,
)
from spectune.traces.store.recording_rows import (
    CHAIN,
    TREE_KINDS,
    chain_values,
    corrupted,
    infos,
    recording_row,
    spec_hash,
    step_row,
    step_sums,
    trajectory_of,
    tree_values,
)
from spectune.traces.store.rows import (
    Storage,
    chunk_of,
    chunk_values,
    equal,
    insert_all_absent,
    named_row,
    newest_first,
    require,
    resolve,
)

BATCH = 64
"""Requests read per query when iterating."""
Appended = tuple[int, Trajectory, Sequence[Step]]
P = TypeVar("P", ChainPanorama, TreePanorama)
S = TypeVar("S")
T = TypeVar("T")


class Rows(NamedTuple):
    """Rows of some requests: texts in order, panoramas by draft, executed rounds."""

    texts: list[TrajectoryRow]
    panoramas: list[PanoramaChunkRow]
    steps: list[StepChunkRow]


class Recordings(Storage):
    """Recordings, their trajectories, panoramas and executed rounds."""

    def create_recording(
        self,
        pair_id: str,
        workload_id: str | None,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        verifier: Verifier = "coupled",
        options: Mapping[str, Any] | None = None,
        source: str = "record",
    ) -> RecordingInfo:
        """Begins a recording in state ``recording``. The pair and the workload must be stored
        already (NotFoundError)."""
        values = {
            "pair_id": pair_id,
            "workload_id": workload_id,
            "source": source,
            "state": "recording",
            "sampling": asdict(sampling),
            "max_new_tokens": max_new_tokens,
            "verifier": verifier,
            "options": dict(options or {}),
            "progress": {},
            "spec_sha256": spec_hash(
                pair_id, workload_id, sampling, max_new_tokens, verifier, options, source
            ),
            "created_at": self.clock(),
        }
        with self.database.write() as session:
            require(session, PairRow, pair_id, "before recording with it")
            if workload_id is not None:
                require(session, WorkloadRow, workload_id, "before recording it")
            new = self.insert_new(session, RecordingRow, "rec", values)
            return infos(session, [session.get_one(RecordingRow, new)])[0]

    def find_recording(
        self,
        pair_id: str,
        workload_id: str | None,
        sampling: Sampling,
        *,
        state: Literal["recording", "complete"],
        max_new_tokens: int,
        verifier: Verifier = "coupled",
        options: Mapping[str, Any] | None = None,
        source: str = "record",
    ) -> RecordingInfo | None:
        """The newest recording begun with exactly these arguments that is in ``state``, or None.

        One in state ``recording`` is what a killed ``record`` resumes; a ``complete`` one is what
        ``tune`` need not record again.
        """
        spec = spec_hash(pair_id, workload_id, sampling, max_new_tokens, verifier, options, source)
        with self.database.read() as session:
            row = session.scalars(
                select(RecordingRow)
                .where(RecordingRow.spec_sha256 == spec, RecordingRow.state == state)
                .order_by(*newest_first(RecordingRow))
                .limit(1)
            ).first()
            return None if row is None else infos(session, [row])[0]

    def list_recordings(
        self, pair_id: str | None = None, *, source: str | None = None, state: str | None = None
    ) -> tuple[RecordingInfo, ...]:
        """Recordings of a pair, source and state (each optional), newest first;
        :mod:`traces.store.query` filters by more."""
        wanted = equal(
            {RecordingRow.pair_id: pair_id, RecordingRow.source: source, RecordingRow.state: state}
        )
        query = select(RecordingRow).where(*wanted).order_by(*newest_first(RecordingRow))
        with self.database.read() as session:
            return tuple(infos(session, session.scalars(query).all()))

    def recorded_since(self, pair_id: str, since: datetime) -> tuple[tuple[str, int], ...]:
        """(recording, ordinal) of every request of a pair stored at ``since`` or later, oldest
        first.

        It goes by the request's moment and not the recording's: serving appends to one recording
        for days.
        """
        query = (
            select(TrajectoryRow.recording_id, TrajectoryRow.ordinal)
            .join(RecordingRow, RecordingRow.id == TrajectoryRow.recording_id)
            .where(RecordingRow.pair_id == pair_id, TrajectoryRow.created_at >= since)
        )
        order = (TrajectoryRow.created_at, TrajectoryRow.recording_id, TrajectoryRow.ordinal)
        with self.database.read() as session:
            return tuple(
                (recording, ordinal)
                for recording, ordinal in session.execute(query.order_by(*order))
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
        packed = [
            (*item, pack_tokens(item[1].prompt_ids, item[1].output_ids), pack_steps(item[2]))
            for item in items
        ]
        rows = [
            self._trajectory_values(recording, ordinal, of, steps, tokens)
            for ordinal, of, steps, tokens, _ in packed
        ]
        with self.database.write() as session:
            recording_row(session, recording, writing=True)
            added = insert_all_absent(session, TrajectoryRow, rows, "ordinal")
            new = set(added)
            for ordinal, trajectory, steps, tokens, rounds in packed:
                name = trajectory.request_id
                if ordinal not in new:
                    there = session.get_one(TrajectoryRow, (recording, ordinal))
                    if there.sha256 != tokens.sha256 or there.request_id != name:
                        raise TraceError(
                            f"recording {recording} already holds another trajectory at {ordinal}: "
                            f"request {there.request_id!r}, not {name!r} as given"
                        )
                    continue
                new.remove(ordinal)  # the same ordinal again in one batch is held against the first
                if steps:
                    session.add(
                        step_row(
                            recording,
                            None,
                            ordinal,
                            name,
                            trajectory.category,
                            steps,
                            chunk_values(rounds),
                        )
                    )
        return len(added)

    def _trajectory_values(
        self,
        recording: str,
        ordinal: int,
        trajectory: Trajectory,
        steps: Sequence[Step],
        tokens: Chunk,
    ) -> dict[str, Any]:
        sums = step_sums(steps)
        return {
            "recording_id": recording,
            "ordinal": ordinal,
            "request_id": trajectory.request_id,
            "category": trajectory.category,
            "sampling": asdict(trajectory.sampling),
            "max_new_tokens": trajectory.max_new_tokens,
            "verifier": trajectory.verifier,
            "finish": trajectory.finish,
            "stop_strings": list(trajectory.stop_strings),
            "n_prompt": len(trajectory.prompt_ids),
            "n_output": len(trajectory.output_ids),
            "created_at": self.clock(),
            **{name: sums[name] for name in ("rounds", "drafted", "accepted", "seconds")},
            **chunk_values(tokens),
        }

    def recorded_ordinals(self, recording: str, after: int = -1) -> frozenset[int]:
        """The ordinals above ``after`` that hold a trajectory."""
        found = select(TrajectoryRow.ordinal).where(
            TrajectoryRow.recording_id == recording, TrajectoryRow.ordinal > after
        )
        with self.database.read() as session:
            return frozenset(session.scalars(found))

    def put_panoramas(self, recording: str, items: Sequence[tuple[int, ChainPanorama]]) -> int:
        """Stores what a draft would propose along trajectories, in one transaction, each in the
        place of a shorter or equal one; how many were stored.

        A longer one (larger gamma_max) is kept instead. Raises :class:`TraceError` when one does
        not fit its trajectory.
        """
        return self._put(
            recording,
            items,
            pack_chain,
            chain_values,
            lambda there, new: there.gamma_max > new.gamma_max,
        )

    def missing_panoramas(self, recording: str, draft: str, gamma_max: int) -> tuple[int, ...]:
        """Ordinals whose trajectory has no panorama of this draft with at least this gamma_max, in
        order."""
        return self._missing(recording, draft, CHAIN, width=0, depth=gamma_max, covers=())

    def put_tree_panoramas(self, recording: str, items: Sequence[tuple[int, TreePanorama]]) -> int:
        """Stores what a draft's trees would read along trajectories, in one transaction; how many
        were stored.

        Each replaces one that it holds all of; one that is wider, deeper or covers other growths is
        kept instead (:meth:`tree_limits` says what to record so that it is not). Raises
        :class:`TraceError` when one does not fit its trajectory.
        """

        def keeps(there: PanoramaChunkRow, new: TreePanorama) -> bool:
            larger = there.width > new.width or there.gamma_max > new.depth
            return larger or not set(there.covers) <= set(new.covers)

        return self._put(recording, items, pack_tree, tree_values, keeps)

    def _put(
        self,
        recording: str,
        items: Sequence[tuple[int, P]],
        pack: Callable[[P], Chunk],
        values: Callable[[P, Verifier], dict[str, Any]],
        keeps: Callable[[PanoramaChunkRow, P], bool],
    ) -> int:
        """Stores panoramas as rows of ``values`` in one transaction, each in the place of what is
        there unless that ``keeps`` it; how many were stored."""
        packed = [(ordinal, panorama, chunk_values(pack(panorama))) for ordinal, panorama in items]
        stored = 0
        with self.database.write() as session:
            recording_row(session, recording, writing=True)
            for ordinal, panorama, chunk in packed:
                verifier = self._fitting(session, recording, ordinal, panorama.positions).verifier
                row = values(panorama, "rejection" if verifier == "rejection" else "coupled")
                there = session.get(
                    PanoramaChunkRow, (recording, ordinal, panorama.draft, row["kind"])
                )
                if there is not None:
                    if keeps(there, panorama):
                        continue
                    session.delete(there)
                    session.flush()
                session.add(
                    PanoramaChunkRow(
                        recording_id=recording,
                        ordinal=ordinal,
                        draft=panorama.draft,
                        **row,
                        **chunk,
                    )
                )
                stored += 1
        return stored

    def missing_trees(
        self,
        recording: str,
        draft: str,
        *,
        width: int,
        depth: int,
        proposals: Proposals = "coupled",
        covers: Collection[str] = (),
    ) -> tuple[int, ...]:
        """Ordinals whose trajectory has no tree panorama of this draft with at least this width and
        depth and these covers, in order."""
        return self._missing(
            recording, draft, TREE_KINDS[proposals], width=width, depth=depth, covers=covers
        )

    def _missing(
        self,
        recording: str,
        draft: str,
        kind: str,
        *,
        width: int,
        depth: int,
        covers: Collection[str],
    ) -> tuple[int, ...]:
        p, wanted = PanoramaChunkRow, set(covers)
        stored = select(p.ordinal, p.covers).where(
            p.recording_id == recording, p.draft == draft, p.kind == kind
        )
        with self.database.read() as session:
            recording_row(session, recording)
            enough = stored.where(p.width >= width, p.gamma_max >= depth)
            have = {ordinal for ordinal, names in session.execute(enough) if wanted <= set(names)}
            every = session.scalars(
                select(TrajectoryRow.ordinal).where(TrajectoryRow.recording_id == recording)
            )
            return tuple(sorted(set(every) - have))

    def tree_limits(
        self, recording: str, draft: str, proposals: Proposals = "coupled"
    ) -> tuple[int, int, tuple[str, ...]]:
        """(width, depth, covers): the most that any stored tree panorama of this draft holds; (0,
        0, ()) where there is none."""
        p = PanoramaChunkRow
        query = select(p.width, p.gamma_max, p.covers).where(
            p.recording_id == recording, p.draft == draft, p.kind == TREE_KINDS[proposals]
        )
        with self.database.read() as session:
            recording_row(session, recording)
            rows = session.execute(query).all()
        names = {name for _, _, covers in rows for name in covers}
        return (
            max((w for w, _, _ in rows), default=0),
            max((d for _, d, _ in rows), default=0),
            tuple(sorted(names)),
        )

    def _fitting(
        self, session: Session, recording: str, ordinal: int, positions: int
    ) -> TrajectoryRow:
        """The trajectory there. Raises NotFoundError when there is none, :class:`TraceError` when
        it has another number of tokens."""
        trajectory = session.get(TrajectoryRow, (recording, ordinal))
        if trajectory is None:
            raise NotFoundError(f"recording {recording} has no trajectory {ordinal}")
        if trajectory.n_output != positions:
            raise TraceError(
                f"a panorama of {positions} positions does not fit trajectory {ordinal} of "
                f"{recording}, which has {trajectory.n_output} tokens"
            )
        return trajectory

    def load(
        self,
        text: str,
        drafts: Collection[str] | None = None,
        *,
        steps: bool = False,
        trees: bool = False,
        ordinals: Collection[int] | None = None,
        skip_corrupted: bool = False,
    ) -> Recording:
        """A recording in memory, named as :meth:`get_recording` takes it.

        It has the panoramas of ``drafts`` (all by default) and, if ``steps``, the executed rounds,
        if ``trees``, the trees of these drafts; of ``ordinals`` alone where they are given. A
        damaged chunk raises :class:`CorruptedChunkError` naming it; with ``skip_corrupted`` it is
        left out and listed in ``skipped``.
        """
        skipped: list[Skipped] | None = [] if skip_corrupted else None
        info = self.get_recording(text)
        requests = tuple(
            self.iterate(
                info.id, drafts, steps=steps, trees=trees, ordinals=ordinals, skipped=skipped
            )
        )
        return Recording(info, requests, tuple(skipped or ()))

    def iterate(
        self,
        recording: str,
        drafts: Collection[str] | None = None,
        *,
        steps: bool = False,
        trees: bool = False,
        ordinals: Collection[int] | None = None,
        skipped: list[Skipped] | None = None,
    ) -> Iterator[RecordedRequest]:
        """The requests in order, a batch in memory at a time. Damaged chunks raise, or go to
        ``skipped`` if it is given."""
        wanted = sorted(self.recorded_ordinals(recording) if ordinals is None else ordinals)
        for i in range(0, len(wanted), BATCH):
            yield from self._batch(recording, wanted[i : i + BATCH], drafts, steps, trees, skipped)

    def rows_of(
        self,
        recording: str,
        ordinals: Sequence[int],
        drafts: Collection[str] | None = None,
        *,
        steps: bool = False,
        trees: bool = False,
    ) -> Rows:
        """What is stored of requests, for :meth:`iterate`; at one moment."""
        chosen = select(PanoramaChunkRow).where(
            PanoramaChunkRow.recording_id == recording, PanoramaChunkRow.ordinal.in_(ordinals)
        )
        if drafts is not None:
            chosen = chosen.where(PanoramaChunkRow.draft.in_(drafts))
        chosen = chosen.where(
            PanoramaChunkRow.kind.in_((CHAIN, *TREE_KINDS.values()) if trees else (CHAIN,))
        )
        rounds = select(StepChunkRow).where(
            StepChunkRow.recording_id == recording, StepChunkRow.ordinal.in_(ordinals)
        )
        texts = select(TrajectoryRow).where(
            TrajectoryRow.recording_id == recording, TrajectoryRow.ordinal.in_(ordinals)
        )
        with self.database.read() as session:
            return Rows(
                list(session.scalars(texts.order_by(TrajectoryRow.ordinal))),
                list(session.scalars(chosen.order_by(PanoramaChunkRow.draft))),
                list(session.scalars(rounds)) if steps else [],
            )

    def _batch(
        self,
        recording: str,
        ordinals: Sequence[int],
        drafts: Collection[str] | None,
        steps: bool,
        trees: bool,
        skipped: list[Skipped] | None,
    ) -> Iterator[RecordedRequest]:
        found = self.rows_of(recording, ordinals, drafts, steps=steps, trees=trees)
        panoramas: dict[int, list[PanoramaChunkRow]] = {}
        for chunk in found.panoramas:
            panoramas.setdefault(chunk.ordinal, []).append(chunk)
        executed = {row.ordinal: row for row in found.steps}

        def unpacked(
            unpack: Callable[[S], T], stored: S, ordinal: int, draft: str | None, what: str
        ) -> T | None:
            try:
                return unpack(stored)
            except CodecError as error:
                if skipped is None:
                    raise corrupted(recording, ordinal, what, error) from error
                skipped.append(Skipped(recording, ordinal, draft, str(error)))
                return None

        for row in found.texts:
            trajectory = unpacked(trajectory_of, row, row.ordinal, None, "its token ids")
            if trajectory is None:
                continue
            held: dict[str, dict[str, Any]] = {kind: {} for kind in (CHAIN, *TREE_KINDS.values())}
            for chunk in panoramas.get(row.ordinal, ()):
                unpack, what = (
                    (unpack_chain, "panorama")
                    if chunk.kind == CHAIN
                    else (unpack_tree, "tree panorama")
                )
                value = unpacked(
                    unpack,
                    chunk_of(chunk),
                    row.ordinal,
                    chunk.draft,
                    f"{what} of draft {chunk.draft!r}",
                )
                if value is not None:
                    held[chunk.kind][chunk.draft] = value
            walked: tuple[Step, ...] | None = ()
            if row.ordinal in executed:
                walked = unpacked(
                    unpack_steps, chunk_of(executed[row.ordinal]), row.ordinal, None, "its steps"
                )
            chains, coupled, by_probability = held.values()
            yield RecordedRequest(
                row.ordinal, trajectory, chains, walked or (), coupled, by_probability
            )

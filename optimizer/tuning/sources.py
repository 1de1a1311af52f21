"""Which recorded texts are meant: a recording by its name, or what a pair decoded lately, whatever
recording holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from spectune.optimizer.deployment import tuned_for
from spectune.optimizer.report.words import EVIDENCE
from spectune.traces.errors import TraceError
from spectune.traces.recording import LoadedRecording, RecordedRequest, Skipped
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.recordings import Appended, Recorded
from spectune.traces.tables import NO_TRAFFIC, Recording

if TYPE_CHECKING:
    from spectune.runtime.pair import PairSpec

SAMPLE = 200
"""Requests taken of recorded traffic unless somebody says otherwise."""
Tell = Callable[[str], None]


def recording_named(
    store: TraceStore, name: str, *, pair: PairSpec | None = None, engine: str | None = None
) -> Recording:
    """The recording of an id, of the beginning of one, or ``latest``: the newest of the pair and
    the engine (any, where it is None) that holds requests, and is neither a sample that a tuning
    made nor what a profile was measured with. Raises NotFoundError where there is none, TraceError
    for another pair's or engine's."""
    if name == "latest" and (pair is not None or engine is not None):
        of_pair = store.list_recordings(None if pair is None else pair.id)
        of_engine = [i for i in of_pair if engine in (None, i.engine) and i.n_texts]
        latest = next((i for i in of_engine if i.source not in NO_TRAFFIC), None)
        if latest is not None:
            return latest
        if engine is not None:
            of = "" if pair is None else f" of pair {pair.id} ({pair.name})"
            raise TraceError(
                f"--engine {engine}: nothing{of} that it served was recorded yet; docs/vllm.md "
                "says how"
            )
        assert pair is not None
        raise TraceError(f"nothing is recorded of pair {pair.id} ({pair.name}); `record` it")
    info = store.get_recording(name)
    if pair is not None and info.pair_id != pair.id:
        raise TraceError(
            f"recording {info.id} was made with pair {info.pair_id}, not with {pair.id} "
            f"({pair.name}); give that pair"
        )
    if engine is not None and info.engine != engine:
        raise TraceError(f"--engine {engine}: recording {info.id} is of {info.engine}")
    return info


def of_one_sampling(requests: Sequence[Recorded], tell: Tell = lambda line: None) -> list[Recorded]:
    """Returns the requests of one temperature, filters and verifier, as a policy is tuned for: the
    most common, of equals the latest. Calls ``tell`` with a line on that where there are others."""
    numbers = Counter(_decoded_by(r) for r in reversed(requests))
    sampling, number = numbers.most_common(1)[0]
    chosen = [r for r in requests if _decoded_by(r) == sampling]
    if number < len(requests):
        settings = tuned_for(chosen[-1].sampling, chosen[-1].verifier).items()
        shown = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in settings)
        tell(
            f"recorded traffic has {len(numbers)} samplings; this takes the most common, {shown}: "
            f"{number} of {len(requests)} requests"
        )
    return chosen


def traffic_since(
    store: TraceStore,
    info: Recording,
    since: datetime,
    drafts: Collection[str],
    *,
    tell: Tell = lambda line: None,
) -> LoadedRecording:
    """What the pair and the engine of a recording decoded ``since`` a moment, of whatever
    recording, as one in memory, oldest first, with the panoramas of ``drafts``. Raises TraceError
    where that is nothing."""
    names = {i.id for i in store.list_recordings(info.pair_id) if i.engine == info.engine}
    recorded = [r for r in store.recorded_since(info.pair_id, since) if r.recording in names]
    if not recorded:
        raise TraceError(
            f"nothing was recorded with pair {info.pair_id} on {info.engine} since "
            f"{since:%Y-%m-%d %H:%M} UTC"
        )
    keys = [(r.recording, r.ordinal) for r in of_one_sampling(recorded, tell)]
    requests: dict[tuple[str, int], RecordedRequest] = {}
    skipped: list[Skipped] = []
    for name, group in groupby(sorted(keys), itemgetter(0)):
        ordinals = [ordinal for _, ordinal in group]
        part = store.load(name, drafts, ordinals=ordinals, skip_corrupted=True)
        requests |= {(name, request.ordinal): request for request in part.requests}
        skipped += part.skipped
    in_order = tuple(requests[key] for key in keys if key in requests)
    return LoadedRecording(info, in_order, tuple(skipped))


def sample_since(
    store: TraceStore,
    pair_id: str,
    since: timedelta | datetime,
    limit: int | None = None,
    *,
    key: str | None = None,
    engine: str | None = None,
    tell: Tell = lambda line: None,
) -> Recording:
    """A recording of a sample (:func:`gather`) of what was decoded ``since``. Without a ``key`` one
    that was made for the same words is used again until a tuning of the pair has ended."""
    if key is None:
        words = f"since {since} limit {limit} engine {engine}"
        ended = {artifact.provenance.get("study") for artifact in store.list_artifacts(EVIDENCE)}
        done = {study.recording_id for study in store.list_studies(pair_id) if study.id in ended}
        key = f"{words} #{len(done)}"
    name = gather(store, pair_id, since, limit, key=key, engine=engine, tell=tell)
    return store.get_recording(name)


def gather(
    store: TraceStore,
    pair_id: str,
    since: timedelta | datetime,
    sample: int | None = None,
    *,
    key: str,
    engine: str | None = None,
    tell: Tell = lambda line: None,
) -> str:
    """Stores a recording of what a pair decoded ``since`` a moment or so long ago, a random
    ``sample`` of the requests that are :func:`of_one_sampling` (None: :data:`SAMPLE`), with their
    rounds and panoramas; its id. Of an ``engine`` that is named the last of its requests: they
    arrived as they did. ``tell`` is told how many were left out.

    Doing it again with the same ``key`` finds the recording made before. Raises TraceError where
    nothing was recorded, or only what an engine sampled, which nothing decodes again here.
    """
    complete = store.list_recordings(pair_id, state="complete")
    ready = next((r for r in complete if r.options.get("gathered") == key), None)
    if ready is not None:
        return ready.id
    moment = store.clock() - since if isinstance(since, timedelta) else since
    traffic = store.recorded_since(pair_id, moment)
    if engine is not None:
        names = {i.id for i in store.list_recordings(pair_id) if i.engine == engine}
        traffic = tuple(r for r in traffic if r.recording in names)
    ours = [r for r in traffic if engine or r.verifier != "greedy" or r.sampling.greedy]
    if traffic and not ours:
        raise TraceError(
            f"none of the {len(traffic)} requests recorded with pair {pair_id} since "
            f"{moment:%Y-%m-%d %H:%M} UTC was decoded by a verifier of ours, as an engine's are "
            "not above temperature 0; `tune --arrivals recorded` tunes for an engine's traffic"
        )
    if not ours:
        raise TraceError(
            f"nothing was recorded with pair {pair_id} since {moment:%Y-%m-%d %H:%M} UTC; run "
            "`record`, or `run --record`"
        )
    chosen = of_one_sampling(ours, tell)
    latest, most = chosen[-1], sample or SAMPLE
    picked = list(range(len(chosen)))[-most:]
    if engine is None:
        picked = sorted(np.random.default_rng(0).permutation(len(chosen))[:most].tolist())
    if len(picked) < len(chosen):
        which = "a sample of" if engine is None else "the last"
        tell(
            f"recorded traffic has {len(chosen)} requests: this takes {which} {len(picked)} "
            "(`tune --limit` says how many)"
        )
    items: dict[tuple[str, bytes], Appended] = {}
    panoramas = []
    damaged: list[Skipped] = []
    for ordinal, index in enumerate(picked):
        source, at = chosen[index][:2]
        for request in store.iterate(source, ordinals=[at], steps=True, skipped=damaged):
            content = (request.trajectory.request_id, request.trajectory.output_ids.tobytes())
            if content not in items:
                items[content] = (ordinal, request.trajectory, request.steps)
                panoramas += [(ordinal, panorama) for panorama in request.panoramas.values()]
    for chunk in damaged:
        tell(f"left out: {chunk}")
    if not items:
        raise TraceError(f"all that was sampled of pair {pair_id} is damaged; `db check` lists it")
    options = {**store.get_recording(latest.recording).options, "gathered": key}
    longest = max(text.max_new_tokens for _, text, _ in items.values())
    asked = Asked(
        pair_id, None, latest.sampling, longest, latest.verifier, options, source="gathered"
    )
    info = store.create_recording(asked)
    store.append_trajectories(info.id, list(items.values()))
    store.put_panoramas(info.id, panoramas)
    store.finish_recording(info.id)
    return info.id


def _decoded_by(request: Recorded) -> tuple[object, ...]:
    """What a policy is tuned for: all but the seed, and at temperature 0 nothing else matters."""
    if request.sampling.greedy:
        return (0.0,)
    return tuple(tuned_for(request.sampling, request.verifier).values())

"""Which recorded texts are meant: a recording by its name, or what a pair decoded lately, whatever
recording holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spectune.optimizer.deployment import tuned_for
from spectune.optimizer.tuning.tuned import EVIDENCE
from spectune.traces.errors import TraceError
from spectune.traces.recording import LoadedRecording, RecordedRequest, Skipped
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.recordings import RequestKey, Traffic
from spectune.traces.tables import NO_TRAFFIC, Recording, Trajectory

if TYPE_CHECKING:
    from spectune.runtime.pair import PairSpec

SAMPLE = 200
"""Requests taken of recorded traffic unless somebody says otherwise."""
MOST_ARRIVALS = 5000
"""Most requests of a server whose arrivals and batches go with a sample, the last."""
Tell = Callable[[str], None]


def recording_named(
    store: TraceStore, name: str, *, pair: PairSpec | None = None, engine: str | None = None
) -> Recording:
    """The recording of an id, of the beginning of one, or ``latest``: the newest of the pair and
    the engine (any, where it is None) that holds texts, and is neither a sample that a tuning
    made nor what a profile was measured with. Raises NotFoundError where there is none, TraceError
    for another pair's or engine's."""
    if name == "latest" and (pair is not None or engine is not None):
        newest = newest_recording(store, None if pair is None else pair.id, engine)
        if newest is not None:
            return newest
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


def newest_recording(
    store: TraceStore, pair_id: str | None = None, engine: str | None = None
) -> Recording | None:
    """The newest recording of a pair and an engine (any, where it is None) that holds texts, and is
    neither a sample that a tuning made nor what a profile was measured with; None where there is
    none."""
    for info in store.list_recordings(pair_id, with_counts=False):
        if engine in (None, info.engine) and info.source not in NO_TRAFFIC:
            counted = store.get_recording(info.id)
            if counted.n_texts:
                return counted
    return None


def texts_to_profile(
    store: TraceStore, pair: PairSpec, name: str | None
) -> tuple[str | None, Sequence[Trajectory]]:
    """A recording's id and its texts: the one of this name (:func:`recording_named`), else the
    pair's newest; (None, ()) where there is none. Raises NotFoundError or TraceError for a name
    that is not there, and where it holds no text."""
    if name is None:
        info = newest_recording(store, pair.id)
        if info is None:
            return None, ()
    else:
        info = recording_named(store, name, pair=pair)
    loaded = store.load(info.id, (), skip_corrupted=True)
    if not loaded.requests:
        raise TraceError(f"recording {info.id} holds no text; name another")
    return info.id, loaded.trajectories


class ServerTuned(NamedTuple):
    """The server that is tuned: its boot, and what policies are published for that suit it."""

    boot: str
    device_name: str


def of_one_sampling(traffic: Sequence[Traffic], tell: Tell = lambda line: None) -> list[Traffic]:
    """Returns what is of one temperature, filters and verifier, as a policy is tuned for: what the
    most texts have, of equals the latest. Calls ``tell`` with a line on that where there are
    others."""
    texts = Counter[tuple[object, ...]]()
    for row in traffic:
        texts[_decoded_by(row.recording)] += row.texts
    sampling, number = texts.most_common(1)[0]
    chosen = [row for row in traffic if _decoded_by(row.recording) == sampling]
    if number < texts.total():
        latest = chosen[0].recording
        settings = tuned_for(latest.sampling, latest.verifier).items()
        shown = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in settings)
        tell(
            f"recorded traffic has {len(texts)} samplings; this takes the most common, {shown}: "
            f"{number} of {texts.total()} requests"
        )
    return chosen


def of_one_server(
    store: TraceStore,
    traffic: Sequence[Traffic],
    server: ServerTuned | None = None,
    tell: Tell = lambda line: None,
) -> list[Traffic]:
    """Returns what one server was sent, as a policy is tuned for the load of a server and not for
    that of all replicas: of those with texts the ``server`` that is tuned, else the one with the
    most requests. Calls ``tell`` with a line on that where there are others."""
    boot = "" if server is None else server.boot
    names = store.server_names({boot, *(row.recording.start for row in traffic)})

    def place_of(start: str) -> str:
        return names.get(start, (start, ""))[0]

    servers: dict[str, list[Traffic]] = {}
    for row in traffic:
        servers.setdefault(place_of(row.recording.start), []).append(row)
    number = {
        place: sum(row.requests for row in rows)
        for place, rows in servers.items()
        if any(row.texts for row in rows)
    }
    if not number:
        return []
    is_own = place_of(boot) in number
    place = place_of(boot) if is_own else max(number, key=lambda place: number[place])
    chosen = servers[place]
    if len(servers) > 1:
        start = chosen[0].recording.start
        tell(
            f"recorded traffic is of {len(servers)} servers: this takes that of "
            f"{'this one' if is_own else 'the busiest'}, {names.get(start, ('', start))[1]}: "
            f"{number[place]} of {sum(row.requests for row in traffic)} requests"
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
    traffic = store.traffic_since(info.pair_id, since)
    recorded = [row for row in traffic if row.recording.engine == info.engine and row.texts]
    if not recorded:
        raise TraceError(
            f"nothing was recorded with pair {info.pair_id} on {info.engine} since "
            f"{since:%Y-%m-%d %H:%M} UTC"
        )
    names = [row.recording.id for row in of_one_sampling(recorded, tell)]
    keys = [(key.recording, key.ordinal) for key in store.request_keys(names, since)][::-1]
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
    server: ServerTuned | None = None,
    tell: Tell = lambda line: None,
) -> Recording:
    """A recording of a sample (:func:`gather`) of what was decoded ``since``. Without a ``key`` one
    that was made for the same words is used again until a tuning of the pair has ended."""
    if key is None:
        words = f"since {since} limit {limit} engine {engine} server {server and server.boot}"
        ended = {artifact.provenance.get("study") for artifact in store.list_artifacts(EVIDENCE)}
        done = {study.recording_id for study in store.list_studies(pair_id) if study.id in ended}
        key = f"{words} #{len(done)}"
    name = gather(store, pair_id, since, limit, key=key, engine=engine, server=server, tell=tell)
    return store.get_recording(name)


def gather(
    store: TraceStore,
    pair_id: str,
    since: timedelta | datetime,
    sample: int | None = None,
    *,
    key: str,
    engine: str | None = None,
    server: ServerTuned | None = None,
    tell: Tell = lambda line: None,
) -> str:
    """Stores a recording of what a pair decoded ``since`` a moment or so long ago, a random
    ``sample`` of the requests that are :func:`of_one_sampling` (None: :data:`SAMPLE`), with their
    rounds and panoramas; its id. Of an ``engine`` that is named the last of the requests of one
    server (:func:`of_one_server`), on the device of the ``server`` that is tuned, and without their
    texts all others that it was sent meanwhile: they arrived as they did, in the batches that they
    were in. ``tell`` is told how many were left out.

    Doing it again with the same ``key`` finds the recording made before. Raises TraceError where
    nothing was recorded, or only what an engine sampled, which nothing decodes again here.
    """
    complete = store.list_recordings(pair_id, state="complete", with_counts=False)
    ready = next((r for r in complete if r.options.get("gathered") == key), None)
    if ready is not None:
        return ready.id
    moment = store.clock() - since if isinstance(since, timedelta) else since
    traffic: Sequence[Traffic] = store.traffic_since(pair_id, moment)
    served: Sequence[Traffic] = ()
    if engine is not None:
        of_engine = [row for row in traffic if row.recording.engine == engine]
        if server is not None:
            of_engine = [row for row in of_engine if suits(row.recording, server)]
        traffic = served = of_one_server(store, of_engine, server, tell)
    texts = [row for row in traffic if row.texts]
    ours = [row for row in texts if engine or is_ours(row.recording)]
    if texts and not ours:
        raise TraceError(
            f"none of the {sum(row.texts for row in texts)} requests recorded with pair {pair_id} "
            f"since {moment:%Y-%m-%d %H:%M} UTC was decoded by a verifier of ours, as an engine's "
            "are not above temperature 0; `tune --arrivals recorded` tunes for an engine's traffic"
        )
    if not ours:
        raise TraceError(
            f"nothing was recorded with pair {pair_id} since {moment:%Y-%m-%d %H:%M} UTC; run "
            "`record`, or `run --record`"
        )
    chosen = of_one_sampling(ours, tell)
    number, most = sum(row.texts for row in chosen), sample or SAMPLE
    names = [row.recording.id for row in chosen]
    if engine is not None:
        picked = [*store.request_keys(names, moment, last=most)]
    else:
        numbers = {*np.random.default_rng(0).permutation(number)[:most].tolist()}
        keys = enumerate(store.request_keys(names, moment))
        picked = [key for n, key in keys if number - 1 - n in numbers]
    if len(picked) < number:
        which = "a sample of" if engine is None else "the last"
        tell(
            f"recorded traffic has {number} requests: this takes {which} {len(picked)} "
            "(`tune --limit` says how many)"
        )
    first = moment if len(picked) == number else picked[-1].ended_at
    items = _copied(store, picked, served, first, tell)
    if not any(request.trajectory.tokens is not None for request in items):
        raise TraceError(f"all that was sampled of pair {pair_id} is damaged; `db check` lists it")
    latest = chosen[0].recording
    options = {**latest.options, "gathered": key}
    longest = max(r.trajectory.max_new_tokens for r in items if r.trajectory.tokens is not None)
    asked = Asked(
        pair_id, None, latest.sampling, longest, latest.verifier, options, source="gathered"
    )
    info = store.create_recording(asked)
    store.append_trajectories(
        info.id, [(n, request.trajectory, request.steps) for n, request in enumerate(items)]
    )
    panoramas = [(n, panorama) for n, r in enumerate(items) for panorama in r.panoramas.values()]
    store.put_panoramas(info.id, panoramas)
    store.finish_recording(info.id)
    return info.id


def _copied(
    store: TraceStore,
    picked: Sequence[RequestKey],
    served: Sequence[Traffic],
    since: datetime,
    tell: Tell,
) -> list[RecordedRequest]:
    """The requests that were ``picked``, each text once, and of what one server ``served`` all
    others that ended ``since`` a moment, without their texts; in the order in which they ended. Of
    more than :data:`MOST_ARRIVALS` the last alone have their rounds."""
    texts = {(key.recording, key.ordinal) for key in picked}
    names = [row.recording.id for row in served]
    has_rounds = dict.fromkeys(picked, not names)
    if names:
        last = store.request_keys(names, since, last=MOST_ARRIVALS, with_text=False)
        has_rounds |= dict.fromkeys(last, True)
    by_recording: dict[str, list[int]] = {}
    for key in has_rounds:
        by_recording.setdefault(key.recording, []).append(key.ordinal)
    damaged: list[Skipped] = []
    how: dict[str, Any] = {"steps": True, "skipped": damaged, "with_text": False}
    found = {
        (name, request.ordinal): request
        for name, ordinals in by_recording.items()
        for request in store.iterate(name, ordinals=ordinals, **how)
    }
    items: list[RecordedRequest] = []
    contents = set[tuple[str, bytes]]()
    for key in sorted(has_rounds, key=lambda key: (key.ended_at, key.recording, key.ordinal)):
        place = key.recording, key.ordinal
        request = found.get(place)
        if request is None:  # it is damaged, or was forgotten meanwhile
            continue
        text = request.trajectory
        content = (text.request_id, b"" if text.tokens is None else text.output_ids.tobytes())
        is_copied = place in texts and text.tokens is not None and content not in contents
        if is_copied:
            contents.add(content)
        elif not names:
            continue
        else:
            request = replace(request, trajectory=text.without_text(), panoramas={})
        items.append(request if has_rounds[key] else replace(request, steps=()))
    for chunk in damaged:
        tell(f"left out: {chunk}")
    return items


def suits(recording: Recording, server: ServerTuned) -> bool:
    """Whether it was served on the device of a server; what steps cost is another card's else."""
    return recording.device_name in ("", server.device_name)


def is_ours(recording: Recording) -> bool:
    """Whether a verifier of ours decodes it again."""
    return recording.verifier != "greedy" or recording.sampling.greedy


def _decoded_by(recording: Recording) -> tuple[object, ...]:
    """What a policy is tuned for: all but the seed, and at temperature 0 nothing else matters."""
    if recording.sampling.greedy:
        return (0.0,)
    return tuple(tuned_for(recording.sampling, recording.verifier).values())

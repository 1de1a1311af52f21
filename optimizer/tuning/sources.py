"""Which recorded texts are meant: a recording by its name, or what a pair decoded lately, whatever
recording holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spectune.optimizer.deployment import tuned_for
from spectune.optimizer.tuning.parts import mixed
from spectune.optimizer.tuning.tuned import EVIDENCE
from spectune.traces.errors import TraceError
from spectune.traces.recording import LoadedRecording, RecordedRequest, Skipped
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.recordings import Listed, RequestKey, Traffic
from spectune.traces.tables import NO_TRAFFIC, SAMPLE, Recording, Trajectory

if TYPE_CHECKING:
    from spectune.runtime.pair import PairSpec

SAMPLED = 200
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
    """A sample of what a pair decoded ``since`` a moment or so long ago: a random ``limit`` of the
    requests that are :func:`of_one_sampling` (None: :data:`SAMPLED`). Of an ``engine`` that is
    named the last of the requests of one server (:func:`of_one_server`), on the device of the
    ``server`` that is tuned, and as its load all others that it was sent meanwhile: they arrived as
    they did, in the batches that they were in. ``tell`` is told how many were left out.

    Taken again with the same ``key`` it is the sample taken before; without one, for the same words
    until a tuning of the pair has ended. Raises TraceError where nothing was recorded, or only what
    an engine sampled, which nothing decodes again here.
    """
    if key is None:
        words = f"since {since} limit {limit} engine {engine} server {server and server.boot}"
        ended = {artifact.provenance.get("study") for artifact in store.list_artifacts(EVIDENCE)}
        done = {study.recording_id for study in store.list_studies(pair_id) if study.id in ended}
        key = f"{words} #{len(done)}"
    complete = store.list_recordings(pair_id, state="complete", with_counts=False)
    ready = next((r for r in complete if r.options.get("sample") == key), None)
    if ready is not None:
        return store.get_recording(ready.id)
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
    number, most = sum(row.texts for row in chosen), limit or SAMPLED
    names = [row.recording.id for row in chosen]
    if engine is not None:
        picked = [*store.request_keys(names, moment, last=most)]
    else:
        keys = [*store.request_keys(names, moment)][::-1]
        order = np.random.default_rng(0).permutation(len(keys)).tolist()
        # Those that an earlier sample dealt keep their parts: each part is to be had in proportion.
        picked = [keys[n] for n in mixed(order, [key.part or "" for key in keys])[:most]]
    if len(picked) < number:
        which = "a sample of" if engine is None else "the last"
        tell(
            f"recorded traffic has {number} requests: this takes {which} {len(picked)} "
            "(`tune --limit` says how many)"
        )
    readable = _readable(store, picked, tell)
    if not readable:
        raise TraceError(f"all that was sampled of pair {pair_id} is damaged; `db check` lists it")
    load = set[RequestKey]()
    if served:
        first = moment if len(picked) == number else picked[-1].ended_at
        of_server = [row.recording.id for row in served]
        load = {*store.request_keys(of_server, first, last=MOST_ARRIVALS, with_text=False)}
    latest = chosen[0].recording
    options, longest = {**latest.options, "sample": key}, max(readable.values())
    sampled = latest.sampling, longest, latest.verifier, options, SAMPLE
    listed = [
        Listed(of.recording, of.ordinal, of in readable, of in load or not served)
        for of in sorted({*readable, *load}, key=lambda of: (of.ended_at, *of[:2]))
    ]
    return store.create_sample(Asked(pair_id, None, *sampled), listed)


def _readable(store: TraceStore, picked: Sequence[RequestKey], tell: Tell) -> dict[RequestKey, int]:
    """The most new tokens of the requests whose texts can be read, each text once, the oldest of
    equal ones; ``tell`` is called with what is damaged."""
    by_recording: dict[str, list[int]] = {}
    for key in picked:
        by_recording.setdefault(key.recording, []).append(key.ordinal)
    damaged: list[Skipped] = []
    found = {
        (name, request.ordinal): request.trajectory
        for name, ordinals in by_recording.items()
        for request in store.iterate(name, (), ordinals=ordinals, skipped=damaged)
    }
    for chunk in damaged:
        tell(f"left out: {chunk}")
    readable: dict[RequestKey, int] = {}
    contents = set[tuple[str, bytes]]()
    for key in sorted(picked, key=lambda key: (key.ended_at, *key[:2])):
        text = found.get(key[:2])
        if text is not None:
            content = text.request_id, text.output_ids.tobytes()
            if content not in contents:
                readable[key] = text.max_new_tokens
            contents.add(content)
    return readable


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

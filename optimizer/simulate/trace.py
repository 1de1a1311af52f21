"""Opening traces: the one place where what policies are replayed from is taken from a recording and
put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.db.errors import NotFoundError
from spectune.engines.abilities import VLLM, engine_named
from spectune.engines.vllm.prompt_lookup import LEAST, MOST, copied
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import Nodes, Reader, Replay, ReplayTrace
from spectune.optimizer.traffic import traffic_since
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import GAMMA_LIMIT, Policy
from spectune.traces.errors import PairError, PolicyError, TraceError
from spectune.traces.recording import TREE_DEPTH, Skipped, how_to_record_trees
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Panorama, Recording, Trajectory

if TYPE_CHECKING:
    from spectune.runtime.loading import LoadedPair


class NoRequestsError(TraceError):
    """A recording, or the part of it that was asked for, has no usable request."""


class Opened(NamedTuple):
    """A recording's trace, the damaged chunks that were left out of it, and the ordinals of its
    requests."""

    trace: ReplayTrace
    info: Recording
    skipped: tuple[Skipped, ...]
    ordinals: tuple[int, ...] = ()


def open_trace(
    store: TraceStore,
    recording: str,
    policies: Iterable[Policy] = (),
    *,
    drafts: Iterable[str] = (),
    ordinals: Collection[int] | None = None,
    since: datetime | None = None,
    skip_corrupted: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Opened:
    """What ``policies`` are replayed from, and the panoramas of ``drafts`` beside. With ``since``
    that is of all that the recording's pair and engine decoded since then, and ``tell`` is called
    with what of it was taken.

    ``ordinals``: of these requests alone. With ``skip_corrupted`` the trace has the requests of
    which nothing is damaged or missing; otherwise CorruptedChunkError and TraceError name the
    first. A server adds to what it serves all the time, so of that nothing has to be there yet.
    Where an engine's prefill yields the first token, replay begins after it, and ``ngram`` copies
    as that engine does. Raises NotFoundError for an unknown recording, PolicyError for the first
    policy whose draft was not recorded, NoRequestsError where no request is left.
    """
    info = store.get_recording(recording)
    engine = engine_named(info.engine)
    after_first = engine.prefill_emits
    names = set(drafts)
    replayed = [p for policy in policies for p in policy.candidates if p.speculates]
    needing = [p for p in replayed if p.draft != "ngram" or not after_first]
    for policy in replayed:
        if since is None and policy in needing:
            _check_recorded(store, policy, info)
        names.add(policy.draft)
    looked_up = after_first and "ngram" in names
    if looked_up:  # by the engine's rule, which needs no panorama
        names.remove("ngram")
    options: dict[str, Any] = {"skip_corrupted": skip_corrupted}
    if since is None:
        loaded = store.load(info.id, sorted(names), ordinals=ordinals, **options)
    else:
        loaded = traffic_since(store, info, since, sorted(names), tell=tell, **options)
    usable = loaded
    if skip_corrupted or since is not None or info.source == "serve":
        usable = usable.having(names)
    if since is not None:
        trees = {policy.draft for policy in needing if policy.is_tree and not policy.shortlisted}
        having = (r for r in usable.requests if all(r.panoramas[d].width > 1 for d in trees))
        usable = replace(usable, requests=tuple(having))
        for policy in () if usable.requests else needing:
            _check_recorded(store, policy, info)
    if since is not None and (num_lacking := len(loaded.requests) - len(usable.requests)):
        tell(f"left out: {num_lacking} of {len(loaded.requests)} requests, which lack panoramas")
    if not usable.requests:
        raise NoRequestsError(f"recording {info.id} has no usable request")
    if after_first:
        usable = replace(usable, requests=tuple(r.after_first() for r in usable.requests))
    trace = ReplayTrace(
        usable.trajectories,
        {draft: usable.panoramas(draft) for draft in sorted(names)},
        copies={"ngram": _copied(usable.trajectories, info)} if looked_up else None,
        past=GAMMA_LIMIT * engine.past_end,
    )
    return Opened(
        trace, info, loaded.skipped, tuple(request.ordinal for request in usable.requests)
    )


def _copied(trajectories: Iterable[Trajectory], info: Recording) -> list[npt.NDArray[np.uint8]]:
    """What an engine's own prompt lookup copies. Raises PolicyError for an engine whose rule is not
    known here."""
    if info.engine != VLLM.name:
        raise PolicyError(
            f"recording {info.id}: prompt lookup in {info.engine} copies from other places than "
            "ours; simulate a draft"
        )
    least, most = info.options.get("prompt_lookup", (LEAST, MOST))
    return [copied(t, least, most) for t in trajectories]


def _check_recorded(store: TraceStore, policy: Policy, info: Recording) -> None:
    """Raises PolicyError where the recording has not what the policy is replayed from."""
    draft, extent = policy.draft, info.drafts.get(policy.draft)
    needs_trees = policy.is_tree and not policy.shortlisted
    if extent is not None and (extent.has_trees or not needs_trees):
        return
    with suppress(NotFoundError, PairError):
        spec = PairSpec.from_json(store.get_pair(info.pair_id).document, where=info.pair_id)
        if draft not in (*spec.draft_names, *info.drafts):
            raise PolicyError(
                f"draft: the pair of recording {info.id} has no draft {draft!r}; it has: "
                f"{', '.join(sorted(spec.draft_names))}"
            )
    if needs_trees:
        depth = max(TREE_DEPTH, policy.depth_max)
        raise PolicyError(
            f"draft: recording {info.id} has no trees of draft {draft!r} (it has: "
            f"{info.shown() or 'nothing'}); " + how_to_record_trees(info.id, depth=depth)
        )
    raise PolicyError(
        f"draft: recording {info.id} has no panorama of draft {draft!r}; it has: "
        f"{', '.join(sorted(info.drafts)) or 'none'}; `record --resume {info.id}` makes those "
        "of every draft of its pair"
    )


class Simulated(NamedTuple):
    """One policy replayed. ``approximate`` says why its rounds are not exactly the runtime's, ""
    where they are."""

    replay: Replay
    skipped: tuple[Skipped, ...]
    approximate: str


def simulate(
    store: TraceStore,
    recording: str,
    policy: Policy,
    profile: LatencyProfile | None,
    *,
    limit: int | None = None,
    since: datetime | None = None,
    per_round: bool = False,
    skip_corrupted: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Simulated:
    """Replays a recording, or what :func:`open_trace` takes ``since`` a moment, or the first
    ``limit`` requests, under any policy. Raises as it does."""
    options: dict[str, Any] = {"since": since, "skip_corrupted": skip_corrupted, "tell": tell}
    trace, info, skipped, ordinals = open_trace(store, recording, [policy], **options)
    if since is None and not engine_named(info.engine).prefill_emits:
        trace.reader = _reader(store, info, trace, ordinals)
        if any(candidate.shortlisted for candidate in policy.candidates):
            # Most replays record nothing: these load no model library.
            from spectune.optimizer.shortlisted import ShortlistedDrafts

            here = store, partial(_load_pair, store, info), info.id, ordinals
            trace.on_demand = ShortlistedDrafts(*here, fitted(store, info.pair_id), few=0)
    if limit:
        trace = trace.select(range(min(limit, len(trace.trajectories))))
    find = fitted(store, info.pair_id)
    replayed = run_replay(trace, policy, profile, per_round=per_round, artifacts=find)
    why = why_approximate(info, policy)
    return Simulated(replayed, skipped, why)


def _reader(
    store: TraceStore, info: Recording, trace: ReplayTrace, ordinals: Sequence[int]
) -> Reader:
    """Reads what replays of a recording lack, with its pair as it was loaded then, once. Raises
    PairError where that is gone."""
    readers: list[Reader] = []

    def read(draft: str, nodes: Mapping[int, Nodes]) -> Mapping[int, Panorama]:
        if not readers:
            # Most replays lack nothing: these load no model library.
            from spectune.optimizer.record import draft_reader

            pair, texts = _load_pair(store, info), trace.trajectories
            readers.append(draft_reader(store, pair, info.id, texts, trace.panoramas, ordinals))
        return readers[0](draft, nodes)

    return read


def _load_pair(store: TraceStore, info: Recording) -> LoadedPair:
    """The pair of a recording as it was loaded then. Raises PairError where it is gone."""
    from spectune.runtime.loading import load_pair

    spec = PairSpec.from_json(store.get_pair(info.pair_id).document, where=info.pair_id)
    device, dtype = (str(info.options.get(name, "auto")) for name in ("device", "dtype"))
    return load_pair(spec, device=device, dtype=dtype)


def why_approximate(info: Recording, policy: Policy) -> str:
    """Why a replay's rounds are not exactly the runtime's, "" where they are."""
    drawn = info.verifier == "rejection" and not info.sampling.greedy
    if drawn and any(candidate.stop.kind != "none" for candidate in policy.candidates):
        return "a stop reads other proposals than the draft samples under rejection"
    return ""

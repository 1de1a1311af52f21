"""Opening traces: the one place where what policies are replayed from is taken from a recording and
put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.db.errors import NotFoundError
from spectune.engines.abilities import VLLM, engine_named
from spectune.engines.vllm.prompt_lookup import LEAST, MOST, copied
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import Nodes, Reader, Replay, ReplayTrace
from spectune.optimizer.simulate.shortlist_ranks import Ranks, how_to_rank, stored_ranks
from spectune.optimizer.traffic import traffic_since
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import GAMMA_LIMIT, FullShortlist, Policy
from spectune.runtime.policies.rules import compile_shortlist
from spectune.traces.errors import PairError, PolicyError, TraceError
from spectune.traces.recording import TREE_DEPTH, Skipped, how_to_record_trees
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Panorama, Recording, Trajectory


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
    ranks: Mapping[tuple[str, str], Ranks] | None = None,
    ordinals: Collection[int] | None = None,
    since: datetime | None = None,
    skip_corrupted: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Opened:
    """What ``policies`` are replayed from, and the panoramas of ``drafts`` beside. With ``since``
    that is of all that the recording's pair and engine decoded since then, and ``tell`` is called
    with what of it was taken.

    ``ranks`` of shortlists are added to those that are stored for the policies; ``ordinals``: of
    these requests alone. With ``skip_corrupted`` the trace has the requests of which nothing is
    damaged or missing; otherwise CorruptedChunkError and TraceError name the first. A server adds
    to what it serves all the time, so of that nothing has to be there yet. Where an
    engine's prefill yields the first token, replay begins after it, and ``ngram`` copies as that
    engine does. Raises NotFoundError for an unknown recording, PolicyError for the first policy
    whose draft was not recorded, NoRequestsError where no request is left.
    """
    info = store.get_recording(recording)
    engine = engine_named(info.engine)
    served = engine.prefill_emits
    wanted, found = set(drafts), dict(ranks or {})
    replayed = [p for given in policies for p in given.candidates if p.speculates]
    needing = [p for p in replayed if p.draft != "ngram" or not served]
    for policy in replayed:
        if since is None and policy in needing:
            _check_recorded(store, policy, info)
        wanted.add(policy.draft)
        if since is not None and policy.shortlisted:
            raise PolicyError(
                "shortlist: ranks are of one recording; name it by --recording instead of --since"
            )
        if (ranked := ranks_of(store, info.id, policy)) is not None:
            found[policy.draft, ranked.fitted] = ranked
    looked_up = served and "ngram" in wanted
    if looked_up:  # by the engine's rule, which needs no panorama
        wanted.remove("ngram")
    how: dict[str, Any] = {"skip_corrupted": skip_corrupted}
    if since is None:
        loaded = store.load(info.id, sorted(wanted), ordinals=ordinals, **how)
    else:
        loaded = traffic_since(store, info, since, sorted(wanted), tell=tell, **how)
    whole = loaded
    if skip_corrupted or since is not None or info.source == "serve":
        whole = whole.having(wanted)
    if since is not None:
        trees = {policy.draft for policy in needing if policy.is_tree}
        having = (r for r in whole.requests if all(r.panoramas[d].width > 1 for d in trees))
        whole = replace(whole, requests=tuple(having))
        for policy in () if whole.requests else needing:
            _check_recorded(store, policy, info)
    if since is not None and (left := len(loaded.requests) - len(whole.requests)):
        tell(f"left out: {left} of {len(loaded.requests)} requests, which lack panoramas")
    if not whole.requests:
        raise NoRequestsError(f"recording {info.id} has no usable request")
    if served:
        whole = replace(whole, requests=tuple(r.after_first() for r in whole.requests))
    trace = ReplayTrace(
        whole.trajectories,
        {draft: whole.panoramas(draft) for draft in sorted(wanted)},
        ranks=found,
        copies={"ngram": _copied(whole.trajectories, info)} if looked_up else None,
        past=GAMMA_LIMIT * engine.past_end,
    )
    return Opened(trace, info, loaded.skipped, tuple(request.ordinal for request in whole.requests))


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
    # A shortlist looks at the draft's distributions.
    needs_trees = policy.is_tree or policy.shortlisted
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


def ranks_of(store: TraceStore, recording: str, policy: Policy) -> Ranks | None:
    """What is stored of a shortlisted policy's order over a recording. Raises NotFoundError where
    its artifact is unknown."""
    shortlist = policy.shortlist
    if not policy.speculates or isinstance(shortlist, FullShortlist):
        return None
    return stored_ranks(store, recording, policy.draft, shortlist.artifact)


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
    ``limit`` requests, under any policy. Raises as it does, and PolicyError for a router's
    shortlist that was not ranked over the recording."""
    how: dict[str, Any] = {"since": since, "skip_corrupted": skip_corrupted, "tell": tell}
    trace, info, skipped, ordinals = open_trace(store, recording, [policy], **how)
    if since is None and not engine_named(info.engine).prefill_emits:
        trace.reader = _reader(store, info, trace, ordinals)
    if limit:
        trace = trace.select(range(min(limit, len(trace.trajectories))))
    check_ranked(store, info, policy)
    find = fitted(store, info.pair_id)
    replayed = run_replay(trace, policy, profile, per_round=per_round, artifacts=find)
    why = why_approximate(info, replayed.missed, chains=trace.chains, filtered=trace.filtered)
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
            from spectune.runtime.loading import load_pair

            spec = PairSpec.from_json(store.get_pair(info.pair_id).document, where=info.pair_id)
            device, dtype = (str(info.options.get(name, "auto")) for name in ("device", "dtype"))
            pair = load_pair(spec, device=device, dtype=dtype)
            texts, panoramas = trace.trajectories, trace.panoramas
            readers.append(draft_reader(store, pair, info.id, texts, panoramas, ordinals))
        return readers[0](draft, nodes)

    return read


def check_ranked(store: TraceStore, info: Recording, policy: Policy) -> None:
    """Raises PolicyError where a shortlist's router was not ranked over the recording."""
    for candidate in policy.candidates:
        rule = compile_shortlist(candidate, fitted(store, info.pair_id))
        if rule is not None and rule.routed and ranks_of(store, info.id, candidate) is None:
            order = rule.block.artifact
            raise PolicyError(
                f"shortlist: recording {info.id} has no cluster ranks of router {order}; "
                + how_to_rank(info.id, order, candidate.draft)
            )


def why_approximate(
    info: Recording,
    missing: Iterable[tuple[Policy, int]],
    *,
    chains: Collection[str],
    filtered: bool,
) -> str:
    """Why a replay's rounds are not exactly the runtime's, "" where they are; ``missing`` as
    :attr:`Replay.missed` says, ``chains`` and ``filtered`` as :class:`ReplayTrace` does."""
    for policy, rounds in missing:
        as_tree = policy.is_tree or policy.draft not in chains
        if policy.shortlisted and (as_tree or policy.stop.kind != "none" or filtered):
            return (
                "trees, stops and filters under a shortlist read renormalised probabilities "
                "(docs/shortlists.md)"
            )
        if rounds:
            order = getattr(policy.shortlist, "artifact", "ID")
            return (
                f"in {rounds} rounds the shortlist holds none of the recorded children; "
                f"{how_to_rank(info.id, order, policy.draft, 'frequencies')}, "
                "with which it is exact"
            )
        drawn = info.verifier == "rejection" and not info.sampling.greedy
        if drawn and policy.stop.kind != "none":
            return "a stop reads other proposals than the draft samples under rejection"
    return ""

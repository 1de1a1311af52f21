"""Opening traces: the one place where what policies are replayed from is taken from a recording and
put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.db.database_errors import NotFoundError
from spectune.engines.abilities import VLLM, engine_named
from spectune.engines.vllm.prompt_lookup import LEAST, MOST, copied
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import Nodes, Reader, Replay, ReplayTrace
from spectune.optimizer.stored_artifacts import fitted
from spectune.optimizer.tuning.parts import mixed
from spectune.optimizer.tuning.sources import traffic_since
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import GAMMA_LIMIT, Policy
from spectune.traces.errors import PairError, PolicyError, TraceError
from spectune.traces.recording import Skipped
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Panorama, Recording, Trajectory

if TYPE_CHECKING:
    from spectune.runtime.loading import LoadedPair


class NoRequestsError(TraceError):
    """A recording, or the part of it that was asked for, has no usable request."""


class Opened(NamedTuple):
    """A recording's trace, the damaged chunks that were left out of it, how many requests were left
    out as they lack panoramas, and the ordinals of the others."""

    trace: ReplayTrace
    info: Recording
    skipped: tuple[Skipped, ...]
    lacking: int
    ordinals: tuple[int, ...]


def open_trace(
    store: TraceStore,
    recording: str,
    policies: Iterable[Policy] = (),
    *,
    drafts: Iterable[str] = (),
    ordinals: Collection[int] | None = None,
    since: datetime | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Opened:
    """What ``policies`` are replayed from, and the panoramas of ``drafts`` beside: the requests of
    which nothing is damaged or missing. With ``since`` of all that the recording's pair and engine
    decoded since then, where ``tell`` is called with what of it was taken.

    ``ordinals``: of these requests alone. Where an engine's prefill yields the first token, replay
    begins after it, and ``ngram`` copies as that engine does. Raises NotFoundError for an unknown
    recording, PolicyError for the first policy whose draft was not recorded, NoRequestsError where
    no request is left.
    """
    info = store.get_recording(recording)
    engine = engine_named(info.engine)
    replayed = [p for policy in policies for p in policy.candidates if p.speculates]
    names = {*drafts, *(policy.draft for policy in replayed)}
    looked_up = engine.prefill_emits and "ngram" in names and "ngram" not in info.drafts
    if looked_up:  # by the engine's rule, which needs no panorama
        names.remove("ngram")
    if since is None:
        loaded = store.load(info.id, sorted(names), ordinals=ordinals, skip_corrupted=True)
    else:
        loaded = traffic_since(store, info, since, sorted(names), tell=tell)
    usable = loaded.having(names)
    if not usable.requests:
        for policy in (p for p in replayed if p.draft in names):
            _check_recorded(store, policy, info)
        raise NoRequestsError(f"recording {info.id} has no usable request")
    lacking, kept = len(loaded.requests) - len(usable.requests), usable.requests
    if engine.prefill_emits:
        usable = replace(usable, requests=tuple(r.after_first() for r in kept))
    panoramas = {draft: usable.panoramas(draft) for draft in sorted(names)}
    copies = {"ngram": _copied(usable.trajectories, info)} if looked_up else {}
    for draft in sorted(names):
        if engine.prefill_emits and not panoramas[draft][0].shared:  # as an engine proposed them
            chains = panoramas.pop(draft)
            _check_proposed(replayed, draft, min(p.gamma_max for p in chains))
            copies[draft] = [_proposed(p) for p in chains]
    trace = ReplayTrace(
        usable.trajectories,
        panoramas,
        copies=copies,
        past=GAMMA_LIMIT * engine.past_end,
        drafts_up_to=int(info.options.get("serving", {}).get("drafts_up_to", 0)),
    )
    return Opened(trace, info, loaded.skipped, lacking, tuple(r.ordinal for r in kept))


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


def _proposed(panorama: Panorama) -> npt.NDArray[np.uint8]:
    """For every start how many tokens were proposed, and how many of them the text goes on with;
    uint8 [2, L]."""
    trie, best = panorama.trie, panorama.children[:, 0]
    node = np.arange(panorama.positions)
    length, agree = np.zeros((2, len(node)), np.uint8)
    proposes = on_text = np.ones(len(node), np.bool_)
    for _ in range(panorama.gamma_max):
        proposes = proposes & (node >= 0) & (trie.count[node] > 0)
        on_text = on_text & proposes & (trie.text_slot[node] == 0)
        length += proposes
        agree += on_text
        node = np.where(proposes, best[node], -1)
    return np.stack((length, agree))


def _check_proposed(policies: Iterable[Policy], draft: str, gamma_max: int) -> None:
    """Raises PolicyError for a policy that drafts further than an engine proposed."""
    for policy in policies:
        if policy.draft == draft and policy.gamma_max > gamma_max:
            raise PolicyError(
                f"policy drafts up to {policy.gamma_max} tokens with {draft!r}, but the server "
                f"proposed {gamma_max}: `retrace` again with num_speculative_tokens "
                f"{policy.gamma_max} there, or lower the policy's window"
            )


def _check_recorded(store: TraceStore, policy: Policy, info: Recording) -> None:
    """Raises PolicyError where a policy's draft was not recorded."""
    draft, recorded = policy.draft, ", ".join(sorted(info.drafts)) or "none"
    if draft in info.drafts:
        return
    with suppress(NotFoundError, PairError):
        spec = PairSpec.from_json(store.get_pair(info.pair_id).document, where=info.pair_id)
        if draft not in spec.draft_names:
            raise PolicyError(
                f"draft: the pair of recording {info.id} has no draft {draft!r}; it has: "
                f"{', '.join(sorted(spec.draft_names))}"
            )
    makes = f"`record --resume {info.id}` makes those of every draft of its pair"
    if info.engine != "native":
        makes = f"`retrace {info.id}` asks its server for what that draft proposes"
    raise PolicyError(
        f"draft: recording {info.id} has no panorama of draft {draft!r}; it has: {recorded}; "
        + makes
    )


class ReplayedPolicy(NamedTuple):
    """One policy replayed, and what of the recording was left out. ``approximate`` says why its
    rounds are not exactly the runtime's, "" where they are."""

    replay: Replay
    opened: Opened
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
    tell: Callable[[str], None] = lambda line: None,
) -> ReplayedPolicy:
    """Replays a recording, or what :func:`open_trace` takes ``since`` a moment, or ``limit`` of
    these requests from every category alike, under any policy. Raises as it does."""
    opened = open_trace(store, recording, [policy], since=since, tell=tell)
    trace, info = opened.trace, opened.info
    if since is None and not engine_named(info.engine).prefill_emits:
        on_demand = None
        if any(candidate.shortlisted for candidate in policy.candidates):
            # Most replays record nothing: these load no model library.
            from spectune.optimizer.recording.shortlisted import ShortlistedDrafts

            here = store, partial(_load_pair, store, info), info.id, opened.ordinals
            on_demand = ShortlistedDrafts(*here, fitted(store, info.pair_id), few=0)
        trace = trace.reading(_reader(store, opened), on_demand)
    if limit:
        categories = [text.category for text in trace.trajectories]
        trace = trace.select(sorted(mixed(range(len(categories)), categories)[:limit]))
    find = fitted(store, info.pair_id)
    replayed = run_replay(trace, policy, profile, per_round=per_round, artifacts=find)
    return ReplayedPolicy(replayed, opened, _why_approximate(info, policy))


def _reader(store: TraceStore, opened: Opened) -> Reader:
    """Reads what replays of a recording lack, with its pair as it was loaded then, once. Raises
    PairError where that is gone."""
    trace, info = opened.trace, opened.info

    def read(draft: str, nodes: Mapping[int, Nodes]) -> Mapping[int, Panorama]:
        # Most replays lack nothing: these load no model library.
        from spectune.optimizer.recording.record import draft_reader

        here = store, pair(), info.id, trace.trajectories, trace.panoramas, opened.ordinals
        return draft_reader(*here)(draft, nodes)

    pair = cache(partial(_load_pair, store, info))
    return read


def _load_pair(store: TraceStore, info: Recording) -> LoadedPair:
    """The pair of a recording as it was loaded then. Raises PairError where it is gone."""
    from spectune.runtime.loading import load_pair

    spec = PairSpec.from_json(store.get_pair(info.pair_id).document, where=info.pair_id)
    device, dtype = (str(info.options.get(name, "auto")) for name in ("device", "dtype"))
    return load_pair(spec, device=device, dtype=dtype)


def _why_approximate(info: Recording, policy: Policy) -> str:
    """Why a replay's rounds are not exactly the runtime's, "" where they are."""
    drawn = info.verifier == "rejection" and not info.sampling.greedy
    if drawn and any(candidate.stop.kind != "none" for candidate in policy.candidates):
        return "a stop reads other proposals than the draft samples under rejection"
    return ""

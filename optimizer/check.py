"""Whether a draft is worth tuning: a few prompts are recorded, fixed windows of every length are
replayed on them, and what that took tells costs and how long a tuning takes.

A text does not depend on the policy, so policies take turns while it is decoded, and what a round
of each costs is measured on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from spectune.optimizer.execute import DecodeOptions, encode
from spectune.optimizer.profiles import served_contexts
from spectune.optimizer.recording.record import PanoramaSpec, put_policies, record, record_panoramas
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import Replay
from spectune.optimizer.replay.trace import open_trace
from spectune.optimizer.tuning.confirmation import finite
from spectune.optimizer.tuning.parts import mixed
from spectune.optimizer.worth import Worth, independent, judge, speedup
from spectune.runtime.costs import MeasuredRound, RoundKind
from spectune.runtime.decoder import prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, FixedWindow, Policy
from spectune.runtime.policies.plan import Plan
from spectune.runtime.profiling.regression import fit_profile, shapes_of, table_over
from spectune.runtime.progress import Progress
from spectune.traces.conversations import Index, summed
from spectune.traces.cost_table import FloatArray
from spectune.traces.recording import RecordedRequest
from spectune.traces.schema import Workload, ratio_interval
from spectune.traces.store import TraceStore
from spectune.traces.store.query import TraceFilter, acceptance
from spectune.traces.tables import LatencyProfile, Trajectory

BLOCK: Final = 3
"""Rounds of a policy in a row; the first pays for what the one before left in the caches, and is
not counted."""
PLAIN: Final = 2
"""Rounds without a draft below which nothing is priced: all prices are parts of theirs."""
MEASURED: Final = (1, 2, 4, 8, 16, 32)
"""Lengths of windows whose rounds are measured, beside the longest."""
DECODING: Final = 0.4
READING: Final = 0.75
"""Parts of the time by whose end no further prompt is decoded, and none is read by the drafts."""
PROFILED: Final = 500
"""Rounds of each draft that a tuning measures for a profile."""
TREES: Final = 2
"""How many times as long as for chains the drafts of a tuning read, with trees."""
SEARCH_S: Final = 40
"""Seconds of a tuning's fits and search, which run no models."""


class _TimeIsUp(Exception):
    """No further prompt is to be decoded."""


@dataclass
class AlternatingSource:
    """A policy source whose policies take turns."""

    plans: Sequence[Plan]
    rounds: int = 0

    def current(self) -> Plan:
        self.rounds += 1
        return self.plans[self.rounds // BLOCK % len(self.plans)]


@dataclass(frozen=True)
class PairCheck:
    """What a check found on ``texts``: ``rows``, of each draft and length of a fixed window what is
    accepted and gained; ``worth``, of those whose speed was measured (None: of none). Seconds:
    ``token_s`` of a token without a draft (0: not measured), ``round_s`` of a round, ``decode_s``
    of a token that was decoded, ``read_s`` of one that every draft read. ``slope``: what a further
    token of a target's pass takes, as a part of ``token_s`` (None: not measured)."""

    recording: str
    texts: Sequence[Trajectory]
    rows: Sequence[Mapping[str, Any]]
    worth: Worth | None
    token_s: float
    round_s: float
    decode_s: float
    read_s: float
    slope: float | None

    @property
    def advised(self) -> Mapping[str, Any] | None:
        """The row that :attr:`worth` is of."""
        measured = [row for row in self.rows if row["speedup"]]
        return None if self.worth is None else measured[self.worth.chosen]

    @property
    def tokens(self) -> int:
        return sum(len(t.output_ids) for t in self.texts)

    def tune_seconds(self, tokens: float) -> float:
        """About how long a tuning on so many tokens takes before its race."""
        recorded_s = tokens * (self.decode_s + TREES * self.read_s)
        return (
            recorded_s + PROFILED * len({r["draft"] for r in self.rows}) * self.round_s + SEARCH_S
        )


def check_pair(
    store: TraceStore,
    pair: LoadedPair,
    workload: Workload,
    options: DecodeOptions,
    gamma_max: int,
    *,
    budget_s: float,
    clock: Callable[[], float],
    progress: Progress,
) -> PairCheck:
    """Checks every draft of a pair, prompt lookup among them, on as many requests of a workload,
    one at least, as ``budget_s`` seconds allow."""
    began = clock()
    drawn = options.verifier == "rejection" and not options.sampling.greedy
    drafts = pair.chain_drafts if drawn else pair.draft_names
    pair.reserve(encode(pair, workload, options, drafts).longest)
    lengths = [gamma_max, *(k for k in MEASURED if k < gamma_max)]
    plans = [prepare_for(pair, _fixed(draft, k)) for k in lengths for draft in drafts]
    plain = prepare_for(pair, AUTOREGRESSIVE)
    put_policies(store, [plan.policy for plan in (plain, *plans)])
    # In a short time, too, rounds without a draft are among those that are measured.
    source = AlternatingSource([each for plan in plans for each in (plain, plan)])
    # However soon time is up, every category has had its turn.
    order = mixed(range(len(workload.requests)), [r.category for r in workload.requests])
    workload = replace(workload, requests=tuple(workload.requests[i] for i in order))

    def decoded(phase: str, done: int, total: int) -> None:
        progress(phase, done, total)
        if clock() - began > DECODING * budget_s:
            raise _TimeIsUp

    with suppress(_TimeIsUp):
        record(
            store, pair, workload, options, PanoramaSpec(()), source, fresh=True, progress=decoded
        )
    recording = store.list_recordings(pair.id)[0].id
    texts = store.load(recording, (), steps=True).requests
    decode_s, reading = (clock() - began) / _tokens(texts), clock()
    spec = PanoramaSpec(drafts, gamma_max)
    for request in texts:
        record_panoramas(store, pair, recording, spec, ordinals=[request.ordinal])
        progress("read by drafts", request.ordinal + 1, len(texts))
        if clock() - began > READING * budget_s:
            break
    read = texts[: request.ordinal + 1]
    read_s = (clock() - reading) / _tokens(read)
    profile = _profile(pair, texts)
    rows, worth, token_s = _replayed(store, recording, drafts, gamma_max, profile)
    round_s = float(np.mean([step.round_s for r in texts for step in r.steps]))
    seconds = token_s, round_s, decode_s, read_s
    slope = None if profile is None else _further_s(profile, gamma_max) / token_s
    return PairCheck(recording, [r.trajectory for r in read], rows, worth, *seconds, slope)


def _further_s(profile: LatencyProfile, gamma_max: int) -> float:
    """Seconds that a further token of the target's pass takes, up to as many as the longest window
    verifies."""
    rows, context = np.array([1.0, gamma_max + 1.0]), np.full(2, profile.usual_context)
    one, many = profile.seconds("target", rows=rows, context=context)
    return max(0.0, float(many - one) / gamma_max)


def _tokens(requests: Sequence[RecordedRequest]) -> int:
    return sum(len(r.trajectory.output_ids) for r in requests)


def _fixed(draft: str, gamma: int) -> Policy:
    return Policy(draft=draft, window=FixedWindow(gamma=gamma))


def _profile(pair: LoadedPair, requests: Sequence[RecordedRequest]) -> LatencyProfile | None:
    """What rounds cost, fitted to those that texts were decoded by; None where these are too
    few."""
    rounds = []
    for request in requests:
        t = request.trajectory
        for before, step in pairwise(request.steps):
            if step.policy != before.policy:
                continue
            policy = _fixed(step.draft, 1) if step.draft_steps else AUTOREGRESSIVE
            kind = RoundKind.of(policy, tree=policy.draft in pair.heads)
            read = (step.lag, *[1] * (step.draft_steps - 1)) if step.draft_steps else ()
            context = len(t.prompt_ids) + step.start - 1
            seconds = step.draft_s, step.verify_s, step.round_s
            kind = kind._replace(sampled=not t.sampling.greedy)
            rounds.append(MeasuredRound(kind, context, read, step.drafted, step.emitted, *seconds))
    if sum(not r.drafted for r in rounds) < PLAIN:
        return None
    place = pair.place
    empty = LatencyProfile(pair.id, place["device"], place["dtype"], {})
    contexts = served_contexts(r.trajectory for r in requests)
    usual = contexts[len(contexts) // 2]
    verified = [1, *(k + 1 for k in MEASURED), max(r.drafted for r in rounds) + 1]
    rows = sorted({min(n, verified[-1]) for n in verified})
    steps = [(r,) for r in rounds]
    shapes = {
        **shapes_of(pair.draft_names, [usual], steps, ()),
        "target": table_over(rows=rows, context=[usual]),
    }
    return fit_profile(empty, shapes, steps, ())


def _replayed(
    store: TraceStore,
    recording: str,
    drafts: Sequence[str],
    gamma_max: int,
    profile: LatencyProfile | None,
) -> tuple[list[dict[str, Any]], Worth | None, float]:
    """A row per draft and length of its window, what those are worth that are priced, and the
    seconds of a token without a draft."""
    trace = open_trace(store, recording, drafts=drafts).trace
    off, of = run_replay(trace, AUTOREGRESSIVE, profile), independent(trace.trajectories)
    priced_s: list[FloatArray] = []
    by_draft = {r["draft"]: r for r in acceptance(store, TraceFilter(recordings=(recording,)))}
    rows = []
    for draft in drafts:
        priced = profile if profile is not None and draft in profile.drafts else None
        for k in range(1, gamma_max + 1):
            replay = run_replay(trace, _fixed(draft, k), priced, per_round=True)
            priced_s += [replay.seconds] if replay.total.seconds else []
            counts = summed(replay.counts, of)
            rows.append(
                {
                    "draft": draft,
                    "K": k,
                    "conditional": by_draft[draft]["conditional"][k - 1],
                    "cumulative": by_draft[draft]["marginal"][k - 1],
                    "tau": replay.total.mean_accepted_length,
                    "tau_interval": ratio_interval(counts[:, 1], counts[:, 0]),
                    **_gain(off, replay, of),
                }
            )
    worth = judge(off.seconds, priced_s, of) if priced_s else None
    return rows, worth, off.total.seconds / off.total.emitted_tokens


def _gain(off: Replay, replay: Replay, conversations: Index) -> dict[str, Any]:
    """What a draft gains. Decoding takes S seconds without it, s a token, and S' with it, of which
    its n steps take D: a step costs D/n, and gains where it costs less than (S - (S' - D))/n; both
    are given as parts of s. None: not measured, or steps of prompt lookup, which cost nothing."""
    assert replay.round_s is not None
    without, total = off.total, replay.total
    draft_s = float(replay.round_s[:, 0].sum())
    spare_s = without.seconds - (total.seconds - draft_s)
    steps_s = total.draft_steps * without.seconds / without.emitted_tokens
    has_cost = total.seconds > 0 and steps_s > 0 and replay.policy.draft != "ngram"
    gain = speedup(off.seconds, replay.seconds, conversations) if total.seconds else None
    return {
        "draft_step": draft_s / steps_s if has_cost else None,
        "break_even": spare_s / steps_s if has_cost else None,
        "speedup": gain and gain[0],
        "speedup_interval": gain and tuple(finite(gain[1:])),
    }


def memory(pair: LoadedPair) -> list[dict[str, Any]]:
    """A row per model: bytes of its weights, and of its cache for each token of a text; and how
    many tokens the device has room for beside it and the target (None: the system does not say)."""
    device = None
    if pair.device.type == "cuda":
        device = torch.cuda.get_device_properties(pair.device).total_memory
    elif hasattr(os, "sysconf"):
        device = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows: list[dict[str, Any]] = []
    for name, model in (("target", pair.target), *pair.models.items()):
        size, layers = model.dtype.itemsize, model.cache.shapes
        weights = model.num_parameters * size
        cached = sum(n.heads * (n.key_size + n.value_size) for n in layers) * size
        row = {"model": name, "weights_bytes": weights, "cache_bytes_per_token": cached}
        used = [row, *rows[:1]]  # beside a draft stands the target
        rest = device and device - sum(r["weights_bytes"] for r in used)
        each = sum(r["cache_bytes_per_token"] for r in used)
        rows.append({**row, "tokens_that_fit": rest and max(0, rest) // each})
    return rows

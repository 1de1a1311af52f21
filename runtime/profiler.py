"""Measuring what every part of a round costs on the device at hand.

Costs are measured inside rounds: the real backend drafts gamma tokens and verifies them, at several contexts and for every gamma in
turn, so that draft and target disturb each other's caches as they do in service. The composed cost is then checked against whole
executed rounds of policies that were not used for measuring.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from runtime.decoder import Decoder, ModelBackend
from runtime.drafts import LanguageModelDraft
from runtime.loading import LoadedPair
from runtime.loop import DecodeRequest, Drafted, StaticSource
from runtime.policies.document import (
    AUTOREGRESSIVE,
    EntropyStop,
    FixedWindow,
    JointProbStop,
    MaxProbStop,
    NoStop,
    Policy,
    Stop,
)
from runtime.policies.prepared import prepare
from traces.schema import CostCurve, LatencyProfile, Sampling, Step

LAGS = (1, 2, 3, 5, 9, 17, 33)
"""Tokens a draft may have to read at once, as measured."""
PROMPTS = (8, 32, 128, 256, 512)
"""Prompt lengths at which prefill is measured."""
ACCEPTED_ERROR = 0.08
"""Median relative error of composed rounds up to which a profile is accepted."""

Progress = Callable[[str, int, int], None]
"""Called with (what is measured, done, total)."""


@dataclass
class _Bench:
    """One pair under measurement: a request of random tokens whose text is set to the context wanted."""

    pair: LoadedPair
    gamma_max: int
    repeats: int
    progress: Progress
    clock: Callable[[], float] = time.perf_counter
    done: int = 0
    total: int = 1
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        self.backend = ModelBackend(self.pair)

    def tick(self, what: str) -> None:
        self.done += 1
        self.progress(what, self.done, self.total)

    def tokens(self, count: int) -> list[int]:
        low = min(16, self.pair.target.vocab_size // 2)
        return [int(t) for t in self.rng.integers(low, self.pair.target.vocab_size, count)]

    def begin(self, context: int, policy: Policy, sampling: Sampling | None = None) -> None:
        request = DecodeRequest(
            id="profile",
            prompt_ids=self.tokens(context + 1),
            sampling=sampling or Sampling(),
            seed=1,
            max_new_tokens=self.gamma_max + max(LAGS) + 2,
        )
        self.backend.begin(request, prepare(policy, self.pair.draft_names))

    def timed(self, work: Callable[[], Any]) -> float:
        began = self.clock()
        work()
        if self.pair.device.type == "cuda":
            torch.cuda.synchronize()
        return self.clock() - began


def measure_profile(
    pair: LoadedPair,
    *,
    gamma_max: int = 16,
    contexts: Sequence[int] = (32, 160, 384),
    repeats: int = 9,
    progress: Progress = lambda what, done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyProfile:
    """Profiles every cost the simulator charges. A pair of a few million parameters takes well under a minute on two cores.

    ``contexts`` beyond what the models hold are left out. The result's ``check`` says how well composed rounds match executed ones.
    """
    room = pair.max_positions - gamma_max - max(LAGS) - 4
    usable = tuple(c for c in contexts if c <= room) or (max(1, room // 2),)
    bench = _Bench(pair, gamma_max, repeats, progress, clock)
    drafts = [*pair.drafts, "ngram"]
    bench.total = repeats + len(pair.drafts) + 4
    widths = tuple(range(1, gamma_max + 2))
    cells = _Cells()
    for repeat in range(repeats):
        # Every cell once per repeat, so that a slow second of the machine falls on all of them alike.
        for name in drafts:
            for context in usable:
                _measure_rounds(bench, name, context, cells, warm=repeat == 0, backwards=bool(repeat % 2))
        bench.tick("rounds")
    verify = cells.verify
    phase, steps = _draft_costs(cells, drafts, usable, gamma_max)
    prefill = _prefill(bench, lambda ids: pair.target.read(ids, 0), pair.target)
    bench.tick("prefill")
    draft_prefill = {}
    for name, model in pair.drafts.items():
        draft_prefill[name] = _prefill(bench, lambda ids, m=model: m.read(ids, 0), model)  # type: ignore[misc]
        bench.tick(f"prefill of {name}")
    draft_prefill["ngram"] = CostCurve((1, 512), (0,), ((2e-6,), (1e-3,)), ((0.0,), (0.0,)))
    stops = _stop_costs(bench)
    bench.tick("stops")
    noise_s, sample_s, draft_sample_s = _sampling_costs(bench, usable[0])
    bench.tick("sampling")
    profile = LatencyProfile(
        pair_id=pair.id,
        device=pair.device.type,
        dtype=str(pair.target.dtype).removeprefix("torch."),
        verify=_curve(verify, widths, usable),
        prefill=prefill,
        draft_step={name: _curve(steps[name], LAGS if name in pair.drafts else (1,), usable) for name in drafts},
        draft_prefill=draft_prefill,
        draft_phase_s=phase,
        stop_step_s=stops,
        noise_s=noise_s,
        sample_s=sample_s,
        draft_sample_s=draft_sample_s,
        environment=environment(pair),
    )
    checked = _check(bench, profile, usable)
    bench.tick("check against executed rounds")
    return checked


@dataclass
class _Cells:
    """Samples in seconds: ``verify`` by (width, context), ``draft`` by (draft, gamma, context), ``lag`` by (draft, lag, context)."""

    verify: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    draft: dict[tuple[str, int, int], list[float]] = field(default_factory=dict)
    lag: dict[tuple[str, int, int], list[float]] = field(default_factory=dict)
    step: dict[tuple[str, int], list[float]] = field(default_factory=dict)


def _measure_rounds(bench: _Bench, name: str, context: int, cells: _Cells, *, warm: bool, backwards: bool) -> None:
    """One round of every gamma, and one first pass of every lag, at one context."""
    policy = Policy(draft=name, window=FixedWindow(gamma=bench.gamma_max))
    prepared = prepare(policy, bench.pair.draft_names)
    bench.begin(context, policy)
    backend, length = bench.backend, context + 1
    draft = backend.draft_named(name)
    random_tokens = bench.tokens(bench.gamma_max)
    gammas = list(range(bench.gamma_max, -1, -1) if backwards else range(bench.gamma_max + 1))
    for gamma in [2, 2, *gammas] if warm else [2, *gammas]:
        drafted: Drafted | None = None
        if gamma:
            if isinstance(draft, LanguageModelDraft):
                draft.rewind(length - 1)
                seconds = bench.timed(lambda g=gamma: backend.draft(prepared, g))  # type: ignore[misc]
                cells.draft.setdefault((name, gamma, context), []).append(seconds)
            drafted = Drafted(gamma, gamma, 1, random_tokens[:gamma])
        seconds = bench.timed(lambda d=drafted: backend.verify(d))  # type: ignore[misc]
        cells.verify.setdefault((gamma + 1, context), []).append(seconds)
    if not isinstance(draft, LanguageModelDraft):
        _measure_ngram(bench, context, cells)
        return
    for lag in LAGS[1:]:
        if lag > length:
            continue
        backend.verify(None)
        draft.rewind(length - lag)
        cells.lag.setdefault((name, lag, context), []).append(bench.timed(lambda: backend.draft(prepared, 1)))


def _draft_costs(
    cells: _Cells, drafts: Sequence[str], contexts: Sequence[int], gamma_max: int
) -> tuple[dict[str, float], dict[str, dict[tuple[int, int], list[float]]]]:
    """Splits drafting into a phase cost and a cost per step: a line through the means over gamma, per draft and context.

    The phase holds what the first pass costs more than later ones (the target has just driven the draft out of the caches).
    """
    phase: dict[str, float] = {}
    steps: dict[str, dict[tuple[int, int], list[float]]] = {}
    for name in drafts:
        steps[name] = {}
        firsts: list[float] = []
        for context in contexts:
            if (name, context) in cells.step:
                few = cells.step[name, context]
                steps[name][1, context] = few[1:]
                firsts.append(few[0])
                continue
            means = {g: center(cells.draft[name, g, context]) for g in range(1, gamma_max + 1)}
            slope, first = _line(list(means), list(means.values()))
            firsts.append(max(0.0, first))
            slope = max(1e-7, slope)
            steps[name][1, context] = [
                max(1e-7, (s - first) / g) for g in means if g >= gamma_max // 2 for s in cells.draft[name, g, context]
            ]
            # The mean of a step is the line's slope; the samples above only say how it spreads.
            shift = slope - center(steps[name][1, context])
            steps[name][1, context] = [max(1e-7, s + shift) for s in steps[name][1, context]]
        phase[name] = statistics.mean(firsts)
        for (draft, lag, context), samples in cells.lag.items():
            if draft == name:
                steps[name][lag, context] = [max(1e-7, s - phase[name]) for s in samples]
    return phase, steps


def _measure_ngram(bench: _Bench, context: int, cells: _Cells) -> None:
    """Prompt lookup costs microseconds: timed over a repetitive text, many steps at once."""
    if ("ngram", context) in cells.step:
        return
    policy = Policy(draft="ngram", window=FixedWindow(gamma=bench.gamma_max))
    prepared = prepare(policy, bench.pair.draft_names)
    backend = bench.backend
    backend.set_text(bench.tokens(4) * (context // 4 + 1))
    few, many = [], []
    for _ in range(50):
        few.append(bench.timed(lambda: backend.draft(prepared, 1)))
        many.append(bench.timed(lambda: backend.draft(prepared, bench.gamma_max)))
    one, all_ = statistics.median(few), statistics.median(many)
    step = max(1e-7, (all_ - one) / max(1, bench.gamma_max - 1))
    cells.step["ngram", context] = [max(0.0, one - step), step]


def center(samples: Sequence[float]) -> float:
    """The mean, samples beyond three medians counted as three: a machine's slow moments count, a lost second does not."""
    limit = 3 * statistics.median(samples)
    return statistics.mean(min(s, limit) for s in samples)


def _prefill(bench: _Bench, read: Callable[[torch.Tensor], None], model: Any) -> CostCurve:
    lengths = [n for n in PROMPTS if n <= bench.pair.max_positions]
    model.reserve(max(lengths))
    medians, spreads, means = [], [], []
    for n in lengths:
        ids = torch.tensor(bench.tokens(n), device=bench.pair.device)
        times = [bench.timed(lambda i=ids: read(i)) for _ in range(bench.repeats + 1)][1:]  # type: ignore[misc]
        medians.append((statistics.median(times),))
        spreads.append((_spread(times),))
        means.append((center(times),))
    return CostCurve(tuple(lengths), (0,), tuple(medians), tuple(spreads), tuple(means))


def _stop_costs(bench: _Bench) -> dict[str, float]:
    """Extra seconds per draft step of each kind of stop, on the pair's smallest draft (thresholds that never trigger)."""
    kinds: list[Stop] = [
        NoStop(),
        MaxProbStop(threshold=1e-9),
        JointProbStop(threshold=0.0),
        EntropyStop(threshold=0.0, scale=1e-3, keep_last=True),
    ]
    if not bench.pair.drafts:
        return {stop.kind: 0.0 for stop in kinds}
    name = min(bench.pair.drafts, key=lambda n: bench.pair.drafts[n].num_parameters)
    gamma = min(8, bench.gamma_max)
    window = FixedWindow(gamma=gamma)
    bench.begin(64, Policy(draft=name, window=window))
    draft = bench.backend.draft_named(name)
    assert isinstance(draft, LanguageModelDraft)
    ready = {s.kind: prepare(Policy(draft=name, window=window, stop=s), bench.pair.draft_names) for s in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in ready}
    for repeat in range(2 * bench.repeats + 1):
        for kind, prepared in ready.items():
            draft.rewind(64)
            seconds = bench.timed(lambda p=prepared: bench.backend.draft(p, gamma))  # type: ignore[misc]
            if repeat:
                times[kind].append(seconds)
    base = statistics.median(times["none"])
    return {kind: max(0.0, (statistics.median(v) - base) / gamma) for kind, v in times.items()}


def _sampling_costs(bench: _Bench, context: int) -> tuple[float, float, float]:
    """Extra seconds at temperature 1: per emitted token (noise), per verified token, per draft step."""
    target, width = bench.pair.target, min(8, bench.gamma_max) + 1
    sampling = Sampling(temperature=1.0)
    drafted = Drafted(width - 1, width - 1, 1, bench.tokens(width - 1))
    times: dict[str, list[float]] = {"greedy": [], "sampled": [], "noise": []}
    for kind, law in (("greedy", Sampling()), ("sampled", sampling)):
        bench.begin(context, AUTOREGRESSIVE, law)
        bench.backend.verify(drafted)  # fills the noise rows of these positions
        for _ in range(2 * bench.repeats):
            times[kind].append(bench.timed(lambda: bench.backend.verify(drafted)))
    from runtime.sampling import gumbel_row

    for i in range(4 * bench.repeats):
        times["noise"].append(bench.timed(lambda i=i: gumbel_row(i, target.vocab_size, target.device)))  # type: ignore[misc]
    extra = max(0.0, (statistics.median(times["sampled"]) - statistics.median(times["greedy"])) / width)
    return statistics.median(times["noise"]), extra, extra


def _check(bench: _Bench, profile: LatencyProfile, contexts: tuple[int, ...]) -> LatencyProfile:
    """Executes whole requests, takes loop overhead from their rounds, and compares composed with executed seconds a round."""
    rounds: list[tuple[Step, int]] = []
    policies = [AUTOREGRESSIVE] + [
        Policy(draft=name, window=FixedWindow(gamma=g)) for name in bench.pair.drafts for g in {3, min(7, bench.gamma_max)}
    ]
    prompt = bench.tokens(min(48, max(contexts)))
    request_s = []
    for policy in policies:
        decoder = Decoder(bench.pair, StaticSource(prepare(policy, bench.pair.draft_names)))
        request = DecodeRequest("check", prompt, Sampling(), 1, min(40, bench.pair.max_positions - len(prompt)))
        for repeat in range(2):
            decoded = decoder.decode(request)
            if repeat:
                rounds += [(s, len(prompt) + s.start - 1) for s in decoded.steps[1:]]
                drafts = profile.draft_prefill.get(policy.draft)
                read = profile.prefill.at(len(prompt) - 1, 0) + (drafts.at(len(prompt) - 1, 0) if drafts else 0.0)
                request_s.append(decoded.prefill_s - read)
    overhead = statistics.median([s.round_s - s.draft_s - s.verify_s for s, _ in rounds])
    profile = replace(profile, overhead_s=max(0.0, overhead), request_s=max(0.0, statistics.median(request_s)))
    errors = [abs(compose_round(profile, s, c) - s.round_s) / s.round_s for s, c in rounds]
    bias = sum(compose_round(profile, s, c) for s, c in rounds) / sum(s.round_s for s, _ in rounds) - 1
    check = {
        "rounds": len(rounds),
        "median_error": statistics.median(errors),
        "p90_error": float(np.quantile(errors, 0.9)),
        "total_error": bias,
        "overhead_share": overhead / statistics.median([s.round_s for s, _ in rounds]),
        "accepted": statistics.median(errors) <= ACCEPTED_ERROR,
    }
    return replace(profile, check=check)


def compose_round(profile: LatencyProfile, step: Step, context: int) -> float:
    """Predicted seconds of one greedy round without a stop: draft steps, verification and overhead, by the profile's curves.

    ``context``: tokens in the target's cache when the round began.
    """
    seconds = profile.verify.at(step.verified, context) + profile.overhead_s
    if step.draft_steps:
        curve = profile.draft_step[step.draft]
        seconds += profile.draft_phase_s.get(step.draft, 0.0) + curve.at(step.lag, context)
        seconds += (step.draft_steps - 1) * curve.at(1, context)
    return seconds


def merge_profiles(profiles: Sequence[LatencyProfile]) -> LatencyProfile:
    """The mean of profiles of one pair and grid, measured at different moments: what a machine costs that changes its speed.

    Environment and check are the last one's. Raises ValueError when grids differ or there is none.
    """
    if not profiles:
        raise ValueError("no profile to merge")

    def curves(parts: Sequence[CostCurve]) -> CostCurve:
        if len({(c.widths, c.contexts) for c in parts}) > 1:
            raise ValueError("profiles of different grids cannot be merged")

        def mean(name: str) -> tuple[tuple[float, ...], ...]:
            stacked = np.mean([getattr(c, name) if name != "mean_s" else c.cost_s for c in parts], axis=0)
            return tuple(tuple(float(x) for x in row) for row in stacked)

        return CostCurve(parts[0].widths, parts[0].contexts, mean("median_s"), mean("spread_s"), mean("mean_s"))

    last = profiles[-1]
    scalars = ("overhead_s", "noise_s", "sample_s", "draft_sample_s", "request_s")
    maps = ("draft_phase_s", "stop_step_s")
    means: dict[str, Any] = {n: statistics.mean(getattr(p, n) for p in profiles) for n in scalars}
    means |= {n: {k: statistics.mean(getattr(p, n)[k] for p in profiles) for k in getattr(last, n)} for n in maps}
    return replace(
        last,
        verify=curves([p.verify for p in profiles]),
        prefill=curves([p.prefill for p in profiles]),
        draft_step={n: curves([p.draft_step[n] for p in profiles]) for n in last.draft_step},
        draft_prefill={n: curves([p.draft_prefill[n] for p in profiles]) for n in last.draft_prefill},
        **means,
    )


def environment(pair: LoadedPair) -> dict[str, Any]:
    """What a latency profile was measured in."""
    cuda = pair.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "driver": torch.version.cuda if cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
    }


def _line(xs: Sequence[int], ys: Sequence[float]) -> tuple[float, float]:
    if len(xs) < 2:
        return ys[0] / xs[0], 0.0
    slope, intercept = np.polyfit(np.asarray(xs, dtype=float), np.asarray(ys, dtype=float), 1)
    return float(slope), float(intercept)


def _spread(values: Sequence[float]) -> float:
    low, high = np.quantile(np.asarray(values), [0.25, 0.75])
    return float(high - low)


def _curve(cells: dict[tuple[int, int], list[float]], widths: Sequence[int], contexts: tuple[int, ...]) -> CostCurve:
    used = [w for w in widths if all((w, c) in cells for c in contexts)]
    return CostCurve(
        tuple(used),
        contexts,
        tuple(tuple(statistics.median(cells[w, c]) for c in contexts) for w in used),
        tuple(tuple(_spread(cells[w, c]) for c in contexts) for w in used),
        tuple(tuple(center(cells[w, c]) for c in contexts) for w in used),
    )

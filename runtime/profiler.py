"""Measuring what every part of a round costs on the device at hand.

Costs are measured inside rounds: the loop that serves decodes, at several contexts and for every gamma in turn, its text set back
after every round, so that draft, target and loop disturb each other's caches as they do in service. What verification costs more
after a draft than without one (the draft has driven the target out of the caches, a larger draft further) is charged to that draft.
The composed cost is then checked against whole executed rounds of policies that were not used for measuring. Trees are measured
alike (:mod:`runtime.tree_profiler`).
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

from runtime.decoder import Decoder
from runtime.drafts.language_model import LanguageModelDraft
from runtime.drafts.protocol import Drafted
from runtime.loading import LoadedPair
from runtime.loop import DecodeRequest, StaticSource, decode_rounds
from runtime.measuring import LAGS, PROMPTS, Bench, Progress, Turns, center, curve, errors
from runtime.policies.document import (
    AUTOREGRESSIVE,
    GAMMA_LIMIT,
    EntropyStop,
    FixedWindow,
    JointProbStop,
    MaxProbStop,
    NoStop,
    Policy,
    Stop,
)
from runtime.policies.plan import prepare
from runtime.sampling import gumbel_row
from runtime.shortlist_profiler import measure_shortlists
from runtime.tree_profiler import KINDS as TREE_KINDS
from runtime.tree_profiler import check_trees, head_prefill, measure_trees, tree_repeats
from traces.schema import CostCurve, LatencyProfile, Sampling, Step, TreeProfile

DENSE = 8
"""Gamma up to which every one is measured; beyond it every second, and beyond twice as many every fourth."""


def measure_profile(
    pair: LoadedPair,
    *,
    gamma_max: int = 16,
    contexts: Sequence[int] = (32, 160, 384),
    repeats: int = 6,
    trees: bool = True,
    texts: Sequence[Sequence[int]] = (),
    progress: Progress = lambda what, done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyProfile:
    """Profiles every cost the simulator charges. A pair of a few million parameters takes well under a minute on two cores.

    ``contexts`` beyond what the models hold are left out. ``texts``: token ids of what is served, on whose ends trees are measured. The
    result's ``check`` says how well composed rounds match executed ones.
    """
    room = pair.max_positions - gamma_max - max(LAGS) - 4
    usable = tuple(c for c in contexts if c <= room) or (max(1, room // 2),)
    bench = Bench(pair, gamma_max, repeats, progress, clock)
    models = len(pair.drafts) + len(pair.heads)
    bench.total = repeats + models + 4 + (tree_repeats(repeats) + models if trees else 0)
    chains = ChainMeasurement(bench, usable)
    for _ in range(repeats):
        # Every cell once per repeat, so that a slow second of the machine falls on all of them alike.
        chains.turn()
        bench.tick("rounds")
    of_trees = measure_trees(bench, usable, texts) if trees else None
    prefill = _prefill(bench, lambda ids: pair.target.read(ids, 0), pair.target)
    bench.tick("prefill")
    draft_prefill = {}
    for name, model in pair.drafts.items():
        draft_prefill[name] = _prefill(bench, lambda ids, m=model: m.read(ids, 0), model)  # type: ignore[misc]
        bench.tick(f"prefill of {name}")
    for name in pair.heads:
        draft_prefill[name] = head_prefill(bench, name)
        bench.tick(f"prefill of {name}")
    draft_prefill["ngram"] = CostCurve((1, 512), (0,), ((2e-6,), (1e-3,)), ((0.0,), (0.0,)))
    shortlists = {}
    if trees:
        for name in (*pair.drafts, *pair.heads):
            shortlists[name] = measure_shortlists(bench, name)
            bench.tick(f"shortlists of {name}")
    stops = _stop_costs(bench)
    bench.tick("stops")
    noise_s, sample_s, draft_sample_s = _sampling_costs(bench, usable[0])
    bench.tick("sampling")
    profile = LatencyProfile(
        pair_id=pair.id,
        device=pair.device.type,
        dtype=str(pair.target.dtype).removeprefix("torch."),
        **chains.costs(),
        prefill=prefill,
        draft_prefill=draft_prefill,
        stop_step_s=stops,
        noise_s=noise_s,
        sample_s=sample_s,
        draft_sample_s=draft_sample_s,
        environment=environment(pair),
        trees=of_trees,
        shortlist_s={name: curves for name, curves in shortlists.items() if curves},
    )
    checked = _check(bench, profile, usable)
    if of_trees is not None:
        checked = check_trees(bench, checked, usable)
    bench.tick("check against executed rounds")
    return checked


def measured_gammas(gamma_max: int) -> tuple[int, ...]:
    """The gammas measured up to ``gamma_max``: all while they are small, then fewer (costs between are interpolated)."""
    kept = [g for g in range(gamma_max) if g <= DENSE or (g <= 2 * DENSE and g % 2 == 0) or g % 4 == 0]
    return (*kept, gamma_max)


@dataclass
class _Cells:
    """Samples in passes (:attr:`Bench.usual_s`): ``verify`` and ``draft`` by (draft, gamma, context), ``lag`` by (draft, lag, context)."""

    verify: dict[tuple[str, int, int], list[float]] = field(default_factory=dict)
    draft: dict[tuple[str, int, int], list[float]] = field(default_factory=dict)
    lag: dict[tuple[str, int, int], list[float]] = field(default_factory=dict)

    def in_seconds(self, usual_s: float) -> _Cells:
        tables = (self.verify, self.draft, self.lag)
        return _Cells(*({key: [usual_s * s for s in found] for key, found in table.items()} for table in tables))


@dataclass
class ChainMeasurement:
    """Turns of a pair's drafts of chains under the clock, taken whenever there is time for one, and the costs that all of them tell.
    ``contexts``: tokens in the target's cache; at each of them one turn is the least that tells costs."""

    bench: Bench
    contexts: tuple[int, ...]
    cells: _Cells = field(default_factory=_Cells)
    turns: int = 0

    def __post_init__(self) -> None:
        self.drafts = [*self.bench.pair.drafts, "ngram"]
        self.gammas = measured_gammas(self.bench.gamma_max)

    def turn(self, contexts: Sequence[int] | None = None) -> None:
        """Every cell of every draft once, at some of the contexts."""
        gammas = self.gammas[::-1] if self.turns % 2 else self.gammas
        for name in self.drafts:
            for context in contexts or self.contexts:
                _measure_rounds(self.bench, name, context, self.cells, gammas)
        self.turns += 1

    def costs(self) -> dict[str, Any]:
        """The fields of a profile that all turns tell: ``verify``, ``draft_step``, ``draft_phase_s`` and ``draft_bend_s``."""
        cells, drafts, contexts = self.cells.in_seconds(self.bench.usual_s), self.drafts, self.contexts
        verify, evicted = _verify_costs(cells, drafts, contexts, self.gammas)
        phase, steps = _draft_costs(cells, drafts, contexts, evicted)
        lags = {name: LAGS if name in self.bench.pair.drafts else (1,) for name in drafts}
        return {
            "verify": curve(verify, tuple(g + 1 for g in self.gammas), contexts),
            "draft_step": {name: curve(steps[name], lags[name], contexts) for name in drafts},
            "draft_phase_s": phase,
            "draft_bend_s": _bends(cells, drafts, contexts, evicted, phase, steps),
        }


def _measure_rounds(bench: Bench, name: str, context: int, cells: _Cells, gammas: Sequence[int]) -> None:
    """One round of every gamma, and one first pass of every lag, at one context, by the loop that serves: what it does between the passes
    is in the samples. Two rounds before them are not counted, nor is the one that follows a draft where there is none (a service
    without one pays what the draft evicted only once)."""
    known, backend = bench.pair.draft_names, bench.backend
    draft = backend.draft_named(name)
    ready = {g: prepare(Policy(draft=name, window=FixedWindow(gamma=g)), known) for g in gammas}
    lookup = name == "ngram"
    # Prompt lookup finds what it looks for in a text that repeats itself.
    ids = (bench.tokens(4) * (context // 4 + 1))[: context + 1] if lookup else bench.tokens(context + 1)
    few = min(2, bench.gamma_max)
    plan: list[tuple[int, int, bool]] = [(few, 1, False), (few, 1, False)]
    for gamma in gammas:
        plan += [(gamma, 1, True)] if gamma else [(0, 1, False), (0, 1, True)]
    lags = () if lookup else tuple(lag for lag in LAGS if lag <= context)
    budget = (len(plan) + len(lags) + 1) * (bench.gamma_max + 1) + 1
    source = Turns(ready[max(gammas)])
    rounds = decode_rounds(backend, DecodeRequest("profile", ids, Sampling(), 1, budget), source, bench.clock)

    def once(gamma: int, lag: int) -> tuple[float, float]:
        """Drafting and verification of a round from where the text began, in passes."""
        source.prepared = ready[gamma]
        if backend.length > len(ids):
            backend.rewind(len(ids))
            draft.rewind(len(ids) - lag)
        step = next(rounds).step
        bench.pace()
        pace_s = float(bench.around_s()[0])
        return step.draft_s / pace_s, step.verify_s / pace_s

    for gamma, lag, counted in plan:
        drafting, verification = once(gamma, lag)
        if counted:
            cells.verify.setdefault((name, gamma, context), []).append(verification)
            cells.draft.setdefault((name, gamma, context), []).append(drafting)
    for lag in lags:
        cells.lag.setdefault((name, lag, context), []).append(once(1, lag)[0])


def _verify_costs(
    cells: _Cells, drafts: Sequence[str], contexts: Sequence[int], gammas: Sequence[int]
) -> tuple[dict[tuple[int, int], list[float]], dict[str, tuple[float, float]]]:
    """Verification without a draft before it, by (width, context), and by draft what it costs more after one: (seconds per drafted
    token, per round), a line over gamma. Every draft's samples count for the former, less the latter."""
    evicted: dict[str, tuple[float, float]] = {}
    verify: dict[tuple[int, int], list[float]] = {}
    for name in drafts:
        more: dict[int, float] = {}
        for gamma in gammas[1:]:
            after, plain = (statistics.mean(center(cells.verify[n, gamma, c]) for c in contexts) for n in (name, "ngram"))
            more[gamma] = after - plain
        slope, first = _line(list(more), list(more.values())) if name != "ngram" and len(more) > 1 else (0.0, 0.0)
        evicted[name] = slope, first
        for gamma in gammas:
            own = first + slope * gamma if gamma else 0.0
            for context in contexts:
                samples = [max(1e-7, s - own) for s in cells.verify[name, gamma, context]]
                verify.setdefault((gamma + 1, context), []).extend(samples)
    return verify, evicted


def _draft_costs(
    cells: _Cells, drafts: Sequence[str], contexts: Sequence[int], evicted: dict[str, tuple[float, float]]
) -> tuple[dict[str, float], dict[str, dict[tuple[int, int], list[float]]]]:
    """Splits drafting into a phase cost and a cost per step: a line through the means over gamma, per draft and context.

    The line minimises relative errors, so that short windows are not charged for what long ones deviate. The phase holds what the first
    pass costs more than later ones (the target has just driven the draft out of the caches), and what the draft costs the target.
    """
    phase: dict[str, float] = {}
    steps: dict[str, dict[tuple[int, int], list[float]]] = {}
    for name in drafts:
        steps[name] = {}
        firsts: list[float] = []
        for context in contexts:
            per_token, per_round = evicted[name]
            samples = {g: cells.draft[d, g, c] for d, g, c in cells.draft if (d, c) == (name, context) and g}
            means = {g: center(s) + per_token * g + per_round for g, s in samples.items()}
            slope, first = _line(list(means), list(means.values()), relative=True)
            firsts.append(max(0.0, first))
            slope = max(1e-7, slope)
            long = [g for g in samples if g >= max(samples) // 2]
            around = [max(1e-7, (s - first) / g) for g in long for s in samples[g]]
            # The mean of a step is the line's slope; the samples only say how it spreads.
            shift = slope - center(around)
            steps[name][1, context] = [max(1e-7, s + shift) for s in around]
        phase[name] = statistics.mean(firsts)
        for (draft, lag, context), samples_of_lag in cells.lag.items():
            if draft == name and lag > 1:
                # What a lag costs more than none, both measured alike.
                base = center(cells.lag[name, 1, context]) - center(steps[name][1, context])
                steps[name][lag, context] = [max(1e-7, s - base) for s in samples_of_lag]
    return phase, steps


def _bends(
    cells: _Cells,
    drafts: Sequence[str],
    contexts: Sequence[int],
    evicted: dict[str, tuple[float, float]],
    phase: dict[str, float],
    steps: dict[str, dict[tuple[int, int], list[float]]],
) -> dict[str, tuple[float, ...]]:
    """By draft, what drafting took more than the line of :func:`_draft_costs`, by passes 0 .. GAMMA_LIMIT: the mean over contexts,
    linear between the gammas measured, and beyond them as at the last."""
    bends: dict[str, tuple[float, ...]] = {}
    for name in drafts:
        per_token, per_round = evicted[name]
        more = {0: 0.0}
        for gamma in sorted({g for n, g, _ in cells.draft if n == name and g}):
            more[gamma] = statistics.mean(
                center(cells.draft[name, gamma, c]) + (per_token - center(steps[name][1, c])) * gamma + per_round - phase[name]
                for c in contexts
            )
        bend = np.interp(np.arange(GAMMA_LIMIT + 1), list(more), list(more.values()))
        bends[name] = tuple(float(s) for s in bend)
    return bends


def _prefill(bench: Bench, read: Callable[[torch.Tensor], None], model: Any) -> CostCurve:
    lengths = [n for n in PROMPTS if n <= bench.pair.max_positions]
    model.reserve(max(lengths))
    cells: dict[tuple[int, int], list[float]] = {}
    for n in lengths:
        ids = torch.tensor(bench.tokens(n), device=bench.pair.device)
        cells[n, 0] = [bench.timed(lambda i=ids: read(i)) for _ in range(bench.repeats + 1)][1:]  # type: ignore[misc]
    return curve(cells, lengths, (0,))


def _stop_costs(bench: Bench) -> dict[str, float]:
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


def _sampling_costs(bench: Bench, context: int) -> tuple[float, float, float]:
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
    for i in range(2 * bench.repeats):
        # After a pass of the target, as in service: in a hot loop it takes a fraction of that.
        bench.backend.verify(drafted)
        rows = (2 * i, 2 * i + 1)
        both = bench.timed(lambda keys=rows: [gumbel_row(key, target.vocab_size, target.device) for key in keys])  # type: ignore[misc]
        times["noise"].append(both / 2)
    extra = max(0.0, (statistics.median(times["sampled"]) - statistics.median(times["greedy"])) / width)
    return statistics.median(times["noise"]), extra, extra


def _check(bench: Bench, profile: LatencyProfile, contexts: tuple[int, ...]) -> LatencyProfile:
    """Executes whole requests, takes loop overhead from their rounds, and compares composed with executed seconds a round."""
    rounds: list[tuple[Step, int]] = []
    slower: list[float] = []
    usual_s = bench.usual_s  # the profile's unit, which the check's own passes shall not move
    policies = [AUTOREGRESSIVE] + [
        Policy(draft=name, window=FixedWindow(gamma=g)) for name in bench.pair.drafts for g in {3, min(7, bench.gamma_max)}
    ]
    prompt = bench.tokens(min(48, max(contexts)))
    request_s = []
    for policy in policies:
        decoder = Decoder(bench.pair, StaticSource(prepare(policy, bench.pair.draft_names)), clock=bench.clock)
        decoder.after_round = bench.pace
        request = DecodeRequest("check", prompt, Sampling(), 1, min(40, bench.pair.max_positions - len(prompt)))
        for repeat in range(2):
            decoded = decoder.decode(request)
            if repeat:
                rounds += [(s, len(prompt) + s.start - 1) for s in decoded.steps[1:]]
                slower += (bench.around_s(len(decoded.steps))[1:] / usual_s).tolist()
                drafts = profile.draft_prefill.get(policy.draft)
                read = profile.prefill.at(len(prompt) - 1, 0) + (drafts.at(len(prompt) - 1, 0) if drafts else 0.0)
                request_s.append(decoded.prefill_s - read)
    overhead = statistics.median([(s.round_s - s.draft_s - s.verify_s) / pace for (s, _), pace in zip(rounds, slower, strict=True)])
    profile = replace(profile, overhead_s=max(0.0, overhead), request_s=max(0.0, statistics.median(request_s)))
    check = errors([(compose_round(profile, s, c), s.round_s / pace) for (s, c), pace in zip(rounds, slower, strict=True)])
    check["overhead_share"] = overhead / statistics.median([s.round_s for s, _ in rounds])
    return replace(profile, check=check)


def compose_round(profile: LatencyProfile, step: Step, context: int) -> float:
    """Predicted seconds of one greedy round without a stop: draft steps, verification and overhead, by the profile's curves.

    ``context``: tokens in the target's cache when the round began.
    """
    seconds = profile.verify.at(step.verified, context) + profile.overhead_s
    if step.draft_steps:
        passes = profile.draft_step[step.draft]
        seconds += profile.draft_phase_s.get(step.draft, 0.0) + passes.at(step.lag, context)
        seconds += (step.draft_steps - 1) * passes.at(1, context) + profile.draft_bend(step.draft, step.draft_steps)
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

    def trees(parts: Sequence[TreeProfile]) -> TreeProfile:
        """Of the drafts that all of them have."""
        kinds = ("first", "sampled_first", "level", "sampled_level")
        drafts = [d for d in parts[-1].level if all(d in p.level for p in parts)]
        by_draft: dict[str, Any] = {k: {d: curves([getattr(p, k)[d] for p in parts]) for d in drafts} for k in kinds}
        passes = range(GAMMA_LIMIT + 1)
        by_draft["bend_s"] = {
            d: {w: tuple(statistics.mean(p.bend(d, g, w) for p in parts) for g in passes) for w in parts[-1].bend_s.get(d, {})}
            for d in drafts
        }
        by_draft["kind_s"] = {
            d: {k: tuple(statistics.mean(p.more(d, (k,))[i] for p in parts) for i in range(2)) for k in TREE_KINDS} for d in drafts
        }
        by_draft["node_s"] = {d: tuple(statistics.mean(p.per_node(d)[i] for p in parts) for i in range(2)) for d in drafts}
        by_draft["token_s"] = tuple(statistics.mean(p.token_s[i] for p in parts) for i in range(2))
        return TreeProfile(curves([p.verify for p in parts]), curves([p.sampled_verify for p in parts]), **by_draft)

    last = profiles[-1]
    scalars = ("overhead_s", "noise_s", "sample_s", "draft_sample_s", "request_s")
    maps = ("draft_phase_s", "stop_step_s")
    means: dict[str, Any] = {n: statistics.mean(getattr(p, n) for p in profiles) for n in scalars}
    means |= {n: {k: statistics.mean(getattr(p, n)[k] for p in profiles) for k in getattr(last, n)} for n in maps}
    bends = {n: [p.draft_bend(n, g) for p in profiles for g in range(GAMMA_LIMIT + 1)] for n in last.draft_bend_s}
    means["draft_bend_s"] = {
        n: tuple(float(s) for s in np.reshape(all_, (len(profiles), -1)).mean(0)) for n, all_ in bends.items()
    }
    with_trees = [p.trees for p in profiles if p.trees is not None]
    return replace(
        last,
        verify=curves([p.verify for p in profiles]),
        prefill=curves([p.prefill for p in profiles]),
        draft_step={n: curves([p.draft_step[n] for p in profiles]) for n in last.draft_step},
        draft_prefill={n: curves([p.draft_prefill[n] for p in profiles]) for n in last.draft_prefill},
        trees=trees(with_trees) if with_trees else None,
        shortlist_s={
            d: {k: curves([p.shortlist_s[d][k] for p in profiles]) for k in m}
            for d, m in last.shortlist_s.items()
            if all(d in p.shortlist_s for p in profiles)
        },
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


def _line(xs: Sequence[int], ys: Sequence[float], *, relative: bool = False) -> tuple[float, float]:
    """(slope, intercept) of least squares, of errors relative to ``ys`` > 0 on demand. Through 0 if there is one point."""
    if len(xs) < 2:
        return ys[0] / xs[0], 0.0
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    slope, intercept = np.polyfit(x, y, 1, w=1 / np.maximum(y, 1e-9) if relative else None)
    return float(slope), float(intercept)

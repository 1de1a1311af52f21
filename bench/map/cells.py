"""What pays where: which mechanism is fastest by draft cost, slope of verification, temperature,
batch and recording.

    python bench/run.py map [--quick]

A cell of the grid prices recorded rounds by two numbers, both as parts of a round without a draft:
what a pass of the draft takes, and what every further token of a pass takes (of either model, at
any batch). What trees take beside their passes is a GPU's. Rounds do not depend on prices unless a
window reads them, so a policy is replayed once, and a cell is a sum over stored counts. Cells of
named hardware replay with its profile. In each cell the best policy of every mechanism is chosen on
the requests of the fit half and compared on the others, with 95% intervals over requests
(bootstrap). What is counted is decoding; prompts are not. Several requests at a time are served by
the serving simulator, chains by vLLM's rules of a step; a head's trees, which no engine changes
under load, by our decoder's."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pairs import fixed, top_k

from bench.harness import say, state_folder
from bench.lab import CATEGORIES, Halves, halves
from bench.map.costs import Floats, beside_passes, flat, grid_profile, named, price
from bench.papers.evidence import ACCEPTED, ROUNDS
from spectune.engines.abilities import VLLM
from spectune.engines.engine import Load
from spectune.optimizer.fit.for_tuning import fit_drafts
from spectune.optimizer.replay.batches import Seating, serve_decoder
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import Replay, ReplayTrace
from spectune.optimizer.replay.serving import serve
from spectune.optimizer.replay.step_costs import StepCosts, Surface, step_costs
from spectune.optimizer.replay.tree_tables import ABSENT
from spectune.optimizer.spaces import DraftLimits
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.traces.tables import LatencyProfile

DRAFT_COSTS = (0.02, 0.05, 0.1, 0.2)
SLOPES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3)
BATCHES = (8, 16, 32)
TEMPERATURES = (0.0, 1.0)
REQUESTS = 120
GAMMAS = tuple(range(9))
"""Tokens of the chains that are served."""
UNRECORDED = 0.05
TIE = 0.01
"""Relative difference on the fit half up to which the simpler mechanism is taken."""
RESAMPLES, RESERVED = 1000, 100
"""Draws of requests behind an interval: of replays, and of served loads."""
SHARE = 4
"""Shortlists keep one in so many tokens, about DynaSpec's 22%."""
LISTED = ["head"]
"""Drafts whose shortlists are recorded, at temperature 0: that takes longer than all else."""
SIZES = ((2, 8), (4, 24), (6, 60))
"""Levels and nodes of trees, 8 wide, under shortlists and under load."""
ADAPTIVE: tuple[dict[str, Any], ...] = (
    {"kind": "fsm", "gamma_max": 8},
    {"kind": "cache_fsm", "gamma_max": 8},
    {"kind": "q_learning", "gamma_max": 8, "seed": 1},
    {"kind": "analytic", "gamma_max": 8},
    {"kind": "analytic", "gamma_max": 8, "history": 16, "estimator": "exact"},
)
STOPS: tuple[dict[str, Any], ...] = (
    *({"kind": "max_prob", "threshold": t} for t in (0.2, 0.4, 0.6)),
    *({"kind": "joint_prob", "threshold": t} for t in (0.1, 0.3)),
)
MECHANISMS = (
    "nothing", "chain", "tree", "own score", "window", "shortlist", "bins", "classifier", "two",
)  # fmt: skip
"""From simple to elaborate. ``window`` (on the fly), ``shortlist`` (FR-Spec, DynaSpec), ``bins``
(HeteroSpec) and ``classifier`` (C2T) are the papers', over chains or trees; ``two``: of two of
them; ``own score``: trees that rank nodes by the coupled score."""


# ---------------------------------------------------------------------------------------- policies


def papers_of(policy: Policy) -> list[str]:
    """The papers whose mechanism a policy has."""
    blocks = {
        "window": policy.window.kind not in ("fixed", "heuristic"),
        "shortlist": policy.shortlisted,
        "bins": policy.stratify is not None,
        "classifier": policy.growth.kind == "classifier",
    }
    return [name for name, has in blocks.items() if has]


def mechanism(policy: Policy) -> str:
    """Which of :data:`MECHANISMS` a policy is."""
    papers = papers_of(policy)
    if papers:
        return papers[0] if len(papers) == 1 else "two"
    if getattr(policy.growth, "score", "") == "coupled":
        return "own score"
    return "tree" if policy.is_tree else "chain" if policy.speculates else "nothing"


def ranked(draft: str, width: int, depth: int, top_n: int, **score: Any) -> dict[str, Any]:
    """EAGLE-2's tree, its nodes ranked by a score that is named: the default is the coupled one
    above temperature 0, EAGLE-2's at 0."""
    growth = {"kind": "top_k", "width": width, **score}
    return {**top_k(draft, width, depth, top_n), "growth": growth}


def policies_of(draft: str, limits: DraftLimits, longest: int) -> list[Policy]:
    """What competes with one draft: each mechanism in many sizes, and two of them together."""
    documents: list[dict[str, Any]] = [
        {"draft": draft, "window": fixed(g + 1)} for g in range(longest)
    ]
    windows = [{"draft": draft, "window": window} for window in ADAPTIVE]
    if draft == "ngram":
        return [AUTOREGRESSIVE, *map(parse_policy, documents + windows)]
    documents += [{"draft": draft, "window": fixed(8), "stop": stop} for stop in STOPS]
    sizes = [
        (w, d, n) for w in (8, 10) for d in (2, 4, 6, 8) for n in (4, 8, 12, 24, 40, 60) if d <= n
    ]  # fmt: skip
    documents += [ranked(draft, *size, score="probability") for size in sizes]
    documents += [
        ranked(draft, *size, score="coupled", sharpness=sharpness)
        for size in sizes[: len(sizes) // 2]
        for sharpness in (1.5, 3.0)
    ]
    documents += [
        {"draft": draft, "growth": {"kind": "static", "paths": paths}}
        for paths in limits.fits.get("static", ())
    ]
    bins = [
        {**top_k(draft, 8, d, n), "stratify": {"artifact": a, "alpha": alpha, "fractions": f}}
        for a in limits.fits.get("stratify", ()) for d in (3, 5) for n in (12, 24, 60)
        for alpha in (1, 3) for f in ([0.3, 0.6, 1.0], [0.5, 0.8, 1.0])
    ]  # fmt: skip
    classifiers = [
        {"draft": draft, "window": fixed(g), "growth": {
            "kind": "classifier", "artifact": a, "beta": beta, "width": w, "cap": w}}
        for a in limits.fits.get("classifier", ()) for beta in (0.5, 0.6, 0.7)
        for w in (1, 8) for g in (4, 6, 8)
    ]  # fmt: skip
    windows += [{**top_k(draft, 8, 8, n), "window": w} for n in (12, 24, 60) for w in ADAPTIVE]
    k = max(1, limits.clusters // SHARE)
    kinds = {
        "frequency": {"size": limits.rows // SHARE},
        "clusters": {"k0": k, "k1": k, "k_min": k},
    }
    lists = [
        {"shortlist": {"kind": kind, "artifact": a, **size}}
        for kind, size in kinds.items() for a in limits.fits.get(kind, ())
    ]  # fmt: skip
    listed = [{**top_k(draft, 8, d, n), **one} for one in lists for d, n in SIZES]
    adaptive = {"window": ADAPTIVE[3]}
    both = [{**d, **adaptive} for d in (*bins[::4], *classifiers[1::3], *listed[::3])]
    both += [
        {**c, "select": {"top_n": 24}, "stratify": b["stratify"]}
        for b in bins[:4] for c in classifiers[3::6]
    ]  # fmt: skip
    return [
        AUTOREGRESSIVE,
        *map(parse_policy, [*documents, *windows, *bins, *classifiers, *listed, *both]),
    ]


# ------------------------------------------------------------------------------------------- cells


class Tried(NamedTuple):
    """A policy, and the requests that it decodes: under ``rejection`` their texts are others, whose
    seconds are scaled to as many tokens (``scale`` [requests])."""

    policy: Policy
    trace: ReplayTrace
    scale: Floats | float = 1.0
    rejection: bool = False

    @property
    def name(self) -> str:
        return self.policy.label() + " by rejection" * self.rejection

    def replay(self, find: Artifacts, profile: LatencyProfile) -> Replay:
        return run_replay(self.trace, self.policy, profile, artifacts=find, approximate=True)

    def seconds(self, find: Artifacts, profile: LatencyProfile) -> Floats:
        return self.replay(find, profile).seconds * self.scale


@dataclass(frozen=True)
class Drafted:
    """A draft's policies on a recording, each replayed once. ``counts`` [policies, requests, 5]:
    rounds, drafted tokens, passes, further rows of passes, and passes by the part of the output
    head that each evaluates. Policies are ``left_out`` that read unrecorded distributions in more
    than :data:`UNRECORDED` of their rounds; in the others' those have no children. ``sampled`` is
    the recording by rejection, of chains alone."""

    halves: Halves
    draft: str
    rows: int
    tried: list[Tried]
    counts: Floats
    left_out: int

    @classmethod
    def of(
        cls, h: Halves, draft: str, limits: DraftLimits, sampled: Halves | None = None
    ) -> Drafted:
        rows, longest = limits.rows or 1, 8 if draft == "head" else 12
        policies = [Tried(policy, h.trace) for policy in policies_of(draft, limits, longest)]
        if sampled is not None and draft in sampled.trace.panoramas:
            scale = _tokens(h.trace) / _tokens(sampled.trace)
            policies += [
                Tried(one.policy, sampled.trace, scale, rejection=True)
                for one in policies
                if one.policy.speculates and not one.policy.is_tree and not one.policy.shortlisted
            ]
        further = flat(h.pair.id, draft, rows, {"pass": (0.0, 1.0)})
        heads = flat(h.pair.id, draft, rows, {"head": (0.0, 1.0)})
        tried, counts = [], []
        for one in policies:
            replay = one.replay(h.find, further)
            if replay.missing > UNRECORDED * replay.total.rounds:
                continue
            evaluated = one.replay(h.find, heads).seconds
            columns = (*replay.counts[:, [0, 3, 4]].T, replay.seconds, evaluated)
            counts.append(np.stack([column * one.scale for column in columns], axis=1))
            tried.append(one)
        return cls(h, draft, rows, tried, np.array(counts), len(policies) - len(tried))

    def grid_seconds(self, cost: float, slope: float) -> Floats:
        """Of every policy and request in a cell of the grid, [policies, requests]."""
        seconds = self.counts @ price(self.draft, cost, slope)
        for n, one in enumerate(self.tried):
            beside = beside_passes(one.policy)
            if one.policy.needs_profile:
                how = self.draft, self.rows, cost, slope, beside
                profile = grid_profile(self.halves.pair.id, *how)
                seconds[n] = one.seconds(self.halves.find, profile)
            else:
                seconds[n] += beside * self.counts[n, :, 0]
        return seconds

    def seconds(self, profile: LatencyProfile) -> Floats:
        """The same by a profile."""
        return np.array([one.seconds(self.halves.find, profile) for one in self.tried])


def _tokens(trace: ReplayTrace) -> Floats:
    """Of each replayed text."""
    return np.diff(trace.offsets)[trace.order].astype(np.float64)


def times_as_fast(one: Floats, other: Floats, size: int | None = None) -> list[float]:
    """How many times as fast, of seconds by request, and its 95% interval over draws of ``size``
    requests (None: as many as there are)."""
    rng, n = np.random.default_rng(0), len(one)
    draws = rng.multinomial(size or n, np.full(n, 1 / n), RESAMPLES)
    ends = np.quantile((draws @ other) / (draws @ one), (0.025, 0.975))
    return [round(float(x), 4) for x in (other.sum() / one.sum(), *ends)]


def best_of_each(seconds: Floats, tried: Sequence[Tried]) -> dict[str, int]:
    """The fastest policy of each mechanism, by place."""
    order = np.argsort(-seconds.sum(1), kind="stable")
    return {mechanism(tried[n].policy): int(n) for n in order}


def judged(
    seconds: Floats, h: Halves, tried: Sequence[Tried], requests: set[int]
) -> dict[str, Any]:
    """A cell: the winner, by how much over the best tuned chain and over nothing, and two papers
    together over the best of one. The ``verdict`` is what is faster than all simpler beyond noise:
    from nothing on it is the best chain, then the best tree, then the winner if that is faster than
    the verdict so far; its ``speed`` is over nothing, its ``gain`` over the best chain, its
    ``gain_tree`` over the best plain tree; ``best`` is its policy. ``seconds`` [policies,
    requests]; ratios are of speeds on the half that chose nothing, with 95% intervals."""
    fit, test = ([i for i in half if i in requests] for half in (h.fit, h.test))
    best = best_of_each(seconds[:, fit], tried)
    speeds = {name: 1 / seconds[n, fit].sum() for name, n in best.items()}
    fastest = max(speeds.values())
    winner = next(m for m in MECHANISMS if speeds.get(m, 0.0) >= fastest * (1 - TIE))

    def ratio(one: str, other: str) -> list[float]:
        return times_as_fast(*(seconds[best[m]][test] for m in (one, other)))

    verdict = "nothing"
    for step in dict.fromkeys(m for m in ("chain", "tree", winner) if m in best):
        if ratio(step, verdict)[1] > 1:
            verdict = step
    cell: dict[str, Any] = {
        "winner": winner,
        "policy": tried[best[winner]].name,
        "over_chain": ratio(winner, "chain"),
        "over_nothing": ratio(winner, "nothing"),
        "chain": tried[best["chain"]].name,
        "verdict": verdict,
        "best": tried[best[verdict]].name,
        "speed": ratio(verdict, "nothing"),
        "gain": ratio(verdict, "chain"),
    }
    if trees := [m for m in ("tree", "own score") if m in speeds]:
        cell["gain_tree"] = ratio(verdict, max(trees, key=lambda m: speeds[m]))
    if "two" in speeds:
        alone = max((m for m in MECHANISMS[4:8] if m in speeds), key=lambda m: speeds[m])
        cell["two"] = [tried[best["two"]].name, *ratio("two", alone)]
    return cell


def categories(h: Halves) -> dict[str, set[int]]:
    """The requests of each category, and of all."""
    of = [t.category for t in h.trace.trajectories]
    groups = {name: {i for i, c in enumerate(of) if c == name} for name in CATEGORIES}
    return {**groups, "all": set(range(len(of)))}


# ---------------------------------------------------------------------------- many requests at once


def servable(h: Halves) -> ReplayTrace:
    """The recording as the serving simulator reads it: a head's chains as what it copies."""
    trace = h.trace.select(h.trace.order)
    policy = parse_policy({"draft": "head", "window": fixed(GAMMAS[-1])})
    rules = prepare(policy, ["head"]).rules
    assert rules is not None
    rank = trace.growth(policy, rules).rank[:, GAMMAS[-1] - 1]
    kept = np.cumprod(rank != ABSENT, axis=1).sum(1)
    copies = np.stack([np.full(len(kept), GAMMAS[-1]), kept]).astype(np.uint8)
    trace.copies = {"head": copies}
    return trace


def steps_of(
    trace: ReplayTrace, draft: str, gamma: int, batch: int, order: Sequence[int], costs: StepCosts
) -> tuple[Floats, float]:
    """What the steps of ``batch`` clients' requests hold, [4] (steps, further rows of the target's
    passes, passes of the draft, further rows of these), and their seconds. Without waits the steps
    do not depend on costs."""
    assert VLLM.rules is not None
    rules = VLLM.rules._replace(max_num_seqs=batch, reply_s=0.0, ahead=0)
    count = max(len(order), 3 * batch)
    load, part = Load(clients=batch), trace.select(order)
    served = serve(part, draft, {0: [gamma] * (batch + 1)}, load, rules, costs, count=count)
    size, rows, _, _, passes = served.steps.T.astype(np.float64)
    counts = [len(size), np.maximum(0, rows - 1).sum(), passes.sum(), (passes * (size - 1)).sum()]
    return np.array(counts), float(served.ends_s[-1])


FREE = StepCosts(*[Surface(np.zeros(1), np.zeros(1), np.zeros((1, 1)))] * 5)


def trees_of(draft: str, temperature: float) -> list[Policy]:
    """The trees that are served: EAGLE-2's, and above temperature 0 those of the coupled score."""
    scores: list[dict[str, Any]] = [{"score": "probability"}]
    scores += [{"score": "coupled", "sharpness": 1.5}] if temperature else []
    return [parse_policy(ranked(draft, 8, *size, **score)) for score in scores for size in SIZES]


def tree_steps_of(trace: ReplayTrace, tree: Policy, batch: int, order: Sequence[int]) -> Floats:
    """:func:`steps_of` of a tree, [5]: its last count are the steps that decode, each of which
    takes what a tree takes beside its passes. A level is a pass over all nodes that it expands, the
    first one over what was accepted, too, which a head reads again; a request is as much longer as
    in vLLM, where a step reads its prompt."""
    load, count = Load(clients=batch), max(len(order), 3 * batch)
    plan = prepare(tree, [tree.draft])
    served = serve_decoder(trace.select(order), plan, load, Seating(batch), None, count=count)
    size, rows, _, _, passes = served.steps.T.astype(np.float64)
    width = getattr(tree.growth, "width", 1)
    expanded = size + np.maximum(0, passes - 1) * size * width
    rounds, accepted, _ = served.counts.sum(0).astype(np.float64)
    again = accepted * (1 - count / rounds)  # not after a text's last round
    further, steps = (expanded - passes).sum() + again, len(size)
    verified = np.maximum(0, rows - 1).sum()
    return np.array([steps + count / batch, verified, passes.sum(), further, steps])


@dataclass(frozen=True)
class Served:
    """Chains of a draft under a load, then its ``trees``, on the fit half [policies, n] and on
    draws of the other [draws, policies, n]: of n = 5 counts (:func:`tree_steps_of`), or of n = 1,
    seconds."""

    draft: str
    trees: Sequence[Policy]
    fit: Floats
    draws: Floats

    @classmethod
    def of(
        cls,
        h: Halves,
        trace: ReplayTrace,
        draft: str,
        batch: int,
        requests: set[int],
        profile: LatencyProfile | None = None,
        trees: Sequence[Policy] = (),
    ) -> Served:
        rng = np.random.default_rng(0)
        fit, test = ([i for i in half if i in requests] for half in (h.fit, h.test))

        def serve_all(order: Sequence[int]) -> list[Floats]:
            costs = [FREE] * len(GAMMAS)
            if profile is not None:
                costs = [step_costs(profile, draft if gamma else "") for gamma in GAMMAS]
            each = [
                steps_of(trace, draft, g, batch, order, c)
                for g, c in zip(GAMMAS, costs, strict=True)
            ]
            if profile is not None:
                return [np.array([s]) for _, s in each]
            grown = [tree_steps_of(h.trace, tree, batch, order) for tree in trees]
            return [*(np.append(counts, 0.0) for counts, _ in each), *grown]

        orders = [rng.choice(test, len(test)) for _ in range(RESERVED)]
        draws = np.array([serve_all(order) for order in orders])
        return cls(draft, trees, np.array(serve_all(fit)), draws)

    def cell(self, prices: Floats) -> dict[str, Any]:
        """The best window on the fit half, or tree where it is faster than that beyond noise, and
        how much faster it is than nothing on draws of the other (the median: when the last requests
        end depends on their order); ``loaded``, of the grid: what a draft that is loaded and
        proposes nothing leaves of that speed, if it reads every step's tokens."""
        seconds, drawn = self.fit @ prices, self.draws @ prices
        best = int(np.argmin(seconds[: len(GAMMAS)]))
        policy = f"{self.draft} fixed(gamma={GAMMAS[best]})"

        def over(one: int, other: int) -> list[float]:
            ratios = np.quantile(drawn[:, other] / drawn[:, one], (0.5, 0.025, 0.975))
            return [round(float(x), 4) for x in ratios]

        speed, verdict, cell = over(best, 0), "chain", dict[str, Any]()
        if self.trees:
            place = int(np.argmin(seconds[len(GAMMAS) :]))
            tree, n = self.trees[place], len(GAMMAS) + place
            cell = {"tree": tree.label(), "tree_over_chain": over(n, best)}
            if cell["tree_over_chain"][1] > 1:
                policy, speed, verdict = tree.label(), over(n, 0), mechanism(tree)
        pays = speed[1] > 1
        if len(prices) > 1:
            steps, further = self.fit[0, :2]
            reading = np.array([0.0, 0.0, steps, further, 0.0]) @ prices
            none = float(self.fit[0] @ prices)
            cell["loaded"] = round(none / (none + float(reading)), 4)
        return {
            "policy": policy,
            "best": policy if pays else "autoregressive",
            "verdict": verdict if pays else "nothing",
            "speed": speed if pays else [1.0, 1.0, 1.0],
            **cell,
        }


# ------------------------------------------------------------------------------------------ the map


def recording(state: Path, temperature: float, quick: bool, **options: Any) -> Halves:
    """The first :data:`REQUESTS` demo requests at a temperature."""
    count = REQUESTS if temperature else 180
    h = halves(state, temperature, quick, count=count, **options)
    fit, test = ([i for i in half if i < REQUESTS] for half in (h.fit, h.test))
    return replace(h, trace=h.trace.select(sorted(fit + test)), fit=fit, test=test)


def replayed(quick: bool) -> dict[str, Any]:
    """All cells."""
    began, state = time.process_time(), state_folder(quick)
    tree_s = beside_passes(trees_of("head", 0.0)[0])
    cells: list[dict[str, Any]] = []
    hardware: dict[str, Any] = {}
    left_out: dict[str, int] = {}
    first: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        h = recording(state, temperature, quick)
        sampled = None
        if temperature:
            sampled = recording(state, temperature, quick, verifier="rejection", trees=False)
        models = list(h.pair.models)
        listed = [] if temperature else LISTED
        limits = fit_drafts(h.store, h.pair, h.recording, models, fixed=listed, routed=listed)
        groups, every, chains = categories(h), [*named(h)], servable(h)
        for draft in (*models, "ngram"):
            say(f"temperature {temperature:g}, {draft}")
            drafted = Drafted.of(h, draft, limits.get(draft, DraftLimits()), sampled)
            about = {"temperature": temperature, "draft": draft}
            first.append({**about, "share": first_token(h, draft, groups)})
            left_out[f"{draft}, temperature {temperature:g}"] = drafted.left_out
            costs = [(0.0, s) for s in SLOPES] if draft == "ngram" else [
                (c, s) for c in DRAFT_COSTS for s in SLOPES
            ]  # fmt: skip
            of_hardware = [one for one in every if draft in one.drafts]
            seconds: list[tuple[dict[str, Any], Floats]] = [
                ({**about, "draft_cost": c, "slope": s}, drafted.grid_seconds(c, s))
                for c, s in costs
            ]
            for one in of_hardware:
                here = {"label": one.label, "source": one.source, "place": {}}
                hardware.setdefault(one.name, here)["place"][draft] = one.place(draft)
                seconds.append(({**about, "hardware": one.name}, drafted.seconds(one.profile)))
            for category, requests in groups.items():
                for key, each in seconds:
                    cell = judged(each, h, drafted.tried, requests)
                    cells.append({**key, "batch": 1, "category": category, **cell})
            trace = chains
            if sampled is not None and draft in sampled.trace.panoramas:
                trace = sampled.trace
            grown = trees_of(draft, temperature) if draft == "head" else []
            for batch in BATCHES:
                for category, requests in groups.items():
                    trees = grown if category == "all" else ()
                    served = Served.of(h, trace, draft, batch, requests, trees=trees)
                    for c, s in costs:
                        key = {**about, "draft_cost": c, "slope": s, "batch": batch}
                        prices = np.array([1.0, s, c, c * s, tree_s])
                        cells.append({**key, "category": category, **served.cell(prices)})
                for one in of_hardware:
                    if "step" in one.profile.terms:
                        key = {**about, "hardware": one.name, "batch": batch, "category": "all"}
                        served = Served.of(h, trace, draft, batch, groups["all"], one.profile)
                        cells.append({**key, **served.cell(np.ones(1))})
    about = {"hardware": hardware, "left_out": left_out, "first_token": first}
    core_s = round(time.process_time() - began)
    return {**about, "core_seconds": core_s, "cells": cells}


def first_token(h: Halves, draft: str, groups: dict[str, set[int]]) -> dict[str, float]:
    """How often a draft's first token is accepted, where a round proposes one, by category."""
    counts = run_replay(h.trace, parse_policy({"draft": draft, "window": fixed(1)})).counts
    order = h.trace.order.tolist()
    sums = {name: counts[[i in of for i in order]].sum(0) for name, of in groups.items()}
    return {name: round(float(of[ACCEPTED] / of[ROUNDS]), 4) for name, of in sums.items()}


def store(file: Path, part: str, figures: dict[str, Any], made: dict[str, Any]) -> None:
    """Adds a part to the map, in which a cell is a line."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    cells = figures.pop("cells", kept.pop("cells", []))
    text = json.dumps({**kept, part: figures | made, "cells": []}, indent=1)
    rows = ",\n".join(map(json.dumps, cells))
    file.write_text(text.replace('"cells": []', f'"cells": [\n{rows}\n]') + "\n")


RESULT, PARTS = "map", {"replay": replayed}

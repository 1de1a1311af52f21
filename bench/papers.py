"""The four papers' claims beside what is measured here, a table for each.

    python bench/run.py papers [--only heterospec c2t ...] [--quick]

Rounds are replayed exactly on requests that no fit and no choice of a baseline has seen, greedy and
at temperature 1. Seconds are composed from three costs: this CPU's measured profile (``cpu``), the
H100's measured rounds of a pair ballasted to 8B (``h100``, its draft's step for both drafts), and a
70B target as HeteroSpec's table 6 publishes it (``70b``). A row holds the paper's figure, ours with
a 95% interval over requests, and a cause. :data:`CLAIMS` has the papers' figures: where a table
reports several models, the smallest gain is what ours is held against. Recordings and fits are kept
in ``.acceptance/halves.db``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from lab import (
    CATEGORIES,
    EAGLE_WIDTH,
    RESULTS,
    ROOT,
    Halves,
    compare,
    halves,
    measured,
    requests,
    run_parts,
    say,
)
from pairs import chain, fixed

from spectune.optimizer.execute import DecodeOptions, encode
from spectune.optimizer.fit.c2t import classifier_examples, fit_c2t, train
from spectune.optimizer.fit.heterospec import fit_heterospec
from spectune.optimizer.fit.recorded_trees import RecordedTrees, TreeSource, tree_source
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import Replay
from spectune.optimizer.timings import Timings, finite
from spectune.runtime.policies.artifacts import CLASSIFIER, Artifacts, Fitted
from spectune.runtime.policies.c2t import WEIGHTS, ClassifierWeights
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.heterospec import FRACTIONS
from spectune.traces.cost_table import CostTable
from spectune.traces.tables import LatencyProfile

Document = dict[str, Any]
Interval = Sequence[float | None]
ROUNDS, EMITTED, ACCEPTED, DRAFTED, PASSES, VERIFIED = range(6)
"""Columns of a replay's counts."""
DEPTH, TOP_N, ALPHA = 5, 60, 3
"""EAGLE-2's depth and nodes, and HeteroSpec's alpha, half of the depth rounded up."""
DEEPEST = 8
BETAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 60)
RESAMPLES = 400


class Claim(NamedTuple):
    """What a paper says: a title, its figure with its place, and what ours is to be at least, or at
    most (neither: it cannot be held against a figure)."""

    title: str
    figure: str
    least: float | None = None
    most: float | None = None


CLAIMS = {
    "tau": Claim("tau (target calls: the inverse)", "+3.3 to +8.4% (table 1)", 1.033),
    "tau 1": Claim("tau (target calls: the inverse)", "+3.6 to +7.7% (table 9)", 1.036),
    "tokens": Claim("verified tokens", "-7.7 to -16.2% (table 1)", most=0.923),
    "tokens 1": Claim("verified tokens", "-5.6 to -12.7% (table 9)", most=0.944),
    "speed": Claim("speed", "+2.3 to +9.1% (table 1)", 1.023),
    "speed 1": Claim("speed", "+2.6 to +7.5% (table 9)", 1.026),
    "tuned": Claim("speed, both tuned", "none: no baseline is tuned", 1.0),
    "executed": Claim("speed, executed", "as replayed"),
    "deeper": Claim("tau, deeper trees alone", "+7.6 to +18.1% (table 2, code)", 1.076),
    "pruned": Claim("verified tokens by pruning", "-13.6 to -19.3% (table 2, code)", most=0.864),
    "kept": Claim("tau kept by pruning", "97.8 to 99.1% (table 2, code)", 0.978),
    "alpha 2": Claim("speed, alpha 3 over 2", "+1.2 to +2.3% (table 3)", 1.012),
    "alpha 4": Claim("speed, alpha 3 over 4", "+0.2 to +1.1% (table 3)", 1.002),
    "domain": Claim("speed out of domain", "+5.3 to +10.8% (table 5)", 1.053),
    "overhead": Claim("seconds with entropies", "+0.3 to +0.9% (table 6)", most=1.009),
    "adaedl": Claim("speed over AdaEDL on the tree", "+6 to +22% (table 11)", 1.06),
    "nodes": Claim("verified tokens at EAGLE-2's tau", "75 to 80% (section 5)", most=0.8),
    "two": Claim("the same, two features", "90% (table 1)", most=0.9),
    "hidden": Claim("the same, other hidden sizes", "12 to 48 alike (B.3)", most=0.8),
    "transfer": Claim("the same, trained on another draft", "73 to 100% (table 2)", most=1.0),
    "texts": Claim("the same, trained on other texts", "below EAGLE-2's (figure 4)", most=1.0),
    "cap": Claim("the same, at most 5 a level", "below EAGLE-2's (table 5)", most=1.0),
    "stops": Claim("verified tokens of chains at a stop's tau", "90 to 92% (table 3)", most=0.92),
}


def row(claim: str, cell: str, ours: Interval, why: str = "") -> Document:
    """A row of a paper's table."""
    say(f"{CLAIMS[claim].title}, {cell}: {[x and round(x, 3) for x in ours]}")
    return {"claim": claim, **CLAIMS[claim]._asdict(), "cell": cell, "ours": ours, "why": why}


def main(arguments: Sequence[str]) -> None:
    run_parts(__doc__, "papers", PARTS, arguments)


# ----------------------------------------------------------------------------- recordings and costs


@cache
def recorded(temperature: float, quick: bool) -> Halves:
    """The halves of a temperature, with trees."""
    state = ROOT / ".acceptance" / "quick" if quick else ROOT / ".acceptance"
    state.mkdir(parents=True, exist_ok=True)
    return halves(state, temperature, quick, count=120 if temperature else 180)


def cells(quick: bool) -> Iterator[tuple[Halves, float, str, str]]:
    """Every recording, its temperature, a draft of its pair, and what they are called."""
    for temperature in (0.0, 1.0):
        h = recorded(temperature, quick)
        for draft in ("medium",) if quick else h.pair.models:
            yield h, temperature, draft, f"{draft}, temperature {temperature:g}"


@cache
def costs(quick: bool) -> dict[str, LatencyProfile]:
    """The three costs by name."""
    h = recorded(0.0, quick)
    cpu = h.store.profile_of(h.pair.id, None, device="cpu")
    return {
        "cpu": cpu or measured(h.store, h.pair, h.recording),
        "h100": _h100(h.pair.id),
        "70b": _seventy(h.pair.id),
    }


def _h100(pair_id: str) -> LatencyProfile:
    """Measured on the H100 (``gpu-nvidia-h100-80gb-hbm3.json``): the target's pass by tokens; a
    step of the draft, a level of the head; what trees take more, by level and by round."""
    figures = json.loads((RESULTS / "gpu-nvidia-h100-80gb-hbm3.json").read_text())
    passes = {r["what"]: r["ms"] / 1e3 for r in figures["passes"]["rows"]}
    rounds = {r["policy"]: r for r in figures["rounds"]["rows"]}
    rows = [name for name in passes if name.startswith("pass, tokens")]
    places = tuple(float(name.split(":")[1]) for name in rows)
    tree, line = (rounds[name] for name in ("draft, the same tree", "draft, gamma 4"))
    return published(
        pair_id,
        CostTable(tuple(passes[name] for name in rows), ("rows",), (places,)),
        dict.fromkeys(("small", "medium"), passes["draft's step"])
        | {"head": passes["level of the head's tree"]},
        level_s=(tree["draft ms"] - line["draft ms"]) / 4e3,
        round_s=line["rest ms"] / 1e3,
        tree_s=(tree["rest ms"] - line["rest ms"]) / 1e3,
    )


def _seventy(pair_id: str) -> LatencyProfile:
    """HeteroSpec, table 6, Llama 3.3 70B with EAGLE-3 on MT-bench: verification and drafting in
    10,099 calls (table 1), a call of 8 draft passes. How verification grows with tokens is not
    published: it is taken as flat."""
    verify_s, draft_s = 1080.7 / 10099, 133.3 / 10099 / 8
    steps = dict.fromkeys(("small", "medium", "head"), draft_s)
    return published(pair_id, CostTable((verify_s,)), steps)


def published(
    pair_id: str,
    target: CostTable,
    steps: dict[str, float],
    *,
    level_s: float = 0.0,
    round_s: float = 0.0,
    tree_s: float = 0.0,
) -> LatencyProfile:
    """A profile of constants: each draft's step or head's level; what a level of a draft's tree
    takes more, a round, and a round with a tree more. Prompts and prompt lookup are free."""
    terms = {"target": target, "round": CostTable((round_s,))}
    for draft, step_s in {**steps, "ngram": 0.0}.items():
        more_s = 0.0 if draft == "head" else level_s
        terms |= {
            f"pass/{draft}": CostTable((step_s,)),
            f"tree round/{draft}": CostTable((tree_s,)),
        }
        terms |= {
            f"{kind}/{draft}": CostTable((more_s,)) for kind in ("top_k", "static", "classifier")
        }
        if draft != "head":
            terms[f"phase/{draft}"] = CostTable((0.0,))
    return LatencyProfile(pair_id, "published", "float16", terms)


# ------------------------------------------------------------------------------ replays and figures


def replayed(
    h: Halves,
    policy: Policy | Document,
    profile: LatencyProfile | None = None,
    *,
    places: Sequence[int] | None = None,
    find: Artifacts | None = None,
) -> Replay:
    """A policy on some requests, by default the unseen half."""
    policy = policy if isinstance(policy, Policy) else parse_policy(policy)
    part = h.trace.select(h.test if places is None else places)
    return run_replay(part, policy, profile, artifacts=find or h.find)


def over(base: npt.NDArray[Any], new: npt.NDArray[Any]) -> list[float | None]:
    """sum(base) / sum(new) with its 95% interval over requests."""
    columns = {"base": base[:, None].astype(float), "new": new[:, None].astype(float)}
    return finite(Timings(columns).ratio("new", "base"))


def speedup(h: Halves, policy: Any, base: Any, profile: LatencyProfile, **part: Any) -> Interval:
    """The speed of one policy over another's."""
    one, other = (replayed(h, p, profile, **part).seconds for p in (base, policy))
    return over(one, other)


def best(h: Halves, policies: Iterable[Document], profile: LatencyProfile) -> Policy:
    """The fastest policy on the half that is fitted to."""
    parsed = [parse_policy(document) for document in policies]
    return min(parsed, key=lambda p: replayed(h, p, profile, places=h.fit).seconds.sum())


def executed(h: Halves, policy: Document, base: Document, quick: bool) -> list[Document]:
    """A row of the speed of a policy over another, executed on some of the unseen requests, which
    says what replay at this CPU's costs predicts for these."""
    places, profile = h.test[: 2 if quick else 12], costs(quick)["cpu"]
    info, workload = h.store.get_recording(h.recording), requests(max(places) + 1)
    part = replace(workload, requests=tuple(workload.requests[i] for i in places))
    options = DecodeOptions(info.sampling, info.max_new_tokens)
    both = [parse_policy(p) for p in (policy, base)]
    encoded = encode(h.pair, part, options)
    timings = compare(h.pair, both, encoded, passes=2, profile=profile, artifacts=h.find).timings
    ours = finite(timings.ratio(both[0].id, both[1].id))
    predicted = speedup(h, *both, profile, places=places)
    cell = f"{both[0].draft}, temperature {info.sampling.temperature:g}, cpu"
    why = f"{len(places)} requests; replay says {predicted[0]:.3f}"
    return [row("executed", cell, ours, why)]


# -------------------------------------------------------------------------------------- HeteroSpec


def eagle(draft: str, top_n: int = TOP_N, depth: int = DEPTH, **more: Any) -> Document:
    """EAGLE-2's tree, by the draft's probabilities at every temperature."""
    growth = {"kind": "top_k", "width": EAGLE_WIDTH, "score": "probability"}
    return chain(draft, depth, growth=growth, select={"top_n": top_n}) | more


def eagles(draft: str) -> list[Document]:
    """EAGLE-2's trees of many depths and sizes, among which a tuned one is chosen."""
    return [eagle(draft, top_n, depth) for depth in (1, 2, 3, 4, 5, 6, 8) for top_n in SIZES]


def in_bins(
    draft: str,
    artifact: str,
    alpha: int = ALPHA,
    fractions: Sequence[float] = FRACTIONS[0],
    **more: Any,
) -> Document:
    """HeteroSpec's tree, with the paper's fractions by default."""
    stratify = {"artifact": artifact, "alpha": alpha, "fractions": list(fractions)}
    return eagle(draft, stratify=stratify, **more)


def heterospec(quick: bool) -> list[Document]:
    """HeteroSpec over EAGLE-2's tree of the same depth, width and nodes (the paper's baseline), and
    both of them tuned."""
    rows = []
    for h, temperature, draft, cell in cells(quick):
        at = " 1" if temperature else ""
        source = tree_source(h.store, h.recording, draft)
        bins = fit_heterospec(source, depth=DEPTH, width=EAGLE_WIDTH, top_n=TOP_N)
        shares = [s["share"] for s in bins.document["statistics"][:3]]
        why = f"{100 * sum(shares):.0f}% of starts are in the three low bins"
        plain, new = eagle(draft), in_bins(draft, bins.artifact)
        base, ours = (replayed(h, p).counts.T for p in (plain, new))
        rows.append(row(f"tau{at}", cell, over(base[ROUNDS], ours[ROUNDS]), why))
        rows.append(row(f"tokens{at}", cell, over(ours[VERIFIED], base[VERIFIED]), why))
        for name, profile in costs(quick).items():
            speed = speedup(h, new, plain, profile)
            rows.append(row(f"speed{at}", f"{cell}, {name}", speed, CAUSES[name]))
            grid = [
                in_bins(draft, bins.artifact, alpha, fractions, top_n=top_n, depth=depth)
                for depth in (2, 3, 4, 5)
                for top_n in SIZES[1:]
                for alpha in (1, 2, 3)
                for fractions in FRACTIONS[:4]
            ]
            tuned = best(h, grid, profile), best(h, eagles(draft), profile)
            rows.append(row("tuned", f"{cell}, {name}", speedup(h, *tuned, profile)))
        if not temperature:
            rows += _heterospec_ablations(h, draft, bins.artifact, quick)
            if draft != "small":
                rows += executed(h, new, plain, quick)
    return rows


CAUSES = {
    "cpu": "a level of the draft and its entropies are dear here",
    "h100": "entropies not charged; a level is a tenth of a pass",
    "70b": "entropies not charged; verification taken as flat",
}


def _heterospec_ablations(h: Halves, draft: str, artifact: str, quick: bool) -> list[Document]:
    """Tables 2, 3, 5, 6 and 11, greedy."""
    profiles, new = costs(quick), in_bins(draft, artifact)
    policies = eagle(draft), in_bins(draft, artifact, fractions=(1.0, 1.0, 1.0)), new
    plain, deeper, pruned = (replayed(h, p).counts.T for p in policies)
    rows = [
        row("deeper", draft, over(plain[ROUNDS], deeper[ROUNDS])),
        row("pruned", draft, over(pruned[VERIFIED], deeper[VERIFIED])),
        row("kept", draft, over(deeper[ROUNDS], pruned[ROUNDS])),
    ]
    for alpha in (2, 4):
        speed = speedup(h, new, in_bins(draft, artifact, alpha), profiles["70b"])
        rows.append(row(f"alpha {alpha}", f"{draft}, 70b", speed))
    for category, source, others in by_category(h, draft):
        bins = fit_heterospec(source, depth=DEPTH, width=EAGLE_WIDTH, top_n=TOP_N)
        other = in_bins(draft, bins.artifact)
        speed = speedup(h, other, eagle(draft), profiles["70b"], places=others)
        rows.append(row("domain", f"{draft}, bins of {category} elsewhere, 70b", speed))
    cpu = profiles["cpu"]
    free = {name: table for name, table in cpu.terms.items() if name != f"stratify/{draft}"}
    charged, without = (replayed(h, new, p).seconds for p in (cpu, replace(cpu, terms=free)))
    rows.append(row("overhead", f"{draft}, cpu", over(charged, without)))
    for name, profile in profiles.items():
        stops = ({"kind": "entropy", "threshold": t} for t in (0.2, 0.4, 0.6))
        stopped = best(h, (eagle(draft, stop=stop) for stop in stops), profile)
        rows.append(row("adaedl", f"{draft}, {name}", speedup(h, new, stopped, profile)))
    return rows


def by_category(h: Halves, draft: str) -> Iterator[tuple[str, TreeSource, list[int]]]:
    """Each category, its trees to fit to, and the unseen requests of the others."""
    source, of = (
        tree_source(h.store, h.recording, draft),
        [t.category for t in h.trace.trajectories],
    )
    for category in CATEGORIES:
        trace = h.trace.select(i for i in h.fit if of[i] == category)
        trees = RecordedTrees.of(trace, draft)
        yield (
            category,
            replace(source, trace=trace, trees=trees),
            [i for i in h.test if of[i] != category],
        )


# --------------------------------------------------------------------------------------------- C2T


def classified(draft: str, artifact: str, beta: float, depth: int = DEEPEST, **more: Any) -> Any:
    """C2T's tree; of width 1 its chain mode."""
    growth = {"kind": "classifier", "width": EAGLE_WIDTH, "cap": EAGLE_WIDTH, "beta": beta}
    growth |= {"artifact": artifact, "score": "probability", **more}
    return {"draft": draft, "window": fixed(depth), "growth": growth}


def nodes_at_equal_tau(
    h: Halves,
    policy: Document,
    curve: Sequence[Document],
    places: Sequence[int] | None = None,
    find: Artifacts | None = None,
) -> list[float | None]:
    """Verified tokens of a policy over those that a curve of policies verifies at the policy's tau,
    linear between its points; the 95% interval resamples requests. None beyond the curve."""
    one = replayed(h, policy, places=places, find=find).counts
    others = [replayed(h, p, places=places).counts for p in curve]

    def ratio(drawn: npt.NDArray[np.int64]) -> float:
        points = np.array([counts[drawn].sum(0) for counts in (one, *others)], dtype=float)
        tau, nodes = points[:, EMITTED] / points[:, ROUNDS], points[:, VERIFIED] / points[:, ROUNDS]
        order = 1 + np.argsort(tau[1:])
        beyond = {"left": np.nan, "right": np.nan}
        return float(nodes[0] / np.interp(tau[0], tau[order], nodes[order], **beyond))

    rng, n = np.random.default_rng(0), len(one)
    drawn = [ratio(rng.integers(0, n, n)) for _ in range(RESAMPLES)]
    return finite([ratio(np.arange(n)), *np.quantile(drawn, (0.025, 0.975)).tolist()])


def tree_curve(draft: str) -> list[Document]:
    """EAGLE-2 over N, at the largest recorded depth."""
    return [eagle(draft, top_n, DEEPEST) for top_n in (*SIZES, 96, 128, 192, 255)]


def c2t(quick: bool) -> list[Document]:
    """C2T's verified tokens over those of EAGLE-2 at the same tau, and the speed of both tuned."""
    rows: list[Document] = []
    fits: dict[str, str] = {}
    for h, temperature, draft, cell in cells(quick):
        source = tree_source(h.store, h.recording, draft)
        artifact = fit_c2t(source, width=EAGLE_WIDTH).artifact
        for beta in (0.4, 0.6, 0.8):
            new = classified(draft, artifact, beta)
            share = nodes_at_equal_tau(h, new, tree_curve(draft))
            rows.append(row("nodes", f"{cell}, beta {beta}", share))
        for name, profile in costs(quick).items():
            depths = (1, 2, 3, 4, 5, 6, 8)
            grid = [classified(draft, artifact, beta, depth) for beta in BETAS for depth in depths]
            tuned = best(h, grid, profile), best(h, eagles(draft), profile)
            rows.append(row("tuned", f"{cell}, {name}", speedup(h, *tuned, profile)))
        if not temperature:
            fits[draft] = artifact
            if draft != "small":
                rows += executed(h, classified(draft, artifact, 0.6), eagle(draft), quick)
    for draft in fits:
        rows += _c2t_ablations(recorded(0.0, quick), draft, fits)
    return rows


def _c2t_ablations(h: Halves, draft: str, fits: dict[str, str]) -> list[Document]:
    """Tables 1 to 3 and 5, figure 4's transfer and appendix B.3, greedy, at beta 0.5."""
    curve, source = tree_curve(draft), tree_source(h.store, h.recording, draft)

    def of_any_draft(name: str) -> Fitted:
        artifact = h.find(name)
        return replace(artifact, document={**artifact.document, "draft": None})

    def share(artifact: str, places: Sequence[int] | None = None, **more: Any) -> Interval:
        new = classified(draft, artifact, 0.5, **more)
        return nodes_at_equal_tau(h, new, curve, places, of_any_draft)

    rows = [
        row("transfer", f"{draft}, trained on {other}", share(artifact))
        for other, artifact in fits.items()
        if other != draft
    ]
    examples = classifier_examples(source.trees, EAGLE_WIDTH, source.trees.forest.depth, count=4000)
    constant = np.ones_like(examples.depth)
    for name, column in (("entropy_code", 1), ("depth", 2)):
        weights = train(replace(examples, **{name: constant}))
        weights.w1[:, column] = 0.0  # a constant input is not trained
        rows.append(row("two", f"{draft}, without {name}", share(_kept(source, weights))))
    for hidden in (2, 12):
        weights = train(examples, hidden=hidden)
        rows.append(row("hidden", f"{draft}, {hidden} hidden", share(_kept(source, weights))))
    rows.append(row("cap", draft, share(fits[draft], cap=5)))
    for category, part, others in by_category(h, draft):
        artifact = fit_c2t(part, width=EAGLE_WIDTH).artifact
        rows.append(row("texts", f"{draft}, trained on {category}", share(artifact, others)))
    alone = classified(draft, fits[draft], 0.5, width=1, cap=1)
    for kind in ("max_prob", "joint_prob"):
        stops = [
            {"kind": kind, "threshold": t, "keep_last": False}
            for t in (0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
        ]
        stopped = [chain(draft, DEEPEST, stop=stop) for stop in stops]
        rows.append(row("stops", f"{draft}, {kind}", nodes_at_equal_tau(h, alone, stopped)))
    return rows


def _kept(source: TreeSource, weights: ClassifierWeights) -> str:
    """The artifact of a classifier's weights."""
    arrays = {name: getattr(weights, name) for name in WEIGHTS}
    about = {"hidden": weights.hidden}
    return source.keep(CLASSIFIER, about, DEEPEST, lambda artifact: {}, arrays).artifact


PARTS: dict[str, Callable[[bool], Any]] = {"heterospec": heterospec, "c2t": c2t}

"""Each paper alone, all together, and the methods of the tree papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import (
    CATEGORIES,
    DEPTH,
    GREEDY,
    Document,
    Lab,
    compare,
    fixed,
    laboratory,
    requests,
    say,
    top_k,
)
from verdicts import MET, at_least, joint_over_best

from spectune.optimizer.execute import Comparison, encode
from spectune.optimizer.search import Study, Trial, finalists, search
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.spaces import Kinds
from spectune.optimizer.timings import finite
from spectune.optimizer.verdict import weighed
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy

DRAFTS = ("medium", "head")
ADAPTIVE = ("fsm", "cache_fsm", "analytic", "q_learning")
PAPERS = ("on-the-fly", "HeteroSpec", "C2T", "DynaSpec")
JOINT = " + ".join(PAPERS)
BASELINES = ("best fixed gamma", "EAGLE-2 trees, our score included")
SPREAD = 0.04
"""Standard deviation of a predicted ratio of two policies' speeds on other requests, where both are
the best of hundreds by prediction."""


def used(policy: Policy) -> frozenset[str]:
    """The papers whose mechanisms a policy uses: adaptive windows; entropy bins; a classifier's
    growth; a shortlist."""
    adaptive, grown = policy.window.kind in ADAPTIVE, policy.growth.kind == "classifier"
    flags = (adaptive, policy.stratify is not None, grown, policy.shortlisted)
    return frozenset(paper for paper, there in zip(PAPERS, flags, strict=True) if there)


def kinds_of(papers: Sequence[str]) -> Kinds:
    """What policies of these papers may be made of, beside chains and EAGLE-2's trees of fixed
    windows."""
    shortlists = ("full", "frequency", "position_frequency", "clusters")
    return Kinds(
        windows=("fixed", *(ADAPTIVE if "on-the-fly" in papers else ())),
        stops=("none",),
        growths=("chain", "top_k", *(("classifier",) if "C2T" in papers else ())),
        bins="HeteroSpec" in papers,
        shortlists=shortlists if "DynaSpec" in papers else shortlists[:1],
    )


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """Each paper alone and all together, searched by replay, chosen by execution, and confirmed on
    requests that neither has seen.

    Two finalists of every space are executed on other requests than searched on; all papers
    together also have the others' finalists. The fastest by execution and prediction together, as
    in ``tune``, is executed once more on unseen requests: those are the figures. It holds where all
    together is at least as fast as the best single paper of each workload, by the lower end of the
    95% interval over all workloads. A draft for each prompt has a check of its own.
    """
    lab = laboratory(state, "demo", GREEDY, quick)
    trace = lab.trace()
    rows, methods = [], []
    for category in CATEGORIES[: 1 if quick else 3]:
        part = trace.select([i for i, t in enumerate(trace.trajectories) if t.category == category])
        rows += _confirmed(lab, category, _chosen(lab, part, quick), quick)
        methods += tree_methods(lab, category, part)
    papers = [r for r in rows if r["space"] in PAPERS]
    together, low, high = joint_over_best(rows, PAPERS)
    behind = sum((r["joint_over_it"][2] or 9.0) < 1.0 for r in papers)
    joint = ", ".join(f"{r['workload']} {r['speedup']:.2f}" for r in rows if r["space"] == JOINT)
    return {
        "holds": at_least((low, high), 1.0) == MET,
        "summary": f"all papers together over autoregression, on unseen requests: {joint}; over "
        f"the best single paper {together:.3f} ({low:.3f}-{high:.3f}); slower than a single paper "
        f"beyond noise in {behind} of {len(papers)} cases",
        "joint_over_best": [together, low, high],
        "rows": rows,
        "methods": methods,
    }


def _chosen(lab: Lab, trace: ReplayTrace, quick: bool) -> dict[str, list[Trial]]:
    """Finalists of every space, fastest first, and of the baselines, by replay of a workload's
    requests."""
    known: dict[str, Trial] = {}

    def within(papers: Sequence[str], trials: int) -> Study:
        kinds = kinds_of(papers)
        seen = Study(tuple(t for t in known.values() if kinds.hold(t.policy)), 0, "")
        how: dict[str, Any] = {
            name: {draft: limits[draft] for draft in DRAFTS if draft in limits}
            for name, limits in (("trees", lab.trees), ("shortlists", lab.shortlists))
        }
        how |= {"known": seen, "kinds": kinds, "bounded": False, "artifacts": lab.find}
        gamma_max = 4 if quick else 8
        study = search(trace, lab.profile, DRAFTS, gamma_max=gamma_max, trials=trials, **how)
        known.update({t.policy.id: t for t in study.trials})
        return study

    within(PAPERS, 4 if quick else 120)
    chosen = {}
    for papers in (*((p,) for p in PAPERS), PAPERS):
        study = within(papers, 2 if quick else 30)
        own = tuple(t for t in study.trials if used(t.policy) and used(t.policy) <= set(papers))
        chosen[" + ".join(papers)] = finalists(Study(own, study.seed, study.sampler), 2)
    chosen[JOINT] = list({t.policy.id: t for found in chosen.values() for t in found}.values())
    plain = [t for t in known.values() if t.policy.speculates and not used(t.policy)]
    plain.sort(key=lambda t: -t.value)
    for name, growth in zip(BASELINES, ("chain", "top_k"), strict=True):
        chosen[name] = [t for t in plain if t.policy.growth.kind == growth][:1]
    return {name: found for name, found in chosen.items() if found}


def _confirmed(
    lab: Lab, category: str, chosen: dict[str, list[Trial]], quick: bool
) -> list[dict[str, Any]]:
    """Chooses among finalists by execution, and executes the winners on requests that are new to
    all of this."""
    how = {"profile": lab.profile, "artifacts": lab.find}
    first, second = (2, 3) if quick else (8, 18)
    seen = len(lab.workload.requests)
    raced = {t.policy.id: t.policy for found in chosen.values() for t in found}
    tried = encode(lab.pair, requests(first, skip=seen, category=category), lab.options)
    decided = compare(lab.pair, list(raced.values()), tried, **how)
    winners: dict[str, Any] = {name: _fastest(found, decided) for name, found in chosen.items()}
    winners["autoregressive"] = AUTOREGRESSIVE
    unseen = encode(lab.pair, requests(second, skip=seen + first, category=category), lab.options)
    compared = compare(lab.pair, list(winners.values()), unseen, **how)
    rows = []
    for name, policy in winners.items():
        speedup = compared.timings.ratio(policy.id, AUTOREGRESSIVE.id)
        over = compared.timings.ratio(winners[JOINT].id, policy.id)
        row = {"workload": category, "space": name, "policy": policy.label(), "speedup": speedup[0]}
        row |= {"speedup_interval": finite(speedup[1:]), "joint_over_it": finite(over)}
        row |= {"tau": compared.outcomes[policy.id].total.mean_accepted_length}
        rows.append({**row, "texts_differ": compared.texts.differ})
        say(f"{category} {name}: {speedup[0]:.3f} x autoregression, {policy.label()}")
    return rows


def _fastest(found: Sequence[Trial], compared: Comparison) -> Policy:
    """Who wins by what was executed and predicted together."""
    base = found[0]

    def speed(trial: Trial) -> float:
        if trial is base:
            return 0.0
        ratio = compared.timings.ratio(trial.policy.id, base.policy.id)
        return weighed(ratio, trial.value / base.value, SPREAD)

    return max(found, key=speed).policy


def tree_methods(lab: Lab, category: str, trace: ReplayTrace) -> list[dict[str, Any]]:
    """HeteroSpec, C2T, adaptive depth and AdaEDL against EAGLE-2: tau and verified tokens replayed,
    exactly, on texts of which bins and classifiers have seen some."""
    rows: list[dict[str, Any]] = []
    how: dict[str, Any] = {"artifacts": lab.find, "approximate": True}
    for draft in DRAFTS:
        policies = {name: parse_policy(d) for name, d in _methods(lab, draft).items()}
        totals = {name: run_replay(trace, p, **how).total for name, p in policies.items()}
        for name, total in totals.items():
            row = {"workload": category, "draft": draft, "method": name}
            over = total.verified_tokens / totals["EAGLE-2"].verified_tokens
            tau = total.mean_accepted_length
            rows.append({**row, "tau": tau, "verified_over_eagle2": over})
    return rows


def _methods(lab: Lab, draft: str) -> dict[str, Document]:
    limit, base = lab.trees.get(draft), top_k(draft, 8, 5, 40)
    named: dict[str, Document] = {
        "EAGLE-2": base,
        "adaptive depth (fsm)": {**base, "window": {"kind": "fsm", "gamma_max": DEPTH}},
        "AdaEDL": {**base, "stop": {"kind": "entropy", "threshold": 0.4}},
    }
    if limit is not None and limit.bins is not None:
        bins = {"artifact": limit.bins, "alpha": min(3, DEPTH - 5)}
        for name, fractions in (
            ("depth extension (DED)", [1.0, 1.0, 1.0]),
            ("HeteroSpec", [0.3, 0.6, 1.0]),
        ):
            named[name] = {**base, "stratify": {**bins, "fractions": fractions}}
    if limit is not None and limit.classifier is not None:
        for beta in (0.3, 0.5):
            growth = {"growth": limit.grower(beta), "window": fixed(5)}
            named[f"C2T beta {beta}"] = {"draft": draft, **growth}
    return named

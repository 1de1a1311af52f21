"""Predicted speeds are executed speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from bench.harness import say, state_folder
from bench.lab import (
    GAMMA,
    GREEDY,
    agreement,
    chain,
    compare,
    demo,
    gpt2,
    laboratory,
    measured,
    requests,
    spread_over,
    stored,
)
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.profiles import common_factor
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.report.words import prediction_in_words
from spectune.optimizer.tuning.native import TuneOptions, tune_pair
from spectune.optimizer.tuning.race import Comparison
from spectune.optimizer.tuning.timings import Expected, Timings
from spectune.runtime.policies.document import Policy

PASSES = 2
"""Of a measurement."""
KINDS = {"chains": 16, "trees": 14, "shortlists": 10}
"""How many policies of each kind are executed."""


def check(quick: bool) -> dict[str, Any]:
    """Predicted against executed tokens/s: 40 policies of every kind, interleaved, and the final
    tables of `tune`.

    All are executed twice over, in two passes each time; a request counts with its mean. The
    second measurement comes minutes after the first: what a shared machine takes for one model
    beside another changes meanwhile. Predictions are held against the mean of both. What it is off
    by itself, half of what they differ by, is the bar where it is larger than 3% (90th percentile:
    6%). Costs are those of two profiles, one from before the first measurement and one from after
    it. Errors are told as predicted, and after the one common factor of each profile that is fitted
    to the same executions; the bars are for the latter.
    """
    state = state_folder(quick)
    lab = laboratory(state, "demo", GREEDY, quick)
    if not quick:  # the laboratory's may be of a time when the machine ran at another pace
        lab = replace(lab, profile=measured(lab.store, lab.pair, lab.recording))
    of = {"chains": lab.chains(), "trees": lab.grown(), "shortlists": lab.listed()}
    policies = {kind: spread_over(of[kind], 2 if quick else count) for kind, count in KINDS.items()}
    every = [p for found in policies.values() for p in found]
    trace, limit = lab.trace(), 3 if quick else 6
    part, how = trace.select(range(limit)), {"profile": lab.profile, "artifacts": lab.find}
    first = compare(lab.pair, every, lab.encoded(limit), passes=PASSES, **how)
    profiles = [lab.profile]
    if not quick:
        profiles.append(measured(lab.store, lab.pair, lab.recording))
    tables = [_tuned(state, name, quick) for name in (("gpt2",) if quick else ("demo", "gpt2"))]
    second = compare(lab.pair, every, lab.encoded(limit), passes=PASSES, **how)
    both = seconds_of(first, second)
    means = {p: ((one + other) / 2)[:, None] for p, (one, other) in both.items()}
    expected = [
        {p.id: run_replay(part, p, profile, artifacts=lab.find).seconds for p in every}
        for profile in profiles
    ]
    factors = [common_factor(Timings(means, seconds)) for seconds in expected]
    rows = []
    for kind, found in policies.items():
        rows += executed(expected, factors, kind, found, first, both)
    exact = [r for r in rows if r["kind"] != "shortlists"]  # whose rounds are replayed exactly
    errors, again, before = (
        np.quantile(np.abs([r[name] for r in exact]), (0.5, 0.9)).tolist()
        for name in ("error_after_factor", "repeat_error", "error")
    )
    table, tau = max(t["error"] for t in tables), _agreement(exact)
    is_near = errors[0] <= max(0.03, again[0] / 2) and errors[1] <= max(0.06, again[1] / 2)
    by_kind = {k: [abs(r["error_after_factor"]) for r in rows if r["kind"] == k] for k in policies}
    said = ", ".join(f"{factor:.3f}" for factor in factors)
    return {
        "holds": is_near and table <= 0.05,
        "summary": f"chains and trees, {len(exact)} policies: as predicted {100 * before[0]:.1f}% "
        f"off in the median, 90th percentile {100 * before[1]:.1f}%; after one common factor a "
        f"profile ({said}) {100 * errors[0]:.1f}%, {100 * errors[1]:.1f}% (measuring again, "
        "minutes later: "
        f"{100 * again[0]:.1f}%, {100 * again[1]:.1f}%), Kendall tau {tau['kendall_tau']:.2f} "
        f"({tau['kendall_tau_measured_again']:.2f}), beyond noise "
        f"{tau['kendall_tau_beyond_noise'] or 0:.2f} ({tau['pairs_beyond_noise']} pairs); final "
        "tables of `tune`: "
        + ", ".join(f"{100 * t['median_error']:.1f}%, {_after_factor(t)}" for t in tables),
        "common_factors": factors,
        "by_kind": {kind: float(np.median(own)) for kind, own in by_kind.items()},
        **tau,
        "tau_by_gamma": {draft: _taus(trace, draft) for draft in lab.pair.chain_drafts},
        "texts_differ": first.texts.differ + second.texts.differ,
        "tables": tables,
        "rows": sorted(rows, key=lambda r: -r["measured_tokens_per_s"]),
    }


def seconds_of(first: Comparison, second: Comparison) -> dict[str, tuple[Any, Any]]:
    """By policy the mean seconds of each request in the first measurement, and in the second at the
    pace of the first."""
    one, other = ({p: s.mean(1) for p, s in c.timings.seconds.items()} for c in (first, second))
    pace = float(np.median([other[p].sum() / one[p].sum() for p in one]))
    return {p: (one[p], other[p] / pace) for p in one}


def executed(
    expected: Sequence[Expected],
    factors: Sequence[float],
    kind: str,
    policies: list[Policy],
    compared: Comparison,
    both: dict[str, tuple[Any, Any]],
) -> list[dict[str, Any]]:
    """A row of each policy: what replay says of the executed requests in the mean of the profiles
    (``expected``), as it is and divided by each profile's factor, and what they took, in the mean
    of ``both`` measurements and in each."""
    rows = []
    for policy in policies:
        told = [seconds[policy.id].sum() for seconds in expected]
        total = compared.outcomes[policy.id].total
        tokens, (first, again) = total.emitted_tokens, (s.sum() for s in both[policy.id])
        seconds = {
            "predicted": np.mean(told),
            "predicted_after_factor": np.mean(np.divide(told, factors)),
            "measured": (first + again) / 2,
            "first": first,
            "repeated": again,
        }
        row = {"kind": kind, "id": policy.id, "policy": policy.label()}
        row |= {"tau": total.mean_accepted_length}
        row |= {f"{name}_tokens_per_s": float(tokens / s) for name, s in seconds.items()}
        for name in ("", "_after_factor"):
            row[f"error{name}"] = float(seconds["measured"] / seconds[f"predicted{name}"] - 1)
        rows.append({**row, "repeat_error": float(first / again - 1)})
    return rows


def _taus(trace: ReplayTrace, draft: str) -> list[float]:
    """The mean accepted length of fixed windows 0 to :data:`GAMMA`, over all that was recorded."""
    policies = [chain(draft, g) for g in range(1, GAMMA + 1)]
    return [1.0, *(run_replay(trace, p).total.mean_accepted_length for p in policies)]


def _agreement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Kendall's tau of prediction and execution: over all pairs of policies, and over those whose
    two measurements do not overlap; and of the two measurements."""
    predicted, measured, first, again = (
        [r[f"{name}_tokens_per_s"] for r in rows]
        for name in ("predicted", "measured", "first", "repeated")
    )
    tau, pairs = agreement(predicted, list(zip(first, again, strict=True)))
    return {
        "kendall_tau": float(kendalltau(predicted, measured).statistic),
        "kendall_tau_measured_again": float(kendalltau(first, again).statistic),
        "kendall_tau_beyond_noise": tau,
        "pairs_beyond_noise": pairs,
    }


def _after_factor(table: dict[str, Any]) -> str:
    """How far a table is off after its factor, in words."""
    if table["common_factor"] is None:
        return "which no factor brings nearer"
    error = 100 * table["median_error_after_factor"]
    return f"after its factor ({table['common_factor']:.3f}) {error:.1f}%"


def _tuned(state: Path, name: str, quick: bool) -> dict[str, Any]:
    """The final table of a tuning as a user runs it."""
    pair = demo() if name == "demo" else gpt2(state)
    count, tokens, trials, budget_s = (18, 12, 4, 2.0) if quick else (24, 48, 150, 20.0)
    options, width = DecodeOptions(GREEDY, tokens), 0 if quick else 8
    wanted = TuneOptions(options=options, trials=trials, budget_s=budget_s, tree_width=width)
    workload = requests(count, letters=None if name == "demo" else 200)
    tuned = tune_pair(stored(state / f"tuned-{name}.db", fresh=True), pair, workload, wanted)
    found = tuned.to_json()
    say(f"tune of {name}: {prediction_in_words(tuned.prediction)}")
    speeds = ("predicted", "predicted_after_factor", "measured")
    keys = ("label", *(f"{speed}_tokens_per_s" for speed in speeds))
    rows = [{key: c[key] for key in keys} for c in found["candidates"]]
    prediction = found["prediction"]
    after = prediction["median_error_after_factor"]
    shown = {"error": prediction["median_error"] if after is None else after, **prediction}
    return {"pair": name, **shown, "seconds": found["seconds"], "rows": rows}

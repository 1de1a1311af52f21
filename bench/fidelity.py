"""Predicted speeds are executed speeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from lab import GAMMA, GREEDY, Lab, compare, demo, fixed, gpt2, laboratory, requests, spread_over, stored
from scipy.stats import kendalltau

from spectune.optimizer.execute import Comparison, DecodeOptions
from spectune.optimizer.profiles import at_pace_of, expected_seconds
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.tune import TuneOptions, tune
from spectune.runtime.policies.document import Policy, parse_policy

KINDS = {"chains": 16, "trees": 14, "shortlists": 10}
"""How many policies of each kind are executed."""


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """Predicted against executed tokens/s: 40 policies of every kind in three interleaved passes, and the final tables of `tune`.

    A request counts with its median over the passes. As in `tune`, one factor brings the profile to the pace of the executions.
    """
    lab = laboratory(state, "demo", GREEDY, quick)
    of = {"chains": lab.chains(), "trees": lab.grown(), "shortlists": lab.listed()}
    policies = {kind: spread_over(of[kind], 2 if quick else count) for kind, count in KINDS.items()}
    every = [p for found in policies.values() for p in found]
    trace, limit = lab.trace(), 3 if quick else 6
    expected = expected_seconds(trace, range(limit), every, lab.profile, lab.find)
    how = {"profile": lab.profile, "artifacts": lab.find, "expected": expected}
    compared = compare(lab.pair, every, lab.encoded(limit), passes=2 if quick else 3, **how)
    rows = [
        row for kind, found in policies.items() for row in executed(lab, trace.select(range(limit)), kind, found, compared)
    ]
    errors = np.abs([r["error"] for r in rows])
    tables = [_tuned(state, name, quick) for name in (("gpt2",) if quick else ("demo", "gpt2"))]
    median, p90, table = float(np.median(errors)), float(np.quantile(errors, 0.9)), max(t["median_error"] for t in tables)
    return {
        "holds": median <= 0.03 and p90 <= max(0.06, _repeat_error(rows)) and table <= 0.05,
        "summary": f"median {100 * median:.1f}%, 90th percentile {100 * p90:.1f}% over {len(rows)} policies; tables of tune within "
        f"{100 * table:.1f}% in the median",
        "median_error": median,
        "p90_error": p90,
        "by_kind": {kind: float(np.median([abs(r["error"]) for r in rows if r["kind"] == kind])) for kind in policies},
        **_agreement(rows),
        "repeat_error": _repeat_error(rows),
        "tau_by_gamma": {draft: _taus(trace, draft) for draft in lab.pair.chain_drafts},
        "texts_differ": compared.texts_differ,
        "tables": tables,
        "rows": sorted(rows, key=lambda r: -r["measured_tokens_per_s"]),
    }


def executed(lab: Lab, trace: ReplayTrace, kind: str, policies: list[Policy], compared: Comparison) -> list[dict[str, Any]]:
    """A row of each policy: what replay says of the executed requests, at their pace, and what they took."""
    profile = at_pace_of(lab.profile, compared.timings)
    rows = []
    for policy in policies:
        predicted = run_replay(trace, policy, profile, artifacts=lab.find, approximate=True).total
        measured = compared.outcomes[policy.id].total
        seconds = compared.timings.seconds[policy.id]
        rows.append(
            {
                "kind": kind,
                "id": policy.id,
                "policy": policy.label(),
                "tau": measured.mean_accepted_length,
                "predicted_tokens_per_s": predicted.tokens_per_s,
                "measured_tokens_per_s": measured.tokens_per_s,
                "passes_tokens_per_s": (measured.emitted_tokens / seconds.sum(0)).tolist(),
                "error": predicted.tokens_per_s / measured.tokens_per_s - 1,
            }
        )
    return rows


def _taus(trace: ReplayTrace, draft: str) -> list[float]:
    """The mean accepted length of fixed windows 0 to :data:`GAMMA`, over all that was recorded."""
    policies = [parse_policy({"draft": draft, "window": fixed(g)}) for g in range(1, GAMMA + 1)]
    return [1.0, *(run_replay(trace, p).total.mean_accepted_length for p in policies)]


def _agreement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Kendall's tau of prediction and execution, and of two passes."""
    predicted, measured = ([r[f"{name}_tokens_per_s"] for r in rows] for name in ("predicted", "measured"))
    passes = np.array([r["passes_tokens_per_s"] for r in rows])
    return {
        "kendall_tau": float(kendalltau(predicted, measured).statistic),
        "kendall_tau_measured_again": float(kendalltau(passes[:, 0], passes[:, 1]).statistic),
    }


def _repeat_error(rows: list[dict[str, Any]]) -> float:
    """90th percentile of the difference of two passes, each at its own pace."""
    first, again = np.array([r["passes_tokens_per_s"][:2] for r in rows]).T
    ratio = first / again
    return float(np.quantile(np.abs(ratio / np.median(ratio) - 1), 0.9))


def _tuned(state: Path, name: str, quick: bool) -> dict[str, Any]:
    """The final table of a tuning as a user runs it."""
    pair = demo() if name == "demo" else gpt2(state)
    count, tokens, trials, budget_s = (6, 12, 4, 2.0) if quick else (24, 48, 150, 20.0)
    wanted = TuneOptions(options=DecodeOptions(GREEDY, tokens), trials=trials, budget_s=budget_s, tree_width=0 if quick else 8)
    workload = requests(count, letters=None if name == "demo" else 200)
    tuned = tune(stored(state / f"tuned-{name}.db", fresh=True), pair, workload, wanted)
    table = [c.to_json() for c in tuned.candidates]
    errors = [abs(c["predicted_tokens_per_s"] / c["measured_tokens_per_s"] - 1) for c in table]
    print(f"  tune of {name}: median error {100 * np.median(errors):.1f}%", flush=True)
    shown = [{k: c[k] for k in ("label", "predicted_tokens_per_s", "measured_tokens_per_s")} for c in table]
    return {"pair": name, "median_error": float(np.median(errors)), "seconds": dict(tuned.seconds), "rows": shown}

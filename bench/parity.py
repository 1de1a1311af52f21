"""In float64 replay makes the rounds that execution makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from lab import Lab, laboratories, say, spread_over, tau_of, unlike

from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.runtime.policies.document import Policy


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """Replayed rounds equal executed ones for chains, trees and shortlisted chains; tau where a
    shortlist's replay is approximate.

    Two architectures, greedy and at temperature 1; the policies of the two differ.
    """
    rows: list[dict[str, Any]] = []
    for turn, lab in enumerate(laboratories(state, quick)):
        trace, limit = lab.trace(), 2 if quick else 8 if lab.name == "demo" else 16
        exact, rough = _policies(lab, turn, 1 if quick else 2)
        rows += [compared(lab, trace, policy, limit, exact=True) for policy in exact]
        rows += [compared(lab, trace, policy, limit, exact=False) for policy in rough]
    exact_rows = [r for r in rows if r["exact"]]
    wrong, rounds, missing = (
        sum(r[key] for r in exact_rows) for key in ("mismatches", "rounds", "beyond_recording")
    )
    errors = np.abs([r["tau_error"] for r in rows if not r["exact"]])
    median, worst = (float(f(errors)) if len(errors) else 0.0 for f in (np.median, np.max))
    return {
        "holds": wrong == missing == 0,
        "summary": f"{wrong} mismatches in {rounds} rounds ({len(exact_rows)} policies and pairs: "
        f"chains, trees, shortlisted chains; 2 temperatures, 2 architectures, float64); {missing} "
        "rounds beyond the recording; shortlists with stops, trees or heads, approximate: tau "
        f"within {100 * median:.2f}% in the median, {100 * worst:.1f}% at worst ({len(errors)} "
        "policies)",
        "rows": rows,
    }


def _policies(lab: Lab, turn: int, each: int) -> tuple[list[Policy], list[Policy]]:
    """One in two of every kind and draft, by ``turn``: those that replay claims exactly, and those
    under shortlists that it does not."""
    known = {p.id for p in lab.listed(exact=True)}
    rough = [p for p in lab.listed() if p.id not in known]
    rough = [p for p in rough if p.is_tree or p.stop.kind != "none" or p.draft in lab.pair.heads]
    return claimed(lab, turn, each), spread_over(rough, 2 * each)


def claimed(lab: Lab, turn: int, each: int) -> list[Policy]:
    """One in two of those that replay claims exactly, of every kind and draft, by ``turn``."""
    exact = []
    for kind in (lab.chains(), lab.grown(), lab.listed(exact=True)):
        for draft in lab.pair.draft_names:
            exact += spread_over([p for p in kind if p.draft == draft][turn % 2 :: 2], each)
    return exact


def compared(
    lab: Lab, trace: ReplayTrace, policy: Policy, limit: int, *, exact: bool
) -> dict[str, Any]:
    """A policy replayed and executed: rounds that differ, and the tokens a round of both."""
    how: dict[str, Any] = {"artifacts": lab.find, "approximate": True, "per_round": True}
    replayed = run_replay(trace.select(range(limit)), policy, lab.profile, **how)
    decoded = lab.decode(policy, lab.encoded(limit))
    wrong, rounds = unlike(decoded, replayed.steps())
    executed, predicted = tau_of(decoded), replayed.total.mean_accepted_length
    temperature = lab.options.sampling.temperature
    label = f"{lab.name} T={temperature} {policy.label()}"
    say(f"{label}: {wrong} of {rounds} rounds, {replayed.missing} missing")
    return {
        "pair": lab.name,
        "policy": policy.label(),
        "temperature": temperature,
        "exact": exact,
        "rounds": rounds,
        "mismatches": wrong,
        "beyond_recording": replayed.missing,
        "tau": executed,
        "tau_error": predicted / executed - 1,
    }

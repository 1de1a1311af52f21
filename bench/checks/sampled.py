"""Trees above temperature 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pairs import fixed, top_k

from bench.lab import CATEGORIES, compare, demo, requests
from spectune.optimizer.execute import DecodeOptions, encode
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.traces.schema import Sampling

TREE, CHAIN, REJECTION = "coupled tree", "coupled chain", "rejection chain"


def check(quick: bool) -> dict[str, Any]:
    """Temperatures 0.7 and 1, executed: coupled trees against coupled chains and classical
    rejection."""
    pair = demo()
    kinds = {TREE: top_k("", 8, 6, 32), CHAIN: {"window": fixed(4)}}
    rows = []
    for temperature in (1.0,) if quick else (0.7, 1.0):
        for category in CATEGORIES:
            workload = requests(2 if quick else 8, category=category)
            options = DecodeOptions(Sampling(temperature, seed=11), 12 if quick else 48)
            encoded = encode(pair, workload, options)
            for draft in ("medium", *pair.heads):
                policies = {name: parse_policy({**d, "draft": draft}) for name, d in kinds.items()}
                compared = compare(pair, [AUTOREGRESSIVE, *policies.values()], encoded)
                base = compared.outcomes[AUTOREGRESSIVE.id].total
                found = {name: compared.outcomes[p.id].total for name, p in policies.items()}
                if draft in pair.chain_drafts:
                    again = encode(pair, workload, replace(options, verifier="rejection"))
                    chain = policies[CHAIN]
                    other = compare(pair, [AUTOREGRESSIVE, chain], again).outcomes
                    own_speed = other[AUTOREGRESSIVE.id].total.tokens_per_s
                    total = other[chain.id].total
                    seconds = total.seconds * base.tokens_per_s / own_speed
                    found[REJECTION] = replace(total, seconds=seconds)
                for name, total in found.items():
                    key = {"temperature": temperature, "workload": category, "draft": draft}
                    calls = 100 * total.rounds / total.emitted_tokens
                    row = {**key, "method": name, "tau": total.mean_accepted_length}
                    row |= {"calls_per_100_tokens": calls}
                    rows.append({**row, "speedup": total.tokens_per_s / base.tokens_per_s})
    return {**against_chains(rows), "rows": rows}


def against_chains(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether coupled trees accept more than every chain at temperature 1, and what that says."""
    tau = {(r["temperature"], r["workload"], r["draft"], r["method"]): r["tau"] for r in rows}
    gains = [
        tau[*key, TREE] / value
        for (*key, method), value in tau.items()
        if method != TREE and key[0] == 1.0
    ]
    return {
        "holds": min(gains) > 1.0,
        "summary": f"at temperature 1 coupled trees reach {min(gains):.2f} to {max(gains):.2f} "
        f"times the tau of coupled and rejection chains ({len(gains)} comparisons)",
    }

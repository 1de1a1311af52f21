"""Trees above temperature 0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab import CATEGORIES, compare, demo, fixed, requests, top_k

from spectune.optimizer.execute import DecodeOptions, encode
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.traces.schema import Sampling

COUPLED, BY_Q = "coupled tree", "EAGLE-2 tree by q"


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """Temperatures 0.7 and 1, executed: coupled trees against EAGLE's top-k trees by q, coupled
    chains and classical rejection."""
    pair = demo()
    tree = top_k("", 8, 6, 32)
    kinds = {
        COUPLED: tree,
        BY_Q: {**tree, "growth": {**tree["growth"], "proposals": "probability"}},
        "coupled chain": {"window": fixed(4)},
    }
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
                    chain = policies["coupled chain"]
                    other = compare(pair, [AUTOREGRESSIVE, chain], again).outcomes
                    own_speed = other[AUTOREGRESSIVE.id].total.tokens_per_s
                    total = other[chain.id].total
                    seconds = total.seconds * base.tokens_per_s / own_speed
                    found["rejection chain"] = replace(total, seconds=seconds)
                for name, total in found.items():
                    key = {"temperature": temperature, "workload": category, "draft": draft}
                    calls = 100 * total.rounds / total.emitted_tokens
                    row = {**key, "method": name, "tau": total.mean_accepted_length}
                    row |= {"calls_per_100_tokens": calls}
                    rows.append({**row, "speedup": total.tokens_per_s / base.tokens_per_s})
    tau = {(r["temperature"], r["workload"], r["draft"], r["method"]): r["tau"] for r in rows}
    gains = [
        value / tau[*key, BY_Q]
        for (*key, method), value in tau.items()
        if method == COUPLED and key[0] == 1.0
    ]
    return {
        "holds": min(gains) >= 1.4,
        "summary": f"at temperature 1 coupled trees reach {min(gains):.2f} to {max(gains):.2f} "
        "times the tau of EAGLE's trees by q "
        f"({len(gains)} draft-workload combinations; target 1.4)",
        "rows": rows,
    }

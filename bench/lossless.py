"""In float64 texts do not depend on the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lab import GREEDY, SAMPLED, Lab, gap_of, laboratory, requests, say, spread_over, tau_of

from spectune.optimizer.execute import DecodeOptions, Encoded, encode
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.traces.schema import Sampling

TOKENS = 12
SAMPLINGS = (GREEDY, Sampling(0.7, top_p=0.95, seed=1), Sampling(1.0, seed=2))


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """Texts under chains, trees and shortlists of every kind are autoregression's, and its are
    those of transformers' `generate`.

    Two architectures, temperatures 0, 0.7 (top-p 0.95) and 1. A temperature has a third of the
    policies; the thirds of two drafts differ.
    """
    rows: list[dict[str, Any]] = []
    outside = 0
    for name, prompts in (("demo", 2 if quick else 16), ("gpt2", 2 if quick else 24)):
        for n, sampling in enumerate(SAMPLINGS):
            drawn = GREEDY if sampling.greedy else SAMPLED
            lab = laboratory(state, name, drawn, quick, "float64")
            workload = requests(prompts, skip=60, letters=None if name == "demo" else 200)
            encoded = encode(lab.pair, workload, DecodeOptions(sampling, TOKENS))
            if sampling.greedy:
                outside += unlike_generate(lab, encoded)
            rows += texts_differ(lab, encoded, n, 1 if quick else 2)
    differences, texts = (sum(r[key] for r in rows) for key in ("differ", "prompts"))
    kinds = len({r["policy"] for r in rows})
    return {
        "holds": differences == outside == 0,
        "summary": f"{differences} differences in {texts} texts ({kinds} policies: chains, trees, "
        f"shortlists; 3 temperatures, 2 architectures, float64); {outside} against transformers' "
        "generate",
        "rows": rows,
        "differs_from_generate": outside,
    }


def texts_differ(lab: Lab, encoded: Encoded, turn: int, each: int) -> list[dict[str, Any]]:
    """Rows of figures for up to ``each`` policies of every kind and draft: one in three of them, by
    ``turn``."""

    def texts(policy: Policy) -> tuple[list[list[int]], float]:
        decoded = lab.decode(policy, encoded)
        return [d.trajectory.output_ids.tolist() for d in decoded], tau_of(decoded)

    (plain, _), temperature = texts(AUTOREGRESSIVE), encoded.options.sampling.temperature
    rows = []
    for kind in (lab.chains(), lab.grown(), lab.listed()):
        for n, draft in enumerate(lab.pair.draft_names):
            own = [p for p in kind if p.draft == draft]
            for policy in spread_over(own[(turn + n) % 3 :: 3], each):
                found, tau = texts(policy)
                each_of = zip(encoded.items, found, plain, strict=True)
                gaps = [gap_of(lab.pair, item[1], a, b) for item, a, b in each_of if a != b]
                row = {"pair": lab.name, "policy": policy.label(), "temperature": temperature}
                row |= {"prompts": len(plain), "tau": tau, "differ": len(gaps)}
                rows.append({**row, "gap": max((g or 0.0 for g in gaps), default=0.0)})
                label = f"{lab.name} T={temperature} {policy.label()}"
                say(f"{label}: {len(gaps)} of {len(plain)} differ")
    return rows


def unlike_generate(lab: Lab, encoded: Encoded) -> int:
    """Greedy texts that transformers' own ``generate`` continues otherwise."""
    target = lab.pair.target
    model = type(target.model).from_pretrained(lab.pair.spec.target, dtype=target.dtype)
    differ = 0
    for (_, request), ours in zip(encoded.items, lab.decode(AUTOREGRESSIVE, encoded), strict=True):
        ids = torch.tensor([request.prompt_ids])
        how = {"do_sample": False, "max_new_tokens": TOKENS, "pad_token_id": 0}
        how |= {"eos_token_id": sorted(lab.pair.eos_ids) or None}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        differ += out[0, ids.shape[1] :].tolist() != ours.trajectory.output_ids.tolist()
    return differ

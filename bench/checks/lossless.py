"""In float64 texts do not depend on the policy, and replayed rounds are the executed ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.harness import say, state_folder
from bench.lab import SAMPLINGS, Lab, laboratory, spread_over, tau_of, unlike
from spectune.optimizer.execute import Encoded
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.traces.tables import Trajectory

TEXTS = 16
"""Of a policy."""


def check(quick: bool) -> dict[str, Any]:
    """Texts under chains, trees and heads, shortlisted or not, are autoregression's, and its are
    those of transformers' `generate`; replayed rounds are the executed ones.

    Two architectures, temperatures 0, 0.7 (top-p 0.95) and 1, each with a third of the policies;
    the thirds of two drafts differ.
    """
    state = state_folder(quick)
    rows: list[dict[str, Any]] = []
    generated = unlike_generate = 0
    for name in ("demo", "gpt2"):
        for turn, sampling in enumerate(SAMPLINGS):
            lab = laboratory(state, name, sampling, quick, "float64")
            limit, trace = 2 if quick else TEXTS, lab.trace()
            if sampling.greedy:
                encoded = lab.encoded(limit)
                generated += limit
                unlike_generate += differ_from_generate(lab, encoded)
            for policy in chosen(lab, turn, 1 if quick else 2):
                rows.append(compared(lab, trace, policy, limit))
    texts, differ = (sum(r[key] for r in rows) for key in ("texts", "texts_differ"))
    rounds, wrong, missing = (
        sum(r[key] for r in rows) for key in ("rounds", "rounds_differ", "beyond_recording")
    )
    return {
        "holds": differ == unlike_generate == wrong == missing == 0,
        "summary": f"{differ} of {texts} texts and {wrong} of {rounds} rounds differ ({len(rows)} "
        f"policies and pairs: chains, trees, heads, shortlists; temperatures 0, 0.7, 1; {missing} "
        f"rounds beyond the recording); {unlike_generate} of {generated} greedy texts differ from "
        "transformers' generate",
        "rows": rows,
        "differs_from_generate": unlike_generate,
    }


def chosen(lab: Lab, turn: int, each: int) -> Iterator[Policy]:
    """Up to ``each`` policies of every kind and draft, of one in three by ``turn``."""
    for policies in (lab.chains(), lab.grown(), lab.listed()):
        for n, draft in enumerate(lab.pair.draft_names):
            of_draft = [p for p in policies if p.draft == draft]
            yield from spread_over(of_draft[(turn + n) % 3 :: 3], each)


def compared(lab: Lab, trace: ReplayTrace, policy: Policy, limit: int) -> dict[str, Any]:
    """A policy replayed and executed on the first ``limit`` recorded requests: texts and rounds
    that differ, and the tokens a round of both."""
    how: dict[str, Any] = {"artifacts": lab.find, "per_round": True}
    replayed = run_replay(trace.select(range(limit)), policy, lab.profile, **how)
    decoded = lab.decode(policy, lab.encoded(limit))
    recorded = trace.trajectories[:limit]
    differ = sum(unlike_text(d.trajectory, t) for d, t in zip(decoded, recorded, strict=True))
    wrong, rounds = unlike(decoded, replayed.steps())
    executed, predicted = tau_of(decoded), replayed.total.mean_accepted_length
    temperature = lab.options.sampling.temperature
    label = f"{lab.name} T={temperature} {policy.label()}"
    say(f"{label}: {differ} of {limit} texts, {wrong} of {rounds} rounds differ")
    return {
        "pair": lab.name,
        "policy": policy.label(),
        "temperature": temperature,
        "texts": limit,
        "texts_differ": differ,
        "rounds": rounds,
        "rounds_differ": wrong,
        "beyond_recording": replayed.missing,
        "tau": executed,
        "tau_error": predicted / executed - 1,
    }


def unlike_text(one: Trajectory, other: Trajectory) -> bool:
    """Whether two trajectories are of different tokens."""
    return one.output_ids.tolist() != other.output_ids.tolist()


def differ_from_generate(lab: Lab, encoded: Encoded) -> int:
    """Greedy texts that transformers' own ``generate`` continues otherwise."""
    target = lab.pair.target
    model = type(target.model).from_pretrained(lab.pair.spec.target, dtype=target.dtype)
    differ = 0
    for (_, request), ours in zip(encoded.items, lab.decode(AUTOREGRESSIVE, encoded), strict=True):
        ids = torch.tensor([request.prompt_ids])
        how = {"do_sample": False, "max_new_tokens": request.max_new_tokens, "pad_token_id": 0}
        how |= {"eos_token_id": sorted(lab.pair.eos_ids) or None}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        differ += out[0, ids.shape[1] :].tolist() != ours.trajectory.output_ids.tolist()
    return differ

"""How many texts rounding changes, in float32 and bfloat16."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from operator import ne
from typing import Any

from synthetic import flat_profile

from bench.harness import say, state_folder
from bench.lab import SAMPLINGS, chains, demo, gpt2, requests, spread_over, trees
from spectune.optimizer.execute import DecodeOptions, Encoded, encode, run
from spectune.optimizer.spaces import DraftLimits
from spectune.runtime.decoder import prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.schema import Sampling, Workload

DTYPES = ("float32", "bfloat16")
TOKENS = {"demo": 12, "gpt2": 24}
TEXTS = {"demo": 16, "gpt2": 28}
"""Of a policy and temperature, by pair."""


def check(quick: bool) -> dict[str, Any]:
    """Texts under chains, trees and heads that differ from autoregression's in float32 and
    bfloat16, counted.

    They may: a pass of another number of tokens sums in another order. Autoregression executed once
    more may not, which is what the check holds.
    """
    state = state_folder(quick)
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for name, count in TEXTS.items():
            pair = demo(dtype=dtype) if name == "demo" else gpt2(state, dtype)
            texts = 2 if quick else count
            workload = requests(texts, skip=60, letters=None if name == "demo" else 200)
            policies = plain_policies(pair, 1 if quick else 3)
            tokens = 6 if quick else TOKENS[name]
            for row in texts_that_differ(pair, policies, workload, tokens):
                rows.append({"pair": name, "dtype": dtype, **row})
                say(rows[-1])
    said = []
    for dtype in DTYPES:
        own = [r for r in rows if r["dtype"] == dtype]
        differ, texts, again = (sum(r[key] for r in own) for key in ("differ", "texts", "again"))
        said.append(f"{dtype}: {differ} of {texts} (autoregression executed again: {again})")
    return {
        "holds": not any(r["again"] for r in rows),
        "summary": f"texts that differ in {'; '.join(said)}",
        "rows": rows,
    }


def plain_policies(pair: LoadedPair, each: int) -> list[Policy]:
    """Up to ``each`` chains and as many trees of every draft, of those that need nothing fitted."""
    found = []
    for draft in pair.draft_names:
        kinds = (
            [chains(draft)] if draft == "ngram" else [chains(draft), trees(draft, DraftLimits())]
        )
        found += [parse_policy(d) for kind in kinds for d in spread_over(kind, each)]
    return found


def texts_that_differ(
    pair: LoadedPair,
    policies: Sequence[Policy],
    workload: Workload,
    tokens: int,
    *,
    samplings: Sequence[Sampling] = SAMPLINGS,
    seconds: float = float("inf"),
) -> Iterator[dict[str, Any]]:
    """A row of counts of each policy and sampling, until so many seconds have passed."""
    costs = flat_profile(pair.id, pair.drafts)  # what a window weighs changes no text
    plain: dict[Sampling, list[list[int]]] = {}
    until = time.monotonic() + seconds
    for policy in policies:
        for sampling in samplings:
            encoded = encode(pair, workload, DecodeOptions(sampling, tokens))

            def texts(policy: Policy, encoded: Encoded = encoded) -> list[list[int]]:
                source = StaticSource(prepare_for(pair, policy, profile=costs))
                return [d.trajectory.output_ids.tolist() for d in run(pair, source, encoded)]

            again = 0
            if sampling not in plain:
                plain[sampling] = texts(AUTOREGRESSIVE)
                again = sum(map(ne, texts(AUTOREGRESSIVE), plain[sampling]))
            yield {
                "policy": policy.label(),
                "temperature": sampling.temperature,
                "texts": len(encoded.items),
                "differ": sum(map(ne, texts(policy), plain[sampling])),
                "again": again,
            }
            if time.monotonic() > until:
                return

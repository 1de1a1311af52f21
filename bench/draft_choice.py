"""A policy for each prompt."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from lab import CATEGORIES, compare, demo, requests, say, stored

from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions, Encoded, encode, run
from spectune.optimizer.fit.by_prompt import fit_chooser
from spectune.optimizer.parts import split
from spectune.optimizer.profiles import profile_for
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.timings import Timings, finite
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.schema import Request, Sampling, Workload
from spectune.traces.store import TraceStore

DRAFTS, GAMMA = ("small", "medium"), 12
SHARE, WORSE = 0.97, 0.99
"""Share of the oracle's gain that is asked for; speed over the best single draft below which
choosing does harm."""
CANDIDATES: dict[str, Policy] = {
    "none": AUTOREGRESSIVE,
    **{
        d: parse_policy({"draft": d, "window": {"kind": "analytic", "gamma_max": GAMMA}})
        for d in ("ngram", *DRAFTS)
    },
}
Seconds = npt.NDArray[np.float64]


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """A choice by prompt executed beside single drafts and a per-prompt oracle: four workloads,
    half of each held out."""
    pair = demo(DRAFTS)
    store = stored(state / "choice.db", fresh=quick)
    count, tokens, passes = (20, 8, 1) if quick else (40, 40, 2)
    rows = []
    for name, encoded in list(workloads(pair, count, tokens).items())[: 1 if quick else 4]:
        rows.append({"workload": name, **_measured(store, pair, encoded, passes)})
        gain = 100 * rows[-1]["oracle_gain"]
        say(f"{name}: oracle {gain:+.1f}%, shares {rows[-1]['share']}")
    differ = sum(r["texts_differ"] for r in rows)
    harmed = sum((r["interval"]["guarded"][1] or 9.0) < WORSE for r in rows)
    reached = sum((r["share"]["guarded"] or 0.0) >= SHARE for r in rows)
    shown = ", ".join(f"{r['workload']} {r['share']['guarded']}" for r in rows)
    return {
        "holds": differ == 0 and harmed == 0,
        "summary": f"share of the per-prompt oracle's gain: {shown} ({reached} of {len(rows)} at "
        f"{SHARE}); {harmed} of {len(rows)} workloads slower than the best single draft by more "
        f"than 1%; {differ} texts differ",
        "reaches_share": reached == len(rows),
        "rows": rows,
    }


def workloads(pair: LoadedPair, count: int, tokens: int) -> dict[str, Encoded]:
    """The demo workload's categories at temperature 0, and a mixed one: half of it demo prompts at
    temperature 1, half lines of them that repeat, at temperature 0, where prompt lookup is right.
    """
    plain = DecodeOptions(Sampling(), tokens)
    made = {c: encode(pair, requests(count, category=c), plain) for c in CATEGORIES}
    half = requests(count // 2)
    sampled = encode(pair, half, DecodeOptions(Sampling(1.0, seed=1), tokens))
    repeated = Workload("repeated", tuple(_repeated(r) for r in half.requests))
    greedy = encode(pair, repeated, plain)
    mixed = itertools.chain.from_iterable(zip(sampled.items, greedy.items, strict=True))
    made["mixed"] = Encoded(tuple(mixed), sampled.options)
    return made


def _repeated(request: Request) -> Request:
    """The last line of a prompt, four times, and its beginning."""
    line = request.prompt.strip().splitlines()[-1][:80]
    text = f"{line}\n" * 4 + line[: len(line) // 3]
    return Request(f"{request.id}-repeated", "repeated", text)


def traced(pair: LoadedPair, encoded: Encoded) -> ReplayTrace:
    """The texts of a workload with every draft's chains."""
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    texts = [done.trajectory for done in run(pair, plain, encoded)]
    names = pair.draft_names
    chains = {d: [record_panorama(pair, t, d, GAMMA) for t in texts] for d in names}
    return ReplayTrace(texts, chains)


def _measured(store: TraceStore, pair: LoadedPair, encoded: Encoded, passes: int) -> dict[str, Any]:
    trace = traced(pair, encoded)
    texts = trace.trajectories
    profile = profile_for(
        store, pair, tuple(pair.draft_names), gamma_max=GAMMA, trees=False, trajectories=texts
    )
    parts = split([t.category for t in texts])
    about = {"recording": None, "requests": [t.request_id for t in texts]}
    made = fit_chooser(store, pair, trace, parts, list(CANDIDATES.values()), profile, about)
    first, *others = made.document["policies"]
    choice = parse_policy({**first, "by_prompt": {"artifact": made.artifact, "others": others}})
    policies = {**CANDIDATES, "by_prompt": choice, "guarded": parse_policy(made.policy)}
    held_out = sorted([*parts.race, *parts.confirm])
    test = replace(encoded, items=tuple(encoded.items[i] for i in held_out))
    run_by = {"profile": profile, "artifacts": fitted(store, pair.id)}
    distinct = {policy.id: policy for policy in policies.values()}
    compared = compare(pair, list(distinct.values()), test, passes=passes, **run_by)
    return {
        "requests": len(texts),
        "held_out": len(held_out),
        "texts_differ": compared.texts.differ,
        **figures({name: compared.timings.seconds[p.id] for name, p in policies.items()}),
        "cause": {name: made.document[name] for name in ("reason", "chooses")},
        "replayed": made.document["held_out"],
    }


def figures(seconds: Mapping[str, Seconds]) -> dict[str, Any]:
    """Shares and ratios from measured seconds [requests, passes] by policy, the candidates among
    them.

    A request counts with its median. The oracle takes each request's fastest draft by it, which
    noise flatters. ``share``: of the oracle's gain; ``ratio``: speed over the best single draft,
    with its 95% interval.
    """
    typical = {name: np.median(found, axis=1) for name, found in seconds.items()}
    single = min(CANDIDATES, key=lambda d: typical[d].sum())
    total = {name: float(found.sum()) for name, found in typical.items()}
    best, oracle = total[single], float(np.min([typical[d] for d in CANDIDATES], axis=0).sum())
    timings = Timings(seconds)
    against = {name: timings.ratio(name, single) for name in seconds if name not in CANDIDATES}
    gain = best - oracle
    share = {n: round((best - total[n]) / gain, 3) if gain > 0 else None for n in against}
    return {
        "single": single,
        "seconds": total,
        "oracle_gain": best / oracle - 1.0,
        "share": share,
        "ratio": {name: round(found[0], 4) for name, found in against.items()},
        "interval": {name: finite(found[1:]) for name, found in against.items()},
    }

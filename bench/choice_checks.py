"""The check of the draft chooser behind ``bench/acceptance.py``: what choosing a draft for each prompt gains, executed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from checks import CATEGORIES, GAMMA_MAX, demo, stored
from interleaved import compare
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions, Encoded, Timings, encode, run
from spectune.optimizer.fit.chooser_fits import ChooserSource, fit_source, keep_chooser
from spectune.optimizer.fit.on_the_fly import read_prompts
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.profiles import profile_for
from spectune.optimizer.record import split
from spectune.optimizer.simulate.replay import ReplayTrace, run_replay
from spectune.optimizer.verdict import finite
from spectune.runtime.decoder import Decoded
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.document import AUTOREGRESSIVE, ChooserPolicy, Policy, parse_policy
from spectune.runtime.policies.draft_choice import Chooser
from spectune.runtime.policies.plan import prepare
from spectune.runtime.recording.chains import record_panorama
from spectune.traces.schema import LatencyProfile, Request, Sampling, Workload
from spectune.traces.store import TraceStore

REQUESTS, TOKENS = 40, 48
"""Requests of each workload, 60% of them fitted to, and their output tokens."""
PASSES = 4
"""Executions of every policy on every request held out."""
SHARE, WORSE = 0.97, 0.99
"""Share of the oracle's gain that is asked for; speed over the best single draft below which choosing does harm."""
WINDOW = {"kind": "analytic", "gamma_max": 12}
CANDIDATES: dict[str, Policy] = {
    "none": AUTOREGRESSIVE,
    **{d: parse_policy({"draft": d, "window": WINDOW}) for d in ("ngram", "small", "medium")},
}
Seconds = npt.NDArray[np.float64]


def workloads(pair: LoadedPair, requests: int, tokens: int) -> dict[str, Encoded]:
    """The demo workload's categories at temperature 0, and a mixed one: half of it demo prompts at temperature 1, half lines of them that
    repeat, at temperature 0, where prompt lookup is right."""
    made = {}
    for category in CATEGORIES:
        workload = load_workload(["demo"], categories=[category], limit=requests)
        made[category] = encode(pair, workload, DecodeOptions(Sampling(), tokens))
    half = load_workload(["demo"], limit=requests // 2)
    hot = encode(pair, half, DecodeOptions(Sampling(1.0, seed=1), tokens))
    cold = encode(pair, Workload("repeated", tuple(_repeated(r) for r in half.requests)), DecodeOptions(Sampling(), tokens))
    made["mixed"] = Encoded(tuple(itertools.chain.from_iterable(zip(hot.items, cold.items, strict=True))), hot.options)
    return made


def _repeated(request: Request) -> Request:
    """The last line of a prompt, four times, and its beginning."""
    line = request.turns[0].strip().splitlines()[-1][:80]
    return Request(f"{request.id}-repeated", "repeated", (f"{line}\n" * 4 + line[: len(line) // 3],))


def traced(pair: LoadedPair, encoded: Encoded) -> ReplayTrace:
    """The texts of a workload with every draft's chains."""
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    texts = [done.trajectory for done in run(pair, plain, encoded)]
    return ReplayTrace(texts, {d: [record_panorama(pair, t, d, GAMMA_MAX) for t in texts] for d in pair.draft_names})


def draft_choice(state: Path) -> dict[str, Any]:
    """A chooser of drafts executed beside single drafts and a per-prompt oracle: four workloads, 40 requests each."""
    return measured(state, REQUESTS, TOKENS, PASSES)


def measured(state: Path, requests: int, tokens: int, passes: int) -> dict[str, Any]:
    """:func:`draft_choice` of any size."""
    pair = demo()
    store = stored(state / "choice.db")
    profile = profile_for(store, pair, pair.draft_names, gamma_max=GAMMA_MAX, trees=False).profile
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
    rows = []
    for name, encoded in workloads(pair, requests, tokens).items():
        rows.append({"workload": name, **_workload(store, pair, encoded, profile, passes)})
        r = rows[-1]
        print(f"  {name}: oracle {100 * r['oracle_gain']:+.1f}%, shares {r['share']}, guarded {r['ratio']['guarded']}", flush=True)
    differ = sum(r["texts_differ"] for r in rows)
    harmed = [r["workload"] for r in rows if r["interval"]["guarded"][1] is not None and r["interval"]["guarded"][1] < WORSE]
    shares = [r["share"]["guarded"] for r in rows]
    reached = sum(s is not None and s >= SHARE for s in shares)
    shown = ", ".join(f"{r['workload']} {'-' if s is None else f'{s:.2f}'}" for r, s in zip(rows, shares, strict=True))
    return {
        "holds": differ == 0 and not harmed,
        "summary": f"share of the per-prompt oracle's gain: {shown} ({reached} of {len(rows)} at {SHARE}); "
        f"{len(harmed)} of {len(rows)} workloads slower than the best single draft by more than 1%; {differ} texts differ",
        "share_wanted": SHARE,
        "reaches_share": reached == len(rows),
        "rows": rows,
    }


def _workload(store: TraceStore, pair: LoadedPair, encoded: Encoded, profile: LatencyProfile, passes: int) -> dict[str, Any]:
    trace = traced(pair, encoded)
    texts = trace.trajectories
    source = ChooserSource(trace, read_prompts(pair, texts), {"recording": None, "requests": [t.request_id for t in texts]})
    guarded = fit_source(store, pair, source, CANDIDATES, profile)
    rules = {
        "throughput": replace(guarded, chooses=True, reason=""),
        "theorem_3": replace(guarded, chooses=True, reason="", rule="theorem_3"),
        "guarded": guarded,
    }
    kept = {name: ChooserPolicy.of(keep_chooser(store, pair, source, c, profile).artifact) for name, c in rules.items()}
    policies = {**CANDIDATES, **kept}
    _, held_out = split([t.request_id for t in texts], [t.category for t in texts])
    test = replace(encoded, items=tuple(encoded.items[i] for i in held_out))
    find = fitted(store, pair.id)
    executed: dict[tuple[str, str], list[Decoded]] = {}

    def keep(policy: Policy, decoded: Decoded) -> None:
        executed.setdefault((policy.id, decoded.trajectory.request_id), []).append(decoded)

    differ = 0
    for turn in range(passes):
        differ += compare(pair, list(policies.values()), test, profile=profile, artifacts=find, each=keep, seed=turn).texts_differ
    done = {name: [executed[policy.id, item.id] for item, _ in test.items] for name, policy in policies.items()}
    timed = {name: np.array([[d.seconds for d in of] for of in found]) for name, found in done.items()}
    typical = {name: np.array([np.median([d.seconds for d in of]) for of in found]) for name, found in done.items()}
    predicted = {n: run_replay(trace.select(held_out), p, profile, artifacts=find).seconds.sum() for n, p in policies.items()}
    return {
        "requests": len(texts),
        "held_out": len(held_out),
        "texts_differ": differ,
        **figures(timed, typical),
        "replayed": {n: float(s / predicted[guarded.single]) for n, s in predicted.items()},
        "cause": _cause(guarded),
    }


def figures(timed: Mapping[str, Seconds], each: Mapping[str, Seconds]) -> dict[str, Any]:
    """Shares and ratios from measured seconds [requests, passes] by policy, the candidates among them, and from what a request typically
    takes, [requests]: its rounds' medians over the passes.

    ``oracle`` takes each request's fastest draft by the latter, which noise flatters; ``oracle_apart`` takes it by one pass
    and counts another, which does not. ``share``: of the oracle's gain; ``ratio``: speed over the best single draft, with its 95% interval.
    """
    single = min(CANDIDATES, key=lambda d: each[d].sum())
    best = float(each[single].sum())
    oracle = float(np.min([each[d] for d in CANDIDATES], axis=0).sum())
    timings = Timings({name: found[:, None] for name, found in each.items()})
    against = {name: timings.ratio(name, single) for name in timed if name not in CANDIDATES}
    apart = _apart(np.stack([timed[d] for d in CANDIDATES], axis=2), list(CANDIDATES).index(single))

    def share(name: str) -> float | None:
        return round((best - float(each[name].sum())) / (best - oracle), 3) if best > oracle else None

    return {
        "single": single,
        "seconds": {name: float(s.sum()) for name, s in each.items()},
        "oracle_gain": best / oracle - 1.0,
        "oracle_apart_gain": apart,
        "share": {name: share(name) for name in against},
        "ratio": {name: round(found[0], 4) for name, found in against.items()},
        "interval": {name: finite(found[1:]) for name, found in against.items()},
    }


def _apart(seconds: Seconds, single: int) -> float | None:
    """The gain of an oracle that is not judged by the pass it chose on, from seconds [requests, passes, drafts]; None of one pass."""
    passes = seconds.shape[1]
    if passes < 2:
        return None
    rows = np.arange(len(seconds))
    spent = sum(float(seconds[rows, (k + 1) % passes, seconds[:, k].argmin(1)].sum()) for k in range(passes))
    return float(seconds[:, :, single].sum()) / spent - 1.0


def _cause(chooser: Chooser) -> dict[str, Any]:
    """Why the share is what it is: what the prompts tell of accuracies, and what knowing these exactly would save."""
    metrics = chooser.metrics
    held = metrics.get("held_out", metrics["fit"])
    return {
        "reason": chooser.reason,
        "chooses": chooser.chooses,
        "single": chooser.single,
        "r2": held["r2"],
        "persistence": metrics["persistence"],
        "share_replayed": held["share"],
        "replayed_oracle_gain": held["gain"]["oracle"],
        "sizes": {"requests": held["requests"], "tokens": held["tokens"]},
    }


CHECKS = {"draft-choice": draft_choice}

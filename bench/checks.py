"""The checks behind ``bench/acceptance.py``: each returns its figures, a one-line ``summary`` and whether it ``holds``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import compare
from pairs import make_pair
from scipy.stats import kendalltau
from spectune.db.database import open_database
from spectune.optimizer.execute import Comparison, DecodeOptions, Encoded, encode, race, run
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.profiles import expected_seconds, profile_for, served_contexts
from spectune.optimizer.record import RecordRequest, record, whole_texts
from spectune.optimizer.simulate.replay import ReplayTrace, run_replay
from spectune.optimizer.tune import TuneOptions, tune
from spectune.optimizer.verdict import finite
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.profiling import measure_profile
from spectune.traces.schema import LatencyProfile, Sampling, Step, Workload
from spectune.traces.store import TraceStore

ROOT = Path(__file__).resolve().parent.parent
GAMMA_MAX = 16
CATEGORIES = ("code", "prose", "math")
Check = Callable[[Path], dict[str, Any]]
CLOCK = time.perf_counter
"""The seconds that ``regret`` counts."""


def kinds(first: str, second: str) -> list[Policy]:
    """Thirty-two policies: every window, stop and draft kind, small and large parameters."""
    documents: list[dict[str, Any]] = []
    for draft in (first, second):
        documents += [{"draft": draft, "window": {"kind": "fixed", "gamma": g}} for g in (1, 2, 4, 8)]
        documents += [
            {"draft": draft, "window": {"kind": "analytic", "gamma_max": 8}},
            {"draft": draft, "window": {"kind": "analytic", "gamma_max": 12, "history": 16, "estimator": "table"}},
            {"draft": draft, "window": {"kind": "fsm", "gamma_max": 6}},
            {"draft": draft, "window": {"kind": "cache_fsm", "gamma_max": 6}},
            {"draft": draft, "window": {"kind": "q_learning", "gamma_max": 6, "seed": 1}},
            {"draft": draft, "window": {"kind": "heuristic", "gamma_max": 12}},
            {"draft": draft, "window": {"kind": "fixed", "gamma": 12}, "stop": {"kind": "max_prob", "threshold": 0.4}},
            {"draft": draft, "window": {"kind": "fixed", "gamma": 12}, "stop": {"kind": "joint_prob", "threshold": 0.2}},
            {"draft": draft, "window": {"kind": "fixed", "gamma": 12}, "stop": {"kind": "entropy", "threshold": 0.4}},
            {
                "draft": draft,
                "window": {"kind": "analytic", "gamma_max": 10, "estimator": "exact"},
                "stop": {"kind": "max_prob", "threshold": 0.2, "keep_last": False},
            },
        ]
    documents += [
        {"draft": "ngram", "window": {"kind": "fixed", "gamma": 4}},
        {"draft": "ngram", "window": {"kind": "fsm", "gamma_max": 8}},
        {"draft": "ngram", "window": {"kind": "cache_fsm", "gamma_max": 8}},
    ]
    return [AUTOREGRESSIVE, *(parse_policy(d) for d in documents)]


def demo() -> LoadedPair:
    """The pair that ships, in float32 on the CPU, with its language-model drafts: these checks are of chains."""
    return load_pair(read_pair("demo"), device="cpu", drafts=("small", "medium"))


def texts(pair: LoadedPair, policy: Policy, encoded: Encoded, profile: LatencyProfile) -> list[list[int]]:
    source = StaticSource(prepare(policy, pair.draft_names, profile=profile))
    return [d.trajectory.output_ids.tolist() for d in run(pair, source, encoded)]


def stored(path: Path) -> TraceStore:
    return TraceStore(open_database(str(path)))


def _profile(state: Path, pair: LoadedPair) -> LatencyProfile:
    return profile_for(stored(state / "profiles.db"), pair, pair.draft_names, gamma_max=GAMMA_MAX).profile


def lossless(state: Path) -> dict[str, Any]:
    """Text under 14 policies equals autoregression's: 210 prompts, temperatures 0, 0.7 and 1; and transformers' own."""
    import torch

    pair = demo()
    profile = _profile(state, pair)
    chosen = [p for i, p in enumerate(kinds("small", "medium")) if i in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 19, 30)]
    workload = load_workload(["demo"], limit=210)
    rows = []
    differences = 0
    for sampling in (Sampling(), Sampling(0.7, top_p=0.95, seed=1), Sampling(1.0, seed=2)):
        encoded = encode(pair, workload, DecodeOptions(sampling, 20))
        plain = texts(pair, AUTOREGRESSIVE, encoded, profile)
        if sampling.greedy:
            reference = type(pair.target.model).from_pretrained(pair.spec.target, dtype=torch.float32)
            outside = 0
            for (_, request), ours in zip(encoded.items, plain, strict=True):
                ids = torch.tensor([request.prompt_ids])
                out = reference.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
                )
                outside += out[0, ids.shape[1] :].tolist() != ours
        for policy in chosen:
            differ = sum(a != b for a, b in zip(texts(pair, policy, encoded, profile), plain, strict=True))
            differences += differ
            rows.append({"policy": policy.label(), "temperature": sampling.temperature, "prompts": len(plain), "differ": differ})
            print(f"  T={sampling.temperature} {policy.label()}: {differ} of {len(plain)} differ", flush=True)
    return {
        "holds": differences == 0 and outside == 0,
        "summary": f"{differences} differences in {sum(r['prompts'] for r in rows)} texts ({len(chosen)} policies, "
        f"{len(workload.requests)} prompts, 3 temperatures); {outside} against transformers' generate",
        "rows": rows,
        "differs_from_generate": outside,
    }


def parity(state: Path) -> dict[str, Any]:
    """simulate = run on every round: 32 policies x 64 requests on the demo pair, and on a GPT-2 style pair."""
    rows = []
    for name in ("demo", "gpt2"):
        folder = state / "gpt2"
        folder.mkdir(exist_ok=True)
        pair = demo() if name == "demo" else load_pair(read_pair(str(make_pair(folder, "gpt2"))), device="cpu")
        rows += _parity(state / f"parity-{name}.db", pair, name)
    mismatches = sum(r["mismatches"] for r in rows)
    return {
        "holds": mismatches == 0,
        "summary": f"{mismatches} mismatches in {sum(r['rounds'] for r in rows)} rounds ({len(rows)} policy-pair combinations x 64)",
        "rows": rows,
    }


def _parity(path: Path, pair: LoadedPair, name: str) -> list[dict[str, Any]]:
    path.unlink(missing_ok=True)
    profile = measure_profile(pair, gamma_max=GAMMA_MAX, trees=False)
    first, second = list(pair.drafts)[:2]
    rows = []
    with open_database(str(path)) as database:
        store = TraceStore(database)
        for sampling, policies in (
            (Sampling(), kinds(first, second)[::2]),
            (Sampling(1.0, seed=5), kinds(first, second)[1::2]),
        ):
            workload = load_workload(["demo"], limit=64)
            if name != "demo":
                short = tuple(replace(r, turns=(r.turns[0][:200],)) for r in workload.requests)
                workload = replace(workload, requests=short)
            options = DecodeOptions(sampling, 24)
            trace = _recorded(store, pair, workload, options)
            encoded = encode(pair, workload, options)
            for policy in policies:
                replayed = run_replay(trace, policy, profile, per_round=True).steps()
                source = StaticSource(prepare(policy, pair.draft_names, profile=profile))
                wrong = rounds = 0
                for decoded, steps in zip(run(pair, source, encoded), replayed, strict=True):
                    wrong += _mismatches(decoded.steps, steps)
                    rounds += len(steps)
                rows.append({"pair": name, "policy": policy.label(), "rounds": rounds, "mismatches": wrong, "requests": 64})
                print(f"  {name} T={sampling.temperature} {policy.label()}: {wrong} of {rounds} rounds", flush=True)
    return rows


def _recorded(
    store: TraceStore, pair: LoadedPair, workload: Workload, options: DecodeOptions, gamma_max: int = GAMMA_MAX
) -> ReplayTrace:
    """The workload decoded autoregressively and stored, with every draft's panorama."""
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    info = record(store, pair, RecordRequest(workload, options, pair.draft_names, gamma_max), plain)
    loaded = store.load(info.id)
    return ReplayTrace(loaded.trajectories, {d: loaded.panoramas(d) for d in pair.draft_names})


def _mismatches(executed: Sequence[Step], replayed: Sequence[Step]) -> int:
    keys = [[(s.start, s.drafted, s.verified, s.accepted) for s in steps] for steps in (executed, replayed)]
    return sum(a != b for a, b in zip(*keys, strict=False)) + abs(len(executed) - len(replayed))


FIDELITY_GAMMA_MAX = 24
FIDELITY_REQUESTS = 16
FIDELITY_RUNS = 3


def swept(first: str, second: str) -> list[Policy]:
    """What a user sweeps: fixed windows from 1 to 24 of every draft, then the adaptive windows and stops of :func:`kinds`."""
    gammas = (1, 2, 3, 4, 6, 8, 12, 16, 24)
    fixed = [
        parse_policy({"draft": d, "window": {"kind": "fixed", "gamma": g}}) for d in (first, second, "ngram") for g in gammas
    ]
    return list({p.id: p for p in (*kinds(first, second), *fixed)}.values())


def fidelity(state: Path) -> dict[str, Any]:
    """Predicted against measured tokens/s of 50 policies in three interleaved runs on the demo pair, request by request the
    median of the three; costs measured in between.

    Two runs' agreement with each other (``measured_again``) is what noise leaves to any prediction.
    """
    pair = demo()
    path = state / "fidelity.db"
    path.unlink(missing_ok=True)
    store = stored(path)
    workload = load_workload(["demo"], limit=FIDELITY_REQUESTS)
    options = DecodeOptions(Sampling(), 64)
    trace = _recorded(store, pair, workload, options, FIDELITY_GAMMA_MAX)

    said = trace.trajectories
    profile = measure_profile(pair, gamma_max=FIDELITY_GAMMA_MAX, trees=False, contexts=served_contexts(said), texts=whole_texts(said))
    encoded = encode(pair, workload, options)
    return fidelity_report(pair, swept("small", "medium"), encoded, trace, profile)


def fidelity_report(
    pair: LoadedPair,
    policies: Sequence[Policy],
    encoded: Encoded,
    trace: ReplayTrace,
    profile: LatencyProfile,
    *,
    what: str = "policies",
    artifacts: Artifacts | None = None,
    runs: int = FIDELITY_RUNS,
) -> dict[str, Any]:
    """Predicted against measured tokens/s of policies in ``runs`` interleaved runs in random order, a request's seconds the median of
    them; the profile's scale is refitted to them, as ``tune`` does. ``what`` names the policies in the summary."""
    spent: dict[str, list[dict[str, float]]] = {p.id: [] for p in policies}
    for number in range(runs):
        outcomes = compare(pair, policies, encoded, profile=profile, artifacts=artifacts, seed=number).outcomes
        for policy in policies:
            spent[policy.id].append({r.request_id: r.counts.seconds for r in outcomes[policy.id].per_request})
        print(f"  run {number + 1} of {runs}", flush=True)

    def seconds(policy: Policy, part: slice) -> float:
        return sum(float(np.median([one[item.id] for one in spent[policy.id][part]])) for item, _ in encoded.items)

    predicted = {p.id: run_replay(trace, p, profile, artifacts=artifacts, approximate=True).total for p in policies}
    every = slice(None)
    scale = float(np.median([seconds(p, every) / predicted[p.id].seconds for p in policies]))
    rows = []
    for policy in policies:
        measured, foretold = outcomes[policy.id].total, predicted[policy.id]
        measured = replace(measured, seconds=seconds(policy, every))
        foretold = replace(foretold, seconds=scale * foretold.seconds)
        rows.append(
            {
                "policy": policy.label(),
                "tau": measured.mean_accepted_length,
                "predicted_tokens_per_s": foretold.tokens_per_s,
                "measured_tokens_per_s": measured.tokens_per_s,
                "halves_tokens_per_s": [measured.emitted_tokens / seconds(policy, slice(i, None, 2)) for i in (0, 1)],
                "error": foretold.tokens_per_s / measured.tokens_per_s - 1,
                "rounds_equal": foretold.rounds == measured.rounds,
            }
        )
    errors = np.abs([r["error"] for r in rows])
    first, again = np.array([r["halves_tokens_per_s"] for r in rows]).T
    tau = _tau([r["predicted_tokens_per_s"] for r in rows], [r["measured_tokens_per_s"] for r in rows])
    median, p90, ceiling = float(np.median(errors)), float(np.quantile(errors, 0.9)), _tau(first, again)
    return {
        "holds": median <= 0.03 and p90 <= 0.06 and tau >= 0.9,
        "summary": f"median error {100 * median:.1f}%, 90th percentile {100 * p90:.1f}%, Kendall tau {tau:.3f} over {len(rows)} "
        f"{what} (one half of the runs against the other: {ceiling:.3f})",
        "median_error": median,
        "p90_error": p90,
        "kendall_tau": tau,
        "kendall_tau_halves": ceiling,
        "scale": scale,
        "median_difference_measured_again": float(np.median(np.abs(again / first - 1))),
        "profile": json.loads(json.dumps(dict(profile.check), default=str)),
        "rows": sorted(rows, key=lambda r: -r["measured_tokens_per_s"]),
    }


def _tau(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
    return float(kendalltau(a, b).statistic)


def regret(state: Path) -> dict[str, Any]:
    """The published winner against the best of gamma 0..12 of every draft, executed exhaustively, on three workloads."""
    pair = demo()
    rows: list[dict[str, Any]] = []
    for category in CATEGORIES:
        path = state / f"regret-{category}.db"
        path.unlink(missing_ok=True)
        store = stored(path)
        every = load_workload(["demo"], categories=[category])
        workload = replace(every, requests=every.requests[:50])
        options = DecodeOptions(Sampling(), 64)
        began = time.time()
        tuned = tune(store, pair, workload, TuneOptions(options=options, trials=300, budget_s=90, tree_width=0), clock=CLOCK)
        tuned_s = time.time() - began
        published = store.active_publication(pair.id, "cpu")
        assert published is not None
        winner = parse_policy(dict(published.document))
        profile = store.get_profile(tuned.profile).profile
        exhaustive = [AUTOREGRESSIVE]
        for draft in pair.draft_names:
            exhaustive += [parse_policy({"draft": draft, "window": {"kind": "fixed", "gamma": g}}) for g in range(1, 13)]
        # The best of many noisy figures is not the best policy. All of them race with the winner on the workload's requests, so
        # that those near the top are executed on all of it, several times over, in turn with the winner.
        recording = store.load(tuned.recording)
        trace = ReplayTrace(recording.trajectories, {d: recording.panoramas(d) for d in pair.draft_names})
        encoded = encode(pair, workload, options)
        policies = {p.id: p for p in [winner, *exhaustive]}
        compared = race(
            pair,
            list(policies.values()),
            encoded,
            kept=[winner.id],
            expected=expected_seconds(trace, range(len(encoded.items)), policies.values(), profile),
            profile=profile,
            passes=4,
            budget_s=90,
            clock=CLOCK,
        )
        fixed = [p.id for p in exhaustive if p.id in compared.survivors] or [compared.timings.leader([p.id for p in exhaustive])]
        best = policies[max(fixed, key=lambda p: compared.ratio(p, winner.id, projected=True)[0])]
        # Its own prompts are what a policy was tuned for; how it does on others of the kind, for comparison.
        fresh = encode(pair, replace(every, requests=every.requests[50:]), options)
        others = compare(pair, [winner, best], fresh, profile=profile, clock=CLOCK)
        # The best of many near ties owes something to luck, so the two run once more against each other alone.
        again = race(
            pair, [winner, best], encoded, whole={winner.id, best.id}, kept=[winner.id, best.id], profile=profile, passes=3, clock=CLOCK
        )
        share = again.ratio(winner.id, best.id)
        rows.append(
            {
                "workload": category,
                "winner": winner.label(),
                "best_fixed": best.label(),
                "share_of_best": share[0],
                "share_interval": finite(share[1:]),
                "share_half_width": (share[2] - share[1]) / 2,
                "share_in_the_race": finite(compared.ratio(winner.id, best.id, projected=True)),
                "share_on_other_prompts": finite(others.ratio(winner.id, best.id)),
                "speedup": finite(compared.ratio(winner.id, AUTOREGRESSIVE.id, projected=True)),
                "passes": {p.label(): _passes(compared, p.id) for p in policies.values()},
                "ratio_to_winner": {
                    p.label(): finite(compared.ratio(p.id, winner.id, projected=True)) for p in policies.values()
                },
                "tokens_per_s": {p.label(): compared.outcomes[p.id].total.tokens_per_s for p in policies.values()},
                "tune_seconds": {"all": tuned_s, **tuned.seconds},
                "raced_in_tuning": {c.policy.label(): [c.left, *finite(c.raced)] for c in tuned.candidates},
            }
        )
        print(f"  {category}: {winner.label()} at {share[0]:.4f} ({share[1]:.4f}-{share[2]:.4f}) of {best.label()}", flush=True)
    worthless = _no_gain(state, pair)
    least = min(r["share_of_best"] for r in rows)
    widest = max(r["share_half_width"] for r in rows)
    return {
        "holds": least >= 0.99 and worthless["speculates"] is False,
        "summary": f"winner at {100 * least:.1f}% or more of the best fixed gamma on {len(rows)} workloads "
        f"(95% intervals of +-{100 * widest:.1f}% or less); where speculation does not pay it published {worthless['published']}",
        "clock": CLOCK.__name__,
        "rows": rows,
        "no_gain": worthless,
    }


def _passes(compared: Comparison, policy_id: str) -> float:
    """How often a policy was executed, on the average of all requests."""
    seconds = compared.timings.seconds[policy_id]
    return float((~np.isnan(seconds)).sum() / len(seconds))


def _no_gain(state: Path, pair: LoadedPair) -> dict[str, Any]:
    """A workload where speculation cannot pay: the only draft is as large as the target."""
    path = state / "regret-none.db"
    path.unlink(missing_ok=True)
    store = stored(path)
    twin = load_pair(PairSpec("twin", pair.spec.target, (("twin", pair.spec.target),)), device="cpu")
    options = DecodeOptions(Sampling(), 32)
    workload = load_workload(["demo"], limit=24)
    tune(store, twin, workload, TuneOptions(options=options, drafts=("twin",), trials=100, gamma_max=8, budget_s=60, tree_width=0))
    published = store.active_publication(twin.id, "cpu")
    assert published is not None
    policy = parse_policy(dict(published.document))
    return {"published": policy.label(), "speculates": policy.speculates}


def kills(state: Path) -> dict[str, Any]:
    """kill -9 at 50 random moments of record and tune: the database stays sound, both resume, nothing committed is lost."""
    from kill_driver import run_kills

    folder = state / "kills"
    folder.mkdir(exist_ok=True)
    pair = make_pair(folder, "llama")
    figures = run_kills(pair, folder, count=50, seed=0)
    problems = figures["problems"]
    return {
        "holds": not problems,
        "summary": f"50 kill -9 of record and tune ({json.dumps(figures['kills'])}): {len(problems)} problems",
        **figures,
    }


def schedules(state: Path) -> dict[str, Any]:
    """8 workers x 200 due slots on SQLite and PostgreSQL, takeover of a dead worker, daylight saving by table."""
    return _pytest(["tests/test_schedule_times.py", "tests/test_schedule_store.py", "tests/test_schedule_workers.py"])


def borders(state: Path) -> dict[str, Any]:
    """20,000 policies, artifacts, chunks, rows, workloads and command lines of all kinds: our errors alone, in a line, within 5 s."""
    report = state / "borders.json"
    report.unlink(missing_ok=True)
    found = _pytest(["tests/test_borders.py"], SPECTUNE_BORDERS="full", SPECTUNE_BORDERS_REPORT=str(report))
    cases = json.loads(report.read_text()) if report.exists() else {}
    count = sum(cases.values())
    enough = found["holds"] and count >= 20_000
    return {**found, "holds": enough, "summary": f"{count} cases; {found['summary']}", "cases": cases}


def verifiers(state: Path) -> dict[str, Any]:
    """Both verifiers' laws against the exact law by chi-square; a biased verifier fails the same test."""
    return _pytest(["tests/test_verifiers.py"])


def _pytest(files: Sequence[str], **env: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    counted = re.search(r"(\d+) passed", last)
    return {"holds": done.returncode == 0, "summary": last, "passed": int(counted[1]) if counted else 0}


CHECKS: dict[str, Check] = {
    "fidelity": fidelity,
    "regret": regret,
    "parity": parity,
    "lossless": lossless,
    "kills": kills,
    "schedules": schedules,
    "borders": borders,
    "verifiers": verifiers,
}

if __name__ == "__main__":
    print(json.dumps({name: check.__doc__ for name, check in CHECKS.items()}, indent=1))

"""The checks of draft trees behind ``bench/acceptance.py``: losslessness, parity, fidelity, the papers' claims, temperature > 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from checks import CATEGORIES, fidelity_report, stored
from interleaved import compare
from pairs import make_pair
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions, Encoded, encode, run
from spectune.optimizer.fit.tuning import fit_trees
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.profiles import served_contexts
from spectune.optimizer.record import RecordRequest, cover_of, record, retrace_trees, whole_texts
from spectune.optimizer.simulate.replay import ReplayTrace, run_replay
from spectune.optimizer.simulate.shortlist_ranks import RanksByPolicy
from spectune.runtime.decoder import Decoded
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.profiling import measure_profile
from spectune.traces.schema import LatencyProfile, Sampling, Step, Workload
from spectune.traces.store import TraceStore

WIDTH, DEPTH = 10, 8
STATIC = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0, 0]]
Document = dict[str, Any]


def top_k(draft: str, width: int, gamma: int, n: int, **blocks: Any) -> Document:
    return {
        "draft": draft,
        "growth": {"kind": "top_k", "width": width},
        "window": {"kind": "fixed", "gamma": gamma},
        "select": {"top_n": n},
        **blocks,
    }


def documents(draft: str, bins: str, classifier: str, count: int, seed: int) -> list[Document]:
    """Tree policies of every growth, stop, stratification and adaptive depth, then random compositions."""
    strata = {"artifact": bins, "alpha": 2, "fractions": [0.3, 0.6, 1.0]}
    grower = {"kind": "classifier", "width": 8, "cap": 8, "beta": 0.5, "artifact": classifier}
    found: list[Document] = [
        top_k(draft, 10, 6, 59),
        top_k(draft, 8, 6, 32),
        top_k(draft, 4, 4, 12),
        top_k(draft, 2, 3, 5),
        top_k(draft, 8, 4, 24, stratify=strata),
        top_k(draft, 6, 5, 16, stratify={**strata, "alpha": 3, "fractions": [0.4, 0.8]}),
        top_k(draft, 6, 8, 16, stop={"kind": "entropy", "threshold": 0.4}),
        top_k(draft, 6, 8, 16, stop={"kind": "joint_prob", "threshold": 0.1}),
        top_k(draft, 6, 8, 16, stop={"kind": "max_prob", "threshold": 0.3, "keep_last": False}),
        {"draft": draft, "growth": {"kind": "static", "paths": STATIC}},
        {"draft": draft, "growth": {"kind": "static", "paths": STATIC}, "window": {"kind": "fsm", "gamma_max": 4}},
        {"draft": draft, "growth": grower, "window": {"kind": "fixed", "gamma": 6}},
        {"draft": draft, "growth": {**grower, "beta": 0.3}, "window": {"kind": "fixed", "gamma": 4}},
        {"draft": draft, "growth": {**grower, "width": 1, "cap": 1, "beta": 0.5}, "window": {"kind": "fixed", "gamma": 8}},
        {**top_k(draft, 6, 6, 16), "window": {"kind": "fsm", "gamma_max": 6}},
        {**top_k(draft, 6, 6, 16), "window": {"kind": "cache_fsm", "gamma_max": 6}},
        {**top_k(draft, 6, 6, 16), "window": {"kind": "q_learning", "gamma_max": 6, "seed": 1}},
        {**top_k(draft, 6, 6, 16), "window": {"kind": "analytic", "gamma_max": 6}},
        {**top_k(draft, 4, 6, 12), "window": {"kind": "heuristic", "gamma_max": 6}},
    ]
    rng = np.random.default_rng(seed)
    while len(found) < count:
        kind = str(rng.choice(["fixed", "fsm", "cache_fsm", "heuristic"]))
        gamma = int(rng.integers(1, DEPTH - 2))
        document: Document = {
            "draft": draft,
            "window": {"kind": kind, **({"gamma": gamma} if kind == "fixed" else {"gamma_max": gamma})},
            "growth": {"kind": "top_k", "width": int(rng.integers(2, WIDTH + 1))},
            "select": {"top_n": int(rng.integers(2, 61))},
        }
        if rng.integers(2):
            document["stratify"] = {"artifact": bins, "alpha": int(rng.integers(0, 3)), "fractions": [0.3, 0.7]}
        if rng.integers(2):
            threshold = round(float(rng.uniform(0.05, 0.6)), 3)
            document["stop"] = {"kind": str(rng.choice(["max_prob", "joint_prob", "entropy"])), "threshold": threshold}
        found.append(document)
    return found[:count]


def texts(pair: LoadedPair, policy: Policy, encoded: Encoded, profile: LatencyProfile | None, find: Artifacts) -> list[Decoded]:
    prepared = prepare(policy, pair.draft_names, profile=profile, artifacts=find)
    return list(run(pair, StaticSource(prepared), encoded))


def short(workload: Workload, letters: int) -> Workload:
    return replace(workload, requests=tuple(replace(r, turns=(r.turns[0][:letters],)) for r in workload.requests))


def prepared_trees(
    store: TraceStore, pair: LoadedPair, workload: Workload, options: DecodeOptions, drafts: Sequence[str]
) -> tuple[str, ReplayTrace, dict[str, Any]]:
    """Records a workload with trees, and fits what trees need: (recording, trace, limits by draft)."""
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    chains = tuple(d for d in drafts if d in pair.chain_drafts)
    info = record(store, pair, RecordRequest(workload, options, tuple(drafts), 12, WIDTH, DEPTH), plain)
    trace = traced(store, info.id, chains, drafts)
    return info.id, trace, fit_trees(store, info.id, drafts)


def traced(
    store: TraceStore,
    recording: str,
    chains: Sequence[str],
    drafts: Sequence[str],
    ranks: RanksByPolicy | None = None,
) -> ReplayTrace:
    loaded = store.load(recording, trees=True)
    trees = {(d, "coupled"): loaded.trees(d) for d in drafts}
    return ReplayTrace(loaded.trajectories, {d: loaded.panoramas(d) for d in chains}, trees=trees, ranks=ranks)


def pairs_of(state: Path) -> Iterator[tuple[str, LoadedPair]]:
    """The demo pair with every draft, and a GPT-2 style one, by name."""
    folder = state / "gpt2"
    folder.mkdir(exist_ok=True)
    yield "demo", load_pair(read_pair("demo"), device="cpu")
    yield "gpt2", load_pair(read_pair(str(make_pair(folder, "gpt2"))), device="cpu")


def texts_differ(name: str, pair: LoadedPair, policies: Sequence[Policy], find: Artifacts, prompts: int) -> list[dict[str, Any]]:
    """Texts of 12 tokens under policies beside autoregression's, at temperatures 0, 0.7 (top-p 0.95) and 1: rows of figures."""
    rows = []
    workload = load_workload(["demo"], limit=prompts)
    if name != "demo":
        workload = short(workload, 200)
    for sampling in (Sampling(), Sampling(0.7, top_p=0.95, seed=1), Sampling(1.0, seed=2)):
        encoded = encode(pair, workload, DecodeOptions(sampling, 12))
        plain = [d.trajectory.output_ids.tolist() for d in texts(pair, AUTOREGRESSIVE, encoded, None, find)]
        for policy in policies:
            ours = texts(pair, policy, encoded, None, find)
            differ = sum(a.trajectory.output_ids.tolist() != b for a, b in zip(ours, plain, strict=True))
            rows.append(
                {
                    "pair": name,
                    "policy": policy.label(),
                    "temperature": sampling.temperature,
                    "prompts": len(plain),
                    "tau": tau_of(ours),
                    "differ": differ,
                }
            )
            print(f"  {name} T={sampling.temperature} {policy.label()}: {differ} of {len(plain)} differ", flush=True)
    return rows


def tau_of(decoded: Sequence[Decoded]) -> float:
    """Tokens a round, over requests."""
    return sum(s.emitted for d in decoded for s in d.steps) / sum(len(d.steps) for d in decoded)


def trees_lossless(state: Path) -> dict[str, Any]:
    """Texts under tree policies equal autoregression's: 102 prompts x 20 policies at temperatures 0, 0.7 and 1, every kind of draft."""
    rows: list[dict[str, Any]] = []
    for name, pair in pairs_of(state):
        drafts = [*pair.models]
        path = state / f"trees-lossless-{name}.db"
        path.unlink(missing_ok=True)
        store = stored(path)
        small = short(load_workload(["demo"], limit=6), 200)
        _, _, limits = prepared_trees(store, pair, small, DecodeOptions(Sampling(), 24), drafts)
        find = fitted(store)
        each = math.ceil(20 / len(drafts))
        policies = []
        for i, draft in enumerate(drafts):
            listed = [
                d for d in documents(draft, limits[draft].bins, limits[draft].classifier, 24, 7) if "analytic" not in str(d)
            ]
            policies += [parse_policy(d) for d in listed[i :: len(drafts)][:each]]
        rows += texts_differ(name, pair, policies[:20], find, 102)
    differences = sum(r["differ"] for r in rows)
    return {
        "holds": differences == 0,
        "summary": f"{differences} differences in {sum(r['prompts'] for r in rows)} texts (20 policies a pair, 102 prompts, "
        "3 temperatures, 2 pairs)",
        "rows": rows,
    }


def shape(step: Step) -> tuple[int, ...]:
    return (
        step.start, step.drafted, step.verified, step.accepted, step.emitted, step.draft_steps, step.lag, step.depth, step.bin,
    )  # fmt: skip


def unlike(executed: Sequence[Decoded], others: Sequence[Sequence[Step]]) -> tuple[int, int]:
    """How many rounds differ, request by request, from others' but in their seconds; and how many the others are."""
    wrong = 0
    for decoded, steps in zip(executed, others, strict=True):
        one, other = ([shape(s) for s in part] for part in (decoded.steps, steps))
        wrong += sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
    return wrong, sum(len(steps) for steps in others)


def trees_parity(state: Path) -> dict[str, Any]:
    """simulate = run on every round: 44 tree policies x 32 requests, language-model draft and head, temperatures 0 and 1."""
    pair = load_pair(read_pair("demo"), device="cpu")
    drafts = ["small", *pair.heads]
    rows = []
    profile = measure_profile(pair, gamma_max=8, repeats=1)
    for sampling, seed in ((Sampling(), 1), (Sampling(1.0, seed=5), 2)):
        path = state / f"trees-parity-{sampling.temperature}.db"
        path.unlink(missing_ok=True)
        store = stored(path)
        workload = load_workload(["demo"], limit=32)
        options = DecodeOptions(sampling, 24)
        recording, _, limits = prepared_trees(store, pair, workload, options, drafts)
        find = fitted(store)
        encoded = encode(pair, workload, options)
        for i, draft in enumerate(drafts):
            listed = documents(draft, limits[draft].bins, limits[draft].classifier, 32, seed)
            policies = [parse_policy(d) for d in (listed[:10] + listed[20:26], listed[10:])[(i + seed) % 2]]
            covers = [cover_of(p, sampled=not sampling.greedy, artifacts=find) for p in policies if p.growth.kind != "top_k"]
            retrace_trees(store, pair, recording, [draft], WIDTH, DEPTH, covers=covers, chain_depth=12)
            trace = traced(store, recording, ["small"], drafts)
            for policy in policies:
                replayed = run_replay(trace, policy, profile, per_round=True, artifacts=find, approximate=True)
                wrong, rounds = unlike(texts(pair, policy, encoded, profile, find), replayed.steps())
                rows.append(
                    {
                        "policy": policy.label(),
                        "temperature": sampling.temperature,
                        "rounds": rounds,
                        "mismatches": wrong,
                        "beyond_recording": replayed.missing,
                    }
                )
                print(
                    f"  T={sampling.temperature} {policy.label()}: {wrong} of {rounds} rounds, {replayed.missing} missing",
                    flush=True,
                )
    mismatches = sum(r["mismatches"] for r in rows)
    missing = sum(r["beyond_recording"] for r in rows)
    return {
        "holds": mismatches == 0 and missing == 0 and len(rows) >= 40,
        "summary": f"{mismatches} mismatches in {sum(r['rounds'] for r in rows)} rounds ({len(rows)} policies x 32 requests); "
        f"{missing} rounds beyond what was recorded",
        "rows": rows,
    }


def trees_fidelity(state: Path) -> dict[str, Any]:
    """Predicted against measured tokens/s of 63 tree policies, a sweep of width, depth and N and every other kind, in four interleaved
    runs at one pace, round by round the median of the four; costs measured in between, a turn of the drafts after every request, on its
    text.

    Near ties are rare and dear (0 to 4 canonical passes in 8 requests, each as long as a round): it takes requests to average them out.
    """
    pair = load_pair(read_pair("demo"), device="cpu")
    drafts = ["small", "medium", *pair.heads]
    path = state / "trees-fidelity.db"
    path.unlink(missing_ok=True)
    store = stored(path)
    workload = load_workload(["demo"], limit=16)
    options = DecodeOptions(Sampling(), 48)
    recording, _, limits = prepared_trees(store, pair, workload, options, drafts)
    find = fitted(store)
    policies: list[Policy] = []
    for draft in drafts:
        grower = {"kind": "classifier", "width": 8, "cap": 8, "beta": 0.5, "artifact": limits[draft].classifier}
        strata = {"artifact": limits[draft].bins, "alpha": 2, "fractions": [0.3, 0.6, 1.0]}
        listed = [top_k(draft, width, depth, width * depth) for width in (2, 4, 8) for depth in (1, 2, 4, 8)]
        listed += [top_k(draft, width, depth, 60) for width, depth in ((4, 8), (8, 2), (8, 4))]  # EAGLE-2's N
        listed += [
            top_k(draft, 6, 4, 24, stratify=strata),
            {"draft": draft, "growth": {"kind": "static", "paths": STATIC}},
            {"draft": draft, "growth": {"kind": "static", "paths": STATIC[:3]}},
            {"draft": draft, "growth": grower, "window": {"kind": "fixed", "gamma": 4}},
            {**top_k(draft, 4, 6, 12), "window": {"kind": "fsm", "gamma_max": 6}},
            top_k(draft, 4, 8, 12, stop={"kind": "entropy", "threshold": 0.4}),
        ]
        mine = [parse_policy(d) for d in listed]
        covers = [cover_of(p, sampled=False, artifacts=find) for p in mine if p.growth.kind != "top_k"]
        retrace_trees(store, pair, recording, [draft], WIDTH, DEPTH, covers=covers, chain_depth=12)
        policies += mine
    trace = traced(store, recording, ("small", "medium"), drafts)

    texts_said = trace.trajectories
    profile = measure_profile(pair, gamma_max=12, contexts=served_contexts(texts_said), texts=whole_texts(texts_said))
    return fidelity_report(pair, policies, encode(pair, workload, options), trace, profile, what="tree policies", artifacts=find, runs=4)


def trees_sampled(state: Path) -> dict[str, Any]:
    """Temperatures 0.7 and 1, executed: coupled trees against EAGLE's top-k trees by q, coupled chains and classical rejection."""
    pair = load_pair(read_pair("demo"), device="cpu")
    rows = []
    drafts = ["medium", *pair.heads]
    for temperature in (0.7, 1.0):
        for category in CATEGORIES:
            every = load_workload(["demo"], categories=[category])
            workload = replace(every, requests=every.requests[:10])
            options = DecodeOptions(Sampling(temperature, seed=11), 48)
            encoded = encode(pair, workload, options)
            for draft in drafts:
                tree = top_k(draft, 8, 6, 32)
                q_tree = {**tree, "growth": {**tree["growth"], "proposals": "probability"}}
                chain = {"draft": draft, "window": {"kind": "fixed", "gamma": 4}}
                named = {"coupled tree": tree, "EAGLE-2 tree by q": q_tree, "coupled chain": chain}
                policies = {name: parse_policy(d) for name, d in named.items()}
                compared = compare(pair, [AUTOREGRESSIVE, *policies.values()], encoded)
                base = compared.outcomes[AUTOREGRESSIVE.id].total
                found = {name: compared.outcomes[p.id].total for name, p in policies.items()}
                if draft in pair.chain_drafts:
                    again = replace(options, verifier="rejection")
                    other = compare(pair, [AUTOREGRESSIVE, policies["coupled chain"]], encode(pair, workload, again))
                    total = other.outcomes[policies["coupled chain"].id].total
                    own = other.outcomes[AUTOREGRESSIVE.id].total
                    found["rejection chain"] = replace(total, seconds=total.seconds * base.tokens_per_s / own.tokens_per_s)
                for name, total in found.items():
                    rows.append(
                        {
                            "temperature": temperature,
                            "workload": category,
                            "draft": draft,
                            "method": name,
                            "tau": total.mean_accepted_length,
                            "calls_per_100_tokens": 100 * total.rounds / total.emitted_tokens,
                            "verified_tokens": total.verified_tokens,
                            "tokens_per_s": total.tokens_per_s,
                            "speedup": total.tokens_per_s / base.tokens_per_s,
                        }
                    )
                    print(f"  T={temperature} {category} {draft} {name}: tau {total.mean_accepted_length:.2f}", flush=True)

    def tau(method: str, row: dict[str, Any]) -> float:
        same = ("temperature", "workload", "draft")
        return next(float(r["tau"]) for r in rows if r["method"] == method and all(r[k] == row[k] for k in same))

    gains = [
        tau("coupled tree", r) / tau("EAGLE-2 tree by q", r)
        for r in rows
        if r["method"] == "coupled tree" and r["temperature"] == 1.0
    ]
    return {
        "holds": min(gains) >= 1.4,
        "summary": f"at temperature 1 coupled trees reach {min(gains):.2f} to {max(gains):.2f} times the tau of EAGLE's trees by q "
        f"({len(gains)} draft-workload combinations; target 1.4)",
        "gains_at_1": gains,
        "rows": rows,
    }


def trees_papers(state: Path) -> dict[str, Any]:
    """HeteroSpec, C2T, adaptive depth, AdaEDL against EAGLE-2: tau, calls, verified tokens (exact), speed-up (executed)."""
    pair = load_pair(read_pair("demo"), device="cpu")
    rows: list[dict[str, Any]] = []
    drafts = ["medium", *pair.heads]
    for category in CATEGORIES:
        every = load_workload(["demo"], categories=[category])
        workload = replace(every, requests=every.requests[:24])
        options = DecodeOptions(Sampling(), 64)
        path = state / f"trees-papers-{category}.db"
        path.unlink(missing_ok=True)
        store = stored(path)
        recording, _, limits = prepared_trees(store, pair, workload, options, drafts)
        find = fitted(store)
        executed = encode(pair, replace(workload, requests=workload.requests[:8]), options)
        for draft in drafts:
            limit, depth, n = limits[draft], 5, 40
            alpha = math.ceil(depth / 2)
            alpha = min(alpha, DEPTH - depth)
            base = top_k(draft, 8, depth, n)
            bins = {"artifact": limit.bins, "alpha": alpha}
            named: dict[str, Document] = {
                "EAGLE-2": base,
                "+ depth extension (DED)": {**base, "stratify": {**bins, "fractions": [1.0, 1.0, 1.0]}},
                "+ pruning (TNP) = HeteroSpec": {**base, "stratify": {**bins, "fractions": [0.3, 0.6, 1.0]}},
                "adaptive depth (fsm)": {**base, "window": {"kind": "fsm", "gamma_max": DEPTH}},
                "adaptive depth (cache_fsm)": {**base, "window": {"kind": "cache_fsm", "gamma_max": DEPTH}},
                "AdaEDL": {**base, "stop": {"kind": "entropy", "threshold": 0.4}},
                "chain gamma 5": {"draft": draft, "window": {"kind": "fixed", "gamma": 5}},
                "chain DyMax": {
                    "draft": draft,
                    "window": {"kind": "fixed", "gamma": 8},
                    "stop": {"kind": "max_prob", "threshold": 0.4},
                },
                "chain DyJoint": {
                    "draft": draft,
                    "window": {"kind": "fixed", "gamma": 8},
                    "stop": {"kind": "joint_prob", "threshold": 0.2},
                },
            }
            for beta in (0.3, 0.4, 0.5, 0.6, 0.7):
                named[f"C2T beta {beta}"] = {
                    "draft": draft,
                    "growth": limit.grower(beta),
                    "window": {"kind": "fixed", "gamma": depth},
                }
            for beta in (0.3, 0.5):
                named[f"chain C2T beta {beta}"] = {
                    "draft": draft,
                    "growth": {**limit.grower(beta), "width": 1, "cap": 1},
                    "window": {"kind": "fixed", "gamma": DEPTH},
                }
            policies = {name: parse_policy(d) for name, d in named.items()}
            covers = [cover_of(p, sampled=False, artifacts=find) for p in policies.values() if p.growth.kind == "classifier"]
            retrace_trees(store, pair, recording, [draft], WIDTH, DEPTH, covers=covers, chain_depth=12)
            trace = traced(store, recording, [d for d in drafts if d in pair.chain_drafts], drafts)
            exact = {k: run_replay(trace, p, artifacts=find, approximate=True) for k, p in policies.items()}
            # EAGLE-2's verified tokens at the tau that each C2T threshold reaches, by its own sweep of N.
            sweep = []
            for top_n in range(depth, 61):
                total = run_replay(trace, parse_policy(top_k(draft, 8, depth, top_n)), artifacts=find, approximate=True).total
                sweep.append((total.mean_accepted_length, total.verified_tokens))
            compared = compare(pair, [AUTOREGRESSIVE, *policies.values()], executed, artifacts=find)
            plain = compared.outcomes[AUTOREGRESSIVE.id].total.tokens_per_s
            for name, policy in policies.items():
                total = exact[name].total
                equal = [tokens for tau, tokens in sweep if tau >= total.mean_accepted_length]
                rows.append(
                    {
                        "workload": category,
                        "draft": draft,
                        "method": name,
                        "speedup": compared.outcomes[policy.id].total.tokens_per_s / plain,
                        "tau": total.mean_accepted_length,
                        "calls": total.rounds,
                        "verified_tokens": total.verified_tokens,
                        "approximate_rounds": exact[name].missing,
                        "eagle2_tokens_at_equal_tau": min(equal) if equal else None,
                    }
                )
                print(
                    f"  {category} {draft} {name}: tau {total.mean_accepted_length:.2f} verified {total.verified_tokens}",
                    flush=True,
                )
    return {"holds": True, "summary": _claims(rows), "rows": rows, "paper": PAPER}


PAPER = {
    "HeteroSpec over EAGLE-3, HumanEval, LLaMA-3.1-8B (table 2)": {
        "EAGLE-3": {"speedup": 3.95, "tau": 6.83, "calls": 4118, "tokens": 248272},
        "+DED": {"speedup": 4.35, "tau": 7.54, "calls": 3757, "tokens": 226796},
        "+TNP": {"speedup": 4.31, "tau": 7.46, "calls": 3799, "tokens": 196029},
        "+DCA": {"speedup": 4.43, "tau": 7.46, "calls": 3799, "tokens": 196029},
    },
    "C2T over EAGLE-2 at equal accepted length (table 2)": {"tokens": "75-80% of EAGLE-2's"},
    "C2T in chain mode, LLaMA-2 7B (table 3)": {
        "EAGLE gamma 7": {"accepted": 2.10, "tokens": 140238},
        "DyMax": {"accepted": 2.06, "tokens": 127018},
        "DyJoint": {"accepted": 2.12, "tokens": 129876},
        "C2T": {"accepted": 2.12, "tokens": 116694},
    },
    "adaptive depth over EAGLE-2, MT-Bench (D.5)": {"speedup": "+4.2%"},
    "AdaEDL below EAGLE-3 (HeteroSpec table 11)": {
        "MT-Bench, LLaMA-3.1-8B": {"EAGLE-3": 3.43, "AdaEDL": 3.31, "HeteroSpec": 3.74}
    },
}


def _claims(rows: list[dict[str, Any]]) -> str:
    def of(method: str, key: str) -> np.ndarray:
        return np.array([r[key] for r in rows if r["method"] == method], dtype=float)

    hetero = of("+ pruning (TNP) = HeteroSpec", "speedup") / of("EAGLE-2", "speedup")
    fewer = of("+ pruning (TNP) = HeteroSpec", "verified_tokens") / of("EAGLE-2", "verified_tokens")
    share = [
        r["verified_tokens"] / r["eagle2_tokens_at_equal_tau"]
        for r in rows
        if r["method"].startswith("C2T") and r["eagle2_tokens_at_equal_tau"]
    ]
    adaptive = of("adaptive depth (fsm)", "speedup") / of("EAGLE-2", "speedup")
    ada = of("AdaEDL", "speedup") / of("EAGLE-2", "speedup")
    return (
        f"over EAGLE-2 in {len(hetero)} cases: HeteroSpec {hetero.min():.2f}-{hetero.max():.2f} x the speed with {fewer.mean():.2f} of the "
        f"verified tokens; C2T {np.mean(share):.2f} of the verified tokens at equal tau (paper 0.75-0.80); adaptive depth "
        f"{adaptive.min():.2f}-{adaptive.max():.2f} x; AdaEDL {ada.min():.2f}-{ada.max():.2f} x"
    )


CHECKS = {
    "trees-lossless": trees_lossless,
    "trees-parity": trees_parity,
    "trees-fidelity": trees_fidelity,
    "trees-sampled": trees_sampled,
    "trees-papers": trees_papers,
}

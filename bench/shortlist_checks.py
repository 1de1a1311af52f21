"""The checks of vocabulary shortlists behind ``bench/acceptance.py``: losslessness, parity of replay, fidelity of prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
from checks import fidelity_report, stored
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions, Encoded, encode
from spectune.optimizer.fit.cluster_ranks import cluster_ranks
from spectune.optimizer.fit.dynaspec import fit_router
from spectune.optimizer.fit.fr_spec import fit_fr_spec
from spectune.optimizer.fit.frequency_ranks import frequency_ranks
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.profiles import served_contexts
from spectune.optimizer.record import cover_of, retrace_trees, whole_texts
from spectune.optimizer.simulate.replay import ReplayTrace, run_replay
from spectune.optimizer.simulate.shortlist_ranks import Ranks
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.profiling import measure_profile
from spectune.traces.schema import LatencyProfile, Sampling
from spectune.traces.store import TraceStore
from tree_checks import (
    DEPTH,
    STATIC,
    WIDTH,
    Document,
    documents,
    pairs_of,
    prepared_trees,
    short,
    tau_of,
    texts,
    texts_differ,
    top_k,
    traced,
    unlike,
)

KINDS = ("clusters", "frequency", "position_frequency")
TAU_TARGET = 0.005
"""Relative error of the replayed tau that is aimed at where replay is approximate."""
EVERYTHING = 10**6
"""A size beyond any vocabulary."""


@dataclass(frozen=True)
class Shortlisting:
    """What was fitted to a recording for shortlists: one order of the ``vocab`` tokens, and by draft a router with its clusters' number."""

    vocab: int
    frequencies: str
    routers: dict[str, tuple[str, int]]

    @classmethod
    def fit(cls, store: TraceStore, recording: str, pair: LoadedPair, drafts: Sequence[str]) -> Shortlisting:
        routers = {}
        for draft in drafts:
            made = fit_router(store, recording, pair, draft)
            routers[draft] = made.artifact, int(made.document["clusters"])
        return cls(pair.target.vocab_size, fit_fr_spec(store, recording, pair).artifact, routers)

    def block(self, kind: str, draft: str, part: int) -> Document:
        """A shortlist of one in ``part`` of the tokens or clusters at the first step; part 0: all at every step."""
        if kind == "clusters":
            name, count = self.routers[draft]
            first = max(1, count // part) if part else count
            later = (max(1, first // 2), max(1, first // 4)) if part else (count, count)
            return {"kind": kind, "k0": first, "k1": later[0], "k_min": later[1], "artifact": name}
        size = max(1, self.vocab // part) if part else EVERYTHING
        return {"kind": kind, "size" if kind == "frequency" else "k_max": size, "artifact": self.frequencies}


def window(kind: str, gamma: int, **more: Any) -> Document:
    return {"kind": kind, "gamma" if kind == "fixed" else "gamma_max": gamma, **more}


CHAINS: list[Document] = [
    {"window": window("fixed", 4)},
    {"window": window("fixed", 8), "stop": {"kind": "max_prob", "threshold": 0.3}},
    {"window": window("fsm", 6)},
    {"window": window("fixed", 8), "stop": {"kind": "entropy", "threshold": 0.4}},
    {"window": window("cache_fsm", 6)},
    {"window": window("q_learning", 6, seed=1), "stop": {"kind": "joint_prob", "threshold": 0.1, "keep_last": False}},
    {"window": window("heuristic", 8)},
]
TREES = (1, 4, 6, 9, 11, 14)
"""Of :func:`tree_checks.documents`: EAGLE-2's, bins, a stop, static, the classifier's, an adaptive depth."""


def shortlists_lossless(state: Path) -> dict[str, Any]:
    """Texts under shortlists equal autoregression's: 100 prompts x 20 policies at temperatures 0, 0.7 and 1, chains and trees of every
    draft; shortlists of everything make the rounds of the whole head."""
    rows: list[dict[str, Any]] = []
    apart = compared = 0
    for name, pair in pairs_of(state):
        drafts = [*pair.models]
        path = state / f"shortlists-lossless-{name}.db"
        path.unlink(missing_ok=True)
        store = stored(path)
        small = short(load_workload(["demo"], limit=12), 200)
        recording, _, limits = prepared_trees(store, pair, small, DecodeOptions(Sampling(), 24), drafts)
        fits = Shortlisting.fit(store, recording, pair, drafts)
        find = fitted(store)
        policies: list[Policy] = []
        for i, (draft, kind) in enumerate(islice(cycle(product(drafts, KINDS)), 9)):
            trees = documents(draft, limits[draft].bins, limits[draft].classifier, max(TREES) + 1, 7)
            for body in (CHAINS[i % len(CHAINS)], trees[TREES[i % len(TREES)]]):
                policies.append(parse_policy({**body, "draft": draft, "shortlist": fits.block(kind, draft, (8, 16, 4)[i % 3])}))
        everything = [
            ({"draft": drafts[0], **CHAINS[1]}, "frequency"),
            ({"draft": drafts[0], **CHAINS[0]}, "clusters"),
            (top_k(drafts[0], 8, 6, 32), "position_frequency"),
            (top_k(drafts[-1], 8, 6, 32), "clusters"),
        ]
        full = [(parse_policy(d), parse_policy({**d, "shortlist": fits.block(kind, d["draft"], 0)})) for d, kind in everything]
        rows += texts_differ(name, pair, [*policies, *(p for _, p in full[1:3])], find, 100)
        for sampling in (Sampling(), Sampling(1.0, seed=2)):
            encoded = encode(pair, small, DecodeOptions(sampling, 12))
            for whole, shortlisted in full:
                others = [d.steps for d in texts(pair, whole, encoded, None, find)]
                wrong, rounds = unlike(texts(pair, shortlisted, encoded, None, find), others)
                apart, compared = apart + wrong, compared + rounds
    differences = sum(r["differ"] for r in rows)
    each = len(rows) // 6
    return {
        "holds": differences == 0 and apart == 0 and each >= 20,
        "summary": f"{differences} differences in {sum(r['prompts'] for r in rows)} texts ({each} policies a pair, 100 prompts, 3 "
        f"temperatures, 2 pairs); shortlists of everything: {apart} of {compared} rounds unlike the whole head's",
        "full_sized_rounds": {"compared": compared, "unlike": apart},
        "rows": rows,
    }


WINDOWS: list[Document] = [
    *(window("fixed", gamma) for gamma in (1, 4, 8)),
    *(window(kind, 8) for kind in ("fsm", "cache_fsm", "heuristic", "analytic")),
    window("q_learning", 6, seed=1),
]


def exact_policies(fits: Shortlisting, drafts: Sequence[str], turn: int) -> list[Policy]:
    """Chains without a stop of language-model drafts under every window, kind and several sizes: replay claims these exactly. Half of
    them by ``turn``, 0 or 1."""
    every = list(product(drafts, WINDOWS, KINDS))
    return [
        parse_policy({"draft": d, "window": w, "shortlist": fits.block(kind, d, (4, 16, 64)[i // 2 % 3])})
        for i, (d, w, kind) in enumerate(every)
        if i % 2 == turn
    ]


def approximate_policies(fits: Shortlisting, small: str, head: str, turn: int) -> list[Policy]:
    """Stops, trees, and whatever a head drafts, half of them by ``turn``."""
    bodies: list[Document] = [
        {"draft": small, **CHAINS[1]},
        {"draft": small, **CHAINS[3]},
        {"draft": head, **CHAINS[0]},
        {"draft": head, **CHAINS[2]},
        *(top_k(draft, 6, 5, 24) for draft in (small, head)),
        *({**top_k(draft, 4, 6, 12), "window": window("fsm", 6)} for draft in (small, head)),
        *({"draft": draft, "growth": {"kind": "static", "paths": STATIC}} for draft in (small, head)),
    ]
    return [
        parse_policy({**body, "shortlist": fits.block(kind, body["draft"], (4, 8)[i // 2 % 2])})
        for i, (body, kind) in enumerate(product(bodies, KINDS))
        if i % 2 == turn
    ]


def shortlists_parity(state: Path) -> dict[str, Any]:
    """simulate = run round by round where replay under shortlists is exact (48 chains x 32 requests, temperatures 0 and 1); elsewhere the
    tokens a round predicted against executed."""
    pair = load_pair(read_pair("demo"), device="cpu")
    drafts = [*pair.models]
    profile = measure_profile(pair, gamma_max=8, repeats=1)
    exact: list[dict[str, Any]] = []
    approximate: list[dict[str, Any]] = []
    for turn, sampling in enumerate((Sampling(), Sampling(1.0, seed=5))):
        path = state / f"shortlists-parity-{sampling.temperature}.db"
        path.unlink(missing_ok=True)
        store = stored(path)
        workload = load_workload(["demo"], limit=32)
        options = DecodeOptions(sampling, 24)
        recording, _, _ = prepared_trees(store, pair, workload, options, drafts)
        cover = cover_of(parse_policy({"draft": "small", "growth": {"kind": "static", "paths": STATIC}}), sampled=not sampling.greedy)
        retrace_trees(store, pair, recording, ["small", *pair.heads], WIDTH, DEPTH, covers=[cover], chain_depth=12)
        fits = Shortlisting.fit(store, recording, pair, drafts)
        find = fitted(store)
        trace = ranked_trace(store, pair, recording, fits)
        encoded = encode(pair, workload, options)
        for policy in exact_policies(fits, list(pair.drafts), turn):
            exact.append(compared_rounds(pair, trace, policy, encoded, profile, find))
        for policy in approximate_policies(fits, "small", "head", turn):
            approximate.append(compared_rounds(pair, trace, policy, encoded, profile, find))
    wrong = sum(r["mismatches"] for r in exact)
    errors = np.abs([r["tau_error"] for r in approximate])
    median, worst = float(np.median(errors)), float(errors.max())
    met = worst <= TAU_TARGET
    return {
        "holds": wrong == 0 and len(exact) >= 40 and not any(r["beyond_recording"] for r in exact),
        "tau_target_met": met,
        "tau_target_met_by": float((errors <= TAU_TARGET).mean()),
        "summary": f"{wrong} mismatches in {sum(r['rounds'] for r in exact)} rounds ({len(exact)} chains x 32 requests) where replay is "
        f"exact; elsewhere ({len(approximate)} policies: stops, trees, heads) tau predicted within {100 * median:.2f}% in the median, "
        f"{100 * worst:.1f}% at worst (target {100 * TAU_TARGET:g}%: {'met' if met else 'not met'})",
        "median_tau_error": median,
        "worst_tau_error": worst,
        "rows": [*exact, *approximate],
    }


def ranked_trace(store: TraceStore, pair: LoadedPair, recording: str, fits: Shortlisting) -> ReplayTrace:
    """A recording with the ranks of every draft's router, and of the frequency order for language-model drafts."""
    ranks: dict[tuple[str, str], Ranks] = {}
    for draft, (router, _) in fits.routers.items():
        ranks[draft, router] = cluster_ranks(store, pair, recording, draft, router)
        if draft in pair.drafts:
            ranks[draft, fits.frequencies] = frequency_ranks(store, pair, recording, draft, fits.frequencies)
    return traced(store, recording, list(pair.drafts), list(fits.routers), ranks)


def compared_rounds(
    pair: LoadedPair, trace: ReplayTrace, policy: Policy, encoded: Encoded, profile: LatencyProfile, find: Artifacts
) -> dict[str, Any]:
    """A policy replayed and executed: rounds that differ, and the tokens a round of both."""
    replayed = run_replay(trace, policy, profile, per_round=True, artifacts=find, approximate=True)
    decoded = texts(pair, policy, encoded, profile, find)
    wrong, rounds = unlike(decoded, replayed.steps())
    executed, predicted = tau_of(decoded), replayed.total.mean_accepted_length
    temperature = encoded.options.sampling.temperature
    print(f"  T={temperature} {policy.label()}: {wrong} of {rounds} rounds, tau {predicted:.3f} for {executed:.3f}", flush=True)
    return {
        "policy": policy.label(),
        "temperature": temperature,
        "rounds": rounds,
        "mismatches": wrong,
        "beyond_recording": replayed.missing,
        "tau": executed,
        "tau_predicted": predicted,
        "tau_error": predicted / executed - 1,
    }


def shortlists_fidelity(state: Path) -> dict[str, Any]:
    """Predicted against measured tokens/s of 26 shortlisted policies in three interleaved runs, a request's
    seconds the median of the three."""
    pair = load_pair(read_pair("demo"), device="cpu")
    drafts = [*pair.models]
    path = state / "shortlists-fidelity.db"
    path.unlink(missing_ok=True)
    store = stored(path)
    workload = load_workload(["demo"], limit=12)
    options = DecodeOptions(Sampling(), 48)
    recording, _, _ = prepared_trees(store, pair, workload, options, drafts)
    fits = Shortlisting.fit(store, recording, pair, drafts)
    trace = ranked_trace(store, pair, recording, fits)
    find = fitted(store)
    policies = fidelity_policies(fits, list(pair.drafts), list(pair.heads))

    said = trace.trajectories
    profile = measure_profile(pair, gamma_max=12, contexts=served_contexts(said), texts=whole_texts(said))
    encoded = encode(pair, workload, options)
    report = fidelity_report(pair, policies, encoded, trace, profile, what="shortlisted policies", artifacts=find)
    return {**report, "holds": report["median_error"] <= 0.05 and len(report["rows"]) >= 20}


def fidelity_policies(fits: Shortlisting, chains: Sequence[str], heads: Sequence[str]) -> list[Policy]:
    """Chains under every window, kind and several sizes, and trees, of language-model drafts and heads."""
    listed: list[tuple[Document, str, int]] = []
    for d, draft in enumerate(chains):
        for i, w in enumerate(WINDOWS):
            listed.append(({"draft": draft, "window": w}, KINDS[(i + d + 1) % 3], (4, 16, 32)[i // 3]))
    listed.append(({"draft": chains[0], **CHAINS[3]}, "frequency", 8))
    for i, draft in enumerate(heads):
        listed += [({"draft": draft, **CHAINS[n]}, KINDS[(i + n) % 3], 8) for n in (0, 2, 4)]
    for i, draft in enumerate((*chains, *heads)):
        listed.append((top_k(draft, 4, 4, 12), KINDS[i % 3], 8))
        listed.append((top_k(draft, 8, 5, 32), KINDS[(i + 1) % 3], 4))
    return [parse_policy({**body, "shortlist": fits.block(kind, body["draft"], part)}) for body, kind, part in listed]


CHECKS = {
    "shortlists-lossless": shortlists_lossless,
    "shortlists-parity": shortlists_parity,
    "shortlists-fidelity": shortlists_fidelity,
}

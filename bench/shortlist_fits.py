"""What the check of shortlists is made of: fits to one recording, and execution of shortlists of
equal mean size.

One recording of the demo workload at temperature 1 without drafts. Frequencies, clusters and
routers are fitted to its search part; what is executed or read is its test part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lab import CATEGORIES, Document, compare, demo, fixed, recorded, requests, say, stored, top_k

from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions, Encoded, encode
from spectune.optimizer.fit.dynaspec import fit_router
from spectune.optimizer.fit.fr_spec import fit_fr_spec
from spectune.optimizer.parts import split
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.fr_spec import frequency_budget
from spectune.traces.schema import Sampling, Workload
from spectune.traces.store import TraceStore
from spectune.traces.tables import Trajectory

CLUSTERS = 256
"""M: finer than the library's default of 64, so that shortlists of a twentieth of the vocabulary
are several clusters."""
STEPS = {"chain": 6, "tree": 4}
Budget = tuple[int, int, int]
"""k0, k1 and k_min of equation 3."""


@dataclass(frozen=True)
class Fits:
    """A pair, the part of a recording that nothing was fitted to, and ids of what was fitted: one
    order of tokens, and a router by draft."""

    pair: LoadedPair
    store: TraceStore
    workload: Workload
    test: tuple[Trajectory, ...]
    frequencies: str
    routers: dict[str, str]

    @property
    def find(self) -> Artifacts:
        return fitted(self.store)

    def encoded(self, category: str, limit: int, options: DecodeOptions) -> Encoded:
        """The first requests of a category in the test part."""
        ids = {t.request_id for t in self.test if t.category == category}
        found = [r for r in self.workload.requests if r.id in ids]
        return encode(self.pair, Workload("part", tuple(found[:limit])), options)

    def by_frequency(self, size: int) -> Document:
        return {"kind": "frequency", "size": size, "artifact": self.frequencies}

    def routed(self, draft: str, k0: int, k1: int, k_min: int) -> Document:
        sizes = {"k0": k0, "k1": k1, "k_min": k_min}
        return {"kind": "clusters", **sizes, "artifact": self.routers[draft]}

    def of_equal_size(
        self, draft: str, shape: str, budget: Budget, encoded: Encoded
    ) -> tuple[int, dict[str, Document | None]]:
        """The mean size that clusters of a budget have where they are executed, and shortlists of
        it by kind."""
        clusters = self.routed(draft, *budget)
        size = mean_size(self, drafting(draft, shape, clusters), encoded)
        steps = range(STEPS[shape])
        means = [np.mean([frequency_budget(t, k) for t in steps]) for k in range(4 * size)]
        k_max = int(np.abs(np.array(means) - size).argmin())
        position = {"kind": "position_frequency", "k_max": k_max, "artifact": self.frequencies}
        blocks = {"full": None, "frequency": self.by_frequency(size)}
        return size, {**blocks, "position_frequency": position, "clusters": clusters}


def fit(state: Path, drafts: Sequence[str], quick: bool) -> Fits:
    """Records the demo workload unless that was done, and fits everything to its search part."""
    pair, workload = demo(), requests(12 if quick else 150)
    store = stored(state / "shortlists.db")
    options = DecodeOptions(Sampling(1.0, seed=7), 16 if quick else 48)
    recording = recorded(store, pair, workload, options)
    texts = store.load(recording, []).trajectories
    parts = split([t.category for t in texts])
    test = tuple(texts[i] for i in sorted([*parts.race, *parts.confirm]))
    frequencies = fit_fr_spec(store, recording, pair).artifact
    clusters = 16 if quick else CLUSTERS
    routers = {d: fit_router(store, recording, pair, d, clusters=clusters).artifact for d in drafts}
    return Fits(pair, store, workload, test, frequencies, routers)


def drafting(draft: str, shape: str, shortlist: Document | None = None) -> Policy:
    """A chain or a small top-k tree."""
    blocks: Document = {} if shortlist is None else {"shortlist": shortlist}
    if shape == "chain":
        return parse_policy({"draft": draft, "window": fixed(STEPS[shape]), **blocks})
    return parse_policy(top_k(draft, 4, STEPS[shape], 16, **blocks))


def mean_size(fits: Fits, policy: Policy, encoded: Encoded) -> int:
    """Mean tokens of a draft step's shortlist, executed."""
    prepared = prepare_for(fits.pair, policy, artifacts=fits.find)
    decoder = Decoder(fits.pair, StaticSource(prepared), encoded.options.verifier)
    sizes: list[int] = []
    for _, request in encoded.items:
        for item in decoder.rounds(request):
            chosen = prepared.shortlists.chosen[: item.step.draft_steps]
            sizes += [len(support.ids) for support in chosen]
    return round(float(np.mean(sizes)))


def over_full(
    fits: Fits, cases: Sequence[tuple[str, str]], budget: Budget, quick: bool
) -> dict[str, Any]:
    """Greedy speed and tau of every kind of shortlist over the whole head's, executed in turn, and
    how many texts differ."""
    rows: list[dict[str, Any]] = []
    differ = 0
    for draft, shape in cases:
        for category in CATEGORIES[: 1 if quick else 3]:
            options = DecodeOptions(Sampling(), 8 if quick else 40)
            encoded = fits.encoded(category, 2 if quick else 6, options)
            size, blocks = fits.of_equal_size(draft, shape, budget, encoded)
            policies = {kind: drafting(draft, shape, block) for kind, block in blocks.items()}
            every = [AUTOREGRESSIVE, *policies.values()]
            compared = compare(fits.pair, every, encoded, artifacts=fits.find)
            differ += compared.texts.differ
            found = {kind: compared.outcomes[p.id].total for kind, p in policies.items()}
            whole = found["full"].mean_accepted_length
            for kind, policy in policies.items():
                tau = found[kind].mean_accepted_length
                row = {"category": category, "draft": draft, "shape": shape, "shortlist": kind}
                row |= {"size": size, "tau": tau}
                speed = compared.timings.ratio(policy.id, policies["full"].id)[0]
                rows.append({**row, "recovered": tau / whole, "over_full": speed})
                say(f"{row}: {100 * rows[-1]['recovered']:.1f}% of tau")

    def mean(kind: str, key: str) -> float:
        return float(np.exp(np.mean(np.log([r[key] for r in rows if r["shortlist"] == kind]))))

    said = ", ".join(
        f"{k} {100 * mean(k, 'recovered'):.1f}% at {mean(k, 'over_full'):.2f} x the speed"
        for k in blocks
        if k != "full"
    )
    share = float(np.mean([r["size"] for r in rows])) / fits.pair.target.vocab_size
    summary = f"tau recovered by {100 * share:.0f}% of {fits.pair.target.vocab_size} tokens: {said}"
    return {"differ": differ, "summary": summary, "rows": rows}

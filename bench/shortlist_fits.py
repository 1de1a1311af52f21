"""What the check of shortlists is made of: fits to one recording, execution with the sizes of shortlists, and equal mean sizes.

One recording of the demo workload at temperature 1 without drafts. Frequencies, clusters and routers are fitted to its search part; what
is executed or read is its test part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lab import Document, demo, fixed, requests, stored, top_k

from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions, Encoded, encode
from spectune.optimizer.fit.dynaspec import fit_router
from spectune.optimizer.fit.fr_spec import fit_fr_spec
from spectune.optimizer.record import RecordRequest, record, split
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import Round, StaticSource
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.dynaspec import cluster_budget
from spectune.runtime.policies.fr_spec import frequency_budget
from spectune.runtime.policies.prepare import prepare
from spectune.runtime.shortlists import Support
from spectune.traces.schema import Sampling, Trajectory, Workload
from spectune.traces.store import TraceStore

CLUSTERS = 256
"""M: finer than the library's default of 64, so that shortlists of 192 tokens are several clusters."""
NEW_TOKENS = 32
STEPS = {"chain": 6, "tree": 4}
LADDER = (1, 4, 12, 36, 96)
"""Clusters per step of the calibration runs."""


@dataclass(frozen=True)
class Fits:
    """A pair, a recording's two parts, and ids of what was fitted: one order of tokens, and a router by draft."""

    pair: LoadedPair
    store: TraceStore
    workload: Workload
    search: tuple[Trajectory, ...]
    test: tuple[Trajectory, ...]
    frequencies: str
    routers: dict[str, str]

    @property
    def find(self) -> Artifacts:
        return fitted(self.store)

    def encoded(self, part: Sequence[Trajectory], category: str, limit: int, options: DecodeOptions) -> Encoded:
        """The first requests of a category in a part of the recording."""
        ids = {t.request_id for t in part if t.category == category}
        found = [r for r in self.workload.requests if r.id in ids]
        return encode(self.pair, Workload("part", tuple(found[:limit])), options)

    def by_frequency(self, size: int) -> Document:
        return {"kind": "frequency", "size": size, "artifact": self.frequencies}

    def by_position(self, k_max: int) -> Document:
        return {"kind": "position_frequency", "k_max": k_max, "artifact": self.frequencies}

    def routed(self, draft: str, k0: int, k1: int, k_min: int) -> Document:
        return {"kind": "clusters", "k0": k0, "k1": k1, "k_min": k_min, "artifact": self.routers[draft]}


def fit(state: Path, drafts: Sequence[str], quick: bool) -> Fits:
    """Records the demo workload unless that was done, and fits everything to its search part."""
    pair, workload = demo(), requests(12 if quick else 150)
    store = stored(state / "shortlists.db")
    wanted = RecordRequest(workload, DecodeOptions(Sampling(1.0, seed=7), 16 if quick else 48), ())
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    recording = record(store, pair, wanted, plain, reuse_complete=True).id
    texts = store.load(recording, []).trajectories
    search, test = (tuple(texts[i] for i in part) for part in split([t.request_id for t in texts], [t.category for t in texts]))
    frequencies = fit_fr_spec(store, recording, pair).artifact
    routers = {d: fit_router(store, recording, pair, d, clusters=16 if quick else CLUSTERS).artifact for d in drafts}
    return Fits(pair, store, workload, search, test, frequencies, routers)


def drafting(draft: str, shape: str, shortlist: Document | None = None) -> Policy:
    """A chain or a small top-k tree."""
    blocks: Document = {} if shortlist is None else {"shortlist": shortlist}
    if shape == "chain":
        return parse_policy({"draft": draft, "window": fixed(STEPS[shape]), **blocks})
    return parse_policy(top_k(draft, 4, STEPS[shape], 16, **blocks))


# ------------------------------------------------------------------------------------------------ executing


@dataclass(frozen=True)
class Executed:
    """Tokens and rounds of each request, int64 [requests]; sizes of every step's shortlist, by its number in a round; the texts."""

    emitted: np.ndarray
    rounds: np.ndarray
    sizes: dict[int, list[int]]
    texts: list[list[int]]

    @property
    def tau(self) -> float:
        return float(self.emitted.sum() / self.rounds.sum())

    @property
    def size(self) -> float:
        """Mean tokens of a draft step's shortlist; 0 for the whole head."""
        return float(np.mean([s for found in self.sizes.values() for s in found])) if self.sizes else 0.0


def rounds_of(fits: Fits, policy: Policy, encoded: Encoded) -> Iterable[tuple[int, list[int], Round, list[Support]]]:
    """Decodes requests one by one: (request's number, text before the round, the round, its shortlists)."""
    prepared = prepare(policy, fits.pair.draft_names, artifacts=fits.find)
    decoder = Decoder(fits.pair, StaticSource(prepared), encoded.options.verifier)
    for n, (_, request) in enumerate(encoded.items):
        text = list(request.prompt_ids)
        for item in decoder.rounds(request):
            shortlists = decoder.backend.shortlists(prepared)
            yield n, list(text), item, [] if shortlists is None else shortlists.chosen[: item.step.draft_steps]
            text += item.tokens


def execute(fits: Fits, policy: Policy, encoded: Encoded) -> Executed:
    emitted, rounds = np.zeros((2, len(encoded.items)), dtype=np.int64)
    sizes: dict[int, list[int]] = {}
    texts: list[list[int]] = [[] for _ in encoded.items]
    for n, _, item, supports in rounds_of(fits, policy, encoded):
        texts[n] += item.tokens
        emitted[n] += item.step.emitted
        rounds[n] += 1
        for step, support in enumerate(supports):
            sizes.setdefault(step, []).append(support.size)
    return Executed(emitted, rounds, sizes, texts)


# ------------------------------------------------------------------------------------------------ equal sizes


def calibrated(fits: Fits, draft: str, shape: str, category: str, quick: bool) -> np.ndarray:
    """Mean tokens of a draft step's shortlist, [steps, 1 + k], for k clusters: executed on requests of the search part for the k of the
    ladder, interpolated between."""
    ladder = LADDER[:2] if quick else LADDER
    encoded = fits.encoded(fits.search, category, 2, DecodeOptions(Sampling(), NEW_TOKENS))
    known = []
    for k in ladder:
        sizes = execute(fits, drafting(draft, shape, fits.routed(draft, k, k, k)), encoded).sizes
        known.append([float(np.mean(sizes[t])) if t in sizes else math.nan for t in range(STEPS[shape])])
    ks = np.arange(ladder[-1] + 1)
    return np.stack([np.interp(ks, [0, *ladder], [0.0, *column]) for column in np.array(known).T])


def fixed_clusters(sizes: np.ndarray, size: int) -> tuple[int, int, int]:
    """The k whose mean shortlist is nearest to ``size`` tokens, three times."""
    k = 1 + int(np.abs(sizes.mean(0)[1:] - size).argmin())
    return k, k, k


def decaying_clusters(sizes: np.ndarray, size: int) -> tuple[int, int, int]:
    """k0, k1, k_min = 1 with k0 near 1.5 k1 (equation 3 wants k0 > k1) whose mean shortlist is nearest to ``size`` tokens."""
    steps, most = len(sizes), sizes.shape[1] - 1
    found = []
    for k1 in range(1, most):
        for k0 in range(max(k1 + 1, math.floor(1.4 * k1)), min(most, math.ceil(1.6 * k1) + 1) + 1):
            mean = np.mean([sizes[t, cluster_budget(t, k0, k1, 1)] for t in range(steps)])
            found.append((abs(float(mean) - size), k0, k1))
    _, k0, k1 = min(found)
    return k0, k1, 1


def decaying_tokens(steps: int, size: int) -> int:
    """k_max whose mean over the steps is nearest to ``size`` tokens."""
    return min(range(size, 4 * size), key=lambda k: abs(np.mean([frequency_budget(t, k) for t in range(steps)]) - size))

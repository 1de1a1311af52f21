"""Measuring what a draft's pass takes when it evaluates a shortlist in place of its whole output head (DynaSpec, section 4.3).

T_D(B) = T_emb + max(T_core, T_router) + T_head(B) by the shortlist's size B, whole passes: ``fixed`` with a head trimmed once (FR-Spec,
PA-FR), ``routed`` with gathered rows and what of the router does not hide behind the core, and ``full`` for comparison; all in turn.
Policies are charged the difference to a full pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from runtime.decoder import warmed_shortlists
from runtime.measuring import Bench, curve
from runtime.policies.document import ClustersShortlist, FixedWindow, FrequencyShortlist, Policy
from runtime.policies.dynaspec import Clusters
from runtime.policies.fr_spec import Frequencies
from runtime.policies.plan import Plan, prepare
from runtime.policies.router import Router, Routing
from runtime.shortlists import ShortlistRule
from traces.schema import CostCurve

SHARES: Final = (64, 16, 8, 4, 2, 1)
"""Sizes measured, as parts of the draft's output head."""
CLUSTERS: Final = 64
ROUTER_HIDDEN: Final = 128
CONTEXT: Final = 128
GAMMA: Final = 8


def measure_shortlists(bench: Bench, name: str) -> Mapping[str, CostCurve]:
    """Seconds of a draft's pass over the size of its shortlist, for ``fixed`` and ``routed`` ones, and ``full`` at the head's own size. A
    head smaller than :data:`CLUSTERS` has none."""
    pair = bench.pair
    output, model = pair.models[name].output, pair.models[name]
    rows = output.rows
    if rows < CLUSTERS:
        return {}
    gamma = min(GAMMA, bench.gamma_max)
    policy = Policy(draft=name, window=FixedWindow(gamma=gamma))
    full = prepare(policy, pair.draft_names)
    sizes = sorted({max(1, rows // share) for share in SHARES})
    variants: dict[tuple[str, int], Plan] = {("full", 0): full}
    vocab = np.arange(model.vocab_size)
    frequencies = Frequencies(np.concatenate([output.ids, np.setdiff1d(vocab, output.ids)]).astype(np.int64))
    routing = _routing(model.hidden_size, int(model.embedded(torch.zeros(1, dtype=torch.int64, device=pair.device)).shape[-1]), rows)
    routing = replace(routing, head=output.hash)
    for size in sizes:
        fixed = FrequencyShortlist(size=size, artifact="profile")
        variants["fixed", size] = _with(bench, full, ShortlistRule(fixed, name, frequencies=frequencies))
        k = max(1, round(CLUSTERS * size / rows))
        routed = ClustersShortlist(k0=k, k1=k, k_min=k, artifact="profile")
        variants["routed", size] = _with(bench, full, ShortlistRule(routed, name, routing=routing))
    context = min(CONTEXT, max(8, pair.max_positions - gamma - 40))
    text = bench.begin(context, policy)
    draft = bench.backend.draft_named(name)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in variants}
    keys = list(variants)
    for repeat in range(bench.repeats + 1):
        for n in range(len(keys)):
            key = keys[(n + repeat) % len(keys)]
            draft.rewind(len(text) - (2 if draft.reads_features else 1))
            seconds = bench.timed(lambda p=variants[key]: bench.backend.draft(p, gamma))  # type: ignore[misc]
            if repeat:
                times[key].append(seconds)
    curves = {}
    for kind in ("full", "fixed", "routed"):
        cells = {(size or rows, 0): [t / gamma for t in found] for (of, size), found in times.items() if of == kind}
        curves[kind] = curve(cells, [width for width, _ in cells], (0,))
    return curves


def _with(bench: Bench, full: Plan, rule: ShortlistRule) -> Plan:
    """A policy with a shortlist that is ready, so that what is timed is passes alone."""
    return replace(full, shortlist=rule, shortlists=warmed_shortlists(bench.pair, full, rule))


def _routing(hidden: int, embedding: int, rows: int) -> Routing:
    """A router of the usual size with random weights, over clusters of equal sizes."""
    generator = torch.Generator().manual_seed(0)
    w1 = torch.randn(ROUTER_HIDDEN, embedding + hidden, generator=generator) / np.sqrt(embedding + hidden)
    w2 = torch.randn(CLUSTERS, ROUTER_HIDDEN, generator=generator) / np.sqrt(ROUTER_HIDDEN)
    router = Router(w1, torch.zeros(ROUTER_HIDDEN), w2, torch.zeros(CLUSTERS))
    return Routing(router, Clusters.of_assignment(np.arange(rows) % CLUSTERS, CLUSTERS), "")

"""Policies executed on the same requests in random order, each on all of them: unlike in a race nobody is dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from spectune.optimizer.execute import Comparison, Encoded, Timings, counts_of, decoders_for, warm
from spectune.runtime.decoder import Decoded
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import Policy
from spectune.traces.schema import LatencyProfile, Outcome, RequestOutcome


def compare(
    pair: LoadedPair,
    policies: Sequence[Policy],
    encoded: Encoded,
    *,
    profile: LatencyProfile | None = None,
    clock: Callable[[], float] = time.perf_counter,
    artifacts: Artifacts | None = None,
    between: Callable[[int], None] = lambda done: None,
    each: Callable[[Policy, Decoded], None] = lambda policy, decoded: None,
    after_round: Callable[[], None] | None = None,
    seed: int = 0,
) -> Comparison:
    """Executes every policy once on every request, in an order drawn anew (by ``seed``) for each request.

    ``between`` is called after every request with how many are done, ``each`` with every execution, ``after_round`` after every round
    (in nobody's seconds). Windows that carry state keep one controller throughout. Raises PolicyError if a policy cannot run.
    """
    warm(pair, encoded)
    unique = list({p.id: p for p in policies}.values())
    decoders = decoders_for(pair, unique, encoded, profile, artifacts, clock)
    for decoder in decoders.values():
        decoder.after_round = after_round
    rows: dict[str, list[RequestOutcome]] = {p.id: [] for p in unique}
    rng = np.random.default_rng(seed)
    differ = 0
    for n, (item, request) in enumerate(encoded.items):
        texts = set()
        for policy in (unique[i] for i in rng.permutation(len(unique))):
            decoded = decoders[policy.id].decode(request, item.category, encoded.options.stop_strings)
            each(policy, decoded)
            texts.add(tuple(decoded.trajectory.output_ids.tolist()))
            rows[policy.id].append(RequestOutcome(item.id, item.category, counts_of(decoded.steps, decoded.seconds)))
        differ += len(texts) > 1
        between(n + 1)
    outcomes = {p.id: Outcome(p.label(), "executed", tuple(rows[p.id])) for p in unique}
    timings = Timings({name: np.array([[r.counts.seconds] for r in o.per_request]) for name, o in outcomes.items()})
    return Comparison(outcomes, {p.id: p for p in unique}, differ, timings, tuple(outcomes))

"""The verifier ``rejection`` beside ``coupled``, above temperature 0: its best chain, predicted on
texts that ``coupled`` decoded, then executed.

Texts of both verifiers have the same distribution. Where rejection emits x, it kept the draft's
proposal with probability min(1, q(x)/p(x)), whatever else was drafted: that is recorded with every
sampled text (:attr:`traces.schema.Trie.accept`), so a replay that draws by it accepts as rejection
does, in distribution."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from statistics import fmean
from typing import Final

import numpy as np

from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.tuning.confirmation import ends_of
from spectune.optimizer.tuning.native_bench import NativeBench
from spectune.optimizer.tuning.timings import Timings
from spectune.optimizer.tuning.tuned import NamedPolicy, RejectionChain, RejectionNotTried
from spectune.runtime.policies.document import FixedWindow, Policy
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import Outcome

DRAWS: Final = 8
"""Replays that a prediction is the mean of, each with draws of its own."""
BUDGET_SHARE: Final = 0.1
"""Time to execute it in, beyond that of race and confirmation, as a part of it."""


def rejection_chain(
    bench: NativeBench,
    beside: Policy,
    *,
    gamma_max: int,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = silent,
) -> RejectionChain | RejectionNotTried:
    """The best chain of at most ``gamma_max`` tokens by replay of the search part, executed in
    turns with ``beside`` on the part that confirms, each request once, at least one, while
    ``budget_s`` lasts; or why there is none. ``bench`` has texts of the verifier ``coupled``."""
    try:
        benches = rejection_benches(bench, clock)
        chain = best_chain(benches, gamma_max)
        outcomes = _executed((benches[0], chain), (bench, beside), budget_s, clock, progress)
        replays = [each.predict(chain, "confirm") for each in benches]
    except (PolicyError, TraceError) as error:
        return RejectionNotTried(not_tried=str(error))
    seconds = {
        name: np.array([[r.counts.seconds / r.counts.emitted_tokens] for r in outcome.per_request])
        for name, outcome in zip(("rejection", "coupled"), outcomes, strict=True)
    }
    used = len(outcomes[0].per_request)
    groups, predicted = bench.groups("confirm")[:used], None
    with suppress(PolicyError, TraceError):  # it raced without a prediction
        of_beside = bench.predict(beside, "confirm").costs[:used]
        gains = [np.log(of_beside / replay.costs[:used]) for replay in replays]
        predicted = float(np.exp(np.mean(gains)))
    expected = [replay.result.outcome() for replay in replays]
    taus = [
        replace(each, per_request=each.per_request[:used]).total.mean_accepted_length
        for each in expected
    ]
    ratio = Timings(seconds, by_size=False, groups=groups).ratio("rejection", "coupled")
    return RejectionChain(
        policy=chain,
        beside=NamedPolicy(policy=beside),
        predicted_ratio=predicted,
        executed_ratio=ratio[0],
        executed_interval=ends_of(ratio),
        predicted_mean_accepted_length=fmean(taus),
        executed_mean_accepted_length=outcomes[0].total.mean_accepted_length,
        requests=used,
    )


def rejection_benches(
    bench: NativeBench, clock: Callable[[], float] = time.perf_counter
) -> list[NativeBench]:
    """The bench with the same texts as the verifier ``rejection`` may have decoded them, once for
    each of :data:`DRAWS`. Raises PolicyError where no draft can be verified so, TraceError where
    acceptance probabilities were not recorded."""
    pair, trace = bench.pair, bench.trace
    if not pair.drafts:
        raise PolicyError("it verifies chains of language models, and no draft of the pair is one")
    for draft in pair.drafts:
        if any(len(p.trie.accept) < p.positions for p in trace.panoramas[draft]):
            raise TraceError(
                f"the recording holds no acceptance probabilities of draft {draft!r}; record anew"
            )
    texts = [replace(text, verifier="rejection") for text in trace.trajectories]
    whole = ReplayTrace(texts, {draft: trace.panoramas[draft] for draft in pair.chain_drafts})
    return [
        NativeBench(pair, whole.drawn(seed), bench.parts, bench.profile, clock=clock)
        for seed in range(DRAWS)
    ]


def best_chain(benches: Sequence[NativeBench], gamma_max: int) -> Policy:
    """The chain with a fixed window that is fastest on the search part, by the mean over benches
    (:func:`rejection_benches`)."""
    chains = [
        Policy(draft=draft, window=FixedWindow(gamma=gamma))
        for draft in benches[0].pair.chain_drafts
        for gamma in range(1, gamma_max + 1)
    ]
    return max(chains, key=lambda c: fmean(b.predict(c, "search").speed for b in benches))


def _executed(
    one: tuple[NativeBench, Policy],
    other: tuple[NativeBench, Policy],
    budget_s: float,
    clock: Callable[[], float],
    progress: Progress,
) -> list[Outcome]:
    """What two policies did on the same requests of the part that confirms, each on its bench; who
    goes first alternates."""
    units = one[0].units("confirm")
    with ExitStack() as stack:
        pairs = [
            (stack.enter_context(bench.execute([policy], "confirm")), policy.id)
            for bench, policy in (one, other)
        ]
        costs = np.full((2, units, 1), np.nan)
        began = clock()
        for n in range(units):
            if n and clock() - began > budget_s:
                break
            for which in (0, 1) if n % 2 == 0 else (1, 0):
                execution, name = pairs[which]
                costs[which, n] = execution(name, n)
            progress("execute rejection", n + 1, units)
        return [run.outcome(name, of) for (run, name), of in zip(pairs, costs, strict=True)]

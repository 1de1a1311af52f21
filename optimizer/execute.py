"""Executing policies for real: one policy over a workload, or several interleaved so that they share the machine's moods."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.decoder import Decoded, Decoder
from runtime.loading import LoadedPair
from runtime.loop import DecodeRequest, PolicySource, StaticSource
from runtime.policies.document import Policy
from runtime.policies.prepared import QTables, prepare
from traces.schema import Counts, LatencyProfile, Outcome, Request, RequestOutcome, Sampling, Step, Trajectory, Verifier, Workload


@dataclass(frozen=True)
class DecodeOptions:
    """How requests are decoded: everything their text depends on beside pair and prompt."""

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    verifier: Verifier = "coupled"
    stop_strings: tuple[str, ...] = ()
    chat: bool = True


def counts_of(steps: Sequence[Step], seconds: float) -> Counts:
    """Sums of one request's rounds."""
    return Counts(
        requests=1,
        rounds=len(steps),
        emitted_tokens=sum(s.emitted for s in steps),
        accepted_tokens=sum(s.accepted for s in steps),
        drafted_tokens=sum(s.drafted for s in steps),
        draft_steps=sum(s.draft_steps for s in steps),
        verified_tokens=sum(s.verified for s in steps),
        seconds=seconds,
    )


@dataclass(frozen=True)
class Encoded:
    """A workload with its prompts as token ids, checked against the pair's context before anything is decoded."""

    items: tuple[tuple[Request, DecodeRequest], ...]
    options: DecodeOptions


def encode(pair: LoadedPair, workload: Workload, options: DecodeOptions) -> Encoded:
    """Tokenises every prompt. Raises WorkloadError for the first that is empty or does not fit."""
    decoder = Decoder(pair, StaticSource(prepare(Policy(), pair.draft_names)), options.verifier)
    items = []
    for item in workload.requests:
        ids = pair.encode_request(item, chat=options.chat)
        items.append((item, decoder.request(item, ids, options.sampling, options.max_new_tokens, options.stop_strings)))
    return Encoded(tuple(items), options)


def encode_recorded(pair: LoadedPair, trajectories: Sequence[Trajectory], chat: bool = True) -> Encoded:
    """The requests of recorded trajectories, ready to be decoded again: equal prompts, sampling, budgets."""
    first = trajectories[0]
    options = DecodeOptions(first.sampling, first.max_new_tokens, first.verifier, first.stop_strings, chat)
    decoder = Decoder(pair, StaticSource(prepare(Policy(), pair.draft_names)), options.verifier)
    items = []
    for t in trajectories:
        item = Request(t.request_id, t.category, ("",))
        items.append((item, decoder.request(item, t.prompt_ids.tolist(), t.sampling, t.max_new_tokens, t.stop_strings)))
    return Encoded(tuple(items), options)


def run(
    pair: LoadedPair,
    source: PolicySource,
    encoded: Encoded,
    *,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = 1,
) -> Iterator[Decoded]:
    """Decodes every request in order under a policy source, yielding each as it ends. ``warm_up`` requests are decoded before,
    by autoregression, so that the first figure is not the first touch of the weights."""
    warm(pair, encoded, warm_up)
    decoder = Decoder(pair, source, encoded.options.verifier, clock)
    for item, request in encoded.items:
        yield decoder.decode(request, item.category, encoded.options.stop_strings)


def warm(pair: LoadedPair, encoded: Encoded, count: int = 1) -> None:
    """Decodes a few tokens with every draft, so that first touches and compilation are not charged to the first request."""
    policies = [
        Policy(),
        *(Policy.model_validate({"draft": d, "window": {"kind": "fixed", "gamma": 3}}) for d in pair.draft_names),
    ]
    for _, request in encoded.items[:count]:
        for policy in policies:
            decoder = Decoder(pair, StaticSource(prepare(policy, pair.draft_names)), encoded.options.verifier)
            for n, _ in enumerate(decoder.rounds(request)):
                if n >= 3:
                    break


def outcome(policy: str, decoded: Sequence[Decoded]) -> Outcome:
    """What executed requests cost and yielded."""
    return Outcome(
        policy,
        "executed",
        tuple(RequestOutcome(d.trajectory.request_id, d.trajectory.category, counts_of(d.steps, d.seconds)) for d in decoded),
    )


@dataclass(frozen=True)
class Comparison:
    """Policies executed on the same requests in interleaved blocks. ``texts_differ`` counts requests whose tokens were not equal
    under every policy: 0 unless arithmetic is of low precision."""

    outcomes: dict[str, Outcome]
    policies: dict[str, Policy]
    texts_differ: int

    def ratio(self, policy_id: str, base_id: str, *, resamples: int = 2000, seed: int = 0) -> tuple[float, float, float]:
        """(speed-up of one policy over another, 95% interval): total tokens/s, bootstrapped over requests, pairs kept together."""
        one, other = self.outcomes[policy_id].per_request, self.outcomes[base_id].per_request
        a = np.array([r.counts.seconds for r in one])
        b = np.array([r.counts.seconds for r in other])
        pick = np.random.default_rng(seed).integers(0, len(a), size=(resamples, len(a)))
        ratios = b[pick].sum(1) / a[pick].sum(1)
        low, high = np.quantile(ratios, [0.025, 0.975])
        return float(b.sum() / a.sum()), float(low), float(high)


def compare(
    pair: LoadedPair,
    policies: Sequence[Policy],
    encoded: Encoded,
    *,
    profile: LatencyProfile | None = None,
    repeats: int = 1,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
    q_tables: QTables | None = None,
    between: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Executes every policy on every request, request by request in rotating order, so that a slow minute of the machine falls on
    all of them alike.

    With ``repeats`` a request's seconds are its fastest. Windows that carry state keep one controller for the whole comparison.
    ``between`` is called after every request, with how many are done (to measure costs in the same minutes, say).
    After ``budget_s`` no further request is begun (at least one is executed). Raises PolicyError if a policy cannot run.
    """
    warm(pair, encoded)
    unique = list({p.id: p for p in policies}.values())
    decoders = {
        p.id: Decoder(
            pair, StaticSource(prepare(p, pair.draft_names, profile=profile, q_tables=q_tables)), encoded.options.verifier, clock
        )
        for p in unique
    }
    collected: dict[str, list[RequestOutcome]] = {p.id: [] for p in unique}
    began, differ = clock(), 0
    for n, (item, request) in enumerate(encoded.items):
        if n and budget_s is not None and clock() - began > budget_s:
            break
        best: dict[str, tuple[float, Decoded]] = {}
        for repeat in range(repeats):
            turn = (n * repeats + repeat) % len(unique)
            for policy in unique[turn:] + unique[:turn]:
                decoded = decoders[policy.id].decode(request, item.category, encoded.options.stop_strings)
                before = best.get(policy.id)
                if before is None or decoded.seconds < before[0]:
                    best[policy.id] = (decoded.seconds, decoded)
        texts = {tuple(d.trajectory.output_ids.tolist()) for _, d in best.values()}
        differ += len(texts) > 1
        for policy in unique:
            seconds, decoded = best[policy.id]
            collected[policy.id].append(RequestOutcome(item.id, item.category, counts_of(decoded.steps, seconds)))
        progress(n + 1, len(encoded.items))
        between(n + 1)
    outcomes = {p.id: Outcome(p.label(), "executed", tuple(collected[p.id])) for p in unique}
    return Comparison(outcomes, {p.id: p for p in unique}, differ)

"""Executing policies for real: one policy over a workload, or several on one request after the
other."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from spectune import settings
from spectune.engines.engine import Load
from spectune.optimizer.decoder_engine import LoadQueue
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.runtime.cuda.graphs import prepare_graphs
from spectune.runtime.decoder import Decoded, Decoder, prepare_for, trajectory_of
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import DecodeRequest, PolicySource, StaticSource
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AUTOREGRESSIVE, FixedWindow, Policy
from spectune.runtime.policies.plan import Plan, prepare
from spectune.traces.conversations import conversations, conversations_of
from spectune.traces.cost_table import FloatArray
from spectune.traces.schema import (
    Counts,
    Outcome,
    Request,
    RequestOutcome,
    Sampling,
    Step,
    Tokens,
    Verifier,
    Workload,
)
from spectune.traces.tables import LatencyProfile, Trajectory


@dataclass(frozen=True)
class DecodeOptions:
    """How requests are decoded: everything their text depends on beside pair and prompt."""

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    verifier: Verifier = "coupled"
    stop_strings: tuple[str, ...] = ()
    chat: bool = True

    @classmethod
    def of(cls, s: settings.SamplingSettings) -> DecodeOptions:
        """What settings say."""
        law = Sampling(s.temperature, s.top_k, s.top_p, s.seed)
        return cls(law, s.max_new_tokens, s.verifier, s.stop, s.chat)

    def most_tokens(self, request: Request) -> int:
        """The most new tokens of a request, which may ask for fewer than others."""
        most, own = self.max_new_tokens, request.max_new_tokens
        return most if own is None else min(most, own)


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
        prompt_steps=sum(s.reads_prompt for s in steps),
    )


def first_token_s(steps: Sequence[Step], seconds: float) -> float:
    """Seconds until one request's first tokens are there: all but those of its later rounds."""
    return seconds - sum(s.round_s for s in steps[1:])


@dataclass(frozen=True)
class Encoded:
    """A workload with its prompts as token ids, checked against the pair's context before anything
    is decoded."""

    items: tuple[tuple[Request, DecodeRequest], ...]
    options: DecodeOptions

    @property
    def longest(self) -> int:
        """Tokens that the longest text can have, the one behind its end included; 0 without
        requests."""
        sizes = (len(r.prompt_ids) + r.max_new_tokens + 1 for _, r in self.items)
        return max(sizes, default=0)


def encode(
    pair: LoadedPair,
    workload: Workload,
    options: DecodeOptions,
    drafts: Collection[str] | None = None,
) -> Encoded:
    """Tokenises every prompt. Raises WorkloadError for the first that is empty or does not fit the
    target and the ``drafts`` that are used (None: all of the pair's)."""
    used = pair.draft_names if drafts is None else drafts
    decoder, items = _decoder(pair, options.verifier), []
    for item in workload.requests:
        ids, most = pair.encode_request(item, chat=options.chat), options.most_tokens(item)
        stops = tuple(dict.fromkeys((*options.stop_strings, *item.stop)))
        request = decoder.request(item, ids, options.sampling, most, stops, drafts=used)
        items.append((item, request))
    return Encoded(tuple(items), options)


def _decoder(pair: LoadedPair, verifier: Verifier, policy: Policy = AUTOREGRESSIVE) -> Decoder:
    return Decoder(pair, StaticSource(prepare(policy, pair.draft_names)), verifier)


def encode_recorded(pair: LoadedPair, trajectories: Sequence[Trajectory]) -> Encoded:
    """The requests of recorded trajectories, ready to be decoded again: equal prompts, sampling,
    budgets."""
    first = trajectories[0]
    options = DecodeOptions(
        first.sampling, first.max_new_tokens, first.verifier, first.stop_strings
    )
    decoder = _decoder(pair, first.verifier)
    items = []
    for t in trajectories:
        item, ids = Request(t.request_id, t.category), t.prompt_ids.tolist()
        how = (t.sampling, t.max_new_tokens, t.stop_strings)
        items.append((item, decoder.request(item, ids, *how)))
    return Encoded(tuple(items), options)


def run(pair: LoadedPair, source: PolicySource, encoded: Encoded) -> Iterator[Decoded]:
    """Decodes every request in order under a policy source, yielding each as it ends; before them a
    few tokens, so that the first figure is not the first touch of the weights."""
    warm(pair, encoded)
    prepare_graphs(pair, source.current())
    decoder = Decoder(pair, source, encoded.options.verifier)
    for item, request in encoded.items:
        yield decoder.decode(request, item.category)


@dataclass
class _Seen:
    """A source, and the plan that it had last."""

    source: PolicySource
    plan: Plan | None = None

    def current(self) -> Plan:
        self.plan = self.source.current()
        return self.plan


def run_together(
    pair: LoadedPair, source: PolicySource, encoded: Encoded, clients: int
) -> Iterator[Decoded]:
    """Decodes requests under a policy source, ``clients`` at a time, each sending its next when its
    last has ended; yields each as it ends. Its seconds are its share of those that passed; its
    rounds say when it came and when they ended. Raises PolicyError for a policy, or a verifier, of
    one request at a time."""
    warm(pair, encoded)
    seen = _Seen(source)
    decoder = Decoder(pair, seen, encoded.options.verifier, seats=clients)
    asked = [request for _, request in encoded.items if request.max_new_tokens]
    for item, request in encoded.items:
        if not request.max_new_tokens:  # a text without rounds
            text = trajectory_of(request, [], "length", item.category)
            yield Decoded(text, (), 0.0, ((0, source.current()),))
    queue = LoadQueue(asked, Load(clients), decoder.clock)
    number = {request.id: n for n, (_, request) in enumerate(encoded.items)}
    place = {request.id: n for n, request in enumerate(asked)}
    steps: list[list[Step]] = [[] for _ in number]
    tokens: list[list[int]] = [[] for _ in number]
    plans: list[list[tuple[int, Plan]]] = [[] for _ in number]
    seconds, before_s = [0.0] * len(number), 0.0
    for rounds in decoder.steps(queue):
        ended_s = decoder.clock() - queue.began
        share, before_s = (ended_s - before_s) / len(rounds), ended_s
        for one in rounds:
            n, step = number[one.request.id], one.step
            plan = seen.plan
            is_new = not plans[n] or plans[n][-1][1] is not plan
            # What is refused by several requests at once is not what decoded.
            if plan and is_new and step.policy in {each.policy_id for each in plan.plans}:
                plans[n].append((len(steps[n]), plan))
            arrived_s = queue.arrived_s[place[one.request.id]]
            step = step._replace(batch=len(rounds), arrived_s=arrived_s, ended_s=ended_s)
            steps[n].append(step)
            tokens[n] += one.tokens
            seconds[n] += share
        for one in rounds:
            if one.finish is not None:
                queue.answered()
                n = number[one.request.id]
                item, request = encoded.items[n]
                text = trajectory_of(request, tokens[n], one.finish, item.category)
                yield Decoded(text, tuple(steps[n]), seconds[n], tuple(plans[n]))


WARM_TOKENS = 64
"""Tokens of a prompt that are read before anything is timed."""


def warm(pair: LoadedPair, encoded: Encoded) -> None:
    """Makes room for the longest text, and decodes a few tokens after the beginning of the first
    prompt with every draft, so that first touches and compilation are not charged to it."""
    pair.reserve(encoded.longest)
    options = encoded.options
    rejects = options.verifier == "rejection" and not options.sampling.greedy
    drafts = pair.chain_drafts if rejects else pair.draft_names
    policies = [AUTOREGRESSIVE, *(Policy(draft=d, window=FixedWindow(gamma=3)) for d in drafts)]
    for _, first in encoded.items[:1]:
        request = replace(first, prompt_ids=first.prompt_ids[:WARM_TOKENS])
        for policy in policies:
            list(islice(_decoder(pair, options.verifier, policy).rounds(request), 4))


PROBE_ROUNDS, PROBE_PROMPT, PROBES = 20, 16, 8
"""Rounds of the fixed probe, tokens of its prompt, and how often it is repeated at most."""
PROBE_AGREES = 0.04
"""The probe is repeated until two in turn are so near each other: the first passes after other work
are slower."""


def probe_s(pair: LoadedPair, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """Median seconds of a pass of the target over one token, of a fixed text that it goes on with
    for :data:`PROBE_ROUNDS`: how fast the machine is now. None where the text ends at once."""
    decoder = Decoder(pair, StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names)), clock=clock)
    ids = [1 + n % (pair.target.vocab_size - 1) for n in range(PROBE_PROMPT)]
    request = decoder.request(Request("probe", ""), ids, Sampling(), PROBE_ROUNDS + 1, drafts=())
    request, before, now = replace(request, eos_ids=frozenset()), np.inf, np.inf
    for _ in range(PROBES):
        rounds = [r.step.round_s for r in decoder.rounds(request)][1:]
        if not rounds:
            return None
        before, now = now, float(np.median(rounds))
        if abs(now / before - 1) < PROBE_AGREES:
            break
    return now


def outcome(policy: str, decoded: Sequence[Decoded]) -> Outcome:
    """What executed requests cost and yielded."""
    rows, numbers = [], conversations_of([d.trajectory for d in decoded]).tolist()
    for d, n in zip(decoded, numbers, strict=True):
        counts, first_s = counts_of(d.steps, d.seconds), first_token_s(d.steps, d.seconds)
        text = d.trajectory
        rows.append(RequestOutcome(text.request_id, text.category, counts, first_s, n))
    return Outcome(policy, "executed", tuple(rows))


class _Execution(NamedTuple):
    """Of one request under one policy: its tokens, counts, and seconds to the first token."""

    policy: str
    tokens: tuple[int, ...]
    counts: Counts
    first_s: float


class Executor:
    """Decodes one request (by number) of a workload under one policy (by id), and keeps what that
    did. Requests come in order, pass by pass: windows that learn carry what they learned from
    request to request, as in a replay, and start anew with each pass, as they would have learned
    these very requests. Raises PolicyError if a policy cannot run."""

    def __init__(
        self,
        pair: LoadedPair,
        policies: Iterable[Policy],
        encoded: Encoded,
        *,
        profile: LatencyProfile | None = None,
        artifacts: Artifacts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        warm(pair, encoded)
        self.policies, self.encoded, self._clock = {p.id: p for p in policies}, encoded, clock
        verifier, self._latest = encoded.options.verifier, dict[str, int]()
        """The request that each policy decoded last."""
        self._decoders = {}
        for name, policy in self.policies.items():
            plan = prepare_for(pair, policy, profile=profile, artifacts=artifacts)
            self._decoders[name] = Decoder(pair, StaticSource(plan), verifier, clock)
        # Executions by request.
        self._executions: list[list[_Execution]] = [[] for _ in encoded.items]
        self._dtype = str(pair.target.dtype).removeprefix("torch.")

    def __call__(self, policy_id: str, unit: int) -> float:
        """Its seconds."""
        item, request = self.encoded.items[unit]
        decoder = self._decoders[policy_id]
        if unit <= self._latest.get(policy_id, -1):
            decoder.forget()
        self._latest[policy_id] = unit
        decoded = decoder.decode(request, item.category)
        counts = counts_of(decoded.steps, decoded.seconds)
        first_s = first_token_s(decoded.steps, decoded.seconds)
        tokens = tuple(decoded.trajectory.output_ids.tolist())
        self._executions[unit].append(_Execution(policy_id, tokens, counts, first_s))
        return decoded.seconds

    @property
    def texts(self) -> ComparedTexts:
        """Requests that were executed more than once, beside autoregression executed again."""
        texts = [[e.tokens for e in executions] for executions in self._executions]
        plain = [
            [e.tokens for e in executions if e.policy == AUTOREGRESSIVE.id]
            for executions in self._executions
        ]
        several, repeated = ([t for t in group if len(t) > 1] for group in (texts, plain))
        return ComparedTexts(
            sum(len(set(t)) > 1 for t in several),
            len(several),
            self._dtype,
            sum(len(set(t)) > 1 for t in repeated),
            len(repeated),
        )

    def outcome(self, policy_id: str, costs: FloatArray) -> Outcome:
        """What a policy did; a request's seconds are the median of its executions."""
        rows, texts = [], list[Tokens]()
        for n, (item, request) in enumerate(self.encoded.items):
            executions = [e for e in self._executions[n] if e.policy == policy_id]
            if executions:
                seconds = float(np.nanmedian(costs[n]))
                counts = replace(executions[0].counts, seconds=seconds)
                first_s = float(np.median([e.first_s for e in executions]))
                rows.append(RequestOutcome(item.id, item.category, counts, first_s))
                ids = request.prompt_ids, executions[0].tokens
                texts.append(Tokens(*(np.array(part, np.int32) for part in ids)))
        numbers = conversations([row.request_id for row in rows], texts).tolist()
        rows = [replace(row, conversation=n) for row, n in zip(rows, numbers, strict=True)]
        return Outcome(self.policies[policy_id].label(), "executed", tuple(rows))

"""Decoding with models: the loop's backend, and the decoder that serves requests with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectune.runtime.cache import Branches, Extents, PassTokens, apart
from spectune.runtime.cuda.graphs import prepare_graphs
from spectune.runtime.drafts.eagle import EagleDraft, Features
from spectune.runtime.drafts.language_model import LanguageModelDraft
from spectune.runtime.drafts.ngram import NgramDraft
from spectune.runtime.drafts.protocol import Draft, DraftContext, Drafted, DraftRequest
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import (
    DecodeRequest,
    PolicySource,
    RequestQueue,
    Round,
    TokenLogprobs,
    Turn,
    Verified,
    decode_rounds,
    decode_steps,
)
from spectune.runtime.perplexity import HEAD_ROWS, log_perplexity
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import EXPANDED_LIMIT, NODE_LIMIT, Policy
from spectune.runtime.policies.plan import Plan, prepare
from spectune.runtime.sampling import Noise, sample, sample_rows
from spectune.runtime.session import Sessions
from spectune.runtime.shortlists import Shortlists
from spectune.runtime.trees.draft import ancestors
from spectune.runtime.verification import accept, accept_chain, verify_rejection
from spectune.traces.errors import PairError, PolicyError, WorkloadError, naming
from spectune.traces.schema import Finish, Request, Sampling, Step, Tokens, Verifier, request_seed
from spectune.traces.tables import LatencyProfile, Trajectory


@dataclass(eq=False)
class Seat:
    """A request that runs: its ``text``, at most ``capacity`` - 1 tokens in the extent that begins
    at slot ``base``; the target has read ``read`` tokens of the prompt.

    ``fitting`` are the drafts whose context holds it: a policy may be swapped for one whose draft
    holds less, and then nothing is drafted until the request ends. ``readings`` are those of the
    drafts that follow its text."""

    request: DecodeRequest
    base: int
    capacity: int
    fitting: frozenset[str]
    noise: Noise | None
    features: Features
    text: list[int]
    read: int = 0
    rounds: int = 0
    drafting: str = ""
    readings: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    """Where its tokens begin among those of the target's last pass."""


class ModelBackend:
    """The loop's backend over a loaded pair, for ``seats`` requests at once.

    Each owns an extent of the models' slots: prompt, new tokens, one more, and behind them room for
    a tree's nodes. Caches of ``slots`` (None: that grow, where passes are captured anew) are reused
    from request to request. Raises PairError for several seats where they are not supported yet."""

    def __init__(self, pair: LoadedPair, seats: int = 1, slots: int | None = None) -> None:
        if seats > 1 and pair.device.type not in ("cpu", "cuda"):
            raise PairError(f"{seats} requests at once: models on {pair.device.type} decode one")
        self.pair, self.seats, self.slots = pair, seats, slots
        models = {name: LanguageModelDraft(model) for name, model in pair.drafts.items()}
        heads = {name: EagleDraft(head, pair.target) for name, head in pair.heads.items()}
        self._drafts: dict[str, Draft] = {**models, **heads, "ngram": NgramDraft()}
        self._seats: dict[Turn, Seat] = {}
        self._extents = Extents(0)
        self._tapped = pair.target.tapped
        """What heads read of the target's last pass, [tokens, width]."""
        if slots is not None:
            self._grow(slots)
        self._prefilled: DecodeRequest | None = None
        """The request whose prompt was the last that the target read."""

    def log_perplexity(self, request: DecodeRequest) -> float:
        """The logarithm of a prompt's perplexity under the target, by its prefill, which
        :meth:`read_prompt` does not repeat. Of one request at a time."""
        self.pair.reserve(_capacity(request))
        self._prefilled = request
        return log_perplexity(self.pair.target, request.prompt_ids)

    def too_large(self, request: DecodeRequest) -> str:
        """Why a request fits no extent; empty where it does."""
        needed = _capacity(request) + EXPANDED_LIMIT
        if self.slots is None or needed <= self.slots:
            return ""
        return (
            f"{len(request.prompt_ids)} prompt tokens + {request.max_new_tokens} new ones need "
            f"{needed} slots, {EXPANDED_LIMIT} of them for trees; there are {self.slots}"
        )

    def admit(self, turn: Turn, plan: Plan) -> bool:
        request, target = turn.request, self.pair.target
        if len(self._seats) == self.seats:
            return False
        if problem := self.too_large(request):
            raise WorkloadError(f"request {request.id}: {problem}")
        capacity = _capacity(request)
        for model in (target, *self.pair.models.values()):
            if model.graphs is not None:
                model.graphs.seats = self.seats
        slots, others = target.cache.capacity, len(self._seats)
        base = self._take(capacity)
        if base is None:
            return False
        sampled = not request.sampling.greedy
        seat = self._seats[turn] = Seat(
            request,
            base,
            capacity,
            frozenset(
                name for name in self._drafts if capacity - 1 <= self.pair.context([name]).positions
            ),
            Noise(request.seed, target.vocab_size, target.device) if sampled else None,
            Features(target, base, capacity),
            list(request.prompt_ids),
        )
        prepare_graphs(self.pair, plan, sampling=request.sampling, rejects=request.rejects)
        if others and target.cache.capacity > slots:  # what those that run need is forgotten, too
            prepare_graphs(self.pair, plan)
        name = plan.policy.draft
        if name in seat.fitting:
            if self._drafts[name].reads_features:
                seat.features.begin()
            seat.readings[name] = self._drafts[name].begin(base, seat.features)
        return True

    def _take(self, capacity: int) -> int | None:
        """Where a request's extent begins; None: there is none now."""
        if not self._seats and self.slots is None:
            self._extents.clear()
            more = self.seats - 1 if self.pair.target.graphs is not None else 0
            # Nothing is cached that must be kept. Captured passes do not outlast a cache that
            # grows, so with them there is room for as many requests of the kind at once.
            try:
                self.pair.reserve(capacity + more * (capacity + EXPANDED_LIMIT))
            except torch.OutOfMemoryError:
                self.pair.reserve(capacity)
            texts = [self.pair.target.cache.capacity - NODE_LIMIT]
            texts += [m.cache.capacity - EXPANDED_LIMIT for m in self.pair.models.values()]
            self._extents.capacity = min(texts) + EXPANDED_LIMIT
        base = self._extents.take(capacity + EXPANDED_LIMIT)
        if base is None and self.slots is None:
            self._grow(self._extents.capacity + capacity + EXPANDED_LIMIT)
            base = self._extents.take(capacity + EXPANDED_LIMIT)
        return base

    def _grow(self, slots: int) -> None:
        """Makes room for more, and keeps what is cached."""
        for model in (self.pair.target, *self.pair.models.values()):
            model.reserve(slots, keep=True)
        self._extents.capacity = slots

    def read_prompt(self, turn: Turn, count: int) -> None:
        """The target reads on, and so does the draft of the policy that was in force at first; of a
        prompt that was read last, all at once."""
        seat, target = self._seats[turn], self.pair.target
        end = len(seat.text) - 1
        if seat.request is not self._prefilled:
            end = seat.read + count
            ids = torch.tensor(seat.text[seat.read : end], device=target.device)
            target.read(ids, seat.read, self._scorer(seat), base=seat.base)
        if end > seat.read:
            seat.features.put(seat.read, target.tapped)
        self._prefilled, seat.read = None, end
        for name, reading in seat.readings.items():
            self._drafts[name].catch_up(reading, seat.text[: end + 1])

    def _scorer(self, seat: Seat) -> Callable[[int, Tensor], None]:
        """Tells a request that asks for it how probable its prompt's tokens are."""
        tell = seat.request.scores_prompt

        def score(first: int, states: Tensor) -> None:
            if tell is not None:
                for at, rows in enumerate(torch.split(states, HEAD_ROWS)):
                    begin = seat.read + first + at * HEAD_ROWS + 1
                    following = seat.text[begin : begin + len(rows)]
                    tell(_logprobs(self.pair.target.head(rows), following, seat.request))

        return score

    def release(self, turn: Turn) -> None:
        self._extents.give(self._seats.pop(turn).base)

    def draft(self, turns: Sequence[Turn]) -> list[Drafted | None]:
        drafted: list[Drafted | None] = [None] * len(turns)
        asked = dict[str, list[tuple[int, DraftRequest]]]()
        for n, turn in enumerate(turns):
            plan, seat = turn.plan, self._seats[turn]
            name, request = plan.policy.draft, seat.request
            if turn.gamma <= 0 or name not in seat.fitting:
                continue
            assert plan.shortlist is None or plan.shortlists is not None
            seat.drafting, noise, draft = name, seat.noise, self._drafts[name]
            if name not in seat.readings:  # it did not follow the text
                seat.readings[name] = draft.begin(seat.base, seat.features)
                draft.catch_up(seat.readings[name], seat.text)
            if request.rejects:
                target = self.pair.target
                noise = Noise(request.seed, target.vocab_size, target.device, "draft", seat.rounds)
            context = DraftContext(plan, request.sampling, noise, plan.shortlists, request.rejects)
            one = DraftRequest(seat.readings[name], seat.text, turn.gamma, turn.limit, context)
            asked.setdefault(name, []).append((n, one))
        for name, some in asked.items():
            made = self._drafts[name].propose([one for _, one in some])
            for (n, _), one_drafted in zip(some, made, strict=True):
                drafted[n] = one_drafted
        return drafted

    def verify(self, turns: Sequence[Turn]) -> list[Verified]:
        """One pass of the target over what was drafted for all requests."""
        seats, target = [self._seats[turn] for turn in turns], self.pair.target
        # A CPU draws along a tree's path alone; elsewhere all at once, to wait once.
        at_once = target.device.type != "cpu" or target.graphs is not None
        greedy = all(
            seat.request.sampling.greedy
            and seat.request.top_logprobs is None
            and (at_once or turn.drafted is None or turn.drafted.tree is None)
            for seat, turn in zip(seats, turns, strict=True)
        )
        passes = [self._pass(s, turn.drafted) for s, turn in zip(seats, turns, strict=True)]
        rows, _ = target.run_together(passes, greedy=greedy)
        sizes, first = [len(tokens.ids) for tokens in passes], 0
        for seat, size in zip(seats, sizes, strict=True):
            seat.first, first = first, first + size
        if greedy or (at_once and not any(seat.request.rejects for seat in seats)):
            own = zip(seats, passes, strict=True)
            laws = [] if greedy else [law for one in own for law in _laws(*one)]
            ids = (rows if greedy else sample_rows(rows, laws)).tolist()
            verdicts = [
                _accepted(turn.drafted, ids[seat.first : seat.first + size])
                for seat, turn, size in zip(seats, turns, sizes, strict=True)
            ]
        else:
            verdicts = [
                self._verdict(seat, turn.drafted, own)
                for seat, turn, own in zip(seats, turns, apart(rows, sizes), strict=True)
            ]
        if not greedy:
            verdicts = [
                _with_logprobs(seat.request, verdict, turn.drafted, own)
                for seat, verdict, turn, own in zip(
                    seats, verdicts, turns, apart(rows, sizes), strict=True
                )
            ]
        self._tapped = target.tapped
        return [
            replace(verdict, read=0) if self._reads_again(seat, turn.drafted) else verdict
            for seat, turn, verdict in zip(seats, turns, verdicts, strict=True)
        ]

    def _reads_again(self, seat: Seat, drafted: Drafted | None) -> bool:
        """Whether the draft has kept nothing of the tree that it read."""
        if drafted is None or drafted.tree is None:
            return False
        return self._drafts[seat.drafting].reads_features

    def _verdict(self, seat: Seat, drafted: Drafted | None, rows: Tensor) -> Verified:
        """The verdict on what was drafted for one request, by float32 logits [1 + drafted, vocab];
        of a tree they are drawn from along its path alone."""
        request, noise, length = seat.request, seat.noise, len(seat.text)
        sampling = request.sampling
        if request.rejects:
            tokens, log_q = (drafted.tokens, drafted.log_q) if drafted else ([], [])
            return verify_rejection(
                rows, length, tokens, log_q, sampling, request.seed, seat.rounds
            )
        if drafted is None or drafted.tree is None:
            positions = [*range(length, length + len(rows))]
            return _accepted(drafted, sample(rows, sampling, noise, positions).tolist())
        positions = [length + depth for depth in (0, *drafted.tree.depths)]

        def drawn(row: int) -> int:
            one = slice(row, row + 1)
            return int(sample(rows[one], sampling, noise, positions[one]))

        return accept(drafted.tree, drawn)

    def _pass(self, seat: Seat, drafted: Drafted | None) -> PassTokens:
        """What the target reads of one request: the text's last token, and a chain, or a tree whose
        nodes see the text and their ancestors."""
        target, root = self.pair.target, len(seat.text) - 1
        ids = target.ids([seat.text[-1], *(drafted.tokens if drafted else ())])
        if drafted is None or drafted.tree is None:
            return target.following(ids, root, base=seat.base)
        branches = Branches([0, *drafted.tree.depths], ancestors(drafted.tree))
        return target.branching(ids, root, branches, base=seat.base)

    def commit(self, turns: Sequence[Turn]) -> None:
        slots, targets = list[int](), list[int]()
        kept = list[tuple[Seat, list[int]]]()
        for turn in turns:
            seat, drafted = self._seats[turn], turn.drafted
            length, tree = len(seat.text), drafted is not None and drafted.tree is not None
            path = (turn.verdict.path if tree else [*range(turn.accepted)])[: turn.accepted]
            if seat.features.kept:
                kept.append((seat, [seat.first, *(seat.first + node + 1 for node in path)]))
            if drafted is not None:
                first = seat.base + length
                if tree:
                    slots += [first + node for node in path]
                    targets += range(first, first + len(path))
                name = seat.drafting
                self._drafts[name].commit(seat.readings[name], length, drafted, path)
            seat.rounds += 1
        if kept:
            rows = self._tapped[[row for _, some in kept for row in some]]
            parts = apart(rows, [len(some) for _, some in kept])
            for (seat, _), states in zip(kept, parts, strict=True):
                seat.features.put(len(seat.text) - 1, states)
        for turn in turns:
            self._seats[turn].text.extend(turn.tokens)
        self.pair.target.cache.move(slots, targets)


def _capacity(request: DecodeRequest) -> int:
    """Slots for a request's text."""
    return len(request.prompt_ids) + request.max_new_tokens + 1


def _accepted(drafted: Drafted | None, tokens: list[int]) -> Verified:
    """The verdict by the target's own tokens after the text and after each drafted one."""
    if drafted is None or drafted.tree is None:
        return accept_chain(drafted.tokens if drafted else [], tokens)
    return accept(drafted.tree, tokens.__getitem__)


def _laws(seat: Seat, tokens: PassTokens) -> list[tuple[Sampling, Noise | None, int]]:
    """How the tokens after each of a request's in a pass are chosen (:func:`sample_rows`)."""
    branches, length = tokens.branches, len(seat.text)
    depths = range(len(tokens.ids)) if branches is None else branches.depths
    return [(seat.request.sampling, seat.noise, length + depth) for depth in depths]


def _with_logprobs(
    request: DecodeRequest, verdict: Verified, drafted: Drafted | None, rows: Tensor
) -> Verified:
    """The verdict with its tokens' probabilities, of logits [1 + drafted, vocab], where the request
    asks for them."""
    if request.top_logprobs is None:
        return verdict
    tree = drafted is not None and drafted.tree is not None
    path = verdict.path if tree else range(verdict.accepted)
    read = rows[[0, *(node + 1 for node in path)]]
    return replace(verdict, logprobs=_logprobs(read, verdict.tokens, request))


def _logprobs(logits: Tensor, tokens: Sequence[int], request: DecodeRequest) -> list[TokenLogprobs]:
    """Of each of ``tokens``, before which ``logits`` [tokens, vocab] come."""
    log_p = logits.double().log_softmax(-1)
    best = log_p.topk(min(request.top_logprobs or 0, log_p.shape[-1]), -1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    own = log_p[range(len(tokens)), list(tokens)].tolist()
    return [TokenLogprobs(p, [*zip(*top, strict=True)]) for p, top in zip(own, tops, strict=True)]


@dataclass(frozen=True)
class Decoded:
    """One request as executed: its trajectory, its rounds, and the seconds it took, prefill
    included. ``plans``: what the source had, each with the number of rounds before it."""

    trajectory: Trajectory
    steps: tuple[Step, ...]
    seconds: float
    plans: tuple[tuple[int, Plan], ...]


@dataclass
class Decoder:
    """Serves requests under a policy source, ``seats`` at once, in caches of ``slots`` (None: that
    grow).

    Windows that carry their state (Q-learning, transformers' heuristic) carry it from request to
    request of one decoder. Where the source has a policy that a request's verifier cannot use, the
    last one that it could stays in force, and a warning is logged; so too where several seats
    cannot (:func:`check_together`). Raises PolicyError for a verifier of one request at a time."""

    pair: LoadedPair
    source: PolicySource
    verifier: Verifier = "coupled"
    clock: Callable[[], float] = time.perf_counter
    seats: int = 1
    slots: int | None = None
    backend: ModelBackend = field(init=False)
    sessions: Sessions = field(init=False, default_factory=Sessions)
    _lossless: Plan | None = field(init=False, default=None)
    """The last plan that the rejection verifier can use."""
    _refused: Plan | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.seats > 1 and self.verifier == "rejection":
            raise PolicyError("the rejection verifier decodes one request at a time")
        self.backend = ModelBackend(self.pair, self.seats, self.slots)

    def forget(self) -> None:
        """Lets windows begin as with the first request."""
        self.sessions = Sessions()

    def request(
        self,
        item: Request,
        prompt_ids: list[int],
        sampling: Sampling,
        max_new_tokens: int,
        stop_strings: tuple[str, ...] = (),
        *,
        drafts: Collection[str] | None = None,
    ) -> DecodeRequest:
        """Builds a request. Raises WorkloadError when prompt and budget exceed the context of the
        target or of the ``drafts`` (default: those of the policy in force), the prompt is empty, or
        the budget is below 0."""
        if not prompt_ids:
            raise WorkloadError(f"request {item.id}: the prompt has no tokens")
        if max_new_tokens < 0:
            raise WorkloadError(f"request {item.id}: {max_new_tokens} new tokens; give 0 or more")
        used = drafts_of(self.source.current().policy) if drafts is None else drafts
        context = self.pair.context(used)
        if len(prompt_ids) + max_new_tokens > context.positions:
            raise WorkloadError(
                f"request {item.id}: {len(prompt_ids)} prompt tokens + {max_new_tokens} new ones "
                f"exceed {context}; shorten the prompt or lower --max-new-tokens"
            )
        made = DecodeRequest(
            id=item.id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=request_seed(sampling.seed, item.id),
            max_new_tokens=max_new_tokens,
            eos_ids=self.pair.eos_ids,
            verifier=self.verifier,
            ends_at=self.pair.stopper(stop_strings) if stop_strings else None,
            stop_strings=stop_strings,
        )
        if problem := self.backend.too_large(made):
            raise WorkloadError(f"request {item.id}: {problem}")
        return made

    def steps(self, queue: RequestQueue) -> Iterator[list[Round]]:
        """Decodes requests step by step, as many at once as there are seats. Raises PolicyError
        where the source's policy is for one request at a time."""
        return decode_steps(self.backend, queue, _Together(self.source), self.clock, self.sessions)

    def rounds(
        self, request: DecodeRequest, source: _RequestSource | None = None
    ) -> Iterator[Round]:
        """Streams the rounds of one request. Raises PolicyError where its verifier can use neither
        the source's policy nor one before it."""
        source = source or _RequestSource(self, request)
        self.usable(self.source.current(), request)
        return decode_rounds(self.backend, request, source, self.clock, self.sessions)

    def usable(self, plan: Plan, request: DecodeRequest) -> Plan:
        """Returns ``plan``, or where the request's verifier cannot use it the last that it could.
        Raises PolicyError where there was none."""
        try:
            # Noted of every request's plan, since those that follow may be sampled.
            check_lossless(
                self.pair, plan.policy.candidates, "rejection", Sampling(temperature=1.0)
            )
            self._lossless = plan
        except PolicyError as problem:
            if request.rejects:
                if (before := self._lossless) is None:
                    raise
                if plan is not self._refused:
                    self._refused, line = plan, "refused policy %s: %s; %s stays in force"
                    logger = logging.getLogger(__name__)
                    logger.warning(line, plan.label, problem, before.label)
                return before
        return plan

    def decode(self, request: DecodeRequest, category: str = "") -> Decoded:
        """Decodes a request to its end."""
        with naming(f"request {request.id}"):
            return self._decode(request, category)

    def _decode(self, request: DecodeRequest, category: str) -> Decoded:
        began = self.clock()
        steps: list[Step] = []
        plans: list[tuple[int, Plan]] = []
        source = _RequestSource(self, request)
        output: list[int] = []
        finish: Finish = "length"
        for item in self.rounds(request, source):
            if source.looked_at is not None and (not plans or plans[-1][1] is not source.looked_at):
                plans.append((len(steps), source.looked_at))
            steps.append(item.step)
            output.extend(item.tokens)
            finish = item.finish or finish
        seconds = self.clock() - began
        if not plans:  # of a text without rounds
            source.current()
            plans += [(0, plan) for plan in (source.looked_at,) if plan is not None]
        trajectory = trajectory_of(request, output, finish, category)
        return Decoded(trajectory, tuple(steps), seconds, tuple(plans))


def trajectory_of(
    request: DecodeRequest, output: Sequence[int], finish: Finish, category: str = ""
) -> Trajectory:
    """A request with the text that it got."""
    return Trajectory(
        request_id=request.id,
        category=category,
        tokens=Tokens(np.asarray(request.prompt_ids, np.int32), np.asarray(output, np.int32)),
        sampling=request.sampling,
        max_new_tokens=request.max_new_tokens,
        finish=finish,
        verifier=request.verifier,
        stop_strings=request.stop_strings,
    )


class _RequestSource:
    """A source's policies for one request: of a choice by prompt, the plan that it chooses.

    A choice that is published meanwhile begins with the next request: it would read the prompt
    again, which takes longer than a round and writes over what the cache holds."""

    def __init__(self, decoder: Decoder, request: DecodeRequest) -> None:
        self._decoder, self._request = decoder, request
        self._plan: Plan
        self._newest: Plan | None = None
        self.looked_at: Plan | None = None
        """What the source had last that is in force for the request."""

    def current(self) -> Plan:
        newest = self._decoder.source.current()
        if newest is self._newest:
            return self._plan
        self._newest, request, backend = newest, self._request, self._decoder.backend
        plan = self._decoder.usable(newest, request)
        if plan is not self.looked_at and (self.looked_at is None or plan.chooser is None):
            self.looked_at = plan
            self._plan = plan.for_prompt(
                request.prompt_ids, lambda: backend.log_perplexity(request)
            )
        return self._plan


@dataclass
class _Together:
    """A source's policies for several requests at once: where it has one that serves one at a time,
    the last before it stays in force, and a warning is logged."""

    source: PolicySource
    _newest: Plan | None = None
    _plan: Plan | None = None

    def current(self) -> Plan:
        newest = self.source.current()
        if newest is not self._newest:
            self._newest = newest
            try:
                check_together(newest)
                self._plan = newest
            except PolicyError as problem:
                if self._plan is None:
                    raise
                line = "refused policy %s: %s; %s stays in force"
                logging.getLogger(__name__).warning(line, newest.label, problem, self._plan.label)
        assert self._plan is not None
        return self._plan


def check_together(plan: Plan) -> None:
    """Raises PolicyError for a policy that serves one request at a time: one that learns from
    request to request, reads its own router, or chooses by prompt."""
    problem = "a draft for each prompt is chosen by its prefill" if plan.chooser else ""
    for each in plan.plans:
        if each.window.carries:
            problem = f"window {each.policy.window.kind} learns from one request to the next"
        elif each.shortlist is not None and each.shortlist.routed:
            kind = each.policy.shortlist.kind
            problem = f"shortlist {kind} is routed by one request's states"
    if problem:
        raise PolicyError(f"{problem}; it decodes one request at a time")


def drafts_of(policy: Policy) -> frozenset[str]:
    """The drafts that may decode under a policy."""
    return frozenset(each.draft for each in policy.candidates if each.speculates)


def check_lossless(
    pair: LoadedPair, policies: Iterable[Policy], verifier: Verifier, sampling: Sampling
) -> None:
    """Raises PolicyError where a verifier cannot be used with one of the policies on a pair: it
    would bias the text, or is not built for heads."""
    if verifier != "rejection" or sampling.greedy:
        return
    for policy in policies:
        problem = ""
        if policy.is_tree:
            problem = f"growth {policy.growth.kind}: the rejection verifier is for chains"
        elif not getattr(policy.stop, "keep_last", True):
            problem = (
                "stop.keep_last false discards a sampled token because of its probability, which "
                "the rejection verifier cannot make lossless"
            )
        elif policy.draft in pair.heads:
            name = policy.draft
            problem = f"draft {name!r} is a head, which the rejection verifier is not built for"
        if problem:
            raise PolicyError(f"{problem}; use the coupled verifier")


def prepare_for(
    pair: LoadedPair,
    policy: Policy,
    *,
    profile: LatencyProfile | None = None,
    version: int = 0,
    artifacts: Artifacts | None = None,
) -> Plan:
    """:func:`runtime.policies.plan.prepare` for a loaded pair, with all that its first rounds would
    wait for: a shortlist's weights are cut out, and CUDA graphs captured. It may run in another
    thread than decoding does. Raises PolicyError as ``prepare``, and for a router of another head.
    """
    plan = prepare(policy, pair.draft_names, profile=profile, version=version, artifacts=artifacts)
    if not plan.candidates:
        return _aside(pair, plan)
    return replace(plan, candidates=tuple(_aside(pair, each) for each in plan.candidates))


def _aside(pair: LoadedPair, prepared: Plan) -> Plan:
    prepare_graphs(pair, prepared)
    if prepared.shortlist is None:
        return prepared
    rule, steps = prepared.shortlist, prepared.policy.depth_max
    return replace(prepared, shortlists=Shortlists(rule, pair.models[rule.draft], steps))

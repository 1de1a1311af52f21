"""The loop: draft, verify, emit; the one place where windows are clipped and texts end.

A step serves one round of each running request; decoding one request is a queue of one. Any
:class:`Backend` can stand behind it: models, or a recorded trace, with which it is the oracle that
the fast replay must agree with. A policy may be swapped at the top of any step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from spectune.runtime.drafts.protocol import Drafted
from spectune.runtime.policies.plan import Plan
from spectune.runtime.session import Session, Sessions
from spectune.traces.schema import NO_BIN, Finish, Sampling, Step, Verifier

if TYPE_CHECKING:
    from spectune.runtime.trees.draft import GrownTree

PROMPT_TOKENS: Final = 512
"""Most tokens of prompts that are read before a step, so that requests that run do not wait
long."""


class TokenLogprobs(NamedTuple):
    """The natural logarithm of a token's probability at temperature 1, without filters, and
    ``top``: the likeliest tokens with theirs, best first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class DecodeRequest:
    """What to decode. ``seed`` is the request's own (:func:`traces.schema.request_seed`).

    ``ends_at`` tells, given the output so far and the new tokens, how many of the new ones to keep
    if one of ``stop_strings`` ends the text among them, else None. ``is_cancelled`` is asked before
    every step whether nobody waits for the text any more. ``top_logprobs``: how many of the
    likeliest tokens rounds say beside the probabilities of their tokens (None: neither).
    ``scores_prompt`` is called with the same of the prompt's tokens after the first, part by
    part."""

    id: str
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    verifier: Verifier = "coupled"
    ends_at: Callable[[list[int], list[int]], int | None] | None = None
    stop_strings: tuple[str, ...] = ()
    is_cancelled: Callable[[], bool] | None = None
    top_logprobs: int | None = None
    scores_prompt: Callable[[list[TokenLogprobs]], None] | None = None

    @property
    def rejects(self) -> bool:
        """Whether the rejection verifier decides, for which proposals are drawn independently of
        the target; at temperature 0 none does."""
        return self.verifier == "rejection" and not self.sampling.greedy


@dataclass(frozen=True)
class Verified:
    """``accepted`` drafted tokens, and the tokens to emit: those, then the target's own. ``path``:
    the accepted nodes' numbers among the drafted ones. ``read``: how many of the accepted tokens
    the draft has read already (None: those its passes began with). ``logprobs``: of each of the
    tokens, where the request asks for them."""

    accepted: int
    tokens: list[int]
    path: list[int] = field(default_factory=list)
    read: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Backend(Protocol):
    """Where drafts and verdicts come from, for all requests of a step at once."""

    def admit(self, turn: Turn, plan: Plan) -> bool:
        """Makes room for a request under the plan in force. False: not before another ends."""

    def read_prompt(self, turn: Turn, count: int) -> None:
        """Reads the next ``count`` tokens of a request's prompt; its first round reads the last."""

    def draft(self, turns: Sequence[Turn]) -> list[Drafted | None]:
        """Drafts at most ``turn.gamma`` levels from the end of each text; HeteroSpec may go on up
        to ``turn.limit``. None where gamma is 0, or the draft cannot hold the request."""

    def verify(self, turns: Sequence[Turn]) -> list[Verified]:
        """The target's verdicts on ``turn.drafted`` (None: it only supplies its own token)."""

    def commit(self, turns: Sequence[Turn]) -> None:
        """Each text grows by ``turn.tokens``, of which ``turn.accepted`` were drafted."""

    def release(self, turn: Turn) -> None:
        """Gives a request's room back."""


class RequestQueue(Protocol):
    """Requests that wait, first come first. Each is of at least one token."""

    def wait(self) -> bool:
        """Returns once a request is there. False: there will be none."""

    def first(self) -> DecodeRequest | None:
        """The request that has waited longest; None: none is there now."""

    def take(self) -> DecodeRequest:
        """Removes the first."""


class Waiting(deque[DecodeRequest]):
    """A queue of requests that are all there."""

    def wait(self) -> bool:
        return bool(self)

    def first(self) -> DecodeRequest | None:
        return self[0] if self else None

    def take(self) -> DecodeRequest:
        return self.popleft()


class PolicySource(Protocol):
    """Where the loop looks for its policy, once a step; must answer at once."""

    def current(self) -> Plan:
        """The policy in force. A different object than last time is a swap."""


@dataclass
class StaticSource:
    """One policy, until its owner sets another."""

    prepared: Plan

    def current(self) -> Plan:
        return self.prepared


@dataclass(frozen=True)
class Round:
    """One round: its step, the tokens it emitted, what was drafted, how the text ended, if it did,
    the request, the tree with the accepted nodes' numbers in it, where one was drafted, and the
    tokens' probabilities, where the request asks for them."""

    step: Step
    tokens: list[int]
    drafted: list[int]
    finish: Finish | None
    request: DecodeRequest
    tree: GrownTree | None = None
    path: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Turn:
    """What the loop does for one request in a round: :meth:`open` asks the window, :meth:`settle`
    ends the text and tells the window, :meth:`close` says what the round was.

    ``unread``: tokens of the prompt that are to be read before its first round.
    ``gamma`` > 0 levels are drafted at most, up to ``limit`` where a policy extends a tree. Of the
    round in hand ``drafted`` and ``verdict`` are the backend's, ``tokens`` what the text keeps, of
    which ``accepted`` were drafted. ``finish``: how the text ended (None: it goes on)."""

    plan: Plan
    verdict: Verified

    def __init__(self, request: DecodeRequest, sessions: Sessions) -> None:
        self.request, self.output = request, list[int]()
        self.unread = len(request.prompt_ids) - 1
        self.gamma = self.limit = self.accepted = 0
        self.drafted: Drafted | None = None
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self._carried, self._own = sessions, Sessions()
        self._session: Session | None = None
        self._lag, self._start = 1, 0

    def open(self, plan: Plan) -> None:
        """Asks the window of the plan in force how much to draft, and clips it so that no drafted
        token can exceed the budget: the last token of a round is the target's own."""
        if self._session is None or plan is not self.plan:
            # What a window carries from request to request is its decoder's; else it is this
            # request's, as others run beside it.
            self.plan = plan
            self._session = (self._carried if plan.window.carries else self._own).of(plan)
            self._session.start([*self.request.prompt_ids, *self.output])
        self.limit = self.request.max_new_tokens - len(self.output) - 1
        self.gamma = min(self._session.gamma, self.limit)

    def settle(self, verdict: Verified) -> None:
        """Cuts what the target says at the end of the text, and tells the window."""
        self.verdict, self._start = verdict, len(self.output)
        self.tokens, self.finish = _cut(self.request, self.output, verdict.tokens)
        self.accepted = min(verdict.accepted, len(self.tokens))
        assert self._session is not None
        depth = 0 if self.drafted is None else self.drafted.depth
        self._session.observe(depth, self.accepted, self.tokens)
        self.output.extend(self.tokens)

    def close(self, draft_s: float, verify_s: float, round_s: float) -> Round:
        """The round, which took these seconds."""
        drafted = self.drafted or Drafted(count=0, steps=0, lag=self._lag)
        tokens, accepted = self.tokens, self.accepted
        step = Step(
            start=self._start,
            drafted=drafted.count,
            verified=drafted.count + 1,
            accepted=accepted,
            emitted=len(tokens),
            draft_steps=drafted.steps,
            lag=drafted.lag,
            draft=self.plan.policy.draft,
            policy=self.plan.policy_id,
            draft_s=draft_s if self.gamma > 0 else 0.0,
            verify_s=verify_s,
            round_s=round_s,
            depth=drafted.depth,
            bin=NO_BIN if drafted.tree is None else drafted.tree.bin,
        )
        self._lag = _lag_after(drafted, self.verdict, accepted, len(tokens))
        path, logprobs = self.verdict.path[:accepted], self.verdict.logprobs[: len(tokens)]
        how = self.finish, self.request, drafted.tree, path, logprobs
        return Round(step, tokens, drafted.tokens, *how)


def decode_steps(
    backend: Backend,
    queue: RequestQueue,
    source: PolicySource,
    clock: Callable[[], float] = time.perf_counter,
    sessions: Sessions | None = None,
) -> Iterator[list[Round]]:
    """Decodes requests step by step, one round of each that runs a step, under the policy in force
    for so many.

    Each step: drop what nobody waits for, admit what there is room for, read
    :data:`PROMPT_TOKENS` of prompts, ask each window for gamma, draft, verify, cut at EOS or a stop
    string, tell the windows. Seconds of a round are those of its step. ``sessions`` hold what
    windows carry from request to request."""
    sessions = Sessions() if sessions is None else sessions
    reading, turns = deque[Turn](), list[Turn]()
    try:
        while reading or turns or queue.wait():
            for turn in [turn for turn in (*reading, *turns) if _is_cancelled(turn.request)]:
                backend.release(turn)
                (turns if turn in turns else reading).remove(turn)
            while (request := queue.first()) is not None:
                turn = Turn(request, sessions)
                running = len(reading) + len(turns) + 1
                if not backend.admit(turn, source.current().at(running)):
                    if not (reading or turns):
                        raise RuntimeError("another loop that goes on holds the backend's room")
                    break
                reading.append(turn)
                queue.take()
            left = PROMPT_TOKENS
            while reading and (left or not reading[0].unread):
                turn = reading[0]
                count = min(left, turn.unread)
                backend.read_prompt(turn, count)
                turn.unread, left = turn.unread - count, left - count
                if not turn.unread:
                    turns.append(reading.popleft())
            if not turns:
                continue
            began, plan = clock(), source.current().at(len(turns))
            for turn in turns:
                turn.open(plan)
            for turn, drafted in zip(turns, backend.draft(turns), strict=True):
                turn.drafted = drafted
            drafted_at = clock()
            verdicts = backend.verify(turns)
            verified_at = clock()
            for turn, verdict in zip(turns, verdicts, strict=True):
                turn.settle(verdict)
            backend.commit(turns)
            seconds = drafted_at - began, verified_at - drafted_at, clock() - began
            rounds = [turn.close(*seconds) for turn in turns]
            for turn in turns:
                if turn.finish is not None:
                    backend.release(turn)
            turns = [turn for turn in turns if turn.finish is None]
            yield rounds
    finally:  # also where nobody asks for the next step
        for turn in (*reading, *turns):
            backend.release(turn)


def decode_rounds(
    backend: Backend,
    request: DecodeRequest,
    source: PolicySource,
    clock: Callable[[], float] = time.perf_counter,
    sessions: Sessions | None = None,
) -> Iterator[Round]:
    """Decodes one request round by round: :func:`decode_steps` with a queue of one. A request of no
    tokens has no round."""
    queue = Waiting([request] if request.max_new_tokens else [])
    for rounds in decode_steps(backend, queue, source, clock, sessions):
        yield from rounds


def _is_cancelled(request: DecodeRequest) -> bool:
    return request.is_cancelled is not None and request.is_cancelled()


def _lag_after(drafted: Drafted, verdict: Verified, accepted: int, emitted: int) -> int:
    """Tokens that the draft has not read after a round."""
    if not drafted.steps:
        return drafted.lag + emitted
    # Of a chain it has read all but its last proposal.
    return emitted - (min(accepted, drafted.steps - 1) if verdict.read is None else verdict.read)


def _cut(
    request: DecodeRequest, output: list[int], tokens: list[int]
) -> tuple[list[int], Finish | None]:
    """What the text keeps of a round's tokens, and how it has ended, if it has."""
    eos = next((i for i, token in enumerate(tokens) if token in request.eos_ids), None)
    tokens = tokens if eos is None else tokens[: eos + 1]
    if request.ends_at is not None and (end := request.ends_at(output, tokens)) is not None:
        return tokens[:end], "stop"
    if eos is not None:
        return tokens, "eos"
    return tokens, "length" if len(output) + len(tokens) >= request.max_new_tokens else None

"""The loop: draft, verify, emit; the one place where windows are clipped and texts end.

Any :class:`Backend` can stand behind it: models, or a recorded trace, with which it is the oracle
that the fast replay must agree with. A policy may be swapped at the top of any round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from spectune.runtime.drafts.protocol import Drafted
from spectune.runtime.policies.plan import Plan
from spectune.runtime.session import Sessions
from spectune.traces.schema import NO_BIN, Finish, Sampling, Step, Verifier

if TYPE_CHECKING:
    from spectune.runtime.trees.draft import GrownTree


@dataclass(frozen=True)
class DecodeRequest:
    """What to decode. ``seed`` is the request's own (:func:`traces.schema.request_seed`).

    ``ends_at`` tells, given the output so far and the new tokens, how many of the new ones to keep
    if one of ``stop_strings`` ends the text among them, else None."""

    id: str
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    verifier: Verifier = "coupled"
    ends_at: Callable[[list[int], list[int]], int | None] | None = None
    stop_strings: tuple[str, ...] = ()

    @property
    def rejects(self) -> bool:
        """Whether the rejection verifier decides, for which proposals are drawn independently of
        the target; at temperature 0 none does."""
        return self.verifier == "rejection" and not self.sampling.greedy


@dataclass(frozen=True)
class Verified:
    """``accepted`` drafted tokens, and the tokens to emit: those, then the target's own. ``path``:
    the accepted nodes' numbers among the drafted ones. ``read``: how many of the accepted tokens
    the draft has read already (None: those its passes began with)."""

    accepted: int
    tokens: list[int]
    path: list[int] = field(default_factory=list)
    read: int | None = None


class Backend(Protocol):
    """Where drafts and verdicts come from."""

    def begin(self, request: DecodeRequest, prepared: Plan) -> None:
        """Makes ready for the first round of a request (prefill)."""

    def draft(self, prepared: Plan, gamma: int, limit: int) -> Drafted | None:
        """Drafts at most ``gamma`` > 0 levels from the current end of the text; HeteroSpec may go
        on up to ``limit``. None where the draft cannot hold the request."""

    def verify(self, drafted: Drafted | None) -> Verified:
        """The target's verdict on the drafted tokens (None: it only supplies its own token)."""

    def commit(self, emitted: list[int], accepted: int, drafted: Drafted | None) -> None:
        """The text grows by ``emitted``."""


class PolicySource(Protocol):
    """Where the loop looks for its policy, once a round; must answer at once."""

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
    and the tree with the accepted nodes' numbers in it, where one was drafted."""

    step: Step
    tokens: list[int]
    drafted: list[int]
    finish: Finish | None
    tree: GrownTree | None = None
    path: list[int] = field(default_factory=list)


def decode_rounds(
    backend: Backend,
    request: DecodeRequest,
    source: PolicySource,
    clock: Callable[[], float] = time.perf_counter,
    sessions: Sessions | None = None,
) -> Iterator[Round]:
    """Decodes one request round by round.

    Each round: ask the window for gamma, clip it so that no drafted token can exceed the budget,
    draft, verify, cut at EOS or a stop string, tell the window. Yields until the text has ended; a
    request of no tokens has no round.
    ``sessions`` hold what windows carry from request to request."""
    sessions = Sessions() if sessions is None else sessions
    output: list[int] = []
    lag, finish = 1, None
    plan = source.current()
    if not request.max_new_tokens:
        return
    session = sessions.of(plan)
    session.start(request.prompt_ids)
    backend.begin(request, plan)
    while finish is None:
        began = clock()
        if (newest := source.current()) is not plan:
            plan, session = newest, sessions.of(newest)
            session.start([*request.prompt_ids, *output])
        start = len(output)
        limit = request.max_new_tokens - start - 1  # the last token of a round is the target's own
        gamma = min(session.gamma, limit)
        drafted = backend.draft(plan, gamma, limit) if gamma > 0 else None
        drafted_at = clock()
        verdict = backend.verify(drafted)
        verified_at = clock()
        draft_s, verify_s = drafted_at - began, verified_at - drafted_at
        tokens, finish = _cut(request, output, verdict.tokens)
        accepted = min(verdict.accepted, len(tokens))
        backend.commit(tokens, accepted, drafted)
        drafted = drafted or Drafted(count=0, steps=0, lag=lag)
        session.observe(drafted.depth, accepted, tokens)
        output.extend(tokens)
        step = Step(
            start=start,
            drafted=drafted.count,
            verified=drafted.count + 1,
            accepted=accepted,
            emitted=len(tokens),
            draft_steps=drafted.steps,
            lag=drafted.lag,
            draft=plan.policy.draft,
            policy=plan.policy_id,
            draft_s=draft_s if gamma > 0 else 0.0,
            verify_s=verify_s,
            round_s=clock() - began,
            depth=drafted.depth,
            bin=NO_BIN if drafted.tree is None else drafted.tree.bin,
        )
        lag = _lag_after(drafted, verdict, accepted, len(tokens))
        path = verdict.path[:accepted]
        yield Round(step, tokens, drafted.tokens, finish, drafted.tree, path)


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

"""The loop: draft, verify, emit; the one place where windows are clipped and texts end.

Any :class:`Backend` can stand behind it: the runtime's models, or a recorded trace. With the trace it is the oracle that the fast
replay must agree with, round by round; with the runtime it is what serves. A policy may be swapped at the top of any round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from runtime.drafts.protocol import Drafted
from runtime.policies.plan import Plan
from runtime.session import Sessions
from traces.schema import NO_BIN, Finish, Sampling, Step, Verifier

if TYPE_CHECKING:
    from runtime.tree_drafts import GrownTree


@dataclass(frozen=True)
class DecodeRequest:
    """What to decode. ``seed`` is the request's own (:func:`traces.schema.request_seed`).

    ``ends_at`` tells, given the output so far and the new tokens, how many of the new ones to keep if a stop string ends the text
    among them, else None.
    """

    id: str
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    verifier: Verifier = "coupled"
    ends_at: Callable[[list[int], list[int]], int | None] | None = None

    @property
    def rejects(self) -> bool:
        """Whether the rejection verifier decides, for which proposals are drawn independently of the target; at temperature 0 none does."""
        return self.verifier == "rejection" and not self.sampling.greedy


@dataclass(frozen=True)
class Verified:
    """``accepted`` drafted tokens, and the tokens to emit: those, then the target's own. ``path``: the accepted nodes' numbers among
    the drafted ones. ``read``: how many of the accepted tokens the draft has read already (None: those its passes began with)."""

    accepted: int
    tokens: list[int]
    path: list[int] = field(default_factory=list)
    read: int | None = None


class Backend(Protocol):
    """Where drafts and verdicts come from. ``canonical_passes``: how many passes near ties have cost so far."""

    @property
    def canonical_passes(self) -> int: ...

    def choose(self, request: DecodeRequest, prepared: Plan) -> Plan:
        """The candidate of a chooser under which the request is decoded. Called before ``begin``, or between two rounds."""

    def begin(self, request: DecodeRequest, prepared: Plan) -> None:
        """Makes ready for the first round of a request (prefill)."""

    def draft(self, prepared: Plan, gamma: int, limit: int | None = None) -> Drafted:
        """Drafts at most ``gamma`` > 0 levels from the current end of the text; HeteroSpec may go on up to ``limit``."""

    def verify(self, drafted: Drafted | None) -> Verified:
        """The target's verdict on the drafted tokens (None: it only supplies its own token)."""

    def commit(self, emitted: list[int], accepted: int, drafted: Drafted | None) -> None:
        """The text grows by ``emitted``."""


class PolicySource(Protocol):
    """Where the loop looks for its policy, once a round; must answer at once."""

    def current(self) -> Plan:
        """The policy in force. A different object than last time is a swap."""


@dataclass(frozen=True)
class StaticSource:
    """One policy for ever."""

    prepared: Plan

    def current(self) -> Plan:
        return self.prepared


@dataclass(frozen=True)
class Round:
    """One round as the loop yields it: its step, the tokens it emitted, what was drafted, how the text ended, if it did, and the
    tree with the accepted nodes' numbers in it, where one was drafted. ``canonical_passes``: of drafting and of verification."""

    step: Step
    tokens: list[int]
    drafted: list[int]
    finish: Finish | None
    tree: GrownTree | None = None
    path: list[int] = field(default_factory=list)
    canonical_passes: tuple[int, int] = (0, 0)


def decode_rounds(
    backend: Backend,
    request: DecodeRequest,
    source: PolicySource,
    clock: Callable[[], float] = time.perf_counter,
    sessions: Sessions | None = None,
) -> Iterator[Round]:
    """Decodes one request round by round.

    Each round: ask the window for gamma, clip it so that no drafted token can exceed the budget, draft, verify, cut at EOS or a stop
    string, tell the window. Yields until the text has ended. A chooser chooses once, for the prompt, when it comes into force; steps
    name the candidate that it chose. ``sessions`` hold what windows carry from request to request.
    """

    def decoding(found: Plan) -> Plan:
        return found if found.chooser is None else backend.choose(request, found)

    in_force = source.current()
    prepared = decoding(in_force)
    sessions = Sessions() if sessions is None else sessions
    session = sessions.of(prepared)
    session.start(request.prompt_ids)
    output: list[int] = []
    lag = 1
    backend.begin(request, prepared)
    while True:
        started = clock()
        newest = source.current()
        if newest is not in_force:
            in_force, prepared = newest, decoding(newest)
            session = sessions.of(prepared)
            session.start([*request.prompt_ids, *output])
        start = len(output)
        limit = request.max_new_tokens - start - 1
        passes = backend.canonical_passes
        gamma = min(session.gamma, limit)
        drafted = backend.draft(prepared, gamma, limit) if gamma > 0 else None
        draft_done, passes_drafting = clock(), backend.canonical_passes - passes
        verdict = backend.verify(drafted)
        verify_done, passes_verifying = clock(), backend.canonical_passes - passes - passes_drafting
        tokens, finish = _cut(request, output, verdict.tokens)
        emitted, accepted = len(tokens), min(verdict.accepted, len(tokens))
        backend.commit(tokens, accepted, drafted)
        count, steps = (drafted.count, drafted.steps) if drafted else (0, 0)
        draft_s, verify_s = draft_done - started, verify_done - draft_done
        depth = drafted.depth if drafted else 0
        session.observe(depth, accepted, tokens, draft_s, verify_s)
        output.extend(tokens)
        step = Step(
            start=start,
            drafted=count,
            verified=count + 1,
            accepted=accepted,
            emitted=emitted,
            draft_steps=steps,
            lag=drafted.lag if drafted else lag,
            draft=prepared.policy.draft,
            policy=prepared.policy_id,
            draft_s=draft_s if drafted else 0.0,
            verify_s=verify_s,
            round_s=clock() - started,
            depth=depth,
            bin=drafted.tree.bin if drafted and drafted.tree else NO_BIN,
        )
        read = min(accepted, steps - 1) if verdict.read is None else verdict.read
        lag = emitted - read if steps else step.lag + emitted
        tree = drafted.tree if drafted else None
        canonical = passes_drafting, passes_verifying
        yield Round(step, tokens, drafted.tokens if drafted else [], finish, tree, verdict.path[:accepted], canonical)
        if finish is not None:
            return


def _cut(request: DecodeRequest, output: list[int], tokens: list[int]) -> tuple[list[int], Finish | None]:
    if request.eos_ids:
        for i, token in enumerate(tokens):
            if token in request.eos_ids:
                kept, finish = tokens[: i + 1], "eos"
                break
        else:
            kept, finish = tokens, ""
    else:
        kept, finish = tokens, ""
    if request.ends_at is not None:
        end = request.ends_at(output, kept)
        if end is not None:
            return kept[:end], "stop"
    if finish == "eos":
        return kept, "eos"
    return kept, "length" if len(output) + len(kept) >= request.max_new_tokens else None

"""Many requests over a recorded trace by a simulated clock: the loop that serves, with the
panoramas of every draft behind it, and the Python sum of what its steps cost. What the compiled
replay of batches must agree with, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

from oracle import EachAlone, RecordedTrees, TraceBackend

from spectune.engines.engine import Load
from spectune.optimizer.replay.batches import Seating
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime.cache import Extents
from spectune.runtime.costs import MeasuredRound, RoundKind, predicted_seconds
from spectune.runtime.drafts.protocol import Drafted
from spectune.runtime.loop import DecodeRequest, StaticSource, Turn, Verified, decode_steps
from spectune.runtime.policies.document import EXPANDED_LIMIT
from spectune.runtime.policies.plan import Plan
from spectune.traces.schema import request_seed
from spectune.traces.tables import LatencyProfile, Trajectory


class SimulatedClock:
    """The seconds that steps take, by the Python sum of their terms; and requests that come as a
    load says by it."""

    def __init__(self, load: Load, requests: Sequence[DecodeRequest]) -> None:
        self.now, self.load, self.requests = 0.0, load, deque(requests)
        self.sent = self.ended = 0

    def __call__(self) -> float:
        return self.now

    def wait(self) -> bool:
        if self.requests and self.first() is None:
            self.now = max(self.now, self.load.arrivals[self.sent])
        return bool(self.requests)

    def first(self) -> DecodeRequest | None:
        total = self.sent + len(self.requests)
        due = self.load.due(self.now, self.sent, self.sent - self.ended)
        return self.requests[0] if self.requests and min(due, total - self.sent) > 0 else None

    def take(self) -> DecodeRequest:
        self.sent += 1
        return self.requests.popleft()


class EveryDraft:
    """The backend of one request over its panoramas: the draft of the policy in force proposes, the
    others fall behind."""

    def __init__(self, trace: ReplayTrace, number: int) -> None:
        self.of: dict[tuple[str, bool], TraceBackend] = {}
        text, first = trace.trajectories[number], int(trace.offsets[number])
        self.heads = {draft for draft in trace.panoramas if trace.is_head(draft)}
        for draft, panoramas in trace.panoramas.items():
            if draft not in self.heads:
                self.of[draft, False] = TraceBackend(text, panoramas[number])
            if draft != "ngram":
                trees = RecordedTrees(trace.forest(draft), first)
                self.of[draft, True] = TraceBackend(text, None, trees)
        self.plain = TraceBackend(text, None)
        self.follows: dict[str, int] = {}
        """By draft that follows the text the tokens that it has not read."""

    def begin(self, request: DecodeRequest, plan: Plan) -> None:
        for backend in (*self.of.values(), self.plain):
            backend.begin(request, plan)
        self.length = len(request.prompt_ids)
        if plan.policy.speculates:
            self.follow(plan.policy.draft)

    def follow(self, draft: str) -> None:
        self.follows.setdefault(draft, 0 if draft in self.heads and self.length < 2 else 1)

    def draft(self, plan: Plan, gamma: int, limit: int) -> Drafted | None:
        policy = plan.policy
        self.follow(policy.draft)
        self.using = self.of[policy.draft, policy.is_tree or policy.draft in self.heads]
        self.using._lag = self.follows[policy.draft]
        return self.using.draft(plan, gamma, limit)

    def verify(self, drafted: Drafted | None) -> Verified:
        return (self.plain if drafted is None else self.using).verify(drafted)

    def commit(self, emitted: list[int], accepted: int, drafted: Drafted | None) -> None:
        before = {draft: unread + len(emitted) for draft, unread in self.follows.items()}
        for backend in (*self.of.values(), self.plain):
            own = drafted if drafted is not None and backend is self.using else None
            backend.commit(emitted, accepted if own else 0, own)
        self.follows = before
        if drafted is not None and drafted.steps:
            (draft,) = {draft for (draft, _), one in self.of.items() if one is self.using}
            self.follows[draft] = self.using._lag
        self.length += len(emitted)


class Seated(EachAlone):
    """The loop's backend with seats, extents, chunks of prompts, and a clock."""

    def __init__(
        self,
        trace: ReplayTrace,
        seating: Seating,
        clock: SimulatedClock,
        profile: LatencyProfile | None,
    ) -> None:
        super().__init__(lambda request: EveryDraft(trace, int(request.id.split("/")[1])))
        self.seating, self.clock, self.profile = seating, clock, profile
        self.heads = {draft for draft in trace.panoramas if trace.is_head(draft)}
        self.extents = Extents(seating.slots)
        self.begins: dict[Turn, int] = {}

    @property
    def own(self) -> dict[Turn, EveryDraft]:
        return cast(dict[Turn, EveryDraft], self._of)

    def admit(self, turn: Turn, plan: Plan) -> bool:
        if len(self._of) == self.seating.seats:
            return False
        request = turn.request
        if self.seating.slots:
            size = len(request.prompt_ids) + request.max_new_tokens + 1 + EXPANDED_LIMIT
            begin = self.extents.take(size)
            if begin is None:
                return False
            self.begins[turn] = begin
        return super().admit(turn, plan)

    def read_prompt(self, turn: Turn, count: int) -> None:
        if self.profile is not None and count:
            names = ("target", *self.own[turn].follows)
            self.clock.now += sum(
                float(self.profile.seconds(f"prefill/{name}", rows=count)) for name in names
            )

    def draft(self, turns: Sequence[Turn]) -> list[Drafted | None]:
        self.late = {
            turn: turn.gamma > 0 and turn.plan.policy.draft not in self.own[turn].follows
            for turn in turns
        }
        return super().draft(turns)

    def commit(self, turns: Sequence[Turn]) -> None:
        if self.profile is not None:
            self.clock.now += self.seconds(turns)
        super().commit(turns)

    def seconds(self, turns: Sequence[Turn]) -> float:
        assert self.profile is not None
        step, late_s = [], 0.0
        for turn in turns:
            drafted, policy = turn.drafted, turn.plan.policy
            context = len(turn.request.prompt_ids) + len(turn.output) - len(turn.tokens) - 1
            kind, rows, count = RoundKind(), (), 0
            if drafted is not None and drafted.steps:
                kind = RoundKind.of(policy, tree=policy.is_tree or policy.draft in self.heads)
                widths = [1] * drafted.steps if drafted.tree is None else drafted.tree.widths
                rows, count = (drafted.lag, *widths[1:]), drafted.count
                if self.late[turn] and context:
                    names = ("target", policy.draft)[policy.draft not in self.heads :]
                    late_s += sum(
                        float(self.profile.seconds(f"prefill/{n}", rows=context)) for n in names
                    )
            kind = kind._replace(sampled=not turn.request.sampling.greedy)
            tokens = len(turn.tokens)
            sizes = self.profile.shortlist_sizes(kind.draft, routed=False) if kind.draft else ()
            head = int(sizes[-1]) if sizes else 0
            step.append(MeasuredRound(kind, context, rows, count, tokens, 0.0, 0.0, 0.0, head))
        return late_s + float(predicted_seconds(self.profile, [step])[0, 2])

    def release(self, turn: Turn) -> None:
        super().release(turn)
        self.clock.ended += 1
        if turn in self.begins:
            self.extents.give(self.begins.pop(turn))


def request_of(text: Trajectory, number: int, place: int) -> DecodeRequest:
    """The n-th request, for a text of the trace."""
    length = len(text.output_ids)

    def ends_at(output: list[int], new: list[int]) -> int | None:
        return length - len(output) if len(output) + len(new) >= length else None

    seed = request_seed(text.sampling.seed, text.request_id)
    prompt, most = text.prompt_ids.tolist(), text.max_new_tokens
    name = f"{number}/{place}"
    return DecodeRequest(name, prompt, text.sampling, seed, most, ends_at=ends_at)


Member = tuple[int, int, int, int, int]
"""Step, request, policy of the table, drafted and accepted tokens."""


def by_the_loop(
    trace: ReplayTrace,
    plan: Plan,
    load: Load,
    seating: Seating,
    profile: LatencyProfile | None,
    count: int,
) -> tuple[list[Member], list[float]]:
    """The members of every step by :func:`decode_steps`, and when each ended."""
    order = trace.order.tolist()
    numbers = [order[n % len(order)] for n in range(count)]
    texts = trace.trajectories
    requests = [request_of(texts[place], n, place) for n, place in enumerate(numbers)]
    clock = SimulatedClock(load, requests)
    backend = Seated(trace, seating, clock, profile)
    policies = [each.policy_id for each in plan.plans]
    members: list[Member] = []
    ends = []
    for n, rounds in enumerate(decode_steps(backend, clock, StaticSource(plan), clock)):
        ends.append(clock.now)
        for one in rounds:
            number, step = int(one.request.id.split("/")[0]), one.step
            policy = policies.index(step.policy)
            members.append((n, number, policy, step.drafted, step.accepted))
    return members, ends

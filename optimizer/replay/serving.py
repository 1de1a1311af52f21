"""The serving simulator: requests arrive, are admitted, prefilled, batched and decoded under an
engine's own rules.

Which requests a step holds and how many tokens it drafts is an engine's rule
(:class:`engines.abilities.ServingRules`), how many of them are kept is looked up in the
recording, and what the step takes is the cost model's. So a step is exact given the moments at
which requests arrive and steps end, and these are predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.engines.abilities import ServingRules
from spectune.engines.engine import Load
from spectune.optimizer.replay.chain_tables import Index, Words
from spectune.optimizer.replay.loads import Objective, Served
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.step_costs import StepCosts, step_seconds
from spectune.runtime.policies.document import FixedWindow, Policy
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.stops import compile_stop
from spectune.traces.cost_table import FloatArray
from spectune.traces.errors import TraceError

STEP_COLUMNS: Final = ("batch", "rows", "prompts", "context", "passes")
"""Columns of :attr:`Simulated.steps`."""


class Queue(NamedTuple):
    """What requests are served, in order of their arrival: ``text`` of each, when it ``arrived``,
    and how many ``clients`` send them, each its next so long after its last was answered; 0: they
    come when they come, and ``arrived`` is given. By text: where its positions begin (``begins``),
    its ``prompts``, ``lengths`` and ``budgets``, all in tokens."""

    text: Index
    arrived: FloatArray
    clients: int
    begins: Index
    prompts: Index
    lengths: Index
    budgets: Index


class State(NamedTuple):
    """What changes, by request: prompt tokens that were scheduled (``read``), tokens that are out
    (``out``), tokens to draft in its next step (``gamma``), whether these are dummies
    (``blind``, :attr:`ServingRules.drafts_up_to`), and steps of it in execution (``flying``), the
    last of which drafted ``flown`` tokens. ``running``: those admitted. Of the steps in execution
    ``queue`` [ahead + 1, seats, 3]: each request, what it drafted (-1: a part of its prompt is
    read) and whether that is dummies, their ``sizes`` and ``ends``."""

    read: Index
    out: Index
    gamma: Index
    blind: Index
    flying: Index
    flown: Index
    running: Index
    queue: npt.NDArray[np.int64]
    sizes: Index
    ends: FloatArray


class Tables(NamedTuple):
    """Tokens to draft, ``gammas`` [contexts, batch sizes], from each of the mean ``contexts`` of
    the running requests on, the least of which is 0."""

    contexts: Index
    gammas: npt.NDArray[np.int64]


class Found(NamedTuple):
    """What comes out, by request: when its first token and its last were there, and its rounds,
    accepted and drafted tokens (``counts`` int64 [requests, 3]); and by step :data:`STEP_COLUMNS`
    and when it ended. ``members`` int64 [rounds, 3]: step, request and drafted tokens, if there is
    room for them."""

    first: FloatArray
    finished: FloatArray
    counts: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int32]
    ends: FloatArray
    members: npt.NDArray[np.int64]


@compiled(inline=True)
def _wanted(queue: Queue, words: Words, rules: ServingRules, state: State, r: int) -> int:
    """Tokens that a request in force would read in the next step; 0: it is left out."""
    t = queue.text[r]
    if state.read[r] < queue.prompts[t]:
        return int(queue.prompts[t] - state.read[r])
    out, cached = state.out[r], queue.prompts[t] + state.out[r] - 1
    if state.flying[r] > 0:
        if out + 1 >= queue.budgets[t]:  # the step in execution ends it
            return 0
        cached += 1 + state.flown[r]
    gamma = state.gamma[r]
    is_draft = state.flying[r] == 0 and state.blind[r] == 0
    if is_draft and out < queue.lengths[t]:  # a draft may have no proposal
        gamma = min(gamma, (int(words[queue.begins[t] + out - 1]) >> 8) & 255)
    return int(max(0, min(1 + gamma, rules.max_len - cached - 1)))


@compiled(inline=True)
def _put(queue: Queue, state: State, slot: int, size: int, r: int, new: int) -> tuple[int, int]:
    """Puts a request into a step, as its ``size``-th: what it drafts (-1: a part of its prompt is
    read), and the tokens cached for it."""
    t = queue.text[r]
    if state.read[r] < queue.prompts[t]:
        cached = int(state.read[r])
        state.read[r] += new
        drafted = 0 if state.read[r] == queue.prompts[t] else -1
    else:
        drafted, cached = new - 1, int(queue.prompts[t] + state.out[r] - 1)
    state.queue[slot, size, 0], state.queue[slot, size, 1] = r, drafted
    state.queue[slot, size, 2] = state.blind[r]
    if drafted >= 0:
        state.flying[r] += 1
        state.flown[r] = drafted
    return drafted, cached


@compiled(inline=True)
def _emit(
    queue: Queue,
    words: Words,
    state: State,
    results: Found,
    r: int,
    drafted: int,
    blind: int,
    now: float,
) -> bool:
    """A request gets the results of its step; whether its text has ended."""
    t, out = queue.text[r], state.out[r]
    state.flying[r] -= 1
    if out == 0:
        results.first[r] = now
        state.out[r] = 1
    else:
        run = 0 if blind else int(words[queue.begins[t] + out - 1]) & 255
        accepted = min(run, drafted)
        emitted = min(accepted + 1, queue.lengths[t] - out)
        state.out[r] += emitted
        results.counts[r, 0] += 1
        results.counts[r, 1] += min(accepted, emitted)
        results.counts[r, 2] += drafted
    if state.out[r] < queue.lengths[t]:
        return False
    results.finished[r] = now
    return True


@compiled(inline=True)
def _table(queue: Queue, tables: Tables, state: State, running: int) -> int:
    """The table in force as a step begins, by the mean of the tokens that the running requests have
    in the cache, those of steps in execution included."""
    cached = 0
    for n in range(running):
        r = state.running[n]
        t = queue.text[r]
        if state.read[r] < queue.prompts[t]:
            cached += state.read[r]
        else:
            cached += queue.prompts[t] + state.out[r] - 1
            cached += 1 + state.flown[r] if state.flying[r] > 0 else 0
    table = len(tables.contexts) - 1
    while table > 0 and cached < tables.contexts[table] * max(1, running):
        table -= 1
    return table


@compiled(inline=True)
def _held(state: State, running: int) -> int:
    """Tokens in the cache, and those that may come into it with the next step."""
    tokens = 0
    for n in range(running):
        r = state.running[n]
        tokens += state.read[r] + state.out[r] + state.gamma[r]
    return tokens


@compiled()
def serve_queue(
    queue: Queue,
    words: Words,
    rules: ServingRules,
    tables: Tables,
    costs: StepCosts,
    state: State,
    results: Found,
) -> tuple[int, int, float]:
    """Serves the whole queue, of whose texts ``words`` say what is accepted from the second token
    on: how many steps and rounds that took, and when the cache was too small (-1: it never was).

    Of the requests so many have ``arrived``, were ``admitted``, were ``sent`` (all, where they come
    when they come) and are ``running``.
    """
    total, slots = len(queue.text), rules.ahead + 1
    sent = min(queue.clients, total) if queue.clients > 0 else total
    arrived = admitted = running = steps = rounds = head = flying = 0
    now, busy = 0.0, 0.0
    while True:
        while arrived < sent and queue.arrived[arrived] <= now:
            arrived += 1
        # Fill a step: those in force in the order of their admission, then as many of those that
        # wait as there is room for.
        slot = (head + flying) % slots
        gammas = tables.gammas[_table(queue, tables, state, running)]
        budget = room = rules.max_batched_tokens
        i = size = rows = prompts = context = longest = 0
        while budget > 0 and room > rules.draft_slots:
            if i == running:
                if admitted >= arrived or running >= rules.max_num_seqs:
                    break
                state.running[running] = admitted
                running, admitted = running + 1, admitted + 1
            r = state.running[i]
            i += 1
            reading = state.read[r] < queue.prompts[queue.text[r]]
            new = min(_wanted(queue, words, rules, state, r), budget, room - rules.draft_slots)
            if new == 0:
                continue
            in_execution = state.flown[r] + 1 if state.flying[r] > 0 else 0
            drafted, cached = _put(queue, state, slot, size, r, new)
            longest = max(longest, cached + in_execution + new)
            if len(results.members) > 0:
                member = results.members[rounds]
                member[0], member[1], member[2] = steps, r, drafted
            prompts += new if reading else 0
            rows += 0 if reading else new
            size, context = size + 1, context + cached
            budget, room, rounds = budget - new, room - new - rules.draft_slots, rounds + 1
        # Execute it, and say how many tokens its requests draft next.
        if size > 0:
            gamma, drafts = gammas[size], not 0 < rules.drafts_up_to < longest
            for n in range(size):
                if state.queue[slot, n, 1] >= 0:
                    state.gamma[state.queue[slot, n, 0]] = gamma
                    state.blind[state.queue[slot, n, 0]] = 0 if drafts else 1
            passes = gamma if drafts else 0
            busy = max(now, busy) + step_seconds(costs, rows, prompts, size, context, passes)
            state.sizes[slot], state.ends[slot], results.ends[steps] = size, busy, busy
            row = results.steps[steps]
            row[0], row[1], row[2], row[3], row[4] = size, rows, prompts, context, passes
            steps, flying = steps + 1, flying + 1
            if rules.cache_tokens > 0 and _held(state, running) > rules.cache_tokens:
                return steps, rounds, now
            if flying < slots:
                continue
        if flying == 0:
            if arrived >= sent:
                return steps, rounds, -1.0
            now = max(now, queue.arrived[arrived])
            continue
        # The oldest step ends: its requests get what it yields, those whose text ends leave, and
        # their clients send the next.
        now = max(now, state.ends[head])
        for n in range(state.sizes[head]):
            r, drafted = state.queue[head, n, 0], state.queue[head, n, 1]
            if drafted < 0 or results.finished[r] >= 0:
                continue
            blind = state.queue[head, n, 2]
            has_ended = _emit(queue, words, state, results, r, drafted, blind, now)
            if has_ended and queue.clients > 0 and sent < total:
                queue.arrived[sent] = max(now, queue.arrived[sent - 1]) + rules.reply_s
                sent += 1
        count = 0
        for n in range(running):
            state.running[count] = state.running[n]
            count += 0 if results.finished[state.running[n]] >= 0 else 1
        running, head, flying = count, (head + 1) % slots, flying - 1


@dataclass(frozen=True, eq=False)
class Simulated:
    """Requests as they would be served. ``counts`` int64 [requests, 3]: rounds after the first
    token, accepted and drafted tokens. ``steps`` int32 [steps, 5]: :data:`STEP_COLUMNS`;
    ``ends_s``: when each ended. ``members`` int64 [rounds, 3]: step, request and drafted tokens
    (-1: a part of its prompt was read), where that was asked for."""

    served: Served
    counts: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int32]
    ends_s: FloatArray
    members: npt.NDArray[np.int64]

    @property
    def batches(self) -> npt.NDArray[np.int32]:
        """The requests of each step: int32 [steps]."""
        return self.steps[:, 0]

    @property
    def contexts(self) -> FloatArray:
        """The mean tokens in the cache of each step's requests: float64 [steps]."""
        contexts: FloatArray = self.steps[:, 3] / self.steps[:, 0]
        return contexts

    def to_json(self, level: Objective) -> dict[str, Any]:
        """The figures of what was served, and of rounds and steps."""
        rounds, accepted, drafted = self.counts.sum(0).tolist()
        return {
            **self.served.to_json(level),
            "rounds": rounds,
            "accepted_tokens": accepted,
            "drafted_tokens": drafted,
            "steps": len(self.steps),
            "mean_batch": float(self.steps[:, 0].mean()) if len(self.steps) else 0.0,
        }


def serve(
    trace: ReplayTrace,
    draft: str,
    gammas: Mapping[int, Sequence[int]],
    load: Load,
    rules: ServingRules,
    costs: StepCosts,
    *,
    count: int | None = None,
    members: bool = False,
) -> Simulated:
    """Serves the requests of an engine's trace under a load: in order, from the first again where
    there are fewer than arrivals, or than the ``count`` that clients send (by default each once).
    ``gammas``: by the mean context of the running requests from which on they hold, the least
    first, 0, tokens to draft at each batch size (:meth:`engines.abilities.Engine.tables`).

    Raises TraceError where the cache would be full, which makes an engine put requests back.
    """
    tables = Tables(np.array([*gammas], np.int64), np.array([*gammas.values()], np.int64))
    most = int(tables.gammas[:, 1:].max())
    policy = Policy(draft=draft, window=FixedWindow(gamma=most)) if most else Policy()
    words = trace.outcomes(policy, compile_stop(policy.stop))
    count = len(load.arrivals) or count or len(trace.order)
    text = trace.order[np.arange(count) % len(trace.order)]
    # The trace begins after the first token, which the prompt's pass yields.
    lengths, prompts, budgets = np.diff(trace.offsets) + 1, trace.prompts - 1, trace.budgets + 1
    arrived = np.array(load.arrivals or [rules.reply_s * n for n in range(count)])
    clients = 0 if load.arrivals else load.clients
    queue = Queue(text, arrived, clients, trace.offsets[:-1], prompts, lengths, budgets)
    room = rules.max_batched_tokens - rules.draft_slots
    if room < 1:
        raise TraceError(f"a step of {rules.max_batched_tokens} tokens holds no request")
    # Every step brings a request on, or reads as much as fits.
    most_steps = int((lengths[text] + 2 + prompts[text] // room).sum())
    results = Found(
        np.full(count, -1.0), np.full(count, -1.0), np.zeros((count, 3), np.int64),
        np.zeros((most_steps, len(STEP_COLUMNS)), np.int32), np.zeros(most_steps),
        np.zeros((2 * most_steps if members else 0, 3), np.int64),
    )  # fmt: skip
    state = _fresh(count, rules)
    steps, rounds, full = serve_queue(queue, words, rules, tables, costs, state, results)
    if full >= 0:
        raise TraceError(
            f"{full:.1f} s after the start the requests need more than the {rules.cache_tokens} "
            "tokens of the engine's cache, which then puts some of them back; that is not "
            "simulated: ask for fewer requests at a time, or a lower rate"
        )
    served = Served(arrived, results.first, results.finished, lengths[text])
    served_members = results.members[: rounds if members else 0]
    return Simulated(
        served, results.counts, results.steps[:steps], results.ends[:steps], served_members
    )


def _fresh(count: int, rules: ServingRules) -> State:
    slots, seats = rules.ahead + 1, rules.max_num_seqs
    running, queue = np.zeros(seats, np.int64), np.zeros((slots, seats, 3), np.int64)
    sizes, ends = np.zeros(slots, np.int64), np.zeros(slots)
    read, out, gamma, blind, flying, flown = np.zeros((6, count), np.int64)
    return State(read, out, gamma, blind, flying, flown, running, queue, sizes, ends)

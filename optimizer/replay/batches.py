"""Many requests on the native decoder, replayed: the steps of :func:`runtime.loop.decode_steps`
over a recorded trace, by a simulated clock.

Which requests a step holds follows from when they arrive, the decoder's seats and its extents, one
chunk of a prompt before each step; which policy, from their number; what each round drafts and
accepts, from :mod:`optimizer.replay.round_tables`, its window's own state, and the function by
which windows learn. What a step takes is the cost model's. So the rounds are exact given the
moments at which requests arrive and steps end, and these are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.engines.engine import Load
from spectune.optimizer.replay.batch_costs import (
    BatchCosts,
    StepRows,
    batch_costs,
    batch_seconds,
    free_costs,
)
from spectune.optimizer.replay.chain_tables import Index
from spectune.optimizer.replay.loads import Served
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.round_tables import (
    ACCEPTED,
    CACHED,
    COLUMNS,
    DRAFTED,
    LEVELS,
    MISSING,
    PASSES,
    READ,
    tabulate_rounds,
)
from spectune.optimizer.replay.serving import Found, Queue, Simulated
from spectune.runtime.cache import first_fit, give_back
from spectune.runtime.costs import RoundKind
from spectune.runtime.loop import PROMPT_TOKENS
from spectune.runtime.policies.document import EXPANDED_LIMIT
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.on_the_fly import History, Learner, WindowLimits
from spectune.runtime.policies.plan import Plan
from spectune.runtime.policies.windows import (
    CompiledWindow,
    WindowState,
    advance,
    init_state,
    reset,
)
from spectune.traces.cost_table import FloatArray
from spectune.traces.errors import TraceError
from spectune.traces.tables import LatencyProfile

NO_BETA: Final = 1 << 40
"""Expected acceptances beyond any that are summed: a beta that is never exceeded."""


class Room(NamedTuple):
    """``seats`` requests at once, in a cache of ``slots`` (0: that grows), each with ``beside``
    slots for a tree; ``chunk`` tokens of prompts are read before a step."""

    seats: int
    slots: int
    beside: int
    chunk: int


class LoadTable(NamedTuple):
    """The policies of a table on a trace. ``at`` int64 [seats + 1]: the policy of so many running
    requests. By text: whether it is ``sampled`` (1). By draft: whether it ``rereads`` what is
    emitted. By policy: its ``draft``, by its number (-1:
    none); ``rounds`` and ``rows`` as in
    :class:`optimizer.replay.round_tables.RoundTable`, and its window: ``kind``, ``limits`` int64
    [policies, 3], ``history`` and ``expected``. ``blank``: a window of the same types."""

    at: Index
    sampled: Index
    draft: Index
    rereads: Index
    rounds: npt.NDArray[np.uint16]
    rows: npt.NDArray[np.uint8]
    kind: Index
    limits: npt.NDArray[np.int64]
    history: Index
    expected: npt.NDArray[np.int64]
    blank: CompiledWindow


class Books(NamedTuple):
    """What changes. By request: prompt tokens ``read``, tokens ``out``, the ``policy`` of its last
    round (-1: none yet), where its extent ``begin`` s, tokens that each draft has not read
    (``unread`` int64 [requests, drafts], -1: it follows the text not yet), and its window's state
    (``gamma``, ``rows``, ``accepted``, ``sums``, ``evidence``, ``now``, ``q``). ``running``: those
    that decode, in order; ``asked``, of each of them, its window in the step in hand; ``runs``:
    extents that are taken; ``missing`` int64 [1]: rounds that read what was not recorded."""

    read: Index
    out: Index
    policy: Index
    begin: Index
    unread: npt.NDArray[np.int64]
    gamma: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]
    sums: npt.NDArray[np.int64]
    evidence: npt.NDArray[np.int64]
    now: Any
    q: FloatArray
    running: Index
    asked: Index
    runs: npt.NDArray[np.int64]
    missing: Index


@compiled(inline=True)
def _window(table: LoadTable, p: int) -> CompiledWindow:
    a, b, c = table.limits[p]
    blank = table.blank
    return CompiledWindow(
        table.kind[p], WindowLimits(a, b, c), False, False, table.history[p], table.expected[p],
        blank.q_learning, blank.q,
    )  # fmt: skip


@compiled(inline=True)
def _state(table: LoadTable, books: Books, p: int, r: int) -> WindowState:
    """The state of a request's window, in place."""
    history = max(1, table.history[p])
    return WindowState(
        books.gamma[r : r + 1],
        History(
            books.rows[r, :history], books.accepted[r, :history], books.sums[r], books.evidence[r]
        ),
        Learner(books.now, books.q),
    )


@compiled(inline=True)
def _admit(queue: Queue, room: Room, books: Books, r: int, runs: int) -> bool:
    """Whether there is an extent for a request, which is then its own."""
    if room.slots == 0:
        return True
    t = queue.text[r]
    size = queue.prompts[t] + queue.budgets[t] + 1 + room.beside
    books.begin[r] = first_fit(books.runs, runs, room.slots, size)
    return bool(books.begin[r] >= 0)


@compiled(inline=True)
def _release(room: Room, books: Books, r: int, runs: int) -> int:
    """Gives an extent back; how many are taken."""
    if room.slots == 0:
        return runs
    give_back(books.runs, runs, books.begin[r])
    return runs - 1


@compiled(inline=True)
def _open(queue: Queue, table: LoadTable, books: Books, p: int, r: int) -> int:
    """The window of a request's next round under policy ``p``, clipped."""
    t = queue.text[r]
    if books.policy[r] != p:
        reset(_window(table, p), _state(table, books, p, r))
        books.policy[r] = p
    left = queue.budgets[t] - books.out[r] - 1
    gamma = max(0, min(books.gamma[r], left))
    d = table.draft[p]
    if gamma > 0 and d >= 0:
        is_short = queue.prompts[t] + books.out[r] < 2
        if books.unread[r, d] < 0 and table.rereads[d] != 0 and is_short:
            books.unread[r, d] = 0
        if books.unread[r, d] == 0:
            return 0  # a head has nothing to read
    return int(gamma)


@compiled(inline=True)
def _draft(
    queue: Queue,
    table: LoadTable,
    books: Books,
    costs: BatchCosts,
    step: StepRows,
    p: int,
    n: int,
) -> float:
    """Adds what the n-th running request reads in a step; seconds in which its draft reads a text
    that it did not follow."""
    r = books.running[n]
    t, d, gamma, late_s = queue.text[r], table.draft[p], books.asked[n], 0.0
    s, sampled = queue.begins[t] + books.out[r], table.sampled[t]
    row = table.rounds[p, s, gamma]
    cached, drafted, passes = queue.prompts[t] + books.out[r] - 1, row[DRAFTED], int(row[PASSES])
    if passes > 0:
        if books.unread[r, d] < 0:
            left, last = int(cached), costs.prompt.shape[1] - 1
            while left > 0:
                late_s += costs.prompt[d + 1, min(left, last)]
                # A head needs the target's states, which were not kept.
                late_s += costs.prompt[0, min(left, last)] if table.rereads[d] else 0.0
                left -= last
            books.unread[r, d] = 1
        for level in range(passes):
            rows = books.unread[r, d] if level == 0 else int(table.rows[p, s, level])
            step.level[level, 0] += rows
            step.level[level, 1] += rows * sampled
            step.level[level, 2] += cached
            step.level[level, 3] += 1
        step.verified[2] += drafted + 1
    step.verified[0] += drafted + 1
    step.verified[1] += (drafted + 1) * sampled
    step.verified[3] += cached
    step.verified[4] += 1
    step.passes[0] = max(step.passes[0], passes)
    return float(late_s)


@compiled(inline=True)
def _close(queue: Queue, table: LoadTable, books: Books, found: Found, p: int, n: int) -> int:
    """The n-th running request gets what its round emits; returns how much."""
    r = books.running[n]
    t, d, gamma = queue.text[r], table.draft[p], books.asked[n]
    row = table.rounds[p, queue.begins[t] + books.out[r], gamma]
    accepted, passes = int(row[ACCEPTED]), int(row[PASSES])
    emitted = min(accepted + 1, queue.lengths[t] - books.out[r])
    accepted = min(accepted, emitted)
    advance(
        _window(table, p), _state(table, books, p, r), int(row[LEVELS]), accepted, int(row[CACHED])
    )
    for other in range(books.unread.shape[1]):
        if books.unread[r, other] >= 0:
            books.unread[r, other] += emitted
    if passes > 0:
        books.unread[r, d] = emitted - int(row[READ])
    books.out[r] += emitted
    found.counts[r, 0] += 1
    found.counts[r, 1] += accepted
    found.counts[r, 2] += int(row[DRAFTED])
    books.missing[0] += int(row[MISSING])
    return int(emitted)


@compiled()
def decode_queue(
    queue: Queue,
    room: Room,
    table: LoadTable,
    costs: BatchCosts,
    books: Books,
    step: StepRows,
    found: Found,
) -> tuple[int, int]:
    """Serves the whole queue: how many steps and rounds that took.

    Of the requests so many have ``arrived``, were ``sent`` (all, where they come when they come),
    ``admitted`` and ``opened`` (their prompts are read); ``running`` decode."""
    total = len(queue.text)
    sent = min(queue.clients, total) if queue.clients > 0 else total
    arrived = admitted = opened = running = runs = steps = rounds = 0
    now = 0.0
    while True:
        while arrived < sent and queue.arrived[arrived] <= now:
            arrived += 1
        if running == 0 and opened == arrived:
            if arrived == sent:
                return steps, rounds
            now = queue.arrived[arrived]
            continue
        # Admit what there is room for; read prompts.
        while (
            admitted < arrived
            and running + admitted - opened < room.seats
            and _admit(queue, room, books, admitted, runs)
        ):
            d = table.draft[table.at[running + admitted - opened + 1]]
            if d >= 0:  # follows the text; a head reads from the second token on
                reads = queue.prompts[queue.text[admitted]] > 1 or table.rereads[d] == 0
                books.unread[admitted, d] = 1 if reads else 0
            runs += 1 if room.slots > 0 else 0
            admitted += 1
        prompt = 0
        while opened < admitted:
            left = queue.prompts[queue.text[opened]] - 1 - books.read[opened]
            count = min(room.chunk - prompt, left)
            prompt += count
            books.read[opened] += count
            now += costs.prompt[0, count]
            for d in range(books.unread.shape[1]):
                now += costs.prompt[d + 1, count] if books.unread[opened, d] >= 0 else 0.0
            if count < left:
                break
            books.running[running] = opened
            running, opened = running + 1, opened + 1
        if running == 0:
            continue
        # Open, draft, verify.
        p = int(table.at[running])
        step.level[:] = 0
        step.verified[:] = 0
        step.passes[0] = 0
        late_s = 0.0
        for n in range(running):
            books.asked[n] = _open(queue, table, books, p, books.running[n])
            late_s += _draft(queue, table, books, costs, step, p, n)
        # Close: each gets what its round emits, those whose texts end leave.
        for n in range(running):
            if len(found.members) > 0:
                r = books.running[n]
                s = queue.begins[queue.text[r]] + books.out[r]
                member = found.members[rounds]
                member[0], member[1], member[2] = steps, r, p
                member[3] = table.rounds[p, s, books.asked[n], DRAFTED]
            before = found.counts[books.running[n], 1]
            emitted = _close(queue, table, books, found, p, n)
            if len(found.members) > 0:
                found.members[rounds, 4] = found.counts[books.running[n], 1] - before
            step.verified[5] += emitted * table.sampled[queue.text[books.running[n]]]
            rounds += 1
        now += late_s + batch_seconds(costs, p, step)
        row = found.steps[steps]
        row[0], row[1], row[2] = running, step.verified[0], prompt
        row[3], row[4] = step.verified[3], step.passes[0]
        found.ends[steps] = now
        steps += 1
        count = 0
        for n in range(running):
            r = books.running[n]
            found.first[r] = now if found.first[r] < 0 else found.first[r]
            if books.out[r] < queue.lengths[queue.text[r]]:
                books.running[count] = r
                count += 1
                continue
            found.finished[r] = now
            runs = _release(room, books, r, runs)
            if queue.clients > 0 and sent < total:
                queue.arrived[sent] = now
                sent += 1
        running = count


@dataclass(frozen=True)
class Seating:
    """A decoder's ``seats``, and the ``slots`` of its caches (0: they grow)."""

    seats: int
    slots: int = 0


def serve_decoder(
    trace: ReplayTrace,
    plan: Plan,
    load: Load,
    seating: Seating,
    profile: LatencyProfile | None,
    *,
    count: int | None = None,
    members: bool = False,
    costs: BatchCosts | None = None,
) -> Simulated:
    """Serves the requests of a trace under a load: in order, from the first again where there are
    fewer than arrivals, or than the ``count`` that clients send (by default each once). Steps take
    what the ``profile`` says, or the ``costs`` that are given; without both no time. ``members``
    int64 [rounds, 5]: step, request, the number of the policy in a table by load, drafted and
    accepted tokens.

    Raises TraceError for a request that fits no extent, and where too little was recorded;
    PolicyError where the profile has no costs of several requests."""
    count = len(load.arrivals) or count or len(trace.order)
    text = trace.order[np.arange(count) % len(trace.order)]
    lengths = np.diff(trace.offsets)
    if not lengths[text].all():
        raise TraceError("a text without tokens has no round, so its load cannot be replayed")
    needed = trace.prompts + trace.budgets + 1 + EXPANDED_LIMIT
    if seating.slots and needed[text].max() > seating.slots:
        raise TraceError(
            f"a request needs {needed[text].max()} slots, {EXPANDED_LIMIT} of them for trees; "
            f"there are {seating.slots}"
        )
    arrived = np.array(load.arrivals or [0.0] * count)
    clients = 0 if load.arrivals else load.clients
    begins = trace.offsets[:-1]
    queue = Queue(text, arrived, clients, begins, trace.prompts, lengths, trace.budgets)
    table, drafts = _table(trace, plan, seating.seats)
    costs = costs or _costs(trace, plan, drafts, seating.seats, profile)
    most = int(lengths[text].sum())
    found = Found(
        np.full(count, -1.0), np.full(count, -1.0), np.zeros((count, 3), np.int64),
        np.zeros((most, 5), np.int32), np.zeros(most),
        np.zeros((most if members else 0, 5), np.int64),
    )  # fmt: skip
    room = Room(seating.seats, seating.slots, EXPANDED_LIMIT, PROMPT_TOKENS)
    books, step = _fresh(count, table, len(drafts), seating.seats)
    steps, rounds = decode_queue(queue, room, table, costs, books, step, found)
    if books.missing[0]:
        raise TraceError(
            f"{books.missing[0]} of {rounds} rounds of {plan.label} would read distributions that "
            "the recording does not hold, and the draft is not at hand to read them"
        )
    served = Served(arrived, found.first, found.finished, lengths[text])
    of = found.members[: rounds if members else 0]
    return Simulated(served, found.counts, found.steps[:steps], found.ends[:steps], of)


def _table(trace: ReplayTrace, plan: Plan, seats: int) -> tuple[LoadTable, list[str]]:
    """The table of a plan, and the drafts that read prompts under it."""
    plans = plan.plans
    tables = [tabulate_rounds(trace, each) for each in plans]
    drafts = list(dict.fromkeys(p.policy.draft for p in plans if p.policy.speculates))
    of = [drafts.index(p.policy.draft) if p.policy.speculates else -1 for p in plans]
    loads = plan.loads or (1,)
    numbers = np.searchsorted(loads, np.arange(seats + 1), side="right") - 1
    positions = int(trace.offsets[-1])
    windows = max(t.rounds.shape[1] for t in tables)
    rounds = np.zeros((len(plans), positions, windows, COLUMNS), np.uint16)
    rows = np.zeros((len(plans), positions, max(1, *(t.rows.shape[1] for t in tables))), np.uint8)
    betas = max(p.window.expected.shape[1] for p in plans)
    evidence = max(p.window.expected.shape[0] for p in plans)
    expected = np.zeros((len(plans), evidence, betas), np.int64)
    for n, (each, own) in enumerate(zip(plans, tables, strict=True)):
        rounds[n, :, : own.rounds.shape[1]] = own.rounds
        rows[n, :, : own.rows.shape[1]] = own.rows
        known = each.window.expected
        expected[n, 1:] = NO_BETA
        expected[n, : known.shape[0], : known.shape[1]] = known
    compiled_windows = [each.window for each in plans]
    return LoadTable(
        np.maximum(0, numbers),
        trace.sampled,
        np.array(of),
        np.array([int(trace.is_head(draft)) for draft in drafts] or [0]),
        rounds,
        rows,
        np.array([w.kind for w in compiled_windows]),
        np.array([tuple(w.limits) for w in compiled_windows], np.int64),
        np.array([w.history for w in compiled_windows]),
        expected,
        compiled_windows[0]._replace(kind=0, carries=False, reads_cache=False),
    ), drafts


def _costs(
    trace: ReplayTrace,
    plan: Plan,
    drafts: Sequence[str],
    seats: int,
    profile: LatencyProfile | None,
) -> BatchCosts:
    kinds = []
    for each in plan.plans:
        policy = each.policy
        tree = policy.speculates and (policy.is_tree or trace.is_head(policy.draft))
        kinds.append(RoundKind.of(policy, tree=tree))
    if profile is None:
        return free_costs(len(kinds), len(drafts), seats)
    shortlists = [each.shortlist for each in plan.plans]
    return batch_costs(profile, kinds, shortlists, drafts, seats)


def _fresh(count: int, table: LoadTable, drafts: int, seats: int) -> tuple[Books, StepRows]:
    history, betas = max(1, int(table.history.max())), table.expected.shape[2]
    learner = init_state(table.blank).learner
    read, out, begin = np.zeros((3, count), np.int64)
    books = Books(
        read, out, np.full(count, -1), begin, np.full((count, max(1, drafts)), -1),
        np.zeros(count, np.int64), np.zeros((count, history), np.int64),
        np.zeros((count, history), np.int64), np.zeros((count, 3), np.int64),
        np.zeros((count, betas), np.int64), learner.now, learner.q,
        np.zeros(seats, np.int64), np.zeros(seats, np.int64), np.zeros((seats + 1, 2), np.int64),
        np.zeros(1, np.int64),
    )  # fmt: skip
    passes = max(1, table.rows.shape[2])
    return books, StepRows(
        np.zeros((passes, 4), np.int64), np.zeros(6, np.int64), np.zeros(1, np.int64)
    )

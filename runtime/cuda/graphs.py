"""Passes captured once as CUDA graphs over slot caches, and replayed by one launch (HeteroSpec,
section 4.3: one computation graph per bin).

A captured pass is of a :class:`Shape`: a number of tokens, rounded up to one of :data:`RUNGS`, and
what is computed. :func:`prepare_graphs` captures what a policy's rounds can need before a request's
first round or, for a policy that is published, aside; anything else runs eagerly.

Tokens that only fill up the rung write to the cache's last slot, which no pass reads, and their
rows are dropped. Graphs hold the addresses of keys and values, so a cache that grows forgets them:
reserve the longest text first."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from spectune.runtime.attention import causal_mask
from spectune.runtime.cache import PassTokens, Seats
from spectune.runtime.cuda.launch import first_line
from spectune.runtime.cuda.seat_attention import tile_rows
from spectune.runtime.cuda.skinny import skinny_on
from spectune.runtime.drafts.device_trees import (
    MOST_PHASES,
    captured_sampling,
    grows_on_device,
    grows_together,
    tree_phase,
    trees_together,
)
from spectune.runtime.drafts.protocol import LONG_LAG
from spectune.runtime.models import Output, Outputs, PassKind, SlotModel, upload
from spectune.runtime.policies.document import NODE_LIMIT
from spectune.traces.schema import Sampling

if TYPE_CHECKING:
    from spectune.runtime.loading import LoadedPair
    from spectune.runtime.policies.plan import Plan

RUNGS: Final = (1, 8, 16, 32, 48, 64, 96, 128, 192, NODE_LIMIT + 1)
"""Numbers of tokens that passes are captured for: 8 take 2 to 3% longer than 1 (8B, H200)."""
SWITCH: Final = "SPECTUNE_CUDA_GRAPHS"
"""Environment variable; 0 leaves graphs out."""

TOGETHER: Final = (*RUNGS, 384, 512, 768, 1024, 1536, 2112)
"""The same of passes of several requests, up to 64 chains of 32 tokens."""

_RUNG_OF: Final = tuple(next(r for r in RUNGS if r >= n) for n in range(RUNGS[-1] + 1))
CAPTURING: Final = threading.RLock()
"""Held while a pass is captured, and while a cache that captured passes read is allocated anew."""
T = TypeVar("T")


class Shape(NamedTuple):
    """``tokens``, a rung, the kind of pass, and whether it is of several requests."""

    tokens: int
    kind: PassKind
    together: bool = False


class CudaRecorder:
    """Captures into CUDA graphs that share one memory pool, on streams of its own, while another
    thread may go on decoding.

    Graphs hold the workspaces of matrix products, which are a stream's: rehearsals have another
    stream, lest they write to what is being replayed."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._rehearsing = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._capturing = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._first: torch.cuda.CUDAGraph | None = None
        """Kept, since a pool that no graph holds any longer cannot be captured into."""

    def capture(self, compute: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """``compute`` works on fixed tensors. Returns what repeats its work on their contents of
        that time, and the outputs that this writes; they last until any other replay."""
        graph = torch.cuda.CUDAGraph()
        self._rehearsing.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._rehearsing):
            compute()  # libraries choose their kernels and make their workspaces
            self._rehearsing.synchronize()
        with torch.cuda.stream(self._capturing):
            # `torch.cuda.graph` would first wait for the whole device and empty its caches.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = compute()
            except BaseException:
                with suppress(RuntimeError):  # the capture has failed already
                    graph.capture_end()
                raise
            graph.capture_end()
        self._first = self._first or graph
        return graph.replay, outputs


class CapturedPass:
    """One captured pass, and the inputs that it reads. They begin as tokens that only fill up: id 0
    in the last slot, seeing the first."""

    def __init__(self, model: SlotModel, shape: Shape, recorder: CudaRecorder) -> None:
        n, kind, capacity = shape.tokens, shape.kind, model.cache.capacity
        device = model.device
        self._filler = torch.zeros(3, n, dtype=torch.int64, device=device)
        self._filler[2] = capacity
        self._inputs = torch.ones(3 * n + 1, dtype=torch.int64, device=device)
        self._numbers = self._inputs[:-1].view(3, n).copy_(self._filler)  # ids, positions, slots
        self._length, self._capacity = self._inputs[-1:], capacity
        self._mask = None
        if not kind.causal:
            self._mask = torch.zeros(n, capacity, dtype=torch.bool, device=device)
            self._mask[:, 0] = True
        width = model.hidden_size if kind.recurrent else model.feature_size
        self._hidden = torch.zeros(n, width, dtype=model.dtype, device=device) if width else None
        ids, positions, slots = self._numbers
        length, hidden = self._length, self._hidden
        inputs = PassTokens(
            ids, positions, slots, self._mask, capacity, length=length, hidden=hidden
        )

        def compute() -> Outputs:
            tokens = inputs
            if kind.causal:
                mask = causal_mask(slots, capacity, model.first_slot)
                tokens = inputs._replace(mask=mask)
            states, tapped = model.forward(tokens, recurrent=kind.recurrent)
            return Outputs(states, model.evaluate(kind.output, states), tapped)

        self._replay, self._outputs = recorder.capture(compute)

    def __call__(self, tokens: PassTokens) -> Outputs:
        """Replays the pass for n tokens, at most as many as were captured."""
        n, stop, mask = len(tokens.ids), tokens.stop, tokens.mask
        if mask is None and skinny_on():
            self._upload(tokens)
        else:
            for row, values in zip(self._numbers, tokens[:3], strict=True):
                row[:n] = values
            self._numbers[:, n:] = self._filler[:, n:]
            self._length.fill_(stop)
        if self._mask is not None and mask is not None:
            self._mask[:n, :stop] = mask
            self._mask[:n, stop:] = False
            self._mask[n:] = False
            self._mask[n:, 0] = True
        if self._hidden is not None and tokens.hidden is not None:
            self._hidden[:n] = tokens.hidden
        self._replay()
        states, result, tapped = self._outputs
        return Outputs(states[:n].clone(), result[:n].clone(), tapped[:n].clone())

    def _upload(self, tokens: PassTokens) -> None:
        """Fills in tokens that follow each other by one copy, and one of ids on the device."""
        n, rung, first, stop = len(tokens.ids), len(self._filler[0]), tokens.earliest, tokens.stop
        numbers = [*range(first, first + n), *[0] * (rung - n)]
        numbers += [*range(stop - n, stop), *[self._capacity] * (rung - n), stop]
        if tokens.ids.device.type == "cpu":
            upload([*tokens.ids.tolist(), *[0] * (rung - n), *numbers], self._inputs)
        else:
            upload(numbers, self._inputs[rung:])
            self._numbers[0, :n] = tokens.ids  # others are of a pass before


class CapturedTogether:
    """A captured pass over tokens of several requests, each of which follow each other in slots,
    and the inputs that it reads."""

    def __init__(self, model: SlotModel, shape: Shape, recorder: CudaRecorder, seats: int) -> None:
        n, kind, capacity, device = shape.tokens, shape.kind, model.cache.capacity, model.device
        self._capacity, self._rows = capacity, tile_rows(model.groups)
        self._most = min(n, seats + n // self._rows)
        self._inputs = torch.zeros(3 * n + 5 * self._most, dtype=torch.int64, device=device)
        self._inputs[2 * n : 3 * n] = capacity
        numbers, tiles = self._inputs[: 3 * n].view(3, n), self._inputs[3 * n :].view(-1, 5)
        self._ids = numbers[0]
        self._mask = torch.zeros(n, NODE_LIMIT + 1, dtype=torch.bool, device=device)
        self._hidden = None
        if model.feature_size:
            self._hidden = torch.zeros(n, model.feature_size, dtype=model.dtype, device=device)
        ids, positions, slots = numbers
        fed: dict[str, Any] = {"hidden": self._hidden, "seats": Seats(tiles, self._mask)}
        inputs = PassTokens(ids, positions, slots, None, capacity, **fed)

        def compute() -> Outputs:
            states, tapped = model.forward(inputs)
            return Outputs(states, model.evaluate(kind.output, states), tapped)

        self._replay, self._outputs = recorder.capture(compute)

    def __call__(self, passes: Sequence[PassTokens]) -> Outputs:
        """Replays the pass for at most as many tokens and tiles as were captured."""
        rung, n, places = len(self._ids), 0, list[int]()
        positions, tiles = list[int](), list[int]()
        seen = np.zeros(self._mask.shape, dtype=np.bool_)
        for tokens in passes:
            count, first = len(tokens.ids), tokens.first
            depths = range(count) if tokens.branches is None else tokens.branches.depths
            positions += [tokens.earliest + depth for depth in depths]
            places += range(first, tokens.stop)
            seen[n : n + count, :count] = tokens.seen()
            for begin in range(0, count, self._rows):
                rows = min(self._rows, count - begin)
                tiles += n + begin, rows, tokens.start, first, tokens.stop
            n += count
        filler = rung - n
        numbers = [*positions, *[0] * filler, *places, *[self._capacity] * filler, *tiles]
        upload([*numbers, *[0] * (5 * self._most - len(tiles))], self._inputs[rung:])
        self._ids[:n] = torch.cat([tokens.ids for tokens in passes])
        self._ids[n:] = 0
        self._mask.copy_(torch.from_numpy(seen), non_blocking=True)
        fed = [tokens.hidden for tokens in passes if tokens.hidden is not None]
        if self._hidden is not None:
            self._hidden[:n] = torch.cat(fed)
        self._replay()
        states, result, tapped = self._outputs
        return Outputs(states[:n].clone(), result[:n].clone(), tapped[:n].clone())


class PassGraphs:
    """The captured passes of one model. :meth:`capture` may run in another thread than :meth:`run`.

    ``replayed`` and ``eager`` count passes by tokens and kind. ``requests``: how the last few are
    sampled, and whether the rejection verifier decides (:func:`prepare_graphs`). ``seats``:
    requests that may run at once. ``problem``: why a pass could not be captured; then no more are
    until all are forgotten."""

    lock = CAPTURING

    def __init__(self, model: SlotModel, recorder: CudaRecorder) -> None:
        self.model, self.problem = model, ""
        self.replayed: Counter[tuple[int, PassKind]] = Counter()
        self.eager: Counter[tuple[int, PassKind]] = Counter()
        self.requests: tuple[tuple[Sampling, bool], ...] = ()
        self.seats = 1
        self._recorder = recorder
        self._passes: dict[Shape, CapturedPass] = {}
        self._together: dict[Shape, CapturedTogether] = {}
        self._seated, self._most = 1, TOGETHER[-1]
        """Requests that passes of several were captured for, and the most tokens that memory has
        room for."""

    @property
    def shapes(self) -> frozenset[Shape]:
        """What is captured."""
        return frozenset((*self._passes, *self._together))

    def forget(self) -> None:
        """Forgets all captured passes."""
        with CAPTURING:
            self._passes, self._together, self.problem = {}, {}, ""
            self._most = TOGETHER[-1]

    def run(self, kind: PassKind, tokens: PassTokens) -> Outputs | None:
        """A pass, replayed; None where its shape is not captured."""
        n = len(tokens.ids)
        captured = self._passes.get(Shape(_RUNG_OF[n], kind)) if n <= RUNGS[-1] else None
        (self.replayed if captured else self.eager)[n, kind] += 1
        return captured(tokens) if captured else None

    def run_together(self, kind: PassKind, passes: Sequence[PassTokens]) -> Outputs | None:
        """A pass over tokens of several requests, replayed; None where its shape is not captured,
        or tokens stand in slots that do not follow each other."""
        n, longest = sum(len(p.ids) for p in passes), max(len(p.ids) for p in passes)
        rung = next((r for r in TOGETHER if r >= n), 0)
        captured = self._together.get(Shape(rung, kind, together=True))
        fits = longest <= NODE_LIMIT + 1 and all(p.mask is None for p in passes)
        fits = fits and len(passes) <= self._seated
        (self.replayed if captured and fits else self.eager)[n, kind] += 1
        return captured(passes) if captured and fits else None

    def capture(self, most: int, kind: PassKind) -> None:
        """Captures passes of up to ``most`` tokens. What is captured already stays."""
        if not most or not self.model.cache.capacity:
            return
        rungs = RUNGS[: 1 + RUNGS.index(_RUNG_OF[min(most, RUNGS[-1])])]
        for rung in reversed(rungs):  # the largest first, so that the pool fits all
            shape = Shape(rung, kind)
            if shape not in self._passes:
                self._try(partial(self._add, shape))

    def capture_together(self, each: int, output: Output) -> None:
        """Captures passes over up to ``each`` tokens of as many requests as may run at once, unless
        one runs at a time, or layers see a window alone."""
        model = self.model
        if self.seats == 1 or not each or not model.cache.capacity or not model.can_join:
            return
        if self.seats > self._seated:  # they have room for fewer requests
            self._together, self._seated = {}, self.seats
        most = min(self.seats * each, self._most)
        rungs = [r for n, r in enumerate(TOGETHER) if not n or TOGETHER[n - 1] < most]
        for rung in reversed(rungs):
            shape = Shape(rung, PassKind(output, causal=False), together=True)
            if shape not in self._together:
                self._try(partial(self._add_together, shape))

    def _add(self, shape: Shape) -> None:
        self._passes[shape] = CapturedPass(self.model, shape, self._recorder)

    def _add_together(self, shape: Shape) -> None:
        try:
            captured = CapturedTogether(self.model, shape, self._recorder, self._seated)
        except torch.OutOfMemoryError:  # fewer tokens may do
            self._most = max((r for r in TOGETHER if r < shape.tokens), default=0)
            if not self._most:
                raise
        else:
            self._together[shape] = captured

    def record(
        self, compute: Callable[[], T], states: Tensor
    ) -> tuple[Callable[[], None], T] | None:
        """:meth:`CudaRecorder.capture` of what works on a cache's ``states``; None where that is
        not possible, or the cache has other ones by now."""
        return self._try(
            lambda: self._recorder.capture(compute) if states is self.model.cache.states else None
        )

    def _try(self, capture: Callable[[], T]) -> T | None:
        if self.problem:
            return None
        try:
            with CAPTURING:
                return capture()
        except Exception as error:  # it waits for the device, no memory, a kernel does not fit
            self.problem = first_line(error)
            logging.getLogger(__name__).warning(
                "%s: passes run without CUDA graphs: %s", self.model.name, self.problem
            )
            return None


def use_graphs(models: Iterable[SlotModel], recorder: CudaRecorder) -> None:
    """Lets models replay what :func:`prepare_graphs` captures."""
    for model in models:
        model.graphs = PassGraphs(model, recorder)


def graphs_enabled(device: torch.device) -> bool:
    """Whether passes on a device are to be captured: on CUDA, unless the environment says
    ``SPECTUNE_CUDA_GRAPHS=0``."""
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"


def prepare_graphs(
    pair: LoadedPair, prepared: Plan, *, sampling: Sampling | None = None, rejects: bool = False
) -> None:
    """Captures what rounds under a policy can need; nothing where the pair has no graphs, or what
    is there already. A text that is longer than was reserved (:meth:`LoadedPair.reserve`) needs all
    anew.

    ``sampling`` of a request, and whether the rejection verifier decides (``rejects``); without a
    sampling as the last few requests had it, for a policy that is prepared aside."""
    target = pair.target.graphs
    if target is None:
        return
    requests = target.requests
    if sampling is not None:
        request = captured_sampling(sampling), rejects
        others = (other for other in requests if other != request)
        target.requests, requests = (request, *others)[:MOST_PHASES], (request,)
    for plan in prepared.plans:
        for each, by_rejection in reversed(requests):
            _capture(pair, plan, each, by_rejection)


def _capture(pair: LoadedPair, plan: Plan, sampling: Sampling, rejects: bool) -> None:
    greedy = sampling.greedy
    target, draft = pair.target.graphs, pair.models.get(plan.policy.draft)
    assert target is not None
    answers: Output = "ids" if greedy else "logits"
    target.capture(1, PassKind(answers))
    target.capture_together(1, answers)
    if plan.rules is None:
        return
    rule, depth = plan.rules[0 if greedy else 1], plan.policy.depth_max
    head = draft is not None and draft.feature_size > 0
    tree = plan.policy.is_tree or head
    most = max(NODE_LIMIT if n is None else n for n in (rule.top_n, *rule.bin_top_n))
    target.capture(1 + min(rule.verified(depth), most), PassKind(answers, causal=not tree))
    target.capture_together(1 + min(rule.verified(depth), most), answers)
    if draft is None or draft.graphs is None:
        return
    grows = tree or plan.stop.active
    ids = greedy and not grows
    reads: Output = "states" if plan.shortlist is not None else "ids" if ids else "logits"
    draft.graphs.capture(LONG_LAG, PassKind(reads))
    # What a draft has not read of a text is what the round before accepted, and a token more. Of
    # several texts only the last tokens' output is read; in a chain's steps they are alone.
    draft.graphs.capture_together(depth + 1, "states")
    if not grows:
        draft.graphs.capture_together(1, reads)
    if grows and grows_on_device(draft, plan, rejects=rejects):
        tree_phase(plan, draft, sampling).capture(draft.graphs.record)
        for trees in trees_together(draft.graphs.seats):
            if grows_together(draft, plan, rule):
                tree_phase(plan, draft, sampling, trees).capture(draft.graphs.record)
    elif grows:
        widths = [rule.step_width(level) for level in range(2, depth + 1)]
        draft.graphs.capture(max(widths, default=0), PassKind(reads, causal=False, recurrent=head))

"""Passes prepared once and replayed: CUDA graphs over slot caches (HeteroSpec, section 4.3: one
computation graph per bin).

A pass of a language model is thousands of small kernels, and one of a small draft takes longer to
launch than to compute. So passes are captured, and a pass of the same :class:`Shape` is then
replayed by one launch: a number of tokens, rounded up to one of :data:`RUNGS`, a number of slots
that are read, rounded up to a power of two, and what is computed. What a policy's rounds can need
is captured before a request's first round or, for a policy that is published, aside
(:func:`prepare_graphs`). What is not captured runs as it always did.

A replay reads static buffers. Tokens that only fill up the rung write to scratch slots behind the
cache's capacity, which no pass reads, see slot 0 alone, and their rows are dropped: they can change
nothing. Graphs hold the addresses of keys and values, so those captured before a cache grew are
never replayed.

Nothing here waits for the device. Capturing goes through a :class:`CudaRecorder`; without CUDA
there is none, and no pass comes here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from spectune.runtime.attention import cudnn_attention
from spectune.runtime.drafts.protocol import LONG_LAG
from spectune.runtime.policies.document import EXPANDED_LIMIT, NODE_LIMIT, WIDTH_LIMIT

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from spectune.runtime.loading import LoadedPair
    from spectune.runtime.models import SlotModel
    from spectune.runtime.policies.plan import Plan
    from spectune.runtime.policies.prepared_chooser import AnyPlan

RUNGS: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, NODE_LIMIT + 1)
"""Numbers of tokens that passes are captured for."""
FIRST_VIEW: Final = 256
"""Slots that the smallest captured pass reads."""
REHEARSALS: Final = 3
"""Passes before a capture, in which libraries choose their kernels and make their workspaces."""
SWITCH: Final = "SPECTUNE_CUDA_GRAPHS"
"""Environment variable; 0 leaves graphs out."""

_RUNG_OF: Final = tuple(next(r for r in RUNGS if r >= n) for n in range(RUNGS[-1] + 1))
_CAPTURING = threading.Lock()


class Kind(NamedTuple):
    """What a pass computes: with ``head`` logits beside hidden states; ``own`` is an EAGLE head's,
    fed with its own outputs."""

    head: bool = True
    own: bool = False


class Shape(NamedTuple):
    """``tokens``, a rung; ``view``, the slots that are read; and the kind."""

    tokens: int
    view: int
    kind: Kind


class Outputs(NamedTuple):
    """``states`` [n, hidden_size]; ``logits`` float32 [n, vocab], [0] without a head; ``taps`` [n,
    hidden_size] each. Of a replay they are static buffers, which the next pass overwrites."""

    states: Tensor
    logits: Tensor
    taps: dict[int, Tensor]

    def of(self, change: Callable[[Tensor], Tensor]) -> Outputs:
        """Each of them changed."""
        taps = {tap: change(rows) for tap, rows in self.taps.items()}
        return Outputs(change(self.states), change(self.logits), taps)


class CudaRecorder:
    """Captures into CUDA graphs that share one memory pool. Replays follow each other on one
    stream, and what they give is copied out of the pool inside the graph, so no graph reads what
    another one overwrote. Other threads may go on decoding meanwhile."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], rehearse: Callable[[], None]) -> Callable[[], None]:
        """``run`` works on fixed tensors; returned is what repeats its work on their contents of
        that time. Capturing does not do the work. ``rehearse`` does the same work on other tensors,
        and may be called any number of times before."""
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with cudnn_attention(True):  # the fastest kernels
            with torch.cuda.stream(side):
                for _ in range(REHEARSALS):
                    rehearse()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
        replay: Callable[[], None] = graph.replay
        return replay


class _Inputs:
    """Static inputs of passes of up to ``most`` tokens; those of fewer use the first. They begin as
    tokens that do no harm."""

    def __init__(self, model: SlotModel, most: int = RUNGS[-1]) -> None:
        device, capacity = model.device, model.cache.capacity
        self._idle = torch.zeros(3, most, dtype=torch.int64, device=device)
        self._idle[2] = torch.arange(capacity, capacity + most, device=device)
        self.numbers = self._idle.clone()
        """Ids, positions and slots."""
        self._mask = torch.zeros(most * capacity, dtype=torch.bool, device=device)
        self._sees = torch.zeros(capacity, dtype=torch.bool, device=device)
        self._sees[0] = True
        self.hidden = {
            own: torch.zeros(most, width, dtype=model.dtype, device=device)
            for own in (False, True)
            if (width := model.fed(own))
        }

    def mask(self, tokens: int, view: int) -> Tensor:
        """Bool [tokens, view]."""
        return self._mask[: tokens * view].view(tokens, view)

    def fill(
        self, shape: Shape, numbers: tuple[Tensor, ...], mask: Tensor, hidden: Tensor | None
    ) -> None:
        """Takes in a pass of n tokens. Columns of ``mask`` [n, at most view] that are missing are
        False."""
        n, seen = mask.shape
        for row, values in zip(self.numbers, numbers, strict=True):
            row[:n] = values
        own = self.mask(shape.tokens, shape.view)
        own[:n, :seen] = mask
        own[:n, seen:] = False
        if n < shape.tokens:
            self.numbers[:, n : shape.tokens] = self._idle[:, n : shape.tokens]
            own[n:] = self._sees[: shape.view]
        if hidden is not None:
            self.hidden[shape.kind.own][:n] = hidden


class _Table:
    """The graphs over one allocation of a cache, whose first layer's keys are ``keys``. All work on
    the same inputs; ``trial`` are those of rehearsals, since a pass in another thread may be using
    the others. Outputs are shared by all views."""

    def __init__(self, model: SlotModel, keys: Tensor) -> None:
        self.keys = keys
        self.inputs, self.trial = _Inputs(model), _Inputs(model)
        self.outputs: dict[tuple[int, Kind], Outputs] = {}
        self.replays: dict[Shape, Callable[[], None]] = {}


class PassGraphs:
    """The captured passes of one model. :meth:`capture` may run in another thread than :meth:`run`;
    it touches nothing that passes use.

    ``reach``: tokens of the longest text that was asked for. ``replayed`` and ``eager`` count
    passes by tokens and kind. ``problem``: why a pass could not be captured; then no more are.
    """

    def __init__(self, model: SlotModel, recorder: CudaRecorder) -> None:
        self.model, self.reach, self.problem = model, 0, ""
        self.replayed: Counter[tuple[int, Kind]] = Counter()
        self.eager: Counter[tuple[int, Kind]] = Counter()
        self._recorder = recorder
        self._table: _Table | None = None
        model.cache.keep_scratch(RUNGS[-1])

    @property
    def shapes(self) -> frozenset[Shape]:
        """What is captured and would be replayed."""
        table = self._table
        return frozenset(table.replays if table and table.keys is self._keys() else ())

    def forget(self) -> None:
        """Forgets all graphs."""
        self._table = None

    def _keys(self) -> Tensor | None:
        layers = self.model.cache.layers
        return layers[0].keys if layers else None

    def run(
        self,
        head: bool,
        own: bool,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        hidden: Tensor | None = None,
    ) -> Outputs | None:
        """A pass of n tokens of :class:`Kind` ``head``, ``own`` under ``mask`` bool [n, slots that
        are read], replayed; None where its shape is not captured. ``ids``, ``positions``, ``slots``
        int64 [n]."""
        (n, reads), table, kind = mask.shape, self._table, Kind(head, own)
        capacity = self.model.cache.capacity
        if table and table.keys is self._keys() and n <= RUNGS[-1] and reads <= capacity:
            shape = Shape(_RUNG_OF[n], views_up_to(reads, capacity)[-1], kind)
            if (replay := table.replays.get(shape)) is not None:
                self.replayed[n, kind] += 1
                table.inputs.fill(shape, (ids, positions, slots), mask, hidden)
                replay()
                return table.outputs[shape.tokens, kind].of(lambda rows: rows[:n])
        self.eager[n, kind] += 1
        return None

    def hold(self, text: int, tokens: int) -> None:
        """Makes room for texts of ``text`` tokens in ``tokens`` slots, which forgets what is cached
        if the cache must grow."""
        self.reach = max(self.reach, text)
        self.model.reserve(tokens)
        if self._keys() is None:  # allocated by a pass, which alone knows the layers' sizes
            shape = Shape(1, self.model.cache.capacity, Kind(head=False))
            self.model.cache.adopt(self._compute(shape, _Inputs(self.model, 1))[1])

    def capture(self, most: int, kind: Kind, beyond: int) -> None:
        """Captures passes of up to ``most`` tokens, for every view of texts up to ``reach`` and
        ``beyond`` slots behind them. What is captured already stays."""
        keys, capacity = self._keys(), self.model.cache.capacity
        if keys is None or not self.reach or self.problem or not most:
            return
        table = self._table
        if table is None or table.keys is not keys:
            table = self._table = _Table(self.model, keys)
        views = views_up_to(min(self.reach + beyond, capacity), capacity)
        rungs = RUNGS[: 1 + RUNGS.index(_RUNG_OF[min(most, RUNGS[-1])])]
        wanted = {Shape(rung, view, kind) for rung in rungs for view in views}
        with _CAPTURING:
            # The largest first, so that the pool fits all.
            for shape in sorted(wanted - table.replays.keys(), reverse=True):
                try:
                    table.replays[shape] = self._captured(shape, table)
                except RuntimeError as error:  # it waits for the device within a pass, or no memory
                    self.problem = str(error).splitlines()[0]
                    logging.getLogger(__name__).warning(
                        "%s: passes run without CUDA graphs: %s", self.model.name, self.problem
                    )
                    return

    def _captured(self, shape: Shape, table: _Table) -> Callable[[], None]:
        place = shape.tokens, shape.kind
        if place not in table.outputs:
            table.outputs[place] = self._compute(shape, table.trial)[0].of(torch.empty_like)
        kept = table.outputs[place]

        def run() -> None:
            made = self._compute(shape, table.inputs)[0]
            kept.states.copy_(made.states)
            if shape.kind.head:
                kept.logits.copy_(made.logits)
            for tap, rows in kept.taps.items():
                rows.copy_(made.taps[tap])

        def rehearse() -> None:
            self._compute(shape, table.trial)

        return self._recorder.capture(run, rehearse)

    def _compute(self, shape: Shape, inputs: _Inputs) -> tuple[Outputs, Cache]:
        model, (tokens, view, (head, own)) = self.model, shape
        ids, positions, slots = inputs.numbers[:, :tokens]
        cache, hidden = model.cache.bound(slots, view), inputs.hidden.get(own)
        states, taps = model.over(
            ids,
            positions,
            inputs.mask(tokens, view),
            cache,
            None if hidden is None else hidden[:tokens],
            own,
        )
        return Outputs(states, model.head(states) if head else states.new_zeros(0), taps), cache


def views_up_to(reads: int, capacity: int) -> list[int]:
    """The numbers of slots that captured passes read in place of up to ``reads``: powers of two, if
    the cache has as many."""
    views = [min(FIRST_VIEW, capacity)]
    while views[-1] < reads:
        views.append(min(2 * views[-1], capacity))
    return views


def use_graphs(models: Iterable[SlotModel], recorder: CudaRecorder) -> None:
    """Lets models replay what :func:`prepare_graphs` captures; what their caches hold is
    forgotten."""
    for model in models:
        model.graphs = PassGraphs(model, recorder)


def wanted(device: torch.device) -> bool:
    """Whether passes on a device are to be captured: on CUDA, unless the environment says
    ``SPECTUNE_CUDA_GRAPHS=0``."""
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"


def prepare_graphs(
    pair: LoadedPair, prepared: AnyPlan, text: int = 0, *, every: bool = False
) -> None:
    """Captures what rounds under a policy can need; nothing where the pair has no graphs, or what
    is there already. A draft that another policy left behind may need more in its first round.

    ``text``: tokens that texts may have, for which the caches of all models are made large enough,
    so that none grows within a request; 0 asks for no more room than there is, so that it may be
    called while another thread decodes. ``every``: whatever any policy with this one's draft can
    need.
    """
    target = pair.target.graphs
    if target is None:
        return
    if text:
        target.hold(text, text + NODE_LIMIT)
        for model in pair.models.values():
            if model.graphs is not None:
                model.graphs.hold(text, text + EXPANDED_LIMIT)
    for plan in prepared.candidates:
        draft = pair.models.get(plan.policy.draft)
        head = draft is not None and draft.fed(own=True) > 0
        verified, first, later, drafted = (
            (NODE_LIMIT, LONG_LAG, WIDTH_LIMIT, EXPANDED_LIMIT)
            if every
            else _most_tokens(plan, head=head)
        )
        target.capture(1 + verified, Kind(), 1 + verified)
        if draft is not None and draft.graphs is not None:
            kind = Kind(plan.shortlist is None)
            draft.graphs.capture(first, kind, drafted)
            draft.graphs.capture(later, kind._replace(own=head), drafted)


def _most_tokens(plan: Plan, *, head: bool) -> tuple[int, int, int, int]:
    """Of a round under a policy the most nodes that the target verifies, the most tokens that the
    draft's first pass reads, that a later one reads, and that all later ones read. ``head``: the
    draft is an EAGLE head."""
    if plan.rules is None:
        return 0, 0, 0, 0
    rule, depth = plan.rules[0], plan.policy.depth_max
    most = max(NODE_LIMIT if n is None else n for n in (rule.top_n, *rule.kept))
    widths = [rule.step_width(level) for level in range(2, depth + 1)]
    # A head reads all that a round emitted; a language model its last token, and the last accepted
    # one, which it may only have proposed. Rounds without a draft leave more to read.
    lag = depth + 1 if head else 2
    if getattr(plan.policy.window, "gamma_min", 1) == 0:
        lag = LONG_LAG
    return min(rule.verified(depth), most), lag, max(widths, default=0), sum(widths)

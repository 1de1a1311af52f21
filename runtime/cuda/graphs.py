"""Passes prepared once and replayed: CUDA graphs over slot caches (HeteroSpec, section 4.3: one
computation graph per bin).

A pass of a language model is thousands of small kernels, and one of a small draft takes longer to
launch than to compute. Rounds of one policy make few shapes of passes, so each is captured once and
then replayed by one launch. A :class:`Shape` is a number of tokens, rounded up to one of
:data:`RUNGS`, a number of slots that are read, rounded up to a power of two, and what is computed.
:mod:`runtime.cuda.pass_sizes` says which numbers of tokens a policy's windows, stops, bins and N'
can make, and has these and no others captured, before a request's first round or, for a policy that
is published, aside. What is not captured runs as it always did.

A replay reads static buffers. Tokens that only fill up the rung write to scratch slots behind the
cache's capacity, which no pass reads, see slot 0 alone, and their rows are dropped: they can change
nothing. Graphs hold the addresses of keys and values, so those captured before a cache grew are
never replayed.

Nothing here waits for the device. Capturing goes through a :class:`Recorder`; without CUDA there is
none, and no pass comes here. No GPU has run this yet.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from spectune.runtime.policies.document import NODE_LIMIT

if TYPE_CHECKING:
    from spectune.runtime.drafts.eagle_head import EagleHead
    from spectune.runtime.models import CausalModel

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


def bucket(reads: int, capacity: int) -> int:
    """Slots that a captured pass reads in place of ``reads``: the next power of two, if the cache
    has as many."""
    view = FIRST_VIEW
    while view < reads:
        view *= 2
    return min(view, capacity)


def views_up_to(reads: int, capacity: int) -> list[int]:
    """Every :func:`bucket` of passes that read up to ``reads`` slots."""
    views = [bucket(1, capacity)]
    while views[-1] < reads:
        views.append(min(2 * views[-1], capacity))
    return views


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


class Recorder(Protocol):
    """Captures a pass."""

    def capture(self, run: Callable[[], None], rehearse: Callable[[], None]) -> Callable[[], None]:
        """``run`` works on fixed tensors; returned is what repeats its work on their contents of
        that time. Capturing does not do the work. ``rehearse`` does the same work on other tensors,
        and may be called any number of times before."""


class CudaRecorder:
    """Captures into CUDA graphs that share one memory pool. Replays follow each other on one
    stream, and what they give is copied out of the pool inside the graph, so no graph reads what
    another one overwrote. Other threads may go on decoding meanwhile."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], rehearse: Callable[[], None]) -> Callable[[], None]:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
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
    """Static inputs of a rung: ``ids``, ``positions``, ``slots`` int64 [tokens], ``hidden``
    [tokens, width] or None, and a mask of any view. They begin as tokens that do no harm."""

    def __init__(self, model: CausalModel | EagleHead, tokens: int, own: bool) -> None:
        device, capacity = model.device, model.cache.capacity
        self._idle = torch.zeros(3, tokens, dtype=torch.int64, device=device)
        self._idle[2] = torch.arange(capacity, capacity + tokens, device=device)
        self._numbers = self._idle.clone()
        self.ids, self.positions, self.slots = self._numbers
        self._mask = torch.zeros(tokens * capacity, dtype=torch.bool, device=device)
        self._sees = torch.zeros(1, capacity, dtype=torch.bool, device=device)
        self._sees[0, 0] = True
        width = model.fed(own)
        self.hidden = (
            torch.zeros(tokens, width, dtype=model.dtype, device=device) if width else None
        )

    def mask(self, view: int) -> Tensor:
        """Bool [tokens, view]."""
        tokens = self._numbers.shape[1]
        return self._mask[: tokens * view].view(tokens, view)

    def fill(
        self,
        view: int,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        hidden: Tensor | None,
    ) -> None:
        """Takes in a pass of n tokens. Columns of ``mask`` [n, at most view] that are missing are
        False."""
        n, seen = mask.shape
        self.ids[:n], self.positions[:n], self.slots[:n] = ids, positions, slots
        own = self.mask(view)
        own[:n, :seen] = mask
        own[:n, seen:] = False
        if n < own.shape[0]:
            self._numbers[:, n:] = self._idle[:, n:]
            own[n:] = self._sees[:, :view]
        if self.hidden is not None and hidden is not None:
            self.hidden[:n] = hidden


class _Graph(NamedTuple):
    inputs: _Inputs
    outputs: Outputs
    replay: Callable[[], None]


class _Table:
    """The graphs over one allocation of a cache, whose first layer's keys are ``keys``; inputs and
    outputs are shared by all views."""

    def __init__(self, keys: Tensor | None) -> None:
        self.keys = keys
        self.graphs: dict[Shape, _Graph] = {}
        self.buffers: dict[tuple[int, Kind], tuple[_Inputs, Outputs]] = {}


class PassGraphs:
    """The captured passes of one model. :meth:`capture` may run in another thread than :meth:`run`;
    it touches nothing that passes use.

    ``reach``: tokens of the longest text that was asked for. ``replayed`` and ``eager`` count
    passes by tokens and kind. ``problem``: why a pass could not be captured; then no more are.
    """

    def __init__(self, model: CausalModel | EagleHead, recorder: Recorder) -> None:
        self.model, self.reach, self.problem = model, 0, ""
        self.replayed: Counter[tuple[int, Kind]] = Counter()
        self.eager: Counter[tuple[int, Kind]] = Counter()
        self._recorder = recorder
        self._table = _Table(None)
        model.cache.keep_scratch(RUNGS[-1])

    @property
    def shapes(self) -> frozenset[Shape]:
        """What is captured and would be replayed."""
        return frozenset(self._table.graphs) if self._table.keys is self._keys() else frozenset()

    def forget(self) -> None:
        """Forgets all graphs."""
        self._table = _Table(None)

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
        (n, reads), table, kind, capacity = (
            mask.shape,
            self._table,
            Kind(head, own),
            self.model.cache.capacity,
        )
        graph, view = None, bucket(reads, capacity)
        if n <= RUNGS[-1] and reads <= capacity and table.keys is self._keys():
            graph = table.graphs.get(Shape(_RUNG_OF[n], view, kind))
        if graph is None:
            self.eager[n, kind] += 1
            return None
        self.replayed[n, kind] += 1
        graph.inputs.fill(view, ids, positions, slots, mask, hidden)
        graph.replay()
        states, logits, taps = graph.outputs
        return Outputs(states[:n], logits[:n], {tap: rows[:n] for tap, rows in taps.items()})

    def hold(self, text: int, tokens: int) -> None:
        """Makes room for texts of ``text`` tokens in ``tokens`` slots, which forgets what is cached
        if the cache must grow."""
        self.reach = max(self.reach, text)
        self.model.reserve(tokens)
        cache = self.model.cache
        if self._keys() is None:  # allocated by a pass, which alone knows the layers' sizes
            inputs, view = _Inputs(self.model, 1, False), bucket(1, cache.capacity)
            layers = cache.bound(inputs.slots, view)
            with torch.no_grad():
                self.model.over(
                    inputs.ids, inputs.positions, inputs.mask(view), layers, inputs.hidden, False
                )
            cache.adopt(layers)

    def capture(self, needs: Mapping[Kind, Iterable[int]], beyond: int) -> None:
        """Captures passes of these numbers of tokens, for every view of texts up to ``reach`` and
        ``beyond`` slots behind them. What is captured already stays."""
        keys = self._keys()
        if keys is None or not self.reach or self.problem:
            return
        table = self._table
        if table.keys is not keys:
            table = self._table = _Table(keys)
        capacity = self.model.cache.capacity
        views = views_up_to(min(self.reach + beyond, capacity), capacity)
        rungs = {
            (_RUNG_OF[n], kind) for kind, tokens in needs.items() for n in tokens if n <= RUNGS[-1]
        }
        wanted = {Shape(rung, view, kind) for rung, kind in rungs for view in views}
        with _CAPTURING, torch.no_grad():
            for shape in sorted(
                wanted - table.graphs.keys(), reverse=True
            ):  # the largest first, so that the pool fits all
                try:
                    table.graphs[shape] = self._captured(shape, table)
                except (
                    RuntimeError
                ) as error:  # a model that waits for the device within a pass, or no memory
                    self.problem = str(error).splitlines()[0]
                    logging.getLogger(__name__).warning(
                        "%s: passes run without CUDA graphs: %s", self.model.name, self.problem
                    )
                    return

    def _captured(self, shape: Shape, table: _Table) -> _Graph:
        """Captures a shape. Rehearsals have inputs of their own, since a pass in another thread may
        be using the rung's."""
        trial = _Inputs(self.model, shape.tokens, shape.kind.own)
        found = table.buffers.get((shape.tokens, shape.kind))
        if found is None:
            states, logits, taps = self._compute(shape, trial)
            made = torch.empty_like
            outputs = Outputs(
                made(states), made(logits), {tap: made(rows) for tap, rows in taps.items()}
            )
            found = table.buffers[shape.tokens, shape.kind] = (
                _Inputs(self.model, shape.tokens, shape.kind.own),
                outputs,
            )
        inputs, outputs = found

        def run() -> None:
            states, logits, taps = self._compute(shape, inputs)
            outputs.states.copy_(states)
            if shape.kind.head:
                outputs.logits.copy_(logits)
            for tap, rows in outputs.taps.items():
                rows.copy_(taps[tap])

        def rehearse() -> None:
            self._compute(shape, trial)

        return _Graph(inputs, outputs, self._recorder.capture(run, rehearse))

    def _compute(self, shape: Shape, inputs: _Inputs) -> Outputs:
        model, kind = self.model, shape.kind
        layers = model.cache.bound(inputs.slots, shape.view)
        mask = inputs.mask(shape.view)
        states, taps = model.over(
            inputs.ids, inputs.positions, mask, layers, inputs.hidden, kind.own
        )
        return Outputs(states, model._head(states) if kind.head else states.new_zeros(0), taps)


def use_graphs(models: Iterable[CausalModel | EagleHead], recorder: Recorder) -> None:
    """Lets models replay what :func:`runtime.cuda.pass_sizes.prepare_graphs` captures; what their
    caches hold is forgotten."""
    for model in models:
        model.graphs = PassGraphs(model, recorder)


def wanted(device: torch.device) -> bool:
    """Whether passes on a device are to be captured: on CUDA, unless the environment says
    ``SPECTUNE_CUDA_GRAPHS=0``."""
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"

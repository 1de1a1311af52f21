"""One tensor of keys and values a model, of numbered slots. It holds no length: a pass is given the
slots that it writes and how many it reads, and what a rejected draft left behind is masked and
overwritten. Requests that run together own an extent each: one run of slots, first fit, which they
keep to their end.

Where layers see a window of positions alone, the cache knows the position of each slot's token: a
tree's nodes stand in slots behind their text, at positions that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from spectune.runtime.policies.jit import compiled


class PassTokens(NamedTuple):
    """The n tokens of a pass: ``ids``, ``positions`` and the ``slots`` that they are written to,
    int64 [n] each.

    They read slots ``start .. stop - 1`` under ``mask``, bool [n, stop - start] (True: attend);
    without one they are the last of these slots, and each sees the slots up to its own. ``length``,
    int64 [1]: where the slots that are seen at all end, told on the device. ``hidden`` [n, width]:
    the states that a head reads beside its tokens. ``spans`` or ``seats``: whose the tokens are
    where they are several requests'; then the other fields say nothing of what is read.
    ``earliest``: no position is smaller; a window leaves slots before it unread. ``branches``: how
    tokens in slots that follow each other are a tree's; then they stand at ``earliest`` and its
    depths, whatever ``positions`` say, and have no mask yet."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor | None
    stop: int
    start: int = 0
    length: Tensor | None = None
    hidden: Tensor | None = None
    spans: tuple[Span, ...] = ()
    earliest: int = 0
    seats: Seats | None = None
    branches: Branches | None = None

    @property
    def first(self) -> int:
        """The slot of the first, where they follow each other."""
        return self.stop - len(self.ids)

    def seen(self) -> npt.NDArray[np.bool_]:
        """Which of the tokens, in slots that follow each other, each of them sees: bool [n, n]."""
        if self.branches is not None:
            return self.branches.seen
        return np.tri(len(self.ids), dtype=np.bool_)

    def spread(self) -> PassTokens:
        """The same with its branches as positions and a mask."""
        if self.branches is None:
            return self
        n, device, first = len(self.ids), self.slots.device, self.first - self.start
        mask = torch.ones(n, first + n, dtype=torch.bool, device=device)
        mask[:, first:] = torch.from_numpy(self.branches.seen).to(device)
        positions = torch.tensor(self.branches.depths, device=device) + self.earliest
        return self._replace(positions=positions, mask=mask, branches=None)


class Branches(NamedTuple):
    """A tree's root and nodes: their ``depths``, the root's 0, and which of them each of them sees,
    ``seen`` bool [n, n]."""

    depths: list[int]
    seen: npt.NDArray[np.bool_]


class Seats(NamedTuple):
    """Whose the tokens of a pass are, told on the device. ``tiles`` int64 [any, 5]: of rows of one
    request the first and how many, and the slots where what they see begins, from which on ``mask``
    says which they see, and where it ends. ``mask`` bool [n, most], by slots from there on."""

    tiles: Tensor
    mask: Tensor


class Span(NamedTuple):
    """One request's tokens among those of a pass, ``first .. last - 1``, and what they read, as in
    :class:`PassTokens`. ``mask`` may be what :func:`runtime.attention.layer_mask` made of it."""

    first: int
    last: int
    start: int
    stop: int
    mask: Tensor | None
    earliest: int


def together(passes: Sequence[PassTokens]) -> PassTokens:
    """One pass over the tokens of several requests, which see nothing of each other."""
    if len(passes) == 1:
        return passes[0]
    ids, positions, slots = (torch.cat([p[i] for p in passes]) for i in range(3))  # type: ignore[misc]
    hidden = [p.hidden for p in passes if p.hidden is not None]
    spans, first = [], 0
    for each in passes:
        last = first + len(each.ids)
        spans.append(Span(first, last, each.start, each.stop, each.mask, each.earliest))
        first = last
    stop = max(each.stop for each in passes)
    fed = torch.cat(hidden) if hidden else None
    return PassTokens(ids, positions, slots, None, stop, hidden=fed, spans=tuple(spans))


def apart(rows: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """The rows of each request; torch's ``split`` takes microseconds, also for one."""
    if len(sizes) == 1:
        return (rows,)
    parts: tuple[Tensor, ...] = torch.split(rows, sizes)  # type: ignore[no-untyped-call]
    return parts


class LayerShape(NamedTuple):
    """Sizes of one layer's keys and values."""

    heads: int
    key_size: int
    value_size: int


class SlotCache:
    """Keys and values of a model's layers: ``states`` [layers, 2, heads, capacity + 1, size]; a
    layer of fewer heads or smaller ones uses the first. The last slot is read by no pass: tokens
    that only fill up a pass write to it. What was never written is 0.

    ``window``: positions that sliding layers see, a token's own included (None: no layer slides).
    ``positions`` int64 [capacity + 1] are then those of the tokens in the slots."""

    def __init__(
        self,
        layers: list[LayerShape],
        dtype: torch.dtype,
        device: torch.device | str,
        window: int | None = None,
    ) -> None:
        self.shapes, self.window = layers, window
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)
        heads = max((layer.heads for layer in layers), default=0)
        size = max((max(layer.key_size, layer.value_size) for layer in layers), default=0)
        self.states = torch.zeros(len(layers), 2, heads, 1, size, dtype=dtype, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = []
        """Every layer's keys and values, [1, heads, capacity + 1, size]."""
        self.written: list[tuple[Tensor, Tensor]] = []
        """The same, [heads, capacity + 1, size]; made once, as slices take microseconds."""

    @property
    def capacity(self) -> int:
        """Slots that there are."""
        return self.states.shape[3] - 1

    def reserve(self, slots: int, *, keep: bool = False) -> None:
        """Makes room for so many slots. Where a new tensor has to be allocated, it is of at least
        one and a half times the size, and what was cached is forgotten, unless ``keep``."""
        if slots <= self.capacity:
            return
        shape = [*self.states.shape]
        shape[3] = max(slots, self.capacity * 3 // 2) + 1
        old = self.states
        if not keep:  # frees what is forgotten before more is allocated
            old = self.states = old.new_zeros(*shape[:3], 1, shape[4])
            self.layers, self.written = [], []
        self.states = old.new_zeros(shape)
        self.states[:, :, :, : old.shape[3]] = old
        if self.window is not None:
            positions = self.positions.new_zeros(shape[3])
            positions[: len(self.positions)] = self.positions
            self.positions = positions
        self.layers = [
            (keys[None, : layer.heads, :, : layer.key_size],
             values[None, : layer.heads, :, : layer.value_size])
            for layer, (keys, values) in zip(self.shapes, self.states, strict=True)
        ]  # fmt: skip
        self.written = [(keys[0], values[0]) for keys, values in self.layers]

    def view(self, tokens: PassTokens) -> CacheView:
        """What a pass sees of the cache, which is told its positions where layers slide. Raises
        IndexError beyond the capacity."""
        if tokens.stop > self.capacity:
            raise IndexError(f"a pass over {tokens.stop} slots exceeds the cache's {self.capacity}")
        if self.window is not None:
            self.positions.index_copy_(0, tokens.slots, tokens.positions)
        return CacheView(self, tokens)

    def move(self, slots: list[int], targets: list[int]) -> None:
        """Copies slots (any order) to ``targets``, which may overlap: what the accepted paths of
        trees become."""
        if slots != targets:
            moved, into = torch.tensor([slots, targets], device=self.states.device)
            self.states.index_copy_(3, into, self.states.index_select(3, moved))
            if self.window is not None:
                self.positions[into] = self.positions[moved]


class Extents:
    """The runs of slots that requests own, one each, in a cache of ``capacity``: first fit."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.runs = np.zeros((8, 2), np.int64)
        """Where each begins and ends, ascending."""
        self.count = 0

    def take(self, size: int) -> int | None:
        """Where a run of ``size`` slots now begins; None: no gap is as long."""
        if self.count == len(self.runs):
            self.runs = np.concatenate([self.runs, np.zeros_like(self.runs)])
        begin = first_fit(self.runs, self.count, self.capacity, size)
        if begin < 0:
            return None
        self.count += 1
        return int(begin)

    def clear(self) -> None:
        """Gives back all."""
        self.count = 0

    def give(self, begin: int) -> None:
        """Gives back the run that begins there."""
        give_back(self.runs, self.count, begin)
        self.count -= 1


@compiled()
def first_fit(runs: npt.NDArray[np.int64], count: int, capacity: int, size: int) -> int:
    """Where the first gap of ``size`` slots begins, or -1. The first ``count`` of ``runs`` int64
    [more than count, 2] are taken, ascending; the gap becomes one of them."""
    begin, at = 0, 0
    while at < count and runs[at, 0] - begin < size:
        begin = runs[at, 1]
        at += 1
    if at == count and capacity - begin < size:
        return -1
    for i in range(count, at, -1):
        runs[i, 0], runs[i, 1] = runs[i - 1, 0], runs[i - 1, 1]
    runs[at, 0], runs[at, 1] = begin, begin + size
    return begin


@compiled()
def give_back(runs: npt.NDArray[np.int64], count: int, begin: int) -> None:
    """Takes the run that begins there out of the first ``count``, which stay in order."""
    at = 0
    while runs[at, 0] != begin:
        at += 1
    for i in range(at, count - 1):
        runs[i, 0], runs[i, 1] = runs[i + 1, 0], runs[i + 1, 1]


class CacheView(Cache):  # type: ignore[misc]  # transformers carries no types
    """One pass's part of a :class:`SlotCache`, as transformers' models take it. ``full``: what each
    request's tokens read in layers of full attention; ``sliding``: in those of a window."""

    def __init__(self, cache: SlotCache, tokens: PassTokens) -> None:
        super().__init__(layers=[])
        self.cache, self.slots = cache, tokens.slots
        self.positions, self.length, self.seats = tokens.positions, tokens.length, tokens.seats
        alone = Span(0, len(tokens.ids), tokens.start, tokens.stop, tokens.mask, tokens.earliest)
        self.full = self.sliding = tokens.spans or (alone,)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes a layer's keys and values [1, heads, n, size], and returns those of all slots."""
        keys, values = self.cache.layers[layer_idx]
        keys.index_copy_(2, self.slots, key_states)
        values.index_copy_(2, self.slots, value_states)
        return keys, values

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, [heads, capacity + 1, size], to write ``slots`` of."""
        return self.cache.written[layer]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.full[-1].stop, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

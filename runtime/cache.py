"""One tensor of keys and values a model, of numbered slots. It holds no length: a pass is given the
slots that it writes and how many it reads, and what a rejected draft left behind is masked and
overwritten."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class PassTokens(NamedTuple):
    """The n tokens of a pass: ``ids``, ``positions`` and the ``slots`` that they are written to,
    int64 [n] each.

    They read slots ``start .. stop - 1`` under ``mask``, bool [n, stop - start] (True: attend);
    without one they are the last of these slots, and each sees the slots up to its own. ``length``,
    int64 [1]: where the slots that are seen at all end, told on the device. ``hidden`` [n, width]:
    the states that a head reads beside its tokens."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor | None
    stop: int
    start: int = 0
    length: Tensor | None = None
    hidden: Tensor | None = None


class LayerShape(NamedTuple):
    """Sizes of one layer's keys and values."""

    heads: int
    key_size: int
    value_size: int


class SlotCache:
    """Keys and values of a model's layers: ``states`` [layers, 2, heads, capacity + 1, size]; a
    layer of fewer heads or smaller ones uses the first. The last slot is read by no pass: tokens
    that only fill up a pass write to it. What was never written is 0."""

    def __init__(
        self, layers: list[LayerShape], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.shapes = layers
        heads = max((layer.heads for layer in layers), default=0)
        size = max((max(layer.key_size, layer.value_size) for layer in layers), default=0)
        self.states = torch.zeros(len(layers), 2, heads, 1, size, dtype=dtype, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = []
        """Every layer's keys and values, [1, heads, capacity + 1, size]."""

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
            self.layers = []
        self.states = old.new_zeros(shape)
        self.states[:, :, :, : old.shape[3]] = old
        self.layers = [
            (keys[None, : layer.heads, :, : layer.key_size],
             values[None, : layer.heads, :, : layer.value_size])
            for layer, (keys, values) in zip(self.shapes, self.states, strict=True)
        ]  # fmt: skip

    def view(self, tokens: PassTokens) -> CacheView:
        """What a pass sees of the cache. Raises IndexError beyond the capacity."""
        if tokens.stop > self.capacity:
            raise IndexError(f"a pass over {tokens.stop} slots exceeds the cache's {self.capacity}")
        return CacheView(self, tokens)

    def move(self, slots: list[int], start: int) -> None:
        """Copies slots (any order, possibly overlapping) to ``start ..``: what a tree's accepted
        path becomes."""
        if slots != list(range(start, start + len(slots))):
            moved = self.states.index_select(3, torch.tensor(slots, device=self.states.device))
            self.states[:, :, :, start : start + len(slots)] = moved


class CacheView(Cache):  # type: ignore[misc]  # transformers carries no types
    """One pass's part of a :class:`SlotCache`, as transformers' models take it."""

    def __init__(self, cache: SlotCache, tokens: PassTokens) -> None:
        super().__init__(layers=[])
        self.slots, self.length = tokens.slots, tokens.length
        self._parts, self._start, self._stop = cache.layers, tokens.start, tokens.stop

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes a layer's keys and values [1, heads, n, size], and returns those that the pass
        reads, [1, heads, stop - start, size]."""
        keys, values = self._parts[layer_idx]
        keys.index_copy_(2, self.slots, key_states)
        values.index_copy_(2, self.slots, value_states)
        return self.read(layer_idx)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, [heads, capacity + 1, size], to write ``slots`` of."""
        keys, values = self._parts[layer]
        return keys[0], values[0]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Those that the pass reads, [1, heads, stop - start, size]."""
        keys, values = self._parts[layer]
        start, stop = self._start, self._stop
        return keys[:, :, start:stop], values[:, :, start:stop]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._stop, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

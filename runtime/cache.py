"""Preallocated slot caches: keys and values written wherever the caller says, read up to a view.

transformers' static cache appends at a length that it counts itself and cannot be rolled back. Ours
holds no length: the owner sets where the next pass writes (``slots``) and how many it reads
(``view``); what a rejected draft left behind is masked and overwritten. Shapes never change within
a view, so that a pass can be captured as a CUDA graph.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

VIEW_STEP = 64
"""Views are rounded up to a multiple of this, so that few shapes occur."""


def view_of(tokens: int) -> int:
    """Slots that a pass over ``tokens`` cached tokens reads."""
    return -(-tokens // VIEW_STEP) * VIEW_STEP


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers carries no types
    """One layer's keys and values, ``[1, kv_heads, capacity + scratch, head_dim]``, allocated at
    the first pass. No view holds the ``scratch`` slots."""

    is_compileable = True
    is_sliding = False

    def __init__(self, capacity: int, scratch: int = 0) -> None:
        super().__init__()
        self.capacity, self.scratch, self.view = capacity, scratch, capacity
        self.slots = torch.zeros(0, dtype=torch.int64)
        self.is_initialized = False

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        batch, heads, _, dim = key_states.shape
        value_dim = dim if value_states is None else value_states.shape[-1]
        slots = self.capacity + self.scratch
        self.keys = key_states.new_zeros(batch, heads, slots, dim)
        self.values = key_states.new_zeros(batch, heads, slots, value_dim)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys[:, :, : self.view], self.values[:, :, : self.view]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.view, 0

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.capacity

    def get_max_cache_shape(self) -> int:
        return self.capacity


class SlotCache:
    """The layers of one model and where the next pass writes. ``capacity`` only grows, by whole
    views."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._scratch = 0
        self.capacity = 0
        self.layers: list[SlotLayer] = []
        self.cache = Cache(layers=[])

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` slots. Growing forgets what was cached: call it between
        requests."""
        wanted = -(-tokens // (4 * VIEW_STEP)) * 4 * VIEW_STEP
        if wanted > self.capacity:
            self.capacity = wanted
            self.layers = [SlotLayer(wanted, self._scratch) for _ in range(self._num_layers)]
            self.cache = Cache(layers=self.layers)

    def place(self, slots: torch.Tensor, view: int) -> None:
        """The next pass writes the given slots (int64 ``[width]``) and reads the first ``view``."""
        if view > self.capacity:
            raise IndexError(f"view of {view} slots exceeds the cache's {self.capacity}")
        for layer in self.layers:
            layer.slots, layer.view = slots, view

    def keep_scratch(self, slots: int) -> None:
        """Keeps so many slots behind the capacity, for tokens that only fill up a pass. Forgets
        what was cached."""
        self._scratch, self.capacity, self.layers, self.cache = slots, 0, [], Cache(layers=[])

    def bound(self, slots: torch.Tensor, view: int) -> Cache:
        """A cache over the same keys and values which always writes ``slots`` (int64 ``[width]``)
        and reads the first ``view``, whatever the next passes over this one do."""
        layers = [copy.copy(layer) for layer in self.layers]
        for layer in layers:
            layer.slots, layer.view = slots, view
        return Cache(layers=layers)

    def adopt(self, cache: Cache) -> None:
        """Takes over the keys and values that a first pass over a :meth:`bound` cache allocated."""
        for own, layer in zip(self.layers, cache.layers, strict=True):
            own.keys, own.values, own.is_initialized = layer.keys, layer.values, True

    def move(self, slots: list[int], start: int) -> None:
        """Copies slots (any order, possibly overlapping) to ``start ..``: what a tree's accepted
        path becomes."""
        if slots == list(range(start, start + len(slots))):
            return
        index = torch.tensor(slots, device=self.layers[0].keys.device)
        stop = start + len(slots)
        for layer in self.layers:
            layer.keys[:, :, start:stop] = layer.keys.index_select(2, index)
            layer.values[:, :, start:stop] = layer.values.index_select(2, index)

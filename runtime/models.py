"""Loading causal language models and running passes over their slot caches.

A :class:`CausalModel` is a transformers model with our attention, one slot cache, and three kinds
of pass: ``chain`` (tokens that follow each other), ``scattered`` (tokens anywhere, under the
caller's mask) and ``canonical`` (a whole prefix without cache, the arbiter of near ties: a function
of the prefix alone, whatever shapes decoding has used). Passes named ``.._states`` leave the output
head out, for drafts that evaluate a part of it (:mod:`runtime.shortlists`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from spectune.runtime import attention
from spectune.runtime.attention import causal_mask
from spectune.runtime.cache import SlotCache, SlotLayer, view_of
from spectune.runtime.pair import expanded, is_local, model_config, translated
from spectune.runtime.shortlists import OutputHead
from spectune.traces.errors import PairError

if TYPE_CHECKING:
    from spectune.runtime.cuda.graphs import Outputs, PassGraphs

CHUNK = 512
"""Longest pass over a prompt; longer ones are cut so that masks stay small."""
FINAL = -1
"""As a tap: the last hidden state, after the final norm."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is one. Raises PairError when CUDA is asked for and absent."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise PairError("--device cuda: this torch sees no CUDA device; use --device cpu or auto")
    return torch.device(device)


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on a CPU (where parity is exact) and bfloat16 on CUDA."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[dtype]


class _Tapped(threading.local):
    """Hidden states of the taps of the last pass in this thread: passes are captured aside while
    another thread decodes."""

    def __init__(self) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self.last: int | None = None
        """The tap at which a pass ends, as nothing after it is asked for."""


class _Read(Exception):
    """Ends a pass at its last tap."""


class CausalModel:
    """One loaded model. Logits are float32 whatever the weights' dtype.

    ``graphs`` replays the passes that it has captured (:mod:`runtime.cuda.graphs`); None: all run
    eagerly. ``canonical_passes`` counts.
    """

    graphs: PassGraphs | None = None
    canonical_passes = 0

    def __init__(self, model: Any, name: str) -> None:
        attention.register()
        config = model.config.get_text_config()
        windows = getattr(config, "layer_types", None) or []
        if any("sliding" in str(kind) for kind in windows) or getattr(
            config, "attn_logit_softcapping", None
        ):
            raise PairError(
                f"{name}: models with sliding-window or soft-capped attention are not supported yet"
            )
        model.set_attn_implementation(attention.NAME)
        self.model = model.eval().requires_grad_(
            False
        )  # so that no pass records a graph, and none needs to be told
        self.name = name
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self._lm_head = model.get_output_embeddings()
        self.vocab_size = int(self._lm_head.weight.shape[0])
        self.max_positions = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = int(getattr(config, "hidden_size", 0))
        self.cache = SlotCache(self.num_layers)
        self._decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        self._taps: tuple[int, ...] = ()
        self._hooks: list[Any] = []
        self._tapped = _Tapped()
        self._positions = torch.zeros(0, dtype=torch.long, device=self.device)

    def reserve(self, tokens: int) -> None:
        """Makes room for sequences of ``tokens``; forgets the cache if it must grow."""
        self.cache.reserve(tokens)
        if len(self._positions) < self.cache.capacity:
            self._positions = torch.arange(self.cache.capacity, device=self.device)

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states kept of every pass: 0 is the embeddings, i what layer i reads, the number
        of layers what the last one gives, ``FINAL`` that after the final norm. Empty by default,
        which costs nothing."""
        return self._taps

    @taps.setter
    def taps(self, taps: tuple[int, ...]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._taps, self._hooks, self._tapped.rows = tuple(taps), [], {}
        if self.graphs is not None:
            self.graphs.forget()
        layers = next(
            (
                m
                for m in self._decoder.modules()
                if isinstance(m, torch.nn.ModuleList) and len(m) == self.num_layers
            ),
            None,
        )
        for tap in set(taps) - {FINAL}:
            if layers is None or not 0 <= tap <= self.num_layers:
                raise PairError(
                    f"{self.name}: no hidden state {tap} to read (the model has {self.num_layers} "
                    "layers)"
                )
            if tap < self.num_layers:

                def before(module: Any, args: Any, kwargs: Any, tap: int = tap) -> None:
                    self._tapped.rows[tap] = (args[0] if args else kwargs["hidden_states"])[0]
                    if tap == self._tapped.last:
                        raise _Read

                self._hooks.append(layers[tap].register_forward_pre_hook(before, with_kwargs=True))
            else:

                def after(module: Any, args: Any, output: Any, tap: int = tap) -> None:
                    self._tapped.rows[tap] = (output[0] if isinstance(output, tuple) else output)[0]

                self._hooks.append(layers[-1].register_forward_hook(after))

    @property
    def tapped(self) -> torch.Tensor:
        """Hidden states of all taps of the last pass (or of all tokens of the last ``read``), side
        by side: [tokens, len(taps) * hidden_size]. The next pass replaces them; the canonical ones
        do not."""
        return torch.cat([self._tapped.rows[tap] for tap in self._taps], -1)

    def chain(self, ids: torch.Tensor, start: int, *, logits: int) -> torch.Tensor:
        """Runs ``ids`` (int64 [width]) at slots and positions ``start ..``; every token sees all
        slots up to its own.

        Returns float32 logits of the last ``logits`` tokens, ``[logits, vocab]``.
        """
        found, first = self._replayed_chain(ids, start, True), len(ids) - logits
        return (
            self._head(self._chain(ids, start)[first:])
            if found is None
            else found.logits[first:].clone()
        )

    def chain_states(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        """:meth:`chain` without the head: the last hidden states of all tokens, [width,
        hidden_size]."""
        found = self._replayed_chain(ids, start, False)
        return self._chain(ids, start) if found is None else found.states.clone()

    def _chain(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        stop = start + len(ids)
        slots, view = self._positions[start:stop], view_of(stop)
        self.cache.place(slots, view)
        # The first tokens of a text are all that they read: their pass is causal, and needs no
        # mask.
        mask = None if view == len(ids) else causal_mask(start, stop, view, self.device)
        return self._hidden(ids, slots, mask)

    def read(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        """Fills the cache with ``ids`` at ``start ..`` in chunks, without logits. Returns the last
        hidden state of the last token, [1, hidden_size] ([0, hidden_size] without ``ids``)."""
        parts: list[dict[int, torch.Tensor]] = []
        last = torch.zeros(0, self.hidden_size, device=self.device, dtype=self.dtype)
        for at in range(0, ids.shape[0], CHUNK):
            last = self._chain(ids[at : at + CHUNK], start + at)[-1:]
            parts.append(dict(self._tapped.rows))
        if len(parts) > 1:
            self._tapped.rows = {tap: torch.cat([part[tap] for part in parts]) for tap in parts[0]}
        return last

    def scattered(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Runs ``ids`` (int64 [width]) at given positions and slots under ``mask`` (bool [width,
        view]).

        ``view`` must be a multiple of 64. Returns float32 logits ``[width, vocab]``.
        """
        found = self._replayed(ids, positions, slots, mask, True)
        return (
            self._head(self._scattered(ids, positions, slots, mask))
            if found is None
            else found.logits.clone()
        )

    def scattered_states(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """:meth:`scattered` without the head: the last hidden states, [width, hidden_size]."""
        found = self._replayed(ids, positions, slots, mask, False)
        return (
            self._scattered(ids, positions, slots, mask) if found is None else found.states.clone()
        )

    def _scattered(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        self.cache.place(slots, mask.shape[1])
        return self._hidden(ids, positions, mask)

    def _replayed_chain(self, ids: torch.Tensor, start: int, head: bool) -> Outputs | None:
        """A chain by a captured pass; None where none was captured for its shape. Outputs are
        static: copy what is to last."""
        stop = start + len(ids)
        if self.graphs is None or stop > self.cache.capacity:
            return None  # the eager pass refuses what is too long
        slots = self._positions[start:stop]
        return self._replayed(ids, slots, slots, causal_mask(start, stop, stop, self.device), head)

    def _replayed(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        mask: torch.Tensor,
        head: bool,
    ) -> Outputs | None:
        if self.graphs is None:
            return None
        found = self.graphs.run(head, False, ids, positions, slots, mask)
        if found is not None:
            self._tapped.rows = found.taps
        return found

    def over(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        layers: list[SlotLayer],
        hidden: torch.Tensor | None,
        own: bool,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """A pass of n tokens under ``mask``, bool [n, view], over ``layers`` that know where they
        write (:meth:`SlotCache.bound`): the last hidden states and those of the taps, [n,
        hidden_size] each. Leaves those of the last pass as they are."""
        kept, self._tapped.rows = self._tapped.rows, {}
        states = self._hidden(ids, positions, mask, Cache(layers=layers))
        tapped, self._tapped.rows = self._tapped.rows, kept
        return states, tapped

    def fed(self, own: bool) -> int:
        """Width of the hidden states that a pass takes beside its tokens: none."""
        return 0

    def canonical(self, prefix: list[int]) -> torch.Tensor:
        """Float32 logits ``[vocab]`` after ``prefix``, computed in one pass without cache: the same
        bits for the same prefix."""
        return self._head(self._canonical(prefix)[0][-1:])[0]

    def canonical_state(self, prefix: list[int]) -> torch.Tensor:
        """The last hidden state [1, hidden_size] after ``prefix`` from the canonical pass."""
        return self._canonical(prefix)[0][-1:]

    def canonical_features(self, prefix: list[int], taps: tuple[int, ...]) -> torch.Tensor:
        """Hidden states ``taps`` (some of ``self.taps``) of ``prefix`` from the canonical pass,
        [len(prefix), len(taps) * hidden_size]. Layers above the last of them are not run."""
        tapped = self._canonical(prefix, None if FINAL in taps else max(taps))[1]
        return torch.cat([tapped[tap] for tap in taps], -1)

    def _canonical(
        self, prefix: list[int], last: int | None = None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Last hidden states [len(prefix), hidden_size] and those of the taps, in one pass without
        cache; with ``last`` of the taps up to that one, and no last hidden states if layers lie
        above it."""
        self.canonical_passes += 1
        ids = torch.tensor([prefix], device=self.device)
        hidden = torch.zeros(1, 0, self.hidden_size)
        kept, self._tapped.rows, self._tapped.last = self._tapped.rows, {}, last
        try:
            hidden = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
        except _Read:
            pass
        finally:
            tapped, self._tapped.rows, self._tapped.last = self._tapped.rows, kept, None
        if FINAL in self._taps and last is None:
            tapped[FINAL] = hidden[0]
        return hidden[0], tapped

    def _hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """The last hidden states of ``ids`` int64 [n], [n, hidden_size]; ``mask`` bool [n, view],
        None: causal."""
        out: torch.Tensor = self._decoder(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=None if mask is None else mask[None, None],
            past_key_values=self.cache.cache if cache is None else cache,
            use_cache=True,
        ).last_hidden_state[0]
        if FINAL in self._taps:
            self._tapped.rows[FINAL] = out
        return out

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._lm_head(hidden)
        return out.float()

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings of ``ids`` (int64 [n]), [n, embedding size]."""
        out: torch.Tensor = self.model.get_input_embeddings()(ids)
        return out

    @cached_property
    def output(self) -> OutputHead:
        """The output head, to be evaluated in part."""
        return OutputHead(self._lm_head)


def ids_tensor(tokens: list[int], device: torch.device) -> torch.Tensor:
    """Token ids, int64 [n]. By way of numpy, which takes half as long as torch when code is cold
    (docs/log.md)."""
    return torch.from_numpy(np.array(tokens, dtype=np.int64)).to(device)


MOST_LAYERS = 10_000
"""More than any model has; a configuration that says more is damaged."""
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Keys that count layers; others name one, and may count from the last: -1."""
MOST_TENSORS = 200_000
"""More than any model has of weights, each expert's counted."""


def load_model(path: str, *, name: str, device: torch.device, dtype: torch.dtype) -> CausalModel:
    """Loads a checkpoint folder or hub name, and runs one token through it.

    Raises PairError, in one line, when there is none, it is not a causal LM that runs, its
    configuration is not that of its weights, or it needs code of its own.
    """
    folder = expanded(path) if is_local(path) else None
    if folder is not None:
        _check_layers(model_config(folder), f"{name}: {folder / 'config.json'}")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with translated(f"{name}: cannot load {path}"):
        with _bounded(None if folder is None else _weight_bytes(folder)):
            model, found = AutoModelForCausalLM.from_pretrained(
                folder or path, dtype=dtype, trust_remote_code=False, output_loading_info=True
            )
        missing = sorted(found["missing_keys"])
        if missing:
            raise PairError(
                f"{name}: the weights of {path} lack {missing[0]}, which config.json asks for "
                f"({len(missing)} such tensors)"
            )
        loaded = CausalModel(model.to(device), name)
        loaded.canonical(
            [0]
        )  # shapes that do not fit each other are told here, not in the first request
    return loaded


def _check_layers(config: Mapping[str, Any], where: str) -> None:
    """Configurations make lists of as many entries as there are layers before anything of the model
    is built."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_layers(value, where)
        elif (
            "layer" in key
            and isinstance(value, int)
            and (value > MOST_LAYERS or (value < 0 and key in LAYER_COUNTS))
        ):
            raise PairError(f"{where}: {key} is {value}; a model has 0 to {MOST_LAYERS} layers")


def _weight_bytes(folder: Path) -> int:
    return sum(
        f.stat().st_size
        for pattern in ("*.safetensors", "*.bin")
        for f in folder.rglob(pattern)
        if f.is_file()
    )


@contextmanager
def _bounded(stored_bytes: int | None) -> Iterator[None]:
    """Refuses a model that grows beyond its weights while it is built on the `meta` device, where
    sizes cost nothing and modules do.

    Every stored bit may be a parameter, and each parameter may be there twice (tied, before it is).
    """
    seen, elements, builder = 0, 0, threading.get_ident()

    def count(_module: Any, _key: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal seen, elements
        if parameter is None or not parameter.is_meta or threading.get_ident() != builder:
            return
        seen, elements = seen + 1, elements + parameter.numel()
        if seen > MOST_TENSORS or (stored_bytes is not None and elements > 16 * stored_bytes):
            raise ValueError(
                "config.json asks for a model that is larger than the weights beside it"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()

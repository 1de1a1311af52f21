"""Loading causal language models and running passes over their slot caches.

A :class:`SlotModel` makes two kinds of pass over its cache: tokens that follow each other, and
tokens anywhere under the caller's mask. A :class:`CausalModel` is a transformers model with our
attention.
"""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.quantizers.auto import AutoHfQuantizer

from spectune.runtime import attention
from spectune.runtime.attention import causal_mask, eager_kernels
from spectune.runtime.cache import SlotCache, view_of
from spectune.runtime.pair import described, expanded, is_local, model_config, translated
from spectune.runtime.shortlists import OutputHead
from spectune.traces.errors import PairError

if TYPE_CHECKING:
    from spectune.runtime.cuda.graphs import PassGraphs

CHUNK = 512
"""Longest pass over a prompt; longer ones are cut so that masks stay small."""
FINAL = -1
"""As a tap: the last hidden state, after the final norm."""
LEAST_TOLERANCE = 1e-3
"""Part of the logits' spread by which ours may differ from the model's own where rounding is
finer."""
SAMPLE_TOKENS = 16
"""Tokens on which a loaded model is compared with its own code."""
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def pick_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is one. Raises PairError when CUDA is asked for and absent."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise PairError("--device cuda: this torch sees no CUDA device; use --device cpu or auto")
    return torch.device(device)


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on a CPU and bfloat16 on CUDA. In float64 rounding changes no text: it is
    for tests of exactness."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[dtype]


class SlotModel(ABC):
    """A model over its slot cache. Logits are float32 over the target's vocabulary, whatever the
    weights' dtype.

    ``first_slot``: no token stands in a slot before it. ``token_ids`` int64 [rows]: the target's
    ids of the output head's rows (None: row i is token i); other tokens get a logit of -inf.
    ``graphs`` replays the passes that it has captured (:mod:`runtime.cuda.graphs`); None: all run
    eagerly.
    """

    graphs: PassGraphs | None = None
    first_slot = 0
    hidden_size: int
    vocab_size: int
    max_positions: int

    def __init__(
        self,
        name: str,
        weights: list[nn.Parameter],
        embed: nn.Module,
        lm_head: nn.Module,
        num_layers: int,
        token_ids: Tensor | None = None,
    ) -> None:
        self.name, self.device, self.dtype = name, weights[0].device, weights[0].dtype
        self.num_parameters = sum(p.numel() for p in weights)
        self.num_layers, self.cache = num_layers, SlotCache(num_layers)
        self._embed, self._lm_head, self._token_ids = embed, lm_head, token_ids
        self._positions = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._tapped: dict[int, Tensor] = {}

    def reserve(self, tokens: int) -> None:
        """Makes room for sequences of ``tokens``; forgets the cache if it must grow."""
        self.cache.reserve(tokens)
        if len(self._positions) < self.cache.capacity:
            self._positions = torch.arange(self.cache.capacity, device=self.device)

    @abstractmethod
    def over(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache,
        hidden: Tensor | None,
        own: bool,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """A pass of n tokens under ``mask`` bool [n, view] (None: causal) over a cache that knows
        where it writes: the last hidden states and those of the taps, [n, hidden_size] each.
        ``hidden`` [n, :meth:`fed`] is what the pass takes beside its tokens."""

    def fed(self, own: bool) -> int:
        """Width of the hidden states that a pass takes beside its tokens: 0, none. ``own``: those
        that the model gave itself."""
        return 0

    def state(self, out: Tensor) -> Tensor:
        """What the output head reads of hidden states [n, hidden_size] that a pass gave."""
        return out

    def embedded(self, ids: Tensor) -> Tensor:
        """Input embeddings of ``ids`` (int64 [n]), [n, embedding size]."""
        out: Tensor = self._embed(ids)
        return out

    @cached_property
    def output(self) -> OutputHead:
        """The output head, to be evaluated in part."""
        return OutputHead(self._lm_head, self._token_ids)

    def head(self, out: Tensor) -> Tensor:
        """Float32 logits [n, vocab] of hidden states [n, hidden_size] that a pass gave."""
        logits: Tensor = self._lm_head(self.state(out)).float()
        if self._token_ids is None:
            return logits
        full = logits.new_full((logits.shape[0], self.vocab_size), -torch.inf)
        return full.index_copy_(1, self._token_ids, logits)

    def chain(
        self,
        ids: Tensor,
        start: int,
        *,
        logits: int,
        hidden: Tensor | None = None,
        replays: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`run` for tokens that follow each other at slots and positions ``start ..``, each
        of which sees the slots up to its own."""
        stop = start + len(ids)
        slots, view, mask = self._positions[start:stop], view_of(stop), None
        replays = replays and self.graphs is not None
        # The first tokens of a text are all that they read: their pass needs no mask.
        if view > len(ids) or self.first_slot or replays:
            mask = causal_mask(start, stop, view, self.device)
            if self.first_slot:
                mask[:, : self.first_slot] = False
        return self.run(ids, slots, slots, mask, logits=logits, hidden=hidden, replays=replays)

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor | None,
        *,
        logits: int | None = None,
        hidden: Tensor | None = None,
        own: bool = False,
        replays: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Runs n tokens at given positions and slots under ``mask`` (bool [n, view], view a
        multiple of 64; None: causal), by a captured pass where there is one of its shape and
        ``replays``. Float32 logits of the last ``logits`` tokens (None: of all) and the last hidden
        states of all, [n, hidden_size]; of a language model these are to be read only where no
        logits are asked for."""
        n = len(ids)
        first = 0 if logits is None else n - logits
        if self.graphs is not None and replays and mask is not None:
            found = self.graphs.run(first < n, own, ids, positions, slots, mask, hidden)
            if found is not None:
                self._tapped = found.taps
                wanted = n if first == n or self.fed(own=True) else 0
                return found.logits[first:].clone(), found.states[:wanted].clone()  # static ones
        self.cache.place(slots, n if mask is None else mask.shape[1])
        with eager_kernels(self.device):
            states, self._tapped = self.over(ids, positions, mask, self.cache.cache, hidden, own)
        none = states.new_zeros(0, dtype=torch.float32)
        return self.head(states[first:]) if first < n else none, states


class _Hooked(threading.local):
    """Where hooks put the hidden states of the pass in hand: passes are captured aside while
    another thread decodes."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}


class CausalModel(SlotModel):
    """One loaded language model."""

    _last_row: int | None = None
    """The last token that the model has a row for, where its target may have more."""

    def __init__(self, model: Any, name: str) -> None:
        attention.register()
        config = model.config.get_text_config()
        kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
        kinds = kinds - {"full_attention"}
        if kinds or getattr(config, "attn_logit_softcapping", None):
            raise PairError(
                f"{name}: attention of kind {min(kinds, default='soft-capped')} is not supported "
                "yet; layers must be of full attention"
            )
        model.set_attn_implementation(attention.NAME)
        if config._attn_implementation != attention.NAME:
            raise PairError(
                f"{name}: {type(model).__name__} has an attention of its own, which is not "
                "supported yet"
            )
        self.model = model.eval().requires_grad_(False)  # so that no pass records a graph
        embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        layers = int(config.num_hidden_layers)
        super().__init__(name, list(model.parameters()), embed, lm_head, layers)
        self.hidden_size = int(getattr(config, "hidden_size", 0))
        self.vocab_size = int(lm_head.weight.shape[0])
        self.max_positions = _reach(config)
        self._decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        # transformers 5.24 renames the argument, and forgets the former name in 5.40.
        known = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._taps: tuple[int, ...] = ()
        self._hooks: list[Any] = []
        self._hooked = _Hooked()

    def share(self, vocab: int, tokens: Collection[int] | None) -> None:
        """Makes this a draft for a target of ``vocab`` tokens. Those that are not among the shared
        ``tokens`` (None: all), or for which the model has no row, get a logit of -inf."""
        rows = self.vocab_size
        both = range(min(rows, vocab))
        ids = [*both] if tokens is None else [i for i in both if i in tokens]
        self.vocab_size = vocab
        if len(ids) == rows == vocab:
            return
        self._last_row = rows - 1
        self._token_ids = torch.tensor(ids, device=self.device)
        if len(ids) < rows:
            self._lm_head = _rows_of(self._lm_head, self._token_ids)

    def embedded(self, ids: Tensor) -> Tensor:
        return super().embedded(self._known(ids))

    def _known(self, ids: Tensor) -> Tensor:
        """``ids``, those that the model has no row for as its last token."""
        return ids if self._last_row is None else ids.clamp_max(self._last_row)

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
        self._taps, self._hooks, self._tapped = tuple(taps), [], {}
        if self.graphs is not None:
            self.graphs.forget()
        lists = (m for m in self._decoder.modules() if isinstance(m, nn.ModuleList))
        layers = next((m for m in lists if len(m) == self.num_layers), None)
        for tap in set(taps) - {FINAL}:
            if layers is None or not 0 <= tap <= self.num_layers:
                raise PairError(
                    f"{self.name}: no hidden state {tap} to read (the model has {self.num_layers} "
                    "layers)"
                )
            if tap < self.num_layers:

                def before(module: Any, args: Any, kwargs: Any, tap: int = tap) -> None:
                    self._hooked.rows[tap] = (args[0] if args else kwargs["hidden_states"])[0]

                self._hooks.append(layers[tap].register_forward_pre_hook(before, with_kwargs=True))
            else:

                def after(module: Any, args: Any, output: Any, tap: int = tap) -> None:
                    self._hooked.rows[tap] = (output[0] if isinstance(output, tuple) else output)[0]

                self._hooks.append(layers[-1].register_forward_hook(after))

    @property
    def tapped(self) -> Tensor:
        """Hidden states of all taps of the last pass (or of all tokens of the last ``read``), side
        by side: [tokens, len(taps) * hidden_size]. The next pass replaces them."""
        return torch.cat([self._tapped[tap] for tap in self._taps], -1)

    def features(self, ids: list[int]) -> Tensor:
        """The hidden states of all taps after a text ``ids``, [len(ids), len(taps) * hidden_size],
        in one pass that leaves the cache and :attr:`tapped` alone."""
        taps = self._hooked.rows = {}
        known = torch.tensor([ids], device=self.device)
        with eager_kernels(self.device):
            out: Tensor = self._decoder(input_ids=known, use_cache=False).last_hidden_state[0]
        if FINAL in self._taps:
            taps[FINAL] = out
        return torch.cat([taps[tap] for tap in self._taps], -1)

    def read(self, ids: Tensor, start: int) -> Tensor:
        """Fills the cache with ``ids`` at ``start ..`` in chunks, without logits. Returns the last
        hidden state of the last token, [1, hidden_size] ([0, hidden_size] without ``ids``)."""
        parts: list[dict[int, Tensor]] = []
        states = torch.zeros(0, self.hidden_size, device=self.device, dtype=self.dtype)
        for at in range(0, len(ids), CHUNK):
            states = self.chain(ids[at : at + CHUNK], start + at, logits=0, replays=False)[1]
            parts.append(self._tapped)
        if len(parts) > 1:
            self._tapped = {tap: torch.cat([part[tap] for part in parts]) for tap in parts[0]}
        return states[-1:]

    def over(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache,
        hidden: Tensor | None,
        own: bool,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        taps = self._hooked.rows = {}
        out: Tensor = self._decoder(
            input_ids=self._known(ids)[None],
            position_ids=positions[None],
            attention_mask=None if mask is None else mask[None, None],
            use_cache=True,
            **{self._cache_name: cache},
        ).last_hidden_state[0]
        if FINAL in self._taps:
            taps[FINAL] = out
        return out, taps


def _rows_of(linear: Any, rows: Tensor) -> nn.Linear:
    """A part of an output matrix; the first rows are no copy."""
    count, width = len(rows), int(linear.weight.shape[1])
    first = int(rows[-1]) == count - 1 if count else True
    bias = getattr(linear, "bias", None)
    part = nn.Linear(width, count, bias=bias is not None, device="meta")
    for name in ("weight", "bias") if bias is not None else ("weight",):
        whole = getattr(linear, name).detach()
        chosen = whole[:count] if first else whole.index_select(0, rows)
        setattr(part, name, nn.Parameter(chosen, requires_grad=False))
    return part


def ids_tensor(tokens: list[int], device: torch.device) -> Tensor:
    """Token ids, int64 [n]. By way of numpy, which takes half as long as torch when code is cold
    (docs/log.md)."""
    return torch.from_numpy(np.array(tokens, dtype=np.int64)).to(device)


MOST_LAYERS = 10_000
"""More than any model has; a configuration that says more is damaged."""
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Keys that count layers; others name one, and may count from the last: -1."""
MOST_TENSORS = 200_000
"""More than any model has of weights, each expert's counted."""


def load_model(
    path: str,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    sample: Callable[[], Sequence[int]] = tuple,
) -> CausalModel:
    """Loads a checkpoint folder or hub name, and compares it with its own code on the tokens that
    ``sample`` gives, a text (by default tokens from all over the vocabulary).

    Raises PairError, in one line, when there is none, it is not a causal LM that runs, its
    configuration is not that of its weights, it needs code of its own, or its texts would not be
    those of transformers: its weights are quantized in a way that nothing reads, or its attention
    or its logits are not reproduced here.
    """
    folder = expanded(path) if is_local(path) else None
    if folder is not None:
        _check_layers(model_config(folder), f"{name}: {folder / 'config.json'}")
    with translated(f"{name}: cannot load {described(path)}"):
        config = AutoConfig.from_pretrained(folder or path, trust_remote_code=False)
        quantized = _is_quantized(config, f"{name}: {path}")
        if folder is not None and not quantized:
            _check_stored(folder, f"{name}: {path}")
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
        if not quantized:
            _check_scales(model, found["unexpected_keys"], f"{name}: {path}")
        loaded = CausalModel(model.to(device), name)
        _check_reproduced(loaded, path, sample())
    return loaded


def _reach(config: Any) -> int:
    """Tokens up to which hidden states are functions of the prefix as they are computed here. A
    sliding window shows all of a shorter text; LongRoPE turns keys in another way from its switch
    on."""
    reach = [int(getattr(config, "max_position_embeddings", 0) or 1 << 20)]
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        reach.append(int(config.sliding_window))
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        first = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        reach += [int(first)] if first else []
    return min(reach)


def _is_quantized(config: Any, where: str) -> bool:
    """Whether transformers quantizes or dequantizes the weights of a configuration. Raises
    PairError for a quantization that it leaves out, with a warning at most."""
    for part in (config, config.get_text_config()):
        asked = getattr(part, "quantization_config", None)
        if not asked:
            continue
        asked = asked if isinstance(asked, dict) else asked.to_dict()
        if part is not config or not AutoHfQuantizer.supports_quant_method(asked):
            method = asked.get("quant_method")
            raise PairError(
                f"{where} is quantized by {method}, which transformers does not read; give a "
                "checkpoint in bfloat16, or of a quantization that it reads"
            )
        return True
    return False


def _check_stored(folder: Path, where: str) -> None:
    """Raises PairError where the weights of a folder are stored as numbers that only scales make
    weights of. Pickles do not say; :func:`_check_scales` tells theirs."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (it is no mapping)
                kind = str(tensors.get_slice(key).get_dtype())
                packed = kind in ("I8", "U8") and key.endswith("weight")
                if packed or kind.startswith(("F8", "F6", "F4")):
                    raise PairError(
                        f"{where} stores {key} as {kind}, and its config.json says no "
                        "quantization_config by which to read it; give a checkpoint in bfloat16, "
                        "or of a quantization that transformers reads"
                    )


def _check_scales(model: Any, unexpected: Iterable[str], where: str) -> None:
    """Raises PairError where a checkpoint has scales of weights for which its model, which is not
    quantized, has no place."""
    modules = {name for name, _ in model.named_modules()} - {""}
    for key in sorted(unexpected):
        module, _, last = key.rpartition(".")
        of_weights = ("scale" in last or "zero_point" in last) and (
            "weight" in last or module in modules
        )
        if of_weights:
            raise PairError(
                f"{where} has {key}, which nothing reads: its weights are quantized, and its "
                "config.json says no quantization_config by which to read them; give a checkpoint "
                "in bfloat16, or of a quantization that transformers reads"
            )


@torch.no_grad()
def _check_reproduced(loaded: CausalModel, path: str, sample: Sequence[int]) -> None:
    """Raises PairError where the logits after each of a few tokens are not those of the model's
    forward pass with transformers' eager attention, up to rounding. Shapes that do not fit each
    other are told here."""
    model, vocab = loaded.model, loaded.vocab_size
    length = min(SAMPLE_TOKENS, loaded.max_positions)
    spread = [vocab * i // length for i in range(1, length)]
    ids = torch.tensor([*sample, *spread, 0][:length], device=loaded.device) % vocab
    loaded.reserve(length)
    half = length // 2
    parts = [(ids[:half], 0), (ids[half:], half)]
    ours = torch.cat([loaded.chain(x, at, logits=len(x))[0] for x, at in parts if len(x)])
    model.set_attn_implementation("eager")
    try:
        states = loaded._decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        theirs = model(input_ids=ids[None], use_cache=False).logits[0].float()
        shorter = model(input_ids=ids[None, : half or 1], use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(attention.NAME)

    def away(logits: Tensor) -> float:
        """A part of the logits' spread, as at half of the tokens: a router of experts may round to
        other experts at some."""
        same = theirs[: len(logits)]
        spread = (same - same.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
        return float(((logits - same).norm(dim=-1) / spread).median())

    rounding = torch.finfo(loaded.dtype).eps
    if not (off := away(loaded.head(states))) < max(LEAST_TOLERANCE, 2 * rounding):
        raise PairError(
            f"{loaded.name}: {path} makes its logits in a way that is not supported yet: they "
            f"are scaled or capped (off by {off:.1%} of their spread)"
        )
    # What a model itself makes of other shapes of the same pass tells how it carries rounding on.
    if not (off := away(ours)) < max(LEAST_TOLERANCE, 16 * rounding, 4 * away(shorter)):
        raise PairError(
            f"{loaded.name}: the attention of {path} is not reproduced here (its logits are off by "
            f"{off:.1%} of their spread from those of transformers' eager attention)"
        )


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
    files = (f for pattern in ("*.safetensors", "*.bin") for f in folder.rglob(pattern))
    return sum(f.stat().st_size for f in files if f.is_file())


@contextmanager
def _bounded(stored_bytes: int | None) -> Iterator[None]:
    """Refuses a model that grows beyond its weights while it is built on the `meta` device, where
    sizes cost nothing and modules do.

    Every stored bit may be a parameter, and each parameter may be there twice (tied, before it is).
    """
    seen, elements, builder = 0, 0, threading.get_ident()

    def count(_module: Any, _key: str, parameter: nn.Parameter | None) -> None:
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

"""Causal language models over slot caches, and the passes that they run.

A :class:`SlotModel` makes two kinds of pass over its cache: tokens that follow each other, and
tokens anywhere under the caller's mask. A :class:`CausalModel` is a transformers model with our
attention."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from spectune.runtime import attention
from spectune.runtime.attention import MASKED_ROWS, PASS, causal_mask, prepare_masks
from spectune.runtime.cache import Branches, LayerShape, PassTokens, SlotCache, together
from spectune.runtime.checkpoints import scaled_positions
from spectune.runtime.cuda.skinny import skinny_on
from spectune.runtime.fused import fuse, try_kernels
from spectune.runtime.shortlists import OutputHead
from spectune.traces.errors import PairError

if TYPE_CHECKING:
    from spectune.runtime.cuda.graphs import PassGraphs

CHUNK = 512
"""Longest pass whose logits are read; longer texts are cut so that these stay small."""
PREFILL_CHUNK = 512
"""Longest pass over a prompt; longer ones are cut so that activations stay small."""
FINAL = -1
"""As a tap: the last hidden state, after the final norm."""

Output = Literal["states", "logits", "ids"]
"""What a pass computes of its hidden states: nothing, float32 logits, or the ids of the largest."""


class PassKind(NamedTuple):
    """What a pass computes. ``causal``: its tokens follow each other and need no mask;
    ``recurrent``: its hidden states are those that the model gave itself."""

    output: Output = "logits"
    causal: bool = True
    recurrent: bool = False


class Outputs(NamedTuple):
    """``states`` [n, hidden_size]; ``result``: float32 logits [n, vocab], ids int64 [n] or nothing;
    ``tapped`` [n, width], what other models read."""

    states: Tensor
    result: Tensor
    tapped: Tensor


class SlotModel(ABC):
    """A model over its slot cache. Logits are float32 over the target's vocabulary, whatever the
    weights' dtype.

    ``first_slot``: no token stands in a slot before it. ``feature_size``: width of the hidden
    states of another model that a pass takes beside its tokens; 0: none. ``groups``: query heads
    that share a key-value head. ``token_ids`` int64 [rows]: the target's ids of the output head's
    rows (None: row i is token i); other tokens get a logit of -inf. ``graphs`` replays the passes
    that it has captured (None: all run eagerly)."""

    graphs: PassGraphs | None = None
    first_slot = 0
    feature_size = 0
    groups = 1
    hidden_size: int
    vocab_size: int
    max_positions: int
    cache: SlotCache

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
        self.num_parameters, self.num_layers = sum(p.numel() for p in weights), num_layers
        self._embed, self._lm_head, self._token_ids = embed, lm_head, token_ids
        self._positions = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.tapped = torch.zeros(0, 0, device=self.device)
        """What other models read of the last pass (or of all tokens of the last ``read``): [tokens,
        width]. The next pass replaces it."""

    def reserve(self, tokens: int, *, keep: bool = False) -> None:
        """Makes room for sequences of ``tokens``. A cache that must grow forgets what it holds,
        unless ``keep``, and captured passes are forgotten."""
        if tokens <= self.cache.capacity:
            return
        with nullcontext() if self.graphs is None else self.graphs.lock:
            self._allocate(tokens, keep=keep)
            if self.graphs is not None:
                self.graphs.forget()

    def _allocate(self, tokens: int, *, keep: bool) -> None:
        """Makes anew all that passes over a longer cache read."""
        self.cache.reserve(tokens, keep=keep)
        self._positions = torch.arange(self.cache.capacity, device=self.device)

    @property
    def can_join(self) -> bool:
        """Whether passes of several requests are captured: no layer slides, and all have as many
        key-value heads."""
        heads = {layer.heads for layer in self.cache.shapes}
        return self.cache.window is None and len(heads) == 1

    @abstractmethod
    def forward(self, tokens: PassTokens, *, recurrent: bool = False) -> tuple[Tensor, Tensor]:
        """A pass over the cache: the last hidden states [n, hidden_size], and those that other
        models read, side by side [n, width]. ``recurrent``: ``tokens.hidden`` are states that the
        model gave itself."""

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

    def evaluate(self, output: Output, states: Tensor) -> Tensor:
        """The ``output`` of hidden states [n, hidden_size] that a pass gave."""
        if output == "states":
            return states.new_zeros(0, dtype=torch.float32)
        logits = self.head(states)
        return logits.argmax(-1) if output == "ids" else logits

    def ids(self, tokens: list[int]) -> Tensor:
        """Token ids, int64 [n]: on the device, or on the host where captured passes upload them
        with all else that they read, or with those of other requests."""
        uploads = self.graphs is not None and (skinny_on() or self.graphs.seats > 1)
        return ids_tensor(tokens, torch.device("cpu") if uploads else self.device)

    def following(
        self, ids: Tensor, start: int, *, base: int = 0, hidden: Tensor | None = None
    ) -> PassTokens:
        """Tokens that follow each other at positions ``start ..``, each of which sees those up to
        its own, of the request whose extent begins at slot ``base``."""
        stop = start + len(ids)
        positions = self._positions[start:stop]
        slots = self._positions[base + start : base + stop] if base else positions
        first = base + self.first_slot
        return PassTokens(
            ids, positions, slots, None, base + stop, first, hidden=hidden, earliest=start
        )

    def branching(
        self, ids: Tensor, start: int, branches: Branches, *, base: int = 0
    ) -> PassTokens:
        """A tree's root at position ``start`` and its nodes, in slots that follow each other."""
        return self.following(ids, start, base=base)._replace(branches=branches)

    def chain(
        self,
        ids: Tensor,
        start: int,
        *,
        logits: int,
        greedy: bool = False,
        hidden: Tensor | None = None,
        base: int = 0,
        replays: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`run` for :meth:`following` tokens. Without ``replays`` it runs eagerly."""
        tokens = self.following(ids, start, base=base, hidden=hidden)
        return self._pass(PassKind(_output(logits, greedy=greedy)), tokens, logits, replays=replays)

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        *,
        logits: int | None = None,
        greedy: bool = False,
        hidden: Tensor | None = None,
        recurrent: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Runs n tokens at given positions and slots under ``mask`` (bool [n, slots that are
        read]), by a captured pass where there is one.

        Returns float32 logits of the last ``logits`` tokens (None: of all), or with ``greedy`` the
        ids of the largest, int64; and the last hidden states of all, [n, hidden_size].
        ``recurrent``: ``hidden`` are states that the model gave itself."""
        tokens = PassTokens(ids, positions, slots, mask, mask.shape[1], hidden=hidden)
        return self.run_together([tokens], logits=logits, greedy=greedy, recurrent=recurrent)

    def run_together(
        self,
        passes: Sequence[PassTokens],
        *,
        logits: int | None = None,
        greedy: bool = False,
        recurrent: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`run` for the tokens of several requests at once: the output of the last ``logits``
        tokens of each (None: of all), and the states of all, request by request."""
        first = passes[0]
        if len(passes) == 1 and first.start <= self.first_slot:
            rows = len(first.ids) if logits is None else logits
            tokens = first.spread()
            kind = PassKind(_output(rows, greedy=greedy), tokens.mask is None, recurrent)
            return self._pass(kind, tokens, rows)
        if self.graphs is not None and not recurrent:
            whole = logits is None or all(len(tokens.ids) == logits for tokens in passes)
            outputs: list[Output] = [_output(1, greedy=greedy)] if whole else []
            if logits is not None:
                outputs.append("states")
            for output in outputs:
                kind = PassKind(output, causal=False)
                if (found := self.graphs.run_together(kind, passes)) is not None:
                    self.tapped = found.tapped
                    if output != "states":
                        return found.result, found.states
                    return self._lasts(passes, found.states, logits or 0, greedy=greedy)
        joined = together([_masked(each.spread()) for each in passes])
        joined = joined._replace(ids=joined.ids.to(self.device))
        states, self.tapped = self.forward(joined, recurrent=recurrent)
        if logits is not None:
            return self._lasts(passes, states, logits, greedy=greedy)
        return self.evaluate(_output(len(states), greedy=greedy), states), states

    def _lasts(
        self, passes: Sequence[PassTokens], states: Tensor, rows: int, *, greedy: bool
    ) -> tuple[Tensor, Tensor]:
        """The output of the last ``rows`` tokens of each request, and the states of all."""
        ends = np.cumsum([len(tokens.ids) for tokens in passes])
        lasts = torch.from_numpy((ends[:, None] + np.arange(-rows, 0)).ravel())
        read = states[lasts.to(self.device, non_blocking=True)]
        return self.evaluate(_output(len(read), greedy=greedy), read)[: len(read)], states

    def _pass(
        self, kind: PassKind, tokens: PassTokens, rows: int, *, replays: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The output of the last ``rows`` tokens, and the states of all."""
        outputs = self.graphs.run(kind, tokens) if replays and self.graphs is not None else None
        if outputs is None:
            tokens = tokens._replace(ids=tokens.ids.to(self.device))
            states, tapped = self.forward(_masked(tokens), recurrent=kind.recurrent)
            result = self.evaluate(kind.output, states[len(states) - rows :])
            outputs = Outputs(states, result, tapped)
        self.tapped = outputs.tapped
        return outputs.result[-rows:], outputs.states


def _masked(tokens: PassTokens) -> PassTokens:
    """Tokens that follow each other under a mask, where that is cheaper than attention in parts."""
    n, read = len(tokens.ids), tokens.stop - tokens.start
    if tokens.mask is not None or not 1 < n <= MASKED_ROWS or n >= read:
        return tokens
    return tokens._replace(mask=causal_mask(tokens.slots - tokens.start, read))


def _output(rows: int, *, greedy: bool) -> Output:
    return "states" if not rows else "ids" if greedy else "logits"


class CausalModel(SlotModel):
    """One loaded language model. ``fused`` runs its passes where it is Llama-like; None: the code
    of transformers does, and ``unfused`` says why (empty where that was asked for)."""

    _last_row: int | None = None
    """The last token that the model has a row for, where its target may have more."""
    notes: tuple[str, ...] = ()
    """Lines on what of its checkpoint is left unused."""

    def __init__(self, model: Any, name: str) -> None:
        attention.register()
        config = model.config.get_text_config()
        kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
        kinds -= {"full_attention", "sliding_attention"}
        if kinds or getattr(config, "attn_logit_softcapping", None):
            raise PairError(
                f"{name}: attention of kind {min(kinds, default='soft-capped')} is not supported "
                "yet; layers must be of full attention, or of a sliding window"
            )
        model.set_attn_implementation(attention.NAME)
        if config._attn_implementation != attention.NAME:
            raise PairError(
                f"{name}: {type(model).__name__} has an attention of its own, which is not "
                "supported yet"
            )
        self.model = model.eval().requires_grad_(False)  # so that no pass records a graph
        embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
        super().__init__(name, list(model.parameters()), embed, lm_head, layers)
        self.hidden_size = int(getattr(config, "hidden_size", 0))
        self.vocab_size = int(lm_head.weight.shape[0])
        self.max_positions = _reach(config)
        self._decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        # transformers 5.24 renames the argument, and forgets the former name in 5.40.
        parameters = inspect.signature(self._decoder.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._taps: tuple[int, ...] = ()
        self.cache, windows = self._empty_cache()
        try_kernels(self.cache, heads, self.hidden_size)
        fused = fuse(self._decoder, windows)
        self.fused = None if isinstance(fused, str) else fused
        self.unfused = fused if isinstance(fused, str) else ""
        kv_heads = {layer.heads for layer in self.cache.shapes}
        self.groups = heads // max(kv_heads) if len(kv_heads) == 1 else 1

    def _empty_cache(self) -> tuple[SlotCache, list[int | None]]:
        """A cache of the sizes that a pass of one token shows, and the windows of the layers (None:
        of full attention). Raises PairError for windows of several sizes."""
        shown, windows = DynamicCache(), list[int | None]()
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        PASS.windows = windows
        try:
            self._decoder(input_ids=token, use_cache=True, **{self.cache_name: shown})
        finally:
            PASS.windows = None
        sizes = {window for window in windows if window is not None}
        if len(sizes) > 1:
            told = ", ".join(map(str, sorted(sizes)))
            raise PairError(
                f"{self.name}: sliding windows of several sizes ({told} tokens) are not supported "
                "yet"
            )
        shapes = [
            LayerShape(int(x.keys.shape[1]), int(x.keys.shape[3]), int(x.values.shape[3]))
            for x in shown.layers
        ]
        dtype, window = shown.layers[0].keys.dtype, next(iter(sizes), None)
        return SlotCache(shapes, dtype, self.device, window), windows

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

    def _allocate(self, tokens: int, *, keep: bool) -> None:
        super()._allocate(tokens, keep=keep)
        if self.fused is not None:
            self.fused.tabulate(self.cache.capacity)

    def embedded(self, ids: Tensor) -> Tensor:
        return super().embedded(self._with_row(ids))

    def _with_row(self, ids: Tensor) -> Tensor:
        """``ids``, those that the model has no row for as its last token."""
        return ids if self._last_row is None else ids.clamp_max(self._last_row)

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states kept of every pass: 0 is the embeddings, i what layer i reads, the number
        of layers what the last one gives (of fused passes alone), ``FINAL`` that after the final
        norm. Empty by default, which costs nothing."""
        return self._taps

    @taps.setter
    def taps(self, taps: tuple[int, ...]) -> None:
        last = self.num_layers if self.fused is not None else self.num_layers - 1
        for tap in taps:
            if tap != FINAL and not 0 <= tap <= last:
                raise PairError(
                    f"{self.name}: no hidden state {tap} to read (the model has {self.num_layers} "
                    f"layers, of which states 0 to {last} can be read)"
                )
        self._taps = tuple(taps)
        if self.graphs is not None:
            self.graphs.forget()

    def read(
        self,
        ids: Tensor,
        start: int,
        each: Callable[[int, Tensor], None] = lambda at, states: None,
        *,
        base: int = 0,
    ) -> Tensor:
        """Fills the cache with ``ids`` at ``start ..`` in chunks, without logits, in the extent
        that begins at ``base``. Returns the last
        hidden state of the last token, [1, hidden_size] ([0, hidden_size] without ``ids``).
        ``each`` is called with the place in ``ids`` and the last hidden states of every chunk."""
        parts: list[Tensor] = []
        states = torch.zeros(0, self.hidden_size, device=self.device, dtype=self.dtype)
        for first in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[first : first + PREFILL_CHUNK]
            tokens = self.following(chunk, start + first, base=base)
            states = self._pass(PassKind("states"), tokens, 0, replays=False)[1]
            each(first, states)
            parts.append(self.tapped)
        if len(parts) > 1:
            self.tapped = torch.cat(parts)
        return states[-1:]

    def forward(self, tokens: PassTokens, *, recurrent: bool = False) -> tuple[Tensor, Tensor]:
        (ids, positions), view = tokens[:2], self.cache.view(tokens)
        prepare_masks(view, self.groups)
        rows: dict[int, Tensor]
        if self.fused is not None:
            embedded = self.embedded(ids)
            states, rows = self.fused.forward(embedded, positions, view, self._taps)
        else:
            layers = [tap for tap in self._taps if tap != FINAL]
            options = {self.cache_name: view, "output_hidden_states": bool(layers)}
            PASS.view = view
            try:
                out = self._decoder(
                    input_ids=self._with_row(ids)[None],
                    position_ids=positions[None],
                    use_cache=True,
                    **options,
                )
            finally:
                PASS.view = None
            states = out.last_hidden_state[0]
            rows = {tap: out.hidden_states[tap][0] for tap in layers}
        taps = [states if tap == FINAL else rows[tap] for tap in self._taps]
        return states, torch.cat(taps, -1) if taps else states[:, :0]


def _rows_of(linear: Any, rows: Tensor) -> nn.Linear:
    """A part of an output matrix; the first rows are no copy."""
    count, bias = len(rows), getattr(linear, "bias", None) is not None
    first = not count or int(rows[-1]) == count - 1
    part = nn.Linear(linear.weight.shape[1], count, bias=bias, device="meta")
    for name in ("weight", "bias") if bias else ("weight",):
        values = getattr(linear, name).detach()
        values = values[:count] if first else values.index_select(0, rows)
        setattr(part, name, nn.Parameter(values, requires_grad=False))
    return part


def upload(numbers: list[int], into: Tensor) -> None:
    """Copies whole numbers into a device's memory, for which the host does not wait; into CUDA's
    from pinned memory where ``SPECTUNE_SKINNY`` is on."""
    host = torch.tensor(numbers, pin_memory=into.is_cuda and skinny_on())
    into.copy_(host, non_blocking=True)


def ids_tensor(tokens: list[int], device: torch.device) -> Tensor:
    """Token ids, int64 [n]. By way of numpy, which takes half as long as torch when code is
    cold."""
    return torch.from_numpy(np.array(tokens, dtype=np.int64)).to(device)


def _reach(config: Any) -> int:
    """Tokens up to which hidden states are functions of the prefix as they are computed here.
    LongRoPE turns keys in another way from its switch on, and dynamic scaling, beyond
    ``max_position_embeddings``, by the longest position of a pass."""
    rope = getattr(config, "rope_parameters", None) or {}
    longest = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
    reach = [scaled_positions(longest, rope, ("linear",))]
    if rope.get("rope_type") == "longrope":
        name = "original_max_position_embeddings"
        reach.append(int(rope.get(name) or getattr(config, name, None) or reach[0]))
    return min(reach)

"""Passes of Llama-like decoders with few operations: queries, keys and values are one product, gate
and up another, and what lies between products is one kernel each on CUDA.

A decoder is Llama-like where its modules are a Llama's (as those of Mistral, Qwen2 and 3 are) and
its layers give what ours give; any other runs the code of transformers. The model's weights become
views of the fused ones, so memory does not grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectune.runtime.attention import attend_slots
from spectune.runtime.cache import CacheView, LayerShape, PassTokens, Seats, SlotCache
from spectune.runtime.cuda import layers as kernels
from spectune.runtime.cuda import noise
from spectune.runtime.cuda.launch import kernels_run, switched_on, try_launch
from spectune.runtime.cuda.layers import Norm
from spectune.runtime.cuda.seat_attention import seat_attention
from spectune.runtime.cuda.skinny import MOST_ROWS, skinny, skinny_on, skinny_runs
from spectune.runtime.cuda.split_attention import DTYPES, attention_runs, split_attention
from spectune.runtime.drafts.tree_program import try_program

Product = tuple[Tensor, Tensor | None]
"""A weight and its bias."""

SAMPLE: Final = 8
"""Tokens on which a layer is compared with the model's own."""
TOLERANCE: Final = 8.0
"""Roundings by which they may differ."""


def add_norm(x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """``residual + x`` (``x`` without one) normed, and as it is."""
    total = x if residual is None else residual + x
    return rms_norm(total, norm), total


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """``x`` [..., d] over its root mean square, in float32 as in transformers, times the weight."""
    weight, eps = norm
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate_and_write(
    states: Tensor,
    rotary: tuple[Tensor, Tensor],
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """:func:`runtime.cuda.layers.rotate_and_write` in torch."""
    kv_heads, _, dim = keys.shape
    by_head = states.view(states.shape[0], -1, dim)
    turned, value = by_head[:, : heads + kv_heads], by_head[:, heads + kv_heads :]
    if norms is not None:
        parts = turned[:, :heads], turned[:, heads:]
        turned = torch.cat([rms_norm(x, norm) for x, norm in zip(parts, norms, strict=True)], 1)
    cos, sin = rotary[0].unsqueeze(1), rotary[1].unsqueeze(1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    keys.index_copy_(1, slots, turned[:, heads:].transpose(0, 1))
    values.index_copy_(1, slots, value.transpose(0, 1))
    return turned[:, :heads].transpose(0, 1)


class Pass(NamedTuple):
    """What all layers of a pass read: ``rotary``, cosines and sines [n, D]; the cache; ``fast``:
    Triton's kernels run."""

    rotary: tuple[Tensor, Tensor]
    view: CacheView
    fast: bool


def try_kernels(cache: SlotCache, heads: int, hidden_size: int) -> None:
    """Launches once what passes over a model's cache may launch, on zeros of its sizes: where a
    kernel does not compile or fit, all run on plain torch."""
    states, shape = cache.states, cache.shapes[0]
    device, kv_heads, dim = states.device, shape.heads, shape.key_size

    def launch() -> None:
        zeros, slot = states.new_zeros, torch.zeros(1, dtype=torch.int64, device=device)
        for add in (noise.perturbed, noise.best):
            add(torch.zeros(1, 1, device=device), slot[:, None])
        if skinny_on() or device.type == "cuda":
            try_program(device)
        if states.dtype not in DTYPES:
            return
        x, norm = zeros(1, hidden_size), (zeros(hidden_size), 1e-6)
        for residual in (None, x):
            kernels.add_norm(x, residual, norm)
        kernels.swiglu(zeros(1, 2 * hidden_size))
        if skinny_on():
            square = zeros(hidden_size, hidden_size), None
            skinny(x, square, norm=norm, residual=x)
            skinny(zeros(1, 2 * hidden_size), square, gated=True)
        keys, values = zeros(kv_heads, 1, dim), zeros(kv_heads, 1, shape.value_size)
        if not attention_runs(1, keys, values):
            return
        turns, head_norm = (zeros(1, dim), zeros(1, dim)), (zeros(dim), 1e-6)
        for norms in (None, (head_norm, head_norm)):
            by_head = zeros(1, (heads + 2 * kv_heads) * dim)
            kernels.rotate_and_write(by_head, turns, slot, keys, values, heads, norms)
        for width in (1, 64):  # 64 rows of one head fill the largest block
            mask = torch.ones(width, 1, dtype=torch.bool, device=device)
            split_attention(zeros(heads, width, dim), keys, values, mask, slot + 1, 1.0)
        if device.type == "cuda":  # of several requests
            seats = Seats(torch.tensor([[0, 1, 0, 0, 1]], device=device), mask[:1])
            seat_attention(zeros(heads, 1, dim), keys, values, seats, 1.0)

    if kernels_run(device):
        try_launch(device, launch)


def new_pass(rotary: tuple[Tensor, Tensor], view: CacheView) -> Pass:
    """A pass by Triton's kernels where they run on the device and dtype of ``rotary``."""
    cos = rotary[0]
    return Pass(rotary, view, kernels_run(cos.device) and cos.dtype in DTYPES)


@dataclass(frozen=True, eq=False, slots=True)
class Layer:
    """The weights of a layer behind its first norm. ``qk_norms``: of queries and keys, a head at a
    time. ``slides``: it sees the cache's window alone."""

    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    mlp_norm: Norm
    qk_norms: tuple[Norm, Norm] | None
    activation: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    slides: bool = False

    def forward(
        self, normed: Tensor, residual: Tensor, index: int, parts: Pass
    ) -> tuple[Tensor, Tensor]:
        """A part and a residual [n, hidden_size], whose sum layer ``index`` gives for ``residual``,
        ``normed`` by its first norm."""
        norm = kernels.add_norm if parts.fast else add_norm
        attended = self._attended(F.linear(normed, *self.qkv), index, parts)
        x = F.linear(attended, *self.output)
        normed, residual = norm(x, residual, self.mlp_norm)
        gate_up = F.linear(normed, *self.gate_up)
        if parts.fast and self.gates_by_silu:
            product = kernels.swiglu(gate_up)
        else:
            gate, up = gate_up.chunk(2, -1)
            product = self.activation(gate) * up
        return F.linear(product, *self.down), residual

    def joined(self, states: Tensor, norm: Norm, index: int, parts: Pass) -> Tensor:
        """What layer ``index``, whose first norm is ``norm``, gives for ``states``, by products
        that take in what lies between them."""
        attended = self._attended(skinny(states, self.qkv, norm=norm), index, parts)
        states = skinny(attended, self.output, residual=states)
        gate_up = skinny(states, self.gate_up, norm=self.mlp_norm)
        return skinny(gate_up, self.down, gated=True, residual=states)

    def _attended(self, states: Tensor, index: int, parts: Pass) -> Tensor:
        """What the heads make of queries, keys and values [n, (H + 2 Hkv) * D]: [n, H * D]."""
        rotary, view, fast = parts
        rotate, slots = kernels.rotate_and_write if fast else rotate_and_write, view.layer(index)
        query = rotate(states, rotary, view.slots, *slots, self.heads, self.qk_norms)
        keys, values = view.cache.layers[index]
        attended = attend_slots(query[None], keys, values, view, self.scale, slides=self.slides)[0]
        return attended.transpose(0, 1).flatten(1)

    @property
    def gates_by_silu(self) -> bool:
        return type(self.activation).__name__ in ("SiLU", "SiLUActivation")

    @property
    def can_join(self) -> bool:
        """Whether :meth:`joined` can run."""
        products = self.qkv, self.output, self.gate_up, self.down
        return self.gates_by_silu and all(skinny_runs(weight) for weight, _ in products)


class FusedDecoder:
    """A decoder over a slot cache."""

    def __init__(self, layers: Sequence[Layer], norms: Sequence[Norm], rotary: nn.Module) -> None:
        """``norms``: those before each layer, and the last."""
        self.layers, self.norms, self._rotary = layers, norms, rotary
        self._can_join = skinny_on() and all(layer.can_join for layer in layers)
        self._turns: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor,
        view: CacheView,
        taps: Collection[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The last hidden states of n tokens, after the final norm, and those that layers ``taps``
        read (the number of layers: what the last one gives), [n, hidden_size] each."""
        parts = new_pass(self.rotary(embedded, positions), view)
        norm = kernels.add_norm if parts.fast else add_norm
        if self._can_join and parts.fast and len(embedded) <= MOST_ROWS:
            states, tapped = embedded, {0: embedded}
            for index, layer in enumerate(self.layers):
                states = layer.joined(states, self.norms[index], index, parts)
                if index + 1 in taps:
                    tapped[index + 1] = states
            return norm(states, None, self.norms[-1])[0], tapped
        normed, residual = norm(embedded, None, self.norms[0])
        tapped = {0: residual}
        for index, layer in enumerate(self.layers):
            x, residual = layer.forward(normed, residual, index, parts)
            normed, residual = norm(x, residual, self.norms[index + 1])
            if index + 1 in taps:
                tapped[index + 1] = residual
        return normed, tapped

    def rotary(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, D] in the dtype of ``x``."""
        if self._turns is not None:
            cos, sin = self._turns
            return cos[positions], sin[positions]
        cos, sin = self._rotary(x, positions[None])
        return cos[0], sin[0]

    def tabulate(self, size: int) -> None:
        """Keeps the cosines and sines of positions below ``size``, so that a pass looks them up in
        two launches instead of computing them; unless ``SPECTUNE_SKINNY`` is off, or they depend on
        the longest position of a pass."""
        if not skinny_on() or getattr(self._rotary, "rope_type", "") in ("dynamic", "longrope"):
            return
        self._turns, weight = None, self.norms[0][0]
        self._turns = self.rotary(weight, torch.arange(size, device=weight.device))


UNLIKE: Final = "its modules are not those of a Llama, or their weights quantized or shared"


def fuse(decoder: Any, windows: Sequence[int | None]) -> FusedDecoder | str:
    """The fused passes of a model's decoder, or why it has none (empty: switched off). ``windows``:
    those of its layers."""
    if not switched_on():
        return ""
    if {name for name, _ in decoder.named_children()} != CHILDREN:
        return UNLIKE
    uses = Counter(id(p) for _, p in decoder.named_parameters(remove_duplicate=False))
    norm, parts = _norm(decoder.norm), [_layer(layer, uses) for layer in decoder.layers]
    layers = [part for part in parts if part is not None]
    if norm is None or not layers or len(layers) < len(parts):
        return UNLIKE
    norms = [*(first for first, _ in layers), norm]
    own = [
        replace(layer, slides=window is not None)
        for (_, layer), window in zip(layers, windows, strict=True)
    ]
    fused = FusedDecoder(own, norms, decoder.rotary_emb)
    return _difference(fused, decoder) or fused


CHILDREN: Final = {"embed_tokens", "layers", "norm", "rotary_emb"}
MATRICES: Final = (
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
)
NORMS: Final = ("input_layernorm", "post_attention_layernorm")
QK_NORMS: Final = ("self_attn.q_norm", "self_attn.k_norm")


def _layer(layer: nn.Module, uses: Counter[int]) -> tuple[Norm, Layer] | None:
    """The first norm and the other weights of a layer that has a Llama's modules and no other
    weights; its matrices become views of fused ones. None of any other."""
    modules: dict[str, Any] = dict(layer.named_modules())
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    weights = {name.rpartition(".")[0] for name, _ in tensors}
    names = [*NORMS, *(QK_NORMS if QK_NORMS[0] in weights else ())]
    if weights != {*MATRICES, *names} or len({(p.dtype, p.device) for _, p in tensors}) != 1:
        return None
    linears, attention = [modules[x] for x in MATRICES], modules["self_attn"]
    norms = [norm for x in names if (norm := _norm(modules[x])) is not None]
    activation: Any = getattr(modules["mlp"], "act_fn", None)
    sizes = [linears[6].weight.shape[0]] * 2 + [getattr(attention, "head_dim", 0)] * 2
    biased = [linear.bias is not None for linear in linears]
    alike = (
        all(type(linear) is nn.Linear for linear in linears)
        and len({*biased[:3]}) == len({*biased[4:6]}) == 1
        and all(uses[id(parameter)] == 1 for _, parameter in tensors)
        and not any(m._forward_hooks or m._forward_pre_hooks for m in modules.values())
        and [len(weight) for weight, _ in norms] == sizes[: len(names)]
        and callable(activation)
    )
    if not alike:
        return None
    return norms[0], Layer(
        qkv=_stacked(linears[:3]),
        output=(linears[3].weight, linears[3].bias),
        gate_up=_stacked(linears[4:6]),
        down=(linears[6].weight, linears[6].bias),
        mlp_norm=norms[1],
        qk_norms=(norms[2], norms[3]) if len(norms) > 2 else None,
        activation=activation,
        heads=linears[0].out_features // attention.head_dim,
        kv_heads=linears[1].out_features // attention.head_dim,
        head_dim=attention.head_dim,
        scale=attention.scaling,
    )


def _norm(module: Any) -> Norm | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    return None if eps is None or weight is None or weight.dim() != 1 else (weight, float(eps))


def _stacked(linears: Sequence[nn.Linear]) -> Product:
    """One product for several over the same input. Their weights become views of its."""

    def joined(parameters: Sequence[Tensor]) -> Tensor:
        stack = torch.cat([x.data for x in parameters])
        parts = torch.split(stack, [len(x) for x in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
        return stack

    bias = None if linears[0].bias is None else joined([x.bias for x in linears])
    return joined([x.weight for x in linears]), bias


@torch.no_grad()
def _difference(fused: FusedDecoder, decoder: Any) -> str:
    """Why a decoder differs from its layers fused; empty where on a few tokens each layer gives
    what the model's own gives, and all between embeddings and last norm what the decoder gives."""
    weight, first = decoder.embed_tokens.weight, fused.layers[0]
    count = min(SAMPLE, len(weight))
    slots = torch.arange(count, device=weight.device)
    ids = slots * (len(weight) // count)
    x = decoder.embed_tokens(ids)
    rotary = fused.rotary(x, slots)
    if rotary[0].shape[-1] != first.head_dim:
        return "positions turn a part of each head"
    shape = LayerShape(first.kv_heads, first.head_dim, first.head_dim)
    cache = SlotCache([shape], x.dtype, x.device)
    cache.reserve(count)
    parts = new_pass(rotary, cache.view(PassTokens(ids, slots, slots, None, count)))
    for index, (layer, norm) in enumerate(zip(fused.layers, fused.norms, strict=False)):
        if (layer.kv_heads, layer.head_dim) != (first.kv_heads, first.head_dim):
            return f"layer {index} has heads of other sizes"
        part, residual = layer.forward(add_norm(x, None, norm)[0], x, 0, parts)
        module: Any = decoder.layers[index]
        turns = {"position_ids": slots[None], "position_embeddings": [x[None] for x in rotary]}
        theirs = module(x[None], attention_mask=None, use_cache=False, **turns)
        if not isinstance(theirs, Tensor):
            return f"layer {index} gives more than hidden states"
        if not _close(residual + part, theirs[0], x):
            return f"layer {index} gives other numbers than a Llama's"
        x = theirs[0]
    theirs = decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    alike = _close(decoder.norm(x), theirs, x)
    return "" if alike else "what lies around its layers gives other numbers than a Llama's"


def _close(ours: Tensor, theirs: Tensor, before: Tensor) -> bool:
    """Whether states [n, hidden_size] differ by rounding, measured by what a layer added to those
    ``before`` and, less strictly, by their size."""
    rounding = max(torch.finfo(ours.dtype).eps, torch.finfo(torch.float32).eps)
    size = theirs.norm(dim=-1) + (theirs - before).norm(dim=-1)
    return bool(((ours - theirs).norm(dim=-1) <= TOLERANCE * rounding * size).all())

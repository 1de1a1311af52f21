"""EAGLE heads: drafts of one layer that read the target's hidden states.

A head pairs the target's hidden state of token p - 1 with the embedding of token p, in slot p at
RoPE position p (slot 0 is never written), and predicts token p + 1. Behind the text it is fed its
own output of the slot before. EAGLE-1 and 2 read the target's last state, after its final norm;
EAGLE-3 reads three layers, has a norm and an output matrix of its own, and often a shorter
vocabulary. EAGLE-3.1 may norm each of the three, and feed the head its output after the norm.
:mod:`runtime.drafts.eagle_formats` reads published checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectune.runtime.attention import prepare_masks
from spectune.runtime.cache import LayerShape, PassTokens, SlotCache
from spectune.runtime.fused import Layer, Pass, new_pass, try_kernels
from spectune.runtime.models import CausalModel, SlotModel

Convention = Literal["outputs", "boundaries", "default", "last"]
"""How a head's configuration names the target's hidden states: by the layers whose outputs they
are, by the boundaries between layers (state i is what layer i reads), not at all (the default
states), or as the last one, after the final norm."""


@dataclass(frozen=True)
class HeadShape:
    """A head's sizes. ``fused`` is the width of the target features that ``fc`` takes (EAGLE-1/2:
    the last state's).

    EAGLE-3 alone: ``norm_output``, the outputs are those of the last norm; before ``fc`` either one
    norm over all features (``norm_before_fc``), or ``fc_norms`` of them, one for each fused state.
    """

    eagle3: bool
    hidden: int
    fused: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    layers: int = 1
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norms: int = 0
    draft_vocab: int | None = None
    fuses: bool = True
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False


class HeadLayer(nn.Module):
    """A Llama layer. The first of an EAGLE-3 head attends over cat(embedding, hidden), the first of
    EAGLE-1/2 has no input norm."""

    def __init__(self, shape: HeadShape, index: int) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        self.wide = shape.eagle3 and index == 0
        width = shape.hidden * (2 if self.wide else 1)
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = nn.Linear(width, rows, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=shape.o_bias)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)
        self.input_layernorm = (
            nn.RMSNorm(shape.hidden, shape.eps) if shape.eagle3 or index else None
        )
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps) if self.wide else None
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)

    @cached_property
    def _weights(self) -> Layer:
        shape = self.shape
        return Layer(
            qkv=(self.qkv.weight, self.qkv.bias),
            output=(self.o_proj.weight, self.o_proj.bias),
            gate_up=(self.gate_up.weight, None),
            down=(self.down_proj.weight, None),
            mlp_norm=(self.post_attention_layernorm.weight, shape.eps),
            qk_norms=None,
            activation=nn.SiLU(),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
        )

    def forward(self, x: Tensor, embedded: Tensor, parts: Pass) -> Tensor:
        """``x`` and ``embedded`` [n, H], the latter read by the first EAGLE-3 layer alone."""
        residual = x
        if self.hidden_norm is not None and self.input_layernorm is not None:
            normed = self.hidden_norm(x)
            residual = normed if self.shape.norm_before_residual else x
            x = torch.cat((self.input_layernorm(embedded), normed), -1)
        elif self.input_layernorm is not None:
            x = self.input_layernorm(x)
        part, residual = self._weights.forward(x, residual, self.index, parts)
        return residual + part


class HeadNet(nn.Module):
    """The head's own weights: ``fc``, layers, and for EAGLE-3 norms and (unless the target's is
    used) an output matrix."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.fused if shape.eagle3 else 2 * shape.hidden
        self.input_norm = nn.RMSNorm(shape.fused, shape.eps) if shape.norm_before_fc else None
        self.fc_norm = nn.ModuleList(
            nn.RMSNorm(shape.fused // shape.fc_norms, shape.eps) for _ in range(shape.fc_norms)
        )
        self.fc = nn.Linear(width, shape.hidden, bias=shape.fc_bias) if shape.fuses else None
        self.layers = nn.ModuleList(HeadLayer(shape, i) for i in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps) if shape.eagle3 else None
        self.lm_head = None
        if shape.draft_vocab is not None:
            self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)

    def forward(self, embedded: Tensor, hidden: Tensor, parts: Pass, *, recurrent: bool) -> Tensor:
        """Embeddings [n, H] and target features [n, fused] (with ``recurrent`` the head's own
        outputs [n, H]) to outputs [n, H]."""
        if self.fc is not None and not self.shape.eagle3:
            hidden = self.fc(torch.cat((embedded, hidden), -1))
        elif self.fc is not None and not recurrent:
            if self.input_norm is not None:
                hidden = self.input_norm(hidden)
            if self.fc_norm:
                states = zip(self.fc_norm, hidden.chunk(len(self.fc_norm), -1), strict=True)
                hidden = torch.cat([norm(state) for norm, state in states], -1)
            hidden = self.fc(hidden)
        for layer in self.layers:
            hidden = layer(hidden, embedded, parts)
        return self.norm(hidden) if self.norm is not None and self.shape.norm_output else hidden


class EagleHead(SlotModel):
    """A loaded head over its slot cache.

    ``taps`` are the target's hidden states that it reads (``CausalModel.taps``), ``feature_size``
    their width together, ``convention`` how its configuration names them. ``max_positions`` is the
    target's, since a head's positions are relative. ``unread`` are keys of its configuration
    that nothing here follows."""

    first_slot = 1

    def __init__(
        self,
        net: HeadNet,
        target: CausalModel,
        *,
        name: str,
        taps: tuple[int, ...],
        convention: Convention,
        rotary: LlamaRotaryEmbedding,
        token_ids: Tensor | None = None,
        embed: nn.Module | None = None,
        unread: tuple[str, ...] = (),
    ) -> None:
        self.net = net.eval().requires_grad_(False)
        weights = [*net.parameters(), *(() if embed is None else embed.parameters())]
        embed = embed or target.model.get_input_embeddings()
        lm_head = net.lm_head or target.model.get_output_embeddings()
        super().__init__(name, weights, embed, lm_head, net.shape.layers, token_ids)
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions
        self.convention, self.unread = convention, unread
        self.taps, self.hidden_size, self.feature_size = taps, net.shape.hidden, net.shape.fused
        self.rotary, self.groups = rotary.to(self.device), net.shape.heads // net.shape.kv_heads
        layer = LayerShape(net.shape.kv_heads, net.shape.head_dim, net.shape.head_dim)
        self.cache = SlotCache([layer] * net.shape.layers, self.dtype, self.device)
        try_kernels(self.cache, net.shape.heads, net.shape.hidden)
        self._cos, self._sin = self._table(1)

    def reads(self) -> str:
        """A line on the target's hidden states that the head reads, and what of its configuration
        is not followed."""
        states = ", ".join(map(str, self.taps))
        line = {
            "last": f"{self.name} reads the target's last hidden state, after the final norm",
            "default": f"{self.name}: states not named in its config.json: default 2, L/2, L-3 of "
            f"the target's L layers, here {states}",
            "outputs": f"{self.name} reads the target's hidden states {states} (its ids count "
            "outputs of layers)",
            "boundaries": f"{self.name} reads the target's hidden states {states} (its ids count "
            "boundaries between layers)",
        }[self.convention]
        ignored = ", ".join(self.unread)
        return f"{line}; ignored of its config.json: {ignored}" if ignored else line

    def _table(self, size: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions 0 .. ``size`` - 1, each [size, head_dim]."""
        cos, sin = self.rotary(
            torch.zeros(1, dtype=self.dtype, device=self.device),
            torch.arange(size, device=self.device)[None],
        )
        return cos[0], sin[0]

    def _allocate(self, tokens: int, *, keep: bool) -> None:
        super()._allocate(tokens, keep=keep)
        self._cos, self._sin = self._table(self.cache.capacity)

    def forward(self, tokens: PassTokens, *, recurrent: bool = False) -> tuple[Tensor, Tensor]:
        """Row i of ``tokens.hidden`` belongs to the token before ``ids[i]``: target features, or
        with ``recurrent`` the head's output there. Slot 0 stays empty: a mask hides it. Nothing
        reads a head's hidden states."""
        view = self.cache.view(tokens)
        assert tokens.hidden is not None
        prepare_masks(view, self.groups)
        rotary = self._cos[tokens.positions], self._sin[tokens.positions]
        embedded, parts = self._embed(tokens.ids), new_pass(rotary, view)
        out = self.net(embedded, tokens.hidden, parts, recurrent=recurrent)
        return out, out[:, :0]

    def state(self, out: Tensor) -> Tensor:
        """After EAGLE-3's norm; the outputs themselves of EAGLE-1 and 2, and where they are normed
        already (``norm_output``)."""
        norm = self.net.norm
        return out if norm is None or self.net.shape.norm_output else norm(out)

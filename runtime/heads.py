"""EAGLE heads: drafts of one layer that read the target's hidden states.

A head pairs the target's hidden state of token p - 1 with the embedding of token p, and predicts token p + 1. We keep that pair
in slot p, at RoPE position p; slot 0 is never written. Behind the text the target has no states: there the head is fed its own
output of the slot before. EAGLE-1 and 2 read the target's last state, after its final norm; EAGLE-3 reads three layers, has a
norm and an output matrix of its own, and often a shorter vocabulary, whose other tokens get a logit of -inf. EAGLE-3.1 may norm each
of the three before they are fused, and feed the head its output after the norm rather than before.

Formats are those of published checkpoints (the names are in ``_weights``). RoPE being relative, the slot convention changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from runtime.attention import slot_attention
from runtime.cache import SlotCache, SlotLayer
from runtime.models import FINAL, CausalModel
from runtime.pair import head_config, identity, is_local
from runtime.shortlists import OutputHead
from traces.errors import PairError

if TYPE_CHECKING:
    from runtime.graphs import Outputs, PassGraphs

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [1, H, n, D], key and value [1, Hkv, n, D]) -> [1, n, H, D]: attention, with whatever memory the caller keeps."""


@dataclass(frozen=True)
class HeadShape:
    """A head's sizes. ``fused`` is the width of the target features that ``fc`` takes (EAGLE-1/2: the last state's).

    EAGLE-3 alone: ``norm_output``, the outputs are those of the last norm; before ``fc`` either one norm over all features
    (``norm_before_fc``), or ``fc_norms`` of them, one for each fused state.
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
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class HeadLayer(nn.Module):
    """A Llama layer. The first of an EAGLE-3 head attends over cat(embedding, hidden), the first of EAGLE-1/2 has no input norm."""

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
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps) if shape.eagle3 or index else None
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps) if self.wide else None
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, embedded: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """``x`` and ``embedded`` [B, n, H] (the latter read by the first EAGLE-3 layer alone), ``rotary`` cos and sin [n, D]."""
        shape, residual = self.shape, x
        if self.hidden_norm is not None and self.input_layernorm is not None:
            normed = self.hidden_norm(x)
            residual = normed if shape.norm_before_residual else x
            x = torch.cat((self.input_layernorm(embedded), normed), -1)
        elif self.input_layernorm is not None:
            x = self.input_layernorm(x)
        batch, width, _ = x.shape
        states = self.qkv(x).view(batch, width, -1, shape.head_dim).transpose(1, 2)
        turned = rotate(states[:, : shape.heads + shape.kv_heads], *rotary)
        query, key = turned[:, : shape.heads], turned[:, shape.heads :]
        value = states[:, shape.heads + shape.kv_heads :]
        x = residual + self.o_proj(attend(self.index, query, key, value).reshape(batch, width, -1))
        gate, up = self.gate_up(self.post_attention_layernorm(x)).chunk(2, -1)
        out: Tensor = x + self.down_proj(F.silu(gate) * up)
        return out


class HeadNet(nn.Module):
    """The head's own weights: ``fc``, layers, and for EAGLE-3 norms and (unless the target's is used) an output matrix."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.fused if shape.eagle3 else 2 * shape.hidden
        self.input_norm = RMSNorm(shape.fused, shape.eps) if shape.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(shape.fused // shape.fc_norms, shape.eps) for _ in range(shape.fc_norms))
        self.fc = nn.Linear(width, shape.hidden, bias=shape.fc_bias)
        self.layers = nn.ModuleList(HeadLayer(shape, i) for i in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps) if shape.eagle3 else None
        self.lm_head = None if shape.draft_vocab is None else nn.Linear(shape.hidden, shape.draft_vocab, bias=False)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, *, own: bool) -> Tensor:
        """Embeddings [B, n, H] and target features [B, n, fused] (or ``own`` outputs [B, n, H]) to outputs [B, n, H].

        Outputs are what the head is fed where the target has no features: with ``norm_output`` after the norm.
        """
        if not self.shape.eagle3:
            hidden = self.fc(torch.cat((embedded, hidden), -1))
        elif not own:
            hidden = self.fc(self._normed(hidden))
        for layer in self.layers:
            hidden = layer(hidden, embedded, rotary, attend)
        return self.norm(hidden) if self.norm is not None and self.shape.norm_output else hidden

    def _normed(self, features: Tensor) -> Tensor:
        """Target features [B, n, fused] as ``fc`` takes them."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return features


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: ``x`` [B, heads, n, D] turned by ``cos`` and ``sin`` [n, D], halves paired as Llama pairs them."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class EagleHead:
    """A loaded head over its slot cache. Logits are float32 over the target's vocabulary.

    ``taps`` are the target's hidden states that it reads (``CausalModel.taps``), ``feature_size`` their width together. Where a head's
    training stopped (``max_position_embeddings``, 2048 in most configurations whatever the target's) limits nothing: positions are
    relative, so ``max_positions`` is the target's. ``graphs`` replays the passes that it has captured (:mod:`runtime.graphs`).
    """

    graphs: PassGraphs | None = None

    def __init__(
        self,
        net: HeadNet,
        target: CausalModel,
        *,
        name: str,
        fingerprint: str,
        taps: tuple[int, ...],
        rotary: LlamaRotaryEmbedding,
        token_ids: Tensor | None = None,
        embed: nn.Module | None = None,
    ) -> None:
        parameter = next(net.parameters())
        self.net = net.eval()
        self.name = name
        self.fingerprint = fingerprint
        self.device, self.dtype = parameter.device, parameter.dtype
        self.vocab_size = target.vocab_size
        self.max_positions = target.max_positions
        self.num_parameters = sum(p.numel() for p in (*net.parameters(), *(() if embed is None else embed.parameters())))
        self.taps = taps
        self.hidden_size, self.feature_size = net.shape.hidden, net.shape.fused
        self.cache = SlotCache(net.shape.layers)
        self._embed = target.model.get_input_embeddings() if embed is None else embed
        self._lm_head = target.model.get_output_embeddings() if net.lm_head is None else net.lm_head
        self._token_ids = token_ids
        self.rotary = rotary.to(self.device)
        self._cos, self._sin = self._table(1)
        self._positions = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._causal = torch.zeros(0, 0, dtype=torch.bool, device=self.device)

    def _table(self, size: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions 0 .. ``size`` - 1, each [size, head_dim]."""
        cos, sin = self.rotary(torch.zeros(1, dtype=self.dtype, device=self.device), torch.arange(size, device=self.device)[None])
        return cos[0], sin[0]

    def reserve(self, tokens: int) -> None:
        """Makes room for sequences of ``tokens``; forgets the cache if it must grow."""
        self.cache.reserve(tokens)
        if self._causal.shape[1] < self.cache.capacity:
            size = self.cache.capacity
            self._cos, self._sin = self._table(size)
            self._positions = torch.arange(size, device=self.device)
            self._causal = torch.ones(size, size, dtype=torch.bool, device=self.device).tril()
            self._causal[:, 0] = False

    @torch.no_grad()
    def chain(self, ids: Tensor, hidden: Tensor, start: int, *, own: bool = False, logits: int = 0) -> tuple[Tensor, Tensor]:
        """Runs tokens ``ids`` (int64 [n]) at slots and positions ``start ..`` (``start`` >= 1); each sees slots 1 up to its own.

        Row i of ``hidden`` belongs to the token before ``ids[i]``: target features [n, feature_size], or with ``own`` the head's output
        there, [n, hidden_size]. Returns float32 logits of the last ``logits`` tokens, [logits, vocab], and the outputs [n, hidden_size].
        """
        width = ids.shape[0]
        if self.graphs is not None and start > 0:
            slots = self._positions[start : start + width]
            found = self._replayed(ids, hidden, slots, slots, self._causal[start : start + width], own, bool(logits), start + width)
            if found is not None:
                return found.logits[max(0, width - logits) :].clone(), found.states.clone()
        out = self.read(ids, hidden, start, own=own)
        return self._head(out[width - logits :]) if logits else out.new_zeros(0, dtype=torch.float32), out

    @torch.no_grad()
    def read(self, ids: Tensor, hidden: Tensor, start: int, *, own: bool = False) -> Tensor:
        """:meth:`chain` without logits, never by a captured pass: the outputs [n, hidden_size]."""
        if start < 1:
            raise ValueError("slot 0 of a head stays empty: the first token has no hidden state before it")
        width = ids.shape[0]
        view = self.cache.place(start, width)
        rotary = self._cos[start : start + width], self._sin[start : start + width]
        return self._run(ids, hidden, rotary, self._causal[start : start + width, :view], own)

    @torch.no_grad()
    def scattered(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, *, own: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Runs ``ids`` (int64 [n]) at given positions and slots under ``mask`` (bool [n, view]; column 0 must be False).

        ``view`` must be a multiple of 64 or the cache's capacity. Returns float32 logits [n, vocab] and outputs [n, hidden_size].
        """
        if self.graphs is not None:
            found = self._replayed(ids, hidden, positions, slots, mask, own, True, mask.shape[1])
            if found is not None:
                return found.logits.clone(), found.states.clone()
        out = self._scattered(ids, hidden, positions, slots, mask, own)
        return self._head(out), out

    @torch.no_grad()
    def scattered_outputs(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, *, own: bool = True
    ) -> Tensor:
        """:meth:`scattered` without the output head: the outputs alone, [n, hidden_size]."""
        found = None if self.graphs is None else self._replayed(ids, hidden, positions, slots, mask, own, False, mask.shape[1])
        return self._scattered(ids, hidden, positions, slots, mask, own) if found is None else found.states.clone()

    def _scattered(self, ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, own: bool) -> Tensor:
        self.cache.place_at(slots, mask.shape[1])
        return self._run(ids, hidden, (self._cos[positions], self._sin[positions]), mask, own)

    def _replayed(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, own: bool, logits: bool, reads: int
    ) -> Outputs | None:
        """A pass that was captured; None where there is none of its shape. Outputs are static: copy what is to last."""
        self._check_width(hidden, own)
        assert self.graphs is not None
        return self.graphs.run(logits, own, ids, positions, slots, mask, reads, hidden)

    def over(
        self, ids: Tensor, positions: Tensor, mask: Tensor, layers: list[SlotLayer], hidden: Tensor | None, own: bool
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """A pass of n tokens under ``mask``, bool [n, view], over ``layers`` that know where they write (:meth:`SlotCache.bound`): the
        outputs [n, hidden_size]. A head has no taps."""
        assert hidden is not None
        return self._run(ids, hidden, (self._cos[positions], self._sin[positions]), mask, own, layers), {}

    def fed(self, own: bool) -> int:
        """Width of the hidden states that a pass takes beside its tokens."""
        return self.hidden_size if own else self.feature_size

    @torch.no_grad()
    def canonical(self, ids: list[int], features: Tensor, drafted: list[int] | tuple[int, ...] = ()) -> Tensor:
        """Float32 logits [vocab] after ``ids`` (two tokens or more) and the ``drafted`` ones, without the cache.

        ``features`` are the target's of ``ids``, [len(ids) - 1 or more, feature_size], row i of token i. The text goes in one pass, each
        drafted token in one more, fed the output before it: a function of the arguments alone, the same bits for the same arguments.
        """
        return self._head(self.canonical_output(ids, features, drafted))[0]

    @torch.no_grad()
    def canonical_output(self, ids: list[int], features: Tensor, drafted: list[int] | tuple[int, ...] = ()) -> Tensor:
        """:meth:`canonical` without the output head: the output [1, hidden_size]."""
        count = len(ids)
        memory: dict[int, tuple[Tensor, Tensor]] = {}
        cos, sin = self._table(count + len(drafted))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if layer in memory:
                key, value = torch.cat((memory[layer][0], key), 2), torch.cat((memory[layer][1], value), 2)
            memory[layer] = key, value
            width, total = query.shape[2], key.shape[2]
            mask = torch.ones(width, total, dtype=torch.bool, device=self.device).tril(total - width)
            return slot_attention(self.net, query, key, value, mask[None, None])[0]

        def run(tokens: list[int], hidden: Tensor, at: int, own: bool) -> Tensor:
            embedded = self._embed(torch.tensor([tokens], device=self.device))
            rotary = cos[at : at + len(tokens)], sin[at : at + len(tokens)]
            out: Tensor = self.net(embedded, hidden[None], rotary, attend, own=own)
            return out[0, -1:]

        hidden = run(ids[1:], features[: count - 1], 1, False)
        for j, token in enumerate(drafted):
            hidden = run([token], hidden, count + j, True)
        return hidden

    def _check_width(self, hidden: Tensor, own: bool) -> None:
        if hidden.shape[-1] != self.fed(own):
            raise ValueError(
                f"hidden states of width {hidden.shape[-1]}; the head takes {self.feature_size}, of its own {self.hidden_size}"
            )

    def _run(
        self,
        ids: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        own: bool,
        bound: list[SlotLayer] | None = None,
    ) -> Tensor:
        self._check_width(hidden, own)
        layers, attended = self.cache.layers if bound is None else bound, mask[None, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = layers[layer].update(key, value)
            return slot_attention(self.net, query, keys, values, attended)[0]

        out: Tensor = self.net(self._embed(ids)[None], hidden[None], rotary, attend, own=own)
        return out[0]

    def state(self, out: Tensor) -> Tensor:
        """What the output matrix reads of outputs [n, hidden_size]: after EAGLE-3's norm; the outputs themselves of EAGLE-1 and 2, and
        where they are normed already (``norm_output``)."""
        norm = self.net.norm
        return out if norm is None or self.net.shape.norm_output else norm(out)

    def embedded(self, ids: Tensor) -> Tensor:
        """Input embeddings of ``ids`` (int64 [n]), [n, embedding size]."""
        out: Tensor = self._embed(ids)
        return out

    @cached_property
    def output(self) -> OutputHead:
        """The output matrix, to be evaluated in part."""
        return OutputHead(self._lm_head, self._token_ids)

    def _head(self, out: Tensor) -> Tensor:
        """Float32 logits over the target's vocabulary, -inf where the head has no such token."""
        logits: Tensor = self._lm_head(self.state(out)).float()
        if self._token_ids is None:
            return logits
        full = logits.new_full((logits.shape[0], self.vocab_size), -torch.inf)
        return full.index_copy_(1, self._token_ids, logits)


def rope_config(config: Mapping[str, Any], head_dim: int) -> LlamaConfig:
    """What transformers' rotary embedding reads of a head's configuration, old style or new; a missing base is 10000."""
    rope: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default"}
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        found = config.get(key)
        if isinstance(found, Mapping):
            rope |= found
            rope["rope_type"] = found.get("rope_type", found.get("type", "default"))
        elif found is not None:
            rope[key] = found
    return LlamaConfig(
        hidden_size=int(config["hidden_size"]),
        num_attention_heads=int(config["num_attention_heads"]),
        head_dim=head_dim,
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
        rope_parameters=rope,
    )


def default_taps(layers: int) -> tuple[int, int, int]:
    """The hidden states EAGLE-3 reads unless a configuration says otherwise: of a low, a middle and a high layer."""
    return 2, layers // 2, layers - 3


def _taps(config: Mapping[str, Any], layers: int, eagle3: bool) -> tuple[int, ...]:
    if not eagle3:
        return (FINAL,)
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested is not None:
        return tuple(int(i) + 1 for i in nested)
    top = config.get("eagle_aux_hidden_state_layer_ids")
    return default_taps(layers) if top is None else tuple(int(i) for i in top)


_BESIDE = (
    "architectures",
    "speculators_model_type",
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_output",
    "norm_before_fc",
    "fc_norm",
)
"""What the speculators format has beside the sizes of a layer, which it nests."""


def _flat(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A configuration on one level, as EAGLE's own format has it; that of the speculators format nests the sizes of a layer."""
    kind, layer = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if kind is None and layer is None:
        return config
    if kind != "eagle3":
        raise PairError(
            f"{name}: config.json is of the speculators format with speculators_model_type {kind!r}; only 'eagle3' is read"
        )
    if not isinstance(layer, Mapping):
        raise PairError(f"{name}: config.json is of the speculators format, but says no transformer_layer_config")
    for key, known in (("model_type", "llama"), ("hidden_act", "silu")):
        if layer.get(key, known) != known:
            raise PairError(f"{name}: transformer_layer_config has {key} {layer[key]!r}; only {known!r} is read")
    if config.get("norm_before_residual") is None:
        # speculators takes False where nothing is said, vLLM True.
        raise PairError(
            f"{name}: config.json is of the speculators format, but says no norm_before_residual; add what was trained"
        )
    return {k: v for k, v in layer.items() if k not in _BESIDE} | {k: config[k] for k in _BESIDE if config.get(k) is not None}


def _switch(config: Mapping[str, Any], key: str, name: str) -> bool:
    """A switch of EAGLE-3.1, at the top or in ``eagle_config``; off where nothing is said."""
    said = [v for v in (config.get(key), (config.get("eagle_config") or {}).get(key)) if v is not None]
    if not all(isinstance(v, bool) for v in said) or len(set(said)) > 1:
        raise PairError(f"{name}: config.json has {key} {' and '.join(map(repr, said))}; it must be true or false")
    return said[:1] == [True]


def _norms(config: Mapping[str, Any], tensors: Mapping[str, Tensor], eagle3: bool, name: str) -> dict[str, bool]:
    """EAGLE-3.1's norms that a head has, by their switches. The tensors must agree with these."""
    found = {key: _switch(config, key, name) for key in ("norm_output", "norm_before_fc", "fc_norm")}
    on = [key for key, is_on in found.items() if is_on]
    if on and not eagle3:
        raise PairError(f"{name}: config.json has {on[0]}, but nothing else of EAGLE-3")
    if found["norm_before_fc"] and found["fc_norm"]:
        raise PairError(
            f"{name}: config.json has norm_before_fc and fc_norm; a head has one norm over all states, or one for each"
        )
    for key, prefix in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        stray = min((k for k in tensors if k.startswith(prefix)), default=None)
        if eagle3 and stray is not None and not found[key]:
            raise PairError(f"{name}: the checkpoint has a tensor {stray}, but config.json does not say {key}")
    return found


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Every tensor of a head's checkpoint, under the names used here: no ``model.`` before, ``layers.0.`` for ``midlayer.``."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise PairError(f"{name}: no weights at {folder} (model.safetensors or pytorch_model.bin is expected)")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            found = load_file(file) if file.suffix == ".safetensors" else torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # the border: safetensors, pickle and zip each have errors of their own
            raise PairError(f"{name}: cannot load {file}: {(str(error).splitlines() or [type(error).__name__])[0]}") from None
        for key, tensor in found.items():
            key = key.removeprefix("model.")
            tensors["layers.0." + key.removeprefix("midlayer.") if key.startswith("midlayer.") else key] = tensor
    return {
        k: t for k, t in tensors.items() if not k.startswith("verifier_") and not k.endswith("rotary_emb.inv_freq") and k != "t2d"
    }


class _Reader:
    """Takes tensors out of a checkpoint, each with the shape it must have. Raises PairError naming the first that does not fit."""

    def __init__(self, tensors: dict[str, Tensor], name: str) -> None:
        self.tensors, self.name = tensors, name

    def take(self, key: str, *shape: int) -> Tensor:
        tensor = self.tensors.pop(key, None)
        if tensor is None:
            raise PairError(f"{self.name}: the checkpoint has no tensor {key}")
        if tuple(tensor.shape) != shape:
            raise PairError(f"{self.name}: tensor {key} is {list(tensor.shape)}, not {list(shape)}, as config.json would have it")
        return tensor

    def linear(self, key: str, rows: int, columns: int, bias: bool) -> dict[str, Tensor]:
        out = {"weight": self.take(f"{key}.weight", rows, columns)}
        return out | {"bias": self.take(f"{key}.bias", rows)} if bias else out

    def joined(self, keys: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool, into: str) -> dict[str, Tensor]:
        """Several matrices over one input, stacked."""
        parts = [self.linear(k, r, columns, bias) for k, r in zip(keys, rows, strict=True)]
        return {f"{into}.{kind}": torch.cat([p[kind] for p in parts]) for kind in parts[0]}


def load_head(path: str, *, name: str, target: CausalModel, device: torch.device, dtype: torch.dtype) -> EagleHead:
    """Loads a published EAGLE-1, 2 or 3 checkpoint, a folder or a hub name, to draft for ``target``.

    Raises PairError, in one line, when it was made for another target (hidden size, vocabulary, layers) or is incomplete.
    """
    fingerprint = identity(path)
    folder = _folder(path, name)
    config = _flat(head_config(folder), name)
    tensors = _read_tensors(folder, name)
    reader = _Reader(tensors, name)
    eagle3 = _is_eagle3(config, tensors)
    for key in ("hidden_size", "intermediate_size", "num_attention_heads"):
        if not isinstance(config.get(key), int):
            raise PairError(f"{name}: {folder / 'config.json'} says no {key}")
    shape, taps = _shape(config, tensors, target, eagle3, name)
    token_ids = _token_ids(config, reader, target, shape, name)
    weights = _weights(reader, shape)
    embed = None
    if "embed_tokens.weight" in tensors:
        embed = nn.Embedding(target.vocab_size, shape.hidden, device=device, dtype=dtype).requires_grad_(False)
        embed.weight.copy_(reader.take("embed_tokens.weight", target.vocab_size, shape.hidden))
    elif shape.hidden != target.hidden_size:
        raise PairError(f"{name}: the checkpoint has no tensor embed_tokens.weight, and the target's has another width")
    if not eagle3:
        tensors.pop("lm_head.weight", None)  # a copy of the target's, in some
    if tensors:
        raise PairError(f"{name}: tensor {min(tensors)} of {path} is of a kind of head that is not known here")
    try:
        rotary = LlamaRotaryEmbedding(rope_config(config, shape.head_dim))
    except (KeyError, TypeError, ValueError) as error:
        raise PairError(f"{name}: rope settings of {folder / 'config.json'} are not understood: {error}") from None
    net = HeadNet(shape)
    net.load_state_dict(weights)
    net.requires_grad_(False)
    return EagleHead(
        net.to(device=device, dtype=dtype),
        target,
        name=name,
        fingerprint=fingerprint,
        taps=taps,
        rotary=rotary,
        token_ids=None if token_ids is None else token_ids.to(device),
        embed=embed,
    )


def _folder(path: str, name: str) -> Path:
    if is_local(path):
        return Path(path).expanduser()
    try:
        return Path(snapshot_download(path, allow_patterns=["config.json", "*.safetensors", "*.bin"]))
    except Exception as error:  # the border: the hub's client has errors of many kinds
        raise PairError(f"{name}: cannot load {path}: {(str(error).splitlines() or [type(error).__name__])[0]}") from None


def _is_eagle3(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    named = any("eagle3" in str(a).lower() for a in config.get("architectures") or ())
    named = named or config.get("speculators_model_type") == "eagle3"
    return named or "draft_vocab_size" in config or "eagle_config" in config or "layers.0.hidden_norm.weight" in tensors


def _shape(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: CausalModel, eagle3: bool, name: str
) -> tuple[HeadShape, tuple[int, ...]]:
    """The head's sizes and taps, checked against the target's."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    wanted = int(config.get("target_hidden_size") or (target.hidden_size if eagle3 else hidden))
    if wanted != target.hidden_size:
        raise PairError(f"{name}: the head reads hidden states of width {wanted}, the target's are {target.hidden_size} wide")
    taps = _taps(config, target.num_layers, eagle3)
    if eagle3 and not all(0 <= tap <= target.num_layers for tap in taps):
        raise PairError(f"{name}: the head reads hidden states {list(taps)}; the target has states 0 to {target.num_layers}")
    fused = len(taps) * target.hidden_size
    fc = tensors.get("fc.weight")
    if fc is None:
        raise PairError(f"{name}: the checkpoint has no tensor fc.weight")
    if eagle3 and fc.shape[-1] != fused:
        raise PairError(
            f"{name}: the head's fc takes {fc.shape[-1]} features, but {len(taps)} hidden states of the target have {fused}; "
            "it was trained for another target"
        )
    vocab = int(config.get("vocab_size") or target.vocab_size)
    if vocab != target.vocab_size:
        raise PairError(
            f"{name}: the head has a vocabulary of {vocab} tokens, the target one of {target.vocab_size}; "
            "a head must be trained for its target"
        )
    draft_vocab = int(config.get("draft_vocab_size") or vocab)
    if not 0 < draft_vocab <= vocab:
        raise PairError(f"{name}: draft_vocab_size {draft_vocab} exceeds the vocabulary of {vocab}")
    lm_head = tensors.get("lm_head.weight") if eagle3 else None
    if lm_head is not None and lm_head.shape[0] != draft_vocab:
        raise PairError(f"{name}: lm_head.weight has {lm_head.shape[0]} rows, draft_vocab_size is {draft_vocab}")
    if lm_head is None and (draft_vocab != vocab or hidden != target.hidden_size):
        raise PairError(f"{name}: the checkpoint has no tensor lm_head.weight, and the target's does not fit")
    norms = _norms(config, tensors, eagle3, name)
    qkv_bias = "layers.0.self_attn.q_proj.bias" in tensors or bool(config.get("qkv_bias")) or bool(config.get("attention_bias"))
    return HeadShape(
        eagle3=eagle3,
        hidden=hidden,
        fused=fused,
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        layers=max(int(config.get("num_hidden_layers") or 1), *(1 + i for i in _layer_indices(tensors))),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=norms["norm_output"],
        norm_before_fc=norms["norm_before_fc"],
        fc_norms=len(taps) if norms["fc_norm"] else 0,
        draft_vocab=None if lm_head is None else draft_vocab,
        # EAGLE-3's own code never gives fc a bias, whatever the flag says; what the checkpoint holds is what was trained.
        fc_bias="fc.bias" in tensors or (not eagle3 and config.get("bias") is True),
        qkv_bias=qkv_bias,
        o_bias="layers.0.self_attn.o_proj.bias" in tensors,
    ), taps


def _layer_indices(tensors: Mapping[str, Tensor]) -> set[int]:
    return {0, *(int(key.split(".")[1]) for key in tensors if key.startswith("layers.") and key.split(".")[1].isdigit())}


def _token_ids(config: Mapping[str, Any], reader: _Reader, target: CausalModel, shape: HeadShape, name: str) -> Tensor | None:
    """Target ids of the head's tokens, int64 [draft_vocab]; None where they are the same."""
    if shape.draft_vocab is None or (shape.draft_vocab == target.vocab_size and "d2t" not in reader.tensors):
        reader.tensors.pop("d2t", None)
        return None
    ids = torch.arange(shape.draft_vocab) + reader.take("d2t", shape.draft_vocab).long()
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(set(ids.tolist())) != len(ids):
        raise PairError(
            f"{name}: d2t does not map the head's {len(ids)} tokens to different ones of the target's {target.vocab_size}"
        )
    return None if torch.equal(ids, torch.arange(target.vocab_size)) else ids


def _weights(reader: _Reader, shape: HeadShape) -> dict[str, Tensor]:
    """The state of a :class:`HeadNet` from a checkpoint's tensors."""
    hidden, dim = shape.hidden, shape.head_dim
    width = shape.fused if shape.eagle3 else 2 * hidden
    out = {f"fc.{k}": t for k, t in reader.linear("fc", hidden, width, shape.fc_bias).items()}
    if shape.norm_before_fc:
        out["input_norm.weight"] = reader.take("input_norm.weight", shape.fused)
    for i in range(shape.fc_norms):
        out[f"fc_norm.{i}.weight"] = reader.take(f"fc_norm.{i}.weight", shape.fused // shape.fc_norms)
    for i in range(shape.layers):
        own = f"layers.{i}"
        wide = shape.eagle3 and i == 0
        attention, columns = f"{own}.self_attn", hidden * (2 if wide else 1)
        rows = (shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim)
        names = (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        out |= reader.joined(names, rows, columns, shape.qkv_bias, f"{own}.qkv")
        for key, tensor in reader.linear(f"{attention}.o_proj", hidden, shape.heads * dim, shape.o_bias).items():
            out[f"{own}.o_proj.{key}"] = tensor
        sizes = (shape.intermediate, shape.intermediate)
        out |= reader.joined((f"{own}.mlp.gate_proj", f"{own}.mlp.up_proj"), sizes, hidden, False, f"{own}.gate_up")
        out[f"{own}.down_proj.weight"] = reader.take(f"{own}.mlp.down_proj.weight", hidden, shape.intermediate)
        norms = ["post_attention_layernorm"]
        norms += ["input_layernorm"] if shape.eagle3 or i else []
        norms += ["hidden_norm"] if wide else []
        for norm in norms:
            out[f"{own}.{norm}.weight"] = reader.take(f"{own}.{norm}.weight", hidden)
    if shape.eagle3:
        out["norm.weight"] = reader.take("norm.weight", hidden)
    if shape.draft_vocab is not None:
        out["lm_head.weight"] = reader.take("lm_head.weight", shape.draft_vocab, hidden)
    return out

"""An EAGLE-3 head over whole texts, as training needs it.

As EAGLE-3 does, each batch is gone through several times: step 0 reads the target's hidden states,
step j the head's own outputs of step j - 1, and attends as drafting does, to the states of step 0
up to j tokens back and to one of each later step after that. The output matrix is the target's; the
layer begins as the target's last one, and `fc` as the highest of the three states.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

TAPS = 3
"""Hidden states of the target that the head reads."""


class Unrolled:
    """Attention of step j of several over one text: what a chain that began j tokens ago would see.

    Token u of step j sees the keys of step 0 up to u - j, then one key of each step i = 1 .. j,
    that of token u - j + i.
    """

    def __init__(self, heads: int, kv_heads: int, width: int, device: torch.device) -> None:
        self.groups, self.kv_heads = heads // kv_heads, kv_heads
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        at = torch.arange(width, device=device)
        self.age = at[:, None] - at[None]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``query`` [B, H, n, D], ``key`` and ``value`` [B, Hkv, n, D] of the next step -> [B, n,
        H, D]."""
        self.keys.append(key)
        self.values.append(value)
        step = len(self.keys) - 1
        batch, heads, width, dim = query.shape
        if step == 0:
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self.groups > 1
            )
            return out.transpose(1, 2)
        grouped = query.reshape(batch, self.kv_heads, self.groups, width, dim) / math.sqrt(dim)
        text = grouped @ self.keys[0][:, :, None].transpose(-1, -2)
        text = text.masked_fill(self.age < step, -torch.inf)
        # Before token `step` there is no such chain; zeros stand there, and what comes out is not
        # used.
        keys, values = (
            [F.pad(x, (0, 0, step - i, 0))[:, :, None, :width] for i, x in enumerate(late, 1)]
            for late in (self.keys[1:], self.values[1:])
        )
        scores = torch.cat([text, *((grouped * k).sum(-1, keepdim=True) for k in keys)], -1)
        law = scores.float().softmax(-1).to(value.dtype)
        out = law[..., :width] @ self.values[0][:, :, None]
        for i, v in enumerate(values):
            out = out + law[..., width + i : width + i + 1] * v
        return out.reshape(batch, heads, width, dim).transpose(1, 2)


class Attention(nn.Module):
    """Attention over inputs of ``width``, in EAGLE-3 cat(embedding, hidden), under the published
    names."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        queries = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Unrolled) -> Tensor:
        """``x`` [B, n, width], ``rotary`` cosines and sines [1, n, D]; ``attend`` remembers the
        steps before."""
        query, key, value = (
            project(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        out: Tensor = self.o_proj(attend(query, key, value).flatten(2))
        return out


class Layer(nn.Module):
    """The head's one layer: EAGLE-3's, as wide as the target's."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, embedded: Tensor, rotary: tuple[Tensor, Tensor], attend: Unrolled
    ) -> Tensor:
        """``hidden`` and ``embedded`` [B, n, H]."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(x, rotary, attend)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Head(nn.Module):
    """An EAGLE-3 head whose state is named as published checkpoints name it; the output matrix is
    the target's."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(TAPS * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


def taps(layers: int) -> tuple[int, int, int]:
    """The hidden states that the head reads, what a low, a middle and a high layer of the target
    read: EAGLE-3's rule where a configuration names none."""
    return 2, layers // 2, layers - 3


def unroll(
    layer: nn.Module,
    config: LlamaConfig,
    hidden: Tensor,
    embedded: Tensor,
    rotary: tuple[Tensor, Tensor],
    count: int,
) -> Iterator[Tensor]:
    """Outputs of steps 0 .. ``count`` - 1 of a layer over texts, each [B, n, H], as ``hidden``,
    which step 0 reads, and ``embedded``; row u of step j is of a chain for u >= j."""
    heads, width = (config.num_attention_heads, config.num_key_value_heads), hidden.shape[1]
    attend = Unrolled(*heads, width, hidden.device)
    for _ in range(count):
        out: Tensor = layer(hidden, embedded, rotary, attend)
        yield out
        hidden = F.pad(out, (0, 0, 1, 0))[:, :-1]


class Unroller:
    """The target and the head over whole texts: the target's law and, step by step, the head's."""

    def __init__(self, target: LlamaForCausalLM, head: Head) -> None:
        self.target, self.head = target, head
        self.taps = taps(target.config.num_hidden_layers)
        self.rotary = LlamaRotaryEmbedding(target.config).to(target.device)

    @torch.no_grad()
    def teacher(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of texts [B, T] the target's logits [B, T, V] and features [B, T, 3 H]."""
        out = self.target(ids, use_cache=False, output_hidden_states=True)
        return out.logits, torch.cat([out.hidden_states[tap] for tap in self.taps], -1)

    def steps(self, ids: Tensor, features: Tensor, count: int) -> Iterator[Tensor]:
        """Outputs of steps 0 .. ``count`` - 1, each [B, T - 1, H]: row u of step j predicts token u
        + 2, for u >= j."""
        embedded = self.target.get_input_embeddings()(ids[:, 1:])
        rotary = self.rotary(embedded, torch.arange(1, ids.shape[1], device=ids.device)[None])
        hidden = self.head.fc(features[:, :-1])
        return unroll(self.head.midlayer, self.target.config, hidden, embedded, rotary, count)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's logits."""
        out: Tensor = self.target.get_output_embeddings()(self.head.norm(hidden))
        return out


@torch.no_grad()
def begin_as_target(head: Head, target: LlamaForCausalLM) -> None:
    """Starts the head from the target's last layer and norm; the embedding's half of the attention
    from little."""
    hidden, last, layer = target.config.hidden_size, target.model.layers[-1], head.midlayer
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -hidden:] += torch.eye(hidden, device=target.device)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight[:, :hidden] *= 0.1
        weight[:, hidden:] = getattr(last.self_attn, name).weight
    layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    layer.mlp.load_state_dict(last.mlp.state_dict())
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(target.model.norm.weight)


def publish(
    head: nn.Module,
    config: LlamaConfig,
    out: Path,
    *,
    states: Sequence[int] = (),
    d2t: Tensor | None = None,
    fc_norm: bool = False,
) -> None:
    """Writes an EAGLE-3 checkpoint in fp16 of a head on a target of this configuration: the hidden
    ``states`` that it reads (default: :func:`taps`), each under a norm with ``fc_norm``; ``d2t``:
    of each row of its own output matrix the target's id minus the row."""
    target = config.to_dict()
    shared = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "hidden_act", "rms_norm_eps", "max_position_embeddings",
        "attention_bias", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    document = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: target[key] for key in shared},
        "target_hidden_size": target["hidden_size"],
        "draft_vocab_size": target["vocab_size"] if d2t is None else len(d2t),
        "num_hidden_layers": 1,
        "rope_theta": target["rope_parameters"]["rope_theta"],
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(states or taps(target["num_hidden_layers"])),
            **({"fc_norm": True} if fc_norm else {}),
        },
        "dtype": "float16",
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    tensors = {key: x.detach().cpu().half().contiguous() for key, x in head.state_dict().items()}
    if d2t is not None:
        tensors["d2t"] = d2t
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

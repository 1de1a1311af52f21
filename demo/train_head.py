"""Trains an EAGLE-3 head for the demo target, and measures what it foresees.

    python -m demo.train_head --gsm8k gsm8k_train.jsonl --out demo/pair/head

The head learns the fixed target's law (KL divergence) on batches that are half corpus, half text
the target wrote itself, as the second stage of `demo.train` does. As EAGLE-3 does, each batch is
gone through several times: step 0 reads the target's hidden states, step j the head's own outputs
of step j - 1, and attends as drafting does, to the states of step 0 up to j tokens back and to one
of each later step after that. The output matrix is the target's; the layer begins as the target's
last one, and `fc` as the highest of the three states.

The folder is an ordinary EAGLE-3 checkpoint in fp16. `--measure` only measures one. On a CPU with
glibc see `demo.train` for two settings that make it faster.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from spectune.demo.corpus import corpus
from spectune.demo.prompts import CATEGORIES, demo_workload
from spectune.demo.train import (
    GSM8K,
    Windows,
    adamw,
    counted,
    mixed_batch,
    own_text,
    parser_of,
    settings,
    stable_then_decay,
    update,
    write_json,
)

TAPS = 3
"""Hidden states of the target that the head reads."""
DEPTHS = 5
"""Length of the chains that are measured."""
DECAY = 0.8
"""Weight of each step's loss against the step before it, EAGLE-3's."""


class Unrolled:
    """Attention of step j of several over one text: what a chain that began j tokens ago would see.

    Token u of step j sees the keys of step 0 up to u - j, then one key of each step i = 1 .. j,
    that of token u - j + i.
    """

    def __init__(self, heads: int, kv_heads: int, width: int) -> None:
        self.groups, self.kv_heads = heads // kv_heads, kv_heads
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.age = torch.arange(width)[:, None] - torch.arange(width)[None]

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
    """Attention over cat(embedding, hidden), under the published names."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        queries = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Unrolled) -> Tensor:
        """``x`` [B, n, 2 H], ``rotary`` cosines and sines [1, n, D]; ``attend`` remembers the steps
        before."""
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
        self.self_attn = Attention(config)
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


class Unroller:
    """The target and the head over whole texts: the target's law and, step by step, the head's."""

    def __init__(self, target: LlamaForCausalLM, head: Head) -> None:
        self.target, self.head = target, head
        layers = target.config.num_hidden_layers
        # EAGLE-3's rule where a configuration says nothing: what a low, a middle and a high layer
        # read.
        self.taps = (2, layers // 2, layers - 3)
        self.rotary = LlamaRotaryEmbedding(target.config)

    @torch.no_grad()
    def teacher(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of texts [B, T] the target's logits [B, T, V] and features [B, T, 3 H]."""
        out = self.target(ids, use_cache=False, output_hidden_states=True)
        return out.logits, torch.cat([out.hidden_states[tap] for tap in self.taps], -1)

    def steps(self, ids: Tensor, features: Tensor, count: int) -> Iterator[Tensor]:
        """Outputs of steps 0 .. ``count`` - 1, each [B, T - 1, H]: row u of step j predicts token u
        + 2, for u >= j."""
        config, width = self.target.config, ids.shape[1] - 1
        embedded = self.target.get_input_embeddings()(ids[:, 1:])
        rotary = self.rotary(embedded, torch.arange(1, width + 1)[None])
        attend = Unrolled(config.num_attention_heads, config.num_key_value_heads, width)
        hidden = self.head.fc(features[:, :-1])
        for _ in range(count):
            out = self.head.midlayer(hidden, embedded, rotary, attend)
            yield out
            hidden = F.pad(out, (0, 0, 1, 0))[:, :-1]

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's logits, float32."""
        out: Tensor = self.target.get_output_embeddings()(self.head.norm(hidden)).float()
        return out


@torch.no_grad()
def begin_as_target(head: Head, target: LlamaForCausalLM) -> None:
    """Starts the head from the target's last layer and norm; the embedding's half of the attention
    from little."""
    hidden, last, layer = target.config.hidden_size, target.model.layers[-1], head.midlayer
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight[:, :hidden] *= 0.1
        weight[:, hidden:] = getattr(last.self_attn, name).weight
    layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    layer.mlp.load_state_dict(last.mlp.state_dict())
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(target.model.norm.weight)


def load(folder: Path) -> Any:
    """A checkpoint, in fp32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def train(args: argparse.Namespace, console: Console) -> tuple[Head, dict[str, Any]]:
    """The trained head and a record of how it went."""
    args.work.mkdir(parents=True, exist_ok=True)
    target = load(args.target).requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.target)
    windows = Windows(corpus(args.gsm8k)[0], tokenizer, args.seed)
    path = args.work / f"own_text-{args.seed}-{args.own_rows}-{args.length}.pt"
    own = own_text(target, windows, args, args.length, path, console)
    torch.manual_seed(args.seed)
    head = Head(target.config)
    begin_as_target(head, target)
    unroller = Unroller(target, head)
    optimizer = adamw(head, args.learning_rate, 0.05)
    history: list[dict[str, Any]] = []
    weights = [DECAY**j for j in range(args.unroll)]
    began = time.perf_counter()
    for index in counted(0, args.steps, console):
        ids = mixed_batch(own, windows, index, args.rows, args.seed)
        losses, hits = [], []
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            teacher, features = unroller.teacher(ids)
            law = teacher[:, 1:].float().softmax(-1)
            choice = teacher[:, 1:].argmax(-1)
            for j, hidden in enumerate(unroller.steps(ids, features.float(), args.unroll)):
                logits = unroller.logits(hidden[:, j:]).flatten(0, 1)
                losses.append(F.cross_entropy(logits, law[:, j:].flatten(0, 1)))
                right = logits.detach().argmax(-1) == choice[:, j:].flatten()
                hits.append(right.float().mean().item())
        loss = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
        assert isinstance(loss, Tensor)
        torch.autograd.backward(loss)
        factor = stable_then_decay(index, args.steps, 30, args.steps * 2 // 5)
        update(head, optimizer, args.learning_rate * factor)
        if (index + 1) % args.log_every == 0:
            shown = {"loss": round(loss.item(), 4), "top1": [round(h, 4) for h in hits]}
            history.append({"step": index + 1, **shown})
            pace = (time.perf_counter() - began) / (index + 1)
            console.print(
                f"step {index + 1}/{args.steps} loss {loss.item():.3f} top-1 {hits} "
                f"{pace:.2f} s/step"
            )
        if (index + 1) % args.save_every == 0:
            publish(head, args, {"step": index + 1})
    return head, {
        "step": args.steps,
        "settings": settings(args, "target", "measure", "prompts"),
        "parameters": sum(p.numel() for p in head.parameters()),
        "history": history,
    }


def publish(head: Head, args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Writes an EAGLE-3 checkpoint in fp16 and the training's record."""
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    target = json.loads((args.target / "config.json").read_text())
    kept = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "hidden_act", "rms_norm_eps", "max_position_embeddings",
        "attention_bias", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: target[key] for key in kept},
        "target_hidden_size": target["hidden_size"],
        "draft_vocab_size": target["vocab_size"],
        "num_hidden_layers": 1,
        "rope_theta": target["rope_parameters"]["rope_theta"],
        "tie_word_embeddings": False,
        "dtype": "float16",
    }
    write_json(out / "config.json", config)
    tensors = {key: tensor.half().contiguous() for key, tensor in head.state_dict().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    # Written readable by its owner alone, which an installed package must not be.
    (out / "model.safetensors").chmod(0o644)
    write_json(out / "training.json", record)


def posterior_gumbel(
    log_distribution: Tensor, choice: Tensor, generator: torch.Generator
) -> Tensor:
    """Gumbel noise [n, vocab] under which `choice` [n] is the argmax of `log_distribution` [n,
    vocab] + noise.

    Drawn from the noise's law given that choice, so text sampled by any means can be replayed as if
    it had been sampled with the noise (Maddison, Tarlow and Minka 2014, top-down construction).
    """
    uniform = torch.rand(log_distribution.shape, generator=generator).clamp_min(1e-12)
    free = log_distribution - (-uniform.log()).log()
    top = -(-torch.rand(len(choice), 1, generator=generator).clamp_min(1e-12).log()).log()
    # Every other value is a Gumbel truncated below the top, whose law does not depend on where it
    # was reached.
    below = -torch.logaddexp(-top, -free)
    return below.scatter(1, choice[:, None], top) - log_distribution


@torch.no_grad()
def measure(
    pair: Path, folder: Path, per_category: int, max_new_tokens: int = 128, seed: int = 0
) -> dict[str, dict[str, dict[str, Any]]]:
    """What the head and the pair's drafts foresee of texts the target wrote from the demo's
    prompts, by draft, category and kind.

    ``depth``: of chains right so far, the share right at depths 1 .. 5 (a chain behind the text
    reads the head's own outputs); ``accepted``: tokens of a chain of 5 that the target keeps, on
    average over all starts. Greedy, and at temperature 1 coupled.
    """
    spec = json.loads((pair / "pair.json").read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair / spec["target"])
    target = load(pair / spec["target"])
    others = {
        name: load(pair / path) for name, path in spec["drafts"].items() if name != folder.name
    }
    head = Head(target.config)
    head.load_state_dict(load_file(folder / "model.safetensors"))
    unroller = Unroller(target, head)
    torch.manual_seed(seed)
    noise = torch.Generator().manual_seed(seed)
    chains: dict[tuple[str, str, str], list[Tensor]] = defaultdict(list)
    for category in CATEGORIES:
        prompts = [p["turns"][0] for p in demo_workload() if p["category"] == category]
        for text in prompts[:per_category]:
            prompt = torch.tensor([tokenizer(text)["input_ids"]])
            for kind in ("greedy", "coupled at T=1"):
                sampling: dict[str, Any] = {"do_sample": False}
                if kind != "greedy":
                    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
                ids = target.generate(prompt, max_new_tokens=max_new_tokens, **sampling)
                first = prompt.shape[1]
                logits, features = unroller.teacher(ids)
                written = ids[0, first:]
                gumbel = torch.zeros(())
                if kind != "greedy":
                    law = logits[0, first - 1 : -1].log_softmax(-1)
                    gumbel = posterior_gumbel(law, written, noise)
                for name, other in others.items():
                    law = other(ids).logits[0, first - 1 : -1].log_softmax(-1)
                    hit = (law + gumbel).argmax(-1) == written
                    chains[name, category, kind].append(_chains([hit] * DEPTHS))
                hits = []
                for hidden in unroller.steps(ids, features, DEPTHS):
                    law = unroller.logits(hidden[0, first - 2 : -1]).log_softmax(-1)
                    hits.append((law + gumbel).argmax(-1) == written)
                chains[folder.name, category, kind].append(_chains(hits))
    measured: dict[str, dict[str, dict[str, Any]]] = {}
    for (name, category, kind), found in chains.items():
        right = torch.cat(found).float()
        counts = right.sum(0).tolist()
        depth = [round(b / max(1.0, a), 4) for a, b in pairwise([float(len(right)), *counts])]
        row = {"depth": depth, "accepted": round(sum(counts) / max(1, len(right)), 3)}
        measured.setdefault(name, {}).setdefault(category, {})[kind] = row
    return measured


def _chains(hits: list[Tensor]) -> Tensor:
    """Which of ``hits`` (step j's, by text position) a chain from each start gets right before its
    first error: [starts, depths]."""
    starts = max(0, len(hits[0]) - len(hits) + 1)
    right = torch.stack([hit[j : j + starts] for j, hit in enumerate(hits)], 1)
    return right.long().cumprod(1)


PAIR = Path(__file__).parent / "pair"
OPTIONS: dict[str, tuple[Any, str]] = {
    "target": (PAIR / "target", "the target's checkpoint"),
    "out": (PAIR / "head", "where the head is published"),
    "work": (Path("build/demo-head"), "where the target's own text is kept"),
    "threads": (1, "torch threads"),
    "seed": (1, ""),
    "steps": (800, ""),
    "unroll": (4, "steps over its own output that each batch is gone through"),
    "rows": (8, "texts in a batch, half of them the target's own"),
    "length": (384, "tokens of a text"),
    "own-rows": (768, "texts that the target writes"),
    "own-chunk": (96, "texts it writes at once"),
    "learning-rate": (2e-3, ""),
    "log-every": (10, ""),
    "save-every": (100, ""),
    "prompts": (20, "prompts a category that the head is measured on"),
}


def main() -> None:
    """Parses the command line, trains, measures."""
    parser = parser_of("train_head", __doc__, OPTIONS)
    add = parser.add_argument
    add("--gsm8k", type=Path, help=GSM8K)
    add("--bf16", action=argparse.BooleanOptionalAction, default=True, help="bf16 autocast")
    add("--measure", action="store_true", help="only measure the head at --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console(soft_wrap=True)
    if args.measure:
        record = json.loads((args.out / "training.json").read_text())
    else:
        if args.gsm8k is None:
            raise SystemExit("--gsm8k is needed to train")
        head, record = train(args, console)
        publish(head, args, record)
    record["agreement"] = measure(args.target.parent, args.out, args.prompts)
    write_json(args.out / "training.json", record)
    console.print_json(json.dumps(record["agreement"]))


if __name__ == "__main__":
    main()

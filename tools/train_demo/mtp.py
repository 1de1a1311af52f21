"""Trains an MTP layer on the demo target, for vLLM: in the layout of MiMo, whose target is a Qwen2.

    PYTHONPATH=tools python -m train_demo.mtp --out build/mtp [--gsm8k gsm8k_train.jsonl]

The target goes on from text of the standard library (and of GSM8K); the layer learns its law there
and over several steps of its own output, as the EAGLE-3 head does (`head.py`). At a position it
reads the target's last hidden state and the embedding of the token that follows, and predicts the
one after. vLLM serves what is written with ``--speculative-config '{"method": "mtp", ...}'``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from spectune.demo.corpus import CATEGORIES, code_documents, is_held_out, prose_documents
from spectune.runtime.pair import read_pair
from train_demo.batches import Windows, encode
from train_demo.corpus import math_documents
from train_demo.head import Attention, Unrolled, unroll
from train_demo.train import adamw, generate, stable_then_decay, unrolled_loss

ROWS, LENGTH = 256, 256
"""Texts that the target writes, and tokens of each."""
STEPS, BATCH = 300, 8
"""Of the training, and texts of each."""
LEARNING_RATE = 2e-3
UNROLL = 2
"""Steps over its own output that each batch is gone through."""


class MtpLayer(nn.Module):
    """MiMo's layer; its state is named as published checkpoints name it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_layernorm = LlamaRMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.self_attn = Attention(config, width)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.mlp = LlamaMLP(config)
        self.final_layernorm = LlamaRMSNorm(width, eps)

    def forward(
        self, hidden: Tensor, embedded: Tensor, rotary: tuple[Tensor, Tensor], attend: Unrolled
    ) -> Tensor:
        """``hidden`` and ``embedded`` [B, n, H]; what it returns is what the next step reads."""
        parts = self.hidden_layernorm(hidden), self.token_layernorm(embedded)
        x = self.input_proj(torch.cat(parts, -1))
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        x = x + self.mlp(self.post_attention_layernorm(x))
        out: Tensor = self.final_layernorm(x)
        return out


class Teacher:
    """The target, whose last hidden states MiMo's layer reads as they are before its norm."""

    def __init__(self, path: str) -> None:
        self.target = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.target.requires_grad_(False).eval()
        self.config = self.target.config
        self.norm = self.target.model.norm
        self.rotary = LlamaRotaryEmbedding(self.config)

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        """The last hidden states [B, T, H] of texts [B, T]."""
        self.target.model.norm = nn.Identity()
        try:
            out: Tensor = self.target.model(ids, use_cache=False).last_hidden_state
        finally:
            self.target.model.norm = self.norm
        return out

    def unroll(self, layer: MtpLayer, ids: Tensor, hidden: Tensor, count: int) -> Iterator[Tensor]:
        """Outputs of a layer's steps over texts [B, T] and their last hidden states [B, T, H], each
        [B, T - 1, H]: row u of step j predicts token u + 2, for u >= j."""
        embedded = self.target.get_input_embeddings()(ids[:, 1:])
        embedded[:, 0] = 0.0  # as vLLM has it
        rotary = self.rotary(embedded, torch.arange(ids.shape[1] - 1)[None])
        return unroll(layer, self.config, hidden[:, :-1], embedded, rotary, count)

    def logits(self, normed: Tensor) -> Tensor:
        """The output matrix's logits [..., V], which the layer shares."""
        out: Tensor = self.target.get_output_embeddings()(normed)
        return out


@torch.no_grad()
def begin_as_target(layer: MtpLayer, target: LlamaForCausalLM, size: float) -> None:
    """Starts the layer from the target's last layer and norm, and from little of the embedding.
    ``size``: of the target's last hidden states, which the layer's norm brings to 1."""
    hidden, last = target.config.hidden_size, target.model.layers[-1]
    layer.hidden_layernorm.weight.fill_(size)
    layer.input_proj.weight.mul_(0.1)
    layer.input_proj.weight[:, :hidden] += torch.eye(hidden)
    for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
        getattr(layer, name).load_state_dict(getattr(last, name).state_dict())
    layer.final_layernorm.load_state_dict(target.model.norm.state_dict())


def train(teacher: Teacher, texts: Tensor, steps: int) -> MtpLayer:
    """An MTP layer trained on texts [rows, T] of the target, in batches of :data:`BATCH`."""
    torch.manual_seed(1)
    layer = MtpLayer(teacher.config)
    size = teacher.hidden(texts[:BATCH].long()).square().mean().sqrt().item()
    begin_as_target(layer, teacher.target, size)
    optimizer, began = adamw(layer, LEARNING_RATE, 0.1), time.monotonic()
    for step in range(steps):
        ids = texts[torch.randint(len(texts), (BATCH,))].long()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = teacher.hidden(ids).float()
            law = teacher.logits(teacher.norm(hidden[:, 1:]))
            outputs = teacher.unroll(layer, ids, hidden, UNROLL)
            loss, agreement = unrolled_loss(outputs, teacher.logits, law)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * stable_then_decay(step / steps, 0.4)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == steps - 1:
            figures = {key: round(value.item(), 3) for key, value in agreement.items()}
            print(f"{step} {figures} {time.monotonic() - began:.0f} s", flush=True)
    return layer


def read_windows(tokenizer: PreTrainedTokenizerFast, gsm8k: Path | None) -> Windows:
    """Windows over text that is not held out, of the standard library and of GSM8K."""
    math = [] if gsm8k is None else math_documents(gsm8k)
    documents = [
        *code_documents(False),
        *prose_documents(False),
        *(document for document in math if not is_held_out(document.key)),
    ]
    counts = [sum(d.category == category for d in documents) for category in CATEGORIES]
    return Windows(encode(tokenizer, documents), counts, seed=1)


def write_texts(teacher: Teacher, windows: Windows, rows: int) -> Tensor:
    """Texts that the target writes from windows' beginnings, three in four of them greedy, the rest
    at temperatures up to 1: int16 [rows, LENGTH]."""
    generator = torch.Generator().manual_seed(1)
    temperatures = torch.rand(rows, generator=generator)
    temperatures[rows // 4 :] = 0.0
    prefixes = windows.prefixes(rows, LENGTH // 8, generator)
    written = generate(teacher.target, prefixes, LENGTH, temperatures, generator)
    return written.to(torch.int16)


def publish(layer: MtpLayer, teacher: Teacher, out: Path) -> None:
    """Writes target and layer as one MiMo checkpoint in fp16. Its target is a Qwen2, whose
    attention has biases: zeros."""
    out.mkdir(parents=True, exist_ok=True)
    target = dict(teacher.target.state_dict())
    target.pop("lm_head.weight")  # the embedding's
    tensors = {**target, **{f"model.mtp_layers.0.{k}": v for k, v in layer.state_dict().items()}}
    tensors |= {
        name.replace(".weight", ".bias"): torch.zeros(len(weight))
        for name, weight in tensors.items()
        if name.endswith(tuple(f"{part}_proj.weight" for part in "qkv"))
    }
    half = {name: x.detach().half().contiguous() for name, x in tensors.items()}
    save_file(half, out / "model.safetensors", metadata={"format": "pt"})
    document = teacher.config.to_dict() | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    }
    for key in ("attention_bias", "mlp_bias", "pretraining_tp"):
        document.pop(key)
    (out / "config.json").write_text(json.dumps(document, indent=2) + "\n")


def checkpoint(out: Path, steps: int = STEPS, rows: int = ROWS, gsm8k: Path | None = None) -> Path:
    """The folder ``out`` with a checkpoint of :func:`publish`, trained unless it is there."""
    if (out / "config.json").exists():
        return out
    path = read_pair("demo").target
    teacher, tokenizer = Teacher(path), PreTrainedTokenizerFast.from_pretrained(path)
    texts = write_texts(teacher, read_windows(tokenizer, gsm8k), rows)
    layer = train(teacher, texts, steps)
    tokenizer.save_pretrained(out)
    publish(layer, teacher, out)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(
        prog="PYTHONPATH=tools python -m train_demo.mtp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="where the checkpoint is written")
    add("--gsm8k", type=Path, help="GSM8K's training split: JSON lines with question and answer")
    add("--steps", type=int, default=STEPS)
    args = parser.parse_args(arguments)
    checkpoint(args.out, args.steps, gsm8k=args.gsm8k)


if __name__ == "__main__":
    main()

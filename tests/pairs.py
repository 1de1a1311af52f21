"""Tiny real checkpoints for tests: seeded transformers models with a byte-level tokenizer, saved as
ordinary folders; and documents of policies for them.

A draft is its target with noise on every weight: the more noise, the less it agrees.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

TEXT = [
    "def add(a, b):\n    return a + b\n",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "Question: Ann has 3 apples and buys 4 more. How many apples?\nAnswer: 7",
    "for i in range(10):\n    print(i)\n",
]


WINDOW = 8
"""Positions that a sliding layer of the tiny models sees."""
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "gpt2": (GPT2LMHeadModel, {}),
    "gemma3": (
        Gemma3ForCausalLM,
        {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": WINDOW},
    ),
    "mistral": (MistralForCausalLM, {"sliding_window": WINDOW}),
}
"""Architectures, and what is their own. Of Gemma's layers the last sees all, of Mistral's none."""


def tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE with ``<eos>`` as token 0."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<eos>")


def tiny_model(
    kind: str,
    vocab_size: int,
    *,
    hidden: int = 48,
    layers: int = 2,
    positions: int = 512,
    seed: int = 0,
) -> Any:
    """A random model of a real architecture whose law is neither flat nor certain."""
    torch.manual_seed(seed)
    make, own = KINDS[kind]
    if kind != "gpt2":
        own = {"num_key_value_heads": 2, "intermediate_size": 2 * hidden, **own}
    if kind == "gemma3":
        own["layer_types"] = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    config = make.config_class(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **own,
    )
    model: Any = make(config).eval()
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        if head is not model.get_input_embeddings().weight:
            head.mul_(12.0)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and ("layers" in name or "h." in name):
                parameter.mul_(4.0)
        if kind in ("gpt2", "gemma3"):  # one matrix is embeddings and head
            model.get_input_embeddings().weight.mul_(8.0)
    return model


def perturbed(model: Any, noise: float, seed: int) -> Any:
    """A copy whose weights carry relative Gaussian noise."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.add_(drawn * parameter.std().nan_to_num(0.0) * noise)
    return other


def make_pair(
    folder: Path, kind: str = "llama", *, vocab_size: int = 300, seed: int = 0, positions: int = 512
) -> Path:
    """Writes target and drafts ``near`` and ``far`` as checkpoints and a pair file; returns the
    file."""
    words = tokenizer(vocab_size)
    vocab = len(words)
    target = tiny_model(kind, vocab, seed=seed, positions=positions)
    near, far = perturbed(target, 0.06, seed + 1), perturbed(target, 0.2, seed + 2)
    for name, model in (("target", target), ("near", near), ("far", far)):
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    document = {
        "name": f"tiny-{kind}",
        "target": "target",
        "drafts": {n: n for n in ("near", "far")},
    }
    (folder / "pair.json").write_text(json.dumps(document))
    return folder / "pair.json"


def fixed(gamma: int) -> dict[str, Any]:
    """A window of ``gamma`` tokens."""
    return {"kind": "fixed", "gamma": gamma}


def chain(draft: str, gamma: int, **more: Any) -> dict[str, Any]:
    """A policy that drafts ``gamma`` tokens."""
    return {"draft": draft, "window": fixed(gamma), **more}


def top_k(draft: str, width: int, gamma: int, top_n: int, **more: Any) -> dict[str, Any]:
    """A policy that drafts EAGLE-2's trees."""
    growth = {"kind": "top_k", "width": width}
    return chain(draft, gamma, growth=growth, select={"top_n": top_n}, **more)

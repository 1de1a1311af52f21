"""The pairs that can be trained: their sizes, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig, LlamaForCausalLM

MAX_POSITIONS = 2048


@dataclass(frozen=True)
class Shape:
    """A Llama's size, and the peak learning rate that suits it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    learning_rate: float


@dataclass(frozen=True)
class Recipe:
    """A pair's models and how they are trained."""

    vocab: int
    # One head size for all models, a power of two, suits every attention kernel.
    head_dim: int
    models: dict[str, Shape]
    steps: dict[str, int]
    batch_tokens: int
    own_rows: int
    """Rows of its own text that the target writes, and how many at once."""
    own_chunk: int
    seq_len: int = 256


RECIPES = {
    "demo": Recipe(
        vocab=4096,
        head_dim=32,
        models={
            "target": Shape(256, 8, 8, 4, 704, 2e-3),
            "small": Shape(96, 2, 3, 3, 256, 5e-3),
            "medium": Shape(160, 4, 5, 5, 448, 3e-3),
        },
        steps={"target": 2000, "drafts": 1500, "head": 800},
        batch_tokens=4096,
        own_rows=1536,
        own_chunk=192,
    ),
    "wide": Recipe(
        vocab=16384,
        head_dim=32,
        models={
            "target": Shape(192, 6, 6, 3, 512, 3e-3),
            "small": Shape(64, 2, 2, 2, 176, 5e-3),
            "medium": Shape(128, 3, 4, 4, 352, 3e-3),
        },
        steps={"target": 1000, "drafts": 700, "head": 400},
        batch_tokens=4096,
        own_rows=768,
        own_chunk=192,
    ),
    "large": Recipe(
        vocab=16384,
        head_dim=64,
        models={
            "target": Shape(512, 12, 8, 4, 1408, 2e-3),
            "small": Shape(128, 2, 2, 2, 352, 5e-3),
            "medium": Shape(256, 4, 4, 4, 704, 3e-3),
        },
        steps={"target": 3000, "drafts": 1500, "head": 800},
        batch_tokens=49152,
        own_rows=12288,
        own_chunk=2048,
    ),
    "tiny": Recipe(
        vocab=512,
        head_dim=16,
        models={
            "target": Shape(64, 6, 4, 2, 176, 5e-3),
            "small": Shape(32, 1, 2, 2, 96, 5e-3),
            "medium": Shape(32, 2, 2, 2, 96, 5e-3),
        },
        steps={"target": 60, "drafts": 40, "head": 30},
        batch_tokens=1024,
        own_rows=24,
        own_chunk=12,
        seq_len=64,
    ),
}
"""By ``--shape``: the one that ships; 16,384 tokens in use for two CPU cores; the same with a
target of 44 M for one GPU; one for trying the command."""


def build_model(shape: Shape, vocab: int, head_dim: int) -> LlamaForCausalLM:
    """A freshly initialised Llama with tied embeddings, in fp32."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)

"""Checkpoints as GGUF files: the form in which llama.cpp and OpenVINO GenAI take them.

Weights are written in float32, so that an engine's arithmetic is as close to the native decoder's
as its kernels allow; in float16 for an engine that takes no other. Vectors (norms, biases) are
float32 always.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from spectune.runtime.file_hashes import cache_folder
from spectune.runtime.pair import checkpoint, identity, is_head, model_config
from spectune.traces.errors import EngineError, PairError
from spectune.traces.files import read_json

VERSION = 1
"""Of what is written here: raised when files of before must not be used again."""
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""What can be converted, and what GGUF calls it."""


Weights = Literal["float32", "float16"]


def gguf_file(path: str, weights: Weights = "float32") -> Path:
    """A checkpoint's GGUF file in the user's cache folder, made where it is not there yet; equal
    content, equal file.

    Raises EngineError, in one line that names the checkpoint, for what cannot be converted,
    PairError where none is.
    """
    folder = folder_of(path)
    made = kept("gguf") / f"{identity(path)}-{weights}-{VERSION}.gguf"
    if not made.is_file():
        handle, name = tempfile.mkstemp(prefix=made.stem, suffix=".part", dir=made.parent)
        os.close(handle)
        try:
            convert(folder, Path(name), weights)
            os.replace(name, made)
        finally:
            Path(name).unlink(missing_ok=True)
    return made


def kept(name: str) -> Path:
    """The folder of that name in the user's cache. Raises EngineError where it cannot be made."""
    base = cache_folder()
    try:
        if base is None:
            raise EngineError(
                "converted models have no place to be kept: there is no home folder; set "
                "XDG_CACHE_HOME"
            )
        (base / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(
            f"{base}: converted models cannot be kept there ({error.strerror}); set XDG_CACHE_HOME"
        ) from None
    return base / name


def folder_of(path: str) -> Path:
    """The folder of a checkpoint that an engine is to load. Raises EngineError for a hub name and
    for an EAGLE head."""
    folder = checkpoint(path)
    if folder is None:
        raise EngineError(
            f"{path}: an engine reads a checkpoint from a folder; fetch it (`hf download {path}`) "
            "and name that"
        )
    if is_head(path):
        raise EngineError(
            f"{path}: an EAGLE head has no form that this engine loads; name a draft that is a "
            "language model"
        )
    return folder


def convert(folder: Path, out: Path, weights: Weights = "float32") -> None:
    """Writes a checkpoint as GGUF. Raises EngineError for what it cannot hold as it is."""
    try:
        import gguf
    except ImportError:
        raise EngineError(
            "gguf, which converts checkpoints for this engine, is not installed here; `pip install "
            "gguf` installs it"
        ) from None
    config = model_config(folder)
    kind = _kind(folder, config)
    writer = gguf.GGUFWriter(out, kind, use_temp_file=True)
    try:
        _write_config(writer, config)
        types = gguf.LlamaFileType
        writer.add_file_type(types.ALL_F32 if weights == "float32" else types.MOSTLY_F16)
        _write_tokenizer(writer, folder, int(config["vocab_size"]))
        names = gguf.get_tensor_name_map(
            getattr(gguf.MODEL_ARCH, kind.upper()), int(config["num_hidden_layers"])
        )
        for name, weight in _weights(folder):
            if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            known = names.get_name(name, (".weight", ".bias"))
            if known is None:
                raise EngineError(
                    f"{folder}: cannot be converted to GGUF: {kind} models have no weight "
                    f"{name!r} there"
                )
            arranged = _arranged(name, weight, config) if kind == "llama" else weight
            writer.add_tensor(known, arranged.astype(weights) if arranged.ndim > 1 else arranged)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _kind(folder: Path, config: Mapping[str, Any]) -> str:
    """GGUF's name of the architecture. Raises EngineError for one, or a variety of one, that is not
    converted."""
    said = (config.get("architectures") or ["none"])[0]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default"))
    trouble = None
    if said not in ARCHITECTURES:
        trouble = f"its architecture is {said}, and known are {', '.join(ARCHITECTURES)}"
    elif scaled != "default":
        trouble = f"its rotary positions are scaled ({scaled})"
    elif config.get("hidden_act", "silu") != "silu":
        trouble = f"its activation is {config['hidden_act']}, not silu"
    elif config.get("use_sliding_window"):
        trouble = "its attention has a sliding window"
    elif said == "LlamaForCausalLM" and (config.get("attention_bias") or config.get("mlp_bias")):
        trouble = "its projections have biases"
    if trouble is not None:
        raise EngineError(f"{folder}: cannot be converted to GGUF: {trouble}")
    return ARCHITECTURES[said]


def _write_config(writer: Any, config: Mapping[str, Any]) -> None:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    size = int(config.get("head_dim") or hidden // heads)
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(hidden)
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_vocab_size(int(config["vocab_size"]))
    for name, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
    ):
        token = config.get(name)
        if token is not None:
            add(int(token[0] if isinstance(token, list) else token))
    writer.add_add_bos_token(False)


def _write_tokenizer(writer: Any, folder: Path, size: int) -> None:
    """The vocabulary. Requests come as token ids, so how an engine would cut a text is never asked
    of it."""
    import gguf

    file = folder / "tokenizer.json"
    found = read_json(file, str(file), PairError)
    model = found.get("model", {})
    if model.get("type") != "BPE":
        raise EngineError(
            f"{file}: cannot be converted to GGUF: its tokenizer is of type {model.get('type')}, "
            "not BPE"
        )
    tokens = [f"<unused{i}>" for i in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    for token, i in model["vocab"].items():
        if i < size:  # others were added without an embedding
            tokens[i], types[i] = token, gguf.TokenType.NORMAL
    for added in found.get("added_tokens", ()):
        if added["id"] < size:
            tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    )


def _weights(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every weight by name, as float32 arrays."""
    import torch
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(
            f"{folder}: cannot be converted to GGUF: it has no weights in safetensors; save it in "
            "that form"
        )
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name).to(torch.float32).numpy()


def _arranged(name: str, weight: Any, config: Mapping[str, Any]) -> Any:
    """Queries and keys as GGUF has them for llama: the two halves that a rotation mixes stand side
    by side."""
    heads = int(config["num_attention_heads"])
    if ".k_proj." in name:
        heads = int(config.get("num_key_value_heads") or heads)
    elif ".q_proj." not in name:
        return weight
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2)
    return rows.reshape(weight.shape).copy()

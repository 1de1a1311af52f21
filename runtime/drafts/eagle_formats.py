"""EAGLE heads as they are published: EAGLE-1, 2 and 3, EAGLE-3.1's norms, and the *speculators*
configuration of EAGLE-3 heads.

The names of the tensors are those of :class:`runtime.drafts.eagle_head.HeadNet`, and in ``PARTS``.
A configuration says what tensors do not: which of the target's states are read, and how outputs are
fed back. What it leaves open, or says in two ways, is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectune.runtime.checkpoints import (
    CONFIG,
    WEIGHTS,
    checkpoint,
    read_config,
    says_eagle3,
    source,
    translated,
    weight_files,
)
from spectune.runtime.drafts.eagle_head import Convention, EagleHead, HeadNet, HeadShape
from spectune.runtime.models import FINAL, CausalModel
from spectune.traces.errors import PairError

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]

STATE_IDS: Final = "eagle_aux_hidden_state_layer_ids"
FUSES: Final = "use_aux_hidden_state"
KNOWN_VALUES: Final = {
    "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
}
"""Switches of ModelOpt's heads, and the one value of each that is built here."""
SWITCHES: Final = (FUSES, "norm_output", "norm_before_fc", "fc_norm", *KNOWN_VALUES)
SIZES: Final = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"),
)
"""What a head's layers have in common with Llama's."""
PARTS: Final = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
"""What of a checkpoint our modules are made of, stacked; others have the same name there."""


def load_head(
    path: str, *, name: str, target: CausalModel, device: torch.device, dtype: torch.dtype
) -> EagleHead:
    """Loads a published EAGLE-1, 2 or 3 checkpoint, a folder or a hub name, to draft for
    ``target``.

    Raises PairError, in one line, when it was made for another target (hidden size, vocabulary,
    layers), is incomplete, or does not run."""
    with translated(f"{name}: cannot load {path}"):
        folder, (_, missing) = checkpoint(path), source(path)
        if missing:
            snapshot_download(path, revision=missing["revision"], allow_patterns=[*WEIGHTS])
        try:
            head = _head(folder, name, target, device, dtype)
        except PairError as error:
            raise PairError(f"{name}: {error}") from None
        # Sizes that fit the tensors and not each other are told here, not in the first request.
        head.reserve(2)
        features = torch.zeros(1, head.feature_size, device=device, dtype=dtype)
        head.chain(torch.tensor([0], device=device), 1, logits=1, hidden=features)
    return head


def _head(
    folder: Path, name: str, target: CausalModel, device: torch.device, dtype: torch.dtype
) -> EagleHead:
    document, tensors = read_config(folder), _read_tensors(folder)
    config = _flat(document)
    eagle3 = says_eagle3(document) or "layers.0.hidden_norm.weight" in tensors
    fuses = not eagle3 or config.get(FUSES) is not False
    taps, convention = _taps(config, target.num_layers) if eagle3 and fuses else ((FINAL,), "last")
    if not eagle3:
        tensors.pop("lm_head.weight", None)  # a copy of the target's, in some
    rows = tensors.pop("embed_tokens.weight", None)
    llama = LlamaConfig(**{key: config[key] for key in SIZES if config.get(key) is not None})
    usual = target.hidden_size if eagle3 and fuses else llama.hidden_size
    if (width := config.get("target_hidden_size") or usual) != target.hidden_size:
        raise PairError(
            f"the head reads hidden states of width {width}, the target's are "
            f"{target.hidden_size} wide"
        )
    for vocab in (config.get("vocab_size"), None if rows is None else len(rows)):
        if vocab not in (None, target.vocab_size):
            raise PairError(
                f"the head has a vocabulary of {vocab} tokens, the target one of "
                f"{target.vocab_size}; a head must be trained for its target"
            )
    shape = _shape(config, llama, tensors, len(taps), target, eagle3=eagle3, fuses=fuses)
    token_ids = _token_ids(tensors, target.vocab_size, shape)
    with torch.device("meta"):
        net = HeadNet(shape).requires_grad_(False)
    try:
        net.load_state_dict(_stacked(tensors), assign=True)
    except RuntimeError as error:
        lines = "; ".join(line.strip() for line in str(error).splitlines()[1:])
        raise PairError(f"its tensors are not those that config.json describes: {lines}") from None
    embed = None
    if rows is not None:
        weights = rows.to(device=device, dtype=dtype)
        embed = nn.Embedding(target.vocab_size, rows.shape[1], _weight=weights)
        embed.requires_grad_(False)
    return EagleHead(
        net.to(device=device, dtype=dtype),
        target,
        name=name,
        taps=taps,
        convention=convention,
        rotary=LlamaRotaryEmbedding(llama),
        token_ids=None if token_ids is None else token_ids.to(device),
        embed=embed,
        unread=tuple(sorted(set(document.get("eagle_config") or {}) - {STATE_IDS, *SWITCHES})),
    )


def _read_tensors(folder: Path) -> Tensors:
    """Every tensor of a head's checkpoint, under the names used here: no ``model.`` before,
    ``layers.0.`` for ``midlayer.``."""
    files = [folder / weights for weights in weight_files(folder)]
    if not any(file.exists() for file in files):
        raise PairError(
            f"no weights at {folder} (model.safetensors or pytorch_model.bin is expected)"
        )
    tensors: Tensors = {}
    for file in files:
        with translated(f"cannot load {file}"):
            tensors |= (
                load_file(file)
                if file.suffix == ".safetensors"
                else torch.load(file, map_location="cpu", weights_only=True)
            )
    named = {re.sub("^midlayer", "layers.0", k.removeprefix("model.")): tensors[k] for k in tensors}
    unused = re.compile(r"verifier_.*|.*rotary_emb\.inv_freq|t2d")
    return {name: tensor for name, tensor in named.items() if not unused.fullmatch(name)}


def _flat(document: Config) -> dict[str, Any]:
    """A configuration on one level: the speculators format nests the sizes of a layer, and
    ``eagle_config`` the rest."""
    layer, nested = document.get("transformer_layer_config"), document.get("eagle_config") or {}
    kind = document.get("speculators_model_type")
    if kind is not None or layer is not None:
        its = f"{CONFIG} is of the speculators format"
        if kind != "eagle3" or not isinstance(layer, Mapping):
            raise PairError(f"{its}, of which 'eagle3' with a transformer_layer_config is read")
        if document.get("norm_before_residual") is None:
            # speculators takes False where nothing is said, vLLM True.
            raise PairError(f"{its}, but says no norm_before_residual; add what was trained")
    config: dict[str, Any] = dict(layer or {})
    config |= {k: v for k, v in document.items() if v is not None or k not in config}
    if config.get("hidden_act", "silu") != "silu":
        raise PairError(f"hidden_act is {config['hidden_act']!r}; only 'silu' is read")
    for key in SWITCHES:
        values = [v for v in (config.get(key), nested.get(key)) if v is not None]
        if len(set(values)) > 1 or not all(isinstance(v, bool) for v in values):
            named = " and ".join(map(repr, values))
            raise PairError(f"{CONFIG} has {key} {named}; it must be true or false")
        config[key] = values[0] if values else None
        if values and KNOWN_VALUES.get(key, values[0]) != values[0]:
            raise PairError(
                f"{CONFIG} has {key} {str(values[0]).lower()}, which is of a kind of head that is "
                "not known here"
            )
    return config


def _taps(config: Config, layers: int) -> tuple[tuple[int, ...], Convention]:
    """The hidden states that an EAGLE-3 head reads, as ``CausalModel.taps`` counts them (state i is
    what layer i reads), and how its configuration names them.

    Published ids follow two conventions: outputs of layers (state = id + 1; SpecForge, ModelOpt),
    and boundaries (state = id; vLLM, speculators). Heads read a low layer, by default the output of
    layer 1, which is state 2; so ids without a 1 are boundaries, and so are those that reach the
    number of layers, which is the output of no layer. Without ids the states are 2, L/2 and L-3, as
    in the engines."""
    listed = (config.get("eagle_config") or {}).get(STATE_IDS), config.get(STATE_IDS)
    resolved: list[tuple[tuple[int, ...], Convention]] = []
    for ids in filter(None, listed):
        outputs = 1 in ids and layers not in ids
        resolved.append((tuple(i + outputs for i in ids), "outputs" if outputs else "boundaries"))
    if len({taps for taps, _ in resolved}) > 1:
        raise PairError(f"{CONFIG} has {STATE_IDS} {listed[1]} and, in eagle_config, {listed[0]}")
    taps, convention = resolved[0] if resolved else ((2, layers // 2, layers - 3), "default")
    if not all(0 <= tap <= layers for tap in taps):
        raise PairError(
            f"the head reads hidden states {list(taps)}; the target has states 0 to {layers} "
            f"({STATE_IDS} names them)"
        )
    return taps, convention


def _shape(
    config: Config,
    llama: LlamaConfig,
    tensors: Tensors,
    num_taps: int,
    target: CausalModel,
    *,
    eagle3: bool,
    fuses: bool,
) -> HeadShape:
    """The head's sizes. Raises PairError where it lacks an output matrix and the target's does not
    fit."""
    draft_vocab = config.get("draft_vocab_size") or target.vocab_size
    has_output = eagle3 and "lm_head.weight" in tensors
    fits = (draft_vocab, llama.hidden_size) == (target.vocab_size, target.hidden_size)
    if not (has_output or fits):
        raise PairError("it has no lm_head.weight, and the target's does not fit")
    layers = {int(key.split(".")[1]) + 1 for key in tensors if key.startswith("layers.")}
    attention = "layers.0.self_attn."
    return HeadShape(
        eagle3=eagle3,
        hidden=llama.hidden_size,
        fused=num_taps * target.hidden_size,
        intermediate=llama.intermediate_size,
        heads=llama.num_attention_heads,
        kv_heads=llama.num_key_value_heads,
        head_dim=llama.head_dim,
        eps=llama.rms_norm_eps,
        layers=max(1, *layers, config.get("num_hidden_layers") or 1),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config["norm_output"]),
        norm_before_fc=bool(config["norm_before_fc"]),
        fc_norms=num_taps if config["fc_norm"] else 0,
        draft_vocab=draft_vocab if has_output else None,
        fuses=fuses,
        # EAGLE-3's own code never gives fc a bias, whatever the flag says; what the checkpoint
        # holds is what was trained.
        fc_bias="fc.bias" in tensors or (not eagle3 and config.get("bias") is True),
        qkv_bias=f"{attention}q_proj.bias" in tensors
        or bool(config.get("qkv_bias") or config.get("attention_bias")),
        o_bias=f"{attention}o_proj.bias" in tensors,
    )


def _token_ids(tensors: Tensors, vocab: int, shape: HeadShape) -> Tensor | None:
    """Target ids of the head's tokens, int64 [draft_vocab]; None where they are the same."""
    rows, offsets = shape.draft_vocab, tensors.pop("d2t", None)
    if rows is None or (rows == vocab and offsets is None):
        return None
    if offsets is None or offsets.shape != (rows,):
        raise PairError(f"it has no d2t for its vocabulary of {rows} tokens")
    ids = torch.arange(rows) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != rows:
        raise PairError(
            f"d2t does not map the head's {rows} tokens to different ones of the target's {vocab}"
        )
    return None if torch.equal(ids, torch.arange(vocab)) else ids


def _stacked(tensors: Tensors) -> Tensors:
    """A checkpoint's tensors, those of ``PARTS`` that are stacked here in one."""
    out = dict(tensors)
    for key in tensors:
        for module, parts in PARTS.items():
            if parts[0] in key and all(key.replace(parts[0], part) in out for part in parts):
                stack = [out.pop(key.replace(parts[0], part)) for part in parts]
                out[key.replace(parts[0], module)] = torch.cat(stack)
    return out

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
    is_eagle3,
    read_config,
    source,
    translated,
    weight_files,
)
from spectune.runtime.drafts.eagle_head import EagleHead, HeadNet, HeadShape
from spectune.runtime.drafts.eagle_states import TargetStates, check_count, states_of, unread_keys
from spectune.runtime.models import FINAL, CausalModel
from spectune.traces.errors import PairError

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]

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
    path: str,
    *,
    name: str,
    target: CausalModel,
    device: torch.device,
    dtype: torch.dtype,
    ordinary: int | None = None,
) -> EagleHead:
    """Loads a published EAGLE-1, 2 or 3 checkpoint, a folder or a hub name, to draft for
    ``target``, of whose tokens the first ``ordinary`` are those that a head must know (None: all);
    others were added, or are rows without a token.

    Raises PairError, in one line, when it was made for another target (hidden size, vocabulary,
    layers), is incomplete, or does not run."""
    with translated(f"{name}: cannot load {path}"):
        folder, (_, missing) = checkpoint(path), source(path)
        if missing:
            snapshot_download(path, revision=missing["revision"], allow_patterns=[*WEIGHTS])
        try:
            head = _head(folder, name, target, device, dtype, ordinary or target.vocab_size)
        except PairError as error:
            raise PairError(f"{name}: {error}") from None
        # Sizes that fit the tensors and not each other are told here, not in the first request.
        head.reserve(2)
        features = torch.zeros(1, head.feature_size, device=device, dtype=dtype)
        head.chain(torch.tensor([0], device=device), 1, logits=1, hidden=features)
    return head


def _head(
    folder: Path,
    name: str,
    target: CausalModel,
    device: torch.device,
    dtype: torch.dtype,
    ordinary: int,
) -> EagleHead:
    document, tensors = read_config(folder), _read_tensors(folder)
    config = _flat(document)
    eagle3 = is_eagle3(folder)
    fuses = not eagle3 or config.get(FUSES) is not False
    states = TargetStates((FINAL,), "last")
    llama = LlamaConfig(**{key: config[key] for key in SIZES if config.get(key) is not None})
    usual = target.hidden_size if eagle3 and fuses else llama.hidden_size
    if (width := config.get("target_hidden_size") or usual) != target.hidden_size:
        raise PairError(
            f"the head reads hidden states of width {width}, the target's are "
            f"{target.hidden_size} wide"
        )
    if eagle3 and fuses:
        states = states_of(config, target.num_layers)
        check_count(config, states, tensors, target.hidden_size)
    rows = tensors.pop("embed_tokens.weight", None)
    vocab = _vocab(config, rows, target.vocab_size, ordinary)
    if not eagle3 and _same(tensors.get("lm_head.weight"), target):
        del tensors["lm_head.weight"]  # a copy
    shape = _shape(
        config, llama, tensors, len(states.taps), target, vocab, eagle3=eagle3, fuses=fuses
    )
    token_ids = _token_ids(tensors, target.vocab_size, vocab, shape)
    with torch.device("meta"):
        net = HeadNet(shape).requires_grad_(False)
    try:
        net.load_state_dict(_stacked(tensors), assign=True)
    except RuntimeError as error:
        lines = "; ".join(line.strip() for line in str(error).splitlines()[1:])
        raise PairError(f"its tensors are not those that config.json describes: {lines}") from None
    embed = None
    if rows is not None:
        if extra := target.vocab_size - len(rows):  # read, as by a draft model, as the last row
            rows = torch.cat((rows, rows[-1:].expand(extra, -1)))
        weights = rows.to(device=device, dtype=dtype)
        embed = nn.Embedding(len(rows), rows.shape[1], _weight=weights)
        embed.requires_grad_(False)
    return EagleHead(
        net.to(device=device, dtype=dtype),
        target,
        name=name,
        taps=states.taps,
        convention=states.convention,
        rotary=LlamaRotaryEmbedding(llama),
        token_ids=None if token_ids is None else token_ids.to(device),
        embed=embed,
        unread=unread_keys(document, states, SWITCHES),
    )


def _vocab(config: Config, rows: Tensor | None, target: int, ordinary: int) -> int:
    """Tokens that a head knows: all of the target's, or those without some that were added."""
    sizes = [config.get("vocab_size"), None if rows is None else len(rows)]
    known = [size for size in sizes if size is not None]
    for vocab in known:
        if not min(ordinary, target) <= vocab <= target:
            raise PairError(
                f"the head has a vocabulary of {vocab} tokens, the target one of {target}; a head "
                "must be trained for its target"
            )
    return min(known, default=target)


def _same(output: Tensor | None, target: CausalModel) -> bool:
    """Whether an output matrix is the target's."""
    weight = target.model.get_output_embeddings().weight
    return output is not None and torch.equal(output.to(weight), weight)


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
    unused = re.compile(r"verifier_.*|.*rotary_emb\.inv_freq")
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


def _shape(
    config: Config,
    llama: LlamaConfig,
    tensors: Tensors,
    num_taps: int,
    target: CausalModel,
    vocab: int,
    *,
    eagle3: bool,
    fuses: bool,
) -> HeadShape:
    """The head's sizes. Raises PairError where it lacks an output matrix and the target's does not
    fit."""
    draft_vocab = config.get("draft_vocab_size") or vocab
    has_output = "lm_head.weight" in tensors
    fits = (draft_vocab, llama.hidden_size) == (vocab, target.hidden_size)
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


def _token_ids(tensors: Tensors, target: int, vocab: int, shape: HeadShape) -> Tensor | None:
    """The target's ids of the head's output rows, int64 [rows]; None where row i is token i of all
    the target's. ``d2t`` holds a token's id minus its row, ``t2d`` which tokens have a row."""
    offsets, has_row = tensors.pop("d2t", None), tensors.pop("t2d", None)
    rows = vocab if shape.draft_vocab is None else shape.draft_vocab
    if offsets is None and rows == vocab:
        offsets = torch.zeros(rows, dtype=torch.int64)
    if offsets is None or offsets.shape != (rows,):
        raise PairError(f"it has no d2t for its vocabulary of {rows} tokens")
    ids = torch.arange(rows) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != rows:
        raise PairError(
            f"d2t does not map the head's {rows} tokens to different ones of the target's {vocab}; "
            "it must hold the id of each minus its row"
        )
    # One without any token was never filled; offsets of 0 may be as well.
    if has_row is not None and (has_row.any() or not offsets.any()):
        known = has_row.nonzero().flatten().tolist()
        if differing := sorted({*known} ^ {*ids.tolist()}):
            where = "t2d has, and d2t does not" if differing[0] in known else "d2t has, not t2d"
            raise PairError(
                f"its d2t and t2d name different tokens ({len(differing)} differ, the first is "
                f"{differing[0]}, which {where}); d2t must hold the id of each minus its row"
            )
    if shape.draft_vocab is None:
        if offsets.any():
            raise PairError("it has a d2t, and no lm_head.weight of its own to which it belongs")
        return None
    return None if torch.equal(ids, torch.arange(target)) else ids


def _stacked(tensors: Tensors) -> Tensors:
    """A checkpoint's tensors, those of ``PARTS`` that are stacked here in one."""
    out = dict(tensors)
    for key in tensors:
        for module, parts in PARTS.items():
            if parts[0] in key and all(key.replace(parts[0], part) in out for part in parts):
                stack = [out.pop(key.replace(parts[0], part)) for part in parts]
                out[key.replace(parts[0], module)] = torch.cat(stack)
    return out

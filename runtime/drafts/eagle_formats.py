"""EAGLE heads as they are published: EAGLE-1, 2 and 3, EAGLE-3.1's norms, and the *speculators*
configuration of EAGLE-3 heads.

The names of the tensors are those of :class:`runtime.drafts.eagle_head.HeadNet`, and in ``PARTS``.
What does not fit the target or itself is refused with one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectune.runtime.drafts.eagle_head import Convention, EagleHead, HeadNet, HeadShape
from spectune.runtime.models import FINAL, CausalModel
from spectune.runtime.pair import expanded, head_config, is_local, says_eagle3, translated
from spectune.traces.errors import PairError

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]


def load_head(
    path: str, *, name: str, target: CausalModel, device: torch.device, dtype: torch.dtype
) -> EagleHead:
    """Loads a published EAGLE-1, 2 or 3 checkpoint, a folder or a hub name, to draft for
    ``target``.

    Raises PairError, in one line, when it was made for another target (hidden size, vocabulary,
    layers), is incomplete, or does not run.
    """
    with translated(f"{name}: cannot load {path}"):
        files = ["config.json", "*.safetensors", "*.bin"]
        folder = (
            expanded(path)
            if is_local(path)
            else Path(snapshot_download(path, allow_patterns=files))
        )
        try:
            head = _head(folder, path, name, target, device, dtype)
        except PairError as error:
            raise PairError(f"{name}: {error}") from None
        # Sizes that fit the tensors and not each other are told here, not in the first request.
        head.reserve(2)
        features = torch.zeros(1, head.feature_size, device=device, dtype=dtype)
        head.chain(torch.tensor([0], device=device), 1, logits=1, hidden=features)
    return head


def _head(
    folder: Path,
    path: str,
    name: str,
    target: CausalModel,
    device: torch.device,
    dtype: torch.dtype,
) -> EagleHead:
    config, tensors = _flat(head_config(folder)), _read_tensors(folder)
    eagle3 = says_eagle3(config) or "layers.0.hidden_norm.weight" in tensors
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads")
    for key in sizes:
        if not isinstance(config.get(key), int):
            raise PairError(f"{folder / 'config.json'} says no {key}")
    fuses = not eagle3 or _switch(config, FUSES, True)
    taps, convention = _taps(config, target.num_layers) if eagle3 and fuses else ((FINAL,), "last")
    shape = _shape(config, tensors, target, taps, eagle3, fuses)
    token_ids = _token_ids(tensors, target, shape)
    with torch.device("meta"):  # sizes that a configuration makes up cost nothing
        net = HeadNet(shape).requires_grad_(False)
    net.load_state_dict(_weights(tensors, net), assign=True)
    embed = None
    if "embed_tokens.weight" in tensors:
        embed = nn.Embedding(target.vocab_size, shape.hidden, device=device, dtype=dtype)
        rows = _take(tensors, "embed_tokens.weight", target.vocab_size, shape.hidden)
        embed.requires_grad_(False).weight.copy_(rows)
    elif shape.hidden != target.hidden_size:
        raise PairError(
            "the checkpoint has no tensor embed_tokens.weight, and the target's has another width"
        )
    if not eagle3:
        tensors.pop("lm_head.weight", None)  # a copy of the target's, in some
    if tensors:
        raise PairError(
            f"tensor {min(tensors)} of {path} is of a kind of head that is not known here"
        )
    try:
        rotary = LlamaRotaryEmbedding(_rope_config(config, shape.head_dim))
    except (KeyError, TypeError, ValueError) as error:
        raise PairError(
            f"rope settings of {folder / 'config.json'} are not understood: {error}"
        ) from None
    return EagleHead(
        net.to(device=device, dtype=dtype),
        target,
        name=name,
        taps=taps,
        convention=convention,
        rotary=rotary,
        token_ids=None if token_ids is None else token_ids.to(device),
        embed=embed,
        unread=tuple(sorted(set(config.get("eagle_config") or {}) - FOLLOWED)),
    )


STATE_IDS: Final = "eagle_aux_hidden_state_layer_ids"
FUSES: Final = "use_aux_hidden_state"
NORMS: Final = ("norm_output", "norm_before_fc", "fc_norm")
KNOWN_VALUES: Final = {
    "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
}
"""Switches of ModelOpt's heads, and the one value of each that is built here."""
FOLLOWED: Final = {STATE_IDS, FUSES, *NORMS, *KNOWN_VALUES}
"""Keys of ``eagle_config`` that are read."""
_BESIDE = (
    *("architectures", "speculators_model_type", "draft_vocab_size", "target_hidden_size"),
    *("eagle_config", STATE_IDS, "norm_before_residual"),
    *(*NORMS, FUSES, *KNOWN_VALUES),
)
"""What the speculators format has beside the sizes of a layer, which it nests."""


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration on one level, as EAGLE's own format has it; that of the speculators format
    nests the sizes of a layer."""
    kind, layer = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if kind is None and layer is None:
        return config
    its = "config.json is of the speculators format"
    if kind != "eagle3":
        raise PairError(f"{its} with speculators_model_type {kind!r}; only 'eagle3' is read")
    if not isinstance(layer, Mapping):
        raise PairError(f"{its}, but says no transformer_layer_config")
    for key, known in (("model_type", "llama"), ("hidden_act", "silu")):
        if layer.get(key, known) != known:
            raise PairError(
                f"transformer_layer_config has {key} {layer[key]!r}; only {known!r} is read"
            )
    if config.get("norm_before_residual") is None:
        # speculators takes False where nothing is said, vLLM True.
        raise PairError(f"{its}, but says no norm_before_residual; add what was trained")
    own = {k: config[k] for k in _BESIDE if config.get(k) is not None}
    return {k: v for k, v in layer.items() if k not in _BESIDE} | own


def _read_tensors(folder: Path) -> Tensors:
    """Every tensor of a head's checkpoint, under the names used here: no ``model.`` before,
    ``layers.0.`` for ``midlayer.``."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise PairError(
            f"no weights at {folder} (model.safetensors or pytorch_model.bin is expected)"
        )
    found: Tensors = {}
    for file in files:
        with translated(f"cannot load {file}"):
            found |= (
                load_file(file)
                if file.suffix == ".safetensors"
                else torch.load(file, map_location="cpu", weights_only=True)
            )
    named = {k.removeprefix("model."): tensor for k, tensor in found.items()}
    return {
        "layers.0." + k.removeprefix("midlayer.") if k.startswith("midlayer.") else k: tensor
        for k, tensor in named.items()
        if not k.startswith("verifier_") and not k.endswith("rotary_emb.inv_freq") and k != "t2d"
    }


def _take(tensors: Tensors, key: str, *shape: int) -> Tensor:
    """Takes a tensor out of a checkpoint. Raises PairError where it lacks it or has another
    shape."""
    tensor = tensors.pop(key, None)
    if tensor is None:
        raise PairError(f"the checkpoint has no tensor {key}")
    if tuple(tensor.shape) != shape:
        raise PairError(
            f"tensor {key} is {list(tensor.shape)}, not {list(shape)}, as config.json would have it"
        )
    return tensor


def _taps(config: Config, layers: int) -> tuple[tuple[int, ...], Convention]:
    """The hidden states that an EAGLE-3 head reads, as ``CausalModel.taps`` counts them (state i is
    what layer i reads), and how its configuration names them.

    Published ids follow two conventions: outputs of layers (state = id + 1; SpecForge, ModelOpt),
    and boundaries (state = id; vLLM, speculators). Heads read a low layer, by default the output of
    layer 1, which is state 2; so ids without a 1 are boundaries, and so are those that reach the
    number of layers, which is the output of no layer. Without ids the states are 2, L/2 and L-3, as
    in the engines.
    """
    nested, top = (config.get("eagle_config") or {}).get(STATE_IDS), config.get(STATE_IDS)
    found = [_resolved(ids, layers) for ids in (nested, top) if ids]
    if len({taps for taps, _ in found}) > 1:
        raise PairError(f"config.json has {STATE_IDS} {top} and, in eagle_config, {nested}")
    return found[0] if found else ((2, layers // 2, layers - 3), "default")


def _resolved(ids: Any, layers: int) -> tuple[tuple[int, ...], Convention]:
    """States by the ids of a configuration, and the convention these follow."""
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise PairError(f"config.json has {STATE_IDS} {ids!r}; it must be a list of layer numbers")
    if 1 in ids and layers not in ids:
        return tuple(i + 1 for i in ids), "outputs"
    return tuple(ids), "boundaries"


def _switch(config: Config, key: str, default: bool = False) -> bool:
    """A switch, at the top or in ``eagle_config``; ``default`` where nothing is said."""
    places = config.get(key), (config.get("eagle_config") or {}).get(key)
    said = [v for v in places if v is not None]
    if not all(isinstance(v, bool) for v in said) or len(set(said)) > 1:
        raise PairError(
            f"config.json has {key} {' and '.join(map(repr, said))}; it must be true or false"
        )
    return bool(said[0]) if said else default


def _norms(config: Config, tensors: Tensors, eagle3: bool) -> dict[str, bool]:
    """EAGLE-3.1's norms that a head has, by their switches. The tensors must agree with these."""
    found = {key: _switch(config, key) for key in NORMS}
    on = [key for key, is_on in found.items() if is_on]
    if on and not eagle3:
        raise PairError(f"config.json has {on[0]}, but nothing else of EAGLE-3")
    if found["norm_before_fc"] and found["fc_norm"]:
        raise PairError(
            "config.json has norm_before_fc and fc_norm; a head has one norm over all states, or "
            "one for each"
        )
    for key, prefix in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        stray = min((k for k in tensors if k.startswith(prefix)), default=None)
        if eagle3 and stray is not None and not found[key]:
            raise PairError(
                f"the checkpoint has a tensor {stray}, but config.json does not say {key}"
            )
    return found


def _check_unfused(config: Config, tensors: Tensors, hidden: int, target: CausalModel) -> None:
    """Raises PairError where a head that says it takes the target's last state as it is cannot."""
    if hidden != target.hidden_size:
        raise PairError(
            f"config.json has {FUSES} false, so the head takes the target's last state as it is; "
            f"it is {hidden} wide, the target's states are {target.hidden_size} wide"
        )
    stray = [key for key in tensors if key.startswith(("fc.", "fc_norm.", "input_norm."))]
    stray += [key for key in ("norm_before_fc", "fc_norm") if _switch(config, key)]
    if stray:
        raise PairError(
            f"config.json has {FUSES} false, but the head has {stray[0]}, which fuses several "
            "states; say what was trained"
        )


def _shape(
    config: Config,
    tensors: Tensors,
    target: CausalModel,
    taps: tuple[int, ...],
    eagle3: bool,
    fuses: bool,
) -> HeadShape:
    """The head's sizes, checked against the target's."""
    for key, value in KNOWN_VALUES.items():
        if _switch(config, key, value) != value:
            raise PairError(
                f"config.json has {key} {str(not value).lower()}, which is of a kind of head that "
                "is not known here"
            )
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    reads = int(config.get("target_hidden_size") or (target.hidden_size if eagle3 else hidden))
    if reads != target.hidden_size:
        raise PairError(
            f"the head reads hidden states of width {reads}, the target's are "
            f"{target.hidden_size} wide"
        )
    layers, fused = target.num_layers, len(taps) * target.hidden_size
    if eagle3 and fuses and not all(0 <= tap <= layers for tap in taps):
        raise PairError(
            f"the head reads hidden states {list(taps)}; the target has states 0 to {layers} "
            f"({STATE_IDS} names them)"
        )
    fc = tensors.get("fc.weight")
    if not fuses:
        _check_unfused(config, tensors, hidden, target)
    elif fc is None:
        only_last = f" (a head of one state says {FUSES} false)" if eagle3 else ""
        raise PairError(f"the checkpoint has no tensor fc.weight{only_last}")
    elif eagle3 and fc.shape[-1] != fused:
        raise PairError(
            f"the head's fc takes {fc.shape[-1]} features, but {len(taps)} hidden states of the "
            f"target have {fused}; it was trained for another target"
        )
    vocab = int(config.get("vocab_size") or target.vocab_size)
    if vocab != target.vocab_size:
        raise PairError(
            f"the head has a vocabulary of {vocab} tokens, the target one of "
            f"{target.vocab_size}; a head must be trained for its target"
        )
    draft_vocab = int(config.get("draft_vocab_size") or vocab)
    if not 0 < draft_vocab <= vocab:
        raise PairError(f"draft_vocab_size {draft_vocab} exceeds the vocabulary of {vocab}")
    lm_head = tensors.get("lm_head.weight") if eagle3 else None
    if lm_head is not None and lm_head.shape[0] != draft_vocab:
        raise PairError(
            f"lm_head.weight has {lm_head.shape[0]} rows, draft_vocab_size is {draft_vocab}"
        )
    if lm_head is None and (draft_vocab != vocab or hidden != target.hidden_size):
        raise PairError(
            "the checkpoint has no tensor lm_head.weight, and the target's does not fit"
        )
    norms = _norms(config, tensors, eagle3)
    numbers = (key.split(".")[1] for key in tensors if key.startswith("layers."))
    found = {0, *(int(n) for n in numbers if n.isdigit())}
    count = max(int(config.get("num_hidden_layers") or 1), *(1 + i for i in found))
    missing = next((i for i in range(count) if i not in found), None)
    if missing is not None:
        raise PairError(f"the checkpoint has no tensor layers.{missing}.self_attn.q_proj.weight")
    bias = "layers.0.self_attn.q_proj.bias" in tensors
    return HeadShape(
        eagle3=eagle3,
        hidden=hidden,
        fused=fused,
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        layers=count,
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=norms["norm_output"],
        norm_before_fc=norms["norm_before_fc"],
        fc_norms=len(taps) if norms["fc_norm"] else 0,
        draft_vocab=None if lm_head is None else draft_vocab,
        fuses=fuses,
        # EAGLE-3's own code never gives fc a bias, whatever the flag says; what the checkpoint
        # holds is what was trained.
        fc_bias="fc.bias" in tensors or (not eagle3 and config.get("bias") is True),
        qkv_bias=bias or bool(config.get("qkv_bias") or config.get("attention_bias")),
        o_bias="layers.0.self_attn.o_proj.bias" in tensors,
    )


def _token_ids(tensors: Tensors, target: CausalModel, shape: HeadShape) -> Tensor | None:
    """Target ids of the head's tokens, int64 [draft_vocab]; None where they are the same."""
    vocab, own = target.vocab_size, shape.draft_vocab
    if own is None or (own == vocab and "d2t" not in tensors):
        tensors.pop("d2t", None)
        return None
    ids = torch.arange(own) + _take(tensors, "d2t", own).long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != own:
        raise PairError(
            f"d2t does not map the head's {own} tokens to different ones of the target's {vocab}"
        )
    return None if torch.equal(ids, torch.arange(vocab)) else ids


PARTS: Final = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
"""What of a checkpoint our modules are made of, stacked; others have the same name there."""


def _weights(tensors: Tensors, net: HeadNet) -> Tensors:
    """The state of ``net`` from a checkpoint's tensors."""
    shape = net.shape
    kv = shape.kv_heads * shape.head_dim
    rows = {"qkv": (shape.heads * shape.head_dim, kv, kv), "gate_up": (shape.intermediate,) * 2}
    out: Tensors = {}
    for key, parameter in net.state_dict().items():
        module = key.split(".")[-2]
        sizes, columns = rows.get(module, (parameter.shape[0],)), parameter.shape[1:]
        names = [key.replace(module, part) for part in PARTS.get(module, (module,))]
        parts = [_take(tensors, n, size, *columns) for n, size in zip(names, sizes, strict=True)]
        out[key] = torch.cat(parts)
    return out


def _rope_config(config: Config, head_dim: int) -> LlamaConfig:
    """What transformers' rotary embedding reads of a head's configuration, old style or new; a
    missing base is 10000."""
    rope: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default"}
    if config.get("rope_theta") is not None:
        rope["rope_theta"] = float(config["rope_theta"])
    for key in ("rope_scaling", "rope_parameters"):
        found = config.get(key)
        if isinstance(found, Mapping):
            rope |= found
            rope["rope_type"] = found.get("rope_type", found.get("type", "default"))
        elif found is not None:
            raise ValueError(f"{key} is {found!r}")
    return LlamaConfig(
        hidden_size=int(config["hidden_size"]),
        num_attention_heads=int(config["num_attention_heads"]),
        head_dim=head_dim,
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
        rope_parameters=rope,
    )

"""EAGLE heads: checkpoints of every published form, made here, against a plain forward pass written
from the format alone."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from spectune.engines.server_settings import engine_settings
from spectune.runtime.attention import causal_mask
from spectune.runtime.checkpoints import is_head
from spectune.runtime.drafts.eagle import columns
from spectune.runtime.drafts.eagle_formats import load_head
from spectune.runtime.drafts.eagle_head import EagleHead
from spectune.runtime.loading import load_pair
from spectune.runtime.models import FINAL, CausalModel
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.errors import PairError
from tests.pairs import chain, make_pair, tiny_model, tokenizer
from train_demo.head import Head, Unroller, begin_as_target

VOCAB, HIDDEN, LAYERS = 300, 48, 7
TAPS = (2, 3, 4)
IDS = "eagle_aux_hidden_state_layer_ids"
CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
}


@dataclass
class Case:
    """A published form: its configuration and tensors, how they are written, and the taps a loader
    must find.

    ``beside``: the configuration is written as the speculators format has it, with these keys
    beside the nested others.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    taps: tuple[int, ...]
    file: str = "safetensors"
    beside: tuple[str, ...] = ()

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        document = self.config
        if self.beside:
            document = {k: v for k, v in self.config.items() if k in self.beside}
            layer = {k: v for k, v in self.config.items() if k not in self.beside}
            document["transformer_layer_config"] = layer
        (folder / "config.json").write_text(json.dumps(document))
        if self.file == "bin":
            torch.save(self.tensors, folder / "pytorch_model.bin")
        else:
            save_file(
                {k: t.contiguous() for k, t in self.tensors.items()}, folder / "model.safetensors"
            )
        return folder


SECOND = ["input_layernorm", "post_attention_layernorm"]
"""The norms of a layer behind the first."""


def _random(seed: int, scale: float = 1.5) -> Callable[..., Tensor]:
    """Weights of a seed; without norms (EAGLE-1) they must be smaller, or rounding grows from token
    to token."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: (
        torch.randn(*shape, generator=generator)
        * (scale / math.sqrt(shape[-1]) if len(shape) > 1 else 0.3)
    )


def _layer(
    make: Callable[..., Tensor], prefix: str, config: dict[str, Any], wide: bool, norms: list[str]
) -> dict[str, Tensor]:
    ffn, heads = config["intermediate_size"], config["num_attention_heads"]
    hidden = config["hidden_size"]
    dim = config.get("head_dim", hidden // heads)
    columns, kv = hidden * (1 + wide), config["num_key_value_heads"] * dim
    rows = {"q": heads * dim, "k": kv, "v": kv}
    out = {f"{prefix}.self_attn.{n}_proj.weight": make(r, columns) for n, r in rows.items()}
    if config.get("attention_bias") or config.get("qkv_bias"):
        out |= {f"{prefix}.self_attn.{n}_proj.bias": make(r) for n, r in rows.items()}
    out[f"{prefix}.self_attn.o_proj.weight"] = make(hidden, heads * dim)
    if config.get("attention_bias"):
        out[f"{prefix}.self_attn.o_proj.bias"] = make(hidden)
    for name, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
        out[f"{prefix}.mlp.{name}_proj.weight"] = make(*shape)
    return out | {f"{prefix}.{norm}.weight": 1 + make(hidden) for norm in norms}


def _eagle1() -> Case:
    config, make = BASE | {"bias": True}, _random(1, 0.7)
    tensors = _layer(make, "layers.0", config, False, ["post_attention_layernorm"])
    tensors |= {
        "fc.weight": make(HIDDEN, 2 * HIDDEN),
        "fc.bias": make(HIDDEN),
        "embed_tokens.weight": make(VOCAB, HIDDEN),
    }
    return Case(config, tensors, (FINAL,), "bin")


def _eagle2_llama3() -> Case:
    """With rotary scaling, query biases and a second layer, which has the input norm that the first
    lacks."""
    config, make = BASE | {"bias": False, "qkv_bias": True, "num_hidden_layers": 2}, _random(2, 0.7)
    config |= {"rope_theta": 500.0, "rope_scaling": LLAMA3}
    tensors = _layer(make, "layers.0", config, False, ["post_attention_layernorm"])
    tensors |= _layer(make, "layers.1", config, False, SECOND)
    return Case(config, tensors | {"fc.weight": make(HIDDEN, 2 * HIDDEN)}, (FINAL,))


def _eagle3(seed: int = 3, file: str = "bin", **extra: Any) -> Case:
    draft, make = 40, _random(seed)
    config = BASE | {"draft_vocab_size": draft} | extra
    tensors = _layer(make, "midlayer", config, True, [*SECOND, "hidden_norm"])
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:draft].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    tensors |= {
        "fc.weight": make(HIDDEN, 3 * HIDDEN),
        "norm.weight": 1 + make(HIDDEN),
        "lm_head.weight": make(draft, HIDDEN) * 4,
        "d2t": ids - torch.arange(draft),
        "t2d": known,
    }
    return Case(config, tensors, TAPS, file)


def _eagle3_without_lm_head() -> Case:
    case = _eagle3(
        4,
        "safetensors",
        architectures=["LlamaForCausalLMEagle3"],
        rope_parameters={"rope_theta": 77.0, "rope_type": "default"},
    )
    for key in ("lm_head.weight", "d2t", "t2d"):
        del case.tensors[key]
    del case.config["draft_vocab_size"]
    return case


def _eagle3_vllm() -> Case:
    """Renamed as vLLM does, with every option: other ids (outputs of layers), head_dim, biases, its
    own embedding, a second layer."""
    case = _eagle3(
        5,
        "safetensors",
        head_dim=16,
        attention_bias=True,
        bias=True,
        norm_before_residual=True,
        num_hidden_layers=2,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 6], "use_aux_hidden_state": True},
    )
    make = _random(6)
    case.tensors |= _layer(make, "layers.1", case.config, False, SECOND)
    case.tensors |= {"fc.bias": make(HIDDEN), "embed_tokens.weight": make(VOCAB, HIDDEN)}
    outside = ("lm_head.", "d2t", "t2d")
    case.tensors = {
        k if k.startswith(outside) else "model." + k.replace("midlayer.", "layers.0."): t
        for k, t in case.tensors.items()
    }
    case.taps = (2, 3, 7)
    return case


def _eagle31() -> Case:
    """EAGLE-3.1: a norm for each fused state, and the output fed back after the last norm, whose
    weights are far from 1."""
    case = _eagle3_without_lm_head()
    case.config |= {"fc_norm": True, "norm_output": True, "norm_before_fc": False}
    make = _random(8)
    case.tensors |= {f"fc_norm.{i}.weight": 1 + 2 * make(HIDDEN) for i in range(3)}
    case.tensors["norm.weight"] = 1 + 2 * make(HIDDEN)
    case.tensors = {"model." + k: t for k, t in case.tensors.items()}
    return case


def _eagle3_norm_before_fc() -> Case:
    """One norm over all fused states, said where NVIDIA's configurations say it; two states of
    given ids."""
    case = _eagle3(
        9,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4], "norm_before_fc": True},
        norm_output=None,
    )
    case.tensors["fc.weight"] = case.tensors["fc.weight"][:, : 2 * HIDDEN].clone()
    case.tensors["input_norm.weight"] = 1 + _random(10)(2 * HIDDEN)
    case.taps = (2, 5)
    return case


def _speculators() -> Case:
    """The speculators format: nested sizes, its names of tensors, ids of states; a second layer;
    norms of EAGLE-3.1."""
    case = _eagle3(
        11,
        "safetensors",
        architectures=["Eagle3DraftModel"],
        speculators_model_type="eagle3",
        model_type="llama",
        hidden_act="silu",
        head_dim=16,
        num_hidden_layers=2,
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
        eagle_aux_hidden_state_layer_ids=[1, 3, 7],
        target_hidden_size=None,
        norm_before_residual=True,
        norm_output=True,
        fc_norm=True,
    )
    make = _random(12)
    case.tensors |= _layer(make, "layers.1", case.config, False, SECOND)
    case.tensors |= {f"fc_norm.{i}.weight": 1 + make(HIDDEN) for i in range(3)}
    case.tensors |= {
        "embed_tokens.weight": make(VOCAB, HIDDEN),
        "verifier_norm.weight": make(HIDDEN),
    }
    case.tensors = {k.replace("midlayer.", "layers.0."): t for k, t in case.tensors.items()}
    case.beside = (
        *("architectures", "speculators_model_type", "draft_vocab_size", "norm_output"),
        *("eagle_aux_hidden_state_layer_ids", "target_hidden_size", "norm_before_residual"),
        "fc_norm",
    )
    case.taps = (1, 3, 7)
    return case


def _eagle3_last_state() -> Case:
    """One state, the target's last, and no ``fc``, as ModelOpt publishes heads of a short
    context."""
    switches = {"use_aux_hidden_state": False, "use_last_layernorm": True, IDS: []}
    switches |= {"use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False}
    case = _eagle3(13, eagle_config=switches)
    del case.tensors["fc.weight"]
    case.taps = (FINAL,)
    return case


def _eagle1_own_output() -> Case:
    """With an output matrix that is not the target's."""
    case = _eagle1()
    case.tensors["lm_head.weight"] = _random(14)(VOCAB, HIDDEN) * 4
    return case


def _eagle3_five_states() -> Case:
    """Five states, under a name that other trainers use."""
    case = _eagle3(15, target_layer_ids=[1, 2, 3, 4, 5], num_aux_hidden_states=5)
    case.tensors["fc.weight"] = _random(16)(HIDDEN, 5 * HIDDEN)
    case.taps = (2, 3, 4, 5, 6)
    return case


def _eagle3_first_tokens() -> Case:
    """Of the vocabulary's first tokens, whose offsets are 0."""
    case = _eagle3(17)
    case.tensors["d2t"] = torch.zeros_like(case.tensors["d2t"])
    case.tensors["t2d"] = torch.arange(VOCAB) < 40
    return case


def _eagle3_without_t2d() -> Case:
    """Which tokens have a row was never noted."""
    case = _eagle3(18)
    case.tensors["t2d"] = torch.zeros_like(case.tensors["t2d"])
    return case


CASES: dict[str, Callable[[], Case]] = {
    "eagle1": _eagle1,
    "eagle1-own-output": _eagle1_own_output,
    "eagle2-llama3": _eagle2_llama3,
    "eagle3": _eagle3,
    "eagle3-without-lm-head": _eagle3_without_lm_head,
    "eagle3-vllm": _eagle3_vllm,
    "eagle3.1": _eagle31,
    "eagle3-norm-before-fc": _eagle3_norm_before_fc,
    "speculators": _speculators,
    "eagle3-last-state": _eagle3_last_state,
    "eagle3-five-states": _eagle3_five_states,
    "eagle3-first-tokens": _eagle3_first_tokens,
    "eagle3-without-t2d": _eagle3_without_t2d,
}


# The reference: from the format alone, whole sequences, no cache, one head at a time.


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turn(x: Tensor, config: dict[str, Any]) -> Tensor:
    """RoPE over [positions 1 .., D]."""
    half = x.shape[-1] // 2
    new = config.get("rope_parameters") or {}
    base = config.get("rope_theta", new.get("rope_theta", 10000.0))
    out = torch.empty_like(x)
    scaling = config.get("rope_scaling")
    for i in range(half):
        speed = base ** (-2 * i / x.shape[-1])
        if scaling:
            turns = scaling["original_max_position_embeddings"] * speed / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            keep = min(1.0, max(0.0, (turns - low) / (high - low)))
            speed = speed * keep + speed / scaling["factor"] * (1 - keep)
        angle = torch.arange(1, len(x) + 1) * speed
        out[:, i] = x[:, i] * angle.cos() - x[:, i + half] * angle.sin()
        out[:, i + half] = x[:, i + half] * angle.cos() + x[:, i] * angle.sin()
    return out


def _reference_layer(
    x: Tensor, residual: Tensor, t: dict[str, Tensor], prefix: str, config: dict[str, Any]
) -> Tensor:
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)

    def project(n: str, x: Tensor) -> Tensor:
        name = f"{prefix}.self_attn.{n}_proj"
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    q, k, v = (project(n, x) for n in "qkv")
    outs = []
    future = torch.ones(len(x), len(x)).triu(1).bool()
    for h in range(heads):
        g = h // (heads // kv)
        mine, group = slice(h * dim, (h + 1) * dim), slice(g * dim, (g + 1) * dim)
        scores = _turn(q[:, mine], config) @ _turn(k[:, group], config).T / math.sqrt(dim)
        outs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, group])
    x = residual + project("o", torch.cat(outs, -1))
    y = _norm(x, t[f"{prefix}.post_attention_layernorm.weight"], config["rms_norm_eps"])
    gate, up = y @ t[f"{prefix}.mlp.gate_proj.weight"].T, y @ t[f"{prefix}.mlp.up_proj.weight"].T
    return x + (F.silu(gate) * up) @ t[f"{prefix}.mlp.down_proj.weight"].T


def reference(case: Case, target: Any, ids: list[int], drafted: list[int]) -> Tensor:
    """Logits over the target's vocabulary after ``ids`` and each of ``drafted`` in turn: [1 +
    len(drafted), vocab]."""
    config, eps = case.config, case.config["rms_norm_eps"]
    t = {
        k.removeprefix("model.").replace("midlayer.", "layers.0."): v
        for k, v in case.tensors.items()
    }
    embedding = t.get("embed_tokens.weight", target.get_input_embeddings().weight)
    old = "layers.0.hidden_norm.weight" not in t
    with torch.no_grad():
        states = _states(target, ids)
        fused = [states[tap][: len(ids) - 1] for tap in case.taps]
        if config.get("fc_norm"):
            fused = [_norm(h, t[f"fc_norm.{i}.weight"], eps) for i, h in enumerate(fused)]
        features = torch.cat(fused, -1)
        if (config.get("eagle_config") or {}).get("norm_before_fc"):
            features = _norm(features, t["input_norm.weight"], eps)
        fuses = not old and "fc.weight" in t
        rows = list(F.linear(features, t["fc.weight"], t.get("fc.bias")) if fuses else features)
        logits = []
        for count in range(len(drafted) + 1):
            e, h = embedding[[*ids[1:], *drafted[:count]]], torch.stack(rows)
            if old:
                x = F.linear(torch.cat([e, h], -1), t["fc.weight"], t.get("fc.bias"))
                out = _reference_layer(x, x, t, "layers.0", config)
            else:
                normed = _norm(h, t["layers.0.hidden_norm.weight"], eps)
                x = torch.cat([_norm(e, t["layers.0.input_layernorm.weight"], eps), normed], -1)
                out = _reference_layer(
                    x, normed if config.get("norm_before_residual") else h, t, "layers.0", config
                )
            if "layers.1.mlp.up_proj.weight" in t:
                x = _norm(out, t["layers.1.input_layernorm.weight"], eps)
                out = _reference_layer(x, out, t, "layers.1", config)
            last = out[-1] if old else _norm(out[-1], t["norm.weight"], eps)
            found = t.get("lm_head.weight", target.get_output_embeddings().weight) @ last
            if "d2t" in t:
                full = torch.full((VOCAB,), -torch.inf)
                for i, value in enumerate(found):
                    full[i + int(t["d2t"][i])] = value
                found = full
            logits.append(found)
            rows.append(last if config.get("norm_output") else out[-1])
    return torch.stack(logits)


def _states(target: Any, ids: list[int]) -> dict[int, Tensor]:
    """Hidden states by tap, from transformers' own capture; its last is after the final norm, so
    the layer before is run by hand."""
    layers: list[Tensor] = []
    body = target.model if hasattr(target, "model") else target.transformer
    last = (body.layers if hasattr(body, "layers") else body.h)[-1]
    hook = last.register_forward_hook(
        lambda m, a, out: layers.append((out[0] if isinstance(out, tuple) else out)[0])
    )
    found = target(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    return {i: h[0] for i, h in enumerate(found[:-1])} | {
        len(found) - 1: layers[0],
        FINAL: found[-1][0],
    }


@pytest.fixture(scope="module")
def plain() -> Any:
    """The target as transformers has it."""
    return tiny_model("llama", VOCAB, hidden=HIDDEN, layers=LAYERS)


@pytest.fixture(scope="module")
def target() -> CausalModel:
    """The target as the runtime has it, with every tap."""
    model = CausalModel(tiny_model("llama", VOCAB, hidden=HIDDEN, layers=LAYERS), "target")
    model.taps = (*range(LAYERS + 1), FINAL)
    return model


def _ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _load(case: Case, folder: Path, target: CausalModel) -> EagleHead:
    return load_head(
        str(case.write(folder)), name="head", target=target, device=CPU, dtype=torch.float32
    )


def head_after(
    head: EagleHead, text: list[int], features: Tensor, drafted: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Logits [vocab] and the output [1, hidden_size] of a head after a text with the target's
    ``features`` and drafted tokens, each on the output before it."""
    head.reserve(len(text) + len(drafted))
    fed = features[: len(text) - 1]
    logits, out = head.chain(torch.tensor(text[1:]), 1, logits=1, hidden=fed)
    for at, token in enumerate(drafted, len(text)):
        given, place = torch.tensor([[token], [at]])
        seen = causal_mask(torch.tensor([at]), at + 1)
        seen[:, 0] = False
        logits, out = head.run(given, place, place, seen, logits=1, hidden=out[-1:], recurrent=True)
    return logits[0], out[-1:]


def _close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("form", CASES)
def test_every_form_computes_what_its_format_says(
    form: str, tmp_path: Path, plain: Any, target: CausalModel
) -> None:
    case = CASES[form]()
    head = _load(case, tmp_path, target)
    assert is_head(str(tmp_path))
    assert head.taps == case.taps
    assert (head.hidden_size, head.feature_size) == (HIDDEN, len(case.taps) * HIDDEN)
    assert (head.vocab_size, head.max_positions) == (VOCAB, target.max_positions)
    ids, drafted = _ids(60), _ids(4, 1)
    wanted = reference(case, plain, ids, drafted)
    target.reserve(len(ids))
    target.read(torch.tensor(ids), 0)
    features = target.tapped[:, columns(target, head)]
    for count in range(len(drafted) + 1):
        _close(head_after(head, ids, features, drafted[:count])[0], wanted[count])
    at = 1  # the text in uneven pieces
    for width in (20, 1, 38):
        fed = features[at - 1 : at - 1 + width]
        logits, _ = head.chain(torch.tensor(ids[at : at + width]), at, logits=1, hidden=fed)
        at += width
    assert at == len(ids)
    _close(logits[0], wanted[0])


def test_training_goes_through_what_drafting_computes(
    target: CausalModel, plain: Any, tmp_path: Path
) -> None:
    """The trainer's several steps over a text at once, against the runtime's head on the checkpoint
    that the trainer would publish."""
    torch.manual_seed(0)
    trained = Head(plain.config)
    begin_as_target(trained, plain)
    config = BASE | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
    }
    head = _load(Case(config, dict(trained.state_dict()), TAPS), tmp_path, target)
    unroller = Unroller(plain, trained)
    ids = _ids(20)
    texts = torch.tensor([ids, _ids(20, 9)])
    _, features = unroller.teacher(texts)
    with torch.no_grad():
        steps = list(unroller.steps(texts, features, 4))
        for j, hidden in enumerate(steps):
            logits = unroller.logits(hidden)[0]
            for row in range(j, 19, 3):
                text, drafted = ids[: row + 2 - j], ids[row + 2 - j : row + 2]
                _close(logits[row], head_after(head, text, features[0], drafted)[0])


def _without(key: str) -> Callable[[Case], None]:
    return lambda case: case.tensors.__delitem__(key)


def _set(**values: Any) -> Callable[[Case], None]:
    return lambda case: case.config.update(values)


def _put(key: str, tensor: Tensor) -> Callable[[Case], None]:
    return lambda case: case.tensors.update({key: tensor})


ONES = torch.ones(HIDDEN)
ERRORS: dict[str, tuple[Callable[[Case], Any], str]] = {
    "width": (_set(target_hidden_size=64), "states of width 64, the target's are 48 wide"),
    "vocabulary": (_set(vocab_size=301), "a vocabulary of 301 tokens, the target one of 300"),
    "rows": (_set(draft_vocab_size=41), "no d2t for its vocabulary of 41 tokens"),
    "d2t": (_put("d2t", torch.full((40,), VOCAB)), "d2t does not map"),
    "d2t to one token": (_put("d2t", -torch.arange(40)), "d2t does not map the head's 40 tokens"),
    "d2t never filled": (
        _put("d2t", torch.zeros(40, dtype=torch.int64)),
        "its d2t and t2d name different tokens .*, the first is 0, which d2t has, not t2d",
    ),
    "d2t of ids": (
        lambda case: case.tensors.update(
            d2t=torch.arange(100, 140), t2d=(torch.arange(VOCAB) - 119.5).abs() < 20
        ),
        "name different tokens .*; d2t must hold the id of each minus its row",
    ),
    "d2t of no rows": (
        lambda case: (
            case.config.update(draft_vocab_size=VOCAB),
            case.tensors.pop("lm_head.weight"),
            case.tensors.update(
                d2t=VOCAB - 1 - 2 * torch.arange(VOCAB), t2d=torch.ones(VOCAB, dtype=torch.bool)
            ),
        ),
        "it has a d2t, and no lm_head.weight of its own",
    ),
    "too many states named": (
        _set(target_layer_ids=[1, 2, 3, 4, 5]),
        "fc.weight takes 3 hidden states .*, and target_layer_ids of config.json names 5",
    ),
    "too many states counted": (
        _set(eagle_config={"num_aux_hidden_states": 5}),
        r"reads 5 hidden states \(eagle_config.num_aux_hidden_states\), and config.json names none",
    ),
    "states unnamed": (
        _put("fc.weight", torch.ones(HIDDEN, 5 * HIDDEN)),
        rf"fc.weight takes 5 hidden states .*, and config.json names none \({IDS}\)",
    ),
    "states by other names": (
        _set(target_layer_ids=[1, 2, 3], eagle_config={"layer_ids": [1, 2, 4]}),
        r"other hidden states twice: eagle_config.layer_ids \[1, 2, 4\] and target_layer_ids \[1, ",
    ),
    "layers": (_set(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), "target has states 0 to 7"),
    "missing fc": (_without("fc.weight"), 'tensors .*Missing key.*"fc.weight"'),
    "fc of no use": (
        _set(eagle_config={"use_aux_hidden_state": False}),
        'tensors .*Unexpected key.*"fc.weight"',
    ),
    "a layer that is not there": (_set(num_hidden_layers=2), 'tensors .*"layers.1.qkv.weight"'),
    "norms of another kind": (
        _set(eagle_config={"use_mtp_layernorm": True}),
        "use_mtp_layernorm true, which is of a kind of head that is not known",
    ),
    "no last norm": (_set(use_last_layernorm=False), "use_last_layernorm false"),
    "missing d2t": (_without("d2t"), "no d2t for its vocabulary of 40 tokens"),
    "shape": (
        _put("midlayer.mlp.down_proj.weight", torch.ones(HIDDEN, 40)),
        "tensors .*size mismatch for layers.0.down_proj.weight",
    ),
    "unknown": (_put("medusa_head.0.weight", ONES), 'Unexpected key.*"medusa_head.0.weight"'),
    "fc_norm unsaid": (_put("model.fc_norm.0.weight", ONES), 'Unexpected key.*"fc_norm.0.weight"'),
    "input_norm unsaid": (_put("input_norm.weight", ONES), 'Unexpected key.*"input_norm.weight"'),
    "a norm that is not there": (_set(norm_before_fc=True), 'Missing key.*"input_norm.weight"'),
    "a word for a switch": (_set(norm_output="false"), "norm_output 'false'; it must be true or"),
    "said twice": (_set(norm_output=True, eagle_config={"norm_output": False}), "True and False; "),
    "another activation": (_set(hidden_act="gelu"), "hidden_act is 'gelu'; only 'silu' is read"),
    "another kind": (_set(speculators_model_type="peagle"), "of which 'eagle3' .* is read"),
    "no layer": (_set(speculators_model_type="eagle3"), "with a transformer_layer_config is read"),
    "an order unsaid": (
        _set(speculators_model_type="eagle3", transformer_layer_config={"hidden_size": 48}),
        "says no norm_before_residual; add what was trained",
    ),
    "no sizes": (_set(intermediate_size=None), "tensors .*size mismatch for layers.0.gate_up"),
    "rope": (_set(rope_scaling={"rope_type": "spiral"}), "cannot load .*spiral"),
    "no rotation": (_set(num_attention_heads=16, num_key_value_heads=8, head_dim=3), ""),
    "words for numbers": (_set(**{IDS: ["low", "middle", "high"]}), "a list of ids is expected"),
    "one number": (_set(eagle_config={IDS: 2}), f"eagle_config.{IDS} of config.json is 2; a list"),
    "other states twice": (
        _set(**{IDS: [2, 3, 5], "eagle_config": {IDS: [2, 3, 4]}}),
        rf"eagle_config.{IDS} \[2, 3, 4\] and {IDS} \[2, 3, 5\]",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_head_that_does_not_fit_is_refused_in_one_line(
    error: str, tmp_path: Path, target: CausalModel
) -> None:
    spoil, words = ERRORS[error]
    case = _eagle3(file="safetensors")
    spoil(case)
    with pytest.raises(PairError, match=f"^head: .*{words}"):
        _load(case, tmp_path, target)


@pytest.mark.parametrize(
    ("make", "spoil", "sizes", "words"),
    [
        (_eagle1, _without("fc.bias"), {}, 'Missing key.*"fc.bias"'),
        (_eagle1, _set(), {"hidden": 32}, "states of width 48, the target's are 32 wide"),
        (
            _eagle3_last_state,
            _set(),
            {"hidden": 32},
            "states of width 48, the target's are 32 wide",
        ),
        (_eagle3, _set(), {"layers": 2}, r"states \[2, 1, -1\]; the target has states 0 to 2"),
    ],
)
def test_heads_of_another_target_are_refused(
    make: Callable[[], Case],
    spoil: Callable[[Case], Any],
    sizes: dict[str, int],
    words: str,
    tmp_path: Path,
) -> None:
    case = make()
    spoil(case)
    model = tiny_model("llama", VOCAB, **({"hidden": HIDDEN, "layers": LAYERS} | sizes))
    with pytest.raises(PairError, match=words):
        _load(case, tmp_path, CausalModel(model, "target"))


def test_damaged_files_are_told_in_one_line(tmp_path: Path, target: CausalModel) -> None:
    case = _eagle3(file="safetensors")
    weights = case.write(tmp_path) / "model.safetensors"
    load = partial(load_head, name="head", target=target, device=CPU, dtype=torch.float32)
    weights.write_bytes(b"\x10" * 40)
    with pytest.raises(PairError, match=r"^head: cannot load"):
        load(str(tmp_path))
    weights.unlink()
    with pytest.raises(PairError, match=r"^head: no weights at"):
        load(str(tmp_path))


def test_language_models_are_no_heads_and_telling_needs_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("llama", "gpt2"):
        model = tiny_model(kind, VOCAB)
        model.save_pretrained(tmp_path / kind)
        assert not is_head(str(tmp_path / kind))
        (tmp_path / kind / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / kind / "pytorch_model.bin")
        assert not is_head(str(tmp_path / kind))
    assert not is_head(str(tmp_path / "nothing"))
    assert not is_head("HuggingFaceTB/SmolLM-135M")
    assert is_head("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
    folder = _eagle1().write(tmp_path / "head")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert is_head(str(folder))


@pytest.mark.parametrize("folder", ["eagle3-experiments/one", "plain/one"])
@pytest.mark.parametrize(
    ("make", "method"),
    [(_eagle1, "eagle"), (_eagle1_own_output, "eagle"), (_eagle3_without_lm_head, "eagle3")],
)
def test_engines_are_told_a_heads_kind_by_what_it_holds(
    tmp_path: Path, folder: str, make: Callable[[], Case], method: str
) -> None:
    """Not by its path; also where the configuration does not say EAGLE-3."""
    case = make()
    case.config["architectures"] = ["LlamaForCausalLM"]
    for case.file in ("bin", "safetensors"):
        spec = PairSpec(target="t", drafts={"head": str(case.write(tmp_path / case.file / folder))})
        policy = parse_policy(chain("head", 3))
        assert engine_settings(policy, spec, "vllm")["method"] == method
        settings = engine_settings(policy, spec, "sglang")
        assert settings["speculative_algorithm"] == method.upper()


def test_a_name_on_a_hub_tells_a_heads_kind_until_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    spec = PairSpec(target="t", drafts={"head": "some/eagle3-head"})
    cached = tmp_path / "models--some--eagle3-head"

    def method() -> str:
        return str(engine_settings(parse_policy(chain("head", 3)), spec, "vllm")["method"])

    assert method() == "eagle3"
    folder = _eagle1().write(cached / "snapshots" / "0")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0")
    assert method() == "eagle"
    (folder / "pytorch_model.bin").unlink()
    assert method() == "eagle3"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_taps_are_the_hidden_states_of_any_architecture(kind: str) -> None:
    plain = tiny_model(kind, VOCAB, layers=4, positions=1024)
    model = CausalModel(tiny_model(kind, VOCAB, layers=4, positions=1024), "target")
    model.reserve(700)
    ids = _ids(600)
    last = 4 if kind == "llama" else 3  # what the last layer gives is read in fused passes alone
    taps = (0, 2, last, FINAL)
    with torch.no_grad():
        states = _states(plain, ids)
    wanted = torch.cat([states[tap] for tap in taps], -1)
    model.taps = taps
    assert model.taps == taps
    model.read(torch.tensor(ids), 0)
    _close(model.tapped, wanted)
    model.chain(torch.tensor(ids[40:50]), 40, logits=1)
    _close(model.tapped, wanted[40:50])
    mask = torch.zeros(2, 64, dtype=torch.bool)
    mask[0, :51] = mask[1, :51] = True
    mask[1, 60] = True
    model.read(torch.tensor(ids[:50]), 0)
    model.run(torch.tensor(ids[50:52]), torch.tensor([50, 51]), torch.tensor([50, 60]), mask)
    _close(model.tapped, wanted[50:52])
    model.taps = ()
    model.read(torch.tensor(ids[:5]), 0)
    assert model.tapped.shape == (5, 0)
    with pytest.raises(PairError, match=f"no hidden state {last + 1}"):
        model.taps = (last + 1,)


def pair_with_heads(folder: Path, layers: int = LAYERS, **heads: Case) -> Path:
    """The file of a tiny pair whose target has so many layers, with these heads among its
    drafts."""
    file = make_pair(folder)
    vocab = len(tokenizer(VOCAB))
    tiny_model("llama", vocab, hidden=HIDDEN, layers=layers).save_pretrained(folder / "target")
    document = json.loads(file.read_text())
    for name, case in heads.items():
        case.config |= {"vocab_size": vocab}
        case.write(folder / name)
        document["drafts"][name] = name
    file.write_text(json.dumps(document))
    return file


def test_a_pair_may_have_heads_beside_language_models(tmp_path: Path) -> None:
    without = load_pair(read_pair(str(pair_with_heads(tmp_path))), device="cpu")
    assert without.heads == {}
    assert without.target.taps == ()
    case = _eagle3_without_lm_head()
    case.config |= {"max_position_embeddings": 64}
    spec = read_pair(str(pair_with_heads(tmp_path, head=case)))
    spec.check()
    pair = load_pair(spec, device="cpu")
    assert pair.id != without.id
    assert pair.draft_names == spec.draft_names == ("near", "far", "head", "ngram")
    assert set(pair.drafts) == {"near", "far"}
    assert pair.target.taps == pair.heads["head"].taps == TAPS
    # A head's own maximum says how long its training texts were; it limits nothing.
    assert pair.max_positions == without.max_positions == 512
    assert load_pair(spec, device="cpu", drafts=["near"]).heads == {}
    case.config["vocab_size"] = 7
    case.write(tmp_path / "head")
    with pytest.raises(PairError, match="head: the head has a vocabulary of 7 tokens"):
        load_pair(spec, device="cpu")


def _eagle3_every_token() -> Case:
    """With an output row for each of the target's tokens, and none of another form."""
    case = _eagle3(19, "safetensors")
    case.config["draft_vocab_size"] = VOCAB
    case.tensors["lm_head.weight"] = _random(20)(VOCAB, HIDDEN) * 4
    for key in ("d2t", "t2d"):
        del case.tensors[key]
    return case


WHOLE = [_eagle1, _eagle1_own_output, _eagle3_without_lm_head, _eagle3_every_token]


@pytest.mark.parametrize("make", [*WHOLE, _eagle3_vllm])
def test_a_target_may_have_further_rows(
    make: Callable[[], Case], tmp_path: Path, plain: Any, target: CausalModel
) -> None:
    """Padding, or tokens that were added: a head proposes what it does for the target without them.
    It must know the others."""
    case, ids = make(), _ids(20)
    drafted = _ids(2, 1)
    wider = tiny_model("llama", VOCAB, hidden=HIDDEN, layers=LAYERS)
    wider.resize_token_embeddings(VOCAB + 20, mean_resizing=False)
    padded = CausalModel(wider, "target")
    padded.taps = target.taps
    folder = str(case.write(tmp_path))
    load = partial(load_head, folder, name="head", target=padded, device=CPU, dtype=torch.float32)
    head = load(ordinary=VOCAB - 4)
    padded.reserve(len(ids))
    padded.read(torch.tensor(ids), 0)
    logits, _ = head_after(head, ids, padded.tapped[:, columns(padded, head)], drafted)
    _close(logits[:VOCAB], reference(case, plain, ids, drafted)[-1])
    assert len(logits) == head.vocab_size == VOCAB + 20
    if "lm_head.weight" in case.tensors:
        assert logits[VOCAB:].isneginf().all()
    added = torch.tensor([VOCAB, VOCAB + 19])
    assert head.embedded(added).shape == (2, HIDDEN)
    with pytest.raises(PairError, match="a vocabulary of 300 tokens, the target one of 320"):
        load(ordinary=VOCAB + 1)
    with pytest.raises(PairError, match="a vocabulary of 300 tokens, the target one of 320"):
        load()

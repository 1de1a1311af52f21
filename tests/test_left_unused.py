"""Weights that the architecture of a checkpoint's config.json has no place for: refused where they
belong to what is run, named where they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import Door
from pairs import chain, tokenizer
from safetensors.torch import load_file, save_file
from test_models import SIZES
from transformers import Qwen2Config, Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from spectune.runtime.load_model import load_model
from spectune.runtime.models import CausalModel
from spectune.traces.errors import PairError

Tensors = dict[str, torch.Tensor]
GENERATE = ("generate", "def", "--max-new-tokens", "4")
LAYER = "model.layers.1"


@pytest.fixture
def folder(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy of the tiny pair, to be changed."""
    return Path(shutil.copytree(tiny_pair.parent, tmp_path / "pair"))


@pytest.fixture
def model(folder: Path) -> Path:
    """The target of :func:`folder`."""
    return folder / "target"


def load(folder: Path) -> CausalModel:
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    return load_model(str(folder), name="target", **place)


def put(folder: Path, tensors: Tensors) -> None:
    """Adds tensors to a model's weights."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def say(file: Path, **values: Any) -> None:
    """Sets keys of a JSON file, there or not; None takes one out."""
    document = json.loads(file.read_text()) if file.exists() else {}
    document = {k: v for k, v in (document | values).items() if v is not None}
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("make", "lost"),
    [(Qwen2Config, "self_attn.k_proj.bias"), (Qwen3Config, "self_attn.k_norm.weight")],
)
def test_a_model_under_another_ones_name_is_refused(
    tmp_path: Path, make: type[Any], lost: str
) -> None:
    """As it was trained it is loaded; called a Llama, which has no place for some weights, it
    would write other texts. The command says so, too."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make(**SIZES)).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path).notes == ()
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    say(tmp_path / "config.json", **named, attention_bias=False, layer_types=None)
    line = Door(None).refused(*GENERATE, "--target", tmp_path)
    assert (
        f"{tmp_path} has model.layers.0.{lost}, for which LlamaForCausalLM has no place (" in line
    )


@pytest.mark.parametrize(
    ("lost", "pickled"),
    [
        (f"{LAYER}.self_attn.q_proj.lora_A.default.weight", False),
        (f"{LAYER}.self_attn.sinks", False),
        ("model.norm.bias", True),
        ("model.embed_positions.weight", False),
        ("lm_head.bias", False),
    ],
)
def test_weights_of_what_is_run_without_a_place_are_refused(
    model: Path, lost: str, pickled: bool
) -> None:
    put(model, {lost: torch.ones(3), "model.layers.2.mlp.up_proj.weight": torch.ones(3)})
    if pickled:
        weights = model / "model.safetensors"
        torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
        weights.unlink()
    said = f"^target: .* has {lost}, for which LlamaForCausalLM has no place .1 such tensors.: "
    with pytest.raises(PairError, match=said) as told:
        load(model)
    assert "\n" not in str(told.value)


def test_weights_that_the_checkpoint_lacks_are_refused(folder: Path) -> None:
    """transformers would draw them at random."""
    file = folder / "target" / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{LAYER}.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    line = Door(None).refused(*GENERATE, "--pair", folder)
    assert f"lack {LAYER}.mlp.up_proj.weight, which config.json asks for (1 such tensors)" in line


BESIDE: Tensors = {
    "model.layers.2.self_attn.q_proj.weight": torch.ones(3, 3),
    "mtp.layers.0.mlp.up_proj.weight": torch.ones(3, 3),
    "model.visual.blocks.0.norm.weight": torch.ones(3),
    "v_head.summary.weight": torch.ones(3),
}
"""Layers that predict further tokens, a tower of images, a head of values."""
COMPUTED: Tensors = {
    f"{LAYER}.self_attn.rotary_emb.inv_freq": torch.ones(6),
    f"{LAYER}.self_attn.masked_bias": torch.tensor(-1e4),
}
SCALES: Tensors = {
    f"{LAYER}.self_attn.{name}": torch.tensor(0.05)
    for name in ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.output_scale")
}
CACHE = "target: its cache is kept in float32, not quantized"
CACHE_ALONE = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("tensors", "quantization", "notes"),
    [
        (BESIDE, None, (f"target leaves weights unused: 4 tensors, the first {min(BESIDE)}",)),
        (COMPUTED, None, ()),
        (SCALES, None, (f"{CACHE} (unused: 4 tensors, the first {min(SCALES)})",)),
        ({}, CACHE_ALONE, (CACHE,)),
        ({}, {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, (CACHE,)),
    ],
    ids=["beside", "computed", "scales", "modelopt", "compressed-tensors"],
)
def test_what_changes_no_text_is_loaded_and_named(
    model: Path, tensors: Tensors, quantization: dict[str, Any] | None, notes: tuple[str, ...]
) -> None:
    before = load(model)
    put(model, tensors)
    say(model / "config.json", quantization_config=quantization)
    after = load(model)
    assert (before.notes, after.notes) == ((), notes)
    ids = torch.arange(1, 40)
    for each in (before, after):
        each.reserve(len(ids))
    one, other = (each.chain(ids, 0, logits=1)[0] for each in (before, after))
    torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_commands_refuse_and_name_what_is_left_unused(folder: Path, tmp_path: Path) -> None:
    """Of the target and of drafts."""
    (tmp_path / "w.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    options = ("--pair", folder, "--workload", tmp_path / "w.jsonl", "--max-new-tokens", 4)
    run = ("run", "--policy", json.dumps(chain("near", 2)), *options, "--no-store")
    for name in ("target", "near"):
        put(folder / name, BESIDE)
    said = Door(str(tmp_path / "runs.db")).call(*run).stderr.splitlines()
    for name in ("target", "near"):
        line = f"{name} leaves weights unused: 4 tensors, the first {min(BESIDE)}"
        assert said.count(line) == 1, said
    put(folder / "near", {"model.norm.bias": torch.ones(3)})
    line = Door(str(tmp_path / "runs.db")).error(*run)
    assert "near has model.norm.bias, for which LlamaForCausalLM has no place (1 such" in line


@pytest.mark.parametrize("algorithm", ["quant_algo", "config_groups"])
def test_a_quantization_of_weights_and_cache_is_refused(model: Path, algorithm: str) -> None:
    say(model / "config.json", quantization_config={**CACHE_ALONE, algorithm: "FP8"})
    with pytest.raises(PairError, match="is quantized by modelopt, which transformers does not"):
        load(model)

"""Fused passes of Llama-like models in float64 against the forward pass of transformers; what is
not Llama-like runs the code of transformers."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from pairs import tiny_model
from torch import Tensor, nn
from transformers import (
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers.models.auto import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectune.runtime import fused
from spectune.runtime.cuda import launch, layers
from spectune.runtime.drafts.eagle_head import EagleHead, HeadNet, HeadShape
from spectune.runtime.fused import UNLIKE
from spectune.runtime.models import FINAL, CausalModel

VOCAB, LAYERS, TEXT = 300, 4, 23
TREE = [(-1, 7), (-1, 19), (0, 3), (2, 90), (1, 7), (4, 250)]
"""(parent, token) of nodes behind the text."""


def tiny(config: type[PreTrainedConfig], **own: Any) -> Any:
    """A random model in float64, whose norms and biases are not those that training begins with."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config(**sizes | own)).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 2 else 0.3))
    return model


def text() -> Tensor:
    return torch.arange(TEXT).square() % VOCAB


@torch.no_grad()
def theirs(model: Any, ids: list[int]) -> list[Tensor]:
    """What each layer reads, and the last hidden states, by transformers."""
    out = model.model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    return [states[0] for states in out.hidden_states]


def tree_states(model: CausalModel) -> tuple[Tensor, Tensor]:
    """Last hidden states of a text, read in two parts, and of a tree behind it, and their taps."""
    ids = text()
    model.reserve(64)
    model.taps = (0, 2, FINAL)
    states, taps = [], []
    for start, stop in ((0, 9), (9, TEXT)):
        states.append(model.chain(ids[start:stop], start, logits=0)[1])
        taps.append(model.tapped)
    mask = torch.zeros(len(TREE), TEXT + len(TREE), dtype=torch.bool)
    mask[:, :TEXT] = True
    depths = []
    for node, (parent, _) in enumerate(TREE):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, TEXT + node] = True
        depths.append(0 if parent < 0 else depths[parent] + 1)
    nodes, slots = torch.tensor([token for _, token in TREE]), torch.arange(len(TREE)) + TEXT
    positions = torch.tensor(depths) + TEXT
    states.append(model.run(nodes, positions, slots, mask, logits=0)[1])
    taps.append(model.tapped)
    return torch.cat(states), torch.cat(taps)


def expected_states(model: Any) -> tuple[Tensor, Tensor]:
    """The same by transformers, a text for every node of the tree."""
    ids = text().tolist()
    layers = [[x] for x in theirs(model, ids)]
    paths: list[list[int]] = []
    for parent, token in TREE:
        paths.append([*(paths[parent] if parent >= 0 else []), token])
        for rows, states in zip(layers, theirs(model, ids + paths[-1]), strict=True):
            rows.append(states[-1:])
    read = [torch.cat(rows) for rows in layers]
    return read[-1], torch.cat([read[0], read[2], read[-1]], -1)


LIKE_LLAMA: list[tuple[type[PreTrainedConfig], dict[str, Any]]] = [
    (LlamaConfig, {}),
    (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    (LlamaConfig, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    (MistralConfig, {"head_dim": 20}),
    (Qwen2Config, {}),
    (Qwen3Config, {"head_dim": 32}),
    (SeedOssConfig, {"head_dim": 12}),
]
LAYER, AROUND = "layer {} gives other numbers", "what lies around its layers"
OTHER: list[tuple[type[PreTrainedConfig], dict[str, Any], str]] = [
    (GraniteConfig, {"residual_multiplier": 0.9}, LAYER.format(0)),
    (GraniteConfig, {"embedding_multiplier": 1.1}, AROUND),
    (GemmaConfig, {"head_dim": 12}, LAYER.format(0)),  # norms weigh by 1 + weight
    (SmolLM3Config, {}, LAYER.format(3)),  # one layer in four turns nothing
    (Olmo2Config, {}, UNLIKE),  # norms after attention
]


@pytest.mark.parametrize(("config", "own"), LIKE_LLAMA)
def test_fused_passes_give_what_transformers_gives(
    config: type[PreTrainedConfig], own: dict[str, Any]
) -> None:
    """Of prompts in parts and of trees, and for heads that read inner states."""
    model = tiny(config, **own)
    expected = expected_states(copy.deepcopy(model))
    loaded = CausalModel(model, "target")
    assert loaded.fused is not None
    for ours, exact in zip(tree_states(loaded), expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("config", "own", "why"), OTHER)
def test_models_that_differ_from_a_llama_run_their_own_code(
    config: type[PreTrainedConfig], own: dict[str, Any], why: str
) -> None:
    model = tiny(config, **own)
    expected = expected_states(copy.deepcopy(model))
    loaded = CausalModel(model, "target")
    assert loaded.fused is None
    assert why in loaded.unfused
    for ours, exact in zip(tree_states(loaded), expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


def test_a_gpt2_is_left_as_it_is() -> None:
    model = tiny_model("gpt2", VOCAB)
    before = {name: x.data_ptr() for name, x in model.named_parameters()}
    assert CausalModel(model, "target").fused is None
    assert {name: x.data_ptr() for name, x in model.named_parameters()} == before


def memory(model: Any) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def test_fused_weights_take_the_place_of_the_models() -> None:
    """No memory beside the model's own, whose parameters and forward pass are as before; what is
    written to a parameter, fused passes read."""
    model = tiny(Qwen3Config)
    other = copy.deepcopy(model)
    size, names = memory(model), [name for name, _ in model.named_parameters()]
    loaded = CausalModel(model, "target")
    assert loaded.fused is not None
    assert memory(model) == size
    assert [name for name, _ in model.named_parameters()] == names
    held = {x.untyped_storage().data_ptr() for x in model.parameters()}
    for layer in loaded.fused.layers:
        for weight, _ in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert weight.untyped_storage().data_ptr() in held
    other.requires_grad_(False)
    logits, expected = (x(text()[None], use_cache=False).logits for x in (model, other))
    assert torch.equal(logits, expected)
    for changed in (model, other):
        for name in ("q", "k", "v"):
            getattr(changed.model.layers[1].self_attn, f"{name}_proj").weight.mul_(1.5)
        changed.model.layers[2].mlp.up_proj.weight.neg_()
    exact = expected_states(other)[0]
    torch.testing.assert_close(tree_states(loaded)[0], exact, rtol=0, atol=1e-12)


class Packed(nn.Linear):
    """As quantized matrices are: of a class of their own."""


def test_weights_that_are_quantized_or_shared_are_left_alone() -> None:
    for change in ("packed", "shared"):
        model = tiny(LlamaConfig)
        mlp = model.model.layers[1].mlp
        if change == "packed":
            mlp.up_proj.__class__ = Packed
        else:
            mlp.up_proj.weight = model.model.layers[2].mlp.up_proj.weight
        expected = expected_states(copy.deepcopy(model))[0]
        loaded = CausalModel(model, "target")
        assert loaded.fused is None
        torch.testing.assert_close(tree_states(loaded)[0], expected, rtol=0, atol=1e-12)


def test_one_switch_leaves_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal results."""
    by_fused = tree_states(CausalModel(tiny(Qwen3Config), "target"))
    monkeypatch.setenv("SPECTUNE_KERNELS", "0")
    plain = CausalModel(tiny(Qwen3Config), "target")
    assert (plain.fused, plain.unfused) == (None, "")
    for ours, exact in zip(by_fused, tree_states(plain), strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


@pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kernel", ["add_norm", "rotate_and_write", "swiglu", "split_attention"])
def test_a_kernel_that_does_not_fit_leaves_plain_torch(
    kernel: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found out when a model is loaded, and told once."""
    monkeypatch.setattr(launch, "_FAILED", set())
    with monkeypatch.context() as patch:
        patch.setenv("SPECTUNE_KERNELS", "0")
        plain = tree_states(CausalModel(tiny(LlamaConfig).float(), "target"))

    def fails(*_: Any) -> None:
        raise MemoryError("out of resource: shared memory\nRequired: 131072")

    module = fused if kernel == "split_attention" else layers
    monkeypatch.setattr(module, kernel, fails)
    for _ in range(2):
        loaded = CausalModel(tiny(LlamaConfig).float(), "target")
        assert loaded.fused is not None
        torch.testing.assert_close(tree_states(loaded), plain, rtol=0, atol=1e-4)
    assert caplog.messages == ["Triton kernels are not used: out of resource: shared memory"]


@pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
@pytest.mark.parametrize(
    ("config", "own"),
    [
        (LlamaConfig, {}),
        (Qwen3Config, {"head_dim": 20, "hidden_act": "gelu"}),
        (MistralConfig, {"sliding_window": 8}),
    ],
)
def test_passes_of_kernels_are_those_of_torch(
    config: type[PreTrainedConfig], own: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """In Triton's interpreter, in float32; in float64 no kernel runs, and nothing changes."""
    model = tiny(config, **own, num_hidden_layers=2)
    rounded, exact = (
        tree_states(CausalModel(copy.deepcopy(model).to(dtype), "target"))
        for dtype in (torch.float32, torch.float64)
    )
    request.getfixturevalue("interpreted")
    unchanged = tree_states(CausalModel(copy.deepcopy(model), "target"))
    loaded = CausalModel(model.float(), "target")
    assert loaded.fused is not None
    ours = tree_states(loaded)
    assert not torch.equal(ours[0], rounded[0])  # kernels round in an order of their own
    for i in (0, 1):
        assert torch.equal(unchanged[i], exact[i])
        torch.testing.assert_close(ours[i].double(), exact[i], rtol=0, atol=2e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
@pytest.mark.usefixtures("interpreted")
def test_passes_of_products_that_take_in_the_rest_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the switch is on; taps are as they were."""
    model = tiny(LlamaConfig, num_hidden_layers=2, attention_bias=True)
    exact = tree_states(CausalModel(copy.deepcopy(model), "target"))
    usual = tree_states(CausalModel(copy.deepcopy(model).float(), "target"))
    monkeypatch.setenv("SPECTUNE_SKINNY", "1")
    joined = tree_states(CausalModel(model.float(), "target"))
    assert not torch.equal(joined[0], usual[0])  # it sums in another order
    for ours, theirs in zip(joined, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "rope", [{}, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "dynamic", "factor": 2.0}]
)
def test_turns_that_are_looked_up_are_those_that_are_computed(
    rope: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beyond the positions that a scaled model was trained on; dynamic ones are computed."""
    parameters = {"rope_theta": 10_000.0, "rope_type": "default", **rope}
    model = tiny(LlamaConfig, num_hidden_layers=1, rope_parameters=parameters)
    usual = CausalModel(copy.deepcopy(model), "target")
    monkeypatch.setenv("SPECTUNE_SKINNY", "1")
    looked_up = CausalModel(model, "target")
    for each in (usual, looked_up):
        each.reserve(600)
    computed: list[Any] = []
    looked_up.model.model.rotary_emb.register_forward_hook(lambda *_: computed.append(1))
    ours, exact = (each.chain(torch.arange(40), 500, logits=0)[1] for each in (looked_up, usual))
    assert torch.equal(ours, exact)
    assert bool(computed) == (rope.get("rope_type") == "dynamic")


@pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
def test_a_heads_passes_of_kernels_are_those_of_torch(request: pytest.FixtureRequest) -> None:
    """A prompt with the target's states, then a level of a tree with the head's own."""
    model = tiny(LlamaConfig, num_hidden_layers=2)
    shape = HeadShape(True, 48, 144, 96, heads=4, kv_heads=2, head_dim=12, eps=1e-5)
    net, generator = HeadNet(shape).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    features = torch.randn(TEXT, 144, generator=generator).double()

    def states(dtype: torch.dtype) -> Tensor:
        target = CausalModel(copy.deepcopy(model).to(dtype), "target")
        head = EagleHead(
            copy.deepcopy(net).to(dtype),
            target,
            name="head",
            taps=(0, 1, 2),
            convention="default",
            rotary=LlamaRotaryEmbedding(model.config),
        )
        head.reserve(64)
        _, read = head.chain(text(), 1, logits=0, hidden=features.to(dtype))
        mask = torch.eye(3, TEXT + 4, dtype=torch.bool).roll(TEXT + 1, 1)
        mask[:, 1 : TEXT + 1] = True
        slots = torch.arange(TEXT + 1, TEXT + 4)
        positions, before = torch.full((3,), TEXT + 1), read[-1:].expand(3, -1)
        nodes = head.run(slots, positions, slots, mask, logits=0, hidden=before, recurrent=True)[1]
        return torch.cat([read, nodes])

    exact = states(torch.float64)
    rounded = states(torch.float32)
    request.getfixturevalue("interpreted")
    assert torch.equal(states(torch.float64), exact)
    ours = states(torch.float32)
    assert not torch.equal(ours, rounded)
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-5)

"""Which causal language models are taken, and up to which length: tiny random ones of real
architectures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import chain, make_pair, tiny_model, tokenizer
from safetensors.torch import load_file, save_file
from test_heads import _eagle3, pair_with_heads
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback
from tokenizers.models import BPE
from torch import nn
from transformers import (
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteSWAConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    NanoChatConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)
from transformers.models.auto import AutoConfig, AutoModelForCausalLM

from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime.decoder import Decoder
from spectune.runtime.load_model import load_model
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.recording.panoramas import record_panorama
from spectune.runtime.text_codec import TextCodec, load_codec
from spectune.traces.errors import PairError
from spectune.traces.schema import Request, Sampling

SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FULL = {"layer_types": ["full_attention"] * 2}
LONG = {"rope_type": "longrope", "rope_theta": 1e4}


def loaded(folder: Path, make: type[PreTrainedConfig], **own: Any) -> Any:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make(**SIZES | own)).save_pretrained(folder)
    return load_model(str(folder), name="target", device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize(
    ("make", "own", "said"),
    [
        (GraniteConfig, {"logits_scaling": 8.0}, "scaled or capped"),
        (CohereConfig, {"logit_scale": 0.0625}, "scaled or capped"),
        (NanoChatConfig, {"final_logit_softcapping": 0.5}, "scaled or capped"),
        (
            GptOssConfig,
            {**FULL, "head_dim": 12, "num_local_experts": 2},
            "is not reproduced here: it uses",
        ),
        (
            GraniteSWAConfig,
            {**FULL, "logits_scaling": 1.0},
            "is not reproduced here: it uses s_aux",
        ),
        (BloomConfig, {"n_layer": 2, "n_head": 4}, "has an attention of its own"),
        (Gemma2Config, {"head_dim": 12}, "attention of kind soft-capped"),
        (Llama4TextConfig, {"head_dim": 12}, "attention of kind chunked_attention"),
    ],
)
def test_models_that_would_give_other_texts_are_refused(
    tmp_path: Path, make: type[PreTrainedConfig], own: dict[str, Any], said: str
) -> None:
    with pytest.raises(PairError, match=f"^target: .*{said}"):
        loaded(tmp_path, make, **own)


class OtherConfig(LlamaConfig):
    model_type = "llama_of_an_eager_trait"


class OtherForCausalLM(LlamaForCausalLM):
    """A Llama that turns its keys around, in its eager attention alone."""

    config_class = OtherConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.k_proj.register_forward_hook(self._turned)

    def _turned(self, _module: nn.Module, _args: Any, keys: torch.Tensor) -> torch.Tensor:
        return -keys if self.config._attn_implementation == "eager" else keys


AutoConfig.register(OtherConfig.model_type, OtherConfig)
AutoModelForCausalLM.register(OtherConfig, OtherForCausalLM)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_whatever_else_attention_does_is_told_by_transformers_own(
    tmp_path: Path, dtype: str
) -> None:
    """A target and a draft whose attention is another in transformers' eager passes: neither is
    run, in any dtype; as the Llamas that they are without it, both are."""
    make_pair(tmp_path)
    assert load_pair(read_pair(str(tmp_path)), dtype=dtype).draft_names == ("near", "far", "ngram")
    for name in ("near", "target"):
        file = tmp_path / name / "config.json"
        document = json.loads(file.read_text()) | {"model_type": OtherConfig.model_type}
        file.write_text(json.dumps(document | {"architectures": ["OtherForCausalLM"]}))
        with pytest.raises(PairError, match=f"^{name}: the attention of .*{name} is not reprod"):
            load_pair(read_pair(str(tmp_path)), dtype=dtype)


EIGHT = {"sliding_window": 8}
SECOND_SLIDES = {**EIGHT, "use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("make", "own", "fused"),
    [
        (MistralConfig, EIGHT, True),
        (Qwen2Config, SECOND_SLIDES, True),
        (Qwen3Config, {**SECOND_SLIDES, "head_dim": 12}, True),
        (Phi3Config, EIGHT, False),
        (Starcoder2Config, EIGHT, False),
        (Olmo3Config, EIGHT, False),
        (Cohere2Config, {**EIGHT, "logit_scale": 1.0}, False),
        (Gemma2Config, {**EIGHT, "head_dim": 12, "attn_logit_softcapping": None,
                        "final_logit_softcapping": None}, False),
        (Gemma3TextConfig, {**EIGHT, "head_dim": 12}, False),
    ],
)  # fmt: skip
def test_sliding_layers_see_what_they_see_in_transformers(
    tmp_path: Path, make: type[PreTrainedConfig], own: dict[str, Any], fused: bool
) -> None:
    """A text of five windows, read in parts at an extent of its own."""
    target, ids = loaded(tmp_path, make, **own), torch.arange(40).square() % 300
    assert (target.fused is not None) == fused
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    target.reserve(60)
    target.read(ids[:25], 0, base=20)
    one = target.chain(ids[25:26], 25, logits=1, base=20)[0]
    rest = target.chain(ids[26:], 26, logits=14, base=20)[0]
    torch.testing.assert_close(torch.cat([one, rest]), expected[25:], rtol=0, atol=1e-5)


class SayingConfig(LlamaConfig):
    model_type = "llama_of_windows"


class SayingForCausalLM(LlamaForCausalLM):
    """A Llama whose layers say windows to their attention and have none in their masks."""

    config_class = SayingConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer, window in zip(self.model.layers, config.said, strict=True):
            layer.self_attn.register_forward_pre_hook(
                partial(self._saying, window), with_kwargs=True
            )

    @staticmethod
    def _saying(window: int, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"sliding_window": window}


AutoConfig.register(SayingConfig.model_type, SayingConfig)
AutoModelForCausalLM.register(SayingConfig, SayingForCausalLM)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([8, 16], r"windows of several sizes \(8, 16 tokens\)"),
        ([8, 8], "the attention of .* is not reproduced here"),
    ],
)
def test_windows_that_are_not_what_they_say_are_refused(
    tmp_path: Path, said: list[int], why: str
) -> None:
    with pytest.raises(PairError, match=f"^target: .*{why}"):
        loaded(tmp_path, SayingConfig, said=said)


PROJECTION = "model.layers.1.mlp.down_proj.weight"
"""A weight of a tiny Llama."""


def as_float8(tensors: dict[str, torch.Tensor]) -> None:
    """As NVIDIA's ModelOpt stores weights: float8, and a scale by which to multiply them."""
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        scale = tensors[name].abs().max() / 448.0
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale


def as_int8(tensors: dict[str, torch.Tensor]) -> None:
    tensors[PROJECTION] = (tensors[PROJECTION] * 50).to(torch.int8)


def with_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PROJECTION}_scale_inv"] = torch.full((1, 1), 0.5)


def with_input_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors[PROJECTION.replace("weight", "input_scale")] = torch.tensor(0.02)


def with_scales_of_no_weight(tensors: dict[str, torch.Tensor]) -> None:
    """As a checkpoint of text and images has them: of modules that a language model lacks."""
    tensors["logit_scale"] = torch.ones(1)
    tensors["vision.layers.0.layer_scale"] = torch.ones(8)


@pytest.mark.parametrize("name", ["target", "near"])
@pytest.mark.parametrize(
    ("change", "config", "pickled", "said"),
    [
        (as_float8, {}, False, "stores .* as F8_E4M3"),
        (as_float8, {}, True, "_scale, which nothing reads"),
        (as_float8, {"quant_method": "modelopt", "quant_algo": "FP8"}, False, "by modelopt"),
        (as_int8, {}, False, "stores .* as I8"),
        (with_scales, {}, False, "_scale_inv, which nothing reads"),
        (with_input_scales, {}, False, "input_scale, which nothing reads"),
        (with_scales_of_no_weight, {}, False, ""),
    ],
)
def test_weights_that_nothing_dequantizes_are_refused(
    tmp_path: Path, name: str, change: Any, config: dict[str, Any], pickled: bool, said: str
) -> None:
    make_pair(tmp_path)
    folder = tmp_path / name
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if config:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    if not said:
        assert load_pair(read_pair(str(tmp_path)), drafts=["near"]).drafts
        return
    with pytest.raises(PairError, match=f"^{name}: .*{name} .*{said}") as told:
        load_pair(read_pair(str(tmp_path)))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("make", "own", "reach"),
    [
        (GraniteConfig, {"logits_scaling": 1.0}, 512),
        (MistralConfig, {"sliding_window": None}, 512),
        (MistralConfig, {"sliding_window": 64}, 512),
        (
            Phi3Config,
            {
                "rope_parameters": {**LONG, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
                "original_max_position_embeddings": 128,
            },
            128,
        ),
    ],
)
def test_texts_end_where_attention_or_positions_change(
    tmp_path: Path, make: type[PreTrainedConfig], own: dict[str, Any], reach: int
) -> None:
    assert loaded(tmp_path, make, **own).max_positions == reach


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    """A target whose matrix has 4 rows more than there are tokens, and drafts without them."""
    folder = tmp_path_factory.mktemp("padded")
    make_pair(folder)
    wide, words = tiny_model("llama", 304), tokenizer(300)
    narrow = load_pair(read_pair(str(folder))).target.model
    with torch.no_grad():
        for name in ("embed_tokens", "lm_head"):
            found = next(m for n, m in wide.named_modules() if n.endswith(name))
            own = next(m for n, m in narrow.named_modules() if n.endswith(name))
            assert isinstance(found, nn.Module)
            found.weight[:300] = own.weight
        state = {k: v for k, v in narrow.state_dict().items() if "layers" in k or "norm" in k}
        wide.load_state_dict(state, strict=False)
    wide.save_pretrained(folder / "target")
    words.save_pretrained(folder / "target")
    return load_pair(read_pair(str(folder)))


def test_drafts_of_another_size_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    make_pair(tmp_path)
    tiny_model("llama", 304).save_pretrained(tmp_path / "far")
    for file in (tmp_path / "far").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(PairError, match="'far' has a vocabulary of 304 tokens, the target one of"):
        load_pair(read_pair(str(tmp_path)))


def with_tokens(folder: Path, rows: int, *added: str) -> None:
    """Gives a model of a pair so many rows, and tokens that were added to its vocabulary."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(folder)
    words = tokenizer(300)
    words.add_tokens([AddedToken(token, special=True) for token in added])
    words.save_pretrained(folder)


@pytest.mark.parametrize(
    ("target", "draft", "never"),
    [
        ((304,), (312,), ()),
        ((320,), (304,), range(304, 320)),
        ((304, "<think>", "</think>"), (304,), range(300, 304)),
        ((304,), (304, "<tool>"), range(300, 304)),
        ((302, "<|im_start|>", "<b>"), (302, "<|reserved_0|>", "<b>"), (300,)),
        ((304, "<|im_start|>"), (312, "<a>", "<b>"), range(300, 304)),
    ],
    ids=["wider", "narrower", "added to the target", "added to the draft", "renamed", "both"],
)
def test_a_draft_may_differ_in_added_tokens_and_padding(
    tmp_path: Path, target: Any, draft: Any, never: Sequence[int]
) -> None:
    """Tokens that not both have a name for are never proposed, however likely the draft finds
    them."""
    make_pair(tmp_path)
    with_tokens(tmp_path / "target", *target)
    with_tokens(tmp_path / "near", *draft)
    weights = load_file(tmp_path / "near" / "model.safetensors")
    weights["lm_head.weight"][300:] *= 1000.0
    save_file(weights, tmp_path / "near" / "model.safetensors", metadata={"format": "pt"})
    pair = load_pair(read_pair(str(tmp_path)), drafts=["near"])
    ids = pair.encode("def add(a, b):")
    near = pair.drafts["near"]
    near.reserve(len(ids))
    logits, _ = near.chain(torch.tensor(ids), 0, logits=1)
    assert logits[0].isneginf().nonzero()[:, 0].tolist() == [*never]

    def decoded(under: Any, drawn: Sampling) -> Any:
        decoder = Decoder(pair, StaticSource(prepare(under, pair.draft_names)))
        return decoder.decode(decoder.request(Request("r", "c", "x"), ids, drawn, 24))

    for drawn in (Sampling(), Sampling(0.8, seed=3)):
        plain, done = decoded(Policy(), drawn), decoded(parse_policy(chain("near", 4)), drawn)
        assert done.trajectory.output_ids.tolist() == plain.trajectory.output_ids.tolist()
        assert sum(step.accepted for step in done.steps) > 0 or len(target) + len(draft) == 2
        if not drawn.temperature:
            theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
            found = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
            assert found[0, len(ids) :].tolist() == plain.trajectory.output_ids.tolist()
        panorama = record_panorama(pair, plain.trajectory, "near", 4)
        trace = ReplayTrace([plain.trajectory], {"near": [panorama]})
        (replayed,) = run_replay(trace, parse_policy(chain("near", 4)), per_round=True).steps()
        told = [(s.start, s.drafted, s.accepted) for s in done.steps]
        assert [(s.start, s.drafted, s.accepted) for s in replayed] == told
    named = [line for line in pair.notes if "never proposes" in line]
    assert len(named) == (len(target) + len(draft) > 2)


def test_a_head_may_lack_padding_and_added_tokens(tmp_path: Path) -> None:
    """The same rounds as for the target that it was made for; an ordinary token must be there."""
    file = pair_with_heads(tmp_path, head=_eagle3())

    def rounds() -> list[tuple[int, int, int]]:
        pair = load_pair(read_pair(str(file)), drafts=["head"])
        decoder = Decoder(pair, StaticSource(prepare(parse_policy(chain("head", 3)), ["head"])))
        ids = pair.encode("def add(a, b):")
        done = decoder.decode(decoder.request(Request("r", "c", "x"), ids, Sampling(), 24))
        return [(s.start, s.drafted, s.accepted) for s in done.steps]

    before = rounds()
    with_tokens(tmp_path / "target", 364, "<think>", "</think>")
    assert rounds() == before
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 299}))
    with pytest.raises(PairError, match="a vocabulary of 299 tokens, the target one of 364"):
        rounds()


def test_a_renamed_token_is_named_and_an_ordinary_one_refuses(tmp_path: Path) -> None:
    make_pair(tmp_path)
    with_tokens(tmp_path / "target", 304, "<|im_start|>")
    with_tokens(tmp_path / "near", 304, "<|reserved_0|>")
    pair = load_pair(read_pair(str(tmp_path)), drafts=["near"])
    assert pair.notes == (
        "near never proposes 1 added tokens that it does not share with the target (first: 300, "
        "'<|reserved_0|>' there and '<|im_start|>' in the target's)",
    )
    tokenizer(290).save_pretrained(tmp_path / "near")
    said = (
        r"^draft 'near' has another vocabulary than the target: token 290 is no token there and "
        r".* in the target's; a draft must share the target's tokenizer"
    )
    for load in (load_pair, load_codec):
        with pytest.raises(PairError, match=said):
            load(read_pair(str(tmp_path)))


def test_stop_strings_are_found_whatever_was_new_at_once(padded: LoadedPair) -> None:
    """Characters of many tokens: a text ends at the same token, a token or many at a time."""
    stop = "ሀለሐመሠረ"
    ids = padded.encode(f"xx{stop} and more")
    assert len(padded.encode(stop)) > 2 * len(stop)
    ends_at = padded.stopper((stop,))
    one = next(n for n in range(1, len(ids)) if ends_at(ids[: n - 1], ids[n - 1 : n]))
    for width in (2, 5, 9):
        at = next(n for n in range(0, len(ids), width) if ends_at(ids[:n], ids[n : n + width]))
        assert at + (ends_at(ids[:at], ids[at : at + width]) or 0) == one


def test_a_stop_string_among_bytes_is_found_whatever_was_new_at_once() -> None:
    """Where a tokenizer has no token for a character, but each of its bytes: those that begin
    within a character are none, and neither are those that follow."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
    words = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    words.decoder = ByteFallback()
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=words), frozenset(), (99, {}), 257)
    ids = list(f"{10 * chr(0x597D)}{(stop := chr(0x505C))}{4 * chr(0x597D)}".encode())
    assert codec.text(ids).index(stop) == 10
    ends_at = codec.stopper((stop,))
    for width in range(1, len(ids) + 1):
        found = ((n, ends_at(ids[:n], ids[n : n + width])) for n in range(0, len(ids), width))
        assert next(n + end for n, end in found if end) == 33, width
    first = codec.stopper(("\n",))
    assert first([], [10, 0xF0]) == 1, "though the byte that follows hides it"


def test_a_stop_string_may_be_a_special_token(tmp_path: Path) -> None:
    """``<|im_end|>``, which ends no text by itself, ends those that ask for it, under any policy;
    what stands before it is searched as it is read."""
    words = tokenizer(300)
    words.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    model, end = tiny_model("llama", 301), 300
    (tmp_path / "pair.json").write_text(json.dumps({"target": ".", "drafts": {"same": "."}}))
    words.save_pretrained(tmp_path)

    def decoded(stops: tuple[str, ...], policy: dict[str, Any]) -> tuple[list[int], str]:
        model.save_pretrained(tmp_path)
        pair = load_pair(read_pair(str(tmp_path)))
        plan = prepare(parse_policy(policy), pair.draft_names)
        decoder, item = Decoder(pair, StaticSource(plan)), Request("r", "c", "x")
        ids = pair.encode("def add(a, b):")
        text = decoder.decode(decoder.request(item, ids, Sampling(), 12, stops)).trajectory
        return text.output_ids.tolist(), text.finish

    plain, _ = decoded((), {})
    at = next(i for i, token in enumerate(plain) if i > 2 and token not in plain[:i])
    with torch.no_grad():  # where that token was likeliest the end now is
        model.lm_head.weight[end] = 1.001 * model.lm_head.weight[plain[at]]
    for policy in ({}, chain("same", 5), chain("ngram", 3)):
        assert decoded((), policy)[1] == "length"
        assert decoded(("<|im_end|>",), policy) == ([*plain[:at], end], "stop")
        assert decoded(("nowhere", "<|im_end|>"), policy) == ([*plain[:at], end], "stop")

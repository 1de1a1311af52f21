"""Which causal language models are taken, and up to which length: tiny random ones of real
architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import chain, make_pair, tiny_model, tokenizer
from torch import nn
from transformers import (
    BloomConfig,
    CohereConfig,
    Gemma3TextConfig,
    GraniteConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
)
from transformers.models.auto import AutoModelForCausalLM

from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.runtime import sampling
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.models import load_model
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.prepare import prepare
from spectune.runtime.recording.chains import record_panorama
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
        (BloomConfig, {"n_layer": 2, "n_head": 4}, "has an attention of its own"),
        (Gemma3TextConfig, {"head_dim": 12}, "attention of kind sliding_attention"),
    ],
)
def test_models_that_would_give_other_texts_are_refused(
    tmp_path: Path, make: type[PreTrainedConfig], own: dict[str, Any], said: str
) -> None:
    with pytest.raises(PairError, match=f"^target: .*{said}"):
        loaded(tmp_path, make, **own)


@pytest.mark.parametrize(
    ("make", "own", "reach"),
    [
        (GraniteConfig, {"logits_scaling": 1.0}, 512),
        (MistralConfig, {"sliding_window": None}, 512),
        (MistralConfig, {"sliding_window": 64}, 64),
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


@pytest.mark.parametrize("drawn", [Sampling(), Sampling(0.8, seed=3)], ids=str)
def test_a_draft_may_lack_rows_that_only_fill_up_the_matrix(
    padded: LoadedPair, drawn: Sampling
) -> None:
    policy = parse_policy(chain("near", 4))

    def decoded(under: Any, ids: list[int], tokens: int = 24) -> Any:
        decoder = Decoder(padded, StaticSource(prepare(under, padded.draft_names)))
        return decoder.decode(decoder.request(Request("r", "c", ("x",)), ids, drawn, tokens))

    ids = padded.encode("def add(a, b):")
    plain, done = decoded(Policy(), ids), decoded(policy, ids)
    assert done.trajectory == plain.trajectory
    assert sum(step.accepted for step in done.steps) > 0
    panorama = record_panorama(padded, plain.trajectory, "near", 4)
    trace = ReplayTrace([plain.trajectory], {"near": [panorama]})
    (replayed,) = run_replay(trace, policy, per_round=True).steps()
    told = [(s.start, s.drafted, s.accepted) for s in done.steps]
    assert [(s.start, s.drafted, s.accepted) for s in replayed] == told
    # A token without a row, which the target may draw, is read as another.
    assert len(decoded(policy, [*ids, 302], 4).trajectory.output_ids) > 0


def test_drafts_that_are_larger_than_the_target_are_refused(tmp_path: Path) -> None:
    make_pair(tmp_path)
    tiny_model("llama", 304).save_pretrained(tmp_path / "far")
    with pytest.raises(PairError, match="'far' has a vocabulary of 304 tokens, the target one of"):
        load_pair(read_pair(str(tmp_path)))


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


def test_noise_is_the_same_and_few_rows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "ROWS_KEPT", 3)
    monkeypatch.setattr(sampling, "NOISE_KEPT", 0)
    noise = sampling.Noise(5, 64, torch.device("cpu"))
    rows = [noise.row(n) for n in range(8)]
    assert len(noise._rows) == 3
    assert all(torch.equal(noise.row(n), row) for n, row in enumerate(rows))

"""What a checkpoint's generation_config asks for: applied as ``generate`` applies it, under every
policy, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import chain, make_pair, top_k
from transformers import AutoModelForCausalLM

from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.errors import PairError
from spectune.traces.schema import Request, Sampling, Verifier

PROMPT, NEW = [5, 6, 7, 5, 6, 7, 5, 6], 24
POLICIES: list[dict[str, Any]] = [
    {"window": {"kind": "fixed", "gamma": 0}},
    chain("near", 4),
    chain("ngram", 3),
    top_k("near", 3, 3, 8),
]
ASKED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [9, 40]},
    {"no_repeat_ngram_size": 2, "min_new_tokens": 18},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("settings")).parent


def asking(folder: Path, settings: dict[str, Any], **more: Any) -> LoadedPair:
    """The pair with these settings in its target's generation_config; ``more``: further keys of the
    pair file."""
    file = folder / "target" / "generation_config.json"
    eos = {k: v for k, v in json.loads(file.read_text()).items() if k.endswith("token_id")}
    file.write_text(json.dumps(eos | settings))
    pair = folder / "asking.json"
    pair.write_text(json.dumps(json.loads((folder / "pair.json").read_text()) | more))
    return load_pair(read_pair(str(pair)), device="cpu")


def text(
    pair: LoadedPair, policy: dict[str, Any], sampling: Sampling, verifier: Verifier = "coupled"
) -> list[int]:
    decoder = Decoder(pair, StaticSource(prepare_for(pair, parse_policy(policy))), verifier)
    request = decoder.request(Request("r", "", ("",)), PROMPT, sampling, NEW)
    return decoder.decode(request).trajectory.output_ids.tolist()


def plain_text(folder: Path) -> list[int]:
    """What ``generate`` itself writes, greedy, by the checkpoint's own generation_config."""
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("settings", ASKED, ids=lambda s: "+".join(s))
def test_greedy_texts_are_those_of_generate_and_no_policy_changes_a_text(
    folder: Path, settings: dict[str, Any]
) -> None:
    """Token for token, chains, trees and none; sampled texts do not depend on the policy either.
    Without the settings texts differ."""
    pair = asking(folder, settings)
    assert {name: pair.settings[name] for name in settings} == settings
    expected = plain_text(folder)
    assert [text(pair, policy, Sampling()) for policy in POLICIES] == [expected] * len(POLICIES)
    sampled = [text(pair, policy, Sampling(0.9, top_k=20, seed=3)) for policy in POLICIES]
    assert sampled == [sampled[0]] * len(POLICIES)
    ignoring = asking(folder, settings, generation_config=False)
    assert text(ignoring, POLICIES[1], Sampling()) != expected


def test_words_are_forbidden_and_favoured(folder: Path) -> None:
    """The greedy text's own words are forbidden, or others favoured: what ``generate`` makes of
    it."""
    own = text(asking(folder, {}), POLICIES[0], Sampling())
    for settings in (
        {"bad_words_ids": [own[:1], own[3:5]]},
        {"sequence_bias": [[[own[0]], -9.0], [[11], 6.5]]},
    ):
        pair = asking(folder, settings)
        expected = plain_text(folder)
        assert expected != own
        assert [text(pair, policy, Sampling()) for policy in POLICIES] == [expected] * len(POLICIES)


def test_a_pair_with_settings_is_another_pair(folder: Path) -> None:
    """Recordings with and without them do not mix; what asks for nothing costs nothing and changes
    no id."""
    ignored = asking(folder, {"repetition_penalty": 1.3}, generation_config=False)
    applied = asking(folder, {"repetition_penalty": 1.3})
    assert applied.id != ignored.id
    assert applied.processor(3) is not None
    assert ignored.processor(3) is None
    nothing = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": None, "num_beams": 1}
    neutral = asking(folder, nothing | {"temperature": 0.6})
    assert neutral.settings == {}
    assert neutral.processor(3) is None
    same = asking(folder, nothing | {"temperature": 0.6}, generation_config=False)
    assert neutral.id == same.id
    assert read_pair(str(folder / "asking.json")).to_json()["generation_config"] is False


HOT = Sampling(1.0)


@pytest.mark.parametrize(
    ("settings", "sampling", "verifier", "said"),
    [
        ({"min_p": 0.1}, HOT, "coupled", "min_p, which is not applied above temperature 0"),
        ({"num_beams": 4}, Sampling(), "coupled", "num_beams, which is not applied; a pair file"),
        ({"forced_bos_token_id": 0}, Sampling(), "coupled", "forced_bos_token_id, which is not"),
        ({"repetition_penalty": 1.3}, HOT, "rejection", "which the rejection verifier does not"),
    ],
)
def test_what_is_not_applied_is_refused(
    folder: Path, settings: dict[str, Any], sampling: Sampling, verifier: Verifier, said: str
) -> None:
    pair = asking(folder, settings)
    with pytest.raises(PairError, match=said):
        text(pair, POLICIES[1], sampling, verifier)
    assert text(asking(folder, settings, generation_config=False), POLICIES[1], sampling, verifier)
    if "min_p" in settings:
        assert text(pair, POLICIES[1], Sampling())


def test_old_checkpoints_ask_in_their_configuration(folder: Path) -> None:
    """Without a generation_config.json transformers takes settings from config.json."""
    spec = asking(folder, {"repetition_penalty": 1.3}).spec
    (folder / "target" / "generation_config.json").rename(folder / "aside.json")
    config = folder / "target" / "config.json"
    plain = config.read_text()
    config.write_text(json.dumps(json.loads(plain) | {"no_repeat_ngram_size": 2}))
    assert spec.settings == {"no_repeat_ngram_size": 2}
    loaded = AutoModelForCausalLM.from_pretrained(folder / "target")
    assert loaded.generation_config.no_repeat_ngram_size == 2
    config.write_text(plain)
    (folder / "aside.json").rename(folder / "target" / "generation_config.json")


def test_values_that_transformers_does_not_take_are_told_at_once(folder: Path) -> None:
    with pytest.raises(PairError, match="generation_config of "):
        asking(folder, {"repetition_penalty": -2.0})
    with pytest.raises(PairError, match="generation_config is true"):
        asking(folder, {}, generation_config="no")

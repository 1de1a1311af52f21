"""Which of the target's hidden states a head reads, by every way in which its configuration may
name them, and what is said of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from doors import Door
from pairs import chain, perturbed, tiny_model, tokenizer
from test_heads import IDS, Case, _eagle3, _eagle3_last_state, pair_with_heads

from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.traces.schema import Request, Sampling

LAYERS = 8


def nested(ids: list[int]) -> dict[str, Any]:
    return {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}


FORMS: dict[str, tuple[Mapping[str, Any], list[int], str]] = {
    "unnamed": ({}, [2, 4, 5], "default"),
    "empty": (nested([]), [2, 4, 5], "default"),
    "outputs": (nested([1, 3, 4]), [2, 4, 5], "outputs"),
    "boundaries": (nested([2, 4, 5]), [2, 4, 5], "boundaries"),
    "top_outputs": ({IDS: [1, 3, 4]}, [2, 4, 5], "outputs"),
    "top_boundaries": ({IDS: [2, 4, 5]}, [2, 4, 5], "boundaries"),
    "both": ({**nested([1, 3, 4]), IDS: [2, 4, 5]}, [2, 4, 5], "outputs"),
    "up_to_the_last": (nested([4, 6, 8]), [4, 6, 8], "boundaries"),
    "first_and_last": (nested([1, 6, 8]), [1, 6, 8], "boundaries"),
    "others": (nested([1, 4, 7]), [2, 5, 8], "outputs"),
    "nested_layer_ids": ({"eagle_config": {"layer_ids": [1, 3, 4]}}, [2, 4, 5], "outputs"),
    "auxiliary": ({"aux_hidden_state_layer_ids": [2, 4, 5]}, [2, 4, 5], "boundaries"),
    "target_layers": ({"target_layer_ids": [3, 6, 7]}, [4, 7, 8], "outputs"),
    "counted": ({"target_layer_ids": [1, 3, 4], "num_aux_hidden_states": 3}, [2, 4, 5], "outputs"),
}
"""A head's configuration, the states that it names of a target of 8 layers, and how."""


def _head(keys: Mapping[str, Any]) -> Case:
    case = _eagle3(file="safetensors")
    case.config |= copy.deepcopy(dict(keys))
    return case


@pytest.fixture(scope="module")
def pair_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with the same head once for each form of configuration."""
    heads = {name: _head(keys) for name, (keys, _, _) in FORMS.items()}
    heads["last"] = _eagle3_last_state()
    heads["last"].config["eagle_config"]["parallel_draft_step"] = 1
    heads["last"].config |= {"target_layer_ids": [1, 3, 4], "output_hidden_states": False}
    return pair_with_heads(tmp_path_factory.mktemp("states"), LAYERS, **heads)


@pytest.fixture(scope="module")
def pair(pair_file: Path) -> LoadedPair:
    return load_pair(read_pair(str(pair_file)), device="cpu")


def accepted(pair: LoadedPair, draft: str) -> list[tuple[int, int, int]]:
    """What a head has accepted, round by round."""
    plan = prepare(parse_policy(chain(draft, 4)), pair.draft_names)
    decoder = Decoder(pair, StaticSource(plan))
    ids = pair.encode("The quick brown fox")
    done = decoder.decode(decoder.request(Request("r", "c", "x"), ids, Sampling(), 32))
    return [(step.start, step.drafted, step.accepted) for step in done.steps]


def test_the_states_that_are_read_are_those_that_were_meant(pair: LoadedPair) -> None:
    wanted = {
        name: {"states": states, "convention": how} for name, (_, states, how) in FORMS.items()
    }
    wanted["last"] = {"states": ["last"], "convention": "last"}
    assert pair.hidden_states == wanted


def test_a_head_drafts_the_same_however_its_states_are_named(pair: LoadedPair) -> None:
    by_states: dict[tuple[int, ...], list[Any]] = {}
    for name, (_, states, _) in FORMS.items():
        by_states.setdefault(tuple(states), []).append(accepted(pair, name))
    assert [len(found) for found in by_states.values()] == [10, 1, 1, 1, 1]
    assert all(found == [found[0]] * len(found) for found in by_states.values())


def test_a_head_of_one_state_drafts_and_changes_no_text(pair: LoadedPair) -> None:
    plan = prepare(parse_policy(chain("last", 4)), pair.draft_names)
    texts = []
    for source in (StaticSource(plan), StaticSource(prepare(Policy(), pair.draft_names))):
        decoder = Decoder(pair, source)
        ids = pair.encode("The quick brown fox")
        done = decoder.decode(decoder.request(Request("r", "c", "x"), ids, Sampling(), 24))
        texts.append(done.trajectory.output_ids.tolist())
    assert texts[0] == texts[1]


def test_commands_say_which_states_are_read(pair_file: Path, tmp_path: Path) -> None:
    """Once a head, and in their JSON."""
    (tmp_path / "w.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    door = Door(str(tmp_path / "runs.db"))
    policy = json.dumps(chain("boundaries", 3))
    of = ("--pair", pair_file, "--workload", tmp_path / "w.jsonl", "--max-new-tokens", 8)
    run = ("run", "--policy", policy, *of)
    said = door.call(*run).stderr
    for line in (
        "unnamed: states not named in its config.json: default 2, L/2, L-3 of the target's L "
        "layers, here 2, 4, 5",
        "outputs reads the target's hidden states 2, 4, 5 (its ids count outputs of layers)",
        "boundaries reads the target's hidden states 2, 4, 5 (its ids count boundaries between "
        "layers)",
        "up_to_the_last reads the target's hidden states 4, 6, 8 (its ids count boundaries "
        "between layers)",
        "last reads the target's last hidden state, after the final norm; ignored of its "
        "config.json: eagle_config.parallel_draft_step, target_layer_ids",
    ):
        assert said.splitlines().count(line) == 1, said
    found = door.json(*run)["heads"]
    assert found["boundaries"] == {"states": [2, 4, 5], "convention": "boundaries"}
    assert found["outputs"] == {"states": [2, 4, 5], "convention": "outputs"}


@pytest.fixture(scope="module")
def poor_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with a head and a draft ``far`` that have nothing to do with the target."""
    folder = tmp_path_factory.mktemp("poor")
    file = pair_with_heads(folder, LAYERS, head=_head({}))
    vocab = len(tokenizer())
    (target := tiny_model("llama", vocab, layers=LAYERS)).save_pretrained(folder / "target")
    perturbed(target, 0.02, 1).save_pretrained(folder / "near")
    tiny_model("llama", vocab, seed=9).save_pretrained(folder / "far")
    return file


PROMPTS = ["def add(a, b):", "The quick brown", "Question: Ann has", "for i in range", "print(i)"]
WARNINGS = {
    "far": "it is no smaller model of the target's family, or its weights are damaged",
    "head": "it reads other hidden states than it was trained on (eagle_aux_hidden_state_layer_ids "
    "in its config.json), its tokens are not those of its d2t, or it was trained for another "
    "target",
}


def test_drafts_that_are_next_to_never_right_are_warned_of(poor_pair: Path, tmp_path: Path) -> None:
    """After a recording and a run; a good draft, prompt lookup, and too few positions are not."""
    work = tmp_path / "w.jsonl"
    work.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    door = Door(str(tmp_path / "runs.db"))
    of = ("--pair", poor_pair, "--workload", work, "--max-new-tokens", 68)
    recorded = door.call("record", *of, "--gamma-max", 2, json=True)
    assert recorded.exit_code == 0, recorded.output
    first = json.loads(recorded.stdout)["first_position"]
    assert set(first) == {"near", "far", "head", "ngram"}
    assert min(found["positions"] for found in first.values()) >= 300
    assert max(first["far"]["acceptance"], first["head"]["acceptance"]) < 0.05
    assert first["near"]["acceptance"] > 0.3
    warned = [x for x in recorded.stderr.splitlines() if "next to never right" in x]
    assert len(warned) == 2
    for draft, why in WARNINGS.items():
        (line,) = [x for x in warned if repr(draft) in x]
        assert line.startswith("warning: ")
        assert line.endswith(why)
        assert f"of {first[draft]['positions']} first tokens " in line
    ran = door.call("run", "--policy", json.dumps(chain("head", 1)), *of, "--no-store")
    assert [x for x in ran.stderr.splitlines() if "'head' is next to never right" in x]
    few = door.call("run", "--policy", json.dumps(chain("far", 1)), *of[:-1], 8, limit=1)
    assert "never right" not in few.stderr

"""`check`: what it says of a pair before any server runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doors import Door, parsed, write_lines, write_workload
from pairs import chain, tiny_model, tokenizer
from transformers import AutoModelForCausalLM

from spectune.optimizer.worth import Worth, judge

SHORT = {"limit": 4, "gamma_max": 3, "max_new_tokens": 20}
UNHURRIED = "10m"


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    monkeypatch.chdir(tmp_path)
    return Door(None)


def test_its_acceptance_is_a_recordings(door: Door, tmp_path: Path) -> None:
    """On the demo pair, which has language models and a head."""
    checked = door.json("check demo", **SHORT, budget=UNHURRIED)
    assert not (tmp_path / "spectune.db").exists()
    door.json("record", pair="demo", **SHORT)
    by_draft = {row["draft"]: row for row in door.json("traces stats", by="draft")["stats"]}
    assert {row["draft"] for row in checked["lengths"]} == set(by_draft)
    for row in checked["lengths"]:
        k, positions = row["K"], by_draft[row["draft"]]
        assert row["conditional"] == positions["conditional"][k - 1]
        assert row["cumulative"] == positions["marginal"][k - 1]
        replayed = door.json("simulate", policy=json.dumps(chain(row["draft"], k)))
        assert row["tau"] == replayed["mean_accepted_length"]
        assert row["tau_interval"][0] <= row["tau"] <= row["tau_interval"][1]
    assert checked["slope"] >= 0
    assert checked["prompts"] == 4
    assert checked["tokens"] == replayed["emitted_tokens"]
    assert checked["advice"].startswith("Not shown to be worth it by 4 prompts (a gain of 10% is")


def test_a_draft_gains_below_its_break_even_cost(door: Door, tiny_pair: Path) -> None:
    models, work = tiny_pair.parent, write_workload(Path("work.jsonl"), 6)
    drafts = [f"good={models / 'near'}", models / "far"]
    checked = door.json(
        "check", models / "target", work, draft=drafts, max_new_tokens=24, budget=UNHURRIED
    )
    rows = checked["lengths"]
    assert [(r["draft"], r["K"]) for r in rows] == [
        (draft, k) for draft in ("good", "far", "ngram") for k in range(1, 9)
    ]
    for row in rows:
        assert row["speedup_interval"][0] <= row["speedup"] <= row["speedup_interval"][1]
        if row["draft"] != "ngram":
            assert (row["speedup"] > 1) == (row["draft_step"] < row["break_even"])
    worth, low = checked["worth"], checked["worth"]["interval"][0]
    assert f"{worth['draft']} at K={worth['K']}" in checked["advice"]
    assert worth["conversations"] == 4  # of 6, which two chose
    chance = f"{100 * worth['chance_of_10_percent']:.0f}%"
    words = f"by 6 prompts (a gain of 10% is seen with a chance of {chance})"
    assert words in checked["advice"]
    assert (worth["shown"] is True) == checked["advice"].startswith("Worth") == (low > 1)
    # Two layers of two heads of 12 + 12 float32.
    memory = {row.pop("model"): row for row in checked["memory"]}
    assert memory["good"]["cache_bytes_per_token"] == 2 * 2 * 24 * 4
    assert memory["good"]["tokens_that_fit"] < memory["target"]["tokens_that_fit"]
    assert checked["tune_minutes"] > 80 / 60
    words = f"tune --set target={models / 'target'} --set drafts.good={models / 'near'} "
    words += f"--set drafts.far={models / 'far'} --workload work.jsonl --max-new-tokens 24"
    assert checked["next"] == f"spectune {words}"
    assert parsed(words.split())


def test_time_that_is_up_leaves_at_least_a_prompt(door: Door, tiny_pair: Path) -> None:
    options: dict[str, Any] = {"budget": "1ms", "gamma_max": 2, "max_new_tokens": 12}
    work = write_workload(Path("work.jsonl"), 6)
    checked = Door("typed.db").json("check", tiny_pair, work, **options)
    assert (checked["prompts"], checked["tokens"]) == (1, 12)
    assert checked["advice"].startswith("Not shown to be worth it by 1 prompt (a gain of 10% is")
    assert checked["worth"] is None or checked["worth"]["chance_of_10_percent"] == 0
    (recording,) = Door("typed.db").json("traces list")["recordings"]
    assert (recording["pair_id"], recording["n_requests"]) == (checked["pair"], 1)
    printed = door.call("check", tiny_pair, work, **options)
    assert "1 of 6 prompts, 12 tokens" in printed.stdout
    words = f"tune --pair {tiny_pair} --workload work.jsonl --max-new-tokens 12"
    words += " --set search.gamma_max=2"
    assert f"spectune {words}" in printed.stdout
    assert parsed(words.split())
    named = door.json("check", work, pair=tiny_pair, **options)["next"].split()
    assert sorted(named[1:]) == sorted(words.split())


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("tokens", [4, 12, 24])
def test_nothing_is_priced_without_rounds_of_no_draft(
    door: Door, tiny_pair: Path, tokens: int
) -> None:
    """One short text: a round without a draft is not taken to cost nothing."""
    work = write_workload(Path("work.jsonl"), 1)
    checked = door.json("check", tiny_pair, work, max_new_tokens=tokens, budget=UNHURRIED)
    speeds = [row["speedup"] for row in checked["lengths"]]
    priced = checked["without_draft_tokens_per_s"]
    assert bool(priced) == any(speed is not None for speed in speeds) == (tokens > 4)
    assert all(speed is None or speed > 0.01 for speed in speeds)


def test_a_draft_that_ends_before_its_target_is_named(
    door: Door, tiny_pair: Path, tmp_path: Path
) -> None:
    models, short, pair = tiny_pair.parent, tmp_path / "short", tmp_path / "pair.json"
    shutil.copytree(models / "near", short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    drafts = {"near": str(models / "near"), "short": str(short)}
    pair.write_text(json.dumps({"target": str(models / "target"), "drafts": drafts}))
    work = write_workload(Path("work.jsonl"), 2)
    checked = door.call("check", pair, work, budget="1ms", gamma_max=2, max_new_tokens=12)
    printed = door.call("engines vllm", pair=pair, draft="short")
    for found in (checked, printed):
        (line,) = [line for line in found.stderr.splitlines() if "ends at" in line]
        assert "draft short ends at 128 tokens (max_position_embeddings), the target at 512" in line


def test_what_is_no_draft_of_the_target_is_refused(door: Door, tiny_pair: Path) -> None:
    target = tiny_pair.parent / "target"
    tiny_model("llama", 123).save_pretrained("other")
    line = door.error("check", target, draft="other")
    assert "draft 'other' has a vocabulary of 123 tokens" in line
    assert "missing" in door.refused("check", target, draft="missing")
    assert "no pair is named" in door.refused("check")
    assert "is a pair, which names its drafts" in door.refused("check", tiny_pair, draft="near")


def test_texts_that_any_draft_guesses_show_nothing(door: Door, tiny_pair: Path) -> None:
    """A target that says one token for ever, and prompts that are all the same: the verdict says
    why it is not sure."""
    target = AutoModelForCausalLM.from_pretrained(tiny_pair.parent / "target")
    with torch.no_grad():
        embedded, head = (layer.weight for layer in (target.get_input_embeddings(), target.lm_head))
        embedded.copy_(embedded[5].expand_as(embedded))
        head[0] = 0.0  # never <eos>
    target.save_pretrained("cyclic")
    tokenizer().save_pretrained("cyclic")
    cyclic = door.json(
        "check", "cyclic", write_workload(Path("work.jsonl"), 6), **SHORT | {"limit": 6},
        draft="cyclic", budget=UNHURRIED,
    )  # fmt: skip
    assert "6 of 6 texts end in a cycle that repeats itself" in cyclic["advice"]
    write_lines("same.jsonl", [{"prompt": "Say it."}] * 6)
    same = door.json("check", tiny_pair, "same.jsonl", **SHORT | {"limit": 6}, budget=UNHURRIED)
    assert "5 of 6 prompts are the same as an earlier one" in same["advice"]
    assert same["worth"]["conversations"] == 1
    for checked in (cyclic, same):
        assert checked["advice"].startswith("Not shown to be worth it by 6 prompts (a gain of 10%")
        assert checked["worth"]["shown"] is None


CASES = 300


def drawn(prompts: int, rng: np.random.Generator, gain: float = 0.0) -> Worth:
    """Of costs of three drafts with eight windows each, which ``gain`` in the mean; prompts differ
    by 25% in what suits them, half of which a draft's windows share, and in size."""
    sizes = np.exp(0.3 * rng.standard_normal(prompts))
    shared = np.repeat(rng.standard_normal((3, prompts)), 8, axis=0)
    suits = 0.25 * (shared + rng.standard_normal((24, prompts))) / np.sqrt(2)
    costs = sizes * np.exp(suits - 0.25**2 / 2) / (1 + gain)
    return judge(sizes, list(costs), np.arange(prompts))


@pytest.mark.parametrize("prompts", [5, 16, 48])
def test_it_advises_for_nothing_once_in_twenty_at_most(prompts: int) -> None:
    rng = np.random.default_rng(prompts)
    assert sum(drawn(prompts, rng).gains is True for _ in range(CASES)) <= CASES / 20


def test_it_tells_how_often_a_gain_is_seen() -> None:
    """And says that nothing gains where all lose."""
    rng = np.random.default_rng(1)
    of = [drawn(24, rng, gain=0.1) for _ in range(CASES)]
    seen, told = np.mean([w.gains is True for w in of]), np.mean([w.chance for w in of])
    assert 0.1 < told < 0.9
    assert seen == pytest.approx(told, abs=0.1)
    assert drawn(24, rng, gain=-0.5).gains is False
    few, alike = drawn(4, rng, gain=2.0), judge(np.full(9, 2.0), [np.ones(9)], np.arange(9))
    assert (few.gains, few.chance, alike.gains, alike.chance) == (None, 0.0, None, 0.0)
    assert alike.ratio == (2.0, 2.0, 2.0)


def test_turns_of_a_conversation_show_no_more_than_one() -> None:
    sizes, cost = np.ones(12), 0.5 + 0.01 * np.arange(12)
    assert judge(sizes, [cost], np.arange(12)).gains
    together = judge(sizes, [cost], np.arange(12) // 4)
    assert (together.gains, together.conversations) == (None, 2)

"""`check`: what it says of a pair before any server runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doors import Door, parsed, write_workload
from pairs import chain, tiny_model

from spectune.optimizer.map_cells import nearest_cell

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
    assert checked["prompts"] == 4
    assert checked["tokens"] == replayed["emitted_tokens"]
    best = max((r for r in checked["lengths"] if r["speedup"]), key=lambda row: row["speedup"])
    (first,) = (r for r in checked["lengths"] if (r["draft"], r["K"]) == (best["draft"], 1))
    kind = {"small": "model", "medium": "model"}.get(best["draft"], best["draft"])
    costs = best["draft_step"] or 0.0, checked["slope"]
    cell = nearest_cell(kind, 0.0, first["conditional"], *costs)
    assert checked["map"] == cell


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
    best = max(rows, key=lambda row: row["speedup"])
    assert f"{best['draft']} at K={best['K']}" in checked["advice"]
    # Two layers of two heads of 12 + 12 float32.
    memory = {row.pop("model"): row for row in checked["memory"]}
    assert memory["good"]["cache_bytes_per_token"] == 2 * 2 * 24 * 4
    assert memory["good"]["tokens_that_fit"] < memory["target"]["tokens_that_fit"]
    assert checked["tune_minutes"] > 80 / 60
    words = f"tune --set target={models / 'target'} --set drafts.good={models / 'near'} "
    words += f"--set drafts.far={models / 'far'} --workload work.jsonl"
    assert checked["next"] == f"spectune {words}"
    assert parsed(words.split())


def test_time_that_is_up_leaves_at_least_a_prompt(door: Door, tiny_pair: Path) -> None:
    options: dict[str, Any] = {"budget": "1ms", "gamma_max": 2, "max_new_tokens": 12}
    work = write_workload(Path("work.jsonl"), 6)
    checked = Door("typed.db").json("check", tiny_pair, work, **options)
    assert (checked["prompts"], checked["tokens"]) == (1, 12)
    assert checked["advice"].startswith("Open")
    (recording,) = Door("typed.db").json("traces list")["recordings"]
    assert (recording["pair_id"], recording["n_requests"]) == (checked["pair"], 1)
    printed = door.call("check", tiny_pair, work, **options)
    assert "1 of 6 prompts, 12 tokens" in printed.stdout
    assert f"spectune tune --pair {tiny_pair} --workload work.jsonl" in printed.stdout


def test_what_is_no_draft_of_the_target_is_refused(door: Door, tiny_pair: Path) -> None:
    target = tiny_pair.parent / "target"
    tiny_model("llama", 123).save_pretrained("other")
    line = door.error("check", target, draft="other")
    assert "draft 'other' has a vocabulary of 123 tokens" in line
    assert "missing" in door.refused("check", target, draft="missing")
    assert "no pair is named" in door.refused("check")
    assert "is a pair, which names its drafts" in door.refused("check", tiny_pair, draft="near")

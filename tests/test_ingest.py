"""Responses of servers without our plugin: texts where they have token ids, counts where not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from databases import opened
from doors import Door

import spectune
from spectune.engines.ingest import read_responses
from spectune.optimizer.simulate.counted import survival_of
from spectune.traces.acceptance import step_survival
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling, Step

GAMMA = 6
AGREES = [np.random.default_rng(i).random(400) < 0.75 for i in range(24)]
"""Where a draft agrees with the texts of 24 requests."""


def rounds_of(agrees: Any, gamma: int) -> list[tuple[int, int]]:
    """What a server does that drafts ``gamma`` tokens a round: drafted, accepted."""
    found, at = [], 1
    while at < len(agrees):
        ahead = agrees[at : at + gamma]
        kept = int(np.argmin([*ahead, False]))
        found.append((gamma, kept))
        at += kept + 1
    return found


def vllm(rounds: Iterable[tuple[int, int]], **more: Any) -> dict[str, Any]:
    drafted, kept = (list(column) for column in zip(*rounds, strict=True))
    told = {"num_spec_tokens": GAMMA, "per_step_drafted": drafted, "per_step_accepted": kept}
    choices = [{"finish_reason": "stop"}]
    return {"id": "x", "choices": choices, "metrics": {"speculative_decoding": told}, **more}


def sglang(rounds: list[tuple[int, int]], gamma: int) -> dict[str, Any]:
    kept = [accepted for _, accepted in rounds]
    histogram = [kept.count(i) for i in range(max(kept) + 1)]
    told = {"spec_verify_ct": len(kept), "spec_num_proposed_drafts": gamma * len(kept)}
    text = "a line\u2028another"
    return {"text": text, "meta_info": {**told, "spec_correct_drafts_histogram": histogram}}


def file_of(folder: Path, responses: Iterable[dict[str, Any]]) -> Path:
    path = folder / "responses.jsonl"
    lines = (json.dumps(r, ensure_ascii=False) + "\r\n" for r in responses)
    path.write_text("".join(lines), encoding="utf-8")
    return path


WIDE = {"finish_reason": "stop", "token_ids": [1, 2]}


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(str(tmp_path / "x.db"))


def window(gamma: int, draft: str = "near", kind: str = "fixed") -> str:
    size = {"gamma": gamma} if kind == "fixed" else {}
    return json.dumps({"draft": draft, "window": {"kind": kind, **size}})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_counts_say_what_shorter_windows_would_keep_and_refuse_longer_ones(
    engine: str, door: Door, tmp_path: Path, tiny_pair: Path
) -> None:
    served = [rounds_of(agrees, GAMMA) for agrees in AGREES]
    path = file_of(tmp_path, (vllm(r) if engine == "vllm" else sglang(r, GAMMA) for r in served))
    said = door.json("traces", "ingest", path, "--pair", tiny_pair, "--draft-name", "near")
    assert (said["engine"], said["requests"], said["responses"]) == (engine, 0, 24)
    for gamma in range(GAMMA + 1):
        rounds = sum(len(rounds_of(agrees, gamma)) for agrees in AGREES)
        found = door.json("simulate", "--policy", window(gamma))
        if gamma == GAMMA:
            assert "approximate" not in found
            assert found["rounds"] == rounds
        else:
            assert found["approximate"] is True
            assert found["rounds"] == pytest.approx(rounds, rel=0.03)
    with pytest.warns(UserWarning, match="approximate: counts without texts"):
        assert spectune.simulate(window(1), db=door.db)["rounds"]
    for policy, what in (
        (window(GAMMA + 1), "at most 6 tokens, which say nothing of 7; record with the plugin"),
        (window(2, "far"), "say nothing of 'far fixed(gamma=2)'"),
        (window(2, kind="fsm"), "say nothing of a window that changes"),
    ):
        assert what in door.refused("simulate", "--policy", policy)
    assert "no requests to replay" in door.refused("simulate", "--policy", window(2), "--limit", 3)


def test_texts_that_come_with_token_ids_are_recorded_and_replayed_under_any_window(
    door: Door, tmp_path: Path, tiny_pair: Path
) -> None:
    rng, responses = np.random.default_rng(2), []
    for i in range(3):
        tokens = [int(t) for t in rng.integers(1, 300, 17)]
        choice = {"finish_reason": "length", "token_ids": tokens}
        # Two rounds keep 3 and 2 of 4; vLLM tells nothing of rounds that drafted nothing.
        rounds = [(4, 3), (4, 2), (4, 0), (4, 4), (2, 2)] if i else [(4, 3)]
        responses.append(vllm(rounds, id=f"r{i}", choices=[choice], prompt_token_ids=[5, 6, 7]))
    path = file_of(tmp_path, responses)
    said = door.json("traces", "ingest", path, "--pair", tiny_pair, "--draft-name", "near")
    assert (said["requests"], said["rounds"]) == (3, 11)
    with opened(door.db) as store:
        kept = store.load("latest", steps=True).requests
    assert [len(r.steps) for r in kept] == [0, 6, 6]
    rounds = [(s.start, s.depth, s.accepted, s.emitted) for s in kept[1].steps[1:]]
    assert rounds == [(1, 4, 3, 4), (5, 4, 2, 3), (8, 4, 0, 1), (9, 4, 4, 5), (14, 2, 2, 3)]
    door.json("record", "--resume", "latest")
    found = door.json("simulate", "--policy", window(8))
    assert found["emitted_tokens"] == 3 * 16


def test_censored_rounds_count_as_far_as_they_drafted() -> None:
    rounds = [(4, 4), (4, 1), (2, 2), (2, 0), (0, 0)]
    counts = {"0": [1], "2": [1, 0, 1], "4": [0, 1, 0, 0, 1]}
    found = survival_of(counts)
    assert found == step_survival([Step(0, d, d + 1, a, a + 1, d) for d, a in rounds])
    assert found.at_risk == (4.0, 3.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: a response is a JSON object"),
        (json.dumps(sglang([(6, 2), (6, 3)], 1)), "does not fit one number of draft tokens"),
        (json.dumps(vllm([(2, 3)])), "keeps more than it drafted"),
        (json.dumps(vllm([(2, -1)])), "-1 is no count"),
        (json.dumps(vllm([(2, 1)], prompt_token_ids=[1 << 40], choices=[WIDE])), "OverflowError"),
        ('{"metrics": {"speculative_decoding": {"per_step_drafted": [1]}}}', "per_step_accepted"),
        (json.dumps(sglang([(6, 2)], 6)), "responses of sglang and vllm; give each its file"),
    ],
)
def test_what_is_no_response_is_said_with_its_line(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(vllm([(6, 2)])) + "\n" + line + "\n")
    with pytest.raises(TraceError, match=said):
        read_responses(str(path), "near", Sampling())


def test_a_file_that_says_nothing_of_rounds_says_how_to_get_them(tmp_path: Path) -> None:
    silent = {"choices": [{"text": "a"}], "metrics": {"speculative_decoding": None}}
    path = file_of(tmp_path, [silent])
    with pytest.raises(TraceError, match="--per-request-spec-decode-metrics detailed"):
        read_responses(str(path), "near", Sampling())

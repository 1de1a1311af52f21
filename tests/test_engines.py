"""Engines without an engine: tables of draft tokens, the command line, and recordings of theirs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doors import Door
from synthetic import policy

from spectune.engines.abilities import ENGINES, VLLM, engine_named
from spectune.engines.server_settings import schedule_of
from spectune.engines.vllm.command import every_gamma
from spectune.engines.vllm.prompt_lookup import copied
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import Replay, ReplayTrace
from spectune.optimizer.replay.trace import open_trace, simulate
from spectune.runtime.loading import LoadedPair
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    ByLoadWindow,
    Policy,
    parse_policy,
)
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.recording import RecordedRequest
from spectune.traces.schema import Sampling, Step, Tokens
from spectune.traces.store import Asked, TraceStore
from spectune.traces.tables import Panorama, Trajectory

small, near = partial(policy, "small"), partial(policy, "near")


def gammas(of: Policy) -> tuple[int, ...]:
    return VLLM.tables(of, draft="small", most=6, max_num_seqs=8)[0]


def test_windows_by_batch_say_what_is_drafted_from_each_size_on() -> None:
    held = small({"16": 0, "1": 5, "4": 3})
    assert isinstance(held.window, ByLoadWindow)
    assert [held.window.at(n) for n in (1, 3, 4, 15, 16, 999)] == [5, 5, 3, 3, 0, 0]
    assert held.window.gamma_max == 5
    assert held.label() == "small by_load(1: 5, 4: 3, 16: 0)"
    assert parse_policy(json.loads(held.model_dump_json())) == held
    longer = small({"kind": "by_load", "gamma": {"1": 2}, "contexts": {"4096": {"9": 0, "1": 6}}})
    assert isinstance(longer.window, ByLoadWindow)
    assert [longer.window.at(9, context) for context in (0, 4095.9, 4096)] == [2, 2, 0]
    assert longer.label() == "small by_load(1: 2; from 4096 tokens 1: 6, 9: 0)"
    assert longer.gamma_max == 6


@pytest.mark.parametrize(
    ("gamma", "said"),
    [
        ({"4": 3}, 'maps batch sizes from "1" on to windows'),
        ({}, 'maps batch sizes from "1" on to windows'),
        (5, "window.gamma: Input should be a valid dictionary"),
        ({"1": 65}, "less than or equal to 64 .given: 65"),
        ({"1": 3, "few": 3}, "a valid integer, unable to parse"),
        ({"1": 3, "70000": 3}, "less than or equal to 65536"),
    ],
)
def test_malformed_windows_by_batch_are_refused_with_what_to_write(gamma: Any, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        small({"kind": "by_load", "gamma": gamma})
    with pytest.raises(PolicyError, match=said.replace("window.gamma", "window.contexts.9")):
        small({"kind": "by_load", "gamma": {"1": 1}, "contexts": {"9": gamma}})


def test_a_table_has_the_policys_tokens_for_every_batch_size() -> None:
    assert gammas(small(4)) == (0, *[4] * 8)
    assert gammas(small({"1": 6, "3": 2, "8": 0})) == (0, 6, 6, 2, 2, 2, 2, 2, 0)
    assert gammas(AUTOREGRESSIVE) == (0,) * 9


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (policy("medium", 4), "loaded the draft 'small', not 'medium'"),
        (small(7), "at most 6 tokens"),
        (
            small({"kind": "fsm"}),
            r"with a fixed or by_load window, and nearest is 'small fixed\(gamma=\d+\)'",
        ),
        (small(4, stop={"kind": "max_prob", "threshold": 0.4}), "a stop or a shortlist"),
        (small(4, growth={"kind": "top_k"}), "cannot run trees"),
        (
            small(4, by_prompt={"artifact": "a1b2", "others": [{}]}),
            "publish one of those that it chooses from",
        ),
    ],
)
def test_what_vllm_cannot_run_is_refused_with_what_it_can(refused: Policy, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        gammas(refused)


def test_every_number_of_tokens_is_named_to_the_server() -> None:
    for most, seqs in ((8, 256), (8, 4), (1, 2)):
        window = every_gamma(most, seqs)
        named = set(window.gamma.values())
        assert named == set(range(max(0, most - seqs + 1), most + 1))
        ranges = schedule_of(window)
        assert [r[0] for r in ranges[1:]] == [r[1] + 1 for r in ranges[:-1]]
        assert {n: g for first, last, g in ranges for n in range(first, min(last, seqs) + 1)} == {
            n: window.at(n) for n in range(1, seqs + 1)
        }


COMMAND = ("engines", "vllm")


def config_in(line: str) -> dict[str, Any]:
    """The speculative configuration of a printed line."""
    words = shlex.split(line)
    config: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return config


def test_the_printed_commands_serve_the_pair_and_follow_it(tiny_pair: Path, tmp_path: Path) -> None:
    spec, door = read_pair(str(tiny_pair)), Door(str(tmp_path / "a b.db"))
    folder = tmp_path / "a folder"

    def printed(*more: object) -> dict[str, Any]:
        return door.json(*COMMAND, "--pair", tiny_pair, "--folder", folder, *more)

    lines = printed("--draft", "far")
    words = shlex.split(lines["serve"])
    assert words[:6] == ["mkdir", "-p", "-m", "700", str(folder), "&&"]
    assert words[6:10] == [f"SPECTUNE_FOLDER={folder}", "vllm", "serve", spec.target]
    assert words[words.index("--scheduler-cls") + 1] == "spectune.engines.vllm.agent.Scheduler"
    assert words[words.index("--generation-config") + 1] == "vllm"
    follow = ["spectune", "--db", str(tmp_path / "a b.db"), "follow", str(folder)]
    assert shlex.split(lines["follow"]) == [*follow, "--pair", str(tiny_pair)]
    far = {"method": "draft_model", "model": dict(spec.drafts)["far"]}
    config = config_in(lines["serve"])
    assert far.items() <= config.items()
    assert config["num_speculative_tokens"] == 3
    lookup = config_in(printed("--draft", "ngram", "--gamma", 5)["serve"])
    assert (lookup["method"], lookup["num_speculative_tokens"]) == ("ngram", 5)
    refused = door.refused(*COMMAND, "--pair", tiny_pair, "--draft", "x")
    assert "no such draft; it has: near, far, ngram" in refused


def test_the_printed_command_starts_at_the_number_that_was_asked_for(
    tiny_pair: Path, tmp_path: Path
) -> None:
    """And names every number that may be published later, at the largest batches: vLLM captures
    full graphs for those alone."""
    door = Door(str(tmp_path / "x.db"))
    for gamma, most in ((2, 8), (3, 3)):
        options = ("--gamma", gamma, "--gamma-max", most, "--max-num-seqs", 256)
        config = config_in(str(door.json(*COMMAND, "--pair", tiny_pair, *options)["serve"]))
        assert config["num_speculative_tokens"] == most
        ranges = config["num_speculative_tokens_per_batch_size"]
        assert (ranges[0][0], ranges[0][2]) == (1, gamma)
        by_size = [tokens for first, last, tokens in ranges for _ in range(first, last + 1)][:256]
        assert set(by_size) == set(range(most + 1))
        assert by_size.count(gamma) == 256 - most
    refused = door.refused(*COMMAND, "--pair", tiny_pair, "--gamma", 4, "--gamma-max", 3)
    assert "--gamma 4 is more than --gamma-max 3" in refused


def test_the_printed_command_holds_no_password(tiny_pair: Path) -> None:
    for url in ("user:h%40rd@db.local/traffic", "user@db.local/x?password=h%40rd"):
        result = Door(f"postgresql://{url}").call(*COMMAND, "--pair", tiny_pair)
        assert result.exit_code == 0, result.output
        assert "h%40rd" not in result.output
        assert "h@rd" not in result.output
        assert "set SPECTUNE_DB first" in result.stderr


def test_an_engine_that_is_not_known_is_named() -> None:
    assert all(engine_named(name) is engine for name, engine in ENGINES.items())
    with pytest.raises(TraceError, match="'mlc' is unknown here"):
        engine_named("mlc")


@pytest.mark.parametrize("draft", ["near", "far", "ngram"])
def test_after_the_first_token_panoramas_are_those_of_a_longer_prompt(
    pair: LoadedPair, draft: str
) -> None:
    rng = np.random.default_rng(3)
    text = rng.integers(0, 300, 24).astype(np.int32)
    for start in range(8):  # the draft is wrong about the first token here, right there
        ids = text[start : start + 6], text[start + 6 :]
        whole = Trajectory("r", "c", Tokens(*ids), Sampling(), 40, "length")
        panoramas = {draft: record_panorama(pair, whole, draft, 5)}
        cut = RecordedRequest(0, whole, panoramas).after_first()
        assert cut.trajectory.prompt_ids.tolist() == text[start : start + 7].tolist()
        assert cut.trajectory.max_new_tokens == 39
        assert cut.panoramas[draft] == record_panorama(pair, cut.trajectory, draft, 5)


def test_after_the_first_token_trees_replay_as_those_of_a_longer_prompt(pair: LoadedPair) -> None:
    text = np.random.default_rng(3).integers(0, 300, 30).astype(np.int32)
    whole = Trajectory("r", "c", Tokens(text[:6], text[6:]), Sampling(), 40, "length")
    growth = {"kind": "top_k", "width": 2, "score": "probability"}
    grown = near(3, growth=growth)

    def trees(of: Trajectory) -> Panorama:
        return record_panorama(pair, of, "near", 3, 2, 3)

    cut = RecordedRequest(0, whole, {"near": trees(whole)}).after_first()

    def replayed(each: Panorama) -> object:
        trace = ReplayTrace([cut.trajectory], {"near": [each]})
        return run_replay(trace, grown, per_round=True).steps()

    assert replayed(cut.panoramas["near"]) == replayed(trees(cut.trajectory))


def looked_up(text: list[int], most: int, least: int) -> int | None:
    """Where vLLM copies from after a text, as its page has it: the earliest place after the longest
    suffix that occurred before."""
    for n in range(most, least - 1, -1):
        for place in range(n, len(text)):
            if text[place - n : place] == text[len(text) - n :]:
                return place
    return None


@pytest.mark.parametrize(("least", "most"), [(1, 3), (2, 4), (3, 3), (1, 1)])
def test_prompt_lookup_copies_from_the_earliest_place_after_the_longest_suffix(
    least: int, most: int
) -> None:
    rng = np.random.default_rng(least * 8 + most)
    for prompt in (1, 2, 7):
        text = rng.integers(0, 3, 40).tolist()
        ids = np.array(text, dtype=np.int32)
        of = Trajectory("r", "c", Tokens(ids[:prompt], ids[prompt:]), Sampling(), 40, "length")
        length, agree = copied(of, least, most).tolist()
        for at in range(prompt, len(text)):
            place = looked_up(text[:at], most, least)
            ahead = text[place:at] if place is not None else []
            same = [*(a == b for a, b in zip(ahead, text[at:], strict=False)), False].index(False)
            assert (length[at - prompt], agree[at - prompt]) == (len(ahead), same)


def test_engines_drafts_propose_their_likeliest_token_at_every_temperature(
    pair: LoadedPair,
) -> None:
    text = np.random.default_rng(5).integers(0, 300, 24).astype(np.int32)
    asked = Sampling(0.8, seed=1), 40, "length", "greedy"
    sampled = Trajectory("r", "c", Tokens(text[:6], text[6:]), *asked)
    greedy = replace(sampled, sampling=Sampling(), verifier="coupled")
    assert record_panorama(pair, sampled, "near", 4) == record_panorama(pair, greedy, "near", 4)


def served_request(
    name: str = "r0",
    sampling: Sampling = Sampling(),  # noqa: B008
) -> tuple[Trajectory, list[Step]]:
    tokens = np.arange(7, dtype=np.int32)
    steps = [Step(0, 0, 1, 0, 1, 0, batch=2), Step(1, 4, 5, 2, 3, 4, batch=3)]
    return Trajectory(name, "serve", Tokens(tokens[:3], tokens[3:]), sampling, 9, "length"), steps


def record_request(
    store: TraceStore, spec: PairSpec, request: Trajectory, steps: Sequence[Step]
) -> str:
    """A recording of vLLM's with this request; its id."""
    store.put_pair(spec.id, spec.name, spec.to_json(), spec.models)
    about = {"engine": "vllm", "engine_version": "0.32.0"}
    info = store.create_recording(Asked(spec.id, None, Sampling(), 512, options=about))
    store.append_trajectory(info.id, 0, request, steps)
    store.finish_recording(info.id)
    return info.id


def test_a_recording_of_an_engine_is_replayed_from_its_second_token_on(
    store: TraceStore, pair: LoadedPair
) -> None:
    request, steps = served_request()
    name = record_request(store, pair.spec, request, steps)
    store.put_panoramas(name, [(0, record_panorama(pair, request, "near", 4))])
    trace = open_trace(store, name, [near(4)]).trace
    assert [t.prompt_ids.tolist() for t in trace.trajectories] == [[0, 1, 2, 3]]
    assert trace.tokens == len(request.output_ids) - 1


def test_a_choice_by_prompt_is_not_fitted_to_an_engines_recording(
    store: TraceStore, url: str, tiny_pair: Path
) -> None:
    """Its prompts are replayed with their first token behind them: no prompt served here is."""
    record_request(store, read_pair(str(tiny_pair)), *served_request())
    said = Door(url).error("fit", "chooser", "--pair", tiny_pair)
    assert "is of vllm, which follows no policy by prompt" in said


def test_prompt_lookup_of_a_recording_is_replayed_by_the_engines_own_rule(
    store: TraceStore, tiny_pair: Path
) -> None:
    text = np.array([7, 8, 9, 1, 7, 8, 4, 7, 8, 9, 1, 7, 8, 5], dtype=np.int32)
    request = Trajectory("r", "serve", Tokens(text[:6], text[6:]), Sampling(), 20, "length")
    record_request(store, read_pair(str(tiny_pair)), request, served_request()[1])
    replayed = simulate(store, "latest", policy("ngram", 4), None, per_round=True).replay
    assert isinstance(replayed, Replay)
    # After "7 8 9 1 7 8 4" nothing is known; after "... 7" the first 8 9 1 7 is copied, and then
    # "5" follows where 8 4 stood.
    rounds = [(s.start, s.drafted, s.accepted) for s in replayed.steps()[0]]
    assert rounds == [(0, 0, 0), (1, 4, 4), (6, 4, 0)]

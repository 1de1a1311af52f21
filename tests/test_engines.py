"""Engines without an engine: tables of draft tokens, the command line, and what a server says to
the database and hears from it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from databases import put_in_force
from doors import Door
from synthetic import policy
from waiting import eventually

from spectune.cli import main
from spectune.db import DatabaseError
from spectune.engines.abilities import ENGINES, VLLM, engine_named
from spectune.engines.serving import RECORDINGS_LIMIT, Place, Served, Table
from spectune.engines.settings import schedule_of
from spectune.engines.vllm.command import every_gamma
from spectune.engines.vllm.prompt_lookup import copied
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import Replay, ReplayTrace
from spectune.optimizer.simulate.trace import open_trace, simulate
from spectune.runtime.loading import LoadedPair
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    ByBatchWindow,
    Policy,
    parse_policy,
)
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.errors import PairError, PolicyError, TraceError
from spectune.traces.recording import RecordedRequest
from spectune.traces.schema import Sampling, Step, Tokens
from spectune.traces.store import TraceStore
from spectune.traces.store.inventory import prune
from spectune.traces.store.traffic import CAPACITY
from spectune.traces.tables import Panorama, Trajectory

small, near = partial(policy, "small"), partial(policy, "near")


def gammas(of: Policy) -> tuple[int, ...]:
    return VLLM.gammas(of, draft="small", most=6, max_num_seqs=8)


def test_windows_by_batch_say_what_is_drafted_from_each_size_on() -> None:
    held = small({"16": 0, "1": 5, "4": 3})
    assert isinstance(held.window, ByBatchWindow)
    assert [held.window.at(n) for n in (1, 3, 4, 15, 16, 999)] == [5, 5, 3, 3, 0, 0]
    assert held.window.gamma_max == 5
    assert held.label() == "small by_batch(1: 5, 4: 3, 16: 0)"
    assert parse_policy(json.loads(held.model_dump_json())) == held


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
        small({"kind": "by_batch", "gamma": gamma})


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
            r"with a fixed or by_batch window, and nearest is 'small fixed\(gamma=\d+\)'",
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


def test_the_printed_command_serves_the_pair_with_its_draft(
    tiny_pair: Path, tmp_path: Path
) -> None:
    spec, door = read_pair(str(tiny_pair)), Door(str(tmp_path / "a b.db"))

    def printed(*asked: object) -> str:
        return str(door.json(*COMMAND, "--pair", tiny_pair, *asked)["line"])

    words = shlex.split(line := printed("--draft", "far"))
    assert words[:3] == [
        f"SPECTUNE_DB={tmp_path / 'a b.db'}",
        f"SPECTUNE_PAIR={tiny_pair}",
        "SPECTUNE_DEPLOYMENT=vllm",
    ]
    assert words[3:6] == ["vllm", "serve", spec.target]
    assert words[words.index("--scheduler-cls") + 1] == "spectune.engines.vllm.Scheduler"
    assert words[words.index("--generation-config") + 1] == "vllm"
    far = {"method": "draft_model", "model": dict(spec.drafts)["far"]}
    assert config_in(line) == {**far, "num_speculative_tokens": 3}
    lookup = config_in(printed("--draft", "ngram", "--gamma", 5))
    assert (lookup["method"], lookup["num_speculative_tokens"]) == ("ngram", 5)
    assert "num_speculative_tokens_per_batch_size" not in lookup
    told = door.call(*COMMAND, "--pair", tiny_pair, "--draft", "x")
    assert told.exit_code == 2
    assert "no such draft; it has: near, far, ngram" in told.stderr


def test_the_printed_command_starts_at_the_number_that_was_asked_for(
    tiny_pair: Path, tmp_path: Path
) -> None:
    """At every batch size, whatever may be published later."""
    door = Door(str(tmp_path / "x.db"))
    asked = ("--pair", tiny_pair, "--gamma", 2, "--gamma-max", 8, "--max-num-seqs", 256)
    config = config_in(str(door.json(*COMMAND, *asked)["line"]))
    assert config["num_speculative_tokens"] == 8
    ((first, last, tokens),) = config["num_speculative_tokens_per_batch_size"]
    assert (first, tokens) == (1, 2)
    assert last >= 256
    told = door.call(*COMMAND, "--pair", tiny_pair, "--gamma", 4, "--gamma-max", 3)
    assert told.exit_code == 2
    assert "--gamma 4 is more than --gamma-max 3" in told.stderr


@pytest.mark.parametrize(
    "url",
    ["postgresql://user:h%40rd@db.local/traffic", "postgresql://user@db.local/x?password=h%40rd"],
)
@pytest.mark.parametrize("typed", [True, False])
def test_the_printed_command_names_the_variable_that_holds_a_password(
    tiny_pair: Path, monkeypatch: pytest.MonkeyPatch, url: str, typed: bool
) -> None:
    if typed:
        monkeypatch.delenv("SPECTUNE_DB", raising=False)
    else:
        monkeypatch.setenv("SPECTUNE_DB", url)
    told = CliRunner().invoke(
        main, [*(("--db", url) if typed else ()), *COMMAND, "--pair", str(tiny_pair), "--json"]
    )
    assert told.exit_code == 0, told.output
    assert "h%40rd" not in told.output
    assert "h@rd" not in told.output
    assert json.loads(told.stdout)["line"].startswith('SPECTUNE_DB="$SPECTUNE_DB" SPECTUNE_PAIR=')
    assert ("export SPECTUNE_DB='postgresql://user" in told.stderr) is typed


def test_the_printed_command_reaches_the_environments_database(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From whatever folder it is started."""
    monkeypatch.chdir(tmp_path)
    for named, reached in (
        ("served.db", str(tmp_path / "served.db")),
        ("sqlite:///served.db", str(tmp_path / "served.db")),
        ("postgresql://user@db.local/traffic", "postgresql://user@db.local/traffic"),
    ):
        monkeypatch.setenv("SPECTUNE_DB", named)
        told = CliRunner().invoke(main, [*COMMAND, "--pair", str(tiny_pair)])
        assert told.exit_code == 0, told.output
        assert f"SPECTUNE_DB={reached}" in shlex.split(told.stdout)


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


def served(
    url: str, pair: Callable[[], tuple[PairSpec, str]], said: list[str], capacity: int = CAPACITY
) -> Served:
    """A server's side without the engine."""
    about = {"engine": "vllm", "engine_version": "0.32.0"}

    def gammas(of: Policy, draft: str) -> tuple[int, ...]:
        return VLLM.gammas(of, draft=draft, most=6, max_num_seqs=2)

    return Served(
        Place(url, "cpu", "node", about, 512, "vllm"), pair, Table((0, 6, 6)), gammas, said.append,
        interval_s=0.02, capacity=capacity,
    )  # fmt: skip


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def server(url: str, tiny_pair: Path, said: list[str]) -> Iterator[Served]:
    made = served(url, lambda: (read_pair(str(tiny_pair)), "near"), said)
    yield made
    made.close()


def test_a_server_follows_its_deployment_and_refuses_what_it_cannot_run(
    server: Served, store: TraceStore, said: list[str]
) -> None:
    eventually(lambda: bool(store.list_pairs()))
    pair_id = store.list_pairs()[0].id
    wanted = near({"1": 4, "2": 1})
    good = put_in_force(store, pair_id, wanted, deployment="vllm")
    eventually(lambda: server.current().version == good)
    assert server.current() == Table((0, 4, 1), wanted.id, good)
    bad = put_in_force(store, pair_id, near({"kind": "fsm"}), deployment="vllm")
    eventually(lambda: bool(store.acknowledgements(bad)))
    assert server.current().version == good
    (refused,), (applied,) = store.acknowledgements(bad), store.acknowledgements(good)
    assert (refused.node, refused.status, applied.status) == ("node", "refused", "applied")
    assert "vLLM cannot run a window of kind 'fsm'" in refused.reason
    assert any(f"publication {good} is in force" in line for line in said)


def test_served_requests_are_recorded_apart_by_their_sampling(
    server: Served, store: TraceStore
) -> None:
    for i in range(3):
        server.put(*served_request(f"r{i}"))
    server.put(*served_request("warm", Sampling(0.7)))
    done = server.close()
    assert (done.written, done.dropped, done.pending) == (4, 0, 0)
    found = {info.sampling.temperature: info for info in store.list_recordings()}
    told = {t: (i.n_requests, i.state, i.engine) for t, i in found.items()}
    assert told == {0.0: (3, "complete", "vllm"), 0.7: (1, "complete", "vllm")}
    kept = store.load(found[0.7].id, steps=True).requests[0]
    text, steps = served_request("warm", Sampling(0.7))
    assert kept.trajectory == text
    assert list(kept.steps) == [steps[0], steps[1]._replace(draft="near")]


def test_a_recording_of_an_engine_is_replayed_from_its_second_token_on(
    server: Served, store: TraceStore, pair: LoadedPair
) -> None:
    request, steps = served_request()
    server.put(request, steps)
    server.close()
    info = store.list_recordings()[0]
    store.put_panoramas(info.id, [(0, record_panorama(pair, request, "near", 4))])
    trace = open_trace(store, info.id, [near(4)]).trace
    assert [t.prompt_ids.tolist() for t in trace.trajectories] == [[0, 1, 2, 3]]
    assert trace.tokens == len(request.output_ids) - 1


def test_a_choice_by_prompt_is_not_fitted_to_an_engines_recording(
    server: Served, store: TraceStore, url: str, tiny_pair: Path
) -> None:
    """Its prompts are replayed with their first token behind them: no prompt served here is."""
    server.put(*served_request())
    server.close()
    said = Door(url).error("fit", "chooser", "--pair", tiny_pair)
    assert "is of vllm, which follows no policy by prompt" in said


def test_prompt_lookup_of_a_recording_is_replayed_by_the_engines_own_rule(
    server: Served, store: TraceStore
) -> None:
    text = np.array([7, 8, 9, 1, 7, 8, 4, 7, 8, 9, 1, 7, 8, 5], dtype=np.int32)
    request = Trajectory("r", "serve", Tokens(text[:6], text[6:]), Sampling(), 20, "length")
    server.put(request, served_request()[1])
    server.close()
    replayed = simulate(store, "latest", policy("ngram", 4), None, per_round=True).replay
    assert isinstance(replayed, Replay)
    # After "7 8 9 1 7 8 4" nothing is known; after "... 7" the first 8 9 1 7 is copied, and then
    # "5" follows where 8 4 stood.
    rounds = [(s.start, s.drafted, s.accepted) for s in replayed.steps()[0]]
    assert rounds == [(0, 0, 0), (1, 4, 4), (6, 4, 0)]


def test_a_database_that_comes_late_costs_nothing_but_what_does_not_fit(
    tmp_path: Path, tiny_pair: Path, said: list[str]
) -> None:
    folder = tmp_path / "later"
    made = served(
        f"sqlite:///{folder / 'x.db'}", lambda: (read_pair(str(tiny_pair)), "near"), said, 4
    )
    eventually(lambda: said)
    assert said[0].endswith("serving goes on")
    for i in range(6):
        made.put(*served_request(f"r{i}"))
    assert made.status.dropped == 2
    folder.mkdir()
    eventually(lambda: made.status.written == 4)
    assert len([line for line in said if "serving goes on" in line]) == 1
    made.close()


def test_more_kinds_of_sampling_than_recordings_are_dropped_counted_and_said(
    server: Served, said: list[str]
) -> None:
    for i in range(RECORDINGS_LIMIT + 3):
        server.put(*served_request(f"r{i}", Sampling(0.1 + i)))
    ways = f"(they are sampled in more than {RECORDINGS_LIMIT} ways)"
    eventually(lambda: any(line.endswith(ways) for line in said))
    done = server.close()
    assert (done.written, done.dropped) == (RECORDINGS_LIMIT, 3)


def test_a_recording_that_is_deleted_while_it_is_written_is_begun_anew(
    server: Served, store: TraceStore, said: list[str]
) -> None:
    server.put(*served_request("r0"))
    eventually(lambda: server.status.written == 1)
    (first,) = store.list_recordings()
    prune(store, ["recordings"], named=[first.id])
    server.put(*served_request("r1"))
    eventually(lambda: server.status.dropped == 1)
    eventually(lambda: any(first.id in line for line in said if "not recorded: 1" in line))
    server.put(*served_request("r2"))
    done = server.close()
    assert (done.written, done.dropped) == (2, 1)
    (second,) = store.list_recordings()
    assert (second.id != first.id, second.n_requests, second.state) == (True, 1, "complete")


def test_a_database_that_cannot_be_written_is_said_once_until_it_can(
    server: Served, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eventually(lambda: said)
    create = TraceStore.create_recording

    def full(*_: Any, **__: Any) -> None:
        raise DatabaseError("database or disk is full")

    monkeypatch.setattr(TraceStore, "create_recording", full)
    server.put(*served_request())
    eventually(lambda: any("disk is full" in line for line in said))
    looks = server._source.seen, len(said)
    time.sleep(0.2)  # ten looks, each of which finds the database readable
    assert (server._source.seen, len(said)) == looks
    monkeypatch.setattr(TraceStore, "create_recording", create)
    eventually(lambda: server.status.written == 1)
    assert "the database answers again" in said


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PairError("its target is another"), "its target is another"),
        (KeyError("model_type"), "KeyError: 'model_type'"),
    ],
)
def test_a_pair_that_cannot_be_told_is_said_and_nothing_recorded(
    tmp_path: Path, error: Exception, reason: str, said: list[str]
) -> None:
    def none() -> tuple[PairSpec, str]:
        raise error

    made = served(f"sqlite:///{tmp_path / 'x.db'}", none, said)
    eventually(lambda: said)
    assert said == [f"nothing is recorded or followed: {reason}"]
    made.put(*served_request())
    assert (made.status.dropped, made.status.pending) == (1, 0)
    assert made.close().dropped == 1
    assert not (tmp_path / "x.db").exists()

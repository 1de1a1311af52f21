"""A real vLLM server with the agent, executed on over HTTP and the agent's folder: the text and its
drafts predict every round under every policy, and policies come into force while it serves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from databases import opened
from doors import Door
from synthetic import policy
from vllm.v1.spec_decode.ngram_proposer import (
    _find_longest_matched_ngram_and_propose_tokens as vllm_lookup,
)

from spectune.db.database_errors import NotFoundError
from spectune.demo.prompts import demo_workload
from spectune.engines.abilities import VLLM
from spectune.engines.engine import Answered, Load, Prompt, Wanted
from spectune.engines.vllm.folder import read_status
from spectune.engines.vllm.prompt_lookup import LEAST
from spectune.engines.vllm.prompt_lookup import MOST as LONGEST
from spectune.engines.vllm.running import RunningServer
from spectune.engines.vllm.server import OwnServer
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.engine_profile import Design, serve_design, step_table
from spectune.optimizer.recording.on_engine import Turns
from spectune.optimizer.replay.served_costs import costs_of_engine
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import Policy
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.errors import EngineError
from spectune.traces.schema import Sampling
from spectune.traces.tables import Panorama, Trajectory

MOST, SEATS, TOKENS, ENDLESS = 8, 8, 12, 64
TEXTS: dict[str, dict[str, list[int]]] = {}
TABLES = [{"1": 8, "2": 5, "4": 3, "7": 1}, {"1": 6, "3": 0, "6": 2}]
WINDOWS = [{"kind": "fixed", "gamma": g} for g in (1, 4, 2, 3, 5, 7)] + [
    {"kind": "by_load", "gamma": table} for table in TABLES
]


@pytest.fixture(scope="module", params=["small", "medium", "head", "ngram"])
def server(request: pytest.FixtureRequest) -> Iterator[OwnServer]:
    running = OwnServer(read_pair("demo"), Wanted(request.param, MOST, SEATS, 400))
    yield running
    running.close()


only_small = pytest.mark.parametrize("server", ["small"], indirect=True)


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return load_pair(read_pair("demo"), device="cpu")


@pytest.fixture(scope="module")
def prompts(pair: LoadedPair) -> list[Prompt]:
    texts = [line["turns"][0] for line in demo_workload()][::4][:32]
    return [Prompt(f"p{n}", "demo", tuple(pair.encode(text))) for n, text in enumerate(texts)]


def execute(
    server: OwnServer,
    prompts: Sequence[Prompt],
    policy: Policy,
    load: Load,
    sampling: Sampling = Sampling(),  # noqa: B008
) -> list[Answered]:
    return list(server.execute(prompts, policy, load, sampling=sampling, max_new_tokens=TOKENS))


def texts_of(answers: Sequence[Answered]) -> dict[str, list[int]]:
    return {a.trajectory.request_id: a.trajectory.output_ids.tolist() for a in answers}


@dataclass(frozen=True)
class Ahead:
    """From an output position on: how many tokens the draft proposes at most, and how many of them
    the text goes on with."""

    length: int
    accepted: int


def ahead(pair: LoadedPair, trajectory: Trajectory, draft: str) -> list[Ahead]:
    """By output position; by the draft alone over the text."""
    places = range(len(trajectory.output_ids))
    if draft == "ngram":
        return [_copied(trajectory, at) for at in places]
    if draft == "head":
        grown = record_panorama(pair, trajectory, draft, MOST)
        return [Ahead(ENDLESS, _grown(grown, at)) for at in places]
    slots = record_panorama(pair, trajectory, draft, MOST).trie.text_slot.tolist()[: len(places)]
    return [Ahead(ENDLESS, [*(s == 0 for s in slots[at:]), False].index(False)) for at in places]


def _copied(trajectory: Trajectory, at: int) -> Ahead:
    output = trajectory.output_ids.tolist()
    text = np.array([*trajectory.prompt_ids.tolist(), *output[:at]], dtype=np.int32)
    copied = vllm_lookup(text, LEAST, LONGEST, 4096, MOST).tolist()
    agreeing = [a == b for a, b in zip(copied, output[at:], strict=False)]
    return Ahead(len(copied), [*agreeing, False].index(False))


def _grown(grown: Panorama, at: int) -> int:
    child = {int(p): grown.positions + 1 + i for i, p in enumerate(grown.trie.parent)}
    node, accepted = at, 0
    while node >= 0 and grown.trie.text_slot[node] == 0:
        node, accepted = child.get(node, -1), accepted + 1
    return accepted


def check_rounds(answer: Answered, drafts: list[Ahead], gammas: tuple[int, ...]) -> int:
    """Holds each round against what the draft alone says; how many there were.

    What a step drafts was decided in the one before, by the requests that it had. The last round of
    a text may draft and accept beyond it: its end is reached or not.
    """
    first, *rounds = answer.steps
    assert (first.start, first.drafted, first.emitted) == (0, 0, 1)
    for before, step in pairwise(answer.steps):
        where, there = (answer.trajectory.request_id, before, step), drafts[step.start]
        rest = len(answer.trajectory.output_ids) - step.start
        assert before.start + before.emitted == step.start
        assert step.drafted == min(gammas[before.batch], there.length), where
        expected = min(step.drafted, there.accepted)
        within = rest - 1 if step is rounds[-1] else ENDLESS
        assert min(step.accepted, within) == min(expected, within), where
    return len(rounds)


def test_a_text_and_its_drafts_predict_every_round_of_every_policy(
    server: OwnServer, pair: LoadedPair, prompts: list[Prompt]
) -> None:
    draft, rounds = server.draft, 0
    drafts: dict[str, list[Ahead]] = {}
    for window in WINDOWS if draft != "medium" else [*WINDOWS[:2], WINDOWS[6]]:
        chosen = policy(draft, window)
        gammas = VLLM.tables(chosen, draft=draft, most=MOST, max_num_seqs=SEATS)[0]
        for load in (Load(1), Load(8)):
            answers = execute(server, prompts, chosen, load)
            # No text depends on the policy, on who else is served, or on the server's draft.
            assert texts_of(answers) == TEXTS.setdefault("all", texts_of(answers))
            for answer in answers:
                text = answer.trajectory
                if text.request_id not in drafts:
                    drafts[text.request_id] = ahead(pair, text, draft)
                assert {step.policy for step in answer.steps} == {chosen.id}
                rounds += check_rounds(answer, drafts[text.request_id], gammas)
    print(f"{draft}: {rounds} rounds")
    assert rounds > 900


@pytest.mark.parametrize("server", ["small", "head", "ngram"], indirect=True)
def test_above_temperature_0_a_token_is_kept_iff_it_is_the_drafts_likeliest(
    server: OwnServer, pair: LoadedPair, prompts: list[Prompt]
) -> None:
    chosen = policy(server.draft, 4)
    gammas = VLLM.tables(chosen, draft=server.draft, most=MOST, max_num_seqs=SEATS)[0]
    answers = execute(server, prompts, chosen, Load(8), Sampling(0.8, 0, 0.9))
    assert {a.trajectory.verifier for a in answers} == {"greedy"}
    rounds = sum(check_rounds(a, ahead(pair, a.trajectory, server.draft), gammas) for a in answers)
    assert rounds > 100
    assert sum(step.accepted for answer in answers for step in answer.steps) > 20


@only_small
def test_every_load_and_arrival_is_kept(server: OwnServer, prompts: list[Prompt]) -> None:
    arrivals = Load(arrivals=tuple(0.05 * n for n in range(len(prompts))))
    answers = {
        a.trajectory.request_id: a for a in execute(server, prompts, policy("small", 4), arrivals)
    }
    for due, prompt in zip(arrivals.arrivals, prompts, strict=True):
        answer = answers[prompt.id]
        assert due <= answer.arrived_s <= answer.first_token_s <= answer.finished_s
    assert server.serving["max_num_seqs"] == SEATS


@only_small
def test_200_policies_while_8_clients_are_served_change_no_text(
    server: OwnServer, prompts: list[Prompt]
) -> None:
    turns, runs = Turns(server, [policy("small", gamma) for gamma in range(MOST + 1)]), 0
    seen = set[str]()
    while turns.taken < 200:
        answers = list(turns.serve(prompts, Load(8), DecodeOptions(max_new_tokens=TOKENS)))
        assert texts_of(answers) == TEXTS.setdefault("all", texts_of(answers))
        seen |= {step.policy for answer in answers for step in answer.steps}
        runs += 1
    print(f"{turns.taken} policies in {runs} runs of {len(prompts)} requests")
    assert len(seen) > 1


@only_small
def test_a_design_that_it_served_says_what_its_steps_cost(
    server: OwnServer, prompts: list[Prompt], tmp_path: Path
) -> None:
    """Policies take turns at each number of clients, and change no text: up to the most tokens, and
    none with the draft loaded."""
    with opened(tmp_path / "x.db") as store:
        design = Design(prompts, most=6, clients=4, tokens=TOKENS)
        name = serve_design(store, read_pair("demo"), server, "small", design)
        info = store.get_recording(name)
        with pytest.raises(NotFoundError, match="there is no recording yet"):
            store.get_recording("latest")  # it is no traffic
        costs = costs_of_engine(store, info)
        requests = store.load(name, (), steps=True).requests
    assert (info.options["device"], info.options["dtype"]) == ("cpu", "float32")
    policies = {p.id for p in design.policies("small")}
    steps = [s for request in requests for s in request.steps]
    alone, shared = ({s.policy for s in steps if (s.batch > 1) == one} for one in (False, True))
    assert alone == shared == policies
    texts = [request.trajectory.output_ids.tolist() for request in requests]
    assert texts == [texts[n % len(prompts)] for n in range(len(texts))]
    assert costs.passes == {"small": (0, 6)}
    assert costs.check["steps"] > 200
    rows = step_table(costs, "small", Design(prompts, 6, 4))
    assert all(ms > 0 for row in rows for ms in row.values())


@only_small
def test_a_server_that_runs_is_tuned_end_to_end(server: OwnServer, tmp_path: Path) -> None:
    """Recorded, raced and confirmed over HTTP; what is published is in force at the end."""
    RunningServer.close(server)  # who tried policies in it lets go; it goes on
    door = Door(str(tmp_path / "tuned.db"))
    where = ("--url", server.url, "--folder", server.folder, "--pair", "demo")
    where += ("--workload", "demo")
    how = ("--limit", 32, "--max-new-tokens", 16, "--arrivals", "clients:1,4", "--budget", "20s")
    began = time.monotonic()
    result = door.json("tune", *where, *how)
    print(f"{time.monotonic() - began:.0f} s: {result['reason']}")
    for row in result["executed"]:
        for load in row["loads"]:
            predicted = load["predicted"] and round(load["predicted"]["tokens_per_s"])
            print(row["label"], load["load"], predicted, round(load["measured"]["tokens_per_s"]))
    assert result["texts"]["differ"] == 0
    assert {"autoregressive"} < {row["label"] for row in result["executed"]}
    published, status = result["published"], read_status(server.folder)
    assert status is not None
    if published is not None:
        assert status.in_force.version == published["version"]
        assert status.in_force.policy == result["winner"]["id"]
    else:
        assert status.in_force.version == 0


@only_small
def test_a_server_that_dies_is_told_in_its_own_words(
    server: OwnServer, prompts: list[Prompt], tmp_path: Path
) -> None:
    answers = server.execute(
        prompts, policy("small", 4), Load(2), sampling=Sampling(), max_new_tokens=TOKENS
    )
    next(answers)
    server._server.process.kill()
    with pytest.raises(EngineError, match=r"vLLM died \(SIGKILL\): .*same command again"):
        list(answers)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["Nothing"], "vocab_size": 8}'
    )
    with pytest.raises(EngineError, match=r"^vLLM did not start: .*Nothing"):
        OwnServer(PairSpec(name="broken", target=str(tmp_path)), Wanted("none"))

"""Executing on a real vLLM server of our own: texts and rounds under every load, a server that is
killed, a model that it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from databases import opened
from served import SEATS, tokens_of

from spectune.db.errors import NotFoundError
from spectune.demo.prompts import demo_workload
from spectune.engines.protocol import Answered, Load, Prompt, Wanted
from spectune.engines.vllm.execute import Vllm
from spectune.optimizer.engine_profile import Design, serve_design, step_table
from spectune.optimizer.simulate.served_costs import costs_of_engine
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.errors import EngineError
from spectune.traces.schema import Sampling

TEXTS = [line["turns"][0] for line in demo_workload()][::6][:16]
FOUR = parse_policy({"draft": "small", "window": {"kind": "fixed", "gamma": 4}})
BY_BATCH = parse_policy(
    {"draft": "small", "window": {"kind": "by_batch", "gamma": {"1": 5, "4": 1}}}
)


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def running(said: list[str]) -> Iterator[Vllm]:
    made = Vllm(read_pair("demo"), Wanted("small", 6, SEATS, 512), said.append)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return [Prompt(f"p{i}", "demo", tuple(ids)) for i, ids in enumerate(tokens_of(TEXTS))]


def texts_of(answered: Sequence[Answered]) -> dict[str, list[int]]:
    return {a.trajectory.request_id: a.trajectory.output_ids.tolist() for a in answered}


def test_every_load_and_policy_gives_the_same_texts(running: Vllm, prompts: list[Prompt]) -> None:
    loads = [Load(1), Load(8), Load(arrivals=tuple(0.05 * i for i in range(len(prompts))))]
    known: dict[str, list[int]] = {}
    for load, policy in zip(loads, (FOUR, BY_BATCH, FOUR), strict=True):
        found = list(running.execute(prompts, policy, load, sampling=Sampling(), max_new_tokens=16))
        known = known or texts_of(found)
        assert texts_of(found) == known
        assert set(known) == {p.id for p in prompts}
        assert {s.policy for a in found for s in a.steps} == {policy.id}
        sizes = {s.batch for a in found for s in a.steps}
        assert max(sizes) > 3 if load.clients == 8 else load.arrivals or sizes == {1}
        by_id = {a.trajectory.request_id: a for a in found}
        for i, prompt in enumerate(prompts):
            a, due = by_id[prompt.id], load.arrivals[i] if load.arrivals else 0.0
            assert due <= a.arrived_s <= a.first_token_s <= a.finished_s
    assert running.serving["max_num_seqs"] == SEATS


def test_a_design_that_it_served_says_what_its_steps_cost(
    running: Vllm, prompts: list[Prompt], tmp_path: Path
) -> None:
    """Policies take turns at each number of clients, and change no text: up to the most tokens, and
    none with the draft loaded."""
    with opened(tmp_path / "x.db") as store:
        design = Design(prompts, most=6, clients=4, tokens=16)
        made = serve_design(store, read_pair("demo"), running, "small", design)
        info = store.get_recording(made)
        with pytest.raises(NotFoundError, match="there is no recording yet"):
            store.get_recording("latest")  # it is no traffic
        costs = costs_of_engine(store, info)
        served = store.load(made, (), steps=True).requests
    assert (info.options["device"], info.options["dtype"]) == ("cpu", "float32")
    wanted = {p.id for p in design.policies(running.engine, "small")}
    steps = [s for request in served for s in request.steps]
    alone, shared = ({s.policy for s in steps if (s.batch > 1) == one} for one in (False, True))
    assert alone == shared == wanted
    texts = [request.trajectory.output_ids.tolist() for request in served]
    assert texts == [texts[n % len(prompts)] for n in range(len(texts))]
    assert costs.passes == {"small": (0, 6)}
    assert costs.check["steps"] > 200
    rows = step_table(costs, running.engine, "small", Design(prompts, 6, 4))
    assert all(ms > 0 for row in rows for ms in row.values())


def test_a_server_that_dies_is_started_again_once_and_asked_what_it_had_not_answered(
    running: Vllm, prompts: list[Prompt], said: list[str]
) -> None:
    asked = {"sampling": Sampling(), "max_new_tokens": 8}
    known = texts_of(list(running.execute(prompts, FOUR, Load(8), **asked)))

    def killed() -> Iterator[Answered]:
        answers = running.execute(prompts, FOUR, Load(2), **asked)
        yield next(answers)
        running.server._process.kill()
        yield from answers

    assert texts_of(list(killed())) == known
    (line,) = said
    assert "it is started again" in line
    with pytest.raises(EngineError, match="vLLM died again"):
        list(killed())


def test_a_model_that_it_cannot_load_is_said_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["Nothing"], "vocab_size": 8}'
    )
    with pytest.raises(EngineError, match=r"^vLLM did not start: .*Nothing"):
        Vllm(PairSpec(name="broken", target=str(tmp_path)), Wanted("none"))

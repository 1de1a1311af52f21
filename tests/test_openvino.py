"""The circle on a real OpenVINO GenAI: what it recorded says what it does under every other policy
and with another draft."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from databases import opened, run_sql
from doors import Door
from synthetic import policy

from spectune.db import open_database, upgrade
from spectune.engines.abilities import Engine
from spectune.engines.openvino import OpenVino, model_folder
from spectune.engines.protocol import Answered, Load, Prompt, Wanted
from spectune.engines.start import start
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.inputs import read_files
from spectune.optimizer.on_engine import outcome_on, prompts_of, record_on
from spectune.optimizer.record import PanoramaSpec, record_panoramas
from spectune.optimizer.simulate.replay_trace import Replay
from spectune.optimizer.simulate.trace import simulate
from spectune.runtime.loading import load_pair
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.text_codec import load_codec
from spectune.settings import Requests
from spectune.traces.errors import EngineError, PairError, PolicyError, TraceError, WorkloadError
from spectune.traces.schema import Sampling, Step, Workload
from spectune.traces.store import TraceStore

OPTIONS = DecodeOptions(max_new_tokens=32)
MOST = 6


fixed = partial(policy, "small")


@pytest.fixture(scope="module")
def workload() -> Workload:
    return read_files(["demo"], Requests(limit=8))


@pytest.fixture(scope="module")
def prompts(demo: PairSpec, workload: Workload) -> tuple[Prompt, ...]:
    return prompts_of(load_codec(demo), workload, OPTIONS)


@pytest.fixture(scope="module")
def running(demo: PairSpec) -> Iterator[OpenVino]:
    made = start("openvino", demo, Wanted("small", MOST, 4, 320, threads=1))
    assert isinstance(made, OpenVino)
    yield made
    made.close()


@pytest.fixture(scope="module")
def recorded(
    demo: PairSpec,
    running: OpenVino,
    workload: Workload,
    prompts: tuple[Prompt, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TraceStore]:
    """A database with one recording, of two tokens drafted for each of three clients, looked around
    in by two drafts."""
    url = f"sqlite:///{tmp_path_factory.mktemp('openvino') / 'x.db'}"
    upgrade(url)
    with opened(url) as store:
        info = record_on(store, demo, running, workload, prompts, fixed(2), Load(3), OPTIONS)
        record_panoramas(
            store, load_pair(demo, device="cpu"), info.id, PanoramaSpec(("small", "medium"), MOST)
        )
        store.finish_recording(info.id)
        yield store


def served(
    running: OpenVino, prompts: Sequence[Prompt], policy: Policy, load: Load
) -> list[Answered]:
    found = running.execute(
        prompts, policy, load, sampling=Sampling(), max_new_tokens=OPTIONS.max_new_tokens
    )
    return sorted(found, key=lambda done: [p.id for p in prompts].index(done.trajectory.request_id))


def rounds(steps: Sequence[Step], first: int) -> list[tuple[int, int, int]]:
    return [(s.start + first, s.drafted, s.emitted) for s in steps]


def held_against_replay(store: TraceStore, policy: Policy, answered: Sequence[Answered]) -> int:
    """How many rounds were compared with what the recording predicts; the first, which reads the
    prompt, is not replayed."""
    replay = simulate(store, "latest", policy, None, per_round=True).replay
    assert isinstance(replay, Replay)
    kept = store.load("latest").requests
    for request, predicted, done in zip(kept, replay.steps(), answered, strict=True):
        assert done.trajectory == request.trajectory
        assert (done.steps[0].start, done.steps[0].drafted, done.steps[0].emitted) == (0, 0, 1)
        assert rounds(done.steps[1:], 0) == rounds(predicted, 1)
    return sum(len(done.steps) - 1 for done in answered)


def test_one_recording_predicts_every_round_of_every_number_of_tokens(
    recorded: TraceStore, running: OpenVino, prompts: tuple[Prompt, ...]
) -> None:
    compared = 0
    for gamma, clients in ((0, 4), (4, 1), (6, 4)):
        tried = fixed(gamma) if gamma else AUTOREGRESSIVE
        answered = served(running, prompts, tried, Load(clients))
        compared += held_against_replay(recorded, tried, answered)
        assert max(step.batch for done in answered for step in done.steps) == clients
        ended = [step.ended_s for done in answered for step in done.steps]
        assert all(ended.count(s.ended_s) == s.batch for done in answered for s in done.steps)
    assert compared > 290


def test_a_draft_that_it_never_ran_does_what_retracing_predicts(
    recorded: TraceStore, demo: PairSpec, prompts: tuple[Prompt, ...]
) -> None:
    other = start("openvino", demo, Wanted("medium", 5, 4, 320, threads=1))
    assert isinstance(other, OpenVino)
    five = policy("medium", 5)
    answered = served(other, prompts, five, Load(4))
    assert held_against_replay(recorded, five, answered) > 50
    other.close()


def test_its_recording_says_what_made_it(recorded: TraceStore, running: OpenVino) -> None:
    info = recorded.get_recording("latest")
    assert (info.engine, info.state) == ("openvino", "complete")
    assert info.options["engine_version"] == running.version
    assert info.options["serving"]["drafts_after"] is False
    kept = recorded.load(info.id, steps=True).requests
    assert {s.policy for r in kept for s in r.steps} == {fixed(2).id}
    assert max(s.batch for r in kept for s in r.steps) == 3


def test_requests_come_when_they_are_due(running: OpenVino, prompts: tuple[Prompt, ...]) -> None:
    moments = (0.0, 0.05, 0.05, 0.3)
    answered = served(running, prompts[:4], fixed(3), Load(arrivals=moments))
    assert tuple(done.arrived_s for done in answered) == moments
    assert all(done.arrived_s < done.first_token_s < done.finished_s for done in answered)
    total = outcome_on("p", answered).total
    assert total.emitted_tokens == sum(len(done.trajectory.output_ids) for done in answered)
    # Of the engine: it also waited.
    assert 0 < total.seconds < max(done.finished_s for done in answered)


def test_what_is_left_unread_does_not_hold_up_the_next(
    running: OpenVino, prompts: tuple[Prompt, ...]
) -> None:
    left = running.execute(prompts, fixed(3), Load(4), sampling=Sampling(), max_new_tokens=32)
    first = next(left)
    left.close()
    assert len(served(running, prompts[:1], fixed(3), Load())) == 1
    assert first.trajectory.request_id in {p.id for p in prompts}


def test_an_end_that_is_the_last_token_asked_for_is_an_end(
    recorded: TraceStore,
    running: OpenVino,
    prompts: tuple[Prompt, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = recorded.load("latest").trajectories[0].output_ids.tolist()
    last = next(i for i in range(8, 32) if output[i] not in output[:i])
    monkeypatch.setattr(running, "_eos", {output[last]})
    asked = {"sampling": Sampling(), "max_new_tokens": last + 1}
    (done,) = running.execute(prompts[:1], fixed(3), Load(), **asked)
    assert done.trajectory.output_ids.tolist() == output[: last + 1]
    assert done.trajectory.finish == "eos"


def test_a_checkpoint_is_converted_once_for_its_content(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(read_pair(str(tiny_pair)).target, tmp_path / "model"))
    made = model_folder(str(folder), "1")
    (model,) = made.glob("*model.xml")
    moment = model.stat().st_mtime_ns
    assert model_folder(str(folder.rename(tmp_path / "elsewhere")), "1") == made
    assert model.stat().st_mtime_ns == moment
    folder = tmp_path / "elsewhere"
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(PairError, match=f"OpenVINO GenAI: {folder} cannot be converted"):
        model_folder(str(folder), "1")
    assert list(made.parent.iterdir()) == [made]


def test_other_refusals_name_what_is_wrong(
    running: OpenVino, demo: PairSpec, prompts: tuple[Prompt, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_load = parse_policy({"draft": "small", "window": {"kind": "by_load", "gamma": {"1": 3}}})
    with pytest.raises(PolicyError, match=r"nearest is 'small fixed\(gamma=3\)'"):
        running.execute(prompts, by_load, Load(), sampling=Sampling(), max_new_tokens=8)
    with pytest.raises(PolicyError, match="at temperature 0 alone"):
        running.execute(prompts, fixed(1), Load(), sampling=Sampling(0.7), max_new_tokens=8)
    with pytest.raises(WorkloadError, match="exceed the 320 that the engine was started for"):
        running.execute(prompts, fixed(1), Load(), sampling=Sampling(), max_new_tokens=310)
    for draft in ("head", "ngram"):
        with pytest.raises(PairError, match=f"not '{draft}'; the pair has: small, medium$"):
            start("openvino", demo, Wanted(draft))
    with pytest.raises(EngineError, match="is not executed from here"):
        start("native", demo, Wanted("small"))
    with pytest.raises(TraceError, match="arrivals are seconds from the start"):
        Load(arrivals=(1.0, 0.5))
    monkeypatch.setattr(Engine, "installed", None)
    with pytest.raises(EngineError, match="not installed here; `pip install openvino-genai`"):
        start("openvino", demo, Wanted("small"))


def test_run_and_record_take_the_engine(tmp_path: Path) -> None:
    door, three = Door(str(tmp_path / "x.db")), json.dumps(fixed(3).spelled_out())
    common = ("--pair", "demo", "--limit", 4, "--max-new-tokens", 12, "--policy", three)
    common += ("--threads", 1)
    engine = ("--engine", "openvino", "--concurrency", 2)
    rows, texts, texts_of_native = (tmp_path / name for name in ("rows", "texts", "native"))
    native = door.json("run", *common, "--outputs", texts_of_native)
    kept = ("--record", "--per-round", rows, "--outputs", texts)
    done = door.call("run", *common, *engine, *kept, "--device", "cuda", "--json")
    assert "no effect (OpenVINO GenAI runs on the CPU in float32 here): --device" in done.stderr
    data = json.loads(done.stdout)
    assert native.keys() | {"engine", "engine_version", "concurrency"} == data.keys()
    assert (data["engine"], data["concurrency"]) == ("openvino", 2)
    assert data["emitted_tokens"] == native["emitted_tokens"]
    assert data["latency"]["requests"] == 4
    assert texts.read_text() == texts_of_native.read_text()
    assert {json.loads(row)["batch"] for row in rows.read_text().splitlines()} <= {1, 2}
    assert "recording rec-" in done.stderr
    done = door.call("record", *common, *engine, "--tree-width", 4, "--json")
    assert "no effect (--engine openvino drafts chains alone): --tree-width" in done.stderr
    data = json.loads(done.stdout)
    assert data["options"]["engine"] == "openvino"
    assert sorted(data["drafts"]) == ["medium", "ngram", "small"]
    own = [{"prompt": "def add(a, b):", "max_tokens": most, "stop": "x"} for most in (3, 9, 99)]
    (tmp_path / "own").write_text("".join(f"{json.dumps(row)}\n" for row in own))
    asks = ("--pair", "demo", "--workload", tmp_path / "own", *common[4:], "--outputs", texts)
    said = door.call("run", *asks, *engine)
    assert said.exit_code == 0, said.output
    assert "ignored: stop in 3 requests (OpenVINO GenAI is not told of stop" in said.stderr
    found = [json.loads(row)["token_ids"] for row in texts.read_text().splitlines()]
    assert [len(ids) for ids in found] == [3, 9, 12]


TREE = '{"draft": "small", "growth": {"kind": "top_k"}}'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--concurrency", "2"), "the native decoder serves one"),
        (("run", "--engine", "openvino", "--stop", "x"), "is not told of stop strings"),
        (("run", "--engine", "openvino", "--policy", TREE), "cannot run trees"),
    ],
)
def test_options_that_an_engine_has_not_are_refused_in_a_line(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    told = Door(str(tmp_path / "x.db")).call(*words, "--pair", "demo", "--limit", "1")
    assert told.exit_code == 2
    assert said in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1 or told.stderr.startswith("Usage")


def test_what_is_best_under_load_is_executed_beside_its_prediction(recorded: TraceStore) -> None:
    """`tune --arrivals --serve`: recorded prompts are served again, with the same texts."""
    asked = "tune --engine openvino --arrivals clients:3 --serve --budget 1s --limit 4"
    door = Door(str(recorded.database.url.database))
    told = door.json(*asked.split(), "--pair", "demo", "--no-publish", "--threads", 1)
    assert told["kind"] == "executed"
    assert told["policy_id"] in [one["policy_id"] for one in told["executed"]]
    assert told["texts"]["compared"] > 0
    assert told["texts"]["differ"] == 0
    for one in told["executed"]:
        assert [load["load"] for load in one["loads"]] == ["clients:3"]
        assert all(load["measured"]["tokens_per_s"] > 0 for load in one["loads"])


def test_a_profile_says_what_steps_cost_that_were_never_served(
    recorded: TraceStore, tmp_path: Path
) -> None:
    """Its recordings are the engine's: they tell of 3 drafted tokens where traffic drafted 2."""
    run_sql(str(recorded.database.url.database), f"VACUUM INTO '{tmp_path / 'x.db'}'")
    door, recording = Door(str(tmp_path / "x.db")), recorded.get_recording("latest").id
    three = ("--policy", json.dumps(fixed(3).spelled_out()), "--arrivals", "clients:1")
    asked = ("simulate", "--recording", recording, *three)
    assert "is not known: those recorded drafted 0 to 2" in door.error(*asked)
    profile = "profile --pair demo --threads 1 --engine"
    measured = "openvino --concurrency 1 --gamma-max 3 --contexts 9 --json"
    done = door.call(f"{profile} {measured}")
    assert "no effect on openvino, which is measured while it serves: --contexts" in done.stderr
    assert f"prompts of recording {recording}" in done.stderr
    data = json.loads(done.stdout)
    assert set(data["left_out"]) == {"head", "ngram"}
    most = {draft: told["most"] for draft, told in data["drafts"].items()}
    assert most == {"": 0, "small": 3, "medium": 3}
    for draft, told in data["drafts"].items():
        assert [row["batch"] for row in told["step_ms"]] == [1]
        for row in told["step_ms"]:
            assert set(row) == {"batch", *("123" if draft else "0")}
            assert min(row.values()) > 0
    assert data["costs"]["steps"] > 200
    assert door.json(*asked)["costs"]["steps"] == data["costs"]["steps"]
    with open_database(door.db, create=False) as database:
        store = TraceStore(database)
        infos = [store.get_recording(name) for name in data["recordings"]]
        kept = store.load(infos[0].id, steps=True).requests
        assert store.get_recording("latest").id == recording  # a profile is no traffic
    assert [(i.engine, i.state, i.n_requests, i.options["dtype"]) for i in infos] == [
        ("openvino", "complete", n, "float32") for n in (4, 12, 12)
    ]
    assert {s.batch for r in kept for s in r.steps} == {1}

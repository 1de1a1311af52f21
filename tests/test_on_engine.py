"""`run`, `record` and `profile` on an engine, by command, beside servers that speak HTTP and the
agent's folder; what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from databases import opened
from doors import Door, lines, write_lines
from doubles import served
from synthetic import policy

from spectune.engines.engine import Wanted
from spectune.engines.start import start
from spectune.engines.vllm.running import RunningServer
from spectune.runtime.loading import LoadedPair
from spectune.runtime.pair import PairSpec, read_pair
from spectune.traces.errors import EngineError

THREE = json.dumps(policy("near", 3).spelled_out())
TREE = '{"draft": "near", "growth": {"kind": "top_k"}}'
WORDS = ("def add(a, b):", "The quick brown fox", "Question: Ann has", "for i in range(10):")


@pytest.fixture
def door(tmp_path: Path, tiny_pair: Path) -> Door:
    return Door(str(tmp_path / "x.db"), str(tiny_pair))


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    write_lines(file, [{"prompt": f"{WORDS[n % 4]} {n}"} for n in range(8)])
    return file


@pytest.fixture
def started(
    tmp_path: Path, pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Wanted]]:
    """An engine that starts a server for what is wanted, of any draft but prompt lookup; how it was
    started."""
    wants = list[Wanted]()
    with ExitStack() as running:

        def start(_name: str, spec: PairSpec, wanted: Wanted) -> RunningServer:
            if wanted.draft == "ngram":
                raise EngineError("it cannot load ngram")
            wants.append(wanted)
            draft = None if wanted.draft == "none" else wanted.draft
            fake = running.enter_context(served(tmp_path / f"server{len(wants)}", pair, draft))
            return RunningServer(fake.url, fake.folder, spec)

        for module in ("commands.decoding", "recording.engine_profile"):
            monkeypatch.setattr(f"spectune.optimizer.{module}.start", start)
        yield wants


def test_run_and_record_take_the_engine(
    door: Door, workload: Path, tmp_path: Path, started: list[Wanted]
) -> None:
    sizes = ("--workload", workload, "--max-new-tokens", 12)
    common = ("--pair", door.pair, *sizes, "--policy", THREE, "--threads", 1)
    engine = ("--engine", "vllm", "--concurrency", 2)
    rows, texts, texts_of_native = (tmp_path / name for name in ("rows", "texts", "native"))
    native = door.json("run", *common, "--outputs", texts_of_native)
    kept = ("--record", "--per-round", rows, "--outputs", texts)
    told = door.call("run", *common, *engine, *kept, "--dtype", "float32", "--json")
    assert told.exit_code == 0, told.output
    assert "no effect: --set dtype (acts on the native decoder" in told.stderr
    data = json.loads(told.stdout)
    assert native.keys() | {"engine", "engine_version", "concurrency"} == data.keys()
    assert (data["engine"], data["concurrency"]) == ("vllm", 2)
    assert data["emitted_tokens"] == native["emitted_tokens"]
    assert data["latency"]["requests"] == 8
    assert texts.read_text() == texts_of_native.read_text()
    assert {row["batch"] for row in lines(rows)} == {1, 2}
    assert "recording rec-" in told.stderr
    (wanted,) = started
    assert (wanted.draft, wanted.most, wanted.max_num_seqs, wanted.threads) == ("near", 3, 2, 1)
    told = door.call("record", *common, *engine, "--tree-width", 4, "--json")
    assert "no effect: --tree-width (acts on the native decoder)" in told.stderr
    data = json.loads(told.stdout)
    assert data["options"]["engine"] == "vllm"
    assert sorted(data["drafts"]) == ["far", "near", "ngram"]


@pytest.mark.usefixtures("started")
def test_requests_for_fewer_tokens_get_fewer(door: Door, tmp_path: Path) -> None:
    file, texts = tmp_path / "own.jsonl", tmp_path / "texts"
    write_lines(file, [{"prompt": WORDS[0], "max_tokens": n, "stop": "x"} for n in (3, 9, 99)])
    asked = ("--workload", file, "--max-new-tokens", 12, "--policy", THREE, "--outputs", texts)
    told = door.call("run", "--pair", door.pair, *asked, "--engine", "vllm")
    assert told.exit_code == 0, told.output
    assert "ignored: stop in 3 requests (vLLM is not told of stop" in told.stderr
    assert [len(row["token_ids"]) for row in lines(texts)] == [3, 9, 12]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--engine", "vllm", "--stop", "x"), "is not told of stop strings"),
        (("run", "--engine", "vllm", "--policy", TREE), "cannot run trees"),
        (("record", "--engine", "vllm", "--resume", "latest"), "leave --engine out"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_in_a_line(
    door: Door, words: tuple[str, ...], said: str
) -> None:
    assert said in door.refused(*words, "--pair", door.pair, "--workload", "demo", "--limit", "1")


def test_an_engine_that_is_not_executed_from_here_is_named(tiny_pair: Path) -> None:
    with pytest.raises(EngineError, match="spectune is not executed from here; known: vllm"):
        start("native", read_pair(str(tiny_pair)), Wanted("near"))


def test_a_profile_says_what_steps_cost_that_were_never_served(
    door: Door, workload: Path, started: list[Wanted]
) -> None:
    """Its recordings are the engine's: they tell of 2 drafted tokens where traffic drafted 3."""
    sizes = ("--workload", workload, "--max-new-tokens", 24, "--policy", THREE)
    recording = door.json("record", "--pair", door.pair, *sizes, "--engine", "vllm")["recording"]
    two = ("--policy", json.dumps(policy("near", 2).spelled_out()), "--arrivals", "clients:1")
    asked = ("simulate", "--recording", recording, *two)
    assert "is not known: those recorded drafted 3" in door.error(*asked)
    measured = ("--engine", "vllm", "--concurrency", 1, "--gamma-max", 3, "--contexts", 9)
    told = door.call("profile", "--pair", door.pair, "--threads", 1, *measured, "--json")
    assert told.exit_code == 0, told.output
    assert "no effect: --contexts (acts on the native decoder)" in told.stderr
    assert f"prompts of recording {recording}" in told.stderr
    assert [wanted.draft for wanted in started] == ["near", "none", "near", "far"]
    data = json.loads(told.stdout)
    assert data["left_out"] == {"ngram": "it cannot load ngram"}
    most = {draft: of["most"] for draft, of in data["drafts"].items()}
    assert most == {"": 0, "near": 3, "far": 3}
    for draft, of in data["drafts"].items():
        assert [row["batch"] for row in of["step_ms"]] == [1]
        for row in of["step_ms"]:
            assert set(row) == {"batch", *("123" if draft else "0")}
            assert min(row.values()) > 0
    assert door.json(*asked)["costs"]["steps"] == data["costs"]["steps"] > 200
    with opened(door.db) as store:
        infos = [store.get_recording(name) for name in data["recordings"]]
        kept = store.load(infos[0].id, steps=True).requests
        assert store.get_recording("latest").id == recording  # a profile is no traffic
    assert {(info.engine, info.state) for info in infos} == {("vllm", "complete")}
    assert infos[0].n_requests == 4
    assert all(info.n_requests >= 12 for info in infos[1:])
    assert {step.batch for request in kept for step in request.steps} == {1}

"""vLLM's agent over a stand-in for vLLM's scheduler: what it notes, follows, refuses, survives."""

from __future__ import annotations

import ast
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from waiting import eventually

import spectune.engines.vllm

SOURCE = Path(spectune.engines.vllm.__file__).with_name("agent.py")
SEATS, MOST, TOKENS = 4, 6, 20


class Fault(Exception):
    """What is raised before a statement."""


def parallel(**sizes: int) -> SimpleNamespace:
    alone = {"data_parallel_size": 1, "pipeline_parallel_size": 1, "world_size": 1}
    return SimpleNamespace(**alone | sizes)


class Core:
    """vLLM's scheduler as far as the agent uses it. Request n keeps ``(n + position) % 4`` of its
    drafted tokens; ``steps`` is all that it decided."""

    def __init__(self, config: Any, lookup: Any = None) -> None:
        self.vllm_config, self.scheduler_config = config, config.scheduler_config
        self.num_spec_tokens, self.dynamic_sd_lookup = MOST, lookup
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.steps: list[Any] = []

    def add(self, name: str, **params: Any) -> None:
        sampling = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "seed": None, "stop": []}
        request = SimpleNamespace(
            request_id=name, prompt_token_ids=[1, 2, 3], output_token_ids=[], num_output_tokens=0,
            num_computed_tokens=3, spec_token_ids=[], is_prefill_chunk=False,
            num_output_placeholders=0, lora_request=None, mm_features=[], resumable=False,
            arrival_time=5.0, max_tokens=TOKENS, stop_reason=None,
            status=SimpleNamespace(name="RUNNING"),
            sampling_params=SimpleNamespace(**{**sampling, "extra_args": None, **params}),
        )  # fmt: skip
        request.is_finished = lambda: request.status.name != "RUNNING"
        self.requests[name] = request
        self.running.append(request)

    def schedule(self) -> Any:
        running, lookup = self.running, self.dynamic_sd_lookup
        drafts = {r.request_id: r.spec_token_ids for r in running if r.num_output_tokens}
        tokens = MOST if lookup is None else lookup[len(running)]
        self.steps.append((sorted(self.requests), drafts, tokens))
        return SimpleNamespace(
            num_scheduled_tokens={r.request_id: 1 for r in running},
            scheduled_spec_decode_tokens={name: d for name, d in drafts.items() if d},
            num_spec_tokens_to_schedule=tokens, num_invalid_spec_tokens=None,
            has_structured_output_requests=False, pending_structured_output_tokens=False,
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id) for r in running if not r.num_output_tokens
            ],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )  # fmt: skip

    def update_from_output(self, output: Any, result: Any) -> str:
        for name, tokens in zip(result.req_id_to_index, result.sampled_token_ids, strict=True):
            request = self.requests[name]
            del tokens[TOKENS - request.num_output_tokens :]
            request.output_token_ids += tokens
            request.spec_token_ids = [7] * output.num_spec_tokens_to_schedule
            request.num_output_tokens = len(request.output_token_ids)
            if request.num_output_tokens == TOKENS:
                request.status.name = "FINISHED_LENGTH_CAPPED"
                self.running.remove(self.requests.pop(name))
        return "outputs"

    def finish_requests(self, names: list[str]) -> list[Any]:
        ended = [self.requests.pop(name) for name in names]
        for request in ended:
            request.status.name = "FINISHED_ABORTED"
            self.running.remove(request)
        return ended

    def shutdown(self) -> None:
        self.steps.append("shutdown")


def sampled(scheduler: Any, output: Any) -> Any:
    """What the model makes of a step: token ids are positions."""
    names, rows = list(output.num_scheduled_tokens), []
    for name in names:
        at, drafts = scheduler.requests[name].num_output_tokens, output.scheduled_spec_decode_tokens
        kept = min((int(name[1:]) + at) % 4, len(drafts.get(name, ())))
        rows.append(list(range(at, at + kept + 1)))
    index = {name: i for i, name in enumerate(names)}
    return SimpleNamespace(sampled_token_ids=rows, req_id_to_index=index)


def serve(scheduler: Any, count: int, **params: Any) -> dict[str, list[int]]:
    """Decodes requests, as many at a time as there are seats; their tokens."""
    texts, names = {}, [f"r{n}" for n in range(count)]
    while names or scheduler.requests:
        while names and len(scheduler.requests) < SEATS:
            name = names.pop(0)
            scheduler.add(name, **params)
            texts[name] = scheduler.requests[name].output_token_ids
        output = scheduler.schedule()
        assert scheduler.update_from_output(output, sampled(scheduler, output)) == "outputs"
    return texts


def config_of(**changed: Any) -> Any:
    speculative = SimpleNamespace(
        method="draft_model", model="draft", max_num_new_slots_for_drafting=1
    )
    return SimpleNamespace(**{
        "speculative_config": speculative,
        "parallel_config": parallel(),
        "scheduler_config": SimpleNamespace(max_num_seqs=SEATS, max_num_batched_tokens=256),
        "device_config": SimpleNamespace(device_type="cpu"),
        "model_config": SimpleNamespace(model="target", dtype="torch.float32", max_model_len=512),
        "cache_config": SimpleNamespace(num_gpu_blocks=8, block_size=16),
        "max_concurrent_batches": 2, **changed,
    })  # fmt: skip


Start = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECTUNE_FOLDER", str(tmp_path))
    monkeypatch.delenv("SPECTUNE_TEXTS", raising=False)
    return tmp_path


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Modules of the names that the agent imports."""
    path = "vllm.v1.core.sched.async_scheduler"
    for end in [i for i, c in enumerate(path) if c == "."] + [len(path)]:
        monkeypatch.setitem(sys.modules, path[:end], ModuleType(path[:end]))
    sys.modules[path].AsyncScheduler = Core  # type: ignore[attr-defined]
    sys.modules["vllm"].__version__ = "0.32.0"  # type: ignore[attr-defined]
    return sys.modules["vllm"]


def module_of(code: Any, **names: Any) -> Any:
    module: Any = ModuleType("agent")
    sys.modules["agent"] = module
    module.__dict__.update(names)
    exec(code, module.__dict__)
    module.POLL_S, module.RETRY_S, module.STATUS_S = 0.002, 0.02, 0.01
    return module


@pytest.fixture
def agent(vllm: ModuleType) -> Any:
    return module_of(compile(SOURCE.read_text(), "agent.py", "exec"))


@pytest.fixture
def start(agent: Any) -> Iterator[Start]:
    started: list[Any] = []

    def starting(lookup: Any = None, **changed: Any) -> Any:
        scheduler = agent.Scheduler(config_of(**changed), lookup)
        started.append(scheduler)
        watched = scheduler._spectune
        eventually(lambda: watched is None or watched.active or bool(watched.refusal))
        return scheduler

    yield starting
    for scheduler in started:
        scheduler.shutdown()


def publish(folder: Path, version: int, gammas: dict[str, int], **more: Any) -> None:
    document = {"format": 1, "version": version, "policy": "p", "gammas": gammas, **more}
    put(folder, json.dumps(document))


def put(folder: Path, text: str) -> None:
    (folder / "new").write_text(text)
    os.replace(folder / "new", folder / "policy.json")


def status(folder: Path) -> dict[str, Any]:
    path = folder / "status.json"
    eventually(path.exists)
    return dict(json.loads(path.read_text()))


def wait_for(folder: Path, version: int) -> None:
    eventually(lambda: status(folder)["in_force"]["version"] == version)


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("rounds-*.jsonl"))
    texts = [file.read_text().splitlines() for file in files]
    assert all("engine" in json.loads(line) for text in texts for line in text[:1])
    return [json.loads(line) for text in texts for line in text[1:]]


def test_until_something_is_published_every_decision_is_vllms(start: Start, folder: Path) -> None:
    scheduler, plain = start(), Core(config_of())
    assert serve(scheduler, 9) == serve(plain, 9)
    assert scheduler.steps == plain.steps
    assert scheduler.dynamic_sd_lookup is None
    configured = [0, 3, 3, 1, 1]
    assert start(configured).dynamic_sd_lookup is configured


def test_a_finished_request_is_a_line(start: Start, folder: Path) -> None:
    scheduler = start()
    texts = serve(scheduler, 5, extra_args={"spectune_label": "chat"})
    eventually(lambda: len(lines(folder)) == 5)
    for line in lines(folder):
        assert (line["prompt"], line["output"]) == ([1, 2, 3], texts[line["id"]])
        assert (line["arrived"], line["finish"], line["label"]) == (5.0, "length", "chat")
        rounds, at = line["rounds"], 0
        assert rounds[0][:4] == [0, 0, 0, 1]
        for start_at, drafted, accepted, emitted, version, seconds, batch, _ in rounds:
            assert (start_at, version, 1 <= batch <= SEATS, seconds > 0) == (at, 0, True, True)
            assert drafted == (MOST if at else 0)
            assert accepted == min((int(line["id"][1:]) + at) % 4, drafted)
            assert emitted == min(accepted + 1, TOKENS - at)
            at += emitted
        assert at == TOKENS
    serve(scheduler, 3, extra_args={"spectune": "off"})
    scheduler.add("r1")
    output = scheduler.schedule()
    scheduler.update_from_output(output, sampled(scheduler, output))
    scheduler.finish_requests(["r1"])
    eventually(lambda: len(lines(folder)) == 6)
    assert lines(folder)[-1]["finish"] == "abort"
    eventually(lambda: status(folder)["noted"] == 6)


def test_what_is_drafted_for_a_retraced_request_is_noted_whatever_the_table_says(
    start: Start, folder: Path
) -> None:
    scheduler = start()
    publish(folder, 1, {"1": 2})
    wait_for(folder, 1)
    scheduler.add("r0")
    scheduler.add("r1", extra_args={"spectune": "retrace"})
    while scheduler.requests:
        output = scheduler.schedule()
        assert output.has_structured_output_requests == ("r1" in scheduler.requests)
        assert not output.pending_structured_output_tokens  # nothing is scheduled ahead
        scheduler.update_from_output(output, sampled(scheduler, output))
    eventually(lambda: len(lines(folder)) == 2)
    retraced, other = sorted(lines(folder), key=lambda line: "rounds" in line)
    assert retraced.keys() == {"id", "output", "proposals"}
    assert len(retraced["output"]) == TOKENS
    assert len(retraced["proposals"]) > 1
    assert all(ids == [7] * MOST for ids in retraced["proposals"])
    assert [drafted for _, drafted, *_ in other["rounds"]] == [0, *[2] * (len(other["rounds"]) - 1)]
    ahead = scheduler
    ahead.add("r2", extra_args={"spectune": "retrace"})
    ahead.schedule()
    ahead.requests["r2"].num_output_placeholders = 2
    assert ahead.schedule().pending_structured_output_tokens


def test_texts_are_noted_of_the_share_that_is_set(start: Start, folder: Path) -> None:
    scheduler = start()
    publish(folder, 1, {"1": 2}, texts="none")
    wait_for(folder, 1)
    serve(scheduler, 2)
    eventually(lambda: len(lines(folder)) == 2)
    assert all((n["prompt"], n["output"], n["n_output"]) == (None, None, 20) for n in lines(folder))
    publish(folder, 2, {"1": 2}, texts=0.5)
    wait_for(folder, 2)
    serve(scheduler, 40)
    eventually(lambda: len(lines(folder)) == 42)
    assert 10 < sum(line["prompt"] is not None for line in lines(folder)) < 30
    publish(folder, 0, {}, texts=0)
    wait_for(folder, 0)
    serve(scheduler, 8)
    eventually(lambda: len(lines(folder)) == 50)
    assert all(line["prompt"] is None for line in lines(folder)[42:])
    assert scheduler.dynamic_sd_lookup is None


def test_a_policy_comes_into_force_and_goes(start: Start, folder: Path) -> None:
    scheduler = start()
    publish(folder, 1, {"1": 5, "3": 2}, contexts={"100": {"1": 1}})
    wait_for(folder, 1)
    plain = Core(config_of(), [0, 5, 5, 2, 2])
    assert serve(scheduler, 9) == serve(plain, 9)
    assert scheduler.steps == plain.steps
    scheduler.add("r0")
    scheduler.requests["r0"].num_computed_tokens = 100
    assert scheduler.schedule().num_spec_tokens_to_schedule == 1
    (folder / "policy.json").unlink()
    wait_for(folder, 0)
    scheduler.schedule()
    assert scheduler.dynamic_sd_lookup is None
    publish(folder, 2, {"1": MOST})  # what vLLM does by itself: its padding stays
    wait_for(folder, 2)
    scheduler.schedule()
    assert scheduler.dynamic_sd_lookup is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"format":1,"version":2,"pol', '{"format":2,"version":2}']
    + [
        json.dumps({"format": 1, "version": 2, "policy": "p", **more})
        for more in (
            {}, {"gammas": []}, {"gammas": {"1": "3"}}, {"gammas": {"2": 3}}, {"gammas": {"1": 7}},
            {"gammas": {"1": -1}}, {"gammas": {"1": [3]}}, {"gammas": {"1": True}},
            {"gammas": {"1": 3}, "texts": "some"}, {"gammas": {"1": 3}, "contexts": {"x": {}}},
        )
    ],
)  # fmt: skip
def test_a_broken_policy_leaves_the_last_in_force(start: Start, folder: Path, text: str) -> None:
    scheduler = start()
    publish(folder, 1, {"1": 3})
    wait_for(folder, 1)
    put(folder, text)
    eventually(lambda: bool(status(folder)["refused"]))
    assert status(folder)["refused"]["reason"].startswith("policy.json: ")
    assert status(folder)["in_force"]["version"] == 1
    assert serve(scheduler, 3) == serve(Core(config_of()), 3)
    assert scheduler.dynamic_sd_lookup == [0, 3, 3, 3, 3]
    publish(folder, 3, {"1": 4})
    wait_for(folder, 3)
    assert status(folder)["refused"] is None


REFUSED = [
    ({"parallel_config": parallel(data_parallel_size=2)}, None),
    ({"parallel_config": parallel(pipeline_parallel_size=2)}, None),
    ({}, [[3, 1]] * (SEATS + 1)),
    ({}, [0, 3, 3]),
    ({}, {1: 3}),
    ({"cache_config": SimpleNamespace()}, None),
]


@pytest.mark.parametrize(("changed", "lookup"), REFUSED)
def test_what_it_does_not_know_is_refused_by_name_and_served(
    start: Start, folder: Path, changed: Any, lookup: Any
) -> None:
    scheduler = start(lookup, **changed)
    publish(folder, 1, {"1": 3})
    eventually(lambda: (status(folder)["refused"] or {}).get("version") == 1)
    reason = status(folder)["refused"]["reason"]
    words = ("data_parallel_size 2", "pipeline_parallel_size 2", "unknown shape", "num_gpu_blocks")
    assert any(word in reason for word in words)
    if lookup is None:
        assert serve(scheduler, 5) == serve(Core(config_of()), 5)
    assert scheduler.dynamic_sd_lookup is lookup
    assert not lines(folder)


def test_a_version_that_is_not_listed_checks_itself_first(
    start: Start, folder: Path, vllm: Any
) -> None:
    vllm.__version__ = "0.99.1"
    scheduler = start()
    publish(folder, 1, {"1": 3})
    eventually(lambda: "256 rounds" in (status(folder)["refused"] or {}).get("reason", ""))
    serve(scheduler, 60)
    wait_for(folder, 1)
    assert not status(folder)["refused"]
    serve(scheduler, 4)
    eventually(lambda: len(lines(folder)) >= 4)
    strange = start()
    strange.add("r0")
    for _ in range(2):
        output = strange.schedule()
        result = sampled(strange, output)
        output.scheduled_spec_decode_tokens = {}
        strange.update_from_output(output, result)
    assert strange._spectune is None or strange.requests["r0"].num_output_tokens == 2


def test_folders_that_fail_stop_no_request_and_bound_what_waits(
    start: Start, agent: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = start()
    expected = serve(Core(config_of()), 9)
    assert serve(scheduler, 9) == expected
    eventually(lambda: len(lines(folder)) == 9)
    away = folder.with_name("away")
    folder.rename(away)
    try:
        for _ in range(40):
            assert serve(scheduler, 9) == expected
        watched = scheduler._spectune
        eventually(lambda: "write_rounds" in watched.fault or "write_status" in watched.fault)
        assert len(watched.waiting) == agent.MAX_WAITING
    finally:
        away.rename(folder)
    eventually(lambda: status(folder)["noted"] == 9 + agent.MAX_WAITING)
    assert status(folder)["dropped"] == 40 * 9 - agent.MAX_WAITING
    assert len(lines(folder)) == 9 + agent.MAX_WAITING


def test_a_full_disk_leaves_whole_lines_and_loses_none(
    start: Start, agent: Any, folder: Path
) -> None:
    scheduler = start()
    failures = []

    class Full(FileIO):
        """A file that takes half a line."""

        def write(self, line: bytes) -> int:
            failures.append(line)
            return int(super().write(line[: len(line) // 2]))

    serve(scheduler, 2)
    eventually(lambda: len(lines(folder)) == 2)
    agent.open = lambda path, mode, **_: Full(path, mode) if mode == "ab" else open(path, mode)  # noqa: SIM115
    serve(scheduler, 3)
    eventually(lambda: len(failures) >= 2)
    assert len(lines(folder)) == 2
    del agent.open
    eventually(lambda: len(lines(folder)) == 5)
    assert status(folder)["dropped"] == 0


def test_files_are_rotated_and_bounded(start: Start, agent: Any, folder: Path) -> None:
    agent.FILE_BYTES, agent.MAX_FILES = 2000, 3
    scheduler = start()
    for _ in range(10):
        serve(scheduler, 4)
    eventually(lambda: status(folder)["noted"] == 40)
    files = sorted(folder.glob("rounds-*.jsonl"))
    assert len(files) == 3
    eventually(lambda: status(folder)["dropped"] == 40 - len(lines(folder)))


CAPTURES = sorted(Path(__file__).parent.glob("vllm_*.json"))


class Replayed(Core):
    """A scheduler that does what a real one was recorded to do."""

    def __init__(self, config: Any, capture: Any) -> None:
        super().__init__(config)
        self.num_spec_tokens, self.capture = capture["num_spec_tokens"], iter(capture["steps"])
        self.texts = capture["requests"]

    def schedule(self) -> Any:
        self.step = next(self.capture)
        for name in self.step["new"]:
            self.add(name, extra_args=None)
            vars(self.requests[name]).update(self.texts[name])
            self.requests[name].output_token_ids = []
        return SimpleNamespace(
            num_scheduled_tokens=self.step["scheduled"],
            scheduled_spec_decode_tokens=self.step["drafts"],
            num_spec_tokens_to_schedule=self.step["next"],
            num_invalid_spec_tokens=self.step["invalid"],
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in self.step["new"]],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(self.step["resumed"])),
        )

    def update_from_output(self, output: Any, result: Any) -> str:
        for name, (tokens, state) in self.step["after"].items():
            request = self.requests[name]
            request.output_token_ids = self.texts[name]["output_token_ids"][:tokens]
            request.num_output_tokens, request.status.name = tokens, state
            if state != "RUNNING":
                del self.requests[name]
        return "outputs"


def test_the_versions_that_are_listed_are_held_by_captures(agent: Any) -> None:
    listed = tomllib.loads(SOURCE.with_name("compat.toml").read_text())["vllm"]
    captured = {
        version: entry["capture"] for version, entry in listed.items() if "capture" in entry
    }
    assert tuple(captured) == agent.VERSIONS
    assert sorted(captured.values()) == [path.name for path in CAPTURES]


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_a_capture_of_a_real_server_is_noted_as_it_was(vllm: Any, folder: Path, path: Path) -> None:
    capture = json.loads(path.read_text())
    vllm.__version__ = capture["version"]
    sys.modules["vllm.v1.core.sched.async_scheduler"].AsyncScheduler = Replayed  # type: ignore
    module = module_of(compile(SOURCE.read_text(), "agent.py", "exec"))
    scheduler = module.Scheduler(config_of(), capture)
    eventually(lambda: scheduler._spectune.active)
    for step in capture["steps"]:
        output = scheduler.schedule()
        index = {name: i for i, name in enumerate(step["index"])}
        result = SimpleNamespace(sampled_token_ids=step["sampled"], req_id_to_index=index)
        scheduler.update_from_output(output, result)
    eventually(lambda: len(lines(folder)) == len(capture["lines"]))
    scheduler.shutdown()
    assert [untimed(line) for line in lines(folder)] == capture["lines"]
    assert sum(len(line["rounds"]) for line in capture["lines"]) > 30


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    """A line without what differs from run to run."""
    name, rounds = line["id"].partition("-")[0], [[*r[:5], r[6]] for r in line["rounds"]]
    return {**line, "id": name, "arrived": 0, "ended": 0, "rounds": rounds}


def test_a_fault_in_a_step_ends_the_agent_and_is_told_once(
    start: Start, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = start([0, 3, 3, 1, 1])
    publish(folder, 1, {"1": 5})
    wait_for(folder, 1)
    scheduler.add("r0")
    scheduler.schedule()
    scheduler.finish_requests(["r0"])
    assert scheduler.dynamic_sd_lookup == [0, 5, 5, 5, 5]
    scheduler._spectune.decoding = None
    assert serve(scheduler, 5) == serve(Core(config_of(), [0, 3, 3, 1, 1]), 5)
    assert scheduler.dynamic_sd_lookup == [0, 3, 3, 1, 1]
    eventually(lambda: "goes on without it" in str(status(folder)["fault"]))
    wait_for(folder, 0)
    assert [record.getMessage()[:13] for record in caplog.records] == ["spectune: off"]


class Marks(ast.NodeTransformer):
    """Puts ``FAULT(n)`` before every statement of a function but vLLM's own calls, what returns
    their results, guards and ``pass``."""

    count = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        watched = node.args.args and node.name in {
            *("schedule", "update_from_output", "finish_requests", "shutdown", "__init__")
        }
        around = watched and any("super()" in ast.unparse(s) for s in node.body)
        node.body = self.marked(node.body, around=bool(around), guard=node.name == "guarded")
        return node

    def marked(
        self, body: list[ast.stmt], *, around: bool = False, guard: bool = False
    ) -> list[ast.stmt]:
        marked: list[ast.stmt] = []
        for statement in body:
            vllms = "super()" in ast.unparse(statement) or isinstance(statement, ast.Return)
            skip = around and (vllms or "guarded(" in ast.unparse(statement))
            skip = skip or ((around or guard) and isinstance(statement, ast.Try))
            docs = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not (skip or docs or isinstance(statement, ast.Pass)):
                marked += ast.parse(f"FAULT({self.count})").body
                self.count += 1
            for field in ("body", "orelse", "finalbody"):
                if inner := getattr(statement, field, None):
                    setattr(statement, field, self.marked(inner, guard=guard))
            for handler in getattr(statement, "handlers", ()):
                handler.body = self.marked(handler.body, guard=guard)
            marked.append(statement)
        return marked


def test_a_fault_before_any_statement_changes_nothing_of_vllms(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = Marks()
    tree = ast.fix_missing_locations(marks.visit(ast.parse(SOURCE.read_text())))
    reached, target = set[int](), [-1]

    def fault(number: int) -> None:
        reached.add(number)
        if number == target[0]:
            raise Fault(number)

    module = module_of(compile(tree, "agent.py", "exec"), FAULT=fault)
    module.LOG.disabled = True
    module.FILE_BYTES, module.MAX_FILES, module.MAX_IN_FLIGHT = 600, 2, 1
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    plain = Core(config_of())
    expected = serve(plain, 5)

    def scenario() -> None:
        """All that the agent does: a table, a fault of its own, a start that fails."""
        folder = Path(mkdtemp(dir=tmp_path))
        monkeypatch.setenv("SPECTUNE_FOLDER", str(folder))
        scheduler = module.Scheduler(config_of())
        watched = scheduler._spectune
        time.sleep(0.01)
        assert serve(scheduler, 5) == expected
        assert scheduler.steps == plain.steps
        publish(folder, 1, {"1": 5, "3": 2}, contexts={"10": {"1": 1}})
        time.sleep(0.02)
        assert serve(scheduler, 5, extra_args={"spectune_label": "x"}) == expected
        assert serve(scheduler, 5, extra_args={"spectune": "retrace"}) == expected
        put(folder, "{")
        time.sleep(0.01)
        if scheduler._spectune is not None:
            scheduler._spectune.decoding = None
        assert serve(scheduler, 5) == expected
        scheduler.shutdown()
        assert scheduler.steps[-1] == "shutdown"
        if watched is not None:
            watched.stop.set()  # its thread is a daemon's: one that was not ended polls on
        for broken in ({"cache_config": SimpleNamespace()}, {"scheduler_config": None}):
            failing = module.Scheduler(config_of(**broken))
            assert serve(failing, 2) == {name: expected[name] for name in ("r0", "r1")}
            failing.shutdown()

    scenario()
    ordinary = sorted(reached)
    for number in ordinary:
        target[0] = number
        scenario()
    print(f"{marks.count} statements, a fault before each of the {len(ordinary)} that ran")
    assert len(ordinary) > 0.8 * marks.count

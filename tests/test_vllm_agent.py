"""vLLM's agent over a stand-in for vLLM's scheduler: what it notes, follows, refuses, survives."""

from __future__ import annotations

import json
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
from agent_stub import (
    MOST,
    SEATS,
    SOURCE,
    TOKENS,
    Core,
    Faults,
    config_of,
    lines,
    module_of,
    parallel,
    publish,
    put,
    sampled,
    serve,
    status,
    trial,
    vllm_modules,
    wait_for,
)  # fmt: skip
from waiting import eventually

from spectune.engines.vllm.folder import is_candidates

Start = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECTUNE_FOLDER", str(tmp_path))
    monkeypatch.delenv("SPECTUNE_TEXTS", raising=False)
    return tmp_path


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    modules = vllm_modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["vllm"]


@pytest.fixture
def agent(vllm: ModuleType) -> Any:
    return module_of(compile(SOURCE.read_text(), "agent.py", "exec"))


@pytest.fixture
def start(agent: Any) -> Iterator[Start]:
    started: list[Any] = []

    def ended() -> None:
        while started:
            scheduler = started.pop()
            scheduler.shutdown()
            if scheduler._spectune is not None:
                scheduler._spectune.thread.join()

    def starting(lookup: Any = None, **changed: Any) -> Any:
        ended()  # two that live would both write status.json
        scheduler = agent.Scheduler(config_of(**changed), lookup)
        started.append(scheduler)
        watched = scheduler._spectune
        eventually(lambda: watched is None or watched.active or bool(watched.refusal))
        return scheduler

    yield starting
    ended()


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
    said_at = status(folder)["at"]
    eventually(lambda: status(folder)["at"] > said_at)  # also while nothing happens


def test_what_is_drafted_for_a_retraced_request_is_noted_whatever_the_table_says(
    start: Start, folder: Path
) -> None:
    scheduler = start()
    publish(folder, 1, {"1": 2})
    wait_for(folder, 1)
    scheduler.add("r0")
    retrace = {"spectune": status(folder)["retrace"]}
    scheduler.add("r1", extra_args=retrace)
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
    ahead.add("r2", extra_args=retrace)
    ahead.schedule()
    ahead.requests["r2"].num_output_placeholders = 2
    assert ahead.schedule().pending_structured_output_tokens


@pytest.mark.parametrize("word", ["retrace", "retrace ", ["retrace"], {"a": 1}, 3, "\ud800"])
def test_who_may_not_read_the_folder_has_nothing_retraced(
    start: Start, folder: Path, word: Any
) -> None:
    scheduler = start()
    publish(folder, 1, {"1": 2})
    wait_for(folder, 1)
    assert status(folder)["retrace"], "who may read it could"
    serve(scheduler, 2, extra_args={"spectune": word})
    eventually(lambda: len(lines(folder)) == 2)
    assert {drafted for line in lines(folder) for _, drafted, *_ in line["rounds"]} == {0, 2}


def test_a_retraced_request_is_not_written_where_texts_are_not(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECTUNE_TEXTS", "none")
    scheduler = start()
    assert status(folder)["retrace"] is None
    serve(scheduler, 1, extra_args={"spectune": scheduler._spectune.key})
    eventually(lambda: len(lines(folder)) == 1)
    assert "proposals" not in lines(folder)[0]
    assert lines(folder)[0]["output"] is None


SHAPES = {
    "requests": lambda ended: ended,
    "ids": lambda ended: [request.request_id for request in ended],
    "tuples": lambda ended: [(request.request_id, 0) for request in ended],
    "none": lambda ended: None,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_an_abort_returns_it_is_noted_and_the_agent_goes_on(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    monkeypatch.setattr(Core, "ended", staticmethod(SHAPES[shape]))
    scheduler = start()
    for name in ("r0", "r1", "r2"):
        scheduler.add(name)
    for _ in range(2):
        output = scheduler.schedule()
        scheduler.update_from_output(output, sampled(scheduler, output))
    scheduler.finish_requests(request_ids=["r0", "r2"])
    eventually(lambda: len(lines(folder)) == 2)
    assert [(line["id"], line["finish"]) for line in lines(folder)] == [
        ("r0", "abort"), ("r2", "abort"),
    ]  # fmt: skip
    while scheduler.requests:
        output = scheduler.schedule()
        scheduler.update_from_output(output, sampled(scheduler, output))
    eventually(lambda: len(lines(folder)) == 3)
    assert status(folder)["fault"] is None


def test_files_are_their_users_alone(start: Start, folder: Path) -> None:
    scheduler = start()
    serve(scheduler, 1)
    eventually(lambda: status(folder)["noted"] == 1)
    files = {file.name[:6]: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert files == {"rounds": 0o600, "status": 0o600}


def test_a_long_prompt_is_noted_whole(start: Start, folder: Path) -> None:
    scheduler = start()
    scheduler.add("r0")
    ids = [n * 7919 % 150_000 for n in range(20_001)]
    scheduler.requests["r0"].prompt_token_ids = ids
    while scheduler.requests:
        output = scheduler.schedule()
        scheduler.update_from_output(output, sampled(scheduler, output))
    eventually(lambda: len(lines(folder)) == 1)
    assert lines(folder)[0]["prompt"] == ids


def test_labels_are_bounded(start: Start, agent: Any, folder: Path) -> None:
    agent.MAX_LABELS = 3
    scheduler = start()
    for label in ("a\x1b[2J\u2028b", "x" * 999, "b", "c", "b", ["d"]):
        serve(scheduler, 1, extra_args={"spectune_label": label})
    eventually(lambda: len(lines(folder)) == 6)
    labels = [line["label"] for line in lines(folder)]
    assert labels == ["a [2J b", "x" * 100, "b", "other", "b", "other"]


@pytest.mark.parametrize(
    ("changed", "up_to"),
    [({}, 512 - MOST), ({"max_model_len": 128}, 128 - MOST), ({"method": "dflash"}, 511 - MOST)],
)
def test_it_tells_up_to_which_length_vllm_drafts(
    start: Start, folder: Path, changed: Any, up_to: int
) -> None:
    """By its first model runner: vLLM's second one drafts at any length."""
    speculative = SimpleNamespace(**{
        "method": "eagle3", "model": "head", "max_num_new_slots_for_drafting": 1,
        "draft_model_config": SimpleNamespace(max_model_len=changed.get("max_model_len")),
        **changed,
    })  # fmt: skip
    start(speculative_config=speculative)
    assert status(folder)["engine"]["serving"]["drafts_up_to"] == up_to
    start(speculative_config=speculative, use_v2_model_runner=True)
    eventually(lambda: not status(folder)["engine"]["serving"]["drafts_up_to"])


def test_it_tells_the_card_and_the_servers_own_table(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A platform that names no card costs nothing else."""

    def name() -> str:
        return next(names)

    names = iter(["NVIDIA L4", "NVIDIA L4"])
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(get_device_name=name)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    on_cuda = {"device_config": SimpleNamespace(device_type="cuda")}
    start([0, 3, 3, 1, 0], **on_cuda)
    engine = status(folder)["engine"]
    assert (engine["device"], engine["hardware"]) == ("cuda", "NVIDIA L4")
    assert engine["gammas"] == {"1": 3, "3": 1, "4": 0}
    for ranks, hardware in ((2, "2 x NVIDIA L4"), (1, None)):
        start(**on_cuda, parallel_config=parallel(world_size=ranks))
        eventually(lambda hardware=hardware: status(folder)["engine"]["hardware"] == hardware)
    assert status(folder)["engine"]["gammas"] is None


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


@pytest.mark.parametrize("texts", ["all", 1.0, "nan", ["all"], None])
def test_no_policy_has_more_texts_noted_than_the_server_allows(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Any
) -> None:
    monkeypatch.setenv("SPECTUNE_TEXTS", "none")
    scheduler = start()
    publish(folder, 1, {"1": 2}, **({} if texts is None else {"texts": texts}))
    eventually(lambda: status(folder)["in_force"]["version"] or status(folder)["refused"])
    serve(scheduler, 3)
    eventually(lambda: len(lines(folder)) == 3)
    assert all((n["prompt"], n["output"]) == (None, None) for n in lines(folder))


def test_whose_texts_are_noted_holds_whatever_else_is_refused_or_fails(
    start: Start, folder: Path
) -> None:
    publish(folder, 1, {"1": MOST + 1}, texts="none")
    scheduler = start()
    eventually(lambda: status(folder)["refused"])
    serve(scheduler, 2)
    eventually(lambda: len(lines(folder)) == 2)
    watched = scheduler._spectune
    watched.retry_at = time.monotonic() + 3600  # what follows waits for the disk
    serve(scheduler, 2)
    watched.decoding = None
    serve(scheduler, 1)
    eventually(lambda: "goes on without it" in str(status(folder)["fault"]))
    watched.retry_at = 0.0
    eventually(lambda: len(lines(folder)) == 4)
    assert all((n["prompt"], n["output"]) == (None, None) for n in lines(folder))
    assert status(folder)["retrace"] is None


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


class Clock:
    """``time`` for the agent: it stands still, and the wall clock may be stepped apart."""

    def __init__(self) -> None:
        self.now_s, self.step_s = 1000.0, 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def time(self) -> float:
        return time.time() + self.step_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def clock(agent: Any) -> Clock:
    agent.time = Clock()
    clock: Clock = agent.time
    return clock


def drafts(scheduler: Any) -> int:
    """The draft tokens of the next step."""
    return int(scheduler.schedule().num_spec_tokens_to_schedule)


def tried(folder: Path) -> tuple[int, bool]:
    """The version that is tried, and whether that is over."""
    found = status(folder)["trial"] or {"version": 0, "is_over": True}
    return found["version"], found["is_over"]


def test_a_trial_drafts_in_one_block_of_each_pair(start: Start, folder: Path, clock: Clock) -> None:
    scheduler = start()
    scheduler.add("r0")
    firsts = set[bool]()
    for seed in (7, 8):
        of = trial(folder, -seed, {"1": 4}, seed=seed)
        began_s = clock.now_s
        for pair in range(12):
            publish(folder, 1, {"1": 2}, trial={**of, "renewal": 100 * seed + pair})
            eventually(lambda n=100 * seed + pair: status(folder)["renewal"] == n)
            for block in (2 * pair, 2 * pair + 1):
                clock.now_s = began_s + 10 * block + 5
                assert drafts(scheduler) == (4 if is_candidates(seed, block) else 2)
            firsts.add(is_candidates(seed, 2 * pair))
            assert is_candidates(seed, 2 * pair) != is_candidates(seed, 2 * pair + 1)
            eventually(lambda seed=seed: tried(folder) == (-seed, False))
            assert status(folder)["in_force"]["version"] == 1
    assert firsts == {True, False}


def test_rounds_say_whether_a_trial_drafted_them(start: Start, folder: Path, clock: Clock) -> None:
    scheduler = start()
    publish(folder, 1, {"1": 2}, trial=trial(folder, -5, {"1": 4}, block_s=0))
    eventually(lambda: tried(folder) == (-5, False))
    serve(scheduler, 2)
    clock.now_s += 61
    serve(scheduler, 2)
    eventually(lambda: len(lines(folder)) == 4)
    versions = [{version for *_, version, _, _, _ in line["rounds"]} for line in lines(folder)]
    assert versions == [{-5}, {-5}, {1}, {1}]
    eventually(lambda: tried(folder) == (-5, True))


def test_a_trial_is_over_when_nobody_renews_it(start: Start, folder: Path, clock: Clock) -> None:
    """By the process's own clock, in vLLM's thread: whatever the disk, the wall clock and an old
    file do."""

    def renew(renewal: int, **more: Any) -> None:
        publish(folder, 1, {"1": 2}, trial={**of, "renewal": renewal, **more})

    scheduler = start()
    scheduler.add("r0")
    of = trial(folder, -5, {"1": 4}, block_s=0)
    renew(1)
    eventually(lambda: tried(folder) == (-5, False))
    clock.now_s += 59
    renew(2)
    eventually(lambda: status(folder)["renewal"] == 2)
    clock.now_s += 59
    clock.step_s = -3600
    assert drafts(scheduler) == 4
    scheduler._spectune.stop.set()  # nobody looks into the folder any more
    scheduler._spectune.thread.join()
    clock.now_s += 2
    assert drafts(scheduler) == 2
    renew(3)
    watched = scheduler._spectune
    watched.turn()
    assert drafts(scheduler) == 4
    clock.now_s += 61
    for old in (3, 2, 1):  # as a folder that was moved away and is back
        renew(old, ttl_s=600)
        watched.turn()
        assert drafts(scheduler) == 2
    put(folder, "{half")
    watched.turn()
    assert drafts(scheduler) == 2
    renew(4)
    watched.turn()
    publish(folder, 1, {"1": 2})  # it is ended by hand
    assert drafts(scheduler) == 4
    watched.turn()
    assert drafts(scheduler) == 2


def test_a_restarted_server_waits_for_a_new_renewal(
    start: Start, folder: Path, clock: Clock
) -> None:
    start()
    of = trial(folder, -5, {"1": 4}, block_s=0)
    publish(folder, 1, {"1": 2}, trial={**of, "renewal": 5})
    eventually(lambda: tried(folder) == (-5, False))
    again = start()
    wait_for(folder, 1)
    again.add("r0")
    publish(folder, 1, {"1": 2}, trial={**of, "renewal": 6})
    watched = again._spectune
    eventually(lambda: watched.policy_seen and watched.policy_seen[0] == modified(folder))
    assert (drafts(again), tried(folder)) == (2, (0, True))
    publish(folder, 1, {"1": 2}, trial=trial(folder, -5, {"1": 4}, block_s=0))
    eventually(lambda: tried(folder) == (-5, False))
    assert drafts(again) == 4


def modified(folder: Path) -> int:
    return (folder / "policy.json").stat().st_mtime_ns


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl_s": 0}, {"ttl_s": 1e9}, {"ttl_s": float("nan")}, {"block_s": 0.2}, {"block_s": -1},
        {"block_s": float("nan")}, {"renewal": 1.5}, {"renewal": None}, {"seed": "x"},
        {"gammas": {"1": MOST + 1}}, {"gammas": None}, {"version": "x"}, {"boot": ...},
    ],
)  # fmt: skip
def test_a_broken_trial_is_refused_and_the_incumbent_drafts(
    start: Start, folder: Path, wrong: dict[str, Any]
) -> None:
    scheduler = start()
    scheduler.add("r0")
    good = trial(folder, -4, {"1": 5}, block_s=0)
    publish(folder, 1, {"1": 2}, trial=good)
    eventually(lambda: tried(folder) == (-4, False))
    broken = {**good, "version": -5, "renewal": 2, **wrong}
    publish(folder, 1, {"1": 2}, trial={k: v for k, v in broken.items() if v is not ...})
    eventually(lambda: status(folder)["refused"])
    assert status(folder)["refused"]["version"] == broken["version"]
    assert status(folder)["in_force"]["version"] == 1
    assert drafts(scheduler) == 2
    publish(folder, 1, {"1": 2}, trial={**good, "version": -6, "renewal": 3})
    eventually(lambda: tried(folder) == (-6, False))
    assert drafts(scheduler) == 5


REFUSED = [
    ({"parallel_config": parallel(data_parallel_size=2)}, None),
    ({"parallel_config": parallel(pipeline_parallel_size=2)}, None),
    ({}, [[3, 1]] * (SEATS + 1)),
    ({}, [0, 3, 3]),
    ({}, {1: 3}),
    ({"cache_config": SimpleNamespace()}, None),
    ({}, None),
]


@pytest.mark.parametrize(("changed", "lookup"), REFUSED)
def test_what_it_does_not_know_is_refused_by_name_and_served(
    start: Start, folder: Path, changed: Any, lookup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (changed, lookup) == ({}, None):
        monkeypatch.setenv("SPECTUNE_TEXTS", "some")
    scheduler = start(lookup, **changed)
    publish(folder, 1, {"1": 3})
    eventually(lambda: (status(folder)["refused"] or {}).get("version") == 1)
    reason = status(folder)["refused"]["reason"]
    words = ("data_parallel_size 2", "pipeline_parallel_size 2", "unknown shape")
    words += ("num_gpu_blocks", "SPECTUNE_TEXTS: texts 'some'")
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
    before = status(folder)["refused"]
    serve(scheduler, 4)
    assert status(folder)["refused"] == before, "whatever is left of them"
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
        eventually(lambda: f"{folder}: write_" in watched.fault)
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


def test_a_server_that_ends_leaves_its_last_counts(start: Start, agent: Any, folder: Path) -> None:
    agent.STATUS_S = 3600.0
    scheduler = start()
    serve(scheduler, 1)
    eventually(lambda: status(folder)["noted"] == 1)  # as a file is begun
    serve(scheduler, 4)
    eventually(lambda: scheduler._spectune.noted == 5)
    scheduler.shutdown()
    assert status(folder)["noted"] == 5


def test_files_are_rotated_and_bounded(start: Start, agent: Any, folder: Path) -> None:
    agent.FILE_BYTES, agent.MAX_FILES = 2000, 3
    scheduler = start()
    for _ in range(10):
        serve(scheduler, 4)
    eventually(lambda: status(folder)["noted"] == 40)
    files = sorted(folder.glob("rounds-*.jsonl"))
    assert len(files) == 3
    eventually(lambda: status(folder)["dropped"] == 40 - len(lines(folder)))
    (folder / "rounds.jsonl").write_text("of somebody else")
    for _ in range(2):  # the bound is of all starts together
        before, scheduler = len(lines(folder)), start()
        for _ in range(5):
            serve(scheduler, 4)
        eventually(lambda watched=scheduler._spectune: watched.noted == 20)
        scheduler.shutdown()
        assert len(list(folder.glob("rounds-*.jsonl"))) == 3
        assert status(folder)["dropped"] == before + 20 - len(lines(folder))
    assert (folder / "rounds.jsonl").exists()


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


STRANGE = {"extra_args": 7}
"""A request as no vLLM has it, which the agent cannot read."""


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
    assert serve(scheduler, 5, **STRANGE) == serve(Core(config_of(), [0, 3, 3, 1, 1]), 5)
    assert scheduler.dynamic_sd_lookup == [0, 3, 3, 1, 1]
    eventually(lambda: "goes on without it" in str(status(folder)["fault"]))
    wait_for(folder, 0)
    assert [record.getMessage()[:13] for record in caplog.records] == ["spectune: off"]


def test_a_fault_before_any_statement_changes_nothing_of_vllms(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    module = faults.module
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
        word = watched.key if watched is not None else "retrace"
        assert serve(scheduler, 5, extra_args={"spectune": word}) == expected
        of = {"version": -5, "policy": "t", "gammas": {"1": 3}, "seed": 1, "ttl_s": 60}
        for block_s in (1, 0):
            of = {**of, "block_s": block_s, "renewal": 2 - block_s}
            boot = watched.boot if watched is not None else ""
            publish(folder, 1, {"1": 5}, trial={**of, "boot": boot})
            time.sleep(0.01)
            assert serve(scheduler, 2) == {name: expected[name] for name in ("r0", "r1")}
        put(folder, "{")
        time.sleep(0.01)
        assert serve(scheduler, 5, **STRANGE) == expected
        scheduler.shutdown()
        assert scheduler.steps[-1] == "shutdown"
        if watched is not None:
            watched.stop.set()  # its thread is a daemon's: one that was not ended polls on
        for broken in ({"cache_config": SimpleNamespace()}, {"scheduler_config": None}):
            failing = module.Scheduler(config_of(**broken))
            assert serve(failing, 2) == {name: expected[name] for name in ("r0", "r1")}
            failing.shutdown()

    # Its thread reaches some statements in some runs alone.
    eventually(lambda: scenario() or len(faults.reached) > 0.8 * len(faults.lines))
    statements = sorted(faults.reached)
    for number in statements:
        faults.target = number
        scenario()
    print(f"{len(faults.lines)} statements, a fault before each of the {len(statements)} that ran")

"""Our scheduler over a stand-in for vLLM's: what it leaves as it was, refuses, and survives."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from databases import opened, put_in_force
from synthetic import policy
from waiting import eventually

from spectune.runtime.pair import read_pair
from spectune.traces.store import TraceStore

SEATS, MOST = 4, 6
TABLE = {"kind": "by_batch", "gamma": {"1": 5, "3": 2}}


class Core:
    """vLLM's scheduler as far as ours uses it: the next step drafts ``num_spec_tokens``, or what
    ``dynamic_sd_lookup`` has for the requests of this one."""

    def __init__(self, config: Any, lookup: Any = None) -> None:
        self.vllm_config, self.scheduler_config = config, config.scheduler_config
        self.num_spec_tokens = MOST
        self.dynamic_sd_lookup = lookup
        self.requests: dict[str, Any] = {}
        self.closed = False

    def schedule(self, requests: int = 1) -> SimpleNamespace:
        lookup = self.dynamic_sd_lookup
        drafted = self.num_spec_tokens if lookup is None else lookup[requests]
        return SimpleNamespace(num_spec_tokens_to_schedule=drafted)

    def update_from_output(self, *_: Any) -> str:
        return "outputs"

    def finish_requests(self, *_: Any) -> list[Any]:
        return []

    def shutdown(self) -> None:
        self.closed = True


def flat_lookup(
    schedule: Any, vllm_max_batch_size: int, vllm_num_speculative_tokens: int
) -> list[Any]:
    """vLLM's own function, of one range."""
    return [0, *[vllm_num_speculative_tokens] * vllm_max_batch_size]


def by_length(
    schedule: Any, vllm_max_batch_size: int, vllm_num_speculative_tokens: int
) -> list[Any]:
    """Another form: a row for each batch size."""
    return [[vllm_num_speculative_tokens] * 2] * (vllm_max_batch_size + 1)


def config_of(target: str, draft: str, **changed: Any) -> SimpleNamespace:
    parallel = SimpleNamespace(world_size=1, data_parallel_size=1, pipeline_parallel_size=1)
    config = {
        "speculative_config": SimpleNamespace(
            method="draft_model", model=draft, max_num_new_slots_for_drafting=1
        ),
        "parallel_config": parallel,
        "scheduler_config": SimpleNamespace(max_num_seqs=SEATS, max_num_batched_tokens=256),
        "device_config": SimpleNamespace(device_type="cpu"),
        "model_config": SimpleNamespace(model=target, dtype="torch.float32", max_model_len=512),
        "cache_config": SimpleNamespace(num_gpu_blocks=8, block_size=16),
        "max_concurrent_batches": 2,
    }
    return SimpleNamespace(**{**config, **changed})


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Modules of the names that ours imports."""
    names = (
        *("vllm", "vllm.logger", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"),
        *("vllm.v1.core.sched.async_scheduler", "vllm.v1.core.sched.output", "vllm.v1.outputs"),
        *("vllm.v1.request", "vllm.v1.spec_decode", "vllm.v1.spec_decode.dynamic"),
        "vllm.v1.spec_decode.dynamic.utils",
    )
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    made["vllm"].__version__ = "0.32.0"
    made["vllm.logger"].init_logger = logging.getLogger
    made["vllm.v1.core.sched.async_scheduler"].AsyncScheduler = Core
    made["vllm.v1.core.sched.output"].SchedulerOutput = SimpleNamespace
    made["vllm.v1.outputs"].ModelRunnerOutput = SimpleNamespace
    made["vllm.v1.request"].Request = made["vllm.v1.request"].RequestStatus = SimpleNamespace
    made["vllm.v1.spec_decode.dynamic.utils"].build_dynamic_sd_schedule_lookup = flat_lookup
    return made


Start = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TraceStore]:
    with opened(tmp_path / "served.db") as made:
        yield made


@pytest.fixture
def start(
    fake_vllm: dict[str, ModuleType],
    store: TraceStore,
    tmp_path: Path,
    tiny_pair: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Start]:
    """Starts a server's scheduler with a changed configuration, and ends it."""
    monkeypatch.setenv("SPECTUNE_DB", str(tmp_path / "served.db"))
    monkeypatch.setenv("SPECTUNE_PAIR", str(tiny_pair))
    monkeypatch.delenv("SPECTUNE_DEPLOYMENT", raising=False)
    caplog.set_level(logging.INFO)
    spec, name = read_pair(str(tiny_pair)), "spectune.engines.vllm.scheduler"
    monkeypatch.delitem(sys.modules, name, raising=False)
    made: list[Any] = []

    def starting(lookup: Any = None, **changed: Any) -> Any:
        ours = importlib.import_module(name).Scheduler
        config = config_of(spec.target, dict(spec.drafts)["near"], **changed)
        made.append(ours(config, lookup))
        return made[-1]

    yield starting
    for scheduler in made:
        scheduler.shutdown()
        assert scheduler.closed
    sys.modules.pop(name, None)


def publish(store: TraceStore, window: Any = TABLE) -> int:
    eventually(lambda: bool(store.list_pairs()))
    pair_id = store.list_pairs()[0].id
    return put_in_force(store, pair_id, policy("near", window), deployment="vllm")


def answer(store: TraceStore, version: int) -> tuple[str, str]:
    eventually(lambda: bool(store.acknowledgements(version)))
    (found,) = store.acknowledgements(version)
    return found.status, found.reason


def drafted(scheduler: Any) -> list[int]:
    """Tokens after a step of each size."""
    sizes = range(1, SEATS + 1)
    return [scheduler.schedule(n).num_spec_tokens_to_schedule for n in sizes]


def test_until_something_is_published_the_choice_of_tokens_is_vllms_own(
    start: Start, store: TraceStore
) -> None:
    scheduler = start()
    assert drafted(scheduler) == [MOST] * SEATS
    assert scheduler.dynamic_sd_lookup is None  # of another vLLM pads nothing and drops graphs
    assert answer(store, publish(store)) == ("applied", "")
    assert drafted(scheduler) == [5, 5, 2, 2]
    configured = [0, 3, 3, 1, 1]
    assert start(configured).dynamic_sd_lookup is configured


@pytest.mark.parametrize("lookup", [None, [0, 3, 3, 1, 1]])
def test_data_parallel_ranks_follow_no_table(start: Start, store: TraceStore, lookup: Any) -> None:
    """Each would choose by its own batch, and vLLM's ranks wait for each other."""
    two = SimpleNamespace(world_size=1, data_parallel_size=2, pipeline_parallel_size=1)
    scheduler = start(lookup, parallel_config=two)
    before = drafted(scheduler)
    status, reason = answer(store, publish(store))
    assert status == "refused"
    assert "vLLM with data parallelism (data_parallel_size 2) cannot follow a policy" in reason
    assert drafted(scheduler) == before
    assert scheduler.dynamic_sd_lookup is lookup


def test_one_scheduler_decides_for_all_pipeline_ranks(start: Start, store: TraceStore) -> None:
    ranks = SimpleNamespace(world_size=2, data_parallel_size=1, pipeline_parallel_size=2)
    scheduler = start(parallel_config=ranks)
    assert answer(store, publish(store)) == ("applied", "")
    assert drafted(scheduler) == [5, 5, 2, 2]


@pytest.mark.parametrize(
    ("builder", "lookup"), [(by_length, None), (flat_lookup, [[3, 1]] * (SEATS + 1)), (None, None)]
)
def test_a_lookup_of_another_form_is_refused_and_not_assigned(
    start: Start,
    store: TraceStore,
    fake_vllm: dict[str, Any],
    builder: Any,
    lookup: Any,
) -> None:
    utils = fake_vllm["vllm.v1.spec_decode.dynamic.utils"]
    if builder is None:
        del utils.build_dynamic_sd_schedule_lookup
    else:
        utils.build_dynamic_sd_schedule_lookup = builder
    scheduler = start(lookup)
    status, reason = answer(store, publish(store))
    assert status == "refused"
    assert reason.startswith("vLLM 0.32.0 ")
    scheduler.schedule(1)
    assert scheduler.dynamic_sd_lookup is lookup


def test_a_server_without_a_draft_is_left_as_it_is(
    start: Start, store: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECTUNE_PAIR")
    scheduler = start(speculative_config=None)
    eventually(lambda: bool(store.list_pairs()))
    version = put_in_force(store, store.list_pairs()[0].id, policy("near", 0), deployment="vllm")
    assert answer(store, version) == ("applied", "")
    scheduler.schedule(1)
    assert scheduler.dynamic_sd_lookup is None


def lines(caplog: pytest.LogCaptureFixture, beginning: str) -> list[str]:
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if line.startswith(f"spectune: {beginning}")]


def test_what_fails_at_the_start_is_said_once_and_vllm_serves(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A configuration that a new version renamed."""
    scheduler = start(cache_config=SimpleNamespace())
    assert drafted(scheduler) == [MOST] * SEATS
    assert scheduler.update_from_output(None, None) == "outputs"
    assert scheduler.finish_requests() == []
    (said,) = lines(caplog, "nothing is recorded or followed: ")
    assert "num_gpu_blocks" in said


def test_what_fails_in_a_step_is_said_once_and_vllms_own_choice_returns(
    start: Start, store: TraceStore, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    scheduler = start()
    assert answer(store, publish(store)) == ("applied", "")
    assert drafted(scheduler) == [5, 5, 2, 2]

    def fails(_: Any) -> None:
        raise KeyError("what is in force")

    with monkeypatch.context() as broken:
        broken.setattr("spectune.engines.serving.Served.current", fails)
        assert drafted(scheduler) == [MOST] * SEATS
        assert scheduler.dynamic_sd_lookup is None
    assert len(lines(caplog, "rounds are lost, and vLLM goes on: KeyError")) == 1
    assert drafted(scheduler) == [5, 5, 2, 2]

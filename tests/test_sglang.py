"""The plugin for SGLang on what it uses of SGLang, written here; its contract with an SGLang's
sources."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from databases import opened, put_in_force
from synthetic import policy
from waiting import eventually

from spectune.engines.serving import Place, Served
from spectune.engines.sglang import plugin
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import AnyPolicy
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

SOURCES = {
    "__init__.py": "",
    "srt/plugins/hook_registry.py": """
from enum import Enum

class HookType(Enum):
    AROUND = "around"
    REPLACE = "replace"

class HookRegistry:
    hooks = {}

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AROUND, *, source=None):
        cls.hooks[target] = hook
""",
    "srt/runtime_context.py": """
asked, parallel = None, None

def get_server_args():
    return asked

def get_parallel():
    return parallel
""",
    "srt/speculative/adaptive_spec_params.py": """
import json
from functools import cached_property

class AdaptiveSpeculativeParams:
    def __init__(self, initial_steps, cfg_path=None):
        self.steps, self.fed = initial_steps, 0
        with open(cfg_path) as f:
            self.slots = json.load(f)

    @cached_property
    def candidate_steps(self):
        return sorted({s for slot in self.slots.values() for s in slot["candidate_steps"]})

    def set_cuda_graph_bs(self, cuda_graph_bs): ...

    def get_steps_for_batch(self, batch_size):
        return self.steps

    def on_verify_complete(self, num_correct_drafts_per_req, batch_size):
        self.fed += 1
        return self.steps

    def cuda_graph_bs_for_step(self, step):
        return []
""",
    "srt/managers/schedule_batch.py": """
class FINISH_LENGTH: ...

class Req:
    def __init__(self, rid, prompt, sampling_params):
        self.rid, self.origin_input_ids, self.sampling_params = rid, prompt, sampling_params
        self.output_ids, self.finished_reason, self.lora_id = [], None, None

    @property
    def output_ids_through_stop(self):
        return self.output_ids[: self.sampling_params.max_new_tokens]

    def finished(self):
        return self.finished_reason is not None
""",
    "srt/managers/scheduler_components/batch_result_processor.py": """
from sglang.srt.managers.schedule_batch import FINISH_LENGTH

class SchedulerBatchResultProcessor:
    def process_batch_result_decode(self, batch, result):
        for req, tokens in zip(batch.reqs, result.tokens):
            if req.finished():
                continue
            req.output_ids += tokens
            if len(req.output_ids) >= req.sampling_params.max_new_tokens:
                req.finished_reason = FINISH_LENGTH()
""",
}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with what is used of SGLang, to be imported."""
    root = tmp_path / "path" / "sglang"
    for name, text in SOURCES.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(root.parent))
    monkeypatch.setattr(plugin, "_server", None)
    monkeypatch.setattr(plugin, "_candidates", ())
    yield root
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


class Scheduler:
    """A scheduler process of SGLang with the plugin in it."""

    def __init__(self, folder: Path, pair_file: Path, steps: list[int], tp_size: int = 1) -> None:
        spec = read_pair(str(pair_file))
        import sglang.srt.runtime_context as context

        context.parallel = SimpleNamespace(tp_rank=0)
        context.asked = SimpleNamespace(
            model_path=spec.target,
            speculative_draft_model_path=dict(spec.drafts)["near"],
            speculative_algorithm="EAGLE3",
            **{"tp_size": tp_size, "pp_size": 1, "device": "cuda", "dtype": "auto"},
            context_length=512,
        )
        plugin.register()
        from sglang.srt.managers.scheduler_components import batch_result_processor as results
        from sglang.srt.plugins.hook_registry import HookRegistry

        self.hooks = HookRegistry.hooks
        self._decode = results.SchedulerBatchResultProcessor.process_batch_result_decode
        config = folder / "adaptive.json"
        config.write_text(json.dumps({"1": {"candidate_steps": steps}}))
        self.rule = self.hooks[plugin.POLICY](steps[-1], str(config))

    def step(self, requests: list[Any], tokens: list[list[int]], drafted: int) -> None:
        kept = [len(t) - 1 for t in tokens]
        result = SimpleNamespace(
            tokens=tokens,
            accept_lens=[k + 1 for k in kept],
            num_correct_drafts_per_req_cpu=kept,
            speculative_num_draft_tokens=drafted + 1,
        )
        self.hooks[plugin.ROUNDS](self._decode, None, SimpleNamespace(reqs=requests), result)

    def close(self) -> None:
        found = plugin.server()
        assert found is not None
        found.served.close()


class ThreadFirst(Served):
    """Its thread asks for the pair before its maker goes on, as it may at any time."""

    def __init__(self, place: Place, pair: Callable[[], PairSpec], *others: Any) -> None:
        pair()
        super().__init__(place, pair, *others)


@pytest.fixture
def scheduler(
    sources: Path, tmp_path: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Scheduler]]:
    made: list[Scheduler] = []
    monkeypatch.setenv("SPECTUNE_DB", str(tmp_path / "x.db"))
    monkeypatch.setenv("SPECTUNE_PAIR", str(tiny_pair))
    monkeypatch.setattr(plugin, "Served", ThreadFirst)

    def start(steps: list[int], **options: Any) -> Scheduler:
        made.append(Scheduler(tmp_path, tiny_pair, steps, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


def request(name: str, tokens: int, **sampling: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Req

    asked = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "max_new_tokens": tokens, **sampling}
    made = Req(name, [5, 6, 7], SimpleNamespace(**asked))
    made.output_ids.append(9)  # what its prompt's pass yields
    return made


def published(store: TraceStore, wanted: AnyPolicy) -> int:
    return put_in_force(store, store.list_pairs()[0].id, wanted, "cuda", deployment="sglang")


def test_rounds_are_recorded_and_a_published_table_decides(
    scheduler: Callable[..., Scheduler], tmp_path: Path
) -> None:
    running = scheduler([0, 2, 4])
    running.rule.set_cuda_graph_bs([8, 1, 2])
    assert running.rule.cuda_graph_bs_for_step(2) == [1, 2, 8]
    assert (running.rule.get_steps_for_batch(1), running.rule.on_verify_complete([1], 1)) == (4, 4)
    one, two = request("a", 6), request("b", 20, top_k=1 << 30, temperature=0.7)
    running.step([one, two], [[1, 2, 3], [4]], 4)
    running.step([one, two], [[1, 2, 3, 4], [5, 6]], 4)  # two of them beyond the text
    running.step([one, two], [[8], [7]], 4)  # a finished request comes once more
    with opened(tmp_path / "x.db") as store:
        eventually(lambda: [r for r in store.list_recordings() if r.n_requests == 1])
        kept = store.load("latest", steps=True).requests[0]
        assert kept.trajectory.output_ids.tolist() == [9, 1, 2, 3, 1, 2]
        assert (kept.trajectory.finish, kept.trajectory.sampling) == ("length", Sampling())
        told = [(s.start, s.drafted, s.accepted, s.emitted, s.batch) for s in kept.steps]
        assert told == [(0, 0, 0, 1, 1), (1, 4, 2, 3, 2), (4, 4, 2, 2, 2)]
        wanted = policy("near", {"1": 4, "2": 0})
        good = published(store, wanted)
        eventually(lambda: running.rule.get_steps_for_batch(2) == 0)
        assert running.rule.get_steps_for_batch(1) == 4
        assert running.rule.on_verify_complete([1], 1) is None
        bad = published(store, policy("near", 3))
        eventually(lambda: bool(store.acknowledgements(bad)))
        (refused,), (applied,) = store.acknowledgements(bad), store.acknowledgements(good)
        assert (refused.status, applied.status) == ("refused", "applied")
        assert "this server prepared 0, 2, 4 steps, not 3" in refused.reason
        running.step([two], [[1, 2]], 4)
        two.sampling_params.max_new_tokens = 8
        running.step([two], [[1]], 4)
        eventually(lambda: len(store.list_recordings()) == 2)
        eventually(lambda: store.list_recordings()[0].n_requests == 1)
        later = store.load("latest", steps=True).requests[0]
        assert [s.policy for s in later.steps[-2:]] == [wanted.id] * 2
        assert later.trajectory.verifier == "greedy"


def test_requests_that_sglang_lets_go_are_forgotten(scheduler: Callable[..., Scheduler]) -> None:
    running = scheduler([1, 3])
    held, aborted = request("a", 9), request("b", 9)
    running.step([held, aborted], [[1], [2]], 3)
    del aborted
    gc.collect()
    found = plugin.server()
    assert found is not None
    assert [r.rid for r in found.decoding] == ["a"]


def test_steps_of_several_ranks_are_left_to_sglang(
    scheduler: Callable[..., Scheduler], tmp_path: Path
) -> None:
    running = scheduler([1, 3], tp_size=2)
    running.step([request("a", 9)], [[1]], 3)
    with opened(tmp_path / "x.db") as store:
        eventually(lambda: bool(store.list_pairs()))
        version = published(store, policy("near", 3))
        eventually(lambda: bool(store.acknowledgements(version)))
        assert "it runs on 2 ranks" in store.acknowledgements(version)[0].reason
    assert running.rule.get_steps_for_batch(1) == 3


def test_what_a_new_version_changed_costs_no_token(
    scheduler: Callable[..., Scheduler],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, asked = scheduler([2]), request("a", 9)
    monkeypatch.delattr(type(asked), "output_ids_through_stop")
    running.step([asked], [[1, 2]], 2)
    running.step([asked], [[3]], 2)
    assert asked.output_ids == [9, 1, 2, 3]
    said = [r.message for r in caplog.records if "rounds are not recorded" in r.message]
    assert len(said) == 1


def test_the_contract_holds_with_the_sources(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plugin.lacks(sources) == []
    # With an SGLang installed its own sources are held against the contract too.
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(sources.parent)])
    installed = importlib.util.find_spec("sglang")
    if installed is not None and installed.origin is not None:
        assert plugin.lacks(Path(installed.origin).parent) == []
    file = sources / "srt/speculative/adaptive_spec_params.py"
    other = file.read_text().replace("batch_size):\n        return", "size):\n        return")
    file.write_text(other)
    assert plugin.lacks(sources) == [
        "srt/speculative/adaptive_spec_params.py: AdaptiveSpeculativeParams.get_steps_for_batch"
    ]


def test_nothing_is_hooked_without_a_database_or_with_another_sglang(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SPECTUNE_DB", raising=False)
    plugin.register()
    (sources / "srt/runtime_context.py").write_text("")
    monkeypatch.setenv("SPECTUNE_DB", str(tmp_path / "x.db"))
    plugin.register()
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert HookRegistry.hooks == {}
    assert "lacks srt/runtime_context.py: get_server_args" in caplog.text

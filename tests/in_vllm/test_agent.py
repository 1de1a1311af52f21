"""The agent in a real vLLM: without a policy every step is vLLM's own class's, a policy comes into
force, faults stop no request, and what it costs a step."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
import torch
import vllm
from databases import opened, put_in_force
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.llm_engine import LLMEngine
from waiting import eventually

from spectune.demo.prompts import demo_workload
from spectune.engines.vllm import agent
from spectune.engines.vllm.follow import Follower
from spectune.optimizer.record import PanoramaSpec, record_panoramas
from spectune.optimizer.simulate.trace import simulate
from spectune.runtime.loading import load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy

SEATS, MOST, TOKENS = 8, 6, 40
PROMPTS = [line["turns"][0] for line in demo_workload()][::3]
SCHEDULER = "spectune.engines.vllm.agent.Scheduler"


class Steps:
    """vLLM's engine in this process, a step at a time, and every output of its scheduler."""

    def __init__(self, scheduler: str | None, ngram: bool, backend: str | None) -> None:
        spec = read_pair("demo")
        drafting = {"method": "draft_model", "model": dict(spec.drafts)["small"]}
        if ngram:
            drafting = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        self.llm = LLMEngine.from_engine_args(
            EngineArgs(
                model=spec.target, dtype="float32", max_model_len=512, max_num_seqs=SEATS,
                enforce_eager=True, max_num_batched_tokens=160, scheduler_cls=scheduler,
                speculative_config={**drafting, "num_speculative_tokens": MOST},
                distributed_executor_backend=backend,
            )
        )  # fmt: skip
        self.scheduler: Any = self.llm.engine_core.engine_core.scheduler
        self.outputs: list[tuple[Any, ...]] = []
        self.runs = 0
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._noted

    def _noted(self, *args: Any) -> Any:
        output = self._schedule(*args)
        self.outputs.append((
            [(name.partition("-")[0], n) for name, n in output.num_scheduled_tokens.items()],
            [(name.partition("-")[0], list(ids))
             for name, ids in output.scheduled_spec_decode_tokens.items()],
            output.num_spec_tokens_to_schedule,
            sorted(output.scheduled_cached_reqs.num_output_tokens),
        ))  # fmt: skip
        return output

    def serve(self, prompts: list[str], **params: Any) -> list[list[int]]:
        """Decodes the prompts, 8 at a time; their tokens."""
        texts, sent, ended = [list[int]() for _ in prompts], 0, 0
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, **params})
        self.runs += 1
        while ended < len(prompts):
            while sent < len(prompts) and sent - ended < SEATS:
                self.llm.add_request(f"{self.runs}.{sent}", prompts[sent], sampling)
                sent += 1
            for out in self.llm.step():
                number = int(out.request_id.partition("-")[0].partition(".")[2])
                texts[number] = list(out.outputs[0].token_ids)
                ended += out.finished
        return texts


@contextmanager
def engine(
    folder: Path | None,
    scheduler: str | None = SCHEDULER,
    *,
    ngram: bool = False,
    backend: str | None = None,
) -> Iterator[Steps]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1", "SPECTUNE_FOLDER": str(folder or ""),
    }  # fmt: skip
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM stumbles over its wrapper
    try:
        steps = Steps(scheduler, ngram, backend)
    finally:
        sys.modules |= {} if hidden is None else {"llvmlite.binding.ffi": hidden}
    try:
        yield steps
    finally:
        steps.llm.engine_core.shutdown()


def publish(folder: Path, version: int, gammas: dict[str, int]) -> None:
    document = {"format": 1, "version": version, "policy": "p", "gammas": gammas}
    (folder / "new").write_text(json.dumps(document))
    os.replace(folder / "new", folder / "policy.json")


def status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("rounds-*.jsonl"))
    return [json.loads(n) for file in files for n in file.read_text().splitlines()[1:]]


def test_without_a_policy_every_step_is_vllms_own(tmp_path: Path) -> None:
    runs = []
    for scheduler in (None, SCHEDULER):
        with engine(tmp_path, scheduler) as steps:
            while len(steps.outputs) < 2000:
                texts = steps.serve(PROMPTS)
            runs.append((steps.outputs, texts))
            bases = [base.__name__ for base in type(steps.scheduler).__mro__]
            if scheduler is None:
                continue
            assert steps.scheduler.dynamic_sd_lookup is None
            eventually(lambda: status(tmp_path)["noted"] == steps.runs * len(PROMPTS))
            check_lines(lines(tmp_path)[-len(PROMPTS) :], texts)
            print(bases, status(tmp_path))
    (own, own_texts), (ours, our_texts) = runs
    print(f"{len(own)} steps of vLLM's own class, {len(ours)} with the agent")
    assert len(ours) >= 2000
    assert ours == own
    assert our_texts == own_texts


def test_a_server_that_does_not_schedule_ahead_stays_as_it_is(tmp_path: Path) -> None:
    """With prompt lookup vLLM takes its synchronous scheduler, of which ours is no subclass."""
    runs = []
    for scheduler in (None, SCHEDULER):
        with engine(tmp_path, scheduler, ngram=True) as steps:
            assert not steps.llm.vllm_config.scheduler_config.async_scheduling
            texts = steps.serve(PROMPTS[:24])
            runs.append((steps.outputs, texts))
    assert len(runs[0][0]) > 100
    assert runs[0] == runs[1]


class Placeholder:
    """A stream or an event of a CPU, where nothing runs beside."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_a_server_that_schedules_ahead_hands_on_what_it_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses that on CPUs; its code for GPUs runs here with streams that do nothing."""
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Placeholder)
    monkeypatch.setattr(torch, "Event", Placeholder)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    check = CpuPlatform.check_and_update_config

    def schedule_ahead(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(schedule_ahead))
    with engine(tmp_path, backend="uni") as steps:
        assert steps.llm.engine_core.engine_core.batch_queue is not None
        steps.serve(PROMPTS[:2], max_tokens=20)
        eventually(lambda: status(tmp_path)["noted"] == 2)
        texts = lines(tmp_path)
        publish(tmp_path, -1, {"1": 1})
        eventually(lambda: status(tmp_path)["in_force"]["version"] == -1)
        beside = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        steps.llm.add_request("beside", PROMPTS[0], beside)
        for number, line in enumerate(texts):
            for start in range(1, 20):
                prompt = TokensPrompt(prompt_token_ids=line["prompt"] + line["output"][: start - 1])
                forced = SamplingParams(
                    temperature=0, max_tokens=2, allowed_token_ids=[line["output"][start - 1]],
                    ignore_eos=True, extra_args={"spectune": "retrace"},
                )  # fmt: skip
                steps.llm.add_request(f"{number}.{start}", prompt, forced)
                steps.llm.step()
        while steps.llm.has_unfinished_requests():
            steps.llm.step()
        eventually(lambda: len(lines(tmp_path)) == 2 + 38 + 1)
        noted = {line["id"].partition("-")[0]: line for line in lines(tmp_path)[2:]}
    assert {drafted for _, drafted, *_ in noted["beside"]["rounds"][1:]} == {1}
    count = 0
    for number, line in enumerate(texts):
        for start, drafted, accepted, *_ in line["rounds"][1:-1]:
            chain = noted[f"{number}.{start}"]["proposals"][0]
            assert len(chain) == drafted == MOST
            following = line["output"][start:]
            assert chain[:accepted] == following[:accepted]
            assert chain[accepted : accepted + 1] != following[accepted : accepted + 1]
            count += 1
    print(f"{count} rounds of a server that schedules ahead are those that were retraced")
    assert count >= 4


def check_lines(noted: list[dict[str, Any]], texts: list[list[int]]) -> None:
    assert sorted(line["output"] for line in noted) == sorted(texts)
    for line in noted:
        at = 0
        for start, drafted, accepted, emitted, *_ in line["rounds"]:
            assert start == at
            assert accepted <= drafted <= MOST
            assert emitted <= accepted + 1
            at += emitted
        assert at == len(line["output"])


def test_a_policy_comes_into_force_and_faults_change_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path) as steps:
        texts = steps.serve(PROMPTS[:16])
        waits = []
        for version, gammas in enumerate(({"1": 5, "3": 2}, {"1": 0}, {"1": 3, "8": 6}), 1):
            publish(tmp_path, version, gammas)
            began = time.monotonic()
            eventually(lambda v=version: status(tmp_path)["in_force"]["version"] == v)
            waits.append(time.monotonic() - began)
            steps.outputs.clear()
            assert steps.serve(PROMPTS[:16]) == texts
            sizes = {int(size): tokens for size, tokens in gammas.items()}
            for names, _, drafted, _ in steps.outputs:
                assert drafted == sizes[max(size for size in sizes if size <= max(1, len(names)))]
        print("seconds until in force:", [round(wait, 2) for wait in waits])
        measure(steps, tmp_path)
        watched = steps.scheduler._spectune
        for name in ("on_updated", "on_finished", "on_scheduled", "on_output", "on_schedule"):

            def fails(*_: Any) -> None:
                raise KeyError("a vLLM that changed")

            watched.active, steps.scheduler._spectune = True, watched
            with monkeypatch.context() as broken:
                broken.setattr(agent.Agent, name, fails)
                assert steps.serve(PROMPTS[:16]) == texts
            if name != "on_finished":
                assert steps.scheduler._spectune is None
                assert steps.scheduler.dynamic_sd_lookup is None


def test_what_follow_brings_in_is_replayed(tmp_path: Path) -> None:
    """Published in the database, in force in vLLM, noted by the agent, brought in: every round is
    the one that replay says."""
    spec = read_pair("demo")
    (folder := tmp_path / "folder").mkdir()
    policies = [
        parse_policy({"draft": "small", "window": {"kind": "fixed", "gamma": gamma}})
        for gamma in (2, 5)
    ]
    with opened(tmp_path / "followed.db") as store:
        follower = Follower(store, folder, "vllm", print, pair=spec)
        texts = []
        with engine(folder) as steps:
            eventually(lambda: (folder / "status.json").exists())
            follower.once()
            for policy in policies:
                version = put_in_force(store, spec.id, policy, deployment="vllm")
                follower.once()
                eventually(lambda v=version: status(folder)["in_force"]["version"] == v)
                texts += steps.serve(PROMPTS[:12])
                follower.once()
                assert [a.status for a in store.acknowledgements(version)] == ["applied"]
            eventually(lambda: status(folder)["noted"] == 24)
            follower.once()
        recording = store.list_recordings()[0].id
        pair = load_pair(spec, device="cpu", dtype="float32")
        record_panoramas(store, pair, recording, PanoramaSpec(["small"], MOST))
        requests = store.load(recording, steps=True).requests
        assert sorted(r.trajectory.output_ids.tolist() for r in requests) == sorted(texts)
        count = 0
        for policy in policies:
            replay = simulate(store, recording, policy, None, per_round=True).replay
            for request, replayed in zip(requests, replay.steps(), strict=True):
                executed = request.steps[1:]  # replay counts from the prefill's token on
                if {step.policy for step in executed} == {policy.id}:
                    rounds = [(s.start - 1, s.drafted, s.accepted) for s in executed[:-1]]
                    assert rounds == [(s.start, s.drafted, s.accepted) for s in replayed[:-1]]
                    count += len(rounds)
        print(f"{count} rounds replayed alike")
        assert count > 200


def test_the_capture_is_what_this_vllm_does(tmp_path: Path) -> None:
    """Where there is no capture of a version it is written, to be looked at and listed."""
    with engine(tmp_path) as steps:
        scheduler, recorded = steps.scheduler, list[dict[str, Any]]()
        requests: dict[str, Any] = {}
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def scheduling(*args: Any) -> Any:
            output = schedule(*args)
            requests.update(scheduler.requests)
            if output.num_scheduled_tokens:
                recorded.append({
                    "scheduled": dict(output.num_scheduled_tokens),
                    "drafts": {n: list(d) for n, d in output.scheduled_spec_decode_tokens.items()},
                    "next": output.num_spec_tokens_to_schedule,
                    "invalid": output.num_invalid_spec_tokens,
                    "new": [new.req_id for new in output.scheduled_new_reqs],
                    "resumed": sorted(output.scheduled_cached_reqs.resumed_req_ids),
                })  # fmt: skip
            return output

        def updating(output: Any, result: Any) -> Any:
            step = next((step for step in recorded if "after" not in step), {})
            step["sampled"] = [list(tokens) for tokens in result.sampled_token_ids]
            step["index"] = sorted(result.req_id_to_index, key=result.req_id_to_index.get)
            outputs = update(output, result)
            step["after"] = {
                name: [requests[name].num_output_tokens, requests[name].status.name]
                for name in output.num_scheduled_tokens
            }
            return outputs

        scheduler.schedule, scheduler.update_from_output = scheduling, updating
        steps.serve(PROMPTS[:6], max_tokens=24)
        eventually(lambda: len(lines(tmp_path)) == 6)
        capture = {
            "version": vllm.__version__, "num_spec_tokens": MOST, "steps": recorded,
            "requests": {
                name: {
                    "prompt_token_ids": list(request.prompt_token_ids),
                    "output_token_ids": list(request.output_token_ids),
                    "max_tokens": request.max_tokens,
                }
                for name, request in requests.items()
            },
            "lines": [
                {**n, "arrived": 0, "ended": 0, "rounds": [[*r[:5], r[6]] for r in n["rounds"]]}
                for n in lines(tmp_path)
            ],
        }  # fmt: skip
        text = json.dumps(capture, separators=(",", ":"))
        for name in requests:  # vLLM adds letters to a request's name
            text = text.replace(name, name.partition("-")[0])
    path = Path(__file__).parents[1] / f"vllm_{'_'.join(vllm.__version__.split('.')[:2])}.json"
    if not path.exists():
        path.write_text(text + "\n")
    assert json.loads(path.read_text()) == json.loads(text)


def measure(steps: Steps, folder: Path) -> None:
    """The time of the agent's own calls in vLLM's thread, a step of 8 requests."""
    spent: dict[str, list[float]] = {}
    watched = steps.scheduler._spectune
    hooks = ("on_schedule", "on_scheduled", "on_output", "on_updated")

    def timed(name: str, hook: Any) -> Any:
        def call(*args: Any) -> None:
            began = time.perf_counter()
            hook(*args)
            spent.setdefault(name, []).append(time.perf_counter() - began)

        return call

    for name in hooks:
        setattr(watched, name, timed(name, getattr(watched, name)))
    steps.serve(PROMPTS)
    for name in hooks:
        delattr(watched, name)
    cost, means = (sum(map(of, spent.values())) * 1e6 for of in (median, mean))
    count = len(spent["on_updated"])
    print(f"a step: {cost:.1f} us in the median, {means:.1f} in the mean; {count} steps")

"""The agent in a real vLLM: without a policy every step is vLLM's own class's, a policy comes into
force, faults stop no request, and what it costs a step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
import vllm
from agent_stub import lines, publish, status
from databases import opened, put_in_force
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm_engine import MOST, PROMPTS, Replaceable, Steps, engine, engine_ahead
from vllm_faults import break_folder, compare_steps, raise_faults, texts_of_vllm
from waiting import eventually

from spectune.engines.vllm import agent
from spectune.engines.vllm.follow import Follower
from spectune.optimizer.recording.record import PanoramaSpec, record_panoramas
from spectune.optimizer.replay.trace import simulate
from spectune.runtime.loading import load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy


@pytest.fixture(scope="module")
def steps() -> Iterator[Steps]:
    """An engine with a draft model, whose scheduler each test replaces."""
    with engine(None, Replaceable) as steps:
        yield steps


def start(steps: Steps, folder: Path) -> Any:
    """A scheduler with the agent in this folder."""
    os.environ["SPECTUNE_FOLDER"] = str(folder)
    return steps.schedule_by(agent.Scheduler)


def test_without_a_policy_every_step_is_vllms_own(steps: Steps, tmp_path: Path) -> None:
    figures = compare_steps(steps, tmp_path, agent.Scheduler, 300)
    print(figures)
    assert figures["steps"] >= 300
    assert not any(n for key, n in figures.items() if key.endswith("differ"))
    eventually(lambda: status(tmp_path)["noted"] == figures["texts"])
    texts = steps.serve(PROMPTS)  # the agent has ended, vLLM goes on
    check_lines(lines(tmp_path)[-len(PROMPTS) :], texts)


def test_a_fault_before_a_statement_changes_no_text(steps: Steps) -> None:
    """Before each of a few; ``bench/served/faults.py`` has all."""
    figures = raise_faults(steps, texts_of_vllm(steps), every=25)
    print(figures)
    assert (figures["failed"], figures["texts_differ"]) == (0, 0)
    assert figures["raised"] >= 9
    assert len(figures["not_reached"]) < figures["statements"] / 8


def test_a_folder_that_fails_is_one_line_in_the_log(steps: Steps, tmp_path: Path) -> None:
    for name, figures in break_folder(steps, texts_of_vllm(steps), tmp_path).items():
        print(name, figures)
        if "skipped" not in figures:
            assert (figures["failed"], figures["texts_differ"], figures["dropped"]) == (0, 0, 0)
            assert len(figures["log"]) == 1


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
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(steps, tmp_path)
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


def test_what_follow_brings_in_is_replayed(steps: Steps, tmp_path: Path) -> None:
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
        start(steps, folder)
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


def test_the_capture_is_what_this_vllm_does(steps: Steps, tmp_path: Path) -> None:
    """Where there is no capture of a version it is written, to be looked at and listed."""
    start(steps, tmp_path)
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


# Last: once another engine of this process ended, the one that the tests above share fails.


def test_a_server_with_prompt_lookup_stays_as_it_is(tmp_path: Path) -> None:
    with engine(None, Replaceable, method="ngram") as steps:
        figures = compare_steps(steps, tmp_path, agent.Scheduler, 300)
    assert not any(n for key, n in figures.items() if key.endswith("differ"))


def test_a_server_that_schedules_ahead_hands_on_what_it_drafts(tmp_path: Path) -> None:
    with engine_ahead(tmp_path) as steps:
        steps.serve(PROMPTS[:2], max_tokens=20)
        eventually(lambda: status(tmp_path)["noted"] == 2)
        texts, retrace = lines(tmp_path), {"spectune": status(tmp_path)["retrace"]}
        publish(tmp_path, 7, {"1": 1})
        eventually(lambda: status(tmp_path)["in_force"]["version"] == 7)
        beside = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        steps.llm.add_request("beside", PROMPTS[0], beside)
        for number, line in enumerate(texts):
            for start in range(1, 20):
                prompt = TokensPrompt(prompt_token_ids=line["prompt"] + line["output"][: start - 1])
                forced = SamplingParams(
                    temperature=0, max_tokens=2, allowed_token_ids=[line["output"][start - 1]],
                    ignore_eos=True, extra_args=retrace,
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

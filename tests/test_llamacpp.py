"""llama.cpp for real: what it served says what it does under every other policy."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xllamacpp
from synthetic import policy

from spectune.demo.prompts import demo_workload
from spectune.engines import llamacpp
from spectune.engines.export import engine_settings
from spectune.engines.gguf import gguf_file
from spectune.engines.llamacpp import LlamaCpp
from spectune.engines.protocol import Answered, Load, Prompt, Wanted
from spectune.engines.settings import gguf_of
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import AUTOREGRESSIVE, AnyPolicy
from spectune.runtime.recording.chains import record_panorama
from spectune.traces.errors import EngineError, PairError, PolicyError
from spectune.traces.schema import AGREE_YES, Sampling, Trajectory

MOST, TOKENS = 8, 28
GREEDY = Sampling()


@pytest.fixture(scope="module")
def native(demo: PairSpec) -> LoadedPair:
    return load_pair(demo, device="cpu")


@pytest.fixture(scope="module")
def prompts(native: LoadedPair) -> list[Prompt]:
    texts = [line["turns"][0] for line in demo_workload()][::60]
    return [Prompt(f"r{i}", "c", tuple(native.tokenizer(t).input_ids)) for i, t in enumerate(texts)]


@pytest.fixture(scope="module")
def running(demo: PairSpec) -> Iterator[LlamaCpp]:
    found = LlamaCpp(demo, Wanted("small", MOST, 1, 512))
    yield found
    found.close()


fixed = partial(policy, "small")


def served(
    running: LlamaCpp, prompts: list[Prompt], policy: AnyPolicy, sampling: Sampling = GREEDY
) -> list[Answered]:
    return list(running.execute(prompts, policy, Load(), sampling=sampling, max_new_tokens=TOKENS))


def capacities(pair: LoadedPair, text: Trajectory) -> list[int]:
    """By output position how many of a long draft from there would be accepted."""
    agree = record_panorama(pair, text, "small", MOST).agree.tolist()
    found = [0] * (len(agree) + 1)
    for i in reversed(range(len(agree))):
        found[i] = found[i + 1] + 1 if agree[i] == AGREE_YES else 0
    return found


def check_rounds(found: Answered, gamma: int, capacity: list[int]) -> int:
    """Holds every round against what the draft alone says; how many there were."""
    first, *rounds = found.steps
    assert (first.start, first.drafted, first.emitted) == (0, 0, 1)
    start = 1
    for step in rounds:
        assert step.start == start
        assert step.drafted == min(gamma, TOKENS - start - 1)
        expected = min(step.drafted, capacity[start])
        if found.trajectory.finish != "length":  # a drafted end of the text is not counted
            expected = min(expected, len(found.trajectory.output_ids) - start - 1)
        assert step.accepted == expected
        assert step.emitted == step.accepted + 1
        start += step.emitted
    assert start == len(found.trajectory.output_ids)
    return len(rounds)


def test_one_recording_predicts_every_round_of_every_other_window(
    running: LlamaCpp, prompts: list[Prompt], native: LoadedPair
) -> None:
    recorded = served(running, prompts, fixed(MOST))
    known = [capacities(native, found.trajectory) for found in recorded]
    rounds = sum(check_rounds(f, MOST, c) for f, c in zip(recorded, known, strict=True))
    for gamma in (0, 1, 3, 7):
        again = served(running, prompts, fixed(gamma))
        for was, found, capacity in zip(recorded, again, known, strict=True):
            assert found.trajectory == was.trajectory
            rounds += check_rounds(found, gamma, capacity)
            ends = [step.ended_s for step in found.steps]
            assert ends == sorted(ends)
            assert 0 <= found.arrived_s < found.first_token_s <= found.finished_s
            assert all(step.round_s > 0 for step in found.steps)
    assert rounds > 150


def test_above_temperature_0_a_token_is_kept_iff_the_target_drew_it(
    running: LlamaCpp, prompts: list[Prompt], native: LoadedPair
) -> None:
    sampling = Sampling(0.8, top_p=0.95, seed=3)
    found = served(running, prompts, fixed(4), sampling)
    assert [f.trajectory for f in served(running, prompts[:2], fixed(4), sampling)] == [
        f.trajectory for f in found[:2]
    ]
    assert found[0].trajectory.verifier == "greedy"
    assert sum(check_rounds(f, 4, capacities(native, f.trajectory)) for f in found) > 50


def test_what_it_cannot_run_is_refused_at_once(
    running: LlamaCpp, demo: PairSpec, prompts: list[Prompt]
) -> None:
    """Of what every engine refuses one case (:mod:`test_engines` has the others), and its own."""
    asked = {"sampling": GREEDY, "max_new_tokens": TOKENS}
    window = policy("small", {"kind": "fsm"})
    with pytest.raises(PolicyError, match=r"llama\.cpp cannot run a window"):
        running.execute(prompts, window, Load(), **asked)
    with pytest.raises(EngineError, match="use --concurrency 1"):
        running.execute(prompts, fixed(2), Load(2), **asked)
    with pytest.raises(PairError, match="not 'ngram'; it has: small, medium, head"):
        LlamaCpp(demo, Wanted("ngram"))


def test_a_server_that_dies_is_said_and_one_that_is_closed_is_gone(
    demo: PairSpec, prompts: list[Prompt]
) -> None:
    found = LlamaCpp(demo, Wanted("small", MOST, 1, 512))
    process = found._server
    assert process is not None
    answers = found.execute(prompts, fixed(MOST), Load(), sampling=GREEDY, max_new_tokens=4)
    next(answers)
    process.kill()
    process.wait()
    with pytest.raises(EngineError, match=r"llama\.cpp died at request 'r1'"):
        next(answers)
    found._start(2)
    process = found._server
    assert process is not None
    assert process.poll() is None
    found.close()
    assert process.poll() is not None


def test_why_a_model_cannot_be_loaded_is_said(
    demo: PairSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    with monkeypatch.context() as patch:
        patch.setattr(llamacpp, "gguf_file", lambda _: broken)
        with pytest.raises(EngineError, match=r"cannot load \S+broken\.gguf: (?!it died)\S+"):
            LlamaCpp(demo, Wanted("none", 0, 1, 512))
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('no libgomp')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"cannot load .*: ImportError: no libgomp"):
        LlamaCpp(demo, Wanted("small", MOST, 1, 512))


def test_a_server_ends_with_whoever_waits_for_it(
    demo: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[subprocess.Popen[str]] = []

    def interrupted(_: int = -1) -> str:
        raise KeyboardInterrupt

    class Popen(subprocess.Popen[str]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            assert self.stdout is not None
            self.stdout.readline = interrupted  # type: ignore[method-assign]
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Popen)
        with pytest.raises(KeyboardInterrupt):
            LlamaCpp(demo, Wanted("small", MOST, 1, 512))
    assert made[0].poll() is not None
    gone, end = os.pipe()
    os.close(gone)
    asked = {"model": str(gguf_file(demo.target)), "gamma": 0, "n_ctx": 64, "threads": 1}
    command = [sys.executable, "-P", str(llamacpp.SERVER), json.dumps(asked)]
    with open(end, "wb") as nowhere:
        done = subprocess.run(command, stdout=nowhere, stdin=subprocess.PIPE, timeout=60)
    assert done.returncode == 0


def test_what_fails_in_the_middle_of_an_answer_is_said() -> None:
    events = [{"error": {"code": 500, "message": "context size exceeded"}}]
    with pytest.raises(EngineError, match=r"llama\.cpp failed: .*context size exceeded"):
        llamacpp._rounds(events, 0.0)


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("4,2", 4), ("", None), ("x", None)])
def test_threads_are_what_the_environment_says(
    said: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert llamacpp._threads() == (threads or os.cpu_count())


def test_requests_come_at_their_moments(running: LlamaCpp, prompts: list[Prompt]) -> None:
    load = Load(arrivals=(0.0, 0.0, 0.3))
    found = running.execute(prompts[:3], AUTOREGRESSIVE, load, sampling=GREEDY, max_new_tokens=2)
    first, second, third = found
    assert (first.arrived_s, second.arrived_s, third.arrived_s) == load.arrivals
    assert second.first_token_s > first.finished_s
    assert third.first_token_s > 0.3
    assert {step.draft for f in (first, second, third) for step in f.steps} == {""}


def test_a_token_that_the_model_has_not_is_said(running: LlamaCpp) -> None:
    asked = [Prompt("odd", "c", (1, 2, 999_999))]
    found = running.execute(asked, fixed(2), Load(), sampling=GREEDY, max_new_tokens=4)
    with pytest.raises(EngineError, match="refuses request 'odd': Prompt contains invalid tokens"):
        next(found)


def test_exported_settings_are_llama_cpps_own(demo: PairSpec, tmp_path: Path) -> None:
    drafts = dict(demo.drafts)
    for name, folder in (("target", demo.target), ("small", drafts["small"])):
        (tmp_path / name).symlink_to(folder)
        (tmp_path / f"{name}.gguf").symlink_to(gguf_file(folder))
    pair = PairSpec("p", str(tmp_path / "target"), (("small", str(tmp_path / "small")),))
    settings = engine_settings(fixed(3), pair, "llamacpp")
    asked, kinds = xllamacpp.CommonParams(), xllamacpp.common_speculative_type
    asked.model.path, asked.n_ctx = gguf_of(pair.target), 256
    asked.verbosity, asked.warmup = -1, False
    kind = settings.pop("spec_type").replace("-", "_").upper()
    asked.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    assert hasattr(kinds, "COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3")
    asked.speculative.draft.mparams.path = settings.pop("spec_draft_model")
    for name, value in settings.items():
        assert hasattr(asked.speculative.draft, name.removeprefix("spec_draft_"))
        setattr(asked.speculative.draft, name.removeprefix("spec_draft_"), value)
    server = xllamacpp.Server(asked)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))  # its end may wait for ever
    body = json.dumps({"prompt": [5, 6, 7], "n_predict": 8, "temperature": 0}).encode()
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.listening_address}/completion", body, kind)
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.load(answer)
    assert told["generation_settings"]["speculative.types"] == "draft-simple"
    assert 0 < told["timings"]["draft_n"] <= 3 * 7

"""What the parts on running servers share: a server of the demo pair and its small draft with the
agent, and prompts for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench import ROOT
from bench.lab import interval_of, requests
from spectune.engines.engine import Prompt, Wanted
from spectune.engines.vllm.command import speculative_config
from spectune.engines.vllm.folder import read_status
from spectune.engines.vllm.running import RunningServer
from spectune.engines.vllm.server import OwnServer
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.on_engine import prompts_of
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.text_codec import load_codec
from spectune.traces.errors import EngineError
from spectune.traces.store import TraceStore

DRAFT, MOST, SEATS, MAX_LEN = "small", 8, 16, 512
METHOD_SEATS = 8
DRAFTERS = {"ngram": "ngram", "mtp": "mtp", "eagle3": "head", "draft_model": "small"}
"""vLLM's methods of drafting, and the draft that each has of its pair."""
NAMES = {"ngram": "prompt lookup", "draft_model": "a draft model"}
REAL = ROOT / "build" / "real" / "pair.json"
"""The pair of Gemma 3 270M (`make real`)."""
SMALL = "--distributed-executor-backend uni --kv-cache-memory-bytes 268435456"
GIVE_UP_S, LOOK_S = 60.0, 0.005
OFF = "none"
"""The draft of a server without one."""
ARGUMENTS = os.environ.get("SPECTUNE_VLLM_ARGS", "")
PAIR = read_pair("demo")


@contextmanager
def serving(
    *arguments: str,
    spec: PairSpec = PAIR,
    draft: str = DRAFT,
    seats: int = SEATS,
    threads: int | None = None,
) -> Iterator[OwnServer]:
    """A vLLM server of a pair, which ends with the context; ``arguments``: what it is started with
    beside those that the environment names."""
    os.environ["SPECTUNE_VLLM_ARGS"] = " ".join((ARGUMENTS, *arguments))
    wanted = Wanted(draft, MOST, seats, MAX_LEN, threads=threads)
    with closing(OwnServer(spec, wanted)) as server:
        yield server


def methods_of(real: PairSpec) -> tuple[str, ...]:
    """vLLM's methods of drafting that Gemma 3 270M has: prompt lookup, and the draft model that
    `tools/gemma` trained, where the pair has it."""
    return ("ngram", *(["draft_model"] if DRAFTERS["draft_model"] in real.drafts else []))


def drafting(
    spec: PairSpec, method: str, *arguments: str, **more: Any
) -> AbstractContextManager[OwnServer]:
    """A server, with one thread, of a pair that drafts by a method of vLLM; ``more``: of its
    ``--speculative-config``."""
    draft = DRAFTERS[method]
    path = spec.drafts.get(draft)
    config = speculative_config(path, MOST, METHOD_SEATS, method) | more
    if path and spec.name != PAIR.name:  # else vLLM deals a draft's layers to several of its caches
        arguments += ("--disable-hybrid-kv-cache-manager",)
    how = f"--speculative-config '{json.dumps(config)}'"
    return serving(*arguments, how, spec=spec, draft=draft, seats=METHOD_SEATS, threads=1)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="spectune-bench-") as folder:
        yield Path(folder)


def demo_prompts(count: int, tokens: int) -> list[Prompt]:
    """Prompts of the demo workload, all categories in turn."""
    return list(prompts_of(load_codec(PAIR), requests(count), DecodeOptions(max_new_tokens=tokens)))


def windowed(window: int | Mapping[str, int], draft: str = DRAFT) -> Policy:
    """A policy of so many draft tokens (0: the draft stays loaded), or by batch size."""
    kind = {"kind": "fixed", "gamma": window}
    if not isinstance(window, int):
        kind = {"kind": "by_load", "gamma": window}
    elif not window:
        kind = {"kind": "by_load", "gamma": {"1": 0}}
    return parse_policy({"draft": draft, "window": kind})


def publish(store: TraceStore, policy: Policy, pair_id: str = PAIR.id, device: str = "cpu") -> int:
    """Publishes a policy for vLLM servers of a pair on a device; the version."""
    store.put_policy(policy.id, policy.spelled_out(), policy.label())
    return store.publish(pair_id, device, policy.id, deployment="vllm", actor="bench").version


def await_version(server: RunningServer, version: int) -> None:
    """Returns when the server's agent says that a publication is in force."""
    deadline = time.monotonic() + GIVE_UP_S
    while (status := read_status(server.folder)) is None or status.in_force.version != version:
        if time.monotonic() > deadline:
            raise EngineError(f"publication {version} is not in force after {GIVE_UP_S:.0f} s")
        time.sleep(LOOK_S)


def ratio(figures: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """The geometric mean of the ratios of measurements in pairs, and its 95% interval."""
    return interval_of(np.log(np.array(figures) / np.array(baseline)))


def command(*words: object) -> list[str]:
    """A command line of spectune, in this environment."""
    return [sys.executable, str(ROOT / "cli.py"), *map(str, words)]


def run_json(*words: object) -> Any:
    """What a command prints with ``--json``. Raises CalledProcessError where it fails."""
    return json.loads(subprocess.run(command(*words, "--json"), stdout=-1, check=True).stdout)

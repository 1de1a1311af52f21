"""Replay over workers: 1e8 recorded rounds under 100 policies, and that the figures are those of
one process.

    python bench/workers.py [--rounds 1e8] [--policies 100] [--workers 2|tcp://HOST:8786]

Texts and panoramas are made by the workers (a thousand different ones, again and again): what is
timed is Dask and replay. A recorded round is one of the policy that the texts were recorded by, a
window of 4. The figure goes to ``bench/results/workers.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
from synthetic import drifting_text, flat_profile

from spectune.optimizer.simulate.distributed import Shards, connected, homes
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.trace import Opened
from spectune.runtime.policies.artifacts import Fitted
from spectune.runtime.policies.document import Policy, parse_policy

DIFFERENT, GAMMA_MAX = 1000, 4
RECORDED = parse_policy({"draft": "small", "window": {"kind": "fixed", "gamma": 4}})
PROFILE = flat_profile("bench", ["small"])


@dataclass(frozen=True)
class Synthetic:
    """A shard of the requests from ``first`` on."""

    first: int
    count: int

    def open(self) -> Opened:
        kinds = [
            drifting_text(n, gamma_max=GAMMA_MAX)
            for n in range(min(DIFFERENT, self.first + self.count))
        ]
        numbers = range(self.first, self.first + self.count)
        texts = [replace(kinds[n % DIFFERENT][0], request_id=f"r{n}") for n in numbers]
        return Opened(
            ReplayTrace(texts, {"small": [kinds[n % DIFFERENT][1] for n in numbers]}), INFO, ()
        )

    def artifact(self, name: str) -> Fitted:
        raise NotImplementedError


INFO: Any = None
"""No recording stands behind it."""


def policies(count: int) -> list[Policy]:
    """Every window, one in ten with a stop; two in ten carry their state from request to
    request."""
    rng, found = np.random.default_rng(0), []
    windows = (
        *("fixed", "fsm", "analytic", "cache_fsm", "heuristic", "fixed", "fsm", "analytic"),
        *("heuristic transient", "q_learning"),
    )
    for n in range(count):
        kind, _, transient = windows[n % len(windows)].partition(" ")
        stopped = n % 10 == 5
        longest = int(rng.integers(1, GAMMA_MAX + 1 if stopped else 17))
        window: dict[str, Any] = {"kind": kind}
        window["gamma" if kind == "fixed" else "gamma_max"] = longest
        if transient:
            window["transient"] = True
        stop = {"stop": {"kind": "max_prob", "threshold": 0.3}} if stopped else {}
        found.append(parse_policy({"draft": "small", "window": window, **stop}))
    return found


def sources(requests: int, count: int) -> list[Synthetic]:
    """So many requests in shards of as many each."""
    bounds = np.linspace(0, requests, count + 1).astype(int).tolist()
    return [Synthetic(a, b - a) for a, b in pairwise(bounds)]


def differences(client: Any, tried: Sequence[Policy], requests: int) -> int:
    """Policies whose counts or seconds of any request differ from one process's."""
    alone = Synthetic(0, requests).open().trace
    shards = Shards(client, sources(requests, len(homes(client))), PROFILE)
    differ = 0
    for policy, found in zip(tried, shards.replay(tried), strict=True):
        here = run_replay(alone, policy, PROFILE)
        same = np.array_equal(found.counts, here.counts)
        differ += not (same and np.array_equal(found.seconds, here.seconds))
    return differ


def measured(client: Any, rounds: float, tried: Sequence[Policy]) -> dict[str, Any]:
    """Seconds to open the shards and to replay all policies."""
    per_text = run_replay(Synthetic(0, DIFFERENT).open().trace, RECORDED).total.rounds / DIFFERENT
    requests = round(rounds / per_text)
    began = time.perf_counter()
    opened = partial(print, "opened", flush=True)
    shards = Shards(client, sources(requests, len(homes(client))), PROFILE, opened)
    opened_s, began, replayed = time.perf_counter() - began, time.perf_counter(), 0
    for n, found in enumerate(shards.replay([RECORDED, *tried])):
        total = found.total
        if not n:
            recorded = total
            began = time.perf_counter()  # the first call compiles, or loads what is compiled
        replayed += total.rounds if n else 0
        said = f"{time.perf_counter() - began:7.1f} s  {total.rounds / 1e6:7.1f} M rounds"
        print(f"{n:4} {said}  {found.policy.label()}", flush=True)
    seconds = time.perf_counter() - began
    return {
        "recorded_rounds": recorded.rounds,
        "recorded_tokens": recorded.emitted_tokens,
        "requests": requests,
        "policies": len(tried),
        "opened_s": round(opened_s, 1),
        "replayed_s": round(seconds, 1),
        "replayed_rounds": replayed,
        "million_rounds_per_s": round(replayed / seconds / 1e6, 1),
    }


def main() -> None:
    # Not above: processes of Dask import this module, and need no torch.
    from lab import environment, keep, parser_of

    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=float, default=1e8)
    parser.add_argument("--policies", type=int, default=100)
    parser.add_argument("--workers", default="2")
    asked = parser.parse_args()
    tried = policies(asked.policies)
    before = environment()
    with connected(asked.workers) as client:
        found = {
            "workers": len(homes(client)),
            "policies_that_differ": differences(client, tried, 400),
            **measured(client, asked.rounds, tried),
            "environment": before,
        }
    print(json.dumps(found, indent=1))
    if asked.rounds >= 1e8:
        keep("workers", found)
    sys.exit(found["policies_that_differ"] > 0)


if __name__ == "__main__":
    main()

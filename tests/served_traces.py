"""Texts of an engine, and what a server records of them, by the serving simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from databases import opened
from synthetic import policy
from trace_values import a_panorama, a_trajectory

from spectune.engines.abilities import VLLM, ServingRules
from spectune.engines.engine import Load, chain_round
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.serving import Simulated, serve
from spectune.optimizer.replay.step_costs import step_costs
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import Policy
from spectune.runtime.policies.stops import compile_stop
from spectune.traces.cost_table import CostTable
from spectune.traces.recording import RecordedRequest
from spectune.traces.schema import Sampling, Step, Tokens
from spectune.traces.store import Asked
from spectune.traces.tables import LatencyProfile

PROFILE = LatencyProfile(
    "pair", "cpu", "float32",
    {
        "step": CostTable((2e-3, 3e-3, 9e-3), ("batch",), ((1.0, 2.0, 8.0),)),
        "step target": CostTable(
            (1e-3, 2e-3, 4e-3, 8e-3, 9e-3, 13e-3), ("rows", "context"),
            ((1.0, 8.0, 32.0), (0.0, 500.0)),
        ),
        "step prompts": CostTable((0.0, 3e-3), ("rows",), ((0.0, 50.0),)),
        "step draft/small": CostTable(
            (1e-3, 2e-3, 2e-3, 4e-3, 6e-3, 9e-3), ("passes", "batch"),
            ((0.0, 1.0, 6.0), (1.0, 8.0)),
        ),
        "step draft prompts/small": CostTable((0.0, 1e-3), ("rows",), ((0.0, 50.0),)),
    },
)  # fmt: skip
COSTS = step_costs(PROFILE, "small")


RULES = ServingRules(max_num_seqs=8, max_batched_tokens=512, max_len=400, reply_s=1e-4)
SERVING = {"max_num_seqs": 8, "max_batched_tokens": 512, "max_len": 400, "ahead": 0}


def trace_of(count: int, none: float = 0.0, budget: int = 0) -> ReplayTrace:
    """Texts of an engine from their second token on: of 2 to 60 tokens, of one budget or each of
    its own, a half of which ends before."""
    rng = np.random.default_rng(count)
    made = []
    for i in range(count):
        t = a_trajectory(i, n=int(rng.integers(1, 60)))
        prompt = rng.integers(0, 4096, int(rng.integers(2, 90))).astype(np.int32)
        most = budget or len(t.output_ids) + 9 * (i % 2)
        made.append(replace(t, tokens=Tokens(prompt, t.output_ids), max_new_tokens=most))
    return ReplayTrace(made, {"small": [a_panorama(t, "small", none=none) for t in made]})


window = partial(policy, "small")


def tables(policy: Policy, rules: ServingRules) -> dict[int, tuple[int, ...]]:
    """By context the tokens to draft at each batch size."""
    server: Any = {"draft": "small", "most": 64, "max_num_seqs": rules.max_num_seqs}
    return VLLM.tables(policy, **server)


def simulated(trace: ReplayTrace, policy: Policy, load: Load) -> Simulated:
    gammas = tables(policy, RULES)
    return serve(trace, policy.draft, gammas, load, RULES, COSTS, members=True)


def recorded(
    trace: ReplayTrace, found: Simulated, policy: Policy, at: float = 1e-6
) -> list[RecordedRequest]:
    """What an engine would have recorded of a simulation: each request with its rounds."""
    words = trace.outcomes(policy, compile_stop(policy.stop))
    steps: list[list[Step]] = [[] for _ in found.counts]
    for step, request, drafted in found.members.tolist():
        t, out = (
            int(trace.order[request % len(trace.order)]),
            sum(s.emitted for s in steps[request]),
        )
        left = len(trace.trajectories[t].output_ids) + 1 - out
        if drafted < 0 or left < 1:
            continue
        kept = min(drafted, int(words[trace.offsets[t] + out - 1]) & 255 if out else 0)
        times = {
            "arrived_s": at + float(found.served.arrived_s[request]),
            "ended_s": at + float(found.ends_s[step]),
            "round_s": 0.01,
        }
        done = chain_round(
            out, drafted, kept, min(left, kept + 1), draft="small", policy="", **times
        )
        steps[request].append(done._replace(batch=int(found.steps[step, 0])))
    made = []
    for i, own in enumerate(steps):
        t = trace.trajectories[int(trace.order[i % len(trace.order)])]
        output = np.concatenate((t.prompt_ids[-1:], t.output_ids))
        whole = replace(t, tokens=Tokens(t.prompt_ids[:-1], output))
        assert sum(s.emitted for s in own) == len(whole.output_ids)
        made.append(RecordedRequest(i, whole, steps=tuple(own)))
    return made


def record_server(url: str, gammas: Sequence[int] = (0, 1, 3, 6)) -> None:
    """A database with what a server recorded that drafted so many tokens, for one client and for
    eight; of ``()``, without a draft, for eight alone."""
    trace, at, ordinal = trace_of(40, budget=70), 1.0, 0
    about = {"engine": "vllm", "engine_version": "0.32.0", "serving": SERVING}
    with opened(url) as store:
        spec = read_pair("demo")
        store.put_pair(spec.id, spec.name, spec.to_json(), spec.models)
        asked = Asked(spec.id, None, Sampling(), 64, options=about, source="serve")
        info = store.create_recording(asked)
        for gamma in gammas or (0,):
            for clients in (1, 8) if gammas else (8,):
                served = simulated(trace, window(gamma), Load(clients))
                for r in recorded(trace, served, window(gamma), at):
                    steps = r.steps if gammas else [s._replace(draft="") for s in r.steps]
                    text = replace(r.trajectory, request_id=f"r{ordinal}")
                    store.append_trajectory(info.id, ordinal, text, steps)
                    panorama = a_panorama(r.trajectory, "small", none=0.0)
                    store.put_panoramas(info.id, [(ordinal, panorama)])
                    ordinal += 1
                at += 10 + float(served.ends_s[-1])

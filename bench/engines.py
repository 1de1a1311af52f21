"""What a recording of an engine predicts, held against the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import chain, demo, record_engine, requests, say, stored

from spectune.engines.protocol import Answered, Load, Prompt, Wanted
from spectune.engines.start import start
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.on_engine import prompts_of
from spectune.optimizer.record import PanoramaSpec
from spectune.optimizer.simulate.replay_trace import Replay
from spectune.optimizer.simulate.trace import simulate
from spectune.runtime.policies.document import Policy
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

MOST, SEATS = 8, 8
ALLOWED = 1 / 2000
"""Requests that rounding may change, a round: another engine's sums end in other last bits."""


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """OpenVINO: a recording under one policy, one request at a time, predicts every round of other
    policies.

    Recorded: small, 2 tokens. Predicted, then run: small with 0 to 8 tokens and medium, which the
    engine had not loaded, one request at a time and eight.
    """
    pair, count, tokens = demo(("small", "medium")), 4 if quick else 32, 12 if quick else 96
    options = DecodeOptions(Sampling(), tokens)
    workload = requests(count)
    prompts = prompts_of(pair, workload, options)
    longest = max(len(prompt.ids) for prompt in prompts) + tokens
    store = stored(state / "engines.db", fresh=True)
    rows: list[dict[str, Any]] = []
    for draft, gammas in (("small", range(MOST + 1)), ("medium", (1, 3, 5, 8))):
        running = start("openvino", pair.spec, Wanted(draft, MOST, SEATS, longest))
        if draft == "small":
            look = PanoramaSpec(("small", "medium"), MOST)
            asked = (workload, prompts, chain(draft, 2), Load(), options, look)
            record_engine(store, pair, running, *asked)
        how: dict[str, Any] = {"sampling": options.sampling, "max_new_tokens": tokens}
        for gamma in gammas[:: 4 if quick else 1]:
            for clients in (1, SEATS):
                policy = chain(draft, gamma)
                served = list(running.execute(prompts, policy, Load(clients), **how))
                held = _held(store, policy, prompts, served)
                rows.append({"draft": draft, "gamma": gamma, "concurrency": clients, **held})
                say(rows[-1])
        running.close()
    rounds, differ = (sum(r[key] for r in rows) for key in ("rounds", "differ"))
    return {
        "holds": differ <= ALLOWED * rounds,
        "summary": f"{running.engine.title} {running.version}: {rounds} rounds of {len(rows)} "
        f"executions of {count} requests, predicted from one recording: {differ} requests differ",
        "rows": rows,
    }


def _held(
    store: TraceStore, policy: Policy, prompts: Sequence[Prompt], served: Sequence[Answered]
) -> dict[str, Any]:
    """Rounds that were compared, those that the batch shared, and requests whose text or rounds
    differ."""
    replay = simulate(store, "latest", policy, None, per_round=True).replay
    assert isinstance(replay, Replay)
    by_id = {done.trajectory.request_id: done for done in served}
    rounds = differ = shared = 0
    requests = store.load("latest").requests
    for request, predicted, prompt in zip(requests, replay.steps(), prompts, strict=True):
        done = by_id[prompt.id]
        rounds += len(done.steps) - 1
        shared += sum(step.batch > 1 for step in done.steps)
        one, other = (t.output_ids.tolist() for t in (request.trajectory, done.trajectory))
        expected = [(p.start + 1, p.drafted, p.emitted) for p in predicted]
        executed = [(s.start, s.drafted, s.emitted) for s in done.steps[1:]]
        differ += (one, expected) != (other, executed)
    return {"rounds": rounds, "shared": shared, "differ": differ}

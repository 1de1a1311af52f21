"""What a recording of an engine predicts, held against the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lab import chain, demo, record_engine, requests, say, stored

from spectune.engines.protocol import Answered, Load, Prompt, Wanted
from spectune.engines.start import start
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.on_engine import prompts_of
from spectune.optimizer.record import Look
from spectune.optimizer.simulate.replay_trace import Replay
from spectune.optimizer.simulate.trace import simulate
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import Policy
from spectune.traces.schema import Sampling, Step, Trajectory
from spectune.traces.store import TraceStore

MOST, SEATS = 8, 8
ALLOWED = 1 / 2000
"""Share of rounds that rounding may change: another engine's sums end in other last bits."""
ROUNDING = 1e-3
"""Nats between the two best tokens below which a difference counts as rounding."""


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """OpenVINO: a recording under one policy, one request at a time, predicts every round of other
    policies.

    Recorded: small, 2 tokens. Predicted, then run: small with 0 to 8 tokens and medium, which the
    engine had not loaded, one request at a time and eight. A round that differs is shown with its
    gap: nats between the two best tokens where it is decided.
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
            look = Look(("small", "medium"), MOST)
            asked = (workload, prompts, chain(draft, 2), Load(), options, look)
            record_engine(store, pair, running, *asked)
        how: dict[str, Any] = {"sampling": options.sampling, "max_new_tokens": tokens}
        for gamma in gammas[:: 4 if quick else 1]:
            for clients in (1, SEATS):
                policy = chain(draft, gamma)
                served = list(running.execute(prompts, policy, Load(clients), **how))
                held = _held(store, pair, policy, prompts, served)
                rows.append({"draft": draft, "gamma": gamma, "concurrency": clients, **held})
                say(rows[-1])
        running.close()
    rounds, differ = sum(r["rounds"] for r in rows), [d for r in rows for d in r["differ"]]
    rounded = [d for d in differ if d["gap"] <= ROUNDING]
    return {
        "holds": len(rounded) == len(differ) <= ALLOWED * rounds,
        "summary": f"{running.engine.title} {running.version}: {rounds} rounds of {len(rows)} "
        f"executions of {count} requests, predicted from one recording: "
        f"{len(differ) - len(rounded)} mismatches, {len(rounded)} by rounding",
        "rows": rows,
    }


def _held(
    store: TraceStore,
    pair: LoadedPair,
    policy: Policy,
    prompts: Sequence[Prompt],
    served: Sequence[Answered],
) -> dict[str, Any]:
    """Rounds that were compared, those that the batch shared, and where a request first differs."""
    replay = simulate(store, "latest", policy, None, per_round=True).replay
    assert isinstance(replay, Replay)
    by_id = {done.trajectory.request_id: done for done in served}
    rounds, differ, shared = 0, [], 0
    requests = store.load("latest").requests
    for request, predicted, prompt in zip(requests, replay.steps(), prompts, strict=True):
        done = by_id[prompt.id]
        rounds += len(done.steps) - 1
        shared += sum(step.batch > 1 for step in done.steps)
        if found := _first_difference(pair, policy, request.trajectory, predicted, done):
            differ.append({"request": prompt.id, **found})
    return {"rounds": rounds, "shared": shared, "differ": differ}


def _first_difference(
    pair: LoadedPair,
    policy: Policy,
    recorded: Trajectory,
    predicted: Sequence[Step],
    done: Answered,
) -> dict[str, Any] | None:
    """Where a text, or else a round, is not as predicted, with the gap of the model that decides
    there."""
    texts = recorded.output_ids.tolist(), done.trajectory.output_ids.tolist()
    model = pair.target.model
    if texts[0] != texts[1]:
        what, parts = "text", enumerate(zip(*texts, strict=False))
        at = next((i for i, (a, b) in parts if a != b), min(map(len, texts)))
    else:
        rounds = zip(predicted, done.steps[1:], strict=False)
        differ = (
            (p, s)
            for p, s in rounds
            if (p.start + 1, p.drafted, p.emitted) != (s.start, s.drafted, s.emitted)
        )
        last = None if len(predicted) == len(done.steps) - 1 else (predicted[-1], done.steps[-1])
        found = next(differ, last)
        if found is None:
            return None
        expected, step = found
        at, what = step.start + min(expected.emitted, step.emitted) - 1, "round"
        model = pair.drafts[policy.draft].model
    prefix = [*recorded.prompt_ids.tolist(), *texts[0][:at]]
    with torch.inference_mode():
        law = torch.log_softmax(model(torch.tensor([prefix])).logits[0, -1].double(), -1)
    best = law.topk(2).values
    return {"what": what, "position": at, "gap": float(best[0] - best[1])}

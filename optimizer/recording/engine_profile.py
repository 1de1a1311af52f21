"""Profiling an engine that serves many requests at once: a small set of requests, designed to tell
what its steps cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from spectune.engines.engine import Load, Prompt, Running, Wanted, numbered
from spectune.engines.start import start
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.on_engine import EngineRun, Turns, record_on
from spectune.optimizer.replay.served_costs import ServedCosts
from spectune.optimizer.replay.step_costs import step_seconds
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import EngineError, PairError
from spectune.traces.store import TraceStore

TOKENS: Final = 48
"""New tokens of each request."""
LEAST_REQUESTS: Final = 4
"""Fewest requests that a policy serves at one number of clients; else two for each client."""
LEAST_TURNS: Final = 3
"""Fewest turns of a policy at one number of clients."""


@dataclass(frozen=True)
class Design:
    """What is served: ``prompts`` to from 1 to ``clients`` at a time, under windows of 1 to
    ``most`` tokens, both doubled, each request for ``tokens``. ``threads``: of a CPU; None: the
    engine's own choice."""

    prompts: Sequence[Prompt]
    most: int = 8
    clients: int = 8
    tokens: int = TOKENS
    threads: int | None = None

    @property
    def context(self) -> float:
        """Tokens that a request's cache holds, in the mean."""
        return float(np.mean([len(prompt.ids) for prompt in self.prompts])) + self.tokens / 2

    def policies(self, draft: str) -> list[Policy]:
        """What is in force while they are served; of a draft also no tokens with it loaded."""
        if draft == "none":
            return [AUTOREGRESSIVE]
        windows: list[dict[str, Any]] = [
            {"kind": "fixed", "gamma": gamma} for gamma in doubled(self.most)
        ]
        if self.clients > 1:
            windows.append({"kind": "by_load", "gamma": {"1": min(2, self.most), "2": 0}})
        return [parse_policy({"draft": draft, "window": window}) for window in windows]


def doubled(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, and the most."""
    return tuple(sorted({*(1 << n for n in range(most.bit_length())), most}))


def profile_engine(
    store: TraceStore,
    spec: PairSpec,
    name: str,
    drafts: Sequence[str],
    design: Design,
    *,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = silent,
) -> tuple[list[str], dict[str, str]]:
    """Starts an engine without a draft and with each of the drafts, and serves the design into
    a recording of each, as of an engine's traffic, from which its costs are known. Returns the
    recordings, and why drafts were left out: those that the engine cannot load.

    Raises EngineError or PairError where it cannot serve the target, and EngineError where it fails
    while it serves.
    """
    recordings, left_out = list[str](), dict[str, str]()
    longest = max(len(prompt.ids) for prompt in design.prompts) + design.tokens
    for draft in ("none", *drafts):
        wanted = Wanted(draft, design.most, design.clients, longest, design.threads)
        try:
            running = start(name, spec, wanted)
        except (EngineError, PairError) as error:
            if draft == "none":
                raise
            left_out[draft] = str(error)
            say(f"left out: {draft} ({error})")
            continue
        with closing(running):
            recordings.append(serve_design(store, spec, running, draft, design, progress))
    return recordings, left_out


def serve_design(
    store: TraceStore,
    spec: PairSpec,
    running: Running,
    draft: str,
    design: Design,
    progress: Progress = silent,
) -> str:
    """Serves the design on an engine that has loaded ``draft`` into one recording, whose id this
    is: at each number of clients all policies, in turns, as the pace of a machine changes
    meanwhile: what differs between them is what is sought."""
    options, recording, served = DecodeOptions(max_new_tokens=design.tokens), "", 0
    policies = design.policies(draft)
    each = {clients: max(LEAST_REQUESTS, 2 * clients) for clients in doubled(design.clients)}
    total = len(policies) * sum(each.values())
    turns = Turns(running, policies) if len(policies) > 1 else None
    for clients, count in each.items():
        least = 0 if turns is None else turns.taken + LEAST_TURNS * len(policies)
        while True:
            served += count * len(policies)
            prompts = numbered(design.prompts, served)  # those not recorded yet are served
            run = EngineRun(prompts, turns or policies[0], Load(clients), options)
            info = record_on(store, spec, running, run, fresh=not recording, timed=True)
            recording = info.id
            progress(f"requests with draft {draft}", served, max(served, total))
            if turns is None or turns.taken >= least:
                break
    store.finish_recording(recording)
    return recording


def step_table(costs: ServedCosts, draft: str, design: Design) -> list[dict[str, Any]]:
    """A row for each number of requests that share a step: its milliseconds by draft tokens, as
    text, of those that were served with the draft ("": without one)."""
    least, most = costs.passes[draft]
    gammas = (0, *doubled(design.most)) if draft else (0,)
    rows = []
    for batch in doubled(design.clients):
        row: dict[str, Any] = {"batch": batch}
        context = batch * design.context
        for gamma in gammas:
            if least <= gamma <= most:
                of, rows_of = costs.of(draft, [gamma]), batch * (1 + gamma)
                row[str(gamma)] = 1000 * step_seconds(of, rows_of, 0, batch, context, gamma)
        rows.append(row)
    return rows

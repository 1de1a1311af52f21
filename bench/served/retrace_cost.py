"""What a forced retrace costs the traffic beside it, held against its stated share.

Clients send requests without a pause. In turns a recording of one text is retraced beside them with
:data:`SHARE`, and for as long a time nothing is. Of each turn the traffic's tokens/s are counted by
the rounds that ended in it, and the latency of requests that arrived and ended in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.harness import say
from bench.lab import stored
from bench.served.live import demo_prompts, ratio, serving, temporary_folder, windowed
from spectune.engines.engine import Answered, Load, Prompt, numbered
from spectune.engines.vllm.retrace import Retracer
from spectune.engines.vllm.running import RunningServer
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.on_engine import EngineRun, record_on
from spectune.runtime.policies.document import Policy
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording

SHARE, TOKENS, RETRACED, POLICY = 0.2, 48, 24, windowed(3)
"""``RETRACED``: tokens of a text that is retraced."""
CLIENTS, TURNS = (4, 8), 8
SETTLE_S = 1.0
"""Seconds between two turns, which count for neither."""
Turn = tuple[float, float]
"""When it began and ended, seconds since 1970."""


class Traffic:
    """Clients that send prompts again and again until it is left; ``answers``: what they got,
    times in seconds since 1970."""

    def __init__(self, beside: Beside, clients: int) -> None:
        self.answers: list[Answered] = []
        self._began, self._over = time.time(), threading.Event()
        served = beside.server.execute(
            numbered(beside.prompts, 20_000),
            beside.policy,
            Load(clients),
            sampling=Sampling(),
            max_new_tokens=TOKENS,
        )

        def take() -> None:
            with closing(served):
                for answer in served:
                    self.answers.append(answer)
                    if self._over.is_set():
                        return

        self._thread = threading.Thread(target=take)

    def __enter__(self) -> Traffic:
        self._began = time.time()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def figures(self, turn: Turn) -> tuple[float, float]:
        """Tokens/s and the 95th percentile of latencies, seconds, of a turn."""
        began, ended = (moment - self._began for moment in turn)
        steps = [step for answer in self.answers for step in answer.steps]
        tokens = sum(step.emitted for step in steps if began <= step.ended_s < ended)
        latencies = [
            answer.finished_s - answer.arrived_s
            for answer in self.answers
            if began <= answer.arrived_s and answer.finished_s < ended
        ]
        return tokens / (ended - began), float(np.quantile(latencies, 0.95))


def measure(quick: bool) -> dict[str, Any]:
    turns, prompts = 2 if quick else TURNS, demo_prompts(48, TOKENS)
    rows = []
    with temporary_folder() as folder, serving("--enable-prefix-caching") as server:
        beside = Beside(stored(folder / "x.db"), server, POLICY, prompts)
        texts = beside.full_length()[:turns]
        for clients in CLIENTS[:1] if quick else CLIENTS:
            rows.append(beside.traffic(texts, clients))
            say(rows[-1])
    costs = [(row, 1 - row["tokens_per_s"]["ratio"][0]) for row in rows]
    by_clients = ", ".join(
        f"{100 * cost:.1f}% of tokens/s by {row['clients']} clients (p95 of latency "
        f"{row['p95_latency']['ratio'][0]:.2f} times)"
        for row, cost in costs
    )
    return {
        "summary": f"a retrace whose share is {SHARE} costs the traffic beside it {by_clients}",
        "holds": all(1 - row["tokens_per_s"]["ratio"][1] <= SHARE for row in rows),
        "stated_share": SHARE,
        "rows": rows,
    }


@dataclass(frozen=True)
class Beside:
    """Retraces beside traffic: where texts are recorded, the server, what it drafts by, the prompts
    that clients send it, and the share of the time that a retrace may take."""

    store: TraceStore
    server: RunningServer
    policy: Policy
    prompts: Sequence[Prompt]
    share: float = SHARE

    def full_length(self) -> list[Prompt]:
        """The prompts whose texts do not end before their last token."""
        seats = Load(self.server.wanted.max_num_seqs)
        how: dict[str, Any] = {"sampling": Sampling(), "max_new_tokens": RETRACED}
        answers = self.server.execute(self.prompts, self.policy, seats, **how)
        lengths = {a.trajectory.request_id: len(a.trajectory.output_ids) for a in answers}
        return [prompt for prompt in self.prompts if lengths[prompt.id] == RETRACED]

    def traffic(self, texts: Sequence[Prompt], clients: int) -> dict[str, Any]:
        """So many clients' traffic beside retraces of new recordings of these texts, one a turn, as
        a part of traffic alone."""
        recordings = [self._recorded(text) for text in texts]
        with Traffic(self, clients) as traffic:
            return self._row(traffic, recordings) | {"clients": clients}

    def _recorded(self, prompt: Prompt) -> Recording:
        run = EngineRun([prompt], self.policy, Load(), DecodeOptions(max_new_tokens=RETRACED))
        info = record_on(self.store, self.server.spec, self.server, run, fresh=True)
        self.store.finish_recording(info.id)
        return info

    def _row(self, traffic: Traffic, texts: Sequence[Recording]) -> dict[str, Any]:
        with_it, alone, busy, positions = list[Turn](), list[Turn](), 0.0, 0
        time.sleep(2 * SETTLE_S)
        for text in texts:
            began = time.time()
            retraced = Retracer(self.store, text, self.server, share=self.share).run()
            with_it.append((began, ended := time.time()))
            busy, positions = busy + retraced.busy_s, positions + retraced.positions
            time.sleep(SETTLE_S)
            alone.append((now := time.time(), now + ended - began))
            time.sleep(ended - began + SETTLE_S)
        names = "tokens_per_s", "p95_latency"
        beside, without = (
            np.array([traffic.figures(t) for t in turns]) for turns in (with_it, alone)
        )
        figures = {
            name: {
                "ratio": ratio(beside[:, n].tolist(), without[:, n].tolist()),
                "alone": float(np.median(without[:, n])),
            }
            for n, name in enumerate(names)
        }
        seconds = sum(ended - began for began, ended in with_it)
        return {
            "turns": len(texts),
            "turn_s": seconds / len(texts),
            "positions_per_s": positions / seconds,
            "busy_share": busy / seconds,
            **figures,
        }

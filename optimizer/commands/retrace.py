"""`retrace`: what a running server's draft proposes at every position of recorded texts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from spectune.engines.vllm.retrace import Retracer
from spectune.engines.vllm.running import RunningServer
from spectune.optimizer.commands.common import Talk, open_store
from spectune.optimizer.commands.results import Result, Row, Table
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.trace import open_trace
from spectune.runtime.policies.document import FixedWindow, Policy
from spectune.settings import Retrace
from spectune.traces.store import TraceStore


def retrace(s: Retrace, talk: Talk) -> Result:
    with open_store(s) as store:
        info, server = store.get_recording(s.recording), RunningServer(s.url, Path(s.folder))
        retracer = Retracer(
            store,
            info,
            server,
            outstanding=s.outstanding,
            share=s.share,
            progress=talk.progress,
        )
        retraced = retracer.run()
        rows = _by_gamma(store, info.id, retraced.draft, retraced.gamma_max)
    share = retraced.busy_s / retraced.seconds if retraced.seconds else 0.0
    text = (
        f"recording {info.id}: {retraced.texts} texts, {retraced.positions} positions of "
        f"{retraced.draft} in {retraced.seconds:.0f} s; requests of ours were in the server for "
        f"{share:.0%} of that"
    )
    title = f"replayed, drafting so many tokens of {retraced.draft}"
    data = {"recording": info.id, **asdict(retraced), "share": share, "by_gamma": rows}
    return Result(text, data, rows, [Table(rows, title=title)])


def _by_gamma(store: TraceStore, recording: str, draft: str, gamma_max: int) -> list[Row]:
    """By number of draft tokens the tokens of a round, and the shares of rounds that accept their
    first token and of drafted tokens that are accepted."""
    policies = [
        Policy(draft=draft, window=FixedWindow(gamma=gamma)) for gamma in range(1, gamma_max + 1)
    ]
    trace, rows = open_trace(store, recording, policies).trace, list[Row]()
    for gamma, policy in enumerate(policies, start=1):
        replay = run_replay(trace, policy, per_round=True)
        rounds = [step for steps in replay.steps() for step in steps if step.drafted]
        accepted, drafted = (sum(getattr(r, n) for r in rounds) for n in ("accepted", "drafted"))
        rows.append({
            "gamma": gamma,
            "mean_accepted_length": replay.total.mean_accepted_length,
            "first_position": sum(r.accepted > 0 for r in rounds) / max(1, len(rounds)),
            "accepted_share": accepted / max(1, drafted),
        })  # fmt: skip
    return rows

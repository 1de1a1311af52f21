"""Rollouts in words."""

from __future__ import annotations

from typing import Any

from spectune.traces.tables import Rollout


def in_words(row: Rollout) -> str:
    """A rollout in a line."""
    against = f"version {row.incumbent}" if row.incumbent else "what servers draft by themselves"
    about = f"rollout {row.id} of {row.policy.label} against {against} in {row.deployment}"
    if row.verdict is not None:
        return f"{about}: {row.verdict}: {row.why}"
    waits = "it waits for a worker: `schedule run` and `control` conduct it"
    told = row.standing.get("told", waits)
    return f"{about}: {told}"


def progress_of(row: Rollout) -> dict[str, Any]:
    """What `status` and `policies show` tell of a rollout. JSON-ready."""
    return {**row.to_json(), "text": in_words(row)}

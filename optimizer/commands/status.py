"""`status`: what each deployment runs, since when and why, what it has shown since, and what is
due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from spectune.db.schedules import Schedule
from spectune.optimizer.commands.common import Talk, open_store
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.drift.alarm_words import told
from spectune.optimizer.followed_servers import Servers, answers_in_words, newest_answers
from spectune.optimizer.rollout.rollout_words import progress_of
from spectune.optimizer.schedule.store import list_schedules, tuned_deployment
from spectune.optimizer.tuning.tuned import proof_in_words, proof_of
from spectune.settings import StatusCommand
from spectune.traces.errors import ConfigError
from spectune.traces.store import TraceStore
from spectune.traces.store.query import TraceFilter, speed
from spectune.traces.tables import Publication

ALARMS = 5
"""Alarms of a publication that are told, the newest."""
COLUMNS = ("deployment", "pair", "device", "version", "label", "since", "gained", "served", "due")


def status(s: StatusCommand, talk: Talk) -> Result:
    with open_store(s) as store:
        every = deployments(store)
    rows = [row for row in every if s.deployment in (None, row["deployment"])]
    if every and not rows:
        there = ", ".join(sorted({row["deployment"] for row in every}))
        raise ConfigError(
            f"--deployment {s.deployment}: nothing is published, followed or scheduled there; it "
            f"is in: {there}"
        )
    lines = [f"{row['deployment']}: {row['reason']}" for row in rows if row["reason"]]
    of_rollouts = {r["id"]: r["text"] for row in rows for r in row["rollouts"]}
    lines += of_rollouts.values()
    lines += [alarm["text"] for row in rows for alarm in row["alarms"]]
    text = "\n".join(lines) if rows else "nothing is published, followed or scheduled yet"
    return Result(text, {"deployments": rows}, rows, [table_of(rows)] if rows else [])


def table_of(rows: Iterable[Mapping[str, Any]]) -> Table:
    """The deployments as they are shown."""
    return Table([{**row, **_in_words(row)} for row in rows], COLUMNS, "deployments")


def deployments(store: TraceStore, newest: timedelta | None = None) -> list[dict[str, Any]]:
    """A row for each deployment, pair and device: what is in force, and what its traffic has shown
    since, or of that the ``newest``; and for what waits for a first publication."""
    names = {pair.id: pair.name for pair in store.list_pairs()}
    schedules = list_schedules(store.database)
    servers = Servers.of(store)
    rows = [_in_force(store, p, names, servers, schedules, newest) for p in store.in_force()]
    rollouts = store.rollouts(is_open=True)
    for row in rows:
        row["alarms"] = [told(a) for a in store.alarms(version=row["version"], newest=ALARMS)]
    # Of a schedule or a follower that waits for a first publication.
    silent = {tuned_deployment(x) for x in schedules} | set(servers.deployments())
    rows += [
        _row(name, _due(schedules, name))
        for name in sorted(silent - {r["deployment"] for r in rows})
    ]
    for row in rows:
        row["rollouts"] = [progress_of(r) for r in rollouts if r.deployment == row["deployment"]]
    return rows


def _in_force(
    store: TraceStore,
    publication: Publication,
    names: Mapping[str, str],
    servers: Servers,
    schedules: Iterable[Schedule],
    newest: timedelta | None,
) -> dict[str, Any]:
    """A deployment's row: what is in force, and what its traffic has shown since."""
    p, at = publication, publication.created_at
    since = at if newest is None else max(at, store.clock() - newest)
    of = TraceFilter(pair=p.pair_id, policy=p.policy_id, since=since)
    served = next(iter(speed(store, of, by=("policy",))), None)
    figures = ("requests", "tokens_per_s", "tau", "acceptance", "mean_batch")
    proof = proof_of(p.evidence)
    answers = store.acknowledgements(p.version)
    return _row(p.deployment, _due(schedules, p.deployment)) | {
        "pair": names.get(p.pair_id, p.pair_id),
        "pair_id": p.pair_id,
        "device": p.device,
        "version": p.version,
        "policy": p.policy_id,
        "label": p.label,
        "since": at.isoformat(),
        "actor": p.actor,
        "reason": p.reason,
        "proof": proof and {key: proof[key] for key in ("ratio", "interval")},
        "served_since": served and {key: served[key] for key in figures},
        "servers": answers_in_words(answers, servers),
        "answers": dict(Counter(a.status for a in newest_answers(answers, servers))),
    }


def _row(deployment: str, due: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of which nothing but the name and the schedules is known."""
    nothing = ("pair", "pair_id", "device", "version", "policy", "label", "since", "actor")
    more: dict[str, Any] = {"reason": "", "servers": "", "answers": {}, "alarms": []}
    more |= {"proof": None, "served_since": None}
    return {"deployment": deployment, **dict.fromkeys(nothing), **more, "scheduled": due}


def _due(schedules: Iterable[Schedule], deployment: str) -> list[dict[str, Any]]:
    return [
        {
            "schedule": x.name,
            "next_at": x.next_at.isoformat(),
            "running": x.lease_owner,
            "last": x.last and x.last["outcome"],
        }
        for x in schedules
        if tuned_deployment(x) == deployment
    ]


def _in_words(row: Mapping[str, Any]) -> dict[str, str]:
    """The columns of the table that are no plain values."""
    proof, served = row["proof"], row["served_since"]
    gained = proof_in_words(proof) if proof else "not proved" if row["version"] else ""
    shown = "no request since" if row["version"] else "nothing is published"
    if served:
        tau = "" if served["tau"] is None else f", tau {served['tau']:.2f}"
        shown = f"{served['requests']} requests, {served['tokens_per_s'] or 0:.0f} tokens/s{tau}"
    due = [
        f"{one['schedule']} {one['next_at'][:16].replace('T', ' ')}"
        + (f", last {one['last']}" if one["last"] else "")
        for one in row["scheduled"]
    ]
    return {"gained": gained, "served": shown, "due": "; ".join(due)}

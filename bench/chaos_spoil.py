"""Rows that nobody should have written, put into the database behind the product's back."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from typing import Any

import numpy as np
from chaos_server import Server

from spectune.traces.schema import policy_id
from spectune.traces.store import TraceStore

FAR_S = 400 * 86_400
Q_LEARNING = {"kind": "q_learning", "gamma_max": 4}
DOCUMENTS: dict[str, str] = {
    "null": "null",
    "a number": "5",
    "a text": '"small"',
    "a list": "[1, 2]",
    "deeply nested": "[" * 2000 + "]" * 2000,
    "unknown keys": '{"draft": "near", "windw": {"kind": "fixed"}}',
    "unknown draft": '{"draft": "nobody", "window": {"kind": "fixed", "gamma": 3}}',
    "paths that are none": '{"draft": "near", "growth": {"kind": "static", "paths": 5}}',
    "a kind that is none": '{"draft": {"kind": []}}',
    "a number of 5000 digits": '{"draft": "near", "window": {"kind": "fixed", "gamma": ' + "9" * 5000 + "}}",
    "a tree of 10^9 ranks": "static_tree",
    "a tree without paths": "static_tree",
    "a tree that is a list": "static_tree",
    "a damaged tree": "static_tree",
    "a Q-table of NaN": "q_table",
    "a Q-table without values": "q_table",
}
"""Policy documents by name, as JSON; or the kind of a forged artifact that the policy names."""
LEASES = {"lease of years": 10.0 * FAR_S, "endless lease": float("inf")}
"""Jobs that nobody works on, by the seconds for which they are leased."""
SCHEDULES = ("unknown zone", "bad cron", "never fires", "end of time", "far ahead", *LEASES)
_FORGED: dict[str, Any] = {
    "a tree of 10^9 ranks": {"paths": [[1_000_000_000]]},
    "a tree without paths": {"nope": 1},
    "a tree that is a list": [1, 2],
    "a damaged tree": {"paths": [[0]], "damaged": True},
    "a Q-table of NaN": {"states": 5, "actions": 5},
    "a Q-table without values": {"states": 5},
}
_numbers = itertools.count(1)


def publish(server: Server, store: TraceStore, pair_id: str, name: str) -> int:
    """Puts a policy of :data:`DOCUMENTS` in force by SQL; its version."""
    document = DOCUMENTS[name]
    if document in ("static_tree", "q_table"):
        arrays = {"values": np.full((5, 5), np.nan)} if name == "a Q-table of NaN" else None
        artifact = store.put_artifact(document, _FORGED[name], arrays)
        if name == "a damaged tree":
            server.sql("UPDATE artifact SET data = %s WHERE id = %s", (b"\xde\xad\xbe\xef", artifact))
        block = {"growth": {"kind": document.removesuffix("_tree"), "artifact": artifact}}
        window = {"window": {**Q_LEARNING, "artifact": artifact}}
        document = json.dumps({"draft": "near", **(window if document == "q_table" else block)})
    server.sql(
        "INSERT INTO policy (id, label, document, created_at) VALUES (%s, %s, %s::json, now()) ON CONFLICT DO NOTHING",
        (policy := _id_of(document), name, document),
    )
    (row,) = server.sql(
        "INSERT INTO publication (pair_id, device, policy_id, evidence, actor, reason, created_at) "
        "VALUES (%s, 'cpu', %s, '{}'::json, 'garbage', %s, clock_timestamp()) RETURNING id",
        (pair_id, policy, name),
    )
    return int(row["id"])


def _id_of(document: str) -> str:
    """The id that a policy of this document has, so that it is refused for what it says; any where it is none."""
    try:
        return policy_id(json.loads(document))
    except (ValueError, RecursionError, AttributeError):
        return hashlib.sha256(document.encode()).hexdigest()[:12]


def schedule(server: Server, name: str, pair_id: str) -> None:
    """A row of ``schedule`` that is spoilt as :data:`SCHEDULES` names it, due at once unless it is far ahead."""
    now = int(time.time())
    values: dict[str, Any] = {
        "name": f"{name.replace(' ', '-')}-{next(_numbers)}", "cron": "0 3 * * *", "interval_s": None, "tz": "UTC", "anchor_at": now,
        "next_fire_at": now - 1, "misfire_grace_s": None, "coalesce": True, "max_instances": 1, "max_attempts": 1000, "budget_s": None,
        "enabled": True, "payload": json.dumps({"publishes": pair_id}), "created_at": float(now),
    }  # fmt: skip
    match name:
        case "unknown zone":
            values["tz"] = "Mars/Olympus"
        case "bad cron":
            values["cron"] = "not a cron"
        case "never fires":
            values["cron"] = "0 0 30 2 *"
        case "end of time":
            values["anchor_at"] = 253_402_300_799
        case "far ahead":
            values |= {"cron": None, "interval_s": 5, "next_fire_at": now + FAR_S}
        case _ if name in LEASES:
            values |= {"enabled": False}
    columns = ", ".join(values)
    marks = ", ".join("%s::json" if c == "payload" else "%s" for c in values)
    (row,) = server.sql(f"INSERT INTO schedule ({columns}) VALUES ({marks}) RETURNING id", tuple(values.values()))
    if name in LEASES:
        server.sql(
            "INSERT INTO schedule_job (schedule_id, fire_at, state, attempt, max_attempts, lease_owner, lease_until, idempotency_key, "
            "queued_at, started_at) VALUES (%s, %s, 'running', 1, 1000, 'nobody', %s, %s, %s, %s)",
            (row["id"], now, now + LEASES[name], f"{values['name']}#{row['id']}@{now}", float(now), float(now)),
        )


def unmended(server: Server) -> list[tuple[str, str]]:
    """Spoilt schedules that nobody put right: those that cannot fire are parked, one that stands far ahead fires again."""
    found = []
    fired = {row["name"] for row in server.sql("SELECT s.name FROM schedule s JOIN schedule_fire f ON f.schedule_id = s.id")}
    for row in server.sql("SELECT name, enabled FROM schedule ORDER BY id"):
        name = row["name"]
        if name.startswith(("unknown-zone", "bad-cron", "never-fires", "end-of-time")) and row["enabled"]:
            found.append(("schedule not parked", name))
        if name.startswith("far-ahead") and name not in fired:
            found.append(("schedule silent", name))
    return found

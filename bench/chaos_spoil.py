"""A PostgreSQL server that is stopped and frozen, and rows that nobody should write. Linux."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import databases
import numpy as np
import psycopg
from psycopg.rows import dict_row

from spectune.traces.store import TraceStore

FAR_S = 400 * 86_400
Q_LEARNING = {"kind": "q_learning", "gamma_max": 4}
DOCUMENTS = {
    **databases.NOT_POLICIES,
    "unknown keys": '{"draft": "near", "windw": {"kind": "fixed"}}',
    "unknown draft": '{"draft": "nobody", "window": {"kind": "fixed", "gamma": 3}}',
}
"""Policy documents by name, as JSON."""
FORGED: dict[str, tuple[str, Any]] = {
    "a tree of 10^9 ranks": ("static_tree", {"paths": [[1_000_000_000]]}),
    "a tree without paths": ("static_tree", {"nope": 1}),
    "a tree that is a list": ("static_tree", [1, 2]),
    "a damaged tree": ("static_tree", {"paths": [[0]], "damaged": True}),
    "a Q-table of NaN": ("q_table", {"states": 5, "actions": 5}),
    "a Q-table without values": ("q_table", {"states": 5}),
}
"""Artifacts, kind and document, that policies name."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "unknown-zone": {"tz": "Mars/Olympus"},
    "bad-cron": {"cron": "not a cron"},
    "never-fires": {"cron": "0 0 30 2 *"},
    "end-of-time": {"anchor_at": 253_402_300_799},
    "far-ahead": {"cron": None, "interval_s": 5, "next_fire_at": int(time.time()) + FAR_S},
    "lease-of-years": {"enabled": False},
    "endless-lease": {"enabled": False},
}
"""What is wrong in a row of ``schedule``."""
LEASES = {"lease-of-years": 10.0 * FAR_S, "endless-lease": float("inf")}
"""For so many seconds a job of that schedule is leased to nobody."""
_numbers = itertools.count(1)


class Server(databases.Server):
    """A server whose clock tells when each transaction was committed. RuntimeError, saying how to
    get one: there is no PostgreSQL."""

    def __init__(self) -> None:
        binaries = databases.server_binaries()
        if binaries is None:
            raise RuntimeError(databases.HOW)
        super().__init__(binaries, track_commit_timestamp="on")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While the block runs the server accepts connections and answers nothing."""
        first = int((self.data / "postmaster.pid").read_text().split()[0])
        os.kill(first, signal.SIGSTOP)
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        pids = [first, *map(int, children)]
        try:
            _signal(pids, signal.SIGSTOP)
            yield
        finally:
            _signal(pids[::-1], signal.SIGCONT)

    def sql(self, statement: str, values: Any = None) -> list[dict[str, Any]]:
        """Executes one statement behind the product's back; its rows, if it has any."""
        how: dict[str, Any] = {"row_factory": dict_row, "autocommit": True, "connect_timeout": 5}
        with psycopg.connect(self.url, **how) as connection:
            done = connection.execute(statement, values)
            return done.fetchall() if done.description else []


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it may have ended in between
            os.kill(pid, number)


def publish(server: Server, store: TraceStore, pair_id: str, name: str) -> int:
    """Puts a policy of :data:`DOCUMENTS` or :data:`FORGED` in force; its version."""
    document = DOCUMENTS.get(name) or _naming_forged(server, store, name)
    return databases.publish_text(store, pair_id, document, "garbage")


def _naming_forged(server: Server, store: TraceStore, name: str) -> str:
    kind, document = FORGED[name]
    arrays = {"values": np.full((5, 5), np.nan)} if name == "a Q-table of NaN" else None
    artifact = store.put_artifact(kind, document, arrays)
    if name == "a damaged tree":
        server.sql("UPDATE artifact SET data = %s WHERE id = %s", (b"\xde\xad\xbe\xef", artifact))
    named = {"window": {**Q_LEARNING, "artifact": artifact}}
    if kind == "static_tree":
        named = {"growth": {"kind": "static", "artifact": artifact}}
    return json.dumps({"draft": "near", **named})


def schedule(server: Server, name: str, pair_id: str) -> None:
    """A row of ``schedule`` that is spoilt as :data:`SCHEDULES` says."""
    now = int(time.time())
    values: dict[str, Any] = {
        "name": f"{name}-{next(_numbers)}", "cron": "0 3 * * *", "interval_s": None, "tz": "UTC",
        "anchor_at": now, "next_fire_at": now - 1, "misfire_grace_s": None, "coalesce": True,
        "max_instances": 1, "max_attempts": 1000, "budget_s": None, "enabled": True,
        "payload": json.dumps({"publishes": pair_id}), "created_at": float(now), **SCHEDULES[name],
    }  # fmt: skip
    schedule_id = _insert(server, "schedule", values)
    if name in LEASES:
        job = {
            "schedule_id": schedule_id, "fire_at": now, "state": "running", "attempt": 1,
            "max_attempts": 1000, "lease_owner": "nobody", "lease_until": now + LEASES[name],
            "idempotency_key": f"{values['name']}#{schedule_id}@{now}",
            "queued_at": float(now), "started_at": float(now),
        }  # fmt: skip
        _insert(server, "schedule_job", job)


def _insert(server: Server, table: str, values: dict[str, Any]) -> int:
    marks = ", ".join("%s::json" if c == "payload" else "%s" for c in values)
    statement = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks}) RETURNING id"
    return int(server.sql(statement, tuple(values.values()))[0]["id"])


def unmended(server: Server) -> list[tuple[str, str]]:
    """Spoilt schedules that cannot fire and are not parked, or can and are silent."""
    has_fired = "id IN (SELECT schedule_id FROM schedule_fire)"
    rows = server.sql(f"SELECT name, enabled, {has_fired} AS has_fired FROM schedule")
    never = ("unknown-zone", "bad-cron", "never-fires", "end-of-time")
    found = []
    for row in rows:
        if row["enabled"] and row["name"].startswith(never):
            found.append(("schedule not parked", row["name"]))
        if not row["has_fired"] and row["name"].startswith("far-ahead"):
            found.append(("schedule silent", row["name"]))
    return found

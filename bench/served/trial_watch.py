"""What is seen of trials on servers, and what a database has of what they did."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from agent_stub import read

from spectune.engines.vllm.folder import SENT
from spectune.traces.store import TraceStore
from spectune.traces.tables import Acknowledgement, Publication, Rollout, RolloutTurn, Trajectory

STEP_S = 3600
"""By how much clocks are stepped."""
Trial = tuple[str, int]
"""The boot of its server, and its version."""
KEYS: Mapping[str, tuple[Any, ...]] = {
    "publications": (Publication.version,),
    "acknowledgements": (Acknowledgement.id,),
    "rollouts": (Rollout.id,),
    "turns": (RolloutTurn.rollout_id, RolloutTurn.boot, RolloutTurn.since),
    "requests": (Trajectory.recording_id, Trajectory.request_id),
}


@dataclass
class Renewal:
    """A renewal of a trial: when it was first seen in ``policy.json``, and when the agent first
    said that it had read it, both by the clock of this process, which does not step."""

    trial: Trial
    number: int
    ttl_s: float
    written: float
    was_read: float = 0.0


class Watch:
    """Looks into folders all the time: at renewals, and at rounds files, each of which stays under
    a second name in ``kept`` whatever becomes of the folder."""

    def __init__(self, folders: Sequence[Path], kept: Path) -> None:
        self.renewals: list[Renewal] = []
        self._folders, self._kept, self._stop = folders, kept, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            for folder in self._folders:
                with suppress(OSError, ValueError):
                    self._look(folder)

    def _look(self, folder: Path) -> None:
        for path in folder.glob("rounds-*.jsonl"):
            if not (self._kept / path.name).exists():
                os.link(path, self._kept / path.name)
        told = json.loads((folder / "status.json").read_bytes())
        for renewal in self.renewals[-100:]:
            is_told = renewal.trial[0] == told["boot"] and renewal.number <= told["renewal"]
            if is_told and not renewal.was_read:
                renewal.was_read = time.time()
        trial = json.loads((folder / "policy.json").read_bytes()).get("trial")
        if trial and trial["boot"] == told["boot"]:
            key, number = (trial["boot"], trial["version"]), trial["renewal"]
            if not any((r.trial, r.number) == (key, number) for r in self.renewals[-100:]):
                self.renewals.append(Renewal(key, number, trial["ttl_s"], time.time()))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The requests that the agents noted, each with the boot that did; but those of whoever
        measures, which `follow` leaves out."""
        for path in self._kept.iterdir():
            whole = path.read_text().split("\n")[1:-1]  # the first says how the server serves
            for line in map(read, whole):
                if not line["id"].startswith(f"cmpl-{SENT}"):
                    yield path.name.split("-")[1], line

    def num_noted(self) -> int:
        return sum(1 for _ in self.lines())

    def candidate_rounds(self) -> dict[Trial, list[float]]:
        """When each round began that a candidate drafted, whichever hour it was there."""
        rounds: dict[Trial, list[float]] = defaultdict(list)
        for boot, line in self.lines():
            for start, _, _, _, version, seconds, _, ended in line["rounds"]:
                if version < 0 and start:
                    hours = round((ended - time.time()) / STEP_S)
                    rounds[boot, version].append(ended - hours * STEP_S - seconds)
        return rounds

    def of_trials(self, versions: Collection[int]) -> dict[str, Any]:
        """What came of the trials of some versions: how many there were, how many ``outlived``
        their end, as a round of the candidate began later than its ``ttl_s`` after the agent read
        the last renewal, or before any; and the most seconds from when one was written."""
        rounds = {trial: r for trial, r in self.candidate_rounds().items() if trial[1] in versions}
        renewals, longest_s, late = defaultdict[Trial, list[Renewal]](list), 0.0, set[Trial]()
        for renewal in self.renewals:
            if renewal.trial[1] in versions:
                renewals[renewal.trial].append(renewal)
        for trial, began in rounds.items():
            for at in began:
                # A renewal is seen a little later than it is written.
                last = next((r for r in reversed(renewals[trial]) if r.written - 1 <= at), None)
                if last is None or at > (last.was_read or last.written) + last.ttl_s:
                    late.add(trial)
                longest_s = max(longest_s, at - (last.written if last else at))
        counts = {"trials": len(renewals), "outlived": len(late)}
        return {
            **counts,
            "candidate_rounds": sum(map(len, rounds.values())),
            "longest_s": longest_s,
        }


class Kept:
    """What a database has acknowledged: keys by table."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._keys: dict[str, set[Any]] = {table: set() for table in KEYS}

    def stored(self) -> dict[str, list[Any]]:
        with self._store.database.read() as session:
            rows = {table: session.execute(sa.select(*keys)) for table, keys in KEYS.items()}
            return {table: [tuple(row) for row in found] for table, found in rows.items()}

    def note(self) -> None:
        for table, keys in self.stored().items():
            self._keys[table].update(keys)

    def num_requests(self) -> int:
        query = sa.select(sa.func.count()).select_from(Trajectory)
        with self._store.database.read() as session:
            return session.scalar(query) or 0

    def lost(self, watch: Watch) -> dict[str, Any]:
        """How much of what was acknowledged, or noted by agents, is not there now, and how many
        requests are there twice."""
        stored, servers = self.stored(), self._store.followed_servers()
        boots = {name: server.boot for server in servers for name in server.recordings.values()}
        requests = [(boots[recording], name) for recording, name in stored["requests"]]
        noted = {(boot, line["id"]) for boot, line in watch.lines()}
        return {
            "acknowledged": {table: len(keys) for table, keys in self._keys.items()},
            "acknowledged_lost": sum(len(k - set(stored[t])) for t, k in self._keys.items()),
            "noted": len(noted),
            "lost": len(noted - set(requests)),
            "doubled": len(requests) - len(set(requests)),
        }

"""The native decoder, where it serves, as a server that a rollout counts on: it stores that it is
there, and what is published takes turns with a rollout's candidate."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from spectune.db import DatabaseError
from spectune.engines.vllm.folder import is_candidates, seed_for
from spectune.engines.vllm.follow_policy import HEARD_S, TTL_S
from spectune.optimizer.in_force import node_name, ready_plan
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.runtime.policies.plan import Plan
from spectune.runtime.reload import WatchedSource, reason_of, short_turns
from spectune.traces.store import TraceStore
from spectune.traces.store.traffic import WriterStatus
from spectune.traces.tables import Rollout


class RecordedTraffic(Protocol):
    """What is served, as it is recorded: in which recordings, and what became of it. ``boot`` names
    the start of the server."""

    @property
    def boot(self) -> str: ...

    @property
    def recordings(self) -> Mapping[str, str]: ...

    @property
    def status(self) -> WriterStatus: ...


@dataclass(frozen=True)
class OwnTrial:
    """A rollout's candidate made ready. ``since``: when its first block began, and ``ends``: when
    it ends if the database says it no more, by the clock that stamps rounds."""

    rollout: int
    plan: Plan
    seed: int
    block_s: float
    since: float
    ends: float

    def is_turn(self, now: float) -> bool:
        """Whether the candidate drafts at a moment."""
        block = int((now - self.since) // self.block_s)
        return now < self.ends and is_candidates(self.seed, block)


class TakesTurns:
    """A policy source: of ``published``, and block by block of the candidate of a rollout that
    somebody conducts. Its looks are in the thread of ``published``, which makes policies ready, one
    at a time. ``now_s``: the clock that stamps rounds.

    A trial goes on for :data:`TTL_S` after the last look that found its rollout conducted: a
    database that is away, or a conductor that is dead, cannot prolong it."""

    def __init__(
        self,
        store: TraceStore,
        pair: LoadedPair,
        published: WatchedSource[Plan],
        recorded: RecordedTraffic,
        *,
        deployment: str,
        address: str,
    ) -> None:
        self.store, self.pair, self.published, self.recorded = store, pair, published, recorded
        self.deployment, self.node = deployment, node_name()
        self.place = f"{socket.gethostname()}:{address}"
        self.now_s: Callable[[], float] = time.time
        self._trial: OwnTrial | None = None
        self._told_s, self._is_known = -HEARD_S, False
        self._refused = set[int]()
        """Rollouts whose policy cannot run here."""

    def current(self) -> Plan:
        trial = self._trial
        if trial is not None and trial.is_turn(self.now_s()):
            return trial.plan
        return self.published.current()

    def begin(self, now_s: Callable[[], float]) -> None:
        """Takes part from now on."""
        self.now_s = now_s
        self.published.beside = self.look

    def look(self) -> None:
        """Stores now and then (amid a trial once a block) that the server is there, and finds out
        which rollout it takes turns in. Raises DatabaseError."""
        self._tell()
        conducted = self.store.conducted_rollouts(self.deployment)
        trials = map(self._trial_of, filter(self._is_here, conducted))
        self._trial = next((trial for trial in trials if trial is not None), None)

    def close(self) -> None:
        """Stores that the server has ended. Raises DatabaseError."""
        self.published.beside = None
        if self._is_known:
            self._hear(ended=True)

    def _tell(self) -> None:
        if not self._is_known:
            about = {
                "engine": "native",
                "model": self.pair.spec.target,
                "device_name": self.pair.device_name,
                "own_policy": AUTOREGRESSIVE.id,
            }
            how = {"deployment": self.deployment, "node": self.node, "place": self.place}
            models = self.pair.spec.models
            self.store.follow_server(self.recorded.boot, self.pair.id, about, models=models, **how)
            self._is_known = True
        trial, now = self._trial, time.monotonic()
        if now >= self._told_s + (HEARD_S if trial is None else min(HEARD_S, trial.block_s)):
            self._hear()
            self._told_s = now

    def _hear(self, *, ended: bool = False) -> None:
        status = self.recorded.status
        heard_at = None if ended else self.store.clock()
        self.store.hear(
            self.recorded.boot,
            self.deployment,
            heard_at,
            status.dropped,
            status.error or "",
            requests=status.written,
            recordings=self.recorded.recordings,
        )

    def _is_here(self, rollout: Rollout) -> bool:
        """Whether a rollout is for this server now."""
        in_force = self.published.current().version
        return (
            rollout.pair_id == self.pair.id
            and rollout.id not in self._refused
            and rollout.is_tried_by(self.recorded.boot, self.pair.device_name, in_force)
        )

    def _trial_of(self, rollout: Rollout) -> OwnTrial | None:
        last, now = self._trial, self.now_s()
        take_turns = partial(self.store.take_turns, rollout.id, self.recorded.boot)
        if last is None or last.rollout != rollout.id:
            try:
                plan = self._ready(rollout)
            except DatabaseError:  # it may be ready another time
                raise
            except Exception as error:  # whatever its policy makes it raise
                take_turns(now, reason_of(error))
                self._refused.add(rollout.id)
                return None
            now = self.now_s()
            seed = seed_for(rollout.seed, self.recorded.boot)
            last = OwnTrial(rollout.id, plan, seed, rollout.block_s, now, now)
            take_turns(now)
        return replace(last, ends=now + TTL_S)

    def _ready(self, rollout: Rollout) -> Plan:
        """The candidate, ready for several requests at once."""
        policy = parse_policy(rollout.policy.document, where=f"rollout {rollout.id}")
        profile = self.store.profile_of(self.pair.id, **self.pair.place)
        of, version = (self.store, self.pair, policy, profile), rollout.trial_version
        with short_turns():
            return ready_plan(*of, "coupled", None, version, together=True)

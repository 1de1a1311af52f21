"""A rollout as it is conducted, from anywhere that reaches the database: servers take turns while
its lease is held, what `follow` stores of them is read, and judged, until there is a verdict. No
request is sent, and no server is spoken to."""

from __future__ import annotations

import logging
import math
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

from spectune.db.database_errors import DatabaseError, StaleVersionError
from spectune.engines.vllm.folder import seed_for
from spectune.optimizer.followed_servers import Servers, why_not
from spectune.optimizer.rollout.decision import BlockPair, Look, judge
from spectune.optimizer.rollout.round_blocks import BlockTurns, Tally
from spectune.runtime.policies.document import parse_policy
from spectune.traces.store import TraceStore
from spectune.traces.store.rollouts import Conducting, RolloutError
from spectune.traces.tables import HARM, FollowedServer, Rollout

LEASE_S: Final = 30.0
LOOK_S: Final = 5.0
"""Seconds between two looks; where blocks are short, a third of one."""
FIRST_PAIRS: Final = 8
"""Pairs of one server, which may show harm, before the others take part."""
SILENT_S: Final = 90.0
"""Without a word of any server for so long, or for two blocks, it ends without a verdict."""
MOST_S: Final = 86_400.0
"""After so long it ends without a promotion: there is hardly any traffic."""
SHOWN_PAIRS: Final = 96
"""The newest pairs whose ratios are stored, for pages."""
VERDICTS: Final[Mapping[str, str]] = {"inconclusive": "inconclusive", "revert": HARM}

Tell = Callable[[str], None]
log = logging.getLogger("spectune.rollout")


@dataclass
class Conductor:
    """Looks at one rollout, which its ``lease`` is of, again and again."""

    store: TraceStore
    lease: Conducting
    tell: Tell
    lease_s: float = LEASE_S
    _tallies: dict[tuple[str, float], Tally] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)
    """By recording, the last request that was counted."""
    _looks: tuple[Look, ...] = ()

    @property
    def rollout(self) -> Rollout:
        return self.lease.rollout

    def look(self) -> bool:
        """Counts what was stored since, and does what follows from it. False where it has ended, or
        is another's by now. Raises DatabaseError."""
        rollout, store = self.rollout, self.store
        of = rollout.pair_id, rollout.device, rollout.deployment
        if (active := store.active_version(*of)) != (rollout.incumbent or 0):
            return self._end("overtaken", f"version {active} came into force meanwhile", {})
        able = self._able()
        taking, problem = self._turns(able)
        if problem:
            return self._end("refused", problem, {})
        now, age_s = store.clock().timestamp(), self._age_s()
        heard = [s.heard_at.timestamp() for s in able.values() if s.boot in taking and s.heard_at]
        patience_s = max(SILENT_S, 2 * rollout.block_s)
        if age_s > patience_s and now - max(heard, default=0.0) > patience_s:
            return self._end("silent", "no server that takes turns was heard", {})
        pairs = self._pairs(able, now)
        chosen = self._servers(able, pairs)
        servers = max(1, len({pair.server for pair in pairs}))
        found = judge(pairs, servers, rollout.first_token_limit_s, self._looks)
        standing = {
            "servers": chosen,
            "taking_turns": sorted(able[boot].node for boot in taking),
            "pairs": found.pairs,
            "looks": [look.to_json() for look in found.looks],
            "told": found.reason,
            "newest": [
                {"server": pair.server, "pair": pair.number, "ratio": math.exp(pair.log_ratio)}
                for pair in pairs[-SHOWN_PAIRS:]
            ],
        }
        if len(found.looks) > len(self._looks):
            self.tell(f"rollout {rollout.id}: {found.looks[-1].told()}")
        self._looks, rollout.standing = found.looks, standing
        if found.verdict == "promote":
            return self._promote(found.reason, standing)
        if found.verdict in VERDICTS:
            return self._end(VERDICTS[found.verdict], found.reason, standing)
        if age_s > MOST_S:
            return self._end("inconclusive", f"{found.reason} after a day", standing)
        return store.extend_rollout(self.lease, self.lease_s, standing)

    def _age_s(self) -> float:
        return (self.store.clock() - self.rollout.created_at).total_seconds()

    def _able(self) -> dict[str, FollowedServer]:
        """The servers of the deployment that can run the policy, by boot."""
        rollout = self.rollout
        pair = self.store.get_pair(rollout.pair_id)
        policy = parse_policy(rollout.policy.document, where=f"rollout {rollout.id}")
        of = policy, pair.name, pair.models, rollout.device
        there = Servers.of(self.store).of_deployment(rollout.deployment)
        return {server.boot: server for server in there if not why_not(server, *of)}

    def _turns(self, able: Mapping[str, FollowedServer]) -> tuple[set[str], str]:
        """The boots that take turns, whose tallies are begun; and why one of them does not."""
        rollout, taking = self.rollout, set[str]()
        published = rollout.incumbent and self.store.published_policy_id(rollout.incumbent)
        for turn in self.store.turns(rollout.id):
            if turn.problem:
                where = able[turn.boot].node if turn.boot in able else turn.boot
                return taking, f"{where}: {turn.problem}"
            if turn.boot not in able:
                continue
            taking.add(turn.boot)
            key = turn.boot, turn.since
            if key not in self._tallies:
                seed = seed_for(rollout.seed, turn.boot)
                incumbent = published or able[turn.boot].engine.get("own_policy", "")
                policies = incumbent, rollout.policy_id
                name = able[turn.boot].place
                turns = BlockTurns(name, turn.since, seed, *policies, block_s=rollout.block_s)
                self._tallies[key] = Tally(turns)
        return taking, ""

    def _pairs(self, able: Mapping[str, FollowedServer], now: float) -> list[BlockPair]:
        """All pairs that count, in the order that they ended."""
        since = self.rollout.created_at - timedelta(seconds=60)
        boots = {boot for boot, _ in self._tallies}
        for boot in boots:
            began = sorted(since for of, since in self._tallies if of == boot)
            for (name, ordinal), steps in self.store.served_by(boot, since, {**self._read}):
                self._read[name] = ordinal
                for begin, end in pairwise((*began, math.inf)):
                    self._tallies[boot, begin].add(steps, end)
        ended = []
        for (boot, _), tally in self._tallies.items():
            server = able.get(boot)
            looked = server.looked_at.timestamp() if server and server.looked_at else now
            # What is not brought in yet is not judged.
            ended += [(tally.ended_at(pair), pair) for pair in tally.pairs(min(now, looked))]
        return [pair for _, pair in sorted(ended, key=lambda one: one[0])]

    def _servers(
        self, able: Mapping[str, FollowedServer], pairs: list[BlockPair]
    ) -> list[str] | None:
        """The boots that are to take turns; None: all."""
        if len(pairs) >= FIRST_PAIRS or len(able) < 2:
            return None
        chosen = [boot for boot in self.rollout.standing.get("servers") or () if boot in able]
        newest = max(able.values(), key=lambda server: (server.heard_at, server.boot))
        return chosen or [newest.boot]

    def _end(self, verdict: str, why: str, standing: Mapping[str, Any]) -> bool:
        standing = standing or self.rollout.standing
        if self.store.end_rollout(self.lease, verdict, why, standing):
            self.tell(f"rollout {self.rollout.id} is {verdict}: {why}")
        return False

    def _promote(self, why: str, standing: Mapping[str, Any]) -> bool:
        try:
            published = self.store.promote_rollout(self.lease, why, standing)
        except StaleVersionError as error:
            return self._end("overtaken", str(error), standing)
        except RolloutError as error:
            self.tell(str(error))
            return False
        self.tell(f"rollout {self.rollout.id} is promoted as version {published.version}: {why}")
        return False


def conduct(
    store: TraceStore,
    stop: threading.Event,
    tell: Tell,
    *,
    number: int | None = None,
    look_s: float = LOOK_S,
    lease_s: float = LEASE_S,
) -> None:
    """Conducts what is open and nobody conducts until ``stop``; or one rollout until it has ended,
    whoever conducts it. A database that goes away is waited for: what it held is over then."""
    owner = f"{socket.gethostname()}:{secrets.token_hex(4)}"
    held: dict[int, Conductor] = {}
    is_away = False
    while not stop.is_set():
        wait_s = look_s
        try:
            while lease := store.conduct(owner, lease_s, number):
                held[lease.rollout.id] = Conductor(store, lease, tell, lease_s)
            for rollout_id, conductor in tuple(held.items()):
                wait_s = min(wait_s, conductor.rollout.block_s / 3)
                if not conductor.look():
                    del held[rollout_id]
            if number is not None and number not in held:
                found = store.rollout(number)
                if found is None or found.verdict is not None:
                    return
            if is_away:
                log.warning("rollouts are conducted again")
            is_away = False
        except DatabaseError as error:
            if not is_away:
                log.warning("%s; rollouts wait until it can be used", error)
            is_away = True
        except Exception:
            # A worker that ends here would leave every rollout without an end.
            log.exception("a rollout cannot be conducted")
            held.clear()
        stop.wait(wait_s)

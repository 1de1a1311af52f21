"""Rounds of served requests as pairs of blocks: what the incumbent and the candidate of a trial did
in turns on one server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from spectune.engines.vllm.folder import is_candidates
from spectune.optimizer.rollout.decision import BLOCK_S, DROPPED_S, BlockPair, MeasuredBlock
from spectune.traces.schema import Step

SETTLED_S = 60.0
"""Seconds after a pair of the usual blocks until it is judged: requests are stored as they end, and
of what ends later no round counts."""


@dataclass(frozen=True)
class BlockTurns:
    """How a trial takes turns on a ``server``: ``since`` when (seconds since 1970, by the clock
    that stamps its rounds), by which seed, in blocks of how many seconds; the policies' ids."""

    server: str
    since: float
    seed: int
    incumbent: str
    candidate: str
    block_s: float = BLOCK_S

    def block_at(self, moment: float) -> int | None:
        """The number of the block of a moment; None where it is before the trial, or in the part of
        a block that is dropped."""
        number, into = divmod(moment - self.since, self.block_s)
        is_dropped = into < self.block_s * DROPPED_S / BLOCK_S
        return None if number < 0 or is_dropped else int(number)

    def policy_of(self, number: int) -> str:
        return self.candidate if is_candidates(self.seed, number) else self.incumbent


@dataclass
class _Sums:
    seconds: float = 0.0
    tokens: int = 0
    arrivals: int = 0
    first_tokens_s: list[float] = field(default_factory=list)

    def block(self) -> MeasuredBlock:
        return MeasuredBlock(self.seconds, self.tokens, self.arrivals, tuple(self.first_tokens_s))


class Tally:
    """The blocks of a server's trial, from the rounds of its requests as they are stored."""

    def __init__(self, turns: BlockTurns) -> None:
        self.turns = turns
        self._blocks: dict[int, _Sums] = defaultdict(_Sums)

    def add(self, steps: Sequence[Step], until: float = inf) -> None:
        """Counts a request, its rounds ``until`` a moment: since then the server takes turns by
        another clock, after it had stopped. A round that the policy of its block did not draft is
        left out: it says which one did, and a clock that was stepped, or a trial that was over, so
        makes no wrong pair."""
        turns = self.turns
        if steps and steps[0].arrived_s < until:
            arrived = int((steps[0].arrived_s - turns.since) // turns.block_s)
            self._blocks[arrived].arrivals += 1
        for step in steps:
            number = turns.block_at(step.ended_s) if step.ended_s < until else None
            if number is None or step.policy != turns.policy_of(number):
                continue
            block = self._blocks[number]
            if step.reads_prompt:
                block.first_tokens_s.append(step.ended_s - step.arrived_s)
            else:
                block.seconds += step.round_s
                block.tokens += step.emitted

    def pairs(self, now: float) -> list[BlockPair]:
        """Those that are settled ``now`` and count, in order."""
        turns, pairs = self.turns, list[BlockPair]()
        waits_s = turns.block_s * SETTLED_S / BLOCK_S
        settled = (now - waits_s - turns.since) // (2 * turns.block_s)
        for number in sorted({block // 2 for block in self._blocks if block >= 0}):
            first, second = 2 * number, 2 * number + 1
            both = (second, first) if is_candidates(turns.seed, first) else (first, second)
            if number < settled and all(n in self._blocks for n in both):
                blocks = (self._blocks[n].block() for n in both)
                pairs.append(BlockPair(turns.server, number, *blocks))
        return [pair for pair in pairs if pair.counts]

    def ended_at(self, pair: BlockPair) -> float:
        return self.turns.since + 2 * (pair.number + 1) * self.turns.block_s

"""Rounds of served requests as pairs of blocks: what the incumbent and the candidate of a trial did
in turns on one server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spectune.engines.vllm.folder import is_candidates
from spectune.optimizer.rollout.decision import BLOCK_S, DROPPED_S, Block, BlockPair
from spectune.traces.schema import Step

SETTLED_S = 60.0
"""Seconds after a block until it is judged: requests are stored as they end. Longer ones count with
the blocks that are judged later."""


@dataclass(frozen=True)
class Turns:
    """How a trial takes turns on a ``server``: ``since`` when (seconds since 1970, by the clock that
    stamps its rounds), by which seed, in blocks of how many seconds; and the policies' ids."""

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

    def block(self) -> Block:
        return Block(self.seconds, self.tokens, self.arrivals, tuple(self.first_tokens_s))


def pairs_of(requests: Iterable[Sequence[Step]], turns: Turns, now: float) -> list[BlockPair]:
    """The pairs of blocks that are settled ``now``, from the rounds of a server's requests, in
    order. A round that the policy of its block did not draft is left out: it says which one did,
    and a clock that was stepped, or a trial that was over, so makes no wrong pair."""
    sums: dict[int, _Sums] = defaultdict(_Sums)
    for steps in requests:
        if not steps:
            continue
        arrived = int((steps[0].arrived_s - turns.since) // turns.block_s)
        sums[arrived].arrivals += 1
        for step in steps:
            number = turns.block_at(step.ended_s)
            if number is None or step.policy != turns.policy_of(number):
                continue
            if step.reads_prompt:
                sums[number].first_tokens_s.append(step.ended_s - step.arrived_s)
            else:
                sums[number].seconds += step.round_s
                sums[number].tokens += step.emitted
    settled = int((now - SETTLED_S * turns.block_s / BLOCK_S - turns.since) // turns.block_s) // 2
    pairs = []
    for number in range(settled):
        blocks = [sums[n].block() if n in sums else Block(0.0, 0, 0) for n in _both(turns, number)]
        pairs.append(BlockPair(turns.server, number, *blocks))
    return pairs


def _both(turns: Turns, pair: int) -> tuple[int, int]:
    """The numbers of the incumbent's and of the candidate's block of a pair."""
    first, second = 2 * pair, 2 * pair + 1
    return (second, first) if is_candidates(turns.seed, first) else (first, second)

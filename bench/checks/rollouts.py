"""How often a rollout promotes a policy that is as fast as the incumbent or reverts it, what it
finds of a faster one and how long that takes, and whether it ends a slow one, with the code that
ships.

    python bench/run.py rollouts [--only null power harm] [--quick]

Simulated: blocks of 45 s in pairs, their first 5 s dropped, until a verdict. Requests differ in
size and arrive at a rate that wanders; the pace has the heavy-tailed noise and stalls of ``nulls``
by request and its drift of 20%, which wanders over minutes, and is slower where more arrive.
Figures are added to ``bench/results/rollouts.json``
(``--quick``: a tiny size, printed alone).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.checks.nulls import DRIFT, NOISE, SIZES
from bench.harness import Part, say
from spectune.optimizer.rollout.decision import (
    BLOCK_S,
    DROPPED_S,
    FEW_SERVERS,
    BlockPair,
    Look,
    MeasuredBlock,
    judge,
    looks_of,
)

MINUTES = (60.0, 300.0)
"""Seconds over which the pace is correlated (its time constant), in one rollout this, in another
that."""
BURSTS = 0.3
"""The standard deviation of the logarithm of the rate of arrivals, which wanders likewise."""
CROWDED = 0.3
"""Seconds per token grow by this power of the arrivals of a block."""
OWN = 0.01
"""The standard deviation of a policy's effect from server to server."""
TOKENS = 200
PROMISED = 0.01
STEP_S = 5.0


class Server:
    """A server under a load: what its requests spend by blocks."""

    def __init__(self, rng: np.random.Generator, rate: float, gain: float, blocks: int) -> None:
        self._rng, self.gain = rng, gain * float(np.exp(OWN * rng.standard_normal()))
        steps = round(blocks * BLOCK_S / STEP_S)
        scale = rng.uniform(*MINUTES)
        pace = DRIFT * wandering(rng, steps, scale)
        each, dropped = int(BLOCK_S / STEP_S), int(DROPPED_S / STEP_S)
        self.pace = np.exp(pace).reshape(blocks, each)[:, dropped:].mean(1)
        rates = np.exp(BURSTS * wandering(rng, steps, scale)).reshape(blocks, each).mean(1)
        self.usual = rate * BLOCK_S
        self.arrivals = rng.poisson(rates * self.usual)
        self.spread = rng.uniform(*SIZES)

    def block(self, number: int, *, is_candidates: bool) -> MeasuredBlock:
        rng, count = self._rng, int(self.arrivals[number])
        tokens = np.ceil(TOKENS * np.exp(self.spread * rng.standard_normal(count))).astype(int)
        noise = NOISE / np.sqrt(3) * rng.standard_t(3, count)
        stalls = rng.random(count) < 0.02
        noise[stalls] += rng.exponential(0.5, int(stalls.sum()))
        crowded = ((1 + count) / (1 + self.usual)) ** CROWDED
        pace = 0.02 * self.pace[number] * crowded / (self.gain if is_candidates else 1.0)
        return MeasuredBlock(float(pace * (tokens * np.exp(noise)).sum()), int(tokens.sum()), count)

    def pairs(self, name: str) -> Iterator[BlockPair]:
        for number in range(len(self.pace) // 2):
            first = bool(self._rng.random() < 0.5)
            blocks = [self.block(2 * number + n, is_candidates=(n == 0) == first) for n in (0, 1)]
            yield BlockPair(name, number, blocks[first], blocks[not first])


def wandering(rng: np.random.Generator, count: int, scale_s: float) -> Any:
    """An Ornstein-Uhlenbeck process of standard deviation 1, every :data:`STEP_S`."""
    kept = np.exp(-STEP_S / scale_s)
    steps = np.sqrt(1 - kept**2) * rng.standard_normal(count)
    values, value = np.empty(count), rng.standard_normal()
    for n, step in enumerate(steps):
        values[n] = value = kept * value + step
    return values


def rollout(rng: np.random.Generator, servers: int, rate: float, gain: float) -> tuple[str, int]:
    """A rollout's verdict, and the pairs of each server that it took."""
    rounds = -(-looks_of(servers)[-1] // servers)
    fleet = [Server(rng, rate, gain, 2 * rounds) for _ in range(servers)]
    series = zip(*(server.pairs(f"s{n}") for n, server in enumerate(fleet)), strict=True)
    seen, looks = list[BlockPair](), tuple[Look, ...]()
    for number, pairs in enumerate(series, 1):
        seen += pairs
        found = judge(seen, servers, taken=looks)
        looks = found.looks
        if found.verdict != "go on":
            return found.verdict, number
    return "inconclusive", rounds  # some blocks had no requests


def series(count: int, servers: int, rate: float, gain: float) -> dict[str, Any]:
    """How so many rollouts ended, and how many minutes those took that were promoted or
    reverted."""
    verdicts, minutes, pairs = Counter[str](), dict[str, list[float]](), Counter[str]()
    for n in range(count):
        rng = np.random.default_rng([n, servers, int(100 * rate), round(1000 * gain)])
        verdict, taken = rollout(rng, servers, rate, gain)
        verdicts[verdict] += 1
        minutes.setdefault(verdict, []).append(taken * 2 * BLOCK_S / 60)
        pairs["within four"] += verdict == "revert" and taken <= 4
    row = {
        "servers": servers,
        "requests_per_s": rate,
        "gain": round(gain - 1.0, 3),
        "rollouts": count,
        **{verdict: verdicts[verdict] for verdict in ("promote", "revert", "inconclusive")},
        "reverted_within_four_pairs": pairs["within four"],
        "minutes_to": {
            verdict: float(np.median(minutes[verdict]))
            for verdict in ("promote", "revert")
            if verdict in minutes
        },
    }
    say(row)
    return row


def null(quick: bool) -> dict[str, Any]:
    kinds = ((1, 0.2, 2000), (1, 1.0, 2000), (FEW_SERVERS, 0.2, 1000), (8, 0.2, 500))
    rows = [series(20 if quick else n, servers, rate, 1.0) for servers, rate, n in kinds]
    of = {v: max(row[v] / row["rollouts"] for row in rows) for v in ("promote", "revert")}
    return {"holds": max(of.values()) <= PROMISED, "largest_share": of, "rows": rows}


def power(quick: bool) -> dict[str, Any]:
    rows = [
        series(10 if quick else count, servers, 1.0, gain)
        for servers, count in ((1, 500), (FEW_SERVERS, 200), (8, 100))
        for gain in (1.03, 1.05, 1.10)
    ]
    return {"rows": rows}


def harm(quick: bool) -> dict[str, Any]:
    rows = [
        series(20 if quick else 1000, 1, rate, gain) for rate in (0.2, 1.0) for gain in (0.5, 0.9)
    ]
    half = [r["reverted_within_four_pairs"] / r["rollouts"] for r in rows if r["gain"] == -0.5]
    return {"holds": min(half) >= 0.99, "half_within_four_pairs": min(half), "rows": rows}


RESULT = "rollouts"
PARTS: dict[str, Part] = {"null": null, "power": power, "harm": harm}

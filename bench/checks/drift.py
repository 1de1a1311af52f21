"""How often drift is alarmed about in stationary traffic, and how many requests it takes until a
change is seen, with the code that ships.

    python bench/run.py drift [--only stationary change] [--quick]

Simulated: requests of heavy-tailed lengths in sessions, which are of one category and one
difficulty, with and without labels; 1, 3 or 5 drafted tokens by a load that wanders over minutes,
as does the machine's pace (by 20%); rounds accept tokens by chance. ``stationary`` counts series
of 3,000 requests with an alarm; in ``change`` one category turns into another after 1,000, or
rounds become slower. Intervals are of 95% (Wilson's, and of order statistics for medians). Figures
are added to ``bench/results/drift.json`` (``--quick``: a tiny size, printed alone).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binom, binomtest

from bench.checks.nulls import DRIFT, NOISE
from bench.checks.rollouts import STEP_S, wandering
from bench.harness import Part, say
from spectune.optimizer.drift.detect import Change, Detector, Watched

STATIONARY = 3000
BEFORE = 1000
LOOK = 100
"""Requests that are stored between two looks."""
MINUTES = (60.0, 300.0)
"""Seconds over which load and pace are correlated (the time constant)."""
DIFFICULTY = 0.4
"""Standard deviation of a session's difficulty, in logits of a token's acceptance."""
SESSION = 3.0
"""Requests of a session, in the mean."""
SIZES = 1.0
"""Of the logarithm of the tokens of a request."""
TOKENS = 120
FIVE = {"code": 2.4, "math": 1.8, "chat": 1.5, "prose": 1.3}
"""Tokens that a round of 5 accepts in the mean."""
MIX = {"code": 0.5, "math": 0.3, "chat": 0.2}


@dataclass(frozen=True)
class Traffic:
    """``rate`` requests a second; ``mix`` of categories, by what rounds of 5 accept; ``slower``
    than predicted; with ``labels`` or without. ``drafted`` tokens in each round, None: by the
    load."""

    rate: float
    mix: Mapping[str, float]
    accepted: Mapping[str, float]
    slower: float = 1.0
    labels: bool = True
    drafted: int | None = None


class Served(NamedTuple):
    at: float
    watched: Watched
    ratio: float


def chance_of(accepted: float) -> float:
    """The chance of a token's acceptance with which a round of 5 accepts so many."""
    chances = np.linspace(0, 1, 2001)
    return float(np.interp(accepted, sum(chances**n for n in range(1, 6)), chances))


def served(rng: np.random.Generator, parts: Sequence[tuple[Traffic, int]]) -> Iterator[Served]:
    """Requests of one traffic after another, so many of each."""
    scale, at = rng.uniform(*MINUTES), 0.0
    span = int(1.5 * sum(n / traffic.rate for traffic, n in parts) / STEP_S) + 2
    load, pace = wandering(rng, span, scale), DRIFT * wandering(rng, span, scale)
    for traffic, count in parts:
        names, shares = [*traffic.mix], [*traffic.mix.values()]
        logits = {
            name: np.log((p := chance_of(a)) / (1 - p)) for name, a in traffic.accepted.items()
        }
        left, name, chance = 0, "", 0.0
        for _ in range(count):
            if not left:
                left = int(rng.geometric(1 / SESSION))
                name = str(rng.choice(names, p=shares))
                chance = 1 / (1 + np.exp(-logits[name] - DIFFICULTY * rng.standard_normal()))
            left -= 1
            at += rng.exponential(1 / traffic.rate)
            now = min(int(at / STEP_S), span - 1)
            tokens = 1 + int(TOKENS * np.exp(SIZES * rng.standard_normal()))
            drafted = traffic.drafted or (5 if load[now] < 0 else 3 if load[now] < 1 else 1)
            rounds = max(1, int(tokens / (1 + drafted * chance)))
            runs = np.minimum(rng.geometric(1 - chance, min(rounds, 400)) - 1, drafted)
            noise = NOISE / np.sqrt(3) * rng.standard_t(3) / np.sqrt(min(rounds, 8))
            ratio = float(traffic.slower * np.exp(pace[now] + noise))
            watched = Watched(name if traffic.labels else "serve", {drafted: runs.mean() / drafted})
            yield Served(at, watched, ratio)


def changes(requests: Sequence[Served]) -> Iterator[tuple[int, Change]]:
    """What the detector sees, and after how many requests, which it gets in looks."""
    detector = Detector()
    for first in range(0, len(requests), LOOK):
        part = requests[first : first + LOOK]
        found = detector.add([r.watched for r in part], [(r.at, r.ratio) for r in part])
        yield from ((first + len(part), change) for change in found)


def stationary(quick: bool) -> dict[str, Any]:
    rows = []
    for rate in (5.0, 0.5, 0.02):
        for labels in (True, False):
            count, told = 4 if quick else 200, Counter[str]()
            traffic = Traffic(rate, MIX, FIVE, labels=labels)
            for n in range(count):
                rng = np.random.default_rng([n, round(100 * rate), labels])
                seen = [*changes([*served(rng, [(traffic, STATIONARY)])])]
                told.update({change.what for _, change in seen} | ({"any"} if seen else set()))
            ends = binomtest(told["any"], count).proportion_ci(method="wilson")
            row = {"requests_per_s": rate, "labels": labels, "series": count, **told}
            rows.append({**row, "any": told["any"], "interval": [ends.low, ends.high]})
            say(rows[-1])
    alarmed, series = sum(row["any"] for row in rows), sum(row["series"] for row in rows)
    ends = binomtest(alarmed, series).proportion_ci(method="wilson")
    whole = {"series": series, "alarmed": alarmed, "interval": [ends.low, ends.high]}
    return {"holds": alarmed <= 0.01 * series, **whole, "rows": rows}


def change(quick: bool) -> dict[str, Any]:
    rows = []
    for drafted, sizes in ((5, (2.0, 1.8, 1.5, 1.3)), (None, (1.3,))):
        usual = Traffic(0.5, {"code": 1.0}, FIVE, drafted=drafted)
        for accepted in sizes:
            after = replace(usual, accepted={**FIVE, "code": accepted})
            load = "" if drafted else ", 1, 3 or 5 drafted"
            name = f"accepted 2.4 to {accepted:g}{load}"
            rows.append(delays(quick, name, usual, after, 1500))
    labelled, mixed = replace(usual, mix=MIX), {"code": 0.2, "math": 0.3, "chat": 0.5}
    rows.append(delays(quick, "half of it prose", labelled, replace(labelled, mix=mixed), 1500))
    for factor in (1.25, 1.5, 2.0):
        slow = replace(usual, rate=0.05), replace(usual, rate=0.05, slower=factor)
        rows.append(delays(quick, f"{factor:g} times as slow", *slow, 3000))
    prose = [row for row in rows if "1.3" in row["change"]]
    return {"holds": all(row["seen"] == row["series"] for row in prose), "rows": rows}


def delays(quick: bool, name: str, usual: Traffic, after: Traffic, most: int) -> dict[str, Any]:
    """Requests, and minutes, from a change until it is seen, of those that see it."""
    taken, early = list[int](), 0
    count = 3 if quick else 100
    for n in range(count):
        rng = np.random.default_rng([n, len(name), most])
        seen = [*changes([*served(rng, [(usual, BEFORE), (after, most)])])]
        late = [number - BEFORE for number, _ in seen if number > BEFORE]
        taken += late[:1]
        early += any(number <= BEFORE for number, _ in seen)
    ranked = sorted(taken)
    low, high = binom.ppf([0.025, 0.975], len(ranked), 0.5).astype(int) if ranked else (0, 0)
    requests = ranked and {
        "median": float(np.median(ranked)),
        "interval": [ranked[max(0, low - 1)], ranked[min(high, len(ranked) - 1)]],
        "p95": float(np.quantile(ranked, 0.95)),
    }
    row = {"change": name, "requests_per_s": usual.rate, "series": count, "seen": len(taken)}
    row |= {"requests": requests, "before_the_change": early}
    say(row)
    return row


RESULT = "drift"
PARTS: dict[str, Part] = {"stationary": stationary, "change": change}

"""False publications and power of a tuning's evidence, with the code that ships: a race chooses, a
confirmation proves.

    python bench/run.py nulls [--only nulls tails power real] [--quick]

All but ``real`` are simulated: requests differ in size, policies in what suits which of them,
executions by heavy-tailed noise of 12% and a machine whose pace drifts; prediction knows requests
but errs by 3% a policy. A null is a tuning whose candidates are all as fast as the incumbent. In
``tails`` some requests cost candidates 1.5 to 3 times what is predicted, and a publication is false
where the policy is slower in sum on the requests held out; that these held no such request, and the
policy is slower on all, is counted apart. ``real`` executes nulls, on the demo pair. Figures are
added to ``bench/results/nulls.json`` (``--quick``: a tiny size, printed alone).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from bench.harness import Part, say
from bench.lab import chain, demo, requests
from spectune.optimizer.execute import DecodeOptions, Executor, encode
from spectune.optimizer.tuning.confirm import (
    RACE_SHARE,
    Spread,
    confirm,
    left_s,
    planned,
    spread_of,
)
from spectune.optimizer.tuning.confirmation import Confirmation
from spectune.optimizer.tuning.native import TuneOptions
from spectune.optimizer.tuning.parts import mixed, split
from spectune.optimizer.tuning.race import PASSES, eliminate, fastest_of
from spectune.optimizer.tuning.timings import Expected, Timings
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.traces.schema import Sampling

NOISE, EFFECT, ERROR, DRIFT = 0.12, 0.06, 0.03, 0.2
"""Standard deviations, of logarithms: of an execution, of a policy's effect on a request, of its
prediction; and of the pace."""
SIZES = (0.3, 1.0)
"""Of the logarithm of requests' sizes, in one tuning this, in another that."""
BUDGET_S = TuneOptions.budget_s


class Machine:
    """Executes policies (0 is the incumbent, the others are ``gain`` times as fast) on requests of
    about 0.35 s, a share ``tail`` of which cost the others 1.5 to 3 times what is predicted."""

    def __init__(
        self,
        rng: np.random.Generator,
        policies: int,
        requests: int,
        gain: float = 1.0,
        tail: float = 0.0,
    ) -> None:
        size = 0.35 * np.exp(rng.uniform(*SIZES) * rng.standard_normal(requests))
        effect = np.exp(EFFECT * rng.standard_normal((policies, requests)))
        self.cost = size * effect / np.where(np.arange(policies) == 0, 1.0, gain)[:, None]
        self.predicted = self.cost * np.exp(ERROR * rng.standard_normal((policies, 1)))
        self.now, self._rng = 0.0, rng
        self._phase, self._period = rng.uniform(0, 2 * np.pi), rng.uniform(20, 200)
        self.slowed = rng.random(requests) < tail
        slow = np.where(self.slowed, rng.uniform(1.5, 3.0, requests), 1.0)
        self.cost[1:] = self.cost[1:] * slow

    def execute(self, policy: int, request: int) -> float:
        """Seconds: noise has Student's t with 3 degrees of freedom, and one execution in 50
        stalls."""
        noise = NOISE / np.sqrt(3) * self._rng.standard_t(3)
        if self._rng.random() < 0.02:
            noise += self._rng.exponential(0.5)
        pace = DRIFT * np.sin(self._phase + 2 * np.pi * self.now / self._period)
        seconds = float(self.cost[policy, request] * np.exp(noise + pace))
        self.now += seconds
        return seconds


def windows(count: int) -> list[Policy]:
    """So many policies, the most elaborate first: a tie then goes against the incumbent."""
    return [chain("ngram", gamma) for gamma in range(count, 0, -1)]


def decided(
    names: Sequence[str],
    categories: Sequence[str],
    execute: Callable[[str, int], float],
    choose: Callable[[Timings, Sequence[str], Expected], str],
    clock: Callable[[], float],
    budget_s: float,
    predicted: Expected | None = None,
    **race: Any,
) -> tuple[Confirmation | None, Timings]:
    """Race and confirmation of policies, the first of them the incumbent, as a tuning on requests
    of these categories does them; no confirmation where the incumbent is chosen. ``execute``:
    seconds of a policy on a request; ``choose`` the winner by timings, who is left, and what was
    ``predicted`` of the race's requests."""
    parts, began = split(categories), clock()
    part, held = mixed(parts.race, categories), mixed(parts.confirm, categories)
    expected = {name: np.asarray(of)[part] for name, of in (predicted or {}).items()}
    race |= {"expected": expected} if expected else {}
    race |= {"passes": PASSES, "budget_s": budget_s * RACE_SHARE, "clock": clock}
    timings, left = eliminate(names, len(part), lambda name, n: execute(name, part[n]), **race)
    winner = choose(timings, left, expected)
    if winner == names[0]:
        return None, timings
    both_s = sum(float(np.nanmean(timings.seconds[name])) for name in (winner, names[0]))
    remaining_s = left_s(budget_s, clock() - began)
    spread = spread_of(timings, winner, names[0]) or Spread()
    most = planned(len(held), both_s, remaining_s, PASSES)
    confirmed = confirm(
        winner,
        names[0],
        lambda name, n: execute(name, held[n]),
        units=len(held),
        executions=spread.enough(len(held), most),
        expected={name: np.asarray(of)[held] for name, of in (predicted or {}).items()},
    )
    return confirmed, timings


def tuned(
    machine: Machine, policies: Sequence[Policy], categories: Sequence[str]
) -> Confirmation | None:
    """A simulated tuning."""
    number = {p.id: n for n, p in enumerate(policies)}

    def fastest(timings: Timings, left: Sequence[str], expected: Expected) -> str:
        speeds = {name: 1.0 / float(np.sum(seconds)) for name, seconds in expected.items()}
        return fastest_of([p for p in policies if p.id in left], timings, speeds, ERROR).id

    return decided(
        list(number),
        categories,
        lambda name, request: machine.execute(number[name], request),
        fastest,
        lambda: machine.now,
        BUDGET_S,
        {name: machine.predicted[n] for name, n in number.items()},
        baselines=[policies[0].id],
    )[0]


def series(
    count: int, candidates: int, requests: int, gain: float, seed: int, tail: float = 0.0
) -> dict[str, Any]:
    """How many of ``count`` tunings published; and how many a policy slower than the incumbent in
    sum on the requests held out, or, where none of these was slowed, on all requests."""
    policies, categories = windows(candidates), ["abc"[i % 3] for i in range(requests)]
    held = split(categories).confirm
    confirmed = published = slower = unseen = 0
    for n in range(count):
        rng = np.random.default_rng([seed, candidates, requests, n])
        machine = Machine(rng, candidates, requests, gain, tail)
        found = tuned(machine, policies, categories)
        confirmed += found is not None
        if found is None or found.against:
            continue
        published += 1
        of = machine.cost[[0, [p.id for p in policies].index(found.id)]]
        slower += bool(of[1, held].sum() > of[0, held].sum())
        hidden = tail and not machine.slowed[held].any()
        unseen += bool(hidden and of[1].sum() > of[0].sum())
    of_tails = {"tail": tail, "slower_held_out": slower, "slower_unseen": unseen} if tail else {}
    return {
        "candidates": candidates,
        "requests": requests,
        "gain": gain - 1.0,
        **of_tails,
        "tunings": count,
        "confirmed": confirmed,
        "published": published,
        "rate": published / count,
    }


def of_sizes(count: int, gain: float, quick: bool) -> list[dict[str, Any]]:
    """A row of each number of candidates and of requests."""
    rows = []
    for size in product((2, 6, 12), (20, 48, 80)):
        rows.append(series(10 if quick else count, *size, gain, 0))
        say(rows[-1])
    return rows


def of_tails(count: int, quick: bool) -> list[dict[str, Any]]:
    """A row of each share of slowed requests and of each number of requests. The gain on the others
    makes a policy about as fast as the incumbent in sum."""
    rows = []
    for tail, size in product((0.02, 0.08, 0.15), (20, 80)):
        rows.append(series(10 if quick else count, 6, size, 1.0 + 1.25 * tail, 0, tail))
        say(rows[-1])
    return rows


def real(quick: bool) -> dict[str, Any]:
    """A/A tunings on the demo pair: six names of one behaviour, raced and confirmed for real."""
    count, budget_s = (1, 4.0) if quick else (20, 40.0)
    pair, workload = demo(), requests(40)
    window = {"kind": "fsm", "gamma_max": 5, "gamma_min": 5}
    # No threshold is ever reached; reading one takes time.
    stops = [{"kind": "joint_prob", "threshold": 10.0**-n} for n in range(14, 8, -1)]
    policies = [parse_policy({"draft": "small", "window": window, "stop": stop}) for stop in stops]
    encoded, names = encode(pair, workload, DecodeOptions(Sampling(), 48)), [p.id for p in policies]
    categories = [r.category for r in workload.requests]
    published, rows = 0, []

    def luckiest(timings: Timings, left: Sequence[str], _: Expected) -> str:
        # Without what prediction knows (that they are equal) the race's choice is noise alone: the
        # hardest case.
        others = [p for p in left if p != names[0]] or names[1:2]
        return max(others, key=lambda p: timings.ratio(p, names[0])[0])

    for n in range(count):
        executor = Executor(pair, policies, encoded)
        found, timings = decided(names, categories, executor, luckiest, time.perf_counter, budget_s)
        assert found is not None
        published += not found.against
        rows.append(
            {"raced": list(timings.ratio(found.id, names[0])), **found.model_dump(mode="json")}
        )
        ratios = f"raced {rows[-1]['raced'][0]:.3f}, confirmed {found.ratio:.3f}"
        say(f"{n + 1} of {count}: {ratios}; published: {not found.against}")
    return {"tunings": count, "published": published, "rows": rows}


RESULT = "nulls"
PARTS: dict[str, Part] = {
    "nulls": lambda quick: of_sizes(1000, 1.0, quick),
    "tails": lambda quick: of_tails(1000, quick),
    "power": lambda quick: of_sizes(300, 1.05, quick),
    "real": real,
}

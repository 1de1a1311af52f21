"""False publications and power of a tuning's evidence, with the code that ships: a race chooses, a
confirmation proves.

    python bench/nulls.py [--nulls 1000] [--power 300] [--seed 0]   simulated executions, no model
    python bench/nulls.py --real 20 [--budget 40]   A/A on the demo pair: policies that do the same

Simulated requests differ in size, policies in what suits which request, executions by heavy-tailed
noise of 12% and a machine whose pace drifts; prediction knows requests but errs by 3% a policy. A
null is a tuning whose candidates are all as fast as the incumbent. Figures go to
``bench/results/nulls.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np

from spectune.optimizer.confirm import RACE_SHARE, Confirmation, confirm, left_s, planned
from spectune.optimizer.execute import DecodeOptions, Executor, eliminate, encode
from spectune.optimizer.parts import mixed, split
from spectune.optimizer.tune import TuneOptions
from spectune.optimizer.verdict import fastest_of
from spectune.runtime.policies.document import Policy, parse_policy

NOISE, EFFECT, ERROR, DRIFT = 0.12, 0.06, 0.03, 0.2
"""Standard deviations, of logarithms: of an execution, of a policy's effect on a request, of its
prediction; and of the pace."""
BUDGET_S, PASSES = TuneOptions.budget_s, TuneOptions.passes


class Machine:
    """Executes policies (0 is the incumbent, the others are ``gain`` times as fast) on requests of
    about 0.35 s."""

    def __init__(
        self, rng: np.random.Generator, policies: int, requests: int, gain: float = 1.0
    ) -> None:
        size = 0.35 * np.exp(0.5 * rng.standard_normal(requests))
        effect = np.exp(EFFECT * rng.standard_normal((policies, requests)))
        self.cost = size * effect / np.where(np.arange(policies) == 0, 1.0, gain)[:, None]
        self.predicted = self.cost * np.exp(ERROR * rng.standard_normal((policies, 1)))
        self.now, self._rng = 0.0, rng
        self._phase, self._period = rng.uniform(0, 2 * np.pi), rng.uniform(20, 200)

    def execute(self, policy: int, request: int) -> float:
        """Seconds: noise has Student's t with 3 degrees of freedom, and one execution in 50
        stalls."""
        noise = NOISE / np.sqrt(3) * self._rng.standard_t(3) + (
            self._rng.exponential(0.5) if self._rng.random() < 0.02 else 0.0
        )
        pace = DRIFT * np.sin(self._phase + 2 * np.pi * self.now / self._period)
        seconds = float(self.cost[policy, request] * np.exp(noise + pace))
        self.now += seconds
        return seconds


def windows(count: int) -> list[Policy]:
    """So many policies, the most elaborate first: a tie then goes against the incumbent."""
    return [
        parse_policy({"draft": "ngram", "window": {"kind": "fixed", "gamma": g}})
        for g in range(count, 0, -1)
    ]


def tuned(
    rng: np.random.Generator, candidates: int, requests: int, gain: float = 1.0
) -> Confirmation | None:
    """Race and confirmation of ``candidates`` policies, the incumbent among them, as a tuning of so
    many requests does them; None where the incumbent won the race."""
    policies, categories = windows(candidates), ["abc"[i % 3] for i in range(requests)]
    names, parts = [p.id for p in policies], split(categories)
    machine = Machine(rng, candidates, requests, gain)
    part, held = mixed(parts.race, categories), mixed(parts.confirm, categories)
    number = {name: n for n, name in enumerate(names)}
    timings, left = eliminate(
        names,
        len(part),
        lambda name, n: machine.execute(number[name], part[n]),
        whole=names[:1],
        expected={name: machine.predicted[number[name], part] for name in names},
        passes=PASSES,
        budget_s=BUDGET_S * RACE_SHARE,
        clock=lambda: machine.now,
    )
    speeds = {name: 1.0 / machine.predicted[number[name], part].sum() for name in names}
    winner = fastest_of([p for p in policies if p.id in left], timings, speeds, ERROR)
    if winner is policies[0]:
        return None
    both_s = sum(float(np.nanmean(timings.seconds[name])) for name in (winner.id, names[0]))
    used, passes = planned(len(held), both_s, left_s(BUDGET_S, machine.now), PASSES)
    return confirm(
        winner.id,
        names[0],
        lambda name, n: machine.execute(number[name], held[n]),
        requests=used,
        passes=passes,
    )


def series(count: int, candidates: int, requests: int, gain: float, seed: int) -> dict[str, Any]:
    """How many of ``count`` tunings published."""
    found = [
        tuned(np.random.default_rng([seed, candidates, requests, n]), candidates, requests, gain)
        for n in range(count)
    ]
    confirmed = [c for c in found if c is not None]
    published = [c.ratio[0] for c in confirmed if c.holds]
    return {
        "candidates": candidates,
        "requests": requests,
        "gain": gain - 1.0,
        "tunings": count,
        "confirmed": len(confirmed),
        "published": len(published),
        "rate": len(published) / count,
        "median_ratio_published": float(np.median(published)) if published else None,
    }


def real(count: int, budget_s: float) -> dict[str, Any]:
    """A/A tunings on the demo pair: six names of one behaviour, raced and confirmed for real."""
    from lab import demo, requests

    from spectune.traces.schema import Sampling

    pair, workload = demo(), requests(40)
    window = {"kind": "fsm", "gamma_max": 5, "gamma_min": 5}
    stops = [
        {"kind": "joint_prob", "threshold": 10.0**-n} for n in range(14, 8, -1)
    ]  # none is ever reached; reading one takes time
    policies = [parse_policy({"draft": "small", "window": window, "stop": stop}) for stop in stops]
    encoded, names = encode(pair, workload, DecodeOptions(Sampling(), 48)), [p.id for p in policies]
    categories = [r.category for r in workload.requests]
    parts, published, rows = split(categories), 0, []
    part, held = mixed(parts.race, categories), mixed(parts.confirm, categories)
    for n in range(count):
        executor = Executor(pair, policies, encoded)
        began = time.perf_counter()
        timings, left = eliminate(
            names,
            len(part),
            lambda name, i, run=executor: run(name, part[i]),
            passes=PASSES,
            budget_s=budget_s * RACE_SHARE,
        )
        # Without what prediction knows (that they are equal) the race's choice is noise alone: the
        # hardest case.
        winner = max(
            (p for p in left if p != names[0]),
            key=lambda p: timings.ratio(p, names[0])[0],
            default=names[1],
        )
        left = left_s(budget_s, time.perf_counter() - began)
        both_s = sum(float(np.nanmean(timings.seconds[name])) for name in (winner, names[0]))
        used, passes = planned(len(held), both_s, left, PASSES)
        found = confirm(
            winner,
            names[0],
            lambda name, i, run=executor: run(name, held[i]),
            requests=used,
            passes=passes,
        )
        published += found.holds
        rows.append({"raced": list(timings.ratio(winner, names[0])), **found.to_json()})
        print(
            f"  {n + 1} of {count}: raced {rows[-1]['raced'][0]:.3f}, confirmed {found}; "
            f"published: {found.holds}",
            flush=True,
        )
    return {"tunings": count, "published": published, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nulls", type=int, default=1000)
    parser.add_argument("--power", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", type=int, metavar="N", help="run N A/A tunings instead")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of each A/A tuning")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "nulls.json"
    )
    wanted = parser.parse_args(arguments)
    stored = json.loads(wanted.out.read_text()) if wanted.out.exists() else {}
    if wanted.real:
        stored["real"] = real(wanted.real, wanted.budget)
    else:
        sizes = [(candidates, requests) for candidates in (2, 6, 12) for requests in (20, 80)]
        for name, count, gain in (("nulls", wanted.nulls, 1.0), ("power", wanted.power, 1.05)):
            stored[name] = []
            for candidates, requests in sizes:
                row = series(count, candidates, requests, gain, wanted.seed)
                stored[name].append(row)
                print(
                    f"{name}: {candidates:2} candidates, {requests} requests: {row['published']} "
                    f"of {count} published",
                    flush=True,
                )
    wanted.out.write_text(json.dumps(stored, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

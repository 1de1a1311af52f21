"""What :mod:`papers.replayed` is made of: recordings, costs, replays and rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import RESULTS
from bench.harness import run_parts, say, state_folder
from bench.lab import Halves, halves, measured
from bench.papers.claims import CLAIMS
from spectune.optimizer.execute import Executor, encode_recorded, run
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import Replay
from spectune.optimizer.tuning.confirmation import finite
from spectune.optimizer.tuning.timings import Timings
from spectune.runtime.decoder import Decoded, prepare_for
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.traces.cost_table import CostTable
from spectune.traces.tables import LatencyProfile

Document = dict[str, Any]
Interval = Sequence[float | None]
ROUNDS, EMITTED, ACCEPTED, DRAFTED, PASSES, VERIFIED = range(6)
"""Columns of a replay's counts."""
RESAMPLES = 400
H200 = "gpu-nvidia-h200"
"""The results that the costs ``h200`` are from."""


def row(claim: str, cell: str, ours: Interval, why: str = "") -> Document:
    """A row of a paper's table, by its key in :data:`papers.claims.CLAIMS`."""
    say(f"{CLAIMS[claim].title}, {cell}: {[x and round(x, 3) for x in ours]}")
    return {"claim": claim, "cell": cell, "ours": ours, "why": why}


def run_rows(
    about: str | None,
    name: str,
    parts: Mapping[str, Callable[[bool], list[Document]]],
    arguments: Sequence[str],
) -> int:
    """Runs parts of a paper's tables, and adds their rows to ``bench/results/papers.json``, with
    the command that makes them, the requests that were replayed and where costs are from. With
    ``--pair FOLDER`` parts are of that pair, and called ``PART_PAIR``."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--pair", default="demo")
    parser.add_argument("--gsm8k", type=Path)
    typed, rest = parser.parse_known_args(arguments)
    ON_PAIR["name"], GSM8K["file"] = typed.pair, typed.gsm8k
    pair = read_pair(typed.pair).name
    of_pair = "" if pair == "demo" else f"_{pair}"

    def made(part: str, quick: bool) -> Document:
        SAMPLES.clear()
        command, rows = f"bench/run.py {name} --only {part}{of_pair}", parts[part](quick)
        command += " --gsm8k FILE" * part.startswith("dynaspec")
        if of_pair:
            command += " --pair FOLDER"
            rows = [{**r, "cell": f"{r['cell']}, pair {pair}"} for r in rows]
        cells = {word for r in rows for word in r["cell"].split(", ")}
        every = sources_of_costs(quick) if costs.cache_info().currsize else {}
        used = {name: source for name, source in every.items() if name in cells}
        samples = [h.sample() for h in SAMPLES.values()]
        return {"command": command, "costs": used, "samples": samples, "rows": rows}

    named = {f"{part}{of_pair}": partial(made, part) for part in parts}
    return run_parts(about, "papers", named, rest)


# ----------------------------------------------------------------------------- recordings and costs


ON_PAIR: dict[str, Any] = {"name": "demo"}
"""The pair that is measured: the demo's, or a folder's."""
GSM8K: dict[str, Path | None] = {"file": None}
"""Its training split, which is part of what pairs are trained on."""
SAMPLES: dict[str, Halves] = {}
"""The halves that a part replays, by recording, with all of their unseen requests that it takes."""


@cache
def recorded(temperature: float, quick: bool) -> Halves:
    """The halves of a temperature, with trees."""
    count = 120 if temperature else 180
    return halves(state_folder(quick), temperature, quick, count=count, **ON_PAIR)


@cache
def recorded_chains(temperature: float, quick: bool, tokens: int = 48) -> Halves:
    """Chains of the draft models alone; above temperature 0 decoded by the papers' verifier,
    rejection."""
    options: dict[str, Any] = {"count": 120, "tokens": tokens, "trees": False}
    options["verifier"] = "rejection" if temperature else "coupled"
    return halves(state_folder(quick), temperature, quick, **options, **ON_PAIR)


def cells(temperature: float, quick: bool) -> Iterator[tuple[Halves, str, str]]:
    """The recording of a temperature, each draft of its pair, and what they are called."""
    h = recorded(temperature, quick)
    for draft in ("medium",) if quick else h.pair.models:
        yield h, draft, f"{draft}, temperature {temperature:g}"


@cache
def costs(quick: bool) -> dict[str, LatencyProfile]:
    """The three costs by name."""
    h = recorded(0.0, quick)
    cpu = h.store.profile_of(h.pair.id, None, device="cpu")
    return {
        "cpu": cpu or measured(h.store, h.pair, h.recording),
        "h200": _h200(h.pair.id),
        "70b": _seventy(h.pair.id),
    }


def sources_of_costs(quick: bool) -> dict[str, str]:
    """Where each of the three costs is from."""
    cpu = costs(quick)["cpu"]
    code = json.loads((RESULTS / f"{H200}.json").read_text())["passes"]["code"]
    return {
        "cpu": f"measured {cpu.created_at:%Y-%m-%d} on this machine",
        "h200": f"{H200}.json, code of {code}",
        "70b": "HeteroSpec, table 6",
    }


def _h200(pair_id: str) -> LatencyProfile:
    """Measured on the H200 (:data:`H200`): the target's pass by tokens; a
    step of the draft, a level of the head; what trees take more, by level and by round."""
    figures = json.loads((RESULTS / f"{H200}.json").read_text())
    passes = {r["what"]: r["ms"] / 1e3 for r in figures["passes"]["rows"]}
    rounds = {r["policy"]: r for r in figures["rounds"]["rows"]}
    rows = [name for name in passes if name.startswith("pass, tokens")]
    places = tuple(float(name.split(":")[1]) for name in rows)
    tree, line = (rounds[name] for name in ("draft, the same tree", "draft, gamma 4"))
    return published(
        pair_id,
        CostTable(tuple(passes[name] for name in rows), ("rows",), (places,)),
        dict.fromkeys(("small", "medium"), passes["draft's step"])
        | {"head": passes["level of the head's tree"]},
        level_s=(tree["draft ms"] - line["draft ms"]) / 4e3,
        round_s=line["rest ms"] / 1e3,
        tree_s=(tree["rest ms"] - line["rest ms"]) / 1e3,
    )


def _seventy(pair_id: str) -> LatencyProfile:
    """HeteroSpec, table 6, Llama 3.3 70B with EAGLE-3 on MT-bench: verification and drafting in
    10,099 calls (table 1), a call of 8 draft passes. How verification grows with tokens is not
    published: it is taken as flat."""
    verify_s, draft_s = 1080.7 / 10099, 133.3 / 10099 / 8
    steps = dict.fromkeys(("small", "medium", "head"), draft_s)
    return published(pair_id, flat(verify_s), steps)


def flat(seconds: float) -> CostTable:
    """The target's pass where it takes as long for any number of tokens."""
    return CostTable((seconds, seconds), ("context",), ((32.0, 512.0),))


def published(
    pair_id: str,
    target: CostTable,
    steps: dict[str, float],
    *,
    level_s: float = 0.0,
    round_s: float = 0.0,
    tree_s: float = 0.0,
) -> LatencyProfile:
    """A profile of constants: each draft's step or head's level; what a level of a draft's tree
    takes more, a round, and a round with a tree more. Prompts and prompt lookup are free."""
    terms = {"target": target, "round": CostTable((round_s,))}
    for draft, step_s in {**steps, "ngram": 0.0}.items():
        more_s = 0.0 if draft == "head" else level_s
        terms |= {
            f"pass/{draft}": CostTable((step_s,)),
            f"tree round/{draft}": CostTable((tree_s,)),
        }
        terms |= {
            f"{kind}/{draft}": CostTable((more_s,)) for kind in ("top_k", "static", "classifier")
        }
        if draft != "head":
            terms[f"phase/{draft}"] = CostTable((0.0,))
    return LatencyProfile(pair_id, "published", "float16", terms)


# ------------------------------------------------------------------------------ replays and figures


def replayed(
    h: Halves,
    policy: Policy | Document,
    profile: LatencyProfile | None = None,
    *,
    places: Sequence[int] | None = None,
    find: Artifacts | None = None,
    per_round: bool = False,
) -> Replay:
    """A policy on some requests, by default the unseen half."""
    policy = policy if isinstance(policy, Policy) else parse_policy(policy)
    before = SAMPLES.get(h.recording)
    if before is None or len(before.test) < len(h.test):
        SAMPLES[h.recording] = h
    part = h.trace.select(h.test if places is None else places)
    return run_replay(part, policy, profile, artifacts=find or h.find, per_round=per_round)


def over(base: npt.NDArray[Any], new: npt.NDArray[Any]) -> list[float | None]:
    """sum(base) / sum(new) with its 95% interval over requests."""
    columns = {"base": base[:, None].astype(float), "new": new[:, None].astype(float)}
    return finite(Timings(columns).ratio("new", "base"))


def speedup(
    claim: str,
    cell: str,
    h: Halves,
    new: Policy | Document,
    base: Policy | Document,
    profile: LatencyProfile,
    why: str = "",
    places: Sequence[int] | None = None,
    warm: Sequence[int] = (),
) -> Document:
    """A row of the speed of one policy over another's, which says what of it is tau, and what a
    round's drafting and verification take more, in percent of the other's round. Requests ``warm``
    go before those that count."""
    places, skip = [*warm, *(h.test if places is None else places)], len(warm)
    one, other = (replayed(h, p, profile, places=places, per_round=True) for p in (new, base))
    (tau, round_s), (base_tau, base_round_s) = (_tau_and_round(r, skip) for r in (one, other))
    draft, verify, total = 100 * (round_s - base_round_s) / base_round_s[2]
    parts = f"drafting {draft:+.1f}, verifying {verify:+.1f}"
    cause = f"tau {100 * (tau / base_tau - 1):+.1f}%, a round's time {total:+.1f}% ({parts})"
    cause = f"{why}; {cause}" if why else cause
    return row(claim, cell, over(other.seconds[skip:], one.seconds[skip:]), cause)


def speedup_from(
    claim: str,
    cell: str,
    h: Halves,
    both: tuple[Policy | Document, Policy | Document],
    profile: LatencyProfile,
    begin: int,
    end: int,
) -> Document:
    """A row of the speed of one policy over another's, a token, in the rounds that begin with
    ``begin`` to ``end`` tokens of a text, of requests that have such."""
    seconds, tokens, rounds = list[Any](), list[Any](), list[Any]()
    for policy in both:
        replay = replayed(h, policy, profile, per_round=True)
        assert replay.rounds is not None
        assert replay.round_s is not None
        request, start, emitted = replay.rounds[:, 0], replay.rounds[:, 1], replay.rounds[:, 5]
        inside = (start >= begin) & (start < end)
        rounds.append(inside.sum())
        for sums, of_round in ((seconds, replay.round_s[:, 2]), (tokens, emitted)):
            sums.append(np.bincount(request, of_round * inside, len(h.test)))
    there = (tokens[0] > 0) & (tokens[1] > 0)
    new = seconds[0][there] / tokens[0][there] * tokens[1][there]
    taus = [t.sum() / n for t, n in zip(tokens, rounds, strict=True)]
    why = f"{there.sum()} requests; tau {taus[0]:.2f} for {taus[1]:.2f}"
    return row(claim, cell, over(seconds[1][there], new), why)


def _tau_and_round(replay: Replay, skip: int) -> tuple[float, npt.NDArray[np.float64]]:
    """Tokens a round, and a round's mean seconds (drafting, verification, all), but for the first
    requests."""
    assert replay.rounds is not None
    assert replay.round_s is not None
    rounds, emitted = replay.counts[skip:, [ROUNDS, EMITTED]].sum(0)
    return float(emitted / rounds), replay.round_s[replay.rounds[:, 0] >= skip].mean(0)


def best(h: Halves, policies: Iterable[Policy | Document], profile: LatencyProfile) -> Policy:
    """The fastest policy on the half that is fitted to."""
    parsed = [p if isinstance(p, Policy) else parse_policy(p) for p in policies]
    return min(parsed, key=lambda p: replayed(h, p, profile, places=h.fit).seconds.sum())


def executed(
    cell: str, one: tuple[Halves, Document], other: tuple[Halves, Document], quick: bool
) -> Document:
    """A row of the speed of a policy over another's, a token, executed in turns on the same unseen
    requests as their recordings were sampled and verified; it says what replay at this CPU's costs
    predicts for these, and how far each policy's rounds take longer than predicted, by term."""
    sides, predicted, off, profile, passes = [], [], [], costs(quick)["cpu"], 2
    for h, document in (one, other):
        places, policy = h.test[: 2 if quick else 16], parse_policy(document)
        encoded = encode_recorded(h.pair, [h.trace.trajectories[i] for i in places])
        execute = Executor(h.pair, [policy], encoded, profile=profile, artifacts=h.find)
        replay = replayed(h, policy, profile, places=places, per_round=True)
        sides.append((partial(execute, policy.id), replay.counts[:, EMITTED]))
        plan = prepare_for(h.pair, policy, profile=profile, artifacts=h.find)
        off.append(_slower(run(h.pair, StaticSource(plan), encoded), replay))
        predicted.append(replay.seconds / replay.counts[:, EMITTED])
    rng, seconds = np.random.default_rng(0), np.zeros((2, len(places), passes))
    for k, n in product(range(passes), range(len(places))):
        for side in rng.permutation(2):
            one_run, tokens = sides[side]
            seconds[side, n, k] = one_run(n) / tokens[n]
    ours = finite(Timings(dict(zip("ab", seconds, strict=True))).ratio("a", "b"))
    says = over(predicted[1], predicted[0])[0]
    why = (
        f"{len(places)} requests; replay says {says:.3f}; rounds executed over predicted: {off[0]}"
    )
    return {**row("executed", cell, ours, f"{why}, the baseline's {off[1]}"), "replayed": says}


def _slower(decoded: Iterable[Decoded], replay: Replay) -> str:
    """Seconds of executed rounds over those of the same rounds as replayed, by term."""
    steps = [step for d in decoded for step in d.steps]
    took = np.array([[s.draft_s, s.verify_s, s.round_s] for s in steps]).sum(0)
    assert replay.round_s is not None
    draft, verify, total = 100 * (took / replay.round_s.sum(0) - 1)
    return f"{total:+.0f}% (drafting {draft:+.0f}%, verifying {verify:+.0f}%)"


def at_equal_tau(
    claim: str,
    cell: str,
    h: Halves,
    policy: Policy | Document,
    curve: Sequence[Replay],
    why: str = "",
    find: Artifacts | None = None,
) -> Document:
    """A row of the verified tokens of a policy over those that a curve of policies verifies at the
    policy's tau, linear between its points; the 95% interval resamples requests. None beyond the
    curve."""
    one, others = replayed(h, policy, find=find).counts, [replay.counts for replay in curve]

    def points(drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Of the policy and of the curve, [policies, 2]: tau, verified tokens a round."""
        sums = np.array([counts[drawn].sum(0) for counts in (one, *others)], dtype=float)
        return sums[:, [EMITTED, VERIFIED]] / sums[:, [ROUNDS]]

    def ratio(drawn: npt.NDArray[np.int64]) -> float:
        tau, nodes = points(drawn).T
        order = 1 + np.argsort(tau[1:])
        beyond = {"left": np.nan, "right": np.nan}
        return float(nodes[0] / np.interp(tau[0], tau[order], nodes[order], **beyond))

    rng, n = np.random.default_rng(0), len(one)
    drawn = [ratio(rng.integers(0, n, n)) for _ in range(RESAMPLES)]
    ours = finite([ratio(np.arange(n)), *np.quantile(drawn, (0.025, 0.975)).tolist()])
    (tau, nodes), *rest = points(np.arange(n)).tolist()
    low, high = min(rest)[0], max(rest)[0]
    place = f"{nodes:.1f} tokens at tau {tau:.2f}"
    place += "" if low <= tau <= high else f", the baseline's is {low:.2f} to {high:.2f}"
    return row(claim, cell, ours, f"{place}; {why}" if why else place)

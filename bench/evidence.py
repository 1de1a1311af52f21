"""What :mod:`papers` holds the papers against: claims, recordings, costs, replays and rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from lab import RESULTS, ROOT, Halves, halves, measured, run_parts, say

from spectune.optimizer.execute import Executor, encode_recorded
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import Replay
from spectune.optimizer.timings import Timings, finite
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


class Claim(NamedTuple):
    """What a paper says: a title, its figure with its place, and what ours is to be at least, or at
    most (neither: it cannot be held against a figure)."""

    title: str
    figure: str
    least: float | None = None
    most: float | None = None


CLAIMS = {
    "tau": Claim("tau (target calls: the inverse)", "+3.3 to +8.4% (table 1)", 1.033),
    "tau 1": Claim("tau (target calls: the inverse)", "+3.6 to +7.7% (table 9)", 1.036),
    "tokens": Claim("verified tokens", "-7.7 to -16.2% (table 1)", most=0.923),
    "tokens 1": Claim("verified tokens", "-5.6 to -12.7% (table 9)", most=0.944),
    "speed": Claim("speed", "+2.3 to +9.1% (table 1)", 1.023),
    "speed 1": Claim("speed", "+2.6 to +7.5% (table 9)", 1.026),
    "tuned": Claim("speed, both tuned", "none: no baseline is tuned", 1.0),
    "executed": Claim("speed, executed", "as replayed"),
    "deeper": Claim("tau, deeper trees alone", "+7.6 to +18.1% (table 2, code)", 1.076),
    "pruned": Claim("verified tokens by pruning", "-13.6 to -19.3% (table 2, code)", most=0.864),
    "kept": Claim("tau kept by pruning", "97.8 to 99.1% (table 2, code)", 0.978),
    "ranks": Claim("accepted paths in the best quarter of N", "most (figure 1)"),
    "alpha 1": Claim("speed, alpha 2 over 1 at depth 4", "+1.2 to +2.3% (table 3)", 1.012),
    "alpha 3": Claim("speed, alpha 2 over 3 at depth 4", "+0.2 to +1.1% (table 3)", 1.002),
    "domain": Claim("speed out of domain", "+5.3 to +10.8% (table 5)", 1.053),
    "overhead": Claim("seconds with entropies", "+0.3 to +0.9% (table 6)", most=1.009),
    "adaedl": Claim("speed over AdaEDL on the tree", "+6 to +22% (table 11)", 1.06),
    "nodes": Claim("verified tokens at EAGLE-2's tau", "75 to 80% (section 5)", most=0.8),
    "two": Claim("the same, two features", "90% (table 1)", most=0.9),
    "hidden": Claim("the same, other hidden sizes", "12 to 48 alike (B.3)", most=0.8),
    "transfer": Claim("the same, trained on another draft", "73 to 100% (table 2)", most=1.0),
    "texts": Claim("the same, trained on other texts", "below EAGLE-2's (figure 4)", most=1.0),
    "cap": Claim("the same, at most 5 a level", "below EAGLE-2's (table 5)", most=1.0),
    "stops": Claim("verified tokens of chains at a stop's tau", "90 to 92% (table 3)", most=0.92),
    "window": Claim("speed over the window gamma 5", "+3.55 to +16.48% (section 6)", 1.0355),
    "window 1": Claim("speed over the window gamma 5", "+2.4 to +9.8% (table 9)", 1.0238),
    "methods": Claim("speed over the best of methods 2 to 4", "the best overall (figure 3)", 1.0),
    "adaptive": Claim("speed over EAGLE-2 of depth 5", "+1.1 to +7.1% (table 10)", 1.0114),
    "choice": Claim("speed over the best single draft", "+0.0 to +8.8 points (table 2)", 1.0),
    "full": Claim("tau of the whole vocabulary kept", "98.4% (table 1)", 0.984),
    "frequent": Claim("the same, FR-Spec", "93.6% (table 1)", 0.936),
    "routed": Claim("tau over FR-Spec's at as many tokens", "+5.2% (table 1)", 1.052),
    "decayed": Claim("tau, fewer clusters by step over as many", "above (figure 3)", 1.0),
    "mass": Claim("p(S), DynaSpec's over FR-Spec's", "0.874 against 0.854 (table 3)", 1.023),
    "distance": Claim("TV inside S, likewise", "0.874 against 0.887 (table 3)", most=0.986),
    "bounds": Claim("contexts where theorem 5.1 and corollary 5.2 hold", "all", 1.0),
    "rare": Claim("tokens outside FR-Spec's shortlist that the router's has", "none"),
    "decayed order": Claim("tau, PA-FR over FR-Spec", "+1.9% (table 4)", 1.019),
    "coupled": Claim("tau of coupled chains over rejection's", "none", 1.0),
    "verified": Claim("speed of the best coupled policy over rejection's best", "none", 1.0),
    "sharp": Claim("verified tokens at EAGLE-2's tau, our coupled score", "none", most=1.0),
    "certain": Claim("first choices accepted over their mean probability", "none"),
    "together": Claim("speed over the best single mechanism", "none", 1.0),
    "regret": Claim("speed of what is chosen over the best of 120 in hindsight", "none"),
    "regret executed": Claim(
        "speed of what is chosen over the fastest of 16, executed", "none", 0.98
    ),
}


def row(claim: str, cell: str, ours: Interval, why: str = "") -> Document:
    """A row of a paper's table."""
    say(f"{CLAIMS[claim].title}, {cell}: {[x and round(x, 3) for x in ours]}")
    return {"claim": claim, **CLAIMS[claim]._asdict(), "cell": cell, "ours": ours, "why": why}


def run_rows(
    about: str | None,
    name: str,
    parts: Mapping[str, Callable[[bool], list[Document]]],
    arguments: Sequence[str],
) -> None:
    """Runs parts of a paper's tables, and adds their rows, each with the command that makes it, to
    ``bench/results/papers.json``. With ``--pair FOLDER`` parts are of that pair, and called
    ``PART_PAIR``."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--pair", default="demo")
    typed, rest = parser.parse_known_args(arguments)
    ON_PAIR["name"] = typed.pair
    pair = read_pair(typed.pair).name
    of_pair = "" if pair == "demo" else f"_{pair}"

    def rows(part: str, quick: bool) -> list[Document]:
        command, made = f"bench/run.py {name} --only {part}{of_pair}", parts[part](quick)
        if of_pair:
            command += " --pair FOLDER"
            made = [{**r, "cell": f"{r['cell']}, pair {pair}"} for r in made]
        return [{**r, "command": command} for r in made]

    named = {f"{part}{of_pair}": partial(rows, part) for part in parts}
    run_parts(about, "papers", named, rest)


# ----------------------------------------------------------------------------- recordings and costs


ON_PAIR: dict[str, Any] = {"name": "demo"}
"""The pair that is measured: the demo's, or a folder's."""


@cache
def recorded(temperature: float, quick: bool) -> Halves:
    """The halves of a temperature, with trees."""
    count = 120 if temperature else 180
    return halves(state_folder(quick), temperature, quick, count=count, **ON_PAIR)


@cache
def recorded_chains(temperature: float, quick: bool) -> Halves:
    """Greedy the same; above temperature 0 the same requests with the draft models' chains, decoded
    by the papers' verifier, rejection."""
    if not temperature:
        return recorded(temperature, quick)
    options: dict[str, Any] = {"count": 120, "verifier": "rejection", "trees": False}
    return halves(state_folder(quick), temperature, quick, **options, **ON_PAIR)


def state_folder(quick: bool) -> Path:
    """Where recordings and fits are kept."""
    state = ROOT / ".acceptance" / "quick" if quick else ROOT / ".acceptance"
    state.mkdir(parents=True, exist_ok=True)
    return state


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
        "h100": _h100(h.pair.id),
        "70b": _seventy(h.pair.id),
    }


def _h100(pair_id: str) -> LatencyProfile:
    """Measured on the H100 (``gpu-nvidia-h100-80gb-hbm3.json``): the target's pass by tokens; a
    step of the draft, a level of the head; what trees take more, by level and by round."""
    figures = json.loads((RESULTS / "gpu-nvidia-h100-80gb-hbm3.json").read_text())
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
) -> Document:
    """A row of the speed of one policy over another's, which says what of it is tau, and what a
    round's drafting and verification take more, in percent of the other's round."""
    one, other = (replayed(h, p, profile, places=places, per_round=True) for p in (new, base))
    (tau, round_s), (base_tau, base_round_s) = map(_tau_and_round, (one, other))
    draft, verify, total = 100 * (round_s - base_round_s) / base_round_s[2]
    parts = f"drafting {draft:+.1f}, verifying {verify:+.1f}"
    cause = f"tau {100 * (tau / base_tau - 1):+.1f}%, a round's time {total:+.1f}% ({parts})"
    cause = f"{why}; {cause}" if why else cause
    return row(claim, cell, over(other.seconds, one.seconds), cause)


def _tau_and_round(replay: Replay) -> tuple[float, npt.NDArray[np.float64]]:
    """Tokens a round, and a round's mean seconds: drafting, verification, all."""
    assert replay.round_s is not None
    rounds, emitted = replay.counts[:, [ROUNDS, EMITTED]].sum(0)
    return float(emitted / rounds), replay.round_s.mean(0)


def best(h: Halves, policies: Iterable[Policy | Document], profile: LatencyProfile) -> Policy:
    """The fastest policy on the half that is fitted to."""
    parsed = [p if isinstance(p, Policy) else parse_policy(p) for p in policies]
    return min(parsed, key=lambda p: replayed(h, p, profile, places=h.fit).seconds.sum())


def executed(
    cell: str, one: tuple[Halves, Document], other: tuple[Halves, Document], quick: bool
) -> Document:
    """A row of the speed of a policy over another's, a token, executed in turns on the same unseen
    requests as their recordings were sampled and verified; it says what replay at this CPU's costs
    predicts for these."""
    sides, predicted, profile, passes = [], [], costs(quick)["cpu"], 2
    for h, document in (one, other):
        places, policy = h.test[: 2 if quick else 16], parse_policy(document)
        encoded = encode_recorded(h.pair, [h.trace.trajectories[i] for i in places])
        execute = Executor(h.pair, [policy], encoded, profile=profile, artifacts=h.find)
        replay = replayed(h, policy, profile, places=places)
        sides.append((partial(execute, policy.id), replay.counts[:, EMITTED]))
        predicted.append(replay.seconds / replay.counts[:, EMITTED])
    rng, seconds = np.random.default_rng(0), np.zeros((2, len(places), passes))
    for k, n in product(range(passes), range(len(places))):
        for side in rng.permutation(2):
            run, tokens = sides[side]
            seconds[side, n, k] = run(n) / tokens[n]
    ours = finite(Timings(dict(zip("ab", seconds, strict=True))).ratio("a", "b"))
    why = f"{len(places)} requests; replay says {over(predicted[1], predicted[0])[0]:.3f}"
    return row("executed", cell, ours, why)


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

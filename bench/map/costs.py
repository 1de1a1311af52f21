"""Costs for :mod:`map.cells`: of the grid's cells, and of hardware by name (measured, published in
bench/map/published.toml, or a roofline)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from bench import RESULTS, ROOT
from bench.lab import Halves
from bench.map.roofline import roofline, shape_of
from spectune.runtime.costs import RoundKind, pass_seconds
from spectune.runtime.policies.document import Policy
from spectune.traces.cost_table import CostTable
from spectune.traces.tables import LatencyProfile

DRAFT_SHAPES = {"small": "1b", "medium": "1b", "head": "eagle"}
"""Of an 8B target: whose share of the output head a pass of the draft has in the grid."""
ROOFLINES = (
    *(("h100", "8b", "eagle"), ("h200", "8b", "eagle3"), ("4xh100", "70b", "eagle")),
    *(("4xh100", "70b", "1b"), ("rtx4090", "8b", "1b"), ("l4", "3b", "1b")),
)
ROWS = 4096
"""Tokens of the demo drafts' output heads."""
Floats = npt.NDArray[np.float64]


def flat(
    pair: str, draft: str, rows: int, terms: Mapping[str, tuple[float, float]]
) -> LatencyProfile:
    """A profile of one draft whose output head has ``rows`` tokens. ``terms``: seconds of a pass
    over one row and over each further one, of ``target`` and ``pass``; of ``head`` those of no
    token and of the whole head."""
    first, more = terms.get("target", (0.0, 0.0))
    tables = {"target": CostTable((first, first + more), ("rows",), ((1.0, 2.0),))}
    first, more = terms.get("pass", (0.0, 0.0))
    tables[f"pass/{draft}"] = CostTable((first, first + more), ("rows",), ((1.0, 2.0),))
    for name in ("head", "gathered"):
        tables[f"{name}/{draft}"] = CostTable(
            terms.get("head", (0.0, 0.0)), ("rows",), ((0.0, float(rows)),)
        )
    free = ("top_k", "static", "classifier", *(["phase"] if draft != "head" else []))
    tables |= {f"{name}/{draft}": CostTable((0.0,)) for name in free}
    return LatencyProfile(pair, "grid", "", tables)


def grid_profile(
    pair: str, draft: str, rows: int, cost: float, slope: float, beside: float = 0.0
) -> LatencyProfile:
    """The profile of a cell of the grid, in rounds without a draft; rounds of trees, and of a
    head's chains, take ``beside`` more."""
    share = head_share(draft)
    terms = {"target": (1.0, slope), "pass": (cost * (1 - share), cost * slope)}
    profile = flat(pair, draft, rows, {**terms, "head": (0.0, cost * share)})
    tree = {f"tree round/{draft}": CostTable((beside,))}
    return replace(profile, terms={**profile.terms, **tree})


def beside_passes(policy: Policy) -> float:
    """What a round of a policy takes beside its passes, in rounds without a draft: of trees, and of
    a head's chains, as the newest GPU that was measured has it."""
    chain, tree = _beside()
    if policy.speculates and policy.is_tree:
        return tree
    return chain if policy.draft == "head" else 0.0


@cache
def _beside() -> tuple[float, float]:
    """Of a head's chain and of a tree."""
    found = [json.loads(f.read_text())["rounds"] for f in RESULTS.glob("gpu-nvidia-*.json")]
    rows = {row["policy"]: row for row in max(found, key=lambda rounds: rounds["measured"])["rows"]}
    plain, chain = rows["autoregression"], rows["head, gamma 4"]
    tree = rows["head, tree 8 wide, 4 levels, N 60"]
    drafting = tree["draft ms"] - chain["draft ms"]
    more = (chain["rest ms"], tree["rest ms"] + drafting)
    first, second = (max(0.0, (x - plain["rest ms"]) / plain["round ms"]) for x in more)
    return first, second


def head_share(draft: str) -> float:
    """The part of a draft's pass that its output head is, by :data:`DRAFT_SHAPES`."""
    if draft == "ngram":
        return 0.0
    shape = shape_of(DRAFT_SHAPES[draft], shape_of("8b"))
    head = shape.vocab * shape.hidden
    return head / (head + shape.layer_weights)


def price(draft: str, cost: float, slope: float) -> Floats:
    """What the counts of :func:`counted` cost, float64 [5]."""
    share = head_share(draft)
    return np.array([1.0, slope, cost * (1 - share), cost * slope, cost * share])


@dataclass(frozen=True)
class Named:
    """Costs that have a name: whose they are, where they come from (measured, published or
    roofline), and the drafts that they are of."""

    name: str
    label: str
    source: str
    drafts: tuple[str, ...]
    profile: LatencyProfile

    def place(self, draft: str) -> tuple[float, float]:
        """A draft's cost, and the slope up to 60 further tokens, in the grid's units."""
        context, rows = self.profile.usual_context, np.array([1.0, 61.0])
        first, last = self.profile.seconds("target", rows=rows, context=np.full(2, context))
        one = pass_seconds(self.profile, RoundKind(draft), np.array([context]), rows[:1])
        rest = self.profile.seconds("round") if "round" in self.profile.terms else 0.0
        step = first + float(rest)
        return round(float(one[0, 0] / step), 4), round(float((last - first) / step / 60), 5)


def without_prompts(profile: LatencyProfile) -> LatencyProfile:
    """The profile of decoding alone."""
    terms = {n: t for n, t in profile.terms.items() if not n.startswith("prefill/")}
    return replace(profile, terms=terms)


def named(h: Halves) -> Iterator[Named]:
    """Hardware by name."""
    pair = h.pair.id
    yield from _on_gpus(pair)
    document = tomllib.loads((ROOT / "bench" / "map" / "published.toml").read_text())
    for d in document["speedup"]:
        step = d["speedup"] * (d["draft_s"] + d["verify_s"]) / (d["calls"] * d["tau"])
        slope = max(0.0, d["verify_s"] / d["calls"] / step - 1) / 60
        cost = d["draft_s"] / d["calls"] / d["passes"] / step
        profile = grid_profile(pair, "head", ROWS, cost, slope)
        yield Named(d["name"], "published", d["source"], ("head",), profile)
    for d in document["steps"]:
        fixed_s = d["fixed"] + d["overhead"]
        target = (fixed_s + d["per_token"], d["per_token"])
        profile = flat(pair, "ngram", 1, {"target": target})
        cached = ((0.0, 1e6), (0.0, 1e6))
        seconds = [
            d["per_token"] * r + d["per_cached_token"] * c for r in cached[0] for c in cached[1]
        ]
        free, lookup = CostTable((0.0,)), CostTable((d["lookup"] * fixed_s,))
        terms = {
            "phase/ngram": lookup, "step": CostTable((fixed_s,)), "step draft/ngram": lookup,
            "step target": CostTable(tuple(seconds), ("rows", "context"), cached),
            "step prompts": free, "step draft prompts/ngram": free,
        }  # fmt: skip
        profile = replace(profile, terms={**profile.terms, **terms})
        yield Named(d["name"], "published", d["source"], ("ngram",), profile)
    for device, target, draft in ROOFLINES:
        drafts = ("head",) if draft.startswith("eagle") else ("medium", "small")
        source = f"bench/map/roofline.py, {target} and {draft} on {device}"
        profile = without_prompts(roofline(h.pair.spec, device, target, draft))
        yield Named(f"{target}, {draft}, {device}", "roofline", source, drafts, profile)


def _on_gpus(pair: str) -> Iterator[Named]:
    """The ballasted pair's rounds on GPUs, by draft."""
    for file in sorted(RESULTS.glob("gpu-nvidia-*.json")):
        rounds = json.loads(file.read_text())["rounds"]
        rows = {row["policy"]: row for row in rounds["rows"]}
        plain, tree = rows["autoregression"], rows["head, tree 8 wide, 4 levels, N 60"]
        chains = {"head": "head, gamma 4", "small": "draft, gamma 4", "ngram": "prompt lookup, 8"}
        for draft, policy in chains.items():
            chain, tokens = rows[policy], 8 if draft == "ngram" else 4
            verify = tuple(1e-3 * row["verify ms"] for row in (plain, chain, tree))
            terms = {
                "target": CostTable(verify, ("rows",), ((1.0, tokens + 1.0, 61.0),)),
                "round": CostTable((1e-3 * plain["rest ms"],)),
                f"tree round/{draft}": CostTable((1e-3 * (tree["rest ms"] - plain["rest ms"]),)),
            }
            profile = flat(pair, draft, ROWS, {"pass": (1e-3 * chain["draft ms"] / tokens, 0.0)})
            profile = replace(profile, terms={**profile.terms, **terms})
            name = f"8B of ballast, {draft}, {rounds['on'].split()[1]}"
            source = f"bench/results/{file.name}, rounds"
            yield Named(name, "measured", source, (draft,), profile)

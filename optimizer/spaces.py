"""The joint space of policies: what a search may use, the small families that are enumerated whole,
and the parameters of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    DEFAULT_TOP_N,
    Policy,
    StaticGrowth,
    parse_policy,
)

Parameters = Mapping[str, BaseDistribution]

_LIMITS: Parameters = {"gamma_min": IntDistribution(0, 2), "gamma_initial": IntDistribution(1, 8)}
WINDOWS: Final[Mapping[str, Parameters]] = {
    "fixed": {},
    "fsm": _LIMITS,
    "heuristic": {
        "gamma_initial": IntDistribution(1, 8),
        "transient": CategoricalDistribution((False, True)),
    },
    "cache_fsm": _LIMITS,
    "analytic": {
        "history": IntDistribution(2, 64, log=True),
        "acc_max": FloatDistribution(0.8, 0.995),
        "estimator": CategoricalDistribution(("ratio", "exact")),
        **_LIMITS,
    },
    "q_learning": {
        "learning_rate": FloatDistribution(0.02, 0.5, log=True),
        "discount": FloatDistribution(0.0, 0.95),
        "epsilon": FloatDistribution(0.005, 0.2, log=True),
        "memory": IntDistribution(1, 2),
        "reward": CategoricalDistribution(("accepted", "speed")),
    },
}
"""Windows from the simplest to the most elaborate, and their parameters beside ``gamma``."""
STOPS: Final[Mapping[str, Parameters]] = {
    "none": {},
    "max_prob": {"max_prob": FloatDistribution(0.02, 0.95)},
    "joint_prob": {"joint_prob": FloatDistribution(0.005, 0.9, log=True)},
    "entropy": {"entropy": FloatDistribution(0.05, 0.9)},
}
"""Stops likewise; a threshold is a parameter of the stop's name."""
WINDOW_ORDER, STOP_ORDER = tuple(WINDOWS), tuple(STOPS)
GROWTH_ORDER = ("chain", "static", "top_k", "classifier")
SHORTLIST_ORDER = ("full", "frequency", "position_frequency", "clusters")
PASSES = {"frequency": "fixed", "position_frequency": "fixed", "clusters": "routed"}
"""What a profile calls the passes of each kind of shortlist."""
SHARES = (4, 8, 16, 32)
"""Parts of the vocabulary that the papers' shortlists are tried with."""
KEEPS_ALL = DEFAULT_TOP_N + 4
"""The ``top_n`` parameter by which a classifier's trees keep every node, as the paper's do."""
RISE = 3 / 7
"""What the second of HeteroSpec's fractions has of the way from the first to 1 (the paper's 0.3,
0.6, 1.0)."""
BETAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85)
"""C2T's thresholds that are tried."""
SCORES: Final[tuple[dict[str, Any], ...]] = (
    {"score": "auto"},
    {"score": "coupled", "sharpness": 1.5},
    {"score": "coupled", "sharpness": 3.0},
)
"""Scores of top-k growth that are enumerated with every draft."""


@dataclass(frozen=True)
class Kinds:
    """Kinds of blocks that a search may use; by default all."""

    windows: tuple[str, ...] = WINDOW_ORDER
    stops: tuple[str, ...] = STOP_ORDER
    growths: tuple[str, ...] = GROWTH_ORDER
    bins: bool = True
    shortlists: tuple[str, ...] = SHORTLIST_ORDER

    def hold(self, policy: Policy) -> bool:
        """Whether a policy uses no others. One that does not speculate uses none."""
        return not policy.speculates or (
            policy.window.kind in self.windows
            and policy.stop.kind in self.stops
            and policy.growth.kind in self.growths
            and (self.bins or policy.stratify is None)
            and policy.shortlist.kind in self.shortlists
        )


ALL_KINDS = Kinds()


@dataclass(frozen=True)
class TreeLimit:
    """Trees that may be tried with one draft: what was recorded of it (``width``, ``depth``), and
    what was fitted on that: ids of ``bins`` and ``classifier`` (with the ``grown`` width and cap it
    was covered at), and ``static`` trees as rank paths."""

    width: int
    depth: int
    bins: str | None = None
    classifier: str | None = None
    grown: int = 8
    static: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def can_grow(self, growth: str) -> bool:
        """Whether there are trees of a kind of growth."""
        fitted = {"chain": False, "static": bool(self.static), "classifier": bool(self.classifier)}
        return fitted.get(growth, True)

    def grower(self, beta: float, *, chain: bool = False) -> dict[str, Any]:
        """The document of C2T's growth at a threshold; ``chain``: its chain mode, an early exit."""
        width = 1 if chain else self.grown
        size = {"width": width, "cap": width}
        return {"kind": "classifier", **size, "beta": beta, "artifact": self.classifier}


@dataclass(frozen=True)
class Fold:
    """Requests, by id, and ids of what was fitted without them: ``frequencies`` and ``router``."""

    requests: frozenset[str]
    frequencies: str | None = None
    router: str | None = None


@dataclass(frozen=True)
class ShortlistLimit:
    """Shortlists that may be tried with one draft, whose output head has ``rows`` tokens: ids of
    what was fitted and can be replayed, ``frequencies``, and a ``router`` of ``clusters`` (M).
    ``apart``: the folds by which they are judged; those in none by what was fitted to all."""

    rows: int
    frequencies: str | None = None
    router: str | None = None
    clusters: int = 0
    apart: tuple[Fold, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of shortlists that can be tried, without ``full``."""
        have = {"fixed": self.frequencies, "routed": self.router}
        return tuple(kind for kind, passes in PASSES.items() if have[passes] is not None)

    def only(self, kinds: Iterable[str]) -> ShortlistLimit:
        """The same with shortlists of these kinds of passes (``fixed``, ``routed``) alone."""
        kept = set(kinds)
        return replace(
            self,
            frequencies=self.frequencies if "fixed" in kept else None,
            router=self.router if "routed" in kept else None,
        )

    def block(self, chosen: Mapping[str, Any]) -> dict[str, Any] | None:
        """The document of a shortlist by its parameters, lowered to half of what the draft has (one
        of more saves little, and a gain predicted for it is mostly the prediction's error); None
        where that is the whole head."""
        kind = chosen["shortlist"]
        if kind not in self.kinds:
            return None
        if kind == "clusters":
            k0 = min(chosen["k0"], max(1, self.clusters // 2))
            k1 = min(chosen["k1"], k0)
            least = min(chosen["k_min"], k1)
            if least == self.clusters:
                return None
            return {"kind": kind, "k0": k0, "k1": k1, "k_min": least, "artifact": self.router}
        name = "size" if kind == "frequency" else "k_max"
        size = min(chosen[name], max(1, self.rows // 2))
        return {"kind": kind, name: size, "artifact": self.frequencies}

    def holds(self, policy: Policy) -> bool:
        """Whether a policy's shortlist is one of these."""
        artifact = getattr(policy.shortlist, "artifact", "")
        return policy.shortlist.kind in self.kinds and artifact in (self.frequencies, self.router)

    def judged(self, policy: Policy) -> list[tuple[frozenset[str], Policy]]:
        """For each fold its requests, and a policy with a shortlist of these fits as it would be
        without them; [] for other policies."""
        found = []
        for fold in self.apart if policy.shortlisted else ():
            without = {self.frequencies: fold.frequencies, self.router: fold.router}
            artifact = without.get(getattr(policy.shortlist, "artifact", None))
            if artifact is not None:
                shortlist = policy.shortlist.model_copy(update={"artifact": artifact})
                found.append((fold.requests, policy.model_copy(update={"shortlist": shortlist})))
        return found

    def papers(self, share: int) -> list[dict[str, Any]]:
        """The papers' settings at a ``share``-th of the vocabulary: FR-Spec, PA-FR, and DynaSpec's
        clusters, which get fewer by step."""
        size, k0 = max(1, self.rows // share), max(1, self.clusters // share)
        sizes = {"size": size, "k_max": size}
        sizes |= {"k0": k0, "k1": max(1, k0 // 2), "k_min": max(1, k0 // 4)}
        found = (self.block({**sizes, "shortlist": kind}) for kind in self.kinds)
        return [block for block in found if block is not None]


def enumerated(drafts: Sequence[str], gamma_max: int) -> list[Policy]:
    """The small families, whole: every fixed window, state machine and transformers' schedule of
    every draft."""
    policies = [AUTOREGRESSIVE]
    for draft in drafts:
        for gamma in range(1, gamma_max + 1):
            policies.append(_policy(draft, {"kind": "fixed", "gamma": gamma}))
            for kind in ("fsm", "cache_fsm"):
                for least in (0, 1):
                    window = {"kind": kind, "gamma_max": gamma, "gamma_min": least}
                    policies.append(_policy(draft, window))
        policies.append(transformers_heuristic(draft, gamma_max))
        for gamma in sorted({min(gamma, gamma_max) for gamma in (4, 8, gamma_max)}):
            policies.append(_policy(draft, {"kind": "analytic", "gamma_max": gamma}))
            policies.append(_policy(draft, {"kind": "q_learning", "gamma_max": gamma}))
            if draft != "ngram":
                stop = {"kind": "max_prob", "threshold": 0.4}
                policies.append(_policy(draft, {"kind": "fixed", "gamma": gamma}, stop=stop))
    return policies


def transformers_heuristic(draft: str, gamma_max: int) -> Policy:
    """transformers' heuristic schedule with its other defaults: 20 tokens to begin with, confidence
    threshold 0.4.

    (Its default schedule is ``constant`` by now; it also adapts the threshold, which stays here.)
    Windows are capped at ``gamma_max``. The confidence stop is left out for drafts without
    probabilities.
    """
    first = min(20, gamma_max)
    window = {"kind": "heuristic", "gamma_max": gamma_max, "gamma_initial": first}
    stop = {"kind": "none"} if draft == "ngram" else {"kind": "max_prob", "threshold": 0.4}
    return _policy(draft, window, stop=stop)


def plain_trees(draft: str, width: int, depth: int) -> list[Policy]:
    """EAGLE-2's trees of a few sizes within what is recorded, with the default score."""
    sizes = [
        (w, d, n)
        for w in sorted({min(w, width) for w in (2, 4, 8)})
        for d in sorted({min(d, depth) for d in (2, 4, 6, 8)})
        for n in (4, 8, 16, 32, DEFAULT_TOP_N)
        if d <= n <= w + (d - 1) * w * w
    ]
    return [
        _policy(
            draft,
            {"kind": "fixed", "gamma": d},
            growth={"kind": "top_k", "width": w},
            select={"top_n": n},
        )
        for w, d, n in sizes
    ]


def enumerated_trees(trees: Mapping[str, TreeLimit]) -> list[Policy]:
    """The tree families, by draft: EAGLE-2's width x depth x N whole on a grid, static trees, C2T's
    thresholds on trees and chains, HeteroSpec with the paper's alpha and fractions, adaptive
    depths, and AdaEDL's stop."""
    return [policy for draft, limit in trees.items() for policy in _tree_families(draft, limit)]


@lru_cache(maxsize=16)
def _tree_families(draft: str, limit: TreeLimit) -> tuple[Policy, ...]:
    """:func:`enumerated_trees` of one draft; a tuning searches several times."""
    policies = (_policy(draft, **blocks) for blocks in _tree_blocks(limit))
    return tuple({p.id: p for p in policies}.values())


def _tree_blocks(limit: TreeLimit) -> Iterator[dict[str, Any]]:
    sizes = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, DEFAULT_TOP_N)
    deepest = {"kind": "fixed", "gamma": limit.depth}
    for width in (w for w in (2, 3, 4, 6, 8, 10, 16) if w <= limit.width):
        scores = [{"kind": "top_k", "width": width, **score} for score in SCORES]
        papers, sharpest = scores[0], scores[-1]
        for depth in range(1, limit.depth + 1):
            fixed = {"kind": "fixed", "gamma": depth}
            pool = width + (depth - 1) * width * width
            alpha = min((depth + 1) // 2, limit.depth - depth)
            for n in (n for n in sizes if depth <= n <= pool):
                for growth in scores:
                    yield {"growth": growth, "window": fixed, "select": {"top_n": n}}
                if limit.bins is not None and alpha > 0 and n >= 6:
                    bins = {"artifact": limit.bins, "alpha": alpha, "fractions": [0.3, 0.6, 1.0]}
                    for growth in (papers, sharpest):
                        binned = {"select": {"top_n": n}, "stratify": bins}
                        yield {"growth": growth, "window": fixed, **binned}
        for growth in (papers, sharpest):
            for select in ({"top_n": n} for n in sizes if 4 <= n <= 32):
                grown = {"growth": growth, "select": select}
                for kind in ("fsm", "cache_fsm", "analytic"):
                    yield {**grown, "window": {"kind": kind, "gamma_max": limit.depth}}
                for threshold in (0.3, 0.5):
                    stop = {"kind": "entropy", "threshold": threshold}
                    yield {**grown, "window": deepest, "stop": stop}
    for paths in limit.static:
        window = {"kind": "fixed", "gamma": max(len(p) for p in paths)}
        yield {"growth": {"kind": "static", "paths": paths}, "window": window}
    for beta in BETAS if limit.classifier is not None else ():
        for depth in sorted({2, 3, 4, 6, limit.depth}):
            if depth <= limit.depth:
                yield {"growth": limit.grower(beta), "window": {"kind": "fixed", "gamma": depth}}
        yield {"growth": limit.grower(beta, chain=True), "window": deepest}


@dataclass(frozen=True)
class Space:
    """The joint space of draft x window x stop as Optuna parameters; with ``trees`` also of growth
    x selection x bins, with ``shortlists`` of what the draft evaluates of its output head. A draft
    has the parameters alone that change what it does: ``ngram`` has no stop."""

    drafts: tuple[str, ...]
    gamma_max: int
    kinds: Kinds = ALL_KINDS
    trees: Mapping[str, TreeLimit] = field(default_factory=dict)
    shortlists: Mapping[str, ShortlistLimit] = field(default_factory=dict)

    def distributions(self, chosen: Mapping[str, Any]) -> dict[str, BaseDistribution]:
        """The parameters that exist beside those ``chosen``: at first draft and window, then the
        kinds of blocks that the draft has, then what these have."""
        found: dict[str, BaseDistribution] = {
            "draft": CategoricalDistribution(self.drafts),
            "window": CategoricalDistribution(self.kinds.windows),
        }
        if not chosen:
            return found
        found["gamma"] = IntDistribution(1, self.gamma_max)
        found |= WINDOWS[chosen["window"]]
        if "gamma_initial" in found:
            found["gamma_initial"] = IntDistribution(1, min(8, self.gamma_max))
        if chosen["draft"] != "ngram":
            found["stop"] = CategoricalDistribution(self.kinds.stops)
            found |= STOPS[chosen.get("stop", "none")]
        if chosen["draft"] in self.trees:
            found["growth"] = CategoricalDistribution(self.kinds.growths)
            found |= self._of_growth(chosen.get("growth", "chain"))
        if chosen["draft"] in self.shortlists:
            found |= self._of_shortlist(chosen.get("shortlist", "full"))
        return found

    def _of_growth(self, growth: str) -> dict[str, BaseDistribution]:
        limits = self.trees.values()
        if growth == "static":
            most = max(len(limit.static) for limit in limits)
            return {"tree": IntDistribution(0, max(1, most) - 1)}
        if growth == "chain":
            return {}
        found: dict[str, BaseDistribution] = {
            "top_n": IntDistribution(2, KEEPS_ALL, log=True),
            "alpha": IntDistribution(0, 4 if self.kinds.bins else 0),
            "low_bins": IntDistribution(1, 3),
            "fraction": FloatDistribution(0.2, 0.8),
            "rise": FloatDistribution(0.0, 1.0),
        }
        if growth == "top_k":
            found["width"] = IntDistribution(2, max(2, *(limit.width for limit in limits)))
            found["score"] = CategoricalDistribution(("auto", "coupled"))
            found["sharpness"] = FloatDistribution(0.25, 8.0, log=True)
        else:
            found["beta"] = CategoricalDistribution(BETAS)
            found["early_exit"] = CategoricalDistribution((False, True))
        return found

    def _of_shortlist(self, kind: str) -> dict[str, BaseDistribution]:
        limits = self.shortlists.values()
        there = {"full", *(kind for limit in limits for kind in limit.kinds)}
        there &= set(self.kinds.shortlists)
        found: dict[str, BaseDistribution] = {
            "shortlist": CategoricalDistribution(tuple(k for k in SHORTLIST_ORDER if k in there))
        }
        if kind in ("frequency", "position_frequency"):
            rows = max(limit.rows for limit in limits)
            sizes = IntDistribution(max(1, rows // 64), max(1, rows // 2), log=True)
            found["size" if kind == "frequency" else "k_max"] = sizes
        if kind == "clusters":
            most = max(limit.clusters for limit in limits)
            counts = IntDistribution(1, max(1, most // 2), log=True)
            found |= {"k0": counts, "k1": counts, "k_min": counts}
        return found

    def _asked(self, chosen: Mapping[str, Any]) -> dict[str, BaseDistribution]:
        """The parameters that are still to be chosen."""
        return {n: one for n, one in self.distributions(chosen).items() if n not in chosen}

    def suggest(self, trial: optuna.trial.Trial) -> Policy:
        """One policy of the space."""
        chosen: dict[str, Any] = {}
        while asked := self._asked(chosen):
            chosen |= {name: _ask(trial, name, one) for name, one in asked.items()}
        return self.policy(chosen)

    def params(self, policy: Policy) -> dict[str, Any] | None:
        """The parameters of a policy, to seed a study; None for one outside the space. Without
        trees, or shortlists, what a policy has of these is ignored."""
        if not policy.speculates or policy.gamma_max > self.gamma_max:
            return None
        limit, chosen = self.shortlists.get(policy.draft), dict[str, Any]()
        if self.shortlists and policy.shortlisted and (limit is None or not limit.holds(policy)):
            return None
        values = _values(policy, self.trees.get(policy.draft, TreeLimit(0, 0)))
        while asked := self._asked(chosen):
            chosen |= {name: _nearest(values.get(name), one) for name, one in asked.items()}
            if None in chosen.values():
                return None
        return chosen

    def policy(self, chosen: Mapping[str, Any]) -> Policy:
        """The policy of a set of parameters."""
        limit, gamma = self.trees.get(chosen["draft"]), chosen["gamma"]
        stop: dict[str, Any] = {"kind": chosen.get("stop", "none")}
        if stop["kind"] != "none":
            stop["threshold"] = round(chosen[stop["kind"]], 4)
        blocks: dict[str, Any] = {}
        if limit is not None and limit.can_grow(chosen["growth"]):
            gamma = min(gamma, limit.depth)
            blocks = _tree(chosen, limit, gamma)
        if "shortlist" in chosen:
            block = self.shortlists[chosen["draft"]].block(chosen)
            blocks |= {} if block is None else {"shortlist": block}
        return _policy(chosen["draft"], _window(chosen, gamma), stop=stop, **blocks)


def _values(policy: Policy, limit: TreeLimit) -> dict[str, Any]:
    """What a policy is made of, by the names of the parameters. What is none of ``limit`` is
    None."""
    window, growth, bins = policy.window, policy.growth, policy.stratify
    values: dict[str, Any] = {
        **policy.shortlist.model_dump(),
        **growth.model_dump(),
        **window.model_dump(),
        policy.stop.kind: getattr(policy.stop, "threshold", None),
        "draft": policy.draft,
        "window": window.kind,
        "stop": policy.stop.kind,
        "growth": growth.kind,
        "shortlist": policy.shortlist.kind,
        "gamma": policy.gamma_max,
    }
    if values.get("gamma_initial") is None:
        values["gamma_initial"] = getattr(window, "first", 1)
    if isinstance(growth, StaticGrowth):
        known = [frozenset(paths) for paths in limit.static]
        same = frozenset(growth.paths)
        values["tree"] = known.index(same) if same in known else None
        return values
    top_n = KEEPS_ALL if policy.select.top_n is None else policy.select.top_n
    values["top_n"] = top_n if 2 <= top_n <= KEEPS_ALL else None
    fractions = (0.3, 0.6) if bins is None else (*bins.fractions, 1.0)
    first, second = fractions[:2]
    values |= {
        "alpha": 0 if bins is None else bins.alpha,
        "low_bins": 1 if bins is None else len(bins.fractions),
        "fraction": first,
        "rise": (second - first) / (1.0 - first) if first < 1.0 else RISE,
        "early_exit": values.get("width") == 1,
    }
    return values


def _nearest(value: Any, distribution: BaseDistribution) -> Any:
    """The value that a parameter can take, a number's nearest; None where there is none."""
    if isinstance(distribution, CategoricalDistribution):
        return value if value in distribution.choices else None
    assert isinstance(distribution, (IntDistribution, FloatDistribution))
    low, high = distribution.low, distribution.high
    return None if value is None else type(low)(min(max(value, low), high))


def _window(chosen: Mapping[str, Any], gamma: int) -> dict[str, Any]:
    """The document of a window by its parameters."""
    if chosen["window"] == "fixed":
        return {"kind": "fixed", "gamma": gamma}
    window: dict[str, Any] = {"kind": chosen["window"], "gamma_max": gamma}
    for name in WINDOWS[chosen["window"]]:
        value = chosen[name]
        window[name] = round(value, 4) if isinstance(value, float) else value
    least = min(window.get("gamma_min", 0), gamma)
    if "gamma_min" in window:
        window["gamma_min"] = least
    if "gamma_initial" in window:
        window["gamma_initial"] = min(max(window["gamma_initial"], least), gamma)
    return window


def _tree(chosen: Mapping[str, Any], limit: TreeLimit, depth: int) -> dict[str, Any]:
    """The blocks of a policy of trees by their parameters."""
    if chosen["growth"] == "static":
        paths = limit.static[min(chosen["tree"], len(limit.static) - 1)]
        return {"growth": {"kind": "static", "paths": paths}}
    if chosen["growth"] == "classifier":
        growth = limit.grower(chosen["beta"], chain=chosen["early_exit"])
        if chosen["early_exit"] or chosen["top_n"] == KEEPS_ALL:
            return {"growth": growth}
    else:
        width = min(chosen["width"], limit.width)
        growth = {"kind": "top_k", "width": width, "score": chosen["score"]}
        if chosen["score"] == "coupled":
            growth["sharpness"] = round(chosen["sharpness"], 2)
    blocks: dict[str, Any] = {"growth": growth, "select": {"top_n": chosen["top_n"]}}
    alpha = min(chosen["alpha"], limit.depth - depth)
    if alpha > 0 and limit.bins is not None:
        first = round(chosen["fraction"], 2)
        fractions = [first, round(first + chosen["rise"] * (1.0 - first), 2), 1.0]
        kept = fractions[: chosen["low_bins"]]
        blocks["stratify"] = {"artifact": limit.bins, "alpha": alpha, "fractions": kept}
    return blocks


def with_shortlist(policy: Policy, block: dict[str, Any]) -> Policy:
    """A policy with the shortlist of a document."""
    return _policy(**{**policy.spelled_out(), "shortlist": block})


def _policy(draft: str, window: dict[str, Any], **blocks: Any) -> Policy:
    return parse_policy({"draft": draft, "window": window, **blocks}, where="search space")


def _ask(trial: optuna.trial.Trial, name: str, distribution: BaseDistribution) -> Any:
    """A value of one parameter."""
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    assert isinstance(distribution, (IntDistribution, FloatDistribution))
    ask = trial.suggest_int if isinstance(distribution, IntDistribution) else trial.suggest_float
    return ask(name, distribution.low, distribution.high, log=distribution.log)

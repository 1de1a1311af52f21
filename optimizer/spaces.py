"""The joint space of policies: what a search may use, the small families that are enumerated whole,
and the parameters of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

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
    ClassifierGrowth,
    Policy,
    StaticGrowth,
    TopKGrowth,
    parse_plain_policy,
)
from spectune.runtime.recording.trees import SHARPNESSES

WINDOW_ORDER = ("fixed", "fsm", "heuristic", "cache_fsm", "analytic", "q_learning")
"""Windows from the simplest to the most elaborate."""
STOP_ORDER = ("none", "max_prob", "joint_prob", "entropy")
GROWTH_ORDER = ("chain", "static", "top_k", "classifier")
SHORTLIST_ORDER = ("full", "frequency", "position_frequency", "clusters")
PASSES = {"frequency": "fixed", "position_frequency": "fixed", "clusters": "routed"}
"""What a profile calls the passes of each kind of shortlist."""
SHARES = (4, 8, 16, 32)
"""Parts of the vocabulary that the papers' shortlists are tried with."""


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


def enumerated(drafts: Sequence[str], gamma_max: int) -> list[Policy]:
    """The small families, whole: every fixed window, state machine and transformers' schedule of
    every draft."""
    policies = [AUTOREGRESSIVE]
    for draft in drafts:
        for gamma in range(1, gamma_max + 1):
            policies.append(_policy(draft, {"kind": "fixed", "gamma": gamma}))
            for kind in ("fsm", "cache_fsm"):
                for least in (0, 1):
                    policies.append(
                        _policy(draft, {"kind": kind, "gamma_max": gamma, "gamma_min": least})
                    )
        policies.append(transformers_heuristic(draft, gamma_max))
        for gamma in (4, 8, gamma_max):
            if gamma <= gamma_max:
                policies.append(_policy(draft, {"kind": "analytic", "gamma_max": gamma}))
                policies.append(_policy(draft, {"kind": "q_learning", "gamma_max": gamma}))
                policies.append(
                    _policy(
                        draft,
                        {"kind": "fixed", "gamma": gamma},
                        {"kind": "max_prob", "threshold": 0.4},
                    )
                )
    return list({p.id: p for p in policies}.values())


KEEPS_ALL = DEFAULT_TOP_N + 4
"""The ``top_n`` parameter by which a classifier's trees keep every node, as the paper's do."""
RISE = 3 / 7
"""What the second of HeteroSpec's fractions has of the way from the first to 1 (the paper's 0.3,
0.6, 1.0)."""
BETAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85)
"""C2T's thresholds that are tried."""
SCORES = ("auto", *(f"coupled {s:g}" for s in SHARPNESSES))
"""Scores of top-k growth that are tried with every draft: those that every recording covers."""
CALIBRATED = "calibrated"
"""The score with the sharpness that was calibrated on the draft's recorded trees, as a parameter.
"""


@dataclass(frozen=True)
class TreeLimit:
    """Trees that may be tried with one draft: what was recorded of it (``width``, ``depth``), and
    what was fitted on that: ids of ``bins`` and ``classifier`` (with the ``grown`` width and cap it
    was covered at), ``static`` trees as rank paths, and the ``sharpness`` of its score, None where
    those of :data:`SCORES` do as well."""

    width: int
    depth: int
    bins: str | None = None
    classifier: str | None = None
    grown: int = 8
    static: tuple[tuple[tuple[int, ...], ...], ...] = ()
    sharpness: float | None = None

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores that are worth trying."""
        return SCORES if self.sharpness is None else (CALIBRATED, *SCORES)

    def score(self, name: str) -> dict[str, Any]:
        """What a growth's document says for one of :data:`SCORES` or :data:`CALIBRATED`."""
        kind, _, said = name.partition(" ")
        sharpness = self.sharpness if name == CALIBRATED else float(said) if said else None
        found: dict[str, Any] = {"score": "coupled" if name == CALIBRATED else kind}
        return found if sharpness is None else {**found, "sharpness": sharpness}

    def can_grow(self, growth: str) -> bool:
        """Whether there are trees of a kind of growth."""
        fitted = {"static": bool(self.static), "classifier": self.classifier is not None}
        return growth != "chain" and fitted.get(growth, True)

    def grower(self, beta: float, *, chain: bool = False) -> dict[str, Any]:
        """The document of C2T's growth at a threshold; ``chain``: its chain mode, an early exit."""
        width = 1 if chain else self.grown
        return {
            "kind": "classifier",
            "width": width,
            "cap": width,
            "beta": beta,
            "artifact": self.classifier,
        }


def enumerated_trees(trees: Mapping[str, TreeLimit]) -> list[Policy]:
    """The tree families, by draft: EAGLE-2's width x depth x N whole on a grid, static trees, C2T's
    thresholds on trees and chains, HeteroSpec with the paper's alpha and fractions, adaptive
    depths, and AdaEDL's stop."""
    return [policy for draft, limit in trees.items() for policy in _tree_families(draft, limit)]


@lru_cache(maxsize=16)
def _tree_families(draft: str, limit: TreeLimit) -> tuple[Policy, ...]:
    """:func:`enumerated_trees` of one draft; a tuning searches several times."""
    policies: list[Policy] = []

    def add(growth: dict[str, Any], window: dict[str, Any], **blocks: Any) -> None:
        policies.append(_parsed({"draft": draft, "growth": growth, "window": window, **blocks}))

    sizes = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, DEFAULT_TOP_N)
    for width in (w for w in (2, 3, 4, 6, 8, 10, 16) if w <= limit.width):
        scores: list[dict[str, Any]] = [
            {"kind": "top_k", "width": width, **limit.score(name)} for name in limit.scores
        ]
        papers, sharpest = scores[-len(SCORES)], scores[-1]
        for depth in range(1, limit.depth + 1):
            fixed = {"kind": "fixed", "gamma": depth}
            pool = width + (depth - 1) * width * width
            for n in (n for n in sizes if depth <= n <= pool):
                for growth in scores:
                    add(growth, fixed, select={"top_n": n})
                alpha = min((depth + 1) // 2, limit.depth - depth)
                if limit.bins is not None and alpha > 0 and n >= 6:
                    bins = {"artifact": limit.bins, "alpha": alpha, "fractions": [0.3, 0.6, 1.0]}
                    for growth in (papers, sharpest):
                        add(growth, fixed, select={"top_n": n}, stratify=bins)
        for growth in (papers, sharpest):
            for n in (n for n in sizes if 4 <= n <= 32):
                for kind in ("fsm", "cache_fsm", "analytic"):
                    add(growth, {"kind": kind, "gamma_max": limit.depth}, select={"top_n": n})
                for threshold in (0.3, 0.5):
                    stop = {"kind": "entropy", "threshold": threshold}
                    add(
                        growth,
                        {"kind": "fixed", "gamma": limit.depth},
                        select={"top_n": n},
                        stop=stop,
                    )
    for paths in limit.static:
        add(
            {"kind": "static", "paths": paths},
            {"kind": "fixed", "gamma": max(len(p) for p in paths)},
        )
    if limit.classifier is not None:
        for beta in BETAS:
            for depth in sorted({2, 3, 4, 6, limit.depth}):
                if depth <= limit.depth:
                    add(limit.grower(beta), {"kind": "fixed", "gamma": depth})
            add(limit.grower(beta, chain=True), {"kind": "fixed", "gamma": limit.depth})
    return tuple({p.id: p for p in policies}.values())


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
        have = {
            "frequency": self.frequencies,
            "position_frequency": self.frequencies,
            "clusters": self.router,
        }
        return tuple(kind for kind, artifact in have.items() if artifact is not None)

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
        return {
            "kind": kind,
            name: min(chosen[name], max(1, self.rows // 2)),
            "artifact": self.frequencies,
        }

    def holds(self, policy: Policy) -> bool:
        """Whether a policy's shortlist is one of these."""
        artifact = getattr(policy.shortlist, "artifact", "")
        return policy.shortlist.kind in self.kinds and artifact in (self.frequencies, self.router)

    def judged(self, policy: Policy) -> list[tuple[frozenset[str], Policy]]:
        """For each fold its requests, and a policy with a shortlist of these fits as it would be
        without them; [] for other policies."""
        name = getattr(policy.shortlist, "artifact", None)
        found = []
        for fold in self.apart:
            instead = (
                fold.frequencies
                if name == self.frequencies
                else fold.router
                if name == self.router
                else None
            )
            if name is not None and instead is not None:
                shortlist = policy.shortlist.model_copy(update={"artifact": instead})
                found.append((fold.requests, policy.model_copy(update={"shortlist": shortlist})))
        return found

    def papers(self, share: int) -> list[dict[str, Any]]:
        """The papers' settings at a ``share``-th of the vocabulary: FR-Spec, PA-FR, and DynaSpec's
        clusters, which get fewer by step."""
        size, k0 = max(1, self.rows // share), max(1, self.clusters // share)
        chosen = {
            "size": size,
            "k_max": size,
            "k0": k0,
            "k1": max(1, k0 // 2),
            "k_min": max(1, k0 // 4),
        }
        found = (self.block({**chosen, "shortlist": kind}) for kind in self.kinds)
        return [block for block in found if block is not None]


def with_shortlist(policy: Policy, block: dict[str, Any]) -> Policy:
    """A policy with the shortlist of a document."""
    return _parsed({**policy.spelled_out(), "shortlist": block})


def transformers_heuristic(draft: str, gamma_max: int) -> Policy:
    """transformers' heuristic schedule with its other defaults: 20 tokens to begin with, confidence
    threshold 0.4.

    (Its default schedule is ``constant`` by now; it also adapts the threshold, which stays here.)
    Windows are capped at ``gamma_max``. The confidence stop is left out for drafts without
    probabilities.
    """
    stop = {"kind": "none"} if draft == "ngram" else {"kind": "max_prob", "threshold": 0.4}
    return _policy(
        draft,
        {"kind": "heuristic", "gamma_max": gamma_max, "gamma_initial": min(20, gamma_max)},
        stop,
    )


@dataclass(frozen=True)
class Space:
    """The joint space of draft x window x stop as Optuna parameters; with ``trees`` also of growth
    x selection x bins, with ``shortlists`` of what the draft evaluates of its output head."""

    drafts: tuple[str, ...]
    gamma_max: int
    kinds: Kinds = ALL_KINDS
    trees: Mapping[str, TreeLimit] = field(default_factory=dict)
    shortlists: Mapping[str, ShortlistLimit] = field(default_factory=dict)

    def distributions(self, chosen: Mapping[str, Any]) -> dict[str, BaseDistribution]:
        """The parameters that exist beside those ``chosen``: at first the kinds of blocks, then
        what these have, then what a shortlist has."""
        found: dict[str, BaseDistribution] = {
            "draft": CategoricalDistribution(self.drafts),
            "window": CategoricalDistribution(self.kinds.windows),
            "stop": CategoricalDistribution(self.kinds.stops),
        }
        if self.trees:
            found["growth"] = CategoricalDistribution(self.kinds.growths)
        if not chosen:
            return found
        window, stop = chosen["window"], chosen["stop"]
        found["gamma"] = IntDistribution(1, self.gamma_max)
        if window == "analytic":
            found["history"] = IntDistribution(2, 64, log=True)
            found["acc_max"] = FloatDistribution(0.8, 0.995)
            found["estimator"] = CategoricalDistribution(("ratio", "table"))
        if window in ("analytic", "fsm", "cache_fsm"):
            found["gamma_min"] = IntDistribution(0, 2)
        if window in ("analytic", "fsm", "cache_fsm", "heuristic"):
            found["gamma_initial"] = IntDistribution(1, min(8, self.gamma_max))
        if window == "heuristic":
            found["transient"] = CategoricalDistribution((False, True))
        if window == "q_learning":
            found["learning_rate"] = FloatDistribution(0.02, 0.5, log=True)
            found["discount"] = FloatDistribution(0.0, 0.95)
            found["epsilon"] = FloatDistribution(0.005, 0.2, log=True)
            found["memory"] = IntDistribution(1, 2)
            found["reward"] = CategoricalDistribution(("accepted", "speed"))
        if stop == "max_prob":
            found["max_prob"] = FloatDistribution(0.02, 0.95)
        if stop == "joint_prob":
            found["joint_prob"] = FloatDistribution(0.005, 0.9, log=True)
        if stop == "entropy":
            found["entropy"] = FloatDistribution(0.05, 0.9)
        if self.trees:
            found |= self._of_growth(chosen["growth"])
        if chosen["draft"] in self.shortlists:
            found |= self._of_shortlist(chosen.get("shortlist", "full"))
        return found

    def _of_growth(self, growth: str) -> dict[str, BaseDistribution]:
        found: dict[str, BaseDistribution] = {}
        if growth in ("top_k", "classifier"):
            found["top_n"] = IntDistribution(2, KEEPS_ALL, log=True)
            found["alpha"] = IntDistribution(0, 4 if self.kinds.bins else 0)
            found["low_bins"] = IntDistribution(1, 3)
            found["fraction"] = FloatDistribution(0.2, 0.8)
            found["rise"] = FloatDistribution(0.0, 1.0)
        if growth == "top_k":
            found["width"] = IntDistribution(
                2, max(2, *(limit.width for limit in self.trees.values()))
            )
            found["score"] = CategoricalDistribution((*SCORES, CALIBRATED))
        if growth == "classifier":
            found["beta"] = CategoricalDistribution(BETAS)
            found["early_exit"] = CategoricalDistribution((False, True))
        if growth == "static":
            found["tree"] = IntDistribution(
                0, max(1, *(len(limit.static) for limit in self.trees.values())) - 1
            )
        return found

    def _of_shortlist(self, kind: str) -> dict[str, BaseDistribution]:
        limits = self.shortlists.values()
        there = {"full", *(kind for limit in limits for kind in limit.kinds)} & set(
            self.kinds.shortlists
        )
        found: dict[str, BaseDistribution] = {
            "shortlist": CategoricalDistribution(tuple(k for k in SHORTLIST_ORDER if k in there))
        }
        rows = max(limit.rows for limit in limits)
        if kind in ("frequency", "position_frequency"):
            found["size" if kind == "frequency" else "k_max"] = IntDistribution(
                max(1, rows // 64), max(1, rows // 2), log=True
            )
        if kind == "clusters":
            most = max(limit.clusters for limit in limits)
            found |= {
                name: IntDistribution(1, max(1, most // 2), log=True)
                for name in ("k0", "k1", "k_min")
            }
        return found

    def suggest(self, trial: optuna.trial.Trial) -> Policy:
        """One policy of the space."""
        chosen: dict[str, Any] = {}
        while asked := [
            (name, one) for name, one in self.distributions(chosen).items() if name not in chosen
        ]:
            chosen |= {name: _ask(trial, name, one) for name, one in asked}
        return self.policy(chosen)

    def policy(self, chosen: Mapping[str, Any]) -> Policy:
        """The policy of a set of parameters."""
        limit = self.trees.get(chosen["draft"])
        if limit is not None and not limit.can_grow(chosen["growth"]):
            limit = None
        gamma = chosen["gamma"] if limit is None else min(chosen["gamma"], limit.depth)
        stop: dict[str, Any] = {"kind": chosen["stop"]}
        if chosen["stop"] != "none":
            stop["threshold"] = round(chosen[chosen["stop"]], 4)
        document: dict[str, Any] = {
            "draft": chosen["draft"],
            "window": _window(chosen, gamma),
            "stop": stop,
        }
        if limit is not None:
            document |= _tree(chosen, limit, gamma)
        if "shortlist" in chosen:
            block = self.shortlists[chosen["draft"]].block(chosen)
            document |= {} if block is None else {"shortlist": block}
        return _parsed(document)

    def params(self, policy: Policy) -> dict[str, Any] | None:
        """The parameters of a policy, to seed a study; None for one outside the space. Without
        trees, or shortlists, what a policy has of these is ignored."""
        window, stop, shortlist = policy.window, policy.stop, policy.shortlist
        if (
            not policy.speculates
            or policy.draft not in self.drafts
            or policy.gamma_max > self.gamma_max
        ):
            return None
        found: dict[str, Any] = {
            "draft": policy.draft,
            "window": window.kind,
            "stop": stop.kind,
            "gamma": policy.gamma_max,
        }
        if self.trees:
            grown = self._tree_params(policy)
            if grown is None:
                return None
            found |= grown
        limit = self.shortlists.get(policy.draft)
        if self.shortlists and policy.shortlisted and (limit is None or not limit.holds(policy)):
            return None
        if limit is not None:
            found["shortlist"] = shortlist.kind
        for name, distribution in self.distributions(found).items():
            if name in found:
                continue
            value = (
                getattr(stop, "threshold", None)
                if name == stop.kind
                else getattr(window, name, getattr(shortlist, name, None))
            )
            if name == "gamma_initial" and value is None:
                value = getattr(window, "first", 1)
            if isinstance(distribution, (IntDistribution, FloatDistribution)):
                value = type(distribution.low)(min(max(value, distribution.low), distribution.high))
            elif value not in getattr(distribution, "choices", ()):
                return None
            found[name] = value
        return found

    def _tree_params(self, policy: Policy) -> dict[str, Any] | None:
        growth, limit = policy.growth, self.trees.get(policy.draft, TreeLimit(0, 0))
        if growth.kind not in self.kinds.growths:
            return None
        found: dict[str, Any] = {"growth": growth.kind}
        if isinstance(growth, StaticGrowth):
            known = [frozenset(paths) for paths in limit.static]
            if frozenset(growth.paths) not in known:
                return None
            found["tree"] = known.index(frozenset(growth.paths))
        if isinstance(growth, (TopKGrowth, ClassifierGrowth)):
            top_n = KEEPS_ALL if policy.select.top_n is None else policy.select.top_n
            if not 2 <= top_n <= KEEPS_ALL:
                return None
            found["top_n"] = top_n
            bins = policy.stratify
            found["alpha"] = 0 if bins is None else min(4, bins.alpha)
            found["low_bins"] = 1 if bins is None else min(3, len(bins.fractions))
            first, second = (
                (0.3, 0.6) if bins is None else (bins.fractions[0], (*bins.fractions, 1.0)[1])
            )
            found["fraction"] = min(0.8, max(0.2, first))
            found["rise"] = (
                min(1.0, max(0.0, (second - first) / (1.0 - first))) if first < 1.0 else RISE
            )
        if isinstance(growth, TopKGrowth):
            found["width"] = max(2, growth.width)
            said = growth.model_dump().items()
            found["score"] = next(
                (s for s in limit.scores if limit.score(s).items() <= said), SCORES[0]
            )
        if isinstance(growth, ClassifierGrowth):
            if growth.beta not in BETAS:
                return None
            found["beta"] = growth.beta
            found["early_exit"] = growth.width == 1
        return found


def _window(chosen: Mapping[str, Any], gamma: int) -> dict[str, Any]:
    """The document of a window by its parameters."""
    if chosen["window"] == "fixed":
        return {"kind": "fixed", "gamma": gamma}
    window: dict[str, Any] = {"kind": chosen["window"], "gamma_max": gamma}
    for name in (
        "history", "acc_max", "estimator", "gamma_min", "gamma_initial", "transient",
        "learning_rate", "discount", "epsilon", "memory", "reward",
    ):  # fmt: skip
        if name in chosen:
            window[name] = (
                round(chosen[name], 4) if isinstance(chosen[name], float) else chosen[name]
            )
    if "gamma_min" in window:
        window["gamma_min"] = min(window["gamma_min"], gamma)
    if "gamma_initial" in window:
        window["gamma_initial"] = min(
            max(window["gamma_initial"], window.get("gamma_min", 0)), gamma
        )
    return window


def _tree(chosen: Mapping[str, Any], limit: TreeLimit, depth: int) -> dict[str, Any]:
    """The blocks of a policy of trees by their parameters."""
    if chosen["growth"] == "static":
        return {
            "growth": {
                "kind": "static",
                "paths": limit.static[min(chosen["tree"], len(limit.static) - 1)],
            }
        }
    if chosen["growth"] == "classifier":
        growth = limit.grower(chosen["beta"], chain=chosen["early_exit"])
        if chosen["early_exit"] or chosen["top_n"] == KEEPS_ALL:
            return {"growth": growth}
    else:
        growth = {
            "kind": "top_k",
            "width": min(chosen["width"], limit.width),
            **limit.score(chosen["score"]),
        }
    blocks: dict[str, Any] = {"growth": growth, "select": {"top_n": chosen["top_n"]}}
    alpha = min(chosen["alpha"], limit.depth - depth)
    if alpha > 0 and limit.bins is not None:
        first = round(chosen["fraction"], 2)
        fractions = [first, round(first + chosen["rise"] * (1.0 - first), 2), 1.0][
            : chosen["low_bins"]
        ]
        blocks["stratify"] = {"artifact": limit.bins, "alpha": alpha, "fractions": fractions}
    return blocks


def _parsed(document: dict[str, Any]) -> Policy:
    return parse_plain_policy(document, where="search space")


def _policy(draft: str, window: dict[str, Any], stop: dict[str, Any] | None = None) -> Policy:
    return _parsed({"draft": draft, "window": window, **({"stop": stop} if stop else {})})


def _ask(trial: optuna.trial.Trial, name: str, distribution: BaseDistribution) -> Any:
    """A value of one parameter."""
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
    assert isinstance(distribution, FloatDistribution)
    return trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)

"""Searching policies on a recorded trace: enumerate what is small, give Optuna the rest.

Every trial is a replay, so nothing is pruned or extrapolated. Fixed windows, state machines, schedules and trees are enumerated, and the
papers' shortlists on the best of these; the joint space of draft, window, growth, stop, selection, bins, shortlist and their parameters
goes to a TPE study in memory, seeded with the incumbents and with the best that was enumerated. Within a tie the simpler policy wins.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from optimizer.replay import ReplayTrace, replay, run_replay
from runtime.policies.document import (
    AUTOREGRESSIVE,
    DEFAULT_TOP_N,
    ChainGrowth,
    ChooserPolicy,
    ClassifierGrowth,
    FullShortlist,
    Policy,
    Select,
    StaticGrowth,
    TopKGrowth,
    parse_policy,
)
from runtime.policies.prepared import QTables
from runtime.policies.tree_rules import Artifacts
from runtime.tree_panorama import SHARPNESSES
from traces.errors import PolicyError, TraceError
from traces.schema import LatencyProfile, Outcome

TIE = 0.01
"""Relative difference in predicted tokens/s below which the simpler policy is preferred."""

PREDICTION_ERROR = 0.06
"""Relative difference in predicted tokens/s below which execution has to tell which policy is faster."""

WINDOW_ORDER = ("fixed", "fsm", "heuristic", "cache_fsm", "analytic", "q_learning")
"""Windows from the simplest to the most elaborate."""
STOP_ORDER = ("none", "max_prob", "joint_prob", "entropy")
GROWTH_ORDER = ("chain", "static", "top_k", "classifier")
SHORTLIST_ORDER = ("full", "frequency", "position_frequency", "clusters")
PASSES = {"frequency": "fixed", "position_frequency": "fixed", "clusters": "routed"}
"""What a profile calls the passes of each kind of shortlist."""
LEAST_SHARE = 0.05
"""Part of a round's time that no saving on the draft's passes takes away."""
SHARES = (4, 8, 16, 32)
"""Parts of the vocabulary that the papers' shortlists are tried with."""
SHORTLISTED = 3
"""Chains, and trees, of each draft that the papers' shortlists are tried with, each of another family."""
MISSING_SHARE = 0.02
"""Share of rounds whose trees may read laws that were not recorded (they count as having no children) in a policy that is tried."""


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


@dataclass(frozen=True)
class Trial:
    """One policy tried: its predicted tokens/s on the search split, what proposed it, and the passes of its draft in a predicted second."""

    policy: Policy
    value: float
    origin: str
    passes_per_s: float = 0.0

    def reach(self, saved_s: float) -> float:
        """Its tokens/s if every pass of its draft took ``saved_s`` seconds less."""
        return self.value / max(LEAST_SHARE, 1.0 - saved_s * self.passes_per_s)

    def to_json(self) -> dict[str, Any]:
        return {"policy": self.policy.spelled_out(), "id": self.policy.id, "value": self.value, "origin": self.origin}


@dataclass(frozen=True)
class Study:
    """What a search tried, best first, and how to repeat it. ``bounds``: :func:`shortlist_bounds` of what was tried without shortlists,
    and ``shortlists``, by draft, the kinds that were searched."""

    trials: tuple[Trial, ...]
    seed: int
    sampler: str
    requests: tuple[str, ...] = field(default=())
    bounds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    shortlists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def best(self, match: Callable[[Policy], bool] = lambda policy: True) -> Trial | None:
        """The fastest trial whose policy matches; ties within 1% go to the simpler."""
        fitting = [t for t in self.trials if match(t.policy)]
        if not fitting:
            return None
        top = max(t.value for t in fitting)
        return min((t for t in fitting if t.value >= top * (1 - TIE)), key=lambda t: (complexity(t.policy), -t.value))

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "sampler": self.sampler,
            "requests": list(self.requests),
            "shortlists": self.on_shortlists(),
            "trials": [t.to_json() for t in self.trials],
        }

    def on_shortlists(self) -> dict[str, Any]:
        """By draft the kinds of shortlists that were searched, and why no others: what each kind of pass could gain at most over the
        fastest policy without a shortlist. JSON-ready."""
        searched = {draft: list(kinds) for draft, kinds in self.shortlists.items()}
        bounds = {d: {kind: round(b - 1.0, 4) for kind, b in found.items()} for d, found in self.bounds.items()}
        return {"searched": searched, "most_gained": bounds, "least_worth": TIE}


def complexity(policy: Policy) -> tuple[int, int, int, int, int]:
    """Orders policies from simple to elaborate: no speculation, chains before trees, whole heads before shortlists, then by the kinds of
    window and stop, then the shorter window. Choosers of drafts come last."""
    growth = GROWTH_ORDER.index(policy.growth.kind) + len(GROWTH_ORDER) * int(policy.stratify is not None)
    growth += 2 * len(GROWTH_ORDER) * int(isinstance(policy, ChooserPolicy))
    return (
        int(policy.speculates) + growth,
        SHORTLIST_ORDER.index(policy.shortlist.kind),
        WINDOW_ORDER.index(policy.window.kind),
        STOP_ORDER.index(policy.stop.kind),
        policy.gamma_max,
    )


def enumerated(drafts: Sequence[str], gamma_max: int) -> list[Policy]:
    """The small families, whole: every fixed window, state machine and transformers' schedule of every draft."""
    policies = [AUTOREGRESSIVE]
    for draft in drafts:
        for gamma in range(1, gamma_max + 1):
            policies.append(_policy(draft, {"kind": "fixed", "gamma": gamma}))
            for kind in ("fsm", "cache_fsm"):
                for least in (0, 1):
                    policies.append(_policy(draft, {"kind": kind, "gamma_max": gamma, "gamma_min": least}))
        policies.append(transformers_heuristic(draft, gamma_max))
        for gamma in (4, 8, gamma_max):
            if gamma <= gamma_max:
                policies.append(_policy(draft, {"kind": "analytic", "gamma_max": gamma}))
                policies.append(_policy(draft, {"kind": "q_learning", "gamma_max": gamma}))
                policies.append(_policy(draft, {"kind": "fixed", "gamma": gamma}, {"kind": "max_prob", "threshold": 0.4}))
    return list({p.id: p for p in policies}.values())


BETAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85)
"""C2T's thresholds that are tried."""


SCORES = ("auto", *(f"coupled {s:g}" for s in SHARPNESSES))
"""Scores of top-k growth that are tried: those that every recording covers."""


def _score(name: str) -> dict[str, Any]:
    kind, _, sharpness = name.partition(" ")
    return {"score": kind, **({"sharpness": float(sharpness)} if sharpness else {})}


@dataclass(frozen=True)
class TreeLimit:
    """Trees that may be tried with one draft: what was recorded of it (``width``, ``depth``), and what was fitted on that:
    ids of ``bins`` and
    ``classifier`` (with the ``grown`` width and cap it was covered at), and ``static`` trees as rank paths."""

    width: int
    depth: int
    bins: str | None = None
    fitted_depth: int = 0
    classifier: str | None = None
    grown: int = 8
    static: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def grower(self, beta: float) -> dict[str, Any]:
        """The document of C2T's growth at a threshold."""
        return {"kind": "classifier", "width": self.grown, "cap": self.grown, "beta": beta, "artifact": self.classifier}


def enumerated_trees(trees: Mapping[str, TreeLimit]) -> list[Policy]:
    """The tree families, by draft: EAGLE-2's width x depth x N whole on a grid, static trees, C2T's thresholds, HeteroSpec with the paper's
    alpha and fractions, adaptive depths, and AdaEDL's stop."""
    policies: list[Policy] = []

    def add(draft: str, growth: dict[str, Any], window: dict[str, Any], **blocks: Any) -> None:
        policies.append(parse_policy({"draft": draft, "growth": growth, "window": window, **blocks}, where="search space"))

    for draft, limit in trees.items():
        sizes = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, DEFAULT_TOP_N)
        for width in (w for w in (2, 3, 4, 6, 8, 10, 16) if w <= limit.width):
            scores: list[dict[str, Any]] = [{"kind": "top_k", "width": width, **_score(name)} for name in SCORES]
            papers, sharpest = scores[0], scores[-1]
            for depth in range(1, limit.depth + 1):
                fixed = {"kind": "fixed", "gamma": depth}
                pool = width + (depth - 1) * width * width
                for n in (n for n in sizes if depth <= n <= pool):
                    for growth in scores:
                        add(draft, growth, fixed, select={"top_n": n})
                    alpha = min((depth + 1) // 2, limit.depth - depth)
                    if limit.bins is not None and alpha > 0 and n >= 6:
                        bins = {"artifact": limit.bins, "alpha": alpha, "fractions": [0.3, 0.6, 1.0]}
                        for growth in (papers, sharpest):
                            add(draft, growth, fixed, select={"top_n": n}, stratify=bins)
            for growth in (papers, sharpest):
                for n in (n for n in sizes if 4 <= n <= 32):
                    for kind in ("fsm", "cache_fsm", "analytic"):
                        add(draft, growth, {"kind": kind, "gamma_max": limit.depth}, select={"top_n": n})
                    for threshold in (0.3, 0.5):
                        stop = {"kind": "entropy", "threshold": threshold}
                        add(draft, growth, {"kind": "fixed", "gamma": limit.depth}, select={"top_n": n}, stop=stop)
        for paths in limit.static:
            add(draft, {"kind": "static", "paths": paths}, {"kind": "fixed", "gamma": max(len(p) for p in paths)})
        if limit.classifier is not None:
            for beta in BETAS:
                for depth in sorted({2, 3, 4, 6, limit.depth}):
                    if depth <= limit.depth:
                        add(draft, limit.grower(beta), {"kind": "fixed", "gamma": depth})
    return list({p.id: p for p in policies}.values())


@dataclass(frozen=True)
class ShortlistLimit:
    """Shortlists that may be tried with one draft, whose output head has ``rows`` tokens: ids of what was fitted and can be replayed,
    ``frequencies``, and a ``router`` of ``clusters`` (M)."""

    rows: int
    frequencies: str | None = None
    router: str | None = None
    clusters: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of shortlists that can be tried, without ``full``."""
        have = {"frequency": self.frequencies, "position_frequency": self.frequencies, "clusters": self.router}
        return tuple(kind for kind, artifact in have.items() if artifact is not None)

    def only(self, kinds: Iterable[str]) -> ShortlistLimit:
        """The same with shortlists of these kinds of passes (``fixed``, ``routed``) alone."""
        kept = set(kinds)
        return replace(
            self, frequencies=self.frequencies if "fixed" in kept else None, router=self.router if "routed" in kept else None
        )

    def block(self, chosen: Mapping[str, Any]) -> dict[str, Any] | None:
        """The document of a shortlist by its parameters, lowered to what the draft has; None where that is the whole head."""
        kind = chosen["shortlist"]
        if kind not in self.kinds:
            return None
        if kind == "clusters":
            k0 = min(chosen["k0"], self.clusters)
            k1 = min(chosen["k1"], k0)
            least = min(chosen["k_min"], k1)
            if least == self.clusters:
                return None
            return {"kind": kind, "k0": k0, "k1": k1, "k_min": least, "artifact": self.router}
        name = "size" if kind == "frequency" else "k_max"
        if kind == "frequency" and chosen[name] >= self.rows:
            return None
        return {"kind": kind, name: min(chosen[name], self.rows), "artifact": self.frequencies}

    def papers(self, share: int) -> list[dict[str, Any]]:
        """The papers' settings at a ``share``-th of the vocabulary: FR-Spec, PA-FR, and DynaSpec's clusters, which get fewer by step."""
        size, k0 = max(1, self.rows // share), max(1, self.clusters // share)
        chosen = {"size": size, "k_max": size, "k0": k0, "k1": max(1, k0 // 2), "k_min": max(1, k0 // 4)}
        found = (self.block({**chosen, "shortlist": kind}) for kind in self.kinds)
        return [block for block in found if block is not None]


def shortlist_bounds(trials: Iterable[Trial], profile: LatencyProfile) -> dict[str, dict[str, float]]:
    """By draft and kind of pass (``fixed``, ``routed``) the speed that shortlists could reach over the fastest trial without any, if
    every pass took what the smallest measured size takes and no less were accepted than with the whole head.

    A shortlist may also keep a wrong proposal out, so this is an estimate, and seldom a low one. Drafts of which no shortlist was
    measured, or nothing was tried, are left out.
    """
    plain = [t for t in trials if not t.policy.shortlisted]
    fastest = max((t.value for t in plain), default=0.0)
    found: dict[str, dict[str, float]] = {}
    for draft in profile.shortlist_s:
        own = [t for t in plain if t.policy.draft == draft]
        if own and fastest > 0:
            found[draft] = {
                kind: max(t.reach(saved_s(profile, draft, kind)) for t in own) / fastest for kind in ("fixed", "routed")
            }
    return found


def saved_s(profile: LatencyProfile, draft: str, kind: str) -> float:
    """Seconds that a pass over a shortlist of the smallest measured size saves, at least 0. (The least of many noisy costs would say more
    than there is.)"""
    return max(0.0, -profile.shortlist_pass_s(draft, kind, profile.shortlist_s[draft][kind].widths[0]))


def worth_trying(bounds: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[str, ...]]:
    """By draft the kinds of passes whose shortlists could win, that is gain more than a tie; drafts without any are left out."""
    kept = {draft: tuple(kind for kind, bound in found.items() if bound > 1.0 + TIE) for draft, found in bounds.items()}
    return {draft: kinds for draft, kinds in kept.items() if kinds}


def enumerated_shortlists(
    trials: Iterable[Trial], shortlists: Mapping[str, ShortlistLimit], profile: LatencyProfile
) -> list[Policy]:
    """The papers' shortlists (a quarter of the vocabulary down to a 32nd) on the best chains and trees of each draft: those that would be
    fastest if passes took what the smallest shortlist takes."""
    policies: list[Policy] = []
    known = list(trials)
    for draft, limit in shortlists.items():
        saved = max(saved_s(profile, draft, PASSES[kind]) for kind in limit.kinds)
        own = [t for t in known if t.policy.draft == draft and t.policy.speculates and not t.policy.shortlisted]
        own.sort(key=lambda t: -t.reach(saved))
        for tree in (False, True):
            families: dict[tuple[str, ...], Policy] = {}
            for trial in own:
                if trial.policy.is_tree == tree and len(families) < SHORTLISTED:
                    families.setdefault(_family(trial.policy), trial.policy)
            for policy in families.values():
                policies += [_shortlisted(policy, block) for share in SHARES for block in limit.papers(share)]
    return list({p.id: p for p in policies}.values())


def _shortlisted(policy: Policy, block: dict[str, Any]) -> Policy:
    return parse_policy({**policy.spelled_out(), "shortlist": block}, where="search space")


def transformers_heuristic(draft: str, gamma_max: int) -> Policy:
    """transformers' heuristic schedule with its other defaults: 20 tokens to begin with, confidence threshold 0.4.

    (Its default schedule is ``constant`` by now; it also adapts the threshold, which stays here.) Windows are capped at
    ``gamma_max``. The confidence stop is left out for drafts without probabilities.
    """
    stop = {"kind": "none"} if draft == "ngram" else {"kind": "max_prob", "threshold": 0.4}
    return _policy(draft, {"kind": "heuristic", "gamma_max": gamma_max, "gamma_initial": min(20, gamma_max)}, stop)


def search(
    trace: ReplayTrace,
    profile: LatencyProfile,
    drafts: Sequence[str],
    *,
    gamma_max: int = 16,
    trials: int = 400,
    seed: int = 0,
    incumbents: Iterable[Policy] = (),
    progress: Callable[[int, int, float], None] = lambda done, total, best: None,
    q_tables: QTables | None = None,
    trees: Mapping[str, TreeLimit] | None = None,
    shortlists: Mapping[str, ShortlistLimit] | None = None,
    artifacts: Artifacts | None = None,
    known: Iterable[Trial] = (),
    kinds: Kinds = Kinds(),
    bounded: bool = True,
) -> Study:
    """Searches the joint space on a trace; ``gamma_max`` is the largest window tried (the panorama's, for policies with stops).
    ``trees`` and ``shortlists`` say of each draft what may be tried (none by default). Shortlists that could not win by
    :func:`shortlist_bounds` are left out, unless ``bounded`` is false. ``known``: what was tried on this trace and profile before; it is
    not tried again. ``kinds`` leaves other policies out, incumbents and known ones excepted.

    ``progress`` is called with (trials done, in all, best tokens/s). The result is a function of the arguments alone.
    """
    done: dict[str, Trial] = {t.policy.id: t for t in known}
    todo = [p for p in (*enumerated(drafts, gamma_max), *enumerated_trees(trees or {})) if kinds.hold(p)]
    total = len(todo) + trials
    best = max((t.value for t in done.values()), default=0.0)

    def evaluate(policy: Policy, origin: str) -> float:
        nonlocal best
        if policy.id not in done:
            replayed = run_replay(trace, policy, profile, q_tables=q_tables, artifacts=artifacts, approximate=True)
            if replayed.missing > MISSING_SHARE * replayed.total.rounds:
                return 0.0
            sums = replayed.total
            value = sums.tokens_per_s
            done[policy.id] = Trial(policy, value, origin, sums.draft_steps / sums.seconds if sums.seconds > 0 else 0.0)
            best = max(best, value)
        return done[policy.id].value

    for policy in incumbents:
        try:
            evaluate(policy, "incumbent")
        except (PolicyError, TraceError):
            continue  # one whose draft or artifact is gone, or whose trees were not recorded, cannot be replayed
    for i, policy in enumerate(todo):
        evaluate(policy, "enumerated")
        progress(i + 1, total, best)
    bounds = shortlist_bounds(done.values(), profile)
    worth = worth_trying(bounds)
    possible = {d: limit.only(worth.get(d, ()) if bounded else bounds.get(d, ())) for d, limit in (shortlists or {}).items()}
    possible = {d: limit for d, limit in possible.items() if set(limit.kinds) & set(kinds.shortlists)}
    more = [p for p in enumerated_shortlists(done.values(), possible, profile) if kinds.hold(p)]
    total += len(more)
    for i, policy in enumerate(more):
        evaluate(policy, "enumerated")
        progress(len(todo) + i + 1, total, best)
    plain = Space(tuple(drafts), gamma_max, kinds) if not trees else TreeSpace(tuple(drafts), gamma_max, kinds, dict(trees))
    space: Space | ShortlistSpace = ShortlistSpace(plain, possible) if possible else plain
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", optuna.exceptions.ExperimentalWarning
        )  # `group` is marked so; its results are only judged
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=40)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for trial in sorted(done.values(), key=lambda t: -t.value):
        params = space.params(trial.policy) if kinds.hold(trial.policy) else None
        if params is not None:
            study.enqueue_trial(params, skip_if_exists=True)
        if len(study.trials) >= max(10, trials // 10):
            break
    for i in range(trials):
        asked = study.ask()
        policy = space.suggest(asked)
        study.tell(asked, evaluate(policy, "optuna") if kinds.hold(policy) else 0.0)
        progress(total - trials + i + 1, total, best)
    ordered = sorted(done.values(), key=lambda t: -t.value)
    searched = {draft: limit.kinds for draft, limit in possible.items()}
    return Study(tuple(ordered), seed, "enumeration + TPE (multivariate, group)", trace.request_ids, bounds, searched)


@dataclass(frozen=True)
class Space:
    """The joint space of draft x window x stop, as Optuna parameters."""

    drafts: tuple[str, ...]
    gamma_max: int
    kinds: Kinds = Kinds()

    def distributions(self, window: str, stop: str) -> dict[str, BaseDistribution]:
        """The parameters that exist for one combination of window and stop."""
        gamma = IntDistribution(1, self.gamma_max)
        first = IntDistribution(1, min(8, self.gamma_max))
        found: dict[str, BaseDistribution] = {
            "draft": CategoricalDistribution(self.drafts),
            "window": CategoricalDistribution(self.kinds.windows),
            "stop": CategoricalDistribution(self.kinds.stops),
            "gamma": gamma,
        }
        if window == "analytic":
            found["history"] = IntDistribution(2, 64, log=True)
            found["acc_max"] = FloatDistribution(0.8, 0.995)
            found["estimator"] = CategoricalDistribution(("ratio", "table"))
        if window in ("analytic", "fsm", "cache_fsm"):
            found["gamma_min"] = IntDistribution(0, 2)
        if window in ("analytic", "fsm", "cache_fsm", "heuristic"):
            found["gamma_initial"] = first
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
        return found

    def suggest(self, trial: optuna.trial.Trial) -> Policy:
        """One policy of the space."""

        kinds = self.distributions("", "")
        chosen = {name: _ask(trial, name, kinds[name]) for name in ("draft", "window", "stop")}
        for name, distribution in self.distributions(chosen["window"], chosen["stop"]).items():
            if name not in chosen:
                chosen[name] = _ask(trial, name, distribution)
        return self.policy(chosen)

    def policy(self, chosen: dict[str, Any]) -> Policy:
        """The policy of a set of parameters."""
        kind = chosen["window"]
        if kind == "fixed":
            window: dict[str, Any] = {"kind": kind, "gamma": chosen["gamma"]}
        else:
            window = {"kind": kind, "gamma_max": chosen["gamma"]}
            for name in (
                "history", "acc_max", "estimator", "gamma_min", "gamma_initial", "transient",
                "learning_rate", "discount", "epsilon", "memory", "reward",
            ):  # fmt: skip
                if name in chosen:
                    window[name] = chosen[name]
            if "gamma_min" in window:
                window["gamma_min"] = min(window["gamma_min"], chosen["gamma"])
            if "gamma_initial" in window:
                window["gamma_initial"] = min(max(window["gamma_initial"], window.get("gamma_min", 0)), chosen["gamma"])
            for name in ("acc_max", "learning_rate", "discount", "epsilon"):
                if name in window:
                    window[name] = round(window[name], 4)
        stop: dict[str, Any] = {"kind": chosen["stop"]}
        if chosen["stop"] != "none":
            stop["threshold"] = round(chosen[chosen["stop"]], 4)
        return _policy(chosen["draft"], window, stop)

    def params(self, policy: Policy) -> dict[str, Any] | None:
        """The parameters of a policy, to seed a study; None for one outside the space."""
        window, stop = policy.window, policy.stop
        if not policy.speculates or policy.draft not in self.drafts or policy.gamma_max > self.gamma_max:
            return None
        found: dict[str, Any] = {"draft": policy.draft, "window": window.kind, "stop": stop.kind, "gamma": policy.gamma_max}
        for name, distribution in Space.distributions(self, window.kind, stop.kind).items():
            if name in found:
                continue
            value = getattr(stop, "threshold", None) if name == stop.kind else getattr(window, name, None)
            if name == "gamma_initial" and value is None:
                value = getattr(window, "first", 1)
            if isinstance(distribution, (IntDistribution, FloatDistribution)):
                value = type(distribution.low)(min(max(value, distribution.low), distribution.high))
            elif value not in getattr(distribution, "choices", ()):
                return None
            found[name] = value
        return found


@dataclass(frozen=True)
class TreeSpace(Space):
    """The joint space with growth, selection and bins: draft x window x growth x stop x stratify x select."""

    trees: Mapping[str, TreeLimit] = field(default_factory=dict)

    def distributions(self, window: str, stop: str, growth: str = "chain") -> dict[str, BaseDistribution]:
        found = super().distributions(window, stop)
        found["growth"] = CategoricalDistribution(self.kinds.growths)
        widest = max(limit.width for limit in self.trees.values())
        if growth in ("top_k", "classifier"):
            found["top_n"] = IntDistribution(2, DEFAULT_TOP_N + 4, log=True)
            found["alpha"] = IntDistribution(0, 4 if self.kinds.bins else 0)
            found["low_bins"] = IntDistribution(1, 3)
            found["fraction"] = FloatDistribution(0.2, 0.8)
        if growth == "top_k":
            found["width"] = IntDistribution(2, max(2, widest))
            found["score"] = CategoricalDistribution(SCORES)
        if growth == "classifier":
            found["beta"] = CategoricalDistribution(BETAS)
        if growth == "static":
            found["tree"] = IntDistribution(0, max(0, max(len(limit.static) for limit in self.trees.values()) - 1))
        return found

    def suggest(self, trial: optuna.trial.Trial) -> Policy:
        kinds = self.distributions("", "")
        chosen = {name: _ask(trial, name, kinds[name]) for name in ("draft", "window", "stop", "growth")}
        for name, distribution in self.distributions(chosen["window"], chosen["stop"], chosen["growth"]).items():
            if name not in chosen:
                chosen[name] = _ask(trial, name, distribution)
        return self.policy(chosen)

    def policy(self, chosen: dict[str, Any]) -> Policy:
        limit = self.trees.get(chosen["draft"])
        growth = chosen.get("growth", "chain")
        if (
            limit is None
            or growth == "chain"
            or (growth == "classifier" and limit.classifier is None)
            or (growth == "static" and not limit.static)
        ):
            return super().policy(chosen)
        depth = min(chosen["gamma"], limit.depth)
        document = dict(super().policy({**chosen, "gamma": depth}).spelled_out())
        if growth == "static":
            document["growth"] = {"kind": "static", "paths": limit.static[min(chosen["tree"], len(limit.static) - 1)]}
            return parse_policy({k: document[k] for k in ("draft", "window", "stop", "growth")}, where="search space")
        if growth == "top_k":
            document["growth"] = {"kind": "top_k", "width": min(chosen["width"], limit.width), **_score(chosen["score"])}
        else:
            document["growth"] = limit.grower(chosen["beta"])
        document["select"] = {"top_n": chosen["top_n"]}
        alpha = min(chosen["alpha"], limit.depth - depth)
        if alpha > 0 and limit.bins is not None:
            first = round(chosen["fraction"], 2)
            fractions = [round(min(1.0, first + i * (1.0 - first) / 2), 2) for i in range(chosen["low_bins"])]
            document["stratify"] = {"artifact": limit.bins, "alpha": alpha, "fractions": fractions}
        else:
            document.pop("stratify", None)
        return parse_policy(document, where="search space")

    def params(self, policy: Policy) -> dict[str, Any] | None:
        growth = policy.growth
        if policy.growth.kind not in self.kinds.growths:
            return None
        chain = policy.model_copy(update={"growth": ChainGrowth(), "select": Select(), "stratify": None})
        found = super().params(chain)
        if found is None:
            return None
        found["growth"] = growth.kind
        if isinstance(growth, StaticGrowth):
            limit = self.trees.get(policy.draft)
            if limit is None or growth.paths not in limit.static:
                return None
            found["tree"] = limit.static.index(growth.paths)
        if isinstance(growth, (TopKGrowth, ClassifierGrowth)):
            if policy.select.top_n is None or not 2 <= policy.select.top_n <= DEFAULT_TOP_N + 4:
                return None
            found["top_n"] = policy.select.top_n
            bins = policy.stratify
            found["alpha"] = 0 if bins is None else min(4, bins.alpha)
            found["low_bins"] = 1 if bins is None else min(3, len(bins.fractions))
            found["fraction"] = 0.3 if bins is None else min(0.8, max(0.2, bins.fractions[0]))
        if isinstance(growth, TopKGrowth):
            found["width"] = max(2, growth.width)
            found["score"] = next((s for s in SCORES if _score(s).items() <= growth.model_dump().items()), SCORES[0])
        if isinstance(growth, ClassifierGrowth):
            if growth.beta not in BETAS:
                return None
            found["beta"] = growth.beta
        return found


@dataclass(frozen=True)
class ShortlistSpace:
    """Another space with one more dimension: what of its output head the draft evaluates."""

    inner: Space
    shortlists: Mapping[str, ShortlistLimit]

    def distributions(self, kind: str) -> dict[str, BaseDistribution]:
        """The parameters that exist for one kind of shortlist."""
        limits = self.shortlists.values()
        there = {"full", *(kind for limit in limits for kind in limit.kinds)} & set(self.inner.kinds.shortlists)
        found: dict[str, BaseDistribution] = {
            "shortlist": CategoricalDistribution(tuple(k for k in SHORTLIST_ORDER if k in there))
        }
        rows = max(limit.rows for limit in limits)
        if kind in ("frequency", "position_frequency"):
            found["size" if kind == "frequency" else "k_max"] = IntDistribution(max(1, rows // 64), rows, log=True)
        if kind == "clusters":
            most = max(limit.clusters for limit in limits)
            found |= {name: IntDistribution(1, most, log=True) for name in ("k0", "k1", "k_min")}
        return found

    def suggest(self, trial: optuna.trial.Trial) -> Policy:
        """One policy of the space."""
        policy = self.inner.suggest(trial)
        limit = self.shortlists.get(policy.draft)
        if limit is None:
            return policy
        chosen = {"shortlist": _ask(trial, "shortlist", self.distributions("full")["shortlist"])}
        for name, distribution in self.distributions(chosen["shortlist"]).items():
            if name not in chosen:
                chosen[name] = _ask(trial, name, distribution)
        return self.policy(policy, chosen)

    def policy(self, policy: Policy, chosen: Mapping[str, Any]) -> Policy:
        """A policy of the inner space with the shortlist of a set of parameters."""
        block = self.shortlists[policy.draft].block(chosen)
        return policy if block is None else _shortlisted(policy, block)

    def params(self, policy: Policy) -> dict[str, Any] | None:
        """The parameters of a policy, to seed a study; None for one outside the space."""
        found = self.inner.params(policy.model_copy(update={"shortlist": FullShortlist()}))
        limit, shortlist = self.shortlists.get(policy.draft), policy.shortlist
        if found is None or limit is None:
            return None if policy.shortlisted else found
        if policy.shortlisted and (
            shortlist.kind not in limit.kinds or getattr(shortlist, "artifact", "") not in (limit.frequencies, limit.router)
        ):
            return None
        found["shortlist"] = shortlist.kind
        for name, distribution in self.distributions(shortlist.kind).items():
            if isinstance(distribution, IntDistribution):
                found[name] = min(max(getattr(shortlist, name), distribution.low), distribution.high)
        return found


def finalists(study: Study, count: int = 4) -> list[Trial]:
    """The policies worth executing: the tie-broken best, then the best of each other family (kinds of all blocks), fastest first."""
    first = study.best()
    if first is None:
        return []
    chosen, families = [first], {_family(first.policy)}
    for trial in study.trials:
        if len(chosen) >= count:
            break
        if _family(trial.policy) not in families:
            families.add(_family(trial.policy))
            chosen.append(trial)
    return chosen


def rivals(study: Study, chosen: Iterable[Policy], count: int = 6) -> list[Trial]:
    """Fixed windows that prediction cannot tell from the best of them, fastest first, beside those that are chosen already."""
    fixed = [t for t in study.trials if is_fixed(t.policy)]
    have = {p.id for p in chosen}
    close = [t for t in fixed if t.value >= fixed[0].value * (1 - PREDICTION_ERROR)]
    return [t for t in close if t.policy.id not in have][:count]


def is_fixed(policy: Policy) -> bool:
    """Whether a policy drafts a fixed window with the whole output head, and nothing stops it."""
    plain = policy.stop.kind == "none" and not policy.shortlisted and not isinstance(policy, ChooserPolicy)
    return policy.speculates and policy.window.kind == "fixed" and plain


def _family(policy: Policy) -> tuple[str, ...]:
    blocks = (policy.window, policy.stop, policy.growth, policy.shortlist)
    return (policy.draft, *(block.kind for block in blocks), str(policy.stratify is not None))


def outcomes(trace: ReplayTrace, profile: LatencyProfile, policies: Iterable[Policy]) -> dict[str, Outcome]:
    """Replays policies on a trace, by policy id."""
    return {p.id: replay(trace, p, profile) for p in policies}


def _policy(draft: str, window: dict[str, Any], stop: dict[str, Any] | None = None) -> Policy:
    return parse_policy({"draft": draft, "window": window, **({"stop": stop} if stop else {})}, where="search space")


def _ask(trial: optuna.trial.Trial, name: str, distribution: BaseDistribution) -> Any:
    """A value of one parameter."""
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
    assert isinstance(distribution, FloatDistribution)
    return trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)

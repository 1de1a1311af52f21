"""The joint space of policies as Optuna parameters, read off the blocks of the policy document:
each parameter says there how it is searched (:class:`runtime.policies.blocks.Search`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from spectune.runtime.policies.blocks import Block, ChainGrowth, Fitted, Search
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    DEFAULT_TOP_N,
    KINDS,
    Policy,
    PromptPolicy,
    Select,
    StaticGrowth,
    Stratify,
    parse_policy,
)

GROUPS: Final[Mapping[str, Mapping[str, type[Block] | None]]] = {
    "growth": KINDS["growth"],
    "select": {"select": Select},
    "stratify": {"none": None, "stratify": Stratify},
    "shortlist": KINDS["shortlist"],
    "window": KINDS["window"],
    "stop": KINDS["stop"],
}
"""The blocks of a policy by group and kind: in the order in which a search chooses them, which is
also how much they complicate a policy. The first kind of a group is the simplest."""
Read = Callable[[Policy], Any]
Choose = Callable[[str, BaseDistribution, Read], Any]
"""A parameter's value, by its name, its domain and what reads it off a policy."""
Fits = Mapping[str, tuple[Any, ...]]
"""What was fitted for a draft, by the kind of the block that takes it."""


@dataclass(frozen=True)
class TreeLimit:
    """Trees that may be tried with one draft: what was recorded of it (``width``, ``depth``), and
    what was fitted on that: ids of ``bins`` and ``classifier``, ``static`` trees as rank paths."""

    width: int = 0
    depth: int = 0
    bins: str | None = None
    classifier: str | None = None
    static: tuple[tuple[tuple[int, ...], ...], ...] = ()


@dataclass(frozen=True)
class ShortlistLimit:
    """Shortlists that may be tried with one draft, whose output head has ``rows`` tokens: ids of
    what was fitted, ``frequencies``, and a ``router`` of ``clusters``. At most half of a head is
    kept: more saves little, and a gain predicted for it is mostly the prediction's error."""

    rows: int = 0
    frequencies: str | None = None
    router: str | None = None
    clusters: int = 0

    def papers(self, share: int) -> list[dict[str, Any]]:
        """The papers' shortlists at a ``share``-th of the vocabulary, as documents: FR-Spec, PA-FR,
        and DynaSpec's clusters, which get fewer by step."""
        size, k0 = max(1, self.rows // share), max(1, self.clusters // share)
        blocks: dict[str, dict[str, Any]] = {
            "frequency": {"size": size},
            "position_frequency": {"k_max": size},
            "clusters": {"k0": k0, "k1": max(1, k0 // 2), "k_min": max(1, k0 // 4)},
        }
        return [
            {"kind": kind, "artifact": artifact, **blocks[kind]}
            for kind, artifacts in self.fits.items()
            for artifact in artifacts
        ]

    @property
    def fits(self) -> Fits:
        """What was fitted, by the kind of its block."""
        orders, routers = _optional(self.frequencies), _optional(self.router)
        return {"frequency": orders, "position_frequency": orders, "clusters": routers}


@dataclass(frozen=True)
class Space:
    """Policies of some drafts: windows of at most ``gamma_max``, and of the drafts in ``trees`` and
    ``shortlists`` what these allow. A parameter that would change nothing is not asked for."""

    drafts: tuple[str, ...]
    gamma_max: int = 16
    trees: Mapping[str, TreeLimit] = field(default_factory=dict)
    shortlists: Mapping[str, ShortlistLimit] = field(default_factory=dict)

    def suggest(self, trial: optuna.trial.Trial, draft: str) -> Policy:
        """The policy with a draft that a study's sampler proposes."""
        return self._policy(draft, lambda name, domain, _: _ask(trial, name, domain))

    def trial(self, policy: Policy, value: float) -> optuna.trial.FrozenTrial | None:
        """A finished trial of a policy, each parameter the nearest in this space; None where it
        does not speculate, or its draft, a kind of block or a tree is not here."""
        if policy.draft not in self.drafts or not policy.speculates:
            return None
        params, domains = dict[str, Any](), dict[str, BaseDistribution]()

        def read(name: str, domain: BaseDistribution, of: Read) -> Any:
            params[name], domains[name] = _nearest(of(policy), domain), domain
            return params[name]

        try:
            self._policy(policy.draft, read)
        except (LookupError, ValueError):
            return None
        return optuna.trial.create_trial(params=params, distributions=domains, value=value)

    def _policy(self, draft: str, choose: Choose) -> Policy:
        """The policy whose parameters are chosen one after another."""
        fits, most = self._fits(draft), self._most(draft)
        growth: type[Block] = ChainGrowth
        document: dict[str, Any] = {"draft": draft}
        for group, kinds in GROUPS.items():
            possible = tuple(k for k, b in kinds.items() if _allows(k, b, draft, growth, fits))
            if not possible:
                continue
            kind = possible[0]
            if len(possible) > 1:
                kind = choose(group, CategoricalDistribution(possible), partial(kind_of, group))
            block = kinds[kind]
            if block is None:
                continue
            growth = block if group == "growth" else growth
            values: dict[str, Any] = {"kind": kind} if "kind" in block.model_fields else {}
            for key, mark in searched(block).items():
                of = partial(_value_of, group, key)
                if isinstance(mark, Fitted):
                    values[key] = _fit(choose, f"{group}.{kind}", fits[kind], of)
                elif mark.only is None or values.get(mark.only[0]) == mark.only[1]:
                    name = f"{group}.{mark.name or key}"
                    if name == "window.gamma" and growth is not ChainGrowth:
                        name = "window.depth"
                    values[key] = _value(choose, name, mark, most.get(name), of)
                    if name == "window.depth":  # low bins go deeper, and no deeper is recorded
                        alpha = document.get("stratify", {"alpha": 0})["alpha"]
                        values[key] = min(values[key], most[name] - alpha)
            document[group] = block.nearest(values)
        return parse_policy(document, where="search space")

    def _fits(self, draft: str) -> Fits:
        trees = self.trees.get(draft, TreeLimit())
        return {
            "top_k": ("",) * min(1, trees.depth),  # nothing is fitted, but trees are recorded
            "static": tuple(StaticGrowth(paths=paths).paths for paths in trees.static),
            "classifier": _optional(trees.classifier),
            "stratify": _optional(trees.bins if trees.depth > 1 else None),
            **self.shortlists.get(draft, ShortlistLimit()).fits,
        }

    def _most(self, draft: str) -> dict[str, int]:
        """The largest values of a draft's parameters, where they are not the blocks'."""
        trees = self.trees.get(draft, TreeLimit())
        lists = self.shortlists.get(draft, ShortlistLimit())
        clusters = max(1, lists.clusters // 2)
        return {
            "window.gamma": self.gamma_max,
            "window.depth": trees.depth,
            "growth.width": trees.width,
            "stratify.alpha": min(4, trees.depth - 1),
            "shortlist.size": max(1, lists.rows // 2),
            **dict.fromkeys(("shortlist.k0", "shortlist.k1", "shortlist.k_min"), clusters),
        }

    def screen(self) -> Iterator[Policy]:
        """What is tried before anything is searched: no speculation, every fixed window, and the
        papers' own settings."""
        yield AUTOREGRESSIVE
        for draft in self.drafts:
            for gamma in range(1, self.gamma_max + 1):
                yield _policy(draft, window={"kind": "fixed", "gamma": gamma})
            yield transformers_heuristic(draft, self.gamma_max)
            most = min(8, self.gamma_max)
            for kind in ("fsm", "cache_fsm", "analytic", "q_learning"):
                yield _policy(draft, window={"kind": kind, "gamma_max": most})
            for shortlist in self.shortlists.get(draft, ShortlistLimit()).papers(8):
                window = {"kind": "fixed", "gamma": min(4, most)}
                yield _policy(draft, window=window, shortlist=shortlist)
            if draft in self.trees:
                yield from _papers_trees(draft, self.trees[draft])


def _papers_trees(draft: str, limit: TreeLimit) -> Iterator[Policy]:
    """EAGLE-2's, C2T's, HeteroSpec's and Sequoia's own settings, as far as recorded and fitted."""
    depth, bins_depth = min(6, limit.depth), limit.depth - 3
    window, select = {"kind": "fixed", "gamma": depth}, {"top_n": DEFAULT_TOP_N}
    eagle = {"kind": "top_k", "width": min(8, limit.width)}
    if depth:
        yield _policy(draft, window=window, growth=eagle, select=select)
    if limit.classifier:
        sizes = {"width": limit.width, "cap": limit.width}
        growth = {"kind": "classifier", "artifact": limit.classifier, **sizes}
        yield _policy(draft, window=window, growth=growth, select=select)
    if limit.bins and bins_depth > 0:
        window = {"kind": "fixed", "gamma": min(6, bins_depth)}
        bins = {"artifact": limit.bins}
        yield _policy(draft, window=window, growth=eagle, select=select, stratify=bins)
    for paths in limit.static:
        yield _policy(draft, growth={"kind": "static", "paths": paths})


def plain_trees(draft: str, width: int, depth: int) -> list[Policy]:
    """EAGLE-2's trees of a few sizes within what is recorded, with the default score."""
    return [
        _policy(
            draft,
            window={"kind": "fixed", "gamma": d},
            growth={"kind": "top_k", "width": w},
            select={"top_n": n},
        )
        for w in sorted({min(w, width) for w in (2, 4, 8)})
        for d in sorted({min(d, depth) for d in (2, 4, 6, 8)})
        for n in (4, 8, 16, 32, DEFAULT_TOP_N)
        if d <= n <= w + (d - 1) * w * w
    ]


def transformers_heuristic(draft: str, gamma_max: int) -> Policy:
    """transformers' heuristic schedule with its other defaults: 20 tokens to begin with, at most
    ``gamma_max``, and confidence threshold 0.4 where a draft has probabilities.

    (Its default schedule is ``constant`` by now; it also adapts the threshold, which stays here.)
    """
    first = min(20, gamma_max)
    window = {"kind": "heuristic", "gamma_max": gamma_max, "gamma_initial": first}
    stop = {"kind": "none"} if draft == "ngram" else {"kind": "max_prob", "threshold": 0.4}
    return _policy(draft, window=window, stop=stop)


def complexity(policy: Policy) -> tuple[int, ...]:
    """Orders policies from simple to elaborate: no speculation first, choices by prompt last, and
    between them by the place of each block's kind in :data:`GROUPS`, then the shorter window."""
    if isinstance(policy, PromptPolicy):
        return (2,)
    places = (list(kinds).index(kind_of(group, policy)) for group, kinds in GROUPS.items())
    return int(policy.speculates), *places, policy.gamma_max


def kind_of(group: str, policy: Policy) -> str:
    """The kind of a policy's block of a group."""
    block = getattr(policy, group)
    return "none" if block is None else getattr(block, "kind", group)


@cache
def searched(block: type[Block]) -> Mapping[str, Search | Fitted]:
    """The parameters of a block that are searched or fitted, and how."""
    return {
        key: mark
        for key, info in block.model_fields.items()
        for mark in info.metadata
        if isinstance(mark, (Search, Fitted))
    }


def ranges() -> Iterator[tuple[str, str]]:
    """(block, what of it is searched), for the documentation."""
    for group, kinds in GROUPS.items():
        for kind, block in kinds.items():
            marks = searched(block) if block else {}
            if marks:
                name = group if kind == group else f"{group}: {kind}"
                yield name, "; ".join(f"{key} {_range(mark)}" for key, mark in marks.items())


def _range(mark: Search | Fitted) -> str:
    if isinstance(mark, Fitted):
        return "as fitted"
    if mark.choices:
        return "of " + ", ".join(map(json.dumps, mark.choices))
    return f"{mark.low:g} to {mark.high:g}{' (log)' * mark.log}"


def _allows(
    kind: str, block: type[Block] | None, draft: str, growth: type[Block], fits: Fits
) -> bool:
    """Whether a kind of block may be tried: it does something, and what it needs is searched or was
    fitted."""
    if block is None:
        return True
    required = {k for k, i in block.model_fields.items() if i.is_required()} - {"kind"}
    has_values = bool(fits.get(kind, required <= searched(block).keys()))
    return has_values and not block.inert(draft, growth)


def _policy(draft: str, **blocks: Any) -> Policy:
    return parse_policy({"draft": draft, **blocks}, where="search space")


def _optional(artifact: str | None) -> tuple[str, ...]:
    return () if artifact is None else (artifact,)


def _value_of(group: str, key: str, policy: Policy) -> Any:
    block = getattr(policy, group)
    return getattr(block, "first" if key == "gamma_initial" else key)


def _fit(choose: Choose, name: str, fits: tuple[Any, ...], of: Read) -> Any:
    """One of what was fitted for a block."""
    domain = CategoricalDistribution(tuple(range(len(fits))))
    return fits[0] if len(fits) == 1 else fits[choose(name, domain, lambda p: fits.index(of(p)))]


def _value(choose: Choose, name: str, search: Search, most: int | None, of: Read) -> Any:
    """A value of a parameter, at most ``most`` where that is given."""
    if search.choices:  # as JSON: Optuna stores no tuples
        choices = CategoricalDistribution(tuple(map(json.dumps, search.choices)))
        return json.loads(choose(name, choices, lambda policy: json.dumps(of(policy))))
    if isinstance(search.low, float):
        return round(choose(name, FloatDistribution(search.low, search.high, search.log), of), 4)
    high = int(search.high if most is None else most)
    low = min(int(search.low), max(1, high // 32))
    return choose(name, IntDistribution(low, high, search.log), of)


def _nearest(value: Any, domain: BaseDistribution) -> Any:
    """The value of a domain nearest to a policy's; of a number that is not given the largest.
    Raises LookupError where there is none."""
    if isinstance(domain, CategoricalDistribution):
        if value not in domain.choices:
            raise LookupError(value)
        return value
    assert isinstance(domain, (IntDistribution, FloatDistribution))
    return domain.high if value is None else min(max(value, domain.low), domain.high)


def _ask(trial: optuna.trial.Trial, name: str, domain: BaseDistribution) -> Any:
    """A value of one parameter from the sampler."""
    if isinstance(domain, CategoricalDistribution):
        return trial.suggest_categorical(name, domain.choices)
    assert isinstance(domain, (IntDistribution, FloatDistribution))
    ask = trial.suggest_int if isinstance(domain, IntDistribution) else trial.suggest_float
    return ask(name, domain.low, domain.high, log=domain.log)

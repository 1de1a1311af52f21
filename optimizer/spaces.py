"""The joint space of policies as Optuna parameters, read off the blocks of the policy document:
each parameter says there how it is searched (:class:`runtime.policies.blocks.Search`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from optuna.trial import BaseTrial

from spectune.runtime.policies.blocks import Block, ChainGrowth, Fitted, Search
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    DEFAULT_TOP_N,
    KINDS,
    LoadPolicy,
    Policy,
    PromptPolicy,
    Select,
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
FORMS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "chains": {"growth": ("chain",)},
    "trees": {"growth": ("static", "top_k", "classifier"), "stratify": ("none",)},
    "trees in bins": {"growth": ("top_k", "classifier"), "stratify": ("stratify",)},
}
"""What a draft is searched for in turn: kinds of blocks, all of a group that is not named."""


@dataclass(frozen=True)
class DraftLimits:
    """What may be tried with one draft beside plain chains: trees within what was recorded of it
    (``width``, ``depth``), shortlists of an output head of so many ``rows`` and ``clusters``, and
    what was fitted, by the kind of the block that takes it. At most half of a head is kept: more
    saves little, and a gain predicted for it is mostly the prediction's error."""

    width: int = 0
    depth: int = 0
    rows: int = 0
    clusters: int = 0
    fits: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def forms(self) -> tuple[str, ...]:
        """Those of :data:`FORMS` that a draft can have."""
        bins = self.depth > 1 and bool(self.fits.get("stratify"))
        return ("chains", *("trees",) * (self.depth > 0), *("trees in bins",) * bins)

    def shortlists(self, share: int) -> list[dict[str, Any]]:
        """The papers' shortlists at a ``share``-th of the vocabulary, as documents: FR-Spec, PA-FR,
        and DynaSpec's clusters, which get fewer by step."""
        size, k0 = max(1, self.rows // share), max(1, self.clusters // share)
        budgets: dict[str, dict[str, Any]] = {
            "frequency": {"size": size},
            "position_frequency": {"k_max": size},
            "clusters": {"k0": k0, "k1": max(1, k0 // 2), "k_min": max(1, k0 // 4)},
        }
        return [
            {"kind": kind, "artifact": artifact, **budget}
            for kind, budget in budgets.items()
            for artifact in self.fits.get(kind, ())
        ]


@dataclass(frozen=True)
class Space:
    """Policies of some drafts: windows of at most ``gamma_max``, and what the drafts' ``limits``
    allow. A parameter that would change nothing is not asked for."""

    drafts: tuple[str, ...]
    gamma_max: int = 16
    limits: Mapping[str, DraftLimits] = field(default_factory=dict)

    def limits_of(self, draft: str) -> DraftLimits:
        return self.limits.get(draft, DraftLimits())

    def turns(self) -> list[tuple[str, str]]:
        """Each draft in each form that it can have."""
        return [(draft, form) for draft in self.drafts for form in self.limits_of(draft).forms]

    def suggest(self, trial: BaseTrial, draft: str, form: str) -> Policy:
        """The policy with a draft and a form that a study's sampler proposes."""
        limits, most = self.limits_of(draft), self._most(draft, form)
        growth: type[Block] = ChainGrowth
        document: dict[str, Any] = {"draft": draft}
        for group, kinds in GROUPS.items():
            possible = [
                kind
                for kind in FORMS[form].get(group, tuple(kinds))
                if _allows(kinds[kind], draft, growth, bool(limits.fits.get(kind)))
            ]
            if not possible:
                continue
            kind = trial.suggest_categorical(group, possible) if possible[1:] else possible[0]
            block = kinds[kind]
            if block is None:
                continue
            growth = block if group == "growth" else growth
            values: dict[str, Any] = {"kind": kind} if "kind" in block.model_fields else {}
            for key, mark in searched(block).items():
                if isinstance(mark, Fitted):
                    fits = limits.fits[kind]
                    values[key] = fits[trial.suggest_int(f"{group}.{kind}", 0, len(fits) - 1)]
                elif mark.only is None or values.get(mark.only[0]) == mark.only[1]:
                    name = f"{group}.{mark.name or key}"
                    values[key] = _value(trial, name, mark, most.get(name))
            if group == "stratify":  # low bins go deeper, and no deeper is recorded
                most["window.gamma"] -= values["alpha"]
            document[group] = block.nearest(values)
        return parse_policy(document, where="search space")

    def _most(self, draft: str, form: str) -> dict[str, int]:
        """The largest values of a draft's parameters, where they are not the blocks'."""
        limits = self.limits_of(draft)
        clusters = max(1, limits.clusters // 2)
        return {
            "window.gamma": self.gamma_max if form == "chains" else limits.depth,
            "growth.width": limits.width,
            "stratify.alpha": min(4, limits.depth - 1),
            "shortlist.size": max(1, limits.rows // 2),
            **dict.fromkeys(("shortlist.k0", "shortlist.k1", "shortlist.k_min"), clusters),
        }

    def screen(self) -> Iterator[Policy]:
        """What is tried before anything is searched: no speculation, every fixed window, and the
        papers' own settings."""
        yield AUTOREGRESSIVE
        most = min(8, self.gamma_max)
        for draft in self.drafts:
            for gamma in range(1, self.gamma_max + 1):
                yield _policy(draft, window={"kind": "fixed", "gamma": gamma})
            yield transformers_heuristic(draft, self.gamma_max)
            for kind in ("fsm", "cache_fsm", "analytic", "q_learning"):
                yield _policy(draft, window={"kind": kind, "gamma_max": most})
            yield from _papers_trees(draft, self.limits_of(draft))
        for draft in self.drafts:  # last, as those that cannot win any more are not recorded
            for shortlist in self.limits_of(draft).shortlists(8):
                window = {"kind": "fixed", "gamma": min(4, most)}
                yield _policy(draft, window=window, shortlist=shortlist)


def _papers_trees(draft: str, limits: DraftLimits) -> Iterator[Policy]:
    """EAGLE-2's, C2T's, HeteroSpec's and Sequoia's own settings, as far as recorded and fitted."""
    if not limits.depth:
        return
    window, select = {"kind": "fixed", "gamma": min(6, limits.depth)}, {"top_n": DEFAULT_TOP_N}
    eagle = {"kind": "top_k", "width": min(8, limits.width)}
    yield _policy(draft, window=window, growth=eagle, select=select)
    for classifier in limits.fits.get("classifier", ()):
        sizes = {"width": limits.width, "cap": limits.width}
        growth = {"kind": "classifier", "artifact": classifier, **sizes}
        yield _policy(draft, window=window, growth=growth, select=select)
    for bins in limits.fits.get("stratify", ()):
        alpha = min(3, limits.depth - 1)
        window = {"kind": "fixed", "gamma": min(6, limits.depth - alpha)}
        stratify = {"artifact": bins, "alpha": alpha}
        yield _policy(draft, window=window, growth=eagle, select=select, stratify=stratify)
    for paths in limits.fits.get("static", ()):
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
    """Orders policies from simple to elaborate: no speculation first, tables by load and choices by
    prompt last, and between them by the place of each block's kind in :data:`GROUPS`, then the
    shorter window."""
    if isinstance(policy, LoadPolicy):
        return 2, len(policy.by_load)
    if isinstance(policy, PromptPolicy):
        return (3,)
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


def _allows(block: type[Block] | None, draft: str, growth: type[Block], is_fitted: bool) -> bool:
    """Whether a block may be tried: it does something, and what it needs is searched or was
    fitted."""
    if block is None:
        return True
    required = {k for k, i in block.model_fields.items() if i.is_required()} - {"kind"}
    fits = any(isinstance(mark, Fitted) for mark in searched(block).values())
    has_values = is_fitted if fits else required <= searched(block).keys()
    return has_values and not block.inert(draft, growth)


def _policy(draft: str, **blocks: Any) -> Policy:
    return parse_policy({"draft": draft, **blocks}, where="search space")


def _value(trial: BaseTrial, name: str, search: Search, most: int | None) -> Any:
    """A value of a parameter from the sampler, at most ``most`` where that is given."""
    if search.choices:  # as JSON: Optuna stores no tuples
        return json.loads(trial.suggest_categorical(name, [json.dumps(c) for c in search.choices]))
    if isinstance(search.low, float):
        return round(trial.suggest_float(name, search.low, search.high, log=search.log), 4)
    high = int(search.high if most is None else most)
    return trial.suggest_int(name, min(int(search.low), max(1, high // 32)), high, log=search.log)

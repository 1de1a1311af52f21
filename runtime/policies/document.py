"""The policy document: what a user writes, what is searched, stored and published.

A :class:`Policy` is a frozen value composed of optional blocks, each one mechanism of one paper. Absent blocks take
defaults; :meth:`Policy.spelled_out` shows them. Unknown keys are errors, and the message names the nearest known key.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.policies.heterospec import kept_nodes
from traces.errors import PolicyError
from traces.schema import policy_content, policy_id
from traces.text import one_line

GAMMA_LIMIT = 64
"""Largest window any policy may ask for."""
WIDTH_LIMIT = 32
"""Most children a node of a draft tree may have, and most nodes expanded per level."""
NODE_LIMIT = 256
"""Most drafted nodes a tree may have in one verification."""
POOL_LIMIT = 8192
"""Most candidates a tree may grow before selection."""
EXPANDED_LIMIT = 512
"""Most nodes that a tree may have read by the draft, beside the root: each holds a place in the draft's cache during a round."""
VALUES_LIMIT = 30_000
"""Most values in a document; the largest static tree has half as many."""
NESTING_LIMIT = 16
"""Deepest nesting of a document; policies need four levels."""
TEXT_LIMIT = 256
"""Longest key or text in a document, in characters."""
NUMBER_LIMIT = 2**128
"""Whole numbers in a document lie below it in size."""
MESSAGE_LIMIT = 400
"""Most characters of what is said about a document, beside where it stood."""
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a value raises that has not the form it should have."""
DEFAULT_TOP_N = 60
"""Nodes that a top-k tree keeps when the policy does not say (EAGLE-2)."""

Gamma = Annotated[int, Field(ge=0, le=GAMMA_LIMIT)]
GammaMax = Annotated[int, Field(ge=1, le=GAMMA_LIMIT)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FixedWindow(_Block):
    """A constant window: ``gamma`` tokens are drafted every round (0: none)."""

    kind: Literal["fixed"] = "fixed"
    gamma: Gamma = 4


class _AdaptiveWindow(_Block):
    gamma_max: GammaMax = 8
    gamma_initial: Gamma | None = Field(
        default=None, description="first window of a request; default: half of gamma_max, rounded up"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        least = getattr(self, "gamma_min", 0)
        if least > self.gamma_max:
            raise ValueError(f"gamma_min {least} exceeds gamma_max {self.gamma_max}")
        if self.gamma_initial is not None and not least <= self.gamma_initial <= self.gamma_max:
            raise ValueError(f"gamma_initial {self.gamma_initial} is not between {least} and gamma_max {self.gamma_max}")
        return self

    @property
    def first(self) -> int:
        """The window of a request's first round."""
        half = max((self.gamma_max + 1) // 2, getattr(self, "gamma_min", 0))
        return half if self.gamma_initial is None else self.gamma_initial


class AnalyticWindow(_AdaptiveWindow):
    """The window that maximises equation 1 of the on-the-fly paper, beta estimated over the last ``history`` rounds.

    ``estimator``: ``ratio`` is equation 2, ``exact`` the maximum-likelihood root of equation 11, ``table`` its tabulated inverse
    (equation 12). ``costs``: ``profile`` takes a_q and b_p(gamma) from the latency profile, so that the decision does not read
    the clock and replays exactly; ``recent`` takes them from the last ``history`` rounds' clock, as the paper does, and does not
    replay exactly. When every round of the history had window 0 there is nothing to estimate, and ``gamma_initial`` is tried anew.
    """

    kind: Literal["analytic"] = "analytic"
    history: Annotated[int, Field(ge=1, le=256)] = 6
    acc_max: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.98
    gamma_min: Gamma = 0
    estimator: Literal["ratio", "exact", "table"] = "ratio"
    costs: Literal["profile", "recent"] = "profile"

    @model_validator(mode="after")
    def _can_begin(self) -> Self:
        if self.gamma_initial == 0:
            raise ValueError("gamma_initial 0 would never draft, and so never learn how much is accepted; use at least 1")
        return self


class FsmWindow(_AdaptiveWindow):
    """A saturating counter (on-the-fly paper, method 2): gamma + 1 if every drafted token was accepted, else gamma - 1."""

    kind: Literal["fsm"] = "fsm"
    gamma_min: Gamma = 0


class CacheFsmWindow(_AdaptiveWindow):
    """The cache-enabled state machine (method 3): gamma + 1 if an accepted token is in the token cache (prompt and text before
    the round), + 1 more if all drafted tokens were accepted, gamma - 1 if no accepted token is in the cache."""

    kind: Literal["cache_fsm"] = "cache_fsm"
    gamma_min: Gamma = 0


class QLearningWindow(_AdaptiveWindow):
    """Tabular Q-learning over windows (method 4, appendix B.4).

    State: the last ``memory`` windows; action: the next window; reward: the share of drafted tokens accepted (``accepted``) or the
    expected speed-up of what was emitted over its cost by the profile (``speed``). Epsilon-greedy with a counter-based generator
    seeded by ``seed``; the table is carried from request to request within a session. ``artifact`` starts from a stored table,
    ``learn`` false freezes it.
    """

    kind: Literal["q_learning"] = "q_learning"
    seed: Annotated[int, Field(ge=0)] = 0
    memory: Literal[1, 2] = 1
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    discount: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    epsilon: Probability = 0.1
    reward: Literal["accepted", "speed"] = "accepted"
    gamma_min: Gamma = 1
    learn: bool = True
    artifact: str | None = None


class HeuristicWindow(_AdaptiveWindow):
    """transformers' own schedule: gamma + 2 if every drafted token was accepted, else gamma - 1 (at least 1), starting from
    ``gamma_initial`` (transformers' ``num_assistant_tokens``). It is carried from request to request unless ``transient``."""

    kind: Literal["heuristic"] = "heuristic"
    gamma_max: GammaMax = 20
    transient: bool = False


Window = Annotated[
    Union[FixedWindow, AnalyticWindow, FsmWindow, CacheFsmWindow, QLearningWindow, HeuristicWindow],
    Field(discriminator="kind"),
]


class NoStop(_Block):
    """The draft always fills its window."""

    kind: Literal["none"] = "none"


class _Stop(_Block):
    keep_last: bool = Field(default=True, description="whether the token that triggers the stop stays in the draft")


class MaxProbStop(_Stop):
    """End the draft at a token whose draft probability is below ``threshold`` (transformers' assistant_confidence_threshold)."""

    kind: Literal["max_prob"] = "max_prob"
    threshold: Probability = 0.4


class JointProbStop(_Stop):
    """End the draft when the product of its tokens' draft probabilities falls below ``threshold``."""

    kind: Literal["joint_prob"] = "joint_prob"
    threshold: Probability = 0.3


class EntropyStop(_Stop):
    """AdaEDL: end the draft when the lower bound on acceptance, 1 - sqrt(scale * H), falls below ``threshold``; H is the
    entropy of the draft's law in nats."""

    kind: Literal["entropy"] = "entropy"
    threshold: Probability = 0.4
    scale: Annotated[float, Field(gt=0.0, le=100.0)] = 0.2


Stop = Annotated[Union[NoStop, MaxProbStop, JointProbStop, EntropyStop], Field(discriminator="kind")]


class ChainGrowth(_Block):
    """One path: each drafted token follows the one before."""

    kind: Literal["chain"] = "chain"


Width = Annotated[int, Field(ge=1, le=WIDTH_LIMIT)]


class _TreeGrowth(_Block):
    """What dynamic trees share. ``score`` is the estimate of acceptance that ranks nodes: ``probability`` is the product of the draft's
    probabilities (EAGLE-2), ``coupled`` a softmax over the perturbed gaps of siblings, ``auto`` the first at temperature 0 and
    the second above. ``proposals`` ranks a node's children: ``coupled`` by log q + g with the target's noise, ``probability`` by q."""

    width: Width = 8
    score: Literal["auto", "probability", "coupled"] = "auto"
    sharpness: Annotated[float, Field(gt=0.0, le=16.0)] = 1.5
    proposals: Literal["coupled", "probability"] = "coupled"


class TopKGrowth(_TreeGrowth):
    """EAGLE-2: the ``width`` best nodes of each level are expanded by ``width`` children each."""

    kind: Literal["top_k"] = "top_k"

    @property
    def frontier(self) -> int:
        """Nodes expanded per level at most."""
        return self.width


class ClassifierGrowth(_TreeGrowth):
    """C2T: a node is drafted and expanded if a classifier's confidence in it exceeds ``beta``; of a level at most the ``cap`` most
    confident ones (the paper's second, optional use of top-k; None: no cap but :data:`WIDTH_LIMIT`). ``artifact`` names the classifier
    (``fit classifier``)."""

    kind: Literal["classifier"] = "classifier"
    width: Width = 15
    cap: Width | None = 15
    beta: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    artifact: Annotated[str, Field(min_length=1)]

    @property
    def frontier(self) -> int:
        """Nodes kept and expanded per level at most."""
        return WIDTH_LIMIT if self.cap is None else self.cap


class StaticGrowth(_Block):
    """A fixed tree: ``paths`` of child ranks from the root, best first, each with all its beginnings; or the tree of an ``artifact``
    (``fit static-tree``)."""

    kind: Literal["static"] = "static"
    paths: tuple[tuple[Annotated[int, Field(ge=0, lt=WIDTH_LIMIT)], ...], ...] = ()
    proposals: Literal["coupled", "probability"] = "coupled"
    artifact: str | None = None

    @model_validator(mode="after")
    def _closed(self) -> Self:
        if bool(self.paths) == (self.artifact is not None):
            raise ValueError("a static tree is given by either paths or an artifact")
        if len(self.paths) > NODE_LIMIT:
            raise ValueError(f"a tree of {len(self.paths)} nodes exceeds the limit of {NODE_LIMIT}")
        known = set(self.paths)
        if len(known) < len(self.paths):
            twice = next(p for p in self.paths if self.paths.count(p) > 1)
            raise ValueError(f"the path {list(twice)} is given twice")
        for path in self.paths:
            if not path:
                raise ValueError("a path has at least one rank; the root itself is not listed")
            if len(path) > GAMMA_LIMIT:
                raise ValueError(f"the path {list(path)} is deeper than {GAMMA_LIMIT}")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"the path {list(path)} needs its parent {list(path[:-1])} in the list")
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda p: (len(p), p))))
        return self

    @property
    def depth(self) -> int:
        """Levels of the tree; 0 when only the artifact knows."""
        return max((len(p) for p in self.paths), default=0)


Growth = Annotated[Union[ChainGrowth, TopKGrowth, ClassifierGrowth, StaticGrowth], Field(discriminator="kind")]


class Select(_Block):
    """Of the nodes grown, the ``top_n`` with the highest estimated acceptance are verified (EAGLE-2's rerank); the root is not
    counted. None: all."""

    top_n: Annotated[int, Field(ge=1, le=NODE_LIMIT)] | None = None


class Stratify(_Block):
    """HeteroSpec: entropy bins (``fit bins``); in the i-th lowest of ``len(fractions)`` bins the tree grows ``alpha - i`` levels deeper
    and keeps ``fractions[i]`` of top_n nodes plus ``alpha - i``."""

    artifact: Annotated[str, Field(min_length=1)]
    alpha: Annotated[int, Field(ge=0, le=32)] = 3
    fractions: Annotated[
        tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...], Field(min_length=1, max_length=8)
    ] = (0.3, 0.6, 1.0)


Artifact = Annotated[str, Field(min_length=1)]
Budget = Annotated[int, Field(ge=1)]


class FullShortlist(_Block):
    """The draft evaluates its whole output head."""

    kind: Literal["full"] = "full"


class FrequencyShortlist(_Block):
    """FR-Spec: the draft evaluates the ``size`` most frequent tokens. ``artifact``: the frequency order (``fit frequencies``)."""

    kind: Literal["frequency"] = "frequency"
    size: Budget = 1024
    artifact: Artifact


class PositionFrequencyShortlist(_Block):
    """PA-FR (DynaSpec, appendix A.3): the most frequent tokens, ``k_max`` of them at draft steps 0 and 1, floor(k_max / (t + 1)) at
    step t. ``artifact``: the frequency order (``fit frequencies``)."""

    kind: Literal["position_frequency"] = "position_frequency"
    k_max: Budget = 2048
    artifact: Artifact


class ClustersShortlist(_Block):
    """DynaSpec, section 4.2: a router selects token clusters by context, ``k0`` of them at draft step 0, ``k1`` at step 1,
    floor((k1 + t) / (2 t)) at step t, never fewer than ``k_min`` (equation 3). ``artifact``: router and clusters (``fit router``)."""

    kind: Literal["clusters"] = "clusters"
    k0: Budget = 12
    k1: Budget = 8
    k_min: Budget = 2
    artifact: Artifact

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if not self.k0 >= self.k1 >= self.k_min:
            raise ValueError(f"the budget of clusters decays: k0 {self.k0} >= k1 {self.k1} >= k_min {self.k_min} does not hold")
        return self


Shortlist = Annotated[
    Union[FullShortlist, FrequencyShortlist, PositionFrequencyShortlist, ClustersShortlist], Field(discriminator="kind")
]


class Policy(_Block):
    """What to draft with, how far, how wide, and when to stop. ``draft`` names a draft of the pair, ``ngram``, or ``none``."""

    draft: Annotated[str, Field(min_length=1)] = "none"
    window: Window = FixedWindow()
    stop: Stop = NoStop()
    growth: Growth = ChainGrowth()
    select: Select = Select()
    stratify: Stratify | None = None
    shortlist: Shortlist = FullShortlist()

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        growth = data.get("growth")
        if data.get("draft", "none") == "none" and "window" not in data and growth is None:
            return {**data, "window": {"kind": "fixed", "gamma": 0}}
        if isinstance(growth, Mapping) and growth.get("kind") == "static" and "window" not in data:
            paths = growth.get("paths")
            depth = max((len(p) for p in paths if isinstance(p, (list, tuple))), default=0) if isinstance(paths, (list, tuple)) else 0
            if depth:
                data = {**data, "window": {"kind": "fixed", "gamma": depth}}
        if isinstance(growth, Mapping) and growth.get("kind") == "top_k":
            select = data.get("select")
            if select is None or (isinstance(select, Mapping) and not select):
                data = {**data, "select": {"top_n": DEFAULT_TOP_N}}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Policy:
        if self.draft == "none" and not (isinstance(self.window, FixedWindow) and self.window.gamma == 0):
            raise ValueError('a window needs a draft: add "draft" with one of the pair\'s names, or "ngram"')
        if self.draft == "ngram" and self.is_tree:
            raise ValueError('draft "ngram" proposes one continuation and cannot grow a tree; use growth "chain" or another draft')
        if self.shortlisted and self.draft in ("none", "ngram"):
            raise ValueError(
                f'shortlist "{self.shortlist.kind}" restricts a draft\'s output head, and draft "{self.draft}" has none; use another '
                'draft, or shortlist {"kind": "full"}'
            )
        if not isinstance(self.growth, (TopKGrowth, ClassifierGrowth)):
            if self.select.top_n is not None:
                raise ValueError(f'select.top_n chooses among grown nodes; growth "{self.growth.kind}" keeps all it grows')
            if self.stratify is not None:
                raise ValueError(f'stratify needs a tree that can grow: growth "top_k" or "classifier", not "{self.growth.kind}"')
        else:
            if isinstance(self.growth, TopKGrowth) and self.select.top_n is None:
                raise ValueError("growth top_k keeps select.top_n nodes: give a number")
            if self.stratify is not None and self.select.top_n is None:
                raise ValueError("stratify scales select.top_n: give a number")
            self._within_limits(self.growth)
        if self.depth_max > GAMMA_LIMIT:
            raise ValueError(f"window and stratify.alpha together reach depth {self.depth_max}, beyond the limit of {GAMMA_LIMIT}")
        return self

    def _within_limits(self, growth: TopKGrowth | ClassifierGrowth) -> None:
        """Raises ValueError for trees that could outgrow what the runtime holds of one."""
        width, depth, frontier = growth.width, self.depth_max, growth.frontier
        levels = [min(frontier, width**level) for level in range(1, depth + 1)]
        capped = isinstance(growth, ClassifierGrowth)
        lower = "lower the width, the cap or the window" if capped else "lower the width or the window"
        pool = width + max(0, depth - 1) * frontier * width
        if pool > POOL_LIMIT:
            raise ValueError(f"width {width} and depth {depth} grow {pool} candidates, more than {POOL_LIMIT}; {lower}")
        if sum(levels[:-1]) > EXPANDED_LIMIT:
            raise ValueError(
                f"width {width} and depth {depth} expand up to {sum(levels[:-1])} nodes, more than {EXPANDED_LIMIT}; {lower}"
            )
        if self.select.top_n is None and sum(levels) > NODE_LIMIT:
            raise ValueError(
                f"width {width} and depth {depth} verify up to {sum(levels)} nodes, more than {NODE_LIMIT}; give select.top_n, or {lower}"
            )
        if self.stratify is not None and self.select.top_n is not None:
            most = max(kept_nodes(self.select.top_n, self.stratify.fractions, self.stratify.alpha))
            if most > NODE_LIMIT:
                raise ValueError(f"a low bin keeps {most} nodes, more than {NODE_LIMIT}; lower select.top_n or stratify.fractions")

    @property
    def is_tree(self) -> bool:
        """Whether more than one continuation may be drafted."""
        return not isinstance(self.growth, ChainGrowth)

    @property
    def shortlisted(self) -> bool:
        """Whether the draft evaluates a part of its output head only."""
        return not isinstance(self.shortlist, FullShortlist)

    @property
    def depth_max(self) -> int:
        """The deepest level this policy can draft: the window's largest, and HeteroSpec's extension."""
        return self.gamma_max + (self.stratify.alpha if self.stratify is not None else 0)

    @property
    def artifacts(self) -> tuple[str, ...]:
        """Ids of the artifacts this policy needs."""
        named = (getattr(block, "artifact", None) for block in (self.window, self.growth, self.stratify, self.shortlist))
        return tuple(a for a in named if a is not None)

    @property
    def gamma_max(self) -> int:
        """The longest chain this policy can draft."""
        return self.window.gamma if isinstance(self.window, FixedWindow) else self.window.gamma_max

    @property
    def speculates(self) -> bool:
        return self.gamma_max > 0

    @property
    def needs_profile(self) -> bool:
        """Whether the window reads costs from a latency profile."""
        w = self.window
        return (isinstance(w, AnalyticWindow) and w.costs == "profile") or (
            isinstance(w, QLearningWindow) and w.reward == "speed"
        )

    @property
    def replays_exactly(self) -> bool:
        """Whether its decisions are functions of the text alone (they are, unless the window reads the clock)."""
        return not (isinstance(self.window, AnalyticWindow) and self.window.costs == "recent")

    def spelled_out(self) -> dict[str, Any]:
        """The document with every default written, JSON-ready."""
        return self.model_dump(mode="json")

    def canonical(self) -> str:
        """One line of JSON: equal policies, equal text (:func:`traces.schema.policy_content`)."""
        return policy_content(self.spelled_out())

    @property
    def id(self) -> str:
        """12 hex digits (:func:`traces.schema.policy_id`); the content is the identity."""
        return policy_id(self.spelled_out())

    def label(self) -> str:
        """A short name for tables, e.g. ``small fixed(gamma=4) max_prob(0.4)``."""
        if not self.speculates:
            return "autoregressive" if self.draft == "none" else f"{self.draft} fixed(gamma=0)"
        shown = self.window.model_dump(exclude={"kind"}, exclude_defaults=True)
        shown.update({"gamma": self.window.gamma} if isinstance(self.window, FixedWindow) else {"gamma_max": self.gamma_max})
        window = (
            f"{self.window.kind}({', '.join(f'{k}={v:.4g}' if isinstance(v, float) else f'{k}={v}' for k, v in shown.items())})"
        )
        stop = "" if isinstance(self.stop, NoStop) else f" {self.stop.kind}({self.stop.threshold:.4g})"
        return f"{self.draft} {window}{stop}{self._tree_label()}{self._shortlist_label()}"

    def _shortlist_label(self) -> str:
        shortlist = self.shortlist
        if isinstance(shortlist, FrequencyShortlist):
            return f" frequency({shortlist.size})"
        if isinstance(shortlist, PositionFrequencyShortlist):
            return f" position_frequency({shortlist.k_max})"
        if isinstance(shortlist, ClustersShortlist):
            return f" clusters({shortlist.k0}/{shortlist.k1}/{shortlist.k_min})"
        return ""

    def _tree_label(self) -> str:
        growth, parts = self.growth, []
        if isinstance(growth, StaticGrowth):
            parts.append(f"static({len(growth.paths)} nodes)" if growth.paths else f"static({growth.artifact})")
        elif isinstance(growth, (TopKGrowth, ClassifierGrowth)):
            shown = [f"k={growth.width}"]
            if isinstance(growth, ClassifierGrowth):
                shown += [f"beta={growth.beta:.4g}"] + (
                    [] if growth.cap == growth.width else ["no cap"] if growth.cap is None else [f"cap={growth.cap}"]
                )
            if growth.score != "auto":
                shown.append(growth.score)
            if growth.sharpness != 1.5:
                shown.append(f"sharpness={growth.sharpness:.4g}")
            if growth.proposals != "coupled":
                shown.append("q-children")
            parts.append(f"{growth.kind}({', '.join(shown)})")
        if self.select.top_n is not None:
            parts.append(f"N={self.select.top_n}")
        if self.stratify is not None:
            fractions = "/".join(f"{f:.3g}" for f in self.stratify.fractions)
            parts.append(f"bins(alpha={self.stratify.alpha}, {fractions})")
        return "".join(f" {p}" for p in parts)


class OlsDraft(_Block):
    """A draft for each prompt (on-the-fly paper, section 5), chosen by what equation 5's ordinary least squares predict. ``artifact``: the
    chooser, with one whole policy, a candidate, for each draft that it may choose (``fit chooser``)."""

    kind: Literal["ols"]
    artifact: Artifact


class ChooserPolicy(Policy):
    """The policy of ``"draft": {"kind": "ols", "artifact": ID}``: each request is decoded under one of the artifact's candidates.

    Its blocks are theirs, which only :func:`runtime.policies.plan.prepare` finds out; those it has itself are never run. ``draft`` is
    ``ols:ID``, which no pair has, so that whoever takes it for a plain policy fails.
    """

    @classmethod
    def of(cls, artifact: str) -> ChooserPolicy:
        """The policy of an artifact's id."""
        return cls(draft=f"{_OLS}{artifact}")

    @property
    def artifacts(self) -> tuple[str, ...]:
        return (self.draft.removeprefix(_OLS),)

    @property
    def needs_profile(self) -> bool:
        return True

    def spelled_out(self) -> dict[str, Any]:
        return {"draft": {"kind": "ols", "artifact": self.artifacts[0]}}

    def label(self) -> str:
        return f"ols({self.artifacts[0]})"


_OLS = "ols:"
AUTOREGRESSIVE = Policy(draft="none", window=FixedWindow(gamma=0))
BUILT_IN = {"autoregressive": AUTOREGRESSIVE}


def parse_policy(data: Any, *, where: str = "policy") -> Policy:
    """Validates a document, whatever value it is. Raises :class:`PolicyError`, and nothing else, with one line: what is wrong, where, and
    what to write instead."""
    try:
        refuse_excess(data)
        try:
            return _parsed(data)
        except ValidationError as error:
            raise ValueError(_explain(error, _under(data))) from None
    except MALFORMED as error:
        raise PolicyError(f"{where}: {one_line(str(error), MESSAGE_LIMIT)}") from None


def _parsed(data: Any) -> Policy:
    """The policy of a document. Raises ValueError, ValidationError among them."""
    if not isinstance(data, Mapping):
        raise ValueError(f"a policy is a JSON object, not {'null' if data is None else type(data).__name__}")
    chosen = data.get("draft")
    if not isinstance(chosen, Mapping):
        return Policy.model_validate(data)
    others = {key: value for key, value in data.items() if key != "draft"}
    Policy.model_validate(dict.fromkeys(others.keys() - Policy.model_fields.keys()))
    if others:
        raise ValueError(
            f'a draft of kind "ols" has every other block in the candidates of its artifact; leave {next(iter(others))!r} out'
        )
    if chosen.get("kind") not in list(_KINDS["draft"]):
        raise ValueError(f"draft.kind must be one of: {', '.join(_KINDS['draft'])}; or give a draft's name alone")
    return ChooserPolicy.of(OlsDraft.model_validate(chosen).artifact)


def _under(data: Any) -> tuple[str, ...]:
    """Where the block that :func:`_parsed` refused stood: a chooser's own keys are those of its draft."""
    is_chooser = isinstance(data, Mapping) and isinstance(data.get("draft"), Mapping) and len(data) == 1
    return ("draft", "ols") if is_chooser else ()


def static_paths(paths: Any) -> tuple[tuple[int, ...], ...]:
    """The paths of a static tree that somebody stored, by the rules of a document's (:class:`StaticGrowth`). Raises ValueError."""
    refuse_excess(paths)
    try:
        return StaticGrowth.model_validate({"kind": "static", "paths": paths}).paths
    except ValidationError as error:
        raise ValueError(one_line(_explain(error, ("growth", "static")), MESSAGE_LIMIT)) from None


def refuse_excess(data: Any) -> None:
    """Raises ValueError for a value larger than any policy, before anything walks through it: too many values, too deeply nested, too
    long a text, one that cannot be printed, or too large a number."""
    level, count = [data], 0
    for _ in range(NESTING_LIMIT + 1):
        count += len(level)
        if count > VALUES_LIMIT:
            raise ValueError(f"more than {VALUES_LIMIT} values are no policy")
        inner: list[Any] = []
        for value in level:
            _refuse_excess_of(value)
            if isinstance(value, Mapping):
                inner += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple)):
                inner += value
        if not inner:
            return
        level = inner
    raise ValueError(f"values nested more than {NESTING_LIMIT} deep are no policy")


def _refuse_excess_of(value: Any) -> None:
    if isinstance(value, str):
        if len(value) > TEXT_LIMIT:
            raise ValueError(f"a text of {len(value)} characters is too long; the limit is {TEXT_LIMIT} (it begins {value[:20]!r})")
        if not value.isprintable():
            raise ValueError(f"the text {value!a} has characters that cannot be printed")
    elif isinstance(value, int) and abs(value) >= NUMBER_LIMIT:
        raise ValueError(f"a whole number of {value.bit_length()} bits is too large")


def policy_schema() -> dict[str, Any]:
    """The JSON Schema of a policy document."""
    schema = Policy.model_json_schema()
    draft = schema["properties"]["draft"]
    name = {key: draft.pop(key) for key in ("type", "minLength")}
    draft["anyOf"] = [name, OlsDraft.model_json_schema()]
    return schema


def differences(left: Policy, right: Policy) -> list[dict[str, Any]]:
    """Where two policies differ, defaults spelled out: rows of ``key``, ``left``, ``right``; absent keys are None."""

    def flat(value: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(value, Mapping):
            return {path: value}
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= flat(inner, f"{path}.{key}" if path else key)
        return found

    a, b = flat(left.spelled_out()), flat(right.spelled_out())
    return [{"key": k, "left": a.get(k), "right": b.get(k)} for k in {**a, **b} if a.get(k) != b.get(k)]


def _explain(error: ValidationError, under: tuple[str, ...] = ()) -> str:
    first = error.errors()[0]
    path = [*under, *(str(p) for p in first["loc"])]
    block: type[BaseModel] = Policy
    for part in path[:-1]:
        block = _step_into(block, part)
    shown = ".".join(p for i, p in enumerate(path) if not (i > 0 and p in _KINDS.get(path[i - 1], {})))
    if first["type"] == "extra_forbidden":
        known = sorted(block.model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {shown!r}; {hint}"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        kinds = ", ".join(_KINDS.get(path[-1], {}))
        return f"{shown}.kind must be one of: {kinds}"
    message = first["msg"].removeprefix("Value error, ")
    value = first.get("input")
    given = f" (given: {_shown(value)})" if not isinstance(value, Mapping) else ""
    return f"{shown}: {message}{given}" if shown else f"{message}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


_KINDS: dict[str, dict[str, type[BaseModel]]] = {
    "draft": {"ols": OlsDraft},
    "window": {
        "fixed": FixedWindow,
        "analytic": AnalyticWindow,
        "fsm": FsmWindow,
        "cache_fsm": CacheFsmWindow,
        "q_learning": QLearningWindow,
        "heuristic": HeuristicWindow,
    },
    "stop": {"none": NoStop, "max_prob": MaxProbStop, "joint_prob": JointProbStop, "entropy": EntropyStop},
    "growth": {"chain": ChainGrowth, "top_k": TopKGrowth, "classifier": ClassifierGrowth, "static": StaticGrowth},
    "shortlist": {
        "full": FullShortlist,
        "frequency": FrequencyShortlist,
        "position_frequency": PositionFrequencyShortlist,
        "clusters": ClustersShortlist,
    },
}
_PLAIN: dict[str, type[BaseModel]] = {"select": Select, "stratify": Stratify}


def _step_into(block: type[BaseModel], part: str) -> type[BaseModel]:
    for kinds in _KINDS.values():
        if part in kinds and block is Policy:
            return kinds[part]
    return _PLAIN.get(part, block) if block is Policy else block

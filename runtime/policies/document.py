"""The policy document: what a user writes, what is searched, stored and published.

A :class:`Policy` is a frozen value composed of optional blocks, each one mechanism of one paper. Absent blocks take
defaults; :meth:`Policy.spelled_out` shows them. Unknown keys are errors, and the message names the nearest known key.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from traces.errors import PolicyError

GAMMA_LIMIT = 64
"""Largest window any policy may ask for."""

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


class Policy(_Block):
    """What to draft with, how far, and when to stop. ``draft`` names a draft of the pair, ``ngram``, or ``none``."""

    draft: Annotated[str, Field(min_length=1)] = "none"
    window: Window = FixedWindow()
    stop: Stop = NoStop()
    growth: ChainGrowth = ChainGrowth()

    @model_validator(mode="before")
    @classmethod
    def _without_draft(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("draft", "none") == "none" and "window" not in data:
            return {**data, "window": {"kind": "fixed", "gamma": 0}}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Policy:
        if self.draft == "none" and not (isinstance(self.window, FixedWindow) and self.window.gamma == 0):
            raise ValueError('a window needs a draft: add "draft" with one of the pair\'s names, or "ngram"')
        return self

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
        """One line of JSON: equal policies, equal text."""
        return json.dumps(self.spelled_out(), sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        """12 hex digits of the SHA-256 of :meth:`canonical`; the content is the identity."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:12]

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
        return f"{self.draft} {window}{stop}"


AUTOREGRESSIVE = Policy(draft="none", window=FixedWindow(gamma=0))
BUILT_IN = {"autoregressive": AUTOREGRESSIVE}


def parse_policy(data: Any, *, where: str = "policy") -> Policy:
    """Validates a document. Raises :class:`PolicyError` with one line: what is wrong, where, and what to write instead."""
    if not isinstance(data, Mapping):
        raise PolicyError(f"{where}: a policy is a JSON object, not {type(data).__name__}")
    try:
        return Policy.model_validate(data)
    except ValidationError as error:
        raise PolicyError(f"{where}: {_explain(error)}") from None


def policy_schema() -> dict[str, Any]:
    """The JSON Schema of a policy document."""
    return Policy.model_json_schema()


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


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(p) for p in first["loc"]]
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
    given = f" (given: {json.dumps(value, default=str)})" if not isinstance(value, Mapping) else ""
    return f"{shown}: {message}{given}" if shown else f"{message}"


_KINDS: dict[str, dict[str, type[BaseModel]]] = {
    "window": {
        "fixed": FixedWindow,
        "analytic": AnalyticWindow,
        "fsm": FsmWindow,
        "cache_fsm": CacheFsmWindow,
        "q_learning": QLearningWindow,
        "heuristic": HeuristicWindow,
    },
    "stop": {"none": NoStop, "max_prob": MaxProbStop, "joint_prob": JointProbStop, "entropy": EntropyStop},
    "growth": {"chain": ChainGrowth},
}


def _step_into(block: type[BaseModel], part: str) -> type[BaseModel]:
    for kinds in _KINDS.values():
        if part in kinds and block is Policy:
            return kinds[part]
    return ChainGrowth if part == "growth" else block

"""The policy document: what a user writes, what is searched, stored and published.

A :class:`Policy` is a frozen value composed of optional blocks, each one mechanism of one paper and
defined in its file. Absent blocks take defaults; :meth:`Policy.spelled_out` shows them. Unknown
keys are errors, and the message names the nearest known key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Union, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from spectune.runtime.policies.blocks import (
    EXPANDED_LIMIT,
    GAMMA_LIMIT,
    NODE_LIMIT,
    POOL_LIMIT,
    WIDTH_LIMIT,
    Artifact,
    BatchSize,
    Block,
    ByLoadWindow,
    ChainGrowth,
    FixedWindow,
    FullShortlist,
    Name,
)
from spectune.runtime.policies.c2t import ClassifierGrowth
from spectune.runtime.policies.dynaspec import ClustersShortlist
from spectune.runtime.policies.eagle2 import DEFAULT_TOP_N, Select, TopKGrowth
from spectune.runtime.policies.fr_spec import FrequencyShortlist, PositionFrequencyShortlist
from spectune.runtime.policies.heterospec import Stratify, kept_nodes
from spectune.runtime.policies.heuristic import HeuristicWindow
from spectune.runtime.policies.on_the_fly import (
    AnalyticWindow,
    CacheFsmWindow,
    FsmWindow,
    QLearningWindow,
)
from spectune.runtime.policies.sequoia import StaticGrowth
from spectune.runtime.policies.stops import EntropyStop, JointProbStop, MaxProbStop, NoStop, Stop
from spectune.traces.errors import PolicyError
from spectune.traces.schema import SHORTLIST_MARK, policy_id

__all__ = [  # the blocks come with the document
    "AUTOREGRESSIVE", "BUILT_IN", "DEFAULT_TOP_N", "EXPANDED_LIMIT", "GAMMA_LIMIT", "MALFORMED",
    "NODE_LIMIT", "POOL_LIMIT", "WIDTH_LIMIT", "AnalyticWindow", "ByLoadWindow", "ByPrompt",
    "CacheFsmWindow", "ChainGrowth", "ClassifierGrowth", "ClustersShortlist", "EntropyStop",
    "FixedWindow", "FrequencyShortlist", "FsmWindow", "FullShortlist", "Growth",
    "HeuristicWindow", "JointProbStop", "LoadPolicy", "MaxProbStop", "NoStop", "Policy",
    "PositionFrequencyShortlist", "PromptPolicy", "QLearningWindow", "Select", "Shortlist",
    "StaticGrowth", "Stop", "Stratify", "TopKGrowth", "Window", "differences", "parse_policy",
]  # fmt: skip

MALFORMED: Final = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
)  # fmt: skip
"""What reading a value raises that has not the form it should have."""

# The kinds of a block, simplest first: where speeds tie, the simpler policy wins.
Window = Annotated[
    Union[
        FixedWindow, FsmWindow, HeuristicWindow, CacheFsmWindow, AnalyticWindow, QLearningWindow,
        ByLoadWindow,
    ],
    Field(discriminator="kind"),
]  # fmt: skip
Growth = Annotated[
    Union[ChainGrowth, StaticGrowth, TopKGrowth, ClassifierGrowth], Field(discriminator="kind")
]
Shortlist = Annotated[
    Union[FullShortlist, FrequencyShortlist, PositionFrequencyShortlist, ClustersShortlist],
    Field(discriminator="kind"),
]


class Policy(Block):
    """What to draft with, how far, how wide, and when to stop. ``draft`` names a draft of the pair,
    ``ngram``, or ``none``. Its content is its identity."""

    draft: Name = "none"
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
        block = growth if isinstance(growth, Mapping) else {}
        kind, paths = block.get("kind"), block.get("paths")
        if kind == "static" and "window" not in data and isinstance(paths, Sequence):
            depth = max((len(p) for p in paths if isinstance(p, Sequence)), default=0)
            if depth:
                return {**data, "window": {"kind": "fixed", "gamma": depth}}
        if kind == "top_k" and data.get("select") in (None, {}):
            return {**data, "select": {"top_n": DEFAULT_TOP_N}}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Policy:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """What is wrong with blocks that are right by themselves."""
        draft, growth, top_n, stratify = self.draft, self.growth, self.select.top_n, self.stratify
        if draft == "none" and self.window != FixedWindow(gamma=0):
            yield 'a window needs a draft: add "draft" with one of the pair\'s names, or "ngram"'
        if draft == "ngram" and growth.inert(draft, type(growth)):
            yield (
                'draft "ngram" proposes one continuation and cannot grow a tree; use growth '
                '"chain" or another draft'
            )
        if draft == "ngram" and self.stop.inert(draft, type(growth)):
            yield (
                f'stop "{self.stop.kind}" reads a draft\'s probabilities, and draft "ngram" has '
                "none; leave the stop out, or use another draft"
            )
        if self.shortlist.inert(draft, type(growth)):
            yield (
                f'shortlist "{self.shortlist.kind}" restricts a draft\'s output head, and draft '
                f'"{draft}" has none; use another draft, or shortlist {{"kind": "full"}}'
            )
        if isinstance(growth, (TopKGrowth, ClassifierGrowth)):
            if isinstance(growth, TopKGrowth) and top_n is None:
                yield "growth top_k keeps select.top_n nodes: give a number"
            if stratify is not None and top_n is None:
                yield "stratify scales select.top_n: give a number"
            yield from self._excesses(growth, top_n)
        elif top_n is not None:
            yield (
                f'select.top_n chooses among grown nodes; growth "{growth.kind}" keeps all it grows'
            )
        elif stratify is not None:
            yield (
                'stratify needs a tree that can grow: growth "top_k" or "classifier", not '
                f'"{growth.kind}"'
            )
        if self.depth_max > GAMMA_LIMIT:
            yield (
                f"window and stratify.alpha together reach depth {self.depth_max}, beyond the "
                f"limit of {GAMMA_LIMIT}"
            )

    def _excesses(self, growth: TopKGrowth | ClassifierGrowth, top_n: int | None) -> Iterator[str]:
        """Where trees could outgrow what the runtime holds of one."""
        width, depth, frontier = growth.width, self.depth_max, growth.frontier
        levels = [min(frontier, width**level) for level in range(1, depth + 1)]
        lower = f"lower the width{', the cap' * (growth.kind == 'classifier')} or the window"
        candidates, expanded = width * sum([1, *levels[:-1]]), sum(levels[:-1])
        nodes = top_n or sum(levels)
        for count, limit, effect, remedy in (
            (candidates, POOL_LIMIT, f"grow {candidates} candidates", lower),
            (expanded, EXPANDED_LIMIT, f"expand up to {expanded} nodes", lower),
            (nodes, NODE_LIMIT, f"verify up to {nodes} nodes", f"give select.top_n, or {lower}"),
        ):
            if count > limit:
                yield f"width {width} and depth {depth} {effect}, more than {limit}; {remedy}"
        if self.stratify is not None and top_n is not None:
            most = max(kept_nodes(top_n, self.stratify.fractions, self.stratify.alpha))
            if most > NODE_LIMIT:
                yield (
                    f"a low bin keeps {most} nodes, more than {NODE_LIMIT}; lower select.top_n or "
                    "stratify.fractions"
                )

    def spelled_out(self) -> dict[str, Any]:
        """The document with every default written, JSON-ready."""
        return self.model_dump(mode="json")

    @property
    def id(self) -> str:
        """12 hex digits (:func:`traces.schema.policy_id`)."""
        return policy_id(self.spelled_out())

    @property
    def candidates(self) -> tuple[Policy, ...]:
        """The policies that may decode a request: this one."""
        return (self,)

    @property
    def is_tree(self) -> bool:
        """Whether more than one continuation may be drafted."""
        return not isinstance(self.growth, ChainGrowth)

    @property
    def shortlisted(self) -> bool:
        """Whether the draft evaluates a part of its output head only."""
        return not isinstance(self.shortlist, FullShortlist)

    @property
    def recorded_draft(self) -> str:
        """The draft's name in recordings. Under a shortlist it is a draft of its own, such as
        ``small/fr-1024@ARTIFACT``."""
        shortlist = self.shortlist
        if isinstance(shortlist, FullShortlist):
            return self.draft
        method = {"frequency": "fr", "position_frequency": "pa-fr"}.get(shortlist.kind, "clusters")
        budgets = "-".join(str(getattr(shortlist, name)) for name in shortlist.shown)
        return f"{self.draft}/{method}-{budgets}{SHORTLIST_MARK}{shortlist.artifact}"

    @property
    def depth_max(self) -> int:
        """The deepest level this policy can draft: the window's largest, and HeteroSpec's
        extension."""
        return self.gamma_max + (self.stratify.alpha if self.stratify is not None else 0)

    @property
    def artifacts(self) -> tuple[str, ...]:
        """Ids of the artifacts this policy needs."""
        blocks = (self.window, self.growth, self.stratify, self.shortlist)
        return tuple(filter(None, (getattr(block, "artifact", None) for block in blocks)))

    @property
    def gamma_max(self) -> int:
        """The longest chain this policy can draft."""
        return self.window.gamma_max

    @property
    def speculates(self) -> bool:
        return self.gamma_max > 0

    @property
    def needs_profile(self) -> bool:
        """Whether the window reads costs from a latency profile."""
        return self.window.kind == "analytic" or getattr(self.window, "reward", "") == "speed"

    def label(self) -> str:
        """A short name for tables, e.g. ``small fixed(gamma=4) max_prob(threshold=0.4)``."""
        if not self.speculates:
            return "autoregressive" if self.draft == "none" else f"{self.draft} fixed(gamma=0)"
        shown = {"window", *self.model_dump(exclude_defaults=True)} - {"draft", "by_prompt"}
        names = (name for name in Policy.model_fields if name in shown)
        return " ".join((self.draft, *(getattr(self, name).label() for name in names)))


class ByPrompt(Block):
    """A draft for each prompt (on-the-fly paper, section 5). ``artifact``: what was fitted to
    choose between the document's own blocks and the ``others`` (``fit chooser``)."""

    artifact: Artifact
    others: Annotated[tuple[Policy, ...], Field(min_length=1)]


class PromptPolicy(Policy):
    """A policy that is chosen for each prompt: its own blocks, or one of ``by_prompt.others``."""

    by_prompt: ByPrompt

    @model_validator(mode="after")
    def _distinct(self) -> PromptPolicy:
        if any(isinstance(policy, PromptPolicy) for policy in self.by_prompt.others):
            raise ValueError("by_prompt.others: a choice by prompt within another")
        if len({policy.id for policy in self.candidates}) <= len(self.by_prompt.others):
            raise ValueError("by_prompt.others: two of the policies to choose from are the same")
        return self

    @property
    def candidates(self) -> tuple[Policy, ...]:
        """The policies that may decode a request, in the order that the artifact knows."""
        blocks = {name: getattr(self, name) for name in Policy.model_fields}
        return (Policy.model_construct(**blocks), *self.by_prompt.others)

    @property
    def artifacts(self) -> tuple[str, ...]:
        inner = (artifact for policy in self.candidates for artifact in policy.artifacts)
        return (self.by_prompt.artifact, *dict.fromkeys(inner))

    @property
    def needs_profile(self) -> bool:
        return any(policy.needs_profile for policy in self.candidates)

    def label(self) -> str:
        return f"by_prompt({', '.join(policy.draft for policy in self.candidates)})"


class LoadPolicy(Policy):
    """A table from the number of running requests to a whole policy, as ``{"by_load": {"1": {...},
    "8": {...}, "32": {"draft": "none"}}}``: all requests of a step have the entry of the largest
    number that is no larger than theirs. Its own blocks are those of one request."""

    by_load: Annotated[dict[BatchSize, Policy], Field(min_length=1, max_length=16)]

    @model_validator(mode="before")
    @classmethod
    def _of_one(cls, data: Any) -> Any:
        table = data.get("by_load") if isinstance(data, Mapping) else None
        if not isinstance(table, Mapping):
            return data
        if beside := sorted(data.keys() - {"by_load"}):
            raise ValueError(f"by_load holds whole policies: {beside[0]!r} belongs into an entry")
        first = table.get("1", table.get(1))
        if first is None:
            raise ValueError('by_load begins with the policy of "1" running request')
        blocks = dict(first) if isinstance(first, (Policy, Mapping)) else {}
        return {**blocks, "by_load": table}

    @field_validator("by_load")
    @classmethod
    def _ascending(cls, table: dict[int, Policy]) -> dict[int, Policy]:
        for policy in table.values():
            if isinstance(policy, LoadPolicy) or isinstance(policy.window, ByLoadWindow):
                raise ValueError("an entry of by_load is one policy, not another table")
        return dict(sorted(table.items()))

    def __hash__(self) -> int:
        return hash(self.id)

    def at(self, running: int) -> Policy:
        """The policy of a step of so many requests, at least 1."""
        return self.by_load[max(least for least in self.by_load if least <= running)]

    def spelled_out(self) -> dict[str, Any]:
        return {"by_load": {str(n): policy.spelled_out() for n, policy in self.by_load.items()}}

    @property
    def candidates(self) -> tuple[Policy, ...]:
        """The policies of the table, by ascending load."""
        return tuple(self.by_load.values())

    @property
    def is_tree(self) -> bool:
        return any(policy.is_tree for policy in self.candidates)

    @property
    def artifacts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for policy in self.candidates for name in policy.artifacts))

    @property
    def depth_max(self) -> int:
        return max(policy.depth_max for policy in self.candidates)

    @property
    def gamma_max(self) -> int:
        return max(policy.gamma_max for policy in self.candidates)

    @property
    def needs_profile(self) -> bool:
        return any(policy.needs_profile for policy in self.candidates)

    def label(self) -> str:
        return f"by_load({', '.join(f'{n}: {p.label()}' for n, p in self.by_load.items())})"


AUTOREGRESSIVE = Policy(draft="none", window=FixedWindow(gamma=0))
BUILT_IN = {"autoregressive": AUTOREGRESSIVE}


def parse_policy(data: Any, *, where: str = "policy") -> Policy:
    """Validates a document, whatever value it is. Raises :class:`PolicyError`, and nothing else,
    with one line: what is wrong, where, and what to write instead."""
    try:
        if not isinstance(data, Mapping):
            name = "null" if data is None else type(data).__name__
            raise TypeError(f"a policy is a JSON object, not {name}")
        if data.get("by_load") is not None:
            return LoadPolicy.model_validate(data)
        if data.get("by_prompt") is not None or not data.keys() <= PromptPolicy.model_fields.keys():
            return PromptPolicy.model_validate(data)
        return Policy.model_validate({k: v for k, v in data.items() if k != "by_prompt"})
    except ValidationError as error:
        raise PolicyError(f"{where}: {_explain(error)}") from None
    except MALFORMED as error:
        raise PolicyError(f"{where}: {error}") from None


def _explain(error: ValidationError) -> str:
    """The first problem of a document."""
    first = error.errors()[0]
    loc = [str(part) for part in first["loc"]]
    # pydantic names the kind beside the key
    path = [p for above, p in pairwise(["", *loc]) if p not in KINDS.get(above, ())]
    place, value = ".".join(path), first["input"]
    if first["type"].startswith("union_tag"):
        return f"{place}.kind must be one of: {', '.join(KINDS[path[-1]])}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "string_pattern_mismatch":
        message = "only characters that can be printed are possible"
    if isinstance(value, Mapping):
        return f"{place}: {message}" if place else message
    return f"{place}: {message} (given: {value!r:.80})"


def differences(left: Policy, right: Policy) -> list[dict[str, Any]]:
    """Where two policies differ, defaults spelled out: rows of ``key``, ``left``, ``right``; absent
    keys are None."""

    def flat(value: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(value, Mapping):
            return {path.removeprefix("."): value}
        below = (flat(inner, f"{path}.{key}") for key, inner in value.items())
        return dict(item for part in below for item in part.items())

    a, b = flat(left.spelled_out()), flat(right.spelled_out())
    keys = [k for k in {**a, **b} if a.get(k) != b.get(k)]
    return [{"key": k, "left": a.get(k), "right": b.get(k)} for k in keys]


def _kinds(union: Any) -> dict[str, type[Block]]:
    """The blocks of a discriminated union, by kind."""
    return {get_args(b.model_fields["kind"].annotation)[0]: b for b in get_args(get_args(union)[0])}


KINDS: dict[str, dict[str, type[Block]]] = {
    "window": _kinds(Window),
    "stop": _kinds(Stop),
    "growth": _kinds(Growth),
    "shortlist": _kinds(Shortlist),
}

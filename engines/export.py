"""A policy as other engines' settings where they can say the same, and settings as a policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from spectune.engines.abilities import nearest_chain
from spectune.engines.settings import (
    ENGINE_SETTINGS,
    Drafting,
    Settings,
    algorithm_of,
    gguf_of,
)
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    AnyPolicy,
    ByBatchWindow,
    ChooserPolicy,
    FixedWindow,
    Policy,
    TopKGrowth,
)
from spectune.runtime.policies.refusals import MESSAGE_LIMIT
from spectune.traces.errors import PolicyError
from spectune.traces.text import one_line


def engine_settings(policy: AnyPolicy, pair: PairSpec, engine: str) -> dict[str, Any]:
    """The settings of an engine (of :data:`ENGINE_SETTINGS`) for a policy, {} for one that does not
    speculate: a chain of a fixed window, where the engine has it also one by batch, or EAGLE-2's
    tree of a head.

    Raises PolicyError for a draft that the pair has not, and a policy that the engine cannot
    express, with the nearest that it can.
    """
    if isinstance(policy, ChooserPolicy):
        raise PolicyError(
            f"{engine} cannot choose a draft for each prompt; "
            "export one of the candidates that `fit chooser` printed"
        )
    if not policy.speculates:
        return {}
    if policy.draft not in pair.draft_names:
        known = ", ".join(pair.draft_names)
        raise PolicyError(f"pair {pair.name} has no draft {policy.draft!r}; it has: {known}")
    try:
        return ENGINE_SETTINGS[engine].of(_drafting(policy, pair)).document()
    except ValueError as error:
        raise PolicyError(
            f"{engine} cannot express {policy.label()!r}: {_said(error)}; "
            f"{_said_of_nearest(policy)}"
        ) from None


def policy_of(settings: Mapping[str, Any], pair: PairSpec, engine: str) -> Policy:
    """The policy that :func:`engine_settings` wrote so. Of a tree, ``score`` comes back by
    default; what does not speculate comes
    back as ``autoregressive``.

    Raises PolicyError for settings that break the engine's rules, or say what no policy does.
    """
    if not settings:
        return AUTOREGRESSIVE
    try:
        found = ENGINE_SETTINGS[engine].model_validate(settings).drafting()
    except ValueError as error:
        raise PolicyError(f"settings of {engine}: {_said(error)}") from None
    at = gguf_of if engine == "llamacpp" else str
    names = {at(path): name for name, path in reversed(pair.drafts)}
    draft = "ngram" if found.model is None else names.get(at(found.model))
    if draft is None:
        raise PolicyError(f"settings of {engine}: no draft of pair {pair.name} is {found.model}")
    document: dict[str, Any] = {"draft": draft, "window": found.window.model_dump()}
    if found.width is not None:
        document |= {
            "growth": {"kind": "top_k", "width": found.width},
            "select": {"top_n": found.top_n},
        }
    return Policy.model_validate(document)


def engine_line(settings: Mapping[str, Any], pair: PairSpec, engine: str) -> str:
    """What to type to serve the pair's target with :func:`engine_settings`."""
    kind: type[Settings] = ENGINE_SETTINGS[engine]
    return kind.line(kind.model_validate(settings) if settings else None, pair.target)


def _drafting(policy: Policy, pair: PairSpec) -> Drafting:
    """What engines can say of a policy. Raises ValueError for what none can."""
    window, growth = policy.window, policy.growth
    if not isinstance(window, (FixedWindow, ByBatchWindow)):
        raise ValueError("it has no rule that adapts as this window does")
    if policy.stop.kind != "none":
        raise ValueError("it has no stop of this kind")
    if policy.shortlisted:
        raise ValueError("it has no shortlist of this kind")
    path = dict(pair.drafts).get(policy.draft)
    algorithm = algorithm_of(path)
    if not policy.is_tree:
        return Drafting(path, algorithm, window)
    if (
        not isinstance(growth, TopKGrowth)
        or growth.score == "coupled"
        or policy.stratify is not None
        or not algorithm
    ):
        raise ValueError(
            "trees can be exported with an EAGLE head, growth top_k by probability, and no bins"
        )
    return Drafting(path, algorithm, window, growth.width, policy.select.top_n)


def _said_of_nearest(policy: Policy) -> str:
    """The nearest chain that every engine can say, in words."""
    chain = nearest_chain(policy, ["fixed"])
    if chain == policy:
        return "the nearest is a chain of another draft"
    near = json.dumps({"draft": chain.draft, "window": chain.window.model_dump()})
    return f"the nearest that it can is {near}, and `simulate` says what that is worth"


def _said(error: ValueError) -> str:
    """The first reason, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    said = str(first["msg"]).removeprefix("Value error, ")
    return one_line(f"{where}: {said}" if where else said, MESSAGE_LIMIT)

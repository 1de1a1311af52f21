"""A policy as other engines' settings where they can say the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spectune.engines.abilities import nearest_chain
from spectune.engines.settings import ENGINE_SETTINGS, Drafting, algorithm_of
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import (
    ByLoadWindow,
    FixedWindow,
    Policy,
    PromptPolicy,
    TopKGrowth,
)
from spectune.traces.errors import PolicyError


def engine_settings(policy: Policy, pair: PairSpec, engine: str) -> dict[str, Any]:
    """The settings of an engine (of :data:`ENGINE_SETTINGS`) for a policy, {} for one that does not
    speculate: a chain of a fixed window, where the engine has it also one by batch, or EAGLE-2's
    tree of a head.

    Raises PolicyError for a draft that the pair has not, and a policy that the engine cannot
    express, with the nearest that it can.
    """
    if isinstance(policy, PromptPolicy):
        raise PolicyError(
            f"{engine} cannot choose a policy for each prompt; "
            "export one of the policies that it chooses from"
        )
    if not policy.speculates:
        return {}
    if policy.draft not in pair.draft_names:
        known = ", ".join(pair.draft_names)
        raise PolicyError(f"pair {pair.name} has no draft {policy.draft!r}; it has: {known}")
    try:
        if policy.draft in pair.methods and engine != "vllm":
            raise ValueError(f"{policy.draft} is a method of vLLM's")
        return ENGINE_SETTINGS[engine].settings(_drafting(policy, pair))
    except ValueError as error:
        raise PolicyError(
            f"{engine} cannot express {policy.label()!r}: {error}; {_said_of_nearest(policy)}"
        ) from None


def engine_line(settings: Mapping[str, Any], pair: PairSpec, engine: str) -> str:
    """What to type to serve the pair's target with :func:`engine_settings`."""
    return ENGINE_SETTINGS[engine].line(settings, pair.target)


def _drafting(policy: Policy, pair: PairSpec) -> Drafting:
    """What engines can say of a policy. Raises ValueError for what none can."""
    window, growth = policy.window, policy.growth
    if not isinstance(window, (FixedWindow, ByLoadWindow)):
        raise ValueError("it has no rule that adapts as this window does")
    if policy.stop.kind != "none":
        raise ValueError("it has no stop of this kind")
    if policy.shortlisted:
        raise ValueError("it has no shortlist of this kind")
    path = pair.drafts.get(policy.draft)
    algorithm = policy.draft if policy.draft in pair.methods else algorithm_of(path)
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

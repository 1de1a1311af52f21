"""A policy made ready to run: its window and stop compiled, its costs resolved, its draft known to
exist."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from spectune.runtime.costs import window_costs
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.by_prompt import Chooser, stored_chooser
from spectune.runtime.policies.document import (
    ByLoadWindow,
    FixedWindow,
    LoadPolicy,
    Policy,
    PromptPolicy,
)
from spectune.runtime.policies.rules import ShortlistRule, compile_shortlist, compile_tree
from spectune.runtime.policies.stops import CompiledStop, compile_stop
from spectune.runtime.policies.windows import CompiledWindow, compile_window
from spectune.runtime.trees.grow import TreeRule
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Sampling
from spectune.traces.tables import LatencyProfile

if TYPE_CHECKING:  # these hold tensors
    from spectune.runtime.drafts.device_trees import TreePhase
    from spectune.runtime.models import SlotModel
    from spectune.runtime.shortlists import Shortlists


@dataclass(frozen=True, eq=False)
class Plan:
    """A policy compiled, for one pair and device: what the loop swaps. Its state is the session's
    (:mod:`runtime.session`)."""

    policy: Policy
    window: CompiledWindow
    stop: CompiledStop
    version: int = 0
    rules: tuple[TreeRule, TreeRule] | None = None
    """How trees grow at temperature 0 and above; None without a draft."""
    shortlist: ShortlistRule | None = None
    shortlists: Shortlists | None = None
    """:attr:`shortlist` for the pair as it is loaded, made aside
    (:func:`runtime.decoder.prepare_for`)."""
    phases: dict[tuple[SlotModel, Sampling, int], TreePhase] = field(
        default_factory=dict, init=False
    )
    """How trees are drafted on a device (:func:`runtime.drafts.device_trees.tree_phase`). A plan
    that is made of another by ``dataclasses.replace`` may have other rules, and shares none."""
    chooser: Chooser | None = None
    """What takes one of the ``candidates`` for each prompt; None where this plan decodes all."""
    candidates: tuple[Plan, ...] = ()
    loads: tuple[int, ...] = ()
    """The numbers of running requests from which on each of the ``candidates`` is in force,
    ascending from 1; empty where the load decides nothing."""

    @cached_property
    def policy_id(self) -> str:
        # Made when asked for, as the label is: a short replay takes less time than these two.
        return self.policy.id

    @cached_property
    def label(self) -> str:
        return self.policy.label()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that may decode a request."""
        return self.candidates or (self,)

    def for_prompt(self, ids: Sequence[int], log_perplexity: Callable[[], float]) -> Plan:
        """The plan for a request's prompt, whose perplexity is asked for where it decides."""
        if self.chooser is None:
            return self
        return self.candidates[self.chooser.choose(ids, log_perplexity())]

    def at(self, running: int) -> Plan:
        """The plan of a step of so many requests, at least 1."""
        if not self.loads:
            return self
        return self.candidates[bisect_right(self.loads, running) - 1]

    def rule(self, sampling: Sampling) -> TreeRule:
        """How trees grow at a sampling temperature. A chain is a tree of width 1."""
        assert self.rules is not None
        return self.rules[0 if sampling.greedy else 1]


def prepare(
    policy: Policy,
    drafts: Collection[str],
    *,
    profile: LatencyProfile | None = None,
    version: int = 0,
    artifacts: Artifacts | None = None,
) -> Plan:
    """Compiles a policy for a pair whose drafts are ``drafts``.

    ``artifacts`` finds what the policy names that was fitted. Raises PolicyError when the draft is
    unknown, the window needs costs and there is no profile, or an artifact cannot be had, has
    another shape or was fitted on another draft. Of a choice by prompt, or by load, all that holds
    for each of its candidates."""
    if isinstance(policy, (PromptPolicy, LoadPolicy)):
        options: dict[str, Any] = {"profile": profile, "version": version, "artifacts": artifacts}
        plans = tuple(prepare(candidate, drafts, **options) for candidate in policy.candidates)
        if isinstance(policy, LoadPolicy):
            return replace(plans[0], policy=policy, loads=(*policy.by_load,), candidates=plans)
        chooser = stored_chooser(policy, artifacts)
        return replace(plans[0], policy=policy, chooser=chooser, candidates=plans)
    if isinstance(window := policy.window, ByLoadWindow):
        options = {"profile": profile, "version": version, "artifacts": artifacts}
        fixed = [policy.model_copy(update={"window": FixedWindow(gamma=n)})
                 for n in window.gamma.values()]  # fmt: skip
        plans = tuple(replace(prepare(each, drafts, **options), policy=policy) for each in fixed)
        return replace(plans[0], loads=(*window.gamma,), candidates=plans)
    if policy.draft != "none" and policy.draft not in drafts:
        names = ", ".join(sorted(drafts))
        raise PolicyError(f"draft: this pair has no draft {policy.draft!r}; it has: {names}")
    rules = shortlist = round_s = None
    if policy.speculates:
        greedy, sampled = (
            compile_tree(policy, sampled=sampled, artifacts=artifacts) for sampled in (False, True)
        )
        rules = greedy, sampled
        shortlist = compile_shortlist(policy, artifacts)
        if policy.needs_profile and profile is not None:
            round_s = window_costs(profile, policy, rules[0], shortlist)
    return Plan(
        policy=policy,
        window=compile_window(policy.window, round_s),
        stop=compile_stop(policy.stop),
        version=version,
        rules=rules,
        shortlist=shortlist,
    )

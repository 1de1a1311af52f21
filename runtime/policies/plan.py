"""A policy made ready to run: its window and stop compiled, its costs resolved, its draft known to exist."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from runtime.policies.artifacts import Q_TABLE, Artifacts, read_artifact
from runtime.policies.document import ChooserPolicy, Policy
from runtime.policies.shortlist_costs import shortlist_seconds
from runtime.policies.stops import CompiledStop, compile_stop
from runtime.policies.windows import CompiledWindow, WindowCosts, compile_window
from traces.errors import PolicyError
from traces.schema import LatencyProfile, Sampling, Verifier

if TYPE_CHECKING:
    from runtime.policies.prepared_chooser import PreparedChooser
    from runtime.policies.trees import TreeRule
    from runtime.shortlists import ShortlistRule, Shortlists

REFERENCE_CONTEXT = 256
"""Context at which a profile's costs are read for a window that wants one number per gamma."""
LEAST = 1e-9
"""Seconds that a verification counts at least, where passes are cheaper than gamma a_q says."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A policy compiled, for one pair and device: what the loop swaps. Its state is the session's (:mod:`runtime.session`)."""

    policy: Policy
    policy_id: str
    window: CompiledWindow
    stop: CompiledStop
    version: int = 0
    label: str = field(default="", compare=False)
    rules: tuple[TreeRule, TreeRule] | None = field(default=None, compare=False)
    shortlist: ShortlistRule | None = field(default=None, compare=False)
    shortlists: Shortlists | None = field(default=None, compare=False)
    """:attr:`shortlist` for the pair as it is loaded, made aside (:func:`runtime.decoder.prepare_for`)."""
    chooser: PreparedChooser | None = field(default=None, compare=False)
    """Set where each request is decoded under a candidate of a chooser; then nothing else here is run."""

    @property
    def candidates(self) -> tuple[Plan, ...]:
        """The policies that may decode: a chooser's candidates, or this one."""
        return (self,) if self.chooser is None else tuple(self.chooser.candidates.values())

    def rule(self, sampling: Sampling) -> TreeRule:
        """How trees grow at a sampling temperature. A chain is a tree of width 1."""
        assert self.rules is not None
        return self.rules[0 if sampling.greedy else 1]


def window_costs(
    profile: LatencyProfile,
    policy: Policy,
    rules: tuple[TreeRule, TreeRule] | None = None,
    shortlist: ShortlistRule | None = None,
) -> WindowCosts | None:
    """a_q and b_p(gamma) for gamma = 0..gamma_max (on-the-fly paper, definition 1), from a profile.

    What a round costs beside its passes is counted with verification, so that the window weighs whole rounds: gamma a_q + b_p(gamma) is
    what a round of gamma passes costs. ``rules`` are the policy's compiled trees, needed where an artifact says what they are;
    ``shortlist`` its compiled shortlist, whose passes cost less.

    None when the policy does not speculate. Raises PolicyError when the profile has no costs for the policy's draft, or none of its trees.
    """
    if not policy.speculates:
        return None
    if shortlist is not None:
        return _shortlisted_costs(window_costs(profile, policy, rules), shortlist_seconds(profile, shortlist))
    if policy.is_tree or _profiled_as_trees(profile, policy.draft):
        return _tree_window_costs(profile, policy, rules)
    curve = profile.draft_step.get(policy.draft)
    if curve is None:
        known = ", ".join(sorted(profile.draft_step))
        raise PolicyError(f"the latency profile has no costs for draft {policy.draft!r} (it has: {known}); run `profile` again")
    phase = profile.draft_phase_s.get(policy.draft, 0.0)
    return WindowCosts(
        draft_step_s=curve.at(1, REFERENCE_CONTEXT) + profile.stop_step_s.get(policy.stop.kind, 0.0),
        verify_s=tuple(
            _with(
                profile.verify.at(g + 1, REFERENCE_CONTEXT) + profile.overhead_s,
                (phase if g else 0.0) + profile.draft_bend(policy.draft, g),
            )
            for g in range(policy.gamma_max + 1)
        ),
    )


def _shortlisted_costs(full: WindowCosts | None, more: npt.NDArray[np.float64]) -> WindowCosts:
    """The costs of the whole head with what passes over shortlists take more, [passes]: their mean with a_q, the rest with b_p."""
    assert full is not None
    steps = len(full.verify_s) - 1
    mean = float(more[:steps].mean()) if steps else 0.0
    beyond = np.concatenate(([0.0], np.cumsum(more[:steps] - mean)))
    return WindowCosts(max(LEAST, full.draft_step_s + mean), tuple(_with(v, float(b)) for v, b in zip(full.verify_s, beyond, strict=True)))


def _with(verify_s: float, more_s: float) -> float:
    """A verification with what its round's passes cost beyond gamma a_q; that may be less than nothing, their sum may not."""
    return max(verify_s + more_s, min(verify_s, LEAST))


def _profiled_as_trees(profile: LatencyProfile, draft: str) -> bool:
    """Whether a profile knows a draft from trees alone: a head, whose chains are trees of width 1."""
    return draft not in profile.draft_step and profile.trees is not None and draft in profile.trees.level


def tree_kinds(policy: Policy) -> tuple[str, ...]:
    """The blocks of a policy that make drafting its trees cost something else than EAGLE-2's
    (:attr:`traces.schema.TreeProfile.kind_s`)."""
    growth = (policy.growth.kind,) if policy.growth.kind in ("static", "classifier") else ()
    return (*growth, *(("stratify",) if policy.stratify else ()), *(("stop",) if policy.stop.kind != "none" else ()))


def _tree_window_costs(profile: LatencyProfile, policy: Policy, rules: tuple[TreeRule, TreeRule] | None) -> WindowCosts:
    """The same for trees, by what they cost at temperature 0: a_q is the mean pass for a level after the first (of a top-k tree all are
    alike), and b_p(gamma) verifies all nodes that gamma levels can keep and holds what the passes cost beyond gamma a_q."""
    trees, draft, at = profile.trees, policy.draft, REFERENCE_CONTEXT
    if trees is None or draft not in trees.level:
        known = "none" if trees is None else ", ".join(sorted(trees.level))
        raise PolicyError(f"the latency profile has no costs of trees for draft {draft!r} (it has: {known}); run `profile` again")
    compiled = rules or _rules(policy, None)
    assert compiled is not None
    rule = compiled[0]
    level, kinds = trees.level[draft], tree_kinds(policy)
    per_pass, per_node = trees.more(draft, kinds)[0], trees.per_node(draft, kinds)[0]
    widths = [rule.step_width(n) for n in range(2, policy.gamma_max + 1)]
    # A static tree ends before a larger window.
    later = [max(LEAST, level.at(w, at) + per_pass + w * per_node) if w else 0.0 for w in widths]
    passes = [s for s in later if s] or [max(LEAST, level.at(rule.frontier, at) + per_pass + rule.frontier * per_node)]
    step_s = sum(passes) / len(passes)
    verify_s, drafting, nodes = [trees.verify.at(1, at) + profile.overhead_s], 0.0, 0
    for g in range(1, policy.gamma_max + 1):
        drafting += trees.first[draft].at(1, at) + per_pass + per_node if g == 1 else later[g - 2]
        # A classifier's nodes that are not expanded are not verified either.
        nodes += min(rule.places(g), rule.frontier) if rule.confidence is not None else rule.places(g)
        kept = nodes if rule.top_n is None else min(nodes, rule.top_n)
        more_s = drafting + kept * per_node + trees.bend(draft, g, rule.places(1)) - g * step_s
        verify_s.append(_with(trees.verify.at(kept + 1, at) + profile.overhead_s, more_s))
    return WindowCosts(draft_step_s=step_s, verify_s=tuple(verify_s))


def check_verifier(policy: Policy, verifier: Verifier, sampling: Sampling) -> None:
    """Raises PolicyError where a policy and a verifier would bias the text."""
    if verifier == "rejection" and not sampling.greedy and policy.is_tree:
        raise PolicyError(
            f"growth {policy.growth.kind}: the rejection verifier is for chains (it would need to know how siblings were drawn); use the "
            "coupled verifier"
        )
    if verifier == "rejection" and not sampling.greedy and not getattr(policy.stop, "keep_last", True):
        raise PolicyError(
            "stop.keep_last false discards a sampled token because of its probability, which the rejection verifier cannot make "
            "lossless; use the coupled verifier or keep_last true"
        )


def prepare(
    policy: Policy,
    drafts: Collection[str],
    *,
    profile: LatencyProfile | None = None,
    version: int = 0,
    artifacts: Artifacts | None = None,
) -> Plan:
    """Compiles a policy for a pair whose drafts are ``drafts``.

    ``artifacts`` finds what the policy names that was fitted. Raises PolicyError when the draft is unknown, the window needs costs and
    there is no profile, or an artifact cannot be had, has another shape or was fitted on another draft. Of a chooser all that holds for
    each of its candidates.
    """
    if isinstance(policy, ChooserPolicy):
        from runtime.policies.prepared_chooser import prepare_chooser

        return prepare_chooser(policy, drafts, profile=profile, version=version, artifacts=artifacts)
    if policy.draft != "none" and policy.draft not in drafts:
        known = ", ".join(sorted(drafts))
        raise PolicyError(f"draft: this pair has no draft {policy.draft!r}; it has: {known}")
    rules = _rules(policy, artifacts)
    shortlist = _shortlist(policy, artifacts)
    costs = window_costs(profile, policy, rules, shortlist) if policy.needs_profile and profile is not None else None
    if policy.needs_profile and costs is None:
        raise PolicyError(f"window.{policy.window.kind} needs measured costs: run `profile` for this pair and device first")
    return Plan(
        policy=policy,
        policy_id=policy.id,
        window=compile_window(policy.window, costs, q_table=_q_table(policy, artifacts)),
        stop=compile_stop(policy.stop),
        version=version,
        label=policy.label(),
        rules=rules,
        shortlist=shortlist,
    )


def _shortlist(policy: Policy, artifacts: Artifacts | None) -> ShortlistRule | None:
    """The shortlist of a policy that has one."""
    if not (policy.shortlisted and policy.speculates):
        return None
    from runtime.shortlists import compile_shortlist

    return compile_shortlist(policy, artifacts)


def _rules(policy: Policy, artifacts: Artifacts | None) -> tuple[TreeRule, TreeRule] | None:
    """The trees of a policy at temperature 0 and above; torch is imported here alone, since chains over a trace need none."""
    if not policy.speculates:
        return None
    from runtime.policies.tree_rules import compile_tree

    return compile_tree(policy, sampled=False, artifacts=artifacts), compile_tree(policy, sampled=True, artifacts=artifacts)


def _q_table(policy: Policy, artifacts: Artifacts | None) -> npt.NDArray[Any] | None:
    name = getattr(policy.window, "artifact", None)
    if name is None:
        return None
    return read_artifact(policy, "window", name, Q_TABLE, artifacts, lambda found: found.arrays["values"])

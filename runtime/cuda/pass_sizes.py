"""Which passes a policy's rounds can make, so that those and no others are captured
(:mod:`runtime.cuda.graphs`) before the first round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spectune.runtime.cuda.graphs import RUNGS, Kind
from spectune.runtime.drafts.protocol import LONG_LAG
from spectune.runtime.policies.document import (
    EXPANDED_LIMIT,
    NODE_LIMIT,
    WIDTH_LIMIT,
    AnalyticWindow,
    CacheFsmWindow,
    FsmWindow,
    Policy,
    QLearningWindow,
)
from spectune.runtime.sampling import filters
from spectune.runtime.trees.grow import TreeRule
from spectune.traces.schema import Sampling

if TYPE_CHECKING:
    from spectune.runtime.loading import LoadedPair
    from spectune.runtime.policies.plan import Plan
from spectune.runtime.policies.prepared_chooser import AnyPlan


@dataclass(frozen=True)
class PassSizes:
    """Numbers of tokens that rounds under one policy can have in one pass.

    ``verify``: the target's; ``first``: the pass of a round in which its draft reads what is new of
    the text; ``later``: the draft's other passes. ``drafted``: slots behind the text that the later
    ones fill, at most.
    """

    verify: frozenset[int]
    first: frozenset[int] = frozenset()
    later: frozenset[int] = frozenset()
    drafted: int = 0


EVERY: Final = PassSizes(
    verify=frozenset(RUNGS),
    first=frozenset(r for r in RUNGS if r <= LONG_LAG),
    later=frozenset(r for r in RUNGS if r <= WIDTH_LIMIT),
    drafted=EXPANDED_LIMIT,
)
"""What any policies can make of rounds that take turns, a round's first pass up to :data:`LONG_LAG`
tokens."""


def pass_sizes(
    prepared: Plan, vocab_size: int, sampling: Sampling | None = None, *, head: bool = False
) -> PassSizes:
    """What a policy's windows, stops, bins and N' can make of a round, the ends of texts, where
    windows are clipped, included.

    ``sampling`` None: any, filters included, under which distributions have fewer children.
    ``head``: the draft is an EAGLE head. A draft that another policy left behind may have more to
    read in its first round; that pass is not among these.
    """
    policy = prepared.policy
    if not policy.speculates:
        return PassSizes(frozenset({1}))
    tree = policy.is_tree or head
    verify, later, drafted = (
        _tree_sizes(prepared, vocab_size, sampling) if tree else _chain_sizes(policy)
    )
    if policy.draft == "ngram":
        return PassSizes(verify)
    # A head reads all that a round emitted; a language model its last token, and the last accepted
    # one, which it may only have proposed.
    lag = (policy.depth_max + 1 if head else 2) + _idle_rounds(policy)
    return PassSizes(verify, frozenset(range(1, min(lag, LONG_LAG) + 1)), later, drafted)


def _chain_sizes(policy: Policy) -> tuple[frozenset[int], frozenset[int], int]:
    gamma = policy.gamma_max
    return frozenset(range(1, gamma + 2)), frozenset({1} if gamma > 1 else ()), 0


def _tree_sizes(
    prepared: Plan, vocab_size: int, sampling: Sampling | None
) -> tuple[frozenset[int], frozenset[int], int]:
    policy, shortlist = prepared.policy, prepared.shortlist
    assert prepared.rules is not None
    rule = prepared.rules[0]
    few = shortlist is not None and (
        shortlist.routed or shortlist.budget(policy.depth_max) < rule.width
    )
    thin = rule.width > 1 and (few or sampling is None or filters(sampling, vocab_size))
    depths = range(1, policy.gamma_max + 1)
    nodes = {0} | {_kept(rule, rule.top_n, d) for d in depths}
    for bin_, top_n in enumerate(rule.kept):
        nodes |= {
            _kept(rule, top_n, d + more) for d in depths for more in range(rule.extension(bin_) + 1)
        }
    widths = {rule.step_width(level) for level in range(2, policy.depth_max + 1)} - {0}
    drafted = sum(rule.step_width(level) for level in range(2, policy.depth_max + 1))
    if thin or rule.confidence is not None:
        nodes = set(range(max(nodes) + 1))
        widths = widths if rule.static else set(range(1, max(widths, default=0) + 1))
    return frozenset(n + 1 for n in nodes), frozenset(widths), drafted


def _kept(rule: TreeRule, top_n: int | None, depth: int) -> int:
    """Nodes that are verified of ``depth`` levels whose nodes all exist."""
    return rule.verified(depth) if top_n is None else min(rule.verified(depth), top_n)


def _idle_rounds(policy: Policy) -> int:
    """Rounds without a draft that a window may choose in a row, each of which leaves the draft a
    token more to read."""
    window = policy.window
    if getattr(window, "gamma_min", 1) > 0:
        return 0
    if isinstance(window, (FsmWindow, CacheFsmWindow)):
        return 1
    if isinstance(window, AnalyticWindow):
        return window.history
    assert isinstance(window, QLearningWindow)
    return LONG_LAG


def prepare_graphs(
    pair: LoadedPair,
    prepared: AnyPlan,
    sampling: Sampling | None = None,
    text: int = 0,
    *,
    every: bool = False,
) -> None:
    """Captures what rounds under a policy can need (:func:`pass_sizes`); nothing where the pair has
    no graphs, or what is there already.

    ``text``: tokens that texts may have, for which the caches of all models are made large enough,
    so that none grows within a request; 0 asks for no more room than there is, so that it may be
    called while another thread decodes. ``every``: whatever any policy with this one's draft can
    need.
    """
    target = pair.target
    if target.graphs is None:
        return
    if text:
        target.graphs.hold(text, text + NODE_LIMIT)
        for model in pair.models.values():
            if model.graphs is not None:
                model.graphs.hold(text, text + EXPANDED_LIMIT)
    for one in prepared.candidates:
        draft = pair.models.get(one.policy.draft)
        head = draft is not None and draft.fed(own=True) > 0
        sizes = EVERY if every else pass_sizes(one, target.vocab_size, sampling, head=head)
        target.graphs.capture({Kind(): sizes.verify}, max(sizes.verify))
        if draft is not None and draft.graphs is not None:
            first, later = Kind(one.shortlist is None), Kind(one.shortlist is None, own=head)
            draft.graphs.capture(
                {
                    first: sizes.first,
                    later: sizes.later | (sizes.first if first == later else frozenset()),
                },
                sizes.drafted,
            )

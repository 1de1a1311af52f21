"""What a round costs: seconds composed from a latency profile, as tables that answer in one look-up.

A round at context c (tokens in the target's cache: prompt + start - 1) with g drafted and e emitted tokens, m draft steps
and lag l takes, m > 0 being understood in the first line and temperature > 0 in the terms in brackets,

    draft_s  = draft_phase_s + step(l, c) + (m - 1) step(1, c) + draft_bend_s(m) + m (stop_step_s [+ draft_sample_s])
    verify_s = verify(g + 1, c) [+ sample_s (g + 1) + noise_s e]
    round_s  = draft_s + verify_s + overhead_s

with ``step`` and ``verify`` the profile's curves, read in the middle of the context's bucket of 32 tokens. A request adds
``request_s``, the target's prefill of all but the prompt's last token, and the draft's where the policy speculates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from runtime.policies.document import GAMMA_LIMIT, NODE_LIMIT, WIDTH_LIMIT
from runtime.policies.plan import window_costs
from runtime.policies.shortlist_costs import shortlist_seconds
from traces.errors import TraceError
from traces.schema import CostCurve, LatencyProfile

if TYPE_CHECKING:
    from runtime.shortlists import ShortlistRule

__all__ = ["BUCKET", "LAG_LIMIT", "CostModel", "RoundSeconds", "TreeCosts", "request_seconds", "window_costs"]

FloatArray = npt.NDArray[np.float64]

BUCKET: Final = 32
"""Context tokens that share one cost."""
LAG_LIMIT: Final = 64
"""Longest lag with a table entry; beyond it the cost goes on with the table's last slope."""


class RoundLike(Protocol):
    """What the cost of a round depends on; :class:`traces.schema.Step` is one."""

    @property
    def drafted(self) -> int: ...
    @property
    def draft_steps(self) -> int: ...
    @property
    def emitted(self) -> int: ...
    @property
    def lag(self) -> int: ...


class RoundSeconds(NamedTuple):
    """Predicted seconds of one round; ``round_s`` includes the other two."""

    draft_s: float
    verify_s: float
    round_s: float


@dataclass(frozen=True, eq=False)
class CostModel:
    """The costs of one draft (or none), under one kind of stop, beside the target.

    ``verify_s`` float64 [buckets, GAMMA_LIMIT + 1] by drafted tokens; ``first_s`` [buckets, LAG_LIMIT + 2] by lag, of the
    pass that reads it, the phase's fixed part included; ``step_s`` [buckets], of every later pass; ``bend_s`` [GAMMA_LIMIT + 1],
    what that many passes together take more. Contexts beyond the last bucket cost as in it.
    """

    verify_s: FloatArray
    first_s: FloatArray
    step_s: FloatArray
    bend_s: FloatArray
    overhead_s: float
    noise_s: float
    sample_s: float
    draft_sample_s: float
    request_s: float
    prefill: CostCurve
    draft_prefill: CostCurve | None

    @classmethod
    def of(
        cls,
        profile: LatencyProfile,
        draft: str | None,
        max_context: int,
        *,
        stop: str = "none",
        shortlist: ShortlistRule | None = None,
    ) -> CostModel:
        """Tables for contexts up to ``max_context``; ``draft`` None for a policy that does not speculate, ``stop`` its
        stop's kind, ``shortlist`` what of its head the draft evaluates.

        Raises TraceError when the profile has no costs for the draft, PolicyError when it has none for its shortlists.
        """
        contexts = np.arange(max(0, max_context) // BUCKET + 1) * float(BUCKET) + (BUCKET - 1) / 2
        verify = _grid(profile.verify, np.arange(1.0, GAMMA_LIMIT + 2), contexts)
        first, step, bend = np.zeros((len(contexts), LAG_LIMIT + 2)), np.zeros(len(contexts)), np.zeros(GAMMA_LIMIT + 1)
        if draft is not None:
            curve = profile.draft_step.get(draft)
            if curve is None:
                known = ", ".join(sorted(profile.draft_step))
                raise TraceError(f"the latency profile has no costs for draft {draft!r} (it has: {known}); run `profile` again")
            first = _grid(curve, np.arange(LAG_LIMIT + 2.0), contexts) + profile.stop_step_s.get(stop, 0.0)
            step = first[:, 1].copy()
            first += profile.draft_phase_s.get(draft, 0.0)
            bend += [profile.draft_bend(draft, passes) for passes in range(GAMMA_LIMIT + 1)]
            bend += _shortlisted(profile, shortlist)
        return cls(
            verify,
            first,
            step,
            bend,
            profile.overhead_s,
            profile.noise_s,
            profile.sample_s,
            profile.draft_sample_s,
            profile.request_s,
            profile.prefill,
            None if draft is None else profile.draft_prefill.get(draft),
        )

    @classmethod
    def free(cls) -> CostModel:
        """Where there is no profile: everything takes 0 seconds."""
        verify, first = np.zeros((1, GAMMA_LIMIT + 1)), np.zeros((1, LAG_LIMIT + 2))
        nothing = CostCurve((1,), (0,), ((0.0,),), ((0.0,),))
        return cls(verify, first, np.zeros(1), np.zeros(GAMMA_LIMIT + 1), 0.0, 0.0, 0.0, 0.0, 0.0, nothing, None)

    def round_seconds(self, step: RoundLike, context: int, *, sampled: bool = False) -> RoundSeconds:
        """Seconds of one round; the replay kernel computes the same. ``sampled``: the temperature is above 0."""
        bucket = min(context // BUCKET, len(self.step_s) - 1)
        draft_s = 0.0
        if step.draft_steps > 0:
            first, beyond = self.first_s[bucket], max(0, step.lag - LAG_LIMIT)
            draft_s = float(first[min(step.lag, LAG_LIMIT)] + beyond * (first[LAG_LIMIT + 1] - first[LAG_LIMIT]))
            draft_s += (step.draft_steps - 1) * float(self.step_s[bucket])
            draft_s += float(self.bend_s[min(step.draft_steps, GAMMA_LIMIT)])
        verify_s = float(self.verify_s[bucket, step.drafted])
        if sampled:
            draft_s += self.draft_sample_s * step.draft_steps
            verify_s += self.sample_s * (step.drafted + 1) + self.noise_s * step.emitted
        return RoundSeconds(draft_s, verify_s, draft_s + verify_s + self.overhead_s)

    def request_seconds(self, prompt_tokens: npt.ArrayLike) -> FloatArray:
        """Seconds before the first round of requests with these prompts, same shape. A prompt of one token needs no prefill."""
        return _before_rounds(self.request_s, (self.prefill, self.draft_prefill), prompt_tokens)


def request_seconds(profile: LatencyProfile, draft: str | None, prompt_tokens: npt.ArrayLike) -> FloatArray:
    """:meth:`CostModel.request_seconds` of any draft, heads included, whose rounds are those of trees."""
    curves = (profile.prefill, None if draft is None else profile.draft_prefill.get(draft))
    return _before_rounds(profile.request_s, curves, prompt_tokens)


def _before_rounds(request_s: float, curves: tuple[CostCurve | None, ...], prompt_tokens: npt.ArrayLike) -> FloatArray:
    read = np.asarray(prompt_tokens) - 1
    seconds = np.full(read.shape, request_s)
    for curve in curves:
        if curve is not None:
            seconds += np.where(read > 0, _grid(curve, read.ravel(), np.zeros(1)).reshape(read.shape), 0.0)
    return seconds


@dataclass(frozen=True, eq=False)
class TreeCosts:
    """The costs of rounds of trees with one draft: float64 [2, buckets, width], greedy and sampled. ``verify_s`` by drafted nodes
    (0 .. NODE_LIMIT), with the near ties that they cost the draft, ``first_s`` by lag (0 .. LAG_LIMIT + 1), ``level_s`` by nodes read
    (0 .. WIDTH_LIMIT). ``bend_s`` [GAMMA_LIMIT + 1], what a round of that many passes takes more. ``token_s`` [2], a token emitted."""

    verify_s: FloatArray
    first_s: FloatArray
    level_s: FloatArray
    bend_s: FloatArray
    overhead_s: float
    token_s: FloatArray

    @classmethod
    def of(
        cls,
        profile: LatencyProfile,
        draft: str,
        max_context: int,
        *,
        width: int,
        kinds: Sequence[str] = (),
        shortlist: ShortlistRule | None = None,
    ) -> TreeCosts:
        """Tables for contexts up to ``max_context`` and policies whose trees have roots of ``width`` children, with blocks of these kinds
        (:func:`runtime.policies.plan.tree_kinds`) and a shortlist. Raises TraceError when the profile was measured without trees or
        this draft, PolicyError when it has no costs of the draft's shortlists."""
        trees = profile.trees
        if trees is None or draft not in trees.level:
            known = "none" if trees is None else ", ".join(sorted(trees.level))
            raise TraceError(
                f"the latency profile has no costs of trees for draft {draft!r} (it has: {known}); run `profile` again"
            )
        contexts = np.arange(max(0, max_context) // BUCKET + 1) * float(BUCKET) + (BUCKET - 1) / 2
        nodes, lags, widths = np.arange(1.0, NODE_LIMIT + 2), np.arange(LAG_LIMIT + 2.0), np.arange(WIDTH_LIMIT + 1.0)
        per_pass, near = trees.more(draft, kinds)[0], np.array(trees.per_node(draft, kinds))[:, None, None]
        return cls(
            np.stack([_grid(c, nodes, contexts) for c in (trees.verify, trees.sampled_verify)]) + near * (nodes - 1),
            np.stack([_grid(c[draft], lags, contexts) for c in (trees.first, trees.sampled_first)]) + per_pass + near,
            np.stack([_grid(c[draft], widths, contexts) for c in (trees.level, trees.sampled_level)]) + per_pass + near * widths,
            np.array([trees.bend(draft, passes, width) for passes in range(GAMMA_LIMIT + 1)]) + _shortlisted(profile, shortlist),
            profile.overhead_s,
            np.array(trees.token_s) + np.array([0.0, profile.noise_s]),
        )

    @classmethod
    def free(cls) -> TreeCosts:
        """Where there is no profile."""
        verify, first, level = (np.zeros((2, 1, n)) for n in (NODE_LIMIT + 1, LAG_LIMIT + 2, WIDTH_LIMIT + 1))
        return cls(verify, first, level, np.zeros(GAMMA_LIMIT + 1), 0.0, np.zeros(2))


def _shortlisted(profile: LatencyProfile, shortlist: ShortlistRule | None) -> FloatArray:
    """What that many passes over shortlists take more than with the whole head, [GAMMA_LIMIT + 1]."""
    if shortlist is None:
        return np.zeros(GAMMA_LIMIT + 1)
    return np.concatenate(([0.0], np.cumsum(shortlist_seconds(profile, shortlist))))


def _grid(curve: CostCurve, widths: npt.NDArray[Any], contexts: npt.NDArray[Any]) -> FloatArray:
    """:meth:`CostCurve.at` on a grid: float64 [contexts, widths]."""
    cost = np.asarray(curve.cost_s, dtype=np.float64)
    seconds = _matrix(curve.contexts, contexts) @ cost.T @ _matrix(curve.widths, widths).T
    return np.asarray(np.maximum(0.0, seconds), dtype=np.float64)


def _matrix(xs: tuple[int, ...], at: npt.NDArray[Any]) -> FloatArray:
    """Linear interpolation at ``at`` as a matrix [len(at), len(xs)], the outer cells' slopes continued."""
    out = np.zeros((len(at), len(xs)))
    if len(xs) == 1:
        out[:, 0] = 1.0
        return out
    grid = np.asarray(xs, dtype=np.float64)
    left = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(xs) - 2)
    share = (at - grid[left]) / (grid[left + 1] - grid[left])
    rows = np.arange(len(at))
    out[rows, left] = 1.0 - share
    out[rows, left + 1] = share
    return out

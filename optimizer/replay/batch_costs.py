"""What a step of the native decoder costs that serves several requests: the terms of
:func:`runtime.costs.step_shares`, tabulated for compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.optimizer.replay.chain_tables import Index
from spectune.runtime.costs import FURTHER_ROUND, FURTHER_TARGET, RoundKind, shortlist_seconds
from spectune.runtime.loop import PROMPT_TOKENS
from spectune.runtime.policies.document import GAMMA_LIMIT
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.rules import ShortlistRule
from spectune.traces.cost_table import FloatArray
from spectune.traces.errors import PolicyError
from spectune.traces.latency import check_draft
from spectune.traces.tables import LatencyProfile

ROWS: Final = 1024
"""Rows of a pass with an entry of their own; beyond, the last slope goes on."""


class BatchCosts(NamedTuple):
    """Seconds by policy of a table (its first axis, but for what all share).

    ``contexts`` [C]: knots of the tokens in the caches of a pass's requests, together. ``once``
    [policies, passes + 1]; ``level`` [policies, C, ROWS + 1], ``level_sampled`` [policies, ROWS +
    1] and ``further_pass`` [policies, seats + 1]: a pass of the draft by rows, by rows of sampled
    requests and by its requests. ``target`` [C, ROWS + 1], ``target_sampled`` and ``tree`` (by
    policy) [ROWS + 1]: the target's pass by the rows of all, of sampled ones and of those that
    drafted. ``drafted`` [policies]: a step that drafts. ``emitted``: a token of a sampled request.
    ``round`` [policies, 2]: the rest of a step that does not draft and of one that does;
    ``further`` [seats + 1]: the target's pass and the rest, by requests. ``prompt`` [drafts + 1,
    chunk + 1]: reading so many tokens of a prompt, the target's first."""

    contexts: FloatArray
    once: FloatArray
    level: FloatArray
    level_sampled: FloatArray
    further_pass: FloatArray
    target: FloatArray
    target_sampled: FloatArray
    tree: FloatArray
    drafted: FloatArray
    emitted: float
    round: FloatArray
    further: FloatArray
    prompt: FloatArray


class StepRows(NamedTuple):
    """What a step reads, summed over its requests. ``level`` int64 [passes, 4]: of each pass of the
    draft the rows, those of sampled requests, the tokens cached, and the requests. ``verified``
    int64 [6]: rows of the target's pass, those of sampled requests, those of requests that drafted,
    tokens cached, requests, and tokens emitted by sampled ones; ``passes`` int64 [1]: the most of a
    request."""

    level: npt.NDArray[np.int64]
    verified: Index
    passes: Index


def batch_costs(
    profile: LatencyProfile,
    kinds: Sequence[RoundKind],
    shortlists: Sequence[ShortlistRule | None],
    drafts: Sequence[str],
    seats: int,
) -> BatchCosts:
    """The costs of steps under policies whose rounds are of these ``kinds`` and whose drafts
    evaluate these ``shortlists`` (None: the whole head), on prompts that ``drafts`` read. Raises
    PolicyError where the profile knows nothing of several requests, or of a draft."""
    if seats > 1 and FURTHER_TARGET not in profile.terms:
        raise PolicyError(
            f"profile {profile.id} has no costs of several requests at once: `profile "
            "--concurrency N` measures them"
        )
    for kind in kinds:
        if kind.draft:
            priced = (profile.tree_drafts, " of trees") if kind.growth else (profile.drafts, "")
            check_draft(kind.draft, *priced)
    contexts = _contexts(profile)
    rows, requests = np.arange(ROWS + 1.0), np.arange(seats + 1.0)
    passes, chunk = np.arange(GAMMA_LIMIT + 1.0), np.arange(PROMPT_TOKENS + 1.0)
    sampled = [kind._replace(sampled=True).terms for kind in kinds]
    plain = [kind.terms for kind in kinds]

    def by_rows(names: Sequence[str]) -> FloatArray:
        """[C, ROWS + 1]; a pass of no rows is none."""
        tables = [profile.terms[n].grid(rows, contexts) for n in names if n in profile.terms]
        grid = sum(tables, np.zeros((len(contexts), len(rows))))
        grid[:, 0] = 0.0
        return grid

    def beyond_plain(part: str) -> list[FloatArray]:
        """What sampled requests cost beside, by rows."""
        return [
            by_rows([n for n in getattr(s, part) if n not in getattr(p, part)])[0]
            for s, p in zip(sampled, plain, strict=True)
        ]

    def further(name: str) -> FloatArray:
        if not name or name not in profile.terms:
            return np.zeros(len(requests))
        seconds = np.asarray(profile.seconds(name, batch=np.maximum(1.0, requests - 1)))
        return np.where(requests > 1, seconds, 0.0)

    def fixed(names: Sequence[str]) -> float:
        return float(sum(profile.seconds(name) for name in names))

    first = RoundKind().terms
    heads = []
    for kind in kinds:
        sizes = profile.shortlist_sizes(kind.draft, routed=False) if kind.draft else []
        heads.append(float(profile.seconds(f"head/{kind.draft}", rows=sizes[-1])) if sizes else 0.0)
    level = np.stack([by_rows(terms.per_pass) for terms in plain])
    level[:, :, 1:] += np.array(heads)[:, None, None]
    once = np.stack([sum((np.asarray(profile.seconds(n, passes=passes)) for n in t.once),
                         np.zeros(len(passes))) for t in plain])  # fmt: skip
    for p, rule in enumerate(shortlists):
        if rule is not None:
            once[p] += shortlist_seconds(profile, rule)[: len(passes)]
    once[:, 0] = 0.0
    tree_terms = [[n for n in t.verification if n == "tree target"] for t in plain]
    after = [[n for n in t.verification if n.startswith("after/")] for t in plain]
    prompt = [np.asarray(profile.seconds(f"prefill/{name}", rows=chunk))
              for name in ("target", *drafts)]  # fmt: skip
    prompt = [np.where(chunk > 0, seconds, 0.0) for seconds in prompt]
    return BatchCosts(
        contexts,
        once,
        level,
        np.stack(beyond_plain("per_pass")),
        np.stack([further(t.further_pass) for t in plain]),
        by_rows(first.verification),
        by_rows(["sampled target"])[0],
        np.stack([by_rows(names)[0] for names in tree_terms]),
        np.array([fixed(names) for names in after]),
        fixed(["noise"]) if "noise" in profile.terms else 0.0,
        np.array([[fixed(first.rest), fixed(t.rest)] for t in plain]),
        further(FURTHER_TARGET) + further(FURTHER_ROUND),
        np.stack(prompt),
    )


def free_costs(policies: int, drafts: int, seats: int) -> BatchCosts:
    """Steps that take no time."""

    def none(*shape: int) -> FloatArray:
        return np.zeros(shape)

    return BatchCosts(
        np.array([0.0, 1.0]), none(policies, GAMMA_LIMIT + 1), none(policies, 2, 2),
        none(policies, 2), none(policies, seats + 1), none(2, 2), none(2), none(policies, 2),
        none(policies), 0.0, none(policies, 2), none(seats + 1),
        none(drafts + 1, PROMPT_TOKENS + 1),
    )  # fmt: skip


def _contexts(profile: LatencyProfile) -> FloatArray:
    """The knots of the context of all terms together, between which each is a line."""
    knots = {0.0}
    for table in profile.terms.values():
        if "context" in table.axes:
            knots |= {*table.knots[table.axes.index("context")]}
    ordered = sorted(knots)
    return np.array([*ordered, ordered[-1] + 1.0])


@compiled(inline=True)
def _along(table: FloatArray, n: int) -> float:
    """An entry, or beyond the last what the last slope makes of it."""
    last = len(table) - 1
    if n <= last:
        return float(table[n])
    return float(table[last] + (n - last) * (table[last] - table[last - 1]))


@compiled(inline=True)
def _at(contexts: FloatArray, table: FloatArray, rows: int, context: float) -> float:
    """Between the knots of the context, and beyond them by the outer slope; never below 0."""
    n = 0
    while n < len(contexts) - 2 and context >= contexts[n + 1]:
        n += 1
    share = (context - contexts[n]) / (contexts[n + 1] - contexts[n])
    low, high = _along(table[n], rows), _along(table[n + 1], rows)
    return float(max(0.0, low + share * (high - low)))


@compiled(inline=True)
def batch_seconds(costs: BatchCosts, p: int, step: StepRows) -> float:
    """Seconds of a step under policy ``p`` of the table."""
    level, verified, passes = step.level, step.verified, int(step.passes[0])
    seconds = 0.0
    if passes > 0:
        seconds += costs.once[p, passes]
        for n in range(passes):
            rows, sampled, cached, requests = level[n, 0], level[n, 1], level[n, 2], level[n, 3]
            if rows > 0:
                seconds += _at(costs.contexts, costs.level[p], rows, cached)
                seconds += _along(costs.level_sampled[p], sampled)
                seconds += costs.further_pass[p, requests]
        seconds += costs.drafted[p] + _along(costs.tree[p], verified[2])
    seconds += _at(costs.contexts, costs.target, verified[0], verified[3])
    seconds += _along(costs.target_sampled, verified[1]) + costs.emitted * verified[5]
    seconds += costs.round[p, 1 if passes > 0 else 0] + costs.further[verified[4]]
    return float(seconds)

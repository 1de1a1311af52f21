"""The rules by which an engine puts requests into steps: what the serving simulator goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from spectune.traces.errors import TraceError


class ServingRules(NamedTuple):
    """How an engine fills its steps. The requests in force come first, in the order in which they
    were admitted; then as many of those that wait, first come first served, as seats and tokens
    allow.

    ``max_num_seqs``: seats. ``max_batched_tokens``: tokens of a step; a prompt that does not fit is
    read in chunks. ``draft_slots``: tokens of it that each request costs beside its own.
    ``max_len``: tokens of a request's text. ``cache_tokens``: tokens that the cache holds, 0 where
    that is not known. ``ahead``: steps that are scheduled before the results of those in execution
    are known. ``drafts_up_to``: tokens of the longest text of a step up to which it drafts for the
    next one, as its draft's own length allows, 0: of any; beyond, the step drafts for none of its
    requests, which verify so many dummies that nobody proposed. ``reply_s``: seconds from an answer
    until its client's next request is there, one client after another.

    A step drafts for the next one, by its own size, after it has verified, and also more than the
    request may still have. A loaded draft reads what the target reads, at 0 tokens too.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_len: int
    draft_slots: int = 0
    cache_tokens: int = 0
    ahead: int = 0
    drafts_up_to: int = 0
    reply_s: float = 0.0


RULES: Mapping[str, ServingRules] = {
    # vLLM's scheduler, `Scheduler.schedule` of version 0.32. What a recording says of its server
    # stands in the place of these defaults.
    "vllm": ServingRules(
        max_num_seqs=256,
        max_batched_tokens=2048,
        max_len=4096,
        draft_slots=1,
        ahead=1,
        reply_s=2e-3,
    ),
}
"""The rules of the engines that serve many requests at once, by name."""


def rules_of(engine: str, found: Mapping[str, Any] | None = None) -> ServingRules:
    """An engine's rules, with what a recording says of its server. Raises TraceError for an engine
    that serves one request at a time."""
    if engine not in RULES:
        raise TraceError(
            f"load is simulated for {', '.join(RULES)}, not for {engine!r}, which serves one "
            "request at a time"
        )
    return RULES[engine]._replace(
        **{name: value for name, value in (found or {}).items() if name in ServingRules._fields}
    )

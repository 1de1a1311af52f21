"""What a policy came to, as a result: executed or replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.report.words import LATENCIES
from spectune.traces.schema import Counts, Outcome

if TYPE_CHECKING:
    from spectune.optimizer.changes import Change, Share

TOKENS = ("emitted_tokens", "accepted_tokens", "drafted_tokens", "mean_accepted_length")


def outcome_result(
    outcome: Outcome,
    data: Mapping[str, Any],
    *,
    texts: Mapping[str, str] | None = None,
    shares: Sequence[Share] = (),
    changes: Sequence[Change] = (),
) -> Result:
    """A row is a request, with its text where there is one; printed is a line per category and the
    total, and where the policy changed a line per policy."""
    rows = []
    for request in outcome.per_request:
        counts = request.counts.to_json()
        row = {"request": request.request_id, "category": request.category}
        row |= {key: counts[key] for key in ("rounds", *TOKENS, "seconds", "tokens_per_s")}
        rows.append(row if texts is None else {**row, "text": texts[request.request_id]})
    total, verb = outcome.total, "predicted" if outcome.kind == "replayed" else "measured"
    by_category = outcome.by_category if len(outcome.by_category) > 1 else {}
    parts = [*by_category.items(), ("all", total)]
    parts += [(share.policy.label(), share.counts) for share in shares if changes]
    printed = [_line(name, counts) for name, counts in parts]
    table = Table(printed, title=f"{outcome.policy} ({verb})", best=len(by_category))
    speed = f", {total.tokens_per_s:.1f} tokens/s {verb}" if total.seconds else ""
    lines = [
        f"{outcome.policy}: {total.emitted_tokens} tokens in {total.rounds} rounds, "
        f"{total.mean_accepted_length:.2f} a round{speed}",
        *map(str, changes),
    ]
    low, high = outcome.tokens_per_s_interval()
    if high:
        lines.append(f"95% interval over requests: {low:.1f} to {high:.1f} tokens/s")
        lines += latency_lines(outcome.latency())
    return Result("\n".join(lines), data, rows, [table])


def _line(name: str, c: Counts) -> dict[str, Any]:
    """A row of the printed table."""
    return {
        "category": name,
        "requests": c.requests,
        "rounds": c.rounds,
        "tokens": c.emitted_tokens,
        "tau": round(c.mean_accepted_length, 2),
        "drafted": c.drafted_tokens,
        "accepted": c.accepted_tokens,
        "seconds": round(c.seconds, 2) if c.seconds else None,
        "tokens/s": c.tokens_per_s if c.seconds else None,
    }


def latency_lines(latency: Mapping[str, Any] | None) -> list[str]:
    """What a user waits for, in milliseconds; nothing where it was not measured."""
    return [
        f"{name}: p50 {times['p50'] * 1e3:.1f}, p95 {times['p95'] * 1e3:.1f}, p99 "
        f"{times['p99'] * 1e3:.1f} ms"
        for key, name in LATENCIES.items()
        if (times := (latency or {}).get(key))
    ]

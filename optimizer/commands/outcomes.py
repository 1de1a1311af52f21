"""What a policy came to, executed or replayed, and what a tuning executed, as results."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.report.words import (
    LATENCIES,
    counted,
    executed_table,
    prediction_in_words,
)
from spectune.traces.schema import Counts, Outcome

if TYPE_CHECKING:
    from spectune.optimizer.tuning.tuned import Tuned

TOKENS = ("emitted_tokens", "accepted_tokens", "drafted_tokens", "mean_accepted_length")


def outcome_result(
    outcome: Outcome,
    data: Mapping[str, Any],
    *,
    texts: Mapping[str, str] | None = None,
    parts: Mapping[str, Counts] = MappingProxyType({}),
) -> Result:
    """A row is a request, with its text where there is one; printed is a line per category, the
    total, and each of ``parts``."""
    rows = []
    for request in outcome.per_request:
        counts = request.counts.to_json()
        row = {"request": request.request_id, "category": request.category}
        row |= {key: counts[key] for key in ("rounds", *TOKENS, "seconds", "tokens_per_s")}
        rows.append(row if texts is None else {**row, "text": texts[request.request_id]})
    total, verb = outcome.total, "predicted" if outcome.kind == "replayed" else "measured"
    by_category = outcome.by_category if len(outcome.by_category) > 1 else {}
    lines_of = [*by_category.items(), ("all", total), *parts.items()]
    printed = [_line(name, counts) for name, counts in lines_of]
    table = Table(printed, title=f"{outcome.policy} ({verb})", best=len(by_category))
    speed = f", {total.tokens_per_s:.1f} tokens/s {verb}" if total.seconds else ""
    lines = [
        f"{outcome.policy}: {total.emitted_tokens} tokens in {total.rounds} rounds, "
        f"{total.mean_accepted_length:.2f} a round{speed}"
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


def tuning_result(tuned: Tuned) -> Result:
    """What a tuning executed (:func:`optimizer.report.words.executed_table`), and how it ended. A
    row is a policy, fastest first by the race: on other requests tokens/s do not compare."""
    executed = executed_table(tuned)
    printed = [dict(zip(executed.columns, row, strict=True)) for row in executed.rows]
    title = "Executed on requests the search has not seen"
    tested = f"{tuned.test_requests} others"
    if tuned.unit != "requests":
        tested = f"{counted(tuned.test_requests, tuned.unit)} with others"
    lines = [
        f"{tuned.trials} policies replayed on {tuned.search_requests} requests, {len(printed)} "
        f"executed on {tested}; between executions {tuned.texts}",
        prediction_in_words(tuned.prediction),
    ]
    dropped = [c for c in tuned.policies.values() if not c.left_in_race]
    if early := sum(c.executed_requests < tuned.test_requests for c in dropped):
        lines.append(
            f"dropped early, behind beyond noise: {early}; compare policies by the last column"
        )
    lines += latency_lines(tuned.policies[tuned.winner.id].latency)
    if tuned.seconds:
        lines.append("seconds: " + ", ".join(f"{k} {v:.0f}" for k, v in tuned.seconds.items()))
    table = Table(printed, title=title, best=executed.winner)
    return Result("\n".join(lines), tuned.to_json(), _rows(tuned), [table])


def _rows(tuned: Tuned) -> list[dict[str, Any]]:
    """The policies executed, each once, with all its roles."""
    kinds = ("predicted", "predicted_after_factor", "measured")
    keys = ("label", *(f"{kind}_tokens_per_s" for kind in kinds))
    ratios = ("ratio_to_incumbent", "ratio_to_autoregressive", "ratio_to_leader")
    rows: dict[str, dict[str, Any]] = {}
    for c in sorted(tuned.candidates, key=lambda c: -c.ratio_to_leader):
        role = rows[c.id]["role"] + ", " if c.id in rows else ""
        rows[c.id] = {"role": role + c.role, **{k: getattr(c, k) for k in (*keys, *ratios)}}
    return list(rows.values())

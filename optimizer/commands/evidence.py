"""What a tuning executed, as a result."""

from __future__ import annotations

from typing import Any

from spectune.optimizer.commands.outcomes import latency_lines
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.report.words import executed_table, prediction_in_words
from spectune.optimizer.verdict import Tuned


def tuning_result(tuned: Tuned) -> Result:
    """What a tuning executed (:func:`optimizer.report.words.executed_table`), and how it ended. A
    row is a policy, fastest first by the race: on other requests tokens/s do not compare."""
    data = tuned.to_json()
    executed = executed_table(data)
    printed = [dict(zip(executed.columns, row, strict=True)) for row in executed.rows]
    title = "Executed on requests the search has not seen"
    lines = [
        f"{tuned.trials} policies replayed on {tuned.search_requests} requests, {len(printed)} "
        f"executed on {tuned.test_requests} others; between executions {tuned.texts}",
        prediction_in_words(tuned.prediction),
    ]
    dropped = {c.policy.id: c for c in tuned.candidates if not c.survived}.values()
    if early := sum(len(c.executed.per_request) < tuned.test_requests for c in dropped):
        lines.append(
            f"dropped early, behind beyond noise: {early}; compare policies by the last column"
        )
    lines += latency_lines(tuned.winner.executed.latency())
    if far := next(iter(tuned.beyond.get("best", ())), None):
        lines.append(
            f"{tuned.beyond['policies']} policies read distributions that were not recorded and "
            f"were not tried; of the most promising, {far['label']}, what is known says "
            f"{far['value']:.1f} tokens/s"
        )
    lines.append("seconds: " + ", ".join(f"{k} {v:.0f}" for k, v in tuned.seconds.items()))
    table = Table(printed, title=title, best=executed.winner)
    return Result("\n".join(lines), data, _rows(data), [table])


def _rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The policies executed, each once, with all its roles."""
    kinds = ("predicted", "predicted_after_factor", "measured")
    keys = ("label", *(f"{kind}_tokens_per_s" for kind in kinds))
    ratios = ("ratio_to_incumbent", "ratio_to_autoregressive", "ratio_to_leader")
    rows: dict[str, dict[str, Any]] = {}
    for c in sorted(data["candidates"], key=lambda c: -c["ratio_to_leader"]):
        role = rows[c["id"]]["role"] + ", " if c["id"] in rows else ""
        rows[c["id"]] = {"role": role + c["role"], **{k: c[k] for k in (*keys, *ratios)}}
    return list(rows.values())

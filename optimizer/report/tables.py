"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from spectune.optimizer.report.fitting import FittingTable, cell, header
from spectune.optimizer.report.words import LATENCIES, executed_table, prediction_in_words
from spectune.traces.schema import NAT_SCALE, Counts, Outcome
from spectune.traces.tables import LatencyProfile
from spectune.traces.text import printable

if TYPE_CHECKING:
    from spectune.optimizer.changes import Change, Share
    from spectune.optimizer.verdict import Tuned


def shown(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | int | float | None]],
    note: str = "",
    *,
    words: Container[int] = (),
    styles: Mapping[int, str] | None = None,
) -> RenderableType:
    """A table, and lines below it. Whatever it quotes is shown as it is: rich reads markup in plain
    strings (``[math]``). Columns are numbers, to the right, but ``words``; ``styles`` are
    rows' by their place."""
    heading = Text(_as_it_is(title), style="table.title") if title else None
    table = FittingTable(title=heading, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in words else "right")
    for i, row in enumerate(rows):
        style = (styles or {}).get(i, "")
        table.add_row(*(Text(_as_it_is(str(content))) for content in row), style=style)
    return Group(table, Text(printable(note), style="dim")) if note else table


def _as_it_is(text: str) -> str:
    """On one line, without what would act on a terminal."""
    return printable(text).replace("\n", "\\n")


def outcome_table(
    outcome: Outcome, shares: Sequence[Share] = (), changes: Sequence[Change] = ()
) -> RenderableType:
    """An outcome: a line per category and the total, and where the policy changed a line per
    policy."""

    def row(name: str, c: Counts) -> tuple[str | int, ...]:
        seconds = (f"{c.seconds:.2f}", f"{c.tokens_per_s:.1f}") if c.seconds else ("-", "-")
        tokens = (c.emitted_tokens, f"{c.mean_accepted_length:.2f}")
        return name, c.requests, c.rounds, *tokens, c.drafted_tokens, c.accepted_tokens, *seconds

    by_category = outcome.by_category if len(outcome.by_category) > 1 else {}
    rows = [row(name, counts) for name, counts in by_category.items()]
    styles = {len(rows): "bold"}
    rows.append(row("all", outcome.total))
    rows += [row(share.policy.label(), share.counts) for share in shares if changes]
    low, high = outcome.tokens_per_s_interval()
    said = [str(change) for change in changes]
    if high:
        said.append(f"95% interval over requests: {low:.1f} to {high:.1f} tokens/s")
        said += latency_lines(outcome.latency())
    names = ("category", "requests", "rounds", "tokens", "tau", "drafted", "accepted", "seconds")
    title = f"{outcome.policy} ({'predicted' if outcome.kind == 'replayed' else 'measured'})"
    return shown(title, (*names, "tokens/s"), rows, "\n".join(said), words=range(1), styles=styles)


def latency_lines(latency: Mapping[str, Any] | None) -> list[str]:
    """What a user waits for, in milliseconds; nothing where it was not measured."""
    return [
        f"{name}: p50 {found['p50'] * 1e3:.1f}, p95 {found['p95'] * 1e3:.1f}, p99 "
        f"{found['p99'] * 1e3:.1f} ms"
        for key, name in LATENCIES.items()
        if (found := (latency or {}).get(key))
    ]


def evidence_table(tuned: Tuned) -> RenderableType:
    """What a tuning executed (:func:`optimizer.report.words.executed_table`), and how it ended."""
    executed = executed_table(tuned.to_json())
    notes = [
        f"{tuned.trials} policies replayed on {tuned.search_requests} requests, "
        f"{len(executed.rows)} executed on {tuned.test_requests} others; between executions "
        f"{tuned.texts}",
        prediction_in_words(tuned.prediction),
    ]
    dropped = {c.policy.id: c for c in tuned.candidates if not c.left}.values()
    if early := sum(len(c.executed.per_request) < tuned.test_requests for c in dropped):
        notes.append(
            f"dropped early, behind beyond noise: {early}; compare policies by the last column"
        )
    notes += latency_lines(tuned.winner.executed.latency())
    new = tuned.published
    notes.append(
        f"{tuned.reason}; "
        + (f"published as version {new.version}" if new else "nothing published")
    )
    if best := next(iter(tuned.beyond.get("best", ())), None):
        notes.append(
            f"{tuned.beyond['policies']} policies read distributions that were not recorded and "
            f"were not tried; of the most promising, {best['label']}, what is known says "
            f"{best['value']:.1f} tokens/s (record more with --cover)"
        )
    notes.append("seconds: " + ", ".join(f"{k} {v:.0f}" for k, v in tuned.seconds.items()))
    title = "Executed on requests the search has not seen"
    styles = {} if executed.winner is None else {executed.winner: "bold green"}
    words = range(executed.words)
    return shown(
        title, executed.columns, executed.rows, "\n".join(notes), words=words, styles=styles
    )


def profile_table(profile: LatencyProfile, name: str) -> RenderableType:
    """A latency profile: milliseconds of every term at its knots."""
    contexts = profile.terms["target"].knots[-1]
    rows: list[tuple[str, ...]] = []
    for term, costs in sorted(profile.terms.items()):
        over = [
            (axis, knot)
            for axis, knots in zip(costs.axes, costs.knots, strict=True)
            for knot in (knots if axis != "context" else ())
        ]
        places = np.array(contexts if "context" in costs.axes else contexts[:1])
        for axis, knot in over or [("", 0.0)]:
            at = {axis or "rows": np.full(len(places), knot), "context": places}
            seconds = (f"{1e3 * s:.3f}" for s in np.atleast_1d(costs.at(**at)))
            rows.append((term, f"{knot:.0f} {axis}" if axis else "", *seconds))
    check = profile.check
    notes = [f"overhead {100 * check.get('overhead_share', 0):.1f}% of a round"]
    notes.append(_checked_rounds("rounds of chains", check))
    if "trees" in check:
        notes.append(_checked_rounds("rounds of trees", check["trees"]))
    columns = ("term", "at", *(f"context {context:.0f}" for context in contexts))
    title = f"Latency profile {name} ({profile.device}, {profile.dtype}), ms"
    return shown(title, columns, rows, "; ".join(notes), words=range(1))


def _checked_rounds(what: str, check: Mapping[str, Any]) -> str:
    return (
        f"predicted against {check.get('rounds', 0)} executed {what}: "
        f"median error {100 * check.get('median_error', 0):.1f}% a round, "
        f"{100 * check.get('policy_error', check.get('median_error', 0)):.1f}% a policy, "
        f"total {100 * check.get('total_error', 0):+.1f}%, "
        f"{'accepted' if check.get('accepted') else 'NOT accepted'}"
    )


def bins_table(fitted: Mapping[str, Any]) -> RenderableType:
    """Fitted entropy bins, lowest first; thresholds in nats."""
    bounds = [*(f"{t / NAT_SCALE:.3g}" for t in fitted["thresholds"]), "-"]
    rows = [
        (
            *(n, bound, row["count"], f"{row['mean_tcr']:.1f}"),
            *(f"{100 * row[share]:.0f}%" for share in ("share", "fully_accepted")),
        )
        for n, (bound, row) in enumerate(zip(bounds, fitted["statistics"], strict=True))
    ]
    which = "fully accepted rounds"
    if fitted["fallback"]:
        which = "all rounds, too few being fully accepted"
    note = (
        f"fitted to {fitted['rounds']} of {fitted['starts']} rounds ({which}), N = "
        f"{fitted['top_n']}; R2 {fitted['explained']:.3f}"
    )
    columns = ("bin", "up to, nats", "rounds fitted", "mean TCR", "share of all", "fully accepted")
    title = f"Entropy bins of draft {fitted['draft']}, {fitted['depth']} levels"
    return shown(title, columns, rows, note)


def classifier_table(fitted: Mapping[str, Any]) -> RenderableType:
    """A trained classifier's figures on the trees held out."""
    metrics = fitted["metrics"]
    rows = [(fitted["hidden"], *(cell(metrics[k]) for k in ("recall", "positive_rate")))]
    note = (
        f"{fitted['nodes']} nodes of {fitted['starts']} trees, {fitted['accepted']} accepted; "
        f"trained on {metrics['positives']} accepted and {metrics['negatives']} rejected ones; "
        f"recall and positive rate at 0.5 on {metrics['held_out']} held-out nodes"
    )
    title = f"Classifier of draft {fitted['draft']}"
    return shown(title, ("hidden units", "recall", "positive rate"), rows, note)


def static_tree_table(fitted: Mapping[str, Any]) -> RenderableType:
    """A static tree, level by level."""
    rows = []
    for level in range(1, fitted["depth"] + 1):
        paths = [p for p in fitted["paths"] if len(p) == level]
        chances = fitted["acceptance"][min(level, len(fitted["acceptance"])) - 1]
        first = " ".join("/".join(map(str, p)) for p in paths[:8])
        first += " ..." if len(paths) > 8 else ""
        rows.append((level, len(paths), " ".join(f"{p:.3f}" for p in chances[:6]), first))
    rate = fitted["expected_tokens_per_s"]
    note = f"{fitted['expected_tokens']:.2f} tokens a round expected" + (
        f", {rate:.1f} tokens/s by profile {fitted['profile']}"
        if rate
        else "; chosen by acceptance alone, without costs"
    )
    columns = ("level", "nodes", "P(accepted) of ranks 0, 1, ... given the parent", "paths")
    title = f"Static tree of draft {fitted['draft']}, {fitted['nodes']} nodes"
    return shown(title, columns, rows, note, words=(2, 3))


def chooser_table(fitted: Mapping[str, Any]) -> RenderableType:
    """A choice by prompt as fitted: its policies, and what choosing is worth on the requests held
    out."""
    scores = fitted["held_out"] or fitted["judged"]
    rows: list[tuple[str | int, ...]] = [
        (label, f"{seconds:.2f}", scores["chosen"][label])
        for label, seconds in scores["seconds"].items()
    ]
    low, high = ("unknown" if end is None else f"{100 * end:+.1f}" for end in scores["interval"])
    note = (
        f"replayed on {scores['requests']} requests{' held out' * bool(fitted['held_out'])}: "
        f"choosing gains {100 * scores['gain']:+.1f}% ({low} to {high}) over the first, the best "
        f"for each request {100 * scores['oracle_gain']:+.1f}%"
    )
    return shown(fitted["reason"], ("policy", "seconds", "chosen"), rows, note, words=(0,))


def shortlist_fit_table(fitted: Mapping[str, Any]) -> RenderableType:
    """Frequencies or a router, as fitted."""
    if "coverage" in fitted:
        title = (
            f"{fitted['tokens']} tokens counted, {fitted['distinct']} of {fitted['vocab']} occur"
        )
        coverage = [(size, f"{100 * share:.2f}%") for size, share in fitted["coverage"].items()]
        return shown(title, ("size", "of the counted tokens"), coverage)
    sizes = sorted(fitted["cluster_sizes"])
    about = (
        f"Router of draft {fitted['draft']}: {fitted['clusters']} clusters of {sizes[0]} to "
        f"{sizes[-1]} tokens, median {sizes[len(sizes) // 2]}, learned from {fitted['contexts']} "
        "contexts"
    )
    return Text(_as_it_is(about))


def rows_table(
    rows: Sequence[dict[str, Any]], columns: Sequence[str], title: str = ""
) -> RenderableType:
    """Plain rows as a table, values as :func:`optimizer.report.fitting.cell` has them."""
    names = [header(column) for column in columns]
    cells = [[cell(row.get(c), c) for c in columns] for row in rows]
    return shown(title, names, cells, words=range(len(columns)))

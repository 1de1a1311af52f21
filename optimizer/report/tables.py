"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spectune.optimizer.report.fitting import FittingTable, cell, header
from spectune.traces.schema import TREE_SCALE, Counts, LatencyProfile, Outcome
from spectune.traces.text import printable

if TYPE_CHECKING:
    from spectune.optimizer.changes import Change, Share
    from spectune.optimizer.verdict import Tuned


def outcome_table(
    outcome: Outcome, shares: Sequence[Share] = (), changes: Sequence[Change] = ()
) -> RenderableType:
    """An outcome: a line per category and the total, and where the policy changed a line per
    policy."""
    verb = "predicted" if outcome.kind == "replayed" else "measured"
    columns = (
        "category",
        "requests",
        "rounds",
        "tokens",
        "tau",
        "drafted",
        "accepted",
        "seconds",
        "tokens/s",
    )
    table = _table(f"{outcome.policy} ({verb})", columns, words=1)

    def row(name: str, c: Counts, style: str = "") -> None:
        seconds = (f"{c.seconds:.2f}", f"{c.tokens_per_s:.1f}") if c.seconds else ("-", "-")
        counted = (
            c.requests,
            c.rounds,
            c.emitted_tokens,
            f"{c.mean_accepted_length:.2f}",
            c.drafted_tokens,
            c.accepted_tokens,
        )
        _row(table, name, *counted, *seconds, style=style)

    if len(outcome.by_category) > 1:
        for name, counts in outcome.by_category.items():
            row(name, counts)
    row("all", outcome.total, "bold")
    for share in shares if changes else ():
        row(share.policy.label(), share.counts)
    low, high = outcome.tokens_per_s_interval()
    said = [str(change) for change in changes]
    if high:
        said += [
            f"95% interval over requests: {low:.1f} to {high:.1f} tokens/s",
            *latency_lines(outcome.latency()),
        ]
    return Group(table, _note("\n".join(said))) if said else table


def latency_lines(latency: Mapping[str, Any] | None) -> list[str]:
    """What a user waits for, in milliseconds; nothing where it was not measured."""
    names = {
        "time_to_first_token_s": "time to first token",
        "time_per_output_token_s": "time per output token",
    }
    return [
        f"{name}: p50 {found['p50'] * 1e3:.1f}, p95 {found['p95'] * 1e3:.1f}, p99 "
        f"{found['p99'] * 1e3:.1f} ms"
        for key, name in names.items()
        if (found := (latency or {}).get(key))
    ]


def evidence_table(tuned: Tuned) -> RenderableType:
    """What a tuning executed, fastest first by what tells policies apart that were not executed on
    the same requests: the speed over the race's leader, projected to the workload. Prediction
    beside measurement; on how many requests tells whom the race dropped."""
    from spectune.optimizer.timings import finite

    speeds = (
        "predicted",
        "measured tokens/s",
        "on requests",
        "vs incumbent",
        "vs autoregressive",
        "vs leader (95%)",
    )
    table = _table(
        "Executed on requests the search has not seen", ("role", "policy", "tau", *speeds), words=2
    )
    seen: dict[str, list[str]] = {}
    for candidate in tuned.candidates:
        seen.setdefault(candidate.policy.id, []).append(candidate.role)
    unique = {c.policy.id: c for c in tuned.candidates}
    for c in sorted(unique.values(), key=lambda c: -c.raced[0]):
        low, high = finite(c.raced[1:])
        _row(
            table,
            ", ".join(seen[c.policy.id]),
            c.policy.label(),
            f"{c.executed.total.mean_accepted_length:.2f}",
            "-" if c.predicted is None else f"{c.predicted.total.tokens_per_s:.1f}",
            f"{c.executed.total.tokens_per_s:.1f}",
            f"{len(c.executed.per_request)} of {tuned.test_requests}",
            f"{c.ratio[0]:.3f}",
            f"{c.over_plain[0]:.3f}",
            f"{c.raced[0]:.3f}"
            + ("" if low is None or high is None or low == high else f" ({low:.3f}-{high:.3f})"),
            style="bold green" if c.policy.id == tuned.winner.policy.id else "",
        )
    done = (
        f"published as version {tuned.published.version}"
        if tuned.published
        else "nothing published"
    )
    fewer = sum(
        not c.left and len(c.executed.per_request) < tuned.test_requests for c in unique.values()
    )
    notes = [
        f"{tuned.trials} policies replayed on {tuned.search_requests} requests, {len(unique)} "
        f"executed on {tuned.test_requests} others; "
        f"requests whose text differed between policies: {tuned.texts_differ}",
        *(
            [f"dropped early, behind beyond noise: {fewer}; the last column is what compares them"]
            if fewer
            else []
        ),
        *latency_lines(tuned.winner.executed.latency()),
        f"{tuned.reason}; {done}",
        *_not_tried(tuned),
        "seconds: " + ", ".join(f"{k} {v:.0f}" for k, v in tuned.seconds.items()),
    ]
    return Group(table, _note("\n".join(notes)))


def _not_tried(tuned: Tuned) -> list[str]:
    """A line on policies that read more than was recorded, where there are any."""
    best = next(iter(tuned.beyond.get("best", ())), None)
    if best is None:
        return []
    return [
        f"{tuned.beyond['policies']} policies read distributions that were not recorded and were "
        f"not tried; of the most promising, {best['label']}, what is known says "
        f"{best['value']:.1f} tokens/s (record more with --cover)"
    ]


def profile_table(profile: LatencyProfile, name: str) -> RenderableType:
    """A latency profile: milliseconds of every term at its knots."""
    contexts = profile.terms["target"].knots[-1]
    columns = ("term", "at", *(f"context {context:.0f}" for context in contexts))
    table = _table(
        f"Latency profile {name} ({profile.device}, {profile.dtype}), ms", columns, words=1
    )
    for term, costs in sorted(profile.terms.items()):
        over = [
            (axis, knots)
            for axis, knots in zip(costs.axes, costs.knots, strict=True)
            if axis != "context"
        ]
        for axis, knot in [(axis, k) for axis, knots in over for k in knots] or [("", 0.0)]:
            places = np.array(contexts if "context" in costs.axes else contexts[:1])
            seconds = np.atleast_1d(
                costs.at(**{axis or "rows": np.full(len(places), knot), "context": places})
            )
            _row(
                table,
                term,
                f"{knot:.0f} {axis}" if axis else "",
                *(f"{1e3 * s:.3f}" for s in seconds),
            )
    check = profile.check
    notes = [
        f"overhead {100 * check.get('overhead_share', 0):.1f}% of a round",
        _checked_rounds("rounds of chains", check),
    ]
    if "trees" in check:
        notes.append(_checked_rounds("rounds of trees", check["trees"]))
    return Group(table, _note("; ".join(notes)))


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
    columns = ("bin", "up to, nats", "rounds fitted", "mean TCR", "share of all", "fully accepted")
    table = _table(f"Entropy bins of draft {fitted['draft']}, {fitted['depth']} levels", columns)
    bounds = [*(f"{t / TREE_SCALE:.3g}" for t in fitted["thresholds"]), "-"]
    for n, (bound, row) in enumerate(zip(bounds, fitted["statistics"], strict=True)):
        figures = (
            f"{row['mean_tcr']:.1f}",
            f"{100 * row['share']:.0f}%",
            f"{100 * row['fully_accepted']:.0f}%",
        )
        _row(table, n, bound, row["count"], *figures)
    which = (
        "all rounds, too few being fully accepted"
        if fitted["fallback"]
        else "fully accepted rounds"
    )
    overlap = ", ".join(f"{j:.2f}" for j in fitted["jaccard"])
    notes = (
        f"fitted to {fitted['rounds']} of {fitted['starts']} rounds ({which}), N = "
        f"{fitted['top_n']}; R2 {fitted['explained']:.3f}; "
        f"overlap (Jaccard) with trees of 4, 5, 6 layers: {overlap}"
    )
    return Group(table, _note(notes))


def classifier_table(fitted: Mapping[str, Any]) -> RenderableType:
    """A trained classifier by epoch, on the nodes held out."""
    metrics = fitted["metrics"]
    how = f"carried over from {fitted['from']}" if "from" in fitted else "trained"
    table = _table(
        f"Classifier of draft {fitted['draft']}, {how}",
        ("epoch", "loss", "recall", "positive rate"),
    )
    every = max(1, len(metrics["curve"]) // 10)
    for point in (
        p for p in metrics["curve"] if p["epoch"] % every == 0 or p is metrics["curve"][-1]
    ):
        _row(table, point["epoch"], *(cell(point[k]) for k in ("loss", "recall", "positive_rate")))
    notes = (
        f"{fitted['hidden']} hidden units on {', '.join(metrics['features'])}; {fitted['nodes']} "
        f"nodes of {fitted['starts']} trees, {fitted['accepted']} accepted; trained on "
        f"{metrics['positives']} accepted and {metrics['negatives']} rejected ones; recall and "
        f"positive rate at 0.5 on {metrics['held_out']} held-out nodes"
    )
    return Group(table, _note(notes))


def score_table(fitted: Mapping[str, Any]) -> RenderableType:
    """A fitted sharpness: estimates of acceptance by rank beside what was observed, on the requests
    held out."""
    title = (
        f"Score of draft {fitted['draft']}, {fitted['width']} children: sharpness "
        f"{fitted['sharpness']:g}"
    )
    table = _table(title, ("rank", "distributions", "accepted", "fitted", "default", "q"))
    for row in fitted["ranks"]:
        figures = (f"{row[k]:.3f}" for k in ("observed", "predicted", "default", "probability"))
        _row(table, row["rank"], row["laws"], *figures)
    loss = fitted["loss"]
    notes = (
        f"log loss of a child {loss['fitted']:.4f}, with the default sharpness "
        f"{loss['default']:.4f}, by q {loss['probability']:.4f}, on {fitted['held_out']} held-out "
        f"distributions, {100 * fitted['covered']:.0f}% of which have the text's token among their "
        f"children; fitted to {fitted['laws']} distributions"
    )
    if fitted["at_border"]:
        notes += "; the sharpness is at the border of what was looked at"
    return Group(table, _note(notes))


def static_tree_table(fitted: Mapping[str, Any]) -> RenderableType:
    """A static tree, level by level."""
    table = _table(
        f"Static tree of draft {fitted['draft']}, {fitted['nodes']} nodes", ("level", "nodes")
    )
    table.add_column("P(accepted) of ranks 0, 1, ... given the parent")
    table.add_column("paths")
    for level in range(1, fitted["depth"] + 1):
        paths = [p for p in fitted["paths"] if len(p) == level]
        chances = fitted["acceptance"][min(level, len(fitted["acceptance"])) - 1]
        first = " ".join("/".join(map(str, p)) for p in paths[:8]) + (
            " ..." if len(paths) > 8 else ""
        )
        _row(table, level, len(paths), " ".join(f"{p:.3f}" for p in chances[:6]), first)
    rate = fitted["expected_tokens_per_s"]
    notes = f"{fitted['expected_tokens']:.2f} tokens a round expected" + (
        f", {rate:.1f} tokens/s by profile {fitted['profile']}"
        if rate
        else "; chosen by acceptance alone, without costs"
    )
    return Group(table, _note(notes))


def chooser_table(fitted: Mapping[str, Any]) -> RenderableType:
    """A chooser of drafts as fitted: its candidates, and what choosing is worth on the requests
    held out."""
    from spectune.runtime.policies.document import parse_policy

    scores = fitted["metrics"].get("held_out") or fitted["metrics"]["fit"]
    kept = "chooses" if fitted["chooses"] else f"keeps to {fitted['single']}"
    table = _table(
        f"{kept}: {fitted['reason']}",
        ("draft", "policy", "accuracy", "R^2", "tokens/s", "chosen"),
        words=2,
    )
    for draft, document in fitted["candidates"].items():
        r2, speed = scores["r2"].get(draft), scores["tokens_per_s"][draft]
        numbers = (
            f"{scores['accuracy'][draft]:.2f}",
            "" if r2 is None else f"{r2:.2f}",
            f"{speed:.1f}",
        )
        _row(
            table,
            draft,
            parse_policy(document).label(),
            *numbers,
            scores["picks"][fitted["rule"]][draft],
        )
    for name in ("oracle", "throughput", "theorem_3"):
        share, (low, high) = scores["share"][name], scores["interval"][name]
        about = (
            f"{100 * scores['gain'][name]:+.1f}% ({100 * low:+.1f} to {100 * high:+.1f}) over "
            f"{scores['single']}"
        )
        about += "" if share is None else f", share {share:.2f}"
        _row(table, name, about, "", "", f"{scores['tokens_per_s'][name]:.1f}", "")
    held = f"{scores['requests']} requests" + (
        " held out" if "held_out" in fitted["metrics"] else ", those fitted to"
    )
    return Group(table, _note(f"replayed on {held}, the pass that reads prompts charged"))


def shortlist_fit_table(fitted: Mapping[str, Any]) -> RenderableType:
    """Frequencies, clusters, a router or ranks, as fitted."""
    if "kept" in fitted:
        order = (
            f"router {fitted['router']}"
            if "router" in fitted
            else f"frequencies {fitted['frequencies']}"
        )
        title = (
            f"{fitted['requests']} requests, {fitted['nodes']} distributions of draft "
            f"{fitted['draft']} under {order}"
        )
        columns = (
            ("clusters", "tokens", "mass", "true_tokens")
            if "router" in fitted
            else ("tokens", "mass", "true_tokens")
        )
        return rows_table(fitted["kept"], columns, title)
    if "coverage" in fitted:
        title = (
            f"{fitted['tokens']} tokens counted, {fitted['distinct']} of {fitted['vocab']} occur"
        )
        table = _table(title, ("size", "of the counted tokens"))
        for size, share in fitted["coverage"].items():
            _row(table, size, f"{100 * share:.2f}%")
        return table
    sizes = sorted(fitted["cluster_sizes"])
    about = (
        f"{fitted['clusters']} clusters of {sizes[0]} to {sizes[-1]} tokens, median "
        f"{sizes[len(sizes) // 2]}"
    )
    if "scores" not in fitted:
        return Text(_as_it_is(f"{about}; mean cosine to the centre {fitted['cohesion']:.3f}"))
    scores = fitted["scores"]
    names = ("clusters", "tokens", "recall", "mass kept", "frequency, same size", "best clusters")
    table = _table(f"Router of draft {fitted['draft']}: {about}", names)
    for i, k in enumerate(scores["ks"]):
        shares = [scores[name][i] for name in ("recall", "mass", "frequency", "oracle")]
        _row(table, k, f"{scores['size'][i]:.0f}", *(f"{100 * share:.1f}%" for share in shares))
    note = (
        f"{scores['contexts']} contexts of texts held out; mass: of the draft's distribution, "
        f"{scores['ceiling']:.3f} at most"
    )
    return Group(table, _note(note))


def rows_table(
    rows: Sequence[dict[str, Any]], columns: Sequence[str], title: str = ""
) -> RenderableType:
    """Plain rows as a table, values as :func:`optimizer.report.fitting.cell` has them."""
    table = _table(title, [header(column) for column in columns], words=len(columns))
    for row in rows:
        _row(table, *(cell(row.get(c), c) for c in columns))
    return table


def _table(title: str, columns: Sequence[str], *, words: int = 0) -> Table:
    """A table whose title is shown as it is, whatever it quotes; its rows are :func:`_row`'s. All
    columns but the first ``words`` are numbers, to the right."""
    table = FittingTable(
        title=Text(_as_it_is(title), style="table.title") if title else None, title_justify="left"
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < words else "right")
    return table


def _row(table: Table, *cells: str | int, style: str = "") -> None:
    """Adds a row of cells that are shown as they are: rich reads markup in plain strings
    (``[math]``)."""
    table.add_row(*(Text(_as_it_is(str(content))) for content in cells), style=style)


def _as_it_is(text: str) -> str:
    """On one line, what would act on a terminal spelled out."""
    return printable(text).replace("\n", "\\n")


def _note(text: str) -> Text:
    """Lines below a table."""
    return Text(printable(text), style="dim")

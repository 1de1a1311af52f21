"""The report of a tuning: what is stored of it, and its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from spectune.db.errors import NotFoundError
from spectune.optimizer.report.charts import (
    Cell,
    Curve,
    Dot,
    Figure,
    Plot,
    curves,
    document,
    dot_rows,
    folded,
    safe,
    section,
    table,
)
from spectune.optimizer.report.words import (
    Json,
    finding,
    outcome_in_words,
    policy_in_words,
    savings,
    speculates,
    verdict_in_words,
)
from spectune.traces.store import TraceStore
from spectune.traces.store.catalog import Study
from spectune.traces.store.kinds import EVIDENCE
from spectune.traces.store.query import TraceFilter, acceptance_stats

ROUNDS_DRAWN: Final = 24
LABELS_LISTED: Final = 8
NOT_STORED: Final = (
    "Not stored: this tuning was made by an earlier version, or its evidence was pruned."
)


@dataclass(frozen=True)
class TuningReport:
    """What is known of a tuning. ``evidence`` is empty where it was not stored. ``acceptance``: by
    draft the share of starts whose first 1, 2, ... proposals are all kept."""

    study: Study
    evidence: Json
    acceptance: Mapping[str, Sequence[float]]

    @property
    def tuned(self) -> Json | None:
        """The results as ``tune --json`` printed them."""
        found: Json | None = self.evidence.get("tuned")
        return found

    @property
    def about(self) -> Json:
        found: Json = self.evidence.get("about", {})
        return found

    @property
    def device(self) -> str:
        return str(self.about.get("device", "cpu"))


def report_on(store: TraceStore, name: str) -> TuningReport:
    """Reads a study by id, the beginning of one, or ``latest``. Raises NotFoundError, or
    CorruptedChunkError where it is damaged."""
    study = store.get_study(name)
    return TuningReport(study, _evidence(store, study), _acceptance(store, study))


def _evidence(store: TraceStore, study: Study) -> Json:
    for name, origin in store.artifact_origins(EVIDENCE, study.pair_id):
        if origin.get("study") == study.id:
            found: Json = store.get_artifact(name).document
            return found
    for published in store.list_publications(study.pair_id):
        if published.evidence.get("study") == study.id:
            return {"tuned": published.evidence, "about": {"device": published.device}}
    return {}


def _acceptance(store: TraceStore, study: Study) -> dict[str, Sequence[float]]:
    if study.recording_id is None:
        return {}
    try:
        found = acceptance_stats(
            store.database, TraceFilter(recordings=(study.recording_id,)), ("draft",)
        )
    except NotFoundError:  # the recording was pruned
        return {}
    return {dict(stats.group)["draft"]: stats.survival.marginal for stats in found}


def _shown(tuned: Json) -> list[tuple[str, str, Json]]:
    """(what it is, number of its colour, results) of the winner, the incumbent and autoregression,
    each policy once."""
    by_id = {c["id"]: c for c in tuned["candidates"]}
    incumbent, plain = tuned["baselines"]["incumbent"], tuned["baselines"]["autoregressive"]
    before = "in force before" if speculates(incumbent["policy"]) else "no draft"
    kept: dict[str, tuple[str, str, Json]] = {}
    for what, colour, policy in (
        (_base(tuned).removeprefix("the "), "1", tuned["winner"]["id"]),
        (before, "2", incumbent["id"]),
        ("no draft", "3", plain["id"]),
    ):
        kept.setdefault(policy, (what, colour, by_id[policy]))
    return list(kept.values())


def _base(tuned: Json) -> str:
    """What the others are compared with on the page."""
    return "the winner" if finding(tuned).deploys else "the incumbent"


def _colours(tuned: Json) -> dict[str, str]:
    return {c["id"]: colour for _, colour, c in _shown(tuned)}


def _legend(tuned: Json, others: bool = False) -> list[tuple[str, str]]:
    named = [(f"{what}: {c['label']}", colour) for what, colour, c in _shown(tuned)]
    return [*named, ("the others", "6")] if others else named


def _prediction(tuned: Json) -> Figure:
    unique = {c["id"]: c for c in tuned["candidates"] if c["predicted_tokens_per_s"] is not None}
    colours = _colours(tuned)
    end = 1.06 * max(
        max(c["measured_interval"][1], c["measured_tokens_per_s"], c["predicted_tokens_per_s"])
        for c in unique.values()
    )
    plot = Plot((0.0, end), (0.0, end), height=300)
    plot.axes("measured (tokens/s)", "predicted (tokens/s)")
    plot.line([(0, 0), (end, end)], "s6 dash")
    rows, errors = [], []
    for c in sorted(unique.values(), key=lambda c: c["id"] in colours):
        x, y, (low, high) = (
            c["measured_tokens_per_s"],
            c["predicted_tokens_per_s"],
            c["measured_interval"],
        )
        colour = colours.get(c["id"], "6")
        if high > low:
            plot.line([(low, y), (high, y)], f"s{colour}")
        plot.dot(
            x,
            y,
            colour,
            f"{c['label']}: predicted {y:.1f}, measured {x:.1f} ({low:.1f} to {high:.1f}) tokens/s",
        )
        errors.append(abs(y / x - 1) if x else 0.0)
        rows.append((c["label"], float(y), float(x), float(low), float(high)))
    return Figure(
        "prediction",
        f"Prediction was off by {100 * median(errors):.1f}% in the median of {len(errors)} "
        "policies",
        "Each point is an executed policy; bars are 95% intervals over requests; on the dashed "
        "line both are equal.",
        plot,
        folded(table(("policy", "predicted", "measured", "from", "to"), rows, text=1)),
        _legend(tuned, True),
    )


def _labels(tuned: Json) -> dict[str, str]:
    return {c["id"]: c["label"] for c in tuned["candidates"]}


def _race(tuned: Json, race: Sequence[Json]) -> Figure:
    labels, colours, base = _labels(tuned), _colours(tuned), _base(tuned)
    turns, ratios = zip(*(p[:2] for r in race for p in r["points"]), strict=True)
    plot = Plot((0.0, 1.04 * max(turns)), (0.95 * min(ratios), 1.05 * max(ratios)), height=300)
    plot.axes("requests executed, over all passes", f"speed over {base}'s (times)")
    for r in sorted(race, key=lambda r: r["policy"] in colours):
        colour, label = colours.get(r["policy"], "6"), str(labels.get(r["policy"], r["policy"]))
        plot.line([(p[0], p[1]) for p in r["points"]], f"s{colour}", label)
        turn, ratio, low, high = r["points"][-1]
        ends = (
            " (interval not known)"
            if low is None or high is None
            else f" ({low:.3f} to {high:.3f})"
        )
        said = f"{label}: {ratio:.3f} times {base}'s speed{ends} after {turn} requests"
        if r["dropped"]:
            x, y = plot.at(turn, ratio)
            plot.add(
                "path",
                title=f"{said}, dropped",
                class_=f"s{colour}",
                d=f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8",
            )
        else:
            plot.dot(turn, ratio, colour, said)
    dropped = sum(r["dropped"] for r in race)
    return Figure(
        "race",
        f"{dropped} of {len(race)} policies fell behind beyond noise and were dropped from "
        "the race",
        f"Speed over {base}'s, of what had been executed by then; a cross is where a policy was "
        "last executed.",
        plot,
        "",
        _legend(tuned, True),
    )


def _intervals(tuned: Json, race: Sequence[Json]) -> Figure:
    labels, colours, base = _labels(tuned), _colours(tuned), _base(tuned)
    rows: list[tuple[str, list[Dot]]] = []
    for r in sorted(race, key=lambda r: -r["points"][-1][1]):
        turn, ratio, low, high = r["points"][-1]
        said = f"{ratio:.3f} times, {turn} requests" + (", dropped" if r["dropped"] else "")
        rows.append(
            (
                str(labels.get(r["policy"], r["policy"])),
                [(ratio, (low, high), colours.get(r["policy"], "6"), said)],
            )
        )
    numbers = [
        (r["policy"], labels.get(r["policy"]), *r["points"][-1], "yes" if r["dropped"] else "no")
        for r in race
    ]
    return Figure(
        "intervals",
        f"How the race ended for {len(rows)} policies",
        f"Speed over {base}'s on the requests that both were executed on, with 95% intervals.",
        dot_rows(f"speed over {base}'s (times)", rows),
        folded(
            table(
                ("policy", "label", "requests", "speed", "from", "to", "dropped"), numbers, text=2
            )
        ),
    )


def _categories(tuned: Json, categories: Json) -> Figure:
    shown = [(colour, c["label"], categories.get(c["id"], {})) for _, colour, c in _shown(tuned)]
    names = sorted({name for _, _, speeds in shown for name in speeds})
    rows: list[tuple[str, list[Dot]]] = []
    for name in names:
        found = [(speeds[name], colour, label) for colour, label, speeds in shown if name in speeds]
        rows.append(
            (
                name or "(none)",
                [
                    (v, (None, None), colour, f"{label}, {v:.1f} tokens/s")
                    for v, colour, label in found
                ],
            )
        )
    (_, _, own), *others = shown
    ahead = sum(all(own[name] >= speeds.get(name, 0.0) for _, _, speeds in others) for name in own)
    numbers = [(name or "(none)", *(speeds.get(name) for _, _, speeds in shown)) for name in names]
    return Figure(
        "categories",
        f"{_base(tuned).capitalize()} is fastest in {ahead} of {len(names)} categories",
        "Measured speed by category of request.",
        dot_rows("tokens/s", rows, low=0.0),
        folded(table(("category", *(label for _, label, _ in shown)), numbers, text=1)),
        _legend(tuned),
    )


def _by_position(acceptance: Mapping[str, Sequence[float]]) -> Figure:
    given: list[Curve] = []
    for i, (draft, shares) in enumerate(acceptance.items()):
        said = f"{draft}: all of the first"
        points = [(float(k), v, f"{said} {k} kept from {v:.1%}") for k, v in enumerate(shares, 1)]
        given.append((draft, str(i % 5 + 1), points, True))
    rows = [(d, *s[:5], *[None] * (5 - len(s[:5]))) for d, s in acceptance.items()]
    best = max(given, key=lambda g: g[2][0][1])
    return Figure(
        "positions",
        f"{best[2][0][1]:.0%} of {best[0]}'s first proposals are kept",
        "Share of the starts whose drafted tokens are all kept up to a position, over the "
        "recorded texts.",
        curves("position in the draft (tokens)", "share kept", given),
        folded(table(("draft", "1", "2", "3", "4", "5"), rows, text=1)),
        [(draft, colour) for draft, colour, _, _ in given],
    )


def _rounds(tuned: Json, drawn: Json) -> Iterator[Figure]:
    for _, colour, c in _shown(tuned):
        rounds = drawn["rounds"].get(c["id"], [])
        if not any(drafted for drafted, _, _ in rounds):
            continue
        shown = rounds[:ROUNDS_DRAWN]
        widest = max(max(drafted + 1, emitted) for drafted, _, emitted in shown)
        plot = Plot((0.0, float(widest)), (0.0, float(len(shown))), height=58 + 14.0 * len(shown))
        plot.axes("tokens of a round", "", y_ticks=False)
        plot.text(0, 0, "round", transform=f"translate(13 {plot.height / 2:.0f}) rotate(-90)")
        at, rows = 0, []
        for i, (drafted, accepted, emitted) in enumerate(shown, 1):
            y = len(shown) - i + 0.1
            if i % 4 == 1:
                plot.text(44, plot.at(0, y)[1], str(i), "end")
            for k in range(max(drafted + 1, emitted)):
                if k < accepted:
                    said, look, opacity = "accepted", "f3", 1.0
                elif k < emitted:
                    said, look, opacity = "the target's own", "f2", 1.0
                else:
                    said, look, opacity = "rejected", "f6", 0.25
                plot.box(
                    k + 0.06, y, 0.88, 0.8, f"round {i}: {said}", class_=look, fill_opacity=opacity
                )
            rows.append((str(i), "".join(drawn["text"][at : at + emitted]), drafted, accepted))
            at += emitted
        proposed, kept, total = (sum(column) for column in zip(*rounds, strict=True))
        first = f"; the first {len(shown)}" if len(rounds) > len(shown) else ""
        yield Figure(
            f"rounds-{colour}",
            f"{c['label']}: {kept} of {proposed} drafted tokens accepted, {total} tokens in "
            f"{len(rounds)} rounds",
            f"Request {drawn['request']}, round by round{first}.",
            plot,
            folded(table(("round", "text", "drafted", "accepted"), rows, text=2), "Text"),
            [("accepted", "3"), ("the target's own", "2"), ("rejected", "6")],
        )


def _latency(tuned: Json) -> str:
    rows: list[tuple[Cell, ...]] = []
    for key, name in (
        ("time_to_first_token_s", "time to first token"),
        ("time_per_output_token_s", "time per output token"),
    ):
        for what, _, c in _shown(tuned):
            found = (c.get("latency") or {}).get(key)
            values = [f"{1e3 * found[q]:.1f}" if found else None for q in ("p50", "p95", "p99")]
            rows.append((f"{name}, {what}: {c['label']}", *values))
    said = (
        "<p class=soft>Milliseconds over requests, one request at a time; with few requests p99 is "
        "the slowest.</p>"
    )
    return (
        "<figure id=latency><h3>What a user waits "
        f"for</h3>{said}{table(('', 'p50', 'p95', 'p99'), rows, text=1)}</figure>"
    )


def family(document: Json) -> str:
    """What a tried policy drafts with, and how."""
    draft = document.get("draft", "none")
    if draft == "none":
        return "no draft"
    growth = document.get("growth", {}).get("kind", "chain")
    kinds = {
        "chain": "chains",
        "top_k": "EAGLE-2 trees",
        "classifier": "C2T trees",
        "static": "static trees",
    }
    kind = kinds.get(growth, growth)
    bins = ", entropy bins" if document.get("stratify") else ""
    short_ = document.get("shortlist", {}).get("kind", "full")
    return f"{draft}: {kind}{bins}" + ("" if short_ == "full" else f", {short_} shortlist")


def _tried(report: TuningReport) -> str:
    trials = [t for t in report.study.trials if isinstance(t.get("policy"), Mapping)]
    counts = Counter(family(t["policy"]) for t in trials)
    best: dict[str, float] = {}
    for t in trials:
        name = family(t["policy"])
        best[name] = max(best.get(name, 0.0), float(t.get("value") or 0.0))
    unique = {c["id"]: c["policy"] for c in (report.tuned or {}).get("candidates", ())}
    executed = Counter(family(policy) for policy in unique.values())
    rows = [(n, counts[n], best[n], executed[n]) for n in sorted(best, key=lambda n: -best[n])]
    heading = f"<h3>{len(trials)} policies were replayed in {len(rows)} families</h3>"
    names = ("family", "policies", "best predicted tokens/s", "executed")
    return f"<figure id=tried>{heading}{table(names, rows, text=1)}</figure>"


def _left_out(document_: Json) -> str:
    said = []
    beyond = document_.get("beyond_the_recording") or {}
    if beyond.get("policies"):
        best = ", ".join(b["label"] for b in beyond.get("best", ())[:LABELS_LISTED])
        said.append(
            f"{beyond['policies']} policies read more than was recorded (--cover records it), the "
            f"most promising: {best}"
        )
    if chooser := document_.get("chooser"):
        said.append(f"a draft for each prompt: {chooser}")
    shortlists = document_.get("shortlists") or {}
    for draft, gains in (shortlists.get("most_gained") or {}).items():
        searched = ", ".join((shortlists.get("searched") or {}).get(draft, ())) or "none searched"
        gained = ", ".join(f"{kind} {100 * gain:+.1f}%" for kind, gain in gains.items())
        said.append(f"shortlists of {draft} could gain at most: {gained}; {searched}")
    said += [f"{k}: {v}" for k, v in (document_.get("left_out") or {}).items()]
    items = "".join(f"<li>{safe(s)}</li>" for s in said) or "<li>nothing</li>"
    return f"<figure id=left-out><h3>What was left out, and why</h3><ul>{items}</ul></figure>"


def sections(report: TuningReport) -> Iterator[str]:
    """The page's parts, in its order."""
    tuned, evidence = report.tuned, report.evidence
    by_category = evidence.get("categories")
    drawn: list[Figure] = []
    if tuned is not None:
        race = [r for r in evidence.get("race", ()) if r["points"]]
        yield section(
            "Speed",
            _prediction(tuned),
            *((_race(tuned, race), _intervals(tuned, race)) if race else ()),
        )
        yield section(
            "Requests", *([_categories(tuned, by_category)] if by_category else []), _latency(tuned)
        )
        drawn = list(_rounds(tuned, evidence["rounds"])) if evidence.get("rounds") else []
    kept = {d: s for d, s in report.acceptance.items() if s}
    if kept or drawn:
        yield section("Drafts", *([_by_position(kept)] if kept else []), *drawn)
    missing = [
        n
        for n, have in (("race", evidence.get("race")), ("speed by category", by_category))
        if not have
    ]
    if missing:
        yield f"<p>{safe(', '.join(missing))}: {safe(NOT_STORED)}</p>"
    yield section("What was tried", _tried(report), _left_out(report.study.document))


def headline(report: TuningReport, *, gpus: int = 1, price: float | None = None) -> str:
    """The page's first sentence."""
    if report.tuned is None:
        return f"Study {report.study.id}: its results were not stored."
    return verdict_in_words(report.tuned, report.device, gpus=gpus, price=price)


def page(
    report: TuningReport, *, gpus: int = 1, price: float | None = None, more: Iterable[str] = ()
) -> str:
    """The whole page; ``more`` are further sections."""
    tuned, study = report.tuned, report.study
    about = [
        ("study", f"{study.id}, {study.created_at:%Y-%m-%d %H:%M} UTC"),
        ("recording", str(study.recording_id)),
        *((name, str(value)) for name, value in report.about.items()),
    ]
    title, lead = headline(report, gpus=gpus, price=price), [NOT_STORED]
    if tuned is not None:
        lead = [outcome_in_words(tuned), *savings(tuned, report.device, gpus=gpus, price=price)[1:]]
        parts = [f"{tuned['search_requests']} searched on", f"{tuned['test_requests']} raced on"]
        if held := tuned.get("confirm_requests"):
            parts.append(f"{held} confirmed on")
        about.append(("requests", ", ".join(parts)))
        if tuned.get("published"):
            about.append(("published", f"version {tuned['published']['version']}"))
        winner = tuned["winner"]
        about.append(
            ("policy", f"{winner['label']} ({winner['id']}): {policy_in_words(winner['policy'])}")
        )
    return document(title, lead, about, "\n".join([*sections(report), *more]), "report")

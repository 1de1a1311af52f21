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
NOT_STORED: Final = "Not stored: this tuning was made by an earlier version, or its evidence was pruned."


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
    had = speculates(tuned["baselines"]["incumbent"]["policy"])
    before = "in force before" if had else "no draft"
    named = [
        (_base(tuned).removeprefix("the "), "1", tuned["winner"]["id"]),
        (before, "2", tuned["baselines"]["incumbent"]["id"]),
        ("no draft", "3", tuned["baselines"]["autoregressive"]["id"]),
    ]
    kept: dict[str, tuple[str, str, Json]] = {}
    for what, colour, policy in named:
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
        f"Prediction was off by {100 * median(errors):.1f}% in the median of {len(errors)} policies",
        "Each point is an executed policy; bars are 95% intervals over requests; on the dashed line both are equal.",
        plot,
        folded(table(("policy", "predicted", "measured", "from", "to"), rows, text=1)),
        _legend(tuned, True),
    )


def _race(tuned: Json, race: Sequence[Json]) -> Figure:
    labels: dict[str, str] = {c["id"]: c["label"] for c in tuned["candidates"]}
    colours = _colours(tuned)
    end = max((p[0] for r in race for p in r["points"]), default=1)
    shown = [p[1] for r in race for p in r["points"]] or [1.0]
    plot = Plot((0.0, 1.04 * end), (0.95 * min(shown), 1.05 * max(shown)), height=300)
    plot.axes("requests executed, over all passes", f"speed over {_base(tuned)}'s (times)")
    for r in sorted(race, key=lambda r: r["policy"] in colours):
        colour, label = colours.get(r["policy"], "6"), str(labels.get(r["policy"], r["policy"]))
        plot.line([(p[0], p[1]) for p in r["points"]], f"s{colour}", label)
        for turn, ratio, low, high in r["points"][-1:]:
            ends = (
                " (interval not known)"
                if low is None or high is None
                else f" ({low:.3f} to {high:.3f})"
            )
            said = f"{label}: {ratio:.3f} times {_base(tuned)}'s speed{ends} after {turn} requests"
            x, y = plot.at(turn, ratio)
            if r["dropped"]:
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
        f"{dropped} of {len(race)} policies fell behind beyond noise and were dropped from the race",
        f"Speed over {_base(tuned)}'s, of what had been executed by then; a cross is where a policy was last executed.",
        plot,
        "",
        _legend(tuned, True),
    )


def _intervals(tuned: Json, race: Sequence[Json]) -> Figure:
    labels: dict[str, str] = {c["id"]: c["label"] for c in tuned["candidates"]}
    colours = _colours(tuned)
    rows: list[tuple[str, list[Dot]]] = []
    for r in sorted(race, key=lambda r: -r["points"][-1][1] if r["points"] else 0.0):
        for turn, ratio, low, high in r["points"][-1:]:
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
        if r["points"]
    ]
    return Figure(
        "intervals",
        f"How the race ended for {len(rows)} policies",
        f"Speed over {_base(tuned)}'s on the requests that both were executed on, with 95% intervals.",
        dot_rows(f"speed over {_base(tuned)}'s (times)", rows),
        folded(
            table(
                ("policy", "label", "requests", "speed", "from", "to", "dropped"), numbers, text=2
            )
        ),
    )


def _categories(tuned: Json, categories: Json) -> Figure:
    shown = _shown(tuned)
    names = sorted({name for _, _, c in shown for name in categories.get(c["id"], {})})
    rows: list[tuple[str, list[Dot]]] = []
    for name in names:
        found = [
            (categories[c["id"]][name], colour, c["label"])
            for _, colour, c in shown
            if name in categories.get(c["id"], {})
        ]
        rows.append(
            (
                name or "(none)",
                [
                    (v, (None, None), colour, f"{label}, {v:.1f} tokens/s")
                    for v, colour, label in found
                ],
            )
        )
    own = categories.get(shown[0][2]["id"], {})
    ahead = sum(
        all(own[n] >= categories.get(c["id"], {}).get(n, 0.0) for _, _, c in shown[1:]) for n in own
    )
    numbers = [
        (n or "(none)", *(categories.get(c["id"], {}).get(n) for _, _, c in shown)) for n in names
    ]
    return Figure(
        "categories",
        f"{_base(tuned).capitalize()} is fastest in {ahead} of {len(names)} categories",
        "Measured speed by category of request.",
        dot_rows("tokens/s", rows, low=0.0),
        folded(table(("category", *(c["label"] for _, _, c in shown)), numbers, text=1)),
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
        "Share of the starts whose drafted tokens are all kept up to a position, over the recorded texts.",
        curves("position in the draft (tokens)", "share kept", given),
        folded(table(("draft", "1", "2", "3", "4", "5"), rows, text=1)),
        [(draft, colour) for draft, colour, _, _ in given],
    )


def _rounds(tuned: Json, drawn: Json) -> Iterator[Figure]:
    for _, colour, c in _shown(tuned):
        rounds = drawn["rounds"].get(c["id"], [])
        if not rounds or not any(drafted for drafted, _, _ in rounds):
            continue
        shown = rounds[:ROUNDS_DRAWN]
        widest = max(max(drafted + 1, emitted) for drafted, _, emitted in shown)
        plot = Plot((0.0, float(widest)), (0.0, float(len(shown))), height=58 + 14.0 * len(shown))
        plot.axes("tokens of a round", "", y_ticks=False)
        plot.text(0, 0, "round", transform=f"translate(13 {plot.height / 2:.0f}) rotate(-90)")
        at, rows = 0, []
        for i, (drafted, accepted, emitted) in enumerate(shown):
            y = len(shown) - i - 0.9
            if i % 4 == 0:
                plot.text(44, plot.at(0, y)[1], str(i + 1), "end")
            for k in range(max(drafted + 1, emitted)):
                look = "f3" if k < accepted else "f2" if k < emitted else "f6"
                said = (
                    "accepted"
                    if k < accepted
                    else "the target's own"
                    if k < emitted
                    else "rejected"
                )
                plot.box(
                    k + 0.06,
                    y,
                    0.88,
                    0.8,
                    f"round {i + 1}: {said}",
                    class_=look,
                    fill_opacity=0.25 if look == "f6" else 1,
                )
            rows.append((i + 1, "".join(drawn["text"][at : at + emitted]), drafted, accepted))
            at += emitted
        kept, proposed = sum(r[1] for r in rounds), sum(r[0] for r in rounds)
        yield Figure(
            f"rounds-{colour}",
            f"{c['label']}: {kept} of {proposed} drafted tokens accepted, {sum(r[2] for r in rounds)} tokens in {len(rounds)} rounds",
            f"Request {drawn['request']}, round by round"
            + (f"; the first {len(shown)}" if len(rounds) > len(shown) else "")
            + ".",
            plot,
            folded(
                table(
                    ("round", "text", "drafted", "accepted"),
                    [(str(n), *rest) for n, *rest in rows],
                    text=2,
                ),
                "Text",
            ),
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
    said = "<p class=soft>Milliseconds over requests, one request at a time; with few requests p99 is the slowest.</p>"
    return f"<figure id=latency><h3>What a user waits for</h3>{said}{table(('', 'p50', 'p95', 'p99'), rows, text=1)}</figure>"


def family(document: Json) -> str:
    """What a tried policy drafts with, and how."""
    draft = document.get("draft", "none")
    if draft == "none":
        return "no draft"
    growth = document.get("growth", {}).get("kind", "chain")
    kind = {
        "chain": "chains",
        "top_k": "EAGLE-2 trees",
        "classifier": "C2T trees",
        "static": "static trees",
    }.get(growth, growth)
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
    executed: Counter[str] = Counter()
    for policy in {
        c["id"]: c["policy"] for c in (report.tuned or {}).get("candidates", ())
    }.values():
        executed[family(policy)] += 1
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
            f"{beyond['policies']} policies read more than was recorded (--cover records it), the most promising: {best}"
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
    if tuned is not None:
        race = [r for r in evidence.get("race", ()) if r["points"]]
        yield section(
            "Speed",
            _prediction(tuned),
            *((_race(tuned, race), _intervals(tuned, race)) if race else ()),
        )
        by_category = evidence.get("categories")
        yield section(
            "Requests", *([_categories(tuned, by_category)] if by_category else []), _latency(tuned)
        )
    kept = {d: s for d, s in report.acceptance.items() if s}
    drawn = (
        list(_rounds(tuned, evidence["rounds"]))
        if tuned is not None and evidence.get("rounds")
        else []
    )
    if kept or drawn:
        yield section("Drafts", *([_by_position(kept)] if kept else []), *drawn)
    missing = [
        n
        for n, have in (
            ("race", evidence.get("race")),
            ("speed by category", evidence.get("categories")),
        )
        if not have
    ]
    if missing:
        yield f"<p>{safe(', '.join(missing))}: {safe(NOT_STORED)}</p>"
    yield section("What was tried", _tried(report), _left_out(report.study.document))


def headline(report: TuningReport, *, gpus: int = 1, price: float | None = None) -> str:
    """The page's first sentence."""
    if report.tuned is None:
        return f"Study {report.study.id}: its results were not stored."
    return verdict_in_words(
        report.tuned, str(report.about.get("device", "cpu")), gpus=gpus, price=price
    )


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
        device = str(report.about.get("device", "cpu"))
        lead = [outcome_in_words(tuned), *savings(tuned, device, gpus=gpus, price=price)[1:]]
        parts = [f"{tuned['search_requests']} searched on", f"{tuned['test_requests']} raced on"]
        if held := tuned.get("confirm_requests"):
            parts.append(f"{held} confirmed on")
        about.append(("requests", ", ".join(parts)))
        if tuned.get("published"):
            about.append(("published", f"version {tuned['published']['version']}"))
        about.append(
            (
                "policy",
                f"{tuned['winner']['label']} ({tuned['winner']['id']}): {policy_in_words(tuned['winner']['policy'])}",
            )
        )
    return document(title, lead, about, "\n".join([*sections(report), *more]), "report")

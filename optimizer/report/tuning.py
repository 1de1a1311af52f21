"""The report of a tuning: what is stored of it, and its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from spectune.db.errors import NotFoundError
from spectune.optimizer.report.charts import (
    Cell,
    Curve,
    Dot,
    Plot,
    curves,
    document,
    dot_rows,
    figure,
    numbers,
    safe,
    section,
    table,
)
from spectune.optimizer.report.words import (
    EVIDENCE,
    LATENCIES,
    Json,
    finding,
    outcome_in_words,
    policy_in_words,
    prediction_in_words,
    savings,
    speculates,
    verdict_in_words,
)
from spectune.traces.store import TraceStore
from spectune.traces.store.query import TraceFilter, acceptance
from spectune.traces.tables import Study

ROUNDS_DRAWN: Final = 24
LABELS_LISTED: Final = 8
NOT_STORED: Final = "Not stored: its evidence was pruned."


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
    marginals: dict[str, Sequence[float]] = {}
    if study.recording_id is not None:
        with suppress(NotFoundError):  # the recording was pruned
            found = acceptance(store, TraceFilter(recordings=(study.recording_id,)))
            marginals = {row["draft"]: row["marginal"] for row in found}
    return TuningReport(study, _evidence(store, study), marginals)


def _evidence(store: TraceStore, study: Study) -> Json:
    for artifact in store.list_artifacts(EVIDENCE, study.pair_id):
        if artifact.provenance.get("study") == study.id:
            evidence: Json = store.get_artifact(artifact.id).document
            return evidence
    for published in store.list_publications(study.pair_id):
        if published.evidence.get("study") == study.id:
            return {"tuned": published.evidence, "about": {"device": published.device}}
    return {}


class _Results:
    """The figures of a tuning's results. ``shown``: what it is, the number of its colour and the
    results of the winner, the incumbent and autoregression, each policy once; ``base``: what the
    others are compared with."""

    def __init__(self, tuned: Json) -> None:
        self.of = tuned["prediction"]
        self.candidates = {c["id"]: c for c in tuned["candidates"]}
        self.labels = {name: c["label"] for name, c in self.candidates.items()}
        self.base = "the winner" if finding(tuned).deploys else "the incumbent"
        incumbent, plain = tuned["baselines"]["incumbent"], tuned["baselines"]["autoregressive"]
        shown: dict[str, tuple[str, str, Json]] = {}
        for what, colour, policy in (
            (self.base.removeprefix("the "), "1", tuned["winner"]["id"]),
            (
                "in force before" if speculates(incumbent["policy"]) else "no draft",
                "2",
                incumbent["id"],
            ),
            ("no draft", "3", plain["id"]),
        ):
            shown.setdefault(policy, (what, colour, self.candidates[policy]))
        self.shown = list(shown.values())
        self.colours = {name: colour for name, (_, colour, _) in shown.items()}
        self.legend = [(f"{what}: {c['label']}", colour) for what, colour, c in self.shown]
        self.all = [*self.legend, ("the others", "6")]

    def prediction(self) -> str:
        compared = [
            (c, c["measured_tokens_per_s"], c["predicted_tokens_per_s"], *c["measured_interval"])
            for c in self.candidates.values()
            if c["predicted_tokens_per_s"] is not None
        ]
        end = 1.06 * max(max(x, y, high) for _, x, y, _, high in compared)
        plot = Plot((0.0, end), (0.0, end), height=300, legend=self.all)
        plot.axes("measured (tokens/s)", "predicted (tokens/s)")
        plot.line([(0, 0), (end, end)], "s6 dash")
        rows = []
        for c, x, y, low, high in sorted(compared, key=lambda row: row[0]["id"] in self.colours):
            colour, label = self.colours.get(c["id"], "6"), c["label"]
            if high > low:
                plot.line([(low, y), (high, y)], f"s{colour}")
            said = f"predicted {y:.1f}, measured {x:.1f} ({low:.1f} to {high:.1f}) tokens/s"
            plot.dot(x, y, colour, f"{label}: {said}")
            after = float(c["predicted_after_factor_tokens_per_s"])
            rows.append((label, float(y), after, float(x), float(low), float(high)))
        names = ("policy", "predicted", "after the factor", "measured", "from", "to")
        return figure(
            "prediction",
            prediction_in_words(self.of),
            "Each point is an executed policy, as predicted by the profile before anything was "
            "executed; bars are 95% intervals over requests; on the dashed line both are equal.",
            plot,
            numbers(names, rows, text=1),
        )

    def race(self, race: Sequence[Json]) -> str:
        turns, ratios = zip(*(p[:2] for r in race for p in r["points"]), strict=True)
        y = (0.95 * min(ratios), 1.05 * max(ratios))
        plot = Plot((0.0, 1.04 * max(turns)), y, height=300, legend=self.all)
        plot.axes("requests executed, over all passes", f"speed over {self.base}'s (times)")
        for r in sorted(race, key=lambda r: r["policy"] in self.colours):
            name = r["policy"]
            colour, label = self.colours.get(name, "6"), str(self.labels.get(name, name))
            plot.line([(p[0], p[1]) for p in r["points"]], f"s{colour}", label)
            turn, ratio, low, high = r["points"][-1]
            known = low is not None and high is not None
            ends = f"({low:.3f} to {high:.3f})" if known else "(interval not known)"
            said = f"{label}: {ratio:.3f} times {self.base}'s speed {ends} after {turn} requests"
            if r["dropped"]:
                x, y_ = plot.at(turn, ratio)
                cross = f"M{x - 4:.1f} {y_ - 4:.1f}l8 8m0 -8l-8 8"
                plot.add("path", title=f"{said}, dropped", class_=f"s{colour}", d=cross)
            else:
                plot.dot(turn, ratio, colour, said)
        dropped = sum(r["dropped"] for r in race)
        return figure(
            "race",
            f"{dropped} of {len(race)} policies fell behind beyond noise and were dropped from "
            "the race",
            f"Speed over {self.base}'s, of what had been executed by then; a cross is where a "
            "policy was last executed.",
            plot,
        )

    def intervals(self, race: Sequence[Json]) -> str:
        rows: list[tuple[str, list[Dot]]] = []
        for r in sorted(race, key=lambda r: -r["points"][-1][1]):
            name, (turn, ratio, low, high) = r["policy"], r["points"][-1]
            said = f"{ratio:.3f} times, {turn} requests" + (", dropped" if r["dropped"] else "")
            dot = (ratio, (low, high), self.colours.get(name, "6"), said)
            rows.append((str(self.labels.get(name, name)), [dot]))
        listed = [
            (name, self.labels.get(name), *points[-1], "yes" if dropped else "no")
            for name, dropped, points in ((r["policy"], r["dropped"], r["points"]) for r in race)
        ]
        names = ("policy", "label", "requests", "speed", "from", "to", "dropped")
        return figure(
            "intervals",
            f"How the race ended for {len(rows)} policies",
            f"Speed over {self.base}'s on the requests that both were executed on, with 95% "
            "intervals.",
            dot_rows(f"speed over {self.base}'s (times)", rows),
            numbers(names, listed, text=2),
        )

    def categories(self, categories: Json) -> str:
        shown = [(colour, c["label"], categories.get(c["id"], {})) for _, colour, c in self.shown]
        names = sorted({name for _, _, speeds in shown for name in speeds})

        def dots(name: str) -> list[Dot]:
            return [
                (of[name], (None, None), colour, f"{label}, {of[name]:.1f} tokens/s")
                for colour, label, of in shown
                if name in of
            ]

        plot = dot_rows("tokens/s", [(name or "(none)", dots(name)) for name in names], low=0.0)
        plot.legend = self.legend
        (_, _, own), *others = shown
        ahead = sum(all(own[n] >= speeds.get(n, 0.0) for _, _, speeds in others) for n in own)
        rows = [(name or "(none)", *(of.get(name) for _, _, of in shown)) for name in names]
        return figure(
            "categories",
            f"{self.base.capitalize()} is fastest in {ahead} of {len(names)} categories",
            "Measured speed by category of request.",
            plot,
            numbers(("category", *(label for _, label, _ in shown)), rows, text=1),
        )

    def rounds(self, drawn: Json) -> Iterator[str]:
        """Of each policy that drafted, one request round by round."""
        for _, colour, c in self.shown:
            rounds = drawn["rounds"].get(c["id"], [])
            if any(drafted for drafted, _, _ in rounds):
                yield _rounds(f"rounds-{colour}", c["label"], rounds, drawn)

    def latency(self) -> str:
        rows: list[tuple[Cell, ...]] = []
        for key, name in LATENCIES.items():
            for what, _, c in self.shown:
                found = (c.get("latency") or {}).get(key)
                values = [f"{1e3 * found[q]:.1f}" if found else None for q in ("p50", "p95", "p99")]
                rows.append((f"{name}, {what}: {c['label']}", *values))
        return (
            "<figure id=latency><h3>What a user waits for</h3>"
            "<p class=soft>Milliseconds over requests, one request at a time; with few requests "
            f"p99 is the slowest.</p>{table(('', 'p50', 'p95', 'p99'), rows, text=1)}</figure>"
        )


def _rounds(name: str, label: str, rounds: Sequence[Sequence[int]], drawn: Json) -> str:
    """Rounds as (drafted, accepted, emitted)."""
    shown = rounds[:ROUNDS_DRAWN]
    widest = max(max(drafted + 1, emitted) for drafted, _, emitted in shown)
    plot = Plot((0.0, float(widest)), (0.0, float(len(shown))), height=58 + 14.0 * len(shown))
    plot.legend = [("accepted", "3"), ("the target's own", "2"), ("rejected", "6")]
    plot.axes("tokens of a round", "", y_ticks=False)
    plot.upright("round", plot.height / 2)
    at, rows = 0, []
    for i, (drafted, accepted, emitted) in enumerate(shown, 1):
        y = len(shown) - i + 0.1
        if i % 4 == 1:
            plot.text(44, plot.at(0, y)[1], str(i), "end")
        for k in range(max(drafted + 1, emitted)):
            said, colour = plot.legend[(k >= accepted) + (k >= emitted)]
            look: dict[str, Any] = {"class_": f"f{colour}", "fill_opacity": 1.0}
            if said == "rejected":
                look["fill_opacity"] = 0.25
            plot.box(k + 0.06, y, 0.88, 0.8, f"round {i}: {said}", **look)
        rows.append((str(i), "".join(drawn["text"][at : at + emitted]), drafted, accepted))
        at += emitted
    proposed, kept, total = (sum(column) for column in zip(*rounds, strict=True))
    first = f"; the first {len(shown)}" if len(rounds) > len(shown) else ""
    return figure(
        name,
        f"{label}: {kept} of {proposed} drafted tokens accepted, {total} tokens in "
        f"{len(rounds)} rounds",
        f"Request {drawn['request']}, round by round{first}.",
        plot,
        numbers(("round", "text", "drafted", "accepted"), rows, text=2, summary="Text"),
    )


def _by_position(acceptance: Mapping[str, Sequence[float]]) -> str:
    given: list[Curve] = []
    for i, (draft, shares) in enumerate(acceptance.items()):
        said = f"{draft}: all of the first"
        points = [(float(k), v, f"{said} {k} kept from {v:.1%}") for k, v in enumerate(shares, 1)]
        given.append((draft, str(i % 5 + 1), points, True))
    rows = [(d, *s[:5], *[None] * (5 - len(s[:5]))) for d, s in acceptance.items()]
    best, shares = max(acceptance.items(), key=lambda of: of[1][0])
    return figure(
        "positions",
        f"{shares[0]:.0%} of {best}'s first proposals are kept",
        "Share of the starts whose drafted tokens are all kept up to a position, over the "
        "recorded texts.",
        curves("position in the draft (tokens)", "share kept", given),
        numbers(("draft", "1", "2", "3", "4", "5"), rows, text=1),
    )


def family(document: Json) -> str:
    """What a tried policy drafts with, and how."""
    draft = document.get("draft", "none")
    if draft == "none":
        return "no draft"
    growth = document.get("growth", {}).get("kind", "chain")
    trees = {"top_k": "EAGLE-2 trees", "classifier": "C2T trees", "static": "static trees"}
    kind = {"chain": "chains", **trees}.get(growth, growth)
    bins = ", entropy bins" if document.get("stratify") else ""
    short_ = document.get("shortlist", {}).get("kind", "full")
    return f"{draft}: {kind}{bins}" + ("" if short_ == "full" else f", {short_} shortlist")


def _tried(report: TuningReport) -> str:
    values: dict[str, list[float]] = {}
    for t in report.study.trials:
        if isinstance(t.get("policy"), Mapping):
            values.setdefault(family(t["policy"]), []).append(float(t.get("value") or 0.0))
    unique = {c["id"]: c["policy"] for c in (report.tuned or {}).get("candidates", ())}
    executed = Counter(family(policy) for policy in unique.values())
    rows = [(name, len(of), max(0.0, *of), executed[name]) for name, of in values.items()]
    rows.sort(key=lambda row: -row[2])
    count = sum(map(len, values.values()))
    names = ("family", "policies", "best predicted tokens/s", "executed")
    return (
        f"<figure id=tried><h3>{count} policies were replayed in {len(rows)} families</h3>"
        f"{table(names, rows, text=1)}</figure>"
    )


def _left_out(document_: Json) -> str:
    said = []
    beyond = document_.get("beyond_the_recording") or {}
    if beyond.get("policies"):
        best = ", ".join(b["label"] for b in beyond.get("best", ())[:LABELS_LISTED])
        said.append(
            f"{beyond['policies']} policies read more than was recorded (--cover records it), the "
            f"most promising: {best}"
        )
    if why := document_.get("by_prompt"):
        said.append(f"a draft for each prompt: {why}")
    shortlists = document_.get("shortlists") or {}
    for draft, gains in (shortlists.get("most_gained") or {}).items():
        searched = ", ".join((shortlists.get("searched") or {}).get(draft, ())) or "none searched"
        gained = ", ".join(f"{kind} {100 * gain:+.1f}%" for kind, gain in gains.items())
        said.append(f"shortlists of {draft} could gain at most: {gained}; {searched}")
    said += [f"{k}: {v}" for k, v in (document_.get("left_out") or {}).items()]
    items = "".join(f"<li>{safe(s)}</li>" for s in said or ["nothing"])
    return f"<figure id=left-out><h3>What was left out, and why</h3><ul>{items}</ul></figure>"


def sections(report: TuningReport) -> Iterator[str]:
    """The page's parts, in its order."""
    evidence, drafts = report.evidence, []
    by_category = evidence.get("categories")
    if kept := {d: s for d, s in report.acceptance.items() if s}:
        drafts.append(_by_position(kept))
    if report.tuned is not None:
        results = _Results(report.tuned)
        race = [r for r in evidence.get("race", ()) if r["points"]]
        raced = [results.race(race), results.intervals(race)] if race else []
        yield section("Speed", results.prediction(), *raced)
        categories = [results.categories(by_category)] if by_category else []
        yield section("Requests", *categories, results.latency())
        if evidence.get("rounds"):
            drafts += results.rounds(evidence["rounds"])
    if drafts:
        yield section("Drafts", *drafts)
    had = {"race": evidence.get("race"), "speed by category": by_category}
    if missing := [name for name, have in had.items() if not have]:
        yield f"<p>{safe(', '.join(missing))}: {safe(NOT_STORED)}</p>"
    yield section("What was tried", _tried(report), _left_out(report.study.document))


def headline(report: TuningReport, *, gpus: int = 1, price: float | None = None) -> str:
    """The page's first sentence."""
    if report.tuned is None:
        return f"Study {report.study.id}: its results were not stored."
    return verdict_in_words(report.tuned, report.device, gpus=gpus, price=price)


def page(report: TuningReport, *, gpus: int = 1, price: float | None = None) -> str:
    """The whole page."""
    tuned, study = report.tuned, report.study
    about = [
        ("study", f"{study.id}, {study.created_at:%Y-%m-%d %H:%M} UTC"),
        ("recording", str(study.recording_id)),
        *((name, str(value)) for name, value in report.about.items()),
    ]
    title, lead = headline(report, gpus=gpus, price=price), [NOT_STORED]
    if tuned is not None:
        lead = [outcome_in_words(tuned), *savings(tuned, report.device, gpus=gpus, price=price)[1:]]
        requests = f"{tuned['search_requests']} searched on, {tuned['test_requests']} raced on"
        if held := tuned.get("confirm_requests"):
            requests += f", {held} confirmed on"
        about.append(("requests", requests))
        if tuned.get("published"):
            about.append(("published", f"version {tuned['published']['version']}"))
        winner = tuned["winner"]
        words = policy_in_words(winner["policy"])
        about.append(("policy", f"{winner['label']} ({winner['id']}): {words}"))
    return document(title, lead, about, "\n".join(sections(report)))

"""The page of a tuning: what is stored of it, drawn into ``page.html``."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from spectune.db.errors import NotFoundError
from spectune.optimizer.report import charts
from spectune.optimizer.report.charts import COLOURS, GREY
from spectune.optimizer.report.words import (
    EVIDENCE,
    LATENCIES,
    TREES,
    Json,
    Table,
    deploys,
    executed_table,
    headline,
    names_of,
    outcome,
    policy_in_words,
    prediction_in_words,
    savings,
)
from spectune.runtime.pair import PairSpec, read_pair
from spectune.traces.store import TraceStore
from spectune.traces.store.query import TraceFilter, acceptance
from spectune.traces.tables import Study
from spectune.traces.text import one_line

ROUNDS_DRAWN: Final = 24
OTHERS: Final = "others"


@dataclass(frozen=True)
class TuningReport:
    """What is stored of a tuning. ``evidence``: of :mod:`optimizer.report.evidence`;
    ``acceptance``: by draft the share of starts whose first 1, 2, ... proposals are all accepted;
    ``pair``: the pair's document."""

    study: Study
    evidence: Json
    acceptance: Mapping[str, Sequence[float]]
    pair: Json

    @property
    def tuned(self) -> Json:
        """The results as ``tune --json`` printed them."""
        results: Json = self.evidence["tuned"]
        return results


@dataclass(frozen=True)
class Panel:
    """A chart, a table or a list of the page; a table with ``folded`` is opened by that word."""

    name: str
    title: str
    caption: str = ""
    svg: str = ""
    table: Table | None = None
    folded: str = ""
    items: Sequence[str] = ()
    wide: bool = False


def report_on(store: TraceStore, name: str) -> TuningReport:
    """Reads a study by id, the beginning of one, or ``latest``. Raises NotFoundError where there is
    none, or no results of it, and CorruptedChunkError where it is damaged."""
    study = store.get_study(name)
    for artifact in store.list_artifacts(EVIDENCE, study.pair_id):
        if artifact.provenance.get("study") == study.id:
            evidence = store.get_artifact(artifact.id).document
            break
    else:
        raise NotFoundError(
            f"no results of study {study.id} are stored: its tuning did not end, or they were "
            "pruned; `tune` makes them anew"
        )
    accepted: dict[str, Sequence[float]] = {}
    if study.recording_id is not None:
        with suppress(NotFoundError):  # the recording was pruned
            by_draft = acceptance(store, TraceFilter(recordings=(study.recording_id,)))
            accepted = {row["draft"]: row["marginal"] for row in by_draft if row["marginal"]}
    return TuningReport(study, evidence, accepted, store.get_pair(study.pair_id).document)


def page(report: TuningReport, *, gpus: int = 1, price: float | None = None) -> str:
    """The HTML of the page."""
    tuned, about, study = report.tuned, report.evidence["about"], report.study
    winner, published = tuned["winner"], tuned["published"]
    requests = f"{tuned['search_requests']} to search, {tuned['test_requests']} to race"
    if tuned["confirm_requests"]:
        requests += f", {tuned['confirm_requests']} to confirm"
    facts = {
        "policy": f"{winner['label']} ({winner['id']}): {policy_in_words(winner['policy'])}",
        "published": f"version {published['version']}" if published else "nothing",
        "requests": requests,
        **about,
        "study": f"{study.id}, {study.created_at:%Y-%m-%d %H:%M} UTC",
        "recording": study.recording_id,
    }
    load = str(about.get("load", ""))
    saved = savings(tuned, str(about["device"]), gpus=gpus, price=price, load=load)
    command, purpose = deploy_command(report)
    html = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    return html.get_template("page.html").render(
        title=headline(tuned),
        command=command,
        purpose=purpose,
        lead=[*outcome(tuned), *saved],
        facts=facts.items(),
        sections=list(sections(report)),
    )


def _shown(value: Any) -> Any:
    """A value as the page shows it, on one line without control characters."""
    if isinstance(value, Markup) or callable(value):
        return value
    if isinstance(value, float):
        return f"{value:.3f}"
    return "–" if value is None else one_line(str(value))


def deploy_command(report: TuningReport) -> tuple[str, str]:
    """The command that uses or publishes the winner, and what it does; empty where nothing is to be
    deployed."""
    tuned, deployment = report.tuned, report.evidence["about"].get("deployment", "default")
    if not deploys(tuned) or tuned["superseded_by"] or tuned["refused"]:
        return "", ""
    words = ["spectune", "policies", "activate", tuned["winner"]["id"]]
    purpose = "It is not published yet. This puts it in force:"
    if tuned["published"]:
        words = ["spectune", "run", "--policy", "active"]
        purpose = "It is in force. This decodes with it:"
    spec = PairSpec.from_json(report.pair, where="the pair of the study")
    if spec == read_pair("demo"):
        words += ["--pair", "demo"]
    else:
        words += ["--target", spec.target]
        for draft, path in spec.drafts.items():
            words += ["--draft", f"{draft}={path}"]
    if deployment != "default":
        words += ["--deployment", deployment]
    return shlex.join(words), purpose


def sections(report: TuningReport) -> Iterator[tuple[str, list[Panel]]]:
    """The page's parts: a heading, and its panels."""
    evidence, results = report.evidence, _Results(report.tuned)
    race = [r for r in evidence["race"] if r["points"]]
    raced = [results.race(race), results.intervals(race)] if race else []
    yield "Speed", [*results.prediction(), *raced, results.executed()]
    yield "Requests", [results.categories(evidence["categories"]), results.latency()]
    drafts = [_by_position(report.acceptance)] if report.acceptance else []
    if drafts := [*drafts, *results.rounds(evidence["rounds"])]:
        yield "Drafts", drafts
    document = report.study.document
    left_out = {
        "a draft for each prompt": document.get("by_prompt"),
        **document.get("left_out", {}),
    }
    items = [f"{part}: {why}" for part, why in left_out.items() if why]
    not_tried = Panel("left-out", "What was left out, and why", items=items or ["nothing"])
    yield "What was tried", [_tried(report), not_tried]


class _Results:
    """Panels of a tuning's results. ``series``: the winner, the incumbent and autoregression, each
    policy once, as all charts and tables name them."""

    def __init__(self, tuned: Json) -> None:
        self.tuned, self.names = tuned, names_of(tuned)
        self.winner = tuned["winner"]["id"]
        self.candidates = {c["id"]: c for c in tuned["candidates"]}
        roles = {"winner": self.winner}
        roles |= {r: tuned["baselines"][r]["id"] for r in ("incumbent", "autoregressive")}
        self.series: dict[str, str] = {}
        for policy in dict.fromkeys(roles.values()):
            text = ", ".join(role for role, id_ in roles.items() if id_ == policy)
            name = self.names[policy]
            self.series[policy] = text if name in roles else f"{text}: {name}"
        self.colours = {**dict(zip(self.series.values(), COLOURS, strict=False)), OTHERS: GREY}

    def prediction(self) -> Iterator[Panel]:
        groups: dict[str, list[tuple[float, charts.Estimate]]] = {}
        for series in (*self.series.values(), OTHERS):
            groups[series] = [
                (c["predicted_tokens_per_s"], (c["measured_tokens_per_s"], *c["measured_interval"]))
                for policy, c in self.candidates.items()
                if self.series.get(policy, OTHERS) == series
                and c["predicted_tokens_per_s"] is not None
            ]
        if any(groups.values()):
            yield Panel(
                "prediction",
                prediction_in_words(self.tuned["prediction"]),
                "A point is an executed policy, as the profile predicted it before anything was "
                "executed; bars are 95% intervals over requests.",
                charts.agreement(
                    "prediction", {k: v for k, v in groups.items() if v}, self.colours
                ),
            )

    def race(self, race: Sequence[Json]) -> Panel:
        in_order = sorted(race, key=lambda r: r["policy"] not in self.series)
        lines = [
            (self.series.get(r["policy"], OTHERS), [(p[0], p[1]) for p in r["points"]])
            for r in in_order
        ]
        dropped = sum(r["dropped"] for r in race)
        return Panel(
            "race",
            f"{dropped} of {len(race)} policies fell behind beyond noise and were dropped",
            "Speed over the winner's on all requests executed so far; a cross is where a policy "
            "was dropped.",
            charts.curves(
                "race",
                "requests executed, over all passes",
                "speed over the winner's (times)",
                lines,
                colours=self.colours,
                ends=["x" if r["dropped"] else "o" for r in in_order],
            ),
        )

    def intervals(self, race: Sequence[Json]) -> Panel:
        lines = []
        for r in sorted(race, key=lambda r: -r["points"][-1][1]):
            series = self.series.get(r["policy"])
            _, ratio, low, high = r["points"][-1]
            label = (series or self.names[r["policy"]]) + " (dropped)" * r["dropped"]
            lines.append((label, [(series or OTHERS, (ratio, low, high))]))
        title = f"How the race ended for {len(race)} policies"
        caption = "On the requests that both were executed on, with 95% intervals."
        x_label = "speed over the winner's (times)"
        svg = charts.rows("intervals", x_label, lines, colours=self.colours, legend=False)
        return Panel("intervals", title, caption, svg)

    def executed(self) -> Panel:
        title = f"{len(self.candidates)} policies were executed"
        return Panel("executed", title, table=executed_table(self.tuned), wide=True)

    def categories(self, categories: Json) -> Panel:
        speeds = {series: categories.get(policy, {}) for policy, series in self.series.items()}
        names = sorted({name for of in speeds.values() for name in of})
        lines = [
            (
                name or "(none)",
                [(s, (of[name], None, None)) for s, of in speeds.items() if name in of],
            )
            for name in names
        ]
        ahead = sum(
            max(speeds, key=lambda s: speeds[s].get(n, 0)) == next(iter(speeds)) for n in names
        )
        return Panel(
            "categories",
            f"The winner is fastest in {ahead} of {len(names)} categories",
            "Measured speed by category of request.",
            charts.rows("categories", "tokens/s", lines, colours=self.colours, from_zero=True),
            Table(
                ("category", *speeds),
                [(n or "(none)", *(of.get(n) for of in speeds.values())) for n in names],
            ),
            "Numbers",
        )

    def latency(self) -> Panel:
        rows = []
        for key, name in LATENCIES.items():
            for policy, series in self.series.items():
                times = (self.candidates[policy]["latency"] or {}).get(key)
                ms = [f"{1e3 * times[q]:.1f}" if times else None for q in ("p50", "p95", "p99")]
                rows.append((name, series, *ms))
        return Panel(
            "latency",
            "Latency",
            "Milliseconds over requests; with few requests p99 is the slowest.",
            table=Table(("", "policy", "p50", "p95", "p99"), rows, words=2),
        )

    def rounds(self, drawn: Json) -> Iterator[Panel]:
        """Of each policy that drafted, one request round by round."""
        for policy, series in self.series.items():
            rounds = drawn["rounds"].get(policy, [])
            if not any(drafted for drafted, _, _ in rounds):
                continue
            drafted, accepted, emitted = (sum(column) for column in zip(*rounds, strict=True))
            rows, end = [], 0
            for number, (_, _, tokens) in enumerate(rounds[:ROUNDS_DRAWN], 1):
                rows.append((number, "".join(drawn["text"][end : end + tokens])))
                end += tokens
            name = f"rounds-{policy}"
            yield Panel(
                name,
                f"{series}: {accepted} of {drafted} drafted tokens accepted, {emitted} tokens in "
                f"{len(rounds)} rounds",
                f"Request {drawn['request']}: its first {len(rows)} rounds.",
                charts.rounds(name, rounds[:ROUNDS_DRAWN]),
                Table(("round", "text"), rows, words=2),
                "Text",
            )


def _by_position(acceptance: Mapping[str, Sequence[float]]) -> Panel:
    best = max(acceptance, key=lambda draft: acceptance[draft][0])
    lines = [(draft, [*enumerate(shares, 1)]) for draft, shares in acceptance.items()]
    return Panel(
        "positions",
        f"{acceptance[best][0]:.0%} of {best}'s first proposals are accepted",
        "Share of positions in the recorded texts from which all drafted tokens up to a depth are "
        "accepted.",
        charts.curves("positions", "position in the draft (tokens)", "share accepted", lines),
    )


def family(document: Json) -> str:
    """What a tried policy drafts with, and how."""
    draft = document.get("draft", "none")
    if draft == "none":
        return "no draft"
    growth = document.get("growth", {}).get("kind", "chain")
    bins = ", entropy bins" if document.get("stratify") else ""
    shortlist = document.get("shortlist", {}).get("kind", "full")
    kind = "chains" if growth == "chain" else TREES.get(growth, growth)
    return f"{draft}: {kind}{bins}" + ("" if shortlist == "full" else f", {shortlist} shortlist")


def _tried(report: TuningReport) -> Panel:
    speeds: dict[str, list[float]] = {}
    for trial in report.study.trials:
        if isinstance(trial.get("policy"), Mapping):
            speeds.setdefault(family(trial["policy"]), []).append(float(trial.get("value") or 0.0))
    policies = {c["id"]: c["policy"] for c in report.tuned["candidates"]}
    executed = Counter(family(policy) for policy in policies.values())
    rows = [(name, len(of), round(max(of), 1), executed[name]) for name, of in speeds.items()]
    rows.sort(key=lambda row: -row[2])
    names = [row[0] for row in rows]
    winner = family(report.tuned["winner"]["policy"])
    return Panel(
        "tried",
        f"{sum(map(len, speeds.values()))} policies of {len(rows)} families were replayed",
        table=Table(
            ("family", "policies", "best predicted tokens/s", "executed"),
            rows,
            winner=names.index(winner) if winner in names else None,
        ),
    )

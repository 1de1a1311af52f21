"""The page of a tuning: what is stored of it, drawn into ``page.html``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from spectune.db.database_errors import NotFoundError
from spectune.optimizer.report import charts
from spectune.optimizer.report.page import Panel, rendered
from spectune.optimizer.report.words import (
    TREES,
    Json,
    PolicyTable,
    counted,
    drift_in_words,
    executed_table,
    headline,
    latency_table,
    policy_in_words,
    prediction_in_words,
    reasons,
    savings,
    series_of,
    titles_of,
)
from spectune.optimizer.tuning.tuned import EVIDENCE, RoundsOfOne, Tuned, TuningEvidence
from spectune.runtime.pair import PairSpec, read_pair
from spectune.traces.store import TraceStore
from spectune.traces.store.query import TraceFilter, acceptance
from spectune.traces.tables import Study

ROUNDS_DRAWN, CHARACTERS_SHOWN = 24, 200


@dataclass(frozen=True)
class TuningReport:
    """What is stored of a tuning. ``acceptance``: by draft the share of starts whose first 1, 2,
    ... proposals are all accepted; ``pair``: the pair's document."""

    study: Study
    evidence: TuningEvidence
    acceptance: Mapping[str, Sequence[float]]
    pair: Json


def report_on(store: TraceStore, name: str) -> TuningReport:
    """Reads a study by id, the beginning of one, or ``latest``: the newest that ended. Raises
    NotFoundError where there is none, or no results of it, and CorruptedChunkError where it is
    damaged."""
    if name == "latest" and (ended := store.list_artifacts(EVIDENCE)):
        name = ended[0].provenance["study"]
    study = store.get_study(name)
    for artifact in store.list_artifacts(EVIDENCE, study.pair_id):
        if artifact.provenance.get("study") == study.id:
            evidence = TuningEvidence.model_validate(store.get_artifact(artifact.id).document)
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


def page(report: TuningReport, *, gpus: int = 1, price: float | None = None, db: str = "") -> str:
    """The HTML of the page. ``db``: the database that its command names; empty: none."""
    tuned, about, study = report.evidence.tuned, report.evidence.about, report.study
    winner, published = tuned.winner, tuned.published
    dealt = (
        f"{counted(tuned.search_requests, 'requests')} to search",
        f"{counted(tuned.test_requests, tuned.unit)} to race",
        f"{counted(tuned.confirm_requests, tuned.unit)} to confirm",
    )
    facts = {
        "policy": f"{winner.label} ({winner.id}): {policy_in_words(winner.policy.spelled_out())}",
        "published": f"version {published.version}" if published else "nothing",
        "executed": ", ".join(dealt),
        **about,
        "study": f"{study.id}, {study.created_at:%Y-%m-%d %H:%M} UTC",
        "recording": study.recording_id,
    }
    load = str(about.get("load", ""))
    saved = savings(tuned, str(about["device"]), gpus=gpus, price=price, load=load)
    command, purpose = deploy_command(report, db)
    return rendered(
        title=headline(tuned),
        command=command,
        purpose=purpose,
        lead=[*drift_in_words(tuned.probes_s), *reasons(tuned), *saved],
        facts=[(name, value) for name, value in facts.items() if value not in (None, "")],
        sections=list(sections(report)),
    )


def deploy_command(report: TuningReport, db: str = "") -> tuple[str, str]:
    """The command that uses or publishes the winner, and what it does, or why there is none; empty
    where nothing is to be deployed."""
    tuned, about = report.evidence.tuned, report.evidence.about
    deployment = about.get("deployment", "default")
    if not tuned.deploys:
        return "", ""
    if tuned.blocked:
        return "", f"Nothing was published: {tuned.blocked}."
    spectune = ["spectune", "--db", db] if db else ["spectune"]
    place = [] if deployment == "default" else ["--deployment", deployment]
    if "engine" in about:  # its servers are no process of ours
        if tuned.published:
            purpose = "It is published. This shows which servers have applied it:"
            return shlex.join([*spectune, "policies", "list", *place]), purpose
        place += ["--device", about["device"]]
    words = [*spectune, "policies", "activate", tuned.winner.id]
    purpose = "It is not published yet. This puts it in force:"
    if tuned.published:
        words = [*spectune, "run", "--policy", "active"]
        purpose = "It is published. This decodes with it:"
    spec = PairSpec.from_json(report.pair, where="the pair of the study")
    if spec == read_pair("demo"):
        words += ["--pair", "demo"]
    else:
        words += ["--set", f"target={spec.target}"]
        for draft, path in spec.drafts.items():
            words += ["--set", f"drafts.{draft}={path}"]
    return shlex.join([*words, *place]), purpose


def sections(report: TuningReport) -> Iterator[tuple[str, list[Panel]]]:
    """The page's parts: a heading, and its panels."""
    tuned, evidence, document = report.evidence.tuned, report.evidence, report.study.document
    series = series_of(tuned)
    executed = executed_table(tuned)
    count = f"{len(executed.rows)} policies were executed"
    yield "Speed", [*_speeds(report, series), Panel("executed", count, table=executed, wide=True)]
    latency = Panel(
        "latency",
        "Latency",
        "Milliseconds over requests; with few requests p99 is the slowest.",
        table=latency_table(tuned),
    )
    of = "load" if report.evidence.about.get("load") else "category"
    yield "Requests", [*_categories(evidence.categories, tuned, of), latency]
    drafts = [_positions(report.acceptance)] if report.acceptance else []
    if drafts := [*drafts, *_rounds(evidence.rounds, next(iter(series.values())))]:
        yield "Drafts", drafts
    why = document.get("by_prompt")
    by_prompt = [Panel("by-prompt", "A draft for each prompt", items=[why])] if why else []
    yield "What was tried", [_tried(report), *by_prompt]


def _speeds(report: TuningReport, series: Mapping[str, str]) -> Iterator[Panel]:
    """Predictions, and how the race ended."""
    tuned, titles = report.evidence.tuned, titles_of(report.evidence.tuned)
    candidates = tuned.policies.values()
    if tuned.prediction is not None:
        yield Panel(
            "prediction",
            prediction_in_words(tuned.prediction),
            "A point is an executed policy, as the profile predicted it before anything was "
            "executed; bars are 95% intervals over requests.",
            charts.prediction(sorted(candidates, key=lambda c: c.id not in series), series),
        )
    race = sorted(candidates, key=lambda c: -c.ratio_to_leader)
    lines = [
        (
            titles[c.id] + " (dropped)" * (not c.left_in_race),
            [(c.id, c.ratio_to_leader, *c.ratio_to_leader_interval)],
        )
        for c in race
    ]
    yield Panel(
        "race",
        f"{(dropped := sum(not c.left_in_race for c in race))} of {len(race)} policies fell behind "
        f"beyond noise in the race and {'was' if dropped == 1 else 'were'} dropped",
        "Speed over that of the fastest in the race, with 95% intervals.",
        charts.rows("race", "speed over the fastest's", lines, series, has_legend=False),
    )


def _categories(
    speeds: Mapping[str, Mapping[str, float]], tuned: Tuned, of: str
) -> Iterator[Panel]:
    """The winner beside the others that were executed on what it was executed on, by category
    ``of`` request, or load; nothing where nothing won, or nobody else was."""
    series, winner = series_of(tuned), tuned.winner.id
    executed = {c.id: c.executed_requests for c in tuned.candidates}
    policies = [p for p, number in executed.items() if number >= executed[winner] and p in speeds]
    if not tuned.deploys or len(policies) < 2:
        return
    categories = sorted({category for policy in policies for category in speeds[policy]})
    marks, ahead = [], 0
    for category in categories:
        by_policy = {p: speeds[p][category] for p in policies if category in speeds[p]}
        marks.append((category or "(none)", [(p, v, None, None) for p, v in by_policy.items()]))
        ahead += max(by_policy, key=by_policy.__getitem__) == winner
    yield Panel(
        "categories",
        f"The winner is fastest in {ahead} of {_counted(len(categories), of)}",
        f"Measured speed by {of}, of {len(policies)} policies that were executed "
        f"on the same {tuned.unit}.",
        charts.rows("categories", "tokens/s", marks, series, 0.0),
    )


def _rounds(drawn: RoundsOfOne, name: str) -> Iterator[Panel]:
    """One request round by round, where the policy of this name drafted."""
    rounds, drawn_rounds = drawn.rounds, drawn.rounds[:ROUNDS_DRAWN]
    if any(drafted for drafted, _, _ in rounds):
        drafted, accepted, emitted = (sum(column) for column in zip(*rounds, strict=True))
        yield Panel(
            "rounds",
            f"{name}: {accepted} of {drafted} drafted tokens accepted, {emitted} tokens in "
            f"{len(rounds)} rounds",
            f"Request {drawn.request}, its first {len(drawn_rounds)} rounds; its text "
            f"begins: {drawn.text[:CHARACTERS_SHOWN]}",
            charts.rounds(drawn_rounds),
        )


def _positions(acceptance: Mapping[str, Sequence[float]]) -> Panel:
    best = max(acceptance, key=lambda draft: acceptance[draft][0])
    return Panel(
        "positions",
        f"{acceptance[best][0]:.0%} of {best}'s first proposals are accepted",
        "Share of positions in the recorded texts from which all drafted tokens up to a depth are "
        "accepted.",
        charts.positions(acceptance),
    )


def family(document: Json) -> str:
    """What a policy drafts with, and how, e.g. ``small: EAGLE-2 trees``."""
    if document.get("by_load"):
        return "tables by load"
    draft, growth = document.get("draft"), document.get("growth", {}).get("kind", "chain")
    kind = "chains" if growth == "chain" else TREES.get(growth, growth)
    bins = ", entropy bins" * bool(document.get("stratify"))
    return "no draft" if draft == "none" else f"{draft}: {kind}{bins}"


def _counted(number: int, unit: str) -> str:
    """A number of units, whose name is in the singular."""
    several = f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}s"
    return f"{number} {unit if number == 1 else several}"


def _tried(report: TuningReport) -> Panel:
    speeds: dict[str, list[float]] = {}
    for trial in report.study.trials:
        speeds.setdefault(family(trial["policy"]), []).append(trial["value"] or 0.0)
    executed = {c.id: family(c.policy.spelled_out()) for c in report.evidence.tuned.candidates}
    names = sorted(speeds, key=lambda name: -max(speeds[name]))
    rows = [
        (name, len(speeds[name]), f"{max(speeds[name]):.1f}", [*executed.values()].count(name))
        for name in names
    ]
    winner = executed[report.evidence.tuned.winner.id]
    columns = ("family", "policies", "best predicted tokens/s", "executed")
    table = PolicyTable(columns, rows, winner=names.index(winner) if winner in names else None)
    families = _counted(len(rows), "family")
    title = f"{sum(map(len, speeds.values()))} policies of {families} were replayed"
    return Panel("tried", title, table=table)

"""`--arrivals`: what `simulate` and `tune` do of an engine that serves many requests at once."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from spectune.optimizer.commands.config import option
from spectune.optimizer.commands.on_engine import deployment_on
from spectune.optimizer.commands.options import checked, together
from spectune.optimizer.commands.outputs import kept_unless_stored
from spectune.optimizer.commands.printing import Meter, as_json, emit, note, say, table, to_type
from spectune.optimizer.commands.shared import quiet_transformers, refuse_typed, say_unseen

if TYPE_CHECKING:
    from spectune.optimizer.bench.engine import EngineBench
    from spectune.optimizer.deployment import Place
    from spectune.optimizer.load_search import Trial
    from spectune.optimizer.simulate.load import Objective, Served
    from spectune.optimizer.tune_load import LoadSearch
    from spectune.optimizer.verdict import Tuned
    from spectune.runtime.pair import PairSpec
    from spectune.runtime.policies.document import Policy
    from spectune.traces.store import TraceStore
    from spectune.traces.tables import Recording

OFF: Final = "off (no draft loaded)"
IDLE: Final = "draft loaded, 0 tokens"
BEYOND: Final = 0.25
"""Share of a load's steps from which on it is said that such batches were not recorded."""


def _seconds(text: str) -> float:
    """``500ms`` or ``2s``, as seconds."""
    time = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s)", text.strip())
    if time is None or not float(time[1]):
        raise click.BadParameter(f"{text[:40]!r} is no time above 0; write for example 500ms or 2s")
    return float(time[1]) / (1000 if time[2] == "ms" else 1)


load_options = together(
    option("--engine", "The latest recording of this engine.", click.Choice(("vllm", "openvino"))),
    option(
        "--arrivals",
        "How requests come: recorded, FILE.csv, FILE.csv@RATE, poisson:RATE or clients:N; several "
        "numbers with commas.",
        metavar="LOAD",
    ),
    option(
        "--ttft",
        "Goodput: the most to the first token, e.g. 500ms.",
        callback=checked(_seconds),
        metavar="TIME",
    ),
    option(
        "--tpot",
        "Goodput: the most per later token, e.g. 40ms.",
        callback=checked(_seconds),
        metavar="TIME",
    ),
)


objective_option = option(
    "--objective",
    "With --arrivals: tokens a second, time per output token, or requests a second within --ttft "
    "and --tpot.",
    click.Choice(["throughput", "tpot", "goodput"]),
    default="throughput",
)


def check_typed(read: Collection[str]) -> None:
    """Raises TraceError for an option that was typed and is none of those that are ``read`` of a
    load."""
    from spectune.traces.errors import TraceError

    why = "says nothing of a load, whose requests are those of `record --engine`; leave it out"
    refuse_typed(TraceError, why, lambda name: name not in read)


def check_no_load(*names: str) -> None:
    """Raises TraceError for an option that says something of a load, typed without one."""
    from spectune.traces.errors import TraceError

    refuse_typed(TraceError, "is of requests under a load; say --arrivals too", names.__contains__)


def recording_on(store: TraceStore, recording: str, engine: str | None) -> Recording:
    """The recording that is named; where it is ``latest``, of an engine if one is given. Raises
    TraceError where it has none, or the one that is named is another's."""
    from spectune.optimizer.tune_load import latest_traffic
    from spectune.traces.errors import TraceError

    if engine is not None and recording == "latest":
        return latest_traffic(store, engine)
    info = store.get_recording(recording)
    if engine is not None and info.engine != engine:
        raise TraceError(f"--engine {engine}: recording {info.id} is of {info.engine}")
    return info


def simulate_under_load(
    store: TraceStore, info: Recording, policy: Policy, kw: dict[str, Any]
) -> None:
    """`simulate --arrivals`: the figures of one policy, a row for each load."""
    from spectune.optimizer.bench.engine import engine_bench
    from spectune.optimizer.tune_load import about_bench

    objective = objective_of({**kw, "objective": "throughput"})
    bench = engine_bench(
        store, info, [policy], kw["arrivals"], objective, limit=kw["limit"], tell=note
    )
    simulated = bench.simulate_loads(policy, bench.trace)
    draft = bench.server_draft(policy)
    data = {
        **about_bench(bench),
        "policy": policy.label(),
        "policy_id": policy.id,
        "server_draft": draft,
        "loads": [{"load": name, **one.to_json(objective)} for name, one in simulated.items()],
    }
    say_unseen(info, len(bench.trace.order))
    _say_costs(bench)
    extrapolated = {name: bench.costs.beyond(draft, s.batches) for name, s in simulated.items()}
    _say_extrapolated(bench, extrapolated)
    rows = []
    for name, one in simulated.items():
        rounds, accepted, _ = one.counts.sum(0).tolist()
        tau, batch = 1 + accepted / max(1, rounds), one.steps[:, 0].mean()
        shown = {"batch": f"{batch:.1f}", "tau": f"{tau:.2f}"}
        rows.append(_row(name, one.served, objective) | shown)
    emit(data, table(rows, title=f"{policy.label()} on {info.engine} (predicted)"))


def tune_load(
    store: TraceStore, info: Recording, spec: PairSpec | None, kw: dict[str, Any]
) -> None:
    """`tune --arrivals`: searches in simulation; with ``--execute`` proves that on the engine, for
    about ``--budget``, and publishes what is confirmed, unless ``--no-publish``."""
    from spectune.optimizer.bench.engine import engine_bench
    from spectune.optimizer.tune_load import place_of, search_load

    bench = engine_bench(
        store, info, [], kw["arrivals"], objective_of(kw), limit=kw["limit"], tell=note
    )
    say_unseen(info, len(bench.trace.order))
    with Meter() as meter:
        search = search_load(store, bench, seed=kw["search_seed"], progress=meter)
    place = place_of(store, info, deployment_on(info.engine))
    data = search.to_json()
    if spec is None:
        why = "predicted alone; --execute proves and publishes"
        _show_search(search, {**data, "published": None, "reason": why})
        if not as_json():
            _say_next(search.trial.policy, place)
        return
    tuned, figures = _prove(store, search, spec, place, kw)
    _show_search(search, {**data, **figures, **tuned.to_json(), "kind": "executed"})
    if not as_json():
        _show_proof(search, tuned, place)


def _prove(
    store: TraceStore, search: LoadSearch, spec: PairSpec, place: Place, kw: dict[str, Any]
) -> tuple[Tuned, dict[str, Any]]:
    from spectune.optimizer.schedule.times import parse_duration
    from spectune.optimizer.tune_load import ProveOptions, prove_load, with_servers

    quiet_transformers()
    with Meter() as meter:
        options = ProveOptions(
            budget_s=float(parse_duration(kw["budget"])),
            publish=not kw["no_publish"],
            publishing=lambda tuned: kept_unless_stored(tuned.to_json),
            tell=note,
            progress=meter,
        )
        return prove_load(store, with_servers(search, spec, kw["threads"]), place, options)


def _show_search(search: LoadSearch, data: dict[str, Any]) -> None:
    """Prints the map of loads, and what is best over all of them."""
    bench, study, trial = search.bench, search.study, search.trial
    _say_costs(bench)
    _say_extrapolated(bench, study.extrapolated)
    if bench.unserved:
        note(
            f"not judged, as no step with them was recorded: {', '.join(bench.unserved)}; "
            f"{bench.costs.served_by} serves every draft of the pair"
        )
    shares = {"proposed": trial, OFF: study.off, IDLE: study.idle(trial.policy.draft)}
    rows = []
    for name in bench.loads:
        best = study.best_constant(name)
        shown = {"load": name, "best draft": best.policy.draft, "tokens": best.policy.gamma_max}
        beside = {column: _share(one, best, name) for column, one in shares.items()}
        rows.append(shown | _row(name, best.served[name], bench.objective) | beside)
    emit(data, table(rows, title=f"best constant by load on {bench.info.engine} (predicted)"))
    if as_json():
        return
    say(
        f"\n{len(study.trials)} policies simulated on {len(bench.parts.search)} texts (study "
        f"{search.study_id}). Best over these loads together: {server_in_words(trial.policy)}"
    )
    if study.no_speculation_from is not None:
        say(f"Not to speculate is best from {study.no_speculation_from} on.")
    title, served_by = bench.engine.title, bench.costs.served_by
    if study.off is None:
        say(f"{OFF}: not measured: restart {title} without the draft, or {served_by} measures it.")
    if not bench.rules.drafts_after:
        say(f"{IDLE}: {title} goes without its draft then, as if off.")
    elif study.idle("") is None:
        say(f"{IDLE}: not measured: let the server draft 0 tokens, or {served_by} measures it.")


def _show_proof(search: LoadSearch, tuned: Tuned, place: Place) -> None:
    """Prints what was executed, and what is in force now."""
    from spectune.optimizer.report.tables import evidence_table
    from spectune.optimizer.report.words import closing

    emit(None, lambda: evidence_table(tuned))
    there = f"--deployment {place.deployment} --device {place.device}"
    commands = [(to_type(f"report {tuned.study}"), "the page of this tuning")]
    if tuned.published:
        look = to_type(f"policies show active {there}"), "the published policy, and its evidence"
        commands.insert(0, look)
    where = f"in deployment {place.deployment} on {place.device}"
    say(closing(tuned.to_json(), where, commands))
    if tuned.winner.policy.draft == "none" and search.bench.rules.drafts_after:
        say(
            f"That was measured on a server without a draft: restart {search.bench.engine.title} "
            "without it; one that keeps it loaded drafts 0 tokens meanwhile."
        )


def _share(trial: Trial | None, best: Trial, load: str) -> str:
    """How good a policy is predicted to be under a load, as a part of the best constant."""
    return "not measured" if trial is None else f"{100 * trial.worth[load] / best.worth[load]:.1f}%"


def server_in_words(policy: Policy) -> str:
    """A policy as a server runs it."""
    if policy.draft == "none":
        return OFF
    return policy.label() if policy.speculates else f"{policy.draft} loaded, 0 tokens"


def _say_extrapolated(bench: EngineBench, shares: Mapping[str, float]) -> None:
    """Warns of loads whose batches the recordings say nothing of: by load, the share of steps."""
    for name, share in shares.items():
        if share >= BEYOND:
            note(
                f"{name}: {100 * share:.0f}% of its steps are of more or fewer requests than any "
                f"that was recorded, so its figures are extrapolated; {bench.costs.served_by} "
                "serves such batches"
            )


def _say_next(policy: Policy, place: Place) -> None:
    """The command that puts in force what is proposed, unless it is."""
    if place.over is not None and place.over.policy_id == policy.id:
        return
    document = policy.model_dump(mode="json", include={"draft", "window"})
    named = "autoregressive" if policy.draft == "none" else json.dumps(document)
    there = f"--deployment {place.deployment} --device {place.device}"
    command = to_type(f"policies activate {there} '{named}'")
    say(f"# publishes it\n{command}")


def objective_of(kw: dict[str, Any]) -> Objective:
    """Raises TraceError for goodput without a limit."""
    from spectune.optimizer.simulate.load import Objective
    from spectune.traces.errors import TraceError

    if kw["objective"] == "goodput" and kw["ttft"] is None and kw["tpot"] is None:
        raise TraceError("--objective goodput needs --ttft or --tpot: which requests are good")
    return Objective(kw["objective"], kw["ttft"], kw["tpot"])


def _say_costs(bench: EngineBench) -> None:
    check = bench.costs.check
    note(
        f"costs fitted to {check['steps']} served steps: {100 * check['median_error']:.1f}% off in "
        f"the median, {100 * check['total_error']:+.1f}% in all"
    )
    seats, clients = bench.rules.max_num_seqs, max(load.clients for load in bench.loads.values())
    if clients > seats:
        note(
            f"the recorded server had {seats} seats (max_num_seqs): of {clients} clients the "
            "others wait"
        )


def _row(name: str, served: Served, level: Objective) -> dict[str, Any]:
    """The figures of a load for people; times in milliseconds."""
    figures = served.to_json(level)

    def times(key: str, *which: str) -> str:
        values, digits = figures[key], ".3g" if len(which) == 1 else ".0f"
        if values is None:
            return "-"
        return "/".join(format(1000 * values[w], digits) for w in which)

    row = {
        "load": name,
        "tokens/s": f"{served.tokens_per_s:.1f}",
        "ttft ms p50/p95": times("time_to_first_token_s", "p50", "p95"),
        "tpot ms": times("time_per_output_token_s", "mean"),
        "latency ms p50/p95/p99": times("latency_s", "p50", "p95", "p99"),
    }
    if level.ttft_s is not None or level.tpot_s is not None:
        row["goodput/s"] = f"{served.goodput(level):.2f}"
    return row

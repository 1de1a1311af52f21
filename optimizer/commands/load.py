"""`--arrivals`: what `simulate` and `tune` do of an engine that serves many requests at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from spectune.optimizer.commands.common import (
    Talk,
    next_command,
    note_missing_panoramas,
)
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.deployment import Place
from spectune.optimizer.replay.batches import Seating, serve_decoder
from spectune.optimizer.replay.loads import Objective, Served, loads_of
from spectune.optimizer.replay.trace import open_trace
from spectune.optimizer.stored_artifacts import fitted
from spectune.optimizer.tuning.engine_bench import EngineBench, constant, engine_bench
from spectune.optimizer.tuning.load_bench import (
    LoadBench,
    LoadSearch,
    about_bench,
)
from spectune.optimizer.tuning.load_search import LoadTrial
from spectune.optimizer.tuning.pair_load import PairLoadBench
from spectune.optimizer.tuning.tuned import Tuned
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.policies.plan import prepare
from spectune.settings import LoadSettings, PoliciesActivate, Simulate, Tune
from spectune.traces.errors import PolicyError
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Recording

OFF: Final = "off (no draft loaded)"
IDLE: Final = "draft loaded, 0 tokens"
USUAL_SEATS: Final = 8
MOST_SEATS: Final = 64
"""Of the native decoder under a load."""
EXTRAPOLATED: Final = 0.25
"""Share of a load's steps from which on it is said that such batches were not recorded."""


def simulate_under_load(
    store: TraceStore, info: Recording, policy: Policy, s: Simulate, talk: Talk
) -> Result:
    """The figures of one policy, a row for each load, beside the tokens/s of a server without a
    draft and of one that keeps it loaded and drafts 0 tokens."""
    objective = Objective("throughput", s.load.ttft, s.load.tpot)
    how: dict[str, Any] = {"limit": s.limit, "unit": s.load.unit, "tell": talk.tell}
    bench = engine_bench(store, info, [policy], s.load.arrivals or "", objective, **how)
    simulated = bench.simulate_loads(policy, bench.trace)
    draft, plain = bench.server_draft(policy), _without_drafting(bench, policy)
    beside = {key: bench.simulate_loads(p, bench.trace) for key, p in plain.items()}
    loads = []
    for name, one in simulated.items():
        figures = {"load": name, **one.to_json(objective), "off": None, "loaded_0_tokens": None}
        loads.append(figures | {key: b[name].to_json(objective) for key, b in beside.items()})
    data = {
        **about_bench(bench),
        "policy": policy.label(),
        "policy_id": policy.id,
        "server_draft": draft,
        "loads": loads,
    }
    note_missing_panoramas(info, len(bench.ordinals), talk)
    _tell_costs(bench, talk)
    shares = {name: bench.costs.beyond(draft, one.batches) for name, one in simulated.items()}
    _tell_extrapolated(bench, shares, talk)
    rows = []
    for name, one in simulated.items():
        rounds, accepted, _ = one.counts.sum(0).tolist()
        batch, tau = float(one.steps[:, 0].mean()), 1 + accepted / max(1, rounds)
        row = _row(name, one.served, objective) | {"batch": batch, "tau": tau}
        for column, key in ((OFF, "off"), (IDLE, "loaded_0_tokens")):
            row[f"tokens/s {column}"] = (
                beside[key][name].served.tokens_per_s if key in beside else "not measured"
            )
        rows.append(row)
    title = f"{policy.label()} on {info.engine} (predicted)"
    return Result("", data, rows, [Table(rows, title=title)])


def simulate_decoder(
    store: TraceStore,
    info: Recording,
    policy: Policy,
    profile: LatencyProfile | None,
    s: Simulate,
    talk: Talk,
) -> Result:
    """The figures of one policy on the native decoder, a row for each load, beside the tokens/s of
    no draft."""
    if profile is None:
        raise PolicyError(
            "no latency profile of this pair and device in the recording's dtype, so what steps of "
            "several requests cost is not known: `profile --concurrency N` measures it"
        )
    objective = Objective("throughput", s.load.ttft, s.load.tpot)
    opened = open_trace(store, info.id, [policy])
    count, find = s.limit or len(opened.ordinals), fitted(store, info.pair_id)
    seats = seats_of(s.load)
    loads = loads_of(s.load.arrivals or "", (), count, s.limit, unit=s.load.unit, tell=talk.tell)
    note_missing_panoramas(info, len(opened.ordinals), talk)
    plans = {
        one.id: prepare(one, drafts_named(one), profile=profile, artifacts=find)
        for one in (policy, AUTOREGRESSIVE)
    }
    rows, shown = [], []
    for name, load in loads.items():
        one, off = (
            serve_decoder(opened.trace, plan, load, Seating(seats), profile, count=count)
            for plan in plans.values()
        )
        figures = {"load": name, **one.to_json(objective), "off": off.to_json(objective)}
        rounds, accepted, _ = one.counts.sum(0).tolist()
        shown.append(figures)
        rows.append({
            **_row(name, one.served, objective),
            "batch": float(one.steps[:, 0].mean()),
            "tau": 1 + accepted / max(1, rounds),
            "tokens/s no draft": off.served.tokens_per_s,
        })  # fmt: skip
    about = {"recording": info.id, "engine": "native", "kind": "simulated", "seats": seats}
    data = {**about, "policy": policy.label(), "policy_id": policy.id, "loads": shown}
    title = f"{policy.label()} on the native decoder, up to {seats} requests at once (predicted)"
    return Result("", data, rows, [Table(rows, title=title)])


def drafts_named(policy: Policy) -> list[str]:
    return [each.draft for each in policy.candidates]


def _without_drafting(bench: EngineBench, policy: Policy) -> dict[str, Policy]:
    """What stands beside a policy: no draft loaded, and its draft loaded and 0 tokens, each where
    steps of it were recorded."""
    known = bench.costs.passes
    plain = {"off": AUTOREGRESSIVE} if "" in known else {}
    if known.get(policy.draft, (1, 1))[0] == 0:
        plain["loaded_0_tokens"] = constant(policy.draft, 0)
    return plain


def search_result(search: LoadSearch, talk: Talk, restart: str = "") -> Result:
    """The map of loads, and what is best over all of them. ``restart``: the command that serves
    without a draft, where that cannot be measured from here."""
    bench, study, trial = search.bench, search.study, search.trial
    _tell_costs(bench, talk)
    _tell_extrapolated(bench, study.extrapolated, talk)
    if bench.unserved:
        talk.tell(
            f"not judged, as no step with them was recorded: {', '.join(bench.unserved)}; "
            f"{bench.costs.served_by} serves every draft of the pair"
        )
    shares = {"proposed": trial, OFF: study.off, IDLE: study.idle(trial.policy.draft)}
    rows = []
    for name in bench.loads:
        best = study.best_constant(name)
        row = {"load": name, "best draft": best.policy.draft, "tokens": best.policy.gamma_max}
        beside = {column: _share(one, best, name) for column, one in shares.items()}
        rows.append(row | _row(name, best.served[name], bench.objective) | beside)
    lines = [
        f"{len(study.trials)} policies simulated on {len(bench.parts.search)} texts (study "
        f"{search.study_id}). Best over these loads together: {server_in_words(trial.policy)}"
    ]
    if study.no_speculation_from is not None:
        lines.append(f"Not to speculate is best from {study.no_speculation_from} on.")
    if search.contexts is not None:
        lines.append(contexts_in_words(search.contexts))
    title, served_by = bench.engine.title, bench.costs.served_by
    if study.off is None:
        measures = f", or {served_by} measures it." if not restart else f":\n{restart}"
        lines.append(f"{OFF}: not measured: restart {title} without the draft{measures}")
    if study.idle("") is None:
        lines.append(
            f"{IDLE}: not measured: let the server draft 0 tokens, or {served_by} measures it."
        )
    for draft, (least, most) in bench.costs.passes.items():
        if draft and least > 1:
            fewer = "1 token" if least == 2 else f"1 to {least - 1} tokens"
            lines.append(
                f"{draft}, {fewer}: not searched, as all that was served drafted {least}"
                + (f" to {most}" if most > least else "")
                + f": `tune --url` notes what others cost, or {served_by} measures it."
            )
    table = Table(rows, title=f"best constant by load on {bench.info.engine} (predicted)")
    return Result("\n".join(lines), search.to_json(), rows, [table])


def seats_of(load: LoadSettings) -> int:
    """Requests that the native decoder serves at once: as is said, else the clients, else 8."""
    if load.seats is not None:
        return load.seats
    clients = 0
    if (load.arrivals or "").startswith("clients:"):
        clients = max(one.clients for one in loads_of(load.arrivals or "", (), 1).values())
    return min(MOST_SEATS, clients) or USUAL_SEATS


def pair_search_result(bench: PairLoadBench) -> Result:
    """What was searched for the native decoder: the best constant of each load, and what is best
    over all of them."""
    study, proposed = bench.study, bench.proposed
    assert study is not None
    assert proposed is not None
    rows = []
    for name in bench.loads:
        best = study.best_constant(name)
        shares = {"proposed": proposed, "no draft": study.off}
        beside = {column: _share(one, best, name) for column, one in shares.items()}
        figures = _row(name, best.served[name], bench.objective)
        rows.append({"load": name, "best constant": best.policy.label(), **figures, **beside})
    text = (
        f"{len(study.trials)} policies and tables simulated on {len(bench.parts.search)} texts, up "
        f"to {bench.seats} requests at once. Best over these loads together: "
        f"{proposed.policy.label()}"
    )
    data = {"loads": bench.by_load, "seats": bench.seats, "objective": bench.objective.kind}
    data["simulated"] = len(study.trials)
    table = Table(rows, title="best constant by load (predicted)")
    return Result(text, data, rows, [table])


def contexts_in_words(about: Mapping[str, Any]) -> str:
    """What tables by context (:attr:`LoadSearch.contexts`) are worth, or why none were tried."""
    low, _, high = about["tokens"]
    steps = f"The requests of a step have contexts of {low:.0f} to {high:.0f} tokens (80% of steps)"
    if about["relative"] is None:
        return f"{steps}: too alike for tables by context."
    return (
        f"{steps}; the best table of its own from {about['tried_from']} tokens on is worth "
        f"{100 * (about['relative'] - 1):+.1f}%, as predicted."
    )


def restart_in_words(bench: LoadBench, tuned: Tuned) -> str:
    """What is to be known where the winner is a server without a draft; else empty."""
    if tuned.winner.policy.draft != "none" or bench.loaded:
        return ""
    title = bench.engine.title
    if tuned.winner.policy.id == tuned.incumbent.policy.id:
        beside = f"measure yours beside {title} restarted without it"
        return f"\nThat is a server without a draft: {beside}."
    return (
        f"\nThat was measured on a server without a draft: restart {title} without it; one that "
        "keeps it loaded drafts 0 tokens meanwhile."
    )


def next_of(policy: Policy, place: Place, s: Tune) -> str:
    """The command that puts in force what is proposed, unless it is."""
    if place.over is not None and place.over.policy_id == policy.id:
        return ""
    document = policy.model_dump(mode="json", include={"draft", "window"})
    name = "autoregressive" if policy.draft == "none" else json.dumps(document)
    there = ["--deployment", place.deployment, "--device", place.device]
    words = ["policies", "activate", *there, name]
    command = next_command(s, words, PoliciesActivate, {"deployment", "device"})
    return f"\n# publishes it\n{command}"


def _share(trial: LoadTrial | None, best: LoadTrial, load: str) -> str:
    """How good a policy is predicted to be under a load, as a part of the best constant."""
    return "not measured" if trial is None else f"{100 * trial.worth[load] / best.worth[load]:.1f}%"


def server_in_words(policy: Policy) -> str:
    """A policy as a server runs it."""
    if policy.draft == "none":
        return OFF
    return policy.label() if policy.speculates else f"{policy.draft} loaded, 0 tokens"


def _tell_extrapolated(bench: EngineBench, shares: Mapping[str, float], talk: Talk) -> None:
    """Warns of loads whose batches the recordings say nothing of: by load, the share of steps."""
    for name, share in shares.items():
        if share >= EXTRAPOLATED:
            talk.tell(
                f"{name}: {100 * share:.0f}% of its steps are of more or fewer requests than any "
                f"that was recorded, so its figures are extrapolated; {bench.costs.served_by} "
                "serves such batches"
            )


def _tell_costs(bench: EngineBench, talk: Talk) -> None:
    check = bench.costs.check
    talk.tell(
        f"costs fitted to {check['steps']} served steps: {100 * check['median_error']:.1f}% off in "
        f"the median, {100 * check['total_error']:+.1f}% in all"
    )
    seats, clients = bench.rules.max_num_seqs, max(load.clients for load in bench.loads.values())
    if clients > seats:
        talk.tell(
            f"the recorded server had {seats} seats (max_num_seqs): of {clients} clients the "
            "others wait"
        )


def _row(name: str, served: Served, objective: Objective) -> dict[str, Any]:
    """The figures of a load for people; times in milliseconds."""
    figures = served.to_json(objective)

    def times(key: str, *which: str) -> str:
        values, digits = figures[key], ".3g" if len(which) == 1 else ".0f"
        return "/".join(format(1000 * values[w], digits) for w in which) if values else "-"

    row = {
        "load": name,
        "tokens/s": served.tokens_per_s,
        "ttft ms p50/p95": times("time_to_first_token_s", "p50", "p95"),
        "tpot ms": times("time_per_output_token_s", "mean"),
        "latency ms p50/p95/p99": times("latency_s", "p50", "p95", "p99"),
    }
    if objective.ttft_s is not None or objective.tpot_s is not None:
        row["goodput/s"] = served.goodput(objective)
    return row

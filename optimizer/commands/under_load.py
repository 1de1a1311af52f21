"""`--arrivals`: what `simulate` and `tune` do of an engine that serves many requests at once."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from spectune.optimizer.commands.config import option
from spectune.optimizer.commands.on_engine import deployment_on
from spectune.optimizer.commands.options import checked, together
from spectune.optimizer.commands.outputs import kept_unless_stored
from spectune.optimizer.commands.printing import Meter, as_json, emit, note, say, table, to_type
from spectune.optimizer.commands.shared import quiet_transformers, refuse_typed, say_unseen

if TYPE_CHECKING:
    from spectune.optimizer.deployment import Place
    from spectune.optimizer.executed_load import Executed
    from spectune.optimizer.proven_load import Proof
    from spectune.optimizer.simulate.load import Objective, Served
    from spectune.optimizer.texts import ComparedTexts
    from spectune.optimizer.under_load import Found, Scored, UnderLoad
    from spectune.runtime.pair import PairSpec
    from spectune.runtime.policies.document import Policy
    from spectune.traces.store import TraceStore
    from spectune.traces.tables import Publication, Recording


OFF: Final = "off (no draft loaded)"
IDLE: Final = "draft loaded, 0 tokens"
BEYOND: Final = 0.25
"""Share of a load's steps from which on it is said that such batches were not recorded."""


def _seconds(text: str) -> float:
    """``500ms`` or ``2s``, as seconds."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s)", text.strip())
    if found is None or not float(found[1]):
        raise click.BadParameter(f"{text[:40]!r} is no time above 0; write for example 500ms or 2s")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


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
    from spectune.traces.errors import TraceError
    from spectune.traces.tables import DESIGNED

    if engine is not None and recording == "latest":
        traffic = (i for i in store.list_recordings() if i.source != DESIGNED)
        found = next((i for i in traffic if i.engine == engine and i.n_requests), None)
        if found is None:
            raise TraceError(
                f"--engine {engine}: nothing that it served was recorded yet; docs/engines.md "
                "says how"
            )
        return found
    info = store.get_recording(recording)
    if engine is not None and info.engine != engine:
        raise TraceError(f"--engine {engine}: recording {info.id} is of {info.engine}")
    return info


def simulate_under_load(
    store: TraceStore, info: Recording, policy: Policy, kw: dict[str, Any]
) -> None:
    """`simulate --arrivals`: the figures of one policy, a row for each load."""
    from spectune.engines.abilities import engine_named
    from spectune.optimizer.under_load import under_load

    engine_named(info.engine).runs(policy)
    level = _objective({**kw, "objective": "throughput"})
    lab = under_load(store, info, [policy], kw["arrivals"], level, limit=kw["limit"], tell=note)
    simulated = {name: lab.simulate(policy, load) for name, load in lab.loads.items()}
    data = {
        **_about(lab),
        "policy": policy.label(),
        "policy_id": policy.id,
        "server_draft": lab.server_draft(policy),
        "loads": [{"load": name, **found.to_json(level)} for name, found in simulated.items()],
    }
    say_unseen(info, len(lab.trace.order))
    _say_costs(lab)
    draft = lab.server_draft(policy)
    _say_beyond(lab, {name: lab.costs.beyond(draft, s.batches) for name, s in simulated.items()})
    rows = []
    for name, found in simulated.items():
        rounds, accepted, _ = found.counts.sum(0).tolist()
        tau, batch = 1 + accepted / max(1, rounds), found.steps[:, 0].mean()
        shown = {"batch": f"{batch:.1f}", "tau": f"{tau:.2f}"}
        rows.append(_row(name, found.served, level) | shown)
    emit(data, table(rows, title=f"{policy.label()} on {info.engine} (predicted)"))


class Searched(NamedTuple):
    """What was searched under load, what was found, and what is to be told of it as JSON."""

    lab: UnderLoad
    found: Found
    data: dict[str, Any]


def search_under_load(store: TraceStore, info: Recording, kw: dict[str, Any]) -> Searched:
    """The search of `tune --arrivals`."""
    from spectune.optimizer.under_load import Search, under_load

    level = _objective(kw)
    lab = under_load(store, info, [], kw["arrivals"], level, limit=kw["limit"], tell=note)
    say_unseen(info, len(lab.trace.order))
    with Meter() as meter:
        found = Search(lab, meter).run()
    loads = []
    for name, best in found.best.items():
        served: dict[str, Scored | None] = {"best_constant": best, "table": found.table}
        served |= {"off": found.off, "loaded_0_tokens": found.idle}
        figures = {
            which: scored and scored.served[name].to_json(lab.objective)
            for which, scored in served.items()
        }
        fastest = {"draft": best.policy.draft, "gamma": best.policy.gamma_max}
        loads.append({"load": name, "best": fastest, "relative": found.relative[name], **figures})
    policy = found.table.policy
    data = {
        **_about(lab),
        "objective": kw["objective"],
        "policy": policy.spelled_out(),
        "policy_id": policy.id,
        "label": policy.label(),
        "simulated": found.simulated,
        "no_speculation_from": found.stops_at,
        "steps_beyond_the_recorded_batches": dict(found.beyond),
        "drafts_not_served": list(lab.unserved),
        "loads": loads,
    }
    return Searched(lab, found, data)


class Proved(NamedTuple):
    """What the engine served of a search's finalists, what that proves, and what became of it: the
    publication, or why there is none."""

    executed: list[Executed]
    proof: Proof
    place: Place
    published: Publication | None
    reason: str

    @property
    def texts(self) -> ComparedTexts:
        """Of all that were executed."""
        first, *others = (one.texts for one in self.executed)
        return sum(others, start=first)

    def to_json(self, level: Objective) -> dict[str, Any]:
        over = self.place.over
        return {
            "kind": "executed",
            "executed": [one.to_json(level) for one in self.executed],
            "texts": self.texts.to_json(),
            "incumbent": {
                "version": over and over.version,
                "id": self.proof.incumbent.id,
                "label": self.proof.incumbent.label(),
            },
            **self.proof.to_json(),
            "published": self.published and self.published.told(),
            "reason": self.reason,
        }


def place_of(store: TraceStore, info: Recording) -> Place:
    """Where a policy for the engine of a recording is put in force: in the deployment that was
    named, else in the engine's own, on the device that was recorded, else on this machine's."""
    from spectune.optimizer.deployment import Place
    from spectune.runtime.hardware import sees_cuda

    deployment = deployment_on(info.engine)
    device = str(info.options.get("device") or ("cuda" if sees_cuda() else "cpu"))
    return Place(device, deployment, store.active_publication(info.pair_id, device, deployment))


def execute_found(
    store: TraceStore, searched: Searched, spec: PairSpec, place: Place, kw: dict[str, Any]
) -> Proved:
    """Serves what a search found on its engine, beside what is in force, for about --budget;
    publishes the best where that is proved better, unless --no-publish."""
    from spectune.optimizer.executed_load import execute_all, finalists, pass_s, passes_of
    from spectune.optimizer.inputs import in_force
    from spectune.optimizer.proven_load import proof_of, publish_proven
    from spectune.optimizer.schedule.times import parse_duration

    quiet_transformers()
    lab, found, data = searched
    otherwise = "what is to be beaten is no speculation"
    incumbent, unusable = in_force(place.over, lab.engine.runs, otherwise)
    those = finalists(found, lab, incumbent)
    passes, one_s = passes_of(those, float(parse_duration(kw["budget"]))), pass_s(those)
    note(
        f"{len(those)} policies under {len(lab.loads)} loads, {passes} times each: about "
        f"{passes * one_s:.0f} s, and the starts of the engine"
    )
    with Meter() as meter:
        executed = execute_all(lab, spec, those, passes, meter, threads=kw["threads"])
    proof = proof_of(executed, incumbent, lab.objective)
    against = proof.against or ("--no-publish" if kw["no_publish"] else "")
    more = (
        f"--budget {math.ceil(proof.wants * one_s)}s fits {proof.wants} passes"
        if proof.against and proof.wants
        else ""
    )
    reason = "; ".join(filter(None, (unusable, str(proof), against, more)))
    result = Proved(executed, proof, place, None, reason)
    if against:
        return result
    evidence = {**data, **result.to_json(lab.objective)}
    with kept_unless_stored(lambda: evidence):
        done = publish_proven(store, lab, proof.winner, place, reason, evidence)
    if isinstance(done, str):
        return result._replace(reason=f"{reason}; {done}")
    return result._replace(published=done)


def show_search(searched: Searched, place: Place, proved: Proved | None) -> None:
    """Prints the map of loads, the table that is best over all of them, what the engine served of
    it and what is in force, and what to type next."""
    lab, found, data = searched
    why = "predicted alone; --execute proves and publishes"
    level, rows = lab.objective, []
    for name, best in found.best.items():
        told = {"load": name, "best draft": best.policy.draft, "tokens": best.policy.gamma_max}
        beside = {"table": f"{100 * found.relative[name]:.1f}%"}
        beside |= {
            OFF: _share(found.off, best, name, level),
            IDLE: _share(found.idle, best, name, level),
        }
        rows.append(told | _row(name, best.served[name], level) | beside)
    _say_costs(lab)
    _say_beyond(lab, found.beyond)
    if lab.unserved:
        note(
            f"not judged, as no step with them was recorded: {', '.join(lab.unserved)}; "
            f"{lab.costs.served_by} serves every draft of the pair"
        )
    on = (
        f"best constant by load on {lab.info.engine} (predicted), and beside it the table, a "
        "server without a draft, and one that drafts 0 tokens"
    )
    outcome = {"published": None, "reason": why} if proved is None else proved.to_json(level)
    emit({**data, **outcome}, table(rows, title=on))
    if as_json():
        return
    if proved is not None:
        executed = [_beside(one, name) for name in lab.loads for one in proved.executed]
        emit(None, table(executed, title="executed beside predicted"))
        say(f"Beside those recorded: {proved.texts}")
    say(
        f"\n{found.simulated} policies simulated. Best over these loads together: "
        f"{found.table.policy.label()}"
    )
    if found.stops_at is not None:
        say(f"Not to speculate is best from {found.stops_at} on.")
    for line in without_a_draft(lab, found, proved is not None):
        say(line)
    if proved is not None:
        say(_concluded(lab, proved))
    _say_next(found.table.policy if proved is None else proved.proof.winner, proved, place)


def _share(scored: Scored | None, best: Scored, name: str, level: Objective) -> str:
    """How good a policy is predicted to be under a load, as a part of the best constant."""
    if scored is None:
        return "not measured"
    worth = level.worth(scored.served[name]) / level.worth(best.served[name])
    return f"{100 * worth:.1f}%"


def server_in_words(policy: Policy) -> str:
    """A policy as a server runs it."""
    if policy.draft == "none":
        return OFF
    return policy.label() if policy.speculates else f"{policy.draft} loaded, 0 tokens"


def without_a_draft(lab: UnderLoad, found: Found, executed: bool) -> list[str]:
    """What is not known of servers that do not speculate, and how to measure it."""
    lines = []
    if found.off is None and not executed:
        lines.append(
            f"{OFF}: not measured: restart {lab.engine.title} without the draft, or "
            f"{lab.costs.served_by} measures it on a server of its own."
        )
    if found.idle is None and lab.rules.drafts_after:
        lines.append(
            f"{IDLE}: not measured: let the server draft 0 tokens for a while, or "
            f"{lab.costs.served_by} does."
        )
    if not lab.rules.drafts_after:
        lines.append(f"{IDLE}: {lab.engine.title} goes without its draft then, as if off.")
    return lines


def _say_beyond(lab: UnderLoad, beyond: Mapping[str, float]) -> None:
    """Warns of loads whose batches the recordings say nothing of: by load, the share of steps."""
    for name, share in beyond.items():
        if share >= BEYOND:
            note(
                f"{name}: {100 * share:.0f}% of its steps are of more or fewer requests than any "
                f"that was recorded, so its figures are extrapolated; {lab.costs.served_by} serves "
                "such batches"
            )


def _concluded(lab: UnderLoad, proved: Proved) -> str:
    """What is published now, where, and how much better than what."""
    place, done = proved.place, proved.published
    where = f"in deployment {place.deployment} for pair {lab.info.pair_id} on {place.device}"
    if done is not None:
        return (
            f"Published {where}: version {done.version}, {done.label} (`policies deployments` "
            f"shows who applied it). By {lab.objective.kind}, {proved.reason}."
            f"{_restart(lab, proved.proof.winner)}{_saved(lab, proved)}"
        )
    stays = (
        "nothing is"
        if place.over is None
        else f"version {place.over.version}, {place.over.label}, stays"
    )
    return f"Nothing is published: {proved.reason}. Published before {where}: {stays}."


def _restart(lab: UnderLoad, winner: Policy) -> str:
    """What a server has to be told that cannot unload its draft."""
    if winner.draft != "none" or not lab.rules.drafts_after:
        return ""
    return (
        f" That was measured on a server without a draft: restart {lab.engine.title} without it; "
        "one that keeps it loaded drafts 0 tokens meanwhile."
    )


def _saved(lab: UnderLoad, proved: Proved) -> str:
    """Machine hours that a million tokens take under each load, of the winner and of what it
    replaces, as executed."""
    one, other = (
        next(e for e in proved.executed if e.policy.id == policy.id)
        for policy in (proved.proof.winner, proved.proof.incumbent)
    )
    hours = "GPU hours" if proved.place.device.startswith("cuda") else "machine hours"
    said = ", ".join(
        f"{1e6 / 3600 / one.median(name).tokens_per_s:.2f} instead of "
        f"{1e6 / 3600 / other.median(name).tokens_per_s:.2f} at {name}"
        for name in lab.loads
    )
    return f" A million tokens take {said} {hours} (medians of {proved.proof.passes} passes)."


def _say_next(policy: Policy, proved: Proved | None, place: Place) -> None:
    """The command that comes next: to look at what was published, or to put in force what was
    not."""
    there = f"--deployment {place.deployment} --device {place.device}"
    if proved is not None and proved.published is not None:
        what, command = "the published policy, and its evidence", f"policies show active {there}"
    elif place.over is None or place.over.policy_id != policy.id:
        gamma = policy.window.model_dump(mode="json")["gamma"]
        window = {"kind": policy.window.kind, "gamma": gamma}
        document = json.dumps({"draft": policy.draft, "window": window})
        named = document if policy.speculates else "autoregressive"
        what, command = "publishes it", f"policies activate {there} '{named}'"
    else:
        return
    say(f"# {what}\n{to_type(command)}")


def _beside(one: Executed, name: str) -> dict[str, Any]:
    """A policy under a load, executed: speeds of all executions, and how far the prediction was off
    the median's."""
    measured, each = one.median(name), [s.tokens_per_s for s in one.served[name]]
    speed, tpot, off = "-", "-", "-"
    if predicted := one.predicted.get(name):
        speed, tpot = f"{predicted.tokens_per_s:.1f}", f"{1000 * predicted.mean_tpot_s:.3g}"
        off = f"{100 * (predicted.tokens_per_s / measured.tokens_per_s - 1):+.1f}%"
    return {
        "load": name,
        "policy": server_in_words(one.policy),
        "predicted": speed,
        "tokens/s": f"{measured.tokens_per_s:.1f}",
        "from-to": f"{min(each):.1f}-{max(each):.1f}",
        "off": off,
        "tpot ms": f"{1000 * measured.mean_tpot_s:.3g}",
        "predicted tpot": tpot,
    }


def _objective(kw: dict[str, Any]) -> Objective:
    from spectune.optimizer.simulate.load import Objective
    from spectune.traces.errors import TraceError

    if kw["objective"] == "goodput" and kw["ttft"] is None and kw["tpot"] is None:
        raise TraceError("--objective goodput needs --ttft or --tpot: which requests are good")
    return Objective(kw["objective"], kw["ttft"], kw["tpot"])


def _about(lab: UnderLoad) -> dict[str, Any]:
    return {
        "recording": lab.info.id,
        "engine": lab.info.engine,
        "kind": "simulated",
        "max_num_seqs": lab.rules.max_num_seqs,
        "costs": dict(lab.costs.check),
    }


def _say_costs(lab: UnderLoad) -> None:
    check = lab.costs.check
    note(
        f"costs fitted to {check['steps']} served steps: {100 * check['median_error']:.1f}% off in "
        f"the median, {100 * check['total_error']:+.1f}% in all"
    )
    seats, clients = lab.rules.max_num_seqs, max(load.clients for load in lab.loads.values())
    if clients > seats:
        note(
            f"the recorded server had {seats} seats (max_num_seqs): of {clients} clients the "
            "others wait"
        )


def _row(name: str, served: Served, level: Objective) -> dict[str, Any]:
    """The figures of a load for people; times in milliseconds."""
    told = served.to_json(level)

    def times(key: str, *which: str) -> str:
        found, digits = told[key], ".3g" if len(which) == 1 else ".0f"
        if found is None:
            return "-"
        return "/".join(format(1000 * found[w], digits) for w in which)

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

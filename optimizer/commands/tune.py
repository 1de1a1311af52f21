"""`tune`: the whole circle, on the native decoder, on an engine that is started here, or on a
server that runs."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy.orm import Session

from spectune.engines.abilities import VLLM
from spectune.engines.engine import Load
from spectune.engines.server_settings import vllm_line
from spectune.engines.vllm.command import SCHEDULER
from spectune.engines.vllm.running import RunningServer
from spectune.optimizer.commands import load as under_load
from spectune.optimizer.commands.common import (
    Talk,
    deployment_for,
    names_pair,
    naming_pair,
    next_command,
    note_missing_panoramas,
    open_store,
    pair_of,
    recording_meant,
)
from spectune.optimizer.commands.decoding import fit_to, quiet_transformers, read_workload
from spectune.optimizer.commands.decoding import load as load_models
from spectune.optimizer.commands.outcomes import tuning_result
from spectune.optimizer.commands.report import page_of
from spectune.optimizer.commands.results import Result
from spectune.optimizer.commands.rollouts import begin, check_block, servers_of
from spectune.optimizer.commands.tune_settings import bench_of, checked
from spectune.optimizer.deployment import Place
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.on_engine import EngineRun, check_options, prompts_of, record_on
from spectune.optimizer.recording.processes import dask_workers
from spectune.optimizer.replay.loads import loads_of, objective_of
from spectune.optimizer.replay.served_costs import costs_of_engine
from spectune.optimizer.replay.trace import Opened
from spectune.optimizer.report.words import closing
from spectune.optimizer.rollout.rollout_words import in_words
from spectune.optimizer.tuning.bench import Tunable
from spectune.optimizer.tuning.confirm import check_workload_size
from spectune.optimizer.tuning.engine_bench import engine_bench
from spectune.optimizer.tuning.load_bench import LoadBench, place_of, starting
from spectune.optimizer.tuning.native import PairBench, TuneOptions, native_bench, native_place
from spectune.optimizer.tuning.pair_load import PairLoadBench
from spectune.optimizer.tuning.pipeline import ProveOptions
from spectune.optimizer.tuning.pipeline import tune as run_tuning
from spectune.optimizer.tuning.server_bench import connect, read_by_pair, record_draft, server_bench
from spectune.optimizer.tuning.sources import ServerTuned, recording_named, sample_since, suits
from spectune.optimizer.tuning.tuned import Tuned
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import Policy
from spectune.runtime.text_codec import load_codec
from spectune.settings import PoliciesActivate, PoliciesShow, RunCommand, Tune
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording, Rollout

CLIENTS: Final = (1, 4, 8)
"""Clients that a workload is sent to a server by unless --arrivals says how it comes."""


@dataclass(frozen=True)
class Account:
    """On whose account a tuning is done, and what it is done with. ``key``: of the publication, and
    of a sample of what was recorded; ``guard`` is called in the transaction that publishes, and
    raises where the caller may not; ``load`` loads the models of a pair."""

    actor: str = "tune"
    key: str | None = None
    guard: Callable[[Session], None] | None = None
    load: Callable[..., Any] = load_models
    clock: Callable[[], float] = time.perf_counter

    def options(self, s: Tune, talk: Talk) -> dict[str, Any]:
        """What of :class:`ProveOptions` every tuning is told."""
        about = {"actor": self.actor, "idempotency_key": self.key, "guard": self.guard}
        return {**about, "publish": s.publish and not s.rollout, "tell": talk.tell}


class Ready(NamedTuple):
    """A tuning that can begin. ``restart``: the command that serves without a draft, where that
    cannot be measured from here."""

    bench: Tunable
    place: Place
    options: ProveOptions
    restart: str = ""


def tune(s: Tune, talk: Talk) -> Result:
    s = checked(s, talk)
    with open_store(s, create=bench_of(s) != "engine") as store:
        return tune_in(store, s, talk)


def tune_in(store: TraceStore, s: Tune, talk: Talk, account: Account | None = None) -> Result:
    """Tunes as settings that are :func:`checked` say, in a store; on an engine without ``serve`` it
    searches alone."""
    bench_name = bench_of(s)
    if bench_name == "engine" and s.engine is None and not s.serve and s.recording is not None:
        bench_name = recording_meant(s, store, s.recording).engine
    if s.rollout and s.publish:
        check_block(s.block)
        # Who is to prove it is asked for before it is known what.
        servers_of(store, deployment_for(s, bench_name if bench_name == "native" else VLLM.name))
    benches = {"native": on_decoder, "server": on_server}
    ready = benches.get(bench_name, on_engine)
    with ready(store, s, talk, account or Account()) as (bench, place, options, restart):
        s = naming_pair(s, _pair_of_bench(store, bench))
        if isinstance(bench, LoadBench) and bench.start is None:
            result = under_load.search_result(bench.search, talk)
            why = "predicted alone; --serve proves and publishes, and so does --rollout"
            data = {**result.data, "published": None, "reason": why}
            policy = bench.search.trial.policy
            text = result.text + under_load.next_of(policy, place, s)
            if s.rollout and s.publish:
                about: dict[str, Any] = {"recording": bench.info.id, "study": bench.search.study_id}
                begun = _roll_out(store, bench, policy, place, s, talk, account, about)
                winner = {"policy": policy.id, "label": policy.label()}
                about |= {"winner": winner, "report": None, "rollout": begun.to_json()}
                data = {**data, **about, "reason": in_words(begun)}
                text = f"{result.text}\n{in_words(begun)}"
            return replace(result, text=text, data=data)
        tuned = run_tuning(store, bench, place, options, progress=talk.progress)
    if isinstance(bench, LoadBench):
        note_missing_panoramas(bench.info, len(bench.ordinals), talk)
    page, failed = page_of(store, tuned.study, s.db, s.report, talk.tell)
    result = tuning_result(tuned)
    data = {**result.data, "report": page}
    lines, tables = [result.text], list(result.tables)
    if isinstance(bench, LoadBench):
        searched = under_load.search_result(bench.search, talk, restart)
        data = {**searched.data, **data, "kind": "executed", "url": s.url}
        lines, tables = [searched.text, *lines], [*searched.tables, *tables]
        tail = under_load.restart_in_words(bench, tuned)
    else:
        assert isinstance(bench, PairBench)
        data["heads"], tail = bench.pair.hidden_states, ""
    if isinstance(bench, PairLoadBench):
        searched = under_load.pair_search_result(bench)
        data = {**searched.data, **data}
        lines, tables = [searched.text, *lines], [*searched.tables, *tables]
    where = f"in deployment {place.deployment} on {place.device}"
    lines.append(closing(tuned, where, _hints(tuned, page, place, s)) + tail)
    if s.rollout and s.publish and tuned.deploys:
        evidence = tuned.to_json()
        policy = tuned.winner.policy
        begun = _roll_out(store, bench, policy, place, s, talk, account, evidence)
        data["rollout"] = begun.to_json()
        lines.append(in_words(begun))
    return Result("\n".join(lines), data, result.rows, tables, failed=failed)


def _roll_out(
    store: TraceStore,
    bench: Tunable,
    policy: Policy,
    place: Place,
    s: Tune,
    talk: Talk,
    account: Account | None,
    evidence: Mapping[str, Any],
) -> Rollout:
    """Begins the rollout of what a tuning chose, once per key of its account."""
    account = account or Account()
    recording = bench.texts.recording
    return begin(
        store,
        policy,
        recording.pair_id,
        place,
        talk.tell,
        block_s=s.block,
        actor=account.actor,
        idempotency_key=account.key,
        guard=account.guard,
        reason=f"tuned on recording {recording.id}",
        evidence=evidence,
    )


# ------------------------------------------------------------------------------------- the benches


@contextmanager
def on_decoder(store: TraceStore, s: Tune, talk: Talk, account: Account) -> Iterator[Ready]:
    """The native decoder, over a workload, a recording, or a sample of what was recorded."""
    spec = pair_of(s, store, s.recording)
    workload, name = None, None
    if s.recording is None and s.since is None:
        workload = read_workload(s, spec, talk)
        check_workload_size(workload, publish=s.publish)  # before the pair is loaded
    options = TuneOptions.of(s, fresh=s.fresh, **account.options(s, talk))
    pair = account.load(s, spec, talk)
    if workload is not None:
        workload = fit_to(pair, workload, options.options, s, talk)
    else:
        name = _recorded(store, spec, s, talk, account).id
    with dask_workers(s.workers), pair.torch_threads():
        how: dict[str, Any] = {"progress": talk.progress, "clock": account.clock}
        if s.load.arrivals is not None:
            how |= {"make": partial(_under_load, s, talk), "requests": under_load.seats_of(s.load)}
        bench = native_bench(store, pair, workload or name or "", options, **how)
        yield Ready(bench, native_place(store, pair, s.deployment), bench.options)


def _under_load(s: Tune, talk: Talk, *bench: Any, **how: Any) -> PairLoadBench:
    """The native decoder's bench for the loads of the settings, over what was opened."""
    opened: Opened = bench[1]
    count = len(opened.ordinals)
    read: dict[str, Any] = {"unit": s.load.unit, "tell": talk.tell}
    return PairLoadBench(
        *bench,
        loads=loads_of(s.load.arrivals or "", (), count, s.requests.limit, **read),
        objective=objective_of(s.load),
        count=count,
        seats=under_load.seats_of(s.load),
        **how,
    )


@contextmanager
def on_engine(store: TraceStore, s: Tune, talk: Talk, account: Account) -> Iterator[Ready]:
    """What an engine recorded, on servers of its own that are started to execute (``serve``)."""
    spec = pair_of(s) if names_pair(s) and s.typed("pair", "target", "drafts") else None
    if s.since is None:
        info = recording_meant(s, store, s.recording or "latest", s.engine)
    else:
        of = spec or pair_of(s, store, recording_meant(s, store, "latest", s.engine).id)
        info = _recorded(store, of, s, talk, account, s.engine)
    costs = costs_of_engine(store, info)
    if s.since is not None:  # followed traffic has no panoramas
        for draft in sorted(of.drafts.keys() & costs.passes.keys()):
            most = costs.passes[draft][1]
            if store.missing_panoramas(info.id, draft, most):
                models = partial(account.load, s, of, talk, drafts=[draft])
                read_by_pair(store, info.id, draft, most, models, progress=talk.progress)
    if s.serve and spec is None:
        spec = pair_of(s, store, info.id)
    if spec is not None:
        info = recording_named(store, info.id, pair=spec)
    limit: dict[str, Any] = {"limit": s.requests.limit, "unit": s.load.unit, "tell": talk.tell}
    arrivals, objective = s.load.arrivals or "recorded", objective_of(s.load)
    simulated = engine_bench(store, info, [], arrivals, objective, costs=costs, **limit)
    note_missing_panoramas(info, len(simulated.ordinals), talk)
    how: dict[str, Any] = {**_of_search(s), "progress": talk.progress}
    if s.serve and spec is not None:
        quiet_transformers(talk)
        how["start"] = starting(info.engine, spec, s.threads)
    bench = LoadBench.of(simulated, store, **how)
    place = place_of(store, info, deployment_for(s, info.engine))
    yield Ready(bench, place, _prove_options(s, talk, account))


@contextmanager
def on_server(store: TraceStore, s: Tune, talk: Talk, account: Account) -> Iterator[Ready]:
    """A vLLM server that runs: what it served is taken, or requests are sent to it. What was in
    force before is put back, also after Ctrl-C."""
    quiet_transformers(talk)
    recording = s.recording and recording_meant(s, store, s.recording, VLLM.name).id
    pair = pair_of(s, store, recording) if recording or names_pair(s) else None
    with connect(store, s.url or "", s.folder or "", pair) as server:
        talk.tell(
            f"{server.url}: vLLM {server.version}, {server.spec.target}, draft "
            f"{server.draft}, at most {server.wanted.most} tokens (loaded at 0 tokens, too)"
        )
        sent = s.recording is None and s.since is None
        if sent:
            info = _send(store, server, s, talk)
        else:
            tuned = ServerTuned(server.boot, server.device_name)
            info = _recorded(store, server.spec, s, talk, account, VLLM.name, tuned)
        with dask_workers(s.workers):
            models = partial(account.load, s, server.spec, talk, drafts=[server.draft])
            record_draft(store, server, info, models, progress=talk.progress)
        if sent:
            store.finish_recording(info.id)
        clients = [n for n in CLIENTS if n <= server.wanted.max_num_seqs]
        loads = f"clients:{','.join(map(str, clients))}" if sent else "recorded"
        bench = server_bench(
            store,
            server,
            info,
            s.load.arrivals or loads,
            objective_of(s.load),
            fresh=s.fresh,
            **_of_search(s),
            progress=talk.progress,
            limit=None if sent else s.requests.limit,
            unit=s.load.unit,
            tell=talk.tell,
        )
        place = place_of(store, info, deployment_for(s, VLLM.name), server.policy)
        alone = vllm_line({}, server.spec.target)
        folder = shlex.quote(os.path.abspath(server.folder))
        restart = f"SPECTUNE_FOLDER={folder} {alone} --scheduler-cls {SCHEDULER}"
        yield Ready(bench, place, _prove_options(s, talk, account), restart)


def _of_search(s: Tune) -> dict[str, int]:
    return {"seed": s.search.seed, "trials": s.search.trials}


def _prove_options(s: Tune, talk: Talk, account: Account) -> ProveOptions:
    return ProveOptions(budget_s=s.race.budget, **account.options(s, talk))


def _recorded(
    store: TraceStore,
    spec: PairSpec,
    s: Tune,
    talk: Talk,
    account: Account,
    engine: str | None = None,
    server: ServerTuned | None = None,
) -> Recording:
    """The recording of a pair that is named, or a new one of what was decoded ``since``. Raises
    TraceError for one of another device than the ``server`` that is tuned has."""
    if s.since is None:
        info = recording_named(store, s.recording or "latest", pair=spec, engine=engine)
    else:
        how: dict[str, Any] = {"key": account.key, "engine": engine, "server": server}
        info = sample_since(store, spec.id, s.since, s.requests.limit, tell=talk.tell, **how)
    if server is not None and not suits(info, server):
        raise TraceError(
            f"recording {info.id} was served on {info.device_name}, and this server runs on "
            f"{server.device_name}: what steps cost there tells nothing of it"
        )
    if info.state != "complete" and info.workload_id is not None:
        talk.tell(
            f"recording {info.id} was never finished: tuning on the {info.n_requests} requests it "
            "holds (the `record` that began it makes the others)"
        )
    return info


def _send(store: TraceStore, server: RunningServer, s: Tune, talk: Talk) -> Recording:
    """Sends the workload, by as many clients as the loads have at most, under what is in force."""
    options = DecodeOptions.of(s.sampling)
    check_options(VLLM, options)
    workload = read_workload(s, server.spec, talk)
    check_workload_size(workload, publish=s.publish)
    codec = load_codec(server.spec)
    drafts = [server.draft] if server.draft in server.spec.drafts else []
    workload = fit_to(codec, workload, options, s, talk, drafts)
    prompts = prompts_of(codec, workload, options)
    clients = min(max(CLIENTS), server.wanted.max_num_seqs)
    run = EngineRun(prompts, server.policy, Load(clients), options, workload)
    return record_on(store, server.spec, server, run, fresh=s.fresh, progress=talk.progress)


def _pair_of_bench(store: TraceStore, bench: Tunable) -> PairSpec:
    if isinstance(bench, PairBench):
        return bench.pair.spec
    assert isinstance(bench, LoadBench)
    pair = store.get_pair(bench.info.pair_id)
    return PairSpec.from_json(pair.document, where=f"pair {pair.id}")


def _hints(tuned: Tuned, page: str | None, place: Place, s: Tune) -> list[tuple[str, str]]:
    """What to type after a tuning, with the options that name the same place, and what it is
    for."""
    winner, native = tuned.winner.id, place.engine == "native"
    there, without = [], {"fresh", "deployment", "device"}
    if native:
        without = {"fresh"}
    else:
        there = ["--deployment", place.deployment, "--device", place.device]
    show = partial(next_command, s, of=PoliciesShow, without=without)
    hints = [(show(["policies", "show", winner]), "the policy, key by key")]
    if tuned.published:
        shown = show(["policies", "show", "active", *there])
        hints = [(shown, "the published policy, and its evidence")]
        if native:
            run = next_command(s, ["run", "--policy", "active"], RunCommand, {"fresh", "policy"})
            hints.append((run, "decodes with what is published"))
    elif tuned.deploys and not tuned.blocked:
        words = ["policies", "activate", winner, *there]
        activate = next_command(s, words, PoliciesActivate, without)
        hints.append((activate, "publishes the winner"))
    if page is not None:
        shown = "predicted against measured, the race, latency, what was tried: open it"
        hints.append((page, shown))
    return hints

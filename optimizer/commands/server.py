"""`tune --url`: a vLLM server that somebody else runs."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from functools import partial
from typing import Final

from spectune.engines.abilities import VLLM
from spectune.engines.export import vllm_line
from spectune.engines.protocol import Load
from spectune.engines.vllm.command import SCHEDULER
from spectune.engines.vllm.execute import RunningServer
from spectune.optimizer.commands.decoding import fit_to, load, quiet_transformers, read_workload
from spectune.optimizer.commands.load import search_result, tuned_result
from spectune.optimizer.commands.report import page_of
from spectune.optimizer.commands.results import Result
from spectune.optimizer.commands.session import (
    OF_TEXTS,
    Talk,
    check_writable,
    deployment_for,
    names_pair,
    open_store,
    pair_of,
    recording_on,
    unseen,
)
from spectune.optimizer.deployment import check_server
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.inputs import recording_of
from spectune.optimizer.on_engine import check_options, prompts_of, record_on
from spectune.optimizer.processes import dask_workers
from spectune.optimizer.simulate.load import loads_of, objective_of
from spectune.optimizer.tuning.confirm import check_workload_size
from spectune.optimizer.tuning.load import place_of
from spectune.optimizer.tuning.pipeline import ProveOptions
from spectune.optimizer.tuning.server import connect, record_draft, tune_server
from spectune.optimizer.tuning.sources import gather
from spectune.runtime.text_codec import load_codec
from spectune.settings import Tune
from spectune.traces.errors import ConfigError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording

CLIENTS: Final = (1, 4, 8)
"""Clients that a workload is sent by unless --arrivals says how it comes."""


def tune_url(s: Tune, talk: Talk) -> Result:
    """Records traffic or finds it recorded, notes what steps cost, searches in simulation, races,
    confirms and publishes. What was in force before is put back, also after Ctrl-C."""
    _check(s, talk)
    objective = objective_of(s.load)
    quiet_transformers(talk)
    with open_store(s, create=True) as store:
        recording = None
        if s.recording is not None:
            recording = recording_on(store, s.recording, VLLM.name).id
        pair = pair_of(s, store, recording) if recording or names_pair(s) else None
        with connect(store, s.url or "", s.folder or "", pair) as server:
            talk.tell(
                f"{server.url}: vLLM {server.version}, {server.spec.target}, draft "
                f"{server.draft}, at most {server.wanted.most} tokens (loaded at 0 tokens, too)"
            )
            if s.since is not None:
                span, key = store.clock() - s.since, f"tune since {s.since.isoformat()}"
                where = (store, server.spec.id, span)
                limit = s.requests.limit
                recording = gather(*where, limit, key=key, engine=VLLM.name, tell=talk.tell)
            recorded = recording is not None
            if recording is not None:
                info = recording_of(store, recording, server.spec)
            else:
                info = _record(store, server, s, talk)
            with dask_workers(s.workers):
                loaded = partial(load, s, server.spec, talk, drafts=[server.draft])
                record_draft(store, server, info, loaded, progress=talk.progress)
            if not recorded:
                store.finish_recording(info.id)
            options = ProveOptions(budget_s=s.race.budget, publish=s.publish, tell=talk.tell)
            place = place_of(store, info, deployment_for(s, VLLM.name))
            search, tuned, figures = tune_server(
                store,
                server,
                info,
                s.load.arrivals or ("recorded" if recorded else _clients(server)),
                objective,
                place,
                options,
                limit=s.requests.limit if recorded else None,
                unit=s.load.unit,
                seed=s.search.seed,
                fresh=s.fresh,
                progress=talk.progress,
            )
        unseen(info, len(search.bench.trace.order), talk)
        page, failed = page_of(store, tuned.study, s.db, s.report, talk.tell)
    folder = shlex.quote(os.path.abspath(server.folder))
    alone = vllm_line({}, server.spec.target)
    restart = f"SPECTUNE_FOLDER={folder} {alone} --scheduler-cls {SCHEDULER}"
    figures = {**figures, **tuned.to_json(), "kind": "executed"}
    predicted = search_result(search, figures, talk, restart)
    result = tuned_result(predicted, search, tuned, place, s, page)
    data = {**result.data, "url": server.url, "report": page}
    return replace(result, data=data, failed=failed)


def _check(s: Tune, talk: Talk) -> None:
    check_server(s.url, s.folder, s.engine)
    if s.recording and s.since:
        raise ConfigError("give either --recording or --set since=AGE, not both")
    talk.no_effect(s, "with --url", "serve", "trees.", "quick", "search.g", "search.t", "search.b")
    if s.recording or s.since:
        talk.no_effect(s, "on a recording, whose texts are there", *OF_TEXTS)
    elif not (s.workload or s.prompts):
        raise ConfigError(
            "--url sends requests to that server: say which by --workload FILE, or take what it "
            "served by --recording latest or --set since=24h"
        )
    if s.load.arrivals and not s.load.arrivals.startswith("recorded"):
        # What is wrong is told before anything is sent.
        loads_of(s.load.arrivals, (), 1, unit=s.load.unit)
    if s.report != "none":
        check_writable(s, report=s.report)


def _clients(server: RunningServer) -> str:
    return "clients:" + ",".join(str(n) for n in CLIENTS if n <= server.wanted.max_num_seqs)


def _record(store: TraceStore, server: RunningServer, s: Tune, talk: Talk) -> Recording:
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
    request = (workload, prompts, server.policy, Load(clients), options)
    return record_on(store, server.spec, server, *request, fresh=s.fresh, progress=talk.progress)

"""`record`: decode a workload, and compute each draft's proposals at every position of its
texts."""

from __future__ import annotations

from collections.abc import Collection

from spectune.optimizer.commands.common import (
    Talk,
    open_store,
    pair_of,
    policy_named,
)
from spectune.optimizer.commands.decoding import (
    NATIVE,
    ServedWorkload,
    fit_to,
    load,
    plan_of,
    read_workload,
)
from spectune.optimizer.commands.results import Result
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.in_force import last_good
from spectune.optimizer.recording.on_engine import EngineRun, record_on
from spectune.optimizer.recording.processes import dask_workers
from spectune.optimizer.recording.record import PanoramaSpec, record_panoramas
from spectune.optimizer.recording.record import record as record_texts
from spectune.optimizer.tuning.sources import recording_named
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import PairSpec
from spectune.settings import Record
from spectune.traces.acceptance import hardly_accepted
from spectune.traces.errors import ConfigError
from spectune.traces.recording import TREE_WIDTH
from spectune.traces.sanity import checked
from spectune.traces.store import TraceStore
from spectune.traces.store.query import first_positions
from spectune.traces.tables import Recording


def record(s: Record, talk: Talk) -> Result:
    on_engine = s.engine != NATIVE
    if s.resume and on_engine:
        raise ConfigError(
            "--resume goes on with what is recorded, without an engine; leave --engine out"
        )
    here = {"engine" if on_engine else "native", "panoramas"}
    talk.no_effect(s, here if s.resume else here | {"texts", "executed"})
    with open_store(s, create=True) as store:
        spec = pair_of(s, store, s.resume)
        if s.policy != "active":
            policy_named(store, s.policy, "", "", "", talk)
        if not (s.resume or on_engine):
            info, pair = _decode(store, spec, s, talk)
        else:
            name = _serve(store, spec, s, talk) if on_engine else _resumed(store, spec, s, talk)
            pair = load(s, spec, talk)
            panoramas = PanoramaSpec(pair.chain_drafts, s.search.gamma_max)
            if not on_engine:
                panoramas = _spec(pair.draft_names, s)
            with dask_workers(s.workers), pair.torch_threads():
                record_panoramas(store, pair, name, panoramas, progress=talk.progress)
            if on_engine:
                store.finish_recording(name)
            info = store.get_recording(name)
        texts = store.load(info.id, (), skip_corrupted=True).trajectories
        first = first_positions(store, info.id)
    checks = checked(texts)
    for line in (*checks.lines(), *hardly_accepted(first, pair.heads)):
        talk.tell(line)
    rows = [
        {
            "request": t.request_id,
            "category": t.category,
            "prompt_tokens": len(t.prompt_ids),
            "output_tokens": len(t.output_ids),
            "finish": t.finish,
            "text": pair.text(t.output_ids.tolist()),
        }
        for t in texts
    ]
    data = {"recording": info.id, "pair": info.pair_id, **info.to_json()}
    data["first_position"] = {draft: one.to_json() for draft, one in first.items()}
    return Result(
        f"recording {info.id}: {info.n_requests} requests, {info.n_output_tokens} tokens, "
        f"panoramas of {info.shown()}",
        {**data, "heads": pair.hidden_states, "workload": checks.to_json()},
        rows,
    )


def _decode(
    store: TraceStore, spec: PairSpec, s: Record, talk: Talk
) -> tuple[Recording, LoadedPair]:
    """By the native decoder."""
    options = DecodeOptions.of(s.sampling)
    workload = read_workload(s, spec, talk)
    pair = load(s, spec, talk)
    panoramas = _spec(pair.draft_names, s)
    workload = fit_to(pair, workload, options, s, talk)
    profile = store.profile_of(pair.id, **pair.place)
    if s.policy == "active":
        law = (options.verifier, options.sampling)
        plan = last_good(store, pair, profile, *law, s.deployment)
    else:
        plan = plan_of(store, pair, s.policy, options, profile, s.deployment, talk)
    what = (workload, options, panoramas, StaticSource(plan))
    with dask_workers(s.workers), pair.torch_threads():
        info = record_texts(
            store, pair, *what, clients=s.concurrency, fresh=s.fresh, progress=talk.progress
        )
    return info, pair


def _resumed(store: TraceStore, spec: PairSpec, s: Record, talk: Talk) -> str:
    """The recording that is named."""
    info = recording_named(store, s.resume or "", pair=spec)
    if info.state == "recording" and info.workload_id is not None:
        talk.tell(
            f"recording {info.id} was never finished: the `record` that began it, typed again, "
            "makes the texts that it lacks"
        )
    return info.id


def _serve(store: TraceStore, spec: PairSpec, s: Record, talk: Talk) -> str:
    """By another engine; its texts are read by the drafts afterwards."""
    served = ServedWorkload(store, spec, s, talk, every_draft=True)
    run = EngineRun(served.prompts, served.policy, served.load, served.options, served.workload)
    with served.started() as running:
        return record_on(store, spec, running, run, fresh=s.fresh, progress=talk.progress).id


def _spec(drafts: Collection[str], s: Record) -> PanoramaSpec:
    """What is computed of each draft."""
    if not (s.trees.width or s.typed("trees.depth")):
        return PanoramaSpec(drafts, s.search.gamma_max)
    return PanoramaSpec(drafts, s.search.gamma_max, s.trees.width or TREE_WIDTH, s.trees.depth)

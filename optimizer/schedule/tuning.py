"""The job of a schedule: sample or record, tune, and publish under the slot's key."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from spectune.engines.abilities import VLLM
from spectune.optimizer.inputs import read_files
from spectune.optimizer.overlong import made_to_fit
from spectune.optimizer.schedule.store import Job
from spectune.optimizer.schedule.worker import Run
from spectune.optimizer.simulate.load import objective_of
from spectune.optimizer.tuning.engine import engine_bench
from spectune.optimizer.tuning.load import (
    latest_traffic,
    place_of,
    prove_load,
    search_load,
    with_servers,
)
from spectune.optimizer.tuning.native import TuneOptions, tune, tune_recording
from spectune.optimizer.tuning.pipeline import ProveOptions
from spectune.optimizer.tuning.server import connect, record_draft, tune_server
from spectune.optimizer.tuning.sources import gather
from spectune.optimizer.tuning.tuned import Tuned
from spectune.options import from_document
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import PairSpec
from spectune.runtime.progress import Progress, silent
from spectune.settings import Scheduled
from spectune.traces.store import TraceStore

FOLLOWED_S: Final = 3600.0
"""Seconds of followed traffic that a server is tuned on, unless its schedule says otherwise."""


def tuning_job(
    store: TraceStore,
    *,
    load: Callable[..., LoadedPair] = load_pair,
    progress: Progress = silent,
    page: Callable[[str], str | None] = lambda study: None,
    tell: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Returns a job function for workers: it tunes what a schedule's settings say and publishes
    under the slot's idempotency key.

    Texts and costs that an earlier attempt or slot recorded are used again as `tune` uses them, and
    an attempt after the publication only reports it. Loaded pairs stay in memory from job to job.
    The result holds the winner, the version published (None if the incumbent stays), why, and
    ``report``: what ``page`` returns of the study, the path of its page. ``tell`` is called with
    what a user should know of the texts; ``clock`` times what the native decoder executes.
    """
    pairs: dict[tuple[object, ...], LoadedPair] = {}

    def run(job: Job) -> Mapping[str, Any]:
        publication = store.published_under(job.idempotency_key)
        if publication is not None and "winner" in publication.evidence:
            return _result(publication.evidence, publication.version, page)
        settings = from_document(Scheduled, job.settings, f"schedule {job.name}")
        spec = PairSpec.from_json(settings.pair, where=f"schedule {job.name}")

        def step(phase: str, done: int, total: int) -> None:
            job.check()
            progress(f"{job.name}: {phase}", done, total)

        about: Any = {"tell": lambda line: tell(f"{job.name}: {line}"), "progress": step}
        place = {name: getattr(settings, name) for name in ("device", "dtype", "threads")}
        key = spec.id, *place.values()

        def loaded() -> LoadedPair:
            if key not in pairs:
                pairs[key] = load(spec, **place)
            return pairs[key]

        if settings.url is not None:
            tuned = _tune_url(store, spec, settings, job, loaded, **about)
        elif settings.engine is not None:
            tuned = _tune_engine(store, spec, settings, job, **about)
        else:
            with loaded().torch_threads():
                tuned = _tune_pair(store, loaded(), settings, job, clock=clock, **about)
        version = tuned.published.version if tuned.published else None
        return _result(tuned.to_json(), version, page)

    return run


def _tune_pair(
    store: TraceStore,
    pair: LoadedPair,
    settings: Scheduled,
    job: Job,
    tell: Callable[[str], None],
    progress: Progress,
    clock: Callable[[], float],
) -> Tuned:
    """Tunes on texts that are recorded now, or on a sample of what was recorded lately."""
    options = TuneOptions.of(
        settings,
        actor="schedule",
        idempotency_key=job.idempotency_key,
        guard=job.check,
        tell=tell,
    )
    if settings.recorded is not None:
        window = timedelta(seconds=settings.recorded)
        how: Any = {"key": job.idempotency_key, "tell": tell}
        recording = gather(store, pair.id, window, settings.requests.limit, **how)
        return tune_recording(store, pair, recording, options, progress=progress, clock=clock)
    requests = settings.requests
    workload = read_files(settings.workload, requests)
    workload, lines = made_to_fit(
        pair, workload, options.options, requests.overlong, requests.bad_rows
    )
    for line in lines:
        tell(line)
    return tune(store, pair, workload, options, progress=progress, clock=clock)


def _tune_engine(
    store: TraceStore,
    spec: PairSpec,
    settings: Scheduled,
    job: Job,
    tell: Callable[[str], None],
    progress: Progress,
) -> Tuned:
    """Tunes what an engine recorded last for a load, on servers of its own."""
    assert settings.engine is not None
    info = latest_traffic(store, settings.engine, spec.id)
    objective = objective_of(settings.load)
    how: dict[str, Any] = {"limit": settings.requests.limit, "unit": settings.load.unit}
    arrivals = settings.load.arrivals or "recorded"
    bench = engine_bench(store, info, [], arrivals, objective, tell=tell, **how)
    search = search_load(store, bench, progress=progress)
    options = _prove_options(settings, job, tell)
    place = place_of(store, info, settings.deployment)
    servers = with_servers(search, spec, settings.threads)
    return prove_load(store, servers, place, options, progress=progress)[0]


def _tune_url(
    store: TraceStore,
    spec: PairSpec,
    settings: Scheduled,
    job: Job,
    load: Callable[[], LoadedPair],
    tell: Callable[[str], None],
    progress: Progress,
) -> Tuned:
    """Tunes a vLLM server that runs on what was followed of it lately."""
    window, key = timedelta(seconds=settings.recorded or FOLLOWED_S), job.idempotency_key
    limit = settings.requests.limit
    name = gather(store, spec.id, window, limit, key=key, engine=VLLM.name, tell=tell)
    info = store.get_recording(name)
    with connect(store, settings.url or "", settings.folder or "", spec) as server:
        record_draft(store, server, info, load, progress=progress)
        return tune_server(
            store,
            server,
            info,
            settings.load.arrivals or "recorded",
            objective_of(settings.load),
            place_of(store, info, settings.deployment),
            _prove_options(settings, job, tell),
            limit=limit,
            unit=settings.load.unit,
            progress=progress,
        )[1]


def _prove_options(settings: Scheduled, job: Job, tell: Callable[[str], None]) -> ProveOptions:
    return ProveOptions(
        budget_s=settings.race.budget,
        actor="schedule",
        idempotency_key=job.idempotency_key,
        guard=job.check,
        tell=tell,
    )


def _result(
    evidence: Mapping[str, Any], version: int | None, page: Callable[[str], str | None]
) -> dict[str, Any]:
    return {
        "winner": evidence["winner"]["policy"],
        "label": evidence["winner"]["label"],
        "published": version,
        **{name: evidence[name] for name in ("reason", "recording", "study")},
        "report": page(evidence["study"]),
    }

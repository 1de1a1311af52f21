"""`schedule run`: a worker. Each of its jobs is a `tune` with the settings that a schedule stores,
published under the slot's key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

from spectune.optimizer.commands.common import Talk, open_store
from spectune.optimizer.commands.decoding import load as load_models
from spectune.optimizer.commands.decoding import quiet_transformers
from spectune.optimizer.commands.report import page_of
from spectune.optimizer.commands.results import Result
from spectune.optimizer.commands.tune import Account, tune_in
from spectune.optimizer.rollout.conductor import conduct
from spectune.optimizer.schedule import make_due, run_worker
from spectune.optimizer.schedule.store import Job
from spectune.optimizer.schedule.worker import Run
from spectune.optimizer.tuning.tuned import tuned_of
from spectune.options import from_document
from spectune.runtime.loading import LoadedPair
from spectune.runtime.pair import PairSpec
from spectune.runtime.progress import Progress, silent
from spectune.settings import ScheduleRun, Tune
from spectune.traces.store import TraceStore

JOIN_S: Final = 10.0
"""Seconds that a look at rollouts may take when the worker ends."""


def run(s: ScheduleRun, talk: Talk) -> Result:
    with open_store(s, create=True) as store:
        quiet_transformers(talk)
        job = tuning_job(store, db=s.db, progress=talk.progress, tell=talk.tell)
        once = s.once or s.name is not None
        if s.name is not None:
            make_due(store.database, s.name)
        how: dict[str, Any] = {"once": once, "name": s.name, "poll_s": s.poll, "nice": s.nice}
        with nullcontext() if once else _conducting(store, talk.tell):
            outcomes = run_worker(store.database, job, **how, tell=talk.tell)
    text = ", ".join(f"{number} {name}" for name, number in outcomes.items())
    if s.name is not None and not any(outcomes.values()):
        text = f"another worker took {s.name} first; `schedule list {s.name}` says how it ends"
    # Somebody asks how it went: cron, systemd.
    return Result(text, outcomes, exit_code=1 if once and outcomes["failed"] else 0)


@contextmanager
def _conducting(store: TraceStore, tell: Callable[[str], None]) -> Iterator[None]:
    """Conducts the rollouts that are open from a thread, beside jobs, which may take long."""
    stop = threading.Event()
    thread = threading.Thread(target=conduct, args=(store, stop, tell), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(JOIN_S)


def tuning_job(
    store: TraceStore,
    *,
    db: str | None = None,
    load: Callable[..., LoadedPair] = load_models,
    progress: Progress = silent,
    tell: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Returns a job function for workers, which does the `tune` that a schedule's settings say,
    under the slot's idempotency key and the job's lease.

    Texts and costs that an earlier attempt or slot recorded are used again as `tune` uses them, and
    an attempt after the publication only reports it. Loaded pairs stay in memory from job to job.
    The result holds the winner, the version published (None if the incumbent stays), why, and
    ``report``: the path of the page, which is written beside the database ``db`` (None: no page).
    ``tell`` is called with what a user should know; ``clock`` times what the native decoder
    executes.
    """
    pairs: dict[tuple[object, ...], LoadedPair] = {}

    def loaded(s: Tune, spec: PairSpec, talk: Talk, **how: Any) -> LoadedPair:
        key = (spec.id, s.device, s.dtype, s.threads, *map(str, how.values()))
        if key not in pairs:
            pairs[key] = load(s, spec, talk, **how)
        return pairs[key]

    def run(job: Job) -> Mapping[str, Any]:
        settings = from_document(Tune, job.settings, f"schedule {job.name}")
        where = {"report": "none"} if db is None else {"db": db}
        settings = settings.model_copy(update=where)
        publication = store.published_under(job.idempotency_key)
        if publication is not None and (tuned := tuned_of(publication)) is not None:
            page, _ = page_of(store, tuned.study, settings.db, settings.report, tell)
            return _result({**tuned.to_json(), "published": publication.told()}, page)

        def step(phase: str, done: int, total: int) -> None:
            job.check()
            progress(f"{job.name}: {phase}", done, total)

        talk = Talk(tell=lambda line: tell(f"{job.name}: {line}"), progress=step)
        key = job.idempotency_key
        account = Account("schedule", key, job.check, loaded, clock)
        data = tune_in(store, settings, talk, account).data
        return _result(data, data["report"])

    return run


def _result(data: Mapping[str, Any], page: str | None) -> dict[str, Any]:
    return {
        "winner": data["winner"]["policy"],
        "label": data["winner"]["label"],
        "published": data["published"] and data["published"]["version"],
        "rollout": (data.get("rollout") or {}).get("id"),
        **{name: data[name] for name in ("reason", "recording", "study")},
        "report": page,
    }

"""The job of a schedule: sample or record, retrace, refit, tune, validate within the budget,
publish."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.overlong import made_to_fit
from spectune.optimizer.payload import SEARCHED, check_payload, tuning_workload
from spectune.optimizer.schedule import Execute, Job, JobContext, parse_duration
from spectune.optimizer.traffic import SAMPLE, gather
from spectune.optimizer.tune import TuneOptions, tune, tune_recording
from spectune.optimizer.verdict import Tuned
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import PairSpec
from spectune.runtime.progress import Progress, silent
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore


def tuning_job(
    store: TraceStore,
    *,
    load: Callable[..., LoadedPair] = load_pair,
    progress: Progress = silent,
    page: Callable[[str], str | None] = lambda study: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Execute:
    """A job function for the scheduler's workers: tunes what the payload names and publishes under
    the slot's idempotency key.

    Attempts of one slot share its recording and profile, and one after the publication only reports
    it. Loaded pairs are kept from job to job. The result holds the winner, the version published
    (None if the incumbent stays), why, and ``report``: what ``page`` returns of the study, the path
    of its page. ``tell`` is called with what a user should know of recorded traffic.
    """
    loaded: dict[tuple[str, str, str, int | None], LoadedPair] = {}

    def execute(job: Job, context: JobContext) -> Mapping[str, Any]:
        made = store.published_under(context.idempotency_key)
        if made is not None and "winner" in made.evidence:
            return {**_told(made.evidence, made.version), "report": page(made.evidence["study"])}
        payload = dict(job.payload)
        check_payload(payload)
        spec = PairSpec.from_json(payload["pair"], where=f"schedule {job.schedule}")
        device, dtype = str(payload.get("device", "auto")), str(payload.get("dtype", "auto"))
        threads = payload.get("threads")
        key = (spec.id, device, dtype, threads)
        if key not in loaded:
            loaded[key] = load(spec, device=device, dtype=dtype, threads=threads)
        pair = loaded[key]

        def step(phase: str, done: int, total: int) -> None:
            context.check()
            progress(f"{job.schedule}: {phase}", done, total)

        def say(line: str) -> None:
            tell(f"{job.schedule}: {line}")

        with pair.torch_threads():
            tuned = _tune(store, pair, payload, context, step, say)
        told = _told(tuned.to_json(), tuned.published.version if tuned.published else None)
        return {**told, "report": page(tuned.study)}

    return execute


def _told(evidence: Mapping[str, Any], published: int | None) -> Mapping[str, Any]:
    """A job's result, of a tuning's evidence."""
    return {
        "winner": evidence["winner"]["policy"],
        "label": evidence["winner"]["label"],
        "published": published,
        **{name: evidence[name] for name in ("reason", "recording", "study")},
    }


def tuning_options(payload: Mapping[str, Any]) -> TuneOptions:
    """How the tuning of a schedule's payload is done; what it leaves out is as in TuneOptions."""

    def taken(names: Iterable[str]) -> dict[str, Any]:
        return {name: payload[name] for name in names if name in payload}

    sampling = Sampling(**taken(f.name for f in fields(Sampling)))
    own = taken(f.name for f in fields(DecodeOptions)[1:])
    own["stop_strings"] = tuple(own.get("stop_strings", ()))
    options = DecodeOptions(sampling, **own)
    return TuneOptions(options=options, **taken((*SEARCHED, "fresh", "deployment")))


def _tune(
    store: TraceStore,
    pair: LoadedPair,
    payload: Mapping[str, Any],
    context: JobContext,
    progress: Progress,
    tell: Callable[[str], None],
) -> Tuned:
    wanted = tuning_options(payload)
    wanted = replace(
        wanted,
        actor="schedule",
        idempotency_key=context.idempotency_key,
        guard=context.check,
    )

    def in_time() -> TuneOptions:
        """Race and confirmation get a third of the time that is left."""
        left = context.remaining_s()
        return replace(wanted, budget_s=max(1.0, left / 3)) if left < math.inf else wanted

    if payload.get("recorded"):
        window = timedelta(seconds=parse_duration(str(payload["recorded"])))
        sample = int(payload.get("sample", SAMPLE))
        recording = gather(store, pair.id, window, sample, key=context.idempotency_key, tell=tell)
        return tune_recording(store, pair, recording, in_time(), progress=progress)
    overlong = payload.get("overlong", "error")
    workload, _ = made_to_fit(pair, tuning_workload(payload), wanted.options, overlong)
    return tune(store, pair, workload, in_time(), progress=progress)

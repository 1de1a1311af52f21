"""The job of a schedule: sample or record, retrace, refit, tune, validate within the budget,
publish."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import numpy as np

from spectune.optimizer.deployment import tuned_for
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.overlong import made_to_fit
from spectune.optimizer.payload import SEARCHED, check_payload, tuning_workload
from spectune.optimizer.record import recording_options
from spectune.optimizer.schedule import Execute, Job, JobContext, parse_duration
from spectune.optimizer.tune import TuneOptions, tune, tune_recording
from spectune.optimizer.verdict import Tuned
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import PairSpec
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.recordings import Appended, Recorded

SAMPLE = 200
"""Requests taken of recorded traffic unless the payload says otherwise."""


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
        recording = gather(store, pair, window, sample, key=context.idempotency_key, tell=tell)
        return tune_recording(store, pair, recording, in_time(), progress=progress)
    overlong = payload.get("overlong", "error")
    workload, _ = made_to_fit(pair, tuning_workload(payload), wanted.options, overlong)
    return tune(store, pair, workload, in_time(), progress=progress)


def gather(
    store: TraceStore,
    pair: LoadedPair,
    window: timedelta,
    sample: int,
    *,
    key: str,
    tell: Callable[[str], None] = lambda line: None,
) -> str:
    """A recording of what this pair decoded within ``window``: a random sample of the requests
    stored by any recording of it, all of one temperature, filters and verifier, as a policy is
    tuned for. Where there were several the most common is taken, of equals the latest, and
    ``tell`` is called with a line on that.

    Doing it again with the same ``key`` finds the recording made before, which is stored whole.
    Raises TraceError where nothing was recorded, or only what an engine sampled, which nothing
    decodes again here.
    """
    complete = store.list_recordings(pair.id, state="complete")
    ready = next((r for r in complete if r.options.get("gathered") == key), None)
    if ready is not None:
        return ready.id
    traffic = store.recorded_since(pair.id, store.clock() - window)
    ours = [r for r in traffic if r.verifier != "greedy" or r.sampling.greedy]
    if traffic and not ours:
        raise TraceError(
            f"none of the {len(traffic)} requests recorded with pair {pair.id} in the last "
            f"{window} was decoded by a verifier of ours, as an engine's are not above "
            "temperature 0; `tune --arrivals recorded` tunes for an engine's traffic"
        )
    if not ours:
        raise TraceError(
            f"nothing was recorded with pair {pair.id} in the last {window}; run `record`, or `run "
            "--record`"
        )
    numbers = Counter(_decoded_by(r) for r in reversed(ours))
    how, number = numbers.most_common(1)[0]
    found = [r for r in ours if _decoded_by(r) == how]
    latest = found[-1]
    if number < len(ours):
        said = tuned_for(latest.sampling, latest.verifier).items()
        shown = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in said)
        tell(
            f"recorded traffic has {len(numbers)} samplings; this tunes for the most common, "
            f"{shown}: {number} of {len(ours)} requests"
        )
    rng = np.random.default_rng(0)
    picked = sorted(rng.permutation(len(found))[:sample].tolist())
    items: dict[tuple[str, bytes], Appended] = {}
    for ordinal, index in enumerate(picked):
        source, at = found[index][:2]
        for request in store.iterate(source, drafts=(), ordinals=[at], steps=True):
            content = (request.trajectory.request_id, request.trajectory.output_ids.tobytes())
            items.setdefault(content, (ordinal, request.trajectory, request.steps))
    options = {**recording_options(pair, DecodeOptions()), "gathered": key}
    most = max(text.max_new_tokens for _, text, _ in items.values())
    made = store.create_recording(
        Asked(pair.id, None, latest.sampling, most, latest.verifier, options, source="gathered")
    )
    store.append_trajectories(made.id, list(items.values()))
    store.finish_recording(made.id)
    return made.id


def _decoded_by(request: Recorded) -> tuple[object, ...]:
    """What a policy is tuned for: all but the seed, and at temperature 0 nothing else matters."""
    if request.sampling.greedy:
        return (0.0,)
    return tuple(tuned_for(request.sampling, request.verifier).values())

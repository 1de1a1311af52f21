"""Executing a workload on another engine than the native decoder: what it is asked, what of it is
recorded, and what it came to."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from spectune.engines.abilities import Engine
from spectune.engines.engine import Answered, Load, Prompt, Running
from spectune.optimizer.execute import DecodeOptions, counts_of
from spectune.optimizer.recording.record import put_policies
from spectune.runtime.decoder import Decoded
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import Policy
from spectune.runtime.progress import Progress, silent
from spectune.runtime.text_codec import TextCodec
from spectune.traces.conversations import conversations_of
from spectune.traces.errors import EngineError
from spectune.traces.schema import Outcome, RequestOutcome, Verifier, Workload, latency_json
from spectune.traces.store import Asked, TraceStore
from spectune.traces.tables import DESIGNED, Recording

WARM_TOKENS = 8


def prompts_of(words: TextCodec, workload: Workload, options: DecodeOptions) -> tuple[Prompt, ...]:
    """A workload's requests as token ids."""
    return tuple(
        Prompt(
            r.id, r.category, tuple(words.encode_request(r, chat=options.chat)), r.max_new_tokens
        )
        for r in workload.requests
    )


def check_options(engine: Engine, options: DecodeOptions) -> None:
    """Raises EngineError for what is asked of texts and an engine is not told."""
    if options.stop_strings or options.verifier != "coupled":
        what = "stop strings" if options.stop_strings else f"the {options.verifier} verifier"
        raise EngineError(f"{engine.title} is not told of {what} by this command; leave that out")


def execute(
    running: Running,
    prompts: Sequence[Prompt],
    policy: Policy,
    load: Load,
    options: DecodeOptions,
) -> Generator[Answered, None, None]:
    """Serves the prompts, the first of them twice: once before, for a few tokens, so that no figure
    is the first touch."""
    most, sampling = options.max_new_tokens, options.sampling
    few = min(WARM_TOKENS, most)
    list(running.execute(prompts[:1], policy, Load(), sampling=sampling, max_new_tokens=few))
    return running.execute(prompts, policy, load, sampling=sampling, max_new_tokens=most)


class Turns:
    """Policies that take turns while an engine serves, so that what the machine does meanwhile
    falls on all alike. A turn ends when the next policy is in force, in vLLM after a second;
    ``taken``: turns that ended."""

    def __init__(self, running: Running, policies: Sequence[Policy]) -> None:
        self.running, self.policies, self.taken = running, policies, 0
        self._following = cycle(policies)
        self._policy = next(self._following)

    def serve(
        self, prompts: Sequence[Prompt], load: Load, options: DecodeOptions
    ) -> Generator[Answered, None, None]:
        """Serves the prompts as :func:`execute` does, the first of them in the turn that has not
        ended. Raises PolicyError for a policy that the engine refuses."""
        over, swapping = threading.Event(), list[Future[None]]()
        with ThreadPoolExecutor(1) as thread:
            try:
                for answered in execute(self.running, prompts, self._policy, load, options):
                    if not swapping:
                        swapping.append(thread.submit(self._swap, over))
                    yield answered
            finally:
                over.set()
        for swapped in swapping:
            swapped.result()

    def _swap(self, over: threading.Event) -> None:
        while not over.is_set():
            self._policy = next(self._following)
            try:
                self.running.put_in_force(self._policy)
            except EngineError:  # it died: who is served starts it again, or says so
                return
            self.taken += not over.is_set()


def about_recording(running: Running, options: DecodeOptions) -> dict[str, Any]:
    """What else an engine's texts and seconds depend on, as stored with their recording: as the
    native decoder's, and the engine's own."""
    return {
        "stop_strings": list(options.stop_strings),
        "chat": options.chat,
        **running.runs_on,
        "engine": running.engine.name,
        "engine_version": running.version,
        "serving": running.serving,
    }


def verifier_of(options: DecodeOptions) -> Verifier:
    """How engines keep drafted tokens: their drafts propose their likeliest token at every
    temperature."""
    return "coupled" if options.sampling.greedy else "greedy"


@dataclass(frozen=True)
class EngineRun:
    """Prompts that an engine serves by a policy, or several in turns, under a load. ``workload``:
    what the prompts are of, where that is to be stored."""

    prompts: Sequence[Prompt]
    policy: Policy | Turns
    load: Load
    options: DecodeOptions
    workload: Workload | None = None

    @property
    def policies(self) -> Sequence[Policy]:
        return self.policy.policies if isinstance(self.policy, Turns) else [self.policy]

    def serve(self, running: Running, prompts: Sequence[Prompt]) -> Generator[Answered, None, None]:
        """Serves some of the prompts."""
        if isinstance(self.policy, Turns):
            return self.policy.serve(prompts, self.load, self.options)
        return execute(running, prompts, self.policy, self.load, self.options)


def record_on(
    store: TraceStore,
    spec: PairSpec,
    running: Running,
    run: EngineRun,
    *,
    fresh: bool = False,
    timed: bool = False,
    progress: Progress = silent,
) -> Recording:
    """Serves what an unfinished recording of the same run lacks, or all of it, each request
    committed as it ends; returns the recording, which is still to be read by drafts and finished.
    ``timed``: a design whose seconds are sought; all is committed when all is served, as that takes
    5% of the speed of an engine on the same cores."""
    name, options = spec.id, run.options
    store.put_pair(name, spec.name, spec.to_json(), spec.models)
    digest = None if run.workload is None else store.put_workload(run.workload)
    most, about = options.max_new_tokens, about_recording(running, options)
    source = DESIGNED if timed else "record"
    asked = Asked(name, digest, options.sampling, most, verifier_of(options), about, source)
    found = None if fresh else store.find_recording(asked, state="recording")
    info = found or store.create_recording(asked)
    put_policies(store, run.policies)
    have = store.recorded_ordinals(info.id)
    missing = {p.id: n for n, p in enumerate(run.prompts) if n not in have}
    if missing:
        texts = [run.prompts[n] for n in missing.values()]
        with closing(run.serve(running, texts)) as served:
            for done, answered in enumerate(list(served) if timed else served, len(have) + 1):
                ordinal = missing[answered.trajectory.request_id]
                store.append_trajectory(info.id, ordinal, answered.trajectory, answered.steps)
                progress("serve", done, len(run.prompts))
    return info


def outcome_on(policy: str, answered: Iterable[Answered]) -> Outcome:
    """What served requests came to; tokens per second are what the engine served."""
    rows, answers = [], list(answered)
    numbers = conversations_of([done.trajectory for done in answers]).tolist()
    for done, n in zip(answers, numbers, strict=True):
        seconds, text = sum(step.own_s for step in done.steps), done.trajectory
        counts = counts_of(done.steps, seconds)
        rows.append(RequestOutcome(text.request_id, text.category, counts, conversation=n))
    return Outcome(policy, "executed", tuple(sorted(rows, key=lambda row: row.request_id)))


def latency_on(answered: Iterable[Answered | Decoded]) -> dict[str, Any] | None:
    """What a user waited for, waiting to be admitted included
    (:func:`traces.schema.latency_json`)."""
    timed = []
    for a in (one for one in answered if one.steps):
        arrived_s, steps = a.steps[0].arrived_s, a.steps
        waited = steps[0].ended_s - arrived_s, steps[-1].ended_s - arrived_s
        timed.append((*waited, len(a.trajectory.output_ids)))
    return latency_json(timed)

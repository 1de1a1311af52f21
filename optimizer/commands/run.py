"""`run`: execute a policy on a workload; `generate`: stream one text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from rich.console import Console

from spectune.engines.engine import Answered
from spectune.optimizer.changes import Shares, change_in_words, changes_of, label_of, shares_of
from spectune.optimizer.commands.common import (
    Talk,
    check_writable,
    deployment_for,
    open_store,
    pair_of,
    policy_named,
    rounds_of,
    write_rows,
)
from spectune.optimizer.commands.decoding import (
    NATIVE,
    ServedWorkload,
    fit_to,
    load,
    plan_of,
    read_workload,
)
from spectune.optimizer.commands.outcomes import outcome_result
from spectune.optimizer.commands.results import Result
from spectune.optimizer.execute import DecodeOptions, encode, outcome, run_together
from spectune.optimizer.execute import run as execute
from spectune.optimizer.generate import generate as stream
from spectune.optimizer.in_force import watch
from spectune.optimizer.inputs import outcome_json
from spectune.optimizer.recording.on_engine import (
    about_recording,
    latency_on,
    outcome_on,
    verifier_of,
)
from spectune.optimizer.recording.on_engine import execute as execute_on
from spectune.optimizer.recording.record import put_policies, record_served, recording_options
from spectune.runtime.decoder import Decoded, drafts_of
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import PolicySource, StaticSource
from spectune.runtime.pair import PairSpec
from spectune.runtime.rendered import rendered_before
from spectune.runtime.text_codec import TextCodec
from spectune.settings import Generate, RunCommand
from spectune.traces.acceptance import executed_first, hardly_accepted
from spectune.traces.errors import WorkloadError
from spectune.traces.schema import Outcome, Request, Workload
from spectune.traces.store import TraceStore
from spectune.traces.store.traffic import TrafficWriter
from spectune.traces.tables import LatencyProfile

T = TypeVar("T", Decoded, Answered)


def run(s: RunCommand, talk: Talk) -> Result:
    check_writable(s, outputs=s.outputs, per_round=s.per_round)
    talk.no_effect(s, ["native" if s.engine == NATIVE else "engine", "texts", "executed"])
    with open_store(s, create=True) as store:
        spec = pair_of(s, store)
        if s.policy != "active":
            policy_named(store, s.policy, "", "", "", talk)  # refused before a model is loaded
        executed = (_decode if s.engine == NATIVE else _serve)(store, spec, s, talk)
        return _result(store, spec, s, executed, talk)


@dataclass(frozen=True)
class Executed:
    """What was executed of a workload, on what ``device`` and in what ``dtype``. ``about``: what
    else is told of it, of which ``stored`` is kept with the run."""

    codec: TextCodec
    workload: Workload
    requests: Sequence[Decoded | Answered]
    writer: TrafficWriter | None
    outcome: Outcome
    shares: Shares
    device: str
    dtype: str
    changes: Sequence[dict[str, Any]] = ()
    stored: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


def _decode(store: TraceStore, spec: PairSpec, s: RunCommand, talk: Talk) -> Executed:
    """By the native decoder."""
    options = DecodeOptions.of(s.sampling)
    workload = read_workload(s, spec, talk)
    pair = load(s, spec, talk)
    # What the target does not hold is refused before anything else is said.
    workload = fit_to(pair, workload, options, s, talk, ())
    profile = store.get_profile(s.profile) if s.profile else None
    with pair.torch_threads(), _source(store, pair, s, profile, options, talk) as source:
        policy = source.current().policy
        drafts = drafts_of(policy)
        if pair.context(drafts) != pair.context(()):
            workload = fit_to(pair, workload, options, s, talk, drafts, notes=False)
        encoded = encode(pair, workload, options, drafts)
        about = recording_options(pair, options)
        recording = record_served(store, pair.id, spec, options, about, [policy])
        together = s.concurrency > 1
        executing = _tell_changes(
            run_together(pair, source, encoded, s.concurrency)
            if together
            else execute(pair, source, encoded),
            talk,
        )
        decoded, writer = _gather("run", executing, len(encoded.items), s, talk, recording)
    shares, changes = shares_of(decoded), changes_of(decoded)
    dtype = str(pair.target.dtype).removeprefix("torch.")
    total = outcome(label_of(shares, changes), decoded)
    figures = (total, shares, pair.device.type, dtype, changes)
    order = {request.id: n for n, (_, request) in enumerate(encoded.items)}
    decoded.sort(key=lambda one: order[one.trajectory.request_id])
    more: dict[str, Any] = {"heads": pair.hidden_states}
    stored = {}
    if together:
        more["latency"], stored = latency_on(decoded), {"concurrency": s.concurrency}
    return Executed(pair, workload, decoded, writer, *figures, stored=stored, about=more)


def _tell_changes(executing: Iterable[Decoded], talk: Talk) -> Iterator[Decoded]:
    """Says when the policy changes, as it does."""
    plan = None
    for decoded in executing:
        for change in changes_of([decoded], plan):
            talk.tell(change_in_words(change))
        plan = decoded.plans[-1][1]
        yield decoded


def _serve(store: TraceStore, spec: PairSpec, s: RunCommand, talk: Talk) -> Executed:
    """By another engine."""
    served = ServedWorkload(store, spec, s, talk)
    options, policy = served.options, served.policy
    with served.started() as running:
        runs_on = running.runs_on
        engine = {
            "engine": running.engine.name,
            "engine_version": running.version,
            "concurrency": served.load.clients,
        }
        texts = replace(options, verifier=verifier_of(options))
        about = about_recording(running, options)
        recording = record_served(store, spec.id, spec, texts, about, [policy])
        executing = execute_on(running, served.prompts, policy, served.load, options)
        answered, writer = _gather("serve", executing, len(served.prompts), s, talk, recording)
    order = {prompt.id: n for n, prompt in enumerate(served.prompts)}
    answered.sort(key=lambda answer: order[answer.trajectory.request_id])
    total = outcome_on(policy.label(), answered)
    figures = (total, {policy.id: (policy, total.total)}, runs_on["device"], runs_on["dtype"])
    about = {"latency": latency_on(answered), "heads": {}}
    return Executed(
        served.codec, served.workload, answered, writer, *figures, stored=engine, about=about
    )


def _gather(
    phase: str,
    executing: Iterable[T],
    count: int,
    s: RunCommand,
    talk: Talk,
    recording: AbstractContextManager[TrafficWriter],
) -> tuple[list[T], TrafficWriter | None]:
    """All that is executed, its texts stored as a recording with ``record``."""
    requests: list[T] = []
    with recording if s.record else nullcontext() as writer:
        if writer is not None:
            talk.tell(f"recording {writer.recording}")
        for request in executing:
            requests.append(request)
            if writer is not None:
                writer.put(request.trajectory, request.steps)
            talk.progress(phase, len(requests), count)
    return requests, writer


@contextmanager
def _source(
    store: TraceStore,
    pair: LoadedPair,
    s: RunCommand,
    profile: LatencyProfile | None,
    options: DecodeOptions,
    talk: Talk,
) -> Iterator[PolicySource]:
    """A policy source: the policy named for ever, or for ``active`` whatever is published in the
    deployment, now and later."""
    if s.policy != "active":
        costs = profile or store.profile_of(pair.id, **pair.place)
        plan = plan_of(store, pair, s.policy, options, costs, s.deployment, talk)
        yield StaticSource(plan)
        return
    where = pair.id, pair.device_name, s.deployment
    if not store.active_version(*where):
        policy_named(store, "active", *where, talk)
    how: dict[str, Any] = {"verifier": options.verifier, "sampling": options.sampling}
    with watch(store, pair, profile, deployment=s.deployment, **how) as source:
        if source.last_error:
            talk.tell(
                f"publication {source.seen} is refused: {source.last_error}; using "
                f"{source.current().policy.label()}"
            )
        yield source
    if source.unfinished:
        talk.tell(source.unfinished)


def _result(store: TraceStore, spec: PairSpec, s: RunCommand, ran: Executed, talk: Talk) -> Result:
    """Writes ``outputs`` and ``per_round``, and stores the run unless that is not to be."""
    most, _ = max(ran.shares.values(), key=lambda share: share[1].emitted_tokens)
    by_policy = [
        {"policy_id": policy.id, "label": policy.label(), **counts.to_json()}
        for policy, counts in ran.shares.values()
    ]
    stored = {"changes": list(ran.changes), "by_policy": by_policy, **ran.stored}
    data = {**outcome_json(ran.outcome, most), "label": ran.outcome.policy, **stored, **ran.about}
    texts = {}
    for request in ran.requests:
        texts[request.trajectory.request_id] = request.trajectory.output_ids.tolist()
    rows = [{"id": n, "token_ids": ids, "text": ran.codec.text(ids)} for n, ids in texts.items()]
    failed: Exception | None = None  # the figures are printed first
    try:
        if s.outputs:
            write_rows(s.outputs, rows)
        if s.per_round:
            steps = ((request.trajectory.request_id, request.steps) for request in ran.requests)
            write_rows(s.per_round, chain.from_iterable(rounds_of(*one) for one in steps))
        if ran.writer is not None:
            ran.writer.check()
        if s.store:
            store.put_pair(spec.id, spec.name, spec.to_json(), spec.models)
            put_policies(store, [policy for policy, _ in ran.shares.values()])
            store.put_run(
                spec.id,
                most.id,
                ran.outcome,
                device=ran.device,
                dtype=ran.dtype,
                workload_id=store.put_workload(ran.workload),
                purpose="run",
                options={"deployment": deployment_for(s, s.engine), **stored},
            )
    except Exception as error:
        failed = error
    first = executed_first(step for request in ran.requests for step in request.steps)
    for line in hardly_accepted(first, ran.about["heads"]):
        talk.tell(line)
    by_id = {row["id"]: row["text"] for row in rows}
    parts = {p.label(): counts for p, counts in ran.shares.values()} if ran.changes else {}
    result = outcome_result(ran.outcome, data, texts=by_id, parts=parts)
    return replace(result, failed=failed)


def generate(s: Generate, talk: Talk) -> Result:
    if not s.prompt.strip():
        raise WorkloadError("the prompt is empty")
    with open_store(s, create=True) as store:
        spec = pair_of(s, store)
        if s.policy != "active":
            policy_named(store, s.policy, "", "", "", talk)
        options = DecodeOptions.of(s.sampling)
        pair = load(s, spec, talk, notes=False)
        # What does not fit is refused before anything else is said.
        workload = Workload("prompt", (Request("prompt", "prompt", s.prompt),))
        encode(pair, workload, options, ())
        for line in rendered_before(pair, workload.requests, chat=options.chat):
            talk.tell(line)
        profile = store.profile_of(pair.id, **pair.place)
        plan = plan_of(store, pair, s.policy, options, profile, s.deployment, talk)
    console = talk.console or Console(quiet=True)
    encoded = encode(pair, workload, options, drafts_of(plan.policy))
    with pair.torch_threads():
        data = stream(pair, plan, encoded, console, compare=s.compare)
    return Result("" if talk.console else data["text"], data)

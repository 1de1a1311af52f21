"""`run`: execute a policy on a workload; `generate`: stream one text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from rich.console import Console

from spectune.db.errors import DatabaseError
from spectune.engines.protocol import Answered
from spectune.optimizer.changes import (
    Change,
    Share,
    changes_json,
    changes_of,
    label_of,
    shares_of,
)
from spectune.optimizer.commands.decoding import (
    NATIVE,
    Served,
    check_engine,
    fit_to,
    load,
    plan_of,
    read_workload,
)
from spectune.optimizer.commands.outcomes import outcome_result
from spectune.optimizer.commands.results import Result
from spectune.optimizer.commands.session import (
    Talk,
    check_writable,
    deployment_for,
    open_store,
    pair_of,
    policy_named,
    rounds_of,
    write_rows,
)
from spectune.optimizer.execute import DecodeOptions, encode, outcome
from spectune.optimizer.execute import run as execute
from spectune.optimizer.from_settings import decode_options
from spectune.optimizer.generate import generate as stream
from spectune.optimizer.inputs import outcome_json
from spectune.optimizer.on_engine import (
    about_recording,
    latency_on,
    outcome_on,
    verifier_of,
)
from spectune.optimizer.on_engine import execute as execute_on
from spectune.optimizer.record import put_policies, record_served, recording_options
from spectune.optimizer.serving import watch
from spectune.runtime.decoder import Decoded, drafts_of
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import PolicySource, StaticSource
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import Policy
from spectune.runtime.text_codec import TextCodec
from spectune.settings import Generate, Run
from spectune.traces.acceptance import executed_first, hardly_accepted
from spectune.traces.errors import OutputError, WorkloadError
from spectune.traces.schema import Outcome, Request, Workload
from spectune.traces.store import TraceStore
from spectune.traces.store.traffic import TrafficWriter
from spectune.traces.tables import LatencyProfile

T = TypeVar("T", Decoded, Answered)


def run(s: Run, talk: Talk) -> Result:
    check_writable(s, outputs=s.outputs, per_round=s.per_round)
    check_engine(s, s.concurrency)
    with open_store(s, create=True) as store:
        spec = pair_of(s, store)
        if s.policy != "active":
            policy_named(store, s.policy, "", "", "", talk)  # refused before a model is loaded
        executed = (_decode if s.engine == NATIVE else _serve)(store, spec, s, talk)
        return _result(store, spec, s, executed, talk)


@dataclass(frozen=True)
class Executed:
    """What was executed of a workload, and on what. It is stored under the policy that made most of
    its tokens; ``policies``: all others that a round may name. ``engine`` says which another one
    than the native decoder was, ``latency`` what its users waited for. ``heads``: the hidden states
    that the heads of a pair read that was decoded here."""

    codec: TextCodec
    workload: Workload
    requests: Sequence[Decoded | Answered]
    writer: TrafficWriter | None
    outcome: Outcome
    shares: Sequence[Share]
    device: str
    dtype: str
    changes: Sequence[Change] = ()
    policies: Iterable[Policy] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    latency: Mapping[str, Any] | None = None
    heads: Mapping[str, Any] = field(default_factory=dict)


def _decode(store: TraceStore, spec: PairSpec, s: Run, talk: Talk) -> Executed:
    """By the native decoder."""
    options = decode_options(s.sampling)
    workload = read_workload(s, spec, talk)
    pair = load(s, spec, talk)
    # What the target does not hold is refused before anything else is said.
    workload = fit_to(pair, workload, options, s, talk, ())
    profile = store.get_profile(s.profile) if s.profile else None

    def tell_changes(decoded: list[Decoded]) -> None:
        before = decoded[-2].plans[-1][1] if decoded[1:] else None
        for change in changes_of(decoded[-1:], before):
            talk.tell(str(change))

    about = recording_options(pair, options)
    with pair.torch_threads(), _source(store, pair, s, profile, options, talk) as source:
        policy = source.current().policy
        drafts = drafts_of(policy)
        if pair.context(drafts) != pair.context(()):
            workload = fit_to(pair, workload, options, s, talk, drafts)
        encoded = encode(pair, workload, options, drafts)
        recording = record_served(store, pair.id, spec, options, about, [policy])
        decoded, writer = _gather(
            "run", execute(pair, source, encoded), len(encoded.items), s, talk, recording,
            tell_changes,
        )  # fmt: skip
    shares, changes = shares_of(decoded), changes_of(decoded)
    policies = {plan.policy.id: plan.policy for done in decoded for _, plan in done.plans}
    return Executed(
        pair,
        workload,
        decoded,
        writer,
        outcome(label_of(shares, changes), decoded),
        shares,
        device=pair.device.type,
        dtype=str(pair.target.dtype).removeprefix("torch."),
        changes=changes,
        heads=pair.hidden_states,
        policies=policies.values(),
    )


def _serve(store: TraceStore, spec: PairSpec, s: Run, talk: Talk) -> Executed:
    """By another engine."""
    served = Served(store, spec, s, talk)
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
    answered.sort(key=lambda done: order[done.trajectory.request_id])
    result = outcome_on(policy.label(), answered)
    return Executed(
        served.codec,
        served.workload,
        answered,
        writer,
        result,
        [Share(policy, result.total)],
        device=runs_on["device"],
        dtype=runs_on["dtype"],
        engine=engine,
        latency=latency_on(answered),
    )


def _gather(
    phase: str,
    executing: Iterable[T],
    count: int,
    s: Run,
    talk: Talk,
    recording: AbstractContextManager[TrafficWriter],
    watch: Callable[[list[T]], None] = lambda done: None,
) -> tuple[list[T], TrafficWriter | None]:
    """All that is executed, its texts stored as a recording with ``record``."""
    done: list[T] = []
    with recording if s.record else nullcontext() as writer:
        if writer is not None:
            talk.tell(f"recording {writer.recording}")
        for one in executing:
            done.append(one)
            watch(done)
            if writer is not None:
                writer.put(one.trajectory, one.steps)
            talk.progress(phase, len(done), count)
    return done, writer


@contextmanager
def _source(
    store: TraceStore,
    pair: LoadedPair,
    s: Run,
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
    if not store.active_version(pair.id, pair.device.type, s.deployment):
        policy_named(store, "active", pair.id, pair.device.type, s.deployment, talk)
    how: dict[str, Any] = {"verifier": options.verifier, "sampling": options.sampling}
    with watch(store, pair, None, profile, deployment=s.deployment, **how) as source:
        if source.last_error:
            talk.tell(
                f"publication {source.seen} is refused: {source.last_error}; using "
                f"{source.current().policy.label()}"
            )
        yield source
    if source.unfinished:
        talk.tell(source.unfinished)


def _result(store: TraceStore, spec: PairSpec, s: Run, ran: Executed, talk: Talk) -> Result:
    """Writes ``outputs`` and ``per_round``, and stores the run unless that is not to be."""
    most = max(ran.shares, key=lambda share: share.counts.emitted_tokens).policy
    changed = changes_json(ran.shares, ran.changes)
    label = {"label": ran.outcome.policy}
    data = {**outcome_json(ran.outcome, most), **label, **changed, **ran.engine, "heads": ran.heads}
    if ran.engine:
        data["latency"] = ran.latency
    steps = {d.trajectory.request_id: d.steps for d in ran.requests}
    rows = []
    for d in ran.requests:
        ids = d.trajectory.output_ids.tolist()
        row = {"id": d.trajectory.request_id, "token_ids": ids, "text": ran.codec.text(ids)}
        rows.append(row)
    failed: Exception | None = None  # what it found is printed first
    try:
        if s.outputs:
            write_rows(s.outputs, rows)
        if s.per_round:
            write_rows(
                s.per_round, (r for request, own in steps.items() for r in rounds_of(request, own))
            )
    except OutputError as error:
        failed = error
    try:
        _store(store, spec, s, ran, most, {**changed, **ran.engine})
    except DatabaseError as error:
        failed = error
    for line in hardly_accepted(executed_first(chain(*steps.values())), ran.heads):
        talk.tell(line)
    texts = {row["id"]: row["text"] for row in rows}
    result = outcome_result(ran.outcome, data, texts=texts, shares=ran.shares, changes=ran.changes)
    return replace(result, failed=failed)


def _store(
    store: TraceStore,
    spec: PairSpec,
    s: Run,
    ran: Executed,
    most: Policy,
    options: Mapping[str, Any],
) -> None:
    """Stores the run, unless that is not to be. Raises DatabaseError, also for a recording that
    lacks what could not be stored meanwhile."""
    if ran.writer is not None:
        ran.writer.check()
    if s.store:
        deployment = deployment_for(s, s.engine)
        store.put_pair(spec.id, spec.name, spec.to_json())
        put_policies(store, (most, *ran.policies))
        store.put_run(
            spec.id,
            most.id,
            ran.outcome,
            device=ran.device,
            dtype=ran.dtype,
            workload_id=store.put_workload(ran.workload),
            purpose="run",
            options={"deployment": deployment, **options},
        )


def generate(s: Generate, talk: Talk) -> Result:
    if not s.prompt.strip():
        raise WorkloadError("the prompt is empty")
    with open_store(s, create=True) as store:
        spec = pair_of(s, store)
        if s.policy != "active":
            policy_named(store, s.policy, "", "", "", talk)
        options = decode_options(s.sampling)
        pair = load(s, spec, talk, notes=False)
        # What does not fit is refused before anything else is said.
        encode(pair, Workload("prompt", (Request("prompt", "prompt", s.prompt),)), options, ())
        profile = store.profile_of(pair.id, **pair.place)
        plan = plan_of(store, pair, s.policy, options, profile, s.deployment, talk)
    console = talk.console or Console(quiet=True)
    with pair.torch_threads():
        data = stream(pair, plan, s.prompt, options, console, compare=s.compare)
    return Result("" if talk.console else data["text"], data)

"""`run`: execute a policy on a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import click

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.on_engine import (
    NATIVE,
    OnEngine,
    check_engine,
    deployment_on,
    engine_options,
)
from spectune.optimizer.commands.options import FILE, decode_options, workload_of
from spectune.optimizer.commands.outputs import check_writable, kept_unless_stored, write_rounds
from spectune.optimizer.commands.printing import Command, Meter, emit, note
from spectune.optimizer.commands.shared import (
    check_policy,
    fit_to,
    load,
    open_store,
    pair_spec,
    prepared,
    say_unpublished,
)

if TYPE_CHECKING:
    from spectune.engines.protocol import Answered
    from spectune.optimizer.changes import Change, Share
    from spectune.optimizer.execute import DecodeOptions
    from spectune.runtime.decoder import Decoded
    from spectune.runtime.loading import LoadedPair
    from spectune.runtime.loop import PolicySource
    from spectune.runtime.pair import PairSpec
    from spectune.runtime.policies.document import Policy
    from spectune.runtime.text_codec import TextCodec
    from spectune.traces.schema import Outcome, Step, Workload
    from spectune.traces.store import TraceStore
    from spectune.traces.store.traffic import TrafficWriter
    from spectune.traces.tables import LatencyProfile

T = TypeVar("T", "Decoded", "Answered")


@click.command(cls=Command)
@option(
    "--policy policy_name",
    "FILE, inline JSON, ID, active, or autoregressive.",
    default="active",
)
@opts.decoding
@engine_options
@opts.deployment
@option(
    "--profile profile_id", "Profile for windows that need costs; default: the latest made here."
)
@option("--outputs", "Write the texts, one JSON line per request.", FILE)
@opts.per_round
@flag(
    "--record keep_texts",
    "Keep the texts as a recording, for `tune --recording` and schedules.",
)
@flag("--no-store", "Do not keep the run in the database.")
def run(**kw: Any) -> None:
    """Execute a policy on a workload and measure it.

    With --policy active, publications made meanwhile are picked up between two rounds.

    \b
    Example:  cli.py run --pair demo --policy policy.json --limit 32 --outputs texts.jsonl
              cli.py run --pair demo --policy policy.json --engine openvino --concurrency 8
    """
    check_writable(("--outputs", kw["outputs"]), ("--per-round", kw["per_round"]))
    check_engine(kw)
    kw["deployment"] = deployment_on(kw["engine"])
    with open_store() as store:
        spec = pair_spec(kw, store)
        check_policy(store, kw["policy_name"])
        execute = _decoded if kw["engine"] == NATIVE else _served
        _finish(store, spec, kw, execute(store, spec, kw, decode_options(kw)))


@dataclass(frozen=True)
class Ran:
    """What was executed of a workload, and on what. It is stored under the policy that made most of
    its tokens; ``policies``: all others that a round may name. ``engine`` says which another one
    than the native decoder was, ``latency`` what its users waited for. ``heads``: the hidden states
    that the heads of a pair read that was decoded here."""

    words: TextCodec
    workload: Workload
    served: Sequence[Decoded | Answered]
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


def _decoded(store: TraceStore, spec: PairSpec, kw: dict[str, Any], options: DecodeOptions) -> Ran:
    """By the native decoder."""
    workload = workload_of(kw, spec)
    pair = load(kw, spec)
    from spectune.optimizer.changes import changes_of, label_of, shares_of
    from spectune.optimizer.execute import encode, outcome
    from spectune.optimizer.execute import run as execute
    from spectune.optimizer.record import record_served, recording_options
    from spectune.runtime.decoder import drafts_of

    # What the target does not hold is refused before anything else is said.
    workload = fit_to(pair, workload, options, kw["overlong"], ())
    profile = store.get_profile(kw["profile_id"]) if kw["profile_id"] else None

    def changed(decoded: list[Decoded]) -> None:
        before = decoded[-2].plans[-1][1] if decoded[1:] else None
        for change in changes_of(decoded[-1:], before):
            note(str(change))

    about = recording_options(pair, options)
    with _source(store, pair, kw, profile, options) as source:
        policy = source.current().policy
        drafts = drafts_of(policy)
        if pair.context(drafts) != pair.context(()):
            workload = fit_to(pair, workload, options, kw["overlong"], drafts)
        encoded = encode(pair, workload, options, drafts)
        recording = record_served(store, pair.id, spec, options, about, [policy])
        decoded, writer = _gathered(
            "run", execute(pair, source, encoded), len(encoded.items), kw, recording, changed
        )
    shares, changes = shares_of(decoded), changes_of(decoded)
    used = {plan.policy.id: plan.policy for done in decoded for _, plan in done.plans}
    return Ran(
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
        policies=used.values(),
    )


def _served(store: TraceStore, spec: PairSpec, kw: dict[str, Any], options: DecodeOptions) -> Ran:
    """By another engine."""
    from spectune.optimizer.changes import Share
    from spectune.optimizer.on_engine import (
        about_recording,
        execute,
        latency_on,
        outcome_on,
        verifier_of,
    )
    from spectune.optimizer.record import record_served

    asked = OnEngine(store, spec, kw, options)
    with asked.started() as running:
        runs_on = running.runs_on
        engine = {
            "engine": running.engine.name,
            "engine_version": running.version,
            "concurrency": asked.load.clients,
        }
        texts = replace(options, verifier=verifier_of(options))
        about = about_recording(running, options)
        recording = record_served(store, spec.id, spec, texts, about, [asked.policy])
        executed = execute(running, asked.prompts, asked.policy, asked.load, options)
        answered, writer = _gathered("serve", executed, len(asked.prompts), kw, recording)
    order = {prompt.id: n for n, prompt in enumerate(asked.prompts)}
    answered.sort(key=lambda done: order[done.trajectory.request_id])
    result = outcome_on(asked.policy.label(), answered)
    return Ran(
        asked.words,
        asked.workload,
        answered,
        writer,
        result,
        [Share(asked.policy, result.total)],
        device=runs_on["device"],
        dtype=runs_on["dtype"],
        engine=engine,
        latency=latency_on(answered),
    )


def _gathered(
    phase: str,
    executed: Iterable[T],
    count: int,
    kw: dict[str, Any],
    recording: AbstractContextManager[TrafficWriter],
    seen: Callable[[list[T]], None] = lambda done: None,
) -> tuple[list[T], TrafficWriter | None]:
    """All that is executed, its texts kept in the ``recording`` with ``--record``."""
    done: list[T] = []
    kept = recording if kw["keep_texts"] else nullcontext()
    with kept as writer, Meter() as meter:
        if writer is not None:
            click.echo(f"recording {writer.recording}", err=True)
        for one in executed:
            done.append(one)
            seen(done)
            if writer is not None:
                writer.put(one.trajectory, one.steps)
            meter(phase, len(done), count)
    return done, writer


@contextmanager
def _source(
    store: TraceStore,
    pair: LoadedPair,
    kw: dict[str, Any],
    profile: LatencyProfile | None,
    options: DecodeOptions,
) -> Iterator[PolicySource]:
    """A policy source: the policy named for ever, or for ``active`` whatever is published in the
    deployment, now and later."""
    name, deployment = kw["policy_name"], kw["deployment"]
    from spectune.runtime.loop import StaticSource

    if name != "active":
        costs = profile or store.profile_of(pair.id, **pair.place)
        yield StaticSource(prepared(store, pair, name, options, costs))
        return
    from spectune.optimizer.serving import watch

    if not store.active_version(pair.id, pair.device.type, deployment):
        say_unpublished(pair.id, pair.device.type, deployment)
    with watch(
        store,
        pair,
        None,
        profile,
        deployment=deployment,
        verifier=options.verifier,
        sampling=options.sampling,
    ) as source:
        if source.last_error:
            note(
                f"publication {source.seen} is refused: {source.last_error}; using "
                f"{source.current().policy.label()}"
            )
        yield source
    if source.unfinished:
        click.echo(source.unfinished, err=True)


def rounds_of(request: str, steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
    """The rows of ``--per-round``."""
    columns = ("start", "drafted", "verified", "accepted", "batch")
    for step in steps:
        yield {"request": request, **{name: getattr(step, name) for name in columns}}


def _finish(store: TraceStore, spec: PairSpec, kw: dict[str, Any], ran: Ran) -> None:
    """Writes ``--outputs`` and ``--per-round``, stores the run unless ``--no-store``, checks what
    ``--record`` wrote, and prints."""
    from spectune.optimizer.changes import changes_json
    from spectune.optimizer.inputs import outcome_json
    from spectune.optimizer.record import put_policies
    from spectune.optimizer.report.tables import outcome_table
    from spectune.traces.acceptance import executed_first, hardly_accepted
    from spectune.traces.errors import OutputError

    most = max(ran.shares, key=lambda share: share.counts.emitted_tokens).policy
    changed = changes_json(ran.shares, ran.changes)
    label = {"label": ran.outcome.policy}
    data = {**outcome_json(ran.outcome, most), **label, **changed, **ran.engine, "heads": ran.heads}
    if ran.engine:
        data["latency"] = ran.latency
    steps = {d.trajectory.request_id: d.steps for d in ran.served}
    texts = []
    for d in ran.served:
        ids = d.trajectory.output_ids.tolist()
        text = ran.words.text(ids)
        texts.append({"id": d.trajectory.request_id, "token_ids": ids, "text": text})

    def results() -> dict[str, Any]:
        rounds = [
            {"seconds": d.seconds, "rounds": list(rounds_of(d.trajectory.request_id, d.steps))}
            for d in ran.served
        ]
        both = [text | more for text, more in zip(texts, rounds, strict=True)]
        return {"pair": spec.id, **data, "texts": both}

    failed = None
    try:
        if kw["outputs"]:
            write_rounds(kw["outputs"], texts)
        if kw["per_round"]:
            rows = (row for request, own in steps.items() for row in rounds_of(request, own))
            write_rounds(kw["per_round"], rows)
    except OutputError as error:  # what can be stored is stored first
        failed = error
    stores = ran.writer is not None or not kw["no_store"]
    with kept_unless_stored(results, stores=stores):
        if ran.writer is not None:
            ran.writer.check()
        if not kw["no_store"]:
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
                options={"deployment": kw["deployment"], **changed, **ran.engine},
            )
        if failed is not None:
            raise failed
    for line in hardly_accepted(executed_first(chain(*steps.values())), ran.heads):
        note(line)
    emit(data, lambda: outcome_table(ran.outcome, ran.shares, ran.changes))

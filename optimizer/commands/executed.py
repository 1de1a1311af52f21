"""What `run` makes of the requests that were executed: files, a row in the database, and a
table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.outputs import kept_unless_stored, write_rounds
from spectune.optimizer.commands.shared import emit

if TYPE_CHECKING:
    from spectune.engines.protocol import Answered
    from spectune.optimizer.changes import Change, Share
    from spectune.runtime.decoder import Decoded
    from spectune.runtime.pair import PairSpec
    from spectune.runtime.policies.document import AnyPolicy
    from spectune.runtime.words import Texts
    from spectune.traces.schema import Outcome, Step, Workload
    from spectune.traces.store import TraceStore
    from spectune.traces.store.traffic import TrafficWriter


def rounds_of(request: str, steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
    """The rows of ``--per-round``."""
    for s in steps:
        yield {
            "request": request,
            "start": s.start,
            "drafted": s.drafted,
            "verified": s.verified,
            "accepted": s.accepted,
            "batch": s.batch,
        }


def finish_run(
    ctx: click.Context,
    store: TraceStore,
    spec: PairSpec,
    words: Texts,
    workload: Workload,
    served: Sequence[Decoded | Answered],
    outcome: Outcome,
    shares: Sequence[Share],
    changes: Sequence[Change] = (),
    *,
    device: str,
    dtype: str,
    policies: Iterable[AnyPolicy] = (),
    engine: Mapping[str, Any] | None = None,
    latency: Mapping[str, Any] | None = None,
    writer: TrafficWriter | None,
) -> None:
    """Writes ``--outputs`` and ``--per-round``, stores the run unless ``--no-store``, checks what
    ``--record`` wrote, and prints.

    The run is stored under the policy that made most of its tokens; ``policies``: all others that a
    round may name. ``engine`` and ``latency`` are of another engine than the native decoder.
    """
    from spectune.optimizer.changes import changes_json
    from spectune.optimizer.inputs import outcome_json
    from spectune.optimizer.report.tables import outcome_table
    from spectune.traces.errors import OutputError

    most = max(shares, key=lambda share: share.counts.emitted_tokens).policy
    changed = changes_json(shares, changes)
    kw, by = ctx.params, dict(engine or {})
    data = {
        **outcome_json(outcome, most),
        "label": outcome.policy,
        **changed,
        **by,
        **({"latency": latency} if by else {}),
    }
    steps = {d.trajectory.request_id: d.steps for d in served}
    outputs = [(d.trajectory.request_id, d.trajectory.output_ids.tolist()) for d in served]
    texts = [{"id": request, "token_ids": ids, "text": words.text(ids)} for request, ids in outputs]

    def results() -> dict[str, Any]:
        rounds = [
            {"seconds": d.seconds, "rounds": list(rounds_of(d.trajectory.request_id, d.steps))}
            for d in served
        ]
        return {
            "pair": spec.id,
            **data,
            "texts": [text | more for text, more in zip(texts, rounds, strict=True)],
        }

    failed = None
    try:
        if kw["outputs"]:
            write_rounds(kw["outputs"], texts)
        if kw["per_round"]:
            write_rounds(
                kw["per_round"],
                (row for request, own in steps.items() for row in rounds_of(request, own)),
            )
    except OutputError as error:  # what can be stored is stored first
        failed = error
    with kept_unless_stored(ctx, "run", results, stores=writer is not None or not kw["no_store"]):
        if writer is not None:
            writer.check()
        if not kw["no_store"]:
            store.put_pair(spec.id, spec.name, spec.to_json())
            for policy in (most, *policies):
                store.put_policy(policy.id, policy.spelled_out(), policy.label())
            store.put_run(
                spec.id,
                most.id,
                outcome,
                device=device,
                dtype=dtype,
                workload_id=store.put_workload(workload),
                purpose="run",
                options={"deployment": kw["deployment"], **changed, **by},
                steps=steps,
            )
        if failed is not None:
            raise failed
    emit(kw["as_json"], data, lambda: outcome_table(outcome, shares, changes))

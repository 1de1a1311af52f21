"""`profile --engine`: what the steps of an engine cost that serves many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.on_engine import check_engine
from spectune.optimizer.commands.shared import Meter, emit, open_store, pair_spec, say, say_former

if TYPE_CHECKING:
    from spectune.engines.protocol import Prompt
    from spectune.optimizer.engine_profile import Design
    from spectune.optimizer.simulate.served_costs import ServedCosts
    from spectune.runtime.pair import PairSpec
    from spectune.traces.store import TraceStore

GAMMA_MAX, CLIENTS, MOST_PROMPTS = 8, 8, 64
"""Longest drafts and most clients where nothing is said, and most prompts that are served."""


def profile_on_engine(ctx: click.Context, kw: dict[str, Any], *, as_json: bool) -> None:
    """Serves a design on an engine, records it, and prints the costs that are fitted to all that
    was recorded of the engine."""
    from spectune.optimizer.engine_profile import Design, profile_engine
    from spectune.optimizer.simulate.served_costs import costs_of_engine
    from spectune.traces.errors import EngineError

    name = kw["engine"]
    if name == "llamacpp":
        raise EngineError(
            "--engine llamacpp serves one request at a time, so its steps have no costs by batch; "
            "`run --engine llamacpp --policy POLICY` measures a policy there"
        )
    kw["concurrency"] = kw["concurrency"] or CLIENTS
    check_engine(kw)
    if kw["contexts"] or kw["no_trees"] or kw["repeats"] != 1:
        raise EngineError(
            f"--engine {name} is measured while it serves recorded prompts; leave --contexts, "
            "--repeats and --no-trees out"
        )
    with open_store(ctx) as store:
        spec = pair_spec(kw, store, kw["recording"])
        say_former(store, spec)
        prompts, of = _prompts(store, spec, kw["recording"])
        say(f"prompts of {of}", err=True)
        design = Design(
            prompts, kw["gamma_max"] or GAMMA_MAX, kw["concurrency"], threads=kw["threads"]
        )
        with Meter() as meter:
            made = profile_engine(
                store,
                spec,
                name,
                spec.draft_names,
                design,
                say=lambda line: say(line, err=True),
                progress=meter,
            )
        info = store.get_recording(made.recordings[-1])
        costs = costs_of_engine(store, info)
    data = {
        "engine": name,
        "engine_version": info.options["engine_version"],
        "device": info.options["device"],
        "dtype": info.options["dtype"],
        "recordings": list(made.recordings),
        "left_out": made.left_out,
        "context": design.context,
        "costs": dict(costs.check),
        "drafts": {draft: _told(costs, name, draft, design) for draft in costs.drafts},
    }
    emit(as_json, data, lambda: _view(data))


def _prompts(
    store: TraceStore, spec: PairSpec, recording: str | None
) -> tuple[Sequence[Prompt], str]:
    """Prompts of a recording of the pair, spread over it, else of the demo's; and of what they
    are."""
    import numpy as np

    from spectune.engines.protocol import Prompt
    from spectune.optimizer.execute import DecodeOptions
    from spectune.optimizer.inputs import load_workload
    from spectune.optimizer.on_engine import prompts_of
    from spectune.optimizer.record import texts_to_profile
    from spectune.runtime.words import load_words
    from spectune.traces.errors import TraceError

    if recording is not None and (of := store.get_recording(recording)).pair_id != spec.id:
        raise TraceError(
            f"recording {of.id} is of pair {of.pair_id}, not of {spec.name} ({spec.id})"
        )
    found, texts = texts_to_profile(store, spec.id, recording)
    if not texts:
        return prompts_of(
            load_words(spec), load_workload(["demo"], limit=MOST_PROMPTS), DecodeOptions()
        ), "the workload `demo`"
    chosen = np.unique(np.linspace(0, len(texts) - 1, MOST_PROMPTS).astype(int))
    return [
        Prompt("", texts[i].category, tuple(texts[i].prompt_ids.tolist())) for i in chosen
    ], f"recording {found}"


def _told(costs: ServedCosts, engine: str, draft: str, design: Design) -> dict[str, Any]:
    from spectune.engines.abilities import engine_named
    from spectune.optimizer.engine_profile import step_table

    least, most = costs.passes[draft]
    return {
        "least": least,
        "most": most,
        "step_ms": step_table(costs, engine_named(engine), draft, design),
    }


def _view(data: dict[str, Any]) -> Any:
    """A table for each draft: milliseconds of a step by batch (rows) and draft tokens (columns)."""
    from rich.console import Group

    from spectune.optimizer.report.tables import rows_table

    tables: list[Any] = []
    drafts = dict(data["drafts"])
    without = [row["0"] for row in drafts.pop("", {"step_ms": []})["step_ms"]]
    for draft, told in drafts.items():
        rows = [
            {key: value if key == "batch" else f"{value:.2f}" for key, value in row.items()}
            for row in told["step_ms"]
        ]
        if without:
            rows = [
                {"batch": row["batch"], "no draft": f"{ms:.2f}", **row}
                for row, ms in zip(rows, without, strict=True)
            ]
        title = (
            f"ms of a step of {data['engine']} by draft tokens of {draft} ({data['context']:.0f} "
            "tokens cached a request)"
        )
        tables.append(rows_table(rows, list(rows[0]), title))
    check = data["costs"]
    tables.append(
        f"fitted to {check['steps']} served steps: {100 * check['median_error']:.1f}% off in the "
        f"median, {100 * check['p90_error']:.1f}% for nine of ten, "
        f"{100 * check['total_error']:+.1f}% in all"
    )
    return Group(*tables)

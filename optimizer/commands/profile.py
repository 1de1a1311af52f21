"""`profile`: measure what rounds cost on this device, and what the steps of an engine cost that
serves many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.on_engine import NATIVE, check_engine, engine_option
from spectune.optimizer.commands.options import Whole
from spectune.optimizer.commands.outputs import kept_unless_stored
from spectune.optimizer.commands.printing import Command, Meter, emit, note, table
from spectune.optimizer.commands.shared import load, open_store, pair_spec, quiet_transformers

if TYPE_CHECKING:
    from spectune.engines.protocol import Prompt
    from spectune.runtime.pair import PairSpec
    from spectune.traces.store import TraceStore
    from spectune.traces.tables import Trajectory

GAMMA_MAX, CLIENTS, MOST_PROMPTS = 8, 8, 64
"""On an engine: longest drafts and most clients where nothing is said, and most prompts that are
served."""


@click.command(cls=Command)
@opts.pair
@opts.devices
@engine_option
@option(
    "--concurrency",
    "Measure from 1 to N requests at a time, on an engine that batches; default: 8.",
    Whole(1),
)
@option("--gamma-max", "Longest drafts measured; default: 16, on another engine 8.", Whole(1, 64))
@option(
    "--contexts",
    "Context lengths to measure at, comma-separated; default: those that the recording serves, "
    "else 32,160,384.",
)
@option("--repeats", "Sweeps over all that is measured.", Whole(1, 10_000), default=1)
@flag("--no-trees", "Leave out what trees cost: quicker, for chains alone.")
@option(
    "--recording",
    "Measure trees on the texts of ID or latest, another engine on their prompts; default: the "
    "pair's newest complete one, else random tokens, or the demo's prompts.",
)
def profile(**kw: Any) -> None:
    """Measure what every part of a round costs on this device.

    What drafting and verifying trees costs depends on the text, so `record` first. On an engine
    that batches, measure what its steps cost, with each draft of the pair and without: its
    recordings tell `simulate --arrivals` and `tune --arrivals` so.

    \b
    Example:  cli.py profile --pair pair.json --device cpu
              cli.py profile --pair pair.json --engine openvino --concurrency 8 --gamma-max 6
    """
    if kw["engine"] == NATIVE:
        check_engine({**kw, "concurrency": kw["concurrency"] or 1})
        _profile_here(kw)
    else:
        _profile_on_engine({**kw, "concurrency": kw["concurrency"] or CLIENTS})


def _contexts(given: str | None) -> tuple[int, ...]:
    try:
        lengths = tuple(sorted({int(c) for c in given.split(",")})) if given else ()
    except ValueError:
        raise click.BadParameter(
            "whole numbers separated by commas are expected", param_hint="--contexts"
        ) from None
    if lengths and lengths[0] < 1:
        raise click.BadParameter(
            f"{lengths[0]}: a context has at least 1 token", param_hint="--contexts"
        )
    return lengths


def _profile_here(kw: dict[str, Any]) -> None:
    """`profile` of the native decoder."""
    lengths, recording, trees = _contexts(kw["contexts"]), kw["recording"], not kw["no_trees"]
    if recording is not None and not trees:
        raise click.UsageError(
            "--recording says on which texts trees are measured; leave it out, or --no-trees"
        )
    with open_store() as store:
        pair = load(kw, pair_spec(kw, store, recording))
        from spectune.optimizer.inputs import recording_of
        from spectune.optimizer.profiles import served_contexts
        from spectune.optimizer.record import texts_to_profile, whole_texts
        from spectune.optimizer.report.tables import profile_table
        from spectune.runtime.profiling import measure_profile

        texts: Sequence[Trajectory] = ()
        if trees:
            if recording is not None:
                recording = recording_of(store, recording, pair.spec).id
            recording, texts = texts_to_profile(store, pair.id, recording)
            on = (
                f"the {len(texts)} texts of recording {recording}"
                if recording
                else "random tokens: nothing of this pair is recorded"
            )
            note(f"trees are measured on {on}")
        with Meter() as meter:
            measured = measure_profile(
                pair,
                texts=whole_texts(texts),
                gamma_max=kw["gamma_max"] or 16,
                contexts=lengths or served_contexts(texts),
                repeats=kw["repeats"],
                trees=trees,
                progress=lambda what, done, total: meter("profile", done, total),
            )
        with kept_unless_stored(measured.to_json):
            store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
            name = store.put_profile(measured)
    for what, check in (("policies", measured.check), ("trees", measured.check.get("trees"))):
        if check is not None and not check["accepted"]:
            note(
                f"warning: the predicted seconds of {what} are off by "
                f"{100 * check['policy_error']:.0f}% (median); the machine is busy, or changed its "
                "speed while measuring: run `profile` again"
            )
    data = {"profile": name, "heads": pair.hidden_states, **measured.to_json()}
    emit(data, lambda: profile_table(measured, name))


def _profile_on_engine(kw: dict[str, Any]) -> None:
    """Serves a design on an engine, records it, and prints the costs that are fitted to all that
    was recorded of the engine."""
    from spectune.engines.abilities import engine_named
    from spectune.optimizer.engine_profile import Design, profile_engine, step_table
    from spectune.optimizer.simulate.served_costs import costs_of_engine
    from spectune.traces.errors import EngineError

    name = kw["engine"]
    check_engine(kw)
    if kw["contexts"] or kw["no_trees"] or kw["repeats"] != 1:
        raise EngineError(
            f"--engine {name} is measured while it serves recorded prompts; leave --contexts, "
            "--repeats and --no-trees out"
        )
    quiet_transformers()
    with open_store() as store:
        spec = pair_spec(kw, store, kw["recording"])
        prompts, of = _prompts(store, spec, kw["recording"])
        note(f"prompts of {of}")
        most = kw["gamma_max"] or GAMMA_MAX
        design = Design(prompts, most, kw["concurrency"], threads=kw["threads"])
        with Meter() as meter:
            recordings, left_out = profile_engine(
                store, spec, name, spec.draft_names, design, say=note, progress=meter
            )
        info = store.get_recording(recordings[-1])
        costs = costs_of_engine(store, info)
    drafts = {
        draft: {
            "least": costs.passes[draft][0],
            "most": costs.passes[draft][1],
            "step_ms": step_table(costs, engine_named(name), draft, design),
        }
        for draft in costs.drafts
    }
    data = {
        "engine": name,
        **{key: info.options[key] for key in ("engine_version", "device", "dtype")},
        "recordings": recordings,
        "left_out": left_out,
        "context": design.context,
        "costs": dict(costs.check),
        "drafts": drafts,
    }
    emit(data, lambda: _view(data))


def _prompts(
    store: TraceStore, spec: PairSpec, recording: str | None
) -> tuple[Sequence[Prompt], str]:
    """Prompts of a recording of the pair, spread over it, else of the demo's; and of what they
    are."""
    import numpy as np

    from spectune.engines.protocol import Prompt
    from spectune.optimizer.execute import DecodeOptions
    from spectune.optimizer.inputs import load_workload, recording_of
    from spectune.optimizer.on_engine import prompts_of
    from spectune.optimizer.record import texts_to_profile
    from spectune.runtime.text_codec import load_codec

    if recording is not None:
        recording = recording_of(store, recording, spec).id
    found, texts = texts_to_profile(store, spec.id, recording)
    if not texts:
        demo = load_workload(["demo"], limit=MOST_PROMPTS)
        return prompts_of(load_codec(spec), demo, DecodeOptions()), "the workload `demo`"
    chosen = (texts[i] for i in np.unique(np.linspace(0, len(texts) - 1, MOST_PROMPTS).astype(int)))
    prompts = [Prompt("", text.category, tuple(text.prompt_ids.tolist())) for text in chosen]
    return prompts, f"recording {found}"


def _view(data: dict[str, Any]) -> Any:
    """A table for each draft: milliseconds of a step by batch (rows) and draft tokens (columns)."""
    from rich.console import Group

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
        tables.append(table(rows, title=title)())
    check = data["costs"]
    tables.append(
        f"fitted to {check['steps']} served steps: {100 * check['median_error']:.1f}% off in the "
        f"median, {100 * check['p90_error']:.1f}% for nine of ten, "
        f"{100 * check['total_error']:+.1f}% in all"
    )
    return Group(*tables)

"""`profile`: measure what rounds cost on this device, and what the steps of an engine cost that
serves many requests at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spectune.engines.engine import Prompt
from spectune.optimizer.commands.common import Talk, open_store, pair_of
from spectune.optimizer.commands.decoding import NATIVE, load, quiet_transformers
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.inputs import read_files
from spectune.optimizer.profiles import served_contexts
from spectune.optimizer.recording.engine_profile import Design, profile_engine, step_table
from spectune.optimizer.recording.on_engine import prompts_of
from spectune.optimizer.recording.record import whole_texts
from spectune.optimizer.replay.served_costs import costs_of_engine
from spectune.optimizer.tuning.sources import texts_to_profile
from spectune.runtime.pair import PairSpec
from spectune.runtime.profiling.measure import measure_profile
from spectune.runtime.text_codec import load_codec
from spectune.settings import Profile, RequestsSettings
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Trajectory

MOST_PROMPTS = 64
"""Most prompts that an engine is measured with."""


def profile(s: Profile, talk: Talk) -> Result:
    return (_native if s.engine == NATIVE else _on_engine)(s, talk)


def _native(s: Profile, talk: Talk) -> Result:
    """Of the native decoder."""
    talk.no_effect(s, ["native", *["trees"] * s.trees])
    with open_store(s, create=True) as store:
        spec = pair_of(s, store, s.recording)
        pair = load(s, spec, talk)
        texts: Sequence[Trajectory] = ()
        if s.trees:
            recording, texts = texts_to_profile(store, pair.spec, s.recording)
            source = "random tokens: nothing of this pair is recorded"
            if recording:
                source = f"the {len(texts)} texts of recording {recording}"
            talk.tell(f"trees are measured on {source}")
        with pair.torch_threads():
            measured = measure_profile(
                pair,
                texts=whole_texts(texts),
                gamma_max=s.gamma_max or 16,
                contexts=tuple(sorted(set(s.contexts))) or served_contexts(texts),
                repeats=s.repeats,
                trees=s.trees,
                requests=s.concurrency or 1,
                progress=talk.progress,
            )
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
        name = store.put_profile(measured)
    for what, check in (("policies", measured.check), ("trees", measured.check.get("trees"))):
        if check is not None and not check["accepted"]:
            talk.tell(
                f"warning: the predicted seconds of {what} are off by "
                f"{100 * check['policy_error']:.0f}% (median); the machine is busy, or changed its "
                "speed while measuring: run `profile` again"
            )
    data = {"profile": name, "heads": pair.hidden_states, **measured.to_json()}
    rows = profile_rows(measured)
    title = f"Latency profile {name} ({measured.device}, {measured.dtype}), ms"
    return Result(_checks(measured.check), data, rows, [Table(rows, title=title)])


def profile_rows(profile: LatencyProfile) -> list[dict[str, Any]]:
    """Milliseconds of every term at its knots, a column per context."""
    contexts = profile.terms["target"].knots[-1]
    rows = []
    for term, costs in sorted(profile.terms.items()):
        knots = [
            (axis, knot)
            for axis, values in zip(costs.axes, costs.knots, strict=True)
            for knot in (values if axis != "context" else ())
        ]
        places = np.array(contexts if "context" in costs.axes else contexts[:1])
        for axis, knot in knots or [("", 0.0)]:
            at = {axis or "rows": np.full(len(places), knot), "context": places}
            seconds = np.atleast_1d(costs.at(**at))
            row: dict[str, Any] = {"term": term, "at": f"{knot:.0f} {axis}" if axis else ""}
            ms = {f"context {c:.0f}": 1e3 * float(t) for c, t in zip(places, seconds, strict=True)}
            rows.append(row | ms)
    return rows


def _checks(check: Mapping[str, Any]) -> str:
    """How well the profile predicts rounds that were executed."""
    lines = [f"overhead {100 * check.get('overhead_share', 0):.1f}% of a round"]
    for what, of in (("chains", check), ("trees", check.get("trees"))):
        if of is not None:
            policy_error = of.get("policy_error", of.get("median_error", 0))
            lines.append(
                f"predicted against {of.get('rounds', 0)} executed rounds of {what}: median error "
                f"{100 * of.get('median_error', 0):.1f}% a round, {100 * policy_error:.1f}% a "
                f"policy, total {100 * of.get('total_error', 0):+.1f}%, "
                f"{'accepted' if of.get('accepted') else 'NOT accepted'}"
            )
    return "\n".join(lines)


def _on_engine(s: Profile, talk: Talk) -> Result:
    """Serves a design on an engine, records it, and shows the costs that are fitted to all that
    was recorded of the engine."""
    talk.no_effect(s, ["engine", "executed"])
    quiet_transformers(talk)
    with open_store(s, create=True) as store:
        spec = pair_of(s, store, s.recording)
        prompts, source = _prompts(store, spec, s.recording)
        talk.tell(f"prompts of {source}")
        design = Design(prompts, s.gamma_max or 8, s.concurrency or 8, threads=s.threads)
        recordings, left_out = profile_engine(
            store, spec, s.engine, spec.draft_names, design, say=talk.tell, progress=talk.progress
        )
        info = store.get_recording(recordings[-1])
        costs = costs_of_engine(store, info)
    drafts: dict[str, Any] = {
        draft: {
            "least": costs.passes[draft][0],
            "most": costs.passes[draft][1],
            "step_ms": step_table(costs, draft, design),
        }
        for draft in costs.drafts
    }
    check = dict(costs.check)
    data = {
        "engine": s.engine,
        **{key: info.options[key] for key in ("engine_version", "device", "dtype")},
        "recordings": recordings,
        "left_out": left_out,
        "context": design.context,
        "costs": check,
        "drafts": drafts,
    }
    without = [row["0"] for row in drafts.get("", {"step_ms": []})["step_ms"]]
    cached = f"({design.context:.0f} tokens cached a request)"
    tables = []
    for draft in filter(None, drafts):
        steps = drafts[draft]["step_ms"]
        rows = steps
        if without:
            rows = [{**row, "no draft": ms} for row, ms in zip(steps, without, strict=True)]
        title = f"ms of a step of {s.engine} by draft tokens of {draft} {cached}"
        tables.append(Table(rows, title=title))
    text = (
        f"fitted to {check['steps']} served steps: {100 * check['median_error']:.1f}% off in the "
        f"median, {100 * check['p90_error']:.1f}% for nine of ten, "
        f"{100 * check['total_error']:+.1f}% in all"
    )
    return Result(text, data, tables[0].rows if tables else (), tables)


def _prompts(
    store: TraceStore, spec: PairSpec, recording: str | None
) -> tuple[Sequence[Prompt], str]:
    """Prompts of a recording of the pair, spread over it, else of the demo's; and of what they
    are."""
    name, texts = texts_to_profile(store, spec, recording)
    if not texts:
        demo = read_files(["demo"], RequestsSettings(limit=MOST_PROMPTS))
        return prompts_of(load_codec(spec), demo, DecodeOptions()), "the workload `demo`"
    spread = np.unique(np.linspace(0, len(texts) - 1, MOST_PROMPTS).astype(int))
    prompts = [Prompt("", texts[i].category, tuple(texts[i].prompt_ids.tolist())) for i in spread]
    return prompts, f"recording {name}"

"""What the steps of an engine cost, from what it recorded while it served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.engines.abilities import ServingRules, rules_of
from spectune.optimizer.replay.step_costs import (
    StepCosts,
    StepLoad,
    fit_steps,
    step_costs,
    step_seconds,
)
from spectune.traces.cost_table import FloatArray
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.recording import RecordedRequest, ServedRequest
from spectune.traces.store import TraceStore
from spectune.traces.tables import SAMPLE, LatencyProfile, Recording

FITTED_STEPS: Final = 6000
"""Most steps that costs are fitted to, spread over all that were recorded."""
LEAST_STEPS: Final = 30
"""Fewer steps tell nothing."""
POOLED: Final = 64
"""Most starts of an engine that its costs are fitted to, its own and the newest."""

ServedStep = tuple[StepLoad, float]
"""A step as it was served, and the seconds from the end of the one before to its own."""


class _Round(NamedTuple):
    """A round of a request in a step: its tokens verified and of the prompt, those cached, those
    drafted for its next round (-1: there is none), when its round before ended (0: there is none),
    and the draft that its request was served with."""

    batch: int
    rows: int
    prompt: int
    cached: int
    following: int
    before_s: float
    round_s: float
    draft: str


def served_steps(
    requests: Sequence[RecordedRequest | ServedRequest], rules: ServingRules
) -> list[ServedStep]:
    """The steps of one server, put together from the rounds that ended at one moment.

    Left out are steps of which less than a half of the requests was noted, prompts that were read
    in chunks, and steps after which nobody went on, as what they drafted is not known. What is not
    noted of a step counts like the rest of it.
    """
    rounds: dict[float, list[_Round]] = {}
    drafts: Counter[str] = Counter()
    for r in requests:
        prompt = r.n_prompt
        draft = next((s.draft for s in r.steps if s.draft), "")
        drafts[draft] += 1
        for before, s, after in zip((None, *r.steps), r.steps, (*r.steps[1:], None), strict=False):
            tokens = (s.drafted + 1, 0, prompt + s.start - 1) if before else (0, prompt, 0)
            following = after.drafted if after else -1
            before_s = before.ended_s if before else 0.0
            rounds.setdefault(s.ended_s, []).append(
                _Round(s.batch, *tokens, following, before_s, s.round_s, draft)
            )
    rounds.pop(0.0, None)  # when it ended was not recorded
    loaded = next((name for name, _ in drafts.most_common() if name), "")
    served: list[ServedStep] = []
    for ended_s, members in rounds.items():
        load = _load_of(members, next((m.draft for m in members if m.draft), loaded), rules)
        before_s = max(m.before_s for m in members)
        seconds = ended_s - before_s if before_s else min(m.round_s for m in members)
        if load is not None and seconds > 0:
            served.append((load, seconds))
    return served


def _load_of(members: Sequence[_Round], draft: str, rules: ServingRules) -> StepLoad | None:
    batch, recorded = max(m.batch for m in members), len(members)
    drafted = max(m.following for m in members)
    read = sum(m.rows + m.prompt for m in members)
    if 2 * recorded < batch or drafted < 0 or read > rules.max_batched_tokens:
        return None
    decoded, prompt = [m for m in members if m.rows], sum(m.prompt for m in members)
    all_of = 1 + ((batch - recorded) / max(1, len(decoded)) if decoded else 0.0)
    rows, cached = sum(m.rows for m in decoded), sum(m.cached for m in decoded)
    return StepLoad(draft, rows * all_of, prompt, batch, cached * all_of, drafted)


@dataclass(frozen=True)
class ServedCosts:
    """What an engine's steps cost: a profile with their terms, by draft the least and the most
    passes of a step that were served (``passes``) and the least and most requests of one, but for
    the :data:`LEAST_STEPS` smallest and largest (``batches``), how well the terms tell the steps
    that they were fitted to (``check``), and by what command others are served, in words
    (``served_by``)."""

    profile: LatencyProfile
    passes: Mapping[str, tuple[int, int]]
    batches: Mapping[str, tuple[int, int]]
    check: Mapping[str, Any]
    served_by: str

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafts that the engine has loaded, "" where it had none."""
        return tuple(self.passes)

    def of(self, draft: str, gammas: Sequence[int]) -> StepCosts:
        """The costs of the steps of an engine that has loaded ``draft`` and drafts ``gammas``.
        Raises PolicyError where too little was served to know them, with what to record."""
        if draft not in self.passes:
            names = ", ".join(d or "no draft" for d in self.drafts)
            if not draft:
                raise PolicyError(
                    f"no steps of this engine without a draft were recorded (with: {names}): "
                    f"restart it without the draft for a while, or serve by {self.served_by}"
                )
            raise PolicyError(
                f"no steps of this engine with draft {draft!r} were recorded (with: {names}); "
                f"serve with it for a while, or by {self.served_by}"
            )
        least, most = self.passes[draft]
        outside = sorted({g for g in gammas if not least <= g <= most})
        if outside:
            served = f"{least} to {most}" if least < most else f"{least}"
            raise PolicyError(
                f"what steps cost that draft {', '.join(map(str, outside))} tokens with {draft!r} "
                f"is not known: those recorded drafted {served}; let the server draft so many for "
                f"a while, or serve them by {self.served_by}"
            )
        return step_costs(self.profile, draft)

    def beyond(self, draft: str, batches: npt.NDArray[np.int32]) -> float:
        """The share of simulated steps, given by their numbers of requests, that are of more or
        fewer requests than any that was served with this draft."""
        least, most = self.batches[draft]
        return float(np.mean((batches < least) | (batches > most))) if len(batches) else 0.0


def fit_served(
    steps: Sequence[ServedStep], pair_id: str, device: str, dtype: str, served_by: str
) -> ServedCosts:
    """Costs fitted to the steps of recordings. Raises TraceError where there are too few."""
    if len(steps) < LEAST_STEPS:
        raise TraceError(
            f"{len(steps)} steps of this engine were recorded with their times, which are too few "
            f"to know what steps cost ({LEAST_STEPS} at least); serve more requests, or say "
            f"{served_by}"
        )
    chosen = np.unique(np.linspace(0, len(steps) - 1, FITTED_STEPS).astype(int))
    picked = [steps[i][0] for i in chosen]
    seconds = np.array([steps[i][1] for i in chosen])
    empty = LatencyProfile(pair_id, device, dtype, {})
    profile = fit_steps(empty, picked, seconds.tolist())
    passes: dict[str, tuple[int, int]] = {}
    batches: dict[str, tuple[int, int]] = {}
    predicted = np.zeros(len(chosen))
    for draft in dict.fromkeys(load.draft for load in picked):
        loads = [load for load, _ in steps if load.draft == draft]
        drafted, together = (
            sorted(load.passes for load in loads),
            sorted(load.batch for load in loads),
        )
        few = min(LEAST_STEPS, len(loads)) - 1
        passes[draft] = int(drafted[0]), int(drafted[-1])
        batches[draft] = int(together[few]), int(together[-1 - few])
        costs = step_costs(profile, draft)
        for n, load in enumerate(picked):
            if load.draft == draft:
                predicted[n] = step_seconds(costs, *load[1:])
    return ServedCosts(profile, passes, batches, _check(predicted, seconds, len(steps)), served_by)


def _check(predicted: FloatArray, executed: FloatArray, steps: int) -> dict[str, Any]:
    apart = np.abs(predicted / executed - 1)
    return {
        "steps": steps,
        "median_error": float(np.median(apart)),
        "p90_error": float(np.quantile(apart, 0.9)),
        "total_error": float(predicted.sum() / executed.sum() - 1),
    }


def _made_by(info: Recording) -> tuple[Any, ...]:
    """What recordings whose steps cost the same have in common. Old ones do not name their
    hardware."""
    options = {"device": "cpu", **info.options}
    names = ("engine", "engine_version", "device", "dtype", "hardware")
    return tuple(options.get(name) for name in names)


def costs_of_engine(store: TraceStore, info: Recording) -> ServedCosts:
    """The costs of the engine of a recording, from all its recordings of this pair, of the same
    version, hardware and numbers; steps are put together of each start of a server by itself.

    Raises TraceError where too few steps were recorded with their times.
    """
    every = store.list_recordings(info.pair_id, with_counts=False)
    recordings = [i for i in every if i.engine == info.engine]
    starts: dict[str, list[Recording]] = {str(info.options.get("boot", info.id)): []}
    for recording in recordings:
        if _made_by(recording) == _made_by(info) and recording.source != SAMPLE:
            starts.setdefault(recording.start, []).append(recording)
    pooled = [*filter(None, starts.values())][:POOLED]
    hardware = info.options.get("hardware")
    named = {str(i.options["hardware"]) for i in recordings if "hardware" in i.options}
    elsewhere = "; ".join(sorted(named - {hardware}))
    served_by = f"`profile --engine {info.engine}`"
    if hardware and elsewhere:
        served_by += f"; on {hardware}, as steps on {elsewhere} tell nothing of it"
    steps: list[ServedStep] = []
    for of_start in pooled:
        rules = rules_of(info.engine, of_start[0].options.get("serving"))
        steps += served_steps(store.served_requests([i.id for i in of_start]), rules)
    device = str(info.options.get("device", "cpu"))
    dtype = str(info.options.get("dtype", ""))
    return fit_served(steps, info.pair_id, device, dtype, served_by)

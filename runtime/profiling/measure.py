"""Measuring a profile: the experiment, the fit, and its check against whole requests of policies
that the fit has not seen."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from spectune.runtime.costs import predicted_seconds
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import FixedWindow, FsmWindow, MaxProbStop, Policy
from spectune.runtime.profiling.experiment import (
    CHECKED_TOKENS,
    SAMPLINGS,
    Cell,
    Experiment,
    cell_of,
    cells_of,
    cells_together,
    tree_policy,
)
from spectune.runtime.profiling.regression import fit_profile, shapes_of
from spectune.runtime.progress import Progress, silent
from spectune.traces.cost_table import FloatArray
from spectune.traces.tables import LatencyProfile

ACCEPTED_ERROR: Final = 0.08
"""Median relative error of policies' predicted seconds up to which a profile is accepted."""
CHECKED_TREES: Final = ((8, 5, 32), (5, 3, 12))
"""(width, levels, nodes) of the trees that a profile is checked with."""

CONTEXTS: Final = (32, 160, 384)
"""Knots of the context where nobody says what is served."""


def measure_profile(
    pair: LoadedPair,
    *,
    gamma_max: int = 16,
    contexts: Sequence[int] = (),
    repeats: int = 1,
    most: int = 1,
    trees: bool = True,
    requests: int = 1,
    texts: Sequence[Sequence[int]] = (),
    progress: Progress = silent,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyProfile:
    """Profiles every cost that the simulator charges, in ``repeats`` sweeps over the designed
    experiment, and up to ``most`` while the check fails.

    ``contexts``: knots of the context, from the shortest to the longest that is served; those that
    the models do not hold are left out. ``texts``: token ids of what is served, random ones where
    there are none. ``requests``: steps of up to so many at once are measured, too. ``check`` says
    how well predicted rounds match executed ones."""
    room = pair.max_positions - 2 * gamma_max - CHECKED_TOKENS
    usable = [c for c in sorted(set(contexts or CONTEXTS)) if c <= room] or [max(1, room // 2)]
    experiment = Experiment(pair, usable, [t for t in texts if len(t) > usable[0]], clock)
    cells = cells_of(pair, gamma_max, trees=trees)
    checked = _checked_cells(pair, gamma_max, trees=trees)
    # First touches and compilation.
    experiment.sweep({name: of_draft[:2] for name, of_draft in cells.items()})
    experiment.rounds.clear()
    experiment.prefills.clear()
    dtype = str(pair.target.dtype).removeprefix("torch.")
    measured_at = {"gamma_max": gamma_max, "requests": requests, "contexts": usable}
    here = {**environment(pair), **measured_at}
    profile = LatencyProfile(pair.id, pair.device.type, dtype, {}, here)
    for sweeps in range(1, max(repeats, most) + 1):

        def told(done: int, total: int, sweeps: int = sweeps) -> None:
            progress("requests", (sweeps - 1) * total + done, max(repeats, sweeps) * total)

        experiment.sweep(cells, checked, progress=told)
        if requests > 1:
            of_several = cells_together(pair, gamma_max, trees=trees).values()
            for n, (of_draft, sampling) in enumerate(product(of_several, SAMPLINGS), 1):
                experiment.together(of_draft, requests, sampling)
                progress("steps of several requests", n, len(SAMPLINGS) * len(of_several))
        if sweeps >= repeats:
            steps = [*((r,) for r in experiment.rounds), *experiment.steps]
            shapes = shapes_of(cells, usable, steps, experiment.prefills)
            profile = fit_profile(profile, shapes, steps, experiment.prefills)
            profile = _check(experiment, profile)
            if profile.accepted(trees=trees):
                break
    return profile


def _check(experiment: Experiment, profile: LatencyProfile) -> LatencyProfile:
    """``profile`` with how far predicted rounds are from executed ones, of policies that the fit
    has not seen."""
    policies, rounds = zip(*experiment.checked, strict=True)
    tree = np.array([bool(r.kind.growth) for r in rounds])
    executed = np.array([r.round_s for r in rounds])
    phases = np.array([r.draft_s + r.verify_s for r in rounds])
    numbers = predicted_seconds(profile, [(r,) for r in rounds])[:, 2], executed, np.array(policies)
    check = _errors(*(column[~tree] for column in numbers))
    check["overhead_share"] = float(1.0 - np.median(phases / executed))
    if tree.any():
        check["trees"] = _errors(*(column[tree] for column in numbers))
    return replace(profile, check=check)


def _errors(
    predicted: FloatArray, executed: FloatArray, policies: npt.NDArray[np.int64]
) -> dict[str, Any]:
    """How well predicted rounds agree with executed ones, and policies' sums: their median error,
    by which a profile is accepted, and, as ``policy_spread``, how much they differ in it (the
    standard deviation of the logarithm)."""
    errors = np.abs(predicted / executed - 1.0)
    masks = [policies == policy for policy in np.unique(policies)]
    sums = np.array([predicted[mask].sum() / executed[mask].sum() for mask in masks])
    error = float(np.median(np.abs(sums - 1.0)))
    return {
        "rounds": len(errors),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
        "total_error": float(predicted.sum() / executed.sum() - 1.0),
        "policy_error": error,
        "policy_spread": float(np.std(np.log(sums))),
        "accepted": error <= ACCEPTED_ERROR,
    }


def _checked_cells(pair: LoadedPair, gamma_max: int, *, trees: bool) -> list[Cell]:
    """Policies whose windows, stops and trees are none of those measured."""
    short, long = FsmWindow(gamma_max=min(6, gamma_max)), FixedWindow(gamma=min(9, gamma_max))
    policies = [Policy()]
    policies += [Policy(draft=name, window=short) for name in pair.chain_drafts]
    stop = MaxProbStop(threshold=0.4)
    policies += [Policy(draft=name, window=long, stop=stop) for name in pair.drafts]
    for name in pair.models if trees else ():
        policies += [tree_policy(name, *shape) for shape in CHECKED_TREES]
    return [cell_of(pair, policy) for policy in policies]


def environment(pair: LoadedPair) -> dict[str, Any]:
    """What a latency profile was measured in."""
    cuda = pair.device.type == "cuda"
    return {
        "device": pair.place["hardware"],
        "driver": torch.version.cuda if cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": pair.place["dtype"],
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
    }

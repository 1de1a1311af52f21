"""What settings mean to the optimizer: a workload, how it is decoded, how a tuning is done, what is
best under a load."""

from __future__ import annotations

from typing import Any

from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.inputs import load_workload, narrowed
from spectune.optimizer.simulate.load import Objective
from spectune.optimizer.tune import TuneOptions
from spectune.settings import Load, Requests, Sampling, Scheduled, Tune
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling as Law
from spectune.traces.schema import Workload


def decode_options(sampling: Sampling) -> DecodeOptions:
    """How requests are decoded."""
    law = Law(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
    how = (sampling.max_new_tokens, sampling.verifier, sampling.stop, sampling.chat)
    return DecodeOptions(law, *how)


def read_files(files: tuple[str, ...], requests: Requests) -> Workload:
    """The requests of files that are meant. Raises WorkloadError."""
    how: dict[str, Any] = {"turns": requests.turns, "column": requests.column}
    return narrow(load_workload(files, bad_rows=requests.bad_rows, **how), requests)


def narrow(workload: Workload, requests: Requests) -> Workload:
    """The requests of a workload that are meant. Raises WorkloadError where none is left."""
    return narrowed(
        workload, limit=requests.limit, categories=requests.category, limit_seed=requests.seed
    )


def tune_options(s: Tune | Scheduled, **about: Any) -> TuneOptions:
    """How a tuning is done, and what else it is told."""
    return TuneOptions(
        options=decode_options(s.sampling),
        gamma_max=s.search.gamma_max,
        trials=s.search.trials,
        seed=s.search.seed,
        finalists=s.race.finalists,
        budget_s=s.race.budget,
        tree_width=s.trees.width,
        tree_depth=s.trees.depth if s.trees.width else 0,
        deployment=s.deployment,
        **about,
    )


def objective_of(load: Load) -> Objective:
    """What is best under a load. Raises TraceError for goodput without a limit."""
    if load.objective == "goodput" and load.ttft is None and load.tpot is None:
        raise TraceError(
            "goodput needs ttft or tpot: which requests are good (load.ttft, load.tpot)"
        )
    return Objective(load.objective, load.ttft, load.tpot)

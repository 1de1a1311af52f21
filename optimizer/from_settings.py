"""What settings mean to the optimizer: how requests are decoded, and how a tuning is done."""

from __future__ import annotations

from typing import Any

from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.tune import TuneOptions
from spectune.settings import Sampling, Scheduled, Tune
from spectune.traces.schema import Sampling as Law


def decode_options(sampling: Sampling) -> DecodeOptions:
    """How requests are decoded."""
    law = Law(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
    how = (sampling.max_new_tokens, sampling.verifier, sampling.stop, sampling.chat)
    return DecodeOptions(law, *how)


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

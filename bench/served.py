"""What is promised of a vLLM that serves: figures at full size, in a real one on this machine.

    .venv-vllm/bin/python bench/run.py served [--only PART ...] [--quick]

Each part is a function ``measure(quick)`` of a module of its own and returns figures, a one-line
``summary`` among them. ``make acceptance-vllm`` runs all.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from lab import run_parts

PARTS: dict[str, str] = {
    "faults": "served_faults draft_model",
    "faults_ngram": "served_faults ngram",
    "faults_ahead": "served_faults ahead",
    "outages": "served_outages",
    "rounds": "served_rounds",
    "retrace_cost": "served_retrace_cost",
    "publications": "served_publications",
    "predictions": "served_predictions",
    "overhead": "served_overhead",
    "tune_url": "served_tune",
    "check": "served_check",
}
"""Each part's module, and what of it where it has several."""


def main(arguments: Sequence[str]) -> None:
    run_parts(__doc__, "served", {part: partial(_measure, part) for part in PARTS}, arguments)


def _measure(part: str, quick: bool) -> dict[str, Any]:
    module, _, engine = PARTS[part].partition(" ")
    figures: dict[str, Any] = importlib.import_module(module).measure(
        quick, *([engine] if engine else [])
    )
    return figures

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

from bench.lab import run_parts

PARTS: dict[str, str] = {
    "faults": "faults draft_model",
    "faults_ngram": "faults ngram",
    "faults_ahead": "faults ahead",
    "outages": "outages",
    "rounds": "rounds",
    "retrace_cost": "retrace_cost",
    "publications": "publications",
    "predictions": "predictions",
    "overhead": "overhead",
    "tune_url": "tune_url",
    "check": "check",
}
"""Each part's module, and what of it where it has several."""


def main(arguments: Sequence[str]) -> None:
    run_parts(__doc__, "served", {part: partial(_measure, part) for part in PARTS}, arguments)


def _measure(part: str, quick: bool) -> dict[str, Any]:
    module, _, engine = PARTS[part].partition(" ")
    figures: dict[str, Any] = importlib.import_module(f"bench.served.{module}").measure(
        quick, *([engine] if engine else [])
    )
    return figures

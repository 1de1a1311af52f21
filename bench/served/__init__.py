"""What is promised of a vLLM that serves: figures at full size, in a real one on this machine.

    .venv-vllm/bin/python bench/run.py served [--only PART ...] [--quick]

Each part is a function ``measure(quick)`` of a module here and returns figures, a one-line
``summary`` and whether it ``holds`` among them. ``make acceptance-vllm`` runs all.
"""

from __future__ import annotations

import importlib

from bench.harness import Figures, Part


def part_of(module: str, *engine: str, function: str = "measure") -> Part:
    """A module's part, which is imported when it runs: some need vLLM in this process."""

    def measure(quick: bool) -> Figures:
        measured = getattr(importlib.import_module(f"bench.served.{module}"), function)
        figures: Figures = measured(quick, *engine)
        return figures

    return measure


RESULT = "served"
PARTS = {
    "faults": part_of("faults", "draft_model"),
    "faults_ngram": part_of("faults", "ngram"),
    "faults_ahead": part_of("faults", "ahead"),
    "outages": part_of("outages"),
    "rounds": part_of("rounds"),
    "rounds_real": part_of("rounds", function="measure_real"),
    "retrace_cost": part_of("retrace_cost"),
    "publications": part_of("publications"),
    "trials": part_of("trials"),
    "trials_stub": part_of("trials", function="measure_stub"),
    "predictions": part_of("load"),
    "overhead": part_of("overhead"),
    "tune_url": part_of("tune_url"),
    "tune_url_real": part_of("tune_url", function="measure_real"),
    "check": part_of("check"),
}

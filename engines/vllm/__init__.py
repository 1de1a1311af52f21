"""vLLM: a scheduler that records rounds and follows publications, and the command line that starts
it.

``--scheduler-cls spectune.engines.vllm.Scheduler`` is all that a server needs; nothing else of vLLM
is changed.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:  # the command line is printed where no vLLM is installed
    if name == "Scheduler":
        from spectune.engines.vllm.scheduler import Scheduler

        return Scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

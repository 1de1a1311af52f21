"""Our vLLM scheduler with a stop-watch: what it adds to the engine's steps, and the CPU seconds of
its threads."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from spectune.engines.vllm.scheduler import Scheduler

EVERY = 50
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Timed(Scheduler):
    """Writes to the file that ``SPECTUNE_TIMED`` names: steps, seconds in them, seconds of ours in
    them, and of our threads."""

    _ours_s, _steps, _began, _threads_s = 0.0, 0, 0.0, 0.0

    def _before(self, *args: Any) -> Any:
        began = time.perf_counter()
        found = super()._before(*args)
        self._ours_s += time.perf_counter() - began
        return found

    def _note(self, *args: Any) -> None:
        began = time.perf_counter()
        super()._note(*args)
        now = time.perf_counter()
        self._ours_s += now - began
        if not self._began:  # what the threads did before was the server's start
            self._began, self._threads_s = now, threads_s()
        self._steps += 1
        if self._steps % EVERY == 0:
            said = {"steps": self._steps, "ours_s": self._ours_s, "span_s": now - self._began}
            said["threads_s"] = threads_s() - self._threads_s
            Path(os.environ["SPECTUNE_TIMED"]).write_text(json.dumps(said))


def threads_s() -> float:
    """CPU seconds of the threads that look for publications and write."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith(("spectune", "traffic ")):
            stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
            fields = stat.rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return total

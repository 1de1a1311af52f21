"""What models run on, by name, told without importing torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from contextlib import suppress
from pathlib import Path

from spectune.runtime.cuda.found import driver


def hardware(device: str, threads: int | None = None, *, count: int = 1) -> str:
    """What a model runs on: the processor and its threads (None: one for each core), or the first
    GPU that this process sees, one of ``count`` that share the model."""
    name = device
    if device == "cpu":
        name = f"{cpu_name()}, threads: {threads or os.cpu_count()}"
    elif device == "cuda":
        name = _gpu_name() or device
    return f"{count} x {name}" if count > 1 else name


def cpu_name() -> str:
    """What the processor is called."""
    with suppress(OSError):
        if found := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()


def _gpu_name() -> str:
    found, device, name = driver(), ctypes.c_int(), ctypes.create_string_buffer(256)
    failed = (
        found is None
        or found.cuInit(0)
        or found.cuDeviceGet(ctypes.byref(device), 0)
        or found.cuDeviceGetName(name, len(name), device)
    )
    return "" if failed else name.value.decode(errors="replace")

"""Whether torch finds a CUDA device, and what a device is called, told without importing torch:
that takes seconds."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import runpy
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path


def sees_cuda() -> bool:
    """What ``torch.cuda.is_available()`` says; False where no torch is installed."""
    built_for = _built_for() if "torch" not in sys.modules else "?"
    if built_for.isdigit():
        return _shows_devices(int(built_for))
    if not built_for:
        return False
    import torch

    return torch.cuda.is_available()


def hardware(device: str, threads: int | None = None, *, count: int = 1) -> str:
    """What a model runs on: the processor and its threads (None: one for each core), or the first
    GPU that this process sees, one of ``count`` that share the model."""
    name = device
    if device == "cpu":
        name = f"{_cpu_name()}, threads: {threads or os.cpu_count()}"
    elif device == "cuda":
        name = _gpu_name() or device
    return f"{count} x {name}" if count > 1 else name


def _cpu_name() -> str:
    with suppress(OSError):
        if found := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()


def _gpu_name() -> str:
    driver, device, name = _driver(), ctypes.c_int(), ctypes.create_string_buffer(256)
    failed = (
        driver is None
        or driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetName(name, len(name), device)
    )
    return "" if failed else name.value.decode(errors="replace")


def _built_for() -> str:
    """The major version of CUDA that the installed torch was built for, as its version file says:
    "" is for CPUs alone, or no torch; "?" something else."""
    found = PathFinder.find_spec("torch")
    if found is None:
        return ""
    try:
        version = runpy.run_path(str(Path(found.origin or "").parent / "version.py"))
    except OSError:
        return "?"
    return "?" if version.get("hip") else str(version.get("cuda", "?") or "").partition(".")[0]


def _shows_devices(major: int) -> bool:
    """Whether there is a driver for this version of CUDA, and shows a device to this process."""
    driver, version, count = _driver(), ctypes.c_int(), ctypes.c_int()
    failed = (
        driver is None
        or driver.cuInit(0)
        or driver.cuDriverGetVersion(ctypes.byref(version))
        or driver.cuDeviceGetCount(ctypes.byref(count))
    )
    return not failed and version.value >= 1000 * major and count.value > 0


def _driver() -> ctypes.CDLL | None:
    """NVIDIA's, None where there is none."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None

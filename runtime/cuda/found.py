"""Whether torch finds a CUDA device, told without importing it: that takes seconds."""

from __future__ import annotations

import ctypes
import runpy
import sys
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
    found, version, count = driver(), ctypes.c_int(), ctypes.c_int()
    failed = (
        found is None
        or found.cuInit(0)
        or found.cuDriverGetVersion(ctypes.byref(version))
        or found.cuDeviceGetCount(ctypes.byref(count))
    )
    return not failed and version.value >= 1000 * major and count.value > 0


def driver() -> ctypes.CDLL | None:
    """NVIDIA's, None where there is none."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None

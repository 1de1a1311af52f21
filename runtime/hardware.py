"""What models run on, by name. torch, whose import takes seconds, is asked only about GPUs."""

from __future__ import annotations

import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

GPU_FILES: Final = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
"""Of which Linux has one where it has a GPU of NVIDIA's or AMD's, or shares that of Windows."""


def sees_cuda() -> bool:
    """What ``torch.cuda.is_available()`` says."""
    if sys.platform == "linux" and not any(map(os.path.exists, GPU_FILES)):
        return False
    import torch

    return torch.cuda.is_available()


def hardware(device: str, threads: int | None = None, *, count: int = 1) -> str:
    """What a model runs on: the processor and its threads (None: one for each core), or the first
    GPU that this process sees, one of ``count`` that share the model."""
    name = device
    if device == "cpu":
        name = f"{cpu_name()}, threads: {threads or os.cpu_count()}"
    elif device == "cuda" and sees_cuda():
        import torch

        name = torch.cuda.get_device_name(0)
    return f"{count} x {name}" if count > 1 else name


def cpu_name() -> str:
    """What the processor is called."""
    with suppress(OSError):
        if model_name := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return model_name[1]
    return platform.processor() or platform.machine()

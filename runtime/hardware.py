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


def hardware(device: str) -> str:
    """What a model runs on: the processor and its threads, or the first GPU that this process
    sees."""
    if device == "cpu":
        return f"{cpu_name()}, threads: {os.cpu_count()}"
    if device == "cuda" and sees_cuda():
        import torch

        return torch.cuda.get_device_name(0)
    return device


def cpu_name() -> str:
    """What the processor is called."""
    with suppress(OSError):
        if model_name := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return model_name[1]
    return platform.processor() or platform.machine()

"""Where Triton kernels run, and what a launch needs to know of the device."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

import torch

SWITCH: Final = "SPECTUNE_KERNELS"
"""Environment variable; 0 leaves fused passes and Triton kernels out: models run the code of
transformers over plain torch."""


_FAILED: Final[set[str]] = set()
"""The types of devices on which a kernel did not run when it was tried."""


def switched_on() -> bool:
    """Whether fused passes and kernels may run."""
    return os.environ.get(SWITCH, "1") != "0"


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on a CPU. It reads the environment when a
    kernel is declared."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def kernels_run(device: torch.device) -> bool:
    """Whether Triton kernels run there: on CUDA (or ROCm) where triton is installed, or anywhere
    with ``TRITON_INTERPRET=1``; unless they are switched off, or one did not run when it was tried.
    """
    allowed = switched_on() and (device.type == "cuda" or interpreted())
    return allowed and device.type not in _FAILED and _installed()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def try_launch(device: torch.device, launch: Callable[[], object]) -> None:
    """Launches kernels on a device. After an error none run there, and a warning says why."""
    try:
        with on(device):
            launch()
    except Exception as error:  # a compiler is missing, or a kernel does not fit the device
        _FAILED.add(device.type)
        logging.getLogger(__name__).warning("Triton kernels are not used: %s", first_line(error))


def first_line(error: Exception) -> str:
    """The first line of what an error says, else its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def on(device: torch.device) -> AbstractContextManager[object]:
    """The context in which kernels are launched on a device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def processors(device: torch.device) -> int:
    """The multiprocessors of a GPU; of the interpreter as many as a small one's, so that its
    launches are cut as a GPU's are."""
    if device.type != "cuda":
        return 16
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(number: int) -> int:
    """The least power of two that is at least ``number``, and 1."""
    return 1 << max(0, number - 1).bit_length()

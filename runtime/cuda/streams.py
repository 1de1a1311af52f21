"""Two branches of a draft's pass on two CUDA streams. No GPU has run this yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

C = TypeVar("C")
R = TypeVar("R")


def forked(
    core: Callable[[], C], router: Callable[[], R], device: torch.device, *, cuda: Any = torch.cuda
) -> tuple[C, R]:
    """Runs the router beside the draft's core, whose results are returned (algorithm 1, lines 3 to
    12).

    On CUDA the router is put on a side stream that begins where the current stream stands, and the
    current stream waits for it behind the core, so that what both return can be used at once. Fork
    and join are events: nothing waits on the host, and a CUDA graph that is being captured on the
    current stream takes both branches in. The router is issued first: it is short, and a core
    issued before it would have run by the time that the host comes to the router. Memory is safe
    without more: the join puts whatever reuses it behind both, as long as the router's inputs stay
    referenced until this returns (the callables hold them). Elsewhere the router runs, then the
    core. ``cuda`` stands for ``torch.cuda``.
    """
    if device.type != "cuda":
        routed = router()
        return core(), routed
    with cuda.device(device):
        main, side = cuda.current_stream(device), _side_stream(device, cuda)
        begun, done = cuda.Event(), cuda.Event()
        begun.record(main)
        side.wait_event(begun)
        try:
            with cuda.stream(side):
                routed = router()
            cored = core()
        finally:  # also behind a failure: what is captured must be joined
            done.record(side)
            main.wait_event(done)
    return cored, routed


@functools.cache
def _side_stream(device: torch.device, cuda: Any) -> Any:
    """One stream per device, which later forks reuse."""
    return cuda.Stream(device)

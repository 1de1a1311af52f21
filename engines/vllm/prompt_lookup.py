"""vLLM's prompt lookup over a known text: what it would copy from every start, without vLLM.

It copies from the earliest place where the longest suffix of ``least`` to ``most`` tokens occurred
before, and goes on copying what stands there; our own n-gram draft copies from the latest, and
looks again at every token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spectune.traces.tables import Trajectory

LEAST, MOST = 1, 3
"""Shortest and longest suffix that servers are started with (:mod:`engines.vllm.command`)."""
REACH = 64
"""Tokens looked at from a start; no window is longer."""


def copied(trajectory: Trajectory, least: int = LEAST, most: int = MOST) -> npt.NDArray[np.uint8]:
    """For every start in the output how many tokens a copy would have and how many of them the text
    goes on with, both at most :data:`REACH`; uint8 [2, L]."""
    text = np.concatenate((trajectory.prompt_ids, trajectory.output_ids)).astype(np.int64)
    starts = np.arange(len(trajectory.prompt_ids), len(text))
    source = _sources(text, least, most)[starts]
    length = np.where(source < 0, 0, np.minimum(starts - source, REACH))
    agree = np.zeros(len(starts), dtype=np.int64)
    alive = length > 0
    for j in range(REACH):
        alive &= (j < length) & (starts + j < len(text))
        if not alive.any():
            break
        alive[alive] = text[source[alive] + j] == text[starts[alive] + j]
        agree += alive
    return np.stack((length, agree)).astype(np.uint8)


def _sources(text: npt.NDArray[np.int64], least: int, most: int) -> npt.NDArray[np.int64]:
    """By the number of tokens read the place copied from; -1 where no suffix occurred before. Int64
    [len(text) + 1]."""
    found = np.full(len(text) + 1, -1, dtype=np.int64)
    tokens = np.unique(text, return_inverse=True)[1]
    grams = np.zeros(
        len(text), dtype=np.int64
    )  # by the token that they end with: which n-gram they are
    for n in range(1, min(most, len(text)) + 1):
        before = np.concatenate(([0], grams[:-1]))
        grams = np.unique(before * len(text) + tokens, return_inverse=True)[1]
        if n < least:
            continue
        ends = np.arange(n - 1, len(text))
        first = np.full(len(text), len(text))
        np.minimum.at(first, grams[ends], ends)
        again = ends[first[grams[ends]] < ends]
        found[again + 1] = first[grams[again]] + 1
    return found

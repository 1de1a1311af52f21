"""splitmix64 as a counter-based generator: numbers that are pure functions of a key and a counter,
alike in Python and compiled code."""

from __future__ import annotations

from typing import Final

import numpy as np

from spectune.runtime.policies.jit import compiled

MULTIPLIERS: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The Weyl constant, and those of the finaliser's two rounds."""
_WEYL, _FIRST, _SECOND = (np.uint64(c) for c in MULTIPLIERS)


def as_int64(word: int) -> int:
    """A 64-bit word as int64 has it."""
    return word - (1 << 64) if word >> 63 else word


@compiled(inline=True)
def mix64(x: np.uint64) -> np.uint64:
    """splitmix64's finaliser: a bijection of 64-bit words whose every output bit depends on every
    input bit."""
    z = np.uint64(x)
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


@compiled(inline=True)
def hash_uniform(key: int, counter: int) -> float:
    """A number in [0, 1) that is a pure function of both arguments: splitmix64's ``counter``-th
    output from ``key``."""
    z = np.uint64(key) + np.uint64(counter + 1) * _WEYL
    return np.float64(mix64(z) >> np.uint64(11)) * 1.1102230246251565e-16

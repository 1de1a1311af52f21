"""The machine's pace, told between rounds by passes that are always the same, so that executions minutes apart can be compared.

A shared machine is slower now and then by 15% and more, over seconds rather than rounds. Brought to one pace, executions of one request
differ by 5% where they differed by 17%, and by 10% at the pace that the executions before and after tell (docs/log.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.decoder import Decoded
from runtime.loading import LoadedPair

Key = TypeVar("Key", bound=Hashable)
FloatArray = NDArray[np.float64]


class Pacer:
    """What a decoder calls after every round: one pass of a draft (if the pair has one that is a model), then one of the target over four
    tokens. Both, as a mood that slows the one (whose weights fill a shared cache) may leave the other alone."""

    def __init__(self, pair: LoadedPair, clock: Callable[[], float] = time.perf_counter) -> None:
        prefix = [t % pair.target.vocab_size for t in (100, 200, 300, 400)]
        self.passes = [*((draft, prefix[:1]) for draft in list(pair.drafts.values())[-1:]), (pair.target, prefix)]
        self._clock = clock
        self._taken: list[float] = []

    def __call__(self) -> None:
        began = self._clock()
        for model, prefix in self.passes:
            model.canonical(prefix)
        self._taken.append(self._clock() - began)

    def taken(self) -> FloatArray:
        """Seconds after every round since last asked."""
        found, self._taken = np.array(self._taken), []
        return found

    @staticmethod
    def slower(taken: Mapping[Key, Sequence[FloatArray]]) -> dict[Key, list[FloatArray]]:
        """How much slower than usual (the median of all) the machine was at every round of every execution."""
        usual = float(np.median(np.concatenate([seconds for runs in taken.values() for seconds in runs])))
        return {key: [around(seconds) / usual for seconds in runs] for key, runs in taken.items()}


def around(taken: FloatArray) -> FloatArray:
    """The pace at every round, from the seconds taken after each: the mean of before and after it; the first has none before."""
    return (taken[np.maximum(np.arange(len(taken)) - 1, 0)] + taken) / 2


def at_pace(decoded: Decoded, slower: FloatArray) -> tuple[FloatArray, float]:
    """Seconds of an execution's rounds, [rounds], and of what is no round (prefill), had the machine not been ``slower`` by these factors;
    by the seconds that passes took instead of factors, it is so many passes."""
    rounds = np.array([s.round_s for s in decoded.steps])
    return rounds / slower, (decoded.seconds - float(rounds.sum())) / float(slower[0])

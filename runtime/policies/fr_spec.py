"""FR-Spec: shortlists of the most frequent tokens; and PA-FR, which shortens them by position
(DynaSpec, appendix A.3). Fitting is :mod:`optimizer.fit.fr_spec`.

A shortlist is a set of token ids, kept as an ascending int64 array: the rows of the draft's output
head that a step evaluates. Verification is over the whole vocabulary, so a shortlist changes what
is drafted and never the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.blocks import Artifact, Block, Budget
from spectune.runtime.policies.refusals import stored_count, stored_numbers

IntArray = npt.NDArray[np.int64]


class FrequencyShortlist(Block):
    """FR-Spec: the draft evaluates the ``size`` most frequent tokens. ``artifact``: the frequency
    order (``fit frequencies``)."""

    kind: Literal["frequency"] = "frequency"
    size: Budget = 1024
    artifact: Artifact


class PositionFrequencyShortlist(Block):
    """PA-FR (DynaSpec, appendix A.3): the most frequent tokens, ``k_max`` of them at draft steps 0
    and 1, floor(k_max / (t + 1)) at step t. ``artifact``: the frequency order (``fit
    frequencies``)."""

    kind: Literal["position_frequency"] = "position_frequency"
    k_max: Budget = 2048
    artifact: Artifact


def frequency_budget(step: int, k_max: int) -> int:
    """K_fr(t) of appendix A.3 (PA-FR): tokens that draft step ``step`` = t evaluates, counted from
    0 within a round.

    k_max at t = 0 and 1, then floor(k_max / (t + 1)); at least 1.
    """
    return max(1, k_max if step < 2 else k_max // (step + 1))


@dataclass(frozen=True, eq=False)
class Frequencies:
    """The vocabulary in the order in which shortlists take it (FR-Spec; appendix A.3).

    ``order`` int64 [vocab]: every token id once; the first ``always`` are in every shortlist (EOS
    and the like), the others follow by frequency, most frequent first, ties by lower id. Raises
    ValueError for anything else but that order of the others.
    """

    order: IntArray
    always: int = 0

    def __post_init__(self) -> None:
        order = self.order
        of_tokens = order.ndim == 1 and order.dtype == np.int64 and len(order)
        if not of_tokens or (np.sort(order) != np.arange(len(order))).any():
            raise ValueError(
                "a frequency order must hold every token id once, as int64 [vocab]; this is "
                f"{order.dtype} {list(order.shape)}"
            )
        if not 0 <= self.always <= len(order):
            raise ValueError(f"always must be within 0..{len(order)} tokens, not {self.always}")

    @property
    def vocab(self) -> int:
        return len(self.order)

    @cached_property
    def rank(self) -> IntArray:
        """Place of every token in ``order``, from 0; int64 [vocab]. A token is in a shortlist of n
        tokens where its rank is below n."""
        rank = np.empty_like(self.order)
        rank[self.order] = np.arange(len(self.order))
        rank.setflags(write=False)
        return rank

    def size(self, size: int) -> int:
        """Tokens that a shortlist of ``size`` takes: ``size`` raised to ``always`` and to 1, and at
        most the vocabulary."""
        return min(max(size, self.always, 1), len(self.order))

    def to_document(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(JSON-ready document, arrays) for an artifact of kind :data:`FREQUENCIES`;
        :meth:`from_document` reads them."""
        return {"vocab": self.vocab, "always": self.always}, {"order": self.order}

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> Frequencies:
        """The frequencies of :meth:`to_document`. Raises one of :data:`refusals.MALFORMED` for
        anything else."""
        order = stored_numbers(arrays, "order", "iu").astype(np.int64)
        made = cls(order, stored_count(document, "always"))
        stored_count(document, "vocab", made.vocab)
        return made

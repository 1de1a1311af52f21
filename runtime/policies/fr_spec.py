"""FR-Spec: shortlists of the most frequent tokens; and PA-FR, which shortens them by position
(DynaSpec, appendix A.3). Fitting is :mod:`optimizer.fit.fr_spec`; drafting with them is
:mod:`runtime.shortlists`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.blocks import Artifact, Block, Budget, Fitted, Search

IntArray = npt.NDArray[np.int64]


class Shortlist(Block):
    """A part of the draft's output head. Budgets are searched by powers of two, so that what is
    recorded of one serves many policies."""

    reads_draft = True

    @classmethod
    def nearest(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: 1 << (value.bit_length() - 1) if isinstance(value, int) else value
            for key, value in values.items()
        }


class FrequencyShortlist(Shortlist):
    """FR-Spec: the draft evaluates the ``size`` most frequent tokens. ``artifact``: the frequency
    order (``fit frequencies``)."""

    shown = ("size",)
    kind: Literal["frequency"] = "frequency"
    size: Annotated[Budget, Search(64, 16384, log=True)] = 1024
    artifact: Annotated[Artifact, Fitted()]

    def budget(self, step: int) -> int:
        """Tokens of draft step ``step``."""
        return self.size


class PositionFrequencyShortlist(Shortlist):
    """PA-FR (DynaSpec, appendix A.3): the most frequent tokens, ``k_max`` of them at draft steps 0
    and 1, floor(k_max / (t + 1)) at step t. ``artifact``: the frequency order (``fit
    frequencies``)."""

    shown = ("k_max",)
    kind: Literal["position_frequency"] = "position_frequency"
    k_max: Annotated[Budget, Search(64, 16384, log=True, name="size")] = 2048
    artifact: Annotated[Artifact, Fitted()]

    def budget(self, step: int) -> int:
        """Tokens of draft step ``step``."""
        return frequency_budget(step, self.k_max)


def frequency_budget(step: int, k_max: int) -> int:
    """K_fr(t) of appendix A.3 (PA-FR): tokens that draft step ``step`` = t evaluates, counted from
    0 within a round.

    k_max at t = 0 and 1, then floor(k_max / (t + 1)); at least 1."""
    return max(1, k_max if step < 2 else k_max // (step + 1))


@dataclass(frozen=True, eq=False)
class Frequencies:
    """The vocabulary in the order in which shortlists take it (FR-Spec; appendix A.3): ``order``
    int64 [vocab] has every token id once; the first ``always`` are in every shortlist (EOS and the
    like), the others follow by frequency, most frequent first, ties by lower id."""

    order: IntArray
    always: int = 0

    @property
    def vocab(self) -> int:
        return len(self.order)

    @cached_property
    def rank(self) -> IntArray:
        """Place of every token in ``order``, from 0; int64 [vocab]. A token is in a shortlist of n
        tokens where its rank is below n."""
        return self.order.argsort()

    def size(self, size: int) -> int:
        """Tokens that a shortlist of ``size`` takes: ``size`` raised to ``always`` and to 1, and at
        most the vocabulary."""
        return min(max(size, self.always, 1), len(self.order))

    def to_document(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(JSON-ready document, arrays) for an artifact of kind :data:`artifacts.FREQUENCIES`;
        :meth:`from_document` reads them."""
        return {"vocab": self.vocab, "always": self.always}, {"order": self.order}

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> Frequencies:
        """The frequencies of :meth:`to_document`."""
        return cls(np.asarray(arrays["order"], dtype=np.int64), int(document["always"]))

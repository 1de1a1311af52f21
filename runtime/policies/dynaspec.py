"""DynaSpec: shortlists of token clusters that a router selects by context (section 4.2; equation
3). The router is :mod:`runtime.policies.router`; fitting is :mod:`optimizer.fit.dynaspec` and
:mod:`optimizer.fit.clusters`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from spectune.runtime.policies.blocks import Artifact, Block, Budget
from spectune.runtime.policies.refusals import stored_count, stored_numbers

IntArray = npt.NDArray[np.int64]


class ClustersShortlist(Block):
    """DynaSpec, section 4.2: a router selects token clusters by context, ``k0`` of them at draft
    step 0, ``k1`` at step 1, floor((k1 + t) / (2 t)) at step t, never fewer than ``k_min``
    (equation 3). ``artifact``: router and clusters (``fit router``)."""

    kind: Literal["clusters"] = "clusters"
    k0: Budget = 12
    k1: Budget = 8
    k_min: Budget = 2
    artifact: Artifact

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if not self.k0 >= self.k1 >= self.k_min:
            raise ValueError(
                f"the budget of clusters decays: k0 {self.k0} >= k1 {self.k1} >= k_min "
                f"{self.k_min} does not hold"
            )
        return self


def cluster_budget(step: int, k0: int, k1: int, k_min: int) -> int:
    """k_c(t) of equation 3: clusters that draft step ``step`` = t evaluates, counted from 0 within
    a round.

    k0 at t = 0, k1 at t = 1, then floor((k1 + t) / (2 t)), which is k1 / (2 t) rounded to the
    nearest, halves up (algorithm 1 rounds it down instead); never below ``k_min``, nor below 1.
    """
    wanted = (k0, k1)[step] if step < 2 else (k1 + step) // (2 * step)
    return max(wanted, k_min, 1)


@dataclass(frozen=True, eq=False)
class Clusters:
    """A partition of the vocabulary into M clusters of any sizes, empty ones included (section
    4.2).

    ``of`` int64 [vocab]: the cluster of each token; ``count``: M. :meth:`of_assignment` builds
    them.
    """

    of: IntArray
    count: int

    @classmethod
    def of_assignment(cls, assignment: npt.ArrayLike, count: int) -> Clusters:
        """The clusters of ``assignment``, whole numbers [vocab] within 0..count - 1. Raises
        ValueError for anything else."""
        of = np.asarray(assignment)
        if of.ndim != 1 or not len(of) or of.dtype.kind not in "iu":
            raise ValueError(
                f"an assignment to clusters must be whole numbers [vocab], not {of.dtype} "
                f"{list(of.shape)}"
            )
        of = of.astype(np.int64)
        if count < 1 or of.min() < 0 or of.max() >= count:
            raise ValueError(
                f"an assignment to {count} clusters must lie within 0..{count - 1}, this one is "
                f"{of.min()}..{of.max()}"
            )
        return cls(of, count)

    @property
    def vocab(self) -> int:
        return len(self.of)

    @cached_property
    def sizes(self) -> IntArray:
        """Tokens of each cluster, int64 [M]."""
        return np.bincount(self.of, minlength=self.count)

    def ids(self, clusters: npt.ArrayLike) -> IntArray:
        """The union of ``clusters`` (numbers below M, any shape, repeats allowed): token ids
        ascending, int64."""
        kept = np.zeros(self.count, dtype=np.bool_)
        kept[np.asarray(clusters, dtype=np.int64)] = True
        return np.flatnonzero(kept[self.of])

    def to_document(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(JSON-ready document, arrays); :meth:`from_document` reads them."""
        return {"vocab": self.vocab, "clusters": self.count}, {"of": self.of}

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> Clusters:
        """The clusters of :meth:`to_document`. Raises one of :data:`refusals.MALFORMED` for
        anything else."""
        of, count = stored_numbers(arrays, "of", "iu"), stored_count(document, "clusters")
        if count > of.size:
            raise ValueError(f"{count} clusters are too many for {of.size} tokens")
        made = cls.of_assignment(of, count)
        stored_count(document, "vocab", made.vocab)
        return made

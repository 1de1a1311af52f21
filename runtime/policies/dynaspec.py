"""DynaSpec: shortlists of token clusters that a router selects by context (section 4.2; equation
3). Fitting is :mod:`optimizer.fit.dynaspec`; drafting with them
is :mod:`runtime.shortlists`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from spectune.runtime.policies.blocks import Artifact, Budget, Fitted, Search
from spectune.runtime.policies.fr_spec import Shortlist

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Arrays = Mapping[str, npt.NDArray[Any]]
ROUTER_WEIGHTS: Final = ("w1", "b1", "w2", "b2")


class ClustersShortlist(Shortlist):
    """DynaSpec, section 4.2: a router selects token clusters by context, ``k0`` of them at draft
    step 0, ``k1`` at step 1, floor((k1 + t) / (2 t)) at step t, never fewer than ``k_min``
    (equation 3). ``artifact``: router and clusters (``fit router``)."""

    shown = ("k0", "k1", "k_min")
    kind: Literal["clusters"] = "clusters"
    k0: Annotated[Budget, Search(1, 128, log=True)] = 12
    k1: Annotated[Budget, Search(1, 128, log=True)] = 8
    k_min: Annotated[Budget, Search(1, 128, log=True)] = 2
    artifact: Annotated[Artifact, Fitted()]

    @classmethod
    def nearest(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = super().nearest(values)
        k1 = min(values["k1"], values["k0"])
        return {**values, "k1": k1, "k_min": min(values["k_min"], k1)}

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if not self.k0 >= self.k1 >= self.k_min:
            raise ValueError(
                f"the budget of clusters decays: k0 {self.k0} >= k1 {self.k1} >= k_min "
                f"{self.k_min} does not hold"
            )
        return self

    def budget(self, step: int) -> int:
        """Clusters of each node at draft step ``step``."""
        return cluster_budget(step, self.k0, self.k1, self.k_min)


def cluster_budget(step: int, k0: int, k1: int, k_min: int) -> int:
    """k_c(t) of equation 3: clusters that draft step ``step`` = t evaluates, counted from 0 within
    a round.

    k0 at t = 0, k1 at t = 1, then floor((k1 + t) / (2 t)), which is k1 / (2 t) rounded to the
    nearest, halves up (algorithm 1 rounds it down instead); never below ``k_min``, nor below 1."""
    clusters = (k0, k1)[step] if step < 2 else (k1 + step) // (2 * step)
    return max(clusters, k_min, 1)


@dataclass(frozen=True, eq=False)
class Clusters:
    """A partition of the vocabulary into M clusters of any sizes, empty ones included (section
    4.2): ``of`` int64 [vocab] is the cluster of each token, ``count`` is M."""

    of: IntArray
    count: int

    @property
    def vocab(self) -> int:
        return len(self.of)

    @cached_property
    def sizes(self) -> IntArray:
        """Tokens of each cluster, int64 [M]."""
        return np.bincount(self.of, minlength=self.count)

    def to_document(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(JSON-ready document, arrays); :meth:`from_document` reads them."""
        return {"vocab": self.vocab, "clusters": self.count}, {"of": self.of}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], arrays: Arrays) -> Clusters:
        """The clusters of :meth:`to_document`."""
        return cls(np.asarray(arrays["of"], dtype=np.int64), int(document["clusters"]))


@dataclass(frozen=True, eq=False)
class Routing:
    """An artifact of a router: its weights (float32 ``w1`` [hidden, d_r], ``b1`` [hidden], ``w2``
    [M, hidden], ``b2`` [M]; :class:`runtime.shortlists.Router` evaluates them), the clusters that
    it scores, and the hash of the output head that both were fitted on."""

    weights: tuple[FloatArray, ...]
    clusters: Clusters
    head: str

    @property
    def inputs(self) -> int:
        """d_r, the width of what the router reads."""
        return int(self.weights[0].shape[1])

    def to_document(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(JSON-ready document, arrays); :meth:`from_document` reads them."""
        document, arrays = self.clusters.to_document()
        sizes = {"inputs": self.inputs, "hidden": len(self.weights[1])}
        weights = dict(zip(ROUTER_WEIGHTS, self.weights, strict=True))
        return {**sizes, **document, "head": self.head}, {**weights, **arrays}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], arrays: Arrays) -> Routing:
        """The routing of :meth:`to_document`."""
        weights = tuple(np.asarray(arrays[name], dtype=np.float32) for name in ROUTER_WEIGHTS)
        return cls(weights, Clusters.from_document(document, arrays), document["head"])

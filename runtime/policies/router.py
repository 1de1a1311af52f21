"""DynaSpec's router (section 4.2): which token clusters a draft step evaluates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from spectune.runtime.policies.dynaspec import Clusters
from spectune.runtime.policies.refusals import stored_count, stored_numbers

Document = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]
ROUTER_WEIGHTS: Final = ("w1", "b1", "w2", "b2")
ROUTER_SIZES: Final = ("inputs", "hidden", "clusters")
HASH_DIGITS: Final = 16


@dataclass(frozen=True, eq=False)
class Router:
    """The router r of section 4.2: scores clusters by the current token's embedding and the draft's
    previous hidden state.

    s = w2 relu(w1 [E(x_t), H_{t-1}] + b1) + b2, with float32 tensors ``w1`` [hidden, d_r], ``b1``
    [hidden], ``w2`` [M, hidden] and ``b2`` [M] on one device; d_r = d_e + d. A score is the
    log-odds that a cluster holds a plausible next token. Raises ValueError for other shapes or
    dtypes and for weights that are not finite.
    """

    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor

    def __post_init__(self) -> None:
        hidden, count = self.b1.shape[:1].numel(), self.b2.shape[:1].numel()
        shapes = [list(getattr(self, name).shape) for name in ROUTER_WEIGHTS]
        inputs = (shapes[0] or [0])[-1]
        wanted = [[hidden, inputs], [hidden], [count, hidden], [count]]
        if shapes != wanted or min(hidden, count, inputs) < 1:
            raise ValueError(
                "router weights must be w1 [hidden, d_r], b1 [hidden], w2 [M, hidden] and b2 [M], "
                f"not {shapes}"
            )
        for name in ROUTER_WEIGHTS:
            w = getattr(self, name)
            if w.dtype != torch.float32 or not bool(torch.isfinite(w).all()):
                raise ValueError(
                    f"router weights must be finite float32 numbers; {name} is not ({w.dtype})"
                )

    @property
    def inputs(self) -> int:
        """d_r, the width of what it reads."""
        return int(self.w1.shape[1])

    @property
    def hidden(self) -> int:
        return int(self.w1.shape[0])

    @property
    def clusters(self) -> int:
        """M."""
        return int(self.w2.shape[0])

    def to(self, device: torch.device | str) -> Router:
        """The same router with its weights on ``device``."""
        return Router(*(getattr(self, name).to(device) for name in ROUTER_WEIGHTS))

    def scores(self, embedding: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Scores of all clusters, float32 [n, M], for the embeddings [n, d_e] of n current tokens
        and the draft's hidden states [n, d] of the tokens before them; d_e + d is d_r."""
        x, linear = torch.cat((embedding, previous), -1), torch.nn.functional.linear
        dtype = torch.promote_types(x.dtype, torch.float32)  # float64 where the draft is in it
        w1, b1, w2, b2 = (getattr(self, name).to(dtype) for name in ROUTER_WEIGHTS)
        return linear(linear(x.to(dtype), w1, b1).relu_(), w2, b2).float()


def top_clusters(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` clusters of highest score of every row of ``scores`` [n, M], best first, ties by
    lower number; int64 [n, min(k, M)]."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@dataclass(frozen=True, eq=False)
class Routing:
    """What an artifact of a router holds: a router, the clusters it scores, and :func:`head_hash`
    of the output head that these were fitted on. Raises ValueError where router and clusters differ
    in M."""

    router: Router
    clusters: Clusters
    head: str

    def __post_init__(self) -> None:
        if self.router.clusters != self.clusters.count:
            raise ValueError(
                f"the router scores {self.router.clusters} clusters, but there are "
                f"{self.clusters.count}"
            )

    def to_document(self) -> tuple[Document, Arrays]:
        """(JSON-ready document, arrays) for an artifact of a router; :meth:`from_document` reads
        them."""
        sizes = {name: getattr(self.router, name) for name in ROUTER_SIZES}
        weights = {name: getattr(self.router, name).cpu().numpy() for name in ROUTER_WEIGHTS}
        of_clusters, partition = self.clusters.to_document()
        return {**sizes, **of_clusters, "head": self.head}, {**weights, **partition}

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> Routing:
        """The routing of :meth:`to_document`, weights on the CPU. Raises one of
        :data:`refusals.MALFORMED` for anything else."""
        head = document["head"]
        if not isinstance(head, str):
            raise ValueError("head must be the hash of an output head")
        clusters = Clusters.from_document(document, arrays)
        weights = (stored_numbers(arrays, name, "f") for name in ROUTER_WEIGHTS)
        router = Router(*(torch.from_numpy(w.astype(np.float32)) for w in weights))
        for name in ROUTER_SIZES:
            stored_count(document, name, getattr(router, name))
        return cls(router, clusters, head)


def head_hash(weight: torch.Tensor) -> str:
    """The first :data:`HASH_DIGITS` hexadecimal digits of the SHA-256 of an output head's weights
    [vocab, d], float32 bytes in row order.

    The values are rounded to bfloat16 first, so that a checkpoint has one hash whether it is loaded
    in float32 or in bfloat16.
    """
    values = weight.detach().to("cpu", torch.bfloat16).float().numpy()
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()[:HASH_DIGITS]

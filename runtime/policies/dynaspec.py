"""DynaSpec: vocabulary shortlists for drafts. Budgets by step (equation 3; appendix A.3), the frequency order of FR-Spec, the clusters and
the router of section 4.2. Fitting them is :mod:`optimizer.fit.fr_spec`, :mod:`optimizer.fit.clusters` and
:mod:`optimizer.fit.dynaspec`; their theory is :mod:`optimizer.overlap`.

A shortlist is a set of token ids, kept as an ascending int64 array: the rows of the draft's output head that a step evaluates.
Verification is over the whole vocabulary, so a shortlist changes what is drafted and never the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from traces.errors import PolicyError

IntArray = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]
Document = dict[str, Any]

ROUTER_WEIGHTS: Final = ("w1", "b1", "w2", "b2")
HASH_DIGITS: Final = 16


def cluster_budget(step: int, k0: int, k1: int, k_min: int) -> int:
    """k_c(t) of equation 3: clusters that draft step ``step`` = t evaluates, counted from 0 within a round.

    k0 at t = 0, k1 at t = 1, then floor((k1 + t) / (2 t)), which is k1 / (2 t) rounded to the nearest, halves up (algorithm 1 rounds it
    down instead); never below ``k_min``, nor below 1. Raises ValueError for a negative step.
    """
    if step < 0:
        raise ValueError(f"draft steps count from 0, there is no step {step}")
    wanted = (k0, k1)[step] if step < 2 else (k1 + step) // (2 * step)
    return max(wanted, k_min, 1)


def frequency_budget(step: int, k_max: int) -> int:
    """K_fr(t) of appendix A.3 (PA-FR): tokens that draft step ``step`` = t evaluates, counted from 0 within a round.

    k_max at t = 0 and 1, then floor(k_max / (t + 1)); at least 1. Raises ValueError for a negative step.
    """
    if step < 0:
        raise ValueError(f"draft steps count from 0, there is no step {step}")
    return max(1, k_max if step < 2 else k_max // (step + 1))


@dataclass(frozen=True, eq=False)
class Frequencies:
    """The vocabulary in the order in which shortlists take it (FR-Spec; appendix A.3).

    ``order`` int64 [vocab]: every token id once; the first ``always`` are in every shortlist (EOS and the like), the others follow by
    frequency, most frequent first, ties by lower id. Raises ValueError for anything else but that order of the others.
    """

    order: IntArray
    always: int = 0

    def __post_init__(self) -> None:
        order = self.order
        if order.ndim != 1 or order.dtype != np.int64 or not _is_permutation(order):
            raise ValueError(
                f"a frequency order must hold every token id once, as int64 [vocab]; this is {order.dtype} {list(order.shape)}"
            )
        if not 0 <= self.always <= len(order):
            raise ValueError(f"always must be within 0..{len(order)} tokens, not {self.always}")

    @property
    def vocab(self) -> int:
        return len(self.order)

    @cached_property
    def rank(self) -> IntArray:
        """Place of every token in ``order``, from 0; int64 [vocab]. A token is in ``ids(size)`` where its rank is below its length."""
        rank = np.empty_like(self.order)
        rank[self.order] = np.arange(len(self.order))
        rank.setflags(write=False)
        return rank

    def size(self, size: int) -> int:
        """Tokens that :meth:`ids` gives: ``size`` raised to ``always`` and to 1, and at most the vocabulary."""
        return min(max(size, self.always, 1), len(self.order))

    def ids(self, size: int) -> IntArray:
        """The shortlist of ``size`` tokens, ids ascending, int64 [self.size(size)]."""
        return np.sort(self.order[: self.size(size)])

    def to_document(self) -> tuple[Document, Arrays]:
        """(JSON-ready document, arrays) for an artifact of kind :data:`FREQUENCIES`; :meth:`from_document` reads them."""
        return {"vocab": self.vocab, "always": self.always}, {"order": self.order}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Frequencies:
        """The frequencies of :meth:`to_document`. Raises ValueError for anything else."""
        what = "frequencies"
        made = cls(_integers(what, arrays, "order"), _count(what, document, "always"))
        _agree(what, document, vocab=made.vocab)
        return made


@dataclass(frozen=True, eq=False)
class Clusters:
    """A partition of the vocabulary into M clusters of any sizes, empty ones included (section 4.2).

    ``of`` int64 [vocab]: the cluster of each token; ``members`` int64 [vocab]: the token ids cluster by cluster, ascending inside each;
    ``offsets`` int64 [M + 1]: cluster m is ``members[offsets[m]:offsets[m + 1]]``. :meth:`of_assignment` builds them.
    """

    of: IntArray
    members: IntArray
    offsets: IntArray

    @classmethod
    def of_assignment(cls, assignment: npt.ArrayLike, count: int) -> Clusters:
        """The clusters of ``assignment``, whole numbers [vocab] within 0..count - 1. Raises ValueError for anything else."""
        of = np.asarray(assignment)
        if of.ndim != 1 or not len(of) or of.dtype.kind not in "iu":
            raise ValueError(f"an assignment to clusters must be whole numbers [vocab], not {of.dtype} {list(of.shape)}")
        of = of.astype(np.int64)
        if count < 1 or of.min() < 0 or of.max() >= count:
            raise ValueError(
                f"an assignment to {count} clusters must lie within 0..{count - 1}, this one is {of.min()}..{of.max()}"
            )
        offsets = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(of, minlength=count), out=offsets[1:])
        return cls(of, np.argsort(of, kind="stable").astype(np.int64), offsets)

    @property
    def vocab(self) -> int:
        return len(self.of)

    @property
    def count(self) -> int:
        """M."""
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> IntArray:
        """Tokens of each cluster, int64 [M]."""
        return np.diff(self.offsets)

    def ids(self, clusters: npt.ArrayLike) -> IntArray:
        """The union of ``clusters`` (numbers, any shape, repeats allowed): token ids ascending, int64. Raises ValueError for an
        unknown cluster."""
        chosen = np.asarray(clusters, dtype=np.int64).reshape(-1)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= self.count):
            raise ValueError(f"clusters {chosen.tolist()} are not all within 0..{self.count - 1}")
        kept = np.zeros(self.count, dtype=np.bool_)
        kept[chosen] = True
        return np.flatnonzero(kept[self.of])

    def to_document(self) -> tuple[Document, Arrays]:
        """(JSON-ready document, arrays); :meth:`from_document` reads them."""
        return {"vocab": self.vocab, "clusters": self.count}, {"of": self.of}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Clusters:
        """The clusters of :meth:`to_document`. Raises ValueError for anything else."""
        of, count = _integers("clusters", arrays, "of"), _count("clusters", document, "clusters")
        if count > of.size:
            raise ValueError(f"not clusters: its document says {count} of them, its arrays have {of.size} tokens")
        made = cls.of_assignment(of, count)
        _agree("clusters", document, vocab=made.vocab)
        return made


@dataclass(frozen=True, eq=False)
class Router:
    """The router r of section 4.2: scores clusters by the current token's embedding and the draft's previous hidden state.

    s = w2 relu(w1 [E(x_t), H_{t-1}] + b1) + b2, with float32 tensors ``w1`` [hidden, d_r], ``b1`` [hidden], ``w2`` [M, hidden] and
    ``b2`` [M] on one device; d_r = d_e + d. A score is the log-odds that a cluster holds a plausible next token. Raises ValueError for
    other shapes or dtypes and for weights that are not finite.
    """

    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in ROUTER_WEIGHTS}
        hidden, count = self.b1.shape[:1].numel(), self.b2.shape[:1].numel()
        shapes = {name: list(w.shape) for name, w in weights.items()}
        inputs = shapes["w1"][-1] if shapes["w1"] else 0
        wanted = {"w1": [hidden, inputs], "b1": [hidden], "w2": [count, hidden], "b2": [count]}
        if shapes != wanted or min(hidden, count, inputs) < 1:
            raise ValueError(f"router weights must be w1 [hidden, d_r], b1 [hidden], w2 [M, hidden] and b2 [M], not {shapes}")
        for name, w in weights.items():
            if w.dtype != torch.float32 or not bool(torch.isfinite(w).all()):
                raise ValueError(f"router weights must be finite float32 numbers; {name} is not ({w.dtype})")

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
        """Scores of all clusters, float32 [n, M], for the embeddings [n, d_e] of n current tokens and the draft's hidden states
        [n, d] of the tokens before them. Raises ValueError where d_e + d is not d_r."""
        x = torch.cat((embedding, previous), -1).float()
        if x.shape[-1] != self.inputs:
            raise ValueError(
                f"a router of {self.inputs} inputs cannot read embeddings of {embedding.shape[-1]} and states of {previous.shape[-1]}"
            )
        linear = torch.nn.functional.linear
        return linear(linear(x, self.w1, self.b1).relu_(), self.w2, self.b2)

    def to_document(self) -> tuple[Document, Arrays]:
        """(JSON-ready document, arrays); :meth:`from_document` reads them."""
        sizes = {"inputs": self.inputs, "hidden": self.hidden, "clusters": self.clusters}
        return sizes, {name: getattr(self, name).cpu().numpy() for name in ROUTER_WEIGHTS}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Router:
        """The router of :meth:`to_document`, on the CPU. Raises ValueError for anything else."""
        weights = []
        for name in ROUTER_WEIGHTS:
            array = _array("router", arrays, name)
            if array.dtype.kind != "f":
                raise ValueError(f"not a router: {name} must be floating-point numbers, not {array.dtype}")
            weights.append(torch.from_numpy(array.astype(np.float32)))
        made = cls(*weights)
        _agree("router", document, inputs=made.inputs, hidden=made.hidden, clusters=made.clusters)
        return made


def top_clusters(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` clusters of highest score of every row of ``scores`` [n, M], best first, ties by lower number; int64 [n, min(k, M)]."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@dataclass(frozen=True, eq=False)
class Routing:
    """What an artifact of kind :data:`ROUTER` holds: a router, the clusters it scores, and :func:`head_hash` of the output head that
    these were fitted on. Raises ValueError where router and clusters differ in M."""

    router: Router
    clusters: Clusters
    head: str

    def __post_init__(self) -> None:
        if self.router.clusters != self.clusters.count:
            raise ValueError(f"the router scores {self.router.clusters} clusters, but there are {self.clusters.count}")

    def check_head(self, weight: torch.Tensor) -> None:
        """Raises PolicyError when ``weight`` [vocab, d] is not the output head that the clusters were fitted on."""
        if (found := head_hash(weight)) != self.head:
            raise PolicyError(
                f"the clusters were fitted on another output head (hash {self.head}) than this draft's (hash {found}); "
                "fit a router on this draft"
            )

    def to_document(self) -> tuple[Document, Arrays]:
        """(JSON-ready document, arrays) for an artifact of kind :data:`ROUTER`; :meth:`from_document` reads them."""
        of_router, weights = self.router.to_document()
        of_clusters, partition = self.clusters.to_document()
        return {**of_router, **of_clusters, "head": self.head}, {**weights, **partition}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Routing:
        """The routing of :meth:`to_document`, weights on the CPU. Raises ValueError for anything else."""
        head = document.get("head")
        if not isinstance(head, str):
            raise ValueError(
                "not a router: its document lacks head, the hash of the output head that its clusters were fitted on"
            )
        return cls(Router.from_document(document, arrays), Clusters.from_document(document, arrays), head)


def head_hash(weight: torch.Tensor) -> str:
    """The first :data:`HASH_DIGITS` hexadecimal digits of the SHA-256 of an output head's weights [vocab, d], float32 bytes in row order.

    The values are rounded to bfloat16 first, so that a checkpoint has one hash whether it is loaded in float32 or in bfloat16.
    """
    values = weight.detach().to("cpu", torch.bfloat16).float().contiguous().numpy().astype("<f4", copy=False)
    return hashlib.sha256(values.tobytes()).hexdigest()[:HASH_DIGITS]


def _is_permutation(order: IntArray) -> bool:
    return bool((np.sort(order) == np.arange(len(order))).all()) and len(order) > 0


def _array(what: str, arrays: Mapping[str, npt.NDArray[Any]], name: str) -> npt.NDArray[Any]:
    if name not in arrays:
        raise ValueError(f"not a {what}: it lacks the array {name}")
    return np.asarray(arrays[name])


def _integers(what: str, arrays: Mapping[str, npt.NDArray[Any]], name: str) -> IntArray:
    array = _array(what, arrays, name)
    if array.dtype.kind not in "iu":
        raise ValueError(f"not a {what}: {name} must be whole numbers, not {array.dtype}")
    return array.astype(np.int64)


def _count(what: str, document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"not a {what}: its document lacks {name}, a whole number")
    return value


def _agree(what: str, document: Mapping[str, Any], **sizes: int) -> None:
    """Raises ValueError where a document says other sizes than its arrays have."""
    for name, size in sizes.items():
        if document.get(name) != size:
            raise ValueError(f"not a {what}: its document says {name} {document.get(name)!r}, its arrays have {size}")

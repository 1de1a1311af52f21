"""Coarse token clusters (DynaSpec, section 4.2): spherical k-means on the unit-length rows of an output head.

The head is W_LM transposed, [vocab, d], as checkpoints hold it: the paper's columns are its rows.
"""

from __future__ import annotations

import math
import warnings
from typing import Final

import numpy as np
import numpy.typing as npt

from runtime.policies.dynaspec import Clusters

FloatArray = npt.NDArray[np.float32]

ROUNDS: Final = 100
"""Most rounds of spherical k-means; it ends before, when no token changes its cluster."""
LARGE: Final = 1 << 28
"""vocab * d * M above which MiniBatchKMeans finds the first centres, on a sample of the rows a time: 4096 * 256 * 64 is 2^26."""
LARGE_ROUNDS: Final = 20
"""Most rounds of spherical k-means over so large a head."""
SMALL_SHARE: Final = 1e-3
"""Share of the tokens that may still change their cluster when a large head's rounds end."""


def default_clusters(vocab: int) -> int:
    """M where none is asked for: the power of two nearest to sqrt(vocab) (by its logarithm), within 1..1024 and at most ``vocab``.

    The paper names no M. With sqrt(vocab) clusters of about sqrt(vocab) tokens, scoring the clusters costs no more than evaluating one.
    Raises ValueError for an empty vocabulary.
    """
    if vocab < 1:
        raise ValueError(f"there are no clusters of {vocab} tokens")
    return min(1 << round(math.log2(vocab) / 2), 1024, vocab)


def fit_clusters(head: npt.ArrayLike, count: int, *, seed: int = 0) -> Clusters:
    """``count`` = M clusters of the tokens by the direction of their rows of ``head``, floats [vocab, d]; unbalanced, as in the paper.

    Spherical k-means: a token belongs to the centre with the largest cosine (ties: the lower number), a centre is the sum of its unit rows
    scaled to length 1. It starts from scikit-learn's KMeans on the unit rows (k-means++; MiniBatchKMeans for large heads,
    :data:`LARGE`) and goes on until no token moves, at most :data:`ROUNDS` times. scikit-learn alone does not suffice: its centres
    are means shorter than 1, and comparing distances to those prefers the centres of wide clusters. A cluster whose tokens all leave
    keeps its centre and may end empty. Clusters are numbered by size, largest first, ties by lowest token.

    Rows of norm 0 have no direction: they form a cluster of their own, the last one, where M allows two clusters. The same seed gives
    the same clusters on the same machine with the same number of threads.

    Raises ValueError for a head that is not [vocab, d] of finite numbers and for M outside 1..vocab.
    """
    rows = np.asarray(head)
    if rows.ndim != 2 or not rows.size or rows.dtype.kind != "f":
        raise ValueError(f"an output head must be floats [vocab, d], not {rows.dtype} {list(rows.shape)}")
    rows = rows.astype(np.float32)
    if not np.isfinite(rows).all():
        raise ValueError(f"the output head has a number that is not finite, in the row of token {_first_infinite(rows)}")
    if not 1 <= count <= len(rows):
        raise ValueError(f"{len(rows)} tokens cannot form {count} clusters; ask for 1..{len(rows)}")
    # by the largest entry first, so that neither tiny nor huge rows leave float32's range when squared
    largest = np.abs(rows).max(axis=1, keepdims=True)
    there = largest[:, 0] > 0
    unit = rows[there] / largest[there]
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    assignment = np.full(len(rows), count - 1, dtype=np.int64)
    directions = count if there.all() or count == 1 else count - 1
    if len(unit):
        assignment[there] = _by_size(_spherical(unit, min(directions, len(unit)), seed))
    return Clusters.of_assignment(assignment, count)


def cohesion(head: npt.ArrayLike, clusters: Clusters) -> float:
    """What spherical k-means maximises: the mean cosine between a token's row of ``head`` [vocab, d] and its cluster's centre, over rows
    of norm above 0; 0 where there is none."""
    rows = np.asarray(head, dtype=np.float64)
    norms = np.linalg.norm(rows, axis=1)
    there = norms > 0
    unit, of = rows[there] / norms[there, None], clusters.of[there]
    return float(np.linalg.norm(_sums(unit, of, clusters.count), axis=1).sum() / len(unit)) if len(unit) else 0.0


def _spherical(unit: FloatArray, count: int, seed: int) -> npt.NDArray[np.int64]:
    """The cluster of each row of ``unit`` [n, d], int64 [n]."""
    large = unit.size * count > LARGE
    centres = _unit_centres(_first_centres(unit, count, seed, large), unit[:1])
    of = _nearest(unit, centres)
    for _ in range(LARGE_ROUNDS if large else ROUNDS):
        centres = _unit_centres(_sums(unit, of, count).astype(np.float32), centres)
        before, of = of, _nearest(unit, centres)
        if int((of != before).sum()) <= (SMALL_SHARE * len(of) if large else 0):
            break
    return of


def _first_centres(unit: FloatArray, count: int, seed: int, large: bool) -> FloatArray:
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters: some stay empty
        if large:
            model = MiniBatchKMeans(count, random_state=seed, n_init=1, batch_size=max(1024, 4 * count), max_iter=10)
        else:
            model = KMeans(count, random_state=seed, n_init=1, max_iter=20)
        return np.asarray(model.fit(unit).cluster_centers_, dtype=np.float32)


def _unit_centres(sums: FloatArray, otherwise: FloatArray) -> FloatArray:
    """``sums`` [M, d] scaled to length 1; where that has no direction, the rows of ``otherwise`` ([M, d] or [1, d])."""
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(norms > 0, sums / np.where(norms > 0, norms, 1), otherwise).astype(np.float32)


def _nearest(unit: FloatArray, centres: FloatArray) -> npt.NDArray[np.int64]:
    """The centre of largest cosine of each row, ties by lower number; a block of rows a time."""
    step = max(1, (1 << 24) // len(centres))
    return np.concatenate([(unit[i : i + step] @ centres.T).argmax(axis=1) for i in range(0, len(unit), step)]).astype(np.int64)


def _sums(unit: npt.NDArray[np.floating], of: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.floating]:
    """The sum of each cluster's rows [M, d]."""
    from scipy.sparse import csr_matrix

    one = np.ones(len(of), dtype=unit.dtype)
    return np.asarray(csr_matrix((one, (of, np.arange(len(of)))), shape=(count, len(of))) @ unit)


def _by_size(of: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same clusters renumbered: largest first, ties by lowest member."""
    found, first, sizes = np.unique(of, return_index=True, return_counts=True)
    place = np.empty(int(found.max()) + 1, dtype=np.int64)
    place[found[np.lexsort((first, -sizes))]] = np.arange(len(found))
    return place[of]


def _first_infinite(rows: FloatArray) -> int:
    return int(np.argmin(np.isfinite(rows).all(axis=1)))

"""DynaSpec's token clusters (section 4.2): spherical k-means on the unit-length rows of an output
head.

The head is W_LM transposed, [vocab, d], as checkpoints hold it: the paper's columns are its rows.
"""

from __future__ import annotations

import math
import warnings
from typing import Final

import numpy as np
import numpy.typing as npt

from spectune.optimizer.fit.shared import StoredFit, keep, stored
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import ROUTER
from spectune.runtime.policies.dynaspec import Clusters
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import PolicyError
from spectune.traces.store import TraceStore

FloatArray = npt.NDArray[np.float32]

CLUSTERS: Final = "clusters"
"""Kind of an artifact that holds a partition of an output head alone; ``fit router`` takes it
further."""
ROUNDS: Final = 100
"""Most rounds of spherical k-means; it ends before, when no token changes its cluster."""
LARGE: Final = 1 << 28
"""vocab * d * M above which MiniBatchKMeans finds the first centres, on a sample of the rows a
time: 4096 * 256 * 64 is 2^26."""
LARGE_ROUNDS: Final = 20
"""Most rounds of spherical k-means over so large a head."""
SMALL_SHARE: Final = 1e-3
"""Share of the tokens that may still change their cluster when a large head's rounds end."""


def fit_clusters(
    store: TraceStore,
    pair: LoadedPair,
    draft: str,
    *,
    count: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> StoredFit:
    """Stores clusters of a draft's output head, without a router; ``count``: M. Raises PolicyError
    for a draft without an output head, or for more clusters than it has rows."""
    check_draft(pair, draft)
    output = pair.models[draft].output
    if count is not None and count > output.rows:
        raise PolicyError(
            f"--clusters {count}: the output head of draft {draft!r} has {output.rows} rows; ask "
            "for at most so many"
        )
    weight = output.weight.cpu().float().numpy()
    progress("clusters", 0, 1)
    clusters = cluster(weight, count or default_clusters(output.rows), seed=seed)
    progress("clusters", 1, 1)
    described, arrays = clusters.to_document()
    document = {"pair": pair.id, "draft": draft, **described, "head": output.hash, "seed": seed}
    document |= {"cluster_sizes": clusters.sizes.tolist(), "cohesion": cohesion(weight, clusters)}
    artifact = keep(store, CLUSTERS, document, arrays, pair_id=pair.id, fitted_to=(weight,))
    return StoredFit(artifact, CLUSTERS, document, {"draft": draft})


def stored_clusters(store: TraceStore, pair: LoadedPair, draft: str, name: str) -> Clusters:
    """Stored clusters of a draft's head, or a router's. Raises PolicyError for anything else."""
    found = stored(store, "--clusters-from", name, CLUSTERS, ROUTER)
    other = found.document["head"]
    head = pair.models[draft].output.hash
    if other != head:
        raise PolicyError(
            f"--clusters-from {name}: fitted on another output head (hash {other}) than draft "
            f"{draft!r} has (hash {head}); `fit clusters --draft {draft}` makes them"
        )
    return Clusters.from_document(found.document, found.arrays)


def check_draft(pair: LoadedPair, draft: str) -> None:
    """Raises PolicyError for a draft without an output head."""
    if draft not in pair.models:
        known = ", ".join(pair.models) or "none"
        raise PolicyError(
            f"--draft {draft}: pair {pair.spec.name} has no such draft with an output head; it "
            f"has: {known}"
        )


def default_clusters(vocab: int) -> int:
    """M where none is asked for: the power of two nearest to sqrt(vocab) (by its logarithm), within
    1..1024 and at most ``vocab``.

    The paper names no M. With sqrt(vocab) clusters of about sqrt(vocab) tokens, scoring the
    clusters costs no more than evaluating one.
    """
    return min(1 << round(math.log2(vocab) / 2), 1024, vocab)


def cluster(head: FloatArray, count: int, *, seed: int = 0) -> Clusters:
    """``count`` = M clusters of the tokens by the direction of their rows of ``head``, floats
    [vocab, d]; unbalanced, as in the paper.

    A token belongs to the centre with the largest cosine (ties: the lower number), a centre is the
    sum of its unit rows scaled to length 1. It starts from scikit-learn's KMeans on the unit rows
    (MiniBatchKMeans for large heads, :data:`LARGE`) and goes on until no token moves, at most
    :data:`ROUNDS` times. scikit-learn alone does not suffice: its centres are means shorter than 1,
    and comparing distances to those prefers the centres of wide clusters. A cluster whose tokens
    all leave keeps its centre and may end empty.

    Rows of norm 0 have no direction: they form a cluster of their own, the last one, where M allows
    two clusters. The same seed gives the same clusters on the same machine with the same number of
    threads. Raises PolicyError for rows that are not finite.
    """
    if not np.isfinite(head).all():
        token = int(np.argmin(np.isfinite(head).all(axis=1)))
        raise PolicyError(
            f"the output head has a number that is not finite, in the row of token {token}; use "
            "another checkpoint"
        )
    norms = np.linalg.norm(head, axis=1, keepdims=True)
    there = norms[:, 0] > 0
    unit = head[there] / norms[there]
    assignment = np.full(len(head), count - 1, dtype=np.int64)
    if len(unit):
        directions = count if there.all() or count == 1 else count - 1
        assignment[there] = _spherical(unit, min(directions, len(unit)), seed)
    return Clusters(assignment, count)


def cohesion(head: npt.NDArray[np.floating], clusters: Clusters) -> float:
    """What spherical k-means maximises: the mean cosine between a token's row of ``head`` [vocab,
    d] and its cluster's centre, over rows of norm above 0; 0 where there is none."""
    norms = np.linalg.norm(head, axis=1)
    there = norms > 0
    unit = head[there] / norms[there, None]
    sums = _sums(unit, clusters.of[there], clusters.count).astype(np.float64)
    return float(np.linalg.norm(sums, axis=1).sum() / max(1, len(unit)))


def _spherical(unit: FloatArray, count: int, seed: int) -> npt.NDArray[np.int64]:
    """The cluster of each row of ``unit`` [n, d], int64 [n]."""
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    large = unit.size * count > LARGE
    if large:
        model = MiniBatchKMeans(
            count, random_state=seed, n_init=1, batch_size=max(1024, 4 * count), max_iter=10
        )
    else:
        model = KMeans(count, random_state=seed, n_init=1, max_iter=20)
    with warnings.catch_warnings():
        # Fewer distinct rows than clusters: some stay empty.
        warnings.simplefilter("ignore", ConvergenceWarning)
        centres = _unit_rows(model.fit(unit).cluster_centers_, unit[:1])
    of = _nearest(unit, centres)
    for _ in range(LARGE_ROUNDS if large else ROUNDS):
        centres = _unit_rows(_sums(unit, of, count), centres)
        before, of = of, _nearest(unit, centres)
        if int((of != before).sum()) <= (SMALL_SHARE * len(of) if large else 0):
            break
    return of


def _unit_rows(rows: npt.NDArray[np.floating], otherwise: FloatArray) -> FloatArray:
    """``rows`` [M, d] scaled to length 1; where that has no direction, those of ``otherwise`` ([M,
    d] or [1, d])."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.where(norms > 0, rows / np.where(norms > 0, norms, 1), otherwise).astype(np.float32)


def _nearest(unit: FloatArray, centres: FloatArray) -> npt.NDArray[np.int64]:
    """The centre of largest cosine of each row, ties by lower number; a block of rows a time."""
    step = max(1, (1 << 24) // len(centres))
    return np.concatenate(
        [(unit[i : i + step] @ centres.T).argmax(axis=1) for i in range(0, len(unit), step)]
    ).astype(np.int64)


def _sums(
    unit: npt.NDArray[np.floating], of: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.floating]:
    """The sum of each cluster's rows [M, d]."""
    from scipy.sparse import csr_matrix

    one = np.ones(len(of), dtype=unit.dtype)
    return np.asarray(csr_matrix((one, (of, np.arange(len(of)))), shape=(count, len(of))) @ unit)

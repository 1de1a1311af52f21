"""Training DynaSpec's router (section 4.2): which clusters hold plausible next tokens, from what is known before the draft's pass.

An example is one context of the draft: the embedding of its last token x_t, the draft's last hidden state of the token before, and
the tokens of highest probability that the draft's law over the whole vocabulary has after x_t. The example's labels are the clusters of the
first L of those tokens. Examples of one text belong to one group, and groups are held out whole.

Using a router is the runtime's: :class:`runtime.policies.dynaspec.Router`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from runtime.policies.dynaspec import Clusters, Frequencies, Router, top_clusters
from traces.errors import TraceError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Rows = torch.Tensor | npt.NDArray[Any]

HIDDEN: Final = 128
EPOCHS: Final = 20
BATCH: Final = 256
LEARNING_RATE: Final = 1e-3
"""Adam's default. The paper names none of these figures."""
LABELS: Final = 8
"""L: most probable tokens of the draft whose clusters are positive. The paper names none."""
HELD_OUT: Final = 0.2
"""Share of the groups held out; at least one."""
_SCORED: Final = 8192
"""Contexts scored together."""


@dataclass(frozen=True)
class RouterScores:
    """What shortlists of the k highest-scored clusters keep, over ``contexts`` contexts. The tuples have one entry for each of ``ks``.

    ``recall``: the share of all label clusters among the top k; ``labels``: label clusters of a context, on average, of the draft's
    first ``label_tokens`` tokens. ``size``: tokens in the union, on average. ``first``: the share of contexts whose most probable token
    is kept; ``mass``: the mean probability kept of the tokens given, of at most ``ceiling``, their mean sum; ``oracle``: that of the best k
    clusters under these probabilities, so that ``oracle - mass`` is the mean routing regret of corollary 5.2. ``frequency_first`` and
    ``frequency``: ``first`` and ``mass`` of one frequency shortlist of round(size) tokens. Empty where probabilities or
    frequencies were not given.
    """

    contexts: int
    label_tokens: int
    labels: float
    ks: tuple[int, ...]
    recall: tuple[float, ...]
    size: tuple[float, ...]
    first: tuple[float, ...]
    mass: tuple[float, ...]
    oracle: tuple[float, ...]
    ceiling: float | None
    frequency_first: tuple[float, ...]
    frequency: tuple[float, ...]
    curve: tuple[dict[str, float | None], ...] = field(default=())
    """By epoch, 0 being before training: the loss (equation of section 4.2, a sum over clusters) on the examples trained on, None at 0,
    and on those held out."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def held_out_groups(group: npt.ArrayLike, share: float = HELD_OUT, seed: int = 0) -> npt.NDArray[np.bool_]:
    """Which examples are held out, bool [n]: those of ``share`` of the groups (at least one), drawn by ``seed``; ``group``: whole
    numbers [n].

    :func:`train_router` splits by this, so that what is compared with its scores can be fitted to the same examples. Raises TraceError
    where there are fewer than two groups.
    """
    numbers = np.asarray(group)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ValueError(f"group must be whole numbers [n], not {numbers.dtype} {list(numbers.shape)}")
    if not 0 < share < 1:
        raise ValueError(f"the share of groups held out must be above 0 and below 1, not {share}")
    groups = np.unique(numbers)
    if len(groups) < 2:
        raise TraceError(
            f"a router needs texts of at least two requests, one to be held out; there are {len(groups)}: record more"
        )
    count = min(len(groups) - 1, max(1, round(share * len(groups))))
    return np.isin(numbers, np.random.default_rng(seed).permutation(groups)[:count])


def cluster_labels(top_tokens: npt.ArrayLike, clusters: Clusters) -> npt.NDArray[np.bool_]:
    """y of section 4.2: which clusters hold one of each context's tokens, bool [n, M]; ``top_tokens`` int64 [n, L]."""
    tokens = np.asarray(top_tokens)
    labels = np.zeros((len(tokens), clusters.count), dtype=np.bool_)
    np.put_along_axis(labels, clusters.of[tokens], True, axis=1)
    return labels


def train_router(
    embeddings: Rows,
    previous: Rows,
    top_tokens: npt.ArrayLike,
    clusters: Clusters,
    *,
    group: npt.ArrayLike,
    labels: int = LABELS,
    hidden: int = HIDDEN,
    epochs: int = EPOCHS,
    seed: int = 0,
    batch: int = BATCH,
    learning_rate: float = LEARNING_RATE,
    held_out: float = HELD_OUT,
    probabilities: npt.ArrayLike | None = None,
    frequencies: Frequencies | None = None,
    ks: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Router, RouterScores]:
    """Trains a router by binary cross-entropy on multi-hot labels (section 4.2), and scores it on groups held out.

    ``embeddings`` [n, d_e] and ``previous`` [n, d], floats of any width; ``top_tokens`` int64 [n, L'], each context's most probable
    first, of which the first ``labels`` make labels; ``group`` whole numbers [n], the text that a context is of. ``hidden`` units;
    Adam over ``epochs`` passes in batches of ``batch``, on inputs standardised by the examples trained on; the stored weights act on
    raw inputs.
    ``probabilities`` [n, L'] (the draft's or the target's, of ``top_tokens``), ``frequencies`` and ``ks`` are for :func:`score_router`.
    ``device`` is where it trains; the router is on the CPU. The same seed gives the same router on the same machine. ``progress`` is
    called with (epochs done, of how many).

    Raises ValueError for arrays that do not fit together, are empty or not finite, and TraceError as :func:`held_out_groups`.
    """
    tokens = _tokens(top_tokens, clusters)
    e, h = _features(embeddings, previous, len(tokens))
    if min(hidden, batch, labels) < 1 or epochs < 0 or not learning_rate > 0:
        raise ValueError(
            f"hidden, batch and labels must be at least 1, epochs at least 0 and learning_rate above 0, not {hidden}, {batch}, {labels}, "
            f"{epochs} and {learning_rate}"
        )
    held = held_out_groups(group, held_out, seed)
    if len(held) != len(tokens):
        raise ValueError(f"there are {len(tokens)} contexts, but the groups of {len(held)}")
    learning, kept_back = np.flatnonzero(~held), np.flatnonzero(held)
    y = torch.from_numpy(cluster_labels(tokens[:, :labels], clusters))
    generator = torch.Generator().manual_seed(seed)
    mean, deviation = _standard(e, h, learning)
    d_r = len(mean)
    weights = [
        w.to(device).requires_grad_()
        for w in (
            _uniform((hidden, d_r), d_r, generator),
            _uniform((hidden,), d_r, generator),
            _uniform((clusters.count, hidden), hidden, generator),
            _uniform((clusters.count,), hidden, generator),
        )
    ]
    on_device = (mean.float().to(device), deviation.float().to(device))

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        x = (torch.cat((e[rows], h[rows]), 1).to(device, torch.float32) - on_device[0]) / on_device[1]
        z = torch.relu(x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
        each = torch.nn.functional.binary_cross_entropy_with_logits(z, y[rows].to(device, torch.float32), reduction="none")
        return each.sum(1)

    def mean_loss(rows: IntArray) -> float:
        with torch.no_grad():
            return float(sum(loss_of(part).sum().item() for part in torch.split(torch.from_numpy(rows), _SCORED)) / len(rows))

    adam = torch.optim.Adam(weights, lr=learning_rate)
    curve: list[dict[str, float | None]] = [{"epoch": 0, "loss": None, "held_out_loss": mean_loss(kept_back)}]
    for epoch in range(1, epochs + 1):
        order, total = torch.from_numpy(learning)[torch.randperm(len(learning), generator=generator)], 0.0
        for rows in torch.split(order, batch):
            losses = loss_of(rows)
            adam.zero_grad()
            losses.mean().backward()  # type: ignore[no-untyped-call]
            adam.step()
            total += float(losses.detach().sum())
        curve.append({"epoch": epoch, "loss": total / len(learning), "held_out_loss": mean_loss(kept_back)})
        progress(epoch, epochs)
    w1, b1, w2, b2 = (w.detach().cpu() for w in weights)
    folded = w1.double() / deviation
    router = Router(folded.float(), (b1.double() - folded @ mean).float(), w2, b2)
    scores = score_router(
        router,
        e[kept_back],
        h[kept_back],
        tokens[kept_back],
        clusters,
        labels=labels,
        probabilities=None if probabilities is None else np.asarray(probabilities)[kept_back],
        frequencies=frequencies,
        ks=ks,
    )
    return router, RouterScores(**{**vars(scores), "curve": tuple(curve)})


def score_router(
    router: Router,
    embeddings: Rows,
    previous: Rows,
    top_tokens: npt.ArrayLike,
    clusters: Clusters,
    *,
    labels: int = LABELS,
    probabilities: npt.ArrayLike | None = None,
    frequencies: Frequencies | None = None,
    ks: Sequence[int] | None = None,
) -> RouterScores:
    """What the router's top k clusters keep of contexts, for each k of ``ks`` (by default 1, 2, 4, ... below M).

    Arguments as :func:`train_router`'s. Mass is counted of the tokens given, so it approaches the law's as L' grows. Raises ValueError for
    arrays that do not fit together and for a k outside 1..M.
    """
    tokens = _tokens(top_tokens, clusters)
    e, h = _features(embeddings, previous, len(tokens))
    chosen_ks = tuple(1 << i for i in range(max(1, (clusters.count - 1).bit_length()))) if ks is None else tuple(ks)
    if not chosen_ks or not all(1 <= k <= clusters.count for k in chosen_ks):
        raise ValueError(f"every k must be within 1..{clusters.count} clusters, not {list(chosen_ks)}")
    if router.clusters != clusters.count:
        raise ValueError(f"the router scores {router.clusters} clusters, but there are {clusters.count}")
    if frequencies is not None and frequencies.vocab != clusters.vocab:
        raise ValueError(f"the frequencies are of {frequencies.vocab} tokens, the clusters of {clusters.vocab}")
    n = len(tokens)
    order = np.concatenate(
        [
            top_clusters(router.scores(e[at : at + _SCORED], h[at : at + _SCORED]), clusters.count).numpy()
            for at in range(0, n, _SCORED)
        ]
    )
    place = np.empty_like(order)  # the place of each cluster in its context's order
    np.put_along_axis(place, order, np.broadcast_to(np.arange(clusters.count), order.shape), axis=1)
    of = clusters.of[tokens]
    of_tokens = np.take_along_axis(place, of, axis=1)
    wanted = cluster_labels(tokens[:, :labels], clusters)
    sizes = np.cumsum(clusters.sizes[order], axis=1).mean(axis=0)
    mass = None
    if probabilities is not None:
        mass = np.asarray(probabilities, dtype=np.float64)
        if mass.shape != tokens.shape or not (mass >= 0).all():
            raise ValueError(
                f"probabilities must be numbers of at least 0, {list(tokens.shape)} as the tokens, not {list(mass.shape)}"
            )
        by_cluster = np.zeros((n, clusters.count))
        np.add.at(by_cluster, (np.arange(n)[:, None], of), mass)
        best = np.cumsum(np.sort(by_cluster, axis=1)[:, ::-1], axis=1).mean(axis=0)
    at = [k - 1 for k in chosen_ks]
    ranks = None if frequencies is None else frequencies.rank[tokens]
    taken = [0 if frequencies is None else frequencies.size(round(float(sizes[k]))) for k in at]
    return RouterScores(
        contexts=n,
        label_tokens=min(labels, tokens.shape[1]),
        labels=float(wanted.sum(1).mean()),
        ks=chosen_ks,
        recall=tuple(float((place[wanted] <= k).mean()) for k in at),
        size=tuple(float(sizes[k]) for k in at),
        first=tuple(float((of_tokens[:, 0] <= k).mean()) for k in at),
        mass=() if mass is None else tuple(_kept(mass, of_tokens <= k) for k in at),
        oracle=() if mass is None else tuple(float(best[k]) for k in at),
        ceiling=None if mass is None else float(mass.sum(1).mean()),
        frequency_first=() if ranks is None else tuple(float((ranks[:, 0] < size).mean()) for size in taken),
        frequency=() if mass is None or ranks is None else tuple(_kept(mass, ranks < size) for size in taken),
    )


def _kept(mass: FloatArray, inside: npt.NDArray[np.bool_]) -> float:
    return float(np.where(inside, mass, 0.0).sum(1).mean())


def _uniform(shape: tuple[int, ...], inputs: int, generator: torch.Generator) -> torch.Tensor:
    """torch's own initialisation of a linear layer: uniform within 1 / sqrt(inputs)."""
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(inputs)


def _standard(e: torch.Tensor, h: torch.Tensor, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation, float64 [d_e + d], of the inputs in ``rows``; 1 for the deviation of one that does not vary."""
    parts = torch.split(torch.from_numpy(rows), _SCORED)
    total, squares = torch.zeros(2, e.shape[1] + h.shape[1], dtype=torch.float64)
    for part in parts:
        total += torch.cat((e[part], h[part]), 1).double().sum(0)
    mean = total / len(rows)
    for part in parts:
        squares += (torch.cat((e[part], h[part]), 1).double() - mean).square().sum(0)
    deviation = (squares / len(rows)).sqrt()
    return mean, torch.where(deviation > 1e-9, deviation, 1.0)


def _features(embeddings: Rows, previous: Rows, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as tensors on the CPU."""
    e, h = (torch.as_tensor(x).detach().cpu() for x in (embeddings, previous))
    for name, x in (("embeddings", e), ("previous", h)):
        if x.ndim != 2 or len(x) != n or not x.is_floating_point():
            raise ValueError(
                f"{name} must be floats [{n}, width], as there are tokens of {n} contexts, not {x.dtype} {list(x.shape)}"
            )
        if not bool(torch.isfinite(x).all()):
            raise ValueError(f"{name} has a number that is not finite")
    return e, h


def _tokens(top_tokens: npt.ArrayLike, clusters: Clusters) -> IntArray:
    tokens = np.asarray(top_tokens)
    if tokens.ndim != 2 or not tokens.size or tokens.dtype.kind not in "iu":
        raise ValueError(f"top_tokens must be token ids [n, L], not {tokens.dtype} {list(tokens.shape)}")
    if tokens.min() < 0 or tokens.max() >= clusters.vocab:
        raise ValueError(f"top_tokens are not all within the clusters' vocabulary of {clusters.vocab} tokens")
    return tokens.astype(np.int64)

"""Near ties: decisions that rounding could turn, and the pass that makes them instead.

Float arithmetic gives other last bits for other batch shapes: logits and log-probabilities after
the same prefix were measured to differ by up to 8e-6 nat (float32; 8 layers, 7 M parameters), with
the window, the tree or the cache they were computed under. A decision that hangs on less than its
margin is a *near tie*, and is left to the model's canonical pass: one pass over the whole prefix
without a cache, a function of the prefix alone. So decisions do not depend on how they were
batched, and texts, trees and recordings are exact. These decisions have a margin: which token is
chosen, whether top-k or top-p keeps a token, which whole number a probability or an entropy
becomes, which children a tree takes in which order, and which clusters a router selects. Margins
are for float32 and temperature 1: several times what was measured, not a proof. At a temperature T
< 1 errors and margins grow as 1 / T. In lower precisions nothing is looked at, and texts that
differ are counted.

A margin is known here alone. Callers ask for decisions (:class:`Choices`, :func:`choose`) or marks
(``near_..``), and hand over what the canonical pass says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from spectune.runtime import sampling as plain
from spectune.runtime.policies.jit import compiled
from spectune.runtime.sampling import filters, kept_by, scaled
from spectune.traces.schema import NAT_SCALE, TREE_SCALE, Sampling

CHOICE: Final = 2e-4
"""Nats between the two best tokens."""
MEMBERSHIP: Final = 5e-5
"""Of a token's membership: probability for top-p, nats for top-k."""
CODE: Final = 2.5e-5
"""Nats from the border between two codes of 1/256 nat."""
TREE: Final = 1.2e-5
"""Nats from the border between two codes of 1/16 nat, and between two children's scores. Trees read
hundreds of codes, so their margin is closer: passes of different shapes were measured to differ by
up to 4.8e-6 in the drafts shipped."""
ROUTER: Final = 2e-5
"""Between two clusters' scores, for each unit by which the router widens errors of its inputs."""


def grown(margin: float, sampling: Sampling) -> float:
    """A margin at the sampling's temperature: dividing logits by T < 1 divides their errors too."""
    return margin if sampling.greedy else margin / min(1.0, sampling.temperature)


class Choices:
    """The tokens of n rows of logits, float32 [n, vocab]: argmax(logits / T + noise) over what
    top-k and top-p keep.

    ``noise`` float32 [n, vocab], None when greedy. With ``exact``, near ties are found at once and
    decided when a token is asked for. ``widened``: how much more than logits of a pass these may
    differ.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        sampling: Sampling,
        noise: torch.Tensor | None,
        *,
        exact: bool,
        widened: float = 1.0,
    ) -> None:
        self._sampling, self._noise = sampling, noise
        if exact:
            tokens, near = _best_and_near(logits, sampling, noise, widened)
        else:
            tokens = plain.choose(logits, sampling, noise)
            near = torch.zeros(len(tokens), dtype=torch.bool)
        self.tokens: list[int] = tokens.tolist()
        self._near: list[bool] = near.tolist()

    def token(self, row: int, canonical: Callable[[], torch.Tensor]) -> int:
        """The token of a row; of a near tie that of the ``canonical`` logits [vocab]."""
        if not self._near[row]:
            return self.tokens[row]
        noise = None if self._noise is None else self._noise[row : row + 1]
        return int(plain.choose(canonical()[None], self._sampling, noise))


def choose(
    logits: torch.Tensor,
    sampling: Sampling,
    noise: torch.Tensor | None,
    canonical: Callable[[int], torch.Tensor] | None,
) -> torch.Tensor:
    """The tokens of n rows of logits, int64 [n], as of :class:`Choices`; ``canonical`` gives a
    row's canonical logits [vocab]. None: near ties are not looked for, and nothing waits for the
    device."""
    if canonical is None:
        return plain.choose(logits, sampling, noise)
    tokens, near = _best_and_near(logits, sampling, noise)
    for row in near.nonzero()[:, 0].tolist() if any(near.tolist()) else ():
        tokens[row] = plain.choose(
            canonical(row)[None], sampling, None if noise is None else noise[row : row + 1]
        )[0]
    return tokens


def _best_and_near(
    logits: torch.Tensor, sampling: Sampling, noise: torch.Tensor | None, widened: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens, int64 [n], and which of them are near ties, bool [n]."""
    x = scaled(logits, sampling)
    perturbed = x if noise is None else x + noise
    margin = grown(CHOICE * widened, sampling)
    if not filters(sampling, x.shape[-1]):
        return lead(perturbed, margin)
    slack = grown(MEMBERSHIP * widened, sampling)
    mask, *masks = kept_by(x, sampling, (0.0, slack, -slack))
    wide, narrow = (perturbed.masked_fill(~m, -math.inf) for m in masks)
    best, near = lead(wide, margin)
    return perturbed.masked_fill(~mask, -math.inf).argmax(-1), near | (best != narrow.argmax(-1))


def lead(x: torch.Tensor, margin: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of every row of ``x`` float32 [n, vocab], int64 [n], and whether it leads the
    next by less than ``margin``, bool [n].

    After a pass of the target all code is cold, and what counts is to touch little of it: one
    compiled loop on a CPU.
    """
    if x.device.type != "cpu":
        best = x.topk(2, dim=-1)
        return best.indices[:, 0], best.values[:, 0] - best.values[:, 1] < margin
    tokens, near = np.empty(len(x), dtype=np.int64), np.empty(len(x), dtype=np.bool_)
    _lead(x.detach().numpy(), np.float32(margin), tokens, near)
    return torch.from_numpy(tokens), torch.from_numpy(near)


@compiled()
def _lead(
    rows: npt.NDArray[np.float32],
    margin: np.float32,
    tokens: npt.NDArray[np.int64],
    near: npt.NDArray[np.bool_],
) -> None:
    """:func:`lead`; of equal entries the first is the best."""
    for i in range(rows.shape[0]):
        row = rows[i]
        best, second, at = row[0], np.float32(-np.inf), 0
        for j in range(1, row.shape[0]):
            value = row[j]
            if value > second:
                if value > best:
                    second, best, at = best, value, j
                else:
                    second = value
        tokens[i] = at
        near[i] = best - second < margin


def near_membership(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Rows of scaled ``logits`` [n, vocab] of which rounding could change what top-k and top-p
    keep, bool [n]."""
    slack = grown(MEMBERSHIP, sampling)
    wide, narrow = kept_by(logits, sampling, (slack, -slack))
    return (wide != narrow).any(-1)


def near_rival(scores: torch.Tensor, row: int, sampling: Sampling) -> bool:
    """Whether rounding could turn the order of an entry of ``scores`` [n], nats, and another."""
    gaps = (scores - scores[row]).abs()
    gaps[row] = torch.inf
    return float(gaps.min()) < grown(CHOICE, sampling)


def near_code(nats: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Where the code of a value, in 1/256 nat, is a near tie: bool of the same shape."""
    x = nats * NAT_SCALE
    return (x - x.round()).abs() < grown(CODE, sampling) * NAT_SCALE


def near_tree_code(scale: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Where the code of a value, given in units of 1/16 nat, is a near tie: bool of the same
    shape."""
    return (scale - scale.round()).abs_() < grown(TREE, sampling) * TREE_SCALE


def router_margin(w1: torch.Tensor, w2: torch.Tensor) -> float:
    """The margin of a router's scores: ``ROUTER`` times the most that it widens independent errors
    of its inputs, at least once: over clusters, sqrt(sum_j (w2_j |w1_j|)^2)."""
    return ROUTER * max(1.0, float((w2.square() @ w1.square().sum(1)).max().sqrt()))


def near_clusters(scores: torch.Tensor, k: int, margin: float) -> torch.Tensor:
    """Rows of ``scores`` [n, M] whose k-th and (k + 1)-th highest score differ by at most
    ``margin``, bool [n].

    Where scores computed in another batch shape differ by less than margin / 2 each, the set of the
    top k can change only in these rows. No row is near where k takes all clusters.
    """
    if k >= scores.shape[-1]:
        return torch.zeros(scores.shape[:-1], dtype=torch.bool, device=scores.device)
    best = scores.topk(k + 1, dim=-1).values
    return best[..., k - 1] - best[..., k] <= margin


def near_cluster_places(scores: torch.Tensor, margin: float) -> torch.Tensor:
    """The clusters whose place in the order of ``scores`` [n, M] is a near tie, bool [n, M]."""
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    near = values[:, :-1] - values[:, 1:] <= margin
    pad = torch.nn.functional.pad
    touched = pad(near, (1, 0)) | pad(near, (0, 1))
    return torch.zeros_like(touched).scatter_(1, order, touched)

"""A draft's distribution after a node, as codes, and which of them are near ties (docs/trees.md,
"distributions and codes")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from spectune.runtime import near_ties
from spectune.runtime.policies.jit import compiled
from spectune.runtime.sampling import kept, scaled
from spectune.runtime.trees.grow import Codes, DistributionRows
from spectune.traces.schema import TOP_ENTROPY, TREE_CODE_MAX, TREE_SCALE, Sampling

_LEAST, _MOST = 0.4, TREE_CODE_MAX + 0.4
"""Bounds of scaled values: inside them the code does not change, and the only borders near are
those between two codes."""


def read_distributions(
    logits: torch.Tensor,
    sampling: Sampling,
    noise: torch.Tensor | None,
    width: int,
    *,
    entropy: bool = False,
    top_entropy: bool = False,
    exact: bool = False,
    reads_logp: bool = True,
    reads_gap: bool = True,
    ids: torch.Tensor | None = None,
) -> DistributionRows:
    """Codes of the distributions behind float32 ``logits`` [n, vocab].

    ``noise`` float32 [vocab] or [n, vocab] is the target's at the children's position, None when
    greedy. ``width`` children are read (k). Codes that are not asked for are 0. ``exact`` marks
    near ties of the children's order and of the codes that are read. With ``ids`` int64 [size],
    ascending, ``logits`` are of these tokens alone, [n, size], and the distributions are over this
    shortlist; children beyond its size do not exist.
    """
    if ids is not None:
        noise = None if noise is None else noise.index_select(-1, ids)
        if (missing := width - ids.shape[0]) > 0:  # filled up with tokens of probability 0
            logits = pad(logits, (0, missing), value=-math.inf)
            noise = None if noise is None else pad(noise, (0, missing))
            ids = pad(ids, (0, missing))
    (n, vocab), device = logits.shape, logits.device
    width = min(width, vocab)
    x, near_filter = scaled(logits, sampling), None
    if (mask := kept(x, sampling)) is not None:
        near_filter = near_ties.near_membership(x, sampling) if exact else None
        x = x.masked_fill(~mask, -math.inf)
    perturbed = x if noise is None else x + noise
    scores, tokens = perturbed.topk(min(width + 1, vocab), -1)
    tokens = tokens[:, :width]
    q = x.softmax(-1) if reads_logp or entropy else None
    nats = q.gather(-1, tokens).log_().neg_() if q is not None and reads_logp else None
    if mask is None and ids is None:
        count = torch.full((n,), width, device=device)
    else:
        count = torch.isfinite(scores[:, :width]).sum(-1)
    of_entropy = of_top = torch.zeros(n, dtype=torch.int64, device=device)
    near_entropy = torch.zeros(n, dtype=torch.bool, device=device)
    if entropy and q is not None:
        of_entropy, near_entropy = _entropy_code(q, near_entropy, sampling)
    if top_entropy:
        most = min(TOP_ENTROPY, vocab)
        listed = perturbed is x and scores.shape[1] >= most
        best = scores[:, :most] if listed else x.topk(most, -1).values
        of_top, near_entropy = _entropy_code(best.softmax(-1), near_entropy, sampling)
    children = tokens if ids is None else ids[tokens]
    read = [children, of_entropy, of_top, count, near_entropy, scores]
    read += [x for x in (nats, near_filter) if x is not None]
    found = on_host(read, at_once=device.type != "cpu")
    near, (logp, gap) = np.empty((n, width), np.bool_), np.zeros((2, n, width), np.uint8)
    margin = near_ties.grown(near_ties.TREE, sampling)
    read_nats = found[6] if reads_logp else found[5]
    _codes_of_children(found[5], read_nats, logp, gap, near, reads_logp, reads_gap, margin)
    codes = Codes.of(found[0], logp, gap, *found[1:4])
    if not exact:
        return DistributionRows(codes)
    if near_filter is not None:
        near |= found[-1][:, None] & (np.arange(width) < found[3][:, None])
    return DistributionRows(codes, near, found[4])


def on_host(columns: Sequence[torch.Tensor], *, at_once: bool) -> list[npt.NDArray[Any]]:
    """The tensors as numpy's; ``at_once``: in one transfer (float64, which holds float32 and tokens
    exactly), so that a device is waited for but once."""
    if not at_once:
        return [x.numpy() for x in columns]
    flat = torch.cat([x.reshape(-1).double() for x in columns]).cpu()
    parts = torch.split(flat, [x.numel() for x in columns])
    return [part.view(x.shape).to(x.dtype).numpy() for part, x in zip(parts, columns, strict=True)]


def _entropy_code(
    q: torch.Tensor, near: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the entropies of ``q`` [n, any], int64 [n], and ``near``, bool [n], with their near
    ties."""
    scale = (torch.special.entr(q).sum(-1) * TREE_SCALE).clamp_(_LEAST, _MOST)
    return scale.long(), near | near_ties.near_tree_code(scale, sampling)


@compiled()
def _codes_of_children(
    scores: npt.NDArray[np.float32],
    nats: npt.NDArray[np.float32],
    logp: npt.NDArray[np.uint8],
    gap: npt.NDArray[np.uint8],
    marks: npt.NDArray[np.bool_],
    reads_logp: bool,
    reads_gap: bool,
    margin: float,
) -> None:
    """Writes the codes that are read, of -log q and of the gap to the best, and marks near ties.

    ``scores`` float32 [n, k + 1 or k], best first; ``nats`` [n, k]: -log q.
    """
    n, k = marks.shape
    for i in range(n):
        for j in range(k):
            here = scores[i, j]
            near = False
            if j > 0:
                near = scores[i, j - 1] - here < margin
            if j + 1 < scores.shape[1]:
                near |= here - scores[i, j + 1] < margin
            if reads_logp:
                scale = min(max(nats[i, j] * TREE_SCALE, _LEAST), _MOST)
                logp[i, j] = int(scale)
                near |= abs(scale - round(scale)) < margin * TREE_SCALE
            if reads_gap:
                scale = min(max((scores[i, 0] - here) * TREE_SCALE, _LEAST), _MOST)
                gap[i, j] = int(scale)
                near |= abs(scale - round(scale)) < margin * TREE_SCALE
            marks[i, j] = near and here > -np.inf

"""A draft's distribution after a node, as codes, and which of them are near ties (docs/trees.md,
"distributions and codes")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from spectune.runtime import near_ties
from spectune.runtime.policies.jit import compiled
from spectune.runtime.sampling import kept, scaled
from spectune.runtime.trees.grow import Codes, DistributionRows
from spectune.traces.schema import TOP_ENTROPY, TREE_CODE_MAX, TREE_SCALE, Sampling

_BLOCK: Final = 64
_LONG_ROW: Final = 8192
_LEAST, _MOST = 0.4, TREE_CODE_MAX + 0.4
"""Bounds of scaled values: inside them the code does not change, and the only borders near are
those between two codes."""


def best_of(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices int64 [n, count] of the largest of each row of ``x`` float [n, vocab],
    descending.

    On a CPU and over long rows by blocks: the ``count`` blocks with the largest maxima hold them
    all, which takes a third of ``topk``'s time.
    """
    rows, vocab = x.shape
    blocks = vocab // _BLOCK
    if x.device.type != "cpu" or vocab < _LONG_ROW or count >= blocks // 4:
        best = x.topk(count, dim=-1)
        return best.values, best.indices
    whole = blocks * _BLOCK
    maxima = x[:, :whole].view(rows, blocks, _BLOCK).amax(-1)
    inside = maxima.topk(count, dim=-1, sorted=False).indices
    places = (inside[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    rest = torch.arange(whole, vocab).expand(rows, -1)
    places = torch.cat([places, rest], 1)
    best = x.gather(-1, places).topk(count, dim=-1)
    return best.values, places.gather(-1, best.indices)


def read_distributions(
    logits: torch.Tensor,
    sampling: Sampling,
    noise: torch.Tensor | None,
    width: int,
    *,
    by_probability: bool = False,
    entropy: bool = False,
    top_entropy: bool = False,
    exact: bool = False,
    reads_logp: bool = True,
    reads_gap: bool = True,
    ids: torch.Tensor | None = None,
) -> DistributionRows:
    """Codes of the distributions behind float32 ``logits`` [n, vocab].

    ``noise`` float32 [vocab] or [n, vocab] is the target's at the children's position, None when
    greedy. ``width`` children are read (k). ``by_probability`` ranks them by q alone. Codes that
    are not asked for are 0. ``exact`` marks near ties of the children's order and of the codes that
    are read. With ``ids`` int64 [size], ascending, ``logits`` are of these tokens alone, [n, size],
    and the distributions are over this shortlist; children beyond its size do not exist.
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
    perturbed = x if noise is None or by_probability else x + noise
    scores, tokens = best_of(perturbed, min(width + 1, vocab))
    tokens = tokens[:, :width]
    q = x.softmax(-1) if reads_logp or entropy else None
    nats = q.gather(-1, tokens).log_().neg_() if q is not None and reads_logp else None
    logp, gap, near = _child_codes(scores, nats, reads_gap, width, sampling, exact)
    if mask is None and ids is None:
        count = torch.full((n,), width, device=device)
    else:
        count = torch.isfinite(scores[:, :width]).sum(-1)
    of_entropy = of_top = torch.zeros(n, dtype=torch.int64, device=device)
    looks = exact and (entropy or top_entropy)
    near_entropy = torch.zeros(n, dtype=torch.bool, device=device) if looks else None
    if entropy and q is not None:
        of_entropy, near_entropy = _entropy_code(q, near_entropy, sampling)
    if top_entropy:
        most = min(TOP_ENTROPY, vocab)
        listed = perturbed is x and scores.shape[1] >= most
        best = scores[:, :most] if listed else best_of(x, most)[0]
        of_top, near_entropy = _entropy_code(best.softmax(-1), near_entropy, sampling)
    if near is None and (near_entropy is not None or near_filter is not None):
        near = torch.zeros((n, width), dtype=torch.bool, device=device)
    if near is not None and near_filter is not None:
        near = (near_filter[:, None] | near) & (torch.arange(width, device=device) < count[:, None])
    logp, gap = (torch.zeros_like(tokens) if code is None else code for code in (logp, gap))
    children = tokens if ids is None else ids[tokens]
    codes = (children, logp, gap, of_entropy, of_top, count)
    marks = [x for x in (near, near_entropy) if x is not None]
    host = on_host([*codes, *marks], at_once=device.type != "cpu")
    read = iter([x.astype(np.bool_) for x in host[len(codes) :]])
    unsure, unsure_entropy = (None if x is None else next(read) for x in (near, near_entropy))
    return DistributionRows(Codes.of(*host[: len(codes)]), unsure, unsure_entropy)


def on_host(columns: Sequence[torch.Tensor], *, at_once: bool) -> list[npt.NDArray[Any]]:
    """Whole numbers, or bools, as numpy's; ``at_once``: in one transfer (int64), so that a device
    is waited for but once."""
    if not at_once:
        return [x.numpy() for x in columns]
    flat = torch.cat([x.reshape(-1).long() for x in columns]).cpu().numpy()
    parts = np.split(flat, np.cumsum([x.numel() for x in columns])[:-1])
    return [part.reshape(x.shape) for part, x in zip(parts, columns, strict=True)]


def _entropy_code(
    q: torch.Tensor, near: torch.Tensor | None, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes of the entropies of ``q`` [n, any], int64 [n], and ``near``, bool [n], with their near
    ties (None: these are not looked for)."""
    scale = _scaled(torch.special.entr(q).sum(-1))
    return scale.long(), None if near is None else near | near_ties.near_tree_code(scale, sampling)


def _child_codes(
    scores: torch.Tensor,
    nats: torch.Tensor | None,
    reads_gap: bool,
    width: int,
    sampling: Sampling,
    exact: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Codes of children, int64 [n, k], of -log q and of the gap to the best (None: not read), and
    near ties, bool [n, k] (None: none).

    ``scores`` float32 [n, k + 1 or k], best first; ``nats`` [n, k]: -log q, None where it is not
    read.
    """
    if fused(scores.device):
        n, margin = len(scores), near_ties.grown(near_ties.TREE, sampling)
        near = np.empty((n, width), dtype=np.bool_)
        logp, gap = np.empty((2, n, width), dtype=np.int64)
        given = scores.numpy()
        read = given if nats is None else nats.numpy()
        found = _codes_of_children(
            given, read, logp, gap, near, nats is not None, reads_gap, margin
        )
        return (
            None if nats is None else torch.from_numpy(logp),
            torch.from_numpy(gap) if reads_gap else None,
            torch.from_numpy(near) if found and exact else None,
        )
    marks = near_ties.near_order(scores, width, sampling) if exact else None
    codes_of: list[torch.Tensor | None] = []
    for values in (nats, scores[:, :1] - scores[:, :width] if reads_gap else None):
        scale = None if values is None else _scaled(values)
        codes_of.append(None if scale is None else scale.long())
        if scale is not None and marks is not None:
            marks = marks | near_ties.near_tree_code(scale, sampling)
    return codes_of[0], codes_of[1], marks


def fused(device: torch.device) -> bool:
    """Whether a device runs the compiled loop, which spares a CPU a dozen tensor operations."""
    return device.type == "cpu"


@compiled()
def _codes_of_children(
    scores: npt.NDArray[np.float32],
    nats: npt.NDArray[np.float32],
    logp: npt.NDArray[np.int64],
    gap: npt.NDArray[np.int64],
    marks: npt.NDArray[np.bool_],
    reads_logp: bool,
    reads_gap: bool,
    margin: float,
) -> bool:
    """On a CPU, all at once: writes the codes that are read and marks near ties; whether there are
    any.

    ``scores`` float32 [n, k + 1 or k], ``nats`` and the others [n, k].
    """
    n, k = marks.shape
    found = False
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
            near &= here > -np.inf
            marks[i, j] = near
            found |= near
    return found


def _scaled(nats: torch.Tensor) -> torch.Tensor:
    """Nats in units of a code, within the codes' range: rounded down they are codes."""
    return (nats * TREE_SCALE).clamp_(_LEAST, _MOST)

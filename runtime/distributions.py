"""A draft's distribution after a node, as codes (docs/trees.md, "distributions and codes")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from spectune.runtime.policies.jit import compiled
from spectune.runtime.sampling import kept, scaled
from spectune.runtime.trees.grow import Codes
from spectune.traces.schema import NAT_CODE_MAX, NAT_SCALE, TOP_ENTROPY, Sampling


def read_distributions(
    logits: torch.Tensor,
    sampling: Sampling,
    noise: torch.Tensor | None,
    width: int,
    *,
    entropy: bool = False,
    top_entropy: bool = False,
    reads_logp: bool = True,
    reads_gap: bool = True,
    ids: torch.Tensor | None = None,
) -> Codes:
    """Codes of the distributions behind float32 ``logits`` [n, vocab].

    ``noise`` float32 [vocab] or [n, vocab] is the target's at the children's position, None when
    greedy. ``width`` children are read (k). Codes that are not asked for are 0. With ``ids`` int64
    [size], ascending, ``logits`` are of these tokens alone, [n, size], and the distributions are
    over this shortlist; children beyond its size do not exist.
    """
    if ids is not None:
        noise = None if noise is None else noise.index_select(-1, ids)
        if (missing := width - ids.shape[0]) > 0:  # filled up with tokens of probability 0
            logits = pad(logits, (0, missing), value=-math.inf)
            noise = None if noise is None else pad(noise, (0, missing))
            ids = pad(ids, (0, missing))
    (n, vocab), device = logits.shape, logits.device
    width = min(width, vocab)
    x = scaled(logits, sampling)
    if (mask := kept(x, sampling)) is not None:
        x = x.masked_fill(~mask, -math.inf)
    perturbed = x if noise is None else x + noise
    scores, tokens = perturbed.topk(width, -1)
    q = x.softmax(-1) if reads_logp or entropy else None
    nats = q.gather(-1, tokens).log_().neg_() if q is not None and reads_logp else None
    if mask is None and ids is None:
        count = torch.full((n,), width, device=device)
    else:
        count = torch.isfinite(scores).sum(-1)
    of_entropy = of_top = torch.zeros(n, dtype=torch.int64, device=device)
    if entropy and q is not None:
        of_entropy = _entropy_code(q)
    if top_entropy:
        most = min(TOP_ENTROPY, vocab)
        best = scores[:, :most] if perturbed is x and width >= most else x.topk(most, -1).values
        of_top = _entropy_code(best.softmax(-1))
    children = tokens if ids is None else ids[tokens]
    read = [children, of_entropy, of_top, count, scores]
    found = on_host(read if nats is None else [*read, nats], at_once=device.type != "cpu")
    logp, gap = np.zeros((2, n, width), np.uint16)
    # Without -log q its place holds the scores, which are not read.
    _codes_of_children(found[4], found[-1], logp, gap, reads_logp, reads_gap)
    return Codes.of(found[0], logp, gap, *found[1:4])


def on_host(columns: Sequence[torch.Tensor], *, at_once: bool) -> list[npt.NDArray[Any]]:
    """The tensors as numpy's; ``at_once``: in one transfer (float64, which holds float32 and tokens
    exactly), so that a device is waited for but once."""
    if not at_once:
        return [x.numpy() for x in columns]
    flat = torch.cat([x.reshape(-1).double() for x in columns]).cpu()
    parts = torch.split(flat, [x.numel() for x in columns])
    return [part.view(x.shape).to(x.dtype).numpy() for part, x in zip(parts, columns, strict=True)]


def _entropy_code(q: torch.Tensor) -> torch.Tensor:
    """Codes of the entropies of ``q`` [n, any], int64 [n]."""
    scale: torch.Tensor = torch.special.entr(q).sum(-1) * NAT_SCALE
    return scale.clamp_(0, NAT_CODE_MAX).long()


@compiled()
def _codes_of_children(
    scores: npt.NDArray[np.float32],
    nats: npt.NDArray[np.float32],
    logp: npt.NDArray[np.uint16],
    gap: npt.NDArray[np.uint16],
    reads_logp: bool,
    reads_gap: bool,
) -> None:
    """Writes the codes [n, k] that are read, of -log q and of the gap to the best.

    ``scores`` float32 [n, k], best first; ``nats`` [n, k]: -log q.
    """
    n, k = logp.shape
    for i in range(n):
        for j in range(k):
            if reads_logp:
                logp[i, j] = int(min(max(nats[i, j] * NAT_SCALE, 0.0), NAT_CODE_MAX))
            if reads_gap:
                nat = scores[i, 0] - scores[i, j]
                gap[i, j] = int(min(max(nat * NAT_SCALE, 0.0), NAT_CODE_MAX))

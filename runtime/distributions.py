"""A draft's law after a node as codes, and which codes rounding could change (docs/trees.md, "laws and codes")."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from runtime import near_ties
from runtime.policies.jit import compiled
from runtime.policies.trees import LawRows, fused
from runtime.sampling import filters, kept, scaled
from traces.schema import TOP_ENTROPY, TREE_CODE_MAX, TREE_SCALE, Sampling

_BLOCK: Final = 64
_LONG_ROW: Final = 8192
_LEAST, _MOST = 0.4, TREE_CODE_MAX + 0.4
"""Bounds of scaled values: inside them the code does not change, and the only borders near are those between two codes."""


class VocabularyReading(NamedTuple):
    """What is read of n laws over the whole vocabulary. ``tokens`` int64 [n, k] and ``scores`` float32 [n, k + 1] of the best children (as
    many as there are), best first; ``nats`` float32 [n, k]: -log q of each child; ``entropy`` and ``top_entropy`` float32 [n], in nats;
    ``torn`` bool [n]: rounding could change what the filters keep. None: not asked for. ``filtered``: children may be missing (-inf)."""

    tokens: torch.Tensor
    scores: torch.Tensor
    nats: torch.Tensor | None
    entropy: torch.Tensor | None
    top_entropy: torch.Tensor | None
    torn: torch.Tensor | None
    filtered: bool


def read_vocabulary(
    logits: torch.Tensor,
    sampling: Sampling,
    noise: torch.Tensor | None,
    width: int,
    *,
    by_probability: bool,
    entropy: bool,
    top_entropy: bool,
    nats: bool,
    torn: bool,
) -> VocabularyReading:
    """The passes over float32 ``logits`` [n, vocab] that :func:`read_distributions` needs; each reading only if it is asked for."""
    x = scaled(logits, sampling)
    vocab = x.shape[-1]
    mask = doubtful = None
    if filters(sampling, vocab):
        mask = kept(x, sampling)
        assert mask is not None
        if torn:
            doubtful = near_ties.near_membership(x, sampling)
        x = x.masked_fill(~mask, -math.inf)
    coupled = noise is not None and not by_probability
    scores, tokens = best_of(x + noise if noise is not None and coupled else x, min(width + 1, vocab))
    tokens = tokens[:, :width]
    q = x.softmax(-1) if nats or entropy else None
    top = None
    if top_entropy:
        most = min(TOP_ENTROPY, vocab)
        top = scores[:, :most] if not coupled and scores.shape[1] >= most else best_of(x, most)[0]
        top = torch.special.entr(top.softmax(-1)).sum(-1)
    return VocabularyReading(
        tokens,
        scores,
        q.gather(-1, tokens).log_().neg_() if q is not None and nats else None,
        torch.special.entr(q).sum(-1) if q is not None and entropy else None,
        top,
        doubtful,
        mask is not None,
    )


def best_of(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices int64 [n, count] of the largest of each row of ``x`` float [n, vocab], descending.

    On a CPU and over long rows by blocks: the ``count`` blocks with the largest maxima hold them all, which takes a third of ``topk``'s
    time.
    """
    rows, vocab = x.shape
    blocks = vocab // _BLOCK
    if x.device.type != "cpu" or vocab < _LONG_ROW or count >= blocks // 4:
        best = x.topk(count, dim=-1)
        return best.values, best.indices
    blocked = x[:, : blocks * _BLOCK].view(rows, blocks, _BLOCK)
    inside = blocked.amax(-1).topk(count, dim=-1, sorted=False).indices
    places = (inside[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    values = x.gather(-1, places)
    if blocks * _BLOCK < vocab:
        rest = torch.arange(blocks * _BLOCK, vocab).expand(rows, -1)
        places, values = torch.cat([places, rest], 1), torch.cat([values, x[:, blocks * _BLOCK :]], 1)
    best = values.topk(count, dim=-1)
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
) -> LawRows:
    """Codes of the laws behind float32 ``logits`` [n, vocab].

    ``noise`` float32 [vocab] or [n, vocab] is the target's at the children's position, None when greedy. ``width`` children are read (k).
    ``by_probability`` ranks them by q alone. Codes that are not asked for are 0. ``exact`` asks for what rounding could change of the
    children's order, and of the codes that are read. With ``ids`` int64 [size], ascending, ``logits`` are of these tokens alone, [n, size],
    and the laws are over this shortlist; children beyond its size do not exist.
    """
    if ids is not None:
        logits, noise, ids = _to_width(logits, None if noise is None else noise.index_select(-1, ids), ids, width)
    width = min(width, logits.shape[-1])
    read = read_vocabulary(
        logits,
        sampling,
        noise,
        width,
        by_probability=by_probability,
        entropy=entropy,
        top_entropy=top_entropy,
        nats=reads_logp,
        torn=exact,
    )
    n, device = logits.shape[0], logits.device
    margin = near_ties.grown(near_ties.TREE, sampling)
    unread = _unread(n, width, device)
    logp = gap = unread.children
    found_entropy = found_top = unread.laws
    fewer = read.filtered or ids is not None
    count = torch.isfinite(read.scores[:, :width]).sum(-1) if fewer else unread.count
    unsure = unsure_entropy = None
    if fused(device):
        near, codes_of = np.empty((n, width), dtype=np.bool_), np.empty((2, n, width), dtype=np.int64)
        found = read.scores.numpy()
        nats = found if read.nats is None else read.nats.numpy()
        if _codes_of_children(found, nats, codes_of[0], codes_of[1], near, reads_logp, reads_gap, margin) and exact:
            unsure = torch.from_numpy(near)
        if reads_logp:
            logp = torch.from_numpy(codes_of[0])
        if reads_gap:
            gap = torch.from_numpy(codes_of[1])
    else:
        if exact:
            unsure = near_ties.near_order(read.scores, width, sampling)
        if read.nats is not None:
            scale = _scaled(read.nats)
            logp = scale.long()
            if unsure is not None:
                unsure |= near_ties.near_tree_code(scale, sampling)
        if reads_gap:
            scale = _scaled(read.scores[:, :1] - read.scores[:, :width])
            gap = scale.long()
            if unsure is not None:
                unsure |= near_ties.near_tree_code(scale, sampling)
    if exact and (read.entropy is not None or read.top_entropy is not None):
        unsure_entropy = unread.nowhere[:, 0]
        if unsure is None:
            unsure = unread.nowhere
    if read.entropy is not None:
        scale = _scaled(read.entropy)
        found_entropy = scale.long()
        if unsure_entropy is not None:
            unsure_entropy = unsure_entropy | near_ties.near_tree_code(scale, sampling)
    if read.top_entropy is not None:
        scale = _scaled(read.top_entropy)
        found_top = scale.long()
        if unsure_entropy is not None:
            unsure_entropy = unsure_entropy | near_ties.near_tree_code(scale, sampling)
    if read.torn is not None:
        unsure = read.torn[:, None] | (unread.nowhere if unsure is None else unsure)
        unsure &= torch.arange(width, device=device) < count[:, None]
    return LawRows(read.tokens if ids is None else ids[read.tokens], logp, gap, found_entropy, found_top, count, unsure, unsure_entropy)


def _to_width(
    logits: torch.Tensor, noise: torch.Tensor | None, ids: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A shortlist smaller than ``width`` filled up with tokens of probability 0: logits [n, width], noise [.., width], ids [width]."""
    missing = width - ids.shape[0]
    if missing <= 0:
        return logits, noise, ids
    pad = torch.nn.functional.pad
    return pad(logits, (0, missing), value=-math.inf), None if noise is None else pad(noise, (0, missing)), pad(ids, (0, missing))


@compiled()
def _codes_of_children(
    scores: npt.NDArray[np.float32],
    nats: npt.NDArray[np.float32],
    logp: npt.NDArray[np.int64],
    gap: npt.NDArray[np.int64],
    unsure: npt.NDArray[np.bool_],
    reads_logp: bool,
    reads_gap: bool,
    margin: float,
) -> bool:
    """On a CPU, all at once: writes the codes that are read and what rounding could change; whether that is anything.

    ``scores`` float32 [n, k + 1 or k] and ``nats`` [n, k] as in :class:`VocabularyReading`; the others [n, k].
    """
    n, k = unsure.shape
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
            unsure[i, j] = near
            found |= near
    return found


def _scaled(nats: torch.Tensor) -> torch.Tensor:
    """Nats in units of a code, within the codes' range: rounded down they are codes."""
    return (nats * TREE_SCALE).clamp_(_LEAST, _MOST)


def codes(nats: torch.Tensor) -> torch.Tensor:
    """Nats as whole numbers of 1/16 nat, rounded down, saturating; int64."""
    return _scaled(nats).long()


class _Unread(NamedTuple):
    """What stands for what is not read of n laws of k children: zeros int64 for the ``children`` [n, k] and the ``laws`` [n], the whole
    ``count`` k [n], and ``nowhere`` bool [n, k] for what rounding could change. Shared: nobody writes into them."""

    children: torch.Tensor
    laws: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # hides tuple.count
    nowhere: torch.Tensor


@lru_cache(maxsize=256)
def _unread(n: int, width: int, device: torch.device) -> _Unread:
    whole = torch.int64
    return _Unread(
        torch.zeros((n, width), dtype=whole, device=device),
        torch.zeros((n,), dtype=whole, device=device),
        torch.full((n,), width, dtype=whole, device=device),
        torch.zeros((n, width), dtype=torch.bool, device=device),
    )

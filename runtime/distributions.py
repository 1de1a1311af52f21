"""A draft's distribution after a node, as codes (docs/simulator.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from spectune.runtime.sampling import filters, processed
from spectune.runtime.trees.grow import Codes, Reads
from spectune.traces.schema import NAT_CODE_MAX, NAT_SCALE, TOP_ENTROPY, Sampling

Perturb = Callable[[Tensor, Tensor | None], Tensor]
"""Adds the target's noise at the children's position to scores [n, size] of tokens ``ids`` int64
[size] (None: all)."""


class Children(NamedTuple):
    """The best children of n distributions, on the device of their logits: ``tokens`` int64 [n, k],
    best first, -log q as ``nats`` and ``gaps`` to the best score [n, k] (None: not read); codes of
    the ``entropy`` and the ``top_entropy``, and the ``count`` of children that exist, int64 [n]."""

    tokens: Tensor
    nats: Tensor | None
    gaps: Tensor | None
    entropy: Tensor
    top_entropy: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count


class DeviceCodes(NamedTuple):
    """:class:`runtime.trees.grow.Codes` as int64 tensors on a device."""

    tokens: Tensor
    logp: Tensor
    gap: Tensor
    entropy: Tensor
    top_entropy: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count


def best_children(
    logits: Tensor,
    sampling: Sampling,
    perturb: Perturb | None,
    reads: Reads,
    ids: Tensor | None = None,
) -> Children:
    """What ``reads`` says of the best children of the distributions behind ``logits`` [n, vocab].

    ``perturb`` is None when greedy. Entropies that are not read are 0. With ``ids`` int64 [size],
    ascending, ``logits`` are of these tokens alone, [n, size], and the distributions are over this
    shortlist; children beyond its size do not exist."""
    x = processed(logits, sampling, draft=True)
    perturbed = x if perturb is None else perturb(x, ids)
    if ids is not None and (missing := reads.width - ids.shape[0]) > 0:
        # Filled up with tokens of probability 0.
        ids, x = pad(ids, (0, missing)), pad(x, (0, missing), value=-math.inf)
        perturbed = pad(perturbed, (0, missing), value=-math.inf)
    n, vocab = x.shape
    width, most = min(reads.width, vocab), min(TOP_ENTROPY, vocab)
    scores, tokens = perturbed.topk(width, -1)
    q = x.softmax(-1) if reads.logp or reads.entropy else None
    nats = q.gather(-1, tokens).log_().neg_() if q is not None and reads.logp else None
    if ids is None and not filters(sampling, vocab):
        count = torch.full((n,), width, device=x.device)
    else:
        count = torch.isfinite(scores).sum(-1)
    entropy = top_entropy = torch.zeros(n, dtype=torch.int64, device=x.device)
    if reads.entropy and q is not None:
        entropy = _entropy_code(q)
    if reads.top_entropy:
        reused = perturb is None and width >= most
        best = scores[:, :most] if reused else x.topk(most, -1).values
        top_entropy = _entropy_code(best.softmax(-1))
    return Children(
        tokens if ids is None else ids[tokens],
        nats,
        scores[:, :1] - scores if reads.gap else None,
        entropy,
        top_entropy,
        count,
    )


def codes_on_host(children: Children) -> Codes:
    """The codes as numpy arrays in the dtypes of a recording. Those that are not read are 0."""
    columns: list[Any] = [x if x is None else x.cpu().numpy() for x in children]
    tokens, nats, gaps, *of_nodes = columns
    codes = (
        np.zeros(tokens.shape) if x is None else np.minimum(x * NAT_SCALE, NAT_CODE_MAX)
        for x in (nats, gaps)
    )
    return Codes.of(tokens, *codes, *of_nodes)


def codes_on_device(children: Children) -> DeviceCodes:
    """:func:`codes_on_host` in tensors, for which nothing waits."""
    tokens, nats, gaps, *of_nodes = children
    logp, gap = (torch.zeros_like(tokens) if x is None else _code(x) for x in (nats, gaps))
    return DeviceCodes(tokens, logp, gap, *of_nodes)


def _code(nats: Tensor) -> Tensor:
    return (nats * NAT_SCALE).clamp(0, NAT_CODE_MAX).long()


def _entropy_code(q: Tensor) -> Tensor:
    """Codes of the entropies of ``q`` [n, any], int64 [n]."""
    return _code(torch.special.entr(q).sum(-1))

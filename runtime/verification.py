"""The target's verdict on a drafted chain: the coupled verifier and classical rejection.

Coupled (default): the target's token at a position is argmax(log p + g), whatever was drafted;
drafted tokens are kept while they equal it. Lossless for any draft, and the text does not depend on
the draft at all.

Rejection (Leviathan et al.; Algorithm 1 of the on-the-fly paper): a token drawn from q is kept with
probability min(1, p/q), else one is drawn from norm(max(0, p - q)). Lossless in distribution, not
in text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spectune.runtime.loop import Verified
from spectune.runtime.sampling import (
    Noise,
    choose,
    gumbel_row,
    log_distribution,
    stream_key,
    uniform,
)
from spectune.runtime.trees.draft import GrownTree
from spectune.traces.schema import Sampling


@dataclass(frozen=True)
class TargetText:
    """What the target's own tokens after the text ``ids`` depend on: its ``sampling`` and the
    ``noise`` (None when greedy)."""

    ids: list[int]
    sampling: Sampling
    noise: Noise | None

    def tokens(
        self, logits: torch.Tensor, depths: Sequence[int], at_once: bool
    ) -> Callable[[int, list[int]], int]:
        """The target's token after row r of float32 ``logits`` [n, vocab], which stands
        ``depths[r]`` tokens behind the text, by r and those tokens. ``at_once``: all rows are
        looked at now. In place of logits there may be the ids of the largest, int64 [n]."""
        if logits.dtype == torch.int64:
            largest: list[int] = logits.tolist()
            return lambda row, _: largest[row]
        if at_once:
            noise = None
            if self.noise is not None:
                noise = torch.stack([self.noise.row(len(self.ids) + depth) for depth in depths])
            tokens: list[int] = choose(logits, self.sampling, noise).tolist()
            return lambda row, _: tokens[row]

        def one(row: int, path: list[int]) -> int:
            length = len(self.ids) + len(path)
            noise = None if self.noise is None else self.noise.row(length)[None]
            return int(choose(logits[row : row + 1], self.sampling, noise))

        return one


def verify_coupled(text: TargetText, logits: torch.Tensor, drafted: list[int]) -> Verified:
    """``logits`` float32 [drafted + 1, vocab] after the last text token and after each drafted
    one."""
    token_after = text.tokens(logits, range(len(drafted) + 1), at_once=True)
    emitted: list[int] = []
    for proposed in [*drafted, None]:
        emitted.append(token_after(len(emitted), emitted))
        if emitted[-1] != proposed:
            break
    return Verified(len(emitted) - 1, emitted)


def walk(tree: GrownTree, token_after: Callable[[int, list[int]], int]) -> Verified:
    """Target sampling on a tree: from the root down while a child holds the target's own token,
    which ``token_after`` tells of a row (the root's 0) and its path."""
    children = {
        (parent, token): i
        for i, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    path: list[int] = []
    emitted: list[int] = []
    node: int | None = -1
    while node is not None:
        emitted.append(token_after(node + 1, emitted))
        node = children.get((node, emitted[-1]))
        path += [] if node is None else [node]
    unread = (i for i, accepted in enumerate(path) if tree.expanded[accepted] < 0)
    return Verified(len(path), emitted, path, next(unread, len(path)))


def verify_rejection(
    logits: torch.Tensor,
    length: int,
    drafted: list[int],
    log_q: list[torch.Tensor],
    sampling: Sampling,
    seed: int,
    salt: int,
) -> Verified:
    """Algorithm 1 on a chain. ``logits`` float32 [drafted + 1, vocab]; ``log_q`` one row per
    drafted token, empty for a draft that is certain (q = 1: prompt lookup). ``length`` is the
    text's; ``salt`` counts rounds, so that no number is used twice."""
    p = log_distribution(logits, sampling).double().exp()
    kept, weights = len(drafted), p[len(drafted)]
    for i, token in enumerate(drafted):
        q = log_q[i].double().exp() if log_q else torch.zeros_like(p[i])
        if not log_q:
            q[token] = 1.0
        drawn = uniform(stream_key(seed, length + i, "accept", salt))
        if drawn * float(q[token]) > float(p[i, token]):
            residual = (p[i] - q).clamp_min(0)
            kept, weights = i, residual if float(residual.sum()) > 0 else p[i]
            break
    key = stream_key(seed, length + kept, "residual", salt)
    noise = gumbel_row(key, weights.shape[-1], weights.device)
    return Verified(kept, [*drafted[:kept], int((weights.log() + noise).argmax())])

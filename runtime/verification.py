"""The target's verdict on what was drafted: the coupled verifier and classical rejection.

Coupled (default): the target's token at a position is argmax(log p + g), whatever was drafted;
drafted tokens are kept while they equal it. Lossless for any draft, and the text does not depend on
the draft at all.

Rejection (Leviathan et al.; Algorithm 1 of the on-the-fly paper): a token drawn from q is kept with
probability min(1, p/q), else one is drawn from norm(max(0, p - q)). Lossless in distribution, not
in text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch

from spectune.runtime.loop import Verified
from spectune.runtime.sampling import gumbel_row, log_distribution, stream_key, uniform
from spectune.runtime.trees.draft import GrownTree
from spectune.traces.schema import Sampling


def accept_chain(drafted: Sequence[int], tokens: Sequence[int]) -> Verified:
    """The verdict of the coupled verifier on a chain. ``tokens``: the target's own after the text
    and after each drafted token."""
    pairs = zip(drafted, tokens, strict=False)
    accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Verified(accepted, list(tokens[: accepted + 1]))


def accept(tree: GrownTree, token_after: Callable[[int], int]) -> Verified:
    """The verdict of the coupled verifier on a tree: from the root down while a child holds the
    target's own token. ``token_after``: the target's own, of 0 after the text, of 1 + a node's
    number after that node; called along the path alone."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    path, emitted = list[int](), [token_after(0)]
    node = children.get((-1, emitted[0]))
    while node is not None:
        path.append(node)
        emitted.append(token_after(node + 1))
        node = children.get((node, emitted[-1]))
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
    p, accepted = log_distribution(logits, sampling).double().exp(), len(drafted)
    weights = p[accepted]
    if drafted:
        columns = torch.tensor(drafted, device=p.device)[:, None]
        if log_q:
            q = torch.stack(log_q).double().exp()
        else:
            q = torch.zeros_like(p[:-1]).scatter_(1, columns, 1.0)
        chances = [matrix.gather(1, columns)[:, 0] for matrix in (p[:-1], q)]
        for i, (of_target, of_draft) in enumerate(torch.stack(chances, 1).tolist()):
            if uniform(stream_key(seed, length + i, "accept", salt)) * of_draft > of_target:
                residual = (p[i] - q[i]).clamp_min(0)
                accepted, weights = i, torch.where(residual.sum() > 0, residual, p[i])
                break
    key = stream_key(seed, length + accepted, "residual", salt)
    noise = gumbel_row(key, weights.shape[-1], weights.device)
    token = int((weights.log() + noise).argmax())
    return Verified(accepted, [*drafted[:accepted], token])

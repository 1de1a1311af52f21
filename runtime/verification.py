"""The target's verdict on a drafted chain: the coupled verifier and classical rejection.

Coupled (default): the target's token at a position is argmax(log p + g), whatever was drafted; drafted tokens are kept while they
equal it. Lossless for any draft, and the text does not depend on the draft at all.

Rejection (Leviathan et al.; Algorithm 1 of the on-the-fly paper): a token drawn from q is kept with probability min(1, p/q), else
one is drawn from norm(max(0, p - q)). Lossless in law, not in text.
"""

from __future__ import annotations

import torch

from runtime.loop import Verified
from runtime.models import CausalModel
from runtime.near_ties import Choices
from runtime.sampling import Noise, gumbel_row, log_distribution, stream_key, uniform
from runtime.tree_drafts import GrownTree
from traces.schema import Sampling


def verify_coupled(
    target: CausalModel,
    logits: torch.Tensor,
    text: list[int],
    drafted: list[int],
    sampling: Sampling,
    noise: Noise | None,
    exact: bool,
) -> Verified:
    """``logits`` float32 [drafted + 1, vocab] after the last text token and after each drafted one."""
    rows = None if noise is None else noise.rows(len(text), len(drafted) + 1)
    choices = Choices(logits, sampling, rows, exact=exact)
    emitted: list[int] = []
    for token in [*drafted, None]:
        emitted.append(choices.token(len(emitted), lambda: target.canonical(text + emitted)))
        if emitted[-1] != token:
            break
    return Verified(len(emitted) - 1, emitted)


def verify_tree(
    target: CausalModel,
    logits: torch.Tensor,
    text: list[int],
    tree: GrownTree,
    sampling: Sampling,
    noise: Noise | None,
    exact: bool,
) -> Verified:
    """Target sampling on a tree: from the root, take the target's own token; go down while a child holds it.

    ``logits`` float32 [1 + nodes, vocab], the root's row first. A CPU looks at the rows of the path alone; elsewhere all are looked at at
    once, so that the host waits once.
    """
    every: Choices | None = None
    if logits.device.type != "cpu":
        rows = None
        if noise is not None:
            by_depth = noise.rows(len(text), 1 + max(tree.depths, default=0))
            rows = by_depth[torch.tensor([0, *tree.depths], device=logits.device)]
        every = Choices(logits, sampling, rows, exact=exact)
    children = {(parent, token): i for i, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int] = []
    emitted: list[int] = []
    node: int | None = -1
    while node is not None:
        choices, row = every, node + 1
        if choices is None:
            own = None if noise is None else noise.row(len(text) + len(path))[None]
            choices, row = Choices(logits[row : row + 1], sampling, own, exact=exact), 0
        emitted.append(choices.token(row, lambda: target.canonical(text + emitted)))
        node = children.get((node, emitted[-1]))
        if node is not None:
            path.append(node)
    read = 0
    while read < len(path) and tree.expanded[path[read]] >= 0:
        read += 1
    return Verified(len(path), emitted, path, read)


def verify_rejection(
    logits: torch.Tensor,
    length: int,
    drafted: list[int],
    log_q: list[torch.Tensor],
    sampling: Sampling,
    seed: int,
    salt: int,
) -> Verified:
    """Algorithm 1 on a chain. ``logits`` float32 [drafted + 1, vocab]; ``log_q`` one row per drafted token, empty for a draft that is
    certain (q = 1: prompt lookup). ``length`` is the text's; ``salt`` counts rounds, so that no number is used twice."""
    p = log_distribution(logits, sampling).double().exp()
    device, vocab = logits.device, logits.shape[-1]
    for i, token in enumerate(drafted):
        q = _point(token, vocab, device) if not log_q else log_q[i].double().exp()
        if uniform(stream_key(seed, length + i, "accept", salt)) * float(q[token]) <= float(p[i, token]):
            continue
        residual = (p[i] - q).clamp_min(0)
        if float(residual.sum()) <= 0:
            residual = p[i]
        return Verified(i, [*drafted[:i], _draw(residual, stream_key(seed, length + i, "residual", salt))])
    n = len(drafted)
    return Verified(n, [*drafted, _draw(p[n], stream_key(seed, length + n, "residual", salt))])


def _point(token: int, vocab: int, device: torch.device) -> torch.Tensor:
    q = torch.zeros(vocab, dtype=torch.float64, device=device)
    q[token] = 1.0
    return q


def _draw(weights: torch.Tensor, key: int) -> int:
    noise = gumbel_row(key, weights.shape[-1], weights.device)
    return int((weights.log() + noise).argmax())

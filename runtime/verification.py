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
from runtime.sampling import Choice, Noise, canonical_choice, choose, gumbel_row, log_law, settle, stream_key, uniform
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
    """``logits`` float32 [drafted + 1, vocab] after the last text token and after each drafted one.

    With ``exact``, near ties are settled by the canonical pass, first to last, as far as the draft is accepted.
    """
    rows = None if noise is None else noise.rows(len(text), len(drafted) + 1)
    choice = choose(logits, sampling, rows, exact=exact)
    if choice.unsure is not None and any(choice.unsure.tolist()):
        chosen: list[int] = []
        for i in range(len(drafted) + 1):
            row = None if rows is None else rows[i]
            one = type(choice)(choice.tokens[i : i + 1], choice.unsure[i : i + 1])
            prefix = text + drafted[:i]
            token = settle(one, lambda _, p=prefix, r=row: canonical_choice(target.canonical(p), sampling, r))  # type: ignore[misc]
            chosen.append(int(token[0]))
            if i < len(drafted) and chosen[-1] != drafted[i]:
                break
    else:
        chosen = choice.tokens.tolist()
    accepted = 0
    while accepted < len(drafted) and chosen[accepted] == drafted[accepted]:
        accepted += 1
    return Verified(accepted, chosen[: accepted + 1])


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

    ``logits`` float32 [1 + nodes, vocab], the root's row first. With ``exact``, near ties are settled along the path. A CPU looks at the
    rows of the path alone; elsewhere all are looked at at once, so that the host waits once.
    """
    everywhere: Choice | None = None
    if logits.device.type != "cpu":
        rows = None
        if noise is not None:
            by_depth = noise.rows(len(text), 1 + max(tree.depths, default=0))
            rows = by_depth[torch.tensor([0, *tree.depths], device=logits.device)]
        found = choose(logits, sampling, rows, exact=exact)
        everywhere = Choice(found.tokens.cpu(), None if found.unsure is None else found.unsure.cpu())
    children = {(parent, token): i for i, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int] = []
    emitted: list[int] = []
    node = -1
    while True:
        row = None if noise is None else noise.row(len(text) + len(path))
        at = slice(node + 1, node + 2)
        if everywhere is None:
            choice = choose(logits[at], sampling, None if row is None else row[None], exact=exact)
        else:
            choice = Choice(everywhere.tokens[at], None if everywhere.unsure is None else everywhere.unsure[at])
        if choice.unsure is not None and bool(choice.unsure):
            token = canonical_choice(target.canonical(text + emitted), sampling, row)
        else:
            token = int(choice.tokens)
        emitted.append(token)
        child = children.get((node, token))
        if child is None:
            break
        path.append(child)
        node = child
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
    p = log_law(logits, sampling).double().exp()
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

"""Two linear layers with a ReLU between them, trained by Adam on the binary cross-entropy of their
outputs: C2T's classifier and DynaSpec's router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

BATCH_OF_SCORES: Final = 8192
"""Examples evaluated together."""


def train(
    x: Tensor,
    y: Tensor,
    *,
    hidden: int,
    epochs: int,
    batch: int,
    learning_rate: float = 1e-3,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> nn.Sequential:
    """Returns Linear(d, hidden), ReLU, Linear(hidden, outputs), float32, trained on inputs ``x``
    [n, d] with labels ``y`` bool [n, outputs] in batches drawn by ``seed``.

    Inputs are standardised while training; the returned layers read raw ones. A column that does
    not vary keeps its scale. The same seed gives the same layers on the same machine.
    """
    x = x.double()
    mean, deviation = x.mean(0), x.std(0, correction=0)
    deviation = torch.where(deviation > 1e-9, deviation, 1.0)
    scaled, labels = ((x - mean) / deviation).float(), y.float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = nn.Linear(x.shape[1], hidden)
        model = nn.Sequential(first, nn.ReLU(), nn.Linear(hidden, y.shape[1]))
        adam = torch.optim.Adam(model.parameters(), lr=learning_rate)
        for epoch in range(epochs):
            for rows in torch.split(torch.randperm(len(x)), batch):
                loss = binary_cross_entropy_with_logits(
                    model(scaled[rows]), labels[rows], reduction="none"
                )
                adam.zero_grad()
                loss.sum(1).mean().backward()  # type: ignore[no-untyped-call]
                adam.step()
            progress("epochs", epoch + 1, epochs)
    with torch.no_grad():
        weight = first.weight.double() / deviation
        first.bias.copy_(first.bias.double() - weight @ mean)
        first.weight.copy_(weight)
    return model.requires_grad_(False)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Mean over examples of the cross-entropy summed over outputs, in nats."""
    parts = zip(*(torch.split(z, BATCH_OF_SCORES) for z in (x, y)), strict=True)
    sums = (
        float(binary_cross_entropy_with_logits(model(a.float()), b.float(), reduction="sum"))
        for a, b in parts
    )
    return sum(sums) / len(x)


def weights(model: nn.Sequential) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(w1 [hidden, d], b1 [hidden], w2 [outputs, hidden], b2 [outputs]) of the two layers."""
    w1, b1, w2, b2 = model.parameters()
    return w1, b1, w2, b2

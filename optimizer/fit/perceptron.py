"""Two linear layers with a ReLU between them, trained by Adam on the binary cross-entropy of their
outputs: C2T's classifier and DynaSpec's router."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

SCORED: Final = 8192
"""Examples evaluated together."""


class Weights(NamedTuple):
    """w2 relu(w1 x + b1) + b2 over inputs x [n, d]: ``w1`` [hidden, d], ``b1`` [hidden], ``w2``
    [outputs, hidden], ``b2`` [outputs]."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [n, outputs]."""
        return torch.relu(x @ self.w1.T + self.b1) @ self.w2.T + self.b2

    def on_raw(self, scale: Scale) -> Weights:
        """The same function of raw inputs, of weights that read standardised ones; float32."""
        w1, b1, w2, b2 = (w.detach().double() for w in self)
        w1 = w1 / scale.deviation
        return Weights(*(w.float() for w in (w1, b1 - w1 @ scale.mean, w2, b2)))

    def on_standardised(self, scale: Scale) -> Weights:
        """The inverse of :meth:`on_raw`."""
        w1, b1, w2, b2 = (w.double() for w in self)
        return Weights(*(w.float() for w in (w1 * scale.deviation, b1 + w1 @ scale.mean, w2, b2)))


class Scale(NamedTuple):
    """Mean and deviation of each input, float64 [d]; the deviation of one that does not vary is
    1."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Scale:
        parts = torch.split(x, SCORED)
        mean = torch.as_tensor(sum(p.double().sum(0) for p in parts)) / len(x)
        squares = sum((p.double() - mean).square().sum(0) for p in parts)
        deviation = (torch.as_tensor(squares) / len(x)).sqrt()
        return cls(mean, torch.where(deviation > 1e-9, deviation, 1.0))

    def apply(self, x: Tensor) -> Tensor:
        return (x.float() - self.mean.float()) / self.deviation.float()


def _initial(inputs: int, hidden: int, outputs: int, generator: torch.Generator) -> Weights:
    """torch's own initialisation of two linear layers: uniform within 1 / sqrt(inputs of the
    layer)."""

    def uniform(shape: tuple[int, ...], fan_in: int) -> Tensor:
        return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(fan_in)

    first = uniform((hidden, inputs), inputs), uniform((hidden,), inputs)
    return Weights(*first, uniform((outputs, hidden), hidden), uniform((outputs,), hidden))


def losses(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of each example, summed over outputs, [n]; ``y`` bool [n, outputs]."""
    return binary_cross_entropy_with_logits(weights(x), y.float(), reduction="none").sum(1)


@torch.no_grad()
def mean_loss(weights: Weights, x: Tensor, y: Tensor) -> float:
    """The mean of :func:`losses`, for weights that act on raw inputs."""
    parts = zip(torch.split(x, SCORED), torch.split(y, SCORED), strict=True)
    return sum(float(losses(weights, some.float(), labels).sum()) for some, labels in parts) / len(
        x
    )


def train(
    x: Tensor,
    y: Tensor,
    *,
    start: Weights | None = None,
    hidden: int = 0,
    epochs: int,
    batch: int,
    learning_rate: float,
    seed: int,
    after: Callable[[int, float | None, Weights], None],
) -> Weights:
    """Adam from ``start``, or from random weights of ``hidden`` units, over ``epochs`` passes of
    inputs ``x`` [n, d] with labels ``y`` bool [n, outputs], in batches drawn by ``seed``. Inputs
    are standardised meanwhile; the weights given and returned act on raw ones. ``after`` is called
    with (epoch, its mean loss, the weights); before training with 0 and no loss."""
    generator, scale = torch.Generator().manual_seed(seed), Scale.of(x)
    if start is None:
        start = _initial(x.shape[1], hidden, y.shape[1], generator).on_raw(scale)
    after(0, None, start)
    last, weights = start, Weights(*(w.requires_grad_() for w in start.on_standardised(scale)))
    adam = torch.optim.Adam(weights, lr=learning_rate)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for rows in torch.split(torch.randperm(len(x), generator=generator), batch):
            each = losses(weights, scale.apply(x[rows]), y[rows])
            adam.zero_grad()
            each.mean().backward()  # type: ignore[no-untyped-call]
            adam.step()
            total += float(each.detach().sum())
        last = weights.on_raw(scale)
        after(epoch, total / len(x), last)
    return last

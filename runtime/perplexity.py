"""The perplexity of a prompt, from the pass that prefills a model with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from spectune.runtime.models import CausalModel, ids_tensor
from spectune.traces.schema import NAT_SCALE

HEAD_ROWS: Final = 256
"""Tokens whose logits are held at a time."""


def log_perplexity(model: CausalModel, ids: Sequence[int]) -> float:
    """Mean of -log p(token | tokens before) over a prompt's tokens after the first, in nats,
    rounded to 1/256, so that last bits decide nothing; 0 for fewer than two tokens.

    It is a prefill with ``ids`` but for the last, at the model's slots 0 .., and the output head.
    """
    model.reserve(len(ids))
    tokens, total = ids_tensor(list(ids), model.device), 0.0

    def add(first: int, states: Tensor) -> None:
        nonlocal total
        following = tokens[first + 1 : first + 1 + len(states), None]
        for rows, ids in zip(
            torch.split(states, HEAD_ROWS), torch.split(following, HEAD_ROWS), strict=True
        ):
            log_p = model.head(rows).log_softmax(-1).gather(-1, ids)
            total -= float(log_p.double().sum())

    model.read(tokens[:-1], 0, add)
    return round(total / max(1, len(ids) - 1) * NAT_SCALE) / NAT_SCALE

"""transformers' own window (``num_assistant_tokens_schedule`` "heuristic")."""

from __future__ import annotations

from typing import Annotated, Literal

from spectune.runtime.policies.blocks import AdaptiveWindow, GammaMax, Search
from spectune.runtime.policies.jit import compiled


class HeuristicWindow(AdaptiveWindow):
    """transformers' own schedule: gamma + 2 if every drafted token was accepted, else gamma - 1 (at
    least 1), starting from ``gamma_initial`` (transformers' ``num_assistant_tokens``). It is
    carried from request to request unless ``transient``."""

    kind: Literal["heuristic"] = "heuristic"
    gamma_max: Annotated[GammaMax, Search(1, 16, name="gamma")] = 20
    transient: Annotated[bool, Search(choices=(False, True))] = False


@compiled(inline=True)
def heuristic(gamma: int, num_drafted: int, num_accepted: int) -> int:
    """The next window: two more if every drafted token was accepted, else one less, but at
    least 1."""
    return gamma + 2 if num_accepted == num_drafted else max(1, gamma - 1)

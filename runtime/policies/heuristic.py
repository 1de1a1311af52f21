"""transformers' own window (``num_assistant_tokens_schedule`` "heuristic")."""

from __future__ import annotations

from runtime.policies.jit import compiled


@compiled(inline=True)
def heuristic(gamma: int, num_drafted: int, num_accepted: int) -> int:
    """The next window: two more if every drafted token was accepted, else one less, but at least 1."""
    return gamma + 2 if num_accepted == num_drafted else max(1, gamma - 1)

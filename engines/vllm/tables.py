"""Policies as vLLM can run them: how many tokens to draft at each batch size."""

from __future__ import annotations

from dataclasses import dataclass

from spectune.engines.abilities import VLLM
from spectune.runtime.policies.blocks import BATCH_LIMIT
from spectune.runtime.policies.document import AnyPolicy, ByBatchWindow


@dataclass(frozen=True)
class Table:
    """``gammas[n]`` is the number of tokens drafted after a step of n requests; ``gammas[0]`` is
    never read. ``policy`` and ``version`` say whose it is: empty and 0 for the server's own."""

    gammas: tuple[int, ...]
    policy: str = ""
    version: int = 0


def table_of(policy: AnyPolicy, version: int, *, draft: str, most: int, max_num_seqs: int) -> Table:
    """A policy's table for a server that loaded ``draft`` and drafts at most ``most`` tokens.

    Raises PolicyError with what vLLM cannot do, and what it can.
    """
    return Table(
        VLLM.gammas(policy, draft=draft, most=most, max_num_seqs=max_num_seqs), policy.id, version
    )


def schedule_of(window: ByBatchWindow) -> list[list[int]]:
    """A window as ``num_speculative_tokens_per_batch_size``: ``[first size, last size, tokens]``,
    the last of them without an end."""
    sizes = [size for size, _ in window.gamma]
    ends = [*(size - 1 for size in sizes[1:]), max(BATCH_LIMIT, sizes[-1])]
    return [[size, end, gamma] for (size, gamma), end in zip(window.gamma, ends, strict=True)]


def every_gamma(most: int, max_num_seqs: int) -> ByBatchWindow:
    """A window that names every number of tokens from 0 to ``most``, which is what vLLM captures
    GPU graphs for: ``most`` but for the largest batches, which draft less and less."""
    fewer = range(1, min(most, max_num_seqs - 1) + 1)
    later = {str(max_num_seqs - len(fewer) + less): most - less for less in fewer}
    return ByBatchWindow.model_validate({"kind": "by_batch", "gamma": {"1": most, **later}})

"""Policies as vLLM can run them: how many tokens to draft at each batch size."""

from __future__ import annotations

from dataclasses import dataclass

from spectune.runtime.policies.blocks import BATCH_LIMIT
from spectune.runtime.policies.document import AnyPolicy, ByBatchWindow, ChooserPolicy, FixedWindow, NoStop
from spectune.traces.errors import PolicyError


@dataclass(frozen=True)
class Table:
    """``gammas[n]`` is the number of tokens drafted after a step of n requests; ``gammas[0]`` is never read. ``policy`` and
    ``version`` say whose it is: empty and 0 for the server's own."""

    gammas: tuple[int, ...]
    policy: str = ""
    version: int = 0


def table_of(policy: AnyPolicy, version: int, *, draft: str, most: int, max_num_seqs: int) -> Table:
    """A policy's table for a server that loaded ``draft`` and drafts at most ``most`` tokens.

    Raises PolicyError with what vLLM cannot do, and what it can.
    """
    if isinstance(policy, ChooserPolicy):
        raise PolicyError("vLLM cannot choose a draft for each prompt: it has one, loaded at its start; publish one of the candidates")
    if policy.draft not in (draft, "none") and policy.speculates:
        raise PolicyError(f"this server loaded the draft {draft!r}, not {policy.draft!r}; start it with that draft")
    if policy.is_tree:
        raise PolicyError(f"vLLM cannot run trees, as in {policy.label()!r}; publish a chain")
    if policy.shortlisted or not isinstance(policy.stop, NoStop):
        raise PolicyError(f"vLLM cannot run a stop or a shortlist, as in {policy.label()!r}; publish a window alone")
    window = policy.window
    if not isinstance(window, (FixedWindow, ByBatchWindow)):
        raise PolicyError(f'vLLM cannot run a window of kind {window.kind!r}; publish "fixed" or "by_batch"')
    if policy.gamma_max > most:
        raise PolicyError(f"this server drafts at most {most} tokens (num_speculative_tokens), not {policy.gamma_max}; start it with more")
    sizes = range(1, max_num_seqs + 1)
    gammas = [window.gamma if isinstance(window, FixedWindow) else window.at(size) for size in sizes]
    return Table((0, *gammas), policy.id, version)


def schedule_of(window: ByBatchWindow) -> list[list[int]]:
    """A window as ``num_speculative_tokens_per_batch_size``: ``[first size, last size, tokens]``, the last of them without an end."""
    sizes = [size for size, _ in window.gamma]
    ends = [*(size - 1 for size in sizes[1:]), max(BATCH_LIMIT, sizes[-1])]
    return [[size, end, gamma] for (size, gamma), end in zip(window.gamma, ends, strict=True)]


def every_gamma(most: int, max_num_seqs: int) -> ByBatchWindow:
    """A window that names every number of tokens from 0 to ``most``, which is what vLLM captures GPU graphs for: ``most`` but for the
    largest batches, which draft less and less."""
    fewer = range(1, min(most, max_num_seqs - 1) + 1)
    later = {str(max_num_seqs - len(fewer) + less): most - less for less in fewer}
    return ByBatchWindow.model_validate({"kind": "by_batch", "gamma": {"1": most, **later}})

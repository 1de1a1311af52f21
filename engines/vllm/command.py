"""The command line that starts a vLLM server with our agent, and the numbers of draft tokens that
are named in it."""

from __future__ import annotations

import json
from typing import Any

from spectune.engines.server_settings import vllm_settings
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.blocks import ByLoadWindow
from spectune.runtime.text_codec import positions_of
from spectune.traces.errors import PairError, PolicyError

SCHEDULER = "spectune.engines.vllm.agent.Scheduler"


def every_gamma(most: int, max_num_seqs: int, gamma: int | None = None) -> ByLoadWindow:
    """A window that names every number of tokens from 0 to ``most``, as vLLM captures full CUDA
    graphs for those alone that it is started with: ``gamma`` (None: ``most``) but for the largest
    batches, one for each other number, which draft less and less. Fewer seats than numbers leave
    the smallest out."""
    usual = most if gamma is None else gamma
    others = [number for number in range(most, -1, -1) if number != usual][: max_num_seqs - 1]
    first = max_num_seqs - len(others) + 1
    return ByLoadWindow(kind="by_load", gamma={1: usual, **dict(enumerate(others, first))})


def speculative_config(
    path: str | None, most: int, max_num_seqs: int, method: str = "ngram"
) -> dict[str, Any]:
    """vLLM's ``--speculative-config`` of a server of our own: up to ``most`` tokens of a draft, or
    of a ``method`` without one, every number named, so that graphs are captured for each."""
    return vllm_settings(every_gamma(most, max_num_seqs), path, method)


def short_draft(spec: PairSpec, draft: str) -> str:
    """A line on a draft whose own length ends before the target's; empty where it does not, or has
    no checkpoint. Raises PairError for one that cannot be read."""
    path = spec.drafts.get(draft)
    ends, longest = (None if p is None else positions_of(p) for p in (path, spec.target))
    if ends is None or longest is None or ends >= longest:
        return ""
    return (
        f"draft {draft} ends at {ends} tokens (max_position_embeddings), the target at {longest}: "
        "vLLM's first model runner drafts for no request of a step of which one is longer"
    )


def server_arguments(
    spec: PairSpec, *, draft: str | None, gamma: int, most: int | None, max_num_seqs: int
) -> tuple[str, ...]:
    """How to serve a pair with one of its drafts, by default its first, drafting ``gamma`` tokens
    until something is published (the largest batches others, :func:`every_gamma`), and at most
    ``most`` (None: as many) from then on.

    Raises PairError for a draft that the pair has not, PolicyError where ``gamma`` is more than
    ``most``.
    """
    most = gamma if most is None else most
    if gamma > most:
        raise PolicyError(f"--gamma {gamma} is more than --gamma-max {most}")
    name = draft or spec.draft_names[0]
    if name not in spec.draft_names:
        has = ", ".join(spec.draft_names)
        raise PairError(f"--draft {name}: pair {spec.name} has no such draft; it has: {has}")
    window = every_gamma(most, max_num_seqs, gamma)
    config = vllm_settings(window, spec.drafts.get(name), name) | {"num_speculative_tokens": most}
    options = {
        "max-num-seqs": str(max_num_seqs),
        "generation-config": "vllm",  # sampling is what requests say
        "speculative-config": json.dumps(config),
        "scheduler-cls": SCHEDULER,
    }
    arguments = (word for name, value in options.items() for word in (f"--{name}", value))
    return "vllm", "serve", spec.target, *arguments

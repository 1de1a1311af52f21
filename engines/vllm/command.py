"""The command line that starts a vLLM server with our agent, and the numbers of draft tokens that
are named in it."""

from __future__ import annotations

import json
from typing import Any

from spectune.engines.export import Drafting, vllm_settings
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.blocks import ByLoadWindow, FixedWindow
from spectune.traces.errors import PairError, PolicyError

SCHEDULER = "spectune.engines.vllm.agent.Scheduler"


def every_gamma(most: int, max_num_seqs: int) -> ByLoadWindow:
    """A window that names every number of tokens from 0 to ``most``, which is what vLLM captures
    GPU graphs for: ``most`` but for the largest batches, which draft less and less. Fewer seats
    than numbers leave the smallest out."""
    fewer = range(1, min(most, max_num_seqs - 1) + 1)
    later = {max_num_seqs - len(fewer) + less: most - less for less in fewer}
    return ByLoadWindow(kind="by_load", gamma={1: most, **later})


def speculative_config(
    path: str | None, most: int, max_num_seqs: int, method: str = ""
) -> dict[str, Any]:
    """vLLM's ``--speculative-config`` of a server of our own: up to ``most`` tokens of a draft
    (None: of vLLM's ``method``, else prompt lookup), every number named, so that graphs are
    captured for each."""
    window = every_gamma(most, max_num_seqs)
    return vllm_settings(Drafting(path, window, method=method))


def initial_config(path: str | None, gamma: int, most: int) -> dict[str, Any]:
    """vLLM's ``--speculative-config`` of a user's server: ``gamma`` tokens at every batch size, up
    to ``most`` once something is published. Only where these differ it has a schedule, which
    changes what vLLM pads and which graphs it captures."""
    window: FixedWindow | ByLoadWindow = FixedWindow(gamma=gamma)
    if gamma != most:
        window = ByLoadWindow(kind="by_load", gamma={1: gamma})
    settings = vllm_settings(Drafting(path, window))
    return settings | {"num_speculative_tokens": most}


def server_arguments(
    spec: PairSpec, *, draft: str | None, gamma: int, most: int | None, max_num_seqs: int
) -> tuple[str, ...]:
    """How to serve a pair with one of its drafts, by default its first, drafting ``gamma`` tokens
    until something is published, and at most ``most`` (None: as many) from then on.

    Raises PairError for a draft that the pair has not, PolicyError where ``gamma`` is more than
    ``most``.
    """
    most = gamma if most is None else most
    if gamma > most:
        raise PolicyError(f"--gamma {gamma} is more than --gamma-max {most}")
    drafts = spec.drafts
    name = draft or next(iter(drafts), "ngram")
    if name != "ngram" and name not in drafts:
        has = ", ".join(spec.draft_names)
        raise PairError(f"--draft {name}: pair {spec.name} has no such draft; it has: {has}")
    config = json.dumps(initial_config(drafts.get(name), gamma, most))
    serve = ("vllm", "serve", spec.target, "--max-num-seqs", str(max_num_seqs))
    defaults = ("--generation-config", "vllm")  # sampling is what requests say
    return *serve, *defaults, "--speculative-config", config, "--scheduler-cls", SCHEDULER

"""The command line that starts a vLLM server which spectune records and steers, and the numbers of
draft tokens that are named in it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from spectune.engines.settings import Drafting, algorithm_of, vllm_settings
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.blocks import ByBatchWindow
from spectune.traces.errors import PairError

SCHEDULER = "spectune.engines.vllm.Scheduler"


def every_gamma(most: int, max_num_seqs: int) -> ByBatchWindow:
    """A window that names every number of tokens from 0 to ``most``, which is what vLLM captures
    GPU graphs for: ``most`` but for the largest batches, which draft less and less. Fewer seats
    than numbers leave the smallest out."""
    fewer = range(1, min(most, max_num_seqs - 1) + 1)
    later = {max_num_seqs - len(fewer) + less: most - less for less in fewer}
    gammas = {str(size): gamma for size, gamma in {1: most, **later}.items()}
    return ByBatchWindow.model_validate({"kind": "by_batch", "gamma": gammas})


def speculative_config(path: str | None, most: int, max_num_seqs: int) -> dict[str, Any]:
    """vLLM's ``--speculative-config``: up to ``most`` tokens of a draft (None: prompt lookup),
    every number named, so that graphs are captured for each."""
    window = every_gamma(most, max_num_seqs)
    return vllm_settings(Drafting(path, algorithm_of(path), window))


def server_arguments(
    spec: PairSpec, *, draft: str | None, most: int, max_num_seqs: int
) -> tuple[str, ...]:
    """How to serve a pair with one of its drafts, by default its first, drafting at most ``most``
    tokens; ``max_num_seqs`` is at least 2.

    Raises PairError for a draft that the pair has not.
    """
    drafts = dict(spec.drafts)
    name = draft or next(iter(drafts), "ngram")
    if name != "ngram" and name not in drafts:
        has = ", ".join(spec.draft_names)
        raise PairError(f"--draft-name {name}: pair {spec.name} has no such draft; it has: {has}")
    config = json.dumps(speculative_config(drafts.get(name), most, max_num_seqs))
    serve = ("vllm", "serve", spec.target, "--max-num-seqs", str(max_num_seqs))
    return *serve, "--speculative-config", config, "--scheduler-cls", SCHEDULER


def line_of(environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    """One line to paste."""
    set_first = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*set_first, *map(shlex.quote, arguments)])

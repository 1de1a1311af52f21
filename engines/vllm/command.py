"""The command line that starts a vLLM server which spectune records and steers, and the numbers of
draft tokens that are named in it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence

from spectune.engines.vllm.prompt_lookup import LEAST, MOST
from spectune.runtime.pair import PairSpec, head_algorithm, is_head
from spectune.runtime.policies.blocks import BATCH_LIMIT, ByBatchWindow
from spectune.traces.errors import PairError

SCHEDULER = "spectune.engines.vllm.Scheduler"


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


def speculative_config(
    draft: str, path: str | None, most: int, max_num_seqs: int
) -> dict[str, object]:
    """vLLM's ``--speculative-config``: up to ``most`` tokens of a draft (``ngram`` has no path),
    every number named, so that graphs are captured for each."""
    about: dict[str, object] = {
        "num_speculative_tokens": most,
        "num_speculative_tokens_per_batch_size": schedule_of(every_gamma(most, max_num_seqs)),
    }
    if path is None:
        return {"method": "ngram", "prompt_lookup_max": MOST, "prompt_lookup_min": LEAST, **about}
    method = head_algorithm(path) if is_head(path) else "draft_model"
    return {"method": method, "model": path, **about}


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
    config = json.dumps(speculative_config(name, drafts.get(name), most, max_num_seqs))
    serve = ("vllm", "serve", spec.target, "--max-num-seqs", str(max_num_seqs))
    return *serve, "--speculative-config", config, "--scheduler-cls", SCHEDULER


def line_of(environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    """One line to paste."""
    set_first = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*set_first, *map(shlex.quote, arguments)])

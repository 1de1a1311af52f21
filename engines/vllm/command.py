"""The command line that starts a vLLM server which spectune records and steers."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from spectune.engines.vllm.prompt_lookup import LEAST, MOST
from spectune.engines.vllm.tables import every_gamma, schedule_of
from spectune.runtime.pair import PairSpec, head_algorithm, is_head
from spectune.traces.errors import PairError

SCHEDULER = "spectune.engines.vllm.Scheduler"


@dataclass(frozen=True)
class ServerCommand:
    """``environment`` and ``arguments`` of the process to start."""

    environment: dict[str, str]
    arguments: tuple[str, ...]

    def line(self) -> str:
        """One line to paste."""
        set_first = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*set_first, *(shlex.quote(a) for a in self.arguments)])


def speculative_config(
    draft: str, path: str | None, most: int, max_num_seqs: int
) -> dict[str, object]:
    """vLLM's ``--speculative-config``: up to ``most`` tokens of a draft (``ngram`` has no path),
    every number named, so that graphs are captured for each."""
    schedule = schedule_of(every_gamma(most, max_num_seqs))
    about: dict[str, object] = {
        "num_speculative_tokens": most,
        "num_speculative_tokens_per_batch_size": schedule,
    }
    if path is None:
        return {"method": "ngram", "prompt_lookup_max": MOST, "prompt_lookup_min": LEAST, **about}
    return {
        "method": head_algorithm(path) if is_head(path) else "draft_model",
        "model": path,
        **about,
    }


def server_command(
    spec: PairSpec, environment: dict[str, str], *, draft: str | None, most: int, max_num_seqs: int
) -> ServerCommand:
    """How to serve a pair with one of its drafts, by default its first, drafting at most ``most``
    tokens; ``max_num_seqs`` is at least 2.

    Raises PairError for a draft that the pair has not.
    """
    drafts = dict(spec.drafts)
    name = draft or next(iter(drafts), "ngram")
    if name != "ngram" and name not in drafts:
        raise PairError(
            f"--draft-name {name}: pair {spec.name} has no such draft; it has: "
            f"{', '.join(spec.draft_names)}"
        )
    config = speculative_config(name, drafts.get(name), most, max_num_seqs)
    arguments = ("vllm", "serve", spec.target, "--max-num-seqs", str(max_num_seqs))
    return ServerCommand(
        environment,
        (*arguments, "--speculative-config", json.dumps(config), "--scheduler-cls", SCHEDULER),
    )

"""A policy as the settings of other servers, after their documentation: vLLM 0.32
(``--speculative-config``) and SGLang 0.5.23 (``--speculative-*`` and its adaptive
configuration)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from spectune.engines.abilities import nearest_chain
from spectune.engines.vllm.prompt_lookup import LEAST, MOST
from spectune.runtime.checkpoints import head_algorithm, is_head
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.blocks import BATCH_LIMIT
from spectune.runtime.policies.document import (
    ByLoadWindow,
    FixedWindow,
    LoadPolicy,
    Policy,
    PromptPolicy,
    TopKGrowth,
    Window,
)
from spectune.traces.errors import PolicyError

Settings = dict[str, Any]


def schedule_of(window: ByLoadWindow) -> list[list[int]]:
    """A table as ``num_speculative_tokens_per_batch_size``: ``[first size, last size, tokens]``,
    the last of them without an end."""
    sizes, gammas = [*window.gamma], window.gamma.values()
    ends = [*(size - 1 for size in sizes[1:]), max(BATCH_LIMIT, sizes[-1])]
    return [[*slot] for slot in zip(sizes, ends, gammas, strict=True)]


def algorithm_of(path: str | None) -> str:
    """How a draft is made: ``ngram`` (no path), ``draft model``, or of a head ``eagle`` or
    ``eagle3``."""
    if path is None:
        return "ngram"
    return head_algorithm(path) if is_head(path) else "draft model"


def vllm_settings(window: Window, path: str | None, method: str = "ngram") -> Settings:
    """``method``: vLLM's name of a draft that has no path."""
    method = method if path is None else VLLM_METHODS[algorithm_of(path)]
    settings: Settings = {"method": method, "num_speculative_tokens": window.gamma_max}
    if isinstance(window, ByLoadWindow):
        settings["num_speculative_tokens_per_batch_size"] = schedule_of(window)
    if method == "ngram":
        return settings | {"prompt_lookup_max": MOST, "prompt_lookup_min": LEAST}
    return settings if path is None else settings | {"model": path}


def _sglang_settings(policy: Policy, path: str | None) -> Settings:
    """``speculative_adaptive_config`` is what the file holds that is named there."""
    steps, window, growth = policy.gamma_max, policy.window, policy.growth
    width = growth.width if isinstance(growth, TopKGrowth) else 1
    tokens = policy.select.top_n or steps
    algorithm = algorithm_of(path).replace("draft model", "standalone").upper()
    most = steps if width == 1 else width + (steps - 1) * width * width
    if not steps <= tokens <= most:
        raise ValueError(f"{steps} steps with top-k {width} draft {steps} to {most} tokens")
    settings = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": tokens + 1}
    if path is None:
        return settings | {"speculative_ngram_max_bfs_breadth": 1}
    settings |= {
        "speculative_draft_model_path": path,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": width,
    }
    if isinstance(window, ByLoadWindow):
        slots = {str(size): {"candidate_steps": [gamma]} for size, gamma in window.gamma.items()}
        settings |= {"speculative_adaptive": True, "speculative_adaptive_config": slots}
    return settings


def vllm_line(settings: Mapping[str, Any], target: str) -> str:
    config = f" --speculative-config {shlex.quote(json.dumps(settings))}" if settings else ""
    return f"vllm serve {shlex.quote(target)}{config}"


def _sglang_line(settings: Mapping[str, Any], target: str) -> str:
    flags = {k: v for k, v in settings.items() if not k.startswith("speculative_adaptive")}
    line = f"python -m sglang.launch_server --model-path {shlex.quote(target)}{_flags(flags)}"
    if "speculative_adaptive" not in settings:
        return line
    slots = shlex.quote(json.dumps(settings["speculative_adaptive_config"]))
    adaptive = "--speculative-adaptive --speculative-adaptive-config adaptive.json"
    return f"echo {slots} > adaptive.json && {line} {adaptive}"


def _flags(settings: Mapping[str, Any]) -> str:
    flags = ((name.replace("_", "-"), shlex.quote(str(v))) for name, v in settings.items())
    return "".join(f" --{name} {value}" for name, value in flags)


class Export(NamedTuple):
    """A server that policies are exported for. ``tables``: how a draft must be made
    (:func:`algorithm_of`) for tables by batch size, ``trees``: for EAGLE-2's trees.
    ``settings``: of a policy and its draft's path, as JSON has them; ``line``: what to type to
    serve a target with them, or none."""

    title: str
    tables: tuple[str, ...]
    trees: tuple[str, ...]
    settings: Callable[[Policy, str | None], Settings]
    line: Callable[[Mapping[str, Any], str], str]

    def check(self, policy: Policy, path: str | None) -> None:
        """Raises ValueError for a policy that the server cannot express."""
        window, growth = policy.window, policy.growth
        by_batch = isinstance(window, ByLoadWindow)
        if not isinstance(window, (FixedWindow, ByLoadWindow)):
            raise ValueError("it has no rule that adapts as this window does")
        if policy.stop.kind != "none" or policy.shortlisted:
            kind = "shortlist" if policy.shortlisted else "stop"
            raise ValueError(f"it has no {kind} of this kind")
        if isinstance(window, ByLoadWindow) and window.contexts:
            raise ValueError("it has no tables by context")
        for applies, able, feature in (
            (by_batch, self.tables, "tables by batch size"),
            (policy.is_tree, self.trees, "trees"),
        ):
            if applies and algorithm_of(path) not in able:
                drafts = f"{feature} of {', '.join(able)} alone" if able else f"no {feature}"
                raise ValueError(f"{self.title} has {drafts}")
        if policy.is_tree:
            if not isinstance(growth, TopKGrowth) or growth.score == "coupled" or policy.stratify:
                raise ValueError("trees are exported with growth top_k by probability, and no bins")
            if by_batch:
                raise ValueError("tables by batch size are of chains")


HEADS = ("eagle", "eagle3")
EVERY = ("ngram", "draft model", *HEADS)
VLLM_METHODS = dict(zip(EVERY, ("ngram", "draft_model", *HEADS), strict=True))
EXPORTS = {
    "vllm": Export(
        "vLLM", EVERY, (), lambda p, path: vllm_settings(p.window, path, p.draft), vllm_line
    ),
    "sglang": Export("SGLang", HEADS, HEADS, _sglang_settings, _sglang_line),
}


def engine_settings(policy: Policy, pair: PairSpec, engine: str) -> Settings:
    """The settings of an engine (of :data:`EXPORTS`) for a policy, {} for one that does not
    speculate. Raises PolicyError for a draft that the pair has not, and a policy that the engine
    cannot express, with the nearest that it can."""
    if isinstance(policy, PromptPolicy):
        raise PolicyError(
            f"{engine} cannot choose a policy for each prompt; "
            "export one of the policies that it chooses from"
        )
    if isinstance(policy, LoadPolicy):
        raise PolicyError(
            f"{engine} cannot change between whole policies by load; export one of its entries"
        )
    if not policy.speculates:
        return {}
    if policy.draft not in pair.draft_names:
        known = ", ".join(pair.draft_names)
        raise PolicyError(f"pair {pair.name} has no draft {policy.draft!r}; it has: {known}")
    try:
        if policy.draft in pair.methods and engine != "vllm":
            raise ValueError(f"{policy.draft} is a method of vLLM's")
        path = pair.drafts.get(policy.draft)
        EXPORTS[engine].check(policy, path)
        return EXPORTS[engine].settings(policy, path)
    except ValueError as error:
        chain = nearest_chain(policy, ["fixed"])
        near = json.dumps({"draft": chain.draft, "window": chain.window.model_dump()})
        nearest = f"that it can is {near}, and `simulate` says what that is worth"
        raise PolicyError(
            f"{engine} cannot express {policy.label()!r}: {error}; the nearest "
            f"{'is a chain of another draft' if chain == policy else nearest}"
        ) from None


def engine_line(settings: Mapping[str, Any], pair: PairSpec, engine: str) -> str:
    """What to type to serve the pair's target with :func:`engine_settings`."""
    return EXPORTS[engine].line(settings, pair.target)

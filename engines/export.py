"""A policy as the settings of other servers, after their documentation: vLLM 0.32
(``--speculative-config``), SGLang 0.5.23 (``--speculative-*`` and its adaptive configuration) and
llama.cpp b11549 (``--spec-*``, whose models are GGUF files)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from spectune.engines.abilities import nearest_chain
from spectune.engines.vllm.prompt_lookup import LEAST, MOST
from spectune.runtime.checkpoints import head_algorithm, is_head
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.blocks import BATCH_LIMIT
from spectune.runtime.policies.document import (
    ByLoadWindow,
    FixedWindow,
    Policy,
    PromptPolicy,
    TopKGrowth,
)
from spectune.traces.errors import PolicyError

Settings = dict[str, Any]


@dataclass(frozen=True)
class Drafting:
    """What servers can say of a policy. ``model``: a draft's path, None for prompt lookup.
    ``width`` and ``top_n``: EAGLE-2's tree, None for a chain. ``method``: vLLM's name of a draft
    that it alone has."""

    model: str | None
    window: FixedWindow | ByLoadWindow
    width: int | None = None
    top_n: int | None = None
    method: str = ""

    @property
    def algorithm(self) -> str:
        """``ngram``, ``draft model``, or of a head ``eagle`` or ``eagle3``."""
        if self.model is None:
            return "ngram"
        return head_algorithm(self.model) if is_head(self.model) else "draft model"


def schedule_of(window: ByLoadWindow) -> list[list[int]]:
    """A table as ``num_speculative_tokens_per_batch_size``: ``[first size, last size, tokens]``,
    the last of them without an end."""
    sizes, gammas = [*window.gamma], window.gamma.values()
    ends = [*(size - 1 for size in sizes[1:]), max(BATCH_LIMIT, sizes[-1])]
    return [[*slot] for slot in zip(sizes, ends, gammas, strict=True)]


def vllm_settings(drafting: Drafting) -> Settings:
    method = drafting.method or VLLM_METHODS[drafting.algorithm]
    settings: Settings = {"method": method, "num_speculative_tokens": drafting.window.gamma_max}
    if isinstance(drafting.window, ByLoadWindow):
        settings["num_speculative_tokens_per_batch_size"] = schedule_of(drafting.window)
    if method == "ngram":
        return settings | {"prompt_lookup_max": MOST, "prompt_lookup_min": LEAST}
    return settings if drafting.model is None else settings | {"model": drafting.model}


def _sglang_settings(drafting: Drafting) -> Settings:
    """``speculative_adaptive_config`` is what the file holds that is named there."""
    steps, window, width = drafting.window.gamma_max, drafting.window, drafting.width or 1
    algorithm = {"draft model": "standalone"}.get(drafting.algorithm, drafting.algorithm).upper()
    tokens = drafting.top_n or steps
    most = steps if width == 1 else width + (steps - 1) * width * width
    if not steps <= tokens <= most:
        raise ValueError(f"{steps} steps with top-k {width} draft {steps} to {most} tokens")
    settings = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": tokens + 1}
    if drafting.model is None:
        return settings | {"speculative_ngram_max_bfs_breadth": 1}
    settings |= {
        "speculative_draft_model_path": drafting.model,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": width,
    }
    if isinstance(window, ByLoadWindow):
        slots = {str(size): {"candidate_steps": [gamma]} for size, gamma in window.gamma.items()}
        settings |= {"speculative_adaptive": True, "speculative_adaptive_config": slots}
    return settings


def _llamacpp_settings(drafting: Drafting) -> Settings:
    return {
        "spec_type": {"draft model": "draft-simple", "eagle3": "draft-eagle3"}[drafting.algorithm],
        "spec_draft_model": _gguf(drafting.model or ""),
        "spec_draft_n_max": drafting.window.gamma_max,
        "spec_draft_n_min": 0,
        "spec_draft_p_min": 0,
    }


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


def _llamacpp_line(settings: Mapping[str, Any], target: str) -> str:
    return f"llama-server --model {shlex.quote(_gguf(target))}{_flags(settings)}"


def _gguf(path: str) -> str:
    """The GGUF file of a checkpoint folder, as llama.cpp's own converter is told to name it."""
    return path if path.endswith(".gguf") else f"{path.rstrip('/')}.gguf"


def _flags(settings: Mapping[str, Any]) -> str:
    flags = ((name.replace("_", "-"), shlex.quote(str(v))) for name, v in settings.items())
    return "".join(f" --{name} {value}" for name, value in flags)


class Export(NamedTuple):
    """A server that policies are exported for. ``chains``: how a draft must be made
    (:attr:`Drafting.algorithm`), ``tables``: for tables by batch size, ``trees``: for EAGLE-2's.
    ``settings``: as JSON has them; ``line``: what to type to serve a target with them, or none."""

    title: str
    chains: tuple[str, ...]
    tables: tuple[str, ...]
    trees: tuple[str, ...]
    settings: Callable[[Drafting], Settings]
    line: Callable[[Mapping[str, Any], str], str]


HEADS = ("eagle", "eagle3")
EVERY = ("ngram", "draft model", *HEADS)
VLLM_METHODS = dict(zip(EVERY, ("ngram", "draft_model", *HEADS), strict=True))
EXPORTS = {
    "vllm": Export("vLLM", EVERY, EVERY, (), vllm_settings, vllm_line),
    "sglang": Export("SGLang", EVERY, HEADS, HEADS, _sglang_settings, _sglang_line),
    "llamacpp": Export(
        "llama.cpp", ("draft model", "eagle3"), (), (), _llamacpp_settings, _llamacpp_line
    ),
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
    if not policy.speculates:
        return {}
    if policy.draft not in pair.draft_names:
        known = ", ".join(pair.draft_names)
        raise PolicyError(f"pair {pair.name} has no draft {policy.draft!r}; it has: {known}")
    try:
        if policy.draft in pair.methods and engine != "vllm":
            raise ValueError(f"{policy.draft} is a method of vLLM's")
        return EXPORTS[engine].settings(_drafting(policy, pair, EXPORTS[engine]))
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


def _drafting(policy: Policy, pair: PairSpec, engine: Export) -> Drafting:
    """What engines can say of a policy. Raises ValueError for what this one cannot."""
    window, growth = policy.window, policy.growth
    if not isinstance(window, (FixedWindow, ByLoadWindow)):
        raise ValueError("it has no rule that adapts as this window does")
    if policy.stop.kind != "none" or policy.shortlisted:
        raise ValueError(f"it has no {'shortlist' if policy.shortlisted else 'stop'} of this kind")
    method = policy.draft if policy.draft in pair.methods else ""
    chain = Drafting(pair.drafts.get(policy.draft), window, method=method)
    if isinstance(window, ByLoadWindow) and window.contexts:
        raise ValueError("it has no tables by context")
    by_batch = isinstance(window, ByLoadWindow)
    for applies, able, what in (
        (True, engine.chains, "chains"),
        (by_batch, engine.tables, "tables by batch size"),
        (policy.is_tree, engine.trees, "trees"),
    ):
        if applies and chain.algorithm not in able:
            drafts = f"{what} of {', '.join(able)} alone" if able else f"no {what}"
            raise ValueError(f"{engine.title} has {drafts}")
    if not policy.is_tree:
        return chain
    if not isinstance(growth, TopKGrowth) or growth.score == "coupled" or policy.stratify:
        raise ValueError("trees are exported with growth top_k by probability, and no bins")
    if by_batch:
        raise ValueError("tables by batch size are of chains")
    return Drafting(chain.model, window, growth.width, policy.select.top_n)

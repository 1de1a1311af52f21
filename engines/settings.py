"""Engines' settings for speculation, after their documentation: vLLM 0.32
(``--speculative-config``), SGLang 0.5.23 (``--speculative-*`` and its adaptive configuration) and
llama.cpp b11549 (``--spec-*``)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from spectune.engines.vllm.prompt_lookup import LEAST, MOST
from spectune.runtime.checkpoints import head_algorithm, is_head
from spectune.runtime.policies.blocks import BATCH_LIMIT, ByLoadWindow, FixedWindow


@dataclass(frozen=True)
class Drafting:
    """What engines can say of a policy. ``model``: a draft's path, None for prompt lookup.
    ``algorithm``: of an EAGLE head, or a method of vLLM's own; else empty. ``width`` and ``top_n``:
    EAGLE-2's tree, None for a chain."""

    model: str | None
    algorithm: str
    window: FixedWindow | ByLoadWindow
    width: int | None = None
    top_n: int | None = None

    @property
    def gamma_max(self) -> int:
        return self.window.gamma if isinstance(self.window, FixedWindow) else self.window.gamma_max


def algorithm_of(path: str | None) -> str:
    """Of the head there; empty for a language model, and for none."""
    return head_algorithm(path) if path is not None and is_head(path) else ""


def schedule_of(window: ByLoadWindow) -> list[list[int]]:
    """A window as ``num_speculative_tokens_per_batch_size``: ``[first size, last size, tokens]``,
    the last of them without an end."""
    sizes, gammas = [*window.gamma], window.gamma.values()
    ends = [*(size - 1 for size in sizes[1:]), max(BATCH_LIMIT, sizes[-1])]
    return [[*slot] for slot in zip(sizes, ends, gammas, strict=True)]


def vllm_settings(drafting: Drafting) -> dict[str, Any]:
    """vLLM's ``--speculative-config``. Raises ValueError for a tree."""
    if drafting.width is not None:
        raise ValueError("vLLM has no trees")
    settings: dict[str, Any] = {"method": drafting.algorithm or "ngram"}
    if drafting.model is not None:
        settings = {"method": drafting.algorithm or "draft_model", "model": drafting.model}
    settings["num_speculative_tokens"] = drafting.gamma_max
    if isinstance(drafting.window, ByLoadWindow):
        settings["num_speculative_tokens_per_batch_size"] = schedule_of(drafting.window)
    if settings["method"] == "ngram":
        settings |= {"prompt_lookup_max": MOST, "prompt_lookup_min": LEAST}
    return settings


def vllm_line(settings: Mapping[str, Any], target: str) -> str:
    start = f"vllm serve {shlex.quote(target)}"
    if not settings:
        return start
    return f"{start} --speculative-config {shlex.quote(json.dumps(settings))}"


def sglang_settings(drafting: Drafting) -> dict[str, Any]:
    """SGLang's ``--speculative-*`` arguments; ``speculative_adaptive_config`` is what the file
    holds that is named there. Raises ValueError for a window by batch of anything but a head's
    chain, and for a tree of a size that it does not draft."""
    steps, window, width = drafting.gamma_max, drafting.window, drafting.width or 1
    if isinstance(window, ByLoadWindow) and (not drafting.algorithm or width != 1):
        raise ValueError("SGLang takes steps by batch size with a chain of an EAGLE head alone")
    if drafting.model is None:
        return {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": steps + 1,
            "speculative_ngram_max_bfs_breadth": 1,
        }
    tokens = drafting.top_n or steps
    most = steps if width == 1 else width + (steps - 1) * width * width
    if not steps <= tokens <= most:
        raise ValueError(f"{steps} steps with top-k {width} draft {steps} to {most} tokens")
    settings: dict[str, Any] = {
        "speculative_algorithm": (drafting.algorithm or "standalone").upper(),
        "speculative_draft_model_path": drafting.model,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": width,
        "speculative_num_draft_tokens": tokens + 1,
    }
    if isinstance(window, ByLoadWindow):
        slots = {str(size): {"candidate_steps": [gamma]} for size, gamma in window.gamma.items()}
        settings |= {"speculative_adaptive": True, "speculative_adaptive_config": slots}
    return settings


def sglang_line(settings: Mapping[str, Any], target: str) -> str:
    start = f"python -m sglang.launch_server --model-path {shlex.quote(target)}"
    flags = _flags({k: v for k, v in settings.items() if not k.startswith("speculative_adaptive")})
    slots = settings.get("speculative_adaptive_config")
    if slots is None:
        return " ".join([start, *flags])
    adaptive = "--speculative-adaptive --speculative-adaptive-config adaptive.json"
    written = f"echo {shlex.quote(json.dumps(slots))} > adaptive.json"
    return f"{written} && {' '.join([start, *flags, adaptive])}"


def llamacpp_settings(drafting: Drafting) -> dict[str, Any]:
    """llama.cpp's ``--spec-*`` arguments. Models are GGUF files. Raises ValueError for a tree, a
    window by batch, prompt lookup and a head of EAGLE-1 or 2."""
    if drafting.width is not None:
        raise ValueError("llama.cpp has no trees")
    if isinstance(drafting.window, ByLoadWindow):
        raise ValueError("llama.cpp drafts as many tokens at every batch size")
    if drafting.model is None:
        raise ValueError("llama.cpp looks prompts up by rules of its own")
    if drafting.algorithm == "eagle":
        raise ValueError("of EAGLE's heads llama.cpp has EAGLE-3's alone")
    return {
        "spec_type": "draft-eagle3" if drafting.algorithm else "draft-simple",
        "spec_draft_model": _gguf(drafting.model),
        "spec_draft_n_max": drafting.gamma_max,
        "spec_draft_n_min": 0,
        "spec_draft_p_min": 0,
    }


def llamacpp_line(settings: Mapping[str, Any], target: str) -> str:
    return " ".join([f"llama-server --model {shlex.quote(_gguf(target))}", *_flags(settings)])


def _gguf(path: str) -> str:
    """The GGUF file of a checkpoint folder, as llama.cpp's own converter is told to name it."""
    return path if path.endswith(".gguf") else f"{path.rstrip('/')}.gguf"


def _flags(settings: Mapping[str, Any]) -> list[str]:
    return [
        f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in settings.items()
    ]


class EngineSettings(NamedTuple):
    """``settings`` of what a policy drafts, as JSON has them; ``line``: what to type to serve a
    target with them, or with none."""

    settings: Callable[[Drafting], dict[str, Any]]
    line: Callable[[Mapping[str, Any], str], str]


ENGINE_SETTINGS = {
    "vllm": EngineSettings(vllm_settings, vllm_line),
    "sglang": EngineSettings(sglang_settings, sglang_line),
    "llamacpp": EngineSettings(llamacpp_settings, llamacpp_line),
}

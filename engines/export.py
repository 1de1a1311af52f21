"""A policy as other engines' settings, where they can say the same thing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from spectune.engines.vllm.tables import schedule_of
from spectune.runtime.pair import PairSpec, head_algorithm, is_head
from spectune.runtime.policies.document import AnyPolicy, ByBatchWindow, ChooserPolicy, FixedWindow, Policy, TopKGrowth
from spectune.traces.errors import PolicyError


def engine_settings(policy: AnyPolicy, pair: PairSpec, engine: str) -> dict[str, Any]:
    """Settings of ``vllm``, ``sglang`` or ``tensorrt-llm`` for a fixed window without a stop (for vllm also one by batch): a chain,
    or EAGLE-2's tree of a head where the engine has trees.

    Raises PolicyError for a policy those engines cannot express: a window that adapts by our rules,
    a stop, another growth or score, a chooser of drafts.
    """
    if isinstance(policy, ChooserPolicy):
        raise PolicyError(f"{engine} cannot choose a draft for each prompt; export one of the candidates that `fit chooser` printed")
    if not policy.speculates:
        return {}
    windows = (FixedWindow, ByBatchWindow) if engine == "vllm" else FixedWindow
    if not isinstance(policy.window, windows) or policy.stop.kind != "none":
        raise PolicyError(
            f"{engine} cannot express {policy.label()!r}; export a fixed window without a stop "
            "(`tune` prints the best one among its baselines)"
        )
    path = dict(pair.drafts).get(policy.draft)
    algorithm = head_algorithm(path) if path is not None and is_head(path) else None
    growth = policy.growth
    grows = isinstance(growth, TopKGrowth) and growth.score != "coupled" and policy.stratify is None
    if policy.is_tree and (engine == "vllm" or algorithm is None or not grows):
        raise PolicyError(
            f"{engine} cannot express {policy.label()!r}; trees can be exported for sglang and tensorrt-llm alone, with an EAGLE head, "
            "growth top_k, its score by probability, and no bins"
        )
    return {"vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt_llm}[engine](policy, path, algorithm)


def engine_line(settings: Mapping[str, Any], pair: PairSpec, engine: str) -> str:
    """What to type to serve the pair's target with :func:`engine_settings`."""
    target, document = shlex.quote(pair.target), json.dumps(settings)
    if engine == "vllm":
        return f"vllm serve {target}" + (f" --speculative-config {shlex.quote(document)}" if settings else "")
    if engine == "sglang":
        flags = (f"--{key.replace('_', '-')} {shlex.quote(str(value))}" for key, value in settings.items())
        return " ".join([f"python -m sglang.launch_server --model-path {target}", *flags])
    if not settings:
        return f"trtllm-serve {target}"
    written = shlex.quote(json.dumps({"speculative_config": settings}))  # JSON is YAML
    return f"echo {written} > speculative.yaml && trtllm-serve {target} --extra_llm_api_options speculative.yaml"


def _vllm(policy: Policy, path: str | None, algorithm: str | None) -> dict[str, Any]:
    tokens: dict[str, Any] = {"num_speculative_tokens": policy.gamma_max}
    if isinstance(policy.window, ByBatchWindow):
        tokens["num_speculative_tokens_per_batch_size"] = schedule_of(policy.window)
    if policy.draft == "ngram":
        return {"method": "ngram", **tokens, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return {"method": algorithm or "draft_model", "model": path, **tokens}


def _sglang(policy: Policy, path: str | None, algorithm: str | None) -> dict[str, Any]:
    gamma, growth, top_n = policy.gamma_max, policy.growth, policy.select.top_n
    if policy.draft == "ngram":
        return {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": gamma + 1}
    return {
        "speculative_algorithm": (algorithm or "standalone").upper(),
        "speculative_draft_model_path": path,
        "speculative_num_steps": gamma,
        "speculative_eagle_topk": growth.width if isinstance(growth, TopKGrowth) else 1,
        "speculative_num_draft_tokens": (top_n or gamma) + 1,
    }


def _tensorrt_llm(policy: Policy, path: str | None, algorithm: str | None) -> dict[str, Any]:
    gamma, growth = policy.gamma_max, policy.growth
    if policy.draft == "ngram":
        return {"decoding_type": "NGram", "max_draft_len": gamma, "max_matching_ngram_size": 3}
    decoding = "DraftTarget" if algorithm is None else algorithm.title()
    chain = {"decoding_type": decoding, "speculative_model": path, "max_draft_len": gamma}
    if not isinstance(growth, TopKGrowth):
        return chain
    tree = {"dynamic_tree_max_topK": growth.width, "max_total_draft_tokens": policy.select.top_n}
    return {**chain, "use_dynamic_tree": True, **tree}

"""A policy as other engines' settings, where they can say the same thing."""

from __future__ import annotations

from typing import Any

from spectune.runtime.pair import PairSpec, expanded, head_config, is_head
from spectune.runtime.policies.document import AnyPolicy, ChooserPolicy, TopKGrowth
from spectune.traces.errors import PolicyError


def engine_settings(policy: AnyPolicy, pair: PairSpec, engine: str) -> dict[str, Any]:
    """Settings of ``vllm``, ``sglang`` or ``tensorrt-llm`` for a fixed window without a stop: a chain, or EAGLE-2's tree of a head
    where the engine has trees.

    Raises PolicyError for a policy those engines cannot express: a window that adapts by our rules, a stop, another growth or score.
    """
    if isinstance(policy, ChooserPolicy):
        raise PolicyError(f"{engine} cannot choose a draft for each prompt; export one of the candidates that `fit chooser` printed")
    if not policy.speculates:
        return {}
    if policy.window.kind != "fixed" or policy.stop.kind != "none":
        raise PolicyError(
            f"{engine} cannot express {policy.label()!r}; export a fixed window without a stop "
            "(`tune` prints the best one among its baselines)"
        )
    gamma = policy.gamma_max
    path = dict(pair.drafts).get(policy.draft)
    head = path is not None and is_head(path)
    if policy.is_tree:
        growth = policy.growth
        if engine == "vllm" or not head or not isinstance(growth, TopKGrowth) or growth.score == "coupled" or policy.stratify:
            raise PolicyError(
                f"{engine} cannot express {policy.label()!r}; trees can be exported for sglang and tensorrt-llm alone, with an EAGLE head, "
                "growth top_k, its score by probability, and no bins"
            )
        assert policy.select.top_n is not None
        if engine == "sglang":
            return {
                "speculative_algorithm": _eagle(path).upper(),
                "speculative_draft_model_path": path,
                "speculative_num_steps": gamma,
                "speculative_eagle_topk": growth.width,
                "speculative_num_draft_tokens": policy.select.top_n + 1,
            }
        return {
            "decoding_type": _eagle(path).title(),
            "speculative_model": path,
            "max_draft_len": gamma,
            "use_dynamic_tree": True,
            "dynamic_tree_max_topK": growth.width,
            "max_total_draft_tokens": policy.select.top_n,
        }
    if policy.draft == "ngram":
        return {
            "vllm": {"method": "ngram", "num_speculative_tokens": gamma, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
            "sglang": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": gamma + 1},
            "tensorrt-llm": {"decoding_type": "NGram", "max_draft_len": gamma, "max_matching_ngram_size": 3},
        }[engine]
    if head:
        name = _eagle(path)
        return {
            "vllm": {"method": name, "model": path, "num_speculative_tokens": gamma},
            "sglang": {
                "speculative_algorithm": name.upper(),
                "speculative_draft_model_path": path,
                "speculative_num_steps": gamma,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": gamma + 1,
            },
            "tensorrt-llm": {"decoding_type": name.title(), "speculative_model": path, "max_draft_len": gamma},
        }[engine]
    return {
        "vllm": {"method": "draft_model", "model": path, "num_speculative_tokens": gamma},
        "sglang": {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": path,
            "speculative_num_steps": gamma,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": gamma + 1,
        },
        "tensorrt-llm": {"decoding_type": "DraftTarget", "speculative_model": path, "max_draft_len": gamma},
    }[engine]


def _eagle(path: str | None) -> str:
    """``eagle3`` or ``eagle``: what engines call a head's algorithm."""
    folder = expanded(path or "")
    config = head_config(folder) if (folder / "config.json").is_file() else {}
    said = [str(a).lower() for a in config.get("architectures") or ()] + [str(path).lower()]
    third = "draft_vocab_size" in config or "eagle_config" in config or any("eagle3" in s or "eagle-3" in s for s in said)
    return "eagle3" if third else "eagle"

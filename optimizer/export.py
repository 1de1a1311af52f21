"""A policy as other engines' settings, where they can say the same thing."""

from __future__ import annotations

from typing import Any

from runtime.pair import PairSpec
from runtime.policies.document import Policy
from traces.errors import PolicyError


def engine_settings(policy: Policy, pair: PairSpec, engine: str) -> dict[str, Any]:
    """Settings of ``vllm``, ``sglang`` or ``tensorrt-llm`` for a fixed window without a stop.

    Raises PolicyError for a policy those engines cannot express: a window that adapts by our rules, or a stop.
    """
    if not policy.speculates:
        return {}
    if policy.window.kind != "fixed" or policy.stop.kind != "none":
        raise PolicyError(
            f"{engine} cannot express {policy.label()!r}; export a fixed window without a stop "
            "(`tune` prints the best one among its baselines)"
        )
    gamma = policy.gamma_max
    path = dict(pair.drafts).get(policy.draft)
    if policy.draft == "ngram":
        return {
            "vllm": {"method": "ngram", "num_speculative_tokens": gamma, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
            "sglang": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": gamma + 1},
            "tensorrt-llm": {"decoding_type": "NGram", "max_draft_len": gamma, "max_matching_ngram_size": 3},
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

"""Measures how well the demo pair's drafts foresee its target: the tables of demo/pair/README.md.

    python -m demo.agreement --pair demo/pair

Agreement is the share of positions, in text the target wrote from the demo's prompts, at which the draft's proposal is
the target's token: the acceptance of the first drafted token. At temperature 0 the proposal is the draft's argmax. At
temperature 1 it is measured twice: the draft's argmax, and its argmax under the Gumbel noise the target drew with.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from spectune.demo.prompts import CATEGORIES, Prompt, demo_workload

HEAD = "head"
"""The folder of the EAGLE-3-style head, which demo/train_head.py measures itself."""
KINDS = ("greedy", "greedy, first 32", "argmax at T=1", "coupled at T=1")


def posterior_gumbel(log_distribution: Tensor, choice: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise [n, vocab] under which `choice` [n] is the argmax of `log_distribution` [n, vocab] + noise.

    Drawn from the noise's law given that choice, so text sampled by any means can be replayed as if it had been
    sampled with the noise (Maddison, Tarlow and Minka 2014, top-down construction).
    """
    uniform = torch.rand(log_distribution.shape, generator=generator).clamp_min(1e-12)
    free = log_distribution - (-uniform.log()).log()
    top = -(-torch.rand(len(choice), 1, generator=generator).clamp_min(1e-12).log()).log()
    # Every other value is a Gumbel truncated below the top, whose law does not depend on where it was reached.
    below = -torch.logaddexp(-top, -free)
    return below.scatter(1, choice[:, None], top) - log_distribution


@torch.inference_mode()
def agreement(
    pair: Path, prompts: list[Prompt], max_new_tokens: int = 128, batch: int = 30, seed: int = 0
) -> dict[str, dict[str, dict[str, float]]]:
    """Agreement by draft, category and kind, in fp32; a category's figure weighs each of its tokens alike."""
    spec = json.loads((pair / "pair.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(pair / spec["target"], padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(pair / spec["target"], dtype=torch.float32).eval()
    drafts = {
        name: AutoModelForCausalLM.from_pretrained(pair / path, dtype=torch.float32).eval()
        for name, path in spec["drafts"].items()
        if path != HEAD
    }
    torch.manual_seed(seed)
    noise = torch.Generator().manual_seed(seed)
    hits: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for category in CATEGORIES:
        texts = [prompt["turns"][0] for prompt in prompts if prompt["category"] == category]
        for at in range(0, len(texts), batch):
            inputs = tokenizer(texts[at : at + batch], return_tensors="pt", padding=True)
            width = inputs["input_ids"].shape[1]
            for temperature in (0, 1):
                sampling: dict[str, Any] = {"do_sample": False}
                if temperature:
                    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
                output = target.generate(**inputs, max_new_tokens=max_new_tokens, **sampling)
                written = output[:, width:]
                is_end = (written == tokenizer.eos_token_id).long()
                is_text = is_end.cumsum(1) - is_end == 0
                mask = torch.cat([inputs["attention_mask"], is_text.long()], dim=1)
                choice = written[is_text]

                def log_distribution(model: Any, output: Tensor = output, mask: Tensor = mask, width: int = width) -> Tensor:
                    # Position ids are given, as left padding would shift them.
                    positions = (mask.cumsum(1) - 1).clamp_min(0)
                    logits: Tensor = model(output, attention_mask=mask, position_ids=positions).logits
                    return logits[:, width - 1 : -1].float().log_softmax(-1)

                gumbel = posterior_gumbel(log_distribution(target)[is_text], choice, noise) if temperature else None
                for name, draft in drafts.items():
                    law = log_distribution(draft)[is_text]
                    kind = "argmax at T=1" if temperature else "greedy"
                    proposed = law.argmax(-1) == choice
                    hits[name, category, kind] += proposed.float().tolist()
                    if gumbel is None:
                        column = torch.arange(written.shape[1]).expand_as(written)[is_text]
                        hits[name, category, "greedy, first 32"] += proposed[column < 32].float().tolist()
                    else:
                        coupled = (law + gumbel).argmax(-1) == choice
                        hits[name, category, "coupled at T=1"] += coupled.float().tolist()
    return {
        name: {
            category: {kind: round(sum(h) / len(h), 4) for kind in KINDS if (h := hits[name, category, kind])}
            for category in CATEGORIES
        }
        for name in drafts
    }


def main() -> None:
    """Measures, and writes `agreement.json` beside the pair."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.agreement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, default=Path(__file__).parent / "pair")
    parser.add_argument("--limit", type=int, default=270, help="prompts, the categories in turn")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    measured = json.dumps(agreement(args.pair, demo_workload()[: args.limit]), indent=2)
    (args.pair / "agreement.json").write_text(measured + "\n")
    print(measured)


if __name__ == "__main__":
    main()

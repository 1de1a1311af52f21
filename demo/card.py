"""Measures how well the demo pair's drafts foresee its target, and writes the pair's model card.

    python -m demo.card --pair demo/pair

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
                    if gumbel is not None:
                        coupled = (law + gumbel).argmax(-1) == choice
                        hits[name, category, "coupled at T=1"] += coupled.float().tolist()
    return {
        name: {
            category: {kind: round(sum(h) / len(h), 4) for kind in KINDS if (h := hits[name, category, kind])}
            for category in CATEGORIES
        }
        for name in drafts
    }


def card(pair: Path, measured: dict[str, dict[str, dict[str, float]]], count: int) -> str:
    """The model card: what the pair is, what it learnt from, how it was trained, and how well its drafts do."""
    record = json.loads((pair / "training.json").read_text())
    settings = record["settings"]
    rows = []
    for name, parameters in record["parameters"].items():
        config = json.loads((pair / name / "config.json").read_text())
        size = (pair / name / "model.safetensors").stat().st_size / 1e6
        rows.append(
            f"| {name} | {parameters / 1e6:.2f} M | {config['hidden_size']} | {config['num_hidden_layers']} | "
            f"{config['num_attention_heads']} / {config['num_key_value_heads']} | {config['intermediate_size']} | "
            f"{size:.1f} MB | {record['held_out_loss'][name]:.3f} |"
        )
    agreements = [
        f"| {name} | {kind} | " + " | ".join(f"{measured[name][category][kind]:.2f}" for category in CATEGORIES) + " |"
        for name in measured
        for kind in KINDS
    ]
    stage_1, stage_2, batch = settings["steps"], settings["distill_steps"], settings["batch_tokens"]
    provisional = "" if record["is_final"] else "\n**Provisional: a snapshot taken while training went on.**\n"
    return "\n".join(
        [
            "---\nlicense: apache-2.0\nlibrary_name: transformers\ntags: [speculative-decoding]\n---",
            "# The demo pair",
            provisional,
            "A target and two drafts on one tokenizer, small enough to ship with spectune and to run on two CPU cores.",
            "They are ordinary `transformers` checkpoints in fp16. They write plausible Python, documentation and",
            "solutions of word problems, and know nothing: use them to study speculative decoding, not for their text.",
            "",
            "| model | parameters | hidden | layers | heads / KV | FFN | size | held-out loss (nats/token) |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "Llama architecture, tied embeddings, RoPE, head size 32. Trained on up to 512 tokens of context (2048",
            "positions are allowed). Byte-level BPE, 4096 tokens, digits stand alone; `<|endoftext|>` (id 0) begins,",
            "ends and pads.",
            "",
            "## Agreement",
            "",
            f"Share of positions at which the draft proposes the target's token, {count} prompts a category,",
            "up to 128 tokens each, fp32. *Coupled*: the draft proposes under the Gumbel noise the target draws with.",
            "Greedy text of a target this small falls into repetition, which drafts foresee easily: its first 32 tokens",
            "are also shown apart. Text sampled at temperature 1 does not repeat itself.",
            "",
            "| draft | proposal | " + " | ".join(CATEGORIES) + " |",
            "|---|---|" + "---|" * len(CATEGORIES),
            *agreements,
            "",
            *_head(pair),
            "## Training",
            "",
            f"`python -m demo.train` with seed {settings['seed']}, {batch} tokens a step, AdamW, bf16 autocast,",
            "warmup-stable-decay schedule:",
            "",
            f"- Stage 1, {stage_1} steps (the last {settings['long_steps']} at twice {settings['seq_len']} tokens of",
            f"  context): the target on the corpus, {stage_1 * batch / record['epoch_tokens']:.1f} epochs; from step "
            f"{settings['drafts_from']} on the",
            "  drafts learn the target's law (KL divergence) on the same batches.",
            f"- Stage 2, {stage_2} steps: the drafts learn the fixed target's law, half on the corpus, half on",
            f"  {settings['own_rows']} rows of text the target wrote itself (six in ten greedy, else T up to 1).",
            "",
            f"The corpus has {record['epoch_tokens'] / 1e6:.2f} M tokens, prose counted twice. Held out by a hash of",
            "the document's key (`demo/corpus.py`): 6% of modules with their docstrings, `help()` topics, GSM8K rows.",
            "",
            "- **Python standard library** (3.11): source, docstrings, `help()` topics. Python Software Foundation",
            "  License Version 2, (c) Python Software Foundation. It is read where it is installed; no copy ships.",
            "- **GSM8K**, training split (Cobbe et al., arXiv 2110.14168). MIT License, (c) OpenAI. No copy ships.",
            "",
            "The weights are under Apache-2.0, as this project is.",
            "",
        ]
    )


def _head(pair: Path) -> list[str]:
    """The section on the head, from its own training record; nothing where there is no head."""
    file = pair / HEAD / "training.json"
    if not file.exists():
        return []
    record = json.loads(file.read_text())
    settings, measured = record["settings"], record["agreement"]
    rows = []
    for kind in ("greedy", "coupled at T=1"):
        for name in measured:
            found = [measured[name][c][kind] for c in CATEGORIES]
            shares = " | ".join(f"{x['depth'][0]:.2f} -> {x['depth'][-1]:.2f}, {x['accepted']:.2f}" for x in found)
            rows.append(f"| {name} | {kind} | {shares} |")
    size = (pair / HEAD / "model.safetensors").stat().st_size / 1e6
    return [
        "## The head",
        "",
        f"`head` is an EAGLE-3-style head on the target: one layer, {record['parameters'] / 1e6:.2f} M parameters, {size:.1f} MB,",
        "reading the target's hidden states 2, 4 and 5 and sharing its output matrix, in the format of EAGLE-3 checkpoints",
        "(`docs/heads.md`). `python -m demo.train_head`",
        f"trained it for {settings['steps']} steps of {settings['rows'] * settings['length']} tokens with {settings['unroll']} steps of",
        "its own output each, half on the corpus, half on text the target wrote. " + record.get("note", ""),
        "",
        "Share of right proposals at depth 1 -> depth 5 of a chain that was right so far, and tokens kept of a chain of five:",
        "",
        "| draft | proposal | " + " | ".join(CATEGORIES) + " |",
        "|---|---|" + "---|" * len(CATEGORIES),
        *rows,
        "",
    ]


def main() -> None:
    """Measures, and writes `agreement.json` and `README.md` beside the pair."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, default=Path(__file__).parent / "pair")
    parser.add_argument("--limit", type=int, default=270, help="prompts, the categories in turn")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompts = demo_workload()[: args.limit]
    measured = agreement(args.pair, prompts)
    (args.pair / "agreement.json").write_text(json.dumps(measured, indent=2) + "\n")
    (args.pair / "README.md").write_text(card(args.pair, measured, len(prompts) // len(CATEGORIES)))
    print(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()

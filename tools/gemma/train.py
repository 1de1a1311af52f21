"""Trains drafts of Gemma 3 270M on texts that it wrote: an EAGLE-3 head, or a model of two layers.

    PYTHONPATH=tools python -m gemma.train head --minutes 90
    PYTHONPATH=tools python -m gemma.train small --minutes 90 --piece 8

The head has an output matrix of the tokens that are most frequent in the texts (``d2t``), the model
the target's own embeddings. Both learn the target's law over those tokens, the model also over
others, drawn anew in each batch. ``--piece``: ends after so many minutes; the same command goes on,
as after an interruption. When ``--minutes`` are over the draft is published beside the pair.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from spectune.optimizer.fit.fr_spec import frequency_order
from spectune.runtime.pair import read_pair
from train_demo import head
from train_demo.train import adamw, law_loss, stable_then_decay, unrolled_loss

UNROLL, OTHERS, BATCH_TOKENS = 3, 2048, 1024
LEARNING_RATE = {"head": 1e-3, "small": 5e-4}


def taps(layers: int) -> tuple[int, int, int]:
    """The target's hidden states that the head reads: the last is what its last layer reads."""
    return 2, layers // 2, layers - 1


def texts(file: Path, *, held_out: bool) -> list[list[int]]:
    """Prompts with what the target wrote after them."""
    rows = map(json.loads, file.read_text().splitlines())
    return [row["prompt"] + row["output"] for row in rows if row["held_out"] == held_out]


def batches(ids: list[list[int]], epoch: int) -> Iterator[Tensor]:
    """Texts of about one length side by side, cut to the shortest, in another order each epoch."""
    rng = Random(epoch)
    ordered = sorted(ids, key=lambda text: (len(text), rng.random()))
    rows = max(1, BATCH_TOKENS // len(ordered[len(ordered) // 2]))
    groups = [ordered[at : at + rows] for at in range(0, len(ordered), rows)]
    rng.shuffle(groups)
    for group in groups:
        if (shortest := min(map(len, group))) > 2 * UNROLL:
            yield torch.tensor([text[:shortest] for text in group])


class Head(head.Head):
    """An EAGLE-3 head that norms each of the target's states, with ``rows`` of the target's output
    matrix."""

    def __init__(self, config: LlamaConfig, target: Any, rows: Tensor) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, config.rms_norm_eps) for _ in "123")
        self.lm_head = nn.Linear(width, len(rows), bias=False).requires_grad_(False)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.get_output_embeddings().weight[rows])
            self.norm.weight.copy_(1 + target.model.norm.weight)
            self.fc.weight.mul_(0.1)[:, -width:] += torch.eye(width)
            self.midlayer.self_attn.o_proj.weight.mul_(0.1)
            self.midlayer.mlp.down_proj.weight.mul_(0.1)

    def fused(self, states: Sequence[Tensor]) -> Tensor:
        normed = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        out: Tensor = self.fc(torch.cat(normed, -1))
        return out


class Learner:
    """A draft of a target, and its loss on texts [B, T]; ``vocab``: tokens that it learns."""

    def __init__(self, kind: str, folder: str, vocab: Tensor) -> None:
        self.kind, self.vocab, self.folder = kind, vocab, folder
        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = self.target.requires_grad_(False).eval().config
        self.layers, self.embed = self.target.model.layers, self.target.get_input_embeddings()
        shared = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size",
            "num_hidden_layers", "bos_token_id", "eos_token_id")  # fmt: skip
        self.llama = LlamaConfig(**{key: getattr(config, key) for key in shared})
        self.rotary, self.taps = LlamaRotaryEmbedding(self.llama), taps(len(self.layers))
        if kind == "head":
            self.draft: Any = Head(self.llama, self.target, vocab)
            return
        short = copy.deepcopy(config)
        short.num_hidden_layers = 2
        short.layer_types = config.layer_types[:1] * 2  # vLLM takes drafts of one kind of layer
        self.draft = type(self.target)(short)
        for place in (0, -1):
            self.draft.model.layers[place].load_state_dict(self.layers[place].state_dict())
        self.draft.model.norm.load_state_dict(self.target.model.norm.state_dict())
        self.draft.set_input_embeddings(self.embed)
        self.draft.tie_weights()

    def loss(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and at each step the share of tokens that are the target's choice."""
        with torch.no_grad():
            out = self.target.model(ids, use_cache=False, output_hidden_states=True)
        last, weight = out.last_hidden_state, self.target.get_output_embeddings().weight
        if self.kind == "small":
            rows = weight[torch.cat([self.vocab, torch.randint(len(weight), (OTHERS,))])]
            own = self.draft.model(ids, use_cache=False).last_hidden_state
            law = F.linear(last, rows)
            return unrolled_loss([own], lambda x: F.linear(x, rows), law, law_loss)
        embedded = self.embed(ids[:, 1:])
        rotary = self.rotary(embedded, torch.arange(1, ids.shape[1])[None])
        hidden = self.draft.fused([out.hidden_states[tap][:, :-1] for tap in self.taps])
        steps = head.unroll(self.draft.midlayer, self.llama, hidden, embedded, rotary, UNROLL)
        law = F.linear(last[:, 1:], self.draft.lm_head.weight)
        return unrolled_loss(steps, lambda x: self.draft.lm_head(self.draft.norm(x)), law)

    def publish(self, out: Path) -> None:
        """Writes the draft's checkpoint."""
        if self.kind == "head":
            d2t = self.vocab - torch.arange(len(self.vocab))
            head.publish(self.draft, self.llama, out, states=self.taps, d2t=d2t, fc_norm=True)
        else:
            self.draft.to(torch.bfloat16).save_pretrained(out)
            AutoTokenizer.from_pretrained(self.folder).save_pretrained(out)


def train(learner: Learner, file: Path, work: Path, minutes: float, piece: float) -> bool:
    """Whether the minutes are over; what was learned is left in ``work``."""
    training, draft, rate = texts(file, held_out=False), learner.draft, LEARNING_RATE[learner.kind]
    optimizer = adamw(draft, rate, 0.01)
    state = {"seconds": 0.0, "epoch": 0, "tokens": 0}
    if work.exists():
        stored = torch.load(work, weights_only=True)
        state = stored["state"]
        draft.load_state_dict(stored["weights"], strict=False)
        optimizer.load_state_dict(stored["optimizer"])
    began, before, share, ended = time.monotonic(), state["seconds"], 0.0, False
    try:
        while not ended:
            for ids in batches(training, int(state["epoch"])):
                with torch.autocast("cpu", torch.bfloat16):
                    loss, shares = learner.loss(ids)
                torch.autograd.backward(loss)
                nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
                state["tokens"] += ids.numel()
                state["seconds"] = before + time.monotonic() - began
                share = min(1.0, state["seconds"] / max(60 * minutes, 1e-9))
                for group in optimizer.param_groups:
                    group["lr"] = rate * stable_then_decay(share, 0.4)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                ended = share == 1 or time.monotonic() - began > 60 * piece
                said = " ".join(f"{key} {value:.3f}" for key, value in shares.items())
                print(f"{share:.1%} {state['tokens']:.0f} tokens, {said}", flush=True)
                if ended:
                    break
            state["epoch"] += not ended
    finally:
        weights = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        torch.save({"state": state, "weights": weights, "optimizer": optimizer.state_dict()}, work)
    return share == 1


@torch.no_grad()
def agreement(learner: Learner, file: Path) -> str:
    """How often a draft's choice is the target's on held-out texts, step by step."""
    with torch.autocast("cpu", torch.bfloat16):
        found = [learner.loss(ids)[1] for ids in batches(texts(file, held_out=True), 0)]
    return ", ".join(f"{k} {sum(float(f[k]) for f in found) / len(found):.3f}" for k in found[0])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("kind", choices=[*LEARNING_RATE])
    add("--pair", type=Path, default=Path("build/real/pair.json"))
    add("--texts", type=Path, default=Path("build/real/own_texts.jsonl"))
    add("--vocab", type=int, default=16384, help="tokens that a draft learns")
    add("--minutes", type=float, default=90.0)
    add("--piece", type=float, default=math.inf)
    args = parser.parse_args(arguments)
    spec, work = read_pair(str(args.pair)), args.pair.parent / f"{args.kind}.pt"
    config = json.loads((Path(spec.target) / "config.json").read_text())
    ids = torch.tensor([id for text in texts(args.texts, held_out=False) for id in text])
    counts = torch.bincount(ids, minlength=config["vocab_size"]).numpy()
    order = frequency_order(counts, [config["eos_token_id"]]).order[: args.vocab]
    torch.manual_seed(1)
    learner = Learner(args.kind, spec.target, torch.tensor(order).sort().values)
    is_over = train(learner, args.texts, work, args.minutes, args.piece)
    print(f"the target's choice on held-out texts: {agreement(learner, args.texts)}")
    if is_over:
        learner.publish(args.pair.parent / args.kind)
        document = json.loads(args.pair.read_text())
        document["drafts"][args.kind] = args.kind
        args.pair.write_text(json.dumps(document) + "\n")
        print(f"published {args.pair.parent / args.kind}")


if __name__ == "__main__":
    main()

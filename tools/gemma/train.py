"""Trains drafts of Gemma 3 270M on texts that it wrote: an EAGLE-3 head, or a model of two layers.

    PYTHONPATH=tools python -m gemma.train head --minutes 90
    PYTHONPATH=tools python -m gemma.train small --minutes 90 --piece 8

The head has an output matrix of the tokens that are most frequent in the texts (``d2t``), the model
the target's own embeddings. Both learn the target's law over those tokens, the model also over some
others, drawn anew in each batch. ``--piece``: ends after so many minutes; the same command goes on.
When ``--minutes`` are over the draft is published beside the pair, and named in ``pair.json``.
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
SAVE_S = 120


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
        shortest = min(map(len, group))
        if shortest > 2 * UNROLL:
            yield torch.tensor([text[:shortest] for text in group])


class GemmaHead(head.Head):
    """An EAGLE-3 head that norms each of the target's states, with an output matrix of ``rows``
    of the target's."""

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

    def fused(self, states: Tensor) -> Tensor:
        parts = zip(self.fc_norm, states.chunk(3, -1), strict=True)
        out: Tensor = self.fc(torch.cat([norm(state) for norm, state in parts], -1))
        return out


class Learner:
    """A draft, and its loss on texts [B, T]."""

    def __init__(self, kind: str, folder: str, vocab: Tensor) -> None:
        self.kind, self.vocab = kind, vocab
        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.target.requires_grad_(False).eval()
        config = self.target.config
        shared = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size",
            "num_hidden_layers", "bos_token_id", "eos_token_id")  # fmt: skip
        self.llama = LlamaConfig(**{key: getattr(config, key) for key in shared})
        if kind == "head":
            self.draft: Any = GemmaHead(self.llama, self.target, vocab)
            self.rotary = LlamaRotaryEmbedding(self.llama)
            return
        short = copy.deepcopy(config)
        short.num_hidden_layers = 2
        short.layer_types = [config.layer_types[0], config.layer_types[-1]]
        self.draft = type(self.target)(short)
        for ours, theirs in ((0, 0), (1, -1)):
            layer = self.target.model.layers[theirs]
            self.draft.model.layers[ours].load_state_dict(layer.state_dict())
        self.draft.model.norm.load_state_dict(self.target.model.norm.state_dict())
        self.draft.set_input_embeddings(self.target.get_input_embeddings())
        self.draft.tie_weights()

    def loss(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            out = self.target.model(ids, use_cache=False, output_hidden_states=True)
        last, weight = out.last_hidden_state, self.target.get_output_embeddings().weight
        if self.kind == "head":
            states = (out.hidden_states[tap] for tap in taps(len(self.target.model.layers)))
            embedded = self.target.get_input_embeddings()(ids[:, 1:])
            rotary = self.rotary(embedded, torch.arange(1, ids.shape[1])[None])
            hidden = self.draft.fused(torch.cat([*states], -1)[:, :-1])
            layer = self.draft.midlayer
            steps = head.unroll(layer, self.llama, hidden, embedded, rotary, UNROLL)
            teacher = F.linear(last[:, 1:], self.draft.lm_head.weight)
            return unrolled_loss(steps, lambda x: self.draft.lm_head(self.draft.norm(x)), teacher)
        others = torch.randint(weight.shape[0], (OTHERS,))
        rows = weight[torch.cat([self.vocab, others])]
        states = self.draft.model(ids, use_cache=False).last_hidden_state
        logits, law = (F.linear(x, rows).flatten(0, 1) for x in (states, last))
        agree = (logits.argmax(-1) == law.argmax(-1)).float().mean()
        return law_loss(logits, law), {"step 0": agree}

    def publish(self, out: Path, source: str) -> None:
        """Writes the draft's checkpoint."""
        if self.kind == "head":
            offsets = self.vocab - torch.arange(len(self.vocab))
            states = taps(self.llama.num_hidden_layers)
            head.publish(self.draft, self.llama, out, states=states, d2t=offsets, fc_norm=True)
        else:
            self.draft.to(torch.bfloat16).save_pretrained(out)
            AutoTokenizer.from_pretrained(source).save_pretrained(out)


def train(learner: Learner, file: Path, work: Path, minutes: float, piece: float) -> bool:
    """Whether the minutes are over; otherwise a checkpoint is left in ``work``."""
    training, held = (texts(file, held_out=side) for side in (False, True))
    names = [name for name, p in learner.draft.named_parameters() if p.requires_grad]
    optimizer = adamw(learner.draft, LEARNING_RATE[learner.kind], 0.01)
    state = {"seconds": 0.0, "epoch": 0, "step": 0, "tokens": 0}
    if work.exists():
        stored = torch.load(work, weights_only=True)
        state = stored["state"]
        learner.draft.load_state_dict(stored["weights"], strict=False)
        optimizer.load_state_dict(stored["optimizer"])
    began = saved = time.monotonic()
    before, ended = state["seconds"], False
    share = min(1.0, before / max(60 * minutes, 1e-9))

    def save() -> None:
        weights = learner.draft.state_dict()
        document = {"state": state, "weights": {name: weights[name] for name in names}}
        torch.save({**document, "optimizer": optimizer.state_dict()}, work.with_suffix(".new"))
        work.with_suffix(".new").replace(work)

    while not ended:
        for ids in batches(training, state["epoch"]):
            with torch.autocast("cpu", torch.bfloat16):
                loss, agreement = learner.loss(ids)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(learner.draft.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE[learner.kind] * stable_then_decay(share, 0.4)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            state["step"] += 1
            state["tokens"] += ids.numel()
            state["seconds"] = before + time.monotonic() - began
            share = min(1.0, state["seconds"] / max(60 * minutes, 1e-9))
            if state["step"] % 20 == 1:
                said = " ".join(f"{key} {value:.3f}" for key, value in agreement.items())
                print(f"{share:.0%} {state['tokens']} tokens, {said}", flush=True)
            if time.monotonic() - saved > SAVE_S:
                saved = time.monotonic()
                save()
            if ended := share == 1 or time.monotonic() - began > 60 * piece:
                break
        state["epoch"] += not ended
    save()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = [learner.loss(ids)[1] for ids in batches(held, 0)]
    means = {key: sum(float(one[key]) for one in found) / len(found) for key in found[0]}
    said = ", ".join(f"{key} {value:.3f}" for key, value in means.items())
    print(f"{state['seconds'] / 60:.0f} of {minutes:g} minutes, {state['tokens']} tokens: "
          f"the target's choice on held-out texts in {said}", flush=True)  # fmt: skip
    return share == 1


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
    spec, out = read_pair(str(args.pair)), args.pair.parent / args.kind
    config = json.loads((Path(spec.target) / "config.json").read_text())
    counts = torch.zeros(config["vocab_size"], dtype=torch.int64)
    for ids in texts(args.texts, held_out=False):
        counts += torch.bincount(torch.tensor(ids), minlength=len(counts))
    marks = (config.get(name) for name in ("bos_token_id", "eos_token_id"))
    order = frequency_order(counts.numpy(), [id for id in marks if isinstance(id, int)]).order
    torch.manual_seed(1)
    learner = Learner(args.kind, spec.target, torch.tensor(order[: args.vocab]).sort().values)
    if train(learner, args.texts, args.pair.parent / f"{args.kind}.pt", args.minutes, args.piece):
        learner.publish(out, spec.target)
        document = json.loads(args.pair.read_text())
        document["drafts"][args.kind] = args.kind
        args.pair.write_text(json.dumps(document) + "\n")
        print(f"published {out}")


if __name__ == "__main__":
    main()

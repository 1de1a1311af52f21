"""Trains a target, two drafts and an EAGLE-3 head: the demo pair, or a larger one.

    PYTHONPATH=tools python -m train_demo.train --gsm8k gsm8k_train.jsonl --out demo/pair
    PYTHONPATH=tools python -m train_demo.train --shape large --gsm8k gsm8k_train.jsonl \\
        --corpus .venv/lib/python3.11/site-packages --out build/large --work build/large-work

Four stages, each of which leaves files in `--work` that are read instead of running it again:

- corpus: a tokenizer, the text as tokens, prompts cut from held-out text;
- target: learns the corpus, and is rounded to what int8 holds, so that the rounded one is what
  the others learn from;
- drafts: learn the target's law (KL divergence) on batches that are half corpus, half text that
  the target wrote itself, because that is what they will be asked to foresee;
- head: likewise, over several steps of its own output (`head.py`).

A stage has as many steps as its shape says, so that a seed and a device determine the result; or
with `--seconds` it goes by the clock. What the last three leave (`parts.py`) is small: a pair may
be trained on one machine and published on another, by the same command with `--parts`.

On a CPU with glibc, MALLOC_MMAP_THRESHOLD_=8589934592 and MALLOC_TRIM_THRESHOLD_=17179869184 in the
environment keep the large logits from being mapped and unmapped each step: measured, 1.6 times the
speed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.cache_utils import StaticCache

from train_demo import head
from train_demo.batches import prepare, read_corpus
from train_demo.parts import load_parts, round_weights, save_parts
from train_demo.recipes import RECIPES, build_model

STAGES = {"target": ("target",), "drafts": ("small", "medium"), "head": ("head",)}
"""The models that a stage trains."""
ENDS = {"target": 0.5, "own text": 0.58, "drafts": 0.8, "head": 1.0}
"""Where of ``--seconds`` a stage ends; the target writes its own text before the drafts learn."""
UNROLL = 4
"""Steps over its own output that each of the head's batches is gone through."""
UNROLL_DECAY = 0.8
"""Weight of each step's loss against the step before it, EAGLE-3's."""
CHECKPOINT_SECONDS = 600
LOG_STEPS = 20


@torch.inference_mode()
def generate(
    target: LlamaForCausalLM,
    prefix: Tensor,
    length: int,
    temperature: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Continues `prefix` [rows, p] to `length` tokens, row by row at `temperature` [rows] (0:
    greedy).

    An end-of-text token does not stop a row: the target goes on with a new document, as in
    training.
    """
    rows, width = prefix.shape
    cache = StaticCache(config=target.config, max_cache_len=length)
    keyword = (
        "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"
    )
    output = torch.empty(rows, length, dtype=torch.long, device=prefix.device)
    output[:, :width] = prefix
    step = prefix
    for at in range(width, length):
        out = target(step, use_cache=True, logits_to_keep=1, **{keyword: cache})
        logits = out.logits[:, -1].float()
        # argmax(logits + T g), g Gumbel, draws from softmax(logits / T), and at T = 0 is greedy.
        uniform = torch.rand(logits.shape, generator=generator, device=logits.device)
        uniform = uniform.clamp_min(1e-9)
        step = (logits - temperature[:, None] * (-uniform.log()).log()).argmax(-1, keepdim=True)
        output[:, at] = step[:, 0]
    return output


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [n, V] with tokens [n]."""
    return F.cross_entropy(logits.float(), labels)


def law_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy of logits with a teacher's [n, V]: the KL divergence up to a constant."""
    return F.cross_entropy(logits.float(), teacher.float().softmax(-1))


def unrolled_loss(
    steps: Iterable[Tensor],
    logits_of: Callable[[Tensor], Tensor],
    teacher: Tensor,
    law_loss: Callable[[Tensor, Tensor], Tensor] = law_loss,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a layer's outputs [B, n, H], step by step, toward a teacher's logits [B, n, V],
    and at each step the share of tokens that agree."""
    losses, weights, agreement = [], [], {}
    for j, hidden in enumerate(steps):
        logits = logits_of(hidden[:, j:]).flatten(0, 1)
        law = teacher[:, j:].flatten(0, 1)
        weights.append(UNROLL_DECAY**j)
        losses.append(law_loss(logits, law) * weights[j])
        agreement[f"step {j}"] = (logits.argmax(-1) == law.argmax(-1)).float().mean()
    return torch.stack(losses).sum() / sum(weights), agreement


def adamw(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def stable_then_decay(share: float, decay: float) -> float:
    """The warmup-stable-decay schedule's factor after a share of a stage: linear up over a
    twentieth, flat, then over ``decay`` 1 - sqrt down to nothing."""
    rise = min(1.0, share * 20 + 0.01)
    return min(rise, 1.0 - math.sqrt(max(0.0, 1.0 - (1.0 - share) / decay)))


class Trainer:
    """The models, the stream, and the stages over them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.recipe = args, RECIPES[args.shape]
        self.begun = time.monotonic()
        self.device = torch.device(args.device)
        self.work: Path = args.work
        self.parts: Path = args.parts or args.work
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.work / "tokenizer")
        self.tokenizer = tokenizer
        self.windows, self.held_out = read_corpus(self.work, args.seed)
        print(f"{len(self.windows.stream) / 1e6:.2f} M tokens in an epoch", flush=True)
        torch.manual_seed(args.seed)
        llamas = {
            name: build_model(shape, len(tokenizer), self.recipe.head_dim).to(self.device)
            for name, shape in self.recipe.models.items()
        }
        self.target = llamas["target"]
        self.head = head.Head(self.target.config).to(self.device)
        self.models: dict[str, nn.Module] = {**llamas, "head": self.head}
        self.token_loss, self.law_loss = token_loss, law_loss
        if self.device.type == "cuda":
            # Layers of one shape share their code, so compiling them apart takes seconds.
            for model in llamas.values():
                for layer in model.model.layers:
                    layer.compile(dynamic=False)
            self.token_loss, self.law_loss = torch.compile(token_loss), torch.compile(law_loss)
            # What does not compile runs as it is.
            torch._dynamo.config.suppress_errors = True

    def _progress(self, stage: str, first: int, share: float) -> Iterator[tuple[int, float]]:
        """Steps of a stage from the ``first``, and the share of it that is over before each."""
        steps, seconds = self.recipe.steps[stage], self.args.seconds
        step, begun, share_begun = first, time.monotonic(), share
        while share < 1.0:
            yield step, share
            step += 1
            if seconds is None:
                share = step / steps
                continue
            now = time.monotonic()
            if step == first + 1:  # the first step compiles, which is no progress
                begun = now
            left = self.begun + seconds * ENDS[stage] - begun
            share = share_begun + (1 - share_begun) * (now - begun) / left if left > 0 else 1.0

    def _logits(self, model: nn.Module, ids: Tensor) -> Tensor:
        """Logits [B * T, V] of texts [B, T], in bfloat16 autocast."""
        with torch.autocast(self.device.type, torch.bfloat16):
            logits: Tensor = model(ids, use_cache=False).logits
        return logits.flatten(0, 1)

    def _target_step(self, step: int, share: float) -> dict[str, Tensor]:
        """Gradients of the target on a batch of the corpus, at the end of twice the length."""
        length = self.recipe.seq_len * (2 if share >= 0.8 else 1)
        rows = max(1, self.recipe.batch_tokens // length)
        window = self.windows.batch(step, rows, length + 1).to(self.device)
        logits = self._logits(self.target, window[:, :-1].contiguous())
        loss = self.token_loss(logits, window[:, 1:].flatten())
        torch.autograd.backward(loss)
        return {"loss": loss.detach()}

    def _own_batch(self, step: int, tokens: int) -> Tensor:
        """Texts [B, T] of at most about ``tokens``, half of them the target's own."""
        rows = max(2, tokens // self.own_text.shape[1])
        return self.windows.mixed_batch(self.own_text, step, rows).to(self.device)

    def _drafts_step(self, step: int, share: float) -> dict[str, Tensor]:
        """Gradients of both drafts toward the target's law; returns their agreement in top-1."""
        ids = self._own_batch(step, self.recipe.batch_tokens)
        with torch.no_grad():
            teacher = self._logits(self.target, ids)
        measured = {}
        for name in STAGES["drafts"]:
            logits = self._logits(self.models[name], ids)
            torch.autograd.backward(self.law_loss(logits, teacher))
            measured[name] = (logits.argmax(-1) == teacher.argmax(-1)).float().mean()
        return measured

    def _head_step(self, step: int, share: float) -> dict[str, Tensor]:
        """Gradients of the head toward the target's law; returns its agreement at each step."""
        unroller = self.unroller
        ids = self._own_batch(step, self.recipe.batch_tokens // 2)
        with torch.autocast(self.device.type, torch.bfloat16):
            teacher, features = unroller.teacher(ids)
            steps = unroller.steps(ids, features.float(), UNROLL)
            loss, agreement = unrolled_loss(steps, unroller.logits, teacher[:, 1:], self.law_loss)
        torch.autograd.backward(loss)
        return agreement

    def _copy_of_target(self, dtype: torch.dtype) -> LlamaForCausalLM:
        """The target as it stands, not compiled and without gradients."""
        copy = LlamaForCausalLM(self.target.config).to(device=self.device, dtype=dtype)
        copy.load_state_dict(self.target.state_dict())
        return copy.requires_grad_(False).eval()

    @cached_property
    def unroller(self) -> head.Unroller:
        """The target and the head, which begins as the target's last layer."""
        return head.Unroller(self._copy_of_target(torch.float32), self.head)

    @cached_property
    def own_text(self) -> Tensor:
        """Text the target wrote from training prefixes, six rows in ten greedy, the rest at
        temperatures up to 1: int16 [rows, one and a half times the length of a window]. Written
        once and kept in the folder of work."""
        path = self.work / "own_text.pt"
        if path.exists():
            stored: Tensor = torch.load(path, weights_only=True)
            return stored
        writer = self._copy_of_target(torch.bfloat16)
        recipe, length = self.recipe, self.recipe.seq_len * 3 // 2
        cpu = torch.Generator().manual_seed(self.args.seed)
        noise = torch.Generator(device=self.device).manual_seed(self.args.seed)
        chunks: list[Tensor] = []
        rows = recipe.own_chunk
        while len(chunks) * rows < recipe.own_rows and not (chunks and self._is_over("own text")):
            begun = time.perf_counter()
            prefix = self.windows.prefixes(rows, length * (2 + len(chunks) % 4) // 12, cpu)
            draw = torch.rand(rows, 2, generator=cpu)
            temperature = torch.where(draw[:, 0] < 0.6, torch.zeros(rows), draw[:, 1])
            written = generate(
                writer, prefix.to(self.device), length, temperature.to(self.device), noise
            )
            chunks.append(written.to("cpu", torch.int16))
            seconds = time.perf_counter() - begun
            print(f"own text: {rows} rows in {seconds:.1f} s", flush=True)
        texts = torch.cat(chunks)
        torch.save(texts, path)
        return texts

    def _is_over(self, stage: str) -> bool:
        """Whether the clock has passed the end of a stage."""
        seconds = self.args.seconds
        return seconds is not None and time.monotonic() > self.begun + seconds * ENDS[stage]

    def held_out_loss(self, names: tuple[str, ...]) -> dict[str, float]:
        """Nats per token of models on held-out text of all categories."""
        total, batches = dict.fromkeys(names, 0.0), 4
        for index in range(batches):
            window = self.held_out.batch(index, 16, self.recipe.seq_len + 1).to(self.device)
            ids, labels = window[:, :-1].contiguous(), window[:, 1:].flatten()
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                for name in names:
                    total[name] += token_loss(self._logits(self.models[name], ids), labels).item()
        return {name: round(loss / batches, 4) for name, loss in total.items()}

    def _learning_rate(self, name: str) -> float:
        """The peak learning rate of a model; the head's is its target's."""
        return self.recipe.models["target" if name == "head" else name].learning_rate

    def _train(
        self, stage: str, gradients: Callable[[int, float], dict[str, Tensor]]
    ) -> dict[str, Any]:
        """Trains a stage's models, from a checkpoint where there is one; returns the record."""
        models = {name: self.models[name] for name in STAGES[stage]}
        optimizers = {n: adamw(m, self._learning_rate(n), 0.1) for n, m in models.items()}
        stateful: dict[str, Any] = {
            **models,
            **{f"{name} optimizer": optimizer for name, optimizer in optimizers.items()},
        }
        first, share_before, history = 0, 0.0, []
        path = self.work / f"{stage}.checkpoint.pt"
        if path.exists():
            state = torch.load(path, map_location=self.device, weights_only=True)
            for name, part in stateful.items():
                part.load_state_dict(state[name])
            first, share_before, history = state["step"], state["share"], state["history"]
            print(f"{stage}: going on from step {first}", flush=True)
        begun = saved = time.monotonic()
        for step, share in self._progress(stage, first, share_before):
            measured = gradients(step, share)
            for name, model in models.items():
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                factor = stable_then_decay(share, 0.3 if stage == "target" else 0.4)
                for group in optimizers[name].param_groups:
                    group["lr"] = self._learning_rate(name) * factor
                optimizers[name].step()
                optimizers[name].zero_grad(set_to_none=True)
            if step % LOG_STEPS == 0:
                figures = {key: round(value.item(), 4) for key, value in measured.items()}
                pace = (time.monotonic() - begun) / (step - first + 1)
                history.append({"step": step, "share": round(share, 3), **figures})
                print(f"{stage} {step} ({share:.0%}) {figures} {pace:.3f} s a step", flush=True)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                saved = time.monotonic()
                state = {name: part.state_dict() for name, part in stateful.items()}
                state |= {"step": step + 1, "share": share, "history": history}
                torch.save(state, path.with_suffix(".tmp"))
                path.with_suffix(".tmp").replace(path)
        path.unlink(missing_ok=True)
        return {"steps": step + 1, "seconds": round(time.monotonic() - begun), "history": history}

    def run(self) -> None:
        """The stages that left nothing yet, as far as is asked for, then the published pair."""
        steps = (self._target_step, self._drafts_step, self._head_step)
        records = {}
        for (stage, names), gradients in zip(STAGES.items(), steps, strict=True):
            models = {name: self.models[name] for name in names}
            record = load_parts(self.parts, stage, models)
            if record is None:
                if stage == "head":
                    head.begin_as_target(self.head, self.target)
                record = self._train(stage, gradients)
                record["parameters"] = {
                    name: sum(p.numel() for p in model.parameters())
                    for name, model in models.items()
                }
                for model in models.values():
                    round_weights(model)
                if stage != "head":
                    record["held_out_loss"] = self.held_out_loss(names)
                save_parts(self.parts, stage, models, record)
                shown = {key: value for key, value in record.items() if key != "history"}
                print(f"{stage}: {shown}", flush=True)
            records[stage] = record
            if stage == self.args.until:
                return
        self.publish(records)

    def publish(self, records: dict[str, Any]) -> None:
        """Writes the pair, in fp16, as transformers checkpoints, with `pair.json`, the prompts of
        held-out text and the training's record."""
        out: Path = self.args.out
        for name in self.recipe.models:
            half = LlamaForCausalLM(self.models[name].config)
            half.load_state_dict(self.models[name].state_dict())
            half.half().save_pretrained(out / name)
            ends = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
            ends.save_pretrained(out / name)
            self.tokenizer.save_pretrained(out / name)
        head.publish(self.head, self.target.config, out / "head")
        for weights in out.glob("*/model.safetensors"):
            # Written readable by its owner alone, which an installed package must not be.
            weights.chmod(0o644)
        drafts = {name: name for name in ("small", "medium", "head")}
        pair = {"name": self.args.shape, "target": "target", "drafts": drafts}
        settings = {"shape": self.args.shape, "seed": self.args.seed, "seconds": self.args.seconds}
        training = {**settings, "epoch_tokens": len(self.windows.stream), "stages": records}
        for file, document in (("pair.json", pair), ("training.json", training)):
            (out / file).write_text(json.dumps(document, indent=2) + "\n")
        shutil.copy(self.work / "workload.jsonl", out)
        print(f"published: {out / 'pair.json'}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(
        prog="PYTHONPATH=tools python -m train_demo.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=RECIPES, default="demo", help="sizes of the models, and their recipe")
    add("--vocab", type=int, help="tokens of the tokenizer (default: the shape's)")
    add("--gsm8k", type=Path, help="GSM8K's training split: JSON lines with question and answer")
    add("--corpus", type=Path, action="append", default=[], metavar="FOLDER",
        help="site-packages whose source is learned as well; repeatable")  # fmt: skip
    add("--work", type=Path, default=Path("build/demo"), help="what the stages leave")
    add("--parts", type=Path, help="where the trained weights are (default: --work)")
    add("--out", type=Path, help="where the pair is published")
    add("--until", choices=["corpus", *STAGES], help="the last stage; then nothing is published")
    add("--seconds", type=float, help="end by the clock: the stages take their share of this")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, default=2, help="torch threads, on a CPU")
    add("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.out is None and args.until is None:
        parser.error("say where the pair is published (--out), or the last stage (--until)")
    if not (args.work / "tokens.xz").exists():
        if args.gsm8k is None:
            parser.error(f"{args.work} holds no corpus; it is made with --gsm8k FILE")
        args.work.mkdir(parents=True, exist_ok=True)
        prepare(args.work, args.gsm8k, tuple(args.corpus), args.vocab or RECIPES[args.shape].vocab)
    if args.until != "corpus":
        try:
            Trainer(args).run()
        except ValueError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()

"""Trains the demo pair: a tokenizer, a target, and two drafts distilled from it.

    python -m demo.train --gsm8k gsm8k_train.jsonl --out demo/pair --work build/demo

Two stages, counted in steps, so that a seed and a device determine the result. In the first the
target learns the corpus; from `--drafts-from` on the drafts learn the target's law on the same
batches. In the second the target is fixed and the drafts learn its law on the corpus and on text
the target wrote itself, because that is what they will be asked to foresee. A run that was
interrupted goes on from the last checkpoint in `--work`.

On a CPU with glibc, MALLOC_MMAP_THRESHOLD_=8589934592 and MALLOC_TRIM_THRESHOLD_=17179869184 in the
environment keep the large logits from being mapped and unmapped each step: measured, 1.6 times the
speed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.cache_utils import StaticCache

from spectune.demo.corpus import END_OF_TEXT, Document, corpus

VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
# One head size for all three, a power of two, suits every attention kernel.
HEAD_DIM = 32
DRAFTS = ("small", "medium")


@dataclass(frozen=True)
class Shape:
    """A Llama's size, and the peak learning rate that suits it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    learning_rate: float


SHAPES = {
    "target": Shape(hidden=256, layers=8, heads=8, kv_heads=4, ffn=704, learning_rate=2e-3),
    "small": Shape(hidden=96, layers=2, heads=3, kv_heads=3, ffn=256, learning_rate=5e-3),
    "medium": Shape(hidden=160, layers=4, heads=5, kv_heads=5, ffn=448, learning_rate=3e-3),
}


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens that returns any text unchanged; digits
    stand alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(shape: Shape) -> LlamaForCausalLM:
    """A freshly initialised Llama with tied embeddings, in fp32."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


class Windows:
    """Windows over the corpus, of any length: each epoch cuts the stream anew and shuffles the
    pieces."""

    def __init__(
        self, documents: list[Document], tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        self.seed = seed
        # Prose counts twice, so that the three categories are of one order.
        repeated = [d for d in documents for _ in range(2 if d.category == "prose" else 1)]
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(repeated), generator=generator).tolist()
        ids = tokenizer.backend_tokenizer.encode_batch([repeated[i].text for i in order])
        pieces: list[Tensor] = []
        self.starts: dict[str, list[tuple[int, int]]] = {"code": [], "prose": [], "math": []}
        at = 0
        for i, encoding in zip(order, ids, strict=True):
            # A document ends with the end-of-text token, so that models learn to end.
            pieces.append(torch.tensor([*encoding.ids, 0], dtype=torch.int16))
            self.starts[repeated[i].category].append((at, len(encoding.ids) + 1))
            at += len(encoding.ids) + 1
        self.stream = torch.cat(pieces)

    def batch(self, index: int, rows: int, length: int) -> Tensor:
        """Batch number `index` of `rows` windows of `length`: int64 [rows, length]. A pure
        function."""
        per_epoch = (len(self.stream) - length) // length
        picked = []
        for row in range(index * rows, (index + 1) * rows):
            epoch, at = divmod(row, per_epoch)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch * 1009 + length)
            shift = int(torch.randint(length, (1,), generator=generator))
            start = int(torch.randperm(per_epoch, generator=generator)[at]) * length + shift
            picked.append(self.stream[start : start + length])
        return torch.stack(picked).long()

    def prefixes(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Beginnings for the target to go on from, the categories in turn: int64 [rows, length].

        Mathematics begins at the question, as prompts do; half of the prose too; code begins
        anywhere in a module.
        """
        picked = []
        for row in range(rows):
            category = ("code", "prose", "math")[row % 3]
            starts = self.starts[category]
            start, size = starts[int(torch.randint(len(starts), (1,), generator=generator))]
            is_from_start = category == "math" or (category == "prose" and row % 2 == 0)
            if not is_from_start:
                start += int(torch.randint(max(1, size - length), (1,), generator=generator))
            start = min(start, len(self.stream) - length)
            picked.append(self.stream[start : start + length])
        return torch.stack(picked).long()


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
    named = (
        "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"
    )
    output = torch.empty(rows, length, dtype=torch.long, device=prefix.device)
    output[:, :width] = prefix
    step = prefix
    for at in range(width, length):
        out = target(step, use_cache=True, logits_to_keep=1, **{named: cache})
        logits = out.logits[:, -1].float()
        # argmax(logits + T g), g Gumbel, draws from softmax(logits / T), and at T = 0 is greedy.
        uniform = torch.rand(logits.shape, generator=generator, device=logits.device)
        uniform = uniform.clamp_min(1e-9)
        step = (logits - temperature[:, None] * (-uniform.log()).log()).argmax(-1, keepdim=True)
        output[:, at] = step[:, 0]
    return output


def own_text(
    target: LlamaForCausalLM,
    windows: Windows,
    args: argparse.Namespace,
    length: int,
    path: Path,
    console: Console,
) -> Tensor:
    """Text the target wrote from training prefixes, six rows in ten greedy, the rest at
    temperatures up to 1: int16 [``args.own_rows``, length]. Written once and kept at ``path``."""
    if path.exists():
        stored: Tensor = torch.load(path, weights_only=True)
        return stored
    device, rows, chunk, seed = target.device, args.own_rows, args.own_chunk, args.seed
    writer = LlamaForCausalLM(target.config).to(device=device, dtype=torch.bfloat16)
    writer.load_state_dict(target.state_dict())
    writer.eval()
    cpu = torch.Generator().manual_seed(seed)
    noise = torch.Generator(device=device).manual_seed(seed)
    written = []
    for index in range(math.ceil(rows / chunk)):
        begun = time.perf_counter()
        prefix = windows.prefixes(chunk, (48, 80, 112, 160)[index % 4], cpu)
        draw = torch.rand(chunk, 2, generator=cpu)
        temperature = torch.where(draw[:, 0] < 0.6, torch.zeros(chunk), draw[:, 1])
        rows_written = generate(writer, prefix.to(device), length, temperature.to(device), noise)
        written.append(rows_written.to("cpu", torch.int16))
        seconds = time.perf_counter() - begun
        console.print(f"own text: chunk {index + 1}, {chunk} rows in {seconds:.1f} s")
    own = torch.cat(written)[:rows]
    torch.save(own, path)
    return own


def mixed_batch(own: Tensor, windows: Windows, index: int, rows: int, seed: int) -> Tensor:
    """Batch number `index`, half of it rows of the target's `own` text [n, length], half windows of
    the corpus: int64 [rows, length]."""
    generator = torch.Generator().manual_seed(seed * 7919 + index)
    mine = own[torch.randint(len(own), (rows - rows // 2,), generator=generator)].long()
    return torch.cat([mine, windows.batch(index, rows // 2, own.shape[1])])


def adamw(model: torch.nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """One step by clipped gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def counted(begin: int, end: int, console: Console) -> Iterable[int]:
    """Steps from ``begin`` to ``end``, with a bar and the time left; none where nobody looks."""
    is_seen = console.is_terminal
    return track(range(begin, end), "training", end, begin, console=console, disable=not is_seen)


def stable_then_decay(step: int, steps: int, warmup: int, decay: int) -> float:
    """The warmup-stable-decay schedule's factor: linear up, flat, then 1 - sqrt down to nothing."""
    if step < warmup:
        return (step + 1) / warmup
    left = steps - step
    return 1.0 if left > decay else 1.0 - math.sqrt(1.0 - left / decay)


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")


def settings(args: argparse.Namespace, *but: str) -> dict[str, Any]:
    """The options that decide a result."""
    unsaid = {"gsm8k", "out", "work", "threads", *but}
    return {key: value for key, value in vars(args).items() if key not in unsaid}


def parser_of(name: str, about: str | None, options: dict[str, tuple[Any, str]]) -> Any:
    """A command line with these options: (default, help) by name."""
    parser = argparse.ArgumentParser(
        prog=f"python -m demo.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option, (default, said) in options.items():
        parser.add_argument(f"--{option}", type=type(default), default=default, help=said)
    return parser


class Trainer:
    """The three models, their optimizers and the stream, and the two stages over them."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        self.device = torch.device(args.device)
        self.work: Path = args.work
        self.work.mkdir(parents=True, exist_ok=True)
        training, held_out = corpus(args.gsm8k)
        tokenizer_dir = self.work / "tokenizer"
        if not tokenizer_dir.exists():
            train_tokenizer(training).save_pretrained(tokenizer_dir)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
        self.windows = Windows(training, self.tokenizer, args.seed)
        self.held_out = Windows(held_out, self.tokenizer, args.seed)
        console.print(
            f"{len(training)} documents, {len(self.windows.stream) / 1e6:.2f} M tokens in an epoch"
        )
        torch.manual_seed(args.seed)
        self.models = {name: build_model(shape).to(self.device) for name, shape in SHAPES.items()}
        self.optimizers = {
            n: adamw(m, SHAPES[n].learning_rate, 0.1) for n, m in self.models.items()
        }
        self.step = 0
        self.history: list[dict[str, float]] = []
        path = self.work / "checkpoint.pt"
        if path.exists():
            state = torch.load(path, map_location=self.device, weights_only=True)
            for name in SHAPES:
                self.models[name].load_state_dict(state["models"][name])
                self.optimizers[name].load_state_dict(state["optimizers"][name])
            self.step, self.history = state["step"], state["history"]
            console.print(f"going on from step {self.step}")

    def save(self) -> None:
        """Writes a checkpoint, whole or not at all."""
        state = {
            "step": self.step,
            "history": self.history,
            "models": {name: model.state_dict() for name, model in self.models.items()},
            "optimizers": {name: own.state_dict() for name, own in self.optimizers.items()},
        }
        torch.save(state, self.work / "checkpoint.tmp")
        (self.work / "checkpoint.tmp").replace(self.work / "checkpoint.pt")

    def _logits(self, name: str, ids: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits: Tensor = self.models[name](ids, use_cache=False).logits
        return logits.flatten(0, 1)

    def _update(self, name: str, factor: float) -> None:
        update(self.models[name], self.optimizers[name], SHAPES[name].learning_rate * factor)

    def _distill(self, ids: Tensor, teacher: Tensor, step: int) -> dict[str, float]:
        """One step of both drafts toward the teacher's law; returns their agreement in top-1."""
        args = self.args
        law, choice = teacher.float().softmax(-1), teacher.argmax(-1)
        measured = {}
        for name in DRAFTS:
            logits = self._logits(name, ids)
            # Cross-entropy with the teacher's law is the KL divergence up to a constant.
            torch.autograd.backward(F.cross_entropy(logits.float(), law))
            own_steps = args.steps - args.drafts_from + args.distill_steps
            self._update(name, stable_then_decay(step, own_steps, 50, args.distill_steps))
            measured[name] = (logits.argmax(-1) == choice).float().mean().item()
        return measured

    def _train_step(self) -> dict[str, float]:
        """One step of the first stage."""
        args = self.args
        is_long = self.step >= args.steps - args.long_steps
        length = args.seq_len * (2 if is_long else 1)
        window = self.windows.batch(self.step, args.batch_tokens // length, length + 1)
        window = window.to(self.device)
        ids, labels = window[:, :-1].contiguous(), window[:, 1:].flatten()
        logits = self._logits("target", ids)
        loss = F.cross_entropy(logits.float(), labels)
        torch.autograd.backward(loss)
        self._update("target", stable_then_decay(self.step, args.steps, 100, args.steps * 3 // 10))
        measured = {"loss": loss.item()}
        if self.step >= args.drafts_from:
            measured |= self._distill(ids, logits.detach(), self.step - args.drafts_from)
        return measured

    @cached_property
    def own(self) -> Tensor:
        """The target's own text, written when the first stage is over."""
        target, length = self.models["target"], self.args.seq_len * 3 // 2
        path = self.work / "own_text.pt"
        return own_text(target, self.windows, self.args, length, path, self.console)

    def _distill_step(self) -> dict[str, float]:
        """One step of the second stage: half a batch of the target's own text, half a batch of
        corpus."""
        args, own = self.args, self.own
        rows = max(2, args.batch_tokens // own.shape[1])
        ids = mixed_batch(own, self.windows, self.step - args.steps, rows, args.seed)
        ids = ids.to(self.device)
        with torch.no_grad():
            teacher = self._logits("target", ids)
        return self._distill(ids, teacher, self.step - args.drafts_from)

    @torch.no_grad()
    def held_out_loss(self) -> dict[str, float]:
        """Nats per token of each model on held-out text of all categories."""
        total, batches = dict.fromkeys(SHAPES, 0.0), 4
        for index in range(batches):
            window = self.held_out.batch(index, 16, self.args.seq_len + 1).to(self.device)
            ids, labels = window[:, :-1].contiguous(), window[:, 1:].flatten()
            for name in SHAPES:
                loss = F.cross_entropy(self._logits(name, ids).float(), labels)
                total[name] += loss.item() / batches
        return total

    def publish(self) -> None:
        """Writes the pair, in fp16, as transformers checkpoints, with `pair.json` and the
        training's record."""
        out: Path = self.args.out
        for name, model in self.models.items():
            half = LlamaForCausalLM(model.config)
            half.load_state_dict(model.state_dict())
            half.half().save_pretrained(out / name)
            ends = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
            ends.save_pretrained(out / name)
            self.tokenizer.save_pretrained(out / name)
            # Written readable by their owner alone, which an installed package must not be.
            (out / name / "model.safetensors").chmod(0o644)
        drafts = {name: name for name in DRAFTS}
        write_json(out / "pair.json", {"name": "demo", "target": "target", "drafts": drafts})
        losses = {name: round(loss, 4) for name, loss in self.held_out_loss().items()}
        record = {
            "step": self.step,
            "settings": settings(self.args, "device"),
            "epoch_tokens": len(self.windows.stream),
            "parameters": {
                name: sum(p.numel() for p in model.parameters())
                for name, model in self.models.items()
            },
            "history": self.history[4::5],
            "held_out_loss": losses,
        }
        write_json(out / "training.json", record)
        self.console.print(f"published at step {self.step}: {losses}")

    def run(self) -> None:
        """Both stages, from wherever the last checkpoint stands, to the published pair."""
        args = self.args
        total = args.steps + args.distill_steps
        begun, since = time.perf_counter(), self.step
        for step in counted(self.step, total, self.console):
            measured = self._train_step() if step < args.steps else self._distill_step()
            self.step = step + 1
            if self.step % args.log_every == 0:
                spent = (time.perf_counter() - begun) / (self.step - since)
                begun, since = time.perf_counter(), self.step
                shown = " ".join(f"{key} {value:.3f}" for key, value in measured.items())
                shown += f" {args.batch_tokens / spent:.0f} tok/s"
                self.console.print(f"step {self.step}/{total} {shown}")
                self.history.append({"step": float(self.step), **measured})
            if self.step % args.save_every == 0:
                self.save()
        self.save()
        self.publish()


OPTIONS: dict[str, tuple[Any, str]] = {
    "work": (Path("build/demo"), "where checkpoints are kept"),
    "device": ("cuda" if torch.cuda.is_available() else "cpu", ""),
    "threads": (2, "torch threads, on a CPU"),
    "seed": (1, ""),
    "steps": (2000, "steps of the first stage"),
    "drafts-from": (600, "step of the first stage at which the drafts begin"),
    "long-steps": (200, "last steps of the first stage, at twice the length"),
    "distill-steps": (550, "steps of the second stage"),
    "own-rows": (1536, "rows of its own text that the target writes"),
    "own-chunk": (192, "rows it writes at once"),
    "batch-tokens": (4096, ""),
    "seq-len": (256, ""),
    "log-every": (20, ""),
    "save-every": (200, ""),
}
GSM8K = "GSM8K's training split: JSON lines with question and answer"


def main() -> None:
    """Parses the command line and trains."""
    parser = parser_of("train", __doc__, OPTIONS)
    parser.add_argument("--gsm8k", type=Path, required=True, help=GSM8K)
    parser.add_argument("--out", type=Path, required=True, help="where the pair is published")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Trainer(args, Console(soft_wrap=True)).run()


if __name__ == "__main__":
    main()

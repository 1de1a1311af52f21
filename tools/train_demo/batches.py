"""Documents as tokens: a tokenizer, the corpus in one file, and batches cut from it."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from spectune.demo.corpus import CATEGORIES, Document, docstrings
from spectune.demo.prompts import demo_workload, make_prompts
from train_demo.corpus import END_OF_TEXT, corpus, package_documents
from train_demo.recipes import MAX_POSITIONS

_TOKENIZER_CHARS = 40_000_000
"""Characters that a tokenizer is trained on, at most about."""
# Tokens are pairs of bytes, and modules repeat each other far apart.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 2, "lc": 0, "lp": 1, "pb": 1, "dict_size": 1 << 25}]


def train_tokenizer(documents: Sequence[Document], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``vocab`` tokens that returns any text unchanged; digits stand
    alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    every = 1 + sum(len(document.text) for document in documents) // _TOKENIZER_CHARS
    tokenizer.train_from_iterator((document.text for document in documents[::every]), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> Tensor:
    """Documents end to end, each ended by the end-of-text token so that models learn to end: int16
    [n]."""
    pieces = []
    for at in range(0, len(documents), 256):
        texts = [document.text for document in documents[at : at + 256]]
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts):
            pieces.append(torch.tensor([*encoding.ids, 0], dtype=torch.int16))
    return torch.cat(pieces)


def prepare(folder: Path, gsm8k: Path, packages: tuple[Path, ...], vocab: int) -> None:
    """Writes all that training reads: :func:`pack`'s files, and ``workload.jsonl``, prompts of text
    that is held out."""
    pack(folder, *corpus(gsm8k, packages), vocab)
    modules = package_documents(packages, True)
    prompts = make_prompts(modules, tuple(docstrings(modules))) if packages else demo_workload()
    lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    (folder / "workload.jsonl").write_text(lines)


def pack(
    folder: Path, training: Sequence[Document], held_out: Sequence[Document], vocab: int
) -> None:
    """Writes ``tokenizer/``, trained on the text, and ``tokens.xz``, documents ordered by category
    as tokens."""
    if not (folder / "tokenizer").exists():
        train_tokenizer(training, vocab).save_pretrained(folder / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    tensors = {}
    for side, documents in (("training", training), ("held_out", held_out)):
        counts = [sum(d.category == category for d in documents) for category in CATEGORIES]
        tensors[f"{side}.documents"] = torch.tensor(counts)
        tensors[side] = encode(tokenizer, documents)
    packed = lzma.compress(save(tensors), format=lzma.FORMAT_XZ, filters=_FILTERS)
    (folder / "tokens.xz").write_bytes(packed)


class Windows:
    """Windows over the corpus, of any length: each epoch cuts the stream anew and shuffles the
    pieces."""

    def __init__(self, stream: Tensor, documents: Sequence[int], seed: int) -> None:
        """``stream`` has ``documents`` of each category, int16 [n]. Small categories are repeated,
        up to four times, so that they are of one order."""
        self.seed = seed
        self._orders: dict[tuple[int, int], Tensor] = {}
        ends = (stream == 0).nonzero().flatten() + 1
        texts = iter(stream.tensor_split(ends[:-1]))
        groups = [[next(texts) for _ in range(count)] for count in documents]
        sizes = [sum(map(len, group)) for group in groups]
        repeated = [
            (category, text)
            for category, group, size in zip(CATEGORIES, groups, sizes, strict=True)
            for text in group * max(1, min(4, max(sizes) // (2 * max(1, size))))
        ]
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(repeated), generator=generator).tolist()
        self.starts: dict[str, list[tuple[int, int]]] = {name: [] for name in CATEGORIES}
        at = 0
        for i in order:
            category, text = repeated[i]
            self.starts[category].append((at, len(text)))
            at += len(text)
        self.stream = torch.cat([repeated[i][1] for i in order])

    def batch(self, index: int, rows: int, length: int) -> Tensor:
        """Batch number `index` of `rows` windows of `length`: int64 [rows, length]. A pure
        function."""
        per_epoch = (len(self.stream) - length) // length
        picked = []
        for row in range(index * rows, (index + 1) * rows):
            epoch, at = divmod(row, per_epoch)
            if (epoch, length) not in self._orders:
                generator = torch.Generator()
                generator.manual_seed(self.seed * 1_000_003 + epoch * 1009 + length)
                shift = torch.randint(length, (1,), generator=generator)
                order = torch.randperm(per_epoch, generator=generator) * length + shift
                self._orders = {(epoch, length): order}
            start = int(self._orders[epoch, length][at])
            picked.append(self.stream[start : start + length])
        return torch.stack(picked).long()

    def mixed_batch(self, texts: Tensor, index: int, rows: int) -> Tensor:
        """Batch number ``index``, half of it rows of ``texts`` [n, length], half windows of the
        corpus: int64 [rows, length]."""
        generator = torch.Generator().manual_seed(self.seed * 7919 + index)
        drawn = texts[torch.randint(len(texts), (rows - rows // 2,), generator=generator)].long()
        return torch.cat([drawn, self.batch(index, rows // 2, texts.shape[1])])

    def prefixes(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Beginnings for the target to go on from, the categories in turn: int64 [rows, length].

        Mathematics begins at the question, as prompts do; half of the prose too; code begins
        anywhere in a module.
        """
        categories = [name for name in CATEGORIES if self.starts[name]]
        picked = []
        for row in range(rows):
            category = categories[row % len(categories)]
            starts = self.starts[category]
            start, size = starts[int(torch.randint(len(starts), (1,), generator=generator))]
            is_from_start = category == "math" or (category == "prose" and row % 2 == 0)
            if not is_from_start:
                start += int(torch.randint(max(1, size - length), (1,), generator=generator))
            start = min(start, len(self.stream) - length)
            picked.append(self.stream[start : start + length])
        return torch.stack(picked).long()


def read_corpus(folder: Path, seed: int) -> tuple[Windows, Windows]:
    """Windows over the training text and over the held-out text of a folder of :func:`pack`."""
    tensors = load(lzma.decompress((folder / "tokens.xz").read_bytes()))
    training, held_out = (
        Windows(tensors[side], tensors[f"{side}.documents"].tolist(), seed)
        for side in ("training", "held_out")
    )
    return training, held_out

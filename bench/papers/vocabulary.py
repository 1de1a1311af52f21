"""FR-Spec's shortlists at a vocabulary of 262,144: what they hold of Gemma 3 270M, what they save.

    python bench/run.py vocabulary --corpus "GSM8K's training split=FILE"

`make real` leaves the pair in build/real, and tools/gemma/own_texts.py texts that the target wrote.
Tokens are ordered by how often they occur in those texts, or in a corpus, and the target's law is
read in texts whose prompts are held out. Costs are of a draft of two layers with the target's
embeddings, one token a pass, its layers and its product with so many rows in turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.checks.real import PAIR
from bench.harness import Figures, add_part, parser_of, result_file, say, timed
from bench.lab import demo
from bench.papers.evidence import over
from spectune.optimizer.fit.corpus import corpus_tokens
from spectune.optimizer.fit.fr_spec import frequency_order
from spectune.runtime.loading import LoadedPair
from spectune.runtime.models import CausalModel
from spectune.runtime.pair import read_pair

SIZES = (8192, 16384, 32768)
LAYERS, CONTEXT = 2, 256
"""Of the draft whose passes are timed; tokens before them."""
OWN = "its own texts"


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--texts", type=Path, default=PAIR / "own_texts.jsonl")
    parser.add_argument("--corpus", action="append", default=[], metavar="NAME=FILE")
    parts = {"mass": mass, "costs": costs}
    parser.add_argument("--only", nargs="*", choices=list(parts), default=list(parts))
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    options = parser.parse_args(arguments)
    for part in options.only:
        figures, made = timed(partial(parts[part], options))
        add_part(result_file("vocabulary", options.quick), part, figures, made)
    return 0


def mass(options: argparse.Namespace) -> Figures:
    """Of each order and size: the mass of the target's law at temperature 1 inside the shortlist,
    and how often its likeliest token is there, over contexts of held-out texts."""
    pair = demo((), name=str(PAIR / "pair.json"))
    rows = [json.loads(line) for line in options.texts.read_text().splitlines()]
    held = [row for row in rows if row["held_out"]][: 2 if options.quick else None]
    sources = {OWN: ([*r["prompt"], *r["output"]] for r in rows if not r["held_out"])}
    for named in options.corpus:
        name, file = named.split("=", 1)
        sources[name] = (ids for ids, _ in corpus_tokens(pair, [file]))
    vocab = pair.target.vocab_size
    orders, tokens, distinct = dict[str, torch.Tensor](), dict[str, int](), dict[str, int]()
    total = np.zeros(vocab, np.int64)
    for name, texts in sources.items():
        counts = np.zeros(vocab, np.int64)
        for ids in texts:
            counts += np.bincount(ids, minlength=vocab)
        total += counts
        tokens[name], distinct[name] = int(counts.sum()), int((counts > 0).sum())
        orders[name] = _order(pair, counts)
    if len(orders) > 1:
        orders["both" if len(orders) == 2 else "all"] = _order(pair, total)
    sums: dict[tuple[str, int], list[tuple[float, float]]] = {}
    lengths = []
    for n, row in enumerate(held):
        law, first = _law(pair, row)
        lengths.append(len(first))
        for name, order in orders.items():
            inside = law[:, order].cumsum(1)
            rank = order.argsort()[first]
            for size in SIZES:
                found = float(inside[:, size - 1].sum()), float((rank < size).sum())
                sums.setdefault((name, size), []).append(found)
        say(f"{n + 1} of {len(held)} texts")
    count = np.array(lengths)
    return {
        "vocab": vocab, "contexts": int(count.sum()), "texts": len(held), "tokens": tokens,
        "distinct": distinct,
        "rows": [
            {"order": name, "size": size, "mass": over(each[:, 0], count),
             "first_choice": over(each[:, 1], count)}
            for (name, size), found in sums.items() if (each := np.array(found)) is not None
        ],
    }  # fmt: skip


def _order(pair: LoadedPair, counts: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
    return torch.from_numpy(frequency_order(counts, sorted(pair.eos_ids)).order)


@torch.no_grad()
def _law(pair: LoadedPair, row: Figures) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's law [n, vocab] before each token that it wrote, and the likeliest tokens [n]."""
    ids, target = torch.tensor([*row["prompt"], *row["output"]]), pair.target
    target.reserve(len(ids))
    logits = target.chain(ids[:-1], 0, logits=len(row["output"]))[0]
    return logits.softmax(-1), logits.argmax(-1)


def costs(options: argparse.Namespace) -> Figures:
    """Milliseconds of a draft's layers and of its output product, by dtype and rows, medians."""
    spec = read_pair(str(PAIR / "pair.json"))
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        whole = AutoModelForCausalLM.from_pretrained(spec.target, dtype=dtype)
        config = copy.deepcopy(whole.config)
        config.num_hidden_layers, config.layer_types = LAYERS, config.layer_types[-LAYERS:]
        short = type(whole)(config).to(dtype)
        short.model.embed_tokens = whole.model.embed_tokens
        short.model.layers.load_state_dict(whole.model.layers[-LAYERS:].state_dict())
        short.tie_weights()
        models = {"target": whole, "draft": short}
        ways = dict(_passes({name: CausalModel(m, name) for name, m in models.items()}))
        medians = _in_turns(ways, 3 if options.quick else 41)
        name = str(dtype).removeprefix("torch.")
        for size in (config.vocab_size, *reversed(SIZES)):
            pass_ms = medians["draft"] + medians[size]
            target_ms = medians["target"] + medians[config.vocab_size]
            figures = {"rows": size, "product_ms": medians[size], "pass_ms": pass_ms}
            shares = {"of_pass": medians[size] / pass_ms, "of_target": pass_ms / target_ms}
            rows.append({"dtype": name, **figures, **shares, "target_ms": target_ms})
            say(rows[-1])
    return {"layers": LAYERS, "context": CONTEXT, "threads": torch.get_num_threads(), "rows": rows}


def _passes(models: dict[str, CausalModel]) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Passes without an output, by model, and products with so many rows."""
    ids = torch.arange(CONTEXT) + 1000
    for name, model in models.items():
        model.reserve(CONTEXT + 1)
        state = model.chain(ids, 0, logits=0)[1][-1:]
        yield name, partial(model.chain, ids[:1], CONTEXT, logits=0)
    output = models["draft"].output
    for size in (output.rows, *SIZES):
        support = output.support(np.arange(size))
        assert support.trimmed is not None
        yield size, partial(torch.nn.functional.linear, state, support.trimmed[0])


@torch.no_grad()
def _in_turns(ways: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Median milliseconds of each, the first time apart."""
    taken: dict[Any, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name in sorted(ways, key=str, reverse=repeat % 2 > 0):
            began = time.perf_counter()
            ways[name]()
            taken[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(each[1:]) for name, each in taken.items()}

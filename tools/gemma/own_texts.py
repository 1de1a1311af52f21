"""Has the target write texts, which drafts for it are trained on, to the end of a file.

    PYTHONPATH=tools python -m gemma.own_texts --gsm8k gsm8k_train.jsonl --minutes 30

Prompts are questions of GSM8K's training split, and pieces of modules of installed packages. One in
ten is of documents that are held out of training. Half of the texts are greedy, half at temperature
1. What the file has already is not written again.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from spectune.demo.corpus import is_held_out
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource, Waiting
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE
from spectune.traces.schema import Request, Sampling
from train_demo.corpus import math_documents, package_documents

SEATS, QUEUE, PROMPT = 16, 64, 96
"""Texts at once, texts before the clock is looked at, and most tokens of a prompt."""
SAMPLINGS = Sampling(), Sampling(temperature=1.0, seed=1)


class Asked(NamedTuple):
    """A prompt, and whether it is of a document that is held out."""

    key: str
    category: str
    held_out: bool
    prompt: str


def prompts(gsm8k: Path, packages: tuple[Path, ...]) -> Iterator[Asked]:
    """Code and mathematics in turn until questions end, one in ten held out."""
    rng, questions = Random(1), dict[bool, list[str]]()
    for document in math_documents(gsm8k):
        prompt = document.text.split("\nAnswer:")[0] + "\nAnswer:"
        questions.setdefault(is_held_out(document.key), []).append(prompt)
    modules = {side: package_documents(packages, side) for side in questions}
    for number in range(20 * min(map(len, questions.values()))):
        side, category = number % 20 < 2, ("code", "math")[number % 2]
        if category == "math":
            prompt = questions[side].pop()
        else:
            lines = rng.choice(modules[side]).text.splitlines(keepends=True)
            start = rng.randrange(max(1, len(lines) - 20))
            prompt = "".join(lines[start : start + 60])
        yield Asked(f"{category}-{number}", category, side, prompt)


def write(pair: LoadedPair, file: Path, asked: Iterator[Asked], tokens: int, until: float) -> int:
    """Adds texts to a file until a moment of the monotonic clock; how many tokens they have."""
    before = file.read_text().splitlines() if file.exists() else ()
    known, written = {json.loads(line)["key"] for line in before}, 0
    decoder = Decoder(pair, StaticSource(prepare_for(pair, AUTOREGRESSIVE)), seats=SEATS)
    missing = ((n, one) for n, one in enumerate(asked) if one.key not in known)
    while time.monotonic() < until and (some := list(islice(missing, QUEUE))):
        rows, queue = dict[str, dict[str, Any]](), Waiting()
        for n, one in some:
            ids = pair.encode(one.prompt)[:PROMPT]
            rows[one.key] = {**one._asdict(), "prompt": ids, "output": []}
            item, sampling = Request(one.key, one.category), SAMPLINGS[n // 2 % 2]
            queue.append(decoder.request(item, ids, sampling, tokens))
        for rounds in decoder.steps(queue):
            for done in rounds:
                rows[done.request.id]["output"] += done.tokens
        with file.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows.values())
        written += sum(len(row["output"]) for row in rows.values())
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pair", type=Path, default=Path("build/real/pair.json"))
    add("--gsm8k", type=Path, required=True, help="GSM8K's training split: JSON lines")
    add("--out", type=Path, default=Path("build/real/own_texts.jsonl"), help="file to add to")
    add("--minutes", type=float, default=30.0)
    add("--tokens", type=int, default=128, help="most tokens of a text")
    args = parser.parse_args()
    began = time.monotonic()
    pair = load_pair(read_pair(str(args.pair)), drafts=(), dtype="bfloat16")
    asked = prompts(args.gsm8k, (Path(sysconfig.get_paths()["purelib"]),))
    with pair.torch_threads():
        written = write(pair, args.out, asked, args.tokens, began + 60 * args.minutes)
    print(f"{args.out}: {written} tokens more in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

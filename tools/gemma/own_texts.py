"""Has the target write texts, which drafts for it are trained on, to the end of a file.

    PYTHONPATH=tools python -m gemma.own_texts --gsm8k gsm8k_train.jsonl --minutes 30

Prompts are questions of GSM8K's training split, and beginnings of modules of installed packages cut
anywhere. One in ten is of documents that are held out of training. Half of the texts are greedy,
half at temperature 1. What the file has already is not written again.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from spectune.demo.corpus import Document, is_held_out
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import DecodeRequest, StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE
from spectune.traces.schema import Request, Sampling
from train_demo.corpus import math_documents, package_documents

SEATS = 16
PROMPT = 96
"""Tokens of a module's piece."""
SAMPLINGS = Sampling(), Sampling(temperature=1.0, seed=1)


class Asked(NamedTuple):
    """A prompt, and whether it is of a document that is held out."""

    key: str
    category: str
    held_out: bool
    prompt: str


class Timed:
    """A queue of what is made as it is asked for, until a moment of the monotonic clock; what runs
    then, ends."""

    def __init__(self, made: Iterator[DecodeRequest], until: float) -> None:
        self.made, self.until, self.next = made, until, None

    def wait(self) -> bool:
        return self.first() is not None

    def first(self) -> DecodeRequest | None:
        if self.next is None and time.monotonic() < self.until:
            self.next = next(self.made, None)
        return self.next

    def take(self) -> DecodeRequest:
        taken, self.next = self.next, None
        assert taken is not None
        return taken


def prompts(gsm8k: Path, packages: tuple[Path, ...]) -> Iterator[Asked]:
    """Prompts without end but for mathematics: code and mathematics in turn, one in ten held
    out."""
    rng = Random(1)
    math = math_documents(gsm8k)
    code = {side: package_documents(packages, side) for side in (False, True)}
    questions = {side: [d for d in math if is_held_out(d.key) == side] for side in (False, True)}
    for of_side in questions.values():
        rng.shuffle(of_side)
    for number in range(20 * min(len(of_side) for of_side in questions.values())):
        side = number % 20 < 2
        if number % 2:
            question = questions[side].pop().text.split("\nAnswer:")[0]
            yield Asked(f"math-{number}", "math", side, f"{question}\nAnswer:")
        else:
            yield Asked(f"code-{number}", "code", side, piece(rng.choice(code[side]), rng))


def piece(module: Document, rng: Random) -> str:
    """A module from one of its lines on."""
    lines = module.text.splitlines(keepends=True)
    start = rng.randrange(max(1, len(lines) - 20))
    return "".join(lines[start : start + 60])


def write(pair: LoadedPair, file: Path, asked: Iterator[Asked], tokens: int, until: float) -> int:
    """Adds texts to a file until a moment of the monotonic clock; how many tokens they have."""
    before = file.read_text().splitlines() if file.exists() else ()
    known = {json.loads(line)["key"] for line in before}
    decoder = Decoder(pair, StaticSource(prepare_for(pair, AUTOREGRESSIVE)), seats=SEATS)
    rows, written = dict[str, dict[str, Any]](), 0

    def requests() -> Iterator[DecodeRequest]:
        for number, one in enumerate(asked):
            if one.key not in known:
                ids = pair.encode(one.prompt)[:PROMPT]
                rows[one.key] = {**one._asdict(), "prompt": ids, "output": []}
                item, sampling = Request(one.key, one.category), SAMPLINGS[number // 2 % 2]
                yield decoder.request(item, ids, sampling, tokens)

    with file.open("a") as out:
        for rounds in decoder.steps(Timed(requests(), until)):
            for done in rounds:
                rows[done.request.id]["output"] += done.tokens
                if done.finish is not None:
                    row = rows.pop(done.request.id)
                    written += len(row["output"])
                    out.write(json.dumps(row) + "\n")
                    out.flush()
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

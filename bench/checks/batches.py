"""Tokens/s of several requests at once beside one, and of one beside another checkout.

    python bench/run.py batches [--clients 8] [--tokens 48] [--repeats 9]
    python bench/run.py batches --against FOLDER

``FOLDER`` holds another checkout named ``spectune``; it decodes in a process of its own, in turns
with this one, and both must give the same texts. Seconds are of the processor (other work on the
machine takes none of them), medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import DecodeRequest, StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.schema import Request, Sampling

FIXED = {"kind": "fixed", "gamma": 4}
TREE = {"growth": {"kind": "top_k", "width": 4}, "select": {"top_n": 12}}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "none": {},
    "chain": {"draft": "small", "window": FIXED},
    "tree": {"draft": "small", "window": FIXED, **TREE},
    "head": {"draft": "head", "window": FIXED, **TREE},
}
SAMPLINGS = Sampling(), Sampling(temperature=1.0, seed=3)
PROMPTS = (
    *("def add(a, b):\n", "class Stack:\n    def push(self", "import os\n\ndef walk("),
    *("Natalia sold clips to 48 of her friends.", "for i in range(10):\n", "def test_"),
    *("The sum of 3 and 4 is", "    return self."),
)

Decoded = tuple[float, list[list[int]], int]
"""Seconds, texts, rounds."""


def requests(decoder: Decoder, sampling: Sampling, tokens: int, count: int) -> list[DecodeRequest]:
    """Requests for so many tokens, cycling through the prompts."""
    return [
        decoder.request(
            Request(str(n), ""), decoder.pair.encode(PROMPTS[n % len(PROMPTS)]), sampling, tokens
        )
        for n in range(count)
    ]


def one_by_one(decoder: Decoder, sampling: Sampling, tokens: int, count: int) -> Decoded:
    asked, began = requests(decoder, sampling, tokens, count), time.process_time()
    done = [decoder.decode(request) for request in asked]
    seconds = time.process_time() - began
    texts = [d.trajectory.output_ids.tolist() for d in done]
    return seconds, texts, sum(len(d.steps) for d in done)


def at_once(decoder: Decoder, sampling: Sampling, tokens: int, count: int) -> Decoded:
    from spectune.runtime.loop import Waiting  # another checkout may have none

    asked, began = requests(decoder, sampling, tokens, count), time.process_time()
    texts: dict[str, list[int]] = {request.id: [] for request in asked}
    rounds = [one for step in decoder.steps(Waiting(asked)) for one in step]
    seconds = time.process_time() - began
    for one in rounds:
        texts[one.request.id] += one.tokens
    return seconds, list(texts.values()), len(rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--policies", nargs="+", default=[*DOCUMENTS])
    parser.add_argument("--against")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    pair = load_pair(read_pair("demo"), device="cpu", dtype="float32", threads=1)
    with pair.torch_threads():
        if options.answer:
            answer(pair)
        elif options.against:
            beside_another(pair, options)
        else:
            beside_one(pair, options)
    return 0


def decoder_of(pair: LoadedPair, name: str, **more: Any) -> Decoder:
    return Decoder(pair, StaticSource(prepare_for(pair, parse_policy(DOCUMENTS[name]))), **more)


def in_turns(
    repeats: int, tokens: int, *runs: Callable[[int], Decoded]
) -> list[tuple[float, Decoded]]:
    """The median seconds of each run and what it gave last; once before, with few tokens."""
    seconds, last = [list[float]() for _ in runs], dict[int, Decoded]()
    for run in runs:
        run(min(8, tokens))
    for repeat in range(repeats):
        for n in sorted(range(len(runs)), reverse=repeat % 2 > 0):
            last[n] = runs[n](tokens)
            seconds[n].append(last[n][0])
    return [(median(s), last[n]) for n, s in enumerate(seconds)]


def beside_one(pair: LoadedPair, options: argparse.Namespace) -> None:
    for name in options.policies:
        one, many = decoder_of(pair, name), decoder_of(pair, name, seats=options.clients)
        for sampling in SAMPLINGS:
            how = sampling, options.clients
            (alone_s, alone), (together_s, together) = in_turns(
                options.repeats,
                options.tokens,
                lambda tokens, one=one, how=how: one_by_one(one, how[0], tokens, how[1]),
                lambda tokens, many=many, how=how: at_once(many, how[0], tokens, how[1]),
            )
            tokens = sum(map(len, alone[1]))
            same = sum(a == b for a, b in zip(alone[1], together[1], strict=True))
            print(
                f"{name}, temperature {sampling.temperature:g}: {tokens / alone_s:.0f} tokens/s "
                f"alone, {tokens / together_s:.0f} by {options.clients} at once "
                f"({alone_s / together_s:.2f} times); {same} of {len(alone[1])} texts equal",
                flush=True,
            )


def answer(pair: LoadedPair) -> None:
    """Decodes what lines of standard input ask for."""
    decoders = {name: decoder_of(pair, name) for name in DOCUMENTS}
    print("ready", flush=True)
    for line in sys.stdin:
        name, n, tokens = json.loads(line)
        print(json.dumps(one_by_one(decoders[name], SAMPLINGS[n], tokens, 2)), flush=True)


def beside_another(pair: LoadedPair, options: argparse.Namespace) -> None:
    command = [sys.executable, os.path.abspath(__file__), "--answer"]
    environment = {**os.environ, "PYTHONPATH": os.path.abspath(options.against)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=options.against, **pipes) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"

        def asked(name: str, n: int, tokens: int) -> Decoded:
            print(json.dumps([name, n, tokens]), file=other.stdin, flush=True)
            assert other.stdout is not None
            seconds, texts, rounds = json.loads(other.stdout.readline())
            return seconds, texts, rounds

        for name in options.policies:
            decoder = decoder_of(pair, name)
            for n, sampling in enumerate(SAMPLINGS):
                (before_s, before), (now_s, now) = in_turns(
                    options.repeats,
                    options.tokens,
                    lambda tokens, name=name, n=n: asked(name, n, tokens),
                    lambda tokens, d=decoder, s=sampling: one_by_one(d, s, tokens, 2),
                )
                assert before[1:] == now[1:]
                print(
                    f"{name}, temperature {sampling.temperature:g}: "
                    f"{before_s / now_s:.3f} times as fast as there "
                    f"({1e3 * now_s / now[2]:.2f} ms a round)",
                    flush=True,
                )
        other.stdin.close()


if __name__ == "__main__":
    main()

"""What the ways of the gathered head cost: logits over a union of tokens, way by way, on the device at hand.

    python bench/gathered_head.py [--device cpu] [--threads 1] [--rounds 15] [--quick] [--json]
    [--out bench/results/gathered_head-cpu.json]

For output matrices of several sizes, 1 to 10 hidden states and unions of 1% to 50% of the vocabulary, microseconds (medians) of

- head: the plain product with the whole matrix, which is what a draft without a shortlist pays;
- over: a union of random tokens, by every way;
- trimmed: a fixed shortlist, a matrix of its own.

Ways take turns, round after round, so that slow moments of the machine hit all alike. On the CPU a turn is two calls on different
unions, of which the second counts: the cache then holds what this way leaves there, and not the rows wanted. On CUDA a turn is a
replayed graph with a call for each union, divided by their number. ``chosen`` is what the head picks by its own measurement, ``loss``
how much slower than the fastest way of ``over`` that is here; ``speedup`` is that of ``over chosen`` on ``head``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from spectune.runtime.gathered_head import GatheredHead

ROOT = Path(__file__).resolve().parent.parent
SIZES: dict[str, list[tuple[int, int, torch.dtype]]] = {
    "cpu": [
        (4096, 160, torch.float32),
        (4096, 256, torch.float32),
        (32000, 512, torch.float32),
        (32000, 1024, torch.float32),
        (32000, 1024, torch.bfloat16),
        (128000, 512, torch.float32),
        (128000, 1024, torch.float32),
    ],
    "cuda": [
        (32000, 4096, torch.bfloat16),
        (128256, 4096, torch.bfloat16),
        (151936, 3584, torch.bfloat16),
        (128256, 4096, torch.float16),
        (32000, 1024, torch.float32),
    ],
}
ROWS = (1, 2, 4, 10)
SHARES = (0.01, 0.05, 0.2, 0.5)
UNIONS = 4
"""Unions that a cell goes through."""
Call = Callable[[int], object]


def calls_of(heads: dict[str, GatheredHead], rows: int, share: float, seed: int) -> tuple[int, dict[str, Call]]:
    """Tokens of a union, and each way as a call that takes the number of a union."""
    head = heads["over chosen"]
    vocab, device = head.vocab_size, head.device
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, head.hidden_size, generator=generator).to(device, head.dtype)
    count = max(1, int(vocab * share))
    unions = [torch.randperm(vocab, generator=generator)[:count].sort().values.to(device) for _ in range(UNIONS)]
    weight = head.weight
    calls: dict[str, Call] = {"head": lambda _: F.linear(hidden, weight).float()}
    for name, owner in heads.items():
        calls[name] = partial(lambda owner, i: owner.over(hidden, unions[i]), owner)
    trimmed = GatheredHead(weight[unions[0]])
    calls["trimmed"] = lambda _: trimmed.full(hidden)
    return count, calls


def replayed(call: Call, device: torch.device) -> Callable[[], float]:
    """A timer of one call: on CUDA of a graph that holds a call for each union, else of a call behind one for another union."""
    if device.type != "cuda":
        turn = iter(range(1 << 62))

        def once() -> float:
            i = next(turn) % UNIONS
            call(i - 1)
            began = time.perf_counter()
            call(i)
            return time.perf_counter() - began

        return once
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for i in range(UNIONS):
            call(i)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(UNIONS):
            call(i)
    begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        begun.record()
        graph.replay()
        done.record()
        torch.cuda.synchronize(device)
        return float(begun.elapsed_time(done)) / 1e3 / UNIONS

    return replay


def measure(
    vocab: int, d: int, dtype: torch.dtype, device: torch.device, rows: tuple[int, ...], rounds: int
) -> list[dict[str, Any]]:
    """The cells of one matrix."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(vocab, d, generator=generator) / d**0.5).to(device, dtype)
    plain = GatheredHead(weight)
    heads = {"over chosen": plain} | {f"over {way}": GatheredHead(weight, way=way) for way in plain.ways["over"]}
    found = []
    for n in rows:
        for share in SHARES:
            count, calls = calls_of(heads, n, share, seed=n)
            for call in calls.values():  # compiles, measures, makes buffers
                for i in range(UNIONS):
                    call(i)
            timers = {name: replayed(call, device) for name, call in calls.items()}
            taken: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, timer in timers.items():
                    taken[name].append(timer())
            micros = {name: 1e6 * statistics.median(values) for name, values in taken.items()}
            ways = {name: value for name, value in micros.items() if name.startswith("over ") and name != "over chosen"}
            chosen = plain.fastest(n, count)
            found.append(
                {
                    "vocab": vocab,
                    "d": d,
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": n,
                    "share": share,
                    "tokens": count,
                    "us": micros,
                    "iqr_us": {name: 1e6 * spread(values) for name, values in taken.items()},
                    "chosen": chosen,
                    "loss": ways[f"over {chosen}"] / min(ways.values()) - 1,
                    "speedup": micros["head"] / micros["over chosen"],
                }
            )
    return found


def spread(values: list[float]) -> float:
    """Interquartile range."""
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def environment(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads(), "python": platform.python_version()}


def show(cells: list[dict[str, Any]]) -> Table:
    """The cells as a table, microseconds."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["us"]))
    table = Table("matrix", "rows", "tokens", *names, "chosen", "loss", "speedup", title="gathered head, microseconds (medians)")
    for cell in cells:
        table.add_row(
            f"{cell['vocab']} x {cell['d']} {cell['dtype']}",
            str(cell["rows"]),
            f"{cell['tokens']} ({cell['share']:.0%})",
            *(f"{cell['us'][name]:.0f}" if name in cell["us"] else "" for name in names),
            cell["chosen"],
            f"{cell['loss']:.0%}",
            f"{cell['speedup']:.1f}x",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads on the CPU")
    parser.add_argument("--rounds", type=int, default=15, help="calls of each way that count")
    parser.add_argument("--quick", action="store_true", help="the smallest matrix, one hidden state")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--out", help="default: bench/results/gathered_head-DEVICE.json")
    wanted = parser.parse_args()
    if wanted.rounds < 2:
        parser.error("--rounds must be at least 2")
    torch.set_num_threads(wanted.threads)
    device = torch.device(wanted.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    sizes, rows = SIZES[device.type], ROWS
    if wanted.quick:
        sizes, rows = sizes[:1], ROWS[:1]
    cells = []
    with torch.inference_mode():
        for vocab, d, dtype in sizes:
            print(f"{vocab} x {d} {dtype}", file=sys.stderr)
            cells += measure(vocab, d, dtype, device, rows, wanted.rounds)
    result = {"environment": environment(device), "rounds": wanted.rounds, "cells": cells}
    out = Path(wanted.out or ROOT / "bench" / "results" / f"gathered_head-{device.type}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    if wanted.json:
        print(json.dumps(result))
    else:
        Console(width=None if sys.stdout.isatty() else 220).print(show(cells))


if __name__ == "__main__":
    main()

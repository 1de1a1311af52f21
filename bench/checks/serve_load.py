"""`serve` under clients that never rest, while policies are published: what fails, texts that
differ, memory, how long tokens take.

    python bench/run.py serve_load [--only float64 float32 bfloat16] [--quick]

32 clients stream completions of the demo's prompts to a server with 8 seats, half of them at
temperature 1 with a seed; every 10 seconds another policy is published: chains, trees, a table by
load, none. Texts are held against those of each request alone at rest, under none. In float64 none
may differ. In other types rounding depends on which requests share a pass: those that differ are
counted beside those of the same clients under none for as long. The figures are added to
``bench/results/serve-load.json``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from bench.checks.serving import Answer, Clients, Serving, publish, serve
from bench.harness import Part, say
from bench.lab import requests, stored
from bench.served.live import PAIR, temporary_folder
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy

RESULT = "serve-load"
CLIENTS, PROMPTS, TOKENS = 32, 48, 48
MINUTES = {"float64": 10.0, "float32": 5.0, "bfloat16": 5.0}
PUBLISHED_EVERY_S, WARM_S = 10.0, 30.0
GREW = 0.05
"""What memory may grow by from the first third of the time, after :data:`WARM_S`, to the last."""
TREE: dict[str, Any] = {"growth": {"kind": "top_k", "width": 4}, "select": {"top_n": 12}}
SMALL, HEAD = (
    {"draft": draft, "window": {"kind": "fixed", "gamma": 4}} for draft in ("small", "head")
)
POLICIES = [
    *map(
        parse_policy,
        (
            SMALL,
            {**HEAD, **TREE},
            {"draft": "ngram", "window": {"kind": "fixed", "gamma": 6}},
            {**SMALL, **TREE},
            {"draft": "medium", "window": {"kind": "fsm", "gamma_max": 6}},
            {"by_load": {"1": {**HEAD, **TREE}, "3": SMALL, "6": {}}},
        ),
    ),
    AUTOREGRESSIVE,
]


def bodies(count: int) -> list[dict[str, Any]]:
    """Completions of the demo's prompts; every second one is sampled, by a seed."""
    return [
        {
            "model": "demo",
            "prompt": request.prompt,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": n % 2,
            "seed": n,
        }
        for n, request in enumerate(requests(count).requests)
    ]


def measure(dtype: str, quick: bool) -> dict[str, Any]:
    """One dtype: texts at rest, then under load and publications; above float64's precision also
    under load and none."""
    seconds = 20.0 if quick else 60 * MINUTES[dtype]
    asked = bodies(8 if quick else PROMPTS)
    with temporary_folder() as folder:
        store = stored(folder / "x.db")
        with serve(folder / "x.db", "--set", f"dtype={dtype}") as server:
            server.await_version(publish(store, AUTOREGRESSIVE, PAIR.id))
            rest = [answer.text for answer in Clients(server.url, asked, 1).send_once()]
            say(f"{dtype}: {len(rest)} texts at rest")
            figures = under_load(server, asked, rest, seconds, lambda p: publish(store, p, PAIR.id))
            if dtype != "float64":
                server.await_version(publish(store, AUTOREGRESSIVE, PAIR.id))
                beside = under_load(server, asked, rest, seconds, None)
                figures["without policies"] = beside
    differ = figures["texts_differ"]
    holds = not figures["failed"] and figures["memory_grew"] <= GREW
    holds &= dtype != "float64" or not differ
    of_none = figures.get("without policies")
    beside_none = (
        f" ({of_none['texts_differ']} of {of_none['answers']} under none)" if of_none else ""
    )
    first, token = figures["first_s"], figures["token_s"]
    return {
        "summary": f"{dtype}, {seconds:.0f} s, {CLIENTS} clients, {figures['publications']} "
        f"publications: {len(figures['failed'])} of {figures['answers']} answers failed, "
        f"{figures['refused']} were refused with 429; {differ} texts differ from those at rest"
        f"{beside_none}; {figures['tokens_per_s']:.0f} tokens/s; first token after "
        f"{first['p50']:.2f}, {first['p95']:.2f}, {first['p99']:.2f} s and a further one each "
        f"{1e3 * token['p50']:.0f}, {1e3 * token['p95']:.0f}, {1e3 * token['p99']:.0f} ms in the "
        f"median, 95 and 99% of answers; memory grew by {100 * figures['memory_grew']:.1f}%",
        "holds": holds,
        **figures,
    }


def under_load(
    server: Serving,
    asked: Sequence[dict[str, Any]],
    rest: Sequence[str],
    seconds: float,
    published: Any,
) -> dict[str, Any]:
    """What clients see for so long, while ``published`` publishes one policy after the other."""
    clients, memory, versions = Clients(server.url, asked, CLIENTS), list[tuple[float, int]](), 0
    policies = cycle(POLICIES)
    began = time.monotonic()
    with clients.sending():
        while (passed := time.monotonic() - began) < seconds:
            memory.append((passed, server.memory()))
            if published is not None:
                policy: Policy = next(policies)
                published(policy)
                versions += 1
            time.sleep(min(PUBLISHED_EVERY_S, max(seconds - passed, 0.0)))
    took = time.monotonic() - began
    good = [answer for answer in clients.answers if answer.status == 200]
    statuses = Counter(answer.status for answer in clients.answers)
    differ = Counter(a.number for a in good if a.text != rest[a.number])
    failed = [a for a in clients.answers if a.status not in (200, 429)]
    return {
        "seconds": took,
        "answers": len(good) + len(failed),
        "refused": statuses[429],
        "failed": [f"{a.status}: {a.problem}" for a in failed],
        "differ": [{"request": n, "times": times} for n, times in sorted(differ.items())],
        "texts_differ": differ.total(),
        "publications": versions,
        "tokens_per_s": sum(answer.tokens for answer in good) / took,
        "first_s": _quantiles([answer.first_s for answer in good]),
        "token_s": _quantiles([_token_s(a) for a in good if a.tokens > 1]),
        "gap_s": _quantiles([gap for answer in good for gap in answer.gaps_s]),
        "memory": [[round(at), held] for at, held in memory],
        "memory_grew": _grew(memory),
    }


def _token_s(answer: Answer) -> float:
    """Seconds per token after the first event of an answer."""
    return sum(answer.gaps_s) / (answer.tokens - 1)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.quantile(values, q / 100)) for q in (50, 95, 99)}


def _grew(memory: Sequence[tuple[float, int]]) -> float:
    held = np.array([held for at, held in memory if at >= min(WARM_S, memory[-1][0] / 3)])
    third = max(len(held) // 3, 1)
    return float(np.median(held[-third:]) / np.median(held[:third]) - 1)


PARTS: dict[str, Part] = {
    dtype: lambda quick, dtype=dtype: measure(dtype, quick) for dtype in MINUTES
}

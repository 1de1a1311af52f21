"""`spectune serve` as a process, and what is asked of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from doors import Door, Started
from http_server import MODEL
from waiting import PATIENCE_S

BODY: dict[str, Any] = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 48, "seed": 7}


@contextmanager
def process(door: Door, **options: Any) -> Iterator[tuple[Started, str]]:
    """The command as a process of its own, and its URL."""
    how = {"pair": door.pair, "port": 0, "dtype": "float64", **options}
    started = door.start("serve", **how)
    try:
        line = started.stderr.readline()
        found = re.match(r"serving tiny-llama on (http://127.0.0.1:\d+)/v1 under ", line)
        assert found is not None, line
        yield started, found[1]
    finally:
        started.kill()


def answer(url: str, **body: Any) -> dict[str, Any]:
    response = httpx2.post(f"{url}/v1/completions", json={**BODY, **body}, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def metric(url: str, name: str) -> float:
    lines = httpx2.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return next((float(x.split()[-1]) for x in lines if x.startswith(name)), 0.0)


def follows(url: str, version: int) -> bool:
    return metric(url, "spectune_policy_version") == version

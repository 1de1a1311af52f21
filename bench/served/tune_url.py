"""`tune --url` end to end on a server that runs, as a user types it: seconds, stage by stage, what
won and by how much."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from bench import ROOT
from bench.harness import say
from bench.served.live import await_version, command, serving, temporary_folder

LIMIT_S = 600.0
SIZE = ("--limit", 96, "--max-new-tokens", 64)
QUICK = ("--limit", 32, "--max-new-tokens", 12, "--budget", "10s")


def measure(quick: bool) -> dict[str, Any]:
    with temporary_folder() as folder, serving() as server:
        where = ("--url", server.url, "--folder", server.folder, "--pair", "demo")
        size = (*(QUICK if quick else SIZE), "--arrivals", "clients:1,4,8")
        words = command("--db", folder / "x.db", "tune", *where, *size, "--json")
        began, result, lines = time.monotonic(), folder / "result.json", list[tuple[float, str]]()
        with result.open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.PIPE, text=True)
            assert process.stderr is not None
            for line in process.stderr:
                line = line.strip().replace(f"{ROOT}/", "")
                lines.append((time.monotonic() - began, line))
                say(f"{lines[-1][0]:4.0f} s {line}")
        seconds = time.monotonic() - began
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, words)
        tuned = json.loads(result.read_text())
        published, confirmed = tuned["published"], tuned["confirmed"]
        await_version(server, published["version"] if published else 0)
    differ = tuned["texts"]["differ"]
    return {
        "summary": f"{seconds:.0f} s: {tuned['reason']}",
        "holds": seconds <= LIMIT_S and not differ,
        "seconds": seconds,
        "lines": [[round(moment, 1), line] for moment, line in lines],
        "winner": tuned["winner"]["label"],
        "ratio": confirmed["ratio"] if confirmed else None,
        "confirmed": confirmed,
        "published": published and published["version"],
        "texts_differ": differ,
        "loads": tuned["executed"],
    }

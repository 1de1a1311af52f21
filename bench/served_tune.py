"""`tune --url` end to end on a server that runs, as a user types it: seconds, stage by stage, what
won and by how much."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from lab import say
from served_live import command, serving, temporary_folder

from spectune.engines.vllm.folder import read_status

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
                lines.append((time.monotonic() - began, line.strip()))
                say(f"{lines[-1][0]:4.0f} s {line.strip()}")
        seconds = time.monotonic() - began
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, words)
        tuned, status = json.loads(result.read_text()), read_status(server.folder)
    winner, confirmed, published = tuned["winner"], tuned["confirmed"], tuned["published"]
    version = published["version"] if published else 0
    in_force = status is not None and status.in_force.version == version
    differ = tuned["texts"]["differ"]
    return {
        "summary": f"{seconds:.0f} s: {tuned['reason']}",
        "holds": seconds <= LIMIT_S and in_force and not differ,
        "seconds": seconds,
        "lines": [[round(moment, 1), line] for moment, line in lines],
        "winner": winner["label"],
        "ratio": confirmed["ratio"] if confirmed else None,
        "confirmed": confirmed,
        "published": version,
        "in_force": in_force,
        "texts_differ": differ,
        "loads": tuned["executed"],
    }

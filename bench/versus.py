"""Old against new code on this machine's CPU, in turns: seconds of a round, and replay.

    python bench/run.py versus OLD NEW [--requests 12] [--passes 6] [--quick]

OLD and NEW are checkouts, folders named ``spectune``. Each runs in a process of its own; the two
decode a request under a policy one after the other, in random order, and replay and store likewise
(CPU seconds of one thread, which other work hardly touches). Ratios are new over old with 95%
intervals (Student's t of logarithms) over pairs of turns; rounds and tokens must be alike. Bytes a
position of stored panoramas are of both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy.stats import t

POLICIES = ("autoregression", "chain", "tree")
REPLAY, TREES = "replay ", "replay of trees"
STORED = {"store chains": (16,), "store trees": (16, 10, 8)}
"""What is recorded of a draft: tokens of a chain, children of a node, levels of a tree."""
TEXTS = "store texts"
REPLAYS = (TREES, *(REPLAY + window for window in ("fixed", "analytic exact", "fsm", "q_learning")))
TOKENS = 64


class Side:
    """A checkout's process, which answers a line with a line."""

    def __init__(self, checkout: Path, requests: int, quick: bool) -> None:
        paths = (checkout.parent, checkout / "bench", checkout / "tests")
        environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "serve", str(checkout), str(requests), str(int(quick))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)

    def ask(self, *question: object) -> Any:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        print(json.dumps(question), file=pipe_in, flush=True)
        while not (line := pipe_out.readline()).startswith("= "):
            if not line:
                raise SystemExit("error: a checkout's process has ended; its last lines say why")
        return json.loads(line[2:])


def serve(checkout: Path, requests: int, quick: bool) -> None:
    """Answers, by the code of a checkout: rounds, tokens and seconds of all rounds of a request
    under a policy, or of a replay."""
    sys.path.remove(str(Path(__file__).resolve().parent))
    import lab
    import speed

    import spectune

    if Path(str(spectune.__file__)).parent != checkout:
        raise SystemExit(f"error: {checkout}: a checkout is a folder named spectune")
    pair, options = lab.demo(("small",)), lab.DecodeOptions(lab.GREEDY, TOKENS)
    encoded = lab.encode(pair, lab.requests(requests), options)
    tree = lab.parse_policy(lab.top_k("small", 8, 6, 60))
    policies = lab.AUTOREGRESSIVE, lab.chain("small", 4), tree
    plans = {n: lab.prepare(p, pair.draft_names) for n, p in zip(POLICIES, policies, strict=True)}
    trace = speed.synthetic_trace(10_000 if quick else 200_000)
    recorded = speed._recorded(pair, "small", lab.GREEDY, quick)
    profile = speed.flat_profile("demo", ["small"])

    rounds = list(lab.run(pair, lab.StaticSource(plans["chain"]), encoded))
    ordinals, recordings = itertools.count(10_000), {}
    for what, look in STORED.items():
        store = speed.TraceStore(speed.open_database(f"{tempfile.mkdtemp()}/versus.db"))
        name = lab.recorded(store, pair, lab.requests(requests), options, ["small"], *look)
        recordings[what] = store, name, store.load(name)

    def put(what: str) -> float:
        """Seconds in which panoramas take the place of their likes, or texts are appended."""
        store, name, loaded = recordings.get(what, recordings["store chains"])
        held = [
            {**r.panoramas, **{f"trees of {d}": t for d, t in getattr(r, "trees", {}).items()}}
            for r in loaded.requests
        ]
        panoramas = [(n, panorama) for n, of in enumerate(held) for panorama in of.values()]
        texts = [(next(ordinals), d.trajectory, d.steps) for d in rounds]
        began = time.thread_time()
        if what == TEXTS:
            store.append_trajectories(name, texts)
        else:
            store.put_panoramas(name, panoramas)
        return time.thread_time() - began

    def answer(what: str, n: int) -> tuple[int, int, float]:
        if what == "bytes":
            store, _, loaded = recordings[[*STORED][n]]
            positions = sum(len(t.output_ids) for t in loaded.trajectories)
            return 0, 0, _stored_bytes(str(store.database.url.database)) / positions
        if what in (TEXTS, *STORED):
            return 0, 0, put(what)
        if what in plans:
            one = replace(encoded, items=encoded.items[n : n + 1])
            (decoded,) = lab.run(pair, lab.StaticSource(plans[what]), one)
            steps = decoded.steps
            return len(steps), sum(s.emitted for s in steps), sum(s.round_s for s in steps)
        if what == TREES:
            rates = speed._rates(recorded, "small", lab.GREEDY)
            return 0, 0, 1 / rates["replayed_million_rounds_per_s"]
        window = speed.WINDOWS[what.removeprefix(REPLAY)]
        policy = lab.parse_policy({"draft": "small", "window": window})
        began = time.thread_time()
        total = speed.run_replay(trace, policy, profile).total
        return total.rounds, total.emitted_tokens, time.thread_time() - began

    for line in sys.stdin:
        print("=", json.dumps(answer(*json.loads(line))), flush=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs=2, type=Path, help="the old one, and the new one")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    asked = parser.parse_args(arguments)
    requests, passes = (1, 2) if asked.quick else (asked.requests, asked.passes)
    sides = [Side(path.resolve(), requests, asked.quick) for path in asked.checkouts]
    logs: dict[str, list[float]] = defaultdict(list)
    differ: dict[str, int] = defaultdict(int)
    each = [*POLICIES, *REPLAYS[1:], *STORED, TEXTS]
    turns = [(TREES, 0), *((what, n) for what in each for n in range(requests))]
    for n, what in enumerate(STORED):
        old, new = (side.ask("bytes", n)[2] for side in sides)
        print(f"{what:24} {old:.1f} bytes a position before, {new:.1f} now ({new / old:.2f} times)")
    for turn in range(passes + 1):
        for what, n in random.sample(turns, len(turns)):
            answers = {}
            for i in random.sample((0, 1), 2):
                answers[i] = sides[i].ask(what, n)
            (*one, old_s), (*other, new_s) = answers[0], answers[1]
            differ[what] += one != other
            if turn:  # the first warms up
                logs[what].append(math.log(new_s / old_s))
    for what, found in sorted(logs.items()):
        ratio, low, high = interval(found)
        about = f"{len(found)} turns, {differ[what]} differ"
        print(f"{what:24} {ratio:.3f} ({low:.3f} to {high:.3f}), {about}")


def _stored_bytes(path: str) -> int:
    """Bytes of all panoramas in a SQLite file of either side."""
    with closing(sqlite3.connect(path)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        column, table = ("trie", "panorama") if "panorama" in tables else ("data", "panorama_chunk")
        return int(connection.execute(f"SELECT SUM(LENGTH({column})) FROM {table}").fetchone()[0])


def interval(logs: list[float]) -> tuple[float, float, float]:
    """The geometric mean, and the ends of its 95% interval."""
    mean = statistics.fmean(logs)
    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


if __name__ == "__main__":
    serve(Path(sys.argv[2]), int(sys.argv[3]), bool(int(sys.argv[4])))

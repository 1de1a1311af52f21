"""Commands as processes of their own. `kill -9`, SIGTERM and Ctrl-C: nothing committed is lost, and
the same command goes on. What one publishes another one follows."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from databases import run_sql
from doors import Door, lines, write_lines, write_workload
from kill_driver import run_kills
from synthetic import policy
from test_hot_reload import fixed, publish, statuses
from waiting import PATIENCE_S, eventually

from spectune.db import open_database
from spectune.runtime.loading import LoadedPair
from spectune.traces.store import TraceStore

KEPT = "interrupted; what was committed is kept, the same command"
INTERRUPTED, ANEW = f"{KEPT} goes on from there\n", f"{KEPT} begins anew\n"
KILLS = 2
"""`make acceptance` makes 50."""


def test_killed_at_random_moments_nothing_is_lost_and_all_resumes(
    tiny_pair: Path, tmp_path: Path
) -> None:
    found = run_kills(tiny_pair, tmp_path, KILLS, seed=KILLS, requests=6)
    assert found["problems"] == []
    assert found["count"] == KILLS
    assert {name.split()[0] for name in found["kills"]} == {"record", "tune"}


def test_ctrl_c_is_one_line_and_exit_130_and_resumes(tiny_pair: Path, tmp_path: Path) -> None:
    """Interrupted while it decodes; the same command then decodes only what is missing, into the
    same recording."""
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    workload = write_workload(tmp_path / "w.jsonl", 12)
    asked = f"record --pair {tiny_pair} --workload {workload} --max-new-tokens 48 --gamma-max 2"
    record = asked.split()
    process = door.start(*record)
    assert process.stderr.readline() == "decode: 12\n"  # the first text is stored
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.stdout.read() == ""
    assert (process.wait(PATIENCE_S), rest) == (130, INTERRUPTED)
    stored = trajectories(tmp_path / "spectune.db")
    assert 1 <= len(stored) < 12
    assert door.json("db", "check")["ok"] is True
    resumed = door.json(*record)
    assert (resumed["n_requests"], resumed["state"]) == (12, "complete")
    assert stored.items() <= trajectories(tmp_path / "spectune.db").items()
    assert len(door.json("traces", "list")["recordings"]) == 1


def test_an_interrupted_run_keeps_what_it_has_served(tiny_pair: Path, tmp_path: Path) -> None:
    """`run --record` writes while it decodes: SIGTERM ends it as Ctrl-C does, and the texts that
    had ended are a recording; `kill -9` loses a second's."""
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    workload = write_workload(tmp_path / "w.jsonl", 400)
    for sent, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        asked = f"run --pair {tiny_pair} --workload {workload} --policy autoregressive"
        run = door.start(*asked.split(), "--record", "--no-store")
        recording = run.stderr.readline().split()[1]
        eventually(lambda r=recording: any(of == r for of, _ in trajectories(Path(door.db))))
        run.send_signal(sent)
        assert run.wait(PATIENCE_S) == code
        info = next(r for r in door.json("traces", "list")["recordings"] if r["id"] == recording)
        assert info["state"] == ("complete" if sent == signal.SIGTERM else "recording")
        assert 1 <= info["n_requests"] < 400
    assert door.json("db", "check")["ok"] is True


def trajectories(database: Path) -> dict[tuple[str, int], tuple[bytes, str]]:
    """Every stored text: its place, and its content and the moment it was stored."""
    asked = "SELECT recording_id, ordinal, tokens, created_at FROM trajectory"
    return {(of, ordinal): (tokens, at) for of, ordinal, tokens, at in run_sql(database, asked)}


@pytest.fixture
def serving(tiny_pair: Path, tmp_path: Path, pair: LoadedPair) -> Iterator[Any]:
    """Process A: `run --policy active` over a long workload, with gamma 2 in force. Yields (door,
    process, workload, store)."""
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    database = open_database(door.db)
    store = TraceStore(database)
    publish(store, pair, fixed(2))
    workload = write_workload(tmp_path / "long.jsonl", 24)
    asked = f"run --pair {tiny_pair} --workload {workload} --policy active --max-new-tokens 400"
    files = f"--outputs {tmp_path / 'texts.jsonl'} --per-round {tmp_path / 'rounds.jsonl'}"
    process = door.start(*f"{asked} {files} --device cpu --json".split())
    try:
        yield door, process, workload, store
    finally:
        process.kill()
        process.communicate()
        database.close()


def test_swaps_across_two_processes(
    serving: Any, tiny_pair: Path, tmp_path: Path, pair: LoadedPair
) -> None:
    """A decodes; this process is B: `policies activate` in the middle, swaps back and forth, then a
    publication that A must refuse. Three swaps, as one alone may fall on the end of a text, where
    nothing tells the windows from each other. On PostgreSQL `make acceptance` does it with more
    processes."""
    door, process, workload, store = serving

    def acknowledged(version: int, status: str) -> bool:
        eventually(lambda: (version, status) in statuses(store) or process.poll() is not None)
        return (version, status) in statuses(store)

    ended = "A ended too early to see every publication: lengthen the workload"
    assert acknowledged(1, "applied"), ended
    assert process.stderr.readline() == "run: 24\n", "a text has begun"
    of_pair = ("--pair", tiny_pair, "--device", "cpu")
    document = json.dumps(fixed(5).spelled_out())
    activated = door.json("policies", "activate", document, *of_pair)
    applied = [activated["version"]]
    assert acknowledged(applied[-1], "applied"), ended
    for gamma in (2, 5):
        applied.append(publish(store, pair, fixed(gamma)))
        assert acknowledged(applied[-1], "applied"), ended
    refused = publish(store, pair, policy("third", 3))
    assert acknowledged(refused, "refused"), ended
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.poll() == 0, err
    assert statuses(store) == [*((v, "applied") for v in (1, *applied)), (refused, "refused")]
    listed = door.json("policies", "list", *of_pair)["publications"]
    assert {p["version"]: p["applied"] for p in listed}[activated["version"]] == 1
    told = json.loads(out)
    assert [(c["before"], c["after"], c["version"]) for c in told["changes"]] == [
        (fixed(a).label(), fixed(b).label(), version)
        for (a, b), version in zip([(2, 5), (5, 2), (2, 5)], applied, strict=True)
    ]
    said = "the policy changed at request "
    assert [line for line in err.splitlines() if line.startswith(said)] == [
        f"{said}{c['request']}, round {c['round']}: {c['before']}, then {c['after']} (version "
        f"{c['version']})"
        for c in told["changes"]
    ]
    assert {p["policy_id"] for p in told["by_policy"]} == {fixed(2).id, fixed(5).id}
    assert sum(p["rounds"] for p in told["by_policy"]) == told["rounds"]
    assert told["label"] == f"{fixed(2).label()}, then 3 changes"
    kept = store.get_run("latest")
    assert (kept.options["changes"], kept.outcome.policy) == (told["changes"], told["label"])
    for gamma in (2, 5):
        assert store.get_policy(fixed(gamma).id).document["window"]["gamma"] == gamma

    rounds = lines(tmp_path / "rounds.jsonl")
    # The window is clipped to what is left of a text's budget; every other round has the one in
    # force.
    full = [r for r in rounds if r["drafted"] + r["start"] + 1 < 400]
    assert [gamma for gamma, _ in itertools.groupby(r["drafted"] for r in full)] == [2, 5, 2, 5]
    windows: dict[str, set[int]] = {}
    for r in full:
        windows.setdefault(r["request"], set()).add(r["drafted"])
    amid = [request for request, gammas in windows.items() if len(gammas) > 1]
    assert amid, "each of the three swaps came between two texts"

    swapped, plain = tmp_path / "swapped.jsonl", tmp_path / "plain.jsonl"
    write_lines(swapped, [row for row in lines(workload) if row["id"] in amid])
    asked = f"run --workload {swapped} --policy autoregressive --no-store --max-new-tokens 400"
    door.json(*asked.split(), "--outputs", plain, *of_pair)
    assert lines(plain) == [row for row in lines(tmp_path / "texts.jsonl") if row["id"] in amid]

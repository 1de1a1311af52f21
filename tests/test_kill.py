"""`kill -9`, SIGTERM and Ctrl-C: nothing committed is lost, and the same command goes on."""

from __future__ import annotations

import signal
import sqlite3
import time
from pathlib import Path

from doors import Door, write_workload
from kill_driver import run_kills

KILLS = 2
"""`make acceptance` makes 50."""


def test_killed_at_random_moments_nothing_is_lost_and_all_resumes(tiny_pair: Path, tmp_path: Path) -> None:
    found = run_kills(tiny_pair, tmp_path, KILLS, seed=KILLS, requests=6)
    assert found["problems"] == []
    assert found["count"] == KILLS
    assert {name.split()[0] for name in found["kills"]} == {"record", "tune"}


def test_ctrl_c_is_one_line_and_exit_130_and_resumes(tiny_pair: Path, tmp_path: Path) -> None:
    """Interrupted while it decodes; the same command then decodes only what is missing, into the same recording."""
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    workload = write_workload(tmp_path / "w.jsonl", 12)
    record = ("record", "--pair", tiny_pair, "--workload", workload, "--max-new-tokens", 48, "--gamma-max", 2)
    process = door.start(*record)
    assert process.stderr.readline() == "decode: 12\n"  # the first text is stored
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.stdout.read() == ""
    assert process.wait(60) == 130
    assert rest == "interrupted; what was committed is kept, the same command goes on from there\n"
    stored = trajectories(tmp_path / "spectune.db")
    assert 1 <= len(stored) < 12
    assert door.json("db", "check")["ok"] is True
    resumed = door.json(*record)
    assert (resumed["n_requests"], resumed["state"]) == (12, "complete")
    assert stored.items() <= trajectories(tmp_path / "spectune.db").items()
    assert len(door.json("traces", "list")["recordings"]) == 1


def test_an_interrupted_run_keeps_what_it_has_served(tiny_pair: Path, tmp_path: Path) -> None:
    """`run --record` writes while it decodes: SIGTERM ends it as Ctrl-C does, and the texts that had ended are a recording;
    `kill -9` loses a second's."""
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    workload = write_workload(tmp_path / "w.jsonl", 400)
    for sent, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        run = door.start("run", "--pair", tiny_pair, "--workload", workload, "--policy", "autoregressive", "--record", "--no-store")
        recording = run.stderr.readline().split()[1]
        deadline = time.monotonic() + 60
        while not any(key[0] == recording for key in trajectories(tmp_path / "spectune.db")) and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(sent)
        assert run.wait(60) == code
        info = next(r for r in door.json("traces", "list")["recordings"] if r["id"] == recording)
        assert info["state"] == ("complete" if sent == signal.SIGTERM else "recording")
        assert 1 <= info["n_requests"] < 400
    assert door.json("db", "check")["ok"] is True


def trajectories(database: Path) -> dict[tuple[str, int], tuple[bytes, str]]:
    """Every stored text: its place, and its checksum and the moment it was stored."""
    connection = sqlite3.connect(database)
    try:
        rows = connection.execute("SELECT recording_id, ordinal, sha256, created_at FROM trajectory").fetchall()
        return {(recording, ordinal): (digest, at) for recording, ordinal, digest, at in rows}
    finally:
        connection.close()

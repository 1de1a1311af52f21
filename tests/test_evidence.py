"""What is measured again: parts whose code has changed since they were."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from bench import evidence, harness, measured_page


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of their own."""
    for module in (evidence, measured_page, harness):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


def head() -> str:
    git = ("git", "-C", str(harness.ROOT), "rev-parse", "--short=8", "HEAD")
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def test_what_is_due_is_said_with_its_time(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        "replay": {"measured": "2026-11-26", "code": "0000000", "seconds": 120.0},
        "trees": {"measured": "2026-11-26", "code": head(), "seconds": 60.0},
    }
    (results / "speed.json").write_text(json.dumps({"made": parts}))
    assert harness.main(["evidence", "--list", "speed", "matrix"], None) == 0
    replay, trees, matrix, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"speed replay +2 minutes +\? files changed since", replay)
    assert re.fullmatch(r"speed trees +1 minutes +\d+ files changed since", trees)
    assert re.fullmatch(r"matrix matrix +time unknown +new", matrix)
    assert re.search(r"[23] of 3 parts are due: [23] minutes, 1 unknown", last)


def test_parts_that_are_due_are_measured_one_after_the_other_and_a_failure_is_told(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        asked.append(command[2:])
        return subprocess.CompletedProcess(command, int("trees" in command))

    (results / "speed.json").write_text(json.dumps({"measured": "x", "code": head()}))
    monkeypatch.setattr(evidence, "changed_since", lambda *_: "3")
    monkeypatch.setattr(evidence.subprocess, "run", run)
    assert harness.main(["evidence", "speed"], None) == 1
    assert asked == [["speed", "--only", "replay"], ["speed", "--only", "trees"]]
    assert "does not hold, or failed: speed trees" in capsys.readouterr().out


def test_the_page_differs_by_its_last_column_alone() -> None:
    page = measured_page.page()
    other = re.sub(r"\| (\d+) \|$", "| 4711 |", page, flags=re.MULTILINE)
    assert other != page
    assert measured_page.without_changes(other) == measured_page.without_changes(page)
    assert measured_page.without_changes(page.replace("2026", "2027")) != page

"""bench/gpu/native.py on a CPU at a tiny size: that its parts run, before a GPU is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_report import PLAIN, SLOWER, WINNER
from test_report import tuned as tuning

from bench.gpu import native as gpu

ON_CPU = ("--device", "cpu", "--tiny")


def test_every_part_runs_and_leaves_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for a whole tuning, which takes longer: it is stopped, and says how to go on."""
    out, folder = tmp_path / "gpu.json", tmp_path / "ballast"
    parts = [part.__name__ for part in gpu.PARTS if part is not gpu.tune]
    where = ("--folder", str(folder), "--out", str(out))
    assert gpu.main([*parts, *ON_CPU, *where]) == 0
    assert gpu.main(["tune", *ON_CPU, *where, "--seconds", "1"]) == 0
    found = json.loads(out.read_text())
    assert list(found) == [*parts, "tune"]
    printed = capsys.readouterr().out
    for name, part in found.items():
        assert part["on"]
        assert f"\n{name}: " in printed
        for row in part["rows"]:
            assert set(row) == set(part["rows"][0])
    assert [row["policy"] for row in found["rounds"]["rows"]] == list(gpu.POLICIES)
    for row in found["rounds"]["rows"]:
        parts_ms = row["draft ms"] + row["verify ms"] + row["rest ms"]
        assert 0 < parts_ms < 2 * row["round ms"]
        assert row["tau"] >= 1
    assert found["rounds"]["rows"][0]["tau"] == 1
    assert found["rounds"]["publication"]["rounds"] > 3
    assert all(row["differ"] == 0 for row in found["generate"]["rows"])
    exact, other = found["texts"]["rows"]
    assert (exact["dtype"], exact["differ"], exact["again"]) == ("float64", 0, 0)
    assert min(exact["texts"], other["texts"]) > 0
    assert max(row["error"] for row in found["kernels"]["rows"]) < 1e-3
    assert found["tune"]["rows"][0]["ended"] == "call again to go on"


def test_a_part_that_breaks_off_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gpu.json"

    def one(bench: gpu.Bench) -> gpu.Figures:
        raise RuntimeError("out of memory")

    def other(bench: gpu.Bench) -> gpu.Figures:
        """Its figures."""
        return {"rows": [{"a": 1.0}]}

    monkeypatch.setattr(gpu, "PARTS", (one, other))
    assert gpu.main([*ON_CPU, "--folder", str(tmp_path), "--out", str(out)]) == 1
    assert json.loads(out.read_text())["other"]["rows"] == [{"a": 1.0}]


def test_a_tuning_s_figures_are_of_its_json() -> None:
    made = json.loads(json.dumps(tuning(WINNER, PLAIN, WINNER, SLOWER, PLAIN).to_json()))
    found = gpu.tuned_figures(made)
    assert found["tuned"]["reason"] == made["reason"]
    assert [row["role"] for row in found["rows"]] == ["finalist 1", "finalist 2", "autoregressive"]


def test_a_part_that_does_not_exist_and_a_device_that_is_not_there_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, says in (
        (["tunes", *ON_CPU], "no part tunes; there are ballast, passes"),
        (["texts"], "this torch sees no CUDA device"),
    ):
        with pytest.raises(SystemExit) as ended:
            gpu.main(arguments)
        assert ended.value.code == 2
        assert says in capsys.readouterr().err

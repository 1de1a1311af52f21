"""bench/gpu/vllm.py in a real vLLM on a CPU: the EAGLE-3 head with ballast, whose noted rounds are
held against what the head proposes here."""

from __future__ import annotations

import json
from pathlib import Path

from bench.gpu import vllm as gpu_vllm

PARTS = ("K=0, 4 clients", "K=2, 4 clients", "retraced")


def test_the_ballasted_head_s_rounds_are_as_replay_predicts(tmp_path: Path) -> None:
    out, folder = str(tmp_path / "out"), str(tmp_path / "ballast")
    where = ["--device", "cpu", "--tiny", "--draft", "head", "--folder", folder, "--out", out]
    assert gpu_vllm.main([*PARTS, *where, "--seconds", "900"]) == 0
    gpu_vllm.main(["--collect", out, "--results", str(tmp_path)])
    (file,) = tmp_path.glob("gpu-vllm-head-*.json")
    found = json.loads(file.read_text())
    assert (found["draft"], found["failed"]) == ("head", {})
    assert found["pair"] == "the demo pair ballasted to a tiny size"
    assert found["requests"]["not_noted"] == 0
    for held in (found["rounds"], found["retraced"]):
        assert held["rounds"] > 10
        assert (held["drafted_differ"], held["accepted_differ"], held["unknown"]) == (0, 0, 0)
    assert found["retraced"]["proposals_differ"] == 0
    for row in found["speed"]:
        assert not row["differ"]

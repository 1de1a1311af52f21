"""bench/gpu/stream.py on a CPU at a tiny size, before a GPU is at hand: two trees of the package in
one process, kernels in Triton's interpreter, parts that go on in the next call, and what is read of
them. A tuning, which takes longer, is stopped; what it would leave is written here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pairs import top_k
from synthetic import flat_profile

from bench import ROOT
from bench.gpu import stream
from bench.gpu.checkout import Checkout
from bench.verdicts import NOT_MET
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.cost_table import CostTable

POLICY = top_k("head", 4, 3, 8)


def rows_of(folder: Path) -> dict[str, Any]:
    rows = map(json.loads, (folder / "rows.jsonl").read_text().splitlines())
    return {row["part"]: row for row in rows}


@pytest.fixture(scope="module")
def ballast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ballast")


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A folder with another tree of the package: a copy of this one."""
    (tmp_path / "spectune").symlink_to(ROOT)
    return tmp_path


def test_a_tree_of_the_package_imports_its_own(before: Path) -> None:
    own, other = sys.modules["spectune.runtime.pair"], Checkout(before)
    with other.active():
        module = other.module("runtime.pair")
        assert module is not own
        assert module.read_pair("demo").id == read_pair("demo").id
    assert sys.modules["spectune.runtime.pair"] is own
    with other.active():
        assert other.module("runtime.pair") is module


@pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
@pytest.mark.usefixtures("interpreted")
def test_passes_run_by_kernels_in_two_trees(tmp_path: Path, ballast: Path, before: Path) -> None:
    where = ["--device", "cpu", "--tiny", "--folder", str(ballast), "--out", str(tmp_path / "out")]
    assert stream.main(["passes", *where, "--before", str(before)]) == 0
    row = rows_of(tmp_path / "out")["passes"]
    assert [each["tokens"] for each in row["rows"]] == [*stream.TINY.passes]
    for each in row["rows"]:
        assert {side: len(ms) for side, ms in each["ms"].items()} == {
            "before": stream.TINY.turns,
            "now": stream.TINY.turns,
        }
        assert all(low <= share <= high for share, low, high in each["share"].values())


def test_parts_go_on_and_what_came_back_is_read(
    tmp_path: Path, ballast: Path, before: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    where = ["--device", "cpu", "--tiny", "--folder", str(ballast), "--out", str(out)]
    where += ["--before", str(before)]
    assert stream.main(["drafting", "tree", "tune", "prompt 0", *where, "--seconds", "0"]) == 0
    assert "not run: drafting; tree; tune; prompt 0. Call again to go on" in capsys.readouterr().out
    assert stream.main(["tree", "prompt 0", *where]) == 1
    assert "failed: prompt 0: ValueError: nothing is tuned yet" in capsys.readouterr().out
    policy, profile = parse_policy(POLICY), flat_profile("demo", ["small"], ["head"])
    tuned = {"winner": {"policy": policy.spelled_out()}, "profile": profile.to_json()}
    with (out / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"part": "tune", **tuned}) + "\n")
    assert stream.main(["tree", "prompt 0", "prompt 1", "costs", *where]) == 0
    assert "'part': 'tree'" not in capsys.readouterr().out, "which was done before"
    assert stream.main(["--collect", str(out), "--results", str(tmp_path)]) == 1
    (file_of_results,) = tmp_path.glob("gpu-stream-*.json")
    found, printed = json.loads(file_of_results.read_text()), capsys.readouterr().out
    assert found["verdicts"]["every part ran"] == NOT_MET
    assert found["not_run"] == ["passes", "drafting"]
    labels = [row["policy"] for row in found["policies"]]
    assert labels == [f"published: {policy.label()}", *stream.OTHERS]
    for row in found["policies"]:
        assert row["prompts"] == 2
        assert row["texts differ"] == 0  # in float32
        assert row["predicted"] > 0
    assert found["policies"][-1]["over none"] == [1.0, 1.0, 1.0]
    assert found["tree"]["now over before"][0] > 0
    costs = stream.profile_from(found["costs"]["profile"])
    assert costs.terms["target"].knots[0][-1] >= max(stream.TINY.rows)
    assert costs.terms["target"].knots[1] == tuple(map(float, stream.TINY.contexts))
    assert "| promise | verdict |" in printed


def test_a_profile_goes_as_far_as_passes_were_captured() -> None:
    profile = flat_profile("demo", ["small"])
    passed = [
        {"rows": rows, "context": context, "ms": 3.0 + rows / 50}
        for rows in (1, 64, 128, 256)
        for context in (32, 512)
    ]
    wide = stream.profile_from(json.loads(json.dumps(stream.widened(profile, passed).to_json())))
    table, own = wide.terms["target"], profile.terms["target"]
    assert isinstance(table, CostTable)
    assert table.knots == ((*own.knots[0], 128.0, 256.0), own.knots[1])
    for rows in (1, 17, 65):
        assert table.at(rows=rows, context=100) == pytest.approx(own.at(rows=rows, context=100))
    assert table.at(rows=256, context=32) == pytest.approx(own.at(rows=65, context=32) + 191 / 5e4)


def test_what_is_no_tree_and_no_part_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    for words, says in (
        ([*where, "--before", str(tmp_path)], "it has no folder spectune with a runtime"),
        (["trees", *where], "no part 'trees'; there are passes, drafting, tree, tune, prompt N"),
        (["--out", str(tmp_path)], "this torch sees no CUDA device"),
    ):
        with pytest.raises(SystemExit) as ended:
            stream.main(words)
        assert ended.value.code == 2
        assert says in capsys.readouterr().err

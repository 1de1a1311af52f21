"""bench/gpu/many.py on a CPU at a tiny size, before a GPU is at hand: what is chosen by replay and
executed, parts that go on in the next call, and what is read of them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pairs import chain, top_k
from trace_values import a_trajectory

from bench.gpu import many, many_collect
from bench.gpu.native import Bench
from bench.gpu.rows import OutOfTimeError, Rows
from bench.lab import GREEDY
from bench.verdicts import MET, NOT_MET, NOT_SHOWN
from spectune.engines.engine import Prompt
from spectune.runtime.policies.document import Policy, parse_policy

NAMES = ("none", "chain", "tree", "by load")


def rows_of(folder: Path) -> dict[str, Any]:
    rows = map(json.loads, (folder / "rows.jsonl").read_text().splitlines())
    return {row["part"]: row for row in rows}


def test_parts_go_on_and_what_came_back_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    where = ["--device", "cpu", "--tiny", "--folder", str(tmp_path / "ballast"), "--out", str(out)]
    begun = ["record, temperature 0", "profile", "choose, temperature 0"]
    assert many.main([*where, "--seconds", "0"]) == 0
    assert f"not run: {'; '.join(begun)}; clients 1, temperature 0; " in capsys.readouterr().out
    assert many.main(["clients 2, temperature 0", *where]) == 1
    assert "ValueError: 'choose, temperature 0' has not run yet" in capsys.readouterr().out
    assert many.main([*begun, *where]) == 0
    capsys.readouterr()
    assert many.main([*begun, "clients 2, temperature 0", "texts", *where]) == 0
    printed = capsys.readouterr().out
    assert not any(f"'part': '{part}'" in printed for part in begun), "which were done before"
    rows = rows_of(out)
    chosen = rows["choose, temperature 0"]["policies"]
    assert [*chosen] == [str(n) for n in many.TINY.clients]
    policies = {name: parse_policy(document) for name, document in chosen["2"].items()}
    assert [*policies] == [*NAMES]
    assert [policies[name].is_tree for name in NAMES[:3]] == [False, False, True]
    cell = rows["clients 2, temperature 0"]
    assert {name: len(each) for name, each in cell["tokens_per_s"].items()} == dict.fromkeys(
        NAMES, many.TINY.passes
    )
    assert cell["differ"] == dict.fromkeys(NAMES, 0)  # in float32
    assert cell["failures"] == {}
    assert rows["texts"]["count"] > 0

    assert many.main(["--collect", str(out), "--results", str(tmp_path)]) == 1
    assert "| promise | verdict |" in capsys.readouterr().out
    (file,) = tmp_path.glob("gpu-many-*.json")
    found = json.loads(file.read_text())
    assert found["not_run"] == ["clients 1, temperature 0", "static"]
    assert found["verdicts"]["every part ran"] == NOT_MET
    assert found["verdicts"]["no request fails"] == MET
    assert found["verdicts"]["0 of 50 or more float64 texts differ"] == NOT_SHOWN, "of fewer texts"
    assert not any(row["differ"] for row in found["texts"])
    assert [row["policy"] for row in found["executed"]] == [*NAMES]
    for row in found["executed"]:
        assert row["predicted_tokens_per_s"] > 0
    (row,) = found["clients"]
    for ratio in ("tree over chain", "by load over it"):
        assert row[ratio][1] <= row[ratio][0] <= row[ratio][2]


def figures(**more: Any) -> many_collect.Figures:
    """What verdicts are of, where nothing was executed."""
    empty: dict[str, Any] = {"executed": [], "clients": [], "texts": [], "failures": {}}
    return {**empty, "failed": {}, "not_run": [], **more}


def cell(clients: int, tree: list[float] | None, table: list[float]) -> dict[str, Any]:
    return {"clients": clients, "tree over chain": tree, "by load over it": table}


def test_verdicts_go_by_the_unfavourable_end_of_an_interval() -> None:
    def verdict(beginning: str, **more: Any) -> str:
        found = many_collect.verdicts(figures(**more)).items()
        return next(verdict for name, verdict in found if name.startswith(beginning))

    for beginning in ("no request", "predicted", "the best tree", "by load", "0 of 50"):
        assert verdict(beginning) == NOT_SHOWN
    wide, low, high = [1.1, 1.0, 1.2], [1.0, 0.96, 1.04], [1.1, 1.06, 1.14]
    for trees, expected in (
        ({4: wide, 8: low}, NOT_SHOWN),
        ({4: low, 8: low}, NOT_MET),
        ({4: low, 8: high}, MET),
        ({1: high, 8: low}, NOT_MET),
        ({8: None}, NOT_SHOWN),
    ):
        cells = [cell(n, tree, wide) for n, tree in trees.items()]
        assert verdict("the best tree", clients=cells) == expected
        assert verdict("by load", clients=cells) == MET
    assert verdict("by load", clients=[cell(4, low, wide), cell(8, low, low)]) == NOT_SHOWN
    for off, expected in ((1.01, MET), (1.2, NOT_MET)):
        rows = [{"tokens_per_s": [100.0], "predicted_tokens_per_s": 100.0 * off}] * 8
        assert verdict("predicted", executed=rows) == expected
    assert verdict("no request", executed=rows, failures={"clients 4": "out of memory"}) == NOT_MET
    for texts, differ, expected in ((64, 0, MET), (48, 0, NOT_SHOWN), (48, 1, NOT_MET)):
        assert verdict("0 of", texts=[{"texts": texts, "differ": differ}]) == expected


def test_results_of_vllm_on_that_device_stand_beside(tmp_path: Path) -> None:
    speed = [
        {"clients": 4, "K": gamma, "tokens/s": speed} for gamma, speed in ((0, 9.0), (3, 12.0))
    ]
    for name, on in (("head-a", "A"), ("b", "B")):
        told = {"on": on, "draft": "head", "speed": speed}
        (tmp_path / f"gpu-vllm-{name}.json").write_text(json.dumps(told))
    (tmp_path / "gpu-vllm-tuned-a.json").write_text(json.dumps({"on": "A"}))
    assert many_collect.beside_vllm("A", tmp_path) == [
        {"draft": "head", "clients": 4, "K=0": 9.0, "best K": 3, "tokens/s": 12.0}
    ]


class Engine:
    """Answers at once, and fails under trees from the third execution of them on."""

    def __init__(self) -> None:
        self.executions_of_trees = 0

    def execute(self, prompts: Sequence[Prompt], policy: Policy, *_: object, **how: object) -> Any:
        self.executions_of_trees += policy.is_tree
        if policy.is_tree and self.executions_of_trees > 2:
            raise RuntimeError("out of memory")
        for prompt in prompts:
            text = SimpleNamespace(request_id=prompt.id, output_ids=np.array([7]))
            yield SimpleNamespace(trajectory=text, finished_s=0.5)


def test_a_policy_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    made = []

    class Stub(many.Measurement):
        @cached_property
        def engine(self) -> Any:
            made.append(Engine())
            return made[-1]

    bench, until = Bench("cpu", True, 600.0, tmp_path), time.monotonic() + 600.0
    of = Stub(bench, many.TINY._replace(passes=3), until, tmp_path)
    documents = {"none": {}, "chain": chain("head", 2), "tree": top_k("head", 2, 2, 4)}
    Rows(tmp_path).add("choose, temperature 0", {"policies": {"2": documents}})
    texts: Any = SimpleNamespace(trajectories=[a_trajectory(n) for n in range(4)])
    of.traces["record, temperature 0"] = texts
    row = many.clients(of, 2, GREEDY)
    assert row["failures"] == {"tree": "RuntimeError: out of memory"}
    assert row["tokens_per_s"] == {"none": [8.0] * 3, "chain": [8.0] * 3, "tree": []}
    assert len(made) == 2, "the one that failed is let go"
    late = replace(of, until=time.monotonic() - 1.0)
    late.traces.update(of.traces)
    with pytest.raises(OutOfTimeError):
        many.clients(late, 2, GREEDY)

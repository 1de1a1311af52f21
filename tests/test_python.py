"""`import spectune`: the calls, their results, and the notebook that shows them."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doors import ROOT, put_profile, write_lines
from test_report import PLAIN, SLOWER, WINNER
from test_report import tuned as results

import spectune
from spectune.db.database_errors import DatabaseError
from spectune.optimizer.commands.outcomes import tuning_result
from spectune.optimizer.commands.results import Result
from spectune.optimizer.inputs import read_files
from spectune.runtime.loading import LoadedPair
from spectune.traces.errors import ConfigError, PairError, WorkloadError

PROMPTS = (
    *("def add(a, b):", "The quick brown fox", "import json", "0 1 2 3 4", "for i in"),
    "Ann buys 4 apples and",
)
TINY = {"gamma_max": 5, "trials": 2, "finalists": 1, "tree_width": 0}
TINY["budget"] = "1s"


def test_importing_it_imports_nothing_else() -> None:
    say = (
        "import sys; before = set(sys.modules); import spectune; print(*set(sys.modules) - before)"
    )
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "cwd": ROOT}
    found = subprocess.run([sys.executable, "-c", say], **how).stdout
    names = {name.split(".")[0] for name in found.split()}
    assert names - sys.stdlib_module_names == {"spectune"}
    with pytest.raises(AttributeError, match="has no attribute 'tunes'"):
        _ = spectune.tunes  # type: ignore[attr-defined]


def test_the_notebook_runs(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell but the one of parameters, with a tiny pair and a made-up profile: measuring one
    takes half a minute."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in code)
    (given,) = [cell for cell in code if "parameters" in cell["metadata"].get("tags", ())]
    own: dict[str, Any] = {}
    exec("".join(given["source"]), own)
    names = {"models": {"pair": str(tiny_pair)}, "tokens": {"max_new_tokens": 8}, "effort": TINY}
    names["prompts"] = [f"{prompt} {n}" for n, prompt in enumerate(PROMPTS * 3)]
    assert names.keys() == own.keys() - {"__builtins__"}
    put_profile("tour.db", str(tiny_pair))
    for cell in code:
        if cell is not given:
            exec(compile("".join(cell["source"]), "tour.ipynb", "exec"), names)
    made: Any = names
    for name in ("recorded", "executed", "result", "served"):
        assert isinstance(made[name], Result)
    assert made["recorded"]["n_requests"] == 18
    assert made["result"].policy == made["result"]["winner"]["policy"]
    assert len(made["published"]) == (made["result"]["published"] is not None)
    html = made["result"]._repr_html_()
    assert html.count("<tr>") == len(made["result"].rows) + 1
    assert "measured tokens per s" in html


SCRIPT = """
import os
import torch
from transformers.utils import logging
import spectune
from spectune.optimizer.recording import processes
from spectune.optimizer.commands.outcomes import tuning_result

def switches():
    cudnn, bars = torch.backends.cuda.cudnn_sdp_enabled(), logging.is_progress_bar_enabled()
    return torch.get_num_threads(), cudnn, logging.get_verbosity(), bars

print("the script begins")
os.sched_getaffinity = lambda _: {0, 1}
processes.PATIENCE_S = 0.0
torch.set_num_threads(2)
torch.backends.cuda.enable_cudnn_sdp(True)
logging.set_verbosity_info()
before = switches()
recorded = spectune.record(pair=PAIR, prompts=PROMPTS, max_new_tokens=8)
policy = {"draft": "near", "window": {"kind": "fixed", "gamma": 4}}
print(recorded["n_requests"], len(spectune.simulate(policy).rows) > 0)
assert switches() == before, (switches(), before)
"""


def test_a_script_without_a_guard_is_run_once(tiny_pair: Path, tmp_path: Path) -> None:
    """README's example as a file: the processes that help to record do not run it again, and
    threads, attention and logs are as the script set them."""
    names = {"PAIR": str(tiny_pair), "PROMPTS": [f"{p} {n}" for n, p in enumerate(PROMPTS)]}
    script = tmp_path / "example.py"
    script.write_text("\n".join(f"{k} = {v!r}" for k, v in names.items()) + SCRIPT)
    how: dict[str, Any] = {"capture_output": True, "text": True, "cwd": tmp_path}
    how["env"] = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, str(script)], **how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the script begins", "6 True"]


def test_a_result_is_shown_and_becomes_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"a": 1, "b": "<b>" + "x" * 200}, {"a": 0.123456, "c": None}]
    result = Result("2 < 3", {"policy": {"draft": "none"}, "n": 2}, rows)
    html = result._repr_html_()
    assert html.startswith("<p>2 &lt; 3</p><table>")
    assert html.count("<th>") == 3
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert ">0.1235</td>" in html
    assert (repr(result), result["n"], result.policy) == ("2 < 3", 2, {"draft": "none"})
    assert "<p>10 more rows</p>" in Result("", {}, [{"a": n} for n in range(60)])._repr_html_()
    pandas = SimpleNamespace(DataFrame=lambda rows: ("frame", rows))
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert result.to_pandas() == ("frame", rows)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        result.to_pandas()


def test_prompts_of_every_kind_are_narrowed(
    pair: LoadedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of a list, a Workload or a file."""
    monkeypatch.chdir(tmp_path)
    lines = [{"id": f"{c}{n}", "category": c, "prompt": f"{c} {n}"} for c in "ab" for n in range(3)]
    write_lines("w.jsonl", lines)
    whole = read_files(["w.jsonl"])
    how: dict[str, Any] = {"pair": pair, "max_new_tokens": 1}
    texts = ({"prompts": whole}, {"workload": Path("w.jsonl")}, {"prompts": lines})
    for prompts in texts:
        result = spectune.run("autoregressive", **prompts, limit=2, category="b", **how)
        assert [row["category"] for row in result.rows] == ["b", "b"]
    with pytest.raises(WorkloadError, match="column: for prompts of a file"):
        spectune.run("autoregressive", prompts=whole, pair=pair, column="first")
    groups = {"sampling": {"max_new_tokens": 1}, "requests": {"limit": 1}}
    assert len(spectune.run("autoregressive", prompts=lines, pair=pair, **groups).rows) == 1


def test_rows_of_a_tuning_are_in_the_order_of_the_race() -> None:
    """One that was dropped after two easy requests has the most tokens/s."""
    incumbent = replace(PLAIN, role="incumbent")
    done = results(WINNER, incumbent, PLAIN, incumbent, SLOWER, WINNER)
    assert [row["role"] for row in tuning_result(done).rows] == [
        *("finalist 1", "finalist 2", "autoregressive, incumbent"),
    ]


def test_what_a_call_does_not_take_is_refused(
    tiny_pair: Path, pair: LoadedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECTUNE_PAIR", raising=False)
    how: dict[str, Any] = {"pair": str(tiny_pair), "db": "x.db"}
    with pytest.raises(ConfigError, match="unknown argument 'tempratur'; did you mean 'tempera"):
        spectune.tune(prompts=["x"], tempratur=1.0, **how)
    with pytest.raises(ConfigError, match=r"unknown key 'search.trial'; did you mean 'search.tri"):
        spectune.tune(prompts=["x"], search={"trial": 1}, **how)
    with pytest.raises(ConfigError, match="limit: '0': it should be greater"):
        spectune.tune(prompts=["x"], limit=0, **how)
    with pytest.raises(PairError, match="no pair is named"):
        spectune.run(prompts=["x"], db="x.db")
    near = {"near": str(tiny_pair.parent / "near")}
    for more, says in (
        ({"drafts": near}, "drafts need a target"),
        ({**how, "target": str(tiny_pair.parent / "target")}, "either a pair or a target"),
        ({"pair": pair, "drafts": near, "threads": 2}, "drafts, threads: the pair is loaded"),
        ({"pair": pair, "device": "cpu"}, "device: the pair is loaded already"),
    ):
        with pytest.raises(PairError, match=says):
            spectune.run("autoregressive", prompts=["x"], **{"db": "x.db", **more})
    monkeypatch.setenv("SPECTUNE_PAIR", how.pop("pair"))
    with pytest.raises(WorkloadError, match=r"prompts\[1\]: .prompt. must be a text"):
        spectune.record(prompts=["x", " "], **how)
    with pytest.raises(DatabaseError, match="no database at"):
        spectune.simulate("autoregressive", db="x.db")
    with pytest.raises(DatabaseError, match="no database at"), spectune.open("x.db"):
        pass
    assert not Path("x.db").exists()
    chat = {"messages": [{"role": "user", "content": "x"}]}
    phases: list[tuple[str, int, int]] = []

    def shown(phase: str, done: int, total: int) -> None:
        phases.append((phase, done, total))

    assert "progress" in inspect.signature(spectune.record).parameters
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = spectune.record(
            prompts=[chat, "x"], max_new_tokens=2, gamma_max=2, progress=shown, **how
        )
    assert [row["request"] for row in found.rows] == ["0", "1"]
    assert ("decode", 2, 2) in phases
    assert {w.filename for w in said if w.category is UserWarning} == {__file__}
    assert [str(w.message) for w in said if w.category is UserWarning] == [
        "1 of 2 prompts are the same as an earlier one, and tell nothing new",
    ]

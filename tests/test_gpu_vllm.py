"""bench/gpu/vllm.py without vLLM and a GPU, beside a server that speaks HTTP and the folder: every
part has a row, time ends and the next call goes on, a part that fails is named, and a round that is
not as replay predicts is found. And the copy of a library that has one architecture's code."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doubles import served

from bench.gpu import vllm as gpu_vllm
from bench.gpu import vllm_collect as collect
from bench.gpu.packed_vllm import fatbin
from spectune.engines.vllm.running import RunningServer
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import read_pair
from spectune.traces.errors import EngineError

STEPS = {"steps": 50, "steps_differ": 0, "texts_differ": 0, "steps_of_vllm_differ_again": 0}
COST = {
    "us_a_step": {"median": 20.0},
    "tokens_per_s_ratio": [1.0, 0.99, 1.01],
    "alternations": 2,
}


class Doubles:
    """Places without vLLM. ``is_broken``: the engine in a process ends at once."""

    def __init__(self, folder: Path, pair: LoadedPair) -> None:
        self.started: list[str] = []
        self.is_broken = True
        self._folder, self._pair = folder, pair

    def _place(self, name: str) -> Path:
        self.started.append(name)
        return self._folder / f"{name}{len(self.started)}"

    @contextmanager
    def plain(self, bench: gpu_vllm.Bench) -> Iterator[gpu_vllm.Sender]:
        with served(self._place("plain"), self._pair, None) as fake:
            yield gpu_vllm.WithoutAgent(fake.url, bench.spec.target)

    @contextmanager
    def with_agent(self, bench: gpu_vllm.Bench) -> Iterator[RunningServer]:
        with served(self._place("agent"), self._pair, "small") as fake:
            yield RunningServer(fake.url, fake.folder, bench.spec)

    @contextmanager
    def tuned(self, bench: gpu_vllm.Bench) -> Iterator[RunningServer]:
        with served(self._place("tuned"), self._pair, "small") as fake:
            yield RunningServer(fake.url, fake.folder, bench.spec)

    @contextmanager
    def retraced(self, bench: gpu_vllm.Bench) -> Iterator[RunningServer]:
        with served(self._place("retraced"), self._pair, "small") as fake:
            yield RunningServer(fake.url, fake.folder, bench.spec)

    def death(self) -> str:
        return "vLLM died (SIGKILL): out of memory"

    def in_process(self, bench: gpu_vllm.Bench, parts: Sequence[str]) -> None:
        rows = gpu_vllm.Rows(bench.out)
        rows.add("steps", STEPS)
        if self.is_broken:
            raise EngineError("exit code -11: Segmentation fault")
        rows.add("cost", COST)


class Measured(NamedTuple):
    """The folder, and by call the exit code, what it printed and what it started."""

    folder: Path
    calls: list[tuple[int, str, list[str]]]


@pytest.fixture(scope="module")
def demo_pair() -> LoadedPair:
    return load_pair(read_pair("demo"), device="cpu", dtype="float32", drafts=("small",))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, demo_pair: LoadedPair) -> Measured:
    """Three calls: one without time, one of two parts, one for the rest."""
    folder = tmp_path_factory.mktemp("gpu-vllm")
    places, calls = Doubles(folder, demo_pair), []
    for words in (["--seconds", "0"], ["plain, 1 clients", "steps", "cost"], []):
        places.started.clear()
        where = ["--device", "cpu", "--tiny", "--out", str(folder / "out")]
        with redirect_stdout(io.StringIO()) as printed:
            code = gpu_vllm.main([*words, *where], places)
        calls.append((code, printed.getvalue(), list(places.started)))
        places.is_broken = len(calls) < 2
    return Measured(folder / "out", calls)


def rows_of(folder: Path) -> dict[str, Any]:
    rows = map(json.loads, (folder / "rows.jsonl").read_text().splitlines())
    return {row["part"]: row for row in rows}


def test_time_ends_a_part_fails_and_the_next_call_goes_on(measured: Measured) -> None:
    (code, printed, started), second, third = measured.calls
    parts = rows_of(measured.folder)["plan"]["plan"]
    assert (code, started) == (0, [])
    assert f"not run: {'; '.join(parts)}. Call again to go on" in printed
    code, printed, started = second
    assert (code, started) == (1, ["plain"])
    assert "failed: cost: EngineError: exit code -11: Segmentation fault" in printed
    assert "2 of 3 parts done" in printed
    code, printed, started = third
    assert (code, started) == (0, ["plain", "agent"])
    assert f"{len(parts)} of {len(parts)} parts done" in printed
    assert "'part': 'plain, 1 clients'" not in printed, "which was done before"


def test_every_part_has_its_row(measured: Measured) -> None:
    rows = rows_of(measured.folder)
    size = gpu_vllm.TINY
    assert rows.keys() >= {*rows["plan"]["plan"], "plain starts", "with_agent starts"}
    assert not [row for row in rows.values() if "failed" in row]
    for clients in size.clients:
        plain = rows[f"plain, {clients} clients"]
        assert len(plain["texts"]) == size.count(clients)
        for gamma in size.gammas:
            row = rows[f"K={gamma}, {clients} clients"]
            assert row["texts"] == plain["texts"]
            assert list(row["tables"].values()) == [{"1": gamma}]
            assert row["tokens_per_s"] > 0
    published = rows["publications"]
    assert (published["publications"], published["failed_requests"]) == (size.publications, 0)
    assert len(published["in_force_s"]) == size.publications
    lengths = [len(output) for _, output, *_ in rows["retraced"]["texts"]]
    assert len(lengths) == size.retraced
    assert rows["retraced"]["positions"] == sum(lengths) - len(lengths) > 0


def test_what_came_back_is_held_against_replay(
    measured: Measured,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Publications may take their time here, beside other tests."""
    monkeypatch.setattr(collect, "LIMIT_S", 600.0)
    code = gpu_vllm.main(["--collect", str(measured.folder), "--results", str(tmp_path)])
    (file,) = tmp_path.glob("gpu-vllm-*.json")
    found, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert (code, found["holds"]) == (0, True), found["verdicts"]
    assert set(found["verdicts"].values()) == {"met"}
    assert (found["failed"], found["not_run"]) == ({}, [])
    size = gpu_vllm.TINY
    sent = len(size.gammas) * sum(map(size.count, size.clients))
    assert found["requests"] == {"answered": sent, "not_noted": 0}
    for held in (found["rounds"], found["retraced"]):
        assert held["rounds"] > 5
        assert (held["drafted_differ"], held["accepted_differ"]) == (0, 0)
    assert found["rounds"]["unknown"] == 0
    assert found["retraced"]["proposals_differ"] == 0
    for row in found["taus"]:
        assert row["tau"] == pytest.approx(row["tau replayed"])
    assert [(row["clients"], row["K"]) for row in found["speed"]] == [
        (1, 0),
        (1, 2),
        (4, 0),
        (4, 2),
    ]
    assert all(row["differ"] == 0 for row in found["speed"])
    assert "| promise | verdict |" in printed


def test_a_round_that_is_not_as_replay_predicts_is_found(
    measured: Measured, demo_pair: LoadedPair, tmp_path: Path
) -> None:
    shutil.copy(measured.folder / "rows.jsonl", tmp_path)
    lines = gzip.decompress((measured.folder / "rounds.jsonl.gz").read_bytes()).splitlines()
    name = plant(lines)
    (tmp_path / "rounds.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    brought = collect.Brought(tmp_path)
    texts = [noted.text for noted in brought.noted if noted.line.id == name]
    held = collect.hold(brought, collect.agreement(demo_pair, "small", 2, texts))
    assert (held.drafted_differ, held.accepted_differ) == (1, 1)
    assert len(held.examples) == 2
    assert all(example.startswith(name) for example in held.examples)


def plant(lines: list[bytes]) -> str:
    """Has one round of a request draft, and another accept, a token more; the request's name."""
    for place, text in enumerate(lines):
        line = json.loads(text)
        if not line.get("id", "").startswith("cmpl-K_2_4."):
            continue
        rounds = line["rounds"][1:-1]
        rejecting = next((r for r in rounds if r[2] < r[1]), None)
        others = [r for r in rounds if r is not rejecting]
        if rejecting and others:
            rejecting[2] += 1
            others[0][1] += 1
            lines[place] = json.dumps(line).encode()
            return str(line["id"])
    raise AssertionError("no such request")


def test_a_tuning_is_executed_beside_none_and_the_server_s_own(
    tmp_path: Path, demo_pair: LoadedPair, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    where = ["--device", "cpu", "--tiny", "--tune", "--out", str(out)]
    assert gpu_vllm.main(where, Doubles(tmp_path, demo_pair)) == 0, capsys.readouterr().out
    rows = rows_of(out)
    assert rows.keys() >= {*rows["plan"]["plan"], "tuned starts", "retraced starts"}
    gpu_vllm.main(["--collect", str(out)])
    (file,) = out.glob("gpu-vllm-tuned-*.json")
    found = json.loads(file.read_text())
    assert (found["failed"], found["not_run"]) == ({}, [])
    assert found["tuned"]["texts"]["differ"] == 0
    assert {"autoregressive", found["tuned"]["winner"]["label"]} < {
        row["policy"] for row in found["predictions"]
    }
    assert [row["clients"] for row in found["in_turns"]] == [2]
    for row in found["in_turns"]:
        assert row["turns"] > 1
        for other in ("none", "own"):
            ratio, low, high = row[f"over {other}"]
            assert low <= ratio <= high
    assert all(row["positions_per_s"] > 0 for row in found["retraces"])
    with pytest.raises(SystemExit):
        gpu_vllm.main(where[:-3] + where[-2:], Doubles(tmp_path, demo_pair))
    assert "small, a tuning; name another folder" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_and_a_part_that_is_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, says in (
        (["--out", str(tmp_path)], "this torch sees no CUDA device"),
        (["plane", "--device", "cpu", "--tiny", "--out", str(tmp_path)], "no part 'plane'; there"),
        ([], "--out DIR or --collect DIR is expected"),
    ):
        with pytest.raises(SystemExit) as ended:
            gpu_vllm.main(words)
        assert ended.value.code == 2
        assert says in capsys.readouterr().err


def test_of_a_library_one_architecture_s_code_is_kept(tmp_path: Path) -> None:
    codes = [(2, 80, b"\x7fELF old"), (2, 90, b"\x7fELF wide"), (2, 90, b"\x7fELF slim")]
    library, copy = tmp_path / "library.so", tmp_path / "copy.so"
    library.write_bytes(elf([*codes, (1, 90, b"text")]))
    for words, kept in ((b"", (1, 2)), (b"slim", (2,))):
        fatbin.prune(library, copy, [words] if words else [])
        expected = [c if n in kept else bytes(len(c)) for n, (*_, c) in enumerate(codes)]
        data = copy.read_bytes()
        found = [data[e.start : e.start + e.size] for e in fatbin.entries(fatbin.mapped(copy))]
        assert found == [*expected, bytes(4)]
        assert len(data) == library.stat().st_size


def elf(codes: Sequence[tuple[int, int, bytes]]) -> bytes:
    """A file with GPU code of kinds and architectures, in a section of one container."""
    body = b""
    for kind, architecture, code in codes:
        head = struct.pack("<HHIQ", kind, 0, 48, len(code)).ljust(28, b"\1")
        body += (head + struct.pack("<I", architecture)).ljust(48, b"\1") + code
    section = struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, len(body)) + body
    names = b"\0.nv_fatbin\0"
    table = 64 + len(section) + len(names)
    head = b"\x7fELF\2".ljust(0x28, b"\0") + struct.pack("<Q", table)
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 2, 1)
    sections = ((1, 64, len(section)), (0, 64 + len(section), len(names)))
    headers = [
        struct.pack("<IIQQQQIIQQ", n, 0, 0, 0, at, size, *(0,) * 4) for n, at, size in sections
    ]
    return head + section + names + b"".join(headers)

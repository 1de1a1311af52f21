"""What a pair's id is made of, and what is remembered of large files: other content is another
pair, always."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from doors import Door, write_workload
from pairs import make_pair
from safetensors.torch import load_file, save_file

from spectune.runtime.file_hashes import FileHashes
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import former_id, is_head, read_pair
from spectune.runtime.words import load_words
from spectune.traces.errors import PairError

FIXED = '{"draft": "near", "window": {"kind": "fixed", "gamma": 3}}'


@pytest.fixture
def folder(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy of the tiny pair, to be changed."""
    return Path(shutil.copytree(tiny_pair.parent, tmp_path / "pair"))


def spread_over_mib(file: Path) -> None:
    """Puts a tensor of 6 MiB before and after the middle of a weight file, whose values no model
    reads."""
    tensors = load_file(file)
    save_file(
        {"aaa.pad": torch.zeros(3 << 18), **tensors, "zzz.pad": torch.zeros(3 << 18)},
        file,
        metadata={"format": "pt"},
    )


def flip(file: Path, at: int) -> None:
    """Changes one byte and leaves the size as it was."""
    with file.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))


# ------------------------------------------------------------------------------------------- the id


@pytest.mark.parametrize("model", ["target", "near"])
def test_any_byte_of_the_weights_makes_another_pair(folder: Path, model: str) -> None:
    file = folder / model / "model.safetensors"
    spread_over_mib(file)
    before = read_pair(str(folder)).id
    for share in (0.3, 0.5, 0.7):
        flip(file, int(file.stat().st_size * share))
        assert read_pair(str(folder)).id != before
        flip(file, int(file.stat().st_size * share))
    assert read_pair(str(folder)).id == before


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ],
)
def test_all_that_decides_the_text_is_in_the_id(folder: Path, name: str) -> None:
    before = read_pair(str(folder)).id
    file = folder / "target" / name
    document = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(document | {"eos_token_id": 7}))
    assert read_pair(str(folder)).id != before


def test_shards_that_an_index_names_elsewhere_are_in_the_id(folder: Path) -> None:
    shards = folder / "target" / "shards"
    shards.mkdir()
    shutil.move(folder / "target" / "model.safetensors", shards / "one.safetensors")
    (folder / "target" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "shards/one.safetensors"}})
    )
    before = read_pair(str(folder)).id
    flip(shards / "one.safetensors", 30_000)
    assert read_pair(str(folder)).id != before


def test_place_notes_and_the_version_that_saved_it_are_not_in_the_id(
    folder: Path, tmp_path: Path
) -> None:
    before = read_pair(str(folder)).id
    config = folder / "target" / "config.json"
    config.write_text(
        json.dumps(
            json.loads(config.read_text())
            | {"transformers_version": "0", "_name_or_path": "elsewhere"},
            indent=7,
        )
    )
    (folder / "target" / "README.md").write_text("of interest to people")
    moved = Path(shutil.move(folder, tmp_path / "moved"))
    assert read_pair(str(moved)).id == before


def test_names_of_drafts_cannot_imitate_other_pairs(folder: Path) -> None:
    one = read_pair(None, str(folder / "target"), [f"a={folder / 'near'}", f"b={folder / 'far'}"])
    other = read_pair(None, str(folder / "target"), [f"b={folder / 'near'}", f"a={folder / 'far'}"])
    assert one.id != other.id


def test_a_loaded_pair_is_what_was_loaded(folder: Path) -> None:
    pair = load_pair(read_pair(str(folder)), device="cpu")
    loaded = pair.id
    assert loaded == read_pair(str(folder)).id
    flip(folder / "near" / "model.safetensors", 30_000)
    assert read_pair(str(folder)).id != loaded
    assert pair.id == loaded


def test_a_configuration_that_chooses_other_weights_is_refused(folder: Path) -> None:
    """transformers would load them, under names that the id does not look for."""
    config = folder / "near" / "config.json"
    (folder / "near" / "model.safetensors").rename(folder / "near" / "own.weights")
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"transformers_weights": "own.weights"})
    )
    spec = read_pair(str(folder))
    for refuses in (spec.check, lambda: spec.id):
        with pytest.raises(
            PairError, match=r"near/config\.json names its weights itself \(transformers_weights\)"
        ):
            refuses()


def test_weights_that_cannot_be_read_are_one_line(folder: Path) -> None:
    weights = folder / "near" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(weights)
    with pytest.raises(PairError, match=r"model\.safetensors: cannot be read"):
        _ = read_pair(str(folder)).id


def test_resuming_with_other_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    spread_over_mib(folder / "target" / "model.safetensors")
    door = Door(str(tmp_path / "spectune.db"), str(folder))
    workload = write_workload(tmp_path / "two.jsonl", 2)
    short = ("--max-new-tokens", 8, "--gamma-max", 4)
    door.json("record", "--pair", folder, "--workload", workload, *short)
    tensors = load_file(folder / "target" / "model.safetensors")
    changed = {k: -t if "layers.1" in k else t for k, t in tensors.items()}
    save_file(changed, folder / "target" / "model.safetensors", metadata={"format": "pt"})
    assert "was made with pair" in door.refused("record", "--pair", folder, "--resume", "latest")


# -------------------------------------------------------------------------- ids of earlier versions


def test_what_is_stored_under_a_former_id_is_said(folder: Path, tmp_path: Path) -> None:
    door = Door(str(tmp_path / "spectune.db"), str(folder))
    workload = (
        "--pair",
        folder,
        "--workload",
        write_workload(tmp_path / "two.jsonl", 2),
        "--max-new-tokens",
        8,
    )
    assert former_id(read_pair(str(folder))) != read_pair(str(folder)).id
    recording = door.json("record", *workload, "--gamma-max", 4)["recording"]
    door.json("policies", "activate", FIXED, "--pair", folder, "--device", "cpu")
    _as_formerly(tmp_path / "spectune.db", folder)

    found = door.call("run", *workload, "--no-store", "--json")
    assert found.exit_code == 0
    said = [line for line in found.stderr.splitlines() if former_id(read_pair(str(folder))) in line]
    assert len(said) == 1
    assert " policies activate" in said[0]
    assert json.loads(found.stdout)["label"] == "autoregressive"
    listed = door.call("policies", "list", "--pair", folder, "--device", "cpu", "--json")
    assert (listed.exit_code, listed.stderr.split("`")[0]) == (0, said[0].split("`")[0])
    refused = door.call("tune", "--pair", folder, "--recording", recording)
    assert refused.exit_code == 2
    assert "by an earlier version" in refused.stderr.splitlines()[-1]
    former = next(word for word in said[0].split("policies activate ")[1].split())
    door.json("policies", "activate", former, "--pair", folder, "--device", "cpu")
    again = door.call("run", *workload, "--no-store", "--json")
    assert former_id(read_pair(str(folder))) not in again.stderr
    assert json.loads(again.stdout)["policy_id"] == former


def _as_formerly(database: Path, folder: Path) -> None:
    """Puts everything of a pair under the id that earlier versions gave it."""
    import sqlite3

    spec = read_pair(str(folder))
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA foreign_keys = OFF")
    tables = [
        name
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    ]
    for table in tables:
        columns = {row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')}
        for column in columns & {"pair_id"} | ({"id"} if table == "pair" else set()):
            connection.execute(
                f'UPDATE "{table}" SET {column} = ? WHERE {column} = ?', (former_id(spec), spec.id)
            )
    connection.commit()
    connection.close()


# ------------------------------------------------------------------------------- what is remembered

LATER = 10 * 10**9


class Counting(FileHashes):
    """Counts the files that are read."""

    reads = 0

    def _digest(self, file: Path) -> str:
        self.reads += 1
        return super()._digest(file)


def hashes(cache: Path | None, later_ns: int = LATER) -> Counting:
    return Counting(cache, large_bytes=1, clock=lambda: time.time_ns() + later_ns)


def test_a_large_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x" * 1000)
    first, second = (
        hashes(tmp_path / "cache" / "hashes.json"),
        hashes(tmp_path / "cache" / "hashes.json"),
    )
    assert first.of(file) == first.of(file) == second.of(file)
    assert (first.reads, second.reads) == (1, 0)
    assert [f.name for f in (tmp_path / "cache").iterdir()] == ["hashes.json"]


def test_a_change_that_keeps_size_and_modification_time_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x" * 1000)
    known = hashes(tmp_path / "hashes.json")
    before, stamp = known.of(file), file.stat()
    file.write_bytes(b"y" * 1000)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert known.of(file) != before


def test_a_file_modified_just_now_is_not_trusted(tmp_path: Path) -> None:
    """A second change within the file system's resolution would leave the same stamp."""
    file = tmp_path / "weights"
    file.write_bytes(b"x" * 1000)
    now = hashes(tmp_path / "hashes.json", 0)
    assert now.of(file) == now.of(file)
    assert now.reads == 2
    assert not (tmp_path / "hashes.json").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"files": 3}',
        '{"files": {"PATH": [1, 2]}}',
        '{"files": {"PATH": "x"}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_cache_is_no_cache(tmp_path: Path, text: str) -> None:
    file, cache = tmp_path / "weights", tmp_path / "hashes.json"
    file.write_bytes(b"x" * 1000)
    cache.write_text(text.replace("PATH", str(file)))
    known = hashes(cache)
    digest = known.of(file)
    assert digest == hashes(None).of(file)
    assert known.reads == 1
    assert hashes(cache).of(file) == digest


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    known = hashes(tmp_path / "file" / "hashes.json")
    assert known.of(tmp_path / "file") == hashes(None).of(tmp_path / "file")


def test_a_head_is_told_by_its_tensors_whatever_the_file_holds(tmp_path: Path) -> None:
    make = tmp_path / "head"
    make.mkdir()
    (make / "config.json").write_text('{"architectures": 5}')
    for header in (b"[" * 100_000, b"[{}]", b"3", b"\xff", b'{"a": 1'):
        (make / "model.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + b"\0" * 9
        )
        assert not is_head(str(make))
    (make / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little"))
    assert not is_head(str(make))


def test_the_tiny_pair_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    assert (
        read_pair(str(make_pair(tmp_path / "a"))).id == read_pair(str(make_pair(tmp_path / "b"))).id
    )


def test_words_without_models_are_those_of_the_loaded_pair(either_pair: LoadedPair) -> None:
    alone, loaded = load_words(either_pair.spec), either_pair
    assert (alone.eos_ids, alone.max_positions) == (loaded.eos_ids, loaded.max_positions)
    assert alone.encode("def add(a, b):") == loaded.encode("def add(a, b):")

"""What a pair's id is made of, and what is remembered of large files: other content is another
pair, always."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from doors import Door
from safetensors.torch import load_file, save_file

import spectune
import spectune.runtime.loading
from spectune.runtime import file_hashes
from spectune.runtime.file_hashes import FileHashes
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import is_head, read_pair
from spectune.runtime.words import load_words
from spectune.traces.errors import PairError


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
    flip(file, file.stat().st_size // 2)
    assert read_pair(str(folder)).id != before
    flip(file, file.stat().st_size // 2)
    assert read_pair(str(folder)).id == before


def add(file: Path, **values: Any) -> None:
    """Sets keys of a JSON file, there or not."""
    document = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(document | values, indent=7))


def test_all_that_decides_the_text_is_in_the_id(folder: Path) -> None:
    seen = {read_pair(str(folder)).id}
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ):
        add(folder / "target" / name, eos_token_id=7)
        assert read_pair(str(folder)).id not in seen, name
        seen.add(read_pair(str(folder)).id)


def test_shards_that_an_index_names_elsewhere_are_in_the_id(folder: Path) -> None:
    target = folder / "target"
    (target / "shards").mkdir()
    shard = shutil.move(target / "model.safetensors", target / "shards" / "one.safetensors")
    add(target / "model.safetensors.index.json", weight_map={"a": "shards/one.safetensors"})
    before = read_pair(str(folder)).id
    flip(shard, 30_000)
    assert read_pair(str(folder)).id != before


def test_place_notes_and_the_version_that_saved_it_are_not_in_the_id(
    folder: Path, tmp_path: Path
) -> None:
    before = read_pair(str(folder)).id
    add(folder / "target" / "config.json", transformers_version="0", _name_or_path="elsewhere")
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
    (folder / "near" / "model.safetensors").rename(folder / "near" / "own.weights")
    add(folder / "near" / "config.json", transformers_weights="own.weights")
    spec = read_pair(str(folder))
    for refuses in (spec.check, lambda: spec.id):
        with pytest.raises(PairError, match=r"near/config\.json names its weights itself"):
            refuses()


def test_weights_that_cannot_be_read_are_one_line(folder: Path) -> None:
    weights = folder / "near" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(weights)
    with pytest.raises(PairError, match=r"model\.safetensors: cannot be read"):
        _ = read_pair(str(folder)).id


# ------------------------------------------------------------------------------- what is remembered


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as large, and as one modified long ago."""
    monkeypatch.setattr(file_hashes, "LARGE_BYTES", 1)
    monkeypatch.setattr(file_hashes, "RACY_NS", -(10**10))
    file = tmp_path / "weights"
    file.write_bytes(b"x" * 1000)
    return file


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Called for every file that is read."""
    counted = MagicMock(side_effect=hashlib.file_digest)
    monkeypatch.setattr(hashlib, "file_digest", counted)
    return counted


def test_a_large_file_is_read_once(weights: Path, tmp_path: Path, reads: MagicMock) -> None:
    cache = tmp_path / "cache" / "hashes.json"
    first, second = FileHashes(cache), FileHashes(cache)
    assert first.of(weights) == first.of(weights) == second.of(weights)
    assert reads.call_count == 1
    assert [f.name for f in cache.parent.iterdir()] == ["hashes.json"]


def test_a_change_that_keeps_size_and_modification_time_is_seen(
    weights: Path, tmp_path: Path
) -> None:
    known = FileHashes(tmp_path / "hashes.json")
    before, stamp = known.of(weights), weights.stat()
    weights.write_bytes(b"y" * 1000)
    os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert known.of(weights) != before


def test_a_file_modified_just_now_is_not_trusted(
    weights: Path, tmp_path: Path, reads: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within the file system's resolution would leave the same stamp."""
    monkeypatch.setattr(file_hashes, "RACY_NS", 2 * 10**9)
    now = FileHashes(tmp_path / "hashes.json")
    assert now.of(weights) == now.of(weights)
    assert reads.call_count == 2
    assert not (tmp_path / "hashes.json").exists()


@pytest.mark.parametrize("text", ["{", '{"files": {"PATH": [1, 2]}}', "[" * 100_000])
def test_a_damaged_cache_is_no_cache(
    weights: Path, tmp_path: Path, reads: MagicMock, text: str
) -> None:
    cache = tmp_path / "hashes.json"
    cache.write_text(text.replace("PATH", str(weights)))
    digest = FileHashes(cache).of(weights)
    assert digest == FileHashes(cache).of(weights)
    assert reads.call_count == 1
    assert digest == FileHashes(None).of(weights)


def test_a_cache_that_cannot_be_written_changes_nothing(weights: Path) -> None:
    assert FileHashes(weights / "hashes.json").of(weights) == FileHashes(None).of(weights)


def test_a_head_is_told_by_its_tensors_whatever_the_file_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": 5}')
    for size, header in ((100_000, b"[" * 100_000), (4, b"[{}]"), (1, b"\xff"), (1 << 62, b"")):
        (tmp_path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + header)
        assert not is_head(str(tmp_path))


def test_words_without_models_are_those_of_the_loaded_pair(either_pair: LoadedPair) -> None:
    alone, loaded = load_words(either_pair.spec), either_pair
    assert (alone.eos_ids, alone.positions) == (loaded.eos_ids, loaded.positions)
    assert alone.encode("def add(a, b):") == loaded.encode("def add(a, b):")


HOST = """
import sys
import torch
from transformers.utils import logging

import spectune
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.schema import Request, Sampling

def switches():
    bars = logging.is_progress_bar_enabled()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    return torch.get_num_threads(), cudnn, logging.get_verbosity(), bars

torch.set_num_threads(2)
torch.backends.cuda.enable_cudnn_sdp(True)
logging.set_verbosity_info()
before = switches()
policy = {"draft": "near", "window": {"kind": "fixed", "gamma": 3}}
spectune.run(policy, pair=sys.argv[1], prompts=["def add"], db=sys.argv[2], max_new_tokens=8)
assert switches() == before, (switches(), before)
pair = load_pair(read_pair(sys.argv[1]))
decoder = Decoder(pair, StaticSource(prepare_for(pair, parse_policy(policy))))
decoder.decode(decoder.request(Request("r", "", ("",)), [5, 6, 7], Sampling(), 8))
assert switches() == before, (switches(), before)
print(pair.threads)
"""


@pytest.mark.parametrize(("given", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "2"}, "2")])
def test_the_process_that_decodes_keeps_its_switches(
    tiny_pair: Path, tmp_path: Path, given: dict[str, str], threads: str
) -> None:
    """Threads of torch, cuDNN's attention, what transformers logs: a small pair is decoded by one
    thread where nobody says otherwise, and then they are as they were."""
    rest = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", HOST, str(tiny_pair), str(tmp_path / "runs.db")],
        env=rest | given,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [threads]


def test_a_hub_name_needs_no_organisation(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was fetched before, offline: by its name it is the folder's. What looks like a
    path stays one."""
    cached = tmp_path / "models--tiny"
    shutil.copytree(tiny_pair.parent / "target", cached / "snapshots" / "0")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0")
    monkeypatch.chdir(tmp_path)
    generate = ("generate", "def", "--max-new-tokens", "8", "--target")
    # The folder of what was fetched is read once a process.
    outside = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    cli = Path(spectune.__file__).with_name("cli.py")
    by_name = subprocess.run(
        [sys.executable, str(cli), *generate, "tiny", "--json"],
        env=os.environ | outside,
        capture_output=True,
        text=True,
        check=False,
    )
    assert by_name.returncode == 0, by_name.stderr
    by_path = Door(None).json(*generate, tiny_pair.parent / "target")
    assert json.loads(by_name.stdout)["token_ids"] == by_path["token_ids"]
    for path in ("./tiny", "tiny/one/more", "~/tiny"):
        assert "no model at" in Door(None).error(*generate, path)


def test_what_a_generation_config_asks_beside_sampling_is_named_and_ignored(
    folder: Path, tmp_path: Path
) -> None:
    """Once a command; the text is that of the pair without it. What is an option here, or asks for
    nothing, is not named."""
    (tmp_path / "w.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    door = Door(str(tmp_path / "runs.db"))
    run = ("run", "--pair", folder, "--workload", tmp_path / "w.jsonl", "--max-new-tokens", 12)
    file = folder / "target" / "generation_config.json"
    add(file, temperature=0.6, top_k=20, min_p=None, num_beams=1, no_repeat_ngram_size=0)
    plain = door.call(*run, "--outputs", tmp_path / "plain.jsonl")
    assert plain.exit_code == 0
    assert "ignored" not in plain.stderr
    add(file, repetition_penalty=1.9, no_repeat_ngram_size=2)
    asking = door.call(*run, "--outputs", tmp_path / "asking.jsonl")
    line = "ignored of the target's generation_config: no_repeat_ngram_size 2, repetition_penalty"
    assert asking.stderr.count(f"{line} 1.9\n") == 1
    assert (tmp_path / "asking.jsonl").read_text() == (tmp_path / "plain.jsonl").read_text()

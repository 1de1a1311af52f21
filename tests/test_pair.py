"""What a pair's id is made of: other content is another pair."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import Door
from pairs import tiny_model
from safetensors.torch import load_file, save_file

from spectune.engines.server_settings import engine_settings
from spectune.runtime.checkpoints import is_head
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.text_codec import load_codec
from spectune.traces.errors import PairError, PolicyError

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy of the tiny pair, to be changed."""
    return Path(shutil.copytree(tiny_pair.parent, tmp_path / "pair"))


def test_a_pair_names_drafts_that_vllm_alone_has(folder: Path) -> None:
    """They are no part of what its models are."""
    file = folder / "pair.json"
    document = json.loads(file.read_text())
    before = read_pair(str(file))
    file.write_text(json.dumps({**document, "methods": ["mtp"]}))
    pair = read_pair(str(file))
    assert pair.draft_names == (*before.drafts, "mtp", "ngram")
    assert pair.id == before.id
    policy = parse_policy({"draft": "mtp", "window": {"kind": "fixed", "gamma": 2}})
    exported = engine_settings(policy, pair, "vllm")
    assert exported == {"method": "mtp", "num_speculative_tokens": 2}
    with pytest.raises(PolicyError, match="mtp is a method of vLLM's"):
        engine_settings(policy, pair, "sglang")
    file.write_text(json.dumps({**document, "methods": ["none"]}))
    with pytest.raises(PairError, match="the draft name 'none' is reserved"):
        read_pair(str(file))


# ------------------------------------------------------------------------------------------- the id


LAYER = "model.layers.1.mlp.up_proj.weight"


def retrained(tensors: Tensors) -> None:
    """Its last rows alone, as an embedding whose first tokens no text of a training had."""
    rows = tensors["model.embed_tokens.weight"][150:]
    rows += 1e-3 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))


def merged(tensors: Tensors) -> None:
    """With an adapter of rank 1."""
    rows, columns = tensors[LAYER].shape
    tensors[LAYER] += 1e-3 * torch.linspace(-1, 1, rows)[:, None] * torch.ones(columns)


def negated(tensors: Tensors) -> None:
    tensors[LAYER].neg_()


def swapped(tensors: Tensors) -> None:
    other = LAYER.replace("up", "gate")
    tensors[LAYER], tensors[other] = tensors[other], tensors[LAYER]


def halved(tensors: Tensors) -> None:
    tensors[LAYER] = tensors[LAYER].bfloat16()


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("model", ["target", "near"])
@pytest.mark.parametrize("change", [retrained, merged, negated, swapped, halved])
def test_other_weights_make_another_pair(
    folder: Path, model: str, change: Callable[[Tensors], None], pickled: bool
) -> None:
    file = folder / model / "model.safetensors"
    tensors = load_file(file)

    def save() -> str:
        if pickled:
            file.unlink(missing_ok=True)
            torch.save(tensors, file.with_name("pytorch_model.bin"))
        else:
            save_file(tensors, file, metadata={"format": "pt"})
        return read_pair(str(folder)).id

    before = save()
    assert save() == before
    change(tensors)
    assert save() != before


@pytest.mark.parametrize("other", ["pytorch_model.bin.index.json", "pytorch_model.bin"])
def test_weights_that_are_loaded_are_in_the_id_whatever_lies_beside_them(
    folder: Path, other: str
) -> None:
    """Where a checkpoint holds several kinds of weights, transformers' order decides."""
    file = folder / "target" / "model.safetensors"
    shards = {"weight_map": {LAYER: "pytorch_model-00001-of-00001.bin"}}
    file.with_name(other).write_text(json.dumps(shards))
    before = read_pair(str(folder)).id
    tensors = load_file(file)
    retrained(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    assert read_pair(str(folder)).id != before
    sharded = file.with_name("model-00001-of-00001.safetensors")
    file.rename(sharded)
    shards = {"weight_map": dict.fromkeys(tensors, sharded.name)}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(shards))
    before = read_pair(str(folder)).id
    negated(tensors)
    save_file(tensors, sharded, metadata={"format": "pt"})
    assert read_pair(str(folder)).id != before


def test_the_identity_of_140_gb_reads_a_few_kib_of_each_tensor(folder: Path) -> None:
    """A target of the shapes of 70B, whose file is one hole."""
    header: dict[str, Any] = {}
    end, (wide, narrow) = 0, (8192 * 28672, 8192 * 1024)
    for layer in range(80):
        for name, size in (
            *(("q_proj", 8192 * 8192), ("k_proj", narrow), ("v_proj", narrow)),
            *(("o_proj", 8192 * 8192), ("gate_proj", wide), ("up_proj", wide), ("down_proj", wide)),
            *(("input_layernorm", 8192), ("post_attention_layernorm", 8192)),
        ):
            offsets = [end, end := end + 2 * size]
            about = {"dtype": "BF16", "shape": [size], "data_offsets": offsets}
            header[f"model.layers.{layer}.{name}.weight"] = about
    text = json.dumps(header).encode()
    file = folder / "target" / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
    assert file.stat().st_size > 130e9
    read = bytes_read()
    before = read_pair(str(folder)).id
    assert 1e6 < bytes_read() - read < 50e6
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"x")
    assert read_pair(str(folder)).id != before


def bytes_read() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


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
    save_file({name: -t for name, t in load_file(shard).items()}, shard)
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
    one = read_pair(
        None, str(folder / "target"), {"a": str(folder / "near"), "b": str(folder / "far")}
    )
    other = read_pair(
        None, str(folder / "target"), {"b": str(folder / "near"), "a": str(folder / "far")}
    )
    assert one.id != other.id


def test_a_loaded_pair_is_what_was_loaded(folder: Path) -> None:
    pair = load_pair(read_pair(str(folder)), device="cpu")
    loaded = pair.id
    assert loaded == read_pair(str(folder)).id
    tiny_model("llama", 300, seed=5).save_pretrained(folder / "near")
    assert read_pair(str(folder)).id != loaded
    assert pair.id == loaded


def test_what_is_no_weight_file_is_no_head_and_one_line(folder: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    for junk in (b"", b"{", b"\xff" * 40, (4).to_bytes(8, "little") + b"[{}]", pointer):
        (folder / "near" / "model.safetensors").write_bytes(junk)
        assert not is_head(str(folder / "near"))
        with pytest.raises(PairError, match=r"model\.safetensors cannot be read: ") as told:
            _ = read_pair(str(folder)).id
        assert "\n" not in str(told.value)
    assert "was it cloned without Git LFS?" in str(told.value)


def test_a_codec_without_models_is_that_of_the_loaded_pair(either_pair: LoadedPair) -> None:
    alone, loaded = load_codec(either_pair.spec), either_pair
    assert (alone.eos_ids, alone.positions) == (loaded.eos_ids, loaded.positions)
    assert alone.encode("def add(a, b):") == loaded.encode("def add(a, b):")


def test_a_small_pair_is_decoded_by_one_thread_where_nobody_says_otherwise(
    tiny_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert load_pair(read_pair(str(tiny_pair)), device="cpu").threads == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert load_pair(read_pair(str(tiny_pair)), device="cpu").threads == 2


@pytest.mark.parametrize("values", [{"n_positions": "abc"}, {"text_config": [1]}])
def test_a_length_that_is_no_number_is_told_in_one_line(
    folder: Path, values: dict[str, Any]
) -> None:
    add(folder / "target" / "config.json", **values)
    with pytest.raises(PairError, match=r"^config\.json of .*target: "):
        load_codec(read_pair(str(folder)))


# -------------------------------------------------------------------------------------- hub names

GENERATE = ("generate", "def", "--max-new-tokens", "8")


def hub_id(name: str) -> str:
    return read_pair(None, name).id


def test_a_hub_name_needs_no_organisation_and_its_revision_is_in_the_id(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was fetched before, offline: by its name it is the folder's. What looks like a
    path stays one."""
    target = tiny_pair.parent / "target"
    for revision in "01":
        shutil.copytree(target, tmp_path / "models--tiny" / "snapshots" / revision)
    newest = tmp_path / "models--tiny" / "refs" / "main"
    newest.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = [newest.write_text(revision) and hub_id("tiny") for revision in "010"]
    assert found[0] == found[2] != found[1]
    door = Door(None)
    by_path = door.json(*GENERATE, "--target", target)
    assert door.json(*GENERATE, "--target", "tiny")["token_ids"] == by_path["token_ids"]
    for path in ("./tiny", "tiny/one/more", "~/tiny"):
        assert "no model at" in door.error(*GENERATE, "--target", path)


def test_what_a_generation_config_asks_beside_sampling_is_named_and_ignored(
    folder: Path, tmp_path: Path
) -> None:
    """Once a command; the text is that of the pair without it. What is an option here, or no
    setting, is not named."""
    (tmp_path / "w.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    door = Door(str(tmp_path / "runs.db"))
    run = ("run", "--pair", folder, "--workload", tmp_path / "w.jsonl", "--max-new-tokens", 12)
    file = folder / "target" / "generation_config.json"
    add(file, temperature=0.6, top_k=20, min_p=None, stop_strings=[], use_cache=False)
    add(file, _commit_hash="0a", transformers_version="5.0")
    plain = door.call(*run, "--outputs", tmp_path / "plain.jsonl")
    assert plain.exit_code == 0
    assert "ignored" not in plain.stderr
    add(file, repetition_penalty=1.9, no_repeat_ngram_size=1, forced_bos_token_id=0)
    asking = door.call(*run, "--outputs", tmp_path / "asking.jsonl")
    line = "ignored of the target's generation_config: forced_bos_token_id 0, no_repeat_ngram_size"
    assert asking.stderr.count(f"{line} 1, repetition_penalty 1.9\n") == 1
    assert (tmp_path / "asking.jsonl").read_text() == (tmp_path / "plain.jsonl").read_text()

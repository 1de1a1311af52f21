"""Checkpoints as GGUF files: kept by content, read back, and refused by name where they cannot
be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from spectune.engines.gguf import VERSION, Weights, gguf_file
from spectune.runtime.pair import read_pair
from spectune.traces.errors import EngineError


@pytest.fixture
def target(tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of its own, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(read_pair(str(tiny_pair)).target, tmp_path / "target"))


def test_a_checkpoint_is_converted_once_for_its_content(target: Path) -> None:
    made = gguf_file(str(target))
    assert made.name.endswith(f"-float32-{VERSION}.gguf")
    moment = made.stat().st_mtime_ns
    shutil.move(target, target.with_name("elsewhere"))
    assert gguf_file(str(target.with_name("elsewhere"))) == made
    assert made.stat().st_mtime_ns == moment
    assert [f.name for f in made.parent.iterdir()] == [made.name]


@pytest.mark.parametrize(("weights", "kind"), [("float32", np.float32), ("float16", np.float16)])
def test_weights_are_the_checkpoints(target: Path, weights: Weights, kind: type) -> None:
    read = {t.name: t.data for t in gguf.GGUFReader(gguf_file(str(target), weights)).tensors}
    kept = load_file(target / "model.safetensors")
    assert len(read) == len(kept)
    assert (read["token_embd.weight"] == kept["model.embed_tokens.weight"].astype(kind)).all()
    assert (read["output_norm.weight"] == kept["model.norm.weight"]).all()
    ours = kept["model.layers.0.self_attn.q_proj.weight"].astype(kind)
    theirs, size = read["blk.0.attn_q.weight"], 12
    # Rotated halves side by side.
    assert (theirs[0:4] == ours[[0, size // 2, 1, size // 2 + 1]]).all()


def test_tokens_without_an_embedding_are_left_out(target: Path) -> None:
    file = target / "tokenizer.json"
    found = json.loads(file.read_text())
    size = json.loads((target / "config.json").read_text())["vocab_size"]
    found.setdefault("added_tokens", []).append({"id": size, "content": "<pad>"})
    file.write_text(json.dumps(found))
    read = gguf.GGUFReader(gguf_file(str(target)))
    assert len(read.fields["tokenizer.ggml.tokens"].data) == size


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "its architecture is GPT2LMHeadModel, and known"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "its rotary positions are scaled"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"attention_bias": True}, "its projections have biases"),
    ],
)
def test_what_cannot_be_converted_is_named_and_leaves_nothing(
    target: Path, change: dict[str, object], said: str
) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(EngineError, match=f"{target}: cannot be converted to GGUF: {said}"):
        gguf_file(str(target))
    assert not list(target.parent.glob("cache/spectune/gguf/*"))


def test_heads_and_hub_names_are_refused_with_what_to_do(target: Path) -> None:
    with pytest.raises(EngineError, match="an EAGLE head has no form that this engine loads"):
        gguf_file(dict(read_pair("demo").drafts)["head"])
    with pytest.raises(EngineError, match="fetch it"):
        gguf_file("someone/some-model")

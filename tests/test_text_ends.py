"""Where a text ends when two files name other tokens for it, or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doors import Door, lines
from transformers import AutoTokenizer

from spectune.runtime.pair import read_pair
from spectune.runtime.text_codec import load_codec


def written(folder: Path) -> tuple[list[int], list[str]]:
    """What the target of a pair writes, 24 tokens at most, and what is said."""
    work, out, db = (folder / name for name in ("w.jsonl", "out.jsonl", "runs.db"))
    work.write_text('{"prompt": "def"}\n')
    run = ("run", "--policy", "autoregressive", "--pair", folder, "--workload", work)
    done = Door(str(db)).call(*run, "--max-new-tokens", 24, "--no-store", "--outputs", out)
    assert done.exit_code == 0, done.output
    (row,) = lines(out)
    return row["token_ids"], done.stderr.splitlines()


@pytest.fixture
def folder(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy of the tiny pair, to be changed."""
    return Path(shutil.copytree(tiny_pair.parent, tmp_path / "pair"))


@pytest.fixture(scope="module")
def text(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What the target writes where nothing ends it before."""
    ids, _ = written(Path(shutil.copytree(tiny_pair.parent, tmp_path_factory.mktemp("a") / "b")))
    assert len(ids) == 24
    return ids


BOTH = "the target's texts end at {} ({!r}) by its {}, and at {} ({!r}) by its {}: each of these"
NO_TOKEN = "ignored: eos_token_id {} of the target's {} is no token"
FILE = "generation_config.json"
Eos = Callable[[int, int], Any]


@pytest.mark.parametrize(
    ("file", "generation", "tokenizer", "note"),
    [
        (FILE, lambda near, far: far, 0, BOTH),
        (FILE, lambda near, far: near, 1, BOTH),
        ("config.json", lambda near, far: far, 0, BOTH),
        (FILE, lambda near, far: [near, far], 1, ""),
        (FILE, lambda near, far: -1, 0, NO_TOKEN.format(-1, FILE)),
        (FILE, lambda near, far: [near, 5000], 0, NO_TOKEN.format(5000, FILE)),
    ],
    ids=["the tokenizer's", "the other's", "by config", "among several", "minus one", "beyond"],
)
def test_a_text_ends_at_whatever_names_its_end(
    folder: Path, text: list[int], file: str, generation: Eos, tokenizer: int, note: str
) -> None:
    """The generation_config's (else the config's) and the tokenizer's: at the nearer. Where the
    first lacks the second's, and for what is no token, one line is said."""
    first = [n for n, token in enumerate(text) if token not in text[:n]]
    at = [n for n in first if n > 5][:2]
    near, far = (text[n] for n in at)
    target, own = folder / "target", (near, far)[tokenizer]
    words = AutoTokenizer.from_pretrained(target)
    said = generation(near, far)
    if file != FILE:
        (target / FILE).unlink()
    _set(target / file, eos_token_id=said)
    _set(target / "tokenizer_config.json", eos_token=words.convert_ids_to_tokens(own))
    ids, notes = written(folder)
    assert ids == text[: at[0] + 1]
    notes = [x for x in notes if "eos_token_id" in x or "texts end" in x]
    if note == BOTH:
        names = (words.convert_ids_to_tokens(n) for n in (said, own))
        note = BOTH.format(said, next(names), file, own, next(names), "tokenizer") + " ends a text"
    assert notes == ([note] if note else [])
    assert load_codec(read_pair(str(folder))).eos_ids <= {near, far}


def test_a_text_that_nothing_ends_is_told(folder: Path, text: list[int]) -> None:
    target = folder / "target"
    for file in ("config.json", FILE):
        _set(target / file, eos_token_id=None)
    _set(target / "tokenizer_config.json", eos_token=None)
    ids, notes = written(folder)
    assert ids == text
    line = "the target says no eos_token_id: its texts end at max_new_tokens or a stop alone"
    assert notes.count(line) == 1


def _set(file: Path, **values: Any) -> None:
    """Sets keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))

"""What makes a public model a pair, up to what is fetched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemma import target, texts
from spectune.runtime.pair import read_pair


def test_prompts_are_of_all_categories_and_some_are_long() -> None:
    rows = list(texts.prompts())
    assert len({row["id"] for row in rows}) == len(rows)
    assert {row["category"] for row in rows} == {"code", "prose", "math", "module"}
    for row in rows:
        long = row["category"] == "module"
        assert (texts.LENGTH * 3 / 4 < len(row["prompt"]) <= texts.LENGTH) == long
        assert row["prompt"].endswith("\n") or not long


def test_a_pair_is_made_once_and_named_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What breaks off leaves no pair file and nothing of what was fetched."""
    out, calls = tmp_path / "real", list[str]()

    def install(packages: Path) -> None:
        packages.mkdir()
        calls.append("install")

    def dequantize(made: Path) -> None:
        if len(calls) == 1:
            raise KeyboardInterrupt
        made.mkdir()
        (made / "config.json").write_text("{}")

    monkeypatch.setattr(target, "install", install)
    monkeypatch.setattr(target, "dequantize", dequantize)
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(KeyboardInterrupt):
        target.make_pair(out)
    assert not list(out.iterdir())
    target.make_pair(out)
    assert sorted(file.name for file in out.iterdir()) == ["pair.json", "target"]
    assert "Gemma Terms of Use" in capsys.readouterr().out
    before = len(calls)
    target.make_pair(out)
    assert len(calls) == before
    spec = read_pair(str(out / "pair.json"))
    assert (Path(spec.target), spec.drafts) == (out / "target", {})
    assert json.loads((out / "pair.json").read_text())["name"] == "gemma-3-270m"

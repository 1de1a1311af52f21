"""What makes a public model a pair, up to what is fetched, and trains drafts for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pairs import chain, tiny_model, tokenizer

from gemma import own_texts, target, texts, train
from spectune.demo.corpus import is_held_out
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.traces.schema import Request, Sampling


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


def test_prompts_of_own_texts_keep_what_is_held_out_apart(tmp_path: Path) -> None:
    gsm8k, packages = tmp_path / "train.jsonl", tmp_path / "site"
    gsm8k.write_text("".join(json.dumps({"question": f"{n} and 1?", "answer": "#"}) + "\n"
                             for n in range(200)))  # fmt: skip
    for n in range(40):
        (packages / f"p{n}").mkdir(parents=True)
        (packages / f"p{n}" / "m.py").write_text(f"# of p{n}\n")
    asked = list(own_texts.prompts(gsm8k, (packages,)))
    held = [one.held_out for one in asked]
    assert 20 * sum(held) == 2 * len(held)
    assert len({one.key for one in asked}) == len(asked)
    for one in asked:
        name = one.prompt.removeprefix("# of ").strip()
        if one.category == "math":
            question = one.prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
            name = f"gsm8k#{question}"
        assert is_held_out(name) == one.held_out


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a tiny pair of Gemma's kind, beside a file of texts of its own."""
    folder = tmp_path_factory.mktemp("gemma3")
    words = tokenizer()
    words.save_pretrained(folder / "target")
    tiny_model("gemma3", len(words), layers=5, seed=3).save_pretrained(folder / "target")
    file = folder / "pair.json"
    file.write_text(json.dumps({"name": "tiny", "target": "target", "drafts": {}}))
    pair = load_pair(read_pair(str(file)), device="cpu", threads=1)
    asked = [own_texts.Asked(f"{n}", "code", n < 4, f"def f{n}(x):\n") for n in range(24)]
    texts = file.with_name("own_texts.jsonl")
    half = own_texts.write(pair, texts, iter(asked[:12]), 24, float("inf"))
    assert own_texts.write(pair, texts, iter(asked[:12]), 24, float("inf")) == 0
    more = own_texts.write(pair, texts, iter(asked), 24, float("inf"))
    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    assert sorted(int(row["key"]) for row in rows) == list(range(24))
    assert sum(len(row["output"]) for row in rows) == half + more
    return file


@pytest.mark.parametrize("kind", ["head", "small"])
def test_a_draft_is_trained_in_pieces_and_published(written: Path, kind: str) -> None:
    """A piece is a step at least; the draft changes no text, and some of its tokens are kept."""
    more = ["--pair", str(written), "--vocab", "100"]
    more += ["--texts", str(written.with_name("own_texts.jsonl"))]
    train.main([kind, *more, "--minutes", "1e9", "--piece", "0"])
    assert kind not in read_pair(str(written)).drafts
    train.main([kind, *more, "--minutes", "0"])
    pair = load_pair(read_pair(str(written)), device="cpu", threads=1, dtype="float64")
    assert pair.models[kind].output.rows == (100 if kind == "head" else pair.target.vocab_size)
    policies = AUTOREGRESSIVE, parse_policy(chain(kind, 3))
    texts, accepted = [], 0
    for policy in policies:
        decoder = Decoder(pair, StaticSource(prepare_for(pair, policy)))
        for n in range(6):
            ids = pair.encode(f"def g{n}(x):\n")
            done = decoder.decode(decoder.request(Request(f"{n}", ""), ids, Sampling(), 24))
            texts.append(done.trajectory.output_ids.tolist())
            accepted += sum(step.accepted for step in done.steps)
    assert texts[:6] == texts[6:]
    assert accepted > 0

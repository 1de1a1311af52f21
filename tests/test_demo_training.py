"""Training a pair: by the clock, into parts that hold its weights exactly, and from these into a
pair that decodes; text of packages, of which whole ones are held out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from spectune.cli import main
from spectune.demo.corpus import code_documents
from train_demo import train
from train_demo.batches import pack, read_corpus
from train_demo.corpus import END_OF_TEXT, package_documents
from train_demo.parts import load_parts, round_weights, save_parts

HEAD = '{"draft": "head", "window": {"kind": "fixed", "gamma": 3}}'


def test_a_pair_is_trained_by_the_clock_and_published_from_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = code_documents(True)
    pack(tmp_path, modules[2:], modules[:2], 512)
    (tmp_path / "workload.jsonl").write_text('{"turns": ["def area(width, height):"]}\n')
    windows, _ = read_corpus(tmp_path, 1)
    assert windows.batch(3, 4, 65).shape == (4, 65)
    assert torch.equal(windows.batch(3, 4, 65), windows.batch(3, 4, 65))

    parts, out = tmp_path / "parts", tmp_path / "out"
    command = ["--shape", "tiny", "--threads", "1", "--device", "cpu", "--work", str(tmp_path)]
    command += ["--parts", str(parts)]
    train.main([*command, "--until", "drafts", "--seconds", "4"])
    trained = {path.name: path.read_bytes() for path in parts.iterdir()}
    assert set(trained) == {"target-1-of-1.safetensors", "drafts-1-of-1.safetensors"}

    # Elsewhere, what has been trained is read, and only the head is left to do.
    (tmp_path / "own_text.pt").unlink()
    train.main([*command, "--out", str(out), "--seconds", "4"])
    assert trained.items() <= {path.name: path.read_bytes() for path in parts.iterdir()}.items()
    stored = load_file(parts / "target-1-of-1.safetensors")
    published = load_file(out / "target" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    exponents = stored[f"target.{name}.exponent"].double()[:, None]
    weights = stored[f"target.{name}"].double() * 2**exponents
    assert published[name].dtype == torch.float16
    assert torch.equal(published[name].double(), weights)
    assert weights.abs().max() > 0

    db = ["--db", str(tmp_path / "run.db")]
    words = [
        *db,
        "run",
        "--pair",
        str(out / "pair.json"),
        "--max-new-tokens",
        "8",
        "--policy",
        HEAD,
    ]
    result = CliRunner().invoke(main, [*words, "--workload", str(out / "workload.jsonl")])
    assert result.exit_code == 0, result.output

    # Weights of another shape, and parts of which a file is missing, are refused in a line.
    (parts / "head-1-of-1.safetensors").rename(parts / "head-1-of-2.safetensors")
    for shape, reason in (("tiny", "1 of the 2 files"), ("demo", "another shape")):
        with pytest.raises(SystemExit) as refusal:
            train.main([*command, "--shape", shape, "--out", str(out)])
        assert refusal.value.code == 2
        assert reason in capsys.readouterr().err


def test_rounded_weights_are_stored_and_read_as_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 4096), torch.nn.LayerNorm(48))
    before = [weight.detach().clone() for weight in model.parameters()]
    round_weights(model)
    after = [weight.detach().clone() for weight in model.parameters()]
    assert (before[0] - after[0]).abs().amax() <= before[0].abs().amax() / 127
    save_parts(tmp_path, "target", {"target": model}, {"steps": 7})
    for weight in model.parameters():
        torch.nn.init.ones_(weight)
    assert load_parts(tmp_path, "target", {"target": model}) == {"steps": 7}
    for weight, rounded in zip(model.parameters(), after, strict=True):
        assert torch.equal(weight, rounded)
        assert torch.equal(weight, weight.half().float())


def test_whole_packages_are_held_out_with_what_others_copied_of_them(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    texts = {
        first / "anyio" / "core.py": "held_out = 1\n",  # of those that the rule holds out
        first / "attrs" / "make.py": "learned = 1\n",
        first / "attrs" / "copied.py": "held_out = 1\n",
        first / "attrs" / "again.py": "learned = 1\n",
        first / "attrs" / "marked.py": f"mark = '{END_OF_TEXT}'\n",
        first / "attrs" / "_vendor" / "anyio.py": "held_out = 0\n",
        second / "attrs" / "make.py": "learned = 2\n",
        second / "rich" / "text.py": "learned = 3\n",
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    learned, held_out = (
        [d.text for d in package_documents((first, second), side)] for side in (False, True)
    )
    assert held_out == ["held_out = 1\n"]
    assert sorted(learned) == ["learned = 1\n", "learned = 3\n"]

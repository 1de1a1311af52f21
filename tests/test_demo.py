"""The demo pair and its prompts: balanced, deterministic, held out, small, loadable, and worth
speculating with."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spectune.demo.corpus import code_documents
from spectune.demo.prompts import demo_workload

FOLDER = Path(__file__).resolve().parent.parent / "demo" / "pair"
MODELS = ("target", "small", "medium")
AWKWARD = (
    "def f(x):\n\treturn  x\r\n\n\n    # caf\u00e9 \u2028 \U0001f600 \u4f60\u597d\n",
    "  leading,   inner and trailing spaces   ",
    "3.14159 1000000 \x00\x7f \ud7ff don't we'll",
    "",
)


def test_workload_is_balanced_in_every_prefix() -> None:
    workload = demo_workload()
    counts = Counter(prompt["category"] for prompt in workload)
    assert set(counts) == {"code", "prose", "math"}
    assert min(counts.values()) >= 90
    assert [prompt["category"] for prompt in workload[:6]] == ["code", "prose", "math"] * 2
    for limit in range(1, len(workload)):
        share = Counter(prompt["category"] for prompt in workload[:limit])
        assert max(share.values()) - min(share[category] for category in counts) <= 1


def test_what_is_left_out_of_the_standard_library_is_not_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside it lie the packages of a machine, which are far more files: walking them, twice, took
    `schedule add` seconds."""
    entered: list[str] = []
    walk = os.walk

    def noted(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in walk(root):
            entered.append(Path(found[0]).name)
            yield found

    monkeypatch.setattr(os, "walk", noted)
    assert code_documents.__wrapped__(True) == code_documents(True)
    assert "json" in entered
    assert not {"site-packages", "test", "__pycache__"} & set(entered)


def test_prompts_do_not_stand_in_the_training_text() -> None:
    # With white space made one blank, a docstring is found within its module's source too; as
    # bytes, found fast.

    def joined(text: str) -> bytes:
        return b" ".join(text.encode().split())

    training = b" ".join(joined(document.text) for document in code_documents(False))
    assert not [p["id"] for p in demo_workload() if joined(p["turns"][0]) in training]


def test_tokenizers_are_one() -> None:
    texts = [(FOLDER / name / "tokenizer.json").read_text() for name in MODELS]
    assert len(set(texts)) == 1
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    assert len(tokenizer) == 4096
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.convert_ids_to_tokens(0) == "<|endoftext|>"


@pytest.mark.parametrize("text", AWKWARD)
def test_tokenizer_returns_any_text(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "small")
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert 0 not in ids


def test_drafts_agree_with_the_target_on_its_greedy_text() -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    load = AutoModelForCausalLM.from_pretrained
    models = {name: load(FOLDER / name, dtype=torch.float32).eval() for name in MODELS}
    hits = {"small": 0, "medium": 0}
    positions = 0
    with torch.inference_mode():
        for prompt in demo_workload()[:6]:
            inputs = tokenizer(prompt["turns"][0], return_tensors="pt")
            output = models["target"].generate(**inputs, max_new_tokens=32, do_sample=False)
            width = inputs["input_ids"].shape[1]
            positions += output.shape[1] - width
            for name in hits:
                choice = models[name](output).logits[:, width - 1 : -1].argmax(-1)
                hits[name] += int((choice == output[:, width:]).sum())
    assert hits["small"] / positions >= 0.4
    assert hits["medium"] > hits["small"]

"""The text that pairs are trained on: the demo's (:mod:`spectune.demo.corpus`), for larger pairs
the source of installed packages, and GSM8K's training split, given as a file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from spectune.demo.corpus import (
    Document,
    code_documents,
    is_held_out,
    modules_below,
    prose_documents,
    read_module,
)

END_OF_TEXT = "<|endoftext|>"

# The few largest packages, whose modules are much alike, would outweigh all others.
_MAX_PACKAGE_BYTES = 8_000_000


@cache
def package_documents(folders: tuple[Path, ...], held_out: bool, /) -> tuple[Document, ...]:
    """The modules of packages installed below ``folders`` (``site-packages``) on one side of the
    rule, whole packages on either; no text twice. A package is read from the first folder that has
    it; of a large one every second module, or every third, and so on."""
    documents: dict[str, Document] = {}
    packages: dict[str, list[Path]] = {}
    # A text may stand in several packages: it must not reach training by another name.
    elsewhere = set() if held_out else {d.text for d in package_documents(folders, True)}
    for root in folders:
        of_root: dict[str, list[Path]] = {}
        for module in modules_below(root):
            of_root.setdefault(module.parts[0], []).append(root / module)
        packages = of_root | packages
    for package, paths in packages.items():
        if is_held_out(package) != held_out:
            continue
        every = 1 + sum(path.stat().st_size for path in paths) // _MAX_PACKAGE_BYTES
        for file in paths[::every]:
            text = read_module(file)
            # The tokenizer would take the mark for the end of a document.
            if text and text.strip() and END_OF_TEXT not in text and text not in elsewhere:
                key = "/".join(file.parts[file.parts.index(package) :])
                documents.setdefault(text, Document("code", key, text))
    return tuple(documents.values())


def math_documents(gsm8k: Path) -> tuple[Document, ...]:
    """GSM8K's rows as "Question: ...\\nAnswer: ..."; the key is the question.

    `gsm8k` has one JSON object a line, with `question` and `answer`. The calculator marks
    (<<48/2=24>>) are taken out, so that the text reads as a person would write it.
    """
    documents = []
    # Not splitlines: a question may hold other line separators, such as U+2028.
    for line in gsm8k.read_text(encoding="utf-8").rstrip("\n").split("\n"):
        row = json.loads(line)
        question, answer = row["question"].strip(), row["answer"].strip()
        while "<<" in answer and ">>" in answer:
            before, _, rest = answer.partition("<<")
            answer = before + rest.partition(">>")[2]
        documents.append(
            Document("math", f"gsm8k#{question}", f"Question: {question}\nAnswer: {answer}")
        )
    return tuple(documents)


def corpus(gsm8k: Path, packages: tuple[Path, ...] = ()) -> tuple[list[Document], list[Document]]:
    """All documents, as (training, held out), each ordered by category: code, prose, math."""
    rows = math_documents(gsm8k)
    training, held_out = (
        [
            *code_documents(side),
            *package_documents(packages, side),
            *prose_documents(side),
            *(r for r in rows if is_held_out(r.key) == side),
        ]
        for side in (False, True)
    )
    return training, held_out

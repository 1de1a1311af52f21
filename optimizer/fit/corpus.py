"""Text to fit to beside recordings: files, or folders of files, of text or JSON lines, read in
pieces, so that a corpus of any size fits in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from spectune.runtime.loading import LoadedPair
from spectune.traces.errors import WorkloadError
from spectune.traces.text import shortened
from spectune.traces.workloads import PROMPTS

PIECE: Final = 1 << 12
"""Bytes of a piece, about: it ends with the line that reaches so far."""
LONGEST_LINE: Final = 1 << 22
KEYS: Final = ("text", "content", "value", *PROMPTS, "completion", "answer")
"""Keys of JSON lines that hold text."""


def corpus_tokens(
    pair: LoadedPair, names: Sequence[str], *, seed: int | None = None
) -> Iterator[tuple[list[int], float]]:
    """Token ids of each piece of a corpus, with the share of it that has been read by then; with a
    ``seed`` in random order.

    ``names``: text files in UTF-8, JSON lines (``.jsonl``: what stands under :data:`KEYS`), or
    folders, of which files that are no text and hidden ones are skipped. Raises WorkloadError for
    what cannot be read, has no tokens, or has some that the models do not know."""
    pieces = [piece for name in names for piece in _pieces(name)]
    order = np.arange(len(pieces))
    if seed is not None:
        np.random.default_rng(seed).shuffle(order)
    count = 0
    for number, place in enumerate(order.tolist(), 1):
        path, start = pieces[place]
        ids = pair.encode(_text(path, start))
        if not ids:
            continue
        count += len(ids)
        if (unknown := max(ids)) >= pair.target.vocab_size:
            raise WorkloadError(
                f"--corpus {shortened(str(path))}: the tokenizer makes token {unknown}, but the "
                f"models know {pair.target.vocab_size} tokens; give the tokenizer that they were "
                "trained with"
            )
        yield ids, number / len(order)
    if not count:
        raise WorkloadError(f"--corpus {' '.join(names)}: there are no tokens in it")


def _pieces(name: str) -> Iterator[tuple[Path, int]]:
    """The files of a corpus, each with the bytes at which its pieces begin."""
    root = Path(name)
    try:
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        for path in files:
            hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
            if root.is_dir() and (hidden or not path.is_file() or not _is_text(path)):
                continue
            if not _is_text(path):
                raise WorkloadError(
                    f"--corpus {shortened(str(path))}: not UTF-8 text; give text files, JSON lines "
                    "or folders of them"
                )
            yield from ((path, at) for at in range(0, path.stat().st_size, PIECE))
    except OSError as problem:
        raise WorkloadError(f"--corpus {shortened(name)}: {problem.strerror}") from None


def _is_text(path: Path) -> bool:
    """Whether a file begins as UTF-8 text does."""
    with path.open("rb") as file:
        head = file.read(1 << 12)
    try:
        head[: head.rfind(b"\n") + 1 or None].decode()
    except UnicodeDecodeError as problem:  # a character may be cut at the end
        return problem.start > len(head) - 4 and b"\0" not in head
    return b"\0" not in head


def _text(path: Path, start: int) -> str:
    """The lines of a file that begin within a piece."""
    lines, stop = list[bytes](), start + PIECE
    with path.open("rb") as file:
        if start:  # a line belongs to the piece that it begins in
            file.seek(start - 1)
            file.readline(LONGEST_LINE)
        while file.tell() < stop and (line := file.readline(LONGEST_LINE)):
            lines.append(line)
    text = b"".join(lines).decode(errors="replace").removeprefix("\ufeff")
    if path.suffix.lower() != ".jsonl":
        return text
    texts = "\n\n".join(t for line in text.split("\n") if line.strip() for t in _row(path, line))
    return texts.encode(errors="replace").decode()  # half of a surrogate pair is no text


def _row(path: Path, line: str) -> list[str]:
    """The text of a JSON line. Raises WorkloadError for one that is none or has none."""
    try:
        texts = list(_strings(json.loads(line)))
    except (ValueError, RecursionError):
        raise WorkloadError(f"--corpus {path}: not JSON: {shortened(line)}") from None
    if not texts:
        raise WorkloadError(f"--corpus {path}: no text under {', '.join(KEYS)}: {shortened(line)}")
    return texts


def _strings(value: Any) -> Iterator[str]:
    """The texts of a JSON value, in order of :data:`KEYS`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)
    elif isinstance(value, dict):
        for key in KEYS:
            yield from _strings(value.get(key))

"""The text that pairs are trained on, and the rule that says which of it is held out.

Three categories: `code` (the Python standard library's own source, for larger pairs that of
installed packages too), `prose` (the library's docstrings, and the topics of `help()`), `math`
(GSM8K's training split, given as a file). Whether a document is held out is a function of its key
alone, a package's of the package's name, so training and prompts agree on it on every machine and
every Python version. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

END_OF_TEXT = "<|endoftext|>"
CATEGORIES = ("code", "prose", "math")

# The salt was chosen, among a few, for a held-out set rich in both functions and docstrings on
# Python 3.11 and 3.12.
_SALT = "spectune-demo-1"
_HELD_OUT_PERCENT = 6

_EXCLUDED_DIRECTORIES = frozenset(
    {
        "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings",
        "site-packages", "dist-packages", "lib-dynload", "__pycache__", "__phello__", "_vendor",
        "_distutils",
    }
)  # fmt: skip
# Generated tables, and files that a distribution adds or fills with facts about one machine.
_EXCLUDED_FILES = frozenset(
    {"stringprep.py", "html/entities.py", "sitecustomize.py", "_aix_support.py", "this.py"}
)
_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "__hello__")
_TOPICS_FILE = "pydoc_data/topics.py"

# Shorter docstrings say little on their own, and the code documents hold them anyway.
_MIN_PROSE_CHARS = 120
_MAX_FILE_BYTES = 400_000
# The few largest packages, whose modules are much alike, would outweigh all others.
_MAX_PACKAGE_BYTES = 8_000_000


@dataclass(frozen=True)
class Document:
    """One text: its category, the key that decides whether it is held out, and what it says."""

    category: str
    key: str
    text: str


def is_held_out(key: str) -> bool:
    """Whether the document of this key is kept out of training. Depends on the key alone."""
    digest = hashlib.sha256(f"{_SALT}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < _HELD_OUT_PERCENT


def _sources(root: Path) -> list[PurePosixPath]:
    """The modules below a folder, relative to it and sorted; folders that are left out are not
    entered, as they hold most files."""
    found = []
    for folder, folders, files in os.walk(root):
        wanted = (f for f in folders if f not in _EXCLUDED_DIRECTORIES)
        folders[:] = [f for f in wanted if not f.startswith(_EXCLUDED_PREFIXES)]
        modules = (f for f in files if f.endswith(".py") and not f.startswith(_EXCLUDED_PREFIXES))
        found += [PurePosixPath(Path(folder, f).relative_to(root).as_posix()) for f in modules]
    return sorted(path for path in found if str(path) not in {*_EXCLUDED_FILES, _TOPICS_FILE})


def _read(path: Path) -> str | None:
    """The file's text with plain newlines, or None when it is no UTF-8 text, too large, or cannot
    be read."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return None
        return path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None


@cache
def code_documents(held_out: bool, /) -> tuple[Document, ...]:
    """The standard library's modules on one side of the rule, sorted by path; the key is the path
    from its root."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in _sources(root):
        if is_held_out(str(path)) != held_out:
            continue
        text = _read(root / path)
        if text and text.strip():
            documents.append(Document("code", str(path), text))
    return tuple(documents)


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
        for module in _sources(root):
            of_root.setdefault(module.parts[0], []).append(root / module)
        packages = of_root | packages
    for package, paths in packages.items():
        if is_held_out(package) != held_out:
            continue
        every = 1 + sum(path.stat().st_size for path in paths) // _MAX_PACKAGE_BYTES
        for file in paths[::every]:
            text = _read(file)
            # The tokenizer would take the mark for the end of a document.
            if text and text.strip() and END_OF_TEXT not in text and text not in elsewhere:
                key = "/".join(file.parts[file.parts.index(package) :])
                documents.setdefault(text, Document("code", key, text))
    return tuple(documents.values())


def parse(text: str) -> ast.Module | None:
    """The syntax tree of a module, or None when this Python cannot parse it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            return None


def docstrings(modules: Iterable[Document]) -> Iterator[Document]:
    """The docstrings of modules, under the keys of these."""
    for module in modules:
        tree = parse(module.text)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node, clean=True)
                if docstring and len(docstring) >= _MIN_PROSE_CHARS:
                    yield Document("prose", module.key, docstring)


def _topics() -> dict[str, str]:
    """The texts of `help()`'s topics; empty where the distribution leaves them out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return dict(topics)


@cache
def prose_documents(held_out: bool, /) -> tuple[Document, ...]:
    """Docstrings and `help()` topics on one side of the rule, without repeats.

    The key of a docstring is its module's, that of a topic names the topics' file and the topic.
    """
    documents = list(docstrings(code_documents(held_out)))
    for name, text in sorted(_topics().items()):
        key = f"{_TOPICS_FILE}#{name}"
        if is_held_out(key) == held_out:
            documents.append(Document("prose", key, inspect.cleandoc(text)))
    # A text may stand in several modules or under several topics: it must not reach training by
    # another name.
    elsewhere = set() if held_out else {document.text for document in prose_documents(True)}
    unique: dict[str, Document] = {}
    for document in documents:
        if document.text not in elsewhere:
            unique.setdefault(document.text, document)
    return tuple(unique.values())


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

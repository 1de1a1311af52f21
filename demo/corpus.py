"""The text that the demo's prompts are cut from, and the rule that says which of it is held out of
training.

Three categories: `code` (the Python standard library's own source), `prose` (the library's
docstrings, and the topics of `help()`), `math` (word problems). Whether a document is held out is a
function of its key alone, so training and prompts agree on it on every machine and every Python
version. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

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


def modules_below(root: Path) -> list[PurePosixPath]:
    """The modules below a folder, relative to it and sorted; folders that are left out are not
    entered, as they hold most files."""
    found = []
    for folder, folders, files in os.walk(root):
        wanted = (f for f in folders if f not in _EXCLUDED_DIRECTORIES)
        folders[:] = [f for f in wanted if not f.startswith(_EXCLUDED_PREFIXES)]
        modules = (f for f in files if f.endswith(".py") and not f.startswith(_EXCLUDED_PREFIXES))
        found += [PurePosixPath(Path(folder, f).relative_to(root).as_posix()) for f in modules]
    return sorted(path for path in found if str(path) not in {*_EXCLUDED_FILES, _TOPICS_FILE})


def read_module(path: Path) -> str | None:
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
    for path in modules_below(root):
        if is_held_out(str(path)) != held_out:
            continue
        text = read_module(root / path)
        if text and text.strip():
            documents.append(Document("code", str(path), text))
    return tuple(documents)


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

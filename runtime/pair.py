"""Which models belong together: a target and its drafts, by name and by content.

Reading a pair needs no torch; loading one does (:func:`runtime.loading.load_pair`).
"""

from __future__ import annotations

import hashlib
import json
import pickletools
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces.errors import PairError
from traces.files import exists, is_file, read_json
from traces.text import shortened

RESERVED = ("none", "ngram")
"""Draft names every pair has: no draft, and prompt lookup."""
DRAFT_NAME_LIMIT = 128
"""Characters of a draft's name: what a recording's panoramas keep of it."""


@dataclass(frozen=True)
class PairSpec:
    """A pair as the user names it: a target and drafts, each a checkpoint folder or a hub name."""

    name: str
    target: str
    drafts: tuple[tuple[str, str], ...]

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Every draft a policy may name, ``none`` excluded."""
        return (*(n for n, _ in self.drafts), "ngram")

    @property
    def id(self) -> str:
        """12 hex digits over the content of target and drafts: the same models are the same pair, wherever they lie."""
        parts = [identity(self.target), *(f"{n}={identity(p)}" for n, p in sorted(self.drafts))]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]

    def check(self) -> None:
        """Raises PairError if a checkpoint is missing or unreadable; imports no torch, so that this is told at once."""
        for path in (self.target, *(p for _, p in self.drafts)):
            identity(path)

    def to_json(self) -> dict[str, Any]:
        """``{"name", "target", "drafts"}``, the form of a pair file."""
        return {"name": self.name, "target": self.target, "drafts": dict(self.drafts)}

    @classmethod
    def from_json(cls, data: Any, *, where: str, base: Path | None = None) -> PairSpec:
        """Reads a pair document; relative paths are taken from ``base``. Raises PairError naming ``where``."""
        if not isinstance(data, Mapping) or not isinstance(data.get("target"), str):
            raise PairError(f'{where}: a pair file is {{"name": ..., "target": PATH, "drafts": {{NAME: PATH}}}}')
        unknown = sorted(set(data) - {"name", "target", "drafts"})
        if unknown:
            raise PairError(f"{where}: unknown key {unknown[0]!r}; known keys: drafts, name, target")
        drafts = data.get("drafts", {})
        if not isinstance(drafts, Mapping) or not all(isinstance(v, str) for v in drafts.values()):
            raise PairError(f"{where}: drafts must map names to paths")
        for name in drafts:
            if name in RESERVED or not name:
                raise PairError(f"{where}: the draft name {name!r} is reserved; choose another")
            if len(name) > DRAFT_NAME_LIMIT:
                raise PairError(f"{where}: a draft's name has {len(name)} characters, more than {DRAFT_NAME_LIMIT}; choose another")

        def resolve(path: str) -> str:
            if base is not None and not Path(path).is_absolute() and exists(base / path):
                return str((base / path).resolve())
            return path

        return cls(
            shortened(str(data.get("name") or Path(data["target"]).name)),
            resolve(data["target"]),
            tuple((str(n), resolve(p)) for n, p in drafts.items()),
        )


def read_pair(pair: str | None, target: str | None = None, drafts: Sequence[str] = ()) -> PairSpec:
    """A pair from the command line: ``--pair demo``, ``--pair FILE``, or ``--target PATH`` with ``--draft NAME=PATH``.

    Raises PairError when the choice is ambiguous, the file is missing or malformed, or a draft has no name.
    """
    if target is not None:
        if pair is not None:
            raise PairError("give either --pair or --target with --draft, not both")
        named: dict[str, str] = {}
        for item in drafts:
            name, eq, path = item.partition("=")
            if not eq or not name or not path:
                raise PairError(f"--draft {item}: write --draft NAME=PATH")
            if name in named:
                raise PairError(f"--draft {item}: the name {name!r} is used twice")
            named[name] = path
        return PairSpec.from_json({"target": target, "drafts": named}, where="--target", base=Path.cwd())
    if drafts:
        raise PairError("--draft needs --target; a pair file names its own drafts")
    if pair is None or pair == "demo":
        file = Path(__file__).resolve().parent.parent / "demo" / "pair" / "pair.json"
    else:
        file = Path(pair)
        if exists(file) and file.is_dir():
            file = file / "pair.json"
    if not is_file(file):
        raise PairError(f"--pair {shortened(str(pair))}: no such pair file (write 'demo', a JSON file, or use --target and --draft)")
    data = read_json(file, str(file), PairError)
    return PairSpec.from_json(data, where=str(file), base=file.resolve().parent)


def identity(path: str) -> str:
    """16 hex digits over a checkpoint's configuration and weights, wherever it lies; a hub name stands for itself.

    Of each weight file the size, the first and the last MiB are hashed, so that large checkpoints take no time.
    Raises PairError when a local folder holds no checkpoint.
    """
    folder = Path(path).expanduser()
    if not exists(folder) and not is_local(path):
        return path
    if not is_file(folder / "config.json"):
        raise PairError(f"no model at {shortened(path)} (a folder with config.json and weights is expected)")
    h = hashlib.sha256()
    config = read_json(folder / "config.json", str(folder / "config.json"), PairError)
    if not isinstance(config, dict):
        raise PairError(f"{folder / 'config.json'}: a model's configuration is a JSON object, not {type(config).__name__}")
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    h.update(json.dumps(config, sort_keys=True).encode())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = file.stat().st_size
        h.update(f"{file.name}:{size}".encode())
        with file.open("rb") as f:
            h.update(f.read(1 << 20))
            if size > 1 << 20:
                f.seek(max(1 << 20, size - (1 << 20)))
                h.update(f.read())
    return h.hexdigest()[:16]


def head_config(folder: Path) -> dict[str, Any]:
    """The configuration of an EAGLE head, flat. Raises PairError where there is none."""
    config = read_json(folder / "config.json", str(folder / "config.json"), PairError)
    if not isinstance(config, dict):
        raise PairError(f"{folder / 'config.json'}: a head's configuration is a JSON object, not {type(config).__name__}")
    return config


def is_head(path: str) -> bool:
    """Whether a checkpoint is an EAGLE head rather than a language model; imports no torch.

    EAGLE-1 and 2 configurations look like any Llama's: there the names of the tensors tell. On a hub the name must say ``eagle``, as
    those of published heads do: nothing is fetched to find out.
    """
    folder = Path(path).expanduser()
    if not is_local(path):
        return "eagle" in path.lower()
    if not is_file(folder / "config.json"):
        return False
    config = head_config(folder)
    if "eagle_config" in config or "draft_vocab_size" in config:
        return True
    if any("eagle" in str(a).lower() for a in config.get("architectures") or ()):
        return True
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return any(n.removeprefix("model.") == "fc.weight" for f in files for n in _tensor_names(f))


def _tensor_names(file: Path) -> set[str]:
    """Names of the tensors in a weight file (and, in a pickle, other strings); none where it cannot be read."""
    try:
        if file.suffix == ".safetensors":
            with file.open("rb") as f:
                size = int.from_bytes(f.read(8), "little")
                return set(json.loads(f.read(size))) if size < file.stat().st_size else set()
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                inner = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
                return {arg for _, arg, _ in pickletools.genops(archive.read(inner)) if isinstance(arg, str)}
    except (OSError, ValueError, TypeError, RecursionError, StopIteration, zipfile.BadZipFile):
        pass  # loading it will say what is wrong
    return set()


def is_local(path: str) -> bool:
    """Whether a model is named by a path rather than by its name on a hub."""
    return path.startswith((".", "/", "~")) or exists(path) or path.count("/") != 1

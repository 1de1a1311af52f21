"""Which models belong together: a target and its drafts, by name and by content.

Reading a pair needs no torch; loading one does (:func:`runtime.loading.load_pair`).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectune.runtime.file_hashes import FILES
from spectune.traces.errors import PairError, SpectuneError
from spectune.traces.files import read_json
from spectune.traces.text import shortened

RESERVED = ("none", "ngram", "target")
"""Names that are not a draft's: no draft, prompt lookup, and the model that drafts are for."""
DRAFT_NAME_LIMIT = 128
"""Characters of a draft's name: what a recording's panoramas keep of it."""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
HUB_NAME_LIMIT = 96
"""Characters of a hub name."""


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
        """12 hex digits over the content of target and drafts: the same models are the same pair,
        wherever they lie.

        Files are hashed whole. Raises PairError when one is missing or unreadable.
        """
        drafts = [[name, identity(path)] for name, path in sorted(self.drafts)]
        parts = [identity(self.target), *drafts]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    def check(self) -> None:
        """Raises PairError if a checkpoint is missing or its configuration is none; reads no
        weights, so that this is told at once."""
        for path in (self.target, *dict(self.drafts).values()):
            if (folder := checkpoint(path)) is not None:
                model_config(folder)

    def to_json(self) -> dict[str, Any]:
        """``{"name", "target", "drafts"}``, the form of a pair file."""
        return {"name": self.name, "target": self.target, "drafts": dict(self.drafts)}

    @classmethod
    def from_json(cls, data: Any, *, where: str, base: Path | None = None) -> PairSpec:
        """Reads a pair document; relative paths are taken from ``base``. Raises PairError naming
        ``where``."""

        def refused(said: str) -> PairError:
            return PairError(f"{where}: {said}")

        if not isinstance(data, Mapping) or not isinstance(data.get("target"), str):
            raise refused('a pair file is {"name": ..., "target": PATH, "drafts": {NAME: PATH}}')
        known = ("drafts", "name", "target")
        for key in sorted(set(data) - set(known)):
            raise refused(f"unknown key {key!r}; known keys: {', '.join(known)}")
        drafts = data.get("drafts", {})
        if not isinstance(drafts, Mapping) or not all(isinstance(v, str) for v in drafts.values()):
            raise refused("drafts must map names to paths")
        for name in drafts:
            if name in RESERVED or not name:
                raise refused(f"the draft name {name!r} is reserved; choose another")
            if len(name) > DRAFT_NAME_LIMIT:
                raise refused(
                    f"a draft's name has {len(name)} characters, more than {DRAFT_NAME_LIMIT}; "
                    "choose another"
                )

        def resolve(path: str) -> str:
            if base is not None and not Path(path).is_absolute() and os.path.exists(base / path):
                return str((base / path).resolve())
            return path

        return cls(
            shortened(str(data.get("name") or Path(data["target"]).name)),
            resolve(data["target"]),
            tuple((str(n), resolve(p)) for n, p in drafts.items()),
        )


def read_pair(pair: str | None, target: str | None = None, drafts: Sequence[str] = ()) -> PairSpec:
    """A pair from the command line: ``--pair demo`` (the one that ships), ``--pair FILE``, or
    ``--target PATH`` with ``--draft NAME=PATH``.

    Raises PairError when the choice is ambiguous, the file is missing or malformed, or a draft has
    no name.
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
        return PairSpec.from_json(
            {"target": target, "drafts": named}, where="--target", base=Path.cwd()
        )
    if drafts:
        raise PairError("--draft needs --target; a pair file names its own drafts")
    if pair is None:
        raise PairError("no pair is named: 'demo', a pair file, or a target and drafts")
    shipped = Path(__file__).resolve().parent.parent / "demo" / "pair"
    file = shipped if pair == "demo" else Path(pair)
    if os.path.isdir(file):
        file = file / "pair.json"
    if not os.path.isfile(file):
        raise PairError(
            f"--pair {shortened(str(pair))}: no such pair file (write 'demo', a JSON file, or use "
            "--target and --draft)"
        )
    return PairSpec.from_json(
        read_json(file, str(file), PairError), where=str(file), base=file.resolve().parent
    )


GENERATION, ADAPTER = "generation_config.json", "adapter_config.json"
CONTENT = (
    *("*.safetensors", "*.bin", "*.index.json", "tokenizer*", "vocab*", "merges*", "*.model"),
    *("*.tiktoken", "added_tokens.json", "special_tokens_map.json", "*.jinja"),
    *("chat_template.json", "additional_chat_templates/*.jinja"),
)
"""What of a checkpoint decides a text, beside its two configurations."""


def identity(path: str) -> str:
    """16 hex digits over a checkpoint's configuration, weights and tokenizer, wherever it lies; a
    hub name stands for itself.

    Every file is hashed whole; hashes of large ones are remembered (:mod:`runtime.file_hashes`).
    Raises PairError when a local folder holds no checkpoint or a file of it cannot be read.
    """
    folder = checkpoint(path)
    if folder is None:
        return path
    generation = model_config(folder, GENERATION) if (folder / GENERATION).is_file() else None
    files = [[name, _hash_of(folder / name)] for name in sorted(_content(folder))]
    parts = [model_config(folder), generation, *files]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _hash_of(file: Path) -> str:
    try:
        return FILES.of(file)
    except (OSError, RuntimeError) as error:  # Path.resolve has the latter for a link to itself
        said = getattr(error, "strerror", "a link to itself")
        raise PairError(f"{file}: cannot be read ({said})") from None


def _content(folder: Path) -> set[str]:
    """Names of the files that decide a text, relative to the folder; shards that an index names may
    lie anywhere."""
    files = (f for pattern in CONTENT for f in folder.glob(pattern))
    found = {str(f.relative_to(folder)) for f in files if not f.is_dir()}
    for index in folder.glob("*.index.json"):
        shards = _object(index, "an index of weights").get("weight_map")
        names = shards.values() if isinstance(shards, Mapping) else ()
        found |= {name for name in names if isinstance(name, str) and (folder / name).is_file()}
    return found


def is_content(file: Path) -> bool:
    """Whether a file, there or not, would be one of a checkpoint's: in its folder or one below,
    named as what decides a text."""
    names = (*CONTENT, "config.json", GENERATION, ADAPTER)
    folders = [folder for folder in file.parents[:2] if os.path.isfile(folder / "config.json")]
    return any(file.relative_to(folder).match(name) for folder in folders for name in names)


def checkpoint(path: str) -> Path | None:
    """The folder of a local checkpoint, None for a hub name. Raises PairError where no checkpoint
    is."""
    folder = expanded(path)
    if not os.path.exists(folder) and not is_local(path):
        return None
    if not os.path.isfile(folder / "config.json"):
        raise PairError(
            f"no model at {shortened(path)} (a folder with config.json and weights is expected)"
        )
    if os.path.exists(folder / ADAPTER):
        # transformers would load other weights, from where this file says, or the adapter's model
        # without it.
        raise PairError(
            f"{path} holds an adapter ({ADAPTER}); merge it into its model and give the folder of "
            "the result"
        )
    return folder


def model_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A checkpoint's configuration, without where and by what it was saved. Raises PairError where
    it is none."""
    config = _object(folder / name, "a model's configuration")
    if "transformers_weights" in config:  # transformers would load them from a file of any name
        raise PairError(
            f"{folder / name} names its weights itself (transformers_weights); call that file "
            "model.safetensors and leave the key out"
        )
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    return config


FOLLOWED = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens"),
    *("transformers_version", "_from_model_config", "use_cache", "cache_implementation"),
)
"""Keys of a generation_config that change no text, or say what options of the user say here."""


def ignored_settings(path: str) -> list[str]:
    """A line on what a target's generation_config asks of its texts and is not done; none where it
    asks for nothing else than is done."""
    folder = checkpoint(path)
    if folder is None or not (folder / GENERATION).is_file():
        return []
    config = model_config(folder, GENERATION)
    asked = [k for k, v in sorted(config.items()) if k not in FOLLOWED and v and v != 1]
    named = ", ".join(f"{key} {config[key]}" for key in asked)
    return [f"ignored of the target's generation_config: {named}"] if asked else []


def head_config(folder: Path) -> dict[str, Any]:
    """The configuration of an EAGLE head, flat. Raises PairError where there is none."""
    return _object(folder / "config.json", "a head's configuration")


def _object(file: Path, what: str) -> dict[str, Any]:
    found = read_json(file, str(file), PairError)
    if not isinstance(found, dict):
        raise PairError(f"{file}: {what} is a JSON object, not {type(found).__name__}")
    return found


def architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a configuration says it is, in small letters; nothing where it says something else than
    names."""
    found = config.get("architectures")
    return tuple(str(name).lower() for name in found) if isinstance(found, list) else ()


def says_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a head's configuration is one of EAGLE-3."""
    named = any("eagle3" in name for name in architectures(config))
    named = named or config.get("speculators_model_type") == "eagle3"
    return named or "draft_vocab_size" in config or "eagle_config" in config


def is_head(path: str) -> bool:
    """Whether a checkpoint is an EAGLE head rather than a language model; imports no torch.

    EAGLE-1 and 2 configurations look like any Llama's: there the names of the tensors tell. On a
    hub the name must say ``eagle``, as those of published heads do: nothing is fetched to find out.
    """
    folder = expanded(path)
    if not is_local(path):
        return "eagle" in path.lower()
    if not os.path.isfile(folder / "config.json"):
        return False
    config = head_config(folder)
    if says_eagle3(config) or any("eagle" in name for name in architectures(config)):
        return True
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return any(n.removeprefix("model.") == "fc.weight" for f in files for n in _tensor_names(f))


def head_algorithm(path: str) -> str:
    """``eagle3`` or ``eagle``: what engines call a head's algorithm."""
    folder = expanded(path)
    config = head_config(folder) if (folder / "config.json").is_file() else {}
    named = "eagle3" in path.lower().replace("eagle-3", "eagle3")
    return "eagle3" if named or says_eagle3(config) else "eagle"


HEADER_BYTES = 100_000_000
"""The longest description of tensors that is read, as safetensors has it."""


def _tensor_names(file: Path) -> set[str]:
    """Names of the tensors in a weight file (and, in a pickle, other strings); none where it cannot
    be read."""
    # Garbage fails in more ways than can be listed; loading it will say what is wrong.
    with suppress(Exception):
        if file.suffix == ".safetensors":
            with file.open("rb") as f:
                size = int.from_bytes(f.read(8), "little")
                return set(dict(json.loads(f.read(size)))) if size <= HEADER_BYTES else set()
        with zipfile.ZipFile(file) as archive:
            inner = next(i for i in archive.infolist() if i.filename.endswith("/data.pkl"))
            if inner.file_size <= HEADER_BYTES:
                read = pickletools.genops(archive.read(inner))
                return {argument for _, argument, _ in read if isinstance(argument, str)}
    return set()


@contextmanager
def translated(what: str) -> Iterator[None]:
    """The border to the libraries that read checkpoints: each of their errors becomes a PairError
    of one line, ``what`` first.

    A checkpoint that needs code of its own is refused: no ``from_pretrained`` of ours may run or
    ask for it.
    """
    try:
        yield
    except SpectuneError:
        raise
    # safetensors, transformers, tokenizers, torch and the hub each have errors of their own
    except Exception as error:
        said = (str(error).splitlines() or [""])[0] or type(error).__name__
        if "trust_remote_code" in str(error):
            said = (
                "it needs Python code of its own, which is never run here; give a checkpoint of an "
                "architecture that transformers has"
            )
        raise PairError(f"{what}: {said}") from None


def check_threads(threads: int | None) -> None:
    """Raises PairError for a number of CPU threads that torch cannot start or this machine gains
    nothing by."""
    cpus = os.cpu_count() or 1
    most = max(16, 4 * cpus)
    if threads is not None and not 1 <= threads <= most:
        raise PairError(
            f"--threads {threads}: this machine has {cpus} CPUs; give a number from 1 to {most}"
        )


def expanded(path: str) -> Path:
    """A model's folder, with ``~`` and ``~user`` replaced; a user that is unknown stands for
    itself."""
    try:
        return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user
    except ValueError:  # no user can have such a name
        return Path(path)


def described(path: str) -> str:
    """A model's path or name for a message, a hub name with a word on why it is taken for one."""
    return path if is_local(path) else f"{path} (no folder here, so the name of one on the hub)"


def is_local(path: str) -> bool:
    """Whether a model is named by a path rather than by its name on a hub (``gpt2``,
    ``openai-community/gpt2``)."""
    if len(path) > HUB_NAME_LIMIT or HUB_NAME.fullmatch(path) is None:
        return True
    return os.path.exists(path)

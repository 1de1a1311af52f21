"""Checkpoints: where they lie, what they say they are, and what tells one from another.

A checkpoint is a folder or the name of one on a hub. What was fetched of a hub name stays in use
until somebody fetches a newer revision. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from pickletools import genops
from types import ModuleType
from typing import Any, BinaryIO

from spectune.traces.errors import PairError, SpectuneError
from spectune.traces.files import read_json
from spectune.traces.text import shortened

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
HUB_NAME_LIMIT = 96
"""Characters of a hub name."""
HUB_TIMEOUT_S = 10.0
MISSING = "no folder {} here, and no model of that name from the hub"
CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
WEIGHTS = ("*.safetensors", "*.bin")
WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
"""Names under which transformers looks for weights, in its order; of each the file itself comes
before an index of shards."""
TEXT_FILES = (
    *("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.json", "processor_config.json", "*.jinja"),
    *("additional_chat_templates/*.jinja", "*.index.json"),
)
"""What decides a text beside configurations and weights."""
FIRST_LAYER = "layers.0", "midlayer"
"""What heads call their first layer."""
SAMPLES = 4
"""Places in a tensor that are read for a checkpoint's identity, spread over it: its first bytes
alone may be rows of an embedding that no training touched."""
SAMPLE_BYTES = 1024


@contextmanager
def translated(subject: str, error_type: type[SpectuneError] = PairError) -> Iterator[None]:
    """Turns every error of the libraries that read checkpoints into one of ``error_type`` of one
    line, ``subject`` first. One that needs code of its own is refused."""
    try:
        yield
    except SpectuneError:
        raise
    # safetensors, transformers, tokenizers, torch and the hub each have errors of their own
    except Exception as error:
        line = (str(error).splitlines() or [""])[0] or type(error).__name__
        if "trust_remote_code" in str(error):
            line = (
                "it needs Python code of its own, which is never run here; give a checkpoint of an "
                "architecture that transformers has"
            )
        raise error_type(f"{subject}: {line}") from None


def scaled_positions(
    longest: int, rope: Mapping[str, Any], kinds: Collection[str] = ("linear", "dynamic")
) -> int:
    """``longest`` positions times the factor of a configuration's rotary scaling, where it is of
    these ``kinds``: others say the length that they lead to. Raises PairError where it says no
    factor."""
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in kinds:
        return longest
    if "factor" not in rope:
        raise PairError(f"its rope_scaling is {kind} and says no factor; add it to config.json")
    return int(longest * float(rope["factor"]))


def is_local(path: str) -> bool:
    """Whether a model is named by a path rather than by its name on a hub (``gpt2``,
    ``openai-community/gpt2``)."""
    if len(path) > HUB_NAME_LIMIT or HUB_NAME.fullmatch(path) is None:
        return True
    return os.path.exists(path)


def expanded(path: str) -> Path:
    """A model's folder, with ``~`` and ``~user`` replaced; a user that is unknown stands for
    itself."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user


def checkpoint(path: str) -> Path:
    """The folder of a checkpoint; of a hub name that of the revision that was fetched, without
    weights until it is loaded. Raises PairError where there is none, locally or on the hub."""
    if path.endswith(".json"):
        raise PairError(f"{shortened(path)}: no such pair file{_nearest(expanded(path))}")
    folder = expanded(path) if is_local(path) else _hub_folder(path)
    if not os.path.isfile(folder / CONFIG):  # no error where a name is too long
        raise PairError(
            f"no model at {shortened(path)} (a folder with config.json and weights is expected)"
        )
    if (folder / ADAPTER).exists():
        # transformers would load other weights, from where this file says, or the adapter's model
        # without it.
        raise PairError(
            f"{path} holds an adapter ({ADAPTER}); merge it into its model and give the folder of "
            "the result"
        )
    return folder


def _nearest(file: Path) -> str:
    """A file beside the one that is not there whose name is like its name, as a question."""
    names = [each.name for each in file.parent.glob("*.json")]
    near = get_close_matches(file.name, names, n=1)
    return f"; did you mean {file.parent / near[0]}?" if near else ""


def _hub(name: str) -> ModuleType:
    """What speaks with the hub that a model is named by. Raises PairError where it is not
    installed."""
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise PairError(
            f"no folder {name} here, and for names on a hub huggingface_hub is needed: pip install "
            "'spectune[hub]'"
        ) from None
    return huggingface_hub


def _hub_folder(name: str) -> Path:
    """The folder of what was fetched of a hub name. Fetched is all but the weights, also where
    another program, which read a configuration alone, left the rest out."""
    hub = _hub(name)
    file = hub.try_to_load_from_cache(name, CONFIG)
    if isinstance(file, str):
        folder = Path(file).parent
        return folder if has_tokenizer(folder) or is_head(name) else _fetched(name, folder.name)
    with translated(MISSING.format(name)):
        # Asked once, a name that it does not have, or no network, is told at once.
        hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    return _fetched(name)


@lru_cache  # some drafts have no tokenizer: the hub is asked for it once a process
def _fetched(name: str, revision: str | None = None) -> Path:
    hub = _hub(name)
    with translated(MISSING.format(name)):
        allowed = ["*.json", *TEXT_FILES]
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=allowed))


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint has a tokenizer of its own."""
    return any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))


def source(path: str) -> tuple[str, dict[str, str]]:
    """What ``from_pretrained`` is given to load a checkpoint's weights: its folder, or for a hub
    name whose weights are not fetched yet the name and ``{"revision": commit}``."""
    folder = checkpoint(path)
    if is_local(path) or all((folder / name).exists() for name in weight_files(folder)):
        return str(folder), {}
    return path, {"revision": folder.name}


def weight_files(folder: Path) -> list[str]:
    """Names of the files that a checkpoint's weights are loaded from, one at least: what
    transformers takes of several kinds (a shard may be missing), else all of one kind."""
    for name in WEIGHT_NAMES:
        if (folder / name).exists():
            return [name]
        if (index := folder / f"{name}.index.json").exists():
            shards = read_config(folder, index.name).get("weight_map") or {}
            return sorted({str(shard) for shard in shards.values()})
    kinds = (sorted(folder.glob(pattern)) for pattern in WEIGHTS)
    return next(([file.name for file in files] for files in kinds if files), [WEIGHT_NAMES[0]])


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint, empty where the file is missing. Raises PairError
    where it holds none."""
    if not (folder / name).is_file():
        return {}
    document = read_json(folder / name, str(folder / name), PairError)
    if not isinstance(document, dict):
        raise PairError(f"{folder / name} holds {type(document).__name__}, not a JSON object")
    return document


# ---------------------------------------------------------------------------------------- identity


def identity(path: str) -> str:
    """What tells a checkpoint from others: of a folder 16 hex digits over configurations,
    tokenizer, the safetensors' headers and a few KiB of every tensor, wherever it lies; of a hub
    name that and the commit that was fetched. Raises PairError where it cannot be read."""
    folder = checkpoint(path)
    if not is_local(path):
        return f"{path}@{folder.name}"
    configs = [config for name in (CONFIG, GENERATION) if (config := read_config(folder, name))]
    for config in configs:  # where and by what it was saved
        for key in ("_name_or_path", "transformers_version"):
            config.pop(key, None)
    digest = hashlib.sha256(json.dumps(configs, sort_keys=True).encode())
    texts = {f for pattern in TEXT_FILES for f in folder.glob(pattern) if not f.is_dir()}
    weights = [f for name in weight_files(folder) if (f := folder / name).exists()]
    for file in (*sorted(texts), *weights):
        with translated(f"{file} cannot be read"):
            part = file.read_bytes() if file in texts else _weights_sample(file)
            inner = hashlib.sha256(part).hexdigest()
        digest.update(f"{file.relative_to(folder)} {inner}".encode())
    return digest.hexdigest()[:16]


def _weights_sample(file: Path) -> bytes:
    """Of a safetensors file the header and some bytes of every tensor; of a pickle that torch
    zipped what the archive says of its parts, their checksums among it; of another all."""
    if file.suffix == ".safetensors":
        with file.open("rb", buffering=0) as opened:
            header, first = _safetensors_header(opened), opened.tell()
            header.pop("__metadata__", None)
            parts = [json.dumps(header, sort_keys=True).encode()]
            for name in sorted(header):
                begin, end = header[name]["data_offsets"]
                step = max(0, end - begin - SAMPLE_BYTES) // (SAMPLES - 1)
                for at in sorted({begin + i * step for i in range(SAMPLES)}):
                    opened.seek(first + at)
                    parts.append(opened.read(min(SAMPLE_BYTES, end - at)))
            return b"".join(parts)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            entries = [(entry.filename, entry.CRC, entry.file_size) for entry in archive.infolist()]
            return repr(entries).encode()
    return file.read_bytes()


def _safetensors_header(opened: BinaryIO) -> dict[str, Any]:
    """The header that a safetensors file begins with. Raises ValueError where there is none."""
    length = int.from_bytes(opened.read(8), "little")
    if length > os.fstat(opened.fileno()).st_size:
        raise ValueError("it is no safetensors file; was it cloned without Git LFS?")
    header: dict[str, Any] = json.loads(opened.read(length))
    return header


# ----------------------------------------------------------------------------------- configurations

KNOWN = frozenset((
    *("do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("cache_implementation", "transformers_version", "use_cache"),
))  # fmt: skip
"""Keys of a generation_config that are options here, or change no text."""


def ignored_settings(path: str) -> list[str]:
    """A line on what a target's generation_config sets and is not done; none where it sets nothing
    else. What begins with ``_`` is about the file."""
    config = read_config(checkpoint(path), GENERATION)
    settings = sorted(
        f"{key} {value}"
        for key, value in config.items()
        if key not in KNOWN and not key.startswith("_")
        if value is not None and value is not False and value != []
    )
    line = f"ignored of the target's generation_config: {', '.join(settings)}"
    return [line] if settings else []


def says_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a head's configuration is one of EAGLE-3."""
    named = "eagle3" in _architectures(config) or config.get("speculators_model_type") == "eagle3"
    return named or "draft_vocab_size" in config or "eagle_config" in config


def _architectures(config: Mapping[str, Any]) -> str:
    return str(config.get("architectures")).lower()


def is_head(path: str) -> bool:
    """Whether a checkpoint is an EAGLE head rather than a language model: by its configuration or,
    as those of EAGLE-1 and 2 look like any Llama's, by its tensors; of a hub name whose weights are
    not fetched by that name."""
    folder = _contents(path)
    if folder is None:
        return "eagle" in path.lower()
    config = read_config(folder)
    if not config:
        return False
    named = says_eagle3(config) or "eagle" in _architectures(config)
    return named or _has_tensor(folder, "fc.weight")


def is_eagle3(folder: Path) -> bool:
    """Whether the head in a folder is of EAGLE-3: by its configuration, or by a norm that no other
    kind has."""
    return says_eagle3(read_config(folder)) or _has_tensor(
        folder, *(f"{layer}.hidden_norm.weight" for layer in FIRST_LAYER)
    )


def head_algorithm(path: str) -> str:
    """``eagle3`` or ``eagle``: what engines call a head's algorithm. Told by what it holds; of a
    hub name whose weights are not fetched by that name."""
    folder = _contents(path)
    by_name = "eagle3" in path.lower().replace("eagle-3", "eagle3")
    return "eagle3" if (by_name if folder is None else is_eagle3(folder)) else "eagle"


def _contents(path: str) -> Path | None:
    """The folder of a checkpoint as it lies here, which of a hub name holds weights; None where
    they are not fetched. Asks no hub."""
    if is_local(path):
        return expanded(path)
    file = _hub(path).try_to_load_from_cache(path, CONFIG)
    folder = Path(file).parent if isinstance(file, str) else None
    return folder if folder and any(any(folder.glob(kind)) for kind in WEIGHTS) else None


def _has_tensor(folder: Path, *names: str) -> bool:
    """Whether a weight file has a tensor of one of these names, with or without ``model.``."""
    wanted = {*names, *(f"model.{name}" for name in names)}
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return any(_holds(file, wanted) for file in files)


def _holds(file: Path, names: Collection[str]) -> bool:
    with suppress(Exception):  # loading says what is wrong
        if file.suffix == ".safetensors":
            with file.open("rb") as opened:
                return not _safetensors_header(opened).keys().isdisjoint(names)
        with zipfile.ZipFile(file) as archive:
            inner = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return any(value in names for _, value, _ in genops(archive.read(inner)))
    return False

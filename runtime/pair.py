"""Which models belong together: a target and its drafts, by name and by content.

Reading a pair needs no torch; loading one does (:func:`runtime.loading.load_pair`)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from spectune.runtime.checkpoints import checkpoint, identity, read_config
from spectune.traces.errors import PairError
from spectune.traces.files import read_json
from spectune.traces.text import shortened

RESERVED = ("none", "ngram", "target")
"""Names that are not a draft's: no draft, prompt lookup, and the model that drafts are for."""
DRAFT_NAME_LIMIT = 128
"""Characters of a draft's name: what a recording's panoramas keep of it."""
FORM = '{"name": ..., "target": PATH, "drafts": {NAME: PATH}, "methods": [NAME]}'


def _draft_name(name: str) -> str:
    if name in RESERVED or not name:
        raise ValueError(f"the draft name {name!r} is reserved; choose another")
    if (length := len(name)) > DRAFT_NAME_LIMIT:
        raise ValueError(f"a draft's name has {length} characters, more than {DRAFT_NAME_LIMIT}")
    return name


class PairSpec(BaseModel):
    """A pair as the user names it: a target and drafts, each a checkpoint folder or a hub name.
    ``methods``: drafts that vLLM has and nothing here loads, by its name of their method (``mtp``,
    ``dflash``, ``suffix``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    target: str
    drafts: dict[Annotated[str, AfterValidator(_draft_name)], str] = {}
    methods: tuple[Annotated[str, AfterValidator(_draft_name)], ...] = ()

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Every draft a policy may name, ``none`` excluded."""
        return (*self.drafts, *self.methods, "ngram")

    @property
    def id(self) -> str:
        """12 hex digits over the :func:`identity` of target and drafts: the same models are the
        same pair, wherever they lie. Raises PairError where one is missing or cannot be read."""
        models = self.models
        parts = [models["target"], *map(list, models["drafts"].items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    @property
    def models(self) -> dict[str, Any]:
        """The :func:`identity` of the target and of each draft by its name, and ``methods``.
        JSON-ready. Raises PairError where one is missing or cannot be read."""
        drafts = {name: identity(path) for name, path in sorted(self.drafts.items())}
        return {"target": identity(self.target), "drafts": drafts, "methods": [*self.methods]}

    def check(self) -> None:
        """Raises PairError if a checkpoint is missing or its configuration is none; reads no
        weights, so that this is told at once."""
        for path in (self.target, *self.drafts.values()):
            read_config(checkpoint(path))

    def to_json(self) -> dict[str, Any]:
        """``{"name", "target", "drafts", "methods"}``, the form of a pair file."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: Any, *, where: str, base: Path | None = None) -> PairSpec:
        """Reads a pair document; relative paths are taken from ``base``. Raises PairError naming
        ``where``."""

        def resolve(path: str) -> str:
            if base is not None and not Path(path).is_absolute() and os.path.exists(base / path):
                return str((base / path).resolve())
            return path

        try:
            spec = cls.model_validate(data)
        except ValidationError as error:
            raise PairError(f"{where}: {_explained(error)}") from None
        drafts = {name: resolve(path) for name, path in spec.drafts.items()}
        name = shortened(spec.name or Path(spec.target).name)
        return cls(name=name, target=resolve(spec.target), drafts=drafts, methods=spec.methods)


def _explained(error: ValidationError) -> str:
    """What is wrong with a pair document, and the form it should have."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if first["type"] == "extra_forbidden":
        return f"unknown key {place!r}; known keys: {', '.join(sorted(PairSpec.model_fields))}"
    reason = str(first.get("ctx", {}).get("error", first["msg"]))
    return f"{place}{': ' if place else ''}{reason}; a pair file is {FORM}"


def read_pair(
    pair: str | None, target: str | None = None, drafts: Mapping[str, str] | None = None
) -> PairSpec:
    """A pair as settings name it: ``demo`` (the one that ships), a pair file, or a target and
    drafts by name.

    Raises PairError when the choice is ambiguous, or the file is missing or malformed."""
    if target is not None:
        if pair is not None:
            raise PairError("give either a pair or a target with drafts, not both")
        document = {"target": target, "drafts": dict(drafts or {})}
        return PairSpec.from_json(document, where="target", base=Path.cwd())
    if drafts:
        raise PairError("drafts need a target; a pair file names its own drafts")
    if pair is None:
        raise PairError("no pair is named: 'demo', a pair file, or a target and drafts")
    shipped = Path(__file__).resolve().parent.parent / "demo" / "pair"
    file = shipped if pair == "demo" else Path(pair)
    if os.path.isdir(file):
        file = file / "pair.json"
    if not os.path.isfile(file):
        raise PairError(
            f"--pair {shortened(str(pair))}: no such pair file (write 'demo', or a JSON file)"
        )
    return PairSpec.from_json(
        read_json(file, str(file), PairError), where=str(file), base=file.resolve().parent
    )


def check_threads(threads: int | None) -> None:
    """Raises PairError for a number of CPU threads that torch cannot start or this machine gains
    nothing by."""
    cpus = os.cpu_count() or 1
    most = max(16, 4 * cpus)
    if threads is not None and not 1 <= threads <= most:
        raise PairError(
            f"threads {threads}: this machine has {cpus} CPUs; give a number from 1 to {most}"
        )

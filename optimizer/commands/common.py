"""What commands have in common: how they speak while they work, the database, the pair, the policy
and the files that are meant."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from spectune.db.database import open_database
from spectune.db.database_errors import NotFoundError
from spectune.db.urls import parse_url
from spectune.optimizer.deployment import deployment_of
from spectune.optimizer.inputs import policy_of, read_files
from spectune.optimizer.tuning.sources import recording_named
from spectune.options import idle_options, typed_words
from spectune.runtime.hardware import hardware, sees_cuda
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.progress import Progress, silent
from spectune.runtime.text_codec import check_conversations, lacks_template
from spectune.settings import OnPair, OnWorkload, Settings
from spectune.traces.errors import ConfigError, OutputError, PairError, PolicyError, WorkloadError
from spectune.traces.files import replacing, why_not_writable
from spectune.traces.schema import Step, device_name
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording
from spectune.traces.text import shortened

P = TypeVar("P", bound=OnPair)


def next_command(
    s: Settings, words: Sequence[str], of: type[Settings], without: Collection[str] = ()
) -> str:
    """A command to type next, whose settings are ``of``: these words, and what was typed of the
    options that it takes too, but for the keys of ``without``."""
    place = ["--db", s.db] if s.typed("db") else []
    return shlex.join(["spectune", *place, *words, *typed_words(s, of, without)])


def warn(line: str) -> None:
    """Tells a user of the Python calls, at the line of theirs that called."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("spectune"):
        frame, level = frame.f_back, level + 1
    warnings.warn(line, stacklevel=level)


@dataclass(frozen=True)
class Talk:
    """How a call speaks while it works: lines, progress, and for ``generate`` the console that text
    is streamed to; without one Python called."""

    tell: Callable[[str], None] = warn
    progress: Progress = silent
    console: Console | None = None

    def no_effect(self, settings: Settings, here: Collection[str]) -> None:
        """One note on the options that were typed and do not act ``here``, some of
        :data:`spectune.settings.WHERE`."""
        if idle := idle_options(settings, here):
            self.tell(f"no effect: {idle}")


@contextmanager
def open_store(settings: Settings, *, create: bool = False) -> Iterator[TraceStore]:
    """The store of the database. One that does not exist is an error unless ``create``, and is made
    by what is stored first. Raises DatabaseError."""
    with open_database(settings.db, create=create) as database:
        yield TraceStore(database)


def pair_of(
    settings: OnPair, store: TraceStore | None = None, recording: str | None = None
) -> PairSpec:
    """The pair meant, its checkpoints there: the one that is typed, else that of a recording whose
    id is typed, else the environment's or spectune.toml's, else of a ``recording`` by default.
    Raises PairError, also where nothing names one: no pair is taken in silence, and NotFoundError
    where there is no such recording."""
    if store is not None and recording not in (None, "latest"):
        store.get_recording(recording)  # one that is not there is told before the pair is loaded
    if (loaded := getattr(settings.pair, "spec", None)) is not None:
        return _of_loaded(settings, loaded)
    typed = settings.typed("pair", "target", "drafts")
    if recording == "latest":  # of the pair that is named, if one is
        by_recording = not names_pair(settings)
    else:
        by_recording = settings.pair is None or settings.typed("recording", "resume")
    if store is not None and recording is not None and by_recording and not typed:
        where = f"the pair of recording {recording}"
        document = store.get_pair(store.get_recording(recording).pair_id).document
        spec = PairSpec.from_json(document, where=where)
        try:
            spec.check()
        except PairError as error:
            raise PairError(f"{where}: {error}; say where it is now by --pair") from None
        return spec
    if isinstance(settings.pair, Mapping):  # of a stored schedule
        spec = PairSpec.from_json(settings.pair, where="pair")
        spec.check()
        return spec
    pair, target = settings.pair, settings.target
    if target == "demo" or (target and is_pair_file(target)):
        if settings.drafts:
            raise PairError(
                f"--draft: {target} is a pair, which names its drafts; leave it out, or give the "
                "target's checkpoint"
            )
        spec = read_pair(target)
        spec.check()
        return spec
    if settings.typed("target", "drafts") and not settings.typed("pair"):
        pair = None
    if pair is None and settings.target is None and not settings.drafts:
        raise PairError(
            "no pair is named; say --pair FILE (or --pair demo), set SPECTUNE_PAIR, or put "
            "pair = ... in spectune.toml (`init` writes one)"
        )
    spec = read_pair(None if pair is None else os.fspath(pair), target, settings.drafts)
    spec.check()
    return spec


def is_pair_file(path: str) -> bool:
    """Whether a pair's file lies there, or in a folder of this name."""
    return any(map(os.path.isfile, (path, f"{path}/pair.json")))


def check_pair(settings: OnPair) -> None:
    """Raises PairError for a pair that is typed and cannot be read; imports no torch."""
    loaded = getattr(settings.pair, "spec", None)
    if settings.typed("pair", "target", "drafts") and loaded is None:
        pair_of(settings)


def check_templates(settings: OnWorkload) -> None:
    """Raises WorkloadError for a conversation in a typed workload where no file of the target holds
    the chat template that it needs; imports no torch."""
    is_loaded = getattr(settings.pair, "spec", None) is not None
    taken = settings.typed("workload") and not settings.typed("recording", "since", "resume")
    if is_loaded or not taken or not settings.sampling.chat or not names_pair(settings):
        return
    target = pair_of(settings).target
    if not lacks_template(target):
        return
    try:
        workload = read_files(settings.workload, settings.requests)
    except WorkloadError:
        return  # told when it is read again, after what is wrong beside it
    check_conversations(target, workload.requests, chat=True)


def _of_loaded(settings: OnPair, spec: PairSpec) -> PairSpec:
    """The pair of one that Python loaded already. Raises PairError for what it cannot take."""
    keys = ("target", "drafts", "device", "dtype", "threads")
    if names := [key for key in keys if settings.typed(key)]:
        raise PairError(f"{', '.join(names)}: the pair is loaded already; say them there")
    return spec


def names_pair(settings: OnPair) -> bool:
    """Whether a pair is named anywhere."""
    return any((settings.pair, settings.target, settings.drafts))


def naming_pair(s: P, spec: PairSpec) -> P:
    """The settings with a pair as if it were typed, for the commands that are printed, where
    nothing names one."""
    return s if names_pair(s) else s.as_typed(target=spec.target, drafts=dict(spec.drafts))


def device_of(device: str) -> str:
    """``cpu``, ``cuda`` or ``cuda:NAME`` of a GPU, where ``auto`` is what torch would find. Raises
    ConfigError where there is a GPU, and no torch to name it."""
    if device != "auto":
        return device
    try:
        return device_name("cuda", hardware("cuda")) if sees_cuda() else "cpu"
    except ModuleNotFoundError:
        raise ConfigError(
            "--device auto: torch, which would name the GPU here, is not installed; say --device "
            "cuda, cuda:NAME or cpu"
        ) from None


def policy_named(
    store: TraceStore, name: str, pair_id: str, device: str, deployment: str, talk: Talk
) -> Policy:
    """A policy by built-in name, file, inline JSON, id, or ``active``. Raises PolicyError."""
    try:
        policy = policy_of(store, name, pair_id, device, deployment)
    except NotFoundError as error:
        raise PolicyError(
            f"--policy {shortened(name)}: neither a file, a JSON document, 'active' nor "
            f"'autoregressive', and {shortened(str(error))} (see `policies list`)"
        ) from None
    if policy is None:
        talk.tell(
            f"no policy is published for pair {pair_id} on {device} in deployment {deployment}; "
            "decoding autoregressively"
        )
    return policy or AUTOREGRESSIVE


def deployment_for(s: Any, engine: str) -> str:
    """The deployment that was named anywhere, else an engine's own."""
    named = s.deployment != "default" or s.typed("deployment")
    return str(s.deployment) if named else deployment_of(engine)


def recording_meant(
    s: OnPair, store: TraceStore, name: str, engine: str | None = None
) -> Recording:
    """The recording of a name (:func:`optimizer.tuning.sources.recording_named`): ``latest`` of the
    pair that is named anywhere, if one is, and ``typed`` ones of the pair that is typed."""
    typed = s.typed("pair", "target", "drafts")
    spec = pair_of(s) if typed or (name == "latest" and names_pair(s)) else None
    return recording_named(store, name, pair=spec, engine=engine)


def note_missing_panoramas(info: Recording, number: int, talk: Talk) -> None:
    """Notes the requests of a recording that are left out, as its drafts have not read them: a
    server adds some all the time."""
    if number < info.n_texts:
        talk.tell(
            f"left out: {info.n_texts - number} of {info.n_texts} requests, which lack "
            f"panoramas; `record --resume {info.id}` makes them"
        )


def database_files(db: str) -> list[Path]:
    """The files of a SQLite database, its own first; none of one on a server."""
    url = parse_url(db)
    if url.get_backend_name() != "sqlite":
        return []
    return [Path(f"{url.database}{ending}") for ending in ("", "-wal", "-shm", "-journal")]


def check_writable(settings: Settings, **paths: str | None) -> None:
    """Raises OutputError for a path, by its option, that cannot be written or that the command
    needs, before the work is done whose result would go there."""
    needed = {p.resolve() for p in (*database_files(settings.db), *map(Path, _inputs(settings)))}
    for name, path in paths.items():
        if path is None:
            continue
        problem = why_not_writable(path)
        if problem is None and Path(path).resolve() in needed:
            problem = "this command needs that file; name another"
        if problem is not None:
            raise OutputError(f"--{name.replace('_', '-')} {shortened(path)}: {problem}")


def _inputs(settings: Settings) -> Iterator[str]:
    """Files that a command's settings name."""
    for key in ("config_file", "pair", "policy", "recording", "workload"):
        value = getattr(settings, key, None)
        for name in value if isinstance(value, tuple) else (value,):
            if isinstance(name, str) and len(name) < 4096:
                yield from filter(os.path.isfile, (name, f"{name}/pair.json"))


def write_rows(path: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON lines (:func:`write_text`)."""
    write_text(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_text(path: str, parts: Iterable[str]) -> None:
    """Writes beside the target and puts it in place at the end, so that a failure leaves nothing
    half-written. Raises OutputError."""
    try:
        with replacing(path) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
            text.writelines(parts)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from None


def rounds_of(request: str, steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
    """The rows of ``--per-round``."""
    columns = ("start", "drafted", "verified", "accepted", "batch")
    for step in steps:
        yield {"request": request, **{name: getattr(step, name) for name in columns}}

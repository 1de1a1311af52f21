"""Reading workloads: JSON lines of ``{"id", "category", "turns"}``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from spectune.traces.errors import WorkloadError
from spectune.traces.files import parse_json, read_text
from spectune.traces.schema import Request, Workload
from spectune.traces.text import NAME_LIMIT, printable, shortened, unstorable

Turns = Literal["first", "all"]
"""What is made of a request's turns: the first alone, or each a prompt of its own."""


def parse_request(data: Any, where: str, *, turns: Turns | None = None) -> list[Request]:
    """One line as requests: its first turn, or with ``turns`` all one request a turn (ids ``ID/1``, ``ID/2`` ... from the second).

    Turns beyond the first are decoded as prompts of their own, without the model's earlier answers. Raises WorkloadError, also for
    several turns where ``turns`` does not say what is to be made of them.
    """
    if not isinstance(data, dict):
        raise WorkloadError(f'{where}: expected an object {{"id", "category", "turns"}}, not {type(data).__name__}')
    missing = [key for key in ("id", "turns") if key not in data]
    if missing:
        raise WorkloadError(f'{where}: key {missing[0]!r} is missing (a line is {{"id", "category", "turns"}})')
    texts = data["turns"]
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise WorkloadError(f"{where}: 'turns' must be a list of at least one string")
    if not isinstance(data["id"], (str, int)) or isinstance(data["id"], bool):
        raise WorkloadError(f"{where}: 'id' must be a string")
    if turns is None and len(texts) > 1:
        raise WorkloadError(f"{where}: {len(texts)} turns; say --all-turns (each a prompt of its own) or --first-turn (the first alone)")
    empty = next((i for i, t in enumerate(texts) if not t.strip()), None)
    if empty is not None and (turns == "all" or empty == 0):
        raise WorkloadError(f"{where}: turn {empty} is empty")
    name, category = str(data["id"]), str(data.get("category", "all"))
    for text in (name, category, *texts):
        if problem := unstorable(text):
            raise WorkloadError(f"{where}: {problem}")
    for key, text in (("id", name), ("category", category)):
        if len(text) > NAME_LIMIT:
            raise WorkloadError(f"{where}: {key!r} has {len(text)} characters, more than {NAME_LIMIT}")
    if turns != "all":
        return [Request(name, category, (texts[0],))]
    return [Request(name if i == 0 else f"{name}/{i}", category, (t,)) for i, t in enumerate(texts)]


def make_workload(name: str, lines: Iterable[tuple[str, Any]], *, turns: Turns | None = None) -> Workload:
    """A workload from (where, object) pairs. Raises WorkloadError on a malformed line, an id used twice, or no line at all."""
    requests: list[Request] = []
    seen: dict[str, str] = {}
    for where, data in lines:
        for request in parse_request(data, where, turns=turns):
            if request.id in seen:
                raise WorkloadError(f"{where}: the id {request.id!r} was used at {seen[request.id]}; ids must be unique")
            seen[request.id] = where
            requests.append(request)
    if not requests:
        raise WorkloadError(f"{name}: the workload is empty (no request in it)")
    return Workload(name, tuple(requests))


def read_workload(paths: Sequence[str], *, turns: Turns | None = None) -> Workload:
    """Reads JSONL files, in order, as one workload. Raises WorkloadError naming file and line."""

    def lines() -> Iterable[tuple[str, Any]]:
        for path in paths:
            missing = "no such file (write 'demo' or the path of a JSONL file)"
            text = read_text(path, f"--workload {path}", WorkloadError, missing=missing)
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    where = f"{path}:{number}"
                    yield where, parse_json(line, where, WorkloadError)

    return make_workload(shortened(printable("+".join(Path(p).stem for p in paths))), lines(), turns=turns)


def take(workload: Workload, limit: int | None) -> Workload:
    """The first ``limit`` requests (all when None). Raises WorkloadError for a limit below 1."""
    if limit is None or limit >= len(workload.requests):
        return workload
    if limit < 1:
        raise WorkloadError(f"--limit {limit}: at least 1 is needed")
    return Workload(workload.name, workload.requests[:limit])

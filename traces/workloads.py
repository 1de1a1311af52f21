"""What a workload's lines say: prompts, turns or conversations, as requests; and how a part of a
workload is taken."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from spectune.traces.errors import WorkloadError
from spectune.traces.schema import Request, Workload
from spectune.traces.text import NAME_LIMIT, shortened, unstorable

Turns = Literal["first", "all"]
"""What is made of several turns: the first alone, or each a prompt."""
FORMATS = (
    '{"prompt"}, {"turns"}, OpenAI {"messages"} or ShareGPT {"conversations"}, "id" and "category" '
    "beside it if you like"
)
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
"""Roles of OpenAI's messages and names of ShareGPT's speakers, as chat templates call them."""


class Line(NamedTuple):
    """One object of a file: where it stands, the id it has unless it says another, and the file."""

    where: str
    data: Any
    name: str = ""
    source: str = ""


def parse_request(
    data: Any, where: str, *, turns: Turns | None = None, name: str = ""
) -> list[Request]:
    """One object as requests; ``name`` is its id where it has none.

    Of ``turns`` the first is the prompt, or with ``turns`` all each is one (ids ``ID``, ``ID/1``,
    ...), without the model's earlier answers. A conversation is one prompt: its messages up to the
    user's last one, or first one; with ``turns`` all up to each of them. Raises WorkloadError, also
    for several turns where ``turns`` does not say what is to be made of them.
    """
    if not isinstance(data, dict):
        raise WorkloadError(f"{where}: expected an object, not {type(data).__name__} ({FORMATS})")
    if isinstance(data.get("body"), dict):  # a line of OpenAI's batch files
        named = {"id": data.get("custom_id", data.get("id")), "category": data.get("category")}
        data = {**data["body"], **named}
    given = data.get("id") if data.get("id") is not None else name or where
    if not isinstance(given, (str, int)) or isinstance(given, bool):
        raise WorkloadError(f"{where}: 'id' must be a string")
    own, category = str(given), str(data["category"]) if data.get("category") is not None else "all"
    prompts = _prompts(data, where, turns)
    for text in (own, category, *(text for _, texts in prompts for text in texts)):
        if problem := unstorable(text):
            raise WorkloadError(f"{where}: {problem}")
    for key, text in (("id", own), ("category", category)):
        if len(text) > NAME_LIMIT:
            raise WorkloadError(
                f"{where}: {key!r} has {len(text)} characters, more than {NAME_LIMIT}"
            )
    return [
        Request(f"{own}/{i}" if i else own, category, texts, roles)
        for i, (roles, texts) in enumerate(prompts)
    ]


def _prompts(
    data: Mapping[str, Any], where: str, turns: Turns | None
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(roles, texts) of every prompt that an object makes; no roles where it is one text of the
    user's."""
    if "turns" in data or "prompt" in data:
        return [((), (text,)) for text in _turns(data, where, turns)]
    key = next((key for key in ("messages", "conversations", "conversation") if key in data), None)
    if key is None:
        shown = ", ".join(repr(k) for k in data) or "none"
        raise WorkloadError(
            f"{where}: no prompt among its keys ({shortened(shown)}); expected {FORMATS}, or name "
            "one by --column"
        )
    said = _conversation(data[key], where, key)
    ends = [i + 1 for i, (role, _) in enumerate(said) if role == "user"]
    if not ends:
        raise WorkloadError(f"{where}: {key!r} has no message of a user's")
    prompts = []
    for end in ends if turns == "all" else ends[:1] if turns == "first" else ends[-1:]:
        if not said[end - 1][1].strip():
            raise WorkloadError(f"{where}: message {end - 1} is empty")
        roles, texts = zip(*said[:end], strict=True)
        prompts.append((() if end == 1 else tuple(roles), tuple(texts)))
    return prompts


def _turns(data: Mapping[str, Any], where: str, turns: Turns | None) -> list[str]:
    key, texts = ("turns", data["turns"]) if "turns" in data else ("prompt", [data["prompt"]])
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        wanted = "a list of at least one string" if key == "turns" else "a string"
        raise WorkloadError(f"{where}: {key!r} must be {wanted}")
    if turns is None and len(texts) > 1:
        raise WorkloadError(
            f"{where}: {len(texts)} turns; say --all-turns (each a prompt of its own) or "
            "--first-turn (the first alone)"
        )
    texts = texts if turns == "all" else texts[:1]
    for i, text in enumerate(texts):
        if not text.strip():
            which = f"turn {i}" if key == "turns" else "the prompt"
            raise WorkloadError(f"{where}: {which} is empty")
    return texts


def _conversation(raw: Any, where: str, key: str) -> list[tuple[str, str]]:
    """(role, text) of messages, from the first that is no answer on."""
    if not isinstance(raw, list) or not raw:
        raise WorkloadError(f"{where}: {key!r} must be a list of at least one message")
    said: list[tuple[str, str]] = []
    for n, message in enumerate(raw):
        theirs = isinstance(message, dict) and "from" in message
        speaker, content = ("from", "value") if theirs else ("role", "content")
        if not isinstance(message, dict) or not {speaker, content} <= message.keys():
            raise WorkloadError(
                f'{where}: message {n} must be {{"role", "content"}} or {{"from", "value"}}'
            )
        role = ROLES.get(message[speaker]) if isinstance(message[speaker], str) else None
        if role is None:
            given = shortened(repr(message[speaker]), 40)
            raise WorkloadError(
                f"{where}: message {n}: {speaker!r} is {given}; known are {', '.join(ROLES)}"
            )
        text = _text(message[content], f"{where}: message {n}")
        if said or role != "assistant":
            said.append((role, text))
    return said


def _text(content: Any, where: str) -> str:
    """A message's text: a string, or OpenAI's list of parts, all of them text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts
    ):
        raise WorkloadError(f"{where} is no text; pictures, sound and calls of tools are not read")
    return "".join(part["text"] for part in parts)


def make_workload(name: str, lines: Iterable[Line], *, turns: Turns | None = None) -> Workload:
    """A workload from lines. Raises WorkloadError on a malformed one, an id used twice, or no line
    at all."""
    requests: list[Request] = []
    seen: dict[str, str] = {}
    for where, data, own, source in lines:
        for request in parse_request(data, where, turns=turns, name=own):
            if request.id in seen:
                raise WorkloadError(
                    f"{where}: the id {request.id!r} was used at {seen[request.id]}; ids must "
                    "be unique"
                )
            seen[request.id] = where
            requests.append(replace(request, source=source))
    if not requests:
        raise WorkloadError(f"{name}: the workload is empty (no request in it)")
    return Workload(name, tuple(requests))


def take(workload: Workload, limit: int | None, *, seed: int = 0) -> Workload:
    """``limit`` requests (all when None), drawn from every file and category in proportion, in the
    workload's order.

    Which, follows from their ids and the seed alone, and a larger limit adds to what a smaller one
    takes. Where there is room each stratum has one; the rest goes by Huntington and Hill's method.
    Raises WorkloadError for a limit below 1.
    """
    if limit is None or limit >= len(workload.requests):
        return workload
    if limit < 1:
        raise WorkloadError(f"--limit {limit}: at least 1 is needed")
    strata: dict[tuple[str, str], list[tuple[bytes, int]]] = {}
    for n, request in enumerate(workload.requests):
        rank = hashlib.sha256(f"{seed}:{request.id}".encode()).digest()
        strata.setdefault((request.source, request.category), []).append((rank, n))
    order = sorted(
        (-len(members) / math.sqrt(j * (j + 1)) if j else -math.inf, -len(members), key, n)
        for key, members in strata.items()
        for j, (_, n) in enumerate(sorted(members))
    )
    kept = sorted(n for *_, n in order[:limit])
    return Workload(workload.name, tuple(workload.requests[n] for n in kept))

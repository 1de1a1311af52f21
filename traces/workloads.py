"""Rows of a workload (prompts, turns or conversations) as requests, and how a part is drawn."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import PydanticCustomError, to_jsonable_python

from spectune.traces.conversations import turn_id
from spectune.traces.errors import WorkloadError
from spectune.traces.schema import Request, Workload
from spectune.traces.text import NAME_LIMIT, shortened

Turns = Literal["first", "all"]
"""What is made of several turns: the first alone, or each a prompt."""
BadRows = Literal["error", "few", "skip"]
"""What is done about rows that cannot be read: the first is refused, they are left out unless they
are more than :data:`FEW` of all (another file was meant), or all are left out."""
FEW: Final = 0.25
FORMATS: Final = (
    '{"prompt"}, {"turns"}, OpenAI {"messages"} or ShareGPT {"conversations"}, "id" and "category" '
    "beside it if you like"
)
PROMPTS: Final = ("turns", "prompt", "messages", "conversations", "conversation")
"""Keys that hold what is asked; the first that there is."""
MOST_TOKENS: Final = ("max_completion_tokens", "max_tokens", "max_new_tokens", "output_tokens")
"""Keys of the most tokens to answer with, as OpenAI, vLLM and its benchmark name them."""
ROLES: Final = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    "tool": "tool",
}
"""Roles of OpenAI's messages and names of ShareGPT's speakers, as chat templates call them."""


class WorkloadRow(NamedTuple):
    """One row of a file: where it stands, its object or why there is none, the id it has unless it
    says another, and the file."""

    where: str
    data: Any
    name: str = ""
    source: str = ""


def _decoded(value: Any) -> Any:
    """What tables, and calls of tools, hold as a string of JSON."""
    try:
        return json.loads(value or "{}") if isinstance(value, str) else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _as_json(value: Any) -> Any:
    """A value as JSON has it, dates and bytes as texts. Raises for what no template can write and
    no database store."""
    try:
        value = to_jsonable_python(value, bytes_mode="base64", inf_nan_mode="constants")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise PydanticCustomError("no_json", "no JSON") from None
    return value


def _with_openai_keys(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    keys = {"from": "role", "value": "content"} if "from" in message else {}
    named = {keys.get(key, key): value for key, value in message.items() if value is not None}
    return {"content": "", **named} if named.get("tool_calls") else named


def _must_be(what: str, default: Any = ..., **limits: Any) -> Any:
    """A field, and what it must be as errors say it."""
    return Field(default, description=what, **limits)


# A NUL is no text to PostgreSQL; half of a surrogate pair is no string to pydantic.
_Str = Annotated[str, Field(pattern=r"\A[^\x00]*\z")]
_Text = Annotated[str, Field(pattern=r"\A[^\x00]*[^\s\x00][^\x00]*\z")]
_Part = Annotated[_Str, BeforeValidator(lambda p: p.get("text") if isinstance(p, dict) else p)]
_Ids = Annotated[list[Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]], Field(min_length=1)]
_Json = AfterValidator(_as_json)
_Object = Annotated[dict[str, Any], BeforeValidator(_decoded), _Json]
_Decoded = (BeforeValidator(_decoded), Field(min_length=1))
_OneOrMore = BeforeValidator(lambda value: value if isinstance(value, list) else [value])
_Prompts = BeforeValidator(
    lambda p: p if isinstance(p, list) and p and not isinstance(p[0], int) else [p]
)
_Role = BeforeValidator(lambda role: ROLES.get(role, role) if isinstance(role, str) else role)
_OpenAI = BeforeValidator(_with_openai_keys)
_NAME = f"a text of at most {NAME_LIMIT} characters"


class _Open(BaseModel):
    """What goes to the chat template with all its keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, _Json]] = Field(init=False)


class _Function(_Open):
    name: str
    arguments: _Object = {}


class _Call(_Open):
    function: _Function


class _Message(_Open):
    """A message; what it says beside this goes to the chat template as it is."""

    role: Annotated[Literal["user", "assistant", "system", "tool"], _Role] = _must_be(
        f"one of {', '.join(ROLES)}"
    )
    content: Annotated[list[_Part], _OneOrMore] = _must_be("text; pictures and sound are not read")
    tool_calls: list[_Call] = _must_be('[{"function": {"name", "arguments"}}], arguments JSON', ())

    def to_json(self) -> dict[str, Any]:
        parts = [{"type": "text", "text": text} for text in self.content]
        content = self.content[0] if len(parts) == 1 else parts
        return {**self.model_dump(exclude_unset=True), "content": content}


class _Row(BaseModel):
    """What is read of a row; other keys are ignored."""

    model_config = ConfigDict(extra="allow")

    id: _Str = _must_be(_NAME, "", max_length=NAME_LIMIT, coerce_numbers_to_str=True)
    category: _Str = _must_be(_NAME, "all", max_length=NAME_LIMIT, coerce_numbers_to_str=True)
    prompt: Annotated[list[_Text | _Ids], _Prompts] = _must_be(
        "a text, a list of token ids, or a list of such, none of them empty", ()
    )
    turns: Annotated[list[_Text], *_Decoded] = _must_be("a list of texts, none of them empty", ())
    messages: Annotated[list[Annotated[_Message, _OpenAI]], *_Decoded] = _must_be(
        'a list of {"role", "content"} or {"from", "value"}, at least one', ()
    )
    max_tokens: int | None = _must_be(
        "a whole number above 0", None, ge=1, validation_alias=AliasChoices(*MOST_TOKENS)
    )
    stop: Annotated[list[_Str], _OneOrMore] = _must_be("a text, or a list of texts", ())
    tools: Annotated[list[dict[str, Any]], BeforeValidator(_decoded), _Json] = _must_be(
        "a list of objects", ()
    )
    reasoning_effort: Annotated[Any, _Json] = None
    chat_template_kwargs: _Object = _must_be("an object", {})


_FIELDS: Final = _Message.model_fields | _Row.model_fields
_FIELDS.update(dict.fromkeys(MOST_TOKENS, _FIELDS["max_tokens"]))


def _problem(error: ValidationError) -> str:
    """The first mistake of a row, and what should stand there."""
    first = error.errors()[0]
    place, value = first["loc"], first["input"]
    key = next((str(part) for part in reversed(place) if part in _FIELDS), None)
    if key is None:
        return "a key is no text"
    message = f"message {place[1]}: " if len(place) > 1 and place[0] == "messages" else ""
    if first["type"] == "no_json":
        name = shortened(str(place[-1]), 40)
        why = "NaN, Infinity, half of a surrogate pair, or too many levels"
        return f"{message}{name!r} holds what is no JSON: {why}"
    if first["type"] == "string_unicode" or (isinstance(value, str) and "\0" in value):
        return f"{message}{key!r} holds a NUL or half of a surrogate pair, which is no text"
    return f"{message}{key!r} must be {_FIELDS[key].description}"


def parse_row(
    data: Any, where: str, *, turns: Turns | None = None, name: str = ""
) -> tuple[list[Request], list[str]]:
    """The requests of one row, and the keys of it that nothing reads; ``name`` is its id where it
    has none. Each prompt of a list is one (``ID``, ``ID/1``, ...). Of several turns the first is
    the prompt, or with ``turns`` all each is one (:func:`turn_id`). A conversation is one prompt:
    its messages up to the user's last one, or first one; with ``turns`` all up to each of them.
    Raises WorkloadError."""
    if isinstance(data, WorkloadError):
        raise data
    if not isinstance(data, dict):
        raise WorkloadError(f"{where}: expected an object, not {type(data).__name__} ({FORMATS})")
    if is_batch := isinstance(data.get("body"), dict):  # a line of OpenAI's batch files
        data = {**data["body"], "id": data.get("custom_id"), "category": data.get("category")}
    data = {key: value for key, value in data.items() if value is not None}
    key, *unread = [key for key in PROMPTS if key in data] or [""]
    if not key:
        shown = shortened(", ".join(map(repr, data)) or "none")
        name = "name one by --set requests.column=KEY"
        why = f"no prompt among its keys ({shown}); expected {FORMATS}, or {name}"
        raise WorkloadError(f"{where}: {why}")
    asked = {key if key in ("turns", "prompt") else "messages": data[key]}
    try:
        row = _Row.model_validate({k: v for k, v in data.items() if k not in PROMPTS} | asked)
        conversation = _conversation(row.messages, where, turns) if row.messages else []
    except ValidationError as error:
        raise WorkloadError(f"{where}: {_problem(error)}") from None
    except ValueError as error:  # levels within what pydantic writes
        raise WorkloadError(f"{where}: {key!r}: {error}") from None
    if key == "turns" and turns is None and len(row.turns) > 1:
        choice = "--set requests.turns=all (each a prompt of its own) or =first (the first alone)"
        raise WorkloadError(f"{where}: {len(row.turns)} turns; say {choice}")
    texts = row.turns[: None if turns == "all" else 1] or row.prompt
    prompts = [{"prompt": t} if isinstance(t, str) else {"ids": tuple(t)} for t in texts]
    prompts = prompts or conversation
    template = {"tools": row.tools, "reasoning_effort": row.reasoning_effort}
    request = Request(
        row.id or name or where,
        row.category,
        template={k: v for k, v in template.items() if v} | row.chat_template_kwargs,
        is_plain=is_batch and key == "prompt",  # /v1/completions
        max_new_tokens=row.max_tokens,
        stop=tuple(filter(None, row.stop)),
    )
    ids = [turn_id(request.id, n + 1) for n in range(len(prompts))]
    if row.prompt:  # each on its own
        ids = [f"{request.id}/{n}" if n else request.id for n in range(len(prompts))]
    requests = [replace(request, id=i, **prompt) for i, prompt in zip(ids, prompts, strict=True)]
    return requests, [*unread, *(row.model_extra or ())]


def _conversation(
    messages: Sequence[_Message], where: str, turns: Turns | None
) -> list[dict[str, Any]]:
    """The prompts of a conversation: its messages up to each that the assistant answers. What the
    assistant says before anything else is dropped, as templates refuse it."""
    first = next((n for n, message in enumerate(messages) if message.role != "assistant"), 0)
    messages = messages[first:]
    if not any(message.role == "user" for message in messages):
        raise WorkloadError(f"{where}: no message of a user's")
    asks = [message.role in ("user", "tool") for message in messages] + [False]
    ends = [n for n in range(1, len(asks)) if asks[n - 1] and not asks[n]]
    prompts: list[dict[str, Any]] = []
    for end in ends if turns == "all" else ends[:1] if turns == "first" else ends[-1:]:
        *_, last = said = [message.to_json() for message in messages[:end]]
        if last["role"] == "user" and not any(text.strip() for text in messages[end - 1].content):
            raise WorkloadError(f"{where}: message {first + end - 1} is empty")
        is_text = end == 1 and last == {"role": "user", "content": messages[0].content[0]}
        prompts.append({"prompt": last["content"]} if is_text else {"messages": tuple(said)})
    return prompts


def left_out(problems: Sequence[str], count: int, unit: str, bad_rows: BadRows) -> list[str]:
    """The note on those of ``count`` rows (``unit``: what they are called) that are bad, no note
    without any. Raises WorkloadError where they are more than ``bad_rows`` allows, or all."""
    if not problems:
        return []
    first = "; ".join(shortened(problem, 400) for problem in _first_of(problems))
    counted = f"{len(problems)} of {count} {unit}"
    if len(problems) == count or (bad_rows == "few" and len(problems) > FEW * count):
        skip = "--set requests.bad_rows=skip leaves them out"
        left = "none is left" if len(problems) == count else f"more than a quarter: {skip}"
        raise WorkloadError(f"{first}; {counted} are bad, {left}")
    return [f"{counted} left out: {first}"]


def _first_of(problems: Sequence[str], most: int = 3) -> list[str]:
    """The first problems, ``FILE:ROW: what is wrong``; one that many rows have is there once, with
    the numbers of the first of them."""
    rows: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        where, _, what = problem.partition(": ")
        file, _, row = where.rpartition(":")
        rows.setdefault((file, what), []).append(row)
    lines = []
    for (file, what), numbers in [*rows.items()][:most]:
        more = ", ..." * (len(numbers) > most)
        lines.append(f"{f'{file}:' if file else ''}{', '.join(numbers[:most])}{more}: {what}")
    return lines


def make_workload(
    name: str,
    lines: Iterable[WorkloadRow],
    *,
    turns: Turns | None = None,
    bad_rows: BadRows = "few",
) -> Workload:
    """A workload from lines, with notes on what was left out, called otherwise or not read. A row
    whose id was used before gets a number, ``ID#2``. Raises WorkloadError where there is no
    request, or more lines than ``bad_rows`` allows make none."""
    requests: dict[str, Request] = {}
    bad: list[str] = []
    ignored: Counter[str] = Counter()
    rows = again = 0
    for line in lines:
        rows += 1
        try:
            made, unread = parse_row(line.data, line.where, turns=turns, name=line.name)
        except WorkloadError as problem:
            if bad_rows == "error":
                raise
            bad.append(str(problem))
            continue
        ignored.update(unread)
        first, n = made[0].id, 1
        ids = {request.id: request for request in made}
        while not requests.keys().isdisjoint(ids):  # all of a row get the number
            n += 1
            ids = {f"{first}#{n}{request.id.removeprefix(first)}": request for request in made}
        again += len(made) * (n > 1)
        requests |= {i: replace(of, id=i, source=line.source) for i, of in ids.items()}
    notes = left_out(bad, rows, "rows", bad_rows)
    if not requests:
        raise WorkloadError(f"{name}: the workload is empty (no request in it)")
    if again:
        was = "ids were" if again > 1 else "id was"
        notes.append(f"{again} {was} used before, and got a number (ID#2)")
    if ignored:
        counts = [f"{shortened(k, 40)} in {n} row{'s' * (n > 1)}" for k, n in ignored.most_common()]
        notes.append(f"ignored: {shortened(', '.join(counts), 500)}")
    return Workload(name, tuple(requests.values()), tuple(notes))


def take(workload: Workload, limit: int | None, *, seed: int = 0) -> Workload:
    """``limit`` requests (all when None) from every file and category in proportion (Huntington and
    Hill's method), in the workload's order. They follow from the ids and the seed alone, and a
    larger limit adds to a smaller one's. Raises WorkloadError for a limit below 1."""
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
    return replace(workload, requests=tuple(workload.requests[n] for n in kept))

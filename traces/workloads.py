"""What a workload's lines say: prompts, turns or conversations, as requests; and how a part of a
workload is taken."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from spectune.traces.errors import WorkloadError
from spectune.traces.schema import Request, Workload
from spectune.traces.text import NAME_LIMIT, shortened, unstorable

Turns = Literal["first", "all"]
"""What is made of several turns: the first alone, or each a prompt."""
BadRows = Literal["error", "few", "skip"]
"""What is done about rows that no prompt can be made of: the first is refused, they are left out
unless they are more than :data:`FEW`, or they are left out however many they are."""
FEW: Final = 0.25
"""Share of bad rows beyond which a file is taken for another than was meant."""
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
PROMPTS: Final = ("turns", "prompt", "messages", "conversations", "conversation")
"""Keys that hold what is asked; the first that there is."""
MOST_TOKENS: Final = ("max_completion_tokens", "max_tokens", "max_new_tokens", "output_tokens")
"""Keys of the most tokens to answer with, as OpenAI, vLLM and its benchmark name them."""
ENDING: Final = ("add_generation_prompt", "continue_final_message")
TEMPLATE: Final = ("tools", "documents", "reasoning_effort", *ENDING)
"""What servers hand from a request to its chat template, beside ``chat_template_kwargs``."""
NO_VARIABLES: Final = {
    *("conversation", "messages", "chat_template", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "processor_kwargs"),
}
"""What transformers' ``apply_chat_template`` takes for itself."""
OF_MESSAGES: Final = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
"""What servers hand from a message to the template, beside its role and text."""
READ: Final = {
    *(*PROMPTS, *MOST_TOKENS, *TEMPLATE, "id", "category", "stop", "chat_template_kwargs"),
    *("body", "custom_id", "method", "url"),
}


class Line(NamedTuple):
    """One row of a file: where it stands, its object or why there is none, the id it has unless it
    says another, and the file."""

    where: str
    data: Any
    name: str = ""
    source: str = ""


class UndecidedError(WorkloadError):
    """A row is as it should be, and what is to be made of its turns was not said."""


@dataclass(frozen=True)
class Message:
    """One message of a conversation; ``more``: what else its template reads of it."""

    role: str
    text: str
    more: Mapping[str, Any]


def parse_request(
    data: Any, where: str, *, turns: Turns | None = None, name: str = ""
) -> list[Request]:
    """One object as requests; ``name`` is its id where it has none.

    Of ``turns`` the first is the prompt, or with ``turns`` all each is one (ids ``ID``, ``ID/1``,
    ...), without the model's earlier answers. A conversation is one prompt: its messages up to the
    user's last one, or first one; with ``turns`` all up to each of them. Raises WorkloadError, also
    for several turns where ``turns`` does not say what is to be made of them.
    """
    if isinstance(data, WorkloadError):
        raise data
    if not isinstance(data, dict):
        raise WorkloadError(f"{where}: expected an object, not {type(data).__name__} ({FORMATS})")
    is_plain = False
    if isinstance(data.get("body"), dict):  # a line of OpenAI's batch files
        named = {"id": data.get("custom_id", data.get("id")), "category": data.get("category")}
        data = {**data["body"], **named}
        is_plain = "prompt" in data and "messages" not in data  # /v1/completions
    given = data.get("id") if data.get("id") is not None else name or where
    if not isinstance(given, (str, int)) or isinstance(given, bool):
        raise WorkloadError(f"{where}: 'id' must be a string")
    own, category = str(given), str(data["category"]) if data.get("category") is not None else "all"
    template = _template(data, where, turns)
    bare = Request(
        own,
        category,
        ("",),
        template=json.dumps(template) if template else "",
        is_plain=is_plain,
        max_new_tokens=_most_tokens(data, where),
        stop=_stop(data, where),
    )
    made = _requests(bare, data, where, turns)
    for text in (own, category, *bare.stop, *(text for r in made for text in r.turns)):
        if problem := unstorable(text):
            raise WorkloadError(f"{where}: {problem}")
    for key, text in (("id", own), ("category", category)):
        if len(text) > NAME_LIMIT:
            raise WorkloadError(
                f"{where}: {key!r} has {len(text)} characters, more than {NAME_LIMIT}"
            )
    return [replace(r, id=f"{own}/{i}" if i else own) for i, r in enumerate(made)]


def _requests(
    bare: Request, data: Mapping[str, Any], where: str, turns: Turns | None
) -> list[Request]:
    """The requests that an object makes, with the id of the first; no roles where it is one text of
    the user's."""
    key = next((key for key in PROMPTS if key in data), None)
    if key is None:
        shown = ", ".join(repr(k) for k in data) or "none"
        raise WorkloadError(
            f"{where}: no prompt among its keys ({shortened(shown)}); expected {FORMATS}, or name "
            "one by --column"
        )
    if key == "turns":
        return [replace(bare, turns=(text,)) for text in _turns(data[key], where, turns)]
    if key == "prompt":
        return [
            replace(bare, ids=prompt)
            if isinstance(prompt, tuple)
            else replace(bare, turns=(prompt,))
            for prompt in _completions(data[key], where)
        ]
    said = _conversation(data[key], where, key)
    asked = [
        n + 1
        for n, message in enumerate(said)
        if message.role == "user"
        or (message.role == "tool" and [m.role for m in said[n + 1 : n + 2]] != ["tool"])
    ]
    if not any(message.role == "user" for message in said):
        raise WorkloadError(f"{where}: {key!r} has no message of a user's")
    if data.get("continue_final_message") and turns is None:
        ends = [len(said)]
    else:
        ends = asked if turns == "all" else asked[:1] if turns == "first" else asked[-1:]
    made = []
    for end in ends:
        if said[end - 1].role == "user" and not said[end - 1].text.strip():
            raise WorkloadError(f"{where}: message {end - 1} is empty")
        until = said[:end]
        roles = () if end == 1 else tuple(m.role for m in until)
        more = tuple(json.dumps(m.more) if m.more else "" for m in until)
        texts = tuple(m.text for m in until)
        made.append(replace(bare, turns=texts, roles=roles, messages=more if any(more) else ()))
    return made


def _turns(texts: Any, where: str, turns: Turns | None) -> list[str]:
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise WorkloadError(f"{where}: 'turns' must be a list of at least one string")
    if turns is None and len(texts) > 1:
        raise UndecidedError(
            f"{where}: {len(texts)} turns; say --all-turns (each a prompt of its own) or "
            "--first-turn (the first alone)"
        )
    taken: list[str] = texts if turns == "all" else texts[:1]
    for i, text in enumerate(taken):
        if not text.strip():
            raise WorkloadError(f"{where}: turn {i} is empty")
    return taken


def _completions(prompt: Any, where: str) -> list[str | tuple[int, ...]]:
    """The prompts of ``prompt``, as /v1/completions takes it: a text, token ids, or several."""
    several = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    found: list[str | tuple[int, ...]] = []
    for one in several:
        if _is_ids(one):
            found.append(tuple(one))
        elif not isinstance(one, str):
            raise WorkloadError(
                f"{where}: 'prompt' must be a string, a list of token ids, or a list of such"
            )
        elif not one.strip():
            raise WorkloadError(f"{where}: the prompt is empty")
        else:
            found.append(one)
    if not found:
        raise WorkloadError(f"{where}: the prompt is empty")
    return found


def _is_ids(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in prompt)
    )


def _most_tokens(data: Mapping[str, Any], where: str) -> int | None:
    key = next((key for key in MOST_TOKENS if data.get(key) is not None), None)
    if key is None:
        return None
    most = data[key]
    if isinstance(most, str) and most.isdecimal() and len(most) < 10:  # a table's
        most = int(most)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise WorkloadError(f"{where}: {key!r} must be a whole number above 0")
    return min(most, (1 << 31) - 1)


def _stop(data: Mapping[str, Any], where: str) -> tuple[str, ...]:
    stop = data.get("stop")
    stop = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise WorkloadError(f"{where}: 'stop' must be a string, or a list of strings")
    return tuple(text for text in stop if text)


def _template(data: Mapping[str, Any], where: str, turns: Turns | None) -> dict[str, Any]:
    """What an object hands to its chat template."""
    found = {key: data[key] for key in TEMPLATE if data.get(key) is not None}
    also = data.get("chat_template_kwargs") or {}
    for key, value in (*found.items(), ("chat_template_kwargs", also)):
        if isinstance(value, str) and value[:1] in ("[", "{"):  # a table's
            try:
                value = json.loads(value)
            except ValueError:
                raise WorkloadError(f"{where}: {key!r} is not JSON") from None
        if key == "chat_template_kwargs":
            also = value
        else:
            found[key] = value
    if not isinstance(also, dict) or (wrong := sorted(NO_VARIABLES & also.keys())):
        why = "must be an object" if not isinstance(also, dict) else f"cannot say {wrong[0]!r}"
        raise WorkloadError(f"{where}: 'chat_template_kwargs' {why}")
    for key in ("tools", "documents"):
        given = found.get(key, [])
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            raise WorkloadError(f"{where}: {key!r} must be a list of objects")
    found |= also
    return {key: v for key, v in found.items() if not (turns and key in ENDING)}


def _conversation(raw: Any, where: str, key: str) -> list[Message]:
    """The messages, from the first that is no answer on."""
    if not isinstance(raw, list) or not raw:
        raise WorkloadError(f"{where}: {key!r} must be a list of at least one message")
    said: list[Message] = []
    for n, message in enumerate(raw):
        theirs = isinstance(message, dict) and "from" in message
        speaker, content = ("from", "value") if theirs else ("role", "content")
        calls = isinstance(message, dict) and not theirs and message.get("tool_calls")
        if (
            not isinstance(message, dict)
            or speaker not in message
            or (content not in message and not calls)
        ):
            raise WorkloadError(
                f'{where}: message {n} must be {{"role", "content"}} or {{"from", "value"}}'
            )
        role = ROLES.get(message[speaker]) if isinstance(message[speaker], str) else None
        role = "tool" if not theirs and message[speaker] == "tool" else role
        if role is None:
            given = shortened(repr(message[speaker]), 40)
            raise WorkloadError(
                f"{where}: message {n}: {speaker!r} is {given}; known are {', '.join(ROLES)}, tool"
            )
        text = message.get(content)
        parts = _parts("" if text is None and calls else text, f"{where}: message {n}")
        more: dict[str, Any] = {}
        if not theirs:
            more = {k: message[k] for k in OF_MESSAGES if message.get(k) is not None}
        if calls:
            more["tool_calls"] = _calls(calls, f"{where}: message {n}")
        if len(parts) > 1:
            more["content"] = parts
        if said or role != "assistant":
            said.append(Message(role, "\n".join(parts), more))
    return said


def _parts(content: Any, where: str) -> list[str]:
    """A message's texts: a string, or OpenAI's list of parts, all of them text."""
    parts = content if isinstance(content, list) else [content]
    found = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise WorkloadError(f"{where} is no text; pictures and sound are not read")
    return texts


def _calls(calls: Any, where: str) -> list[Any]:
    """An assistant's calls of tools, their arguments as objects, as servers hand them to
    templates."""
    try:
        made = []
        for call in calls:
            asked = call["function"]["arguments"]
            asked = (json.loads(asked) if asked else {}) if isinstance(asked, str) else asked
            made.append({**call, "function": {**call["function"], "arguments": asked}})
        return made
    except (TypeError, KeyError, ValueError):
        raise WorkloadError(
            f'{where}: its tool_calls must be {{"function": {{"name", "arguments"}}}}, the '
            "arguments an object of JSON"
        ) from None


def unread(data: Any) -> set[str]:
    """Keys of a row, and of its messages, that say something and that nothing reads."""
    if not isinstance(data, dict):
        return set()
    body = data.get("body")
    rows = [data, body] if isinstance(body, dict) else [data]
    found = {str(k) for row in rows for k, v in row.items() if k not in READ and v is not None}
    inner = rows[-1]
    held = [key for key in PROMPTS if key in inner]
    said = inner.get(held[0]) if held else None
    for message in said if isinstance(said, list) else ():
        if isinstance(message, dict):
            known = ("from", "value") if "from" in message else ("role", "content", *OF_MESSAGES)
            found |= {f"{held[0]}[].{k}" for k, v in message.items() if k not in known and v}
    return found.union(held[1:])


def make_workload(
    name: str,
    lines: Iterable[Line],
    *,
    turns: Turns | None = None,
    bad_rows: BadRows = "few",
) -> Workload:
    """A workload from lines, with notes on what was left out, called otherwise or not read. An id
    that was used before gets a number, ``ID#2``.

    Raises WorkloadError where there is no request, or more lines than ``bad_rows`` allows make
    none.
    """
    requests: dict[str, Request] = {}
    bad: list[WorkloadError] = []
    ignored: Counter[str] = Counter()
    rows, again = 0, 0
    for where, data, own, source in lines:
        rows += 1
        try:
            made = parse_request(data, where, turns=turns, name=own)
        except UndecidedError:
            raise
        except WorkloadError as problem:
            if bad_rows == "error":
                raise
            bad.append(problem)
            continue
        ignored.update(unread(data))
        for request in made:
            free, n = request.id, 1
            while free in requests:
                n += 1
                free = f"{request.id}#{n}"
            again += n > 1
            requests[free] = replace(request, id=free, source=source)
    notes = _left_out(bad, rows, bad_rows, empty=not requests)
    if not requests:
        raise WorkloadError(f"{name}: the workload is empty (no request in it)")
    if again:
        was = "ids were" if again > 1 else "id was"
        notes.append(f"{again} {was} used before, and got a number (ID#2)")
    if ignored:
        most = sorted(ignored.items(), key=lambda item: (-item[1], item[0]))
        counted = (f"{shortened(key, 40)} in {n} row{'s' * (n > 1)}" for key, n in most)
        notes.append(f"ignored: {shortened(', '.join(counted), 500)}")
    return Workload(name, tuple(requests.values()), tuple(notes))


def _left_out(
    bad: Sequence[WorkloadError], rows: int, bad_rows: BadRows, *, empty: bool
) -> list[str]:
    """What is said of bad rows that are left out. Raises WorkloadError where they are too many."""
    if not bad:
        return []
    if rows == 1:
        raise bad[0]
    first = "; ".join(shortened(str(problem), 400) for problem in bad[:3])
    counted = f"{len(bad)} of {rows} rows"
    if empty:
        raise WorkloadError(f"{first}; {counted} are bad, and nothing is left")
    if bad_rows == "few" and len(bad) > FEW * rows:
        raise WorkloadError(
            f"{first}; {counted} are bad, more than a quarter: --bad-rows skip leaves them out"
        )
    return [f"{counted} left out: {first}"]


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
    return replace(workload, requests=tuple(workload.requests[n] for n in kept))

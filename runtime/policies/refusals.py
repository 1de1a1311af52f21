"""What is wrong with a document, in one line: what, where, and what to write instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

VALUES_LIMIT = 30_000
"""Most values in a document; the largest static tree has half as many."""
NESTING_LIMIT = 16
"""Deepest nesting of a document; policies need four levels."""
TEXT_LIMIT = 256
"""Longest key or text in a document, in characters."""
NUMBER_LIMIT = 2**128
"""Whole numbers in a document lie below it in size."""
MESSAGE_LIMIT = 400
"""Most characters of what is said about a document, beside where it stood."""
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a value raises that has not the form it should have."""


def refuse_excess(data: Any) -> None:
    """Raises ValueError for a value larger than any policy, before anything walks through it: too
    many values, too deeply nested, too long a text, one that cannot be printed, or too large a
    number."""
    level, count = [data], 0
    for _ in range(NESTING_LIMIT + 1):
        count += len(level)
        if count > VALUES_LIMIT:
            raise ValueError(f"more than {VALUES_LIMIT} values are no policy")
        inner: list[Any] = []
        for value in level:
            _refuse_excess_of(value)
            if isinstance(value, Mapping):
                inner += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple)):
                inner += value
        if not inner:
            return
        level = inner
    raise ValueError(f"values nested more than {NESTING_LIMIT} deep are no policy")


def _refuse_excess_of(value: Any) -> None:
    if isinstance(value, str):
        if len(value) > TEXT_LIMIT:
            raise ValueError(
                f"a text of {len(value)} characters is too long; the limit is {TEXT_LIMIT} (it "
                f"begins {value[:20]!r})"
            )
        if not value.isprintable():
            raise ValueError(f"the text {value!a} has characters that cannot be printed")
    elif isinstance(value, int) and abs(value) >= NUMBER_LIMIT:
        raise ValueError(f"a whole number of {value.bit_length()} bits is too large")


Blocks = Mapping[str, Mapping[str, type[BaseModel]]]
"""The blocks that each key of a document may hold, by kind; under "" where a key has but one."""


def explain(error: ValidationError, root: type[BaseModel], blocks: Blocks) -> str:
    """The first problem of a document of type ``root``."""
    first = error.errors()[0]
    path = [str(p) for p in first["loc"]]
    block = root
    for key, part in zip(["", *path], path[:-1], strict=False):
        block = blocks.get(part, {}).get("", blocks.get(key, {}).get(part, block))
    shown = ".".join(
        p for key, p in zip(["", *path], path, strict=False) if p not in blocks.get(key, {})
    )
    if first["type"] == "extra_forbidden":
        known = sorted(block.model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {shown!r}; {hint}"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return f"{shown}.kind must be one of: {', '.join(blocks.get(path[-1], {}))}"
    message = first["msg"].removeprefix("Value error, ")
    value = first.get("input")
    given = f" (given: {_shown(value)})" if not isinstance(value, Mapping) else ""
    return f"{shown}: {message}{given}" if shown else f"{message}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."

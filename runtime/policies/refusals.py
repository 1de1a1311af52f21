"""What is wrong with a document, in one line: what, where, and what to write instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
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
            if isinstance(value, Mapping):
                inner += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple)):
                inner += value
            elif isinstance(value, str) and len(value) > TEXT_LIMIT:
                raise ValueError(
                    f"a text of {len(value)} characters is too long; the limit is {TEXT_LIMIT} (it "
                    f"begins {value[:20]!r})"
                )
            elif isinstance(value, str) and not value.isprintable():
                raise ValueError(f"the text {value!a} has characters that cannot be printed")
            elif isinstance(value, int) and abs(value) >= NUMBER_LIMIT:
                raise ValueError(f"a whole number of {value.bit_length()} bits is too large")
        if not inner:
            return
        level = inner
    raise ValueError(f"values nested more than {NESTING_LIMIT} deep are no policy")


Blocks = Mapping[str, Mapping[str, type[BaseModel]]]
"""The blocks that each key of a document may hold, by kind."""


def explain(error: ValidationError, root: type[BaseModel], blocks: Blocks) -> str:
    """The first problem of a document of type ``root``."""
    first = error.errors()[0]
    path = [str(p) for p in first["loc"]]
    block, kinds = root, blocks.get(path[0], {}) if path else {}
    if len(path) > 1 and len(kinds) == 1:
        (block,) = kinds.values()
    elif len(path) > 1 and path[1] in kinds:  # pydantic names the kind beside the key
        block = kinds[path.pop(1)]
    shown = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = sorted(block.model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {shown!r}; {hint}"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return f"{shown}.kind must be one of: {', '.join(kinds)}"
    message, value = first["msg"].removeprefix("Value error, "), first.get("input")
    if not shown:
        return message
    text = json.dumps(value, default=str)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{shown}: {message}" + ("" if isinstance(value, Mapping) else f" (given: {text})")


def lacking(error: Exception) -> str:
    """What the reader of a stored document raised, in words."""
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def stored_count(document: Mapping[str, Any], name: str, has: int | None = None) -> int:
    """A whole number of an artifact's document; ``has``: what the artifact's arrays have. Raises
    ValueError where it is none, or another, and KeyError where it is missing."""
    count = document[name]
    if type(count) is not int:
        raise ValueError(f"{name} must be a whole number, not {count!r}")
    if has is not None and count != has:
        raise ValueError(f"its document says {name} {count}, its arrays have {has}")
    return count


def stored_numbers(
    arrays: Mapping[str, npt.NDArray[Any]], name: str, kinds: str = "fiu"
) -> npt.NDArray[Any]:
    """An artifact's array, which anybody may have written. Raises ValueError where it is missing,
    of another kind than ``kinds`` (numpy's letters), or not of finite numbers."""
    if name not in arrays:
        raise ValueError(f"it lacks {name}")
    array = np.asarray(arrays[name])
    if array.dtype.kind not in kinds or not (np.abs(array) <= np.finfo(np.float32).max).all():
        wanted = "finite" if "f" in kinds else "whole"
        raise ValueError(f"{name} must hold {wanted} numbers, not these of {array.dtype}")
    return array

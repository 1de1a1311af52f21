"""What is wrong with a document, in one line: what, where, and what to write instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pydantic import ValidationError

MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a value raises that has not the form it should have."""


def explain(error: ValidationError, kinds: Mapping[str, Collection[str]]) -> str:
    """The first problem of a document. ``kinds``: those of the blocks that each key may hold."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if len(path) > 1 and path[1] in kinds.get(path[0], ()):
        del path[1]  # pydantic names the kind beside the key
    place, value = ".".join(path), first["input"]
    if first["type"].startswith("union_tag"):
        return f"{place}.kind must be one of: {', '.join(kinds[place])}"
    message = first["msg"].removeprefix("Value error, ")
    if isinstance(value, Mapping):
        return f"{place}: {message}" if place else message
    return f"{place}: {message} (given: {value!r:.80})"


def lacking(error: Exception) -> str:
    """What the reader of a stored document raised, in words."""
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)

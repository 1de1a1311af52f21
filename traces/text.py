"""Text from elsewhere: what of it can be stored, and how it is shown."""

from __future__ import annotations

import json
import re
from typing import Any

NAME_LIMIT = 500
"""Characters of an id, a category or a name: what PostgreSQL can index, whatever they are."""

LINE_LIMIT = 2_000
"""Characters of the longest line that a message takes."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

# What moves a terminal's cursor, changes its state or the order of what it shows, and what no
# encoding takes; a new line and a tab do not.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def unstorable(text: str) -> str | None:
    """What in a text no database keeps: a NUL character, or half of a surrogate pair; None when
    there is nothing."""
    if "\0" in text:
        return "a NUL character (\\u0000), which is no text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair (\\ud800 to \\udfff alone), which is no text"
    return None


def check_name(name: str, what: str, error: type[Exception]) -> str:
    """The name. Raises ``error`` where no ``what`` can have it."""
    if not _NAME.fullmatch(name):
        raise error(
            f"{shortened(name)!r} cannot name a {what}; use letters, digits, dots, dashes and "
            "underscores, at most 100"
        )
    return name


def printable(text: str) -> str:
    """The text with its control characters spelled out (``\\x1b``), so that showing it does nothing
    but show it."""
    return _CONTROL.sub(
        lambda found: (
            f"\\x{ord(found[0]):02x}" if found[0] < "\u0100" else f"\\u{ord(found[0]):04x}"
        ),
        text,
    )


def json_line(data: Any) -> str:
    """One line of JSON, other alphabets as they are, control characters of every kind escaped."""
    return _CONTROL.sub(
        lambda found: f"\\u{ord(found[0]):04x}", json.dumps(data, ensure_ascii=False)
    )


def shortened(text: str, limit: int = 160) -> str:
    """The text, or its beginning and end where it is long: in a message what is wrong stands first,
    the remedy last."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 5]} ... {text[-end:]}"


def one_line(text: str, limit: int = LINE_LIMIT) -> str:
    """The text as one printable line of at most ``limit`` characters (:func:`printable`,
    :func:`shortened`)."""
    return shortened(printable(" ".join(text.split())), limit)

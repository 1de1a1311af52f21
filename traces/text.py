"""Text from elsewhere: names, and how it is shown."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

NAME_LIMIT = 500
"""Characters of an id or a category that PostgreSQL can index, whatever they are."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160), *range(0xD800, 0xE000)], "�")
"""What acts on a terminal, or cannot be written to it; a new line and a tab stay."""


def check_name(name: str, what: str, error: type[Exception]) -> str:
    """The name. Raises ``error`` where no ``what`` can have it."""
    if not _NAME.fullmatch(name):
        raise error(
            f"{shortened(name)!r} cannot name a {what}; use letters, digits, dots, dashes and "
            "underscores, at most 100"
        )
    return name


def printable(text: str) -> str:
    """The text without control characters, so that showing it does nothing but show it."""
    return text.translate(_CONTROL)


def shortened(text: str, limit: int = 160) -> str:
    """The text, or its beginning and end where it is long: in a message what is wrong stands first,
    the remedy last."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 5]} ... {text[-end:]}"


def one_line(text: str, limit: int = 2_000) -> str:
    """The text as one printable line of at most ``limit`` characters (:func:`shortened`)."""
    return shortened(printable(" ".join(text.split())), limit)


def without_credentials(url: str) -> str:
    """A URL as it is printed and stored: without the name and the password before its host."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        _ = parts.port  # of what is no port a password may be a part
    except ValueError:
        return f"***@{url.rpartition('@')[2]}" if "@" in url else url
    host = parts.netloc.rpartition("@")[2]
    return url if host == parts.netloc else parts._replace(netloc=host).geturl()

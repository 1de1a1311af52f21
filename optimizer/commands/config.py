"""`spectune.toml`: what options are where nobody types them.

What is typed wins over the environment, which wins over the file. A value is checked by the option
that it is for, and an error names file and key.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

F = TypeVar("F", bound=Callable[..., Any])
FILE: Final = "spectune.toml"
_META: Final = "spectune.config"
KEYS: Final = (
    *("pair", "workload", "column", "overlong", "bad_rows", "database"),
    *("deployment", "budget", "device", "dtype", "threads"),
)
SAMPLING: Final = ("temperature", "top_k", "top_p", "seed", "verifier", "max_new_tokens", "stop")
_PATHS: Final = ("pair", "workload", "database")
_LISTS: Final = ("workload", "stop")


@dataclass(frozen=True)
class Config:
    """A file, and its values as text by key (``temperature`` for ``sampling.temperature``)."""

    file: Path
    values: Mapping[str, str | list[str]]


class Configured(click.Option):
    """An option whose default may stand in the file, under ``key``."""

    def __init__(self, *declared: Any, key: str, **how: Any) -> None:
        super().__init__(*declared, **how)
        self.key = key

    def get_default(self, ctx: click.Context, call: bool = True) -> Any:
        """The file's value if it has one."""
        config = config_of(ctx)
        if config is None or self.key not in config.values:
            return super().get_default(ctx, call=call)
        return config.values[self.key]

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """The value, checked. Raises ConfigError for one of the file's."""
        with blamed(ctx, self.key, ctx.get_parameter_source(self.name or "")):
            return super().process_value(ctx, value)


def option(
    names: str, help: str | None = None, type: Any = None, *, key: str | None = None, **how: Any
) -> Callable[[F], F]:
    """``click.option``, its names apart by spaces; with a ``key`` its default may stand in the
    file."""
    if key is not None:
        how |= {"cls": Configured, "key": key}
    return click.option(*names.split(), help=help, type=type, **how)


def flag(names: str, help: str) -> Callable[[F], F]:
    """An option without a value."""
    return option(names, help, is_flag=True)


@contextmanager
def blamed(ctx: click.Context, key: str, source: ParameterSource | None) -> Iterator[None]:
    """Names file and key in what is refused of a value that stands there. Raises ConfigError."""
    from spectune.traces.errors import ConfigError, SpectuneError

    try:
        yield
    except (click.BadParameter, SpectuneError) as error:
        config = config_of(ctx)
        if source is not ParameterSource.DEFAULT or config is None or key not in config.values:
            raise
        said = error.message if isinstance(error, click.BadParameter) else str(error)
        raise ConfigError(f"{config.file}: {_spelled(key)}: {said}") from None


def use_config(ctx: click.Context, named: str | None) -> Config | None:
    """Reads the file named, or the working folder's if it is there, for the options of ``ctx`` and
    its commands. Raises ConfigError."""
    if named is None and not os.path.exists(FILE):
        return None
    ctx.meta[_META] = found = read_config(Path(named or FILE))
    return found


def config_of(ctx: click.Context) -> Config | None:
    """The file that was read for a command; None where there is none."""
    found: Config | None = ctx.meta.get(_META)
    return found


def is_given(name: str) -> bool:
    """Whether an option was typed, or stands in the environment or the file."""
    ctx = click.get_current_context()
    config = config_of(ctx)
    typed = ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    return typed or (config is not None and name in config.values)


def read_config(file: Path) -> Config:
    """A file's values. Raises ConfigError for what is missing, no TOML, or has a key there is none
    of."""
    from spectune.traces.errors import ConfigError
    from spectune.traces.files import read_text

    text = read_text(file, str(file), ConfigError)
    try:
        plain = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None
    sampling = plain.pop("sampling", {})
    if not isinstance(sampling, dict):
        raise ConfigError(
            f"{file}: sampling: a table is expected: [sampling], its keys on lines of their own"
        )
    values = {}
    for table, known in ((plain, KEYS), (sampling, SAMPLING)):
        for key, value in table.items():
            if key not in known:
                raise ConfigError(f"{file}: {_unknown(key, known)}")
            values[key] = _value(file, key, value)
    return Config(file, values)


def _unknown(key: str, known: tuple[str, ...]) -> str:
    every = {name: _spelled(name) for name in (*KEYS, *SAMPLING)}
    near = get_close_matches(key, known, n=1) or get_close_matches(key, every, n=1)
    table = "sampling." if known is SAMPLING else ""
    hint = (
        f"did you mean {every[near[0]]!r}?" if near else f"known keys: {', '.join(every.values())}"
    )
    return f"unknown key {table + key!r}; {hint}"


def _spelled(key: str) -> str:
    """A key with the table that it stands in."""
    return f"sampling.{key}" if key in SAMPLING else key


def _value(file: Path, key: str, value: Any) -> Any:
    """A value as text, or a list of texts; paths as seen from the working folder. Raises
    ConfigError."""
    from spectune.traces.errors import ConfigError

    is_list, many = isinstance(value, list), key in _LISTS
    items = value if is_list else [value]
    if not all(isinstance(item, (str, int, float)) for item in items) or (is_list and not many):
        kinds = "a text or a list of texts" if many else "a text or a number"
        raise ConfigError(f"{file}: {_spelled(key)}: {kinds} is expected")
    texts = [_from(file.parent, str(item)) if key in _PATHS else str(item) for item in items]
    return texts if many else texts[0]


def _from(folder: Path, name: str) -> str:
    """A path as seen from the working folder; ``demo`` and URLs as they are."""
    return name if name == "demo" or ":" in name else str(folder / name)

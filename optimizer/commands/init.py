"""`init`: a spectune.toml to begin with."""

from __future__ import annotations

import json
import os
from pathlib import Path

from spectune.optimizer.commands.common import Talk, write_text
from spectune.optimizer.commands.results import Result
from spectune.options import Option, options_of
from spectune.runtime.pair import read_pair
from spectune.settings import File, Init
from spectune.traces.errors import ConfigError

HEAD = """\
# What spectune's options are for commands and Python calls in this folder. What is typed wins over
# the environment, which wins over this file. Paths are relative to this file.
"""


def _line(name: str, option: Option) -> str:
    """A key that is not said yet, its default or a value for it, and its help."""
    values = {"N": 1, "NUMBER": 1.0, "TIME": "1s", "true|false": True}
    value = option.default_text if option.kind.metavar == "TIME" else option.default
    if value in (None, "", ()):
        value = values.get(option.kind.metavar, option.kind.metavar.split("|")[0])
    value = [value] if option.kind.many else value
    return f"# {name} = {json.dumps(value)}".ljust(34) + f"# {option.field.description}"


def template(pair: str | None) -> str:
    """The file, with every key there is."""
    lines, table = [HEAD], ""
    for key, option in options_of(File).items():
        group, _, name = key.rpartition(".")
        if group != table:
            table = group
            lines.append(f"\n[{group}]")
        if key == "pair" and pair is not None:
            lines.append(
                f"pair = {json.dumps(pair, ensure_ascii=False)}".replace("\x7f", "\\u007f")
            )
        elif key != "drafts":
            lines.append(_line(name, option))
    return "\n".join(lines) + "\n"


def init(s: Init, talk: Talk) -> Result:
    file = Path(s.out)
    if os.path.exists(file) and not s.force:
        raise ConfigError(f"{file} exists already; --force replaces it")
    pair = s.pair
    if pair is not None:
        read_pair(pair).check()
        pair = pair if pair == "demo" else os.path.relpath(pair, file.parent)
    write_text(str(file), [template(pair)])
    hint = "" if pair else "; say in it which pair is meant"
    return Result(f"{file} is written{hint}", {"config": str(file)})

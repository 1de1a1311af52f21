"""`init`: a spectune.toml to begin with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

import click

from spectune.optimizer.commands.config import FILE, flag, option
from spectune.optimizer.commands.outputs import write_text
from spectune.optimizer.commands.printing import Command, emit

TEMPLATE: Final = """\
# What spectune's options are for commands run in this folder. What is typed wins over the
# environment, which wins over this file. Paths are relative to this file.

{pair}
# workload = "chats.jsonl"      # or several: ["chats.jsonl", "code.jsonl"]
# column = "prompt"             # of tables and JSON lines: what holds the prompts
# overlong = "error"            # prompts beyond the context: or "skip", "truncate"
# bad_rows = "few"              # rows without a prompt: few (left out), error, skip
# database = "spectune.db"      # a file, or postgresql://user@host/name
# deployment = "default"        # each has one policy in force
# budget = "80s"                # how long tune executes
# device = "auto"               # cpu, cuda
# dtype = "auto"                # float64, float32, bfloat16, float16
# threads = 1                   # of the CPU

[sampling]                      # what it is served with is what it should be tuned for
# temperature = 0.0
# top_k = 0                     # 0: off
# top_p = 1.0                   # 1: off
# seed = 0
# verifier = "coupled"          # or "rejection"
# max_new_tokens = 128
# stop = ["END"]
"""


@click.command(cls=Command)
@option("--pair", "'demo', or a pair file: written into it.")
@flag("--force", "Replace a file that is there.")
@click.pass_context
def init(ctx: click.Context, pair: str | None, force: bool) -> None:
    """Write a spectune.toml with comments into the working folder, or where --config says.

    \b
    Example:  cli.py init --pair pair.json
    """
    from spectune.traces.errors import ConfigError

    file = Path(ctx.find_root().params["config"] or FILE)
    if os.path.exists(file) and not force:
        raise ConfigError(f"{file} exists already; --force replaces it")
    line = '# pair = "pair.json"            # or "demo", the pair that ships'
    if pair is not None:
        from spectune.runtime.pair import read_pair

        read_pair(pair).check()
        named = pair if pair == "demo" else os.path.relpath(pair, file.parent)
        line = f"pair = {json.dumps(named, ensure_ascii=False)}".replace("\x7f", "\\u007f")
    write_text(str(file), [TEMPLATE.format(pair=line)])
    told = f"{file} is written" + ("" if pair else "; say in it which pair is meant")
    emit({"config": str(file)}, told)

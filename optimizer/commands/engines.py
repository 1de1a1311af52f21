"""`engines`: what each engine can do, and how to start one that spectune follows."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from spectune.db.urls import parse_url, shown
from spectune.engines.abilities import ENGINES
from spectune.engines.vllm.command import server_arguments, short_draft
from spectune.optimizer.commands.common import Talk, next_command, pair_of
from spectune.optimizer.commands.results import Result, Table, listed
from spectune.settings import Engines, Follow

NEEDED = (
    "# A server that you start by a command of your own needs SPECTUNE_FOLDER and --scheduler-cls "
    "alone. The rest of this one: --speculative-config names every number of draft tokens, as vLLM "
    "captures graphs for those; --max-num-seqs, up to which it names them; --generation-config "
    "vllm, so that requests alone say how they are sampled."
)
BESIDE = "# Beside it, as the same user:"


def engines(s: Engines, talk: Talk) -> Result:
    if s.engine is not None:
        return _vllm(s, talk)
    rows: list[dict[str, Any]] = [
        {
            "engine": e.name,
            "installed": e.installed,
            "tested": list(e.versions),
            "runs": e.policies,
            "by_load": e.by_load,
            "trees": e.trees,
            "new_policy": e.swap,
        }
        for e in ENGINES.values()
    ]
    shown_rows = []
    for row, e in zip(rows, ENGINES.values(), strict=True):
        of = "" if e.name in e.packages else f"{e.packages[0]} "  # whose versions these are
        installed, tested = row["installed"], f"{of}{', '.join(e.versions)}"
        here = f"{of}{installed}" if installed else "no"
        shown_rows.append({**row, "installed": here, "tested": tested})
    columns = ("engine", "installed", "tested", "runs", "new_policy")
    return listed("engines", rows, Table(shown_rows, columns, "engines"))


def _vllm(s: Engines, talk: Talk) -> Result:
    """The command line of its server, and that of what follows it."""
    spec = pair_of(s)
    arguments = server_arguments(
        spec, draft=s.draft, gamma=s.gamma, most=s.gamma_max, max_num_seqs=s.max_num_seqs
    )
    if line := short_draft(spec, s.draft or spec.draft_names[0]):
        talk.tell(line)
    folder = shlex.quote(str(Path(s.folder).absolute()))
    serve = f"mkdir -p -m 700 {folder} && SPECTUNE_FOLDER={folder} {shlex.join(arguments)}"
    if "***" in shown(parse_url(s.db)):
        talk.tell("set SPECTUNE_DB first: the URL of the database holds a password")
        follow = f"spectune follow {folder}"
    else:
        follow = next_command(s, ["follow", str(Path(s.folder).absolute())], Follow, {"folder"})
    data = {"pair": spec.id, "arguments": list(arguments), "serve": serve, "follow": follow}
    return Result("\n".join((NEEDED, serve, BESIDE, follow)), data)

"""`engines`: what each engine can do, and how to start one that spectune records and steers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from spectune.db.urls import parse_url, shown
from spectune.engines.abilities import ENGINES
from spectune.engines.vllm.command import line_of, server_arguments
from spectune.optimizer.commands.results import Result, Table, listed
from spectune.optimizer.commands.session import Talk, pair_of
from spectune.settings import Engines
from spectune.traces.errors import PairError


def engines(s: Engines, talk: Talk) -> Result:
    if s.engine is not None:
        return _vllm(s, talk)
    rows: list[dict[str, Any]] = [
        {
            "engine": e.name,
            "installed": e.installed,
            "tested": list(e.versions),
            "runs": e.policies,
            "by_batch": e.by_batch,
            "trees": e.trees,
            "batches": e.batches,
            "new_policy": e.swap,
        }
        for e in ENGINES.values()
    ]
    shown_rows = [{**row, "installed": row["installed"] or "no"} for row in rows]
    columns = ("engine", "installed", "tested", "runs", "new_policy")
    return listed("engines", rows, Table(shown_rows, columns, "engines"))


def _vllm(s: Engines, talk: Talk) -> Result:
    """The command line of its server."""
    spec = pair_of(s)
    if s.pair is None or s.typed("target", "drafts"):
        raise PairError("the server reads its pair from a file; write a pair file for --pair")
    environment = {
        "SPECTUNE_DB": _database(s.db, talk),
        "SPECTUNE_PAIR": s.pair if s.pair == "demo" else str(Path(s.pair).absolute()),
        "SPECTUNE_DEPLOYMENT": s.deployment,
    }
    arguments = server_arguments(
        spec, draft=s.draft, gamma=s.gamma, most=s.gamma_max, max_num_seqs=s.max_num_seqs
    )
    line = line_of(environment, arguments)
    data = {"pair": spec.id, "environment": environment, "arguments": list(arguments)}
    return Result(line, {**data, "line": line})


def _database(text: str, talk: Talk) -> str:
    """The database as a server anywhere on this machine reaches it; where its URL holds a password,
    the variable that is to hold it."""
    url = parse_url(text)
    if url.get_backend_name() == "sqlite":
        return str(Path(str(url.database)).absolute())
    if "***" not in shown(url):
        return text
    if os.environ.get("SPECTUNE_DB") != text:
        talk.tell(f"set SPECTUNE_DB first, with the password: export SPECTUNE_DB='{shown(url)}'")
    return "$SPECTUNE_DB"

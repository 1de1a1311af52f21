"""`engines`: what each engine can do, and how to start one that spectune records and steers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from spectune.optimizer.commands.shared import Whole, emit, pair_options, pair_spec, with_json


@click.group(invoke_without_command=True)
@with_json
def engines(ctx: click.Context, as_json: bool) -> None:
    """The engines: which are installed, tested, and what each can do.

    \b
    Example:  cli.py engines
              cli.py engines vllm command --pair pair.json
    """
    if ctx.invoked_subcommand is not None:
        return
    from spectune.engines.abilities import ENGINES
    from spectune.optimizer.report.tables import rows_table

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
    shown = [
        {**row, "installed": row["installed"] or "no", "tested": ", ".join(row["tested"])}
        for row in rows
    ]
    columns = ("engine", "installed", "tested", "runs", "new_policy")
    emit(as_json, {"engines": rows}, lambda: rows_table(shown, columns, "engines"))


@engines.group()
def vllm() -> None:
    """vLLM: the command line of its server."""


@vllm.command()
@pair_options
@click.option(
    "--draft-name",
    "draft",
    metavar="NAME",
    help="The draft that the server loads, or ngram; default: the pair's first.",
)
@click.option(
    "--gamma-max",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Most tokens drafted in a step.",
)
@click.option(
    "--max-num-seqs",
    type=Whole(2),
    default=256,
    show_default=True,
    help="Most requests in a step, as vLLM's option.",
)
@click.option(
    "--deployment",
    default="vllm",
    show_default=True,
    envvar="SPECTUNE_DEPLOYMENT",
    help="Name of what it follows.",
)
@with_json
def command(ctx: click.Context, as_json: bool, draft: str | None, **kw: Any) -> None:
    """Print the command line of a server that records its traffic and follows what is published.

    The server then drafts what `policies activate POLICY --deployment vllm` puts in force, from the
    next step on.

    \b
    Example:  cli.py engines vllm command --pair pair.json --draft-name small
    """
    from spectune.engines.vllm.command import line_of, server_arguments
    from spectune.optimizer.deployment import check_deployment
    from spectune.traces.errors import PairError

    if kw["target"] is not None:
        raise PairError(
            "--target: the server reads its pair from a file; write a pair file and name it "
            "by --pair"
        )
    pair, root = kw["pair"], ctx.find_root()
    spec = pair_spec(kw)
    environment = {
        "SPECTUNE_DB": root.obj if "://" in root.obj else str(Path(root.obj).absolute()),
        "SPECTUNE_PAIR": pair if pair == "demo" else str(Path(pair).absolute()),
        "SPECTUNE_DEPLOYMENT": check_deployment(kw["deployment"]),
    }
    if root.get_parameter_source("db_url") is ParameterSource.ENVIRONMENT:
        del environment["SPECTUNE_DB"]  # it is there, and may hold a password
    arguments = server_arguments(
        spec, draft=draft, most=kw["gamma_max"], max_num_seqs=kw["max_num_seqs"]
    )
    line = line_of(environment, arguments)
    made = {"pair": spec.id, "environment": environment, "arguments": list(arguments)}
    emit(as_json, {**made, "line": line}, line)

"""`engines`: what each engine can do, and how to start one that spectune records and steers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import option
from spectune.optimizer.commands.options import Whole
from spectune.optimizer.commands.printing import Group, emit, json_option, note, table
from spectune.optimizer.commands.shared import database_url, pair_spec


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def engines(ctx: click.Context) -> None:
    """The engines: which are installed, tested, and what each can do.

    \b
    Example:  cli.py engines
              cli.py engines vllm command --pair pair.json
    """
    if ctx.invoked_subcommand is not None:
        return
    from spectune.engines.abilities import ENGINES

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
    told = [{**row, "installed": row["installed"] or "no"} for row in rows]
    columns = ("engine", "installed", "tested", "runs", "new_policy")
    emit({"engines": rows}, table(told, columns, "engines"))


@engines.group(cls=Group)
def vllm() -> None:
    """vLLM: the command line of its server."""


@vllm.command()
@opts.pair
@option(
    "--draft-name draft",
    "The draft that the server loads, or ngram; default: the pair's first.",
    metavar="NAME",
)
@option("--gamma", "Tokens drafted until something is published.", Whole(1, 64), default=3)
@option(
    "--gamma-max",
    "Most tokens that a published policy may draft; default: as --gamma.",
    Whole(1, 64),
)
@option("--max-num-seqs", "Most requests in a step, as vLLM's option.", Whole(2), default=256)
@option("--deployment", "Name of what it follows.", default="vllm", envvar="SPECTUNE_DEPLOYMENT")
def command(**kw: Any) -> None:
    """Print the command line of a server that records its traffic and follows what is published.

    It drafts --gamma tokens until `policies activate POLICY --deployment vllm` publishes a policy,
    and what that says from the next step on. A --gamma-max above --gamma needs a schedule by batch
    size, with which vLLM captures other CUDA graphs from its start on (docs/engines.md).

    A password in the database's URL is not printed: the line names the variable SPECTUNE_DB.

    \b
    Example:  cli.py engines vllm command --pair pair.json --draft-name small --gamma 3
    """
    from spectune.engines.vllm.command import line_of, server_arguments
    from spectune.optimizer.deployment import check_deployment
    from spectune.traces.errors import PairError

    if kw["target"] is not None:
        raise PairError(
            "--target: the server reads its pair from a file; write a pair file and name it "
            "by --pair"
        )
    pair = kw["pair"]
    spec = pair_spec(kw)
    environment = {
        "SPECTUNE_DB": _database(),
        "SPECTUNE_PAIR": pair if pair == "demo" else str(Path(pair).absolute()),
        "SPECTUNE_DEPLOYMENT": check_deployment(kw["deployment"]),
    }
    arguments = server_arguments(
        spec,
        draft=kw["draft"],
        gamma=kw["gamma"],
        most=kw["gamma_max"],
        max_num_seqs=kw["max_num_seqs"],
    )
    line = line_of(environment, arguments)
    made = {"pair": spec.id, "environment": environment, "arguments": list(arguments)}
    emit({**made, "line": line}, line)


def _database() -> str:
    """The database as a server anywhere on this machine reaches it; where its URL holds a password,
    the variable that is to hold it."""
    from spectune.db.urls import parse_url, shown

    text = database_url()
    url = parse_url(text)
    if url.get_backend_name() == "sqlite":
        return str(Path(str(url.database)).absolute())
    if "***" not in shown(url):
        return text
    source = click.get_current_context().find_root().get_parameter_source("db_url")
    if source is not ParameterSource.ENVIRONMENT:
        note(f"set SPECTUNE_DB first, with the password: export SPECTUNE_DB='{shown(url)}'")
    return "$SPECTUNE_DB"

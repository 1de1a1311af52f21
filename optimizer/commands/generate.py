"""`generate`: stream one text."""

from __future__ import annotations

from typing import Any

import click

from spectune.optimizer.commands.shared import (
    check_policy,
    console_for,
    decode_options,
    deployment_option,
    device_options,
    emit,
    load,
    open_store,
    pair_options,
    pair_spec,
    prepared,
    profile_of,
    sampling_options,
    with_json,
)


@click.command()
@click.argument("prompt")
@pair_options
@sampling_options
@device_options
@deployment_option
@click.option("--policy", "policy_name", default="active", show_default=True)
@click.option(
    "--no-compare", is_flag=True, help="Do not decode again autoregressively for comparison."
)
@click.option(
    "--show-trees", is_flag=True, help="Draw the tree of every round, not of the last alone."
)
@with_json
def generate(ctx: click.Context, as_json: bool, prompt: str, **kw: Any) -> None:
    """Stream a text, showing which tokens were drafted and accepted and which the target supplied.

    Where the policy grows trees, the last round's is drawn below the text.

    \b
    Example:  cli.py generate "def fibonacci(n):" --pair demo --max-new-tokens 64
    """
    from spectune.traces.errors import WorkloadError

    if not prompt.strip():
        raise WorkloadError("the prompt is empty")
    with open_store(ctx) as store:
        spec = pair_spec(kw, store)
        check_policy(store, kw["policy_name"])
        options = decode_options(kw)
        pair = load(kw, store, spec)
        from spectune.optimizer.execute import encode
        from spectune.optimizer.generate import generate as do_generate
        from spectune.traces.schema import Request, Workload

        # What does not fit is refused before anything else is said.
        encode(pair, Workload("prompt", (Request("prompt", "prompt", (prompt,)),)), options)
        found = profile_of(store, None, pair.id, pair.device.type)
        plan = prepared(store, pair, kw["policy_name"], options, found, kw["deployment"])
    console = console_for(stderr=as_json)
    console.width = 10_000 if not console.is_terminal else console.width
    result = do_generate(
        pair,
        plan,
        prompt,
        options,
        console,
        compare=not kw["no_compare"],
        show_trees=kw["show_trees"],
    )
    if as_json:
        emit(True, result, None)

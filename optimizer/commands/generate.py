"""`generate`: stream one text."""

from __future__ import annotations

from typing import Any

import click

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import flag, option
from spectune.optimizer.commands.options import decode_options
from spectune.optimizer.commands.printing import Command, as_json, console_for, emit
from spectune.optimizer.commands.shared import (
    check_policy,
    load,
    open_store,
    pair_spec,
    prepared,
)


@click.command(cls=Command)
@click.argument("prompt")
@opts.pair
@opts.sampling
@opts.devices
@opts.deployment
@option("--policy policy_name", default="active")
@flag("--no-compare", "Do not decode again autoregressively for comparison.")
def generate(prompt: str, no_compare: bool, **kw: Any) -> None:
    """Stream a text, showing which tokens were drafted and accepted and which the target supplied.

    \b
    Example:  cli.py generate "def fibonacci(n):" --pair demo --max-new-tokens 64
    """
    from spectune.traces.errors import WorkloadError

    if not prompt.strip():
        raise WorkloadError("the prompt is empty")
    with open_store() as store:
        spec = pair_spec(kw, store)
        check_policy(store, kw["policy_name"])
        options = decode_options(kw)
        pair = load(kw, spec, notes=False)
        from spectune.optimizer.execute import encode
        from spectune.optimizer.generate import generate as do_generate
        from spectune.traces.schema import Request, Workload

        # What does not fit is refused before anything else is said.
        encode(pair, Workload("prompt", (Request("prompt", "prompt", prompt),)), options, ())
        found = store.profile_of(pair.id, **pair.place)
        plan = prepared(store, pair, kw["policy_name"], options, found, kw["deployment"])
    console = console_for(stderr=as_json())
    console.width = 10_000 if not console.is_terminal else console.width
    result = do_generate(pair, plan, prompt, options, console, compare=not no_compare)
    if as_json():
        emit(result)

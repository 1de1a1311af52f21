"""`fit KIND`: what trees, shortlists and a draft for each prompt need, fitted to a recording and
stored as an artifact."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import option
from spectune.optimizer.commands.options import MOMENT, SEED, Whole
from spectune.optimizer.commands.printing import Command, Meter, as_json, emit, note
from spectune.optimizer.commands.shared import (
    load,
    open_store,
    pair_spec,
    policy_named,
    recorded,
    typed,
)

if TYPE_CHECKING:
    from spectune.optimizer.fit.shared import StoredFit
    from spectune.traces.store import TraceStore


class Fit(NamedTuple):
    """One kind of fit: the function that does it (``module:name`` under ``optimizer.fit``), the
    table that shows it, and its options. ``reads``: the trees of one draft (``trees``), the output
    head of one (``head``), or the pair (``pair``)."""

    function: str
    table: str
    reads: str
    options: tuple[str, ...]


SAMPLE = ("depth", "width", "starts", "seed")
FITS: Final = {
    "bins": Fit("heterospec:fit_heterospec", "bins_table", "trees", (*SAMPLE, "top_n")),
    "classifier": Fit("c2t:fit_c2t", "classifier_table", "trees", (*SAMPLE, "hidden", "epochs")),
    "static-tree": Fit(
        "sequoia:fit_sequoia", "static_tree_table", "trees", ("nodes", "depth", "profile")
    ),
    "frequencies": Fit("fr_spec:fit_fr_spec", "shortlist_fit_table", "pair", ("corpus",)),
    "router": Fit(
        "dynaspec:fit_router",
        "shortlist_fit_table",
        "head",
        ("clusters", "hidden", "labels", "epochs", "seed"),
    ),
    "chooser": Fit("by_prompt:fit_recorded", "chooser_table", "pair", ("policies", "profile")),
}
OPTIONS: Final = tuple(dict.fromkeys(name for fit in FITS.values() for name in fit.options))


@click.command("fit", cls=Command)
@click.argument("kind", type=click.Choice(list(FITS)))
@opts.pair
@opts.devices
@option("--recording", "What is fitted to: its search part.", default="latest")
@option("--since", "A sample of what its pair decoded since so long ago, or a moment.", MOMENT)
@option("--depth", "Trees: levels; default: as recorded, of bins 3 fewer.", Whole(1, 64))
@option("--width", "Trees: children of a node; default: as recorded.", Whole(1, 32))
@option("--starts", "Trees: at most so many rounds.", Whole(1))
@option("--top-n", "bins: nodes kept of a tree; default: 60.", Whole(1, 256))
@option("--nodes", "static-tree: most nodes; default: 64.", Whole(1, 256))
@option("--hidden", "classifier, router: hidden units.", Whole(1, 65_536))
@option("--epochs", "classifier, router: passes over the examples.", Whole(1, 1000))
@option("--clusters", "router: clusters; default: by the size of the head.", Whole(1))
@option("--labels", "router: most probable tokens whose clusters count; default: 8.", Whole(1))
@option("--corpus", "frequencies: count these text files; repeatable.", multiple=True)
@option("--policies", "chooser: policies to choose from; repeatable.", multiple=True)
@option("--profile", "static-tree, chooser: latency profile; default: the latest.")
@option("--seed", "Seed of what is drawn; default: 0.", SEED)
def fit(kind: str, **kw: Any) -> None:
    """Fit to a recording what a policy needs: bins, classifier or static-tree of one draft's
    recorded trees; frequencies or a router for shortlists; a chooser of a draft for each prompt.

    \b
    Example:  cli.py fit bins --draft small --depth 5
              cli.py fit static-tree --draft small --nodes 16 --depth 6
              cli.py fit frequencies --corpus notes.txt
              cli.py fit router --draft head --clusters 128
              cli.py fit chooser --policies small.json --policies ngram.json
    """
    chosen = FITS[kind]
    options = {name: kw[name] for name in OPTIONS if kw[name] not in (None, ())}
    unused = [f"--{name.replace('_', '-')}" for name in options if name not in chosen.options]
    if unused:
        note(f"fit {kind} does not use {', '.join(unused)}")
    options = {name: value for name, value in options.items() if name in chosen.options}
    corpus = bool(options.get("corpus"))
    if corpus and typed("recording"):
        raise click.UsageError("--corpus is counted instead of --recording: leave one out")
    drafts = [draft for draft in kw["drafts"] if "=" not in draft]
    kw["drafts"] = tuple(draft for draft in kw["drafts"] if "=" in draft)
    if chosen.reads != "pair" and len(drafts) != 1:
        raise click.UsageError(f"fit {kind} is for one draft: give --draft NAME, of the pair")
    module, name = chosen.function.split(":")
    with open_store() as store, Meter() as meter:
        recording = "" if corpus else recorded(store, kw["recording"], kw["since"])
        run = getattr(import_module(f"spectune.optimizer.fit.{module}"), name)
        options["progress"] = meter
        if chosen.reads == "trees":
            from spectune.optimizer.fit.recorded_trees import tree_source

            fitted = run(tree_source(store, recording, *drafts), **options)
        else:
            fitted = _with_pair(
                store, run, kw, recording, drafts[: chosen.reads == "head"], options
            )
    _show(fitted, getattr(import_module("spectune.optimizer.report.tables"), chosen.table))


def _with_pair(
    store: TraceStore,
    run: Callable[..., StoredFit],
    kw: dict[str, Any],
    recording: str,
    drafts: list[str],
    options: dict[str, Any],
) -> StoredFit:
    """Runs a fit that reads the models of a pair."""
    from spectune.traces.errors import PolicyError

    pair = load(kw, pair_spec(kw, store, recording or None), notes=False)
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
    if names := options.pop("policies", ()):
        policies: dict[str, Any] = {}
        for name in names:
            policy = policy_named(store, name, pair.id, pair.device.type, option="--policies")
            if policy.candidates != (policy,) or policy.id in policies:
                raise PolicyError(f"--policies {name}: give different policies without by_prompt")
            policies[policy.id] = policy
        options["candidates"] = tuple(policies.values())
    return run(store, recording, pair, *drafts, **options)


def _show(fitted: StoredFit, table: Callable[[dict[str, Any]], Any]) -> None:
    """Shows what was fitted, and the policy to begin with unless that is a draft alone."""
    data = fitted.to_json()
    emit(data, lambda: table(data))
    if not as_json():
        is_draft = fitted.policy.keys() == {"draft"} and isinstance(fitted.policy["draft"], str)
        policy = "" if is_draft else f"; a policy with it: {json.dumps(fitted.policy)}"
        click.echo(f"artifact {fitted.artifact}{policy}")

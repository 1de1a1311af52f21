"""`fit`: what trees, shortlists and a draft for each prompt need, fitted to a recording and stored
as artifacts."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import F, option
from spectune.optimizer.commands.options import MOMENT, SEED, Whole, together
from spectune.optimizer.commands.printing import Group, Meter, as_json, emit
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

View = Callable[[dict[str, Any]], Any]


@click.group(cls=Group)
def fit() -> None:
    """Fit to a recording what trees (bins, classifier, static-tree), shortlists
    (frequencies, clusters, router) and a draft for each prompt (chooser) need."""


def recording_option(help: str) -> Callable[[F], F]:
    since = "A sample of what its pair decoded since so long ago (24h), or a moment (UTC), instead."
    return together(option("--recording", help, default="latest"), option("--since", since, MOMENT))


with_trees = recording_option("One recorded with --tree-width and --tree-depth.")
tree_options = together(
    with_trees,
    option("--draft", "Draft whose trees are fitted to, by name.", required=True),
)
seed_option = option("--seed", type=SEED, default=0)
sample_options = together(
    option("--width", "Children of a node; default: as recorded.", Whole(1, 32)),
    option(
        "--starts",
        "Fit to at most so many rounds; default: 20000, of a classifier 4000.",
        Whole(1),
    ),
    seed_option,
)
EPOCHS = Whole(1, 1000)


def _shown(made: StoredFit, view: View) -> None:
    """Shows what was fitted, and the policy to begin with unless that is a draft alone."""
    data = made.to_json()
    emit(data, lambda: view(data))
    if not as_json():
        is_draft = made.policy.keys() == {"draft"} and isinstance(made.policy["draft"], str)
        start = "" if is_draft else f"; a policy with it: {json.dumps(made.policy)}"
        click.echo(f"artifact {made.artifact}{start}")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, or have a default."""
    return {key: value for key, value in options.items() if value not in (None, ())}


def _fit_trees(
    fit: Callable[..., StoredFit],
    view: View,
    *,
    recording: str,
    draft: str,
    since: datetime | None = None,
    **options: Any,
) -> None:
    """Runs a fit of trees on what was asked for and shows what came of it."""
    from spectune.optimizer.fit.recorded_trees import tree_source

    with open_store(create=False) as store, Meter() as meter:
        source = tree_source(store, recorded(store, recording, since), draft)
        made = fit(source, progress=meter, **_given(options))
    _shown(made, view)


@fit.command("bins")
@tree_options
@option("--depth", "Levels of the trees; default: those recorded less 3.", Whole(1, 64))
@option("--top-n", "Nodes kept of a tree; default: 60.", Whole(1, 256))
@sample_options
def bins(**kw: Any) -> None:
    """Entropy bins for `stratify` (HeteroSpec): which rounds are sure enough for a smaller, deeper
    tree.

    \b
    Example:  cli.py fit bins --draft small --depth 5
    """
    from spectune.optimizer.fit.heterospec import fit_heterospec
    from spectune.optimizer.report.tables import bins_table

    _fit_trees(fit_heterospec, bins_table, **kw)


@fit.command("classifier")
@tree_options
@option("--depth", "Levels of the trees; default: as recorded.", Whole(1, 64))
@option("--hidden", "Hidden units; default: 48.", Whole(2, 48))
@option("--epochs", "Passes over the nodes; default: 10, more where these are few.", EPOCHS)
@sample_options
def classifier(**kw: Any) -> None:
    """The node classifier of `growth` classifier (C2T), trained on a draft's recorded trees.

    \b
    Example:  cli.py fit classifier --draft small
    """
    from spectune.optimizer.fit.c2t import fit_c2t
    from spectune.optimizer.report.tables import classifier_table

    _fit_trees(fit_c2t, classifier_table, **kw)


@fit.command("static-tree")
@tree_options
@option("--nodes", "Most nodes; default: 64.", Whole(1, 256))
@option(
    "--depth", "Most levels; default: 16, or as recorded where replay needs that.", Whole(1, 64)
)
@option(
    "--profile", "Latency profile whose costs count; default: the latest of the recording's pair."
)
def static_tree(**kw: Any) -> None:
    """The best fixed tree for `growth` static (Sequoia): the fastest by a profile, or with both
    --nodes and --depth and no --profile the one that accepts most.

    \b
    Example:  cli.py fit static-tree --draft small
              cli.py fit static-tree --draft small --nodes 16 --depth 6
    """
    from spectune.optimizer.fit.sequoia import fit_sequoia
    from spectune.optimizer.report.tables import static_tree_table

    _fit_trees(fit_sequoia, static_tree_table, **kw)


@fit.command("chooser")
@opts.pair
@opts.devices
@recording_option("Its requests are fitted to, and replayed under every candidate.")
@option(
    "--policies",
    "FILE, inline JSON or ID of a policy to choose from; repeatable. Default: the best chains of "
    "three drafts by replay (no draft is one).",
    multiple=True,
    metavar="POLICY",
)
@option(
    "--profile",
    "Latency profile that prices the policies; default: the latest of the pair and device.",
)
def chooser(**kw: Any) -> None:
    """A draft for each prompt: the seconds of every policy predicted from a prompt's length,
    perplexity and TF-IDF.

    It is fitted to one half of the requests that a search may see. Unless choosing gains something
    beyond noise on the other half, the best single policy is named.

    \b
    Example:  cli.py fit chooser
              cli.py fit chooser --policies small.json --policies ngram.json
    """
    from spectune.traces.errors import PolicyError

    with open_store() as store, Meter() as meter:
        recording = recorded(store, kw["recording"], kw["since"])
        pair = load(kw, pair_spec(kw, store, recording), notes=False)
        from spectune.optimizer.fit.by_prompt import fit_recorded
        from spectune.optimizer.report.tables import chooser_table

        policies = {}
        for name in kw["policies"]:
            policy = policy_named(store, name, pair.id, pair.device.type, option="--policies")
            if policy.candidates != (policy,) or policy.id in policies:
                raise PolicyError(f"--policies {name}: give different policies without by_prompt")
            policies[policy.id] = policy
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
        made = fit_recorded(
            store,
            recording,
            pair,
            tuple(policies.values()),
            profile=kw["profile"],
            progress=meter,
        )
    _shown(made, chooser_table)


def _fit_shortlists(
    fit: Callable[..., StoredFit],
    kw: dict[str, Any],
    *texts: str | None,
    drafted: bool = True,
    **options: Any,
) -> None:
    """Runs a fit that reads the pair itself, and shows what came of it; ``texts``: the recording,
    where it reads one (None: a corpus instead); ``options``: the fit's own."""
    named = [d for d in kw["drafts"] if "=" not in d]
    if drafted and len(named) != 1:
        raise click.UsageError(
            "name one draft whose output head is fitted to, --draft NAME (of the pair; NAME=PATH "
            "gives its checkpoint)"
        )
    if not drafted and named:
        raise click.BadParameter(
            f"{named[0]}: NAME=PATH is expected; frequencies are every draft's",
            param_hint="--draft",
        )
    kw["drafts"] = tuple(d for d in kw["drafts"] if "=" in d)
    with open_store() as store, Meter() as meter:
        since = kw.get("since")
        recording = ["" if name is None else recorded(store, name, since) for name in texts]
        pair = load(kw, pair_spec(kw, store, next(filter(None, recording), None)), notes=False)
        from spectune.optimizer.fit.clusters import check_draft
        from spectune.optimizer.report.tables import shortlist_fit_table

        for draft in named:
            check_draft(pair, draft)
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
        made = fit(store, *recording, pair, *named, progress=meter, **_given(options))
    _shown(made, shortlist_fit_table)


@fit.command("frequencies")
@opts.pair
@opts.devices
@recording_option("Its texts are counted, prompts included.")
@option("--corpus", "Count these text files instead; repeatable.", multiple=True, metavar="FILE")
def frequencies(**kw: Any) -> None:
    """The vocabulary by frequency, for shortlists `frequency` (FR-Spec) and `position_frequency`
    (PA-FR).

    \b
    Example:  cli.py fit frequencies
              cli.py fit frequencies --pair pair.json --corpus notes.txt --corpus code.py
    """
    from spectune.optimizer.fit.fr_spec import fit_fr_spec

    if kw["corpus"] and typed("recording"):
        raise click.UsageError("--corpus is counted instead of --recording: leave one out")
    recording = None if kw["corpus"] else kw["recording"]
    _fit_shortlists(fit_fr_spec, kw, recording, drafted=False, corpus=kw["corpus"])


@fit.command("clusters")
@opts.pair
@opts.devices
@option("--clusters count", "M; default: by the size of the output head.", Whole(1))
@seed_option
def clusters(**kw: Any) -> None:
    """Token clusters of a draft's output head (DynaSpec), to look at, or for `fit router
    --clusters-from`.

    \b
    Example:  cli.py fit clusters --pair pair.json --draft small --clusters 64
    """
    from spectune.optimizer.fit.clusters import fit_clusters

    _fit_shortlists(fit_clusters, kw, count=kw["count"], seed=kw["seed"])


@fit.command("router")
@opts.pair
@opts.devices
@recording_option("The texts whose contexts it learns.")
@option("--clusters", "M; default: by the size of the output head.", Whole(1))
@option("--clusters-from", "Stored clusters instead of new ones.", metavar="ID")
@option("--hidden", "Hidden units; default: 128.", Whole(1, 65_536))
@option("--labels", "L, most probable tokens whose clusters are positive; default: 8.", Whole(1))
@option("--epochs", type=EPOCHS)
@seed_option
def router(**kw: Any) -> None:
    """Clusters and the router that selects them by context, for shortlists `clusters` (DynaSpec).

    \b
    Example:  cli.py fit router --draft small
              cli.py fit router --draft head --clusters 128
    """
    from spectune.optimizer.fit.dynaspec import fit_router

    _fit_shortlists(
        fit_router,
        kw,
        kw["recording"],
        clusters=kw["clusters"],
        clusters_from=kw["clusters_from"],
        hidden=kw["hidden"],
        labels=kw["labels"],
        epochs=kw["epochs"],
        seed=kw["seed"],
    )


@fit.command("ranks")
@opts.pair
@opts.devices
@with_trees
@option("--router", "A router that `fit router` made.", metavar="ID")
@option("--frequencies", "A frequency order that `fit frequencies` made.", metavar="ID")
def ranks(**kw: Any) -> None:
    """Where a router puts the clusters of everything recorded, or a frequency order its tokens, so
    that `simulate` replays policies with it. `fit router` and `fit frequencies` make this for their
    own recording; here it is made for another, or for requests recorded since.

    \b
    Example:  cli.py fit ranks --draft small --router 7b41 --recording latest
              cli.py fit ranks --draft small --frequencies 09ac
    """
    from spectune.optimizer.fit.dynaspec import fit_ranks

    _fit_shortlists(
        fit_ranks,
        kw,
        kw["recording"],
        router=kw["router"],
        frequencies=kw["frequencies"],
    )

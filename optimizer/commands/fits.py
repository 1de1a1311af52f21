"""`fit`: what trees, shortlists and a draft for each prompt need, fitted to a recording and stored
as artifacts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.shared import (
    SEED,
    FiniteRange,
    Meter,
    Whole,
    device_options,
    emit,
    load,
    open_store,
    pair_options,
    pair_spec,
    policy_named,
    together,
    with_json,
)

if TYPE_CHECKING:
    from spectune.optimizer.fit.shared import StoredFit


@click.group()
def fit() -> None:
    """Fit to a recording what trees (bins, classifier, score, static-tree), shortlists
    (frequencies, clusters, router) and a draft for each prompt (chooser) need."""


proposals_option = click.option(
    "--proposals",
    type=click.Choice(["coupled", "probability"]),
    default="coupled",
    show_default=True,
    help="Trees recorded with these --tree-proposals.",
)
fit_options = together(
    click.option(
        "--recording",
        default="latest",
        show_default=True,
        help="One recorded with --tree-width and --tree-depth.",
    ),
    click.option("--draft", required=True, help="Draft whose trees are fitted to, by name."),
    proposals_option,
)
sample_options = together(
    click.option(
        "--width", type=click.IntRange(1, 32), help="Children of a node; default: as recorded."
    ),
    click.option(
        "--starts",
        type=Whole(1),
        help="Fit to at most so many rounds; default: 20000, of a classifier 4000.",
    ),
    click.option("--seed", type=SEED, default=0, show_default=True),
)


View = Callable[[dict[str, Any]], Any]


def _emit_fit(as_json: bool, made: StoredFit, view: View) -> None:
    """Shows what was fitted, and the policy to begin with unless that is a draft alone."""
    data = made.to_json()
    emit(as_json, data, lambda: view(data))
    if not as_json:
        start = (
            ""
            if made.policy.keys() == {"draft"} and isinstance(made.policy["draft"], str)
            else json.dumps(made.policy)
        )
        click.echo(f"artifact {made.artifact}" + (f"; a policy with it: {start}" if start else ""))


def _fit_trees(
    ctx: click.Context, as_json: bool, fit: Callable[..., StoredFit], kw: dict[str, Any], view: View
) -> None:
    """Runs a fit of trees on what was asked for and shows what came of it."""
    from spectune.optimizer.fit.recorded_trees import tree_source

    with open_store(ctx, create=False) as store, Meter() as meter:
        recording = store.resolve_recording(kw.pop("recording"))
        source = tree_source(store, recording, kw.pop("draft"), kw.pop("proposals"))
        made = fit(
            source, progress=meter, **{key: value for key, value in kw.items() if value is not None}
        )
    _emit_fit(as_json, made, view)


@fit.command("bins")
@fit_options
@click.option(
    "--depth",
    type=click.IntRange(1, 64),
    help="Levels of the trees; default: those recorded less 3.",
)
@click.option("--top-n", type=click.IntRange(1, 256), help="Nodes kept of a tree; default: 60.")
@sample_options
@with_json
def bins(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Entropy bins for `stratify` (HeteroSpec): which rounds are sure enough for a smaller, deeper
    tree.

    \b
    Example:  cli.py fit bins --draft small --depth 5
    """
    from spectune.optimizer.fit.heterospec import fit_heterospec
    from spectune.optimizer.report.tables import bins_table

    _fit_trees(ctx, as_json, fit_heterospec, kw, bins_table)


@fit.command("classifier")
@fit_options
@click.option(
    "--depth", type=click.IntRange(1, 64), help="Levels of the trees; default: as recorded."
)
@click.option("--hidden", type=click.IntRange(2, 48), help="Hidden units; default: 48.")
@click.option(
    "--features",
    multiple=True,
    type=click.Choice(["probability", "entropy", "depth"]),
    help="Only these; repeatable. Default: all three.",
)
@click.option(
    "--epochs",
    type=click.IntRange(1, 1000),
    help="Passes over the nodes; default: 10, more where these are few.",
)
@click.option(
    "--from",
    "carried",
    metavar="ARTIFACT",
    help="Fine-tune this classifier, of any draft, instead of a new one.",
)
@click.option(
    "--fraction",
    type=FiniteRange(0.0, 1.0),
    help="With --from: share of the rounds to fine-tune on; default: 0.1. 0: carried over as it "
    "is, only scored.",
)
@sample_options
@with_json
def classifier(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """The node classifier of `growth` classifier (C2T), trained, or carried over from another draft
    with --from.

    \b
    Example:  cli.py fit classifier --draft small
              cli.py fit classifier --draft medium --from 3f2a
    """
    from spectune.optimizer.fit.c2t import fit_c2t
    from spectune.optimizer.report.tables import classifier_table
    from spectune.traces.errors import PolicyError

    if kw["fraction"] is not None and kw["carried"] is None:
        raise PolicyError("--fraction says how much is fine-tuned on: give --from as well")
    _fit_trees(ctx, as_json, fit_c2t, kw, classifier_table)


@fit.command("score")
@fit_options
@click.option(
    "--depth", type=click.IntRange(1, 64), help="Levels of a head's trees; default: as recorded."
)
@sample_options
@with_json
def score(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """The `sharpness` of the score `coupled`: how far a gap between siblings lowers the estimate
    that a node is accepted.

    \b
    Example:  cli.py fit score --draft small
              cli.py fit score --recording latest --draft head --width 6
    """
    from spectune.optimizer.fit.score import fit_score
    from spectune.optimizer.report.tables import score_table

    _fit_trees(ctx, as_json, fit_score, kw, score_table)


@fit.command("static-tree")
@fit_options
@click.option("--nodes", type=click.IntRange(1, 256), help="Most nodes; default: 64.")
@click.option(
    "--depth",
    type=click.IntRange(1, 64),
    help="Most levels; default: 16, or as recorded where replay needs that.",
)
@click.option(
    "--profile",
    "profile",
    help="Latency profile whose costs count; default: the latest of the recording's pair.",
)
@with_json
def static_tree(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """The best fixed tree for `growth` static (Sequoia): the fastest by a profile, or with both
    --nodes and --depth and no --profile the one that accepts most.

    \b
    Example:  cli.py fit static-tree --draft small
              cli.py fit static-tree --draft small --nodes 16 --depth 6
    """
    from spectune.optimizer.fit.sequoia import fit_sequoia
    from spectune.optimizer.report.tables import static_tree_table

    _fit_trees(ctx, as_json, fit_sequoia, kw, static_tree_table)


def _fit_shortlists(
    ctx: click.Context,
    as_json: bool,
    fit: Callable[..., StoredFit],
    kw: dict[str, Any],
    *,
    drafted: bool = True,
) -> None:
    """Runs a fit that reads the pair itself, and shows what came of it."""
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
    with open_store(ctx) as store, Meter() as meter:
        recording = []  # clusters are of no recording, frequencies may be of a corpus
        if "recording" in kw:
            asked = kw.pop("recording")
            recording = ["" if asked is None else store.resolve_recording(asked)]
        pair = load(kw, store, pair_spec(kw, store, recording[0] or None if recording else None))
        from spectune.optimizer.fit.clusters import check_draft
        from spectune.optimizer.report.tables import shortlist_fit_table

        for draft in named:
            check_draft(pair, draft)
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
        given = {key: value for key, value in kw.items() if value not in (None, ())}
        made = fit(store, *recording, pair, *named, progress=meter, **given)
    _emit_fit(as_json, made, shortlist_fit_table)


@fit.command("chooser")
@pair_options
@device_options
@click.option(
    "--recording",
    default="latest",
    show_default=True,
    help="Its requests are fitted to, and replayed under every candidate.",
)
@click.option(
    "--policies",
    multiple=True,
    metavar="POLICY",
    help="FILE, inline JSON or ID of a draft's policy; repeatable. Default: of every draft the "
    "fastest by replay, and none.",
)
@click.option(
    "--rule",
    type=click.Choice(["throughput", "theorem_3"]),
    default="throughput",
    show_default=True,
)
@click.option(
    "--profile",
    "profile",
    help="Latency profile that weighs the drafts; default: the latest of the pair and device.",
)
@click.option(
    "--seed",
    type=SEED,
    default=0,
    show_default=True,
    help="Deals requests into the parts of cross-validation.",
)
@with_json
def chooser(ctx: click.Context, as_json: bool, policies: tuple[str, ...], **kw: Any) -> None:
    """A draft for each prompt (draft `ols`): accuracies predicted from length, perplexity and
    TF-IDF, and what follows for the speed.

    Unless choosing gains something beyond noise by cross-validation, the best single draft decodes
    everything.

    \b
    Example:  cli.py fit chooser
              cli.py fit chooser --rule theorem_3 --policies small.json --policies ngram.json
    """
    from spectune.traces.errors import PolicyError

    with open_store(ctx) as store, Meter() as meter:
        recording = store.resolve_recording(kw.pop("recording"))
        pair = load(kw, store, pair_spec(kw, store, recording))
        from spectune.optimizer.fit.chooser_fits import fit_chooser_artifact
        from spectune.optimizer.report.tables import chooser_table
        from spectune.runtime.policies.document import Policy

        named = [
            policy_named(store, name, pair.id, pair.device.type, option="--policies")
            for name in policies
        ]
        plain = [policy for policy in named if isinstance(policy, Policy)]
        if len(plain) < len(named):
            raise PolicyError(
                "--policies: a chooser of drafts is no candidate; give plain policies"
            )
        candidates = {policy.draft: policy for policy in plain} or None
        if candidates is not None and len(candidates) < len(plain):
            raise PolicyError("--policies: two policies of one draft; a chooser has one for each")
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
        given = {key: kw[key] for key in ("rule", "profile", "seed")}
        made = fit_chooser_artifact(store, recording, pair, candidates, progress=meter, **given)
    _emit_fit(as_json, made, chooser_table)


@fit.command("frequencies")
@pair_options
@device_options
@click.option(
    "--recording",
    default="latest",
    show_default=True,
    help="Its texts are counted, prompts included.",
)
@click.option(
    "--corpus", multiple=True, metavar="FILE", help="Count these text files instead; repeatable."
)
@with_json
def frequencies(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """The vocabulary by frequency, for shortlists `frequency` (FR-Spec) and `position_frequency`
    (PA-FR).

    \b
    Example:  cli.py fit frequencies
              cli.py fit frequencies --pair pair.json --corpus notes.txt --corpus code.py
    """
    from spectune.optimizer.fit.fr_spec import fit_fr_spec

    if kw["corpus"]:
        kw["recording"] = None
    _fit_shortlists(ctx, as_json, fit_fr_spec, kw, drafted=False)


@fit.command("clusters")
@pair_options
@device_options
@click.option(
    "--clusters", "count", type=Whole(1), help="M; default: by the size of the output head."
)
@click.option("--seed", type=SEED, default=0, show_default=True)
@with_json
def clusters(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Token clusters of a draft's output head (DynaSpec), to look at, or for `fit router
    --clusters-from`.

    \b
    Example:  cli.py fit clusters --pair pair.json --draft small --clusters 64
    """
    from spectune.optimizer.fit.clusters import fit_clusters

    _fit_shortlists(ctx, as_json, fit_clusters, kw)


@fit.command("router")
@pair_options
@device_options
@click.option(
    "--recording", default="latest", show_default=True, help="The texts whose contexts it learns."
)
@click.option("--clusters", type=Whole(1), help="M; default: by the size of the output head.")
@click.option("--clusters-from", metavar="ID", help="Stored clusters instead of new ones.")
@click.option("--hidden", type=click.IntRange(1, 65_536), help="Hidden units; default: 128.")
@click.option(
    "--labels",
    type=Whole(1),
    help="L, most probable tokens whose clusters are positive; default: 8.",
)
@click.option("--epochs", type=click.IntRange(1, 1000))
@click.option("--seed", type=SEED, default=0, show_default=True)
@with_json
def router(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Clusters and the router that selects them by context, for shortlists `clusters` (DynaSpec).

    \b
    Example:  cli.py fit router --draft small
              cli.py fit router --draft head --clusters 128
    """
    from spectune.optimizer.fit.dynaspec import fit_router

    _fit_shortlists(ctx, as_json, fit_router, kw)


@fit.command("ranks")
@pair_options
@device_options
@click.option(
    "--recording",
    default="latest",
    show_default=True,
    help="One recorded with --tree-width and --tree-depth.",
)
@click.option("--router", metavar="ID", help="A router that `fit router` made.")
@click.option("--frequencies", metavar="ID", help="A frequency order that `fit frequencies` made.")
@proposals_option
@with_json
def ranks(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Where a router puts the clusters of everything recorded, or a frequency order its tokens, so
    that `simulate` replays policies with it. `fit router` and `fit frequencies` make this for their
    own recording; here it is made for another, or for requests recorded since.

    \b
    Example:  cli.py fit ranks --draft small --router 7b41 --recording latest
              cli.py fit ranks --draft small --frequencies 09ac
    """
    from spectune.optimizer.fit.dynaspec import fit_ranks

    _fit_shortlists(ctx, as_json, fit_ranks, kw)

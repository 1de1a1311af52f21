"""Cells of the four papers' tables, executed in turns with their baselines, on an idle machine.

    python bench/run.py papers_executed [--only heterospec_executed ...] [--quick]

Rows are added to those of :mod:`papers`, and say what replay predicts for the same requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from evidence import Document, cells, executed, recorded, run_rows
from lab import EAGLE_WIDTH, Halves
from pairs import chain
from papers import DEPTH, TOP_N, analytic, both_verifiers, classified, eagle, in_bins

from spectune.optimizer.fit.c2t import fit_c2t
from spectune.optimizer.fit.dynaspec import fit_router
from spectune.optimizer.fit.fr_spec import fit_fr_spec
from spectune.optimizer.fit.heterospec import fit_heterospec
from spectune.optimizer.fit.recorded_trees import tree_source


def main(arguments: Sequence[str]) -> None:
    run_rows(__doc__, "papers_executed", PARTS, arguments)


def heterospec(quick: bool) -> list[Document]:
    """HeteroSpec over EAGLE-2's tree."""
    rows = []
    for h, draft, cell in _sure_drafts(quick):
        source = tree_source(h.store, h.recording, draft)
        bins = fit_heterospec(source, depth=DEPTH, width=EAGLE_WIDTH, top_n=TOP_N)
        both = (h, in_bins(draft, bins.artifact)), (h, eagle(draft))
        rows.append(executed(f"{cell}, cpu", *both, quick))
    return rows


def c2t(quick: bool) -> list[Document]:
    """C2T over EAGLE-2's tree."""
    rows = []
    for h, draft, cell in _sure_drafts(quick):
        fit = fit_c2t(tree_source(h.store, h.recording, draft), width=EAGLE_WIDTH)
        both = (h, classified(draft, fit.artifact, 0.6)), (h, eagle(draft))
        rows.append(executed(f"{cell}, cpu", *both, quick))
    return rows


def _sure_drafts(quick: bool) -> list[tuple[Halves, str, str]]:
    """The drafts whose trees are worth their time."""
    return [(h, draft, cell) for h, draft, cell in cells(0.0, quick) if draft != "small"]


def dynaspec(quick: bool) -> list[Document]:
    """Chains of 5 tokens under shortlists over those of the whole vocabulary."""
    h, draft = recorded(0.0, quick), "medium"
    size, clusters = round(0.22 * h.pair.models[draft].output.rows), round(0.22 * 64)
    order = fit_fr_spec(h.store, h.recording, h.pair).artifact
    router = fit_router(h.store, h.recording, h.pair, draft).artifact
    steps = dict.fromkeys(("k0", "k1", "k_min"), clusters)
    shortlists = {
        "FR-Spec": {"kind": "frequency", "size": size, "artifact": order},
        "DynaSpec": {"kind": "clusters", "artifact": router, **steps},
    }
    plain, rows = chain(draft, DEPTH), []
    for name, shortlist in shortlists.items():
        both = (h, plain | {"shortlist": shortlist}), (h, plain)
        rows.append(executed(f"{draft}, {name}, cpu", *both, quick))
    return rows


def on_the_fly(quick: bool) -> list[Document]:
    """Method 1 over the window 5."""
    h, rows = recorded(0.0, quick), []
    for draft in ("small", "medium"):
        both = (h, analytic(draft)), (h, chain(draft, 5))
        rows.append(executed(f"{draft}, temperature 0, cpu", *both, quick))
    return rows


def verifier(quick: bool) -> list[Document]:
    """Coupled chains over rejection's."""
    coupled, rejection = both_verifiers(quick)
    rows = []
    for draft, gamma in (("small", 2), ("medium", 4)):
        both = (coupled, chain(draft, gamma)), (rejection, chain(draft, gamma))
        rows.append(executed(f"{draft}, coupled over rejection, gamma {gamma}, cpu", *both, quick))
    return rows


PARTS = {
    f"{paper.__name__}_executed": paper
    for paper in (heterospec, c2t, dynaspec, on_the_fly, verifier)
}

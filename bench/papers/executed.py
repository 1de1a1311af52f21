"""Cells of the four papers' tables, executed in turns with their baselines, on an idle machine.

    python bench/run.py papers_executed [--only heterospec_executed ...] [--quick]

Rows are added to those of :mod:`papers.replayed`, and say what replay predicts for the same
requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from pairs import chain

from bench.lab import Halves, compare
from bench.papers.evidence import (
    Document,
    cells,
    costs,
    executed,
    over,
    recorded,
    replayed,
    row,
    run_rows,
)
from bench.papers.replayed import (
    DEPTH,
    analytic,
    both_verifiers,
    classified,
    eagle,
    fit_classifier,
    fit_in_bins,
    in_bins,
    random_policies,
    searched,
    whole_space,
)
from bench.papers.shortlists import fit
from spectune.optimizer.execute import Encoded, encode_recorded, run
from spectune.optimizer.fit.recorded_trees import tree_source
from spectune.optimizer.tuning.confirmation import finite
from spectune.optimizer.tuning.timings import Timings
from spectune.runtime.decoder import prepare_for
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.policies.plan import Plan
from spectune.runtime.shortlists import Shortlists, Support


def main(arguments: Sequence[str]) -> int:
    return run_rows(__doc__, "papers_executed", PARTS, arguments)


def heterospec(quick: bool) -> list[Document]:
    """HeteroSpec over EAGLE-2's tree."""
    rows = []
    for h, draft, cell in _sure_drafts(quick):
        source = tree_source(h.store, h.recording, draft)
        both = (h, in_bins(draft, fit_in_bins(h, source).artifact)), (h, eagle(draft))
        rows.append(executed(f"{cell}, cpu", *both, quick))
    return rows


def c2t(quick: bool) -> list[Document]:
    """C2T over EAGLE-2's tree."""
    rows = []
    for h, draft, cell in _sure_drafts(quick):
        fit = fit_classifier(tree_source(h.store, h.recording, draft))
        both = (h, classified(draft, fit.artifact, 0.6)), (h, eagle(draft))
        rows.append(executed(f"{cell}, cpu", *both, quick))
    return rows


def _sure_drafts(quick: bool) -> list[tuple[Halves, str, str]]:
    """The drafts whose trees are worth their time."""
    return [(h, draft, cell) for h, draft, cell in cells(0.0, quick) if draft != "small"]


def dynaspec(quick: bool) -> list[Document]:
    """Chains of 5 tokens under shortlists over those of the whole vocabulary."""
    h, draft = recorded(0.0, quick), "medium"
    fits = fit(h, draft, quick)
    steps = dict.fromkeys(("k0", "k1", "k_min"), fits.clusters)
    shortlists = {
        "FR-Spec": {"kind": "frequency", "size": fits.size, "artifact": fits.order},
        "DynaSpec": {"kind": "clusters", "artifact": fits.router, **steps},
    }
    plain, rows = chain(draft, DEPTH), []
    for name, shortlist in shortlists.items():
        both = (h, plain | {"shortlist": shortlist}), (h, plain)
        rows.append(executed(f"{draft}, {name}, cpu", *both, quick))
    tree = eagle(draft, depth=DEPTH) | {"shortlist": shortlists["DynaSpec"]}
    places = h.test[: 3 if quick else 60]
    plan = prepare_for(h.pair, parse_policy(tree), profile=None, artifacts=h.find)
    encoded = encode_recorded(h.pair, [h.trace.trajectories[i] for i in places])
    own = _rounds(h, plan, encoded)
    with of_the_beam():
        united = _rounds(h, plan, encoded)
    why = f"{fits.clusters} clusters a node, {len(places)} requests decoded"
    return [*rows, row("union", f"{draft}, EAGLE-2's tree", over(own, united), why)]


def _rounds(h: Halves, plan: Plan, encoded: Encoded) -> npt.NDArray[np.int64]:
    """Rounds of each request."""
    decoded = run(h.pair, StaticSource(plan), encoded)
    return np.array([len(each.steps) for each in decoded])


@contextmanager
def of_the_beam() -> Iterator[None]:
    """Every node of a level proposes from the union of the level's clusters, as in DynaSpec."""
    select = Shortlists.select

    def united(self: Shortlists, *given: Any) -> Support:
        return replace(select(self, *given), inside=None)

    with patch.object(Shortlists, "select", united):
        yield


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


def joint(quick: bool) -> list[Document]:
    """What a search over all mechanisms chooses over the fastest of the 8 policies that it predicts
    best and of 8 random ones: all in turns on some unseen requests, these two again on others, as
    the fastest of many owes something to luck."""
    h, profile = recorded(0.0, quick), costs(quick)["cpu"]
    space = whole_space(h)
    study, count = searched(h, space, profile, quick), 2 if quick else 12
    chosen = study.best()
    assert chosen is not None
    best = [trial.policy for trial in study.distinct()[:8]]
    policies = {p.id: p for p in (chosen.policy, *best, *random_policies(space, 8))}

    def timings(names: Iterable[str], places: Sequence[int]) -> Timings:
        encoded = encode_recorded(h.pair, [h.trace.trajectories[i] for i in places])
        every, how = [policies[name] for name in names], {"profile": profile, "passes": 2}
        return compare(h.pair, every, encoded, artifacts=h.find, **how).timings

    first = timings(policies, h.test[:count])
    fastest = policies[first.leader([name for name in policies if name != chosen.policy.id])]
    both = chosen.policy.id, fastest.id
    ours = finite(timings(both, h.test[count : 3 * count]).ratio(*both))
    one, other = (replayed(h, policies[name], profile).total.seconds for name in both)
    why = f"{chosen.policy.label()} over {fastest.label()}; replay says {other / one:.3f}"
    return [row("regret executed", "temperature 0, cpu", ours, why)]


RESULT = "papers"
PARTS = {
    f"{paper.__name__}_executed": paper
    for paper in (heterospec, c2t, dynaspec, on_the_fly, verifier, joint)
}

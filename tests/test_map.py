"""bench/map at a tiny size: cells are what replays by their costs would be, and docs/map.md says
what bench/results/map.json shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import lab, report
from bench.map import cells as the_map
from bench.map import costs, page
from bench.verdicts import outcome
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.spaces import DraftLimits
from spectune.runtime.pair import read_pair

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = {"1b": 1.236e9, "3b": 3.213e9, "8b": 8.030e9, "70b": 70.55e9}
"""Weights of Llama 3.2 1B and 3B and of Llama 3.1 8B and 70B, by their model cards."""


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return lab.halves(tmp_path_factory.mktemp("map"), 0.0, quick=True)


@pytest.fixture(scope="module")
def drafted(halves: Any) -> dict[str, Any]:
    """Policies of two drafts, replayed."""
    limits = DraftLimits(rows=4096)
    return {draft: the_map.Drafted.of(halves, draft, limits) for draft in ("small", "head")}


@pytest.mark.parametrize("draft", ["small", "head"])
def test_a_cell_of_the_grid_is_what_a_replay_by_its_costs_gives(
    halves: Any, drafted: dict[str, Any], draft: str
) -> None:
    of_draft = drafted[draft]
    kinds = {the_map.mechanism(one.policy) for one in of_draft.tried}
    assert {"nothing", "chain", "window", "tree"} <= kinds
    for cost, slope in ((0.05, 0.003), (0.2, 0.1)):
        cells = of_draft.grid_seconds(cost, slope)
        for one, seconds in zip(of_draft.tried, cells, strict=True):
            how = cost, slope, costs.beside_passes(one.policy)
            profile = costs.grid_profile(halves.pair.id, draft, 4096, *how)
            replay = run_replay(halves.trace, one.policy, profile, approximate=True)
            np.testing.assert_allclose(seconds, replay.seconds, err_msg=one.name)
    # autoregression takes a pass a token
    np.testing.assert_allclose(cells[0], np.diff(halves.trace.offsets))


def test_policies_are_chosen_on_one_half_and_compared_on_the_other(
    halves: Any, drafted: dict[str, Any]
) -> None:
    of_draft = drafted["small"]
    every = set(range(len(halves.trace.trajectories)))
    seconds = of_draft.grid_seconds(0.05, 0.003)
    before = the_map.judged(seconds, halves, of_draft.tried, every)
    changed = seconds.copy()
    changed[:, halves.test] *= np.linspace(1, 2, len(changed))[:, None]
    after = the_map.judged(changed, halves, of_draft.tried, every)
    assert (before["winner"], before["policy"]) == (after["winner"], after["policy"])
    assert before["over_nothing"] != after["over_nothing"]
    names = [one.name for one in of_draft.tried]
    plain, best = (changed[n, halves.test].sum() for n in (0, names.index(after["policy"])))
    value, low, high = after["over_nothing"]
    assert value == pytest.approx(plain / best, abs=1e-4)
    assert low <= value <= high
    dear = the_map.judged(of_draft.grid_seconds(5.0, 5.0), halves, of_draft.tried, every)
    assert dear["verdict"] == "nothing"


@pytest.mark.parametrize("draft", ["medium", "head"])
def test_one_client_takes_the_rounds_of_a_replay(halves: Any, draft: str) -> None:
    trace, order = the_map.servable(halves), halves.test
    policy = the_map.parse_policy({"draft": draft, "window": the_map.fixed(3)})
    replay = run_replay(halves.trace.select(order), policy, None, approximate=True)
    counts, _ = the_map.steps_of(trace, draft, 3, 1, order, the_map.FREE)
    assert counts[0] == replay.total.rounds + len(order)  # a step reads a prompt


def test_one_client_takes_the_rounds_of_a_tree_s_replay(
    halves: Any, drafted: dict[str, Any]
) -> None:
    (tree, *_), of_head = the_map.trees_of("head", 0.0), drafted["head"]
    assert the_map.mechanism(tree) == "tree"
    order = range(len(halves.trace.trajectories))
    rounds, verified, passes, further, decoding = the_map.tree_steps_of(
        halves.trace, tree, 1, order
    )
    names = [one.policy.label() for one in of_head.tried]
    counts = of_head.counts[names.index(tree.label()), :, :4].sum(0)
    assert decoding == counts[0] == rounds - len(order)
    assert (verified, passes) == pytest.approx((counts[1], counts[2]))
    assert further == pytest.approx(counts[3], rel=0.05)  # but for the ends of texts


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_weights_of_published_models(name: str) -> None:
    shape = costs.shape_of(name)
    tied = name in ("1b", "3b")
    embeddings = (1 if tied else 2) * shape.vocab * shape.hidden
    assert shape.layer_weights + embeddings == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_a_pass_takes_what_reading_its_weights_or_computing_its_products_takes() -> None:
    demo, roofline = read_pair("demo"), costs.roofline
    terms = roofline(demo, "h200", "8b", "1b").terms
    # 15.01 GB of weights at 4.8 TB/s; 131,072 bytes of cache a token; 15.01 GFLOP a row
    assert terms["target"].at(rows=8, context=0) == pytest.approx(3.127e-3, rel=1e-3)
    cached = terms["target"].at(rows=8, context=8192) - terms["target"].at(rows=8, context=0)
    assert cached == pytest.approx(8192 * 131072 / 4.8e12, rel=1e-6)
    assert terms["target"].at(rows=2048, context=0) == pytest.approx(2048 * 15.01e9 / 989e12, 1e-3)
    draft = terms["pass/small"].at(rows=1, context=0) + terms["head/small"].at(rows=4096)
    assert draft == pytest.approx(2 * 1.236e9 / 4.8e12, rel=1e-3)
    assert terms["head/small"].at(rows=1024) == pytest.approx(terms["head/small"].at(rows=4096) / 4)
    assert terms["step draft/small"].at(passes=3, batch=1) == pytest.approx(3 * draft, rel=1e-3)
    assert "phase/head" not in terms  # its chains are trees of width 1
    twice = roofline(demo, "2xh200", "8b", "1b").terms
    limits = (table["target"].at(rows=4, context=0) for table in (terms, twice))
    assert next(limits) == pytest.approx(2 * next(limits))
    one = roofline(demo, "rtx4090", "8b", "1b").terms["target"]
    assert one.at(rows=1, context=0) == pytest.approx(15.01e9 / 1008e9, rel=1e-3)


def test_pages_show_what_was_measured() -> None:
    figures = json.loads((ROOT / "bench" / "results" / "map.json").read_text())
    text = (ROOT / "docs" / "map.md").read_text()
    assert report.between(text, "map", page.page(figures)) == text
    for file, figure in page.figures_of(figures).items():
        assert figure == (ROOT / file).read_text()
    assert len(figures["cells"]) >= 500
    assert len(text.split()) <= 700
    assert sum(row["inside"] for row in figures["executed"]["rows"]) >= 4


@pytest.mark.parametrize(
    ("verdict", "over", "following", "is_"),
    [
        ("chain", [1.2, 1.1, 1.3], [0.98, 0.9, 1.1], "right"),
        ("chain", [1.1, 0.9, 1.3], [0.98, 0.9, 1.1], "a tie"),
        ("chain", [0.9, 0.8, 0.95], [0.98, 0.9, 1.1], "wrong"),
        ("nothing", [1.0, 1.0, 1.0], [0.9, 0.8, 0.95], "right"),
        ("nothing", [1.0, 1.0, 1.0], [1.0, 0.8, 1.2], "a tie"),
        ("nothing", [1.0, 1.0, 1.0], [1.1, 1.02, 1.2], "wrong"),
    ],
)
def test_not_to_draft_is_right_only_where_what_is_next_is_slower(
    verdict: str, over: list[float], following: list[float], is_: str
) -> None:
    assert outcome(verdict, over, following) == is_

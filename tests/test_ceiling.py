"""The speed that no tree of a draft can exceed, and tunings that leave trees out by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from databases import opened
from doors import put_made_up_profile
from synthetic import flat_profile, over_rows, with_terms
from test_publishing import QUICK, WORKLOAD

from spectune.optimizer.ceiling import tree_ceiling
from spectune.optimizer.tune import tune
from spectune.runtime.loading import LoadedPair

GROWN = replace(QUICK, tree_width=2, tree_depth=2, publish=False, budget_s=0.1)
SLOW = {"pass/near": over_rows((1, 9), (20e-3, 21e-3))}
"""A draft whose pass takes as long as five of the target's."""


def test_no_tree_exceeds_its_draft_s_ceiling_and_a_slow_draft_s_are_not_recorded(
    tmp_path: Path, pair: LoadedPair
) -> None:
    plain, told = flat_profile(pair.id, pair.drafts), list[str]()
    with opened(tmp_path / "x.db") as store:
        put_made_up_profile(store, pair, with_terms(plain, SLOW))
        tuned = tune(store, pair, WORKLOAD, replace(GROWN, tell=told.append))
        (why,) = tuned.left_out.values()
        assert why.startswith("cannot win: at best")
        assert f"left out: trees of near ({why})" in told
        assert store.get_recording(tuned.recording).drafts["near"].width == 1
        assert tuned.to_json()["left_out"] == {"trees of near": why}
        assert store.get_study(tuned.study).document["left_out"] == {"trees of near": why}
        put_made_up_profile(store, pair)
        tuned = tune(store, pair, WORKLOAD, GROWN)
        assert tuned.left_out == {}
        extent = store.get_recording(tuned.recording).drafts["near"]
        assert (extent.width, extent.depth) == (2, 2)
        study = store.get_study(tuned.study)
        searched = study.document["requests"]
        every = store.load(tuned.recording, ()).trajectories
        texts = [t for t in every if t.request_id in searched]
        grown = [t["value"] for t in study.trials if t["policy"]["growth"]["kind"] != "chain"]
        assert 0.0 < max(grown) <= tree_ceiling(plain, "near", texts, 2)
        tuned = tune(store, pair, WORKLOAD, replace(GROWN, tree_width=0, tree_depth=0))
        assert tuned.left_out["trees of near"].startswith("not tried: at best")

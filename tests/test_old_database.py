"""A database that an earlier version wrote opens, migrates, and holds what it held:
`tests/old/schema-0003.db`.

That version recorded a tiny pair with chains and trees, profiled it, tuned (fits, a study, a
publication), ran a policy, published again by hand, and added a schedule. What it said of its
replays stands below.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from databases import at_revision, copy_rows, opened
from doors import Door

from spectune.optimizer.artifacts import fitted
from spectune.optimizer.report.tuning import page, report_on
from spectune.runtime.policies.document import parse_policy

OLD = Path(__file__).parent / "old" / "schema-0003.db"
PAIR, RECORDING = "b4e20f8c543c", "rec-5abf98"
NEAR, TREE = {"draft": "near"}, {"kind": "top_k", "width": 3}
REPLAYS: list[tuple[dict[str, Any], tuple[int, int, int, int], float]] = [
    ({"draft": "none"}, (144, 0, 0, 144), 0.870),
    ({**NEAR, "window": {"kind": "fixed", "gamma": 3}}, (72, 194, 72, 266), 1.086),
    (
        {
            **NEAR, "window": {"kind": "fixed", "gamma": 6},
            "stop": {"kind": "max_prob", "threshold": 0.4},
        },
        (94, 90, 50, 184), 1.130,
    ),
    ({**NEAR, "window": {"kind": "heuristic", "gamma_max": 6}}, (68, 187, 76, 255), 1.084),
    ({"draft": "ngram", "window": {"kind": "fixed", "gamma": 5}}, (69, 188, 75, 257), 0.470),
    ({"draft": "far", "window": {"kind": "fsm", "gamma_max": 6}}, (136, 99, 8, 235), 0.904),
    (
        {
            **NEAR, "growth": TREE, "window": {"kind": "fixed", "gamma": 3},
            "select": {"top_n": 8},
        },
        (57, 424, 87, 481), 1.387,
    ),
    ({**NEAR, "growth": {"kind": "static", "artifact": "4fee4f983366"}}, (94, 90, 50, 184), 1.236),
    (
        {
            "draft": "far", "growth": TREE, "window": {"kind": "fixed", "gamma": 2},
            "stratify": {"artifact": "5860158721e0", "alpha": 1}, "select": {"top_n": 8},
        },
        (126, 864, 18, 990),
        3.249,
    ),
]  # fmt: skip
"""Policy; rounds, drafted, accepted and verified tokens; seconds."""


@pytest.fixture(params=["sqlite", "postgresql"])
def old_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The old database: the file itself, or its rows in PostgreSQL at its revision."""
    if request.param == "sqlite":
        return str(shutil.copyfile(OLD, tmp_path / "old.db"))
    url: str = request.getfixturevalue("postgresql_url")
    at_revision(url, "0003")
    copy_rows(url, OLD)
    return url


def test_an_old_database_migrates_and_holds_what_it_held(old_url: str) -> None:
    door = Door(old_url)
    assert door.call("db", "upgrade").exit_code == 0
    assert door.json("db", "check")["ok"] is True
    with opened(old_url) as store:
        loaded = store.load("latest", steps=True, trees=True)
        assert (loaded.info.id, loaded.info.pair_id) == (RECORDING, PAIR)
        assert loaded.drafts == ("far", "near", "ngram")
        assert [r.trajectory.request_id for r in loaded.requests] == [f"r{i}" for i in range(6)]
        assert sum(len(t.output_ids) for t in loaded.trajectories) == 144
        assert sum(s.emitted for r in loaded.requests for s in r.steps) == 144
        assert len(loaded.trees("near")) == len(loaded.panoramas("ngram")) == 6
        assert store.get_workload("latest").requests[0].turns == ("def add(a, b): 0",)
        kinds = {kind: fitted(store, PAIR)(name).kind for name, kind, *_ in store.list_artifacts()}
        fits = {"bins", "classifier", "draft_chooser", "score", "static_tree"}
        assert kinds == {kind: kind for kind in fits}
        policies = store.list_policies()
        assert [parse_policy(p.document).id for p in policies] == [p.id for p in policies]
        active = store.active_publication(PAIR, "cpu")
        assert (active.version, active.supersedes, active.reason) == (3, 2, "better")
        assert active.document["draft"] == "near"
        assert (active.deployment, active.sampling) == ("default", None)
        assert store.active_publication(PAIR, "cpu", "canary") is None
        assert store.list_publications()[-1].evidence["winner"]["label"] == "autoregressive"
        assert len(store.get_study("latest").trials) == 635
        text = page(report_on(store, "latest"))
        assert "Decode without a draft" in text
        assert "race, speed by category: Not stored" in text
        assert store.get_run("latest").outcome.total.rounds == 72
        profile = store.latest_profile(PAIR, "cpu")
        assert profile.id == "prof-da4538"
    (schedule,) = door.json("schedule", "list")["schedules"]
    assert (schedule["name"], schedule["when"], schedule["parked"]) == ("nightly", "every 6h", None)


@pytest.mark.parametrize("old_url", ["sqlite"], indirect=True)
def test_an_old_recording_replays_as_it_did(old_url: str) -> None:
    """Rounds and tokens exactly; seconds roughly: this profile has passes of 1e-7 s beside others
    of 1e-2, and a sum of terms cannot."""
    door = Door(old_url)
    assert door.call("db", "upgrade").exit_code == 0
    names = ("rounds", "drafted_tokens", "accepted_tokens", "verified_tokens")
    for policy, counts, seconds in REPLAYS:
        found = door.json("simulate", "--policy", json.dumps(policy))
        assert tuple(found[name] for name in names) == counts, policy
        assert found["emitted_tokens"] == 144
        assert 0.5 < found["seconds"] / seconds < 2.0, policy

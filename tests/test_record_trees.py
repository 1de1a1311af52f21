"""Recording trees: what is asked for, widened, resumed and covered, through the command and through
the calls behind it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from databases import opened
from doors import Door, write_workload
from recorded_texts import trace_of
from synthetic import flat_profile
from trace_values import a_tree

from spectune.optimizer import record as recorder
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.record import Look, cover_of, look_around
from spectune.optimizer.search import search
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.tune import TuneOptions, Tuning
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import ChainGrowth, parse_policy
from spectune.runtime.recording.panoramas import cover_name
from spectune.runtime.trees.grow import Codes
from spectune.traces.errors import PolicyError
from spectune.traces.schema import ACCEPTANCE
from spectune.traces.store import Asked, TraceStore
from spectune.traces.tables import Panorama, Trajectory

SHORT = ("--max-new-tokens", 8, "--gamma-max", 4)
GROWTH = {"kind": "static", "paths": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]}
STATIC = {"draft": "near", "growth": GROWTH}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Path:
    """A database with one recording of three requests, no trees."""
    folder = tmp_path_factory.mktemp("trees")
    door, workload = Door(str(folder / "spectune.db")), write_workload(folder / "w.jsonl", 3)
    door.json("record", "--pair", tiny_pair, "--workload", workload, *SHORT)
    return folder / "spectune.db"


@pytest.fixture
def door(tmp_path: Path, recorded: Path, tiny_pair: Path) -> Door:
    shutil.copyfile(recorded, tmp_path / "spectune.db")
    return Door(str(tmp_path / "spectune.db"), str(tiny_pair))


@pytest.fixture
def store(door: Door) -> Iterator[TraceStore]:
    with opened(door.db) as store:
        yield store


def resumed(door: Door, *arguments: object) -> dict[str, Any]:
    return door.json(
        "record", "--pair", door.pair, "--resume", "latest", "--gamma-max", 4, *arguments
    )


def extent(count: int, width: int, depth: int) -> dict[str, int]:
    return {"count": count, "gamma_max": max(4, depth), "width": width, "depth": depth}


def test_trees_are_recorded_with_the_texts(tmp_path: Path, tiny_pair: Path) -> None:
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    workload = write_workload(tmp_path / "w.jsonl", 2)
    trees = ("--temperature", 0.8, "--tree-width", 3, "--tree-depth", 2)
    made = door.json("record", "--pair", door.pair, "--workload", workload, *SHORT, *trees)
    grown = extent(2, 3, 2)
    assert made["drafts"] == {"near": grown, "far": grown, "ngram": extent(2, 1, 1)}
    with opened(door.db) as store:
        loaded = store.load(made["recording"])
    for panorama, trajectory in zip(loaded.panoramas("near"), loaded.trajectories, strict=True):
        assert panorama.positions == len(trajectory.output_ids)
        assert '{"kind":"top_k","score":"coupled(1.5)","width":3}' in panorama.covers
    listed = door.json("traces", "list")["recordings"][0]
    shown = door.json("traces", "show", "latest")
    assert listed["drafts"] == shown["drafts"] == made["drafts"]
    assert len(shown["requests"]) == 2
    said = "far 4 and trees 3x2, near 4 and trees 3x2, ngram 4"
    assert said in door.call("traces", "list", env={"COLUMNS": "250"}).stdout
    assert f"panoramas of {said}" in " ".join(door.call("traces", "show").stdout.split())


def test_tuning_records_no_chains_anew_at_a_temperature(
    tmp_path: Path, tiny_pair: Path, pair: LoadedPair
) -> None:
    """What `record` made is all that a tuning's replay reads."""
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    workload = write_workload(tmp_path / "w.jsonl", 2)
    asked = ("--pair", door.pair, "--workload", workload, *SHORT, "--temperature", 0.8)
    recording = str(door.json("record", *asked)["recording"])
    with opened(door.db) as store:
        before = store.load(recording).panoramas("near")
        wanted = TuneOptions(tree_width=0, gamma_max=4)
        tuning = Tuning(store, pair, recording, wanted, lambda *_: None, time.perf_counter, {})
        tuning.record_chains()
        assert store.load(recording).panoramas("near") == before


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chances_are_recorded_where_the_verifier_draws(
    tmp_path: Path, tiny_pair: Path, temperature: float, verifier: str
) -> None:
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    workload = write_workload(tmp_path / "w.jsonl", 1)
    how = ("--temperature", temperature, "--verifier", verifier)
    made = door.json("record", "--pair", door.pair, "--workload", workload, *SHORT, *how)
    with opened(door.db) as store:
        (panorama,) = store.load(made["recording"]).panoramas("near")
    drawn = verifier == "rejection" and temperature > 0
    assert len(panorama.trie.accept) == drawn * panorama.positions
    assert (ACCEPTANCE in panorama.covers) == drawn


def test_resume_finishes_what_was_begun(door: Door, store: TraceStore) -> None:
    """Texts as well as panoramas, by the arguments that it was begun with; not another one that was
    begun alike."""
    whole = store.get_recording(store.resolve_recording("latest"))

    def begin(**options: object) -> str:
        of = (whole.pair_id, whole.workload_id, whole.sampling, whole.max_new_tokens)
        return store.create_recording(Asked(*of, options={**whole.options, **options})).id

    begun, newer, other = begin(), begin(), begin(dtype="bfloat16")
    again = ("record", "--pair", door.pair, "--gamma-max", 4, "--resume")
    assert "no effect" in door.error(*again, begun, "--max-new-tokens", 99)
    found = door.json(*again, begun)
    assert (found["recording"], found["state"], found["drafts"]) == (
        begun,
        "complete",
        whole.to_json()["drafts"],
    )
    texts = [
        [t.output_ids.tolist() for t in store.load(name).trajectories] for name in (begun, whole.id)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3
    assert store.get_recording(newer).n_requests == 0
    fine = begin(dtype="float64")
    assert door.json(*again, fine, "--dtype", "float64")["state"] == "complete"
    line = door.refused(*again, other, "--dtype", "float32")
    assert f"recording {other} is unfinished and was begun on cpu in bfloat16" in line
    assert "--device cpu --dtype bfloat16" in line


def test_trees_are_widened_and_never_narrowed(door: Door, store: TraceStore) -> None:
    assert resumed(door)["drafts"]["near"] == extent(3, 1, 1)
    assert resumed(door, "--tree-width", 3, "--tree-depth", 2)["drafts"]["near"] == extent(3, 3, 2)
    narrow = store.load("latest").panoramas("near")
    assert resumed(door, "--tree-width", 2, "--tree-depth", 4)["drafts"]["near"] == extent(3, 3, 4)
    wide = store.load("latest").panoramas("near")
    for old, new in zip(narrow, wide, strict=True):
        for name in Codes._fields:
            roots = slice(old.positions + 1)
            assert np.array_equal(getattr(old.trie, name)[roots], getattr(new.trie, name)[roots])
        assert len(new.trie.parent) > len(old.trie.parent)
    assert resumed(door, "--tree-width", 2, "--tree-depth", 2)["drafts"]["near"] == extent(3, 3, 4)
    assert store.load("latest").panoramas("near") == wide


def test_one_limit_alone_or_a_cover_takes_the_default_of_the_other(door: Door) -> None:
    assert resumed(door, "--tree-depth", 2)["drafts"]["near"] == extent(3, 8, 2)
    made = resumed(door, "--cover", json.dumps(STATIC), "--tree-width", 2, "--tree-depth", 3)
    assert made["drafts"]["near"] == extent(3, 8, 3)
    assert made["drafts"]["far"] == extent(3, 8, 3)


def test_covers_are_kept_when_trees_are_widened(
    door: Door, store: TraceStore, tmp_path: Path
) -> None:
    sharp = {"kind": "top_k", "width": 2, "score": "coupled", "sharpness": 2.0}
    (tmp_path / "sharp.json").write_text(json.dumps({"draft": "near", "growth": sharp}))
    # A top_k policy's window is 4 by default; a static tree is as deep as its paths, but all is
    # recorded to one depth.
    covers = ("--cover", tmp_path / "sharp.json", "--cover", json.dumps(STATIC))
    resumed(door, "--tree-width", 2, "--tree-depth", 4, *covers)
    named = {
        '{"kind":"top_k","score":"coupled(2)","width":2}',
        cover_name(parse_policy(STATIC).growth, sampled=False),
    }
    recording = store.resolve_recording("latest")
    near, far = (set(store.most_held(recording, draft)[3]) for draft in ("near", "far"))
    assert named <= near
    assert not named & far  # a policy's growth is covered for its draft
    before = store.load("latest").panoramas("near")
    resumed(door, "--tree-width", 3, "--tree-depth", 3)
    for old, new in zip(before, store.load("latest").panoramas("near"), strict=True):
        assert (new.width, new.depth) == (3, 4)
        assert set(old.covers) < set(new.covers)
    stored = store.load("latest")
    resumed(door, "--cover", tmp_path / "sharp.json", "--tree-width", 3, "--tree-depth", 4)
    assert store.load("latest").panoramas("near") == stored.panoramas("near")


def classifier(store: TraceStore) -> str:
    weights = {
        "w1": np.ones((4, 3), np.float32),
        "b1": np.zeros(4, np.float32),
        "w2": np.ones(4, np.float32),
        "b2": np.zeros(1),
    }
    return store.put_artifact("classifier", {"draft": "near"}, weights)


def test_tune_covers_what_promises_more_than_the_recording_can_tell(
    door: Door, store: TraceStore, pair: LoadedPair
) -> None:
    """A growth that reads what was not recorded is left out of a search, until what is known of it
    beats all that was tried."""
    resumed(door, "--tree-width", 2, "--tree-depth", 3)
    recording = store.resolve_recording("latest")
    grower = {"kind": "classifier", "width": 2, "cap": 8, "beta": 0.3}
    grower["artifact"], window = classifier(store), {"kind": "fixed", "gamma": 3}
    wide = parse_policy({"draft": "near", "growth": grower, "window": window})

    def trace() -> ReplayTrace:
        return trace_of(store, recording, ["near"])

    find, profile = fitted(store), flat_profile(pair.id, pair.drafts)
    how: dict[str, Any] = {"gamma_max": 2, "trials": 0, "incumbents": [wide], "artifacts": find}
    study = search(trace(), profile, ["near"], **how)
    (beyond,) = study.beyond
    assert (beyond.policy, study.left_out()["policies"]) == (wide, 1)
    assert wide not in [t.policy for t in study.trials]
    known = replace(study, beyond=(replace(beyond, value=-1.0),))
    assert search(trace(), profile, ["near"], known=known, **how) == known
    wanted = TuneOptions(tree_width=2, tree_depth=3, gamma_max=4)
    tuning = Tuning(store, pair, recording, wanted, lambda *_: None, time.perf_counter, {})
    tuning.artifacts = find
    for share, covered in ((1.01, []), (0.99, ["near"])):
        others = replace(beyond, value=beyond.value * share)
        tuning.study = replace(study, trials=(others,))
        assert tuning.record_beyond() == covered
    assert run_replay(trace(), wide, profile, artifacts=find).missing == 0
    again = search(trace(), profile, ["near"], known=replace(study, beyond=()), **how)
    assert not again.beyond
    assert wide in [t.policy for t in again.trials]


def chosen(*others: dict[str, Any]) -> str:
    """A choice by prompt between no speculation and others."""
    plain = {"draft": "none", "window": {"kind": "fixed", "gamma": 0}}
    return json.dumps({**plain, "by_prompt": {"artifact": "0123", "others": others}})


def test_of_a_choice_by_prompt_the_trees_are_covered(door: Door, store: TraceStore) -> None:
    resumed(door, "--cover", chosen({"draft": "far"}, STATIC))
    panoramas = store.load(store.resolve_recording("latest")).panoramas("near")
    name = cover_name(parse_policy(STATIC).growth, sampled=False)
    assert all(name in panorama.covers for panorama in panoramas)


def test_a_chain_is_no_cover() -> None:
    with pytest.raises(PolicyError, match="drafts a chain"):
        cover_of(parse_policy({"draft": "near"}), sampled=False)


# --- heads


Retrace = Callable[..., set[tuple[str, int, int, int]]]


@pytest.fixture
def retraced(store: TraceStore, pair: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> Retrace:
    """Retraces drafts, one of them a head; what was made: (draft, gamma_max, width, depth)."""
    calls: set[tuple[str, int, int, int]] = set()

    def fake(_pair: LoadedPair, text: Trajectory, draft: str, covers: Any, **size: int) -> Panorama:
        calls.add((draft, *size.values()))
        names = (*(c.name for c in covers), cover_name(ChainGrowth(), sampled=False))
        return a_tree(text, draft, covers=names, **size)

    monkeypatch.setattr(recorder, "record_panorama", fake)
    headed = replace(pair, heads={"head": object()})  # type: ignore[dict-item]  # only its name is looked at
    recording = store.resolve_recording("latest")

    def made(gamma_max: int, width: int = 0, depth: int = 0) -> Any:
        calls.clear()
        look_around(store, headed, recording, Look(headed.draft_names, gamma_max, width, depth))
        return set(calls)

    return made


def test_what_is_recorded_anew_holds_all_that_was(retraced: Retrace) -> None:
    assert retraced(4) == {("head", 4, 1, 1)}
    assert retraced(6) == {(draft, 6, 1, 1) for draft in ("near", "far", "head", "ngram")}
    assert retraced(6) == retraced(4) == set()
    assert retraced(4, 3, 2) == {(draft, 6, 3, 2) for draft in ("near", "far", "head")}
    assert retraced(6, 3, 2) == retraced(5, 2, 2) == set()
    assert retraced(2, 2, 8) == {(draft, 8, 3, 8) for draft in ("near", "far", "head")}


# --- mistakes


def cover(**changes: object) -> tuple[str, str]:
    return "--cover", json.dumps(STATIC | changes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tree-width", 0), "--tree-width 0: from 1 to 32 is possible"),
        (("--tree-depth", 65), "--tree-depth 65: from 1 to 64 is possible"),
        (("--tree-width", 32, "--tree-depth", 64), "more than any policy may grow"),
        (("--cover", "nothing"), "--cover nothing: neither a file"),
        (("--cover", '{"draft": "near"}'), "drafts a chain; every recording covers those"),
        (("--cover", chosen({"draft": "near"})), "drafts a chain; every recording covers those"),
        ((*cover(draft="other"),), "the pair has no draft 'other' (it has: near, far, ngram)"),
        ((*cover(), "--tree-width", 1), "its trees are 2 wide; give --tree-width 2 instead of 1"),
        ((*cover(), "--tree-depth", 2), "its trees are 3 deep; give --tree-depth 3 instead of 2"),
        (cover(growth={"kind": "static", "artifact": "0123"}), "there is no artifact '0123'"),
    ],
)
def test_mistakes_cost_one_line(
    door: Door, tmp_path: Path, arguments: tuple[object, ...], says: str
) -> None:
    workload = write_workload(tmp_path / "w.jsonl", 3)
    for what in (("--resume", "latest"), ("--workload", workload, *SHORT)):
        assert says in door.refused("record", "--pair", door.pair, *what, *arguments)
    listed = door.json("traces", "list")["recordings"]
    assert [(r["n_requests"], r["drafts"]["near"]["width"]) for r in listed] == [(3, 1)]

"""Recording trees: what is asked for, widened, resumed and covered, through the command and through
the calls behind it."""

from __future__ import annotations

import json
import shutil
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

from spectune.optimizer.recording import record as recorder
from spectune.optimizer.recording.record import PanoramaSpec, record_panoramas
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.search import SearchStudy, Trial
from spectune.optimizer.tuning import pair_search
from spectune.optimizer.tuning.native import PairBench, PairRecording, TuneOptions
from spectune.optimizer.tuning.pair_search import PairSearch
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.runtime.trees.grow import Codes
from spectune.traces.errors import TraceError
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
        PairRecording(store, pair, recording).add(PanoramaSpec(pair.chain_drafts, 4))
        assert store.load(recording).panoramas("near") == before


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chances_are_recorded_above_temperature_0(
    tmp_path: Path, tiny_pair: Path, temperature: float, verifier: str
) -> None:
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    workload = write_workload(tmp_path / "w.jsonl", 1)
    how = ("--temperature", temperature, "--verifier", verifier)
    made = door.json("record", "--pair", door.pair, "--workload", workload, *SHORT, *how)
    with opened(door.db) as store:
        (panorama,) = store.load(made["recording"]).panoramas("near")
    assert len(panorama.trie.accept) == (temperature > 0) * panorama.positions


def test_resume_of_what_was_never_finished_says_how_to_finish_it(
    door: Door, store: TraceStore
) -> None:
    whole = store.get_recording(store.resolve_recording("latest"))
    of = (whole.pair_id, whole.workload_id, whole.sampling, whole.max_new_tokens)
    begun = store.create_recording(Asked(*of, options=whole.options)).id
    again = ("record", "--pair", door.pair, "--gamma-max", 4)
    called = door.call(*again, "--resume", begun, "--max-new-tokens", 99)
    assert "no effect: --max-new-tokens (acts where texts are decoded)" in called.stderr
    assert f"recording {begun} was never finished: the `record` that began it" in called.stderr


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


def test_one_limit_alone_takes_the_default_of_the_other(door: Door) -> None:
    assert resumed(door, "--tree-depth", 2)["drafts"]["near"] == extent(3, 8, 2)


def test_simulate_reads_what_a_recording_lacks(door: Door, store: TraceStore) -> None:
    """A tree that reads other distributions than were recorded: the draft reads them, once, and
    the rounds are those of a recording that holds them all."""
    resumed(door, "--tree-width", 2, "--tree-depth", 3)
    sharp = {"kind": "top_k", "width": 2, "score": "coupled", "sharpness": 8.0}
    deep = {"kind": "static", "paths": [[1], [1, 1], [1, 1, 0]]}
    before = store.load("latest").panoramas("near")
    for growth in (deep, sharp):
        policy = {"draft": "near", "growth": growth, "window": {"kind": "fixed", "gamma": 3}}
        found = door.json("simulate", "--policy", json.dumps(policy))
        sizes = [len(p.trie.count) for p in store.load("latest").panoramas("near")]
        again = door.json("simulate", "--policy", json.dumps(policy))
        assert again == found
        assert sizes == [len(p.trie.count) for p in store.load("latest").panoramas("near")]
    for old, new in zip(before, store.load("latest").panoramas("near"), strict=True):
        for name in Codes._fields:
            held = len(old.trie.count)
            assert np.array_equal(getattr(old.trie, name), getattr(new.trie, name)[:held])
    assert sum(sizes) > sum(len(p.trie.count) for p in before)


def test_what_cannot_be_read_is_refused(door: Door, store: TraceStore) -> None:
    """Distributions that are not there never count as if the draft proposed nothing."""
    resumed(door, "--tree-width", 2, "--tree-depth", 3)
    trace = trace_of(store, store.resolve_recording("latest"), ["near"])
    growth = {"kind": "static", "paths": [[1], [1, 1], [1, 1, 0]]}
    policy = parse_policy({"draft": "near", "growth": growth})
    assert run_replay(trace, policy, approximate=True).missing > 0
    with pytest.raises(TraceError, match="the draft is not at hand to read them"):
        run_replay(trace, policy)


def test_tuning_records_trees_on_a_few_requests_first(
    door: Door, store: TraceStore, pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the others only where their best tree is not far behind the best policy."""
    monkeypatch.setattr(pair_search, "FEW_REQUESTS", 1)
    recording, lines = store.resolve_recording("latest"), list[str]()
    settings = TuneOptions(tree_width=2, tree_depth=2, gamma_max=4, tell=lines.append)

    def tuning() -> PairSearch:
        held = PairRecording(store, pair, recording, lines.append)
        held.add(PanoramaSpec(pair.chain_drafts, 4))
        opened, profile = held.open(pair.chain_drafts), flat_profile(pair.id, pair.drafts)
        made = PairSearch(PairBench(held, opened, profile, settings), AUTOREGRESSIVE)
        made.study = SearchStudy((Trial(parse_policy({"draft": "near"}), 1.0, "test"),), 0, "")
        return made

    def widths() -> list[int]:
        return sorted(p.width for p in store.load(recording).panoramas("near"))

    first = tuning()
    monkeypatch.setattr(PairSearch, "best_tree", lambda *_: 0.8)
    first.record_trees()
    assert (widths(), first.grown) == ([1, 1, 2], ())
    assert "Trees of near are left out: on 1 requests their best is 20% slower" in "".join(lines)
    monkeypatch.setattr(PairSearch, "best_tree", lambda *_: 0.95)
    second = tuning()
    second.record_trees()
    assert (widths(), second.grown) == ([2, 2, 2], ("near", "far"))


# --- heads


Retrace = Callable[..., set[tuple[str, int, int, int]]]


@pytest.fixture
def retraced(store: TraceStore, pair: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> Retrace:
    """Retraces drafts, one of them a head; what was made: (draft, gamma_max, width, depth)."""
    calls: set[tuple[str, int, int, int]] = set()

    def fake(_pair: LoadedPair, text: Trajectory, draft: str, **size: int) -> Panorama:
        calls.add((draft, *size.values()))
        return a_tree(text, draft, **size)

    monkeypatch.setattr(recorder, "record_panorama", fake)
    headed = replace(pair, heads={"head": object()})  # type: ignore[dict-item]  # only its name is looked at
    recording = store.resolve_recording("latest")

    def made(gamma_max: int, width: int = 0, depth: int = 0) -> Any:
        calls.clear()
        record_panoramas(
            store, headed, recording, PanoramaSpec(headed.draft_names, gamma_max, width, depth)
        )
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tree-depth", 65), "--tree-depth: '65': it should be less than or equal to 64"),
        (("--tree-width", 32, "--tree-depth", 64), "more than any policy may grow"),
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

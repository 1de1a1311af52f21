"""Shortlists from the fit to the table of a tuning: frequencies and routers, what a search records
on demand, and what `tune` executes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from databases import opened
from doors import Door, put_made_up_profile, write_workload
from pairs import chain, make_pair
from synthetic import flat_profile, over_rows, with_terms

from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.fit.corpus import corpus_tokens
from spectune.optimizer.fit.dynaspec import EVERY, LEVELS, cluster, examples
from spectune.optimizer.fit.shared import texts_to_fit
from spectune.optimizer.inputs import read_files
from spectune.optimizer.tuning.native import TuneOptions, tune_pair
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import ROUTER
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.traces.cost_table import CostTable
from spectune.traces.errors import WorkloadError
from spectune.traces.schema import Sampling
from spectune.traces.tables import LatencyProfile

GAMMA, ROWS = 6, 300


def priced(profile: LatencyProfile, rows: int, saved: float, step_s: float = 0.0) -> LatencyProfile:
    """A pass of ``near`` takes ``step_s`` and 1 ms of its whole head; over a 64th of the head
    ``saved`` of that less."""
    sizes, step = (max(1, rows // 64), rows), CostTable((step_s,))
    head = over_rows(sizes, (1e-3 * (1 - saved), 1e-3))
    return with_terms(profile, {"head/near": head, "gathered/near": head, "pass/near": step})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    folder = tmp_path_factory.mktemp("pair")
    return load_pair(read_pair(str(make_pair(folder))), device="cpu", drafts=("near",))


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Iterator[Door]:
    """A database with a recording of chains, of the pair that the environment names."""
    folder = tmp_path_factory.mktemp("shortlists")
    door = Door(str(folder / "spectune.db"), str(tiny_pair))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECTUNE_PAIR", str(tiny_pair))
        size = {"max_new_tokens": 24, "gamma_max": GAMMA}
        door.json("record", workload=write_workload(folder / "w.jsonl", 6), **size)
        yield door


@pytest.mark.parametrize(
    ("saved", "trees"),
    [(0.9, (0, 0)), (0.9, (4, 3)), (-0.5, (0, 0))],
    ids=["chains", "trees", "head cheap"],
)
def test_tune_records_and_executes_shortlists_where_they_may_win(
    pair: LoadedPair, tmp_path: Path, saved: float, trees: tuple[int, int]
) -> None:
    """Where the head dominates, chains alone included, at least 8 settings of every kind are tried
    and one is executed; where it does not, nothing is fitted. No text of the search was fitted
    to."""
    workload = read_files([str(write_workload(tmp_path / "w.jsonl", 16))])
    rows = pair.models["near"].output.rows
    width, depth = trees
    options = TuneOptions(
        options=DecodeOptions(Sampling(), 24), gamma_max=GAMMA, trials=120, budget_s=1,
        publish=False, finalists=2, tree_width=width, tree_depth=depth,
    )  # fmt: skip
    with opened(tmp_path / "spectune.db") as store:
        put_made_up_profile(store, pair, priced(flat_profile(pair.id, pair.drafts), rows, saved))
        tuned = tune_pair(store, pair, workload, options)
        study = store.get_study(tuned.study)
        routers = store.list_artifacts(ROUTER)
        if routers:
            document = store.get_artifact(routers[0].id).document
            texts = texts_to_fit(store, document["recording"], pair.spec)
            assert document["request_ids"] == [t.request_id for t in texts]
            assert not {*document["request_ids"]} & {*study.document["requests"]}
    tried = [t["policy"]["shortlist"] for t in study.trials]
    settings = {json.dumps(s) for s in tried if s["kind"] != "full"}
    executed = {c.policy.shortlist.kind for c in tuned.candidates} - {"full"}
    if saved > 0:
        assert {s["kind"] for s in tried} >= {"frequency", "position_frequency", "clusters"}
        assert len(settings) >= 8
        assert len(executed) > 0
        assert len(routers) == 1
    else:
        assert (settings, executed, routers) == (set(), set(), ())
    assert tuned.texts.differ == 0


def test_shortlists_that_cannot_win_are_not_recorded(pair: LoadedPair, tmp_path: Path) -> None:
    """A pass of a second loses to autoregression, whatever its shortlist saves."""
    workload = read_files([str(write_workload(tmp_path / "w.jsonl", 16))])
    options = TuneOptions(
        options=DecodeOptions(Sampling(), 24), gamma_max=GAMMA, trials=30, budget_s=1,
        publish=False, tree_width=0,
    )  # fmt: skip
    with opened(tmp_path / "spectune.db") as store:
        rows, flat = pair.models["near"].output.rows, flat_profile(pair.id, pair.drafts)
        put_made_up_profile(store, pair, priced(flat, rows, 0.9, step_s=1.0))
        tuned = tune_pair(store, pair, workload, options)
        assert store.list_artifacts(ROUTER)
        requests = store.load(tuned.recording).requests
        assert not any("@" in draft for r in requests for draft in r.panoramas)


def test_fitted_shortlists_are_recorded_and_simulated(door: Door) -> None:
    """`fit frequencies` and `fit router`, then a chain and a tree under each are
    simulated, whose drafts are recorded meanwhile."""
    frequencies = door.json("fit frequencies")
    router = door.json("fit router --draft near --clusters 12 --epochs 2")
    assert frequencies["tokens"] > 0
    assert frequencies["policy"]["shortlist"]["size"] == max(1, frequencies["vocab"] // 4)
    assert sum(router["cluster_sizes"]) == frequencies["vocab"]
    shares = list(frequencies["coverage"].values())
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for fitted in (frequencies, router):
        shortlist = fitted["policy"]["shortlist"]
        growth = {"growth": {"kind": "top_k", "width": 3}, "select": {"top_n": 8}}
        for more in ({}, growth):
            policy = json.dumps(chain("near", 3, shortlist=shortlist) | more)
            simulated = door.json("simulate", policy=policy, recording="latest", limit=3)
            assert simulated["rounds"] > 0
            assert not simulated.get("approximate")


def test_a_corpus_is_fitted_to_and_other_options_are_named(door: Door, tmp_path: Path) -> None:
    """Text, JSON lines and folders, of which what is no text is skipped."""
    file, folder = tmp_path / "corpus.txt", tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    file.write_text("the quick brown fox\n" * 5)
    (folder / "picture").write_bytes(b"\x89PNG\0\xff" * 50)
    rows: list[dict[str, Any]] = [{"text": "the quick brown fox"}] * 4
    rows += [{"id": "a", "messages": [{"role": "user", "content": "the quick brown fox"}]}]
    (folder / "below" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    counted = door.json("fit frequencies", corpus=file)
    assert counted["corpus"] == [str(file)]
    below = door.json("fit frequencies", corpus=folder)
    assert min(counted["tokens"], below["tokens"]) > 5
    with opened(door.db) as store:
        artifact = store.get_artifact(counted["artifact"])
    order = Frequencies.from_document(artifact.document, artifact.arrays)
    assert sorted(order.order.tolist()) == list(range(order.vocab))
    router = door.json("fit router --draft near --clusters 8", corpus=folder)
    assert router["examples"] > below["tokens"]  # the draft's own go on from there
    assert "--draft is needed" in door.error("fit router")
    assert "no such draft" in door.error("fit router --draft nothing")
    (tmp_path / "empty.txt").write_text("")
    assert "no tokens" in door.error("fit frequencies", corpus=tmp_path / "empty.txt")
    assert "No such file" in door.error("fit frequencies", corpus=tmp_path / "missing")
    assert "not UTF-8 text" in door.error("fit frequencies", corpus=folder / "picture")
    (tmp_path / "bad.jsonl").write_text('{"id": 3}\n')
    assert "no text under text" in door.error("fit frequencies", corpus=tmp_path / "bad.jsonl")


def test_lines_of_a_corpus_are_read_once(pair: LoadedPair, tmp_path: Path) -> None:
    """Of files of many pieces, in any order."""
    lines = [f"line {i} " + "x" * (i * 37 % 900) for i in range(300)]
    (tmp_path / "long.txt").write_text("\n".join(lines))
    rows = (json.dumps({"text": line}) for line in lines)
    (tmp_path / "long.jsonl").write_text("\n".join(rows))
    for name, seed in (("long.txt", None), ("long.jsonl", 3)):
        read = [pair.text(ids) for ids, _ in corpus_tokens(pair, [str(tmp_path / name)], seed=seed)]
        numbers = re.findall(r"line (\d+)", "\n".join(read))
        assert len(read) > 5
        assert sorted(map(int, numbers)) == list(range(300))


def test_a_line_of_a_corpus_that_is_no_text_costs_itself_alone(
    pair: LoadedPair, tmp_path: Path
) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text('{"text": "before"}\n{"text": "cut \\ud83d"}\n{"text": "after"}\n')
    ((ids, _),) = corpus_tokens(pair, [str(file)])
    assert pair.text(ids) == "before\n\ncut ?\n\nafter"
    file.write_text("[" * 100_000)
    with pytest.raises(WorkloadError, match=r"odd\.jsonl: not JSON: \[\["):
        list(corpus_tokens(pair, [str(file)]))


def test_examples_after_drafted_tokens_are_those_of_a_text_with_them(pair: LoadedPair) -> None:
    """What the draft goes on with greedily is read as if it were text."""
    ids, labels = np.random.default_rng(2).integers(5, 200, 24).tolist(), 3
    x, top = next(examples(pair, "near", [(ids, 1)], labels))
    count, starts = len(ids) - 1, range(1, len(ids), EVERY)
    for n, start in enumerate(starts):
        text = ids[: start + 1]
        for level in range(1, 1 + LEVELS):
            above = start - 1 if level == 1 else count + (level - 2) * len(starts) + n
            text = [*text, int(top[above, 0])]
            inputs, best = next(examples(pair, "near", [(text, len(text) - 1)], labels))
            at = count + (level - 1) * len(starts) + n
            np.testing.assert_allclose(x[at], inputs[0], atol=1e-4)
            assert top[at].tolist() == best[0].tolist()


def test_clusters_are_of_directions() -> None:
    """Rows around orthogonal directions are found whatever their lengths."""
    rng = np.random.default_rng(0)
    directions = np.linalg.qr(rng.normal(size=(24, 24)))[0][:12]
    group = rng.permutation(np.repeat(np.arange(12), 30))
    head = directions[group] + rng.normal(size=(len(group), 24)) * 0.05
    head *= 10 ** rng.uniform(-1, 1, (len(group), 1))
    of = cluster(head.astype(np.float32), 12, seed=3).of.tolist()
    assert len(set(zip(of, group.tolist(), strict=True))) == 12


def test_a_row_is_in_the_cluster_of_the_nearest_direction() -> None:
    """Clusters of unequal spread: the nearest mean of rows of length 1 is another one's."""
    rng = np.random.default_rng(1)
    spread = np.repeat([0.05, 1.5], 200)[:, None]
    head = rng.normal(size=(2, 8)).repeat(200, 0) + spread * rng.normal(size=(400, 8))
    unit = head / np.linalg.norm(head, axis=1, keepdims=True)
    of = cluster(head.astype(np.float32), 5, seed=0).of
    means = np.stack([unit[of == c].mean(0) for c in range(5)])
    cosines = unit @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T
    assert (cosines.argmax(1) == of).mean() > 0.99
    assert (((unit[:, None] - means) ** 2).sum(-1).argmin(1) == of).mean() < 0.99


def test_no_other_draft_of_a_recording_is_listed(door: Door) -> None:
    """Shortlists that were recorded are no drafts of the pair."""
    listed: dict[str, Any] = door.json("traces show latest")
    assert not any("@" in draft for draft in listed["drafts"])

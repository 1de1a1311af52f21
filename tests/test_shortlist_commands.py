"""``fit frequencies|clusters|router``, and policies with what they made: executed, simulated,
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doors import Door, write_workload
from pairs import make_pair
from transformers import PreTrainedTokenizerFast

from spectune.db import open_database
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.policies.router import Routing
from spectune.traces.store import TraceStore

TOKENS = 24


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Door:
    """A database with a recording with trees."""
    folder = tmp_path_factory.mktemp("shortlists")
    door = Door(str(folder / "spectune.db"), str(tiny_pair))
    door.json(
        *(
            "record",
            "--pair",
            tiny_pair,
            "--workload",
            write_workload(folder / "w.jsonl", 6),
            "--max-new-tokens",
            TOKENS,
        ),
        *("--gamma-max", 6, "--tree-width", 6, "--tree-depth", 4),
    )
    return door


@pytest.fixture(scope="module")
def frequencies(door: Door, tiny_pair: Path) -> dict[str, Any]:
    return door.json("fit", "frequencies", "--pair", tiny_pair)


@pytest.fixture(scope="module")
def router(door: Door, tiny_pair: Path) -> dict[str, Any]:
    return door.json(
        "fit", "router", "--pair", tiny_pair, "--draft", "near", "--clusters", 12, "--epochs", 2
    )


def policy_file(folder: Path, document: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "policy.json"
    file.write_text(json.dumps(document))
    return file


def test_what_is_counted_is_the_recording(door: Door, frequencies: dict[str, Any]) -> None:
    """Counts are those of the search part's prompts and outputs; special tokens come first;
    coverage grows to 1."""
    with open_database(door.db) as database:
        store = TraceStore(database)
        artifact = store.get_artifact(frequencies["artifact"])
        texts = {t.request_id: t for t in store.load(frequencies["recording"], []).trajectories}
    found = Frequencies.from_document(artifact.document, artifact.arrays)
    assert frequencies["requests"] < len(texts)
    assert (
        0
        < frequencies["tokens"]
        <= sum(len(t.prompt_ids) + len(t.output_ids) for t in texts.values())
    )
    assert frequencies["always"] == found.always >= 1
    assert frequencies["policy"]["shortlist"]["size"] == max(1, found.vocab // 4)
    shares = list(frequencies["coverage"].values())
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_corpus_is_counted_instead(door: Door, tiny_pair: Path, tmp_path: Path) -> None:
    """Two files; a missing one is named."""
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("the quick brown fox " * 5)
    made = door.json(
        "fit",
        "frequencies",
        "--pair",
        tiny_pair,
        "--corpus",
        tmp_path / "one.txt",
        "--corpus",
        tmp_path / "two.txt",
    )
    assert made["tokens"] % 2 == 0
    assert "recording" not in made
    assert "gone.txt" in door.error(
        "fit", "frequencies", "--pair", tiny_pair, "--corpus", tmp_path / "gone.txt"
    )


def test_a_corpus_with_tokens_that_the_models_lack(door: Door, tmp_path: Path) -> None:
    """A tokenizer that was extended after training makes ids beyond the output heads: the file and
    the token are named. So are a file that is no UTF-8 and one without text."""
    pair = make_pair(tmp_path)
    for name in ("target", "near", "far"):
        words = PreTrainedTokenizerFast.from_pretrained(tmp_path / name)
        words.add_tokens(["<new>"])
        words.save_pretrained(tmp_path / name)
    for content, named in (
        (b"the fox <new> sleeps", "'<new>'"),
        (b"\xff\xfe", "UTF-8"),
        (b"", "no tokens"),
    ):
        file = tmp_path / "corpus.txt"
        file.write_bytes(content)
        line = door.error("fit", "frequencies", "--pair", pair, "--corpus", file)
        assert "corpus.txt" in line
        assert named in line


def test_a_router_says_how_good_it_is(router: dict[str, Any], door: Door) -> None:
    """Its scores are shares, grow with the clusters taken, and all clusters keep everything; the
    head's hash is stored."""
    scores = router["scores"]
    assert scores["ks"][-1] <= 12
    for name in ("recall", "mass", "size"):
        assert scores[name] == sorted(scores[name])
    assert all(m <= o + 1e-9 for m, o in zip(scores["mass"], scores["oracle"], strict=True))
    with open_database(door.db) as database:
        artifact = TraceStore(database).get_artifact(router["artifact"])
    routing = Routing.from_document(artifact.document, artifact.arrays)
    assert routing.clusters.count == 12
    assert sum(router["cluster_sizes"]) == routing.clusters.vocab


def test_a_router_replays_on_its_own_recording(
    door: Door, tiny_pair: Path, router: dict[str, Any], frequencies: dict[str, Any], tmp_path: Path
) -> None:
    """Its cluster ranks are made with it, of all requests; chains are not called approximate, trees
    are; no ranks for another draft."""
    with open_database(door.db) as database:
        ranks = TraceStore(database).get_artifact(router["ranks"])
    assert len(ranks.document["requests"]) == 6 > router["requests"]
    block = {"kind": "clusters", "k0": 6, "k1": 4, "k_min": 1, "artifact": router["artifact"][:8]}
    growth = {
        "growth": {"kind": "top_k", "width": 3},
        "select": {"top_n": 8},
        "window": {"kind": "fixed", "gamma": 3},
    }
    for more, approximate in (({"window": {"kind": "fixed", "gamma": 4}}, False), (growth, True)):
        file = policy_file(
            tmp_path / str(approximate), {"draft": "near", "shortlist": block, **more}
        )
        simulated = door.json(
            "simulate", "--policy", file, "--recording", router["recording"], "--limit", 3
        )
        assert simulated["requests"] == 3
        assert ("approximate" in simulated) == approximate
    arguments = ("fit", "ranks", "--pair", tiny_pair, "--recording", router["recording"], "--draft")
    assert "fitted on draft 'near'" in door.error(*arguments, "far", "--router", router["artifact"])
    assert "not a router" in door.error(*arguments, "near", "--router", frequencies["artifact"])
    assert "no such draft" in door.error(*arguments, "ngram", "--router", router["artifact"])
    assert "one order" in door.error(*arguments, "near")
    assert "one order" in door.error(
        *arguments, "near", "--router", router["artifact"], "--frequencies", frequencies["artifact"]
    )


def test_a_frequency_order_replays_on_its_own_recording_and_on_others(
    door: Door, tiny_pair: Path, router: dict[str, Any], frequencies: dict[str, Any], tmp_path: Path
) -> None:
    """Its ranks are made with it where trees were recorded. One of a corpus has none, and
    `simulate` names the command that makes them."""
    assert set(frequencies["ranks"]) == {"near", "far"}
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox " * 5)
    counted = door.json("fit", "frequencies", "--pair", tiny_pair, "--corpus", corpus)
    assert counted["ranks"] == {}
    block = {"kind": "frequency", "size": 2, "artifact": counted["artifact"]}
    file = policy_file(
        tmp_path / "p",
        {"draft": "near", "window": {"kind": "fixed", "gamma": 4}, "shortlist": block},
    )
    simulate = ("simulate", "--policy", file, "--recording", router["recording"])
    assert door.json(*simulate)["approximate"] is True
    arguments = (
        "fit",
        "ranks",
        "--pair",
        tiny_pair,
        "--recording",
        router["recording"],
        "--draft",
        "near",
    )
    made = door.json(*arguments, "--frequencies", counted["artifact"])
    assert (made["kind"], made["requests"]) == ("frequency_ranks", 6)
    assert "approximate" not in door.json(*simulate)


def test_clusters_alone_are_taken_further(
    door: Door, tiny_pair: Path, router: dict[str, Any]
) -> None:
    """The router keeps the clusters it is given; those of another draft's head are refused, and
    what is none."""
    made = door.json("fit", "clusters", "--pair", tiny_pair, "--draft", "near", "--clusters", 5)
    taken = door.json(
        *(
            "fit",
            "router",
            "--pair",
            tiny_pair,
            "--draft",
            "near",
            "--clusters-from",
            made["artifact"],
            "--epochs",
            1,
        )
    )
    assert taken["cluster_sizes"] == made["cluster_sizes"]
    arguments = ("fit", "router", "--pair", tiny_pair, "--draft")
    assert "another output head" in door.error(
        *arguments, "far", "--clusters-from", made["artifact"]
    )
    assert "5000" in door.error(
        "fit", "clusters", "--pair", tiny_pair, "--draft", "near", "--clusters", 5000
    )
    assert "no such draft" in door.error(*arguments, "ngram")

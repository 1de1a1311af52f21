"""``fit frequencies|clusters|router``, and policies with what they made: executed, simulated,
refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from databases import opened
from doors import Door, write_workload
from pairs import make_pair
from transformers import PreTrainedTokenizerFast

from spectune.runtime.policies.dynaspec import Routing
from spectune.runtime.policies.fr_spec import Frequencies

TOKENS = 24


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Iterator[Door]:
    """A database with a recording with trees, of the pair that the environment names."""
    folder = tmp_path_factory.mktemp("shortlists")
    door = Door(str(folder / "spectune.db"), str(tiny_pair))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECTUNE_PAIR", str(tiny_pair))
        size = {"max_new_tokens": TOKENS, "gamma_max": 6, "tree_width": 6, "tree_depth": 4}
        door.json("record", workload=write_workload(folder / "w.jsonl", 6), **size)
        yield door


@pytest.fixture(scope="module")
def frequencies(door: Door) -> dict[str, Any]:
    return door.json("fit frequencies")


@pytest.fixture(scope="module")
def router(door: Door) -> dict[str, Any]:
    return door.json("fit router --draft near --clusters 12 --epochs 2")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text("the quick brown fox " * 5)
    return file


def simulated(door: Door, recording: str, shortlist: dict[str, Any], **how: Any) -> dict[str, Any]:
    """A replay of a recording under a policy of draft ``near`` with a shortlist; with trees where
    the policy has a ``growth``."""
    policy = {"draft": "near", "shortlist": shortlist, "window": {"kind": "fixed", "gamma": 3}}
    return door.json("simulate", policy=json.dumps(policy | how), recording=recording, limit=3)


def test_what_is_counted_is_the_recording(door: Door, frequencies: dict[str, Any]) -> None:
    """Counts are those of the search part's prompts and outputs; special tokens come first;
    coverage grows to 1."""
    with opened(door.db) as store:
        artifact = store.get_artifact(frequencies["artifact"])
        texts = {t.request_id: t for t in store.load(frequencies["recording"], []).trajectories}
    found = Frequencies.from_document(artifact.document, artifact.arrays)
    assert frequencies["requests"] < len(texts)
    most = sum(len(t.prompt_ids) + len(t.output_ids) for t in texts.values())
    assert 0 < frequencies["tokens"] <= most
    assert frequencies["always"] == found.always >= 1
    assert frequencies["policy"]["shortlist"]["size"] == max(1, found.vocab // 4)
    shares = list(frequencies["coverage"].values())
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_lately_decoded_texts_are_counted(door: Door, frequencies: dict[str, Any]) -> None:
    """A recording made of it, which is the same requests here, with their panoramas."""
    made = door.json("fit frequencies --since 24h")
    assert made["recording"] != frequencies["recording"]
    with opened(door.db) as store:
        lately, before = (store.load(of["recording"]) for of in (made, frequencies))
    assert lately.info.source == "gathered"
    assert lately.requests == before.requests
    assert "nothing was recorded" in door.error("fit frequencies --since 2099-01-01")


def test_a_corpus_is_counted_instead(door: Door, corpus: Path) -> None:
    """Two files; a missing one is named."""
    again = corpus.with_name("again.txt")
    again.write_text(corpus.read_text())
    made = door.json("fit frequencies", corpus=[corpus, again])
    assert made["tokens"] % 2 == 0
    assert "recording" not in made
    assert "gone.txt" in door.error("fit frequencies --corpus gone.txt")


def test_a_corpus_with_tokens_that_the_models_lack(door: Door, tmp_path: Path) -> None:
    """A tokenizer that was extended after training makes ids beyond the output heads: the file and
    the token are named. So are a file that is no UTF-8 and one without text."""
    pair = make_pair(tmp_path)
    for name in ("target", "near", "far"):
        words = PreTrainedTokenizerFast.from_pretrained(tmp_path / name)
        words.add_tokens(["<new>"])
        words.save_pretrained(tmp_path / name)
    file = tmp_path / "corpus.txt"
    for content, named in (
        (b"the fox <new> sleeps", "'<new>'"),
        (b"\xff\xfe", "UTF-8"),
        (b"", "no tokens"),
    ):
        file.write_bytes(content)
        line = door.error("fit frequencies", pair=pair, corpus=file)
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
    with opened(door.db) as store:
        artifact = store.get_artifact(router["artifact"])
    routing = Routing.from_document(artifact.document, artifact.arrays)
    assert routing.clusters.count == 12
    assert sum(router["cluster_sizes"]) == routing.clusters.vocab


def test_a_router_replays_on_its_own_recording(
    door: Door, router: dict[str, Any], frequencies: dict[str, Any]
) -> None:
    """Its cluster ranks are made with it, of all requests; chains are not called approximate, trees
    are; no ranks for another draft."""
    with opened(door.db) as store:
        ranks = store.get_artifact(router["ranks"])
    assert len(ranks.document["requests"]) == 6 > router["requests"]
    block = {"kind": "clusters", "k0": 6, "k1": 4, "k_min": 1, "artifact": router["artifact"][:8]}
    chains = simulated(door, router["recording"], block)
    assert chains["requests"] == 3
    assert "approximate" not in chains
    growth = {"growth": {"kind": "top_k", "width": 3}, "select": {"top_n": 8}}
    trees = simulated(door, router["recording"], block, **growth)
    assert trees["requests"] == 3
    assert "approximate" in trees
    own, order = {"router": router["artifact"]}, {"frequencies": frequencies["artifact"]}
    for draft, given, says in (
        ("far", own, "fitted on draft 'near'"),
        ("near", {"router": frequencies["artifact"]}, "not a router"),
        ("ngram", own, "no such draft"),
        ("near", {}, "one order"),
        ("near", own | order, "one order"),
    ):
        assert says in door.error("fit ranks", recording=router["recording"], draft=draft, **given)


def test_a_frequency_order_replays_on_its_own_recording_and_on_others(
    door: Door, router: dict[str, Any], frequencies: dict[str, Any], corpus: Path
) -> None:
    """Its ranks are made with it where trees were recorded. One of a corpus has none, and
    `simulate` names the command that makes them."""
    assert set(frequencies["ranks"]) == {"near", "far"}
    counted = door.json("fit frequencies", corpus=corpus)
    assert counted["ranks"] == {}
    block = {"kind": "frequency", "size": 2, "artifact": counted["artifact"]}
    assert simulated(door, router["recording"], block)["approximate"] is True
    of = {"recording": router["recording"], "frequencies": counted["artifact"]}
    made = door.json("fit ranks --draft near", **of)
    assert (made["kind"], made["requests"]) == ("frequency_ranks", 6)
    assert "approximate" not in simulated(door, router["recording"], block)


def test_clusters_alone_are_taken_further(door: Door) -> None:
    """The router keeps the clusters it is given; those of another draft's head are refused, and
    what is none."""
    made = door.json("fit clusters --draft near --clusters 5")
    own = {"clusters_from": made["artifact"]}
    taken = door.json("fit router --draft near --epochs 1", **own)
    assert taken["cluster_sizes"] == made["cluster_sizes"]
    assert "another output head" in door.error("fit router --draft far", **own)
    assert "5000" in door.error("fit clusters --draft near --clusters 5000")
    assert "no such draft" in door.error("fit router --draft ngram")

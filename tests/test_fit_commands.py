"""Fitting to a recording: what is taken from its trees against the slow reference, the commands,
and policies that use what was fitted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from databases import opened
from doors import Door, write_workload
from sqlalchemy import LargeBinary, literal
from test_hot_reload import publish
from tree_reference import Law, Node, Stratify, TopK, build, cheapest_first, verify

from spectune.optimizer.fit.c2t import classifier_examples
from spectune.optimizer.fit.heterospec import bin_rounds
from spectune.optimizer.fit.recorded_trees import RecordedTrees
from spectune.optimizer.fit.sequoia import rank_acceptance
from spectune.optimizer.in_force import last_good, watch
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.tuning.parts import split
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Artifact, Panorama

WIDTH, DEPTH, TOP_N = 4, 5, 14
TOKENS = 36
OTHER_PAIR = "0123456789ab"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Door:
    """A database with two recordings with trees: one at temperature 0.8, then one at 0, which is
    the latest."""
    folder = tmp_path_factory.mktemp("fits")
    door = Door(str(folder / "spectune.db"), str(tiny_pair))
    size = {"max_new_tokens": TOKENS, "gamma_max": 4, "tree_width": WIDTH, "tree_depth": DEPTH}
    workload = write_workload(folder / "w.jsonl", 6)
    for temperature in (0.8, 0):
        door.json("record", pair=tiny_pair, workload=workload, temperature=temperature, **size)
    return door


@pytest.fixture(scope="module")
def shared(door: Door) -> Iterator[TraceStore]:
    """The store behind :func:`door`."""
    with opened(door.db) as store:
        yield store


def fit(door: Door, kind: str, draft: str = "near", **options: Any) -> dict[str, Any]:
    return door.json(f"fit {kind}", draft=draft, **options)


# -- what is taken from the trees


class Recorded:
    """A trace over one recording, and its panoramas' laws for the reference."""

    def __init__(self, store: TraceStore, recording: str, draft: str) -> None:
        self.loaded = store.load(recording, [draft])
        self.trees = self.loaded.panoramas(draft)
        self.trace = ReplayTrace(self.loaded.trajectories, {draft: self.trees})
        self.coupled = not self.loaded.info.sampling.greedy
        self.children: list[dict[tuple[int, int], int]] = []
        for p in self.trees:
            slots = p.trie.text_slot[: p.positions].tolist()
            found = {(i, slot): i + 1 for i, slot in enumerate(slots) if slot < p.width}
            branches = enumerate(zip(p.trie.parent.tolist(), p.trie.slot.tolist(), strict=True))
            found |= {place: p.positions + 1 + m for m, place in branches}
            self.children.append(found)

    def tree(self, position: int) -> tuple[list[Node], list[Node], int, list[int]]:
        """(all candidates, those accepted of the cheapest N, Phi, the text that follows) of a
        start, by the reference."""
        request = int(np.searchsorted(self.trace.offsets, position, side="right")) - 1
        start = position - int(self.trace.offsets[request])
        p, children = self.trees[request], self.children[request]
        text = self.loaded.trajectories[request].output_ids.tolist()[start:]

        def law(path: tuple[int, ...]) -> Law:
            node = start
            for token in path:
                node = children[node, p.trie.tokens[node].tolist().index(token)]
            return law_of(p, node)

        growth = TopK(WIDTH, "coupled" if self.coupled else "probability", 1.5)
        grown = build(law, growth, gamma=DEPTH, stratify=Stratify((), DEPTH, 0, ()), select_n=TOP_N)
        after = dict(enumerate(text))
        accepted, _ = verify(grown.kept, lambda path: after.get(len(path), -1))
        assert grown.phi is not None
        return grown.candidates, accepted, grown.phi, text


def law_of(p: Panorama, node: int) -> Law:
    count = int(p.trie.count[node])
    columns = (column[node, :count].tolist() for column in (p.trie.tokens, p.trie.logp, p.trie.gap))
    return Law(*columns, int(p.trie.entropy[node]), int(p.trie.top_entropy[node]))


def recorded(store: TraceStore, which: int, draft: str = "near") -> Recorded:
    """The recording at temperature 0, or (1) the other."""
    found = next(i for i in store.list_recordings() if i.sampling.greedy == (which == 0))
    return Recorded(store, found.id, draft)


either = pytest.mark.parametrize("which", [0, 1], ids=["greedy", "sampled"])


@either
def test_rounds_and_nodes_are_the_references(shared: TraceStore, which: int) -> None:
    r = recorded(shared, which)
    trees = RecordedTrees.of(r.trace, "near")
    rounds = bin_rounds(trees, WIDTH, DEPTH, TOP_N, count=10**6)
    starts = trees.pick(DEPTH, 10**6, 0)
    lengths = (min(len(t.output_ids), TOKENS - 1) for t in r.loaded.trajectories)
    assert len(rounds.phi) == len(starts) == sum(max(0, n - DEPTH + 1) for n in lengths)
    examples = classifier_examples(trees, WIDTH, DEPTH, count=10**6)
    assert len(np.unique(examples.tree)) == len(trees.pick(1, 10**6, 0))
    for at, position in list(enumerate(starts.tolist()))[::7]:
        candidates, accepted, phi, text = r.tree(position)
        ranks = [n.ranks for n in cheapest_first(candidates)]
        place = ranks.index(accepted[-1].ranks) + 1 if accepted else 0
        found = (rounds.phi[at], rounds.tcr[at], rounds.fully_accepted[at])
        assert found == (phi, place, len(accepted) == DEPTH)
        mine = examples.take(examples.tree == position)
        expected = sorted(
            (n.q_joint, n.entropy, n.depth, n.path == tuple(text[: n.depth])) for n in candidates
        )
        columns = (mine.joint_code, mine.entropy_code, mine.depth, mine.accepted)
        got = zip(*(column.tolist() for column in columns), strict=True)
        assert sorted(got) == expected
    assert {0, 1} < set(np.unique(rounds.tcr))
    shallow = bin_rounds(trees, WIDTH, 1, 2, count=10**6)
    np.testing.assert_array_equal(shallow.fully_accepted, shallow.tcr > 0)
    assert shallow.fully_accepted.any()


def test_acceptance_by_level_and_rank(shared: TraceStore) -> None:
    r = recorded(shared, 1)
    chance, seen = rank_acceptance(RecordedTrees.of(r.trace, "near"), 3, least=1)
    counts, parents = np.zeros((3, WIDTH)), np.zeros(3)
    for t, p in zip(r.loaded.trajectories, r.trees, strict=True):
        slots = p.trie.text_slot[: p.positions].tolist()
        for start in range(p.positions):
            for level in range(min(3, p.positions - start, t.max_new_tokens - start - 1)):
                parents[level] += 1
                if slots[start + level] >= WIDTH:
                    break
                counts[level, slots[start + level]] += 1
    np.testing.assert_array_equal(seen, parents)
    np.testing.assert_allclose(chance, counts / parents[:, None])
    assert len(rank_acceptance(RecordedTrees.of(r.trace, "near"), 3, least=10**6)[0]) == 1


def test_starts_are_of_the_requests_selected_and_chosen_by_seed(shared: TraceStore) -> None:
    r = recorded(shared, 0)
    trees = RecordedTrees.of(r.trace.select([2, 1]), "near")
    assert trees.starts.min() == r.trace.offsets[1]
    assert trees.starts.max() == r.trace.offsets[3] - 1
    few = trees.pick(2, 9, 3)
    assert len(few) == len(set(few.tolist())) == 9
    assert few.tolist() == sorted(few) == trees.pick(2, 9, 3).tolist()
    assert few.tolist() != trees.pick(2, 9, 4).tolist()
    with pytest.raises(TraceError, match="goes on for 99 tokens"):
        trees.pick(99, 9, 0)


# -- the commands


def test_every_fit_replays_and_runs(door: Door, shared: TraceStore, pair: LoadedPair) -> None:
    """Fit, simulate the policy that is offered, execute it: texts as without a draft."""
    made = {
        "bins": fit(door, "bins", depth=3, top_n=10),
        "classifier": fit(door, "classifier", epochs=3, hidden=12),
        "static_tree": fit(door, "static-tree", nodes=6, depth=3),
    }
    info = shared.get_recording("latest")
    texts = shared.load(info.id, ())
    fitted_to = split([t.category for t in texts.trajectories]).fit
    of = {"draft": "near", "recording": info.id, "recorded": {"width": WIDTH, "depth": DEPTH}}
    for kind, found in made.items():
        stored = shared.get_artifact(found["artifact"])
        assert (stored.kind, found["kind"], stored.pair_id) == (kind, kind, info.pair_id)
        assert found.items() >= of.items()
        assert found["request_ids"] == [texts.trajectories[i].request_id for i in fitted_to]
        beside = {key: found[key] for key in ("artifact", "kind", "policy")}
        assert found == stored.document | beside
        policy = json.dumps(found["policy"])
        simulated = door.json("simulate", policy=policy)
        assert simulated["mean_accepted_length"] > 1
        short = {"workload": "demo", "limit": 1, "max_new_tokens": 12}
        ran = door.json("run", pair=door.pair, policy=policy, **short)
        assert ran["policy_id"] == simulated["policy_id"] == parse_policy(found["policy"]).id
    assert made["bins"]["depth"] == 3
    assert len(made["bins"]["statistics"]) == len(made["bins"]["thresholds"]) + 1
    assert made["bins"]["policy"]["stratify"]["alpha"] == DEPTH - 3
    assert made["classifier"]["hidden"] == 12
    assert len(made["static_tree"]["paths"]) == 6


def test_the_same_fit_is_the_same_artifact(door: Door) -> None:
    one, two, other = (
        fit(door, "classifier", epochs=1, starts=40, seed=seed) for seed in (5, 5, 6)
    )
    assert one == two
    assert one["starts"] == 40
    assert other["artifact"] != one["artifact"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bins", ("mean tcr", "fully accepted", "explained")),
        ("classifier --epochs 12", ("accepted", "nodes")),
        ("static-tree --nodes 4 --depth 2", ("nodes", "expected_tokens")),
    ],
)
def test_people_see_tables(door: Door, command: str, words: tuple[str, ...]) -> None:
    found = door.call(f"fit {command} --draft near", env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    assert all(word in found.stdout for word in (*words, "a policy with it: {")), found.stdout


def test_artifacts_of_another_pair(door: Door, shared: TraceStore, pair: LoadedPair) -> None:
    """A draft's name is no proof: the artifact may be of another pair's draft."""
    shared.put_pair(OTHER_PAIR, "other", pair.spec.to_json())
    document = {"paths": [[0], [1]], "draft": "near"}
    theirs = growing(shared.put_artifact("static_tree", document, pair_id=OTHER_PAIR))
    policy = json.dumps(theirs.spelled_out())
    fitted_for = f"was fitted for pair {OTHER_PAIR}"
    assert fitted_for in door.error("simulate", policy=policy)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("bins --draft third", "has no draft 'third'; it has: far, near"),
        ("bins --draft ngram", "grows no trees"),
        ("bins --draft near --depth 6", "the recording holds 5: .*--tree-depth 6"),
        ("classifier --draft near --width 5", "the recording holds 4: .*--tree-width 5"),
        ("static-tree --draft near --nodes 200 --depth 1", "no tree of 200 nodes"),
    ],
)
def test_what_cannot_be_fitted(door: Door, command: str, says: str) -> None:
    assert re.search(says, door.error(f"fit {command}"))


def test_a_recording_without_trees(door: Door, tmp_path: Path) -> None:
    bare = Door(str(tmp_path / "bare.db"))
    short = {"max_new_tokens": 4, "gamma_max": 2}
    bare.json("record", pair=door.pair, workload=write_workload(tmp_path / "w.jsonl", 1), **short)
    line = bare.error("fit bins --draft near")
    assert "has no trees of draft 'near'; `record --resume " in line
    assert "--tree-width 8" in line
    window = {"kind": "fixed", "gamma": 9}
    tree = {"draft": "near", "growth": {"kind": "top_k", "width": 2}, "window": window}
    line = bare.error("simulate", policy=json.dumps(tree))
    assert "the recording holds 1: `record --resume ID --tree-width 2` widens it" in line


# -- policies that name what is not there


def growing(name: str) -> Policy:
    growth = {"kind": "static", "artifact": name}
    window = {"kind": "fixed", "gamma": 2}
    return parse_policy({"draft": "near", "growth": growth, "window": window})


def test_a_policy_whose_artifact_cannot_be_had_is_refused(
    store: TraceStore, pair: LoadedPair
) -> None:
    document = {"paths": [[0], [1], [0, 0]], "draft": "near"}
    good = store.put_artifact("static_tree", document)
    damaged = store.put_artifact("static_tree", {**document, "paths": [[0]]})
    with store.database.write() as session:
        that = sa.update(Artifact).where(Artifact.id == damaged)
        session.execute(that.values(content=literal(b"nothing", LargeBinary)))
    with watch(store, pair, None, interval_s=60) as source:
        publish(store, pair, growing(good[:9]))
        assert source.poll()
        assert source.current().policy == growing(good[:9])
        for name, reason in (
            ("ffffff", "growth.artifact: there is no artifact 'ffffff' in this database"),
            (damaged, f"growth.artifact: artifact {damaged} cannot be used"),
        ):
            version = publish(store, pair, growing(name))
            assert not source.poll()
            assert source.current().policy == growing(good[:9])
            (said,) = store.acknowledgements(version)
            assert said.status == "refused"
            assert reason in said.reason
    assert [a.status for a in store.acknowledgements()] == ["applied"] + ["refused"] * 2
    assert last_good(store, pair, None).policy == growing(good[:9])

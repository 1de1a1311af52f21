"""Vocabulary shortlists (DynaSpec): budgets, frequency orders, clusters and routers, on data whose
answer is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from spectune.optimizer.fit import clusters as fitting
from spectune.optimizer.fit.clusters import cluster, cohesion, default_clusters
from spectune.optimizer.fit.dynaspec import Contexts, cluster_labels, score_router, train_router
from spectune.optimizer.fit.fr_spec import count_tokens, frequency_order
from spectune.optimizer.fit.perceptron import weights
from spectune.optimizer.fit.shared import held_out
from spectune.runtime.policies.dynaspec import Clusters, Routing, cluster_budget
from spectune.runtime.policies.fr_spec import Frequencies, frequency_budget
from spectune.runtime.shortlists import Router, head_hash, top_clusters
from spectune.traces.errors import PolicyError, TraceError

# -- budgets ---------------------------------------------------------------------------------------


def test_equation_3() -> None:
    assert [cluster_budget(t, 32, 24, 1) for t in range(9)] == [32, 24, 6, 4, 3, 2, 2, 2, 2]
    assert [cluster_budget(t, 32, 24, 3) for t in range(9)] == [32, 24, 6, 4, 3, 3, 3, 3, 3]
    for t in range(2, 40):
        for k1 in range(1, 60):
            nearest = math.floor(Fraction(k1, 2 * t) + Fraction(1, 2))
            assert cluster_budget(t, 60, k1, 0) == max(1, nearest)
    assert [cluster_budget(t, 0, 0, 0) for t in range(4)] == [1, 1, 1, 1]


def test_pa_fr() -> None:
    assert [frequency_budget(t, 100) for t in range(7)] == [100, 100, 33, 25, 20, 16, 14]
    assert frequency_budget(50, 20) == 1


# -- frequencies -----------------------------------------------------------------------------------


def test_tokens_are_counted() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 50, n) for n in (0, 1, 40, 500)]
    counts = count_tokens((t.astype(np.int32) if len(t) > 100 else t for t in texts), 60)
    assert counts.dtype == np.int64
    assert counts.tolist() == np.bincount(np.concatenate(texts), minlength=60).tolist()
    assert count_tokens([], 3).tolist() == [0, 0, 0]
    for bad in (60, -1):
        with pytest.raises(TraceError, match=r"text 1: .* are not in a vocabulary of 60 tokens"):
            count_tokens([np.array([1, 2]), np.array([3, bad, 4])], 60)


def test_the_frequency_order() -> None:
    frequencies = frequency_order(np.array([5, 9, 9, 0, 2, 9]), always=[4, 3, 4])
    assert frequencies.order.tolist() == [3, 4, 1, 2, 5, 0]
    assert frequencies.order.dtype == np.int64
    assert frequencies.always == 2
    assert frequencies.rank.tolist() == [5, 2, 3, 0, 1, 4]
    assert [frequencies.size(size) for size in (0, 2, 3, 100)] == [2, 2, 3, 6]
    assert frequency_order(np.array([1, 1])).size(0) == 1, "a shortlist is never empty"
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 6, 200)
    counts[::7] += 2**53 + np.arange(len(counts[::7])) % 2  # floats would merge these
    always = rng.choice(200, 9, replace=False).tolist()
    expected = sorted(
        range(200), key=lambda v: (v not in always, -int(counts[v]) * (v not in always), v)
    )
    assert frequency_order(counts, always).order.tolist() == expected


def test_frequencies_survive_their_document() -> None:
    frequencies = frequency_order(np.random.default_rng(2).integers(0, 99, 300), [7])
    document, arrays = frequencies.to_document()
    again = Frequencies.from_document(json.loads(json.dumps(document)), arrays)
    np.testing.assert_array_equal(again.order, frequencies.order)
    assert again.always == 1


# -- clusters --------------------------------------------------------------------------------------


def test_a_partition() -> None:
    clusters = Clusters(np.array([2, 0, 2, 4, 0, 2]), 6)
    assert (clusters.vocab, clusters.count) == (6, 6)
    assert clusters.sizes.tolist() == [2, 0, 3, 0, 1, 0]


def planted_head(
    groups: int = 12, each: int = 30, width: int = 24, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Rows around ``groups`` orthogonal directions, of lengths from 0.1 to 10, shuffled; and the
    group of each."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(rng.normal(size=(width, width)))[0][:groups]
    group = rng.permutation(np.repeat(np.arange(groups), each))
    rows = directions[group] + rng.normal(size=(len(group), width)) * 0.05
    return (rows * 10 ** rng.uniform(-1, 1, (len(group), 1))).astype(np.float32), group


def same_partition(a: np.ndarray, b: np.ndarray) -> bool:
    pairs = set(zip(a.tolist(), b.tolist(), strict=True))
    return len(pairs) == len(set(a.tolist())) == len(set(b.tolist()))


def test_planted_directions_are_found_whatever_the_lengths() -> None:
    head, group = planted_head()
    clusters = cluster(head, 12, seed=3)
    assert same_partition(clusters.of, group)
    assert cohesion(head, clusters) > 0.95
    assert cohesion(head, Clusters(np.arange(360) % 12, 12)) < 0.5


@pytest.mark.parametrize("large", [False, True])
def test_no_token_is_nearer_to_another_centre(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """A fixed point of spherical k-means: also for large heads, given the rounds, and not by
    scikit-learn's k-means alone."""
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(4)
    head = rng.normal(size=(1500, 20)).astype(np.float32) + rng.normal(size=20) * 2
    if large:
        monkeypatch.setattr(fitting, "LARGE", 0)
        monkeypatch.setattr(fitting, "LARGE_ROUNDS", 200)
        monkeypatch.setattr(fitting, "SMALL_SHARE", 0.0)
    clusters = cluster(head, 16, seed=1)
    unit = head.astype(np.float64) / np.linalg.norm(head, axis=1, keepdims=True)

    def astray(of: np.ndarray) -> float:
        centres = np.stack([unit[of == m].sum(0) for m in range(16)])
        cosines = unit @ (centres / np.linalg.norm(centres, axis=1, keepdims=True)).T
        return float((cosines[np.arange(len(of)), of] < cosines.max(1) - 1e-6).mean())

    assert astray(clusters.of) == 0
    plain = KMeans(16, n_init=1, random_state=1).fit(unit).labels_
    assert astray(plain) > 0
    assert cohesion(head, clusters) >= cohesion(head, Clusters(plain, 16)) - 0.005
    np.testing.assert_array_equal(cluster(head, 16, seed=1).of, clusters.of)
    assert not np.array_equal(cluster(head, 16, seed=2).of, clusters.of)


def test_rows_without_direction() -> None:
    head, group = planted_head(groups=6)
    zero = np.arange(len(head)) % 9 == 4
    head[zero] = 0
    clusters = cluster(head, 7)
    assert (clusters.of[zero] == 6).all()
    assert same_partition(clusters.of[~zero], group[~zero])
    assert clusters.sizes[6] == zero.sum()
    assert cluster(np.zeros((5, 3), np.float32), 3).of.tolist() == [2] * 5
    assert cohesion(np.zeros((5, 3)), cluster(np.zeros((5, 3), np.float32), 3)) == 0
    assert cluster(head, 1).sizes.tolist() == [len(head)]


def test_the_number_of_clusters_and_rows_that_are_not_finite() -> None:
    sizes = {1: 1, 2: 1, 3: 2, 4096: 64, 32_000: 128, 128_256: 256, 151_936: 512, 1 << 30: 1024}
    assert {vocab: default_clusters(vocab) for vocab in sizes} == sizes
    head, _ = planted_head(groups=2)
    with pytest.raises(PolicyError, match="row of token 7"):
        cluster(np.where((np.arange(60) == 7)[:, None], np.float32(np.nan), head), 2)


# -- routers ---------------------------------------------------------------------------------------


def normal(*shape: int, seed: int = 20) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_network(
    inputs: int = 10, hidden: int = 7, count: int = 5, seed: int = 0
) -> torch.nn.Sequential:
    layers = torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, count)
    network, g = torch.nn.Sequential(*layers), torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        weight.data = torch.randn(weight.shape, generator=g)
    return network.requires_grad_(False)


def test_scores_are_those_of_the_network() -> None:
    network, x = random_network(), (normal(9, 4), normal(9, 6))
    router = Router(*weights(network))
    torch.testing.assert_close(router.scores(*x), network(torch.cat(x, 1)), rtol=0, atol=1e-5)
    assert router.scores(*(part[:0] for part in x)).shape == (0, 5)


def test_the_best_clusters_and_their_ties() -> None:
    scores = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [-1.0, -2.0, 0.0, -3.0]])
    assert top_clusters(scores, 9).tolist() == [[1, 2, 3, 0], [0, 1, 2, 3], [2, 0, 1, 3]]
    rounded = (torch.randn(400, 40, generator=torch.Generator().manual_seed(1)) * 4).round() / 4
    for k in (1, 5, 39, 40):
        expected = [sorted(range(40), key=lambda m: (-row[m], m))[:k] for row in rounded.tolist()]
        assert top_clusters(rounded, k).tolist() == expected


def test_a_routing_survives_its_document() -> None:
    head = normal(30, 6)
    clusters = Clusters(np.arange(30) % 4, 5)
    layers = weights(random_network())
    routing = Routing(tuple(w.numpy() for w in layers), clusters, head_hash(head))
    document, arrays = routing.to_document()
    assert (document["inputs"], document["hidden"], document["clusters"]) == (10, 7, 5)
    again = Routing.from_document(json.loads(json.dumps(document)), arrays)
    for one, same in zip(routing.weights, again.weights, strict=True):
        np.testing.assert_array_equal(one, same)
    np.testing.assert_array_equal(again.clusters.of, clusters.of)
    assert again.clusters.count == clusters.count
    assert again.head == head_hash(head) != head_hash(head + 1)


def test_the_hash_of_a_head() -> None:
    head = normal(50, 8)
    found = head_hash(head)
    assert len(found) == 16
    assert head_hash(head.bfloat16()) == found, "the same checkpoint, loaded in bfloat16"
    assert head_hash(head.T.contiguous().T) == found, "strides do not matter"
    other = head.clone()
    other[17, 3] *= 1.02
    assert head_hash(other) != found
    assert head_hash(head[[1, 0, *range(2, 50)]]) != found
    assert head_hash(torch.zeros(2, 2)) == "374708fff7719dd5"


def test_whole_groups_are_held_out() -> None:
    group = np.random.default_rng(6).integers(0, 30, 1000)
    held = held_out(group, 0.2, 1)
    assert len(set(group[held])) == 6
    assert not set(group[held]) & set(group[~held])
    np.testing.assert_array_equal(held, held_out(group, 0.2, 1))
    assert not np.array_equal(held, held_out(group, 0.2, 2))
    assert [len(set(group[held_out(group, share, 0)])) for share in (0.001, 0.999)] == [1, 29]
    with pytest.raises(ValueError, match="at least two, there are 1"):
        held_out(np.array([3, 3]), 0.2, 0)


@pytest.fixture(scope="module")
def planted() -> tuple[Contexts, Clusters, Frequencies]:
    """Contexts of 12 kinds, told by the embedding (3 of 4) and the previous state (4): each kind
    has four likely tokens of two clusters. The inputs have large offsets and scales."""
    rng = np.random.default_rng(7)
    vocab, n = 240, 3000
    clusters = Clusters(np.minimum(np.arange(vocab) // 10, 19), 20)  # the last holds 50
    kinds = rng.integers(0, 12, n)
    pairs = np.array([rng.choice(20, 2, replace=False) for _ in range(12)])
    tokens = np.empty((n, 4), dtype=np.int64)
    for column, half in enumerate((0, 0, 1, 1)):
        tokens[:, column] = 10 * pairs[kinds, half] + 2 * column + rng.integers(0, 2, n)
    probabilities = np.sort(rng.dirichlet(np.ones(5), n)[:, :4], axis=1)[:, ::-1]
    embedding = np.eye(3)[kinds % 3] * 1e3 + rng.normal(size=(n, 3)) * 30 - 4e3
    previous = np.eye(4)[kinds // 3] * 1e-3 + rng.normal(size=(n, 4)) * 3e-5
    inputs = torch.tensor(np.concatenate([embedding, previous], 1)).float()
    found = Contexts(inputs, tokens, probabilities, rng.integers(0, 40, n))
    counts = count_tokens(list(tokens[~held_out(found.group, 0.2, 5)]), vocab)
    return found, clusters, frequency_order(counts)


def test_a_planted_rule_is_learned(planted: tuple[Contexts, Clusters, Frequencies]) -> None:
    read, clusters, _ = planted
    held = held_out(read.group, 0.2, 5)
    more = {"labels": 4, "hidden": 32, "epochs": 25, "learning_rate": 1e-2, "seed": 5}
    router, scores = train_router(*planted, **more)
    assert scores["contexts"] == held.sum()
    assert (scores["labels"], scores["label_tokens"]) == (2.0, 4)
    assert scores["recall"][0] == pytest.approx(0.5, abs=0.01)
    assert min(scores["recall"][1], scores["first"][1]) > 0.99
    assert scores["mass"][1] == pytest.approx(scores["ceiling"], abs=0.01)
    assert scores["frequency"][1] < scores["mass"][1] - 0.3
    assert scores["loss"] < 0.1, "20 clusters at log 2 each would be 14"
    # the loss of section 4.2, of the stored weights on raw inputs: standardising is folded in
    y = torch.from_numpy(cluster_labels(read.top[held], clusters)).float()
    x = read.take(held).inputs
    each = torch.nn.functional.binary_cross_entropy_with_logits(router(x), y, reduction="none")
    assert float(each.sum(1).mean()) == pytest.approx(scores["loss"], abs=1e-3)


def test_training_depends_on_its_seed_and_its_own_part_alone(
    planted: tuple[Contexts, Clusters, Frequencies],
) -> None:
    read, clusters, frequencies = planted
    before = torch.random.get_rng_state()
    held = held_out(read.group, 0.2, 4)
    inputs = torch.where(torch.from_numpy(held)[:, None], 1e5, read.inputs)
    other = replace(read, inputs=inputs, top=np.where(held[:, None], 0, read.top))
    a, b, c, d = (
        train_router(x, clusters, frequencies, hidden=8, epochs=1, seed=s)
        for x, s in ((read, 4), (read, 4), (read, 5), (other, 4))
    )
    for one, same, unlike, spoiled in zip(*(weights(x[0]) for x in (a, b, c, d)), strict=True):
        assert torch.equal(one, same)
        assert torch.equal(one, spoiled), "nothing of the held-out texts is learned from"
        assert not torch.equal(one, unlike)
    assert a[1] == b[1]
    assert torch.equal(before, torch.random.get_rng_state()), "torch's own generator is left alone"
    assert a[1]["ks"] == [1, 2, 4, 8, 16]
    with pytest.raises(TraceError, match="at least two"):
        train_router(read.take(read.group == 3), clusters, frequencies)


def test_scores_are_those_of_the_shortlists_themselves() -> None:
    """Against sets of token ids, context by context."""
    rng = np.random.default_rng(8)
    n, vocab, count = 60, 50, 9
    clusters = Clusters(rng.integers(0, count - 1, vocab), count)
    frequencies = frequency_order(rng.integers(0, 20, vocab), [3, 8])
    router = random_network(count=count, seed=9)
    x = normal(n, 10)
    tokens = np.array([rng.choice(vocab, 6, replace=False) for _ in range(n)])
    p = np.sort(rng.dirichlet(np.ones(8), n)[:, :6], axis=1)[:, ::-1]
    read = Contexts(x, tokens, p, np.zeros(n, int))
    scores = score_router(router, read, clusters, frequencies, labels=4)
    assert scores["ks"] == [1, 2, 4, 8]
    chosen = top_clusters(router(x), count).numpy()
    labels = [{clusters.of[v] for v in row[:4]} for row in tokens]
    best = [np.bincount(clusters.of[tokens[c]], p[c], minlength=count) for c in range(n)]

    def kept(sets: list[set[int]]) -> float:
        return float(np.mean([p[c, np.isin(tokens[c], list(s))].sum() for c, s in enumerate(sets)]))

    for i, k in enumerate(scores["ks"]):
        unions = [set(np.flatnonzero(np.isin(clusters.of, row[:k])).tolist()) for row in chosen]
        size = float(np.mean([len(u) for u in unions]))
        fixed = set(frequencies.order[: frequencies.size(round(size))].tolist())
        hits = sum(len(found & set(row[:k])) for found, row in zip(labels, chosen, strict=True))
        expected = {
            "size": size,
            "mass": kept(unions),
            "frequency": kept([fixed] * n),
            "first": np.mean([row[0] in u for row, u in zip(tokens, unions, strict=True)]),
            "frequency_first": np.mean([row[0] in fixed for row in tokens]),
            "recall": hits / sum(len(found) for found in labels),
            "oracle": np.mean([np.sort(mass)[::-1][:k].sum() for mass in best]),
        }
        assert {name: scores[name][i] for name in expected} == pytest.approx(expected)
    assert scores["ceiling"] == pytest.approx(p.sum(1).mean())
    assert scores["labels"] == pytest.approx(np.mean([len(found) for found in labels]))

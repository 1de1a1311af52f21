"""Vocabulary shortlists (DynaSpec): budgets, frequency orders, clusters and routers, on data whose answer is known."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from optimizer.fit import clusters as fitting
from optimizer.fit.clusters import cohesion, default_clusters, fit_clusters
from optimizer.fit.dynaspec import cluster_labels, held_out_groups, score_router, train_router
from optimizer.fit.fr_spec import count_tokens, fit_frequencies
from runtime.near_ties import near_clusters
from runtime.policies.dynaspec import (
    Clusters,
    Frequencies,
    Router,
    Routing,
    cluster_budget,
    frequency_budget,
    head_hash,
    top_clusters,
)
from traces.errors import PolicyError, TraceError

# -- budgets ---------------------------------------------------------------------------------------------------------------------


def test_equation_3() -> None:
    assert [cluster_budget(t, 32, 24, 1) for t in range(9)] == [32, 24, 6, 4, 3, 2, 2, 2, 2]
    assert [cluster_budget(t, 32, 24, 3) for t in range(9)] == [32, 24, 6, 4, 3, 3, 3, 3, 3]
    for t in range(2, 40):
        for k1 in range(1, 60):
            nearest = math.floor(Fraction(k1, 2 * t) + Fraction(1, 2))
            assert cluster_budget(t, 60, k1, 0) == max(1, nearest)
    assert [cluster_budget(t, 0, 0, 0) for t in range(4)] == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="step -1"):
        cluster_budget(-1, 4, 2, 1)


def test_pa_fr() -> None:
    assert [frequency_budget(t, 100) for t in range(7)] == [100, 100, 33, 25, 20, 16, 14]
    assert frequency_budget(50, 20) == 1
    with pytest.raises(ValueError, match="step -1"):
        frequency_budget(-1, 100)


# -- frequencies -----------------------------------------------------------------------------------------------------------------


def test_tokens_are_counted() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 50, n).tolist() for n in (0, 1, 40, 500)]
    counts = count_tokens((np.array(t, dtype=np.int32) if len(t) > 100 else t for t in texts), 60)
    assert counts.dtype == np.int64
    every = Counter(token for text in texts for token in text)
    assert counts.tolist() == [every[token] for token in range(60)]
    assert count_tokens([], 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [60, -1])
def test_unknown_tokens_are_named(bad: int) -> None:
    with pytest.raises(TraceError, match=rf"text 1: token id {bad} is not in a vocabulary of 60 tokens"):
        count_tokens([[1, 2], [3, bad, 4]], 60)
    with pytest.raises(TraceError, match="text 0 must be a row of token ids"):
        count_tokens([[0.5]], 60)  # type: ignore[list-item]


def test_the_frequency_order() -> None:
    frequencies = fit_frequencies([5, 9, 9, 0, 2, 9], always=[4, 3, 4])
    assert frequencies.order.tolist() == [3, 4, 1, 2, 5, 0]
    assert frequencies.order.dtype == np.int64
    assert frequencies.always == 2
    assert frequencies.rank.tolist() == [5, 2, 3, 0, 1, 4]
    assert [frequencies.ids(size).tolist() for size in (0, 2, 3, 4)] == [[3, 4], [3, 4], [1, 3, 4], [1, 2, 3, 4]]
    assert frequencies.ids(100).tolist() == list(range(6))
    assert fit_frequencies([1, 1]).ids(0).tolist() == [0], "a shortlist is never empty"


def test_any_counts_are_ordered_as_sorting_orders_them() -> None:
    rng = np.random.default_rng(1)
    for dtype in (np.int64, np.uint64, np.int32):
        counts = rng.integers(0, 6, 200).astype(dtype)
        if dtype != np.int32:
            counts[::7] += dtype(2**53) + np.arange(len(counts[::7])).astype(dtype) % dtype(2)  # floats would merge these
        always = rng.choice(200, 9, replace=False).tolist()
        frequencies = fit_frequencies(counts, always)
        assert frequencies.order.tolist() == sorted(
            range(200), key=lambda v: (v not in always, -int(counts[v]) * (v not in always), v)
        )
        for size in (1, 9, 10, 77, 200, 999):
            ids = frequencies.ids(size)
            assert (np.diff(ids) > 0).all()
            assert len(ids) == frequencies.size(size)
            assert set(ids.tolist()) == set(np.flatnonzero(frequencies.rank < len(ids)).tolist())


def test_frequencies_survive_their_document() -> None:
    frequencies = fit_frequencies(np.random.default_rng(2).integers(0, 99, 300), [7])
    document, arrays = frequencies.to_document()
    again = Frequencies.from_document(json.loads(json.dumps(document)), arrays)
    np.testing.assert_array_equal(again.order, frequencies.order)
    assert again.always == 1
    with pytest.raises(ValueError, match="lacks the array order"):
        Frequencies.from_document(document, {})
    with pytest.raises(ValueError, match="lacks always"):
        Frequencies.from_document({"vocab": 300}, arrays)
    with pytest.raises(ValueError, match="says vocab 5"):
        Frequencies.from_document({**document, "vocab": 5}, arrays)
    with pytest.raises(ValueError, match="every token id once"):
        Frequencies.from_document(document, {"order": np.zeros(300, np.int64)})
    with pytest.raises(ValueError, match="whole numbers"):
        Frequencies.from_document(document, {"order": arrays["order"] / 2})
    with pytest.raises(ValueError, match="always must be within"):
        Frequencies.from_document({**document, "always": 301}, arrays)


def test_frequencies_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        fit_frequencies([0.5, 1.0])
    with pytest.raises(ValueError, match="token 1 has -2"):
        fit_frequencies([1, -2])
    with pytest.raises(ValueError, match="not all in a vocabulary of 2"):
        fit_frequencies([1, 2], always=[2])


# -- clusters --------------------------------------------------------------------------------------------------------------------


def test_a_partition() -> None:
    clusters = Clusters.of_assignment(np.array([2, 0, 2, 4, 0, 2], dtype=np.int32), 6)
    assert (clusters.vocab, clusters.count) == (6, 6)
    assert clusters.members.tolist() == [1, 4, 0, 2, 5, 3]
    assert clusters.offsets.tolist() == [0, 2, 2, 5, 5, 6, 6]
    assert clusters.sizes.tolist() == [2, 0, 3, 0, 1, 0]
    assert clusters.ids([4, 2, 4]).tolist() == [0, 2, 3, 5]
    assert clusters.ids([[0], [1]]).tolist() == [1, 4]
    assert clusters.ids([1, 5]).tolist() == []
    assert clusters.ids([]).tolist() == []
    assert clusters.ids(range(6)).tolist() == list(range(6))
    for bad in ([6], [-1]):
        with pytest.raises(ValueError, match=r"within 0\.\.5"):
            clusters.ids(bad)
    for assignment, count in (([0, 3], 3), ([-1, 0], 3), ([0], 0)):
        with pytest.raises(ValueError, match="an assignment to"):
            Clusters.of_assignment(assignment, count)
    with pytest.raises(ValueError, match="whole numbers"):
        Clusters.of_assignment([0.0, 1.0], 2)


def planted_head(groups: int = 12, each: int = 30, width: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows around ``groups`` orthogonal directions, of lengths from 0.1 to 10, shuffled; and the group of each."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(rng.normal(size=(width, width)))[0][:groups]
    group = rng.permutation(np.repeat(np.arange(groups), each))
    rows = directions[group] + rng.normal(size=(len(group), width)) * 0.05
    return (rows * 10 ** rng.uniform(-1, 1, (len(group), 1))).astype(np.float32), group


def same_partition(a: np.ndarray, b: np.ndarray) -> bool:
    return len(set(zip(a.tolist(), b.tolist(), strict=True))) == len(set(a.tolist())) == len(set(b.tolist()))


def test_planted_directions_are_found_whatever_the_lengths() -> None:
    head, group = planted_head()
    clusters = fit_clusters(head, 12, seed=3)
    assert same_partition(clusters.of, group)
    assert same_partition(fit_clusters(head * 1e-30, 12, seed=3).of, group), "squares of such rows are 0 in float32"
    assert same_partition(fit_clusters(head.astype(np.float16), 12, seed=3).of, group)
    assert cohesion(head, clusters) > 0.95
    assert cohesion(head, Clusters.of_assignment(np.arange(360) % 12, 12)) < 0.5


@pytest.mark.parametrize("large", [False, True])
def test_no_token_is_nearer_to_another_centre(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """A fixed point of spherical k-means: also for large heads, given the rounds, and not by scikit-learn's k-means alone."""
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(4)
    head = rng.normal(size=(1500, 20)).astype(np.float32) + rng.normal(size=20) * 2
    if large:
        monkeypatch.setattr(fitting, "LARGE", 0)
        monkeypatch.setattr(fitting, "LARGE_ROUNDS", 200)
        monkeypatch.setattr(fitting, "SMALL_SHARE", 0.0)
    clusters = fit_clusters(head, 16, seed=1)
    unit = head.astype(np.float64) / np.linalg.norm(head, axis=1, keepdims=True)

    def astray(of: np.ndarray) -> float:
        centres = np.stack([unit[of == m].sum(0) for m in range(16)])
        cosines = unit @ (centres / np.linalg.norm(centres, axis=1, keepdims=True)).T
        return float((cosines[np.arange(len(of)), of] < cosines.max(1) - 1e-6).mean())

    assert astray(clusters.of) == 0
    plain = KMeans(16, n_init=1, random_state=1).fit(unit).labels_
    assert astray(plain) > 0
    assert cohesion(head, clusters) >= cohesion(head, Clusters.of_assignment(plain, 16)) - 0.005
    assert (np.diff(clusters.sizes) <= 0).all(), "numbered by size"
    np.testing.assert_array_equal(fit_clusters(head, 16, seed=1).of, clusters.of)
    assert not np.array_equal(fit_clusters(head, 16, seed=2).of, clusters.of)


def test_cohesion_is_the_mean_cosine_to_the_own_centre() -> None:
    head, _ = planted_head(groups=5, each=8, width=6)
    clusters = Clusters.of_assignment(np.arange(40) % 3, 4)
    unit = head / np.linalg.norm(head, axis=1, keepdims=True)
    found = []
    for token in range(40):
        centre = unit[clusters.of == clusters.of[token]].sum(0)
        found.append(unit[token] @ centre / np.linalg.norm(centre))
    assert cohesion(head, clusters) == pytest.approx(np.mean(found), rel=1e-5)


def test_rows_without_direction() -> None:
    head, group = planted_head(groups=6)
    zero = np.arange(len(head)) % 9 == 4
    head[zero] = 0
    clusters = fit_clusters(head, 7)
    assert (clusters.of[zero] == 6).all()
    assert same_partition(clusters.of[~zero], group[~zero])
    assert clusters.sizes[6] == zero.sum()
    assert fit_clusters(np.zeros((5, 3), np.float32), 3).of.tolist() == [2] * 5
    assert cohesion(np.zeros((5, 3)), fit_clusters(np.zeros((5, 3), np.float32), 3)) == 0
    assert fit_clusters(head, 1).sizes.tolist() == [len(head)]


def test_fewer_directions_than_clusters_leave_some_empty() -> None:
    head, group = planted_head(groups=4)
    same = np.eye(24, dtype=np.float32)[group] * np.abs(head[:, :1])
    clusters = fit_clusters(same, 10)
    assert clusters.count == 10
    assert same_partition(clusters.of, group)
    assert (clusters.sizes > 0).sum() == 4
    assert sorted(fit_clusters(planted_head(groups=4, each=3)[0], 12).sizes.tolist()) == [1] * 12, "as many as tokens"


def test_clusters_say_what_is_wrong() -> None:
    head, _ = planted_head(groups=2)
    for count in (0, 61):
        with pytest.raises(ValueError, match=r"ask for 1\.\.60"):
            fit_clusters(head, count)
    with pytest.raises(ValueError, match="floats"):
        fit_clusters(np.ones((4, 4), dtype=np.int64), 2)
    with pytest.raises(ValueError, match="row of token 7"):
        fit_clusters(np.where((np.arange(60) == 7)[:, None], np.nan, head), 2)


def test_default_clusters() -> None:
    sizes = {1: 1, 2: 1, 3: 2, 4096: 64, 32_000: 128, 128_256: 256, 151_936: 512, 262_144: 512, 1 << 30: 1024}
    assert {vocab: default_clusters(vocab) for vocab in sizes} == sizes
    with pytest.raises(ValueError, match="0 tokens"):
        default_clusters(0)


# -- routers ---------------------------------------------------------------------------------------------------------------------


def normal(*shape: int, seed: int = 20) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_router(inputs: int = 10, hidden: int = 7, count: int = 5, seed: int = 0) -> Router:
    g = torch.Generator().manual_seed(seed)
    shapes = ((hidden, inputs), (hidden,), (count, hidden), (count,))
    return Router(*(torch.randn(shape, generator=g) for shape in shapes))


def test_scores_are_those_of_the_network() -> None:
    router = random_router()
    network = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.ReLU(), torch.nn.Linear(7, 5))
    network.load_state_dict({"0.weight": router.w1, "0.bias": router.b1, "2.weight": router.w2, "2.bias": router.b2})
    embedding, previous = normal(9, 4), normal(9, 6)
    expected = network(torch.cat((embedding, previous), 1)).detach()
    torch.testing.assert_close(router.scores(embedding, previous), expected, rtol=0, atol=1e-5)
    low = router.scores(embedding.bfloat16(), previous.bfloat16())
    assert low.dtype == torch.float32
    assert (router.inputs, router.hidden, router.clusters) == (10, 7, 5)
    assert router.scores(embedding[:0], previous[:0]).shape == (0, 5)
    with pytest.raises(ValueError, match="10 inputs cannot read embeddings of 4 and states of 4"):
        router.scores(embedding, previous[:, :4])


def test_the_best_clusters_and_their_ties() -> None:
    scores = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [-1.0, -2.0, 0.0, -3.0]])
    assert top_clusters(scores, 2).tolist() == [[1, 2], [0, 1], [2, 0]]
    assert top_clusters(scores, 9).tolist() == [[1, 2, 3, 0], [0, 1, 2, 3], [2, 0, 1, 3]]
    assert near_clusters(scores, 1, 0.0).tolist() == [True, True, False]
    assert near_clusters(scores, 2, 0.5).tolist() == [False, True, False]
    assert near_clusters(scores, 2, 1.0).tolist() == [True, True, True]
    assert near_clusters(scores, 4, 99.0).tolist() == [False] * 3
    rounded = (torch.randn(400, 40, generator=torch.Generator().manual_seed(1)) * 4).round() / 4
    for k in (1, 5, 39, 40):
        expected = [sorted(range(40), key=lambda m: (-row[m], m))[:k] for row in rounded.tolist()]
        assert top_clusters(rounded, k).tolist() == expected


def test_far_from_a_tie_no_error_within_the_margin_changes_the_set() -> None:
    g = torch.Generator().manual_seed(2)
    scores, margin = torch.randn(3000, 16, generator=g), 0.05
    moved = scores + (torch.rand(scores.shape, generator=g) - 0.5) * margin * 0.999
    near = near_clusters(scores, 4, margin)
    changed = (top_clusters(scores, 4).sort().values != top_clusters(moved, 4).sort().values).any(1)
    assert not (changed & ~near).any()
    assert (changed & near).any()
    assert 0 < near.float().mean() < 0.5


def test_a_routing_survives_its_document() -> None:
    head = normal(30, 6)
    clusters = Clusters.of_assignment(np.arange(30) % 4, 5)
    routing = Routing(random_router(), clusters, head_hash(head))
    document, arrays = routing.to_document()
    again = Routing.from_document(json.loads(json.dumps(document)), arrays)
    x = normal(3, 4), normal(3, 6)
    torch.testing.assert_close(again.router.scores(*x), routing.router.scores(*x), rtol=0, atol=0)
    np.testing.assert_array_equal(again.clusters.members, clusters.members)
    np.testing.assert_array_equal(again.clusters.offsets, clusters.offsets)
    again.check_head(head)
    with pytest.raises(PolicyError, match=f"another output head .hash {routing.head}"):
        again.check_head(head + 1)
    with pytest.raises(ValueError, match="lacks head"):
        Routing.from_document({k: v for k, v in document.items() if k != "head"}, arrays)
    for name in ("w1", "b1", "w2", "b2", "of"):
        with pytest.raises(ValueError, match=f"lacks the array {name}"):
            Routing.from_document(document, {k: v for k, v in arrays.items() if k != name})
    with pytest.raises(ValueError, match="router weights must be w1"):
        Routing.from_document(document, {**arrays, "b2": arrays["b2"][1:]})
    with pytest.raises(ValueError, match="b1 must be floating-point"):
        Routing.from_document(document, {**arrays, "b1": arrays["b1"].astype(int)})
    with pytest.raises(ValueError, match="finite float32"):
        Routing.from_document(document, {**arrays, "b1": arrays["b1"] * np.nan})
    with pytest.raises(ValueError, match="says inputs 11"):
        Routing.from_document({**document, "inputs": 11}, arrays)
    with pytest.raises(ValueError, match="an assignment to 5 clusters"):
        Routing.from_document(document, {**arrays, "of": arrays["of"] + 4})
    with pytest.raises(ValueError, match="scores 5 clusters, but there are 4"):
        Routing(random_router(), Clusters.of_assignment(np.arange(30) % 4, 4), "")


def test_the_hash_of_a_head() -> None:
    head = normal(50, 8)
    found = head_hash(head)
    assert len(found) == 16
    assert int(found, 16) >= 0
    assert head_hash(head.bfloat16()) == found, "the same checkpoint, loaded in bfloat16"
    assert head_hash(head.T.contiguous().T) == found, "strides do not matter"
    assert head_hash(torch.nn.Parameter(head)) == found
    other = head.clone()
    other[17, 3] *= 1.02
    assert head_hash(other) != found
    assert head_hash(head[[1, 0, *range(2, 50)]]) != found
    assert head_hash(torch.zeros(2, 2)) == "374708fff7719dd5"


def test_labels_are_the_clusters_of_the_tokens() -> None:
    rng = np.random.default_rng(5)
    clusters = Clusters.of_assignment(rng.integers(0, 6, 40), 7)
    tokens = rng.integers(0, 40, (25, 4))
    labels = cluster_labels(tokens, clusters)
    assert [set(np.flatnonzero(row)) for row in labels] == [{clusters.of[v] for v in row} for row in tokens]


def test_whole_groups_are_held_out() -> None:
    group = np.random.default_rng(6).integers(0, 30, 1000)
    held = held_out_groups(group, 0.2, 1)
    assert len(set(group[held])) == 6
    assert not set(group[held]) & set(group[~held])
    np.testing.assert_array_equal(held, held_out_groups(group, 0.2, 1))
    assert not np.array_equal(held, held_out_groups(group, 0.2, 2))
    assert len(set(group[held_out_groups(group, 0.001)])) == 1
    assert len(set(group[held_out_groups(group, 0.999)])) == 29
    with pytest.raises(TraceError, match="at least two requests"):
        held_out_groups([3, 3])
    with pytest.raises(ValueError, match="share"):
        held_out_groups(group, 1.0)


Planted = tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray, np.ndarray, Clusters]


@pytest.fixture(scope="module")
def planted() -> Planted:
    """Contexts of 12 kinds, told by the embedding (3 of 4) and the previous state (4): each kind has four likely tokens of two clusters.
    The inputs have large offsets and scales. (embeddings, previous, tokens, probabilities, group, clusters)"""
    rng = np.random.default_rng(7)
    vocab, n = 240, 3000
    clusters = Clusters.of_assignment(np.minimum(np.arange(vocab) // 10, 19), 20)  # the last holds 50
    kinds = rng.integers(0, 12, n)
    pairs = np.array([rng.choice(20, 2, replace=False) for _ in range(12)])
    tokens = np.empty((n, 4), dtype=np.int64)
    for column, cluster in enumerate((0, 0, 1, 1)):
        inside = clusters.offsets[pairs[:, cluster]]
        tokens[:, column] = clusters.members[inside[kinds] + 2 * column + rng.integers(0, 2, n)]
    probabilities = np.sort(rng.dirichlet(np.ones(5), n)[:, :4], axis=1)[:, ::-1]
    embedding = np.eye(3)[kinds % 3] * 1e3 + rng.normal(size=(n, 3)) * 30 - 4e3
    previous = np.eye(4)[kinds // 3] * 1e-3 + rng.normal(size=(n, 4)) * 3e-5
    group = rng.integers(0, 40, n)
    return torch.tensor(embedding).float(), torch.tensor(previous).float(), tokens, probabilities, group, clusters


def test_a_planted_rule_is_learned(planted: Planted) -> None:
    e, h, tokens, probabilities, group, clusters = planted
    held = held_out_groups(group, seed=5)
    frequencies = fit_frequencies(count_tokens(tokens[~held], 240))
    router, scores = train_router(
        e,
        h.numpy(),
        tokens,
        clusters,
        group=group,
        labels=4,
        hidden=32,
        epochs=25,
        learning_rate=1e-2,
        seed=5,
        probabilities=probabilities,
        frequencies=frequencies,
        ks=(1, 2, 3, 20),
    )
    assert scores.contexts == held.sum()
    assert (scores.labels, scores.label_tokens) == (2.0, 4)
    assert scores.recall[0] == pytest.approx(0.5, abs=0.01)
    assert scores.recall[1] > 0.99
    assert scores.recall[3] == 1.0
    assert scores.first[1] > 0.99
    assert scores.mass[1] == pytest.approx(scores.ceiling, abs=0.01)
    assert scores.frequency[1] < scores.mass[1] - 0.3
    assert scores.size[3] == 240
    assert scores.frequency_first[3] == 1.0
    losses = [point["held_out_loss"] for point in scores.curve]
    assert [point["epoch"] for point in scores.curve] == list(range(26))
    assert scores.curve[0]["loss"] is None
    assert losses[-1] < 0.1 < 10 < losses[0], "20 clusters at log 2 each, before"
    assert json.loads(json.dumps(scores.to_json(), allow_nan=False))["ks"] == [1, 2, 3, 20]
    # the loss of section 4.2, of the stored weights on raw inputs: standardising is folded in
    rows = torch.from_numpy(np.flatnonzero(held))
    y = torch.from_numpy(cluster_labels(tokens[held], clusters)).float()
    each = torch.nn.functional.binary_cross_entropy_with_logits(router.scores(e[rows], h[rows]), y, reduction="none")
    assert float(each.sum(1).mean()) == pytest.approx(losses[-1], abs=1e-3)


def test_the_same_seed_trains_the_same(planted: Planted) -> None:
    e, h, tokens, _, group, clusters = planted
    before = torch.random.get_rng_state()
    a, b, c = (train_router(e, h, tokens, clusters, group=group, hidden=8, epochs=1, seed=s) for s in (4, 4, 5))
    for name in ("w1", "b1", "w2", "b2"):
        torch.testing.assert_close(getattr(a[0], name), getattr(b[0], name), rtol=0, atol=0)
        assert not torch.equal(getattr(a[0], name), getattr(c[0], name))
    assert a[1] == b[1]
    assert torch.equal(before, torch.random.get_rng_state()), "torch's own generator is left alone"
    assert (a[1].mass, a[1].oracle, a[1].frequency, a[1].ceiling) == ((), (), (), None)
    assert a[1].ks == (1, 2, 4, 8, 16)


def test_nothing_of_the_held_out_texts_is_learned_from(planted: Planted) -> None:
    e, h, tokens, _, group, clusters = planted
    held = torch.from_numpy(held_out_groups(group, seed=2))
    spoilt = torch.where(held[:, None], -9e4, e), torch.where(held[:, None], 1e5, h)
    other = np.where(held.numpy()[:, None], 0, tokens)
    a = train_router(e, h, tokens, clusters, group=group, hidden=8, epochs=1, seed=2)[0]
    b = train_router(*spoilt, other, clusters, group=group, hidden=8, epochs=1, seed=2)[0]
    torch.testing.assert_close(a.w1, b.w1, rtol=0, atol=0)
    torch.testing.assert_close(a.b2, b.b2, rtol=0, atol=0)


def test_scores_are_those_of_the_shortlists_themselves() -> None:
    """Against sets of token ids, context by context."""
    rng = np.random.default_rng(8)
    n, vocab, count = 60, 50, 9
    clusters = Clusters.of_assignment(rng.integers(0, count - 1, vocab), count)
    frequencies = fit_frequencies(rng.integers(0, 20, vocab), [3, 8])
    router = random_router(count=count, seed=9)
    e, h = normal(n, 4), normal(n, 6)
    tokens = np.array([rng.choice(vocab, 6, replace=False) for _ in range(n)])
    p = np.sort(rng.dirichlet(np.ones(8), n)[:, :6], axis=1)[:, ::-1]
    ks = (1, 3, 8, 9)
    scores = score_router(router, e, h, tokens, clusters, labels=4, probabilities=p, frequencies=frequencies, ks=ks)
    chosen = top_clusters(router.scores(e, h), count).numpy()
    for i, k in enumerate(ks):
        unions = [set(clusters.ids(chosen[c, :k]).tolist()) for c in range(n)]
        kept = [sum(p[c, j] for j in range(6) if tokens[c, j] in unions[c]) for c in range(n)]
        size = np.mean([len(u) for u in unions])
        fixed = set(frequencies.ids(round(float(size))).tolist())
        by_frequency = [sum(p[c, j] for j in range(6) if tokens[c, j] in fixed) for c in range(n)]
        labels = [{clusters.of[v] for v in tokens[c, :4]} for c in range(n)]
        hits = sum(len(labels[c] & set(chosen[c, :k])) for c in range(n))
        masses = [sorted((p[c][clusters.of[tokens[c]] == m].sum() for m in range(count)), reverse=True) for c in range(n)]
        assert scores.size[i] == pytest.approx(size)
        assert scores.mass[i] == pytest.approx(np.mean(kept))
        assert scores.frequency[i] == pytest.approx(np.mean(by_frequency))
        assert scores.first[i] == pytest.approx(np.mean([tokens[c, 0] in unions[c] for c in range(n)]))
        assert scores.frequency_first[i] == pytest.approx(np.mean([tokens[c, 0] in fixed for c in range(n)]))
        assert scores.recall[i] == pytest.approx(hits / sum(len(x) for x in labels))
        assert scores.oracle[i] == pytest.approx(np.mean([sum(m[:k]) for m in masses]))
        assert scores.oracle[i] >= scores.mass[i] - 1e-12
    assert scores.ceiling == pytest.approx(p.sum(1).mean())
    assert scores.labels == pytest.approx(np.mean([len(x) for x in labels]))


def test_training_says_what_is_wrong(planted: Planted) -> None:
    e, h, tokens, probabilities, group, clusters = planted
    with pytest.raises(ValueError, match=r"embeddings must be floats \[3000, width\]"):
        train_router(e[:-1], h, tokens, clusters, group=group)
    with pytest.raises(ValueError, match="previous has a number that is not finite"):
        train_router(e, h * math.inf, tokens, clusters, group=group)
    with pytest.raises(ValueError, match="groups of 2999"):
        train_router(e, h, tokens, clusters, group=group[:-1])
    with pytest.raises(ValueError, match="vocabulary of 240"):
        train_router(e, h, tokens + 240, clusters, group=group)
    with pytest.raises(ValueError, match="token ids"):
        train_router(e, h, tokens[:, 0], clusters, group=group)
    with pytest.raises(ValueError, match="hidden, batch and labels"):
        train_router(e, h, tokens, clusters, group=group, hidden=0)
    with pytest.raises(TraceError, match="at least two requests"):
        train_router(e, h, tokens, clusters, group=np.zeros(3000, int))
    router = random_router(inputs=7, count=20)
    with pytest.raises(ValueError, match=r"within 1\.\.20"):
        score_router(router, e, h, tokens, clusters, ks=(21,))
    with pytest.raises(ValueError, match="probabilities must be"):
        score_router(router, e, h, tokens, clusters, probabilities=probabilities[:, 1:])
    with pytest.raises(ValueError, match="frequencies are of 3 tokens"):
        score_router(router, e, h, tokens, clusters, frequencies=fit_frequencies([1, 2, 3]))
    with pytest.raises(ValueError, match="scores 5 clusters"):
        score_router(random_router(inputs=7), e, h, tokens, clusters)

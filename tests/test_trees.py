"""Trees: the compiled builder against the plain-Python builder and verifier of
:mod:`tree_reference`, on random distributions full of ties."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import tree_reference as reference
from tree_reference import Path

from spectune.runtime.distributions import best_children, codes_on_device, codes_on_host
from spectune.runtime.policies.heterospec import kept_nodes
from spectune.runtime.policies.sequoia import static_levels
from spectune.runtime.policies.stops import CompiledStop
from spectune.runtime.sampling import Noise
from spectune.runtime.trees.draft import GrownTree, grow
from spectune.runtime.trees.grow import Codes, Growing, Reads, Tree, TreeRule, select
from spectune.runtime.verification import accept
from spectune.traces.schema import NO_BIN, Sampling

CPU = torch.device("cpu")
KINDS = ["chain", "top_k", "classifier", "static"]
TRIALS = 600


@dataclass
class Case:
    """One growth both ways: the reference's arguments and the rule that means the same."""

    draft: reference.Draft
    growth: reference.Growth
    stop: reference.Stop | None
    strata: reference.Stratify | None
    rule: TreeRule
    gamma: int
    limit: int
    select: int | None
    vocab: int

    def expected(self, asked: list[Path] | None = None) -> reference.Tree:
        """The reference's tree; ``asked`` is told which laws it read."""

        def draft(path: Path) -> reference.Law:
            if asked is not None:
                asked.append(path)
            return self.draft(path)

        return reference.build(
            draft,
            self.growth,
            gamma=self.gamma,
            stop=self.stop,
            stratify=self.strata,
            select_n=self.select,
            limit=self.limit,
        )


def random_growth(
    rng: random.Random, kind: str, width: int, **stopping: Any
) -> tuple[reference.Growth, TreeRule]:
    """A growth of the reference, and the rule that means the same."""
    coupled = kind != "static" and rng.random() < 0.5
    score: reference.Score = "coupled" if coupled else "probability"
    sharpness = rng.choice([0.5, 1.0, 1.5, 4.0])
    if kind == "static":
        paths = [
            tuple(rng.randrange(width) for _ in range(rng.randint(1, 5)))
            for _ in range(rng.randint(1, 12))
        ]
        static = reference.Static(tuple(sorted(reference.prefixes(paths))))
        width, levels = static_levels(static.paths)
        frontier = max(len(level.expanded) for level in levels)
        return static, TreeRule(width, frontier, static=levels, **stopping)
    if kind == "classifier":
        cap, most = rng.randint(1, 9), rng.choice([3, 65535])
        shape = (rng.randint(1, 5), rng.randint(1, 40), rng.randint(1, 120))
        beta = rng.randint(0, most) // rng.choice([1, 2, 1000])
        drawn = np.random.default_rng(rng.getrandbits(32))
        table = drawn.integers(0, most + 1, shape, dtype=np.int32)

        def confidence(joint: int, entropy: int, depth: int) -> int:
            at = depth - 1, entropy // 16, joint // 16
            at = (min(i, n - 1) for i, n in zip(at, shape, strict=True))
            return int(table[tuple(at)])

        stopping |= {"confidence": table, "beta_code": beta}
        by_classifier = reference.Classifier(width, cap, beta, confidence, score, sharpness)
        return by_classifier, TreeRule(width, cap, coupled, sharpness, **stopping)
    rule = TreeRule(width, width, coupled, sharpness, **stopping)
    if kind == "chain":
        return reference.Chain(score, sharpness), rule
    return reference.TopK(width, score, sharpness), rule


def random_case(rng: random.Random, kind: str) -> Case:
    width = 1 if kind == "chain" else rng.choice([1, 2, 2, 3, 3, 4, 5, 8])
    vocab = width + rng.randint(0, 8)
    gamma = rng.randint(0, 4 if width > 4 else 6)
    stop, stopping = None, {}
    if rng.random() < 0.4:
        names = {
            "max_prob": "max_logp_code",
            "joint_prob": "max_joint_code",
            "entropy": "max_entropy_code",
        }
        limit = int(10 ** rng.uniform(0, 4))
        stop = reference.Stop(rng.choice(list(names)), limit, rng.random() < 0.5)
        limits = {names[stop.kind]: stop.limit}
        stopping = {"stop": CompiledStop(active=True, keep_last=stop.keep_last, **limits)}
    growth, rule = random_growth(rng, kind, width, **stopping)
    width = rule.width
    strata, wanted = None, None
    if kind in ("top_k", "classifier"):
        wanted = rng.choice([None, rng.randint(1, 30), rng.randint(1, 30)])
        if wanted is not None and rng.random() < 0.5:
            fractions = tuple(rng.choices([0.1, 0.3, 0.5, 0.6, 1.0], k=rng.randint(1, 4)))
            most, d_fit = rng.choice([80, 1280, 5120]), rng.randint(1, 6)
            thresholds = tuple(sorted(rng.sample(range(most), 4)))
            strata = reference.Stratify(thresholds, d_fit, rng.randint(0, 3), fractions)
            top_n = kept_nodes(wanted, fractions, strata.alpha)
            rule = replace(
                rule, thresholds=thresholds, fitted_depth=d_fit, alpha=strata.alpha, bin_top_n=top_n
            )
        rule = replace(rule, top_n=wanted)
    ties, greedy = rng.choice([0.0, 0.3, 0.9]), rng.random() < 0.5
    draft = reference.random_draft(
        rng, vocab, width, ties, greedy, rng.choice([0.0, 0.0, 0.3, 0.9])
    )
    limit = gamma + rng.choice([0, 1, 2, 3, 4, 10**6])
    return Case(draft, growth, stop, strata, rule, gamma, limit, wanted, vocab)


def as_codes(laws: list[reference.Law], k: int, junk: random.Random) -> Codes:
    """Distributions as arrays; what does not exist is filled with junk."""

    def filled(name: str, most: int) -> np.ndarray:
        rows = [getattr(law, name)[:k] for law in laws]
        filling = [[*row, *(junk.randint(0, most) for _ in range(k - len(row)))] for row in rows]
        return np.array(filling, dtype=np.int64).reshape(len(laws), k)

    children = filled("tokens", 9), filled("logp", 65535), filled("gap", 65535)
    entropies = [law.entropy for law in laws], [law.top_entropy for law in laws]
    return Codes.of(*children, *entropies, [min(k, len(law.tokens)) for law in laws])


class Told:
    """A DistributionSource that asks a reference draft, path by path."""

    def __init__(self, case: Case) -> None:
        self.case, self.junk = case, random.Random(0)
        self.read: list[Path] = []

    def root(self) -> Codes:
        self.frontier: list[Path | None] = [()]
        self.read.append(())
        return as_codes([self.case.draft(())], self.case.rule.width, self.junk)

    def expand(self, growing: Growing, width: int) -> Codes:
        """Asks for the first ``width`` of the frontier; a place where no node is (static trees)
        gets a law of nobody's."""
        tree, level, above = growing.tree, growing.depth, self.frontier
        self.frontier = []
        for place, parent in zip(tree.place[level, :width], tree.above[level], strict=False):
            path = above[parent]
            assert self.case.rule.static or place >= 0
            there = place >= 0 and path is not None
            self.frontier.append((*path, int(tree.token[place])) if there else None)
        self.read += [path for path in self.frontier if path is not None]
        nobody = reference.Law([1], [3], [0], 4, 5)
        laws = [nobody if path is None else self.case.draft(path) for path in self.frontier]
        return as_codes(laws, self.case.rule.width, self.junk)


def grown(case: Case) -> tuple[GrownTree, list[Path]]:
    source = Told(case)
    return grow(case.rule, case.gamma, case.limit, source), source.read


def paths_of(tree: GrownTree) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def check_equal(
    case: Case, tree: GrownTree, expected: reference.Tree, read: list[Path] | None
) -> None:
    kept = expected.kept
    assert paths_of(tree) == [node.path for node in kept]
    assert tree.tokens == [node.token for node in kept]
    assert tree.parents == [-1 if node.parent is None else kept.index(node.parent) for node in kept]
    assert tree.depths == [node.depth for node in kept]
    growth = expected.depth, expected.passes, expected.widths
    assert (tree.levels, tree.steps, tree.widths) == growth
    assert [place >= 0 for place in tree.expanded] == [node.expanded for node in kept]
    # A static tree's places are numbered with those of nodes that do not exist.
    if read is not None and not case.rule.static:
        for place, node in zip(tree.expanded, kept, strict=True):
            assert place < 0 or read[1 + place] == node.path
    assert tree.bin == (NO_BIN if expected.bin is None else expected.bin)
    assert tree.phi == (expected.phi or 0)


def test_the_reference_grows_what_was_worked_out_on_paper() -> None:
    reference.check_by_hand()


@pytest.mark.parametrize("kind", KINDS)
def test_grows_what_the_papers_say(kind: str) -> None:
    """Through ``grow``: nodes, order, parents, depths, passes, what each pass read, bins, Phi,
    ends; ties and short laws included."""
    seen: Counter[str] = Counter()
    for trial in range(TRIALS):
        case = random_case(random.Random(f"{kind} {trial}"), kind)
        asked: list[Path] = []
        expected = case.expected(asked)
        tree, read = grown(case)
        check_equal(case, tree, expected, read)
        assert read == asked
        seen[f"{expected.ended}{' deeper' if expected.goal > case.gamma else ''}"] += 1
        seen["dropped"] += bool(expected.dropped)
    wanted = {
        "chain": "depth, stop, dropped",
        "top_k": "depth, stop, depth deeper, stop deeper, dropped",
        "static": "depth, stop, static, dropped",
        "classifier": "depth, stop, classifier, depth deeper, dropped",
    }
    assert not [n for n in wanted[kind].split(", ") if not seen[n]], seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_grows_each_tree_alone(kind: str) -> None:
    """Trees whose rows lie in one table: nodes, what stops and bins read, and how many are read
    next."""
    for trial in range(60):
        rng = random.Random(f"batch {kind} {trial}")
        case = random_case(rng, kind)
        rule, depth = case.rule, max(1, case.gamma)
        depth = min(depth, len(rule.static)) if rule.static else depth
        alone, levels = [], []
        for greedy in (False, True, True):
            draft = reference.random_draft(rng, case.vocab, rule.width, 0.3, greedy, 0.3)
            one, source, rows = Growing(rule, depth), Told(replace(case, draft=draft)), []
            for level in range(depth):
                width = one.width if level else 1
                none = as_codes([], rule.width, rng)
                read = source.expand(one, width) if level and width else source.root()
                rows.append(read if width else none)
                one.add(rows[-1])
            alone.append(one.tree)
            levels.append(rows)
        batch = Growing(rule, depth, len(alone))
        for parts in zip(*levels, strict=True):
            front, begin = np.full((len(alone), max(1, rule.frontier)), -1), 0
            for row, part in zip(front, parts, strict=True):
                row[: len(part.count)] = begin + np.arange(len(part.count))
                begin += len(part.count)
            codes = Codes(*(np.concatenate(x) for x in zip(*parts, strict=True)))
            batch.add_from(codes, front)
        for b, tree in enumerate(alone):
            mine, read = Tree(*(x[b] for x in batch.trees)), slice(1, depth + 1)
            assert select(mine, depth, depth, None) == select(tree, depth, depth, None)
            for name in ("size", "width", "level_phi", "stop"):
                assert np.array_equal(getattr(mine, name)[read], getattr(tree, name)[read]), name


@pytest.mark.parametrize("kind", KINDS)
def test_accepts_as_the_papers_say(kind: str) -> None:
    """The verdict on a tree, and how much of it the draft has read."""
    lengths = set()
    for trial in range(120):
        rng = random.Random(f"walk {kind} {trial}")
        case = random_case(rng, kind)
        expected = case.expected()
        tree, _ = grown(case)
        target = reference.random_target(rng, case.draft, case.vocab, rng.choice([0.5, 0.9, 1.0]))
        accepted, bonus = reference.verify(expected.kept, target)
        answers = [target(path) for path in [(), *paths_of(tree)]]
        verdict = accept(tree, answers.__getitem__)
        assert verdict.tokens == [*(node.token for node in accepted), bonus]
        assert verdict.path == [expected.kept.index(node) for node in accepted]
        assert verdict.accepted == len(accepted)
        assert verdict.read is not None
        assert len(verdict.tokens) - verdict.read == reference.reread(accepted, len(verdict.tokens))
        lengths.add(verdict.accepted)
    assert len(lengths) > 3


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=6),
    Sampling(temperature=1.0, top_p=0.9),
]


of_sampling = pytest.mark.parametrize(
    "sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature}k{s.top_k}p{s.top_p}"
)


@of_sampling
@pytest.mark.parametrize("vocab", [3, 11, 150])
def test_codes_of_a_law(sampling: Sampling, vocab: int) -> None:
    """Children, codes and entropies as docs/simulator.md defines them, in plain Python, away
    from borders."""
    for trial in range(12):
        k = [1, 4, 10][trial % 3]
        own = np.random.default_rng(trial)
        logits = own.normal(0, own.choice([0.5, 2.0, 6.0]), vocab).astype(np.float32)
        own_noise = Noise(trial, vocab, CPU)
        g = None if sampling.greedy else own_noise.row(3)
        children = best_children(
            torch.from_numpy(logits)[None],
            sampling,
            None if g is None else partial(own_noise.add, positions=[3]),
            Reads(k),
        )
        codes = codes_on_host(children)
        for name, there in codes_on_device(children)._asdict().items():
            assert np.array_equal(getattr(codes, name), there.numpy()), name
        x = logits.astype(float) / (1.0 if sampling.greedy else sampling.temperature)
        order = sorted(range(vocab), key=lambda i: -x[i])[: sampling.top_k or vocab]
        if sampling.top_p < 1:
            mass = np.exp(x[order]) / np.exp(x[order]).sum()
            before = np.cumsum(mass) - mass
            order = [t for t, b in zip(order, before, strict=True) if b < sampling.top_p]
        total = sum(math.exp(x[token]) for token in order)
        q = {token: math.exp(x[token]) / total for token in order}
        noise = np.zeros(vocab) if g is None else g.numpy()
        score = {token: x[token] + float(noise[token]) for token in order}
        best = sorted(order, key=lambda token: -score[token])[: min(k, vocab)]
        assert codes.count[0] == len(best)
        assert codes.tokens[0, : len(best)].tolist() == best
        nats = [(codes.logp[0, i], -math.log(q[token])) for i, token in enumerate(best)]
        nats += [(codes.gap[0, i], score[best[0]] - score[token]) for i, token in enumerate(best)]
        for code, every in (
            (codes.entropy, [*q.values()]),
            (codes.top_entropy, sorted(q.values())),
        ):
            p = np.array(every[-10:] if code is codes.top_entropy else every)
            p = p / p.sum()
            nats.append((code[0], -(p * np.log(p)).sum()))
        for code, value in nats:
            if abs(256 * value - round(256 * value)) > 1e-2:
                assert code == min(65535, math.floor(256 * value))

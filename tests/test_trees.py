"""Trees: the compiled builder and the one of tensor operations against the plain-Python builder and
verifier of :mod:`tree_reference`, on random distributions full of ties."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import tree_reference as reference

import spectune.runtime.distributions
import spectune.runtime.sampling
import spectune.runtime.trees.draft
from spectune.runtime import near_ties
from spectune.runtime.distributions import read_distributions
from spectune.runtime.models import CausalModel
from spectune.runtime.policies.heterospec import kept_nodes
from spectune.runtime.policies.sequoia import static_levels
from spectune.runtime.sampling import Noise, filters
from spectune.runtime.trees.device import DeviceGrowing
from spectune.runtime.trees.draft import AnyGrowing, GrownTree, ModelDistributions, grow
from spectune.runtime.trees.grow import (
    INFINITE,
    NONE,
    Codes,
    DistributionRows,
    Growing,
    Tree,
    TreeRule,
)
from spectune.runtime.verification import TargetText, verify_tree
from spectune.traces.schema import NO_BIN, Sampling

CPU = torch.device("cpu")
Path = tuple[int, ...]
KINDS = ["chain", "top_k", "classifier", "static"]
TRIALS = {"compiled": 600, "tensors": 120}
"""Tensor operations are held against the compiled loops field by field as well, and take several
times as long."""


@pytest.fixture(params=["compiled", "tensors"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Grows by compiled loops (a CPU's) or by tensor operations (any device's)."""
    if request.param == "tensors":
        monkeypatch.setattr(
            spectune.runtime.trees.draft,
            "growing_on",
            lambda device, rule, depth, complete: DeviceGrowing(rule, device, complete),
        )
        monkeypatch.setattr(spectune.runtime.distributions, "fused", lambda _: False)
    return str(request.param)


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
    whole: bool

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


def random_case(rng: random.Random, kind: str) -> Case:
    width = 1 if kind == "chain" else rng.choice([1, 2, 2, 3, 3, 4, 5, 8])
    vocab = width + rng.randint(0, 8)
    coupled = kind != "static" and rng.random() < 0.5
    score: reference.Score = "coupled" if coupled else "probability"
    sharpness = rng.choice([0.5, 1.0, 1.5, 4.0])
    gamma = rng.randint(0, 4 if width > 4 else 6)
    stop, stopping = None, {}
    if rng.random() < 0.4:
        stop = reference.Stop(
            rng.choice(("max_prob", "joint_prob", "entropy")),
            rng.randint(0, 150),
            rng.random() < 0.5,
        )
        name = {"max_prob": "max_logp", "joint_prob": "max_joint", "entropy": "max_entropy"}[
            stop.kind
        ]
        limits = {
            "max_logp": INFINITE,
            "max_joint": INFINITE,
            "max_entropy": INFINITE,
            name: stop.limit,
        }
        stopping = {"reads_stop": True, "keep_last": stop.keep_last, **limits}
    growth: reference.Growth
    if kind == "static":
        paths = [
            tuple(rng.randrange(width) for _ in range(rng.randint(1, 5)))
            for _ in range(rng.randint(1, 12))
        ]
        growth = reference.Static(tuple(sorted(reference.prefixes(paths))))
        width, levels = static_levels(growth.paths)
        frontier = max(len(level.expanded) for level in levels)
        rule = TreeRule(width=width, frontier=frontier, static=levels, **stopping)
    elif kind == "classifier":
        cap = rng.randint(1, 9)
        shape = (rng.randint(1, 5), rng.randint(1, 40), rng.randint(1, 120))
        most = rng.choice([3, 65535])
        beta = rng.randint(0, most) // rng.choice([1, 2, 1000])
        table = np.random.default_rng(rng.getrandbits(32)).integers(
            0, most + 1, shape, dtype=np.int32
        )

        def confidence(joint: int, entropy: int, depth: int) -> int:
            return int(
                table[
                    min(depth, shape[0]) - 1, min(entropy, shape[1] - 1), min(joint, shape[2] - 1)
                ]
            )

        growth = reference.Classifier(width, cap, beta, confidence, score, sharpness)
        rule = TreeRule(
            width, cap, coupled, sharpness, confidence=table, beta_code=beta, **stopping
        )
    else:
        growth = (
            reference.Chain(score, sharpness)
            if kind == "chain"
            else reference.TopK(width, score, sharpness)
        )
        rule = TreeRule(width, width, coupled, sharpness, **stopping)
    strata, wanted = None, None
    if kind in ("top_k", "classifier"):
        wanted = rng.choice([None, rng.randint(1, 30), rng.randint(1, 30)])
        if wanted is not None and rng.random() < 0.5:
            fractions = tuple(
                rng.choice([0.1, 0.3, 0.5, 0.6, 1.0]) for _ in range(rng.randint(1, 4))
            )
            strata = reference.Stratify(
                tuple(sorted(rng.sample(range(80), 4))),
                rng.randint(1, 6),
                rng.randint(0, 3),
                fractions,
            )
            kept = kept_nodes(wanted, fractions, strata.alpha)
            rule = replace(
                rule,
                thresholds=strata.thresholds,
                fitted_depth=strata.d_fit,
                alpha=strata.alpha,
                kept=kept,
            )
        rule = replace(rule, top_n=wanted)
    ties, greedy = rng.choice([0.0, 0.3, 0.9]), rng.random() < 0.5
    rate = rng.choice([0.0, 0.0, 0.3, 0.9])
    draft = reference.random_draft(rng, vocab, width, ties, greedy, rate)
    return Case(
        draft,
        growth,
        stop,
        strata,
        rule,
        gamma,
        gamma + rng.randint(0, 4),
        wanted,
        vocab,
        rate == 0 and rng.random() < 0.5,
    )


def as_rows(laws: list[reference.Law], k: int, junk: random.Random) -> DistributionRows:
    """Distributions as rows; what does not exist is filled with junk."""
    n, column = len(laws), functools.partial(torch.tensor, dtype=torch.int64)

    def filled(values: list[int], most: int) -> list[int]:
        return [*values[:k], *(junk.randint(0, most) for _ in range(k - len(values)))]

    return DistributionRows(
        column([filled(law.tokens, 9) for law in laws]).view(n, k),
        column([filled(law.logp, 255) for law in laws]).view(n, k),
        column([filled(law.gap, 255) for law in laws]).view(n, k),
        column([law.entropy for law in laws]),
        column([law.top_entropy for law in laws]),
        column([min(k, len(law.tokens)) for law in laws]),
        None,
        None,
    )


class Told:
    """A DistributionSource that asks a reference draft, path by path."""

    def __init__(self, case: Case) -> None:
        self.case, self.junk = case, random.Random(0)
        self.read: list[Path] = []

    def root(self) -> DistributionRows:
        self.frontier: list[Path | None] = [()]
        self.read.append(())
        return as_rows([self.case.draft(())], self.case.rule.width, self.junk)

    def expand(self, growing: AnyGrowing, width: int) -> DistributionRows:
        """Asks for the first ``width`` of the frontier; a place where no node is (static trees)
        gets a law of nobody's."""
        tokens, parents, exists = growing.following(width)
        above, self.frontier = self.frontier, []
        for token, parent, there in zip(
            tokens.tolist(),
            [0] * width if parents is None else parents.tolist(),
            exists,
            strict=True,
        ):
            path = above[parent]
            assert self.case.rule.static or there
            self.frontier.append((*path, token) if there and path is not None else None)
        self.read += [path for path in self.frontier if path is not None]
        laws = [
            reference.Law([1], [3], [0], 4, 5) if path is None else self.case.draft(path)
            for path in self.frontier
        ]
        return as_rows(laws, self.case.rule.width, self.junk)

    def decide_near_ties(self, growing: AnyGrowing, *, reads_phi: bool) -> None:
        pass


def grown(case: Case) -> tuple[GrownTree, list[Path]]:
    source = Told(case)
    return grow(case.rule, case.gamma, case.limit, source, CPU, whole=case.whole), source.read


def paths_of(tree: GrownTree) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def check_equal(case: Case, tree: GrownTree, expected: reference.Tree, read: list[Path]) -> None:
    kept = expected.kept
    assert paths_of(tree) == [node.path for node in kept]
    assert tree.tokens == [node.token for node in kept]
    assert tree.parents == [-1 if node.parent is None else kept.index(node.parent) for node in kept]
    assert tree.depths == [node.depth for node in kept]
    assert (tree.levels, tree.steps, tree.widths) == (
        expected.depth,
        expected.passes,
        expected.widths,
    )
    assert [place >= 0 for place in tree.expanded] == [node.expanded for node in kept]
    if (
        not case.rule.static
    ):  # a static tree's places are numbered with those of nodes that do not exist
        for place, node in zip(tree.expanded, kept, strict=True):
            assert place < 0 or read[1 + place] == node.path
    assert tree.bin == (NO_BIN if expected.bin is None else expected.bin)
    assert tree.phi == (expected.phi or 0)


def test_the_reference_grows_what_was_worked_out_on_paper() -> None:
    reference.check_by_hand()


@pytest.mark.parametrize("kind", KINDS)
def test_grows_what_the_papers_say(kind: str, way: str) -> None:
    """Through ``grow``: nodes, order, parents, depths, passes, what each pass read, bins, Phi,
    ends; ties and short laws included."""
    seen: dict[str, int] = {}
    for trial in range(TRIALS[way]):
        case = random_case(random.Random(f"{kind} {way} {trial}"), kind)
        asked: list[Path] = []
        expected = case.expected(asked)
        tree, read = grown(case)
        check_equal(case, tree, expected, read)
        assert read == asked
        outcome = f"{expected.ended}{' deeper' if expected.goal > case.gamma else ''}"
        seen[outcome] = seen.get(outcome, 0) + 1
    wanted = {
        "chain": "depth, stop",
        "top_k": "depth, stop, depth deeper, stop deeper",
        "static": "depth, stop, static",
    }
    wanted["classifier"] = "depth, stop, classifier, depth deeper"
    assert way == "tensors" or set(seen) >= set(wanted[kind].split(", ")), seen


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drafted_and_not_verified_is_kept_where_asked(kind: str, way: str) -> None:
    """Beside the kept nodes exactly the other candidates and a dropped level's, and the same tree;
    unasked, nothing."""
    seen = {"left": 0, "dropped": 0, "below": 0}
    for trial in range(TRIALS[way] // 2):
        case = random_case(random.Random(f"pruned {kind} {way} {trial}"), kind)
        expected, (plain, _) = case.expected(), grown(case)
        tree = grow(
            case.rule, case.gamma, case.limit, Told(case), CPU, whole=case.whole, keep_pruned=True
        )
        assert plain.pruned is None
        assert replace(tree, pruned=None) == plain
        left = [
            node for node in expected.candidates if node not in expected.kept
        ] + expected.dropped
        joint = [*expected.kept, *left]
        assert tree.pruned.tokens == [node.token for node in left]
        assert tree.pruned.parents == [
            -1 if node.parent is None else joint.index(node.parent) for node in left
        ]
        assert tree.pruned.depths == [node.depth for node in left]
        seen["left"] += len(left) > len(expected.dropped)
        seen["dropped"] += bool(expected.dropped)
        seen["below"] += any(parent >= len(expected.kept) for parent in tree.pruned.parents)
    selects = kind in ("top_k", "classifier")
    assert way == "tensors" or all(
        count > 2 for name, count in seen.items() if selects or name == "dropped"
    ), seen


FIELDS = dict.fromkeys(("token", "cost", "q_cost", "parent"), "candidate") | dict.fromkeys(
    ("place", "above", "rank", "phi"), "place"
)
FIELDS |= dict.fromkeys(("size", "frontier", "width", "level_phi", "stop"), "level")


def compare_trees(tree: Tree, expected: Tree, levels: int) -> None:
    """Field by field, but for what nobody reads of candidates and places without a node."""
    size, there = int(expected.size[levels]), {}
    there["candidate"] = expected.cost[:size] < INFINITE
    there["level"] = np.ones(levels, dtype=np.bool_)
    for name, kind in FIELDS.items():
        mine, right = getattr(tree, name), getattr(expected, name)
        if kind == "candidate":
            mine, right = mine[:size], right[:size]
            if name != "cost":
                mine, right = mine[there[kind]], right[there[kind]]
            assert np.array_equal(mine, right), name
            continue
        for level in range(1, levels + 1):
            a, b = mine[level], right[level]
            if kind == "place":
                some = slice(0, expected.frontier[level])
                nodes = expected.place[level, some] != NONE
                a, b = (a[some], b[some]) if name == "place" else (a[some][nodes], b[some][nodes])
            assert np.array_equal(a, b), (name, level)


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_operations_and_batches_grow_the_compiled_tree(kind: str) -> None:
    """Every field at every level: of one tree by tensor operations, forgetting and growing again on
    the way, and of a batch whose rows lie in one table."""
    seen = {"stops": 0, "phi": 0, "ends": 0}
    for trial in range(60):
        rng = random.Random(f"fields {kind} {trial}")
        case = random_case(rng, kind)
        rule, depth = case.rule, max(1, case.gamma)
        if rule.static:
            depth = min(depth, len(rule.static))
        drafts = [case.draft] + [
            reference.random_draft(rng, case.vocab, rule.width, 0.3, i > 0, 0.3) for i in range(2)
        ]
        trees, given = [], []
        for draft in drafts:
            one, other = (
                Growing(rule, depth),
                DeviceGrowing(rule, CPU, case.whole and draft is case.draft),
            )
            source, rows = Told(replace(case, draft=draft)), []
            for level in range(depth):
                width = one.width if level else 1
                assert level == 0 or other.width == width
                if not width:
                    seen["ends"] += 1
                    rows += [as_rows([], rule.width, rng)] * (depth - level)
                else:
                    rows.append(source.expand(one, width) if level else source.root())
                if (
                    rng.random() < 0.3 and width
                ):  # what is decided by the canonical pass is grown again
                    other.add(
                        rows[level]._replace(
                            logp=rows[level].logp.flip(0), gap=rows[level].gap.flip(0)
                        )
                    )
                    other.undo()
                for growing in (one, other):
                    growing.add(rows[level])
                assert (one.stops, one.phi) == (other.stops, other.phi)
                seen["stops"] += rule.reads_stop and one.stops
                seen["phi"] += rule.stratified and one.phi > 0
            compare_trees(other.tree(), one.tree(), depth)
            trees.append(one.tree())
            given.append(rows)
        batch = Growing(rule, depth, len(drafts))
        for level in range(depth):
            parts = [rows[level].codes() for rows in given]
            begins = np.cumsum([0, *(len(p.count) for p in parts)])
            front = np.full((len(drafts), max(1, rule.frontier)), -1)
            for b, part in enumerate(parts):
                front[b, : len(part.count)] = begins[b] + np.arange(len(part.count))
            batch.add_from(
                Codes(*(np.concatenate(column) for column in zip(*parts, strict=True))), front
            )
        for b, tree in enumerate(trees):
            compare_trees(batch.trees.one(b), tree, depth)
    assert seen["stops"] > 5
    assert kind in ("chain", "static") or seen["phi"] > 5
    assert kind != "classifier" or seen["ends"] > 5


def one_hot_logits(tree: GrownTree, target: reference.Target, vocab: int) -> torch.Tensor:
    wanted = torch.tensor([target(path) for path in [(), *paths_of(tree)]])
    return torch.nn.functional.one_hot(wanted, vocab).float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [False, True])
def test_walks_as_the_papers_say(kind: str, exact: bool) -> None:
    """The verdict on a tree, and how much of it the draft has read, with fake logits whose best
    token the target wants."""
    nobody = cast(CausalModel, None)
    lengths = set()
    for trial in range(120):
        rng = random.Random(f"walk {kind} {trial}")
        case = random_case(rng, kind)
        expected = case.expected()
        tree, _ = grown(case)
        target = reference.random_target(rng, case.draft, case.vocab, rng.choice([0.5, 0.9, 1.0]))
        accepted, bonus = reference.verify(expected.kept, target)
        logits = one_hot_logits(tree, target, case.vocab)
        verdict = verify_tree(
            TargetText(nobody, [7, 8], Sampling(), None, exact and case.vocab > 1), logits, tree
        )
        assert verdict.tokens == [*(node.token for node in accepted), bonus]
        assert verdict.path == [expected.kept.index(node) for node in accepted]
        assert verdict.accepted == len(accepted)
        assert verdict.read is not None
        assert len(verdict.tokens) - verdict.read == reference.reread(accepted, len(verdict.tokens))
        lengths.add(verdict.accepted)
    assert len(lengths) > 3


class Shaken:
    """A Reader whose passes give the law of each path, shaken by a little; only the canonical pass
    is steady."""

    def __init__(self, seed: int, vocab: int, shake: float, grid: float, length: int = 5) -> None:
        self.device, self.length = CPU, length
        self.seed, self.vocab, self.shake, self.grid = seed, vocab, shake, grid
        self.generator = torch.Generator().manual_seed(seed)
        self.known: dict[Path, torch.Tensor] = {}
        self.paths: list[Path] = [()]
        self.settled = 0

    def steady(self, path: Path) -> torch.Tensor:
        """Logits whose differences are multiples of ``grid``: neighbours tie, and codes of gaps lie
        on their borders."""
        if path not in self.known:
            own = random.Random(f"{self.seed} {path}")
            self.known[path] = torch.tensor(
                [round(own.gauss(0, 2) / self.grid) * self.grid for _ in range(self.vocab)]
            )
        return self.known[path]

    def _shaken(self) -> torch.Tensor:
        rows = torch.stack([self.steady(path) for path in self.paths])
        return rows + self.shake * (torch.rand(rows.shape, generator=self.generator) - 0.5)

    def root(self) -> torch.Tensor:
        self.paths = [()]
        return self._shaken()

    def level(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor | None,
        depth: int,
        exists: torch.Tensor | None = None,
    ) -> torch.Tensor:
        above = [0] * len(tokens) if parents is None else parents.tolist()
        self.paths = [
            (*self.paths[p], token) for p, token in zip(above, tokens.tolist(), strict=True)
        ]
        assert {len(path) for path in self.paths} == {depth}
        return self._shaken()

    def canonical(self, path: list[int]) -> torch.Tensor:
        self.settled += 1
        return self.steady(tuple(path))


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=6),
    Sampling(temperature=1.0, top_p=0.9),
]


@pytest.mark.parametrize(
    "sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature}k{s.top_k}p{s.top_p}"
)
def test_rounding_changes_no_tree(
    sampling: Sampling, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that differ from the canonical one by rounding grow the tree that the canonical laws
    grow, where exactness is asked for.

    Rounding and margins are a thousand times what they are, so that it matters often.
    """
    monkeypatch.setattr(near_ties, "TREE", 0.02)
    monkeypatch.setattr(near_ties, "MEMBERSHIP", 0.05)
    settled = 0
    for trial in range(60):
        rng = random.Random(f"shaken {trial}")
        case = random_case(rng, rng.choice(KINDS) if trial % 2 else "top_k")
        if trial % 2 == 0:  # nothing but selection: only laws that could change it are settled
            plain = replace(
                case.rule, reads_stop=False, kept=(), thresholds=(), top_n=rng.randint(2, 12)
            )
            case = replace(case, stop=None, strata=None, select=plain.top_n, rule=plain)
        vocab = case.rule.width + rng.randint(2, 20)
        noise = None if sampling.greedy else Noise(trial, vocab, CPU)
        reader = Shaken(trial, vocab, 4e-3, rng.choice([1 / 16, 0.25, 1e-4]))
        rule = replace(
            case.rule, coupled=not sampling.greedy and not case.rule.static and trial % 3 > 0
        )
        growth: Any = case.growth
        if not isinstance(growth, reference.Static):
            growth = replace(growth, score="coupled" if rule.coupled else "probability")

        def draft(
            path: Path, reader: Shaken = reader, rule: TreeRule = rule, noise: Noise | None = noise
        ) -> reference.Law:
            row = None if noise is None else noise.row(reader.length + len(path))
            rows = read_distributions(
                reader.steady(path)[None], sampling, row, rule.width, entropy=True, top_entropy=True
            )
            n = int(rows.count[0])
            tokens, logp, gap = (
                rows.tokens[0, :n].tolist(),
                rows.logp[0, :n].tolist(),
                rows.gap[0, :n].tolist(),
            )
            return reference.Law(tokens, logp, gap, int(rows.entropy[0]), int(rows.top_entropy[0]))

        if vocab > rule.width:
            laws = ModelDistributions(rule, reader, sampling, noise, True)
            whole = not filters(sampling, vocab)
            tree = grow(rule, case.gamma, case.limit, laws, CPU, whole=whole)
            expected = replace(case, draft=draft, growth=growth, rule=rule).expected()
            assert paths_of(tree) == [node.path for node in expected.kept]
            assert (tree.levels, tree.steps, tree.widths) == (
                expected.depth,
                expected.passes,
                expected.widths,
            )
            assert tree.phi == (expected.phi or 0)
            assert [place >= 0 for place in tree.expanded] == [
                node.expanded for node in expected.kept
            ]
            settled += reader.settled
    assert settled > 10


@pytest.mark.parametrize(
    "sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature}k{s.top_k}p{s.top_p}"
)
@pytest.mark.parametrize("vocab", [3, 11, 150])
def test_codes_of_a_law(sampling: Sampling, vocab: int, way: str) -> None:
    """Children, codes and entropies as docs/trees.md defines them, in Python's own arithmetic, away
    from borders."""
    for trial in range(12):
        k = [1, 4, 10][trial % 3]
        own = np.random.default_rng(trial)
        logits = own.normal(0, own.choice([0.5, 2.0, 6.0]), vocab).astype(np.float32)
        g = None if sampling.greedy else Noise(trial, vocab, CPU).row(3)
        by_probability = trial % 2 == 0
        rows = read_distributions(
            torch.from_numpy(logits)[None],
            sampling,
            g,
            k,
            by_probability=by_probability,
            entropy=True,
            top_entropy=True,
            exact=True,
        )
        x = logits.astype(float) / (1.0 if sampling.greedy else sampling.temperature)
        order = sorted(range(vocab), key=lambda i: -x[i])
        if sampling.top_k:
            order = order[: sampling.top_k]
        if sampling.top_p < 1:
            mass = np.exp(x[order]) / np.exp(x[order]).sum()
            order = [
                token
                for token, before in zip(order, np.cumsum(mass) - mass, strict=True)
                if before < sampling.top_p
            ]
        total = sum(math.exp(x[token]) for token in order)
        q = {token: math.exp(x[token]) / total for token in order}
        score = {
            token: x[token] + (0.0 if g is None or by_probability else float(g[token]))
            for token in order
        }
        best = sorted(order, key=lambda token: -score[token])[: min(k, vocab)]
        assert int(rows.count[0]) == len(best)
        assert rows.tokens[0, : len(best)].tolist() == best
        assert rows.unsure is not None  # not even None: entropies were asked for
        assert rows.unsure_entropy is not None
        for i, token in enumerate(best):
            if not bool(rows.unsure[0, i]):
                assert int(rows.logp[0, i]) == min(255, math.floor(-16 * math.log(q[token])))
                assert int(rows.gap[0, i]) == min(
                    255, math.floor(16 * (score[best[0]] - score[token]))
                )
        top = sorted(q.values())[-10:]
        if not bool(rows.unsure_entropy[0]):
            assert int(rows.entropy[0]) == min(
                255, math.floor(-16 * sum(p * math.log(p) for p in q.values()))
            )
            assert int(rows.top_entropy[0]) == math.floor(
                -16 * sum(p / sum(top) * math.log(p / sum(top)) for p in top)
            )

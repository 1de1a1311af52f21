"""Growing in tensors is growing by compiled code, to the last bit: random distributions full of
ties, all rules, whole trees and each of their levels."""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from test_trees import KINDS, Case, Told, as_codes, random_case
from tree_reference import Path

from spectune.runtime.attention import seat_mask
from spectune.runtime.distributions import Children, DeviceCodes, codes_on_device
from spectune.runtime.drafts.tree_program import TreeProgram
from spectune.runtime.trees.draft import GrownTree, grow
from spectune.runtime.trees.grow import TreeRule
from spectune.runtime.trees.on_device import (
    GrowingTree,
    grow_on_device,
    grown_tree,
)

CPU = torch.device("cpu")
TREES = 300
"""Of each kind; some 6,000 levels together."""


class ToldInTensors:
    """The distributions of a case, path by path, as tensors. A place without a node gets one too,
    of a path that is not in the tree."""

    def __init__(self, case: Case) -> None:
        self.case, self.junk = case, random.Random(0)
        self.rows: list[int] = []
        """How many places each pass read."""
        self.read: list[Path] = []
        """What passes after the first read."""

    def root(self) -> DeviceCodes:
        self.paths: list[Path] = [()]
        return self._codes()

    def expand(self, frontier: tuple[torch.Tensor, torch.Tensor]) -> DeviceCodes:
        tokens, above = (x.tolist() for x in frontier)
        paths = zip(above, tokens, strict=True)
        self.paths = [(*self.paths[place], token) for place, token in paths]
        self.read += self.paths
        return self._codes()

    def _codes(self) -> DeviceCodes:
        self.rows.append(len(self.paths))
        laws = [self.case.draft(path) for path in self.paths]
        codes = as_codes(laws, self.case.rule.width, self.junk)
        return DeviceCodes(*(torch.from_numpy(x.astype("int64")) for x in codes))


def drafting_case(seed: str, kind: str) -> Case:
    """A random case that drafts at least one level."""
    case = random_case(random.Random(seed), kind)
    gamma = max(1, case.gamma)
    return replace(case, gamma=gamma, limit=min(64, max(gamma, case.limit)))


def grown_by(growing: GrowingTree, case: Case, told: ToldInTensors, *, looks: bool) -> GrownTree:
    """Grows the tree of a case. Without ``looks`` all levels are grown at once, whether or not
    growth ended before."""

    def grow_levels(first: int, last: int) -> torch.Tensor:
        for level in range(first, last + 1):
            above = level - 1
            codes = told.expand(growing.frontier(above)) if above else told.root()
            growing.add(codes, level, case.gamma)
        return growing.choose()

    growing.begin(torch.tensor([case.gamma]), torch.tensor([case.limit]))
    if looks:
        return grow_on_device(growing, case.gamma, grow_levels)
    tree, more = grown_tree(grow_levels(1, growing.depth).tolist(), growing.sizes)
    assert not more
    return tree


def same(one: GrownTree, other: GrownTree) -> bool:
    """Whether two trees are equal in all but the numbers of the nodes that were read, and how many
    they are: compiled code counts those that exist, a device all places of a level."""
    read = [[place >= 0 for place in tree.expanded] for tree in (one, other)]
    bare = [replace(tree, expanded=[], widths=[]) for tree in (one, other)]
    return bare[0] == bare[1] and read[0] == read[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("looks", [False, True])
def test_grows_the_same_trees(kind: str, looks: bool) -> None:
    """Whether or not the host looks where growth may have ended, or there are levels behind the
    deepest of the tree. One memory serves many trees."""
    seen: Counter[str] = Counter()
    for trial in range(TREES // 2):
        case = drafting_case(f"device {kind} {looks} {trial}", kind)
        behind = 0 if looks else trial % 3
        growing = GrowingTree(case.rule, case.gamma + case.rule.alpha + behind, CPU)
        for again in range(2):
            draft = case.draft
            if again:
                case = replace(case, draft=lambda path, draft=draft: draft((1, *path)))
            told = ToldInTensors(case)
            tree = grown_by(growing, case, told, looks=looks)
            expected = grow(case.rule, case.gamma, case.limit, Told(case))
            assert same(tree, expected), (trial, tree, expected)
            assert tree.widths == told.rows[: tree.steps]
            seen["levels"] += len(told.rows)
            seen["behind the end"] += len(told.rows) - tree.steps
            seen["nodes"] += len(tree.tokens)
            seen["bins"] += tree.bin != 255
    assert seen["levels"] > 2 * TREES
    assert seen["nodes"] > 2 * TREES
    assert not looks or not seen["behind the end"]
    assert (seen["bins"] > 0) == (kind in ("top_k", "classifier"))


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_numbered_as_passes_read_them(kind: str) -> None:
    """A node that was read is found at the place of its token among those that passes read."""
    for trial in range(60):
        case = drafting_case(f"places {kind} {trial}", kind)
        growing = GrowingTree(case.rule, case.gamma + case.rule.alpha, CPU)
        told = ToldInTensors(case)
        tree = grown_by(growing, case, told, looks=False)
        paths: list[Path] = []
        for token, parent, place in zip(tree.tokens, tree.parents, tree.expanded, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            assert place < 0 or told.read[place] == paths[-1]


def drawn_children(rows: int, width: int, kind: int, rng: torch.Generator) -> Children:
    """Children of distributions: of four scores, or of any and fewer than ``width``, or -inf."""
    nats = torch.rand(rows, width, generator=rng) * (4.0 if kind else 4 / 256)
    if kind == 2:
        nats[torch.rand(rows, width, generator=rng) < 0.5] = torch.inf
    tokens, lack = (torch.randint(n, (rows, width), generator=rng) for n in (999, width))
    count = width - lack[:, 0] * bool(kind)
    return Children(tokens, nats, nats.sort(-1).values, count * 0, count * 0, count)


@pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("coupled", [False, True])
def test_one_program_a_level_grows_the_same_trees(coupled: bool) -> None:
    """And what passes read after each level, for two texts in one memory, also behind the end of a
    tree or of the cache. A node sees the text, those above and itself."""
    sizes = [(2, 8, 60), (10, 1, 4), (1, 8, 4), (10, 8, 60), (7, 3, None), (3, 5, 4), (5, 4, 23)]
    for trial, (width, depth, top_n) in enumerate(sizes):
        rng, slots = torch.Generator().manual_seed(trial), 100
        rule = TreeRule(width, width, coupled, top_n=top_n)
        usual, numbers = GrowingTree(rule, depth, CPU), torch.zeros(1, 3, dtype=torch.int64)
        program = TreeProgram(GrowingTree(rule, depth, CPU), numbers, slots, 1, 90)
        for goal, length in ((depth, 20), (max(1, depth - 1), 87)):
            numbers[:] = torch.tensor([length, length, goal])
            usual.begin(numbers[0, 2:], numbers[0, 2:])
            sees, first = [{*range(1, length)}], length
            for level in range(1, depth + 1):
                rows, given = usual.sizes[level - 1], width - (trial == 4)
                children = drawn_children(rows, given, trial % 3, rng)
                usual.add(codes_on_device(children), level, goal)
                program.add(children, level)
                read, above = program.read(level)
                assert all(map(torch.equal, (read.ids, above), usual.frontier(level)))
                own = [min(first + i, slots) for i in range(len(above))]
                at = [read.slots.tolist(), read.positions.tolist(), read.length.tolist()]
                end = min(own[-1] + 1, slots)
                assert at == [own, [min(length + level - 1, 89)] * len(own), [end]]
                sees = [sees[a] | {slot} for a, slot in zip(above.tolist(), own, strict=True)]
                seen = [{*row.nonzero()[:, 0].tolist()} for row in read.mask]
                assert seen == [each - {slots} for each in sees]
                first += len(own)
            ours, theirs = program.choose(depth).tolist(), usual.choose().tolist()
            assert grown_tree(ours, usual.sizes) == grown_tree(theirs, usual.sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("coupled", [False, True])
def test_a_program_for_each_request_grows_the_tree_that_one_grows(coupled: bool) -> None:
    """Of texts in extents of their own and of several depths, and none where there is no request:
    what passes read of each, and what is chosen."""
    slots, texts = 400, [(0, 20, 3), (100, 130, 4), (200, 201, 1)]  # extents, ends, depths
    for trial, (width, top_n) in enumerate([(2, 60), (8, 20), (5, None)]):
        rng, rule = torch.Generator().manual_seed(trial), TreeRule(width, width, coupled)
        rule = replace(rule, top_n=top_n)
        told = [[end, end - base, goal, 0, base + 1] for base, end, goal in texts]
        numbers = torch.tensor([*told, [slots, 0, 0, 0, slots]])
        several = TreeProgram(GrowingTree(rule, 4, CPU), numbers, slots, 1, 90, trees=4)
        single = [
            TreeProgram(GrowingTree(rule, 4, CPU), row[None], slots, 1, 90) for row in numbers
        ]
        for level in range(1, 5):
            rows, n = several.growing.sizes[level - 1 : level + 1]
            drawn = [drawn_children(rows, width, trial, rng) for _ in single]
            joined = [None if x[0] is None else torch.cat(x) for x in zip(*drawn, strict=True)]
            several.add(Children(*joined), level)
            read, above = several.read_together(level, groups=16)
            assert read.seats is not None
            seen, parts = seat_mask(read.seats, 4 * n, slots), list[tuple[torch.Tensor, ...]]()
            for tree, (program, children) in enumerate(zip(single, drawn, strict=True)):
                program.add(children, level)
                own, parents = program.read(level)
                here = slice(tree * n, (tree + 1) * n)
                parts.append((own.ids, own.positions, own.slots, parents + tree * rows))
                if tree == len(texts):
                    continue
                assert own.mask is not None
                mask = own.mask.clone()
                mask[:, : texts[tree][0] + 1] = False  # what it sees before its extent
                assert torch.equal(seen[here], mask)
            joined = [torch.cat(x) for x in zip(*parts, strict=True)]
            assert all(map(torch.equal, (read.ids, read.positions, read.slots, above), joined))
        sizes = several.growing.sizes
        for ours, program in zip(several.choose(4).tolist(), single, strict=True):
            assert grown_tree(ours, sizes) == grown_tree(program.choose(4).tolist(), sizes)

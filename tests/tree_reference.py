"""Draft trees, slowly: the papers' algorithms in plain Python, as a yardstick for the batched code.

EAGLE-2's expansion and reranking and HeteroSpec's strata are written from HeteroSpec (sections 2.2
and 4), the classifier's levels from C2T (section 4.2), the whole numbers from docs/simulator.md.
Nothing of the project is imported. A tree is a list of `Node`s; the root is the empty path and has
no node.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Path = tuple[int, ...]
Score = Literal["probability", "coupled"]

WEIGHT_ONE = 2**24


@dataclass
class Law:
    """What the draft says after a node: its best children, best first, and two entropies (codes of
    docs/simulator.md, 1/256 nat).

    Fewer children than the tree's width: there are no more.
    """

    tokens: list[int]
    logp: list[int]
    gap: list[int]
    entropy: int
    top_entropy: int


Draft = Callable[[Path], Law]
Confidence = Callable[[int, int, int], int]
Target = Callable[[Path], int]


@dataclass(frozen=True)
class Chain:
    score: Score = "probability"
    sharpness: float = 1.0


@dataclass(frozen=True)
class TopK:
    width: int
    score: Score = "probability"
    sharpness: float = 1.0


@dataclass(frozen=True)
class Classifier:
    """A node passes iff its confidence code is above `beta_code`. `confidence` gets (joint q code,
    entropy code, depth).
    """

    width: int
    cap: int
    beta_code: int
    confidence: Confidence
    score: Score = "probability"
    sharpness: float = 1.0


@dataclass(frozen=True)
class Static:
    """Paths of ranks from the root. Prefixes of a path belong to the tree whether listed or not.

    Its passes are those of the list, as deep and as wide, whether or not a law has that many
    children.
    """

    paths: tuple[Path, ...]


Growth = Chain | TopK | Classifier | Static


@dataclass(frozen=True)
class Stop:
    """Triggers where the code is above the limit: `max_prob` reads logp, `joint_prob` q_joint,
    `entropy` the law's entropy."""

    kind: Literal["max_prob", "joint_prob", "entropy"]
    limit: int
    keep_last: bool


@dataclass(frozen=True)
class Stratify:
    thresholds: tuple[int, ...]
    d_fit: int
    alpha: int
    fractions: tuple[float, ...]


@dataclass(eq=False)
class Node:
    path: Path
    """Tokens from the root, its own last."""
    ranks: Path
    """The rank of each of them among its siblings."""
    depth: int
    joint_cost: int
    logp: int
    q_joint: int
    entropy: int
    """Of the law it was drawn from."""
    parent: "Node | None"
    """None: the root."""
    creation: int
    """Position in the list of all nodes created, those a classifier refused and those of a dropped
    level included."""
    expanded: bool = False
    """The draft has read it."""
    law: Law | None = None
    """What the draft said after it, once expanded."""

    @property
    def token(self) -> int:
        return self.path[-1]


@dataclass
class Tree:
    candidates: list[Node]
    """In creation order; the nodes of the levels kept that verification may choose from."""
    kept: list[Node]
    """In creation order; those to be verified."""
    depth: int
    """Levels kept."""
    passes: int
    """Passes of the draft, those of levels that were not kept included."""
    widths: list[int]
    """Nodes read in each pass (of a static tree: the list's, there or not)."""
    ended: Literal["depth", "stop", "classifier", "static"]
    """What ended growth: the depth was reached; a stop; no node passed; the list has no longer
    path."""
    phi: int | None = None
    bin: int | None = None
    n: int | None = None
    """How many candidates were asked for; None: all."""
    goal: int = 0
    """The depth growth was allowed to reach: gamma, or more in a stratum's extension."""
    dropped: list[Node] = field(default_factory=list)
    """In creation order; the nodes of the level that a stop did not keep."""


def local_costs(law: Law, width: int, score: Score, sharpness: float) -> list[int]:
    """-log of each child's estimated acceptance, in 1/256 nat, for the first `width` children.

    Halves are rounded up: floor(x + 0.5). The softmax's weights are whole numbers, so that their
    sum does not depend on the order of addition.
    """
    if score == "probability":
        return list(law.logp[:width])
    weights = [
        max(1, math.floor(WEIGHT_ONE * math.exp(-sharpness * min(gap, 4095) / 256) + 0.5))
        for gap in law.gap[:width]
    ]
    total = (sum(weights) // 2**14 + 1) * 2**14  # up to 1 in 1,000 more: a table holds logarithms
    return [max(0, math.floor(256 * (math.log(total) - math.log(w)) + 0.5)) for w in weights]


def cheapest_first(nodes: Sequence[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: (node.joint_cost, node.creation))


def prefixes(paths: Sequence[Path]) -> set[Path]:
    """All rank paths a static tree consists of."""
    return {path[:length] for path in paths for length in range(1, len(path) + 1)}


def children_read(growth: Growth) -> int:
    """k: how many children of each law count."""
    if isinstance(growth, Chain):
        return 1
    if isinstance(growth, Static):
        return 1 + max((rank for path in growth.paths for rank in path), default=0)
    return growth.width


def stops(stop: Stop, level: Sequence[Node], growth: Growth) -> bool:
    """Reads the stop on the level's cheapest node, or on a static tree's first; a level without
    nodes triggers none."""
    if not level:
        return False
    node = level[0] if isinstance(growth, Static) else cheapest_first(level)[0]
    if stop.kind == "max_prob":
        return node.logp > stop.limit
    if stop.kind == "joint_prob":
        return node.q_joint > stop.limit
    return node.entropy > stop.limit


def stratum(stratify: Stratify, phi: int, gamma: int) -> int:
    return sum(phi * stratify.d_fit > threshold * gamma for threshold in stratify.thresholds)


@dataclass
class _Builder:
    """Grows one tree. `frontier` holds the nodes the next pass reads, None standing for the
    root."""

    draft: Draft
    growth: Growth
    stop: Stop | None
    listed: set[Path] = field(default_factory=set)
    root_law: Law | None = None
    frontier: list[Node | None] = field(default_factory=lambda: [None])
    read: list[Node | None] = field(default_factory=list)
    """The nodes the last pass read."""
    candidates: list[Node] = field(default_factory=list)
    dropped: list[Node] = field(default_factory=list)
    created: int = 0
    depth: int = 0
    widths: list[int] = field(default_factory=list)
    ended: Literal["depth", "stop", "classifier", "static"] = "depth"

    def law_after(self, node: Node | None) -> Law:
        law = self.root_law if node is None else node.law
        assert law is not None
        return law

    def read_frontier(self) -> None:
        """One pass of the draft over the frontier."""
        for node in self.frontier:
            if node is None:
                self.root_law = self.draft(())
            else:
                node.law = self.draft(node.path)
                node.expanded = True
        width = len(self.frontier)
        if isinstance(self.growth, Static) and self.depth:
            width = len({path[: self.depth] for path in self.listed if len(path) > self.depth})
        self.widths.append(width)
        self.read = self.frontier

    def children(self, parent: Node | None) -> list[Node]:
        law = self.law_after(parent)
        width = children_read(self.growth)
        if isinstance(self.growth, Static):
            costs = law.logp  # for show: no score is read
        else:
            costs = local_costs(law, width, self.growth.score, self.growth.sharpness)
        nodes = []
        for rank in range(min(width, len(law.tokens))):
            ranks = (parent.ranks if parent else ()) + (rank,)
            if isinstance(self.growth, Static) and ranks not in self.listed:
                continue
            nodes.append(
                Node(
                    path=(parent.path if parent else ()) + (law.tokens[rank],),
                    ranks=ranks,
                    depth=len(ranks),
                    joint_cost=(parent.joint_cost if parent else 0) + costs[rank],
                    logp=law.logp[rank],
                    q_joint=(parent.q_joint if parent else 0) + law.logp[rank],
                    entropy=law.entropy,
                    parent=parent,
                    creation=self.created,
                )
            )
            self.created += 1
        return nodes

    def next_frontier(self, level: list[Node]) -> list[Node]:
        """The nodes of a level that are to be expanded, in the order in which their children are
        created."""
        if isinstance(self.growth, Chain):
            return level
        if isinstance(self.growth, TopK):
            return cheapest_first(level)[: self.growth.width]
        if isinstance(self.growth, Classifier):
            confidence, growth = {}, self.growth
            for node in level:
                confidence[node] = growth.confidence(node.q_joint, node.entropy, node.depth)
            passed = [node for node in level if confidence[node] > growth.beta_code]
            return sorted(passed, key=lambda n: (-confidence[n], n.creation))[: growth.cap]
        longer = [path for path in self.listed if len(path) > level[0].depth] if level else []
        return [node for node in level if any(p[: node.depth] == node.ranks for p in longer)]

    def grow(self, goal: int) -> bool:
        """Builds levels until there are `goal` of them; False if growth ended before, or at the
        last."""
        while self.depth < goal:
            if isinstance(self.growth, Static) and not any(
                len(path) > self.depth for path in self.listed
            ):
                self.ended = "static"
                return False
            self.read_frontier()
            level = [child for parent in self.frontier for child in self.children(parent)]
            frontier = self.next_frontier(level)
            if isinstance(self.growth, Classifier):
                level = sorted(frontier, key=lambda node: node.creation)
                if not level:
                    self.ended = "classifier"
                    return False
            stopped = self.stop is not None and stops(self.stop, level, self.growth)
            if stopped and self.stop is not None and not self.stop.keep_last:
                self.ended, self.dropped = "stop", level
                return False
            self.candidates += level
            self.frontier = list(frontier)
            self.depth += 1
            if stopped:
                self.ended = "stop"
                return False
        return True

    def most_predictable(self) -> Node | None:
        """Of the nodes read last, the one whose best child has the highest q: HeteroSpec's
        candidate path, less one token."""
        width = children_read(self.growth)
        best = self.read[0]
        for node in self.read[1:]:
            if min(self.law_after(node).logp[:width]) < min(self.law_after(best).logp[:width]):
                best = node
        return best

    def top_entropies(self, node: Node | None) -> list[int]:
        """Of the laws on a node's path, the root's first, its own last."""
        own = self.law_after(node).top_entropy
        return [own] if node is None else [*self.top_entropies(node.parent), own]


def build(
    draft: Draft,
    growth: Growth,
    *,
    gamma: int,
    stop: Stop | None = None,
    stratify: Stratify | None = None,
    select_n: int | None = None,
    limit: int | None = None,
) -> Tree:
    """Grows at most `gamma` levels, or more where a stratum extends them (never beyond `limit`),
    and chooses what is verified."""
    assert limit is None or gamma <= limit
    builder = _Builder(draft, growth, stop)
    if isinstance(growth, Static):
        builder.listed = prefixes(growth.paths)
    goal, wanted = gamma, select_n
    phi: int | None = None
    number: int | None = None
    if builder.grow(gamma) and stratify is not None and builder.read:
        laws = builder.top_entropies(builder.most_predictable())
        assert len(laws) == gamma
        phi = sum(laws)
        number = stratum(stratify, phi, gamma)
        if number < len(stratify.fractions):
            delta = max(0, stratify.alpha - number)
            goal = gamma + delta if limit is None else min(gamma + delta, limit)
            if select_n is not None:
                wanted = max(1, math.floor(stratify.fractions[number] * select_n + 0.5)) + delta
            builder.grow(goal)
    kept = builder.candidates
    if wanted is not None and not isinstance(growth, Static):
        kept = sorted(cheapest_first(kept)[:wanted], key=lambda node: node.creation)
    return Tree(
        candidates=builder.candidates,
        kept=list(kept),
        depth=builder.depth,
        passes=len(builder.widths),
        widths=builder.widths,
        ended=builder.ended,
        phi=phi,
        bin=number,
        n=None if isinstance(growth, Static) else wanted,
        goal=goal,
        dropped=builder.dropped,
    )


def verify(kept: Sequence[Node], target: Target) -> tuple[list[Node], int]:
    """Goes down from the root while a child holds the target's own token: the nodes walked, and
    that token at the last."""
    accepted: list[Node] = []
    while True:
        here = accepted[-1] if accepted else None
        token = target(here.path if here else ())
        below = [node for node in kept if node.parent is here and node.token == token]
        assert len(below) <= 1
        if not below:
            return accepted, token
        accepted.append(below[0])


def reread(accepted: Sequence[Node], emitted: int) -> int:
    """How many of the emitted tokens the draft has yet to read at the next round."""
    return emitted - len([node for node in accepted if node.expanded])


def random_draft(
    rng: random.Random,
    vocab: int,
    width: int,
    tie_rate: float,
    greedy: bool = False,
    short_rate: float = 0.0,
) -> Draft:
    """A draft that answers every path by a law of `width` children, always the same one, whatever
    was asked before.

    With probability `tie_rate` a law's codes, and each single code of the others, are small (0, 1
    or 2), so that costs tie within laws and between paths. With probability `short_rate` a law has
    fewer children than `width`, as after top-p. `greedy`: the children come by q, so logp never
    falls and the gaps are its differences; else logp is arbitrary.
    """
    assert width <= vocab
    seed = rng.getrandbits(64)
    laws: dict[Path, Law] = {}

    def code(own: random.Random, small: bool, most: int) -> int:
        return own.randint(0, 2) if small or own.random() < tie_rate else own.randint(0, most)

    def draft(path: Path) -> Law:
        if path not in laws:
            own = random.Random(f"{seed} {path}")
            small = own.random() < tie_rate
            most = own.choice([4, 64, 1024, 65535])
            logp = [code(own, small, most) for _ in range(width)]
            if greedy:
                logp.sort()
                gap = [value - logp[0] for value in logp]
            else:
                gap = [0, *sorted(code(own, small, most) for _ in range(width - 1))]
            tokens = own.sample(range(vocab), width)
            count = own.randint(1, width) if own.random() < short_rate else width
            laws[path] = Law(
                tokens[:count],
                logp[:count],
                gap[:count],
                code(own, small, 2560),
                code(own, small, 589),
            )
        return laws[path]

    return draft


def random_target(rng: random.Random, draft: Draft, vocab: int, follow: float) -> Target:
    """A target that takes one of the draft's children with probability `follow`, most often the
    first, else any token."""
    seed = rng.getrandbits(64)

    def target(path: Path) -> int:
        own = random.Random(f"{seed} {path}")
        if own.random() >= follow:
            return own.randrange(vocab)
        tokens = draft(path).tokens
        return tokens[min(len(tokens) - 1, int(own.expovariate(1.0)))]

    return target


def check_by_hand() -> None:
    """EAGLE-2, width 2, two levels, every figure worked out on paper."""
    laws: dict[Path, Law] = {
        (): Law([5, 6], [4, 8], [0, 3], 10, 7),
        (5,): Law([1, 2], [4, 20], [0, 256], 11, 3),
        (6,): Law([3, 4], [0, 2], [0, 2], 12, 5),
    }
    tree = build(laws.__getitem__, TopK(2), gamma=2, select_n=4)
    assert [(node.path, node.joint_cost) for node in tree.candidates] == [
        ((5,), 4), ((6,), 8), ((5, 1), 8), ((5, 2), 24), ((6, 3), 8), ((6, 4), 10)
    ]  # fmt: skip
    assert [node.path for node in tree.kept] == [(5,), (6,), (5, 1), (6, 3)]
    assert (tree.widths, tree.depth, tree.ended) == ([1, 2], 2, "depth")
    strata = Stratify(thresholds=(6, 12, 13), d_fit=2, alpha=0, fractions=(0.3, 0.6, 0.5))
    tree = build(laws.__getitem__, TopK(2), gamma=2, select_n=5, stratify=strata)
    # The node (6,) has the surest child, and 12 > 12 is false; of three joint costs of 8 the
    # earliest two.
    assert (tree.phi, tree.bin, tree.n, tree.goal) == (12, 1, 3, 2)
    assert [node.path for node in tree.kept] == [(5,), (6,), (5, 1)]
    accepted, bonus = verify(tree.kept, {(): 5, (5,): 1, (5, 1): 9}.__getitem__)
    assert ([node.path for node in accepted], bonus) == ([(5,), (5, 1)], 9)
    assert reread(accepted, 3) == 2  # (5, 1), never read by the draft, and the bonus
    accepted, bonus = verify(tree.kept, {(): 6, (6,): 3}.__getitem__)  # 3 was drafted, not kept
    assert ([node.path for node in accepted], bonus, reread(accepted, 2)) == ([(6,)], 3, 1)
    strata = Stratify(thresholds=(99,), d_fit=1, alpha=1, fractions=(0.5,))
    for limit, depth in ((None, 2), (1, 1)):
        tree = build(laws.__getitem__, TopK(2), gamma=1, select_n=5, stratify=strata, limit=limit)
        assert (tree.phi, tree.bin, tree.n, tree.goal, tree.depth) == (7, 0, 4, depth, depth)
        assert tree.widths == [1, 2][:depth]
    # 1.5 rounds to 2, at least one remains
    for fraction, n in ((0.3, 2), (0.1, 1), (0.01, 1), (0.28, 1), (1.0, 5)):
        strata = Stratify(thresholds=(), d_fit=5, alpha=0, fractions=(fraction,))
        assert build(laws.__getitem__, TopK(2), gamma=1, select_n=5, stratify=strata).n == n
    # exp(-1) and 1 of a width of 2: -256 log(1/(1+e^-1)) = 80.2, and 256 more
    assert local_costs(laws[(5,)], 2, "coupled", 1.0) == [80, 336]
    assert local_costs(laws[(5,)], 1, "coupled", 1.0) == [0]
    # a stop without keep_last drops the level, not its pass, and what the pass read stays read
    for keep_last, depth in ((False, 1), (True, 2)):
        stop = Stop("entropy", 10, keep_last)
        tree = build(laws.__getitem__, TopK(2), gamma=2, stop=stop, stratify=strata)
        assert (tree.depth, tree.passes, tree.widths, tree.ended) == (depth, 2, [1, 2], "stop")
        assert all(node.expanded for node in tree.candidates if node.depth == 1)
        assert tree.phi is None

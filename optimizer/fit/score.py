"""How sharp the ``coupled`` score of nodes should be: one number, fitted so that the runtime's own
estimate is near the chance of a child.

The estimate of a child, given that its parent was accepted, is softmax(-sharpness * gap) over the k
children of a distribution (:func:`runtime.trees.grow.grow_level`); here it is that very ratio
of whole weights before its -log is rounded to 1/256 nat.

It is judged by binary log loss: of each child by itself, "is it the text's next token", over all
distributions, also those none of whose children is. Joint costs compare nodes of different branches
as -log of such chances, so it is these that have to be right; the multinomial loss given that one
child is taken would leave out just the distributions where a sure estimate is wrong, and come out
too sharp. The estimate itself knows no "none of them": its children share a whole 1, and what k
children miss has to be made up for by flatter weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from spectune.optimizer.fit.recorded_trees import RecordedTrees, TreeSource, child_probabilities
from spectune.optimizer.fit.shared import StoredFit, held_out
from spectune.runtime.policies.document import DEFAULT_TOP_N, TopKGrowth
from spectune.runtime.progress import Progress, silent
from spectune.runtime.trees.grow import GAP_CODES, gap_weights
from spectune.traces.errors import TraceError

FloatArray = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

SCORE: Final = "score"
"""The artifact's kind. No policy names one: its ``sharpness`` is written into ``growth``."""
STARTS: Final = 20000
"""Starts whose distributions a score is fitted to."""
DEFAULT: Final = TopKGrowth().sharpness
LEAST: Final = 0.25
MOST: Final = 8.0
"""Where a sharpness is looked for."""
GRID: Final = tuple(round(LEAST * (MOST / LEAST) ** (i / 40), 2) for i in range(41))
"""The points looked at, at equal ratios: eight to a doubling. Whole weights make the loss uneven in
the small, so no derivative leads to the least."""
HELD_OUT: Final = 0.2
"""Share of the groups (requests) that losses are reported on and nothing is fitted to."""
SURE: Final = 2.0**-24
"""Nothing is taken to be surer than this: the smallest weight of a gap."""


@dataclass(frozen=True, eq=False)
class ScoreExamples:
    """Distributions after n prefixes of texts. ``gap`` int64 [n, k] in 1/256 nat and ``q`` float64
    [n, k]: of their children, best first; ``count`` int64 [n]: how many exist; ``taken`` int64 [n]:
    the child that is the text's next token, -1 if none of them is; ``start`` int64 [n]: the
    position where the round began that reads the distribution."""

    gap: Index
    q: FloatArray
    count: Index
    taken: Index
    start: Index

    def __len__(self) -> int:
        return len(self.count)

    def take(self, which: npt.NDArray[Any]) -> ScoreExamples:
        """Those at some places (a mask or numbers)."""
        return ScoreExamples(*(column[which] for column in vars(self).values()))

    @property
    def exists(self) -> npt.NDArray[np.bool_]:
        """Which children exist, bool [n, k]."""
        return np.asarray(np.arange(self.gap.shape[1]) < self.count[:, None])

    @property
    def hit(self) -> npt.NDArray[np.bool_]:
        """Which child is the text's next token, bool [n, k]."""
        return np.asarray(np.arange(self.gap.shape[1]) == self.taken[:, None])


@dataclass(frozen=True)
class Score:
    """A fitted ``sharpness``. ``laws`` distributions were fitted to, ``held_out``
    others judged: ``loss`` there, in nats a child, by ``fitted``, ``default`` and ``probability``
    (q itself); ``covered``: the share of them that has a child taken; ``ranks``: :func:`_ranks`.
    ``curve``: (sharpness, loss) of :data:`GRID` on those fitted to. ``at_border``: a sharpness
    beyond those looked at might be better."""

    sharpness: float
    laws: int
    held_out: int
    covered: float
    loss: dict[str, float]
    ranks: list[dict[str, float]]
    curve: tuple[tuple[float, float], ...]
    at_border: bool


def fit_score(
    source: TreeSource,
    *,
    depth: int | None = None,
    width: int | None = None,
    starts: int = STARTS,
    seed: int = 0,
    progress: Progress = silent,
) -> StoredFit:
    """Calibrates the score for trees of ``width`` and stores the sharpness.

    A fifth of the requests is held out (of a single request, of its starts). ``width`` and
    ``depth`` are as recorded by default; a draft model's distributions do not depend on the depth.
    The document's ``sharpness`` goes into a policy's ``growth``; the recording covers such growths
    exactly only after ``record --resume --cover``. Raises TraceError when too little was recorded.
    """
    forest = source.trees.forest
    width, depth = width or forest.width, depth or forest.depth
    progress("distributions", 0, 1)
    examples = score_examples(source.trees, width, depth, count=starts, seed=seed)
    requests = np.searchsorted(source.trace.offsets, examples.start, side="right")
    groups = requests if len(np.unique(requests)) > 1 else examples.start
    try:
        score = fit_sharpness(examples, groups, seed=seed)
    except ValueError as error:
        raise TraceError(f"recording {source.info.id}: {error}") from None
    progress("distributions", 1, 1)
    fitted = asdict(score) | {"width": width, "depth": depth, "seed": seed}
    fitted["starts"] = len(np.unique(examples.start))
    growth = {"kind": "top_k", "width": width, "score": "coupled", "sharpness": score.sharpness}
    blocks: dict[str, Any] = {"growth": growth, "select": {"top_n": DEFAULT_TOP_N}}
    evidence = tuple(vars(examples).values())
    return source.keep(SCORE, fitted, {}, evidence, depth, lambda _: blocks)


def score_examples(
    trees: RecordedTrees, width: int, depth: int, *, count: int, seed: int = 0
) -> ScoreExamples:
    """The distributions whose parent is on the text, so that the child to be taken is known, of at
    most ``count`` starts: of a draft model one a start, since what it reads deeper is what later
    starts begin with; of a head those of ``depth`` levels, as far as the recorded children led
    along the text. Raises TraceError when too little was recorded."""
    trees.rules(width, depth)
    forest, starts = trees.forest, trees.pick(1, count, seed)
    node, begun = forest.root[starts], starts
    nodes, begins = [], []
    for level in range(1, 2 if forest.shared else depth + 1):
        alive = (node >= 0) & (trees.levels[begun] >= level)
        node, begun = node[alive], begun[alive]
        nodes.append(node)
        begins.append(begun)
        node = trees.along_text(node)
    at = np.concatenate(nodes)
    there = np.minimum(forest.count[at], width).astype(np.int64)
    slot = forest.text_slot[at].astype(np.int64)
    return ScoreExamples(
        gap=forest.gap[at, :width].astype(np.int64),
        q=child_probabilities(forest.logp[at], forest.count[at])[:, :width],
        count=there,
        taken=np.where(slot < there, slot, -1),
        start=np.concatenate(begins),
    )


def estimates(examples: ScoreExamples, sharpness: float) -> FloatArray:
    """The runtime's chance of each child given its parent, float64 [n, k]; 0 for children that do
    not exist."""
    weight, total, _ = _weights(examples, sharpness)
    return np.asarray(weight / np.maximum(total, 1)[:, None])


def coupled_loss(examples: ScoreExamples, sharpness: float) -> float:
    """Mean binary log loss of a child under a sharpness, in nats; distributions of fewer than two
    children count for nothing."""
    examples = examples.take(examples.count > 1)
    weight, total, logs = _weights(examples, sharpness)
    # Differences of whole numbers, so that a chance next to 1 keeps its distance from it.
    others = np.log(np.maximum(total[:, None] - weight, 1))
    losses = np.log(np.maximum(total, 1))[:, None] - np.where(examples.hit, logs, others)
    return float(losses[examples.exists].mean())


def probability_loss(examples: ScoreExamples) -> float:
    """The same of q itself."""
    examples = examples.take(examples.count > 1)
    q = np.clip(examples.q, SURE, 1.0 - SURE)
    return float(-np.log(np.where(examples.hit, q, 1.0 - q))[examples.exists].mean())


def fit_sharpness(examples: ScoreExamples, group: npt.NDArray[Any], *, seed: int = 0) -> Score:
    """The sharpness of :data:`GRID`, or the default one, with the least loss; of equal ones that
    nearest to the default.

    ``group`` [n]: examples of one group (a request) are fitted to or held out together,
    :data:`HELD_OUT` of the groups by ``seed``. Raises ValueError for fewer than two groups with two
    or more children, or where no child is the text's token.
    """
    useful = examples.count > 1
    examples, group = examples.take(useful), group[useful]
    if len(np.unique(group)) < 2:
        raise ValueError(
            "a score needs distributions of two or more children, of two groups or more; record "
            "more or longer texts"
        )
    apart = held_out(group, HELD_OUT, seed)
    fitted, held = examples.take(~apart), examples.take(apart)
    if not (fitted.taken >= 0).any():
        raise ValueError(
            f"none of the children of {len(fitted)} distributions is the text's token; record more "
            "texts, or more children"
        )
    losses = {s: coupled_loss(fitted, s) for s in {*GRID, DEFAULT}}
    # Losses that differ by rounding alone are equal.
    sharpness = min(losses, key=lambda s: (round(losses[s], 12), abs(s - DEFAULT), s))
    return Score(
        sharpness=sharpness,
        laws=len(fitted),
        held_out=len(held),
        covered=float((held.taken >= 0).mean()),
        loss={
            "fitted": coupled_loss(held, sharpness),
            "default": coupled_loss(held, DEFAULT),
            "probability": probability_loss(held),
        },
        ranks=_ranks(held, sharpness),
        curve=tuple((s, losses[s]) for s in GRID),
        at_border=sharpness in (LEAST, MOST),
    )


def _weights(examples: ScoreExamples, sharpness: float) -> tuple[Index, Index, FloatArray]:
    """Whole weights of the children [n, k], 0 where there is none, their sums [n], and logarithms
    [n, k]."""
    whole, logs = gap_weights(sharpness)
    gap = np.minimum(examples.gap, GAP_CODES - 1)
    weight = np.where(examples.exists, whole[gap], 0)
    return weight, weight.sum(1), logs[gap]


def _ranks(examples: ScoreExamples, sharpness: float) -> list[dict[str, float]]:
    """Acceptance of the children of each rank: how many there are (``laws``), the share
    ``observed``, and mean estimates by the fitted sharpness (``predicted``), the default one, and q
    (``probability``)."""
    columns = {
        "observed": examples.hit,
        "predicted": estimates(examples, sharpness),
        "default": estimates(examples, DEFAULT),
        "probability": examples.q,
    }
    found = []
    for rank in range(examples.gap.shape[1]):
        if (some := examples.count > rank).any():
            means = {name: float(x[some, rank].mean()) for name, x in columns.items()}
            found.append({"rank": rank, "laws": int(some.sum()), **means})
    return found

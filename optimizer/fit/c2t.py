"""C2T's classifier (section 4, appendix B): whether a drafted node will be accepted, from three
numbers about it.

The features of a node are its joint probability exp(-joint), the entropy of the distribution it
was drawn from, and its depth from 1 (section 4.1), the first two in nats by
:func:`runtime.policies.c2t.nats`, and, which the paper has not, -joint. The classifier is
Linear(4, hidden), ReLU, Linear(hidden, 1), sigmoid. Evaluating it, and the table of all codes that
trees are grown by, are the runtime's: :class:`runtime.policies.c2t.ClassifierWeights`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from spectune.optimizer.fit import perceptron
from spectune.optimizer.fit.recorded_trees import RecordedTrees, TreeSource
from spectune.optimizer.fit.shared import StoredFit
from spectune.runtime.policies.artifacts import CLASSIFIER
from spectune.runtime.policies.c2t import WEIGHTS, ClassifierWeights, nats
from spectune.runtime.policies.eagle2 import INFINITE
from spectune.runtime.progress import Progress, silent
from spectune.runtime.trees.grow import NONE, Growing, TreeRule
from spectune.traces.errors import TraceError

Index = npt.NDArray[np.int64]

STARTS: Final = 4000
"""Starts whose nodes a classifier is trained on; each has hundreds."""
CHUNK: Final = 512
"""Starts grown together."""
HIDDEN: Final = 48
"""Section B.3's default; 12 to 48 do as well."""
EPOCHS: Final = 10
BATCH: Final = 1024
STEPS: Final = 2000
"""Steps of training below which there are more epochs than the paper's, whose data is a thousand
times a recording's."""
MOST_EPOCHS: Final = 200


@dataclass(frozen=True, eq=False)
class Examples:
    """Nodes of drafted trees, [n] each: codes in 1/256 nat, ``depth`` from 1, ``accepted``, and the
    start of the ``tree`` that a node is of."""

    joint_code: npt.NDArray[np.int32]
    entropy_code: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.bool_]
    tree: Index

    def __len__(self) -> int:
        return len(self.depth)

    def take(self, rows: npt.NDArray[Any]) -> Examples:
        """These rows (numbers or a mask)."""
        return type(self)(*(column[rows] for column in vars(self).values()))

    def features(self) -> npt.NDArray[np.float64]:
        """Raw features float64 [n, 4]: joint probability, its logarithm, entropy in nats, depth."""
        log = -nats(self.joint_code)
        return np.stack([np.exp(log), log, nats(self.entropy_code), self.depth], axis=1)


def fit_c2t(
    source: TreeSource,
    *,
    depth: int | None = None,
    width: int | None = None,
    hidden: int = HIDDEN,
    epochs: int | None = None,
    starts: int = STARTS,
    seed: int = 0,
    progress: Progress = silent,
) -> StoredFit:
    """Trains and stores a classifier for trees of ``depth`` and ``width``, as recorded by default.

    ``epochs`` is by default the paper's number, more where that makes fewer than :data:`STEPS`
    steps. Raises TraceError when too little was recorded.
    """
    trees = source.trees
    width, depth = width or trees.forest.width, depth or trees.forest.depth
    examples = classifier_examples(trees, width, depth, count=starts, seed=seed, progress=progress)
    weights = train(examples, hidden=hidden, epochs=epochs, seed=seed)
    fitted = {
        "hidden": weights.hidden,
        "depth": depth,
        "width": width,
        "starts": len(np.unique(examples.tree)),
        "nodes": len(examples),
        "accepted": int(examples.accepted.sum()),
        "seed": seed,
    }
    growth = {"kind": "classifier", "width": width, "cap": width}
    return source.keep(
        CLASSIFIER,
        fitted,
        depth,
        lambda artifact: {"growth": {**growth, "artifact": artifact}},
        {name: getattr(weights, name) for name in WEIGHTS},
    )


def classifier_examples(
    trees: RecordedTrees,
    width: int,
    depth: int,
    *,
    count: int,
    seed: int = 0,
    progress: Progress = silent,
) -> Examples:
    """C2T's training data (section 4.2) of at most ``count`` starts: every node of their EAGLE-2
    trees, all children of expanded nodes, as far as the text goes on. A node is accepted if it lies
    on the text. Raises TraceError when too little was recorded."""
    starts = trees.pick(1, count, seed)
    parts: list[Examples] = []
    num_grown = 0
    for is_sampled, rule in enumerate(trees.rules(width, depth)):
        chosen = starts[trees.sampled[starts] == bool(is_sampled)]
        for at in range(0, len(chosen), CHUNK):
            some = chosen[at : at + CHUNK]
            parts += _grown(trees, rule, some, depth)
            num_grown += len(some)
            progress("trees", num_grown, len(starts))
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Examples(*(np.concatenate(column) for column in columns))


def _grown(trees: RecordedTrees, rule: TreeRule, starts: Index, depth: int) -> Iterable[Examples]:
    """The nodes of each level of the trees of some starts, as far as their texts go on."""
    growing, forest, k = Growing(rule, depth, len(starts)), trees.forest, rule.width
    grown = growing.trees
    front = forest.root[starts][:, None]
    on = forest.root[starts].copy()  # the node on the text, -1 once it is lost
    rows = np.arange(len(starts))
    for level in range(1, depth + 1):
        growing.add_from(forest.codes, front)
        begin, end = grown.size[0, level - 1 : level + 1]
        hit = (front == on[:, None]) & (on >= 0)[:, None]
        slot = forest.text_slot[np.maximum(on, 0)]
        goes_on = hit.any(1) & (slot < k)
        accepted = np.zeros((len(starts), end - begin), dtype=np.bool_)
        accepted[rows[goes_on], (hit.argmax(1) * k + slot)[goes_on]] = True
        in_text = (trees.levels[starts] >= level)[:, None]
        take = (grown.cost[:, begin:end] < INFINITE) & in_text
        yield Examples(
            grown.q_cost[:, begin:end][take].astype(np.int32),
            forest.entropy[front].repeat(k, 1)[take].astype(np.int32),
            np.full(take.sum(), level, np.int32),
            accepted[take],
            np.broadcast_to(starts[:, None], take.shape)[take],
        )
        on = np.where(goes_on, trees.along_text(np.maximum(on, 0)), -1)
        frontier = grown.frontier[0, level]
        above, rank = grown.above[:, level, :frontier], grown.rank[:, level, :frontier]
        parent = np.take_along_axis(front, above, 1)
        there = (grown.place[:, level, :frontier] != NONE) & (parent >= 0)
        front = np.where(there, forest.child[np.maximum(parent, 0), rank], -1).astype(np.int64)


def train(
    examples: Examples, *, hidden: int = HIDDEN, epochs: int | None = None, seed: int = 0
) -> ClassifierWeights:
    """Trains a classifier as appendix B.2, on all accepted nodes and as many rejected ones, drawn
    once without replacement: the paper does not say how many, and these call about a tenth of a
    tree positive at 0.5, as its candidate counts do. Raises TraceError where nothing is accepted or
    rejected."""
    accepted, rejected = np.flatnonzero(examples.accepted), np.flatnonzero(~examples.accepted)
    if not len(accepted) or not len(rejected):
        raise TraceError(
            f"nothing to tell apart: {len(accepted)} accepted and {len(rejected)} rejected nodes "
            "to train on; record more requests"
        )
    count = min(len(rejected), len(accepted))
    drawn = np.random.default_rng(seed).choice(rejected, count, replace=False)
    learning = examples.take(np.sort(np.concatenate([accepted, drawn])))
    steps = max(1.0, len(learning) / BATCH)
    w1, b1, w2, b2 = perceptron.train(
        learning.features(),
        learning.accepted,
        hidden=hidden,
        epochs=epochs or min(MOST_EPOCHS, max(EPOCHS, math.ceil(STEPS / steps))),
        batch=BATCH,
        seed=seed,
    )
    return ClassifierWeights(w1, b1, w2[0], b2)

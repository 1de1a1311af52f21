"""C2T's classifier (section 4, appendix B): whether a drafted node will be accepted, from three
numbers about it.

The features of a node are its joint probability exp(-joint / 16), the entropy in nats of the
distribution it was drawn from, entropy / 16, and its depth from 1 (section 4.1). The classifier is
Linear(3, hidden), ReLU, Linear(hidden, 1), sigmoid. Evaluating it, and the table of all codes that
trees are grown by, are the runtime's: :class:`runtime.policies.c2t.ClassifierWeights`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from spectune.optimizer.fit import perceptron
from spectune.optimizer.fit.perceptron import Weights
from spectune.optimizer.fit.recorded_trees import CHUNK, RecordedTrees, TreeSource, unusual
from spectune.optimizer.fit.shared import StoredFit, held_out, stored
from spectune.optimizer.simulate.forest import Forest
from spectune.runtime.policies.artifacts import CLASSIFIER
from spectune.runtime.policies.c2t import WEIGHTS, ClassifierWeights, read_weights
from spectune.runtime.policies.eagle2 import INFINITE
from spectune.runtime.progress import Progress, silent
from spectune.runtime.trees.grow import NONE, Growing, TreeRule
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import TREE_SCALE

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FEATURES: Final = ("probability", "entropy", "depth")
STARTS: Final = 4000
"""Starts whose nodes a classifier is trained on; each has hundreds."""
HIDDEN: Final = 48
"""Section B.3's default; 12 to 48 do as well."""
EPOCHS: Final = 10
BATCH: Final = 1024
STEPS: Final = 2000
"""Steps of training below which there are more epochs than the paper's, whose data is a thousand
times a recording's."""
MOST_EPOCHS: Final = 200
HELD_OUT: Final = 0.05
"""Share of the trees that figures are of."""
LEARNING_RATE: Final = 1e-3
"""Adam's default. Our text of appendix B.2 has lost the paper's number."""
FINE_TUNE_RATE: Final = 1e-4
"""A tenth of that. Lost from appendix B.4 as well."""
NEGATIVES: Final = 1.0
"""Rejected nodes trained on for each accepted one. Appendix B.2 samples negatives without saying
how many; as many as positives calls about a tenth of a tree positive at 0.5, as the paper's
candidate counts do."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Nodes of drafted trees, [n] each: codes in 1/16 nat, ``depth`` from 1, ``accepted``, and the
    ``tree`` that a node is of, whose nodes are trained on or held out together."""

    joint_code: npt.NDArray[np.int32]
    entropy_code: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    accepted: Flags
    tree: Index

    def __len__(self) -> int:
        return len(self.depth)

    def take(self, rows: npt.NDArray[Any]) -> Examples:
        """These rows (numbers or a mask)."""
        return Examples(*(column[rows] for column in vars(self).values()))

    def features(self, mask: Flags) -> torch.Tensor:
        """Raw features float64 [n, 3]; those outside of the ``mask`` are 0."""
        columns = (
            np.exp(self.joint_code / -TREE_SCALE),
            self.entropy_code / TREE_SCALE,
            self.depth.astype(np.float64),
        )
        return torch.from_numpy(np.stack(columns, axis=1) * mask)


@dataclass(frozen=True, eq=False)
class Classifier(ClassifierWeights):
    """Weights on raw features in the order of :data:`FEATURES`; a feature that was left out has
    zero weights.

    ``metrics``, JSON-ready: ``recall`` and ``positive_rate`` on the held-out trees, ``curve`` (both
    and the training loss by epoch, 0 being before training), and what it was trained with.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)

    def to_document(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(JSON-ready document, arrays) for an artifact, whose weights :func:`read_weights`
        reads."""
        document = {
            "hidden": self.hidden,
            "features": list(FEATURES),
            "metrics": dict(self.metrics),
        }
        return document, {name: getattr(self, name) for name in WEIGHTS}


def fit_c2t(
    source: TreeSource,
    *,
    depth: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    features: Sequence[str] = (),
    epochs: int | None = None,
    carried: str | None = None,
    fraction: float = 0.1,
    starts: int = STARTS,
    seed: int = 0,
    progress: Progress = silent,
) -> StoredFit:
    """Trains and stores a classifier for trees of ``depth`` and ``width``, as recorded by default.

    ``carried`` names a classifier, of any draft, that is fine-tuned on ``fraction`` of the trees
    instead (appendix B.4); it keeps its size and its features. ``epochs`` is by default the paper's
    number, more where that makes fewer than :data:`STEPS` steps. Raises TraceError when too little
    was recorded, PolicyError for something else than a classifier to carry over.
    """
    first = None if carried is None else _carried(source, carried)
    if first is not None and (hidden is not None or features):
        raise PolicyError(
            "--from goes on with a classifier as it is: leave --hidden and --features out"
        )
    forest = source.trees.forest
    width, depth = width or forest.width, depth or forest.depth
    examples = classifier_examples(
        source.trees, width, depth, count=starts, seed=seed, progress=progress
    )
    nodes = (1 + NEGATIVES) * int(examples.accepted.sum()) * (1.0 if first is None else fraction)
    enough = min(MOST_EPOCHS, max(EPOCHS, math.ceil(STEPS / max(1.0, nodes / BATCH))))
    steps: dict[str, Any] = {
        "seed": seed,
        "epochs": enough if epochs is None else epochs,
        "progress": progress,
    }
    try:
        if first is None:
            made = train(
                examples, hidden=hidden or HIDDEN, features=tuple(features) or FEATURES, **steps
            )
        else:
            made = fine_tune(first[1], examples, fraction, **steps)
    except ValueError as error:
        raise TraceError(f"recording {source.info.id}: {error}") from None
    described, arrays = made.to_document()
    document = source.document() | described | {
        "depth": depth,
        "width": width,
        "starts": len(np.unique(examples.tree)),
        "nodes": len(examples),
        "accepted": int(examples.accepted.sum()),
        "seed": seed,
    }  # fmt: skip
    document |= {} if first is None else {"from": first[0], "fraction": fraction}
    artifact = source.keep(CLASSIFIER, document, arrays, tuple(vars(examples).values()))
    growth = {
        "kind": "classifier",
        "artifact": artifact,
        "width": width,
        "cap": width,
        **unusual(source),
    }
    policy = {"draft": forest.draft, "window": {"kind": "fixed", "gamma": depth}, "growth": growth}
    return StoredFit(artifact, CLASSIFIER, document, policy)


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
    on the text; ``tree`` is its start. Raises TraceError when too little was recorded."""
    starts = trees.pick(1, count, seed)
    parts: list[tuple[npt.NDArray[Any], ...]] = []
    done = 0
    for is_sampled, rule in enumerate(trees.rules(width, depth)):
        chosen = starts[trees.sampled[starts] == bool(is_sampled)]
        for at in range(0, len(chosen), CHUNK):
            some = chosen[at : at + CHUNK]
            for level, exists, joint, entropy, accepted in _grown(trees.forest, rule, some, depth):
                take = exists & (trees.levels[some] >= level)[:, None]
                tree = np.broadcast_to(some[:, None], take.shape)[take]
                parts.append(
                    (joint[take], entropy[take], np.full(len(tree), level), accepted[take], tree)
                )
            done += len(some)
            progress("trees", done, len(starts))
    joint, entropy, levels, accepted, tree = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    return Examples(
        joint.astype(np.int32), entropy.astype(np.int32), levels.astype(np.int32), accepted, tree
    )


def _grown(
    forest: Forest, rule: TreeRule, starts: Index, depth: int
) -> Iterator[tuple[int, Flags, Index, Index, Flags]]:
    """Of each level and its places, arrays [starts, places]: (level, exists, -log of the product of
    q, entropy of the distribution it was drawn from, is on the text); codes in 1/16 nat."""
    growing, codes, k = Growing(rule, depth, len(starts)), forest.codes, rule.width
    trees = growing.trees
    front = forest.root[starts][:, None]
    on = forest.root[starts].copy()  # the node on the text, -1 once it is lost
    rows = np.arange(len(starts))
    for level in range(1, depth + 1):
        growing.add_from(codes, front)
        begin, end = trees.size[0, level - 1 : level + 1]
        exists = trees.cost[:, begin:end] < INFINITE
        hit = (front == on[:, None]) & (on >= 0)[:, None]
        slot = forest.text_slot[np.maximum(on, 0)]
        found = hit.any(1) & (slot < k)
        accepted = np.zeros(exists.shape, dtype=np.bool_)
        accepted[rows[found], (hit.argmax(1) * k + slot)[found]] = True
        entropy = forest.entropy[front].repeat(k, 1).astype(np.int64)
        yield level, exists, trees.q_cost[:, begin:end], entropy, accepted & exists
        on = np.where(
            found, forest.child[np.maximum(on, 0), np.minimum(slot, forest.width - 1)], -1
        ).astype(np.int64)
        frontier = trees.frontier[0, level]
        above, rank = trees.above[:, level, :frontier], trees.rank[:, level, :frontier]
        parent = np.take_along_axis(front, above, 1)
        there = (trees.place[:, level, :frontier] != NONE) & (parent >= 0)
        front = np.where(there, forest.child[np.maximum(parent, 0), rank], -1).astype(np.int64)


def evaluate(classifier: ClassifierWeights, examples: Examples) -> dict[str, float | None]:
    """Appendix B.2's figures over all examples: ``recall``, the share of accepted nodes with a
    confidence above 0.5 (None where none was accepted), and ``positive_rate``, the share of all
    nodes with one."""
    chosen = classifier.confidence(examples.joint_code, examples.entropy_code, examples.depth) > 0.5
    accepted = examples.accepted
    recall = float(chosen[accepted].mean()) if accepted.any() else None
    return {"recall": recall, "positive_rate": float(chosen.mean())}


def train(
    examples: Examples,
    *,
    hidden: int = HIDDEN,
    features: Sequence[str] = FEATURES,
    seed: int = 0,
    **steps: Any,
) -> Classifier:
    """Trains a classifier as appendix B.2, on ``features`` (table 1's ablation).

    :data:`HELD_OUT` of the trees are kept for evaluation, as they are; of the others all accepted
    nodes and :data:`NEGATIVES` times as many rejected ones, drawn once without replacement, are
    trained on. ``steps`` are of :func:`_descend`. The same seed gives the same classifier on the
    same machine. Raises ValueError where there are fewer than two trees, or nothing accepted or
    rejected among those trained on.
    """
    mask = np.array([name in features for name in FEATURES])
    held = held_out(examples.tree, HELD_OUT, seed)
    chosen = _balanced(examples.take(~held), seed)
    generator = torch.Generator().manual_seed(seed)
    standard = perceptron.initial(len(FEATURES), hidden, 1, generator)
    used = standard._replace(w1=standard.w1 * torch.from_numpy(mask))
    start = used.on_raw(perceptron.Scale.of(chosen.features(mask)))
    made = {"seed": seed, "fine_tuned": False}
    return _descend(start, chosen, examples.take(held), mask, generator, made, **steps)


def fine_tune(
    classifier: ClassifierWeights,
    examples: Examples,
    fraction: float = 0.1,
    *,
    seed: int = 0,
    **steps: Any,
) -> Classifier:
    """Goes on training with other examples (appendix B.4): ``fraction`` of their trees, none of
    them held out; 0 leaves the classifier as it is and only scores it, on all of them (transfer
    without training, table 2).

    Everything else as in :func:`train`; a feature the classifier was trained without stays out. The
    curve's epoch 0 is the classifier as it came. Raises ValueError as :func:`train` does.
    """
    mask = (classifier.w1 != 0).any(axis=0)
    made = {"seed": seed, "fine_tuned": fraction > 0, "fraction": fraction}
    if fraction == 0:
        curve = [{"epoch": 0, "loss": None, **evaluate(classifier, examples)}]
        metrics = _metrics(
            curve, examples.take(np.zeros(len(examples), np.bool_)), examples, mask
        ) | {"epochs": 0, **made}
        return Classifier(classifier.w1, classifier.b1, classifier.w2, classifier.b2, metrics)
    held = held_out(examples.tree, HELD_OUT, seed)
    learning = examples.take(~held)
    trees = np.unique(learning.tree)
    count = min(len(trees), max(1, round(fraction * len(np.unique(examples.tree)))))
    learning = learning.take(
        np.isin(learning.tree, np.random.default_rng(seed).permutation(trees)[:count])
    )
    stored = classifier.w1, classifier.b1, classifier.w2[None], classifier.b2
    start = Weights(*(torch.from_numpy(w) for w in stored))
    generator = torch.Generator().manual_seed(seed)
    chosen, steps = _balanced(learning, seed), {"learning_rate": FINE_TUNE_RATE, **steps}
    return _descend(start, chosen, examples.take(held), mask, generator, made, **steps)


def _metrics(
    curve: Sequence[Mapping[str, Any]], used: Examples, held: Examples, mask: Flags
) -> dict[str, Any]:
    """What is said of any classifier: its figures after the last epoch, of the examples trained on
    and held out."""
    positives = int(used.accepted.sum())
    return {
        "recall": curve[-1]["recall"],
        "positive_rate": curve[-1]["positive_rate"],
        "curve": list(curve),
        "positives": positives,
        "negatives": len(used) - positives,
        "held_out": len(held),
        "held_out_accepted": int(held.accepted.sum()),
        "features": [name for name, is_used in zip(FEATURES, mask, strict=True) if is_used],
        "negatives_per_positive": NEGATIVES,
    }


def _balanced(examples: Examples, seed: int) -> Examples:
    """All accepted nodes, and :data:`NEGATIVES` times as many rejected ones at random, as far as
    there are."""
    positive, negative = np.flatnonzero(examples.accepted), np.flatnonzero(~examples.accepted)
    if not len(positive) or not len(negative):
        raise ValueError(
            f"nothing to tell apart: {len(positive)} accepted and {len(negative)} rejected nodes "
            "to train on"
        )
    count = min(len(negative), max(1, round(NEGATIVES * len(positive))))
    drawn = np.random.default_rng(seed).choice(negative, count, replace=False)
    return examples.take(np.sort(np.concatenate([positive, drawn])))


def _descend(
    start: Weights,
    examples: Examples,
    held: Examples,
    mask: Flags,
    generator: torch.Generator,
    made: Mapping[str, Any],
    *,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    learning_rate: float = LEARNING_RATE,
    progress: Progress = silent,
) -> Classifier:
    """Adam from ``start`` on the features in the ``mask``; ``made`` is what the metrics say beside
    the figures."""

    def classifier(weights: Weights, metrics: Mapping[str, Any] | None = None) -> Classifier:
        w1, b1, w2, b2 = (w.numpy() for w in weights)
        return Classifier(np.where(mask, w1, np.float32(0)), b1, w2[0], b2, metrics or {})

    curve: list[dict[str, Any]] = [{"epoch": 0, "loss": None, **evaluate(classifier(start), held)}]

    def after(epoch: int, loss: float, weights: Weights) -> None:
        curve.append({"epoch": epoch, "loss": loss, **evaluate(classifier(weights), held)})
        progress("epochs", epoch, epochs)

    x, y = examples.features(mask), torch.from_numpy(examples.accepted)[:, None]
    steps: dict[str, Any] = {"epochs": epochs, "batch": batch, "learning_rate": learning_rate}
    last = perceptron.train(start, x, y, generator=generator, after=after, **steps)
    return classifier(last, {**_metrics(curve, examples, held, mask), **steps, **made})


def _carried(source: TreeSource, name: str) -> tuple[str, ClassifierWeights]:
    """(id, weights) of a stored classifier. Raises PolicyError for anything else."""
    found = stored(source.store, "--from", name, CLASSIFIER)
    try:
        return found.id, read_weights(found.arrays)
    except ValueError as error:
        raise PolicyError(f"--from {name}: artifact {found.id}: {error}") from None

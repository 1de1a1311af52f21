"""C2T's classifier: whether a drafted node will be accepted, from three numbers about it.

The features of a node are its joint probability exp(-joint / 16), the entropy in nats of the law it was drawn from, entropy /
16, and its depth from 1 (section 4.1). The classifier is Linear(3, hidden), ReLU, Linear(hidden, 1), sigmoid. Training sees the
features standardised; the stored weights have that folded in and act on the raw features.

Evaluating it, and the table of all codes that trees are grown by, are the runtime's: :class:`runtime.policies.c2t.ClassifierWeights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from runtime.policies.c2t import ClassifierWeights, FloatArray, read_weights
from traces.schema import TREE_SCALE

IntArray = npt.NDArray[np.int64]

FEATURES: Final = ("probability", "entropy", "depth")
HIDDEN: Final = 48
"""Section B.3's default; 12 to 48 do as well."""
EPOCHS: Final = 10
BATCH: Final = 1024
HELD_OUT: Final = 0.05
LEARNING_RATE: Final = 1e-3
"""Adam's default. Our text of appendix B.2 has lost the paper's number."""
FINE_TUNE_RATE: Final = 1e-4
"""A tenth of that. Lost from appendix B.4 as well."""
NEGATIVES: Final = 1.0
"""Rejected nodes trained on for each accepted one. Appendix B.2 samples negatives without saying how many; as many as positives
calls about a tenth of a tree positive at 0.5, as the paper's candidate counts do."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Nodes of drafted trees, [n] each: codes in 1/16 nat, ``depth`` from 1, ``accepted``, and the ``tree`` that a node is of
    (any whole numbers), whose nodes a split keeps together.

    Raises ValueError for arrays that are empty, of different lengths or out of range.
    """

    joint_code: npt.NDArray[np.int32]
    entropy_code: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.bool_]
    tree: IntArray

    def __post_init__(self) -> None:
        names = ("joint_code", "entropy_code", "depth", "accepted", "tree")
        shapes = {name: getattr(self, name).shape for name in names}
        if len(set(shapes.values())) > 1 or self.depth.ndim != 1:
            raise ValueError(f"examples differ in length: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
        if not len(self):
            raise ValueError("there are no examples")
        if (self.depth < 1).any() or (self.joint_code < 0).any() or (self.entropy_code < 0).any():
            raise ValueError("examples: depth counts from 1, and codes cannot be negative")

    def __len__(self) -> int:
        return len(self.depth)

    def take(self, rows: npt.NDArray[Any]) -> Examples:
        """These rows (indices or a mask)."""
        return Examples(self.joint_code[rows], self.entropy_code[rows], self.depth[rows], self.accepted[rows], self.tree[rows])


@dataclass(frozen=True, eq=False)
class Classifier(ClassifierWeights):
    """Weights on raw features in the order of :data:`FEATURES`; a feature that was left out has zero weights.

    ``metrics``, JSON-ready: ``recall`` and ``positive_rate`` on the held-out trees, ``curve`` (both and the training loss by
    epoch, 0 being before training), and what it was trained with.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)

    def to_document(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(JSON-ready document, arrays) for an artifact; :meth:`from_document` reads them."""
        document = {"hidden": self.hidden, "features": list(FEATURES), "metrics": dict(self.metrics)}
        return document, {"w1": self.w1, "b1": self.b1, "w2": self.w2, "b2": self.b2}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Classifier:
        """The classifier of :meth:`to_document`. Raises ValueError for anything else."""
        weights = read_weights(arrays)
        if list(document.get("features", [])) != list(FEATURES):
            raise ValueError(f"not a classifier: it lacks the features {', '.join(FEATURES)}")
        return cls(weights.w1, weights.b1, weights.w2, weights.b2, dict(document.get("metrics", {})))


def evaluate(classifier: Classifier, examples: Examples, *, threshold: float = 0.5) -> dict[str, float | None]:
    """Appendix B.2's figures over all examples: ``recall``, the share of accepted nodes with a confidence above the threshold
    (None where none was accepted), and ``positive_rate``, the share of all nodes with one."""
    chosen = classifier.confidence(examples.joint_code, examples.entropy_code, examples.depth) > threshold
    accepted = examples.accepted
    recall = float(chosen[accepted].mean()) if accepted.any() else None
    return {"recall": recall, "positive_rate": float(chosen.mean())}


def train(
    examples: Examples,
    *,
    hidden: int = HIDDEN,
    features: Sequence[str] = FEATURES,
    seed: int = 0,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    learning_rate: float = LEARNING_RATE,
    negatives: float = NEGATIVES,
    held_out: float = HELD_OUT,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Classifier:
    """Trains a classifier as appendix B.2: Adam on the binary cross-entropy, ``batch`` examples a step.

    ``held_out`` of the trees (at least one) are kept for evaluation, as they are; of the others all accepted nodes and
    ``negatives`` times as many rejected ones, drawn once without replacement, are trained on. ``features``: those to use
    (table 1's ablation). Features are standardised with the mean and deviation of what is trained on. The same seed gives the
    same classifier on the same machine. ``progress`` is called with (epochs done, of how many).

    Raises ValueError where there are fewer than two trees, or nothing accepted or rejected among those trained on.
    """
    if not 2 <= hidden <= HIDDEN:
        raise ValueError(f"hidden must be within 2..{HIDDEN}, not {hidden}")
    unknown = set(features) - set(FEATURES)
    if unknown or not features:
        raise ValueError(f"features must be among {', '.join(FEATURES)}, not {', '.join(sorted(unknown)) or 'none'}")
    rng = np.random.default_rng(seed)
    learning, held = _split(examples, rng, held_out)
    # torch's own initialisation of a linear layer: uniform within 1 / sqrt(inputs)
    bound1, bound2 = 1 / np.sqrt(3), 1 / np.sqrt(hidden)
    start = Classifier(
        rng.uniform(-bound1, bound1, (hidden, 3)).astype(np.float32),
        rng.uniform(-bound1, bound1, hidden).astype(np.float32),
        rng.uniform(-bound2, bound2, hidden).astype(np.float32),
        rng.uniform(-bound2, bound2, 1).astype(np.float32),
    )
    mask = np.array([name in features for name in FEATURES])
    chosen = _sample(learning, rng, negatives)
    mean, deviation = _standard(chosen)
    # drawn for standardised features; as raw weights this is the same start
    w1 = np.where(mask, start.w1, 0.0) / deviation
    start = Classifier(w1.astype(np.float32), (start.b1 - w1 @ mean).astype(np.float32), start.w2, start.b2)
    trained = _descend(start, chosen, held, mask, rng, epochs=epochs, batch=batch, learning_rate=learning_rate, progress=progress)
    made = {
        "features": [n for n in FEATURES if n in features],
        "seed": seed,
        "fine_tuned": False,
        "negatives_per_positive": negatives,
    }
    return Classifier(trained.w1, trained.b1, trained.w2, trained.b2, {**trained.metrics, **made})


def fine_tune(
    classifier: Classifier,
    examples: Examples,
    fraction: float = 0.1,
    *,
    seed: int = 0,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    learning_rate: float = FINE_TUNE_RATE,
    negatives: float = NEGATIVES,
    held_out: float = HELD_OUT,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Classifier:
    """Goes on training with other examples (appendix B.4): ``fraction`` of their trees, none of them held out; 0 leaves the classifier
    as it is and only scores it, on all of them (transfer without training, table 2).

    Everything else as in :func:`train`; a feature the classifier was trained without stays out. The curve's epoch 0 is the
    classifier as it came. Raises ValueError as :func:`train` does.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be from 0 to 1, not {fraction}")
    mask = (classifier.w1 != 0).any(axis=0)
    used = [n for n, kept in zip(FEATURES, mask, strict=True) if kept]
    made = {"features": used, "seed": seed, "fine_tuned": fraction > 0, "negatives_per_positive": negatives, "fraction": fraction}
    if fraction == 0:
        scores = evaluate(classifier, examples)
        figures = {**scores, "curve": [{"epoch": 0, "loss": None, **scores}], "positives": 0, "negatives": 0, "epochs": 0}
        held_too = {"held_out": len(examples), "held_out_accepted": int(examples.accepted.sum())}
        return Classifier(classifier.w1, classifier.b1, classifier.w2, classifier.b2, {**figures, **held_too, **made})
    rng = np.random.default_rng(seed)
    learning, held = _split(examples, rng, held_out)
    trees = np.unique(learning.tree)
    count = min(len(trees), max(1, round(fraction * (len(trees) + len(np.unique(held.tree))))))
    learning = learning.take(np.isin(learning.tree, rng.permutation(trees)[:count]))
    chosen = _sample(learning, rng, negatives)
    tuned = _descend(
        classifier, chosen, held, mask, rng, epochs=epochs, batch=batch, learning_rate=learning_rate, progress=progress
    )
    return Classifier(tuned.w1, tuned.b1, tuned.w2, tuned.b2, {**tuned.metrics, **made})


def _split(examples: Examples, rng: np.random.Generator, held_out: float) -> tuple[Examples, Examples]:
    """(to learn from, held out), by whole trees."""
    trees = np.unique(examples.tree)
    if len(trees) < 2:
        raise ValueError("examples must come from at least two trees: one is held out")
    count = min(len(trees) - 1, max(1, round(held_out * len(trees))))
    held = np.isin(examples.tree, rng.permutation(trees)[:count])
    return examples.take(~held), examples.take(held)


def _sample(examples: Examples, rng: np.random.Generator, negatives: float) -> Examples:
    """All accepted nodes, and ``negatives`` times as many rejected ones at random, as far as there are."""
    positive, negative = np.flatnonzero(examples.accepted), np.flatnonzero(~examples.accepted)
    if not len(positive) or not len(negative):
        raise ValueError(f"nothing to tell apart: {len(positive)} accepted and {len(negative)} rejected nodes to train on")
    if not negatives > 0:
        raise ValueError(f"negatives (rejected nodes for each accepted one) must be above 0, not {negatives}")
    count = min(len(negative), max(1, round(negatives * len(positive))))
    return examples.take(np.sort(np.concatenate([positive, rng.choice(negative, count, replace=False)])))


def _raw(examples: Examples) -> FloatArray:
    """Features [n, 3] as the stored weights read them."""
    return np.stack(
        [np.exp(examples.joint_code / -TREE_SCALE), examples.entropy_code / TREE_SCALE, examples.depth.astype(np.float64)], axis=1
    )


def _standard(examples: Examples) -> tuple[FloatArray, FloatArray]:
    """Mean and deviation [3] of the features; 1 for the deviation of a feature that does not vary."""
    raw = _raw(examples)
    deviation = raw.std(axis=0)
    return raw.mean(axis=0), np.where(deviation > 1e-9, deviation, 1.0)


def _descend(
    start: Classifier,
    examples: Examples,
    held: Examples,
    mask: npt.NDArray[np.bool_],
    rng: np.random.Generator,
    *,
    epochs: int,
    batch: int,
    learning_rate: float,
    progress: Callable[[int, int], None],
) -> Classifier:
    """Adam from ``start``, on features standardised by the examples' own figures, unfolded before and folded after."""
    import torch

    if epochs < 0 or batch < 1:
        raise ValueError(f"epochs must be at least 0 and batch at least 1, not {epochs} and {batch}")
    mean, deviation = _standard(examples)
    x = torch.from_numpy(((_raw(examples) - mean) / deviation * mask).astype(np.float32))
    y = torch.from_numpy(examples.accepted.astype(np.float32))
    w1_raw = start.w1.astype(np.float64)
    first = (w1_raw * deviation, start.b1 + w1_raw @ mean, start.w2, start.b2)
    w1, b1, w2, b2 = (torch.tensor(np.asarray(w, dtype=np.float32), requires_grad=True) for w in first)
    adam = torch.optim.Adam([w1, b1, w2, b2], lr=learning_rate)

    def folded() -> Classifier:
        inner = [w.detach().numpy().astype(np.float64) for w in (w1, b1, w2, b2)]
        outer = np.where(mask, inner[0] / deviation, 0.0)
        weights = (outer, inner[1] - outer @ mean, inner[2], inner[3])
        first, second, third, fourth = (w.astype(np.float32) for w in weights)
        return Classifier(first, second, third, fourth)

    curve: list[dict[str, Any]] = [{"epoch": 0, "loss": None, **evaluate(start, held)}]
    for epoch in range(1, epochs + 1):
        order, loss_sum = torch.from_numpy(rng.permutation(len(x))), 0.0
        for rows in torch.split(order, batch):
            z = torch.relu(x[rows] @ w1.T + b1) @ w2 + b2
            loss = torch.nn.functional.binary_cross_entropy_with_logits(z, y[rows])
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            loss_sum += loss.item() * len(rows)
        curve.append({"epoch": epoch, "loss": loss_sum / len(x), **evaluate(folded(), held)})
        progress(epoch, epochs)
    last = folded() if epochs else start
    positives = int(examples.accepted.sum())
    metrics = {
        "recall": curve[-1]["recall"],
        "positive_rate": curve[-1]["positive_rate"],
        "curve": curve,
        "positives": positives,
        "negatives": len(examples) - positives,
        "held_out": len(held),
        "held_out_accepted": int(held.accepted.sum()),
        "epochs": epochs,
        "batch": batch,
        "learning_rate": learning_rate,
    }
    return Classifier(last.w1, last.b1, last.w2, last.b2, metrics)

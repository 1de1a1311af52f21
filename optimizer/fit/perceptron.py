"""A network of one hidden layer, trained by Adam on the binary cross-entropy of its outputs: C2T's
classifier and DynaSpec's router."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

FloatArray = npt.NDArray[np.float32]


def train(
    x: npt.NDArray[Any],
    y: npt.NDArray[np.bool_],
    *,
    hidden: int,
    epochs: int,
    batch: int,
    seed: int,
) -> tuple[FloatArray, ...]:
    """Returns (w1 [hidden, d], b1 [hidden], w2 [outputs, hidden], b2 [outputs]), float32, of
    sigmoid(w2 . relu(w1 x + b1) + b2), trained on inputs ``x`` [n, d] with labels ``y`` [n] or [n,
    outputs].

    Inputs are standardised while training; the weights are for raw ones. The same seed gives the
    same weights on the same machine.
    """
    scaler = StandardScaler()
    model = MLPClassifier(
        (hidden,),
        alpha=0.0,
        batch_size=min(batch, len(x)),
        max_iter=epochs,
        n_iter_no_change=epochs,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # so many epochs are meant
        model.fit(scaler.fit_transform(x), y)
    return _weights(scaler, model)


def train_in_parts(
    parts: Iterable[tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]],
    *,
    hidden: int,
    epochs: int,
    batch: int,
    seed: int,
) -> tuple[FloatArray, ...] | None:
    """:func:`train` on examples that come in parts, each of which is gone through ``epochs`` times
    before the next; inputs are standardised by the first. None where no part comes."""
    scaler = StandardScaler()
    model = MLPClassifier((hidden,), alpha=0.0, random_state=seed)
    for number, (x, y) in enumerate(parts):
        if not number:
            scaler.fit(x)
        model.set_params(batch_size=min(batch, len(x)))
        for _ in range(epochs):
            model.partial_fit(scaler.transform(x), y, classes=np.arange(y.shape[1]))
    return _weights(scaler, model) if hasattr(model, "coefs_") else None


def _weights(scaler: StandardScaler, model: MLPClassifier) -> tuple[FloatArray, ...]:
    """The weights of a trained network for raw inputs."""
    (first, second), (b1, b2) = model.coefs_, model.intercepts_
    w1 = first.T / scaler.scale_
    weights = w1, b1 - w1 @ scaler.mean_, second.T, b2
    return tuple(np.ascontiguousarray(w, dtype=np.float32) for w in weights)

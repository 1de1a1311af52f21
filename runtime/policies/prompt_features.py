"""What a prompt looks like to a chooser of drafts (on-the-fly adaptation paper, section 5).

A prompt is a vector u of r numbers: a constant, the logarithm of its length, the logarithm of its
perplexity under the smallest draft, and its TF-IDF vector projected to a few dimensions (the paper
concatenates length, perplexity and "its TF-IDF score"). Fitted features are plain arrays;
scikit-learn fits them (:mod:`optimizer.fit.on_the_fly`) and is not needed to read a prompt.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

TOKEN_PATTERN: Final = r"(?u)\w+|[^\w\s]"
"""What TF-IDF counts: words, and marks one by one, which tell code from prose. Text is lower-cased
first.
"""
SCALARS: Final = ("length", "perplexity")
"""Columns beside the constant and TF-IDF."""


@dataclass(frozen=True)
class Prompt:
    """What a chooser reads of one prompt: its ``text``, its length in ``tokens``, and ``nats``, the
    logarithm of its perplexity, per token after the first; NaN where there is none."""

    text: str
    tokens: int
    nats: float


@dataclass(frozen=True, eq=False)
class PromptFeatures:
    """Fitted features: prompts to vectors u.

    ``vocabulary``: V terms, by column; ``idf`` float64 [V]; ``components`` float64 [k, V], the
    projection. ``center`` and ``scale`` float64 [r - 1]: mean and deviation, over the prompts
    fitted to, of all columns but the constant; predictions of ordinary least squares do not depend
    on them, a ridge does. ``reader``: whose perplexity it is. r = 3 + k.

    Lengths enter as logarithms: they span orders of magnitude, and what a longer prompt adds to
    accuracy wears off. So do perplexities, as nats per token, which are means over tokens as
    accuracies are; the exponential of one would be ruled by a few odd prompts.
    """

    vocabulary: tuple[str, ...]
    idf: FloatArray
    components: FloatArray
    center: FloatArray
    scale: FloatArray
    reader: str

    def __post_init__(self) -> None:
        k, terms, size = len(self.components), len(self.vocabulary), self.dimension - 1
        wanted = {"idf": (terms,), "components": (k, terms), "center": (size,), "scale": (size,)}
        for name, shape in wanted.items():
            got = getattr(self, name).shape
            if got != shape:
                raise ValueError(f"prompt features: {name} has shape {got}, expected {shape}")

    @property
    def dimension(self) -> int:
        """r, the length of u."""
        return 1 + len(SCALARS) + len(self.components)

    @property
    def names(self) -> tuple[str, ...]:
        """What each entry of u is."""
        return ("constant", *SCALARS, *(f"tfidf {i + 1}" for i in range(len(self.components))))

    @cached_property
    def _column(self) -> dict[str, int]:
        return {term: i for i, term in enumerate(self.vocabulary)}

    def tfidf(self, texts: Sequence[str]) -> FloatArray:
        """Counts times idf, rows of length 1 (or 0, without a known term): scikit-learn's
        ``TfidfVectorizer.transform``, float64 [n, V].
        """
        out = np.zeros((len(texts), len(self.vocabulary)))
        for row, text in zip(out, texts, strict=True):
            for term, count in Counter(re.findall(TOKEN_PATTERN, text.lower())).items():
                if term in self._column:
                    row[self._column[term]] = count * self.idf[self._column[term]]
        lengths = np.sqrt((out * out).sum(1, keepdims=True))
        return np.asarray(out / np.where(lengths > 0, lengths, 1.0), dtype=np.float64)

    def projected(self, texts: Sequence[str]) -> FloatArray:
        """TF-IDF in k dimensions: scikit-learn's ``TruncatedSVD.transform`` of it, float64 [n,
        k]."""
        return np.asarray(self.tfidf(texts) @ self.components.T, dtype=np.float64)

    def transform(self, prompts: Sequence[Prompt]) -> FloatArray:
        """The vectors u, float64 [n, r]. What is not known of a prompt (a perplexity of NaN) is
        taken to be the fitted mean."""
        texts = [p.text for p in prompts]
        raw = np.concatenate([raw_scalars(prompts), self.projected(texts)], axis=1)
        scaled = (np.where(np.isnan(raw), self.center, raw) - self.center) / self.scale
        return np.concatenate([np.ones((len(prompts), 1)), scaled], axis=1)


def raw_scalars(prompts: Sequence[Prompt]) -> FloatArray:
    """The columns of :data:`SCALARS` before they are centred, float64 [n, 2]."""
    columns = [math.log(max(1, p.tokens)) for p in prompts], [p.nats for p in prompts]
    return np.array(columns, dtype=np.float64).T

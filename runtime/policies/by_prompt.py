"""A draft for each prompt (on-the-fly adaptation paper, section 5): what was fitted to choose by.

A prompt is a vector u: the logarithms of its length and of its perplexity under the target, and the
TF-IDF of its token ids. Least squares tell from u, for each candidate, the logarithm of its seconds
over those of the first; the least decodes. That compares throughputs (equation 3) as equation 4
does, without its approximation. :mod:`optimizer.fit.by_prompt` fits it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.artifacts import DRAFT_CHOOSER, Artifacts, read_artifact
from spectune.runtime.policies.document import PromptPolicy
from spectune.traces.errors import PolicyError, TraceError

FloatArray = npt.NDArray[np.float64]
TokenIds = Sequence[int] | npt.NDArray[np.integer]


def prompt_key(ids: TokenIds) -> str:
    """What a recorded prompt is found again by: 16 hex digits of a hash of its token ids."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Chooser:
    """A linear model of K candidates over V terms.

    ``terms`` int64 [V]: token ids, ascending; ``idf`` float64 [V]; ``weights`` float64 [2 + V, K]
    of log length, log perplexity and TF-IDF; ``intercept`` float64 [K]. ``perplexities``: the
    logarithms of those of the recorded prompts, by :func:`prompt_key`."""

    terms: npt.NDArray[np.int64]
    idf: FloatArray
    weights: FloatArray
    intercept: FloatArray
    perplexities: Mapping[str, float]

    def choose(self, ids: TokenIds, log_perplexity: float) -> int:
        """Which candidate decodes after a prompt."""
        places = np.searchsorted(self.terms, ids)
        places = places[np.append(self.terms, -1)[places] == ids]
        tfidf = np.bincount(places, minlength=len(self.terms)) * self.idf
        length = np.sqrt(tfidf @ tfidf)
        u = np.concatenate([[np.log(len(ids)), log_perplexity], tfidf / (length or 1.0)])
        return int((u @ self.weights + self.intercept).argmin())

    def choose_recorded(self, ids: TokenIds) -> int:
        """:meth:`choose` for a prompt of the recording it was fitted to. Raises TraceError for any
        other."""
        log_perplexity = self.perplexities.get(prompt_key(ids))
        if log_perplexity is None:
            raise TraceError(
                "the policy chooses by the perplexity of prompts, and it was fitted to another "
                "recording: `fit chooser --recording ID` on this one, or execute it (`run "
                "--policy POLICY`)"
            )
        return self.choose(ids, log_perplexity)


def stored_chooser(policy: PromptPolicy, artifacts: Artifacts | None) -> Chooser:
    """What a policy names to choose by. Raises PolicyError where it cannot be had, or was fitted to
    other policies."""

    def read(document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Chooser:
        if document["candidates"] != [candidate.id for candidate in policy.candidates]:
            raise PolicyError(
                "it was fitted to choose between other policies; `fit chooser --policy ...` fits "
                "one to these"
            )
        names = ("terms", "idf", "weights", "intercept")
        terms, idf, weights, intercept = (arrays[name] for name in names)
        return Chooser(terms, idf, weights, intercept, document["perplexities"])

    return read_artifact(policy, "by_prompt", DRAFT_CHOOSER, artifacts, read)

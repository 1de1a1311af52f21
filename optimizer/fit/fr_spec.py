"""Frequency shortlists (FR-Spec; DynaSpec, section 4.1 and appendix A.3): token counts of texts, and the order that they give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from runtime.policies.dynaspec import Frequencies
from traces.errors import TraceError

IntArray = npt.NDArray[np.int64]


def count_tokens(texts: Iterable[Sequence[int] | npt.NDArray[np.integer]], vocab: int) -> IntArray:
    """How often each token occurs in ``texts`` (token ids each): int64 [vocab].

    Raises TraceError, with the text's number from 0, for an id that is not within 0..vocab - 1 or is no whole number.
    """
    counts = np.zeros(vocab, dtype=np.int64)
    for number, text in enumerate(texts):
        ids = np.asarray(text)
        if not ids.size:
            continue
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TraceError(f"text {number} must be a row of token ids, not {ids.dtype} {list(ids.shape)}")
        unknown = (ids < 0) | (ids >= vocab)
        if unknown.any():
            raise TraceError(
                f"text {number}: token id {int(ids[unknown][0])} is not in a vocabulary of {vocab} tokens; "
                "count texts that the pair's own tokenizer made"
            )
        counts += np.bincount(ids.astype(np.int64), minlength=vocab)
    return counts


def fit_frequencies(counts: npt.ArrayLike, always: Sequence[int] = ()) -> Frequencies:
    """The order of shortlists by ``counts``, whole numbers [vocab]: first the tokens ``always`` in, by id, then the others by count,
    largest first, ties by lower id.

    Raises ValueError for counts that are no such numbers or negative, and for tokens in ``always`` that are unknown.
    """
    array = np.asarray(counts)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ValueError(f"counts must be whole numbers [vocab], not {array.dtype} {list(array.shape)}")
    if array.dtype.kind == "i" and (array < 0).any():
        raise ValueError(f"counts cannot be negative; token {int(np.argmax(array < 0))} has {int(array.min())}")
    first = np.array(sorted(set(always)), dtype=np.int64)
    if len(first) and (first[0] < 0 or first[-1] >= len(array)):
        raise ValueError(f"tokens {first.tolist()} are to be in every shortlist, but are not all in a vocabulary of {len(array)}")
    others = np.ones(len(array), dtype=np.bool_)
    others[first] = False
    ids = np.flatnonzero(others)
    # counts as floats would merge large ones; the ids are ascending, so a stable sort keeps ties by id
    ids = ids[np.argsort(array.max() - array[ids], kind="stable")]
    return Frequencies(np.concatenate([first, ids]), len(first))

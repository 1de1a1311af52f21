"""FR-Spec's frequency shortlists (DynaSpec, section 4.1 and appendix A.3): token counts of texts,
and the order that they give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.optimizer.fit.corpus import corpus_tokens
from spectune.optimizer.fit.shared import StoredFit, keep, texts_to_fit
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import FREQUENCIES
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.progress import Progress, silent
from spectune.traces.store import TraceStore

IntArray = npt.NDArray[np.int64]


def fit_fr_spec(
    store: TraceStore,
    recording: str,
    pair: LoadedPair,
    *,
    corpus: Sequence[str] = (),
    progress: Progress = silent,
) -> StoredFit:
    """Stores the vocabulary by how often its tokens occur in recorded texts, prompts included, or
    in a ``corpus`` (:func:`corpus_tokens`).

    EOS and the tokenizer's special tokens come first. Raises TraceError for a recording of another
    pair or without texts, WorkloadError for a file that cannot be read or is empty.
    """
    progress("counting", 0, 1)
    counts = np.zeros(pair.target.vocab_size, dtype=np.int64)
    if corpus:
        source: dict[str, Any] = {"corpus": list(corpus)}
        for ids, share in corpus_tokens(pair, corpus):
            counts += np.bincount(ids, minlength=len(counts))
            progress("counting", round(1000 * share), 1000)
    else:
        texts = texts_to_fit(store, recording, pair.spec)
        source = {"recording": recording, "request_ids": [t.request_id for t in texts]}
        for t in texts:
            counts += np.bincount([*t.prompt_ids, *t.output_ids], minlength=len(counts))
    special = {*pair.eos_ids, *getattr(pair.tokenizer, "all_special_ids", ())}
    order = frequency_order(counts, sorted(i for i in special if 0 <= i < len(counts)))
    progress("counting", 1, 1)
    described, arrays = order.to_document()
    covered = np.cumsum(counts[order.order]) / counts.sum()
    sizes = sorted({min(order.vocab, 1 << bits) for bits in range(6, 20)})
    document = {
        **source,
        "pair": pair.id,
        **described,
        "tokens": int(counts.sum()),
        "distinct": int((counts > 0).sum()),
        "coverage": {str(n): round(float(covered[order.size(n) - 1]), 6) for n in sizes},
    }
    draft, size = next(iter(pair.models), "DRAFT"), max(1, order.vocab // 4)

    def policy(artifact: str) -> dict[str, Any]:
        shortlist = {"kind": "frequency", "size": size, "artifact": artifact}
        return {"draft": draft, "window": {"kind": "fixed", "gamma": 4}, "shortlist": shortlist}

    return keep(store, FREQUENCIES, document, arrays, policy=policy)


def frequency_order(counts: IntArray, always: Sequence[int] = ()) -> Frequencies:
    """The order of shortlists by ``counts`` [vocab]: first the tokens ``always`` in, by id, then
    the others by count, largest first, ties by lower id."""
    first = np.unique(np.array(always, dtype=np.int64))
    others = np.setdiff1d(np.arange(len(counts)), first)
    return Frequencies(
        np.concatenate([first, others[np.argsort(-counts[others], kind="stable")]]), len(first)
    )

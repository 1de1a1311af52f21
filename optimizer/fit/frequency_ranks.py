"""What a frequency order says of a recording's texts: the ranks that chains under shortlists of it replay from (FR-Spec, PA-FR)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from spectune.db.errors import CorruptedChunkError
from spectune.optimizer.fit.draft_distributions import WholeDistributions, states_over
from spectune.optimizer.fit.shared import Progress
from spectune.optimizer.simulate.shortlist_ranks import UNKNOWN_CODE, FrequencyRanks, budget_grid, keep_ranks, wanted_ranks
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import FREQUENCIES
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.recording.trees import OFF_TEXT, ROWS
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Proposals, Trajectory, TreePanorama
from spectune.traces.store import TraceStore


@torch.no_grad()
def frequency_ranks(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    draft: str,
    frequencies: str,
    *,
    proposals: Proposals = "coupled",
    progress: Progress = lambda *_: None,
) -> FrequencyRanks:
    """The ranks of a recording's texts under a stored frequency order, for ``ranks`` of a
    :class:`optimizer.simulate.replay_trace.ReplayTrace`: stored
    ones where they hold every request, else made and stored.

    The draft reads the texts again, once. Only chains of language-model drafts ask for such ranks. Raises TraceError for a recording of
    another pair or without trees of the draft, PolicyError where ``frequencies`` is no frequency order of the pair's vocabulary.
    """
    order, name = _order(store, pair, frequencies)
    wanted = wanted_ranks(store, pair.id, recording, draft, name, proposals)
    if isinstance(wanted.there, FrequencyRanks) and wanted.complete:
        return wanted.there
    ranker = _Ranker(WholeDistributions(pair, draft), order)
    parts = []
    for n, (text, panorama) in enumerate(zip(wanted.texts, wanted.trees, strict=True)):
        parts.append(ranker.rank(text, panorama))
        progress("ranks", n + 1, len(wanted.texts))
    columns: dict[str, Any] = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _Part._fields}
    made = FrequencyRanks(
        draft=draft,
        fitted=name,
        proposals=proposals,
        vocab=order.vocab,
        budgets=ranker.budgets,
        digests=wanted.digests,
        text_offsets=np.cumsum([0, *(len(p.own) for p in parts)]),
        **columns,
    )
    return keep_ranks(store, pair.id, wanted.recording, made)


class _Part(NamedTuple):
    """The rows of one request: columns of :class:`FrequencyRanks`."""

    own: npt.NDArray[np.uint32]
    better: npt.NDArray[np.uint32]
    open: npt.NDArray[np.bool_]
    text_code: npt.NDArray[np.uint16]
    mass_code: npt.NDArray[np.uint16]
    entropy_code: npt.NDArray[np.uint16]


class _Ranker:
    """One frequency order over one draft of a pair, request by request."""

    def __init__(self, distributions: WholeDistributions, order: Frequencies) -> None:
        self.distributions, self.vocab = distributions, order.vocab
        self.rank_of = np.where(distributions.row >= 0, order.rank, order.vocab)
        self.of_rows = order.rank[distributions.ids]
        self.budgets = budget_grid(order.vocab)
        # Rows of the head by rank, and how many of them the first k tokens are.
        by_rank = np.argsort(self.of_rows, kind="stable")
        self.by_rank = torch.from_numpy(by_rank).to(distributions.pair.device)
        held = np.searchsorted(self.of_rows[by_rank], self.budgets)
        self.columns, self.none = np.maximum(held - 1, 0).tolist(), held == 0

    def rank(self, text: Trajectory, panorama: TreePanorama) -> _Part:
        """The rows of one request."""
        distributions, roots, prompt = self.distributions, len(text.output_ids) + 1, len(text.prompt_ids)
        slot = panorama.text_slot[:roots]
        before = np.where(slot < panorama.width, slot, 0)[:, None]
        better = np.where(np.arange(panorama.width) < before, self._ranks(panorama.tokens[:roots]), self.vocab).min(axis=1)
        unsaid = np.zeros(roots, np.bool_)
        reader = states_over(distributions.pair, distributions.draft, [*text.prompt_ids.tolist(), *text.output_ids.tolist()], prompt)
        states, following = reader.text_states()[prompt - 1 :], np.append(text.output_ids.astype(np.int64), -1)
        codes = []
        for at in range(0, roots, ROWS):
            logits = distributions.logits(states[at : at + ROWS])
            codes.append(distributions.codes(logits, text.sampling, following[at : at + ROWS], self.columns, self._by_rank))
            for i in (at + np.flatnonzero(slot[at : at + len(logits)] == OFF_TEXT)).tolist():
                if i == roots - 1:
                    continue
                above = distributions.better(reader, logits[i - at], i, text, panorama)
                unsaid[i] = above is None
                ranks = self.of_rows[above] if above is not None else self._ranks(panorama.tokens[i, : panorama.count[i]])
                better[i] = ranks.min(initial=self.vocab)
        text_code, mass_code, entropy_code = (np.concatenate(parts) for parts in zip(*codes, strict=True))
        mass_code[:, self.none] = UNKNOWN_CODE
        own = np.append(self._ranks(text.output_ids), self.vocab).astype(np.uint32)
        return _Part(own, better.astype(np.uint32), unsaid, text_code, mass_code, entropy_code)

    def _ranks(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self.rank_of[tokens.astype(np.int64)]
        return found

    def _by_rank(self, values: torch.Tensor) -> torch.Tensor:
        return values.index_select(1, self.by_rank)


def _order(store: TraceStore, pair: LoadedPair, name: str) -> tuple[Frequencies, str]:
    """A stored frequency order, and its whole id."""
    try:
        found = store.get_artifact(name)
    except CorruptedChunkError as error:
        raise PolicyError(f"frequencies {name}: {error}; `fit frequencies` makes an order anew") from None
    if found.kind != FREQUENCIES:
        raise PolicyError(f"frequencies {name}: artifact {found.id} is a {found.kind}; `fit frequencies` makes a frequency order")
    order = Frequencies.from_document(found.document, found.arrays)
    if order.vocab != pair.target.vocab_size:
        raise PolicyError(
            f"frequencies {name}: orders a vocabulary of {order.vocab} tokens, pair {pair.spec.name} has {pair.target.vocab_size}; "
            "`fit frequencies` on a recording of this pair makes one"
        )
    return order, found.id

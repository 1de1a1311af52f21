"""What a frequency order says of a recording's texts: the ranks that chains under shortlists of it replay from (FR-Spec, PA-FR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spectune.optimizer.fit.draft_distributions import Columns, ReadText, WholeDistributions
from spectune.optimizer.simulate.shortlist_ranks import FrequencyRanks, budget_grid
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import Fitted
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Proposals


class FrequencyOrder:
    """The frequency order of an artifact over one draft of a pair. Only chains of language models ask for its ranks. Raises PolicyError
    for one of another vocabulary."""

    def __init__(self, pair: LoadedPair, draft: str, name: str, held: Fitted) -> None:
        order = Frequencies.from_document(held.document, held.arrays)
        if order.vocab != pair.target.vocab_size:
            raise PolicyError(
                f"frequencies {name}: orders a vocabulary of {order.vocab} tokens, pair {pair.spec.name} has {pair.target.vocab_size}; "
                "`fit frequencies` on a recording of this pair makes one"
            )
        distributions = WholeDistributions(pair, draft)
        self.draft, self.vocab = draft, order.vocab
        self.rank_of = np.where(distributions.row >= 0, order.rank, order.vocab)
        self.of_rows = order.rank[distributions.ids]
        self.budgets = budget_grid(order.vocab)
        # Rows of the head by rank, and how many of them the first k tokens are.
        by_rank = np.argsort(self.of_rows, kind="stable")
        self.by_rank = torch.from_numpy(by_rank).to(pair.device)
        held = np.searchsorted(self.of_rows[by_rank], self.budgets)
        self.columns, self.none = np.maximum(held - 1, 0).tolist(), held == 0

    def place(self, read: ReadText) -> _Placed:
        """Where the order puts what a request's texts go on with and the recorded children before that."""
        panorama = read.panorama
        slot = panorama.text_slot[: read.roots]
        before = np.where(slot < panorama.width, slot, 0)[:, None]
        children = self.ranks(panorama.tokens[: read.roots])
        better = np.where(np.arange(panorama.width) < before, children, self.vocab).min(axis=1)
        own = np.append(self.ranks(read.trajectory.output_ids), self.vocab).astype(np.uint32)
        return _Placed(self, read, own, better)

    def ranks(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Ranks of the target's tokens; of those that the draft's head lacks the vocabulary's size."""
        found: npt.NDArray[np.int64] = self.rank_of[tokens.astype(np.int64)]
        return found

    def joined(self, name: str, proposals: Proposals, digests: Sequence[str], parts: Sequence[Columns]) -> FrequencyRanks:
        """The rows of all requests as one value."""
        columns: dict[str, Any] = {column: np.concatenate([p[column] for p in parts]) for column in parts[0]}
        return FrequencyRanks(
            draft=self.draft,
            fitted=name,
            proposals=proposals,
            vocab=self.vocab,
            budgets=self.budgets,
            digests=tuple(digests),
            text_offsets=np.cumsum([0, *(len(p["own"]) for p in parts)]),
            **columns,
        )


@dataclass(eq=False)
class _Placed:
    """A frequency order over one request."""

    order: FrequencyOrder
    read: ReadText
    own: npt.NDArray[np.uint32]
    better: npt.NDArray[np.int64]

    def by_order(self, rows: slice, values: torch.Tensor) -> torch.Tensor:
        """``values`` of the head's rows, best token first."""
        return values.index_select(1, self.order.by_rank)

    def least(self, start: int, better: npt.NDArray[np.bool_] | None) -> int:
        """The least rank of the rows that are ``better`` than the text's token; of the recorded children where that is not known."""
        panorama = self.read.panorama
        if better is None:
            ranks = self.order.ranks(panorama.tokens[start, : panorama.count[start]])
        else:
            ranks = self.order.of_rows[better]
        return int(ranks.min(initial=self.order.vocab))

    def finished(self, unsaid: npt.NDArray[np.bool_]) -> Columns:
        """The columns; ``unsaid``: starts where nothing is known beyond the children."""
        return {"own": self.own, "better": self.better.astype(np.uint32), "open": unsaid}

"""Passes over a tree, which a language model and an EAGLE head share: where nodes stand, what they
see, which tokens are evaluated."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from spectune.runtime.drafts.device_trees import grows_on_device, tree_phase
from spectune.runtime.drafts.protocol import DraftContext, Drafted
from spectune.runtime.models import SlotModel
from spectune.runtime.shortlists import Shortlists, Support
from spectune.runtime.trees.draft import ModelDistributions, grow

Places = tuple[Tensor, Tensor, Tensor]
"""Where n nodes stand: positions and slots, int64 [n], and what each sees, a mask bool [n, view].
"""


class TreeReader(ABC):
    """A draft's passes over one tree: each level in one pass, nodes apart under a mask.

    ``ids`` are the tokens that the last pass's logits are of, int64 [size], where there are
    ``shortlists``; None: all. ``hidden`` [n, hidden_size] are a head's outputs of that pass."""

    def __init__(self, model: SlotModel, text: list[int], shortlists: Shortlists | None) -> None:
        self.text, self.length, self.device = text, len(text), model.device
        self.ids: Tensor | None = None
        self.hidden = torch.zeros(0)
        self.model, self._shortlists = model, shortlists
        self._placed = 0
        self._mask: Tensor | None = None
        self._last = torch.zeros(0)
        """Under shortlists, the states of the nodes read last, [n, d]."""

    @abstractmethod
    def root(self) -> Tensor:
        """Float32 logits [1, vocab or size] after the text; reads what the draft has not read of
        it."""

    @abstractmethod
    def _read(
        self, tokens: Tensor, parents: Tensor | None, at: Places, logits: int | None
    ) -> tuple[Tensor, Tensor]:
        """Float32 logits [logits (None: n), vocab] after n tokens, children of the nodes read last
        in places ``parents`` (None: of the root), and the hidden states [n, hidden_size]."""

    def level(self, tokens: Tensor, parents: Tensor | None, depth: int) -> Tensor:
        """Float32 logits [n, vocab or size] after n tokens at ``depth``, children of the nodes that
        pass depth - 1 read in these places (None: of the root)."""
        at = self._place(len(tokens), parents, depth)
        if self._shortlists is None:
            return self._read(tokens, parents, at, None)[0]
        states = self.model.state(self._read(tokens, parents, at, 0)[1])
        support = self._shortlists.select(
            depth,
            tokens,
            self._last.expand(len(tokens), -1) if parents is None else self._last[parents],
        )
        return self._listed(states, support)

    def _listed(self, states: Tensor, support: Support) -> Tensor:
        """Logits [n, size] over a shortlist for the states [n, d] of a level."""
        assert self._shortlists is not None
        self._last, self.ids = states, support.ids
        return self._shortlists.logits(states, support)

    def _place(self, n: int, parents: Tensor | None, depth: int) -> Places:
        """The next n slots behind the text; each node sees the text, its ancestors and itself."""
        first = self.length + self._placed
        slots = torch.arange(first, first + n, device=self.device)
        mask = torch.zeros(n, first + n, dtype=torch.bool, device=self.device)
        if parents is None or self._mask is None:
            mask[:, self.model.first_slot : self.length] = True
        else:
            mask[:, : self._mask.shape[1]] = self._mask[parents]
        mask[torch.arange(n, device=self.device), slots] = True
        self._mask = mask
        self._placed += n
        positions = torch.full((n,), self.length + depth - 1, dtype=torch.int64, device=self.device)
        return positions, slots, mask


def propose_tree(
    reader: TreeReader, depth: int, limit: int, lag: int, context: DraftContext
) -> Drafted:
    """Grows a tree by a draft's passes, as the policy says."""
    plan, sampling, log_q = context.plan, context.sampling, list[Tensor]()
    if grows_on_device(reader.model, plan, rejects=context.rejects):
        phase = tree_phase(plan, reader.model, sampling)
        phase.begin(reader.length, depth, limit, sampling, context.noise)
        logits = reader.root()
        tree = phase.grow(logits, reader.hidden)
    else:
        rule = plan.rule(sampling)
        source = ModelDistributions(rule, reader, context)
        tree = grow(rule, depth, limit, source)
        log_q = source.log_q[: len(tree.tokens)]
    return Drafted(len(tree.tokens), tree.steps, lag, tree.tokens, tree, log_q)

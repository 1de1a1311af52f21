"""A causal language model as draft, over a slot cache of its own: chains a token at a time, trees a
level at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spectune.runtime.drafts.protocol import LONG_LAG, DraftContext, Drafted
from spectune.runtime.drafts.tree_reader import Places, TreeReader, propose_tree
from spectune.runtime.models import CausalModel, ids_tensor
from spectune.runtime.sampling import sample
from spectune.runtime.shortlists import RecentStates, Shortlists, Support


class LanguageModelDraft:
    """One pass for the tokens it has not read, then one pass a token or a level."""

    reads_features = False

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self._read = 0
        self._states = RecentStates()
        self._nodes: list[Tensor] = []
        """The states of the nodes read for the tree in hand, level by level, where a router will
        ask for them."""

    def begin(self, text: list[int], capacity: int) -> None:
        self.model.reserve(capacity)
        self._read = 0
        self._states.clear()
        if len(text) > 1:
            self._catch_up(text)

    def propose(self, text: list[int], depth: int, limit: int, context: DraftContext) -> Drafted:
        shortlists, length = context.shortlists, len(text)
        routed = shortlists is not None and shortlists.routed
        if routed and self._read == length - 1 > 0 and self._states.get(length - 2) is None:
            self._read -= 1  # rounds without a router do not keep states: that token is read again
        is_tree = context.plan.policy.is_tree
        if not (is_tree or context.plan.stop.active):
            return self._propose_chain(text, depth, context)
        reader, lag = LanguageModelReader(self, text, shortlists), length - self._read
        drafted = propose_tree(reader, depth, limit, lag, context)
        if is_tree:
            return drafted
        if self._nodes:
            self._states.put(length, torch.cat(self._nodes))
        return replace(drafted, tree=None)  # nodes of one child each stand as a chain's tokens do

    def commit(self, length: int, drafted: Drafted, path: list[int]) -> None:
        if drafted.tree is None:
            read = min(len(path), drafted.steps - 1)  # the last proposal was not read
            self._states.forget_from(length + read)
        else:
            # The accepted nodes that were read, as far as they follow each other, move to where
            # the text goes on.
            places = [drafted.tree.expanded[node] for node in path]
            read = places.index(-1) if -1 in places else len(places)
            self.model.cache.move([length + place for place in places[:read]], length)
            self._states.forget_from(length)
            if self._nodes and read:
                self._states.put(length, torch.cat(self._nodes)[places[:read]])
        self._read = length + read

    def pending(self, text: list[int]) -> tuple[Tensor, int]:
        """Token ids int64 that the pass for the first proposal reads, and where they begin; a long
        lag is read apart first."""
        if len(text) - self._read > LONG_LAG:
            self._catch_up(text)
        return ids_tensor(text[self._read :], self.model.device), self._read

    def _catch_up(self, text: list[int]) -> None:
        """Reads the text but for its last token."""
        ids = torch.tensor(text[self._read : -1], device=self.model.device)
        last = self.model.read(ids, self._read)
        self._read = len(text) - 1
        self._states.put(self._read - 1, last)

    def _propose_chain(self, text: list[int], depth: int, context: DraftContext) -> Drafted:
        """A chain that no stop ends: no token is looked at on the host before the end, which
        measured 5 to 9% faster than growing a tree of width 1."""
        length, lag = len(text), len(text) - self._read
        pending, at = self.pending(text)
        sampling, noise, shortlists = context.sampling, context.noise, context.shortlists
        tokens: list[Tensor] = []
        log_q: list[Tensor] = []
        for step in range(depth):
            ids = None
            if shortlists is None:  # logits, or when greedy the id of the largest
                logits, _ = self.model.chain(pending, at, logits=1, greedy=sampling.greedy)
            else:
                state, support = self.forward_state(pending, at, step, shortlists)
                logits, ids = shortlists.logits(state, support), support.ids
            at += len(pending)
            column = sample(logits, sampling, noise, [length + step], draft=True, ids=ids)
            pending = column if ids is None else ids[column]
            tokens.append(pending)
            if context.rejects:
                log_q.append(context.log_q(logits, ids))
        return Drafted(depth, depth, lag, torch.cat(tokens).tolist(), log_q=log_q)

    def forward_state(
        self, pending: Tensor, at: int, step: int, shortlists: Shortlists
    ) -> tuple[Tensor, Support]:
        """A pass over ``pending`` at positions ``at ..`` without the output head: the last state
        [1, hidden_size], and the shortlist of draft step ``step``."""
        states = self.model.chain(pending, at, logits=0)[1]
        if shortlists.routed:
            self._states.put(at, states)
        before = self._states.get(at + len(pending) - 2)
        support = shortlists.select(step, pending[-1:], before)
        return states[-1:], support


class LanguageModelReader(TreeReader):
    """A language model's passes over one tree."""

    def __init__(
        self, draft: LanguageModelDraft, text: list[int], shortlists: Shortlists | None
    ) -> None:
        super().__init__(draft.model, text, shortlists)
        self.draft = draft
        draft._nodes = []

    def root(self) -> Tensor:
        pending, at = self.draft.pending(self.text)
        if self._shortlists is None:
            return self.draft.model.chain(pending, at, logits=1)[0]
        return self._listed(*self.draft.forward_state(pending, at, 0, self._shortlists))

    def _read(
        self, tokens: Tensor, parents: Tensor | None, at: Places, logits: int | None
    ) -> tuple[Tensor, Tensor]:
        rows, states = self.model.run(tokens, *at, logits=logits)
        if self._shortlists is not None and self._shortlists.routed:
            self.draft._nodes.append(states)
        return rows, states

"""A causal language model as draft, over a slot cache of its own: chains a token at a time, trees a
level at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from spectune.runtime.drafts.passes import Places, TreeReader, propose_tree
from spectune.runtime.drafts.protocol import LONG_LAG, DraftContext, Drafted
from spectune.runtime.models import CausalModel, ids_tensor
from spectune.runtime.policies.stops import STOP_ENTROPY, STOP_NONE, should_stop
from spectune.runtime.sampling import (
    entropy_of,
    gumbel_row,
    log_distribution,
    nat_code,
    sample,
    stream_key,
)
from spectune.runtime.shortlists import Shortlists, States, Support


class LanguageModelDraft:
    """One pass for the tokens it has not read, then one pass a token or a level."""

    reads_features = False

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self._read = 0
        self._states = States()
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
        if routed and self._read == length - 1 > 0 and self._states.at(length - 2) is None:
            self._read -= 1  # rounds without a router do not keep states: that token is read again
        if not context.plan.policy.is_tree:
            return self._propose_chain(text, depth, context)
        reader, lag = LanguageModelReader(self, text, shortlists), length - self._read
        return propose_tree(reader, depth, limit, lag, context)

    def commit(self, length: int, drafted: Drafted, path: list[int]) -> None:
        if drafted.tree is None:
            read = min(len(path), drafted.steps - 1)  # the last proposal was not read
            self._states.forget_from(length + read)
        else:
            read = self._keep([drafted.tree.expanded[node] for node in path], length)
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

    def _keep(self, places: list[int], length: int) -> int:
        """Keeps the accepted nodes that were read, as far as they follow each other, moved to where
        the text goes on. ``places``: theirs among those read for the tree (-1: not read). How many
        they are."""
        kept = places.index(-1) if -1 in places else len(places)
        self.model.cache.move([length + place for place in places[:kept]], length)
        self._states.forget_from(length)
        if self._nodes and kept:
            self._states.put(length, torch.cat(self._nodes)[places[:kept]])
        return kept

    def _propose_chain(self, text: list[int], depth: int, context: DraftContext) -> Drafted:
        lag = len(text) - self._read
        pending, at = self.pending(text)
        stop, shortlists = context.plan.stop, context.shortlists
        # Without a stop no token is looked at on the host: no device sync until the end.
        needs_log_q = stop.kind != STOP_NONE or context.own_seed is not None
        greedy = context.sampling.greedy and not needs_log_q
        drafted: list[Tensor] = []
        log_qs: list[Tensor] = []
        steps = joint = 0
        ended = False
        while steps < depth and not ended:
            logits, ids = self._forward(pending, at, steps, shortlists, greedy=greedy)
            at += len(pending)
            log_q = None
            if needs_log_q:
                log_q = log_distribution(logits, context.sampling, draft=True)[0]
            column = logits
            if logits.dtype != torch.int64:
                column = self._choose(logits, log_q, len(text) + steps, context, ids)
            steps += 1
            pending = column if ids is None else ids[column]
            if stop.kind != STOP_NONE:
                assert log_q is not None
                logp = nat_code(-float(log_q[column]))
                entropy = nat_code(float(entropy_of(log_q))) if stop.kind == STOP_ENTROPY else 0
                joint += logp
                ended = should_stop(stop, logp, joint, entropy)
                if ended and not stop.keep_last:
                    break
            drafted.append(pending)
            if context.own_seed is not None and log_q is not None:
                # Outside a shortlist q is 0: ratio and residual of the rejection verifier are of
                # what was drawn from.
                outside = log_q.new_full((self.model.vocab_size,), -torch.inf)
                log_qs.append(log_q if ids is None else outside.index_copy_(0, ids, log_q))
        tokens = torch.cat(drafted).tolist() if drafted else []
        return Drafted(len(tokens), steps, lag, tokens, log_q=log_qs)

    def _forward(
        self, pending: Tensor, at: int, step: int, shortlists: Shortlists | None, *, greedy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over ``pending`` at positions ``at ..``: float32 logits [1, vocab or size], and
        the tokens they are of (None: all); with ``greedy`` the id of the largest of all."""
        if shortlists is None:
            return self.model.chain(pending, at, logits=1, greedy=greedy)[0], None
        state, support = self.forward_state(pending, at, step, shortlists)
        return shortlists.logits(state, support), support.ids

    def forward_state(
        self, pending: Tensor, at: int, step: int, shortlists: Shortlists
    ) -> tuple[Tensor, Support]:
        """The same pass without the head: the last state [1, hidden_size], and the shortlist of
        draft step ``step``."""
        states = self.model.chain(pending, at, logits=0)[1]
        if shortlists.routed:
            self._states.put(at, states)
        before = self._states.at(at + len(pending) - 2)
        support = shortlists.select(step, pending[-1:], before)
        return states[-1:], support

    def _choose(
        self,
        logits: Tensor,
        log_q: Tensor | None,
        position: int,
        context: DraftContext,
        ids: Tensor | None,
    ) -> Tensor:
        """The column of ``logits`` [1, size] that is proposed at ``position``, int64 [1]: coupled
        with the target's noise, or drawn from q by a stream of its own. ``ids`` int64 [size] are
        the tokens of a shortlist; None: columns are tokens."""
        if ids is not None and ids.shape[0] == 1:
            return torch.zeros_like(ids)
        if context.own_seed is not None:
            assert log_q is not None
            key = stream_key(context.own_seed, position, "draft", context.salt)
            own = gumbel_row(key, self.model.vocab_size, self.model.device)
            return (log_q + (own if ids is None else own[ids])).argmax(-1, keepdim=True)
        return sample(logits, context.sampling, context.noise, [position], draft=True, ids=ids)


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
        found = self.model.run(tokens, *at, logits=logits)
        if self._shortlists is not None and self._shortlists.routed:
            self.draft._nodes.append(found[1])
        return found

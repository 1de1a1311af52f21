"""A causal language model as draft, over a slot cache of its own: chains a token at a time, trees a
level at a time, for all requests of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from spectune.runtime.cache import PassTokens
from spectune.runtime.drafts.eagle import Features
from spectune.runtime.drafts.protocol import LONG_LAG, Drafted, DraftRequest
from spectune.runtime.drafts.tree_reader import TreeReader, propose_trees
from spectune.runtime.models import CausalModel
from spectune.runtime.sampling import sample_rows
from spectune.runtime.shortlists import RecentStates


@dataclass(eq=False)
class Reading:
    """What a language model has read of one request: ``read`` tokens, in the extent that begins at
    ``base``. ``states``, and those of the ``nodes`` of the tree in hand, level by level, are kept
    where a router will ask for them."""

    base: int
    read: int = 0
    states: RecentStates = field(default_factory=RecentStates)
    nodes: list[Tensor] = field(default_factory=list)


class LanguageModelDraft:
    """One pass for the tokens it has not read, then one pass a token or a level."""

    reads_features = False

    def __init__(self, model: CausalModel) -> None:
        self.model = model

    def begin(self, base: int, features: Features) -> Reading:
        return Reading(base)

    def catch_up(self, reading: Reading, text: list[int]) -> None:
        if reading.read >= len(text) - 1:
            return
        ids = torch.tensor(text[reading.read : -1], device=self.model.device)
        last = self.model.read(ids, reading.read, base=reading.base)
        reading.read = len(text) - 1
        reading.states.put(reading.read - 1, last)

    def propose(self, asked: Sequence[DraftRequest]) -> list[Drafted]:
        drafted = dict[int, Drafted]()
        # Passes are made together where they evaluate the same tokens.
        groups = dict[tuple[bool, int], list[int]]()
        for n, each in enumerate(asked):
            self._read_again(each)
            plan, shortlists = each.context.plan, each.context.shortlists
            grows = plan.policy.is_tree or plan.stop.active
            groups.setdefault((grows, id(shortlists)), []).append(n)
        for (grows, _), members in groups.items():
            some = [asked[n] for n in members]
            made = self._grow(some) if grows else self._propose_chains(some)
            drafted |= dict(zip(members, made, strict=True))
        return [drafted[n] for n in range(len(asked))]

    def _read_again(self, asked: DraftRequest) -> None:
        """Rounds without a router do not keep states: where one is needed now, that token is read
        again."""
        reading, shortlists, length = asked.reading, asked.context.shortlists, len(asked.text)
        if shortlists is None or not shortlists.routed or not reading.read == length - 1 > 0:
            return
        if reading.states.get(length - 2) is None:
            reading.read -= 1

    def _grow(self, asked: Sequence[DraftRequest]) -> list[Drafted]:
        """Trees, and chains that a stop may end, which are grown as trees of width 1."""
        made = []
        grown = propose_trees([LanguageModelReader(self, each) for each in asked])
        for each, drafted in zip(asked, grown, strict=True):
            reading, of_tree = each.reading, each.context.plan.policy.is_tree
            if not of_tree and reading.nodes:
                reading.states.put(len(each.text), torch.cat(reading.nodes))
            # Nodes of one child each stand as a chain's tokens do.
            made.append(drafted if of_tree else replace(drafted, tree=None))
        return made

    def commit(self, reading: Reading, length: int, drafted: Drafted, path: list[int]) -> None:
        if drafted.tree is None:
            read = min(len(path), drafted.steps - 1)  # the last proposal was not read
            reading.states.forget_from(length + read)
        else:
            # The accepted nodes that were read, as far as they follow each other, move to where
            # the text goes on.
            places = [drafted.tree.expanded[node] for node in path]
            read = places.index(-1) if -1 in places else len(places)
            first = reading.base + length
            self.model.cache.move(
                [first + place for place in places[:read]], [*range(first, first + read)]
            )
            reading.states.forget_from(length)
            if reading.nodes and read:
                reading.states.put(length, torch.cat(reading.nodes)[places[:read]])
        reading.read = length + read

    def pending(self, asked: DraftRequest) -> PassTokens:
        """The tokens that the pass for the first proposal reads; a long lag is read apart first."""
        reading, text = asked.reading, asked.text
        if len(text) - reading.read > LONG_LAG:
            self.catch_up(reading, text)
        ids = self.model.ids(text[reading.read :])
        return self.model.following(ids, reading.read, base=reading.base)

    def _propose_chains(self, asked: Sequence[DraftRequest]) -> list[Drafted]:
        """Chains that no stop ends: no token is looked at on the host before the end, which
        measured 5 to 9% faster than growing a tree of width 1. All are of one shortlist."""
        lags = [len(each.text) - each.reading.read for each in asked]
        order = sorted(range(len(asked)), key=lambda n: -asked[n].depth)  # the longest first
        made: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in asked]
        passes = [self.pending(asked[n]) for n in order]
        model, shortlists = self.model, asked[0].context.shortlists
        for step in range(asked[order[0]].depth):
            live = [n for n in order if asked[n].depth > step]
            passes, ids = passes[: len(live)], None
            contexts = [asked[n].context for n in live]
            greedy = all(context.sampling.greedy for context in contexts)
            if shortlists is None:  # logits, or when greedy the ids of the largest
                logits, _ = model.run_together(passes, logits=1, greedy=greedy)
            else:
                states = model.run_together(passes, logits=0)[1]
                ends = torch.tensor([len(p.ids) for p in passes]).cumsum(0) - 1
                before = None
                if shortlists.routed:  # one request alone
                    reading, end = asked[0].reading, len(asked[0].text) + step
                    reading.states.put(end - len(states), states)
                    before = reading.states.get(end - 2)
                last = passes[0].ids[-1:].to(model.device)
                support = shortlists.select(step, last, before)
                logits = shortlists.logits(states[ends.to(model.device)], support)
                ids = support.ids
            laws = [
                (context.sampling, context.noise, len(asked[n].text) + step)
                for n, context in zip(live, contexts, strict=True)
            ]
            column = sample_rows(logits, laws, draft=True, ids=ids)
            chosen = column if ids is None else ids[column]
            following = []
            for row, (n, context) in enumerate(zip(live, contexts, strict=True)):
                token = chosen[row : row + 1]
                tokens, log_q = made[n]
                tokens.append(token)
                if context.rejects:
                    log_q.append(context.log_q(logits[row : row + 1], ids))
                if step + 1 < asked[n].depth:
                    at, base = len(asked[n].text) + step, asked[n].reading.base
                    following.append(model.following(token, at, base=base))
            passes = following
        return [
            Drafted(each.depth, each.depth, lag, torch.cat(tokens).tolist(), log_q=log_q)
            for each, lag, (tokens, log_q) in zip(asked, lags, made, strict=True)
        ]


class LanguageModelReader(TreeReader):
    """A language model's passes over one tree."""

    def __init__(self, draft: LanguageModelDraft, asked: DraftRequest) -> None:
        super().__init__(draft.model, asked, asked.reading.base)
        self.draft, self.lag = draft, self.length - asked.reading.read
        asked.reading.nodes = []

    def root(self) -> PassTokens:
        return self.draft.pending(self.asked)

    def fed(self, n: int, parents: Tensor | None) -> None:
        return None

    def keep(self, states: Tensor, tokens: PassTokens, *, root: bool) -> None:
        if self.shortlists is None or not self.shortlists.routed:
            return
        reading = self.asked.reading
        if not root:
            reading.nodes.append(states)
            return
        reading.states.put(self.length - len(tokens.ids), states)
        self.last = reading.states.get(self.length - 2)

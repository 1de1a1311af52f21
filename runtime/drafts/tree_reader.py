"""Passes over trees, which a language model and an EAGLE head share, for all requests of a step at
once: where nodes stand, what they see, which tokens are evaluated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from spectune.runtime.cache import PassTokens, apart
from spectune.runtime.distributions import Perturb, best_children, codes_on_host
from spectune.runtime.drafts.device_trees import (
    TREES,
    captured_sampling,
    grows_on_device,
    grows_together,
    tree_phase,
)
from spectune.runtime.drafts.protocol import Drafted, DraftRequest
from spectune.runtime.models import SlotModel
from spectune.runtime.sampling import NoiseRows, law
from spectune.runtime.trees.draft import GrownTree, grow_together, growth
from spectune.runtime.trees.grow import Codes, Growing
from spectune.traces.schema import Sampling


class TreeReader(ABC):
    """What a draft's passes read of one tree: each level in one pass, nodes apart under a mask.

    ``ids`` are the tokens that the last pass's logits are of, int64 [size], where there are
    shortlists; None: all. ``hidden`` [n, hidden_size] are a head's outputs of that pass."""

    def __init__(self, model: SlotModel, asked: DraftRequest, base: int) -> None:
        self.asked, self.model, self.device = asked, model, model.device
        self.text, self.length, self.base = asked.text, len(asked.text), base
        self.shortlists = asked.context.shortlists
        self.lag = 0
        """Tokens that the first pass reads."""
        self.ids: Tensor | None = None
        self.hidden = torch.zeros(0)
        self.log_q: list[Tensor] = []
        """Of each distribution, [vocab], where the rejection verifier reads it."""
        self.last: Tensor | None = None
        """Under shortlists, the states of the nodes read last, [n, d]; before the first pass that
        of the token before the last, [1, d], where a router reads it and there is one."""
        self._placed = 0
        self._mask: Tensor | None = None

    @abstractmethod
    def root(self) -> PassTokens:
        """What the draft has not read of the text."""

    @abstractmethod
    def fed(self, n: int, parents: Tensor | None) -> Tensor | None:
        """The hidden states that a pass takes beside n tokens, children of the nodes read last in
        places ``parents`` (None: of the root)."""

    @abstractmethod
    def keep(self, states: Tensor, tokens: PassTokens, *, root: bool) -> None:
        """Keeps what later passes need of the hidden states [n, hidden_size] of a pass."""

    def level(self, tokens: Tensor, parents: Tensor | None, depth: int) -> PassTokens:
        """n tokens at ``depth``, children of the nodes that pass depth - 1 read in these places
        (None: of the root): the next n slots behind the text; each sees the text, its ancestors and
        itself."""
        n, device = len(tokens), self.device
        first = self.length + self._placed
        places = torch.arange(first, first + n, device=device)
        mask = torch.zeros(n, first + n, dtype=torch.bool, device=device)
        if parents is None or self._mask is None:
            mask[:, self.model.first_slot : self.length] = True
        else:
            mask[:, : self._mask.shape[1]] = self._mask[parents]
        mask[torch.arange(n, device=device), places] = True
        self._mask = mask
        self._placed += n
        position = self.length + depth - 1
        positions = torch.full((n,), position, dtype=torch.int64, device=device)
        slots, stop = places + self.base if self.base else places, self.base + first + n
        fed = self.fed(n, parents)
        return PassTokens(
            tokens, positions, slots, mask, stop, self.base, hidden=fed, earliest=position
        )


def propose_trees(readers: Sequence[TreeReader]) -> list[Drafted]:
    """Grows a tree for each reader by passes over all of them, as their policies say. All are of
    one model, and of one shortlist."""
    first = readers[0]
    context = first.asked.context
    rules = [r.asked.context.plan.rule(r.asked.context.sampling) for r in readers]
    if len(readers) == 1 and not first.base:
        if grows_on_device(first.model, context.plan, rejects=context.rejects):
            return [_grown_on_device(first)]
    elif all(
        grows_together(r.model, r.asked.context.plan, rule, rejects=r.asked.context.rejects)
        for r, rule in zip(readers, rules, strict=True)
    ):
        return _grown_together(readers)
    growths = [
        growth(rule, reader.asked.depth, reader.asked.limit)
        for rule, reader in zip(rules, readers, strict=True)
    ]

    def read(asked: dict[int, tuple[Growing, int]]) -> list[Codes]:
        growing = [readers[n] for n in asked]
        depth, rows = _read(growing, list(asked.values()))
        return _codes(growing, [rules[n].reads for n in asked], depth + 1, rows)

    trees = grow_together(growths, read)
    return [
        Drafted(len(tree.tokens), tree.steps, r.lag, tree.tokens, tree, r.log_q[: len(tree.tokens)])
        for r, tree in zip(readers, trees, strict=True)
    ]


def _grown_on_device(reader: TreeReader) -> Drafted:
    asked, context = reader.asked, reader.asked.context
    phase = tree_phase(context.plan, reader.model, context.sampling)
    phase.begin([asked])
    tokens = reader.root()
    logits, states = reader.model.run_together([tokens], logits=1)
    reader.keep(states, tokens, root=True)
    tree = phase.grow(logits, reader.hidden)
    return Drafted(len(tree.tokens), tree.steps, reader.lag, tree.tokens, tree)


def _grown_together(readers: Sequence[TreeReader]) -> list[Drafted]:
    """As :func:`_grown_on_device`, by one pass over all texts, and one sequence for each way in
    which requests are sampled."""
    model, grown = readers[0].model, dict[int, GrownTree]()
    alike = dict[tuple[Sampling, int], list[int]]()
    for n, reader in enumerate(readers):
        one = captured_sampling(reader.asked.context.sampling)
        alike.setdefault((one, n // TREES[-1]), []).append(n)
    phases = []
    for members in alike.values():
        some = [readers[n].asked for n in members]
        context, count = some[0].context, next(n for n in TREES if n >= len(some))
        phases.append(tree_phase(context.plan, model, context.sampling, count))
        if len(alike) == 1:  # before the pass, since it waits for nothing
            phases[0].begin(some)
    tokens = [reader.root() for reader in readers]
    ends = torch.from_numpy(np.cumsum([len(each.ids) for each in tokens]) - 1)
    ends = ends.to(model.device, non_blocking=True)
    logits, states = model.run_together(tokens, logits=1)
    hidden = states[ends]
    for members, phase in zip(alike.values(), phases, strict=True):
        if len(alike) > 1:  # they may be the same phase's
            phase.begin([readers[n].asked for n in members])
        rows = slice(None) if len(members) == len(readers) else members
        trees = phase.grow_together(logits[rows], hidden[rows])
        grown |= dict(zip(members, trees, strict=True))
    return [
        Drafted(len(tree.tokens), tree.steps, reader.lag, tree.tokens, tree)
        for reader, tree in zip(readers, (grown[n] for n in range(len(readers))), strict=True)
    ]


def _read(
    readers: Sequence[TreeReader], asked: Sequence[tuple[Growing, int]]
) -> tuple[int, list[Tensor]]:
    """One pass over the nodes that the next level of each tree hangs from. Returns their depth (0:
    the texts' ends) and by tree float32 logits [n, vocab or size]."""
    first, passes, above = readers[0], list[PassTokens](), list[Tensor | None]()
    model, shortlists, depth = first.model, first.shortlists, asked[0][0].depth
    for reader, (growing, width) in zip(readers, asked, strict=True):
        if not depth:
            passes.append(reader.root())
            continue
        tree, parents = growing.tree, None
        place = tree.place[depth, :width]
        tokens = torch.from_numpy(tree.token[np.maximum(place, 0)]).to(reader.device)
        if depth > 1:
            parents = torch.from_numpy(tree.above[depth, :width]).to(reader.device)
        above.append(parents)
        passes.append(reader.level(tokens, parents, depth))
    rows = 0 if shortlists is not None else None if depth else 1
    recurrent = bool(depth and model.feature_size)
    logits, states = model.run_together(passes, logits=rows, recurrent=recurrent)
    sizes = [len(tokens.ids) for tokens in passes]
    for reader, own, read in zip(readers, apart(states, sizes), passes, strict=True):
        reader.keep(own, read, root=not depth)
    if not depth:
        sizes = [1] * len(passes)
    if shortlists is None:
        return depth, list(apart(logits, sizes))
    if not depth:  # of each text its last token's
        ends = np.cumsum([len(tokens.ids) for tokens in passes]) - 1
        states = states[torch.from_numpy(ends).to(first.device)]
    heads, previous = model.state(states), None
    if shortlists.routed:  # one request alone
        previous = first.last
        if depth and previous is not None:
            parents = above[0]
            previous = previous.expand(sizes[0], -1) if parents is None else previous[parents]
    nodes = passes[0].ids[-sizes[0] :].to(first.device)
    support = shortlists.select(depth, nodes, previous)
    for reader, own in zip(readers, apart(heads, sizes), strict=True):
        reader.last, reader.ids = own, support.ids
    return depth, list(apart(shortlists.logits(heads, support), sizes))


def _codes(
    readers: Sequence[TreeReader], reads: Sequence[object], depth: int, rows: list[Tensor]
) -> list[Codes]:
    """Codes of distributions whose children stand at ``depth``, by tree; those that are read alike
    at once."""
    groups = dict[object, list[int]]()
    for n, reader in enumerate(readers):
        context = reader.asked.context
        if context.rejects:
            reader.log_q.append(context.log_q(rows[n], reader.ids))
        groups.setdefault((reads[n], law(context.sampling)), []).append(n)
    found = dict[int, Codes]()
    for members in groups.values():
        first = readers[members[0]]
        perturb: Perturb | None = None
        some, context = [rows[n] for n in members], first.asked.context
        logits = torch.cat(some) if len(some) > 1 else some[0]
        if context.noise is not None and len(members) == 1:
            perturb = partial(context.noise.add, positions=[first.length + depth - 1])
        elif context.noise is not None:
            perturb = _noise([readers[n] for n in members for _ in rows[n]], depth)
        rule = context.plan.rule(context.sampling)
        codes = codes_on_host(
            best_children(logits, context.sampling, perturb, rule.reads, first.ids)
        )
        begin = 0
        for n in members:
            end = begin + len(rows[n])
            found[n] = Codes(*(column[begin:end] for column in codes))
            begin = end
    return [found[n] for n in range(len(readers))]


def _noise(readers: Sequence[TreeReader], depth: int) -> Perturb:
    """Adds to each reader's row the noise of its request at ``depth`` behind its text."""
    noise = ((r.asked.context.noise, r.length + depth - 1) for r in readers)
    return NoiseRows([(one, at) for one, at in noise if one is not None]).add

"""A tree's draft phase on a device: all levels after the first pass, growth and the draft's passes,
as a sequence that is captured as one graph and waits for nothing.

A level's nodes stand in slots of its own behind the text, whether or not there is a node for each
place, so that shapes are those of the rule. The host fills in where the text ends and the noise's
keys, and reads one small tensor: the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from spectune.runtime.cache import PassTokens
from spectune.runtime.distributions import best_children, codes_on_device
from spectune.runtime.drafts.tree_program import TreeProgram, can_grow, grows_by_program
from spectune.runtime.models import upload
from spectune.runtime.policies.blocks import FixedWindow
from spectune.runtime.sampling import add_noise
from spectune.runtime.trees.draft import GrownTree
from spectune.runtime.trees.on_device import GrowingTree, grow_on_device, grown_tree
from spectune.traces.schema import Sampling

if TYPE_CHECKING:
    from spectune.runtime.drafts.protocol import DraftRequest
    from spectune.runtime.models import SlotModel
    from spectune.runtime.policies.plan import Plan
    from spectune.runtime.trees.grow import TreeRule

Key = tuple[int, int, int]
"""A sequence: the first level, the last, and the depth that the tree was begun with, where that
matters (HeteroSpec; else 0)."""
MOST_PHASES: Final = 4
"""Draft phases that a plan keeps, each of one :func:`captured_sampling`."""
DEPTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Depths that sequences are captured for, beside the longest, where windows differ by round."""


def grows_on_device(model: SlotModel, plan: Plan, *, rejects: bool) -> bool:
    """Whether trees of a plan are grown on its draft's device: where passes are captured, since
    launched one by one its operations take longer than the host. Shortlists need the host, and so
    does the rejection verifier (``rejects``), which reads the distributions."""
    return model.graphs is not None and plan.shortlist is None and not rejects


TREES: Final = (2, 4, 8, 16, 32, 64)
"""Numbers of trees that are grown at once: of fewer requests others are grown for nothing."""


def trees_together(seats: int) -> tuple[int, ...]:
    """Those of :data:`TREES` that up to ``seats`` requests need; none for one."""
    return tuple(n for at, n in enumerate(TREES) if seats > 1 and (not at or TREES[at - 1] < seats))


def grows_together(model: SlotModel, plan: Plan, rule: TreeRule, *, rejects: bool = False) -> bool:
    """Whether the trees of several requests are grown at once on a draft's device: by programs
    alone (:func:`runtime.drafts.tree_program.can_grow`)."""
    here = grows_on_device(model, plan, rejects=rejects) and model.can_join
    return here and can_grow(rule, model.device)


def captured_sampling(sampling: Sampling) -> Sampling:
    """Returns the same value for all samplings that share captured phases: what differs between
    them, the temperature (above 0) and the noise's keys, is an input."""
    return Sampling() if sampling.greedy else replace(sampling, temperature=1.0, seed=0)


def tree_phase(plan: Plan, model: SlotModel, sampling: Sampling, trees: int = 1) -> TreePhase:
    """The draft phase of a plan's trees, so many at once, made at the first call. A plan keeps the
    last few."""
    key = model, captured_sampling(sampling), trees
    phase = plan.phases.get(key)
    if phase is None or phase.states is not model.cache.states:  # a cache that grew is another
        plan.phases.pop(key, None)
        alike = [k for k in plan.phases if k[2] == trees]
        for oldest in alike[: 1 - MOST_PHASES]:
            del plan.phases[oldest]
        phase = plan.phases[key] = TreePhase(plan, *key)
    return phase


class TreePhase:
    """The levels of a plan's trees, ``trees`` at once, over one allocation of a draft's cache
    (``states``)."""

    def __init__(self, plan: Plan, model: SlotModel, sampling: Sampling, trees: int = 1) -> None:
        self.model, self.sampling, self.rule = model, sampling, plan.rule(sampling)
        self.states, self.trees, device = model.cache.states, trees, model.device
        self._window, self._depth = plan.policy.gamma_max, 0
        self._fixed = isinstance(plan.policy.window, FixedWindow)
        self.growing = GrowingTree(self.rule, plan.policy.depth_max, device)
        levels, most, capacity = self.growing.depth, max(self.growing.sizes), model.cache.capacity
        self._numbers = torch.zeros(trees, 5 + levels, dtype=torch.int64, device=device)
        """Of each the text's length as slot and as position, depth, limit, the slot from which on
        the text is seen, and the keys of the noise."""
        self._numbers[:, 0] = self._numbers[:, 4] = capacity
        self._inverse_temperature = torch.ones(trees, 1, device=device)
        self._logits = torch.zeros(trees, model.vocab_size, device=device)
        self._columns = torch.arange(capacity, device=device)
        self._mask = torch.zeros(most, capacity, dtype=torch.bool, device=device)
        """What the nodes read last saw."""
        self._hidden: Tensor | None = None
        """Of a head: its outputs there, at first of the roots, tree by tree."""
        if model.feature_size:
            shape = trees * most, model.hidden_size
            self._hidden = torch.zeros(shape, dtype=model.dtype, device=device)
        self._program: TreeProgram | None = None
        if trees > 1 or grows_by_program(self.rule, device):
            reach = capacity, model.first_slot, model.max_positions
            self._program = TreeProgram(self.growing, self._numbers, *reach, trees)
        self.captured: dict[Key, tuple[Callable[[], None], Tensor]] = {}

    def begin(self, asked: Sequence[DraftRequest]) -> None:
        """Fills in a round: of each request, as many as are grown at most, a tree of its depth
        behind its text, which HeteroSpec may extend up to its limit. Best called before the pass
        over the texts, since it waits for nothing."""
        levels, first = self.growing.depth, self.model.first_slot
        self._depth, rows = max(each.depth for each in asked), list[int]()
        for each in asked:
            length, base, noise = len(each.text), each.reading.base, each.context.noise
            keys = [0] * levels if noise is None else noise.keys(range(length, length + levels))
            rows += [base + length, length, each.depth, each.limit, base + first, *keys]
        end = len(self._columns)
        rows += [end, 0, 0, 0, end, *[0] * levels] * (self.trees - len(asked))
        upload(rows, self._numbers.view(-1))
        if not self.sampling.greedy:
            inverse = [[1.0 / each.context.sampling.temperature] for each in asked]
            self._inverse_temperature[: len(asked)].copy_(torch.tensor(inverse), non_blocking=True)

    def grow_together(self, logits: Tensor, hidden: Tensor) -> list[GrownTree]:
        """The trees of several requests. ``logits`` [n, vocab] and, of a head, its outputs
        ``hidden`` [n, hidden_size] come from the pass over their texts."""
        self._logits[: len(logits)] = logits
        if self._hidden is not None:
            self._hidden[: len(hidden)] = hidden
        rows = self._run(1, self._depth, depth=0)[: len(logits)].tolist()
        return [grown_tree(row, self.growing.sizes)[0] for row in rows]

    def grow(self, logits: Tensor, hidden: Tensor) -> GrownTree:
        """The tree. ``logits`` [1, vocab] and, of a head, its output ``hidden`` [1, hidden_size]
        come from the pass over the text."""
        self._logits.copy_(logits)
        if self._hidden is not None:
            self._hidden[:1] = hidden
        begun = self._depth if self.rule.stratified else 0
        return grow_on_device(self.growing, self._depth, partial(self._run, depth=begun))

    def _run(self, first: int, last: int, depth: int) -> Tensor:
        # A longer sequence will do: nothing is chosen from levels behind the tree's depth.
        usable = [k for k in list(self.captured) if k[1] >= last and (k[0], k[2]) == (first, depth)]
        if not usable:
            return self._levels(first, last, depth)
        replay, result = self.captured[min(usable)]
        replay()
        return result

    def capture(
        self,
        record: Callable[[Callable[[], Tensor], Tensor], tuple[Callable[[], None], Tensor] | None],
    ) -> None:
        """Captures the sequences that rounds can need, with ``record`` (None: it cannot). What is
        captured already stays."""
        for key in sorted(self._keys(), key=lambda k: k[0] - k[1]):  # the longest first
            if key not in self.captured:
                sequence = record(partial(self._levels, *key), self.states)
                if sequence is None:
                    return
                self.captured[key] = sequence

    def _keys(self) -> set[Key]:
        """What :func:`runtime.trees.on_device.grow_on_device` asks for, or what is a little longer.
        Under a fixed window only the last trees of a text are shallower; HeteroSpec's bins depend
        on the depth that a tree was begun with, so for it each is captured."""
        growing, keys = self.growing, set[Key]()
        deepest, depths = min(self._window, growing.depth), set[int]()
        if self.rule.stratified:
            depths = {*range(1, deepest)}
        elif not self._fixed:
            depths = {*DEPTHS}
        for depth in {deepest} | {d for d in depths if d < deepest}:
            begun = depth if self.rule.stratified else 0
            last = min(growing.depth, depth + self.rule.alpha if begun else depth)
            if growing.early:
                keys |= {(level, level, begun) for level in range(1, last + 1)}
            else:
                keys |= {(1, depth, begun)}
                keys |= {(depth + 1, end, begun) for end in range(depth + 1, last + 1)}
        return keys

    def _levels(self, first: int, last: int, depth: int) -> Tensor:
        """Makes levels ``first`` to ``last``, and chooses the nodes of the tree so far."""
        growing, reads, program = self.growing, self.rule.reads, self._program
        if first == 1 and program is None:
            growing.begin(self._numbers[0, 2:3], self._numbers[0, 3:4])
        for level in range(first, last + 1):
            logits, perturb = self._logits if level == 1 else self._read(level - 1), None
            if not self.sampling.greedy:
                inverse, keys = self._inverse_temperature, self._numbers[:, 4 + level, None]
                if self.trees > 1:
                    rows = growing.sizes[level - 1]
                    inverse, keys = (x.repeat_interleave(rows, 0) for x in (inverse, keys))
                logits, perturb = logits * inverse, partial(add_noise, keys=keys)
            children = best_children(logits, self.sampling, perturb, reads)
            if program is None:
                growing.add(codes_on_device(children), level, depth)
            else:
                program.add(children, level)
        return growing.choose() if program is None else program.choose(last)

    def _read(self, level: int) -> Tensor:
        """Float32 logits [n, vocab] after the nodes of a level."""
        model, program = self.model, self._program
        if program is None:
            read, above = self._nodes(level)
        elif self.trees > 1:
            read, above = program.read_together(level, model.groups)
        else:
            read, above = program.read(level)
        hidden = None if self._hidden is None else self._hidden[above]
        states, _ = model.forward(read._replace(hidden=hidden), recurrent=hidden is not None)
        if self._hidden is not None:
            self._hidden[: len(states)] = states
        return model.head(states)

    def _nodes(self, level: int) -> tuple[PassTokens, Tensor]:
        """What the pass after a level reads, and which of the places read before is above each."""
        model, growing, capacity = self.model, self.growing, len(self._columns)
        tokens, above = growing.frontier(level)
        n, begin = len(tokens), sum(growing.sizes[1:level])
        places = torch.arange(begin, begin + n, device=model.device)
        # Behind the capacity there is one slot more, where a rehearsal writes.
        slots = (self._numbers[0, :1] + places).clamp_max(capacity)
        if level == 1:
            text = (self._columns >= model.first_slot) & (self._columns < self._numbers[0, :1])
            above, mask = torch.zeros_like(above), text.expand(n, -1)
        else:
            mask = self._mask[above]
        self._mask[:n] = mask | (self._columns == slots[:, None])
        positions = (
            (self._numbers[0, 1:2] + (level - 1)).clamp_max(model.max_positions - 1).expand(n)
        )
        length = (slots[-1:] + 1).clamp_max(capacity)
        mask = self._mask[:n]
        return PassTokens(tokens, positions, slots, mask, capacity, length=length), above

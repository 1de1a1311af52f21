"""A draft's passes over a recorded text, and over what it drafts from its starts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from spectune.runtime.drafts.eagle import columns
from spectune.runtime.drafts.eagle_head import EagleHead
from spectune.runtime.loading import LoadedPair
from spectune.runtime.models import CHUNK, CausalModel
from spectune.runtime.sampling import Noise
from spectune.runtime.shortlists import Shortlists
from spectune.traces.schema import Sampling, request_seed
from spectune.traces.tables import Trajectory

ROOM: Final = 2048
"""Off-text nodes that there is room for before more is made."""


class Nodes(NamedTuple):
    """Drafted nodes that one pass reads: ``ids`` and ``positions`` int64 [n]; ``numbers`` count
    off-text nodes in the order in which they are read; ``above[i]`` lists the drafted ancestors of
    node i, nearest last; ``starts[i]`` is the text position that they hang from."""

    ids: torch.Tensor
    positions: torch.Tensor
    numbers: list[int]
    above: list[list[int]]
    starts: list[int]


class TextPasses(ABC):
    """A draft's passes over a recorded text and its off-text nodes: the text's keys and values are
    shared under a mask, drafted nodes lie behind them. ``shared``: distributions are functions of
    the prefix, whatever start they are drafted from. Under ``shortlists`` logits outside of a
    node's are -inf."""

    shared: bool
    first_slot = 0

    def __init__(
        self,
        model: CausalModel | EagleHead,
        text: list[int],
        prompt: int,
        shortlists: Shortlists | None = None,
    ) -> None:
        self.cached, self.text, self.prompt, self.device = model, text, prompt, model.device
        self.shortlists = shortlists

    @abstractmethod
    def roots(self) -> Iterator[torch.Tensor]:
        """Float32 logits [n, vocab] after the prompt and each output token, L + 1 rows in all, some
        at a time. Comes first, and whole."""

    @abstractmethod
    def nodes(self, nodes: Nodes) -> torch.Tensor:
        """Float32 logits [n, vocab] after drafted nodes."""

    def _listed(
        self,
        steps: Sequence[int],
        ids: torch.Tensor,
        previous: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [n, vocab] over shortlists, each of a draft step, for tokens ``ids``, the states
        [n, d] of the tokens before them and their own."""
        assert self.shortlists is not None
        size = len(states), self.cached.vocab_size
        rows = torch.full(size, -math.inf, device=self.device)
        for step in sorted(set(steps)):
            at = torch.tensor([n for n, one in enumerate(steps) if one == step], device=self.device)
            support = self.shortlists.select(step, ids[at], previous[at])
            rows[at[:, None], support.ids] = self.shortlists.logits(states[at], support)
        return rows

    def _reserve(self, nodes: int) -> None:
        self.cached.reserve(len(self.text) + nodes)

    def _place(self, nodes: Nodes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions and slots int64 [n] of nodes, and what they see: bool [n, view]."""
        numbers, base, device = nodes.numbers, len(self.text), self.device
        self.cached.reserve(base + numbers[-1] + 1, keep=True)
        slots = torch.tensor(numbers, device=device) + base
        mask = torch.zeros(len(numbers), base + numbers[-1] + 1, dtype=torch.bool, device=device)
        lengths = torch.tensor(nodes.starts, device=device) + self.prompt
        mask[:, :base] = torch.arange(base, device=device)[None] < lengths[:, None]
        mask[:, : self.first_slot] = False
        ancestors = [(i, base + number) for i, above in enumerate(nodes.above) for number in above]
        if ancestors:
            mask[tuple(torch.tensor(ancestors, device=device).T)] = True
        mask[torch.arange(len(numbers), device=device), slots] = True
        return nodes.positions.clamp_max(self.cached.max_positions - 1), slots, mask


class LanguageModelPasses(TextPasses):
    """A language model's passes."""

    def __init__(
        self, model: CausalModel, text: list[int], prompt: int, shortlists: Shortlists | None = None
    ) -> None:
        super().__init__(model, text, prompt, shortlists)
        self.model = model
        self.shared = shortlists is None or not shortlists.rule.by_step
        self._root_states = self._node_states = torch.zeros(0)
        """Under shortlists, the states after each start and after the drafted nodes in hand."""

    def roots(self) -> Iterator[torch.Tensor]:
        self._reserve(ROOM)
        ids = torch.tensor(self.text, device=self.device)
        last = self.model.read(ids[: self.prompt - 1], 0)
        if not len(last):
            last = last.new_zeros(1, last.shape[1])
        read = list[torch.Tensor]()
        for at in range(self.prompt - 1, len(self.text), CHUNK):
            part = ids[at : at + CHUNK]
            if self.shortlists is None:
                yield self.model.chain(part, at, logits=len(part))[0]
                continue
            states = self.model.chain(part, at, logits=0)[1].clone()
            yield self._listed([0] * len(part), part, torch.cat([last, states[:-1]]), states)
            read.append(states)
            last = states[-1:]
        if self.shortlists is not None:
            self._root_states = torch.cat(read)
            self._node_states = self._root_states[:0]

    def nodes(self, nodes: Nodes) -> torch.Tensor:
        if self.shortlists is None:
            return self.model.run(nodes.ids, *self._place(nodes))[0]
        previous = [
            self._node_states[a[-1]] if a else self._root_states[s]
            for a, s in zip(nodes.above, nodes.starts, strict=True)
        ]
        states = self.model.run(nodes.ids, *self._place(nodes), logits=0)[1]
        self._node_states = torch.cat([self._node_states[: nodes.numbers[0]], states])
        steps = [1 + len(above) for above in nodes.above]
        return self._listed(steps, nodes.ids, torch.stack(previous), states)


class HeadPasses(TextPasses):
    """A head's passes: the text with the target's features, drafted nodes with the head's own
    outputs."""

    shared = False
    first_slot = 1

    def __init__(
        self,
        target: CausalModel,
        head: EagleHead,
        text: list[int],
        prompt: int,
        shortlists: Shortlists | None = None,
    ) -> None:
        super().__init__(head, text, prompt, shortlists)
        self.target, self.head = target, head
        self._root_hidden = torch.zeros(0)
        self._hidden = torch.zeros(0)

    def roots(self) -> Iterator[torch.Tensor]:
        head, ids = self.head, torch.tensor(self.text, device=self.device)
        self.target.reserve(len(self.text) + 1)
        self.target.read(ids, 0)
        features = self.target.tapped[:, columns(self.target, head)]
        self._reserve(ROOM)
        first, outputs = max(1, self.prompt - 1), list[torch.Tensor]()
        last = torch.zeros(1, head.hidden_size, device=self.device, dtype=head.dtype)
        for at in range(1, first, CHUNK):
            stop = min(at + CHUNK, first)
            out = head.chain(ids[at:stop], at, logits=0, hidden=features[at - 1 : stop - 1])[1]
            last = head.state(out[-1:])
        for at in range(first, len(self.text), CHUNK):
            part = ids[at : at + CHUNK]
            fed = features[at - 1 : at - 1 + len(part)]
            of_all = len(part) if self.shortlists is None else 0
            rows, out = head.chain(part, at, logits=of_all, hidden=fed)
            if self.shortlists is not None:
                states = head.state(out)
                rows = self._listed([0] * len(part), part, torch.cat([last, states[:-1]]), states)
                last = states[-1:]
            if self.prompt == 1 and not outputs:
                # Nothing was read that a row after the prompt would follow; a head drafts nothing
                # there.
                rows, out = torch.cat([rows[:1], rows]), torch.cat([out[:1], out])
            outputs.append(out)
            yield rows
        hidden = torch.cat(outputs)
        self._root_hidden, self._hidden = hidden, hidden.new_zeros(0, hidden.shape[1])

    def nodes(self, nodes: Nodes) -> torch.Tensor:
        fed = torch.stack(
            [
                self._hidden[a[-1]] if a else self._root_hidden[s]
                for a, s in zip(nodes.above, nodes.starts, strict=True)
            ]
        )
        logits = None if self.shortlists is None else 0
        rows, out = self.head.run(
            nodes.ids, *self._place(nodes), logits=logits, hidden=fed, recurrent=True
        )
        self._hidden = torch.cat([self._hidden[: nodes.numbers[0]], out])
        if self.shortlists is None:
            return rows
        steps = [1 + len(above) for above in nodes.above]
        return self._listed(steps, nodes.ids, self.head.state(fed), self.head.state(out))


class RecordedText:
    """One recorded text as a panorama pass reads it: ``output`` follows the first ``prompt`` tokens
    of ``text``, ``noise`` is the target's (None: greedy), ``passes`` are the draft's, under the
    ``shortlists`` of a policy."""

    def __init__(
        self,
        pair: LoadedPair,
        trajectory: Trajectory,
        draft: str,
        shortlists: Shortlists | None = None,
    ) -> None:
        self.sampling = Sampling() if trajectory.verifier == "greedy" else trajectory.sampling
        self.output: list[int] = trajectory.output_ids.tolist()
        self.text = [*trajectory.prompt_ids.tolist(), *self.output]
        self.prompt = len(trajectory.prompt_ids)
        self.passes: TextPasses
        if draft in pair.heads:
            head = pair.heads[draft]
            self.passes = HeadPasses(pair.target, head, self.text, self.prompt, shortlists)
        else:
            model = pair.drafts[draft]
            self.passes = LanguageModelPasses(model, self.text, self.prompt, shortlists)
        self.shared = self.passes.shared
        seed = request_seed(self.sampling.seed, trajectory.request_id)
        vocab, device = pair.target.vocab_size, pair.target.device
        self.noise = None if self.sampling.greedy else Noise(seed, vocab, device)

"""A draft's distributions over recorded texts and drafted nodes, unrestricted: the states that its
output matrix reads, and what it prefers to a text's next token where no recorded child says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from spectune.optimizer.simulate.shortlist_ranks import UNKNOWN_CODE
from spectune.runtime.drafts.eagle import columns
from spectune.runtime.loading import LoadedPair
from spectune.runtime.models import CHUNK
from spectune.runtime.recording.panoramas import ROWS
from spectune.runtime.recording.passes import HeadPasses, LanguageModelPasses, Nodes
from spectune.runtime.sampling import Noise, filters, log_distribution, scaled
from spectune.traces.schema import NAT_SCALE, Sampling, request_seed
from spectune.traces.tables import Panorama, Trajectory


class _LanguageModelStates(LanguageModelPasses):
    """A draft's states over one text and drafted nodes: what its output matrix reads."""

    def text_states(self) -> Tensor:
        """After every token of the text, [tokens, d]; zeros where the draft reads nothing."""
        self._reserve(ROWS)
        ids = torch.tensor(self.text, device=self.device)
        starts = range(0, len(ids), CHUNK)
        return torch.cat([self.model.chain(ids[at : at + CHUNK], at, logits=0)[1] for at in starts])

    def node_states(self, nodes: Nodes) -> Tensor:
        """After drafted nodes, [n, d]."""
        return self.model.run(nodes.ids, *self._place(nodes), logits=0)[1]


class _HeadStates(HeadPasses):
    """The same of a head."""

    def text_states(self) -> Tensor:
        head, ids = self.head, torch.tensor(self.text, device=self.device)
        self.target.reserve(len(ids))
        self._reserve(ROWS)
        out = torch.zeros(1, head.hidden_size, device=self.device, dtype=head.dtype)
        if len(ids) > 1:
            self.target.read(ids[:-1], 0)
            features = self.target.tapped[:, columns(self.target, head)]
            parts = [
                head.chain(
                    ids[at : at + CHUNK], at, logits=0, hidden=features[at - 1 : at + CHUNK - 1]
                )[1]
                for at in range(1, len(ids), CHUNK)
            ]
            out = torch.cat([out, *parts])
        self._root_hidden, self._hidden = out[self.prompt - 1 :], out.new_zeros(0, out.shape[1])
        return torch.cat([out[:1], head.state(out[1:])])

    def node_states(self, nodes: Nodes) -> Tensor:
        return self.head.state(self._read(nodes, logits=0)[1])


def states_over(
    pair: LoadedPair, draft: str, text: list[int], prompt: int
) -> _LanguageModelStates | _HeadStates:
    """The states of a draft over a text whose first ``prompt`` tokens are its prompt. A head reads
    the target's features; its first row is zeros."""
    if draft in pair.heads:
        return _HeadStates(pair.target, pair.heads[draft], text, prompt)
    return _LanguageModelStates(pair.drafts[draft], text, prompt)


GROUP: Final = 16
"""Starts whose drafted nodes are read together, so that what a pass sees stays short."""


class ReadText:
    """One request as a draft reads it: its text of ``roots`` starts, and on demand the nodes of its
    panorama."""

    def __init__(
        self, pair: LoadedPair, draft: str, trajectory: Trajectory, panorama: Panorama
    ) -> None:
        self.trajectory, self.panorama = trajectory, panorama
        self.prompt, self.roots = len(trajectory.prompt_ids), len(trajectory.output_ids) + 1
        self.text = [*trajectory.prompt_ids.tolist(), *trajectory.output_ids.tolist()]
        self.reader = states_over(pair, draft, self.text, self.prompt)
        self._whole = self.reader.text_states()
        self.states = self._whole[self.prompt - 1 :]
        """After each start's tokens, [roots, d]."""
        self.following = np.append(trajectory.output_ids.astype(np.int64), -1)
        """The text's next token at each start, int64 [roots]; -1: none."""

    @cached_property
    def tokens(self) -> Tensor:
        """The last token of every start and of every drafted node, int64 [N]."""
        last = np.array(self.text[self.prompt - 1 :], np.int64)
        return torch.from_numpy(np.concatenate([last, self._drafted])).to(self.states.device)

    @cached_property
    def before(self) -> Tensor:
        """The states before these tokens, [N, d]; zeros before the first token of a text."""
        after = functional.pad(self._whole, (0, 0, 1, 0))  # row p: after the first p tokens
        return torch.cat([after[self.prompt - 1 : -1], self._before_drafted()])

    @cached_property
    def _drafted(self) -> npt.NDArray[np.int64]:
        """Tokens of the drafted nodes."""
        p = self.panorama.trie
        return np.asarray(p.tokens[p.parent, p.slot], np.int64)

    def _before_drafted(self) -> Tensor:
        """The states before drafted nodes, that is after their parents, [M, d]. Nodes without
        children are not read."""
        first, device = self.roots, self.states.device
        parent = self.panorama.trie.parent.astype(np.int64)
        inner = np.unique(parent[parent >= first]) - first
        start, depth = np.zeros((2, len(parent)), np.int64)
        for i, p in enumerate(parent.tolist()):
            start[i], depth[i] = (p, 1) if p < first else (start[p - first], depth[p - first] + 1)
        row = np.full(first + len(parent), -1, np.int64)
        row[:first] = np.arange(first)
        parts, known = [self.states], first
        for group in range(0, first, GROUP):
            mine = inner[(start[inner] >= group) & (start[inner] < group + GROUP)]
            mine = mine[np.argsort(depth[mine], kind="stable")]
            number = {int(node): n for n, node in enumerate(mine)}
            for level in np.unique(depth[mine]).tolist():
                level_nodes = mine[depth[mine] == level]
                for at in range(0, len(level_nodes), ROWS):
                    nodes = level_nodes[at : at + ROWS]
                    above = [[number[a] for a in _above(int(n), parent, first)] for n in nodes]
                    where = torch.from_numpy(self.prompt - 1 + start[nodes] + depth[nodes])
                    ids = torch.from_numpy(self._drafted[nodes])
                    numbers, starts = [number[int(n)] for n in nodes], start[nodes].tolist()
                    some = Nodes(ids.to(device), where.to(device), numbers, above, starts)
                    parts.append(self.reader.node_states(some))
                    row[first + nodes] = known + np.arange(len(nodes))
                    known += len(nodes)
        return torch.cat(parts)[torch.from_numpy(row[parent]).to(device)]


def _above(node: int, parent: npt.NDArray[np.int64], first: int) -> list[int]:
    """The drafted ancestors of a drafted node, nearest last; all counted from the first drafted
    one."""
    found = []
    while (node := int(parent[node]) - first) >= 0:
        found.append(node)
    return found[::-1]


def _code(nats: npt.NDArray[np.floating]) -> npt.NDArray[np.uint16]:
    """1/256 nat, as far as 16 bits hold."""
    codes = np.rint(np.nan_to_num(nats * NAT_SCALE, posinf=UNKNOWN_CODE))
    return np.asarray(codes.clip(0, UNKNOWN_CODE), np.uint16)


class WholeDistributions:
    """What a draft of a pair proposes without a shortlist. ``ids`` int64 [rows]: the tokens of its
    output head, ``row`` int64 [vocab] the rows of the target's tokens (-1: none)."""

    def __init__(self, pair: LoadedPair, draft: str) -> None:
        self.pair, self.draft, self.output = pair, draft, pair.models[draft].output
        self.ids: npt.NDArray[np.int64] = self.output.ids
        self.row = np.full(pair.target.vocab_size, -1, np.int64)
        self.row[self.ids] = np.arange(self.output.rows)

    def logits(self, states: Tensor) -> Tensor:
        """Float32 [n, rows] of states [n, d]."""
        return functional.linear(states, self.output.weight, self.output.bias).float()

    def codes(
        self,
        logits: Tensor,
        sampling: Sampling,
        following: npt.NDArray[np.int64],
        columns: Sequence[int],
        order: Callable[[Tensor], Tensor],
    ) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
        """What stops read of distributions restricted to shortlists, ``text_code``, ``mass_code``
        and ``entropy_code`` of :class:`optimizer.simulate.shortlist_ranks.Ranks`: of ``logits`` [n,
        rows], with ``following`` int64 [n] the texts' next tokens (-1: none). ``order`` turns
        values of rows [n, rows] into those of ranked tokens or clusters [n, most], best first; the
        first ``columns`` + 1 of them are a shortlist."""
        log_q = log_distribution(logits, sampling, draft=True)
        row = np.where(following >= 0, self.row[following], -1)
        own = log_q[np.arange(len(row)), np.maximum(row, 0)].cpu().numpy()
        at = torch.tensor(columns, device=log_q.device)
        mass, part = (
            order(values).cumsum(1).index_select(1, at)
            for values in (log_q.exp(), torch.special.entr(log_q.exp()))
        )
        mass = mass.clamp_min(1e-30)
        return (
            np.where(row >= 0, _code(-own), UNKNOWN_CODE).astype(np.uint16),
            _code(-mass.log().cpu().numpy()),
            _code((part / mass + mass.log()).cpu().numpy()),
        )

    def better(self, read: ReadText, logits: Tensor, start: int) -> npt.NDArray[np.bool_] | None:
        """Rows whose tokens are better than the text's next one after ``start`` output tokens,
        where that is none of the recorded children, bool [rows]; ``logits`` [rows]. All for a token
        that the head lacks. None, where filters leave unsaid what the draft would propose."""
        trajectory, sampling = read.trajectory, read.trajectory.sampling
        vocab = self.pair.target.vocab_size
        if filters(sampling, vocab):
            return None
        token = int(trajectory.output_ids[start])
        row = int(self.row[token])
        if row < 0:
            return np.ones(len(self.ids), np.bool_)
        x = self._perturbed(logits, start, trajectory)
        above = x > x[row]
        above[:row] |= x[:row] == x[row]
        return np.asarray(above.cpu().numpy())

    def _perturbed(self, logits: Tensor, start: int, trajectory: Trajectory) -> Tensor:
        """What proposals are ranked by, [rows]: log q + g but for a constant."""
        x = scaled(logits, trajectory.sampling)
        if trajectory.sampling.greedy:
            return x
        seed = request_seed(trajectory.sampling.seed, trajectory.request_id)
        noise = Noise(seed, self.pair.target.vocab_size, logits.device).row(
            len(trajectory.prompt_ids) + start
        )
        return x + noise.index_select(0, torch.from_numpy(self.ids).to(logits.device))

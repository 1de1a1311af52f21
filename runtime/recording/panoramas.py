"""The panorama pass: every distribution that a draft can read, from every start of a recorded text.

Chains and EAGLE-2's trees are *run*, all starts at once, by the functions that decode with them
(:class:`runtime.trees.grow.Growing`); what any of them expands is read once. A distribution is a
function of its prefix (a head's: of its start and prefix), so starts share nodes: what one start
reads off the text, the next one finds read. What another growth reads beyond that is read when a
replay lacks it (:func:`extend_panorama`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch

from spectune.runtime.distributions import best_children, codes_on_host
from spectune.runtime.drafts.ngram import NgramIndex
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import TopKGrowth
from spectune.runtime.policies.rules import ShortlistRule
from spectune.runtime.recording.text_passes import LanguageModelPasses, Nodes, RecordedText
from spectune.runtime.sampling import log_distribution
from spectune.runtime.shortlists import Shortlists
from spectune.runtime.trees.grow import CODE_DTYPES, NONE, Codes, Growing, Reads, TreeRule
from spectune.traces.errors import TraceError
from spectune.traces.schema import OFF_TEXT, PROB_SCALE, Trie
from spectune.traces.tables import Panorama, Trajectory

GROUP: Final = 8
"""Starts of a head grown together."""
ROWS: Final = 256
"""Nodes read in one pass."""

_DTYPES: Final = {
    **dict(zip(Codes._fields, CODE_DTYPES, strict=True)),
    **{"text_slot": np.uint8, "parent": np.int32, "slot": np.uint8},
    **{"position": np.int32, "child": np.int32},
}
"""Columns over nodes, or over nodes and children (:data:`_OF_CHILDREN`)."""
_OF_CHILDREN: Final = ("tokens", "logp", "gap", "child")
_UNREAD: Final = {"text_slot": OFF_TEXT, "parent": -1, "child": -1}
"""What stands where none was read; 0 in the other columns."""


class RecordedGrowth(NamedTuple):
    """A growth whose every distribution is recorded, to its ``depth``."""

    rule: TreeRule
    depth: int


def recorded_growths(
    gamma_max: int, width: int, depth: int, *, sampled: bool
) -> list[RecordedGrowth]:
    """Chains of ``gamma_max``, and EAGLE-2's growth at ``width`` with its default score."""
    growths = [RecordedGrowth(TreeRule(1, 1), max(gamma_max, depth))]
    if width > 1:
        sharpness = TopKGrowth().sharpness
        growths.append(RecordedGrowth(TreeRule(width, width, sampled, sharpness), depth))
    return growths


def record_panorama(
    pair: LoadedPair,
    trajectory: Trajectory,
    draft: str,
    gamma_max: int,
    width: int = 1,
    depth: int = 1,
) -> Panorama:
    """Returns what one draft would propose along one trajectory: chains of ``gamma_max`` tokens,
    and the distributions of EAGLE-2's trees of ``width`` and ``depth``.

    ``draft`` is one of the pair's or ``ngram``, of which there are chains alone. A language model's
    acceptance probabilities cost one pass of the target; they are recorded above temperature 0,
    where the text was drawn here."""
    if draft == "ngram":
        return _ngram_panorama(trajectory, gamma_max)
    sampled = not trajectory.sampling.greedy and trajectory.verifier != "greedy"
    growths = recorded_growths(gamma_max, width, depth, sampled=sampled)
    made = _recorded(pair, trajectory, draft, growths, width)
    return replace(made, gamma_max=max(gamma_max, depth), depth=depth)


def record_shortlisted(
    pair: LoadedPair,
    trajectory: Trajectory,
    rule: ShortlistRule,
    name: str,
    gamma_max: int,
    width: int = 1,
    growth: RecordedGrowth | None = None,
) -> Panorama:
    """Returns what a draft would propose under a policy's shortlist, as a draft of its own with a
    ``name``, by the runtime's own passes over a part of its output head: chains of ``gamma_max``
    tokens, and a ``growth`` of at most ``width`` children a node.

    Raises TraceError for a text of the ``rejection`` verifier where budgets depend on the draft
    step: its chance of a token is not a function of the prefix."""
    drawn = trajectory.verifier == "rejection" and not trajectory.sampling.greedy
    if drawn and rule.by_step:
        raise TraceError(
            "shortlist: a budget that depends on the draft step cannot be replayed on texts of the "
            "rejection verifier; use kind frequency, or record with the coupled verifier"
        )
    growths = [RecordedGrowth(TreeRule(1, 1), gamma_max), *([growth] if growth else [])]
    shortlists = Shortlists(rule, pair.models[rule.draft])
    made = _recorded(pair, trajectory, rule.draft, growths, width, shortlists)
    return replace(made, draft=name, gamma_max=gamma_max)


def _recorded(
    pair: LoadedPair,
    trajectory: Trajectory,
    draft: str,
    growths: Sequence[RecordedGrowth],
    width: int,
    shortlists: Shortlists | None = None,
) -> Panorama:
    """Every distribution that growths read, the first of which are chains."""
    text = _Recorder(pair, trajectory, draft, width, shortlists)
    sampled = not text.sampling.greedy
    # What a shortlist gets accepted under rejection is asked on texts of that verifier alone.
    verifiers = ("coupled", "rejection") if shortlists is None else ("rejection",)
    drawn = text.shared and sampled and trajectory.verifier in verifiers
    accept = text.read_roots(pair if drawn else None)
    # Starts that share no nodes are taken a few at a time, so that what a pass sees stays short.
    starts, group = np.arange(len(text.output)), len(text.output) if text.shared else GROUP
    room = pair.context([draft]).positions - text.prompt
    budgets = min(trajectory.max_new_tokens - 1, room) - starts
    for at in range(0, len(starts), max(1, group)):
        text.grow(growths, starts[at : at + group], budgets[at : at + group])
    return Panorama(
        draft=draft,
        gamma_max=growths[0].depth,
        width=width,
        depth=1,
        shared=text.shared,
        trie=text.trie(accept),
    )


def extend_panorama(
    pair: LoadedPair,
    trajectory: Trajectory,
    panorama: Panorama,
    parents: np.ndarray,
    slots: np.ndarray,
    rule: ShortlistRule | None = None,
) -> Panorama:
    """Returns a panorama with more distributions: after the child in each of ``slots`` int64 [n] of
    the nodes ``parents`` int64 [n]. Those that it holds, or that lie beyond the draft's context,
    are left out. ``rule``: the shortlist of the draft."""
    draft = panorama.draft if rule is None else rule.draft
    shortlists = None if rule is None else Shortlists(rule, pair.models[draft])
    text = _Recorder(pair, trajectory, draft, panorama.width, shortlists)
    text.resume(panorama)
    depth = text.columns["position"][parents] + 1 + text.prompt
    fits = depth < pair.context([draft]).positions
    text.read(parents[fits], slots[fits])
    return replace(panorama, trie=text.trie(panorama.trie.accept))


def _ngram_panorama(trajectory: Trajectory, gamma_max: int) -> Panorama:
    """Chains of prompt lookup, whose proposals are certain: all codes are 0."""
    index, output = NgramIndex(), trajectory.output_ids.tolist()
    index.extend(trajectory.prompt_ids.tolist())
    proposals: list[int | None] = []
    branches: list[tuple[int, list[int | None]]] = []
    for root, following in enumerate([*output, -1]):
        proposals.append(index.propose())
        if proposals[root] not in (None, following):
            behind = [*index.continuation(gamma_max)[1:], None]
            branches.append((root, behind[: gamma_max - 1]))
        index.extend([following])
    text_slot = [0 if p == t else OFF_TEXT for p, t in zip(proposals, [*output, None], strict=True)]
    parent: list[int] = []
    for root, behind in branches:
        first = len(proposals)
        parent += [root, *range(first, first + len(behind) - 1)][: len(behind)]
        proposals += behind
    n, m = len(proposals), len(parent)
    none = np.zeros(n, np.uint16)
    return Panorama(
        draft="ngram",
        gamma_max=gamma_max,
        width=1,
        depth=1,
        shared=True,
        trie=Trie(
            parent=np.array(parent, np.int32),
            slot=np.zeros(m, np.uint8),
            tokens=np.array([p or 0 for p in proposals], np.int32)[:, None],
            logp=none[:, None],
            gap=none[:, None],
            count=np.array([p is not None for p in proposals], np.uint8),
            entropy=none,
            top_entropy=none,
            text_slot=np.array([*text_slot, *[OFF_TEXT] * m], np.uint8),
            accept=none[:0],
        ),
    )


class _Recorder(RecordedText):
    """The distributions read so far of one text, a node each, in columns; the first ``roots`` nodes
    are the text's own prefixes. ``child`` [n, k] numbers the nodes below, -1: not read."""

    def __init__(
        self,
        pair: LoadedPair,
        trajectory: Trajectory,
        draft: str,
        width: int,
        shortlists: Shortlists | None = None,
    ) -> None:
        super().__init__(pair, trajectory, draft, shortlists)
        self.width = width
        self._every = None
        if shortlists is not None:  # a shortlist may hold fewer tokens than children are read
            self._every = torch.arange(pair.target.vocab_size, device=pair.device)
        self.roots = self.n = len(self.output) + 1
        self._cached: dict[int, int] = {}
        """The place of each node off the text among those that the passes have read."""
        self.columns: dict[str, np.ndarray] = {
            name: np.full(
                (16 * self.roots, width)[: 1 + (name in _OF_CHILDREN)], _UNREAD.get(name, 0), dtype
            )
            for name, dtype in _DTYPES.items()
        }

    def read_roots(self, pair: LoadedPair | None) -> np.ndarray:
        """Reads the distributions after every prefix of the text. With a ``pair`` returns
        :attr:`Trie.accept`, [0] without."""
        c, at, log_q = self.columns, 0, [torch.zeros(0)]
        for part in (rows for logits in self.passes.roots() for rows in torch.split(logits, ROWS)):
            numbers = np.arange(at, at + len(part))
            log_q += [self._log_of_text(part, at)] if pair is not None else []
            at += len(part)
            c["position"][numbers] = numbers
            self._store(numbers, part, np.ones(len(numbers), bool))
        if self.shared:
            rows = np.flatnonzero(c["text_slot"][: self.roots - 1] != OFF_TEXT)
            c["child"][rows, c["text_slot"][rows]] = rows + 1
        if pair is None:
            return np.zeros(0, np.uint16)
        at, log_p = 0, [torch.zeros(0)]
        for part in LanguageModelPasses(pair.target, self.text, self.prompt).roots():
            log_p.append(self._log_of_text(part, at))
            at += len(part)
        chance = (torch.cat(log_q) - torch.cat(log_p)).exp().clamp(0, 1)
        return (chance * PROB_SCALE).round().numpy().astype(np.uint16)

    def _log_of_text(self, logits: torch.Tensor, first: int) -> torch.Tensor:
        """Log-probabilities of the text's tokens by rows of logits, which come after ``first``
        output tokens and more."""
        ids = torch.tensor(self.output[first : first + len(logits)], device=logits.device)
        log = log_distribution(logits[: len(ids)], self.sampling)
        return log.gather(-1, ids[:, None])[:, 0].cpu()

    def resume(self, panorama: Panorama) -> None:
        """Takes a panorama's distributions as read, and puts the passes where roots are read."""
        for _ in self.passes.roots():
            pass
        trie, roots = panorama.trie, self.roots
        self.n = len(trie.count)
        self._reserve(self.n)
        columns = self.columns
        for name in (*Codes._fields, "text_slot"):
            columns[name][: self.n] = getattr(trie, name)
        columns["parent"][roots : self.n], columns["slot"][roots : self.n] = trie.parent, trie.slot
        columns["child"][: self.n] = panorama.children
        position = columns["position"]
        position[:roots] = np.arange(roots)
        for node, parent in enumerate(trie.parent.tolist(), start=roots):
            position[node] = position[parent] + 1

    def read(self, parents: np.ndarray, slots: np.ndarray) -> None:
        """Reads the nodes below ``parents`` in ``slots`` after the drafted ones that they need."""
        above = {node for parent in set(parents.tolist()) for node in self._path(parent)[0]}
        by_depth: dict[int, list[int]] = {}
        for node in sorted(above):
            by_depth.setdefault(len(self._path(node)[0]), []).append(node)
        for _, nodes in sorted(by_depth.items()):
            for at in range(0, len(nodes), ROWS):
                self._forward(np.array(nodes[at : at + ROWS]))
        self._read(*np.unique(np.stack([parents, slots]), axis=1))

    def trie(self, accept: np.ndarray) -> Trie:
        """What was read so far."""
        n, columns = self.n, self.columns
        return Trie(
            **{name: columns[name][self.roots : n].copy() for name in ("parent", "slot")},
            **{name: columns[name][:n].copy() for name in (*Codes._fields, "text_slot")},
            accept=accept,
        )

    def grow(
        self, growths: Sequence[RecordedGrowth], starts: np.ndarray, budgets: np.ndarray
    ) -> None:
        """Runs every growth over some starts, reading what none has read; ``budgets``: tokens that
        a round may draft from each."""
        self._cached = {}
        # Chains go deeper than trees. They come first, while what a pass sees is short.
        for growth in growths:
            self._grow(growth, starts, budgets)

    def _grow(self, growth: RecordedGrowth, starts: np.ndarray, budgets: np.ndarray) -> None:
        """Runs a growth level by level."""
        depth = growth.rule.levels(growth.depth)
        growing, front = Growing(growth.rule, depth, len(starts)), starts[:, None]
        for level in range(1, 1 + depth):
            growing.add_from(Codes(*(self.columns[x] for x in Codes._fields)), front)
            trees = growing.trees
            place, above, rank = (
                x[:, level, : trees.frontier[0, level]]
                for x in (trees.place, trees.above, trees.rank)
            )
            # The distributions of this frontier are read only if another level follows within the
            # growth and the token budget.
            live = (place != NONE) & (budgets > level)[:, None] & (level < depth)
            parent = np.take_along_axis(front, above, 1)
            key = np.where(live, parent * self.width + rank, -1)
            keys = np.unique(key)
            self._read(*np.divmod(keys[keys >= 0], self.width))
            child = self.columns["child"][np.divmod(key, self.width)]
            front = np.where(key >= 0, child, -1).astype(np.int64)

    def _read(self, parents: np.ndarray, slots: np.ndarray) -> None:
        """Reads the nodes below ``parents`` in ``slots`` that have not been read."""
        new = self.columns["child"][parents, slots] < 0
        parents, slots = parents[new], slots[new]
        for at in range(0, len(parents), ROWS):
            self._read_batch(parents[at : at + ROWS], slots[at : at + ROWS])

    def _reserve(self, nodes: int) -> None:
        """Makes room for so many nodes."""
        while nodes > len(self.columns["count"]):
            self.columns = {
                name: np.concatenate([x, np.full_like(x, _UNREAD.get(name, 0))])
                for name, x in self.columns.items()
            }

    def _read_batch(self, parents: np.ndarray, slots: np.ndarray) -> None:
        numbers = np.arange(self.n, self.n + len(parents))
        self.n += len(parents)
        self._reserve(self.n)
        c = self.columns
        c["parent"][numbers], c["slot"][numbers] = parents, slots
        c["position"][numbers] = c["position"][parents] + 1
        c["child"][parents, slots] = numbers
        on_text = (c["text_slot"][parents] == slots) & (c["text_slot"][parents] != OFF_TEXT)
        self._store(numbers, self._forward(numbers), on_text)

    def _forward(self, numbers: np.ndarray) -> torch.Tensor:
        """Logits after nodes whose drafted ancestors were passed through before."""
        c = self.columns
        parents, slots = c["parent"][numbers], c["slot"][numbers]
        places = range(len(self._cached), len(self._cached) + len(numbers))
        self._cached.update(zip(numbers.tolist(), places, strict=True))
        paths, starts = zip(*(self._path(number) for number in numbers.tolist()), strict=True)
        ids, positions = (
            torch.from_numpy(x.astype(np.int64)).to(self.passes.device)
            for x in (c["tokens"][parents, slots], c["position"][numbers] + self.prompt - 1)
        )
        above = [[self._cached[node] for node in path[:-1]] for path in paths]
        return self.passes.nodes(Nodes(ids, positions, list(places), above, list(starts)))

    def _path(self, node: int) -> tuple[list[int], int]:
        """The drafted nodes down to a node, itself included, and the start they hang from."""
        path: list[int] = []
        while node >= self.roots:
            path.append(node)
            node = int(self.columns["parent"][node])
        return path[::-1], node

    def _store(self, numbers: np.ndarray, logits: torch.Tensor, on_text: np.ndarray) -> None:
        c, position = self.columns, self.columns["position"][numbers]
        codes = self._distributions(logits, numbers)
        for name, values in codes._asdict().items():
            c[name][numbers] = values
        following = np.append(self.output, -1)[np.where(on_text, position, -1)]
        exists = np.arange(self.width) < codes.count[:, None]
        hit = (codes.tokens == following[:, None]) & exists
        c["text_slot"][numbers] = np.where(hit.any(1), hit.argmax(1), OFF_TEXT)

    def _distributions(self, logits: torch.Tensor, numbers: np.ndarray) -> Codes:
        perturb = None
        if self.noise is not None:
            positions = (self.columns["position"][numbers] + self.prompt).tolist()
            perturb = partial(self.noise.add, positions=positions)
        grows = self.width > 1  # no chain reads the others
        reads = Reads(self.width, gap=grows, top_entropy=grows)
        return codes_on_host(best_children(logits, self.sampling, perturb, reads, self._every))

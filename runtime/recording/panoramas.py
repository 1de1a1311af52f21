"""The panorama pass: every distribution that a draft can read, from every start of a recorded text.

Chains and the covered growths of trees are *run*, all starts at once, by the functions that decode
with them (:class:`runtime.trees.grow.Growing`); what any of them expands is read once. A
distribution is a function of its prefix (a head's: of its start and prefix), so starts share nodes:
what one start reads off the text, the next one finds read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from spectune.runtime.distributions import best_children, codes_on_host
from spectune.runtime.drafts.ngram import NgramIndex
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import (
    ChainGrowth,
    ClassifierGrowth,
    Growth,
    StaticGrowth,
    TopKGrowth,
)
from spectune.runtime.recording.passes import LanguageModelPasses, Nodes, RecordedText
from spectune.runtime.sampling import log_distribution
from spectune.runtime.trees.grow import CODE_DTYPES, NONE, Codes, Growing, Reads, TreeRule
from spectune.traces.schema import ACCEPTANCE, OFF_TEXT, PROB_SCALE, Trie
from spectune.traces.tables import Panorama, Trajectory

GROUP: Final = 8
"""Starts of a head grown together."""
ROWS: Final = 256
"""Nodes read in one pass."""
SHARPNESSES: Final = (1.5, 3.0)
"""Sharpnesses of the coupled score that every recording of trees covers."""


_DTYPES: Final = {
    **dict(zip(Codes._fields, CODE_DTYPES, strict=True)),
    **{"text_slot": np.uint8, "parent": np.int32, "slot": np.uint8},
    **{"position": np.int32, "child": np.int32},
}
"""Columns over nodes, or over nodes and children (:data:`_OF_CHILDREN`)."""
_OF_CHILDREN: Final = ("tokens", "logp", "gap", "child")
_UNREAD: Final = {"text_slot": OFF_TEXT, "parent": -1, "child": -1}
"""What stands where none was read; 0 in the other columns."""


class Cover(NamedTuple):
    """One growth whose every distribution is to be recorded, to its ``depth``."""

    name: str
    rule: TreeRule
    depth: int


def cover_name(growth: Growth, *, sampled: bool) -> str:
    """What tells one covered growth from another: everything that decides which distributions it
    reads."""
    data: dict[str, Any]
    if isinstance(growth, StaticGrowth):
        data = {"kind": "static", "paths": growth.paths or growth.artifact}
    elif isinstance(growth, ClassifierGrowth):
        # Its expansion follows the classifier alone; the score only selects.
        data = growth.model_dump(include={"kind", "width", "cap", "artifact", "beta"})
    elif isinstance(growth, ChainGrowth) or growth.width == 1:
        data = {"kind": "top_k", "width": 1}
    else:
        coupled = growth.is_coupled(sampled=sampled)
        score = f"coupled({growth.sharpness:g})" if coupled else "probability"
        data = {"kind": "top_k", "width": growth.width, "score": score}
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def base_covers(gamma_max: int, width: int, depth: int, *, sampled: bool) -> list[Cover]:
    """Chains of ``gamma_max``, and EAGLE-2's growth at every width up to ``width``: ranked by
    probability where that is the default score, and by the coupled score at each of
    ``SHARPNESSES``."""
    scores: list[tuple[Literal["probability", "coupled"], float]] = []
    if not sampled:
        scores.append(("probability", SHARPNESSES[0]))
    scores += [("coupled", sharpness) for sharpness in SHARPNESSES]
    chains = cover_name(ChainGrowth(), sampled=sampled)
    covers = [Cover(chains, TreeRule(1, 1), max(gamma_max, depth))]
    for w in range(2, width + 1):
        for score, sharpness in scores:
            growth = TopKGrowth(width=w, score=score, sharpness=sharpness)
            rule = TreeRule(w, w, score == "coupled", sharpness)
            covers.append(Cover(cover_name(growth, sampled=sampled), rule, depth))
    return covers


def record_panorama(
    pair: LoadedPair,
    trajectory: Trajectory,
    draft: str,
    gamma_max: int,
    width: int = 1,
    depth: int = 1,
    covers: Sequence[Cover] = (),
) -> Panorama:
    """What one draft would propose along one trajectory, recorded now or long ago ("retrace"):
    chains of ``gamma_max``; EAGLE-2's trees of every width up to ``width``, ``depth`` levels deep;
    the growths of ``covers``.

    ``draft`` is one of the pair's or ``ngram``, of which there are chains alone. A language model's
    acceptance probabilities cost one pass of the target; they are recorded where the verifier was
    ``rejection`` above temperature 0."""
    if draft == "ngram":
        return _ngram_panorama(trajectory, gamma_max)
    text = _Recorder(pair, trajectory, draft, width)
    sampled = not text.sampling.greedy
    growths = [*base_covers(gamma_max, width, depth, sampled=sampled), *covers]
    drawn = text.shared and sampled and trajectory.verifier == "rejection"
    accept = text.read_roots(pair if drawn else None)
    # Starts that share no nodes are taken a few at a time, so that what a pass sees stays short.
    starts, group = np.arange(len(text.output)), len(text.output) if text.shared else GROUP
    room = pair.context([draft]).positions - text.prompt
    budgets = min(trajectory.max_new_tokens - 1, room) - starts
    for at in range(0, len(starts), max(1, group)):
        text.grow(growths, starts[at : at + group], budgets[at : at + group])
    n, roots, columns = text.n, text.roots, text.columns
    names = {cover.name for cover in growths} | ({ACCEPTANCE} if drawn else set())
    return Panorama(
        draft=draft,
        gamma_max=max(gamma_max, depth),
        width=width,
        depth=depth,
        shared=text.shared,
        covers=tuple(sorted(names)),
        trie=Trie(
            **{name: columns[name][roots:n].copy() for name in ("parent", "slot")},
            **{name: columns[name][:n].copy() for name in (*Codes._fields, "text_slot")},
            accept=accept,
        ),
    )


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
        covers=(cover_name(ChainGrowth(), sampled=False),),
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

    def __init__(self, pair: LoadedPair, trajectory: Trajectory, draft: str, width: int) -> None:
        super().__init__(pair, trajectory, draft)
        self.width = width
        self.roots = self.n = self._first = len(self.output) + 1
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

    def grow(self, covers: Sequence[Cover], starts: np.ndarray, budgets: np.ndarray) -> None:
        """Runs every cover over some starts, reading what none has read; ``budgets``: tokens that a
        round may draft from each."""
        self._first = self.n
        # Chains go deeper than trees. They come first, while what a pass sees is short.
        for some in (covers[:1], covers[1:]):
            if some:
                self._grow(some, starts, budgets)

    def _grow(self, covers: Sequence[Cover], starts: np.ndarray, budgets: np.ndarray) -> None:
        """Runs covers level by level."""
        growing = [Growing(cover.rule, cover.depth, len(starts)) for cover in covers]
        fronts = [starts[:, None]] * len(covers)
        for level in range(1, 1 + max(cover.depth for cover in covers)):
            keys: dict[int, np.ndarray] = {}
            for i, (cover, grown) in enumerate(zip(covers, growing, strict=True)):
                if level > cover.depth or (cover.rule.static and level > len(cover.rule.static)):
                    continue
                grown.add_from(Codes(*(self.columns[x] for x in Codes._fields)), fronts[i])
                trees = grown.trees
                place, above, rank = (
                    x[:, level, : trees.frontier[0, level]]
                    for x in (trees.place, trees.above, trees.rank)
                )
                # The distributions of this frontier are read only if another level follows within
                # the cover and the token budget.
                live = (place != NONE) & (budgets > level)[:, None] & (level < cover.depth)
                parent = np.take_along_axis(fronts[i], above, 1)
                keys[i] = np.where(live, parent * self.width + rank, -1)
            if keys:
                node_keys = np.unique(np.concatenate([k.ravel() for k in keys.values()]))
                self._read(*np.divmod(node_keys[node_keys >= 0], self.width))
            for i, key in keys.items():
                child = self.columns["child"][np.divmod(key, self.width)]
                fronts[i] = np.where(key >= 0, child, -1).astype(np.int64)

    def _read(self, parents: np.ndarray, slots: np.ndarray) -> None:
        """Reads the nodes below ``parents`` in ``slots`` that have not been read."""
        new = self.columns["child"][parents, slots] < 0
        parents, slots = parents[new], slots[new]
        for at in range(0, len(parents), ROWS):
            self._read_batch(parents[at : at + ROWS], slots[at : at + ROWS])

    def _read_batch(self, parents: np.ndarray, slots: np.ndarray) -> None:
        numbers = np.arange(self.n, self.n + len(parents))
        self.n += len(parents)
        while self.n > len(self.columns["count"]):
            self.columns = {
                name: np.concatenate([x, np.full_like(x, _UNREAD.get(name, 0))])
                for name, x in self.columns.items()
            }
        c = self.columns
        c["parent"][numbers], c["slot"][numbers] = parents, slots
        c["position"][numbers] = c["position"][parents] + 1
        c["child"][parents, slots] = numbers
        on_text = (c["text_slot"][parents] == slots) & (c["text_slot"][parents] != OFF_TEXT)
        paths, starts = zip(*(self._path(number) for number in numbers.tolist()), strict=True)
        ids, positions = (
            torch.from_numpy(x.astype(np.int64)).to(self.passes.device)
            for x in (c["tokens"][parents, slots], c["position"][numbers] + self.prompt - 1)
        )
        above = [[node - self._first for node in path[:-1]] for path in paths]
        nodes = Nodes(ids, positions, (numbers - self._first).tolist(), above, list(starts))
        self._store(numbers, self.passes.nodes(nodes), on_text)

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
        return codes_on_host(best_children(logits, self.sampling, perturb, reads))

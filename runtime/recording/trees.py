"""The panorama pass for trees: every distribution that covered growths can read, from every start
of a recorded text.

The growths are *run*, all starts at once, by the functions that decode with them
(:class:`runtime.trees.grow.Growing`); what any of them expands is read once. A distribution is a
function of its prefix (a head's: of its start and prefix), so starts share nodes: what one start
reads off the text, the next one finds read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from spectune.runtime.distributions import best_children, codes_on_host
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import (
    ChainGrowth,
    ClassifierGrowth,
    Growth,
    StaticGrowth,
    TopKGrowth,
)
from spectune.runtime.recording.passes import Nodes, RecordedText
from spectune.runtime.trees.grow import CODE_DTYPES, NONE, Codes, Growing, TreeRule
from spectune.traces.schema import Trajectory, TreePanorama

GROUP = 8
"""Starts of a head grown together."""
ROWS = 256
"""Nodes read in one pass."""
OFF_TEXT = 255
SHARPNESSES = (1.5, 3.0)
"""Sharpnesses of the coupled score that every recording covers."""
_DTYPES = dict(zip(Codes._fields, CODE_DTYPES, strict=True)) | {
    "text_slot": np.uint8,
    "slot": np.uint8,
    **dict.fromkeys(("parent", "position", "child"), np.int32),
}
_UNREAD = {"text_slot": OFF_TEXT, "parent": -1, "child": -1}
"""What columns hold of a node that was not read, where not 0."""


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


def base_covers(width: int, depth: int, *, sampled: bool, chain_depth: int = 0) -> list[Cover]:
    """EAGLE-2's growth at every width up to ``width``: ranked by probability where that is the
    default score, and by the coupled score at each of ``SHARPNESSES``; chains to ``chain_depth`` if
    that is deeper."""
    scores: list[tuple[Literal["probability", "coupled"], float]] = []
    if not sampled:
        scores.append(("probability", SHARPNESSES[0]))
    scores += [("coupled", sharpness) for sharpness in SHARPNESSES]
    chain = Cover(
        cover_name(ChainGrowth(), sampled=sampled), TreeRule(1, 1), max(depth, chain_depth)
    )
    found = [chain]
    for w in range(2, width + 1):
        for score, sharpness in scores:
            growth = TopKGrowth(width=w, score=score, sharpness=sharpness)
            rule = TreeRule(w, w, score == "coupled", sharpness)
            found.append(Cover(cover_name(growth, sampled=sampled), rule, depth))
    return found


def record_tree_panorama(
    pair: LoadedPair,
    trajectory: Trajectory,
    draft: str,
    width: int,
    depth: int,
    *,
    covers: Sequence[Cover] = (),
    chain_depth: int = 0,
) -> TreePanorama:
    """The distributions of one draft over one trajectory: for EAGLE-2's growth at every width up to
    ``width`` and ``depth`` levels, for the growths of ``covers`` besides, and for chains of
    ``chain_depth``."""
    text = _Recorder(pair, trajectory, draft, width)
    sampled = not text.sampling.greedy
    base = base_covers(width, depth, sampled=sampled, chain_depth=chain_depth)
    covers = [*base, *covers]
    text.read_roots()
    # Starts that share no nodes are taken a few at a time, so that what a pass sees stays short.
    starts, group = np.arange(len(text.output)), len(text.output) if text.shared else GROUP
    room = pair.context([draft]).positions - text.prompt
    budgets = min(trajectory.max_new_tokens - 1, room) - starts
    for at in range(0, len(starts), max(1, group)):
        text.grow(covers, starts[at : at + group], budgets[at : at + group])
    n, roots, columns = text.n, text.roots, text.columns
    return TreePanorama(
        draft=draft,
        width=width,
        depth=depth,
        shared=text.shared,
        covers=tuple(sorted({cover.name for cover in covers})),
        **{name: columns[name][roots:n].copy() for name in ("parent", "slot")},
        **{name: columns[name][:n].copy() for name in (*Codes._fields, "text_slot")},
    )


class _Recorder(RecordedText):
    """The distributions read so far of one text, a node each, in columns; the first ``roots`` nodes
    are the text's own prefixes. ``child`` [n, k] numbers the nodes below, -1: not read."""

    def __init__(self, pair: LoadedPair, trajectory: Trajectory, draft: str, width: int) -> None:
        super().__init__(pair, trajectory, draft)
        self.width = width
        self.roots = self.n = self._first = len(self.output) + 1
        rows, wide = 16 * self.roots, {"tokens", "logp", "gap", "child"}
        self.columns: dict[str, np.ndarray] = {
            name: np.full((rows, width) if name in wide else rows, _UNREAD.get(name, 0), dtype)
            for name, dtype in _DTYPES.items()
        }

    def read_roots(self) -> None:
        """Reads the distributions after every prefix of the text."""
        c, at = self.columns, 0
        for part in (rows for logits in self.passes.roots() for rows in torch.split(logits, ROWS)):
            numbers = np.arange(at, at + len(part))
            at += len(part)
            c["position"][numbers] = numbers
            self._store(numbers, part, np.ones(len(numbers), bool))
        if self.shared:
            rows = np.flatnonzero(c["text_slot"][: self.roots - 1] != OFF_TEXT)
            c["child"][rows, c["text_slot"][rows]] = rows + 1

    def grow(self, covers: Sequence[Cover], starts: np.ndarray, budgets: np.ndarray) -> None:
        """Runs every cover over some starts, level by level, reading what none has read;
        ``budgets``: tokens that a round may draft from each."""
        self._first = self.n
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
                wanted = np.unique(np.concatenate([k.ravel() for k in keys.values()]))
                self._read(*np.divmod(wanted[wanted >= 0], self.width))
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
        return codes_on_host(
            best_children(
                logits, self.sampling, perturb, self.width, entropy=True, top_entropy=True
            )
        )

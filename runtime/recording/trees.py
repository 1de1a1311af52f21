"""The panorama pass for trees: every distribution that covered growths can read, from every start
of a recorded text.

The growths are *run*, all starts at once, by the functions that decode with them
(:class:`runtime.trees.grow.Growing`); what any of them expands is read once. A distribution is a
function of its prefix (a head's: of its start and prefix), so starts share nodes: what one start
reads off the text, the next one finds read. Codes that rounding could change are decided by the
canonical pass, all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from spectune.runtime.distributions import read_distributions
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import (
    ChainGrowth,
    ClassifierGrowth,
    Growth,
    StaticGrowth,
    TopKGrowth,
)
from spectune.runtime.recording.passes import HeadPasses, LanguageModelPasses, Nodes, Passes
from spectune.runtime.sampling import Noise
from spectune.runtime.trees.grow import NONE, Codes, DistributionRows, Growing, TreeRule
from spectune.traces.schema import Proposals, Sampling, Trajectory, TreePanorama, request_seed

GROUP = 8
"""Starts of a head grown together."""
ROWS = 256
"""Nodes read in one pass."""
OFF_TEXT = 255
SHARPNESSES = (1.5, 3.0)
"""Sharpnesses of the coupled score that every recording covers."""


class Cover(NamedTuple):
    """One growth whose every distribution is to be recorded, to its ``depth``."""

    name: str
    rule: TreeRule
    depth: int


def cover_name(growth: Growth, *, sampled: bool) -> str:
    """What tells one covered growth from another: everything that decides which distributions it
    reads."""
    data: dict[str, Any] = {"kind": growth.kind}
    if isinstance(growth, ChainGrowth):
        data = {"kind": "top_k", "width": 1}
    elif isinstance(growth, StaticGrowth):
        data["paths"] = [list(p) for p in growth.paths] or growth.artifact
    else:
        coupled = growth.score == "coupled" or (
            growth.score == "auto" and sampled and growth.proposals == "coupled"
        )
        data["width"] = growth.width
        data["score"] = (
            f"coupled({growth.sharpness:g})" if coupled and growth.width > 1 else "probability"
        )
        if isinstance(growth, ClassifierGrowth):
            # Its expansion follows the classifier alone; the score only selects.
            data = {
                "kind": "classifier",
                "width": growth.width,
                "cap": growth.cap,
                "artifact": growth.artifact,
                "beta": growth.beta,
            }
        elif growth.width == 1:
            data = {"kind": "top_k", "width": 1}
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def base_covers(
    width: int, depth: int, *, sampled: bool, proposals: Proposals, chain_depth: int = 0
) -> list[Cover]:
    """EAGLE-2's growth at every width up to ``width``: ranked by probability where that is the
    default score, and by the coupled score at each of ``SHARPNESSES``; chains to ``chain_depth`` if
    that is deeper."""
    by_probability = proposals == "probability"
    growth, rule = (
        TopKGrowth(width=1, proposals=proposals),
        TreeRule(width=1, frontier=1, by_probability=by_probability),
    )
    found = [Cover(cover_name(growth, sampled=sampled), rule, max(depth, chain_depth))]
    scores: list[tuple[Literal["probability", "coupled"], float]] = []
    if by_probability or not sampled:
        scores.append(("probability", SHARPNESSES[0]))
    if not by_probability:
        scores += [("coupled", sharpness) for sharpness in SHARPNESSES]
    for w in range(2, width + 1):
        for score, sharpness in scores:
            growth = TopKGrowth(width=w, score=score, sharpness=sharpness, proposals=proposals)
            rule = TreeRule(
                w, w, coupled=score == "coupled", sharpness=sharpness, by_probability=by_probability
            )
            found.append(Cover(cover_name(growth, sampled=sampled), rule, depth))
    return found


def record_tree_panorama(
    pair: LoadedPair,
    trajectory: Trajectory,
    draft: str,
    width: int,
    depth: int,
    *,
    proposals: Proposals = "coupled",
    covers: Sequence[Cover] = (),
    chain_depth: int = 0,
) -> TreePanorama:
    """The distributions of one draft over one trajectory: for EAGLE-2's growth at every width up to
    ``width`` and ``depth`` levels, for the growths of ``covers`` besides, and for chains of
    ``chain_depth``."""
    return _Recorder(pair, trajectory, draft, width, depth, proposals, covers, chain_depth).run()


class _Recorder:
    def __init__(
        self,
        pair: LoadedPair,
        trajectory: Trajectory,
        draft: str,
        width: int,
        depth: int,
        proposals: Proposals,
        covers: Sequence[Cover],
        chain_depth: int,
    ) -> None:
        self.trajectory, self.draft, self.width, self.depth, self.proposals = (
            trajectory,
            draft,
            width,
            depth,
            proposals,
        )
        self.sampling = Sampling() if trajectory.verifier == "greedy" else trajectory.sampling
        self.output = trajectory.output_ids.tolist()
        self.prompt = len(trajectory.prompt_ids)
        self.exact = pair.exact
        text = [*trajectory.prompt_ids.tolist(), *self.output]
        self.passes: Passes
        if draft in pair.heads:
            self.passes = HeadPasses(pair.target, pair.heads[draft], text, self.prompt)
        else:
            self.passes = LanguageModelPasses(pair.drafts[draft], text, self.prompt)
        sampled = not self.sampling.greedy
        target = pair.target
        self.noise = (
            Noise(
                request_seed(self.sampling.seed, trajectory.request_id),
                target.vocab_size,
                target.device,
            )
            if sampled
            else None
        )
        self.covers = [
            *base_covers(
                width, depth, sampled=sampled, proposals=proposals, chain_depth=chain_depth
            ),
            *covers,
        ]
        self.limit = pair.max_positions
        self.roots = len(self.output) + 1
        capacity = self.roots * 16
        self.n = self._first = self.roots
        k = width
        self.cols: dict[str, np.ndarray] = {
            "tokens": np.zeros((capacity, k), np.int32),
            "logp": np.zeros((capacity, k), np.uint8),
            "gap": np.zeros((capacity, k), np.uint8),
            "count": np.zeros(capacity, np.uint8),
            "entropy": np.zeros(capacity, np.uint8),
            "top_entropy": np.zeros(capacity, np.uint8),
            "text_slot": np.full(capacity, OFF_TEXT, np.uint8),
            "parent": np.full(capacity, -1, np.int32),
            "slot": np.zeros(capacity, np.uint8),
            "position": np.zeros(capacity, np.int32),
            "child": np.full((capacity, k), -1, np.int32),
        }

    def run(self) -> TreePanorama:
        at = 0
        for part in (rows for logits in self.passes.roots() for rows in torch.split(logits, ROWS)):
            numbers = np.arange(at, at + len(part))
            at += len(part)
            self.cols["position"][numbers] = numbers
            self._store(
                numbers, self._distributions(part, numbers), on_text=np.ones(len(numbers), bool)
            )
        if self.passes.shared:
            rows = np.flatnonzero(self.cols["text_slot"][: self.roots - 1] != OFF_TEXT)
            self.cols["child"][rows, self.cols["text_slot"][rows]] = rows + 1
        # Starts that share no nodes are taken a few at a time, so that what a pass sees stays
        # short.
        starts = np.arange(len(self.output))
        group = max(1, len(starts)) if self.passes.shared else GROUP
        for at in range(0, len(starts), group):
            self._first = self.n
            self._grow(starts[at : at + group])
        n, c = self.n, self.cols
        off = slice(self.roots, n)
        return TreePanorama(
            draft=self.draft,
            width=self.width,
            depth=self.depth,
            proposals=self.proposals,
            shared=self.passes.shared,
            covers=tuple(sorted({x.name for x in self.covers})),
            parent=c["parent"][off].copy(),
            slot=c["slot"][off].copy(),
            **{
                name: c[name][:n].copy()
                for name in (
                    "tokens",
                    "logp",
                    "gap",
                    "count",
                    "entropy",
                    "top_entropy",
                    "text_slot",
                )
            },
        )

    def _grow(self, starts: np.ndarray) -> None:
        """Runs every cover over some starts, level by level, reading what none has read."""
        budget = np.minimum(
            self.trajectory.max_new_tokens - starts - 1, self.limit - self.prompt - starts
        )
        growing = [(c, Growing(c.rule, c.depth, len(starts))) for c in self.covers]
        fronts = [starts[:, None]] * len(growing)
        codes = ("tokens", "logp", "gap", "entropy", "top_entropy", "count")
        for level in range(1, 1 + max(c.depth for c in self.covers)):
            keys: dict[int, np.ndarray] = {}
            for i, (cover, grown) in enumerate(growing):
                if level > cover.depth or (cover.rule.static and level > len(cover.rule.static)):
                    continue
                grown.add_from(Codes(*(self.cols[name] for name in codes)), fronts[i])
                trees, places = grown.trees, grown.trees.frontier[0, level]
                place, above, rank = (
                    x[:, level, :places] for x in (trees.place, trees.above, trees.rank)
                )
                # The distributions of this frontier are read only if another level follows within
                # the cover and the token budget.
                live = (place != NONE) & (budget > level)[:, None] & (level < cover.depth)
                keys[i] = np.where(
                    live, np.take_along_axis(fronts[i], above, 1) * self.width + rank, -1
                )
            if keys:
                wanted = np.unique(np.concatenate([k.ravel() for k in keys.values()]))
                self._read(wanted[wanted >= 0])
            for i, key in keys.items():
                fronts[i] = np.where(
                    key >= 0, self.cols["child"][key // self.width, key % self.width], -1
                ).astype(np.int64)

    def _read(self, keys: np.ndarray) -> None:
        """Reads the nodes (parent * width + slot) that have not been read."""
        parents, slots = keys // self.width, keys % self.width
        new = self.cols["child"][parents, slots] < 0
        parents, slots = parents[new], slots[new]
        for at in range(0, len(parents), ROWS):
            self._read_batch(parents[at : at + ROWS], slots[at : at + ROWS])

    def _read_batch(self, parents: np.ndarray, slots: np.ndarray) -> None:
        count = len(parents)
        self._ensure(self.n + count)
        c = self.cols
        numbers = np.arange(self.n, self.n + count)
        tokens = c["tokens"][parents, slots]
        c["parent"][numbers], c["slot"][numbers] = parents, slots
        c["position"][numbers] = c["position"][parents] + 1
        c["child"][parents, slots] = numbers
        on_text = (c["text_slot"][parents] == slots) & (c["text_slot"][parents] != OFF_TEXT)
        above, starts = [], []
        for number in numbers.tolist():
            path, start = self._path(number)
            above.append([x - self._first for x in path[:-1]])
            starts.append(start)
        device = self.passes.device
        positions = torch.from_numpy(c["position"][numbers].astype(np.int64) + self.prompt - 1).to(
            device
        )
        ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
        self.n += count
        logits = self.passes.nodes(
            Nodes(ids, positions, (numbers - self._first).tolist(), above, starts)
        )
        self._store(numbers, self._distributions(logits, numbers), on_text)

    def _path(self, node: int) -> tuple[list[int], int]:
        """The drafted nodes down to a node, itself included, and the start they hang from."""
        path: list[int] = []
        while node >= self.roots:
            path.append(node)
            node = int(self.cols["parent"][node])
        return path[::-1], node

    def _distributions(self, logits: torch.Tensor, numbers: np.ndarray) -> DistributionRows:
        noise = None
        positions = (self.cols["position"][numbers] + self.prompt).tolist()
        if self.noise is not None:
            known = {p: self.noise.row(p) for p in set(positions)}
            noise = torch.stack([known[p] for p in positions])
        rows = self._rows(logits, noise, self.exact)
        if rows.unsure is None or rows.unsure_entropy is None:
            return rows
        for i in (rows.unsure.any(1) | rows.unsure_entropy).nonzero()[:, 0].tolist():
            path, start = self._path(int(numbers[i]))
            tokens = self.cols["tokens"][
                self.cols["parent"][path], self.cols["slot"][path]
            ].tolist()
            one = self._rows(
                self.passes.canonical(start, tokens)[None],
                None if noise is None else noise[i],
                False,
            )
            for name in ("tokens", "logp", "gap", "entropy", "top_entropy", "count"):
                getattr(rows, name)[i] = getattr(one, name)[0]
        return rows

    def _rows(
        self, logits: torch.Tensor, noise: torch.Tensor | None, exact: bool
    ) -> DistributionRows:
        return read_distributions(
            logits,
            self.sampling,
            noise,
            self.width,
            by_probability=self.proposals == "probability",
            entropy=True,
            top_entropy=True,
            exact=exact,
        )

    def _store(self, numbers: np.ndarray, rows: DistributionRows, on_text: np.ndarray) -> None:
        c = self.cols
        for name in ("tokens", "logp", "gap", "count", "entropy", "top_entropy"):
            c[name][numbers] = getattr(rows, name).cpu().numpy()
        position = c["position"][numbers]
        follows = on_text & (position < len(self.output))
        following = np.array(
            [
                self.output[p] if f else -1
                for p, f in zip(position.tolist(), follows.tolist(), strict=True)
            ]
        )
        hit = (c["tokens"][numbers] == following[:, None]) & (
            np.arange(self.width) < c["count"][numbers][:, None]
        )
        c["text_slot"][numbers] = np.where(hit.any(1), hit.argmax(1), OFF_TEXT)

    def _ensure(self, wanted: int) -> None:
        size = len(self.cols["count"])
        if wanted <= size:
            return
        more = max(wanted, 2 * size) - size
        for name, column in self.cols.items():
            fill = {"text_slot": OFF_TEXT, "parent": -1, "child": -1}.get(name, 0)
            self.cols[name] = np.concatenate(
                [column, np.full((more, *column.shape[1:]), fill, column.dtype)]
            )

"""Recorded trees as fits read them: every start of a text that was recorded is a round that might
have begun there, so a recording holds as many rounds as tokens, whatever policy decoded it. Their
trees are grown by the functions that decode with them, EAGLE-2's growth with its default score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.optimizer.fit.shared import Arrays, StoredFit, keep
from spectune.optimizer.parts import recorded_parts
from spectune.optimizer.simulate.forest import Forest
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.trace import open_trace
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.policies.rules import compile_tree
from spectune.runtime.trees.grow import TreeRule
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import NAT_SCALE
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RecordedTrees:
    """One draft's trees over the requests replayed in a trace. ``starts`` int64 [n]: the positions
    that begin a round there; ``levels`` int64 [positions]: levels that a tree could have and whose
    text is known: tokens to the end of the text, and to that of the budget."""

    forest: Forest
    starts: Index
    levels: Index
    sampled: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, trace: ReplayTrace, draft: str) -> RecordedTrees:
        """Those of a trace's requests."""
        forest = trace.forest(draft)
        lengths = np.diff(trace.offsets)
        levels = np.minimum(
            np.repeat(trace.offsets[1:], lengths) - np.arange(lengths.sum()), forest.limit
        )
        starts = np.flatnonzero(np.repeat(np.isin(np.arange(len(lengths)), trace.order), lengths))
        return cls(forest, starts, levels, np.repeat(trace.sampled > 0, lengths))

    def pick(self, least: int, count: int, seed: int) -> Index:
        """At most ``count`` starts with at least ``least`` levels, chosen by ``seed``, ascending.
        Raises TraceError when there is none."""
        fitting = self.starts[self.levels[self.starts] >= least]
        if not len(fitting):
            raise TraceError(
                f"no text of the recording goes on for {least} tokens; record longer ones, or fit "
                "a smaller depth"
            )
        if len(fitting) > count:
            fitting = np.sort(np.random.default_rng(seed).choice(fitting, count, replace=False))
        return fitting

    def rules(self, width: int, depth: int) -> tuple[TreeRule, TreeRule]:
        """EAGLE-2's growth at temperature 0 and above. Raises TraceError when wider or deeper trees
        than recorded are asked for."""
        for what, flag, asked, held in (
            ("children of a node", "--tree-width", width, self.forest.width),
            ("levels", "--tree-depth", depth, self.forest.depth),
        ):
            if not 1 <= asked <= held:
                raise TraceError(
                    f"{asked} {what} are asked for, the recording holds {held}: `record --resume "
                    f"ID {flag} {asked}` makes more"
                )
        growth = {"kind": "top_k", "width": width}
        window = {"kind": "fixed", "gamma": depth}
        policy = parse_policy({"draft": self.forest.draft, "growth": growth, "window": window})
        return compile_tree(policy, sampled=False), compile_tree(policy, sampled=True)

    def along_text(self, nodes: Index) -> Index:
        """The node after each of some nodes on the text, if the text's next token is a recorded
        child and was expanded; else -1."""
        width, slot = self.forest.width, self.forest.text_slot[nodes].astype(np.int64)
        return np.where(
            slot < width, self.forest.child[nodes, np.minimum(slot, width - 1)], -1
        ).astype(np.int64)


@dataclass(frozen=True)
class TreeSource:
    """What a fit of trees reads: a recording's search part, and one draft's trees over it. Who fits
    several things loads it once."""

    store: TraceStore
    info: Recording
    trace: ReplayTrace
    trees: RecordedTrees

    @property
    def sampled(self) -> bool:
        return bool(self.trees.sampled[self.trees.starts].any())

    def document(self) -> dict[str, Any]:
        """What every fitted document says of where it comes from."""
        return {
            "draft": self.trees.forest.draft,
            "pair": self.info.pair_id,
            "recording": self.info.id,
            "sampling": asdict(self.info.sampling),
            "recorded": {"width": self.trees.forest.width, "depth": self.trees.forest.depth},
            "requests": len(self.trace.order),
        }

    def keep(
        self,
        kind: str,
        fitted: dict[str, Any],
        arrays: Arrays,
        fitted_to: tuple[npt.NDArray[Any], ...],
        gamma: int,
        blocks: Callable[[str], dict[str, Any]],
    ) -> StoredFit:
        """Stores what was ``fitted`` (:func:`optimizer.fit.shared.keep`). A policy with it has a
        window of ``gamma`` and the ``blocks`` of the artifact."""
        document = self.document() | fitted
        origin: dict[str, Any] = {
            "recording": self.info.id,
            "requests": list(self.trace.request_ids),
        }
        pair, draft = self.info.pair_id, self.trees.forest.draft
        artifact = keep(
            self.store, kind, document, arrays, pair_id=pair, fitted_to=fitted_to, **origin
        )
        policy = {"draft": draft, "window": {"kind": "fixed", "gamma": gamma}, **blocks(artifact)}
        return StoredFit(artifact, kind, document, policy)


def tree_source(store: TraceStore, recording: str, draft: str) -> TreeSource:
    """The search part of a recording with its trees of a draft. Raises PolicyError for a draft that
    there is not, or whose trees were not recorded, TraceError where they say nothing."""
    info = store.get_recording(recording)
    if draft == "ngram":
        raise PolicyError(
            "--draft ngram: it proposes one continuation and grows no trees; name another draft"
        )
    if info.verifier == "rejection" and not info.sampling.greedy:
        raise TraceError(
            f"recording {info.id} was decoded by the rejection verifier, whose texts do not show "
            "what trees would accept; record with the coupled one"
        )
    policy = parse_policy({"draft": draft, "growth": {"kind": "top_k"}})
    opened = open_trace(store, info.id, [policy], skip_corrupted=True)
    trace = opened.trace.select(recorded_parts(store, info.id, opened.ordinals).search)
    return TreeSource(store, info, trace, RecordedTrees.of(trace, draft))


def child_probabilities(
    logp: npt.NDArray[np.uint16], count: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float64]:
    """q of each child [n, k] from codes that were rounded down: the middle of the code's interval,
    0 for children that do not exist.

    A code of 0 says only that q is above exp(-1/256) = 0.996; there it is what the other recorded
    children leave, at least that.
    """
    exists = np.arange(logp.shape[1]) < count[:, None]
    q: npt.NDArray[np.float64] = np.where(
        exists & (logp > 0), np.exp(-(logp + 0.5) / NAT_SCALE), 0.0
    )
    first = exists & (logp == 0)
    return np.where(first, np.maximum(1.0 - q.sum(1, keepdims=True), np.exp(-1 / NAT_SCALE)), q)

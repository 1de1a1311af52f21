"""Recorded trees as fits read them: every start of a text that was recorded is a round that might
have begun there, so a recording holds as many rounds as tokens, whatever policy decoded it. Their
trees are grown by the functions that decode with them, EAGLE-2's growth, by its default score
unless another is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.optimizer.fit.shared import StoredFit, keep, too_few_to_fit
from spectune.optimizer.replay.forest import Forest
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.trace import open_trace
from spectune.optimizer.tuning.parts import recorded_parts
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.rules import compile_tree
from spectune.runtime.trees.grow import TreeRule
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RecordedTrees:
    """One draft's trees over the requests replayed in a trace. ``starts`` int64 [n]: the positions
    that begin a round there; ``levels`` int64 [positions]: levels that a tree could have and whose
    text is known: tokens to the end of the text, and to that of the budget. ``score``: by which
    they grow."""

    forest: Forest
    starts: Index
    levels: Index
    sampled: npt.NDArray[np.bool_]
    score: str = "auto"

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
        for noun, flag, size, recorded in (
            ("children of a node", "--tree-width", width, self.forest.width),
            ("levels", "--tree-depth", depth, self.forest.depth),
        ):
            if not 1 <= size <= recorded:
                raise TraceError(
                    f"{size} {noun} are asked for, the recording holds {recorded}: `record "
                    f"--resume ID {flag} {size}` makes more"
                )
        growth = {"kind": "top_k", "width": width, "score": self.score}
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
    """What a fit of trees reads: the requests of a recording that are fitted to, and one draft's
    trees over them. Who fits several things loads it once."""

    store: TraceStore
    info: Recording
    trace: ReplayTrace
    trees: RecordedTrees

    def keep(
        self,
        kind: str,
        fitted: dict[str, Any],
        gamma: int,
        blocks: Callable[[str], dict[str, Any]],
        arrays: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> StoredFit:
        """Stores what was ``fitted`` with where it comes from. A policy with it has a window of
        ``gamma`` and the ``blocks`` of the artifact."""
        draft, window = self.trees.forest.draft, {"kind": "fixed", "gamma": gamma}
        document = {
            "draft": draft,
            "pair": self.info.pair_id,
            "recording": self.info.id,
            "sampling": asdict(self.info.sampling),
            "recorded": {"width": self.trees.forest.width, "depth": self.trees.forest.depth},
            "request_ids": list(self.trace.request_ids),
            **fitted,
        }

        def policy(artifact: str) -> dict[str, Any]:
            return {"draft": draft, "window": window, **blocks(artifact)}

        return keep(self.store, kind, document, arrays, policy=policy)


def tree_source(store: TraceStore, recording: str, draft: str) -> TreeSource:
    """The requests of a recording to fit to, with their trees of a draft. Raises PolicyError for a
    draft that there is not, or whose trees were not recorded, TraceError where they say nothing."""
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
    if draft in info.drafts and draft not in info.with_trees:
        how = f"`record --resume {info.id} --tree-width 8` makes them"
        raise PolicyError(f"draft: recording {info.id} has no trees of draft {draft!r}; {how}")
    opened = open_trace(store, info.id, [Policy(draft=draft)])
    parts = recorded_parts(store, info.id, opened.ordinals)
    if not parts.fit:
        raise TraceError(too_few_to_fit(info.id, len(opened.ordinals)))
    trace = opened.trace.select(parts.fit)
    return TreeSource(store, info, trace, RecordedTrees.of(trace, draft))

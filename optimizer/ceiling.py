"""The speed that no tree of a draft can exceed, told before its trees are recorded: recording them
and fitting to them is most of what a tuning takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spectune.optimizer.search import saved_s
from spectune.runtime.costs import BUCKET, RoundKind, middles, round_costs, round_seconds
from spectune.traces.tables import LatencyProfile, Trajectory


def tree_ceiling(
    profile: LatencyProfile, draft: str, texts: Sequence[Trajectory], depth: int
) -> float:
    """Tokens/s on these texts, by a profile's costs, of trees of at most ``depth`` levels whose
    every token is right: a pass reads one node over the smallest shortlist, no other node is
    verified, and each round has the best number of levels.

    Where the profile has no costs of the draft's trees, those of chains are taken: a tree's are
    more.
    """
    growths = ("static", "top_k", "classifier") if draft in profile.tree_drafts else ("",)
    lists = ("fixed", "routed") if profile.shortlist_sizes(draft, routed=True) else ()
    saved = max((saved_s(profile, draft, kind) for kind in lists), default=0.0)
    longest = max((len(t.prompt_ids) + len(t.output_ids) for t in texts), default=0)
    contexts = middles(longest)
    costs = [round_costs(profile, RoundKind(draft, growth), contexts) for growth in growths]

    def least(bucket: int, sampled: int) -> float:
        """Seconds of a token of the best round that begins in a bucket of the context."""
        at = bucket * BUCKET
        return min(
            (round_seconds(c, sampled, at, 0, 1, d, d, d + 1)[2] - d * saved) / (d + 1)
            for c in costs
            for d in range(depth + 1)
        )

    table = np.array(
        [[least(bucket, sampled) for sampled in (0, 1)] for bucket in range(len(contexts))]
    )
    seconds = float(np.sum(profile.request_seconds(draft, [len(t.prompt_ids) for t in texts])))
    for t in texts:
        end = len(t.prompt_ids) + np.arange(len(t.output_ids))
        begin = np.maximum(0, end - depth - 1)  # the earliest that the round of a token can begin
        per_token = table[:, int(not t.sampling.greedy)]
        seconds += float(np.minimum(per_token[begin // BUCKET], per_token[end // BUCKET]).sum())
    return sum(len(t.output_ids) for t in texts) / max(seconds, 1e-12)

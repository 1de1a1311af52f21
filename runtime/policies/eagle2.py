"""EAGLE-2: trees that grow where the draft is confident (section 4.1) and are pruned to the best
nodes (section 4.2). Both choose the :func:`cheapest`; growing is :mod:`runtime.trees.grow`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from spectune.runtime.policies.blocks import NODE_LIMIT, Block, Search, TreeGrowth
from spectune.runtime.policies.jit import compiled

DEFAULT_TOP_N = 60
"""Nodes that a top-k tree keeps when the policy does not say (EAGLE-2)."""


class TopKGrowth(TreeGrowth):
    """EAGLE-2: the ``width`` best nodes of each level are expanded by ``width`` children each."""

    kind: Literal["top_k"] = "top_k"

    @property
    def frontier(self) -> int:
        """Nodes expanded per level at most."""
        return self.width


class Select(Block):
    """Of the nodes grown, the ``top_n`` with the highest estimated acceptance are verified
    (EAGLE-2's rerank); the root is not counted. None: all."""

    scales_growth = True
    top_n: Annotated[Annotated[int, Field(ge=1, le=NODE_LIMIT)] | None, Search(2, 64, log=True)] = (
        None
    )


INFINITE: Final = 1 << 23
"""Cost of a candidate that does not exist or may not be chosen; more than any path can sum to (64
levels of NAT_CODE_MAX)."""


@compiled()
def cheapest(
    cost: npt.NDArray[np.int64], begin: int, end: int, chosen: npt.NDArray[np.int64]
) -> int:
    """Writes into ``chosen`` [n] the cheapest of the candidates ``begin`` to ``end``, best first,
    ties by creation order; how many there are. The chosen of the whole tree are closed under
    ancestors: a child costs no less than its parent and comes later."""
    room = chosen.shape[0]
    count, worst = 0, INFINITE if room > 0 else 0
    for candidate in range(begin, end):
        price = cost[candidate]
        if price >= worst:
            continue
        place = min(count, room - 1)
        while place > 0 and cost[chosen[place - 1]] > price:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = candidate
        count = min(count + 1, room)
        if count == room:
            worst = cost[chosen[room - 1]]
    return count

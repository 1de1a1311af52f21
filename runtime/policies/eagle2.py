"""EAGLE-2: trees that grow where the draft is confident (section 4.1) and are pruned to the best
nodes (section 4.2). The growing itself is :mod:`runtime.policies.trees`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from runtime.policies.blocks import NODE_LIMIT, Block, TreeGrowth

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

    top_n: Annotated[int, Field(ge=1, le=NODE_LIMIT)] | None = None

"""Sequoia: trees of one fixed shape (section 3.1). Choosing them is
:mod:`optimizer.fit.sequoia`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from spectune.runtime.policies.blocks import (
    GAMMA_LIMIT,
    NODE_LIMIT,
    WIDTH_LIMIT,
    Artifact,
    Block,
    Fitted,
)


class StaticGrowth(Block):
    """A fixed tree: ``paths`` of child ranks from the root, best first, each with all its
    beginnings; or the tree of an ``artifact`` (``fit static-tree``)."""

    reads_draft = True
    kind: Literal["static"] = "static"
    paths: Annotated[
        tuple[tuple[Annotated[int, Field(ge=0, lt=WIDTH_LIMIT)], ...], ...], Fitted()
    ] = ()
    artifact: Artifact | None = None

    @model_validator(mode="after")
    def _closed(self) -> Self:
        if bool(self.paths) == (self.artifact is not None):
            raise ValueError("a static tree is given by either paths or an artifact")
        if len(self.paths) > NODE_LIMIT:
            raise ValueError(f"a tree of {len(self.paths)} nodes exceeds the limit of {NODE_LIMIT}")
        for path in self.paths:
            if not path:
                raise ValueError("a path has at least one rank; the root itself is not listed")
            if self.paths.count(path) > 1:
                raise ValueError(f"the path {list(path)} is given twice")
            if len(path) > GAMMA_LIMIT:
                raise ValueError(f"the path {list(path)} is deeper than {GAMMA_LIMIT}")
            if path[:-1] and path[:-1] not in self.paths:
                raise ValueError(
                    f"the path {list(path)} needs its parent {list(path[:-1])} in the list"
                )
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda p: (len(p), p))))
        return self

    def label(self) -> str:
        return f"static({f'{len(self.paths)} nodes' if self.paths else self.artifact})"


@dataclass(frozen=True)
class StaticLevel:
    """One level of a static tree: for each node its place among the level's possible ones (the
    parent's place in the frontier * k + rank), and which of the nodes are expanded, as indices into
    ``places``."""

    places: tuple[int, ...]
    expanded: tuple[int, ...]


def static_levels(paths: Sequence[Sequence[int]]) -> tuple[int, tuple[StaticLevel, ...]]:
    """(children read of each distribution, levels) of a static tree given as rank paths, each with
    all its beginnings."""
    width, levels = 1 + max(rank for path in paths for rank in path), list[StaticLevel]()
    nodes = {tuple(p) for p in paths}
    expanded = {p[:-1] for p in nodes}
    frontier: list[tuple[int, ...]] = [()]
    while frontier:
        possible = enumerate((*p, rank) for p in frontier for rank in range(width))
        children = [(place, path) for place, path in possible if path in nodes]
        grown = tuple(i for i, (_, path) in enumerate(children) if path in expanded)
        frontier = [children[i][1] for i in grown]
        levels.append(StaticLevel(tuple(place for place, _ in children), grown))
    return width, tuple(levels)

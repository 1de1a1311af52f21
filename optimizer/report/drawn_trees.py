"""Draft trees for a terminal: what one round grew, with the accepted path."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from spectune.runtime.loop import Round
from spectune.traces.schema import NO_BIN

ACCEPTED, OWN, REJECTED = "green", "bold yellow", "dim"
LINES = 8
"""Verified nodes drawn of a tree, and as many of those that were drafted and not verified."""
SIBLINGS = 3
"""Children of one node that are drawn of those not verified."""


def tree_view(
    number: int, round_: Round, root: str, text_of: Callable[[int], str], lines: int = LINES
) -> RenderableType:
    """A round's tree below its root's text: at most ``lines`` verified nodes, the accepted path
    among them, and below them at most as many that were drafted and not verified, no more than
    :data:`SIBLINGS` of a parent; then how many more.

    Accepted nodes are green, rejected ones dim, and the target's own token, which ends the path,
    yellow. Nodes that were not verified are dim and say so; those not drawn are counted below the
    nearest ancestor that is.
    """
    tree, path = round_.tree, round_.path
    assert tree is not None
    kept, pruned = len(tree.tokens), tree.pruned
    tokens, parents = [*tree.tokens, *pruned.tokens], [*tree.parents, *pruned.parents]
    drawn = Tree(Text(_quoted(root)), guide_style=REJECTED)
    branches = {-1: drawn}

    def draw(node: int, more: str = "", style: str = REJECTED) -> None:
        label = Text(_quoted(text_of(tokens[node])) + more, style=style)
        branches[node] = branches[parents[node]].add(label)

    shown = _chosen(tree.parents, range(kept), path, {-1}, lines, kept)
    for node in shown:
        draw(node, style=ACCEPTED if node in path else REJECTED)
    if round_.step.emitted > len(path):  # else the text ended on an accepted token
        last = path[-1] if path else -1
        if last in branches:
            branches[last].add(Text(_quoted(text_of(round_.tokens[-1])), style=OWN))
    for node in _chosen(parents, range(kept, len(parents)), [], branches, lines, SIBLINGS):
        draw(node, " not verified")
    more: Counter[int] = Counter()  # what is not drawn, by its nearest ancestor that is
    for node in range(kept, len(parents)):
        at = node
        while at not in branches:
            at = parents[at]
        more[at] += at != node
    for at, count in more.items():
        if count:
            branches[at].add(Text(f"+ {count} more not verified", style=REJECTED))
    if len(shown) < kept:
        drawn.add(Text(f"… {kept - len(shown)} more verified", style=REJECTED))
    bin_ = "" if tree.bin == NO_BIN else f", bin {tree.bin}"
    line = (
        f"round {number}: {kept} nodes verified of {len(tokens)} drafted, depth "
        f"{max(tree.depths, default=0)}{bin_}, {len(path)} accepted"
    )
    return Group(Text(line, style="bold"), drawn)


def _chosen(
    parents: list[int],
    nodes: Iterable[int],
    path: list[int],
    drawn: Container[int],
    lines: int,
    most: int,
) -> list[int]:
    """Which of ``nodes`` to draw, in creation order: the accepted ``path``, then those whose path
    takes the fewest steps aside and down, ``most`` of a parent.

    A node's parent is ``drawn`` or chosen with it, so that what is drawn is a tree.
    """
    aside, chosen = _aside(parents), list(path[:lines])
    below: Counter[int] = Counter()
    for node in sorted(nodes, key=lambda n: (aside[n], n)):
        if len(chosen) >= lines:
            break
        parent = parents[node]
        if node not in chosen and (parent in drawn or parent in chosen) and below[parent] < most:
            chosen.append(node)
            below[parent] += 1
    return sorted(chosen)


def _aside(parents: list[int]) -> list[int]:
    """Steps aside and down on the path to each node; siblings are taken in their order."""
    steps: list[int] = []
    siblings: dict[int, int] = {}
    for parent in parents:
        place = siblings[parent] = siblings.get(parent, -1) + 1
        steps.append((steps[parent] if parent >= 0 else 0) + 1 + place)
    return steps


def tree_json(round_: Round) -> dict[str, Any] | None:
    """A round's tree as arrays over its verified nodes; None where none was drafted.

    ``tokens``, ``parents`` (-1: the root) and ``depths`` in creation order; ``path``: the accepted
    nodes; ``emitted``: the tokens added to the text; ``start``: those there were; ``grown``:
    candidates before selection; ``bin``: HeteroSpec's, or null. ``pruned``: the same three arrays
    over the nodes that were drafted and not verified, where numbers count the verified nodes first,
    then these.
    """
    tree = round_.tree
    if tree is None:
        return None
    return {
        "start": round_.step.start,
        "tokens": tree.tokens,
        "parents": tree.parents,
        "depths": tree.depths,
        "path": round_.path,
        "emitted": round_.tokens,
        "grown": tree.pool,
        "bin": None if tree.bin == NO_BIN else tree.bin,
        "pruned": tree.pruned._asdict(),
    }


def _quoted(text: str) -> str:
    """Text on one line, its spaces and line ends visible."""
    return json.dumps(text, ensure_ascii=False)

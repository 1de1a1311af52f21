"""Draft trees for a terminal: what one round grew, with the accepted path."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from runtime.loop import Round
from runtime.tree_drafts import GrownTree
from traces.schema import NO_BIN

ACCEPTED, OWN, REJECTED = "green", "bold yellow", "dim"
LINES = 8
"""Drafted nodes drawn of a tree."""


def tree_view(number: int, round_: Round, root: str, text_of: Callable[[int], str], lines: int = LINES) -> RenderableType:
    """A round's tree below its root's text: at most ``lines`` drafted nodes, the accepted path among them, then how many more.

    Accepted nodes are green, rejected ones dim, and the target's own token, which ends the path, yellow.
    """
    tree = round_.tree
    assert tree is not None
    path = round_.path
    shown = chosen_nodes(tree, path, lines)
    accepted = set(path)
    drawn = Tree(Text(_quoted(root)), guide_style=REJECTED)
    branches = {-1: drawn}
    for node in shown:
        label = Text(_quoted(text_of(tree.tokens[node])), style=ACCEPTED if node in accepted else REJECTED)
        branches[node] = branches[tree.parents[node]].add(label)
    if round_.step.emitted > len(path):  # else the text ended on an accepted token
        last = path[-1] if path else -1
        if last in branches:
            branches[last].add(Text(_quoted(text_of(round_.tokens[-1])), style=OWN))
    if len(shown) < len(tree.tokens):
        drawn.add(Text(f"… {len(tree.tokens) - len(shown)} more", style=REJECTED))
    return Group(Text(tree_line(number, round_), style="bold"), drawn)


def tree_line(number: int, round_: Round) -> str:
    """One line on a round: nodes kept of those grown, levels, accepted."""
    tree = round_.tree
    if tree is None:
        return f"round {number}: no tree"
    bin_ = "" if tree.bin == NO_BIN else f", bin {tree.bin}"
    return (
        f"round {number}: {len(tree.tokens)} nodes verified of {tree.pool} grown, depth {max(tree.depths, default=0)}{bin_}, "
        f"{len(round_.path)} accepted"
    )


def chosen_nodes(tree: GrownTree, path: list[int], lines: int) -> list[int]:
    """Which kept nodes to draw, in creation order: the accepted path, then those whose path takes the fewest steps aside and down.

    Every node's parent is drawn with it, so that what is drawn is a tree.
    """
    order: list[int] = []
    siblings: dict[int, int] = {}
    for parent in tree.parents:
        place = siblings[parent] = siblings.get(parent, -1) + 1
        order.append((order[parent] if parent >= 0 else 0) + 1 + place)
    chosen = list(path[:lines])
    for node in sorted(range(len(order)), key=lambda n: (order[n], n)):
        if len(chosen) >= lines:
            break
        if node not in chosen:  # its parent has a smaller order, so it is in
            chosen.append(node)
    return sorted(chosen)


def tree_json(round_: Round) -> dict[str, Any] | None:
    """A round's tree as arrays over its verified nodes; None where none was drafted.

    ``tokens``, ``parents`` (-1: the root) and ``depths`` in creation order; ``path``: the accepted nodes; ``emitted``: the tokens added to
    the text; ``start``: those there were; ``grown``: candidates before selection; ``bin``: HeteroSpec's, or null.
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
    }


def _quoted(text: str) -> str:
    """Text on one line, its spaces and line ends visible."""
    return json.dumps(text, ensure_ascii=False)

"""Draft trees for a terminal: what one round grew, with the accepted path."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from spectune.runtime.loop import Round
from spectune.runtime.trees.draft import GrownTree, Pruned
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
    tree = round_.tree
    assert tree is not None
    path = round_.path
    shown = chosen_nodes(tree, path, lines)
    accepted = set(path)
    drawn = Tree(Text(_quoted(root)), guide_style=REJECTED)
    branches = {-1: drawn}
    for node in shown:
        label = Text(
            _quoted(text_of(tree.tokens[node])), style=ACCEPTED if node in accepted else REJECTED
        )
        branches[node] = branches[tree.parents[node]].add(label)
    if round_.step.emitted > len(path):  # else the text ended on an accepted token
        last = path[-1] if path else -1
        if last in branches:
            branches[last].add(Text(_quoted(text_of(round_.tokens[-1])), style=OWN))
    if tree.pruned is not None:
        _add_pruned(branches, tree.parents, tree.pruned, text_of, lines)
    if len(shown) < len(tree.tokens):
        drawn.add(Text(f"… {len(tree.tokens) - len(shown)} more verified", style=REJECTED))
    return Group(Text(_line(number, round_, tree), style="bold"), drawn)


def _add_pruned(
    branches: dict[int, Tree],
    parents: list[int],
    pruned: Pruned,
    text_of: Callable[[int], str],
    lines: int,
) -> None:
    """Draws below ``branches`` (by node, -1: the root), which grow, what was drafted and not
    verified."""
    kept, joint = len(parents), [*parents, *pruned.parents]
    aside = _aside(joint)
    below: dict[int, int] = {}
    chosen: list[int] = []
    for node in sorted(range(kept, len(joint)), key=lambda n: (aside[n], n)):
        parent = joint[node]
        if (
            len(chosen) < lines
            and (parent in branches or parent in chosen)
            and below.get(parent, 0) < SIBLINGS
        ):
            chosen.append(node)
            below[parent] = below.get(parent, 0) + 1
    for node in sorted(chosen):
        label = Text(f"{_quoted(text_of(pruned.tokens[node - kept]))} not verified", style=REJECTED)
        branches[node] = branches[joint[node]].add(label)
    more: dict[int, int] = {}
    for node in range(kept, len(joint)):
        at = node
        while at not in branches:
            at = joint[at]
        if at != node:
            more[at] = more.get(at, 0) + 1
    for at, count in more.items():
        branches[at].add(Text(f"+ {count} more not verified", style=REJECTED))


def _line(number: int, round_: Round, tree: GrownTree) -> str:
    """One line on a round: nodes verified of those drafted (of all candidates, where it is not
    known which were), levels, accepted."""
    bin_ = "" if tree.bin == NO_BIN else f", bin {tree.bin}"
    among = (
        f"{tree.pool} grown"
        if tree.pruned is None
        else f"{len(tree.tokens) + len(tree.pruned.tokens)} drafted"
    )
    return (
        f"round {number}: {len(tree.tokens)} nodes verified of {among}, depth "
        f"{max(tree.depths, default=0)}{bin_}, {len(round_.path)} accepted"
    )


def chosen_nodes(tree: GrownTree, path: list[int], lines: int) -> list[int]:
    """Which kept nodes to draw, in creation order: the accepted path, then those whose path takes
    the fewest steps aside and down.

    Every node's parent is drawn with it, so that what is drawn is a tree.
    """
    order = _aside(tree.parents)
    chosen = list(path[:lines])
    for node in sorted(range(len(order)), key=lambda n: (order[n], n)):
        if len(chosen) >= lines:
            break
        if node not in chosen:  # its parent has a smaller order, so it is in
            chosen.append(node)
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
    then these; null where these were not kept.
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
        "pruned": None if tree.pruned is None else tree.pruned._asdict(),
    }


def _quoted(text: str) -> str:
    """Text on one line, its spaces and line ends visible."""
    return json.dumps(text, ensure_ascii=False)

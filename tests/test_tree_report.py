"""Draft trees drawn on a terminal, and by `generate` on a tiny pair."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doors import Door, one_object
from rich.console import Console

from spectune.optimizer.report.drawn_trees import LINES, tree_view
from spectune.runtime.loop import Round
from spectune.runtime.trees.draft import GrownTree, Pruned
from spectune.traces.schema import Step

TOP_K = (
    '{"draft": "near", "growth": {"kind": "top_k", "width": 3}, "window": {"kind": "fixed", '
    '"gamma": 3}, "select": {"top_n": 12}}'
)

# --- drawing rounds


def a_round() -> Round:
    """A tree of two levels, its second child accepted, then that one's first child."""
    tree = GrownTree(
        tokens=[10, 11, 12, 20, 21, 22],
        parents=[-1, -1, -1, 0, 1, 1],
        depths=[1, 1, 1, 2, 2, 2],
        pool=9,
    )
    return Round(Step(5, 6, 7, 2, 3, 2, depth=2), [11, 21, 99], tree.tokens, None, tree, [1, 4])


def drawn(view: Any, **how: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=60, **how).print(view)
    return out.getvalue()


def with_pruned() -> Round:
    """The same round: of the root's two children more, one of the first node, and one of the second
    with a child of its own."""
    round_ = a_round()
    assert round_.tree is not None
    round_.tree.pruned = Pruned([13, 14, 23, 24, 30], [-1, -1, 0, 1, 9], [1, 1, 2, 2, 3])
    return round_


def test_what_was_not_verified_is_drawn_too() -> None:
    view = tree_view(3, with_pruned(), "root", lambda token: f"t{token}")
    text = drawn(view)
    assert text.splitlines() == [
        "round 3: 6 nodes verified of 11 drafted, depth 2, 2 accepted",
        '"root"',
        '├── "t10"',
        '│   ├── "t20"',
        '│   └── "t23" not verified',
        '├── "t11"',
        '│   ├── "t21"',
        '│   │   └── "t99"',
        '│   ├── "t22"',
        '│   └── "t24" not verified',
        '│       └── "t30" not verified',
        '├── "t12"',
        '├── "t13" not verified',
        '└── "t14" not verified',
    ]
    assert text in (Path(__file__).parents[1] / "docs" / "trees.md").read_text(encoding="utf-8")
    coloured = drawn(view, force_terminal=True, color_system="standard", no_color=False)
    assert '\x1b[2m"t24" not verified' in coloured


def test_a_large_tree_is_cut_but_never_its_path() -> None:
    text = drawn(tree_view(3, a_round(), "root", lambda token: f"t{token}", lines=3))
    assert re.findall(r"t\d\d", text) == ["t10", "t11", "t21", "t99"]
    assert "… 3 more verified" in text


def test_every_node_is_drawn_or_counted_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        n, more = int(rng.integers(1, 60)), int(rng.integers(0, 60))
        parents = [int(rng.integers(-1, i)) for i in range(n + more)]
        path, at = [], -1
        while (children := [i for i in range(n) if parents[i] == at]) and rng.integers(3):
            at = int(rng.choice(children))
            path.append(at)
        tree = GrownTree(tokens=list(range(n)), parents=parents[:n], depths=[1] * n)
        tree.pruned = Pruned(list(range(n, n + more)), parents[n:], [1] * more)
        round_ = Round(Step(0, n, n + 1, 0, len(path), 1), [], [], None, tree, path)
        text = drawn(tree_view(1, round_, "root", lambda token: f"t{token}"))
        shown = re.findall(r'"t(\d+)"( not verified)?', text)
        nodes = [int(token) for token, _ in shown]
        assert len(set(nodes)) == len(nodes)
        assert set(path[:LINES]) <= set(nodes)
        assert all(parents[i] in (-1, *nodes) for i in nodes)
        assert all((node >= n) == bool(mark) for node, (_, mark) in zip(nodes, shown, strict=True))
        verified = sum(node < n for node in nodes)
        assert verified == min(LINES, n)
        left = [int(count) for count in re.findall(r"\+ (\d+) more not verified", text)]
        assert len(nodes) - verified <= LINES
        assert len(nodes) - verified + sum(left) == more


# --- the commands


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Door:
    folder = tmp_path_factory.mktemp("report")
    return Door(str(folder / "spectune.db"), str(tiny_pair))


def test_generate_draws_trees(door: Door) -> None:
    common = ("generate", "def add(", "--pair", door.pair, "--policy")
    trees = (*common, TOP_K, "--max-new-tokens", 16)
    made = door.json(*trees)
    assert made["same_text"] is True
    assert len(made["trees"]) == made["rounds"]
    output: list[int] = []
    for tree in made["trees"]:
        if tree is None:
            output += made["token_ids"][len(output) : len(output) + 1]
            continue
        path = tree["path"]
        assert tree["start"] == len(output)
        assert len(tree["tokens"]) == len(tree["parents"]) == len(tree["depths"]) <= 12
        assert [tree["tokens"][n] for n in path] == tree["emitted"][: len(path)]
        assert [tree["parents"][n] for n in path] == [-1, *path][: len(path)]
        output += tree["emitted"]
    assert output == made["token_ids"]
    last = door.call(*trees)
    assert last.exit_code == 0
    assert len(re.findall(r"^round \d+: \d+ nodes verified", last.stdout, re.MULTILINE)) == 1
    every = door.call(*trees, "--show-trees")
    shown = len(re.findall(r"^round \d+: ", every.stdout, re.MULTILINE))
    assert shown == sum(t is not None for t in made["trees"])
    assert "\x1b[" not in every.stdout
    chain = door.call(*common, '{"draft": "near"}', "--max-new-tokens", 8, "--json")
    assert "trees" not in one_object(chain.stdout)
    assert "nodes verified" not in chain.stderr

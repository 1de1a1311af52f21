"""The tree report: its numbers on forests whose answers are known, its page parsed, and the
commands on a tiny pair."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from databases import opened
from doors import Door, one_object, write_workload
from recorded_texts import plain_texts
from rich.console import Console
from test_store import damage
from trace_values import a_trajectory

from spectune.db.models import ArtifactRow, StudyRow
from spectune.optimizer.report.drawn_trees import LINES, tree_view
from spectune.optimizer.report.tree_page import page
from spectune.optimizer.report.trees import (
    SHARES,
    Starts,
    Stored,
    TreeReport,
    TreeShape,
    bin_lines,
    heat,
    phi_grid,
    rank_profile,
    starts_of,
    tree_report,
)
from spectune.optimizer.simulate.forest import join_trees
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.tree_tables import ABSENT, GrowthTable
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import Round
from spectune.runtime.policies.artifacts import Fitted
from spectune.runtime.policies.document import Policy, parse_plain_policy, parse_policy
from spectune.runtime.policies.prepare import prepare
from spectune.runtime.recording.trees import record_tree_panorama
from spectune.runtime.trees.draft import GrownTree, Pruned
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Sampling, Step, TreePanorama

FIGURES = ("ranks", "within", "accepted", "phi", "probability", "acceptance", "difference")
FIGURES += ("gamma", "verified", "bins", "categories")
TOP_K = (
    '{"draft": "near", "growth": {"kind": "top_k", "width": 3}, "window": {"kind": "fixed", '
    '"gamma": 3}, "select": {"top_n": 12}}'
)

# --- numbers


def a_table(ranks: list[list[int]], phi: list[int]) -> GrowthTable:
    """A growth table of which only the ranks at full depth and the last Phi are known."""
    table = GrowthTable.empty(len(ranks), len(ranks[0]))
    table.rank[:, -1], table.phi[:, -1] = ranks, phi
    return table


def test_the_rank_is_that_of_the_deepest_accepted_node() -> None:
    table = a_table(
        [[0, 3, 9], [0, 3, 10], [4, ABSENT, ABSENT], [10, 11, 12], [ABSENT] * 3, [0, 1, 2]],
        [16, 32, 48, 64, 80, 96],
    )
    limit = np.array([3, 9, 3, 3, 4, 2])  # the last start's budget ends before its third level
    starts = starts_of(table, limit, 10)
    assert starts.tcr.tolist() == [10, 4, 5, 0, 0]
    assert starts.accepted.tolist() == [3, 2, 1, 0, 0]
    assert starts.phi.tolist() == [16, 32, 48, 64, 80]
    profile = rank_profile(starts, 10)
    assert (profile["starts"], profile["count"]) == (5, [2, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1])
    assert (profile["accepted"][4], profile["accepted"][1]) == (2.0, None)
    assert profile["phi"][0] == pytest.approx((64 + 80) / 2 / 16)
    assert profile["within"][SHARES.index(0.5)] == pytest.approx(2 / 3)
    assert (profile["within"][-1], profile["top_quarter"]) == (1.0, 0.0)
    assert profile["quartiles"] == [4, 5, 10]


def roots_only(entropy: list[int], logp: list[list[int]], slots: list[int]) -> TreePanorama:
    """A panorama of nothing but a text's own prefixes."""
    n, width = len(entropy) + 1, len(logp[0])
    last = np.full((1, width), 255, np.uint8)
    codes = np.concatenate([np.array(logp, np.uint8), last])
    flat = np.array([*entropy, 0], np.uint8)
    none, tokens = np.zeros(0, np.uint8), np.zeros((n, width), np.int32)
    return TreePanorama(
        "small", width, 3, "coupled", True, (), none.astype(np.int32), none, tokens, codes, codes,
        np.full(n, width, np.uint8),
        flat, flat, np.array([*slots, 255], np.uint8),
    )  # fmt: skip


def test_heat_maps_of_known_laws() -> None:
    """Low entropy: the first child is accepted 1 time in 2 though its q is about 0.8; high entropy:
    always, though it is about 0.2."""
    low, high = int(-16 * np.log(0.8)), int(-16 * np.log(0.2))
    entropy = [2, 2, 2, 2, 60, 60, 69, 69]
    laws = [[low, 30]] * 4 + [[high, 30]] * 4
    trees = roots_only(entropy, laws, [0, 255, 1, 0, 0, 0, 0, 0])
    found = heat(join_trees([a_trajectory(1, n=8)], [trees]), 2)
    assert (len(found["edges"]), found["edges"][0]) == (8, 0.0)
    assert found["edges"][-1] == pytest.approx(70 / 16)
    assert found["count"] == [4, 0, 0, 0, 0, 0, 4]
    assert found["acceptance"] == [[0.5, 0.25], *[[None, None]] * 5, [1.0, 0.0]]
    assert found["probability"][0][0] == pytest.approx(0.8, rel=0.04)
    assert found["probability"][-1][0] == pytest.approx(0.2, rel=0.04)


# --- a recorded pair


@pytest.fixture(scope="module")
def trace(pair: LoadedPair) -> ReplayTrace:
    """Four texts of the tiny pair, greedy and sampled, with trees of draft ``near``."""
    texts, trees = [], []
    prompts = ("def add(a, b):", "The quick brown", "for i in", "Ann buys 4 apples")
    for i, prompt in enumerate(prompts):
        sampling = Sampling() if i < 2 else Sampling(temperature=0.8, seed=i)
        (text,) = plain_texts(pair, {f"r{i}": prompt}, sampling, 24)
        texts.append(replace(text, category="ab"[i % 2]))
        trees.append(record_tree_panorama(pair, texts[-1], "near", 4, 4))
    return ReplayTrace(texts, {}, trees={("near", "coupled"): trees})


def top_k(width: int, **window: Any) -> Policy:
    """A tree of draft ``near``."""
    blocks = {"window": window} if window else {}
    growth = {"kind": "top_k", "width": width}
    return parse_plain_policy({"draft": "near", "growth": growth, **blocks})


SHAPE = TreeShape("near", 4, 4, 16)
TOO_WIDE = top_k(8)
"""It reads more children than there are."""


@pytest.fixture(scope="module")
def report(trace: ReplayTrace) -> TreeReport:
    def artifacts(name: str) -> Fitted:
        if name != "bins":
            raise PolicyError(f"there is no artifact {name!r} here")
        return Fitted("bins", {"thresholds": [20, 60], "depth": 4, "draft": "near"}, {})

    tried = [(top_k(2, kind="fsm", gamma_max=4), "study"), (TOO_WIDE, "study")]
    stored = [Stored("bins", "bins", (20, 60), 4), Stored("gone", "static_tree")]
    about = [("recording", "rec-1 <complete>"), ("pair", "tiny & small")]
    return tree_report(trace, SHAPE, stored=stored, tried=tried, artifacts=artifacts, about=about)


def test_the_curves_are_what_replay_says(trace: ReplayTrace, report: TreeReport) -> None:
    for gamma, row in enumerate(report.gammas, 1):
        chain = parse_policy({"draft": "near", "window": {"kind": "fixed", "gamma": gamma}})
        chain_tau, tree_tau = (
            run_replay(trace, policy).total.mean_accepted_length
            for policy in (chain, replace(SHAPE, depth=gamma).policy)
        )
        assert row == {"gamma": gamma, "chain": chain_tau, "tree": tree_tau}
        assert tree_tau >= chain_tau
    by_label = {p.label: p for p in report.points}
    tree = run_replay(trace, SHAPE.policy)
    point = by_label[tree.policy.label()]
    counts = tree.total
    assert (point.tau, point.origin, point.missing) == (counts.mean_accepted_length, "grid", 0.0)
    assert point.per_token == counts.verified_tokens / counts.emitted_tokens
    assert point.per_round == counts.verified_tokens / counts.rounds
    assert {p.family for p in report.points} == {"chain", "EAGLE-2", "static", "HeteroSpec"}
    assert any(p.origin == "study" for p in report.points)
    assert [s.split(": ")[0] for s in report.skipped] == [
        "near fixed(gamma=4) static(gone)",
        TOO_WIDE.label(),
    ]
    assert {c["category"]: c["tree_tau"] for c in report.categories} == {
        name: c.mean_accepted_length for name, c in tree.outcome().by_category.items()
    }


def test_ranks_agree_with_the_rounds_of_a_replay(trace: ReplayTrace, report: TreeReport) -> None:
    """From every start that a replay visits with its whole window, as many are accepted as the
    ranks say."""
    policy = SHAPE.policy
    prepared = prepare(policy, ["near"])
    assert prepared.rules is not None
    limit = trace.forests["near", "coupled"].limit
    starts = starts_of(trace.growth(policy, prepared.rules), limit, 16)
    place = np.cumsum(limit >= 4) - 1
    checked = 0
    for request, steps in enumerate(run_replay(trace, policy, per_round=True).steps()):
        for step in steps:
            at = int(trace.offsets[request]) + step.start
            if limit[at] >= 4:
                assert starts.accepted[place[at]] == step.accepted
                checked += 1
    assert checked > 10
    count = report.ranks["count"]
    assert report.ranks["starts"] == sum(count) == int((limit >= 4).sum())
    assert sum(report.bins["starts"]) == sum(count) - count[0]


# --- the page


class Page(HTMLParser):
    """A page that needs nothing else: nesting is checked, coordinates lie in their picture, nothing
    acts or loads; ids, text and the sizes of pictures are collected."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.named: list[str] = []
        self.tags: list[str] = []
        self.boxes: list[tuple[float, float]] = []
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        assert set(self.named) <= set(self.ids)
        assert not {"script", "img", "link", "iframe", "object", "a"} & set(self.tags)
        assert not re.search(r"https?:|//\w|url\(|@import|\bnan\b|\binf\b", text, re.IGNORECASE)
        assert "prefers-color-scheme: dark" in text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        given = {name: value or "" for name, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        self.named += given.get("aria-labelledby", "").split()
        assert not any(name.startswith("on") or name in ("src", "href", "style") for name in given)
        if tag == "svg":
            _, _, width, height = map(float, given["viewbox"].split())
            self.boxes.append((width, height))
        elif "svg" in self.open and "transform" not in given:
            points = [p.split(",") for p in given.get("points", "").split()]
            xs = [given[n] for n in ("x", "x1", "x2", "cx") if n in given] + [p[0] for p in points]
            ys = [given[n] for n in ("y", "y1", "y2", "cy") if n in given] + [p[1] for p in points]
            for values, size in zip((xs, ys), self.boxes[-1], strict=True):
                assert all(-1 <= float(v) <= size + 1 for v in values), (tag, given)
            assert all(float(given.get(name) or 0) >= 0 for name in ("width", "height", "r"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def check_page(text: str) -> str:
    """What a page with all figures says."""
    found = Page(text)
    assert found.tags.count("svg") == found.tags.count("figure") == len(FIGURES)
    assert found.named == [f"{name}-{part}" for name in FIGURES for part in "td"]
    assert set(FIGURES) <= set(found.ids)
    return " ".join(found.said)


def test_the_page_is_whole(report: TreeReport) -> None:
    said = check_page(page(report))
    for wanted in (
        "rec-1 <complete>",
        "tiny & small",
        "thresholds of bins bins",
        "policies left out",
        f"{report.gammas[-1]['tree']:.3f}",
    ):
        assert wanted in said
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["about"]["pair"] == "tiny & small"
    assert len(data["points"]) == len(report.points)
    for missing in (0.0, 0.01):
        points = [replace(p, missing=missing) for p in report.points]
        assert ('class="hollow s' in page(replace(report, points=points))) == (missing > 0)


def test_a_page_of_little_is_whole_too(report: TreeReport) -> None:
    empty = np.zeros(0, np.int64)
    starts = Starts(empty, empty, empty)
    poor = replace(
        report,
        ranks=rank_profile(starts, report.top_n),
        grid=phi_grid(starts, report.top_n),
        bins=bin_lines(starts, 4, None),
        points=(),
        categories=(),
        skipped=tuple(f"p{i}: reason" for i in range(50)),
    )
    said = check_page(page(poor))
    assert "`fit bins`" in said
    assert "30 more" in said


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
    write_workload(folder / "work.jsonl", 4)
    return Door(str(folder / "spectune.db"), str(tiny_pair))


@pytest.fixture(scope="module")
def recorded(door: Door) -> tuple[str, str]:
    """A recording with trees, and one without."""
    work = Path(door.db).parent / "work.jsonl"
    common = ("record", "--pair", door.pair, "--workload", work, "--fresh")
    common += ("--max-new-tokens", 16, "--gamma-max", 4)
    bare = door.json(*common, "--limit", 2)["recording"]
    return door.json(*common, "--tree-width", 3, "--tree-depth", 3)["recording"], bare


def test_the_report_of_a_recording(door: Door, recorded: tuple[str, str], tmp_path: Path) -> None:
    name, bare = recorded
    out = tmp_path / "trees.html"
    made = door.json("traces", "report", name, "--out", out, "--draft", "near", "--top-n", 12)
    assert (made["path"], made["recording"], made["draft"]) == (str(out), name, "near")
    assert (made["width"], made["depth"], made["top_n"]) == (3, 3, 12)
    assert made["tokens"] == door.json("traces", "show", name)["n_output_tokens"]
    assert name in check_page(out.read_text(encoding="utf-8"))
    # Without --draft: the first that has trees.
    shown = door.call("traces", "report", name, "--out", out, "--depth", 2)
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"{out}: trees of draft far, ")
    for arguments, words in (
        ((bare,), f"recording {bare} has no trees of all its requests; `"),
        (
            (name, "--draft", "ngram"),
            "has no trees of draft 'ngram' of all its requests (it has those of: far, near)",
        ),
        ((name, "--width", 5), "width 3 and depth 3, not 5 and 3; `"),
        ((name, "--out", tmp_path / "no" / "x.html"), "there is no folder"),
    ):
        assert words in door.error("traces", "report", *arguments)


def test_the_report_finds_what_was_fitted_and_tried(
    door: Door, recorded: tuple[str, str], tmp_path: Path
) -> None:
    """What is damaged is left out."""
    name, _ = recorded
    policy = top_k(2, kind="fsm", gamma_max=3)
    with opened(door.db) as store:
        pair = store.get_recording(name).pair_id

        def bins(draft: str, *thresholds: int) -> str:
            document = {"thresholds": thresholds, "depth": 3, "draft": draft}
            return store.put_artifact("bins", document, pair_id=pair)

        _, new, _ = bins("near", 5), bins("near", 15, 40), bins("far", 99)
        damage(store, ArtifactRow, bins("near", 20))
        trials = [
            {"policy": policy.spelled_out(), "id": policy.id, "value": 2.0, "origin": "x"},
            {"policy": {"draft": "near", "no": 1}},
        ]
        study: dict[str, Any] = {"sampler": "none", "seed": 0, "document": {}}
        store.put_study(pair, **study, trials=trials, recording_id=name)
        store.put_study(pair, **study, trials=trials[:1], recording_id=None)
        damaged = store.put_study(pair, **study, trials=trials, recording_id=name)
        damage(store, StudyRow, damaged)
    out = tmp_path / "x.html"
    made = door.json("traces", "report", name, "--out", out, "--draft", "near", "--top-n", 12)
    assert made["bins"]["artifact"] == new
    assert made["bins"]["thresholds"] == [15 / 16, 40 / 16]
    origins = {p["origin"]: p for p in made["points"]}
    assert origins["study"]["policy"] == policy.id
    assert "HeteroSpec" in {p["family"] for p in made["points"]}


def test_generate_draws_trees(door: Door, recorded: tuple[str, str]) -> None:
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

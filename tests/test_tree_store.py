"""Tree panoramas packed, stored, widened and found damaged; and the databases that are older
than they."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from test_store import damage
from trace_values import a_recording, a_trajectory, a_tree

from spectune.db import NotFoundError, check
from spectune.db.models import PanoramaChunkRow
from spectune.traces.errors import TraceError
from spectune.traces.packing import pack_tree, unpack_tree
from spectune.traces.recording import TreeExtent
from spectune.traces.schema import TreePanorama
from spectune.traces.store import TraceStore
from spectune.traces.store.prune import prune
from spectune.traces.store.query import TraceFilter, acceptance_stats, request_rows


def put_trees(
    store: TraceStore, recording: str, n: int, draft: str = "small", **how: Any
) -> list[TreePanorama]:
    made = [a_tree(a_trajectory(i), draft, seed=i, **how) for i in range(n)]
    assert store.put_panoramas(recording, list(enumerate(made))) == n
    return made


# --- packing


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("n", "vocab", "width"), [(0, 300, 5), (1, 65536, 1), (70, 150_000, 10)])
def test_a_tree_comes_back_equal(n: int, vocab: int, width: int, greedy: bool) -> None:
    covers = ('{"kind":"top_k","width":1}', '{"kind":"static","paths":[[0],[1]]}')
    how: dict[str, Any] = {"width": width, "greedy": greedy, "vocab": vocab}
    tree = a_tree(a_trajectory(1, n=n), "small", depth=7, covers=covers, **how)
    back = unpack_tree(pack_tree(tree))
    assert back == tree
    assert all(getattr(back, name).flags.c_contiguous for name in back.columns())


def test_codes_of_every_value_come_back() -> None:
    """Differences are modulo 65536, so no order of the codes is special."""
    tree = a_tree(a_trajectory(1), "small", width=6)
    rng = np.random.default_rng(5)
    for logp, gap in (
        (0, 65535),
        (65535, 0),
        (rng.integers(0, 65536, tree.logp.shape), rng.integers(0, 65536, tree.gap.shape)),
    ):
        other = replace(tree, logp=np.full_like(tree.logp, logp), gap=np.full_like(tree.gap, gap))
        assert unpack_tree(pack_tree(other)) == other


# --- storing


def test_trees_come_back_beside_chains_when_asked_for(store: TraceStore) -> None:
    recording = a_recording(store, n=3, drafts=("ngram", "small"))
    made = put_trees(store, recording, 3)
    chains = store.load(recording)
    assert all(not r.trees for r in chains.requests)
    assert chains.drafts == ("ngram", "small")
    loaded = store.load(recording, ["small"], trees=True)
    assert loaded.trees("small") == tuple(made)
    assert loaded.panoramas("small") == chains.panoramas("small")
    assert store.load(recording, ["ngram"], trees=True).requests[0].trees == {}
    (second,) = store.iterate(recording, trees=True, ordinals=[1])
    assert second.trees == {"small": made[1]}
    info = store.get_recording(recording)
    assert info.drafts == {"ngram": 3, "small": 3}
    assert info.trees == {"small": TreeExtent(3, 4, 3)}
    assert info.to_json()["trees"] == {"small": {"count": 3, "width": 4, "depth": 3}}
    assert info.trees_shown() == "small 4x3"


def test_questions_about_chains_do_not_see_trees(store: TraceStore) -> None:
    recording = a_recording(store, n=3)
    before = acceptance_stats(store.database), list(request_rows(store.database))
    put_trees(store, recording, 3)
    put_trees(store, recording, 3, draft="head")
    assert (acceptance_stats(store.database), list(request_rows(store.database))) == before
    assert list(request_rows(store.database, TraceFilter(draft="head"))) == []


def test_missing_trees_are_those_too_narrow_too_flat_or_not_covering(store: TraceStore) -> None:
    recording = a_recording(store, n=4)

    def missing(draft: str = "small", width: int = 4, depth: int = 3, **how: Any) -> list[int]:
        return [*store.missing_panoramas(recording, draft, depth, width=width, **how)]

    assert missing(width=1, depth=1) == [0, 1, 2, 3]
    assert store.tree_limits(recording, "small") == (0, 0, ())
    for ordinal, (width, depth, covers) in enumerate(
        [(4, 3, ("a",)), (6, 3, ("a", "b")), (4, 5, ("c",))]
    ):
        tree = a_tree(a_trajectory(ordinal), "small", width=width, depth=depth, covers=covers)
        assert store.put_panoramas(recording, [(ordinal, tree)]) == 1
    assert missing() == [3]
    assert missing(width=5) == [0, 2, 3]
    assert missing(depth=4) == [0, 1, 3]
    assert missing(covers=("a", "b")) == [0, 2, 3]
    assert missing("other") == [0, 1, 2, 3]
    assert store.tree_limits(recording, "small") == (6, 5, ("a", "b", "c"))
    info = store.get_recording(recording)
    assert info.trees == {"small": TreeExtent(3, 4, 3)}
    assert info.trees_shown() == "small 4x3 (3 of 4)"
    for ask in (store.tree_limits, lambda r, d: store.missing_panoramas(r, d, 1)):
        with pytest.raises(NotFoundError, match="no recording 'rec-0'"):
            ask("rec-0", "small")


def test_trees_are_replaced_by_what_holds_more_and_never_narrowed(store: TraceStore) -> None:
    recording = a_recording(store, n=1)
    text = a_trajectory(0)
    first = a_tree(text, "small", width=4, depth=3, covers=("a", "b"))
    assert store.put_panoramas(recording, [(0, first)]) == 1
    for width, depth, covers in ((3, 9, ("a", "b")), (9, 2, ("a", "b")), (9, 9, ("a",))):
        less = a_tree(text, "small", width=width, depth=depth, covers=covers)
        assert store.put_panoramas(recording, [(0, less)]) == 0
    assert store.load(recording, trees=True).trees("small") == (first,)
    for more in (
        a_tree(text, "small", seed=9, covers=("a", "b")),
        a_tree(text, "small", width=5, covers=("a", "b", "c")),
    ):
        assert store.put_panoramas(recording, [(0, more)]) == 1
        assert store.load(recording, trees=True).trees("small") == (more,)


def test_absent_trees_name_the_command(store: TraceStore) -> None:
    recording = a_recording(store, n=2)
    put_trees(store, recording, 1)
    loaded = store.load(recording, trees=True)
    command = f"--resume {recording} --tree-width 8 --tree-depth 8"
    with pytest.raises(TraceError, match=rf"1 tree panoramas .* for 2 requests; .*{command}"):
        loaded.trees("small")
    assert len(loaded.having(trees=["small"]).trees("small")) == 1
    put_trees(store, recording, 2)
    with pytest.raises(TraceError, match="load it with trees=True"):
        store.load(recording).trees("small")


def test_a_damaged_tree_is_found(store: TraceStore, url: str) -> None:
    recording = a_recording(store, n=3, trees=True)
    damage(store, PanoramaChunkRow, recording, 1, "small", "tree")
    report = check(url)
    assert [(c.table, c.key["ordinal"], c.key["kind"]) for c in report.bad_chunks] == [
        ("panorama_chunk", 1, "tree")
    ]
    assert (report.integrity, report.bad_chunks[0].problem) == ((), "checksum differs")


# --- removing


def test_trees_go_with_their_recording(store: TraceStore) -> None:
    recording = a_recording(store, n=2, trees=True)
    plan = prune(store.database, recordings=[recording], dry_run=True)
    with store.database.read() as session:
        held = session.scalar(sa.select(sa.func.sum(sa.func.length(PanoramaChunkRow.data))))
    assert plan.size_bytes > held > 0
    prune(store.database, recordings=[recording])
    with store.database.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(PanoramaChunkRow)) == 0

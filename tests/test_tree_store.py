"""Panoramas of trees packed, stored, widened and found damaged."""

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
from spectune.traces.packing import pack_panorama, unpack_panorama
from spectune.traces.recording import Extent
from spectune.traces.schema import Panorama
from spectune.traces.store import TraceStore
from spectune.traces.store.prune import prune


def put_trees(
    store: TraceStore, recording: str, n: int, draft: str = "small", **how: Any
) -> list[Panorama]:
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
    back = unpack_panorama(pack_panorama(tree))
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
        assert unpack_panorama(pack_panorama(other)) == other


# --- storing


def test_trees_come_back_by_draft(store: TraceStore) -> None:
    recording = a_recording(store, n=3, drafts=("ngram",))
    made = put_trees(store, recording, 3)
    loaded = store.load(recording, ["small"])
    assert loaded.panoramas("small") == tuple(made)
    (second,) = store.iterate(recording, ordinals=[1])
    assert second.panoramas["small"] == made[1]
    info = store.get_recording(recording)
    assert info.drafts == {"ngram": Extent(3, 16, 1, 1), "small": Extent(3, 16, 4, 3)}
    assert info.with_trees == ("small",)
    small = {"count": 3, "gamma_max": 16, "width": 4, "depth": 3}
    assert info.to_json()["drafts"]["small"] == small
    assert info.shown() == "ngram 16, small 16 and trees 4x3"


def test_missing_are_those_too_short_too_narrow_too_flat_or_not_covering(store: TraceStore) -> None:
    recording = a_recording(store, n=4, drafts=())

    def missing(*least: Any) -> list[int]:
        return [*store.missing_panoramas(recording, "small", *least)]

    assert missing(1) == [0, 1, 2, 3]
    assert store.most_held(recording, "small") == (0, 0, 0, ())
    for ordinal, (gamma, width, depth, covers) in enumerate(
        [(4, 4, 3, ("a",)), (8, 6, 3, ("a", "b")), (5, 4, 5, ("c",))]
    ):
        how: dict[str, Any] = {"gamma_max": gamma, "width": width, "depth": depth}
        tree = a_tree(a_trajectory(ordinal), "small", covers=covers, **how)
        assert store.put_panoramas(recording, [(ordinal, tree)]) == 1
    assert missing(4) == missing(4, 4, 3) == [3]
    assert missing(5) == [0, 3]
    assert missing(4, 5) == [0, 2, 3]
    assert missing(4, 4, 4) == [0, 1, 3]
    assert missing(4, 4, 3, ("a", "b")) == [0, 2, 3]
    assert [*store.missing_panoramas(recording, "other", 1)] == [0, 1, 2, 3]
    assert store.most_held(recording, "small") == (8, 6, 5, ("a", "b", "c"))
    info = store.get_recording(recording)
    assert info.drafts == {"small": Extent(3, 4, 4, 3)}
    assert info.shown() == "small 4 and trees 4x3 (3 of 4)"
    for ask in (store.most_held, lambda r, d: store.missing_panoramas(r, d, 1)):
        with pytest.raises(NotFoundError, match="no recording 'rec-0'"):
            ask("rec-0", "small")


def test_panoramas_are_replaced_by_what_holds_more_and_never_narrowed(store: TraceStore) -> None:
    recording = a_recording(store, n=1)
    text = a_trajectory(0)
    first = a_tree(text, "small", width=4, depth=3, covers=("a", "b"))
    with pytest.raises(TraceError, match=r"0 panoramas of draft 'large' for 1 requests .*--resume"):
        store.load(recording).panoramas("large")
    assert store.put_panoramas(recording, [(0, replace(first, covers=()))]) == 0, "no acceptance"
    first = replace(first, covers=("acceptance", "a", "b"))
    assert store.put_panoramas(recording, [(0, first)]) == 1
    for changed in ({"width": 3}, {"depth": 2}, {"gamma_max": 8}, {"covers": ("a",)}):
        how: dict[str, Any] = {"width": 9, "depth": 9, "covers": first.covers, **changed}
        assert store.put_panoramas(recording, [(0, a_tree(text, "small", **how))]) == 0
    assert store.load(recording).panoramas("small") == (first,)
    for more in (
        a_tree(text, "small", seed=9, covers=first.covers),
        a_tree(text, "small", width=5, covers=(*first.covers, "c")),
    ):
        assert store.put_panoramas(recording, [(0, more)]) == 1
        assert store.load(recording).panoramas("small") == (more,)


def test_a_damaged_tree_is_found(store: TraceStore, url: str) -> None:
    recording = a_recording(store, n=3, trees=True)
    damage(store, PanoramaChunkRow, recording, 1, "small")
    report = check(url)
    assert [(c.table, c.key["ordinal"], c.key["draft"]) for c in report.bad_chunks] == [
        ("panorama_chunk", 1, "small")
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

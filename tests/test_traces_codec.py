"""Chunks: what is packed comes back equal, damage is noticed, and the size is what was promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from trace_values import a_panorama, a_recording, a_trajectory, a_tree, steps_of

from spectune.db import CorruptedChunkError
from spectune.db.models import PanoramaChunkRow, StepChunkRow, TrajectoryRow
from spectune.traces.codec import (
    SCHEMA_VERSION,
    CodecError,
    pack,
    unpack,
)
from spectune.traces.packing import (
    pack_chain,
    pack_steps,
    unpack_chain,
    unpack_steps,
)
from spectune.traces.schema import AGREE_NO, ChainPanorama, Step
from spectune.traces.store import TraceStore

DTYPES = st.sampled_from(
    [np.uint8, np.uint16, np.int32, np.int64, np.float32, np.float64, np.bool_]
)
ARRAYS = DTYPES.flatmap(
    lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
)
few = settings(max_examples=60, deadline=None)


@few
@given(
    st.dictionaries(st.text(max_size=8), ARRAYS, max_size=4),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=3),
)
def test_any_columns_come_back_equal(columns: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    back, got = unpack(pack(columns, meta))
    assert got == meta
    assert list(back) == list(columns)
    for name, column in columns.items():
        assert back[name].dtype == column.dtype
        assert np.array_equal(back[name], column, equal_nan=column.dtype.kind == "f")
        assert back[name].shape == column.shape


@st.composite
def panoramas(draw: st.DrawFn) -> ChainPanorama:
    agree = draw(hnp.arrays(np.uint8, st.integers(0, 40), elements=st.integers(0, 2)))
    gamma_max = draw(st.integers(1, 20))
    n, branches = len(agree), int((agree == AGREE_NO).sum()) + 1
    column = [draw(hnp.arrays(np.uint16, n)) for _ in range(3)]
    off = [draw(hnp.arrays(np.uint16, (branches, gamma_max))) for _ in range(2)]
    lengths = draw(hnp.arrays(np.uint8, branches, elements=st.integers(0, gamma_max)))
    return ChainPanorama(draw(st.text(max_size=12)), gamma_max, agree, *column, *off, lengths)


@few
@given(panoramas())
def test_any_panorama_comes_back_equal(panorama: ChainPanorama) -> None:
    assert unpack_chain(pack_chain(panorama)) == panorama


counts = st.integers(0, 2**31 - 1)
times = st.integers(0, 10**13).map(lambda ns: ns / 1e9)
any_step = st.tuples(
    *[counts] * 7, st.text(max_size=5), st.text(max_size=5), times, times, times
).map(lambda fields: Step(*fields))


@few
@given(st.lists(any_step, max_size=30))
def test_any_steps_come_back_equal(steps: list[Step]) -> None:
    assert unpack_steps(pack_steps(steps)) == tuple(steps)
    timed = [s._replace(batch=3, arrived_s=1.5, ended_s=2.0 + n) for n, s in enumerate(steps)]
    assert unpack_steps(pack_steps(timed)) == tuple(timed)


@few
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(where: int, bit: int) -> None:
    chunk = pack_chain(a_panorama(a_trajectory(0), "small"))
    damaged = bytearray(chunk.data)
    damaged[where % len(damaged)] ^= 1 << bit
    with pytest.raises(CodecError, match="checksum differs"):
        unpack_chain(replace(chunk, data=bytes(damaged)))


def test_another_version_is_refused() -> None:
    steps = pack_steps(steps_of(a_trajectory(0)))
    with pytest.raises(CodecError, match=f"version {SCHEMA_VERSION + 1}"):
        unpack_steps(replace(steps, schema_version=SCHEMA_VERSION + 1))


@pytest.mark.parametrize("n", [64, 512])
def test_a_position_takes_at_most_24_bytes_packed(n: int) -> None:
    """The budget is 32 bytes on disk with the row around it; docs/log.md has the whole
    measurement."""
    made = [a_panorama(a_trajectory(0, n=n), "small", seed=s, none=0.0) for s in range(10)]
    assert sum(len(pack_chain(panorama).data) for panorama in made) / 10 / n <= 24


def test_a_column_that_is_no_number_is_named() -> None:
    with pytest.raises(CodecError, match="column 'x' is of dtype '<c8'"):
        pack({"x": np.zeros(2, np.complex64)}, {})


def test_all_arrays_of_a_panorama_are_columns() -> None:
    text = a_trajectory(0)
    for made in (a_panorama(text, "small"), a_tree(text, "small")):
        arrays = (name for name, value in vars(made).items() if isinstance(value, np.ndarray))
        assert made.columns() == tuple(arrays)


def test_a_damaged_chunk_costs_itself_alone(store: TraceStore) -> None:
    recording = a_recording(store, n=5, trees=True)
    damaged: list[tuple[Any, dict[str, str], str]] = [
        (TrajectoryRow, {}, "its token ids"),
        (PanoramaChunkRow, {"kind": "chain"}, "panorama of draft 'small'"),
        (StepChunkRow, {}, "its steps"),
        (PanoramaChunkRow, {"kind": "tree"}, "tree panorama of draft 'small'"),
    ]
    with store.database.write() as session:
        for n, (table, of, _) in enumerate(damaged):
            row = session.query(table).filter_by(recording_id=recording, ordinal=n, **of).one()
            row.data = row.data[:-1]
    for ordinal, (*_, what) in enumerate(damaged):
        said = f"recording {recording}, request {ordinal}: {what} cannot be used .*; the others sti"
        with pytest.raises(CorruptedChunkError, match=said):
            list(store.iterate(recording, steps=True, trees=True, ordinals=[ordinal]))
    assert len(list(store.iterate(recording, steps=True, ordinals=[3]))) == 1  # no tree is read
    loaded = store.load(recording, steps=True, trees=True, skip_corrupted=True)
    skipped = [(s.ordinal, s.draft) for s in loaded.skipped]
    assert skipped == [(0, None), (1, "small"), (2, None), (3, "small")]
    (last,) = store.iterate(recording, steps=True, trees=True, ordinals=[4])
    assert loaded.having(["small"], trees=["small"]).requests[-1] == last

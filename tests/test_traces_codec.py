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
from spectune.traces import codec
from spectune.traces.codec import CodecError, pack, unpack
from spectune.traces.packing import pack_panorama, pack_steps, unpack_panorama, unpack_steps
from spectune.traces.schema import Step
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
    st.dictionaries(st.text("abcxyz_", min_size=1, max_size=8), ARRAYS, max_size=4),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=3),
)
def test_any_columns_come_back_equal(columns: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    back, got = unpack(pack(columns, meta))
    assert got == meta
    assert back.keys() == columns.keys()
    for name, column in columns.items():
        assert back[name].dtype == column.dtype
        assert np.array_equal(back[name], column, equal_nan=column.dtype.kind == "f")
        assert back[name].shape == column.shape


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
    chunk = pack_panorama(a_panorama(a_trajectory(0), "small"))
    damaged = bytearray(chunk.data)
    damaged[where % len(damaged)] ^= 1 << bit
    with pytest.raises(CodecError, match="checksum differs"):
        unpack_panorama(replace(chunk, data=bytes(damaged)))


def test_another_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = pack_steps(steps_of(a_trajectory(0)))
    monkeypatch.setattr(codec, "SCHEMA", 9)
    with pytest.raises(CodecError, match="written as schema 1, this program reads 9"):
        unpack_steps(steps)


@pytest.mark.parametrize("n", [0, 60])
def test_any_panorama_comes_back_equal(n: int) -> None:
    for seed in range(10):
        made = a_panorama(a_trajectory(0, n=n), "small", seed=seed, silence=0.1 * (seed % 2))
        assert unpack_panorama(pack_panorama(made)) == made


def test_all_arrays_of_a_panorama_are_columns() -> None:
    text = a_trajectory(0)
    for made in (a_panorama(text, "small"), a_tree(text, "small")):
        arrays = (name for name, value in vars(made).items() if isinstance(value, np.ndarray))
        assert made.columns() == tuple(arrays)


def test_a_damaged_chunk_costs_itself_alone(store: TraceStore) -> None:
    recording = a_recording(store, n=5, trees=True)
    damaged: list[tuple[Any, str]] = [
        (TrajectoryRow, "its token ids"),
        (PanoramaChunkRow, "panorama of draft 'small'"),
        (StepChunkRow, "its steps"),
    ]
    with store.database.write() as session:
        for n, (table, _) in enumerate(damaged):
            row = session.query(table).filter_by(recording_id=recording, ordinal=n).one()
            row.data = row.data[:-1]
    for ordinal, (_, what) in enumerate(damaged):
        said = f"recording {recording}, request {ordinal}: {what} cannot be used .*; the others sti"
        with pytest.raises(CorruptedChunkError, match=said):
            list(store.iterate(recording, steps=True, ordinals=[ordinal]))
    loaded = store.load(recording, steps=True, skip_corrupted=True)
    assert [(s.ordinal, s.draft) for s in loaded.skipped] == [(0, None), (1, "small"), (2, None)]
    (last,) = store.iterate(recording, steps=True, ordinals=[4])
    assert loaded.having(["small"]).requests[-1] == last

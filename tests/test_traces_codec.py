"""Chunks: what is packed comes back equal, damage is noticed, and the size is what was promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from trace_values import a_panorama, a_trajectory, steps_of

from traces.codec import SCHEMA_VERSION, CodecError, pack, unpack
from traces.packing import (
    pack_chain,
    pack_document,
    pack_steps,
    pack_tokens,
    unpack_chain,
    unpack_document,
    unpack_steps,
    unpack_tokens,
)
from traces.schema import AGREE_NO, ChainPanorama, Step

DTYPES = st.sampled_from([np.uint8, np.uint16, np.int32, np.int64, np.float32, np.float64, np.bool_])
ARRAYS = DTYPES.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)))
few = settings(max_examples=60, deadline=None)


@few
@given(st.dictionaries(st.text(max_size=8), ARRAYS, max_size=4), st.dictionaries(st.text(max_size=8), st.integers(), max_size=3))
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
any_step = st.builds(Step, *[counts] * 7, st.text(max_size=5), st.text(max_size=5), times, times, times)


@few
@given(st.lists(any_step, max_size=30))
def test_any_steps_come_back_equal(steps: list[Step]) -> None:
    assert unpack_steps(pack_steps(steps)) == tuple(steps)


@few
@given(hnp.arrays(np.int32, st.integers(0, 50)), hnp.arrays(np.int32, st.integers(0, 50)))
def test_any_tokens_come_back_equal(prompt: np.ndarray, output: np.ndarray) -> None:
    back = unpack_tokens(pack_tokens(prompt, output))
    assert np.array_equal(back[0], prompt)
    assert np.array_equal(back[1], output)
    assert back[0].dtype == back[1].dtype == np.int32


@few
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(where: int, bit: int) -> None:
    chunk = pack_chain(a_panorama(a_trajectory(0), "small"))
    damaged = bytearray(chunk.data)
    damaged[where % len(damaged)] ^= 1 << bit
    with pytest.raises(CodecError, match="checksum differs"):
        unpack_chain(replace(chunk, data=bytes(damaged)))


def test_documents_carry_arrays() -> None:
    document = {"a": [1, 2.5, None, "ž"], "b": {"c": True}}
    array = np.linspace(0, 1, 7)
    back, arrays = unpack_document(pack_document(document, {"x": array}))
    assert back == document
    assert np.array_equal(arrays["x"], array)


def test_other_kinds_and_newer_versions_are_refused() -> None:
    chunk = pack_steps(steps_of(a_trajectory(0)))
    with pytest.raises(CodecError, match="holds 'steps', not 'chain'"):
        unpack_chain(chunk)
    with pytest.raises(CodecError, match=f"version {SCHEMA_VERSION + 1}"):
        unpack_steps(replace(chunk, schema_version=SCHEMA_VERSION + 1))


@pytest.mark.parametrize("n", [64, 128, 512])
def test_a_position_takes_at_most_24_bytes_packed(n: int) -> None:
    """The budget is 32 bytes on disk with the row around it; docs/log.md has the whole measurement."""
    trajectory = a_trajectory(0, n=n)
    size = sum(len(pack_chain(a_panorama(trajectory, "small", seed=s, none=0.0)).data) for s in range(10)) / 10
    assert size / n <= 24

"""Chunks: what is packed comes back equal, damage is noticed, and the size is what was promised."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from trace_values import a_panorama, a_recording, a_trajectory, a_tree, steps_of

from spectune.db import CorruptedChunkError
from spectune.db.models import PanoramaChunkRow, StepChunkRow, TrajectoryRow
from spectune.traces.codec import (
    _HEADERS,
    CODEC,
    RAW_LIMIT,
    SCHEMA_VERSION,
    Chunk,
    CodecError,
    pack,
    unpack,
)
from spectune.traces.packing import (
    pack_chain,
    pack_document,
    pack_steps,
    pack_tokens,
    pack_tree,
    unpack_chain,
    unpack_document,
    unpack_steps,
    unpack_tokens,
    unpack_tree,
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


def test_other_kinds_and_newer_versions_are_refused() -> None:
    for chunk, reader, said in (
        (STEPS, unpack_chain, "holds 'steps', not 'chain'"),
        (TREE, unpack_chain, "holds 'tree', not 'chain'"),
        (CHAIN, unpack_tree, "holds 'chain', not 'tree'"),
    ):
        with pytest.raises(CodecError, match=said):
            reader(chunk)
    with pytest.raises(CodecError, match=f"version {SCHEMA_VERSION + 1}"):
        unpack_steps(replace(STEPS, schema_version=SCHEMA_VERSION + 1))


@pytest.mark.parametrize("n", [64, 512])
def test_a_position_takes_at_most_24_bytes_packed(n: int) -> None:
    """The budget is 32 bytes on disk with the row around it; docs/log.md has the whole
    measurement."""
    made = [a_panorama(a_trajectory(0, n=n), "small", seed=s, none=0.0) for s in range(10)]
    assert sum(len(pack_chain(panorama).data) for panorama in made) / 10 / n <= 24


# --- forged chunks: the checksum is right, and nothing else is


def sealed(raw: bytes) -> Chunk:
    """Bytes of anybody's making as a chunk whose checksum holds."""
    data = zstandard.ZstdCompressor(dict_data=_HEADERS, write_checksum=False).compress(raw)
    return Chunk(SCHEMA_VERSION, CODEC, hashlib.sha256(data).digest(), data)


def forged(header: object, body: bytes = b"") -> Chunk:
    """A chunk with this header (JSON text, or what is written as JSON) over these bytes."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return sealed(len(text).to_bytes(4, "little") + text + body)


FORGED = {
    "nothing": sealed(b""),
    "no header": sealed(b"\xff\xff\xff\xff"),
    "header beyond the end": sealed(b"\xff\xff\x00\x00{}"),
    "not UTF-8": sealed(b"\x02\0\0\0\xff\xff"),
    "nested": forged("[" * 100_000),
    "a number": forged(7),
    "meta is a list": forged([[], []]),
    "no columns": forged([{"kind": "steps"}, None]),
    **{
        what: forged([{"kind": "steps"}, columns], body)
        for what, columns, body in (
            ("a column is a number", [1], b""),
            ("a name is a number", [[1, "<i4", [0]]], b""),
            ("a name is a list", [[["x"], "<i4", [0]]], b""),
            ("twice one name", [["x", "<i4", [0]], ["x", "<i4", [0]]], b""),
            ("dtype object", [["x", "|O", [1]]], b"\0" * 8),
            ("dtype of nested fields", [["x", "(1000000,1000000)i8", [1]]], b""),
            ("dtype of no bytes", [["x", "|V0", [10**9]]], b""),
            ("a shape beyond memory", [["x", "<i8", [10**15]]], b""),
            ("a shape beyond int64", [["x", "<i8", [2**40, 2**40]]], b""),
            ("a shape below 0", [["x", "<i8", [-1, -1]]], b""),
            ("a shape of floats", [["x", "<i8", [1.0]]], b"\0" * 8),
            ("a shape of lists", [["x", "<i8", [[1]]]], b""),
            ("too many axes", [["x", "|u1", [1] * 100]], b"\0"),
            ("bytes left over", [], b"\0"),
            ("bytes missing", [["x", "|u1", [2]]], b"\0"),
        )
    },
    "two frames": replace(
        first := forged([{}, []]),
        data=first.data * 2,
        sha256=hashlib.sha256(first.data * 2).digest(),
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_header_that_we_do_not_write_is_one_error(name: str) -> None:
    for reader in (unpack, unpack_tokens, unpack_chain, unpack_tree, unpack_steps, unpack_document):
        with pytest.raises(CodecError):
            reader(FORGED[name])


def test_a_column_of_another_dtype_is_named() -> None:
    with pytest.raises(CodecError, match=r"column 'x' is of dtype '\|O'"):
        unpack(FORGED["dtype object"])
    with pytest.raises(CodecError, match="column 'x' is of dtype '<c8'"):
        pack({"x": np.zeros(2, np.complex64)}, {})


def test_all_arrays_of_a_panorama_are_columns() -> None:
    text = a_trajectory(0)
    for made in (a_panorama(text, "small"), a_tree(text, "small")):
        arrays = (name for name, value in vars(made).items() if isinstance(value, np.ndarray))
        assert made.columns() == tuple(arrays)


def changed(chunk: Chunk, **values: Any) -> Chunk:
    """A real chunk with columns or entries of its meta replaced, or left out (None)."""
    columns, meta = unpack(chunk)
    for name, value in values.items():
        is_column = name in columns or isinstance(value, np.ndarray)
        where: dict[str, Any] = columns if is_column else meta
        where.pop(name) if value is None else where.update({name: value})
    return pack(columns, meta)


STEPS = pack_steps(steps_of(a_trajectory(0)))
CHAIN = pack_chain(a_panorama(a_trajectory(0), "small"))
TREE = pack_tree(a_tree(a_trajectory(0), "small"))
TOKENS = pack_tokens(np.zeros(3, np.int32), np.zeros(4, np.int32))
NODES, SAID = unpack(TREE)
PARENT, COUNT = NODES["parent"], NODES["count"]
WRONG = [
    (STEPS, unpack_steps, {"start": None}),
    (STEPS, unpack_steps, {"drafts": []}),
    (STEPS, unpack_steps, {"policies": {"0": "x"}}),
    (STEPS, unpack_steps, {"lag": np.zeros((1, 1), np.int32)}),
    (STEPS, unpack_steps, {"draft_s": np.zeros(1, np.float64)}),
    (STEPS, unpack_steps, {"more": np.zeros(1, np.int32)}),
    (CHAIN, unpack_chain, {"gamma_max": True}),
    (CHAIN, unpack_chain, {"agree": np.full(60, 3, np.uint8)}),
    (CHAIN, unpack_chain, {"branch_len": unpack(CHAIN)[0]["branch_len"] + 200}),
    (CHAIN, unpack_chain, {"logp": unpack(CHAIN)[0]["logp"].astype(np.float32)}),
    (TREE, unpack_tree, {"width": 10**9}),
    (TREE, unpack_tree, {"depth": "3"}),
    (TREE, unpack_tree, {"covers": [[]]}),
    (TREE, unpack_tree, {"text_slot": np.full(183, 9, np.uint8)}),
    *((TREE, unpack_tree, {name: None}) for name in {**NODES, **SAID}.keys() - {"kind"}),
    *((TREE, unpack_tree, {"width": 5}), (TREE, unpack_tree, {"proposals": "other"})),
    *((TREE, unpack_tree, {"token_bytes": 3}), (TREE, unpack_tree, {"slot": NODES["slot"] + 4})),
    *(
        (TREE, unpack_tree, {"parent": parent})
        for parent in (PARENT[:-1], PARENT + len(COUNT), -PARENT - 1)
    ),
    *((TREE, unpack_tree, {"count": count}) for count in (COUNT + 4, COUNT.astype(np.int32))),
    (TREE, unpack_tree, {"text_slot": NODES["text_slot"][: len(PARENT)]}),
    (TOKENS, unpack_tokens, {"output": np.zeros((2, 2), np.int32)}),
    (TOKENS, unpack_tokens, {"output": np.zeros(2, np.float64)}),
    (pack_document({"a": 1}), unpack_document, {"document": None}),
]


def test_columns_that_their_kind_does_not_have_are_one_error() -> None:
    for chunk, reader, values in WRONG:
        with pytest.raises(CodecError, match="is no "):
            reader(changed(chunk, **values))


def test_a_chunk_that_unpacks_to_more_than_any_of_ours_takes_no_memory() -> None:
    honest = zstandard.ZstdCompressor(dict_data=_HEADERS, write_checksum=False).compressobj(
        size=RAW_LIMIT + 1
    )
    parts = [honest.compress(b"\0" * (1 << 20)) for _ in range(RAW_LIMIT >> 20)]
    large = b"".join([*parts, honest.compress(b"\0"), honest.flush()])
    unsaid = zstandard.ZstdCompressor(dict_data=_HEADERS, write_content_size=False).compress(
        b"\0" * (1 << 20)
    )
    tracemalloc.start()
    try:
        for data in (large, unsaid, forged([{}, [["x", "<i8", [2**60]]]]).data):
            with pytest.raises(CodecError):
                unpack(Chunk(SCHEMA_VERSION, CODEC, hashlib.sha256(data).digest(), data))
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_forged_chunk_costs_what_a_damaged_one_does(store: TraceStore) -> None:
    recording, chunk = a_recording(store, n=5, trees=True), FORGED["nested"]
    forged: list[tuple[Any, dict[str, str], str]] = [
        (TrajectoryRow, {}, "its token ids"),
        (PanoramaChunkRow, {"kind": "chain"}, "panorama of draft 'small'"),
        (StepChunkRow, {}, "its steps"),
        (PanoramaChunkRow, {"kind": "tree"}, "tree panorama of draft 'small'"),
    ]
    with store.database.write() as session:
        for n, (table, of, _) in enumerate(forged):
            row = session.query(table).filter_by(recording_id=recording, ordinal=n, **of).one()
            row.data, row.sha256 = chunk.data, chunk.sha256
    for ordinal, (*_, what) in enumerate(forged):
        said = f"recording {recording}, request {ordinal}: {what} cannot be used .*; the others sti"
        with pytest.raises(CorruptedChunkError, match=said):
            list(store.iterate(recording, steps=True, trees=True, ordinals=[ordinal]))
    assert len(list(store.iterate(recording, steps=True, ordinals=[3]))) == 1  # no tree is read
    loaded = store.load(recording, steps=True, trees=True, skip_corrupted=True)
    skipped = [(s.ordinal, s.draft) for s in loaded.skipped]
    assert skipped == [(0, None), (1, "small"), (2, None), (3, "small")]
    (last,) = store.iterate(recording, steps=True, trees=True, ordinals=[4])
    assert loaded.having(["small"], trees=["small"]).requests[-1] == last

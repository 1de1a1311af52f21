"""Rows of a file that somebody else may have made: refused unless they are what our own program
writes.

SQLite holds any value in any column, and a file that travels may have been edited. So the type of
every value is looked at, ids that are hashes of content are computed again, and every chunk is
unpacked and compared with the columns that summarise it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, get_args

from sqlalchemy import JSON, BigInteger, Double, Integer, LargeBinary, String, inspect
from sqlalchemy.orm import DeclarativeBase

from spectune.db import CorruptedChunkError
from spectune.db.base import OutsideJson, UtcDateTime
from spectune.db.models import (
    PairRow,
    PanoramaChunkRow,
    PolicyRow,
    RecordingRow,
    StepChunkRow,
    TrajectoryRow,
    WorkloadRow,
)
from spectune.traces.codec import CodecError
from spectune.traces.errors import TraceError
from spectune.traces.packing import unpack_chain, unpack_steps, unpack_tree
from spectune.traces.schema import Finish, Sampling, Verifier
from spectune.traces.store.catalog import policy_of, workload_of
from spectune.traces.store.recording_rows import CHAIN, TREE_KINDS, spec_hash, trajectory_of
from spectune.traces.store.rows import values_of
from spectune.traces.text import NAME_LIMIT, unstorable

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STATES = ("recording", "complete", "abandoned")


def check_hashed(row: PolicyRow | WorkloadRow) -> None:
    """Raises :class:`TraceError` unless the row is a policy or workload whose id is the hash of
    its content."""
    check_values(row)
    try:
        policy_of(row) if isinstance(row, PolicyRow) else workload_of(row)
    except CorruptedChunkError:
        raise TraceError(f"{_shown(row)} has another content than its id says") from None


def check_pair(row: PairRow) -> None:
    """Raises :class:`TraceError` unless the row describes a pair. Its id is the fingerprint of
    checkpoints, which do not travel."""
    check_values(row)
    named = row.document.get("drafts", {}) if isinstance(row.document, dict) else None
    known = isinstance(named, dict) and all(isinstance(path, str) for path in named.values())
    _demand(known, row, "describes no pair")


def check_recording(row: RecordingRow) -> None:
    """Raises :class:`TraceError` unless the row is a recording that says by its hash what was asked
    of it."""
    check_values(row)
    _demand(row.id != "latest" and _NAME.fullmatch(row.id) is not None, row, "has no id of ours")
    known = row.state in _STATES and row.verifier in get_args(Verifier)
    _demand(known, row, "is in no state of ours")
    _demand(isinstance(row.options, dict) and isinstance(row.progress, dict), row, "has no options")
    _sampling(row)
    _demand(
        spec_hash(values_of(row)) == row.spec_sha256, row, "is not what its hash (spec_sha256) says"
    )


def check_trajectory(row: TrajectoryRow) -> None:
    """Raises :class:`TraceError`, or CorruptedChunkError for its chunk, unless the row is a decoded
    request."""
    check_values(row)
    known = row.finish in get_args(Finish) and row.verifier in get_args(Verifier)
    _demand(known, row, "ended in no way of ours")
    _demand(_all(row.stop_strings, str), row, "has no list of stop strings")
    _sampling(row)
    found = _unpacked(row, trajectory_of)
    lengths = len(found.prompt_ids), len(found.output_ids)
    _demand(lengths == (row.n_prompt, row.n_output), row, "has another number of tokens")


def check_panorama(row: PanoramaChunkRow, positions: int) -> None:
    """Raises :class:`TraceError`, or CorruptedChunkError for its chunk, unless the row fits a text
    of that many tokens."""
    check_values(row)
    _check_sums(row)
    _demand(_all(row.covers, str), row, "has no list of covers")
    if row.kind == CHAIN:
        chain = _unpacked(row, unpack_chain)
        held: Any = (chain.draft, chain.gamma_max, chain.positions)
        _demand(held == (row.draft, row.gamma_max, positions), row, "is of another draft or text")
        return
    tree = _unpacked(row, unpack_tree)
    _demand(row.kind == TREE_KINDS[tree.proposals], row, "is of another kind")
    held = (tree.draft, tree.depth, tree.width, list(tree.covers), tree.positions)
    said = (row.draft, row.gamma_max, row.width, row.covers, positions)
    _demand(held == said, row, "is of another draft or text")


def check_steps(row: StepChunkRow) -> None:
    """Raises :class:`TraceError`, or CorruptedChunkError for its chunk, unless the row is the
    rounds of a recorded request."""
    check_values(row)
    _check_sums(row)
    _demand(row.run_id is None, row, "belongs to a run as well")
    steps = _unpacked(row, unpack_steps)
    summed = (sorted({step.policy for step in steps}), len(steps))
    _demand(summed == (row.policies, row.rounds), row, "sums up other rounds")


def _shown(row: DeclarativeBase) -> str:
    """Which row, for messages; of a chunk its recording is named by the caller."""
    what = row.__tablename__.replace("_", " ")
    return f"{what} {row.ordinal!r}" if hasattr(row, "ordinal") else f"{what} {str(row.id)[:64]!r}"  # type: ignore[attr-defined]


def _demand(holds: bool, row: DeclarativeBase, problem: str) -> None:
    if not holds:
        raise TraceError(f"{_shown(row)} {problem}")


def _unpacked(row: Any, unpack: Callable[[Any], Any]) -> Any:
    try:
        return unpack(row)
    except CodecError as error:
        name = row.__tablename__.replace("_", " ")
        raise CorruptedChunkError(
            f"request {row.ordinal}: its {name} is damaged ({error})"
        ) from None


def _sampling(row: Any) -> Sampling:
    found = row.sampling
    known = {"temperature": (int, float), "top_k": (int,), "top_p": (int, float), "seed": (int,)}
    sound = (
        isinstance(found, dict)
        and found.keys() == known.keys()
        and all(type(found[k]) in types for k, types in known.items())
    )
    _demand(sound, row, "has no sampling parameters")
    return Sampling(**found)


def _check_sums(row: PanoramaChunkRow | StepChunkRow) -> None:
    for name in ("at_risk", "survived"):
        _demand(_all(getattr(row, name), (int, float)), row, f"has no list {name}")
    _demand(len(row.at_risk) == len(row.survived), row, "has sums of different lengths")


def _all(values: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, kind) and not isinstance(value, bool) for value in values
    )


def check_values(row: DeclarativeBase) -> None:
    """Raises :class:`TraceError` unless every value is of its column's type and can be stored in
    any database."""
    for attribute in inspect(row).mapper.column_attrs:
        column, value = attribute.columns[0], getattr(row, attribute.key)
        if value is None:
            _demand(bool(column.nullable), row, f"has no {column.name}")
        else:
            short = not (column.index and isinstance(value, str) and len(value) > NAME_LIMIT)
            _demand(short and _fits(column.type, value), row, f"has a {column.name} that is none")


def _fits(kind: Any, value: Any) -> bool:
    if isinstance(kind, UtcDateTime):
        return isinstance(value, datetime)
    if isinstance(kind, String):
        return (
            isinstance(value, str)
            and len(value) <= (kind.length or len(value))
            and unstorable(value) is None
        )
    if isinstance(kind, Integer):
        bits = 63 if isinstance(kind, BigInteger) else 31
        return type(value) is int and -(1 << bits) <= value < 1 << bits
    if isinstance(kind, Double):
        return type(value) in (int, float) and math.isfinite(value)
    if isinstance(kind, LargeBinary):
        return isinstance(value, bytes)
    if not isinstance(kind, (JSON, OutsideJson)):
        raise TypeError(f"column type {kind!r} has no rule")
    return all(
        unstorable(leaf) is None if isinstance(leaf, str) else math.isfinite(leaf)
        for leaf in _leaves(value)
    )


def _leaves(value: Any) -> Iterator[str | float]:
    """Every text and number in a document, keys included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, (str, int, float)):
            yield value

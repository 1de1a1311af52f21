"""`traces`: what is recorded, looked at, counted, compared and moved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from spectune.optimizer.commands.common import Talk, check_writable, open_store
from spectune.optimizer.commands.results import Result, Table, listed
from spectune.optimizer.request_text import request_text
from spectune.settings import (
    Filter,
    TracesExport,
    TracesImport,
    TracesList,
    TracesShow,
    TracesStats,
)
from spectune.traces.errors import ConfigError
from spectune.traces.store import TraceStore, query
from spectune.traces.store.export import export_recordings, export_rows, import_recordings, plain
from spectune.traces.store.query import TraceFilter

OF_REQUEST = (
    *("request_id", "category", "policy", "context", "rounds", "tau", "acceptance"),
    "tokens_per_s",
)
"""Columns of a request that a table shows."""
OTHER_LOAD = 1.25
"""From how many times as many requests a step on tokens/s do not compare."""


def filter_of(s: Filter) -> TraceFilter:
    one = s.recording if isinstance(s, TracesShow) else None
    recordings = s.recording if one is None else () if one == "all" else (one,)
    return TraceFilter(
        recordings=recordings,
        request=s.request,
        pair=s.pair_id,
        source=s.source,
        categories=s.category,
        since=s.since,
        until=s.until,
        policy=s.policy,
        draft=s.draft,
        min_acceptance=s.min_acceptance,
        max_acceptance=s.max_acceptance,
    )


def _check_names(store: TraceStore, s: Filter, rows: Sequence[Any]) -> None:
    """Raises TraceError where there are no rows as the filter names what is not stored."""
    if not rows:
        query.check_names(store, filter_of(s))


def list_recordings(s: TracesList, talk: Talk) -> Result:
    with open_store(s) as store:
        recordings = query.list_recordings(store, filter_of(s))
        _check_names(store, s, recordings)
        pairs = {pair.id: pair.name for pair in store.list_pairs()}
    rows = [{**info.to_json(), "pair": pairs[info.pair_id]} for info in recordings]
    shown = [{**row, "drafts": r.shown()} for row, r in zip(rows, recordings, strict=True)]
    columns = (
        *("id", "pair", "source", "state", "n_requests", "n_texts", "n_output_tokens"),
        *("drafts", "created_at"),
    )
    return listed("recordings", rows, Table(shown, columns, "recordings"))


def show(s: TracesShow, talk: Talk) -> Result:
    with open_store(s) as store:
        if s.request is not None and s.recording != "all":
            return _request(store, s.recording, s.request)
        info = None if s.recording == "all" else store.get_recording(s.recording)
        requests = query.requests(store, filter_of(s), sort=s.sort, limit=s.rows + 1)
        _check_names(store, s, requests)
    if len(requests) > s.rows and not s.typed("rows"):
        talk.tell(f"the first {s.rows}; --rows says how many, and `traces export` writes all")
    rows = [plain(row) for row in requests[: s.rows]]
    acceptance = "draft_acceptance" if s.draft else "acceptance"
    columns = tuple(acceptance if c == "acceptance" else c for c in OF_REQUEST)
    if info is None:
        columns, title, data = ("recording_id", *columns), "requests", {}
    else:
        title = f"recording {info.id}: {info.state}; panoramas of {info.shown() or 'nothing'}"
        data = info.to_json()
    return listed("requests", rows, Table(rows, columns, title), **data)


def _request(store: TraceStore, recording: str, request: str) -> Result:
    data = request_text(store, recording, request)
    data["rounds"] = rounds = [plain(row) for row in data["rounds"]]
    text = f"{data['prompt']}\n---\n{data['text']}\n---"
    if data["text"] is None:
        text = f"not decoded: {data['undecoded']}\nids: {data['output_ids']}"
    counts = ("round", "policy_id", "start", "drafted", "verified", "accepted", "emitted")
    table = Table(rounds, (*counts, "draft_s", "verify_s", "round_s"), "rounds")
    return Result(text, data, rounds, [table])


def stats(s: TracesStats, talk: Talk) -> Result:
    usual = "policy,day" if s.speed else "policy,category" if s.executed else "draft,category"
    names = [name.strip() for name in (s.by or usual).split(",")]
    with open_store(s) as store:
        if s.speed or ("policy" in names and not s.executed):
            rows = query.speed(store, filter_of(s), names)
            figures = ("seconds", "tokens_per_s", "tau", "acceptance")
            columns: tuple[str, ...] = ("requests", "mean_batch", *figures)
            _tell_loads([row["mean_batch"] for row in rows], names, talk)
        else:
            rows = query.acceptance(store, filter_of(s), names, executed=s.executed)
            if not rows and not s.executed:
                # Served traffic has rounds, and panoramas once `record --resume` has made them.
                names = [name for name in names if name != "draft"]
                if rows := query.acceptance(store, filter_of(s), names, executed=True):
                    talk.tell(
                        "no panoramas yet (`record --resume latest` makes them): acceptance over "
                        "rounds executed (--executed)"
                    )
            is_tau = "policy_id" in (rows[0] if rows else ())  # of rounds, not of all starts
            length = "tau" if is_tau else "mean_accepted_length"
            columns = ("requests", length, "by_position")
        _check_names(store, s, rows)
    shown = [_shown(row) for row in rows]
    by = [k for k in (rows[0] if rows else ()) if k in (*query.GROUPS.values(), "policy")]
    return listed("stats", rows, Table(shown, (*by, *columns), "stats"))


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table: acceptance in one column, and `as it was started` for no policy."""
    by_position = " ".join(f"{x:.2f}" for x in row.get("marginal", ())[:10])
    more = {"policy": "as it was started"} if row.get("policy_id") == "" else {}
    return {"tau": row.get("mean_accepted_length"), **row, "by_position": by_position, **more}


def _tell_loads(batches: list[float], names: list[str], talk: Talk) -> None:
    """Notes where rows were served at different loads, with more requests a step one than
    another."""
    if batches and max(batches) > OTHER_LOAD * min(batches):
        parts = f"; --by {','.join((*names, 'batch'))} parts them" * ("batch" not in names)
        talk.tell(
            f"{min(batches):.1f} to {max(batches):.1f} requests shared a step: tokens/s of rows "
            f"with other batches do not compare{parts}"
        )


def export(s: TracesExport, talk: Talk) -> Result:
    check_writable(s, out=s.out)
    is_there = os.path.exists(s.out)
    data: dict[str, Any] = {"path": s.out}
    with open_store(s) as store:
        if s.whole:
            if not s.out.endswith(".parquet"):
                raise ConfigError(f"--whole writes Parquet: end {s.out} with .parquet")
            data["recordings"] = [info.id for info in query.list_recordings(store, filter_of(s))]
            data["rows"] = export_recordings(store, data["recordings"], s.out)
        else:
            data["rows"] = export_rows(getattr(query, s.per)(store, filter_of(s)), s.out)
    if is_there:
        talk.tell(f"{s.out} was there, and is written anew")
    recordings = f", recordings {', '.join(data['recordings'])}" if s.whole else ""
    return Result(f"{s.out}: {data['rows']} rows{recordings}", data)


def import_(s: TracesImport, talk: Talk) -> Result:
    with open_store(s, create=True) as store:
        added, present = import_recordings(store, s.file)
    texts = [", ".join(names) or "nothing" for names in (added, present)]
    data = {"added": added, "present": present}
    return Result(f"added {texts[0]}; already here: {texts[1]}", data)

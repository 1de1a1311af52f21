"""Queries, exports, transfers and pruning, on every database."""

from __future__ import annotations

import csv
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from databases import opened, run_sql
from trace_values import (
    PAIR,
    POLICY,
    POLICY_ID,
    a_panorama,
    a_recording,
    a_trajectory,
    steps_of,
)

from spectune.db import NotFoundError, SchemaError, check
from spectune.optimizer import schedule as schedules
from spectune.optimizer.schedule import claims
from spectune.traces.acceptance import Survival, keep_probability, step_survival, survival
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling, Step
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.export import export_rows
from spectune.traces.store.prune import prune
from spectune.traces.store.query import (
    TraceFilter,
    acceptance_stats,
    executed_stats,
    list_recordings,
    request_rows,
)
from spectune.traces.store.transfer import export_recordings, import_recordings
from spectune.traces.tables import Panorama

DAY = timedelta(days=1)
NOW = datetime(2026, 5, 4, tzinfo=UTC)


def at(store: TraceStore, moment: datetime) -> TraceStore:
    return TraceStore(store.database, clock=lambda: moment)


def begun(store: TraceStore, **how: Any) -> str:
    return store.create_recording(Asked(PAIR, None, Sampling(), 8, **how)).id


def removed(store: TraceStore, **how: Any) -> set[str]:
    return {p.recording for p in prune(store.database, **how).removed}


# --- questions


def test_recordings_are_listed_newest_first_and_filtered(store: TraceStore) -> None:
    old, new = a_recording(at(store, NOW - 3 * DAY), n=3), a_recording(at(store, NOW), n=6)
    served = begun(at(store, NOW + DAY), source="serve")

    def ids(**only: Any) -> list[str]:
        return [r.id for r in list_recordings(store.database, TraceFilter(**only))]

    assert ids() == ids(pair=PAIR[:6]) == [served, new, old]
    for only in ({"source": "record"}, {"categories": ("code",)}, {"draft": "small"}):
        assert ids(**only) == [new, old]
    assert ids(since=NOW - DAY) == [new]
    assert ids(until=NOW) == ids(recordings=(old,)) == [old]
    for only in ({"pair": "0000"}, {"categories": ("chat",)}, {"draft": "large"}):
        assert ids(**only) == []
    assert ids(min_acceptance=0.99) == []
    listed = list_recordings(store.database, TraceFilter(recordings=(new,)))[0]
    assert (listed.n_requests, listed.n_output_tokens, listed.drafts["small"].count) == (6, 360, 6)
    with pytest.raises(NotFoundError, match="no recording 'rec-nothing'"):
        ids(recordings=("rec-nothing",))


def test_request_rows_say_what_each_request_was_like(store: TraceStore) -> None:
    recording = a_recording(store, n=4, drafts=("small", "ngram"))
    store.append_trajectory(recording, 9, a_trajectory(9))
    rows = list(request_rows(store.database))
    assert [(r.ordinal, r.draft) for r in rows] == [
        (i, d) for i in range(4) for d in ("ngram", "small")
    ] + [(9, None)]
    for row in rows[:-1]:
        trajectory = a_trajectory(row.ordinal)
        assert row.draft is not None
        panorama = a_panorama(trajectory, row.draft, seed=row.ordinal)
        assert row.acceptance == pytest.approx(keep_probability(panorama, "coupled").mean())
        assert row.tau == pytest.approx(survival(panorama, "coupled").mean_accepted_length)
        steps = steps_of(trajectory)
        assert (row.rounds, row.accepted) == (len(steps), sum(s.accepted for s in steps))
        assert row.seconds == pytest.approx(sum(s.round_s for s in steps))
    low = sorted(r.acceptance for r in rows if r.draft == "small" and r.acceptance is not None)[1]
    picked = list(request_rows(store.database, TraceFilter(draft="small", max_acceptance=low)))
    assert len(picked) == 2
    assert all(
        r.draft == "small" and r.acceptance is not None and r.acceptance <= low for r in picked
    )
    prose = request_rows(store.database, TraceFilter(categories=("prose",)))
    assert {r.category for r in prose} == {"prose"}


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_acceptance_by_position_pools_every_start(store: TraceStore, verifier: str) -> None:
    a_recording(store, n=6, drafts=("small", "ngram"), verifier=verifier)  # type: ignore[arg-type]
    got = acceptance_stats(store.database, by=("draft", "category"))
    assert [dict(s.group) for s in got] == [
        {"draft": d, "category": c} for d in ("ngram", "small") for c in ("code", "math", "prose")
    ]
    for stats in got:
        draft, category = (value for _, value in stats.group)
        mine = [i for i in range(6) if ("code", "prose", "math")[i % 3] == category]
        panoramas = [a_panorama(a_trajectory(i), draft, seed=i) for i in mine]
        want = sum((survival(p, verifier) for p in panoramas), Survival())  # type: ignore[arg-type]
        assert stats.requests == 2
        assert stats.survival.survived == pytest.approx(want.survived, abs=1e-5)
        assert stats.survival.mean_accepted_length == pytest.approx(
            1 + sum(stats.survival.marginal)
        )
        keep = np.concatenate([keep_probability(p, verifier) for p in panoramas])  # type: ignore[arg-type]
        assert stats.acceptance == pytest.approx(keep.mean())
    (whole,) = acceptance_stats(store.database, TraceFilter(draft="small"), by=())
    assert whole.requests == 6
    keys = "requests acceptance mean_accepted_length marginal conditional histogram"
    assert set(whole.to_json()) >= set(keys.split())


def test_executed_rounds_have_their_own_statistics(store: TraceStore) -> None:
    recording = a_recording(store, n=6)
    (got,) = executed_stats(store.database, TraceFilter(recordings=(recording,)))
    steps = [s for i in range(6) for s in steps_of(a_trajectory(i))]
    assert got.survival == step_survival(steps)
    assert got.acceptance == pytest.approx(
        sum(s.accepted for s in steps) / sum(s.drafted for s in steps)
    )
    assert [dict(s.group) for s in executed_stats(store.database, by=("category",))] == [
        {"category": c} for c in ("code", "math", "prose")
    ]


def test_positions_are_judged_by_the_rounds_that_drafted_as_far(store: TraceStore) -> None:
    """Whatever windows were mixed: a first proposal is kept in three of four rounds that have one.
    Each round counts for its own draft."""
    recording = a_recording(store, n=0)
    drafted = [(4, 3, "small"), (1, 1, "small"), (1, 0, "ngram"), (0, 0, "ngram"), (2, 1, "small")]
    text, steps, start = a_trajectory(0, n=10), [], 0
    for n, kept, draft in drafted:
        steps.append(Step(start, n, n + 1, kept, kept + 1, n, draft=draft, depth=n))
        start += kept + 1
    store.append_trajectory(recording, 0, text, steps)
    (got,) = executed_stats(store.database)
    assert got.to_json()["marginal"] == [3 / 4, 1 / 2, 1.0, 0.0]
    assert got.survival.mean_accepted_length == start / len(drafted)
    by_draft = executed_stats(store.database, by=("draft", "category"))
    assert [(dict(s.group)["draft"], s.survival.starts) for s in by_draft] == [
        ("ngram", 2),
        ("small", 3),
    ]
    assert by_draft[1].to_json()["marginal"] == [1.0, 1 / 2, 1.0, 0.0]


# --- exports


def test_rows_are_exported_as_json_csv_and_parquet(store: TraceStore, tmp_path: Path) -> None:
    a_recording(store, n=4)
    store.append_trajectory(store.resolve_recording("latest"), 9, a_trajectory(9))
    rows = list(request_rows(store.database))
    for ending in ("json", "csv", "parquet"):
        assert export_rows(iter(rows), tmp_path / f"rows.{ending}") == 5
    assert json.loads((tmp_path / "rows.json").read_text()) == [r.to_json() for r in rows]
    with open(tmp_path / "rows.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(r["acceptance"] or "nan") for r in read] == pytest.approx(
        [r.acceptance or np.nan for r in rows], nan_ok=True
    )
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [(r["request_id"], r["tau"], r["recorded_at"]) for r in table] == [
        (r.request_id, r.tau, r.recorded_at) for r in rows
    ]
    assert export_rows([], tmp_path / "none.json") == 0
    assert json.loads((tmp_path / "none.json").read_text()) == []


def test_an_export_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TraceError, match=r"end it with \.json, \.csv or \.parquet"):
        export_rows([], tmp_path / "rows.txt")
    with pytest.raises(TraceError, match=r"cannot write .*No such file"):
        export_rows([], tmp_path / "nowhere" / "rows.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match="`pip install pyarrow`"):
        export_rows([], tmp_path / "rows.parquet")
    assert list(tmp_path.iterdir()) == []


# --- whole recordings


def test_whole_recordings_move_between_databases_and_only_once(
    store: TraceStore, url: str, tmp_path: Path
) -> None:
    store.put_policy(POLICY_ID, POLICY, "l")
    recording = a_recording(store, n=5, drafts=("small", "ngram"), trees=True)
    other = a_recording(store, n=2)
    file = tmp_path / "moved.spectune"
    out = export_recordings(store.database, [recording[:10]], file)
    assert (out.added, out.chunks) == ((recording,), 5 * 3)
    assert [p.name for p in tmp_path.glob("*moved*")] == ["moved.spectune"]
    with opened(tmp_path / "second.db") as second:
        assert import_recordings(second.database, file).added == (recording,)
        again = import_recordings(second.database, file)
        assert (again.added, again.present, again.chunks) == ((), (recording,), 0)
        moved, kept = (s.load(recording, steps=True) for s in (second, store))
        assert moved == kept
        assert second.most_held(recording, "small") == (16, 4, 3, ("a",))
        assert second.get_policy(POLICY_ID).document == POLICY
        with pytest.raises(NotFoundError):
            second.get_recording(other)
    assert check(str(tmp_path / "second.db")).ok
    # And back: nothing is new.
    assert import_recordings(store.database, file).present == (recording,)


def test_an_import_completes_what_a_killed_one_began(store: TraceStore, tmp_path: Path) -> None:
    recording = a_recording(store, n=3, trees=True)
    before = store.load(recording)
    file = tmp_path / "moved.spectune"
    export_recordings(store.database, ["latest"], file)
    prune(store.database, recordings=[recording])
    assert import_recordings(store.database, file).added == (recording,)
    with store.database.write() as session:
        session.delete(session.get_one(Panorama, (recording, 1, "small")))
    assert import_recordings(store.database, file).chunks == 1
    assert store.load(recording).requests == before.requests


def test_what_is_no_recording_is_not_moved(store: TraceStore, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        export_recordings(store.database, ["rec-none"], tmp_path / "none")
    assert not (tmp_path / "none").exists()
    run_sql(tmp_path / "strange.db", "CREATE TABLE t (x)")
    with pytest.raises(SchemaError, match="not a spectune database"):
        import_recordings(store.database, tmp_path / "strange.db")


# --- pruning


def test_pruning_by_age_and_number(store: TraceStore) -> None:
    ids = [a_recording(at(store, NOW - i * DAY), n=2) for i in range(5)]
    open_one = begun(at(store, NOW - 9 * DAY), source="serve")
    with pytest.raises(TraceError, match="say what to prune"):
        prune(store.database)
    plan = prune(store.database, before=NOW - DAY, keep_last=3, dry_run=True)
    assert {p.recording for p in plan.removed} == set(ids[3:])
    assert plan.size_bytes > 0
    assert plan.to_json()["dry_run"] is True
    assert len(list_recordings(store.database)) == 6
    done = prune(store.database, before=NOW - DAY, keep_last=3)
    store.database.vacuum()
    assert done.removed == plan.removed
    assert {r.id for r in list_recordings(store.database)} == {*ids[:3], open_one}
    assert removed(store, keep_last=1) == set(ids[1:3])
    assert prune(store.database, recordings=[open_one]).removed[0].requests == 0
    assert store.load(ids[0]).drafts == ("small",)


def test_unfinished_recordings_are_pruned_by_age_once_nobody_writes_to_them(
    store: TraceStore,
) -> None:
    """Their age is their last text's, and at least a day. Spared is one that a job may resume or a
    server append to."""

    def since(days: float, last: float | None = None, **how: Any) -> str:
        made = begun(at(store, now - days * DAY), **how)
        if last is not None:
            at(store, now - last * DAY).append_trajectory(made, 0, a_trajectory(0))
        return made

    now = datetime.now(UTC)
    whole = a_recording(at(store, now - 40 * DAY), n=2)
    left, early = since(40, last=39), since(40)
    spared = [since(40, last=29), since(40, source="serve"), since(0.9)]
    schedules.add_schedule(store.database, "nightly", every="1h", now=now)
    schedules.tick(store.database, now + timedelta(hours=1))
    job = claims.claim(store.database, "a", lease_s=60)
    key = job.idempotency_key
    of_job = [since(40, last=39, options={name: key}) for name in ("slot", "gathered")]
    assert removed(store, keep_last=1) == set(), "how many to keep is said of finished ones"
    assert removed(store, before=now - 30 * DAY, keep_last=1) == {left, early}
    assert {r.id for r in list_recordings(store.database)} == {whole, *spared, *of_job}
    assert removed(store, before=now + DAY, dry_run=True) == {whole, spared[0]}
    claims.complete(store.database, job, {})
    assert removed(store, before=now - 30 * DAY) == {whole, *of_job}


def test_what_a_publication_rests_on_is_spared(store: TraceStore) -> None:
    cited, free = (a_recording(at(store, NOW - i * DAY), n=2) for i in range(2))
    store.put_policy("p" * 12, {}, "l")
    store.publish(PAIR, "cpu", "p" * 12, actor="t", evidence={"search": {"recording": cited}})
    report = prune(store.database, before=NOW + DAY)
    assert [p.recording for p in report.removed] == [free]
    assert report.kept == (cited,)
    with pytest.raises(TraceError, match=f"recording {cited} is evidence of a publication; use"):
        prune(store.database, recordings=[cited])
    assert removed(store, recordings=[cited], force=True) == {cited}

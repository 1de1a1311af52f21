"""What is removed by id or age, and what is spared, on every database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from databases import opened
from doors import Door
from trace_values import PAIR, POLICY, POLICY_ID, a_profile, a_recording, a_trajectory, an_outcome

from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.inventory import PRUNED, counts, list_kind, prune

DAY = timedelta(days=1)
NOW = datetime(2026, 5, 4, tzinfo=UTC)


def at(store: TraceStore, moment: datetime) -> TraceStore:
    return TraceStore(store.database, clock=lambda: moment)


def removed(store: TraceStore, **how: Any) -> set[str]:
    return set(prune(at(store, NOW), ["recordings"], **how)["recordings"]["removed"])


def left(store: TraceStore) -> set[str]:
    return {info.id for info in store.list_recordings()}


def test_recordings_go_by_age_and_number_with_all_they_hold(store: TraceStore) -> None:
    ids = [a_recording(at(store, NOW - i * DAY), n=2, trees=True) for i in range(5)]
    with pytest.raises(TraceError, match="say what to prune"):
        prune(store)
    how: dict[str, Any] = {"before": NOW - DAY, "keep_last": 3}
    assert removed(store, **how, dry_run=True) == set(ids[3:])
    assert left(store) == set(ids)
    assert removed(store, **how) == set(ids[3:])
    store.database.vacuum()
    assert left(store) == set(ids[:3])
    assert removed(store, keep_last=1) == set(ids[1:3])
    assert removed(store, named=[ids[0]]) == {ids[0]}
    assert counts(store) == {**dict.fromkeys(counts(store), 0), "pairs": 1, "workloads": 1}
    with store.database.read() as session:
        for table in ("trajectory", "panorama"):
            count = session.execute(sa.text(f"SELECT COUNT(*) FROM {table}")).scalar()
            assert count == 0


def test_a_recording_is_as_old_as_its_last_text(store: TraceStore) -> None:
    """One that is not finished is spared for a day after that."""

    def begun(days: float, last: float | None = None) -> str:
        how = Asked(PAIR, None, Sampling(), 8, source="serve")
        made = at(store, NOW - days * DAY).create_recording(how).id
        if last is not None:
            at(store, NOW - last * DAY).append_trajectory(made, 0, a_trajectory(0))
        return made

    store.put_pair(PAIR, "demo", {})
    old, empty, busy, served = begun(40, 39), begun(40), begun(40, 0.5), begun(40, 29)
    assert removed(store, before=NOW - 30 * DAY) == {old, empty}
    assert removed(store, before=NOW + DAY) == {served}
    assert left(store) == {busy}
    assert removed(store, keep_last=0) == set()
    assert removed(store, named=[busy]) == {busy}


def test_what_a_publication_rests_on_is_spared(store: TraceStore) -> None:
    cited, free = a_recording(at(store, NOW), n=2), a_recording(at(store, NOW - DAY), n=2)
    run = {"device": "cpu", "dtype": "float32"}
    tables, other = (store.put_artifact("static", {"a": n}, pair_id=PAIR) for n in range(2))
    ids = {"studies": [store.put_study(PAIR, sampler="s", seed=0, document={}) for _ in range(2)]}
    store.put_policy("named", {"draft": "small", "growth": {"artifact": tables[:8]}}, "x")
    store.put_policy("unpublished", {"draft": "small", "growth": {"artifact": other}}, "y")
    store.put_policy(POLICY_ID, POLICY, "small")
    ids["runs"] = [store.put_run(PAIR, POLICY_ID, an_outcome(), **run) for _ in range(2)]
    profiles = [store.put_profile(a_profile(1e-4 * n)) for n in (1, 2)]
    rests_on = {"search": [{"recording": cited}], "runs": ids["runs"][:1]}
    evidence = {**rests_on, "study": ids["studies"][0], "profile": profiles[0]}
    store.publish(PAIR, "cpu", "named", actor="test", evidence=evidence)
    would = prune(store, before=NOW + 9000 * DAY, dry_run=True)
    assert counts(store)["runs"] == 2
    found = prune(store, before=NOW + 9000 * DAY)
    assert found == would
    assert {kind: of["spared"] for kind, of in found.items()} == {
        "recordings": [cited],
        "profiles": found["profiles"]["spared"],
        "artifacts": [tables],
        "studies": ids["studies"][:1],
        "runs": ids["runs"][:1],
    }
    assert set(found["profiles"]["spared"]) == set(profiles), "the newest, and that of the evidence"
    gone = {kind: of["removed"] for kind, of in found.items()}
    assert gone == {
        "recordings": [free],
        "profiles": [],
        "artifacts": [other],
        "studies": ids["studies"][1:],
        "runs": ids["runs"][1:],
    }
    assert [row["id"] for row in list_kind(store, "runs")] == ids["runs"][:1]
    with pytest.raises(TraceError, match=f"{cited} is what a publication rests on; --force"):
        removed(store, named=[cited])
    assert removed(store, named=[cited], force=True) == {cited}
    assert store.list_publications(PAIR, "cpu")[0].evidence == evidence


def test_commands_say_what_they_removed(tmp_path: Path) -> None:
    door = Door(str(tmp_path / "a.db"))
    with opened(str(door.db)) as store:
        recording, other = a_recording(store, n=2), a_recording(store, n=2)
        store.put_study(PAIR, sampler="s", seed=0, document={})
    assert "--older-than AGE" in door.error("db prune")
    for options in ("", " --id latest --keep-last 1"):
        assert "say what to prune: either --id ID, or" in door.error(
            "db prune recordings" + options
        )
    assert door.json("db prune recordings --older-than 30d")["removed"] == {"recordings": []}
    shown = door.call("db prune --dry-run", id=recording[:8]).stdout
    assert "would be removed" in shown
    assert recording in shown
    assert door.json("db prune", id="latest")["removed"] == {"recordings": [other]}
    assert door.json("db prune --older-than 30d")["removed"] == {kind: [] for kind in PRUNED}
    found = door.json("db prune studies recordings --keep-last 0")
    assert found["removed"]["recordings"] == [recording]
    assert set(found["removed"]) == {"studies", "recordings"}
    assert door.json("db show")["studies"] == 0

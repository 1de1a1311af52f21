"""What a tuning may put in force: only over what it was compared with, and only while it owns its
job."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from databases import put_in_force
from doors import Door, put_made_up_profile, write_workload
from sqlalchemy import text
from synthetic import policy
from test_schedules import HOUR, T0
from trace_values import a_trajectory

from spectune.db.database import Database
from spectune.optimizer import schedule as schedules
from spectune.optimizer.commands.tune import tuning_result
from spectune.optimizer.commands.work import tuning_job
from spectune.optimizer.deployment import tuned_for
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.fit.shared import texts_to_fit
from spectune.optimizer.recording.record import PanoramaSpec, record
from spectune.optimizer.report.tuning_page import page, report_on
from spectune.optimizer.tuning.native import TuneOptions, tune_pair
from spectune.optimizer.tuning.parts import deal, recorded_parts
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.traces.errors import TraceError
from spectune.traces.schema import Request, Sampling, Workload
from spectune.traces.store import Asked, TraceStore
from spectune.traces.tables import Publication

TEXTS = ("def add(a, b):", "The quick brown fox", "import json", "0 1 2 3 4")
WORKLOAD = Workload(
    "w", tuple(Request(f"r{i}", "ab"[i % 2], f"{TEXTS[i % 4]} {i}") for i in range(18))
)
CHOSEN = policy("near", 5)
"""What an operator puts in force."""
SLOW = policy("far", 16)
"""So slow that any tuning proves another to be faster, by a clock that only its own work moves."""
QUICK = TuneOptions(
    options=DecodeOptions(Sampling(), 8),
    gamma_max=5,
    trials=2,
    finalists=1,
    budget_s=1.0,
    tree_width=0,
)


def activate(store: TraceStore, pair: LoadedPair, policy: Policy = CHOSEN) -> int:
    """What an operator does."""
    hot = tuned_for(Sampling(0.7), "coupled")
    return put_in_force(store, pair.id, policy, actor="operator", sampling=hot)


def once(phase: str, then: Callable[[], object]) -> Callable[[str, int, int], None]:
    """A progress that does something in the middle of a phase."""
    todo = [then]

    def progress(at: str, _done: int, _total: int) -> None:
        if at == phase and todo:
            todo.pop()()

    return progress


# --- what came into force meanwhile


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_came_into_force_during_the_race_stays(store: TraceStore, pair: LoadedPair) -> None:
    put_made_up_profile(store, pair)
    put_in_force(store, pair.id, SLOW)
    during = once("execute", lambda: activate(store, pair))
    tuned = tune_pair(store, pair, WORKLOAD, QUICK, progress=during, clock=time.thread_time)
    newest, _ = store.list_publications(pair.id)
    assert (newest.actor, newest.policy_id) == ("operator", CHOSEN.id)
    assert tuned.published is None
    assert f"version {newest.version} came into force" in tuned.blocked
    assert "not compared" in tuned.blocked
    assert f"tune --recording {tuned.recording}" in tuned.blocked
    assert "\n" not in tuned.blocked
    assert store.get_study(tuned.study).trials, "what was searched is kept"
    assert store.get_recording(tuned.recording).state == "complete"


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_the_version_compared_with_is_the_one_replaced(store: TraceStore, pair: LoadedPair) -> None:
    """Also where it came into force while the tuning was still recording: the incumbent is read
    when it is needed."""
    put_made_up_profile(store, pair)
    store.put_policy("b" * 12, {}, "of another deployment")
    other = store.publish(pair.id, "cpu", "b" * 12, actor="operator", deployment="canary").version
    said: list[str] = []
    during = once("decode", lambda: activate(store, pair))
    tuned = tune_pair(store, pair, WORKLOAD, replace(QUICK, tell=said.append), progress=during)
    assert store.active_version(pair.id, "cpu", "canary") == other
    (line,) = [x for x in said if x.startswith("warning: version ")]
    assert "was tuned at temperature 0.7, and this is temperature 0.0; tune for it" in line
    assert tuned.incumbent.policy == CHOSEN
    newest = store.list_publications(pair.id)[0]
    assert (tuned.published is None) == (newest.policy_id == CHOSEN.id)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_a_smaller_tuning_does_not_record_is_raced_without_a_prediction(
    store: TraceStore, pair: LoadedPair
) -> None:
    """`tune --quick` after a tree was published ended in an error once all was recorded and
    searched."""
    put_made_up_profile(store, pair)
    window = {"kind": "analytic", "gamma_max": 3}
    tree = parse_policy(
        {"draft": "near", "growth": {"kind": "top_k", "width": 2}, "window": window}
    )
    activate(store, pair, tree)
    said: list[str] = []
    tuned = tune_pair(store, pair, WORKLOAD, replace(QUICK, tell=said.append))
    assert (tuned.incumbent.policy, tuned.incumbent.predicted_tokens_per_s) == (tree, None)
    assert tuned.incumbent.mean_accepted_length
    assert [line for line in said if "is raced without a prediction: " in line]
    assert "Predicted speeds were off by" in page(report_on(store, tuned.study))
    assert tuning_result(tuned)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_is_tuned_on_is_counted_again_where_chunks_are_damaged(
    store: TraceStore, pair: LoadedPair
) -> None:
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    lost = record(store, pair, WORKLOAD, QUICK.options, PanoramaSpec(("near",), 5), plain).id
    with store.database.write() as session:
        session.execute(text("UPDATE panorama SET trie = :data WHERE ordinal > 4"), {"data": b"x"})
    with pytest.raises(TraceError, match=r"5 requests leave|on different ones: 5"):
        tune_pair(store, pair, lost, QUICK)
    assert not list(store.profiles(pair.id)), "before the device is measured"


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_damaged_panorama_moves_no_request_to_another_part(
    store: TraceStore, pair: LoadedPair
) -> None:
    """A tuning leaves the damaged request out, a fit to the texts alone reads it: neither races or
    confirms on what the other is fitted to."""
    put_made_up_profile(store, pair)
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    info = record(store, pair, WORKLOAD, QUICK.options, PanoramaSpec(("near",), 5), plain)
    whole = recorded_parts(store, info.id, range(18))
    with store.database.write() as session:
        session.execute(text("UPDATE panorama SET trie = :data WHERE ordinal = 0"), {"data": b"x"})
    fitted_to = {t.request_id for t in texts_to_fit(store, info.id, pair.spec)}
    tuned = tune_pair(store, pair, info.id, replace(QUICK, publish=False))
    assert fitted_to == {f"r{i}" for i in whole.fit}
    assert tuned.search_requests == len(whole.search) - (0 in whole.search)
    raced = {f"r{i}" for i in whole.race}
    assert tuned.test_requests <= len(raced)  # those that there was time for
    assert report_on(store, tuned.study).evidence.rounds.request in raced
    assert not raced & fitted_to
    left = recorded_parts(store, info.id, range(1, 18))
    assert [n + 1 for n in left.confirm] == whole.confirm
    assert not {f"r{n}" for n in whole.confirm} & fitted_to


def test_requests_recorded_later_move_no_other_to_another_part(store: TraceStore) -> None:
    """Not even those of smaller ordinals, or of a category that comes first."""
    store.put_pair("p", "p", {})
    name = store.create_recording(Asked("p", None, Sampling(), 64)).id
    texts = [a_trajectory(i, category="ab"[i % 2]) for i in range(40)]
    for ordinals in (range(11, 30, 2), range(31, 40), range(30, 0, -2), range(0, 12)):
        before = store.request_parts(name, deal)
        store.append_trajectories(name, [(n, texts[n], ()) for n in ordinals if n not in before])
        assert store.request_parts(name, deal).items() >= before.items()
    parts = recorded_parts(store, name, range(40))
    assert sorted(n for part in parts for n in part) == list(range(40))
    assert [len(part) for part in parts] == pytest.approx([8, 12, 8, 12], abs=1)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_recording_says_how_it_is_tuned_on(store: TraceStore, pair: LoadedPair) -> None:
    """Whatever was asked for: with the rejection verifier no trees are recorded; texts that an
    engine sampled cannot be decoded here."""
    put_made_up_profile(store, pair)
    drawn = DecodeOptions(Sampling(0.7), 8, "rejection")
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    info = record(store, pair, WORKLOAD, drawn, PanoramaSpec(("near",), 5), plain)
    asked = replace(QUICK, tree_width=2, tree_depth=2, publish=False)
    tuned = tune_pair(store, pair, info.id, asked)
    assert {c.policy.growth.kind for c in tuned.candidates if c.policy.speculates} == {"chain"}
    assert store.get_recording(info.id).with_trees == ()
    texts = [a_trajectory(i, sampling=Sampling(0.7), verifier="greedy") for i in range(18)]
    served = store.create_recording(Asked(pair.id, None, Sampling(0.7), 64, "greedy")).id
    store.append_trajectories(served, [(i, text, ()) for i, text in enumerate(texts)])
    with pytest.raises(TraceError, match=rf"recording {served} was sampled by an engine"):
        tune_pair(store, pair, served, asked)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_recorded_rounds_name_is_stored(
    store: TraceStore, pair: LoadedPair, tiny_pair: Path, tmp_path: Path
) -> None:
    """By whatever they were decoded: a tuning's own short window, or a file given to `run`."""
    short = StaticSource(prepare(policy("near", 2), pair.draft_names))
    record(store, pair, WORKLOAD, QUICK.options, PanoramaSpec(()), short)
    given = tmp_path / "policy.json"
    given.write_text(policy("near", 3).model_dump_json())
    door = Door(store.database.url.render_as_string(hide_password=False), str(tiny_pair))
    asked = ("--workload", write_workload(tmp_path / "w.jsonl", 2), "--max-new-tokens", 8)
    door.json("run", "--policy", given, "--pair", tiny_pair, *asked, "--record", "--no-store")
    for info in store.list_recordings():
        steps = [s for r in store.load(info.id, (), steps=True).requests for s in r.steps]
        (named,) = {s.policy for s in steps}
        assert store.get_policy(named).id == named


# --- whose job it is


@dataclass(frozen=True)
class Overtaken(TraceStore):
    """A store whose user loses the job just before it publishes."""

    lose: list[Callable[[], object]] = field(default_factory=list)

    def publish(self, *args: Any, **how: Any) -> Publication:
        while self.lose:
            self.lose.pop()()
        return super().publish(*args, **how)


def taken_over(database: Database) -> None:
    with database.write() as session:
        session.execute(text("UPDATE schedule SET lease_until = '2000-01-01 00:00:00.000000'"))
    assert schedules.claim(database, "other", lease_s=60) is not None


def removed(database: Database) -> None:
    schedules.remove_schedule(database, "nightly")


def settings(pair: LoadedPair, workload: Path, report: str | None = "none") -> dict[str, Any]:
    """Those of a schedule; with None as ``report`` each attempt writes its page."""
    return {
        "pair": pair.spec.to_json(),
        "device": "cpu",
        "workload": [str(workload)],
        "sampling": {"max_new_tokens": 8},
        "search": {"gamma_max": 5, "trials": 2},
        "trees": {"width": 0},
        "race": {"finalists": 1, "budget": "3s"},
        "report": report,
    }


@pytest.mark.parametrize(
    ("url", "lose"), [("postgresql", taken_over), ("sqlite", removed)], indirect=["url"]
)
def test_who_lost_the_job_publishes_nothing(
    database: Database, pair: LoadedPair, tmp_path: Path, lose: Callable[[Database], None]
) -> None:
    """However late it was lost: the token is looked at in the transaction that publishes."""
    store = Overtaken(database)
    put_made_up_profile(store, pair)
    before = put_in_force(store, pair.id, SLOW)
    asked = settings(pair, write_workload(tmp_path / "w.jsonl", 18))
    schedules.add_schedule(database, "nightly", "@hourly", asked, now=T0)
    store.lose.append(lambda: lose(database))
    execute = tuning_job(store, load=lambda *_args, **_kw: pair, clock=time.thread_time)
    outcomes = schedules.run_worker(database, execute, once=True, clock=lambda: T0 + HOUR)
    assert (store.lose, outcomes["failed"]) == ([], 0), "it came as far as publishing"
    assert outcomes == {"done": 0, "failed": 0, "lost": 1, "released": 0}
    assert [p.version for p in store.list_publications()] == [before]

"""A slot's attempts share what they make: what one had recorded, profiled or published, the next
one finds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from databases import put_in_force
from doors import put_made_up_profile, write_workload
from test_publishing import HOUR, SLOW, T0, settings
from trace_values import a_panorama, a_trajectory, damage

from spectune.optimizer import schedule as schedules
from spectune.optimizer.commands.work import tuning_job
from spectune.optimizer.schedule import Job
from spectune.optimizer.schedule.worker import Run
from spectune.optimizer.tuning.sources import sample_since
from spectune.runtime.loading import LoadedPair
from spectune.traces.errors import TraceError
from spectune.traces.recording import RecordedRequest
from spectune.traces.schema import Sampling
from spectune.traces.store import Asked, TraceStore
from spectune.traces.tables import Panorama, Trajectory

REQUESTS = 18
"""So many that a winner can be confirmed."""


@pytest.fixture
def hourly(store: TraceStore, pair: LoadedPair, tmp_path: Path) -> str:
    """The name of a schedule, as `schedule add` stores it."""
    texts = settings(pair, write_workload(tmp_path / "w.jsonl", REQUESTS), report=None)
    return schedules.add_schedule(store.database, "nightly", "@hourly", texts, now=T0).name


def work(
    store: TraceStore, pair: LoadedPair, hours: int, *, dies_in: str = "", after: int = 0
) -> dict[str, int]:
    """A worker at the slot of that hour; in a phase, or ``after`` so many of its steps, it is
    gone."""

    def progress(phase: str, done: int, _total: int) -> None:
        if dies_in and phase.endswith(dies_in) and done >= after:
            raise SystemExit(dies_in)

    def load(*_arguments: object, **_how: object) -> LoadedPair:
        return pair

    return schedules.run_worker(
        store.database,
        tuning_job(store, load=load, progress=progress),
        once=True,
        clock=lambda: T0 + hours * HOUR,
    )


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_attempts_and_slots_share_a_recording_and_a_profile_until_the_workload_changes(
    store: TraceStore,
    pair: LoadedPair,
    hourly: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit, match="decode"):
        work(store, pair, 1, dies_in="decode", after=3)
    (begun,) = store.list_recordings()
    assert (begun.state, begun.n_requests) == ("recording", 3)

    def gone(*_arguments: object, **_how: object) -> None:
        raise SystemExit("profile")

    with monkeypatch.context() as patched:
        patched.setattr("spectune.optimizer.profiles.measure_profile", gone)
        with pytest.raises(SystemExit, match="profile"):
            work(store, pair, 1)
    put_made_up_profile(store, pair)  # what that attempt would have measured
    assert work(store, pair, 1)["done"] == 1
    (made,) = store.list_recordings()
    assert (made.id, made.state, made.n_requests) == (begun.id, "complete", REQUESTS)
    monkeypatch.setattr("spectune.optimizer.profiles.measure_profile", gone)
    write_workload(tmp_path / "w.jsonl", REQUESTS)  # the same once more
    with pytest.raises(SystemExit, match="execute"):
        work(store, pair, 2, dies_in="execute")
    assert [r.id for r in store.list_recordings()] == [made.id]
    assert len([*store.profiles()]) == 1
    write_workload(tmp_path / "w.jsonl", REQUESTS + 1)
    with pytest.raises(SystemExit, match="decode"):
        work(store, pair, 3, dies_in="decode")
    assert [r.id == made.id for r in store.list_recordings()] == [False, True]


class Killed(TraceStore):
    """Its process is gone after it read some requests."""

    left = 3

    def iterate(self, *arguments: Any, **how: Any) -> Iterator[RecordedRequest]:
        for request in super().iterate(*arguments, **how):
            if not self.left:
                raise SystemExit("iterate")
            self.left -= 1
            yield request


def test_a_sample_that_was_killed_is_taken_anew_and_holds_no_request_twice(
    store: TraceStore, pair: LoadedPair
) -> None:
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    served = store.create_recording(Asked(pair.id, None, Sampling(), 64, source="serve")).id
    store.append_trajectories(served, [(i, a_trajectory(i), ()) for i in range(9)])
    with pytest.raises(SystemExit, match="iterate"):
        sample_since(Killed(store.database), pair.id, HOUR, 6, key="slot")
    store.append_trajectories(served, [(i, a_trajectory(i), ()) for i in range(9, 11)])
    said: list[str] = []
    made = sample_since(store, pair.id, HOUR, 6, key="slot", tell=said.append)
    held = [request.trajectory.request_id for request in store.iterate(made.id)]
    assert len(held) == len(set(held)) == 6
    assert said == [
        "recorded traffic has 11 requests: this takes a sample of 6 (`tune --limit` says how many)"
    ]


class Counting(TraceStore):
    """Counts the requests whose contents are read."""

    contents = 0

    def iterate(self, *arguments: Any, **how: Any) -> Iterator[RecordedRequest]:
        for request in super().iterate(*arguments, **how):
            Counting.contents += 1
            yield request


def test_to_choose_a_sample_reads_no_other_contents(store: TraceStore, pair: LoadedPair) -> None:
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    served = store.create_recording(Asked(pair.id, None, Sampling(), 64, source="serve")).id
    store.append_trajectories(served, [(i, a_trajectory(i), ()) for i in range(90)])
    sample_since(Counting(store.database), pair.id, HOUR, 6, key="slot")
    assert Counting.contents == 6
    Counting.contents = 0


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_an_engine_drew_is_not_sampled(store: TraceStore, pair: LoadedPair) -> None:
    """One comparison decodes by one verifier; that there is no other is said."""
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    drawn = [a_trajectory(i, sampling=Sampling(0.7), verifier="greedy") for i in range(9)]
    plain = [a_trajectory(i) for i in range(9, 12)]
    for texts in (drawn, plain):
        of, verifier = texts[0].sampling, texts[0].verifier
        served = store.create_recording(Asked(pair.id, None, of, 64, verifier))
        if texts is plain:
            with pytest.raises(TraceError, match=r"none of the 9 requests .*`tune --arrivals"):
                sample_since(store, pair.id, HOUR, 3, key="none")
        store.append_trajectories(served.id, [(i, text, ()) for i, text in enumerate(texts)])
    made = sample_since(store, pair.id, HOUR, 3, key="some")
    held = [r.trajectory.request_id for r in store.iterate(made.id)]
    assert sorted(held) == sorted(text.request_id for text in plain)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_sample_is_of_one_sampling(store: TraceStore, pair: LoadedPair) -> None:
    """Of several samplings the most common, whatever its seeds, which is said; a later attempt
    finds it, whatever came since."""
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    hot = [
        a_trajectory(i, sampling=Sampling(0.7, seed=i % 2), verifier="rejection") for i in range(4)
    ]
    served = store.create_recording(Asked(pair.id, None, hot[0].sampling, 64, "rejection"))
    store.append_trajectories(served.id, [(i, text, ()) for i, text in enumerate(hot)])
    said: list[str] = []
    alone = sample_since(store, pair.id, HOUR, 9, key="alone", tell=said.append)
    assert (alone.sampling.temperature, alone.verifier) == (0.7, "rejection")
    assert alone.max_new_tokens == max(text.max_new_tokens for text in hot)
    assert said == []
    plain = [a_trajectory(i) for i in range(4, 7)]
    others = store.create_recording(Asked(pair.id, None, Sampling(), 64))
    store.append_trajectories(others.id, [(i, text, ()) for i, text in enumerate(plain)])
    made = sample_since(store, pair.id, HOUR, 9, key="mixed", tell=said.append)
    assert made.sampling.temperature == 0.7
    (line,) = said
    assert "2 samplings" in line
    assert "temperature 0.7" in line
    assert "4 of 7 requests" in line
    held = {r.trajectory.request_id for r in store.iterate(made.id)}
    assert held <= {text.request_id for text in hot}
    more = [a_trajectory(i) for i in range(7, 11)]
    store.append_trajectories(others.id, [(i, text, ()) for i, text in enumerate(more, 3)])
    assert sample_since(store, pair.id, HOUR, 9, key="mixed").id == made.id
    assert sample_since(store, pair.id, HOUR, 9, key="later").sampling.greedy


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_damaged_traffic_is_left_out(store: TraceStore, pair: LoadedPair) -> None:
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    texts = [a_trajectory(i) for i in range(4)]
    served = store.create_recording(Asked(pair.id, None, Sampling(), 64))
    store.append_trajectories(served.id, [(i, text, ()) for i, text in enumerate(texts)])
    store.put_panoramas(served.id, [(i, a_panorama(t, "small")) for i, t in enumerate(texts)])
    damage(store, Trajectory.tokens, recording_id=served.id, ordinal=0)
    damage(store, Panorama.trie, recording_id=served.id, ordinal=1)
    said: list[str] = []
    sample = sample_since(store, pair.id, HOUR, 9, key="slot", tell=said.append)
    made = store.load(sample.id, skip_corrupted=True)
    assert made.trajectories == tuple(texts[1:])
    assert [sorted(request.panoramas) for request in made.requests] == [[], ["small"], ["small"]]
    assert [line.split(": ")[1] for line in said] == [f"request 0 of {served.id}"]
    (panorama,) = made.skipped
    assert (panorama.ordinal, panorama.draft) == (0, "small")
    for n in (1, 2, 3):
        damage(store, Trajectory.tokens, recording_id=served.id, ordinal=n)
    with pytest.raises(TraceError, match=r"is damaged; `db check` lists it"):
        sample_since(store, pair.id, HOUR, 9, key="none")


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_an_attempt_that_published_and_was_gone_before_it_could_say_so_is_not_repeated(
    store: TraceStore, pair: LoadedPair, hourly: str, tmp_path: Path
) -> None:
    execute = tuning_job(
        store,
        load=lambda *_arguments, **_how: pair,
        db=str(tmp_path / "s.db"),
        clock=time.thread_time,
    )

    def dies(job: Job) -> Mapping[str, Any]:
        execute(job)
        raise SystemExit

    def at_work(run: Run) -> dict[str, int]:
        return schedules.run_worker(store.database, run, once=True, clock=lambda: T0 + HOUR)

    put_made_up_profile(store, pair)
    put_in_force(store, pair.id, SLOW)
    with pytest.raises(SystemExit):
        at_work(dies)
    published, _ = both = store.list_publications()
    assert at_work(execute)["done"] == 1
    assert store.list_publications() == both
    (study,) = store.list_studies()
    assert schedules.history(store.database, hourly)[0].result == {
        "winner": published.document,
        "label": published.label,
        "published": published.version,
        "reason": published.reason,
        "recording": published.evidence["recording"],
        "study": study.id,
        "report": str(tmp_path / f"spectune-report-{study.id}.html"),
        "rollout": None,
    }

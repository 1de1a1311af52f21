"""Which recorded texts a name or an age means, for tunings, fits and schedules alike."""

from __future__ import annotations

import errno
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from databases import opened
from distributed import LocalCluster
from doors import Door
from served_traces import record_server
from trace_values import a_trajectory

from spectune.db.database_errors import NotFoundError
from spectune.optimizer.recording.processes import dask_workers
from spectune.optimizer.tuning.parts import deal
from spectune.optimizer.tuning.sources import SAMPLED, recording_named, sample_since
from spectune.optimizer.tuning.tuned import EVIDENCE
from spectune.options import from_document, read_config
from spectune.runtime.pair import PairSpec, read_pair
from spectune.settings import Tune
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling, Tokens
from spectune.traces.store import Asked, TraceStore

HOUR = timedelta(hours=1)
SERVED = {"engine": "vllm"}


def pair_named(name: str) -> PairSpec:
    return cast(PairSpec, SimpleNamespace(id=name * 2, name=name))


def add(
    store: TraceStore, pair: PairSpec, source: str = "serve", n: int = 4, **options: str
) -> str:
    """A recording of ``n`` texts; its id."""
    store.put_pair(pair.id, pair.name, {})
    made = store.create_recording(Asked(pair.id, None, Sampling(), 64, "coupled", options, source))
    texts = [a_trajectory(i) for i in range(n)]
    for text in texts:  # of the tiny pair's vocabulary
        text.tokens = Tokens(text.prompt_ids % 256, text.output_ids % 256)
    store.append_trajectories(made.id, [(i, text, ()) for i, text in enumerate(texts)])
    return made.id


def test_latest_is_no_sample_no_profile_and_no_other_pairs(store: TraceStore) -> None:
    ours, theirs = pair_named("ours"), pair_named("theirs")
    first, served = add(store, ours), add(store, ours, **SERVED)
    for source in ("sample", "profile"):
        add(store, ours, source, **SERVED)
    add(store, ours, n=0, **SERVED)
    other = add(store, theirs, **SERVED)
    assert recording_named(store, "latest", engine="vllm").id == other
    assert recording_named(store, "latest", pair=ours, engine="vllm").id == served
    assert recording_named(store, "latest", pair=ours).id == served
    assert recording_named(store, first[:9], pair=ours).id == first
    for name, how, says in (
        (first, {"pair": theirs}, "was made with pair"),
        (first, {"engine": "vllm"}, f"recording {first} is of native"),
        ("latest", {"pair": pair_named("third")}, "nothing is recorded of pair .* (third)"),
        ("latest", {"engine": "vllm", "pair": pair_named("third")}, "nothing of pair"),
    ):
        with pytest.raises(TraceError, match=says.replace("(", r"\(").replace(")", r"\)")):
            recording_named(store, name, **how)
    with pytest.raises(NotFoundError):
        recording_named(store, "none-such", pair=ours)


def test_a_sample_is_used_again_until_a_tuning_has_ended(store: TraceStore) -> None:
    """So that a tuning that was interrupted goes on with what it has recorded."""
    pair = pair_named("ours")
    add(store, pair, n=9)
    first = sample_since(store, pair.id, HOUR, 5)
    assert first.n_requests == 5
    assert sample_since(store, pair.id, HOUR, 5).id == first.id
    assert sample_since(store, pair.id, HOUR, 6).id != first.id, "other words"
    assert sample_since(store, pair.id, HOUR, 5, key="slot").id != first.id
    study = store.put_study(pair.id, sampler="s", seed=0, document={}, recording_id=first.id)
    assert sample_since(store, pair.id, HOUR, 5).id == first.id, "it was searched and not raced"
    store.put_artifact(EVIDENCE, {}, pair_id=pair.id, provenance={"study": study})
    assert sample_since(store, pair.id, HOUR, 5).id != first.id


def test_an_age_counts_from_when_it_is_used() -> None:
    """A schedule stores it as it was typed."""
    asked = from_document(Tune, {"since": "24h"}, "x")
    assert asked.since == timedelta(days=1)
    again = from_document(Tune, {"since": asked.model_dump(mode="json")["since"]}, "x")
    assert again.since == asked.since
    moment = from_document(Tune, {"since": "2026-11-25T09:00"}, "x")
    stored = moment.model_dump(mode="json")["since"]
    assert from_document(Tune, {"since": stored}, "x").since == moment.since
    assert isinstance(moment.since, datetime)


@pytest.fixture(scope="module")
def recorded_server(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("server") / "traffic.db")
    record_server(url)
    return url


def test_an_engine_is_tuned_on_what_was_served_lately(recorded_server: str, tmp_path: Path) -> None:
    """By the seed that is given; and a load says whose it is."""
    shutil.copy(recorded_server, tmp_path / "traffic.db")
    door = Door(str(tmp_path / "traffic.db"))
    assert "name whose traffic is meant" in door.refused("tune --arrivals recorded")
    how = ("--engine", "vllm", "--arrivals", "clients:1,4", "--set", "search.seed=3")
    told = door.json("tune", *how, "--since", "500d", "--limit", 30)
    with opened(door.db) as store:
        info = store.get_recording(told["recording"])
        assert (info.source, info.n_requests) == ("sample", 30)
        assert store.get_study(told["study"]).seed == 3


def test_a_recording_without_a_text_is_one_line(
    store: TraceStore, tiny_pair: Path, url: str
) -> None:
    spec = read_pair(str(tiny_pair))
    name = add(store, spec, "record", n=0)
    said = Door(url, str(tiny_pair)).refused("tune", "--recording", name, "--pair", tiny_pair)
    assert "holds no text" in said


def test_the_latest_is_of_the_pair_that_is_named(
    store: TraceStore, tiny_pair: Path, url: str
) -> None:
    """However much newer another's is: what is fitted, and what is resumed."""
    spec = read_pair(str(tiny_pair))
    store.put_pair(spec.id, spec.name, spec.to_json(), spec.models)
    ours = add(store, spec, n=1)
    theirs = add(store, pair_named("theirs"), n=1)
    door = Door(url)
    for kind in ("bins --draft near", "frequencies"):
        failed = door.call(f"fit {kind}", "--pair", tiny_pair)
        said = failed.exit_code, ours in failed.stderr, theirs in failed.stderr
        assert said == (2, True, False), (kind, failed.stderr)
    for env, how in (({}, ("--pair", tiny_pair)), ({"SPECTUNE_PAIR": str(tiny_pair)}, ())):
        found = door.call("record --resume latest", *how, env=env)
        assert f"recording {ours}" in found.stdout, found.output


def test_what_fails_beside_a_cluster_is_not_the_clusters() -> None:
    threads = {"processes": False, "threads_per_worker": 1}
    with (
        LocalCluster(n_workers=1, dashboard_address="127.0.0.1:0", **threads) as cluster,
        pytest.raises(OSError, match="full"),
        dask_workers(cluster.scheduler_address),
    ):
        raise OSError(errno.ENOSPC, "the disk is full")


def test_paths_in_a_file_are_seen_from_it(tmp_path: Path) -> None:
    file = tmp_path / "spectune.toml"
    file.write_text('target = "t"\n[drafts]\nsmall = "s"\n[load]\narrivals = "trace.csv@2"\n')
    config = read_config(str(file))
    assert config is not None
    assert config.values["drafts"] == {"small": str(tmp_path / "s")}
    assert config.values["load.arrivals"] == str(tmp_path / "trace.csv@2")
    file.write_text('drafts = ["small=s"]\n[load]\narrivals = "clients:1,8"\n')
    config = read_config(str(file))
    assert config is not None
    assert config.values["drafts"] == [f"small={tmp_path / 's'}"]
    assert config.values["load.arrivals"] == "clients:1,8"


def test_a_limit_takes_every_category_alike(store: TraceStore, url: str) -> None:
    """Also where they were recorded one after another."""
    pair = pair_named("ours")
    store.put_pair(pair.id, pair.name, {})
    made = store.create_recording(Asked(pair.id, None, Sampling(), 64, "coupled", {}, "record"))
    texts = [a_trajectory(i, category="abc"[i // 4]) for i in range(12)]
    store.append_trajectories(made.id, [(i, text, ()) for i, text in enumerate(texts)])
    for limit, each in ((3, 1), (6, 2)):
        found = Door(url).json("simulate --policy autoregressive", limit=limit)
        requests = {name: row["requests"] for name, row in found["by_category"].items()}
        assert requests == dict.fromkeys("abc", each)


def test_a_small_sample_of_what_was_dealt_before_has_every_part(store: TraceStore) -> None:
    pair = pair_named("ours")
    add(store, pair, n=40)
    dealt = sample_since(store, pair.id, HOUR, key="all").id
    before = dict(zip(names_of(store, dealt), parts_of(store, dealt), strict=True))
    few = sample_since(store, pair.id, HOUR, 4, key="few").id
    assert sorted(parts_of(store, few)) == ["c", "f", "r", "s"]
    assert [before[name] for name in names_of(store, few)] == parts_of(store, few)


def test_more_than_by_default_is_taken_where_that_is_asked_for(store: TraceStore) -> None:
    """And that there is more is told."""
    pair, told = pair_named("ours"), list[str]()
    add(store, pair, n=SAMPLED + 20)
    assert sample_since(store, pair.id, HOUR, tell=told.append).n_requests == SAMPLED
    assert (
        f"has {SAMPLED + 20} requests: this takes a sample of {SAMPLED} (`tune --limit`" in told[0]
    )
    for limit, taken in ((SAMPLED + 10, SAMPLED + 10), (5000, SAMPLED + 20)):
        assert sample_since(store, pair.id, HOUR, limit).n_requests == taken


def names_of(store: TraceStore, recording: str) -> list[str]:
    return [request.trajectory.request_id for request in store.iterate(recording)]


def parts_of(store: TraceStore, recording: str) -> list[str]:
    return [*store.request_parts(recording, deal).values()]

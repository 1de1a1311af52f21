"""`spectune serve` as a process: what is published is followed, what is served is recorded, and it
ends as it should; or is refused in one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from databases import opened, put_in_force
from disks import full, mounts, unmount
from doors import Door
from http_server import Served, chunks_of, deaf_client, served
from pairs import fixed, top_k
from recorded_texts import request_of
from serve_process import BODY, answer, follows, metric, process
from synthetic import policy
from waiting import PATIENCE_S, eventually

from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.service.decode_thread import TextJob
from spectune.service.recorder import Recorder
from spectune.traces.schema import Finish
from spectune.traces.store import TraceStore
from spectune.traces.tables import Trajectory

POLICIES = [policy("near", fixed(4)), parse_policy(top_k("near", 3, 3, 8)), AUTOREGRESSIVE]
LEARNS = policy("near", {"kind": "q_learning"})
"""Of one request at a time."""


@pytest.fixture
def door(tiny_pair: Path, tmp_path: Path) -> Door:
    return Door(str(tmp_path / "spectune.db"), str(tiny_pair))


@pytest.fixture
def float64(tiny_pair: Path) -> LoadedPair:
    return load_pair(read_pair(str(tiny_pair)), device="cpu", dtype="float64")


def texts_of(store: TraceStore) -> list[Trajectory]:
    """All that is recorded, as it ended."""
    names = [info.id for info in store.list_recordings()]
    return [text for name in names for text in store.load(name, ()).trajectories]


def test_publications_are_followed_and_what_is_served_is_recorded(
    door: Door, tiny_pair: Path, float64: LoadedPair
) -> None:
    """SIGTERM amid a stream: it ends whole, is recorded, and the process with 0. A recorded text
    can be decoded again."""
    assert door.db is not None
    label = {"vllm_xargs": {"spectune_label": "tenant"}}
    with process(door, json=True) as (started, url), opened(door.db) as store:
        assert httpx2.get(f"{url}/ready").status_code == 200
        told = [answer(url)]
        for one in POLICIES:
            version = put_in_force(store, float64.id, one)
            eventually(partial(follows, url, version))
            told.append(answer(url, **label))
        refused = put_in_force(store, float64.id, LEARNS)
        eventually(lambda: (refused, "refused") in statuses(store))
        told.append(answer(url))
        assert len({a["choices"][0]["text"] for a in told}) == 1
        accepted = [accepted_of(a) for a in told]
        assert [n > 0 for n in accepted] == [False, True, True, False, False]
        with httpx2.stream(
            "POST",
            f"{url}/v1/completions",
            json={**BODY, "max_tokens": 400, "ignore_eos": True, "stream": True},
            timeout=PATIENCE_S,
        ) as response:
            events = response.iter_text()
            said = next(events)
            started.send_signal(signal.SIGTERM)
            said += "".join(events)
        out, _ = started.communicate(PATIENCE_S)
        assert started.wait(PATIENCE_S) == 0
        assert chunks_of(said.split("\n\n"))[-1]["choices"][0]["finish_reason"] == "length"
        assert json.loads(out)["recorded"] == {"written": 6, "dropped": 0}
        texts = texts_of(store)
        assert {info.state for info in store.list_recordings()} == {"complete"}
        assert sorted(text.category for text in texts)[-3:] == ["tenant"] * 3
        decoder = Decoder(float64, StaticSource(prepare_for(float64, POLICIES[0])))
        for text in [text for text in texts if text.max_new_tokens == 48]:
            again = decoder.decode(request_of(decoder, text)).trajectory
            assert again.output_ids.tolist() == text.output_ids.tolist()
            assert float64.text(text.output_ids.tolist()) == told[0]["choices"][0]["text"]


def accepted_of(found: dict[str, Any]) -> int:
    count: int = found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    return count


def statuses(store: TraceStore) -> list[tuple[int, str]]:
    return [(a.version, a.status) for a in store.acknowledgements()]


def test_killed_amid_streams_what_was_written_stays(door: Door) -> None:
    """And the next process gives the same text."""
    assert door.db is not None
    with process(door, policy=json.dumps(POLICIES[0].spelled_out())) as (started, url):
        first = answer(url)["choices"]
        eventually(lambda: metric(url, 'spectune_recorded{model_name="tiny-llama",state="writ') > 0)
        asked = {**BODY, "max_tokens": 480, "ignore_eos": True, "stream": True}

        def read() -> None:
            with httpx2.stream("POST", f"{url}/v1/completions", json=asked, timeout=240) as got:
                for _ in got.iter_text():
                    pass

        threads = [threading.Thread(target=expect_cut, args=(read,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: metric(url, "vllm:num_requests_running") == 3)
        started.kill()
        for thread in threads:
            thread.join()
    assert door.json("db", "check")["ok"] is True
    with opened(door.db) as store:
        assert len(texts_of(store)) >= 1
    with process(door) as (_, url):
        assert answer(url)["choices"] == first


def expect_cut(read: Any) -> None:
    with pytest.raises(httpx2.HTTPError):
        read()


# ---------------------------------------------------------------------------------------- recording


@contextmanager
def recorded(store: TraceStore, pair: LoadedPair, share: float) -> Iterator[tuple[Served, Any]]:
    """A server whose texts are recorded."""
    source = StaticSource(prepare_for(pair, POLICIES[0]))
    recorder = Recorder(store, pair, source, share)
    ended = list[TextJob]()

    def finished(job: TextJob, finish: Finish) -> None:
        recorder.put(job, finish)
        ended.append(job)

    with served(pair, source, finished=finished) as server:
        yield server, recorder
    recorder.close()


def test_texts_are_recorded_by_sampling_and_label(store: TraceStore, pair: LoadedPair) -> None:
    """Not those that ask for that, nor the tokens of what went on after its end."""
    with recorded(store, pair, 1.0) as (server, _):
        server.answer("completions", **BODY, n=2)
        server.answer("completions", **BODY, temperature=0)
        server.answer("completions", **BODY, vllm_xargs={"spectune": "off"})
        label = {"vllm_xargs": {"spectune_label": "tenant"}}
        server.answer("completions", **{**BODY, "max_tokens": 400}, ignore_eos=True, **label)
    infos = store.list_recordings()
    assert sorted((info.sampling.temperature, info.n_requests) for info in infos) == [
        (0.0, 1),
        (1.0, 3),
    ]
    assert {(info.source, info.state) for info in infos} == {("serve", "complete")}
    assert len({info.start for info in infos}) == 1
    assert store.traffic_since(pair.id, infos[0].created_at)
    labels = {text.category for text in texts_of(store)}
    assert labels <= {"serve", "tenant"}


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 1, 15), (1.0, 16, 16)])
def test_a_share_of_the_texts_is_stored(
    store: TraceStore, pair: LoadedPair, share: float, least: int, most: int
) -> None:
    """Of the others their rounds."""
    with recorded(store, pair, share) as (server, _):
        server.answer("completions", **{**BODY, "max_tokens": 4}, n=16)
    (info,) = store.list_recordings()
    assert info.n_requests == 16
    assert least <= info.n_texts <= most
    served_requests = store.served_requests([info.id])
    assert len(served_requests) == 16


def test_a_database_that_goes_away_stops_nothing(tmp_path: Path, pair: LoadedPair) -> None:
    """What cannot be written is counted."""
    path = tmp_path / "gone.db"
    with opened(path) as store:
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
        with recorded(store, pair, 1.0) as (server, recorder):
            expected = server.texts("completions", **BODY)
            eventually(lambda: recorder.status.written == 1)
            for file in tmp_path.glob("gone.db*"):
                os.rename(file, f"{file}.away")
            path.mkdir()
            assert server.texts("completions", **BODY, top_k=3)
            assert server.texts("completions", **BODY) == expected
        status = recorder.status
        assert status.written + status.dropped == 3
        for file in tmp_path.glob("gone.db.away"):
            path.rmdir()
            os.rename(file, path)


def test_a_full_disk_stops_nothing(tmp_path: Path, pair: LoadedPair) -> None:
    """What has no room is counted; once there is room again, texts are recorded again."""
    (folder := tmp_path / "disk").mkdir()
    if not mounts("-t", "tmpfs", "-o", "size=4m", "tmpfs", folder):
        pytest.skip("no file system may be mounted here")
    try:
        with opened(folder / "full.db") as store:
            store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
            with recorded(store, pair, 1.0) as (server, recorder):
                expected = server.texts("completions", **BODY)
                eventually(lambda: recorder.status.written == 1)
                with full(folder):
                    for n in range(8):
                        assert server.texts("completions", **BODY, user=str(n)) == expected
                    eventually(lambda: recorder.status.error)
                assert server.texts("completions", **BODY) == expected
            status = recorder.status
            assert status.written + status.dropped == 10
            assert status.written == len(texts_of(store))
    finally:
        unmount(folder)


def test_sigterm_waits_no_longer_than_it_is_told_for_a_client_that_reads_nothing(
    door: Door,
) -> None:
    asked = {**BODY, "max_tokens": 480, "ignore_eos": True, "logprobs": 5, "n": 3, "stream": True}
    with process(door, drain="1s") as (started, url), deaf_client(url, **asked):
        eventually(lambda: metric(url, "vllm:generation_tokens_total") == 3 * 480)
        started.send_signal(signal.SIGTERM)
        assert started.wait(PATIENCE_S) == 0


# ---------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_served_is_refused_in_one_line(door: Door, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        for words, options in (
            ("--key-file", {"host": "0.0.0.0"}),
            ("nothing", {"key_file": tmp_path / "nothing"}),
            ("one key", {"key_file": tmp_path / "empty"}),
            (f"--port {port}", {"port": port}),
            ("--host nowhere.invalid", {"host": "nowhere.invalid", "key_file": __file__}),
            ("one request at a time", {"policy": json.dumps(LEARNS.spelled_out())}),
        ):
            how = {"pair": door.pair, "port": 0, **options}
            assert words in door.error("serve", **how).replace("one key", words)

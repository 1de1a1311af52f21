"""`spectune control`: what it shows, to whom, and what it goes on with when something fails."""

from __future__ import annotations

import base64
import csv
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from agent_folder import PAIR, Agent
from browser import browser, laid_out
from databases import Server, opened, put_in_force
from doors import Door, Started
from prometheus_client.parser import text_string_to_metric_families
from test_rollouts import NEW, OLD, Fleet
from waiting import PATIENCE_S, eventually

from spectune.db.database_errors import UnavailableError
from spectune.engines.vllm.follow import Follower
from spectune.optimizer.metrics import METRICS
from spectune.optimizer.rollout.conductor import LEASE_S
from spectune.optimizer.schedule import add_schedule, history
from spectune.service.board import EVERY_S, Board
from spectune.traces.store import TraceStore
from spectune.traces.tables import Alarm, Rollout

HOSTILE = '=2+2<script src="http://elsewhere/x.js">alert(1)</script>"}\n\\ 1,'
BROWSERS_OWN = r"\.(google|googleapis|gvt1)\.com$"
"""What a browser asks of its maker."""
PAGES = ("status", "publications", "rollouts", "alarms", "schedules")


@contextmanager
def process(url: str, **options: Any) -> Iterator[tuple[Started, str]]:
    """The command as a process of its own, and its URL."""
    started = Door(url).start("control", **{"port": 0, **options})
    try:
        for line in started.stderr:
            if found := re.match(r"watches .* on (http://127.0.0.1:\d+)$", line):
                break
        else:
            raise AssertionError("it ended")
        yield started, found[1]
    finally:
        started.kill()


def get(url: str, path: str = "", **how: Any) -> httpx2.Response:
    return httpx2.get(f"{url}{path}", timeout=PATIENCE_S, **how)


def metrics(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and values by name, as Prometheus' own parser reads them."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.fixture
def filled(store: TraceStore, tmp_path: Path) -> TraceStore:
    """A fleet of one server amid a rollout, an alarm and a schedule, with names that would like to
    be something else."""
    fleet = Fleet(store, tmp_path)
    version = put_in_force(
        store, PAIR.id, OLD, deployment="vllm", actor=HOSTILE, reason=HOSTILE, evidence={}
    )
    fleet.turn()
    fleet.begin(reason=HOSTILE)
    fleet.conduct(8 * 90)
    now = fleet.replicas[0]
    now.agent.status(1, OLD.id, fault=HOSTILE, dropped=7)
    rounds = [[0, 0, 0, 1, version, 0.1, 1, time.time() - 1.9]]
    rounds += [[1 + 3 * n, 2, 2, 3, version, 0.1, 1, time.time() - 1 + 0.1 * n] for n in range(8)]
    ended = {"arrived": time.time() - 2, "ended": time.time(), "rounds": rounds}
    tokens = {"prompt": None, "output": None, "n_prompt": 5, "n_output": 25, "label": HOSTILE}
    line = now.agent.line(**ended, **tokens)
    with now.agent.file.open("a") as file:
        file.write(json.dumps({**line, "id": HOSTILE}) + "\n")
    Follower(store, now.agent.folder, "vllm", now.told.append, pair=PAIR).once()
    about = {"deployment": "vllm", "pair_id": PAIR.id, "device": "cpu", "version": version}
    change = {"what": "acceptance", "category": HOSTILE, "before": 0.7, "after": 0.4}
    with store.database.write() as session:
        session.add(Alarm(**about, **change, at=store.clock(), since=store.clock(), evidence={}))
    add_schedule(store.database, "nightly", "@daily", {"pair": PAIR.to_json()})
    return store


# ----------------------------------------------------------------------------------- what it shows


def test_everything_is_shown_and_nothing_that_is_hostile_acts(
    filled: TraceStore, tmp_path: Path
) -> None:
    url = filled.database.url.render_as_string(hide_password=False)
    with process(url, no_schedules=True) as (started, at):
        found = metrics(get(at, "/metrics").text)
        assert set(found) <= set(METRICS)
        place = {"deployment": "vllm", "pair": "demo", "pair_id": PAIR.id, "device": "cpu"}
        ((info, one),) = found["spectune_policy_info"]
        assert ({**place, "version": "1"}.items() <= info.items(), one) == (True, 1)
        assert found["spectune_tau"] == [(place, pytest.approx(3.0))]
        assert found["spectune_seconds_per_token"][0][1] == pytest.approx(0.9 / 25)
        accepted = [(labels["position"], v) for labels, v in found["spectune_acceptance"]]
        assert accepted == [("0", 1.0), ("1", 1.0)]
        server = {"deployment": "vllm", "server": f"{socket.gethostname()}:{tmp_path / 'f0'}"}
        assert found["spectune_agent_dropped_total"] == [(server, 7)]
        assert found["spectune_agent_fault"] == [(server, 1)]
        assert found["spectune_rollout_pairs"][0][1] == 6
        verdicts = {labels["verdict"]: v for labels, v in found["spectune_rollouts"]}
        assert verdicts == {"open": 1, "reverted": 0}
        assert found["spectune_job_failed"] == [({"schedule": "nightly"}, 0)]
        assert [v for labels, v in found["spectune_alarms"] if labels["what"] == "acceptance"]
        assert "alert" not in str(found), "what clients choose is no label"
        shown = {name: get(at, f"/api/{name}.json").json() for name in PAGES}
        assert shown["alarms"]["alarms"][0]["category"] == HOSTILE
        assert shown["publications"]["publications"][0]["actor"] == HOSTILE
        assert shown["status"]["deployments"][0]["served_since"]["requests"] == 1
        assert shown["rollouts"]["rollouts"][0]["standing"]["newest"]
        response = get(at)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script" not in policy
        for name, text in (("metrics", get(at, "/metrics").text), ("page", response.text)):
            assert not re.search(r"<script|<img|src=\"?http", text), name
        for words in ("Fleet", "Publications", "Rollouts", "Drift", "Jobs", "rollout-1"):
            assert words in response.text
        assert not re.findall(r'(?:src|href)="(?!data:|#)', response.text)
        laid_out_as_told(at, tmp_path)
        started.send_signal(signal.SIGTERM)
        assert started.wait(PATIENCE_S) == 0
    file = tmp_path / "rows.csv"
    assert Door(url).call("traces export", file).exit_code == 0
    with file.open(newline="") as rows:
        (row,) = (row for row in csv.DictReader(rows) if "alert" in row["request_id"])
    assert row["request_id"] == f"'{HOSTILE}", "a spreadsheet takes it for text"
    assert row["category"].startswith("'=2+2<script")


def laid_out_as_told(at: str, folder: Path) -> None:
    """In a browser, dark and light, on a phone and a screen: nothing is wider than its window, no
    console says a word, and nothing is asked of anybody else."""
    if (command := browser()) is None:
        return
    _, wrong = laid_out({"page": get(at).text}, folder)
    assert not wrong
    pictures = set()
    for scheme in ("0", "1"):  # dark, light
        for width in (400, 1400):
            picture, log = folder / f"{scheme}-{width}.png", folder / f"{scheme}-{width}.json"
            words = [command, "--headless", "--no-sandbox", "--disable-gpu"]
            words += ["--enable-logging=stderr", "--disable-background-networking"]
            words += [f"--blink-settings=preferredColorScheme={scheme}", f"--log-net-log={log}"]
            words += [f"--window-size={width},900", f"--screenshot={picture}", at]
            words.insert(1, f"--user-data-dir={folder / 'profile'}")
            done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
            assert "CONSOLE" not in done.stderr, done.stderr
            hosts = set(re.findall(r'"url":"(https?://[^/"]+)', log.read_text()))
            assert {host for host in hosts if not re.search(BROWSERS_OWN, host)} == {at}
            pictures.add(picture.read_bytes())
    assert len(pictures) == 4


def test_it_may_be_read_and_not_written(filled: TraceStore) -> None:
    url = filled.database.url.render_as_string(hide_password=False)
    with process(url, no_schedules=True) as (_, at):
        for path in ("/", "/metrics", "/healthz", "/readyz", *(f"/api/{n}.json" for n in PAGES)):
            whole, head = get(at, path), httpx2.head(f"{at}{path}", timeout=PATIENCE_S)
            assert (whole.status_code, head.status_code, head.content) == (200, 200, b""), (
                whole.text
            )
            assert head.headers["content-type"] == whole.headers["content-type"]
            for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                refused = httpx2.request(method, f"{at}{path}", timeout=PATIENCE_S)
                assert refused.status_code == 405
        assert {get(at, path).status_code for path in ("/api/x.json", "/docs", "/x")} == {404}


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_without_the_token_nothing_but_probes_is_answered(url: str, tmp_path: Path) -> None:
    (file := tmp_path / "token").write_text("secret\n")
    basic, wrong = (
        base64.b64encode(f"me:{word}".encode()).decode() for word in ("secret", "secret2")
    )
    with process(url, token_file=file, no_schedules=True) as (_, at):
        for path in ("/", "/metrics", "/api/status.json"):
            for said in ("", "Bearer", "Bearer x", "Bearer secret2", "secret", f"Basic {wrong}",
                         "Basic %", "Bearer sécret", "Digest secret"):  # fmt: skip
                answer = get(at, path, headers={"Authorization": said.encode("latin-1")})
                assert answer.status_code == 401
                assert "Bearer" in answer.headers["www-authenticate"]
            for said in ("Bearer secret", "bearer secret", f"Basic {basic}"):
                assert get(at, path, headers={"Authorization": said}).status_code == 200
        assert {get(at, path).status_code for path in ("/healthz", "/readyz")} == {200}


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_cannot_be_is_refused_in_one_line(url: str, tmp_path: Path) -> None:
    door = Door(url)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}" in door.refused("control", port=port)
        Agent(folder := tmp_path / "folder")
        assert f"--metrics {port}" in door.error("follow", folder, pair="demo", metrics=port)
    assert "--token-file" in door.refused("control", host="0.0.0.0")
    assert "PORT or HOST:PORT" in door.error("follow", folder, pair="demo", metrics="x")


def test_figures_are_gathered_every_few_seconds_at_most(
    filled: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where many ask at once, and where the database is away."""
    now = [0.0]
    board = Board(filled, clock=lambda: now[0])
    found = {id(board.figures())}
    threads = [threading.Thread(target=lambda: found.add(id(board.figures()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    now[0] += EVERY_S
    assert id(board.figures()) not in found
    calls = []

    def away(store: TraceStore) -> None:
        calls.append(store)
        raise UnavailableError("away")

    monkeypatch.setattr("spectune.service.board.gather", away)
    now[0] += 10 * EVERY_S
    for _ in range(3):
        with pytest.raises(UnavailableError):
            board.figures()
    assert len(calls) == 1
    assert [sample.value for sample in board.samples()] == [0]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_follow_shows_its_own_metrics(url: str, tmp_path: Path) -> None:
    agent = Agent(tmp_path / "folder")
    agent.write(3)
    started = Door(url).start("follow", agent.folder, pair="demo", metrics=0)
    try:
        told = (re.match(r"metrics on port (\d+)", line) for line in started.stderr)
        at = f"http://127.0.0.1:{next(found[1] for found in told if found)}/metrics"

        def value(name: str) -> float:
            found = metrics(get(at).text).get(name)
            return found[0][1] if found else -1

        eventually(lambda: value("spectune_follow_requests_total") == 3)
        eventually(lambda: value("spectune_follow_unread_bytes") == 0)
        agent.status(fault=HOSTILE, dropped=4)
        eventually(lambda: value("spectune_agent_dropped_total") == 4)
        assert value("spectune_agent_fault") == value("spectune_database_up") == 1
        assert set(metrics(get(at).text)) <= set(METRICS)
        started.send_signal(signal.SIGTERM)
        assert started.wait(PATIENCE_S) == 0
    finally:
        started.kill()


# -------------------------------------------------------------------------------- what fails


def test_it_is_not_ready_while_the_database_is_away(server: Server) -> None:
    with opened(server.url):
        pass
    with process(server.url, no_schedules=True) as (started, at):

        def up() -> list[float]:
            return [value for _, value in metrics(get(at, "/metrics").text)["spectune_database_up"]]

        def codes() -> list[int]:
            return [get(at, path).status_code for path in ("/healthz", "/readyz", "/")]

        assert (codes(), up()) == ([200, 200, 200], [1])
        server.stop()
        eventually(lambda: codes() == [200, 503, 503])
        eventually(lambda: up() == [0])
        assert "error" in get(at, "/api/status.json").json()
        server.start()
        eventually(lambda: codes() == [200, 200, 200])
        eventually(lambda: up() == [1])
        started.send_signal(signal.SIGTERM)
        assert started.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_of_two_one_goes_on_with_what_the_other_held(store: TraceStore) -> None:
    """Whichever is killed: rollouts stay conducted, and jobs that are due are run."""
    url = store.database.url.render_as_string(hide_password=False)
    store.put_pair(PAIR.id, PAIR.name, PAIR.to_json(), PAIR.models)
    store.put_policy(NEW.id, NEW.spelled_out(), NEW.label())
    over = put_in_force(store, PAIR.id, OLD, deployment="vllm")
    of = {"deployment": "vllm", "pair_id": PAIR.id, "device": "cpu", "policy_id": NEW.id}
    wanted = Rollout(**of, block_s=45.0, seed=1, actor="test")
    with process(url, poll="200ms") as (one, _), process(url, poll="200ms") as (other, at):
        number = store.begin_rollout(wanted, expected=over).id

        def conducted_until() -> datetime | None:
            rollout = store.rollout(number)
            assert rollout is not None
            return rollout.ended_at or rollout.lease_until

        eventually(conducted_until)
        one.kill()
        one.wait(PATIENCE_S)
        soonest = store.clock() + timedelta(seconds=LEASE_S)
        settings = {"pair": PAIR.to_json(), "recording": "nothing"}
        add_schedule(store.database, "broken", "@yearly", settings, at_once=True)
        eventually(lambda: history(store.database, "broken"))
        assert history(store.database, "broken")[0].outcome == "failed"
        eventually(lambda: (until := conducted_until()) is not None and until > soonest)
        eventually(lambda: ({"schedule": "broken"}, 1) in failed(at))
        other.send_signal(signal.SIGTERM)
        assert other.wait(PATIENCE_S) == 0
        assert "1 failed" in other.stdout.read()


def failed(at: str) -> list[tuple[dict[str, str], float]]:
    return metrics(get(at, "/metrics").text).get("spectune_job_failed", [])

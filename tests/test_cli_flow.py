"""Every command on a tiny pair, in the order a user meets them; names and keys of ``--json`` are
the contract."""

from __future__ import annotations

import json
import shlex
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from doors import USAGE, Door, lines, one_object, put_profile, write_workload
from synthetic import flat_profile
from test_policies import CONTRACT
from test_tuning_report import TUNED

import spectune.optimizer.commands.report
import spectune.optimizer.tune
import spectune.runtime.profiling
from spectune.db import open_database
from spectune.db.errors import DatabaseError
from spectune.optimizer import processes
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.jobs import tuning_options
from spectune.optimizer.tune import TuneOptions
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

FIXED = '{"draft": "near", "window": {"kind": "fixed", "gamma": 3}}'
SHORT = ("--max-new-tokens", 16)
QUICK = (
    "--trials",
    8,
    "--finalists",
    2,
    "--budget",
    "1s",
    "--gamma-max",
    12,
    "--tree-width",
    2,
    "--tree-depth",
    3,
)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """No helper processes, which :mod:`test_processes` is for: the first texts, while all is
    compiled, seem to ask for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "PATIENCE_S", 600.0)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Path:
    """The tiny pair under the names of the contract (draft ``small``, and ``near``), and a
    workload."""
    here = tmp_path_factory.mktemp("flow")
    models = tiny_pair.parent
    drafts = {"small": str(models / "far"), "near": str(models / "near")}
    (here / "pair.json").write_text(
        json.dumps({"name": "tiny", "target": str(models / "target"), "drafts": drafts})
    )
    write_workload(here / "work.jsonl", 10)
    write_workload(here / "long.jsonl", 18)
    return here


@pytest.fixture(scope="module")
def door(folder: Path) -> Door:
    return Door(str(folder / "spectune.db"), str(folder / "pair.json"))


@pytest.fixture(scope="module")
def workload(folder: Path) -> tuple[object, ...]:
    return ("--workload", folder / "work.jsonl", *SHORT)


@pytest.fixture(scope="module")
def recording(door: Door, workload: tuple[object, ...]) -> str:
    found = door.call(
        "record", "--pair", door.pair, *workload, "--limit", 6, "--gamma-max", 12, "--json"
    )
    assert "fewer than 5 requests in a 3, b 3: their own figures say little\n" in found.stderr
    made = one_object(found.stdout)
    assert (
        made["workload"].items()
        >= {"requests": 6, "duplicates": 0, "few": {"a": 3, "b": 3}}.items()
    )
    assert made["n_requests"] == 6
    assert made["state"] == "complete"
    assert made["drafts"] == {"small": 6, "near": 6, "ngram": 6}
    return str(made["recording"])


@pytest.fixture(scope="module")
def profile(door: Door) -> str:
    return put_profile(door.db, door.pair)


@pytest.fixture(scope="module")
def tuned(door: Door, folder: Path, recording: str, profile: str) -> dict[str, Any]:
    """A first tuning, on as many requests as a publication needs."""
    return door.json(
        "tune", "--pair", door.pair, "--workload", folder / "long.jsonl", *SHORT, *QUICK
    )


def counts(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """An outcome's figures that do not depend on time."""
    timed = {
        "changes",
        "by_policy",
        "seconds",
        "tokens_per_s",
        "tokens_per_s_interval",
        "by_category",
        "kind",
        "latency",
    }
    by_category = {
        name: counts({"by_category": {}, **c}) for name, c in outcome.get("by_category", {}).items()
    }
    return {k: v for k, v in outcome.items() if k not in timed} | {"by_category": by_category}


@pytest.mark.parametrize("document", [*CONTRACT, "autoregressive"], ids=str)
def test_simulate_and_run_agree_on_every_round(
    door: Door,
    folder: Path,
    workload: tuple[object, ...],
    recording: str,
    profile: str,
    document: Any,
) -> None:
    policy = document if isinstance(document, str) else json.dumps(document)
    simulated = door.json(
        "simulate",
        "--policy",
        policy,
        "--recording",
        recording,
        "--profile",
        profile,
        "--per-round",
        folder / "s.jsonl",
    )
    executed = door.json(
        *(
            "run",
            "--policy",
            policy,
            "--pair",
            door.pair,
            *workload,
            "--limit",
            6,
            "--profile",
            profile,
        ),
        *("--per-round", folder / "r.jsonl", "--outputs", folder / "o.jsonl"),
    )
    assert simulated.keys() >= USAGE
    assert executed.keys() >= USAGE
    assert counts(simulated) == counts(executed)
    rounds = lines(folder / "r.jsonl")
    assert lines(folder / "s.jsonl") == rounds
    assert len(rounds) == executed["rounds"]
    assert all(
        set(r) == {"request", "start", "drafted", "verified", "accepted", "batch"} for r in rounds
    )
    assert [r["request"] for r in rounds] == sorted(
        (r["request"] for r in rounds), key=lambda i: int(i[1:])
    )
    assert executed["emitted_tokens"] == executed["rounds"] + executed["accepted_tokens"]
    assert executed["seconds"] > 0
    assert "latency" not in simulated
    first = executed["latency"]["time_to_first_token_s"]
    assert 0 < first["p50"] <= first["p95"] <= first["p99"] < executed["seconds"]
    assert executed["latency"]["requests"] == 6
    assert simulated["seconds"] > 0
    assert set(executed["by_category"]) == {"a", "b"}
    outputs = lines(folder / "o.jsonl")
    drawn = load_workload([str(folder / "work.jsonl")], limit=6)
    assert [o["id"] for o in outputs] == [r.id for r in drawn.requests]
    assert all(set(o) == {"id", "token_ids", "text"} for o in outputs)
    texts = folder / "texts.jsonl"
    if not texts.exists():
        texts.write_text((folder / "o.jsonl").read_text())
    assert lines(texts) == outputs  # whatever the policy


def test_profile(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command says, stores and lets others use; :mod:`test_profiling` measures."""
    monkeypatch.setattr(
        spectune.runtime.profiling,
        "measure_profile",
        lambda pair, **_: flat_profile(pair.id, pair.drafts),
    )
    other = Door(str(tmp_path / "other.db"), door.pair)
    measured = other.call(
        "profile",
        "--pair",
        other.pair,
        "--gamma-max",
        1,
        "--contexts",
        "16",
        "--repeats",
        1,
        "--json",
    )
    assert measured.exit_code == 0
    assert json.loads(measured.stdout).keys() >= {
        "profile",
        "device",
        "dtype",
        "environment",
        "check",
    }
    assert "on random tokens: nothing of this pair is recorded" in measured.stderr
    analytic = json.dumps({"draft": "near", "window": {"kind": "analytic", "gamma_max": 1}})
    assert (
        other.call(
            "generate", "x", "--pair", other.pair, "--policy", analytic, *SHORT, "--no-compare"
        ).exit_code
        == 0
    )


def test_profile_measures_trees_on_the_newest_recorded_texts(
    door: Door, recording: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def measure(pair: Any, *, texts: Any, **_: Any) -> Any:
        seen.append(texts)
        raise TraceError("seen")

    monkeypatch.setattr(spectune.runtime.profiling, "measure_profile", measure)
    for named in ((), ("--recording", recording), ("--recording", "latest")):
        assert (
            f"texts of recording {recording}"
            in door.call("profile", "--pair", door.pair, *named).stderr
        )
    with open_database(door.db) as database:
        loaded = TraceStore(database).load(recording)
    expected = [[*t.prompt_ids.tolist(), *t.output_ids.tolist()] for t in loaded.trajectories]
    assert seen == [expected] * 3
    assert len(expected) > 1
    assert door.call("profile", "--pair", door.pair, "--recording", "none-such").exit_code == 2
    assert (
        door.call("profile", "--pair", door.pair, "--recording", recording, "--no-trees").exit_code
        == 2
    )


def test_tune_prints_the_evidence(door: Door, tuned: dict[str, Any], recording: str) -> None:
    assert {"winner", "predicted", "measured", "baselines", "published"} <= tuned.keys()
    assert {"id", "label", "policy"} <= tuned["winner"].keys()
    assert tuned["predicted"].keys() >= USAGE
    assert tuned["measured"].keys() >= USAGE
    assert {"autoregressive", "best fixed gamma", "transformers heuristic", "incumbent"} <= tuned[
        "baselines"
    ].keys()
    assert (tuned["search_requests"], tuned["confirmed"] is None) == (
        9,
        tuned["confirm_requests"] == 0,
    )
    assert tuned["published"]["policy"] == tuned["winner"]["id"]
    assert tuned["published"]["deployment"] == "default"
    (only,) = door.json("policies", "list", "--pair", door.pair)["publications"]
    assert only["sampling"] == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "verifier": "coupled"}
    assert tuned["texts_differ"] == 0
    for candidate in tuned["candidates"]:
        assert candidate["latency"]["requests"] == candidate["executed_requests"]
        assert candidate["latency"]["time_per_output_token_s"]["p99"] > 0


def test_too_few_requests_are_refused_before_any_work(
    door: Door, workload: tuple[object, ...], recording: str
) -> None:
    """With how many are needed to publish, and to see a gain of 5%; without a publication the
    evidence is shown."""
    for given in ((*workload, "--limit", 6), ("--recording", recording)):
        refused = door.call("tune", "--pair", door.pair, *given, *QUICK)
        assert (refused.exit_code, refused.stdout) == (2, "")
        line = refused.stderr.strip().splitlines()[-1]
        assert not any(phase in refused.stderr for phase in ("decode:", "profile:", "search:"))
        assert (
            "6 requests leave 2 to confirm a winner on, and 5 are needed to publish it: give 1"
            in line
        )
        assert "a gain of 5% takes about 177 requests" in line
        assert "--no-publish" in line


def test_policies_from_publication_to_rollback(
    door: Door, folder: Path, tuned: dict[str, Any]
) -> None:
    pair = ("--pair", door.pair)
    winner, first = tuned["winner"], tuned["published"]["version"]
    listed = door.json("policies", "list", *pair)["publications"]
    assert [(p["version"], p["active"], p["policy"]) for p in listed] == [
        (first, True, winner["id"])
    ]
    shown = door.json("policies", "show", *pair)
    assert shown["policy"] == winner["policy"]
    assert shown["publication"]["evidence"]["winner"] == winner
    (folder / "p.json").write_text(FIXED)
    second = door.json(
        "policies", "activate", folder / "p.json", "--reason", "a longer window", *pair
    )
    assert second["version"] > first
    assert door.json("policies", "show", "active", *pair)["policy"]["window"]["gamma"] == 3
    differing = door.json("policies", "diff", winner["id"], "active", *pair)["differences"]
    assert differing
    assert all(row["left"] != row["right"] for row in differing)
    exported = door.call("policies", "export", *pair).stdout
    assert door.json("policies", "show", exported, *pair)["id"] == second["policy"]
    settings = door.json("policies", "export", "--for", "vllm", *pair)
    assert settings["num_speculative_tokens"] == 3
    line = door.call("policies", "export", "--for", "vllm", *pair).stderr.splitlines()[-1]
    assert line.startswith("vllm serve ")
    assert json.dumps(settings) in line
    back = door.json("policies", "rollback", *pair)
    assert back["version"] > second["version"]
    assert back["policy"] == winner["id"]
    listed = door.json("policies", "list", *pair)["publications"]
    assert [p["policy"] for p in listed] == [winner["id"], second["policy"], winner["id"]]
    assert listed[1]["reason"] == "a longer window"
    assert (
        door.json("policies", "rollback", "--to", second["version"], *pair)["policy"]
        == second["policy"]
    )


def test_the_policy_in_force_decodes(
    door: Door, workload: tuple[object, ...], tuned: dict[str, Any]
) -> None:
    door.json("policies", "activate", FIXED, "--pair", door.pair)
    executed = door.json("run", "--pair", door.pair, *workload, "--limit", 2)
    assert executed["policy"]["window"]["gamma"] == 3
    newest = door.json("policies", "list", "--pair", door.pair)["publications"][0]
    assert newest["applied"] == 1
    assert newest["refused"] == []


def test_generate(door: Door, tuned: dict[str, Any]) -> None:
    made = door.json("generate", "def add(", "--pair", door.pair, "--policy", FIXED, *SHORT)
    assert made.keys() >= {
        "text",
        "token_ids",
        "rounds",
        "tau",
        "tokens_per_s",
        "autoregressive_tokens_per_s",
        "same_text",
    }
    assert made["same_text"] is True
    assert len(made["token_ids"]) == 16
    shown = door.call("generate", "def add(", "--pair", door.pair, "--policy", FIXED, *SHORT)
    assert shown.exit_code == 0
    assert "tokens/s against" in shown.stdout
    assert "same text" in shown.stdout
    assert "\x1b[" not in shown.stdout  # colour is for terminals


def test_a_text_commands_no_terminal(door: Door) -> None:
    """At this temperature every 256th token or so is the byte that terminals take for the beginning
    of a command."""
    hot = (
        "--temperature",
        10,
        "--seed",
        1,
        "--max-new-tokens",
        120,
        "--policy",
        FIXED,
        "--no-compare",
    )
    made = door.json("generate", "x", "--pair", door.pair, *hot)["text"]
    assert {c for c in made if c < " "} - set("\n\t")
    assert "\x7f" in made
    for json_too in ((), ("--json",)):
        shown = door.call("generate", "x", "--pair", door.pair, *hot, *json_too)
        assert shown.exit_code == 0
        assert not {c for c in shown.stdout if c < " " or c == "\x7f"} - {"\n", "\t"}


def test_traces(door: Door, folder: Path, recording: str, tmp_path: Path) -> None:
    assert recording in [
        r["id"] for r in door.json("traces", "list", "--category", "a")["recordings"]
    ]
    shown = door.json("traces", "show", recording)
    assert shown["id"] == recording
    assert len({r["request_id"] for r in shown["requests"]}) == 6
    request = door.json("traces", "show", recording, "--request", "r3")
    assert sum(s["emitted"] for s in request["steps"]) == len(request["output_ids"])
    assert door.call("traces", "show", recording, "--request", "r3").exit_code == 0
    stats = door.json("traces", "stats", "--recording", recording, "--by", "draft")["stats"]
    assert {s["draft"] for s in stats} == {"small", "near", "ngram"}
    assert door.json("traces", "stats", "--recording", recording, "--executed")["stats"]
    rows = door.json("traces", "query", "--recording", recording, "--draft", "near")["requests"]
    assert len(rows) == 6
    assert (
        door.call("traces", "query", "--recording", recording, "--format", "csv").stdout.count("\n")
        == 19
    )
    assert (
        door.json("traces", "export", tmp_path / "rows.csv", "--recording", recording)["rows"] == 18
    )
    exported = door.json("traces", "export", tmp_path / "one.db", "--recording", recording)
    assert exported["recordings"] == [recording]
    other = Door(str(tmp_path / "other.db"))
    assert other.json("traces", "import", tmp_path / "one.db")["added"] == [recording]
    assert other.json("traces", "import", tmp_path / "one.db")["present"] == [recording]
    one, two = (
        d.json("simulate", "--policy", FIXED, "--recording", recording) for d in (door, other)
    )
    assert counts(one) == counts(two)
    assert other.json("traces", "prune", "--recording", recording, "--dry-run")["removed"]
    assert other.json("traces", "list")["recordings"]
    assert other.json("traces", "prune", "--recording", recording)["removed"]
    assert other.json("traces", "list")["recordings"] == []
    assert other.json("db", "check")["ok"] is True


def test_served_texts_can_be_tuned_on(
    door: Door, workload: tuple[object, ...], tuned: dict[str, Any]
) -> None:
    run = door.call("run", "--pair", door.pair, *workload, "--policy", FIXED, "--record", "--json")
    assert one_object(run.stdout).keys() >= USAGE
    served = run.stderr.split("recording ")[1].split()[0]
    info = next(r for r in door.json("traces", "list")["recordings"] if r["id"] == served)
    assert (info["source"], info["state"], info["drafts"]) == ("serve", "complete", {})
    again = door.json("tune", "--recording", "latest", *QUICK, "--no-publish")
    assert again["recording"] == served
    assert again["published"] is None


def test_a_quick_tuning_leaves_trees_out_and_says_so(
    door: Door, workload: tuple[object, ...], tuned: dict[str, Any]
) -> None:
    less = ("--trials", 8, "--finalists", 2, "--budget", "1s", "--gamma-max", 12)
    found = door.call(
        "tune", "--pair", door.pair, *workload, "--quick", *less, "--no-publish", "--json"
    )
    assert (
        "quick: at most 48 requests of at most 16 tokens, 8 trials, a race of 1s; draft trees are "
        "not tried" in found.stderr
    )
    assert "no tuning of this pair is stored" in found.stderr, (
        "of none without trees the seconds are known"
    )
    left_out = one_object(found.stdout)["left_out"]
    assert {f"left out: {what}" for what in left_out} <= {
        line.split(" (")[0] for line in found.stderr.splitlines()
    }
    assert all("at best" in why and "is reached without trees" in why for why in left_out.values())
    assert left_out
    labels = {
        c["policy"].get("growth", {}).get("kind", "chain")
        for c in one_object(found.stdout)["candidates"]
    }
    assert labels == {"chain"}


def test_an_unfinished_recording_is_tuned_on_and_said_to_be_one(
    door: Door, workload: tuple[object, ...], tuned: dict[str, Any], recording: str, tmp_path: Path
) -> None:
    other = Door(str(tmp_path / "cut.db"), door.pair)
    with (
        closing(sqlite3.connect(door.db)) as source,
        closing(sqlite3.connect(other.db)) as database,
        database,
    ):
        source.backup(database)
        database.execute(
            "UPDATE recording SET state = 'recording', finished_at = NULL WHERE id = ?",
            (recording,),
        )
    found = other.call(
        "tune", "--pair", other.pair, "--recording", recording, *QUICK, "--no-publish", "--json"
    )
    assert one_object(found.stdout)["recording"] == recording
    assert f"{recording} was never finished: tuning on the 6 requests it holds (`" in found.stderr
    assert (
        one_object(found.stdout)["workload"].items()
        >= {"requests": 6, "duplicates": 0, "few": {"a": 3, "b": 3}}.items()
    )
    whole = door.call("tune", "--pair", door.pair, *workload, "--limit", 6, *QUICK, "--no-publish")
    assert "decode:" not in whole.stderr, "what is recorded is found"
    assert "fewer than 5 requests in a 3, b 3" in whole.stderr
    assert "never finished" not in whole.stderr
    assert "(as earlier tunings of this pair took)" in whole.stderr
    last = whole.stdout[whole.stdout.rindex("\n\n") :].split("\n")
    typed = [line for line in last if line and not line.startswith("#")]
    assert [line.split()[0] for line in typed[:2]] == ["main", "main"]
    assert Path(typed[2]).is_file(), "the report's path"
    shown = shlex.split(next(line for line in last if " policies " in line))
    assert shown[1:3] == ["--db", door.db]
    assert door.call(*shown[3:]).exit_code == 0, "what is printed can be typed"


def test_schedules(
    door: Door, folder: Path, workload: tuple[object, ...], tuned: dict[str, Any]
) -> None:
    add = ("--pair", door.pair, "--trials", 8, "--budget", "5m")
    first = door.json(
        "schedule",
        "add",
        "nightly",
        "--cron",
        "0 3 * * *",
        "--tz",
        "Europe/Berlin",
        *add,
        *workload,
    )
    assert first["enabled"] is True
    assert tuning_options(first["payload"]) == TuneOptions(
        DecodeOptions(Sampling(), 16), trials=8, fresh=True
    )
    sampled = (
        "--temperature",
        0.7,
        "--top-k",
        40,
        "--top-p",
        0.9,
        "--seed",
        3,
        "--verifier",
        "rejection",
        "--stop",
        "END",
        "--no-chat",
    )
    searched = ("--gamma-max", 5, "--tree-width", 4, "--tree-depth", 6, "--finalists", 2)
    other = door.json(
        "schedule",
        "add",
        "other",
        "--every",
        "6h",
        *add,
        "--max-new-tokens",
        40,
        *sampled,
        *searched,
    )
    assert tuning_options(other["payload"]) == TuneOptions(
        DecodeOptions(Sampling(0.7, 40, 0.9, 3), 40, "rejection", ("END",), False),
        trials=8,
        gamma_max=5,
        tree_width=4,
        tree_depth=6,
        finalists=2,
        fresh=True,
    )
    chains = door.json("schedule", "add", "chains", "--every", "6h", *add, "--tree-width", 0)
    assert (
        tuning_options(chains["payload"]).tree_width,
        tuning_options(chains["payload"]).tree_depth,
    ) == (0, 0)
    for name in ("other", "chains"):
        door.json("schedule", "remove", name)
    door.json("schedule", "add", "drift", "--every", "6h", "--recorded", "24h", *add)
    again = door.call("schedule", "add", "drift", "--every", "6h", *add)
    assert again.exit_code == 2
    assert "drift" in again.stderr
    assert [s["name"] for s in door.json("schedule", "list")["schedules"]] == ["drift", "nightly"]
    assert door.json("schedule", "show", "drift")["payload"]["recorded"] == "24h"
    assert door.json("schedule", "pause", "nightly")["enabled"] is False
    assert door.json("schedule", "resume", "nightly")["enabled"] is True
    door.json("schedule", "remove", "nightly")
    assert [s["name"] for s in door.json("schedule", "list")["schedules"]] == ["drift"]
    assert door.json("schedule", "run-once") == {
        "noticed": 0,
        "done": 0,
        "failed": 0,
        "lost": 0,
        "released": 0,
    }


def test_a_schedule_tunes_on_what_was_recorded(
    door: Door, workload: tuple[object, ...], tuned: dict[str, Any]
) -> None:
    """A slot that is due decodes nothing: it samples what was recorded, tunes, and publishes or
    says why not."""
    before = door.json("policies", "list", "--pair", door.pair)["publications"]
    searched = (
        "--trials",
        4,
        "--budget",
        "3s",
        "--gamma-max",
        6,
        "--tree-width",
        2,
        "--tree-depth",
        2,
    )
    door.json(
        "schedule",
        "add",
        "now",
        "--every",
        "1s",
        "--recorded",
        "24h",
        "--pair",
        door.pair,
        *searched,
    )
    time.sleep(1.1)
    ran = door.call("schedule", "run-once", "--json")
    report = one_object(ran.stdout)
    assert (report["done"], report["failed"]) == (1, 0), ran.stderr
    door.json("schedule", "pause", "now")
    history = door.json("schedule", "history", "now")["history"]
    result = next(f["job"]["result"] for f in history if f["job"])
    assert result["reason"]
    assert Path(result["report"]).read_text().startswith("<!DOCTYPE html>")
    assert f"its page is {result['report']}" in ran.stderr
    assert door.json("schedule", "list")["schedules"][-1]["report"] == result["report"]
    after = door.json("policies", "list", "--pair", door.pair)["publications"]
    if result["published"] is None:
        assert after == before
    else:
        assert [p["version"] for p in after] == [
            result["published"],
            *(p["version"] for p in before),
        ]
        assert after[0]["actor"] == "schedule"
    gathered = next(
        r for r in door.json("traces", "list")["recordings"] if r["id"] == result["recording"]
    )
    assert (gathered["source"], gathered["state"]) == ("gathered", "complete")
    assert gathered["n_requests"] >= 6
    assert door.call("schedule", "history", "now").exit_code == 0


def test_the_database_is_named_by_the_environment(tmp_path: Path, door: Door) -> None:
    from click.testing import CliRunner

    from spectune.cli import main

    there = tmp_path / "there.db"
    found = CliRunner(env={"SPECTUNE_DB": str(there)}).invoke(main, ["db", "upgrade", "--json"])
    assert found.exit_code == 0
    assert one_object(found.stdout)["before"] is None
    assert there.is_file()
    assert door.json("db", "check")["ok"] is True


@pytest.mark.parametrize(
    "command",
    [
        "policies list",
        "policies show",
        "traces list",
        "traces stats",
        "traces query",
        "traces show",
        "schedule list",
    ],
)
def test_tables_for_people(door: Door, recording: str, profile: str, command: str) -> None:
    pair = ("--pair", door.pair) if command.startswith("policies") else ()
    shown = door.call(*command.split(), *pair)
    assert shown.exit_code == 0
    assert shown.stdout.strip()
    assert door.call("simulate", "--policy", FIXED, "--recording", recording).stdout.strip()


@pytest.mark.parametrize("asked", [(), ("--report", "page.html")])
def test_a_page_that_cannot_be_made_costs_no_results(
    door: Door,
    recording: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    asked: tuple[str, ...],
) -> None:
    """One that was asked for is an error all the same, after them."""

    def broken(*_args: object, **_more: object) -> None:
        raise DatabaseError("the database went away")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spectune.optimizer.commands.report, "write_report", broken)
    monkeypatch.setattr(spectune.optimizer.tune, "tune_recording", lambda *_args, **_more: TUNED)
    found = door.call(
        "tune",
        "--pair",
        door.pair,
        "--recording",
        recording,
        *QUICK,
        "--no-publish",
        *asked,
        "--json",
    )
    assert one_object(found.stdout)["study"] == TUNED.study
    assert one_object(found.stdout)["report"] is None
    assert "the database went away" in found.stderr
    assert found.exit_code == (2 if asked else 0)


def test_a_tuning_leaves_a_report(door: Door, tuned: dict[str, Any], tmp_path: Path) -> None:
    """Beside the database; made again from what is stored, with a price, and refused where it
    cannot be."""
    path = Path(tuned["report"])
    assert path == Path(door.db).parent / f"spectune-report-{tuned['study']}.html"
    made = door.json(
        "report", tuned["study"], "--out", tmp_path / "r.html", "--price", 2.5, "--gpus", 8
    )
    assert (made["path"], made["study"]) == (str(tmp_path / "r.html"), tuned["study"])
    text, again = path.read_text(), (tmp_path / "r.html").read_text()
    for part in (
        "prediction",
        "race",
        "intervals",
        "categories",
        "latency",
        "positions",
        "tried",
        "left-out",
    ):
        assert f'id="{part}"' in text or f"id={part}" in text, part
        assert f'id="{part}"' in again or f"id={part}" in again, part
    assert "Draft trees of" in text
    assert "Draft trees of" in again
    assert f"<h1>{made['sentence']}".split("'")[0] in again
    assert door.json("report", tuned["study"], "--no-trees", "--out", path)["path"] == str(path)
    assert "there is no folder" in door.refused("report", "--out", tmp_path / "no" / "r.html")
    assert "there is no study 'none-such'" in door.refused("report", "none-such")

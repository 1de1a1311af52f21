"""Every command on a tiny pair, in the order a user meets them; names and keys of ``--json`` are
the contract."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from databases import opened, run_sql
from doors import FIXED, USAGE, Door, lines, one_object, parsed, put_profile, write_workload
from synthetic import flat_profile
from test_policies import CONTRACT
from test_report import PLAIN, WINNER
from test_report import tuned as results
from transformers import AutoTokenizer

import spectune.optimizer.commands.profile
import spectune.optimizer.commands.report
import spectune.optimizer.commands.tune
from spectune.db import Database
from spectune.db.database_errors import DatabaseError
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.inputs import read_files
from spectune.optimizer.recording import processes
from spectune.optimizer.schedule import make_due
from spectune.optimizer.schedule.store import claim
from spectune.optimizer.tuning.bench import Tunable
from spectune.optimizer.tuning.native import TuneOptions
from spectune.options import from_document
from spectune.runtime.pair import read_pair
from spectune.settings import RequestsSettings, Tune
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

SHORT = {"max_new_tokens": 16}
LESS = {"trials": 8, "finalists": 2, "budget": "0.3s", "gamma_max": 12}
QUICK = {**LESS, "tree_width": 2, "tree_depth": 3}
CHAINS = {**LESS, "tree_width": 0}
NO_PAGE = {"no_publish": True, "report": "none"}
SIX = {"requests": 6, "duplicates": 0}
"""What is said of six requests of the workload."""
Options = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Path:
    """The tiny pair under the names of the contract (draft ``small``, and ``near``), and
    workloads."""
    here, models = tmp_path_factory.mktemp("flow"), tiny_pair.parent
    drafts = {"small": str(models / "far"), "near": str(models / "near")}
    spec = {"name": "tiny", "target": str(models / "target"), "drafts": drafts}
    (here / "pair.json").write_text(json.dumps(spec))
    write_workload(here / "work.jsonl", 10)
    write_workload(here / "long.jsonl", 18)
    return here


@pytest.fixture(scope="module")
def door(folder: Path) -> Iterator[Door]:
    """The environment names the pair. No helper processes, which :mod:`test_processes` is for: the
    first texts, while all is compiled, seem to ask for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "PATIENCE_S", 600.0)
        patch.setenv("SPECTUNE_PAIR", str(folder / "pair.json"))
        yield Door(str(folder / "spectune.db"), str(folder / "pair.json"))


@pytest.fixture(scope="module")
def workload(folder: Path) -> Options:
    return {"workload": folder / "work.jsonl", **SHORT}


@pytest.fixture(scope="module")
def recording(door: Door, workload: Options) -> str:
    found = door.call("record", **workload, limit=6, gamma_max=12, json=True)
    made = one_object(found.stdout)
    assert made["workload"].items() >= SIX.items()
    assert made["n_requests"] == 6
    assert made["state"] == "complete"
    chains = {"count": 6, "gamma_max": 12, "width": 1, "depth": 1}
    assert made["drafts"] == dict.fromkeys(("small", "near", "ngram"), chains)
    return str(made["recording"])


@pytest.fixture(scope="module")
def profile(door: Door) -> str:
    return put_profile(door.db, door.pair)


@pytest.fixture(scope="module")
def tuned(door: Door, folder: Path, recording: str, profile: str) -> dict[str, Any]:
    """A first tuning, on as many requests as a publication needs, where a slow policy is in force;
    long enough that its pauses on a busy machine are outvoted."""
    slow = {"draft": "small", "window": {"kind": "fixed", "gamma": 16}}
    door.json("policies", "activate", json.dumps(slow))
    at_leisure = {**QUICK, "budget": "5s"}
    return door.json("tune", **SHORT, **at_leisure, workload=folder / "long.jsonl")


def counts(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """An outcome's figures that do not depend on time."""
    speed = {"seconds", "tokens_per_s", "tokens_per_s_interval", "latency"}
    timed = {"changes", "by_policy", "by_category", "kind", "heads", "speedups", *speed}
    by_category = {
        name: counts({"by_category": {}, **c}) for name, c in outcome.get("by_category", {}).items()
    }
    return {k: v for k, v in outcome.items() if k not in timed} | {"by_category": by_category}


@pytest.mark.parametrize("document", [*CONTRACT[:3], CONTRACT[5], "autoregressive"], ids=str)
def test_simulate_and_run_agree_on_every_round(
    door: Door,
    folder: Path,
    workload: Options,
    recording: str,
    profile: str,
    document: Any,
) -> None:
    policy = document if isinstance(document, str) else json.dumps(document)
    how = {"policy": policy, "profile": profile}
    simulated = door.json("simulate", **how, recording=recording, per_round=folder / "s.jsonl")
    files = {"per_round": folder / "r.jsonl", "outputs": folder / "o.jsonl"}
    executed = door.json("run", **workload, **how, limit=6, **files)
    assert simulated.keys() >= USAGE
    assert executed.keys() >= USAGE
    assert counts(simulated) == counts(executed)
    rounds = lines(folder / "r.jsonl")
    assert lines(folder / "s.jsonl") == rounds
    assert len(rounds) == executed["rounds"]
    keys = {"request", "start", "drafted", "verified", "accepted", "batch"}
    assert all(r.keys() == keys for r in rounds)
    requests = [int(r["request"][1:]) for r in rounds]
    assert requests == sorted(requests)
    assert executed["emitted_tokens"] == executed["rounds"] + executed["accepted_tokens"]
    assert executed["seconds"] > 0
    assert simulated["seconds"] > 0
    plain = door.json("simulate", recording=recording, policy="autoregressive", profile=profile)
    assert "autoregressive" not in plain["speedups"]
    if simulated["policy_id"] != plain["policy_id"]:
        beside = simulated["speedups"]["autoregressive"]
        assert beside["ratio"] == pytest.approx(plain["seconds"] / simulated["seconds"])
        assert beside["interval"][0] <= beside["ratio"] <= beside["interval"][1]
    assert "latency" not in simulated
    first = executed["latency"]["time_to_first_token_s"]
    assert 0 < first["p50"] <= first["p95"] <= first["p99"] < executed["seconds"]
    assert executed["latency"]["requests"] == 6
    assert set(executed["by_category"]) == {"a", "b"}
    outputs = lines(folder / "o.jsonl")
    drawn = read_files([str(folder / "work.jsonl")], RequestsSettings(limit=6))
    assert [o["id"] for o in outputs] == [r.id for r in drawn.requests]
    assert all(o.keys() == {"id", "token_ids", "text"} for o in outputs)
    texts = folder / "texts.jsonl"
    if not texts.exists():
        texts.write_text((folder / "o.jsonl").read_text())
    assert lines(texts) == outputs  # whatever the policy


def test_profile(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command says, stores and lets others use; :mod:`test_profiling` measures."""

    def made_up(pair: Any, **_: object) -> Any:
        return flat_profile(pair.id, pair.drafts)

    monkeypatch.setattr(spectune.optimizer.commands.profile, "measure_profile", made_up)
    other = Door(str(tmp_path / "other.db"))
    measured = other.call("profile", gamma_max=1, contexts="16", repeats=1, json=True)
    keys = {"profile", "device", "dtype", "environment", "check"}
    assert one_object(measured.stdout).keys() >= keys
    assert "on random tokens: nothing of this pair is recorded" in measured.stderr
    analytic = json.dumps({"draft": "near", "window": {"kind": "analytic", "gamma_max": 1}})
    assert other.call("generate x", **SHORT, policy=analytic, no_compare=True).exit_code == 0


def test_profile_measures_trees_on_the_newest_recorded_texts(
    door: Door, recording: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def measure(pair: Any, *, texts: Any, **_: Any) -> Any:
        seen.append(texts)
        raise TraceError("seen")

    monkeypatch.setattr(spectune.optimizer.commands.profile, "measure_profile", measure)
    for named in ({}, {"recording": recording}, {"recording": "latest"}):
        assert f"texts of recording {recording}" in door.call("profile", **named).stderr
    with opened(door.db) as store:
        loaded = store.load(recording)
    expected = [[*t.prompt_ids.tolist(), *t.output_ids.tolist()] for t in loaded.trajectories]
    assert seen == [expected] * 3
    assert len(expected) > 1
    assert door.call("profile", recording="none-such").exit_code == 2


def test_tune_prints_the_evidence(door: Door, tuned: dict[str, Any], recording: str) -> None:
    assert {"winner", "predicted", "measured", "baselines", "published"} <= tuned.keys()
    assert {"id", "label", "policy"} <= tuned["winner"].keys()
    assert tuned["predicted"].keys() >= USAGE
    assert tuned["measured"].keys() >= USAGE
    plain = {"autoregressive", "best fixed gamma", "transformers heuristic", "incumbent"}
    assert tuned["baselines"].keys() >= plain
    assert tuned["search_requests"] == 5  # four more are fitted to
    assert (tuned["confirmed"] is None) == (tuned["confirm_requests"] == 0)
    assert tuned["published"]["policy"] == tuned["winner"]["id"]
    assert tuned["published"]["deployment"] == "default"
    newest = door.json("policies list")["publications"][0]
    assert newest["policy"] == tuned["winner"]["id"]
    assert newest["sampling"] == {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "verifier": "coupled",
    }
    assert tuned["texts"]["differ"] == 0
    assert tuned["texts"]["compared"] > 0
    assert tuned["texts"]["dtype"] == "float32"
    runs = [
        r for r in door.json("db show runs")["runs"] if r["purpose"] == f"tune {tuned['study']}"
    ]
    assert {r["policy_id"] for r in runs} == {c["id"] for c in tuned["candidates"]}
    found = door.json("traces compare", "latest", "autoregressive")
    assert found["requests"] >= tuned["test_requests"]
    for candidate in tuned["candidates"]:
        assert candidate["latency"]["requests"] == candidate["executed_requests"]
        assert candidate["latency"]["time_per_output_token_s"]["p99"] > 0


def test_commands_that_are_printed_run_as_printed(
    door: Door, folder: Path, tuned: dict[str, Any]
) -> None:
    """What was typed goes on: the pair by its checkpoints, the database, the deployment, the
    sampling; nothing stands in the environment. So does a recording's pair, which nobody typed."""
    spec = read_pair(door.pair)
    models = [f"target={spec.target}", *(f"drafts.{n}={p}" for n, p in spec.drafts.items())]
    typed: Options = {"set": models, "deployment": "typed", "temperature": 0.5}
    how = {**SHORT, **QUICK, "workload": folder / "long.jsonl"}
    how |= {"no_publish": True, "report": "none"}
    ran = door.call("tune", **{**how, **typed})
    assert ran.exit_code == 0, ran.output
    printed = ran.stdout
    printed += door.call("check", door.pair, folder / "long.jsonl", budget="1ms").stdout
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPECTUNE_PAIR")
        again = {"recording": tuned["recording"], "no_publish": True, "report": "none"}
        again["deployment"] = "untyped"  # what is printed may publish
        printed += door.call("tune", **again, **CHAINS).stdout
        lines = [line for line in printed.splitlines() if line.startswith("spectune ")]
        assert len(lines) >= 3
        for line in lines:
            words = shlex.split(line, comments=True)[1:]
            if "tune" in words:  # that of `check`: minutes, so only read
                assert parsed(words)
                continue
            assert "--db" in words
            ran = Door(None).call(*words)
            assert ran.exit_code == 0, (line, ran.output)


def test_too_few_requests_are_refused_before_any_work(
    door: Door, workload: Options, recording: str
) -> None:
    """With how many are needed to publish, and to see a gain of 5%; without a publication the
    evidence is shown."""
    for given in ({**workload, "limit": 6}, {"recording": recording}):
        refused = door.call("tune", **given, **QUICK)
        assert (refused.exit_code, refused.stdout) == (2, "")
        line = refused.stderr.strip().splitlines()[-1]
        assert not any(phase in refused.stderr for phase in ("decode:", "profile:", "search:"))
        assert (
            "6 requests leave 2 to confirm a winner on, and 5 are needed to publish it: give 1"
            in line
        )
        assert "publish a gain of 5% with a chance of 30%" in line
        assert "--no-publish" in line


def test_policies_from_publication_to_rollback(
    door: Door, folder: Path, tuned: dict[str, Any]
) -> None:
    winner, first = tuned["winner"], tuned["published"]["version"]
    slow = tuned["baselines"]["incumbent"]["id"]
    listed = door.json("policies list")["publications"]
    assert [(p["version"], p["active"], p["policy"]) for p in listed] == [
        (first, True, winner["id"]), (1, False, slow)
    ]  # fmt: skip
    shown = door.json("policies show")
    assert shown["policy"] == winner["policy"]
    assert shown["publication"]["evidence"]["winner"] == winner
    (folder / "p.json").write_text(FIXED)
    second = door.json("policies activate", folder / "p.json", reason="a longer window")
    assert second["version"] > first
    assert door.json("policies show active")["policy"]["window"]["gamma"] == 3
    differing = door.json("policies show", winner["id"], "active")["differences"]
    assert differing
    assert all(row["left"] != row["right"] for row in differing)
    exported = door.call("policies export").stdout
    assert door.json("policies show", exported)["id"] == second["policy"]
    settings = door.json("policies export", for_="vllm")
    assert settings["num_speculative_tokens"] == 3
    line = door.call("policies export", for_="vllm").stderr.splitlines()[-1]
    assert line.startswith("vllm serve ")
    assert json.dumps(settings) in line
    back = door.json("policies rollback")
    assert back["version"] > second["version"]
    assert back["policy"] == winner["id"]
    listed = door.json("policies list")["publications"]
    assert [p["policy"] for p in listed] == [winner["id"], second["policy"], winner["id"], slow]
    assert listed[1]["reason"] == "a longer window"
    assert door.json("policies rollback", to=second["version"])["policy"] == second["policy"]


def test_the_policy_in_force_decodes(door: Door, workload: Options, tuned: dict[str, Any]) -> None:
    door.json("policies activate", FIXED)
    executed = door.json("run", **workload, limit=2)
    assert executed["policy"]["window"]["gamma"] == 3
    newest = door.json("policies list")["publications"][0]
    assert newest["applied"] == 1
    assert newest["refused"] == []


def test_generate(door: Door, tuned: dict[str, Any]) -> None:
    made = door.json("generate", "def add(", **SHORT, policy=FIXED)
    speeds = {"tau", "tokens_per_s", "autoregressive_tokens_per_s"}
    assert made.keys() >= {"text", "token_ids", "rounds", "same_text", *speeds}
    assert made["same_text"] is True
    assert len(made["token_ids"]) == 16
    top_k = '{"draft": "near", "growth": {"kind": "top_k", "width": 3}}'
    tree = door.json("generate", "def add(", **SHORT, policy=top_k, no_compare=True)
    assert tree["token_ids"] == made["token_ids"]
    shown = door.call("generate", "def add(", **SHORT, policy=FIXED)
    assert shown.exit_code == 0
    assert "tokens/s against" in shown.stdout
    assert "same text" in shown.stdout
    assert "\x1b[" not in shown.stdout  # colour is for terminals


def test_a_text_commands_no_terminal(door: Door) -> None:
    """At this temperature every 256th token or so is the byte that terminals take for the beginning
    of a command."""
    hot = {"temperature": 10, "seed": 1, "max_new_tokens": 120, "policy": FIXED}
    made = door.json("generate x", **hot, no_compare=True)["text"]
    assert {c for c in made if c < " "} - set("\n\t")
    assert "\x7f" in made
    shown = door.call("generate x", **hot, no_compare=True)
    assert shown.exit_code == 0
    assert not {c for c in shown.stdout if c < " " or c == "\x7f"} - {"\n", "\t"}


def test_traces(door: Door, tiny_pair: Path, recording: str, tmp_path: Path) -> None:
    assert recording in [r["id"] for r in door.json("traces list", category="a")["recordings"]]
    shown = door.json("traces show", recording)
    assert shown["id"] == recording
    assert len({r["request_id"] for r in shown["requests"]}) == 6
    request = door.json("traces show", recording, request="r3")
    assert sum(s["emitted"] for s in request["rounds"]) == len(request["output_ids"])
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair.parent / "target")
    for text, ids in (("text", "output_ids"), ("prompt", "prompt_ids")):
        assert request[text] == tokenizer.decode(request[ids], skip_special_tokens=True)
    assert request["text"] in door.call("traces show", recording, request="r3").stdout
    stats = door.json("traces stats", recording=recording, by="draft")["stats"]
    assert {s["draft"] for s in stats} == {"small", "near", "ngram"}
    (plain,) = door.json("traces stats", recording=recording, speed=True)["stats"]
    assert (plain["policy"], plain["requests"], plain["tau"]) == ("autoregressive", 6, 1.0)
    rows = door.json("traces show", recording, draft="near")["requests"]
    assert len(rows) == 6
    assert door.json("traces export", tmp_path / "rows.csv", recording=recording)["rows"] == 6
    file, other = tmp_path / "one.parquet", Door(str(tmp_path / "other.db"))
    assert door.json("traces export", file, "--whole", recording=recording)["rows"] > 18
    assert other.json("traces import", file)["added"] == [recording]
    one, two = (d.call("simulate", policy=FIXED, recording=recording) for d in (door, other))
    assert one.stdout == two.stdout
    assert other.json("db prune", id=recording, dry_run=True)["removed"]["recordings"]
    assert other.json("traces list")["recordings"]
    assert other.json("db prune", id=recording)["removed"]["recordings"]
    assert other.json("traces list")["recordings"] == []
    assert other.json("db check")["ok"] is True


def test_a_quick_tuning_leaves_trees_out_and_says_so(
    door: Door, workload: Options, tuned: dict[str, Any]
) -> None:
    how = {**workload, **LESS, "budget": "1s"}
    found = door.call("tune", **how, quick=True, **NO_PAGE, json=True)
    assert (
        "quick: at most 48 requests of at most 16 tokens, 8 trials, a race of 1s; draft trees are "
        "not tried" in found.stderr
    )
    assert "a gain of 5% is published with a chance of" in found.stderr
    data = one_object(found.stdout)
    grown = [c["policy"].get("growth", {}).get("kind", "chain") for c in data["candidates"]]
    assert set(grown) == {"chain"}


def test_served_texts_can_be_tuned_on(door: Door, workload: Options, tuned: dict[str, Any]) -> None:
    run = door.call("run", **workload, policy=FIXED, record=True, json=True)
    assert one_object(run.stdout).keys() >= USAGE
    served = run.stderr.split("recording ")[1].split()[0]
    info = next(r for r in door.json("traces list")["recordings"] if r["id"] == served)
    assert (info["source"], info["state"], info["drafts"]) == ("serve", "complete", {})
    how = {**CHAINS, "by_prompt": True, "no_publish": True}
    again = door.json("tune", **how, recording="latest")
    assert again["recording"] == served
    assert again["published"] is None
    page = Path(again["report"]).read_text()
    assert "too few to tell whether choosing gains anything" in page


def test_an_unfinished_recording_is_tuned_on_and_said_to_be_one(
    door: Door, workload: Options, tuned: dict[str, Any], recording: str, tmp_path: Path
) -> None:
    other = Door(str(tmp_path / "cut.db"), door.pair)
    unfinished = "UPDATE recording SET state = 'recording', finished_at = NULL"
    run_sql(door.db, f"VACUUM INTO '{other.db}'")
    run_sql(other.db, f"{unfinished} WHERE id = '{recording}'")
    found = other.call("tune", **CHAINS, recording=recording, **NO_PAGE, json=True)
    assert one_object(found.stdout)["recording"] == recording
    assert (
        f"{recording} was never finished: tuning on the 6 requests it holds (the `record`"
        in found.stderr
    )
    assert one_object(found.stdout)["workload"].items() >= SIX.items()
    whole = door.call("tune", **workload, **CHAINS, limit=6, **NO_PAGE)
    assert "decode:" not in whole.stderr, "what is recorded is found"
    assert "never finished" not in whole.stderr
    words = next(x for x in whole.stdout.splitlines() if " policies show " in x)
    assert door.call(*shlex.split(words)[1:]).exit_code == 0, "what is printed can be typed"


def test_what_is_due_and_fails_is_told_by_the_exit_status(door: Door, folder: Path) -> None:
    """For cron and systemd: too few requests, here."""
    work = write_workload(folder / "few.jsonl", 3)
    door.json("schedule add failing --now", workload=work, cron="@daily", trials=2)
    ran = door.call("schedule run --once", json=True)
    assert (ran.exit_code, one_object(ran.stdout)["failed"]) == (1, 1)
    assert "failed: too few requests to search, race and confirm" in ran.stderr
    door.json("schedule remove failing")
    assert door.call("schedule run --once").exit_code == 0


def test_a_job_that_another_worker_took_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door(str(tmp_path / "x.db"), "demo")
    door.json("schedule add nightly", cron="@daily", pair="demo")

    def taken(database: Database, name: str) -> None:
        make_due(database, name)
        assert claim(database, "another", lease_s=60) is not None

    monkeypatch.setattr("spectune.optimizer.commands.work.make_due", taken)
    ran = door.call("schedule run nightly")
    assert (ran.exit_code, ran.stdout.splitlines()) == (
        0,
        ["another worker took nightly first; `schedule list nightly` says how it ends"],
    )


def test_schedules(door: Door, workload: Options, tuned: dict[str, Any]) -> None:
    law = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "seed": 3, "verifier": "rejection"}
    texts = {"stop": "END", "no_chat": True, "max_new_tokens": 40}
    searched = {"trials": 8, "gamma_max": 5, "tree_width": 4, "tree_depth": 6, "finalists": 2}
    there: Options = {"deployment": "canary", "cron": "0 3 * * *", "tz": "Europe/Berlin"}
    how = {**law, **texts, **searched, **there, "budget": "5m"}
    added = door.json("schedule add nightly", **{**workload, **how})
    read = from_document(Tune, added["settings"], "nightly")
    assert TuneOptions.of(read) == TuneOptions(
        options=DecodeOptions(Sampling(0.7, 40, 0.9, 3), 40, "rejection", ("END",), False),
        budget_s=300.0,
        deployment="canary",
        **searched,
    )
    chains = door.json("schedule add chains", cron="@hourly", tree_width=0)["settings"]
    assert chains["trees"]["width"] == 0
    assert [s["name"] for s in door.json("schedule list")["schedules"]] == ["chains", "nightly"]
    changed = door.json("schedule edit nightly", cron="@weekly", budget="1m", since="24h")
    assert (changed["id"], changed["cron"], changed["tz"]) == (added["id"], "@weekly", there["tz"])
    settings = from_document(Tune, changed["settings"], "nightly")
    assert TuneOptions.of(settings) == replace(TuneOptions.of(read), budget_s=60.0)
    assert settings.workload == (), "what is decoded since takes the place of the workload"
    chains, nightly = (row["tunes"] for row in door.json("schedule list")["schedules"])
    assert chains.endswith(" on demo, for deployment default")
    assert nightly.endswith(" on what was decoded since 24h, for deployment canary")
    for name in ("chains", "nightly"):
        door.json("schedule remove", name)
    assert door.json("schedule list")["schedules"] == []


def test_a_schedule_tunes_on_what_was_recorded(
    door: Door, workload: Options, tuned: dict[str, Any]
) -> None:
    """What is due decodes nothing: it samples what was recorded, tunes, and publishes or says why
    not."""
    before = door.json("policies list")["publications"]
    searched = {"trials": 4, "budget": "1s", "gamma_max": 6, "tree_width": 2, "tree_depth": 2}
    door.json("schedule add drift", **searched, cron="@daily", since="24h")
    door.json("schedule add other --now", **searched, cron="@daily", since="24h")
    ran = door.call("schedule run drift", json=True)
    assert one_object(ran.stdout) == {"done": 1, "failed": 0, "lost": 0, "released": 0}, ran.stderr
    (row,) = door.json("schedule list drift")["schedules"]
    (attempt,) = row["attempts"]
    result = attempt["result"]
    assert row["last"]["result"] == result
    assert result["reason"]
    assert Path(result["report"]).read_text().startswith("<!DOCTYPE html>")
    assert f"its page is {result['report']}" in ran.stderr
    after = door.json("policies list")["publications"]
    if result["published"] is None:
        assert after == before
    else:
        assert [p["version"] for p in after[1:]] == [p["version"] for p in before]
        assert after[0]["version"] == result["published"]
        assert after[0]["actor"] == "schedule"
    recordings = door.json("traces list")["recordings"]
    sample = next(r for r in recordings if r["id"] == result["recording"])
    assert (sample["source"], sample["state"]) == ("sample", "complete")
    assert sample["n_requests"] >= 6
    assert door.call("schedule list drift").exit_code == 0
    assert door.json("schedule list other")["schedules"][0]["last"] is None
    for name in ("drift", "other"):
        door.json("schedule remove", name)


@pytest.mark.parametrize("asked", [{}, {"report": "page.html"}])
def test_a_page_that_cannot_be_made_costs_no_results(
    door: Door,
    recording: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    asked: Options,
) -> None:
    """One that was asked for is an error all the same, after them."""

    def broken(*_args: object, **_more: object) -> None:
        raise DatabaseError("the database went away")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spectune.optimizer.commands.report, "write_report", broken)
    incumbent = replace(PLAIN, role="incumbent")
    done = results(WINNER, incumbent, WINNER, incumbent)
    monkeypatch.setattr(spectune.optimizer.commands.tune, "run_tuning", lambda *_, **__: done)
    found = door.call("tune", **QUICK, **asked, recording=recording, no_publish=True, json=True)
    assert one_object(found.stdout)["study"] == done.study
    assert one_object(found.stdout)["report"] is None
    assert "the database went away" in found.stderr
    assert found.exit_code == (2 if asked else 0)


def test_what_was_decoded_lately_can_be_tuned_on(
    door: Door, recording: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of it, with the panoramas that there are."""
    incumbent, given = replace(PLAIN, role="incumbent"), []
    done = results(WINNER, incumbent, WINNER, incumbent)

    def take(_store: TraceStore, bench: Tunable, *_: Any, **__: Any) -> Any:
        given.append(bench.texts.recording.id)
        return done

    monkeypatch.setattr(spectune.optimizer.commands.tune, "run_tuning", take)
    found = door.call("tune", **QUICK, since="24h", no_publish=True, report="none")
    assert found.exit_code == 0, found.output
    name = given[0]
    sample = next(r for r in door.json("traces list")["recordings"] if r["id"] == name)
    assert (sample["source"], sample["state"]) == ("sample", "complete")
    assert 6 <= sample["n_requests"] <= 200
    found = door.call("tune", **QUICK, since="24h", limit=4, no_publish=True, report="none")
    few = next(r for r in door.json("traces list")["recordings"] if r["id"] == given[1])
    assert few["n_requests"] == 4
    assert "this takes a sample of 4 (`tune --limit` says how many)" in found.stderr
    assert "no effect" not in found.stderr
    both = {"since": "24h", "recording": recording}
    assert "give either --recording or --since" in door.call("tune", **QUICK, **both).stderr


def test_a_tuning_leaves_a_report(door: Door, tuned: dict[str, Any], tmp_path: Path) -> None:
    """Beside the database; made again from what is stored, with a price, and refused where it
    cannot be."""
    path = Path(tuned["report"])
    assert path == Path(door.db).parent / f"spectune-report-{tuned['study']}.html"
    made = door.json("report", tuned["study"], out=tmp_path / "r.html", price=2.5, gpus=8)
    assert (made["path"], made["study"]) == (str(tmp_path / "r.html"), tuned["study"])
    text, again = path.read_text(), (tmp_path / "r.html").read_text()
    parts = ("prediction", "race", "executed", "categories")
    for page in (text, again):
        for part in (*parts, "latency", "positions", "tried"):
            assert f'id="{part}"' in page, part
        assert 'id="by-prompt"' not in page, "it was not tried"
    (command,) = re.findall("<pre>spectune (.*)</pre>", html.unescape(text))
    assert parsed(words := shlex.split(command))
    assert words[:2] == ["--db", str(Path(door.db).resolve())]
    assert f"<h1>{made['sentence']}".split("'")[0] in again
    assert tuned["rejection"] is None, "at temperature 0 it is the same verifier"
    assert door.json("report", tuned["study"], out=path)["path"] == str(path)
    assert "there is no folder" in door.refused("report", out=tmp_path / "no" / "r.html")
    assert "there is no study 'none-such'" in door.refused("report none-such")
    other = Door(str(tmp_path / "other.db"), door.pair)
    run_sql(door.db, f"VACUUM INTO '{other.db}'")
    with opened(other.db) as store:  # a search whose tuning was interrupted
        last = store.get_study("latest")
        begun = store.put_study(last.pair_id, sampler="none", seed=0, document={})
    latest = other.json("report latest", out=tmp_path / "latest.html")["study"]
    assert latest != begun
    assert "its tuning did not end" in other.refused("report", begun)

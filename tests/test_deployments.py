"""Deployments: each has one policy in force for a pair and device, with the sampling it was tuned
for."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from databases import opened
from doors import Door
from recorded_texts import Looked
from test_hot_reload import fixed, publish
from waiting import eventually

from spectune.optimizer.changes import changes_of, label_of, shares_of
from spectune.optimizer.deployment import other_sampling, sampling_of, tuned_for
from spectune.optimizer.execute import DecodeOptions, encode, outcome, run
from spectune.optimizer.in_force import watch
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.policies.plan import prepare
from spectune.traces.errors import EngineError
from spectune.traces.schema import Request, Sampling, Tokens, Workload
from spectune.traces.store import TraceStore
from spectune.traces.store.query import in_force
from spectune.traces.tables import AckStatus, Publication, Trajectory

HOT = ("--temperature", 0.7, "--seed", 3)
SHORT = ("--max-new-tokens", 4, "--no-compare")


def tuned(
    store: TraceStore, pair: LoadedPair, policy: Policy, temperature: float, into: str = "default"
) -> int:
    """What `tune` publishes, without its work; the version."""
    sampling = tuned_for(Sampling(temperature), "coupled")
    return publish(store, pair, policy, actor="tune", deployment=into, sampling=sampling)


def test_a_deployments_life_at_two_temperatures(
    url: str, tiny_pair: Path, pair: LoadedPair
) -> None:
    """Tuned cold; a canary tuned hot; a third by hand; promoted, and rolled back."""
    with opened(url) as store:
        cold = tuned(store, pair, fixed(2), 0.0)
        hot = tuned(store, pair, fixed(5), 0.7, "canary")
    door, of = Door(url), ("--pair", tiny_pair, "--device", "cpu")

    def decoded(*asked: object) -> tuple[int, str]:
        """The window that decodes, and what is warned of."""
        done = door.call("generate", "def add(", *of, *SHORT, *asked, "--json")
        assert done.exit_code == 0, done.output
        warned = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
        return json.loads(done.stdout)["policy"]["window"]["gamma"], "".join(warned)

    def active(deployment: str = "default") -> dict[str, Any]:
        listed = door.json("policies", "list", *of)["publications"]
        (row,) = (p for p in listed if p["active"] and p["deployment"] == deployment)
        return row

    assert decoded() == (2, "")
    assert decoded("--deployment", "canary", *HOT) == (5, "")
    line = decoded(*HOT)[1]
    assert f"version {cold} of deployment default was tuned at temperature 0.0" in line
    assert "and this is temperature 0.7; tune" in line

    third = json.dumps(fixed(3).spelled_out())
    own = door.json("policies", "activate", third, *of, "--deployment", "canary")
    assert (active()["version"], active("canary")["version"]) == (cold, own["version"])
    back = door.json("policies", "rollback", *of, "--deployment", "canary")
    assert (back["policy"], back["deployment"]) == (fixed(5).id, "canary")
    assert active("canary")["temperature"] == 0.7
    missing = door.refused("policies", "rollback", *of, "--to", hot)
    assert f"no such version for pair {pair.id} ({pair.spec.name}) on" in missing
    assert "has no earlier policy" in door.refused("policies", "rollback", *of)

    promoted = door.json("policies", "activate", "active", "--from", "canary", *of)
    assert (promoted["policy"], promoted["deployment"]) == (fixed(5).id, "default")
    assert (active()["temperature"], active()["reason"]) == (0.7, "promoted from canary")
    assert "tuned at temperature 0.7, and this is temperature 0.0" in decoded()[1]
    assert decoded(*HOT) == (5, "")
    assert door.json("policies", "rollback", *of)["policy"] == fixed(2).id
    assert active("canary")["policy"] == fixed(5).id
    shown = door.json("policies", "show", *of, "--deployment", "canary")["publication"]
    assert shown["deployment"] == "canary"
    assert shown["sampling"] == tuned_for(Sampling(0.7), "coupled")
    listed = door.json("policies", "list", *of, "--deployment", "canary")["publications"]
    assert {p["deployment"] for p in listed} == {"canary"}
    forces = door.json("policies", "list", "--in-force")["publications"]
    assert [(f["deployment"], f["pair"], f["policy"], f["temperature"]) for f in forces] == [
        ("default", "tiny-llama", fixed(2).id, 0.0),
        ("canary", "tiny-llama", fixed(5).id, 0.7),
    ]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_was_tuned_on_another_device_was_not_tuned_here(
    url: str, store: TraceStore, tiny_pair: Path, pair: LoadedPair
) -> None:
    tuned(store, pair, fixed(2), 0.0)
    hot = tuned_for(Sampling(0.7), "coupled")
    store.publish(pair.id, "cuda", fixed(2).id, actor="tune", sampling=hot)
    of = ("--pair", tiny_pair, "--device", "cpu")
    Door(url).json("policies", "activate", fixed(2).id, *of, "--deployment", "canary")
    now = store.active_publication(pair.id, "cpu", "canary")
    assert now is not None
    assert now.sampling == tuned_for(Sampling(0.0), "coupled")


def test_the_environment_names_the_deployment(tmp_path: Path, tiny_pair: Path) -> None:
    door, of = Door(str(tmp_path / "d.db")), ("--pair", str(tiny_pair), "--device", "cpu", "--json")
    env, document = {"SPECTUNE_DEPLOYMENT": "canary"}, json.dumps(fixed(2).spelled_out())
    made = door.call("policies", "activate", document, *of, env=env)
    assert json.loads(made.stdout)["deployment"] == "canary"
    said = door.call("policies", "show", *of, "--deployment", "other", env=env)
    assert "on cpu in deployment other; decoding autoregressively" in said.stderr
    refused = door.refused("policies", "show", *of, "--deployment", "a b")
    assert "'a b' cannot name a deployment" in refused
    missing = door.call("policies", "activate", "active", "--from", "nobody", *of)
    assert "--from nobody" in missing.stderr


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_hot_reload_follows_its_deployment_and_warns(store: TraceStore, pair: LoadedPair) -> None:
    said: list[str] = []
    how: dict[str, Any] = {"deployment": "canary", "interval_s": 60, "warn": said.append}
    with watch(store, pair, None, sampling=Sampling(0.7), **how) as source:
        tuned(store, pair, fixed(2), 0.7)
        assert not source.poll()
        assert source.current().policy == AUTOREGRESSIVE
        tuned(store, pair, fixed(3), 0.7, "canary")
        assert source.poll()
        assert (source.current().policy, said) == (fixed(3), [])
        tuned(store, pair, fixed(4), 0.0, "canary")
        assert source.poll()
    assert [line.split(";")[0].split("canary ")[1] for line in said] == [
        "was tuned at temperature 0.0, and this is temperature 0.7"
    ]


@pytest.mark.parametrize(
    ("then", "now", "differs"),
    [
        (None, Sampling(0.7), False),
        (tuned_for(Sampling(0.0, top_k=5), "rejection"), Sampling(0.0), False),
        (tuned_for(Sampling(0.7, top_p=0.9), "coupled"), Sampling(0.7, top_p=0.9, seed=4), False),
        (tuned_for(Sampling(0.7, top_p=0.9), "coupled"), Sampling(0.7), True),
        ({"temperature": "hot\n" * 999}, Sampling(0.7), True),
    ],
)
def test_what_counts_as_another_sampling(then: Any, now: Sampling, differs: bool) -> None:
    of = ("default", "p", "cpu", "y", then, None, {}, "t", "", None)
    active = Publication(*of, created_at=datetime.now(UTC))
    active.version = 1
    line = other_sampling(active, now, "coupled")
    assert bool(line) == differs
    assert len(line) < 500


def test_texts_of_two_temperatures_are_tuned_for_neither() -> None:
    ids = np.zeros(3, np.int32)
    cold, hot = (
        Trajectory("a", "c", Tokens(ids, ids), Sampling(t), 3, "length") for t in (0.0, 0.7)
    )
    assert sampling_of([hot, replace(hot, request_id="b")]) == tuned_for(Sampling(0.7), "coupled")
    assert sampling_of([hot, cold]) is None


# ------------------------------------------------------------------ what ran in each round of a run


def test_a_run_is_labelled_by_what_ran_in_each_round(pair: LoadedPair) -> None:
    requests = tuple(Request(f"r{i}", "a", f"def add(a, b): {i}") for i in range(3))
    encoded = encode(pair, Workload("w", requests), DecodeOptions(max_new_tokens=24))
    two, five, again = (
        prepare(fixed(g), pair.draft_names, version=v) for v, g in enumerate((2, 5, 5), 1)
    )
    unseen = prepare(fixed(7), pair.draft_names, version=9)
    plans = (0, two), (8, five), (18, again), (10**6, unseen)
    source = Looked(lambda n: [plan for since, plan in plans if since < n][-1])
    decoded = list(run(pair, source, encoded))
    changes, shares = changes_of(decoded), shares_of(decoded)
    (change,) = changes  # the same policy, published again, is no change
    assert (change["before"], change["after"]) == (fixed(2).label(), fixed(5).label())
    assert change["version"] == 2
    rounds = [
        (d.trajectory.request_id, n, s.policy) for d in decoded for n, s in enumerate(d.steps, 1)
    ]
    first = next((request, n) for request, n, policy in rounds if policy == fixed(5).id)
    assert (change["request"], change["round"]) == first
    counts = [of for _, of in shares.values()]
    assert list(zip(shares, (of.rounds for of in counts), strict=True)) == [
        (name, sum(policy == name for *_, policy in rounds)) for name in (fixed(2).id, fixed(5).id)
    ]
    whole = outcome("", decoded).total
    assert sum(of.emitted_tokens for of in counts) == whole.emitted_tokens
    assert sum(of.requests for of in counts) == whole.requests
    assert sum(of.seconds for of in counts) == pytest.approx(whole.seconds)
    assert label_of(shares, changes) == f"{fixed(2).label()}, then {fixed(5).label()}"
    assert "fixed(gamma=7)" not in str((changes, shares))


@pytest.mark.parametrize("command", ["run", "record"])
def test_an_engine_follows_the_deployment_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """On a device of its own choice, unless another deployment is named."""

    def stops(*_: object) -> None:
        raise EngineError("not started here")

    monkeypatch.setattr("spectune.optimizer.commands.decoding.start", stops)
    monkeypatch.setattr("spectune.optimizer.commands.common.sees_cuda", lambda: True)
    monkeypatch.setattr("spectune.optimizer.commands.common.hardware", lambda _: "NVIDIA L4")
    door = Door(str(tmp_path / "x.db"))
    for engine, named, where in (
        ("vllm", (), "on cuda:NVIDIA L4 in deployment vllm;"),
        ("vllm", ("--deployment", "canary"), "on cuda:NVIDIA L4 in deployment canary;"),
    ):
        told = door.call(command, "--engine", engine, "--pair", "demo", "--limit", 1, *named)
        assert where in told.stderr
        assert "not started here" in told.stderr


TREE = '{"draft": "near", "growth": {"kind": "top_k"}}'


def test_what_a_deployments_engine_cannot_run_is_not_published(
    tmp_path: Path, tiny_pair: Path
) -> None:
    door, of = Door(str(tmp_path / "x.db")), ("--pair", tiny_pair, "--device", "cpu")
    vllm = (*of, "--deployment", "vllm")
    refused = door.refused("policies", "activate", TREE, *vllm)
    assert "deployment vllm: vLLM cannot run trees" in refused
    door.json("policies", "activate", TREE, *of, "--deployment", "canary")
    refused = door.refused("policies", "activate", "active", "--from", "canary", *vllm)
    assert "vLLM cannot run trees" in refused
    assert door.json("policies", "list", *vllm)["publications"] == []


def test_what_servers_did_with_a_publication_is_told(tmp_path: Path, tiny_pair: Path) -> None:
    door, of = Door(str(tmp_path / "x.db")), ("--pair", tiny_pair, "--device", "cpu")
    told = door.call("policies", "activate", json.dumps(fixed(2).spelled_out()), *of)
    assert told.exit_code == 0
    assert "is published in deployment default; nobody has applied it yet" in " ".join(
        told.stdout.split()
    )
    assert "in force" not in told.output
    (row,) = door.json("policies", "list", "--in-force")["publications"]
    assert row["servers"] == []
    assert "nobody has" in " ".join(door.call("policies", "list", "--in-force").stdout.split())
    with opened(tmp_path / "x.db") as store:
        store.acknowledge(1, "east", "applied")
        store.acknowledge(1, "west", "refused", "it loaded another draft")
    (row,) = door.json("policies", "list", "--in-force")["publications"]
    assert [(s["server"], s["status"], s["reason"]) for s in row["servers"]] == [
        ("east", "applied", ""),
        ("west", "refused", "it loaded another draft"),
    ]
    wide = door.call("policies", "list", "--in-force", env={"COLUMNS": "300"}).stdout
    assert "east applied; west refused: it loaded another draft" in wide
    back = door.json("policies", "activate", json.dumps(fixed(3).spelled_out()), *of)
    assert back["servers"] == []
    told = door.call("policies", "rollback", *of, "--to", 1)
    assert (
        f"version 3: version 2 -> back to version 1: {fixed(2).label()} is published in deployment "
        "default; nobody has applied it yet"
    ) in " ".join(told.stdout.split())


def test_what_is_published_while_others_are_listed_breaks_no_list(
    tmp_path: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, of = Door(str(tmp_path / "x.db")), ("--pair", tiny_pair, "--device", "cpu")
    door.json("policies", "activate", json.dumps(fixed(2).spelled_out()), *of)

    def meanwhile(store: TraceStore) -> list[dict[str, Any]]:
        rows = in_force(store)
        (first,) = store.list_publications()
        store.publish(first.pair_id, "cpu", first.policy_id, actor="test")
        return rows

    monkeypatch.setattr("spectune.optimizer.commands.policies.in_force", meanwhile)
    (row,) = door.json("policies", "list")["publications"]
    assert (row["version"], row["active"]) == (1, True)


def test_a_rollback_goes_back_to_what_was_applied(
    tmp_path: Path, tiny_pair: Path, pair: LoadedPair
) -> None:
    """Past what servers refused; typed again, further back; and never to what it has left."""
    door, of = Door(str(tmp_path / "x.db")), ("--pair", tiny_pair, "--device", "cpu")

    def back(*options: object) -> tuple[str, str]:
        told = door.call("policies", "rollback", *of, *options)
        assert told.exit_code == 0, told.output
        active = door.json("policies", "show", "active", *of)
        return " ".join(told.stdout.split()).partition(" -> ")[2].partition(":")[0], active["id"]

    with opened(tmp_path / "x.db") as store:
        for gamma, status in ((1, "applied"), (2, "applied"), (9, "refused"), (3, ""), (5, "")):
            version = publish(store, pair, fixed(gamma))
            if status:
                store.acknowledge(version, "east", status)
        assert back() == ("back to version 2", fixed(2).id)
        assert back() == ("back to version 1", fixed(1).id)
        assert "has no earlier policy" in door.refused("policies", "rollback", *of)
        assert back("--to", 5) == ("back to version 5", fixed(5).id)
        assert back("--to", 6) == ("back to version 2", fixed(2).id)  # a rollback: to what it did
        publish(store, pair, fixed(7))
        assert back() == ("back to version 2", fixed(2).id)
        evidence = store.list_publications()[0].evidence
        assert evidence["rollback"] == {"from": 10, "to": 2}


def test_a_rollback_for_every_gpu_passes_over_no_publication_for_one(
    tmp_path: Path, tiny_pair: Path, pair: LoadedPair
) -> None:
    door, of = Door(str(tmp_path / "x.db")), ("--pair", tiny_pair, "--device")
    for gamma, device in ((1, "cuda"), (2, "cuda"), (3, "cuda:NVIDIA L4")):
        document = json.dumps(fixed(gamma).spelled_out())
        door.json("policies", "activate", document, *of, device)
    refused = door.refused("policies", "rollback", *of, "cuda")
    assert "version 3 of deployment default is newer" in refused
    assert "say --device 'cuda:NVIDIA L4'" in refused
    assert (
        "version 3 -> back to version 2"
        in door.call("policies", "rollback", *of, "cuda:NVIDIA L4").stdout
    )


def test_servers_are_waited_for(tmp_path: Path, tiny_pair: Path, pair: LoadedPair) -> None:
    door, of = Door(str(tmp_path / "x.db")), ("--pair", tiny_pair, "--device", "cpu")
    words = ("policies", "activate", json.dumps(fixed(2).spelled_out()), *of, "--wait")
    assert door.call(*words, "50ms").exit_code == 1
    with opened(tmp_path / "x.db") as store:

        def answers(version: int, status: AckStatus) -> None:
            eventually(lambda: store.active_version(pair.id, "cpu") == version)
            store.acknowledge(version, "east", status, "too long" if status == "refused" else "")

        said: list[tuple[AckStatus, int, str]] = [
            ("applied", 0, "east applied"),
            ("refused", 1, "east refused: too long"),
        ]
        for version, (status, code, words_) in enumerate(said, 2):
            thread = threading.Thread(target=answers, args=(version, status))
            thread.start()
            found = door.call(*words, "90s")
            thread.join()
            assert (found.exit_code, words_ in " ".join(found.stdout.split())) == (code, True)

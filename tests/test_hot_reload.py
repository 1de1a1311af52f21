"""A policy swapped between two rounds: at the very next one, acknowledged, and invisible in the
text."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sqlalchemy as sa
from databases import NOT_POLICIES, publish_text, put_in_force
from doors import Door, write_workload
from recorded_texts import asked, plain_texts
from synthetic import flat_profile, policy
from waiting import PATIENCE_S, eventually

from spectune.db import DatabaseError
from spectune.optimizer.deployment import Place
from spectune.optimizer.in_force import earlier_winners, ready_plan, watch
from spectune.optimizer.tuning.pipeline import incumbent_of
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import Round, StaticSource
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.reload import Published, WatchedSource
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Sampling, Verifier
from spectune.traces.store import TraceStore

TOKENS, PROMPT = 40, "def add(a, b):"


fixed = partial(policy, "near")
ANALYTIC = fixed({"kind": "analytic", "gamma_max": 4})
TREE = parse_policy({"draft": "near", "growth": {"kind": "top_k", "width": 2}})
LOSSY = parse_policy({"draft": "near", "stop": {"kind": "max_prob", "keep_last": False}})
STATES = fixed({"kind": "cache_fsm", "gamma_max": 5, "gamma_initial": 5})


class Board:
    """A publication board in memory: what is newest, and what was acknowledged. ``preparing`` and
    ``acknowledging`` are called with a version before either happens."""

    def __init__(self) -> None:
        self.newest: Published | None = None
        self.acknowledged: list[tuple[int, str, str]] = []
        self.preparing: Callable[[int], object] = lambda version: None
        self.acknowledging: Callable[[int], object] = lambda version: None

    def fetch(self) -> Published | None:
        return self.newest

    def acknowledge(self, version: int, status: str, reason: str) -> None:
        self.acknowledging(version)
        self.acknowledged.append((version, status, reason))

    def publish(self, version: int, policy: Policy | None) -> None:
        self.newest = Published(version, policy)


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def source(board: Board, pair: LoadedPair) -> WatchedSource:
    def ready(policy: Policy, version: int) -> Any:
        board.preparing(version)
        return prepare(policy, pair.draft_names, version=version)

    first = prepare(fixed(2), pair.draft_names)
    how: dict[str, Any] = {"interval_s": 0.01, "patience_s": 0.05}
    return WatchedSource(
        first, board.fetch, ready, board.acknowledge, **how, retry=(DatabaseError,)
    )


def swapped(
    pair: LoadedPair, source: WatchedSource, sampling: Sampling, at: int
) -> tuple[list[int], list[Round]]:
    """Decodes a request and looks for a publication after round ``at``."""
    decoder = Decoder(pair, source)
    rounds = []
    for n, item in enumerate(decoder.rounds(asked(decoder, PROMPT, sampling, TOKENS)), 1):
        rounds.append(item)
        if n == at:
            source.poll()
    return [t for r in rounds for t in r.tokens], rounds


def test_a_policy_that_the_verifier_cannot_use_never_comes_into_force(
    pair: LoadedPair, source: WatchedSource, board: Board, caplog: pytest.LogCaptureFixture
) -> None:
    """Swapped in between two rounds by a source that checks nothing: this request and the next end
    under the policy before it, and what follows applies."""
    sampling = Sampling(temperature=1.0, seed=4)

    def served(decoder: Decoder, *published: Policy) -> list[tuple[str, list[int]]]:
        rounds = []
        for item in decoder.rounds(asked(decoder, PROMPT, sampling, TOKENS)):
            rounds.append((item.step.policy, item.tokens))
            if len(rounds) <= len(published):
                board.publish(6 + len(rounds), published[len(rounds) - 1])
                source.poll()
        return rounds

    decoder = Decoder(pair, source, "rejection")
    expected = served(decoder)
    assert served(decoder, TREE, LOSSY) == served(decoder) == expected
    assert [line.split(": ")[1][:8] for line in caplog.messages] == ["growth t", "stop.kee"]
    assert f"{fixed(2).label()} stays in force" in caplog.messages[1]
    assert {policy for policy, _ in served(decoder, fixed(5))[1:]} == {fixed(5).id}
    greedy = asked(decoder, PROMPT, Sampling(), TOKENS)
    board.publish(10, TREE)
    source.poll()
    assert {item.step.policy for item in decoder.rounds(greedy)} == {TREE.id}
    assert {policy for policy, _ in served(decoder)} == {fixed(5).id}
    unusable = Decoder(pair, StaticSource(prepare(LOSSY, pair.draft_names)), "rejection")
    with pytest.raises(PolicyError, match="keep_last"):
        served(unusable)


@pytest.mark.parametrize(
    ("after", "at", "temperature"),
    [
        (fixed(5), 1, 0.8),
        (policy("far", 5), 5, 0.0),
        (policy("ngram", 5), 5, 0.8),
        (AUTOREGRESSIVE, 1, 0.0),
        (STATES, 5, 0.8),
    ],
)
def test_the_next_round_is_the_new_policys_and_the_text_is_the_same(
    pair: LoadedPair,
    source: WatchedSource,
    board: Board,
    after: Policy,
    at: int,
    temperature: float,
) -> None:
    sampling = Sampling(temperature=temperature, seed=4)
    board.publish(7, after)
    tokens, rounds = swapped(pair, source, sampling, at)
    (plain,) = plain_texts(pair, {"r": PROMPT}, sampling, TOKENS)
    assert tokens == plain.output_ids.tolist()
    assert [r.step.policy for r in rounds] == [fixed(2).id] * at + [after.id] * (len(rounds) - at)
    assert len(rounds) > at + 1
    assert rounds[at - 1].step.drafted == 2
    if after.draft != "ngram":  # which drafts nothing where the text has not been seen before
        assert rounds[at].step.drafted == after.gamma_max
    assert board.acknowledged == [(7, "applied", "")]
    assert source.current().version == 7


# ----------------------------------------------------------------------- publications in a database


def publish(store: TraceStore, pair: LoadedPair, policy: Policy, **how: Any) -> int:
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    return put_in_force(store, pair.id, policy, **how)


def test_costs_of_another_dtype_or_machine_are_not_used(
    store: TraceStore, pair: LoadedPair
) -> None:
    """A window that weighs costs is refused until there are some of this hardware and dtype, and
    then follows the newest of those; one that is given is followed."""
    mine = flat_profile(pair.id, pair.drafts)
    dear = {**mine.terms, "target": mine.terms["pass/near"]}  # verified for what a draft costs
    other = {**mine.environment, "device": "Another Processor"}
    foreign = replace(mine, dtype="bfloat16", terms=dear), replace(mine, environment=other)
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)

    def told(profile: Any = None) -> tuple[Any, str]:
        publish(store, pair, ANALYTIC)
        with watch(store, pair, profile, interval_s=60) as source:
            return source.current(), source.last_error

    for profile in foreign:
        store.put_profile(profile)
        plan, error = told()
        assert plan.policy == AUTOREGRESSIVE
        assert error.startswith("window.analytic needs a latency profile of this pair on this")
        assert "`profile`" in error
    store.put_profile(mine)
    store.put_profile(foreign[0])

    def drafted(plan: Any) -> list[int]:
        decoder = Decoder(pair, StaticSource(plan))
        done = decoder.decode(asked(decoder, PROMPT, Sampling(), TOKENS))
        return [step.drafted for step in done.steps]

    by_mine, by_foreign = (
        drafted(prepare(ANALYTIC, pair.draft_names, profile=p)) for p in (mine, foreign[0])
    )
    assert by_mine != by_foreign
    assert drafted(told()[0]) == by_mine
    assert drafted(told(foreign[0])[0]) == by_foreign


def statuses(store: TraceStore) -> list[tuple[int, str]]:
    return [(a.version, a.status) for a in store.acknowledgements()]


def test_a_runtime_follows_the_store(store: TraceStore, pair: LoadedPair) -> None:
    with watch(store, pair, None, interval_s=60, node="here:1") as source:
        assert source.current().policy == AUTOREGRESSIVE
        one = publish(store, pair, fixed(3))
        assert source.poll()
        assert source.current().policy == fixed(3)
        two = publish(store, pair, policy("third", 3))
        assert not source.poll()
        assert not source.poll()
        three = publish(store, pair, ANALYTIC)
        assert not source.poll()
        assert source.current().policy == fixed(3)
        store.put_profile(flat_profile(pair.id, pair.drafts))
        four = publish(store, pair, ANALYTIC)
        assert source.poll()
        assert source.current().policy == ANALYTIC
    expected = {one: "applied", two: "refused", three: "refused", four: "applied"}
    assert statuses(store) == list(expected.items())
    assert "no draft 'third'; it has: far, near" in store.acknowledgements(two)[0].reason
    assert "run `profile`" in store.acknowledgements(three)[0].reason
    assert store.acknowledgements(one)[0].node == "here:1"


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("policy", [LOSSY, TREE], ids=["keep_last", "tree"])
def test_what_would_bias_the_text_is_refused_and_neither_incumbent_nor_tried(
    store: TraceStore, pair: LoadedPair, policy: Policy
) -> None:
    publish(store, pair, policy)
    active = store.list_publications()[0]
    how: tuple[tuple[Verifier, float, bool], ...] = (
        ("coupled", 1.0, True), ("rejection", 1.0, False), ("rejection", 0.0, True)
    )  # fmt: skip
    for verifier, temperature, fits in how:
        sampling, used = Sampling(temperature=temperature), policy if fits else AUTOREGRESSIVE
        asked: dict[str, Any] = {"verifier": verifier, "sampling": sampling}
        with watch(store, pair, None, **asked, interval_s=60) as source:
            assert source.current().policy == used
        bench = SimpleNamespace(check=partial(ready_plan, store, pair, profile=None, **asked))
        incumbent, why = incumbent_of(Place("cpu", "default", active), cast(Any, bench))
        assert (incumbent, "cannot run" in why) == (used, not fits)
        assert earlier_winners(store, pair, **asked) == [policy] * fits
    assert [status for _, status in statuses(store)] == ["applied", "refused", "applied"]


# ------------------------------------------------------------------------- whatever stands in a row


def test_whatever_is_published_is_refused_and_the_last_good_one_taken(
    store: TraceStore, pair: LoadedPair
) -> None:
    """While it runs, the next good one; and where it starts, the last that can run."""
    publish(store, pair, fixed(2))
    refused = []
    with watch(store, pair, None, interval_s=60) as source:
        for name, document in NOT_POLICIES.items():
            bad, before = publish_text(store, pair.id, document), source.current()
            refused.append(store.list_publications(pair.id)[0].policy_id)
            assert not source.poll(), name
            assert source.current() is before, name
            (said,) = store.acknowledgements(bad)
            assert (said.status, said.reason) == ("refused", source.last_error), name
            assert said.reason.startswith(f"publication {bad}: "), said.reason
            assert said.reason.isprintable(), name
            assert len(said.reason) < 400, name
            good = fixed(3 if before.policy == fixed(4) else 4)
            publish(store, pair, good)
            assert source.poll(), name
            assert source.current().policy == good, name
    for name in refused:
        store.publish(pair.id, "cpu", name, actor="test")
    last = publish(store, pair, policy("third", 3))
    with watch(store, pair, None, interval_s=60) as source:
        assert source.current().policy == good
        assert "third" in source.last_error
    assert (last, "refused") in statuses(store)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("document", [NOT_POLICIES["null"], NOT_POLICIES["deep"]])
def test_commands_see_past_a_document_that_is_no_policy(
    store: TraceStore, url: str, tiny_pair: Path, tmp_path: Path, pair: LoadedPair, document: str
) -> None:
    publish(store, pair, fixed(3))
    older = publish_text(store, pair.id, '{"draft": 5}')
    bad = publish_text(store, pair.id, document)
    door, of_pair = Door(url, str(tiny_pair)), ("--pair", tiny_pair, "--device", "cpu")
    workload = write_workload(tmp_path / "one.jsonl", 1)
    how = ("--workload", workload, "--policy", "active", "--max-new-tokens", 4, "--json")
    ran = door.call("run", *of_pair, *how)
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["policy"]["window"]["gamma"] == 3
    assert f"publication {bad} is refused: publication {bad}: " in ran.stderr
    listed = door.json("policies", "list", *of_pair)["publications"]
    assert [p["version"] for p in listed] == [bad, older, older - 1]
    assert listed[0]["refused"]
    for command in (("policies", "show"), ("policies", "rollback", "--to", str(older))):
        refused = door.call(*command, *of_pair)
        assert refused.exit_code == 2
        (line,) = refused.stderr.splitlines()
        assert f"publication {older if 'rollback' in command else bad}: " in line
    back = door.json("policies", "rollback", *of_pair)
    assert back["policy"] == fixed(3).id  # and not the one before, which cannot run
    assert door.json("policies", "show", *of_pair)["id"] == fixed(3).id


# ------------------------------------------------------------------------------- whatever is raised

RAISED = [ValueError("two\nlines \x00"), MemoryError(), AssertionError("x" * 10_000)]


@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
def test_whatever_preparing_raises_refuses_that_version_alone(
    source: WatchedSource, board: Board, error: Exception
) -> None:
    def preparing(version: int) -> None:
        if version == 7:
            raise error

    board.preparing = preparing
    board.publish(7, fixed(5))
    with source:
        eventually(lambda: board.acknowledged)
        (version, status, reason) = board.acknowledged[0]
        assert (version, status) == (7, "refused")
        assert reason.isprintable()
        assert type(error).__name__ in reason
        assert len(reason) < 600
        assert source.current().policy == fixed(2)
        board.publish(8, fixed(5))
        eventually(lambda: board.acknowledged[1:] == [(8, "applied", "")])
        assert source.current().policy == fixed(5)


def test_a_publication_is_taken_while_the_last_one_is_unacknowledged(
    source: WatchedSource, board: Board
) -> None:
    """What the database could not take is said later, in order, and nothing waits for it."""
    down = True

    def acknowledging(version: int) -> None:
        if down:
            raise DatabaseError("down")

    board.acknowledging = acknowledging
    for version, newest in ((7, fixed(5)), (8, policy("third", 6)), (9, fixed(4))):
        board.publish(version, newest)
        with pytest.raises(DatabaseError):
            source.poll()
    assert source.current().policy == fixed(4)
    down = False
    assert not source.poll()
    told = [(version, status) for version, status, _ in board.acknowledged]
    assert told == [(7, "applied"), (8, "refused"), (9, "applied")]


def test_leaving_does_not_wait_for_a_database_that_never_answers(
    source: WatchedSource, board: Board
) -> None:
    frozen, asked = threading.Event(), threading.Event()

    def acknowledging(version: int) -> None:
        asked.set()
        frozen.wait()

    board.acknowledging = acknowledging
    board.publish(7, fixed(5))
    with source:
        assert asked.wait(PATIENCE_S)
    assert "version 7 (applied) was not acknowledged" in source.unfinished
    frozen.set()


def test_a_table_that_is_gone_for_a_while_stops_nothing(
    store: TraceStore, pair: LoadedPair
) -> None:
    publish(store, pair, fixed(2))

    def rename(old: str, new: str) -> None:
        with store.database.write() as session:
            session.execute(sa.text(f"ALTER TABLE {old} RENAME TO {new}"))

    with watch(store, pair, None, interval_s=0.01) as source:
        rename("publication", "hidden")
        eventually(lambda: "publication" in source.last_error)
        assert source.current().policy == fixed(2)
        rename("hidden", "publication")
        version = publish(store, pair, fixed(4))
        eventually(lambda: (version, "applied") in statuses(store))
        assert source.current().policy == fixed(4)
        assert source.last_error == ""

"""Questions about stored traces, on every database."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from databases import opened
from doors import Door
from synthetic import flat_profile
from test_report import FASTER
from trace_values import (
    CATEGORIES,
    PAIR,
    POLICY,
    POLICY_ID,
    a_panorama,
    a_recording,
    a_trajectory,
    an_outcome,
    steps_of,
)

from spectune.api import simulate
from spectune.db import NotFoundError
from spectune.engines.engine import Answered
from spectune.optimizer import schedule as schedules
from spectune.optimizer.recording.on_engine import outcome_on
from spectune.optimizer.tuning.confirmation import Confirmation
from spectune.optimizer.tuning.timings import Timings
from spectune.runtime.policies.document import AUTOREGRESSIVE
from spectune.traces.acceptance import keep_probability, step_survival, survival
from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling, Step
from spectune.traces.store import Asked, TraceStore, query
from spectune.traces.store.compare import compare
from spectune.traces.store.query import TraceFilter

DAY = timedelta(days=1)
NOW = datetime(2026, 5, 4, 9, tzinfo=UTC)
OTHER = AUTOREGRESSIVE.id


def at(store: TraceStore, moment: datetime) -> TraceStore:
    return TraceStore(store.database, clock=lambda: moment)


def rounds_of(n: int, policy: str, *, seconds: float = 0.1, accepted: int = 3) -> tuple[Step, ...]:
    """Rounds that emit ``n`` tokens, four drafted in each."""
    of = (4, 5, accepted, accepted + 1, 4)
    return tuple(
        Step(start, *of, draft="small", policy=policy, round_s=seconds)
        for start in range(0, n, accepted + 1)
    )


def decoded(store: TraceStore, policies: dict[str, float], n: int = 6) -> str:
    """A recording whose every text of 60 tokens is decoded by some policies, a part each, in rounds
    of so many seconds; later ones take longer."""
    store.put_pair(PAIR, "demo", {"target": "t"})
    for name, label in ((POLICY_ID, "small"), (OTHER, "autoregressive")):
        store.put_policy(name, POLICY if name == POLICY_ID else {"draft": "none"}, label)
    made = store.create_recording(Asked(PAIR, None, Sampling(), 64)).id
    part = 60 // len(policies)
    for i in range(n):
        steps = [
            step._replace(start=step.start + part * k)
            for k, (policy, seconds) in enumerate(policies.items())
            for step in rounds_of(part, policy, seconds=seconds * (i + 1))
        ]
        store.append_trajectory(made, i, a_trajectory(i), steps)
    return made


def test_recordings_are_listed_newest_first_and_filtered(store: TraceStore) -> None:
    old, new = a_recording(at(store, NOW - 3 * DAY), n=3), a_recording(at(store, NOW), n=6)
    served = at(store, NOW + DAY).create_recording(Asked(PAIR, None, Sampling(), 8, source="serve"))

    def ids(**only: Any) -> list[str]:
        return [r.id for r in query.list_recordings(at(store, NOW), TraceFilter(**only))]

    assert ids() == ids(pair=PAIR[:6]) == [served.id, new, old]
    for only in ({"source": "record"}, {"categories": ("code",)}, {"draft": "small"}):
        assert ids(**only) == ids(policy=POLICY_ID[:5]) == [new, old]
    assert ids(since=NOW - DAY) == ids(since=DAY) == ids(request="r5") == [new]
    assert ids(until=NOW) == ids(until=DAY) == ids(recordings=(old,)) == [old]
    for only in ({"pair": "0000"}, {"categories": ("chat",)}, {"draft": "large"}):
        assert ids(**only) == ids(min_acceptance=0.99) == []
    with pytest.raises(NotFoundError, match="no recording 'rec-nothing'"):
        ids(recordings=("rec-nothing",))


def test_requests_are_a_row_per_policy_and_sorted_by_any_column(store: TraceStore) -> None:
    recording = decoded(store, {POLICY_ID: 0.1, OTHER: 0.2})
    store.append_trajectory(recording, 9, a_trajectory(9))
    panorama = a_panorama(a_trajectory(4), "small")
    store.put_panoramas(recording, [(4, panorama)])
    rows = query.requests(store, sort="tokens_per_s")
    assert [(r["ordinal"], r["policy"]) for r in rows[:2]] == [
        (5, "autoregressive"),
        (4, "autoregressive"),
    ]
    assert rows[-1]["policy"] is rows[-1]["tau"] is rows[-1]["tokens_per_s"] is None
    for row in rows[:-1]:
        seconds = (0.1 if row["policy"] == "small" else 0.2) * (row["ordinal"] + 1)
        assert (row["rounds"], row["drafted"], row["accepted"], row["emitted"]) == (8, 32, 24, 32)
        assert row["tokens_per_s"] == pytest.approx(4 / seconds)
        assert (row["tau"], row["acceptance"], row["context"]) == (4.0, 0.75, 77)
    kept = keep_probability(panorama, "coupled").mean()
    both = [r["draft_acceptance"] for r in rows if r["ordinal"] == 4]
    assert both == pytest.approx([kept, kept])
    assert query.requests(store, sort="-tokens_per_s", limit=1)[0]["ordinal"] == 0
    near = TraceFilter(draft="small", min_acceptance=kept - 0.01, max_acceptance=kept + 0.01)
    for only, ordinals in (
        (near, {4}),
        (TraceFilter(policy=OTHER[:6], categories=("code",)), {0, 3}),
        (TraceFilter(draft="small", min_acceptance=kept + 0.01), set()),
    ):
        assert {r["ordinal"] for r in query.requests(store, only)} == ordinals
    with pytest.raises(TraceError, match="no column 'speed' to sort by; there are: recording_id, "):
        query.requests(store, sort="speed")


def test_speed_is_told_by_policy_and_day(store: TraceStore) -> None:
    decoded(at(store, NOW - DAY), {POLICY_ID: 0.1, OTHER: 0.2})
    decoded(at(store, NOW), {POLICY_ID: 0.3}, n=2)
    rows = query.speed(store)
    told = {(r["policy_id"], r["day"]): (r["requests"], r["emitted"], r["seconds"]) for r in rows}
    assert told == {
        (POLICY_ID, "2026-05-03"): (6, 192, pytest.approx(0.1 * 8 * 21)),
        (OTHER, "2026-05-03"): (6, 192, pytest.approx(0.2 * 8 * 21)),
        (POLICY_ID, "2026-05-04"): (2, 120, pytest.approx(0.3 * 15 * 3)),
    }
    assert {(r["policy"], r["tau"], r["acceptance"]) for r in rows} == {
        ("small", 4.0, 0.75),
        ("autoregressive", 4.0, 0.75),
    }
    (today,) = query.speed(at(store, NOW + DAY / 2), TraceFilter(since=DAY), ("category", "day"))[
        :1
    ]
    assert (today["category"], today["day"], today["requests"]) == ("code", "2026-05-04", 1)
    assert today["tokens_per_s"] == pytest.approx(60 / (15 * 0.3))


def test_requests_side_by_side_share_the_seconds_of_their_steps(
    store: TraceStore, url: str
) -> None:
    """As `run` tells them: tokens/s are the engine's, and the step that reads a prompt is no round
    of tau. Rows of other loads do not compare, which is said."""
    store.put_pair(PAIR, "demo", {"target": "t"})
    made = store.create_recording(Asked(PAIR, None, Sampling(), 64)).id
    for clients, policy in ((8, POLICY_ID), (1, OTHER)):
        answers = []
        for n in range(clients):
            rounds = [(0, 0, 1, 0, 1), *((1 + 3 * k, 4, 5, 2, 3) for k in range(8))]
            steps = tuple(
                Step(*of, of[1], draft="small", policy=policy, round_s=0.1, batch=clients,
                     arrived_s=1.0, ended_s=1.1 + 0.1 * k)
                for k, of in enumerate(rounds)
            )  # fmt: skip
            text = a_trajectory(n, n=25)
            store.append_trajectory(made, 10 * clients + n, text, steps)
            answers.append(Answered(text, steps))
        (row,) = query.speed(store, TraceFilter(policy=policy), ("policy", "batch"))
        served = outcome_on("p", answers).total
        assert (row["batch"], row["mean_batch"], row["requests"]) == (clients, clients, clients)
        assert row["tokens_per_s"] == pytest.approx(clients * 25 / 0.9)
        assert (row["tokens_per_s"], row["tau"]) == pytest.approx(
            (served.tokens_per_s, served.mean_accepted_length)
        )
        assert row["tau"] == 3.0
        assert served.rounds == row["rounds"] == 9 * clients
    (executed,) = query.acceptance(store, TraceFilter(policy=POLICY_ID), executed=True)
    assert (executed["starts"], executed["mean_accepted_length"]) == (64, 3.0)
    assert len(query.acceptance(store, by=("batch",), executed=True)) == 2
    told = Door(url).call("traces stats --speed", by="policy")
    assert (
        "1.0 to 8.0 requests shared a step: tokens/s of rows with other batches do" in told.stderr
    )
    assert "--by policy,batch parts them" in told.stderr
    assert "do not compare" not in Door(url).call("traces stats --speed", policy=OTHER).stderr


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_acceptance_by_position_pools_every_start(store: TraceStore, verifier: Any) -> None:
    a_recording(store, n=6, drafts=("small", "ngram"), verifier=verifier)
    rows = query.acceptance(store, by=("draft", "category"))
    assert [(r["draft"], r["category"]) for r in rows] == [
        (d, c) for d in ("ngram", "small") for c in ("code", "math", "prose")
    ]
    for row in rows:
        mine = [i for i in range(6) if CATEGORIES[i % 3] == row["category"]]
        panoramas = [a_panorama(a_trajectory(i), row["draft"], seed=i) for i in mine]
        parts = [survival(p, verifier) for p in panoramas]
        survived, at_risk = (
            np.sum([getattr(s, k) for s in parts], 0) for k in ("survived", "at_risk")
        )
        assert row["requests"] == 2
        starts = sum(s.starts for s in parts)
        assert row["marginal"] == pytest.approx(survived / starts, abs=1e-5)
        assert row["conditional"] == pytest.approx(survived / np.maximum(at_risk, 1e-9), abs=1e-5)
        assert row["mean_accepted_length"] == pytest.approx(1 + sum(row["marginal"]))
        keep = np.concatenate([keep_probability(p, verifier) for p in panoramas])
        assert row["marginal"][0] == pytest.approx(keep.mean())
    (whole,) = query.acceptance(store, TraceFilter(draft="small"))
    assert (whole["requests"], whole["starts"]) == (6, 360)
    first = query.first_positions(store, store.resolve_recording("latest"))
    assert first["small"].acceptance == pytest.approx(whole["marginal"][0])
    with store.database.read() as session:
        view = session.execute(
            sa.text(
                "SELECT draft, category, position, SUM(survived) / SUM(starts) FROM acceptance "
                "GROUP BY draft, category, position ORDER BY draft, category, position"
            )
        ).all()
    listed = [
        (row["draft"], row["category"], j, pytest.approx(marginal))
        for row in rows
        for j, marginal in enumerate(row["marginal"])
    ]
    assert [tuple(row) for row in view] == listed
    assert len(list(query.positions(store))) == 2 * 6 * 16


def test_executed_rounds_have_their_own_statistics(store: TraceStore) -> None:
    """A position is judged by the rounds that drafted as far, each for its own policy."""
    recording = a_recording(store, n=6)
    (row,) = query.acceptance(store, executed=True)
    steps = [s for i in range(6) for s in steps_of(a_trajectory(i))]
    want = step_survival(steps)
    assert (row["policy_id"], row["requests"], row["starts"]) == (POLICY_ID, 6, len(steps))
    assert row["marginal"] == pytest.approx(want.marginal)
    assert row["conditional"] == pytest.approx(want.conditional)
    assert row["mean_accepted_length"] == pytest.approx(sum(s.emitted for s in steps) / len(steps))
    store.put_policy(POLICY_ID, POLICY, "small")
    rows = query.acceptance(store, by=("category", "day"), executed=True)
    assert {r["policy"] for r in rows} == {"small"}
    assert rows == query.acceptance(
        store, TraceFilter(policy="small"), ("category", "day"), executed=True
    )
    assert [r["category"] for r in rows] == ["code", "math", "prose"]
    mixed = store.create_recording(Asked(PAIR, None, Sampling(), 8)).id
    drafted = [(4, 3, "a"), (1, 1, "a"), (1, 0, "b"), (0, 0, "b"), (2, 1, "a")]
    told, start = [], 0
    for n, kept, policy in drafted:
        told.append(Step(start, n, n + 1, kept, kept + 1, n, policy=policy, depth=n))
        start += kept + 1
    store.append_trajectory(mixed, 0, a_trajectory(0, n=10), told)
    one, other = query.acceptance(store, TraceFilter(recordings=(mixed,)), executed=True)
    assert (one["policy_id"], one["starts"], one["marginal"]) == ("a", 3, [1.0, 1 / 2, 1.0, 0.0])
    assert (other["policy_id"], other["starts"], other["marginal"]) == ("b", 2, [0.0])
    assert query.acceptance(store, TraceFilter(policy="b"), executed=True) == [other]
    assert len(query.acceptance(store, TraceFilter(recordings=(recording,)), executed=True)) == 1


def test_every_round_is_told_with_its_policy_and_moment(store: TraceStore) -> None:
    decoded(at(store, NOW), {POLICY_ID: 0.1, OTHER: 0.2}, n=2)
    rows = list(query.rounds(store))
    assert len(rows) == 2 * 16
    assert [r["policy_id"] for r in rows[:16]] == [POLICY_ID] * 8 + [OTHER] * 8
    assert {r["created_at"] for r in rows} == {NOW}
    assert [r["round"] for r in rows[16:]] == list(range(16))
    assert rows[15]["elapsed_s"] == pytest.approx(8 * 0.1 + 8 * 0.2)
    only = list(query.rounds(store, TraceFilter(policy=OTHER, request="r1")))
    assert [(r["request_id"], r["round"]) for r in only] == [("r1", n) for n in range(8, 16)]


def test_two_policies_are_compared_on_the_requests_that_both_decoded(store: TraceStore) -> None:
    rng = np.random.default_rng(0)
    seconds = rng.uniform(0.5, 1.5, (2, 8))
    names = []
    for policy, of, skipped in ((POLICY_ID, seconds[0], 0), (OTHER, 2 * seconds[1], 1)):
        made = decoded(store, {policy: 0.1}, n=0)
        names.append(made)
        for i in range(skipped, 8):
            steps = rounds_of(60, policy, seconds=of[i] / 15)
            store.append_trajectory(made, i, a_trajectory(i), steps)
    found = compare(store, POLICY_ID[:6], "autoregressive")
    assert found == {**compare(store, *names), "rows": found["rows"]}
    shared = {"a": seconds[0, 1:, None], "b": 2 * seconds[1, 1:, None]}
    ratio, low, high = Timings(shared).ratio("a", "b")
    assert found["requests"] == 7
    assert (found["ratio"], *found["interval"]) == pytest.approx((ratio, low, high))
    left, right = found["rows"]
    assert (left["emitted"], left["rounds"], left["tau"]) == (7 * 60, 7 * 15, 4.0)
    assert left["seconds"] == pytest.approx(seconds[0, 1:].sum())
    assert right["name"] == "autoregressive"
    one = compare(store, *names, TraceFilter(request="r3"))
    assert (one["requests"], one["interval"]) == (1, None)
    outcome = an_outcome()  # of r0 to r2
    run = store.put_run(PAIR, POLICY_ID, outcome, device="cpu", dtype="float32")
    ran = compare(store, run, names[1])
    emitted = sum(r.counts.emitted_tokens for r in outcome.per_request[1:])
    assert (ran["requests"], ran["rows"][0]["emitted"]) == (2, emitted)
    assert compare(store, POLICY_ID, "autoregressive")["ratio"] == found["ratio"]
    alone = decoded(store, {OTHER: 0.1}, n=0)
    store.append_trajectory(alone, 20, a_trajectory(20), rounds_of(60, OTHER))
    with pytest.raises(TraceError, match="share no request that was decoded in rounds"):
        compare(store, names[0], alone)
    with pytest.raises(NotFoundError, match="no recording, policy or run of that name"):
        compare(store, names[0], "nothing")


def test_a_mean_batch_of_a_half_is_rounded_alike_everywhere(store: TraceStore) -> None:
    store.put_pair(PAIR, "demo", {"target": "t"})
    made = store.create_recording(Asked(PAIR, None, Sampling(), 64)).id
    rounds = (((0, 0, 1, 0, 1), 2), ((1, 4, 5, 2, 3), 3))
    steps = [Step(*of, of[1], draft="small", policy=POLICY_ID, batch=n) for of, n in rounds]
    store.append_trajectory(made, 0, a_trajectory(0, n=4), steps)
    (told,) = query.speed(store, by=("batch",))
    (executed,) = query.acceptance(store, by=("batch",), executed=True)
    assert (told["mean_batch"], told["batch"], executed["batch"]) == (2.5, 3, 3)


def test_a_request_decoded_again_weighs_as_much_on_both_sides(store: TraceStore) -> None:
    """Else a policy would look slower for having met the slow requests more often."""
    for policy, times in ((POLICY_ID, (1, 5)), (OTHER, (2, 1))):
        for i, seconds in enumerate((0.1, 0.7)):
            for _ in range(times[i]):
                made = decoded(store, {policy: 0.1}, n=0)
                took = seconds * (1 if policy == POLICY_ID else 2)
                store.append_trajectory(
                    made, i, a_trajectory(i), rounds_of(60, policy, seconds=took)
                )
    found = compare(store, "small", "autoregressive")
    assert (found["ratio"], *found["interval"]) == pytest.approx((2, 2, 2))


def test_imported_samples_and_profiling_runs_are_no_traffic_unless_they_are_named(
    store: TraceStore,
) -> None:
    decoded(at(store, NOW), {POLICY_ID: 0.1, OTHER: 0.3}, n=2)
    before = [query.speed(store), query.acceptance(store, executed=True), query.requests(store)]
    compared = compare(store, "small", "autoregressive")
    latest = store.resolve_recording("latest")
    for source in ("sample", "profile"):
        asked = Asked(PAIR, None, Sampling(), 64, source=source)
        copy = store.create_recording(asked).id
        store.append_trajectory(copy, 0, a_trajectory(0), rounds_of(60, OTHER, seconds=0.9))
        after = [query.speed(store), query.acceptance(store, executed=True), query.requests(store)]
        assert after == before
        assert compare(store, "small", "autoregressive") == compared
        for only in (TraceFilter(recordings=(copy,)), TraceFilter(source=source)):
            assert [r["recording_id"] for r in query.requests(store, only)] == [copy]
        assert compare(store, copy, "small")["requests"] == 1
        assert store.resolve_recording("latest") == latest


def test_which_policy_was_in_force_when(store: TraceStore, url: str) -> None:
    decoded(store, {POLICY_ID: 0.1}, n=0)
    for day, policy, deployment in (
        (0, POLICY_ID, "default"),
        (1, OTHER, "canary"),
        (2, OTHER, "default"),
    ):
        how = {"actor": "test", "deployment": deployment}
        at(store, NOW + day * DAY).publish(PAIR, "cpu", policy, **how)
    rows = query.in_force(store)
    assert [(r["version"], r["policy"], r["since"], r["until"]) for r in rows] == [
        (3, "autoregressive", NOW + 2 * DAY, None),
        (2, "autoregressive", NOW + DAY, None),
        (1, "small", NOW, NOW + 2 * DAY),
    ]
    assert [r["version"] for r in query.in_force(store, "canary")] == [2]
    listed = Door(url).json("policies list")["publications"]
    assert [(r["version"], r["active"], r["until"]) for r in listed] == [
        (3, True, None),
        (2, True, None),
        (1, False, (NOW + 2 * DAY).isoformat()),
    ]


def test_what_a_policy_would_have_cost_on_the_traffic_of_a_day(
    store: TraceStore, url: str, tmp_path: Path
) -> None:
    """All that the pair decoded since, oldest first, whatever recording holds it; requests that
    lack a panorama are left out and told."""
    door, now = Door(url), datetime.now(UTC)
    for ago, n in ((3 * DAY, 5), (DAY / 2, 4), (DAY / 4, 3)):
        a_recording(at(store, now - ago), n=n)
    store.append_trajectory(store.resolve_recording("latest"), 9, a_trajectory(9))
    a_recording(store, n=2, drafts=())
    store.put_profile(flat_profile(PAIR, ["small"]))
    asked = ("simulate", "--policy", '{"draft": "small", "window": {"kind": "fixed", "gamma": 4}}')
    each = [door.json(*asked, recording=r.id) for r in store.list_recordings()[2:]]
    latest = door.json(*asked, "--since", "7h")
    whole = door.call(*asked, "--since", "24h", "--json")
    assert "left out: 3 of 10 requests, which lack panoramas" in whole.stderr
    assert latest["requests"] == 3
    file = tmp_path / "rounds.jsonl"
    door.json(*asked, since="24h", per_round=file)
    lines = map(json.loads, file.read_text().splitlines())
    assert [name for name, _ in groupby(lines, lambda line: line["request"])] == [
        "r0",
        "r1",
        "r2",
        "r3",
        "r0",
        "r1",
        "r2",
    ]
    found = door.json(*asked, since=f"{now - DAY:%Y-%m-%dT%H:%M}")
    for key in ("requests", "rounds", "emitted_tokens", "accepted_tokens"):
        assert found[key] == latest[key] + each[0][key]
    assert found["seconds"] == pytest.approx(latest["seconds"] + each[0]["seconds"])
    assert found["seconds"] > 0
    assert "has no draft 'small'" in door.error(*asked, since="1h")
    for since in (DAY, (now - DAY).replace(tzinfo=None)):
        with pytest.warns(UserWarning, match="left out: 3 of 10 requests"):
            rows = simulate(json.loads(asked[2]), db=url, since=since).rows
        assert len(rows) == found["requests"]
    assert "nothing was recorded" in door.error(*asked, since="2099-01-01")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("stats --by colour", "no group 'colour' here; there are: draft, category, day"),
        ("stats --by draft --speed", "no group 'draft' here; there are: policy, category, day"),
        ("show all --sort speed", "no column 'speed' to sort by"),
        ("show all --since yesterday", "--since: 'yesterday': a time is expected"),
        ("compare latest nothing", "nothing: no recording, policy or run of that name decoded"),
        (
            "export none.csv --since 1s --until 1s",
            "nothing that is stored matches; none.csv is not",
        ),
        ("export none.parquet --whole --pair-id 0", "matches; none.parquet is not written"),
        ("show latest --request r99", "has no request 'r99'"),
        ("show all --request r99", "request 'r99' is not stored; there are: r0, r1"),
        ("list --source served", "source 'served' is not stored; there are: record"),
        ("list --category chat", "category 'chat' is not stored; there are: "),
        ("stats --draft tiny", "draft 'tiny' is not stored; there are: "),
        ("stats --pair-id theirs", "pair 'theirs' is not stored; there are: demo"),
        ("stats --speed --policy fast", "policy 'fast' is not stored; there are: "),
    ],
)
def test_what_cannot_be_asked_is_one_line(tmp_path: Any, command: str, says: str) -> None:
    path = str(tmp_path / "a.db")
    with opened(path) as store:
        a_recording(store, n=2)
    found = Door(path).call(f"traces {command}")
    assert (found.exit_code, found.stdout) == (2, "")
    assert says in found.stderr


def test_answers_are_printed_and_limited(tmp_path: Any) -> None:
    door = Door(str(tmp_path / "a.db"))
    with opened(str(door.db)) as store:
        recording = decoded(store, {POLICY_ID: 0.1, OTHER: 0.2})
    slowest = door.json("traces show all", sort="tokens_per_s", rows=2)["requests"]
    assert [r["ordinal"] for r in slowest] == [5, 4]
    assert len(door.json("traces show", rows=3)["requests"]) == 3
    assert [r["policy"] for r in door.json("traces stats", by="policy,day")["stats"]] == [
        "small" if name == POLICY_ID else "autoregressive" for name in sorted((POLICY_ID, OTHER))
    ]
    for right in ("autoregressive", '{"draft": "none"}'):
        assert door.json("traces compare", "small", right)["ratio"] == pytest.approx(2.0)
    said = " ".join(door.call("traces compare", "small", "autoregressive").stdout.split())
    assert "small: 2.00 times as fast as autoregressive (95%: 2.00 to 2.00, 6 requests" in said
    one = door.call("traces compare small autoregressive --request r2").stdout
    assert "1 request that both" in " ".join(one.split())

    one = door.json("traces show", recording, request="r2")
    assert (one["text"], one["output_ids"]) == (None, a_trajectory(2).output_ids.tolist())
    assert one["undecoded"].startswith("no folder t here")
    assert len(one["rounds"]) == 16
    wide = {"COLUMNS": "120"}
    shown = door.call("traces show", recording, request="r2", env=wide).stdout
    assert "not decoded: " in shown
    assert shown.count(OTHER) == 8, "a line for each round"
    assert door.json("traces show all --policy autoregressive")["requests"]
    assert [info["id"] for info in door.json("traces list --pair-id demo")["recordings"]]
    assert door.json("traces stats --pair-id demo --source record")["stats"]
    assert "no publications stored" in door.call("policies list").stdout
    assert "no publications stored" in door.call("policies list --in-force").stdout
    with opened(str(door.db)) as store:
        decoded(store, {POLICY_ID: 0.1}, n=90)
    many = door.call("traces show all --json")
    assert len(json.loads(many.stdout)["requests"]) == 100
    assert "the first 100; --rows says how many" in many.stderr


def test_the_status_of_a_deployment_is_a_row(store: TraceStore, url: str) -> None:
    """What is in force, what it gained, what it has shown since, what is due; also where nothing is
    published yet."""
    door = Door(url)
    assert "nothing is published, followed or scheduled yet" in door.call("status").stdout
    decoded(at(store, NOW - DAY), {POLICY_ID: 0.1}, n=2)
    confirmed = Confirmation.of(POLICY_ID, (1.25, 1.1, 1.42), 9, 1)
    evidence = FASTER.model_copy(update={"confirmed": confirmed}).to_json()
    at(store, NOW).publish(PAIR, "cpu", POLICY_ID, actor="tune", reason="faster", evidence=evidence)
    (row,) = door.json("status")["deployments"]
    assert (row["version"], row["label"], row["since"]) == (1, "small", NOW.isoformat())
    assert row["proof"] == {"ratio": 1.25, "interval": [1.1, 1.42]}
    assert row["served_since"] is None, "what came before says nothing of it"
    decoded(at(store, NOW + DAY), {POLICY_ID: 0.1}, n=3)
    schedules.add_schedule(store.database, "nightly", "@daily", {"deployment": "canary"}, now=NOW)
    wrong = door.call("status --deployment canry")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "scheduled there; it is in: canary, default" in wrong.stderr
    (alone,) = door.json("status --deployment canary")["deployments"]
    assert alone["deployment"] == "canary"
    canary, default = sorted(
        door.json("status")["deployments"], key=lambda found: found["deployment"]
    )
    assert default["served_since"]["requests"] == 3
    assert default["served_since"]["tau"] == pytest.approx(4.0)
    assert (canary["version"], canary["scheduled"][0]["schedule"]) == (None, "nightly")
    shown = door.call("status", env={"COLUMNS": "250"}).stdout
    assert "1.25 (1.10 to 1.42)" in shown
    assert "default: faster" in shown
    assert "nothing is published" in shown
    assert f"nightly {canary['scheduled'][0]['next_at'][:10]} 00:00" in shown
    assert door.json("status --deployment canary")["deployments"] == [canary]
    looks = [{"pairs": 12, "ratio": 1.1, "interval": [0.9, 1.3]}]
    looks += [{"pairs": 24, "ratio": 1.28, "interval": [1.09, 1.49]}]
    how: Any = {"actor": "rollout", "evidence": {"rollout": {"looks": looks}}}
    at(store, NOW + DAY).publish(PAIR, "cpu", POLICY_ID, **how)
    assert "1.28 (1.09 to 1.49)" in door.call("status", env={"COLUMNS": "250"}).stdout

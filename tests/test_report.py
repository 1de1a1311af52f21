"""The tables that commands print."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from synthetic import policy

from spectune.optimizer.commands.printing import Meter, emit
from spectune.optimizer.report.tables import evidence_table, outcome_table, rows_table, score_table
from spectune.optimizer.texts import ComparedTexts
from spectune.optimizer.verdict import Candidate, Tuned
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.traces.schema import Counts, Outcome, RequestOutcome

FAST, DROPPED = policy("small", 4), policy("small", 8)


def candidate(
    role: str,
    policy: Policy,
    seconds: list[float],
    ratio: float,
    raced: tuple[float, float, float],
    *,
    left: bool,
) -> Candidate:
    """One executed on the first requests, each of 100 tokens, in so many seconds."""
    rows = [
        RequestOutcome(f"r{i}", "code", Counts(1, 50, 100, 50, 50, 50, 100, s))
        for i, s in enumerate(seconds)
    ]
    executed = Outcome(policy.label(), "executed", tuple(rows))
    return Candidate(role, policy, executed, executed, (ratio,) * 3, (ratio,) * 3, raced, left)


def tuned(winner: Candidate, incumbent: Candidate, *candidates: Candidate) -> Tuned:
    """The results of a tuning that published nothing."""
    return Tuned(
        winner, incumbent, candidates, "rec-1", "prof-1", "study-1",
        texts=ComparedTexts(0, 4, "float32"), test_requests=4, search_requests=6, trials=9,
        published=None, reason="said why",
    )  # fmt: skip


PLAIN = candidate(
    "autoregressive", AUTOREGRESSIVE, [1.0, 1.0, 3.0, 3.0], 1.0, (0.625, 0.6, 0.65), left=False
)
WINNER = candidate("finalist 1", FAST, [0.5, 0.5, 2.0, 2.0], 1.6, (1.0, 1.0, 1.0), left=True)
SLOWER = candidate("finalist 2", DROPPED, [0.6, 0.6], 1.667, (0.83, 0.8, 0.86), left=False)


def test_the_evidence_compares_policies_that_were_not_executed_on_the_same_requests() -> None:
    """A policy that was dropped after two easy requests has the most tokens/s, and is not the
    fastest."""
    text = printed(evidence_table(tuned(WINNER, PLAIN, WINNER, SLOWER, PLAIN)))
    same = "0 of 4 texts differ (float32; autoregression was not repeated)"
    assert same in " ".join(text.split())
    lines = text.splitlines()
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")
    ]
    assert [row[0] for row in rows] == ["finalist 1", "finalist 2", "autoregressive"]
    assert float(rows[1][4]) > float(rows[0][4])
    assert [row[6] for row in rows] == ["4 of 4", "2 of 4", "4 of 4"]
    assert [row[8] for row in rows] == ["1.600", "1.667", "1.000"]
    assert [row[9] for row in rows] == ["1.000", "0.830 (0.800-0.860)", "0.625 (0.600-0.650)"]
    assert any("dropped early, behind beyond noise: 1;" in line for line in lines)


def test_a_prediction_is_shown_as_made_and_after_the_factor_fitted_to_the_same_executions() -> None:
    """Speeds that are all predicted twice too high are off by 100%, whatever a factor that is
    fitted afterwards brings that to."""
    twice = [
        replace(c, predicted=Outcome(c.policy.label(), "replayed", in_half_the_time(c)))
        for c in (WINNER, SLOWER, PLAIN)
    ]
    made = replace(tuned(twice[0], twice[2], *twice), common_factor=0.5)
    assert made.to_json()["prediction"] == {
        "policies": 3,
        "median_error": pytest.approx(1.0),
        "largest_error": pytest.approx(1.0),
        "common_factor": 0.5,
        "median_error_after_factor": pytest.approx(0.0),
        "largest_error_after_factor": pytest.approx(0.0),
    }
    (first, *_) = made.to_json()["candidates"]
    assert first["predicted_tokens_per_s"] == pytest.approx(160.0)
    assert first["predicted_after_factor_tokens_per_s"] == pytest.approx(80.0)
    text = printed(evidence_table(made))
    assert text.count("+100.0% (+0.0%)") == 3
    assert (
        "Predicted speeds were off by 100.0% in the median of 3 policies; after one common factor "
        "fitted to these executions (0.500), by 0.0%" in text
    )


def in_half_the_time(c: Candidate) -> tuple[RequestOutcome, ...]:
    """What was executed, twice as fast."""
    return tuple(
        replace(r, counts=replace(r.counts, seconds=r.counts.seconds / 2))
        for r in c.executed.per_request
    )


def test_the_evidence_is_silent_on_who_was_dropped_where_nobody_was() -> None:
    winner = replace(WINNER, left=True)
    plain = replace(PLAIN, raced=(0.5, 0.0, float("inf")), left=True)
    lines = printed(evidence_table(tuned(winner, plain, winner, plain))).splitlines()
    assert not any("dropped" in line for line in lines)
    (row,) = (x for x in lines if "autoregressive" in x and x.startswith("│"))
    assert row.rstrip(" │").endswith("0.500")


def test_latency_is_measured_to_the_first_token_and_per_later_one() -> None:
    """Two requests of 11 and 21 tokens, one of a single token, and one whose rounds were not
    timed."""
    rows = [(11, 1.5, 0.5), (21, 2.0, 1.0), (1, 3.0, 3.0), (9, 9.0, 0.0)]
    outcome = Outcome(
        "p",
        "executed",
        tuple(RequestOutcome("r", "c", Counts(1, 1, n, seconds=s), first) for n, s, first in rows),
    )
    latency = outcome.latency()
    assert latency is not None
    assert latency["requests"] == 3
    assert latency["time_to_first_token_s"] == {
        "mean": 1.5,
        "p50": 1.0,
        "p95": pytest.approx(2.8),
        "p99": pytest.approx(2.96),
    }
    assert latency["time_per_output_token_s"]["p50"] == pytest.approx(0.075)
    assert latency == outcome.to_json()["latency"]
    assert "time to first token: p50 1000.0, p95 2800.0, p99 2960.0 ms" in printed(
        outcome_table(outcome)
    )
    assert Outcome("p", "replayed", outcome.per_request[3:]).latency() is None


HOSTILE = "[/b][math] :smile: \x1b[31m\x9b2J\x07\nsecond"
SHOWN = "[/b][math] :smile: \ufffd[31m\ufffd2J\ufffd"


def printed(view: object) -> str:
    """What a console prints that reads markup, as rich's do."""
    out = io.StringIO()
    Console(file=out, width=300, color_system=None).print(view)
    return out.getvalue()


def test_what_users_named_is_shown_as_it_is() -> None:
    counts = Counts(1, 50, 100, 50, 50, 50, 100, 1.0)
    outcome = Outcome(
        HOSTILE,
        "executed",
        (RequestOutcome("r", HOSTILE, counts), RequestOutcome("s", "[b]", counts)),
    )
    loss = dict.fromkeys(("fitted", "default", "probability"), 0.1)
    rank = dict.fromkeys(("rank", "laws", "observed", "predicted", "default", "probability"), 1)
    about = {"width": 2, "sharpness": 1.0, "held_out": 1, "covered": 1.0, "laws": 1}
    views = [
        outcome_table(outcome),
        rows_table([{"a": HOSTILE}, {"a": "[/b]"}], ("a",), HOSTILE),
        score_table({"draft": HOSTILE, "ranks": [rank], "loss": loss, "at_border": False, **about}),
    ]
    for view in views:
        text = printed(view)
        assert f"{SHOWN}\\nsecond" in " ".join(text.split())
        assert not set(text) & {"\x1b", "\x9b", "\x07"}
    assert printed(views[0]).count(SHOWN) == 2
    assert "[b]" in printed(views[0])
    assert "[/b] " in printed(views[1])


def test_plain_lines_and_progress_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    emit({}, f"pair {HOSTILE}")
    with Meter() as meter:
        meter(HOSTILE, 0, 1)
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert SHOWN in text
        assert not set(text) & {"\x1b", "\x9b", "\x07"}


def test_a_progress_bar_on_a_terminal_reads_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    with Meter() as meter:
        meter("nightly: [/b] [math]\x07", 0, 2)
        meter("nightly: [/b] [math]\x07", 2, 2)
    assert "nightly: [/b] [math]\ufffd" in out.getvalue()

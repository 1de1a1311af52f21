"""What a tuning says at its end: its table, its last lines, its page; and that text from elsewhere
is only shown."""

from __future__ import annotations

import html
import io
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from browser import laid_out
from pairs import fixed
from rich.console import Console
from synthetic import policy

from spectune.optimizer.commands.outcomes import outcome_result
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.commands.terminal import Meter, Terminal
from spectune.optimizer.commands.tune import tuning_result
from spectune.optimizer.report.names import short_name
from spectune.optimizer.report.tuning_page import TuningReport, deploy_command, page
from spectune.optimizer.report.words import (
    closing,
    confirmed_in_words,
    headline,
    policy_in_words,
    reasons,
    savings,
)
from spectune.optimizer.tuning.confirmation import Confirmation
from spectune.optimizer.tuning.pipeline import pace_of_race
from spectune.optimizer.tuning.texts import ComparedTexts
from spectune.optimizer.tuning.tuned import (
    AT_A_RATE,
    GAINS,
    Candidate,
    PublishedAs,
    RoundsOfOne,
    Tuned,
    TuningEvidence,
)
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.sanity import Sanity
from spectune.traces.schema import Counts, Outcome, RequestOutcome
from spectune.traces.tables import Study

FAST, DROPPED = policy("small", 4), policy("small", 8)
HOSTILE = "</title><script>document.title='no'</script> $x$ [/b][math] \x1b[31m\x07 日本"
SHOWN = "</title><script>document.title='no'</script> $x$ [/b][math] \ufffd[31m\ufffd 日本"


MANY_SIZES = parse_policy(
    {
        "draft": "a-draft-with-a-long-name-of-its-own",
        "window": {
            "kind": "by_load",
            "gamma": {"1": 8, "2": 7, "4": 6, "8": 5, "16": 4, "32": 3, "64": 0},
        },
    }
)
BINNED_TREE = parse_policy(
    {
        "draft": "head",
        "window": {"kind": "analytic", "gamma_max": 14, "gamma_min": 2},
        "growth": {"kind": "top_k", "width": 12, "score": "coupled"},
        "select": {"top_n": 60},
        "stratify": {"artifact": "bins", "alpha": 2},
    }
)


def candidate(
    role: str, policy: Policy, seconds: list[float], ratio: float, *raced: float, survived: bool
) -> Candidate:
    """One executed on the first requests, of 100 tokens each, and predicted to be twice as fast."""
    executed, predicted = (
        Outcome(policy.label(), kind, tuple(
            RequestOutcome(f"r{i}", "code", Counts(1, 50, 100, 50, 50, 50, 100, s / speed), 0.1)
            for i, s in enumerate(seconds)
        ))
        for kind, speed in (("executed", 1), ("replayed", 2))
    )  # fmt: skip
    over, (low, middle, high) = (ratio,) * 3, raced
    about = (low, middle, high), survived, len(seconds)
    return Candidate(role, policy, predicted, executed, over, over, *about)


PLAIN = candidate(
    *("autoregressive", AUTOREGRESSIVE, [1.0, 1.0, 3.0, 3.0], 1.0),
    *(0.625, 0.6, 0.65),
    survived=False,
)
WINNER = candidate("finalist 1", FAST, [0.5, 0.5, 2.0, 2.0], 1.6, *(1.0, 1.0, 1.0), survived=True)
SLOWER = candidate("finalist 2", DROPPED, [0.6, 0.6], 1.667, *(0.83, 0.8, 0.86), survived=False)
CONFIRMED = Confirmation.of(FAST.id, (1.5, 1.25, 2.0), 7, 1)


def why(confirmed: Confirmation | None, incumbent: Candidate) -> str:
    labels = FAST.label(), incumbent.policy.label()
    return confirmed_in_words(confirmed, *labels) if confirmed else "none is faster"


def tuned(winner: Candidate, incumbent: Candidate, *candidates: Candidate, **more: Any) -> Tuned:
    """The results of a tuning that published nothing."""
    return Tuned.of(
        winner, candidates, recording="rec-1", study="study-1",
        texts=ComparedTexts(0, 4, "float32"), search_requests=6, trials=9,
        **{"reason": why(more.get("confirmed"), incumbent), "common_factor": 0.5, **more},
    )  # fmt: skip


def changed(made: Tuned, **fields: Any) -> Tuned:
    return made.model_copy(update=fields)


def results(winner: Candidate, incumbent: Candidate, **more: Any) -> Tuned:
    raced = (WINNER, SLOWER, PLAIN, replace(incumbent, role="incumbent"))
    return tuned(winner, incumbent, *raced, **more)


FASTER = results(WINNER, PLAIN, confirmed=CONFIRMED)


def printed(result: Result, width: int = 300) -> str:
    out = io.StringIO()
    result.print(Console(file=out, width=width, color_system=None), as_json=False)
    return out.getvalue()


def test_the_evidence_compares_policies_that_were_not_executed_on_the_same_requests() -> None:
    """A policy that was dropped after two easy requests has the most tokens/s and is not the
    fastest. Speeds predicted twice too high are off by 100%, whatever the factor fitted after."""
    text = printed(tuning_result(FASTER))
    rows = [re.split(" *│ *", line)[1:] for line in text.splitlines() if line.startswith("│")]
    names = ["winner: small K=4", "small K=8", "autoregressive, incumbent"]
    assert [r[0] for r in rows] == names
    assert float(rows[1][3]) > float(rows[0][3])
    assert [row[4] for row in rows] == ["+100.0% (+0.0%)"] * 3
    assert [row[5] for row in rows] == ["4 of 4", "2 of 4", "4 of 4"]
    assert [row[6] for row in rows] == ["1.600", "1.667", "1.000"]
    assert [row[7] for row in rows] == ["1.000", "0.830 (0.800-0.860)", "0.625 (0.600-0.650)"]
    assert re.search(r"winner: .* 1\.600 .* 1\.000", printed(tuning_result(FASTER), 100))
    assert "dropped early, behind beyond noise: 1;" in text
    assert "off by 100.0% in the median of 3 policies; after one common factor" in text
    assert "0 of 4 texts differ (float32; autoregression was not repeated)" in text
    assert "time to first token: p50 100.0, p95 100.0, p99 100.0 ms" in text


def test_it_says_how_often_what_was_held_out_had_confirmed_a_policy() -> None:
    told = closing(FASTER, "here", ())
    assert "had confirmed policies" not in told
    again = closing(changed(FASTER, earlier_confirmations=2), "here", ())
    assert "held out had confirmed policies 2 times before" in " ".join(again.split())


def test_what_users_named_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = (RequestOutcome("r", HOSTILE, Counts(1)), RequestOutcome("s", "[b]", Counts(1)))
    table = Table([{"a": f"{HOSTILE}\nsecond"}, {"a": "[/b]"}], ("a",), HOSTILE)
    view = Result("", {}, (), [table])
    texts = [printed(outcome_result(Outcome(HOSTILE, "executed", requests), {})), printed(view)]
    assert "[b]" in texts[0]
    assert f"{SHOWN}\\nsecond" in texts[1]
    with Terminal(as_json=False) as shell:
        shell.talk.progress(HOSTILE, 0, 1)
        shell.print(Result(f"pair {HOSTILE}", {}))
    texts += capsys.readouterr()
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.stderr", terminal := io.StringIO())
    with Terminal(as_json=False) as shell:
        shell.talk.progress(HOSTILE, 0, 2)
    assert all(SHOWN in text for text in (*texts, terminal.getvalue()))
    assert not any(set(text) & {"\x1b", "\x07"} for text in texts)


def test_a_log_says_each_half_minute_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 0.0, 10.0, 31.0, 40.0, 62.0, 90.0])
    meter = Meter(lambda: next(clock))
    for done in (0, 10, 25, 30, 50, 100):
        meter("decode", done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "decode: 100",
        "decode: 25 of 100, about 93 s left",
        "decode: 50 of 100, about 62 s left",
    ]


TREE = {"draft": "head", "window": fixed(6), "growth": {"kind": "top_k"}, "select": {"top_n": 24}}
TREE |= {"shortlist": {"kind": "frequency", "artifact": "abc", "size": 512}}
BY_PROMPT = {"draft": "small", "window": fixed(2), "by_prompt": {"artifact": "abc", "others": [{}]}}


def test_policies_in_words() -> None:
    for document, words in (
        (TREE, "head drafts EAGLE-2 trees of 6 levels, 24 nodes verified, over a shortlist of 512"),
        (BY_PROMPT, "one of: small drafts 2 tokens a round; no draft, one token a round"),
    ):
        assert words in policy_in_words(parse_policy(document).spelled_out())


def test_short_names() -> None:
    heuristic = {"kind": "heuristic", "gamma_max": 20}
    stop = {"kind": "max_prob", "threshold": 0.206}
    for made, name in (
        (AUTOREGRESSIVE, "autoregressive"),
        (policy("small", 0), "small K=0"),
        (FAST, "small K=4"),
        (MANY_SIZES, "a-draft-with-a-long-name-of-its-own by load 1:8 .. 64:0"),
        (BINNED_TREE, "head analytic 2-14 tree 12 coupled N=60 bins 2"),
        (
            parse_policy({"draft": "a", "window": heuristic, "stop": stop}),
            "a heuristic 20 max prob 0.21",
        ),
        (
            parse_policy({"draft": "a", "shortlist": {"kind": "clusters", "artifact": "x"}}),
            "a K=4 clusters 12",
        ),
        (parse_policy(BY_PROMPT), parse_policy(BY_PROMPT).label()),
    ):
        assert short_name(made) == name


def report(made: Tuned, **more: Any) -> TuningReport:
    """What is stored of a tuning with these results."""
    evidence = TuningEvidence(
        tuned=changed(made, **more),
        categories={
            PLAIN.policy.id: {HOSTILE: 50.0, "prose": 9.0},
            made.winner.id: {HOSTILE: 80.0, "prose": 10.0},
        },
        rounds=RoundsOfOne(
            request=HOSTILE,
            text="t0 t1 t2 t3 t4",
            rounds=((4, 4, 5), (4, 0, 1), (4, 2, 3)),
        ),
        about={"pair": HOSTILE, "device": "cuda", "deployment": "a b"},
    )
    evidence = TuningEvidence.model_validate_json(evidence.model_dump_json())
    trials = [{"policy": p.spelled_out(), "value": 90.0} for p in (FAST, DROPPED, AUTOREGRESSIVE)]
    summary = {"by_prompt": f"gains nothing {HOSTILE}"}
    study = Study("study-1", "pair-1", "rec-1", "none", 0, len(trials), summary, trials)
    study.created_at = datetime(2026, 5, 4, tzinfo=UTC)
    accepted = {"small": (0.7, 0.5, 0.4), HOSTILE: (0.2,)}
    return TuningReport(study, evidence, accepted, read_pair("demo").to_json())


SLIGHT = results(SLOWER, SLOWER, confirmed=Confirmation.of(FAST.id, (1.02, 0.97, 1.07), 7, 1))
LATE = "version 7 came into force meanwhile and was not compared, so it stays"
AHEAD = replace(SLOWER, raced=(1.01, 0.9, 1.1), survived=True)
TIED = (WINNER, AHEAD, PLAIN, replace(PLAIN, role="incumbent"))
SIMPLER = "was 1.0% ahead in the race, as projected to all of its requests, within noise: of equals"
PUBLISHED = {"published": PublishedAs(version=3, policy=FAST.id, deployment="a b")}
GAINED = "1.50 times as fast as decoding without a draft"
DEPLOY, IN_FORCE = f"Deploy small K=4: {GAINED}", f"small K=4 is published: {GAINED}"
KEEP = "No faster policy was confirmed; nothing was changed"
RUN = "run --policy active --pair demo --deployment 'a b'"
ACTIVATE = f"policies activate {FAST.id} --pair demo --deployment 'a b'"


@pytest.mark.parametrize(
    ("made", "more", "first", "last_line", "command"),
    [
        (FASTER, PUBLISHED, IN_FORCE, "here, as version 3: small K=4 (small drafts 4", RUN),
        (FASTER, {}, DEPLOY, "Nothing was published. Winner here: small", ACTIVATE),
        (FASTER, {"blocked": "no trees"}, DEPLOY, "Nothing was published: no trees. Winner", None),
        (FASTER, {"blocked": LATE}, DEPLOY, f"published: {LATE}.", None),
        (tuned(WINNER, PLAIN, *TIED, confirmed=CONFIRMED), {}, DEPLOY, SIMPLER, ACTIVATE),
        (results(SLOWER, SLOWER), {}, KEEP, "Nothing changes here: small K=8", None),
        (SLIGHT, {}, KEEP, "held out to confirm it: the gain is not beyond noise.", None),
        (results(PLAIN, PLAIN), {}, KEEP, "Nothing changes", None),
    ],
)
def test_the_page_and_the_last_lines_say_what_to_deploy(
    made: Tuned, more: dict[str, Any], first: str, last_line: str, command: str | None
) -> None:
    stored = report(made, **more)
    text = html.unescape(page(stored, gpus=8, price=2.5))
    assert f"<h1>{first}" in text
    assert re.findall("<pre>spectune (.*)</pre>", text) == ([command] if command else [])
    assert ("<p>Nothing was published: " in text) == ("blocked" in more)
    for saved in (
        "1.74 (98% interval 0.87 to 3.47) GPU hours per million tokens; with 8 busy devices, 64.0",
        "At 2.5 an hour: 4.34 (98% interval 2.17 to 8.68) per million tokens, 160.00 ",
    ):
        assert (saved in text) == (first != KEEP)
    last = closing(
        stored.evidence.tuned, "here", [("spectune run --policy active", "decodes with it")]
    )
    gain = "was 1.500 times as fast as autoregressive (98% interval 1.250 to 2.000) on 7 requests"
    assert max(map(len, last.splitlines())) < 80
    last = " ".join(last.split())
    assert (gain in last) == (first != KEEP)
    assert last_line in last
    assert last.endswith(" # decodes with it spectune run --policy active")
    winner = html.unescape(" ".join(re.findall('<tr class="winner">.*?</tr>', text, re.DOTALL)))
    assert (">kept" if first == KEEP else ">winner") in winner
    assert short_name(stored.evidence.tuned.winner.policy) in winner


@pytest.mark.parametrize(
    ("gain", "told"),
    [
        (GAINS["throughput"], "times as fast as"),
        (GAINS["tpot"], "times as fast per output token as"),
        (GAINS["goodput"], "times the goodput of"),
        (AT_A_RATE, "times the tokens/s of"),
    ],
)
def test_a_gain_is_told_by_what_was_measured(gain: str, told: str) -> None:
    """Device hours are saved where the same work takes less time; units need not be requests."""
    said = confirmed_in_words(CONFIRMED.model_copy(update={"unit": "runs"}), "a", "b", gain)
    assert f"a was 1.500 {told} b (98% interval 1.250 to 2.000) on 7 runs held out" in said
    made = changed(FASTER, gain=gain, unit="runs", reason=said)
    first = f"Deploy small K=4: 1.50 {told} decoding without a draft"
    assert headline(made) == first
    saved = " ".join(savings(made, "cuda", load="poisson:4"))
    assert ("GPU hours per million tokens" in saved) == (gain == GAINS["throughput"])
    shown = printed(tuning_result(made))
    assert "3 executed on 4 runs with others" in shown
    assert re.search(r"│ *runs *│|┃ *runs *┃", shown)


def test_the_winner_is_compared_with_all_that_was_executed_alike() -> None:
    """By category too; where nothing won nobody is said to be the fastest."""
    speeds = {WINNER: 80.0, PLAIN: 50.0, AHEAD: 90.0}

    def pages(made: Tuned) -> str:
        stored = report(made)
        by_policy = {c.policy.id: {"code": v, "prose": 60.0} for c, v in speeds.items()}
        by_policy[AHEAD.policy.id]["prose"] = 10.0
        by_policy[WINNER.policy.id]["prose"] = 61.0
        evidence = stored.evidence.model_copy(update={"categories": by_policy})
        return html.unescape(page(replace(stored, evidence=evidence)))

    ahead = replace(AHEAD, units=4)
    raced = (WINNER, ahead, PLAIN, replace(PLAIN, role="incumbent"))
    text = pages(tuned(WINNER, PLAIN, *raced, confirmed=CONFIRMED))
    assert "The winner is fastest in 1 of 2 categories" in text
    assert "of 3 policies that were executed on the same requests" in text
    assert "The winner" not in pages(results(PLAIN, PLAIN))


def test_one_factor_is_told_where_predictions_are_nearer_after_it() -> None:
    """That which is fitted to requests may take policies farther off."""
    made = results(WINNER, PLAIN, common_factor=0.4)  # 100% off as predicted, 20% after it
    assert made.prediction is not None
    assert made.prediction.median_error_after_factor == pytest.approx(0.2)
    worse = results(WINNER, PLAIN, common_factor=2.0)
    assert worse.prediction is not None
    assert (worse.prediction.common_factor, worse.prediction.largest_error) == (None, 1.0)
    text = printed(tuning_result(worse))
    assert "were off by 100.0% in the median of 3 policies\n" in text
    assert "factor" not in text
    assert [c.predicted_after_factor_tokens_per_s for c in worse.candidates] == [None] * 4


def test_what_speaks_against_the_figures_stands_in_the_verdict() -> None:
    doubtful = changed(FASTER, workload=Sanity(18, repetitive=18))
    line = "Beware: 18 of 18 texts end in a cycle that repeats itself"
    assert line in " ".join(closing(doubtful, "here", []).split())
    assert line in " ".join(reasons(doubtful))
    assert "Beware" not in closing(FASTER, "here", [])


def test_the_page_of_an_engine_names_no_command_of_the_native_decoder() -> None:
    stored = report(changed(FASTER, unit="runs"), **PUBLISHED)
    about = stored.evidence.about
    about |= {"engine": "vLLM 0.32.0", "deployment": "vllm"}
    text = html.unescape(page(stored))
    assert re.findall("<pre>(.*)</pre>", text) == ["spectune policies list --deployment vllm"]
    assert "6 requests to search, 4 runs to race, 7 runs to confirm" in text
    unpublished = report(changed(FASTER, unit="runs"))
    unpublished.evidence.about.update(about)
    command, _ = deploy_command(unpublished)
    assert command.endswith(f"{FAST.id} --pair demo --deployment vllm --device cuda")


def test_two_policies_of_one_label_are_told_apart() -> None:
    first = parse_policy(BY_PROMPT)
    second = parse_policy({**BY_PROMPT, "window": fixed(3)})
    assert first.label() == second.label()
    raced = [replace(SLOWER, policy=policy) for policy in (first, second)]
    incumbent = replace(raced[0], role="incumbent")
    text = printed(tuning_result(tuned(raced[0], incumbent, *raced, incumbent)))
    assert all(f"{p.label()} [{p.id[:6]}]" in text for p in (first, second))


def long_labels() -> Tuned:
    """A tuning whose winner and others have long names."""
    winner = replace(WINNER, policy=MANY_SIZES)
    others = [replace(SLOWER, policy=one) for one in (BINNED_TREE, DROPPED, FAST)]
    confirmed = CONFIRMED.model_copy(update={"id": MANY_SIZES.id})
    raced = (winner, *others, PLAIN, replace(PLAIN, role="incumbent"))
    return tuned(winner, PLAIN, *raced, confirmed=confirmed)


def under_load() -> TuningReport:
    """A tuning of an engine, of two loads."""
    made = report(changed(FASTER, unit="runs"), **PUBLISHED)
    loads = {"clients:1": 50.0, "poisson:0.25 of 200 requests": 9.0}
    made.evidence.categories.update({PLAIN.policy.id: loads, FAST.id: loads})
    made.evidence.about.update({"engine": "vLLM 0.32.0", "deployment": "vllm", "load": "clients:1"})
    return made


def test_the_page_is_whole_and_nothing_in_it_acts(tmp_path: Path) -> None:
    """In a browser, where there is one, all text lies within its chart and can be read, also with
    long names and where nothing won."""
    text = page(report(FASTER, **PUBLISHED))
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    panels = {"prediction", "race", "executed", "categories", "latency", "positions"}
    assert panels | {"rounds", "tried", "by-prompt"} <= set(ids)
    assert not re.search(r"<script|<link|<img|<a |src=|@import|url\((?!#)| on\w+=", text)
    assert not set(text) & {"\x1b", "\x07"}
    plain = html.unescape(text)
    for words in (
        *(SHOWN, f"gains nothing {SHOWN}", "A draft for each prompt"),
        "6 of 12 drafted tokens accepted, 9 tokens in 3 rounds",
        *("t0 t1 t2 t3 t4", "small: chains", "measured (tokens/s)", "speed over the fastest's"),
        *("winner: small K=4", "autoregressive, incumbent"),
    ):
        assert words in plain
    pages = {
        "gain": text,
        "long labels": page(report(long_labels())),
        "no winner": page(report(results(PLAIN, PLAIN))),
        "under load": page(under_load()),
    }
    assert laid_out(pages, tmp_path) == (IN_FORCE, [])


def test_a_machine_whose_speed_changed_is_told_first() -> None:
    """Of all that is said, on the page and at the end of the command, and what to do."""
    steady = changed(FASTER, probes_s=(1.0, 1.1, 1.05))
    assert "speed changed" not in closing(steady, "here", [])
    drifted = changed(FASTER, probes_s=(1.0, 1.3, 1.1, 1.0))
    first = closing(drifted, "here", []).split("\n\n")[0]
    assert "up to 30% longer at one time than at another" in " ".join(first.split())
    assert "tune again" in first
    assert "up to 30% longer" in html.unescape(page(report(drifted)))


def test_predictions_are_of_the_machine_as_it_was_in_the_race() -> None:
    """Where work took half as long again as beside the profile, all is predicted so much slower."""
    assert pace_of_race([0.1, 0.15, 0.15]) == pytest.approx(1.5)
    assert pace_of_race([0.1, 0.15]) == 1.0, "no profile with a probe"
    predicted = WINNER.predicted
    assert predicted is not None
    slower = predicted.scaled(1.5).total
    assert slower.tokens_per_s == pytest.approx(predicted.total.tokens_per_s / 1.5)
    assert slower.emitted_tokens == predicted.total.emitted_tokens

"""What a tuning says at its end, in words and as a page, of results that are made up."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from pairs import fixed
from test_report import DROPPED, FAST, PLAIN, SLOWER, WINNER
from test_report import tuned as results

from spectune.optimizer.confirm import Confirmation
from spectune.optimizer.execute import Comparison
from spectune.optimizer.report.evidence import evidence_document
from spectune.optimizer.report.tuning import TuningReport, page
from spectune.optimizer.report.words import closing, policy_in_words, verdict_in_words
from spectune.optimizer.texts import ComparedTexts
from spectune.optimizer.timings import Timings
from spectune.optimizer.verdict import Candidate
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.traces.tables import Study

# In the results SLOWER is behind the incumbent, too.
BEHIND = replace(SLOWER, ratio=(0.8,) * 3, over_plain=(0.8,) * 3)


def tuned(winner: Candidate, incumbent: Candidate, **more: Any) -> dict[str, Any]:
    """The results of a tuning, as ``tune --json`` prints them."""
    candidates = (WINNER, BEHIND, PLAIN, replace(incumbent, role="incumbent"))
    return {**results(winner, incumbent, *candidates).to_json(), **more}


PUBLISHED = {"published": {"version": 3, "policy": FAST.id}}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"draft": "none"}, "no draft, one token a round"),
        ({"draft": "small", "window": fixed(4)}, "small drafts 4 tokens a round"),
        (
            {
                "draft": "small",
                "window": {"kind": "fsm", "gamma_max": 8},
                "stop": {"kind": "max_prob", "threshold": 0.4},
            },
            "small drafts up to 8 tokens a round, as its window (fsm) says, and "
            "stops where its next token is unsure",
        ),
        (
            {"draft": "head", "window": fixed(6), "growth": {"kind": "top_k"}}
            | {"select": {"top_n": 24}}
            | {"shortlist": {"kind": "frequency", "artifact": "abc", "size": 512}},
            "head drafts EAGLE-2 trees of 6 levels, 24 nodes verified, over a shortlist of "
            "512 tokens",
        ),
        (
            {"draft": "small", "window": {"kind": "by_batch", "gamma": {"1": 6, "4": 2, "9": 0}}},
            "small drafts up to 6 tokens a round, as its window (by_batch) says",
        ),
        (
            {"draft": "small", "window": fixed(2)}
            | {"by_prompt": {"artifact": "abc", "others": [{}]}},
            "for each prompt one of: small drafts 2 tokens a round; no draft, one token a round",
        ),
    ],
)
def test_policies_in_words(document: dict[str, Any], words: str) -> None:
    assert policy_in_words(parse_policy(document).spelled_out()) == words


CONFIRMED = {"id": FAST.id, "ratio": 1.02, "interval": [0.97, 1.07], "level": 0.99, "requests": 7}
HELD = {"confirmed": CONFIRMED, "confirm_requests": 7}
LATE = "version 7 came into force meanwhile and was not compared, so it stays"
CLOSING = "# decodes with what is published\ncli.py run --policy active"


def last_lines(found: dict[str, Any]) -> str:
    """What ``tune`` ends with, on one line; each line of text is within 80 columns."""
    commands = [("cli.py run --policy active", "decodes with what is published")]
    text = closing(found, "for pair demo on cpu", commands)
    assert max(map(len, text.splitlines())) < 80
    assert text.endswith(f"\n{CLOSING}")
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            tuned(WINNER, PLAIN, **PUBLISHED),
            "Published for pair demo on cpu, as version 3: small drafts 4 tokens a round "
            "(`policies deployments` shows who applied it). It "
            "decodes 1.60 times as fast as decoding without a draft (95% interval 1.60 to 1.60): "
            "80 tokens/s on 4 requests",
        ),
        (
            tuned(WINNER, BEHIND, **PUBLISHED),
            "times as fast as what was in force (small fixed(gamma=8))",
        ),
        (tuned(WINNER, PLAIN), "Nothing was published, as asked. The winner for pair demo"),
        (
            tuned(WINNER, PLAIN, refused="deployment vllm: vLLM cannot run trees"),
            "Nothing was published: deployment vllm: vLLM cannot run trees. The winner: small",
        ),
        (
            tuned(BEHIND, BEHIND),
            "Nothing changes for pair demo on cpu: small drafts 8 tokens a round. Nothing executed "
            "is faster beyond noise; the best of the others, small fixed(gamma=4), decodes 1.60 "
            "times as fast",
        ),
        (
            tuned(WINNER, PLAIN, reason=LATE, superseded_by=7),
            "Nothing was published: version 7 came into force meanwhile",
        ),
        (
            tuned(BEHIND, BEHIND, **HELD),
            "decodes 1.02 times as fast (99% interval 0.97 to 1.07) on 7 requests held out to "
            "confirm it.",
        ),
        (
            tuned(WINNER, PLAIN, **HELD, ratio_to_incumbent=[1.5, 1.25, 2.0], **PUBLISHED),
            "1.50 times as fast as decoding without a draft (99% interval 1.25 to 2.00) on 7 "
            "requests held out",
        ),
        (
            tuned(PLAIN, PLAIN, published={"version": 1, "policy": AUTOREGRESSIVE.id}),
            "Published for pair demo on cpu, as version 1: no draft, one token a round "
            "(`policies deployments` shows who applied it). Nothing "
            "executed",
        ),
    ],
)
def test_the_last_lines_say_what_is_in_force(found: dict[str, Any], words: str) -> None:
    assert words in last_lines(found)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        ([1.5, 1.25, 2.0], "1.74 GPU hours per million tokens (99% interval 0.87 to 3.47)"),
        ([1.5, 0.0, None], "1.74 GPU hours per million tokens where requests"),
    ],
)
def test_savings_come_with_the_interval_that_is_known(
    ratio: list[float | None], words: str
) -> None:
    """Studies that were stored before winners were confirmed may know no lower end."""
    found = tuned(WINNER, PLAIN, **HELD, ratio_to_incumbent=ratio, **PUBLISHED)
    assert words in verdict_in_words(found, "cuda")


@pytest.mark.parametrize(
    ("ratio", "requests", "why"),
    [
        ((1.02, 0.97, 1.07), 7, "the gain is not beyond noise"),
        ((1.5, 1.4, 1.6), 4, "4 requests are too few, 5 are needed"),
        ((1.005, 1.002, 1.008), 7, "less than 1.01 times as fast is not worth a change"),
    ],
)
def test_what_was_not_confirmed_says_why(
    ratio: tuple[float, float, float], requests: int, why: str
) -> None:
    against = Confirmation(FAST.id, ratio, requests, 1).to_json()
    kept = tuned(BEHIND, BEHIND, confirmed=against, confirm_requests=requests)
    last = " ".join(CLOSING.split())
    assert last_lines(kept).endswith(f"held out to confirm it: {why}. {last}")
    assert verdict_in_words(kept, "cuda").endswith(f"nothing executed takes its place: {why}.")
    assert f"6 searched on, 4 raced on, {requests} confirmed on" in page(report(document(kept)))


HOSTILE = "</title><script>alert(1)</script> & \x1b[31m"


def document(found: dict[str, Any]) -> dict[str, Any]:
    """What a tuning would have stored of these results."""
    nan = np.nan
    seconds = {
        FAST.id: np.array([[0.5, 0.5], [0.5, 0.5], [2.0, 2.0], [2.0, nan]]),
        DROPPED.id: np.array([[0.6, nan], [0.6, nan], [nan, nan], [nan, nan]]),
        AUTOREGRESSIVE.id: np.array([[1.0, nan], [1.0, nan], [3.0, nan], [3.0, nan]]),
    }
    compared = Comparison({}, ComparedTexts(0, 0, "float32"), Timings(seconds), (FAST.id,))
    texts = [f"t{i} " for i in range(9)]
    made = results(WINNER, PLAIN, WINNER, BEHIND, PLAIN, replace(PLAIN, role="incumbent"))
    rounds = {
        "request": HOSTILE,
        "text": texts,
        "rounds": {FAST.id: [[4, 4, 5], [4, 0, 1], [4, 2, 3]]},
    }
    kept = evidence_document(made, compared, rounds, {"pair": HOSTILE, "device": "cuda"})
    kept["categories"][FAST.id] = {HOSTILE: 80.0, "prose": 10.0}
    return {**kept, "tuned": found}


def report(evidence: dict[str, Any]) -> TuningReport:
    trials = tuple(
        {"policy": p.spelled_out(), "id": p.id, "value": v}
        for p, v in ((FAST, 90.0), (DROPPED, 70.0), (AUTOREGRESSIVE, 50.0))
    )
    summary = {
        "beyond_the_recording": {"policies": 3, "best": [{"label": HOSTILE, "value": 1.0}]},
        "shortlists": {"searched": {"small": []}, "most_gained": {"small": {"fixed": -0.01}}},
        "by_prompt": "choosing gains nothing",
    }
    made = datetime(2026, 5, 4, tzinfo=UTC)
    study = Study("study-1", "pair-1", "rec-1", "none", 0, len(trials), summary, trials)
    study.created_at = made
    return TuningReport(study, evidence, {"small": (0.7, 0.5, 0.4), HOSTILE: (0.2,)})


def test_the_race_is_kept_as_it_went() -> None:
    """In turns over all passes; who was dropped ends where it was last executed."""
    race = {r["policy"]: r for r in document(tuned(WINNER, PLAIN))["race"]}
    assert {p: r["dropped"] for p, r in race.items()} == {
        FAST.id: False,
        DROPPED.id: True,
        AUTOREGRESSIVE.id: True,
    }
    assert race[DROPPED.id]["points"][-1][:2] == [2, pytest.approx(1 / 1.2, abs=1e-4)]
    assert race[AUTOREGRESSIVE.id]["points"][-1][:2] == [4, pytest.approx(5 / 8)]
    assert race[FAST.id]["points"][-1] == [7, 1.0, 1.0, 1.0]
    json.dumps(race, allow_nan=False)


@pytest.mark.parametrize(
    ("winner", "incumbent", "said"),
    [
        (
            WINNER,
            PLAIN,
            "Deploy this: small drafts 4 tokens a round; it saves 2.08 GPU hours per "
            "million tokens",
        ),
        (
            BEHIND,
            BEHIND,
            "Keep what you have: small drafts 8 tokens a round; nothing executed is faster "
            "beyond noise.",
        ),
        (PLAIN, PLAIN, "Decode without a draft: nothing executed is faster beyond noise."),
    ],
)
def test_the_page_says_first_what_to_deploy(
    winner: Candidate, incumbent: Candidate, said: str
) -> None:
    text = page(report(document(tuned(winner, incumbent))), gpus=8, price=2.5)
    assert f"<h1>{said}" in text
    for saved in (
        " where requests are decoded one at a time.",
        "Many requests at once may lose by speculating: ",
        "Of 8 such devices busy all day, one request at a time each, it saves 72.0 GPU hours a day",
        "At 2.5 an hour that is 5.21",
    ):
        assert (saved in text) == (winner is WINNER)


class Page(HTMLParser):
    """A page that needs nothing else: nesting is checked, coordinates lie in their picture, nothing
    acts or loads; ids, text and the sizes of pictures are collected."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.named: list[str] = []
        self.tags: list[str] = []
        self.boxes: list[tuple[float, float]] = []
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        assert set(self.named) <= set(self.ids)
        assert not {"script", "img", "link", "iframe", "object", "a"} & set(self.tags)
        assert not re.search(r"https?:|//\w|url\(|@import|\bnan\b|\binf\b", text, re.IGNORECASE)
        assert "prefers-color-scheme: dark" in text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        given = {name: value or "" for name, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        self.named += given.get("aria-labelledby", "").split()
        assert not any(name.startswith("on") or name in ("src", "href", "style") for name in given)
        if tag == "svg":
            _, _, width, height = map(float, given["viewbox"].split())
            self.boxes.append((width, height))
        elif "svg" in self.open and "transform" not in given:
            points = [p.split(",") for p in given.get("points", "").split()]
            xs = [given[n] for n in ("x", "x1", "x2", "cx") if n in given] + [p[0] for p in points]
            ys = [given[n] for n in ("y", "y1", "y2", "cy") if n in given] + [p[1] for p in points]
            for values, size in zip((xs, ys), self.boxes[-1], strict=True):
                assert all(-1 <= float(v) <= size + 1 for v in values), (tag, given)
            assert all(float(given.get(name) or 0) >= 0 for name in ("width", "height", "r"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def test_the_page_is_whole_and_holds_nothing_that_acts() -> None:
    found = Page(page(report(document(tuned(WINNER, PLAIN, **PUBLISHED)))))
    figures = {"prediction", "race", "intervals", "categories", "latency", "positions"}
    assert figures | {"rounds-1", "tried", "left-out"} <= set(found.ids)
    said = "".join(found.said)
    assert "</title><script>alert(1)</script> & \ufffd[31m" in said
    assert "\x1b" not in said
    for words in (
        "6 of 12 drafted tokens accepted, 9 tokens in 3 rounds",
        "t0 t1 t2 t3 t4",
        "small: chains",
        "choosing gains nothing",
        "small could gain at most: fixed -1.0%",
        "measured (tokens/s)",
        "predicted (tokens/s)",
        "speed over the winner's (times)",
        "position in the draft (tokens)",
        "tokens of a round",
    ):
        assert words in said, words


def test_the_page_fits_a_telephone() -> None:
    """A chart is no wider than 360 pixels leave it, so its text is never scaled below 12 pixels; no
    other width is fixed."""
    text = page(report(document(tuned(WINNER, PLAIN))))
    assert {width for width, _ in Page(text).boxes} == {320.0}
    assert 'content="width=device-width' in text
    assert "color-scheme: light dark" in text
    rules = text[text.index("<style>") : text.index("</style>")]
    assert not re.search(r"(?<!max-)width: *\d+(px|rem)|nowrap", rules)
    sizes = [
        float(s) * (16 if unit == "rem" else 1)
        for s, unit in re.findall(r"(?:font-size|font): *([\d.]+)(rem|px)", rules)
    ]
    assert len(sizes) > 5
    assert min(sizes) >= 12


def test_a_page_of_an_old_study_says_what_was_not_stored() -> None:
    bare = page(report({}))
    assert "its results were not stored" in bare
    assert "race, speed by category: Not stored" in bare
    assert "3 policies were replayed" in bare
    old = {k: v for k, v in tuned(WINNER, PLAIN).items() if k != "latency"}
    assert "Deploy this" in page(report({"tuned": old}))

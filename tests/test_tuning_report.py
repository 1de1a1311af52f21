"""What a tuning says at its end, in words and as a page, of results that are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_report import DROPPED, FAST, candidate

from spectune.optimizer.report.words import closing, finding, policy_in_words
from spectune.optimizer.verdict import Candidate, Tuned
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy

PLAIN = candidate("autoregressive", AUTOREGRESSIVE, [1.0, 1.0, 3.0, 3.0], 1.0, (0.625, 0.6, 0.65), left=False)
WINNER = candidate("finalist 1", FAST, [0.5, 0.5, 2.0, 2.0], 1.6, (1.0, 1.0, 1.0), left=True)
SLOWER = candidate("finalist 2", DROPPED, [0.6, 0.6], 0.8, (0.83, 0.8, 0.86), left=False)


def tuned(winner: Candidate, incumbent: Candidate, **more: Any) -> dict[str, Any]:
    """The results of a tuning, as ``tune --json`` prints them."""
    candidates = (WINNER, SLOWER, PLAIN, replace(incumbent, role="incumbent"))
    found = Tuned(
        winner, incumbent, candidates, "rec-1", "prof-1", "study-1", texts_differ=0, test_requests=4, search_requests=6, trials=9,
        published=None, reason="said why", seconds={},
    )
    return {**found.to_json(), **more}


PUBLISHED = {"published": {"version": 3, "policy": FAST.id}}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"draft": "none"}, "no draft, one token a round"),
        ({"draft": "small", "window": {"kind": "fixed", "gamma": 4}}, "small drafts 4 tokens a round"),
        (
            {"draft": "ngram", "window": {"kind": "fsm", "gamma_max": 8}, "stop": {"kind": "max_prob", "threshold": 0.4}},
            "prompt lookup (ngram) drafts up to 8 tokens a round, as its window (fsm) says, and stops where its next token is unsure",
        ),
        (
            {"draft": "head", "window": {"kind": "fixed", "gamma": 6}, "growth": {"kind": "top_k"}, "select": {"top_n": 24}}
            | {"shortlist": {"kind": "frequency", "artifact": "abc", "size": 512}},
            "head drafts EAGLE-2 trees of 6 levels, 24 nodes verified, over a shortlist of 512 tokens",
        ),
        ({"draft": {"kind": "ols", "artifact": "abc"}}, "a draft is chosen for each prompt (chooser abc)"),
    ],
)
def test_policies_in_words(document: dict[str, Any], words: str) -> None:
    assert policy_in_words(parse_policy(document).spelled_out()) == words


def test_the_last_lines_say_what_is_in_force_and_what_to_type() -> None:
    """A win over nothing in force, over something in force, unpublished; no gain; each within 80 columns."""
    where, commands = "for pair demo on cpu", [("cli.py run --policy active", "decodes with what is in force")]

    def said(found: dict[str, Any]) -> str:
        text = closing(found, where, commands)
        assert max(map(len, text.splitlines())) < 80
        assert text.endswith("\n# decodes with what is in force\ncli.py run --policy active")
        return " ".join(text.split())

    won = said(tuned(WINNER, PLAIN, **PUBLISHED))
    assert won.startswith("In force now for pair demo on cpu, as version 3: small drafts 4 tokens a round. It decodes 1.60")
    assert "times as fast as decoding without a draft (95% interval 1.60 to 1.60): 80 tokens/s on 4 requests" in won
    over = said(tuned(WINNER, SLOWER, **PUBLISHED))
    assert "as what was in force (small fixed(gamma=8))" in over
    assert said(tuned(WINNER, PLAIN)).startswith("Nothing was published, as asked. The winner for pair demo")
    kept = said(tuned(SLOWER, SLOWER))
    assert kept.startswith("Nothing changes for pair demo on cpu: small drafts 8 tokens a round. Nothing executed is faster beyond noise;")
    assert "small fixed(gamma=4), decodes 1.60 times as fast" in kept
    late = tuned(WINNER, PLAIN, reason="version 7 came into force meanwhile and was not compared, so it stays")
    assert said(late).startswith("Nothing was published: version 7 came into force meanwhile")
    plain = said(tuned(PLAIN, PLAIN, published={"version": 1, "policy": AUTOREGRESSIVE.id}))
    assert plain.startswith("In force now for pair demo on cpu, as version 1: no draft, one token a round. Nothing executed")
    assert not finding(tuned(PLAIN, PLAIN)).deploys

"""Near ties: what is one, and that the canonical logits decide it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from spectune.runtime import near_ties
from spectune.runtime.near_ties import CHOICE, Choices, choose, lead, near_code
from spectune.traces.schema import Sampling

HALVES = [math.log(0.5), math.log(0.3), math.log(0.2)]
THIRD = [0.0, 0.0, 5.0, 0.0]
"""Noise that favours the third token."""


def is_near(logits: list[float], sampling: Sampling, noise: list[float] | None = None) -> bool:
    """Whether the choice is left to canonical logits, under which the last token is far ahead."""
    x, last = torch.tensor([logits]), len(logits) - 1
    row = None if noise is None else torch.tensor([noise])
    ahead = torch.zeros(last + 1)
    ahead[last] = 50.0
    tokens = choose(x, sampling, row, lambda _: ahead)
    choices = Choices(x, sampling, row, exact=True)
    assert choices.token(0, lambda: ahead) == int(tokens[0])
    asked: list[int] = []
    choices.token(0, lambda: asked.append(0) or ahead)  # type: ignore[func-returns-value]
    plain = Choices(x, sampling, row, exact=False)
    assert int(choose(x, sampling, row, None)[0]) == plain.token(0, lambda: ahead)
    return bool(asked)


@pytest.mark.parametrize(
    ("logits", "sampling", "noise", "near"),
    [
        ([1.0, 1.0 + CHOICE / 2, 0.0], Sampling(), None, True),
        ([1.0 + CHOICE / 2, 1.0, 0.0], Sampling(), None, True),
        ([1.0, 1.0 + 10 * CHOICE, 0.0], Sampling(), None, False),
        # At temperature 0.1 a rounding error is ten times as large.
        ([1.0, 1.0 + CHOICE / 2, 0.0], Sampling(0.1), [0.0, 0.0, 0.0], True),
        ([1.0, 1.0 + 2 * CHOICE, 0.0], Sampling(1.0), [0.0, 0.0, 0.0], False),
        # The winner may be in or out of the nucleus; of top-k, with and without a nucleus behind.
        (HALVES, Sampling(1.0, top_p=0.8), THIRD[:3], True),
        (HALVES, Sampling(1.0, top_p=0.7), THIRD[:3], False),
        ([2.0, 1.0, 1.0 - 1e-5, -3.0], Sampling(1.0, top_k=2), THIRD, True),
        ([2.0, 1.0, 1.0 - 1e-5, -3.0], Sampling(1.0, top_k=2, top_p=0.99), THIRD, True),
        ([2.0, 1.0, 1.0 - 1e-2, -3.0], Sampling(1.0, top_k=2), THIRD, False),
    ],
)
def test_near_ties_and_no_others_are_decided_canonically(
    logits: list[float], sampling: Sampling, noise: list[float] | None, near: bool
) -> None:
    assert is_near(logits, sampling, noise) == near


def test_the_best_and_whether_it_leads() -> None:
    """As topk(2) tells; of equal entries the first is taken, and a row with one entry left leads
    without bound."""
    x = torch.randn(9, 501, generator=torch.Generator().manual_seed(0))
    best = x.topk(2, dim=-1)
    leads = best.values[:, 0] - best.values[:, 1]
    for margin in (0.0, 0.1, float(leads.median()), 9.0):
        tokens, near = lead(x, margin)
        assert torch.equal(tokens, best.indices[:, 0])
        assert torch.equal(near, leads < margin)
    odd = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, -torch.inf, 0.0], [2.0, 1.0, 1.5]])
    tokens, near = lead(odd, 0.4)
    assert tokens.tolist() == [1, 2, 0]
    assert near.tolist() == [True, False, False]


def test_codes_near_a_border() -> None:
    assert near_code(torch.tensor([1.0 + 1e-6, 1.0 + 1e-3]), Sampling()).tolist() == [True, False]


def test_margins_stand_in_one_module() -> None:
    """None of the margins' numbers, and no other margin by that name, stands in another module."""
    here = Path(near_ties.__file__)
    margin = re.compile(r"MARGIN|\b(?:2e-4|5e-5|2\.5e-5|1\.2e-5|2e-5)\b")
    assert len(margin.findall(here.read_text(encoding="utf-8"))) == 5
    tops = (here.parents[1] / top for top in ("runtime", "optimizer"))
    files = [file for top in tops for file in top.rglob("*.py") if file != here]
    assert len(files) > 50
    assert [file.name for file in files if margin.search(file.read_text(encoding="utf-8"))] == []

"""README and docs/results.md say no more than bench/results shows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from spectune.optimizer.report.words import COUPLED_COSTS_CHAINS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bench() -> Any:
    """The modules ``report`` and ``verdicts`` of bench/."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import report
        import verdicts
    finally:
        sys.path.remove(str(ROOT / "bench"))
    return report, verdicts


@pytest.mark.parametrize(
    ("interval", "target", "verdict"),
    [
        ((0.98, 1.10), 0.98, "met"),
        ((0.979, 1.10), 0.98, "not shown"),
        ((0.930, 0.993), 1.0, "**not met**"),  # the joint winner of the four papers
        ((None, 1.5), 1.0, "not shown"),
        ((0.5, None), 1.0, "not shown"),
    ],
)
def test_only_the_unfavourable_end_of_an_interval_meets_a_target(
    bench: Any, interval: tuple[float | None, float | None], target: float, verdict: str
) -> None:
    _, verdicts = bench
    assert verdicts.at_least(interval, target) == verdict
    mirrored = [None if end is None else -end for end in reversed(interval)]
    assert verdicts.at_most(mirrored, -target) == verdict


@pytest.mark.parametrize(
    ("ours", "bar", "verdict"),
    [
        ([1.043, 1.034, 1.056], {"least": 1.033, "most": None}, "met"),
        ([1.043, 1.030, 1.056], {"least": 1.033, "most": None}, "not shown"),
        ([0.90, 0.88, 0.92], {"least": None, "most": 0.923}, "met"),
        ([0.97, 0.95, 0.98], {"least": None, "most": 0.923}, "**not met**"),
        ([0.81, None, None], {"least": None, "most": 0.8}, "not shown"),
        ([0.81, 0.80, 0.82], {"least": None, "most": None}, "not comparable"),
    ],
)
def test_a_papers_figure_is_met_by_the_unfavourable_end_of_ours(
    bench: Any, ours: list[float | None], bar: dict[str, float | None], verdict: str
) -> None:
    report, _ = bench
    assert report.paper_verdict({"ours": ours, **bar}) == verdict


def test_every_figure_of_a_paper_says_where_it_is_from(bench: Any) -> None:
    report, _ = bench
    for part, rows in report.load("papers").items():
        for r in () if part == "environment" else rows:
            assert r["figure"]
            assert r["cell"]
            assert r["command"].endswith(part)
            value, low, high = r["ours"]
            assert low is None or high is None or low <= value <= high, r


def test_an_error_is_within_its_bar_only_where_its_interval_is(bench: Any) -> None:
    """A median of 2% over four policies of 1 to 20% is no proof of 3%."""
    report, verdicts = bench
    few, many = [0.01, 0.02, 0.02, 0.2], [0.01, 0.02, 0.02] * 40
    low, high = verdicts.quantile_interval(many, 0.5)
    assert low == high == pytest.approx(0.02)
    assert report.within(many, [0.0], (0.03, 0.06)) == "met"
    assert report.within(few, [0.0], (0.03, 0.06)) == "not shown"
    assert report.within([0.1] * 9, [0.0], (0.03, 0.06)) == "**not met**"


def test_readme_holds_what_the_generator_writes(bench: Any) -> None:
    report, _ = bench
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{report.BEGIN}\n{report.highlights()}\n{report.END}" in text
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert "\n".join(report.checks()) in results
    assert all("\n".join(lines) in results for lines in report.on_gpu())


def test_what_won_and_what_is_left_out_stand_beside_a_claim(bench: Any) -> None:
    """The comparison with a server without a draft; the GPU's ballast; the default verifier."""
    report, _ = bench
    said = report.highlights()
    (off,) = (r for r in report.load("load-vllm")["regret"]["together"] if r["constant"] == "off")
    ratio, low, high = off["share"]
    assert f"{ratio:.3f} ({low:.3f} to {high:.3f}) of the tokens/s of a server without" in said
    assert "every constant over" not in said
    run = report.load("gpu-nvidia-h200")["tune"]
    assert said.startswith(f"**{run['on']}**, a pair ballasted to 8B")
    assert f"{run['tuned']['confirmed']['requests']} requests held out" in said
    assert f"**{run['tuned']['confirmed']['ratio']:.2f} times autoregression**" in said
    low, high = report.coupled_costs_chains()
    assert (low, high) == COUPLED_COSTS_CHAINS
    assert f"costs a chain {low} to {high}% of its speed" in said


def test_the_error_of_closed_forms_stands_beside_that_of_replay(bench: Any) -> None:
    report, _ = bench
    (small, *_) = report.load("acceptance-fidelity")["tau_by_gamma"].values()
    beta = small[1] - 1.0  # of one token: accepted where it is not rejected
    error = sum(beta**i for i in range(len(small))) / small[-1] - 1
    (row, *_) = (line for line in report.closed_forms() if line.startswith("| small | 1 |"))
    assert f"{beta:.3f}" in row
    assert f"{100 * error:+.1f}% at gamma {len(small) - 1}" in row
    assert row.endswith("| 0.0% |")


def test_what_parts_measured_on_a_gpu_is_shown_with_gpu_and_day(bench: Any) -> None:
    report, _ = bench
    shown = "\n".join(report.gpu_parts())
    figures = report.load("gpu-nvidia-h100-80gb-hbm3")
    for name, part in figures.items():
        assert f"### {name} (NVIDIA H100 80GB HBM3, {part['measured']}, torch 2." in shown
    best = max(figures["rounds"]["rows"], key=lambda row: row["tokens/s"])
    assert f"| {best['policy']} | " in shown
    assert f" | {best['tokens/s']:.4g} |" in shown

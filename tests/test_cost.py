"""Tables of costs against the profile's curves, and compiled functions that never outlive an edit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optimizer.cost import BUCKET, LAG_LIMIT, CostModel, window_costs
from runtime.policies.document import AUTOREGRESSIVE, parse_policy
from traces.errors import PolicyError, TraceError
from traces.schema import CostCurve, LatencyProfile, Step


def curve(seed: int, widths: tuple[int, ...], contexts: tuple[int, ...]) -> CostCurve:
    median = np.sort(np.random.default_rng(seed).uniform(1e-3, 1e-2, (len(widths), len(contexts))), axis=0)
    rows = tuple(tuple(row) for row in median.tolist())
    return CostCurve(widths, contexts, rows, rows)


PROFILE = LatencyProfile(
    pair_id="p",
    device="cpu",
    dtype="float32",
    verify=curve(0, (1, 2, 5, 17), (16, 100, 300)),
    prefill=curve(1, (1, 64, 512), (0,)),
    draft_step={"small": curve(2, (1, 3, 9), (16, 300)), "ngram": curve(3, (1,), (16,))},
    draft_prefill={"small": curve(4, (1, 64, 512), (0,))},
    overhead_s=1e-4,
    draft_phase_s={"small": 2e-4},
    stop_step_s={"entropy": 3e-5},
    noise_s=1e-5,
    sample_s=2e-5,
    draft_sample_s=4e-5,
    request_s=6e-4,
    draft_bend_s={"small": (0.0, -3e-4, 1e-4, 2e-4, 0.0, -5e-5)},
)
BEND = PROFILE.draft_bend_s["small"]
MIDDLE = (BUCKET - 1) / 2


def step(drafted: int, steps: int, lag: int, emitted: int = 1) -> Step:
    return Step(0, drafted, drafted + 1, emitted - 1, emitted, steps, lag, "small")


@pytest.mark.parametrize("bucket", [0, 1, 3, 11])
@pytest.mark.parametrize(("drafted", "steps", "lag"), [(0, 0, 9), (0, 1, 1), (3, 3, 2), (3, 4, 7), (16, 16, 30), (40, 40, 90)])
def test_rounds_cost_what_the_curves_say_in_the_middle_of_a_bucket(bucket: int, drafted: int, steps: int, lag: int) -> None:
    model = CostModel.of(PROFILE, "small", 400)
    context = bucket * BUCKET + MIDDLE
    draft, one = PROFILE.draft_step["small"], PROFILE.draft_step["small"].at(1, context)
    draft_s = 2e-4 + draft.at(lag, context) + (steps - 1) * one + BEND[min(steps, 5)] if steps else 0.0
    verify_s = PROFILE.verify.at(drafted + 1, context)
    for c in (bucket * BUCKET, bucket * BUCKET + BUCKET - 1):
        got = model.round_seconds(step(drafted, steps, lag), c)
        assert got == pytest.approx((draft_s, verify_s, draft_s + verify_s + 1e-4))


def test_contexts_beyond_the_tables_cost_as_the_last() -> None:
    model = CostModel.of(PROFILE, "small", 100)
    assert model.round_seconds(step(2, 2, 1), 9999) == model.round_seconds(step(2, 2, 1), 127)


def test_temperature_and_stops_add_their_terms() -> None:
    plain, entropy = CostModel.of(PROFILE, "small", 100), CostModel.of(PROFILE, "small", 100, stop="entropy")
    s = step(3, 4, 1, emitted=2)
    cold, warm = plain.round_seconds(s, 50), plain.round_seconds(s, 50, sampled=True)
    assert warm.draft_s - cold.draft_s == pytest.approx(4 * 4e-5)
    assert warm.verify_s - cold.verify_s == pytest.approx(4 * 2e-5 + 2 * 1e-5)
    assert entropy.round_seconds(s, 50).draft_s - cold.draft_s == pytest.approx(4 * 3e-5)
    assert warm.round_s == pytest.approx(warm.draft_s + warm.verify_s + 1e-4)


def test_lags_beyond_the_table_go_on_with_its_slope() -> None:
    model = CostModel.of(PROFILE, "small", 100)
    far = LAG_LIMIT + 50
    expected = PROFILE.draft_step["small"].at(far, MIDDLE) + 2e-4 + BEND[1]
    assert model.round_seconds(step(1, 1, far), 3).draft_s == pytest.approx(expected)


def test_a_draft_measured_at_one_width_costs_the_same_for_every_lag() -> None:
    model = CostModel.of(PROFILE, "ngram", 100)
    assert model.round_seconds(step(2, 2, 1), 3) == model.round_seconds(step(2, 2, 40), 3)


def test_requests_pay_prefill_of_all_but_the_last_prompt_token() -> None:
    with_draft, without = CostModel.of(PROFILE, "small", 100), CostModel.of(PROFILE, None, 100)
    for prompt in (2, 40, 700):
        target, draft = PROFILE.prefill.at(prompt - 1, 0), PROFILE.draft_prefill["small"].at(prompt - 1, 0)
        assert without.request_seconds(prompt) == pytest.approx(6e-4 + target)
        assert with_draft.request_seconds(prompt) == pytest.approx(6e-4 + target + draft)
    assert with_draft.request_seconds(np.array([1, 1])).tolist() == [6e-4, 6e-4]


def test_costs_never_fall_below_zero() -> None:
    steep = CostCurve((8, 16), (10,), ((1e-3,), (9e-3,)), ((0.0,), (0.0,)))
    model = CostModel.of(replace(PROFILE, verify=steep), None, 50)
    assert model.round_seconds(step(0, 0, 1), 5).verify_s == steep.at(1, 5) == 0.0


def test_an_unknown_draft_is_refused_with_those_known() -> None:
    with pytest.raises(TraceError, match=r"no costs for draft 'large' .it has: ngram, small"):
        CostModel.of(PROFILE, "large", 100)
    with pytest.raises(PolicyError, match="'large'"):
        window_costs(PROFILE, parse_policy({"draft": "large"}))


def test_window_costs_cover_every_window() -> None:
    costs = window_costs(PROFILE, parse_policy({"draft": "small", "window": {"kind": "analytic", "gamma_max": 9}}))
    assert costs is not None
    assert len(costs.verify_s) == 10
    assert costs.draft_step_s > 0
    assert window_costs(PROFILE, AUTOREGRESSIVE) is None


def test_an_edit_in_a_called_module_reaches_cached_kernels(tmp_path: Path) -> None:
    """numba alone would go on running what it compiled before: its cache looks at the kernel's own file only."""
    (tmp_path / "deep.py").write_text("from runtime.policies.jit import compiled\n@compiled()\ndef inner(x): return x + 1\n")
    (tmp_path / "middle.py").write_text(
        "import deep\nfrom deep import inner\nfrom runtime.policies.jit import compiled\n"
        "@compiled(deep)\ndef outer(x): return inner(x) * 10\n"
    )
    (tmp_path / "kernel.py").write_text(
        "import middle\nfrom middle import outer\nfrom runtime.policies.jit import compiled\n"
        "@compiled(middle)\ndef run(x): return outer(x)\n"
        "print(run(1), sum(run.stats.cache_hits.values()))\n"
    )
    root = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def kernel() -> str:
        return subprocess.run(
            [sys.executable, str(tmp_path / "kernel.py")], env=env, check=True, capture_output=True, text=True
        ).stdout

    assert kernel().split() == ["20", "0"]
    assert kernel().split() == ["20", "1"]
    (tmp_path / "deep.py").write_text("from runtime.policies.jit import compiled\n@compiled()\ndef inner(x): return x + 2000\n")
    assert kernel().split() == ["20010", "0"]

"""Values for tests that need no models."""

from __future__ import annotations

from collections.abc import Iterable

from traces.schema import CostCurve, LatencyProfile


def flat_profile(pair_id: str, drafts: Iterable[str]) -> LatencyProfile:
    """A profile of round numbers: a draft step 1 ms, verification 4 ms and 0.1 ms a token."""
    verify = CostCurve((1, 9, 17, 65), (32, 512), ((4e-3, 5e-3), (5e-3, 6e-3), (6e-3, 7e-3), (12e-3, 13e-3)), ((0.0, 0.0),) * 4)
    step = CostCurve((1, 2, 9), (32, 512), ((1e-3, 1e-3), (1.1e-3, 1.1e-3), (1.5e-3, 1.5e-3)), ((0.0, 0.0),) * 3)
    prefill = CostCurve((8, 512), (0,), ((5e-3,), (50e-3,)), ((0.0,), (0.0,)))
    names = [*drafts, "ngram"]
    return LatencyProfile(
        pair_id=pair_id,
        device="cpu",
        dtype="float32",
        verify=verify,
        prefill=prefill,
        draft_step=dict.fromkeys(names, step),
        draft_prefill=dict.fromkeys(names, prefill),
        overhead_s=1e-4,
        draft_phase_s=dict.fromkeys(names, 1e-05),
        stop_step_s={"none": 0.0, "max_prob": 1e-5, "joint_prob": 1e-5, "entropy": 2e-5},
        check={"accepted": True, "median_error": 0.0},
    )

"""Values for tests that need no models."""

from __future__ import annotations

from collections.abc import Iterable

from traces.schema import CostCurve, LatencyProfile, TreeProfile


def flat_trees(drafts: Iterable[str]) -> TreeProfile:
    """Costs of trees in round numbers: a level 1 ms and 0.05 ms a node, verification 4 ms and 0.1 ms a node; sampled 10% more."""

    def curve(widths: tuple[int, ...], base: float, slope: float) -> CostCurve:
        rows = tuple((base + slope * (w - 1), 1.1 * base + slope * (w - 1)) for w in widths)
        return CostCurve(widths, (32, 512), rows, ((0.0, 0.0),) * len(widths))

    names = list(drafts)
    first, level = curve((1, 2, 8), 1.5e-3, 1e-4), curve((1, 4, 16), 1e-3, 5e-5)
    hot_first, hot_level = curve((1, 2, 8), 1.65e-3, 1e-4), curve((1, 4, 16), 1.1e-3, 5e-5)
    return TreeProfile(
        verify=curve((2, 17, 97), 4e-3, 1e-4),
        sampled_verify=curve((2, 17, 97), 4.4e-3, 1e-4),
        first=dict.fromkeys(names, first),
        sampled_first=dict.fromkeys(names, hot_first),
        level=dict.fromkeys(names, level),
        sampled_level=dict.fromkeys(names, hot_level),
    )


def flat_profile(pair_id: str, drafts: Iterable[str], heads: Iterable[str] = ()) -> LatencyProfile:
    """A profile of round numbers: a draft step 1 ms, verification 4 ms and 0.1 ms a token; trees of both, ``heads`` as trees alone."""
    drafts, heads = list(drafts), list(heads)
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
        draft_prefill=dict.fromkeys([*names, *heads], prefill),
        overhead_s=1e-4,
        draft_phase_s=dict.fromkeys(names, 1e-05),
        stop_step_s={"none": 0.0, "max_prob": 1e-5, "joint_prob": 1e-5, "entropy": 2e-5},
        check={"accepted": True, "median_error": 0.0},
        trees=flat_trees([*drafts, *heads]),
    )

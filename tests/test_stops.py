"""Stops: limits on codes mean what the thresholds say."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectune.runtime.policies.document import parse_policy
from spectune.runtime.policies.stops import CompiledStop, compile_stop, should_stop
from spectune.traces.schema import NAT_CODE_MAX, NAT_SCALE


def stop(kind: str, **parameters: Any) -> CompiledStop:
    return compile_stop(parse_policy({"draft": "small", "stop": {"kind": kind, **parameters}}).stop)


def triggers(s: CompiledStop, *codes: int) -> bool:
    return should_stop(s, *codes)


def code(nats: float) -> int:
    """As recorded: whole 1/256 nat, rounded down."""
    return min(NAT_CODE_MAX, int(nats * NAT_SCALE))


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_max_prob_stops_below_the_threshold(threshold: float, q: float) -> None:
    triggered = triggers(stop("max_prob", threshold=threshold), code(-math.log(q)), 0, 0)
    if (
        abs(math.log(q) - math.log(threshold)) > 1 / NAT_SCALE
    ):  # within one code of the limit rounding decides
        assert triggered == (q < threshold)


@given(st.floats(1e-6, 1.0), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12))
def test_joint_prob_stops_when_the_product_falls_below(
    threshold: float, probs: list[float]
) -> None:
    joint, product = 0, 1.0
    compiled = stop("joint_prob", threshold=threshold)
    for q in probs:
        joint, product = joint + code(-math.log(q)), product * q
        if abs(math.log(product) - math.log(threshold)) > (len(probs) + 1) / NAT_SCALE:
            assert triggers(compiled, 0, joint, 0) == (product < threshold)


@given(st.floats(0.001, 1.0), st.floats(0.01, 5.0), st.floats(0.0, 20.0))
def test_entropy_stops_when_adaedls_bound_falls_below(
    threshold: float, scale: float, entropy: float
) -> None:
    triggered = triggers(stop("entropy", threshold=threshold, scale=scale), 0, 0, code(entropy))
    if abs(entropy - (1 - threshold) ** 2 / scale) > 1 / NAT_SCALE:
        assert triggered == (1 - math.sqrt(scale * entropy) < threshold)


def test_a_limit_reached_exactly_does_not_stop() -> None:
    """q equal to a threshold that falls on a code: e^-1 is code 256."""
    compiled = stop("max_prob", threshold=math.exp(-1))
    assert compiled.max_logp_code == NAT_SCALE
    assert not triggers(compiled, NAT_SCALE, 0, 0)
    assert triggers(compiled, NAT_SCALE + 1, 0, 0)


@pytest.mark.parametrize("kind", ["none", "max_prob", "joint_prob", "entropy"])
def test_threshold_0_never_stops(kind: str) -> None:
    never = stop(kind) if kind == "none" else stop(kind, threshold=0.0)
    assert not triggers(never, NAT_CODE_MAX, 64 * NAT_CODE_MAX, NAT_CODE_MAX)

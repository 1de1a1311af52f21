"""Stops within a draft, as comparisons of whole numbers.

A stop reads two codes of each proposal, -log q and the entropy of q, both in 1/256 nat
(:data:`traces.schema.NAT_SCALE`). Its threshold is turned into a limit on codes once, so that
decoding and replay decide alike, whatever rounding made the codes.

How a chain is drafted (runtime, oracle and replay share this): token j = 0..gamma-1 costs one draft
pass. If the draft has no proposal, the chain ends without the token; the pass counts. If the stop
triggers at token j, the chain ends, and the token is kept iff ``keep_last``. Tokens kept are
*drafted*, passes made are *draft steps*."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal, NamedTuple, Union

from pydantic import Field

from spectune.runtime.policies.blocks import Block, Probability, Search
from spectune.runtime.policies.jit import compiled
from spectune.traces.schema import NAT_CODE_MAX, NAT_SCALE

NEVER: Final = 2**31 - 1
"""A limit that no code, and no sum of codes along a chain, exceeds."""
_SLACK = 1e-9  # so that a threshold written as a decimal falls on the side of the code it means


class NoStop(Block):
    """The draft always fills its window."""

    kind: Literal["none"] = "none"


class _Stop(Block):
    shown = ("threshold",)
    reads_draft = True
    keep_last: Annotated[bool, Search(choices=(True, False))] = Field(
        default=True, description="whether the token that triggers the stop stays in the draft"
    )


class MaxProbStop(_Stop):
    """End the draft at a token whose draft probability is below ``threshold`` (transformers'
    assistant_confidence_threshold)."""

    kind: Literal["max_prob"] = "max_prob"
    threshold: Annotated[Probability, Search(0.02, 0.95, name="max_prob")] = 0.4


class JointProbStop(_Stop):
    """End the draft when the product of its tokens' draft probabilities falls below
    ``threshold``."""

    kind: Literal["joint_prob"] = "joint_prob"
    threshold: Annotated[Probability, Search(0.005, 0.9, log=True, name="joint_prob")] = 0.3


class EntropyStop(_Stop):
    """AdaEDL: end the draft when the lower bound on acceptance, 1 - sqrt(scale * H), falls below
    ``threshold``; H is the entropy of the draft's distribution in nats."""

    kind: Literal["entropy"] = "entropy"
    threshold: Annotated[Probability, Search(0.05, 0.9, name="entropy")] = 0.4
    scale: Annotated[float, Field(gt=0.0, le=100.0)] = 0.2


Stop = Annotated[
    Union[NoStop, MaxProbStop, JointProbStop, EntropyStop], Field(discriminator="kind")
]


class CompiledStop(NamedTuple):
    """A stop as limits on codes: it triggers when a code is *greater* than its limit; limits not in
    use are :data:`NEVER`. ``active``: codes have to be read for it, even if none can trigger it."""

    active: bool = False
    max_logp_code: int = NEVER
    max_joint_code: int = NEVER
    max_entropy_code: int = NEVER
    keep_last: bool = True


UNSTOPPED: Final = CompiledStop()
"""No stop."""


def compile_stop(stop: Stop) -> CompiledStop:
    """Turns thresholds into limits on codes.

    ``max_prob``: q < t, that is code > floor(-256 ln t). ``joint_prob``: the same with the sum of
    the chain's codes. ``entropy``: 1 - sqrt(scale H) < t, that is code > floor(256 (1-t)^2 /
    scale). Rounding down makes a limit that is reached exactly no stop. Threshold 0 never stops: no
    probability, and no lower bound on one, is below 0. Threshold 1 stops at every code above 0. A
    code, or a sum of codes, of NAT_CODE_MAX or more (e^-256) is below every other threshold."""
    if isinstance(stop, NoStop):
        return UNSTOPPED
    limit, threshold = NEVER, stop.threshold
    if threshold > 0.0:
        nats = -math.log(threshold)
        if isinstance(stop, EntropyStop):
            nats = (1.0 - threshold) ** 2 / stop.scale
        limit = min(NAT_CODE_MAX - 1, math.floor(nats * NAT_SCALE + _SLACK))
    limits = {
        "max_prob": "max_logp_code",
        "joint_prob": "max_joint_code",
        "entropy": "max_entropy_code",
    }
    values: dict[str, Any] = {limits[stop.kind]: limit, "keep_last": stop.keep_last}
    return UNSTOPPED._replace(active=True, **values)


@compiled()
def should_stop(stop: CompiledStop, logp_code: int, joint_code: int, entropy_code: int) -> bool:
    """Whether a chain ends at a proposal with these codes; ``joint_code`` sums the chain's logp
    codes, this one's included."""
    return (
        logp_code > stop.max_logp_code
        or joint_code > stop.max_joint_code
        or entropy_code > stop.max_entropy_code
    )

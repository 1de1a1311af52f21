"""What the passes of a shortlisted draft cost beyond those with the whole output head (DynaSpec, section 4.3), from a latency profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from runtime.policies.document import GAMMA_LIMIT
from traces.errors import PolicyError
from traces.schema import LatencyProfile

if TYPE_CHECKING:
    from runtime.shortlists import ShortlistRule


def shortlist_seconds(profile: LatencyProfile, rule: ShortlistRule) -> npt.NDArray[np.float64]:
    """Seconds of draft steps 0 .. GAMMA_LIMIT - 1 more than with the whole head (usually less: negative), float64 [GAMMA_LIMIT].

    A routed shortlist is charged for clusters of the mean size. Raises PolicyError when the profile has no costs of the draft's
    shortlists.
    """
    if rule.draft not in profile.shortlist_s:
        known = ", ".join(sorted(profile.shortlist_s)) or "none"
        raise PolicyError(
            f"the latency profile has no costs of shortlists for draft {rule.draft!r} (it has: {known}); run `profile` again"
        )
    steps = range(GAMMA_LIMIT)
    if rule.routing is None:
        assert rule.frequencies is not None
        kind, sizes = "fixed", [float(rule.frequencies.size(rule.budget(t))) for t in steps]
    else:
        clusters = rule.routing.clusters
        kind, sizes = "routed", [clusters.vocab / clusters.count * min(rule.budget(t), clusters.count) for t in steps]
    found = {size: profile.shortlist_pass_s(rule.draft, kind, size) for size in set(sizes)}
    return np.array([found[size] for size in sizes])

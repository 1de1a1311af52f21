"""A policy made ready to run: its window and stop compiled, its costs resolved, its draft known to exist."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from runtime.policies.document import CacheFsmWindow, Policy
from runtime.policies.stops import CompiledStop, compile_stop
from runtime.policies.windows import WindowController, WindowCosts, compile_window
from traces.errors import PolicyError
from traces.schema import LatencyProfile, Sampling, Verifier

REFERENCE_CONTEXT = 256
"""Context at which a profile's costs are read for a window that wants one number per gamma."""


@dataclass(frozen=True)
class PreparedPolicy:
    """What the loop swaps: immutable but for the controller's state, which belongs to the decoding session."""

    policy: Policy
    policy_id: str
    controller: WindowController
    stop: CompiledStop
    needs_cache: bool
    version: int = 0
    label: str = field(default="", compare=False)


def window_costs(profile: LatencyProfile, policy: Policy) -> WindowCosts | None:
    """a_q and b_p(gamma) for gamma = 0..gamma_max (on-the-fly paper, definition 1), from a profile.

    What a round costs beside its passes is counted with verification, so that the window weighs whole rounds.

    None when the policy does not speculate. Raises PolicyError when the profile has no costs for the policy's draft.
    """
    if not policy.speculates:
        return None
    curve = profile.draft_step.get(policy.draft)
    if curve is None:
        known = ", ".join(sorted(profile.draft_step))
        raise PolicyError(f"the latency profile has no costs for draft {policy.draft!r} (it has: {known}); run `profile` again")
    phase = profile.draft_phase_s.get(policy.draft, 0.0)
    return WindowCosts(
        draft_step_s=curve.at(1, REFERENCE_CONTEXT) + profile.stop_step_s.get(policy.stop.kind, 0.0),
        verify_s=tuple(
            profile.verify.at(g + 1, REFERENCE_CONTEXT) + profile.overhead_s + (phase if g else 0.0)
            for g in range(policy.gamma_max + 1)
        ),
    )


def check_verifier(policy: Policy, verifier: Verifier, sampling: Sampling) -> None:
    """Raises PolicyError where a policy and a verifier would bias the text."""
    if verifier == "rejection" and not sampling.greedy and not getattr(policy.stop, "keep_last", True):
        raise PolicyError(
            "stop.keep_last false discards a sampled token because of its probability, which the rejection verifier cannot make "
            "lossless; use the coupled verifier or keep_last true"
        )


QTables = Callable[[str], npt.NDArray[np.float64]]
"""Finds the Q-table of an artifact id; raises PolicyError when there is none."""


def prepare(
    policy: Policy,
    drafts: Collection[str],
    *,
    profile: LatencyProfile | None = None,
    version: int = 0,
    q_tables: QTables | None = None,
) -> PreparedPolicy:
    """Compiles a policy for a pair whose drafts are ``drafts``.

    ``q_tables`` finds stored Q-tables for windows that name an artifact. Raises PolicyError when the draft is unknown, the window
    needs costs and there is no profile, or its artifact cannot be had or has another shape.
    """
    if policy.draft != "none" and policy.draft not in drafts:
        known = ", ".join(sorted(drafts))
        raise PolicyError(f"draft: this pair has no draft {policy.draft!r}; it has: {known}")
    costs = window_costs(profile, policy) if policy.needs_profile and profile is not None else None
    if policy.needs_profile and costs is None:
        raise PolicyError(f"window.{policy.window.kind} needs measured costs: run `profile` for this pair and device first")
    return PreparedPolicy(
        policy=policy,
        policy_id=policy.id,
        controller=WindowController(compile_window(policy.window, costs, q_table=_q_table(policy, q_tables))),
        stop=compile_stop(policy.stop),
        needs_cache=isinstance(policy.window, CacheFsmWindow),
        version=version,
        label=policy.label(),
    )


def _q_table(policy: Policy, q_tables: QTables | None) -> npt.NDArray[np.float64] | None:
    name = getattr(policy.window, "artifact", None)
    if name is None:
        return None
    if q_tables is None:
        raise PolicyError(f"window.artifact: the Q-table {name!r} cannot be looked up here; give a database that holds it")
    return q_tables(name)

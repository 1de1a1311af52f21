"""What one decoder carries of a plan from round to round and from request to request: all that
changes while a policy is in force."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from spectune.runtime.policies.plan import Plan
from spectune.runtime.policies.windows import FIXED, CompiledWindow, advance, init_state, reset


class Session:
    """A window's state, and the tokens seen so far where the window looks accepted ones up."""

    def __init__(self, window: CompiledWindow) -> None:
        self.window, self.state = window, init_state(window)
        self.seen: set[int] = set()

    def start(self, text: Sequence[int]) -> None:
        """Starts a request, or takes over in the middle of one whose text so far is ``text``."""
        reset(self.window, self.state)
        self.seen = set(text) if self.window.reads_cache else set()

    @property
    def gamma(self) -> int:
        """The window of the next round."""
        return int(self.state.gamma[0])

    def observe(self, num_drafted: int, num_accepted: int, emitted: Sequence[int]) -> None:
        """Learns from a round that emitted these tokens, the accepted ones first."""
        if self.window.kind == FIXED:
            return  # nothing is learned, and calling compiled code takes microseconds
        num_cached = 0
        if self.window.reads_cache:
            num_cached = sum(token in self.seen for token in emitted[:num_accepted])
            self.seen.update(emitted)
        advance(self.window, self.state, num_drafted, num_accepted, num_cached)


class Sessions(WeakKeyDictionary[Plan, Session]):
    """The sessions of one decoder: a plan's goes on where it was left when the plan comes into
    force again, and goes with the plan."""

    def of(self, plan: Plan) -> Session:
        """The session of a plan, made at the first call."""
        if plan not in self:
            self[plan] = Session(plan.window)
        return self[plan]

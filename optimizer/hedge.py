"""Exponential weights over drafts, the counterfactual baseline of a chooser (:mod:`optimizer.fit.on_the_fly`), by replay.

The text does not depend on the draft, so every draft can be scored on the same text after the fact, and what had the least loss so far
drafts on, without reading any prompt: across requests, or within them (:func:`follow_leader`), where :func:`replay_switched` replays drafts
that change between two rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from optimizer.fit.on_the_fly import FloatArray, IntArray, Measured
from optimizer.replay import ReplayTrace, run_replay
from runtime.policies.document import Policy
from runtime.policies.draft_choice import Option
from runtime.policies.plan import prepare
from traces.errors import TraceError
from traces.schema import CostCurve, LatencyProfile, Step

BLOCK: Final = 16
"""Output tokens between two choices of the draft within a request."""


def hedge_eta(drafts: int, observations: int) -> float:
    """The learning rate sqrt(8 ln K / T) that is best for T observations of K drafts when T is known."""
    return math.sqrt(8.0 * math.log(drafts) / max(1, observations))


def hedge_bound(drafts: int, observations: int, eta: float | None = None) -> float:
    """What :class:`Hedge` can lose at most beyond the best single draft, in units of loss, after T ``observations``, whatever they are.

    With a fixed ``eta``: ln K / eta + eta T / 8, at :func:`hedge_eta` sqrt(T ln K / 2). With the default rate, which knows no T:
    2 sqrt(T ln K / 2) + sqrt(ln K / 8) (Cesa-Bianchi and Lugosi, "Prediction, Learning, and Games", theorems 2.2 and 2.3).
    """
    log_k = math.log(drafts)
    if eta is not None:
        return log_k / eta + eta * observations / 8.0
    return 2.0 * math.sqrt(observations * log_k / 2.0) + math.sqrt(log_k / 8.0)


@dataclass(frozen=True, eq=False)
class Hedge:
    """Follow the leader with exponential weights: draft k has weight exp(-eta L_k), L_k the sum of its losses so far. An immutable value.

    Losses are in [0, 1] and are known of *every* draft, not only of the one used: the text does not depend on the draft, so each can be
    scored on it. ``losses`` float64 [K] are the sums, ``observations`` how many. ``eta`` None takes sqrt(8 ln K / t) at the t-th choice.
    The regret of choosing at random by :attr:`weights` is bounded (:func:`hedge_bound`); that of always taking the :attr:`leader` is not:
    an adversary that hurts the leader makes it lose every time.
    """

    losses: FloatArray
    observations: int = 0
    eta: float | None = None

    @classmethod
    def over(cls, drafts: int, eta: float | None = None) -> Hedge:
        """Without evidence: equal weights. Raises ValueError for no draft, or a rate that is not above 0."""
        if drafts < 1 or (eta is not None and not eta > 0):
            raise ValueError(f"hedge needs at least one draft and a rate above 0, not {drafts} and {eta}")
        return cls(np.zeros(drafts), 0, eta)

    @property
    def weights(self) -> FloatArray:
        """The chance of each draft in the next choice, float64 [K]."""
        eta = self.eta if self.eta is not None else hedge_eta(len(self.losses), self.observations + 1)
        raw = np.exp(-eta * (self.losses - self.losses.min()))
        return np.asarray(raw / raw.sum(), dtype=np.float64)

    @property
    def leader(self) -> int:
        """The draft with the least loss so far; the first where several tie."""
        return int(np.argmin(self.losses))

    def pick(self, u: float) -> int:
        """The draft that a uniform number ``u`` in [0, 1) draws by the weights."""
        return min(int(np.searchsorted(np.cumsum(self.weights), u, side="right")), len(self.losses) - 1)

    def observed(self, losses: npt.ArrayLike) -> Hedge:
        """With the losses [K] of all drafts on one more observation. Raises ValueError for another shape, or a loss outside [0, 1]."""
        given = np.asarray(losses, dtype=np.float64)
        if given.shape != self.losses.shape or not ((given >= 0) & (given <= 1)).all():
            raise ValueError(f"hedge needs {len(self.losses)} losses from 0 to 1, not {given}")
        return Hedge(self.losses + given, self.observations + 1, self.eta)


def loss_range(options: Sequence[Option]) -> tuple[float, float]:
    """(least, most) seconds per token that a round of any of the drafts can take: all of it accepted, or nothing. Losses are seconds per
    token between them, cut to [0, 1]."""
    rounds = [o.round_s[o.gamma_min :] for o in options]
    least = min(float((r / np.arange(o.gamma_min + 1, o.gamma_max + 2)).min()) for o, r in zip(options, rounds, strict=True))
    return least, max(float(r.max()) for r in rounds)


def position_seconds(trace: ReplayTrace, candidates: Mapping[str, Policy], profile: LatencyProfile) -> FloatArray:
    """What each draft, decoding the request from its beginning, spends on each output position: every round's seconds shared evenly by
    the tokens it emitted. float64 [positions of the requests of ``trace.order``, in that order, drafts]; sums are those of
    :attr:`Measured.seconds` less ``before``."""
    columns = []
    for policy in candidates.values():
        replayed = run_replay(trace, policy, profile, per_round=True)
        assert replayed.rounds is not None
        assert replayed.round_s is not None
        emitted = replayed.rounds[:, 5]
        columns.append(np.repeat(replayed.round_s[:, 2] / emitted, emitted))
    return np.stack(columns, axis=1)


@dataclass(frozen=True, eq=False)
class Hedged:
    """What exponential weights did over observations in order: ``weights`` [t, K] before each, ``losses`` [t, K] in [0, 1] after it,
    ``leaders`` int64 [t]; ``regret``, in units of loss, of choosing by the weights, and its ``bound``."""

    weights: FloatArray
    losses: FloatArray
    leaders: IntArray
    regret: float
    bound: float


def run_hedge(losses: FloatArray, *, eta: float | None = None) -> Hedged:
    """:class:`Hedge` over ``losses`` float64 [t, K] in [0, 1], one row after another."""
    state, weights, leaders = Hedge.over(losses.shape[1], eta), np.empty_like(losses), np.empty(len(losses), dtype=np.int64)
    for t, row in enumerate(losses):
        weights[t], leaders[t] = state.weights, state.leader
        state = state.observed(row)
    regret = float((weights * losses).sum() - losses.sum(0).min()) if len(losses) else 0.0
    return Hedged(weights, losses, leaders, regret, hedge_bound(losses.shape[1], len(losses), eta))


def hedge_requests(
    measured: Measured, options: Sequence[Option], *, eta: float | None = None
) -> tuple[Hedged, FloatArray, FloatArray]:
    """Hedge across requests: one choice for each, every draft scored on it afterwards by its seconds per token.

    Returns what it did, the expected seconds of choosing by the weights, and those of always taking the leader, float64 [requests].
    """
    least, most = loss_range(options)
    each = (measured.seconds - measured.before) / measured.new_tokens[:, None]
    done = run_hedge(np.clip((each - least) / (most - least), 0.0, 1.0), eta=eta)
    return done, (done.weights * measured.seconds).sum(1), measured.seconds[np.arange(len(each)), done.leaders]


@dataclass(frozen=True)
class _Round:
    """What :meth:`optimizer.cost.CostModel.round_seconds` reads of a round."""

    drafted: int
    draft_steps: int
    emitted: int
    lag: int


class _Reading:
    """How far each draft has read one text: output positions before ``read``; None before its prefill."""

    def __init__(self, prompt: int, prefills: Sequence[CostCurve | None]) -> None:
        self.prompt, self.prefills = prompt, prefills
        self.read: list[int | None] = [None] * len(prefills)

    def lag(self, k: int, at: int) -> tuple[int, float]:
        """(tokens that draft ``k`` reads with its next pass at position ``at``, seconds of its prefill if there was none yet)."""
        reached, curve, tokens = self.read[k], self.prefills[k], self.prompt + at - 1
        if reached is not None:
            return at - reached, 0.0
        return 1, curve.at(tokens, 0) if curve is not None and tokens > 0 else 0.0


Switch = Callable[[int, int], int]
"""Called before every round with (request in replayed order, position); says which draft goes on, by number."""


def replay_switched(
    trace: ReplayTrace,
    candidates: Mapping[str, Policy],
    profile: LatencyProfile,
    switch: Switch,
    *,
    read_every: int | None = None,
) -> tuple[FloatArray, list[list[Step]]]:
    """Replays requests whose draft, with its policy, may change before any round: (float64 seconds [requests of ``trace.order``], prefill
    included, and the rounds of each).

    As in the runtime, a draft that had not been used reads the text so far, one that had reads what it missed, and its window starts anew.
    With ``read_every`` all other drafts also read the text after so many tokens or more, which costs each a pass (and its prefill, the
    first time): that is what scoring them takes a decoder. Raises TraceError for a draft without chain panorama.
    """
    policies = list(candidates.values())
    for policy in policies:
        if trace.uses_trees(policy):
            raise TraceError(
                f"draft {policy.draft!r}: drafts are switched in replay between chains only; leave trees and heads out"
            )
    ready = [prepare(p, [p.draft], profile=profile) for p in policies]
    words = [trace.outcomes(p, r.stop) for p, r in zip(policies, ready, strict=True)]
    models = [trace.costs(p, profile)[0] for p in policies]
    prefills = [profile.draft_prefill.get(p.draft) for p in policies]
    seconds, steps = trace.costs(Policy(), profile)[1][trace.order], list[list[Step]]()
    for i, r in enumerate(trace.order):
        offset, length, hot = int(trace.offsets[r]), int(trace.offsets[r + 1] - trace.offsets[r]), bool(trace.sampled[r] > 0)
        budget, prompt = int(trace.budgets[r]), int(trace.prompts[r])
        reading, rounds = _Reading(prompt, prefills), list[Step]()
        at, scored, using, lag = 0, 0, -1, 1
        while at < length:
            if read_every is not None and at - scored >= read_every:
                scored = at
                for k, policy in enumerate(policies):
                    if k != using and policy.speculates:
                        behind, prefill_s = reading.lag(k, at)
                        pass_s = models[k].round_seconds(_Round(0, 1, 0, behind), prompt + at - 1).draft_s
                        seconds[i] += prefill_s + pass_s
                        reading.read[k] = at - 1
            k = switch(i, at)
            controller = ready[k].controller
            if k != using:
                controller.start_request()
                using = k
            gamma, word = min(controller.choose(), budget - at - 1), int(words[k][offset + at])
            drafted, passes = min(gamma, (word >> 8) & 255), min(gamma, (word >> 16) & 255)
            accepted = min(word & 255, drafted)
            emitted = min(accepted + 1, length - at)
            accepted = min(accepted, emitted)
            prefill_s = 0.0
            if passes:
                lag, prefill_s = reading.lag(k, at)
                reading.read[k] = at + min(accepted, passes - 1)
            cost = models[k].round_seconds(_Round(drafted, passes, emitted, lag), prompt + at - 1, sampled=hot)
            controller.observe(drafted, accepted, int((word >> 24) < accepted), cost.draft_s, cost.verify_s)
            seconds[i] += prefill_s + cost.round_s
            name, policy_id = policies[k].draft, ready[k].policy_id
            rounds.append(Step(at, drafted, drafted + 1, accepted, emitted, passes, lag, name, policy_id, *cost, drafted))
            at += emitted
        steps.append(rounds)
    return seconds, steps


def follow_leader(
    trace: ReplayTrace,
    candidates: Mapping[str, Policy],
    profile: LatencyProfile,
    *,
    block: int = BLOCK,
    carry: bool = False,
    charged: bool = False,
    first: int = 0,
) -> FloatArray:
    """Hedge's leader within requests: after every ``block`` output tokens the draft with the least loss so far goes on with the text.
    float64 seconds [requests of ``trace.order``], prefill included, by :func:`replay_switched`.

    A draft's loss on a block is what it would have spent there (:func:`position_seconds`). Each request begins with draft number ``first``;
    with ``carry`` losses are kept from request to request, and the leader begins. ``charged``: scoring is paid for; a replay gets it for
    nothing, a decoder does not. Raises ValueError for a block below 1.
    """
    if block < 1:
        raise ValueError(f"a block has at least one token, not {block}")
    scores = position_seconds(trace, candidates, profile)
    sampled = bool(trace.sampled[trace.order].any())
    least, most = loss_range([Option.of(d, p, profile, sampled=sampled) for d, p in candidates.items()])
    losses = np.clip((scores - least) / (most - least), 0.0, 1.0)
    begins = np.concatenate([[0], np.cumsum(np.diff(trace.offsets)[trace.order])])
    hedge, scored = Hedge.over(len(candidates)), 0

    def switch(i: int, at: int) -> int:
        nonlocal hedge, scored
        if at == 0:
            hedge, scored = hedge if carry else Hedge.over(len(candidates)), 0
        if at - scored >= block:
            hedge, scored = hedge.observed(losses[begins[i] + scored : begins[i] + at].mean(0)), at
        return hedge.leader if hedge.observations else first

    return replay_switched(trace, candidates, profile, switch, read_every=block if charged else None)[0]

"""A draft for each prompt (on-the-fly adaptation paper, section 5): how accurate each draft will be
on a prompt, and which draft that speaks for. Fitting is :mod:`optimizer.fit.on_the_fly`; what is
measured is in docs/draft_choice.md.

Equation 5 predicts the single-token accuracy alpha = u' Z of each draft from a prompt's vector u
(:mod:`runtime.policies.prompt_features`), and alpha with the profile's costs gives its throughput.
``none`` (autoregression) is a draft too, with alpha 0 and no weights; ``ngram`` is fitted like any
other. :mod:`runtime.policies.prepared_chooser` decodes with it.

Nothing here imports torch or scikit-learn; a fitted chooser is plain arrays and JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from spectune.runtime.costs import token_seconds, window_costs
from spectune.runtime.policies.blocks import ByBatchWindow, FixedWindow
from spectune.runtime.policies.document import (
    AnyPolicy,
    ChooserPolicy,
    Policy,
    Window,
    parse_policy,
)
from spectune.runtime.policies.heuristic import HeuristicWindow
from spectune.runtime.policies.on_the_fly import best_window
from spectune.runtime.policies.plan import Plan
from spectune.runtime.policies.prompt_features import SCALARS, TOKEN_PATTERN, PromptFeatures
from spectune.runtime.policies.refusals import MALFORMED, lacking, stored_numbers
from spectune.traces.cost_table import CostTable
from spectune.traces.errors import PolicyError
from spectune.traces.schema import LatencyProfile

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Rule = Literal["throughput", "theorem_3"]
"""How a draft follows from the predicted accuracies: the most expected tokens per second, or the
paper's theorem 3.
"""

NO_DRAFT: Final = "none"
TARGET: Final = "target"
"""The reader of prompts where a pair has no language model as draft."""
ACC_MAX: Final = 0.98
"""Predicted accuracies are cut to 0 .. this (Acc_max, section 4.1); a linear model knows no
bounds.
"""


_MEND: Final = "`fit chooser --recording ID` fits one"
_FEATURES: Final = ("idf", "components", "center", "scale")


def _reach(window: Window) -> tuple[int, int]:
    """The least and the most tokens that a window drafts for one request at a time."""
    match window:
        case FixedWindow():
            return window.gamma, window.gamma
        case ByBatchWindow():
            return window.at(1), window.at(1)
        case HeuristicWindow():
            return 1, window.gamma_max
        case _:
            return window.gamma_min, window.gamma_max


@dataclass(frozen=True, eq=False)
class Option:
    """One draft that may be chosen, with what its rounds cost on one device.

    ``round_s`` float64 [gamma_max + 1]: gamma a_q + b_p(gamma) (definition 1); ``draft_step_s`` is
    a_q. The window may be ``gamma_min`` .. gamma_max. ``token_s``: seconds per emitted token beside
    the rounds (the noise, at temperature > 0). ``prefill``: the draft's pass over a prompt, where
    it has one."""

    draft: str
    round_s: FloatArray
    draft_step_s: float
    gamma_min: int
    token_s: float = 0.0
    prefill: CostTable | None = None

    @classmethod
    def of(
        cls,
        draft: str,
        policy: Policy,
        profile: LatencyProfile,
        *,
        sampled: bool = False,
        ready: Plan | None = None,
    ) -> Option:
        """The costs of one policy by a profile; ``sampled``: the temperature is above 0. ``ready``
        is the policy prepared, needed where artifacts say what its trees or its shortlist are.

        Of trees a_q is a level's pass and b_p(gamma) the verification of all nodes that gamma
        levels keep. Raises PolicyError when the policy is another draft's, or the profile has no
        costs for it.
        """
        checked_candidate(draft, policy)
        rules, shortlist = (None, None) if ready is None else (ready.rules, ready.shortlist)
        costs = window_costs(profile, policy, rules, shortlist, sampled=sampled)
        round_s = np.arange(len(costs.verify_s)) * costs.draft_step_s + np.array(costs.verify_s)
        least, most = _reach(policy.window)
        return cls(
            draft,
            round_s[: most + 1],
            costs.draft_step_s,
            least,
            token_seconds(profile, sampled=sampled),
            profile.terms.get(f"prefill/{draft}") if policy.speculates else None,
        )

    def window(self, alpha: FloatArray) -> IntArray:
        """d of section 5: the best window by objective 1 at each ``alpha`` float64 [n], the
        smallest where several tie; int64 [n]."""
        return best_window(np.asarray(alpha, dtype=np.float64), self.round_s, self.gamma_min)

    def emitted(self, alpha: FloatArray) -> FloatArray:
        """Omega = (1 - alpha^(d+1)) / (1 - alpha) (equation 9) at the best window d: tokens per
        round, float64 [n]."""
        powers = np.asarray(alpha, dtype=np.float64)[:, None] ** np.arange(len(self.round_s))
        omega = powers.cumsum(axis=1)
        return np.asarray(omega[np.arange(len(omega)), self.window(alpha)], dtype=np.float64)

    def acceptance_rate(self, alpha: FloatArray) -> FloatArray:
        """rho = Omega / d (section 5): tokens emitted per token drafted, float64 [n]; infinite
        where the best window is 0."""
        drafted = self.window(alpha)
        return np.where(drafted > 0, self.emitted(alpha) / np.maximum(drafted, 1), np.inf)

    def token_seconds(self, alpha: FloatArray) -> FloatArray:
        """Expected seconds per token at the best window, (d a_q + b_p(d)) / Omega: one over
        equation 3's R, float64 [n]."""
        seconds = self.round_s[self.window(alpha)] / self.emitted(alpha) + self.token_s
        return np.asarray(seconds, dtype=np.float64)

    def prefill_seconds(self, tokens: npt.ArrayLike) -> FloatArray:
        """Seconds of the draft's own prefill of prompts of so many tokens, float64 [n]."""
        lengths = np.atleast_1d(np.asarray(tokens))
        if self.prefill is None:
            return np.zeros(len(lengths))
        return np.where(lengths > 1, self.prefill.at(rows=lengths - 1), 0.0)


def checked_candidate(draft: str, policy: AnyPolicy) -> Policy:
    """The policy of a draft. Raises PolicyError for one that is another draft's, or a chooser."""
    if isinstance(policy, ChooserPolicy):
        raise PolicyError(f"draft {draft!r}: its policy chooses drafts itself; give a plain policy")
    if policy.draft != draft:
        raise PolicyError(
            f"draft {draft!r}: its policy drafts with {policy.draft!r}; name the draft in "
            "the policy"
        )
    return policy


def theorem_3(alphas: FloatArray, options: Sequence[Option]) -> IntArray:
    """Theorem 3 for more than two drafts: indices int64 [n] into ``options`` for ``alphas`` float64
    [n, options].

    A larger draft replaces the one held where equation 4 holds, n_held - n_larger > (delta c /
    delta rho) L; docs/draft_choice.md says what c, rho and n are and what is compared otherwise.
    """
    ratio = np.array([o.draft_step_s / o.round_s[0] for o in options])
    order = sorted(range(len(options)), key=lambda k: (ratio[k], options[k].draft != NO_DRAFT))
    known = [(o, np.ascontiguousarray(alphas[:, k])) for k, o in enumerate(options)]
    rounds = np.stack([1.0 / o.emitted(a) for o, a in known], axis=1)
    rho = np.stack([o.acceptance_rate(a) for o, a in known], axis=1)
    seconds = np.stack([o.token_seconds(a) for o, a in known], axis=1)
    rows, held = np.arange(len(alphas)), np.full(len(alphas), order[0], dtype=np.int64)
    for larger in order[1:]:
        both = np.isfinite(rho[rows, held]) & np.isfinite(rho[:, larger])
        gain = np.where(both, rho[:, larger], 0.0) - np.where(both, rho[rows, held], 0.0)
        needed = (ratio[larger] - ratio[held]) / np.where(gain > 0, gain, 1.0)
        holds = (gain > 0) & (rounds[rows, held] - rounds[:, larger] > needed)
        faster = seconds[:, larger] < seconds[rows, held]
        held = np.where(np.where(both, holds, faster), larger, held)
    return held


@dataclass(frozen=True, eq=False)
class Chooser:
    """A fitted chooser: features, weights float64 [r] by draft (equation 5: alpha = u' Z), and the
    policy each draft is used with. An immutable value.

    ``calibration``: by draft, seconds that replay found on the prompts fitted to over those that
    equation 3 gives at their true accuracies; 1 is the paper's model. It holds what a mean accuracy
    does not: that agreement comes in runs, and that a window has to find its size. ``metrics`` is
    what was measured when it was fitted, JSON-ready.

    ``single`` is the draft that was fastest on the prompts fitted to. Where cross-validation on
    them found that choosing gains nothing beyond noise, ``chooses`` is False: then ``single``
    decodes everything, nothing is read or charged, and ``reason`` says why.
    """

    features: PromptFeatures
    accuracy: Mapping[str, FloatArray]
    candidates: Mapping[str, Policy]
    calibration: Mapping[str, float] = field(default_factory=dict)
    rule: Rule = "throughput"
    metrics: Mapping[str, Any] = field(default_factory=dict)
    single: str = ""
    chooses: bool = True
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.candidates:
            raise PolicyError(f"draft.artifact: the chooser has no draft to choose; {_MEND}")
        for name in sorted(self.candidates.keys() - self.accuracy.keys() - {NO_DRAFT}):
            known = ", ".join(sorted(self.accuracy)) or "none"
            raise PolicyError(
                f"draft.artifact: the chooser has no weights for draft {name!r} (it has: {known}); "
                "fit them: `fit chooser --recording ID` with a recording that has panoramas of it"
            )
        if not self.chooses and self.single not in self.candidates:
            raise ValueError(f"it keeps to draft {self.single!r}, which is none of its candidates")
        r = self.features.dimension
        for name, weights in self.accuracy.items():
            if weights.shape != (r,):
                raise ValueError(
                    f"draft {name!r} has weights {weights.shape}, the features have {r} entries"
                )

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafts that may be chosen, in order."""
        return tuple(self.candidates)

    @property
    def used(self) -> dict[str, Policy]:
        """The candidates that may decode: all, or the single draft's."""
        return {d: p for d, p in self.candidates.items() if self.chooses or d == self.single}

    @property
    def reader(self) -> str | None:
        """The model that has to read each prompt's perplexity; None where none has to."""
        return self.features.reader if self.chooses else None

    def options(
        self,
        profile: LatencyProfile,
        *,
        sampled: bool = False,
        ready: Mapping[str, Plan] | None = None,
    ) -> tuple[Option, ...]:
        """The drafts with their costs on a device, in the order of :attr:`drafts`. Raises
        PolicyError as :meth:`Option.of`."""
        return tuple(
            Option.of(d, policy, profile, sampled=sampled, ready=(ready or {}).get(d))
            for d, policy in self.candidates.items()
        )

    def reading_seconds(
        self, profile: LatencyProfile, tokens: npt.ArrayLike, picks: Sequence[str]
    ) -> FloatArray:
        """Seconds that choosing takes a decoder beyond decoding with the drafts ``picks``, for
        prompts of ``tokens`` [n] each: the pass that reads the perplexity, float64 [n]. It is the
        reader's prefill, and so free where the reader drafts; the target reads twice."""
        lengths, reader = np.atleast_1d(np.asarray(tokens)), self.reader
        if reader is None:
            return np.zeros(len(lengths))
        free = [keeps_reading(self.candidates[draft], reader) for draft in picks]
        model = None if reader == TARGET else reader
        return np.where(free, 0.0, profile.prefill_seconds(model, lengths))

    def accuracies(self, features: FloatArray) -> FloatArray:
        """Predicted alpha of each prompt and draft, float64 [n, drafts], cut to 0 ..
        :data:`ACC_MAX`; 0 for ``none``."""
        none = np.zeros(len(features))
        columns = [
            none if name == NO_DRAFT else features @ self.accuracy[name] for name in self.candidates
        ]
        return np.clip(np.stack(columns, axis=1), 0.0, ACC_MAX)

    def expected_seconds(
        self,
        alphas: FloatArray,
        options: Sequence[Option],
        tokens: npt.ArrayLike,
        new_tokens: npt.ArrayLike,
    ) -> FloatArray:
        """Expected seconds of answers of ``new_tokens`` [n] tokens to prompts of ``tokens`` [n],
        float64 [n, drafts]: equation 3 with the calibration, and the draft's prefill; what all
        drafts share (the target's prefill) is left out."""
        count = np.broadcast_to(np.asarray(new_tokens, dtype=np.float64), (len(alphas),))
        columns = []
        for option, alpha in zip(options, np.ascontiguousarray(alphas.T), strict=True):
            decoding = self.calibration.get(option.draft, 1.0) * option.token_seconds(alpha)
            columns.append(decoding * count + option.prefill_seconds(tokens))
        return np.stack(columns, axis=1)

    def decide(
        self,
        alphas: FloatArray,
        options: Sequence[Option],
        tokens: npt.ArrayLike,
        new_tokens: npt.ArrayLike,
        rule: Rule | None = None,
    ) -> IntArray:
        """The draft for each row of ``alphas`` [n, drafts], as indices int64 [n] into
        :attr:`drafts`, by ``rule``; by default as the chooser does, which may not choose at all.

        ``throughput`` takes the least expected seconds, the first where several tie.
        """
        if rule is None and not self.chooses:
            return np.full(len(alphas), self.drafts.index(self.single), dtype=np.int64)
        if (rule or self.rule) == "theorem_3":
            return theorem_3(alphas, options)
        seconds = self.expected_seconds(alphas, options, tokens, new_tokens)
        return np.asarray(seconds.argmin(axis=1), dtype=np.int64)

    def to_document(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(JSON-ready document, arrays) for an artifact; :meth:`from_document` reads them."""
        f = self.features
        document = {
            "reader": f.reader,
            "scalars": list(SCALARS),
            "token_pattern": TOKEN_PATTERN,
            "vocabulary": list(f.vocabulary),
            "rule": self.rule,
            "single": self.single,
            "chooses": self.chooses,
            "reason": self.reason,
            "candidates": {name: policy.spelled_out() for name, policy in self.candidates.items()},
            "calibration": dict(self.calibration),
            "metrics": dict(self.metrics),
        }
        arrays = {name: getattr(f, name) for name in _FEATURES}
        return document, arrays | {f"weights.{d}": weights for d, weights in self.accuracy.items()}

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> Chooser:
        """The chooser of :meth:`to_document`.

        Raises PolicyError naming the draft whose weights are missing, and for anything that is no
        chooser.
        """

        def numbers(name: str) -> FloatArray:
            return stored_numbers(arrays, name).astype(np.float64)

        try:
            candidates = {}
            for name, data in document["candidates"].items():
                policy = parse_policy(data, where=f"draft.artifact: candidate {name!r}")
                candidates[str(name)] = checked_candidate(name, policy)
            rule, unknown = document["rule"], set(document["scalars"]) ^ set(SCALARS)
            if rule not in get_args(Rule) or document["token_pattern"] != TOKEN_PATTERN:
                raise ValueError(f"a chooser by rule {rule!r} is not known here")
            if unknown:
                raise ValueError(
                    f"choosers with or without the prompt feature {min(unknown)!r} are not known "
                    "here"
                )
            calibration = {str(k): float(v) for k, v in document["calibration"].items()}
            vocabulary = tuple(str(term) for term in document["vocabulary"])
            idf, components, center, scale = map(numbers, _FEATURES)
            reader = str(document["reader"])
            features = PromptFeatures(vocabulary, idf, components, center, scale, reader)
            scales = [*scale.tolist(), *calibration.values()]
            if not all(0 < factor < math.inf for factor in scales):
                raise ValueError("scale and calibration must be finite numbers above 0")
            accuracy = {
                name: numbers(f"weights.{name}")
                for name in candidates
                if f"weights.{name}" in arrays
            }
            return cls(
                features,
                accuracy,
                candidates,
                calibration,
                rule,
                dict(document["metrics"]),
                str(document["single"]),
                bool(document["chooses"]),
                str(document["reason"]),
            )
        except MALFORMED as error:
            raise PolicyError(
                f"draft.artifact: not a chooser of drafts: {lacking(error)}; {_MEND}"
            ) from None


def keeps_reading(policy: Policy, reader: str | None) -> bool:
    """Whether the pass that read a prompt's perplexity is the prefill of the draft that then
    decodes. A router needs states that it does not keep."""
    return policy.draft == reader and not policy.shortlisted

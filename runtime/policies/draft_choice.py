"""A draft for each prompt (on-the-fly adaptation paper, section 5): what a prompt looks like, how accurate each draft will be on it, and
which draft that speaks for. Fitting is :mod:`optimizer.fit.on_the_fly`; what is measured is in docs/draft_choice.md.

A prompt is a vector u of r numbers: a constant, the logarithm of its length, the logarithm of its perplexity under the smallest draft, and
its TF-IDF vector projected to a few dimensions (the paper concatenates length, perplexity and "its TF-IDF score"). Equation 5 predicts the
single-token accuracy alpha = u' Z of each draft, and alpha with the profile's costs gives its throughput. ``none`` (autoregression) is a
draft too, with alpha 0 and no weights; ``ngram`` is fitted like any other. :mod:`runtime.policies.prepared_chooser` decodes with it.

Nothing here imports torch or scikit-learn at import time; a fitted chooser is plain arrays and JSON.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from runtime.drafts.ngram import NgramIndex
from runtime.policies.document import MALFORMED, ChooserPolicy, FixedWindow, Policy, parse_policy
from runtime.policies.on_the_fly import best_window
from runtime.policies.plan import REFERENCE_CONTEXT, Plan, window_costs
from runtime.policies.windows import WindowCosts
from traces.errors import PolicyError
from traces.schema import CostCurve, LatencyProfile, Step

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Rule = Literal["throughput", "theorem_3"]
"""How a draft follows from the predicted accuracies: the most expected tokens per second, or the paper's theorem 3."""

NO_DRAFT: Final = "none"
TARGET: Final = "target"
"""The reader of prompts where a pair has no language model as draft."""
ACC_MAX: Final = 0.98
"""Predicted accuracies are cut to 0 .. this (Acc_max, section 4.1); a linear model knows no bounds."""
TOKEN_PATTERN: Final = r"(?u)\w+|[^\w\s]"
"""What TF-IDF counts: words, and marks one by one, which tell code from prose. Text is lower-cased first."""
SCALARS: Final = ("length", "perplexity", "lookup")
"""Columns beside the constant and TF-IDF; ``lookup`` is not the paper's, and only used where it was fitted."""


# ---------------------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Prompt:
    """What a chooser reads of one prompt: its ``text``, its length in ``tokens``, ``nats`` (the logarithm of its perplexity, per token
    after the first; NaN where there is none), and ``lookup``, the share of these tokens that prompt lookup would have proposed."""

    text: str
    tokens: int
    nats: float
    lookup: float = 0.0

    @classmethod
    def of(cls, text: str, ids: Sequence[int], nats: float) -> Prompt:
        """From the text and its token ids. ``nats`` is :func:`runtime.prompts.log_perplexity` of the same ids."""
        return cls(text, len(ids), nats, lookup_share(ids))


def lookup_share(ids: Sequence[int]) -> float:
    """The share of a prompt's tokens after the first that prompt lookup (:class:`NgramIndex`) proposes from those before; 0
    for fewer than two tokens. It is the accuracy of the draft ``ngram`` on the prompt itself."""
    index, hits = NgramIndex(), 0
    for at, token in enumerate(ids):
        hits += at > 0 and index.propose() == token
        index.extend([token])
    return hits / (len(ids) - 1) if len(ids) > 1 else 0.0


@dataclass(frozen=True, eq=False)
class PromptFeatures:
    """Fitted features: prompts to vectors u.

    ``vocabulary``: V terms, by column; ``idf`` float64 [V]; ``components`` float64 [k, V], the projection. ``scalars``: which of
    :data:`SCALARS` are columns. ``center`` and ``scale`` float64 [r - 1]: mean and deviation, over the prompts fitted to, of all columns
    but the constant; predictions of ordinary least squares do not depend on them, a ridge does. ``reader``: whose perplexity it is.
    r = 1 + len(scalars) + k.

    Lengths enter as logarithms: they span orders of magnitude, and what a longer prompt adds to accuracy wears off. So do perplexities, as
    nats per token, which are means over tokens as accuracies are; the exponential of one would be ruled by a few odd prompts.
    """

    vocabulary: tuple[str, ...]
    idf: FloatArray
    components: FloatArray
    center: FloatArray
    scale: FloatArray
    reader: str
    scalars: tuple[str, ...] = ("length", "perplexity")

    def __post_init__(self) -> None:
        terms, size = len(self.vocabulary), self.dimension - 1
        wanted = {"idf": (terms,), "components": (len(self.components), terms), "center": (size,), "scale": (size,)}
        for name, shape in wanted.items():
            got = getattr(self, name).shape
            if got != shape:
                raise ValueError(f"prompt features: {name} has shape {got}, expected {shape}")

    @property
    def dimension(self) -> int:
        """r, the length of u."""
        return 1 + len(self.scalars) + len(self.components)

    @property
    def names(self) -> tuple[str, ...]:
        """What each entry of u is."""
        return ("constant", *self.scalars, *(f"tfidf {i + 1}" for i in range(len(self.components))))

    @property
    def reads(self) -> bool:
        """Whether a model has to read the prompt for them."""
        return "perplexity" in self.scalars

    @cached_property
    def _column(self) -> dict[str, int]:
        return {term: i for i, term in enumerate(self.vocabulary)}

    def tfidf(self, texts: Sequence[str]) -> FloatArray:
        """Counts times idf, rows of length 1 (or 0, without a known term): scikit-learn's ``TfidfVectorizer.transform``, float64 [n, V]."""
        out = np.zeros((len(texts), len(self.vocabulary)))
        for row, text in zip(out, texts, strict=True):
            for term, count in Counter(re.findall(TOKEN_PATTERN, text.lower())).items():
                column = self._column.get(term)
                if column is not None:
                    row[column] = count * self.idf[column]
        lengths = np.sqrt((out * out).sum(1, keepdims=True))
        return np.asarray(out / np.where(lengths > 0, lengths, 1.0), dtype=np.float64)

    def projected(self, texts: Sequence[str]) -> FloatArray:
        """TF-IDF in k dimensions: scikit-learn's ``TruncatedSVD.transform`` of it, float64 [n, k]."""
        return np.asarray(self.tfidf(texts) @ self.components.T, dtype=np.float64)

    def transform(self, prompts: Sequence[Prompt]) -> FloatArray:
        """The vectors u, float64 [n, r]. What is not known of a prompt (a perplexity of NaN) is taken to be the fitted mean."""
        raw = np.concatenate([raw_scalars(prompts, self.scalars), self.projected([p.text for p in prompts])], axis=1)
        scaled = (np.where(np.isnan(raw), self.center, raw) - self.center) / self.scale
        return np.concatenate([np.ones((len(prompts), 1)), scaled], axis=1)


def raw_scalars(prompts: Sequence[Prompt], scalars: Sequence[str]) -> FloatArray:
    """The columns named ``scalars`` before they are centred, float64 [n, len(scalars)]."""
    every = {
        "length": [math.log(max(1, p.tokens)) for p in prompts],
        "perplexity": [p.nats for p in prompts],
        "lookup": [p.lookup for p in prompts],
    }
    return np.array([every[name] for name in scalars], dtype=np.float64).reshape(len(scalars), len(prompts)).T


# ------------------------------------------------------------------------------------------------------- equation 5, online


@dataclass(frozen=True, eq=False)
class LinearAccuracy:
    """Equation 5 for one draft: alpha = u' Z.

    ``weights`` float64 [r] is Z, ``inverse`` float64 [r, r] the inverse of sum b b' (plus the ridge, where one was used) over the
    ``prompts`` fitted to.
    """

    weights: FloatArray
    inverse: FloatArray
    prompts: int

    def predict(self, features: FloatArray) -> FloatArray:
        """u' Z of each row of ``features`` [n, r]: float64 [n], not cut to [0, 1]."""
        return np.asarray(features @ self.weights, dtype=np.float64)

    def observed(self, feature: FloatArray, alpha: float) -> LinearAccuracy:
        """With one more prompt (``feature`` float64 [r], its accuracy): the same numbers as fitting again to all, in O(r^2).

        Sherman and Morrison: (A + u u')^-1 = A^-1 - A^-1 u u' A^-1 / (1 + u' A^-1 u), and Z grows by (A + u u')^-1 u (alpha - u' Z).
        Raises ValueError for an accuracy outside [0, 1].
        """
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"an accuracy is a number from 0 to 1, not {alpha}")
        gain = self.inverse @ feature
        gain = gain / (1.0 + float(feature @ gain))
        inverse = self.inverse - np.outer(gain, self.inverse @ feature)
        return LinearAccuracy(self.weights + gain * (alpha - float(feature @ self.weights)), inverse, self.prompts + 1)


def observed_accuracy(steps: Sequence[Step]) -> float:
    """The single-token accuracy that a request's rounds show: accepted / (accepted + rejections), equation 2 over all of them; NaN when
    nothing was drafted. What :meth:`Chooser.observed` takes after a request was served."""
    accepted = sum(s.accepted for s in steps)
    evidence = accepted + sum(s.accepted < s.drafted and s.emitted > s.accepted for s in steps)
    return accepted / evidence if evidence else math.nan


# ------------------------------------------------------------------------------------------------- from accuracy to throughput


@dataclass(frozen=True, eq=False)
class Option:
    """One draft that may be chosen, with what its rounds cost on one device.

    ``round_s`` float64 [gamma_max + 1]: gamma a_q + b_p(gamma) (definition 1); ``draft_step_s`` is a_q, ``target_s`` b_p(0). The window
    may be ``gamma_min`` .. ``gamma_max``. ``token_s``: seconds per emitted token beside the rounds (the noise, at temperature > 0).
    ``prefill``: the draft's pass over a prompt, where it has one.
    """

    draft: str
    policy: Policy
    round_s: FloatArray
    draft_step_s: float
    target_s: float
    gamma_min: int
    gamma_max: int
    token_s: float = 0.0
    prefill: CostCurve | None = None

    @classmethod
    def of(
        cls, draft: str, policy: Policy, profile: LatencyProfile, *, sampled: bool = False, ready: Plan | None = None
    ) -> Option:
        """The costs of one policy by a profile; ``sampled``: the temperature is above 0. ``ready`` is the policy prepared, needed where
        artifacts say what its trees or its shortlist are.

        Of trees a_q is a level's pass and b_p(gamma) the verification of all nodes that gamma levels keep. Raises PolicyError when the
        policy is another draft's, or the profile has no costs for it.
        """
        check_candidate(draft, policy)
        rules, shortlist = (None, None) if ready is None else (ready.rules, ready.shortlist)
        costs = window_costs(profile, policy, rules, shortlist)
        if costs is None:
            costs = WindowCosts(0.0, (profile.verify.at(1, REFERENCE_CONTEXT) + profile.overhead_s,))
        verify, gammas = np.array(costs.verify_s), np.arange(len(costs.verify_s))
        step_s, token_s = costs.draft_step_s, 0.0
        if sampled:
            token_s = profile.noise_s
        if sampled and not policy.is_tree:
            verify = verify + profile.sample_s * (gammas + 1)
            step_s += profile.draft_sample_s * (len(gammas) > 1)
        window = policy.window
        least = window.gamma if isinstance(window, FixedWindow) else getattr(window, "gamma_min", 0)
        return cls(
            draft,
            policy,
            gammas * step_s + verify,
            step_s,
            float(verify[0]),
            min(least, len(gammas) - 1),
            len(gammas) - 1,
            token_s,
            profile.draft_prefill.get(draft) if policy.speculates else None,
        )

    def window(self, alpha: FloatArray) -> IntArray:
        """d of section 5: the best window by objective 1 at each ``alpha`` float64 [n], the smallest where several tie; int64 [n]."""
        return best_window(np.asarray(alpha, dtype=np.float64), self.round_s, self.gamma_min)

    def emitted(self, alpha: FloatArray) -> FloatArray:
        """Omega = (1 - alpha^(d+1)) / (1 - alpha) (equation 9) at the best window d: tokens per round, float64 [n]."""
        powers = np.asarray(alpha, dtype=np.float64)[:, None] ** np.arange(self.gamma_max + 1)
        return np.asarray(np.cumsum(powers, axis=1)[np.arange(len(powers)), self.window(alpha)], dtype=np.float64)

    def acceptance_rate(self, alpha: FloatArray) -> FloatArray:
        """rho = Omega / d (section 5): tokens emitted per token drafted, float64 [n]; infinite where the best window is 0."""
        drafted = self.window(alpha)
        rate = self.emitted(alpha) / np.maximum(drafted, 1)
        return np.where(drafted > 0, rate, np.inf)

    def token_seconds(self, alpha: FloatArray) -> FloatArray:
        """Expected seconds per token at the best window, (d a_q + b_p(d)) / Omega: one over equation 3's R, float64 [n]."""
        return np.asarray(self.round_s[self.window(alpha)] / self.emitted(alpha) + self.token_s, dtype=np.float64)

    def prefill_seconds(self, tokens: npt.ArrayLike) -> FloatArray:
        """Seconds of the draft's own prefill of prompts of so many tokens, float64 [n]."""
        lengths = np.atleast_1d(np.asarray(tokens))
        if self.prefill is None:
            return np.zeros(len(lengths))
        return np.array([self.prefill.at(n - 1, 0) if n > 1 else 0.0 for n in lengths])


def check_candidate(draft: str, policy: Policy) -> None:
    """Raises PolicyError for a policy that is another draft's, or a chooser's."""
    if isinstance(policy, ChooserPolicy):
        raise PolicyError(f"draft {draft!r}: its policy chooses drafts itself; give a plain policy")
    if policy.draft != draft:
        raise PolicyError(f"draft {draft!r}: its policy drafts with {policy.draft!r}; name the draft in the policy")


def theorem_3(alphas: FloatArray, options: Sequence[Option]) -> IntArray:
    """Theorem 3 for more than two drafts: indices int64 [n] into ``options`` for ``alphas`` float64 [n, options].

    The drafts are taken by their latency ratio, smallest first; a larger one replaces the one held where equation 4 holds,
    delta n > (delta c / delta rho) L. What the paper leaves open is settled so:

    - c = a_q / b_p(0), the target's plain step: one number per draft, whatever its window.
    - d, rho and n of each draft are those at its own best window by objective 1: rho = Omega / d, n = L / (d rho) = L / Omega, and
      so L cancels. delta n = n_held - n_larger, delta c = c_larger - c_held, delta rho = rho_larger - rho_held.
    - delta rho <= 0 (a larger window can lower rho although alpha is higher): the condition does not hold. As printed it would be
      true for any negative delta rho; the theorem presumes an *improvement*.
    - A draft whose best window is 0, ``none`` among them, drafts nothing, and rho is not defined: it is compared by equation 3 itself.

    The condition is sufficient, not necessary (:func:`optimizer.throughput.larger_draft_condition`), so larger drafts are taken too rarely.
    """
    order = sorted(
        range(len(options)), key=lambda k: (options[k].draft_step_s / options[k].target_s, options[k].draft != NO_DRAFT)
    )
    ratio = np.array([o.draft_step_s / o.target_s for o in options])
    columns = [np.ascontiguousarray(alphas[:, k]) for k in range(len(options))]
    rounds = np.stack([1.0 / o.emitted(a) for o, a in zip(options, columns, strict=True)], axis=1)
    rho = np.stack([o.acceptance_rate(a) for o, a in zip(options, columns, strict=True)], axis=1)
    seconds = np.stack([o.token_seconds(a) for o, a in zip(options, columns, strict=True)], axis=1)
    rows, held = np.arange(len(alphas)), np.full(len(alphas), order[0], dtype=np.int64)
    for larger in order[1:]:
        both = np.isfinite(rho[rows, held]) & np.isfinite(rho[:, larger])
        gain = np.where(both, rho[:, larger], 0.0) - np.where(both, rho[rows, held], 0.0)
        needed = (ratio[larger] - ratio[held]) / np.where(gain > 0, gain, 1.0)
        holds = (gain > 0) & (rounds[rows, held] - rounds[:, larger] > needed)
        faster = seconds[:, larger] < seconds[rows, held]
        held = np.where(np.where(both, holds, faster), larger, held)
    return held


# --------------------------------------------------------------------------------------------------------------- the chooser


@dataclass(frozen=True)
class Choice:
    """What was chosen for one prompt, and why: ``accuracy`` and expected ``tokens_per_s`` (the draft's prefill included) by draft;
    ``gamma`` is the chosen draft's best window."""

    draft: str
    policy: Policy
    gamma: int
    accuracy: Mapping[str, float]
    tokens_per_s: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Chooser:
    """A fitted chooser: features, weights by draft, and the policy each draft is used with. An immutable value.

    ``calibration``: by draft, seconds that replay found on the prompts fitted to over those that equation 3 gives at their true
    accuracies; 1 is the paper's model. It holds what a mean accuracy does not: that agreement comes in runs, and that a window has to
    find its size. ``metrics`` is what was measured when it was fitted, JSON-ready.

    ``single`` is the draft that was fastest on the prompts fitted to. Where cross-validation on them found that choosing gains nothing
    beyond noise, ``chooses`` is False: then ``single`` decodes everything, nothing is read or charged, and ``reason`` says why.
    """

    features: PromptFeatures
    accuracy: Mapping[str, LinearAccuracy]
    candidates: Mapping[str, Policy]
    calibration: Mapping[str, float] = field(default_factory=dict)
    rule: Rule = "throughput"
    metrics: Mapping[str, Any] = field(default_factory=dict)
    single: str = ""
    chooses: bool = True
    reason: str = ""

    def __post_init__(self) -> None:
        require_weights(self.candidates, self.accuracy)
        if not self.chooses and self.single not in self.candidates:
            raise ValueError(f"it keeps to draft {self.single!r}, which is none of its candidates")
        for name, fitted in self.accuracy.items():
            r = self.features.dimension
            if fitted.weights.shape != (r,) or fitted.inverse.shape != (r, r):
                raise ValueError(f"draft {name!r} has weights {fitted.weights.shape}, the features have {r} entries")

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafts that may be chosen, in order."""
        return tuple(self.candidates)

    @property
    def used(self) -> dict[str, Policy]:
        """The candidates that may decode: all, or the single draft's."""
        return dict(self.candidates) if self.chooses else {self.single: self.candidates[self.single]}

    @property
    def reader(self) -> str | None:
        """The model that has to read each prompt's perplexity; None where none has to."""
        return self.features.reader if self.chooses and self.features.reads else None

    def options(
        self, profile: LatencyProfile, *, sampled: bool = False, ready: Mapping[str, Plan] | None = None
    ) -> tuple[Option, ...]:
        """The drafts with their costs on a device, in the order of :attr:`drafts`. Raises PolicyError as :meth:`Option.of`."""
        known = ready or {}
        return tuple(Option.of(d, policy, profile, sampled=sampled, ready=known.get(d)) for d, policy in self.candidates.items())

    def reading_seconds(self, profile: LatencyProfile, tokens: npt.ArrayLike, picks: Sequence[str]) -> FloatArray:
        """Seconds that choosing takes a decoder beyond decoding with the drafts ``picks``, for prompts of ``tokens`` [n] each: the pass
        that reads the perplexity, float64 [n]. It is the reader's prefill, and so free where the reader drafts; the target reads twice."""
        lengths, reader = np.atleast_1d(np.asarray(tokens)), self.reader
        curve = profile.prefill if reader == TARGET else profile.draft_prefill.get(reader or "")
        free = [curve is None or n < 2 or keeps_reading(self.candidates[d], reader) for n, d in zip(lengths, picks, strict=True)]
        return np.array([0.0 if f or curve is None else curve.at(int(n) - 1, 0) for f, n in zip(free, lengths, strict=True)])

    def accuracies(self, features: FloatArray) -> FloatArray:
        """Predicted alpha of each prompt and draft, float64 [n, drafts], cut to 0 .. :data:`ACC_MAX`; 0 for ``none``."""
        columns = [
            np.clip(self.accuracy[name].predict(features), 0.0, ACC_MAX) if name != NO_DRAFT else np.zeros(len(features))
            for name in self.candidates
        ]
        return np.stack(columns, axis=1)

    def expected_seconds(
        self, alphas: FloatArray, options: Sequence[Option], tokens: npt.ArrayLike, new_tokens: npt.ArrayLike
    ) -> FloatArray:
        """Expected seconds of answers of ``new_tokens`` [n] tokens to prompts of ``tokens`` [n], float64 [n, drafts]: equation 3 with the
        calibration, and the draft's prefill; what all drafts share (the target's prefill) is left out."""
        factors = [self.calibration.get(o.draft, 1.0) for o in options]
        count = np.broadcast_to(np.asarray(new_tokens, dtype=np.float64), (len(alphas),))
        columns = [
            f * o.token_seconds(np.ascontiguousarray(alphas[:, k])) * count + o.prefill_seconds(tokens)
            for k, (o, f) in enumerate(zip(options, factors, strict=True))
        ]
        return np.stack(columns, axis=1)

    def decide(
        self,
        alphas: FloatArray,
        options: Sequence[Option],
        tokens: npt.ArrayLike,
        new_tokens: npt.ArrayLike,
        rule: Rule | None = None,
    ) -> IntArray:
        """The draft for each row of ``alphas`` [n, drafts], as indices int64 [n] into :attr:`drafts`, by ``rule``; by default as the
        chooser does, which may not choose at all.

        ``throughput`` takes the least expected seconds, the first where several tie.
        """
        if rule is None and not self.chooses:
            return np.full(len(alphas), self.drafts.index(self.single), dtype=np.int64)
        if (rule or self.rule) == "theorem_3":
            return theorem_3(alphas, options)
        return np.asarray(np.argmin(self.expected_seconds(alphas, options, tokens, new_tokens), axis=1), dtype=np.int64)

    def choose(self, prompt: Prompt, options: Sequence[Option], new_tokens: int) -> Choice:
        """The draft for a prompt that is to be answered with up to ``new_tokens`` tokens."""
        alphas = self.accuracies(self.features.transform([prompt]))
        k = int(self.decide(alphas, options, [prompt.tokens], new_tokens)[0])
        seconds = self.expected_seconds(alphas, options, [prompt.tokens], new_tokens)[0]
        chosen = options[k]
        return Choice(
            chosen.draft,
            chosen.policy,
            int(chosen.window(alphas[:, k])[0]),
            dict(zip(self.drafts, alphas[0].tolist(), strict=True)),
            dict(zip(self.drafts, (new_tokens / seconds).tolist(), strict=True)),
        )

    def observed(self, draft: str, prompt: Prompt, alpha: float) -> Chooser:
        """With what a served request showed of the draft that served it (:func:`observed_accuracy`); without evidence (``none``, or
        NaN) the chooser as it is."""
        if draft == NO_DRAFT or math.isnan(alpha):
            return self
        seen = self.accuracy[draft].observed(self.features.transform([prompt])[0], alpha)
        return replace(self, accuracy={**self.accuracy, draft: seen})

    def to_document(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(JSON-ready document, arrays) for an artifact; :meth:`from_document` reads them."""
        document = {
            "reader": self.features.reader,
            "scalars": list(self.features.scalars),
            "token_pattern": TOKEN_PATTERN,
            "vocabulary": list(self.features.vocabulary),
            "rule": self.rule,
            "single": self.single,
            "chooses": self.chooses,
            "reason": self.reason,
            "candidates": {name: policy.spelled_out() for name, policy in self.candidates.items()},
            "calibration": dict(self.calibration),
            "prompts": {name: fitted.prompts for name, fitted in self.accuracy.items()},
            "metrics": dict(self.metrics),
        }
        f = self.features
        arrays: dict[str, npt.NDArray[Any]] = {"idf": f.idf, "components": f.components, "center": f.center, "scale": f.scale}
        for name, fitted in self.accuracy.items():
            arrays |= {f"weights.{name}": fitted.weights, f"inverse.{name}": fitted.inverse}
        return document, arrays

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], *, drafts: Collection[str] | None = None
    ) -> Chooser:
        """The chooser of :meth:`to_document`; with ``drafts`` it must be able to choose each of these (a pair's).

        Raises PolicyError naming the draft whose weights are missing, and for anything that is no chooser.
        """
        try:
            candidates = {
                str(name): parse_policy(policy, where=f"draft.artifact: candidate {name!r}")
                for name, policy in document["candidates"].items()
            }
            for name, policy in candidates.items():
                check_candidate(name, policy)
            if document["rule"] not in get_args(Rule) or document["token_pattern"] != TOKEN_PATTERN:
                raise PolicyError(f"draft.artifact: a chooser by rule {document['rule']!r} is not known here; {_MEND}")
            unknown = sorted(set(document["scalars"]) - set(SCALARS))
            if unknown:
                raise PolicyError(f"draft.artifact: the prompt feature {unknown[0]!r} is not known here; {_MEND}")
            require_weights({**candidates, **dict.fromkeys(drafts or ())}, _names(arrays))
            idf, components, center, scale = (finite_array(arrays, name) for name in ("idf", "components", "center", "scale"))
            calibration = {str(k): float(v) for k, v in document["calibration"].items()}
            if not ((scale > 0).all() and all(0 < v < math.inf for v in calibration.values())):
                raise ValueError("scale and calibration must be finite numbers above 0")
            vocabulary, scalars = tuple(str(t) for t in document["vocabulary"]), tuple(str(x) for x in document["scalars"])
            features = PromptFeatures(vocabulary, idf, components, center, scale, str(document["reader"]), scalars)
            return cls(
                features,
                {
                    name: LinearAccuracy(
                        finite_array(arrays, f"weights.{name}"),
                        finite_array(arrays, f"inverse.{name}"),
                        int(document["prompts"][name]),
                    )
                    for name in candidates
                    if name != NO_DRAFT
                },
                candidates,
                calibration,
                document["rule"],
                dict(document["metrics"]),
                str(document["single"]),
                bool(document["chooses"]),
                str(document["reason"]),
            )
        except MALFORMED as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise PolicyError(f"draft.artifact: not a chooser of drafts: {what}; {_MEND}") from None


def keeps_reading(policy: Policy, reader: str | None) -> bool:
    """Whether the pass that read a prompt's perplexity is the prefill of the draft that then decodes. A router needs states that it does
    not keep."""
    return policy.draft == reader and not policy.shortlisted


_MEND: Final = "`fit chooser --recording ID` fits one"


def finite_array(arrays: Mapping[str, npt.NDArray[Any]], name: str) -> FloatArray:
    """An artifact's array as float64. Raises KeyError where it is missing, and ValueError for anything but finite numbers."""
    array = arrays[name]
    if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        raise ValueError(f"{name} must hold finite numbers")
    return np.asarray(array, dtype=np.float64)


def _names(arrays: Mapping[str, Any]) -> set[str]:
    """The drafts whose weights, both arrays of them, are among an artifact's arrays."""
    weights, inverses = ({n.removeprefix(p) for n in arrays if n.startswith(p)} for p in ("weights.", "inverse."))
    return weights & inverses


def require_weights(drafts: Collection[str], fitted: Collection[str]) -> None:
    """Raises PolicyError for the first of ``drafts`` (``none`` needs nothing) that is not among the fitted ones, or if there are none."""
    if not drafts:
        raise PolicyError(f"draft.artifact: the chooser has no draft to choose; {_MEND}")
    for name in drafts:
        if name != NO_DRAFT and name not in fitted:
            known = ", ".join(sorted(fitted)) or "none"
            raise PolicyError(
                f"draft.artifact: the chooser has no weights for draft {name!r} (it has: {known}); fit them: "
                "`fit chooser --recording ID` with a recording that has panoramas of it"
            )

"""Fitting a chooser of drafts (on-the-fly adaptation paper, section 5) to a recording, and what
choosing is worth on the rest of it.

A recording knows, for every draft and position, whether the draft would have proposed the text's
token, so the accuracy alpha of every draft on every prompt is counted, not estimated from rounds;
and replay says what every draft with its policy would have cost on every request. A chooser is
fitted to some requests (:func:`optimizer.parts.split`) and measured on the others, against the best
single draft and against an oracle that knows each request's best draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from spectune.optimizer.parts import Parts, split
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import Replay, ReplayTrace
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import Policy
from spectune.runtime.policies.draft_choice import (
    ACC_MAX,
    NO_DRAFT,
    TARGET,
    Chooser,
    Option,
    Rule,
)
from spectune.runtime.policies.plan import compile_plan
from spectune.runtime.policies.prompt_features import (
    SCALARS,
    TOKEN_PATTERN,
    Prompt,
    PromptFeatures,
    raw_scalars,
)
from spectune.runtime.prompts import prompt_reader, read_prompt
from spectune.traces.errors import TraceError
from spectune.traces.schema import AGREE_NONE, AGREE_YES, PROB_SCALE, LatencyProfile, Trajectory

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

COMPONENTS: Final = 7
"""Dimensions that TF-IDF is projected to; with constant, length and perplexity r = 10, the middle
of the paper's table 13 (4 to 16)."""
PROMPTS_PER_FEATURE: Final = 3
"""Prompts that must stand behind each entry of u; with fewer, TF-IDF gets fewer dimensions."""
MAX_TERMS: Final = 4096
MIN_PROMPTS: Final = 2
"""Most terms that TF-IDF knows, and prompts that a term must occur in."""
RIDGES: Final = tuple(float(x) for x in np.logspace(-3, 3, 25))
"""Ridges per prompt that cross-validation chooses from; at the largest, predictions are hardly more
than the mean accuracy."""
FOLDS: Final = 5
"""Parts of cross-validation that tell whether choosing gains anything."""
RESAMPLES: Final = 1000
"""Bootstrap samples of requests behind an interval."""


# -------------------------------------------------------------------------------- what is fitted to


def agreement(trace: ReplayTrace, draft: str) -> FloatArray:
    """The chance that a draft's proposal is accepted at each position of a trace's trajectories,
    float64 [positions].

    With the coupled verifier 0 or 1: whether the proposal is the text's token; with the rejection
    verifier above temperature 0 the recorded chance. No proposal (prompt lookup without a match) is
    0; for ``none`` all are. Raises TraceError where the recording has no chain panorama of the
    draft (a head has none).
    """
    if draft == NO_DRAFT:
        return np.zeros(int(trace.offsets[-1]))
    chains = trace.chains.get(draft)
    if chains is None:
        known = ", ".join(sorted(trace.chains)) or "none"
        raise TraceError(
            f"the recording has no chain panorama of draft {draft!r} (it has: {known}), and its "
            "accuracy cannot be counted: "
            "`record --resume ID` makes those of language models and ngram; leave heads out"
        )
    chance = (chains.agree != AGREE_NONE) * (chains.accept / float(PROB_SCALE))
    drawn = np.repeat(chains.drawn, np.diff(trace.offsets))
    return np.asarray(np.where(drawn, chance, chains.agree == AGREE_YES), dtype=np.float64)


def accuracy(trace: ReplayTrace, draft: str) -> FloatArray:
    """The single-token accuracy alpha of a draft on each request of ``trace.order``, float64
    [requests]. Raises TraceError as :func:`agreement` does, and for a request without output."""
    begins, ends = trace.offsets[trace.order], trace.offsets[trace.order + 1]
    if (begins == ends).any():
        raise TraceError(
            "a request of the recording has no output, so no draft's accuracy on it; leave it out"
        )
    sums = np.concatenate([[0.0], np.cumsum(agreement(trace, draft))])
    return np.asarray((sums[ends] - sums[begins]) / (ends - begins))


def level_accuracies(replayed: Replay) -> FloatArray:
    """Equation 2 over all rounds of each request of a replay with ``per_round``, float64
    [requests]: levels accepted over levels accepted and rejections; 0 where nothing was drafted.
    What stands for alpha where a chain's tokens do not say it: trees, shortlists, heads."""
    assert replayed.rounds is not None
    request, accepted, emitted, depth = replayed.rounds[:, [0, 4, 5, 8]].T.astype(np.int64)
    stopped, requests = (accepted < depth) & (emitted > accepted), len(replayed.counts)
    kept = np.bincount(request, weights=accepted, minlength=requests)
    rejected = np.bincount(request, weights=stopped, minlength=requests)
    return np.asarray(kept / np.maximum(1.0, kept + rejected), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Measured:
    """What replay knows of n requests and K drafts with their policies.

    ``alphas`` [n, K] (:func:`accuracy` of chains, else :func:`level_accuracies`); ``seconds`` [n,
    K] in all, of which ``before`` [n, K] before the first round; ``prompt_tokens``, ``new_tokens``
    and ``budgets`` int64 [n]; ``sampled``: some were decoded above temperature 0.
    """

    drafts: tuple[str, ...]
    alphas: FloatArray
    seconds: FloatArray
    before: FloatArray
    prompt_tokens: IntArray
    new_tokens: IntArray
    budgets: IntArray
    sampled: bool

    @classmethod
    def of(
        cls,
        trace: ReplayTrace,
        candidates: Mapping[str, Policy],
        profile: LatencyProfile,
        *,
        artifacts: Artifacts | None = None,
    ) -> Measured:
        """Replays every policy on the requests of ``trace.order``. Raises TraceError as
        :func:`accuracy` and replay do."""
        order, columns = trace.order, []
        for draft, policy in candidates.items():
            chain = not policy.is_tree and not policy.shortlisted
            plain = draft == NO_DRAFT or (draft in trace.chains and chain)
            replayed = run_replay(
                trace, policy, profile, per_round=not plain, artifacts=artifacts, approximate=True
            )
            alpha = accuracy(trace, draft) if plain else level_accuracies(replayed)
            before = profile.request_seconds(draft if policy.speculates else None, trace.prompts)
            columns.append((alpha, replayed.seconds, before[order]))
        alphas, seconds, before = (np.stack(c, axis=1) for c in zip(*columns, strict=True))
        lengths, sampled = np.diff(trace.offsets)[order], bool(trace.sampled[order].any())
        requests = trace.prompts[order], lengths, trace.budgets[order], sampled
        return cls(tuple(candidates), alphas, seconds, before, *requests)

    def take(self, rows: IntArray) -> Measured:
        """The same of some requests, by their rows."""
        fields = ("alphas", "seconds", "before", "prompt_tokens", "new_tokens", "budgets")
        return replace(self, **{name: getattr(self, name)[rows] for name in fields})

    @property
    def single(self) -> str:
        """The draft that is fastest over all requests."""
        return self.drafts[int(self.seconds.sum(0).argmin())]


def read_prompts(
    pair: LoadedPair, trajectories: Sequence[Trajectory], *, reader: str | None = None
) -> tuple[Prompt, ...]:
    """Every trajectory's prompt as a chooser reads it, by one pass of ``reader``, by default
    :func:`runtime.prompts.prompt_reader`."""
    name = prompt_reader(pair) if reader is None else reader
    return tuple(read_prompt(pair, t.prompt_ids.tolist(), name) for t in trajectories)


def predict_each(chooser: Chooser, prompts: Sequence[Prompt]) -> FloatArray:
    """What a chooser predicts, float64 [n, drafts]: one by one, as a decoder does. A product of
    matrices need not have the same last bits."""
    return np.concatenate([chooser.accuracies(chooser.features.transform([p])) for p in prompts])


# ------------------------------------------------------------------------------------------ fitting


def fit_features(prompts: Sequence[Prompt], *, reader: str = TARGET) -> PromptFeatures:
    """Fits the features to prompts: scikit-learn's ``TfidfVectorizer`` and ``TruncatedSVD``, then
    mean and deviation of each column.

    TF-IDF gets :data:`COMPONENTS` dimensions, less where there are fewer than
    :data:`PROMPTS_PER_FEATURE` prompts per entry of u or fewer terms. A column that does not vary
    is left unscaled. Raises TraceError when there are fewer than 2 prompts.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    if len(prompts) < 2:
        raise TraceError(
            f"a chooser is fitted to at least 2 prompts, not {len(prompts)}; record more requests"
        )
    texts = [p.text for p in prompts]
    vocabulary: tuple[str, ...] = ()
    idf, projection = np.zeros(0), np.zeros((0, 0))
    vectorizer = TfidfVectorizer(
        token_pattern=TOKEN_PATTERN, min_df=MIN_PROMPTS, max_features=MAX_TERMS, dtype=np.float64
    )
    with suppress(ValueError):  # no term occurs in enough of them
        counts = vectorizer.fit_transform(texts)
        vocabulary = tuple(str(t) for t in vectorizer.get_feature_names_out())
        idf = np.asarray(vectorizer.idf_, dtype=np.float64)
    if vocabulary:
        room = len(prompts) // PROMPTS_PER_FEATURE - 1 - len(SCALARS)
        k = min(COMPONENTS, room, len(vocabulary) - 1, len(prompts) - 1)
        projection = np.zeros((0, len(vocabulary)))
        if k > 0:
            # Prompts that are all alike explain a share of no variance.
            with np.errstate(invalid="ignore"):
                svd = TruncatedSVD(n_components=k, random_state=0).fit(counts)
            projection = np.asarray(svd.components_, dtype=np.float64)
    columns = len(SCALARS) + len(projection)
    bare = PromptFeatures(vocabulary, idf, projection, np.zeros(columns), np.ones(columns), reader)
    raw = np.concatenate([raw_scalars(prompts), bare.projected(texts)], axis=1)
    known = ~np.isnan(raw)
    center = np.where(known, raw, 0.0).sum(0) / np.maximum(1, known.sum(0))
    scale = np.sqrt((np.where(known, raw - center, 0.0) ** 2).sum(0) / np.maximum(1, known.sum(0)))
    return replace(bare, center=center, scale=np.where(scale > 1e-12, scale, 1.0))


def least_squares(features: FloatArray, alpha: FloatArray) -> FloatArray:
    """Equation 5's estimate of Z from ``features`` [n, r] and accuracies [n], with a ridge:
    (sum b b' + ridge n D)^-1 sum b alpha, D the identity without the constant's entry; float64 [r].

    The ridge is that of :data:`RIDGES` with the least squared error of leave-one-out predictions
    (scikit-learn's ``RidgeCV``); the largest for fewer than 3 prompts.
    """
    from sklearn.linear_model import RidgeCV

    n = len(features)
    ridges = RIDGES if n > 2 else RIDGES[-1:]
    model = RidgeCV(alphas=[n * ridge for ridge in ridges]).fit(features[:, 1:], alpha)
    return np.array([model.intercept_, *model.coef_], dtype=np.float64)


def calibrate(measured: Measured, options: Sequence[Option]) -> dict[str, float]:
    """:attr:`runtime.policies.draft_choice.Chooser.calibration`: replayed seconds of all rounds
    over those that equation 3 gives at the true accuracies."""
    alphas = np.clip(measured.alphas, 0.0, ACC_MAX)
    rounds = measured.seconds - measured.before
    return {
        o.draft: float(
            rounds[:, k].sum() / (o.token_seconds(alphas[:, k]) * measured.new_tokens).sum()
        )
        for k, o in enumerate(options)
    }


def fit_chooser(
    trace: ReplayTrace,
    prompts: Sequence[Prompt],
    candidates: Mapping[str, Policy],
    profile: LatencyProfile,
    *,
    parts: Parts | None = None,
    reader: str = TARGET,
    rule: Rule = "throughput",
    seed: int = 0,
    artifacts: Artifacts | None = None,
) -> Chooser:
    """Fits a chooser of ``candidates`` (a policy for each draft, ``none`` and ``ngram`` among them
    if wanted) to the search part of a trace: of ``parts``, which a recording has
    (:func:`optimizer.parts.recorded_parts`), or as :func:`optimizer.parts.split` deals.

    ``prompts`` are those of ``trace.trajectories``, in order (:func:`read_prompts`), and ``reader``
    is who read them. A ridge by cross-validation shrinks towards the mean what the prompts do not
    bear out. The chooser keeps to the best single draft unless :func:`cross_validated` finds a gain
    beyond noise; ``seed`` deals the requests into its parts. ``Chooser.metrics`` has
    :func:`evaluate` on the requests fitted to and on the others.

    Raises PolicyError for a candidate that cannot be weighed, TraceError when the recording lacks a
    draft or has too few prompts.
    """
    parts = split([t.category for t in trace.trajectories]) if parts is None else parts
    fit_part, test_part = parts.search, sorted([*parts.race, *parts.confirm])
    measured = Measured.of(trace.select(fit_part), candidates, profile, artifacts=artifacts)
    options = tuple(
        Option.of(
            d,
            p,
            profile,
            sampled=measured.sampled,
            ready=compile_plan(p, [d], profile=profile, artifacts=artifacts),
        )
        for d, p in candidates.items()
    )
    chosen = [prompts[r] for r in fit_part]

    def fitted_to(rows: IntArray) -> Chooser:
        own, part = [chosen[r] for r in rows], measured.take(rows)
        features = fit_features(own, reader=reader)
        matrix = features.transform(own)
        weights = {
            d: least_squares(matrix, alpha)
            for d, alpha in zip(candidates, part.alphas.T, strict=True)
            if d != NO_DRAFT
        }
        factors = calibrate(part, options)
        return Chooser(features, weights, dict(candidates), factors, rule, single=part.single)

    chooser = fitted_to(np.arange(len(chosen)))
    gained = cross_validated(measured, chosen, fitted_to, options, profile, seed=seed)
    chooser = replace(chooser, chooses=gained.holds, reason=gained.reason)
    metrics: dict[str, Any] = {
        "features": list(chooser.features.names),
        "cross_validated": asdict(gained),
        "fit": evaluate(chooser, measured, chosen, profile, options=options),
    }
    if test_part:
        held_out = Measured.of(trace.select(test_part), candidates, profile, artifacts=artifacts)
        unseen = [prompts[r] for r in test_part]
        metrics["held_out"] = evaluate(chooser, held_out, unseen, profile, options=options)
    return replace(chooser, metrics=metrics)


@dataclass(frozen=True)
class Gained:
    """What choosing gains by cross-validation: speed over one draft for all, less 1, and its 95%
    bootstrap interval over ``requests``. Both are 0 where there are too few to say (``folds`` 0).
    """

    requests: int
    folds: int
    gain: float = 0.0
    interval: Sequence[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def holds(self) -> bool:
        """Whether it is a gain beyond noise."""
        return self.folds > 0 and self.interval[0] > 0.0

    @property
    def reason(self) -> str:
        """Why the chooser chooses, or does not."""
        if not self.folds:
            return f"{self.requests} requests are too few to tell whether choosing gains anything"
        gain, low, high = (100 * x for x in (self.gain, *self.interval))
        return (
            f"by {self.folds}-fold cross-validation on the {self.requests} requests fitted to, "
            f"choosing gains {gain:.1f}% ({low:.1f} to {high:.1f}) over one draft for all: "
            f"{'' if self.holds else 'not '}beyond noise"
        )


def cross_validated(
    measured: Measured,
    prompts: Sequence[Prompt],
    fit: Callable[[IntArray], Chooser],
    options: Sequence[Option],
    profile: LatencyProfile,
    *,
    folds: int = FOLDS,
    seed: int = 0,
) -> Gained:
    """What choosing gains on requests that were not fitted to: each of ``folds`` parts is chosen
    for by a chooser fitted to the others (``fit``, by rows of ``measured``), charged for reading
    its prompts, and held against the single draft that was fastest on the others."""
    n = len(prompts)
    if n < 2 * folds:
        return Gained(n, 0)
    order, spent, base = np.random.default_rng(seed).permutation(n), np.empty(n), np.empty(n)
    for rows in np.array_split(order, folds):
        chooser, part = fit(np.sort(np.setdiff1d(order, rows))), measured.take(rows)
        alphas = chooser.accuracies(chooser.features.transform([prompts[r] for r in rows]))
        picks = chooser.decide(alphas, options, part.prompt_tokens, part.budgets)
        reading = chooser.reading_seconds(
            profile, part.prompt_tokens, [chooser.drafts[k] for k in picks]
        )
        spent[rows] = part.seconds[np.arange(len(rows)), picks] + reading
        base[rows] = part.seconds[:, chooser.drafts.index(chooser.single)]
    return Gained(n, folds, float(base.sum() / spent.sum()) - 1.0, _interval(base, spent))


# --------------------------------------------------------------------------------------- evaluation


def evaluate(
    chooser: Chooser,
    measured: Measured,
    prompts: Sequence[Prompt],
    profile: LatencyProfile,
    *,
    options: Sequence[Option] | None = None,
) -> dict[str, Any]:
    """What choosing is worth on some requests, JSON-ready: every request is charged what replay
    says the choice cost, and the pass that reads the prompt's perplexity
    (:meth:`Chooser.reading_seconds`). ``prompts`` are those of ``measured``'s requests.
    ``options``: of the candidates, where they need artifacts.

    ``accuracy``: mean alpha by draft. ``r2`` of the predicted accuracies, by draft (None where all
    are equal). ``tokens_per_s``: total tokens over total seconds of every draft, of the ``oracle``
    that takes each request's fastest draft, and of the rules: ``throughput``, ``theorem_3``,
    ``known`` (the rule ``throughput`` told the true accuracies, which is what better prediction
    could reach), and ``guarded`` (what the chooser does, which may be not to choose). ``single``:
    the best single draft on these requests, known in hindsight.
    ``gain``: tokens per second over the best single draft's, less 1; ``interval``: its 95%
    bootstrap interval over requests, the single draft kept. ``share``: of the oracle's gain in
    seconds (1: the oracle, 0: the best single draft, below: worse than not choosing; None where
    there is nothing to gain). ``picks``: requests by rule and draft.
    """
    options = chooser.options(profile, sampled=measured.sampled) if options is None else options
    predicted = chooser.accuracies(chooser.features.transform(prompts))
    rows, drafts = np.arange(len(predicted)), measured.drafts
    spent: dict[str, FloatArray] = {draft: measured.seconds[:, k] for k, draft in enumerate(drafts)}
    single = measured.single
    best = spent[single]
    spent["oracle"] = measured.seconds.min(1)
    picked = {"oracle": measured.seconds.argmin(1)}
    known = np.clip(measured.alphas, 0.0, ACC_MAX)
    choosing = replace(chooser, chooses=True)
    rules: tuple[tuple[str, FloatArray, Rule | None, Chooser], ...] = (
        ("throughput", predicted, "throughput", choosing),
        ("theorem_3", predicted, "theorem_3", choosing),
        ("known", known, "throughput", choosing),
        ("guarded", predicted, None, chooser),
    )
    prompt_tokens = measured.prompt_tokens
    for name, alphas, rule, by in rules:
        picked[name] = picks = by.decide(alphas, options, prompt_tokens, measured.budgets, rule)
        spent[name] = measured.seconds[rows, picks]
        if name != "known":
            chosen = [drafts[k] for k in picks]
            spent[name] = spent[name] + by.reading_seconds(profile, prompt_tokens, chosen)
    others = ("oracle", *(name for name, *_ in rules))
    saved = {name: float(best.sum() - spent[name].sum()) for name in others}
    tokens = int(measured.new_tokens.sum())
    fitted = {
        d: (measured.alphas[:, k], predicted[:, k]) for k, d in enumerate(drafts) if d != NO_DRAFT
    }
    return {
        "requests": len(rows),
        "tokens": tokens,
        "accuracy": dict(zip(drafts, measured.alphas.mean(0).tolist(), strict=True)),
        "r2": {d: r_squared(true, guessed) for d, (true, guessed) in fitted.items()},
        "tokens_per_s": {name: tokens / float(seconds.sum()) for name, seconds in spent.items()},
        "single": single,
        "gain": {name: float(best.sum() / spent[name].sum()) - 1.0 for name in others},
        "interval": {name: _interval(best, spent[name]) for name in others},
        "share": {
            name: saved[name] / saved["oracle"] if saved["oracle"] > 0 else None for name in others
        },
        "picks": {
            name: {d: int((picks == k).sum()) for k, d in enumerate(drafts)}
            for name, picks in picked.items()
        },
    }


def r_squared(true: FloatArray, predicted: FloatArray) -> float | None:
    """1 - residual over total sum of squares; below 0 where the mean of ``true`` predicts better,
    None where all of them are equal."""
    total = float(((true - true.mean()) ** 2).sum())
    return 1.0 - float(((true - predicted) ** 2).sum()) / total if total > 0 else None


def _interval(base: FloatArray, spent: FloatArray) -> list[float]:
    """The 95% bootstrap interval of sum(base) / sum(spent) - 1 over requests."""
    pick = np.random.default_rng(0).integers(0, len(base), (RESAMPLES, len(base)))
    gains = base[pick].sum(1) / spent[pick].sum(1) - 1.0
    found: list[float] = np.quantile(gains, [0.025, 0.975]).tolist()
    return found

"""Fitting a chooser of drafts (on-the-fly adaptation paper, section 5) to a recording, and what choosing is worth on the rest of it.

A recording knows, for every draft and position, whether the draft would have proposed the text's token, so the accuracy alpha of every
draft on every prompt is counted, not estimated from rounds; and replay says what every draft with its policy would have cost on every
request. A chooser is fitted to some requests (:func:`optimizer.record.split`) and measured on the others, against the best single draft
and against an oracle that knows each request's best draft.

Beside it stands the counterfactual baseline: since the text does not depend on the draft, every draft can be scored on the same text as it
is decoded, and exponential weights follow the leader (:class:`runtime.policies.draft_choice.Hedge`) without reading any prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from optimizer.record import split
from optimizer.replay import ReplayTrace, run_replay
from runtime.loading import LoadedPair
from runtime.policies.document import Policy
from runtime.policies.draft_choice import (
    ACC_MAX,
    NO_DRAFT,
    TARGET,
    TOKEN_PATTERN,
    Chooser,
    Hedge,
    LinearAccuracy,
    Option,
    Prompt,
    PromptFeatures,
    Rule,
    hedge_bound,
    prompt_reader,
    raw_scalars,
    read_prompt,
)
from runtime.policies.prepared import prepare
from traces.errors import PolicyError, TraceError
from traces.schema import AGREE_NONE, AGREE_YES, PROB_SCALE, CostCurve, LatencyProfile, Step, Trajectory

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

COMPONENTS: Final = 7
"""Dimensions that TF-IDF is projected to; with constant, length and perplexity r = 10, the middle of the paper's table 13 (4 to 16)."""
PROMPTS_PER_FEATURE: Final = 3
"""Prompts that must stand behind each entry of u; with fewer, TF-IDF gets fewer dimensions."""
MAX_TERMS: Final = 4096
MIN_PROMPTS: Final = 2
"""Most terms that TF-IDF knows, and prompts that a term must occur in."""
FALLBACK_RIDGE: Final = 1e-3
"""Ridge per prompt where the features are linearly dependent and ordinary least squares has no single answer."""
RIDGES: Final = tuple(float(x) for x in np.logspace(-3, 3, 25))
"""Ridges per prompt that cross-validation chooses from; at the largest, predictions are hardly more than the mean accuracy."""
Ridge = float | Literal["cv"]
"""A ridge per prompt; ``cv`` is chosen by leave-one-out cross-validation, for each draft its own."""
BLOCK: Final = 16
"""Output tokens between two choices of the draft within a request."""
RESAMPLES: Final = 1000
"""Bootstrap samples of requests behind an interval."""


# ----------------------------------------------------------------------------------------------------------- what is fitted to


def agreement(trace: ReplayTrace, draft: str) -> FloatArray:
    """The chance that a draft's proposal is accepted at each position of a trace's trajectories, float64 [positions].

    With the coupled verifier 0 or 1: whether the proposal is the text's token; with the rejection verifier above temperature 0 the
    recorded chance. No proposal (prompt lookup without a match) is 0; for ``none`` all are. Raises TraceError where the recording has no
    chain panorama of the draft (a head has none).
    """
    if draft == NO_DRAFT:
        return np.zeros(int(trace.offsets[-1]))
    chains = trace.chains.get(draft)
    if chains is None:
        known = ", ".join(sorted(trace.chains)) or "none"
        raise TraceError(
            f"the recording has no chain panorama of draft {draft!r} (it has: {known}), and its accuracy cannot be counted: "
            "`record --resume ID` makes those of language models and ngram; leave heads out"
        )
    chance = (chains.agree != AGREE_NONE) * (chains.accept / float(PROB_SCALE))
    drawn = np.repeat(chains.drawn, np.diff(trace.offsets))
    return np.asarray(np.where(drawn, chance, chains.agree == AGREE_YES), dtype=np.float64)


def accuracies(trace: ReplayTrace, drafts: Sequence[str]) -> FloatArray:
    """The single-token accuracy alpha of each draft on each request of ``trace.order``: the mean of :func:`agreement` over its positions,
    float64 [requests, drafts]. Raises TraceError as that does, and for a request without output."""
    lengths = np.diff(trace.offsets)
    if (lengths[trace.order] == 0).any():
        raise TraceError("a request of the recording has no output, so no draft's accuracy on it; leave it out")
    columns = []
    for draft in drafts:
        sums = np.concatenate([[0.0], np.cumsum(agreement(trace, draft))])
        columns.append(((sums[trace.offsets[1:]] - sums[trace.offsets[:-1]]) / np.maximum(1, lengths))[trace.order])
    return np.stack(columns, axis=1)


def persistence(trace: ReplayTrace, drafts: Sequence[str]) -> dict[str, float | None]:
    """How much of the difference between requests' accuracies lasts, by draft: the correlation, over the requests of ``trace.order``, of
    the accuracy on the answers' first halves with that on their second halves. None where either does not vary.

    What a prompt can tell of its answer is bounded by it: features of a prompt that predicted a half better than the other half does would
    have to know what the text itself does not. For whole answers the share of variance that lasts is about 2 c / (1 + c)
    (Spearman and Brown), which no R^2 can be expected to exceed.
    """
    begins, ends = trace.offsets[trace.order], trace.offsets[trace.order + 1]
    halves = (begins + ends) // 2
    found: dict[str, float | None] = {}
    for draft in drafts:
        sums = np.concatenate([[0.0], np.cumsum(agreement(trace, draft))])
        first, second = sums[halves] - sums[begins], sums[ends] - sums[halves]
        first, second = first / np.maximum(1, halves - begins), second / np.maximum(1, ends - halves)
        varies = len(first) > 1 and first.std() > 0 and second.std() > 0
        found[draft] = float(np.corrcoef(first, second)[0, 1]) if varies else None
    return found


@dataclass(frozen=True, eq=False)
class Measured:
    """What replay knows of n requests and K drafts with their policies.

    ``alphas`` [n, K] (:func:`accuracies`); ``seconds`` [n, K] in all, of which ``before`` [n, K] before the first round; ``prompt_tokens``,
    ``new_tokens`` and ``budgets`` int64 [n]; ``sampled``: some were decoded above temperature 0.
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
    def of(cls, trace: ReplayTrace, candidates: Mapping[str, Policy], profile: LatencyProfile) -> Measured:
        """Replays every policy on the requests of ``trace.order``. Raises TraceError as :func:`accuracies` and replay do."""
        order = trace.order
        return cls(
            tuple(candidates),
            accuracies(trace, tuple(candidates)),
            np.stack([run_replay(trace, policy, profile).seconds for policy in candidates.values()], axis=1),
            np.stack([trace.costs(policy, profile)[1][order] for policy in candidates.values()], axis=1),
            trace.prompts[order],
            np.diff(trace.offsets)[order],
            trace.budgets[order],
            bool(trace.sampled[order].any()),
        )


def read_prompts(pair: LoadedPair, trajectories: Sequence[Trajectory], *, reader: str | None = None) -> tuple[Prompt, ...]:
    """Every trajectory's prompt as a chooser reads it, by one pass of ``reader``, by default
    :func:`runtime.policies.draft_choice.prompt_reader`."""
    name = prompt_reader(pair) if reader is None else reader
    return tuple(read_prompt(pair, t.prompt_ids.tolist(), name) for t in trajectories)


# -------------------------------------------------------------------------------------------------------------------- fitting


def fit_features(
    prompts: Sequence[Prompt],
    *,
    reader: str = TARGET,
    components: int | None = None,
    scalars: Sequence[str] = ("length", "perplexity"),
) -> PromptFeatures:
    """Fits the features to prompts: scikit-learn's ``TfidfVectorizer`` and ``TruncatedSVD``, then mean and deviation of each column.

    ``components`` is by default :data:`COMPONENTS`, less where there are fewer than :data:`PROMPTS_PER_FEATURE` prompts per entry of u or
    fewer terms. A column that does not vary is left unscaled. Raises TraceError when there are fewer than 2 prompts.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    if len(prompts) < 2:
        raise TraceError(f"a chooser is fitted to at least 2 prompts, not {len(prompts)}; record more requests")
    texts = [p.text for p in prompts]
    vocabulary: tuple[str, ...] = ()
    idf, projection = np.zeros(0), np.zeros((0, 0))
    vectorizer = TfidfVectorizer(token_pattern=TOKEN_PATTERN, min_df=MIN_PROMPTS, max_features=MAX_TERMS, dtype=np.float64)
    counts = _vectors(vectorizer, texts)
    if counts is not None:
        vocabulary = tuple(str(t) for t in vectorizer.get_feature_names_out())
        idf = np.asarray(vectorizer.idf_, dtype=np.float64)
        room = len(prompts) // PROMPTS_PER_FEATURE - 1 - len(scalars)
        wanted = max(0, min(COMPONENTS, room)) if components is None else components
        k = min(wanted, len(vocabulary) - 1, len(prompts) - 1)
        projection = np.zeros((0, len(vocabulary)))
        if k > 0:
            svd = TruncatedSVD(n_components=k, random_state=0).fit(counts)
            projection = np.asarray(svd.components_, dtype=np.float64)
    bare = PromptFeatures(
        vocabulary,
        idf,
        projection,
        np.zeros(len(scalars) + len(projection)),
        np.ones(len(scalars) + len(projection)),
        reader,
        tuple(scalars),
    )
    raw = np.concatenate([raw_scalars(prompts, bare.scalars), bare.projected(texts)], axis=1)
    known = ~np.isnan(raw)
    center = np.where(known, raw, 0.0).sum(0) / np.maximum(1, known.sum(0))
    scale = np.sqrt((np.where(known, raw - center, 0.0) ** 2).sum(0) / np.maximum(1, known.sum(0)))
    return replace(bare, center=center, scale=np.where(scale > 1e-12, scale, 1.0))


def _vectors(vectorizer: Any, texts: Sequence[str]) -> Any:
    """TF-IDF of the texts, or None where no term occurs in enough of them (scikit-learn raises)."""
    try:
        return vectorizer.fit_transform(texts)
    except ValueError:
        return None


def initial_prompts(features: FloatArray) -> IntArray:
    """Section 5's r linearly independent prompts b_1 .. b_r, as row numbers of ``features`` [n, r], int64 [r].

    Pivoted QR of the transpose picks them greedily, each the one farthest from the span of those before, so that the r by r system is
    well conditioned. Raises TraceError when there are no r independent prompts.
    """
    from scipy.linalg import qr

    n, r = features.shape
    rank = int(np.linalg.matrix_rank(features)) if n else 0
    if rank < r:
        raise TraceError(
            f"{n} prompts hold only {rank} linearly independent ones, the features have {r} entries; record more varied prompts, or fit "
            "fewer TF-IDF dimensions"
        )
    _, _, pivots = qr(features.T, mode="economic", pivoting=True)
    return np.asarray(pivots[:r], dtype=np.int64)


def least_squares(features: FloatArray, alpha: FloatArray, *, ridge: Ridge = 0.0) -> LinearAccuracy:
    """Equation 5's estimate Z = (sum b b')^-1 sum b alpha from ``features`` [n, r] and accuracies [n].

    With a ``ridge`` > 0, (sum b b' + ridge n D)^-1 instead, D the identity without the constant's entry. At 0 it is
    :data:`FALLBACK_RIDGE` where the prompts are linearly dependent and there is no inverse. Raises TraceError without prompts, or for
    numbers that are not finite.
    """
    n, r = features.shape
    if not n or not (np.isfinite(features).all() and np.isfinite(alpha).all()):
        raise TraceError(f"least squares needs prompts with finite features and accuracies; there are {n}")
    weights, _, rank, _ = np.linalg.lstsq(features, alpha, rcond=None)
    used = _cross_validated(features, alpha) if ridge == "cv" else float(ridge)
    used = FALLBACK_RIDGE if used == 0.0 and rank < r else used
    inverse = np.linalg.inv(features.T @ features + used * n * np.diag([0.0, *[1.0] * (r - 1)]))
    if used > 0:
        weights = inverse @ (features.T @ alpha)
    return LinearAccuracy(np.asarray(weights, dtype=np.float64), (inverse + inverse.T) / 2, n)


def _cross_validated(features: FloatArray, alpha: FloatArray) -> float:
    """The ridge per prompt of :data:`RIDGES` with the least squared error of leave-one-out predictions (scikit-learn's ``RidgeCV``)."""
    from sklearn.linear_model import RidgeCV

    n, r = features.shape
    if n < 3 or r < 2:
        return RIDGES[-1]
    model = RidgeCV(alphas=[n * ridge for ridge in RIDGES]).fit(features[:, 1:], alpha)
    return float(model.alpha_) / float(n)


def calibrate(measured: Measured, options: Sequence[Option]) -> dict[str, float]:
    """:attr:`runtime.policies.draft_choice.Chooser.calibration`: replayed seconds of all rounds over those that equation 3 gives at the
    true accuracies."""
    factors = {}
    for k, option in enumerate(options):
        alpha = np.clip(measured.alphas[:, k], 0.0, ACC_MAX)
        rounds = (measured.seconds[:, k] - measured.before[:, k]).sum()
        factors[option.draft] = float(rounds / (option.token_seconds(alpha) * measured.new_tokens).sum())
    return factors


def fit_chooser(
    trace: ReplayTrace,
    prompts: Sequence[Prompt],
    candidates: Mapping[str, Policy],
    profile: LatencyProfile,
    *,
    reader: str = TARGET,
    rule: Rule = "throughput",
    components: int | None = None,
    scalars: Sequence[str] = ("length", "perplexity"),
    ridge: Ridge = "cv",
    start: bool = False,
    parts: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Chooser:
    """Fits a chooser of ``candidates`` (a policy for each draft, ``none`` and ``ngram`` among them if wanted) to a recording.

    ``prompts`` are those of ``trace.trajectories``, in order (:func:`read_prompts`), and ``reader`` is who read them. ``start`` fits to the
    paper's r linearly independent prompts alone (:func:`initial_prompts`), by default all are used. ``ridge`` 0 is the paper's ordinary
    least squares; by default cross-validation shrinks towards the mean what the prompts do not bear out. ``parts``: the requests fitted to
    and those held out, by default those of :func:`optimizer.record.split`; ``Chooser.metrics`` has :func:`evaluate` on both.

    Raises PolicyError without candidates or for one that is no chain of its draft, TraceError when the recording lacks a draft or has too
    few prompts.
    """
    if not candidates:
        raise PolicyError("a chooser needs drafts to choose from; give at least one policy")
    if len(prompts) != len(trace.trajectories):
        raise TraceError(
            f"{len(prompts)} prompts for {len(trace.trajectories)} recorded requests; read them from the same recording"
        )
    fit_part, test_part = parts or split([t.request_id for t in trace.trajectories], [t.category for t in trace.trajectories])
    measured = Measured.of(trace.select(fit_part), candidates, profile)
    options = tuple(Option.of(d, p, profile, sampled=measured.sampled) for d, p in candidates.items())
    chosen = [prompts[r] for r in fit_part]
    features = fit_features(chosen, reader=reader, components=components, scalars=scalars)
    matrix = features.transform(chosen)
    rows = initial_prompts(matrix) if start else np.arange(len(chosen))
    fitted = {
        draft: least_squares(matrix[rows], measured.alphas[rows, k], ridge=ridge)
        for k, draft in enumerate(candidates)
        if draft != NO_DRAFT
    }
    chooser = Chooser(features, fitted, dict(candidates), calibrate(measured, options), rule)
    single = measured.drafts[int(measured.seconds.sum(0).argmin())]
    metrics: dict[str, Any] = {
        "features": list(features.names),
        "fitted_prompts": len(rows),
        "ridge": ridge,
        "single": single,
        "persistence": persistence(trace.select(fit_part), [d for d in candidates if d != NO_DRAFT]),
        "fit": evaluate(chooser, measured, chosen, profile).to_json(),
    }
    if list(test_part) != list(fit_part):
        held_out = Measured.of(trace.select(test_part), candidates, profile)
        metrics["held_out"] = evaluate(chooser, held_out, [prompts[r] for r in test_part], profile).to_json()
    return replace(chooser, metrics=metrics)


# ----------------------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Evaluation:
    """What choosing is worth on some requests, by replayed seconds.

    ``accuracy``: mean alpha by draft. ``r2``: of the predicted accuracies, by draft (None where all are equal). ``tokens_per_s``: total
    tokens over total seconds of every draft, of the ``oracle`` that takes each request's fastest draft, and of the rules: ``throughput``,
    ``theorem_3``, and ``known`` (the rule ``throughput`` told the true accuracies, which is what better prediction could reach).
    ``single``: the best single draft on these requests, known in hindsight. ``gain``: tokens per second over the best single draft's, less
    1; ``interval``: its 95% bootstrap interval over requests, the single draft kept. ``share``: of the oracle's gain in seconds (1: the
    oracle, 0: the best single draft, below: worse than not choosing; None where there is nothing to gain). ``picks``: requests by rule and
    draft. ``rmse``: root mean square error of the
    predicted accuracies, by draft.
    """

    requests: int
    tokens: int
    accuracy: Mapping[str, float]
    r2: Mapping[str, float | None]
    rmse: Mapping[str, float]
    tokens_per_s: Mapping[str, float]
    single: str
    gain: Mapping[str, float]
    interval: Mapping[str, tuple[float, float]]
    share: Mapping[str, float | None]
    picks: Mapping[str, Mapping[str, int]]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready: intervals are lists."""
        return {**asdict(self), "interval": {name: list(bounds) for name, bounds in self.interval.items()}}


def evaluate(
    chooser: Chooser, measured: Measured, prompts: Sequence[Prompt], profile: LatencyProfile, *, charged: bool = True
) -> Evaluation:
    """Chooses for every request and charges what replay says the choice cost; ``prompts`` are those of ``measured``'s requests.

    ``charged`` adds the pass that reads the prompt's perplexity (the reader's prefill), unless the draft chosen is the reader, whose
    prefill it is, or the reader is the target, or the features do not contain it.
    """
    options = chooser.options(profile, sampled=measured.sampled)
    predicted = chooser.accuracies(chooser.features.transform(prompts))
    reader = profile.draft_prefill.get(chooser.features.reader) if charged and chooser.features.reads else None
    reading = np.array([0.0 if reader is None or n < 2 else reader.at(n - 1, 0) for n in measured.prompt_tokens])
    rows, drafts = np.arange(len(predicted)), measured.drafts
    spent: dict[str, FloatArray] = {draft: measured.seconds[:, k] for k, draft in enumerate(drafts)}
    single = min(drafts, key=lambda draft: float(spent[draft].sum()))
    best = spent[single]
    spent["oracle"] = measured.seconds.min(1)
    picked = {"oracle": measured.seconds.argmin(1)}
    known = np.clip(measured.alphas, 0.0, ACC_MAX)
    rules: tuple[tuple[str, FloatArray, Rule], ...] = (
        ("throughput", predicted, "throughput"),
        ("theorem_3", predicted, "theorem_3"),
        ("known", known, "throughput"),
    )
    for name, alphas, rule in rules:
        picks = chooser.decide(alphas, options, measured.prompt_tokens, measured.budgets, rule)
        more = reading * [drafts[k] != chooser.features.reader for k in picks] if name != "known" else 0.0
        spent[name] = measured.seconds[rows, picks] + more
        picked[name] = picks
    others = ("oracle", "throughput", "theorem_3", "known")
    saved = {name: float(best.sum() - spent[name].sum()) for name in others}
    tokens = int(measured.new_tokens.sum())
    return Evaluation(
        requests=len(rows),
        tokens=tokens,
        accuracy=dict(zip(drafts, measured.alphas.mean(0).tolist(), strict=True)),
        r2={d: r_squared(measured.alphas[:, k], predicted[:, k]) for k, d in enumerate(drafts) if d != NO_DRAFT},
        rmse={
            d: float(np.sqrt(((measured.alphas[:, k] - predicted[:, k]) ** 2).mean()))
            for k, d in enumerate(drafts)
            if d != NO_DRAFT
        },
        tokens_per_s={name: tokens / float(seconds.sum()) for name, seconds in spent.items()},
        single=single,
        gain={name: float(best.sum() / spent[name].sum()) - 1.0 for name in others},
        interval={name: _interval(best, spent[name]) for name in others},
        share={name: saved[name] / saved["oracle"] if saved["oracle"] > 0 else None for name in others},
        picks={name: {d: int((picks == k).sum()) for k, d in enumerate(drafts)} for name, picks in picked.items()},
    )


def r_squared(true: FloatArray, predicted: FloatArray) -> float | None:
    """1 - residual over total sum of squares; below 0 where the mean of ``true`` predicts better, None where all of them are equal."""
    total = float(((true - true.mean()) ** 2).sum())
    return 1.0 - float(((true - predicted) ** 2).sum()) / total if total > 0 else None


def _interval(base: FloatArray, spent: FloatArray, *, level: float = 0.95) -> tuple[float, float]:
    """The bootstrap interval of sum(base) / sum(spent) - 1 over requests."""
    pick = np.random.default_rng(0).integers(0, len(base), (RESAMPLES, len(base)))
    low, high = np.quantile(base[pick].sum(1) / spent[pick].sum(1) - 1.0, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


# ------------------------------------------------------------------------------------- the counterfactual baseline: hedge


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

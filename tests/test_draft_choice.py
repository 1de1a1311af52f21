"""Choosing a draft per prompt: features, equation 5, the decision rules, and what choosing is
worth."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pairs import TEXT
from papers.on_the_fly import (
    acceptance_rate,
    expected_emitted,
    larger_draft_condition,
    optimal_window,
    throughput,
)
from synthetic import flat_profile, over_rows, with_terms
from trace_values import a_panorama, a_trajectory

from spectune.optimizer.fit.on_the_fly import (
    COMPONENTS,
    RIDGES,
    Measured,
    agreement,
    fit_chooser,
    fit_features,
    least_squares,
    read_prompts,
)
from spectune.optimizer.parts import split
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.runtime.costs import window_costs
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.draft_choice import ACC_MAX, Chooser, Option, theorem_3
from spectune.runtime.policies.prompt_features import TOKEN_PATTERN, Prompt, raw_scalars
from spectune.runtime.prompts import log_perplexity, prompt_reader, read_prompt
from spectune.traces.cost_table import CostTable
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import AGREE_NONE, AGREE_YES, ChainPanorama, Sampling

PROFILE = flat_profile("tiny", ["near", "far"])
WINDOW = {"kind": "analytic", "gamma_max": 8}


def chain(draft: str, window: dict[str, Any] = WINDOW) -> Policy:
    return parse_policy({"draft": draft, "window": window})


CANDIDATES = {
    "none": AUTOREGRESSIVE,
    "ngram": chain("ngram"),
    "near": chain("near"),
    "far": chain("far"),
}

# -- prompts and features --------------------------------------------------------------------------

WORDS = (
    "def", "return", "apples", "buys", "the", "fox", "class", "Ann", "42", "import", "(", ")", ":",
    "dog.", "how", "many?",
)  # fmt: skip


def some_prompts() -> list[Prompt]:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, int(rng.integers(3, 60)))) for _ in range(40)]
    return [Prompt(t, int(rng.integers(2, 300)), float(rng.uniform(0.5, 4.0))) for t in texts]


def test_features_are_scikit_learns() -> None:
    """The stored arrays give what the fitted objects give, on texts they know and on others,
    without refitting anything."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    prompts = some_prompts()
    features = fit_features(prompts)
    texts = [p.text for p in prompts]
    vectorizer = TfidfVectorizer(token_pattern=TOKEN_PATTERN, min_df=2, max_features=4096)
    svd = TruncatedSVD(n_components=COMPONENTS, random_state=0).fit(vectorizer.fit_transform(texts))
    unseen = [
        "Ann buys the fox",
        "",
        "zebra zebra",
        "def def(apples): RETURN 42 ###",
        "日本 Straße",
    ]
    for these in (texts, unseen):
        counts = vectorizer.transform(these)
        np.testing.assert_allclose(features.tfidf(these), counts.toarray(), rtol=0, atol=1e-12)
        projected = svd.transform(counts)
        np.testing.assert_allclose(features.projected(these), projected, rtol=0, atol=1e-12)
    assert features.vocabulary == tuple(vectorizer.get_feature_names_out())


def test_vectors_are_constant_scalars_and_projection_standardised() -> None:
    prompts = some_prompts()
    features = fit_features(prompts, reader="near")
    u = features.transform(prompts)
    assert u.shape == (40, features.dimension) == (40, len(features.names)) == (40, 10)
    np.testing.assert_array_equal(u[:, 0], 1.0)
    np.testing.assert_allclose(u[:, 1:].mean(0), 0.0, atol=1e-12)
    np.testing.assert_allclose(u[:, 1:].std(0), 1.0, atol=1e-12)
    raw = np.array([[math.log(p.tokens), p.nats] for p in prompts])
    np.testing.assert_array_equal(raw_scalars(prompts), raw)
    scaled = u[:, 1:3] * features.scale[:2] + features.center[:2]
    np.testing.assert_allclose(scaled, raw, atol=1e-12)
    (unknown,) = features.transform([Prompt("the", 1, math.nan)])
    assert unknown[2] == 0.0  # a perplexity that is not known is the mean
    assert np.isfinite(unknown).all()


# -- equation 5 ------------------------------------------------------------------------------------


def planted(
    n: int = 60, r: int = 6, noise: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    features = np.concatenate([np.ones((n, 1)), rng.normal(size=(n, r - 1))], axis=1)
    weights = np.concatenate([[0.5], rng.normal(0, 0.05, r - 1)])
    return features, weights, np.clip(features @ weights + rng.normal(0, noise, n), 0, 1)


def by_hand(features: np.ndarray, alpha: np.ndarray, penalty: float) -> np.ndarray:
    """Equation 5 with a penalty on all weights but the constant's."""
    ridge = penalty * np.diag([0.0, *[1.0] * (features.shape[1] - 1)])
    return np.asarray(np.linalg.inv(features.T @ features + ridge) @ (features.T @ alpha))


def test_equation_5_is_the_formulas() -> None:
    """Without noise the least ridge is chosen, and the weights are the planted ones but for it."""
    features, weights, _ = planted()
    alpha = features @ weights
    fitted = least_squares(features, alpha)
    np.testing.assert_allclose(fitted, by_hand(features, alpha, 60 * RIDGES[0]), atol=1e-9)
    np.testing.assert_allclose(fitted, weights, atol=1e-3)
    np.testing.assert_allclose(by_hand(features, alpha, 0.0), weights, atol=1e-10)


def test_prompts_may_be_dependent_or_few() -> None:
    features, _, alpha = planted(n=40)
    twice = np.concatenate([features, features[:, 1:2]], axis=1)
    fitted = least_squares(twice, alpha)
    # The ridge shares equally.
    assert fitted[1] == pytest.approx(fitted[-1], abs=1e-9)
    np.testing.assert_allclose(twice @ fitted, alpha, atol=5e-3)
    for n in (2, 3):
        few = least_squares(features[:n], alpha[:n])
        assert few.shape == (6,)
        assert np.isfinite(few).all()


def test_cross_validation_shrinks_what_the_prompts_do_not_bear_out() -> None:
    rng = np.random.default_rng(5)
    features, _, told = planted(n=60, noise=0.01)
    untold = rng.uniform(0.3, 0.9, 60)
    unseen = np.concatenate([np.ones((500, 1)), rng.normal(size=(500, 5))], axis=1)

    def predicted(alpha: np.ndarray) -> list[np.ndarray]:
        fits = (by_hand(features, alpha, 0.0), least_squares(features, alpha))
        return [unseen @ weights for weights in fits]

    plain, shrunk = predicted(untold)
    assert shrunk.std() < 0.25 * plain.std()
    assert shrunk.mean() == pytest.approx(untold.mean(), abs=0.01)
    plain, shrunk = predicted(told)
    np.testing.assert_allclose(shrunk, plain, atol=0.02)
    # The chosen ridge has the least leave-one-out error, computed the long way.
    errors = []
    for ridge in RIDGES:
        error = 0.0
        for i in range(60):
            some, alpha = np.delete(features, i, 0), np.delete(untold, i)
            error += float((features[i] @ by_hand(some, alpha, 60 * ridge) - untold[i]) ** 2)
        errors.append(error)
    best = by_hand(features, untold, 60 * RIDGES[int(np.argmin(errors))])
    assert np.abs(least_squares(features, untold) - best).max() < 0.01


# -- from accuracy to a draft ----------------------------------------------------------------------

ALPHAS = np.linspace(0.0, ACC_MAX, 41)


@pytest.mark.parametrize("draft", ["near", "ngram"])
def test_option_is_the_papers_model(draft: str) -> None:
    """Objective 1, equations 9 and 3, against the scalar forms of tests/papers."""
    option = Option.of(draft, chain(draft), PROFILE)
    costs = window_costs(PROFILE, chain(draft))
    assert costs is not None
    windows, omega = option.window(ALPHAS), option.emitted(ALPHAS)
    rho, seconds = option.acceptance_rate(ALPHAS), option.token_seconds(ALPHAS)
    for i, alpha in enumerate(ALPHAS):
        d = optimal_window(alpha, costs)
        assert windows[i] == d
        assert omega[i] == pytest.approx(expected_emitted(alpha, d))
        if d == 0:
            assert math.isinf(rho[i])
            continue
        assert rho[i] == pytest.approx(acceptance_rate(alpha, d))
        rounds, a_q, b_p = 100.0 / (d * rho[i]), costs.draft_step_s, costs.verify_s[d]
        assert 1 / seconds[i] == pytest.approx(throughput(100.0, rounds, rho[i], a_q, b_p))


def test_options_of_none_fixed_windows_and_sampling() -> None:
    def windows(draft: str, window: dict[str, Any]) -> set[int]:
        return set(Option.of(draft, chain(draft, window), PROFILE).window(ALPHAS).tolist())

    none = Option.of("none", AUTOREGRESSIVE, PROFILE)
    assert set(none.window(ALPHAS).tolist()) == {0}
    plain = PROFILE.seconds("target", rows=1, context=PROFILE.usual_context) + 1e-4
    np.testing.assert_allclose(none.token_seconds(ALPHAS), plain)
    assert windows("near", {"kind": "fixed", "gamma": 3}) == {3}
    least = windows("near", {"kind": "fsm", "gamma_min": 2, "gamma_max": 6})
    assert (min(least), max(least)) == (2, 6)
    least = windows("near", {"kind": "heuristic", "gamma_max": 6})
    assert (min(least), max(least)) == (1, 6)
    assert windows("near", {"kind": "by_batch", "gamma": {"1": 3, "4": 6}}) == {3}
    sampled = over_rows((0, 1), (0.0, 2e-4))
    hot = with_terms(PROFILE, {"noise": CostTable((3e-4,)), "sampled target": sampled})
    for draft in ("none", "near"):
        policy = CANDIDATES[draft]
        cold, warm = Option.of(draft, policy, hot), Option.of(draft, policy, hot, sampled=True)
        g = np.arange(len(cold.round_s))
        np.testing.assert_allclose(warm.round_s - cold.round_s, 2e-4 * (g + 1) + 1e-4 * g)
        assert warm.token_s == 3e-4


def an_option(draft: str, step_s: float) -> Option:
    return Option(draft, np.arange(9) * (step_s + 1e-4) + 4e-3, step_s, 0)


def test_theorem_3_is_equation_4_of_every_pair() -> None:
    small, large = an_option("near", 1e-4), an_option("far", 2e-4)
    seen = set()
    for a, b in itertools.product(np.linspace(0.01, 0.97, 33), repeat=2):
        got = int(theorem_3(np.array([[a, b]]), [small, large])[0])
        (d_s,), (d_l,) = small.window(np.array([a])), large.window(np.array([b]))
        if d_s and d_l:
            length = 77.0
            n_s, n_l = length / expected_emitted(a, d_s), length / expected_emitted(b, d_l)
            gain = acceptance_rate(b, d_l) - acceptance_rate(a, d_s)
            assert got == int(larger_draft_condition(n_s - n_l, (2e-4 - 1e-4) / 4e-3, gain, length))
        else:
            (fast,), (slow,) = (
                large.token_seconds(np.array([b])),
                small.token_seconds(np.array([a])),
            )
            assert got == int(fast < slow)
        seen.add((bool(d_s and d_l), got))
    assert seen == {(True, 0), (True, 1), (False, 0), (False, 1)}


def test_theorem_3_takes_drafts_by_latency_ratio_whatever_their_order() -> None:
    none = Option("none", np.array([2.5e-3]), 0.0, 0)
    options = [an_option("far", 2e-4), an_option("near", 1e-4), none]
    alphas = np.random.default_rng(0).uniform(0, 0.98, (300, 3)) * [1, 1, 0]
    first = theorem_3(alphas, options)
    assert set(first.tolist()) == {0, 1, 2}
    for order in itertools.permutations(range(3)):
        again = theorem_3(alphas[:, list(order)], [options[k] for k in order])
        np.testing.assert_array_equal(np.array(order)[again], first)


# -- a trace where the prompt tells which draft is good --------------------------------------------

KINDS = {
    "code": {"near": 0.9, "far": 0.35, "ngram": 0.1},
    "prose": {"near": 0.35, "far": 0.9, "ngram": 0.1},
    "copy": {"near": 0.6, "far": 0.6, "ngram": 0.97},
}
VOICE = {
    "code": "def return ( ) : import class",
    "prose": "the fox and the dog , how many ?",
    "copy": "alpha beta alpha beta",
}


def planted_trace(n: int = 90, mute: bool = False) -> tuple[ReplayTrace, list[Prompt]]:
    """Requests of three kinds; each draft agrees independently at each position, with a chance by
    kind."""
    rng, kinds = np.random.default_rng(0), list(KINDS)
    trajectories, prompts = [], []
    panoramas: dict[str, list[ChainPanorama]] = {"near": [], "far": [], "ngram": []}
    for i in range(n):
        kind = kinds[i % 3]
        t = a_trajectory(i, n=64, category=kind)
        t = replace(t, prompt_ids=rng.integers(0, 4096, int(rng.integers(5, 200))).astype(np.int32))
        trajectories.append(t)
        voice = [*VOICE[kind if not mute else "code"].split(), *WORDS]
        text = " ".join(rng.choice(voice, int(rng.integers(20, 60))))
        prompts.append(Prompt(text, len(t.prompt_ids), float(rng.normal(2.0, 0.3))))
        for draft, views in panoramas.items():
            silent = 0.5 * (1 - KINDS[kind][draft]) if draft == "ngram" else 0.0
            views.append(a_panorama(t, draft, seed=i, agreement=KINDS[kind][draft], none=silent))
    return ReplayTrace(trajectories, panoramas), prompts


def choosing(trace: ReplayTrace, prompts: Sequence[Prompt]) -> Chooser:
    """A chooser fitted to a trace, which chooses whether that gains anything or not."""
    return replace(fit_chooser(trace, prompts, CANDIDATES, PROFILE, reader="near"), chooses=True)


def test_accuracy_is_counted_from_agreement() -> None:
    trace, _ = planted_trace(6)
    measured = Measured.of(trace, CANDIDATES, PROFILE)
    assert measured.drafts == ("none", "ngram", "near", "far")
    for k, draft in enumerate(measured.drafts):
        for i in range(6):
            part = slice(int(trace.offsets[i]), int(trace.offsets[i + 1]))
            agree = trace.chains[draft].agree[part] if draft != "none" else np.zeros(64)
            assert measured.alphas[i, k] == pytest.approx(np.mean(agree == AGREE_YES))
    assert (trace.chains["ngram"].agree == AGREE_NONE).any()
    said = r"no chain panorama of draft 'head' .it has: far, near, ngram.*leave heads out"
    with pytest.raises(TraceError, match=said):
        agreement(trace, "head")


def test_accuracy_under_rejection_is_the_recorded_chance() -> None:
    t = [a_trajectory(i, sampling=Sampling(1.0), verifier="rejection") for i in range(2)]
    t[1] = replace(t[1], verifier="coupled")
    views = [a_panorama(x, "near", seed=i) for i, x in enumerate(t)]
    got = agreement(ReplayTrace(t, {"near": views}), "near")
    np.testing.assert_allclose(
        got[:60], np.where(views[0].agree == AGREE_NONE, 0.0, views[0].accept / 65535.0)
    )
    np.testing.assert_array_equal(got[60:], views[1].agree == AGREE_YES)


def test_the_chooser_finds_the_draft_that_the_prompt_tells() -> None:
    chooser = fit_chooser(*planted_trace(), CANDIDATES, PROFILE, reader="near")
    assert chooser.chooses
    assert chooser.metrics["cross_validated"]["interval"][0] > 0
    assert "beyond noise" in chooser.reason
    held = chooser.metrics["held_out"]
    assert held["requests"] == 45
    assert min(held["r2"].values()) > 0.5
    assert held["gain"]["oracle"] > 0.1
    assert held["share"]["throughput"] > 0.7
    assert held["share"]["known"] > 0.85
    assert held["tokens_per_s"]["guarded"] == held["tokens_per_s"]["throughput"]
    assert held["tokens_per_s"]["throughput"] > 1.1 * held["tokens_per_s"][held["single"]]
    assert sum(held["picks"]["throughput"].values()) == 45
    assert held["interval"]["throughput"][0] > 0.03
    json.dumps(chooser.metrics, allow_nan=False)


def test_evaluation_is_what_its_picks_cost() -> None:
    trace, prompts = planted_trace(30)
    chooser = choosing(trace, prompts)
    held = chooser.metrics["held_out"]
    test_part = sorted({*range(30)} - {*split([t.category for t in trace.trajectories]).search})
    some = [prompts[r] for r in test_part]
    seconds = Measured.of(trace.select(test_part), CANDIDATES, PROFILE).seconds
    names, options = list(CANDIDATES), chooser.options(PROFILE)
    reading = PROFILE.prefill_seconds("near", np.array([p.tokens for p in some]))
    alphas = chooser.accuracies(chooser.features.transform(some))
    picks = chooser.decide(alphas, options, [p.tokens for p in some], 64)
    spent = sum(
        seconds[i, k] + (0.0 if names[k] == "near" else reading[i]) for i, k in enumerate(picks)
    )
    oracle, best = seconds.min(1).sum(), seconds.sum(0).min()
    tokens = 64 * len(some)
    assert held["tokens_per_s"]["throughput"] == pytest.approx(tokens / spent)
    assert held["tokens_per_s"]["oracle"] == pytest.approx(tokens / oracle)
    assert held["share"]["throughput"] == pytest.approx((best - spent) / (best - oracle))


def test_calibration_scales_the_model_to_replay() -> None:
    trace, prompts = planted_trace(30)
    chooser = choosing(trace, prompts)
    seen = trace.select(split([t.category for t in trace.trajectories]).search)
    measured, options = Measured.of(seen, CANDIDATES, PROFILE), chooser.options(PROFILE)
    # Only the context differs from the reference.
    assert chooser.calibration["none"] == pytest.approx(1.0, abs=0.25)
    known, tokens = np.clip(measured.alphas, 0, ACC_MAX), measured.prompt_tokens
    total = chooser.expected_seconds(known, options, tokens, measured.new_tokens).sum(0)
    shared = measured.before[:, :1]
    np.testing.assert_allclose(total, (measured.seconds - shared).sum(0), rtol=1e-9)


# -- as an artifact --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted() -> tuple[Chooser, list[Prompt]]:
    trace, prompts = planted_trace(45)
    return choosing(trace, prompts), prompts


def test_a_chooser_survives_storage(fitted: tuple[Chooser, list[Prompt]]) -> None:
    chooser, prompts = fitted
    document, arrays = chooser.to_document()
    assert {a.dtype for a in arrays.values()} == {np.dtype(np.float64)}
    again = Chooser.from_document(json.loads(json.dumps(document, allow_nan=False)), arrays)
    u = chooser.features.transform(prompts)
    np.testing.assert_array_equal(again.features.transform(prompts), u)
    np.testing.assert_array_equal(again.accuracies(u), chooser.accuracies(u))
    assert again.candidates == chooser.candidates
    assert again.calibration == chooser.calibration
    assert again.to_document()[0] == document
    options, tokens = again.options(PROFILE), [p.tokens for p in prompts]
    picks = [c.decide(c.accuracies(u), options, tokens, 64).tolist() for c in (again, chooser)]
    assert picks[0] == picks[1]


def without(mapping: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in mapping.items() if k not in keys}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d, a: (d, without(a, "weights.far")),
         "no weights for draft 'far' .it has: near, ngram.*`fit chooser --recording ID`"),
        (lambda d, a: (d | {"candidates": {}}, a),
         "no draft to choose; `fit chooser --recording ID`"),
        (lambda d, a: (d | {"rule": "coin"}, a), "rule 'coin' is not known"),
        (lambda d, a: (d | {"scalars": ["length", "perplexity", "mood"]}, a),
         "without the prompt feature 'mood' are not known"),
        (lambda d, a: (without(d, "vocabulary"), a),
         "not a chooser of drafts: it lacks 'vocabulary'"),
        (lambda d, a: (d, a | {"idf": a["idf"][1:]}),
         "not a chooser of drafts: prompt features: idf has shape"),
        (lambda d, a: (d, a | {"weights.near": a["weights.near"][1:]}), "draft 'near' has weights"),
        (lambda d, a: (d | {"candidates": {"near": {"draft": "near", "windw": {}}}}, a),
         "candidate 'near': unknown key 'windw'"),
    ],
)  # fmt: skip
def test_what_is_no_chooser_is_refused(
    fitted: tuple[Chooser, list[Prompt]],
    damage: Callable[[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]],
    message: str,
) -> None:
    document, arrays = damage(*fitted[0].to_document())
    with pytest.raises(PolicyError, match=message):
        Chooser.from_document(document, arrays)


def test_candidates_that_cannot_be_weighed_are_refused() -> None:
    with pytest.raises(PolicyError, match="draft 'near': its policy chooses drafts itself"):
        Option.of("near", parse_policy({"draft": {"kind": "ols", "artifact": "abc"}}), PROFILE)
    with pytest.raises(PolicyError, match="draft 'far': its policy drafts with 'near'"):
        Option.of("far", chain("near"), PROFILE)
    with pytest.raises(PolicyError, match="the latency profile has no costs for draft 'gone'"):
        Option.of("gone", chain("gone"), PROFILE)


# -- with real models ------------------------------------------------------------------------------


def test_perplexity_is_the_models_own(pair: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    paths = {"target": pair.spec.target, **dict(pair.spec.drafts)}
    for model, path in ((pair.target, paths["target"]), (pair.drafts["near"], paths["near"])):
        alone = AutoModelForCausalLM.from_pretrained(path)
        for text in (*TEXT, TEXT[0] * 14):
            ids = pair.encode(text)[:500]
            with torch.no_grad():
                logits = alone(torch.tensor([ids])).logits[0, :-1].double()
            nats = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
            got = log_perplexity(model, ids)
            assert got == pytest.approx(float(nats), abs=0.5 / 256 + 1e-5)
            assert got * 256 == round(got * 256)
    assert math.isnan(log_perplexity(pair.target, ids[:1]))


def test_prompts_read_alike_when_recorded_and_when_served(pair: Any) -> None:
    reader = prompt_reader(pair)
    assert reader in ("near", "far")
    texts = [TEXT[i % 4] + "x" * i for i in range(5)]
    trajectories = [
        replace(a_trajectory(i), prompt_ids=np.array(pair.encode(t), dtype=np.int32))
        for i, t in enumerate(texts)
    ]
    recorded = read_prompts(pair, trajectories)
    for text, prompt in zip(texts, recorded, strict=True):
        assert prompt == read_prompt(pair, pair.encode(text), reader)
        assert prompt.text == text
        assert prompt.tokens == len(pair.encode(text))

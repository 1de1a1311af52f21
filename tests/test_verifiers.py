"""Both verifiers are lossless in law: exact enumeration against many draws, on Markov laws and on a
real model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import DecodeRequest, StaticSource, Verified
from spectune.runtime.models import CausalModel
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.policies.prepare import prepare
from spectune.runtime.sampling import (
    Noise,
    choose,
    gumbel_row,
    log_distribution,
    stream_key,
    uniform,
)
from spectune.runtime.verification import TargetText, verify_coupled, verify_rejection
from spectune.traces.schema import Sampling, Verifier

VOCAB, LENGTH, WINDOW = 5, 3, 2
PLAIN = Sampling(temperature=1.0)
Verify = Callable[[torch.Tensor, int, list[int], list[torch.Tensor], int, int], Verified]


def rejection(
    logits: torch.Tensor,
    length: int,
    drafted: list[int],
    log_q: list[torch.Tensor],
    seed: int,
    salt: int,
) -> Verified:
    return verify_rejection(logits, length, drafted, log_q, PLAIN, seed, salt)


def biased(
    logits: torch.Tensor,
    length: int,
    drafted: list[int],
    log_q: list[torch.Tensor],
    seed: int,
    salt: int,
) -> Verified:
    """A classical mistake: after a rejection the token is drawn from p instead of norm(max(0, p -
    q))."""
    log_p = log_distribution(logits, PLAIN)
    for i, token in enumerate(drafted):
        ratio = float((log_p[i, token] - log_q[i][token]).exp())
        if uniform(stream_key(seed, length + i, "accept", salt)) > ratio:
            row = gumbel_row(
                stream_key(seed, length + i, "residual", salt), VOCAB, torch.device("cpu")
            )
            return Verified(i, [*drafted[:i], int((log_p[i] + row).argmax())])
    n = len(drafted)
    row = gumbel_row(stream_key(seed, length + n, "residual", salt), VOCAB, torch.device("cpu"))
    return Verified(n, [*drafted, int((log_p[n] + row).argmax())])


def draw_rejection(p: torch.Tensor, q: torch.Tensor, seed: int, verify: Verify) -> list[int]:
    """Decodes LENGTH tokens of the Markov law p with drafts from q; rows of logits by previous
    token, row VOCAB to begin with."""
    text: list[int] = []
    rounds = 0
    while len(text) < LENGTH:
        previous = text[-1] if text else VOCAB
        drafted: list[int] = []
        log_q = []
        for j in range(WINDOW):
            law = log_distribution(q[previous][None], PLAIN)[0]
            noise = gumbel_row(
                stream_key(seed, len(text) + j, "draft", rounds), VOCAB, torch.device("cpu")
            )
            previous = int((law + noise).argmax())
            drafted.append(previous)
            log_q.append(law)
        states = [text[-1] if text else VOCAB, *drafted]
        text += verify(p[states], len(text), drafted, log_q, seed, rounds).tokens
        rounds += 1
    return text[:LENGTH]


def draw_coupled(p: torch.Tensor, q: torch.Tensor, seed: int) -> list[int]:
    """The same with the coupled verifier and a draft that proposes by log q + the target's own
    noise."""
    text: list[int] = []
    noise = Noise(seed, VOCAB, torch.device("cpu"))
    while len(text) < LENGTH:
        previous = text[-1] if text else VOCAB
        drafted: list[int] = []
        for j in range(WINDOW):
            row = noise.row(len(text) + j)
            previous = int(choose(q[previous][None], PLAIN, row[None])[0])
            drafted.append(previous)
        states = [text[-1] if text else VOCAB, *drafted]
        no_model: CausalModel = None  # type: ignore[assignment]  # without `exact` it is not asked
        text += verify_coupled(
            TargetText(no_model, text, PLAIN, noise, False), p[states], drafted
        ).tokens
    return text[:LENGTH]


def laws(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random logits of a target and of a draft that is neither equal nor unlike, [VOCAB + 1,
    VOCAB]."""
    rng = torch.Generator().manual_seed(seed)
    p = torch.randn(VOCAB + 1, VOCAB, generator=rng)
    return p, p * 0.5 + torch.randn(VOCAB + 1, VOCAB, generator=rng)


def p_value(p: torch.Tensor, drawn: list[list[int]]) -> float:
    """Chi-square of drawn sequences against the exact law of p over all VOCAB ** LENGTH
    sequences."""
    law = p.double().log_softmax(-1).exp().numpy()
    counts = Counter(tuple(d) for d in drawn)
    expected, observed = [], []
    for sequence in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = np.prod([law[a, b] for a, b in zip((VOCAB, *sequence), sequence, strict=False)])
        expected.append(chance * len(drawn))
        observed.append(counts[sequence])
    # Cells that expect little are pooled, as the test demands.
    order = np.argsort(expected)
    cells_e, cells_o, e, o = [], [], 0.0, 0
    for i in order:
        e, o = e + expected[i], o + observed[i]
        if e >= 5:
            cells_e.append(e)
            cells_o.append(o)
            e, o = 0.0, 0
    cells_e[-1] += e
    cells_o[-1] += o
    return float(chisquare(cells_o, np.array(cells_e) * (sum(cells_o) / sum(cells_e))).pvalue)


@pytest.mark.parametrize("law", [1, 2])
def test_rejection_is_lossless_in_law(law: int) -> None:
    """Sequences decoded by Algorithm 1 follow the exact law (a false alarm has odds of 1 in
    1000)."""
    p, q = laws(law)
    assert p_value(p, [draw_rejection(p, q, 1000 * law + s, rejection) for s in range(2500)]) > 1e-3


@pytest.mark.parametrize("law", [1, 2])
def test_coupled_is_lossless_in_law(law: int) -> None:
    """Sequences decoded by the coupled verifier follow the exact law."""
    p, q = laws(law)
    assert p_value(p, [draw_coupled(p, q, 1000 * law + s) for s in range(2500)]) > 1e-3


def test_a_biased_verifier_fails_the_same_test() -> None:
    """The test can fail: a verifier that draws from p after a rejection is told from the exact
    law."""
    p, q = laws(1)
    assert p_value(p, [draw_rejection(p, q, 1000 + s, biased) for s in range(2500)]) < 1e-6


def tiny_pair(seed: int) -> LoadedPair:
    """A real target and draft over VOCAB tokens, without a tokenizer."""

    def model(name: str, offset: int) -> CausalModel:
        torch.manual_seed(seed + offset)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            bos_token_id=0,
            eos_token_id=0,
        )
        made = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            made.lm_head.weight.mul_(15.0)
        return CausalModel(made, name)

    return LoadedPair(
        PairSpec("tiny", "target", ()),
        model("target", 0),
        {"draft": model("draft", 1)},
        None,
        frozenset(),
    )


def p_value_of_two(pair: LoadedPair, drawn: list[list[int]]) -> float:
    """Chi-square of two tokens decoded after the prompt [1, 2] against their exact law; pairs that
    expect little are one cell."""
    first = pair.target.canonical([1, 2]).double().softmax(-1)
    second = torch.stack(
        [pair.target.canonical([1, 2, t]).double().softmax(-1) for t in range(VOCAB)]
    )
    expected = (first[:, None] * second).flatten().numpy() * len(drawn)
    observed = np.bincount([a * VOCAB + b for a, b in drawn], minlength=VOCAB * VOCAB)
    large = expected >= 5
    assert large.sum() >= 4
    cells = np.append(expected[large], expected[~large].sum())
    seen = np.append(observed[large], observed[~large].sum())
    some = cells > 0
    return float(chisquare(seen[some], cells[some] * (seen.sum() / cells.sum())).pvalue)


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_a_real_model_decodes_its_exact_law(verifier: Verifier) -> None:
    """Through models, caches and the loop: the law of three decoded tokens is the model's, under
    both verifiers."""
    pair = tiny_pair(7)
    policy = parse_policy({"draft": "draft", "window": {"kind": "fixed", "gamma": WINDOW}})
    decoder = Decoder(pair, StaticSource(prepare(policy, pair.draft_names)), verifier)
    drawn = []
    for seed in range(400):
        request = DecodeRequest("r", [1, 2], PLAIN, seed, 2, verifier=verifier)
        drawn.append([t for r in decoder.rounds(request) for t in r.tokens])
    assert p_value_of_two(pair, drawn) > 1e-3

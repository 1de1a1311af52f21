"""Both verifiers are lossless in law: exact enumeration against many draws, on Markov laws and on a
real model."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
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
from spectune.runtime.policies.plan import prepare
from spectune.runtime.sampling import (
    Noise,
    gumbel_row,
    log_distribution,
    sample,
    stream_key,
    uniform,
)
from spectune.runtime.verification import accept_chain, verify_rejection
from spectune.traces.schema import Sampling, Verifier

VOCAB, LENGTH, WINDOW = 5, 3, 2
PLAIN = Sampling(temperature=1.0)
CPU = torch.device("cpu")
Verify = Callable[..., Verified]


def biased(
    logits: torch.Tensor,
    length: int,
    drafted: list[int],
    log_q: list[torch.Tensor],
    sampling: Sampling,
    seed: int,
    salt: int,
) -> Verified:
    """A classical mistake: after a rejection the token is drawn from p instead of norm(max(0, p -
    q))."""
    log_p, kept = log_distribution(logits, sampling), len(drafted)
    for i, token in enumerate(drafted):
        ratio = float((log_p[i, token] - log_q[i][token]).exp())
        if uniform(stream_key(seed, length + i, "accept", salt)) > ratio:
            kept = i
            break
    row = gumbel_row(stream_key(seed, length + kept, "residual", salt), VOCAB, CPU)
    return Verified(kept, [*drafted[:kept], int((log_p[kept] + row).argmax())])


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
            noise = gumbel_row(stream_key(seed, len(text) + j, "draft", rounds), VOCAB, CPU)
            previous = int((law + noise).argmax())
            drafted.append(previous)
            log_q.append(law)
        states = [text[-1] if text else VOCAB, *drafted]
        text += verify(p[states], len(text), drafted, log_q, PLAIN, seed, rounds).tokens
        rounds += 1
    return text[:LENGTH]


def draw_coupled(p: torch.Tensor, q: torch.Tensor, seed: int) -> list[int]:
    """The same with the coupled verifier and a draft that proposes by log q + the target's own
    noise."""
    text: list[int] = []
    noise = Noise(seed, VOCAB, CPU)
    while len(text) < LENGTH:
        previous = text[-1] if text else VOCAB
        drafted: list[int] = []
        for j in range(WINDOW):
            previous = int(sample(q[previous][None], PLAIN, noise, [len(text) + j]))
            drafted.append(previous)
        states = [text[-1] if text else VOCAB, *drafted]
        positions = [len(text) + j for j in range(WINDOW + 1)]
        tokens = sample(p[states], PLAIN, noise, positions).tolist()
        text += accept_chain(drafted, tokens).tokens
    return text[:LENGTH]


def laws(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random logits of a target and of a draft that is neither equal nor unlike, [VOCAB + 1,
    VOCAB]."""
    rng = torch.Generator().manual_seed(seed)
    p = torch.randn(VOCAB + 1, VOCAB, generator=rng)
    return p, p * 0.5 + torch.randn(VOCAB + 1, VOCAB, generator=rng)


def p_value(chances: npt.NDArray[np.float64], drawn: list[int]) -> float:
    """Chi-square of drawn cells against their exact chances. Cells that expect little are pooled,
    as the test demands."""
    expected = chances / chances.sum() * len(drawn)
    order = expected.argsort()
    groups = np.floor(expected[order].cumsum() / 5).astype(int)
    observed = np.bincount(drawn, minlength=len(chances))[order]
    cells = np.bincount(groups, expected[order])
    some = cells > 0
    return float(chisquare(np.bincount(groups, observed)[some], cells[some]).pvalue)


def p_value_of(p: torch.Tensor, drawn: list[list[int]]) -> float:
    """:func:`p_value` of drawn sequences by the law of p over all VOCAB ** LENGTH sequences."""
    law = p.double().softmax(-1).numpy()
    sequences = list(itertools.product(range(VOCAB), repeat=LENGTH))
    chances = [
        np.prod([law[a, b] for a, b in zip((VOCAB, *sequence), sequence, strict=False)])
        for sequence in sequences
    ]
    number = {sequence: i for i, sequence in enumerate(sequences)}
    return p_value(np.array(chances), [number[tuple(d)] for d in drawn])


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_a_verifier_is_lossless_in_law(verifier: Verifier) -> None:
    """Sequences follow the exact law (a false alarm has odds of 1 in 1000)."""
    p, q = laws(1)
    seeds = range(1000, 3500)
    if verifier == "coupled":
        drawn = [draw_coupled(p, q, seed) for seed in seeds]
    else:
        drawn = [draw_rejection(p, q, seed, verify_rejection) for seed in seeds]
    assert p_value_of(p, drawn) > 1e-3


def test_a_biased_verifier_fails_the_same_test() -> None:
    """The test can fail: a verifier that draws from p after a rejection is told from the exact
    law."""
    p, q = laws(1)
    assert p_value_of(p, [draw_rejection(p, q, s, biased) for s in range(1000, 3500)]) < 1e-6


def tiny_pair() -> LoadedPair:
    """A real target and draft over VOCAB tokens, without a tokenizer."""

    def model(name: str, offset: int) -> CausalModel:
        torch.manual_seed(7 + offset)
        sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1}
        config = LlamaConfig(**sizes, num_attention_heads=2, intermediate_size=32)
        made = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            made.lm_head.weight.mul_(15.0)
        return CausalModel(made, name)

    drafts = {"draft": model("draft", 1)}
    spec = PairSpec(name="tiny", target="target")
    codec = None, frozenset(), (512, {}), VOCAB
    return LoadedPair(*codec, spec, spec.name, model("target", 0), drafts)


def logits_after(model: CausalModel, prefix: list[int]) -> torch.Tensor:
    """Float32 logits [vocab] after a prefix, read at once and without the slot cache."""
    logits: torch.Tensor = model.model(torch.tensor([prefix]), use_cache=False).logits[0, -1]
    return logits.float()


def p_value_of_two(pair: LoadedPair, drawn: list[list[int]]) -> float:
    """:func:`p_value` of two tokens decoded after the prompt [1, 2] by the target's law."""
    law, target = [], pair.target
    for token, chance in enumerate(logits_after(target, [1, 2]).double().softmax(-1)):
        law.append(chance * logits_after(target, [1, 2, token]).double().softmax(-1))
    return p_value(torch.cat(law).numpy(), [a * VOCAB + b for a, b in drawn])


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_a_real_model_decodes_its_exact_law(verifier: Verifier) -> None:
    """Through models, caches and the loop: the law of two decoded tokens is the model's, under both
    verifiers."""
    pair = tiny_pair()
    policy = parse_policy({"draft": "draft", "window": {"kind": "fixed", "gamma": WINDOW}})
    decoder = Decoder(pair, StaticSource(prepare(policy, pair.draft_names)), verifier)
    drawn = []
    for seed in range(400):
        request = DecodeRequest("r", [1, 2], PLAIN, seed, 2, verifier=verifier)
        drawn.append([t for r in decoder.rounds(request) for t in r.tokens])
    assert p_value_of_two(pair, drawn) > 1e-3

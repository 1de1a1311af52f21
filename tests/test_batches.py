"""Several requests at once, in float64: texts and rounds are those of one request at a time,
whatever runs beside, wherever it sits, however often the policy is swapped meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import chain, tiny_model, top_k
from recorded_texts import Looked, shape
from test_heads import _eagle3_without_lm_head, pair_with_heads
from test_shortlists import artifacts
from test_tree_parity import STATIC
from transformers import AutoModelForCausalLM

from spectune.runtime.cache import Extents, together
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import (
    DecodeRequest,
    Round,
    StaticSource,
    TokenLogprobs,
    Waiting,
    decode_rounds,
)
from spectune.runtime.models import CausalModel
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import EXPANDED_LIMIT, parse_policy
from spectune.runtime.policies.plan import Plan
from spectune.traces.errors import PolicyError, WorkloadError
from spectune.traces.schema import Request, Sampling

TEXTS = ["def add(a, b):", "The quick brown", "Question: Bob has 9", "for i in", "f", "x = 3\n" * 9]
TOKENS = 16
SAMPLED = Sampling(temperature=1.0, seed=4)
SAMPLINGS = [
    Sampling(),
    SAMPLED,
    Sampling(temperature=0.7, top_p=0.9, seed=2),
    Sampling(temperature=1.0, top_k=12, seed=3),
]
DOCUMENTS: list[dict[str, Any]] = [
    {"draft": "none"},
    chain("near", 4),
    chain("far", 6, stop={"kind": "max_prob", "threshold": 0.3}),
    {"draft": "near", "window": {"kind": "cache_fsm", "gamma_max": 5}},
    chain("ngram", 5),
    chain("near", 3, shortlist={"kind": "frequency", "size": 40, "artifact": "order"}),
    top_k("near", 4, 3, 9),
    top_k("far", 3, 4, 8, stratify={"artifact": "bins", "alpha": 3, "fractions": [0.3, 0.6, 1.0]}),
    {"draft": "near", "growth": {"kind": "static", "paths": STATIC}},
    chain("head", 3),
    top_k("head", 4, 4, 12),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    case = _eagle3_without_lm_head()
    case.config |= {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    file = pair_with_heads(tmp_path_factory.mktemp("batches"), layers=3, head=case)
    return load_pair(read_pair(str(file)), device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def plans(pair: LoadedPair) -> list[Plan]:
    find = artifacts(pair)
    return [prepare_for(pair, parse_policy(d), artifacts=find) for d in DOCUMENTS]


@dataclass
class Arriving:
    """Requests that arrive at steps; ``step`` is the one in hand. ``admitted``: at which each
    was."""

    waiting: list[tuple[int, DecodeRequest]]
    step: int = 0
    admitted: dict[str, int] = field(default_factory=dict)

    def wait(self) -> bool:
        if self.waiting:
            self.step = max(self.step, self.waiting[0][0])
        return bool(self.waiting)

    def first(self) -> DecodeRequest | None:
        here = self.waiting and self.waiting[0][0] <= self.step
        return self.waiting[0][1] if here else None

    def take(self) -> DecodeRequest:
        request = self.waiting.pop(0)[1]
        self.admitted[request.id] = self.step
        return request


def said(rounds: Sequence[Round]) -> list[Any]:
    """All that rounds say but for their times."""
    return [(shape(r.step), r.step.policy, r.tokens, r.drafted, r.path, r.finish) for r in rounds]


def at_once(
    decoder: Decoder, queue: Arriving, order: Sequence[Plan], every: int
) -> dict[str, tuple[list[Round], list[Plan]]]:
    """The rounds of each request, and the plans that were looked at for it: at its admission, then
    before each round. Another of ``order`` is in force every so many steps."""

    def in_force(step: int) -> Plan:
        return order[step // every % len(order)]

    decoder.source = Looked(lambda _: in_force(queue.step))
    found: dict[str, tuple[list[Round], list[Plan]]] = {}
    for rounds in decoder.steps(queue):
        for one in rounds:
            name = one.request.id
            first = ([], [in_force(queue.admitted[name])])
            its_rounds, looked = found.setdefault(name, first)
            its_rounds.append(one)
            looked.append(in_force(queue.step))
        queue.step += 1
    return found


def alone(decoder: Decoder, request: DecodeRequest, looked: Sequence[Plan]) -> list[Round]:
    """The rounds of a request by itself, under these plans one after another."""
    source = Looked(lambda n: looked[n - 1])
    return list(decode_rounds(decoder.backend, request, source))


ASKED = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step at which it arrives
        st.sampled_from(TEXTS),
        st.sampled_from(SAMPLINGS),
        st.integers(1, TOKENS),
        st.sampled_from([(), (), ("e",), ("ab", "\n")]),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=ASKED,
    seats=st.integers(2, 6),
    order=st.lists(st.integers(0, len(DOCUMENTS) - 1), min_size=1, max_size=4),
    every=st.integers(1, 4),
    few=st.booleans(),
)
def test_rounds_at_once_are_rounds_alone(
    pair: LoadedPair,
    plans: list[Plan],
    asked: list[Any],
    seats: int,
    order: list[int],
    every: int,
    few: bool,
) -> None:
    """Under arrivals, seats, policies, swaps in the middle, stop strings, temperatures; also where
    slots, not seats, are what requests wait for."""
    slots = 2 * (max(map(len, TEXTS)) + TOKENS + 1 + EXPANDED_LIMIT) if few else None
    decoder = Decoder(pair, StaticSource(plans[0]), seats=seats, slots=slots)
    single = Decoder(pair, StaticSource(plans[0]))
    requests = [
        decoder.request(Request(str(n), "x", text), pair.encode(text), sampling, tokens, stops)
        for n, (_, text, sampling, tokens, stops) in enumerate(asked)
    ]
    arrivals = sorted((step, n) for n, (step, *_) in enumerate(asked))
    queue = Arriving([(step, requests[n]) for step, n in arrivals])
    found = at_once(decoder, queue, [plans[n] for n in order], every)
    assert len(found) == len(requests)
    for request in requests:
        rounds, looked = found[request.id]
        assert said(rounds) == said(alone(single, request, looked))


@pytest.mark.parametrize("number", range(len(DOCUMENTS)))
def test_eight_requests_take_the_steps_of_the_longest(
    pair: LoadedPair, plans: list[Plan], number: int
) -> None:
    """All at once under one policy: as many steps as the longest has rounds, but for prompts, one
    of which is read before a step."""
    decoder = Decoder(pair, StaticSource(plans[number]), seats=8)
    single = Decoder(pair, StaticSource(plans[number]))
    requests = [
        decoder.request(Request(str(n), "x", ""), pair.encode(TEXTS[n % 6]), sampling, TOKENS)
        for n, sampling in enumerate(SAMPLINGS * 2)
    ]
    steps = list(decoder.steps(Waiting(requests)))
    rounds = {request.id: list[Round]() for request in requests}
    for step in steps:
        for one in step:
            rounds[one.request.id].append(one)
    for request in requests:
        assert said(rounds[request.id]) == said(list(single.rounds(request)))
    assert len(steps) <= max(map(len, rounds.values())) + len(requests) - 1
    assert max(map(len, steps)) > 4


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_permuting_the_requests_of_a_pass_changes_nothing(kind: str) -> None:
    """Nor does another request in it, and a text's logits are those of the model's own code."""
    model = CausalModel(tiny_model(kind, 60, positions=64).double(), "target")
    own = tiny_model(kind, 60, positions=64).double()
    texts = [torch.arange(n).square() % 60 for n in (5, 17, 9, 1)]
    model.reserve(4 * 20)
    extents = Extents(4 * 20)
    bases = [extents.take(20) for _ in texts]

    def passes(order: Sequence[int]) -> dict[int, torch.Tensor]:
        tokens = [model.following(texts[n], 0, base=bases[n] or 0) for n in order]
        logits, _ = model.run_together(tokens)
        return dict(zip(order, logits.split([len(texts[n]) for n in order]), strict=True))

    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0], [1]):
        for n, logits in passes(order).items():
            with torch.no_grad():
                expected = own(texts[n][None]).logits[0]
            torch.testing.assert_close(logits, expected.float(), rtol=0, atol=1e-6)


def test_a_pass_of_one_request_is_itself() -> None:
    model = CausalModel(tiny_model("llama", 60, positions=64), "target")
    model.reserve(20)
    tokens = model.following(torch.arange(3), 2, base=4)
    assert together([tokens]) is tokens
    assert tokens.positions.tolist() == [2, 3, 4]
    assert tokens.slots.tolist() == [6, 7, 8]
    assert (tokens.start, tokens.stop) == (4, 9)


@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_extents_are_the_first_fit_of_a_bitmap(capacity: int, moves: list[Any]) -> None:
    extents, taken, runs = Extents(capacity), np.zeros(capacity, bool), list[tuple[int, int]]()
    for gives, size in moves:
        if gives and runs:
            begin, length = runs.pop(size % len(runs))
            extents.give(begin)
            taken[begin : begin + length] = False
            continue
        fits = (b for b in range(capacity - size + 1) if not taken[b : b + size].any())
        expected = next(fits, None)
        assert extents.take(size) == expected
        if expected is not None:
            taken[expected : expected + size] = True
            runs.append((expected, size))


def test_a_request_too_large_for_any_extent_is_refused(pair: LoadedPair, plans: list[Plan]) -> None:
    slots = EXPANDED_LIMIT + 30
    decoder = Decoder(pair, StaticSource(plans[1]), seats=2, slots=slots)
    ids = pair.encode(TEXTS[0])
    decoder.request(Request("small", ""), ids, SAMPLED, 29 - len(ids))
    with pytest.raises(WorkloadError, match=f"large: .* there are {slots}$"):
        decoder.request(Request("large", ""), ids, SAMPLED, 30 - len(ids))


def test_what_serves_one_request_at_a_time_is_refused_by_name(
    pair: LoadedPair, plans: list[Plan], caplog: pytest.LogCaptureFixture
) -> None:
    """At the start; published later, the last good policy stays in force."""
    with pytest.raises(PolicyError, match="rejection verifier decodes one"):
        Decoder(pair, StaticSource(plans[1]), "rejection", seats=2)
    router = {"kind": "clusters", "k0": 3, "k1": 2, "k_min": 1, "artifact": "router-near"}
    refused = {
        "q_learning learns": {"draft": "near", "window": {"kind": "q_learning", "gamma_max": 3}},
        "heuristic learns": {"draft": "near", "window": {"kind": "heuristic"}},
        "clusters is routed": chain("near", 3, shortlist=router),
    }
    for words, document in refused.items():
        plan = prepare_for(pair, parse_policy(document), artifacts=artifacts(pair))
        decoder = Decoder(pair, StaticSource(plan), seats=2)
        request = decoder.request(Request("r", ""), pair.encode(TEXTS[0]), SAMPLED, 4)
        with pytest.raises(PolicyError, match=f"{words}.*one request at a time"):
            list(decoder.steps(Waiting([request])))
        decoder.source = Looked(lambda n, plan=plan: plans[1] if n < 3 else plan)
        with caplog.at_level(logging.WARNING):
            steps = list(decoder.steps(Waiting([request])))
        assert {one.step.policy for step in steps for one in step} == {plans[1].policy_id}
        assert words in caplog.text


def test_an_abandoned_loop_gives_its_room_back(pair: LoadedPair, plans: list[Plan]) -> None:
    decoder = Decoder(pair, StaticSource(plans[6]), seats=2)
    requests = [
        decoder.request(Request(str(n), ""), pair.encode(TEXTS[n]), SAMPLED, TOKENS)
        for n in range(2)
    ]
    steps = decoder.steps(Waiting(requests))
    next(steps)
    next(steps)
    steps.close()
    again = [one for step in decoder.steps(Waiting(requests)) for one in step]
    assert {one.request.id for one in again if one.finish} == {"0", "1"}


def test_a_loop_does_not_wait_for_another_that_goes_on(pair: LoadedPair, plans: list[Plan]) -> None:
    decoder = Decoder(pair, StaticSource(plans[1]))
    request = decoder.request(Request("r", ""), pair.encode(TEXTS[0]), SAMPLED, TOKENS)
    going_on = decoder.rounds(request)
    next(going_on)
    with pytest.raises(RuntimeError, match="another loop"):
        next(decoder.rounds(request))
    going_on.close()  # type: ignore[attr-defined]
    assert next(decoder.rounds(request)).tokens


def test_a_request_that_nobody_waits_for_frees_its_seat_at_the_next_step(
    pair: LoadedPair, plans: list[Plan]
) -> None:
    """Those beside it, and the one that gets its seat, have their texts; one that is cancelled
    while its prompt is read has none."""
    decoder, single = (Decoder(pair, StaticSource(plans[1]), seats=n) for n in (2, 1))
    gone = set[str]()

    def asked(name: str) -> DecodeRequest:
        request = decoder.request(
            Request(name, "x"), pair.encode(TEXTS[int(name)]), SAMPLED, 2 * TOKENS
        )
        return replace(request, is_cancelled=lambda: name in gone)

    requests = [asked(str(n)) for n in range(4)]
    queue = Arriving([(0, requests[0]), (0, requests[1]), (0, requests[2]), (0, requests[3])])
    found: dict[str, list[Round]] = {}
    for rounds in decoder.steps(queue):
        for one in rounds:
            found.setdefault(one.request.id, []).append(one)
        queue.step += 1
        gone |= {"0"} if queue.step == 3 else set()
        gone |= {"2"} if "2" in queue.admitted else set()
    assert queue.admitted["2"] <= 4
    assert [len(found.get(name, [])) for name in ("0", "2")] == [3, 1]
    for request in (requests[1], requests[3]):
        assert said(found[request.id]) == said(list(single.rounds(request)))
    assert len(list(decoder.steps(Waiting(requests[1:2])))) == len(found["1"])


@pytest.mark.parametrize("number", range(len(DOCUMENTS)))
def test_logprobs_are_those_of_transformers_whatever_is_drafted(
    pair: LoadedPair, plans: list[Plan], number: int
) -> None:
    """Of prompt and text, cut where the text is, beside a request that asks for none."""
    decoder = Decoder(pair, StaticSource(plans[number]), seats=2)
    single = Decoder(pair, StaticSource(plans[number]))
    prompt: list[TokenLogprobs] = []
    plain = decoder.request(
        Request("a", "x"), pair.encode(TEXTS[2]), SAMPLINGS[number % 4], TOKENS, ("e",)
    )
    scored = replace(plain, id="b", top_logprobs=3, scores_prompt=prompt.extend)
    found: dict[str, list[Round]] = {"a": [], "b": []}
    for rounds in decoder.steps(Waiting([plain, scored])):
        for one in rounds:
            found[one.request.id].append(one)
    assert said(found["a"]) == said(found["b"]) == said(list(single.rounds(plain)))
    assert not any(one.logprobs for one in found["a"])
    text = [token for one in found["b"] for token in one.tokens]
    told = prompt + [logprobs for one in found["b"] for logprobs in one.logprobs]
    ids = [*plain.prompt_ids, *text]
    model = AutoModelForCausalLM.from_pretrained(pair.spec.target, dtype=torch.float64)
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert len(told) == len(ids) - 1
    for row, token, logprobs in zip(log_p, ids[1:], told, strict=False):
        assert logprobs.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert [t for t, _ in logprobs.top] == row.topk(3).indices.tolist()
        assert [p for _, p in logprobs.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)

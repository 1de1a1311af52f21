"""Heads draft chains and trees: no text changes, replay is the runtime round by round, a head may
take over in the middle of a text."""

from __future__ import annotations

import pytest
from pairs import chain, top_k
from recorded_texts import (
    SAMPLINGS,
    alternating,
    decoded_again,
    plain_texts,
    same_rounds,
    shape,
)
from synthetic import flat_profile
from test_heads import _eagle1, _eagle3_without_lm_head, _eagle31, pair_with_heads
from test_lossless import PROMPTS
from test_tree_parity import (
    artifacts,
    plain_rounds,
    readable,
    replayed_exactly,
    tree_policies,
    two_texts,
)

from spectune.optimizer.execute import DecodeOptions, encode, run
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Request, Sampling, Workload

WIDTH, DEPTH = 5, 5
HEADS = [_eagle3_without_lm_head, _eagle1, _eagle31]
each = pytest.mark.parametrize(
    ("pair", "sampling"),
    [(HEADS[0], SAMPLINGS[0]), (HEADS[1], SAMPLINGS[1]), (HEADS[2], SAMPLINGS[1])],
    indirect=["pair"],
    ids=["eagle3-T0.0", "eagle1-T1.0", "eagle3.1-T1.0"],
)
"""Each head at one temperature; `make acceptance` decodes one at both."""


@pytest.fixture(
    scope="module",
    params=HEADS,
    ids=["eagle3", "eagle1", "eagle3.1"],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    case = request.param()
    case.config |= {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    file = pair_with_heads(tmp_path_factory.mktemp("heads"), layers=3, head=case)
    return load_pair(read_pair(str(file)), device="cpu", dtype="float64")


@each
def test_heads_change_no_text_and_replay_exactly(pair: LoadedPair, sampling: Sampling) -> None:
    policies = [
        p
        for p in tree_policies("head", 5, seed=9)
        if p.growth.kind == "static" or p.growth.width <= WIDTH
    ]
    fsm = {
        "window": {"kind": "fsm", "gamma_max": 6},
        "stop": {"kind": "max_prob", "threshold": 0.05},
    }
    policies += [parse_policy(chain("head", 4)), parse_policy({"draft": "head", **fsm})]
    trees, rounds = replayed_exactly(pair, policies, sampling, WIDTH, 7, gamma_max=8)
    assert not trees[0].shared
    # A random head finds the text by the shared noise alone.
    assert sum(s.accepted for s in rounds) > 20 or sampling.greedy


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature}")
@pytest.mark.parametrize("pair", [_eagle3_without_lm_head], indirect=True, ids=["eagle3"])
def test_a_head_is_priced_as_trees_are(pair: LoadedPair, sampling: Sampling) -> None:
    """Replay with a profile that knows a head from trees alone; windows that weigh costs decide
    alike in both worlds."""
    profile = flat_profile(pair.id, pair.drafts, ["head"])
    window = {"kind": "analytic", "gamma_max": 5, "history": 3}
    documents = {"draft": "head"}, top_k("head", 4, 5, 9)
    policies = [parse_policy({**document, "window": window}) for document in documents]
    plain = two_texts(pair, sampling)
    trees = [record_panorama(pair, t, "head", 6, WIDTH, 6) for t in plain]
    trace = ReplayTrace(plain, {"head": trees})
    for policy in policies:
        replayed = run_replay(trace, policy, profile, per_round=True)
        in_rounds = float(replayed.round_s[:, 2].sum())
        before = sum(2 * profile.prefill_seconds(None, len(t.prompt_ids)) for t in plain)
        assert replayed.total.seconds == pytest.approx(in_rounds + before)
        same_rounds(pair, policy, replayed, plain, profile=profile)


@pytest.mark.parametrize("pair", [_eagle3_without_lm_head], indirect=True, ids=["eagle3"])
@pytest.mark.parametrize("draft", ["head", "near"])
def test_what_drafts_nothing_is_replayed_without_its_trees(pair: LoadedPair, draft: str) -> None:
    """A window of 0 keeps the draft loaded; whether or not its trees were recorded."""
    profile = flat_profile(pair.id, pair.drafts, ["head"])
    plain = two_texts(pair, Sampling())
    trees = [record_panorama(pair, t, draft, 3, 2, 3) for t in plain]
    for document in (chain(draft, 0), top_k(draft, 2, 0, 3)):
        policy = parse_policy(document)
        for recorded in ({draft: trees}, {}):
            trace = ReplayTrace(plain, recorded)
            replayed = run_replay(trace, policy, profile, per_round=True)
            assert replayed.total.drafted_tokens == 0
            same_rounds(pair, policy, replayed, plain, profile=profile)


@each
def test_a_head_takes_over_in_the_middle_of_a_text(pair: LoadedPair, sampling: Sampling) -> None:
    documents = [
        chain("near", 2),
        top_k("head", 4, 3, 9),
        {"draft": "none"},
        top_k("near", 3, 3, 7),
        chain("head", 3),
        chain("ngram", 3),
    ]
    prepared = [prepare(parse_policy(d), pair.draft_names) for d in documents]
    decoder = Decoder(pair, alternating(prepared))
    prompts = {str(i): prompt for i, prompt in enumerate([*PROMPTS[:3], "f"])}
    for text in plain_texts(pair, prompts, sampling, 32):
        assert {s.draft for s in decoded_again(decoder, text).steps} > {"near", "head"}


def test_a_prompt_of_one_token_has_nothing_for_a_head_to_read(pair: LoadedPair) -> None:
    (text,) = plain_texts(pair, {"one": "f"}, Sampling(), 12)
    assert len(text.prompt_ids) == 1
    trees = [record_panorama(pair, text, "head", 4, WIDTH, DEPTH)]
    trace = readable(pair, [text], "head", trees)
    for document in (chain("head", 3), top_k("head", 3, 4, 8)):
        policy = parse_policy(document)
        replayed = run_replay(trace, policy, per_round=True)
        steps = same_rounds(pair, policy, replayed, [text])
        assert [shape(s) for s in steps] == plain_rounds(trace, policy, artifacts("head"))[0]
        assert steps[0].drafted == steps[0].lag == 0
        assert all(s.drafted > 0 for s in steps[1:-1])


def test_the_rejection_verifier_refuses_heads_and_trees(pair: LoadedPair) -> None:
    hot = Sampling(temperature=1.0)
    for document, said in (
        (chain("head", 3), "is a head"),
        ({"draft": "near", "growth": {"kind": "top_k"}}, "growth top_k"),
    ):
        decoder = Decoder(
            pair, StaticSource(prepare(parse_policy(document), pair.draft_names)), "rejection"
        )
        with pytest.raises(PolicyError, match=said):
            next(decoder.rounds(decoder.request(Request("x", "c", "f"), [70, 71, 72], hot, 8)))


def test_a_pair_with_a_head_serves_the_rejection_verifier_with_its_other_drafts(
    pair: LoadedPair,
) -> None:
    hot = DecodeOptions(Sampling(temperature=1.0, seed=1), 8, "rejection")
    encoded = encode(pair, Workload("w", (Request("a", "c", "def f(x):"),)), hot)
    policy = parse_policy(chain("near", 2))
    (decoded,) = run(pair, StaticSource(prepare(policy, pair.draft_names)), encoded)
    assert len(decoded.trajectory.output_ids) == 8 or decoded.trajectory.finish == "eos"

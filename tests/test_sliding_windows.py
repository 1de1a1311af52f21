"""Layers that see a window of positions alone, in float64 and beyond it: texts are ``generate``'s,
under chains and trees, beside other requests, in captured passes, and replay is the runtime.

Gemma's passes run by the code of transformers, Mistral's fused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pairs import WINDOW, chain, make_pair, top_k
from recorded_texts import asked, plain_texts, same_rounds
from synthetic import flat_profile
from test_batches import said
from test_graphs import GREEDY, HOT, Twins
from test_tree_parity import STATIC, replayed_exactly, tree_policies

from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import Round, StaticSource, Waiting
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.schema import Sampling

PROMPTS = {"long": "def add(a, b):\n    return a + b\n", "short": "x", "other": "for i in"}
TOKENS = 40
POLICIES = [
    parse_policy(document)
    for document in (
        chain("near", 4),
        chain("far", 6, stop={"kind": "max_prob", "threshold": 0.3}),
        chain("ngram", 5),
        top_k("near", 4, 4, 12),
        {"draft": "far", "growth": {"kind": "static", "paths": STATIC}},
    )
]


@pytest.fixture(scope="module", params=["gemma3", "mistral"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp(request.param), request.param, seed=3)


@pytest.fixture(scope="module")
def pair(file: Path) -> LoadedPair:
    return load_pair(read_pair(str(file)), device="cpu", threads=1, dtype="float64")


def test_texts_are_generates_beyond_the_window(pair: LoadedPair) -> None:
    """Under autoregression, chains and trees; and each layer's window is that of its kind."""
    reference = type(pair.target.model).from_pretrained(pair.spec.target, dtype=torch.float64)
    decoders = [Decoder(pair, StaticSource(prepare_for(pair, p))) for p in POLICIES]
    for name, plain in zip(PROMPTS, plain_texts(pair, PROMPTS, GREEDY, TOKENS), strict=True):
        ids = torch.tensor([pair.encode(PROMPTS[name])])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
        )
        expected = out[0, ids.shape[1] :].tolist()
        assert len(expected) > 2 * WINDOW
        assert plain.output_ids.tolist() == expected
        for decoder in decoders:
            done = decoder.decode(asked(decoder, PROMPTS[name], GREEDY, TOKENS))
            assert done.trajectory.output_ids.tolist() == expected


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_chains_replay_exactly(pair: LoadedPair, sampling: Sampling) -> None:
    texts = plain_texts(pair, PROMPTS, sampling, TOKENS)
    panoramas = {
        draft: [record_panorama(pair, text, draft, 6) for text in texts]
        for draft in pair.draft_names
    }
    trace, profile = ReplayTrace(texts, panoramas), flat_profile(pair.id, pair.drafts)
    for policy in POLICIES[:3]:
        replayed = run_replay(trace, policy, profile, per_round=True)
        assert same_rounds(pair, policy, replayed, texts)


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_trees_replay_exactly(pair: LoadedPair, sampling: Sampling) -> None:
    policies = tree_policies("near", 6, seed=1)
    _, rounds = replayed_exactly(pair, policies, sampling, width=6, depth=7)
    assert sum(step.accepted for step in rounds) > len(rounds) / 4


def test_trees_deeper_than_the_window(file: Path) -> None:
    """Where the draft is the target all of a path is accepted, whatever stands beside it."""
    document = json.loads(file.read_text()) | {"drafts": {"same": "target"}}
    deep = file.with_name("deep.json")
    deep.write_text(json.dumps(document))
    pair = load_pair(read_pair(str(deep)), device="cpu", threads=1, dtype="float64")
    depth = WINDOW + 5
    paths = [[0] * n for n in range(1, depth + 1)] + [[0] * n + [1] for n in range(4)]
    policy = parse_policy({"draft": "same", "growth": {"kind": "static", "paths": paths}})
    _, rounds = replayed_exactly(pair, [policy], GREEDY, width=2, depth=depth)
    whole = [step for step in rounds if step.depth == depth]
    assert whole
    assert all(step.accepted == depth for step in whole)


@pytest.mark.parametrize("number", range(len(POLICIES)))
def test_rounds_at_once_are_rounds_alone(pair: LoadedPair, number: int) -> None:
    source = StaticSource(prepare_for(pair, POLICIES[number]))
    together, single = Decoder(pair, source, seats=3), Decoder(pair, source)
    requests = [
        asked(together, prompt, sampling, TOKENS, f"{name} {sampling.temperature}")
        for name, prompt in PROMPTS.items()
        for sampling in (GREEDY, HOT)
    ]
    rounds = {request.id: list[Round]() for request in requests}
    for step in together.steps(Waiting(requests)):
        for one in step:
            rounds[one.request.id].append(one)
    for request in requests:
        assert said(rounds[request.id]) == said(list(single.rounds(request)))


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_captured_passes_see_the_window(file: Path, sampling: Sampling) -> None:
    twins = Twins(file)
    for policy in POLICIES:
        twins.agree(policy, sampling)
        assert twins.missed() == {}

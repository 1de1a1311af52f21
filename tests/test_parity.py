"""Replay is exact: the fast replay, the plain loop over the trace and the runtime, here in float64,
agree on every round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import TraceBackend, replay_rounds
from pairs import chain
from recorded_texts import plain_texts, request_of, shape
from synthetic import flat_profile
from test_lossless import policies
from test_tree_parity import CASES
from test_verifiers import logits_after

from spectune.optimizer.replay.chain_tables import AGREE_YES, join_chains
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime.decoder import Decoder
from spectune.runtime.drafts.eagle import Features
from spectune.runtime.drafts.language_model import LanguageModelDraft
from spectune.runtime.drafts.protocol import DraftContext, DraftRequest
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.recording.panoramas import record_panorama
from spectune.runtime.sampling import Noise, log_distribution
from spectune.runtime.session import Sessions
from spectune.traces.schema import Request, Sampling, request_seed
from spectune.traces.tables import Panorama, Trajectory

PROMPTS = ["def add(a, b):", "Question: Bob has 9", "x"]
GAMMA_MAX = 16
TOKENS = 24
llama = pytest.mark.parametrize("either_pair", ["llama"], indirect=True)
"""Where an architecture makes no difference."""


@pytest.fixture(scope="module")
def pair(either_pair: LoadedPair) -> LoadedPair:
    return either_pair


def random_policies(drafts: Sequence[str], count: int, seed: int) -> list[Policy]:
    """Policies of any window and stop with random parameters."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        kind = str(rng.choice(["fixed", "analytic", "fsm", "cache_fsm", "q_learning", "heuristic"]))
        gamma = int(rng.integers(1, GAMMA_MAX + 1))
        window = {"kind": kind, **({"gamma": gamma} if kind == "fixed" else {"gamma_max": gamma})}
        if kind == "q_learning":
            seed, memory = (int(rng.integers(low, high)) for low, high in ((0, 100), (1, 3)))
            window |= {"epsilon": 0.3, "seed": seed, "memory": memory}
        if kind == "analytic":
            window["history"] = int(rng.integers(1, 20))
            window["estimator"] = str(rng.choice(["ratio", "exact"]))
        stop = {"kind": str(rng.choice(["none", "max_prob", "joint_prob", "entropy"]))}
        if stop["kind"] != "none":
            stop["threshold"] = round(float(rng.uniform(0.01, 0.8)), 3)
            stop["keep_last"] = bool(rng.integers(2))
        draft = str(rng.choice(list(drafts)))
        stop = {"kind": "none"} if draft == "ngram" else stop  # it has no probabilities to read
        found.append(parse_policy({"draft": draft, "window": window, "stop": stop}))
    return found


Recorded = tuple[list[Trajectory], dict[str, list[Panorama]]]
Record = Callable[[Sampling], Recorded]


@pytest.fixture(scope="module")
def made() -> dict[tuple[str, Sampling], Recorded]:
    return {}


@pytest.fixture(scope="module")
def record(pair: LoadedPair, made: dict[tuple[str, Sampling], Recorded]) -> Record:
    """Texts and panoramas at a sampling, made once for each pair."""

    def found(sampling: Sampling) -> Recorded:
        key = pair.id, sampling
        if key not in made:
            made[key] = recorded(pair, sampling)
        return made[key]

    return found


def recorded(pair: LoadedPair, sampling: Sampling) -> Recorded:
    trajectories = plain_texts(
        pair, {str(i): prompt for i, prompt in enumerate(PROMPTS)}, sampling, TOKENS
    )
    return trajectories, {
        d: [record_panorama(pair, t, d, GAMMA_MAX) for t in trajectories] for d in pair.draft_names
    }


@pytest.mark.parametrize(("either_pair", "sampling"), CASES, indirect=["either_pair"], ids=str)
def test_replay_is_the_runtime_round_by_round(
    pair: LoadedPair, record: Record, sampling: Sampling
) -> None:
    """simulate = run on every round, for every kind of policy; the plain loop over the trace agrees
    with both. A case has every second policy: each is held greedily and above temperature 0, and on
    both architectures."""
    trajectories, panoramas = record(sampling)
    profile = flat_profile(pair.id, pair.drafts)
    trace = ReplayTrace(trajectories, panoramas)
    near, far = pair.drafts
    tried = [
        *policies(near, far),
        *random_policies(pair.draft_names, 3, seed=int(10 * sampling.temperature)),
    ][sampling.greedy == (pair.spec.name == "tiny-llama") :: 2]
    rounds = 0
    for policy in tried:
        decoder = Decoder(pair, StaticSource(prepare(policy, pair.draft_names, profile=profile)))
        oracle, sessions = prepare(policy, pair.draft_names, profile=profile), Sessions()
        replayed = run_replay(trace, policy, profile, per_round=True).steps()
        for i, trajectory in enumerate(trajectories):
            executed = decoder.decode(request_of(decoder, trajectory))
            assert executed.trajectory == trajectory, policy.label()
            view = panoramas[policy.draft][i] if policy.speculates else None
            plain = [shape(r.step) for r in replay_rounds(trajectory, view, oracle, sessions)]
            assert [shape(s) for s in executed.steps] == plain, policy.label()
            assert [shape(s) for s in replayed[i]] == plain, policy.label()
            rounds += len(plain)
    assert rounds > 150


def test_panorama_is_the_drafts_own_chain(pair: LoadedPair, record: Record) -> None:
    """Every start's chain, as the panorama tells it, is what the draft proposes when asked there,
    one start at a time."""
    sampling = Sampling(temperature=1.0, seed=4)
    trajectories, panoramas = record(sampling)
    for name in pair.drafts:
        plan = prepare(parse_policy(chain(name, GAMMA_MAX)), pair.draft_names)
        for trajectory, view in list(zip(trajectories, panoramas[name], strict=True))[:2]:
            backend = TraceBackend(trajectory, view)
            text = trajectory.prompt_ids.tolist() + trajectory.output_ids.tolist()
            prompt = len(trajectory.prompt_ids)
            seed = request_seed(sampling.seed, trajectory.request_id)
            noise = Noise(seed, pair.target.vocab_size, pair.device)
            context = DraftContext(plan, sampling, noise)
            for start in range(0, len(trajectory.output_ids), 5):
                draft = LanguageModelDraft(pair.drafts[name])
                prefix = text[: prompt + start]
                draft.model.reserve(len(text) + 2 * GAMMA_MAX)
                reading = draft.begin(0, Features(pair.target, 0, 0))
                draft.catch_up(reading, prefix)
                most = min(GAMMA_MAX, TOKENS - 1 - start)  # what the budget allows
                asked = [DraftRequest(reading, prefix, most, most, context)]
                drafted = draft.propose(asked)[0].tokens if most else []
                for j, token in enumerate(drafted):
                    agree, logp, entropy = backend._codes(start, j, True)
                    before = prefix + drafted[:j]
                    on_text = [*before, token] == text[: len(before) + 1]
                    assert (agree == AGREE_YES) == on_text
                    law = log_distribution(logits_after(pair.drafts[name], before), sampling)
                    assert logp == int(-256 * float(law[token]))
                    assert entropy == int(256 * float(torch.special.entr(law.exp()).sum()))


@llama
def test_retrace_of_a_stored_text_equals_the_first_recording(
    pair: LoadedPair, record: Record
) -> None:
    """Panoramas are functions of the text: made again, by a fresh load, they are equal, bit for
    bit."""
    trajectories, panoramas = record(Sampling(temperature=1.0, seed=4))
    again = load_pair(pair.spec, device="cpu", dtype="float64")
    for name in pair.draft_names:
        assert [record_panorama(again, t, name, GAMMA_MAX) for t in trajectories] == panoramas[name]


@llama
def test_shorter_panoramas_are_prefixes(pair: LoadedPair, record: Record) -> None:
    """What a panorama of gamma_max 5 says is what one of 16 says: recording wider changes
    nothing."""
    trajectories, panoramas = record(Sampling())
    for name in pair.draft_names:
        for trajectory, wide in zip(trajectories, panoramas[name], strict=True):
            narrow = record_panorama(pair, trajectory, name, 5)
            roots = slice(narrow.positions + 1)
            for column in ("tokens", "logp", "entropy", "text_slot"):
                assert np.array_equal(
                    getattr(narrow.trie, column)[roots], getattr(wide.trie, column)[roots]
                )
            tables = [join_chains([trajectory], [p]) for p in (narrow, wide)]
            own, other = (t.branch_logp[:, :4] for t in tables)
            assert np.array_equal(own, other)


@llama
def test_rejection_is_replayed_in_law(pair: LoadedPair) -> None:
    """The rejection verifier's accepted tokens, executed, are close to what its recorded
    probabilities predict."""
    sampling = Sampling(temperature=1.0, seed=11)
    near = next(iter(pair.drafts))
    policy = parse_policy(chain(near, 4))
    decoder = Decoder(pair, StaticSource(prepare(policy, pair.draft_names)), verifier="rejection")
    executed = accepted = 0
    trajectories = []
    for i in range(24):
        prompt = PROMPTS[i % len(PROMPTS)]
        item = Request(str(i), "c", prompt)
        decoded = decoder.decode(decoder.request(item, pair.encode(prompt), sampling, TOKENS))
        trajectories.append(decoded.trajectory)
        executed += len(decoded.steps)
        accepted += sum(s.accepted for s in decoded.steps)
    views = [record_panorama(pair, t, near, 8) for t in trajectories]
    assert all(t.verifier == "rejection" for t in trajectories)
    traces = [ReplayTrace(trajectories, {near: views}, seed=seed) for seed in range(8)]
    replays = [run_replay(trace, policy).total for trace in traces]
    predicted = float(np.mean([r.emitted_tokens / r.rounds for r in replays]))
    measured = sum(len(t.output_ids) for t in trajectories) / executed
    assert accepted > 50
    assert predicted == pytest.approx(measured, rel=0.1)


@llama
def test_coupled_replays_of_a_rejection_text_differ_only_in_acceptance(
    pair: LoadedPair, record: Record
) -> None:
    """A text is a text: recorded by one verifier, it can be replayed as served by the other."""
    trajectories, _ = record(Sampling(temperature=1.0, seed=4))
    near = next(iter(pair.drafts))
    policy = parse_policy(chain(near, 4))
    others = [replace(t, verifier="rejection") for t in trajectories]
    panoramas = {near: [record_panorama(pair, t, near, GAMMA_MAX) for t in others]}
    coupled = run_replay(ReplayTrace(trajectories, panoramas), policy).total
    rejection = run_replay(ReplayTrace(others, panoramas), policy).total
    assert coupled.emitted_tokens == rejection.emitted_tokens
    assert coupled.accepted_tokens != rejection.accepted_tokens

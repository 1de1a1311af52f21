"""A policy for each prompt: documents, fitting, decoding, replay, hot reload, and what is
refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from databases import opened
from doors import Door, lines, put_profile, write_workload
from pairs import TEXT, top_k
from papers.on_the_fly import (
    acceptance_rate,
    expected_emitted,
    larger_draft_condition,
    throughput,
)
from recorded_texts import SAMPLINGS, asked, plain_texts, request_of, shape, store_of
from synthetic import flat_profile, over_rows, policy, with_terms
from test_heads import _eagle1, pair_with_heads
from test_hot_reload import publish
from test_lossless import PROMPTS
from trace_values import a_panorama, a_trajectory
from transformers import AutoModelForCausalLM

from spectune.engines.server_settings import engine_settings
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.fit.by_prompt import fit_chooser
from spectune.optimizer.fit.shared import StoredFit
from spectune.optimizer.in_force import watch
from spectune.optimizer.recording.record import PanoramaSpec, record
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.trace import open_trace
from spectune.optimizer.stored_artifacts import fitted
from spectune.optimizer.tuning.parts import split
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.perplexity import log_perplexity
from spectune.runtime.policies.artifacts import DRAFT_CHOOSER
from spectune.runtime.policies.by_prompt import prompt_key
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    Policy,
    PromptPolicy,
    differences,
    parse_policy,
)
from spectune.runtime.policies.plan import prepare
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import Request, Sampling, Step, Tokens, Workload
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Trajectory

TOKENS = 14


def by_prompt(artifact: str, candidates: Sequence[Policy]) -> Policy:
    """The policy that chooses between candidates."""
    others = [other.spelled_out() for other in candidates[1:]]
    chosen = {"artifact": artifact, "others": others}
    return parse_policy({**candidates[0].spelled_out(), "by_prompt": chosen})


# -- documents -------------------------------------------------------------------------------------


def test_the_document_round_trips() -> None:
    candidates = [policy("small", 4), policy("ngram", 2), AUTOREGRESSIVE]
    choice = by_prompt("0123456789ab", candidates)
    assert choice.candidates == tuple(candidates)
    assert [p.id for p in choice.candidates] == [p.id for p in candidates]
    again = parse_policy(json.loads(choice.model_dump_json()))
    assert again == choice
    assert again.id == choice.id != by_prompt("0123456789ac", candidates).id
    assert choice.label() == "by_prompt(small, ngram, none)"
    assert choice.artifacts == ("0123456789ab",)
    assert {row["key"] for row in differences(choice, candidates[0])} == {
        "by_prompt.artifact",
        "by_prompt.others",
    }
    with pytest.raises(PolicyError, match="export one of the policies that it chooses from"):
        engine_settings(choice, read_pair("demo"), "vllm")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([], "at least 1 item"),
        ([{"draft": "small"}], "two of the policies to choose from are the same"),
        ([{"draft": "ngram", "windw": {}}], "others.0: unknown key 'windw'; did you mean 'window'"),
        (
            [{"by_prompt": {"artifact": "ab", "others": [{"draft": "ngram"}]}}],
            "others.0: unknown key 'by_prompt'; known keys: draft, growth",
        ),
    ],
)
def test_what_is_no_choice_is_refused(others: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        parse_policy({"draft": "small", "by_prompt": {"artifact": "ab", "others": others}})


# -- fitting ---------------------------------------------------------------------------------------

KINDS = {
    "code": {"near": 0.9, "far": 0.35, "ngram": 0.1},
    "prose": {"near": 0.35, "far": 0.9, "ngram": 0.1},
    "copy": {"near": 0.6, "far": 0.6, "ngram": 0.97},
}
ADAPTIVE = [
    AUTOREGRESSIVE,
    *(
        parse_policy({"draft": draft, "window": {"kind": "analytic", "gamma_max": 8}})
        for draft in ("near", "far", "ngram")
    ),
]


def planted_trace(
    kinds: dict[str, dict[str, float]] = KINDS, n: int = 90, mute: bool = False
) -> ReplayTrace:
    """Requests of several kinds, whose prompts tell which unless they are ``mute``; each draft
    agrees independently at each position, with a chance by kind."""
    rng = np.random.default_rng(0)
    texts: list[Trajectory] = []
    views: dict[str, list[Any]] = {draft: [] for draft in next(iter(kinds.values()))}
    for i in range(n):
        number, kind = i % len(kinds), list(kinds)[i % len(kinds)]
        voice = (
            range(1, 60) if mute else [*range(1, 20), *range(60 + 40 * number, 100 + 40 * number)]
        )
        prompt = rng.choice(list(voice), int(rng.integers(20, 60))).astype(np.int32)
        text = a_trajectory(i, n=64, category=kind)
        text.tokens = Tokens(prompt, text.output_ids)
        texts.append(text)
        for draft, panoramas in views.items():
            silent = 0.5 * (1 - kinds[kind][draft]) if draft == "ngram" else 0.0
            chance = kinds[kind][draft]
            panoramas.append(a_panorama(text, draft, seed=i, agreement=chance, none=silent))
    return ReplayTrace(texts, views)


@pytest.fixture(scope="module")
def costs(pair: LoadedPair) -> LatencyProfile:
    return flat_profile(pair.id, pair.drafts)


def fit(
    pair: LoadedPair,
    store: TraceStore,
    trace: ReplayTrace,
    candidates: Sequence[Policy],
    costs: LatencyProfile,
) -> StoredFit:
    parts = split([t.category for t in trace.trajectories])
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    return fit_chooser(store, pair, trace, parts, candidates, costs, {"recording": None})


def test_it_finds_the_draft_that_the_prompt_tells(
    pair: LoadedPair, store: TraceStore, costs: LatencyProfile
) -> None:
    trace = planted_trace()
    made = fit(pair, store, trace, ADAPTIVE, costs)
    chosen = parse_policy(made.policy)
    assert isinstance(chosen, PromptPolicy)
    assert made.document["reason"].endswith(" beyond noise")
    held = made.document["held_out"]
    assert held["requests"] == 45
    assert held["oracle_gain"] > 0.3
    assert held["gain"] > 0.85 * held["oracle_gain"]
    parts = split([t.category for t in trace.trajectories])
    rest = trace.select(sorted([*parts.race, *parts.confirm]))
    replayed = run_replay(rest, chosen, costs, artifacts=fitted(store, pair.id))
    first = run_replay(rest, chosen.candidates[0], costs)
    gain = first.seconds.sum() / replayed.seconds.sum() - 1
    assert gain == pytest.approx(held["gain"])
    best = {"code": "near", "prose": "far", "copy": "ngram"}
    kinds = [trace.trajectories[r].category for r in rest.order]
    right = sum(best[kind] == p.draft for kind, p in zip(kinds, replayed.chosen, strict=True))
    assert right >= 43


def test_it_keeps_to_the_fastest_policy_where_prompts_tell_nothing(
    pair: LoadedPair, store: TraceStore, costs: LatencyProfile
) -> None:
    made = fit(pair, store, planted_trace(mute=True), ADAPTIVE, costs)
    assert made.document["held_out"]["oracle_gain"] > 0.1  # though no prompt tells of it
    assert made.document["reason"].endswith(", not beyond noise")
    chosen = parse_policy(made.policy)
    assert chosen.candidates == (chosen,)
    assert chosen.label() == next(iter(made.document["held_out"]["seconds"]))
    with pytest.raises(TraceError, match="5 requests and 4 policies are too few to tell"):
        fit(pair, store, planted_trace(n=9), ADAPTIVE, costs)
    with pytest.raises(TraceError, match="1 policies are too few"):
        fit(pair, store, planted_trace(), ADAPTIVE[:1], costs)


def test_what_equation_4_asks_for_is_chosen(
    pair: LoadedPair, store: TraceStore, costs: LatencyProfile
) -> None:
    """A draft three times as slow is taken for those prompts for which theorem 3 says so, and
    wherever equation 3 gives more throughput."""
    kinds = {
        "sure": {"near": 0.9, "far": 0.93},
        "slow": {"near": 0.2, "far": 0.95},
        "even": {"near": 0.75, "far": 0.8},
    }
    slow = with_terms(costs, {"pass/far": over_rows((1, 9), (3e-3, 3e-3))})
    trace, gamma = planted_trace(kinds), 4
    made = fit(pair, store, trace, [policy(draft, gamma) for draft in ("near", "far")], slow)
    chosen = parse_policy(made.policy)
    replayed = run_replay(trace, chosen, slow, artifacts=fitted(store, pair.id))
    draft_s, verify_s, length = {"near": 1e-3, "far": 3e-3}, 4.5e-3, 64.0
    wanted = {}
    for kind, alphas in kinds.items():
        rho = {draft: acceptance_rate(alpha, gamma) for draft, alpha in alphas.items()}
        rounds = {draft: length / expected_emitted(alpha, gamma) for draft, alpha in alphas.items()}
        speed = {
            draft: throughput(length, rounds[draft], rho[draft], draft_s[draft], verify_s)
            for draft in alphas
        }
        wanted[kind] = max(speed, key=lambda draft: speed[draft])
        saved, more = rounds["near"] - rounds["far"], (3e-3 - 1e-3) / verify_s
        if larger_draft_condition(saved, more, rho["far"] - rho["near"], length):
            assert wanted[kind] == "far"
    assert wanted == {"sure": "near", "slow": "far", "even": "near"}
    kinds_of = [t.category for t in trace.trajectories]
    right = [wanted[k] == p.draft for k, p in zip(kinds_of, replayed.chosen, strict=True)]
    assert sum(right) >= 88


def test_perplexity_is_the_models_own(pair: LoadedPair) -> None:
    paths = {"target": pair.spec.target, **dict(pair.spec.drafts)}
    for model, path in ((pair.target, paths["target"]), (pair.drafts["near"], paths["near"])):
        alone = AutoModelForCausalLM.from_pretrained(path)
        for text in (*TEXT, TEXT[0] * 14):
            ids = pair.encode(text)[:500]
            with torch.no_grad():
                logits = alone(torch.tensor([ids])).logits[0, :-1].double()
            nats = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
            assert log_perplexity(model, ids) == pytest.approx(float(nats), abs=0.5 / 256 + 1e-5)
    assert log_perplexity(pair.target, ids[:1]) == 0.0


# -- decoding, beside replay -----------------------------------------------------------------------

CHAINS = [
    policy("near", 5),
    parse_policy({"draft": "ngram", "window": {"kind": "fsm", "gamma_max": 6}}),
    AUTOREGRESSIVE,
]
TREES = [
    parse_policy(top_k("near", 3, 3, 8)),
    parse_policy(top_k("head", 2, 3, 5)),
    policy("far", 3),
]


OF_ONE_DRAFT = [policy("near", 5), policy("near", 1), policy("far", 3)]


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    """A pair with a head, in which rounding changes no text."""
    file = pair_with_heads(tmp_path_factory.mktemp("by_prompt"), head=_eagle1())
    return load_pair(read_pair(str(file)), device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def place(rich: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceStore]:
    with store_of(rich, tmp_path_factory.mktemp("place")) as store:
        yield store


def planted(
    pair: LoadedPair,
    store: TraceStore,
    candidates: Sequence[Policy],
    prompts: Sequence[Sequence[int]] = (),
) -> Policy:
    """A choice of the first candidate for prompts of up to 12 tokens, of the second for up to 20,
    and of the third for longer ones."""
    slopes = np.array([0.0, -1.0, -2.0])
    starts = np.array([0.0, np.log(12.5), np.log(12.5) + np.log(20.5)])
    weights = np.concatenate([slopes[None], np.zeros((2, 3))])
    arrays = {
        "terms": np.array([5]),
        "idf": np.ones(1),
        "weights": weights,
        "intercept": starts,
    }
    document = {
        "candidates": [p.id for p in candidates],
        "perplexities": {prompt_key(ids): log_perplexity(pair.target, ids) for ids in prompts},
    }
    artifact = store.put_artifact(
        DRAFT_CHOOSER, document, arrays, pair_id=pair.id, provenance={"test": len(prompts)}
    )
    return by_prompt(artifact, candidates)


def workload() -> Workload:
    """Prompts of a few tokens to some 30."""
    texts = [p + " and so on" * (i % 4) for i, p in enumerate(PROMPTS[:6])]
    return Workload("w", tuple(Request(f"r{i}", "ab"[i % 2], t) for i, t in enumerate(texts)))


def drafted(step: Step) -> tuple[Any, ...]:
    """What must agree of a round: all but its times, and the lag where nothing was drafted."""
    lag = step.lag * (step.draft_steps > 0)
    return (*shape(step._replace(lag=lag)), step.draft, step.policy)


@pytest.mark.parametrize(
    "candidates", [CHAINS, TREES, OF_ONE_DRAFT], ids=["chains", "trees", "of one draft"]
)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature}")
def test_texts_stay_and_rounds_are_the_replays(
    rich: LoadedPair, place: TraceStore, sampling: Sampling, candidates: list[Policy]
) -> None:
    """The target reads every prompt once, its perplexity included."""
    options = DecodeOptions(sampling, TOKENS)
    plain = StaticSource(prepare(AUTOREGRESSIVE, rich.draft_names))
    look = PanoramaSpec(("near", "far", "head", "ngram"), 6, 3, 3)
    info = record(place, rich, workload(), options, look, plain)
    texts = place.load(info.id, ()).trajectories
    choice = planted(rich, place, candidates, [t.prompt_ids.tolist() for t in texts])
    find, profile = fitted(place, rich.id), flat_profile(rich.id, rich.drafts, rich.heads)
    trace = open_trace(place, info.id, [choice]).trace
    replayed = run_replay(trace, choice, profile, per_round=True, artifacts=find)
    assert {policy.id for policy in replayed.chosen} == {policy.id for policy in candidates}
    reads: list[int] = []
    read = rich.target.read

    def counted(ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        reads.append(len(ids))
        return read(ids, *rest, **more)

    decoder = Decoder(rich, StaticSource(prepare_for(rich, choice, artifacts=find)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rich.target, "read", counted)
        done = [decoder.decode(request_of(decoder, text)) for text in texts]
    assert reads == [len(t.prompt_ids) - 1 for t in texts]
    for n, (text, run, steps) in enumerate(zip(texts, done, replayed.steps(), strict=True)):
        assert run.trajectory.output_ids.tolist() == text.output_ids.tolist()
        assert [drafted(s) for s in run.steps] == [drafted(s) for s in steps]
        decoded_by = {s.policy for s in (*run.steps, *steps)}
        assert decoded_by == {replayed.chosen[n].id}
        assert [plan.policy for _, plan in run.plans] == [choice]
        alone = run_replay(trace.select([n]), replayed.chosen[n], profile)
        assert replayed.seconds[n] == alone.seconds[0]


def test_another_recordings_prompts_are_not_known(rich: LoadedPair, place: TraceStore) -> None:
    trace = planted_trace({"x": {"near": 0.5, "ngram": 0.5}}, n=3)
    choice = planted(rich, place, CHAINS)
    with pytest.raises(TraceError, match="fitted to another recording: `fit chooser"):
        run_replay(trace, choice, artifacts=fitted(place, rich.id))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature}")
def test_publications_take_effect_between_two_rounds(
    rich: LoadedPair, place: TraceStore, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a choice to a plain policy at once; to a choice with the next request, so that the
    target reads no prompt twice. Acknowledged, and refused with a reason."""
    plain, other = policy("near", 2), policy("far", 2)
    prompt = "def add(a, b): and so on"
    (expected,) = plain_texts(rich, {"r": prompt}, sampling, 30)
    chains, trees = (planted(rich, place, each) for each in (CHAINS, TREES))
    first = publish(place, rich, plain)
    order, used, versions = [chains, other, trees, chains, plain, chains], [], []
    read, reads = rich.target.read, list[int]()

    def counted(ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        reads.append(len(ids))
        return read(ids, *rest, **more)

    monkeypatch.setattr(rich.target, "read", counted)
    with watch(place, rich, None, sampling=sampling, interval_s=600, node="here:1") as following:
        decoder = Decoder(rich, following)
        for _ in range(3):
            tokens, drafted_by = list[int](), list[str]()
            request = asked(decoder, prompt, sampling, 30)
            for n, item in enumerate(decoder.rounds(request)):
                tokens += item.tokens
                drafted_by.append(item.step.policy)
                if n in (1, 3, 5) and order:
                    versions.append(publish(place, rich, order.pop(0)))
                    assert following.poll()
            assert tokens == expected.output_ids.tolist()
            used.append([drafted_by[:4], drafted_by[4:]])
        assert [[set(part) for part in parts] for parts in used] == [
            [{plain.id}, {other.id}],
            [{TREES[1].id}, {plain.id}],
            [{CHAINS[1].id}, {CHAINS[1].id}],
        ]
        assert not order
        assert reads == [len(request.prompt_ids) - 1] * 3
        bad = planted(rich, place, [plain, policy("gone", 2), AUTOREGRESSIVE])
        refused = publish(place, rich, bad)
        assert not following.poll()
        assert following.current().policy == chains
    said = {a.version: (a.status, a.reason) for a in place.acknowledgements() if a.version >= first}
    assert [said[v][0] for v in versions] == ["applied"] * 6
    assert said[refused][0] == "refused"
    assert "draft: this pair has no draft 'gone'" in said[refused][1]


def test_what_cannot_run_is_refused(rich: LoadedPair, place: TraceStore) -> None:
    """A choice fitted to other policies, and under the rejection verifier one with a tree, before
    its first token."""
    find, trees = fitted(place, rich.id), planted(rich, place, TREES)
    other = by_prompt(trees.artifacts[0], CHAINS)
    with pytest.raises(PolicyError, match="fitted to choose between other policies"):
        prepare(other, rich.draft_names, artifacts=find)
    decoder = Decoder(rich, StaticSource(prepare_for(rich, trees, artifacts=find)), "rejection")
    with pytest.raises(PolicyError, match="the rejection verifier is for chains"):
        decoder.rounds(asked(decoder, "def add(a, b):", Sampling(1.0), 30))


# -- by command ------------------------------------------------------------------------------------


PLAIN = '{"draft": "none", "window": {"kind": "fixed", "gamma": 0}}'


def what(pair: Path, workload: Path, tokens: int = 12) -> tuple[object, ...]:
    return ("--pair", pair, "--workload", workload, "--max-new-tokens", tokens)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Door:
    """A database with a recording and a profile."""
    folder = tmp_path_factory.mktemp("commands")
    door = Door(str(folder / "spectune.db"), str(tiny_pair))
    prompts = ("def add(a, b):", "The quick brown fox and the dog", "x")
    workload = write_workload(folder / "w.jsonl", 20, prompts)
    door.json("record", *what(tiny_pair, workload), "--gamma-max", 6)
    put_profile(door.db, tiny_pair)
    return door


def test_fit_simulate_run_and_publish(door: Door, tiny_pair: Path, tmp_path: Path) -> None:
    made = door.json("fit", "chooser", "--pair", tiny_pair)
    candidates = [parse_policy(document) for document in made["policies"]]
    assert len({p.draft for p in candidates}) == len(candidates) == 3
    assert made["kind"] == DRAFT_CHOOSER
    choice = by_prompt(made["artifact"], candidates)
    expected = choice if made["chooses"] else candidates[0]
    assert made["policy"] == expected.spelled_out()
    assert made["held_out"]["requests"] == 10
    file = tmp_path / "choice.json"
    file.write_text(choice.model_dump_json())
    simulated = door.json("simulate", "--policy", file, "--per-round", tmp_path / "s.jsonl")
    assert simulated["policy"] == choice.spelled_out()
    assert sum(simulated["picks"].values()) == simulated["requests"] == 20
    where = what(tiny_pair, Path(door.db).parent / "w.jsonl")
    outputs = ("--per-round", tmp_path / "r.jsonl", "--outputs", tmp_path / "o.jsonl")
    ran = door.json("run", "--policy", file, *where, *outputs)
    assert lines(tmp_path / "r.jsonl") == lines(tmp_path / "s.jsonl")
    assert ran["policy_id"] == simulated["policy_id"]
    door.json("run", "--policy", "autoregressive", *where, "--outputs", tmp_path / "a.jsonl")
    assert lines(tmp_path / "o.jsonl") == lines(tmp_path / "a.jsonl")
    published = door.json("policies", "activate", file, "--pair", tiny_pair)
    assert published["policy"] == simulated["policy_id"]
    assert door.json("run", *where, "--no-store")["policy"] == choice.spelled_out()
    with opened(door.db) as store:
        assert [a.status for a in store.acknowledgements()] == ["applied"]
        for candidate in candidates:  # rounds name them
            assert store.get_policy(candidate.id).label == candidate.label()
    shown = door.call("fit", "chooser", "--pair", tiny_pair)
    assert shown.exit_code == 0
    words = " ".join(shown.output.replace("│", " ").split())
    assert "that it was not fitted to, choosing gains" in words


def test_commands_refuse_in_one_line(door: Door, tiny_pair: Path, tmp_path: Path) -> None:
    few = what(tiny_pair, write_workload(tmp_path / "w.jsonl", 2, ("zz",)), 4)
    near, empty = ("--policy", '{"draft": "near"}'), Door(str(tmp_path / "empty.db"))
    empty.json("record", *few)
    other = by_prompt("0123456789ab", [policy("near", 1), AUTOREGRESSIVE]).model_dump_json()
    for at, arguments, says in (
        (door, ("fit", "chooser", *near, *near), "give different policies without by_prompt"),
        (door, ("fit", "chooser", "--policy", other), "without by_prompt"),
        (
            door,
            ("fit", "chooser", "--policy", '{"draft": "gone"}'),
            "has no draft 'gone'; it has: far, near, ngram",
        ),
        (door, ("fit", "chooser", *near, "--recording", "nothing"), "nothing"),
        (empty, ("fit", "chooser", *near), "no latency profile"),
        (
            door,
            ("policies", "activate", other),
            "by_prompt.artifact: there is no artifact '0123456789ab'",
        ),
    ):
        assert says in at.error(*arguments, "--pair", tiny_pair)

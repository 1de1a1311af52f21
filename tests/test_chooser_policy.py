"""A draft for each prompt as a policy: documents, fitting, decoding, replay, hot reload, and what
is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from databases import opened
from doors import Door, lines, put_profile, write_workload
from oracle import replay_rounds
from pairs import top_k
from recorded_texts import SAMPLINGS, asked, plain_texts, request_of, shape, store_of
from synthetic import flat_profile
from test_draft_choice import CANDIDATES, PROFILE, chain, planted_trace
from test_heads import _eagle1, pair_with_heads
from test_hot_reload import publish
from test_lossless import PROMPTS
from test_store import damage

from spectune.db.models import StudyRow
from spectune.engines.export import engine_settings
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions, Executor, encode
from spectune.optimizer.fit.chooser_fits import ChooserSource, fit_chooser_artifact, keep_chooser
from spectune.optimizer.fit.on_the_fly import (
    Measured,
    evaluate,
    fit_chooser,
    fit_features,
    read_prompts,
)
from spectune.optimizer.parts import split
from spectune.optimizer.record import Look, record
from spectune.optimizer.serving import watch
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import DRAFT_CHOOSER, Fitted
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    ChooserPolicy,
    Policy,
    differences,
    parse_policy,
)
from spectune.runtime.policies.draft_choice import Chooser
from spectune.runtime.policies.plan import Plan
from spectune.runtime.policies.prepare import prepare
from spectune.runtime.policies.prompt_features import Prompt
from spectune.runtime.prompts import prompt_reader
from spectune.traces.errors import PolicyError
from spectune.traces.schema import LatencyProfile, Request, Sampling, Step, Workload
from spectune.traces.store import TraceStore

TOKENS = 14

STOP = {"kind": "max_prob", "threshold": 0.05}
CHAINS = {
    "none": AUTOREGRESSIVE,
    "ngram": chain("ngram", {"kind": "fsm", "gamma_max": 6}),
    "near": chain("near", {"kind": "analytic", "gamma_max": 6}),
    "far": parse_policy({"draft": "far", "window": {"kind": "fixed", "gamma": 5}, "stop": STOP}),
}
TREES = {
    "near": parse_policy(top_k("near", 3, 3, 8)),
    "head": parse_policy(top_k("head", 2, 3, 5)),
}
OLS = {"draft": {"kind": "ols", "artifact": "0123456789ab"}}


# -- documents -------------------------------------------------------------------------------------


def test_the_document_round_trips() -> None:
    """It is its own spelled out form; id, label and differences know it, and no plain policy equals
    it."""
    policy = parse_policy(OLS)
    assert isinstance(policy, ChooserPolicy)
    assert policy.spelled_out() == OLS
    again = parse_policy(json.loads(policy.to_text()))
    assert again == policy
    assert again.id == policy.id != ChooserPolicy.of("0123456789ac").id
    assert policy.label() == "ols(0123456789ab)"
    assert policy.artifacts == ("0123456789ab",)
    assert not isinstance(policy, Policy)
    assert policy.id == "c688012f8cb6"  # stored and published under it
    differing = {r["key"] for r in differences(policy, chain("near"))}
    assert differing >= {"draft", "draft.kind", "window.kind"}
    with pytest.raises(PolicyError, match="export one of the candidates"):
        engine_settings(policy, read_pair("demo"), "vllm")


# -- a pair with everything, its recordings, and planted choosers ----------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    file = pair_with_heads(tmp_path_factory.mktemp("chooser"), head=_eagle1())
    return load_pair(read_pair(str(file)), device="cpu")


@pytest.fixture(scope="module")
def profile(pair: LoadedPair) -> LatencyProfile:
    return flat_profile(pair.id, pair.drafts, pair.heads)


@pytest.fixture(scope="module")
def place(pair: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceStore]:
    with store_of(pair, tmp_path_factory.mktemp("place")) as store:
        yield store


def workload() -> Workload:
    """Prompts of a few tokens to some 30."""
    texts = [p + " and so on" * (i % 4) for i, p in enumerate(PROMPTS[:6])]
    return Workload("w", tuple(Request(f"r{i}", "ab"[i % 2], (t,)) for i, t in enumerate(texts)))


@pytest.fixture(scope="module", params=SAMPLINGS, ids=lambda s: f"T{s.temperature}")
def source(request: pytest.FixtureRequest, pair: LoadedPair, place: TraceStore) -> ChooserSource:
    """A recording with chains, as a chooser is fitted to it."""
    plain, options = prepare(AUTOREGRESSIVE, pair.draft_names), DecodeOptions(request.param, TOKENS)
    drafts = ("near", "far", "ngram")
    info = record(place, pair, workload(), options, Look(drafts, 6), StaticSource(plain))
    loaded = place.load(info.id)
    trace = ReplayTrace(loaded.trajectories, {d: loaded.panoramas(d) for d in drafts})
    return ChooserSource(trace, read_prompts(pair, trace.trajectories), {"recording": info.id})


SOME = [Prompt("x" * n, n, 2.0) for n in (3, 10, 40)]


def planted(
    pair: LoadedPair, prompts: Any, candidates: Mapping[str, Policy], **fields: Any
) -> Chooser:
    """A chooser that takes each draft for some length of prompts: with accuracies that rise, fall,
    or lie in between."""
    features = fit_features(prompts, reader=prompt_reader(pair))
    slopes = {"near": 0.45, "far": -0.45, "head": -0.45}
    weights = {
        draft: np.array([0.5, slopes.get(draft, 0.0), 0.0])
        for draft in candidates.keys() - {"none"}
    }
    return Chooser(features, weights, dict(candidates), **fields)


def decoded(
    pair: LoadedPair, ready: Plan, source: ChooserSource
) -> list[tuple[list[int], tuple[Step, ...]]]:
    decoder = Decoder(pair, StaticSource(ready))
    found = [decoder.decode(request_of(decoder, t)) for t in source.trace.trajectories]
    return [(done.trajectory.output_ids.tolist(), done.steps) for done in found]


def drafted(step: Step) -> tuple[Any, ...]:
    """What must agree of a round: all but its times, and the lag where nothing was drafted."""
    lag = step.lag * (step.draft_steps > 0)
    return (*shape(step._replace(lag=lag)), step.draft, step.policy)


# -- decoding and replay ---------------------------------------------------------------------------


def test_chains_change_no_text_and_replay_round_by_round(
    pair: LoadedPair, place: TraceStore, profile: LatencyProfile, source: ChooserSource
) -> None:
    """Texts are autoregression's; the replay, the plain loop over the trace, and the runtime choose
    alike and do the same rounds."""
    chooser, find = planted(pair, source.prompts, CHAINS), fitted(place, pair.id)
    policy = ChooserPolicy.of(keep_chooser(place, pair, source, chooser).artifact)
    ready = prepare_for(pair, policy, profile=profile, artifacts=find)
    done = decoded(pair, ready, source)
    replayed = run_replay(source.trace, policy, profile, per_round=True, artifacts=find)
    texts, loaded = source.trace.trajectories, place.load(source.about["recording"])
    for n, (t, (tokens, steps), imagined) in enumerate(
        zip(texts, done, replayed.steps(), strict=True)
    ):
        assert tokens == t.output_ids.tolist()
        assert [drafted(s) for s in steps] == [drafted(s) for s in imagined]
        (draft,) = {s.draft for s in steps}
        assert {s.policy for s in steps} == {CHAINS[draft].id}
        view = None if draft == "none" else loaded.panoramas(draft)[n]
        oracle = replay_rounds(t, view, ready)
        assert [shape(r.step)[:4] for r in oracle] == [shape(s)[:4] for s in steps]
    assert len({steps[0].draft for _, steps in done}) >= 2
    assert replayed.rounds is not None
    assert len(replayed.rounds) == sum(len(steps) for _, steps in done)
    assert replayed.outcome().total == replayed.total


def test_choosing_is_charged_unless_the_reader_drafts(
    pair: LoadedPair, place: TraceStore, profile: LatencyProfile, source: ChooserSource
) -> None:
    reader = prompt_reader(pair)
    kept = keep_chooser(place, pair, source, planted(pair, source.prompts, CHAINS))
    find = fitted(place, pair.id)
    replayed = run_replay(source.trace, ChooserPolicy.of(kept.artifact), profile, artifacts=find)
    assert {True, False} == {draft == reader for draft in replayed.chosen}
    for i, draft in enumerate(replayed.chosen):
        alone = run_replay(source.trace.select([i]), CHAINS[draft], profile)
        tokens = int(source.trace.prompts[i])
        charge = profile.prefill_seconds(reader, tokens) if draft != reader else 0.0
        assert replayed.seconds[i] == pytest.approx(alone.seconds[0] + charge)
        assert replayed.counts[i].tolist() == alone.counts[0].tolist()


def race(
    pair: LoadedPair, profile: LatencyProfile, sampling: Sampling, candidates: Any, **features: Any
) -> tuple[Chooser, set[str]]:
    """A planted chooser of these candidates, which must write autoregression's texts; and the
    policies that drafted for it."""
    encoded = encode(pair, workload(), DecodeOptions(sampling, TOKENS))
    prompts = [Prompt(pair.text(r.prompt_ids), len(r.prompt_ids), 2.0) for _, r in encoded.items]
    chooser = planted(pair, prompts, candidates)
    chooser = replace(chooser, features=replace(chooser.features, **features))
    policies, held = [AUTOREGRESSIVE, parse_policy(OLS)], memory(chooser)
    done = Executor(pair, policies, encoded, profile=profile, artifacts=held).race(passes=1)
    assert done.texts_differ == 0
    ready = prepare_for(pair, policies[1], profile=profile, artifacts=held)
    rounds = [r for _, q in encoded.items for r in Decoder(pair, StaticSource(ready)).rounds(q)]
    return chooser, {r.step.policy for r in rounds if r.step.drafted}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature}")
def test_trees_and_heads_change_no_text(
    pair: LoadedPair, profile: LatencyProfile, sampling: Sampling
) -> None:
    """Both candidates decode, after a prompt that another draft, or the one chosen, has read; a
    head beside a reader that is not chosen."""
    _, used = race(pair, profile, sampling, TREES)
    assert used == {p.id for p in TREES.values()}


def memory(chooser: Chooser, **changes: Any) -> Any:
    """Artifacts that hold one chooser."""
    document, arrays = chooser.to_document()
    return lambda name: Fitted(DRAFT_CHOOSER, document | changes, arrays)


def test_the_target_reads_where_no_draft_can(pair: LoadedPair, profile: LatencyProfile) -> None:
    """It then reads twice, which is charged; the text is the same."""
    chooser, _ = race(pair, profile, Sampling(), CHAINS, reader="target")
    assert chooser.reading_seconds(profile, [9], ["near"])[0] == profile.prefill_seconds(None, 9)


def test_a_chooser_that_does_not_choose_is_its_single_draft(
    pair: LoadedPair, place: TraceStore, profile: LatencyProfile, source: ChooserSource
) -> None:
    """Nothing is read or charged, no profile is needed, and any recording can be replayed."""
    chooser = planted(pair, source.prompts, CHAINS, single="far", chooses=False, reason="noise")
    policy = ChooserPolicy.of(keep_chooser(place, pair, source, chooser).artifact)
    find = fitted(place, pair.id)
    replayed = run_replay(source.trace, policy, profile, artifacts=find)
    alone = run_replay(source.trace, CHAINS["far"], profile)
    np.testing.assert_array_equal(replayed.seconds, alone.seconds)
    t = source.trace.trajectories[0]
    view = place.load(source.about["recording"], ["far"]).panoramas("far")[0]
    other = ReplayTrace([replace(t, prompt_ids=t.prompt_ids + 1)], {"far": [view]})
    replayed = run_replay(other, policy, profile, artifacts=find)
    alone = run_replay(other, CHAINS["far"], profile)
    np.testing.assert_array_equal(replayed.seconds, alone.seconds)
    ready = prepare_for(pair, policy, artifacts=find)
    assert [p.policy for p in ready.candidates] == [CHAINS["far"]]
    done = decoded(pair, ready, source)
    for t, (tokens, steps) in zip(source.trace.trajectories, done, strict=True):
        assert tokens == t.output_ids.tolist()
        assert {s.policy for s in steps} == {CHAINS["far"].id}


# -- hot reload ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature}")
def test_publications_take_effect_between_two_rounds(
    pair: LoadedPair, place: TraceStore, profile: LatencyProfile, sampling: Sampling
) -> None:
    """To a chooser in the middle of a request, which chooses for its prompt, and from one;
    acknowledged, and refused with a reason."""
    place.put_profile(profile)
    plain = chain("near", {"kind": "fixed", "gamma": 2})
    prompt = "def add(a, b): and so on"
    (wanted,) = plain_texts(pair, {"r": prompt}, sampling, 30)

    def stored(chooser: Chooser, **changes: int) -> ChooserPolicy:
        document, arrays = chooser.to_document()
        kept = document | changes, arrays
        return ChooserPolicy.of(
            place.put_artifact(DRAFT_CHOOSER, *kept, pair_id=pair.id, provenance={})
        )

    chains, trees = (stored(planted(pair, SOME, of)) for of in (CHAINS, TREES))

    first = publish(place, pair, plain)
    with watch(
        place, pair, None, profile, sampling=sampling, interval_s=600, node="here:1"
    ) as following:
        decoder, order = Decoder(pair, following), [chains, plain, trees, chains]
        tokens, used, versions = [], [], []
        for n, item in enumerate(decoder.rounds(asked(decoder, prompt, sampling, 30))):
            tokens += item.tokens
            used.append(item.step.policy)
            if n % 2 == 1 and order:
                versions.append(publish(place, pair, order.pop(0)))
                assert following.poll()
        assert tokens == wanted.output_ids.tolist()
        assert not order
        of_chains, of_trees = ({p.id for p in of.values()} for of in (CHAINS, TREES))
        assert set(used[:2]) == {plain.id} == set(used[4:6])
        assert len(set(used[2:4])) == len(set(used[6:8])) == 1
        assert used[2] in of_chains
        assert used[6] in of_trees
        assert following.current().policy == chains
        bad = stored(planted(pair, SOME, CHAINS | {"gone": chain("gone")}), seed=sampling.seed)
        refused = publish(place, pair, bad)
        assert not following.poll()
        assert following.current().policy == chains
    said = {a.version: (a.status, a.reason) for a in place.acknowledgements() if a.version >= first}
    assert [said[v][0] for v in versions] == ["applied"] * 4
    assert said[refused][0] == "refused"
    assert "candidate 'gone': draft: this pair has no draft 'gone'" in said[refused][1]


def test_a_lossy_candidate_is_refused(
    pair: LoadedPair, place: TraceStore, profile: LatencyProfile
) -> None:
    """Under the rejection verifier, by a decoder before its first token."""
    chooser = planted(pair, SOME, TREES)
    ready = prepare_for(pair, parse_policy(OLS), profile=profile, artifacts=memory(chooser))
    decoder = Decoder(pair, StaticSource(ready), "rejection")
    with pytest.raises(PolicyError, match="the rejection verifier is for chains"):
        decoder.rounds(asked(decoder, "def add(a, b):", Sampling(1.0), 30))


# -- what cannot be prepared -----------------------------------------------------------------------


def test_what_cannot_be_prepared_is_refused_in_one_line(
    pair: LoadedPair, profile: LatencyProfile
) -> None:
    chooser = planted(pair, SOME, CHAINS)
    document, _ = chooser.to_document()
    nested = document["candidates"] | {"far": OLS}
    artifact = {"draft": "far", "window": {"kind": "q_learning", "artifact": "ab"}}
    needs = document["candidates"] | {"far": artifact}
    reader = replace(chooser, features=replace(chooser.features, reader="gone"))
    for artifacts, costs, says in (
        (
            memory(chooser, candidates=nested),
            profile,
            "draft 'far': its policy chooses drafts itself",
        ),
        (
            memory(chooser, candidates=needs),
            profile,
            "candidate 'far': window.artifact: artifact ab is a draft_chooser, not a q_table",
        ),
        (memory(reader), profile, "reads prompts with draft 'gone', which this pair lacks"),
        (memory(chooser), None, "draft.ols weighs drafts by measured costs: run `profile`"),
        (
            memory(chooser, chooses=False, single="medium"),
            profile,
            "it keeps to draft 'medium', which is none of its candidates",
        ),
        (
            memory(chooser, recorded=[{"prompt": "0"}]),
            profile,
            "1 recorded prompts and predictions of shape (0, 4)",
        ),
    ):
        with pytest.raises(PolicyError, match=re.escape(says)):
            prepare(parse_policy(OLS), pair.draft_names, profile=costs, artifacts=artifacts)


# -- the guard -------------------------------------------------------------------------------------


def test_the_guard_does_not_choose_where_prompts_tell_nothing() -> None:
    """By cross-validation on the requests fitted to: prompts that all read alike, or are few."""
    mute = fit_chooser(*planted_trace(mute=True), CANDIDATES, PROFILE, reader="near")
    assert not mute.chooses
    assert mute.reason.endswith("not beyond noise")
    assert mute.reader is None
    held = mute.metrics["held_out"]
    assert max(held["r2"].values()) < 0.2
    assert held["gain"]["oracle"] > 0.1  # though no prompt tells of it
    assert held["share"]["throughput"] < 0.35
    assert held["tokens_per_s"]["guarded"] == held["tokens_per_s"][mute.single]
    assert held["picks"]["guarded"] == {d: 45 * (d == mute.single) for d in CANDIDATES}
    few = fit_chooser(*planted_trace(9), CANDIDATES, PROFILE, reader="near")
    assert not few.chooses
    assert "5 requests are too few" in few.reason
    document, arrays = mute.to_document()
    again = Chooser.from_document(json.loads(json.dumps(document, allow_nan=False)), arrays)
    assert (again.chooses, again.single, again.reason) == (False, mute.single, mute.reason)


def test_any_candidate_is_weighed_by_what_its_levels_accept(
    pair: LoadedPair, place: TraceStore, profile: LatencyProfile
) -> None:
    """A tree candidate's accuracy is equation 2 over its replayed rounds; by default the candidates
    are the fastest of each draft, heads included."""
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    look = Look(("near", "head", "ngram"), 6, 3, 3)
    info = record(
        place, pair, workload(), DecodeOptions(Sampling(), TOKENS), look, plain, fresh=True
    )
    candidates = {"ngram": CHAINS["ngram"], "near": TREES["near"]}
    costs = place.put_profile(profile)
    made = fit_chooser_artifact(place, info.id, pair, candidates, profile=costs)
    loaded = place.load(info.id, ["near", "ngram"], trees=True)
    trees = {"near": loaded.trees("near")}
    trace = ReplayTrace(
        loaded.trajectories, {d: loaded.panoramas(d) for d in ("near", "ngram")}, trees=trees
    )
    measured = Measured.of(trace, candidates, profile)
    steps = run_replay(trace, TREES["near"], profile, per_round=True).steps()
    for alpha, rounds in zip(measured.alphas[:, 1], steps, strict=True):
        accepted = sum(s.accepted for s in rounds)
        rejected = sum(s.accepted < s.depth and s.emitted > s.accepted for s in rounds)
        assert alpha == pytest.approx(accepted / max(1, accepted + rejected))
    chooser = Chooser.from_document(made.document, place.get_artifact(made.artifact).arrays)
    told = evaluate(chooser, measured, read_prompts(pair, trace.trajectories), profile)
    assert told["tokens_per_s"]["near"] > 0
    assert not made.document["chooses"]
    study: dict[str, Any] = {"sampler": "none", "seed": 0, "document": {}}
    trials = [{"policy": {"draft": "near", "unknown": 1}, "value": 2.0}]
    for _ in range(2):  # what cannot be read, and what is damaged, is passed over
        name = place.put_study(pair.id, **study, trials=trials, recording_id=info.id)
    damage(place, StudyRow, name)
    best = fit_chooser_artifact(place, info.id, pair).document["candidates"]
    assert set(best) == {"none", "near", "head", "ngram"}
    fixed = [chain("near", {"kind": "fixed", "gamma": g}) for g in (1, 2, 4)]
    seen = trace.select(split([t.category for t in trace.trajectories]).search)
    seconds, *others = (
        run_replay(seen, p, profile).seconds.sum() for p in (parse_policy(best["near"]), *fixed)
    )
    assert seconds <= min(others)
    assert place.get_policy(TREES["near"].id).label == TREES["near"].label()


# -- by command ------------------------------------------------------------------------------------


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
    assert set(made["candidates"]) == {"none", "near", "far", "ngram"}
    assert made["kind"] == DRAFT_CHOOSER
    assert isinstance(made["chooses"], bool)
    assert made["reason"]
    speeds = made["metrics"]["held_out"]["tokens_per_s"]
    assert {"oracle", "throughput", "theorem_3", "guarded"} <= speeds.keys()
    assert len(made["recorded"]) == 20
    file = tmp_path / "ols.json"
    file.write_text(json.dumps(made["policy"]))
    simulated = door.json("simulate", "--policy", file, "--per-round", tmp_path / "s.jsonl")
    assert simulated["policy"] == made["policy"]
    assert sum(simulated["picks"].values()) == simulated["requests"] == 20
    assert simulated["picks"].keys() <= made["candidates"].keys()
    where = what(tiny_pair, Path(door.db).parent / "w.jsonl")
    outputs = ("--per-round", tmp_path / "r.jsonl", "--outputs", tmp_path / "o.jsonl")
    ran = door.json("run", "--policy", file, *where, *outputs)
    assert lines(tmp_path / "r.jsonl") == lines(tmp_path / "s.jsonl")
    assert ran["policy_id"] == simulated["policy_id"]
    assert ran["rounds"] == simulated["rounds"]
    door.json("run", "--policy", "autoregressive", *where, "--outputs", tmp_path / "a.jsonl")
    assert lines(tmp_path / "o.jsonl") == lines(tmp_path / "a.jsonl")
    published = door.json("policies", "activate", file, "--pair", tiny_pair)
    assert published["policy"] == simulated["policy_id"]
    assert door.json("run", *where, "--no-store")["policy"] == made["policy"]
    with opened(door.db) as store:
        assert [a.status for a in store.acknowledgements()] == ["applied"]
    shown = door.call("fit", "chooser", "--pair", tiny_pair, "--rule", "theorem_3")
    assert shown.exit_code == 0
    assert "over" in shown.output
    assert "oracle" in shown.output


def test_commands_refuse_in_one_line(door: Door, tiny_pair: Path, tmp_path: Path) -> None:
    few = what(tiny_pair, write_workload(tmp_path / "w.jsonl", 2, ("zz",)), 4)
    near, empty = ("--policies", '{"draft": "near"}'), Door(str(tmp_path / "empty.db"))
    empty.json("record", *few)
    for at, arguments, says in (
        (door, ("fit", "chooser", *near, *near), "two policies of one draft"),
        (
            door,
            ("fit", "chooser", "--policies", '{"draft": "gone"}'),
            "this pair has no draft 'gone'; it has: far, near, ngram",
        ),
        (door, ("fit", "chooser", *near, "--recording", "nothing"), "nothing"),
        (empty, ("fit", "chooser", *near), "no latency profile"),
        (
            door,
            ("policies", "activate", json.dumps(OLS)),
            "draft.artifact: there is no artifact '0123456789ab'",
        ),
    ):
        assert says in at.error(*arguments, "--pair", tiny_pair)

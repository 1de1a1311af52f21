"""The verifier ``rejection`` beside ``coupled``: predicted as it decodes, and executed apart."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from doors import Door, one_object, put_profile, write_workload
from recorded_texts import plain_texts
from synthetic import flat_profile, policy
from test_report import FASTER
from test_verifiers import logits_after

from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.report.words import rejection_in_words
from spectune.optimizer.tuning.native import PairBench, TuneOptions
from spectune.optimizer.tuning.native_bench import NativeBench
from spectune.optimizer.tuning.parts import Parts
from spectune.optimizer.tuning.rejection import (
    DRAWS,
    best_chain,
    rejection_benches,
    rejection_chain,
)
from spectune.optimizer.tuning.tuned import RejectionChain, RejectionNotTried, Tuned
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.progress import silent
from spectune.runtime.recording.panoramas import record_panorama
from spectune.runtime.sampling import log_distribution
from spectune.traces.schema import Sampling, Tokens, Verifier
from spectune.traces.store import TraceStore
from spectune.traces.tables import Trajectory

PAIR_OF_TOKENS = Sampling(temperature=1.0, top_k=2)
"""A law under which texts can be counted out."""
LENGTH, GAMMA = 4, 3
COPIES = 32
PROMPTS = {str(i): text for i, text in enumerate(("def add(a, b):", "The quick", "x", "0 1"))}
Text = tuple[int, ...]


def bench_of(pair: LoadedPair, texts: list[Trajectory]) -> NativeBench:
    """All texts are searched and confirmed on."""
    panoramas = {d: [record_panorama(pair, t, d, 4) for t in texts] for d in pair.chain_drafts}
    everything = list(range(len(texts)))
    parts = Parts([], everything, [], everything)
    return NativeBench(pair, ReplayTrace(texts, panoramas), parts, flat_profile("", pair.drafts))


@pytest.fixture(scope="module")
def bench(llama_pair: LoadedPair) -> NativeBench:
    return bench_of(llama_pair, plain_texts(llama_pair, PROMPTS, Sampling(1.0, seed=3), 12))


class Process:
    """The rejection verifier counted out by its definition, over every text that has a chance."""

    def __init__(self, pair: LoadedPair, prompt: list[int], draft: str) -> None:
        self.pair, self.prompt, self.draft = pair, prompt, pair.drafts[draft]
        self.law = cache(self._law)

    def _law(self, text: Text, *, of_draft: bool = False) -> dict[int, float]:
        model = self.draft if of_draft else self.pair.target
        logits = logits_after(model, [*self.prompt, *text])
        chances = log_distribution(logits[None], PAIR_OF_TOKENS)[0].double().exp()
        return {i: float(chances[i]) for i in chances.nonzero()[:, 0].tolist()}

    def is_done(self, text: Text) -> bool:
        return len(text) == LENGTH or text[-1:] == (0,)

    def texts(self, text: Text = (), chance: float = 1.0) -> Iterator[tuple[Text, float]]:
        """Every text and its chance."""
        if self.is_done(text):
            yield text, chance
            return
        for token, p in self.law(text).items():
            yield from self.texts((*text, token), chance * p)

    def rounds(self, text: Text = ()) -> float:
        """Rounds to be expected from here on."""
        if self.is_done(text):
            return 0.0
        return 1.0 + self._within(text, min(GAMMA, LENGTH - len(text) - 1))

    def _within(self, text: Text, left: int) -> float:
        """Rounds to be expected after the one whose proposals are kept so far, of which ``left``
        are to be judged."""
        if self.is_done(text):
            return 0.0
        p = self.law(text)
        if not left:
            return sum(chance * self.rounds((*text, token)) for token, chance in p.items())
        q, total = self.law(text, of_draft=True), 0.0
        for token, chance in p.items():
            kept = min(chance, q.get(token, 0.0))
            total += kept * self._within((*text, token), left - 1)
            total += (chance - kept) * self.rounds((*text, token))
        return total


def test_rounds_replayed_on_coupled_texts_are_those_that_rejection_takes(
    llama_pair: LoadedPair,
) -> None:
    """In expectation: over every text by its chance, and over draws."""
    prompt = llama_pair.encode("def add(a")
    processes = {draft: Process(llama_pair, prompt, draft) for draft in llama_pair.drafts}
    texts, chances = zip(*processes["near"].texts(), strict=True)
    assert sum(chances) == pytest.approx(1.0)
    ids = [Tokens(np.array(prompt, np.int32), np.array(text, np.int32)) for text in texts]
    made = [Trajectory("", "", each, PAIR_OF_TOKENS, LENGTH, "length") for each in ids]
    # A request's draws follow from its id.
    copies = [(f"{n} {i}", n) for i in range(COPIES) for n in range(len(texts))]
    trace = ReplayTrace(
        [replace(made[n], request_id=name) for name, n in copies],
        {
            draft: [panoramas[n] for _, n in copies]
            for draft in llama_pair.chain_drafts
            for panoramas in [[record_panorama(llama_pair, text, draft, GAMMA) for text in made]]
        },
    )
    every, profile = list(range(len(copies))), flat_profile("", llama_pair.drafts)
    coupled = NativeBench(llama_pair, trace, Parts([], every, [], []), profile)
    benches, weights = rejection_benches(coupled), np.tile(chances, COPIES) / COPIES
    for draft, process in processes.items():
        plan, expected = policy(draft, GAMMA), process.rounds()

        def rounds(bench: NativeBench, plan: Policy = plan) -> float:
            replay: Any = bench.predict(plan, "search").result
            return float(weights @ replay.counts[:, 0])

        draws = [rounds(bench) for bench in benches]
        assert len(set(draws)) == DRAWS
        assert float(np.mean(draws)) == pytest.approx(expected, rel=0.01)


def test_the_best_chain_has_the_fastest_replay(bench: NativeBench) -> None:
    benches = rejection_benches(bench)
    speeds = {
        (draft, gamma): np.mean([b.predict(policy(draft, gamma), "search").speed for b in benches])
        for draft in ("near", "far", "ngram")
        for gamma in (1, 2, 3, 4)
    }
    best = max(speeds, key=speeds.__getitem__)
    assert best_chain(benches, 4).id == policy(*best).id


def test_it_is_executed_beside_the_other_while_its_time_lasts(bench: NativeBench) -> None:
    """By a clock that goes on a second whenever it is read."""
    ticks, seen = itertools.count(), list[int]()
    for budget_s in (0.0, 1e9):
        found = rejection_chain(
            *(bench, AUTOREGRESSIVE),
            gamma_max=2,
            budget_s=budget_s,
            clock=lambda: float(next(ticks)),
            progress=lambda _, done, total: seen.append(done),
        )
        assert isinstance(found, RejectionChain)
        assert found.requests == seen[-1]
    assert seen == [1, *range(1, 1 + len(PROMPTS))]
    assert (found.executed_interval[0] or 9.0) < found.executed_ratio
    assert found.executed_ratio < (found.executed_interval[1] or 0.0)
    for tau in (found.predicted_mean_accepted_length, found.executed_mean_accepted_length):
        assert 1.0 < tau <= 3.0
    plain = bench.predict(AUTOREGRESSIVE, "confirm").costs
    costs = [each.predict(found.policy, "confirm").costs for each in rejection_benches(bench)]
    assert found.predicted_ratio == pytest.approx(
        float(np.exp(np.log(plain / np.array(costs)).mean()))
    )


def test_what_cannot_be_tried_says_why(bench: NativeBench) -> None:
    pair, trace = bench.pair, bench.trace
    without = NativeBench(replace(pair, drafts={}), trace, bench.parts, bench.profile)
    bare = {
        draft: [replace(p, trie=replace(p.trie, accept=p.trie.accept[:0])) for p in of_draft]
        for draft, of_draft in trace.panoramas.items()
    }
    earlier = ReplayTrace(trace.trajectories, bare)
    unrecorded = NativeBench(pair, earlier, bench.parts, bench.profile)
    for where, why in (
        (without, "no draft of the pair is one"),
        (unrecorded, "no acceptance probabilities of draft 'near'"),
    ):
        said = rejection_chain(where, AUTOREGRESSIVE, gamma_max=2, budget_s=60.0)
        assert isinstance(said, RejectionNotTried)
        (line,) = rejection_in_words(FASTER.model_copy(update={"rejection": said}))
        assert line.startswith("sampling.verifier=rejection was not tried: ")
        assert why in line


def test_a_tuning_above_temperature_0_tries_it(tmp_path: Path, tiny_pair: Path) -> None:
    """Printed, and stored for the page."""
    door = Door(str(tmp_path / "spectune.db"), str(tiny_pair))
    put_profile(door.db, tiny_pair)
    few = {"trials": 2, "finalists": 1, "budget": "2s", "gamma_max": 4, "tree_width": 0}
    few |= {"max_new_tokens": 8, "pair": door.pair, "no_publish": True}
    workload = {"workload": write_workload(tmp_path / "w.jsonl", 18)}
    page = tmp_path / "page.html"
    called = door.call("tune", **few, **workload, temperature=0.8, report=page, json=True)
    data = one_object(called.stdout)
    found = data["rejection"]
    assert found["policy"]["draft"] in ("near", "far", "ngram")
    assert 1 <= found["policy"]["window"]["gamma"] <= 4
    assert 1 <= found["requests"] <= 6
    assert min(found["predicted_ratio"], found["executed_ratio"]) > 0.0
    (line,) = rejection_in_words(Tuned.model_validate(data))
    assert f"predicted {found['predicted_ratio']:.2f} times as fast as" in line
    assert f"executed {found['executed_ratio']:.2f}" in line
    assert f"on {found['requests']} requests" in line
    assert html.escape(line) in page.read_text()
    assert "makes chains slower" not in called.stderr


@pytest.mark.parametrize(("temperature", "verifier"), [(0.0, "coupled"), (0.8, "rejection")])
def test_nothing_is_tried_where_it_is_the_same_or_in_use(
    pair: LoadedPair, store: TraceStore, temperature: float, verifier: Verifier
) -> None:
    settings = TuneOptions(options=DecodeOptions(Sampling(temperature), 8, verifier))
    bench = cast(Any, SimpleNamespace(options=settings))  # nothing that it would execute is there
    assert PairBench.beside(bench, cast(Any, None), 1.0, silent) == {}

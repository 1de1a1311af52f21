"""Turns of a conversation stay together: where requests are dealt, where samples are drawn of them,
and where a fit leaves some out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from doors import Door, write_lines
from served_traces import RULES
from sklearn.linear_model import Ridge
from sklearn.model_selection import LeaveOneGroupOut, cross_val_predict
from synthetic import flat_profile
from trace_values import a_trajectory

from spectune.engines.abilities import VLLM
from spectune.optimizer.fit.by_prompt import RIDGES, fit_ridge
from spectune.optimizer.replay.loads import Objective
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.tuning.engine_bench import EngineBench
from spectune.optimizer.tuning.native_bench import NativeBench
from spectune.optimizer.tuning.parts import Parts, mixed, recorded_parts, split
from spectune.traces.conversations import conversations, conversations_of
from spectune.traces.schema import Counts, Outcome, RequestOutcome, Sampling, Tokens
from spectune.traces.store import Asked, TraceStore
from spectune.traces.tables import Trajectory
from spectune.traces.workload_files import read_workload

SYSTEM = np.arange(40, dtype=np.int32)
NOTHING = cast(Any, None)


def chats(
    count: int, turns: int, seed: int = 0, system: Sequence[int] = SYSTEM
) -> list[Trajectory]:
    """Chats under one system prompt, as servers see them: ids say nothing, and the prompt of a turn
    is all that was said. The first turns of all come first, then the second ones, ..."""
    rng, prompts, texts = np.random.default_rng(seed), [np.array(system, np.int32)] * count, []
    for turn in range(turns):
        for chat in range(count):
            asked, answer = (rng.integers(0, 4000, n).astype(np.int32) for n in (9, 20))
            prompt = np.concatenate([prompts[chat], asked])
            # The chat template writes another token than that which ended the text.
            prompts[chat] = np.concatenate([prompt, answer[:-1], asked[:1]])
            text = a_trajectory(chat + turn * count, category="chat")
            texts.append(replace(text, tokens=Tokens(prompt, answer)))
    return texts


def test_turns_are_dealt_together(tmp_path: Path) -> None:
    """Ids that only look alike are of no conversation; of two rows with one id each is its own."""
    says = [{"from": w, "value": f"{w} {k}"} for k in range(4) for w in ("human", "gpt")]
    rows = [{"id": f"c{n}", "conversations": says} for n in (*range(10), 0)]
    rows += [{"id": f"eval/{n}", "prompt": "Say."} for n in range(10)]
    write_lines(tmp_path / "talks.jsonl", rows)
    requests = read_workload([str(tmp_path / "talks.jsonl")], turns="all").requests
    of = conversations([request.id for request in requests])
    assert of.tolist() == [*np.repeat(range(11), 4), *range(11, 21)]
    parts = split([request.category for request in requests], of.tolist())
    assert all(parts)
    assert sorted(n for part in parts for n in part) == list(range(len(requests)))
    assert sum(len({*of[part]}) for part in parts) == 21
    seen = {conversations([requests[i].id for i in part]).max() + 1 for part in parts}
    assert sum(seen) <= 21


@pytest.mark.parametrize("turns", [1, 3])
def test_recorded_chats_are_told_by_their_tokens(turns: int) -> None:
    """Not by a system prompt that all have. Of two that begin with the same turn each goes on with
    its own; a text that is not known links nothing."""
    texts = chats(6, turns)
    assert conversations_of(texts).tolist() == [*range(6)] * turns
    twice = [text for pair in zip(texts, chats(6, turns), strict=True) for text in pair]
    assert conversations_of(twice).max() + 1 == 12
    lost = [None if i < 6 else text.tokens for i, text in enumerate(texts)]
    assert conversations([t.request_id for t in texts], lost).max() + 1 == (12 if turns > 1 else 6)


def test_a_new_turn_goes_where_its_conversation_is(store: TraceStore) -> None:
    """Whatever was recorded between, and also where another turn of it is damaged."""
    texts = chats(12, 3)
    store.put_pair("p", "p", {})
    name = store.create_recording(Asked("p", None, Sampling(), 64)).id
    for upto in (5, 14, 30, 36):
        have = len(store.recorded_ordinals(name))
        store.append_trajectories(name, [(n, texts[n], ()) for n in range(have, upto)])
        parts = recorded_parts(store, name, range(upto))
        assert sum(len({i % 12 for i in part}) for part in parts) == min(upto, 12)
    assert [len(part) for part in parts] == [6, 12, 6, 12]


def test_units_tell_their_conversations() -> None:
    """Of the native decoder a unit is a request; of an engine it has whole conversations."""
    trace = ReplayTrace(chats(5, 4), {})
    parts = Parts([], [], [0, 1, 5, 6, 10], [2, 3, 4, 7, 8, 9, 12, 17, 19])
    native = NativeBench(NOTHING, trace, parts, flat_profile("p", []))
    assert native.groups("race").tolist() == [0, 1, 0, 1, 0]
    assert native.groups("confirm").tolist() == [2, 3, 4, 2, 3, 4, 2, 2, 4]
    more = (NOTHING, VLLM, RULES, NOTHING, trace, parts, {}, Objective(), 20)
    engine = EngineBench(*more)
    assert engine.groups("confirm").tolist() == list(range(engine.units("confirm"))) == [0, 1, 2]
    units = [engine.unit_texts("confirm", n) for n in range(3)]
    assert units == [[2, 7, 12, 17], [3, 8], [4, 9, 19]]


def test_an_interval_is_over_conversations() -> None:
    """Turns that do as the first did make it no narrower."""
    rng, names = np.random.default_rng(0), range(12)
    alone = [
        RequestOutcome(f"{n}", "all", Counts(1, 1, 10, seconds=rng.uniform(1, 3)), conversation=n)
        for n in names
    ]
    expected = Outcome("p", "executed", tuple(alone)).tokens_per_s_interval()
    turns = Outcome("p", "executed", tuple(alone * 4))
    assert turns.tokens_per_s_interval() == pytest.approx(expected)
    assert Outcome.from_stored(turns.stored()) == turns
    apart = replace(turns, per_request=tuple(replace(r, conversation=None) for r in alone * 4))
    narrow, wide = (high - low for low, high in (apart.tokens_per_s_interval(), expected))
    assert narrow < 0.7 * wide


def test_a_fit_leaves_out_whole_conversations() -> None:
    """Turns that share words and what suits them teach a ridge nothing of other conversations."""
    rng = np.random.default_rng(0)
    of = np.repeat(range(8), 4)
    words = rng.normal(size=(8, 30))[of] + 0.05 * rng.normal(size=(32, 30))
    y = rng.normal(size=(8, 2))[of]
    apart, together = (fit_ridge(words, y, groups) for groups in (np.arange(32), of))
    errors = [
        ((cross_val_predict(Ridge(a), words, y, groups=of, cv=LeaveOneGroupOut()) - y) ** 2).sum(0)
        for a in RIDGES
    ]
    assert together.alpha.tolist() == np.array(RIDGES)[np.argmin(errors, axis=0)].tolist()
    assert (together.alpha > 10 * apart.alpha).all()


def test_the_beginning_of_a_part_has_as_many_conversations_as_it_can() -> None:
    """What a budget cuts short are the later turns, not the later conversations."""
    of = [n // 10 for n in range(50)]
    order = mixed(range(50), ["a"] * 50, of)
    assert sorted(order) == list(range(50))
    for count in (5, 20, 40):
        assert sorted(Counter(of[i] for i in order[:count]).values()) == [count // 5] * 5


def test_one_long_conversation_is_too_little_to_tune_on(tiny_pair: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "w.jsonl", [{"turns": [f"Say {n}." for n in range(30)]}])
    door = Door(str(tmp_path / "s.db"))
    line = door.error("tune", pair=tiny_pair, workload=tmp_path / "w.jsonl", turns="all")
    assert "too few conversations to search, race and confirm on different ones: 1" in line

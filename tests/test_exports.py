"""Policies as other engines' settings: said, and held against their documentation."""

from __future__ import annotations

import json
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from doors import Door
from pairs import top_k
from synthetic import policy

from spectune.engines.server_settings import engine_line, engine_settings
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import AUTOREGRESSIVE, ByLoadWindow, Policy, parse_policy
from spectune.traces.errors import PolicyError

FIXED = [{"kind": "fixed", "gamma": gamma} for gamma in (1, 4, 64)]
BY_LOAD = [
    {"kind": "by_load", "gamma": gamma}
    for gamma in ({"1": 4}, {"1": 5, "4": 3, "16": 0}, {"1": 5, "2": 0, "3": 5}, {"1": 2, "9": 1})
]
TREE = top_k("head", 4, 4, 12)
FOUR, BY = {"window": FIXED[1]}, {"window": BY_LOAD[1]}
MODELS = ("model", "speculative_draft_model_path")
LONGER = {**BY_LOAD[1], "contexts": {"4096": {"1": 6}}}
SHORT = {"kind": "frequency", "artifact": "a"}


@pytest.mark.parametrize(("engine", "count"), [("vllm", 28), ("sglang", 17)])
def test_an_engine_says_what_it_can_in_settings_of_json(
    engine: str, count: int, demo: PairSpec
) -> None:
    said = []
    wanted = [
        policy(d, w) for d, w in product(("small", "medium", "head", "ngram"), FIXED + BY_LOAD)
    ]
    for one in [*wanted, policy(**TREE)]:
        try:
            said.append(engine_settings(one, demo, engine))
        except PolicyError:
            continue
    assert json.loads(json.dumps(said)) == said
    assert len({json.dumps(settings) for settings in said}) == len(said) == count
    assert engine_settings(AUTOREGRESSIVE, demo, engine) == {}


EAGLE = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1}


@pytest.mark.parametrize(
    ("engine", "wanted", "expected"),
    [
        ("vllm", policy("small", 4), {"method": "draft_model", "num_speculative_tokens": 4}),
        ("vllm", policy("head", 4), {"method": "eagle3", "num_speculative_tokens": 4}),
        (
            "vllm",
            policy("ngram", 4),
            {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            },
        ),
        (
            "sglang",
            policy("head", 4),
            {**EAGLE, "speculative_num_steps": 4, "speculative_num_draft_tokens": 5},
        ),
        (
            "sglang",
            policy("small", 4),
            {
                **EAGLE,
                "speculative_algorithm": "STANDALONE",
                "speculative_num_steps": 4,
                "speculative_num_draft_tokens": 5,
            },
        ),
        (
            "sglang",
            policy(**TREE),
            {
                **EAGLE,
                "speculative_eagle_topk": 4,
                "speculative_num_steps": 4,
                "speculative_num_draft_tokens": 13,
            },
        ),
        (
            "sglang",
            policy("ngram", 4),
            {
                "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": 5,
                "speculative_ngram_max_bfs_breadth": 1,
            },
        ),
    ],
)
def test_settings_are_the_engines_own(
    engine: str, wanted: Policy, expected: dict[str, Any], demo: PairSpec
) -> None:
    settings = engine_settings(wanted, demo, engine)
    named = {key: settings.pop(key) for key in MODELS if key in settings}
    assert settings == expected
    path = dict(demo.drafts).get(wanted.draft)
    assert list(named.values()) == ([] if path is None else [path])


@pytest.mark.parametrize("window", BY_LOAD)
def test_a_window_by_batch_says_the_same_for_every_size(
    window: dict[str, Any], demo: PairSpec
) -> None:
    held = ByLoadWindow.model_validate(window)
    expected = [held.at(n) for n in range(1, 40)]
    small = policy("small", window)
    vllm = engine_settings(small, demo, "vllm")["num_speculative_tokens_per_batch_size"]
    assert [next(k for a, b, k in vllm if a <= n <= b) for n in range(1, 40)] == expected
    slots = engine_settings(policy("head", window), demo, "sglang")["speculative_adaptive_config"]
    firsts = [max(int(s) for s in slots if int(s) <= n) for n in range(1, 40)]
    assert [slots[str(first)]["candidate_steps"] for first in firsts] == [[k] for k in expected]


@pytest.mark.parametrize(
    ("engine", "document", "said"),
    [
        ("sglang", BY, 'tables by batch size of eagle, eagle3 alone; the nearest.*"gamma": 5'),
        ("sglang", {**TREE, "select": {"top_n": 60}}, "draft 4 to 52 tokens"),
        ("vllm", TREE, 'vLLM has no trees; the nearest that it can is {"draft": "head"'),
        ("vllm", {"window": LONGER}, 'no tables by context; the nearest.*"gamma": 5'),
        ("vllm", {"window": {"kind": "fsm"}}, "no rule that adapts"),
        ("vllm", {**FOUR, "stop": {"kind": "entropy"}}, "no stop of this kind"),
        ("vllm", {**FOUR, "shortlist": SHORT}, "no shortlist"),
        ("vllm", {**FOUR, "draft": "x"}, "no draft 'x'; it has: small, medium, head, ngram$"),
    ],
)
def test_what_an_engine_cannot_say_is_refused_with_the_nearest(
    engine: str, document: dict[str, Any], said: str, demo: PairSpec
) -> None:
    wanted = parse_policy({"draft": "small", **document})
    with pytest.raises(PolicyError, match=said):
        engine_settings(wanted, demo, engine)


def test_the_printed_lines_hold_the_settings(demo: PairSpec) -> None:
    def words(wanted: Policy, engine: str) -> list[str]:
        settings = engine_settings(wanted, demo, engine)
        return shlex.split(engine_line(settings, demo, engine))

    by_load = policy("head", BY_LOAD[1])
    found = words(by_load, "sglang")
    assert found[0] == "echo"
    assert json.loads(found[1])["4"] == {"candidate_steps": [3]}
    assert found[2:5] == [">", "adaptive.json", "&&"]
    adaptive = "--speculative-adaptive --speculative-adaptive-config adaptive.json"
    assert " ".join(found[-3:]) == adaptive
    assert found[found.index("--speculative-num-steps") + 1] == "5"
    spaced = demo.model_copy(update={"target": "my models/t"})
    for engine in ("vllm", "sglang"):
        found = shlex.split(engine_line({}, spaced, engine))
        assert any(word.startswith("my models/t") for word in found), engine


def test_the_command_prints_the_settings(tmp_path: Path, tiny_pair: Path) -> None:
    wanted = json.dumps({"draft": "near", "window": BY_LOAD[1]})
    export = ("policies", "export", wanted, "--pair", tiny_pair, "--for", "vllm")
    told = Door(str(tmp_path / "x.db")).json(*export)
    assert told["num_speculative_tokens_per_batch_size"][:2] == [[1, 3, 5], [4, 15, 3]]

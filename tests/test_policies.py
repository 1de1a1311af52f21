"""Policy documents: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from spectune.runtime.decoder import check_lossless
from spectune.runtime.policies.artifacts import COMMANDS, FittedArtifact
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, differences, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.policies.rules import compile_tree
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Sampling

TWELVE = {"kind": "fixed", "gamma": 12}
CONTRACT: list[dict[str, Any]] = [
    {"draft": "small", "window": {"kind": "fixed", "gamma": 4}},
    {"draft": "small", "window": {"kind": "analytic", "history": 6, "acc_max": 0.98}},
    {"draft": "small", "window": {"kind": "q_learning", "gamma_max": 8, "seed": 0}},
    *({"draft": "small", "window": {"kind": k, "gamma_max": 8}} for k in ("fsm", "cache_fsm")),
    *(
        {"draft": "small", "window": TWELVE, "stop": {"kind": kind, "threshold": 0.4}}
        for kind in ("max_prob", "joint_prob", "entropy")
    ),
    {"draft": "ngram", "window": {"kind": "fixed", "gamma": 8}},
]


def near(**blocks: Any) -> dict[str, Any]:
    return {"draft": "near", **blocks}


FREQUENT = {"kind": "frequency", "size": 60, "artifact": "order"}
ROUTED = {"kind": "clusters", "k0": 3, "k1": 2, "k_min": 1, "artifact": "router"}


def window(**fields: Any) -> dict[str, Any]:
    return {"draft": "a", "window": fields}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (window(kind="fixed", gama=4), "window: unknown key 'gama'; did you mean 'gamma'"),
        (window(kind="fixed", gamma=-1), "window.gamma"),
        (window(kind="fixed", gamma=65), "less than or equal to 64 (given: 65)"),
        (window(kind="fixd"), "window.kind must be one of: fixed, fsm"),
        (window(kind="fsm", gamma_max=0), "window.gamma_max"),
        (window(kind="fsm", gamma_max=2, gamma_min=3), "gamma_min 3 exceeds gamma_max 2"),
        ({"draft": "a", "window": 3}, "window"),
        ({"window": {"kind": "fixed", "gamma": 3}}, "needs a draft"),
        ({"draft": "a", "windw": {}}, "'windw'; did you mean 'window'"),
        ({"by_load": {"2": {}}}, 'begins with the policy of "1" running request'),
        ({"by_load": {"1": {"draf": "x"}}}, "unknown key 'draf'; did you mean 'draft'"),
        ({"by_load": {"1": {}}, "draft": "a"}, "'draft' belongs into an entry"),
        ({"by_load": {"1": {"by_load": {"1": {}}}}}, "by_load.1: unknown key 'by_load'"),
        ({"by_load": {"1": {}, "4": {"draft": "a", "window": 3}}}, "by_load.4.window"),
        (
            {"by_load": {"1": window(kind="by_load", gamma={"1": 2})}},
            "an entry of by_load is one policy, not another table",
        ),
        ({"draft": "a", "by_promt": {}}, "'by_promt'; did you mean 'by_prompt'"),
        ({"draft": "a", "x": 1}, "'x'; known keys: by_prompt, draft, growth, select, shortlist"),
        ({"draft": "x\n"}, "draft: only characters that can be printed are possible (given: 'x"),
        ({"draft": "a", "stop": {"kind": "max_prob", "threshold": 1.5}}, "stop.threshold"),
        (
            {"draft": "a", "growth": {"kind": "static", "paths": 5}},
            "growth.paths: Input should be a valid tuple (given: 5)",
        ),
        (
            near(shortlist={**FREQUENT, "size": 0}),
            "shortlist.size: Input should be greater than or equal to 1 (given: 0)",
        ),
        (near(shortlist={**ROUTED, "k0": 3, "k1": 4}), "k0 3 >= k1 4 >= k_min 1 does not hold"),
        (near(draft="ngram", shortlist=FREQUENT), 'draft "ngram" has none; use another draft'),
        (
            {"draft": "ngram", "stop": {"kind": "max_prob", "threshold": 0.4}},
            'stop "max_prob" reads a draft\'s probabilities, and draft "ngram" has none; leave the '
            "stop out",
        ),
        ({"draft": {"kind": "ols"}}, "draft: Input should be a valid string"),
        ([], "a policy is a JSON object, not list"),
        (None, "a policy is a JSON object, not null"),
        ({"draft": [0] * 100_000}, "draft: Input should be a valid string (given: [0, 0, 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_told_with_file_place_and_remedy(document: Any, says: str) -> None:
    with pytest.raises(PolicyError, match=f"^p.json: .*{re.escape(says)}"):
        parse_policy(document, where="p.json")


def test_a_biased_combination_is_refused() -> None:
    discarding = parse_policy({"draft": "small", "stop": {"kind": "max_prob", "keep_last": False}})
    pair, hot = SimpleNamespace(heads={}), Sampling(temperature=1.0)
    check_lossless(pair, [discarding], "coupled", hot)
    check_lossless(pair, [discarding], "rejection", Sampling())
    with pytest.raises(PolicyError, match="keep_last"):
        check_lossless(pair, [discarding], "rejection", hot)


TREE = {"draft": "near", "growth": {"kind": "top_k"}}
GROWER = {"kind": "classifier", "artifact": "x"}


@pytest.mark.parametrize(
    ("growth", "gamma", "says"),
    [
        ({"kind": "top_k", "width": 10}, 64, "expand up to 630 nodes, more than 512"),
        ({**GROWER, "width": 8, "cap": 32}, 24, "expand up to 712 nodes"),
        ({**GROWER, "width": 8, "cap": 20}, 20, "verify up to 388 nodes, more than 256"),
        ({**GROWER, "width": 8, "cap": None}, 9, "give select.top_n, or lower"),
        ({"kind": "top_k", "width": 32}, 12, "grow 11296 candidates, more than 8192"),
    ],
)
def test_trees_stay_within_what_the_runtime_holds(
    growth: dict[str, Any], gamma: int, says: str
) -> None:
    with pytest.raises(PolicyError, match=re.escape(says)):
        parse_policy(near(growth=growth, window={"kind": "fixed", "gamma": gamma}))


def test_bins_stay_within_what_the_runtime_holds() -> None:
    with pytest.raises(PolicyError, match="a low bin keeps 257 nodes, more than 256"):
        parse_policy(TREE | {"select": {"top_n": 256}, "stratify": {"artifact": "x"}})


@pytest.mark.parametrize(
    ("thresholds", "top_n"),
    [((), ()), ((5,), (9 + 3,)), ((5, 9), (9 + 3, 18 + 2)), ((1, 5, 9), (12, 20, 31))],
)
def test_the_bin_of_the_highest_entropy_is_no_low_one(
    thresholds: tuple[int, ...], top_n: tuple[int, ...]
) -> None:
    """However few bins there are: without, a fit that found one bin would prune and deepen every
    round."""
    policy = parse_policy(
        {**TREE, "select": {"top_n": 30}, "stratify": {"artifact": "x", "alpha": 3}}
    )
    fitted = FittedArtifact(
        "bins", {"thresholds": list(thresholds), "depth": 5, "draft": "near"}, {}
    )
    rule = compile_tree(policy, sampled=False, artifacts=lambda name: fitted)
    assert rule.bin_top_n == top_n
    assert rule.extension(len(thresholds)) == 0
    assert rule.top_n_of(len(thresholds)) == 30


def test_default_policy_is_autoregressive() -> None:
    """An empty document decodes without speculation; a draft alone takes the default window."""
    assert parse_policy({}) == AUTOREGRESSIVE == Policy()
    assert not AUTOREGRESSIVE.speculates
    assert parse_policy({"draft": "small"}).gamma_max == 4


def test_differences_are_listed_key_by_key() -> None:
    """Only what differs, defaults spelled out."""
    left = parse_policy({"draft": "small", "window": {"kind": "fixed", "gamma": 4}})
    right = parse_policy({"draft": "small", "window": {"kind": "fsm", "gamma_max": 4}})
    rows = {r["key"]: (r["left"], r["right"]) for r in differences(left, right)}
    assert rows["window.kind"] == ("fixed", "fsm")
    assert rows["window.gamma"] == (4, None)
    assert "draft" not in rows
    assert differences(left, left) == []


NEEDS: dict[str, dict[str, Any]] = {
    "static_tree": {"growth": {"kind": "static", "artifact": "a1b2"}},
    "classifier": {"growth": {"kind": "classifier", "width": 2, "artifact": "a1b2"}},
    "bins": {"growth": {"kind": "top_k", "width": 2}, "stratify": {"artifact": "a1b2"}},
    "frequencies": {"shortlist": {"kind": "frequency", "artifact": "a1b2"}},
    "router": {"shortlist": {"kind": "clusters", "artifact": "a1b2"}},
    "draft_chooser": {"by_prompt": {"artifact": "a1b2", "others": [{}]}},
}


@pytest.mark.parametrize("kind", NEEDS)
def test_an_artifact_that_does_not_fit_is_named_with_the_command_that_makes_one(kind: str) -> None:
    block = NEEDS[kind]
    policy = parse_policy({"draft": "near", "window": {"kind": "fixed", "gamma": 2}, **block})

    def said(found: FittedArtifact | None) -> str:
        with pytest.raises(PolicyError) as error:
            prepare(policy, ["near"], artifacts=None if found is None else lambda name: found)
        assert "'a1b2'" in str(error.value) or " a1b2" in str(error.value)
        return str(error.value)

    assert "cannot be looked up here" in said(None)
    assert f"is a tea, not a {kind}; `{COMMANDS[kind]}` makes one" in said(
        FittedArtifact("tea", {}, {})
    )
    assert "lacks" in said(FittedArtifact(kind, {}, {}))
    assert "was fitted on draft 'far'" in said(FittedArtifact(kind, {"draft": "far"}, {}))

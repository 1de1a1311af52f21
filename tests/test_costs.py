"""A round's seconds against the sums of its terms, and compiled functions that never
outlive an edit."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from pairs import chain, top_k
from synthetic import flat_profile, over_rows, with_heads, with_terms

from spectune.runtime.costs import (
    BUCKET,
    LAG_LIMIT,
    LaterPasses,
    MeasuredRound,
    RoundKind,
    middles,
    predicted_seconds,
    round_costs,
    round_seconds,
    step_shares,
    window_costs,
)
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.policies.rules import compile_tree
from spectune.traces.cost_table import CostTable
from spectune.traces.errors import PolicyError
from spectune.traces.tables import LatencyProfile

ROOT = Path(__file__).parent.parent
PROFILE = with_terms(
    with_heads(flat_profile("p", ["small"], ["head"]), ["small", "head"], 96),
    {
        "noise": CostTable((3e-5,)),
        "phase/small": CostTable((1e-4, 5e-4), ("passes",), ((1.0, 16.0),)),
        "after/small": CostTable((2e-4,)),
        "tree round/head": CostTable((7e-5,)),
    },
)
MIDDLE = 5 * BUCKET + (BUCKET - 1) // 2
KINDS = (
    (RoundKind(), (), 0),
    (RoundKind(sampled=True), (), 0),
    (RoundKind("small"), (1, 1, 1), 3),
    (RoundKind("small", blocks=("stop entropy",)), (5,), 1),
    (RoundKind("small", sampled=True), (2, *[1] * 11), 12),
    (RoundKind("small", "top_k"), (2, 4, 8), 17),
    (RoundKind("head", "top_k", sampled=True), (3, 1), 2),
    (RoundKind("head", "static"), (1, 4, 0, 2), 20),
)


def literal(profile: LatencyProfile, r: MeasuredRound) -> list[float]:
    """The sums of a round's terms at the middle of its context's bucket."""
    context = r.context // BUCKET * BUCKET + (BUCKET - 1) / 2
    draft_s, verify_s, rest_s = (
        sum(
            n * float(profile.seconds(name, rows=rows, context=context, passes=p))
            for name, n, rows, _, p, _ in shares
        )
        for shares in step_shares((r,))
    )
    return [draft_s, verify_s, draft_s + verify_s + rest_s]


@pytest.mark.parametrize(("kind", "rows", "drafted"), KINDS)
@pytest.mark.parametrize("context", [3, MIDDLE, 401])
def test_a_round_costs_the_sum_of_its_terms(
    kind: RoundKind, rows: tuple[int, ...], drafted: int, context: int
) -> None:
    """The fit's view of a round and the tables' are one."""
    rows = tuple(r for r in rows if r)
    measured = MeasuredRound(kind, context, rows, drafted, 2, 0.0, 0.0, 0.0, head=96 if rows else 0)
    at, sampled = np.array([context]), np.array([int(kind.sampled)])
    passes = LaterPasses(np.array([[*rows[1:], 0]]), at, sampled)
    costs = round_costs(PROFILE, kind._replace(sampled=False), middles(context), passes=passes)
    lag = rows[0] if rows else 0
    tabulated = round_seconds(costs, kind.sampled, context, 0, lag, len(rows), drafted, 2)
    np.testing.assert_allclose(tabulated, literal(PROFILE, measured), rtol=1e-12)
    if context == MIDDLE:
        predicted = predicted_seconds(PROFILE, [(measured,)] * 2)
        np.testing.assert_allclose(predicted, [literal(PROFILE, measured)] * 2, rtol=5e-3)


def test_lags_and_contexts_beyond_the_tables() -> None:
    costs = round_costs(PROFILE, RoundKind("small"), middles(100))
    near, far = (
        round_seconds(costs, 0, 3, 0, lag, 1, 1, 1)[0] for lag in (LAG_LIMIT, LAG_LIMIT + 50)
    )
    two, nine = (PROFILE.seconds("pass/small", rows=n, context=MIDDLE) for n in (2, 9))
    assert far - near == pytest.approx(50 * float(nine - two) / 7)
    beyond, last = (round_seconds(costs, 0, at, 0, 1, 2, 2, 1) for at in (9999, 127))
    assert beyond == last


def test_tables_go_on_with_their_outer_slopes_and_never_fall_below_zero() -> None:
    table = CostTable((1.0, 2.0, 3.0, 4.0), ("rows", "context"), ((1.0, 3.0), (0.0, 100.0)))
    for rows, context, seconds in ((1, 0, 1), (2, 50, 2.5), (5, 100, 6), (1, 200, 3), (-9, 0, 0)):
        assert table.at(rows=rows, context=context) == pytest.approx(seconds)
        one = table.grid(np.array([float(rows)]), np.array([float(context)]))
        assert one == pytest.approx(np.full((1, 1), seconds))
    assert over_rows((4,), (2.0,)).at(rows=np.array([[1, 9]])).tolist() == [[2.0, 2.0]]
    with pytest.raises(ValueError, match="3 seconds at 4 combinations"):
        CostTable((1.0, 2.0, 3.0), ("rows", "context"), ((1.0, 3.0), (0.0, 100.0)))


def test_requests_pay_prefill_of_all_but_the_last_prompt_token() -> None:
    for prompt in (2, 40, 700):
        read = float(PROFILE.seconds("prefill/target", rows=prompt - 1))
        assert read > 0
        assert PROFILE.request_seconds(None, prompt) == pytest.approx(read)
        assert PROFILE.request_seconds("small", prompt) == pytest.approx(2 * read)
    assert PROFILE.request_seconds("small", np.array([1, 1])).tolist() == [0.0, 0.0]


def test_what_a_profile_has_no_costs_of_is_refused_with_what_it_has() -> None:
    large = parse_policy({"draft": "large"})
    rule = compile_tree(large, sampled=False)
    with pytest.raises(PolicyError, match=r"for draft 'large' .it has: head, ngram, small"):
        window_costs(PROFILE, large, rule)
    with pytest.raises(PolicyError, match=r"of trees for draft 'ngram' .it has: head, small"):
        round_costs(PROFILE, RoundKind("ngram", "top_k"), middles(9))


@pytest.mark.parametrize(
    "policy",
    [
        chain("small", 9, window={"kind": "analytic", "gamma_max": 9}),
        chain("small", 1),
        chain("head", 5),
        top_k("small", 3, 4, 8),
    ],
)
def test_a_windows_costs_add_up_to_rounds(policy: dict[str, object]) -> None:
    """gamma a_q + b_p(gamma) is a round of gamma levels that verifies all that they can keep."""
    parsed = parse_policy(policy)
    tree, gamma = parsed.is_tree or parsed.draft == "head", parsed.gamma_max
    costs = window_costs(PROFILE, parsed, compile_tree(parsed, sampled=False))
    rows = [1, *[3 if parsed.is_tree else 1] * (gamma - 1)]
    drafted = 8 if parsed.is_tree else gamma
    kind = RoundKind.of(parsed, tree=tree)
    r = MeasuredRound(kind, int(PROFILE.usual_context), tuple(rows), drafted, 0, 0.0, 0.0, 0.0, 96)
    expected = predicted_seconds(PROFILE, [(r,)])[0, 2]
    assert costs[gamma] == pytest.approx(expected, rel=5e-3)  # the context is its bucket's middle
    assert len(costs) == gamma + 1


def run_kernel(folder: Path) -> tuple[int, int]:
    """What kernel.py in ``folder`` computes, and how often it was found compiled."""
    import numba

    numba.config.CACHE_DIR = str(folder / "cache")
    sys.path.insert(0, str(folder))
    kernel = importlib.import_module("kernel")
    return kernel.run(kernel.START), sum(kernel.run.dispatcher.stats.cache_hits.values())


def kernel_of(folder: Path) -> tuple[int, int]:
    """:func:`run_kernel` in a process of its own; forked, as another would import numba anew."""
    with ProcessPoolExecutor(1, get_context("fork")) as process:
        return process.submit(run_kernel, folder).result()


COMPILED = "from spectune.runtime.policies.jit import compiled\n"


def test_an_edit_in_a_called_module_reaches_cached_kernels(tmp_path: Path) -> None:
    """numba alone would go on running what it compiled before: its cache looks at the kernel's own
    file only."""
    files = {
        "constant": "TEN = 10\n",
        "deep": f"{COMPILED}@compiled()\ndef inner(x): return x + 1\n",
        "middle": f"import constant\nfrom deep import inner\n{COMPILED}"
        "@compiled()\ndef outer(x): return inner(x) * constant.TEN\n",
        "kernel": f"from middle import outer\n{COMPILED}START = 1\n"
        "@compiled()\ndef run(x): return outer(x)\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert kernel_of(tmp_path) == (20, 0)
    assert kernel_of(tmp_path) == (20, 1)
    (tmp_path / "deep.py").write_text(files["deep"].replace("+ 1", "+ 2000"))
    assert kernel_of(tmp_path) == (20010, 0)
    assert kernel_of(tmp_path) == (20010, 1)
    (tmp_path / "constant.py").write_text("TEN = 100\n")
    assert kernel_of(tmp_path) == (200100, 0)


def test_a_kernel_is_compiled_anew_where_a_type_it_was_cached_for_is_gone(tmp_path: Path) -> None:
    """numba alone raises AttributeError: its index of what is compiled holds the types."""
    text = (
        f"from typing import NamedTuple\n{COMPILED}class Old(NamedTuple):\n    x: int\n"
        "START = Old(1)\n@compiled()\ndef run(start): return start.x + 1\n"
    )
    (tmp_path / "kernel.py").write_text(text)
    assert kernel_of(tmp_path) == (2, 0)
    (tmp_path / "kernel.py").write_text(text.replace("Old", "Renamed"))
    assert kernel_of(tmp_path) == (2, 0)
    assert kernel_of(tmp_path) == (2, 1)

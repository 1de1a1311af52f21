"""Texts, in float64: autoregression's are ``generate``'s, functions of seed and request, and end
where they should. That no policy changes them :mod:`test_parity` and :mod:`test_tree_parity` show,
with every replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import chain
from recorded_texts import plain_texts

from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import StaticSource
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.traces.schema import Request, Sampling

PROMPTS = ["def add(a, b):", "The quick brown", "Question: Bob has 9", "for i in", "x"]
TOKENS = 24


def policies(near: str, far: str) -> list[Policy]:
    """Every window, every stop, every kind of draft."""

    def under(draft: str, kind: str, stop: dict[str, Any] | None = None, **window: Any) -> Any:
        return {"draft": draft, "window": {"kind": kind, **window}} | (
            {"stop": stop} if stop else {}
        )

    max_prob, entropy = ({"kind": kind, "threshold": 0.35} for kind in ("max_prob", "entropy"))
    joint_prob = {"kind": "joint_prob", "threshold": 0.07}
    documents = [
        chain(near, 1),
        chain(near, 5),
        chain(far, 16),
        under(near, "analytic", gamma_max=8),
        under(far, "analytic", gamma_max=8, estimator="exact", history=12),
        under(far, "analytic", gamma_max=6, estimator="ratio", gamma_min=1),
        under(near, "fsm", gamma_max=8),
        under(far, "cache_fsm", gamma_max=8),
        under(near, "q_learning", gamma_max=6, seed=1, epsilon=0.3),
        under(near, "heuristic", gamma_max=12),
        under(near, "fixed", max_prob, gamma=12),
        under(far, "fixed", joint_prob, gamma=12),
        under(near, "fixed", entropy, gamma=12),
        under(
            *(near, "q_learning", joint_prob | {"keep_last": False}),
            **{"gamma_max": 10, "memory": 2, "reward": "speed"},
        ),
        chain("ngram", 8),
        under("ngram", "cache_fsm", gamma_max=10),
        chain(near, 0),
    ]
    return [parse_policy(d) for d in documents]


@pytest.fixture(scope="module")
def pair(either_pair: LoadedPair) -> LoadedPair:
    return either_pair


NAMED = {str(i): prompt for i, prompt in enumerate(PROMPTS)}


def test_greedy_autoregression_is_generates(pair: LoadedPair) -> None:
    """At temperature 0 our loop gives what transformers' own ``generate`` gives."""
    ours = plain_texts(pair, NAMED, Sampling(), TOKENS)
    reference = type(pair.target.model).from_pretrained(pair.spec.target, dtype=torch.float64)
    for prompt, trajectory in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([pair.encode(prompt)])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=TOKENS,
            pad_token_id=0,
        )
        assert trajectory.output_ids.tolist() == out[0, ids.shape[1] :].tolist()


def test_text_is_a_function_of_seed_and_request(pair: LoadedPair) -> None:
    """Another seed gives another text; order and other requests do not matter."""
    one, two = (
        plain_texts(pair, NAMED, Sampling(temperature=1.0, seed=seed), TOKENS) for seed in (1, 2)
    )
    assert one != two
    last = str(len(PROMPTS) - 1)
    alone = plain_texts(pair, {last: NAMED[last]}, Sampling(temperature=1.0, seed=1), TOKENS)
    assert alone == one[-1:]


def test_eos_budget_and_stop_strings_end_texts(pair: LoadedPair) -> None:
    """A text ends at EOS, at its budget, or at the token that completes a stop string, alike under
    every policy."""
    near, hot = next(iter(pair.drafts)), Sampling(temperature=1.0, seed=9)
    plain = plain_texts(pair, NAMED, hot, TOKENS)
    stop = pair.text(plain[0].output_ids.tolist())[4:6]
    ends = set()
    for policy in (Policy(), parse_policy(chain(near, 7))):
        decoder = Decoder(pair, StaticSource(prepare(policy, pair.draft_names)))
        item, ids = Request("0", "c", PROMPTS[0]), pair.encode(PROMPTS[0])
        done = decoder.decode(decoder.request(item, ids, hot, TOKENS, (stop,))).trajectory
        text = done.output_ids.tolist()
        assert done.finish == "stop"
        assert stop in pair.text(text)
        assert stop not in pair.text(text[:-1])
        ends.add(tuple(text))
    assert len(ends) == 1
    for trajectory in plain:
        ended = trajectory.output_ids[-1] in pair.eos_ids
        assert trajectory.finish == ("eos" if ended else "length")
        assert ended or len(trajectory.output_ids) == TOKENS

"""Values of :mod:`traces.tables` made from a seed, for the tests of what stores and packs them."""

from __future__ import annotations

from typing import Any

import numpy as np
from sqlalchemy import LargeBinary, literal, select, type_coerce, update
from synthetic import chain_panorama

from spectune.runtime.policies.document import Policy
from spectune.traces.cost_table import CostTable
from spectune.traces.schema import (
    OFF_TEXT,
    PROB_SCALE,
    Counts,
    Outcome,
    Request,
    RequestOutcome,
    Sampling,
    Step,
    Tokens,
    Trie,
    Verifier,
    Workload,
    policy_id,
)
from spectune.traces.store import Asked, TraceStore
from spectune.traces.tables import LatencyProfile, Panorama, Trajectory

PAIR = "5f1d0c6a9e2b"
POLICY = {"draft": "small"}
POLICY_ID = policy_id(POLICY)
CATEGORIES = ("code", "prose", "math")


def a_trajectory(
    seed: int,
    *,
    n: int = 60,
    stop_strings: tuple[str, ...] = (),
    sampling: Sampling | None = None,
    verifier: Verifier = "coupled",
    category: str | None = None,
) -> Trajectory:
    """A request of ``n`` output tokens; equal seeds, equal values."""
    rng = np.random.default_rng(seed)
    return Trajectory(
        request_id=f"r{seed}",
        category=category or CATEGORIES[seed % 3],
        tokens=Tokens(*(rng.integers(0, 4096, count).astype(np.int32) for count in (17, n))),
        sampling=sampling or Sampling(),
        max_new_tokens=64,
        finish="length",
        verifier=verifier,
        stop_strings=stop_strings,
    )


def a_panorama(
    trajectory: Trajectory,
    draft: str,
    *,
    seed: int = 0,
    gamma_max: int = 16,
    agreement: float = 0.65,
    none: float = 0.05,
    silence: float = 0.0,
) -> Panorama:
    """Chains with noisy entropies, as those of real drafts are. ``none``: the chance that the draft
    proposes nothing at a position, ``silence`` off the text."""
    rng = np.random.default_rng([seed, len(draft)])
    n = len(trajectory.output_ids)
    kinds = rng.choice(3, n, p=[1 - agreement - none, agreement, none])
    agree = np.array([False, True, None], dtype=object)[kinds]
    branches = int((kinds == 0).sum()) + 1

    def nats(*shape: int) -> np.ndarray:
        return np.minimum(rng.gamma(1.0, 1.2, shape) * 256, 65535).astype(np.uint16)

    lengths = np.full(branches, gamma_max - 1)
    if silence:
        lengths = np.minimum(lengths, rng.geometric(silence, branches) - 1)
    kept = np.where(rng.random(n) < 0.45, PROB_SCALE, rng.random(n) * PROB_SCALE)
    off_text = nats(branches, gamma_max - 1, 2)
    accept = kept.astype(np.uint16)
    return chain_panorama(draft, gamma_max, agree, nats(n, 2), off_text, lengths, accept)


def a_tree(
    trajectory: Trajectory,
    draft: str,
    *,
    seed: int = 0,
    gamma_max: int = 16,
    width: int = 4,
    depth: int = 3,
    greedy: bool = False,
    vocab: int = 4096,
) -> Panorama:
    """A panorama of trees, of twice as many nodes off the text as on it, each with a parent that
    has it as a child; ``greedy``: children are in the order of their probabilities."""
    rng = np.random.default_rng([seed, len(draft), width, depth])
    roots = len(trajectory.output_ids) + 1
    m = 2 * roots
    n = roots + m

    def codes(*shape: int) -> np.ndarray:
        return np.minimum(rng.gamma(1.0, 480.0, shape), 65535).astype(np.uint16)

    logp = np.sort(codes(n, width), axis=1) if greedy else codes(n, width)
    gap = (logp - logp[:, :1]) if greedy else np.sort(codes(n, width), axis=1)
    count = rng.integers(1, width + 1, n).astype(np.uint8)
    parent = (rng.random(m) * np.arange(roots, n)).astype(np.int32)
    text_slot = np.concatenate([rng.integers(0, width, roots), np.full(m, OFF_TEXT)]).astype(
        np.uint8
    )
    return Panorama(
        draft=draft,
        gamma_max=gamma_max,
        width=width,
        depth=depth,
        shared=True,
        trie=Trie(
            parent=parent,
            slot=(rng.random(m) * count[parent]).astype(np.uint8),
            tokens=rng.integers(0, vocab, (n, width)).astype(np.int32),
            logp=logp,
            gap=gap,
            count=count,
            entropy=codes(n),
            top_entropy=codes(n),
            text_slot=text_slot,
            accept=np.zeros(0, np.uint16),
        ),
    )


def damage(store: TraceStore, column: Any, **key: object) -> None:
    """Flips a bit amid a stored blob."""
    raw = type_coerce(column, LargeBinary)
    with store.database.write() as session:
        data = bytearray(session.scalar(select(raw).filter_by(**key)) or b"")
        data[len(data) // 2] ^= 1
        changed = {column: literal(bytes(data), LargeBinary)}
        session.execute(update(column.class_).filter_by(**key).values(changed))


def steps_of(trajectory: Trajectory, policy: str = POLICY_ID) -> tuple[Step, ...]:
    """Rounds of at most four drafted tokens that cover a trajectory."""
    rng = np.random.default_rng(len(trajectory.output_ids))
    steps: list[Step] = []
    start, total = 0, len(trajectory.output_ids)
    while start < total:
        drafted = min(4, total - start - 1)
        accepted = int(rng.integers(0, drafted + 1))
        times = [float(t) / 1e9 for t in rng.integers(1, 10**7, 3)]
        counts = (start, drafted, drafted + 1, accepted, accepted + 1, drafted, 1)
        steps.append(Step(*counts, "small", policy, *times))
        start += accepted + 1
    return tuple(steps)


def a_profile(scale: float, *, device: str = "cpu") -> LatencyProfile:
    """A profile whose every cost is a multiple of ``scale`` seconds."""
    seconds = tuple(scale * n for n in (1, 2, 3, 4))
    table = CostTable(seconds, ("rows", "context"), ((1.0, 8.0), (0.0, 64.0)))
    terms = dict.fromkeys(("target", "prefill/target", "pass/small", "prefill/small"), table)
    terms["phase/small"] = CostTable((scale,))
    return LatencyProfile(PAIR, device, "float32", terms, environment={"torch": "2"})


def an_outcome() -> Outcome:
    """Executed counts of three requests."""
    rows = []
    for i, category in enumerate(CATEGORIES):
        counts = Counts(1, 10 + i, 30 + i, 20, 40, 40, 50, 0.125 * (i + 1))
        rows.append(RequestOutcome(f"r{i}", category, counts, counts.seconds / 8))
    return Outcome(POLICY_ID, "executed", tuple(rows))


def a_recording(
    store: TraceStore,
    *,
    n: int = 6,
    drafts: tuple[str, ...] = ("small",),
    verifier: Verifier = "coupled",
    trees: bool = False,
    policy: Policy | None = None,
) -> str:
    """A complete recording in a store: ``n`` trajectories with steps (of a ``policy``, which is
    stored) and panoramas, those of the draft ``small`` with ``trees``; its id."""
    store.put_pair(PAIR, "demo", {"target": "t"})
    workload = Workload("w", tuple(Request(f"r{i}", CATEGORIES[i % 3], "x") for i in range(n)))
    asked = Asked(PAIR, store.put_workload(workload), Sampling(), 64, verifier)
    info = store.create_recording(asked)
    if policy is not None:
        store.put_policy(policy.id, policy.spelled_out(), policy.label())
    for i in range(n):
        trajectory = a_trajectory(i, verifier=verifier)
        steps = steps_of(trajectory, POLICY_ID if policy is None else policy.id)
        store.append_trajectory(info.id, i, trajectory, steps)
        for draft in drafts:
            make: Any = a_tree if trees and draft == "small" else a_panorama
            store.put_panoramas(info.id, [(i, make(trajectory, draft, seed=i))])
    store.finish_recording(info.id)
    return info.id

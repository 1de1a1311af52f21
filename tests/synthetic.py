"""Values for tests that need no models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.runtime.hardware import cpu_name
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.traces.cost_table import CostTable
from spectune.traces.schema import OFF_TEXT, Sampling, Tokens, Trie
from spectune.traces.tables import LatencyProfile, Panorama, Trajectory


def policy(draft: str, window: int | dict[str, Any], **blocks: Any) -> Policy:
    """A policy. A whole number is a fixed window, numbers alone a window by batch size."""
    if isinstance(window, int):
        window = {"kind": "fixed", "gamma": window}
    elif "kind" not in window:
        window = {"kind": "by_load", "gamma": window}
    return parse_policy({"draft": draft, "window": window, **blocks})


def chain_panorama(
    draft: str,
    gamma_max: int,
    agree: npt.ArrayLike,
    codes: npt.ArrayLike,
    branch_codes: npt.ArrayLike,
    branch_len: npt.ArrayLike,
    accept: npt.ArrayLike = (),
) -> Panorama:
    """A panorama of width 1 from columns over positions: whether a draft's proposal is the text's
    token (None: there is none), and ``codes`` [L, 2] of -log q and entropy.

    ``branch_codes`` [B, gamma_max - 1, 2] has a row per disagreement, of what is proposed after
    leaving the text there, and one of what is proposed after its end; ``branch_len`` [B] says how
    many of them there are (gamma_max - 1: as far as is recorded).
    """
    agree = np.array(agree, dtype=object)
    length, codes = len(agree), np.asarray(codes, np.uint16).reshape(-1, 2)
    rows = np.asarray(branch_codes, np.uint16)
    parents: list[int] = []
    of_nodes = [*codes.tolist(), [0, 0]]
    exists = [answer is not None for answer in agree] + [False]
    leaves = [i for i, answer in enumerate(agree) if answer is not None and not answer]
    for start, row, n in zip([*leaves, length], rows, branch_len, strict=True):
        above, entries = start, [*row[:n].tolist(), *[None][: gamma_max - 1 - n]]
        if start == length and entries:
            first = entries.pop(0)
            of_nodes[length], exists[length] = first or [0, 0], first is not None
        for entry in entries if exists[above] else ():
            parents.append(above)
            above = len(of_nodes)
            of_nodes.append(entry or [0, 0])
            exists.append(entry is not None)
    n, m = len(of_nodes), len(parents)
    table = np.array(of_nodes, np.uint16)
    return Panorama(
        draft=draft,
        gamma_max=gamma_max,
        width=1,
        depth=1,
        shared=True,
        trie=Trie(
            parent=np.array(parents, np.int32),
            slot=np.zeros(m, np.uint8),
            tokens=np.zeros((n, 1), np.int32),
            logp=table[:, :1].copy(),
            gap=np.zeros((n, 1), np.uint16),
            count=np.array(exists, np.uint8),
            entropy=table[:, 1].copy(),
            top_entropy=np.zeros(n, np.uint16),
            text_slot=np.array(
                [0 if a else OFF_TEXT for a in agree] + [OFF_TEXT] * (m + 1), np.uint8
            ),
            accept=np.asarray(accept, np.uint16),
        ),
    )


def drifting_text(
    seed: int, *, length: int = 500, gamma_max: int = 16
) -> tuple[Trajectory, Panorama]:
    """A text and the chains of a draft, ``small``, whose acceptance drifts between 0.3 and 0.95
    along it."""
    rng = np.random.default_rng(seed)
    wave = 0.62 + 0.3 * np.sin(np.arange(length) / rng.uniform(15, 60) + rng.uniform(0, 6))
    agree = rng.random(length) < wave
    logp = np.clip(rng.gamma(1.5, 60, length) * np.where(agree, 0.6, 2.0), 0, 4000)
    prompt, output = (
        rng.integers(0, 4000, n).astype(np.int32) for n in (int(rng.integers(20, 200)), length)
    )
    branches = int((~agree).sum()) + 1
    rows = rng.gamma(1.5, 120, (branches, gamma_max - 1, 1)).repeat(2, 2)
    codes = logp[:, None].repeat(2, 1)
    text = Trajectory(f"r{seed}", "synthetic", Tokens(prompt, output), Sampling(), length, "length")
    ends = np.full(branches, gamma_max - 1)
    return text, chain_panorama("small", gamma_max, agree, codes, rows, ends)


def over_rows(rows: Sequence[float], seconds: Sequence[float]) -> CostTable:
    """A cost that depends on rows alone."""
    return CostTable(tuple(seconds), ("rows",), (tuple(rows),))


def with_terms(profile: LatencyProfile, terms: dict[str, CostTable | None]) -> LatencyProfile:
    """The profile with other terms in place of its own; None takes one away."""
    merged = {**profile.terms, **terms}
    return replace(profile, terms={n: t for n, t in merged.items() if t is not None})


def with_heads(
    profile: LatencyProfile,
    drafts: Iterable[str],
    rows: int,
    *,
    head_s: float = 1e-6,
    gathered_s: float = 1e-6,
) -> LatencyProfile:
    """The profile with output heads of ``rows`` tokens that take so many seconds a token, trimmed
    or gathered."""
    tables: dict[str, CostTable | None] = {}
    for draft in drafts:
        whole_s = head_s * rows
        tables[f"head/{draft}"] = over_rows((0, rows), (0.0, whole_s))
        tables[f"gathered/{draft}"] = over_rows((0, rows), (whole_s - gathered_s * rows, whole_s))
    return with_terms(profile, tables)


def flat_profile(pair_id: str, drafts: Iterable[str], heads: Iterable[str] = ()) -> LatencyProfile:
    """A profile of round numbers: a draft's pass 1 ms, verification 4 ms and 0.1 ms a token; at
    temperature > 0 a tenth more of either. ``heads`` have trees alone."""
    at = (32.0, 512.0)
    target = CostTable(
        (4e-3, 5e-3, 5e-3, 6e-3, 6e-3, 7e-3, 12e-3, 13e-3),
        ("rows", "context"),
        ((1.0, 9.0, 17.0, 65.0), at),
    )
    step = CostTable(
        (1e-3, 1e-3, 1.1e-3, 1.1e-3, 1.5e-3, 1.5e-3), ("rows", "context"), ((1.0, 2.0, 9.0), at)
    )
    prefill = over_rows((8, 512), (5e-3, 50e-3))
    terms = {
        "target": target,
        "tree target": CostTable((2e-4,)),
        "sampled target": over_rows((1, 17), (4e-4, 6e-4)),
        "prefill/target": prefill,
        "round": CostTable((1e-4,)),
        "stop max_prob": CostTable((1e-5,)),
        "stop joint_prob": CostTable((1e-5,)),
        "stop entropy": CostTable((2e-5,)),
    }
    for draft in ("ngram", *drafts, *heads):
        terms |= {
            f"pass/{draft}": step,
            f"prefill/{draft}": prefill,
            f"sampled pass/{draft}": CostTable((1e-4,)),
        }
        if draft not in heads:
            terms[f"phase/{draft}"] = CostTable((1e-5,))
        if draft != "ngram":
            terms |= {
                f"{growth}/{draft}": over_rows((1, 16), (1e-4, 3e-4))
                for growth in ("top_k", "static", "classifier")
            }
            terms[f"tree phase/{draft}"] = CostTable((5e-4,))
    check = {"accepted": True, "policy_error": 0.0, "policy_spread": 0.0}
    here = {"device": cpu_name(), "dtype": "float32"}
    return LatencyProfile(pair_id, "cpu", "float32", terms, environment=here, check=check)

"""What a chain drafted from every position of a trace would do, tabulated once per draft and stop.

A draft and a stop decide, for each start s, how long the chain can grow and how much of it agrees
with the text; the window only says how much of that is used. So one word per position answers every
round of every window:

- ``run``: accepted tokens of an endless chain; accepted = min(run, drafted).
- ``cap``: tokens at which the stop, or a draft without a proposal, ends the chain; drafted =
  min(gamma, cap).
- ``step cap``: passes made by then (one more than ``cap`` if the last pass kept no token);
  draft_steps = min(gamma, step cap).
- ``cached from``: offset of the first position whose token occurs in the prompt or the output
  before s; accepted tokens are in the cache iff cached from < accepted.

They are packed into a uint32, one byte each, lowest first; :data:`ENDLESS` stands for "not within
reach" in all of them. That is enough because no window exceeds
:data:`runtime.policies.document.GAMMA_LIMIT` (64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.document import Policy
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.splitmix import hash_uniform, mix64
from spectune.runtime.policies.stops import CompiledStop, compile_stop, should_stop
from spectune.traces.errors import TraceError
from spectune.traces.schema import PROB_SCALE, request_seed
from spectune.traces.tables import Panorama, Trajectory

ENDLESS: Final = 255
AGREE_NO, AGREE_YES, AGREE_NONE = 0, 1, 2
"""Values of :attr:`Chains.agree`: the proposal differs from the text, equals it, or there is
none."""

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.uint16]
Words = npt.NDArray[np.uint32]
Index = npt.NDArray[np.int64]


class Chains(NamedTuple):
    """One draft's chains over a trace, read off its panoramas and joined. Positions of all
    trajectories follow one another; so do branch rows.

    From start s a chain walks along the text while its proposals equal it; at the first position d
    where they differ it leaves the text, and what it proposes from there on depends on d alone. So
    columns over positions and a *branch* per disagreement hold the chains of all starts.

    ``agree`` uint8, ``logp`` and ``entropy`` uint16 [positions]. ``row`` int64 [positions]: the
    branch row after leaving the text at a position (for one that agrees, the next row: see
    :func:`draw_agreement`); ``end_row`` int64 [trajectories]: the row past the end. Entry j of
    ``branch_logp`` and ``branch_entropy`` uint16 [rows, gamma_max] is of the proposal after 1 + j
    tokens off the text (of an ``end_row`` j); there are ``branch_len`` of them. ``accept`` uint16
    [positions] and ``key`` int64 [trajectories] serve the rejection verifier; ``drawn`` marks the
    trajectories that need it. ``runs_out``: the draft may have no proposal somewhere.
    """

    gamma_max: int
    agree: Bytes
    logp: Codes
    entropy: Codes
    accept: Codes
    row: Index
    end_row: Index
    branch_logp: Codes
    branch_entropy: Codes
    branch_len: Bytes
    drawn: npt.NDArray[np.bool_]
    key: Index
    runs_out: bool


def join_chains(trajectories: Sequence[Trajectory], panoramas: Sequence[Panorama]) -> Chains:
    """Joins one draft's chains, of at least one panorama, one per trajectory in the same order.

    Where they were recorded to different gamma_max the shortest counts.
    """
    reach = min(p.gamma_max for p in panoramas)
    columns = [_chains_of(p, reach) for p in panoramas]
    agree, logp, entropy, accept, branch_logp, branch_entropy, branch_len, runs_out = (
        np.concatenate(parts) for parts in zip(*columns, strict=True)
    )
    ends = np.cumsum([len(part[4]) for part in columns])
    differs = agree == AGREE_NO
    # Every trajectory has a row more than disagreements: that past its end.
    of = np.repeat(np.arange(len(columns)), [len(part[0]) for part in columns])
    keys = [request_seed(t.sampling.seed, t.request_id) for t in trajectories]
    drawn = [t.verifier == "rejection" and not t.sampling.greedy for t in trajectories]
    return Chains(
        gamma_max=reach,
        agree=agree,
        logp=logp,
        entropy=entropy,
        accept=accept,
        row=np.cumsum(differs) - differs + of,
        end_row=ends - 1,
        branch_logp=branch_logp,
        branch_entropy=branch_entropy,
        branch_len=branch_len,
        drawn=np.array(drawn, dtype=np.bool_),
        key=np.array(keys, dtype=np.int64),
        runs_out=bool(runs_out.any()),
    )


def _chains_of(panorama: Panorama, reach: int) -> tuple[npt.NDArray[Any], ...]:
    """Of one panorama ``agree``, ``logp``, ``entropy``, ``accept``, ``branch_logp``,
    ``branch_entropy`` and ``branch_len`` of :class:`Chains`, and ``runs_out`` [1]."""
    trie, length, best = panorama.trie, panorama.positions, panorama.children[:, 0]
    agree = np.where(trie.text_slot[:length] == 0, AGREE_YES, AGREE_NO).astype(np.uint8)
    agree[trie.count[:length] == 0] = AGREE_NONE
    node = np.append(best[np.flatnonzero(agree == AGREE_NO)], np.int32(length))
    nodes = np.empty((len(node), reach), np.int32)
    for entry in range(reach):
        nodes[:, entry] = node
        node = np.where(node >= 0, best[node], -1)
    proposes = (nodes >= 0) & (trie.count[nodes] > 0)
    accept = trie.accept if len(trie.accept) else np.where(agree == AGREE_YES, PROB_SCALE, 0)
    return (
        agree,
        trie.logp[:length, 0],
        trie.entropy[:length],
        accept.astype(np.uint16),
        np.where(proposes, trie.logp[nodes, 0], 0).astype(np.uint16),
        np.where(proposes, trie.entropy[nodes], 0).astype(np.uint16),
        np.logical_and.accumulate(proposes, axis=1).sum(1).astype(np.uint8),
        np.array([(agree == AGREE_NONE).any() or ((nodes >= 0) & ~proposes).any()]),
    )


def check_reach(policy: Policy, chains: Chains) -> None:
    """Raises TraceError if the policy could draft further than the panoramas tell.

    Without a stop, a draft that never runs out is known for any window: the text says how much is
    accepted, the window the rest.
    """
    if policy.gamma_max > chains.gamma_max and (
        compile_stop(policy.stop).active or chains.runs_out
    ):
        raise TraceError(
            f"policy drafts up to {policy.gamma_max} tokens with {policy.draft!r}, but the "
            f"recording holds chains of {chains.gamma_max}: `record --resume ID --gamma-max "
            f"{policy.gamma_max}` widens it; or lower the policy's window"
        )


def tabulate(chains: Chains, offsets: Index, cached: Bytes, stop: CompiledStop, seed: int) -> Words:
    """The packed outcomes of every start, uint32 [positions].

    ``offsets`` [trajectories + 1] delimits trajectories; ``cached`` is :func:`cached_from`.
    ``seed`` chooses the draws of the rejection verifier and matters for nothing else.
    """
    agree = chains.agree
    if chains.drawn.any():
        agree = agree.copy()
        draw_agreement(offsets, chains.drawn, chains.key, chains.accept, seed, agree)
    out = np.empty(len(agree), dtype=np.uint32)
    _tabulate(chains._replace(agree=agree), offsets, cached, stop, out)
    return out


def cached_from(offsets: Index, trajectories: Sequence[Trajectory]) -> Bytes:
    """For each start the offset of the first position whose token occurs in the prompt or in the
    output before the start, uint8 [positions]."""
    first_seen = [np.zeros(0, np.int32)]  # -1: in the prompt
    for t in trajectories:
        tokens, prompt = np.concatenate([t.prompt_ids, t.output_ids]), len(t.prompt_ids)
        _, first, inverse = np.unique(tokens, return_index=True, return_inverse=True)
        first_seen.append(np.maximum(first[inverse][prompt:] - prompt, -1).astype(np.int32))
    first_cached = np.full(offsets[-1], ENDLESS, np.uint8)
    _cached_from(offsets, np.concatenate(first_seen), first_cached)
    return first_cached


@compiled()
def _cached_from(offsets: Index, first_seen: npt.NDArray[np.int32], out: Bytes) -> None:
    for r in range(len(offsets) - 1):
        begin, end = offsets[r], offsets[r + 1]
        for s in range(begin, end):
            for i in range(s, min(end, s + ENDLESS)):
                if first_seen[i] < s - begin:
                    out[s] = i - s
                    break


@compiled()
def draw_agreement(
    offsets: Index, drawn: npt.NDArray[np.bool_], key: Index, accept: Codes, seed: int, agree: Bytes
) -> None:
    """Draws, in place, which proposals the rejection verifier kept: position i of a request agrees
    iff u(seed, request, i) < accept[i].

    Verdicts are exact in distribution; what a stop reads is not. The codes recorded at a position
    are those of the coupled draft's proposal, not of the token that the rejection draft sampled,
    and a position drawn to disagree where the recorded proposal agreed has no branch of its own:
    what is read behind it comes from the next branch on the text.
    """
    for r in range(len(drawn)):
        if not drawn[r]:
            continue
        stream = int(np.int64(mix64(np.uint64(key[r]) + mix64(np.uint64(seed)))))
        for p in range(offsets[r], offsets[r + 1]):
            if agree[p] != AGREE_NONE:
                u = hash_uniform(stream, p - offsets[r])
                agree[p] = AGREE_YES if u * PROB_SCALE < accept[p] else AGREE_NO


@compiled()
def _tabulate(
    chains: Chains, offsets: Index, cached: Bytes, stop: CompiledStop, out: Words
) -> None:
    agree = chains.agree
    can_end = stop.active or chains.runs_out
    for r in range(len(chains.end_row)):
        begin, end = offsets[r], offsets[r + 1]
        run = 0
        for s in range(end - 1, begin - 1, -1):
            run = min(run + 1, ENDLESS) if agree[s] == AGREE_YES else 0
            cap, step_cap = int(ENDLESS), int(ENDLESS)
            if can_end:
                joint, branch, entry = 0, -1, 0
                for j in range(chains.gamma_max):
                    # The position after s + j tokens on the text, or the entry of the branch that
                    # the chain is on.
                    p = s + j
                    if branch < 0 and p == end:
                        branch, entry = chains.end_row[r], 0
                    if branch < 0:
                        missing = agree[p] == AGREE_NONE
                        logp_code, entropy_code = int(chains.logp[p]), int(chains.entropy[p])
                        if agree[p] == AGREE_NO:
                            branch, entry = chains.row[p], 0
                    else:
                        missing = entry >= chains.branch_len[branch]
                        logp_code = int(chains.branch_logp[branch, entry])
                        entropy_code = int(chains.branch_entropy[branch, entry])
                        entry += 1
                    joint += logp_code
                    if missing or should_stop(stop, logp_code, joint, entropy_code):
                        cap, step_cap = (j + 1 if stop.keep_last and not missing else j), j + 1
                        break
            out[s] = run | (cap << 8) | (step_cap << 16) | (int(cached[s]) << 24)

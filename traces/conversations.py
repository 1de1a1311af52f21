"""Which requests are turns of one conversation. They share most of what a model reads, so they say
less than as many requests that share nothing, and what was fitted to one has seen the others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from spectune.traces.schema import Tokens
    from spectune.traces.tables import Trajectory

Index = npt.NDArray[np.int64]
_TURN: Final = re.compile(r"(.+)/turn[0-9]+", re.DOTALL)


def turn_id(conversation: str, turn: int) -> str:
    """The id of a turn, from 1: ``ID``, ``ID/turn2``, ``ID/turn3``, ..."""
    return f"{conversation}/turn{turn}" if turn > 1 else conversation


def conversations(ids: Sequence[str], texts: Sequence[Tokens | None] | None = None) -> Index:
    """The number of each request's conversation, int64 [requests]: from 0, by the first request of
    each.

    Requests are of one conversation where their ids say so (:func:`turn_id`), and where the prompt
    of one begins with prompt and text of an earlier one: ``texts``, in the order of requests, None
    where one is not known. To begin alike, as under one system prompt, is not enough.
    """
    turns = [match and match[1] for match in map(_TURN.fullmatch, ids)]
    named = set(turns)
    first: dict[str, int] = {}
    root = list(range(len(ids)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = i = root[root[i]]
        return i

    links = [*_continuations(texts or ())]
    for i, (name, turn) in enumerate(zip(ids, turns, strict=True)):
        if turn or name in named:
            links.append((i, first.setdefault(turn or name, i)))
    for i, earlier in links:
        one, other = find(i), find(earlier)
        root[max(one, other)] = min(one, other)
    _, numbers = np.unique([find(i) for i in range(len(ids))], return_inverse=True)
    return numbers.astype(np.int64)


def conversations_of(texts: Sequence[Trajectory]) -> Index:
    """:func:`conversations` of recorded requests."""
    return conversations([t.request_id for t in texts], [t.tokens for t in texts])


def summed(values: npt.ArrayLike, groups: Index) -> npt.NDArray[Any]:
    """The sums over requests of each conversation, [conversations, ...], of ``values`` [requests,
    ...] whose conversations are ``groups``."""
    _, places = np.unique(groups, return_inverse=True)
    rows = np.asarray(values)
    sums = np.zeros((places.max(initial=-1) + 1, *rows.shape[1:]), rows.dtype)
    np.add.at(sums, places, rows)
    return sums


def variance_of_mean(variance: float, weights: npt.NDArray[np.float64]) -> tuple[float, float]:
    """(the variance of a mean of values of this ``variance``, its degrees of freedom) by Kish's
    effective number of values, sum(w)^2 / sum(w^2): where a few weigh most (``weights``, float64
    [values]), they are what it rests on, and their own deviations are understated."""
    n = len(weights)
    effective = float(weights.sum() ** 2 / (weights**2).sum())
    if effective <= 1.0 + 1e-9:
        return 0.0, 0.0
    inflation = (1 - 1 / n) / (1 - 1 / effective)
    return variance / n * inflation, max(1.0, effective - 1.0)


def _continuations(texts: Sequence[Tokens | None]) -> Iterator[tuple[int, int]]:
    """(a request, the earlier one whose prompt and text its prompt begins with): the one with the
    longest text, of equal ones the latest that nothing continues yet."""
    prompts, ends, end_of = defaultdict[bytes, list[int]](list), set[bytes](), dict[int, bytes]()
    for i, text in enumerate(texts):
        if text is not None:
            # A chat template writes what ends a turn in its own way, so its last token may differ.
            kept = text.output[: max(1, len(text.output) - 1)]
            prompts[_bytes(text.prompt)].append(i)
            if len(kept):
                end_of[i] = _bytes(text.prompt) + _bytes(kept)
                ends.add(end_of[i])
    # In order of content, what a prompt begins with comes before it with nothing else between.
    begins: dict[int, list[bytes]] = {}
    stack: list[bytes] = []
    for content in sorted(ends.union(prompts)):
        while stack and not content.startswith(stack[-1]):
            stack.pop()
        if content in ends:
            stack.append(content)
        begins.update(dict.fromkeys(prompts.get(content, ()), stack[::-1]))
    waiting, latest = defaultdict[bytes, list[int]](list), dict[bytes, int]()
    for i in range(len(texts)):
        begun = next((end for end in begins.get(i, ()) if end in latest), None)
        if begun is not None:
            yield i, waiting[begun].pop() if waiting[begun] else latest[begun]
        if i in end_of:
            waiting[end_of[i]].append(i)
            latest[end_of[i]] = i


def _bytes(tokens: npt.NDArray[np.int32]) -> bytes:
    """Bytes that sort as the tokens do."""
    return tokens.astype(">i4").tobytes()

"""Which requests are fitted to, searched on, raced on and confirmed on: each in one part only, and
all turns of a conversation in the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from spectune.traces.store import TraceStore

SPLIT = "scfrscfrsc"
"""Where a category's conversations go in turn, and again from the beginning: to search, confirm,
fit or race."""


class Parts(NamedTuple):
    """Requests, by number, each in one part: a fifth that bins, classifiers, trees, shortlists and
    choosers are fitted to, three tenths on which a search judges them and all policies, a fifth on
    which a race chooses, three tenths on which its choice is confirmed."""

    fit: list[int]
    search: list[int]
    race: list[int]
    confirm: list[int]


def deal(requests: Sequence[tuple[str, int, str | None]]) -> list[str]:
    """The part of each request, a letter of :data:`SPLIT`, by its category, its conversation
    (:func:`traces.conversations.conversations`) and the part that it has already, which stays.

    Conversations are dealt whole: one of which a request has a part goes there, the others are
    dealt out in turn by the category of their first request, so that a prefix of a workload is
    dealt like all of it. Each category begins one place later than the one before, so that
    categories of a conversation or two fill every part.
    """
    place: dict[str, int] = {}
    category_of: dict[int, str] = {}
    part_of: dict[int, str] = {}
    for category, conversation, part in requests:
        place.setdefault(category, len(place))
        category_of.setdefault(conversation, category)
        if part is not None:
            part_of.setdefault(conversation, part)
    for conversation in part_of:
        place[category_of[conversation]] += 1
    for conversation, category in category_of.items():
        if conversation not in part_of:
            part_of[conversation] = SPLIT[place[category] % len(SPLIT)]
            place[category] += 1
    return [part or part_of[conversation] for _, conversation, part in requests]


def split(categories: Sequence[str], of: Sequence[int] | None = None) -> Parts:
    """The parts of a workload that is not recorded yet, by the category of each request and the
    number ``of`` its conversation (None: each is one of its own)."""
    numbers = range(len(categories)) if of is None else of
    rows = [(category, n, None) for category, n in zip(categories, numbers, strict=True)]
    return _numbered(enumerate(deal(rows)))


def recorded_parts(store: TraceStore, recording: str, ordinals: Sequence[int]) -> Parts:
    """The parts of some of a recording's requests, by their place in ``ordinals``.

    Each request is dealt once, damaged ones included, and its part is stored with it: who cannot
    read one has the others in the same parts as who can, and what is recorded later moves none. A
    later turn goes where its conversation is."""
    parts = store.request_parts(recording, deal)
    return _numbered((i, parts[n]) for i, n in enumerate(ordinals) if n in parts)


def _numbered(parts: Iterable[tuple[int, str]]) -> Parts:
    numbers: dict[str, list[int]] = {letter: [] for letter in "fsrc"}
    for number, part in parts:
        numbers[part].append(number)
    return Parts(*numbers.values())


def mixed(
    part: Iterable[int], categories: Sequence[str], of: Sequence[int] | None = None
) -> list[int]:
    """The same requests in an order whose every beginning holds each category in proportion, and as
    many conversations as it can (``of``: the number of each request's; None: each is one of its
    own): what time cuts short is then not one category's, nor the turns of a few."""
    places: dict[tuple[int, str], list[int]] = {}
    turns: Counter[int] = Counter()
    for i in part:
        turn = turns[i if of is None else of[i]]
        turns[i if of is None else of[i]] += 1
        places.setdefault((turn, categories[i]), []).append(i)
    placed = [
        (turn, (n + 0.5) / len(group), i)
        for (turn, _), group in places.items()
        for n, i in enumerate(group)
    ]
    return [i for *_, i in sorted(placed)]

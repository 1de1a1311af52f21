"""Which requests are fitted to, searched on, raced on and confirmed on: each in one part only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from spectune.traces.store import TraceStore

SPLIT = "scfrscfrsc"
"""Where a category's requests go in turn, and again from the beginning: to search, confirm, fit or
race."""


class Parts(NamedTuple):
    """Requests, by number, each in one part: a fifth that bins, classifiers, trees, shortlists and
    choosers are fitted to, three tenths on which a search judges them and all policies, a fifth on
    which a race chooses, three tenths on which its choice is confirmed."""

    fit: list[int]
    search: list[int]
    race: list[int]
    confirm: list[int]


def deal(requests: Sequence[tuple[str, str | None]]) -> list[str]:
    """The part of each request, a letter of :data:`SPLIT`, by its category and the part that it has
    already, which stays.

    A category's requests are dealt out in turn, so that a prefix of a workload is dealt like all of
    it; each category begins one place later than the one before, so that categories of a request or
    two fill every part.
    """
    place: dict[str, int] = {}
    for category, part in requests:
        place.setdefault(category, len(place))
        place[category] += part is not None
    parts = []
    for category, part in requests:
        if part is None:
            part = SPLIT[place[category] % len(SPLIT)]
            place[category] += 1
        parts.append(part)
    return parts


def split(categories: Sequence[str]) -> Parts:
    """The parts of a workload that is not recorded yet, by the category of each request."""
    return _numbered(enumerate(deal([(category, None) for category in categories])))


def recorded_parts(store: TraceStore, recording: str, ordinals: Sequence[int]) -> Parts:
    """The parts of some of a recording's requests, by their place in ``ordinals``.

    Each request is dealt once, damaged ones included, and its part is stored with it: who cannot
    read one has the others in the same parts as who can, and what is recorded later moves none."""
    parts = store.request_parts(recording, deal)
    return _numbered((i, parts[n]) for i, n in enumerate(ordinals) if n in parts)


def _numbered(parts: Iterable[tuple[int, str]]) -> Parts:
    numbers: dict[str, list[int]] = {letter: [] for letter in "fsrc"}
    for number, part in parts:
        numbers[part].append(number)
    return Parts(*numbers.values())


def mixed(part: Iterable[int], categories: Sequence[str]) -> list[int]:
    """The same requests in an order whose every beginning holds each category in proportion: what
    time cuts short is then not one category's."""
    places: dict[str, list[int]] = {}
    for i in part:
        places.setdefault(categories[i], []).append(i)
    placed = [((n + 0.5) / len(group), i) for group in places.values() for n, i in enumerate(group)]
    return [i for _, i in sorted(placed)]

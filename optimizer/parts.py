"""Which requests are searched on, raced on and confirmed on: each in one part only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from spectune.traces.store import TraceStore

SPLIT = "scsrscsrsc"
"""Where a category's requests go in turn, and again from the beginning: to search, confirm or race.
"""


class Parts(NamedTuple):
    """Requests, by number, each in one part: half to search and fit on, a fifth on which a race
    chooses, three tenths on which its choice is confirmed."""

    search: list[int]
    race: list[int]
    confirm: list[int]


def split(categories: Sequence[str]) -> Parts:
    """The parts of a recording or workload, by the category of each request; the same each time.

    A category's requests are dealt out in turn (:data:`SPLIT`), so that a prefix of the workload is
    split like the whole; each category begins one place later than the one before, so that
    categories of a request or two fill every part.
    """
    parts: dict[str, list[int]] = {"s": [], "r": [], "c": []}
    seen: dict[str, int] = {}
    for i, category in enumerate(categories):
        n = seen.setdefault(category, len(seen))
        seen[category] = n + 1
        parts[SPLIT[n % len(SPLIT)]].append(i)
    return Parts(parts["s"], parts["r"], parts["c"])


def recorded_parts(store: TraceStore, recording: str, ordinals: Sequence[int]) -> Parts:
    """The parts of some of a recording's requests, by their place in ``ordinals``.

    All requests of the recording are dealt, damaged ones included: who cannot read one of them has
    the others in the same parts as who can."""
    categories = store.request_categories(recording)
    place = {ordinal: i for i, ordinal in enumerate(ordinals)}
    dealt = split(list(categories.values()))
    numbers = [place.get(ordinal) for ordinal in categories]
    return Parts(*([i for n in part if (i := numbers[n]) is not None] for part in dealt))


def mixed(part: Iterable[int], categories: Sequence[str]) -> list[int]:
    """The same requests in an order whose every beginning holds each category in proportion: what
    time cuts short is then not one category's."""
    places: dict[str, list[int]] = {}
    for i in part:
        places.setdefault(categories[i], []).append(i)
    placed = [((n + 0.5) / len(own), i) for own in places.values() for n, i in enumerate(own)]
    return [i for _, i in sorted(placed)]

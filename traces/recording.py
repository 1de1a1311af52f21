"""A recording as values: what was asked of it, and its requests with their trajectories, panoramas
and executed rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from spectune.traces.errors import TraceError
from spectune.traces.schema import Sampling, Step, Tokens, Trie, Verifier
from spectune.traces.tables import Panorama, Recording, Trajectory

TREE_WIDTH = 8
"""Children of a node of recorded trees where nobody says."""


@dataclass(frozen=True)
class Asked:
    """What a recording is asked for: equal questions, equal hash."""

    pair_id: str
    workload_id: str | None
    sampling: Sampling
    max_new_tokens: int
    verifier: Verifier = "coupled"
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = "record"


class ServedRequest(NamedTuple):
    """A request as its server noted it, whether its text is stored or not: where it is stored, the
    tokens of its prompt, and its rounds."""

    recording: str
    ordinal: int
    n_prompt: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class RecordedRequest:
    """One request of a recording: its place, its trajectory, a panorama per draft, and the rounds
    it was decoded by."""

    ordinal: int
    trajectory: Trajectory
    panoramas: Mapping[str, Panorama] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()

    @property
    def n_prompt(self) -> int:
        """Tokens of its prompt."""
        return len(self.trajectory.prompt_ids)

    def after_first(self) -> RecordedRequest:
        """The same from the second token on, its first read as a part of the prompt; without
        rounds."""
        t, output = self.trajectory, self.trajectory.output_ids
        tokens = Tokens(np.concatenate((t.prompt_ids, output[:1])), output[1:])
        text = replace(t, tokens=tokens, max_new_tokens=t.max_new_tokens - 1)
        panoramas = {name: _after_first(p) for name, p in self.panoramas.items()}
        return RecordedRequest(self.ordinal, text, panoramas)


def _after_first(panorama: Panorama) -> Panorama:
    trie, on_text = panorama.trie, panorama.positions + 1
    root = np.arange(len(trie.text_slot))
    while (off := root >= on_text).any():
        root[off] = trie.parent[root[off] - on_text]
    rest = root > 0
    number = np.cumsum(rest, dtype=np.int32) - 1
    columns = {f.name: getattr(trie, f.name) for f in fields(trie)}
    columns["accept"] = trie.accept[1:]
    for name in columns.keys() - {"accept"}:
        columns[name] = columns[name][rest[on_text:] if name in ("parent", "slot") else rest]
    columns["parent"] = number[columns["parent"]]
    return replace(panorama, trie=Trie(**columns))


@dataclass(frozen=True)
class Skipped:
    """A damaged chunk that was left out: ``draft`` is None when it was the trajectory itself."""

    recording: str
    ordinal: int
    draft: str | None
    problem: str

    def __str__(self) -> str:
        panorama = f"the panorama of draft {self.draft!r} of " if self.draft else ""
        return f"{panorama}request {self.ordinal} of {self.recording}: {self.problem}"


@dataclass(frozen=True)
class LoadedRecording:
    """A recording in memory: ``requests`` in order of their ordinals, and the damaged chunks that
    were left out."""

    info: Recording
    requests: tuple[RecordedRequest, ...]
    skipped: tuple[Skipped, ...] = ()

    @cached_property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(r.trajectory for r in self.requests)

    @property
    def drafts(self) -> tuple[str, ...]:
        """Drafts that have a panorama of every request, by name."""
        names = {name for r in self.requests for name in r.panoramas}
        return tuple(sorted(n for n in names if all(n in r.panoramas for r in self.requests)))

    def panoramas(self, draft: str) -> tuple[Panorama, ...]:
        """One panorama per trajectory, in order. Raises :class:`TraceError` if any is missing (see
        :meth:`having`)."""
        found = tuple(r.panoramas[draft] for r in self.requests if draft in r.panoramas)
        if len(found) < len(self.requests):
            have = ", ".join(self.drafts) or "none"
            raise TraceError(
                f"recording {self.info.id} has {len(found)} panoramas of draft {draft!r} for "
                f"{len(self.requests)} requests (complete drafts: {have}); `record --resume "
                f"{self.info.id}` makes the missing ones"
            )
        return found

    def having(self, drafts: Iterable[str]) -> LoadedRecording:
        """The part whose requests have a panorama of every draft named."""
        wanted = set(drafts)
        requests = (r for r in self.requests if wanted <= r.panoramas.keys())
        return replace(self, requests=tuple(requests))

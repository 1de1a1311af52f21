"""A recording as values: what was asked of it, and its requests with their trajectories, panoramas
and executed rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np

from spectune.traces.errors import TraceError
from spectune.traces.schema import Panorama, Sampling, Step, Trajectory, Verifier

TREE_WIDTH, TREE_DEPTH = 8, 8
"""Children and levels of recorded trees where nobody says."""


def how_to_record_trees(recording: str, width: int = TREE_WIDTH, depth: int = TREE_DEPTH) -> str:
    """The command that makes trees, for messages."""
    return f"`record --resume {recording} --tree-width {width} --tree-depth {depth}` makes them"


@dataclass(frozen=True)
class Extent:
    """Stored panoramas of one draft: of how many requests, and what all of these hold: tokens of a
    chain, children of a node, levels of a tree."""

    count: int
    gamma_max: int
    width: int
    depth: int

    @property
    def has_trees(self) -> bool:
        return self.width > 1


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


DESIGNED = "profile"
"""The source of what ``profile --engine`` served: steps whose costs were sought, and no traffic."""


@dataclass(frozen=True)
class RecordingInfo:
    """A recording without its chunks.

    ``state`` is ``recording`` until it is ``complete``. ``source`` is ``record``, ``serve``,
    ``gathered`` or :data:`DESIGNED`. ``n_requests``, ``n_output_tokens`` and ``drafts`` (the
    panoramas of each) count what is stored now.
    """

    id: str
    pair_id: str
    workload_id: str | None
    source: str
    state: str
    sampling: Sampling
    max_new_tokens: int
    verifier: Verifier
    options: Mapping[str, Any]
    progress: Mapping[str, Any]
    created_at: datetime
    finished_at: datetime | None
    n_requests: int = 0
    n_output_tokens: int = 0
    drafts: Mapping[str, Extent] = field(default_factory=dict)

    @property
    def with_trees(self) -> tuple[str, ...]:
        """The drafts whose panoramas hold trees."""
        return tuple(draft for draft, extent in self.drafts.items() if extent.has_trees)

    @property
    def engine(self) -> str:
        """What decoded it, ``native`` where it does not say."""
        return str(self.options.get("engine", "native"))

    def shown(self) -> str:
        """Each draft with what its panoramas hold, and of how many requests where not all have one;
        for people."""
        parts = []
        for draft, e in self.drafts.items():
            trees = f" and trees {e.width}x{e.depth}" if e.has_trees else ""
            of = "" if e.count == self.n_requests else f" ({e.count} of {self.n_requests})"
            parts.append(f"{draft} {e.gamma_max}{trees}{of}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; moments in ISO 8601."""
        return {
            **asdict(self),
            "created_at": self.created_at.isoformat(),
            "finished_at": self.finished_at and self.finished_at.isoformat(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RecordingInfo:
        """The inverse of :meth:`to_json`. Raises TypeError, ValueError or KeyError for what is
        none."""
        moments = {
            name: data[name] and datetime.fromisoformat(data[name])
            for name in ("created_at", "finished_at")
        }
        drafts = {d: Extent(**e) for d, e in data["drafts"].items()}
        sampling = Sampling(**data["sampling"])
        return cls(**{**data, **moments, "drafts": drafts, "sampling": sampling})


@dataclass(frozen=True)
class RecordedRequest:
    """One request of a recording: its place, its trajectory, a panorama per draft, and the rounds
    it was decoded by."""

    ordinal: int
    trajectory: Trajectory
    panoramas: Mapping[str, Panorama] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()

    def after_first(self) -> RecordedRequest:
        """The same from the second token on, its first read as a part of the prompt; without
        rounds."""
        t = self.trajectory
        rest = replace(
            t,
            prompt_ids=np.concatenate((t.prompt_ids, t.output_ids[:1])),
            output_ids=t.output_ids[1:],
            max_new_tokens=t.max_new_tokens - 1,
        )
        panoramas = {name: _after_first(p) for name, p in self.panoramas.items()}
        return RecordedRequest(self.ordinal, rest, panoramas)


def _after_first(panorama: Panorama) -> Panorama:
    on_text = panorama.positions + 1
    root = np.arange(len(panorama.text_slot))
    while (off := root >= on_text).any():
        root[off] = panorama.parent[root[off] - on_text]
    kept = root > 0
    number = np.cumsum(kept, dtype=np.int32) - 1
    columns = {name: getattr(panorama, name) for name in panorama.columns()}
    columns["accept"] = panorama.accept[1:]
    for name in columns.keys() - {"accept"}:
        columns[name] = columns[name][kept[on_text:] if name in ("parent", "slot") else kept]
    columns["parent"] = number[columns["parent"]]
    return replace(panorama, **columns)


@dataclass(frozen=True)
class Skipped:
    """A damaged chunk that was left out: ``draft`` is None when it was the trajectory itself."""

    recording: str
    ordinal: int
    draft: str | None
    problem: str


@dataclass(frozen=True)
class Recording:
    """A recording in memory: ``requests`` in order of their ordinals, and the damaged chunks that
    were left out."""

    info: RecordingInfo
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

    def having(self, drafts: Iterable[str]) -> Recording:
        """The part whose requests have a panorama of every draft named."""
        wanted = set(drafts)
        requests = (r for r in self.requests if wanted <= r.panoramas.keys())
        return replace(self, requests=tuple(requests))

"""A recording as values: what was asked of it, and its requests with their trajectories, panoramas and executed rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from traces.errors import TraceError
from traces.schema import ChainPanorama, Sampling, Step, Trajectory, Verifier


@dataclass(frozen=True)
class RecordingInfo:
    """A recording without its chunks.

    ``state`` is ``recording`` until it is finished (``complete``, or ``abandoned``). ``source`` is ``record`` or ``serve``.
    ``n_requests``, ``n_output_tokens`` and ``drafts`` (draft to number of panoramas) count what is stored now.
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
    drafts: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; moments in ISO 8601."""
        return {
            **asdict(self),
            "created_at": self.created_at.isoformat(),
            "finished_at": self.finished_at and self.finished_at.isoformat(),
        }


@dataclass(frozen=True)
class RecordedRequest:
    """One request of a recording: its place, its trajectory, a panorama per draft, and the rounds it was decoded by."""

    ordinal: int
    trajectory: Trajectory
    panoramas: Mapping[str, ChainPanorama] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A damaged chunk that was left out: ``draft`` is None when it was the trajectory itself."""

    recording: str
    ordinal: int
    draft: str | None
    problem: str


@dataclass(frozen=True)
class Recording:
    """A recording in memory: ``requests`` in order of their ordinals, and the damaged chunks that were left out."""

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

    def panoramas(self, draft: str) -> tuple[ChainPanorama, ...]:
        """One panorama per trajectory, in order. Raises :class:`TraceError` if any is missing (see :meth:`having`)."""
        found = tuple(r.panoramas[draft] for r in self.requests if draft in r.panoramas)
        if len(found) < len(self.requests):
            have = ", ".join(self.drafts) or "none"
            raise TraceError(
                f"recording {self.info.id} has {len(found)} panoramas of draft {draft!r} for {len(self.requests)} requests "
                f"(complete drafts: {have}); `cli.py record --resume {self.info.id}` makes the missing ones"
            )
        return found

    def having(self, drafts: Iterable[str]) -> Recording:
        """The part whose requests have a panorama of every draft named."""
        wanted = tuple(drafts)
        return replace(self, requests=tuple(r for r in self.requests if all(d in r.panoramas for d in wanted)))

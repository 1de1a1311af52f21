"""Importing this module registers every table on :data:`metadata`, the scheduler's included."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from spectune.db.base import Base
from spectune.db.models import ArtifactRow, Packed, PanoramaChunkRow, StepChunkRow, StudyRow, TrajectoryRow

if find_spec("spectune.db.schedules") is not None:
    import_module("spectune.db.schedules")

metadata = Base.metadata
PACKED: tuple[type[Packed], ...] = (TrajectoryRow, PanoramaChunkRow, StepChunkRow, ArtifactRow, StudyRow)
"""Tables whose rows hold a checksummed blob."""

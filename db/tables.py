"""Importing this module registers every table on :data:`metadata`, the scheduler's included."""

from __future__ import annotations

from spectune.db import schedules as schedules
from spectune.db.base import Base
from spectune.db.models import (
    ArtifactRow,
    Packed,
    PanoramaChunkRow,
    StepChunkRow,
    StudyRow,
    TrajectoryRow,
)

metadata = Base.metadata
PACKED: tuple[type[Packed], ...] = (
    TrajectoryRow,
    PanoramaChunkRow,
    StepChunkRow,
    ArtifactRow,
    StudyRow,
)
"""Tables whose rows hold a checksummed blob."""

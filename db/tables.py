"""Importing this module registers every table on :data:`metadata`, the scheduler's included."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from db import models
from db.base import Base

if find_spec("db.schedules") is not None:
    import_module("db.schedules")

metadata = Base.metadata
PACKED: tuple[type[models.Packed], ...] = (
    models.TrajectoryRow,
    models.PanoramaChunkRow,
    models.StepChunkRow,
    models.ArtifactRow,
    models.StudyRow,
)
"""Tables whose rows hold a checksummed blob."""

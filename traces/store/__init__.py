"""The store: values in, values out, rows never. One face over recordings, documents and
publications."""

from __future__ import annotations

from spectune.traces.recording import RecordedRequest, Recording, RecordingInfo, Skipped
from spectune.traces.store.catalog import (
    Artifact,
    Catalog,
    Run,
    StoredPair,
    StoredPolicy,
    StoredProfile,
    Study,
)
from spectune.traces.store.publications import Acknowledgement, AckStatus, Publication, Publications
from spectune.traces.store.recordings import Recordings

__all__ = [
    "AckStatus",
    "Acknowledgement",
    "Artifact",
    "Publication",
    "RecordedRequest",
    "Recording",
    "RecordingInfo",
    "Run",
    "Skipped",
    "StoredPair",
    "StoredPolicy",
    "StoredProfile",
    "Study",
    "TraceStore",
]


class TraceStore(Recordings, Catalog, Publications):
    """Everything that is stored, over an open :class:`db.Database`:
    ``TraceStore(open_database("spectune.db"))``.

    Safe to share between threads. Every method is one transaction unless it says otherwise, and
    raises :class:`db.DatabaseError` (or one of its kinds) with one line for the user.
    """

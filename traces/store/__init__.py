"""The store: one face over recordings, documents and publications."""

from __future__ import annotations

from spectune.traces.recording import Asked
from spectune.traces.store.alarms import Alarms
from spectune.traces.store.catalog import Catalog
from spectune.traces.store.followed import Followed
from spectune.traces.store.recordings import Recordings
from spectune.traces.store.rollouts import Rollouts

__all__ = ["Asked", "TraceStore"]


class TraceStore(Recordings, Catalog, Rollouts, Followed, Alarms):
    """Everything that is stored, over an open :class:`db.Database`:
    ``TraceStore(open_database("spectune.db"))``.

    Safe to share between threads. Every method is one transaction unless it says otherwise, and
    raises :class:`db.DatabaseError` (or one of its kinds) with one line for the user.
    """

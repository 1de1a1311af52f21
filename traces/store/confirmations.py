"""How often requests were held out to confirm a policy: who tunes again chooses by what the earlier
confirmations said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from sqlalchemy import or_, select, update

from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording, Trajectory


def count_confirmation(store: TraceStore, recording: str, ordinals: Collection[int]) -> int:
    """Counts a confirmation on these requests of a recording, and returns how many there had been
    on any of them, whatever recording of this pair and workload they were in."""
    t, r = Trajectory, Recording
    with store.database.write() as session:
        info = session.get_one(r, recording)
        same = [r.id == info.id]
        if info.workload_id is not None:
            same.append(r.workload_id == info.workload_id)
        query = select(t.recording_id, t.ordinal, t.request_id, t.confirmations)
        query = query.join(r, r.id == t.recording_id).where(r.pair_id == info.pair_id, or_(*same))
        earlier, held = Counter[str](), set[str]()
        for name, ordinal, request, count in session.execute(query):
            earlier[request] += count
            if name == info.id and ordinal in ordinals:
                held.add(request)
        these = (t.recording_id == info.id, t.ordinal.in_(sorted(ordinals)))
        session.execute(update(t).where(*these).values(confirmations=t.confirmations + 1))
        return max((earlier[request] for request in held), default=0)

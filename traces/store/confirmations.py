"""How often requests were held out to confirm a policy: who tunes again chooses by what the earlier
confirmations said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from sqlalchemy import or_, select, update

from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording, Trajectory

Same = tuple[str, int | str]
"""Which request it is: its workload and its id there, else where it is stored."""


def count_confirmation(store: TraceStore, recording: str, ordinals: Collection[int]) -> int:
    """Counts a confirmation on these requests of a recording, and returns how many there had been
    on any of them, whatever recording of this pair and workload they were in."""
    t, r = Trajectory, Recording
    places = store.text_places(recording)
    held = {places[n] for n in ordinals if n in places}
    stored_in = {name for name, _ in held}
    with store.database.write() as session:
        pair = session.get_one(r, recording).pair_id
        workloads = select(r.workload_id).where(r.id.in_(stored_in))
        query = select(t.recording_id, t.ordinal, t.request_id, r.workload_id, t.confirmations)
        query = query.join(r, r.id == t.recording_id).where(
            r.pair_id == pair, or_(r.id.in_(stored_in), r.workload_id.in_(workloads))
        )
        earlier, of_held = Counter[Same](), set[Same]()
        for name, ordinal, request, workload, count in session.execute(query):
            same: Same = (name, ordinal) if workload is None else (workload, request)
            earlier[same] += count
            if (name, ordinal) in held:
                of_held.add(same)
        more = update(t).values(confirmations=t.confirmations + 1)
        for stored in stored_in:
            these = [ordinal for name, ordinal in held if name == stored]
            session.execute(more.where(t.recording_id == stored, t.ordinal.in_(these)))
        return max((earlier[same] for same in of_held), default=0)

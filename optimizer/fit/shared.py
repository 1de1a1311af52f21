"""What every fit does: reads the part of a recording that is fitted to, and stores what came of
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from spectune.optimizer.tuning.parts import recorded_parts
from spectune.optimizer.tuning.sources import recording_named
from spectune.runtime.pair import PairSpec
from spectune.traces.errors import TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Trajectory


@dataclass(frozen=True)
class StoredFit:
    """What was fitted and stored: the artifact's id and kind, its document, and a policy to begin
    with that uses it."""

    artifact: str
    kind: str
    document: dict[str, Any]
    policy: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        about = {"artifact": self.artifact, "kind": self.kind}
        return {**about, **self.document, "policy": self.policy}


def keep(
    store: TraceStore,
    kind: str,
    document: dict[str, Any],
    arrays: Mapping[str, npt.NDArray[Any]] | None = None,
    *,
    policy: Callable[[str], dict[str, Any]],
) -> StoredFit:
    """Stores what was fitted for the ``pair`` that its document names; ``policy`` makes one from
    the artifact's id. The same fit is the same artifact."""
    origin = {"recording": document.get("recording")}
    pair_id = document["pair"]
    artifact = store.put_artifact(kind, document, arrays or {}, pair_id=pair_id, provenance=origin)
    return StoredFit(artifact, kind, document, policy(artifact))


def texts_to_fit(store: TraceStore, recording: str, spec: PairSpec) -> list[Trajectory]:
    """The texts of a recording that fits read; no search judges by them. Raises TraceError for a
    recording of another pair or without such texts."""
    info = recording_named(store, recording, pair=spec)
    requests = store.load(info.id, [], skip_corrupted=True).requests
    parts = recorded_parts(store, info.id, [r.ordinal for r in requests])
    if not parts.fit:
        raise TraceError(too_few_to_fit(info.id, len(requests)))
    return [requests[i].trajectory for i in parts.fit]


def too_few_to_fit(recording: str, requests: int) -> str:
    return (
        f"recording {recording}: none of its {requests} usable requests is one to fit to (a fifth "
        "of each category is); record more"
    )

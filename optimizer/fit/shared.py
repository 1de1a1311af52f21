"""What every fit does: reads the part of a recording that a search may see, and stores what came of
it with its evidence."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.db.errors import CorruptedChunkError, NotFoundError
from spectune.optimizer.inputs import recording_of
from spectune.optimizer.parts import recorded_parts
from spectune.runtime.pair import PairSpec
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Artifact, LatencyProfile, Trajectory

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class StoredFit:
    """What was fitted and stored: the artifact's id and kind, its document, and a policy to begin
    with that uses it."""

    artifact: str
    kind: str
    document: dict[str, Any]
    policy: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        found = {"artifact": self.artifact, "kind": self.kind}
        return {**found, **self.document, "policy": self.policy}


def profile_of(
    store: TraceStore,
    pair_id: str,
    name: str | None,
    otherwise: str = "",
    *,
    device: str,
    dtype: str | None = None,
    hardware: str | None = None,
) -> tuple[LatencyProfile, str]:
    """A stored profile, by default the latest of a pair, device, dtype and hardware, and its id.
    Raises TraceError where there is none, saying what else could be done, and for another
    pair's."""
    found = store.profile_of(pair_id, name, device=device, dtype=dtype, hardware=hardware)
    if found is None:
        on = " in ".join(x for x in (hardware or device, dtype) if x)
        raise TraceError(
            f"there is no latency profile of pair {pair_id} on {on}: run `profile`{otherwise}"
        )
    if found.pair_id != pair_id:
        raise TraceError(f"--profile {found.id} is of pair {found.pair_id}, not of pair {pair_id}")
    return found, found.id


def stored(store: TraceStore, flag: str, name: str, *kinds: str) -> Artifact:
    """An artifact of one of some kinds that a user named by a flag. Raises PolicyError for anything
    else."""
    try:
        found = store.get_artifact(name)
    except (NotFoundError, CorruptedChunkError) as error:
        raise PolicyError(f"{flag} {name}: {error}") from None
    if found.kind not in kinds:
        raise PolicyError(f"{flag} {name}: artifact {found.id} is a {found.kind}, not a {kinds[0]}")
    return found


def keep(
    store: TraceStore,
    kind: str,
    document: dict[str, Any],
    arrays: Arrays,
    *,
    pair_id: str,
    fitted_to: Sequence[npt.NDArray[Any]],
    **origin: Any,
) -> str:
    """Stores an artifact with where it comes from and the SHA-256 of the arrays it was fitted to;
    its id. The same fit is the same artifact."""
    evidence = hashlib.sha256()
    for array in fitted_to:
        evidence.update(f"{array.dtype.str} {array.shape}".encode())
        evidence.update(np.ascontiguousarray(array).tobytes())
    provenance = {**origin, "fitted_to": evidence.hexdigest()}
    return store.put_artifact(kind, document, arrays, pair_id=pair_id, provenance=provenance)


def held_out(group: npt.NDArray[Any], share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which examples are held out, bool [n]: those of a share of the groups [n], at least one,
    drawn by ``seed``. Raises ValueError for fewer than two groups."""
    groups = np.unique(group)
    if len(groups) < 2:
        raise ValueError(
            f"one group is held out of at least two, there are {len(groups)}: record more requests"
        )
    count = min(len(groups) - 1, max(1, round(share * len(groups))))
    return np.isin(group, np.random.default_rng(seed).permutation(groups)[:count])


def search_texts(
    store: TraceStore, recording: str, spec: PairSpec, *, half: bool = False
) -> list[Trajectory]:
    """The texts of a recording that fits may read: its search part, or one ``half`` of it, so that
    the other can judge. Raises TraceError for a recording of another pair or without texts."""
    info = recording_of(store, recording, spec)
    requests = store.load(info.id, [], skip_corrupted=True).requests
    parts = recorded_parts(store, info.id, [r.ordinal for r in requests])
    texts = [requests[i].trajectory for i in parts.search]
    if not texts:
        raise TraceError(f"recording {info.id} has no usable request")
    return one_half(texts) if half else texts


def one_half(texts: Sequence[Trajectory]) -> list[Trajectory]:
    """Every second text of each category, at least one; every second category begins with its
    second."""
    place: dict[str, int] = {}
    chosen = []
    for text in texts:
        n = place.setdefault(text.category, len(place))
        place[text.category] = n + 1
        if n % 2 == 0:
            chosen.append(text)
    return chosen or list(texts[:1])

"""What policies need that was fitted, kept in the database under the hash of its content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from db.errors import NotFoundError
from runtime.policies.machines import Q_LEARNING
from runtime.policies.prepared import QTables
from runtime.policies.windows import WindowController, export_q_table
from traces.errors import PolicyError
from traces.store import TraceStore

Q_TABLE = "q_table"


def q_tables(store: TraceStore) -> QTables:
    """Finds stored Q-tables by artifact id, for :func:`runtime.policies.prepared.prepare`."""

    def find(name: str) -> npt.NDArray[np.float64]:
        try:
            artifact = store.get_artifact(name)
        except NotFoundError:
            raise PolicyError(f"window.artifact: there is no artifact {name!r} in this database") from None
        if artifact.kind != Q_TABLE:
            raise PolicyError(f"window.artifact: artifact {name} is a {artifact.kind}, not a {Q_TABLE}")
        return np.asarray(artifact.arrays["values"], dtype=np.float64)

    return find


def keep_q_table(store: TraceStore, controller: WindowController, pair_id: str, provenance: Mapping[str, Any]) -> str:
    """Stores what a Q-learning window has learned, float64 [states, actions]; the artifact's id.

    Raises PolicyError for a window that learns nothing.
    """
    if controller.window.kind != Q_LEARNING:
        raise PolicyError("only a q_learning window learns a Q-table; this policy's window does not")
    table = export_q_table(controller.window, controller.state)
    document = {"states": table.shape[0], "actions": table.shape[1]}
    return store.put_artifact(Q_TABLE, document, {"values": table}, pair_id=pair_id, provenance=provenance)

"""What policies need that was fitted, kept in the database under the hash of its content."""

from __future__ import annotations

from collections.abc import Mapping

from spectune.db.database_errors import CorruptedChunkError, NotFoundError
from spectune.runtime.policies.artifacts import Artifacts, FittedArtifact
from spectune.traces.errors import PolicyError
from spectune.traces.store import TraceStore


def fitted(store: TraceStore, pair_id: str | None = None) -> Artifacts:
    """Finds artifacts by id or an unambiguous beginning of one, for
    :func:`runtime.policies.plan.prepare`; with ``pair_id`` only what was fitted for that pair.

    It raises PolicyError where there is none, or it is damaged. Each is read once, as an artifact
    never changes.
    """

    loaded: dict[str, FittedArtifact] = {}

    def find(name: str) -> FittedArtifact:
        if name not in loaded:
            try:
                artifact = store.get_artifact(name)
            except NotFoundError as error:
                raise PolicyError(
                    f"{error} in this database (`fit --help` says what makes them)"
                ) from None
            except CorruptedChunkError as error:
                raise PolicyError(str(error)) from None
            if pair_id is not None and artifact.pair_id not in (None, pair_id):
                raise PolicyError(
                    f"artifact {artifact.id} was fitted for pair {artifact.pair_id}, this is pair "
                    f"{pair_id}: fit one to a recording of this pair"
                )
            if not isinstance(artifact.document, Mapping):
                raise PolicyError(
                    f"artifact {artifact.id} ({artifact.kind}) cannot be used (its document is no "
                    "JSON object)"
                )
            loaded[name] = FittedArtifact(artifact.kind, artifact.document, artifact.arrays)
        return loaded[name]

    return find

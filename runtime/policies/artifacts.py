"""What policies need that was fitted: found by id, checked against the policy, read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy.typing as npt

from spectune.runtime.policies.document import MALFORMED, Policy
from spectune.traces.errors import PolicyError

BINS: Final = "bins"
CLASSIFIER: Final = "classifier"
STATIC_TREE: Final = "static_tree"
FREQUENCIES: Final = "frequencies"
ROUTER: Final = "router"
DRAFT_CHOOSER: Final = "draft_chooser"
COMMANDS: Final = {
    BINS: "fit bins --recording ID",
    CLASSIFIER: "fit classifier --recording ID",
    STATIC_TREE: "fit static-tree --recording ID",
    FREQUENCIES: "fit frequencies --recording ID",
    ROUTER: "fit router --recording ID",
    DRAFT_CHOOSER: "fit chooser --recording ID",
}
"""The kinds of artifacts, and the command that makes each."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class FittedArtifact:
    """What was fitted, as the runtime sees it: its kind, a JSON document and arrays."""

    kind: str
    document: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]


Artifacts = Callable[[str], FittedArtifact]
"""Finds an artifact by id; raises PolicyError when there is none."""


def read_artifact(
    policy: Policy,
    block: str,
    kind: str,
    artifacts: Artifacts | None,
    read: Callable[[Mapping[str, Any], Mapping[str, npt.NDArray[Any]]], T],
) -> T:
    """What ``read`` makes of the document and the arrays of the artifact that a policy's ``block``
    names.

    Raises PolicyError when it is missing, of another kind, was fitted on another draft, or ``read``
    finds it malformed."""
    name, where = getattr(policy, block).artifact, f"{block}.artifact: "
    if artifacts is None:
        raise PolicyError(
            f"{where}{name!r} cannot be looked up here; give a database that holds it"
        )
    try:
        artifact = artifacts(name)
    except PolicyError as error:
        raise PolicyError(f"{where}{error}") from None
    if problem := _misfit(policy, name, kind, artifact):
        raise PolicyError(f"{where}{problem}")
    try:
        return read(artifact.document, artifact.arrays)
    except (PolicyError, *MALFORMED) as error:
        problem = lacking(error).removeprefix(where)
        raise PolicyError(f"{where}{name}: {problem}") from None


def lacking(error: Exception) -> str:
    """What the reader of a stored document raised, in words."""
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def _misfit(policy: Policy, name: str, kind: str, artifact: FittedArtifact) -> str:
    """Why a policy cannot use an artifact; nothing where it can."""
    command, draft = COMMANDS[kind], artifact.document.get("draft")
    if artifact.kind != kind:
        return f"artifact {name} is a {artifact.kind}, not a {kind}; `{command}` makes one"
    if draft in (None, policy.draft):
        return ""
    return (
        f"{name} was fitted on draft {draft!r}, this policy drafts with {policy.draft!r}; "
        f"`{command} --draft {policy.draft}` makes one"
    )

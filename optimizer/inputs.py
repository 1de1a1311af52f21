"""What commands and calls take as workloads and policies, by name, file or id; and what they tell
of a policy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spectune.demo.prompts import demo_workload
from spectune.runtime.policies.document import (
    BUILT_IN,
    Policy,
    parse_policy,
)
from spectune.settings import RequestsSettings
from spectune.traces.errors import PolicyError, WorkloadError
from spectune.traces.files import parse_json, read_json
from spectune.traces.schema import Outcome, Workload
from spectune.traces.workload_files import read_workload
from spectune.traces.workloads import WorkloadRow, make_workload, take

ALL_REQUESTS = RequestsSettings()

if TYPE_CHECKING:
    from spectune.traces.store import TraceStore
    from spectune.traces.tables import Publication, StoredPolicy


def read_files(files: Sequence[str], requests: RequestsSettings = ALL_REQUESTS) -> Workload:
    """Returns ``demo``, or files read as one workload: those of its requests that are meant.

    Raises WorkloadError when malformed, empty, nothing is left of it, or a request has several
    turns and ``requests.turns`` is None.
    """
    if list(files) == ["demo"] or not files:
        workload = make_workload(
            "demo", (WorkloadRow(f"demo:{i}", line) for i, line in enumerate(demo_workload()))
        )
    elif "demo" in files:
        raise WorkloadError("--workload demo cannot be mixed with files; record them apart")
    else:
        workload = read_workload(
            files, turns=requests.turns, column=requests.column, bad_rows=requests.bad_rows
        )
    return narrow(workload, requests)


def narrow(workload: Workload, requests: RequestsSettings) -> Workload:
    """Returns the requests of some categories (all where none is named), ``limit`` of them as
    :func:`traces.workloads.take` draws them. Raises WorkloadError where none is left."""
    if requests.category:
        chosen = tuple(r for r in workload.requests if r.category in requests.category)
        if not chosen:
            categories = ", ".join(sorted({r.category for r in workload.requests}))
            raise WorkloadError(
                f"category {', '.join(requests.category)}: no such category in {workload.name}; it "
                f"has: {categories}"
            )
        workload = replace(workload, requests=chosen)
    return take(workload, requests.limit, seed=requests.seed)


def published_policy(publication: Publication) -> Policy:
    """The policy of a publication. Raises PolicyError naming its version where what was published
    is none."""
    return _stored(publication, f"publication {publication.version}")


def _stored(row: Publication | StoredPolicy, where: str) -> Policy:
    return parse_policy(row.document, where=where)


def named_policy(name: str) -> Policy | None:
    """A built-in policy, an inline JSON document, or a file; None when it is none of these (then it
    may be an id). Raises PolicyError naming file and mistake."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.lstrip().startswith("{"):
        return parse_policy(parse_json(name, "--policy", PolicyError), where="--policy")
    if os.path.isfile(name) or name.endswith(".json"):
        return parse_policy(
            read_json(name, f"--policy {name}", PolicyError, missing="No such file"), where=name
        )
    return None


def policy_of(
    store: TraceStore, name: str, pair_id: str, device: str, deployment: str
) -> Policy | None:
    """The policy of a name (:func:`named_policy`), of an id, or for ``active`` the one in force,
    None where none is. Raises PolicyError, and NotFoundError for an unknown id."""
    if (policy := named_policy(name)) is not None:
        return policy
    if name != "active":
        stored = store.get_policy(name)
        return _stored(stored, f"policy {stored.id}")
    active = store.active_publication(pair_id, device, deployment)
    return None if active is None else published_policy(active)


def outcome_json(outcome: Outcome, policy: Policy) -> dict[str, Any]:
    """What a policy came to, as ``run`` and ``simulate`` print it."""
    about = {"policy": policy.spelled_out(), "policy_id": policy.id, "label": policy.label()}
    return {**outcome.to_json(), **about}

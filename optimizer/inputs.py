"""What the commands take as workloads and policies, by name, file or id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spectune.demo.prompts import demo_workload
from spectune.runtime.policies.document import BUILT_IN, AnyPolicy, parse_policy
from spectune.traces.errors import PolicyError, WorkloadError
from spectune.traces.files import is_file, parse_json, read_json
from spectune.traces.schema import Workload
from spectune.traces.workload_files import read_workload
from spectune.traces.workloads import Line, Turns, make_workload, take

if TYPE_CHECKING:
    from spectune.traces.store.catalog import StoredPolicy
    from spectune.traces.store.publications import Publication


def load_workload(
    names: Sequence[str],
    *,
    turns: Turns | None = None,
    limit: int | None = None,
    categories: Sequence[str] = (),
    column: str | None = None,
    limit_seed: int = 0,
) -> Workload:
    """``demo``, or files and data sets read as one workload; ``turns`` says what is made of requests that have several, ``column``
    where the prompts are. Of ``limit`` requests :func:`traces.workloads.take` says which.

    Raises WorkloadError when malformed, empty, nothing is left of it, or a request has several turns and ``turns`` is None.
    """
    if list(names) == ["demo"] or not names:
        workload = make_workload("demo", (Line(f"demo:{i}", line) for i, line in enumerate(demo_workload())))
    elif "demo" in names:
        raise WorkloadError("--workload demo cannot be mixed with files; record them apart")
    else:
        workload = read_workload(names, turns=turns, column=column)
    if categories:
        kept = tuple(r for r in workload.requests if r.category in categories)
        if not kept:
            known = ", ".join(sorted({r.category for r in workload.requests}))
            raise WorkloadError(f"--category {', '.join(categories)}: no such category in {workload.name}; it has: {known}")
        workload = Workload(workload.name, kept)
    return take(workload, limit, seed=limit_seed)


def read_policy_file(path: str) -> AnyPolicy:
    """A policy document from a JSON file. Raises PolicyError naming file and mistake."""
    return parse_policy(read_json(path, f"--policy {path}", PolicyError, missing="No such file"), where=path)


def published_policy(publication: Publication) -> AnyPolicy:
    """The policy of a publication. Raises PolicyError naming its version where what was published is none."""
    return _stored(publication, f"publication {publication.version}")


def stored_policy(stored: StoredPolicy) -> AnyPolicy:
    """A policy kept in the database. Raises PolicyError naming its id where the document is none."""
    return _stored(stored, f"policy {stored.id}")


def _stored(row: Publication | StoredPolicy, where: str) -> AnyPolicy:
    if row.problem:
        raise PolicyError(f"{where}: the document {row.problem}")
    return parse_policy(row.document, where=where)


def named_policy(name: str) -> AnyPolicy | None:
    """A built-in policy, an inline JSON document, or a file; None when it is none of these (then it may be an id)."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.lstrip().startswith("{"):
        return parse_policy(parse_json(name, "--policy", PolicyError), where="--policy")
    if is_file(name) or name.endswith(".json"):
        return read_policy_file(name)
    return None

"""What the commands take as workloads and policies, by name, file or id."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.prompts import demo_workload
from runtime.policies.document import BUILT_IN, Policy, parse_policy
from traces.errors import PolicyError, WorkloadError
from traces.schema import Workload
from traces.workloads import make_workload, read_workload, take


def load_workload(
    names: Sequence[str], *, all_turns: bool = False, limit: int | None = None, categories: Sequence[str] = ()
) -> Workload:
    """``demo``, or JSONL files read as one workload. Raises WorkloadError when malformed, empty, or nothing is left of it."""
    if list(names) == ["demo"] or not names:
        workload = make_workload("demo", ((f"demo:{i}", line) for i, line in enumerate(demo_workload())), all_turns=all_turns)
    elif "demo" in names:
        raise WorkloadError("--workload demo cannot be mixed with files; record them apart")
    else:
        workload = read_workload(names, all_turns=all_turns)
    if categories:
        kept = tuple(r for r in workload.requests if r.category in categories)
        if not kept:
            known = ", ".join(sorted({r.category for r in workload.requests}))
            raise WorkloadError(f"--category {', '.join(categories)}: no such category in {workload.name}; it has: {known}")
        workload = Workload(workload.name, kept)
    return take(workload, limit)


def read_policy_file(path: str) -> Policy:
    """A policy document from a JSON file. Raises PolicyError naming file and mistake."""
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"--policy {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise PolicyError(f"{path}: not JSON ({error})") from None
    return parse_policy(data, where=path)


def named_policy(name: str) -> Policy | None:
    """A built-in policy, an inline JSON document, or a file; None when it is none of these (then it may be an id)."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.lstrip().startswith("{"):
        try:
            return parse_policy(json.loads(name), where="--policy")
        except ValueError as error:
            raise PolicyError(f"--policy: not JSON ({error})") from None
    if Path(name).is_file() or name.endswith(".json"):
        return read_policy_file(name)
    return None

"""Starting an engine by its name; what it needs is imported then."""

from __future__ import annotations

from spectune.engines.abilities import engine_named
from spectune.engines.engine import Running, Wanted
from spectune.runtime.pair import PairSpec
from spectune.traces.errors import EngineError


def start(name: str, spec: PairSpec, wanted: Wanted) -> Running:
    """A pair in an engine, ready to execute. Raises EngineError where the engine is not installed
    or cannot load it, PairError for a draft that the pair has not."""
    if name != "vllm":
        raise EngineError(f"{engine_named(name).title} is not executed from here; known: vllm")
    from spectune.engines.vllm.server import OwnServer

    return OwnServer(spec, wanted)

"""Starting an engine by its name; what it needs is imported then."""

from __future__ import annotations

from spectune.engines.abilities import engine_named
from spectune.engines.protocol import Running, Wanted
from spectune.runtime.pair import PairSpec
from spectune.traces.errors import EngineError, PairError


def start(name: str, spec: PairSpec, wanted: Wanted) -> Running:
    """A pair in an engine, ready to execute. Raises EngineError where the engine is not installed
    or cannot load it, PairError where the target's generation_config asks for what no engine is
    told."""
    engine = engine_named(name)
    if spec.settings:
        raise PairError(
            f"target: its generation_config asks for {min(spec.settings)}, which {engine.title} is "
            "not told of; a pair file with "
            '"generation_config": false ignores it'
        )
    if name == "openvino":
        from spectune.engines.openvino import OpenVino

        return OpenVino(spec, wanted)
    if name == "vllm":
        from spectune.engines.vllm.execute import Vllm

        return Vllm(spec, wanted)
    raise EngineError(f"{engine.title} is not executed from here; known: openvino, vllm")

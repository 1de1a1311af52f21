"""Starting an engine by its name; what it needs is imported then."""

from __future__ import annotations

from spectune.engines.abilities import OPENVINO, engine_named
from spectune.engines.protocol import Running, Wanted
from spectune.runtime.checkpoints import is_head
from spectune.runtime.pair import PairSpec
from spectune.traces.errors import EngineError, PairError


def start(name: str, spec: PairSpec, wanted: Wanted) -> Running:
    """A pair in an engine, ready to execute. Raises EngineError where the engine is not installed
    or cannot load it, PairError for a draft that the pair or the engine has not."""
    if name == "openvino":
        OPENVINO.require()
        models = [draft for draft, path in spec.drafts.items() if not is_head(path)]
        if wanted.draft not in (*models, "none"):
            raise PairError(
                f"{OPENVINO.title} drafts with a language model, not {wanted.draft!r}; the pair "
                f"has: {', '.join(models)}"
            )
        from spectune.engines.openvino import OpenVino

        return OpenVino(spec, wanted)
    if name == "vllm":
        from spectune.engines.vllm.server import OwnServer

        return OwnServer(spec, wanted)
    title = engine_named(name).title
    raise EngineError(f"{title} is not executed from here; known: openvino, vllm")

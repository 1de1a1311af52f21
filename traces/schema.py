"""Plain values that rows are made of: requests, tokens, tries, steps and outcomes.

Every value here is frozen, compares by content, and knows nothing of databases, models or torch;
:mod:`traces.tables` has the rows. Token positions are counted from 0 at the first *output* token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Finish = Literal["eos", "length", "stop"]
Verifier = Literal["coupled", "rejection", "greedy"]
"""How a draft's token was kept: ``coupled`` iff it is what the target drew with the same noise,
``rejection`` by chance, ``greedy`` (engines' default) iff it, the draft's most likely one at every
temperature, is what the target drew."""

NAT_SCALE = 256
"""Resolution of recorded log-probabilities and entropies: codes count 1/256 nat (0.0039 nat), so
that stops and growing trees compare whole numbers and decide alike in the runtime and in replay."""
NAT_CODE_MAX = 65535
"""Largest code, about 256 nat; larger values saturate."""
PROB_SCALE = 65535
"""Resolution of recorded acceptance probabilities: codes count 1/65535."""

TOP_ENTROPY = 10
"""Probabilities that HeteroSpec's Top-K entropy is taken over (its K)."""

NO_BIN = 255
"""The bin of a round that was not stratified."""

SHORTLIST_MARK = "@"
"""In the name of a recorded draft, what stands before the artifact of its shortlist."""

OFF_TEXT = 255
"""The :attr:`Trie.text_slot` of a node after which no recorded child is the text's token."""


@dataclass(frozen=True, eq=False)
class _ByContent:
    """Dataclasses that hold arrays: equal iff all of their fields are."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False
        for f in fields(self):
            a, b = getattr(self, f.name), getattr(other, f.name)
            if isinstance(a, np.ndarray):
                if not (isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)):
                    return False
            elif a != b:
                return False
        return True


@dataclass(frozen=True)
class Request:
    """One prompt of a workload: a text, chat messages, or token ids; its id is unique in it.

    ``prompt`` is what the user says, as one text. ``messages`` are OpenAI's (``role``, ``content``
    as a text or a list of text parts, and what else a chat template reads of them), the last one
    the user's or a tool's. ``template`` is what the chat template gets beside them (``tools``); it
    is not applied where the request ``is_plain``. ``max_new_tokens`` and ``stop`` are the request's
    own limits. ``source`` is the file it was read from, no part of its content.
    """

    id: str
    category: str
    prompt: str = ""
    messages: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    ids: tuple[int, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict, hash=False)
    is_plain: bool = False
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    source: str = field(default="", compare=False)

    def chat(self) -> tuple[Mapping[str, Any], ...]:
        """The messages; of a text the one that says it."""
        return self.messages or ({"role": "user", "content": self.prompt},)


def message_texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message of :class:`Request`: one, or one of each part."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


@dataclass(frozen=True)
class Workload:
    """A named list of requests. ``name`` is ``demo`` or the files' names joined by ``+``;
    ``notes`` are lines on how it was read, no part of its content."""

    name: str
    requests: tuple[Request, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)

    def to_json(self) -> list[dict[str, Any]]:
        """The requests, JSON-ready, without what is not said; :meth:`from_json` is its inverse."""
        own = [f.name for f in fields(Request) if f.compare]
        values = [{name: getattr(request, name) for name in own} for request in self.requests]
        return [{k: v for k, v in row.items() if v or k in ("id", "category")} for row in values]

    @classmethod
    def from_json(cls, name: str, content: list[dict[str, Any]]) -> Workload:
        """The workload of :meth:`to_json`."""
        rows: list[dict[str, Any]] = [
            {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()} for row in content
        ]
        return cls(name, tuple(Request(**row) for row in rows))

    def digest(self) -> str:
        """SHA-256 of the content (name excluded), hex: equal requests in equal order, equal
        digest."""
        content = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def policy_content(document: Mapping[str, Any]) -> str:
    """One line of JSON of a policy's spelled-out document: equal policies, equal text."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def policy_id(document: Mapping[str, Any]) -> str:
    """12 hex digits of the SHA-256 of :func:`policy_content`; the content is the identity."""
    return hashlib.sha256(policy_content(document).encode()).hexdigest()[:12]


LEAST_TEMPERATURE: Final = 1e-5
"""Below it vLLM decodes greedily, too."""


@dataclass(frozen=True)
class Sampling:
    """How the target's distribution is processed and drawn from.

    ``temperature`` 0 is greedy, and so is one below :data:`LEAST_TEMPERATURE`, by which logits
    could no longer be divided; ``top_k`` 0 and ``top_p`` 1 switch those filters off; ``seed`` is
    the run's, from which each request's own seed follows (:func:`request_seed`).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether top-k or top-p can leave tokens without a chance."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0)


def request_seed(seed: int, request_id: str) -> int:
    """The 63-bit seed of one request: a function of the run's seed and the request's id alone, so
    that order, ``--limit`` and concurrency never change a text."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{request_id}".encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True, eq=False)
class Tokens(_ByContent):
    """Token ids of one request, int32: its prompt [P] and its output [L], which ends with the EOS
    token where the text does."""

    prompt: Int32Array
    output: Int32Array


@dataclass(frozen=True, eq=False)
class Trie(_ByContent):
    """The distributions that a draft reads from *every* start of one text, a node each.

    A node stands for a prefix. Nodes 0..L are the text's own prefixes (node i: the first i output
    tokens): the roots of all starts. Further nodes 0..M-1, numbered L+1.., are prefixes that leave
    the text (or, for a head, any drafted ones): ``parent`` int32 [M] is a node's parent and
    ``slot`` uint8 [M] its place among the parent's children; parents come first. With N = L + 1 + M
    and K children a node, each node holds the distribution after it, in codes of 1/256 nat
    (docs/simulator.md):

    - ``tokens`` int32 [N, K], ``logp``, ``gap`` uint16 [N, K]: its children, best first; ``count``
      uint8 [N]: how many exist (of prompt lookup none where it finds no match).
    - ``entropy``, ``top_entropy`` uint16 [N]; the latter 0 where K is 1.
    - ``text_slot`` uint8 [N]: which child is the text's next token; ``OFF_TEXT`` if none is, or the
      node is not on the text.
    - ``accept`` uint16 [L]: min(1, q(x)/p(x)) for the text's token x in 1/65535: the chance that
      the ``rejection`` verifier keeps the draft's proposal given that x is emitted. [0] where
      temperature 0, an engine that drafts greedily, or a head leaves no such chance.
    """

    parent: npt.NDArray[np.int32]
    slot: npt.NDArray[np.uint8]
    tokens: npt.NDArray[np.int32]
    logp: npt.NDArray[np.uint16]
    gap: npt.NDArray[np.uint16]
    count: npt.NDArray[np.uint8]
    entropy: npt.NDArray[np.uint16]
    top_entropy: npt.NDArray[np.uint16]
    text_slot: npt.NDArray[np.uint8]
    accept: npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Extent:
    """Stored panoramas of one draft: of how many requests, and what all of these hold: tokens of a
    chain, children of a node, levels of a tree."""

    count: int
    gamma_max: int
    width: int
    depth: int

    @property
    def has_trees(self) -> bool:
        return self.width > 1


class Step(NamedTuple):
    """One executed (or replayed) round.

    ``start``: output tokens there were when it began. ``drafted``: tokens the draft proposed.
    ``verified``: tokens in the target's pass, the root included (so 1 when nothing was drafted).
    ``accepted``: drafted tokens kept in the text. ``emitted``: tokens the round added to the text,
    normally accepted + 1. ``draft_steps``: forward passes of the draft. ``lag``: tokens the draft
    had to read before its first proposal. ``depth``: levels drafted (of a chain: ``drafted``).
    ``bin``: HeteroSpec's entropy bin, ``NO_BIN`` where there is none. ``batch``: requests in the
    step, this one included. Times in seconds, 0 when replayed without a profile. ``arrived_s`` and
    ``ended_s``: when the request reached its engine and when the round's tokens were there, seconds
    of one clock in a recording, 0 where that is not known; rounds of one step end at one moment.
    """

    start: int
    drafted: int
    verified: int
    accepted: int
    emitted: int
    draft_steps: int
    lag: int = 1
    draft: str = ""
    policy: str = ""
    draft_s: float = 0.0
    verify_s: float = 0.0
    round_s: float = 0.0
    depth: int = 0
    bin: int = NO_BIN
    batch: int = 1
    arrived_s: float = 0.0
    ended_s: float = 0.0

    @property
    def reads_prompt(self) -> bool:
        """Whether an engine read the prompt in it, which yields the first token. The native decoder
        reads prompts apart from rounds, and notes what verification took."""
        return self.start == 0 and self.drafted == 0 and self.ended_s > 0 and self.verify_s == 0

    @property
    def own_s(self) -> float:
        """Its seconds, shared among the requests of the step: those of all requests together are
        the engine's own."""
        return self.round_s / self.batch


@dataclass(frozen=True)
class Counts:
    """Sums over rounds; the same figures for executed and for replayed ones. ``seconds`` includes
    prefill, and is shared among the requests of a step (:attr:`Step.own_s`). ``prompt_steps``:
    those of the ``rounds`` that read a prompt (:attr:`Step.reads_prompt`)."""

    requests: int = 0
    rounds: int = 0
    emitted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_tokens: int = 0
    draft_steps: int = 0
    verified_tokens: int = 0
    seconds: float = 0.0
    prompt_steps: int = 0

    @property
    def mean_accepted_length(self) -> float:
        """tau: tokens emitted per round, without those of steps that read a prompt."""
        rounds = self.rounds - self.prompt_steps
        return (self.emitted_tokens - self.prompt_steps) / rounds if rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.emitted_tokens / self.seconds if self.seconds > 0 else 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def to_json(self) -> dict[str, Any]:
        sums = asdict(self)
        seconds, _ = sums.pop("seconds"), sums.pop("prompt_steps")
        derived = {"mean_accepted_length": self.mean_accepted_length, "seconds": seconds}
        return {**sums, **derived, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True)
class RequestOutcome:
    """What one request cost and yielded under one policy. ``first_s``: seconds from its beginning
    to the end of its first round, 0 where that was not measured. ``conversation``: the number of
    its conversation (:mod:`traces.conversations`); None: it has one of its own."""

    request_id: str
    category: str
    counts: Counts
    first_s: float = 0.0
    conversation: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a policy costs and yields on a trace or in execution, per request; totals and categories
    are derived.

    ``kind`` is ``replayed`` (seconds predicted by a profile) or ``executed`` (seconds measured).
    """

    policy: str
    kind: Literal["replayed", "executed"]
    per_request: tuple[RequestOutcome, ...]

    @property
    def total(self) -> Counts:
        return sum((r.counts for r in self.per_request), Counts())

    @property
    def by_category(self) -> dict[str, Counts]:
        out: dict[str, Counts] = {}
        for r in self.per_request:
            out[r.category] = out.get(r.category, Counts()) + r.counts
        return dict(sorted(out.items()))

    def scaled(self, factor: float) -> Outcome:
        """It on a machine that takes ``factor`` times as long."""

        def of(row: RequestOutcome) -> RequestOutcome:
            counts = replace(row.counts, seconds=row.counts.seconds * factor)
            return replace(row, counts=counts, first_s=row.first_s * factor)

        return replace(self, per_request=tuple(map(of, self.per_request)))

    def tokens_per_s_interval(self) -> tuple[float, float]:
        """Interval (:func:`ratio_interval`) of total tokens/s. (0, 0) for an unpriced outcome,
        and of a single conversation."""
        sums: dict[int, Counts] = {}
        for n, r in enumerate(self.per_request, 1):
            key = -n if r.conversation is None else r.conversation
            sums[key] = sums.get(key, Counts()) + r.counts
        counts = sums.values()
        return ratio_interval([c.emitted_tokens for c in counts], [c.seconds for c in counts])

    def latency(self) -> dict[str, Any] | None:
        """What a user waits for: mean and quantiles over requests of the seconds to the first token
        and of the seconds per later one (of requests of two tokens or more). JSON-ready; None where
        it was not measured.

        A round yields its tokens at once: the first is there when its round ends, and a later one
        counts with its share of the rest, as servers count.
        """
        timed = [r for r in self.per_request if r.first_s > 0]
        return latency_json([(r.first_s, r.counts.seconds, r.counts.emitted_tokens) for r in timed])

    def stored(self) -> dict[str, Any]:
        """The outcome per request, JSON-ready, with its totals for SQL; :meth:`from_stored` is the
        inverse."""
        rows = [
            [r.request_id, r.category, r.first_s, r.conversation, *astuple(r.counts)]
            for r in self.per_request
        ]
        total = self.total.to_json()
        return {"policy": self.policy, "kind": self.kind, "total": total, "per_request": rows}

    @classmethod
    def from_stored(cls, document: Mapping[str, Any]) -> Outcome:
        """Rebuilds an outcome from :meth:`stored`."""
        per_request = tuple(
            RequestOutcome(name, category, Counts(*counts), first_s, conversation)
            for name, category, first_s, conversation, *counts in document["per_request"]
        )
        return cls(document["policy"], document["kind"], per_request)

    def to_json(self) -> dict[str, Any]:
        """The command-line contract's keys: ``policy``, the totals, ``tokens_per_s_interval`` and
        ``by_category``; ``latency`` where it was measured."""
        latency = self.latency()
        return {
            "policy": self.policy,
            "kind": self.kind,
            **self.total.to_json(),
            "tokens_per_s_interval": list(self.tokens_per_s_interval()),
            "by_category": {k: v.to_json() for k, v in self.by_category.items()},
            **({} if latency is None else {"latency": latency}),
        }


def ratio_interval(above: npt.ArrayLike, below: npt.ArrayLike) -> tuple[float, float]:
    """Bootstrap interval (95%, of 1000 resamples of the conversations) of sum(above) / sum(below),
    given by conversation. (0, 0) of a single one, and where nothing is below."""
    tops, bottoms = np.array(above, dtype=np.float64), np.array(below, dtype=np.float64)
    if len(tops) < 2 or bottoms.sum() <= 0:
        return (0.0, 0.0)
    pick = np.random.default_rng(0).integers(0, len(tops), size=(1000, len(tops)))
    ratios = tops[pick].sum(1) / np.maximum(bottoms[pick].sum(1), 1e-12)
    low, high = np.quantile(ratios, [(1 - 0.95) / 2, (1 + 0.95) / 2])
    return (float(low), float(high))


def latency_json(timed: Sequence[tuple[float, float, int]]) -> dict[str, Any] | None:
    """Quantiles over requests, each given by its seconds to the first token, its seconds to the
    last, and its tokens."""
    if not timed:
        return None
    later = [(last - first) / (tokens - 1) for first, last, tokens in timed if tokens > 1]
    return {
        "requests": len(timed),
        "time_to_first_token_s": quantiles([first for first, _, _ in timed]),
        "time_per_output_token_s": quantiles(later),
    }


def device_name(device: str, card: str | None = None) -> str:
    """What policies are published for: a device, of GPUs that of one name (``cuda:NVIDIA L4``), as
    a policy that is best on one card need not be on another."""
    return f"{device}:{card}" if card and device != "cpu" else device


def devices_of(device: str) -> tuple[str, ...]:
    """By what names something is published for a device: its own, and that of all its kind."""
    return tuple(dict.fromkeys((device, kind_of(device))))


def kind_of(device: str) -> str:
    """``cuda`` of ``cuda:NVIDIA L4``."""
    return device.partition(":")[0]


def quantiles(values: list[float]) -> dict[str, float] | None:
    """Mean, p50, p95 and p99; None of nothing."""
    if not values:
        return None
    p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99)).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p95": p95, "p99": p99}

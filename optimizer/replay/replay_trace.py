"""What is replayed, as flat arrays with everything that was tabulated from them, and what a replay
gives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from spectune.optimizer.replay.chain_tables import (
    Chains,
    Index,
    Words,
    cached_from,
    check_reach,
    join_chains,
    tabulate,
)
from spectune.optimizer.replay.chains import KernelTrace
from spectune.optimizer.replay.forest import (
    Forest,
    join_trees,
    lacking_nodes,
    tabulate_growth,
)
from spectune.optimizer.replay.tree_tables import GrowthTable
from spectune.runtime.costs import (
    FREE,
    LaterPasses,
    RoundCosts,
    RoundKind,
    middles,
    round_costs,
    shortlist_seconds,
)
from spectune.runtime.policies.document import Policy
from spectune.runtime.policies.plan import Plan
from spectune.runtime.policies.stops import CompiledStop
from spectune.runtime.policies.windows import WindowState
from spectune.runtime.trees.grow import TreeRule
from spectune.traces.conversations import conversations_of
from spectune.traces.errors import TraceError
from spectune.traces.schema import Counts, Outcome, RequestOutcome, Step
from spectune.traces.tables import LatencyProfile, Panorama, Trajectory

FloatArray = npt.NDArray[np.float64]

CACHED_TABLES: Final = 128
"""Tables a trace keeps: 4 bytes a position each, for trees a few hundred."""

Nodes = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Children of a panorama's nodes: (parents, slots) int64 [n]."""
Reader = Callable[[str, Mapping[int, Nodes]], Mapping[int, Panorama]]
"""Reads what a replay lacked: given a draft and nodes by trajectory, returns their panoramas."""
ONE: Final[Mapping[str, Any]] = {"constant_values": 1}

Table = TypeVar("Table")


def _unrecorded(draft: str, drafts: Iterable[str]) -> TraceError:
    return TraceError(
        f"the recording has no panorama of draft {draft!r} (it has: "
        f"{', '.join(sorted(drafts)) or 'none'}); `record --resume ID` makes it"
    )


def _check_positions(trajectories: Sequence[Trajectory], panoramas: Sequence[Panorama]) -> None:
    """Raises TraceError for a panorama of another text."""
    for t, p in zip(trajectories, panoramas, strict=True):
        if p.positions != len(t.output_ids):
            raise TraceError(
                f"request {t.request_id!r}: the panorama of {p.draft!r} covers {p.positions} "
                f"positions, the text has {len(t.output_ids)}"
            )


class Memo:
    """The tables that were used last, by key."""

    def __init__(self) -> None:
        self._tables: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Table]) -> Table:
        """The table under ``key``, or else what ``make`` returns."""
        if key not in self._tables:
            self._tables[key] = make()
            if len(self._tables) > CACHED_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        table: Table = self._tables[key]
        return table


class ReplayTrace:
    """Trajectories and panoramas as flat arrays, with what has been tabulated from them.

    ``panoramas`` maps each draft to its panoramas, one per trajectory in the same order. Requests
    are replayed in order, which matters only to windows that carry their state from one to the
    next. ``seed`` chooses the draws of requests decoded by the rejection verifier. ``copies`` maps
    drafts that copy, whatever the window, to what each request's starts would, uint8 [2,
    positions]: how many tokens there are to copy, and how many of them the text goes on with.
    ``past`` tokens may be drafted beyond those that were asked for. ``drafts_up_to``: as
    :class:`engines.abilities.ServingRules` has it, of each request alone. A draft under a
    shortlist goes by :attr:`Policy.recorded_draft`, and the draft itself is there as well.
    ``conversations``: the number of each trajectory's (:func:`conversations_of`). Raises TraceError
    where panoramas do not match.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        panoramas: Mapping[str, Sequence[Panorama]],
        *,
        seed: int = 0,
        copies: Mapping[str, Sequence[npt.NDArray[np.uint8]]] | None = None,
        past: int = 0,
        drafts_up_to: int = 0,
    ) -> None:
        self.trajectories = tuple(trajectories)
        self.conversations = conversations_of(trajectories)
        lengths = np.array([len(t.output_ids) for t in trajectories], dtype=np.int64)
        self.offsets: Index = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self.prompts = np.array([len(t.prompt_ids) for t in trajectories], dtype=np.int64)
        self.past, self.drafts_up_to = past, drafts_up_to
        self.budgets = np.array([t.max_new_tokens for t in trajectories], dtype=np.int64)
        self.sampled = np.array([not t.sampling.greedy for t in trajectories], dtype=np.int64)
        self.order: Index = np.arange(len(self.trajectories))
        self.seed = seed
        self.max_context = int((self.prompts + lengths).max(initial=1))
        self.cached_from = cached_from(self.offsets, self.trajectories)
        for of_draft in panoramas.values():
            _check_positions(self.trajectories, of_draft)
        self.panoramas: dict[str, Sequence[Panorama]] = dict(panoramas)
        self.chains: dict[str, Chains] = {
            d: join_chains(self.trajectories, p) for d, p in panoramas.items() if p[0].shared
        }
        """Of drafts whose distributions are functions of the prefix; a head's are in its forest."""
        self._forests: dict[str, Forest] = {}
        self.on_demand: Callable[..., Replay] | None = None
        """Replays policies whose shortlists were not recorded: by
        :mod:`optimizer.recording.shortlisted`."""
        self.copies = {
            draft: np.concatenate(parts, axis=1) for draft, parts in (copies or {}).items()
        }
        self.hot: npt.NDArray[np.bool_] = np.repeat(self.sampled > 0, lengths)
        """Positions of sampled texts, bool [positions]."""
        self.reader: Reader | None = None
        """Reads distributions that a replay lacks; None: such a replay is refused."""
        self._memo = Memo()

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the requests replayed, in order."""
        return tuple(self.trajectories[r].request_id for r in self.order)

    @property
    def names(self) -> tuple[tuple[str, str, int], ...]:
        """Ids, categories and numbers of the conversations of the requests replayed, in order."""
        texts, of = self.trajectories, self.conversations.tolist()
        return tuple((texts[r].request_id, texts[r].category, of[r]) for r in self.order)

    @property
    def texts(self) -> KernelTrace:
        """The requests replayed, as kernels read them."""
        budgets, up_to = self.budgets + self.past, self.drafts_up_to
        return KernelTrace(self.order, self.offsets, self.prompts, budgets, self.sampled, up_to)

    @property
    def tokens(self) -> int:
        """Output tokens of the requests replayed."""
        return int((self.offsets[self.order + 1] - self.offsets[self.order]).sum())

    def select(self, requests: Iterable[int]) -> ReplayTrace:
        """The same trace with only these requests (indices into :attr:`trajectories`), in this
        order. Arrays and tables are shared."""
        part = object.__new__(ReplayTrace)
        part.__dict__.update(self.__dict__)
        part.order = np.array(list(requests), dtype=np.int64)
        return part

    def reading(
        self, reader: Reader | None, on_demand: Callable[..., Replay] | None = None
    ) -> ReplayTrace:
        """The same trace, whose replays call ``reader`` for distributions that they lack (None:
        such a replay is refused), and ``on_demand`` where a shortlist was not recorded. Both may
        write to a database. Arrays and tables are shared."""
        part = self.select(self.order)
        part.reader, part.on_demand = reader, on_demand
        return part

    def drawn(self, seed: int) -> ReplayTrace:
        """The same trace with other draws of the rejection verifier. Arrays and tables are
        shared."""
        part = self.select(self.order)
        part.seed = seed
        return part

    def recorded(self, policy: Policy) -> str | None:
        """The name under which a policy's draft was recorded (of an artifact its beginning will
        do); None where it was not."""
        name = policy.recorded_draft
        if not policy.shortlisted:
            return name if name in self.panoramas else None
        return next((known for known in self.panoramas if known.startswith(name)), None)

    def lacks_shortlist(self, policy: Policy) -> bool:
        """Whether a policy's draft was not recorded under its shortlist."""
        return policy.shortlisted and self.recorded(policy) is None

    def _recorded(self, policy: Policy) -> str:
        name = self.recorded(policy)
        if name is None:
            raise _unrecorded(policy.recorded_draft, self.panoramas)
        return name

    def remember(self, key: Hashable, make: Callable[[], Table]) -> Table:
        """What ``make`` returned for the requests replayed under this key, as long as it is among
        what was used last."""
        return self._memo.get((key, self.order.tobytes()), make)

    def outcomes(self, policy: Policy, stop: CompiledStop) -> Words:
        """:func:`optimizer.replay.chain_tables.tabulate` for a policy's draft and stop,
        remembered. Raises TraceError if too little was recorded."""
        if not policy.speculates:
            return np.zeros(int(self.offsets[-1]), np.uint32)
        if policy.draft in self.copies:
            length, run = self.copies[policy.draft].astype(np.uint32)
            cached = self.cached_from.astype(np.uint32)
            copied: Words = run | length << 8 | length << 16 | cached << 24
            return copied
        name = self._recorded(policy)
        chains = self.chains[name]
        check_reach(policy, chains)
        return self._memo.get(
            (name, stop, self.seed),
            lambda: tabulate(chains, self.offsets, self.cached_from, stop, self.seed),
        )

    def uses_trees(self, policy: Policy) -> bool:
        """Whether a policy is replayed from a forest: it drafts trees, or distributions depend on
        where a round began (a head's, and those under a budget that depends on the step)."""
        name = self.recorded(policy)
        by_start = name is not None and name not in self.chains
        return policy.speculates and (policy.is_tree or by_start)

    def is_head(self, draft: str) -> bool:
        """Whether a draft of the pair is a head, which drafts trees alone and reads all emitted
        tokens again."""
        return draft in self.panoramas and draft not in self.chains

    def forest(self, draft: str) -> Forest:
        """The trees of a draft, joined when they are first asked for. Raises TraceError where there
        are no panoramas of it."""
        if draft not in self._forests:
            if draft not in self.panoramas:
                raise _unrecorded(draft, self.panoramas)
            panoramas = self.panoramas[draft]
            self._forests[draft] = join_trees(self.trajectories, panoramas, self.past)
        return self._forests[draft]

    def growth(self, policy: Policy, rules: tuple[TreeRule, TreeRule]) -> GrowthTable:
        """What every start grows under a policy's growth, remembered; windows, selections, stops
        and bins share it.

        Raises TraceError if too little was recorded.
        """
        forest = self.forest(self._recorded(policy))
        # Shallower policies share the deepest one's table.
        depth = max(policy.depth_max, forest.depth)
        key = (forest.draft, policy.growth.model_dump_json(), depth, len(forest.text_slot))

        def make() -> GrowthTable:
            each = self._by_temperature(rules, np.arange(len(forest.root)))
            return tabulate_growth(forest, each, depth)

        return self._memo.get(key, make)

    def _by_temperature(
        self, rules: tuple[TreeRule, TreeRule], starts: npt.NDArray[np.int64]
    ) -> list[tuple[TreeRule, npt.NDArray[np.int64]]]:
        """Each rule with those of the starts that it grows."""
        hot = self.hot[starts]
        return [(rules[0], starts[~hot]), (rules[1], starts[hot])]

    def read_lacking(
        self, policy: Policy, rules: tuple[TreeRule, TreeRule], growth: GrowthTable
    ) -> bool:
        """Reads the distributions that a policy's trees lack, of the requests replayed; False where
        there are none, or none could be read."""
        draft = self._recorded(policy)
        panoramas = list(self.panoramas[draft])
        replayed = np.repeat(np.isin(np.arange(len(panoramas)), self.order), np.diff(self.offsets))
        starts = np.flatnonzero(replayed & (growth.missing <= policy.depth_max))
        each = self._by_temperature(rules, starts)
        parents, slots = lacking_nodes(self.forest(draft), each, policy.depth_max)
        if self.reader is None or not len(parents):
            return False
        sizes = [len(p.trie.text_slot) for p in panoramas]
        first = np.concatenate(([0], np.cumsum(sizes)))
        trajectory = np.searchsorted(first, parents, side="right") - 1
        nodes = {
            int(i): (parents[trajectory == i] - first[i], slots[trajectory == i])
            for i in np.unique(trajectory)
        }
        for i, panorama in self.reader(draft, nodes).items():
            panoramas[i] = panorama
        self.panoramas[draft] = panoramas
        self._forests.pop(draft)
        return sum(len(p.trie.text_slot) for p in panoramas) > sum(sizes)

    def stops(self, growth: GrowthTable, rules: tuple[TreeRule, TreeRule]) -> npt.NDArray[np.uint8]:
        """The level at which the rules' stop triggers in each start's tree, uint8 [positions]
        (:meth:`GrowthTable.stops`); remembered."""
        key = (id(growth), *(rule.stop for rule in rules))

        def make() -> tuple[GrowthTable, npt.NDArray[np.uint8]]:
            cold, hot = (growth.stops(rule) for rule in rules)
            return growth, np.where(self.hot, hot, cold).astype(np.uint8)

        return self._memo.get(key, make)[1]  # holds the growth, whose id is then not another's

    def costs(
        self, plan: Plan, profile: LatencyProfile | None, growth: GrowthTable | None = None
    ) -> tuple[RoundCosts, FloatArray]:
        """What a policy's rounds cost (``growth``: of trees), and each trajectory's seconds before
        its first round; remembered. Both are 0 where there is no profile."""
        if profile is None:
            return FREE, np.zeros(len(self.trajectories))
        policy = plan.policy
        tree = policy.speculates and (policy.is_tree or self.is_head(policy.draft))
        kind = RoundKind.of(policy, tree=tree)
        shortlist = None if plan.shortlist is None else plan.shortlist.block.model_dump_json()
        key = (id(profile), id(growth), kind, shortlist)

        def make() -> tuple[LatencyProfile, object, RoundCosts, FloatArray]:
            passes = self._passes(growth) if tree and growth is not None else None
            more = None
            if plan.shortlist is not None:
                nodes = None if passes is None else np.pad(passes.rows, ((0, 0), (1, 0)), **ONE)
                more = shortlist_seconds(profile, plan.shortlist, nodes)
            tables = round_costs(
                profile, kind, middles(self.max_context), passes=passes, shortlist_s=more
            )
            before = profile.request_seconds(kind.draft or None, self.prompts)
            return profile, growth, tables, before  # the ids of the first two are not others' then

        return self._memo.get(key, make)[2:]

    def _passes(self, growth: GrowthTable) -> LaterPasses:
        """What the passes of a tree read at every start."""
        starts = np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        contexts = np.repeat(self.prompts - 1, np.diff(self.offsets)) + starts
        return LaterPasses(growth.width.astype(np.int64), contexts, self.hot.astype(np.int64))


@dataclass(frozen=True, eq=False)
class Replay:
    """What a policy did on a trace, per request in replayed order.

    ``names``: ids, categories and conversations of the requests. ``counts`` int64 [requests, 6]
    (rounds, emitted, accepted, drafted, draft steps, verified), ``seconds`` float64 [requests] (0
    without a profile). ``state`` is the window's as it was left, a learned Q-table included.
    ``missed``: the plain policies that decoded, and how many rounds of each read distributions that
    were not recorded (0 unless approximate). ``rounds`` int32 [rounds, 10]
    (:data:`optimizer.replay.chains.ROUND_COLUMNS`) and ``round_s`` float64 [rounds, 3] (draft,
    verify, round), in order, are None unless asked for. ``chosen``: the policy of each request,
    of a choice by prompt. ``lacks_text``: what was not recorded may hold tokens of the text.
    """

    policy: Policy
    names: tuple[tuple[str, str, int], ...]
    counts: npt.NDArray[np.int64]
    seconds: FloatArray
    state: WindowState
    missed: tuple[tuple[Policy, int], ...]
    rounds: npt.NDArray[np.int32] | None = None
    round_s: FloatArray | None = None
    chosen: tuple[Policy, ...] = ()
    lacks_text: bool = False

    @property
    def missing(self) -> int:
        """Rounds that read what was not recorded."""
        return sum(rounds for _, rounds in self.missed)

    @property
    def total(self) -> Counts:
        """Sums over requests."""
        return _counts(len(self.counts), self.counts.sum(axis=0), float(self.seconds.sum()))

    def outcome(self) -> Outcome:
        """The schema's value, per request; ``policy`` is the policy's label."""
        rows = zip(self.names, self.counts, self.seconds.tolist(), strict=True)
        per_request = tuple(
            RequestOutcome(name, category, _counts(1, c, s), conversation=of)
            for (name, category, of), c, s in rows
        )
        return Outcome(self.policy.label(), "replayed", per_request)

    def steps(self) -> list[list[Step]]:
        """The rounds of every request, as the runtime reports them. ValueError unless replayed with
        ``per_round``."""
        if self.rounds is None or self.round_s is None:
            raise ValueError("replayed without per_round")
        decoded_by = self.chosen or [self.missed[0][0]] * len(self.names)
        out: list[list[Step]] = [[] for _ in self.names]
        for row, seconds in zip(self.rounds.tolist(), self.round_s.tolist(), strict=True):
            request, *counts, depth, bin_ = row
            policy = decoded_by[request]
            fields: list[Any] = [*counts, policy.draft, policy.id, *seconds, depth, bin_]
            out[request].append(Step(*fields))
        return out


def together(policy: Policy, parts: Sequence[tuple[Index, Replay]]) -> Replay:
    """Replays of parts of the requests as one, whose ``state`` is the last one's. With each part
    are the places of its requests."""
    order = np.argsort(np.concatenate([places for places, _ in parts])).tolist()
    names = [name for _, part in parts for name in part.names]
    missed: dict[str, tuple[Policy, int]] = {}
    for plain, rounds in (pair for _, part in parts for pair in part.missed):
        missed[plain.id] = plain, rounds + missed.get(plain.id, (plain, 0))[1]
    joined = Replay(
        policy,
        tuple(names[i] for i in order),
        np.concatenate([part.counts for _, part in parts])[order],
        np.concatenate([part.seconds for _, part in parts])[order],
        parts[-1][1].state,
        tuple(missed.values()),
    )
    rows = [
        np.column_stack((places[p.rounds[:, 0]], p.rounds[:, 1:]))
        for places, p in parts
        if p.rounds is not None
    ]
    if not rows:
        return joined
    written = np.concatenate(rows)
    by_request = np.argsort(written[:, 0], kind="stable")
    seconds = np.concatenate([part.round_s for _, part in parts if part.round_s is not None])
    return replace(joined, rounds=written[by_request].astype(np.int32), round_s=seconds[by_request])


def _counts(requests: int, row: npt.NDArray[np.int64], seconds: float) -> Counts:
    rounds, emitted, accepted, drafted, draft_steps, verified = row.tolist()
    return Counts(requests, rounds, emitted, accepted, drafted, draft_steps, verified, seconds)

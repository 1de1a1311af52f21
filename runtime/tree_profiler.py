"""Measuring what rounds of trees cost (:class:`traces.schema.TreeProfile`), with real policies through the real backend.

Every sample is one round: a tree is drafted, verified and committed, then text and draft are set back to where it began. A line through
trees of few and of many levels gives the first pass and what a level more costs, by its width; what deviates from the line is kept by width
and number of levels. Trees of one shape that keep more or fewer nodes give the verification. What verification costs more
after one draft than after the others is charged to that draft's first pass; the moving of cache entries, which trees of one level hardly
need and which takes a draft's as well as the target's, is part of drafting. Static and classified trees, bins and
stops are charged for what their rounds draft longer than top-k trees that read as much.

A machine's pace changes by some percent within seconds, and single rounds take half as long again. So the drafts take turns at every
context, their seconds are brought to one pace by their verifications (:func:`levelled`), and a cell is what is typical of it
(:func:`typical`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.decoder import Decoder, ModelBackend
from runtime.drafts.eagle import EagleDraft
from runtime.drafts.protocol import Drafted
from runtime.loop import DecodeRequest, StaticSource, Verified, decode_rounds
from runtime.measuring import PROMPTS, Bench, Turns, center, curve, errors
from runtime.policies.c2t import beta_code
from runtime.policies.document import GAMMA_LIMIT, EntropyStop, FixedWindow, Policy, Select, StaticGrowth, TopKGrowth
from runtime.policies.plan import Plan, prepare
from traces.schema import TREE_SCALE, CostCurve, LatencyProfile, Sampling, Step, TreeProfile

NODES = (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 18, 24, 31, 32, 48, 60, 64, 96)
"""Nodes verified, as measured. Products of rows by the multiple of four are quicker than of one row less: of small trees nearly every
number, of larger ones mostly a row more, which is the mean of what there is, and EAGLE-2's 60."""
WIDTHS = (1, 2, 4, 8, 10, 16)
"""Nodes read by a level's pass, as measured."""
TREE_LAGS = (1, 2, 4, 8)
"""Tokens that the pass for the first level reads, as measured."""
DEPTHS = (1, 2, 4, 8)
"""Levels of the trees that tell what a level costs. (A draft's passes get quicker within a round, so two would not do.)"""
MIDDLE = 4
WIDE = 10
"""Depth and width of the trees that are verified with more or fewer nodes."""
KINDS = ("static", "classifier", "stratify", "stop")
"""Blocks that draft otherwise than EAGLE-2 (:func:`runtime.policies.plan.tree_kinds`)."""
ROUNDS = 64
"""More than a group of cells has."""
KIND_WIDTH = 6
KIND_ROUNDS = 1
CONFIDENCE_SHAPE = (MIDDLE, 256, 1024)
"""Width of their trees, rounds of each in a repeat, and the classifier's table (depths, entropies, joint probabilities)."""
OWN = 48
"""Tokens at a text's end at which trees grow."""
SAMPLINGS = (Sampling(), Sampling(temperature=1.0))
CHECKED = ((8, 5, 32), (4, 3, 12))
"""(width, levels, nodes) of the trees that a profile is checked with."""
CHECKED_TOKENS = 32

POLISHED = 4
"""Turns of a median polish, more than it takes."""

Key = tuple[str, bool, int, int]
Place = tuple[str, bool, int]
Table = dict[tuple[Hashable, Hashable], list[float]]
"""Samples by (work, place)."""


@dataclass
class TreeCells:
    """Samples, in passes (:attr:`Bench.usual_s`), in seconds once :func:`levelled`, by (draft, temperature above 0, x, context):
    ``verify`` x = nodes, ``first`` x = lag, of trees of one level, and for each of :data:`DEPTHS` ``draft`` x = width. ``near``: by (draft,
    temperature above 0, context). ``kinds``: rounds by (draft, kind)."""

    verify: dict[Key, list[float]] = field(default_factory=dict)
    first: dict[Key, list[float]] = field(default_factory=dict)
    draft: dict[int, dict[Key, list[float]]] = field(default_factory=lambda: {depth: {} for depth in DEPTHS})
    near: dict[Place, NearTies] = field(default_factory=dict)
    kinds: dict[tuple[str, str], list[KindRound]] = field(default_factory=dict)


class KindRound(NamedTuple):
    """One drafting phase: its seconds without canonical passes, those of the latter, and what it was. ``nodes``: drafted."""

    draft_s: float
    settled_s: float
    widths: tuple[int, ...]
    nodes: int
    hot: bool
    context: int


@dataclass
class NearTies:
    """Seconds of canonical passes while drafting and while verifying, laws read with nodes drafted, and tokens emitted."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    nodes: int = 0
    tokens: int = 0

    def add(self, other: NearTies) -> None:
        self.draft_s, self.verify_s = self.draft_s + other.draft_s, self.verify_s + other.verify_s
        self.nodes, self.tokens = self.nodes + other.nodes, self.tokens + other.tokens


def tree_policy(draft: str, width: int, levels: int, nodes: int) -> Policy:
    """EAGLE-2's tree."""
    return Policy(draft=draft, window=FixedWindow(gamma=levels), growth=TopKGrowth(width=width), select=Select(top_n=nodes))


@contextmanager
def _canonical_seconds(bench: Bench) -> Iterator[list[float]]:
    """What canonical passes take meanwhile, while drafting and while verifying. They settle near ties: so rare and so long that one would
    spoil a cell's mean, so often that they count; they are charged by the node (:func:`tree_costs`)."""
    pair, seconds, verifying = bench.pair, [0.0, 0.0], [False]
    patched: list[tuple[Any, str]] = [(pair.target, "canonical"), (pair.target, "canonical_features")]
    patched += [(model, "canonical") for model in (*pair.drafts.values(), *pair.heads.values())]

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = bench.clock()
            try:
                return work(*args, **kwargs)
            finally:
                seconds[int(verifying[0])] += bench.clock() - began

        return timed

    def verify(drafted: Drafted | None) -> Verified:
        verifying[0] = True
        try:
            return ModelBackend.verify(bench.backend, drafted)
        finally:
            verifying[0] = False

    for model, name in patched:
        setattr(model, name, watched(getattr(model, name)))
    setattr(bench.backend, "verify", verify)  # noqa: B010
    try:
        yield seconds
    finally:
        for model, name in [*patched, (bench.backend, "verify")]:
            delattr(model, name)


def tree_repeats(repeats: int) -> int:
    """How often the cells of trees are measured where those of chains are ``repeats`` times."""
    return max(2, repeats // 3)


@dataclass
class TreeMeasurement:
    """Turns of a pair's drafts under the clock, taken whenever there is time for one, and the costs that all of them tell. ``contexts``:
    tokens in the target's cache; at each of them, and at temperatures 0 and 1, two turns are the least that tells costs."""

    bench: Bench
    contexts: tuple[int, ...]
    groups: list[TreeCells] = field(default_factory=list)
    turns: int = 0

    def __post_init__(self) -> None:
        self.drafts = [*self.bench.pair.drafts, *self.bench.pair.heads]
        self.bench.rng = np.random.default_rng()  # near ties are a text's: no two profiles shall stumble on the same ones

    def turn(
        self, contexts: Sequence[int] | None = None, samplings: Sequence[Sampling] = SAMPLINGS, texts: Sequence[Sequence[int]] = ()
    ) -> None:
        """Every cell of every draft once at some of the contexts and temperatures, at the ends of ``texts`` drawn at random (token ids of
        what is served: near ties are as frequent as there), else of one that the target says at temperature 1."""
        with _canonical_seconds(self.bench) as apart:
            own = [] if texts else _own_text(self.bench, self.drafts[0])
            for context, sampling in itertools.product(contexts or self.contexts, samplings):
                own = list(texts[int(self.bench.rng.integers(len(texts)))]) if texts else own
                for name in self.drafts:
                    self.groups.append(TreeCells())
                    _measure_group(self.bench, name, context, sampling, self.groups[-1], own, apart, backwards=self.turns % 2 == 1)
        self.turns += 1

    def costs(self) -> TreeProfile:
        """What is typical of all turns."""
        return tree_costs(levelled(self.groups, len(self.drafts), self.bench.usual_s), self.drafts, self.contexts)


def measure_trees(bench: Bench, contexts: Sequence[int], texts: Sequence[Sequence[int]] = ()) -> TreeProfile | None:
    """The tree costs of every draft of a pair but prompt lookup, on ``texts``; None where there is no other. Ticks once per
    repeat."""
    measurement = TreeMeasurement(bench, tuple(contexts))
    if not measurement.drafts:
        return None
    for _ in range(tree_repeats(bench.repeats)):
        measurement.turn(texts=texts)
        bench.tick("trees")
    return measurement.costs()


def levelled(groups: Sequence[TreeCells], drafts: int, usual_s: float = 1.0) -> TreeCells:
    """Cells that were measured one after another as one, all at the mean pace, in seconds. ``groups`` are of one (draft, temperature above
    0, context) each, in turn of so many ``drafts`` at one temperature and context; ``usual_s`` are their unit's seconds.

    A group's pace is how long its verifications took beside those of all groups, a median: they are the same work whatever the draft. But
    what a draft's verifications take longer at every turn, beyond noise, is that draft's (it drives the target out of the caches), and
    stays.
    """
    usual: dict[tuple[bool, int, int], list[float]] = {}
    for group in groups:
        for (_, hot, n, c), samples in group.verify.items():
            usual.setdefault((hot, n, c), []).extend(samples)
    means = {key: center(samples) for key, samples in usual.items()}
    longer = [[math.log(s / means[hot, n, c]) for (_, hot, n, c), found in g.verify.items() for s in found] for g in groups]
    pace = np.array([statistics.median(found) if found else 0.0 for found in longer])
    pace -= pace.mean()
    turns = pace.reshape(-1, drafts)
    own = _beyond_noise(turns - turns.mean(1, keepdims=True))
    whole = TreeCells()
    for i, group in enumerate(groups):
        factor = usual_s * math.exp(own[i % drafts] - pace[i])
        levels = zip(group.draft.values(), whole.draft.values(), strict=True)
        for mine, all_ in ((group.verify, whole.verify), (group.first, whole.first), *levels):
            for key, samples in mine.items():
                all_.setdefault(key, []).extend(factor * s for s in samples)
        for place, near in group.near.items():
            scaled = replace(near, draft_s=usual_s * near.draft_s, verify_s=usual_s * near.verify_s)
            whole.near.setdefault(place, NearTies()).add(scaled)
        for kind, rounds in group.kinds.items():
            moved = (r._replace(draft_s=factor * r.draft_s, settled_s=usual_s * r.settled_s) for r in rounds)
            whole.kinds.setdefault(kind, []).extend(moved)
    return whole


def _beyond_noise(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over rows, [columns], each less what is expected of it by chance (James and Stein's positive part)."""
    mean, error = samples.mean(0), samples.std(0, ddof=1) / math.sqrt(len(samples))
    chance = np.divide(error, np.abs(mean), out=np.ones_like(mean), where=np.abs(mean) > 0)
    return np.asarray(mean * np.maximum(0.0, 1.0 - chance**2))


def typical(cells: TreeCells) -> TreeCells:
    """The cells with every one's samples moved to what is typical of it: what its work takes times what its place (temperature and context)
    makes of it, both by medians in turn (Tukey's median polish, of logarithms), of every draft's verifications, lags and drafting apart.
    What slow moments add is spread over all alike, rounds of other kinds included, so that the total stays."""
    tables: dict[tuple[str, str], Table] = {}
    for (name, hot, n, c), samples in cells.verify.items():
        tables.setdefault(("verify", name), {})[n, (hot, c)] = samples
    for (name, hot, lag, c), samples in cells.first.items():
        tables.setdefault(("first", name), {})[lag, (hot, c)] = samples
    for depth, by_key in cells.draft.items():
        for (name, hot, w, c), samples in by_key.items():
            tables.setdefault(("draft", name), {})[(depth, w), (hot, c)] = samples
    found = {kind: _polish(table) for kind, table in tables.items()}
    measured = sum(center(samples) for table in tables.values() for samples in table.values())
    slower = measured / sum(sum(seconds.values()) for seconds in found.values())

    def moved(kind: str, name: str, work: Hashable, place: Hashable, samples: list[float]) -> list[float]:
        factor = slower * found[kind, name][work, place] / center(samples)
        return [factor * s for s in samples]

    return replace(
        cells,
        verify={(d, hot, n, c): moved("verify", d, n, (hot, c), s) for (d, hot, n, c), s in cells.verify.items()},
        first={(d, hot, lag, c): moved("first", d, lag, (hot, c), s) for (d, hot, lag, c), s in cells.first.items()},
        draft={
            depth: {(d, hot, w, c): moved("draft", d, (depth, w), (hot, c), s) for (d, hot, w, c), s in by_key.items()}
            for depth, by_key in cells.draft.items()
        },
        kinds={kind: [r._replace(draft_s=slower * r.draft_s) for r in rounds] for kind, rounds in cells.kinds.items()},
    )


def _polish(table: Table) -> dict[tuple[Hashable, Hashable], float]:
    """The product of row and column that fits positive samples best by (row, column), each the median of what the other leaves."""
    logs = {key: np.log(samples) for key, samples in table.items()}
    effects: tuple[dict[Hashable, float], dict[Hashable, float]] = {row: 0.0 for row, _ in logs}, {column: 0.0 for _, column in logs}
    for _ in range(POLISHED):
        for axis in (0, 1):
            left: dict[Hashable, list[NDArray[np.float64]]] = {}
            for key, found in logs.items():
                left.setdefault(key[axis], []).append(found - effects[1 - axis][key[1 - axis]])
            effects[axis].update({effect: float(np.median(np.concatenate(parts))) for effect, parts in left.items()})
    return {key: math.exp(effects[0][key[0]] + effects[1][key[1]]) for key in logs}


def _own_text(bench: Bench, name: str) -> list[int]:
    """A text as the target says it, so that as much is accepted as in service."""
    policy = tree_policy(name, WIDE, MIDDLE, 32)
    prepared, found = prepare(policy, bench.pair.draft_names), bench.begin(OWN // 2, policy, SAMPLINGS[1])
    while len(found) < OWN:
        drafted = bench.backend.draft(prepared, MIDDLE)
        verdict = bench.backend.verify(drafted)
        bench.backend.commit(verdict.tokens, verdict.accepted, drafted)
        found += verdict.tokens
    return found[-OWN:]


def _measure_group(
    bench: Bench,
    name: str,
    context: int,
    sampling: Sampling,
    cells: TreeCells,
    own: list[int],
    apart: list[float],
    *,
    backwards: bool,
) -> None:
    """Every cell once, each a token nearer to the beginning of one text, which ends with ``own``. The first round is not counted, nor are
    the seconds that collect in ``apart``."""
    backend, known = bench.backend, bench.pair.draft_names
    draft = backend.draft_named(name)
    middle, hot = MIDDLE, not sampling.greedy
    usual = tree_policy(name, WIDE, middle, 32)
    others = _other_kinds(name, known)
    text = [*bench.tokens(max(0, context + 1 - len(own))), *own][-(context + 1) :]
    length, least = len(text), max(len(text) // 2, len(text) - min(len(own), OWN)) + 1
    source = Turns(prepare(usual, known))
    request = DecodeRequest("profile", text, sampling, 1, ROUNDS * (max(DEPTHS) + 2))
    rounds, committed = decode_rounds(backend, request, source, bench.clock), [0.0]

    def commit(emitted: list[int], accepted: int, drafted: Drafted | None) -> None:
        began = bench.clock()
        ModelBackend.commit(backend, emitted, accepted, drafted)
        committed[0] = bench.clock() - began

    near = cells.near.setdefault((name, hot, context), NearTies())

    def once(ready: Plan, levels: int, lag: int = 1, kind: str = "") -> tuple[float, float, int]:
        """Drafting with committing and verification, in passes (:attr:`Bench.usual_s`), and the nodes verified."""
        nonlocal length
        if backend.length > length:
            length = max(length - 1, least)
            backend.rewind(length)
            draft.rewind(length - lag)
            backend.draw_noise(levels + 2)  # priced by the token (``noise_s``)
        source.prepared, apart[:] = ready, [0.0, 0.0]
        made = next(rounds)
        step, tree = made.step, made.tree
        settled, checked = apart
        bench.pace()
        pace_s = float(bench.around_s()[0])
        settled, checked = settled / pace_s, checked / pace_s
        draft_s, verify_s = (step.draft_s + committed[0]) / pace_s, step.verify_s / pace_s
        widths = tuple(tree.widths) if tree else ()
        near.verify_s, near.tokens = near.verify_s + checked, near.tokens + step.emitted
        if kind:
            cells.kinds.setdefault((name, kind), []).append(KindRound(draft_s - settled, settled, widths, step.drafted, hot, context))
        else:
            near.draft_s, near.nodes = near.draft_s + settled, near.nodes + sum(widths) + step.drafted
        return draft_s - settled, verify_s - checked, step.drafted

    setattr(backend, "commit", commit)  # noqa: B010
    once(prepare(usual, known), middle)
    plan = [(0, n) for n in NODES] + [(-1, lag) for lag in TREE_LAGS if lag < least]
    plan += [(depth, w) for depth in DEPTHS for w in WIDTHS if (depth, w) != (middle, WIDE)]
    for kind, x in reversed(plan) if backwards else plan:
        if kind == 0:
            draft_s, verify_s, count = once(prepare(tree_policy(name, WIDE, middle, x), known), middle)
            cells.draft[middle].setdefault((name, hot, WIDE, context), []).append(draft_s)
            if count == x:
                cells.verify.setdefault((name, hot, x, context), []).append(verify_s)
        elif kind == -1:
            draft_s = once(prepare(tree_policy(name, WIDE, 1, WIDE), known), 1, x)[0]
            cells.first.setdefault((name, hot, x, context), []).append(draft_s)
        else:
            draft_s = once(prepare(tree_policy(name, x, kind, 16), known), kind)[0]
            cells.draft[kind].setdefault((name, hot, x, context), []).append(draft_s)
    for _ in range(KIND_ROUNDS):
        for other, ready in others.items():
            once(ready, middle, kind=other)
    del backend.commit


def _other_kinds(name: str, known: Collection[str]) -> dict[str, Plan]:
    """A policy of each of :data:`KINDS`. The classifier's confidence is the joint probability; the stop never triggers."""
    usual = tree_policy(name, KIND_WIDTH, MIDDLE, 24)
    paths = tuple((first, *(0,) * deeper) for first in range(KIND_WIDTH) for deeper in range(MIDDLE))
    stop = EntropyStop(threshold=0.0, scale=1e-3, keep_last=True)
    made = {
        "static": prepare(usual.model_copy(update={"growth": StaticGrowth(paths=paths), "select": Select()}), known),
        "stop": prepare(usual.model_copy(update={"stop": stop}), known),
    }
    plain = prepare(usual, known)
    assert plain.rules is not None
    joint = np.rint(65535 * np.exp(-np.arange(CONFIDENCE_SHAPE[2]) / TREE_SCALE)).astype(np.int32)
    confidence = np.broadcast_to(joint, CONFIDENCE_SHAPE)
    changes: dict[str, dict[str, Any]] = {
        "classifier": {"confidence": confidence, "beta_code": beta_code(0.1), "top_n": None},
        "stratify": {"kept": (24,)},
    }
    for kind, change in changes.items():
        cold, hot = plain.rules
        made[kind] = replace(plain, rules=(replace(cold, **change), replace(hot, **change)))
    return {kind: made[kind] for kind in KINDS}


def tree_costs(cells: TreeCells, drafts: Sequence[str], contexts: tuple[int, ...]) -> TreeProfile:
    """Curves of what is typical of samples. At each context one first pass, whatever the width, and a cost per level of each width fit all
    depths best. Near ties among children that are expanded or verified have to be settled, so those of a draft are charged by the law read
    and the node drafted; the target's by the token emitted."""
    cells = typical(cells)
    curves: dict[bool, tuple[CostCurve, dict[str, CostCurve], dict[str, CostCurve]]] = {}
    charged: dict[tuple[str, bool], float] = {}
    for hot in (False, True):
        verify: dict[tuple[int, int], list[float]] = {}
        first, level = {}, {}
        nodes = [n for n in NODES if all((name, hot, n, c) in cells.verify for name in drafts for c in contexts)]
        means = {name: statistics.mean(center(cells.verify[name, hot, n, c]) for n in nodes for c in contexts) for name in drafts}
        usual = statistics.mean(means.values())
        for name in drafts:
            more = charged[name, hot] = means[name] - usual
            firsts: dict[tuple[int, int], list[float]] = {}
            levels: dict[tuple[int, int], list[float]] = {}
            for c in contexts:
                base, slopes = _lines({d: [center(cells.draft[d][name, hot, w, c]) for w in WIDTHS] for d in DEPTHS})
                shift = base + more - center(cells.first[name, hot, 1, c])
                for lag in TREE_LAGS:
                    if (name, hot, lag, c) in cells.first:
                        firsts[lag, c] = [max(1e-7, s + shift) for s in cells.first[name, hot, lag, c]]
                for w, slope in zip(WIDTHS, slopes, strict=True):
                    deep = cells.draft[DEPTHS[-1]][name, hot, w, c]
                    levels[w, c] = [max(1e-7, slope + (s - center(deep)) / (DEPTHS[-1] - 1)) for s in deep]
                for n in nodes:
                    verify.setdefault((n + 1, c), []).extend(max(1e-7, s - more) for s in cells.verify[name, hot, n, c])
            first[name] = curve(firsts, TREE_LAGS, contexts)
            level[name] = curve(levels, WIDTHS, contexts)
        curves[hot] = curve(verify, [n + 1 for n in nodes], contexts), first, level
    (verify_cold, first_cold, level_cold), (verify_hot, first_hot, level_hot) = curves[False], curves[True]
    found = TreeProfile(verify_cold, verify_hot, first_cold, first_hot, level_cold, level_hot)
    cold, warm = (_per_token([near for (_, h, _), near in cells.near.items() if h is hot]) for hot in (False, True))
    found = replace(
        found,
        token_s=(cold, warm),
        node_s={name: (_per_node(cells, name, False), _per_node(cells, name, True)) for name in drafts},
        bend_s={name: _bend(cells, name, contexts) for name in drafts},
    )
    return replace(found, kind_s={name: _kind_costs(cells, found, name, charged) for name in drafts})


def _per_node(cells: TreeCells, name: str, hot: bool) -> float:
    """Seconds of canonical passes of a draft for each law read and node drafted, at all contexts: they are too rare to tell contexts
    apart."""
    found = [near for (draft, h, _), near in cells.near.items() if (draft, h) == (name, hot)]
    return sum(near.draft_s for near in found) / max(1, sum(near.nodes for near in found))


def _per_token(found: Sequence[NearTies]) -> float:
    """Seconds of canonical passes of the target for each token emitted."""
    return sum(near.verify_s for near in found) / max(1, sum(near.tokens for near in found))


def _bend(cells: TreeCells, name: str, contexts: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """What drafting took more than the lines of :func:`tree_costs`, by width and levels 0 .. GAMMA_LIMIT: the mean over contexts and
    temperatures, linear between :data:`DEPTHS` and beyond them as at the last. (Trees of one level, above all, are the cheaper the
    narrower they are.)"""
    apart: dict[int, dict[int, list[float]]] = {w: {d: [] for d in DEPTHS} for w in WIDTHS}
    for hot in (False, True):
        for c in contexts:
            seconds = {d: [center(cells.draft[d][name, hot, w, c]) for w in WIDTHS] for d in DEPTHS}
            base, slopes = _lines(seconds)
            for d, found in seconds.items():
                for w, s, slope in zip(WIDTHS, found, slopes, strict=True):
                    apart[w][d].append(s - base - (d - 1) * slope)
    bends = {}
    for w, by_depth in apart.items():
        more = {0: 0.0, **{d: statistics.mean(found) for d, found in by_depth.items()}}
        bends[w] = tuple(float(s) for s in np.interp(np.arange(GAMMA_LIMIT + 1), list(more), list(more.values())))
    return bends


def _kind_costs(
    cells: TreeCells, trees: TreeProfile, name: str, charged: Mapping[tuple[str, bool], float]
) -> dict[str, tuple[float, float]]:
    """(seconds per pass, seconds per law read and node drafted) of each of :data:`KINDS` beyond those of top-k growth that reads as many
    nodes; the former are what its rounds typically took longer without canonical passes, the latter those passes. ``charged``: what the
    first pass pays for verification, by (draft, temperature above 0)."""
    found: dict[str, tuple[float, float]] = {}
    for kind in KINDS:
        rounds = cells.kinds.get((name, kind), [])
        passes, nodes = sum(len(r.widths) for r in rounds), sum(sum(r.widths) + r.nodes for r in rounds)
        if not passes:
            continue
        apart = []
        for r in rounds:
            first, level = (trees.sampled_first, trees.sampled_level) if r.hot else (trees.first, trees.level)
            seconds = first[name].at(1, r.context) + sum(level[name].at(w, r.context) for w in r.widths[1:])
            apart.append(r.draft_s - (seconds - charged[name, r.hot] + trees.bend(name, len(r.widths), KIND_WIDTH)))
        settled = sum(r.settled_s for r in rounds) - sum(trees.node_s[name][r.hot] * (sum(r.widths) + r.nodes) for r in rounds)
        found[kind] = statistics.median(apart) * len(rounds) / passes, max(0.0, settled / nodes)
    return found


def _lines(seconds: dict[int, list[float]]) -> tuple[float, list[float]]:
    """(intercept, slopes) of the lines over depth - 1, one of each width, all from one point: least squares."""
    rows, values = [], []
    for depth, by_width in seconds.items():
        for i, value in enumerate(by_width):
            row = np.zeros(1 + len(by_width))
            row[0], row[1 + i] = 1.0, depth - 1
            rows.append(row)
            values.append(value)
    found = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
    return float(found[0]), [float(slope) for slope in found[1:]]


def head_prefill(bench: Bench, name: str) -> CostCurve:
    """Seconds in which a head reads a prompt whose features the target's prefill has given."""
    draft = bench.backend.draft_named(name)
    assert isinstance(draft, EagleDraft)
    features, target = draft.features, bench.pair.target
    lengths = [n for n in PROMPTS if n <= bench.pair.max_positions]
    samples: list[list[float]] = []
    for n in lengths:
        prompt = bench.tokens(n)
        rows = torch.zeros(n - 1, len(target.taps) * target.hidden_size, device=target.device, dtype=target.dtype)

        def read(prompt: list[int] = prompt, rows: torch.Tensor = rows) -> None:
            features.begin(max(lengths), rows)
            draft.begin(prompt, max(lengths))

        samples.append([bench.timed(read) for _ in range(bench.repeats + 1)][1:])
    widths = [n - 1 for n in lengths]
    return curve({(w, 0): times for w, times in zip(widths, samples, strict=True)}, widths, (0,))


def compose_tree_round(
    profile: LatencyProfile, step: Step, widths: Sequence[int], context: int, *, sampled: bool = False
) -> float:
    """Predicted seconds of one round of a tree without a stop. ``widths``: nodes that each pass of the draft read; ``context``: tokens in
    the target's cache when the round began."""
    trees = profile.trees
    assert trees is not None
    verify, first, level = (
        (trees.sampled_verify, trees.sampled_first, trees.sampled_level) if sampled else (trees.verify, trees.first, trees.level)
    )
    per_token = trees.token_s[sampled] + (profile.noise_s if sampled else 0.0)
    seconds = verify.at(step.verified, context) + profile.overhead_s + per_token * step.emitted
    if step.draft_steps:
        seconds += first[step.draft].at(step.lag, context) + sum(level[step.draft].at(w, context) for w in widths[1:])
        seconds += trees.bend(step.draft, step.draft_steps, widths[1] if len(widths) > 1 else step.drafted)
        seconds += trees.per_node(step.draft)[sampled] * (sum(widths) + step.drafted)
    return seconds


def check_trees(bench: Bench, profile: LatencyProfile, contexts: Sequence[int]) -> LatencyProfile:
    """Executes requests under tree policies of other shapes than were measured, and compares composed with executed seconds a round."""
    assert profile.trees is not None
    rounds: list[tuple[float, float]] = []
    usual_s = bench.usual_s
    prompt = bench.tokens(min(48, max(contexts)))
    budget = min(CHECKED_TOKENS, bench.pair.max_positions - len(prompt))
    for name in profile.trees.level:
        for shape in CHECKED:
            source = StaticSource(prepare(tree_policy(name, *shape), bench.pair.draft_names))
            decoder = Decoder(bench.pair, source, clock=bench.clock)
            for sampling in SAMPLINGS:
                request = DecodeRequest("check", prompt, sampling, 1, budget)
                for n, item in enumerate(decoder.rounds(request)):
                    bench.pace()
                    slower = float(bench.around_s()[0]) / usual_s
                    if n > 1 and item.tree is not None:
                        context = len(prompt) + item.step.start - 1
                        seconds = compose_tree_round(profile, item.step, item.tree.widths, context, sampled=not sampling.greedy)
                        rounds.append((seconds, item.step.round_s / slower))
    if not rounds:
        return profile
    found: dict[str, Any] = errors(rounds)
    return replace(profile, check={**profile.check, "trees": found})

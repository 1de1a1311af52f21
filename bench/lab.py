"""What checks share: pairs, a recorded and fitted laboratory of each, policies of every kind, and
execution side by side."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import scipy.stats
import torch
from pairs import fixed, make_pair, top_k
from synthetic import flat_profile, with_heads

from bench.harness import say
from spectune.db.database import open_database
from spectune.demo.prompts import prompt_sources
from spectune.engines.engine import Load, Prompt, Running
from spectune.optimizer.execute import DecodeOptions, Encoded, Executor, encode, run
from spectune.optimizer.fit.for_tuning import fit_drafts
from spectune.optimizer.inputs import read_files
from spectune.optimizer.profiles import profile_for
from spectune.optimizer.recording.on_engine import EngineRun, record_on
from spectune.optimizer.recording.record import PanoramaSpec, draft_reader, record, record_panoramas
from spectune.optimizer.recording.shortlisted import ShortlistedDrafts
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.trace import open_trace
from spectune.optimizer.spaces import DraftLimits
from spectune.optimizer.stored_artifacts import fitted
from spectune.optimizer.tuning.race import Comparison
from spectune.optimizer.tuning.timings import Timings
from spectune.runtime.decoder import Decoded, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.settings import RequestsSettings
from spectune.traces.schema import Sampling, Step, Workload
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Recording

CATEGORIES = ("code", "prose", "math")
GREEDY, SAMPLED = Sampling(), Sampling(1.0, seed=5)
SAMPLINGS = (GREEDY, Sampling(0.7, top_p=0.95, seed=1), SAMPLED)
WIDTH, DEPTH, GAMMA = 8, 8, 12
"""Of what is recorded: children and levels of trees, tokens of chains."""
EAGLE_WIDTH = 10
"""K of EAGLE-2."""
LEVELS = 12
"""Of the trees of :func:`halves`: HeteroSpec's are 11 deep over a baseline of 8."""
STATIC = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0, 0]]
Document = dict[str, Any]
Item = TypeVar("Item")


# ------------------------------------------------------------------------------ pairs and requests


def demo(
    drafts: Sequence[str] | None = None, dtype: str = "auto", name: str = "demo"
) -> LoadedPair:
    """The pair that ships, or one of a folder."""
    pair = load_pair(read_pair(name), device="cpu", dtype=dtype, drafts=drafts)
    torch.set_num_threads(pair.threads)
    return pair


def gpt2(state: Path, dtype: str = "auto") -> LoadedPair:
    """A tiny pair of another architecture."""
    folder = state / "gpt2"
    folder.mkdir(parents=True, exist_ok=True)
    return load_pair(read_pair(str(make_pair(folder, "gpt2"))), device="cpu", dtype=dtype)


def stored(path: Path, *, fresh: bool = False) -> TraceStore:
    """The store in a database file; ``fresh``: an empty one."""
    if fresh:
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink()
    return TraceStore(open_database(str(path)))


def requests(
    limit: int, *, skip: int = 0, category: str | None = None, letters: int | None = None
) -> Workload:
    """Requests of the demo workload, all categories in turn or one, cut to ``letters`` for pairs of
    short contexts."""
    workload = read_files(["demo"], RequestsSettings(category=(category,) if category else ()))
    found = workload.requests[skip : skip + limit]
    if letters is not None:
        found = tuple(replace(r, prompt=r.prompt[:letters]) for r in found)
    return replace(workload, requests=found)


# ----------------------------------------------------------------------------------------- policies


def chain(draft: str, gamma: int) -> Policy:
    """A chain of a fixed window; of no tokens: autoregression."""
    return parse_policy({"draft": draft, "window": fixed(gamma)}) if gamma else AUTOREGRESSIVE


ADAPTIVE: list[Document] = [
    {"kind": "fsm", "gamma_max": 6},
    {"kind": "cache_fsm", "gamma_max": 6},
    {"kind": "q_learning", "gamma_max": 6, "seed": 1},
    {"kind": "analytic", "gamma_max": 8},
    {"kind": "heuristic", "gamma_max": 8},
]
STOPS: list[Document] = [
    {"kind": "max_prob", "threshold": 0.4},
    {"kind": "joint_prob", "threshold": 0.2},
    {"kind": "entropy", "threshold": 0.4},
    {"kind": "max_prob", "threshold": 0.2, "keep_last": False},
]


def chains(draft: str) -> list[Document]:
    """Chains of every window and stop; prompt lookup has no distribution to stop by."""
    windows = [
        *map(fixed, (1, 2, 4, 8, 12)),
        *ADAPTIVE,
        {"kind": "analytic", "gamma_max": 12, "history": 16, "estimator": "exact"},
    ]
    found = [{"draft": draft, "window": window} for window in windows]
    if draft != "ngram":
        found += [{"draft": draft, "window": fixed(10), "stop": stop} for stop in STOPS]
    return found


def trees(draft: str, limits: DraftLimits) -> list[Document]:
    """Trees of every growth, stop, stratification and adaptive depth, as far as they could be
    fitted."""
    sizes = (
        *((8, 6, 59), (8, 4, 32), (8, 2, 16), (4, 6, 24), (4, 4, 12), (4, 2, 8)),
        *((2, 4, 8), (2, 3, 5), (2, 1, 2)),
    )
    found = [top_k(draft, *size) for size in sizes]
    found += [top_k(draft, 6, 8, 16, stop=stop) for stop in STOPS[:3]]
    adaptive = ({**window, "gamma_max": 6} for window in ADAPTIVE)
    found += [{**top_k(draft, 6, 6, 16), "window": window} for window in adaptive]
    static = ({"kind": "static", "paths": paths} for paths in (STATIC, STATIC[:3]))
    found += [{"draft": draft, "growth": growth} for growth in static]
    for artifact in limits.fits.get("stratify", ()):
        bins = {"artifact": artifact, "alpha": 2}
        found += [top_k(draft, 8, 4, 24, stratify={**bins, "fractions": [0.3, 0.6, 1.0]})]
        found += [top_k(draft, 6, 5, 16, stratify={**bins, "fractions": [0.4, 0.8]})]
    for artifact in limits.fits.get("classifier", ()):
        for beta, width, g in ((0.5, limits.width, 6), (0.3, limits.width, 4), (0.5, 1, 8)):
            sizes = {"width": width, "cap": width, "beta": beta}
            growth = {"kind": "classifier", "artifact": artifact, **sizes}
            found.append({"draft": draft, "growth": growth, "window": fixed(g)})
    return found


def shortlisted(draft: str, limits: DraftLimits, bodies: Sequence[Document]) -> list[Policy]:
    """Policies under shortlists, each of another kind and size in turn."""
    found = []
    for i, body in enumerate(bodies):
        if blocks := limits.shortlists((4, 16, 8)[i // 3 % 3]):
            shortlist = blocks[i % len(blocks)]
            found.append(parse_policy({**body, "draft": draft, "shortlist": shortlist}))
    return found


# ----------------------------------------------------------------------------------- the laboratory


@dataclass(frozen=True)
class Lab:
    """A pair, one recording of it with chains and trees of every draft, and what was fitted to
    that."""

    name: str
    pair: LoadedPair
    store: TraceStore
    recording: str
    options: DecodeOptions
    workload: Workload
    limits: dict[str, DraftLimits]
    profile: LatencyProfile

    @property
    def find(self) -> Artifacts:
        return fitted(self.store, self.pair.id)

    def trace(self) -> ReplayTrace:
        """All that was recorded; what it lacks is read when it is replayed."""
        return replayable(self.store, self.pair, self.recording)

    def encoded(self, limit: int | None = None) -> Encoded:
        part = replace(self.workload, requests=self.workload.requests[:limit])
        return encode(self.pair, part, self.options)

    def chains(self) -> list[Policy]:
        return [parse_policy(d) for draft in self.pair.chain_drafts for d in chains(draft)]

    def grown(self) -> list[Policy]:
        documents = (d for draft in self.pair.models for d in trees(draft, self.limits[draft]))
        return [parse_policy(document) for document in documents]

    def listed(self) -> list[Policy]:
        """Policies under shortlists."""
        found = []
        for draft, limits in self.limits.items():
            bodies = [*chains(draft)[2:], *trees(draft, limits)]
            found += shortlisted(draft, limits, bodies)
        return found

    def decode(self, policy: Policy, encoded: Encoded) -> list[Decoded]:
        prepared = prepare_for(self.pair, policy, profile=self.profile, artifacts=self.find)
        return list(run(self.pair, StaticSource(prepared), encoded))


def laboratory(
    state: Path, name: str, sampling: Sampling, quick: bool, dtype: str = "float32"
) -> Lab:
    """The laboratory of a pair (``demo``, ``gpt2``) under a sampling, made unless the state folder
    has it. Exact comparisons need float64, where rounding changes no choice."""
    pair = demo(dtype=dtype) if name == "demo" else gpt2(state, dtype)
    store = stored(state / "lab.db")
    kept = state / f"lab-{name}-{sampling.temperature:g}-{dtype}.pickle"
    if kept.exists():
        return Lab(name, pair, store, *pickle.loads(kept.read_bytes()))
    say(f"laboratory of {name}, temperature {sampling.temperature:g}")
    full = (30, 40) if name == "demo" and sampling.greedy else (16, 24)
    count, tokens = (6, 12) if quick else full
    workload = requests(count, letters=None if name == "demo" else 200)
    options = DecodeOptions(sampling, tokens)
    recording = recorded(store, pair, workload, options, pair.draft_names, GAMMA, WIDTH, DEPTH)
    drafts = list(pair.models)
    limits = fit_drafts(store, pair, recording, drafts, fixed=drafts, routed=drafts)
    made = recording, options, workload, limits, _profile(store, pair, recording, name, quick)
    lab = Lab(name, pair, store, *made)
    kept.write_bytes(pickle.dumps(made))
    return lab


def recorded(
    store: TraceStore,
    pair: LoadedPair,
    workload: Workload,
    options: DecodeOptions,
    drafts: Sequence[str] = (),
    *look: int,
) -> str:
    """A recording, decoded by autoregression unless it was made before; ``look``: the drafts'
    longest chains, and size of trees."""
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    spec = PanoramaSpec(drafts, *look)
    return record(store, pair, workload, options, spec, plain, reuse_complete=True).id


def replayable(store: TraceStore, pair: LoadedPair, recording: str) -> ReplayTrace:
    """All that was recorded of the drafts; what it lacks is read when it is replayed."""
    drafts = store.get_recording(recording).drafts
    opened = open_trace(store, recording, drafts=drafts)
    trace, here = opened.trace, (store, pair, recording)
    reader = draft_reader(*here, trace.trajectories, trace.panoramas, opened.ordinals)
    drafts = ShortlistedDrafts(*here, opened.ordinals, fitted(store, pair.id), few=0)
    return trace.reading(reader, drafts)


@dataclass(frozen=True)
class Halves:
    """A recording of the demo workload whose requests are dealt into two halves of equal
    categories, whole modules, documents and templates of word problems to either
    (:func:`deal_groups`): artifacts are fitted and baselines chosen on ``fit``, which is also the
    recording's part that fits read; ``test`` is seen by neither. Both are places in ``trace``, of
    all requests."""

    pair: LoadedPair
    store: TraceStore
    recording: str
    trace: ReplayTrace
    fit: list[int]
    test: list[int]

    @property
    def find(self) -> Artifacts:
        return fitted(self.store, self.pair.id)

    def sample(self) -> str:
        """Requests, tokens and lengths, and how they were dealt."""
        lengths = [len(self.trace.trajectories[i].output_ids) for i in self.test]
        first = self.trace.trajectories[0]
        how = "greedy" if first.sampling.greedy else f"temperature {first.sampling.temperature:g}"
        return (
            f"{how}, {len(self.test)} requests unseen, {len(self.fit)} fitted to, no module, "
            f"document or template in both; {sum(lengths):,} unseen tokens, {min(lengths)} to "
            f"{max(lengths)} a request, {np.median(lengths):.0f} in the median"
        )


def deal_groups(categories: Sequence[str], groups: Sequence[str]) -> list[str]:
    """A part of each request, ``f`` or ``c``: all of a group in one, the largest first, each to the
    half that has fewer requests of its categories."""
    members: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    counts, parts = {"f": Counter[str](), "c": Counter[str]()}, [""] * len(groups)
    for places in sorted(members.values(), key=len, reverse=True):
        of = [categories[i] for i in places]
        half = min("fc", key=lambda half: sum(counts[half][category] for category in of))
        counts[half].update(of)
        for i in places:
            parts[i] = half
    return parts


def halves(
    state: Path,
    temperature: float,
    quick: bool = False,
    *,
    name: str = "demo",
    workload: Workload | None = None,
    count: int = 180,
    tokens: int = 48,
    verifier: Literal["coupled", "rejection"] = "coupled",
    trees: bool = True,
    drafts: Sequence[str] | None = None,
) -> Halves:
    """A recording of ``count`` requests of the demo (or of the ``workload``, or of that in a pair's
    folder ``name``), of ``tokens`` each, in the state folder's ``halves.db`` (``halves-PAIR.db``),
    begun, gone on with or opened: chains of :data:`GAMMA` tokens of every draft and of prompt
    lookup; with ``trees`` those of every draft, EAGLE-2's default width and :data:`LEVELS` levels,
    which takes seconds a request; ``drafts``: of these alone. Verifier ``rejection`` records
    acceptance probabilities."""
    pair, is_demo = demo(drafts, name=name), name == "demo"
    store = stored(state / ("halves.db" if is_demo else f"halves-{pair.spec.name}.db"))
    tokens = 12 if quick else tokens
    options = DecodeOptions(Sampling(temperature, seed=5), tokens, verifier=verifier)
    look = (GAMMA, EAGLE_WIDTH if trees else 0, LEVELS if trees else 0)
    of_pair = workload or read_files(["demo" if is_demo else str(Path(name) / "workload.jsonl")])
    workload = replace(of_pair, requests=of_pair.requests[: 12 if quick else count])
    drafts = drafts or (pair.draft_names if trees else (*pair.drafts, "ngram"))
    say(f"recording {len(workload.requests)} requests at temperature {temperature:g}")
    recording = recorded(store, pair, workload, options, drafts, *look)

    def deal(dealt: Sequence[tuple[str, int, str | None]]) -> list[str]:
        prompts = [str(r.prompt) for r in workload.requests]
        groups = [prompt_sources().get(prompt, prompt) for prompt in prompts]
        return deal_groups([category for category, *_ in dealt], groups)

    parts = list(store.request_parts(recording, deal).values())
    fit, test = ([i for i, part in enumerate(parts) if part == half] for half in "fc")
    return Halves(pair, store, recording, replayable(store, pair, recording), fit, test)


def record_engine(
    store: TraceStore,
    pair: LoadedPair,
    running: Running,
    workload: Workload,
    prompts: Sequence[Prompt],
    policy: Policy,
    load: Load,
    options: DecodeOptions,
    look: PanoramaSpec,
    *,
    fresh: bool = False,
) -> Recording:
    """A finished recording of an engine."""
    run = EngineRun(prompts, policy, load, options, workload)
    info = record_on(store, pair.spec, running, run, fresh=fresh)
    record_panoramas(store, pair, info.id, look)
    store.finish_recording(info.id)
    return info


def _profile(
    store: TraceStore, pair: LoadedPair, recording: str, name: str, quick: bool
) -> LatencyProfile:
    """Measured for the demo pair. Exact checks need the windows' choices alone, for which any
    profile will do."""
    if name != "demo" or quick or pair.target.dtype == torch.float64:
        made = flat_profile(pair.id, pair.drafts, pair.heads)
        for draft, model in pair.models.items():
            made = with_heads(made, [draft], model.output.rows)
        return made
    return measured(store, pair, recording)


def measured(store: TraceStore, pair: LoadedPair, recording: str) -> LatencyProfile:
    """A new profile on the recording's texts."""
    about: dict[str, Any] = {"gamma_max": GAMMA, "since": datetime.now(UTC)}
    about["trajectories"] = store.load(recording, []).trajectories
    return profile_for(store, pair, tuple(pair.draft_names), **about)


# ------------------------------------------------------------------------------- rounds and seconds


def spread_over(items: Sequence[Item], count: int) -> list[Item]:
    """``count`` of the items, evenly spread; all where there are fewer."""
    places = np.linspace(0, len(items) - 1, min(count, len(items)))
    return [items[i] for i in sorted({int(i) for i in places})]


def interval_of(logs: npt.NDArray[np.float64]) -> list[float]:
    """The geometric mean of measurements given as logarithms, and the ends of its 95% interval
    (Student's t)."""
    mean, half = float(logs.mean()), 0.0
    if len(logs) > 1:
        error = logs.std(ddof=1) / np.sqrt(len(logs))
        half = float(scipy.stats.t.ppf(0.975, len(logs) - 1) * error)
    return np.exp([mean, mean - half, mean + half]).tolist()  # type: ignore[no-any-return]


def agreement(
    predicted: Sequence[float], executed: Sequence[Sequence[float]]
) -> tuple[float | None, int]:
    """Kendall's tau of predictions with executions, over the pairs whose executions do not overlap;
    and how many pairs these are."""
    signs = []
    for i, j in combinations(range(len(predicted)), 2):
        is_above = min(executed[i]) > max(executed[j])
        if is_above or min(executed[j]) > max(executed[i]):
            signs.append(np.sign(predicted[i] - predicted[j]) * (1 if is_above else -1))
    return (float(np.mean(signs)) if signs else None), len(signs)


def tau_of(decoded: Sequence[Decoded]) -> float:
    """Tokens a round."""
    return sum(s.emitted for d in decoded for s in d.steps) / sum(len(d.steps) for d in decoded)


shape = attrgetter(
    *("start", "drafted", "verified", "accepted", "emitted", "draft_steps", "lag", "depth", "bin")
)
"""All that a round is beside its seconds."""


def unlike(executed: Sequence[Decoded], others: Sequence[Sequence[Step]]) -> tuple[int, int]:
    """How many rounds differ, request by request, from others'; and how many the others are."""
    wrong = 0
    for decoded, steps in zip(executed, others, strict=True):
        one, other = ([shape(s) for s in part] for part in (decoded.steps, steps))
        wrong += sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
    return wrong, sum(len(steps) for steps in others)


def compare(
    pair: LoadedPair,
    policies: Sequence[Policy],
    encoded: Encoded,
    *,
    passes: int = 1,
    profile: LatencyProfile | None = None,
    artifacts: Artifacts | None = None,
) -> Comparison:
    """Executes every policy on every request ``passes`` times in turn, in another random order each
    time."""
    executor = Executor(pair, policies, encoded, profile=profile, artifacts=artifacts)
    rng, shape = np.random.default_rng(0), (len(encoded.items), passes)
    seconds = {p: np.full(shape, np.nan) for p in executor.policies}
    for k in range(passes):
        for n in range(len(encoded.items)):
            for p in rng.permutation(list(seconds)):
                seconds[p][n, k] = executor(p, n)
        said = f"{len(seconds)} policies on {len(encoded.items)} requests"
        say(f"pass {k + 1} of {passes}: {said}")
    outcomes = {p: executor.outcome(p, costs) for p, costs in seconds.items()}
    return Comparison(outcomes, executor.texts, Timings(seconds), tuple(seconds))

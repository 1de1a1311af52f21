"""The four papers' claims beside what is measured here, a table for each.

    python bench/run.py papers [--only heterospec c2t ...] [--quick]

Rounds are replayed exactly on requests that no fit and no choice of a baseline has seen, greedy and
at temperature 1. Seconds are composed from three costs: this CPU's measured profile (``cpu``), the
H200's measured rounds of a pair ballasted to 8B (``h200``, its draft's step for both drafts), and a
70B target as HeteroSpec's table 6 publishes it (``70b``). A row holds the paper's figure, ours with
a 95% interval over requests, and a cause. :mod:`papers.claims` has the papers' figures: where a
table reports several models, ours is held against the smallest gain. Recordings and fits are kept
in ``.acceptance/halves.db``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import optuna
from pairs import chain, fixed
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import roc_auc_score

from bench.harness import state_folder
from bench.lab import CATEGORIES, EAGLE_WIDTH, GAMMA, LEVELS, Halves, halves
from bench.papers.evidence import (
    ACCEPTED,
    EMITTED,
    PASSES,
    ROUNDS,
    VERIFIED,
    Document,
    at_equal_tau,
    best,
    cells,
    costs,
    flat,
    over,
    published,
    recorded,
    recorded_chains,
    replayed,
    row,
    run_rows,
    speedup,
    speedup_from,
)
from bench.papers.shortlists import dynaspec
from spectune.demo.corpus import code_documents
from spectune.demo.prompts import PROMPTS_PER_CATEGORY, code_prompts, demo_workload
from spectune.optimizer.fit.c2t import Examples, classifier_examples, fit_c2t, train
from spectune.optimizer.fit.heterospec import STARTS, bin_rounds, fit_heterospec
from spectune.optimizer.fit.recorded_trees import RecordedTrees, TreeSource, tree_source
from spectune.optimizer.fit.shared import StoredFit
from spectune.optimizer.replay.fast_replay import run_replay
from spectune.optimizer.replay.replay_trace import Replay
from spectune.optimizer.search import SearchStudy, search
from spectune.optimizer.spaces import DraftLimits, Space
from spectune.runtime.perplexity import log_perplexity
from spectune.runtime.policies.artifacts import CLASSIFIER, FittedArtifact
from spectune.runtime.policies.blocks import TreeGrowth
from spectune.runtime.policies.c2t import WEIGHTS, ClassifierWeights, read_weights
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.heterospec import FRACTIONS
from spectune.traces.tables import LatencyProfile
from spectune.traces.workloads import WorkloadRow, make_workload

DEPTH, TOP_N = 5, 60
"""EAGLE-2's depth and nodes."""
DEPTHS_OF_BASELINES = (5, 7, 8)
"""Of EAGLE-2's trees under HeteroSpec's: the paper's drafts make 8 passes."""
DEEPEST = 11
"""Levels of C2T's trees, and of those that are compared with them."""
STARTS_OF_C2T = 2000
"""Starts of texts whose trees a classifier is trained on, of a thousand nodes each."""
BETAS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
SIZES = (2, 4, 8, 12, 16, 24, 32, 60, 96, 128)
"""N of EAGLE-2, among which a tuned one is chosen: beyond its default, as costs may be flat."""
DEPTHS = (1, 2, 3, 4, 6, 8)


def main(arguments: Sequence[str]) -> int:
    return run_rows(__doc__, "papers", PARTS, arguments)


# -------------------------------------------------------------------------------------- HeteroSpec


def eagle(draft: str, top_n: int = TOP_N, depth: int = DEPTH, **more: Any) -> Document:
    """EAGLE-2's tree, by the draft's probabilities at every temperature."""
    growth = {"kind": "top_k", "width": EAGLE_WIDTH, "score": "probability"}
    return chain(draft, depth, growth=growth, select={"top_n": top_n}) | more


def eagles(draft: str) -> list[Document]:
    """EAGLE-2's trees of many depths and sizes, among which a tuned one is chosen."""
    return [eagle(draft, top_n, depth) for depth in DEPTHS for top_n in SIZES]


def in_bins(
    draft: str,
    artifact: str,
    alpha: int | None = None,
    fractions: Sequence[float] = FRACTIONS[0],
    depth: int = DEPTH,
    **more: Any,
) -> Document:
    """HeteroSpec's tree, with the paper's fractions and alpha by default, half of the depth rounded
    up. The paper counts bins from 1, policies from 0, so theirs is one less."""
    alpha = -(-depth // 2) if alpha is None else alpha
    stratify = {"artifact": artifact, "alpha": alpha - 1, "fractions": list(fractions)}
    return eagle(draft, depth=depth, stratify=stratify, **more)


def fit_in_bins(h: Halves, source: TreeSource, depth: int = DEPTH) -> StoredFit:
    """Bins as the paper fits them: to the rounds of EAGLE-2's tree, by its score; to every start
    where too few rounds are fully accepted, as of a deep tree."""
    draft = source.trees.forest.draft
    places = [h.trace.request_ids.index(name) for name in source.trace.request_ids]
    rounds = replayed(h, eagle(draft, depth=depth), places=places, per_round=True).rounds
    assert rounds is not None
    source = tree_source(h.store, h.recording, draft)  # with the trees that this has recorded
    starts = source.trace.offsets[source.trace.order][rounds[:, 0]] + rounds[:, 1]
    every = replace(source.trees, score="probability")
    for trees in (replace(every, starts=np.sort(starts)), every):
        sizes: dict[str, Any] = {"depth": depth, "width": EAGLE_WIDTH, "top_n": TOP_N}
        bins = fit_heterospec(replace(source, trees=trees), **sizes)
        if not bins.document["fallback"]:
            break
    return bins


def all_in_bins(draft: str, artifacts: Mapping[int, str]) -> list[Document]:
    """HeteroSpec's trees, among which a tuned one is chosen, with bins by the depth that they were
    fitted at; shallower ones have the first."""
    shallow = dict.fromkeys((2, 3, 4), min(artifacts.items())[1])
    return [
        in_bins(draft, artifact, alpha, fractions, depth=depth, top_n=top_n)
        for depth, artifact in (shallow | dict(artifacts)).items()
        for top_n in SIZES[1:]
        for alpha in (2, 3, 4)
        for fractions in FRACTIONS[:2]
    ]


def heterospec(quick: bool, temperature: float = 0.0) -> list[Document]:
    """HeteroSpec over EAGLE-2's tree of the same depth, width and nodes (the paper's baseline), at
    several depths; greedy also both of them tuned, and what the paper takes apart."""
    rows = []
    for h, draft, cell in cells(temperature, quick):
        at = " 1" if temperature else ""
        source, artifacts = tree_source(h.store, h.recording, draft), dict[int, str]()
        for depth in DEPTHS_OF_BASELINES:
            bins = fit_in_bins(h, source, depth)
            why, place = _low_bins(bins), f"{draft}, depth {depth}, temperature {temperature:g}"
            plain, new = eagle(draft, depth=depth), in_bins(draft, bins.artifact, depth=depth)
            base, ours = (replayed(h, p).counts.T for p in (plain, new))
            saturation = over(base[EMITTED], (depth + 1) * base[ROUNDS])
            rows.append(
                row(
                    "saturation",
                    place,
                    saturation,
                    f"tau {base[EMITTED].sum() / base[ROUNDS].sum():.2f}",
                )
            )
            rows.append(row(f"tau{at}", place, over(base[ROUNDS], ours[ROUNDS]), why))
            rows.append(row(f"tokens{at}", place, over(ours[VERIFIED], base[VERIFIED]), why))
            for name, profile in costs(quick).items():
                rows.append(speedup(f"speed{at}", f"{place}, {name}", h, new, plain, profile))
            artifacts[depth] = bins.artifact
            if not temperature and depth == DEPTH:
                rows += _heterospec_ablations(h, draft, bins, quick)
        for name, profile in costs(quick).items() if not temperature else ():
            tuned = best(h, all_in_bins(draft, artifacts), profile), best(h, eagles(draft), profile)
            rows.append(speedup("tuned", f"{cell}, {name}", h, *tuned, profile, _against(*tuned)))
    return rows


def _low_bins(bins: StoredFit) -> str:
    """What could be gained in the bins whose trees grow deeper: where every level is accepted."""
    low = bins.document["statistics"][:3]
    share = 100 * sum(s["share"] for s in low)
    full = 1e4 * sum(s["share"] * s["fully_accepted"] for s in low) / share
    rounds = f"{share:.0f}% of {bins.document['starts']} fitted rounds in the three low bins"
    return f"{rounds}, {full:.0f}% of these fully accepted"


def _against(one: Policy, other: Policy) -> str:
    """What was compared."""
    return f"{one.label()} over {other.label()}"


def _heterospec_ablations(h: Halves, draft: str, fit: StoredFit, quick: bool) -> list[Document]:
    """Tables 2, 3, 5 and 6, greedy; the paper's 2 and 3 are of HumanEval, ours of code."""
    profiles, artifact, why = costs(quick), fit.artifact, _low_bins(fit)
    code = replace(h, test=[i for i in h.test if h.trace.trajectories[i].category == "code"])
    new = in_bins(draft, artifact)
    policies = eagle(draft), in_bins(draft, artifact, fractions=(1.0, 1.0, 1.0)), new
    plain, deeper, pruned = (replayed(code, p).counts.T for p in policies)
    trees = tree_source(h.store, h.recording, draft).trees
    ranks = bin_rounds(trees, EAGLE_WIDTH, DEPTH, TOP_N, count=STARTS).tcr
    best_quarter = float((ranks[ranks > 0] <= TOP_N / 4).mean())
    rows = [
        row("ranks", draft, [best_quarter, None, None]),
        row("deeper", draft, over(plain[ROUNDS], deeper[ROUNDS]), why),
        row("pruned", draft, over(pruned[VERIFIED], deeper[VERIFIED]), why),
        row("kept", draft, over(deeper[ROUNDS], pruned[ROUNDS]), why),
    ]
    for alpha in (2, 4):
        base = in_bins(draft, artifact, alpha)
        rows.append(speedup(f"alpha {alpha}", f"{draft}, 70b", code, new, base, profiles["70b"]))
    for category, source, others in by_category(h, draft):
        both = in_bins(draft, fit_in_bins(h, source).artifact), eagle(draft)
        place = f"{draft}, bins of {category} elsewhere, h200"
        rows.append(speedup("domain", place, h, *both, profiles["h200"], places=others))
    cpu = profiles["cpu"]
    free = {name: table for name, table in cpu.terms.items() if name != f"stratify/{draft}"}
    charged, without = (replayed(h, new, p).seconds for p in (cpu, replace(cpu, terms=free)))
    passes = replayed(h, new).counts[:, PASSES].sum()
    why = f"{1e3 * (charged - without).sum() / passes:.2f} ms a pass of the draft"
    rows.append(row("overhead", f"{draft}, cpu", over(charged, without), why))
    return rows


ADAEDL = (0.0, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 0.9, 0.99, 0.999, 1.0)
"""Thresholds of AdaEDL's stop, all that there are: from one that never stops to one that always
does."""


def over_adaedl(
    h: Halves, draft: str, new: Document, depth: int, name: str, profile: LatencyProfile
) -> list[Document]:
    """HeteroSpec over AdaEDL on EAGLE-2's tree, its threshold tuned; and that over EAGLE-2's."""
    stops = [{"kind": "entropy", "threshold": t} for t in ADAEDL]
    policies = [parse_policy(eagle(draft, depth=depth, stop=stop)) for stop in stops]
    stopped = best(h, policies, profile)
    place = policies.index(stopped)
    ends = {0: "never to stop is best", len(ADAEDL) - 1: "to stop after one level is best"}
    why = ends.get(place, f"the best threshold is {ADAEDL[place]:g}")
    cell = f"{draft}, {name}"
    return [
        speedup("adaedl", cell, h, new, stopped, profile, why),
        speedup("adaedl tuned", cell, h, stopped, eagle(draft, depth=depth), profile, why),
    ]


def adaedl(quick: bool) -> list[Document]:
    """HeteroSpec over AdaEDL alone."""
    rows = []
    for h, draft, _ in cells(0.0, quick):
        source = tree_source(h.store, h.recording, draft)
        for depth in DEPTHS_OF_BASELINES:
            new = in_bins(draft, fit_in_bins(h, source, depth).artifact, depth=depth)
            for name, profile in costs(quick).items():
                cost = f"depth {depth}, {name}", profile
                rows += over_adaedl(h, draft, new, depth, *cost)
    return rows


def by_category(h: Halves, draft: str) -> Iterator[tuple[str, TreeSource, list[int]]]:
    """Each category, its trees to fit to, and the unseen requests of the others."""
    source, of = (
        tree_source(h.store, h.recording, draft),
        [t.category for t in h.trace.trajectories],
    )
    for category in CATEGORIES:
        trace = h.trace.select(i for i in h.fit if of[i] == category)
        trees = RecordedTrees.of(trace, draft)
        yield (
            category,
            replace(source, trace=trace, trees=trees),
            [i for i in h.test if of[i] != category],
        )


# --------------------------------------------------------------------------------------------- C2T


def classified(draft: str, artifact: str, beta: float, depth: int = DEEPEST, **more: Any) -> Any:
    """C2T's tree; of width 1 its chain mode."""
    growth = {"kind": "classifier", "width": EAGLE_WIDTH, "cap": EAGLE_WIDTH, "beta": beta}
    growth |= {"artifact": artifact, "score": "probability", **more}
    return {"draft": draft, "window": fixed(depth), "growth": growth}


def fit_classifier(source: TreeSource) -> StoredFit:
    """A classifier of EAGLE-2's trees, by its score."""
    trees = replace(source.trees, score="probability")
    sizes = {"width": EAGLE_WIDTH, "depth": DEEPEST, "starts": STARTS_OF_C2T}
    return fit_c2t(replace(source, trees=trees), **sizes)


def all_classified(draft: str, artifact: str) -> list[Document]:
    """C2T's trees, among which a tuned one is chosen."""
    return [classified(draft, artifact, beta, depth) for beta in BETAS for depth in DEPTHS]


def tree_curve(h: Halves, draft: str) -> list[Replay]:
    """EAGLE-2 over N, at the largest recorded depth."""
    return [replayed(h, eagle(draft, top_n, DEEPEST)) for top_n in (*SIZES, 255)]


def c2t(quick: bool, temperature: float = 0.0) -> list[Document]:
    """C2T's verified tokens over those of EAGLE-2 at the same tau; greedy also the speed of both
    tuned."""
    rows: list[Document] = []
    at = " 1" if temperature else ""
    for h, draft, cell in cells(temperature, quick):
        source = tree_source(h.store, h.recording, draft)
        artifact = fit_classifier(source).artifact
        curve, why = tree_curve(h, draft), Ranking.of(h, draft).why(h.find(artifact))
        for beta in (0.4, 0.6, 0.8):
            new = classified(draft, artifact, beta)
            rows.append(at_equal_tau(f"nodes{at}", f"{cell}, beta {beta}", h, new, curve, why))
        if temperature:
            continue
        for name, profile in costs(quick).items():
            tuned = (
                best(h, all_classified(draft, artifact), profile),
                best(h, eagles(draft), profile),
            )
            rows.append(speedup("tuned", f"{cell}, {name}", h, *tuned, profile, _against(*tuned)))
    return rows


class WithoutLog(Examples):
    """Nodes by the paper's three features alone: the logarithm, which is ours, tells nothing."""

    def features(self) -> np.ndarray:
        features = super().features()
        features[:, 1] = 0.0
        return features


@dataclass(frozen=True)
class Ranking:
    """Nodes of EAGLE-2's trees of unseen requests, and how well classifiers tell the accepted ones,
    beside the joint probability, by which EAGLE-2 does."""

    nodes: Examples

    @classmethod
    def of(cls, h: Halves, draft: str) -> Ranking:
        trees = RecordedTrees.of(h.trace.select(h.test), draft)
        trees = replace(trees, score="probability")
        return cls(classifier_examples(trees, EAGLE_WIDTH, DEEPEST, count=500))

    def why(self, fitted: FittedArtifact) -> str:
        """The area under the ROC curve, and the share of accepted nodes among the best, as many as
        EAGLE-2's N a tree."""
        nodes = self.nodes
        features = nodes.joint_code, nodes.entropy_code, nodes.depth
        (area, kept), (joint, joint_kept) = map(
            self._tells, (read_weights(fitted.arrays).confidence(*features), -nodes.joint_code)
        )
        recall = f"recall {kept:.0%} of {joint_kept:.0%}"
        return f"AUC {area:.3f}, by joint probability {joint:.3f}; {recall} at {TOP_N} a tree"

    def _tells(self, scores: np.ndarray) -> tuple[float, float]:
        accepted, count = self.nodes.accepted, TOP_N * len(np.unique(self.nodes.tree))
        best = np.argsort(-scores, kind="stable")[:count]
        return roc_auc_score(accepted, scores), accepted[best].sum() / accepted.sum()


def c2t_ablations(quick: bool) -> list[Document]:
    """What the paper takes apart, of each draft, greedy."""
    fits = {
        draft: fit_classifier(tree_source(h.store, h.recording, draft)).artifact
        for h, draft, _ in cells(0.0, quick)
    }
    return [r for draft in fits for r in _c2t_ablations(recorded(0.0, quick), draft, fits)]


def _c2t_ablations(h: Halves, draft: str, fits: dict[str, str]) -> list[Document]:
    """Tables 1 to 3 and 5, figure 4's transfer and appendix B.3, greedy, at beta 0.5."""
    curve, source = tree_curve(h, draft), tree_source(h.store, h.recording, draft)
    ranking = Ranking.of(h, draft)

    def of_any_draft(name: str) -> FittedArtifact:
        artifact = h.find(name)
        return replace(artifact, document={**artifact.document, "draft": None})

    def tau(artifact: str, beta: float) -> float:
        policy = classified(draft, artifact, beta)
        return replayed(h, policy, places=h.fit, find=of_any_draft).total.mean_accepted_length

    of_all = tau(fits[draft], 0.5)

    def ablated(claim: str, cell: str, artifact: str, beta: float = 0.5, **more: Any) -> Document:
        new = classified(draft, artifact, beta, **more)
        why = f"beta {beta:g}, {ranking.why(h.find(artifact))}"
        return at_equal_tau(claim, f"{draft}{cell}", h, new, curve, why, of_any_draft)

    def alike(artifact: str) -> float:
        """The beta whose trees reach what those of all features do at 0.5, where both are fitted;
        other features make other confidences of the same node."""
        low, high = 0.0, 1.0
        for _ in range(4):
            middle = (low + high) / 2
            low, high = (middle, high) if tau(artifact, middle) > of_all else (low, middle)
        return middle

    rows = [
        ablated("transfer", f", trained on {other}", artifact)
        for other, artifact in fits.items()
        if other != draft
    ]
    examples = classifier_examples(source.trees, EAGLE_WIDTH, DEEPEST, count=STARTS_OF_C2T)
    weights = train(WithoutLog(*vars(examples).values()))
    weights.w1[:, 1] = 0.0  # a constant input, of 0 as it moves no bias, is not trained
    artifact = _kept(source, weights)
    rows.append(ablated("three", "", artifact, alike(artifact)))
    constant = np.zeros_like(examples.depth)
    for name, column in (("entropy_code", 2), ("depth", 3)):
        weights = train(replace(examples, **{name: constant}))
        weights.w1[:, column] = 0.0
        artifact = _kept(source, weights)
        rows.append(ablated("two", f", without {name}", artifact, alike(artifact)))
    for hidden in (2, 12):
        weights = train(examples, hidden=hidden)
        artifact = _kept(source, weights)
        rows.append(ablated("hidden", f", {hidden} hidden", artifact, alike(artifact)))
    rows.append(ablated("cap", "", fits[draft], cap=5))
    for category, part, others in by_category(h, draft):
        elsewhere = replace(h, test=others)
        artifact = fit_classifier(part).artifact
        new, why = classified(draft, artifact, 0.5), ranking.why(h.find(artifact))
        others_curve, cell = tree_curve(elsewhere, draft), f"{draft}, trained on {category}"
        rows.append(at_equal_tau("texts", cell, elsewhere, new, others_curve, why))
    alone = classified(draft, fits[draft], 0.5, width=1, cap=1)
    for kind in ("max_prob", "joint_prob"):
        stops = [
            {"kind": kind, "threshold": t, "keep_last": False}
            for t in (1e-4, 1e-3, 0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
        ]
        stopped = [replayed(h, chain(draft, DEEPEST, stop=stop)) for stop in stops]
        rows.append(at_equal_tau("stops", f"{draft}, {kind}", h, alone, stopped))
    return rows


def _kept(source: TreeSource, weights: ClassifierWeights) -> str:
    """The artifact of a classifier's weights."""
    arrays = {name: getattr(weights, name) for name in WEIGHTS}
    about = {"hidden": weights.hidden}
    return source.keep(CLASSIFIER, about, DEEPEST, lambda artifact: {}, arrays).artifact


# ------------------------------------------------------------------------- on-the-fly adaptation

LONG, BEGINNING = 256, 48
"""Tokens of a text, and of its beginning, in which windows know little yet."""
WARM_UPS = 25
"""Requests before those that count, from which method 4 learns (appendix D.1)."""


def analytic(draft: str, gamma_max: int = 8, history: int = 6) -> Document:
    """Method 1, over the last 6 rounds as in the paper by default."""
    window = {"kind": "analytic", "gamma_max": gamma_max, "history": history}
    return {"draft": draft, "window": window}


def on_the_fly(quick: bool, temperature: float = 0.0) -> list[Document]:
    """Method 1 over the window 5, over the best window of the other half and over methods 2 to 4,
    on texts of usual length, the first two also by tokens since their start; greedy also as the
    depth of EAGLE-2's trees, on shorter ones."""
    rows = []
    h, at = recorded_chains(temperature, quick, LONG), " 1" if temperature else ""
    for draft in ("small", "medium"):
        for name, profile in costs(quick).items():
            cell, new = f"{draft}, temperature {temperature:g}, {name}", analytic(draft)
            windows = [chain(draft, gamma) for gamma in range(1, GAMMA + 1)]
            tuned = [analytic(draft, g, n) for g, n in product((3, 5, 8, 12), (6, 12, 24))]
            kinds = ("fsm", "cache_fsm", "q_learning")
            others = [{"draft": draft, "window": {"kind": k, "gamma_max": 8}} for k in kinds]
            rows.append(speedup(f"window{at}", cell, h, new, chain(draft, 5), profile))
            both = best(h, tuned, profile), best(h, windows, profile)
            seconds = np.stack([replayed(h, w, profile).seconds for w in windows])
            most = 100 * (seconds.sum(1).min() / seconds.min(0).sum() - 1)
            why = f"at most {both[0].gamma_max} over gamma {both[1].gamma_max}"
            why += f"; the best window of each request, known beforehand, gains {most:.1f}%"
            rows.append(speedup("tuned", cell, h, *both, profile, why))
            for begin, end in ((0, BEGINNING), (BEGINNING, LONG)):
                where = f"{cell}, tokens {begin} to {end}", h
                constant = new, chain(draft, 5)
                rows.append(speedup_from(f"window{at}", *where, constant, profile, begin, end))
                rows.append(speedup_from("tuned", *where, both, profile, begin, end))
            other = best(h, others, profile)
            warm, why = h.fit[:WARM_UPS], other.window.kind
            rows.append(speedup("methods", cell, h, new, other, profile, why, warm=warm))
            rows.append(speedup("learned", cell, h, new, others[-1], profile, warm=warm))
    if temperature:
        return rows
    h = recorded(0.0, quick)
    for draft, (name, profile) in product(h.pair.models, costs(quick).items()):
        new = eagle(draft) | {"window": analytic(draft)["window"]}
        rows.append(speedup("adaptive", f"{draft}, {name}", h, new, eagle(draft), profile))
    return rows


WEIGHTS_READ = {"70B, 13B and 7B": (0.1, 0.186), "7B, 1.1B and 560M": (0.08, 0.157)}
"""What a step of the small and of the medium draft takes of the target's pass where a pass takes as
long as its weights take to read: the paper's pairs."""
PROMPTS = 25
"""Prompts that the paper fits equation 5 to."""


def draft_choice(quick: bool, temperature: float = 0.0) -> list[Document]:
    """The paper's rule (section 5): equation 5 from :data:`PROMPTS` prompts to each draft's
    acceptance by ordinary least squares, then the draft of the largest equation 1; on the demo's
    prompts and more of held-out code."""
    drafts, more = ("small", "medium"), code_prompts(code_documents(True))[PROMPTS_PER_CATEGORY:]
    prompts = [*demo_workload(), *({"turns": [text], "category": "code"} for text in more)]
    workload = make_workload(
        "choice", (WorkloadRow(f"choice:{n}", p) for n, p in enumerate(prompts))
    )
    options: dict[str, Any] = {"workload": workload, "count": 460, "tokens": 64, "trees": False}
    options["verifier"] = "rejection" if temperature else "coupled"
    h = halves(state_folder(quick), temperature, quick, **options)
    rows, places = [], range(len(h.trace.trajectories))
    texts = [t.prompt_ids.tolist() for t in h.trace.trajectories]
    first, rest = h.fit[:PROMPTS], [*h.fit[PROMPTS:], *h.test]
    known = np.array([(len(ids), log_perplexity(h.pair.target, ids)) for ids in texts])
    alphas = np.stack([_acceptance(h, draft) for draft in drafts])
    read = {
        name: published(h.pair.id, flat(1.0), dict(zip(drafts, shares, strict=True)))
        for name, shares in WEIGHTS_READ.items()
    }
    profiles = {name: costs(quick)[name] for name in ("h200", "70b")} | read
    for name, profile in profiles.items():
        steps = np.array([profile.terms[f"pass/{draft}"].seconds[0] for draft in drafts])
        shares = steps / profile.terms["target"].seconds[0]
        replays = [replayed(h, analytic(d), profile, places=places) for d in drafts]
        seconds = np.stack([replay.seconds for replay in replays])
        single = int(seconds[:, first].sum(1).argmin())
        oracle = over(seconds[single, rest], seconds[:, rest].min(0))[0]
        for r in (4, 8, 16):
            words = TfidfVectorizer(analyzer=list, max_features=r - 2)
            words.fit([texts[i] for i in first])
            u = np.hstack([known, words.transform(texts).toarray()])
            z = np.linalg.lstsq(u[first], alphas[:, first].T, rcond=None)[0]
            alpha = np.clip(u @ z, 0.01, 0.98)[:, :, None]
            gamma = np.arange(1, 9)
            speeds = (1 - alpha ** (gamma + 1)) / (1 - alpha) / (gamma * shares[:, None] + 1)
            picks = speeds.max(2).argmax(1)[rest]
            place = f"{len(rest)} prompts, {name}, r {r}, temperature {temperature:g}"
            why = f"alone: {drafts[single]}, chosen for {(picks == single).mean():.0%}"
            why += f"; a perfect choice {oracle:.3f}"
            ours = over(seconds[single, rest], seconds[picks, rest])
            rows.append(row("choice", place, ours, why))
    return rows


def _acceptance(h: Halves, draft: str) -> np.ndarray:
    """Single token accuracy of each request, by rounds of one token."""
    counts = replayed(h, chain(draft, 1), places=range(len(h.trace.trajectories))).counts.T
    return np.asarray(counts[ACCEPTED] / np.maximum(1, counts[ROUNDS]))


# ----------------------------------------------------------------------------- verifier, our score


def verifier(quick: bool) -> list[Document]:
    """Coupled against rejection at temperature 1, the coupled score over EAGLE-2's, and how certain
    the drafts are of what is accepted."""
    rows: list[Document] = []
    coupled, rejection = both_verifiers(quick)
    for draft in ("small", "medium"):
        first = [100 * _acceptance(h, draft)[h.test].mean() for h in (coupled, rejection)]
        why = "a first token is accepted {:.0f}% of times, {:.0f}% by rejection".format(*first)
        for gamma in (2, 4, 6):
            one, other = (replayed(h, chain(draft, gamma)).counts.T for h in (rejection, coupled))
            ours = over(*(c[ROUNDS] / c[EMITTED] for c in (one, other)))
            rows.append(row("coupled", f"{draft}, gamma {gamma}", ours, why))
    for name, profile in costs(quick).items():
        windows = [chain(d, g) for d in ("small", "medium") for g in range(1, GAMMA + 1)]
        grid = [p for draft in coupled.pair.models for p in scored(draft, 1.5, (8, 16, 32, 60))]
        policies = best(rejection, windows, profile), best(coupled, windows + grid, profile)
        replays = [
            replayed(h, p, profile) for h, p in zip((rejection, coupled), policies, strict=True)
        ]
        ours = over(*(r.seconds / r.counts[:, EMITTED] for r in replays))
        taus = [r.total.mean_accepted_length for r in replays]
        why = f"{_against(policies[1], policies[0])}: tau {taus[1]:.2f} for {taus[0]:.2f}"
        rows.append(row("verified", name, ours, why))
    for h, draft, cell in cells(0.0, quick):
        curve = tree_curve(h, draft)
        for new in scored(draft, 3.0, (12, 24)):
            place = f"{cell}, N {new['select']['top_n']}"
            rows.append(at_equal_tau("sharp", place, h, new, curve))
    rows += [_certainty(recorded(0.0, quick), draft) for draft in ("small", "medium")]
    return rows


def both_verifiers(quick: bool) -> tuple[Halves, Halves]:
    """The recordings at temperature 1 by each verifier, of the same prompts."""
    coupled, rejection = recorded(1.0, quick), recorded_chains(1.0, quick)
    return coupled, replace(rejection, test=coupled.test, fit=coupled.fit)


def scored(draft: str, sharpness: float, sizes: Sequence[int]) -> list[Document]:
    """Trees by our score: a softmax of gaps, sharpened."""
    growth = {"kind": "top_k", "width": EAGLE_WIDTH, "score": "coupled", "sharpness": sharpness}
    return [eagle(draft, top_n, DEEPEST, growth=growth) for top_n in sizes]


def _certainty(h: Halves, draft: str) -> Document:
    """How often the first choice of a draft model is the text, over its mean probability."""
    hits, sure = [], []
    for i in h.test:
        panorama = h.trace.panoramas[draft][i]
        trie, n = panorama.trie, panorama.positions
        hits.append((trie.text_slot[:n] == 0).sum())
        sure.append(np.exp(-trie.logp[:n, 0].astype(float) / 256).sum())
    mean = np.sum(sure) / sum(h.trace.panoramas[draft][i].positions for i in h.test)
    return row(
        "certain",
        f"{draft}, temperature 0",
        over(np.array(hits), np.array(sure)),
        f"mean {mean:.2f}",
    )


# -------------------------------------------------------------------------------------------- joint


def whole_space(h: Halves) -> Space:
    """All mechanisms of all drafts, with what is fitted to the half that is fitted to."""
    limits = {}
    for draft in h.pair.models:
        source = tree_source(h.store, h.recording, draft)
        bins = fit_heterospec(source, depth=DEPTH, width=EAGLE_WIDTH, top_n=TOP_N)
        fits = {"stratify": (bins.artifact,)}
        fits["classifier"] = (fit_classifier(source).artifact,)
        limits[draft] = DraftLimits(EAGLE_WIDTH, DEEPEST, fits=fits)
    return Space((*h.pair.models, "ngram"), GAMMA, limits)


def searched(h: Halves, space: Space, profile: LatencyProfile, quick: bool) -> SearchStudy:
    """A search on the half that is fitted to. It may read what the recording lacks, as those may
    that its choice is held against."""
    part = h.trace.select(h.fit)
    return search(part, profile, space, trials=8 if quick else 300, artifacts=h.find)


def random_policies(space: Space, count: int) -> list[Policy]:
    """Policies of a space, of each draft and kind of tree in turn."""
    sampled = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    turns = space.turns()
    return [space.suggest(sampled.ask(), *turns[i % len(turns)]) for i in range(count)]


def alone(h: Halves, space: Space) -> list[Policy]:
    """The trees of one mechanism each that its own table is tuned among, and of our score."""
    policies = []
    for draft, limits in space.limits.items():
        (bins,), (classifier,) = limits.fits["stratify"], limits.fits["classifier"]
        policies += [*eagles(draft), *all_in_bins(draft, {DEPTH: bins})]
        policies += [*all_classified(draft, classifier), *scored(draft, 1.5, SIZES)]
    return [parse_policy(policy) for policy in policies]


def with_a_second(policy: Policy, space: Space) -> list[Policy]:
    """A policy with each other mechanism at and around the parameters at which it does next to
    nothing: a machine of windows around its own, a threshold near 0, a bin of one more level."""
    plain, gamma, found = policy.spelled_out(), policy.gamma_max, []
    if policy.window.kind == "fixed":
        windows = [{"kind": "fsm", "gamma_min": gamma - least} for least in range(min(3, gamma))]
        windows += [{"kind": "analytic", "history": history} for history in (6, 12, 24)]
        found += [
            {"window": {**window, "gamma_max": deepest, "gamma_initial": gamma}}
            for window, deepest in product(
                windows, {gamma, *range(gamma, min(gamma + 3, LEVELS + 1))}
            )
        ]
    if policy.stop.kind == "none":
        kinds, thresholds = ("entropy", "max_prob", "joint_prob"), (1e-3, 3e-3, 0.01, 0.03, 0.1)
        stops = product(kinds, thresholds)
        found += [{"stop": {"kind": kind, "threshold": t}} for kind, t in stops]
    if policy.growth.kind == "top_k" and policy.stratify is None:
        (bins,) = space.limits[policy.draft].fits["stratify"]
        found += [
            {"stratify": {"artifact": bins, "alpha": alpha, "fractions": list(fractions)}}
            for alpha, fractions in product((1, 2), FRACTIONS[:4])
        ]
    return [parse_policy(plain | second) for second in found]


def joint(quick: bool, temperature: float = 0.0) -> list[Document]:
    """The best combination, of a search over all mechanisms or of the best policy of each mechanism
    and draft with a second one, over the best policy of one mechanism, of that search or of the
    mechanism's own table; and what the search chose over the best in hindsight, on the unseen half.
    One reader reads what the recording lacks for both sides."""
    rows, h = [], recorded(temperature, quick)
    space = whole_space(h)
    for name, profile in costs(quick).items():
        study = searched(h, space, profile, quick)
        groups: dict[str, list[Policy]] = {"one": alone(h, space), "several": []}
        for trial in study.trials:
            count = len(mechanisms(trial.policy, temperature))
            if count:
                groups["one" if count == 1 else "several"].append(trial.policy)
        cell, kinds = f"temperature {temperature:g}, {name}", dict[Any, list[Policy]]()
        for policy in groups["one"]:
            of = policy.draft, *mechanisms(policy, temperature)
            kinds.setdefault(of, []).append(policy)
        singles = [best(h, policies, profile) for policies in kinds.values()]
        for single in singles if not quick else singles[:2]:
            if single.draft != "ngram":
                groups["several"] += with_a_second(single, space)
        both = best(h, groups["several"], profile), best(h, singles, profile)
        fitted = [replayed(h, p, profile, places=h.fit).seconds for p in both]
        why = f"{_against(*both)}, of {len(groups['several'])} and {len(groups['one'])} tried: "
        why += f"{over(fitted[1], fitted[0])[0]:.3f} where both were chosen"
        rows.append(speedup("together", cell, h, *both, profile, why))
        chosen = study.best()
        assert chosen is not None
        rivals = [t.policy for t in study.trials[:20]] + random_policies(space, 100)
        unseen = h.trace.select(h.test).reading(None, h.trace.on_demand)
        seconds = [
            run_replay(unseen, p, profile, artifacts=h.find, approximate=True).seconds
            for p in (chosen.policy, *rivals)
        ]
        ours = over(min(seconds[1:], key=np.sum), seconds[0])
        rows.append(row("regret", cell, ours, chosen.policy.label()))
    return rows


def mechanisms(policy: Policy, temperature: float) -> set[str]:
    """What of the papers a policy uses, and our score."""
    growth = policy.growth
    is_coupled = isinstance(growth, TreeGrowth) and growth.is_coupled(sampled=temperature > 0)
    is_plain = policy.growth.kind == "top_k" and policy.stratify is None
    used = {
        "on the fly": policy.window.kind in ("analytic", "fsm", "cache_fsm", "q_learning"),
        "AdaEDL": policy.stop.kind != "none",
        "EAGLE-2": is_plain and not is_coupled,
        "HeteroSpec": policy.stratify is not None,
        "C2T": policy.growth.kind == "classifier",
        "coupled score": is_coupled,
    }
    return {name for name, is_used in used.items() if is_used}


RESULT = "papers"
PARTS: dict[str, Callable[[bool], Any]] = {
    "heterospec": heterospec,
    "heterospec_adaedl": adaedl,
    "heterospec_sampled": partial(heterospec, temperature=1.0),
    "c2t": c2t,
    "c2t_ablations": c2t_ablations,
    "c2t_sampled": partial(c2t, temperature=1.0),
    "dynaspec": dynaspec,
    "dynaspec_sampled": partial(dynaspec, temperature=1.0),
    "on_the_fly": on_the_fly,
    "on_the_fly_sampled": partial(on_the_fly, temperature=1.0),
    "on_the_fly_choice": draft_choice,
    "on_the_fly_choice_sampled": partial(draft_choice, temperature=1.0),
    "verifier": verifier,
    "joint": joint,
    "joint_sampled": partial(joint, temperature=1.0),
}

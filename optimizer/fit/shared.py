"""Fitting to a recording, and keeping what was fitted: entropy bins, the node classifier, a static tree, as artifacts that policies name,
and how sharp the score of nodes is, which policies write out.

Only the requests that a search may see are used (:func:`optimizer.record.split`), so that ``tune`` can prove on the others what uses
an artifact. A document says on which draft it was fitted, and a policy with another draft refuses it. Who fits several things to one
recording loads it once (:func:`tree_source`) and gives it as ``source``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from db.errors import CorruptedChunkError, NotFoundError
from optimizer.cost import BUCKET, TreeCosts
from optimizer.fit.c2t import BATCH, EPOCHS, FEATURES, HIDDEN, NEGATIVES, Classifier, fine_tune, train
from optimizer.fit.heterospec import fit_bins
from optimizer.fit.recorded_trees import (
    RankAcceptance,
    RecordedTrees,
    bin_rounds,
    classifier_examples,
    rank_acceptance,
    score_laws,
)
from optimizer.fit.score import SCORE, fit_score
from optimizer.fit.sequoia import StaticTree, best_static_tree, choose
from optimizer.record import split
from optimizer.replay import ReplayTrace
from runtime.policies.document import DEFAULT_TOP_N, GAMMA_LIMIT, NODE_LIMIT, WIDTH_LIMIT
from runtime.policies.tree_rules import BINS, CLASSIFIER, STATIC_TREE
from traces.errors import PolicyError, TraceError
from traces.recording import TREE_DEPTH, TREE_WIDTH
from traces.schema import LatencyProfile, Proposals
from traces.store import RecordingInfo, TraceStore

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""

BIN_STARTS: Final = 20000
"""Starts that bins are fitted to: only fully accepted ones count in the end."""
SCORE_STARTS: Final = 20000
"""Starts whose laws a score is fitted to."""
NODE_STARTS: Final = 4000
"""Starts whose nodes a classifier is trained on; each has hundreds."""
STEPS: Final = 2000
"""Steps of training below which a classifier gets more epochs than the paper's, whose data is a thousand times a recording's."""
MOST_EPOCHS: Final = 200
ALPHA: Final = 3
"""Levels that HeteroSpec grows beyond the depth its bins are fitted at, at most."""
STATIC_NODES: Final = 64
STATIC_DEPTH: Final = 16
"""Limits of a static tree where nobody says."""
LAG: Final = 2
"""Tokens that the draft's first pass of a round reads, where one number has to do: the bonus token, and often the last accepted one."""


@dataclass(frozen=True)
class StoredFit:
    """Something fitted and stored: the artifact's id and kind, its document, and a policy that uses it, as a start."""

    artifact: str
    kind: str
    document: dict[str, Any]
    policy: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"artifact": self.artifact, "kind": self.kind, **self.document, "policy": self.policy}


def fit_bins_artifact(
    store: TraceStore,
    recording: str,
    draft: str,
    *,
    depth: int | None = None,
    top_n: int = DEFAULT_TOP_N,
    width: int | None = None,
    proposals: Proposals = "coupled",
    starts: int = BIN_STARTS,
    seed: int = 0,
    source: TreeSource | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> StoredFit:
    """Fits HeteroSpec's entropy bins (section 4.2) to trees ``depth`` levels deep of which ``top_n`` nodes are kept.

    By default the depth leaves room in the recording for :data:`ALPHA` levels more, and ``width`` is as recorded. Raises TraceError when
    too little was recorded, PolicyError for a draft that there is not.
    """
    source = source or tree_source(store, recording, draft, proposals)
    forest = source.trees.forest
    width = forest.width if width is None else width
    depth = max(1, forest.depth - ALPHA) if depth is None else depth
    if not 1 <= top_n <= NODE_LIMIT:
        raise PolicyError(f"--top-n {top_n}: from 1 to {NODE_LIMIT} nodes can be kept")
    rounds = bin_rounds(
        source.trees,
        width=width,
        depth=depth,
        top_n=top_n,
        count=starts,
        seed=seed,
        progress=lambda done, total: progress("trees", done, total),
    )
    try:
        bins = fit_bins(rounds.phi, rounds.tcr, rounds.fully_accepted, depth=depth)
    except ValueError as error:
        raise TraceError(f"recording {source.info.id}: {error}") from None
    if not bins.thresholds:
        raise TraceError(
            f"recording {source.info.id}: ranks do not depend on entropy in the {bins.rounds} rounds of draft {draft!r}, so there is but "
            "one bin; record more requests, or fit deeper trees (--depth)"
        )
    growth = {"kind": "top_k", "width": width, **_unusual(proposals)}
    document = {**source.document(), **bins.to_json(), "width": width, "top_n": top_n, "starts": len(rounds.phi), "seed": seed}
    artifact = source.put(store, BINS, document, {}, (rounds.phi, rounds.tcr, rounds.fully_accepted))
    policy = {"draft": draft, "window": {"kind": "fixed", "gamma": depth}, "growth": growth, "select": {"top_n": top_n}}
    alpha = max(0, min(ALPHA, forest.depth - depth))
    return StoredFit(artifact, BINS, document, {**policy, "stratify": {"artifact": artifact, "alpha": alpha}})


def fit_classifier_artifact(
    store: TraceStore,
    recording: str,
    draft: str,
    *,
    depth: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    features: Sequence[str] = (),
    epochs: int | None = None,
    carried: str | None = None,
    fraction: float = 0.1,
    proposals: Proposals = "coupled",
    starts: int = NODE_STARTS,
    seed: int = 0,
    source: TreeSource | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> StoredFit:
    """Trains C2T's classifier (section 4, appendix B) on the nodes of trees; ``depth`` and ``width`` are as recorded by default.

    ``carried`` names a classifier, of any draft, that is fine-tuned on ``fraction`` of the trees instead (appendix B.4); it keeps its
    size and its features. ``epochs`` is by default the paper's number, more where that makes few steps. Raises TraceError when too
    little was recorded, PolicyError for a draft that there is not, or something else than a classifier to carry over.
    """
    first = None if carried is None else _classifier(store, carried)
    if first is not None and (hidden is not None or features):
        raise PolicyError("--from goes on with a classifier as it is: leave --hidden and --features out")
    source = source or tree_source(store, recording, draft, proposals)
    forest = source.trees.forest
    width, depth = forest.width if width is None else width, forest.depth if depth is None else depth
    examples = classifier_examples(
        source.trees,
        width=width,
        depth=depth,
        count=starts,
        seed=seed,
        progress=lambda done, total: progress("trees", done, total),
    )

    def trained(done: int, total: int) -> None:
        progress("epochs", done, total)

    if epochs is None:
        nodes = (1 + NEGATIVES) * examples.accepted.sum() * (1.0 if first is None else fraction)
        epochs = min(MOST_EPOCHS, max(EPOCHS, math.ceil(STEPS / max(1.0, nodes / BATCH))))
    try:
        if first is None:
            made = train(
                examples,
                hidden=hidden or HIDDEN,
                features=tuple(features) or FEATURES,
                seed=seed,
                epochs=epochs,
                progress=trained,
            )
        else:
            made = fine_tune(first[1], examples, fraction, seed=seed, epochs=epochs, progress=trained)
    except ValueError as error:
        raise TraceError(f"recording {source.info.id}: {error}") from None
    described, arrays = made.to_document()
    document = {**source.document(), **described, "depth": depth, "width": width}
    document |= {
        "starts": len(np.unique(examples.tree)),
        "nodes": len(examples),
        "accepted": int(examples.accepted.sum()),
        "seed": seed,
    }
    if first is not None:
        document |= {"from": first[0], "fraction": fraction}
    used = (examples.joint_code, examples.entropy_code, examples.depth, examples.accepted, examples.tree)
    artifact = source.put(store, CLASSIFIER, document, arrays, used)
    growth = {"kind": "classifier", "artifact": artifact, "width": width, "cap": width, **_unusual(proposals)}
    return StoredFit(
        artifact, CLASSIFIER, document, {"draft": draft, "window": {"kind": "fixed", "gamma": depth}, "growth": growth}
    )


def fit_static_tree_artifact(
    store: TraceStore,
    recording: str,
    draft: str,
    *,
    nodes: int | None = None,
    depth: int | None = None,
    profile: str | None = None,
    proposals: Proposals = "coupled",
    source: TreeSource | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> StoredFit:
    """The best fixed tree for the acceptance by level and rank that was recorded, as Sequoia finds it.

    With ``nodes`` and ``depth`` and no ``profile``: the tree of so many nodes and at most so many levels that accepts most. Else the tree
    that is fastest by the costs of a profile (the latest of the recording's pair and device by default) within these limits. Raises
    TraceError when the profile has no costs of trees or too little was recorded, PolicyError for a draft that there is not.
    """
    for flag, value, limit in (("--nodes", nodes, NODE_LIMIT), ("--depth", depth, GAMMA_LIMIT)):
        if value is not None and not 1 <= value <= limit:
            raise PolicyError(f"{flag} {value}: from 1 to {limit} is possible")
    source = source or tree_source(store, recording, draft, proposals)
    forest = source.trees.forest
    costs = None
    if profile is not None or nodes is None or depth is None:
        costs = _costs(store, source, profile)
    # Of a model whose laws are functions of the prefix the text's own ranks say everything, at any depth.
    held = STATIC_DEPTH if forest.shared and forest.full else forest.depth
    deepest, most = depth or held, nodes or STATIC_NODES
    progress("acceptance", 0, 1)
    acceptance = rank_acceptance(source.trees, deepest)
    tree = _tree(acceptance, most, deepest, costs)
    progress("acceptance", 1, 1)
    levels = max(len(p) for p in tree.paths)
    document = {
        **source.document(),
        "paths": tree.as_lists(),
        "nodes": len(tree.paths),
        "depth": levels,
        "expected_tokens": tree.expected_emitted,
        "expected_tokens_per_s": None if costs is None else tree.expected_tokens_per_s,
        "limits": {"nodes": most, "depth": deepest},
        "profile": None if costs is None else costs.profile_id,
        "acceptance": [[round(float(p), 6) for p in row] for row in acceptance.chance],
        "parents": acceptance.parents.tolist(),
    }
    artifact = source.put(store, STATIC_TREE, document, {}, (acceptance.chance, acceptance.parents))
    growth = {"kind": "static", "artifact": artifact, **_unusual(proposals)}
    policy = {"draft": draft, "window": {"kind": "fixed", "gamma": levels}, "growth": growth}
    return StoredFit(artifact, STATIC_TREE, document, policy)


def fit_score_artifact(
    store: TraceStore,
    recording: str,
    draft: str,
    *,
    depth: int | None = None,
    width: int | None = None,
    proposals: Proposals = "coupled",
    starts: int = SCORE_STARTS,
    seed: int = 0,
    source: TreeSource | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> StoredFit:
    """Calibrates the score ``coupled``: the ``sharpness`` whose estimates of acceptance have the least log loss, for trees of ``width``.

    A fifth of the requests is held out (of a single request, of its starts). ``width`` and ``depth`` are as recorded by default; a draft
    model's laws do not depend on the depth. The document's ``sharpness`` goes into a policy's ``growth``; the recording covers such
    growths exactly only after ``record --resume --cover``. Raises TraceError when too little was recorded, PolicyError for a draft that
    there is not.
    """
    source = source or tree_source(store, recording, draft, proposals)
    forest = source.trees.forest
    width, depth = forest.width if width is None else width, forest.depth if depth is None else depth
    progress("laws", 0, 1)
    laws = score_laws(source.trees, width=width, depth=depth, count=starts, seed=seed)
    requests = np.searchsorted(source.trace.offsets, laws.start, side="right")
    try:
        score = fit_score(laws, requests if len(np.unique(requests)) > 1 else laws.start, seed=seed)
    except ValueError as error:
        raise TraceError(f"recording {source.info.id}: {error}") from None
    progress("laws", 1, 1)
    used = (laws.gap, laws.q, laws.count, laws.taken, laws.start)
    document = {**source.document(), **score.to_json(), "width": width, "depth": depth, "seed": seed}
    document["starts"] = len(np.unique(laws.start))
    artifact = source.put(store, SCORE, document, {}, used)
    growth = {"kind": "top_k", "width": width, "score": "coupled", "sharpness": score.sharpness, **_unusual(proposals)}
    policy = {"draft": draft, "window": {"kind": "fixed", "gamma": depth}, "growth": growth, "select": {"top_n": DEFAULT_TOP_N}}
    return StoredFit(artifact, SCORE, document, policy)


@dataclass(frozen=True)
class TreeSource:
    """What a fit reads: a recording's search part, and one draft's trees over it."""

    info: RecordingInfo
    trace: ReplayTrace
    trees: RecordedTrees

    @property
    def sampled(self) -> bool:
        return bool(self.trees.sampled[self.trees.starts].any())

    def document(self) -> dict[str, Any]:
        """What every fitted document says of where it comes from."""
        return {
            "draft": self.trees.forest.draft,
            "pair": self.info.pair_id,
            "recording": self.info.id,
            "sampling": asdict(self.info.sampling),
            "proposals": self.trees.proposals,
            "recorded": {"width": self.trees.forest.width, "depth": self.trees.forest.depth},
            "requests": len(self.trace.order),
        }

    def put(
        self,
        store: TraceStore,
        kind: str,
        document: dict[str, Any],
        arrays: dict[str, npt.NDArray[Any]],
        used: Sequence[npt.NDArray[Any]],
    ) -> str:
        """Stores an artifact; ``used`` is what it was fitted to, whose hash goes with it."""
        provenance = {"recording": self.info.id, "requests": list(self.trace.request_ids), "fitted_to": hash_of(used)}
        return store.put_artifact(kind, document, arrays, pair_id=self.info.pair_id, provenance=provenance)


def hash_of(arrays: Sequence[npt.NDArray[Any]]) -> str:
    """The SHA-256 of arrays with their dtypes and shapes, in hexadecimal: what something was fitted to."""
    h = hashlib.sha256()
    for array in arrays:
        h.update(f"{array.dtype.str} {array.shape}".encode())
        h.update(np.ascontiguousarray(array).tobytes())
    return h.hexdigest()


def tree_source(store: TraceStore, name: str, draft: str, proposals: Proposals = "coupled") -> TreeSource:
    """The search part of a recording with its trees of a draft. Raises PolicyError and TraceError where there are none."""
    info = store.get_recording(name)
    grown = info.trees if proposals == "coupled" else info.trees_q
    if draft not in grown:
        known = dict.fromkeys([*store.get_pair(info.pair_id).document.get("drafts", {}), *info.drafts, *info.trees])
        known.pop("ngram", None)
        if draft == "ngram":
            raise PolicyError("--draft ngram: it proposes one continuation and grows no trees; name another draft")
        if draft not in known:
            raise PolicyError(
                f"--draft {draft}: the pair of recording {info.id} has no such draft; it has: {', '.join(sorted(known))}"
            )
        flag = "" if proposals == "coupled" else f" --tree-proposals {proposals}"
        raise TraceError(
            f"recording {info.id} has no trees of draft {draft!r}{' by probability' if flag else ''} (it has: "
            f"{info.trees_shown() or 'none'}); `record --resume {info.id} --tree-width {TREE_WIDTH} --tree-depth {TREE_DEPTH}{flag}` "
            "makes them"
        )
    if info.verifier == "rejection" and not info.sampling.greedy:
        raise TraceError(
            f"recording {info.id} was decoded by the rejection verifier, whose texts do not show what trees would accept; record with the "
            "coupled one"
        )
    loaded = store.load(info.id, [draft], trees=True, skip_corrupted=True).having(trees=[draft], proposals=proposals)
    if not loaded.requests:
        raise TraceError(f"recording {info.id} has no usable request with trees of draft {draft!r}")
    texts = loaded.trajectories
    trace = ReplayTrace(texts, {}, trees={(draft, proposals): loaded.trees(draft, proposals)})
    part, _ = split([t.request_id for t in texts], [t.category for t in texts])
    trace = trace.select(part)
    return TreeSource(info, trace, RecordedTrees.of(trace, draft, proposals))


def _unusual(proposals: Proposals) -> dict[str, str]:
    return {} if proposals == "coupled" else {"proposals": proposals}


def _classifier(store: TraceStore, name: str) -> tuple[str, Classifier]:
    """(id, classifier) of a stored one. Raises PolicyError for anything else."""
    try:
        found = store.get_artifact(name)
    except (NotFoundError, CorruptedChunkError) as error:
        raise PolicyError(f"--from {name}: {error}") from None
    if found.kind != CLASSIFIER:
        raise PolicyError(f"--from {name}: artifact {found.id} is a {found.kind}, not a {CLASSIFIER}")
    try:
        return found.id, Classifier.from_document(found.document, found.arrays)
    except ValueError as error:
        raise PolicyError(f"--from {name}: artifact {found.id}: {error}") from None


@dataclass(frozen=True)
class _Costs:
    """A profile's costs of trees with one draft, in the middle of the recording's contexts, seconds; ``token_s`` is an emitted one's."""

    profile_id: str
    first_s: float
    level_s: npt.NDArray[np.float64]
    verify_s: npt.NDArray[np.float64]
    overhead_s: float
    token_s: float

    def draft_level_s(self, level: int, width: int) -> float:
        """Seconds of the pass that makes a level, from ``width`` nodes; beyond the widths measured as the last ones go on."""
        if level == 1:
            return self.first_s
        beyond = max(0, width - WIDTH_LIMIT) * (self.level_s[WIDTH_LIMIT] - self.level_s[WIDTH_LIMIT - 1])
        return float(self.level_s[min(width, WIDTH_LIMIT)] + max(0.0, beyond))

    def verification_s(self, tokens: int) -> float:
        """Seconds of the target's pass over root and nodes."""
        return float(self.verify_s[tokens - 1])


def _costs(store: TraceStore, source: TreeSource, profile: str | None) -> _Costs:
    device = str(source.info.options.get("device", "cpu"))
    found = store.get_profile(profile) if profile else store.latest_profile(source.info.pair_id, device)
    otherwise = "or give --nodes N --depth D to choose by acceptance alone"
    if found is None:
        raise TraceError(f"there is no latency profile of pair {source.info.pair_id} on {device}: run `profile`, {otherwise}")
    measured: LatencyProfile = found.profile
    if measured.pair_id != source.info.pair_id:
        raise TraceError(
            f"--profile {found.id} is of pair {measured.pair_id}, recording {source.info.id} of {source.info.pair_id}"
        )
    draft = source.trees.forest.draft
    if measured.trees is None or draft not in measured.trees.level:
        raise TraceError(
            f"profile {found.id} has no costs of trees for draft {draft!r}: run `profile` again, name another with --profile ID, "
            f"{otherwise}"
        )
    trace = source.trace
    costs = TreeCosts.of(measured, draft, trace.max_context, width=1, kinds=("static",))  # of which passes are read, not bends
    lengths = np.diff(trace.offsets)[trace.order]
    context = float((trace.prompts[trace.order] + lengths / 2).mean())
    hot, bucket = int(source.sampled), min(int(context) // BUCKET, costs.level_s.shape[1] - 1)
    return _Costs(
        found.id,
        float(costs.first_s[hot, bucket, LAG]),
        costs.level_s[hot, bucket],
        costs.verify_s[hot, bucket],
        costs.overhead_s,
        float(costs.token_s[hot]),
    )


def _tree(acceptance: RankAcceptance, nodes: int, depth: int, costs: _Costs | None) -> StaticTree:
    try:
        if costs is None:
            best = best_static_tree(acceptance.chance, max_nodes=nodes, max_depth=depth)
            paths = best.paths(nodes, depth)
            return StaticTree(paths, 1.0 + float(best.accepted[nodes, depth]), 0.0)
        chosen = choose(
            acceptance.chance,
            costs.draft_level_s,
            costs.verification_s,
            costs.overhead_s,
            max_nodes=nodes,
            max_depth=depth,
        )
    except ValueError as error:
        raise TraceError(f"no static tree: {error}") from None
    # Noise and near ties are paid for each token emitted, whatever the tree.
    rate = 1.0 / (1.0 / chosen.expected_tokens_per_s + costs.token_s)
    return StaticTree(chosen.paths, chosen.expected_emitted, rate)

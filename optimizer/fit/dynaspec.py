"""DynaSpec's router (section 4.2): which token clusters hold plausible next tokens, from what is
known before the draft's pass.

An example is one context of the draft: the embedding of its last token x_t, the draft's last hidden
state of the token before, and the tokens of highest probability after x_t by the draft's
distribution over the whole vocabulary. The example's labels are the clusters of the first L of
those tokens. Using a router is the runtime's: :class:`runtime.shortlists.Router`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from spectune.optimizer.fit import perceptron
from spectune.optimizer.fit.clusters import check_draft, cohesion, fit_clusters, stored_clusters
from spectune.optimizer.fit.draft_distributions import WholeDistributions, states_over
from spectune.optimizer.fit.fr_spec import count_tokens, frequency_order, shown_sizes, token_ids
from spectune.optimizer.fit.ranks import recorded_ranks
from spectune.optimizer.fit.shared import LeftOut, StoredFit, held_out, keep, search_texts, stored
from spectune.optimizer.simulate.shortlist_ranks import ClusterRanks
from spectune.runtime.loading import LoadedPair
from spectune.runtime.policies.artifacts import FREQUENCIES, ROUTER
from spectune.runtime.policies.dynaspec import Clusters, Routing
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.progress import Progress, silent
from spectune.runtime.shortlists import top_clusters
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Trajectory

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

TOP: Final = 16
"""Most probable tokens kept of a context: labels, and what the scores count as the draft's mass."""
ROWS: Final = 256
"""Contexts whose distributions are there at a time."""
SHARE: Final = 0.25
"""Part of the head's clusters that a policy shown as a start takes at its first step."""
HIDDEN: Final = 128
EPOCHS: Final = 20
BATCH: Final = 256
LEARNING_RATE: Final = 1e-3
"""Adam's default. The paper names none of these figures."""
LABELS: Final = 8
"""L: most probable tokens of the draft whose clusters are positive. The paper names none."""
HELD_OUT: Final = 0.2
"""Share of the texts held out; at least one."""


@dataclass(frozen=True, eq=False)
class Contexts:
    """What a draft says after n tokens of texts. ``inputs`` float32 [n, d_e + d]: the embedding of
    the current token and the state of the one before it; ``top`` int64 [n, L']: rows of the draft's
    output head, most probable first, and their ``probabilities``; ``group`` int64 [n]: the text's
    number."""

    inputs: torch.Tensor
    top: IntArray
    probabilities: FloatArray
    group: IntArray

    def take(self, rows: npt.NDArray[Any]) -> Contexts:
        """Those at some places (a mask or numbers)."""
        inputs = self.inputs[torch.from_numpy(rows)]
        return Contexts(inputs, self.top[rows], self.probabilities[rows], self.group[rows])


@dataclass
class Shared:
    """What fits of routers to parts of the same recording share: the clusters of the draft's head
    (an artifact), and what the draft says of each text."""

    clusters: str | None = None
    texts: dict[tuple[bytes, bytes], tuple[torch.Tensor, ...]] = field(default_factory=dict)


def fit_router(
    store: TraceStore,
    recording: str,
    pair: LoadedPair,
    draft: str,
    *,
    clusters: int | None = None,
    clusters_from: str | None = None,
    hidden: int = HIDDEN,
    labels: int = LABELS,
    epochs: int = EPOCHS,
    seed: int = 0,
    left_out: LeftOut | None = None,
    ranked: bool = True,
    shared: Shared | None = None,
    progress: Progress = silent,
) -> StoredFit:
    """Stores clusters of a draft's output head with a router trained on what the draft says over
    the recorded texts.

    ``clusters``: M, by default :func:`optimizer.fit.clusters.default_clusters`, or stored ones,
    ``clusters_from``; ``labels``: L, tokens whose clusters are positive. Scores on texts held out,
    beside a frequency shortlist of the same mean size, are in the document. Where the recording
    holds trees of the draft its cluster ranks are made as well (``ranks``), so that policies with
    the router replay; unless ``ranked`` is false. Raises PolicyError for a draft without an output
    head, TraceError for a recording of another pair or with too few texts.
    """
    check_draft(pair, draft)
    if not 1 <= labels <= TOP:
        raise PolicyError(f"--labels {labels}: from 1 to {TOP} tokens can be labels")
    texts = search_texts(store, recording, pair.spec, left_out)
    shared = Shared() if shared is None else shared
    if (name := clusters_from or shared.clusters) is None:
        made = fit_clusters(store, pair, draft, count=clusters, seed=seed, progress=progress)
        name = made.artifact
    shared.clusters, partition = name, stored_clusters(store, pair, draft, name)
    read = contexts(pair, draft, texts, shared.texts, progress)
    output = pair.models[draft].output
    counts = count_tokens(token_ids(texts), pair.target.vocab_size)
    router, scores = train_router(
        read,
        partition,
        frequency_order(counts[output.ids]),  # of the head's rows
        labels=labels,
        hidden=hidden,
        epochs=epochs,
        seed=seed,
        progress=progress,
    )
    weights = tuple(w.numpy() for w in perceptron.weights(router))
    described, arrays = Routing(weights, partition, output.hash).to_document()
    document = {
        "recording": recording,
        "requests": len(texts),
        "left_out": None if left_out is None else list(left_out),
        "pair": pair.id,
        "draft": draft,
        **described,
        "contexts": len(read.group),
        "label_tokens": labels,
        "epochs": epochs,
        "seed": seed,
        "cluster_sizes": partition.sizes.tolist(),
        "cohesion": cohesion(output.weight.cpu().float().numpy(), partition),
        "scores": scores,
    }
    evidence: dict[str, Any] = {"fitted_to": (read.top, read.group), "recording": recording}
    artifact = keep(store, ROUTER, document, arrays, pair_id=pair.id, **evidence)
    ranks = None
    if ranked and draft in store.get_recording(recording).with_trees:
        (found,) = recorded_ranks(store, pair, recording, draft, [artifact], progress=progress)
        ranks = found.artifact
    first = max(1, round(SHARE * partition.count))
    sizes = {"k0": first, "k1": max(1, first // 2), "k_min": max(1, first // 4)}
    shortlist = {"kind": "clusters", **sizes, "artifact": artifact}
    policy = {"draft": draft, "window": {"kind": "fixed", "gamma": 4}, "shortlist": shortlist}
    return StoredFit(artifact, ROUTER, {**document, "ranks": ranks}, policy)


def fit_ranks(
    store: TraceStore,
    recording: str,
    pair: LoadedPair,
    draft: str,
    *,
    router: str | None = None,
    frequencies: str | None = None,
    progress: Progress = silent,
) -> StoredFit:
    """Stores the ranks of a recording under a stored router or frequency order, which replays of
    their policies need; the document has the share of true tokens that so many clusters or tokens
    hold, and the mass of the draft's distribution that they keep, means over the texts.

    Raises PolicyError unless one of the two is named, and for a head's frequency ranks: its chains
    replay as trees, without.
    """
    check_draft(pair, draft)
    if (router is None) == (frequencies is None):
        raise PolicyError("fit ranks: name one order, --router ID or --frequencies ID")
    if router is not None:
        order = stored(store, "--router", router, ROUTER)
    elif draft in pair.drafts:
        order = stored(store, "--frequencies", frequencies or "", FREQUENCIES)
    else:
        raise PolicyError(
            f"--draft {draft}: chains of a head replay as trees, which need no frequency ranks; "
            "name a language-model draft"
        )
    document: dict[str, Any] = {"recording": store.get_recording(recording).id, "pair": pair.id}
    document["draft"] = draft
    (ranks,) = recorded_ranks(store, pair, recording, draft, [order.id], progress=progress)
    document |= {"requests": len(ranks.digests), ranks.KEY: ranks.fitted}
    if isinstance(ranks, ClusterRanks):
        document |= {"clusters": ranks.clusters, "nodes": len(ranks.ranks)}
        shown = [k for k in ranks.budgets if k & (k - 1) == 0 or k == ranks.clusters]
    else:
        document["nodes"] = len(ranks.own)
        shown = [k for k in shown_sizes(ranks.budgets[-1]) if k in ranks.budgets]
    document["kept"] = ranks.kept(shown)
    return StoredFit(ranks.artifact, ranks.KIND, document, {"draft": draft})


@torch.no_grad()
def contexts(
    pair: LoadedPair,
    draft: str,
    texts: Sequence[Trajectory],
    known: dict[tuple[bytes, bytes], tuple[torch.Tensor, ...]],
    progress: Progress,
) -> Contexts:
    """What a draft says after every output token of texts, each read in one pass; a head reads the
    target's features. ``known`` remembers texts from call to call."""
    parts, groups = [], []
    for n, text in enumerate(texts):
        first = max(len(text.prompt_ids) - 1, 1 if draft in pair.drafts else 2)
        if len(text.prompt_ids) + len(text.output_ids) <= first:
            continue
        key = text.prompt_ids.tobytes(), text.output_ids.tobytes()
        if key not in known:
            known[key] = _contexts_of(pair, draft, text, first)
        parts.append(known[key])
        groups.append(np.full(len(known[key][0]), n, dtype=np.int64))
        progress("contexts", n + 1, len(texts))
    if len(parts) < 2:
        raise TraceError(
            "a router is trained and scored on different texts: record at least two requests with "
            "an output"
        )
    inputs, top, probabilities = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return Contexts(inputs, top.numpy(), probabilities.double().numpy(), np.concatenate(groups))


def _contexts_of(
    pair: LoadedPair, draft: str, text: Trajectory, first: int
) -> tuple[torch.Tensor, ...]:
    """Inputs, most probable rows and their probabilities after the tokens of one text from
    ``first`` on."""
    model, ids = pair.models[draft], [*text.prompt_ids.tolist(), *text.output_ids.tolist()]
    states = states_over(pair, draft, ids, 1).text_states()
    whole = WholeDistributions(pair, draft)
    best = [
        whole.logits(part).log_softmax(-1).topk(min(TOP, model.output.rows), dim=-1)
        for part in torch.split(states[first:], ROWS)
    ]
    values, rows = (torch.cat(found) for found in zip(*best, strict=True))
    embedded = model.embedded(torch.tensor(ids, device=pair.device))
    inputs = torch.cat([embedded[first:].float(), states[first - 1 : -1].float()], 1)
    return inputs.cpu(), rows.cpu(), values.exp().cpu()


def cluster_labels(top: IntArray, clusters: Clusters) -> npt.NDArray[np.bool_]:
    """y of section 4.2: which clusters hold one of each context's tokens ``top`` [n, L], bool [n,
    M]."""
    labels = np.zeros((len(top), clusters.count), dtype=np.bool_)
    np.put_along_axis(labels, clusters.of[top], True, axis=1)
    return labels


def train_router(
    contexts: Contexts,
    clusters: Clusters,
    frequencies: Frequencies,
    *,
    labels: int = LABELS,
    hidden: int = HIDDEN,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[nn.Sequential, dict[str, Any]]:
    """Trains a router by binary cross-entropy on multi-hot labels (section 4.2), and scores it on
    texts held out (:func:`score_router`; ``loss``, nats a context). The same seed gives the same
    router on the same machine. Raises TraceError where there are fewer than two texts."""
    try:
        held = held_out(contexts.group, HELD_OUT, seed)
    except ValueError as error:
        raise TraceError(f"a router is trained and scored on different texts: {error}") from None
    learning, apart = contexts.take(~held), contexts.take(held)
    y, y_apart = (
        torch.from_numpy(cluster_labels(part.top[:, :labels], clusters))
        for part in (learning, apart)
    )
    router = perceptron.train(
        learning.inputs,
        y,
        hidden=hidden,
        epochs=epochs,
        batch=BATCH,
        learning_rate=learning_rate,
        seed=seed,
        progress=progress,
    )
    scores = score_router(router, apart, clusters, frequencies, labels=labels)
    return router, {**scores, "loss": perceptron.loss_of(router, apart.inputs, y_apart)}


def score_router(
    router: nn.Module,
    contexts: Contexts,
    clusters: Clusters,
    frequencies: Frequencies,
    *,
    labels: int = LABELS,
) -> dict[str, Any]:
    """What the router's top k clusters keep of ``contexts`` contexts, JSON-ready, for ``ks`` 1, 2,
    4, ... below M. Mass is counted of the tokens given, so it approaches the distribution's as L'
    grows.

    ``recall``: the share of all label clusters among the top k; ``labels``: label clusters of a
    context, on average, of the draft's first ``label_tokens`` tokens. ``size``: tokens in the
    union, on average. ``first``: the share of contexts whose most probable token is kept; ``mass``:
    the mean probability kept of the tokens given, of at most ``ceiling``, their mean sum;
    ``oracle``: that of the best k clusters under these probabilities, so that ``oracle - mass`` is
    the mean routing regret of corollary 5.2. ``frequency_first`` and ``frequency``: ``first`` and
    ``mass`` of one frequency shortlist of round(size) tokens."""
    ks = [1 << i for i in range(max(1, (clusters.count - 1).bit_length()))]
    n, tokens, mass = len(contexts.top), contexts.top, contexts.probabilities
    with torch.no_grad():
        parts = torch.split(contexts.inputs, perceptron.BATCH_OF_SCORES)
        order = torch.cat([top_clusters(router(part), clusters.count) for part in parts]).numpy()
    place = np.argsort(order, axis=1)  # of each cluster in its context's order
    of = clusters.of[tokens]
    place_of_tokens = np.take_along_axis(place, of, axis=1)
    wanted = cluster_labels(tokens[:, :labels], clusters)
    sizes = np.cumsum(clusters.sizes[order], axis=1).mean(axis=0)
    by_cluster = np.zeros((n, clusters.count))
    np.add.at(by_cluster, (np.arange(n)[:, None], of), mass)
    best = np.cumsum(np.sort(by_cluster, axis=1)[:, ::-1], axis=1).mean(axis=0)
    ranks = frequencies.rank[tokens]
    taken = {k: frequencies.size(round(float(sizes[k - 1]))) for k in ks}

    def kept(inside: npt.NDArray[np.bool_]) -> float:
        return float(np.where(inside, mass, 0.0).sum(1).mean())

    return {
        "contexts": n,
        "label_tokens": min(labels, tokens.shape[1]),
        "labels": float(wanted.sum(1).mean()),
        "ks": ks,
        "recall": [float((place[wanted] < k).mean()) for k in ks],
        "size": [float(sizes[k - 1]) for k in ks],
        "first": [float((place_of_tokens[:, 0] < k).mean()) for k in ks],
        "mass": [kept(place_of_tokens < k) for k in ks],
        "oracle": [float(best[k - 1]) for k in ks],
        "ceiling": float(mass.sum(1).mean()),
        "frequency_first": [float((ranks[:, 0] < taken[k]).mean()) for k in ks],
        "frequency": [kept(ranks < taken[k]) for k in ks],
    }

"""Fitting what shortlists need to a recording, and keeping it: token frequencies, and a router with its clusters, as artifacts.

Only the requests that a search may see are used (:func:`optimizer.record.split`). Unlike the fits of trees these need the
pair itself: its vocabulary, its draft's output head, and the hidden states that a router reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from db.errors import CorruptedChunkError, NotFoundError
from optimizer.fit.cluster_ranks import cluster_ranks
from optimizer.fit.clusters import cohesion, default_clusters, fit_clusters
from optimizer.fit.draft_distributions import text_states
from optimizer.fit.dynaspec import EPOCHS, HIDDEN, LABELS, train_router
from optimizer.fit.fr_spec import count_tokens, fit_frequencies
from optimizer.fit.frequency_ranks import frequency_ranks
from optimizer.fit.shared import Progress, StoredFit, hash_of
from optimizer.record import split
from optimizer.shortlist_ranks import CLUSTER_RANKS, FREQUENCY_RANKS, budget_grid
from runtime.decoder import shortlisted_model
from runtime.loading import LoadedPair
from runtime.policies.dynaspec import FREQUENCIES, ROUTER, Clusters, Frequencies, Routing
from traces.errors import PolicyError, TraceError, WorkloadError
from traces.schema import Proposals, Trajectory
from traces.store import TraceStore

CLUSTERS: Final = "clusters"
"""Kind of an artifact that holds a partition of an output head alone; ``fit router`` takes it further."""
TOP: Final = 16
"""Most probable tokens kept of a context: labels, and what the scores count as the draft's mass."""
SHARE: Final = 0.25
"""Part of the head's clusters that a policy shown as a start takes at its first step."""


LeftOut = tuple[int, int]
"""(i, n): a fit does without every n-th of the texts it may read, from the i-th on, so that it can be judged by those."""


@dataclass(frozen=True)
class Contexts:
    """What a draft says after tokens of texts. ``embeddings`` [n, d_e] of the current token and ``previous`` [n, d], the state of the one
    before it, float32; ``top`` int64 [n, TOP]: rows of the draft's output head, most probable first, and their ``probabilities``;
    ``group`` int64 [n]: the text's number."""

    embeddings: torch.Tensor
    previous: torch.Tensor
    top: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]
    group: npt.NDArray[np.int64]


def fit_frequencies_artifact(
    store: TraceStore,
    recording: str,
    pair: LoadedPair,
    *,
    corpus: Sequence[str] = (),
    left_out: LeftOut | None = None,
    progress: Progress = lambda *_: None,
) -> StoredFit:
    """The vocabulary by how often its tokens occur in recorded texts, prompts included, or in the text files of ``corpus`` (FR-Spec).

    EOS and the tokenizer's special tokens come first. The ranks of the recording under the order are made as well (``ranks``, by draft), so
    that chains with shortlists of it replay exactly. Raises TraceError for a recording of another pair or without texts, WorkloadError
    for a file that cannot be read or is empty.
    """
    texts: Iterable[Sequence[int] | npt.NDArray[np.integer]]
    if corpus:
        texts = [_tokens_of(pair, name) for name in corpus]
        source: dict[str, Any] = {"corpus": list(corpus)}
    else:
        texts = [np.concatenate([t.prompt_ids, t.output_ids]) for t in _texts(store, recording, pair, left_out)]
        source = {"recording": recording, "requests": len(texts), "left_out": _shown(left_out)}
    progress("counting", 0, 1)
    counts = count_tokens(texts, pair.target.vocab_size)
    always = sorted({int(i) for i in (*pair.eos_ids, *getattr(pair.tokenizer, "all_special_ids", ())) if 0 <= i < len(counts)})
    made = fit_frequencies(counts, always)
    progress("counting", 1, 1)
    described, arrays = made.to_document()
    total, kept = int(counts.sum()), np.cumsum(counts[made.order])
    sizes = _sizes(made.vocab)
    document = {
        **source,
        "pair": pair.id,
        **described,
        "tokens": total,
        "distinct": int((counts > 0).sum()),
        "coverage": {str(size): round(float(kept[made.size(size) - 1]) / max(1, total), 6) for size in sizes},
    }
    artifact = _put(store, pair, FREQUENCIES, document, arrays, (counts,))
    draft = next(iter((*pair.drafts, *pair.heads)), "DRAFT")
    block = {"kind": "frequency", "size": max(1, made.vocab // 4), "artifact": artifact}
    grown = [] if corpus else [d for d in pair.drafts if d in store.get_recording(recording).trees]
    document["ranks"] = {d: frequency_ranks(store, pair, recording, d, artifact, progress=progress).artifact for d in grown}
    return StoredFit(artifact, FREQUENCIES, document, {"draft": draft, "window": {"kind": "fixed", "gamma": 4}, "shortlist": block})


def fit_clusters_artifact(
    store: TraceStore,
    pair: LoadedPair,
    draft: str,
    *,
    count: int | None = None,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> StoredFit:
    """Clusters of a draft's output head by spherical k-means, without a router (section 4.2); ``count``: M. Raises PolicyError for a draft
    without an output head, or for more clusters than it has rows."""
    _known(pair, draft)
    output = shortlisted_model(pair, draft).output
    if count is not None and count > output.rows:
        raise PolicyError(f"--clusters {count}: the output head of draft {draft!r} has {output.rows} rows; ask for at most so many")
    weight = output.weight.float().cpu().numpy()
    progress("clusters", 0, 1)
    made = fit_clusters(weight, count or default_clusters(output.rows), seed=seed)
    progress("clusters", 1, 1)
    described, arrays = made.to_document()
    document = {"pair": pair.id, "draft": draft, **described, "head": output.hash, "seed": seed}
    document |= {"cluster_sizes": made.sizes.tolist(), "cohesion": cohesion(weight, made)}
    return StoredFit(_put(store, pair, CLUSTERS, document, arrays, (weight,)), CLUSTERS, document, {"draft": draft})


def _clusters(store: TraceStore, pair: LoadedPair, draft: str, name: str) -> Clusters:
    """Stored clusters of a draft's head."""
    try:
        found = store.get_artifact(name)
    except (NotFoundError, CorruptedChunkError) as error:
        raise PolicyError(f"--clusters-from {name}: {error}") from None
    if found.kind not in (CLUSTERS, ROUTER):
        raise PolicyError(f"--clusters-from {name}: artifact {found.id} is a {found.kind}, not clusters")
    head = shortlisted_model(pair, draft).output.hash
    if found.document.get("head") != head:
        raise PolicyError(
            f"--clusters-from {name}: fitted on another output head (hash {found.document.get('head')}) than draft {draft!r} has (hash "
            f"{head}); `fit clusters --draft {draft}` makes them"
        )
    return Clusters.from_document(found.document, found.arrays)


def _known(pair: LoadedPair, draft: str) -> None:
    if draft not in (*pair.drafts, *pair.heads):
        known = ", ".join((*pair.drafts, *pair.heads)) or "none"
        raise PolicyError(f"--draft {draft}: pair {pair.spec.name} has no such draft with an output head; it has: {known}")


def fit_router_artifact(
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
    progress: Progress = lambda *_: None,
) -> StoredFit:
    """Clusters of a draft's output head, and a router trained on what the draft says over the recorded texts (DynaSpec, section 4.2).

    ``clusters``: M, by default :func:`optimizer.fit.clusters.default_clusters`, or stored ones, ``clusters_from``; ``labels``: L, tokens
    whose clusters are positive. Scores on texts held out, beside a frequency shortlist of the same mean size, are in the document. Where
    the recording holds trees of the draft its cluster ranks are made as well (``ranks``), so that policies with the router replay. Raises
    PolicyError for a draft without an output head, TraceError for a recording of another pair or with too few texts.
    """
    _known(pair, draft)
    if not 1 <= labels <= TOP:
        raise PolicyError(f"--labels {labels}: from 1 to {TOP} tokens can be labels")
    texts = _texts(store, recording, pair, left_out)
    output = shortlisted_model(pair, draft).output
    if clusters_from is not None:
        partition = _clusters(store, pair, draft, clusters_from)
    else:
        stored = fit_clusters_artifact(store, pair, draft, count=clusters, seed=seed, progress=progress)
        partition = _clusters(store, pair, draft, stored.artifact)
    found = contexts(pair, draft, texts, progress=lambda done, total: progress("contexts", done, total))
    rows = {int(token): row for row, token in enumerate(output.ids.tolist())} if output.token_ids is not None else None
    tokens = np.concatenate([np.concatenate([t.prompt_ids, t.output_ids]) for t in texts])
    of_rows = tokens if rows is None else np.array([rows[t] for t in tokens.tolist() if t in rows], dtype=np.int64)
    frequent: Frequencies = fit_frequencies(count_tokens([of_rows], output.rows))
    router, scores = train_router(
        found.embeddings,
        found.previous,
        found.top,
        partition,
        group=found.group,
        labels=labels,
        hidden=hidden,
        epochs=epochs,
        seed=seed,
        probabilities=found.probabilities,
        frequencies=frequent,
        progress=lambda done, total: progress("epochs", done, total),
    )
    described, arrays = Routing(router, partition, output.hash).to_document()
    document = {
        "recording": recording,
        "requests": len(texts),
        "left_out": _shown(left_out),
        "pair": pair.id,
        "draft": draft,
        **described,
        "contexts": len(found.group),
        "label_tokens": labels,
        "epochs": epochs,
        "seed": seed,
        "cluster_sizes": partition.sizes.tolist(),
        "cohesion": cohesion(output.weight.float().cpu().numpy(), partition),
        "scores": scores.to_json(),
    }
    artifact = _put(store, pair, ROUTER, document, arrays, (found.top, found.group))
    first = max(1, round(SHARE * partition.count))
    block = {"kind": "clusters", "k0": first, "k1": max(1, first // 2), "k_min": max(1, first // 4), "artifact": artifact}
    ranked = None
    if draft in store.get_recording(recording).trees:
        ranked = cluster_ranks(store, pair, recording, draft, artifact, progress=progress).artifact
    start = {"draft": draft, "window": {"kind": "fixed", "gamma": 4}, "shortlist": block}
    return StoredFit(artifact, ROUTER, {**document, "ranks": ranked}, start)


def fit_ranks_artifact(
    store: TraceStore,
    recording: str,
    pair: LoadedPair,
    draft: str,
    *,
    router: str | None = None,
    frequencies: str | None = None,
    proposals: Proposals = "coupled",
    progress: Progress = lambda *_: None,
) -> StoredFit:
    """The ranks of a recording under a stored router (:mod:`optimizer.fit.cluster_ranks`) or frequency order
    (:mod:`optimizer.fit.frequency_ranks`), which replays of their policies need; with the share of true tokens that so many
    clusters or tokens hold, and the mass of the draft's law that they keep, means over the texts.

    Raises PolicyError unless one of the two is named, and for a head's frequency ranks: its chains replay as trees, without.
    """
    _known(pair, draft)
    if (router is None) == (frequencies is None):
        raise PolicyError("fit ranks: name one order, --router ID or --frequencies ID")
    document: dict[str, Any] = {"recording": store.get_recording(recording).id, "pair": pair.id, "draft": draft, "proposals": proposals}
    if router is not None:
        found = cluster_ranks(store, pair, recording, draft, router, proposals=proposals, progress=progress)
        document |= {"requests": len(found.digests), "router": found.router, "clusters": found.clusters, "nodes": len(found.ranks)}
        document["kept"] = found.kept([k for k in budget_grid(found.clusters) if k & (k - 1) == 0 or k == found.clusters])
        return StoredFit(found.artifact, CLUSTER_RANKS, document, {"draft": draft})
    assert frequencies is not None
    if draft not in pair.drafts:
        raise PolicyError(f"--draft {draft}: chains of a head replay as trees, which need no frequency ranks; name a language-model draft")
    ranks = frequency_ranks(store, pair, recording, draft, frequencies, proposals=proposals, progress=progress)
    document |= {"requests": len(ranks.digests), "frequencies": ranks.fitted, "nodes": len(ranks.own)}
    document["kept"] = ranks.kept([k for k in _sizes(ranks.vocab) if k in ranks.budgets])
    return StoredFit(ranks.artifact, FREQUENCY_RANKS, document, {"draft": draft})


def _sizes(vocab: int) -> list[int]:
    """Powers of two from 64 up to a vocabulary, and that."""
    return sorted({min(vocab, 1 << bits) for bits in range(6, 20)})


@torch.no_grad()
def contexts(
    pair: LoadedPair, draft: str, texts: Sequence[Trajectory], *, progress: Any = lambda done, total: None
) -> Contexts:
    """What a draft says after every output token of texts, each read in one pass; a head reads the target's features."""
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    groups: list[npt.NDArray[np.int64]] = []
    for n, text in enumerate(texts):
        ids = torch.tensor([*text.prompt_ids.tolist(), *text.output_ids.tolist()], device=pair.device)
        first = max(len(text.prompt_ids) - 1, 1 if draft in pair.drafts else 2)
        if len(ids) <= first:
            continue
        states = text_states(pair, draft, ids.tolist())
        embedded, output = shortlisted_model(pair, draft).embedded(ids), shortlisted_model(pair, draft).output
        logits = torch.nn.functional.linear(states[first:], output.weight, output.bias).float()
        best = logits.log_softmax(-1).topk(min(TOP, output.rows), dim=-1)
        parts.append((embedded[first:].float(), states[first - 1 : -1].float(), best.indices, best.values.exp()))
        groups.append(np.full(len(best.values), n, dtype=np.int64))
        progress(n + 1, len(texts))
    if len(parts) < 2:
        raise TraceError("a router is trained and scored on different texts: record at least two requests with an output")
    embeddings, previous, top, probabilities = (torch.cat(columns).cpu() for columns in zip(*parts, strict=True))
    return Contexts(embeddings, previous, top.numpy(), probabilities.double().numpy(), np.concatenate(groups))


def search_texts(store: TraceStore, recording: str, pair: LoadedPair) -> list[Trajectory]:
    """The texts of a recording that fits may read: its search part. Raises TraceError for a recording of another pair or without texts."""
    info = store.get_recording(recording)
    if info.pair_id != pair.id:
        raise TraceError(f"recording {info.id} is of pair {info.pair_id}, this is pair {pair.id}; name one of this pair")
    texts = store.load(info.id, [], skip_corrupted=True).trajectories
    if not texts:
        raise TraceError(f"recording {info.id} has no usable request")
    part, _ = split([t.request_id for t in texts], [t.category for t in texts])
    return [texts[i] for i in part]


def _texts(store: TraceStore, recording: str, pair: LoadedPair, left_out: LeftOut | None = None) -> list[Trajectory]:
    texts = search_texts(store, recording, pair)
    return [t for i, t in enumerate(texts) if left_out is None or i % left_out[1] != left_out[0]]


def _shown(left_out: LeftOut | None) -> list[int] | None:
    return None if left_out is None else list(left_out)


def _tokens_of(pair: LoadedPair, name: str) -> list[int]:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"--corpus {name}: {getattr(error, 'strerror', None) or error}; give text files in UTF-8") from None
    found = pair.encode(text)
    if not found:
        raise WorkloadError(f"--corpus {name}: the file has no tokens")
    if (unknown := max(found)) >= pair.target.vocab_size:
        raise WorkloadError(
            f"--corpus {name}: the tokenizer makes {pair.tokenizer.decode([unknown])!r} token {unknown}, but the models know "
            f"{pair.target.vocab_size} tokens; leave it out of the file, or give the tokenizer that the models were trained with"
        )
    return found


def _put(
    store: TraceStore,
    pair: LoadedPair,
    kind: str,
    document: dict[str, Any],
    arrays: dict[str, npt.NDArray[Any]],
    used: Sequence[npt.NDArray[Any]],
) -> str:
    provenance = {key: document[key] for key in ("recording", "corpus") if key in document} | {"fitted_to": hash_of(used)}
    return store.put_artifact(kind, document, arrays, pair_id=pair.id, provenance=provenance)

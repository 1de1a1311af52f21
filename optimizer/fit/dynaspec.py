"""DynaSpec (section 4.2): clusters of an output head's tokens, and a router that says which of them
hold plausible next tokens, from what is known before the draft's pass.

An example is one context of the draft, on a text or on what the draft itself goes on with from
there: the embedding of its last token x_t, the draft's last hidden state of the token before, and
the L tokens of highest probability after x_t by the draft's distribution over the whole vocabulary,
whose clusters are the labels. Using a router is the runtime's: :class:`runtime.shortlists.Router`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sklearn.cluster import kmeans_plusplus
from torch import Tensor

from spectune.optimizer.fit import perceptron
from spectune.optimizer.fit.corpus import corpus_tokens
from spectune.optimizer.fit.shared import StoredFit, keep, texts_to_fit
from spectune.runtime.drafts.eagle import columns
from spectune.runtime.loading import LoadedPair
from spectune.runtime.models import CHUNK
from spectune.runtime.policies.artifacts import ROUTER
from spectune.runtime.policies.dynaspec import Clusters, Routing
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Trajectory

FloatArray = npt.NDArray[np.float32]

HIDDEN: Final = 128
EPOCHS: Final = 20
"""Of a recording, whose texts are few; of a corpus one."""
BATCH: Final = 256
LABELS: Final = 8
"""L: most probable tokens of the draft whose clusters are positive. The paper names none of these
figures."""
LEVELS, EVERY = 4, 4
"""Tokens that the draft goes on with, after one token of a text in so many."""
ROWS: Final = 256
"""Contexts whose distributions are there at a time."""
WINDOW: Final = 512
"""Tokens of a corpus that are read as one text."""
PART_BYTES: Final = 1 << 26
"""Of the inputs that are there at a time while a router is trained, about."""
SAMPLED: Final = 64
"""Rows of a head for each cluster that centroids are fitted to, at most."""
ITERATIONS: Final = 100
"""Of k-means, at most."""
ASSIGNED: Final = 1 << 14
"""Rows whose nearest centroids are found at a time."""


def fit_router(
    store: TraceStore,
    recording: str,
    pair: LoadedPair,
    draft: str,
    *,
    corpus: Sequence[str] = (),
    contexts: int = 1_000_000,
    clusters: int | None = None,
    hidden: int = HIDDEN,
    labels: int = LABELS,
    epochs: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> StoredFit:
    """Stores clusters of a draft's output head with a router trained on what the draft says over
    the outputs of a recording, or over about ``contexts`` tokens of a ``corpus``
    (:func:`corpus_tokens`) drawn at random.

    ``clusters``: M, by default :func:`default_clusters`; ``labels``: L. Raises PolicyError for a
    draft without an output head, TraceError for a recording of another pair or without an output,
    WorkloadError for a corpus that cannot be read.
    """
    if draft not in pair.models:
        raise PolicyError(
            f"--draft {draft}: pair {pair.spec.name} has no such draft with an output head; it "
            f"has: {', '.join(pair.models) or 'none'}"
        )
    output = pair.models[draft].output
    count = clusters or default_clusters(output.rows)
    if count > output.rows:
        raise PolicyError(
            f"fit.clusters {count}: the output head of draft {draft!r} has {output.rows} rows; ask "
            "for at most so many"
        )
    source: dict[str, Any] = {"corpus": list(corpus), "contexts": contexts}
    texts = corpus_texts(pair, draft, corpus, contexts, seed, progress)
    if not corpus:
        recorded = texts_to_fit(store, recording, pair.spec)
        source = {"recording": recording, "request_ids": [t.request_id for t in recorded]}
        texts = recorded_texts(recorded, progress)
    progress("clusters", 0, 1)
    partition = cluster(output.weight.cpu().float().numpy(), count, seed=seed)
    progress("clusters", 1, 1)
    sizes = list[int]()

    def parts() -> Iterator[tuple[FloatArray, npt.NDArray[np.bool_]]]:
        for inputs, top in examples(pair, draft, texts, min(labels, output.rows)):
            sizes.append(len(top))
            yield inputs, cluster_labels(top, partition)

    epochs = epochs or (1 if corpus else EPOCHS)
    size = {"hidden": hidden, "epochs": epochs, "batch": BATCH}
    weights = perceptron.train_in_parts(parts(), **size, seed=seed)
    if weights is None:
        raise TraceError("a router is trained on outputs: record at least one request with any")
    described, arrays = Routing(weights, partition, output.hash).to_document()
    about = {"examples": sum(sizes), "label_tokens": labels, "epochs": epochs, "seed": seed}
    document = {**source, "pair": pair.id, "draft": draft, **described, **about}
    document["cluster_sizes"] = partition.sizes.tolist()
    return keep(store, ROUTER, document, arrays, policy=partial(_first_policy, draft, count))


def _first_policy(draft: str, clusters: int, artifact: str) -> dict[str, Any]:
    """A policy to begin with."""
    first = max(1, clusters // 4)
    sizes = {"k0": first, "k1": max(1, first // 2), "k_min": max(1, first // 4)}
    shortlist = {"kind": "clusters", **sizes, "artifact": artifact}
    return {"draft": draft, "window": {"kind": "fixed", "gamma": 4}, "shortlist": shortlist}


def default_clusters(vocab: int) -> int:
    """M where none is asked for: the power of two nearest to sqrt(vocab) (by its logarithm), within
    1..1024 and at most ``vocab``.

    The paper names no M. With sqrt(vocab) clusters of about sqrt(vocab) tokens, scoring the
    clusters costs no more than evaluating one.
    """
    return min(1 << round(math.log2(vocab) / 2), 1024, vocab)


def cluster(head: FloatArray, count: int, *, seed: int = 0) -> Clusters:
    """``count`` = M clusters of the tokens by the direction of their rows of ``head``, floats
    [vocab, d]: spherical k-means, rows and centroids scaled to length 1; unbalanced, as in the
    paper. The head is W_LM transposed, as checkpoints hold it. Centroids of large heads are fitted
    to :data:`SAMPLED` rows a cluster, drawn at random."""
    unit = _scaled(head)
    sample, most = unit, SAMPLED * count
    if len(unit) > most:
        sample = unit[np.random.default_rng(seed).choice(len(unit), most, replace=False)]
    centroids, _ = kmeans_plusplus(sample, count, random_state=seed)
    nearest = np.full(len(sample), -1)
    for _ in range(ITERATIONS):
        before, nearest = nearest, _nearest(sample, centroids)
        if np.array_equal(before, nearest):
            break
        sums = np.zeros_like(centroids)
        np.add.at(sums, nearest, sample)
        is_empty = np.bincount(nearest, minlength=count) == 0
        centroids = np.where(is_empty[:, None], centroids, _scaled(sums))
    return Clusters(_nearest(unit, centroids), count)


def _scaled(rows: FloatArray) -> FloatArray:
    """Rows scaled to length 1; zeros stay."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: FloatArray = (rows / np.maximum(lengths, 1e-12)).astype(np.float32)
    return scaled


def _nearest(rows: FloatArray, centroids: FloatArray) -> npt.NDArray[np.int64]:
    """The centroid of the largest cosine with each row, int64 [n]."""
    parts = (rows[at : at + ASSIGNED] for at in range(0, len(rows), ASSIGNED))
    return np.concatenate([(part @ centroids.T).argmax(1) for part in parts]).astype(np.int64)


def recorded_texts(
    texts: Sequence[Trajectory], progress: Progress = silent
) -> Iterator[tuple[list[int], int]]:
    """Recorded texts, each with the last token of its prompt, the first that is a context."""
    for number, text in enumerate(texts, 1):
        yield [*text.prompt_ids.tolist(), *text.output_ids.tolist()], len(text.prompt_ids) - 1
        progress("contexts", number, len(texts))


def corpus_texts(
    pair: LoadedPair,
    draft: str,
    corpus: Sequence[str],
    contexts: int,
    seed: int,
    progress: Progress = silent,
) -> Iterator[tuple[list[int], int]]:
    """Windows of a corpus in random order, each with its first token that is a context, until they
    hold so many ``contexts``."""
    window = min(WINDOW, pair.context([draft]).positions - LEVELS)
    read = 0
    for ids, share in corpus_tokens(pair, corpus, seed=seed):
        for at in range(0, len(ids), window):
            text = ids[at : at + window]
            yield text, 0
            read += len(text)
        progress("contexts", min(read, contexts), min(contexts, round(read / share)))
        if read >= contexts:
            return


def examples(
    pair: LoadedPair, draft: str, texts: Iterable[tuple[list[int], int]], labels: int
) -> Iterator[tuple[FloatArray, npt.NDArray[np.int64]]]:
    """What a draft says after the tokens of texts from a first one on, and after :data:`LEVELS` of
    its own, some examples at a time: float32 [n, d_e + d], the embedding of the current token and
    the state of the one before it, and int64 [n, labels], the most probable rows of its output
    head."""
    inputs, top, size = list[Tensor](), list[Tensor](), 0
    for ids, first in texts:
        for x, best in _examples_of(pair, draft, ids, first, labels):
            inputs.append(x)
            top.append(best)
            size += x.nbytes
        if size > PART_BYTES:
            yield torch.cat(inputs).numpy(), torch.cat(top).numpy()
            inputs, top, size = [], [], 0
    if inputs:
        yield torch.cat(inputs).numpy(), torch.cat(top).numpy()


@torch.no_grad()
def _examples_of(
    pair: LoadedPair, draft: str, ids: list[int], first: int, labels: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """:func:`examples` of one text."""
    model, size, device = pair.models[draft], len(ids), pair.device
    first = max(first, 1 if draft in pair.drafts else 2)
    if size <= first:
        return
    text, outs = torch.tensor(ids, device=device), hidden_states(pair, draft, ids)
    levels = min(LEVELS, pair.context([draft]).positions - size)
    model.reserve(size + levels * ROWS // EVERY, keep=True)
    for at in range(first, size, ROWS):
        places = torch.arange(at, min(size, at + ROWS), device=device)
        tokens, before, out = text[places], outs[places - 1], outs[places]
        for level in range(1 + levels):
            if level == 1:
                places, tokens, before, out = (x[::EVERY] for x in (places, tokens, before, out))
                n = len(places)
                seen = torch.arange(size + n * levels, device=device) <= places[:, None]
                seen[:, : model.first_slot] = False
            if level:
                slots = torch.arange(n, device=device) + size + n * (level - 1)
                seen[torch.arange(n), slots] = True
                fed: dict[str, Any] = (
                    {"hidden": before, "recurrent": True} if model.feature_size else {}
                )
                view = seen[:, : size + n * level].contiguous()
                out = model.run(tokens, places + level, slots, view, logits=0, **fed)[1].clone()
            output = model.output
            logits = torch.nn.functional.linear(model.state(out), output.weight, output.bias)
            best = logits.topk(labels, dim=-1).indices.cpu()
            yield torch.cat([model.embedded(tokens), model.state(before)], 1).float().cpu(), best
            tokens, before = torch.from_numpy(output.ids[best[:, 0].numpy()]).to(device), out


def hidden_states(pair: LoadedPair, draft: str, ids: Sequence[int]) -> Tensor:
    """A draft's outputs after each token of a text, [tokens, hidden_size], which stays in its
    cache. A head reads the target's features; its first row is zeros."""
    tokens, model = torch.tensor(ids, device=pair.device), pair.models[draft]
    model.reserve(len(ids))
    first, features = model.first_slot, None
    if draft in pair.heads and len(ids) > 1:
        pair.target.reserve(len(ids))
        pair.target.read(tokens[:-1], 0)
        features = pair.target.tapped[:, columns(pair.target, pair.heads[draft])]
    outs = [torch.zeros(first, model.hidden_size, device=pair.device, dtype=model.dtype)]
    for at in range(first, len(ids), CHUNK):
        part = tokens[at : at + CHUNK]
        fed = None if features is None else features[at - 1 : at - 1 + len(part)]
        outs.append(model.chain(part, at, logits=0, hidden=fed)[1].clone())
    return torch.cat(outs)


def cluster_labels(top: npt.NDArray[np.int64], clusters: Clusters) -> npt.NDArray[np.bool_]:
    """y of section 4.2: which clusters hold one of each context's tokens ``top`` [n, L], bool [n,
    M]."""
    labels = np.zeros((len(top), clusters.count), dtype=np.bool_)
    np.put_along_axis(labels, clusters.of[top], True, axis=1)
    return labels

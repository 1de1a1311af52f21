"""DynaSpec (section 4.2): clusters of an output head's tokens, and a router that says which of them
hold plausible next tokens, from what is known before the draft's pass.

An example is one context of the draft: the embedding of its last token x_t, the draft's last hidden
state of the token before, and the L tokens of highest probability after x_t by the draft's
distribution over the whole vocabulary, whose clusters are the labels. Using a router is the
runtime's: :class:`runtime.shortlists.Router`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from spectune.optimizer.fit import perceptron
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
BATCH: Final = 256
LABELS: Final = 8
"""L: most probable tokens of the draft whose clusters are positive. The paper names none of these
figures."""
ROWS: Final = 256
"""Contexts whose distributions are there at a time."""
LARGE: Final = 1 << 28
"""vocab * d * M above which MiniBatchKMeans finds the clusters: 4096 * 256 * 64 is 2^26."""


def fit_router(
    store: TraceStore,
    recording: str,
    pair: LoadedPair,
    draft: str,
    *,
    clusters: int | None = None,
    hidden: int = HIDDEN,
    labels: int = LABELS,
    epochs: int = EPOCHS,
    seed: int = 0,
    progress: Progress = silent,
) -> StoredFit:
    """Stores clusters of a draft's output head with a router trained on what the draft says over
    recorded texts.

    ``clusters``: M, by default :func:`default_clusters`; ``labels``: L. Raises PolicyError for a
    draft without an output head, TraceError for a recording of another pair or without an output.
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
    texts = texts_to_fit(store, recording, pair.spec)
    progress("clusters", 0, 1)
    partition = cluster(output.weight.cpu().float().numpy(), count, seed=seed)
    progress("clusters", 1, 1)
    inputs, top = contexts(pair, draft, texts, min(labels, output.rows), progress)
    weights = perceptron.train(
        inputs, cluster_labels(top, partition), hidden=hidden, epochs=epochs, batch=BATCH, seed=seed
    )
    routing = Routing(weights, partition, output.hash)
    described, arrays = routing.to_document()
    document = {
        "recording": recording,
        "request_ids": [t.request_id for t in texts],
        "pair": pair.id,
        "draft": draft,
        **described,
        "contexts": len(top),
        "label_tokens": labels,
        "epochs": epochs,
        "seed": seed,
        "cluster_sizes": partition.sizes.tolist(),
    }
    first = max(1, count // 4)
    sizes = {"k0": first, "k1": max(1, first // 2), "k_min": max(1, first // 4)}

    def policy(artifact: str) -> dict[str, Any]:
        shortlist = {"kind": "clusters", **sizes, "artifact": artifact}
        return {"draft": draft, "window": {"kind": "fixed", "gamma": 4}, "shortlist": shortlist}

    return keep(store, ROUTER, document, arrays, policy=policy)


def default_clusters(vocab: int) -> int:
    """M where none is asked for: the power of two nearest to sqrt(vocab) (by its logarithm), within
    1..1024 and at most ``vocab``.

    The paper names no M. With sqrt(vocab) clusters of about sqrt(vocab) tokens, scoring the
    clusters costs no more than evaluating one.
    """
    return min(1 << round(math.log2(vocab) / 2), 1024, vocab)


def cluster(head: FloatArray, count: int, *, seed: int = 0) -> Clusters:
    """``count`` = M clusters of the tokens by the direction of their rows of ``head``, floats
    [vocab, d]: k-means of the rows scaled to length 1; unbalanced, as in the paper. The head is
    W_LM transposed, as checkpoints hold it."""
    unit = head / np.maximum(np.linalg.norm(head, axis=1, keepdims=True), 1e-12)
    model = KMeans(count, random_state=seed, n_init=1)
    if head.size * count > LARGE:
        model = MiniBatchKMeans(count, random_state=seed, n_init=1, batch_size=max(1024, 4 * count))
    with warnings.catch_warnings():
        # Fewer distinct rows than clusters: some stay empty.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return Clusters(model.fit_predict(unit).astype(np.int64), count)


@torch.no_grad()
def contexts(
    pair: LoadedPair,
    draft: str,
    texts: Sequence[Trajectory],
    labels: int,
    progress: Progress = silent,
) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """What a draft says after every output token of texts: float32 [n, d_e + d], the embedding of
    the current token and the state of the one before it, and int64 [n, labels], the most probable
    rows of its output head. Raises TraceError where texts have no output."""
    model = pair.models[draft]
    inputs, top = list[Tensor](), list[Tensor]()
    for n, text in enumerate(texts):
        ids = [*text.prompt_ids.tolist(), *text.output_ids.tolist()]
        first = max(len(text.prompt_ids) - 1, 1 if draft in pair.drafts else 2)
        if len(ids) > first:
            states = hidden_states(pair, draft, ids)
            embedded = model.embedded(torch.tensor(ids, device=pair.device))
            inputs.append(torch.cat([embedded[first:], states[first - 1 : -1]], 1).float().cpu())
            for part in torch.split(states[first:], ROWS):
                logits = torch.nn.functional.linear(part, model.output.weight, model.output.bias)
                top.append(logits.topk(labels, dim=-1).indices.cpu())
        progress("contexts", n + 1, len(texts))
    if not top:
        raise TraceError("a router is trained on outputs: record at least one request with any")
    return torch.cat(inputs).numpy(), torch.cat(top).numpy()


def hidden_states(pair: LoadedPair, draft: str, ids: Sequence[int]) -> Tensor:
    """What a draft's output matrix reads after each token of a text, [tokens, d]. A head reads the
    target's features; its first row is zeros."""
    tokens = torch.tensor(ids, device=pair.device)
    if draft in pair.drafts:
        model = pair.drafts[draft]
        model.reserve(len(ids))
        starts = range(0, len(ids), CHUNK)
        parts = (model.chain(tokens[at : at + CHUNK], at, logits=0)[1] for at in starts)
        return torch.cat([part.clone() for part in parts])
    head, target = pair.heads[draft], pair.target
    head.reserve(len(ids))
    states = [torch.zeros(1, head.hidden_size, device=head.device, dtype=head.dtype)]
    if len(ids) > 1:
        target.reserve(len(ids))
        target.read(tokens[:-1], 0)
        features = target.tapped[:, columns(target, head)]
        for at in range(1, len(ids), CHUNK):
            part = tokens[at : at + CHUNK]
            fed = features[at - 1 : at - 1 + len(part)]
            states.append(head.state(head.chain(part, at, logits=0, hidden=fed)[1]))
    return torch.cat(states)


def cluster_labels(top: npt.NDArray[np.int64], clusters: Clusters) -> npt.NDArray[np.bool_]:
    """y of section 4.2: which clusters hold one of each context's tokens ``top`` [n, L], bool [n,
    M]."""
    labels = np.zeros((len(top), clusters.count), dtype=np.bool_)
    np.put_along_axis(labels, clusters.of[top], True, axis=1)
    return labels

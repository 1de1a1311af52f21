"""The demo pair with a vocabulary of 32768: what shortlists gain where the output head is a large
part of a draft.

The pair is made from the demo's checkpoints and never shipped. Every token t gets V / 4096 - 1
*shadows*, tokens t + 4096 j, whose rows of the output heads lie near its own (``NEAR``), so that
they cost what a token costs and fall into the clusters of the tokens they resemble, but whose
logits lie ``GAP`` nats or more below: no model proposes or emits one, and the texts are the demo
pair's. One more coordinate of the hidden state does that (:func:`widened`).

Shadows never occur, so a frequency list would leave them out for nothing while clusters hold them.
The order therefore has every token's shadows right behind it: a shortlist of B rows has 4096 B / V
tokens that occur, whichever kind it is. The cost of a head of V rows is real; what is recovered of
tau is that of 4096 tokens at the same share.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lab import CATEGORIES, Document, demo, requests, stored
from safetensors.torch import load_file, save_file
from shortlist_fits import Fits, drafting

from spectune.optimizer.execute import DecodeOptions, encode, run
from spectune.optimizer.fit.dynaspec import fit_router
from spectune.optimizer.fit.fr_spec import count_tokens, frequency_order
from spectune.optimizer.record import record_served, recording_options
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import FREQUENCIES
from spectune.runtime.policies.prepare import prepare
from spectune.traces.schema import Sampling

Tensors = dict[str, torch.Tensor]

NEAR = 0.5
"""Length of what a shadow's row adds to its token's, in parts of it."""
GAP = 40.0
"""Nats between a token and a shadow of equal logits where the last layer's output is ``WIDEST``
times as long as any seen."""
WIDEST = 1.5


def widened(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], vocab: int, largest: float
) -> tuple[Tensors, Document]:
    """The tensors and configuration of a Llama, or of an EAGLE-3 head without embeddings of its
    own, with ``vocab`` tokens.

    The residual stream gets further coordinates (as many as attention heads, since transformers
    wants a multiple) that no layer reads or writes: the first is c at every position, from the
    embeddings, the others are 0. RMS norms divide by sqrt((sum x^2 + c^2) / wide + eps'); with
    weights times sqrt(d / wide) and eps' = (eps - c^2 / d) d / wide they give what they gave. The
    final norm makes h = g c / rms of the first coordinate, and output rows hold c for tokens and -c
    for shadows: a constant more for all tokens, which no softmax sees, and 2 c h less for shadows.
    ``largest``: the longest rms of what the final norm reads.
    """
    d, eps = int(config["hidden_size"]), float(config["rms_norm_eps"])
    wide, c = d + int(config["num_attention_heads"]), math.sqrt(d * eps / 2)
    out: Tensors = {}
    for name, tensor in tensors.items():
        x, kind = tensor.float(), name.split(".")[-2]
        if kind.endswith("norm"):
            made = torch.nn.functional.pad(x * math.sqrt(d / wide), (0, wide - d))
            if name in ("norm.weight", "model.norm.weight"):
                made[d] = GAP * WIDEST * largest * math.sqrt(d / wide) / (2 * c * c)
        elif kind == "embed_tokens":
            made = _rows(x, vocab, wide, c)
        else:
            writes = kind in ("o_proj", "down_proj")
            if not writes:  # reads hidden states
                x = torch.nn.functional.pad(x.unflatten(1, (-1, d)), (0, wide - d)).flatten(1)
            more = wide - d if writes or kind == "fc" else 0
            made = torch.nn.functional.pad(x, (0, 0, 0, more))
            if kind == "fc":
                made[d, d] = 1.0  # the head's stream takes the target's constant
        out[name] = made.contiguous()
    sizes: Document = {"hidden_size": wide, "vocab_size": vocab, "dtype": "float32"}
    sizes["rms_norm_eps"] = eps / 2 * d / wide
    if "draft_vocab_size" in config:
        sizes |= {"draft_vocab_size": vocab, "target_hidden_size": wide}
    return out, {**config, **sizes}


def _rows(x: torch.Tensor, vocab: int, wide: int, c: float) -> torch.Tensor:
    """Rows of all tokens and their shadows, [vocab, wide]: output head and embeddings are one
    matrix."""
    tokens, d = x.shape
    near = torch.randn(vocab - tokens, d, generator=torch.Generator().manual_seed(0))
    made = torch.zeros(vocab, wide)
    made[:, :d] = x.repeat(vocab // tokens, 1)
    length = NEAR * made[tokens:, :d].norm(dim=1, keepdim=True)
    made[tokens:, :d] += length * torch.nn.functional.normalize(near)
    made[:tokens, d], made[tokens:, d] = c, -c
    return made


def _largest(pair: LoadedPair) -> dict[str, float]:
    """The longest rms of what each model's final norm reads while a few requests are decoded."""
    found: dict[str, float] = {}
    norms = {"target": pair.target.model.get_decoder().norm}
    norms |= {name: model.model.get_decoder().norm for name, model in pair.drafts.items()}
    norms |= {name: head.net.norm for name, head in pair.heads.items()}

    def hook(name: str) -> Callable[[Any, Any], None]:
        def see(module: Any, args: Any) -> None:
            found[name] = max(found.get(name, 0.0), float(args[0].square().mean(-1).max().sqrt()))

        return see

    hooks = [norm.register_forward_pre_hook(hook(name)) for name, norm in norms.items()]
    encoded = encode(pair, requests(len(CATEGORIES)), DecodeOptions(Sampling(1.0, seed=1), 32))
    for draft in pair.models:
        list(run(pair, StaticSource(prepare(drafting(draft, "chain"), pair.draft_names)), encoded))
    for handle in hooks:
        handle.remove()
    return found


def build(folder: Path, vocab: int) -> Path:
    """Writes the pair with ``vocab`` tokens, a multiple of the demo's, as checkpoints of float32,
    and its pair file; returns the file."""
    small = demo()
    largest = _largest(small)
    for name, path in (("target", small.spec.target), *small.spec.drafts):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(path, folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        tensors = load_file(folder / name / "model.safetensors")
        tensors, made = widened(tensors, config, vocab, largest[name])
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(made))
    file, drafts = folder / "pair.json", {name: name for name, _ in small.spec.drafts}
    file.write_text(json.dumps({"name": f"demo-{vocab}", "target": "target", "drafts": drafts}))
    return file


def fit(state: Path, fits: Fits, vocab: int, cases: Sequence[tuple[str, str]]) -> Fits:
    """Builds the pair unless that was done, and fits frequencies and routers to the demo pair's
    texts, which are this pair's as well."""
    folder = state / f"wide-{vocab}"
    folder.mkdir(exist_ok=True)
    file = folder / "pair.json"
    pair = load_pair(read_pair(str(file if file.exists() else build(folder, vocab))), device="cpu")
    store = stored(folder / "wide.db", fresh=True)
    options = DecodeOptions(Sampling(1.0, seed=7), 48)
    about = recording_options(pair, options)
    with record_served(store, pair.id, pair.spec, options, about) as writer:
        for text in (*fits.search, *fits.test):
            writer.put(text)
    tokens = fits.pair.target.vocab_size
    texts = [np.concatenate([t.prompt_ids, t.output_ids]) for t in fits.search]
    counts = np.tile(count_tokens(texts, vocab)[:tokens], vocab // tokens)
    shadowed = frequency_order(counts, sorted(pair.eos_ids))
    origin = {"pair_id": pair.id, "provenance": {"recording": writer.recording}}
    frequencies = store.put_artifact(FREQUENCIES, *shadowed.to_document(), **origin)
    recording = writer.recording
    routers = {d: fit_router(store, recording, pair, d).artifact for d in dict(cases)}
    return Fits(pair, store, fits.workload, fits.search, fits.test, frequencies, routers)

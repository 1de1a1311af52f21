"""The speed of shortlists where the output head is a large part of a draft: the demo pair with a vocabulary of 32768, or 131072.

    python bench/large_vocab.py [--vocab 131072] [--requests 6] [--out FILE]

The pair is made on the fly from the demo's checkpoints and never shipped. Every token t gets V / 4096 - 1 *shadows*, tokens t + 4096 j,
whose rows of the output heads lie near its own (``NEAR``), so that they cost what a token costs and fall into the clusters of the tokens
they resemble, but whose logits lie ``GAP`` nats or more below: no model proposes or emits one, and the texts are the demo pair's. That is
done by one more coordinate of the hidden state, made without a change to any other (:func:`widened`): the laws over the 4096 tokens agree
to rounding, which is measured (``padding`` in the results).

What that means for the comparison: shadows never occur, so that a frequency list would leave them out for nothing while clusters hold
them. The frequency order therefore has every token's shadows right behind it, as if the corpus held them as often: a shortlist of B rows
has 4096 B / V tokens that occur, whichever kind it is. The cost of a head of V rows is real, what is recovered of tau is that of a
vocabulary of 4096 at the same share; it is no measurement of the text statistics of a large vocabulary. ``frequency, no shadows`` shows
what a frequency list would be worth if all the padding were known to be unused.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from acceptance import STATE, environment
from interleaved import compare
from safetensors.torch import load_file, save_file
from shortlist_tables import (
    RECORDED,
    Document,
    Lab,
    clusters_block,
    decaying_clusters,
    decaying_tokens,
    drafting,
    execute,
    parts,
    recorded,
    rounds_of,
    steps_of,
)
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions, Encoded, encode, run
from spectune.optimizer.fit.dynaspec import fit_router
from spectune.optimizer.fit.fr_spec import count_tokens, fit_fr_spec, frequency_order
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.record import record_served
from spectune.optimizer.verdict import finite
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import FREQUENCIES
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.policies.plan import prepare
from spectune.traces.schema import Sampling
from tree_checks import CATEGORIES, stored

Tensors = dict[str, torch.Tensor]

NEAR: Final = 0.5
"""Length of what a shadow's row adds to its token's, in parts of it."""
GAP: Final = 40.0
"""Nats between a token and a shadow of equal logits where the last layer's output is ``WIDEST`` times as long as any seen."""
WIDEST: Final = 1.5
SHARE: Final = 8
"""Shortlists are about this part of the vocabulary."""
REQUESTS, NEW_TOKENS = 6, 48
CASES: Final = (("small", "chain"), ("medium", "chain"), ("head", "chain"), ("head", "tree"))


def widened(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], vocab: int, largest: float) -> tuple[Tensors, Document]:
    """The tensors and configuration of a Llama, or of an EAGLE-3 head without embeddings of its own, with ``vocab`` tokens.

    The residual stream gets further coordinates (as many as attention heads, since transformers wants a multiple) that no layer reads or
    writes: the first is c at every position, from the embeddings, the others are 0. RMS norms divide by
    sqrt((sum x^2 + c^2) / wide + eps'); with weights times sqrt(d / wide) and eps' = (eps - c^2 / d) d / wide they give what they gave. The
    final norm makes h = g c / rms of the first coordinate, and output rows hold c for tokens and -c for shadows: a constant more for all
    tokens, which no softmax sees, and 2 c h less for shadows. ``largest``: the longest rms of what the final norm reads.
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
            if kind not in ("o_proj", "down_proj"):  # reads hidden states
                x = torch.nn.functional.pad(x.unflatten(1, (-1, d)), (0, wide - d)).flatten(1)
            made = torch.nn.functional.pad(x, (0, 0, 0, wide - d)) if kind in ("o_proj", "down_proj", "fc") else x
            if kind == "fc":
                made[d, d] = 1.0  # the head's stream takes the target's constant
        out[name] = made.contiguous()
    sizes: Document = {"hidden_size": wide, "vocab_size": vocab, "rms_norm_eps": eps / 2 * d / wide, "dtype": "float32"}
    if "draft_vocab_size" in config:
        sizes |= {"draft_vocab_size": vocab, "target_hidden_size": wide}
    return out, {**config, **sizes}


def _rows(x: torch.Tensor, vocab: int, wide: int, c: float) -> torch.Tensor:
    """Rows of all tokens and their shadows, [vocab, wide]: output head and embeddings are one matrix."""
    tokens, d = x.shape
    near = torch.randn(vocab - tokens, d, generator=torch.Generator().manual_seed(0))
    made = torch.zeros(vocab, wide)
    made[:, :d] = x.repeat(vocab // tokens, 1)
    made[tokens:, :d] += NEAR * made[tokens:, :d].norm(dim=1, keepdim=True) * torch.nn.functional.normalize(near)
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
    encoded = encode(pair, load_workload(["demo"], limit=len(CATEGORIES)), DecodeOptions(Sampling(1.0, seed=1), 32))
    for draft, shape in CASES:
        list(run(pair, StaticSource(prepare(drafting(draft, shape), pair.draft_names)), encoded))
    for handle in hooks:
        handle.remove()
    return found


def build(folder: Path, vocab: int) -> Path:
    """Writes the pair with ``vocab`` tokens, a multiple of the demo's, as checkpoints of float32, and its pair file; returns the file."""
    demo = load_pair(read_pair("demo"), device="cpu")
    if vocab % demo.target.vocab_size:
        raise SystemExit(f"--vocab {vocab}: give a multiple of {demo.target.vocab_size}")
    largest = _largest(demo)
    for name, path in (("target", demo.spec.target), *demo.spec.drafts):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(path, folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        tensors, made = widened(load_file(folder / name / "model.safetensors"), config, vocab, largest[name])
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(made))
    file = folder / "pair.json"
    file.write_text(json.dumps({"name": f"demo-{vocab}", "target": "target", "drafts": {n: n for n, _ in demo.spec.drafts}}))
    return file


@torch.no_grad()
def padding(pair: LoadedPair) -> dict[str, Any]:
    """What padding changed against the demo pair: the largest mass that a law gives to all shadows, the largest difference of a
    log-probability above -20 nats, and requests whose text or rounds differ, at temperatures 0 and 1."""
    demo = load_pair(read_pair("demo"), device="cpu")
    tokens = demo.target.vocab_size
    mass = difference = 0.0
    workload = load_workload(["demo"], limit=len(CATEGORIES))
    for request in workload.requests:
        ids = torch.tensor(demo.encode_request(request, chat=True))
        for one, other in zip((demo.target, *demo.drafts.values()), (pair.target, *pair.drafts.values()), strict=True):
            for model in (one, other):
                model.reserve(len(ids))
            a, b = (model.chain(ids, 0, logits=len(ids)).log_softmax(-1) for model in (one, other))
            mass = max(mass, float(b[:, tokens:].exp().sum(-1).max()))
            difference = max(difference, float((a - b[:, :tokens])[a > -20].abs().max()))
    differ = requests = 0
    for sampling in (Sampling(), Sampling(1.0, seed=2)):
        options = DecodeOptions(sampling, 24)
        for draft, shape in CASES:
            policy = drafting(draft, shape)
            found = []
            for p in (demo, pair):
                decoded = run(p, StaticSource(prepare(policy, p.draft_names)), encode(p, workload, options))
                found.append([(d.trajectory.output_ids.tolist(), [(s.start, s.drafted, s.accepted) for s in d.steps]) for d in decoded])
            requests += len(found[0])
            differ += sum(x != y for x, y in zip(*found, strict=True))
    return {"mass_of_shadows": mass, "log_probability_difference": difference, "requests": requests, "requests_that_differ": differ}


def laboratory(state: Path, vocab: int) -> Lab:
    """Builds the pair unless that was done, and fits frequencies and routers to the demo pair's texts, which are this pair's as well."""
    folder = state / f"large-{vocab}"
    folder.mkdir(exist_ok=True)
    file = folder / "pair.json"
    pair = load_pair(read_pair(str(file if file.exists() else build(folder, vocab))), device="cpu")
    demo = load_pair(read_pair("demo"), device="cpu")
    _, _, texts = recorded(state, demo)
    search, test = parts(texts)
    (folder / "spectune.db").unlink(missing_ok=True)
    store = stored(folder / "spectune.db")
    with record_served(store, pair, RECORDED) as writer:
        for text in texts:
            writer.put(text)
    recording = writer.recording
    tokens = demo.target.vocab_size
    counts = count_tokens([np.concatenate([t.prompt_ids, t.output_ids]) for t in search], pair.target.vocab_size)
    shadowed = frequency_order(np.tile(counts[:tokens], vocab // tokens), sorted(pair.eos_ids))
    frequencies = store.put_artifact(FREQUENCIES, *shadowed.to_document(), pair_id=pair.id, provenance={"recording": recording})
    alone = fit_fr_spec(store, recording, pair).artifact
    routers = {}
    for draft in dict(CASES):
        routers[draft] = fit_router(store, recording, pair, draft).artifact
        print(f"  router of {draft} fitted", flush=True)
    return Lab(pair, store, fitted(store), load_workload(["demo"]), search, test, frequencies, alone, routers)


def shortlists(lab: Lab, draft: str, shape: str) -> dict[str, Document | None]:
    """The shortlists compared, all of the mean size that clusters executed on requests of the search part have."""
    scores = lab.store.get_artifact(lab.routers[draft]).document["scores"]
    ks = np.arange(scores["ks"][-1] + 1)
    table = np.tile(np.interp(ks, [0, *scores["ks"]], [0, *scores["size"]]), (steps_of(shape), 1))
    router = lab.routers[draft]
    clusters = clusters_block(router, *decaying_clusters(table, lab.pair.target.vocab_size // SHARE))
    encoded = encode(lab.pair, lab.requests(lab.search, CATEGORIES[0], 2), DecodeOptions(Sampling(), NEW_TOKENS))
    size = round(execute(lab, drafting(draft, shape, clusters), encoded).size)
    k_max = decaying_tokens(steps_of(shape), size)
    return {
        "full": None,
        "frequency": {"kind": "frequency", "size": size, "artifact": lab.frequencies},
        "position_frequency": {"kind": "position_frequency", "k_max": k_max, "artifact": lab.frequencies},
        "clusters": clusters,
        "frequency, no shadows": {"kind": "frequency", "size": size, "artifact": lab.general},
    }


def draft_costs(lab: Lab, policies: Mapping[str, Policy], encoded: Encoded) -> dict[str, tuple[float, float]]:
    """By name: the median over rounds of a draft step's seconds, and the mean tokens of its shortlist; requests and policies in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in policies}
    sizes: dict[str, list[int]] = {name: [] for name in policies}
    for item in encoded.items:
        for name, policy in policies.items():
            for _, _, found, supports in rounds_of(lab, policy, replace(encoded, items=(item,))):
                if found.step.draft_steps:
                    seconds[name].append(found.step.draft_s / found.step.draft_steps)
                    sizes[name] += [s.size for s in supports] or [lab.pair.target.vocab_size]
    return {name: (float(np.median(seconds[name])), float(np.mean(sizes[name]))) for name in policies}


def speed(state: Path, vocab: int = 32768, requests: int = REQUESTS) -> dict[str, Any]:
    """Tokens/s, tau and seconds of a draft step under shortlists, executed in turn, where the vocabulary is padded to 32768."""
    lab = laboratory(state, vocab)
    changed = padding(lab.pair)
    print(f"  {changed}", flush=True)
    rows: list[dict[str, Any]] = []
    differ = 0
    for draft, shape in CASES:
        blocks = shortlists(lab, draft, shape)
        policies = {name: drafting(draft, shape, block) for name, block in blocks.items()}
        for category in CATEGORIES:
            encoded = encode(lab.pair, lab.requests(lab.test, category, requests), DecodeOptions(Sampling(), NEW_TOKENS))
            compared = compare(lab.pair, [AUTOREGRESSIVE, *policies.values()], encoded, artifacts=lab.find)
            costs = draft_costs(lab, policies, replace(encoded, items=encoded.items[:2]))
            differ += compared.texts_differ
            full = policies["full"].id
            for name, policy in policies.items():
                total = compared.outcomes[policy.id].total
                rows.append(
                    {
                        "category": category,
                        "draft": draft,
                        "shape": shape,
                        "shortlist": name,
                        "block": {k: v for k, v in (blocks[name] or {"kind": "full"}).items() if k != "artifact"},
                        "mean_size": costs[name][1],
                        "draft_step_s": costs[name][0],
                        "tau": total.mean_accepted_length,
                        "recovered": total.mean_accepted_length / compared.outcomes[full].total.mean_accepted_length,
                        "tokens_per_s": total.tokens_per_s,
                        "over_full": finite(compared.ratio(policy.id, full)),
                        "over_autoregression": finite(compared.ratio(policy.id, AUTOREGRESSIVE.id)),
                    }
                )
                last = rows[-1]
                print(
                    f"  {category} {draft} {shape} {name}, {last['mean_size']:.0f} rows: {1e3 * last['draft_step_s']:.2f} ms a step, tau "
                    f"{last['tau']:.2f}, {last['over_full'][0]:.3f} of full's speed",
                    flush=True,
                )

    def mean(name: str, key: str) -> float:
        values = [r[key][0] if isinstance(r[key], list) else r[key] for r in rows if r["shortlist"] == name]
        return float(np.exp(np.mean(np.log(values))))

    kinds = ("clusters", "position_frequency", "frequency")
    return {
        "holds": differ == 0 and changed["requests_that_differ"] == 0,
        "summary": f"{vocab} tokens, greedy, {len(CASES)} drafts and shapes on {len(CATEGORIES)} workloads, over the full head: "
        + "; ".join(f"{kind} {mean(kind, 'over_full'):.2f} x the speed with {mean(kind, 'recovered'):.3f} of tau" for kind in kinds)
        + f" (paper: DynaSpec 1.17, FR-Spec 1.10); {differ} texts differ",
        "vocab": vocab,
        "padding": changed,
        "rows": rows,
        "paper": PAPER_SPEED,
    }


PAPER_SPEED: Final = {
    "tokens/s, Llama-3-8B-Instruct, one A6000 (table 2)": {
        "columns": ["MT", "Conv.", "RAG", "Math", "QA", "Summ.", "Code", "Average"],
        "target alone": [43.02, 42.83, 39.50, 43.17, 43.06, 41.08, 42.60, 42.18],
        "EAGLE-2, full vocabulary": [79.37, 91.34, 75.09, 94.26, 74.07, 74.57, 81.59, 81.47],
        "FR-Spec, 32k": [87.56, 101.85, 81.81, 107.91, 84.61, 83.46, 81.60, 89.83],
        "DynaSpec, 27k": [92.97, 107.55, 85.55, 110.96, 87.11, 85.71, 95.01, 94.98],
    }
}

CHECKS = {"shortlist-speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="per category")
    parser.add_argument("--state", type=Path, default=STATE, help="where the pair and its database are kept")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    wanted.state.mkdir(parents=True, exist_ok=True)
    figures = speed(wanted.state, wanted.vocab, wanted.requests) | {"environment": environment()}
    text = json.dumps(figures, indent=1) + "\n"
    if wanted.out is None:
        print(text, end="")
    else:
        wanted.out.write_text(text)


if __name__ == "__main__":
    main()

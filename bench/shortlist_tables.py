"""The checks of vocabulary shortlists behind ``bench/acceptance.py``: tau recovered at equal sizes, and DynaSpec's theorems.

Both use one recording of the demo workload at temperature 1 (``shortlists.db``). Frequencies, clusters and routers are fitted to its
search part; what is executed or read is its test part. Neither reads the clock.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from tree_checks import CATEGORIES, stored, top_k

from demo.corpus import code_documents, prose_documents
from optimizer import overlap
from optimizer.artifacts import fitted
from optimizer.execute import DecodeOptions, Encoded, encode
from optimizer.inputs import load_workload
from optimizer.record import RecordRequest, record, split
from optimizer.shortlist_fits import fit_frequencies_artifact, fit_router_artifact
from runtime.decoder import Decoder, output_hashes, shortlisted_model
from runtime.loading import LoadedPair, load_pair
from runtime.loop import Round, StaticSource
from runtime.pair import read_pair
from runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from runtime.policies.dynaspec import cluster_budget, frequency_budget
from runtime.policies.prepared import PreparedPolicy, prepare
from runtime.policies.tree_rules import Artifacts
from runtime.sampling import gumbel_row, log_law, stream_key
from runtime.shortlists import Shortlists, Support, compile_shortlist
from runtime.verification import verify_rejection
from traces.schema import Sampling, Trajectory, Workload
from traces.store import TraceStore

Document = dict[str, Any]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

CLUSTERS: Final = 256
"""M: finer than the library's default of 64, so that shortlists of 96 tokens are several clusters."""
RECORDED: Final = DecodeOptions(Sampling(1.0, seed=7), 64)
SIZES: Final = (96, 192, 384)
MIDDLE: Final = SIZES[1]
REQUESTS: Final = 8
NEW_TOKENS: Final = 32
GAMMA, DEPTH, WIDTH, NODES = 6, 4, 4, 16
CASES: Final = (("small", "chain"), ("medium", "chain"), ("medium", "tree"), ("head", "tree"))
SAMPLED: Final = CASES[1::2]
"""What of it is executed at temperature 1, too, at the middle size."""
LADDER: Final = (1, 4, 12, 36, 96)
"""Clusters per step of the calibration runs."""
CALIBRATION: Final = 3
"""Requests per category of the search part that calibrate how many tokens k clusters are."""
RESAMPLES: Final = 1000
RUNS: Final = ((0.0, SIZES, CASES), (1.0, (MIDDLE,), SAMPLED))
KINDS: Final = ("frequency", "position_frequency", "clusters fixed", "clusters position-aware")
CORPUS_LETTERS: Final = 200_000


@dataclass(frozen=True)
class Lab:
    """The pair, its recording's two parts, and artifact ids: ``frequencies`` of the search part, ``general`` of a corpus, ``routers`` by
    draft."""

    pair: LoadedPair
    store: TraceStore
    find: Artifacts
    workload: Workload
    search: tuple[Trajectory, ...]
    test: tuple[Trajectory, ...]
    frequencies: str
    general: str
    routers: dict[str, str]

    def requests(self, part: Sequence[Trajectory], category: str, limit: int) -> Workload:
        """The first requests of a category in a part of the recording."""
        ids = {t.request_id for t in part if t.category == category}
        found = [r for r in self.workload.requests if r.id in ids]
        return replace(self.workload, requests=tuple(found[:limit]))

    def prepared(self, policy: Policy) -> PreparedPolicy:
        return prepare(policy, self.pair.draft_names, artifacts=self.find, head_hashes=output_hashes(self.pair))

    def counts(self) -> IntArray:
        """Occurrences of every token in the search part, int64 [vocab]."""
        tokens = np.concatenate([np.concatenate([t.prompt_ids, t.output_ids]) for t in self.search])
        return np.bincount(tokens, minlength=self.pair.target.vocab_size)


def laboratory(state: Path, drafts: Iterable[str] = ("small", "medium", "head")) -> Lab:
    """Records the demo workload unless that was done, and fits everything to its search part."""
    pair = load_pair(read_pair("demo"), device="cpu")
    store, recording, texts = recorded(state, pair)
    search, test = parts(texts)
    frequencies = fit_frequencies_artifact(store, recording, pair).artifact
    general = fit_frequencies_artifact(store, recording, pair, corpus=_corpus(state, pair, search)).artifact
    routers = {}
    for draft in drafts:
        made = fit_router_artifact(store, recording, pair, draft, clusters=CLUSTERS)
        routers[draft] = made.artifact
        scores = made.document["scores"]
        print(f"  router of {draft}: sizes {np.round(scores['size'], 0)}, mass {np.round(scores['mass'], 3)}", flush=True)
    return Lab(pair, store, fitted(store), load_workload(["demo"]), search, test, frequencies, general, routers)


def recorded(state: Path, demo: LoadedPair) -> tuple[TraceStore, str, Sequence[Trajectory]]:
    """The demo workload, decoded unless that was done: (store, recording, its texts)."""
    store = stored(state / "shortlists.db")
    plain = StaticSource(prepare(AUTOREGRESSIVE, demo.draft_names))
    info = record(store, demo, RecordRequest(load_workload(["demo"]), RECORDED, ()), plain, reuse_complete=True)
    return store, info.id, store.load(info.id, []).trajectories


def parts(texts: Sequence[Trajectory]) -> tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]:
    """What may be fitted to, and what is executed."""
    search, test = split([t.request_id for t in texts], [t.category for t in texts])
    return tuple(texts[i] for i in search), tuple(texts[i] for i in test)


def _corpus(state: Path, pair: LoadedPair, search: Sequence[Trajectory]) -> list[str]:
    """Files of general text: modules and docstrings that are in no prompt, equally much of each, and the search part's maths."""
    maths = (pair.text([*t.prompt_ids.tolist(), *t.output_ids.tolist()]) for t in search if t.category == "math")
    texts = {
        "code": "\n".join(d.text for d in code_documents(held_out=False)),
        "prose": "\n".join(d.text for d in prose_documents(held_out=False)),
        "math": "\n".join(maths),
    }
    files = []
    for name, text in texts.items():
        file = state / f"shortlists-{name}.txt"
        file.write_text(text[:CORPUS_LETTERS], encoding="utf-8")
        files.append(str(file))
    return files


def drafting(draft: str, shape: str, shortlist: Document | None = None) -> Policy:
    """A chain of ``GAMMA`` tokens or a small top-k tree."""
    blocks: Document = {} if shortlist is None else {"shortlist": shortlist}
    if shape == "chain":
        return parse_policy({"draft": draft, "window": {"kind": "fixed", "gamma": GAMMA}, **blocks})
    return parse_policy(top_k(draft, WIDTH, DEPTH, NODES, **blocks))


@dataclass(frozen=True)
class Executed:
    """What was executed, by request: tokens ``emitted``, ``rounds``, draft ``steps`` and the shortlisted ``tokens`` of all of them, each
    int64 [requests]; ``sizes`` of every step, by its number in a round; the ``texts``."""

    emitted: IntArray
    rounds: IntArray
    steps: IntArray
    tokens: IntArray
    sizes: dict[int, list[int]]
    texts: list[list[int]]

    @property
    def tau(self) -> float:
        return float(self.emitted.sum() / self.rounds.sum())

    @property
    def size(self) -> float:
        """Mean |S| of a draft step."""
        return float(self.tokens.sum() / max(1, self.steps.sum()))


def rounds_of(lab: Lab, policy: Policy, encoded: Encoded) -> Iterable[tuple[int, list[int], Round, list[Support]]]:
    """Decodes requests one by one: (request's number, text before the round, the round, its shortlists)."""
    prepared = lab.prepared(policy)
    decoder = Decoder(lab.pair, StaticSource(prepared), encoded.options.verifier)
    for n, (_, request) in enumerate(encoded.items):
        text = list(request.prompt_ids)
        for item in decoder.rounds(request):
            shortlists = decoder.backend.shortlists(prepared)
            yield n, list(text), item, [] if shortlists is None else shortlists.chosen[: item.step.draft_steps]
            text += item.tokens


def execute(lab: Lab, policy: Policy, encoded: Encoded) -> Executed:
    emitted, rounds, steps, tokens = np.zeros((4, len(encoded.items)), dtype=np.int64)
    sizes: dict[int, list[int]] = {}
    texts: list[list[int]] = [[] for _ in encoded.items]
    for n, _, item, supports in rounds_of(lab, policy, encoded):
        texts[n] += item.tokens
        emitted[n] += item.step.emitted
        rounds[n] += 1
        steps[n] += item.step.draft_steps
        if policy.shortlist.kind == "full":
            tokens[n] += item.step.draft_steps * lab.pair.target.vocab_size
        for step, support in enumerate(supports):
            tokens[n] += support.size
            sizes.setdefault(step, []).append(support.size)
    return Executed(emitted, rounds, steps, tokens, sizes, texts)


def clusters_block(router: str, k0: int, k1: int, k_min: int) -> Document:
    return {"kind": "clusters", "k0": k0, "k1": k1, "k_min": k_min, "artifact": router}


def steps_of(shape: str) -> int:
    return GAMMA if shape == "chain" else DEPTH


def calibrated(lab: Lab, draft: str, shape: str, category: str) -> FloatArray:
    """Mean tokens of a draft step's shortlist, float64 [steps, 1 + k], for k clusters: executed on requests of the search part for the
    k of the ladder, interpolated between."""
    encoded = encode(lab.pair, lab.requests(lab.search, category, CALIBRATION), DecodeOptions(Sampling(), NEW_TOKENS))
    steps, known = steps_of(shape), []
    for k in LADDER:
        found = execute(lab, drafting(draft, shape, clusters_block(lab.routers[draft], k, k, k)), encoded)
        known.append([float(np.mean(found.sizes[t])) if t in found.sizes else math.nan for t in range(steps)])
    table = np.array(known)
    ks = np.arange(LADDER[-1] + 1)
    return np.stack([np.interp(ks, [0, *LADDER], [0.0, *table[:, t]]) for t in range(steps)])


def fixed_clusters(sizes: FloatArray, size: int) -> tuple[int, int, int]:
    """The k whose mean shortlist is nearest to ``size`` tokens, three times."""
    k = 1 + int(np.abs(sizes.mean(0)[1:] - size).argmin())
    return k, k, k


def decaying_clusters(sizes: FloatArray, size: int) -> tuple[int, int, int]:
    """k0, k1, k_min = 1 with k0 near 1.5 k1 (equation 3 wants k0 > k1) whose mean shortlist is nearest to ``size`` tokens."""
    steps, most = len(sizes), sizes.shape[1] - 1
    found = []
    for k1 in range(1, most):
        for k0 in range(max(k1 + 1, math.floor(1.4 * k1)), min(most, math.ceil(1.6 * k1) + 1) + 1):
            mean = np.mean([sizes[t, cluster_budget(t, k0, k1, 1)] for t in range(steps)])
            found.append((abs(float(mean) - size), k0, k1))
    _, k0, k1 = min(found)
    return k0, k1, 1


def decaying_tokens(steps: int, size: int) -> int:
    """k_max whose mean over the steps is nearest to ``size`` tokens."""
    return min(range(size, 4 * size), key=lambda k: abs(np.mean([frequency_budget(t, k) for t in range(steps)]) - size))


def recovered(state: Path) -> dict[str, Any]:
    """Tau executed under frequency and routed shortlists of equal mean size, as a share of the whole vocabulary's, by category."""
    lab = laboratory(state)
    rows: list[dict[str, Any]] = []
    kept: dict[tuple[Any, ...], Executed] = {}
    differences = texts = 0
    chosen: dict[tuple[str, str, str, int], dict[str, Document]] = {}
    for draft, shape in CASES:
        for category in CATEGORIES:
            sizes = calibrated(lab, draft, shape, category)
            for size in SIZES:
                frequency = {"kind": "frequency", "size": size, "artifact": lab.frequencies}
                decaying = decaying_tokens(steps_of(shape), size)
                chosen[draft, shape, category, size] = {
                    "frequency": frequency,
                    "frequency, general corpus": {**frequency, "artifact": lab.general},
                    "position_frequency": {"kind": "position_frequency", "k_max": decaying, "artifact": lab.frequencies},
                    "clusters fixed": clusters_block(lab.routers[draft], *fixed_clusters(sizes, size)),
                    "clusters position-aware": clusters_block(lab.routers[draft], *decaying_clusters(sizes, size)),
                }
        print(f"  calibrated {draft} {shape}", flush=True)
    rarities: dict[tuple[float, str], dict[str, float]] = {}
    for temperature, at, cases in RUNS:
        options = DecodeOptions(Sampling(temperature, seed=3) if temperature else Sampling(), NEW_TOKENS)
        for category in CATEGORIES:
            encoded = encode(lab.pair, lab.requests(lab.test, category, REQUESTS), options)
            plain = execute(lab, AUTOREGRESSIVE, encoded).texts
            rarities[temperature, category] = rarity(lab.counts(), plain)
            for draft, shape in cases:
                runs: list[tuple[str, int, Document | None]] = [("full", 0, None)]
                for size in at:
                    blocks = chosen[draft, shape, category, size]
                    runs += [(kind, size, b) for kind, b in blocks.items() if size == MIDDLE or "general" not in kind]
                for kind, size, block in runs:
                    found = kept[temperature, category, draft, shape, size, kind] = execute(
                        lab, drafting(draft, shape, block), encoded
                    )
                    differ = sum(a != b for a, b in zip(found.texts, plain, strict=True))
                    differences, texts = differences + differ, texts + len(plain)
                    full = kept[temperature, category, draft, shape, 0, "full"]
                    share = resampled(found) / resampled(full)
                    row = {
                        "temperature": temperature,
                        "category": category,
                        "draft": draft,
                        "shape": shape,
                        "shortlist": kind,
                        "wanted_size": size or lab.pair.target.vocab_size,
                        "block": {k: v for k, v in (block or {"kind": "full"}).items() if k != "artifact"},
                        "mean_size": found.size,
                        "tau": found.tau,
                        "recovered": found.tau / full.tau,
                        "recovered_interval": np.quantile(share, (0.025, 0.975)).tolist(),
                        "texts": len(plain),
                        "differ": differ,
                    }
                    rows.append(row)
                    print(
                        f"  T={temperature:g} {category} {draft} {shape} {kind} |S| {found.size:.0f}: tau {found.tau:.2f}, "
                        f"{100 * row['recovered']:.1f}%, {differ} differ",
                        flush=True,
                    )
    tables = {f"T={t:g}, {s} tokens": pooled(kept, t, s, cases) for t, at, cases in RUNS for s in at}
    rarest = max(CATEGORIES, key=lambda c: rarities[0.0, c]["bits"])
    middle = tables[f"T=0, {MIDDLE} tokens"]
    gains = {name: table[rarest]["routed - static"] for name, table in tables.items()}
    ahead = all(found[1] > 0 for found in gains.values())
    return {
        "holds": differences == 0 and ahead,
        "summary": f"{differences} differences in {texts} texts; recovered of the full vocabulary's tau at {MIDDLE} of "
        f"{lab.pair.target.vocab_size} tokens, greedy, all categories: routed {percent(middle['all']['clusters position-aware'])} "
        f"(fixed budget {percent(middle['all']['clusters fixed'])}), PA-FR {percent(middle['all']['position_frequency'])}, "
        f"frequency {percent(middle['all']['frequency'])} (paper: 98.4% against 93.6%); on {rarest}, whose tokens are rarest, routed - "
        f"static {min(100 * g[0] for g in gains.values()):+.1f} to {max(100 * g[0] for g in gains.values()):+.1f} points",
        "rarest": rarest,
        "routed_minus_static_on_rarest": gains,
        "rarity": [{"temperature": t, "category": c, **found} for (t, c), found in rarities.items()],
        "tables": tables,
        "rows": rows,
        "paper": PAPER_RECOVERED,
    }


def percent(interval: Sequence[float]) -> str:
    return f"{100 * interval[0]:.1f}%"


def rarity(counts: IntArray, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Of the tokens of texts: mean -log2 of their frequency in the corpus (one added to every count), and the share of them outside the
    corpus's tenth of most frequent tokens."""
    tokens = np.concatenate([np.asarray(t, dtype=np.int64) for t in texts])
    bits = -np.log2((counts + 1) / (counts + 1).sum())
    rank = np.empty_like(counts)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return {
        "bits": float(bits[tokens].mean()),
        "outside_top_tenth": float((rank[tokens] >= len(counts) // 10).mean()),
        "tokens": len(tokens),
    }


def resampled(found: Executed) -> FloatArray:
    """Tau of samples of the requests, with replacement; equal samples for all policies of a category."""
    n = len(found.rounds)
    at = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    return np.asarray(found.emitted[at].sum(1) / found.rounds[at].sum(1))


def pooled(
    kept: dict[tuple[Any, ...], Executed], temperature: float, size: int, cases: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Recovered tau by category and over all of them, the mean over drafts and shapes, as [value, lower, upper] of a 95% interval over
    requests; the mean size executed; and what position-aware budgets gain over fixed ones (1 is nothing)."""
    kinds = [k for k in (*KINDS, "frequency, general corpus") if (temperature, CATEGORIES[0], *cases[0], size, k) in kept]
    share: dict[tuple[str, str], FloatArray] = {}
    table: dict[str, Any] = {}
    for category in CATEGORIES:
        for kind in kinds:
            parts = []
            for case in cases:
                found, full = kept[temperature, category, *case, size, kind], kept[temperature, category, *case, 0, "full"]
                parts.append(np.concatenate(([found.tau / full.tau], resampled(found) / resampled(full))))
            share[category, kind] = np.mean(parts, axis=0)
    for kind in kinds:
        # Categories are resampled apart: their samples are shuffled against each other.
        draws = [np.random.default_rng(i).permutation(share[c, kind][1:]) for i, c in enumerate(CATEGORIES)]
        share["all", kind] = np.concatenate(([np.mean([share[c, kind][0] for c in CATEGORIES])], np.mean(draws, axis=0)))
    for category in (*CATEGORIES, "all"):
        of = {kind: share[category, kind] for kind in kinds}
        some = [c for c in CATEGORIES if category in (c, "all")]
        sizes = {k: float(np.mean([kept[temperature, c, *case, size, k].size for c in some for case in cases])) for k in kinds}
        table[category] = {kind: ranged(values) for kind, values in of.items()} | {
            "mean size": sizes,
            "routed - static": ranged(of["clusters position-aware"] - of["frequency"]),
            "routed, fixed - static": ranged(of["clusters fixed"] - of["frequency"]),
            "position-aware / fixed, clusters": ranged(of["clusters position-aware"] / of["clusters fixed"]),
            "position-aware / fixed, frequency": ranged(of["position_frequency"] / of["frequency"]),
        }
    return table


def ranged(values: FloatArray) -> list[float]:
    """[the value, 2.5% and 97.5% quantiles of its samples]."""
    return [float(values[0]), *np.quantile(values[1:], (0.025, 0.975)).tolist()]


PAPER_RECOVERED: Final = {
    "mean accepted length, Llama-3-8B (table 1)": {
        "columns": ["MT", "Conv.", "RAG", "Math", "QA", "Summ.", "Code", "Average"],
        "full, 128k": [3.65, 4.13, 4.04, 4.32, 3.46, 3.69, 3.92, 3.89],
        "FR-Spec, 32k": [3.39, 3.88, 3.86, 4.16, 3.33, 3.52, 3.31, 3.64],
        "DynaSpec, about 28k": [3.59, 4.10, 3.98, 4.27, 3.41, 3.58, 3.86, 3.83],
    },
    "recovered of the full vocabulary's": {"DynaSpec": 0.984, "FR-Spec": 0.936},
    "position-aware frequencies (table 4)": {
        "columns": ["MT", "Conv.", "RAG", "Math", "QA", "Summ.", "Code", "Average"],
        "fixed, 32768": [3.38, 3.87, 3.85, 4.16, 3.32, 3.51, 4.11, 3.74],
        "position-aware, 31739": [3.50, 3.94, 3.86, 4.18, 3.38, 3.58, 4.21, 3.81],
    },
    "position-aware clusters (figure 3)": "above fixed budgets on all seven tasks, mean sizes 28.7k against 29.2k; no figures printed",
}


CONTEXTS: Final = 200
"""Contexts of each category."""
DRAWS: Final = 2000
"""Draws per context by the rejection verifier's rule."""
CALLS: Final = 4
"""Calls per context of the rejection verifier itself."""
COUPLED_DRAWS: Final = 100
"""Draws per context of a row of noise that target and draft share."""
BUDGETS: Final = (4, 8, 16, 32)
"""Clusters of the routed shortlists; each has a frequency shortlist of equal mean size beside it."""
CHAIN, CHAIN_REQUESTS = 4, 8
ERRORS: Final = 4.0
"""Standard errors that count as beyond sampling error."""
PLAIN: Final = Sampling(1.0)


@dataclass(frozen=True)
class Laws:
    """Contexts of one draft. ``p`` and ``q`` float64 [n, vocab], the target's and the draft's law over the whole vocabulary; ``logits``
    float32 [n, vocab], the target's; ``tokens`` int64 [n] and ``previous`` [n, d], what a router reads; ``categories``."""

    p: FloatArray
    q: FloatArray
    logits: torch.Tensor
    tokens: torch.Tensor
    previous: torch.Tensor
    categories: npt.NDArray[np.str_]


def laws_of(lab: Lab, draft: str) -> Laws:
    """The laws at ``CONTEXTS`` output tokens of each category, evenly spread over the texts of the test part."""
    target, model = lab.pair.target, lab.pair.drafts[draft]
    parts: list[tuple[torch.Tensor, ...]] = []
    categories: list[str] = []
    for category in CATEGORIES:
        texts = [t for t in lab.test if t.category == category]
        places = [(n, len(t.prompt_ids) - 1 + i) for n, t in enumerate(texts) for i in range(len(t.output_ids))]
        wanted = {places[i] for i in np.linspace(0, len(places) - 1, CONTEXTS).round().astype(int).tolist()}
        for n, text in enumerate(texts):
            at = sorted(i for m, i in wanted if m == n)
            ids = torch.tensor([*text.prompt_ids.tolist(), *text.output_ids.tolist()])
            target.reserve(len(ids))
            model.reserve(len(ids))
            logits = target.chain(ids, 0, logits=len(ids))[at]
            states = model.chain_states(ids, 0)
            parts.append((logits, draft_logits(lab, draft, states[at]), ids[at], states[[i - 1 for i in at]]))
            categories += [category] * len(at)
    logits, own, tokens, previous = (torch.cat(column) for column in zip(*parts, strict=True))
    return Laws(law(logits), law(own), logits, tokens, previous, np.array(categories))


def draft_logits(lab: Lab, draft: str, states: torch.Tensor) -> torch.Tensor:
    output = shortlisted_model(lab.pair, draft).output
    return torch.nn.functional.linear(states, output.weight, output.bias).float()


def law(logits: torch.Tensor) -> FloatArray:
    """The law at temperature 1, float64."""
    found: FloatArray = log_law(logits, PLAIN).double().softmax(-1).numpy()
    return found


def masks(lab: Lab, draft: str, laws: Laws, block: Document) -> npt.NDArray[np.bool_]:
    """A shortlist of each context as the runtime makes it at a first draft step, bool [n, vocab]."""
    rule = compile_shortlist(drafting(draft, "chain", block), lab.find, output_hashes(lab.pair))
    assert rule is not None
    ready = Shortlists(rule, shortlisted_model(lab.pair, draft), exact=False)
    found = np.zeros(laws.p.shape, dtype=np.bool_)
    for i in range(len(found)):
        found[i, ready.of(0, laws.tokens[i : i + 1], laws.previous[i : i + 1], lambda _: None).ids.numpy()] = True
    return found


def sampled(p: FloatArray, q: FloatArray, rng: np.random.Generator) -> FloatArray:
    """How often the rejection verifier's rule, u q(x) <= p(x), keeps an x drawn from q: rates [n] of ``DRAWS`` draws each."""
    rates = np.empty(len(p))
    for i, (target, proposal) in enumerate(zip(p, q, strict=True)):
        at = np.flatnonzero(proposal)
        steps = np.cumsum(proposal[at])
        tokens = at[np.searchsorted(steps, rng.random(DRAWS) * steps[-1], side="right")]
        rates[i] = (rng.random(DRAWS) * proposal[tokens] <= target[tokens]).mean()
    return rates


def called(laws: Laws, q: FloatArray, seed: int) -> FloatArray:
    """How often :func:`runtime.verification.verify_rejection` keeps a token that was drawn as a draft draws it: rates [n] of ``CALLS``."""
    rates = np.zeros(len(q))
    for i, row in enumerate(q):
        log_q, logits = torch.from_numpy(row).log(), laws.logits[[i, i]]
        for salt in range(CALLS):
            token = int((log_q + gumbel_row(stream_key(seed, i, "draft", salt), len(row), log_q.device)).argmax())
            rates[i] += verify_rejection(logits, i, [token], [log_q], PLAIN, seed, salt).accepted / CALLS
    return rates


def coupled(p: FloatArray, proposals: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """How often argmax(log p + g) = argmax(log q + g) with the runtime's noise g, for each proposal law q: rates [n] of
    ``COUPLED_DRAWS``."""
    rates = {name: np.empty(len(p)) for name in proposals}
    for i, row in enumerate(p):
        keys = [stream_key(1, i, "target", n) for n in range(COUPLED_DRAWS)]
        noise = np.stack([gumbel_row(key, len(row), torch.device("cpu")).numpy() for key in keys])
        targets = (np.log(row) + noise).argmax(1)
        for name, q in proposals.items():
            at = np.flatnonzero(q[i])
            rates[name][i] = (at[(np.log(q[i, at]) + noise[:, at]).argmax(1)] == targets).mean()
    return rates


def deviation(rates: FloatArray, chances: FloatArray, draws: int) -> float:
    """Standard errors between all rates of ``draws`` each and their chances."""
    return float((rates - chances).sum() / math.sqrt((chances * (1 - chances)).sum() / draws))


def theory(state: Path) -> dict[str, Any]:
    """Theorem 5.1 on 600 contexts of real text and theorem 5.3 on executed chains: measured acceptance is never below a bound."""
    lab = laboratory(state, ("small", "medium"))
    rows: list[dict[str, Any]] = []
    chains: list[dict[str, Any]] = []
    contexts = 0
    for draft in ("small", "medium"):
        laws = laws_of(lab, draft)
        contexts = len(laws.p)
        shortlists: dict[str, tuple[int, npt.NDArray[np.bool_]]] = {}
        for k in BUDGETS:
            routed = masks(lab, draft, laws, clusters_block(lab.routers[draft], k, k, k))
            size = round(float(routed.sum(1).mean()))
            shortlists[f"{k} clusters"] = k, routed
            frequency = {"kind": "frequency", "size": size, "artifact": lab.frequencies}
            shortlists[f"{size} frequent tokens"] = k, masks(lab, draft, laws, frequency)
        proposals = {name: overlap.restricted(laws.q, mask) for name, (_, mask) in shortlists.items()}
        together = coupled(laws.p, proposals)
        for name, (k, mask) in shortlists.items():
            rows += _theory_rows(lab, draft, laws, name, k, mask, proposals[name], together[name], seed=len(rows))
            last = rows[-1]
            print(
                f"  {draft}, {name}: bound {last['bound']:.3f} <= overlap {last['overlap']:.3f}, measured {last['measured']:.3f}; coupled "
                f"{last['coupled']:.3f}, measured {last['coupled_measured']:.3f}; z {last['z']:+.1f}, by the verifier "
                f"{last['verifier_z']:+.1f}, coupled {last['coupled_z']:+.1f}",
                flush=True,
            )
        for name, block in _chain_blocks(lab, draft).items():
            chains.append({"draft": draft, "shortlist": name, **executed_chains(lab, draft, block)})
            print(f"  {json.dumps(chains[-1])}", flush=True)
    every = [r for r in rows if r["category"] == "all"]
    below = sum(r["below_bound"] for r in every) + sum(r["z"] < -ERRORS for r in chains)
    wrong = sum(r["chance_below_bound"] for r in every)
    deviations = [abs(r[key]) for r in every for key in ("z", "verifier_z", "coupled_z")] + [abs(r["z"]) for r in chains]
    return {
        "holds": below == wrong == 0 and contexts >= 500 and max(deviations) <= ERRORS,
        "summary": f"{below} of {sum(r['contexts'] for r in every)} measured acceptances below theorem 5.1's bound beyond {ERRORS:g} "
        f"standard errors ({contexts} contexts, 2 drafts, {len(every) // 2} shortlists each, {DRAWS} draws), theorem 5.3 met by "
        f"{sum(r['rounds'] for r in chains)} executed rounds; acceptance is the overlap to within {max(deviations):.1f} standard errors",
        "violations": below,
        "chances_below_bound": wrong,
        "largest_deviation": max(deviations),
        "contexts": contexts,
        "rows": rows,
        "chains": chains,
        "paper": PAPER_THEORY,
    }


def _theory_rows(
    lab: Lab,
    draft: str,
    laws: Laws,
    name: str,
    k: int,
    mask: npt.NDArray[np.bool_],
    q: FloatArray,
    together: FloatArray,
    seed: int,
) -> list[dict[str, Any]]:
    """What is known of one shortlist, by category, and over all of them last."""
    chance, together_chance = overlap.overlap(laws.p, q), overlap.coupled_acceptance(laws.p, q)
    bound, sharp = overlap.overlap_bound(laws.p, laws.q, mask), overlap.sharp_overlap_bound(laws.p, laws.q, mask)
    rate, verified = sampled(laws.p, q, np.random.default_rng(seed)), called(laws, q, seed)
    # Where a chance is nearly 0 or 1 its variance says nothing of so few draws: one draw's worth at least.
    one = np.sqrt(np.maximum(chance * (1 - chance), 1 / DRAWS) / DRAWS)
    rule = compile_shortlist(drafting(draft, "chain", clusters_block(lab.routers[draft], k, k, k)), lab.find)
    assert rule is not None
    assert rule.routing is not None
    regret = overlap.routing_regret(laws.p, mask, rule.routing.clusters, k)
    kept = overlap.kept_mass(laws.p, mask)
    rows = []
    for category in (*CATEGORIES, "all"):
        here = (laws.categories == category) | (category == "all")
        means = {
            "mean_size": mask.sum(1),
            "kept_mass": kept,
            "tv": kept - bound,
            "bound": bound,
            "sharp_bound": sharp,
            "overlap": chance,
            "measured": rate,
            "measured_by_calls": verified,
            "coupled": together_chance,
            "coupled_measured": together,
            "regret": regret,
        }
        rows.append(
            {
                "draft": draft,
                "shortlist": name,
                "category": category,
                "contexts": int(here.sum()),
                "clusters_of_regret": k,
                **{key: float(values[here].mean()) for key, values in means.items()},
                "below_bound": int((rate < bound - ERRORS * one)[here].sum()),
                "below_sharp_bound": int((rate < sharp - ERRORS * one)[here].sum()),
                "chance_below_bound": int((chance < sharp - 1e-9)[here].sum() + (sharp < bound - 1e-9)[here].sum()),
                "further_than_2_errors": float((np.abs(rate - chance) > 2 * one)[here].mean()),
                "z": deviation(rate[here], chance[here], DRAWS),
                "verifier_z": deviation(verified[here], chance[here], CALLS),
                "coupled_z": deviation(together[here], together_chance[here], COUPLED_DRAWS),
            }
        )
    return rows


def _chain_blocks(lab: Lab, draft: str) -> dict[str, Document | None]:
    router = lab.routers[draft]
    return {
        "full": None,
        "frequency 192": {"kind": "frequency", "size": 192, "artifact": lab.frequencies},
        "position_frequency 256": {"kind": "position_frequency", "k_max": 256, "artifact": lab.frequencies},
        "clusters 8": clusters_block(router, 8, 8, 8),
        "clusters 24, 16, 1": clusters_block(router, 24, 16, 1),
    }


def executed_chains(lab: Lab, draft: str, block: Document | None) -> dict[str, Any]:
    """Chains of ``CHAIN`` tokens executed with the rejection verifier, against theorem 5.3 with the overlaps at the contexts they reached.

    ``z``: tokens kept less the overlaps of all tokens looked at, in standard errors (a sum of martingale differences). ``expected``: the
    theorem's sum with A_i the mean overlap over rounds that reached token i; ``accepted``: the same with the share of them that kept it. A
    drafted EOS ends what is looked at.
    """
    policy = parse_policy({"draft": draft, "window": {"kind": "fixed", "gamma": CHAIN}, **({"shortlist": block} if block else {})})
    chances: list[list[float]] = [[] for _ in range(CHAIN)]
    kept: list[list[bool]] = [[] for _ in range(CHAIN)]
    rounds = 0
    for category in CATEGORIES:
        options = DecodeOptions(Sampling(1.0, seed=5), NEW_TOKENS, "rejection")
        encoded = encode(lab.pair, lab.requests(lab.test, category, CHAIN_REQUESTS), options)
        for _, group in itertools.groupby(list(rounds_of(lab, policy, encoded)), key=lambda found: found[0]):
            for drafted, accepted, overlaps in _overlaps(lab, draft, list(group)):
                rounds += 1
                for i in range(min(accepted + 1, len(drafted))):
                    chances[i].append(overlaps[i])
                    kept[i].append(accepted > i)
                    if drafted[i] in lab.pair.eos_ids:
                        break
    a, b = np.concatenate([np.array(c) for c in chances]), np.concatenate([np.array(c) for c in kept])
    return {
        "rounds": rounds,
        "looked_at": len(a),
        "expected": float(overlap.expected_accepted([float(np.mean(c)) for c in chances])),
        "accepted": float(overlap.expected_accepted([float(np.mean(c)) for c in kept])),
        "overlap_by_step": [float(np.mean(c)) for c in chances],
        "z": float((b - a).sum() / math.sqrt((a * (1 - a)).sum())),
    }


def _overlaps(
    lab: Lab, draft: str, rounds: Sequence[tuple[int, list[int], Round, list[Support]]]
) -> list[tuple[list[int], int, list[float]]]:
    """Of one request's rounds: what was drafted, how much of it was accepted, and A at every drafted token."""
    target, model = lab.pair.target, lab.pair.drafts[draft]
    _, text, last, _ = rounds[-1]
    ids = torch.tensor([*text, *last.tokens])
    for each in (target, model):
        each.reserve(len(ids) + CHAIN)
        each.read(ids, 0)
    found = []
    for _, text, item, supports in reversed(rounds):  # what a round's pass writes over, earlier rounds do not read
        if not item.drafted:
            continue
        fed, start = torch.tensor([text[-1], *item.drafted[:-1]]), len(text) - 1
        p = law(target.chain(fed, start, logits=len(fed)))
        q = law(draft_logits(lab, draft, model.chain_states(fed, start)))
        if supports:
            mask = np.zeros(q.shape, dtype=np.bool_)
            for i in range(len(fed)):
                mask[i, supports[i].ids.numpy()] = True
            q = overlap.restricted(q, mask)
        found.append((item.drafted, item.step.accepted, overlap.overlap(p, q).tolist()))
    return found


PAPER_THEORY: Final = {
    "HumanEval, 500 contexts, Llama-3-8B, shortlist of 28k (table 3)": {
        "kept mass p(S)": {"FR-Spec": 0.8544, "DynaSpec": 0.87435},
        "TV(p(.|S), q(.|S))": {"FR-Spec": 0.88697, "DynaSpec": 0.87447},
        "bound p(S) - TV": {"FR-Spec": -0.0325, "DynaSpec": -0.0001},
    }
}

CHECKS = {"shortlist-recovered": recovered, "shortlist-theory": theory}


def markdown(results: Path) -> str:
    """The tables of docs/shortlists.md, from stored results."""
    found = {name: json.loads((results / f"acceptance-{name}.json").read_text()) for name in CHECKS}
    tables = found["shortlist-recovered"]["tables"]
    lines = ["| temperature, size | category | " + " | ".join(KINDS) + " | routed - static |", "|---" * (len(KINDS) + 3) + "|"]
    for name, table in tables.items():
        for category, row in table.items():
            cells = [f"{100 * row[k][0]:.1f}%, {row['mean size'][k]:.0f}" for k in KINDS]
            gain = "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * x for x in row["routed - static"]))
            lines.append(f"| {name} | {category} | " + " | ".join(cells) + f" | {gain} |")
    lines += ["", "| temperature, size | clusters | frequencies |", "|---|---|---|"]
    for name, table in tables.items():
        cells = ["{:.3f} ({:.3f} to {:.3f})".format(*table["all"][f"position-aware / fixed, {k}"]) for k in ("clusters", "frequency")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| draft | shortlist | p(S) | TV | bound | overlap | measured | coupled: formula, measured | regret |", "|---" * 9 + "|"]
    for r in found["shortlist-theory"]["rows"]:
        if r["category"] == "all":
            lines.append(
                f"| {r['draft']} | {r['shortlist']} | {r['kept_mass']:.3f} | {r['tv']:.3f} | {r['bound']:.3f} | {r['overlap']:.3f} | "
                f"{r['measured']:.3f} | {r['coupled']:.3f}, {r['coupled_measured']:.3f} | {r['regret']:.3f} |"
            )
    lines += ["", "| draft | shortlist | rounds | theorem 5.3 | accepted | standard errors |", "|---" * 6 + "|"]
    for c in found["shortlist-theory"]["chains"]:
        lines.append(
            f"| {c['draft']} | {c['shortlist']} | {c['rounds']} | {c['expected']:.2f} | {c['accepted']:.2f} | {c['z']:+.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(Path(__file__).resolve().parent / "results"))

"""The check of vocabulary shortlists behind ``bench/acceptance.py`` that says what they recover of tau at equal sizes.

It uses one recording of the demo workload at temperature 1 (``shortlists.db``), as :mod:`shortlist_theory` does. Frequencies, clusters and
routers are fitted to its search part; what is executed or read is its test part. It does not read the clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from spectune.demo.corpus import code_documents, prose_documents
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions, Encoded, encode
from spectune.optimizer.fit.dynaspec import fit_router
from spectune.optimizer.fit.fr_spec import fit_fr_spec
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.record import RecordRequest, record, split
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import Round, StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.dynaspec import cluster_budget
from spectune.runtime.policies.fr_spec import frequency_budget
from spectune.runtime.policies.plan import Plan, prepare
from spectune.runtime.shortlists import Support
from spectune.traces.schema import Sampling, Trajectory, Workload
from spectune.traces.store import TraceStore
from tree_checks import CATEGORIES, stored, top_k

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

    def prepared(self, policy: Policy) -> Plan:
        return prepare(policy, self.pair.draft_names, artifacts=self.find)

    def counts(self) -> IntArray:
        """Occurrences of every token in the search part, int64 [vocab]."""
        tokens = np.concatenate([np.concatenate([t.prompt_ids, t.output_ids]) for t in self.search])
        return np.bincount(tokens, minlength=self.pair.target.vocab_size)


def laboratory(state: Path, drafts: Iterable[str] = ("small", "medium", "head")) -> Lab:
    """Records the demo workload unless that was done, and fits everything to its search part."""
    pair = load_pair(read_pair("demo"), device="cpu")
    store, recording, texts = recorded(state, pair)
    search, test = parts(texts)
    frequencies = fit_fr_spec(store, recording, pair).artifact
    general = fit_fr_spec(store, recording, pair, corpus=_corpus(state, pair, search)).artifact
    routers = {}
    for draft in drafts:
        made = fit_router(store, recording, pair, draft, clusters=CLUSTERS)
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

CHECKS = {"shortlist-recovered": recovered}


def markdown(results: Path) -> str:
    """The tables of docs/shortlists.md on tau recovered, from stored results."""
    tables = json.loads((results / "acceptance-shortlist-recovered.json").read_text())["tables"]
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
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(Path(__file__).resolve().parent / "results"))

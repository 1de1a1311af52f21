"""The papers' mechanisms on drafts of Gemma 3 270M, by replay of greedy texts, half of them unseen.

    python bench/run.py real_drafts [--only shortlists trees] [--quick]

`make real` leaves the pair and prompts in build/real, tools/gemma the texts that the target wrote,
an EAGLE-3 head and a draft model of two layers. Shortlists are of the draft model, whose vocabulary
is the target's, with an order and a router of those texts; bins and a classifier are fitted to the
head's trees.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pairs import chain

from bench.checks.real import PAIR
from bench.harness import Figures, Part, say, state_folder
from bench.lab import Halves, halves
from bench.papers.evidence import EMITTED, ROUNDS, VERIFIED, at_equal_tau, over, replayed, row
from bench.papers.replayed import (
    Ranking,
    classified,
    eagle,
    fit_classifier,
    fit_in_bins,
    in_bins,
    tree_curve,
)
from bench.papers.shortlists import DECAY, DEPTH, best_budget, fit_to
from bench.papers.vocabulary import SIZES
from spectune.optimizer.fit.recorded_trees import tree_source
from spectune.optimizer.inputs import read_files
from spectune.runtime.loading import LoadedPair

RESULT = "real-drafts"
REQUESTS, TOKENS, CONTEXTS = 48, 32, 40_000
"""Requests and their tokens; contexts that the router is trained on."""


def recorded(draft: str, quick: bool, *, trees: bool) -> Halves:
    """A recording of the prompts of `make real`, with chains of a draft, or its trees."""
    how: dict[str, Any] = {"workload": read_files([str(PAIR / "texts.jsonl")]), "trees": trees}
    how |= {"name": str(PAIR / "pair.json"), "drafts": (draft,)}
    size = (12, 12) if quick else (REQUESTS, TOKENS)
    return halves(state_folder(quick), 0.0, quick, count=size[0], tokens=size[1], **how)


def about(h: Halves, policy: Mapping[str, Any]) -> Figures:
    """The requests, and the mean accepted length of a policy on those unseen."""
    rounds, emitted = replayed(h, dict(policy)).counts[:, [ROUNDS, EMITTED]].sum(0)
    return {"sample": h.sample(), "tau": float(emitted / rounds)}


def shortlists(quick: bool) -> Figures:
    """By size, what chains of the draft model keep of their mean accepted length as they draft from
    FR-Spec's shortlist, PA-FR's and DynaSpec's, that evaluate as many tokens in the mean."""
    h, draft = recorded("small", quick, trees=False), "small"
    text, whole, rows = corpus(h.pair, PAIR / "own_texts.jsonl"), chain(draft, DEPTH), []
    everything, clusters = replayed(h, whole).counts[:, ROUNDS], 0
    contexts = 2000 if quick else CONTEXTS
    for size in SIZES:
        fits = fit_to(h, draft, text, contexts, size)
        decayed = {"kind": "position_frequency", "k_max": round(DEPTH * size / DECAY)}
        shown: dict[str, Figures] = {
            "FR-Spec": fits.frequency(size),
            "PA-FR": decayed | {"artifact": fits.order},
            "DynaSpec": fits.in_clusters(*best_budget(h, fits)),
        }
        clusters = len(fits.means)
        for name, shortlist in shown.items():
            rounds = replayed(h, whole | {"shortlist": shortlist}).counts[:, ROUNDS]
            rows.append({"size": size, "shortlist": name, "kept": over(everything, rounds)})
            say(rows[-1])
    fitted = {"depth": DEPTH, "contexts": contexts, "clusters": clusters}
    return {**about(h, whole), **fitted, "rows": rows}


def corpus(pair: LoadedPair, file: Path) -> Path:
    """The texts of a file that the target wrote, but for those held out, as a corpus."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    texts = (pair.text([*r["prompt"], *r["output"]]) for r in rows if not r["held_out"])
    made = file.with_name("own_corpus.jsonl")
    made.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return made


def trees(quick: bool) -> Figures:
    """HeteroSpec's bins over EAGLE-2's tree, and C2T's verified tokens over those of EAGLE-2 at the
    same tau, on the head."""
    h, draft = recorded("head", quick, trees=True), "head"
    source = tree_source(h.store, h.recording, draft)
    bins, plain = fit_in_bins(h, source), eagle(draft)
    base, ours = (replayed(h, p).counts.T for p in (plain, in_bins(draft, bins.artifact)))
    why = f"tau {base[EMITTED].sum() / base[ROUNDS].sum():.2f} without bins"
    rows = [
        row("tau", draft, over(base[ROUNDS], ours[ROUNDS]), why),
        row("tokens", draft, over(ours[VERIFIED], base[VERIFIED])),
    ]
    artifact, curve = fit_classifier(source).artifact, tree_curve(h, draft)
    why = Ranking.of(h, draft).why(h.find(artifact))
    for beta in (0.4, 0.6, 0.8):
        place, new = f"{draft}, beta {beta}", classified(draft, artifact, beta)
        rows.append(at_equal_tau("nodes", place, h, new, curve, why))
    return {**about(h, plain), "chain": about(h, chain(draft, DEPTH))["tau"], "rows": rows}


PARTS: dict[str, Part] = {"shortlists": shortlists, "trees": trees}

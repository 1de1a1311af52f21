"""DynaSpec's tables: shortlists of a draft's vocabulary, by replay and on source text.

:mod:`papers.replayed` runs them. Routers are trained on tokens of the text that pairs are trained
on, orders are counted there. On the half that is fitted to, a shortlist's size is chosen where
FR-Spec keeps what it keeps in the paper; the router selects as many clusters as hold so many tokens
in the mean.
"""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pairs import chain

from bench.harness import state_folder
from bench.lab import CATEGORIES, EAGLE_WIDTH, Halves
from bench.papers.evidence import GSM8K, ROUNDS, Document, cells, over, replayed, row
from spectune.demo.corpus import code_documents, prose_documents
from spectune.optimizer.fit.dynaspec import fit_router, hidden_states
from spectune.optimizer.fit.fr_spec import fit_fr_spec
from spectune.runtime.policies.artifacts import FREQUENCIES, ROUTER
from spectune.runtime.policies.dynaspec import Routing, cluster_budget
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.shortlists import Router
from spectune.traces.tables import Trajectory
from train_demo.corpus import corpus, package_documents

SHARES, KEPT = (0.15, 0.22, 0.3, 0.4, 0.5), 0.936
"""Of the vocabulary, among which the first is taken where FR-Spec keeps so much of tau; the paper
has 28k to 32k of 128k."""
DEPTH, TOP_N = 5, 60
"""Levels and nodes of EAGLE-2's trees."""
CONTEXTS = 120_000
"""Tokens that a router is trained on."""
INSTALLED = (Path(sysconfig.get_paths()["purelib"]),)
DECAY = 2 + 1 / 3 + 1 / 4 + 1 / 5
"""What PA-FR's steps of a chain of 5 evaluate, over k_max."""
Rows = npt.NDArray[np.bool_]
"""Of a draft's output head."""


def dynaspec(quick: bool, temperature: float = 0.0) -> list[Document]:
    """Table 1, figure 3 and table 4 as mean accepted length; greedy also in trees, table 3 and rare
    tokens."""
    rows, at = [], " 1" if temperature else ""
    for h, draft, _ in cells(temperature, quick):
        h = replace(h, test=h.test[: 3 if quick else 60])
        fits = fit(h, draft, quick)
        size = fits.size
        decayed = {"kind": "position_frequency", "k_max": round(5 * size / DECAY)}
        steps = best_budget(h, fits)
        shortlists = {
            "FR-Spec": fits.frequency(size),
            "constant": fits.in_clusters(*[fits.clusters] * 3),
            "DynaSpec": fits.in_clusters(*steps),
            "PA-FR": decayed | {"artifact": fits.order},
        }
        by_step = f"{', '.join(str(cluster_budget(t, *steps)) for t in range(DEPTH))} clusters"
        in_order, in_routed = (f"first choice in it {s:.1%}" for s in first_choices(h, fits))
        growth = {"kind": "top_k", "width": EAGLE_WIDTH, "score": "probability"}
        shapes: dict[str, Document] = {"chain of 5": {}}
        if not temperature:
            shapes["EAGLE-2's tree"] = {"growth": growth, "select": {"top_n": TOP_N}}
        for shape, more in shapes.items():
            whole = chain(draft, DEPTH) | more
            rounds = {"all": replayed(h, whole).counts[:, ROUNDS]}
            place = f"{draft}, {shape}, temperature {temperature:g}"
            for name, shortlist in shortlists.items():
                if not more or name != "PA-FR":
                    policy = whole | {"shortlist": shortlist}
                    rounds[name] = replayed(h, policy).counts[:, ROUNDS]
            for claim, base, new, why in (
                ("frequent", "all", "FR-Spec", f"{size} tokens, {in_order}"),
                ("full", "all", "DynaSpec", by_step),
                ("routed", "FR-Spec", "DynaSpec", f"{by_step}; FR-Spec's {in_order}"),
                (
                    *("decayed", "constant", "DynaSpec"),
                    f"{by_step} over {fits.clusters}, {in_routed}",
                ),
                ("decayed order", "FR-Spec", "PA-FR", f"{decayed['k_max']} tokens at first"),
            ):
                if new in rounds:
                    ours = over(rounds[base], rounds[new])
                    rows.append(row(f"{claim}{at}", place, ours, why))
            for category in CATEGORIES if not temperature else ():
                of = [h.trace.trajectories[i].category == category for i in h.test]
                for claim, new in (("frequent", "FR-Spec"), ("full", "DynaSpec")):
                    ours = over(rounds["all"][of], rounds[new][of])
                    rows.append(
                        row(claim, f"{draft}, {shape}, {category}", ours, f"{sum(of)} requests")
                    )
        if not temperature:
            share = size / h.pair.models[draft].output.rows
            rows.append(row("share", draft, [share, None, None]))
            rows += [*_masses(h, fits), _rare(h, fits, 40 if quick else 300)]
    return rows


def best_budget(h: Halves, fits: Fits) -> tuple[int, int, int]:
    """Of equation 3's budgets that hold as many tokens as FR-Spec's shortlist in the mean over a
    chain's steps, that by which the half that is fitted to has the fewest rounds: k0 is twice k1,
    k_min a part of it."""
    means, tried = fits.means, list[tuple[int, tuple[int, int, int]]]()
    for part in (0.0, 1 / 3, 2 / 3):
        budgets = [
            (min(2 * k, len(means)), k, max(1, round(part * k))) for k in range(1, len(means) + 1)
        ]
        tokens = [
            np.mean([means[cluster_budget(t, *b) - 1] for t in range(DEPTH)]) for b in budgets
        ]
        budget = budgets[max(0, int((np.array(tokens) <= fits.size).sum()) - 1)]
        policy = chain(fits.draft, DEPTH) | {"shortlist": fits.in_clusters(*budget)}
        tried.append((int(replayed(h, policy, places=h.fit[::3]).counts[:, ROUNDS].sum()), budget))
    return min(tried)[1]


@dataclass(frozen=True)
class Fits:
    """A draft's order and router, and what each evaluates: ``size`` tokens, or ``clusters`` that
    hold so many in the mean; ``means``: tokens of so many clusters, from 1."""

    draft: str
    order: str
    router: str
    routing: Routing
    frequent: Rows
    size: int
    clusters: int
    means: npt.NDArray[np.float64]

    def frequency(self, size: int) -> Document:
        return {"kind": "frequency", "size": size, "artifact": self.order}

    def in_clusters(self, k0: int, k1: int, k_min: int) -> Document:
        return {"kind": "clusters", "k0": k0, "k1": k1, "k_min": k_min, "artifact": self.router}

    def routed(self, scores: torch.Tensor) -> Rows:
        """What is evaluated by the router's scores [n, M], [n, rows]."""
        members = np.arange(self.routing.clusters.count)[:, None] == self.routing.clusters.of
        best = scores.topk(self.clusters).indices.numpy()
        return np.logical_or.reduce([members[column] for column in best.T])


def fit(h: Halves, draft: str, quick: bool) -> Fits:
    """Fits to the training text; the size is read off the half that is fitted to."""
    text = training_text(h.pair.spec.name, quick)
    return fit_to(h, draft, text, 3000 if quick else CONTEXTS)


def fit_to(h: Halves, draft: str, text: Path, contexts_of: int, size: int | None = None) -> Fits:
    """Fits to a file of texts, a router to ``contexts_of`` of its tokens, unless there is one. The
    size where none is given, and how many clusters are as many tokens, are read off the half that
    is fitted to."""
    names, output = [str(text)], h.pair.models[draft].output
    where = h.store, h.recording, h.pair
    stored = h.store.list_artifacts(FREQUENCIES, h.pair.id)
    same = [a.id for a in stored if h.find(a.id).document.get("corpus") == names]
    order = same[0] if same else fit_fr_spec(*where, corpus=names).artifact
    size = size or _size(h, draft, order)
    about = {"draft": draft, "corpus": names, "contexts": contexts_of}
    stored = h.store.list_artifacts(ROUTER, h.pair.id)
    same = [a.id for a in stored if about.items() <= h.find(a.id).document.items()]
    router = same[0] if same else fit_router(*where, **about).artifact
    of_order, of_router = h.find(order), h.find(router)
    rank = Frequencies.from_document(of_order.document, of_order.arrays).rank[output.ids]
    routing = Routing.from_document(of_router.document, of_router.arrays)
    frequent, none = rank.argsort().argsort() < size, np.zeros(0)
    fits = Fits(draft, order, router, routing, frequent, size, 1, none)
    texts = [h.trace.trajectories[i] for i in h.fit[::4]]
    scores = torch.cat([contexts(h, fits, _ids(t), len(t.prompt_ids))[1] for t in texts])
    sizes = torch.from_numpy(routing.clusters.sizes)[scores.argsort(dim=-1, descending=True)]
    means = sizes.cumsum(-1).double().mean(0).numpy()
    return replace(fits, clusters=max(1, int((means <= size).sum())), means=means)


def _size(h: Halves, draft: str, order: str) -> int:
    """Tokens of the first of :data:`SHARES` where FR-Spec keeps :data:`KEPT` of tau, in chains of a
    part of the requests that are fitted to; the last where none does."""
    whole, places = chain(draft, DEPTH), h.fit[::3]
    rounds = replayed(h, whole, places=places).total.rounds
    for share in SHARES:
        size = round(share * h.pair.models[draft].output.rows)
        shortlist = {"kind": "frequency", "size": size, "artifact": order}
        if (
            rounds / replayed(h, whole | {"shortlist": shortlist}, places=places).total.rounds
            >= KEPT
        ):
            break
    return size


def training_text(pair: str, quick: bool) -> Path:
    """What a pair was trained on, in JSON lines: the standard library, installed packages (not the
    demo pair) and GSM8K's training split, which ``--gsm8k`` names; the last two not if quick."""
    path = state_folder(quick) / f"corpus-{pair}.jsonl"
    if not path.exists():
        texts = [*code_documents(False), *prose_documents(False)]
        if not quick:
            if GSM8K["file"] is None:
                raise SystemExit("--gsm8k FILE: its training split is part of what pairs read")
            texts, _ = corpus(GSM8K["file"], () if pair == "demo" else INSTALLED)
        path.write_text("".join(json.dumps({"text": t.text}) + "\n" for t in texts))
    return path


@torch.no_grad()
def contexts(
    h: Halves, fits: Fits, ids: list[int], first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a text's contexts from its token ``first`` - 1 on, but for the last: the draft's
    distributions, float64 [n, rows], and the router's scores [n, M]."""
    model, text, at = h.pair.models[fits.draft], torch.tensor(ids), max(first - 1, 2)
    states = model.state(hidden_states(h.pair, fits.draft, ids))
    output, scorer = model.output, Router.of(fits.routing.weights, model)
    logits = torch.nn.functional.linear(states[at:-1], output.weight, output.bias)
    scores = scorer.scores(model.embedded(text[at:-1]), states[at - 1 : -2])
    scores[:, torch.from_numpy(fits.routing.clusters.sizes == 0)] = -torch.inf
    return logits.double().softmax(-1), scores


def first_choices(h: Halves, fits: Fits) -> tuple[float, float]:
    """In which share of the contexts of unseen texts FR-Spec's shortlist, and the router's, has the
    token that the draft proposes by its whole vocabulary."""
    found = []
    for t in (h.trace.trajectories[i] for i in h.test):
        q, scores = contexts(h, fits, _ids(t), len(t.prompt_ids))
        first = q.argmax(-1).numpy()
        routed = fits.routed(scores)[np.arange(len(first)), first]
        found.append(np.stack([fits.frequent[first], routed], 1))
    in_order, in_routed = np.concatenate(found).mean(0)
    return float(in_order), float(in_routed)


def _ids(text: Trajectory) -> list[int]:
    return [*text.prompt_ids.tolist(), *text.output_ids.tolist()]


def _masses(h: Halves, fits: Fits) -> list[Document]:
    """Table 3 on the texts of code, p and q at temperature 1: p(S), and TV inside S; theorem 5.1 of
    each shortlist and corollary 5.2 of the router's are checked in every context."""
    model, target = h.pair.models[fits.draft], h.pair.target
    of = fits.routing.clusters.of
    sums, holds = [], []
    for t in (t for i in h.test if (t := h.trace.trajectories[i]).category == "code"):
        ids = _ids(t)
        q_all, scores = contexts(h, fits, ids, len(t.prompt_ids))
        q, routed = q_all.numpy(), fits.routed(scores)
        target.reserve(len(ids))
        logits = target.chain(torch.tensor(ids), 0, logits=len(ids))[0][-1 - len(q) : -1]
        p = logits.double().softmax(-1).numpy()[:, model.output.ids]
        figures = []
        for s in (np.broadcast_to(fits.frequent, q.shape), routed):
            mass, of_q = (p * s).sum(1), q * s / (q * s).sum(1, keepdims=True)
            tv = np.abs(p * s / mass[:, None] - of_q).sum(1) / 2
            holds.append(np.minimum(p, of_q).sum(1) >= mass - tv - 1e-9)
            figures += [mass, tv]
        clusters = np.stack([np.bincount(of, row, len(scores[0])) for row in p])
        best = np.sort(clusters)[:, -fits.clusters :].sum(1)
        holds.append(best >= figures[2] - 1e-9)
        sums.append([len(q), *(x.sum() for x in figures)])
    count, mass_fr, tv_fr, mass, tv = np.array(sums).T
    n, checks = int(count.sum()), np.concatenate(holds)
    rows = []
    for claim, new, base in (("mass", mass, mass_fr), ("distance", tv, tv_fr)):
        why = f"{n} contexts: {new.sum() / n:.3f} against {base.sum() / n:.3f}"
        rows.append(row(claim, fits.draft, over(new, base), why))
    held = float(checks.mean())
    return [*rows, row("bounds", fits.draft, [held, held, held], f"{len(checks)} inequalities")]


def _rare(h: Halves, fits: Fits, count: int) -> Document:
    """How many tokens of held-out packages' source outside FR-Spec's shortlist are in the
    router's."""
    output = h.pair.models[fits.draft].output
    row_of = np.full(h.pair.target.vocab_size, -1)
    row_of[output.ids] = np.arange(output.rows)
    modules = package_documents(INSTALLED, True)
    sums = []
    for module in modules[:: max(1, len(modules) // count)]:
        ids = h.pair.encode(module.text[:1500])[:256]
        if len(ids) > 8:
            scores = contexts(h, fits, ids, 1)[1]
            places = row_of[ids[-len(scores) :]]
            rare = (places >= 0) & ~fits.frequent[places]
            in_router = fits.routed(scores)[np.arange(len(places)), places]
            sums.append([len(places), rare.sum(), (rare & in_router).sum()])
    tokens, rare, recovered = np.array(sums).T
    why = f"{rare.sum()} of {tokens.sum()} tokens"
    return row("rare", fits.draft, over(recovered, rare), why)

"""The check of vocabulary shortlists behind ``bench/acceptance.py`` that holds DynaSpec's theorems against recorded contexts; on the
recording and fits of :mod:`shortlist_tables`. It does not read the clock."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from papers import dynaspec
from shortlist_tables import NEW_TOKENS, Document, FloatArray, Lab, clusters_block, drafting, laboratory, rounds_of
from spectune.optimizer.execute import DecodeOptions, encode
from spectune.runtime.loop import Round
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.sampling import gumbel_row, log_distribution, stream_key
from spectune.runtime.shortlists import Shortlists, Support, compile_shortlist
from spectune.runtime.verification import verify_rejection
from spectune.traces.schema import Sampling
from tree_checks import CATEGORIES

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
    output = lab.pair.models[draft].output
    return torch.nn.functional.linear(states, output.weight, output.bias).float()


def law(logits: torch.Tensor) -> FloatArray:
    """The law at temperature 1, float64."""
    found: FloatArray = log_distribution(logits, PLAIN).double().softmax(-1).numpy()
    return found


def masks(lab: Lab, draft: str, laws: Laws, block: Document) -> npt.NDArray[np.bool_]:
    """A shortlist of each context as the runtime makes it at a first draft step, bool [n, vocab]."""
    rule = compile_shortlist(drafting(draft, "chain", block), lab.find)
    assert rule is not None
    ready = Shortlists(rule, lab.pair.models[draft], exact=False)
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
        proposals = {name: dynaspec.restricted(laws.q, mask) for name, (_, mask) in shortlists.items()}
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
    chance, together_chance = dynaspec.overlap(laws.p, q), dynaspec.coupled_acceptance(laws.p, q)
    bound, sharp = dynaspec.overlap_bounds(laws.p, laws.q, mask)
    rate, verified = sampled(laws.p, q, np.random.default_rng(seed)), called(laws, q, seed)
    # Where a chance is nearly 0 or 1 its variance says nothing of so few draws: one draw's worth at least.
    one = np.sqrt(np.maximum(chance * (1 - chance), 1 / DRAWS) / DRAWS)
    rule = compile_shortlist(drafting(draft, "chain", clusters_block(lab.routers[draft], k, k, k)), lab.find)
    assert rule is not None
    assert rule.routing is not None
    regret = dynaspec.routing_regret(laws.p, mask, rule.routing.clusters, k)
    kept = dynaspec.kept_mass(laws.p, mask)
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
        "expected": dynaspec.expected_accepted([float(np.mean(c)) for c in chances]),
        "accepted": dynaspec.expected_accepted([float(np.mean(c)) for c in kept]),
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
            q = dynaspec.restricted(q, mask)
        found.append((item.drafted, item.step.accepted, dynaspec.overlap(p, q).tolist()))
    return found


PAPER_THEORY: Final = {
    "HumanEval, 500 contexts, Llama-3-8B, shortlist of 28k (table 3)": {
        "kept mass p(S)": {"FR-Spec": 0.8544, "DynaSpec": 0.87435},
        "TV(p(.|S), q(.|S))": {"FR-Spec": 0.88697, "DynaSpec": 0.87447},
        "bound p(S) - TV": {"FR-Spec": -0.0325, "DynaSpec": -0.0001},
    }
}

CHECKS = {"shortlist-theory": theory}


def markdown(results: Path) -> str:
    """The tables of docs/shortlists.md on the theorems, from stored results."""
    found = json.loads((results / "acceptance-shortlist-theory.json").read_text())
    lines = ["| draft | shortlist | p(S) | TV | bound | overlap | measured | coupled: formula, measured | regret |", "|---" * 9 + "|"]
    for r in found["rows"]:
        if r["category"] == "all":
            lines.append(
                f"| {r['draft']} | {r['shortlist']} | {r['kept_mass']:.3f} | {r['tv']:.3f} | {r['bound']:.3f} | {r['overlap']:.3f} | "
                f"{r['measured']:.3f} | {r['coupled']:.3f}, {r['coupled_measured']:.3f} | {r['regret']:.3f} |"
            )
    lines += ["", "| draft | shortlist | rounds | theorem 5.3 | accepted | standard errors |", "|---" * 6 + "|"]
    for c in found["chains"]:
        lines.append(
            f"| {c['draft']} | {c['shortlist']} | {c['rounds']} | {c['expected']:.2f} | {c['accepted']:.2f} | {c['z']:+.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(Path(__file__).resolve().parent / "results"))

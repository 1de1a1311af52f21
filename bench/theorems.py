"""DynaSpec's theorem 5.1 against recorded contexts, for the check of :mod:`shortlists`. Nothing
here reads the clock."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from lab import CATEGORIES, Document, fixed
from papers import dynaspec
from shortlist_fits import Fits

from spectune.runtime.policies.document import parse_policy
from spectune.runtime.policies.shortlist_rule import compile_shortlist
from spectune.runtime.sampling import gumbel_row, log_distribution, stream_key
from spectune.runtime.shortlists import Shortlists
from spectune.runtime.verification import verify_rejection
from spectune.traces.schema import Sampling

FloatArray, BoolArray = npt.NDArray[np.float64], npt.NDArray[np.bool_]
CALLS, COUPLED_DRAWS = 4, 100
"""Per context: calls of the rejection verifier; draws of noise that target and draft share."""
BUDGETS = (4, 8, 16, 32)
"""Clusters of the routed shortlists; each has a frequency shortlist of equal mean size beside it.
"""
ERRORS = 4.0
"""Standard errors that count as beyond sampling error."""
PLAIN = Sampling(1.0)


class Contexts(NamedTuple):
    """Contexts of one draft: the target's and the draft's distributions ``p`` and ``q`` float64 [n,
    vocab], the target's ``logits``, and ``tokens`` [n] and ``previous`` hidden states [n, d], which
    a router reads."""

    p: FloatArray
    q: FloatArray
    logits: torch.Tensor
    tokens: torch.Tensor
    previous: torch.Tensor


def check(fits: Fits, draft: str, quick: bool) -> dict[str, Any]:
    """Acceptance measured on contexts of real text against the overlap and theorem 5.1's bound."""
    contexts = contexts_of(fits, draft, 10 if quick else 200)
    shortlists: dict[str, BoolArray] = {}
    for k in BUDGETS[: 1 if quick else 4]:
        routed = masks(fits, draft, contexts, fits.routed(draft, k, k, k))
        size = round(float(routed.sum(1).mean()))
        frequent = masks(fits, draft, contexts, fits.by_frequency(size))
        shortlists |= {f"{k} clusters": routed, f"{size} frequent tokens": frequent}
    restricted = {name: dynaspec.restricted(contexts.q, mask) for name, mask in shortlists.items()}
    together = coupled(contexts.p, restricted)
    rows = [
        _row(contexts, name, mask, restricted[name], together[name])
        for name, mask in shortlists.items()
    ]
    violations = sum(r["below_bound"] for r in rows)
    largest = max(abs(r[key]) for r in rows for key in ("z", "coupled_z"))
    return {
        "violations": violations,
        "largest_deviation": largest,
        "summary": f"{violations} acceptances below theorem 5.1's bound beyond {ERRORS:g} standard "
        f"errors ({len(contexts.p)} contexts, {len(rows)} shortlists); acceptance is the overlap "
        f"to within {largest:.1f} standard errors",
        "rows": rows,
    }


def contexts_of(fits: Fits, draft: str, each: int) -> Contexts:
    """``each`` output tokens of each category, evenly spread over the texts of the test part."""
    target, model = fits.pair.target, fits.pair.drafts[draft]
    parts: list[tuple[torch.Tensor, ...]] = []
    for category in CATEGORIES:
        texts = [t for t in fits.test if t.category == category]
        places = [
            (n, len(t.prompt_ids) - 1 + i)
            for n, t in enumerate(texts)
            for i in range(len(t.output_ids))
        ]
        chosen = np.linspace(0, len(places) - 1, each).round().astype(int).tolist()
        wanted = {places[i] for i in chosen}
        for n, text in enumerate(texts):
            at = sorted(i for m, i in wanted if m == n)
            ids = torch.tensor([*text.prompt_ids.tolist(), *text.output_ids.tolist()])
            target.reserve(len(ids))
            model.reserve(len(ids))
            logits, states = target.chain(ids, 0, logits=len(ids))[at], model.chain_states(ids, 0)
            own, previous = draft_logits(fits, draft, states[at]), states[[i - 1 for i in at]]
            parts.append((logits, own, ids[at], previous))
    logits, own, tokens, previous = (torch.cat(column) for column in zip(*parts, strict=True))
    return Contexts(distribution(logits), distribution(own), logits, tokens, previous)


def draft_logits(fits: Fits, draft: str, states: torch.Tensor) -> torch.Tensor:
    output = fits.pair.models[draft].output
    return torch.nn.functional.linear(states, output.weight, output.bias).float()


def distribution(logits: torch.Tensor) -> FloatArray:
    """The distribution at temperature 1, float64."""
    found: FloatArray = log_distribution(logits, PLAIN).double().softmax(-1).numpy()
    return found


def masks(fits: Fits, draft: str, contexts: Contexts, block: Document) -> BoolArray:
    """A shortlist of each context as the runtime makes it at a first draft step, bool [n,
    vocab]."""
    policy = parse_policy({"draft": draft, "window": fixed(4), "shortlist": block})
    rule = compile_shortlist(policy, fits.find)
    assert rule is not None
    ready = Shortlists(rule, fits.pair.models[draft], exact=False)
    found = np.zeros(contexts.p.shape, dtype=np.bool_)
    for i in range(len(found)):
        token, previous = contexts.tokens[i : i + 1], contexts.previous[i : i + 1]
        _, support = ready.beside(lambda: None, 0, token, previous, lambda _: None)
        found[i, support.ids.numpy()] = True
    return found


def verified(contexts: Contexts, q: FloatArray) -> FloatArray:
    """How often :func:`runtime.verification.verify_rejection` keeps a token that was drawn as a
    draft draws it: rates [n]."""
    rates = np.zeros(len(q))
    for i, row in enumerate(q):
        log_q, logits = torch.from_numpy(row).log(), contexts.logits[[i, i]]
        for salt in range(CALLS):
            noise = gumbel_row(stream_key(0, i, "draft", salt), len(row), log_q.device)
            token = int((log_q + noise).argmax())
            found = verify_rejection(logits, i, [token], [log_q], PLAIN, 0, salt)
            rates[i] += found.accepted / CALLS
    return rates


def coupled(p: FloatArray, proposals: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """How often argmax(log p + g) = argmax(log q + g) with the runtime's noise g, for each proposal
    q: rates [n]."""
    rates = {name: np.empty(len(p)) for name in proposals}
    for i, row in enumerate(p):
        keys = [stream_key(1, i, "target", n) for n in range(COUPLED_DRAWS)]
        noise = np.stack([gumbel_row(key, len(row), torch.device("cpu")).numpy() for key in keys])
        targets = (np.log(row) + noise).argmax(1)
        for name, q in proposals.items():
            at = np.flatnonzero(q[i])
            rates[name][i] = (at[(np.log(q[i, at]) + noise[:, at]).argmax(1)] == targets).mean()
    return rates


def deviation(rates: FloatArray, others: FloatArray, chances: FloatArray, draws: int) -> float:
    """Rates of ``draws`` each less others, summed, in standard errors by the rates' chances."""
    return float((rates - others).sum() / math.sqrt((chances * (1 - chances)).sum() / draws))


def _row(
    contexts: Contexts, name: str, mask: BoolArray, q: FloatArray, together: FloatArray
) -> dict[str, Any]:
    """What is known of one shortlist: means over contexts, and whether what the verifier keeps is
    below the bound."""
    chance = dynaspec.overlap(contexts.p, q)
    together_chance = dynaspec.coupled_acceptance(contexts.p, q)
    bound, sharp = dynaspec.overlap_bounds(contexts.p, contexts.q, mask)
    kept = verified(contexts, q)
    means = {
        "mean_size": mask.sum(1),
        "kept_mass": dynaspec.kept_mass(contexts.p, mask),
        "bound": bound,
        "sharp_bound": sharp,
        "overlap": chance,
        "measured": kept,
        "coupled": together_chance,
        "coupled_measured": together,
    }
    below = int(deviation(kept, bound, chance, CALLS) < -ERRORS)
    below += int((chance < sharp - 1e-9).sum() + (sharp < bound - 1e-9).sum())
    return {
        "shortlist": name,
        "contexts": len(kept),
        **{key: float(values.mean()) for key, values in means.items()},
        "below_bound": below,
        "z": deviation(kept, chance, chance, CALLS),
        "coupled_z": deviation(together, together_chance, together_chance, COUPLED_DRAWS),
    }

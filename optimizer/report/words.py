"""What a tuning found, in words: of its results as ``tune --json`` prints them, without a model."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spectune.traces.schema import Sampling

Json = Mapping[str, Any]
WIDTH = 78
"""Characters of a line of text on a terminal of 80."""
LATENCIES = {
    "time_to_first_token_s": "time to first token",
    "time_per_output_token_s": "time per output token",
}
"""What a user waits for, in words."""
EVIDENCE: Final = "tuning"
"""The kind of artifact that keeps what a tuning's page draws (:mod:`optimizer.report.evidence`)."""
STOPS = {
    "max_prob": "its next token is unsure",
    "joint_prob": "the draft as a whole is unsure",
    "entropy": "its distribution is wide",
}


COUPLED_COSTS_CHAINS: Final = (4, 31)
"""Percent of a chain's speed that the verifier `coupled` costs against `rejection` at temperature 1
on the demo pair, smallest and largest over workloads (`bench/results/acceptance-sampled.json`)."""


def verifier_in_words() -> str:
    """What the default verifier costs above temperature 0."""
    low, high = COUPLED_COSTS_CHAINS
    return (
        "above temperature 0 the default verifier (coupled) makes chains slower than --verifier "
        f"rejection does: by {low} to {high}% at temperature 1 on the demo pair; trees and heads "
        "need coupled"
    )


def policy_in_words(document: Json) -> str:
    """What a policy (its spelled-out document) does, e.g. ``small drafts 4 tokens a round``."""
    draft = document.get("draft", "none")
    if by_prompt := document.get("by_prompt"):
        each = [{**document, "by_prompt": None}, *by_prompt["others"]]
        return f"for each prompt one of: {'; '.join(map(policy_in_words, each))}"
    window = document.get("window", {})
    fixed = window.get("kind") == "fixed"
    if window.get("kind") == "by_batch":
        depth = max(window["gamma"].values())
    else:
        depth = window.get("gamma" if fixed else "gamma_max", 0)
    if draft == "none":
        return "no draft, one token a round"
    if depth == 0:
        return f"no draft, one token a round ({draft} stays loaded)"
    who = "prompt lookup (ngram)" if draft == "ngram" else str(draft)
    growth = document.get("growth", {}).get("kind", "chain")
    if growth == "chain":
        what = f"{'' if fixed else 'up to '}{depth} token{'s' * (depth > 1)} a round"
    else:
        kind = {"top_k": "EAGLE-2 ", "classifier": "C2T ", "static": "static "}.get(growth, "")
        kept = document.get("select", {}).get("top_n")
        what = f"{kind}trees of {'' if fixed else 'up to '}{depth} levels" + (
            f", {kept} nodes verified" if kept else ""
        )
    more = "" if fixed else f", as its window ({window.get('kind')}) says"
    if stop := STOPS.get(document.get("stop", {}).get("kind", "none")):
        more += f", and stops where {stop}"
    shortlist = document.get("shortlist", {})
    if shortlist.get("kind", "full") != "full":
        size = shortlist.get("size") or shortlist.get("k_max")
        more += f", over a shortlist of {size} tokens" if size else ", over a shortlist by clusters"
    return f"{who} drafts {what}{more}"


def speculates(document: Json) -> bool:
    """Whether a policy drafts at all."""
    return not policy_in_words(document).startswith(policy_in_words({}))


def sampling_in_words(sampling: Sampling) -> str:
    """How tokens are drawn, e.g. ``temperature 0.7, top-p 0.9, seed 0``."""
    s = sampling
    top_k = f", top-k {s.top_k}" if s.top_k else ""
    top_p = f", top-p {s.top_p:g}" if s.top_p < 1 else ""
    return "greedy" if s.greedy else f"temperature {s.temperature:g}{top_k}{top_p}, seed {s.seed}"


@dataclass(frozen=True)
class Finding:
    """What to do by a tuning's results (``tune --json``). ``deploys``: the winner is faster than
    ``against`` by ``ratio`` (estimate, lower and upper end, None where unknown); else what was in
    force is to be kept. ``level``: of the interval."""

    deploys: bool
    name: str
    ratio: tuple[float, float | None, float | None]
    against: str
    tokens_per_s: float
    requests: int
    level: float = 0.95


def finding(tuned: Json) -> Finding:
    """Reads the results of a tuning."""
    winner, incumbent = tuned["winner"], tuned["baselines"]["incumbent"]
    had = speculates(incumbent["policy"])
    return Finding(
        deploys=winner["id"] != incumbent["id"],
        name=policy_in_words(winner["policy"]),
        ratio=tuned["ratio_to_incumbent"],
        against=f"what was in force ({incumbent['label']})" if had else "decoding without a draft",
        tokens_per_s=tuned["measured"]["tokens_per_s"],
        requests=tuned.get("confirm_requests") or tuned["test_requests"],
        level=(tuned.get("confirmed") or {}).get("level", 0.95),
    )


def interval(low: float | None, high: float | None, digits: int = 2, level: float = 0.95) -> str:
    """`` (95% interval 1.34 to 1.70)``; empty where an end is not known."""
    if low is None or high is None or low <= 0:
        return ""
    return f" ({100 * level:.0f}% interval {low:.{digits}f} to {high:.{digits}f})"


def outcome_in_words(tuned: Json) -> str:
    """How fast what is to be in force is, against what; or why nothing takes its place."""
    found, confirmed = finding(tuned), tuned.get("confirmed")  # earlier tunings have none
    if found.deploys:
        ratio, low, high = found.ratio
        said = f"It decodes {ratio:.2f} times as fast as {found.against}"
        said += interval(low, high, level=found.level)
        if confirmed:
            return f"{said} on {found.requests} requests held out to confirm it."
        speed = f"{found.tokens_per_s:.0f} tokens/s on {found.requests} requests"
        return f"{said}: {speed} that the search has not seen."
    others = [c for c in tuned["candidates"] if c["id"] != tuned["winner"]["id"]]
    if not others:
        return "Nothing else was executed."
    if confirmed:
        label = next(c["label"] for c in tuned["candidates"] if c["id"] == confirmed["id"])
        ratio, (low, high) = confirmed["ratio"], confirmed["interval"]
        first = "Nothing executed takes its place"
        last = f" on {confirmed['requests']} requests held out to confirm it{_against(confirmed)}"
    else:
        best = max(others, key=lambda c: c["ratio_to_incumbent"])
        label, ratio = best["label"], best["ratio_to_incumbent"]
        low, high = best["ratio_interval"]
        first, last = "Nothing executed is faster beyond noise", ""
    return (
        f"{first}; the best of the others, {label}, "
        f"decodes {ratio:.2f} times as fast{interval(low, high, level=found.level)}{last}."
    )


def _against(confirmed: Json) -> str:
    """What speaks against what was confirmed; earlier tunings do not say."""
    return f": {confirmed['against']}" if confirmed.get("against") else ""


def prediction_in_words(prediction: Json | None) -> str:
    """How far a tuning's predictions were off (``prediction`` of ``tune --json``), as made, and
    after the factor that is fitted to the same executions."""
    if prediction is None:
        return "Nothing was predicted"
    off, after = (100 * prediction[f"median_error{key}"] for key in ("", "_after_factor"))
    count = prediction["policies"]
    return (
        f"Predicted speeds were off by {off:.1f}% in the median of {count} "
        f"polic{'y' if count == 1 else 'ies'}; after one common factor fitted to these executions "
        f"({prediction['common_factor']:.3f}), by {after:.1f}%"
    )


def closing(tuned: Json, where: str, commands: Iterable[tuple[str, str]]) -> str:
    """The last lines of ``tune``: what was published, ``where``, how much faster than what, and
    what to type next: (command, what it shows) of each. At most 80 columns, commands excepted."""
    found, published = finding(tuned), tuned["published"]
    if published:
        first = (
            f"Published {where}, as version {published['version']}: {found.name} (`policies "
            "deployments` shows who applied it)."
        )
    elif found.deploys and tuned.get("refused"):
        first = f"Nothing was published: {tuned['refused']}. The winner: {found.name}."
    elif found.deploys and tuned.get("superseded_by"):
        first = f"Nothing was published: {tuned['reason']}. The winner: {found.name}."
    elif found.deploys:
        first = f"Nothing was published, as asked. The winner {where}: {found.name}."
    else:
        first = f"Nothing changes {where}: {found.name}."
    text = textwrap.fill(
        f"{first} {outcome_in_words(tuned)}", WIDTH, break_long_words=False, break_on_hyphens=False
    )
    lines = [
        textwrap.fill(f"# {what}", WIDTH, subsequent_indent="# ") + f"\n{command}"
        for command, what in commands
    ]
    return "\n".join(["", text, "", *lines])


def savings(tuned: Json, device: str, *, gpus: int = 1, price: float | None = None) -> list[str]:
    """What deploying the winner saves where requests are decoded one at a time, as they were when
    it was measured, a clause each: device hours per million tokens, device hours a day of ``gpus``
    devices that are busy all day, and at a ``price`` of an hour money. Empty where nothing is to be
    deployed."""
    found = finding(tuned)
    if not found.deploys:
        return []
    hours = "GPU hours" if device.startswith("cuda") else "machine hours"

    def amount(of: Callable[[float], float], unit: str, digits: int = 2, price: float = 1) -> str:
        ratio, low, high = found.ratio
        ends = ""
        if low is not None and high is not None and low > 0:  # stored studies may know no lower end
            ends = interval(price * of(low), price * of(high), digits, found.level)
        return f"{price * of(ratio):.{digits}f} {unit}{ends}"

    def a_million(ratio: float) -> float:
        return 1e6 / 3600 / max(1e-9, found.tokens_per_s) * (ratio - 1)

    def a_day(ratio: float) -> float:
        return 24 * gpus * (1 - 1 / ratio)

    said = [
        f"it saves {amount(a_million, f'{hours} per million tokens')} where requests "
        "are decoded one at a time",
        f"Of {gpus} such device{'s' if gpus > 1 else ''} busy all day, one request at a time each, "
        f"it saves {amount(a_day, f'{hours} a day', 1)}.",
    ]
    if price is not None:
        million = amount(a_million, "per million tokens", price=price)
        day = amount(a_day, "a day", price=price)
        said.append(f"At {price:g} an hour that is {million}, or {day}.")
    said.append(
        "Many requests at once may lose by speculating: `tune --arrivals` measures an engine under "
        "your load."
    )
    return said


def verdict_in_words(tuned: Json, device: str, *, gpus: int = 1, price: float | None = None) -> str:
    """One sentence: what to deploy and what that saves, or what to keep and why."""
    found, confirmed = finding(tuned), tuned.get("confirmed")
    if found.deploys:
        return f"Deploy this: {found.name}; {savings(tuned, device, gpus=gpus, price=price)[0]}."
    why = "nothing executed is faster beyond noise"
    if confirmed:
        why = f"nothing executed takes its place{_against(confirmed)}"
    if not speculates(tuned["winner"]["policy"]):
        return f"Decode without a draft: {why}."
    return f"Keep what you have: {found.name}; {why}."

"""What a tuning found, in sentences and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spectune.optimizer.report.names import short_name
from spectune.optimizer.tuning.confirmation import Confirmation
from spectune.optimizer.tuning.tuned import (
    AS_FAST,
    PredictionErrors,
    RejectionNotTried,
    Tuned,
    is_finalist,
)
from spectune.traces.schema import Sampling

Json = Mapping[str, Any]
TERMINAL_WIDTH = 78
LATENCIES = {
    "time_to_first_token_s": "time to first token",
    "time_per_output_token_s": "time per output token",
}
STOPS = {
    "max_prob": "its next token is unsure",
    "joint_prob": "the draft as a whole is unsure",
    "entropy": "its distribution is wide",
}
TREES = {"top_k": "EAGLE-2 trees", "classifier": "C2T trees", "static": "static trees"}


def counted(number: int, unit: str) -> str:
    """A number of units, whose name is in the plural."""
    return f"{number} {unit.removesuffix('s') if number == 1 else unit}"


def policy_in_words(document: Json) -> str:
    """What a policy (its spelled-out document) does, e.g. ``small drafts 4 tokens a round``."""
    if by_load := document.get("by_load"):
        entries = (f"from {n} requests on {policy_in_words(p)}" for n, p in by_load.items())
        return f"by the number of running requests: {'; '.join(entries)}"
    draft = document.get("draft", "none")
    if by_prompt := document.get("by_prompt"):
        each = [{**document, "by_prompt": None}, *by_prompt["others"]]
        return f"for each prompt one of: {'; '.join(map(policy_in_words, each))}"
    window = document.get("window", {})
    fixed = window.get("kind") == "fixed"
    if window.get("kind") == "by_load":
        tables = (window["gamma"], *window["contexts"].values())
        depth = max(max(table.values()) for table in tables)
    else:
        depth = window.get("gamma" if fixed else "gamma_max", 0)
    if draft == "none" or depth == 0:
        return "no draft, one token a round" + f" ({draft} stays loaded)" * bool(draft != "none")
    growth, up_to = document.get("growth", {}).get("kind", "chain"), "" if fixed else "up to "
    text = "prompt lookup (ngram)" if draft == "ngram" else str(draft)
    if growth == "chain":
        text += f" drafts {up_to}{depth} token{'s' * (depth > 1)} a round"
    else:
        text += f" drafts {TREES.get(growth, 'trees')} of {up_to}{depth} levels"
        if nodes := document.get("select", {}).get("top_n"):
            text += f", {nodes} nodes verified"
    if not fixed:
        text += f", as its window ({window.get('kind')}) says"
    if stop := STOPS.get(document.get("stop", {}).get("kind", "none")):
        text += f", and stops where {stop}"
    shortlist = document.get("shortlist", {})
    if shortlist.get("kind", "full") != "full":
        size = shortlist.get("size") or shortlist.get("k_max")
        text += f", over a shortlist {f'of {size} tokens' if size else 'by clusters'}"
    return text


def sampling_in_words(sampling: Sampling) -> str:
    """How tokens are drawn, e.g. ``temperature 0.7, top-p 0.9, seed 0``."""
    s = sampling
    top_k = f", top-k {s.top_k}" if s.top_k else ""
    top_p = f", top-p {s.top_p:g}" if s.top_p < 1 else ""
    return "greedy" if s.greedy else f"temperature {s.temperature:g}{top_k}{top_p}, seed {s.seed}"


def names_of(tuned: Tuned) -> dict[str, str]:
    """How each executed policy is named, by its id: by its short name, and by the first digits of
    its id too where another has the same."""
    names = {c.id: short_name(c.policy) for c in tuned.candidates}
    shared = [name for name in names.values() if [*names.values()].count(name) > 1]
    return {i: name + f" [{i[:6]}]" * (name in shared) for i, name in names.items()}


def titles_of(tuned: Tuned) -> dict[str, str]:
    """What tables and charts call each executed policy, by its id: its roles but for ``finalist``,
    and its name, e.g. ``winner: small K=4``; what nothing was proved to beat is no
    winner, but ``kept``."""
    titles, first = {}, "winner" if tuned.deploys else "kept"
    for policy, name in names_of(tuned).items():
        roles = [first] * (policy == tuned.winner.id)
        roles += [c.role for c in tuned.candidates if c.id == policy]
        text = ", ".join(role for role in roles if not is_finalist(role))
        titles[policy] = text if name in roles else f"{text}: {name}" if text else name
    return titles


def series_of(tuned: Tuned) -> dict[str, str]:
    """The titles of winner, incumbent and autoregression, each once, the winner first."""
    titles = titles_of(tuned)
    shown = (tuned.winner, tuned.incumbent, tuned.baselines["autoregressive"])
    return {policy.id: titles[policy.id] for policy in shown}


def latency_table(tuned: Tuned) -> PolicyTable:
    """What a user waits for under the winner, the incumbent and autoregression, in milliseconds."""
    rows = []
    for key, latency in LATENCIES.items():
        for policy, name in series_of(tuned).items():
            times = (tuned.policies[policy].latency or {}).get(key)
            ms = (f"{1e3 * times[q]:.1f}" if times else None for q in ("p50", "p95", "p99"))
            rows.append((latency, name, *ms))
    return PolicyTable(("", "policy", "p50", "p95", "p99"), rows, words=2)


@dataclass(frozen=True)
class PolicyTable:
    """Rows under ``columns``, of which the first ``words`` hold text; ``winner``: its row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float | None]]
    words: int = 1
    winner: int | None = None


def executed_table(tuned: Tuned) -> PolicyTable:
    """The policies that a tuning executed, fastest first by what tells policies apart that were not
    executed on the same requests: the speed over the race's leader, projected to the workload."""
    titles, has_factor = titles_of(tuned), has_common_factor(tuned)
    ordered = sorted(tuned.policies.values(), key=lambda c: -c.ratio_to_leader)
    rows = []
    for c in ordered:
        predicted, measured = c.predicted_tokens_per_s, c.measured_tokens_per_s
        error = "-"
        if predicted and measured:
            error = f"{100 * (predicted / measured - 1):+.1f}%"
            if c.predicted_after_factor_tokens_per_s is not None:
                after = c.predicted_after_factor_tokens_per_s / measured - 1
                error += f" ({100 * after:+.1f}%)"
        low, high = c.ratio_to_leader_interval
        ends = "" if low is None or high is None or low == high else f" ({low:.3f}-{high:.3f})"
        rows.append(
            (
                titles[c.id],
                f"{c.mean_accepted_length:.2f}",
                "-" if predicted is None else f"{predicted:.1f}",
                f"{measured:.1f}",
                error,
                f"{c.executed_requests} of {tuned.test_requests}",
                f"{c.ratio_to_incumbent:.3f}",
                f"{c.ratio_to_leader:.3f}{ends}",
            )
        )
    error = "error (after factor)" if has_factor else "error"
    columns = ("policy", "tau", "predicted", "measured tokens/s", error)
    place = [c.id for c in ordered].index(tuned.winner.id)
    return PolicyTable(
        (*columns, tuned.unit, "vs incumbent", "vs leader (95%)"), rows, winner=place
    )


def has_common_factor(tuned: Tuned) -> bool:
    """Whether one common factor brings predicted speeds nearer to those executed."""
    return tuned.prediction is not None and tuned.prediction.common_factor is not None


def interval(ends: Sequence[float | None], level: float = 0.95, digits: int = 2) -> str:
    """`` (95% interval 1.34 to 1.70)``; empty where an end is not known."""
    low, high = ends
    if not low or high is None:
        return ""
    return f" ({100 * level:.0f}% interval {low:.{digits}f} to {high:.{digits}f})"


def headline(tuned: Tuned) -> str:
    """What was published, or is to be deployed, and how much better it is; or that nothing was
    changed."""
    if not tuned.deploys:
        return "No faster policy was confirmed; nothing was changed"
    name, drafts = names_of(tuned)[tuned.winner.id], tuned.incumbent.policy.speculates
    against = names_of(tuned)[tuned.incumbent.id] if drafts else "decoding without a draft"
    first = f"{name} is published" if tuned.published else f"Deploy {name}"
    return f"{first}: {tuned.ratio_to_incumbent[0]:.2f} {tuned.gain} {against}"


def confirmed_in_words(
    confirmed: Confirmation, winner: str, incumbent: str, gain: str = AS_FAST
) -> str:
    """What a confirmation showed of two policies, by label. ``gain``: one of
    :data:`optimizer.tuning.tuned.GAINS`."""
    ends = interval(confirmed.interval, confirmed.level, 3)
    sentence = (
        f"{winner} was {confirmed.ratio:.3f} {gain} {incumbent}{ends} on "
        f"{counted(confirmed.requests, confirmed.unit)} held out to confirm it"
    )
    return ": ".join(filter(None, (sentence, confirmed.against)))


def rejection_in_words(tuned: Tuned) -> list[str]:
    """What the best chain of the verifier `rejection` came to, a sentence; none where it says
    nothing."""
    chain = tuned.rejection
    if chain is None:
        return []
    if isinstance(chain, RejectionNotTried):
        return [f"sampling.verifier=rejection was not tried: {chain.not_tried}."]
    beside, expected = chain.beside, chain.predicted_ratio
    is_winner = beside.id == tuned.winner.id
    base = "the winner" if is_winner else f"{beside.label}, which won the race"
    executed = f"executed {chain.executed_ratio:.2f}"
    times = f"times as fast as {base}"
    both = f"predicted {expected:.2f} {times}, {executed}" if expected else f"{executed} {times}"
    return [
        f"With sampling.verifier=rejection the best chain is {chain.label}: {both}"
        f"{interval(chain.executed_interval)} on {chain.requests} requests; its texts are "
        "others of the same distribution."
    ]


def reasons(tuned: Tuned) -> list[str]:
    """On what the headline rests, and what speaks against it, a sentence each."""
    names = names_of(tuned)
    raced = (tuned.confirmed or tuned.winner).id
    in_race = {c.id: c.ratio_to_leader for c in tuned.candidates if c.left_in_race}
    leader = max(in_race, key=in_race.__getitem__, default=raced)
    sentences = [f"{tuned.reason}."]
    if earlier := tuned.earlier_confirmations:
        sentences.append(
            f"What was held out had confirmed policies {earlier} time{'s' * (earlier > 1)} before: "
            "each time it says less, and other requests say more."
        )
    if leader != raced and in_race[leader] > in_race.get(raced, 0.0) > 0.0:
        ahead = 100 * (in_race[leader] / in_race[raced] - 1)
        sentences.append(
            f"{names[leader]} was {ahead:.1f}% ahead in the race, as projected to all of its "
            f"{tuned.unit}, within noise: of equals the simpler wins, then the one predicted to "
            "be faster."
        )
    doubts = [f"Beware: {line}." for line in tuned.workload.lines()]
    return [*sentences, *rejection_in_words(tuned), *doubts]


DRIFT: Final = 0.15
"""How far two probes of a machine may be apart."""


def drift_in_words(probes: Sequence[float]) -> list[str]:
    """A sentence where the machine's speed changed while a tuning measured; none where it did
    not."""
    if not probes or max(probes) <= (1 + DRIFT) * min(probes):
        return []
    apart = 100 * (max(probes) / min(probes) - 1)
    return [
        "The machine's speed changed between profile, race and confirmation: the same work took up "
        f"to {apart:.0f}% longer at one time than at another. End what else runs on it, or wait, "
        "and tune again; policies took turns, so their ratios suffer less than tokens/s."
    ]


def prediction_in_words(prediction: PredictionErrors | None) -> str:
    """How far a tuning's predictions were off, as made, and after the factor that is fitted to the
    same executions, where that helps."""
    if prediction is None:
        return "Nothing was predicted"
    count, after = prediction.policies, prediction.median_error_after_factor
    off = (
        f"Predicted speeds were off by {100 * prediction.median_error:.1f}% in the median of "
        f"{count} polic{'y' if count == 1 else 'ies'}"
    )
    if after is None:
        return off
    return (
        f"{off}; after one common factor fitted to these executions "
        f"({prediction.common_factor:.3f}), by {100 * after:.1f}%"
    )


def closing(tuned: Tuned, where: str, commands: Iterable[tuple[str, str]]) -> str:
    """The last lines of ``tune``: what was published, ``where``, how much faster than what, and
    what to type next: (command, what it shows) of each. At most 80 columns, commands excepted."""
    winner = tuned.winner
    name = f"{names_of(tuned)[winner.id]} ({policy_in_words(winner.policy.spelled_out())})"
    if published := tuned.published:
        first = f"Published {where}, as version {published.version}: {name}."
    elif tuned.deploys:
        why = f": {tuned.blocked}" if tuned.blocked else ""
        first = f"Nothing was published{why}. Winner {where}: {name}."
    else:
        first = f"No faster policy was confirmed. Nothing changes {where}: {name}."
    drift = [line for text in drift_in_words(tuned.probes_s) for line in ("", _filled(text))]
    lines = [*drift, "", _filled(" ".join([first, *reasons(tuned)])), ""]
    for command, purpose in commands:
        lines += [_filled(f"# {purpose}", subsequent_indent="# "), command]
    return "\n".join(lines)


def _filled(text: str, **more: Any) -> str:
    return textwrap.fill(
        text, TERMINAL_WIDTH, break_long_words=False, break_on_hyphens=False, **more
    )


def savings(
    tuned: Tuned, device: str, *, gpus: int = 1, price: float | None = None, load: str = ""
) -> list[str]:
    """What deploying the winner saves, a sentence each, under the ``load`` it was measured under
    (empty: one request at a time): device hours per million tokens and a day of ``gpus`` busy
    devices, and at a ``price`` an hour money. Empty where nothing is to be deployed, or nothing
    saved: the same work is not done in less time."""
    confirmed, ratios = tuned.confirmed, tuned.ratio_to_incumbent
    if not tuned.deploys or tuned.gain != AS_FAST or confirmed is None or None in ratios:
        return []
    million_h = 1e6 / 3600 / max(1e-9, tuned.measured["tokens_per_s"])
    per_million = [million_h * (ratio - 1) for ratio in ratios if ratio]
    per_day = [24 * gpus * (1 - 1 / ratio) for ratio in ratios if ratio]

    def amount(values: Sequence[float], digits: int, price: float = 1.0) -> str:
        value, *ends = (price * v for v in values)
        return f"{value:.{digits}f}{interval(ends, confirmed.level, digits)}"

    hours = "GPU hours" if device.startswith("cuda") else "machine hours"
    under = f"under {load}" if load else "when decoding one request at a time"
    sentences = [
        f"Saved {under}: {amount(per_million, 2)} {hours} per million tokens; with "
        f"{gpus} busy device{'s' * (gpus > 1)}, {amount(per_day, 1)} {hours} a day."
    ]
    if price is not None:
        sentences.append(
            f"At {price:g} an hour: {amount(per_million, 2, price)} per million tokens, "
            f"{amount(per_day, 2, price)} a day."
        )
    if not load:
        sentences.append(
            "With many requests at once speculation may be slower: `tune --arrivals` measures "
            "an engine under your load."
        )
    return sentences

"""A page for each paper: verdicts in words, tables of its figures and ours, causes as notes. Called
by `python bench/report.py`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from bench.labels import short
from bench.markdown import table
from bench.papers.claims import CERTAIN, CLAIMS, NOT_COMPARABLE, verdict
from bench.verdicts import AGREES, MET, NOT_MET, NOT_SHOWN

Figures = dict[str, Any]
DRAFTS = ("small", "medium", "head")
KINDS: Final = {
    MET: "met", AGREES: "agree", NOT_SHOWN: "not shown", NOT_MET: "not met", CERTAIN: "certain"
}  # fmt: skip
"""Verdicts, and how several are counted."""
JUDGED: Final = (MET, AGREES, NOT_SHOWN, NOT_MET)


class Paper(NamedTuple):
    """A paper's title, the claims that its first lines sum up: (what they are, keys of
    :data:`papers.claims.CLAIMS`), and what says of its rows what holds, and why not the rest."""

    title: str
    groups: Mapping[str, Sequence[str]]
    answer: Callable[[Sequence[Figures]], str] = lambda rows: ""


def of_claim(rows: Iterable[Figures], claim: str, place: str = "") -> list[Figures]:
    """The rows of a claim whose cell names a place."""
    return [row for row in rows if row["claim"] == claim and place in row["cell"]]


def _ends(rows: Iterable[Figures], decimals: int = 3) -> str:
    """Smallest and largest of our figures."""
    values = [row["ours"][0] for row in rows]
    return " to ".join(dict.fromkeys(f"{end:.{decimals}f}" for end in (min(values), max(values))))


def _told(rows: Iterable[Figures], pattern: str, decimals: int = 0) -> str:
    """Smallest and largest number that a pattern finds in the causes of rows."""
    found = [float(hit[1]) for row in rows if (hit := re.search(pattern, row["why"]))]
    return " to ".join(dict.fromkeys(f"{end:.{decimals}f}" for end in (min(found), max(found))))


DEEPENED = r"(\d+)% of \d+ fitted rounds in the three low bins"
FULLY = r"(\d+)% of these fully accepted"


def _heterospec(rows: Sequence[Figures]) -> str:
    shallow, deep = (of_claim(rows, "tau", f"depth {depth}") for depth in (5, 8))
    against, tokens = of_claim(rows, "adaedl"), of_claim(rows, "tokens")
    agree, beaten = (
        sum(verdict(row) in (MET, AGREES) for row in some) for some in (tokens, against)
    )
    edge = sum("after one level" in row["why"] for row in against)
    at_70b, at_cpu = (_ends(of_claim(rows, "adaedl tuned", cost)) for cost in ("70b", "cpu"))
    return (
        f"What holds: pruning keeps {_ends(of_claim(rows, 'kept'))} of tau; verified tokens fall "
        f"as in the paper in {agree} of {len(tokens)} figures. Why not the rest: entropy picks few "
        f"rounds to deepen, {_told(shallow, DEEPENED)}% at depth 5 and {_told(deep, DEEPENED)}% at "
        f"depth 8; of these {_told(shallow, FULLY)}% and {_told(deep, FULLY)}% are accepted whole. "
        f"AdaEDL, tuned, is beaten as in the paper in {beaten} of {len(against)} figures: it has "
        f"{at_70b} of EAGLE-2's speed at `70b`, {at_cpu} at `cpu` ({edge} times after one level)."
    )


def auc(rows: Sequence[Figures], claim: str) -> str:
    """Of a classifier, and of joint probability, smallest to largest."""
    some = of_claim(rows, claim)
    of = "AUC ([0-9.]+[0-9])", "by joint probability ([0-9.]+[0-9])"
    return " for ".join(_told(some, pattern, 2) for pattern in of)


def _c2t(rows: Sequence[Figures]) -> str:
    return (
        "What holds: greedy trees need fewer verified tokens (but not on Gemma's head), by a "
        "classifier that reads log joint probability. By the paper's three features alone they are "
        f"{_ends(of_claim(rows, 'three'), 2)} of EAGLE-2's. Ours ranks nodes "
        f"better than joint probability: AUC {auc(rows, 'nodes')} greedy, {auc(rows, 'nodes 1')} "
        "at temperature 1. Little is speed: where a pass reads weights, verified tokens are almost "
        f"free (`70b`, {_ends(of_claim(rows, 'tuned', '70b'))})."
    )


def _dynaspec(rows: Sequence[Figures]) -> str:
    routed = of_claim(rows, "routed")
    wide = [row for row in routed if "wide" in row["cell"]]
    demo = [row for row in routed if "wide" not in row["cell"]]
    executed = ", ".join(
        f"{row['cell'].split(', ')[1]} {row['ours'][0]:.2f}" for row in of_claim(rows, "executed")
    )
    return (
        f"What holds: {_ends(of_claim(rows, 'share'), 2)} of the vocabulary keep tau. Executed, "
        f"that is slower, as a head of 4,096 tokens costs too little to save ({executed} of the "
        f"whole head's speed). Over FR-Spec a router has {_ends(demo)} of its tau here, and "
        f"{_ends(wide)} on the pair `wide`, where FR-Spec's list holds "
        f"{_told(wide, 'FR-Spec.s first choice in it ([0-9.]+)%', 1)}% of first choices."
    )


def _on_the_fly(rows: Sequence[Figures]) -> str:
    tuned = {row["cell"]: row for row in rows if row["claim"] in ("tuned", "tuned 1")}
    most = max(of_claim(rows, "window"), key=lambda row: float(row["ours"][0]))
    beyond = [row for row in tuned.values() if verdict(row) == MET]
    late = sum("tokens 48 to 256" in row["cell"] for row in beyond)
    return (
        f"Windows hardly adapt: the best constant is beaten in {len(beyond)} of {len(tuned)} "
        f"figures ({late} after 48 tokens). The constant 5 is beaten by a better length: where by "
        f"most, {most['ours'][0]:.3f}, the best constant is not "
        f"({tuned[most['cell']]['ours'][0]:.3f}). The best window of each "
        "request, known beforehand, would gain "
        f"{_told(tuned.values(), 'known beforehand, gains ([0-9.]+)%', 1)}%."
    )


def _joint(rows: Sequence[Figures]) -> str:
    every = of_claim(rows, "together")
    faster = [row for row in every if row["ours"][1] > 1]
    slower = [row for row in every if row["ours"][2] < 1]
    gain, loss = (f" ({_ends(some)})" if some else "" for some in (faster, slower))
    return (
        f"Two together beat the best alone beyond noise in {len(faster)} of {len(every)} figures"
        f"{gain}, and are slower in {len(slower)}{loss}."
    )


EXECUTED = {"Executed": ("executed",)}
PAPERS: Final = {
    "heterospec": Paper(
        "HeteroSpec",
        {
            "Tau over EAGLE-2's": ("tau", "tau 1"),
            "Speed at the paper's settings": ("speed", "speed 1"),
            "Speed, both tuned": ("tuned",),
            **EXECUTED,
        },
        _heterospec,
    ),
    "c2t": Paper(
        "C2T",
        {
            "Verified tokens at EAGLE-2's tau": ("nodes",),
            "Trained on another draft or other texts": ("transfer", "texts"),
            "Speed, both tuned": ("tuned",),
            **EXECUTED,
        },
        _c2t,
    ),
    "dynaspec": Paper(
        "DynaSpec",
        {
            "Tau kept with a shortlist": ("full",),
            "Tau over FR-Spec's at as many tokens": ("routed",),
            "Tau with fewer clusters at later steps": ("decayed",),
            **EXECUTED,
        },
        _dynaspec,
    ),
    "on_the_fly": Paper(
        "On-the-fly adaptation",
        {
            "Speed over the constant 5": ("window", "window 1"),
            "Speed, both tuned": ("tuned",),
            "A draft for each prompt": ("choice",),
            **EXECUTED,
        },
        _on_the_fly,
    ),
    "verifier": Paper(
        "The verifier, and our own score",
        {
            "Tau of chains by `coupled` over `rejection`": ("coupled",),
            "Speed of the best `coupled` policy over the best by `rejection`": ("verified",),
            "Verified tokens at EAGLE-2's tau, our score": ("sharp",),
            **EXECUTED,
        },
    ),
    "joint": Paper(
        "All of them together",
        {
            "Mechanisms together over the best alone": ("together",),
            "What the search chooses over the best of 120 in hindsight": ("regret",),
            "What it chooses over the fastest of 16, executed": ("regret executed",),
        },
        _joint,
    ),
}
ABOUT = (
    "By replay of requests that no fit and no choice of a baseline has seen: rounds are exact, "
    "intervals (95%) are over requests, without the error of costs. Ratios; below 1 is a "
    "loss, of verified tokens and seconds a gain. Costs: `cpu`, two CPU cores; `h200`, rounds of a "
    "pair ballasted to 8B; `70b`, a 70B target; these two charge nothing for entropies, "
    "classifiers and routers. At temperature 1 windows and drafts by prompt are verified by "
    "rejection, all else by `coupled` unless it says otherwise. *Met*: the unfavourable end of "
    "our interval reaches the smallest gain of the paper's table; of what was executed, replay's "
    "figure lies inside its interval. *Agrees*: the interval reaches into the paper's range and "
    "excludes that nothing is gained. *Certain*: no request changes it. What is done otherwise: "
    "[the papers](../papers.md)."
)


APART = "Ours alone, or without a figure of the paper: no verdict."

IN_TURN = "dealt in turn, so modules, documents and templates are in both"
"""How the requests of older parts were dealt, as their samples say it."""


def rows_of(figures: Figures, paper: str) -> list[Figures]:
    """The rows of all parts of a paper."""
    names = [name for name in figures if name == paper or name.startswith(f"{paper}_")]
    return [row for name in names for row in figures[name]["rows"]]


def page(
    figures: Figures, made: Figures, paper: str, first: Sequence[str] = (), on_map: str = ""
) -> str:
    """The page of a paper; ``first``: lines before its tables, which are then the demo pair's;
    ``on_map``: where the map has it."""
    rows = rows_of(figures, paper)
    notes: dict[str, int] = {}
    lines = [f"# {PAPERS[paper].title}", "", *verdicts(paper, rows, on_map), "", *first]
    lines += ["## On the demo pair", ""] if first else []
    apart = [row for row in rows if verdict(row) == NOT_COMPARABLE and row["claim"] != "saturation"]
    lines += _tables([row for row in rows if verdict(row) != NOT_COMPARABLE], notes)
    if apart:
        lines += ["## Held against nothing", "", APART, "", *_tables(apart, notes)]
    if notes:
        lines += ["Notes:", "", *(f"{number}. {why}" for why, number in notes.items()), ""]
    parts = [name for name in figures if name == paper or name.startswith(f"{paper}_")]
    costs = {cost: source for name in parts for cost, source in figures[name]["costs"].items()}
    told = []
    for name in parts:
        part, of = figures[name], made[name]
        cpu = [f"`cpu` was {part['costs']['cpu']}"] if "cpu" in part["costs"] else []
        cpu = [words.removesuffix(", when is not kept") for words in cpu]
        samples = [sample.replace(IN_TURN, "dealt in turn") for sample in part["samples"]]
        about = "; ".join((f"{of['measured']}, code of {of['code']}", *samples, *cpu))
        told.append(f"- `python {part['command']}`: {about}")
    told += [f"- costs `{cost}`: {source}" for cost, source in costs.items() if cost != "cpu"]
    if any(IN_TURN in sample for name in parts for sample in figures[name]["samples"]):
        told.append(f"- {IN_TURN}")
    lines += ["## How it was measured", "", ABOUT, "", *told, ""]
    return "\n".join(lines)


def _tables(rows: Sequence[Figures], notes: dict[str, int]) -> list[str]:
    """The rows of drafts beside each other, then those of none; new causes go to ``notes``."""
    groups = _groups(rows)
    by_draft = {key: group for key, group in groups.items() if "" not in group}
    alone = {key: group for key, group in groups.items() if "" in group}
    drafts = [draft for draft in DRAFTS if any(draft in group for group in by_draft.values())]
    lines = []
    if by_draft:
        told = [_row(key, group, drafts, notes) for key, group in by_draft.items()]
        lines += _table(drafts, told)
    if alone:
        lines += _table(["ours"], [_row(key, group, [""], notes) for key, group in alone.items()])
    return lines


def is_claimed(row: Figures) -> bool:
    """Whether a figure is held against what is claimed: what is executed is held against replay."""
    return verdict(row) != NOT_COMPARABLE and row["claim"] != "executed"


def verdicts(paper: str, rows: Sequence[Figures], on_map: str = "") -> list[str]:
    """At most five lines: how many verdicts there are, what holds and why not the rest, and each
    group of claims."""
    held = [row for row in rows if is_claimed(row)]
    first = f"- **{_word(held)}**: {_counts(held)}. {PAPERS[paper].answer(rows)} {on_map}"
    lines = [first.rstrip()]
    for title, claims in PAPERS[paper].groups.items():
        group = [row for row in rows if row["claim"] in claims]
        if claims == ("executed",):
            inside = sum(verdict(row) == MET for row in group)
            lines.append(f"- {title}: ours {_ends(group)}; replay's figure lies inside the "
                         f"interval in {inside} of {len(group)} policies.")  # fmt: skip
            continue
        values = [row["ours"][0] for row in group if row["ours"][0] is not None]
        said = dict.fromkeys(CLAIMS[claim].figure for claim in claims)
        theirs = "; ".join(figure for figure in said if figure != "none")
        of_paper = f"the paper {theirs}; " if theirs else ""
        judged = [row for row in group if verdict(row) != NOT_COMPARABLE]
        count = f"{len(group)} figure{'s' * (len(group) != 1)}"
        span = _span(min(values), max(values), CLAIMS[claims[0]].figure)
        lines.append(
            f"- {title}: {of_paper}ours {span} in {count}"
            + (f": {_counts(judged)}." if judged else ", held against nothing.")
        )
    return lines


def by_saturation(figures: Figures) -> list[str]:
    """HeteroSpec's gain beside how much of its tree EAGLE-2 accepts."""
    ours = {(row["claim"], row["cell"]): row["ours"] for row in rows_of(figures, "heterospec")}
    cells = [cell for claim, cell in ours if claim == "saturation"]
    rows = []
    for cell in sorted(cells, key=lambda cell: -ours["saturation", cell][0]):
        at = "" if ("tau", cell) in ours else " 1"
        told = ("saturation", cell), (f"tau{at}", cell), (f"speed{at}", f"{cell}, 70b")
        rows.append((cell, *(figure(ours[key]) for key in told)))
    low, high = map(float, re.findall(r"\d\.\d+", CLAIMS["saturation"].figure))
    alike = [
        {"ours": ours["tau", cell]} for cell in cells if low <= ours["saturation", cell][0] <= high
    ]
    about = (
        "HeteroSpec deepens trees whose every level is accepted, so there is as much to gain as "
        "EAGLE-2 accepts of its depth + 1 tokens, which falls with the depth. It is not the whole "
        f"reason: where it accepts as many as in the paper ({low} to {high}), tau is "
        f"{_ends(alike)} of EAGLE-2's, and not {CLAIMS['tau'].figure}."
    )
    columns = ("EAGLE-2's tree", "tau / (depth + 1)", "tau over EAGLE-2's", "speed, 70b")
    return ["## The gain by the baseline's depth", "", about, "", *table(columns, rows)]


def summary(figures: Figures) -> list[tuple[str, ...]]:
    """A row for each paper: a link to its page, and counts of verdicts."""
    rows = []
    for name, paper in PAPERS.items():
        counts = Counter(verdict(row) for row in rows_of(figures, name) if is_claimed(row))
        each = (str(counts[kind]) for kind in JUDGED)
        rows.append((f"[{paper.title}](papers/{name}.md)", *each))
    return rows


def _word(rows: Sequence[Figures]) -> str:
    """All verdicts in a word or three, but for those that are certain."""
    counts = Counter(verdict(row) for row in rows if verdict(row) != CERTAIN)
    half = counts.total() / 2
    if len(counts) == 1:
        return KINDS[next(iter(counts))].capitalize()
    if counts[MET] + counts[AGREES] > half:
        return "Mostly met"
    return "Mostly not met" if counts[NOT_MET] > half else "Met in part"


def _span(low: float, high: float, theirs: str) -> str:
    """Smallest and largest of our ratios, as the paper has its own: a share, or a change."""
    if theirs[0].isdigit() and "%" in theirs:
        ends = (f"{100 * end:.0f}" for end in (low, high))
    else:
        ends = (f"{100 * (end - 1):+.1f}" for end in (low, high))
    return " to ".join(dict.fromkeys(ends)) + "%"


def _counts(rows: Iterable[Figures]) -> str:
    counts = Counter(verdict(row) for row in rows)
    return ", ".join(f"{counts[kind]} {name}" for kind, name in KINDS.items() if counts[kind])


def _groups(rows: Iterable[Figures]) -> dict[tuple[str, str, str], dict[str, Figures]]:
    """Rows of one claim and place by draft; of none where it is not of one."""
    groups: dict[tuple[str, str, str], dict[str, Figures]] = {}
    for row in rows:
        draft, _, place = row["cell"].partition(", ")
        if draft not in DRAFTS:
            draft, place = "", row["cell"]
        claim = CLAIMS[row["claim"]]
        groups.setdefault((claim.title, claim.figure, place), {})[draft] = row
    return groups


def _row(
    key: tuple[str, str, str],
    group: Mapping[str, Figures],
    drafts: Sequence[str],
    notes: dict[str, int],
) -> tuple[str, ...]:
    """Cells of a row; new causes get the next numbers in ``notes``."""
    cells = (figure(group[draft]["ours"]) if draft in group else "" for draft in drafts)
    told: dict[str, list[str]] = {}
    for draft in drafts:
        if draft in group:
            told.setdefault(verdict(group[draft]), []).append(draft)
    words = "; ".join(
        kind if len(told) == 1 else f"{', '.join(of)} {kind}" for kind, of in told.items()
    ).replace(NOT_COMPARABLE, "")
    numbers = [notes.setdefault(why, len(notes) + 1) for why in _causes(group)]
    noted = f"{words} ({', '.join(map(str, numbers))})" if numbers else words
    return (*key, *cells, noted.strip())


def figure(ours: Sequence[float | None]) -> str:
    """A figure and its interval."""
    value, low, high = ours
    if value is None:
        return "beyond the baseline"
    return f"{value:.3f}" + (f" ({low:.3f} to {high:.3f})" if low and high else "")


def _causes(group: Mapping[str, Figures]) -> Iterable[str]:
    """Why figures are not met, each once: of drafts alike, or one after the other."""
    whys = {draft: short(row["why"]) for draft, row in group.items()
            if row["why"] and verdict(row) not in (MET, CERTAIN)}  # fmt: skip
    if len({row["why"] for row in group.values()}) == 1 or "" in whys:
        return dict.fromkeys(whys.values())
    return (f"{draft}: {why}" for draft, why in whys.items())


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return table(("claim", "paper", "where", *columns, "verdict (notes)"), rows)

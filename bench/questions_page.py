"""docs/questions.md: five questions of a reader who knows the field, and where their answers stand.
`bench/report.py` writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

from bench import load_page
from bench.map.page import outcomes
from bench.markdown import percent
from bench.papers import pages as papers
from bench.papers.claims import CLAIMS
from bench.real_page import share


def page(load: Callable[[str], dict[str, Any]], believed: str) -> str:
    """The page, by what loads a result; ``believed``: how far tokens/s of vLLM were off."""
    figures = {name: part for name, part in load("papers").items() if name != "made"}

    def ends(paper: str, claim: str, place: str = "") -> str:
        rows = papers.of_claim(papers.rows_of(figures, paper), claim, place)
        ours = sorted(row["ours"] for row in rows if "wide" not in row["cell"])
        return " to ".join(dict.fromkeys(map(papers.figure, (ours[0], ours[-1]))))

    vocabulary, mapped = load("vocabulary"), load("map")
    mass = {(r["order"], r["size"]): r for r in vocabulary["mass"]["rows"]}["both", 16_384]
    costs = {(r["dtype"], r["rows"]): r["of_target"] for r in vocabulary["costs"]["rows"]}
    whole, part = (percent(costs["bfloat16", size], 0) for size in (262_144, 16_384))
    rules, played = load("rules")["executed"]["rows"], load("load-native")
    ran = {(r["clients"], r["rule"]): median(r["tokens_per_s"]) for r in rules}
    on_cpu = (f"{ran[n, 'tree'] / ran[n, 'constant']:.2f} at {n} clients" for n in (4, 16))
    auc, of_three = (papers.auc(papers.rows_of(figures, "c2t"), k) for k in ("nodes", "three"))
    of_gemma = papers.auc(load("real-drafts")["trees"]["rows"], "nodes")
    rounds, blind = load("served")["rounds"], Counter(outcomes(mapped["blind"]))
    gpus = [r["executed"] / r["predicted"][0] for r in mapped["executed"]["rows"]]
    answers = {
        "What of HeteroSpec holds, and why not the rest?": (
            f"Pruning: it keeps {ends('heterospec', 'kept')} of tau on code. In all tau gains "
            f"little: it is {ends('heterospec', 'tau', 'depth 5')} of EAGLE-2's at depth 5 (the "
            f"paper: {CLAIMS['tau'].figure}), {ends('heterospec', 'tau', 'depth 8')} at depth 8, "
            "as entropy picks few rounds to deepen. Speed at `70b`, both tuned: "
            f"{ends('heterospec', 'tuned', '70b')}. [HeteroSpec](papers/heterospec.md): first "
            "lines, *The gain by the baseline's depth*."
        ),
        "Do C2T's features rank nodes better than joint probability?": (
            f"With its logarithm beside them: AUC {auc} by joint probability (greedy); on Gemma's "
            f"head they do not: {of_gemma}. The paper's three alone do not: {of_three}. At "
            f"EAGLE-2's tau trees verify {ends('c2t', 'nodes')} of its tokens; speed at `70b`, "
            f"both tuned, is {ends('c2t', 'tuned', '70b')}. [C2T](papers/c2t.md): "
            "first lines, notes."
        ),
        "Does DynaSpec's shortlist pay at a real vocabulary?": (
            "Not known: no speed was executed there. Of Gemma's 262,144 tokens FR-Spec's 16,384 "
            f"hold the likeliest in {share(mass['first_choice'])}, and take a draft's pass from "
            f"{whole} of the target's to {part}; a draft that learned no others loses nothing, "
            "routed or not. At 4,096 tokens it does not: "
            f"{ends('dynaspec', 'executed', 'DynaSpec')} of the whole head's speed, executed. "
            "[DynaSpec](papers/dynaspec.md): *At a vocabulary of 262,144*."
        ),
        "When does a tree pay under load rather than a chain?": (
            "By replay, greedy, each the best at its load, at H100 costs: "
            f"{load_page.trees_over_chains(played)}. Executed on two CPU cores a tree has "
            f"{' and '.join(on_cpu)} of the best constant chain's speed (no interval). No GPU has "
            "executed it. "
            "[Under load](under_load.md): first lines, *What pays on an H100*."
        ),
        "Why should I believe a predicted speed on my engine?": (
            f"In vLLM on CPUs {rounds['differ']} of {rounds['rounds']} rounds differ from "
            f"replay's; tokens/s are {believed}. Of {blind.total()} cells drawn before they were "
            f"executed, {blind['right']} verdicts were right beyond noise, {blind['a tie']} tied, "
            f"{blind['wrong']} wrong. On GPUs speeds over none had {median(gpus):.3f} of what the "
            f"map says, in the median of {len(gpus)}; vLLM there is not executed. So `tune` "
            "publishes only what it executed. [Simulator](simulator.md), "
            "[hardware](hardware.md): first lines."
        ),
    }
    lines = ["# Questions", "", "95% intervals. Written by `python bench/report.py`."]
    lines += [line for asked, said in answers.items() for line in ("", f"## {asked}", "", said)]
    return "\n".join(lines) + "\n"

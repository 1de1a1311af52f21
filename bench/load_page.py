"""docs/under_load.md: several requests on the native decoder; `bench/report.py` writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench import RESULTS
from bench.markdown import percent, table

ABOUT = (
    "What to use under load, by replay of the demo pair's requests at an H100's costs, and what a "
    "CPU executed of it. Written by `python bench/report.py`."
)
KINDS = (
    "A pass of the target takes max(4.98 ms, 0.023 ms a row), `sloped` 0.0164 ms more for each row "
    "from the first on, as was measured; requests draft with the EAGLE-3 head. Each kind's best "
    "is chosen on one half of the requests at as many clients, and played on the other, both ways "
    "(95% intervals over requests). *Calibrated*: trees that C2T's classifier grows and cuts, a "
    "calibrated probability that a node is accepted, fitted to other requests. *By load*: the best "
    "of all kinds for each number of running requests, over the best single policy for that load. "
    "At temperature 1 chains are verified by `coupled` too, which costs them what `rejection` does "
    "not ([figures](papers/verifier.md)): there a tree's gain over an engine's chain is less."
)


GATE, GATE_CLIENTS, GATE_COSTS = 1.05, (4, 8, 16), "H100, 8B, sloped"
BUILT = "several at once are built because of that; no GPU has run them yet"
SCRIPT = "[script 3](../bench/gpu/README.md)"


def page() -> str:
    """The page."""
    found, decided = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("load-native", "rules")
    )
    lines = ["# Several requests at once", "", ABOUT, "", *answer(decided, found), *rules(decided)]
    return "\n".join([*lines, *executed(found), *hardware(found)]).rstrip() + "\n"


def trees_over_chains(found: dict[str, Any]) -> str:
    """Greedy, the best tree over the best chain by costs: at the fewest and at the most clients,
    and up to how many it is faster beyond noise."""
    told, alike = [], GATE_COSTS.removesuffix(", sloped")
    for costs, about in ((alike, "rows nearly free"), (GATE_COSTS, "rows cost")):
        rows = [row for row in found["hardware"]["rows"] if row["load"].startswith("clients:")]
        over = {
            int(row["load"].removeprefix("clients:")): row["tree_over_chain"]
            for row in rows
            if (row["hardware"], row["temperature"]) == (costs, 0)
        }
        few, most = min(over), max(over)
        pays = max((n for n, (_, low, _) in over.items() if low > 1), default=0)
        ends = f"{_ratio(over[few])} at {few} client, {_ratio(over[most])} at {most}"
        told.append(f"{ends}, beyond noise up to {pays} ({about})")
    return "; ".join(told)


def answer(found: dict[str, Any], played: dict[str, Any]) -> list[str]:
    """What to use at how many clients, by the rules that were replayed and executed."""
    rows = [row for row in found["replayed"]["rows"] if row["clients"] is not None]

    def over(rule: str, *clients: int) -> str:
        """Smallest and largest of a rule's estimates over the constant."""
        values = [r["over"][rule][0] for r in rows if not clients or r["clients"] in clients]
        return f"{min(values):.2f} to {max(values):.2f}"

    by_load = [r["over"]["trees by load"] for r in rows if r["clients"] == 16]
    beyond = sum(low > 1 for _, low, _ in by_load)
    pairs = {(r["clients"], r["rule"]): r for r in found["executed"]["rows"]}
    errors = []
    for r in pairs.values():
        base = pairs[r["clients"], "constant"]
        told = r["predicted_tokens_per_s"] / base["predicted_tokens_per_s"]
        errors.append(abs(told - median(r["tokens_per_s"]) / median(base["tokens_per_s"])))
    return [
        "Tokens/s over the best constant K, smallest to largest over three costs:",
        "",
        f"- **16 clients: trees by load, where an engine has them**: {over('trees by load', 16)} "
        f"(beyond noise at {beyond} of {len(by_load)} costs), after "
        f"{over('trees by load', 1, 2, 4, 8)} up to 8 clients. vLLM drafts chains; no GPU has "
        "executed this.",
        f"- **32 and 64 clients: one constant K**: trees by load {over('trees by load', 32, 64)}, "
        f"one tree {over('tree', 32, 64)}; vLLM's adaptive verification {over('verification', 32)} "
        f"at 32, {over('verification', 64)} at 64.",
        f"- **A rule that changes K gains little at any load**: vLLM's table {over('table')}, "
        f"SGLang's with candidates tuned {over('average, tuned')}; as shipped it has "
        f"{over('average', 32, 64)} at 32 and 64 clients.",
        f"- **Not to draft** has {over('none')}; on two CPU cores "
        "[vLLM](results.md#vllm-under-load) was not shown faster with a draft.",
        f"- **A tree over a chain**, [each the best](#what-pays-on-an-h100): "
        f"{trees_over_chains(played)}.",
        f"- Executed on a CPU, chains and a tree at 4 and 16 clients: {max(errors):.2f} from "
        "these ratios as predicted there, at most.",
        "",
    ]


def executed(found: dict[str, Any]) -> list[str]:
    """Predicted beside executed."""
    d = found["executed"]
    clients = sorted({row["clients"] for row in d["rows"]})
    count = len({row["policy"] for row in d["rows"]})
    return [
        "## Predicted and executed",
        "",
        f"{count} policies (chains, a window with a state, a stop, trees, a table by load) at "
        f"{', '.join(map(str, clients))} clients on two CPU cores, in turns: tokens/s are "
        f"**{percent(d['median_error'])} off in the median**, {percent(d['p90_error'])} at the "
        f"90th percentile, after one factor of {d['common_factor']:.3f}; as predicted "
        f"{percent(d['median_error_as_predicted'])} and {percent(d['p90_error_as_predicted'])}. "
        f"Executing again differs by {percent(d['median_repeat_error'])}. {d['texts_differ']} "
        "texts differ. " + stamp(found, "executed"),
        "",
    ]


def sized(part: dict[str, Any]) -> str:
    """Of how many requests a part is."""
    return f"{part['texts']} requests of {part['tokens']} tokens."


def hardware(found: dict[str, Any]) -> list[str]:
    """What pays at the costs of other hardware."""
    columns = (
        "costs, temperature", "clients", "none, tokens/s", "best over none", "tree over chain",
        "calibrated over tree", "by load over best",
    )  # fmt: skip
    names = [
        "best_over_none", "tree_over_chain", "calibrated_over_tree", "by_load_over_best",
    ]  # fmt: skip
    by_clients, arriving = (
        [row for row in found["hardware"]["rows"] if row["load"].startswith(kind)]
        for kind in ("clients", "poisson")
    )
    rows = [
        (
            f"{row['hardware']}, {row['temperature']:g}",
            row["load"].removeprefix("clients:"),
            round(row["tokens_per_s"]["none"]),
            *(_ratio(row[name]) for name in names),
        )
        for row in by_clients
    ]
    shares = dict.fromkeys(row["load"].split()[2] for row in arriving)
    gains, trees = (
        [row[name][0] for row in arriving] for name in ("best_over_none", "tree_over_chain")
    )
    return [
        "## What pays on an H100",
        "",
        f"{KINDS} {sized(found['hardware'])} {stamp(found, 'hardware')}",
        "",
        *table(columns, rows),
        f"Requests that arrive (Poisson, at {', '.join(shares)} of what no draft can serve) are "
        f"served as they come: best over none {min(gains):.2f} to {max(gains):.2f}, tree over "
        f"chain {min(trees):.2f} to {max(trees):.2f}.",
        "",
        gate(found["hardware"]["rows"]),
        "",
    ]


RULES = {
    "none": "no draft",
    "table": "vLLM, table",
    "average": "SGLang, as shipped",
    "average, tuned": "SGLang, file tuned",
    "verification": "vLLM, adaptive verification",
    "tree": "one tree",
    "trees by load": "trees by load",
}
DECIDED = (
    "Each rule is asked before every step of the same replay (temperature 0, the EAGLE-3 head, "
    "prompts left out). *Constant*: the K that is best over all loads. *vLLM, table*: K by batch "
    "size (`num_speculative_tokens_per_batch_size`), the best at each. *SGLang*: "
    "`--speculative-adaptive`, K by an exponential average of accepted lengths, with the file that "
    "it ships and with candidates chosen by load. *Adaptive verification*: 3, 5, 7 or 8 tokens are "
    "drafted, and those verified that are the most worth their time, by the costs that steps have "
    "here; acceptance is estimated online. *Trees by load*: ours, the best tree, chain or none at "
    "each number of requests. What is free is chosen on one half of the requests and played on the "
    "other, both ways; engines' rules learn on the half that chooses. Switching costs nothing "
    "here, and K = 0 what no draft costs. Ratios of tokens/s over the constant, in the median of "
    "drawn requests, with 95% intervals."
)


def rules(found: dict[str, Any]) -> list[str]:
    """Whose rule decides best, by replay, and two numbers of clients executed."""
    d = found["replayed"]
    rows = [
        (
            row["hardware"],
            "all" if row["clients"] is None else row["clients"],
            round(row["constant"]),
            *(_ratio(row["over"][rule]) for rule in RULES),
        )
        for row in d["rows"]
    ]
    lines = [
        "## Who decides best under load",
        "",
        f"{DECIDED} {sized(d)} {stamp(found, 'replayed', 'rules')}",
        "",
        *table(("costs", "clients", "constant, tokens/s", *RULES.values()), rows),
    ]
    return [*lines, *_ran(found)]


def _ran(found: dict[str, Any]) -> list[str]:
    """Rules that were executed, beside what was predicted."""
    executed = found["executed"]["rows"]
    speeds = {(r["clients"], r["rule"]): median(r["tokens_per_s"]) for r in executed}
    told = {(r["clients"], r["rule"]): r["predicted_tokens_per_s"] for r in executed}
    clients = sorted({r["clients"] for r in executed})
    rows = [
        (
            {"constant": "constant", **RULES}[rule],
            *(f"{of[n, rule] / of[n, 'constant']:.2f}" for n in clients for of in (told, speeds)),
        )
        for rule in dict.fromkeys(r["rule"] for r in executed)
    ]
    heads = [f"{n} clients, {what}" for n in clients for what in ("predicted", "executed")]
    return [
        "Executed on a CPU by the native decoder, chains of `small`, at this machine's costs, by "
        f"the processor's clock, in turns; over the constant. {stamp(found, 'executed', 'rules')}",
        "",
        *table(("rule", *heads), rows),
    ]


def gate(rows: Sequence[dict[str, Any]]) -> str:
    """Whether several requests at once on CUDA are worth building, by the less favourable costs."""
    loads = [f"clients:{clients}" for clients in GATE_CLIENTS]
    ratios = {
        temperature: [
            row["tree_over_chain"]
            for row in rows
            if (row["hardware"], row["temperature"]) == (GATE_COSTS, temperature)
            and row["load"] in loads
        ]
        for temperature in (0, 1)
    }
    every = [ratio for of in ratios.values() for ratio in of]
    likely, shown = (any(ratio[end] >= GATE for ratio in every) for end in (0, 1))
    clients = ", ".join(map(str, GATE_CLIENTS[:-1])) + f" or {GATE_CLIENTS[-1]}"
    verdict = "worth building" if shown else "worth building by the estimate, not by its interval"
    told = " and ".join(
        f"{', '.join(map(_ratio, of))} times the best chain at temperature {temperature}"
        for temperature, of in ratios.items()
    )
    answer = f"{verdict}; {BUILT} ({SCRIPT})" if likely else "not worth building"
    return (
        "Several requests at once on CUDA are worth building where the best table of policies is "
        f"at least {GATE} times the best table of chains at {clients} clients. At the sloped costs "
        f"the best tree alone is {told}: {answer}."
    )


def stamp(found: dict[str, Any], part: str, name: str = "load_native") -> str:
    """When and by which code a part was measured."""
    made = found["made"][part]
    return (
        f"`python bench/run.py {name} --only {part}`, {made['measured']}, code of {made['code']}."
    )


def _ratio(interval: Sequence[float]) -> str:
    value, low, high = interval
    return f"{value:.2f} ({low:.2f} to {high:.2f})"

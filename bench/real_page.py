"""Tables of Gemma 3 270M: its tunings, its texts beside transformers', and shortlists of its
vocabulary. Called by `python bench/report.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bench import RESULTS
from bench.labels import short
from bench.markdown import percent, ratio, table
from bench.papers.claims import CLAIMS

Figures = dict[str, Any]


def load(name: str) -> Figures:
    """A result; empty before it was measured."""
    file = RESULTS / f"{name}.json"
    figures: Figures = json.loads(file.read_text()) if file.exists() else {}
    return figures


def measured() -> list[Figures]:
    """Tunings of Gemma 3 270M, and its texts beside transformers, in the order in which they were
    measured; nothing before they were."""
    return list(load("real-tuned").values())


def confirmed_ratio(d: Figures) -> str:
    """The speed over autoregression on requests held out, with its interval."""
    if not d["confirmed"]:
        return "nothing was faster"
    (low, high), ratio = d["confirmed"]["interval"], d["confirmed"]["ratio"]
    return f"{ratio:.2f} ({low:.2f} to {high:.2f})"


def gain(d: Figures) -> str:
    """What was confirmed on requests held out, and its speed there."""
    found = f"`{short(d['found'])}` " if d["confirmed"] else ""
    unproved = ", not published" if d["confirmed"] and not d["published"] else ""
    return f"{found}{confirmed_ratio(d)}{unproved}"


def by_lookup() -> list[Figures]:
    """Tunings of prompt lookup."""
    return [d for d in measured() if d.get("drafts") == "ngram"]


def level() -> str:
    """The level of the intervals of what was confirmed."""
    levels = {d["confirmed"]["level"] for d in measured() if d.get("confirmed")}
    return " and ".join(f"{100 * each:.0f}%" for each in sorted(levels))


def headline() -> str:
    """The tuning of prompt lookup with the narrowest interval."""

    def width(d: Figures) -> float:
        low, high = d["confirmed"]["interval"]
        return float(high / low)

    d = min((d for d in by_lookup() if d["confirmed"]), key=width)
    (low, high), ratio = d["confirmed"]["interval"], d["confirmed"]["ratio"]
    proved = "published" if d["published"] else "not beyond noise"
    return (
        f"Gemma 3 270M on a CPU with prompt lookup: {ratio:.2f} times autoregression "
        f"({level()} interval {low:.2f} to {high:.2f}), {proved}."
    )


def summary() -> str:
    """README's first speeds: each workload, and what it leaves out."""

    def told(some: list[Figures]) -> str:
        mark = {True: "**", False: ""}
        marked = ((d["workload"], mark[d["published"]], confirmed_ratio(d)) for d in some)
        return ", ".join(f"{workload} {m}{ratio}{m}" for workload, m, ratio in marked)

    lookup, sampled = ([d for d in by_lookup() if bool(d["temperature"]) == t] for t in (0, 1))
    said = [told(lookup)]
    if trained := [d for d in measured() if "winner" in d and d["drafts"] != "ngram"]:
        said.append(f"beside trained drafts {told(trained)}")
    if sampled:
        faster = sum(bool(d["published"]) for d in sampled)
        said.append(f"at temperature 1 {faster or 'none'} of {len(sampled)}")
    held = sorted({d["confirm_requests"] for d in measured() if d.get("confirmed")})
    return (
        "**Gemma 3 270M** ([page](docs/gemma.md)), prompt lookup on CPU, times "
        f"autoregression ({level()} interval; {' or '.join(map(str, held))} held out; bold: "
        f"published): {'; '.join(said)}"
    )


def page() -> str:
    """docs/gemma.md."""
    about = (
        "A public model, tuned. Its weights are what a file of 4 bits becomes in bfloat16, "
        "dequantized once by `make real`; nothing of it is part of this project, and Gemma's terms "
        "apply to its use. `tools/gemma` has it write texts (`own_texts`) and trains an EAGLE-3 "
        "head and a draft model of two layers on them (`train`). What the papers' mechanisms come "
        "to with it stands first on the pages of [HeteroSpec](papers/heterospec.md), "
        "[C2T](papers/c2t.md) and [DynaSpec](papers/dynaspec.md). Written by `python "
        "bench/report.py`."
    )
    lines = ["# Gemma 3 270M", "", about, "", *tunings(), *in_vllm(), *beside_transformers()]
    lines += exactness()
    return "\n".join(lines).rstrip() + "\n"


def exactness() -> list[str]:
    """Texts and rounds that differ, here and in vLLM."""
    told = [f"- {part['summary']}" for part in load("real").values()]
    if served := load("served").get("rounds_real"):
        told.append(f"- in vLLM: {served['summary']}")
    return ["## Is it exact", "", *told, ""]


def tunings() -> list[str]:
    """What tunings of it came to."""
    tunings = [d for d in measured() if "winner" in d]
    if not tunings:
        return []
    rows = []
    for d in tunings:
        own = next(c for c in d["candidates"] if c["label"] == (d["found"] or d["winner"]))
        texts = f"{d['texts']['differ']} of {d['texts']['compared']}"
        check = d["check"]
        foretold = f"{check['speedup']:.2f} (K={check['K']})" if check else ""
        foretold += ", not shown" * bool(check and check["shown"] is None)
        at = f"{d['workload']}, {d['temperature']:g}"
        held = f"{d['confirm_requests']} of {d['limit']}"
        tau = f"{own['mean_accepted_length']:.2f}"
        rows.append((at, d["drafts"], gain(d), held, tau, foretold, texts))
    gains = f"times autoregression ({level()} interval)"
    columns = ("workload, temperature", "drafts", gains)
    more = ("requests held out", "tau in the race", "`check` foretold", "texts that differ")
    made = sorted({f"{d['measured']}, code of {d['code']}" for d in tunings})
    about = (
        "Float32, one thread of a CPU that others use, one request at a time; prompts of public "
        "benchmarks as they stand, without a chat template (`mixed`: those of `make real`). "
        f"`python bench/run.py real_tuned`, {'; '.join(made)}:"
    )
    return ["## Tuned", "", about, "", *table((*columns, *more), rows)]


def in_vllm() -> list[str]:
    """What `tune --url` executed on a vLLM that it served."""
    tuned = load("served").get("tune_url_real")
    if not tuned:
        return []
    rows, seconds = [], []
    for method, of in tuned["drafters"].items():
        seconds.append(f"{of['seconds']:.0f} s")
        confirmed, first = of["confirmed"], of["loads"][0]["label"]
        for policy in of["loads"]:
            speeds = {run["load"]: run["measured"]["tokens_per_s"] for run in policy["loads"]}
            each = (f"{speeds[f'clients:{n}']:.1f}" for n in (1, 4))
            is_confirmed = confirmed and policy["policy_id"] == confirmed["id"]
            over = confirmed_ratio(of) if is_confirmed else ""
            as_served = policy["label"] == first
            label = "what the server drafted" if as_served else f"`{short(policy['label'])}`"
            rows.append((method.replace("_", " "), label, *each, over))
    about = (
        "`tune --url`, greedy, demo prompts (`python bench/run.py served --only tune_url_real`; "
        f"{', '.join(seconds)}): tokens/s on two CPU cores, and what was confirmed on runs held "
        "out. `autoregressive` has the draft loaded."
    )
    columns = (
        "drafter",
        "policy",
        "1 client",
        "4 clients",
        "over what the server drafted (98% interval)",
    )
    return ["## Tuned in vLLM", "", about, "", *table(columns, rows)]


def beside_transformers() -> list[str]:
    """Greedy tokens/s of ours and of transformers, in turns."""
    rows = []
    for d in measured():
        for row in d.get("rows", ()):
            of = [ratio(row["over"][base]) for base in row["over"]]
            rows.append((d["workload"], row["what"], f"{row['tokens_per_s']:.1f}", *of,
                         f"{row['texts_differ']} of {d['prompts']}"))  # fmt: skip
    if not rows:
        return []
    columns = ("workload", "what", "tokens/s", "over transformers", "over its prompt lookup")
    more = ("over ours", "texts unlike ours")
    prompts = ", ".join(f"{d['prompts']} prompts of {d['workload']}" for d in measured()
                        if "rows" in d)  # fmt: skip
    about = f"Greedy, {prompts}, in turns; ratios of speed (95% interval):"
    return ["## Beside transformers' `generate`", "", about, "", *table((*columns, *more), rows)]


def large_vocabulary() -> list[str]:
    """Shortlists of Gemma 3 270M's 262,144 tokens: what they hold, and what they save."""
    d = load("vocabulary")
    if not d:
        return []
    mass, costs = d["mass"], d["costs"]
    busy = d["made"]["costs"]["environment"]["load_before"]
    orders = list(dict.fromkeys(row["order"] for row in mass["rows"]))
    rows = []
    for order in orders:
        of_order = [row for row in mass["rows"] if row["order"] == order]
        rows += [
            (order, f"{row['size']:,}", share(row["mass"]), share(row["first_choice"]))
            for row in of_order
        ]
    counted = "; ".join(
        f"{name}: {mass['tokens'][name]:,} tokens, {mass['distinct'][name]:,} different"
        for name in mass["tokens"]
    )
    columns = ("ordered by", "tokens", "p(S)", "likeliest token inside")
    lines = [
        "## At a vocabulary of 262,144",
        "",
        f"Gemma 3 270M (`make real`). FR-Spec's shortlists over {mass['contexts']:,} contexts of "
        f"{mass['texts']} texts that the target wrote after prompts that are held out (95% "
        f"interval over texts). No speed was executed there. Counted in {counted}.",
        "",
        *table(columns, rows),
        f"What the product with so many rows costs of a pass of a draft of {costs['layers']} "
        f"layers with the target's embeddings, one token, {costs['threads']} thread"
        f"{'s' * (costs['threads'] > 1)} of a CPU that others use (load average {busy:.0f}, so "
        "milliseconds are more than on an idle one), medians in turns. A head whose `d2t` has so "
        "many tokens has the same product.",
        "",
    ]
    columns = ("type", "rows", "product, ms", "of the draft's pass", "pass, of the target's")
    figures = (
        (row["dtype"], f"{row['rows']:,}", f"{row['product_ms']:.2f}",
         percent(row["of_pass"], 0), percent(row["of_target"], 0))
        for row in costs["rows"]
    )  # fmt: skip
    made = d["made"]
    when = ", ".join(f"{name} {made[name]['measured']}, code of {made[name]['code']}" for name in
                     ("mass", "costs"))  # fmt: skip
    lines += [*table(columns, figures), f"`python bench/run.py vocabulary`: {when}.", ""]
    return [*lines, *kept()]


def kept() -> list[str]:
    """What shortlists keep of the trained draft model's acceptance."""
    d = load("real-drafts").get("shortlists")
    if d is None:
        return []
    sizes = list(dict.fromkeys(row["size"] for row in d["rows"]))
    rows = [
        (name, *(ratio(row["kept"]) for row in d["rows"] if row["shortlist"] == name))
        for name in dict.fromkeys(row["shortlist"] for row in d["rows"])
    ]
    about = (
        f"What chains of {d['depth']} tokens of the draft model of two layers that `tools/gemma` "
        f"trains keep of their mean accepted length, {d['tau']:.2f}, as they draft from so many "
        f"tokens, in the mean of a chain (95% interval; {d['sample']}). Orders and the router, of "
        f"{d['clusters']} clusters, are of the target's own texts ({d['contexts']:,} contexts; the "
        "paper has a million). The draft itself learned the 16,384 tokens that are most frequent "
        "there, and hardly proposes others, so this does not show what a draft of broad training "
        f"would lose. `python bench/run.py real_drafts`, {when_of('shortlists')}:"
    )
    return [about, "", *table(("shortlist", *(f"{size:,}" for size in sizes)), rows)]


def trees(*claims: str) -> list[str]:
    """What claims of papers come to on the trained head's trees."""
    d = load("real-drafts").get("trees", {"rows": []})
    rows = [
        (CLAIMS[row["claim"]].title, row["cell"], ratio(row["ours"]), row["why"])
        for row in d["rows"]
        if row["claim"] in claims
    ]
    if not rows:
        return []
    about = (
        "An EAGLE-3 head of [it](../gemma.md), trained by `tools/gemma`: EAGLE-2's tree has tau "
        f"{d['tau']:.2f}, a chain {d['chain']:.2f} ({d['sample']}; 95% interval). `python "
        f"bench/run.py real_drafts`, {when_of('trees')}:"
    )
    columns = ("what", "draft", "measured", "beside it")
    return ["## On Gemma 3 270M", "", about, "", *table(columns, rows)]


def when_of(part: str) -> str:
    """When and by which code a part of the drafts' figures was measured."""
    made = load("real-drafts")["made"][part]
    return f"{made['measured']}, code of {made['code']}"


def share(interval: Sequence[float | None]) -> str:
    """A share with its interval, in percent."""
    value, low, high = (100 * (x or 0.0) for x in interval)
    return f"{value:.1f}% ({low:.1f} to {high:.1f})"

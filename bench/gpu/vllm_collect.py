"""What :mod:`gpu.vllm` brought back, read on a CPU: a table of speed, texts that differ, the noted
rounds held against replay, and verdicts.

Each noted round is predicted from the text that it is of: drafted are as many tokens as the table
in force has for the batch of the request's round before, accepted as many as the draft's likeliest
tokens agree with the text from there on. The draft is read here, in float32, along the noted text
(``rounds``), and by the server itself along a few texts (``retraced``). On a server in bfloat16
ties fall differently, also between two batches, so that accepted tokens are counted there;
drafted ones are exact.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from bench.gpu.rows import Figures, result_of
from bench.harness import say
from bench.lab import demo, stored
from bench.markdown import table, table_of
from bench.served.live import DRAFT, PAIR, temporary_folder, windowed
from bench.verdicts import MET, NOT_MET, NOT_SHOWN, at_least, exactly
from spectune.engines.vllm.folder import (
    NotedRequest,
    RetracedRequest,
    ServerDescription,
    parse_line,
)
from spectune.optimizer.recording.record import PanoramaSpec, record_panoramas
from spectune.optimizer.replay.trace import simulate
from spectune.runtime.loading import LoadedPair
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.recording import Asked
from spectune.traces.schema import Sampling, Tokens
from spectune.traces.tables import Trajectory

Text = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a prompt and of what was added to it."""
Agreeing = Mapping[Text, Sequence[int]]
"""Of a text, by position, how many tokens of the draft the text goes on with."""
Tables = Mapping[tuple[str, int], Mapping[int, int]]
"""Draft tokens by batch size, by a server's boot and the version of its policy."""
LIMIT_US, LIMIT_RATIO, LIMIT_S = 40.0, 0.985, 1.0
"""Targets on a CPU (``bench/results/served.json``): the agent's cost of a step, tokens/s with it as
a part of those without, and seconds until a publication is in force."""
REPLAYED = 48
"""Texts of a number of draft tokens that are replayed."""


class Noted(NamedTuple):
    """A request that an agent noted: the boot of its server, what that serves by itself, and the
    line."""

    boot: str
    engine: ServerDescription
    line: NotedRequest

    @property
    def text(self) -> Text:
        """Empty where no tokens are noted."""
        prompt, output = self.line.prompt, self.line.output
        if prompt is None or output is None:
            return (), ()
        return tuple(prompt.tolist()), tuple(output.tolist())


@dataclass(frozen=True)
class Brought:
    """What is in a folder that the measurement left: the last row of each part, and what was
    noted."""

    folder: Path

    @cached_property
    def rows(self) -> dict[str, Figures]:
        lines = (self.folder / "rows.jsonl").read_text().splitlines()
        return {row["part"]: row for row in map(json.loads, lines)}

    @property
    def draft(self) -> str:
        return str(self.rows["plan"].get("draft", DRAFT))

    @cached_property
    def noted(self) -> list[Noted]:
        file, boot, engine = self.folder / "rounds.jsonl.gz", "", None
        found = list[Noted]()
        for text in gzip.decompress(file.read_bytes()).splitlines() if file.exists() else ():
            line = parse_line(text)
            if isinstance(line, ServerDescription):
                boot, engine = json.loads(text).get("boot", ""), line
            elif isinstance(line, NotedRequest) and engine is not None:
                found.append(Noted(boot, engine, line))
            else:
                assert isinstance(line, RetracedRequest)  # of a text that was retraced
        return found

    @property
    def tables(self) -> Tables:
        found = {
            (row["boot"], int(version)): gammas
            for row in self.rows.values()
            for version, gammas in row.get("tables", {}).items()
        }
        own = {(n.boot, 0): n.engine.gammas or {} for n in self.noted}
        return {key: {int(n): k for n, k in t.items()} for key, t in (own | found).items()}

    def kind(self, name: str) -> list[Figures]:
        """The rows of the parts whose names begin so, but for those that failed."""
        return [
            row
            for part, row in self.rows.items()
            if part.startswith(name) and "failed" not in row and "clients" in row
        ]


# ----------------------------------------------------------------------------------------- rounds


@dataclass
class Held:
    """Rounds held against what is predicted of them; ``unknown``: of a policy that no part told."""

    rounds: int = 0
    drafted_differ: int = 0
    accepted_differ: int = 0
    unknown: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, noted: Noted, tables: Tables, agree: Sequence[int]) -> None:
        """Holds the rounds of a request after its first, which drafts nothing."""
        length = len(agree)
        for before, now in pairwise(noted.line.rounds):
            sizes = tables.get((noted.boot, before.version))
            if not sizes:
                self.unknown += 1
                continue
            drafted = sizes[max(size for size in sizes if size <= max(1, before.batch))]
            accepted = min(drafted, agree[now.start])
            # the last round may draft, and accept, beyond the text
            executed = now.drafted, min(now.accepted, length - now.start)
            self.rounds += 1
            self.drafted_differ += now.drafted != drafted
            self.accepted_differ += now.drafted == drafted and executed[1] != accepted
            if executed != (drafted, accepted) and len(self.examples) < 5:
                self.examples.append(
                    f"{noted.line.id}: from token {now.start} {executed[0]} drafted, {executed[1]} "
                    f"accepted; predicted {drafted}, {accepted}"
                )

    def figures(self) -> Figures:
        return dict(vars(self))


def agreement(pair: LoadedPair, draft: str, most: int, texts: Iterable[Text]) -> Agreeing:
    """How far one of the pair's drafts, which proposes at most so many tokens, agrees with texts,
    read along them here."""
    gamma = most if draft in pair.heads else 1  # another draft's next token is a prefix's alone
    found = {}
    for number, (prompt, output) in enumerate(texts):
        panorama = record_panorama(pair, _trajectory(number, (prompt, output)), draft, gamma)
        on_text = (panorama.trie.text_slot == 0).tolist()
        follows = range(1, len(on_text) + 1) if panorama.shared else panorama.children[:, 0]
        counts = list[int]()
        for node in range(len(output)):
            agreeing = 0
            while 0 <= node < len(on_text) and on_text[node]:
                node, agreeing = int(follows[node]), agreeing + 1
            counts.append(agreeing)
        found[prompt, output] = counts
    return found


def proposed(row: Figures) -> Agreeing:
    """How far the server's own draft agrees with the texts that it was asked about."""
    return {
        (tuple(prompt), tuple(output)): [0, *agree] for prompt, output, _, agree in row["texts"]
    }


def hold(brought: Brought, agreeing: Agreeing) -> Held:
    """The rounds of all noted requests whose text is known."""
    held, tables = Held(), brought.tables
    for noted in brought.noted:
        if (agree := agreeing.get(noted.text)) is not None:
            held.add(noted, tables, agree)
    return held


def _trajectory(number: int, text: Text) -> Trajectory:
    tokens = Tokens(*(np.array(ids, np.int32) for ids in text))
    return Trajectory(f"{number}", "demo", tokens, Sampling(), len(text[1]), "length", "coupled")


def replayed_taus(pair: LoadedPair, brought: Brought) -> list[Figures]:
    """Tokens a round of requests of the most clients, by numbers of draft tokens: as executed, and
    as `simulate` predicts them from the texts."""
    rows, most = [], max((row["clients"] for row in brought.kind("K=")), default=0)
    for gamma in sorted({row["gamma"] for row in brought.kind("K=")} - {0}):
        begin = f"cmpl-K_{gamma}_{most}."
        noted = [n for n in brought.noted if n.line.id.startswith(begin) and len(n.text[1]) > 1]
        noted = noted[:REPLAYED]
        texts = [n.text for n in noted]
        if not texts:
            continue
        counts = [len(n.line.rounds) - 1 for n in noted], [len(n.text[1]) - 1 for n in noted]
        with temporary_folder() as folder:
            store = stored(folder / "x.db")
            store.put_pair(PAIR.id, PAIR.name, PAIR.to_json(), PAIR.models)
            options = {**noted[0].engine.about, "stop_strings": [], "chat": False}
            longest = max(len(output) for _, output in texts)
            asked = Asked(PAIR.id, None, Sampling(), longest, options=options)
            info = store.create_recording(asked)
            items = [(n, _trajectory(n, text), ()) for n, text in enumerate(texts)]
            store.append_trajectories(info.id, items)
            record_panoramas(store, pair, info.id, PanoramaSpec((brought.draft,), gamma))
            store.finish_recording(info.id)
            replay = simulate(store, info.id, windowed(gamma, brought.draft), None).replay
        row = {
            "K": gamma,
            "texts": len(texts),
            "tau": sum(counts[1]) / sum(counts[0]),
            "tau replayed": replay.total.mean_accepted_length,
        }
        say(row)
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------ tables


def speeds(brought: Brought) -> list[Figures]:
    """Tokens/s by numbers of draft tokens and of clients, beside K = 0 of the same server and one
    without draft and agent; how many texts differ from theirs, and where at first."""
    plain = {row["clients"]: row for row in brought.kind("plain")}
    served = {(row["gamma"], row["clients"]): row for row in brought.kind("K=")}
    rows = []
    for (gamma, clients), row in sorted(served.items(), key=lambda item: item[0][::-1]):
        base = served.get((0, clients)) if gamma else plain.get(clients)
        here: Figures = {"clients": clients, "K": gamma, "tokens/s": row["tokens_per_s"]}
        for name, other in (("of K=0", served.get((0, clients))), ("of plain", plain.get(clients))):
            here[name] = None if other is None else row["tokens_per_s"] / other["tokens_per_s"]
        here |= {"texts": row["requests"], **different(row, base)}
        here |= {"in force after s": row["in_force_s"]}
        rows.append(here)
    return rows


def different(row: Figures, base: Figures | None) -> Figures:
    """How many texts are not as in a base, and the first tokens that differ."""
    if base is None:
        return {"differ": None, "from token": ""}
    pairs = zip(row["texts"], base["texts"], strict=False)
    found = [
        next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairs
        if a != b
    ]
    return {"differ": len(found), "from token": ", ".join(map(str, sorted(found)[:5]))}


def between_batches(brought: Brought) -> list[Figures]:
    """How many texts of the server without an agent are not as those of its one client: what
    rounding changes by itself."""
    by_clients = {row["clients"]: row for row in brought.kind("plain")}
    base = by_clients.pop(1, None)
    return [{"clients": n, **different(row, base)} for n, row in sorted(by_clients.items())]


def publications(brought: Brought) -> Figures:
    """Seconds until publications were in force, and the requests amid them; texts are held against
    those without draft tokens that as many clients got."""
    row = _done(brought.rows, "publications")
    if not row:
        return {}
    plain = {r["clients"]: r["texts"] for r in brought.kind("K=0")}.get(row["clients"], [])
    pairs = [(ids, plain[n]) for n, ids in row["texts"] if n < len(plain)]
    waits = row["in_force_s"]
    return {
        **{k: row[k] for k in ("publications", "clients", "answered", "failed_requests")},
        "failures": row["failures"],
        "median_s": median(waits),
        "longest_s": max(waits),
        "texts": len(pairs),
        "texts_differ": sum(a != b for a, b in pairs),
    }


def retraced(brought: Brought, agreeing: Agreeing) -> Figures:
    """Rounds held against what the server's own draft proposes, and how many of its proposals are
    not the text's next token where the draft's here is, or the other way round."""
    row = _done(brought.rows, "retraced")
    if not row:
        return {}
    asked = proposed(row)
    differ = sum(
        (a > 0) != (b > 0)
        for text in asked.keys() & agreeing.keys()
        for a, b in zip(asked[text][1:], agreeing[text][1:], strict=True)
    )
    held = hold(brought, asked).figures()
    return {"positions": row["positions"], "proposals_differ": differ, **held}


def requests(brought: Brought) -> Figures:
    """Requests that got an answer under a number of draft tokens, and those of them that no line of
    the agent tells of."""
    told = {n.line.id.removeprefix("cmpl-").partition("-")[0] for n in brought.noted}
    sent = {
        f"K_{row['gamma']}_{row['clients']}.{n}"
        for row in brought.kind("K=")
        for n in range(row["requests"])
    }
    return {"answered": len(sent), "not_noted": len(sent - told)}


def verdicts(figures: Figures) -> dict[str, str]:
    """What is met of what is promised; what no part has measured is not shown, nor what rounding
    changes in a server that does not compute in float32."""
    is_exact, speed = figures["dtype"] == "float32", figures["speed"]
    rounds, own, sent = (figures[name] for name in ("rounds", "retraced", "requests"))
    steps, cost, published = (figures[name] for name in ("steps", "cost", "publications"))

    def of(figure: object, is_met: Callable[[], bool]) -> str:
        return exactly(is_met()) if figure else NOT_SHOWN

    texts = [row["differ"] for row in speed if row["differ"] is not None]
    is_steady = bool(steps) and not steps["steps_of_vllm_differ_again"]
    ratio = cost["tokens_per_s_ratio"] if cost and cost["alternations"] > 1 else None
    return {
        "every part ran": exactly(not figures["failed"] and not figures["not_run"]),
        "texts are as without the agent, and as without draft tokens": of(
            texts and is_exact, lambda: not any(texts)
        ),
        "the agent notes every request": of(sent["answered"], lambda: not sent["not_noted"]),
        "rounds draft as their policy says": of(
            rounds["rounds"], lambda: not rounds["drafted_differ"]
        ),
        "rounds accept what replay predicts": of(
            rounds["rounds"] and is_exact, lambda: not rounds["accepted_differ"]
        ),
        "rounds accept what the server's draft proposes when it is asked": of(
            own and own["rounds"] and is_exact, lambda: not own["accepted_differ"]
        ),
        "without a policy every step is vLLM's own": of(
            is_steady, lambda: not steps["steps_differ"] and not steps["texts_differ"]
        ),
        f"the agent takes at most {LIMIT_US:.0f} us of a step": of(
            cost, lambda: cost["us_a_step"]["median"] <= LIMIT_US
        ),
        f"with the agent at least {LIMIT_RATIO} of the tokens/s": (
            at_least(ratio[1:], LIMIT_RATIO) if ratio else NOT_SHOWN
        ),
        "no request fails amid publications": of(
            published, lambda: not published["failed_requests"]
        ),
        f"publications are in force after {LIMIT_S:.0f} s at most": of(
            published, lambda: published["longest_s"] <= LIMIT_S
        ),
    }


def gathered(brought: Brought, pair: LoadedPair) -> Figures:
    """All figures of a folder, and their verdicts."""
    rows, last = brought.rows, brought.rows["plan"]
    texts = dict.fromkeys(n.text for n in brought.noted if n.text[1])
    say(f"{len(brought.noted)} noted requests, {len(texts)} texts")
    most = max((row["gamma"] for row in brought.kind("K=")), default=0)
    agreeing = agreement(pair, brought.draft, max(1, most), texts)
    dtypes = {str(n.engine.about.get("dtype")) for n in brought.noted}
    figures: Figures = {
        **{name: last[name] for name in last if name not in ("plan", "part")},
        "dtype": ", ".join(sorted(dtypes)),
        "started_s": {part: row["seconds"] for part, row in rows.items() if part in STARTS},
        "speed": speeds(brought),
        "between_batches": between_batches(brought),
        "taus": replayed_taus(pair, brought),
        "requests": requests(brought),
        "rounds": hold(brought, agreeing).figures(),
        "retraced": retraced(brought, agreeing),
        "publications": publications(brought),
        "steps": _done(rows, "steps"),
        "cost": _done(rows, "cost"),
        "failed": {part: row["failed"] for part, row in rows.items() if "failed" in row},
        "not_run": [part for part in last["plan"] if part not in rows],
    }
    figures["verdicts"] = verdicts(figures)
    figures["holds"] = NOT_MET not in figures["verdicts"].values()
    met = sum(verdict == MET for verdict in figures["verdicts"].values())
    figures["summary"] = (
        f"{met} of {len(figures['verdicts'])} met; {figures['rounds']['rounds']} rounds: "
        f"{figures['rounds']['drafted_differ']} drafted otherwise, "
        f"{figures['rounds']['accepted_differ']} accepted otherwise than replay predicts; "
        f"{len(figures['failed'])} parts failed, {len(figures['not_run'])} were not run"
    )
    return figures


STARTS = ("pair", "plain starts", "with_agent starts")


def _done(rows: Mapping[str, Figures], part: str) -> Figures:
    """A part's figures; empty where it has none."""
    row = rows.get(part, {})
    return {} if "failed" in row else {k: v for k, v in row.items() if k != "part"}


def collect(folder: Path, results: Path | None = None) -> int:
    """Prints what is in a folder and writes it into the results, or into the folder itself where it
    was measured at the tiny size. 1 where a verdict is not met."""
    brought = Brought(folder)
    figures = gathered(brought, demo((brought.draft,)))
    name = "gpu-vllm" if brought.draft == DRAFT else f"gpu-vllm-{brought.draft}"
    file = result_of(name, folder, figures, results)
    for name in ("speed", "taus"):
        if rows := figures[name]:
            print("", *table_of(rows), sep="\n")
    for name in (
        "between_batches",
        "requests",
        "rounds",
        "retraced",
        "publications",
        "steps",
        "cost",
    ):
        print(f"{name}: {json.dumps(figures[name])}")
    for name in figures["not_run"]:
        print(f"not run: {name}")
    for name, cause in figures["failed"].items():
        print(f"failed: {name}: {cause}")
    print("", *table(["promise", "verdict"], figures["verdicts"].items()), sep="\n")
    print(f"{figures['summary']}\n{file}", flush=True)
    return int(not figures["holds"])

"""`check`: whether a draft is worth tuning, before any server runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from spectune.engines.vllm.command import short_draft
from spectune.optimizer.check import PairCheck, check_pair, memory
from spectune.optimizer.commands.common import Talk, next_command, open_store, pair_of
from spectune.optimizer.commands.decoding import fit_to, load, read_workload
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.report.words import interval
from spectune.optimizer.tuning.confirmation import FLOOR, finite
from spectune.optimizer.worth import GAIN, LEVEL, independent
from spectune.runtime.pair import PairSpec
from spectune.settings import Check as Settings
from spectune.settings import RaceSettings, SamplingSettings, Tune
from spectune.traces.acceptance import hardly_accepted
from spectune.traces.sanity import checked as texts_checked
from spectune.traces.store import TraceStore
from spectune.traces.store.query import first_positions
from spectune.traces.workloads import take

COLUMNS = (
    *("draft", "K", "conditional", "cumulative", "tau", "tau_interval", "draft_step", "break_even"),
    *("speedup", "speedup_interval"),
)


def check(s: Settings, talk: Talk) -> Result:
    began = time.perf_counter()
    spec = pair_of(s)
    unlimited = s.requests.model_copy(update={"limit": None})
    tuned = read_workload(s.model_copy(update={"requests": unlimited}), spec, talk)
    options = DecodeOptions.of(s.sampling)
    pair = load(s, spec, talk)
    workload = take(tuned, s.requests.limit, seed=s.requests.seed)
    workload = fit_to(pair, workload, options, s, talk)
    with _store(s) as store, pair.torch_threads():
        left_s = s.budget - (time.perf_counter() - began)
        checked = check_pair(
            store, pair, workload, options, s.search.gamma_max, budget_s=left_s,
            clock=time.perf_counter, progress=talk.progress,
        )  # fmt: skip
        first = first_positions(store, checked.recording)
    short = [line for draft in spec.drafts if (line := short_draft(spec, draft))]
    for line in (*hardly_accepted(first, pair.heads), *short):
        talk.tell(line)
    is_said = s.typed("sampling.max_new_tokens")
    longer = 1 if is_said else SamplingSettings().max_new_tokens / s.sampling.max_new_tokens
    tokens = checked.tokens / len(checked.texts) * len(tuned.requests) * longer
    minutes = (checked.tune_seconds(tokens) + RaceSettings().budget) / 60
    models, advice = memory(pair), _advice(checked)
    command = next_command(s, *_tune(s, spec))
    data = {
        "pair": spec.id,
        "heads": pair.hidden_states,
        "notes": list(pair.notes),
        **pair.place,
        "prompts": len(checked.texts),
        "tokens": checked.tokens,
        "seconds": time.perf_counter() - began,
        "without_draft_tokens_per_s": 1 / checked.token_s if checked.token_s else None,
        "lengths": checked.rows,
        "memory": models,
        "tune_minutes": minutes,
        "advice": advice,
        "worth": _worth(checked),
        "slope": checked.slope,
        "next": command,
    }
    text = (
        f"{len(checked.texts)} of {len(workload.requests)} prompts, {checked.tokens} tokens; draft "
        "step and break even: parts of a target pass\n"
        f"{advice}\n{command}  # {_about(minutes)} for {len(tuned.requests)} prompts"
    )
    printed = [{name: _printed(row[name]) for name in COLUMNS} for row in checked.rows]
    tables = [Table(printed), Table(models, title="memory")]
    return Result(text, data, checked.rows, tables)


@contextmanager
def _store(s: Settings) -> Iterator[TraceStore]:
    """The database that is typed, else one that is removed at the end."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        db = s.db if s.typed("db") else os.path.join(folder, "check.db")
        with open_store(s.model_copy(update={"db": db}), create=True) as store:
            yield store


def _printed(value: Any) -> Any:
    """An interval on one line; None where an end is not known."""
    if not isinstance(value, tuple):
        return value
    return None if None in value or value == (0.0, 0.0) else f"{value[0]:.2f}-{value[1]:.2f}"


def _advice(checked: PairCheck) -> str:
    """Whether to tune, in a sentence, with what makes its figures say less."""
    hint = "more prompts or a larger --budget would tell"
    best, worth, texts = checked.advised, checked.worth, checked.texts
    if best is None or worth is None:
        return f"Not shown to be worth it: too few rounds were measured; {hint}."
    ratio, *ends = worth.ratio
    count = len({*independent(texts).tolist()})
    judged = _counted(worth.conversations, "prompt" if count == len(texts) else "conversation")
    judged += " that did not choose it" * (worth.conversations < count)
    parts = [
        f"{best['draft']} at K={best['K']} is predicted {ratio:.2f} times as fast as no draft"
        f"{interval(finite(ends), LEVEL)} on {judged}"
    ]
    if best["draft_step"]:
        parts.append(
            f"its step costs {best['draft_step']:.2f} of a target pass, and gains below "
            f"{best['break_even']:.2f}"
        )
    gains = _shown(checked)
    if gains is None:
        parts.append(hint)
    verdict = {
        True: "Worth tuning on this device",
        False: f"Not worth tuning on this device, as no draft gains {100 * (FLOOR - 1):.0f}%,",
        None: "Not shown to be worth it",
    }[gains]
    seen = f"(a gain of {100 * GAIN:.0f}% is seen with a chance of {100 * worth.chance:.0f}%)"
    said = "; ".join([*parts, *texts_checked(texts).lines()])
    return f"{verdict} by {_counted(len(texts), 'prompt')} {seen}: {said}."


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def _shown(checked: PairCheck) -> bool | None:
    """:attr:`Worth.gains`; None too where most texts are of a kind that any draft guesses."""
    texts = texts_checked(checked.texts)
    if checked.worth is None or 2 * texts.repetitive > texts.requests:
        return None
    return checked.worth.gains


def _worth(checked: PairCheck) -> dict[str, Any] | None:
    """The verdict, JSON-ready."""
    best, worth = checked.advised, checked.worth
    if best is None or worth is None:
        return None
    return {
        "shown": _shown(checked),
        "draft": best["draft"],
        "K": best["K"],
        "speedup": worth.ratio[0],
        "interval": finite(worth.ratio[1:]),
        "conversations": worth.conversations,
        "chance_of_10_percent": worth.chance,
    }


def _about(minutes: float) -> str:
    if minutes < 100:
        return f"about {_counted(max(1, round(minutes)), 'minute')}"
    return f"about {minutes / 60:.0f} hours"


def _tune(s: Settings, spec: PairSpec) -> tuple[list[str], type[Tune], set[str]]:
    """The command that tunes this pair on this workload, its settings, and which of those typed do
    not go on to it."""
    words, without = ["tune"], {"target", "drafts", "requests.limit", "workload"}
    if s.drafts or spec.target == s.target:
        models = [f"target={spec.target}", *(f"drafts.{n}={p}" for n, p in spec.drafts.items())]
        words += [word for model in models for word in ("--set", model)]
    elif s.typed("target"):
        words += ["--pair", str(s.target)]
    if s.typed("workload"):
        words += [word for file in s.workload for word in ("--workload", file)]
    return words, Tune, without

"""What a search under load proposes, executed: the engine serves the recorded prompts again, under
the same loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np

from spectune.engines.protocol import Answered, Prompt, Wanted, numbered
from spectune.engines.start import start
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.on_engine import execute
from spectune.optimizer.simulate.load import Objective, Served
from spectune.optimizer.texts import ComparedTexts
from spectune.optimizer.under_load import Found, Scored, UnderLoad
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.progress import Progress
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import Tokens
from spectune.traces.tables import Trajectory

MOST_PASSES: Final = 9
"""Most times that each finalist is executed, however long the time."""


@dataclass(frozen=True)
class Executed:
    """A policy on the engine: what was ``predicted`` of it by load (nothing where too little was
    recorded for that), and what was ``served``, one for each time. ``texts`` are compared with the
    recorded, at temperature 0."""

    policy: Policy
    predicted: Mapping[str, Served]
    served: Mapping[str, tuple[Served, ...]]
    texts: ComparedTexts

    def median(self, name: str) -> Served:
        """Of an odd number of executions the one of median tokens per second, of an even one the
        lower of two."""
        ranked = sorted(self.served[name], key=lambda served: served.tokens_per_s)
        return ranked[(len(ranked) - 1) // 2]

    def to_json(self, level: Objective) -> dict[str, Any]:
        """Figures by load; times in seconds."""
        loads = []
        for name, served in self.served.items():
            predicted = self.predicted.get(name)
            loads.append({
                "load": name,
                "predicted_tokens_per_s": None if predicted is None else predicted.tokens_per_s,
                "predicted_tpot_s": None if predicted is None else predicted.mean_tpot_s,
                "each_tokens_per_s": [one.tokens_per_s for one in served],
                "measured": self.median(name).to_json(level),
            })  # fmt: skip
        return {
            "policy_id": self.policy.id,
            "label": self.policy.label(),
            "texts": self.texts.to_json(),
            "loads": loads,
        }


def finalists(found: Found, lab: UnderLoad, incumbent: Policy) -> list[Scored]:
    """Who is executed: the table, the best constant of each load, a server without a draft (also
    where nothing is predicted of it), one that has the draft loaded and drafts 0 tokens, and what
    is to be beaten, each once; that one first where it is none of the others, as the engine may not
    load its draft."""
    those = [found.table, *found.best.values(), found.off or Scored(AUTOREGRESSIVE, {})]
    those += [] if found.idle is None else [found.idle]
    if incumbent.id not in {s.policy.id for s in those}:
        try:
            predicted = {
                name: lab.simulate(incumbent, load).served for name, load in lab.loads.items()
            }
        except (PolicyError, TraceError):  # too little was recorded
            predicted = {}
        those.insert(0, Scored(incumbent, predicted))
    return list({s.policy.id: s for s in those}.values())


def pass_s(those: Sequence[Scored]) -> float:
    """The seconds that executing all once takes, as predicted, starts left out; of whom nothing is
    predicted as the others."""
    known = [sum(served.seconds for served in s.served.values()) for s in those if s.served]
    return sum(known) / len(known) * len(those)


def passes_of(those: Sequence[Scored], budget_s: float) -> int:
    """How often all are executed in a time, at least once."""
    one = pass_s(those)
    return max(1, min(MOST_PASSES, int(budget_s / one) if one > 0 else MOST_PASSES))


def execute_all(
    lab: UnderLoad,
    spec: PairSpec,
    those: Sequence[Scored],
    passes: int,
    progress: Progress,
    *,
    threads: int | None = None,
) -> list[Executed]:
    """Every policy under every load, ``passes`` times in turn, on the engine that was recorded: it
    is started for each draft of each pass, so that what the machine does meanwhile falls on all
    alike. Raises TraceError for texts that cannot be served again as they were, PairError or
    EngineError where the engine cannot start with a draft, EngineError where it fails."""
    texts = _texts(lab)
    options = DecodeOptions(lab.info.sampling, texts[0].max_new_tokens)
    recorded = [Prompt("", text.category, tuple(text.prompt_ids.tolist())) for text in texts]
    longest = max(len(prompt.ids) for prompt in recorded) + options.max_new_tokens
    groups = dict[str, list[Scored]]()
    for scored in those:
        groups.setdefault(lab.server_draft(scored.policy) or "none", []).append(scored)
    served: dict[tuple[str, str], list[Served]] = {
        (s.policy.id, name): [] for s in those for name in lab.loads
    }
    found = {s.policy.id: _Texts(s.policy, texts) for s in those}
    for draft, group in passes * list(groups.items()):
        most = max(1, *(s.policy.gamma_max for s in group))
        wanted = Wanted(draft, most, lab.rules.max_num_seqs, longest, threads)
        with closing(start(lab.engine.name, spec, wanted)) as running:
            for policy, (name, load) in product((s.policy for s in group), lab.loads.items()):
                prompts = numbered(recorded, len(load.arrivals) or lab.count)
                answered = list(execute(running, prompts, policy, load, options))
                served[policy.id, name].append(served_of(answered))
                if options.sampling.greedy:
                    found[policy.id].add(name, answered, running.runs_on["dtype"])
                progress("execute", sum(map(len, served.values())), passes * len(served))
    return [
        Executed(
            s.policy,
            s.served,
            {name: tuple(served[s.policy.id, name]) for name in lab.loads},
            found[s.policy.id].compared,
        )
        for s in those
    ]


def _texts(lab: UnderLoad) -> list[Trajectory]:
    """Those that were recorded. Raises TraceError where an execution is not told what they
    asked."""
    texts = [_whole(lab.trace.trajectories[r]) for r in lab.trace.order]
    is_mixed = len({text.max_new_tokens for text in texts}) > 1
    if is_mixed or any(text.finish == "stop" for text in texts):
        why = (
            "for different numbers of tokens"
            if is_mixed
            else "to end at a stop string or token, or were left by their clients"
        )
        raise TraceError(
            f"recording {lab.info.id}: its requests asked {why}, which an execution is not told; "
            "leave --execute out"
        )
    return texts


class _Texts:
    """A policy's texts beside those recorded; autoregression's also beside those of its first
    execution under the same load."""

    def __init__(self, policy: Policy, recorded: Sequence[Trajectory]) -> None:
        self.compared = ComparedTexts(0, 0, "", batch="under the same load")
        self._plain = not (policy.speculates and policy.gamma_max)
        self._recorded = recorded
        self._first: dict[tuple[str, int], Any] = {}

    def add(self, load: str, answered: Sequence[Answered], dtype: str) -> None:
        differ = repeats_differ = repeats = 0
        for done in answered:
            number, ids = int(done.trajectory.request_id), done.trajectory.output_ids
            differ += not np.array_equal(
                ids, self._recorded[number % len(self._recorded)].output_ids
            )
            if self._plain:
                first = self._first.setdefault((load, number), ids)
                repeats += first is not ids
                repeats_differ += not np.array_equal(ids, first)
        one = ComparedTexts(differ, len(answered), dtype, repeats_differ, repeats)
        self.compared = replace(self.compared + one, dtype=dtype)


def _whole(rest: Trajectory) -> Trajectory:
    """A text of the trace with its first token, which the trace counts to the prompt."""
    prompt, output = np.split(
        np.concatenate((rest.prompt_ids, rest.output_ids)), [len(rest.prompt_ids) - 1]
    )
    tokens = Tokens(prompt, output)
    return replace(rest, tokens=tokens, max_new_tokens=rest.max_new_tokens + 1)


def served_of(answered: Sequence[Answered]) -> Served:
    """What was executed, as a simulation has it."""
    return Served(
        np.array([done.arrived_s for done in answered]),
        np.array([done.first_token_s for done in answered]),
        np.array([done.finished_s for done in answered]),
        np.array([len(done.trajectory.output_ids) for done in answered], dtype=np.int64),
    )

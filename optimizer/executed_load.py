"""What a search under load proposes, executed: the engine serves the recorded prompts again, under
the same loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, Final

import numpy as np

from spectune.engines.protocol import Answered, Prompt, Wanted
from spectune.engines.start import start
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.on_engine import execute
from spectune.optimizer.simulate.load import Objective, Served
from spectune.optimizer.under_load import Found, Scored, UnderLoad
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import Policy
from spectune.runtime.progress import Progress
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import Trajectory

MOST_PASSES: Final = 9
"""Most times that each finalist is executed, however long the time."""


@dataclass(frozen=True)
class Executed:
    """A policy on the engine: what was ``predicted`` of it by load (nothing where too little was
    recorded for that), and what was ``served``, one for each time. ``differ``: texts that were
    others than the recorded."""

    policy: Policy
    predicted: Mapping[str, Served]
    served: Mapping[str, tuple[Served, ...]]
    differ: int

    def median(self, name: str) -> Served:
        """Of an odd number of executions the one of median tokens per second, of an even one the
        lower of two."""
        ranked = sorted(self.served[name], key=lambda served: served.tokens_per_s)
        return ranked[(len(ranked) - 1) // 2]

    def to_json(self, level: Objective) -> dict[str, Any]:
        """Figures by load; times in seconds."""
        loads = []
        for name, served in self.served.items():
            told = self.median(name).to_json(level)
            del told["load"]
            predicted = self.predicted.get(name)
            loads.append({
                "load": name,
                "predicted_tokens_per_s": None if predicted is None else predicted.tokens_per_s,
                "predicted_tpot_s": None if predicted is None else predicted.mean_tpot_s,
                "each_tokens_per_s": [one.tokens_per_s for one in served],
                "measured": told,
            })  # fmt: skip
        return {
            "policy_id": self.policy.id,
            "label": self.policy.label(),
            "texts_differ": self.differ,
            "loads": loads,
        }


def finalists(found: Found, lab: UnderLoad, incumbent: Policy) -> list[Scored]:
    """Who is executed: the table, the best constant of each load, no speculation, and what is to be
    beaten, each once."""
    those = [found.table, *found.best.values()]
    those += [] if found.nothing is None else [found.nothing]
    if incumbent.id not in {s.policy.id for s in those}:
        try:
            predicted = {
                name: lab.simulate(incumbent, load).served for name, load in lab.loads.items()
            }
        except (PolicyError, TraceError):  # too little was recorded
            predicted = {}
        those.append(Scored(incumbent, predicted))
    return list({s.policy.id: s for s in those}.values())


def pass_s(those: Sequence[Scored]) -> float:
    """The seconds that executing all once takes, as predicted, starts left out; of whom nothing is
    predicted as the others."""
    known = [
        sum(served.seconds for served in scored.served.values())
        for scored in those
        if scored.served
    ]
    return sum(known) / len(known) * len(those)


def passes_of(those: Sequence[Scored], budget_s: float) -> int:
    """How often all are executed in a time, at least once."""
    one = pass_s(those)
    return max(1, min(MOST_PASSES, int(budget_s / one) if one > 0 else MOST_PASSES))


class Execution:
    """Executes finalists on the engine that was recorded. Raises TraceError for texts that cannot
    be served again as they were."""

    def __init__(self, lab: UnderLoad, spec: PairSpec, progress: Progress) -> None:
        texts = [_whole(lab.trace.trajectories[r]) for r in lab.trace.order]
        asked = {text.max_new_tokens for text in texts}
        if len(asked) > 1 or any(text.finish == "stop" for text in texts):
            why = "for different numbers of tokens" if len(asked) > 1 else "to end at a stop string"
            raise TraceError(
                f"recording {lab.info.id}: its requests asked {why}, which an execution is not "
                "told; leave --execute out"
            )
        self._lab, self._spec, self._texts, self._progress = lab, spec, texts, progress
        self._options = DecodeOptions(lab.info.sampling, texts[0].max_new_tokens)

    def run(self, those: Sequence[Scored], passes: int) -> list[Executed]:
        """Every policy under every load, ``passes`` times in turn: an engine is started for each
        draft of each pass, so that what the machine does meanwhile falls on all alike. Raises
        EngineError where the engine fails."""
        lab, groups = self._lab, dict[str, list[Scored]]()
        for scored in those:
            groups.setdefault(lab.loaded(scored.policy) or "none", []).append(scored)
        served: dict[tuple[str, str], list[Served]] = {
            (s.policy.id, name): [] for s in those for name in lab.loads
        }
        differ = dict.fromkeys((s.policy.id for s in those), 0)
        total = passes * len(served)
        for _ in range(passes):
            for draft, group in groups.items():
                with closing(
                    start(lab.engine.name, self._spec, self._wanted(draft, group))
                ) as running:
                    for scored in group:
                        for name, load in lab.loads.items():
                            prompts = self._prompts(len(load.arrivals) or lab.count)
                            answered = list(
                                execute(running, prompts, scored.policy, load, self._options)
                            )
                            served[scored.policy.id, name].append(served_of(answered))
                            differ[scored.policy.id] += self._differ(answered)
                            self._progress("execute", sum(map(len, served.values())), total)
        return [
            Executed(
                s.policy,
                s.served,
                {name: tuple(served[s.policy.id, name]) for name in lab.loads},
                differ[s.policy.id],
            )
            for s in those
        ]

    def _wanted(self, draft: str, group: Sequence[Scored]) -> Wanted:
        longest = max(len(text.prompt_ids) for text in self._texts) + self._options.max_new_tokens
        return Wanted(
            draft,
            max(1, *(s.policy.gamma_max for s in group)),
            self._lab.rules.max_num_seqs,
            longest,
        )

    def _prompts(self, count: int) -> tuple[Prompt, ...]:
        """The recorded prompts in order, from the first again where there are fewer."""
        again = islice(cycle(self._texts), count)
        return tuple(
            Prompt(f"{n}", text.category, tuple(text.prompt_ids.tolist()))
            for n, text in enumerate(again)
        )

    def _differ(self, answered: Sequence[Answered]) -> int:
        """Greedy texts that are others than the recorded."""
        if not self._options.sampling.greedy:
            return 0
        recorded = self._texts
        return sum(
            not np.array_equal(
                recorded[int(done.trajectory.request_id) % len(recorded)].output_ids,
                done.trajectory.output_ids,
            )
            for done in answered
        )


def _whole(rest: Trajectory) -> Trajectory:
    """A text of the trace with its first token, which the trace counts to the prompt."""
    before, first = rest.prompt_ids[:-1], rest.prompt_ids[-1:]
    output = np.concatenate((first, rest.output_ids))
    return replace(
        rest, prompt_ids=before, output_ids=output, max_new_tokens=rest.max_new_tokens + 1
    )


def served_of(answered: Sequence[Answered]) -> Served:
    """What was executed, as a simulation has it."""
    return Served(
        np.array([done.arrived_s for done in answered]),
        np.array([done.first_token_s for done in answered]),
        np.array([done.finished_s for done in answered]),
        np.array([len(done.trajectory.output_ids) for done in answered], dtype=np.int64),
    )

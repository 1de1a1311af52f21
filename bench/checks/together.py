"""Several requests at once: texts and rounds are those of one request at a time, and replay is the
loop, step by step.

In float64, on the demo pair: what models decode for clients beside each request alone and beside
its replay; and over recorded traces by a simulated clock, under arrivals, extents and tables by
load, the compiled replay beside the loop itself. Then many requests under publications that never
rest: texts, and the memory that is left.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from batch_oracle import by_the_loop

from bench.harness import say, state_folder
from bench.lab import Lab, laboratory, spread_over
from spectune.engines.engine import Load, Prompt, numbered
from spectune.optimizer.decoder_engine import DecoderEngine, LoadQueue
from spectune.optimizer.replay.batches import Seating, serve_decoder
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.runtime.costs import FURTHER_ROUND, FURTHER_TARGET
from spectune.runtime.decoder import Decoder, check_together, prepare_for
from spectune.runtime.loop import DecodeRequest, StaticSource, decode_rounds
from spectune.runtime.policies.document import EXPANDED_LIMIT, Policy, parse_policy
from spectune.runtime.policies.plan import Plan, prepare
from spectune.traces.cost_table import CostTable
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Request, Sampling, Step
from spectune.traces.tables import LatencyProfile, Trajectory

SAMPLINGS = Sampling(), Sampling(1.0, seed=5)
CLIENTS = 8


def check(quick: bool) -> dict[str, Any]:
    """Counts what differs; nothing may."""
    state = state_folder(quick)
    rows: list[dict[str, Any]] = []
    steps = differ = 0
    for turn, sampling in enumerate(SAMPLINGS):
        lab = laboratory(state, "demo", sampling, quick, "float64")
        trace = lab.trace()
        policies = [*usable(lab, turn, 1 if quick else 4), *tables(lab, turn)]
        for policy in policies:
            rows.append(by_models(lab, trace, policy, 2 if quick else 1))
        wanted = 200 if quick else 10_000
        done, wrong = over_the_trace(lab, trace, policies, wanted, seed=turn)
        steps, differ = steps + done, differ + wrong
    lived = served_on(lab, 24 if quick else 200, 8 if quick else 50)
    sums = {key: sum(row[key] for row in rows) for key in rows[0] if key not in ("policy", "tree")}
    trees = sum(row["rounds"] for row in rows if row["tree"])
    wrong = sums["rounds_differ"] + sums["texts_differ"] + sums["members_differ"] + differ
    grew = lived["memory_after_all"] / lived["memory_after_some"] - 1
    return {
        "holds": wrong == 0 and lived["texts_differ"] == 0 and grew <= 0.02,
        "summary": f"at {CLIENTS} clients {sums['texts_differ']} of {sums['texts']} texts and "
        f"{sums['rounds_differ']} of {sums['rounds']} rounds ({trees} of trees and heads) are not "
        f"those alone; {sums['members_differ']} of {sums['steps']} steps of models and {differ} of "
        f"{steps} steps of the loop over a trace are not as replayed; of {lived['requests']} "
        f"requests at 16 seats under {lived['publications']} publications "
        f"{lived['texts_differ']} texts differ, memory grew by {100 * grew:.1f}% after the first "
        f"{lived['some']}",
        "rows": rows,
        "trace_steps": steps,
        "trace_steps_differ": differ,
        "served_on": lived,
    }


def usable(lab: Lab, turn: int, each: int) -> Iterator[Policy]:
    """Up to ``each`` chains and trees of every draft, of one in two by ``turn``, that several
    requests can be decoded by."""
    for policies in (lab.chains(), lab.grown()):
        for draft in lab.pair.draft_names:
            of_draft = []
            for policy in policies:
                try:
                    check_together(planned(lab, policy))
                except PolicyError:
                    continue
                of_draft += [policy] * (policy.draft == draft)
            yield from spread_over(of_draft[turn % 2 :: 2], each)


def tables(lab: Lab, turn: int) -> list[Policy]:
    """Tables by load of a tree, chains and none."""
    tree = {"growth": {"kind": "top_k", "width": 4}, "select": {"top_n": 12}}
    fsm = {"kind": "fsm", "gamma_max": 6}
    small, head = ({"draft": draft, "window": fsm} for draft in ("small", "head"))
    entries: list[list[Any]] = [[{**head, **tree}, small, {}], [small, {**small, **tree}, head]]
    return [
        parse_policy({"by_load": dict(zip(("1", "3", "6"), one, strict=True))})
        for one in entries[turn:] + entries[:turn]
    ]


def planned(lab: Lab, policy: Policy) -> Plan:
    how: dict[str, Any] = {"profile": lab.profile, "artifacts": lab.find}
    return prepare(policy, lab.pair.draft_names, **how)


def by_models(lab: Lab, trace: ReplayTrace, policy: Policy, each: int) -> dict[str, Any]:
    """What models decode for clients beside the texts as recorded, each request alone under the
    plans that were in force for it, and the replay of the load."""
    texts, plan = trace.trajectories, planned(lab, policy)
    count = len(texts) // each
    engine = DecoderEngine(lab.pair, CLIENTS, profile=lab.profile, artifacts=lab.find)
    prompts = numbered(
        (
            Prompt("", t.category, tuple(t.prompt_ids.tolist()), seeded_as=t.request_id)
            for t in texts
        ),
        count,
    )
    sampling, most = lab.options.sampling, lab.options.max_new_tokens
    how: dict[str, Any] = {"sampling": sampling, "max_new_tokens": most}
    answers = list(engine.execute(prompts, policy, Load(CLIENTS), **how))
    found = serve_decoder(trace, plan, Load(CLIENTS), Seating(CLIENTS), None, count=count,
                          members=True)  # fmt: skip
    ready = prepare_for(lab.pair, policy, profile=lab.profile, artifacts=lab.find)
    single = Decoder(lab.pair, StaticSource(ready))
    batches = np.bincount(found.members[:, 0])
    row = {"texts": count, "texts_differ": 0, "rounds": 0, "rounds_differ": 0, "members_differ": 0}
    for answer in answers:
        n, own = int(answer.trajectory.request_id), answer.steps
        text = texts[n]
        row["texts_differ"] += answer.trajectory.output_ids.tolist() != text.output_ids.tolist()
        sizes = [step.batch for step in own]
        row["rounds"] += len(own)
        row["rounds_differ"] += min(
            unlike([shape(step) for step in own], list(map(shape, alone)))
            for alone in as_if_alone(single, _request(single, text), ready, sizes)
        )
        members = found.members[found.members[:, 1] == n]
        replayed = [
            (int(batches[step]), plan.plans[p].policy_id, drafted, accepted)
            for step, _, p, drafted, accepted in members.tolist()
        ]
        executed = [(s.batch, s.policy, s.drafted, s.accepted) for s in own]
        row["members_differ"] += replayed != executed
    tree = policy.is_tree or any(p.draft in lab.pair.heads for p in policy.candidates)
    about = {"policy": policy.label(), "tree": tree, "steps": len(found.steps), **row}
    say(f"T={sampling.temperature:g} {policy.label()[:70]}: {row}")
    return about


def shape(step: Any) -> tuple[int, ...]:
    """All that a round says but for its times and what ran beside it."""
    return (
        step.start, step.drafted, step.accepted, step.emitted, step.draft_steps, step.lag,
        step.depth, step.bin,
    )  # fmt: skip


def _request(decoder: Decoder, text: Trajectory) -> DecodeRequest:
    item, ids = Request(text.request_id, text.category), text.prompt_ids.tolist()
    return decoder.request(item, ids, text.sampling, text.max_new_tokens, drafts=())


def unlike(one: Sequence[object], other: Sequence[object]) -> int:
    """In how many places two sequences differ."""
    return max(len(one), len(other)) - sum(a == b for a, b in zip(one, other, strict=False))


def as_if_alone(
    decoder: Decoder, request: DecodeRequest, plan: Plan, sizes: Sequence[int]
) -> Iterator[list[Step]]:
    """The rounds of a request alone, as if so many ran in each of its steps. As it was admitted
    others of its first step may not have been there yet, which tells what drafts have read by
    then; so one sequence of rounds for each number that may have run."""
    admitted = {plan.at(size).policy_id: size for size in range(1, sizes[0] + 1)}
    for size in admitted.values():
        source = ByLoad(plan, [size, *sizes])
        yield [told.step for told in decode_rounds(decoder.backend, request, source)]


@dataclass
class ByLoad:
    """A plan's entries for one request alone, as if so many ran whenever it is looked at: as the
    request is admitted, then before each round."""

    plan: Plan
    sizes: Sequence[int]
    looks: int = 0

    def current(self) -> Plan:
        size = self.sizes[min(self.looks, len(self.sizes) - 1)]
        self.looks += 1
        return self.plan.at(size)


def over_the_trace(
    lab: Lab, trace: ReplayTrace, policies: Sequence[Policy], wanted: int, seed: int
) -> tuple[int, int]:
    """Steps of the loop over a trace by a simulated clock, under random arrivals, seats, extents
    and policies, and how many are not as replayed."""
    rng, steps, differ = np.random.default_rng(seed), 0, 0
    most = int((trace.prompts + trace.budgets).max() + 1 + EXPANDED_LIMIT)
    profile = with_further(lab.profile)
    while steps < wanted:
        policy = policies[int(rng.integers(len(policies)))]
        plan, seats = planned(lab, policy), int(rng.integers(1, 17))
        slots = int(rng.choice([0, 0, 3 * most]))
        part = trace.select(rng.integers(0, len(trace.trajectories), 24).tolist())
        load = Load(int(rng.integers(1, 20)))
        if rng.integers(2):
            gaps = rng.exponential(rng.choice([0.002, 0.02, 0.2]), 40)
            load = Load(arrivals=tuple(np.cumsum(gaps).tolist()))
        count, seating = len(load.arrivals) or 40, Seating(seats, slots)
        found = serve_decoder(part, plan, load, seating, profile, count=count, members=True)
        members, ends = by_the_loop(part, plan, load, seating, profile, count)
        mine, theirs = (_by_step(rows) for rows in (found.members.tolist(), members))
        steps += len(theirs)
        differ += sum(a != b for a, b in zip(mine, theirs, strict=False))
        differ += abs(len(mine) - len(theirs))
        differ += int((np.abs(found.ends_s - ends) > 1e-9 * np.abs(ends)).sum())
    say(f"{differ} of {steps} steps over a trace differ")
    return steps, differ


def with_further(profile: LatencyProfile) -> LatencyProfile:
    """With made-up costs of the requests beyond one, where they were not measured."""
    table = CostTable((1e-4, 2e-3), ("batch",), ((1.0, 8.0),))
    names = [FURTHER_TARGET, FURTHER_ROUND]
    names += [f"further pass/{draft}" for draft in (*profile.drafts, *profile.tree_drafts)]
    return replace(profile, terms={**dict.fromkeys(names, table), **profile.terms})


def _by_step(members: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    found: list[list[tuple[int, ...]]] = []
    for step, *rest in members:
        if step == len(found):
            found.append([])
        found[step].append(tuple(rest))
    return found


@dataclass
class Publishing:
    """A source whose policy is another every so many steps."""

    plans: Iterator[Plan]
    every: int
    steps: int = 0
    swaps: int = 0
    plan: Plan | None = None

    def current(self) -> Plan:
        if self.plan is None or self.steps >= self.every:
            self.plan, self.steps = next(self.plans), 0
            self.swaps += 1
        return self.plan


def served_on(lab: Lab, count: int, some: int) -> dict[str, Any]:
    """Many requests at 16 seats while policies change all the time: how many texts are not as
    recorded, and the memory after ``some`` of them and after all."""
    policies = [*usable(lab, 0, 1), *tables(lab, 0)]
    how: dict[str, Any] = {"profile": lab.profile, "artifacts": lab.find}
    plans = [prepare_for(lab.pair, policy, **how) for policy in policies]
    source = Publishing(cycle(plans), every=7)
    decoder = Decoder(lab.pair, source, seats=16)
    texts = list(islice(cycle(lab.trace().trajectories), count))
    requests = [replace(_request(decoder, text), id=f"{n}") for n, text in enumerate(texts)]
    queue, output, ended = LoadQueue(requests, Load(16)), dict[str, list[int]](), 0
    memory = {}
    for rounds in decoder.steps(queue):
        source.steps += 1
        for one in rounds:
            output.setdefault(one.request.id, []).extend(one.tokens)
            if one.finish is not None:
                queue.answered()
                ended += 1
                if ended in (some, count):
                    gc.collect()
                    memory[ended] = resident()
    differ = sum(output[f"{n}"] != text.output_ids.tolist() for n, text in enumerate(texts))
    return {
        "requests": count, "some": some, "texts_differ": differ, "publications": source.swaps,
        "memory_after_some": memory[some], "memory_after_all": memory[count],
    }  # fmt: skip


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

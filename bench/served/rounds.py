"""Every round of a vLLM server, predicted from what its draft proposed once.

By drafter (a draft model, an EAGLE-3 head, prompt lookup, an MTP layer that the demo trains) greedy
texts are recorded twice: by a server that accepts none of its drafts (not of Gemma), and by
requests that are forced to emit what was recorded. Then every number of draft tokens and two tables
by load are served, one request at a time and eight, and each round is held against what either
recording predicts. Texts at temperature 0.8 are forced as well: rounds are held against them, and
what they predict of other numbers of tokens against texts that those served. What a drafter came to
is stored as it ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness import say, state_folder
from bench.lab import chain, requests, stored
from bench.served.live import (
    DRAFTERS,
    METHOD_SEATS,
    MOST,
    NAMES,
    REAL,
    SMALL,
    drafting,
    methods_of,
)
from spectune.engines.abilities import VLLM
from spectune.engines.engine import Answered, Load, Prompt
from spectune.engines.vllm.retrace import Retracer
from spectune.engines.vllm.server import OwnServer
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.on_engine import EngineRun, prompts_of, record_on
from spectune.optimizer.replay.trace import open_trace, simulate
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.text_codec import load_codec
from spectune.traces.schema import Sampling
from train_demo import mtp

TOKENS, COUNT = 64, 10
TABLES = ({"1": 6, "3": 0, "6": 2}, {"1": 8, "2": 5, "4": 3, "7": 1})
TEMPERATURE, SAMPLED_COUNT = 0.8, 300
OF_TAU = (1, 2, 4)
"""Tokens whose mean accepted length is predicted from texts at temperature 0.8."""
RECORDED = 4
"""Tokens that the recorded texts were served with."""
REAL_GAMMAS = (2, 8)
"""Numbers of tokens that are served of Gemma 3 270M, beside a table."""
Round = tuple[int, int, int]
"""Start, drafted, accepted."""


def measure(quick: bool) -> dict[str, Any]:
    drafters = stored_by(DRAFTERS, "served-rounds.json", quick)
    figures = drafters.values()
    rounds = sum(each["rounds"] + each["sampled"]["rounds"] for each in figures)
    differ = sum(each["differ"] + each["sampled"]["differ"] for each in figures)
    proposals = sum(each["proposals_differ"] for each in figures)
    return {
        "summary": f"{rounds} rounds of {', '.join(drafters)}: {differ} differ; of the proposals "
        f"that were recorded twice {proposals} do",
        "holds": not differ and not proposals and all(map(is_near, figures)),
        "rounds": rounds,
        "differ": differ,
        "drafters": drafters,
    }


def measure_real(quick: bool) -> dict[str, Any]:
    """Rounds of Gemma 3 270M (`make real`) by prompt lookup, and by the draft model that
    `tools/gemma` trained, where the pair has it."""
    spec = read_pair(str(REAL))
    drafters = stored_by(methods_of(spec), "served-rounds-real.json", quick, spec, 32)
    figures, by = drafters.values(), " and ".join(NAMES[method] for method in drafters)
    rounds, differ = (sum(each[name] for each in figures) for name in ("rounds", "differ"))
    unlike = sum(len(row["texts"]) for each in figures for row in each["rows"])
    executed = sum(COUNT * len(each["rows"]) for each in figures)
    return {
        "summary": f"{rounds} rounds of Gemma 3 270M by {by}: {differ} differ; {unlike} of "
        f"{executed} texts do",
        "holds": not any(each["differ"] or each["proposals_differ"] for each in figures),
        "rounds": rounds,
        "differ": differ,
        "drafters": drafters,
    }


def stored_by(
    methods: Iterable[str], name: str, quick: bool, *about: Any
) -> dict[str, dict[str, Any]]:
    """The figures of each drafter, which are stored as they come, and not measured again."""
    state = state_folder()
    file = state / name
    drafters = json.loads(file.read_text()) if file.exists() and not quick else {}
    for method in methods:
        if method not in drafters:
            drafters[method] = Drafter(state, method, quick, *about).measure()
            say({k: v for k, v in drafters[method].items() if k != "rows"})
            if not quick:
                file.write_text(json.dumps(drafters))
    return drafters


def is_near(figures: Mapping[str, Any]) -> bool:
    """Whether what was predicted of other texts is within 2% where its half-width is under 1%."""
    return all(
        abs(row["predicted"]["tau"] / row["executed"]["tau"] - 1) < 0.02
        for row in figures["sampled"]["tau"]
        if row["predicted"]["half_width"] < 0.01
    )


class Drafter:
    """One drafter of vLLM, its prompts and where its texts are recorded."""

    def __init__(
        self,
        state: Path,
        method: str,
        quick: bool,
        real: PairSpec | None = None,
        tokens: int = TOKENS,
    ) -> None:
        self.method, self.quick, self.draft = method, quick, DRAFTERS[method]
        self.real, self.spec = real is not None, real or read_pair("demo")
        if method == "mtp":
            target = mtp.checkpoint(state / "mtp")
            self.spec = PairSpec(name="mtp", target=str(target), methods=("mtp",))
        name = f"rounds-{method}{'-real' * self.real}.db"
        self.store = stored(state / name, fresh=True)
        self.tokens = 12 if quick else tokens
        self.codec = load_codec(self.spec)

    def prompts(self, count: int) -> tuple[Prompt, ...]:
        return prompts_of(self.codec, requests(4 if self.quick else count), self.options(0.0))

    def options(self, temperature: float) -> DecodeOptions:
        return DecodeOptions(Sampling(temperature), self.tokens)

    def serving(self, **more: Any) -> AbstractContextManager[OwnServer]:
        """A server of it with prefix caching, which makes forced requests cheap."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return drafting(self.spec, self.method, SMALL, "--enable-prefix-caching", **more)

    def record(self, server: OwnServer, count: int, temperature: float) -> tuple[str, int]:
        """A recording of what a server serves and what its draft proposes there; its positions."""
        policy, options = chain(self.draft, RECORDED), self.options(temperature)
        run = EngineRun(self.prompts(count), policy, Load(METHOD_SEATS), options)
        info = record_on(self.store, self.spec, server, run, fresh=True)
        self.store.finish_recording(info.id)
        positions = Retracer(self.store, info, server, outstanding=METHOD_SEATS).run().positions
        say(f"{self.method}: {positions} positions at temperature {temperature:g}")
        return info.id, positions

    def measure(self) -> dict[str, Any]:
        gammas: Sequence[int] = range(0, MOST + 1, 4 if self.quick else 1)
        of_load = TABLES
        if self.real:
            gammas, of_load = REAL_GAMMAS, TABLES[:1]
        windows = ({"kind": "by_load", "gamma": table} for table in of_load)
        tables = ({"draft": self.draft, "window": window} for window in windows)
        policies = [*(chain(self.draft, g) for g in gammas), *map(parse_policy, tables)]
        none = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0] * MOST}
        recordings, positions = dict[str, str](), dict[str, int]()
        if not self.real:
            with self.serving(**none) as server:
                recordings["zero"], positions["zero"] = self.record(server, COUNT, 0.0)
        with self.serving() as server:
            forced, positions["forced"] = self.record(server, COUNT, 0.0)
            recordings["forced"] = forced
            rows: list[dict[str, Any]] = []
            for policy in policies:
                for clients in (1, METHOD_SEATS):
                    answers = self.execute(server, COUNT, policy, clients, 0.0)
                    about: dict[str, Any] = {"policy": policy.label(), "clients": clients}
                    for name, recording in recordings.items():
                        found = self.compare(policy, answers, recording)
                        about |= found if name == "forced" else {"differ_by_zero": found["differ"]}
                    rows.append(about)
                    say(rows[-1])
            sampled = {} if self.real else self.measure_sampled(server)
        return {
            "positions": positions,
            "proposals_differ": self.proposals_differ(*recordings.values()),
            "first_position": self.first_position(forced),
            "rounds": sum(row["rounds"] for row in rows),
            "differ": sum(row["differ"] + row.get("differ_by_zero", 0) for row in rows),
            "sampled": sampled,
            "rows": rows,
        }

    def measure_sampled(self, server: OwnServer) -> dict[str, Any]:
        """Rounds over texts at temperature 0.8, and mean accepted lengths predicted from them."""
        count = SAMPLED_COUNT if self.method == "draft_model" else COUNT
        recording, positions = self.record(server, count, TEMPERATURE)
        recorded = self.store.load(recording, (), steps=True).requests
        answers = [Answered(request.trajectory, request.steps) for request in recorded]
        figures = self.compare(chain(self.draft, RECORDED), answers, recording)
        taus = []
        for gamma in OF_TAU if count == SAMPLED_COUNT else ():
            policy = chain(self.draft, gamma)
            replay = simulate(self.store, recording, policy, None).replay
            answers = self.execute(server, count, policy, METHOD_SEATS, TEMPERATURE)
            emitted = [[step.emitted for step in a.steps[1:]] for a in answers]
            executed = np.array([[len(each), sum(each)] for each in emitted])
            predicted = tau_of(replay.counts[:, :2])
            taus.append({"gamma": gamma, "predicted": predicted, "executed": tau_of(executed)})
            say(taus[-1])
        return {"positions": positions, **figures, "tau": taus}

    def execute(
        self, server: OwnServer, count: int, policy: Policy, clients: int, temperature: float
    ) -> list[Answered]:
        """The prompts served under a policy, in their order."""
        prompts = self.prompts(count)
        options = self.options(temperature)
        how: dict[str, Any] = {"sampling": options.sampling, "max_new_tokens": self.tokens}
        answers = server.execute(prompts, policy, Load(clients), **how)
        by_id = {answer.trajectory.request_id: answer for answer in answers}
        return [by_id[prompt.id] for prompt in prompts]

    def compare(
        self, policy: Policy, answers: Sequence[Answered], recording: str
    ) -> dict[str, Any]:
        """Executed rounds that a recording predicts; ``texts``: requests whose text is another."""
        trace = open_trace(self.store, recording, drafts=[self.draft]).trace
        gammas = VLLM.tables(policy, draft=self.draft, most=MOST, max_num_seqs=METHOD_SEATS)[0]
        rounds = differ = 0
        texts = []
        for n, (answer, text) in enumerate(zip(answers, trace.trajectories, strict=True)):
            begin, end = trace.offsets[n : n + 2]
            proposed = trace.copies[self.draft][:, begin:end]
            # the last round may draft, and accept, beyond the text
            executed = [
                (s.start, s.drafted, min(s.accepted, end - begin + 1 - s.start))
                for s in answer.steps[1:]
            ]
            predicted = predict(proposed, gammas, [step.batch for step in answer.steps])
            if answer.trajectory.output_ids.tolist()[1:] != text.output_ids.tolist():
                texts.append(answer.trajectory.request_id)
            rounds += len(executed)
            differ += sum(a != b for a, b in zip_longest(executed, predicted))
        return {"rounds": rounds, "differ": differ, "texts": texts}

    def proposals_differ(self, *recordings: str) -> int:
        """Positions at which recordings propose other tokens, or as many of another number."""
        traces = [open_trace(self.store, r, drafts=[self.draft]).trace for r in recordings]
        one, *others = (trace.copies[self.draft] for trace in traces)
        return sum(int((one != other).any(0).sum()) for other in others)

    def first_position(self, recording: str) -> float:
        """Share of the recorded positions at which the first proposed token is the text's."""
        _, agree = open_trace(self.store, recording, drafts=[self.draft]).trace.copies[self.draft]
        return float((agree > 0).mean())


def predict(
    proposed: npt.NDArray[np.uint8], gammas: Sequence[int], batches: Sequence[int]
) -> list[Round]:
    """The rounds of a text after its first token. ``proposed`` [2, positions]: from each start how
    many tokens are proposed, and how many of them the text goes on with; ``gammas``: drafted tokens
    by the batch size of the step before; ``batches``: of the executed steps."""
    start, rounds, (lengths, agree) = 0, list[Round](), proposed.astype(int)
    for batch in batches:
        if start >= len(lengths):
            break
        drafted = min(gammas[batch], lengths[start])
        accepted = min(drafted, agree[start])
        rounds.append((start + 1, drafted, accepted))
        start += accepted + 1
    return rounds


def tau_of(counts: npt.NDArray[np.int64]) -> dict[str, float]:
    """The mean accepted length of requests' rounds and tokens [requests, 2], and the half-width of
    its 95% interval over requests, as a share of it."""
    rounds, tokens = counts.T
    tau = tokens.sum() / rounds.sum()
    spread = np.sqrt(len(counts) / (len(counts) - 1) * np.square(tokens - tau * rounds).sum())
    return {"tau": float(tau), "half_width": float(1.96 * spread / rounds.sum() / tau)}

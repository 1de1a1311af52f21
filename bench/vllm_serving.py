"""What our scheduler costs a vLLM server on this machine's CPU, and how soon the server obeys a
publication.

    export SPECTUNE_VLLM_PYTHON=.venv-vllm/bin/python
    python bench/vllm_serving.py [--only recording reload sampled] [--alternations 12]

``recording``: tokens a second of 8 clients, with ``SPECTUNE_DB`` and without, two servers in turn.
``reload``: policies are published while 8 clients are served; for each that came into force, the
steps that were begun after the server had noticed it and still drafted as before. ``sampled``: tau
at temperature 0.8, where every execution has other texts, predicted from one recording and
executed.
Figures go to ``bench/results/vllm_serving.json``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from lab import (
    chain,
    demo,
    fixed,
    interval_of,
    record_engine,
    requests,
    run_parts,
    stored,
)
from transformers import AutoTokenizer

from spectune.db.database import open_database
from spectune.demo.prompts import demo_workload
from spectune.engines.protocol import Load, Prompt, Wanted
from spectune.engines.start import start
from spectune.engines.vllm.execute import Sending, body_of
from spectune.engines.vllm.server import DEPLOYMENT, Server, installed
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.on_engine import prompts_of
from spectune.optimizer.record import Look
from spectune.optimizer.simulate.trace import simulate
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.schema import Sampling, Step
from spectune.traces.store import TraceStore

CLIENTS, REQUESTS, TOKENS, MOST = 8, 32, 48, 8
PUBLICATIONS, PAUSE_S = 200, 0.1
TEMPERATURE, SAMPLED_CLIENTS, SAMPLED_DRAFTS, GAMMAS = 0.8, 32, ("small", "head"), (1, 2, 5, 8)
PROMPTS, TEXTS_EACH = 300, 4
HERE = Path(__file__).resolve().parent


def prompts() -> list[Prompt]:
    tokenizer = AutoTokenizer.from_pretrained(read_pair("demo").target)
    texts = [line["turns"][0] for line in demo_workload()][::4][:REQUESTS]
    return [Prompt(str(i), "", tuple(tokenizer(text)["input_ids"])) for i, text in enumerate(texts)]


@contextmanager
def server(*, records: bool) -> Iterator[Server]:
    """A server of the demo pair with its draft ``small``."""
    with TemporaryDirectory() as folder:
        wanted = Wanted("small", MOST, CLIENTS, 512)
        made = Server(installed(), Path(folder), read_pair("demo"), wanted)
        if not records:
            del made.environment["SPECTUNE_DB"]
        try:
            made.start()
            yield made
        finally:
            made.close()


def serve(of: Server, asked: list[Prompt]) -> float:
    """Seconds in which 8 clients have every prompt answered."""
    bodies = {i: body_of(str(i), prompt, Sampling(), TOKENS) for i, prompt in enumerate(asked)}
    began = time.perf_counter()
    with Sending(of.address, bodies, Load(CLIENTS), began) as sending:
        while len(sending.answered) < len(bodies):
            sending.check(of)
            time.sleep(0.002)
    return time.perf_counter() - began


def recording(alternations: int) -> dict[str, Any]:
    asked = prompts()
    ratios = []
    with server(records=True) as with_us, server(records=False) as without:
        for each in (with_us, without):
            serve(each, asked)
        for n in range(alternations):
            order = (with_us, without) if n % 2 else (without, with_us)
            seconds = {}
            for each in order:
                time.sleep(1)  # what the other server does after its last answer is over
                seconds[id(each)] = serve(each, asked)
            ratios.append(seconds[id(without)] / seconds[id(with_us)])
            said = f"{seconds[id(with_us)]:.2f} s, without {seconds[id(without)]:.2f} s"
            print(f"{n + 1}: tokens/s x {ratios[-1]:.4f} ({said})", file=sys.stderr)
    mean, *ends = interval_of(np.log(ratios))
    return {
        "clients": CLIENTS,
        "requests_a_run": len(asked),
        "tokens_per_s_ratio": mean,
        "interval_95": ends,
        "median": float(np.median(ratios)),
        "ratios": ratios,
    }


def reload(**_: Any) -> dict[str, Any]:
    asked, spec = prompts(), read_pair("demo")
    offset = time.time() - time.perf_counter()
    rng = np.random.default_rng(0)
    with server(records=True) as of, open_database(of.database) as database:
        store = TraceStore(database)
        store.put_pair(spec.id, spec.name, spec.to_json())
        serve(of, asked)
        published: dict[int, str] = {}

        def publish() -> None:
            for _ in range(PUBLICATIONS):
                gamma = int(rng.integers(0, MOST + 1))
                policy = parse_policy({"draft": "small", "window": fixed(gamma)})
                store.put_policy(policy.id, policy.spelled_out(), policy.label())
                how = {"actor": "bench", "deployment": DEPLOYMENT}
                new = store.publish(spec.id, of.device, policy.id, **how)
                published[new.version] = policy.id
                time.sleep(PAUSE_S)

        thread = threading.Thread(target=publish)
        thread.start()
        while thread.is_alive():
            serve(of, asked)
        time.sleep(2)  # what was served last is written
        info = store.list_recordings()[0]
        requests = store.load(info.id, steps=True).requests
        answers = [a for a in store.acknowledgements() if a.version in published]
    answers.sort(key=lambda a: a.at)
    texts: dict[bytes, set[bytes]] = {}
    for t in (r.trajectory for r in requests):
        texts.setdefault(t.prompt_ids.tobytes(), set()).add(t.output_ids.tobytes())
    noticed = [(a.at.timestamp() - offset, published[a.version]) for a in answers]
    late, after = obeyed(noticed, [s for r in requests for s in r.steps])
    return {
        "publications": len(published),
        "refused": sum(a.status != "applied" for a in answers),
        "noticed": len(noticed),
        "requests": len(requests),
        "texts_that_differ": sum(len(found) - 1 for found in texts.values()),
        "steps_late": {str(n): late.count(n) for n in sorted(set(late))},
        "ms_until_first_step": {
            "median": float(np.median(after)) * 1e3,
            "largest": max(after) * 1e3,
        },
    }


def obeyed(noticed: list[tuple[float, str]], steps: list[Step]) -> tuple[list[int], list[float]]:
    """For each notice, its moment and policy, while requests were served: the steps begun after it
    under another policy, and the seconds until the first under it."""
    begun = sorted({(s.ended_s - s.round_s, s.policy) for s in steps})
    late, after = [], []
    for (at, policy), (end, _) in zip(noticed, [*noticed[1:], (begun[-1][0], "")], strict=True):
        here = [(moment, by) for moment, by in begun if at < moment < end]
        first = next((i for i, (_, by) in enumerate(here) if by == policy), None)
        if first is not None:
            late.append(first)
            after.append(here[first][0] - at)
        elif len(here) > 1:
            late.append(len(here))
    return late, after


def sampled(**_: Any) -> dict[str, Any]:
    pair, options = demo(SAMPLED_DRAFTS), DecodeOptions(Sampling(TEMPERATURE), TOKENS)
    asked_once = requests(PROMPTS)
    several = (
        replace(request, id=f"{request.id}:{nth}")
        for nth in range(TEXTS_EACH)
        for request in asked_once.requests
    )
    workload = replace(asked_once, requests=tuple(several))
    asked = prompts_of(pair, workload, options)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        store = stored(Path(folder) / "sampled.db")
        for draft in SAMPLED_DRAFTS:
            with closing(
                start("vllm", pair.spec, Wanted(draft, MOST, SAMPLED_CLIENTS, 1024))
            ) as running:
                load, look = Load(SAMPLED_CLIENTS), Look((draft,), MOST)
                how = (workload, asked, chain(draft, 3), load, options, look)
                info = record_engine(store, pair, running, *how, fresh=True)
                for gamma in GAMMAS:
                    policy = chain(draft, gamma)
                    replayed = simulate(store, info.id, policy, None).replay
                    predicted = replayed.total.mean_accepted_length
                    served = running.execute(
                        asked, policy, load, sampling=options.sampling, max_new_tokens=TOKENS
                    )
                    rounds = [[step.emitted for step in done.steps[1:]] for done in served]
                    tau, half = tau_of(rounds)
                    row = {"draft": draft, "gamma": gamma, "predicted": predicted, "executed": tau}
                    rows.append({**row, "half_interval_95": half, "error": predicted / tau - 1})
                    print(rows[-1], file=sys.stderr)
    errors = np.abs([row["error"] for row in rows])
    return {
        "temperature": TEMPERATURE,
        "requests": len(asked),
        "largest_error": float(errors.max()),
        "median_error": float(np.median(errors)),
        "rows": rows,
    }


def tau_of(rounds: list[list[int]]) -> tuple[float, float]:
    """Tokens a round, and half of its 95% interval as a part of it: requests are drawn again
    (bootstrap)."""
    tokens, counts = np.array([sum(r) for r in rounds]), np.array([len(r) for r in rounds])
    drawn = np.random.default_rng(0).integers(0, len(rounds), (2000, len(rounds)))
    taus = tokens[drawn].sum(1) / counts[drawn].sum(1)
    tau = float(tokens.sum() / counts.sum())
    return tau, float((np.quantile(taus, 0.975) - np.quantile(taus, 0.025)) / 2 / tau)


PARTS = {"recording": recording, "reload": reload, "sampled": sampled}

if __name__ == "__main__":
    run_parts(
        __doc__, "vllm_serving", PARTS, lambda: {"vllm": installed().version}, alternations=12
    )

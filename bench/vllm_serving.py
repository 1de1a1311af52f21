"""What our scheduler costs a vLLM server on this machine's CPU, and how soon the server obeys a
publication.

    export SPECTUNE_VLLM_PYTHON=.venv-vllm/bin/python
    python bench/run.py vllm_serving [--only recording reload] [--alternations 12]

``recording``: tokens a second of 8 clients, with ``SPECTUNE_DB`` and without, two servers in turn.
``reload``: policies are published while 8 clients are served; for each that came into force, the
steps that were begun after the server had noticed it and still drafted as before.
Figures go to ``bench/results/vllm_serving.json``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from lab import fixed, interval_of, run_parts
from transformers import AutoTokenizer

from spectune.db.database import open_database
from spectune.demo.prompts import demo_workload
from spectune.engines.protocol import Load, Prompt, Wanted
from spectune.engines.vllm.execute import Sending, body_of
from spectune.engines.vllm.server import DEPLOYMENT, Server, installed
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.schema import Sampling, Step
from spectune.traces.store import TraceStore

CLIENTS, REQUESTS, TOKENS, MOST = 8, 32, 48, 8
PUBLICATIONS, PAUSE_S = 200, 0.1


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


PARTS = {"recording": recording, "reload": reload}


def main(arguments: Sequence[str]) -> None:
    versions = lambda: {"vllm": installed().version}  # noqa: E731
    run_parts(__doc__, "vllm_serving", PARTS, arguments, versions, alternations=12)

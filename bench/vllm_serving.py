"""What our scheduler costs a vLLM server on this machine's CPU, and how soon the server obeys a
publication.

    export SPECTUNE_VLLM_PYTHON=.venv-vllm/bin/python
    python bench/vllm_serving.py [--only recording added reload sampled] [--alternations 12]

``recording``: tokens a second of 8 clients, with ``SPECTUNE_DB`` and without, two servers in turn.
``added``: what recording adds to a step of the engine, by a stop-watch in its process. ``reload``:
policies are published while 8 clients are served; for each that came into force, the steps that
were begun after the server had noticed it and still drafted as before. ``sampled``: tau at
temperature 0.8, where every execution has other texts, predicted from one recording and executed.
Figures go to ``bench/results/vllm_serving.json``; alternations are added to those that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import scipy.stats
from lab import demo, environment, requests, stored
from transformers import AutoTokenizer

from spectune.db.database import open_database
from spectune.demo.prompts import demo_workload
from spectune.engines.protocol import Load, Prompt, Wanted
from spectune.engines.start import start
from spectune.engines.vllm.command import SCHEDULER
from spectune.engines.vllm.execute import Sending, body_of
from spectune.engines.vllm.server import DEPLOYMENT, Server, installed
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.on_engine import prompts_of, record_on
from spectune.optimizer.record import Look, look_around
from spectune.optimizer.simulate.trace import simulate
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import Policy, parse_plain_policy, parse_policy
from spectune.traces.schema import Sampling, Step
from spectune.traces.store import TraceStore

CLIENTS, REQUESTS, TOKENS, MOST = 8, 32, 48, 8
PUBLICATIONS, PAUSE_S = 200, 0.1
TEMPERATURE, SAMPLED, SAMPLED_DRAFTS, GAMMAS = 0.8, 300, ("small", "head"), (1, 2, 5, 8)
RESULTS = Path(__file__).resolve().parent / "results" / "vllm_serving.json"


def prompts() -> list[Prompt]:
    tokenizer = AutoTokenizer.from_pretrained(read_pair("demo").target)
    texts = [line["turns"][0] for line in demo_workload()][::4][:REQUESTS]
    return [Prompt(str(i), "", tuple(tokenizer(text)["input_ids"])) for i, text in enumerate(texts)]


@contextmanager
def server(*, records: bool, timed: Path | None = None) -> Iterator[Server]:
    """A server of the demo pair with its draft ``small``. ``timed``: where a stop-watch writes."""
    with TemporaryDirectory() as folder:
        made = Server(
            installed(), Path(folder), read_pair("demo"), Wanted("small", MOST, CLIENTS, 512)
        )
        if not records:
            del made.environment["SPECTUNE_DB"]
        if timed is not None:
            made.arguments[made.arguments.index(SCHEDULER)] = "vllm_timed.Timed"
            path = os.pathsep.join(
                filter(
                    None, [str(Path(__file__).resolve().parent), made.environment.get("PYTHONPATH")]
                )
            )
            made.environment |= {"PYTHONPATH": path, "SPECTUNE_TIMED": str(timed)}
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


def recording(known: dict[str, Any], alternations: int) -> dict[str, Any]:
    asked = prompts()
    ratios = list(known.get("ratios", ()))
    with server(records=True) as with_us, server(records=False) as without:
        for each in (with_us, without):
            serve(each, asked)
        for n in range(alternations):
            order = (with_us, without) if n % 2 else (without, with_us)
            seconds = {id(each): serve(each, asked) for each in order}
            ratios.append(seconds[id(without)] / seconds[id(with_us)])
            print(f"{n + 1}: tokens/s x {ratios[-1]:.4f}", file=sys.stderr)
    logs = np.log(ratios)
    half = scipy.stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
    low, high = np.exp([logs.mean() - half, logs.mean() + half]).tolist()
    return {
        "clients": CLIENTS,
        "requests_a_run": len(asked),
        "tokens_per_s_ratio": float(np.exp(logs.mean())),
        "interval_95": [low, high],
        "median": float(np.median(ratios)),
        "ratios": ratios,
    }


def added(known: dict[str, Any], alternations: int) -> dict[str, Any]:
    """What is added to a step, by a stop-watch in the engine's process
    (``bench/vllm_timed.py``)."""
    asked = prompts()
    with (
        TemporaryDirectory() as folder,
        server(records=True, timed=Path(folder) / "timed.json") as of,
    ):
        for _ in range(alternations):
            serve(of, asked)
        found = json.loads((Path(folder) / "timed.json").read_text())
    shares = {f"{name}_share": found[f"{name}_s"] / found["span_s"] for name in ("ours", "threads")}
    return {
        "clients": CLIENTS,
        **found,
        "us_a_step": 1e6 * found["ours_s"] / found["steps"],
        **shares,
    }


def reload(known: dict[str, Any], alternations: int) -> dict[str, Any]:
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
                policy = parse_policy(
                    {
                        "draft": "small",
                        "window": {"kind": "fixed", "gamma": int(rng.integers(0, MOST + 1))},
                    }
                )
                store.put_policy(policy.id, policy.spelled_out(), policy.label())
                published[
                    store.publish(
                        spec.id, of.device, policy.id, actor="bench", deployment=DEPLOYMENT
                    ).version
                ] = policy.id
                time.sleep(PAUSE_S)

        thread = threading.Thread(target=publish)
        thread.start()
        while thread.is_alive():
            serve(of, asked)
        time.sleep(2)  # what was served last is written
        info = store.list_recordings()[0]
        requests = store.load(info.id, steps=True).requests
        answers = sorted(
            (a for a in store.acknowledgements() if a.version in published), key=lambda a: a.at
        )
    texts: dict[bytes, set[bytes]] = {}
    for r in requests:
        texts.setdefault(r.trajectory.prompt_ids.tobytes(), set()).add(
            r.trajectory.output_ids.tobytes()
        )
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


def sampled(known: dict[str, Any], alternations: int) -> dict[str, Any]:
    pair, options = demo(SAMPLED_DRAFTS), DecodeOptions(Sampling(TEMPERATURE), TOKENS)
    workload = requests(SAMPLED)
    asked = prompts_of(pair, workload, options)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        store = stored(Path(folder) / "sampled.db")
        for draft in SAMPLED_DRAFTS:
            with closing(start("vllm", pair.spec, Wanted(draft, MOST, CLIENTS, 1024))) as running:
                load = Load(CLIENTS)
                info = record_on(
                    store,
                    pair.spec,
                    running,
                    workload,
                    asked,
                    _fixed(draft, 3),
                    load,
                    options,
                    fresh=True,
                )
                look_around(store, pair, info.id, Look((draft,), MOST))
                store.finish_recording(info.id)
                for gamma in GAMMAS:
                    policy = _fixed(draft, gamma)
                    predicted = simulate(
                        store, info.id, policy, None
                    ).replay.total.mean_accepted_length
                    served = running.execute(
                        asked, policy, load, sampling=options.sampling, max_new_tokens=TOKENS
                    )
                    rounds = [[step.emitted for step in done.steps[1:]] for done in served]
                    tau, half = tau_of(rounds)
                    row = {
                        "draft": draft,
                        "gamma": gamma,
                        "predicted": predicted,
                        "executed": tau,
                        "half_interval_95": half,
                    }
                    rows.append({**row, "error": predicted / tau - 1})
                    print(rows[-1], file=sys.stderr)
    errors = np.abs([row["error"] for row in rows])
    about = {
        "temperature": TEMPERATURE,
        "requests": len(asked),
        "largest_error": float(errors.max()),
    }
    return {**about, "median_error": float(np.median(errors)), "rows": rows}


def tau_of(rounds: list[list[int]]) -> tuple[float, float]:
    """Tokens a round, and half of its 95% interval as a part of it: requests are drawn again
    (bootstrap)."""
    tokens, counts = np.array([sum(r) for r in rounds]), np.array([len(r) for r in rounds])
    drawn = np.random.default_rng(0).integers(0, len(rounds), (2000, len(rounds)))
    taus = tokens[drawn].sum(1) / counts[drawn].sum(1)
    tau = float(tokens.sum() / counts.sum())
    return tau, float((np.quantile(taus, 0.975) - np.quantile(taus, 0.025)) / 2 / tau)


def _fixed(draft: str, gamma: int) -> Policy:
    return parse_plain_policy({"draft": draft, "window": {"kind": "fixed", "gamma": gamma}})


PARTS = {"recording": recording, "added": added, "reload": reload, "sampled": sampled}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--alternations", type=int, default=12)
    wanted = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in wanted.only:
        found[name] = PARTS[name](found.get(name, {}), wanted.alternations)
        print(json.dumps(found[name]))
    found["environment"] = {**environment(), "vllm": installed().version}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

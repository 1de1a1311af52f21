"""`serve` under tools that others wrote, while another policy is published every second.

    SPECTUNE_CLIENTS_PYTHON=DIR/bin/python SPECTUNE_VLLM_PYTHON=.venv-vllm/bin/python \\
        python bench/run.py serve_clients [--only PART] [--quick]

``openapi``: thousands of bodies made from its own OpenAPI document (schemathesis): none may be
answered with 500, or by what the document lacks. ``lm_eval``: `local-completions` of lm-eval on a
task of the demo's prompts, whose loglikelihoods are those of transformers. ``llm_comply``: its
checks of chats; those of tools and images are refusals here. ``vllm_bench``: `vllm bench serve` to
its end. The first Python has lm-eval and llm-comply (``pip install 'lm-eval[api]' llm-comply``).
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from http_fuzz import ASKED, MODES, POSTED, send_made
from http_server import TEMPLATE, served
from pairs import chain, make_pair, top_k
from recorded_texts import alternating
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.checks.serve_load import POLICIES
from bench.checks.serving import Serving, publish, serve
from bench.harness import Part
from bench.lab import requests, stored
from bench.served.live import PAIR, temporary_folder
from spectune.runtime.decoder import prepare_for
from spectune.runtime.loading import load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.traces.errors import EngineError

RESULT = "serve-clients"
CASES = 1_250
"""Of each route that takes a body, allowed by the document and not."""
CLOSE = 1e-4
"""How far a loglikelihood may be from transformers'."""
REFUSED = {"chat-tool-calling", "chat-image-input"}
"""Checks of llm-comply that ask for what is not served."""
PUBLISHED_EVERY_S = 1.0
BENCHMARK = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""`vllm bench serve`: the wheel for CPUs has no command that starts."""


def openapi(quick: bool) -> dict[str, Any]:
    """Statuses by route and kind of body."""
    documents = {"draft": "none"}, chain("near", 4), top_k("near", 3, 3, 8)
    told = Counter[int]()
    with temporary_folder() as folder:
        pair = load_pair(read_pair(str(make_pair(folder))), device="cpu", dtype="float64")
        pair.tokenizer.chat_template = TEMPLATE
        plans = [prepare_for(pair, parse_policy(document)) for document in documents]
        with served(pair, alternating(plans)) as server:
            for path in POSTED:
                for mode in MODES:
                    told += send_made(server, path, mode, 20 if quick else CASES)
            for path in ASKED:
                told += send_made(server, path, MODES[0], 2)
    statuses = ", ".join(f"{count} of {status}" for status, count in sorted(told.items()))
    return {
        "summary": f"{told.total()} requests made from the OpenAPI document: {statuses}; none is "
        "500 or of a status that the document lacks",
        "holds": told[500] == 0,
        "statuses": {str(status): count for status, count in sorted(told.items())},
    }


@contextmanager
def published_to(folder: Path) -> Iterator[tuple[Serving, Path]]:
    """A server of the demo pair with a chat template, in float64, to which another policy is
    published every second, and its target."""
    (target := folder / "target").mkdir()
    for file in Path(PAIR.target).iterdir():
        (target / file.name).symlink_to(file)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    own = {"name": PAIR.name, "target": str(target), "drafts": PAIR.drafts}
    (folder / "pair.json").write_text(json.dumps(own))
    pair = read_pair(str(folder / "pair.json"))
    store, over = stored(folder / "x.db"), threading.Event()

    def keep_publishing() -> None:
        for policy in cycle(POLICIES):
            publish(store, policy, pair.id)
            if over.wait(PUBLISHED_EVERY_S):
                return

    options = ("--pair", folder / "pair.json", "--set", "dtype=float64")
    with serve(folder / "x.db", *options) as server:
        publishing = threading.Thread(target=keep_publishing)
        publishing.start()
        try:
            yield server, target
        finally:
            over.set()
            publishing.join()


def python_of(variable: str) -> str:
    """The Python that a variable names. Raises EngineError where none is named."""
    if not (python := os.environ.get(variable)):
        raise EngineError(f"{variable} names no Python that has what this runs")
    return python


def run(*words: object) -> str:
    """What a command prints. Raises EngineError where it fails."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, env={**os.environ, **offline}
    )
    if done.returncode:
        raise EngineError(f"{words[0]}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def lm_eval(quick: bool) -> dict[str, Any]:
    """Loglikelihoods of lines of the demo's prompts, given what stands before them."""
    python = python_of("SPECTUNE_CLIENTS_PYTHON")
    with temporary_folder() as folder, published_to(folder) as (server, target):
        (tasks := folder / "tasks").mkdir()
        documents = [
            {"prompt": text[: len(text) // 2], "choices": [text[len(text) // 2 :], " none"]}
            for text in (request.prompt[:160] for request in requests(4 if quick else 40).requests)
        ]
        (folder / "own.jsonl").write_text("".join(f"{json.dumps(d)}\n" for d in documents))
        task = {
            "task": "own",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": str(folder / "own.jsonl")},
            "test_split": "train",
            "output_type": "multiple_choice",
            "doc_to_text": "{{prompt}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": 0,
            "metric_list": [{"metric": "acc"}],
        }
        (tasks / "own.yaml").write_text(json.dumps(task))
        about = f"model=demo,base_url={server.url}/v1/completions,tokenizer={target}"
        how = ("--model", "local-completions", "--model_args", f"{about},num_concurrent=4")
        where = ("--include_path", tasks, "--output_path", folder / "out", "--log_samples")
        run(python, "-m", "lm_eval", "run", *how, "--tasks", "own", *where)
        (file,) = (folder / "out").glob("*/samples_own_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        off = [error for sample in samples for error in _errors(sample, target)]
    return {
        "summary": f"lm-eval: {len(off)} loglikelihoods at most {max(off):.1e} off transformers'",
        "holds": max(off) <= CLOSE,
        "loglikelihoods": len(off),
        "most_off": max(off),
    }


def _errors(sample: dict[str, Any], target: Path) -> list[float]:
    """How far the loglikelihoods of a sample are from transformers', in float64."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    errors = []
    for asked, (told, *_) in zip(sample["arguments"].values(), sample["resps"], strict=True):
        ids = tokenizer(asked["arg_0"] + asked["arg_1"])["input_ids"]
        held = len(tokenizer(asked["arg_0"].rstrip())["input_ids"])  # as lm-eval parts them
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = sum(float(logprobs[place - 1, ids[place]]) for place in range(held, len(ids)))
        errors.append(abs(float(told[0]) - own))
    return errors


def llm_comply(_quick: bool) -> dict[str, Any]:
    """Which of its checks of chats pass."""
    tool = Path(python_of("SPECTUNE_CLIENTS_PYTHON")).parent / "llm-comply"
    with temporary_folder() as folder, published_to(folder) as (server, _):
        where = ("-u", f"{server.url}/v1", "-k", "none", "-m", "demo")
        done = subprocess.run(
            [str(tool), *where, "--format", "openai-chat", "--json"], capture_output=True, text=True
        )
        results = json.loads(done.stdout)["results"]
    status = {each["id"]: each["status"] for each in results}
    failed = {name for name, said in status.items() if said not in ("passed", "skipped")}
    return {
        "summary": f"llm-comply: {len(status) - len(failed)} of {len(status)} checks of chats "
        f"pass or are skipped; refused as said: {', '.join(sorted(failed & REFUSED)) or 'none'}",
        "holds": failed <= REFUSED,
        "checks": status,
    }


def vllm_bench(quick: bool) -> dict[str, Any]:
    """Requests that `vllm bench serve` counts as answered."""
    count = 12 if quick else 200
    with temporary_folder() as folder, published_to(folder) as (server, target):
        which = ("--backend", "openai", "--base-url", server.url, "--model", "demo")
        size = ("--random-input-len", 32, "--random-output-len", 24, "--num-prompts", count)
        many = ("--dataset-name", "random", *size, "--max-concurrency", 8)
        kept = ("--save-result", "--result-dir", folder, "--result-filename", "bench.json")
        python = python_of("SPECTUNE_VLLM_PYTHON")
        run(python, "-c", BENCHMARK, *which, "--tokenizer", target, *many, *kept)
        told = json.loads((folder / "bench.json").read_text())
    return {
        "summary": f"vllm bench serve: {told['completed']} of {count} requests answered, "
        f"{told['output_throughput']:.0f} tokens/s, first token after {told['p99_ttft_ms']:.0f} ms "
        "in 99%",
        "holds": told["completed"] == count,
        "told": {key: value for key, value in told.items() if isinstance(value, int | float)},
    }


PARTS: dict[str, Part] = {
    "openapi": openapi,
    "lm_eval": lm_eval,
    "llm_comply": llm_comply,
    "vllm_bench": vllm_bench,
}

"""vLLM's agent beside a stand-in for vLLM's scheduler, the files of its folder, and its source with
a place for a fault before every statement."""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
import time
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from token_ids import decoded
from waiting import eventually

import spectune.engines.vllm

SOURCE = Path(spectune.engines.vllm.__file__).with_name("agent.py")
SEATS, MOST, TOKENS = 4, 6, 20


class Fault(Exception):
    """What is raised before a statement."""


def parallel(**sizes: int) -> SimpleNamespace:
    alone = {"data_parallel_size": 1, "pipeline_parallel_size": 1, "world_size": 1}
    return SimpleNamespace(**alone | sizes)


class Core:
    """vLLM's scheduler as far as the agent uses it. Request n keeps ``(n + position) % 4`` of its
    drafted tokens; ``steps`` is all that it decided."""

    ended: Any = staticmethod(lambda requests: requests)
    """What ``finish_requests`` returns of the requests that it ends, which versions change."""

    def __init__(self, config: Any, lookup: Any = None) -> None:
        self.vllm_config, self.scheduler_config = config, config.scheduler_config
        self.num_spec_tokens, self.dynamic_sd_lookup = MOST, lookup
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.steps: list[Any] = []

    def add(self, name: str, **params: Any) -> None:
        sampling = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "seed": None, "stop": []}
        request = SimpleNamespace(
            request_id=name, prompt_token_ids=[1, 2, 3], output_token_ids=[], num_output_tokens=0,
            num_computed_tokens=3, spec_token_ids=[], is_prefill_chunk=False,
            num_output_placeholders=0, lora_request=None, mm_features=[], resumable=False,
            arrival_time=5.0, max_tokens=TOKENS, stop_reason=None,
            status=SimpleNamespace(name="RUNNING"),
            sampling_params=SimpleNamespace(**{**sampling, "extra_args": None, **params}),
        )  # fmt: skip
        request.is_finished = lambda: request.status.name != "RUNNING"
        self.requests[name] = request
        self.running.append(request)

    def schedule(self) -> Any:
        running, lookup = self.running, self.dynamic_sd_lookup
        drafts = {r.request_id: r.spec_token_ids for r in running if r.num_output_tokens}
        tokens = MOST if lookup is None else lookup[len(running)]
        self.steps.append((sorted(self.requests), drafts, tokens))
        return SimpleNamespace(
            num_scheduled_tokens={r.request_id: 1 for r in running},
            scheduled_spec_decode_tokens={name: d for name, d in drafts.items() if d},
            num_spec_tokens_to_schedule=tokens, num_invalid_spec_tokens=None,
            has_structured_output_requests=False, pending_structured_output_tokens=False,
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id) for r in running if not r.num_output_tokens
            ],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )  # fmt: skip

    def update_from_output(self, output: Any, result: Any) -> str:
        for name, tokens in zip(result.req_id_to_index, result.sampled_token_ids, strict=True):
            request = self.requests[name]
            del tokens[TOKENS - request.num_output_tokens :]
            request.output_token_ids += tokens
            request.spec_token_ids = [7] * output.num_spec_tokens_to_schedule
            request.num_output_tokens = len(request.output_token_ids)
            if request.num_output_tokens == TOKENS:
                request.status.name = "FINISHED_LENGTH_CAPPED"
                self.running.remove(self.requests.pop(name))
        return "outputs"

    def finish_requests(self, request_ids: list[str]) -> Any:
        ended = [self.requests.pop(name) for name in request_ids]
        for request in ended:
            request.status.name = "FINISHED_ABORTED"
            self.running.remove(request)
        return self.ended(ended)

    def shutdown(self) -> None:
        self.steps.append("shutdown")


def sampled(scheduler: Any, output: Any) -> Any:
    """What the model makes of a step: token ids are positions."""
    names, rows = list(output.num_scheduled_tokens), []
    for name in names:
        at, drafts = scheduler.requests[name].num_output_tokens, output.scheduled_spec_decode_tokens
        kept = min((int(name[1:]) + at) % 4, len(drafts.get(name, ())))
        rows.append(list(range(at, at + kept + 1)))
    index = {name: i for i, name in enumerate(names)}
    return SimpleNamespace(sampled_token_ids=rows, req_id_to_index=index)


def serve(scheduler: Any, count: int, **params: Any) -> dict[str, list[int]]:
    """Decodes requests, as many at a time as there are seats; their tokens."""
    texts, names = {}, [f"r{n}" for n in range(count)]
    while names or scheduler.requests:
        while names and len(scheduler.requests) < SEATS:
            name = names.pop(0)
            scheduler.add(name, **params)
            texts[name] = scheduler.requests[name].output_token_ids
        output = scheduler.schedule()
        assert scheduler.update_from_output(output, sampled(scheduler, output)) == "outputs"
    return texts


def config_of(**changed: Any) -> Any:
    speculative = SimpleNamespace(
        method="draft_model", model="draft", max_num_new_slots_for_drafting=1
    )
    return SimpleNamespace(**{
        "speculative_config": speculative,
        "parallel_config": parallel(),
        "scheduler_config": SimpleNamespace(max_num_seqs=SEATS, max_num_batched_tokens=256),
        "device_config": SimpleNamespace(device_type="cpu"),
        "model_config": SimpleNamespace(model="target", dtype="torch.float32", max_model_len=512),
        "cache_config": SimpleNamespace(num_gpu_blocks=8, block_size=16),
        "max_concurrent_batches": 2, **changed,
    })  # fmt: skip


def vllm_modules() -> dict[str, ModuleType]:
    """Modules of the names that the agent imports."""
    path = "vllm.v1.core.sched.async_scheduler"
    ends = [*(i for i, letter in enumerate(path) if letter == "."), len(path)]
    modules: dict[str, Any] = {path[:end]: ModuleType(path[:end]) for end in ends}
    modules[path].AsyncScheduler, modules["vllm"].__version__ = Core, "0.32.0"
    return modules


def module_of(code: Any, *, quick: bool = True, **names: Any) -> Any:
    """The agent's module; ``quick``: its thread looks, and tries again, far more often."""
    module: Any = ModuleType("agent")
    sys.modules["agent"] = module
    module.__dict__.update(names)
    exec(code, module.__dict__)
    if quick:
        module.POLL_S, module.RETRY_S, module.STATUS_S = 0.002, 0.02, 0.01
    return module


def publish(folder: Path, version: int, gammas: dict[str, int], **more: Any) -> None:
    document = {"format": 1, "version": version, "policy": "p", "gammas": gammas, **more}
    put(folder, json.dumps(document))


def trial(folder: Path, version: int, gammas: dict[str, int], **more: Any) -> dict[str, Any]:
    """A trial for the agent that runs, of 60 s in blocks of 10 s."""
    of = {"version": version, "policy": f"t{version}", "gammas": gammas, "renewal": 1}
    blocks = {"seed": 7, "block_s": 10, "ttl_s": 60}
    return {**of, **blocks, "boot": status(folder)["boot"], **more}


def put(folder: Path, text: str) -> None:
    (folder / "new").write_text(text)
    os.replace(folder / "new", folder / "policy.json")


def status(folder: Path) -> dict[str, Any]:
    path = folder / "status.json"
    eventually(path.exists)
    return dict(json.loads(path.read_text()))


def wait_for(folder: Path, version: int) -> None:
    eventually(lambda: status(folder)["in_force"]["version"] == version)


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("rounds-*.jsonl"))
    texts = [file.read_text().splitlines() for file in files]
    assert all("engine" in json.loads(line) for text in texts for line in text[:1])
    return [read(line) for text in texts for line in text[1:]]


def read(text: str) -> dict[str, Any]:
    """A line of a rounds file, its token ids as lists."""
    line: dict[str, Any] = json.loads(text)
    ids = {key: decoded(line[key]) for key in ("prompt", "output") if line.get(key) is not None}
    return {**line, **ids}


class Marks(ast.NodeTransformer):
    """Puts ``FAULT(n)`` before every statement of a function but vLLM's own calls, what returns
    their results, guards and ``pass``.
    ``lines``: where those statements stand."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        watched = node.args.args and node.name in {
            *("schedule", "update_from_output", "finish_requests", "shutdown", "__init__")
        }
        around = watched and any("super()" in ast.unparse(s) for s in node.body)
        node.body = self.marked(node.body, around=bool(around), guard=node.name == "guarded")
        return node

    def marked(
        self, body: list[ast.stmt], *, around: bool = False, guard: bool = False
    ) -> list[ast.stmt]:
        marked: list[ast.stmt] = []
        for statement in body:
            vllms = "super()" in ast.unparse(statement) or isinstance(statement, ast.Return)
            skip = around and (vllms or "guarded(" in ast.unparse(statement))
            skip = skip or ((around or guard) and isinstance(statement, ast.Try))
            docs = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not (skip or docs or isinstance(statement, ast.Pass)):
                marked += ast.parse(f"FAULT({len(self.lines)})").body
                self.lines.append(statement.lineno)
            for field in ("body", "orelse", "finalbody"):
                if inner := getattr(statement, field, None):
                    setattr(statement, field, self.marked(inner, guard=guard))
            for handler in getattr(statement, "handlers", ()):
                handler.body = self.marked(handler.body, guard=guard)
            marked.append(statement)
        return marked


class Faults:
    """The agent's module, in which ``target`` is the number of the statement that fails;
    ``reached``: those that ran. ``lines``: where they stand in its source."""

    def __init__(self) -> None:
        marks = Marks()
        tree = ast.fix_missing_locations(marks.visit(ast.parse(SOURCE.read_text())))
        self.lines, self.reached, self.target = marks.lines, set[int](), -1
        self.module = module_of(compile(tree, "agent.py", "exec"), FAULT=self.fault)
        self.module.LOG = logging.Logger("quiet")
        self.module.LOG.disabled = True

    def fault(self, number: int) -> None:
        self.reached.add(number)
        if number == self.target:
            raise Fault(number)


def serve_until(
    stop: Any, totals: Any, folder: str, requests_s: float, target: str, draft: str
) -> None:
    """Serves requests until an event, in a process of its own, with the agent as it ships; then
    puts how many it served, noted and dropped into a queue. ``target``, ``draft``: the models'
    folders."""
    os.environ["SPECTUNE_FOLDER"] = folder
    sys.modules |= vllm_modules()
    module = module_of(compile(SOURCE.read_text(), "agent.py", "exec"), quick=False)
    config = config_of()
    config.model_config.model, config.speculative_config.model = target, draft
    scheduler = module.Scheduler(config)
    scheduler.steps = deque(maxlen=1)
    agent = scheduler._spectune
    eventually(lambda: agent.active)
    began, sent = time.monotonic(), 0
    while scheduler.requests or not stop.is_set():
        due = 0 if stop.is_set() else requests_s * (time.monotonic() - began) - sent
        for _ in range(min(int(due), SEATS - len(scheduler.requests))):
            scheduler.add(f"r{sent}")
            sent += 1
        if scheduler.requests:
            output = scheduler.schedule()
            scheduler.update_from_output(output, sampled(scheduler, output))
        else:
            time.sleep(0.002)
    eventually(lambda: not agent.waiting)
    scheduler.shutdown()
    totals.put({"served": sent, "noted": agent.noted, "dropped": agent.dropped})

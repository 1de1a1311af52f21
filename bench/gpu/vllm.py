"""vLLM with a draft and the agent on a GPU: texts, speed, what the agent costs, publications.

    python bench/run.py gpu_vllm --out DIR [--draft head] [--tune] [--seconds 440]
    python bench/run.py gpu_vllm --out DIR --device cpu --tiny [--folder PAIR]
    python bench/run.py gpu_vllm --collect DIR

The first measures where vLLM and a GPU are (``bench/gpu/packed_vllm`` brings vLLM there), on the
ballasted pair (:mod:`gpu.ballast`), with its draft model or with its EAGLE-3 head; the second
proves on a CPU that every part runs, with the demo pair as it is, or with tiny ballast in a folder.
``rows.jsonl`` in ``DIR`` gets a line for each part as it ends, ``rounds.jsonl.gz``
what the agent noted. A part that fails is a line with its cause, and the others go on. After
``--seconds`` no part is begun; called again with the same ``DIR``, what is done is not done again.

The parts, in this order: a server without draft and agent under every number of clients; one with
both, by numbers of draft tokens and of clients; what its draft proposes along a few texts
(``retraced``); publications amid traffic; in an engine in this process, steps that differ from
vLLM's own while nothing is published, and what the agent costs a step.

With ``--tune`` the parts are others: a tuning of a server that runs, what it published beside no
draft and the server's own table, and what a retrace costs (:mod:`gpu.vllm_tune`).

The third reads on a CPU what came back, holds the noted rounds against replay and writes
``bench/results/gpu-vllm-NAME.json`` (:mod:`gpu.vllm_collect`).
"""

from __future__ import annotations

import gzip
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from bench import ROOT
from bench.gpu import ballast
from bench.gpu.rows import Figures, OutOfTimeError, Rows, begin, command_line, failed, tell
from bench.harness import origin
from bench.lab import GREEDY, stored
from bench.served.live import (
    DRAFT,
    MAX_LEN,
    MOST,
    SEATS,
    demo_prompts,
    temporary_folder,
    windowed,
)
from bench.served.publications import Clients, following, published
from spectune.engines.engine import Load, Prompt, Wanted
from spectune.engines.vllm.folder import Tail, table_of
from spectune.engines.vllm.retrace import Retracer
from spectune.engines.vllm.running import RunningServer, client_of, sending
from spectune.engines.vllm.server import ServerProcess, installed, reason_in
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.recording.on_engine import EngineRun, record_on
from spectune.optimizer.replay.trace import open_trace
from spectune.runtime.hardware import hardware
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import EngineError

WARM_TOKENS, LAST_LINES_S = 8, 5.0
"""Tokens of requests that no figure is of; seconds that the agent may take for its last lines."""
CHECKED_BY = 16
"""Clients of the requests by which an agent checks a version of vLLM that it does not know."""


class Size(NamedTuple):
    """How much is measured: numbers of draft tokens and of clients, new tokens of a text, requests
    that one client sends; publications and the clients amid which they come; texts that are
    retraced; steps that are compared, and turns with and without the agent."""

    gammas: tuple[int, ...]
    clients: tuple[int, ...]
    tokens: int
    requests: int
    publications: int
    amid: int
    retraced: int
    steps: int
    alternations: int

    def count(self, clients: int) -> int:
        """Requests that so many clients send: at least two each."""
        return max(self.requests, 2 * clients)


FULL = Size((0, 1, 2, 4, 8), (1, 4, 16, 64), 64, 4, 20, 16, 8, 400, 6)
TINY = Size((0, 2), (1, 4), 8, 2, 2, 4, 2, 40, 1)


@dataclass(frozen=True)
class Bench:
    """Where is measured, how much, by which draft of the pair, whether it is tuned, until when
    (seconds of the monotonic clock), into which folder, and where the ballasted pair is."""

    device: str
    size: Size
    draft: str
    tunes: bool
    until: float
    out: Path
    folder: Path
    is_ballasted: bool

    @property
    def is_tiny(self) -> bool:
        return self.size == TINY

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    @property
    def pair(self) -> str:
        return str(self.folder / "pair.json") if self.is_ballasted else "demo"

    @cached_property
    def spec(self) -> PairSpec:
        return read_pair(self.pair)

    @cached_property
    def prompts(self) -> list[Prompt]:
        most = max(self.size.count(clients) for clients in self.size.clients)
        return demo_prompts(most, self.size.tokens)

    def policy(self, window: int | Mapping[str, int]) -> Policy:
        """So many tokens of the draft, or by batch size."""
        return windowed(window, self.draft)

    def wanted(self, draft: str) -> Wanted:
        longest = max(len(prompt.ids) for prompt in self.prompts) + self.size.tokens
        return Wanted(draft, max(self.size.gammas), max(self.size.clients), longest)

    @property
    def tuned(self) -> Wanted:
        """The server of a tuning."""
        return Wanted(self.draft, MOST, SEATS, MAX_LEN)


class Part(NamedTuple):
    """A part by its name, and what measures it on a server."""

    name: str
    measure: Callable[[Any], Figures]


class Sender(Protocol):
    def complete(self, **request: Any) -> list[int]: ...


class WithoutAgent(RunningServer):
    """A server that is sent requests, and has no folder."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model, self._client = url, model, client_of(url)


class Places(Protocol):
    """Where the parts run: on two servers, one at a time, and in an engine in a process. ``death``:
    why the server ended, where it did."""

    def plain(self, bench: Bench) -> AbstractContextManager[Sender]: ...
    def with_agent(self, bench: Bench) -> AbstractContextManager[RunningServer]: ...
    def tuned(self, bench: Bench) -> AbstractContextManager[RunningServer]: ...
    def retraced(self, bench: Bench) -> AbstractContextManager[RunningServer]: ...
    def death(self) -> str: ...
    def in_process(self, bench: Bench, parts: Sequence[str]) -> None: ...


class OwnPlaces:
    """Servers that are started here and end with their context, and another Python process."""

    def __init__(self) -> None:
        self._process: ServerProcess | None = None

    @contextmanager
    def _started(
        self, bench: Bench, wanted: Wanted, name: str, *arguments: str
    ) -> Iterator[ServerProcess]:
        log, before = bench.out / f"{name}.log", os.environ.get("SPECTUNE_VLLM_ARGS", "")
        with temporary_folder() as folder, ExitStack() as after:
            after.callback(os.environ.update, SPECTUNE_VLLM_ARGS=before)
            os.environ["SPECTUNE_VLLM_ARGS"] = " ".join((before, *arguments))
            options = {"log": log, "has_agent": wanted.draft != "none"}
            with closing(ServerProcess(bench.spec, wanted, folder, **options)) as process:
                self._process = process
                process.wait_until_ready(bench.seconds_left)
                yield process

    @contextmanager
    def plain(self, bench: Bench) -> Iterator[Sender]:
        with self._started(bench, bench.wanted("none"), "plain") as process:
            yield WithoutAgent(process.url, bench.spec.target)

    def with_agent(self, bench: Bench) -> AbstractContextManager[RunningServer]:
        return self._checked(bench, bench.wanted(bench.draft), "agent")

    def tuned(self, bench: Bench) -> AbstractContextManager[RunningServer]:
        return self._checked(bench, bench.tuned, "tuned")

    def retraced(self, bench: Bench) -> AbstractContextManager[RunningServer]:
        return self._checked(bench, bench.tuned, "retraced", "--enable-prefix-caching")

    @contextmanager
    def _checked(self, bench: Bench, *how: Any) -> Iterator[RunningServer]:
        """A server with the agent, once that drafts."""
        with self._started(bench, *how) as process:
            server = RunningServer(process.url, process.rounds, bench.spec)
            tested = (f"{version}." for version in server.engine.versions)
            if not f"{server.version}.".startswith(
                (*tested,)
            ):  # its agent checks some rounds first
                load(bench, server, min(CHECKED_BY, max(bench.size.clients)), "checked")
            yield server

    def death(self) -> str:
        return "" if self._process is None else self._process.death()

    def in_process(self, bench: Bench, parts: Sequence[str]) -> None:
        python, _ = installed()
        words = ["gpu_vllm", *parts, "--out", bench.out, "--draft", bench.draft, "--in-process"]
        words += ["--device", bench.device, *["--tiny"] * bench.is_tiny]
        words += ["--folder", bench.folder] if bench.is_ballasted else []
        command = [python, ROOT / "bench" / "run.py", *words]
        log = bench.out / "engine.log"
        with log.open("wb") as out:
            limit_s = max(1.0, bench.seconds_left)
            try:
                subprocess.run(command, stdout=out, stderr=out, timeout=limit_s, check=True)
            except subprocess.TimeoutExpired:
                raise OutOfTimeError from None
            except subprocess.CalledProcessError as error:
                reason = reason_in(log.read_text(errors="replace"))
                raise EngineError(f"exit code {error.returncode}: {reason}") from None


# ------------------------------------------------------------------------------------------- parts


def load(bench: Bench, server: Sender, clients: int, name: str) -> Figures:
    """The texts that so many clients at a time get, by the prompt's number, and tokens/s. Raises
    OutOfTimeError where an answer is not there in time."""
    size = bench.size
    prompts = bench.prompts[: size.count(clients)]
    _send(bench, server, prompts[: 2 * clients], clients, f"warm {name}", WARM_TOKENS)
    began = time.perf_counter()
    texts = _send(bench, server, prompts, clients, name, size.tokens)
    seconds = time.perf_counter() - began
    tokens = sum(map(len, texts.values()))
    return {
        "clients": clients,
        "requests": len(texts),
        "tokens_per_s": tokens / seconds,
        "texts": [texts[n] for n in range(len(texts))],
    }


def _send(
    bench: Bench, server: Sender, prompts: Sequence[Prompt], clients: int, name: str, tokens: int
) -> dict[int, list[int]]:
    mark = name.replace(" ", "_").replace(",", "")
    requests = [
        {
            "request_id": f"{mark}.{n}",
            "prompt": list(prompt.ids),
            "max_tokens": tokens,
            "temperature": 0,
        }
        for n, prompt in enumerate(prompts)
    ]
    texts = dict[int, list[int]]()
    with sending(server.complete, requests, Load(clients)) as answers:
        while len(texts) < len(requests):
            try:
                number, answer = answers.get(timeout=max(1.0, bench.seconds_left))
            except queue.Empty:
                raise OutOfTimeError from None
            if isinstance(answer, EngineError):
                raise answer
            texts[number] = answer
    return texts


def plain(bench: Bench, clients: int, server: Sender) -> Figures:
    return load(bench, server, clients, f"plain {clients}")


def served(bench: Bench, gamma: int, clients: int, server: RunningServer) -> Figures:
    """A number of draft tokens under a load, and how long it took to come into force, unless it was
    in force before."""
    policy, before, began = bench.policy(gamma), server.status().trial, time.monotonic()
    server.put_in_force(policy)
    waited, status = time.monotonic() - began, server.status()
    table = table_of(policy, status.engine, server.draft)
    figures = load(bench, server, clients, f"K {gamma} {clients}")
    if fault := server.status().fault:
        raise EngineError(fault)
    if status.trial is None:
        raise EngineError("the trial is gone")
    is_new = before is None or status.trial.version != before.version
    about = {"gamma": gamma, "in_force_s": waited if is_new else None, "boot": status.boot}
    return {**about, **figures, "tables": {status.trial.version: table["gammas"]}}


def retraced(bench: Bench, server: RunningServer) -> Figures:
    """Of a few texts, how many tokens the server's draft proposes from each position, and how many
    of them the text goes on with."""
    size = bench.size
    options = DecodeOptions(GREEDY, size.tokens)
    prompts = bench.prompts[: size.retraced]
    with temporary_folder() as folder:
        store = stored(folder / "x.db")
        policy = bench.policy(max(size.gammas))
        run = EngineRun(prompts, policy, Load(size.retraced), options)
        info = record_on(store, bench.spec, server, run, fresh=True)
        store.finish_recording(info.id)
        asked = Retracer(store, info, server, outstanding=max(size.clients)).run()
        trace = open_trace(store, info.id, drafts=[server.draft]).trace
        texts = []
        for n, request in enumerate(store.load(info.id, ()).requests):
            begin, end = trace.offsets[n : n + 2]
            ids = request.trajectory.prompt_ids.tolist(), request.trajectory.output_ids.tolist()
            texts.append([*ids, *trace.copies[server.draft][:, begin:end].tolist()])
    return {"positions": asked.positions, "requests": asked.requests, "texts": texts}


def publications(bench: Bench, server: RunningServer) -> Figures:
    """Publications by `follow` amid clients: seconds until each is in force, and what the clients
    got meanwhile."""
    size, waits = bench.size, list[float]()
    status, tables = server.status(), dict[int, dict[str, int]]()
    most = max(size.gammas)
    windows = [*size.gammas, {"1": most, str(size.amid // 2): most // 2, str(size.amid): 0}]
    clients = Clients(server, bench.prompts[: 2 * size.amid], size.amid, size.tokens)
    with temporary_folder() as folder, following(folder / "x.db", server.folder, bench.pair):
        store = stored(folder / "x.db")
        with clients.sending():
            policies = islice(cycle(map(bench.policy, windows)), size.publications)
            where = bench.spec.id, status.engine.device
            for policy, version, waited in published(server, store, policies, *where):
                waits.append(waited)
                tables[version] = table_of(policy, status.engine, server.draft)["gammas"]
    return {
        "publications": len(waits),
        "clients": size.amid,
        "answered": len(clients.texts),
        "failed_requests": len(clients.failures),
        "failures": clients.failures[:3],
        "in_force_s": waits,
        "boot": status.boot,
        "tables": tables,
        "texts": clients.texts,
    }


def groups(bench: Bench) -> dict[str, list[Part]]:
    """The parts by where they run."""
    if bench.tunes:
        from bench.gpu.vllm_tune import parts

        return parts(bench)
    size = bench.size
    with_agent = [
        Part(f"K={gamma}, {clients} clients", partial(served, bench, gamma, clients))
        for gamma in size.gammas
        for clients in size.clients
    ]
    with_agent += [
        Part("retraced", partial(retraced, bench)),
        Part("publications", partial(publications, bench)),
    ]
    return {
        "plain": [Part(f"plain, {n} clients", partial(plain, bench, n)) for n in size.clients],
        "with_agent": with_agent,
    }


def in_process(bench: Bench) -> tuple[str, ...]:
    """Parts of :mod:`gpu.vllm_engine`."""
    return () if bench.tunes else ("steps", "cost")


def plan(bench: Bench) -> list[str]:
    """The names of all parts, in their order."""
    return [part.name for parts in groups(bench).values() for part in parts] + [*in_process(bench)]


# -------------------------------------------------------------------------------------- what notes


class Notes:
    """Copies what a server's agent notes to ``rounds.jsonl.gz``, its description first."""

    def __init__(self, server: RunningServer, out: Path) -> None:
        status = server.status()
        self._tail, self._file = Tail(server.folder, status.boot), out / "rounds.jsonl.gz"
        self._write([json.dumps({"engine": status.engine.about, "boot": status.boot}).encode()])

    def _write(self, lines: Iterable[bytes]) -> None:
        with gzip.open(self._file, "ab") as file:
            file.writelines(line + b"\n" for line in lines)

    def copy(self) -> bool:
        """Copies the lines since the last call; whether there were any."""
        if lines := [*self._tail.lines()]:
            self._write(lines)
        return bool(lines)

    def copy_last(self) -> None:
        """Copies until no more come."""
        deadline = time.monotonic() + LAST_LINES_S
        while time.monotonic() < deadline:
            time.sleep(0.6)  # the agent looks every 0.25 s
            if not self.copy():
                return


# ------------------------------------------------------------------------------------------- calls


def measure(bench: Bench, places: Places, names: Sequence[str]) -> None:
    """Runs the named parts that have no figures yet, until time is over."""
    rows = Rows(bench.out)
    rows.add("plan", about(bench))
    if bench.is_ballasted and not Path(bench.pair).exists():
        began = time.monotonic()
        bench.folder.mkdir(parents=True, exist_ok=True)
        try:
            shapes, dtype = ballast.LARGE, torch.bfloat16
            if bench.is_tiny:
                shapes, dtype = ballast.TINY, torch.float32
            ballast.build(bench.folder, shapes, bench.device, dtype)
        except Exception as error:
            rows.add("pair", failed(error))
            return
        if bench.device == "cuda":
            torch.cuda.empty_cache()
        rows.add("pair", {"seconds": time.monotonic() - began})
    for group, parts in groups(bench).items():
        lacking = [p for p in parts if p.name in names and p.name not in rows.done()]
        if lacking and bench.seconds_left > 0:
            _on_server(bench, rows, places, group, lacking)
    lacking_inside = [p for p in in_process(bench) if p in names and p not in rows.done()]
    if lacking_inside and bench.seconds_left > 0:
        before, cause = len(rows.read()), None
        try:
            places.in_process(bench, lacking_inside)
        except OutOfTimeError:
            pass
        except Exception as error:
            cause = failed(error)
        added = {row["part"]: row for row in rows.read()[before:]}
        for name in lacking_inside:
            if name in added:
                tell(added[name])
            elif cause is not None:
                rows.add(name, cause)


def _on_server(bench: Bench, rows: Rows, places: Places, group: str, parts: Sequence[Part]) -> None:
    """Runs parts on one server. Where it does not start, each of them fails for that reason."""
    began, notes = time.monotonic(), None
    try:
        with getattr(places, group)(bench) as server:
            rows.add(f"{group} starts", {"seconds": time.monotonic() - began})
            if group == "with_agent":
                notes = Notes(server, bench.out)
            try:
                for part in parts:
                    if bench.seconds_left <= 0:
                        return
                    began = time.monotonic()
                    try:
                        figures = part.measure(server)
                    except OutOfTimeError:
                        return
                    except Exception as error:  # the other parts may still be had
                        is_gone = isinstance(error, EngineError) and "not answer" in str(error)
                        figures = failed(error, places.death() if is_gone else "")
                    rows.add(part.name, {**figures, "seconds": time.monotonic() - began})
                    if notes is not None:
                        notes.copy()
            finally:
                if notes is not None:
                    notes.copy_last()
    except Exception as error:
        if bench.seconds_left > 0:
            for part in parts:
                if part.name not in rows.done():
                    rows.add(part.name, failed(error))


def about(bench: Bench) -> Figures:
    """What a call measures, on what and by what."""
    made, size = origin(), "a tiny size" if bench.is_tiny else "8B"
    return {
        "plan": plan(bench),
        "on": hardware(bench.device),
        "is_tiny": bench.is_tiny,
        "pair": "the demo pair" if not bench.is_ballasted else f"the demo pair ballasted to {size}",
        "draft": bench.draft,
        "tunes": bench.tunes,
        "arguments": os.environ.get("SPECTUNE_VLLM_ARGS", ""),
        "measured": made["measured"],
        "code": made["code"],
        "environment": made["environment"],
    }


def kind(plan: Figures) -> str:
    """What the figures of a folder are of."""
    return f"{plan['on']}, {plan['draft']}{', a tuning' * plan['tunes']}"


def main(arguments: Sequence[str], places: Places | None = None) -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--draft", choices=("small", "head"), default=DRAFT, help="of the pair (default: small)")
    add("--tune", action="store_true", help="a tuning and retraces")
    add("--in-process", action="store_true", help="run the parts in this process's engine")
    asked = parser.parse_args(arguments)
    if asked.collect is not None:
        from bench.gpu.vllm_collect import collect
        from bench.gpu.vllm_tune import collect_tuned

        plans = [row for row in Rows(asked.collect).read() if row["part"] == "plan"]
        if not plans:
            parser.error(f"{asked.collect} has no rows.jsonl of a measurement")
        read = collect_tuned if plans[-1]["tunes"] else collect
        return read(asked.collect, asked.results)
    begin(parser, asked)
    bench = Bench(
        asked.device,
        TINY if asked.tiny else FULL,
        asked.draft,
        asked.tune,
        time.monotonic() + asked.seconds,
        asked.out.resolve(),
        (asked.folder or ROOT / ".acceptance" / "ballast").resolve(),
        not asked.tiny or asked.folder is not None,
    )
    names, rows = plan(bench), Rows(bench.out)
    if unknown := set(asked.parts) - set(names):
        parser.error(f"no part {min(unknown)!r}; there are {'; '.join(names)}")
    chosen = asked.parts or names
    if others := {kind(row) for row in rows.read() if row["part"] == "plan"} - {kind(about(bench))}:
        parser.error(f"{asked.out} has figures of {min(others)}; name another folder")
    if asked.in_process:
        from bench.gpu.vllm_engine import measure_inside

        measure_inside(bench, rows, chosen)
        return 0
    before = len(rows.read())
    measure(bench, places or OwnPlaces(), chosen)
    return rows.outcome(chosen, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

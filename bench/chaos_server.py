"""A PostgreSQL server that the chaos run stops, freezes and writes into. Linux."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import databases
import psycopg
from psycopg.rows import dict_row


class Server(databases.Server):
    """A server whose clock tells when each transaction was committed.

    Raises RuntimeError, saying how to get one, where there is no PostgreSQL.
    """

    def __init__(self) -> None:
        binaries = databases.server_binaries()
        if binaries is None:
            raise RuntimeError(databases.HOW)
        super().__init__(binaries, track_commit_timestamp="on")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While the block runs the server accepts connections and answers nothing."""
        first = int((self.data / "postmaster.pid").read_text().split()[0])
        os.kill(first, signal.SIGSTOP)
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        pids = [first, *map(int, children)]
        try:
            _signal(pids, signal.SIGSTOP)
            yield
        finally:
            _signal(pids[::-1], signal.SIGCONT)

    def sql(self, statement: str, values: Any = None) -> list[dict[str, Any]]:
        """Executes one statement behind the product's back; its rows, if it has any."""
        how: dict[str, Any] = {"row_factory": dict_row, "autocommit": True, "connect_timeout": 5}
        with psycopg.connect(self.url, **how) as connection:
            done = connection.execute(statement, values)
            return list(done.fetchall()) if done.description else []


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it may have ended in between
            os.kill(pid, number)

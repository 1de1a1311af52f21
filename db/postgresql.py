"""PostgreSQL connections that notice when nobody answers. Needs psycopg; imported only where a
PostgreSQL is used.

The system notices a host that is gone (keepalives), the server a statement that takes too long
(``statement_timeout``), and the connection itself a server that lives and is silent: stopped, out
of memory, or behind a network that swallows everything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.waiting import Ready

CONNECTING: Mapping[str, int] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""libpq's parameters, unless the URL has its own; seconds, the last milliseconds."""
LIMITS: Mapping[str, str] = {"statement_timeout": "120s", "lock_timeout": "60s"}
"""The server's settings, unless the URL's ``options``, the server, the database or the role has its
own."""
GRACE_S = 10.0
"""How much longer than ``statement_timeout`` an answer is waited for: a server that lives has said
by then that time is up."""
PING_S = 10.0
"""How long an idle connection may take to say that it is alive."""
LONG_S = 3600.0
"""What a statement of a long transaction may take, unless ordinary ones may take more."""
_T = TypeVar("_T")


class Connection(psycopg.Connection[Any]):
    """A connection that closes and raises OperationalError when nothing is heard from the server
    for ``patience_s`` seconds."""

    limit_s: float | None = None
    """The patience of an ordinary transaction; None: no limit."""
    patience_s: float | None = PING_S

    def wait(self, gen: PQGen[_T], *args: Any, **kwargs: Any) -> _T:
        return super().wait(self._patiently(gen), *args, **kwargs)

    def _patiently(self, gen: PQGen[_T]) -> PQGen[_T]:
        heard = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                now = time.monotonic()
                if ready != Ready.NONE:
                    heard = now
                elif self.patience_s is not None and now - heard > self.patience_s:
                    # Closed, not cancelled: a cancellation asks the same server, and would wait as
                    # well.
                    self.pgconn.finish()
                    raise psycopg.OperationalError(
                        f"no answer for {now - heard:.0f} s; the server is stopped or cut off"
                    )
                wanted = gen.send(ready)
        except StopIteration as end:
            value: _T = end.value
            return value

    def limit(self, options: str) -> None:
        """Sets the server's limits that ``options`` (of the URL) and the server's own settings
        leave open."""
        free = {name: value for name, value in LIMITS.items() if name not in options}
        asked = [
            f"set_config('{name}', coalesce(nullif(current_setting('{name}'), '0'), "
            f"'{value}'), false)"
            for name, value in free.items()
        ]
        self.autocommit = True
        with self.cursor() as cursor:
            if asked:
                cursor.execute(f"SELECT {', '.join(asked)}".encode())
            row = cursor.execute(
                "SELECT extract(epoch FROM current_setting('statement_timeout')::interval)"
            ).fetchone()
        self.autocommit = False
        statement_s = float(row[0]) if row else 0.0
        self.limit_s = statement_s + GRACE_S if statement_s else None

    def begin(self, *, is_long: bool) -> None:
        """At the start of a transaction: the ordinary patience, or that of ``LONG_S`` if it
        ``is_long``."""
        self.patience_s = self.limit_s
        if is_long and self.limit_s is not None and self.limit_s < LONG_S + GRACE_S:
            self.patience_s = LONG_S + GRACE_S
            self.execute(
                f"SELECT set_config('statement_timeout', '{LONG_S * 1000:.0f}ms', true)".encode()
            )

    def rest(self) -> None:
        """Between transactions nothing is asked but whether the server is there."""
        self.patience_s = PING_S

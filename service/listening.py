"""Where a server listens, and who may ask it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from spectune.traces.errors import ConfigError


class HTTPServer(uvicorn.Server):
    """Serves an application until ``should_exit``, which whoever runs it sets: then what is being
    answered has ``drain_s`` seconds to end."""

    def __init__(self, app: FastAPI, *, drain_s: float = 30.0) -> None:
        how: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
        drain = max(1, round(drain_s))
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=drain, **how))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield


def read_key(host: str, file: str | None, option: str) -> str | None:
    """The key in the ``file`` of an option, which requests must have. Raises ConfigError where
    others than this machine could send some, by this ``host``, and there is none."""
    if file is not None:
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:  # a name may be none
            raise ConfigError(f"{option} {file}: cannot be read ({error})") from None
        if not key or not key.isascii() or any(c.isspace() for c in key):
            raise ConfigError(f"{option} {file}: one key in ASCII, without blanks, is due")
        return key
    if host != "localhost" and not _is_loopback(host):
        raise ConfigError(
            f"--host {host}: whoever reaches it could use it; name a file with a key by "
            f"{option}, or leave --host out"
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """The socket that connections come by. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, TypeError, ValueError) as error:  # a name may be none
        raise ConfigError(f"--host {host} --port {port}: {error}") from None
    with listening:
        yield listening


def url_of(listening: socket.socket) -> str:
    """Where it listens, as it is told."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

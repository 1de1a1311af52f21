"""`follow`: the process beside vLLM's agent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from spectune.engines.vllm.follow import Follower, Limits
from spectune.optimizer.commands.common import Talk, names_pair, open_store, pair_of
from spectune.optimizer.commands.results import Result
from spectune.optimizer.signals import stop_on_signals
from spectune.settings import Follow
from spectune.traces.errors import ConfigError


@contextmanager
def _metrics(s: Follow, follower: Follower, talk: Talk) -> Iterator[None]:
    """Shows the follower's metrics where that is asked for. Raises ConfigError."""
    if s.metrics is None:
        yield
        return
    from prometheus_client import start_http_server

    from spectune.optimizer.metrics import of_follower, registry_of

    host, _, port = s.metrics.rpartition(":")
    if not (port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"--metrics {s.metrics}: PORT or HOST:PORT is expected")
    registry = registry_of(lambda: of_follower(follower))
    try:
        server, thread = start_http_server(
            int(port), host.strip("[]") or "127.0.0.1", registry=registry
        )
    except OSError as error:
        raise ConfigError(f"--metrics {s.metrics}: {error}") from None
    talk.tell(f"metrics on port {server.server_port}")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def follow(s: Follow, talk: Talk) -> Result:
    folder = Path(s.folder)
    if not folder.is_dir():
        raise ConfigError(f"FOLDER {folder}: no such folder; name the one of SPECTUNE_FOLDER")
    limits = Limits(s.keep, s.keep_size, s.keep_files)
    pair = pair_of(s) if names_pair(s) else None
    with open_store(s, create=True) as store:
        follower = Follower(
            store, folder, s.deployment, talk.tell, pair=pair, texts=s.texts, limits=limits
        )
        if s.once:
            follower.once()
        else:
            with _metrics(s, follower, talk), stop_on_signals(stop := threading.Event()):
                follower.run(stop)
    data = {
        **asdict(follower.totals),
        "policy_version": follower.policy.version,
        "servers": [
            {
                "boot": server.boot,
                "pair": server.pair_id,
                "requests": server.requests,
                "skipped": server.skipped,
                "recordings": sorted(server.recordings.values()),
            }
            for server in follower.servers
        ],
    }
    total = follower.totals
    text = (
        f"{total.requests} requests brought in, {total.without_text} of them without their texts, "
        f"{total.skipped} lines skipped, {total.forgotten} requests forgotten"
    )
    return Result(text, data)

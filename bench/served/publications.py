"""Publications amid traffic: from the database by `follow` into a running server. No request may
fail and no text may differ from autoregression on the same server."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab import stored
from bench.served.live import (
    MOST,
    PAIR,
    await_version,
    command,
    demo_prompts,
    publish,
    serving,
    temporary_folder,
    windowed,
)
from spectune.engines.engine import Prompt
from spectune.engines.vllm.running import RunningServer
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.traces.errors import EngineError
from spectune.traces.store import TraceStore

PUBLICATIONS, CLIENTS, PROMPTS, TOKENS = 200, 8, 48, 48
LIMIT_S = 1.0
POLICIES = [
    *map(windowed, range(MOST + 1)),
    windowed({"1": 8, "2": 5, "4": 3, "7": 1}),
    windowed({"1": 6, "3": 0, "6": 2}),
]


class Clients:
    """``count`` clients that send the prompts in turn without a pause: ``texts`` are the token ids
    of each answer by the prompt's number, ``failures`` why others got none."""

    def __init__(
        self,
        server: RunningServer,
        prompts: Sequence[Prompt],
        count: int = CLIENTS,
        tokens: int = TOKENS,
    ) -> None:
        self.texts: list[tuple[int, list[int]]] = []
        self.failures: list[str] = []
        self._server, self._prompts, self._count, self._tokens = server, prompts, count, tokens

    def send(self, number: int) -> None:
        request = {"prompt": list(self._prompts[number].ids), "max_tokens": self._tokens}
        try:
            self.texts.append((number, self._server.complete(**request, temperature=0)))
        except EngineError as error:
            self.failures.append(str(error))

    def send_once(self) -> None:
        with ThreadPoolExecutor(self._count) as pool:
            list(pool.map(self.send, range(len(self._prompts))))

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Sends until it is left, and then waits for the last answers."""
        over, numbers = threading.Event(), cycle(range(len(self._prompts)))
        lock = threading.Lock()

        def client() -> None:
            while not over.is_set():
                with lock:
                    number = next(numbers)
                self.send(number)

        with ThreadPoolExecutor(self._count) as pool:
            for _ in range(self._count):
                pool.submit(client)
            try:
                yield
            finally:
                over.set()


@contextmanager
def following(database: Path, folder: Path, pair: str = "demo") -> Iterator[None]:
    """`follow`, as a user starts it, once it knows the server of a pair. Raises EngineError where
    it ends before."""
    words, pair_id = command("--db", database, "follow", folder, "--pair", pair), read_pair(pair).id
    with database.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        store = stored(database)
        while pair_id not in {known.id for known in store.list_pairs()}:
            if process.poll() is not None:
                raise EngineError(database.with_suffix(".log").read_text().strip()[-300:])
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def published(
    server: RunningServer,
    store: TraceStore,
    policies: Iterable[Policy],
    pair_id: str = PAIR.id,
    device: str = "cpu",
) -> Iterator[tuple[Policy, int, float]]:
    """Publishes policies one after the other, at any moment of the agent's looks into its folder:
    each with its version and the seconds until it is in force."""
    rng = np.random.default_rng(0)
    for policy in policies:
        time.sleep(rng.uniform(0, 0.5))
        began = time.monotonic()
        version = publish(store, policy, pair_id, device)
        await_version(server, version)
        yield policy, version, time.monotonic() - began


def measure(quick: bool) -> dict[str, Any]:
    prompts = demo_prompts(8 if quick else PROMPTS, TOKENS)
    with temporary_folder() as folder, serving() as server:
        clients = Clients(server, prompts)
        with following(folder / "x.db", server.folder):
            store = stored(folder / "x.db")
            await_version(server, publish(store, AUTOREGRESSIVE))
            clients.send_once()
            plain = dict(clients.texts)
            clients.texts.clear()
            with clients.sending():
                policies = islice(cycle(POLICIES), 8 if quick else PUBLICATIONS)
                waits = [waited for *_, waited in published(server, store, policies)]
    differ = sum(text != plain[number] for number, text in clients.texts)
    failed, answered = len(clients.failures), len(clients.texts)
    median_s, longest_s = float(np.median(waits)), max(waits)
    return {
        "summary": f"{len(waits)} publications amid {CLIENTS} clients: {failed} of "
        f"{failed + answered} requests failed, {differ} texts differ from autoregression; in force "
        f"after {median_s:.2f} s in the median, {longest_s:.2f} s at most",
        "holds": not failed and not differ and longest_s <= LIMIT_S,
        "publications": len(waits),
        "requests": failed + answered,
        "failed": failed,
        "failures": clients.failures[:3],
        "differ": differ,
        "in_force_s": {
            "median": median_s,
            "p95": float(np.quantile(waits, 0.95)),
            "max": longest_s,
        },
    }

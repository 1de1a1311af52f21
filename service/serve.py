"""`serve`: an OpenAI-compatible server on the native decoder."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from spectune.db import DatabaseError
from spectune.optimizer.commands.common import Talk, open_store, pair_of, policy_named
from spectune.optimizer.commands.decoding import load
from spectune.optimizer.commands.results import Result
from spectune.optimizer.execute import DecodeOptions, encode, warm
from spectune.optimizer.in_force import ready_plan, watch
from spectune.optimizer.rollout.own_turns import TakesTurns
from spectune.optimizer.signals import on_signals
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import PolicySource, StaticSource
from spectune.runtime.reload import WatchedSource
from spectune.service.app import Server, make_app
from spectune.service.counters import Metrics
from spectune.service.decode_thread import DecodeThread
from spectune.service.listening import HTTPServer, listen, read_key, url_of
from spectune.service.recorder import Recorder
from spectune.settings import Serve
from spectune.traces.schema import Request, Workload
from spectune.traces.store import TraceStore

SEATS = 8
"""Texts decoded at once on a CPU unless somebody says otherwise."""
SHARES = {"all": 1.0, "none": 0.0}


def serve(s: Serve, talk: Talk) -> Result:
    key = read_key(s.host, s.key_file, "--key-file")
    with open_store(s, create=True) as store, listen(s.host, s.port) as listening:
        spec = pair_of(s, store)
        if s.policy != "active":
            policy_named(store, s.policy, "", "", "", talk)  # refused before a model is loaded
        pair = load(s, spec, talk)
        with pair.torch_threads(), _source(store, pair, s, talk) as source:
            _warm(pair)
            return _serve(store, pair, source, listening, key, s, talk)


@contextmanager
def _source(store: TraceStore, pair: LoadedPair, s: Serve, talk: Talk) -> Iterator[PolicySource]:
    """The policy named for ever, or for ``active`` what is published, now and later."""
    if s.policy != "active":
        policy = policy_named(store, s.policy, pair.id, pair.device_name, s.deployment, talk)
        profile = store.profile_of(pair.id, **pair.place)
        plan = ready_plan(store, pair, policy, profile, "coupled", None, together=True)
        yield StaticSource(plan)
        return
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    watching = watch(
        store,
        pair,
        None,
        deployment=s.deployment,
        together=True,
        # Each request says its own sampling: none is compared with what a policy was tuned for.
        warn=lambda line: None,
    )
    with watching as source:
        if source.last_error:
            talk.tell(f"publication {source.seen} is refused: {source.last_error}")
        yield source
    if source.unfinished:
        talk.tell(source.unfinished)


def _warm(pair: LoadedPair) -> None:
    """Decodes a few tokens, so that the first request is not the first touch of anything."""
    item = Request("warm", "", ids=(0, 0))
    warm(pair, encode(pair, Workload("warm", (item,)), DecodeOptions(max_new_tokens=8), ()))


def _serve(
    store: TraceStore,
    pair: LoadedPair,
    source: PolicySource,
    listening: socket.socket,
    key: str | None,
    s: Serve,
    talk: Talk,
) -> Result:
    metrics = Metrics()
    share = float(SHARES.get(str(s.texts), s.texts))
    recorder = Recorder(store, pair, source, share) if s.record else None
    turns = None
    if recorder is not None and isinstance(source, WatchedSource):
        at = {"deployment": s.deployment, "address": url_of(listening)}
        source = turns = TakesTurns(store, pair, source, recorder, **at)
    seats = s.seats or (SEATS if pair.device.type == "cpu" else 1)
    decoder = Decoder(pair, source, seats=seats, slots=s.slots)
    finished = {} if recorder is None else {"finished": recorder.put}
    thread = DecodeThread(decoder, s.waiting, observe=metrics.observe, **finished)
    if turns is not None:
        turns.begin(thread.now_s)

    def gauges() -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {
            ("spectune_policy_version", ""): source.current().version
        }
        if recorder is not None:
            for name in ("written", "dropped", "pending"):
                found["spectune_recorded", f'state="{name}"'] = getattr(recorder.status, name)
        return found

    limits: dict[str, Any] = {"timeout_s": s.timeout, "chat_tokens": s.chat_tokens}
    server = Server(pair, thread, metrics, key=key, **limits)
    app = make_app(server, is_draining=lambda: running.should_exit, gauges=gauges)
    running = HTTPServer(app, drain_s=s.drain)
    label = source.current().policy.label()
    talk.tell(f"serving {pair.spec.name} on {url_of(listening)}/v1 under {label}")
    try:
        with _drain_on_signals(running, talk):
            running.run([listening])
    finally:
        thread.close()
        status = None if recorder is None else recorder.close()
        if turns is not None:
            with suppress(DatabaseError):  # within minutes nobody counts on it anyway
                turns.close()
    counts = {name: int(value) for (name, labels), value in metrics.counts.items() if not labels}
    tokens = counts.get("vllm:generation_tokens_total", 0)
    recorded = "" if status is None else f", {status.written} texts recorded"
    lost = f", {status.dropped} not: {status.error}" if status and status.dropped else ""
    written = {} if status is None else {"written": status.written, "dropped": status.dropped}
    text = f"served {tokens} tokens{recorded}{lost}"
    return Result(text, {"counts": counts, "recorded": written})


@contextmanager
def _drain_on_signals(running: HTTPServer, talk: Talk) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the server when what it serves has ended, the next one
    cancels that."""

    def ends(name: str) -> None:
        if running.should_exit:
            running.force_exit = True
        else:
            talk.tell(f"{name}: finishing what is being served")
        running.should_exit = True

    with on_signals(ends):
        yield

"""`control`: one process that watches a fleet: it runs what is due, conducts rollouts, looks for
drift, and shows all that by HTTP, to be read alone."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest

from spectune.db.database_errors import DatabaseError
from spectune.optimizer.commands.common import Talk, open_store
from spectune.optimizer.commands.results import Result
from spectune.optimizer.drift.detect import check_installed
from spectune.optimizer.drift.watch import watch
from spectune.optimizer.metrics import registry_of
from spectune.optimizer.rollout.conductor import conduct
from spectune.optimizer.schedule import run_worker
from spectune.optimizer.schedule.worker import Run
from spectune.optimizer.signals import stop_on_signals
from spectune.service.board import Board, Figures
from spectune.service.fleet_page import fleet_page
from spectune.service.listening import HTTPServer, listen, read_key, url_of
from spectune.settings import Control
from spectune.traces.store import TraceStore

JOIN_S: Final = 10.0
"""Seconds that what runs beside jobs may take to end."""
ROWS: Final = {
    "status": ("deployments", "servers"),
    **{name: (name,) for name in ("publications", "rollouts", "alarms", "schedules")},
}
"""Figures by the name of their JSON."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def control(s: Control, talk: Talk) -> Result:
    token = read_key(s.host, s.token_file, "--token-file")
    check_installed()
    stop = threading.Event()
    with open_store(s, create=True) as store, listen(s.host, s.port) as listening:
        job = _job(s, store, talk) if s.schedules else None
        tasks: dict[str, Callable[[], Any]] = {
            "rollouts": lambda: conduct(store, stop, talk.tell),
            "drift": lambda: watch(store, stop, talk.tell, s.look),
        }
        threads = {name: threading.Thread(target=task, name=name) for name, task in tasks.items()}
        http = HTTPServer(make_app(Board(store), token, lambda: _ended(threads)), drain_s=1)
        threads["http"] = threading.Thread(target=http.run, args=([listening],), name="http")
        outcomes: Mapping[str, int] = {}
        with stop_on_signals(stop), _running(threads, stop, http):
            talk.tell(f"watches {store.database.name} on {url_of(listening)}")
            if job is None:
                stop.wait()
            else:
                how: dict[str, Any] = {"poll_s": s.poll, "stop": stop, "nice": s.nice}
                outcomes = run_worker(store.database, job, **how, tell=talk.tell)
    text = ", ".join(f"{number} {name}" for name, number in outcomes.items())
    return Result(text, outcomes)


def _job(s: Control, store: TraceStore, talk: Talk) -> Run | None:
    """What runs schedules; None, and a line, where it cannot here."""
    try:
        from spectune.optimizer.commands.decoding import quiet_transformers
        from spectune.optimizer.commands.work import tuning_job
    except ModuleNotFoundError as error:
        talk.tell(
            f"schedules are not run here: {error.name} is not installed (pip install "
            "'spectune[native,search]', or say --no-schedules)"
        )
        return None
    quiet_transformers(talk)
    return tuning_job(store, db=s.db, progress=talk.progress, tell=talk.tell)


@contextmanager
def _running(
    threads: Mapping[str, threading.Thread], stop: threading.Event, http: HTTPServer
) -> Iterator[None]:
    for thread in threads.values():
        thread.daemon = True
        thread.start()
    try:
        yield
    finally:
        stop.set()
        http.should_exit = True
        for thread in threads.values():
            thread.join(JOIN_S)


def _ended(threads: Mapping[str, threading.Thread]) -> list[str]:
    """Of what should run, what does not any more."""
    return [name for name, thread in threads.items() if not thread.is_alive()]


def make_app(board: Board, token: str | None, ended: Callable[[], list[str]] = list) -> FastAPI:
    """The application. ``token``: what requests must have, but for those of probes; ``ended``: what
    should run beside it, and does not."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    registry = registry_of(board.samples)
    page: list[tuple[Figures, str]] = []

    def check_token(request: Request) -> None:
        if token is None:
            return
        said = _password(request.headers.get("authorization", ""))
        if not hmac.compare_digest(said, token.encode()):
            told = {"WWW-Authenticate": 'Bearer, Basic realm="spectune"'}
            raise HTTPException(401, "no valid token: Authorization: Bearer TOKEN", headers=told)

    how: dict[str, Any] = {"methods": ["GET", "HEAD"]}
    read = APIRouter(dependencies=[Depends(check_token)])

    @app.api_route("/healthz", **how)
    async def healthz() -> Response:
        dead = ended()
        told = f"ended: {', '.join(dead)}" if dead else "ok"
        return PlainTextResponse(told, 503 if dead else 200, HEADERS)

    @app.api_route("/readyz", **how)
    def readyz() -> Response:
        is_up = board.is_up()
        told = "ok" if is_up else "the database is away"
        return PlainTextResponse(told, 200 if is_up else 503, HEADERS)

    @read.api_route("/metrics", **how)
    def metrics() -> Response:
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(generate_latest(registry), 200, HEADERS, media_type)

    @read.api_route("/", **how)
    def index() -> Response:
        figures = board.figures()
        if not page or page[0][0] is not figures:
            page[:] = [(figures, fleet_page(figures, board.name))]
        return HTMLResponse(page[0][1], 200, HEADERS)

    @read.api_route("/api/{name}.json", **how)
    def rows(name: str) -> Response:
        if name not in ROWS:
            raise HTTPException(404, f"there are: {', '.join(ROWS)}")
        figures = board.figures()
        data = {"at": figures.at.isoformat()} | {key: getattr(figures, key) for key in ROWS[name]}
        return Response(json.dumps(data), 200, HEADERS, "application/json")

    @app.exception_handler(DatabaseError)
    def away(_: Request, error: DatabaseError) -> Response:
        return JSONResponse({"error": str(error)}, 503, HEADERS)

    app.include_router(read)
    return app


def _password(said: str) -> bytes:
    """The token of a header: as it is, or as a browser sends it, as the password of anybody."""
    kind, _, value = said.partition(" ")
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return value.encode("latin-1", "replace") if kind.lower() == "bearer" else b""

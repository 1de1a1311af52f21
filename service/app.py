"""The HTTP application: OpenAI's routes, and those of whoever operates it."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spectune.runtime.loading import LoadedPair
from spectune.service.answers import Answer, ChatAnswer, CompletionAnswer, error_object
from spectune.service.calls import Call, ClientLeftError, PromptIds, RefusedError
from spectune.service.counters import Metrics
from spectune.service.decode_thread import DecodeThread
from spectune.service.requests import ChatRequest, CompletionRequest, Generation
from spectune.traces import schema
from spectune.traces.errors import WorkloadError

RETRY_AFTER_S = 1
BODY_BYTES = 32 << 20
"""The most that a request may have: it is read before anything is asked of it, the key included."""


class ErrorText(BaseModel):
    """What is wrong, as OpenAI says it."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """OpenAI's error object."""

    error: ErrorText


ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": Refusal} for status in ("4XX", "5XX")}
"""What every route may answer, for the OpenAPI document."""


class SafeJSON(JSONResponse):
    """JSON in ASCII: what a client sent may be no UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode("ascii")


class EventStream(StreamingResponse):
    """Server-sent events, whose call is cancelled however it ends."""

    def __init__(self, events: AsyncIterator[str], call: Call, end: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Seed": str(call.seed)}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._call, self._end = call, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.cancel()
            self._end()


class Server:
    """What the routes share: the pair, the thread that decodes, what is counted. A chat that says
    no number gets ``chat_tokens`` at most."""

    def __init__(
        self,
        pair: LoadedPair,
        thread: DecodeThread,
        metrics: Metrics,
        *,
        timeout_s: float = 600.0,
        chat_tokens: int = 1024,
        key: str | None = None,
    ) -> None:
        self.pair, self.thread, self.metrics = pair, thread, metrics
        self.timeout_s, self.chat_tokens, self.key = timeout_s, chat_tokens, key

    def check_key(self, request: Request) -> None:
        """Raises RefusedError without the key, where there is one."""
        said = request.headers.get("authorization", "").encode("latin-1", "replace")
        if self.key is not None and not hmac.compare_digest(said, f"Bearer {self.key}".encode()):
            message = "no valid API key: send it as Authorization: Bearer KEY"
            raise RefusedError(401, message, code="invalid_api_key")

    def check_model(self, name: str) -> None:
        """Raises RefusedError for another model than the pair's."""
        if name != self.pair.spec.name:
            message = f"the model {name!r} is not served; {self.pair.spec.name!r} is"
            raise RefusedError(404, message, param="model", code="model_not_found")

    def check_number(self, texts: int) -> None:
        """Raises RefusedError for more texts than may ever wait and be decoded."""
        if texts > (most := self.thread.limit + self.thread.decoder.seats):
            raise RefusedError(400, f"{texts} texts at once; at most {most} may be", param="n")

    async def encode(self, request: schema.Request, *, chat: bool, param: str) -> list[int]:
        """Token ids of a prompt, made beside the event loop. Raises RefusedError."""
        try:
            return await asyncio.to_thread(self.pair.encode_request, request, chat=chat)
        except WorkloadError as error:
            raise RefusedError(400, str(error), param=param) from None

    async def completion(self, asked: CompletionRequest) -> Answer:
        """A completion that has begun. Raises RefusedError."""
        self.check_model(asked.model)
        self.check_number(len(asked.prompts) * (asked.n or 1))
        prompts = []
        for n, prompt in enumerate(asked.prompts):
            one = schema.Request(f"prompt[{n}]", "", is_plain=True)
            if isinstance(prompt, str):
                one = replace(one, prompt=prompt)
            else:
                one = replace(one, ids=tuple(prompt))
            ids = await self.encode(one, chat=False, param="prompt")
            prompts.append(PromptIds(ids, None if one.ids else one.prompt))
        call = self._call(asked, prompts)
        return CompletionAnswer(call, self.pair, self.pair.spec.name, self._fingerprint)

    async def chat(self, asked: ChatRequest) -> Answer:
        """The answer to a conversation, begun. Raises RefusedError."""
        self.check_model(asked.model)
        self.check_number(asked.n or 1)
        if len(asked.messages) > 1 and not self.pair.has_template:
            message = "a conversation needs a chat template, and the target's tokenizer has none"
            raise RefusedError(400, message, param="messages")
        messages = tuple(message.model_dump(exclude_none=True) for message in asked.messages)
        one = schema.Request("messages", "", messages=messages)
        ids = await self.encode(one, chat=True, param="messages")
        call = self._call(asked, [PromptIds(ids)])
        return ChatAnswer(call, self.pair, self.pair.spec.name, self._fingerprint)

    def _call(self, asked: Generation, prompts: Sequence[PromptIds]) -> Call:
        limits = self.chat_tokens, self.timeout_s
        call = Call(self.thread, asked, prompts, *limits)
        self.metrics.add("vllm:prompt_tokens_total", call.prompt_tokens)
        return call

    @property
    def _fingerprint(self) -> str:
        return f"fp_{self.pair.id[:12]}"

    async def respond(self, answer: Answer, asked: Generation, request: Request) -> Response:
        """The answer, whole or streamed; cancelled where the client leaves."""
        call = answer.call
        if asked.stream:
            events = answer.events(usage=asked.includes_usage)
            return EventStream(events, call, lambda: self.ended(call))
        leaving = asyncio.create_task(_leaving(request, call))
        try:
            document = await answer.to_json()
        except ClientLeftError:
            return Response(status_code=call.status)
        except RefusedError as refused:
            return _refusal(refused)
        finally:
            call.cancel()
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await leaving
            self.ended(call)
        return SafeJSON(document, headers={"X-Seed": str(call.seed)})

    def ended(self, call: Call) -> None:
        """Counts the response to a call."""
        self.metrics.add("spectune_responses_total", labels=f'status="{call.status}"')
        if call.first_token_s is not None:
            self.metrics.add("spectune_first_token_seconds_sum", call.first_token_s)
            self.metrics.add("spectune_first_token_seconds_count")

    def refuse(self, refused: RefusedError) -> Response:
        """The response to what began no call, counted."""
        self.metrics.add("spectune_responses_total", labels=f'status="{refused.status}"')
        return _refusal(refused)


def _refusal(refused: RefusedError) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(RETRY_AFTER_S)}}
    return SafeJSON(error_object(refused), refused.status, headers.get(refused.status))


async def _leaving(request: Request, call: Call) -> None:
    """Says to a call when its client has left; its body is read by then."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    call.leave()


class BodyLimit:
    """Refuses a request with more than ``BODY_BYTES`` while it is read."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > BODY_BYTES:
                raise HTTPException(413, f"a body of more than {BODY_BYTES >> 20} MiB")
            return message

        await self.app(scope, limited if scope["type"] == "http" else receive, send)


def make_app(
    server: Server,
    is_draining: Callable[[], bool] = lambda: False,
    gauges: Callable[[], Mapping[tuple[str, str], float]] = dict,
) -> FastAPI:
    """The application; it begins and ends with the thread that decodes. ``is_draining`` and
    ``gauges`` are asked where somebody wants to know."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        server.thread.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(server.thread.close)

    app = FastAPI(title="spectune", lifespan=life, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit)

    async def check_key(request: Request) -> None:
        server.check_key(request)

    v1 = APIRouter(prefix="/v1", dependencies=[Depends(check_key)], responses=ERRORS)

    @v1.post("/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await server.respond(await server.completion(asked), asked, request)

    @v1.post("/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await server.respond(await server.chat(asked), asked, request)

    @v1.get("/models")
    async def models() -> Response:
        about = {"object": "model", "created": 0, "owned_by": "spectune"}
        positions = server.pair.context(()).positions
        model = {"id": server.pair.spec.name, **about, "max_model_len": positions}
        return SafeJSON({"object": "list", "data": [model]})

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if server.thread.is_alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        is_ready = server.thread.is_alive and not is_draining()
        return Response(status_code=200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        thread = server.thread
        now = {
            ("vllm:num_requests_running", ""): thread.running,
            ("vllm:num_requests_waiting", ""): thread.waiting,
            **gauges(),
        }
        text = server.metrics.text(server.pair.spec.name, now)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return server.refuse(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return server.refuse(_invalid(error))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return server.refuse(RefusedError(error.status_code, str(error.detail)))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        message = "something unexpected; the server's log says what"
        return server.refuse(RefusedError(500, message, "server_error"))

    app.include_router(v1)
    return app


def _invalid(error: RequestValidationError) -> RefusedError:
    """The first thing that is wrong in a body; of unions the alternative that goes furthest."""
    first = max(error.errors(), key=lambda each: len(each["loc"]), default=None)
    if first is None:
        return RefusedError(400, "the body is no request")
    places = [str(part) for part in first["loc"] if part != "body"]
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown key; leave it out"
    named = places[0] if places and first["type"] != "json_invalid" else None
    where = f"{named}: " if named and named not in message else ""
    said = where + message
    return RefusedError(400, said, param=named or message.split(" ")[0].rstrip(":"))

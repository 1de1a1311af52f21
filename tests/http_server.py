"""The HTTP server as tests use it: in a thread of this process, on a port that is free."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import PolicySource
from spectune.service.app import Server, make_app
from spectune.service.counters import Metrics
from spectune.service.decode_thread import DecodeThread
from spectune.service.listening import HTTPServer

PATIENCE_S = 240.0
MODEL = "tiny-llama"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    pair: LoadedPair
    url: str
    thread: DecodeThread
    http: HTTPServer

    def post(self, path: str, key: str | None = None, **body: Any) -> httpx2.Response:
        """The response to a body."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        asked = {"model": MODEL, **body}
        return httpx2.post(f"{self.url}/v1/{path}", json=asked, headers=headers, timeout=PATIENCE_S)

    def get(self, path: str, key: str | None = None) -> httpx2.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx2.get(f"{self.url}{path}", headers=headers, timeout=PATIENCE_S)

    def answer(self, path: str, **body: Any) -> dict[str, Any]:
        """The document of a whole answer."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer, which ends as it should."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        return chunks_of(response.text.split("\n\n"))

    def texts(self, path: str, **body: Any) -> list[str]:
        """The texts of the choices, in order."""
        choices = self.answer(path, **body)["choices"]
        assert [choice["index"] for choice in choices] == [*range(len(choices))]
        return [choice.get("text", choice.get("message", {}).get("content")) for choice in choices]

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """OpenAI's error object, with which a body is refused."""
        return error_of(self.post(path, **body), status)

    def metric(self, name: str) -> float:
        """A metric without labels of its own."""
        lines = self.get("/metrics").text.splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f"{name}{{")]
        return float(value)


@contextmanager
def deaf_client(url: str, **body: Any) -> Iterator[None]:
    """A client that asks for completions and reads nothing of what comes; it leaves with the
    block."""
    content = json.dumps({"model": MODEL, **body}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    document = response.json()
    assert set(document) == {"error"}
    error: dict[str, Any] = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def chunks_of(events: Sequence[str]) -> list[dict[str, Any]]:
    """The documents of a whole stream of server-sent events."""
    *data, end, rest = events
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in data]


@contextmanager
def served(
    pair: LoadedPair,
    source: PolicySource,
    *,
    seats: int = 4,
    limit: int = 16,
    slots: int | None = None,
    finished: Any = lambda job, finish: None,
    **how: Any,
) -> Iterator[Served]:
    """A pair, served until the block ends."""
    metrics = Metrics()
    decoder = Decoder(pair, source, seats=seats, slots=slots)
    thread = DecodeThread(decoder, limit, observe=metrics.observe, finished=finished)
    server = Server(pair, thread, metrics, **how)
    http = HTTPServer(make_app(server))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = threading.Thread(target=http.run, args=([listening],), daemon=True)
        running.start()
        yield Served(pair, f"http://127.0.0.1:{listening.getsockname()[1]}", thread, http)
        http.should_exit = True
        running.join(PATIENCE_S)
        assert not running.is_alive()

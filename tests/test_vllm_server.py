"""Executing on vLLM without vLLM: requests as a load says, to a server over HTTP, and why a server
ended."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import eventually

from spectune.engines.protocol import Load, Prompt, Wanted
from spectune.engines.vllm.execute import Sending, Vllm, body_of
from spectune.engines.vllm.server import Installed, Server, installed, reason_in
from spectune.runtime.pair import read_pair
from spectune.traces.errors import EngineError, PairError
from spectune.traces.schema import Sampling

LOG = """\
(APIServer pid=7) INFO 11-23 12:19:20 [model.py:733] Resolved architecture: LlamaForCausalLM
(APIServer pid=7) WARNING 11-23 12:19:20 [system_utils.py:255] This can cause errors like `OSError: [Errno 24] Too many open files`
(EngineCore pid=9) ERROR 11-23 12:21:47 [core.py:1510] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-23 12:21:47 [core.py:1510]   File "core.py", line 1482, in run_engine_core
(EngineCore pid=9) ERROR 11-23 12:21:47 [core.py:1510] ValueError: Head size 24 is not supported by this backend.
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""  # noqa: E501


class Slow(ThreadingHTTPServer):
    """Answers a completion after a moment; refuses a prompt of token 4. ``most`` is how many were
    on their way at one time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        self.arrived: dict[str, float] = {}


class Answer(BaseHTTPRequestHandler):
    server: Slow

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.arrived[asked["request_id"]] = time.perf_counter()
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        time.sleep(0.03)
        with self.server.lock:
            self.server.now -= 1
        self.send_response(400 if asked["prompt"] == [4] else 200)
        self.end_headers()
        self.wfile.write(b"the prompt\\n is too long")

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def slow() -> Iterator[Slow]:
    with Slow() as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def bodies(count: int, token: int = 3) -> dict[int, str]:
    return {i: body_of(f"1.{i}", Prompt(str(i), "", (token,)), Sampling(), 8) for i in range(count)}


def living(within_s: float) -> bool:
    """As :meth:`engines.vllm.server.Server.ended` of one that lives."""
    return False


def test_so_many_clients_send_so_many_requests_at_a_time(slow: Slow) -> None:
    began = time.perf_counter()
    with Sending(slow.server_address[:2], bodies(9), Load(clients=3), began) as sending:
        eventually(lambda: len(sending.answered) == 9)
        sending.check(SimpleNamespace(ended=living))
    assert sending.answered == set(range(9))
    assert slow.most == 3


def test_arrivals_are_kept_whatever_is_on_its_way(slow: Slow) -> None:
    arrivals = (0.0, 0.0, 0.001, 0.002, 0.08)
    began = time.perf_counter()
    with Sending(slow.server_address[:2], bodies(5), Load(arrivals=arrivals), began) as sending:
        eventually(lambda: len(sending.answered) == 5)
    assert all(slow.arrived[f"1.{i}"] - began >= moment for i, moment in enumerate(arrivals))
    assert slow.most > 1


def test_what_a_server_refuses_and_one_that_does_not_answer_are_said_in_one_line(
    slow: Slow,
) -> None:
    def trouble(sending: Sending) -> None:
        eventually(lambda: sending.check(SimpleNamespace(ended=living)) is not None)

    refused = Sending(slow.server_address[:2], bodies(1, token=4), Load(), time.perf_counter())
    with pytest.raises(EngineError, match=r"^vLLM refused a request: the.*too long$"), refused:
        trouble(refused)
    silent = Sending(("127.0.0.1", 9), bodies(1), Load(), time.perf_counter())
    with pytest.raises(EngineError, match="vLLM does not answer: ConnectionRefusedError"), silent:
        trouble(silent)


def test_the_reason_is_the_first_error_of_its_own_in_the_log() -> None:
    assert reason_in(LOG) == "ValueError: Head size 24 is not supported by this backend."
    assert reason_in(LOG.splitlines()[0]) == "Resolved architecture: LlamaForCausalLM"
    first = "(A pid=7) pydantic_core.ValidationError: 1 validation error for ModelConfig"
    wrong = f"{first}\n(A pid=7)   Value error, no such model [type=x]"
    assert reason_in(wrong) == "Value error, no such model"
    assert reason_in("") == "it wrote nothing"


def test_a_users_own_arguments_come_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_pair: Path
) -> None:
    spec, found = read_pair(str(tiny_pair)), Installed("python", "0.32.0", cpu=True)
    monkeypatch.setenv("SPECTUNE_VLLM_ARGS", "--max-num-seqs 3 --served-model-name 'a b'")
    own = Server(found, tmp_path, spec, Wanted("none")).arguments[-4:]
    assert own == ["--max-num-seqs", "3", "--served-model-name", "a b"]
    monkeypatch.setenv("SPECTUNE_VLLM_ARGS", "--served-model-name 'a b")
    with pytest.raises(EngineError, match=r"^SPECTUNE_VLLM_ARGS=.* 'a b: no closing quotation$"):
        Server(found, tmp_path, spec, Wanted("none"))


def test_a_python_without_vllm_is_said_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tiny_pair: Path
) -> None:
    monkeypatch.delenv("SPECTUNE_VLLM_PYTHON", raising=False)
    with pytest.raises(EngineError, match="not installed here; `pip install vllm` installs it, or"):
        installed()
    monkeypatch.setenv("SPECTUNE_VLLM_PYTHON", str(tiny_pair / "python"))
    with pytest.raises(EngineError, match="this is no Python that runs"):
        installed()
    with pytest.raises(PairError, match="has no draft 'x'; it has: near, far, ngram"):
        Vllm(read_pair(str(tiny_pair)), Wanted("x"))


STUB = """\
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

print("WARNING spectune: nothing is recorded or followed: KeyError('x')", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Healthy).serve_forever()
"""


def test_a_server_in_which_our_scheduler_does_nothing_is_no_server_of_ours(
    tmp_path: Path, tiny_pair: Path
) -> None:
    """Else its first answer would be waited for in vain."""
    (tmp_path / "stub.py").write_text(STUB)
    made = Server(
        Installed("", "0.32.0", cpu=True), tmp_path, read_pair(str(tiny_pair)), Wanted("none")
    )
    made.arguments = [sys.executable, str(tmp_path / "stub.py")]
    with pytest.raises(
        EngineError, match=r"without spectune: nothing is .* followed: KeyError\('x'\)$"
    ):
        made.start()
    assert not made.alive

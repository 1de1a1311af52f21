"""Executing on a vLLM server that runs, without vLLM: requests as a load says, policies and rounds
by the agent's folder, and what is refused; and why a server of our own ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from doors import Door
from doubles import REFUSED, FakeVllm, served
from synthetic import policy
from waiting import eventually

from spectune.engines.engine import Answered, Load, Prompt, Wanted
from spectune.engines.vllm.running import RunningServer
from spectune.engines.vllm.server import OwnServer, installed, reason_in, server_arguments
from spectune.runtime.loading import LoadedPair
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.traces.errors import EngineError, PairError, PolicyError, TraceError, WorkloadError
from spectune.traces.schema import Sampling

LOG = """\
(APIServer pid=7) INFO 11-23 12:19:20 [model.py:733] Resolved architecture: LlamaForCausalLM
(APIServer pid=7) WARNING 11-23 12:19:20 [system_utils.py:255] This can cause errors like `OSError: [Errno 24] Too many open files`
(EngineCore pid=9) ERROR 11-23 12:21:47 [core.py:1510] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-23 12:21:47 [core.py:1510]   File "core.py", line 1482, in run_engine_core
(EngineCore pid=9) ERROR 11-23 12:21:47 [core.py:1510] ValueError: Head size 24 is not supported by this backend.
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""  # noqa: E501


THREE, TABLE = policy("near", 3), policy("near", {"kind": "by_load", "gamma": {"1": 4, "3": 2}})
PROMPTS = [Prompt(f"p{n}", "code", (7 + n, 8, 9)) for n in range(9)]


@pytest.fixture
def fake(tmp_path: Path, pair: LoadedPair) -> Iterator[FakeVllm]:
    with served(tmp_path / "folder", pair) as running:
        yield running


def connected(fake: FakeVllm, pair: PairSpec | None = None) -> RunningServer:
    return RunningServer(fake.url, fake.folder, pair)


def execute(
    server: RunningServer, load: Load, policy: Policy = THREE, prompts: Sequence[Prompt] = PROMPTS
) -> list[Answered]:
    return list(server.execute(prompts, policy, load, sampling=Sampling(), max_new_tokens=8))


def policy_file(fake: FakeVllm) -> dict[str, Any]:
    return dict(json.loads((fake.folder / "policy.json").read_text()))


def tried(fake: FakeVllm) -> dict[str, Any]:
    return dict(policy_file(fake)["trial"])


def test_policies_change_rounds_and_no_text(fake: FakeVllm, pair: LoadedPair) -> None:
    server = connected(fake, pair.spec)
    assert (server.spec.id, server.draft, server.wanted.max_num_seqs) == (pair.spec.id, "near", 4)
    texts = {}
    for chosen in (THREE, TABLE, AUTOREGRESSIVE):
        answers = execute(server, Load(3), chosen)
        found = {a.trajectory.request_id: a.trajectory.output_ids.tolist() for a in answers}
        texts = texts or found
        assert found == texts
        assert sorted(texts) == [prompt.id for prompt in PROMPTS]
        steps = [step for answer in answers for step in answer.steps]
        assert {step.policy for step in steps} == {chosen.id}
        assert max(step.drafted for step in steps) == chosen.gamma_max
        assert {step.draft for step in steps if step.drafted} <= {"near"}
        assert all(0 <= a.arrived_s <= a.first_token_s <= a.finished_s for a in answers)


def test_clients_and_arrivals_are_kept(fake: FakeVllm) -> None:
    server = connected(fake)
    execute(server, Load(3))
    assert fake.most_at_once == 3
    fake.arrived.clear()
    fake.pass_s = 0.2  # so that no request has ended when the next arrives
    arrivals = (0.0, 0.0, 0.001, 0.002, 0.3)
    execute(server, Load(arrivals=arrivals), prompts=PROMPTS[:5])
    assert fake.most_at_once > 3
    assert max(fake.arrived) - min(fake.arrived) >= 0.2


def test_what_is_left_unread_does_not_hold_up_the_next(fake: FakeVllm) -> None:
    server = connected(fake)
    unread = server.execute(PROMPTS, THREE, Load(4), sampling=Sampling(), max_new_tokens=32)
    first = next(unread)
    unread.close()
    assert first.trajectory.request_id in {prompt.id for prompt in PROMPTS}
    assert len(execute(server, Load(), prompts=PROMPTS[:1])) == 1


def test_what_is_in_force_stays_beside_what_is_tried(fake: FakeVllm) -> None:
    def document(version: int, gammas: dict[str, int]) -> str:
        return json.dumps({"format": 1, "version": version, "policy": "p", "gammas": gammas})

    path = fake.folder / "policy.json"
    server = connected(fake)
    assert server.policy == policy("near", 4)  # the server's own
    server.put_in_force(THREE)
    assert tried(fake)["version"] == fake.version < 0
    assert (server.policy, policy_file(fake)["version"]) == (policy("near", 4), 0)
    server.close()
    assert not path.exists()
    path.write_text(document(3, {"1": 4, "3": 2}))
    server = connected(fake)
    assert server.policy == TABLE
    server.put_in_force(THREE)
    assert (server.policy, policy_file(fake)["version"]) == (TABLE, 3)
    server.close()
    server.close()
    assert policy_file(fake) == json.loads(document(3, {"1": 4, "3": 2}))
    server.put_in_force(THREE)
    path.write_text(document(4, {"1": 1}))  # published meanwhile
    server.put_in_force(THREE)
    assert tried(fake)["version"] == fake.version < 0, "or it would measure another's"
    answers = server.execute(PROMPTS, THREE, Load(2), sampling=Sampling(), max_new_tokens=16)
    next(answers)
    path.write_text(document(4, {"1": 1}))
    with pytest.raises(EngineError, match="its trial ended, or was changed by another"):
        list(answers)
    server.close()
    assert policy_file(fake)["version"] == 4
    path.write_text('{"format": 1, "version": null}')
    server.put_in_force(THREE)
    server.close()
    assert not path.exists(), "it put nothing in force"
    path.write_text(document(4, {"1": 1}))
    server.put_in_force(TABLE)
    server.close()
    assert policy_file(fake) == json.loads(document(4, {"1": 1}))
    with pytest.raises(PolicyError, match="this server drafts at most 4 tokens, not 7"):
        server.put_in_force(policy("near", 7))
    assert policy_file(fake)["version"] == 4


def test_a_table_that_is_refused_is_not_measured_as_the_one_before(fake: FakeVllm) -> None:
    server = connected(fake)
    server.put_in_force(policy("near", 1))
    fake.most = 2
    for _ in range(2):
        with pytest.raises(PolicyError, match=r"vLLM refuses near fixed\(gamma=3\): drafts 0 to 2"):
            execute(server, Load(), THREE, PROMPTS[:1])
    for chosen in (policy("near", 2), policy("near", 1)):
        (answer,) = execute(server, Load(), chosen, PROMPTS[:1])
        assert {step.policy for step in answer.steps} == {chosen.id}
    server.close()
    assert not (fake.folder / "policy.json").exists()


def test_what_is_tried_lasts_while_it_is_renewed(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped, or killed, no longer does; one that goes on measures nothing more
    as the trial's."""
    running = "spectune.engines.vllm.running"
    monkeypatch.setattr(f"{running}.RENEW_S", 0.05)
    monkeypatch.setattr(f"{running}.TTL_S", 2.0)
    server = connected(fake)
    server.put_in_force(THREE)
    version, first = fake.version, tried(fake)["renewal"]
    eventually(lambda: tried(fake)["renewal"] > first + 40)  # which takes longer than it lasts
    assert (fake.version, fake.policy) == (version, THREE.id)
    answers = server.execute(PROMPTS, THREE, Load(2), sampling=Sampling(), max_new_tokens=16)
    next(answers)
    monkeypatch.setattr(f"{running}.RENEW_S", 3600.0)
    eventually(lambda: fake.version == 0)
    with pytest.raises(EngineError, match="its trial ended, or was changed by another"):
        list(answers)
    server.put_in_force(THREE)
    assert fake.version < version
    server.close()


def test_whose_texts_are_noted_stays(fake: FakeVllm) -> None:
    (fake.folder / "policy.json").write_text('{"format": 1, "version": 0, "texts": "none"}')
    server = connected(fake)
    server.put_in_force(THREE)
    assert policy_file(fake)["texts"] == "none"


def test_a_key_and_a_path_reach_the_server(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.key, fake.path = "secret", "/models/a"
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "of another host")
    for ending in ("/models/a", "/models/a/v1/"):
        assert RunningServer(fake.url + ending, fake.folder).draft == "near"
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(EngineError, match=r"asks for a key \(401\); VLLM_API_KEY names it"):
        RunningServer(f"{fake.url}/models/a", fake.folder)
    assert fake.authorization is None


def test_a_password_in_a_url_is_sent_and_never_told(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of others")
    host = fake.url.removeprefix("http://")
    server = RunningServer(f"http://me:hunter2@{host}", fake.folder)
    assert (server.url, str(fake.authorization)[:6]) == (fake.url, "Basic ")
    door = Door(str(tmp_path / "a.db"))
    there = {"pair": "demo", "folder": fake.folder}
    for url in (f"http://me:hunter2@{host}", "http://me:hunter2@x:port", "me:hunt/er2@x"):
        found = door.call("tune", url=url, workload="demo", **there)
        schedule = door.call("schedule add nightly", cron="@daily", url=url, since="1h", **there)
        for one in (found, schedule):
            assert one.exit_code == 2
            assert "hunt" not in one.stdout + one.stderr


def test_what_is_wrong_is_one_line(
    fake: FakeVllm, tmp_path: Path, demo: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match="no server answers"):
        RunningServer("http://127.0.0.1:9", fake.folder)
    with pytest.raises(EngineError, match="a server's URL is expected, as http://localhost:8000"):
        RunningServer("ftp://x", fake.folder)
    with pytest.raises(EngineError, match=r"start vLLM with SPECTUNE_FOLDER=.* --sched"):
        RunningServer(fake.url, tmp_path)
    with pytest.raises(PairError, match="but this server serves"):
        connected(fake, demo)
    with pytest.raises(EngineError, match=r"refused \(400\): .*is too long"):
        execute(connected(fake), Load(), prompts=[Prompt("x", "", (REFUSED,))])
    for ids, said in (((), "request x: the prompt has no tokens"), (395 * (7,), "exceed the 400")):
        with pytest.raises(WorkloadError, match=said):
            execute(connected(fake), Load(), prompts=[Prompt("x", "", ids)])
    with pytest.raises(TraceError, match="arrivals are seconds from the start, and never fall"):
        Load(arrivals=(1.0, 0.5))
    monkeypatch.setattr("spectune.engines.vllm.running.NOTED_S", 0.1)
    fake.noting = False
    with pytest.raises(EngineError, match=r"notes nothing of it: .*the folder is another server's"):
        connected(fake)
    fake.refused = {"version": 0, "reason": "data_parallel_size 2: only 1 is followed"}
    fake.write_status()
    with pytest.raises(EngineError, match="the agent is off: data_parallel_size 2"):
        connected(fake)


def test_the_reason_is_the_first_error_of_its_own_in_the_log() -> None:
    assert reason_in(LOG) == "ValueError: Head size 24 is not supported by this backend."
    assert reason_in(LOG.splitlines()[0]) == "Resolved architecture: LlamaForCausalLM"
    first = "(A pid=7) pydantic_core.ValidationError: 1 validation error for ModelConfig"
    wrong = f"{first}\n(A pid=7)   Value error, no such model [type=x]"
    assert reason_in(wrong) == "Value error, no such model"
    assert reason_in("") == "it wrote nothing"


def test_a_users_own_arguments_come_last(monkeypatch: pytest.MonkeyPatch, tiny_pair: Path) -> None:
    spec = read_pair(str(tiny_pair))
    monkeypatch.setenv("SPECTUNE_VLLM_ARGS", "--max-num-seqs 3 --served-model-name 'a b'")
    arguments = server_arguments(spec, Wanted("near", most=8, max_len=100), cpu=True)
    # room after the last round's drafts for as many again
    assert arguments[arguments.index("--max-model-len") + 1] == "117"
    last = server_arguments(spec, Wanted("none"), cpu=True)[-4:]
    assert last == ["--max-num-seqs", "3", "--served-model-name", "a b"]
    monkeypatch.setenv("SPECTUNE_VLLM_ARGS", "--served-model-name 'a b")
    with pytest.raises(EngineError, match=r"^SPECTUNE_VLLM_ARGS=.* 'a b: no closing quotation$"):
        server_arguments(spec, Wanted("none"), cpu=True)


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
        OwnServer(read_pair(str(tiny_pair)), Wanted("x"))


STARTING = """
from spectune.engines.engine import Wanted
from spectune.engines.vllm.server import OwnServer
from spectune.runtime.pair import read_pair
OwnServer(read_pair("demo"), Wanted("none"))
"""


def test_a_server_of_ours_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    package, about = tmp_path / "vllm/entrypoints/openai", tmp_path / "vllm-0.32.0.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    started, ended = tmp_path / "started", tmp_path / "ended"
    (package / "api_server.py").write_text(
        "import pathlib, signal\n"
        f"signal.signal(signal.SIGTERM, lambda *_: pathlib.Path({str(ended)!r}).touch())\n"
        f"pathlib.Path({str(started)!r}).touch()\nsignal.pause()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "SPECTUNE_VLLM_PYTHON"}
    paths = os.pathsep.join(filter(None, (str(tmp_path), environment.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    starting = subprocess.Popen([sys.executable, "-c", STARTING], env=environment)
    eventually(started.exists)
    starting.kill()
    assert starting.wait() == -signal.SIGKILL
    eventually(ended.exists)

"""Commands that are printed, in sentences, after a command or on the pages, are commands: their
options exist, and they run as they stand where a tiny pair, or a stand-in for vLLM, is enough."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pandas
import pytest
from agent_folder import Agent
from databases import opened
from doors import ROOT, Door, parsed, put_profile, write_lines
from doubles import FakeVllm, served
from test_docs import PAGES, PROMPTS, ours

from spectune import api
from spectune.cli import main
from spectune.engines.vllm.follow import Follower
from spectune.options import options_of
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE

PRODUCT = ("traces", "db", "runtime", "engines", "optimizer")
"""Folders whose modules speak to users."""
LITTLE = """\
threads = 1
[requests]
limit = 18
[sampling]
max_new_tokens = 8
[search]
trials = 4
gamma_max = 4
[trees]
width = 0
[race]
budget = "0.3s"
finalists = 1
"""
"""A spectune.toml that makes a tuning short."""
FOLDER, URL = "/var/lib/spectune", "http://localhost:8000"
"""A server's folder and URL on the pages."""
PLACE = ("--pair", "pair.json", "--deployment", "vllm")


# ------------------------------------------------------------------------------------- in sentences


def why_wrong(text: str) -> str:
    """What is wrong with a command, or the beginning of one, in a sentence; empty where nothing is,
    or where it is none of ours."""
    words = text.removeprefix("spectune ").split()
    group, n = main, 0
    while n < len(words) and words[n] in getattr(group, "commands", {}):
        group, n = group.commands[words[n]], n + 1  # type: ignore[assignment]
    if n == 0:
        return "no such command" if text.startswith("spectune ") and words[0][0] != "-" else ""
    if hasattr(group, "commands"):
        return f"no command {words[n]!r}" if n < len(words) else ""
    options = options_of(api.COMMANDS[" ".join(words[:n])][0])
    flags = {flag for param in group.params for flag in param.opts} | {"--help"}
    for flag, value in zip(words[n:], [*words[n + 1 :], ""], strict=False):
        if flag.startswith("-") and flag.partition("=")[0] not in flags:
            return f"no option {flag}"
        if flag == "--set" and value.partition("=")[0] not in options:
            return f"no key {value}"
    return ""


def sentences() -> Iterator[tuple[str, str]]:
    """(where, what stands in backticks) of the pages and of the product's messages and help."""
    for page, text in PAGES.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`([^`\n]+)`", prose):
            yield page, code
    files = [*ROOT.glob("*.py"), *(p for f in PRODUCT for p in (ROOT / f).rglob("*.py"))]
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "X" for p in node.values)
                text = "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            for code in re.findall(r"`([^`]+)`", text):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", code


def test_commands_in_sentences_exist() -> None:
    assert why_wrong("spectune tun")
    assert why_wrong("tune --urls")
    assert why_wrong("record --set trees.widht=8")
    assert why_wrong("policies activte active")
    seen = [*sentences()]
    wrong = [(where, code, why) for where, code in seen if (why := why_wrong(code))]
    assert not wrong
    assert sum(code.startswith(("tune", "record", "spectune")) for _, code in seen) > 40


# ----------------------------------------------------------------------------------------- on pages


def make_place(folder: Path, tiny_pair: Path) -> None:
    """What the pages name: a pair with drafts ``small`` and ``medium``, prompts, a policy."""
    models, tiny = folder / "models", tiny_pair.parent
    models.mkdir()
    for name, path in (("target", "target"), ("draft-small", "near"), ("small", "near")):
        (models / name).symlink_to(tiny / path)
    drafts = {"small": str(tiny / "near"), "medium": str(tiny / "far")}
    spec = {"name": "mine", "target": str(tiny / "target"), "drafts": drafts}
    (folder / "pair.json").write_text(json.dumps(spec))
    texts = [f"{PROMPTS[i % 4]} {i}" for i in range(18)]
    write_lines(folder / "chats.jsonl", [{"id": str(i), "prompt": t} for i, t in enumerate(texts)])
    (folder / "main").mkdir()
    table = pandas.DataFrame({"question": texts})
    table.to_parquet(folder / "main" / "test-00000-of-00001.parquet")
    small = {"draft": "small", "window": {"kind": "fixed", "gamma": 2}}
    (folder / "candidate.json").write_text(json.dumps(small))
    (folder / "little.toml").write_text(LITTLE)


def run(words: Sequence[str], expected: int = 0) -> str:
    """What a command line prints; asserts that it ends as expected, and well each command that it
    prints; a `tune` or a `follow` among those is only read."""
    ran = Door(None).call(*words)
    assert ran.exit_code == expected, (words, ran.output)
    for line in ran.stdout.splitlines():
        if line.startswith("spectune "):
            printed = shlex.split(line, comments=True)[1:]
            assert parsed(printed)
            if not {"tune", "follow"} & {*printed}:
                run(printed)
    return ran.output


@pytest.fixture
def place(tmp_path: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    make_place(tmp_path, tiny_pair)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECTUNE_CONFIG", "little.toml")
    return tmp_path


def test_the_commands_of_the_pages_run_on_a_pair(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page after page, as later ones read what earlier ones stored; what needs a server, or
    PostgreSQL, is for the tests below, or only read (:mod:`test_docs`)."""
    put_profile("spectune.db", "pair.json")
    for policy_name in ("candidate.json", "autoregressive"):  # to go back from, and to
        run(["policies", "activate", policy_name, "--pair", "pair.json"])
    ran = 0
    for page in ("README.md", "docs/configuration.md", "docs/report.md", "docs/schedules.md"):
        for words in ours(page):
            if page == "docs/configuration.md" and words[0] == "tune":
                monkeypatch.setenv("SPECTUNE_PAIR", "pair.json")
            if words == ["schedule", "run"]:  # it runs until it is ended
                words = [*words, "--once"]
            # A server runs until it is ended: `test_serve_command` starts one.
            if words[0] != "serve" and not {"demo", "--db"} & {*words}:
                run(words + ["--force"] * (words[0] == "init"))
                ran += 1
    run(next(ours("docs/workloads.md")))
    run(next(ours("docs/engines.md")))
    assert ran >= 30


@pytest.fixture
def fake(place: Path) -> Iterator[FakeVllm]:
    """A server of the pair with the draft ``small``, of which it drafts up to 8 tokens."""
    loaded = load_pair(read_pair("pair.json"), device="cpu")
    with served(place / "folder", loaded, draft="small") as running:
        running.most = running.engine["num_speculative_tokens"] = 8
        running.write_status()
        yield running


def prompted(fake: FakeVllm, count: int = 24) -> None:
    """Users, eight at a time."""
    bodies = [
        {"prompt": [7 + n, 8, 9], "max_tokens": 12, "request_id": f"u{n}"} for n in range(count)
    ]
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(fake.complete, bodies))


@contextmanager
def following(db: str, fake: FakeVllm, loaded: LoadedPair) -> Iterator[None]:
    """A `follow` at work."""
    stop = Event()
    with opened(db) as store:
        follower = Follower(store, fake.folder, "vllm", print, pair=loaded.spec)
        thread = Thread(target=follower.run, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def abort_rollout(db: str) -> None:
    """Ends the next rollout."""
    with opened(db) as store:
        while not (begun := store.rollouts("vllm", is_open=True)):
            time.sleep(0.1)
        store.abort_rollout(begun[0].id, "seen enough")


def test_the_page_of_vllm_runs_beside_a_server(place: Path, fake: FakeVllm) -> None:
    """From `follow` to the rollback, in the page's order; both `--since` have traffic to take."""
    prompted(fake)
    there = {FOLDER: str(fake.folder), URL: fake.url, "10s": "4m"}  # of a busy machine
    lines = [words for words in ours("docs/vllm.md") if "demo" not in words]
    first, *others = ([there.get(w, w) for w in words] for words in lines)
    assert "24 requests brought in" in run([*first, "--once"])
    with following("traffic.db", fake, fake.pair):
        run(
            ["--db", "traffic.db", "policies", "activate", "candidate.json", *PLACE]
        )  # to go back to
        for words in others:
            if words[-2:] == ["schedule", "run"]:
                words = [*words, "--once"]
            expected = 0
            if "rollout" in words:  # it has no traffic to be judged by
                Thread(target=abort_rollout, args=("traffic.db",)).start()
                expected = 1
            run(words, expected)
    assert len(others) > 10
    run([*first, "--once"])
    assert fake.policy == AUTOREGRESSIVE.id


VLLM = """\
#!/bin/sh
printf '%s\\n' "$SPECTUNE_FOLDER" "$@"
"""
"""A `vllm` that prints where its agent writes, and its arguments."""


def test_the_lines_of_engines_start_a_server_and_what_follows_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shell runs them, from a database and a folder whose names have spaces."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text(VLLM)
    (tmp_path / "bin" / "vllm").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    how = ("--pair", "demo", "--draft", "small", "--gamma", 2, "--gamma-max", 5)
    printed = Door("my traffic.db").call("engines vllm", *how, "--folder", "a folder").stdout
    needed, serve, _, follow = printed.splitlines()
    done = subprocess.run(serve, shell=True, check=True, capture_output=True, text=True)
    folder, *arguments = done.stdout.splitlines()
    assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    options = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    assert all(option in needed for option in options), "each is named, and why"
    assert arguments[:2] == ["serve", read_pair("demo").target]
    assert json.loads(options["--speculative-config"])["num_speculative_tokens"] == 5
    Agent(Path(folder)).write(3)
    words = shlex.split(follow)
    assert "3 requests brought in" in run([*words[1:], "--once"])
    assert Path("my traffic.db").exists()

"""Whatever comes in over a border (policies, workloads, command lines), what goes wrong is one of
our errors, said in one line, within seconds."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from databases import opened
from doors import commands, write_workload
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from synthetic import flat_profile
from test_docs import blocks
from trace_values import (
    PAIR,
    a_recording,
)

from spectune.cli import main
from spectune.db.database_errors import DatabaseError
from spectune.optimizer.inputs import read_files
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.settings import RequestsSettings
from spectune.traces.errors import SpectuneError

LONGEST_LINE = 4000
CASE_S = 60.0
"""Processor seconds that a case may take."""


def cases(count: int) -> settings:
    """So many cases of a property, always the same ones."""
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@contextmanager
def border() -> Iterator[None]:
    """What happens within passes, or raises an error of ours that is a line for the user."""
    began = time.process_time()
    try:
        yield
    except (SpectuneError, DatabaseError) as error:
        check_line(str(error))
    assert time.process_time() - began < CASE_S


def check_line(text: str) -> None:
    assert text.strip(), "an error says what went wrong"
    assert len(text.splitlines()) == 1, f"more than a line: {text[:300]!r}"
    assert len(text) <= LONGEST_LINE, f"a line of {len(text)} characters: {text[:300]!r}"


# ------------------------------------------------------------------------------------------- values

NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([10**9, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, -(10**9)]),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, 1e308, 5e-324]),
    st.floats(),
)
WORDS = st.one_of(
    st.sampled_from(
        ["", "small", "none", "ngram", "fixed", "static", "top_k", "coupled", "kind", "ols"]
    ),
    st.sampled_from(["a" * 5000, "\ud800", "a\0b", "\x1b[2J\n"]),
    st.text(max_size=12),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
PLACES = "draft window growth stop select stratify shortlist kind gamma paths artifact width top_n"
KEYS = st.one_of(st.sampled_from(PLACES.split()), st.text(max_size=6))
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=10,
)


def deep(levels: int, leaf: Any = 1) -> Any:
    """A value nested so deep."""
    for level in range(levels):
        leaf = [leaf] if level % 2 else {"draft": leaf}
    return leaf


ANYTHING = JSON | st.sampled_from(
    [deep(60), deep(250), list(range(1200)), {str(i): i for i in range(300)}, [[0] * 60] * 30]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a JSON value has values: paths of keys and indices."""
    inner: Any = enumerate(value) if isinstance(value, list) else ()
    inner = value.items() if isinstance(value, dict) else inner
    return [path, *(p for key, v in inner for p in places(v, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], make: Callable[[Any], Any]) -> Any:
    """A copy with the value at ``path`` replaced."""
    if not path:
        return make(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], make)
    return copy


def without(value: Any, key: Any) -> Any:
    """A copy of a dict or list without one of its places."""
    copy = value.copy()
    del copy[key]
    return copy


def with_more(value: Any, key: Any, other: Any) -> Any:
    return {**value, key: other} if isinstance(value, dict) else [value, other]


@st.composite
def mutated(draw: st.DrawFn, documents: Sequence[Any]) -> Any:
    """One of the documents with one or two values replaced, left out, repeated, or given a key
    more."""
    value = draw(st.sampled_from(documents))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(places(value)))
        what = draw(st.sampled_from(["replace", "replace", "drop", "add", "double"]))
        if what == "replace" or not path:
            other = draw(ANYTHING)
            value = changed(value, path, lambda _, other=other: other)
        elif what == "drop":
            value = changed(value, path[:-1], lambda v, key=path[-1]: without(v, key))
        elif what == "add":
            key, other = draw(KEYS), draw(ANYTHING)
            value = changed(value, path, lambda v, key=key, other=other: with_more(v, key, other))
        else:
            value = changed(value, path, lambda v: v * 40 if isinstance(v, (list, str)) else v)
    return value


# ----------------------------------------------------------------------------------------- policies

DRAFTS = ("small", "head", "ngram")
PROFILE = flat_profile(PAIR, DRAFTS)
TREE = {"draft": "small", "window": {"kind": "fixed", "gamma": 4}, "select": {"top_n": 24}}
POLICIES: list[dict[str, Any]] = [json.loads(text) for text in blocks("docs/policies.md", "json")]
"""The examples of the documentation: every kind of every block."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What is compiled on first use takes its time before that of a case is taken."""
    for document in POLICIES:
        with suppress(SpectuneError):  # some read artifacts
            prepare(parse_policy(document), DRAFTS, profile=PROFILE)


@cases(400)
@given(ANYTHING | mutated(POLICIES))
@example({"growth": {"kind": "static", "paths": 5}, "draft": "small"})
@example({"draft": {"kind": []}})
@example({"draft": "small", "growth": {"kind": "static", "paths": [[10**9]]}})
@example([1, 2])
@example(None)
def test_any_json_is_a_policy_or_refused(document: Any) -> None:
    with border():
        policy = parse_policy(document, where="publication 7")
        assert parse_policy(json.loads(json.dumps(policy.spelled_out()))) == policy
        assert policy.id
        assert policy.label()
        prepare(policy, DRAFTS, profile=PROFILE)


@cases(38)
@given(st.binary(max_size=40) | (JSON | mutated(POLICIES)).map(lambda v: json.dumps(v).encode()))
@example(b'{"draft":' * 50_000)
@example(b"9" * 5000)
@example(b'{"draft": "small", "window": {"kind": "fixed", "gamma": ' + b"9" * 5000 + b"}}")
def test_any_text_given_for_a_policy_is_one_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    from spectune.optimizer.inputs import named_policy

    file = tmp_path_factory.getbasetemp() / "policy.json"
    file.write_bytes(data)
    with border():
        named_policy(str(file))
    with border():
        named_policy("{" + data.decode("utf-8", "replace"))


# ---------------------------------------------------------------------------------------- workloads

LINES: list[dict[str, Any]] = [
    {"id": "a", "category": "code", "turns": ["one"]},
    {"id": 3, "category": "", "turns": ["one", "two", "three"], "more": {"a": [1, 2]}},
    {"messages": [{"role": "user", "content": "x", "tool_calls": []}], "stop": ["x"]},
]


@cases(150)
@given(
    st.lists(
        (ANYTHING | mutated(LINES) | st.sampled_from(LINES)).map(lambda v: json.dumps(v).encode())
        | st.binary(max_size=30),
        max_size=4,
    ),
    st.sampled_from([None, "first", "all"]),
    st.sampled_from([None, 1, 2**31 - 1]),
    st.lists(WORDS, max_size=1),
)
@example([b"[" * 100_000], None, None, [])
@example([b"9" * 5000], None, None, [])
@example([b'{"id": "a\\u0000", "turns": ["x"]}'], None, None, [])
def test_workloads_of_any_lines(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    turns: Any,
    limit: int | None,
    categories: list[str],
) -> None:
    file = tmp_path_factory.getbasetemp() / "workload.jsonl"
    file.write_bytes(b"\n".join(lines))
    with border():
        workload = read_files(
            [str(file)], RequestsSettings(turns=turns, limit=limit, category=tuple(categories))
        )
        for request in workload.requests:
            assert request.messages or request.prompt.strip()
            assert "\0" not in request.id + request.category, "PostgreSQL stores no NUL"
            "".join((request.id, request.category, request.prompt)).encode()
        assert workload.digest()


# -------------------------------------------------------------------------------------------- flags


LASTING = (("schedule", "run"), ("db", "prune"), ("control",))
COMMANDS = [
    (path, command)
    for path, command in commands()
    if not isinstance(command, click.Group) and path not in LASTING
]
VALUES = st.one_of(
    st.sampled_from([
        "", "-1", "0", "1", "3", "10" * 20, "9" * 5000, "nan", "inf", "-inf", "1e999", "0.5",
        "n" * 5000, "[/b]", "[math]", "\x1b[31mred",
        "latest", "active", "demo", "none", "small=x", "=", "cpu", "auto", "6h", "1w",
        "9" * 50 + "w", "* * * * *", "61 3 * * *",
        "UTC", "No/Zone", "~no-such-user/model",
        "coupled", "a,b", "draft,category", "2020-01-01", "0001-01-01", "9999-12-31", "good.jsonl",
        "nowhere.jsonl", "policy.json",
        "rows.csv", "rows.json", "rows.parquet", "24h", '{"draft": '
            '"none"}', '{"draft":' * 3000, "{", "null", "autoregressive", "\0",
        "\udcff", ".", "..",
    ]),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8).map(lambda t: t.replace("/", "")),
    mutated(POLICIES).map(json.dumps),
)  # fmt: skip


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    path, command = draw(st.sampled_from(COMMANDS))
    line = list(path)
    options = [p for p in command.params if isinstance(p, click.Option)]
    for option in draw(st.lists(st.sampled_from(options), max_size=3)):
        line += [draw(st.sampled_from(option.opts))] + ([] if option.is_flag else [draw(VALUES)])
    for argument in (p for p in command.params if isinstance(p, click.Argument)):
        line += [draw(VALUES)] if argument.required or draw(st.booleans()) else []
    if path[0] != "policies" and any(o.name == "pair" and "--pair" in o.opts for o in options):
        line += ["--pair", "nowhere.json"]  # no model is loaded
    return line


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a database, a workload and a policy, to work in."""
    folder = tmp_path_factory.mktemp("flags")
    with opened(folder / "kept") as store:
        a_recording(store, n=2)
    write_workload(folder / "good.jsonl", 2)
    (folder / "policy.json").write_text('{"draft": "small"}')
    (folder / "key").write_text("secret")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@cases(88)
@given(command_lines())
@example(["run", "--temperature", "nan", "--pair", "nowhere.json"])
@example(["policies", "show", '{"draft":' * 100_000])
@example(["control", "--token-file", "\0"])
@example(["control", "--host", "\udcff", "--token-file", "key"])
@example(["run", "--target", "~no-such-user/model", "--workload", "good.jsonl"])
@example(
    [
        *("policies", "export", "--for", "vllm", "--target", "t/t"),
        *("--draft", "a=~no-such-user/head", '{"draft": "a"}'),
    ]
)
def test_command_lines_cost_a_line_or_work(here: Path, line: list[str]) -> None:
    for file in here.glob("spectune.db*"):
        file.unlink()
    shutil.copyfile("kept", "spectune.db")
    with border():
        found = CliRunner().invoke(main, ["--db", "spectune.db", *line])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code in ((0, 1, 2) if line[:2] == ["db", "check"] else (0, 2)), found.output
    assert "Traceback" not in found.output
    if found.exit_code == 2:
        last = found.stderr.rstrip("\n").split("\n")[-1]
        assert last.lower().startswith("error: "), found.stderr
        check_line(last)
        assert not found.stdout
        assert "\x1b" not in found.stderr

"""The documentation is run: policies parse, tables match the code, Python and SQL blocks execute,
commands exist, links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pandas
import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from doors import ROOT, parsed, put_profile, write_lines
from pairs import make_pair
from pydantic import BaseModel
from trace_values import PAIR, POLICY, a_recording

import spectune
from spectune.cli import main
from spectune.db import Database, open_database
from spectune.db.base import Base
from spectune.optimizer.inputs import named_policy
from spectune.optimizer.spaces import GROUPS, searched
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.blocks import Fitted, Search
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    KINDS,
    ByPrompt,
    Select,
    Stratify,
    parse_policy,
)
from spectune.traces.store import TraceStore, query
from spectune.traces.store.compare import compare
from spectune.traces.store.query import TraceFilter
from spectune.traces.workloads import WorkloadRow, make_workload

TOP = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in (
        *TOP,
        *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("**/*.md"))),
    )
}
POLICIES = "docs/policies.md"
TRACES = "docs/traces.md"
SCHEDULES = "docs/schedules.md"
SERVE = "docs/serve.md"
"""Its Python is run beside a server, by ``test_serve.py``."""
RUN_HERE = ("README.md", POLICIES, TRACES)
PROMPTS = ("def add(a, b):", "The quick brown", "for i in", "Ann buys 4 apples and")


def blocks(page: str, language: str, about: str = "") -> list[str]:
    """The fenced blocks of a page in one language; ``about`` is the word after it."""
    found = re.findall(r"^```(\w*) ?(\w*)\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)
    return [text for lang, word, text in found if (lang, word) == (language, about)]


def in_pages(language: str, about: str = "") -> list[Any]:
    return [
        pytest.param(page, text, id=f"{page}-{n}")
        for page in PAGES
        for n, text in enumerate(blocks(page, language, about))
    ]


# ---------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize(("page", "text"), in_pages("json"))
def test_policy_examples_parse(page: str, text: str) -> None:
    policy = parse_policy(json.loads(text), where=page)
    assert parse_policy(policy.spelled_out()) == policy


@pytest.mark.parametrize(("page", "text"), in_pages("json", "pair"))
def test_pair_examples_parse(page: str, text: str) -> None:
    assert PairSpec.from_json(json.loads(text), where=page).draft_names[-1] == "ngram"


@pytest.mark.parametrize(("page", "text"), in_pages("jsonl"))
def test_workload_examples_parse(page: str, text: str) -> None:
    for line in text.splitlines():
        assert make_workload(page, [WorkloadRow(page, json.loads(line))]).requests


# ----------------------------------------------------------------------------- tables of parameters


def allowed(schema: dict[str, Any]) -> str:
    """What a parameter may be, as the tables write it, from its JSON Schema."""
    if "anyOf" in schema:
        given = [allowed(s) for s in schema["anyOf"] if s.get("type") != "null"]
        return " or ".join([*given, "`null`"])
    if "$ref" in schema:
        return "policies"
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{json.dumps(v)}`" for v in values)
    if schema["type"] == "boolean":
        return "`true`, `false`"
    if schema["type"] == "string":
        return "text"
    if schema["type"] == "object":
        value = schema["additionalProperties"]
        keys = "context lengths" if "additionalProperties" in value else "batch sizes"
        return f"{keys} to {allowed(value)}"
    if schema["type"] == "array":
        count = "list of"
        if "maxItems" in schema:
            count = f"{schema['minItems']} to {schema['maxItems']} of"
        return f"{count} {allowed(schema['items'])}"
    low = f"[{schema['minimum']:g}" if "minimum" in schema else f"({schema['exclusiveMinimum']:g}"
    if "maximum" in schema:
        return f"{low}, {schema['maximum']:g}]"
    return f"{low}, {schema.get('exclusiveMaximum', float('inf')):g})"


def parameters(block: type[BaseModel]) -> str:
    """Keys of a block with their defaults and what else they may be, from the model itself; the
    default of a key that must be given is ``required``."""
    keys = []
    for key, of in block.model_json_schema()["properties"].items():
        if key != "kind":
            default = json.dumps(of["default"]) if "default" in of else "required"
            others = allowed(of).removesuffix(" or `null`" if default == "null" else "")
            keys.append(f"`{key}` {default}, {others}")
    return "; ".join(keys)


def ranges() -> Iterator[tuple[str, str]]:
    """(block, what of it is searched)."""
    for group, kinds in GROUPS.items():
        for kind, block in kinds.items():
            if marks := searched(block) if block else {}:
                name = group if kind == group else f"{group}: {kind}"
                yield name, "; ".join(f"{key} {range_of(mark)}" for key, mark in marks.items())


def range_of(mark: Search | Fitted) -> str:
    if isinstance(mark, Fitted):
        return "as fitted"
    if mark.choices:
        return "of " + ", ".join(map(json.dumps, mark.choices))
    return f"{mark.low:g} to {mark.high:g}{' (log)' * mark.log}"


def test_blocks_are_documented_with_their_defaults_and_ranges() -> None:
    blocks = {f"{g}: {kind}": block for g, kinds in KINDS.items() for kind, block in kinds.items()}
    blocks |= {"select": Select, "stratify": Stratify, "by_prompt": ByPrompt}
    searched = dict(ranges())
    names: dict[tuple[str, str], list[str]] = {}
    for name, block in blocks.items():
        if told := parameters(block):
            names.setdefault((told, searched.get(name, "no")), []).append(f"`{name}`")
    rows = [(", ".join(equal), *cells) for cells, equal in names.items()]
    page = PAGES[POLICIES].split("## Blocks")[1]
    assert re.findall(r"^\| (`.+?`) \| (.*?) \| (.*?) \|$", page, re.MULTILINE) == rows


# ----------------------------------------------------------------------------------------- commands


def commands(page: str) -> Iterator[list[str]]:
    """The command lines of a page's ``sh`` and ``console`` blocks, and those of ours in plain ones,
    as words, redirections and comments left out."""
    text = "".join(blocks(page, ""))
    plain = re.findall(r"^.*\bspectune [-a-z].*$", text, re.MULTILINE)
    for text in [*blocks(page, "sh"), *blocks(page, "console"), *plain]:
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            yield words[: words.index(">")] if ">" in words else words


def ours(page: str) -> Iterator[list[str]]:
    """The arguments of a page's command lines of ours, also behind others (``cd ... && spectune``,
    ``docker run ... spectune``), and of its containers."""
    for words in commands(page):
        if "spectune" in words and words[1:2] != ["build"]:
            yield words[words.index("spectune") + 1 :]
    for text in blocks(page, "yaml"):
        for arguments in re.findall(r"args: \[(.*)\]", text):
            yield arguments.split(", ")


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    for arguments in ours(page):
        parsed(arguments)
        for argument in arguments:
            if argument.startswith("{"):
                assert named_policy(argument) is not None


def test_other_lines_of_the_readme_can_be_typed() -> None:
    """Targets of the Makefile, pip with a path, the image, and completion in a shell."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for words in commands("README.md"):
        if words and words[0] == "make":
            assert words[1] in targets
        elif words:
            assert words[0] in ("spectune", "docker", "eval") or words[:2] == ["pip", "install"]


def test_schedules_on_the_pages_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `schedule add` of the pages is stored, with no option that does not act."""
    make_pair(tmp_path)
    spec = {"name": "mine", "target": "target", "drafts": {"small": "near", "medium": "far"}}
    (tmp_path / "pair.json").write_text(json.dumps(spec))
    write_lines(tmp_path / "chats.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    monkeypatch.chdir(tmp_path)
    added = [words for page in PAGES for words in ours(page) if "add" in words]
    assert len(added) >= 4
    for n, words in enumerate(added):
        words = [f"{word}{n}" if words[i - 1] == "add" else word for i, word in enumerate(words)]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, (words, done.output)
        assert "no effect" not in done.output, (words, done.output)


# ---------------------------------------------------------------------------- Python, links, places


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples name: a tiny pair with drafts ``small`` and ``medium``, and a
    workload."""
    folder = tmp_path_factory.mktemp("docs")
    make_pair(folder)
    spec = {"name": "mine", "target": "target", "drafts": {"small": "near", "medium": "far"}}
    (folder / "pair.json").write_text(json.dumps(spec))
    (folder / "models").mkdir()
    for name, path in (("target", "target"), ("draft-small", "near")):
        (folder / "models" / name).symlink_to(folder / path)
    # as the README's example has them
    models = {"target": "models/target", "drafts": {"small": "models/draft-small"}}
    (folder / "models.json").write_text(json.dumps(models))
    turns = [f"{PROMPTS[i % 4]} {i}" for i in range(16)]
    rows = [{"id": str(i), "category": "code", "turns": [turn]} for i, turn in enumerate(turns)]
    write_lines(folder / "chats.jsonl", rows)
    return folder


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Executes a page's Python blocks in order, in one namespace."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    code = "\n".join(blocks(page, "python"))
    assert code
    exec(compile(code, page, "exec"), names)
    return names


def test_the_pages_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # One after the other: the later ones read what the README's example recorded. It tunes with
    # less effort here.
    for pair in ("pair.json", "models.json"):
        put_profile(str(place / "spectune.db"), place / pair)
    few = {"trials": 2, "finalists": 1, "tree_width": 0, "budget": 1}
    few["max_new_tokens"] = 8
    monkeypatch.setattr(spectune, "tune", partial(spectune.tune, **few), raising=False)
    run_page("README.md", place, monkeypatch)
    out = capsys.readouterr().out
    assert "incumbent" in out
    run_page(POLICIES, place, monkeypatch)
    assert {page for page in PAGES if blocks(page, "python")} <= {*RUN_HERE, SCHEDULES, SERVE}


def test_the_worker_of_the_page_runs_what_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page(SCHEDULES, tmp_path, monkeypatch)
    assert names["outcomes"] == {"done": 0, "failed": 0, "lost": 0, "released": 0}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", PAGES[page]):
        if not link.startswith("http"):
            assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w/]+\.md)\)", PAGES["docs/README.md"]))
    listed |= set(re.findall(r"\]\(([\w/]+\.md)\)", PAGES["docs/results.md"]))
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert pages - {"README.md"} <= listed


def test_the_table_of_the_paper_names_what_there_is() -> None:
    rows = re.findall(r"^\| .+? \| (.*`.*) \|$", PAGES["docs/papers.md"], re.MULTILINE)
    assert len(rows) >= 8
    folders = ("runtime", "optimizer", "tests/papers")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    for row in rows:
        named = re.findall(r"`([\w/.]+)`", row)
        paths = [Path(name) for name in named if name.endswith(".py")]
        found = [p for p in files for path in paths if p.match(str(path))]
        text = "".join(p.read_text(encoding="utf-8") for p in found)
        assert text
        for name in named:
            assert name.endswith(".py") or f"def {name}(" in text, name


def test_files_that_are_mentioned_exist() -> None:
    for page, text in PAGES.items():
        for path in re.findall(
            r"`((?:traces|runtime|optimizer|db|demo|tests|tools|docs)/[\w/.]+)`", text
        ):
            assert (ROOT / path).exists(), (page, path)


# ----------------------------------------------------------------------------------- docs/traces.md


def example(database: Database) -> TraceStore:
    """Requests that two policies decoded, the later one with panoramas, and what prices them."""
    store = TraceStore(database)
    a_recording(store, n=9, policy=AUTOREGRESSIVE, drafts=())
    a_recording(store, n=9, policy=parse_policy(POLICY), drafts=("ngram", "small"))
    for policy in (AUTOREGRESSIVE, parse_policy(POLICY)):
        store.publish(PAIR, "cpu", policy.id, actor="docs")
    return store


def test_the_page_of_traces_is_run_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands as they stand, Python, and SQL over the Parquet that both wrote."""
    monkeypatch.chdir(tmp_path)
    with open_database("spectune.db") as database:
        example(database)
    for words in ours(TRACES):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, (words, done.output)
        assert done.stdout
    names = run_page(TRACES, tmp_path, monkeypatch)
    names["store"].database.close()
    assert names["rows"][0]["until"] is None
    assert names["one"]["undecoded"]
    assert names["found"]["requests"] == 9
    policies = {AUTOREGRESSIVE.id, parse_policy(POLICY).id}
    steps, parts = (duckdb.sql(block).df() for block in blocks(TRACES, "sql", "duckdb"))
    for path in ("requests.parquet", "rounds.parquet"):
        frame = pandas.read_parquet(path)
        assert set(frame.policy_id) == policies
    assert steps.rounds.sum() == len(frame)
    assert (steps.rounds * steps.emitted).sum() == pytest.approx(frame.emitted.sum())
    assert set(parts.policy_id) == policies
    assert parts.accepted[0] == pytest.approx(
        frame[(frame.policy_id == parts.policy_id[0]) & (frame.start < 64)].accepted.mean()
    )


def test_its_sql_answers_as_the_calls_do(database: Database) -> None:
    store = example(database)
    with database.read() as session:
        asked = [session.execute(sa.text(b)).mappings().all() for b in blocks(TRACES, "sql")]
    acceptance, speed, slowest, pairs, in_force, versions, categories, traffic = asked
    assert versions == [], "all was served before anything was published"
    told = {
        (row["category"], row["policy_id"]): row
        for row in query.speed(store, by=("category", "policy"))
    }
    assert [r["category"] for r in traffic] == sorted({c for c, _ in told})
    assert sum(r["requests"] for r in traffic) == 18
    drafting = {c: row for (c, policy), row in told.items() if policy != AUTOREGRESSIVE.id}
    assert {r["category"] for r in categories} == {*drafting}
    for row in categories:
        speed_of = drafting[row["category"]]["tokens_per_s"]
        assert float(row["tokens_per_s"]) == pytest.approx(speed_of)
    rows = query.acceptance(store, by=("draft", "category"))
    told = [{**row, "position": j} for row in rows for j in range(len(row["marginal"]))]
    for answer, row in zip(acceptance, told, strict=True):
        keys = ("draft", "category", "position")
        assert [answer[key] for key in keys] == [row[key] for key in keys]
        assert answer["marginal"] == pytest.approx(row["marginal"][row["position"]])
        assert (answer["conditional"] or 0) == pytest.approx(row["conditional"][row["position"]])
    for answer, row in zip(speed, query.speed(store), strict=True):
        assert (answer["policy_id"], answer["day"]) == (row["policy_id"], row["day"])
        told = [float(answer[key]) for key in ("tokens_per_s", "tau")]
        assert told == pytest.approx([row["tokens_per_s"], row["tau"]])
    first = query.requests(store, sort="tokens_per_s")
    assert [r["tokens_per_s"] for r in slowest] == [r["tokens_per_s"] for r in first]
    assert len(pairs) == compare(store, "latest", "autoregressive")["requests"]
    assert [(r["policy"], r["until"] is None) for r in in_force] == [
        ("autoregressive", False),
        (parse_policy(POLICY).label(), True),
    ]


def test_what_a_version_served_is_counted_since_it_came_into_force(database: Database) -> None:
    store = example(database)
    late = a_recording(store, n=4, policy=parse_policy(POLICY), drafts=())
    a_recording(store, n=2, policy=AUTOREGRESSIVE, drafts=())  # no longer in force
    block = next(b for b in blocks(TRACES, "sql") if "p.version" in b)
    with database.read() as session:
        (row,) = session.execute(sa.text(block)).mappings().all()
    of = query.requests(store, TraceFilter(recordings=(late,)))
    assert (row["version"], row["requests"]) == (2, 4)
    assert float(row["tokens_per_s"]) == pytest.approx(
        sum(r["emitted"] for r in of) / sum(r["seconds"] for r in of)
    )


def test_its_tables_are_the_schema() -> None:
    section = PAGES[TRACES].split("## Tables")[1]
    tables = {name for name in Base.metadata.tables if not name.startswith("schedule")}
    assert tables <= set(re.findall(r"`(\w+)`", section))
    for name, columns in re.findall(r"^- `(\w+)`: (.*)$", section, re.MULTILINE):
        known = {*Base.metadata.tables[name].columns.keys(), *tables}
        assert set(re.findall(r"`(\w+)`", columns)) <= known, name

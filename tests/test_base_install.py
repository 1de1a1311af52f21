"""What is installed without extras: commands that follow, watch and publish run, the others say
which extras they need, and it is small."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from agent_folder import PAIR, Agent
from databases import opened, put_in_force
from doors import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from synthetic import policy

from spectune import api

HEAVY = (
    *("torch", "transformers", "tokenizers", "huggingface_hub", "numba", "scipy", "optuna"),
    *("sklearn", "joblib", "matplotlib", "jinja2", "httpx2", "fastapi", "uvicorn", "river"),
    *("pyarrow", "pandas", "distributed"),
)
MOST_BYTES = 120e6
FIXED = '{"draft": "small", "window": {"kind": "fixed", "gamma": 3}}'
RUN = (
    *("follow folder --pair demo --once", "status", "policies list", "policies list --pair demo"),
    "policies show active --pair demo --deployment vllm",
    f"policies show '{FIXED}' autoregressive --pair demo",
    f"policies activate '{FIXED}' --pair demo --device cpu",
    f"policies activate '{FIXED}' --pair demo --device cpu --deployment vllm",
    "policies rollback --pair demo --device cpu --deployment vllm",
    f"policies rollout '{FIXED}' --pair demo --device cpu --deployment vllm --no-conduct",
    "policies abort --pair demo --device cpu --deployment vllm",
    *("policies thaw --deployment vllm", f"policies export '{FIXED}' --pair demo --for vllm"),
    "schedule add nightly --cron @daily --pair demo",
    "schedule add live --cron @daily --pair demo --url http://h:1 --folder folder --since 24h",
    *("schedule edit nightly --cron @hourly", "schedule list", "schedule remove nightly"),
    *("traces list", "traces show all", "traces stats --speed", "traces export rows.csv"),
    *("db show", "db check", "db prune --keep-last 9 --dry-run", "engines", "init --pair demo"),
)
REFUSED = {
    f"policies rollout '{FIXED}' --pair demo --deployment vllm": "search",
    "traces compare latest latest": "search",
    "report": "search",
    "retrace --url http://h:1 --folder folder": "search",
    f"simulate --policy '{FIXED}'": "search",
    **dict.fromkeys(("generate x --pair demo", "run --pair demo", "profile --pair demo"), "native"),
    **dict.fromkeys(("check demo", "record --pair demo", "tune --pair demo"), "native,search"),
    **dict.fromkeys(("schedule run", "fit bins --pair demo"), "native,search"),
    "serve --pair demo": "native,serve",
    "control": "control",
}

SCRIPT = """
import json, sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
refused, commands = json.loads(sys.argv[1])
sys.meta_path.insert(0, Refusing())
from click.testing import CliRunner
from spectune.cli import main
found = []
for command in commands:
    done = CliRunner().invoke(main, command)
    found.append([done.exit_code, done.stderr.strip()])
print(json.dumps(found))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a server that is followed, and a database where a policy is published."""
    monkeypatch.chdir(tmp_path)
    Agent(tmp_path / "folder").write(2)
    with opened("spectune.db") as store:
        store.put_pair(PAIR.id, PAIR.name, PAIR.to_json(), PAIR.models)
        put_in_force(store, PAIR.id, policy("small", 2), deployment="vllm")
    return tmp_path


def without_extras(*commands: str) -> list[tuple[int, str]]:
    """The exit code and what is on stderr of each, in a process that finds nothing of an extra."""
    words = json.dumps([HEAVY, [shlex.split(command) for command in commands]])
    env = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, words], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [(code, said) for code, said in json.loads(done.stdout)]


def test_following_watching_and_publishing_need_no_extra(place: Path) -> None:
    for command, (code, said) in zip(RUN, without_extras(*RUN), strict=True):
        assert code == 0, (command, said)


def test_a_command_says_which_extras_it_needs(place: Path) -> None:
    for (command, extras), (code, said) in zip(
        REFUSED.items(), without_extras(*REFUSED), strict=True
    ):
        assert code == 2, (command, said)
        assert len(said.splitlines()) == 1, said
        assert said.endswith(f"pip install 'spectune[{extras}]'"), (command, said)
    assert {c for c in api.EXTRAS if not any(r.startswith(c) for r in REFUSED)} == set()


def requirements(*extras: str) -> set[str]:
    """The distributions that an install with these extras brings along, by their metadata here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    found: set[str] = set()
    asked = [(line, extras) for line in project["dependencies"]]
    asked += [(line, extras) for extra in extras for line in optional[extra]]
    while asked:
        line, of = asked.pop()
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *of)):
            continue
        if requirement.name == "spectune":
            asked += [(line, ()) for extra in requirement.extras for line in optional[extra]]
        elif (name := canonicalize_name(requirement.name)) not in found:
            found.add(name)
            mine = tuple(requirement.extras)
            asked += [(line, mine) for line in distribution(requirement.name).requires or ()]
    return found


def test_the_base_is_small_and_extras_bring_what_their_commands_need() -> None:
    """Bytes without those that Python compiles, where an installer has it do so."""
    base = requirements()
    files = [file for name in base for file in distribution(name).files or ()]
    sizes = (Path(str(file.locate())).stat().st_size for file in files if file.suffix != ".pyc")
    ours = sum(f.stat().st_size for f in (ROOT / "demo" / "pair").rglob("*") if f.is_file())
    assert sum(sizes) + ours < MOST_BYTES
    libraries = {"sklearn": "scikit-learn"}
    for library, extra in api.LIBRARIES.items():
        name = canonicalize_name(libraries.get(library, library))
        assert name not in base
        assert name in requirements(extra), (library, extra)

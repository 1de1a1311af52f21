"""What is installed: every package and data file, and completion in a shell. `.ci/wheel` tries the
wheel itself."""

from __future__ import annotations

import re
import tomllib

import pytest
from click.shell_completion import get_completion_class
from doors import ROOT

from spectune.cli import main

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_in_the_wheel() -> None:
    named = PROJECT["tool"]["setuptools"]["packages"]
    ours = {"spectune"} | {
        ".".join(("spectune", *file.relative_to(ROOT).parent.parts))
        for top in ("traces", "runtime", "optimizer", "engines", "db", "demo", "service")
        for file in (ROOT / top).rglob("*.py")
    }
    assert sorted(named) == sorted(ours)


def test_the_demo_pair_is_in_the_wheel() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["spectune.demo"]
    found = {
        file for pattern in patterns for file in (ROOT / "demo").glob(pattern) if file.is_file()
    }
    assert found == {file for file in (ROOT / "demo" / "pair").rglob("*") if file.is_file()}
    assert {"pair.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in found}


@pytest.mark.parametrize(
    ("folder", "files"),
    [("optimizer/report", ["page.html", "style.css"]), ("engines/vllm", ["compat.toml"])],
)
def test_what_commands_read_is_in_the_wheel(folder: str, files: list[str]) -> None:
    package = f"spectune.{folder.replace('/', '.')}"
    assert PROJECT["tool"]["setuptools"]["package-data"][package] == files
    assert all((ROOT / folder / file).is_file() for file in files)


def test_a_shell_completes_as_the_page_says() -> None:
    assert PROJECT["project"]["scripts"] == {"spectune": "spectune.cli:main"}
    page = (ROOT / "README.md").read_text()
    (variable,) = re.findall(r"(\w+)=bash_source spectune", page)
    kind = get_completion_class("bash")
    assert kind is not None
    completion = kind(main, {}, "spectune", variable)
    assert f"{variable}=bash_complete" in completion.source()
    assert [found.value for found in completion.get_completions(["tune"], "--qu")] == ["--quick"]

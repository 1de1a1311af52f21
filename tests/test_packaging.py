"""What is installed: every package and data file, and completion in a shell. `.ci/wheel` tries the
wheel itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

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


PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "$@" >>pip.log\\n' >"$3/bin/pip"
chmod +x "$3/bin/pip"
"""
"""A Python whose `-m venv FOLDER` makes an environment in which pip notes what it is asked for."""


@pytest.mark.parametrize("has_gpu", [False, True])
def test_torch_for_cpus_is_installed_where_there_is_no_gpu(tmp_path: Path, has_gpu: bool) -> None:
    """By `make`, before what would bring the usual one along."""
    if shutil.which("nvidia-smi") and not has_gpu:
        pytest.skip("this machine has an NVIDIA GPU")
    for name, text in (("python", PYTHON), *(("nvidia-smi", "#!/bin/sh\n"),) * has_gpu):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path)
    subprocess.run(
        ["make", "PYTHON=./python", ".venv/.installed"],
        cwd=tmp_path, check=True, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    *first, last = (tmp_path / "pip.log").read_text().splitlines()
    assert last.endswith("-c constraints.txt -e .[native,search]")
    cpu = [line for line in first if line.endswith(" torch")]
    assert [("--index-url https://download.pytorch.org/whl/cpu" in line) for line in cpu] == (
        [] if has_gpu else [True]
    )

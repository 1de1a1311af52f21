"""The arrows of the house: who may import whom, read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import spectune

ROOT = Path(__file__).resolve().parent.parent
OURS = (
    "cli",
    "api",
    "settings",
    "options",
    "traces",
    "runtime",
    "optimizer",
    "engines",
    "db",
    "demo",
    "service",
    "bench",
    "tests",
)
FACTS = {
    *("traces.schema", "traces.cost_table", "traces.latency"),
    *("traces.errors", "traces.blobs", "traces.tables", "traces.files", "traces.text"),
    *("traces.workloads", "traces.workload_files", "traces.sanity", "traces.recording"),
    *("traces.acceptance", "traces.conversations"),
}
"""The side of ``traces`` that opens no database."""


def layer(module: str) -> str:
    """What a module counts as: its package, with ``traces`` split into its facts and its store; the
    commands count apart."""
    package = module.split(".")[0]
    if module.startswith("db.migrations.versions"):
        return "migrations"
    if module.startswith("optimizer.commands"):
        return "commands"
    if package != "traces":
        return package
    return "traces facts" if module == "traces" or module in FACTS else "traces store"


STORED = {"traces facts", "traces store", "db"}
ALLOWED: dict[str, set[str]] = {
    "cli": {"api", "settings", "options", "commands", "traces facts", "db"},
    "api": {"settings", "options", "commands", "service", "traces facts", "traces store"},
    "service": {"service", "settings", "commands", "optimizer", "runtime"} | STORED,
    "settings": {"traces facts"},
    "options": {"settings", "traces facts"},
    "commands": {"commands", "settings", "options", "optimizer", "engines", "runtime"} | STORED,
    "optimizer": {"optimizer", "settings", "options", "engines", "runtime"} | STORED,
    "engines": {"engines", "runtime"} | STORED,
    "runtime": {"runtime"},
    "traces facts": {"traces facts"},
    "traces store": STORED,
    "db": {"db"},
    "migrations": set(),
    "demo": {"demo"},
}
BESIDE = {
    "runtime": {
        *("traces.schema", "traces.cost_table", "traces.latency", "traces.errors"),
        *("traces.files", "traces.text", "traces.tables"),
    },
    "traces facts": {"db.base", "db.compression"},
    "migrations": {"db.migrate"},
    "optimizer": {"demo.prompts"},
}
"""Single modules that a layer may import beside its layers."""


def sources() -> Iterator[tuple[str, Path]]:
    """(module, file) of every module that ships."""
    for file in [
        *(ROOT / f"{name}.py" for name in OURS[:4]),
        *(f for p in OURS[4:11] for f in sorted((ROOT / p).rglob("*.py"))),
    ]:
        parts = file.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


MODULES = dict(sources())


def ours(name: str) -> str:
    """A module's name within the package ``spectune``, whose root is the repository's."""
    return name.removeprefix("spectune.")


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Our modules that a tree imports, wherever the statement stands; those only for the type
    checker count as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            # `from package import module` imports the module, `from module import name` the module
            # that has it.
            names = [
                full if ours(full := f"{base}.{alias.name}") in MODULES else base
                for alias in node.names
            ]
        else:
            continue
        yield from (ours(name) for name in names if ours(name).split(".")[0] in OURS)


def forbidden(module: str, text: str, is_package: bool = False) -> list[str]:
    """The imports of a source text that are no allowed arrow."""
    of = layer(module)
    return [
        name
        for name in imports(ast.parse(text), module, is_package)
        if layer(name) not in ALLOWED[of] and name not in BESIDE.get(of, set())
    ]


def test_arrows() -> None:
    wrong = {
        module: names
        for module, file in MODULES.items()
        if (names := forbidden(module, file.read_text("utf-8"), file.name == "__init__.py"))
    }
    assert not wrong, "see ARCHITECTURE.md for the arrows that are allowed"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("optimizer.tuning.native", "from optimizer.commands.terminal import Meter"),
        ("runtime.loop", "def f():\n    from traces.store import TraceStore"),
        ("runtime.loop", "import traces.workloads"),
        ("traces.schema", "from db.models import Pair"),
    ],
)
def test_the_test_sees_a_wrong_arrow(module: str, line: str) -> None:
    assert forbidden(module, line)


def test_no_import_circle() -> None:
    """Statements within functions count as imports, those for the type checker alone do not."""
    arrows = {}
    for module, file in MODULES.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        tree.body = [
            node
            for node in tree.body
            if not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING"
        ]
        names = set(imports(tree, module, file.name == "__init__.py")) & MODULES.keys()
        arrows[module] = names - {module}
    TopologicalSorter(arrows).prepare()  # raises CycleError, which names the circle


def test_everything_is_imported_as_spectune() -> None:
    """As ``traces`` or ``db`` it would be another module, and could be another distribution's."""
    assert Path(spectune.__file__).resolve().parent == ROOT
    beside = [file for top in ("bench", "tests", "tools") for file in (ROOT / top).rglob("*.py")]
    for file in [*MODULES.values(), *beside]:
        text = file.read_text(encoding="utf-8")
        if file != Path(__file__):
            assert not re.search(
                rf"^\s*(from|import) ({'|'.join(OURS[:11])})\b", text, re.MULTILINE
            ), file

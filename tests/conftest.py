"""Databases for the tests: every test that asks for ``url``, ``database`` or ``store`` runs on
SQLite and on PostgreSQL."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from databases import postgresql_server
from sqlalchemy.engine import make_url

from spectune.db import Database, open_database, upgrade
from spectune.traces.store import TraceStore

if TYPE_CHECKING:  # torch is imported by those tests alone that need it
    from spectune.runtime.loading import LoadedPair

TEMPLATE = "spectune_template"
SLOWEST = (
    "cli_flow schedule_workers kill shortlists openvino shortlist_tuning publishing llamacpp "
    "parity head_drafting fit_commands chooser_policy processes schedule_retries frequency_ranks "
    "tree_parity distributed routing docs borders"
)
"""Test files that are begun first: the longest, as one of them would keep a single worker busy at
the end. While the first tunes, and so compiles what is compiled, the second needs none of it."""


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist would begin with the files of most tests, which are not the slowest.
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {f"test_{name}": rank for rank, name in enumerate(SLOWEST.split())}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(SLOWEST)))


class Postgresql:
    """A server, and databases on it that are made from a migrated template."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url).set(drivername="postgresql+psycopg")
        self._engine = sa.create_engine(
            self._url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
        )
        self._template = f"{TEMPLATE}_{secrets.token_hex(4)}"
        upgrade(self.create(self._template, empty=True))

    def create(self, name: str, *, empty: bool = False) -> str:
        """Creates a database and returns its URL."""
        template = "template0" if empty else self._template
        with self._engine.connect() as connection:
            connection.exec_driver_sql(f'CREATE DATABASE "{name}" TEMPLATE {template}')
        url = self._url.set(database=name).render_as_string(hide_password=False)
        return url.replace("postgresql+psycopg", "postgresql")

    def drop(self, name: str) -> None:
        """Drops a database, throwing its clients out."""
        with self._engine.connect() as connection:
            connection.exec_driver_sql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def close(self) -> None:
        self.drop(self._template)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Postgresql]:
    """One server per test process. A machine without any fails the test and says what to
    install."""
    with postgresql_server() as url:
        server = Postgresql(url)
        yield server
        server.close()


@pytest.fixture
def postgresql_url(postgresql: Postgresql) -> Iterator[str]:
    """An empty PostgreSQL database, not migrated."""
    name = f"t_{secrets.token_hex(6)}"
    yield postgresql.create(name, empty=True)
    postgresql.drop(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without any schema; a file is not made yet."""
    if request.param == "sqlite":
        return str(tmp_path / "new.db")
    url: str = request.getfixturevalue("postgresql_url")
    return url


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty SQLite database at the current schema, to be copied: making one takes a hundred
    times as long."""
    path = tmp_path_factory.mktemp("template") / "spectune.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database at the current schema."""
    if request.param == "sqlite":
        path = tmp_path / "spectune.db"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite:///{path}"
        return
    server: Postgresql = request.getfixturevalue("postgresql")
    name = f"t_{secrets.token_hex(6)}"
    yield server.create(name)
    server.drop(name)


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """An open database at the current schema."""
    with open_database(url) as opened:
        yield opened


@pytest.fixture
def store(database: Database) -> TraceStore:
    """A store over :func:`database`."""
    return TraceStore(database)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair file of a tiny pair (:func:`pairs.make_pair`) with drafts ``near`` and ``far`` and a
    context of 512 tokens."""
    from pairs import make_pair

    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def pair(tiny_pair: Path) -> LoadedPair:
    """:func:`tiny_pair` on a CPU; tests leave it as they find it."""
    return _loaded(tiny_pair)


@pytest.fixture(scope="session", params=["llama", "gpt2"])
def either_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LoadedPair:
    """A tiny pair of each architecture."""
    from pairs import make_pair

    return _loaded(make_pair(tmp_path_factory.mktemp(request.param), request.param))


def _loaded(file: Path) -> LoadedPair:
    from spectune.runtime.loading import load_pair
    from spectune.runtime.pair import read_pair

    return load_pair(read_pair(str(file)), device="cpu")

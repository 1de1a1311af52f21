"""Databases for the tests: every test that asks for ``url``, ``database`` or ``store`` runs on
SQLite and on PostgreSQL."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from databases import Server, postgresql_server, server_binaries
from hypothesis import HealthCheck, settings
from sqlalchemy.engine import make_url

from spectune.db import Database, open_database, upgrade
from spectune.db.base import Base
from spectune.db.migrate import VERSION_TABLE
from spectune.traces.store import TraceStore

if TYPE_CHECKING:  # torch is imported by those tests alone that need it
    from spectune.runtime.loading import LoadedPair
    from spectune.runtime.pair import PairSpec

# Where it is set, every process of the tests would compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Texts are compared where rounding changes none: bench/gpu is for GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# By itself hypothesis fails a property where a case, or making some, takes long.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

TEMPLATE = "spectune_template"
SCHEMA = """
SELECT attrelid::regclass::text, attname::text, atttypid::bigint, attnotnull
FROM pg_attribute WHERE attrelid >= 16384
UNION ALL SELECT 'settings', setconfig::text, 0, true
FROM pg_db_role_setting JOIN pg_database ON pg_database.oid = setdatabase
WHERE datname = current_database()
"""
"""The columns of a PostgreSQL database's tables and indexes, alike in copies of one template, and
its settings."""
END_CLIENTS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()
AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""
SLOWEST = (
    "cli_flow schedules follow db store vllm_agent at_hand transfer imports "
    "tune_server load kill parity shortlist_tuning shortlist_replay python publishing by_prompt "
    "outage record_trees profiling vllm_server processes traces_query schedule_retries "
    "fit_commands docs serve_command serve head_states hot_reload shortlists serving retrace "
    "head_drafting models borders tree_parity pair"
)
"""Test files that are begun first: the longest, as one of them would keep a single worker busy at
the end. While the first tunes, and so compiles what is compiled, eight need none of it."""


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
        _, revision = upgrade(self.create(self._template, empty=True))
        self._spare: list[str] = []
        # TRUNCATE takes several times as long: it makes a hundred files.
        self._emptying = "; ".join(
            (
                *(f'DELETE FROM "{table.name}"' for table in reversed(Base.metadata.sorted_tables)),
                f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'",
                "SELECT setval(seqrelid::regclass, seqstart, false) FROM pg_sequence",
            )
        )
        with self._inside(self._template) as connection:
            self._schema = set(connection.exec_driver_sql(SCHEMA).all())

    def _inside(self, name: str) -> sa.Connection:
        url = self._url.set(database=name)
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        return engine.connect()

    def url(self, name: str) -> str:
        url = self._url.set(database=name).render_as_string(hide_password=False)
        return url.replace("postgresql+psycopg", "postgresql")

    def create(self, name: str, *, empty: bool = False, more: str = "") -> str:
        """Creates a database, with ``more`` options, and returns its URL."""
        template = "template0" if empty else self._template
        with self._engine.connect() as connection:
            connection.exec_driver_sql(f'CREATE DATABASE "{name}" TEMPLATE {template} {more}')
        return self.url(name)

    def drop(self, name: str) -> None:
        """Drops a database, throwing its clients out."""
        with self._engine.connect() as connection:
            connection.exec_driver_sql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def lend(self) -> str:
        """The name of a migrated database without rows. A new one costs every connection to it the
        filling of its catalogue's caches."""
        if self._spare:
            return self._spare.pop()
        name = f"t_{secrets.token_hex(6)}"
        self.create(name)
        return name

    def take_back(self, name: str) -> None:
        """Throws a database's clients out and empties it for the next test. One whose schema a
        test has changed is dropped."""
        with self._inside(name) as connection:
            connection.exec_driver_sql(END_CLIENTS)
            if set(connection.exec_driver_sql(SCHEMA).all()) == self._schema:
                connection.exec_driver_sql(self._emptying)
                self._spare.append(name)
                return
        self.drop(name)

    def close(self) -> None:
        for name in (*self._spare, self._template):
            self.drop(name)


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
    name = server.lend()
    yield server.url(name)
    server.take_back(name)


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
def demo() -> PairSpec:
    """The demo pair."""
    from spectune.runtime.pair import read_pair

    return read_pair("demo")


@pytest.fixture(scope="session")
def llama_pair(tiny_pair: Path) -> LoadedPair:
    """:func:`tiny_pair` on a CPU in float64, where rounding changes no text; tests leave it as they
    find it."""
    return _loaded(tiny_pair, "float64")


@pytest.fixture(scope="session")
def pair(tiny_pair: Path) -> LoadedPair:
    """The pair of most tests, in float32 as commands load it."""
    return _loaded(tiny_pair, "float32")


@pytest.fixture(scope="session")
def gpt2_pair(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    """:func:`llama_pair` of another architecture."""
    from pairs import make_pair

    return _loaded(make_pair(tmp_path_factory.mktemp("gpt2"), "gpt2"), "float64")


@pytest.fixture(scope="session", params=["llama", "gpt2"])
def either_pair(request: pytest.FixtureRequest) -> LoadedPair:
    """A tiny pair of each architecture. pytest makes a fixture anew whenever its parameter changes,
    so the pairs are fixtures of their own."""
    found: LoadedPair = request.getfixturevalue(f"{request.param}_pair")
    return found


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton runs its kernels in its interpreter, on the CPU. What was imported for its compiler
    is put aside meanwhile: functions of Triton itself are declared for either as they are."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compiler = _without_triton()
    sys.modules.update(_INTERPRETER)
    yield
    _INTERPRETER.update(_without_triton())
    sys.modules.update(compiler)


_INTERPRETER: dict[str, ModuleType] = {}


def _without_triton() -> dict[str, ModuleType]:
    """Triton's modules, which are forgotten; its library in C stays."""
    names = [x for x in sys.modules if x.split(".")[0] == "triton" and "._C" not in x]
    return {name: sys.modules.pop(name) for name in names}


def _loaded(file: Path, dtype: str) -> LoadedPair:
    from spectune.runtime.loading import load_pair
    from spectune.runtime.pair import read_pair

    return load_pair(read_pair(str(file)), device="cpu", dtype=dtype)


@pytest.fixture
def server() -> Iterator[Server]:
    """A PostgreSQL server that the test may stop and start."""
    binaries = server_binaries()
    if binaries is None:
        pytest.skip("a server that can be stopped needs PostgreSQL's own programs")
    with closing(Server(binaries)) as server:
        server.start()
        yield server

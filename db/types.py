"""Column types that mean the same on SQLite and PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, DateTime, type_coerce
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC: aware datetimes in (naive ones raise ValueError), aware UTC datetimes out.

    SQLite has no time zones, so the moment is stored there as naive UTC text that sorts in time
    order.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a moment needs a time zone: {value!r}; write datetime.now(UTC)")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        moment: datetime = value
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


class Unreadable(str):
    """What stands in a column of JSON and cannot be read as such; ``problem`` says why in a few
    words."""

    problem: str

    @classmethod
    def of(cls, text: str, problem: str) -> Unreadable:
        made = cls(text)
        made.problem = problem
        return made


class OutsideJson(TypeDecorator[Any]):
    """JSON that anybody may have written: reading it never fails. What is no JSON, or more than
    this program can hold (whole numbers of thousands of digits, deep nesting), comes out as
    :class:`Unreadable`."""

    impl = JSON
    cache_ok = True

    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        return type_coerce(_AsText(column), self)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        return _read_json


class _AsText(FunctionElement[Any]):
    """A column as it is stored: drivers would otherwise read JSON, or text, while fetching, where
    one bad row costs all of them."""

    inherit_cache = True


@compiles(_AsText)
def _as_text(element: _AsText, compiler: Any, **how: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **how)} AS TEXT)"


@compiles(_AsText, "sqlite")
def _as_bytes(element: _AsText, compiler: Any, **how: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **how)} AS BLOB)"


def _read_json(stored: str | bytes | None) -> Any:
    if stored is None:
        return None
    text = stored if isinstance(stored, str) else stored.decode(errors="backslashreplace")
    try:
        return json.loads(stored)
    except RecursionError:
        return Unreadable.of(text, "cannot be read as JSON (it is nested too deeply)")
    except ValueError as error:
        return Unreadable.of(text, f"cannot be read as JSON ({error})")

"""The declarative base of all tables, and column types that mean the same on SQLite and
PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from sqlalchemy import JSON, DateTime, Double, MetaData, String, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
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

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or value.tzinfo is not None:
            return value and value.astimezone(UTC)
        return value.replace(tzinfo=UTC)


Document = dict[str, Any]
Str16 = Annotated[str, 16]
Str32 = Annotated[str, 32]
Str64 = Annotated[str, 64]
Str200 = Annotated[str, 200]


class Base(DeclarativeBase):
    """Base of every table of the project."""

    metadata = MetaData(
        # Constraint names, so that migrations can alter them on every database.
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text,
        Str16: String(16),
        Str32: String(32),
        Str64: String(64),
        Str200: String(200),
        float: Double,
        datetime: UtcDateTime,
        Document: JSON,
        list[Any]: JSON,
    }


class Identity(Base):
    """The one row that tells a database from others, made when it is first asked for."""

    __tablename__ = "spectune_database"

    id: Mapped[Str32] = mapped_column(primary_key=True)

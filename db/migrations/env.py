"""Run by Alembic for every command; the connection comes from :mod:`db.migrate`."""

from __future__ import annotations

from alembic import context

from spectune.db.migrate import VERSION_TABLE

# Inside the transaction that the connection already has.
context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
with context.begin_transaction():
    context.run_migrations()

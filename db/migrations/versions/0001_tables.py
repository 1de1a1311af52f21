"""Makes the tables.

They are made as the program declares them, since nothing has been released: the first change after
a release brings an explicit revision, and writes these tables out here.
"""

from __future__ import annotations

from alembic import op

from spectune.db.migrate import all_tables

revision = "0001"
down_revision = None


def upgrade() -> None:
    all_tables().create_all(op.get_bind())

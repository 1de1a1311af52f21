"""Schedules that cannot be read are parked with a reason.

Revision 0003, after 0002.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    # Not in a batch, which would copy the table on SQLite: adding a column needs none.
    op.add_column("schedule", sa.Column("parked", sa.Text(), nullable=True))

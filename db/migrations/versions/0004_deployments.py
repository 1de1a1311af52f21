"""Publications belong to a deployment, and say which sampling they were tuned for.

Revision 0004, after 0003.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    # Not in a batch, which would copy the table on SQLite: adding columns needs none.
    op.add_column(
        "publication",
        sa.Column("deployment", sa.String(length=100), server_default="default", nullable=False),
    )
    op.add_column("publication", sa.Column("sampling", sa.JSON(), nullable=True))
    op.drop_index("ix_publication_of", table_name="publication")
    op.create_index(
        "ix_publication_of", "publication", ["deployment", "pair_id", "device", "id"], unique=False
    )

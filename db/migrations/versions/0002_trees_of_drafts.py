"""Panoramas of draft trees: how wide they are, and which growths they cover.

Revision 0002, after 0001.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("panorama_chunk", schema=None) as batch_op:
        batch_op.add_column(sa.Column("width", sa.Integer(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("covers", sa.JSON(), server_default="[]", nullable=False))

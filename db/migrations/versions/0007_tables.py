"""Makes the tables of this program.

Nothing has been released, so the tables are the first schema: whoever changes them gives this
revision a new number, and databases of another number are refused.
"""

from __future__ import annotations

from alembic import op

import spectune.db.schedules
import spectune.traces.tables  # noqa: F401  # their tables are on the metadata
from spectune.db.base import metadata

revision = "0007"
down_revision = None


def upgrade() -> None:
    metadata.create_all(op.get_bind(), checkfirst=False)

"""Alembic's environment and the revisions, applied by :mod:`db.migrate`."""

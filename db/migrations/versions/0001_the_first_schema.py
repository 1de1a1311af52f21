"""The first schema.

Revision 0001, after nothing. Constraints and indexes without a name have that of
:data:`db.base.NAMING`.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

MOMENT = sa.DateTime(timezone=True)


def _columns(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _to(table: str, kind: Any, *, ondelete: str | None = None, **how: Any) -> sa.Column[Any]:
    """The id of a row of another table."""
    return sa.Column(f"{table}_id", kind, sa.ForeignKey(f"{table}.id", ondelete=ondelete), **how)


def _packed() -> list[sa.Column[Any]]:
    return [
        *_columns(sa.Integer(), "schema_version"),
        *_columns(sa.String(length=16), "codec"),
        *_columns(sa.LargeBinary(), "sha256", "data"),
    ]


def _of_trajectory(name: str) -> sa.ForeignKeyConstraint:
    columns = ["recording_id", "ordinal"]
    return sa.ForeignKeyConstraint(
        columns, ["trajectory.recording_id", "trajectory.ordinal"], name=name, ondelete="CASCADE"
    )


def upgrade() -> None:
    op.create_table(
        "pair",
        sa.Column("id", sa.String(length=64), primary_key=True),
        sa.Column("name", sa.Text(), nullable=False, index=True),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
    )
    op.create_table(
        "policy",
        sa.Column("id", sa.String(length=64), primary_key=True),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
    )
    op.create_table(
        "schedule",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(length=200), nullable=False, unique=True),
        sa.Column("cron", sa.String(length=200)),
        sa.Column("interval_s", sa.BigInteger()),
        sa.Column("tz", sa.String(length=64), nullable=False),
        *_columns(sa.BigInteger(), "anchor_at", "next_fire_at"),
        sa.Column("misfire_grace_s", sa.BigInteger()),
        sa.Column("coalesce", sa.Boolean(), nullable=False),
        sa.Column("max_instances", sa.Integer()),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("budget_s", sa.Double()),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.CheckConstraint("(cron IS NULL) <> (interval_s IS NULL)", name="cron_or_interval"),
        sa.CheckConstraint("interval_s IS NULL OR interval_s > 0", name="interval_positive"),
        sa.Index("ix_schedule_due", "enabled", "next_fire_at"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "workload",
        sa.Column("id", sa.String(length=64), primary_key=True),
        sa.Column("name", sa.Text(), nullable=False, index=True),
        sa.Column("n_requests", sa.Integer(), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
    )
    op.create_table(
        "artifact",
        sa.Column("id", sa.String(length=32), primary_key=True),
        sa.Column("kind", sa.String(length=64), nullable=False, index=True),
        _to("pair", sa.String(length=64)),
        sa.Column("provenance", sa.JSON(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        *_packed(),
    )
    op.create_table(
        "latency_profile",
        sa.Column("id", sa.String(length=32), primary_key=True),
        _to("pair", sa.String(length=64), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("dtype", sa.String(length=16), nullable=False),
        *_columns(sa.JSON(), "document", "environment"),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Index("ix_latency_profile_of", "pair_id", "device", "dtype", "created_at"),
    )
    op.create_table(
        "publication",
        sa.Column("id", sa.Integer(), primary_key=True),
        _to("pair", sa.String(length=64), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        _to("policy", sa.String(length=64), nullable=False),
        sa.Column("supersedes", sa.Integer(), sa.ForeignKey("publication.id")),
        sa.Column("evidence", sa.JSON(), nullable=False),
        *_columns(sa.Text(), "actor", "reason"),
        sa.Column("idempotency_key", sa.String(length=200), unique=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Index("ix_publication_of", "pair_id", "device", "id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "recording",
        sa.Column("id", sa.String(length=32), primary_key=True),
        _to("pair", sa.String(length=64), nullable=False, index=True),
        _to("workload", sa.String(length=64), index=True),
        *_columns(sa.String(length=16), "source", "state"),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("max_new_tokens", sa.Integer(), nullable=False),
        sa.Column("verifier", sa.String(length=16), nullable=False),
        *_columns(sa.JSON(), "options", "progress"),
        sa.Column("spec_sha256", sa.String(length=64), nullable=False, index=True),
        sa.Column("created_at", MOMENT, nullable=False, index=True),
        sa.Column("finished_at", MOMENT),
    )
    op.create_table(
        "run",
        sa.Column("id", sa.String(length=32), primary_key=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        _to("pair", sa.String(length=64), nullable=False, index=True),
        _to("policy", sa.String(length=64), nullable=False, index=True),
        sa.Column("workload_id", sa.String(length=64)),
        sa.Column("recording_id", sa.String(length=32)),
        sa.Column("profile_id", sa.String(length=32)),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("dtype", sa.String(length=16), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        *_columns(sa.JSON(), "options", "outcome"),
        sa.Column("created_at", MOMENT, nullable=False, index=True),
    )
    op.create_table(
        "schedule_fire",
        _to("schedule", sa.Integer(), ondelete="CASCADE", primary_key=True),
        sa.Column("fire_at", sa.BigInteger(), primary_key=True),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("noticed_at", sa.Double(), nullable=False),
        sa.CheckConstraint(
            "outcome IN ('enqueued', 'misfired', 'coalesced', 'skipped')", name="outcome"
        ),
    )
    op.create_table(
        "schedule_job",
        sa.Column("id", sa.Integer(), primary_key=True),
        _to("schedule", sa.Integer(), ondelete="CASCADE", nullable=False),
        sa.Column("fire_at", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        *_columns(sa.Integer(), "attempt", "max_attempts"),
        sa.Column("lease_owner", sa.String(length=200)),
        sa.Column("lease_until", sa.Double()),
        sa.Column("idempotency_key", sa.String(length=300), nullable=False, unique=True),
        sa.Column("result", sa.JSON(none_as_null=True)),
        sa.Column("error", sa.Text()),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double()),
        sa.Column("finished_at", sa.Double()),
        sa.CheckConstraint("state IN ('queued', 'running', 'done', 'failed')", name="state"),
        sa.Index("ix_schedule_job_claim", "state", "fire_at"),
        sa.Index("ix_schedule_job_schedule", "schedule_id", "fire_at"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "study",
        sa.Column("id", sa.String(length=32), primary_key=True),
        _to("pair", sa.String(length=64), nullable=False, index=True),
        sa.Column("recording_id", sa.String(length=32)),
        sa.Column("sampler", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("n_trials", sa.Integer(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        *_packed(),
    )
    op.create_table(
        "acknowledgement",
        sa.Column("id", sa.Integer(), primary_key=True),
        _to("publication", sa.Integer(), ondelete="CASCADE", nullable=False, index=True),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", MOMENT, nullable=False),
    )
    op.create_table(
        "trajectory",
        _to("recording", sa.String(length=32), ondelete="CASCADE", primary_key=True),
        sa.Column("ordinal", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("category", sa.Text(), nullable=False, index=True),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("max_new_tokens", sa.Integer(), nullable=False),
        *_columns(sa.String(length=16), "verifier", "finish"),
        sa.Column("stop_strings", sa.JSON(), nullable=False),
        *_columns(sa.Integer(), "n_prompt", "n_output", "rounds", "drafted", "accepted"),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False, index=True),
        *_packed(),
    )
    op.create_table(
        "panorama_chunk",
        sa.Column("recording_id", sa.String(length=32), primary_key=True),
        sa.Column("ordinal", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("draft", sa.String(length=128), primary_key=True),
        sa.Column("kind", sa.String(length=16), primary_key=True),
        *_columns(sa.Integer(), "gamma_max", "n", "agree_count", "none_count"),
        sa.Column("acceptance", sa.Double(), nullable=False),
        *_columns(sa.JSON(), "at_risk", "survived"),
        *_packed(),
        _of_trajectory("fk_panorama_chunk_trajectory"),
    )
    op.create_table(
        "step_chunk",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("recording_id", sa.String(length=32)),
        sa.Column("run_id", sa.String(length=32)),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        *_columns(sa.Text(), "request_id", "category"),
        sa.Column("policies", sa.JSON(), nullable=False),
        *_columns(sa.Integer(), "rounds", "drafted", "accepted", "emitted"),
        sa.Column("seconds", sa.Double(), nullable=False),
        *_columns(sa.JSON(), "at_risk", "survived"),
        *_packed(),
        sa.CheckConstraint("(recording_id IS NULL) <> (run_id IS NULL)", name="one_owner"),
        _of_trajectory("fk_step_chunk_trajectory"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], ondelete="CASCADE"),
        sa.UniqueConstraint("recording_id", "ordinal"),
        sa.UniqueConstraint("run_id", "ordinal"),
    )

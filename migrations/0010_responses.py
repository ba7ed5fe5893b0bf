"""Stored responses: what they were given, what they are, and the events of those that are written in the background."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("previous_id", sa.Text),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("is_background", sa.Boolean, nullable=False),
        sa.Column("input", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False, index=True),
        sa.Column("renewed_at", sa.BigInteger, nullable=False),
    )
    op.create_index("responses_tenant", "responses", ["tenant_id", "created_at"])
    is_open = sa.text("status IN ('queued', 'in_progress')")
    op.create_index("responses_open", "responses", ["renewed_at"], sqlite_where=is_open, postgresql_where=is_open)
    op.create_table(
        "response_events",
        sa.Column("response_id", sa.Text, primary_key=True),
        sa.Column("first", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("num_events", sa.BigInteger, nullable=False),
        sa.Column("events", sa.LargeBinary, nullable=False),
    )

"""Sinks: how delivery to each receiver stands, which events it has refused, and whose rows it was not sent."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "sink_states",
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("num_rows", sa.BigInteger, nullable=False),
        sa.Column("num_events", sa.BigInteger, nullable=False),
        sa.Column("delivered_at", sa.BigInteger),
        sa.Column("num_tries", sa.BigInteger, nullable=False),
        sa.Column("retry_at", sa.Double, nullable=False),
        sa.Column("last_error", sa.Text),
        sa.Column("last_error_at", sa.BigInteger),
    )
    op.create_table(
        "sink_failures",
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("event_id", sa.Text, primary_key=True),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("num_tries", sa.BigInteger, nullable=False),
        sa.Column("failed_at", sa.BigInteger, nullable=False),
        sa.Column("is_due", sa.Boolean, nullable=False),
    )
    op.create_table(
        "sink_skips",
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("num_rows", sa.BigInteger, nullable=False),
        sa.Column("first_at", sa.BigInteger, nullable=False),
        sa.Column("last_at", sa.BigInteger, nullable=False),
    )

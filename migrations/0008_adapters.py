"""Adapters: which are served beside which model, under names of their own. A name stays with its model for good, since
the ledger's rows bear it."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "adapters",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("adapter_id", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("rank", sa.BigInteger, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("loaded_at", sa.BigInteger, nullable=False),
        sa.Column("loaded_by", sa.Text, nullable=False),
        sa.Column("unloaded_at", sa.BigInteger),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )

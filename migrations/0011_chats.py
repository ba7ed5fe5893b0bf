"""Stored chat completions: what was asked, what was answered, and the metadata by which they are looked for."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "chats",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("messages", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("labels", sa.LargeBinary, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False, index=True),
    )
    op.create_index("chats_tenant", "chats", ["tenant_id", "id"])
    op.create_table(
        "chat_labels",
        sa.Column("chat_id", sa.Text, primary_key=True),
        sa.Column("key", sa.LargeBinary, primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )

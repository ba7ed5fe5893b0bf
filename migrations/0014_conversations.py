"""Conversations: their metadata, who adds to one now, and their items in order."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "conversations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("labels", sa.LargeBinary, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False, index=True),
        sa.Column("held_by", sa.Text),
        sa.Column("held_until", sa.BigInteger, nullable=False),
    )
    op.create_index("conversations_tenant", "conversations", ["tenant_id", "expires_at"])
    op.create_table(
        "conversation_items",
        sa.Column("conversation_id", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("item", sa.LargeBinary, nullable=False),
    )
    op.create_index("conversation_items_id", "conversation_items", ["conversation_id", "id"], unique=True)

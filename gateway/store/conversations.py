"""Tables of conversations, as the migrations leave them."""

from __future__ import annotations

import sqlalchemy as sa

from gateway.store.tables import metadata

conversations = sa.Table(
    "conversations",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, nullable=False),
    sa.Column("labels", sa.LargeBinary, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False, index=True),
    sa.Column("held_by", sa.Text),
    sa.Column("held_until", sa.BigInteger, nullable=False),
    sa.Index("conversations_tenant", "tenant_id", "expires_at"),
)
"""``labels`` is the metadata, as JSON. Times are Unix seconds. Until ``held_until`` it waits for the answer of the
response ``held_by``."""
conversation_items = sa.Table(
    "conversation_items",
    metadata,
    sa.Column("conversation_id", sa.Text, primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("item", sa.LargeBinary, nullable=False),
    sa.Index("conversation_items_id", "conversation_id", "id", unique=True),
)
"""``item`` is JSON. By their numbers they are in order, which may have gaps."""

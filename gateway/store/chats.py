"""Tables of stored chat completions, as the migrations leave them."""

from __future__ import annotations

import sqlalchemy as sa

from gateway.store.tables import metadata

chats = sa.Table(
    "chats",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("messages", sa.LargeBinary, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("labels", sa.LargeBinary, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False, index=True),
    sa.Index("chats_tenant", "tenant_id", "id"),
)
"""``messages``, ``body`` and ``labels`` are JSON: what was asked, what was answered, and the metadata, which is
``null`` where there is none. Times are Unix seconds; ids are in the order of time."""
chat_labels = sa.Table(
    "chat_labels",
    metadata,
    sa.Column("chat_id", sa.Text, primary_key=True),
    sa.Column("key", sa.LargeBinary, primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
)
"""The metadata again, to be looked for, in UTF-8: a text of PostgreSQL has no NUL."""

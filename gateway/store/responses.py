"""Tables of stored responses, as the migrations leave them.

Times are Unix seconds. What a row holds is a tenant's: whoever reads it names the tenant.
"""

from __future__ import annotations

import sqlalchemy as sa

from gateway.store.tables import metadata

responses = sa.Table(
    "responses",
    metadata,
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
    sa.Index("responses_tenant", "tenant_id", "created_at"),
)
"""``input`` and ``body`` are JSON: a list of items, and the response object. ``renewed_at``: when the gateway that
writes it has last said so."""
sa.Index("responses_open", responses.c.renewed_at)
response_events = sa.Table(
    "response_events",
    metadata,
    sa.Column("response_id", sa.Text, primary_key=True),
    sa.Column("first", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("num_events", sa.BigInteger, nullable=False),
    sa.Column("events", sa.LargeBinary, nullable=False),
)
"""What a response in the background said, some events a row, compressed by zlib; ``first`` is the sequence number of
the first of them."""

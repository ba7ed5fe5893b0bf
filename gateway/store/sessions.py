"""The table of the console's sessions, as the migrations leave it. Times are Unix seconds."""

from __future__ import annotations

import sqlalchemy as sa

from gateway.store.tables import metadata

sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("hash", sa.LargeBinary, primary_key=True),
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False, index=True),
    sa.Column("key_hash", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False, index=True),
)
"""``hash`` is that of the cookie, ``key_hash`` that of the admin key, both under the install's secret."""

"""Tables of files, of uploads and of batches, as the migrations leave them. Times are Unix seconds; the ids are in the
order of making. What a file, or a part of one, says lies in the directory of the files, under its id."""

from __future__ import annotations

import sqlalchemy as sa

from gateway.store.tables import metadata

files = sa.Table(
    "files",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, index=True),
)
"""A row without its file is one that was being deleted; a file without its row was never finished."""
uploads = sa.Table(
    "uploads",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("file_expires_s", sa.BigInteger),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False, index=True),
    # What it became, and a digest of what was said to complete it.
    sa.Column("file_id", sa.Text),
    sa.Column("completion", sa.LargeBinary),
)
"""``num_bytes`` and ``file_expires_s``: of the file that it is to be."""
upload_parts = sa.Table(
    "upload_parts",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("upload_id", sa.Text, sa.ForeignKey("uploads.id"), nullable=False, index=True),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
)
"""Of uploads that are pending alone."""
batches = sa.Table(
    "batches",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("input_file_id", sa.Text, nullable=False, index=True),
    sa.Column("completion_window", sa.Text, nullable=False),
    sa.Column("metadata", sa.Text),
    sa.Column("output_expires_s", sa.BigInteger),
    sa.Column("model", sa.Text),
    sa.Column("status", sa.Text, nullable=False, index=True),
    sa.Column("errors", sa.Text),
    sa.Column("output_file_id", sa.Text),
    sa.Column("error_file_id", sa.Text),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    *(
        sa.Column(name, sa.BigInteger)
        for name in (
            "in_progress_at",
            "finalizing_at",
            "completed_at",
            "failed_at",
            "expired_at",
            "cancelling_at",
            "cancelled_at",
        )
    ),
    *(
        sa.Column(name, sa.BigInteger, nullable=False)
        for name in (
            "num_lines",
            "num_completed",
            "num_failed",
            "num_prompt_tokens",
            "num_cached_tokens",
            "num_completion_tokens",
            "num_reasoning_tokens",
        )
    ),
    sa.Column("owner", sa.Text),
    sa.Column("leased_until", sa.BigInteger),
)
"""``key_id``: with which it was made, and as whom its lines ask. ``owner``: the gateway that works on it, until
``leased_until`` unless it renews that. ``errors``: a JSON list."""

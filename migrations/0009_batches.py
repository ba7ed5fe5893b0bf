"""Files that tenants upload, and batches of requests in them that are answered when there is room. Their bytes are on
the disk; here is whose they are and how far the batches have come, where every gateway sees it."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, index=True),
    )
    op.create_table(
        "batches",
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
        sa.Column("in_progress_at", sa.BigInteger),
        sa.Column("finalizing_at", sa.BigInteger),
        sa.Column("completed_at", sa.BigInteger),
        sa.Column("failed_at", sa.BigInteger),
        sa.Column("expired_at", sa.BigInteger),
        sa.Column("cancelling_at", sa.BigInteger),
        sa.Column("cancelled_at", sa.BigInteger),
        sa.Column("num_lines", sa.BigInteger, nullable=False),
        sa.Column("num_completed", sa.BigInteger, nullable=False),
        sa.Column("num_failed", sa.BigInteger, nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_reasoning_tokens", sa.BigInteger, nullable=False),
        sa.Column("owner", sa.Text),
        sa.Column("leased_until", sa.BigInteger),
    )

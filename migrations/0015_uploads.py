"""Uploads: files that come in parts. The bytes of a part are on the disk; here is whose it is, where every gateway sees
it."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("file_expires_s", sa.BigInteger),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "upload_parts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("upload_id", sa.Text, sa.ForeignKey("uploads.id"), nullable=False, index=True),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )

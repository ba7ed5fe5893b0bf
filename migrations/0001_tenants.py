"""Whoever asks must be known: tenants, the keys they ask with, and the secret under which keys are kept.

A key itself is never stored. Its keyed hash finds it; its prefix and last four characters let people tell keys apart.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "install",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("key_secret", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.CheckConstraint("id = 1", name="install_is_one_row"),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("disabled_at", sa.BigInteger),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), index=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("last_four", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("revoked_at", sa.BigInteger),
        sa.CheckConstraint(
            "kind = 'admin' AND tenant_id IS NULL OR kind = 'api' AND tenant_id IS NOT NULL",
            name="keys_have_their_kind",
        ),
    )
